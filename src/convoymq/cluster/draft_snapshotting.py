"""A group's state on its way from the leader to a member that is too far behind.

The snapshot holds the machine's state, not the bodies; so the state goes first, in chunks, then the
live entries below its index. Every chunk is acknowledged; a few are in flight. Both ends forget the
transfer when the link breaks or the term changes, and the leader begins again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from convoymq.kernels.batch import Entry, split_entries
from convoymq.model.errors import StorageFault
from convoymq.replication.raft.draft_types import SnapshotAck, SnapshotBegin, SnapshotChunk
from convoymq.storage.types import EntryGone

if TYPE_CHECKING:
    from convoymq.cluster.draft_replica import Replica


class SnapshotSender:
    """Leader's end of one transfer to one node."""

    def __init__(self, replica: Replica, node: int, transfer: int) -> None:
        self.replica = replica
        self.node = node
        self.transfer = transfer
        self.snapshot = replica.make_snapshot()
        self.term = replica.core.term
        self._sent = 0
        self._acked = 0
        self._ranges = [
            (first, min(last, self.snapshot.index))
            for first, last in replica.machine.live_ranges()
            if first <= self.snapshot.index
        ]
        self._parts = self._chunks()
        self._ended = False

    def begin(self) -> None:
        """Announces the snapshot and sends the first chunks."""
        self._send(
            SnapshotBegin(
                self.term,
                self.transfer,
                self.snapshot.index,
                self.snapshot.term,
                self.replica.snapshot_membership,
                len(self.snapshot.state),
            )
        )
        self._fill()

    def on_ack(self, number: int) -> None:
        """Chunk `number` arrived."""
        self._acked = max(self._acked, number)
        self._fill()

    def _send(self, message: Any) -> None:
        self.replica.host.send_message(self.node, self.replica.group, self.term, message)

    def _fill(self) -> None:
        window = self.replica.host.config.snapshot_chunks_in_flight
        while not self._ended and self._sent - self._acked < window:
            live, last, data = next(self._parts)
            self._sent += 1
            self._ended = last
            self._send(SnapshotChunk(self.term, self.transfer, self._sent, live, last, data))

    def _chunks(self) -> Iterator[tuple[bool, bool, bytes]]:
        size = self.replica.host.config.snapshot_chunk_bytes
        state = self.snapshot.state
        for start in range(0, len(state), size):
            yield False, False, state[start : start + size]
        pieces: list[bytes] = []
        total = 0
        for first, last in self._ranges:
            for index in range(first, last + 1):
                try:
                    entry = self.replica.log.entry(index)
                except (EntryGone, StorageFault):
                    # Settled since the snapshot was taken; the log behind it says so.
                    continue
                pieces.append(entry.data)
                total += entry.size
                if total >= size:
                    yield True, False, b"".join(pieces)
                    pieces = []
                    total = 0
        yield True, True, b"".join(pieces)


class SnapshotReceiver:
    """Follower's end of one transfer."""

    def __init__(self, replica: Replica, sender: int, begin: SnapshotBegin) -> None:
        self.replica = replica
        self.sender = sender
        self.begin = begin
        self._state: list[bytes] = []
        self._size = 0
        self._number = 0
        self._aborted = False
        self._receipt = replica.log.receive_snapshot(begin.index, begin.snapshot_term)

    def abort(self) -> None:
        """Drops what came so far."""
        if not self._aborted:
            self._aborted = True
            self._receipt.abort()

    def on_chunk(self, sender: int, chunk: SnapshotChunk) -> None:
        """Takes the next chunk."""
        if sender != self.sender or chunk.transfer != self.begin.transfer or self._aborted:
            return
        if chunk.number <= self._number:
            return
        try:
            if chunk.number != self._number + 1:
                raise ValueError(f"chunk {chunk.number} follows {self._number}")
            self._take(chunk)
        except (ValueError, StorageFault, OSError) as error:
            self._fail(error)
            return
        self._number = chunk.number
        self._answer(chunk.number, done=False, failed=False)
        if chunk.last:
            self._finish()

    def _take(self, chunk: SnapshotChunk) -> None:
        if not chunk.live:
            self._size += len(chunk.data)
            if self._size > self.begin.size:
                raise ValueError("more state than was announced")
            self._state.append(chunk.data)
            return
        if self._size != self.begin.size:
            raise ValueError("less state than was announced")
        entries: list[Entry] = split_entries(chunk.data, 0) if chunk.data else []
        if any(entry.index > self.begin.index for entry in entries):
            raise ValueError("an entry above the snapshot")
        self._receipt.add_entries(entries)

    def _finish(self) -> None:
        from convoymq.cluster.draft_replica import encode_membership

        state = b"".join(self._state)
        self._receipt.finish(
            encode_membership(self.begin.membership),
            state,
            lambda error: self._installed(state, error),
        )
        self.replica.host.wake()

    def _installed(self, state: bytes, error: BaseException | None) -> None:
        if self._aborted or self.replica.dead:
            return
        if error is not None:
            self._fail(error)
            return
        self._aborted = True
        self.replica.on_snapshot_installed(self.begin, state)
        self._answer(self._number, done=True, failed=False)

    def _fail(self, error: BaseException) -> None:
        self.replica.host.note("raft.snapshot_refused", group=self.replica.group, error=str(error))
        self.abort()
        if self.replica.receiver is self:
            self.replica.receiver = None
        self._answer(self._number, done=False, failed=True)

    def _answer(self, number: int, *, done: bool, failed: bool) -> None:
        host = self.replica.host
        term = self.replica.core.term
        host.send_message(
            self.sender,
            self.replica.group,
            term,
            SnapshotAck(
                self.begin.term, self.begin.transfer, number, done, failed, self.begin.index
            ),
        )
