"""Bugs of streams and partitions."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import late, planting

plant = planting("streams")
_stream = late("convoymq.queues.stream.machine:StreamMachine")


@plant("an index range goes on over a chunk that was dropped", "break,crash,kill")
def index_range_over_a_repeat() -> None:
    machine = _stream()
    append = machine._append

    def planted(self: Any, *arguments: Any) -> None:
        self._broken = False
        append(self, *arguments)

    machine._append = planted


@plant("a restored stream takes its newest message for younger", "crash,kill")
def restored_stream_is_younger() -> None:
    machine = _stream()
    restore = machine._restore

    def planted(self: Any, known: dict[str, Any]) -> None:
        restore(self, known)
        self._newest_ms += 1

    machine._restore = planted


@plant("a snapshot leaves out the last sequences of producers", "crash,kill,membership")
def snapshot_without_producers() -> None:
    machine = _stream()
    machine._pack_producers = lambda self: []


@plant("a stream's older chunks are not kept in the log", "none")
def older_chunks_are_not_live() -> None:
    machine = _stream()

    def planted(self: Any) -> Any:
        return [(self.chunks.indexes[-1], self.index)] if len(self.chunks) else []

    machine.live_ranges = planted


@plant("a repeat of a producer is stored again", "none")
def producer_repeats_stored() -> None:
    machine = _stream()
    repeated = machine._repeated

    def planted(self: Any, session: Any, count: int) -> int:
        return min(0, repeated(self, session, count))

    machine._repeated = planted


@plant("retention drops the segment that is being written", "none")
def open_segment_dropped() -> None:
    machine = _stream()
    retain = machine._retain

    def planted(self: Any) -> None:
        if self.open_bytes and 0 <= self.settings["max_bytes"] < self.bytes:
            self.segments.append((self.next, self.open_bytes, self._newest_ms))
            self.open_bytes = 0
        retain(self)

    machine._retain = planted


@plant("a reader that begins inside of a chunk begins at its first record", "none")
def begins_at_the_chunk() -> None:
    from convoymq.streamlog.reader import ChunkReader

    enter = ChunkReader._enter

    def planted(self: Any) -> None:
        enter(self)
        self._record = 0

    ChunkReader._enter = planted  # type: ignore[method-assign]


@plant("a consumer is handed on after a lost answer as if it had come", "partition")
def pull_skips_what_was_lost() -> None:
    from convoymq.queues.stream.client import StreamClient

    pulled = StreamClient._pulled

    def planted(self: Any, reader: Any, chunks: Any, error: Any) -> None:
        if error is not None:
            reader.offset += 1
        pulled(self, reader, chunks, error)

    StreamClient._pulled = planted  # type: ignore[method-assign]
