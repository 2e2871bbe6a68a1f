"""The machine against a naive model that keeps a list of messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

import convoymq.queues.sessions as compiled_sessions
from convoymq.kernels import batch
from convoymq.kernels.entries import HEADER_SIZE
from convoymq.queues.stream.machine import StreamMachine
from convoymq.streamlog.reader import ChunkReader, offset_at
from tests.unit.queues.interpreted import interpreted
from tests.unit.queues.quorum.support import Log, apply, session_id

SESSIONS = [session_id(1, 1), session_id(2, 1), session_id(2, 2)]
NAMES = [b"p", b"q"]

publishes = st.tuples(
    st.just("publish"),
    st.sampled_from(SESSIONS),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
)
produces = st.tuples(
    st.just("produce"),
    st.sampled_from(SESSIONS),
    st.sampled_from(NAMES),
    st.integers(0, 12),
    st.integers(1, 5),
)
stores = st.tuples(
    st.just("store"), st.sampled_from(SESSIONS), st.sampled_from(NAMES), st.integers(0, 1000)
)
configs = st.tuples(
    st.just("config"),
    st.dictionaries(
        st.sampled_from(["max_bytes", "max_age_ms", "segment_bytes"]),
        st.sampled_from([0, 60, 200, 10_000]),
    ),
)
others = st.sampled_from([("tick",), ("settle",), ("repeat",), ("skip",)])
seals = st.tuples(st.just("seal"), st.integers(0, 40))
steps = st.lists(st.one_of(publishes, produces, stores, configs, others, seals, seals), max_size=60)
limits = st.fixed_dictionaries(
    {
        "max_bytes": st.sampled_from([-1, 0, 150, 400]),
        "max_age_ms": st.sampled_from([-1, 0, 50, 200]),
        "segment_bytes": st.sampled_from([1, 60, 200, 10_000]),
    }
)


@dataclass
class Model:
    """What the log means, message by message."""

    limits: dict[str, int]
    sizes: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=lambda: [[]])
    last: dict[bytes, int] = field(default_factory=dict)
    stored: dict[bytes, int] = field(default_factory=dict)
    seqs: dict[int, int] = field(default_factory=dict)
    pending: dict[int, tuple[bytes, int] | None] = field(default_factory=dict)

    @property
    def kept(self) -> list[int]:
        return [offset for segment in self.segments for offset in segment]

    def apply(self, time_ms: int, data: bytes) -> None:
        for kind, _, session, seq, count, _, offset, _ in batch.commands(data):
            if session:
                if seq != self.seqs.get(session, 0) + 1:
                    continue
                self.seqs[session] = seq
            body = batch.command_body(data, offset)
            if kind == batch.CMD_ENQUEUE:
                records = [batch.record(data, offset, i) for i in range(count)]
                producer = self.pending.pop(session, None)
                if producer is not None:
                    name, first = producer
                    known = self.last.get(name, -1)
                    records = [r for i, r in enumerate(records) if first + i > known]
                    self.last[name] = max(known, first + count - 1)
                if records:
                    self._append(time_ms, [len(record) - 4 for record in records])
            elif kind == batch.CMD_PRODUCER:
                self.pending[session] = (body[8 : 8 + count], int.from_bytes(body[:8], "little"))
            elif kind == batch.CMD_STORE_OFFSET:
                self.stored[body[8 : 8 + count]] = int.from_bytes(body[:8], "little")
            elif kind == batch.CMD_CONFIG:
                self.limits = {**self.limits, **msgspec.msgpack.decode(body[:count])}
                self._retain(time_ms)
            elif kind == batch.CMD_TICK:
                self._retain(time_ms)

    def _append(self, time_ms: int, sizes: list[int]) -> None:
        closes = sum(self.sizes[o] for o in self.segments[-1]) >= self.limits["segment_bytes"]
        closes = closes and bool(self.segments[-1])
        if closes:
            self.segments.append([])
        for size in sizes:
            self.segments[-1].append(len(self.sizes))
            self.sizes.append(size)
            self.times.append(time_ms)
        if closes:
            self._retain(time_ms)

    def _retain(self, now: int) -> None:
        while len(self.segments) > 1:
            held = sum(self.sizes[offset] for offset in self.kept)
            newest = self.times[self.segments[0][-1]]
            large = 0 <= self.limits["max_bytes"] < held
            old = self.limits["max_age_ms"] >= 0 and newest + self.limits["max_age_ms"] < now
            if not (large or old):
                return
            del self.segments[0]


def stream(chosen: dict[str, int], kind: type[Any] = StreamMachine) -> Any:
    """A machine of the newest version."""
    made = kind(chosen)
    made.set_version(StreamMachine.VERSION)
    return made


class Run:
    """Steps written to a log."""

    def __init__(self) -> None:
        self.log = Log()

    def play(self, step: tuple[Any, ...]) -> Any:
        log = self.log
        kind = step[0]
        if kind == "publish":
            log.publish(step[1], step[2])
        elif kind == "produce":
            _, session, name, first, count = step
            body = first.to_bytes(8, "little") + name
            log.command(session, batch.CMD_PRODUCER, count=len(name), body=body)
            log.publish(session, [7] * count)
            # Closes the ENQUEUE: what follows has no producer.
            log.command(session, batch.CMD_SETTLE)
        elif kind == "store":
            _, session, name, offset = step
            body = offset.to_bytes(8, "little") + name
            log.command(session, batch.CMD_STORE_OFFSET, count=len(name), body=body)
        elif kind == "config":
            log.configure(**step[1])
        elif kind == "tick":
            log.leader(batch.CMD_TICK)
        elif kind == "settle":
            log.command(SESSIONS[0], batch.CMD_SETTLE)
        elif kind == "repeat" and log.entries:
            # Everything of an older entry comes again, as after a change of leaders.
            data = log.entries[-1].data
            if len(data) > HEADER_SIZE:
                log.builder.adopt(data, HEADER_SIZE, len(data))
        elif kind == "skip":
            # A command that the session's machine has not got the predecessor of.
            target = batch.PublishTarget(log.builder, SESSIONS[1], None)
            target.seq = 1 << 30
            target.publish([b"\0\1q", b"h", b"lost"], 4, 0)
            target.command(batch.CMD_SETTLE, 0, 0, 0)
        elif kind == "seal":
            return log.seal(step[1])
        return None

    def all(self, made: list[tuple[Any, ...]]) -> list[Any]:
        for step in [*made, ("seal", 1)]:
            self.play(step)
        return self.log.entries

    def read(self, index: int, _max_bytes: int) -> list[Any]:
        # Sometimes more than one, as from a disk.
        return list(self.log.entries[index - 1 : index + index % 3])


def compare(machine: StreamMachine, model: Model, run: Run) -> None:
    kept = model.kept
    assert machine.next == len(model.sizes)
    assert machine.messages == len(kept)
    assert machine.bytes == sum(model.sizes[offset] for offset in kept)
    assert {n: last for n, (last, _) in machine.producers.items()} == model.last
    assert machine.stored == model.stored
    if not kept:
        return
    assert machine.first == kept[0]
    for start in {kept[0], kept[len(kept) // 2], kept[-1]}:
        reader = ChunkReader(machine, run.read, start)
        reader.mark()
        found = []
        backs = [5, 0, 3, 1, 6, 2, 4]
        while (one := reader.next(3, 100)) is not None:
            if len(found) % 3 == 0:
                reader.park()
            elif len(found) % 3 == 1:
                reader.release()
            for i in range(one.messages):
                record = batch.record(one.block, one.command, one.first + i)
                found.append((one.offset + i, len(record) - 4, one.time_ms))
            # A few times; it would never end otherwise.
            back = backs.pop() if backs and len(found) % 2 else len(found)
            if back < len(found) and reader.go_back(found[-1 - back][0]):
                del found[-1 - back :]
                reader.mark()
        assert found == [(o, model.sizes[o], model.times[o]) for o in range(start, kept[-1] + 1)]
    for ms in {model.times[kept[0]], model.times[kept[-1]], model.times[kept[-1]] - 1}:
        first = next((o for o in kept if model.times[o] >= ms), None)
        expected = None if first is None else (first, model.times[first])
        assert offset_at(machine, run.read, ms) == expected


@given(steps, limits)
def test_the_machine_does_what_the_model_does(
    made: list[tuple[Any, ...]], chosen: dict[str, int]
) -> None:
    run = Run()
    machine = stream(chosen)
    model = Model(chosen)
    for step in [*made, ("seal", 1)]:
        entry = run.play(step)
        if entry is not None:
            apply(machine, entry)
            machine.check_invariants()
            model.apply(entry.time_ms, entry.data)
            compare(machine, model, run)
            live = list(machine.live_ranges())
            assert len(live) == (machine.messages > 0)


@given(steps, limits, st.integers(0, 60))
def test_a_snapshot_and_the_rest_is_the_whole_log(
    made: list[tuple[Any, ...]], chosen: dict[str, int], cut: int
) -> None:
    entries = Run().all(made)
    whole = stream(chosen)
    other = stream(chosen)
    for at, entry in enumerate(entries):
        if at == cut:
            state = other.snapshot()
            other = StreamMachine(chosen)
            other.restore(state)
            assert other.snapshot() == state
        assert apply(whole, entry) == apply(other, entry)
        assert whole.state_hash() == other.state_hash()
        assert list(whole.live_ranges()) == list(other.live_ranges())
        other.check_invariants()


PLAIN = interpreted(
    [
        "convoymq.queues.sessions",
        "convoymq.queues.group_machine",
        "convoymq.queues.stream.machine",
    ]
)


@given(steps, limits)
def test_interpreted_equals_compiled(made: list[tuple[Any, ...]], chosen: dict[str, int]) -> None:
    compiled = stream(chosen)
    plain = stream(chosen, PLAIN.StreamMachine)
    for entry in Run().all(made):
        assert apply(plain, entry) == apply(compiled, entry)
        assert plain.snapshot() == compiled.snapshot()


def test_the_two_builds_are_really_two() -> None:
    assert str(PLAIN.__file__).endswith(".py")
    assert issubclass(PLAIN.StreamMachine, compiled_sessions.SessionTable) is False
