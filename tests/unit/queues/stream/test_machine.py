"""The stream's machine, rule by rule."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.kernels.entries import HEADER_SIZE
from convoymq.model.errors import UnknownCommand, UnsupportedVersion
from convoymq.queues.stream import machine as machines
from convoymq.queues.stream.machine import StreamMachine
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_GAP, EFFECT_TIMER
from convoymq.streamlog.chunks import INDEX_RANGE_BYTES, INDEX_RANGE_ENTRIES
from convoymq.streamlog.reader import ChunkReader, offset_at
from tests.unit.queues.quorum.support import Log, apply, session_id

A = session_id(1, 1)
B = session_id(2, 1)


class Bench:
    """A log and a machine that applies it."""

    def __init__(self, **settings: Any) -> None:
        self.log = Log()
        self.machine = StreamMachine(settings)
        self.reads = 0

    def seal(self, after_ms: int = 1) -> list[Any]:
        effects = apply(self.machine, self.log.seal(after_ms))
        self.machine.check_invariants()
        return effects

    def publish(self, *sizes: int, session: int = A, after_ms: int = 1) -> list[Any]:
        self.log.publish(session, sizes)
        return self.seal(after_ms)

    def read(self, index: int, _max_bytes: int) -> list[Any]:
        self.reads += 1
        return list(self.log.entries[index - 1 : index])

    def sizes(self, offset: int) -> list[tuple[int, int]]:
        """(offset, body size) of all messages from an offset on, read message by message."""
        reader = ChunkReader(self.machine, self.read, offset)
        found = []
        while (run := reader.next(1, 1 << 30)) is not None:
            assert run.messages == 1
            body = batch.record(run.block, run.command, run.first)
            found.append((run.offset, len(body) - len(b"\0\1qh")))
        return found


def store(bench: Bench, session: int, name: bytes, offset: int) -> None:
    body = offset.to_bytes(8, "little") + name
    bench.log.command(session, batch.CMD_STORE_OFFSET, count=len(name), body=body)


def test_offsets_are_given_out_in_the_order_of_the_log() -> None:
    bench = Bench()
    assert bench.publish(10, 20) == [(EFFECT_APPLIED, A, 2, 0, None)]
    bench.log.publish(A, [30])
    bench.log.publish(B, [40, 50])
    bench.log.publish(A, [60])
    bench.seal()
    assert (bench.machine.first, bench.machine.next, bench.machine.last_chunk) == (0, 6, 5)
    assert bench.sizes(0) == [(0, 10), (1, 20), (2, 30), (3, 40), (4, 50), (5, 60)]
    assert bench.sizes(4) == [(4, 50), (5, 60)]
    assert bench.sizes(6) == []


def test_a_resent_command_gets_no_offsets() -> None:
    bench = Bench()
    bench.publish(10)
    bench.publish(20)
    entry = bench.log.entries[0]
    # The first command again, as an entry of its own, then something new.
    bench.log.builder.adopt(entry.data, HEADER_SIZE, len(entry.data))
    assert bench.seal() == [(EFFECT_APPLIED, A, 3, 0, None)]
    bench.publish(30, session=B)
    assert bench.sizes(0) == [(0, 10), (1, 20), (2, 30)]
    assert len(bench.machine.chunks) == 2


def test_a_lost_command_is_asked_for() -> None:
    bench = Bench()
    bench.log.publish(A, [1])
    bench.log.command(A, batch.CMD_SETTLE)
    bench.log.publish(A, [2])
    bench.log.seal()
    lost = bench.log.entries.pop()
    bench.log.publish(A, [3])
    effects = apply(bench.machine, bench.log.seal())
    assert effects == [(EFFECT_GAP, A, 0)]
    assert bench.machine.next == 0
    assert lost.index == 1


def test_small_chunks_share_an_index_range_and_large_ones_do_not() -> None:
    bench = Bench()
    for _ in range(INDEX_RANGE_ENTRIES):
        bench.publish(1)
    assert len(bench.machine.chunks) == 1
    bench.publish(1)
    assert len(bench.machine.chunks) == 2
    bench.publish(INDEX_RANGE_BYTES)
    bench.publish(INDEX_RANGE_BYTES)
    bench.publish(1)
    assert len(bench.machine.chunks) == 4
    assert bench.sizes(INDEX_RANGE_ENTRIES - 1) == [
        (INDEX_RANGE_ENTRIES - 1, 1),
        (INDEX_RANGE_ENTRIES, 1),
        (INDEX_RANGE_ENTRIES + 1, INDEX_RANGE_BYTES),
        (INDEX_RANGE_ENTRIES + 2, INDEX_RANGE_BYTES),
        (INDEX_RANGE_ENTRIES + 3, 1),
    ]


def test_reading_on_at_the_end_reads_each_entry_once() -> None:
    bench = Bench()
    bench.publish(1)
    reader = ChunkReader(bench.machine, bench.read, 0)
    assert reader.next(10, 10) is not None
    for expected in range(1, 50):
        assert reader.next(10, 10) is None
        bench.publish(1)
        run = reader.next(10, 10)
        assert run is not None
        assert run.offset == expected
    assert bench.reads == 50


def test_a_reader_takes_what_fits_and_at_least_one_message() -> None:
    bench = Bench()
    bench.publish(100, 100, 100, 100)
    reader = ChunkReader(bench.machine, bench.read, 1)
    run = reader.next(2, 1 << 30)
    assert run is not None
    assert (run.offset, run.first, run.messages, reader.last_bytes) == (1, 1, 2, 200)
    run = reader.next(10, 5)
    assert run is not None
    assert (run.offset, run.first, run.messages) == (3, 3, 1)


def test_a_reader_goes_back_to_what_it_read_without_looking_for_it() -> None:
    bench = Bench()
    for _ in range(3):
        bench.publish(1, 1, 1, 1)
    reader = ChunkReader(bench.machine, bench.read, 0)
    assert not reader.go_back(0)
    reader.mark()
    while reader.next(3, 100) is not None:
        pass
    assert bench.reads == 3
    assert reader.go_back(9)
    run = reader.next(100, 100)
    assert run is not None
    assert (run.offset, run.first, run.messages) == (9, 1, 3)
    assert bench.reads == 3, "the open entry is at hand"
    assert reader.go_back(2)
    run = reader.next(100, 100)
    assert run is not None
    assert (run.offset, run.first, run.messages) == (2, 2, 2)
    assert bench.reads == 4
    assert not reader.go_back(4), "that is ahead"
    reader.mark()
    assert not reader.go_back(2), "that was before the mark"


def test_repeats_of_a_producer_get_no_offsets() -> None:
    bench = Bench()
    for first in (0, 2, 0):
        body = first.to_bytes(8, "little") + b"p"
        bench.log.command(A, batch.CMD_PRODUCER, count=1, body=body)
        bench.log.publish(A, [10 + first + i for i in range(4)])
    bench.log.publish(A, [99])
    effects = bench.seal()
    # The last publish joins the command before it, so it is its record 4, a repeat too.
    assert [effect[1:] for effect in effects] == [
        (A, 4, 0, None),
        (A, 5, 0, 2),
        (A, 6, 0, None),
        (A, 7, 0, 5),
    ]
    assert bench.sizes(0) == [(0, 10), (1, 11), (2, 12), (3, 13), (4, 14), (5, 15)]


def test_full_segments_go_while_the_stream_is_too_large() -> None:
    bench = Bench(max_bytes=250, segment_bytes=100)
    for _ in range(10):
        bench.publish(50)
    # Two messages fill a segment. When message 8 opened the last one there were 250 bytes left.
    assert bench.machine.bytes == 300
    assert (bench.machine.first, bench.machine.next) == (4, 10)
    assert bench.machine.totals()["dropped_retention"] == 4
    assert [offset for offset, _ in bench.sizes(4)] == [4, 5, 6, 7, 8, 9]
    assert list(bench.machine.live_ranges()) == [(5, 10)]


def test_the_open_segment_stays_whatever_the_limits_say() -> None:
    bench = Bench(max_bytes=0, max_age_ms=0, segment_bytes=1000)
    for _ in range(5):
        bench.publish(100)
    bench.log.leader(batch.CMD_TICK)
    bench.seal(10_000)
    assert bench.machine.messages == 5


def test_old_segments_go_by_the_time_of_entries() -> None:
    bench = Bench(max_age_ms=1000, segment_bytes=100)
    bench.publish(100)
    bench.publish(100)
    due = bench.machine.next_due_ms()
    assert due == bench.log.entries[0].time_ms + 1001
    bench.log.leader(batch.CMD_TICK)
    effects = bench.seal(999)
    assert effects == [(EFFECT_TIMER, due)]
    assert bench.machine.first == 0
    bench.log.leader(batch.CMD_TICK)
    assert bench.seal(1) == []
    assert bench.machine.first == 1
    assert bench.machine.next_due_ms() is None


def test_a_timer_is_asked_for_when_the_first_segment_closes() -> None:
    bench = Bench(max_age_ms=1000, segment_bytes=100)
    assert EFFECT_TIMER not in [effect[0] for effect in bench.publish(100)]
    assert EFFECT_TIMER in [effect[0] for effect in bench.publish(100)]
    assert EFFECT_TIMER not in [effect[0] for effect in bench.publish(100)]


def test_a_time_is_found() -> None:
    bench = Bench()
    times = []
    for gap in (10, 0, 0, 500, 1, 0, 1000):
        bench.publish(1, 1, after_ms=gap)
        times.append(bench.log.time_ms)
    for ms in sorted({t + d for t in times for d in (-1, 0, 1)}):
        wanted = next((i for i, t in enumerate(times) if t >= ms), None)
        expected = None if wanted is None else (2 * wanted, times[wanted])
        assert offset_at(bench.machine, bench.read, ms) == expected
    assert offset_at(StreamMachine(), bench.read, 0) is None


def test_stored_offsets_last_write_wins() -> None:
    bench = Bench()
    store(bench, A, b"c", 17)
    store(bench, B, b"c", 9)
    store(bench, B, b"\xc3\xa4", 1 << 40)
    bench.seal()
    assert bench.machine.stored_offset("c") == 9
    assert bench.machine.stored_offset("ä") == 1 << 40
    assert bench.machine.stored_offset("x") is None


def test_stored_offsets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    for number in range(machines.STORED_MAX + 1):
        store(bench, A, b"%d" % number, number)
        if number == 5:
            store(bench, A, b"0", 1)
    bench.seal()
    assert len(bench.machine.stored) == machines.STORED_MAX
    assert bench.machine.stored_offset("0") == 1
    assert bench.machine.stored_offset("1") is None


def test_what_makes_no_sense_for_a_log_is_refused_or_ignored() -> None:
    bench = Bench()
    bench.log.command(A, batch.CMD_SETTLE)
    bench.log.command(A, batch.CMD_GET)
    bench.log.command(A, batch.CMD_STORE_OFFSET, count=9, body=b"short")
    bench.log.command(A, batch.CMD_STORE_OFFSET)
    bench.publish(1)
    assert bench.machine.next == 1
    answers = {reply[0]: reply[1] for reply in bench.machine.sessions[A].replies}
    assert answers == {3: 1, 4: 1, 5: 1}


def test_sessions_end_with_their_node_or_by_themselves() -> None:
    bench = Bench()
    other = session_id(1, 9, incarnation=2)
    for session in (A, B, other):
        bench.log.publish(session, [1])
    bench.seal()
    bench.log.close(B)
    bench.log.node_up(1, 2)
    bench.seal()
    assert list(bench.machine.sessions) == [other]
    bench.log.node_down(1)
    bench.seal()
    assert list(bench.machine.sessions) == [other]
    bench.log.node_down(1, gone=True)
    bench.seal()
    assert bench.machine.session_nodes() == frozenset()
    assert bench.publish(1) == [(EFFECT_GAP, A, 0)]
    assert bench.machine.next == 3


def test_resend_repeats_the_answers_of_a_node() -> None:
    bench = Bench()
    bench.log.command(A, batch.CMD_GET)
    bench.log.publish(A, [1])
    bench.log.publish(B, [1])
    bench.seal()
    bench.machine.resend(1)
    assert [effect[1:4] for effect in bench.machine.effects] == [(A, 2, 1), (A, 3, 0)]


def test_a_damaged_snapshot_is_refused() -> None:
    bench = Bench()
    bench.publish(1, 2)
    good = bench.machine.snapshot()
    for bad in (b"", b"\xc1", good[:-1], good.replace(b"\xa6format\x02", b"\xa6format\x01")):
        with pytest.raises(ValueError, match=r"."):
            StreamMachine().restore(bad)
    known = msgspec.msgpack.decode(good)
    known["chunks"][0] = b"123"
    with pytest.raises(ValueError, match="packed"):
        StreamMachine().restore(msgspec.msgpack.encode(known))


def test_versions_above_the_own_are_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="version 3 of the stream machine"):
        StreamMachine().set_version(3)


def test_settings_change_by_the_log_from_the_second_version_on() -> None:
    bench = Bench(segment_bytes=10)
    bench.log.configure(max_bytes=5)
    with pytest.raises(UnknownCommand):
        apply(StreamMachine(), bench.log.seal())
    bench = Bench(segment_bytes=10)
    bench.machine.set_version(2)
    for _ in range(4):
        bench.publish(10)
    assert bench.machine.messages == 4
    bench.log.configure(max_bytes=15)
    bench.seal()
    assert (bench.machine.first, bench.machine.messages) == (3, 1), "closed segments go at once"
    bench.log.configure(max_bytes=-1, max_age_ms=100, segment_bytes=1_000)
    bench.publish(10)
    bench.publish(10)
    assert bench.machine.messages == 3, "the open segment is not full by the new size"
    copy = StreamMachine()
    copy.restore(bench.machine.snapshot())
    assert copy.settings == {"max_bytes": -1, "max_age_ms": 100, "segment_bytes": 1_000}
    for wrong in ({"unknown": 1}, {"max_bytes": "much"}):
        bench.log.configure(**wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="cannot change"):
            apply(copy, bench.log.seal())


def test_an_age_that_is_set_later_is_looked_at_in_time() -> None:
    bench = Bench(segment_bytes=1)
    bench.machine.set_version(2)
    for _ in range(3):
        bench.publish(10)
    assert bench.machine.next_due_ms() is None
    bench.log.configure(max_age_ms=1_000)
    effects = bench.seal()
    due = bench.machine.next_due_ms()
    assert (EFFECT_TIMER, due) in effects
    bench.log.leader(batch.CMD_TICK)
    bench.seal(after_ms=2_000)
    assert bench.machine.messages == 1
