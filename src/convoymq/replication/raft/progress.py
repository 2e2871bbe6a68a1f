# cython: annotation_typing=False
"""Progress of one other replica, as a leader knows it: its log, and what is under way to it.

| state     | sends                     | leaves by                                      |
| PROBE     | one append, then waits    | success -> REPLICATE; entries gone -> SNAPSHOT |
| REPLICATE | appends within the window | reject, link broken -> PROBE; gone -> SNAPSHOT |
| SNAPSHOT  | nothing                   | installed, failed -> PROBE                     |

Invariants: match < next; in_flight_bytes is the sum of what `_sent` holds.
"""

from __future__ import annotations

from collections import deque

from convoymq.replication.raft.types import PROBE, REPLICATE, SNAPSHOT


class Progress:
    """Progress of one peer."""

    def __init__(self, node: int, next_index: int, voter: bool, window_bytes: int) -> None:
        self.node = node
        self.voter = voter
        #: It said that it may not vote yet: no reason to give it one.
        self.voteless = False
        self.state = PROBE
        self.match = 0
        self.next_index = next_index
        self.waiting = False
        self._probed = 0
        #: Highest commit index that was sent to it.
        self.commit_sent = 0
        self.in_flight_bytes = 0
        self.window_bytes = window_bytes
        self.connected = False
        #: Nothing waits for this one: its entries may be sent together (ADR 0011).
        self.is_deferred = False
        #: Bytes of entries held back for that.
        self.held_bytes = 0
        #: Since when (monotonic ms) nothing it owes has come; kept by the shell.
        self.stalled_ms = 0
        self.stalled_match = 0
        #: What was committed at `goal_ms` (monotonic): kept by the shell, to see whether the peer
        #: lags behind.
        self.goal = 0
        self.goal_ms = 0
        #: When the peer was told that it lags.
        self.lag_told_ms = 0
        #: Since when (monotonic ms) it lacks something and made no progress; 0 = not. Kept by the
        #: shell's tick.
        self.owes_ms = 0
        #: So for too long: it does not count for a majority.
        self.silent = False
        self._sent: deque[tuple[int, int]] = deque()

    def may_send(self) -> bool:
        """Returns whether an append may go out now."""
        if not self.connected or self.state == SNAPSHOT:
            return False
        if self.state == PROBE:
            return not self.waiting
        return self.in_flight_bytes < self.window_bytes

    def sent(self, last: int, size: int) -> None:
        """An append from `next_index` up to `last` (bytes `size`; 0 = no entries) went out."""
        assert last >= self.next_index if size else last == self.next_index - 1, "a gap in appends"
        self.waiting = True
        self._probed = self.next_index - 1
        if size:
            self.held_bytes = 0
            self.next_index = last + 1
            self.in_flight_bytes += size
            self._sent.append((last, size))

    def acknowledged(self, index: int) -> bool:
        """The peer has everything up to `index`, durably. Returns True when that is news."""
        self.waiting = False
        sent = self._sent
        while sent and sent[0][0] <= index:
            self.in_flight_bytes -= sent.popleft()[1]
        assert self.in_flight_bytes >= 0, "more was acknowledged than sent"
        if self.state == PROBE:
            self.state = REPLICATE
        if index >= self.next_index:
            self.next_index = index + 1
        if index <= self.match:
            return False
        self.match = index
        assert self.match < self.next_index, "it holds what it was not sent"
        return True

    def rejected(self, previous: int, hint: int, was_reset: bool) -> bool:
        """The peer's log does not hold (or contradicts) the entry `previous`, but may agree up to
        `hint`. Returns False for an answer to something older."""
        if was_reset:
            self.match = 0
        elif self.state == PROBE:
            if not self.waiting or previous != self._probed:
                return False
            if previous <= self.match:
                # It lacks what it had acknowledged: its disk has lost the end of the log.
                self.match = min(previous - 1, hint)
        elif self.state == SNAPSHOT or previous <= self.match:
            return False
        self.probe(max(self.match, min(previous - 1, hint)) + 1)
        return True

    def probe(self, next_index: int) -> None:
        """Finds out anew where the logs agree, beginning before `next_index`."""
        assert next_index > 0, "entries count from 1"
        self.state = PROBE
        self.next_index = next_index
        self.forget_sent()

    def snapshot(self) -> None:
        """The peer needs a snapshot."""
        self.state = SNAPSHOT
        self.forget_sent()

    def forget_sent(self) -> None:
        """Nothing is under way any more."""
        self.waiting = False
        self._sent.clear()
        self.in_flight_bytes = 0
        self.stalled_ms = 0
