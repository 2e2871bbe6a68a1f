"""Sending a snapshot to a follower in chunks, and receiving it.

| message     | fields after kind, term, id                                | answer      |
| BEGIN       | index, term of the index, membership, bytes of the state,  | ACKNOWLEDGE |
|             | machine version                                            |             |
| STATE       | offset, bytes                                              | ACKNOWLEDGE |
| ENTRIES     | index of the entry sent before (0: none), entries          | ACKNOWLEDGE |
| END         | last entry's index (0: none)                               | DONE        |
| ACKNOWLEDGE | bytes of the state, index of the last entry that it has    |             |
| DONE        | index, 0 = failed                                          |             |

The state goes first, then the live entries at or below the index, ascending: a snapshot holds no
bodies. After a broken link BEGIN is sent again and the answer says where to go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.kernels.entries import split_entries
from convoymq.model.errors import BrokerError, PeerError, StorageFault, UnsupportedVersion

if TYPE_CHECKING:
    from convoymq.replication.raft.types import Received
    from convoymq.shells.groups.replica import Replica

BEGIN = 48
STATE = 49
ENTRIES = 50
END = 51
ACKNOWLEDGE = 52
DONE = 53
BACKLOG_BYTES_MAX = 32 << 20
"""A receiver with more than this waiting for its disk lets the sender wait."""


class SnapshotSending:
    """One snapshot on its way to one follower."""

    def __init__(self, replica: Replica, node: int) -> None:
        self.replica = replica
        self.node = node
        self.term = replica.core.term
        self.id = replica.host.next_number()
        snapshot = replica.snapshots.make()
        self.index = snapshot.index
        self.index_term = snapshot.term
        self.membership = snapshot.membership
        self.state = snapshot.state
        self.version = replica.version
        self._live = [
            (first, min(last, self.index))
            for first, last in replica.machine.live_ranges()
            if first <= self.index
        ]
        #: What the follower has, what was sent: (bytes of the state, index of the last entry).
        self._had = (0, 0)
        self._sent = (0, 0)
        self._ahead = 0
        self._begun = False
        self._ended = False
        self._heard_ms = replica.host.clock.monotonic_ms()
        self.stopped = False

    def stop(self) -> None:
        """Forgets it: the replica does not lead any more."""
        self.stopped = True

    def resume(self) -> None:
        """Begins, or finds out where to go on."""
        self._heard_ms = self.replica.host.clock.monotonic_ms()
        self._begun = False
        size = len(self.state)
        self._send(BEGIN, self.index, self.index_term, self.membership, size, self.version)

    def tick(self) -> None:
        """Asks again when nothing was heard for too long."""
        now_ms = self.replica.host.clock.monotonic_ms()
        if self.replica.host.capacity.is_held_up(self.node, self.replica.host.now):
            self._heard_ms = now_ms
        if now_ms - self._heard_ms >= self.replica.host.config.retransmit_ms:
            self.resume()

    def on_room(self) -> None:
        """The link takes bulk again."""
        if self._begun and not self.stopped:
            self._pump()

    def on_message(self, message: Received) -> None:
        """ACKNOWLEDGE or DONE of the follower. Raises PeerError."""
        if message[2] != self.id or self.stopped:
            return
        self._heard_ms = self.replica.host.clock.monotonic_ms()
        if message[0] == DONE:
            self.stopped = True
            self.replica.snapshots.on_sent(self.node, message[3])
            return
        self._had = (message[3], message[4])
        if self._had > (len(self.state), self.index):
            raise PeerError(f"node {self.node} acknowledged more of a snapshot than there is")
        if not self._begun:
            self._begun = True
            self._ended = False
            self._sent = self._had
            self._ahead = 0
        else:
            self._ahead -= 1
        self._pump()

    def _pump(self) -> None:
        config = self.replica.host.config
        host = self.replica.host
        while not self._ended and self._ahead < config.snapshot_chunks_in_flight:
            if self.node in host.full:
                host.capacity.wait(self.node, self.replica)
                return
            offset, index = self._sent
            self._ahead += 1
            if offset < len(self.state):
                piece = self.state[offset : offset + self.replica.host.config.snapshot_chunk_bytes]
                self._sent = (offset + len(piece), 0)
                self._send(STATE, offset, piece)
                continue
            try:
                last, bodies = self._entries_after(index)
            except StorageFault:
                self.stop()
                return
            if bodies:
                self._sent = (offset, last)
                self._send(ENTRIES, index, b"".join(bodies))
            else:
                self._ended = True
                self._send(END, index)

    def _entries_after(self, index: int) -> tuple[int, list[bytes]]:
        """Returns the next chunk of live entries: (index of its last one, their bytes)."""
        log = self.replica.log
        room = self.replica.host.config.snapshot_chunk_bytes
        bodies: list[bytes] = []
        for first, last in self._live:
            for at in range(max(first, index + 1), last + 1):
                try:
                    data = log.entry(at).data
                except LookupError:
                    # Died since the snapshot was taken: a later entry of the log says so.
                    continue
                bodies.append(data)
                room -= len(data)
                index = at
                if room <= 0:
                    return index, bodies
        return index, bodies

    def _send(self, kind: int, *fields: object) -> None:
        self.replica.send_raft(self.node, (kind, self.term, self.id, *fields))


class SnapshotReceiving:
    """One snapshot on its way from the leader."""

    def __init__(self, replica: Replica, node: int, message: Received) -> None:
        self.replica = replica
        self.node = node
        _, self.term, self.id, self.index, index_term, self.membership, size, _ = message
        self.state_size = size
        self.finishing = False
        self._state = bytearray()
        self._last = 0
        self._receiver = replica.log.receive_snapshot(self.index, index_term)

    def is_same(self, node: int, message: Received) -> bool:
        """Returns whether a BEGIN is about this snapshot."""
        return node == self.node and message[1] == self.term and message[2] == self.id

    def abort(self) -> None:
        """Gives up; the former log stands (unless it is already being replaced)."""
        self._receiver.abort()

    def on_message(self, node: int, message: Received) -> None:
        """A chunk. What does not fit is answered by what is here. Raises PeerError."""
        if not self.is_same(node, message) or self.finishing:
            return
        kind = message[0]
        if kind == STATE:
            _, _, _, offset, piece = message
            if offset == len(self._state) and offset + len(piece) <= self.state_size:
                self._state += piece
        elif kind == ENTRIES:
            _, _, _, before, data = message
            if before == self._last and len(self._state) == self.state_size:
                self._add(data)
        elif kind == END and message[3] == self._last and len(self._state) == self.state_size:
            self._finish()
            return
        if self._receiver.backlog_bytes <= BACKLOG_BYTES_MAX:
            self._send(ACKNOWLEDGE, len(self._state), self._last)

    def _add(self, data: bytes) -> None:
        try:
            entries = split_entries(data, 0)
            self._receiver.add_entries(entries)
        except UnsupportedVersion:
            raise
        except (ValueError, BrokerError) as error:
            raise PeerError(f"snapshot of node {self.node}: {error}") from None
        if entries:
            self._last = entries[-1].index

    def _finish(self) -> None:
        self.finishing = True
        state = bytes(self._state)

        def done(error: BaseException | None) -> None:
            if self.replica.snapshots.receiving is not self:
                return
            if error is None:
                self.replica.snapshots.install(self.index, self.membership, state)
            else:
                self.replica.snapshots.on_failed()
            self._send(DONE, 0 if error is not None else self.index)

        self._receiver.finish(self.membership, state, done)

    def _send(self, kind: int, *fields: object) -> None:
        self.replica.send_raft(self.node, (kind, self.term, self.id, *fields))
