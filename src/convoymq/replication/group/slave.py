"""A slave's side of replication: it compares its log with the master's, then appends what comes.

| state | input | next |
|---|---|---|
| READY | the logs agree, or the master compares nothing | connects; TRANSFER |
| READY | the master may yet fetch what it lacks, or cannot be reached | READY, after a while |
| READY | its own surplus was acknowledged to nobody: it is cut | READY, at once |
| READY | both may have acknowledged messages | SUSPEND |
| TRANSFER | silence, a block that does not belong at the log's end, the end of the link | READY |
| any | another master, or the same again | READY |
| any | nobody is to be followed | SHUTDOWN |

A slave reports what it may lose no more: with `flushes`, what its disk has. Invariant: bytes are
appended at the end of the log only, and a list of lives is durable before the first byte behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from convoymq.model.errors import PeerError
from convoymq.replication.group.lives import Book, decode_lives, life_at
from convoymq.replication.group.member import Member, tail_of
from convoymq.replication.group.stream import WORD, BlockReader, hello, is_record
from convoymq.replication.group.tails import (
    STOPS,
    Common,
    Step,
    common_end,
    slave_step,
    whole_end,
)
from convoymq.replication.group.types import Ask, GroupSettings, Log, SlaveState, Tail

UNCHECKED = -1


class Slave(Member):
    """See the module text. All times are of one monotonic clock.

    Args:
        save: persists the book; it is durable on return.
        session: a number that no other run of the process has.
    """

    def __init__(
        self,
        number: int,
        settings: GroupSettings,
        log: Log,
        book: Book,
        save: Callable[[Book], None],
        *,
        session: int,
    ) -> None:
        super().__init__(book, save)
        self.number = number
        self.settings = settings
        self.log = log
        self.state = SlaveState.SHUTDOWN
        self.reason = ""
        """Reason of a suspension, or of the last disconnection."""
        self.cut_bytes = 0
        """Of surplus, since the start."""
        self._session = session
        self._due_ms = 0
        """Time from which on it may connect."""
        self._master_session: int | None = None
        """Session that it compared with; UNCHECKED: the master compares nothing."""
        self._reader = BlockReader()
        self._heard_ms = 0
        self._reported = -1
        self._reported_ms = 0
        self._is_whole = True

    def tail(self, ask: Ask) -> Tail:
        """Answers another member's question."""
        return tail_of(self.log, ask, self.number, self._session, self._book, takes_writes=False)

    # --- before the link --------------------------------------------------------------------

    def follow(self, now_ms: int) -> None:
        """Begins to follow a master; the former link has ended."""
        self.state, self.reason, self._due_ms = SlaveState.READY, "", now_ms

    def shut_down(self) -> None:
        """Nobody is to be followed."""
        self.state = SlaveState.SHUTDOWN

    def is_due(self, now_ms: int) -> bool:
        """Returns whether to compare and connect now."""
        if self.state is not SlaveState.READY or now_ms < self._due_ms:
            return False
        # The first report says where the log ends, and counts as an acknowledgement of it.
        return not self.settings.flushes or self.log.flushed >= self.log.max_offset

    def compare(self, now_ms: int, address: str) -> Generator[Ask, Tail, bool]:
        """Compares with the master at an address; yields questions and is sent answers. Returns
        whether to connect."""
        self._master_session = None
        while True:
            # A part of a message is in nobody's acknowledgement.
            end = whole_end(self.log)
            if end < self.log.max_offset:
                self.log.truncate(end)
            common = yield from common_end(self.log)
            step = slave_step(self.log, self._book.lives, common)
            master = common.other
            if step is Step.CUT and self._is_of_another(common, address):
                step = Step.FORKED
            if step is Step.CUT:
                self.cut_bytes += self.log.max_offset - common.end
                self.log.truncate(common.end)
                continue
            if step in STOPS:
                self.reason = f"{step.value}, from {common.end} on"
                self.state = SlaveState.SUSPEND
                return False
            if step is Step.WAIT:
                self._due_ms = now_ms + self.settings.wait_ms
                return False
            self._write(Book(lives=master.lives, master=address))
            self._master_session = master.session
            return True

    def _is_of_another(self, common: Common, address: str) -> bool:
        """Returns whether this slave has its surplus of another master: the life of this one may be
        proven by its own log, in which those messages never were."""
        wrote = life_at(self._book.lives, common.end)
        is_heard_of = any(life.number == wrote.number for life in common.other.lives)
        return not is_heard_of and self._book.master not in ("", address)

    def on_no_comparison(self) -> None:
        """The master is of RocketMQ's: whose lives its log has is not known."""
        self._write(Book())
        self._master_session = UNCHECKED

    # --- the link ---------------------------------------------------------------------------

    def on_connected(self, now_ms: int) -> bytes:
        """The link stands. Returns what to send first."""
        assert self._master_session is not None, "connected without a comparison"
        self.state = SlaveState.TRANSFER
        self._reader = BlockReader()
        self._heard_ms = now_ms
        self._reported = -1
        # A message of RocketMQ's may have come in part.
        self._is_whole = whole_end(self.log) == self.log.max_offset
        first = self._report(now_ms) or b""
        if self._master_session == UNCHECKED:
            return first
        return hello(self.number, self._master_session) + first

    def on_disconnected(self, reason: str, now_ms: int) -> None:
        """The link has ended, could not be made, or the comparison failed."""
        if self.state is not SlaveState.SHUTDOWN:
            self.state, self.reason, self._due_ms = (
                SlaveState.READY,
                reason,
                now_ms + self.settings.retry_ms,
            )

    def on_data(self, data: bytes | memoryview, now_ms: int) -> None:
        """Bytes of the master arrived. Raises PeerError: the link has to end."""
        self._heard_ms = now_ms
        for offset, size, block in self._reader.feed(data):
            if size < 0:
                if self._master_session == UNCHECKED:
                    raise PeerError(f"a block of {size} bytes")
                self._write(Book(lives=decode_lives(block), master=self._book.master))
                continue
            is_empty = self.log.max_offset == self.log.min_offset
            if offset != self.log.max_offset and not is_empty:
                raise PeerError(f"a block at {offset}, the log ends at {self.log.max_offset}")
            if block:
                if self._is_whole and not is_record(block, offset):
                    raise PeerError(f"what the master has at {offset} is no message")
                self._is_whole = False
                self.log.append_raw(offset, block)

    def report(self, now_ms: int) -> bytes | None:
        """Returns the report that is due; None: none is."""
        if self.state is not SlaveState.TRANSFER:
            return None
        return self._report(now_ms)

    def _report(self, now_ms: int) -> bytes | None:
        log = self.log
        end = log.flushed if self.settings.flushes else log.max_offset
        if log.max_offset == log.min_offset:
            end = 0
        if end <= self._reported and now_ms - self._reported_ms < self.settings.heartbeat_ms:
            return None
        self._reported = max(self._reported, end)
        self._reported_ms = now_ms
        return WORD.pack(self._reported)

    def silent_ms(self, now_ms: int) -> int | None:
        """Returns how long ago the master was heard; None: nothing is transferred."""
        return now_ms - self._heard_ms if self.state is SlaveState.TRANSFER else None

    @property
    def times_ms(self) -> tuple[int, int]:
        """Returns when the master was heard, and when it had a report; 0: never."""
        return self._heard_ms, self._reported_ms

    def is_silent(self, now_ms: int) -> bool:
        """Returns whether the link has to end: nothing arrived for too long."""
        return (self.silent_ms(now_ms) or 0) >= self.settings.silence_ms
