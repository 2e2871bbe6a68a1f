"""Writes to a topic against a producer in memory: attempts that are cut, repeated and reordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType

from convoymq.client.rows import routing_keys_of, values_of
from convoymq.client.topic_rows import RowChunk, frame_of_rows
from convoymq.kernels import columns as bits
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.spark import clients, topic_writer
from convoymq.spark.errors import OptionError, SchemaError, SourceError
from convoymq.spark.option_table import Use, parse_options
from convoymq.spark.options import SinkOptions
from convoymq.spark.topic_writer import Position, TopicWrite
from tests.spark.fakes import FakeBroker, headers_of
from tests.spark.support import stream_source
from tests.spark.test_writer import schema

LOGICAL = 3
WRITTEN = schema(key=BinaryType(), value=BinaryType())
Pair = tuple[bytes, bytes]


def lp_of(key: bytes) -> int:
    return sum(key) % LOGICAL


def lps_of(keys: pa.Array) -> pa.Array:
    return pa.array([lp_of(key) for key in keys.to_pylist()], pa.int32())


def rows_of(frame: ColumnFrame) -> list[tuple[bytes, bytes, list[tuple[str, bytes | None]] | None]]:
    """Order key, body and headers of a frame's messages."""
    fields = headers_of(frame) if frame.columns & bits.HEADERS else [None] * frame.rows
    found = []
    for key, body, own in zip(routing_keys_of(frame), values_of(frame), fields, strict=True):
        named = [value for name, value in own or () if name == "x-order-key"]
        assert len(named) == (key == b"")
        found.append((named[0] or b"" if named else key, body or b"", own))
    return found


class Cut(Exception):
    """The task dies."""


class Stored:
    """The topic: messages and last positions, by logical partition."""

    def __init__(self) -> None:
        self.log: dict[int, list[Pair]] = {}
        self.positions: dict[int, bytes] = {}
        self.headers: list[list[tuple[str, bytes | None]] | None] = []

    @property
    def rows(self) -> list[Pair]:
        return [row for lp in sorted(self.log) for row in self.log[lp]]


class FakeProducer:
    """A session. Of the messages of each logical partition the first are stored, up to what the
    session is given for all of them; then the task dies."""

    def __init__(self, stored: Stored, messages: int | None = None) -> None:
        self.stored = stored
        self.left = messages
        self.pending = 0
        self.begun = dict(stored.positions)

    def last_positions(self) -> dict[int, bytes]:
        return dict(self.begun)

    def send_chunk(
        self,
        lp: int,
        chunk: RowChunk,
        source_pos: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> Future[Any]:
        if self.left is not None:
            if self.left < chunk.messages:
                raise Cut
            self.left -= chunk.messages
        if source_pos is not None:
            assert source_pos > self.stored.positions.get(lp, b""), "positions fall"
            self.stored.positions[lp] = source_pos
        rows = rows_of(ColumnFrame(frame_of_rows([chunk])))
        assert {lp_of(key) for key, *_ in rows} == {lp}
        self.stored.log.setdefault(lp, []).extend((key, body) for key, body, _ in rows)
        self.stored.headers += [headers for *_, headers in rows]
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def flush(self, timeout: float | None = None) -> None:
        """All is stored."""

    def close(self, timeout: float | None = None) -> None:
        """Nothing is left."""


def sink(**given: str) -> SinkOptions:
    values = parse_options("convoymq", {"servers": "fake:1", "topic": "t", **given})
    return SinkOptions.of_stream(values, Use.STREAM_WRITE)


def batch(rows: Sequence[Pair]) -> pa.RecordBatch:
    keys, bodies = [row[0] for row in rows], [row[1] for row in rows]
    return pa.RecordBatch.from_pydict(
        {"key": pa.array(keys, pa.binary()), "value": pa.array(bodies, pa.binary())}
    )


def attempt(
    stored: Stored,
    rows: Sequence[Pair],
    batch_id: int = 0,
    messages: int | None = None,
    cut: int = 4,
    **given: str,
) -> int:
    """One attempt of a task, so many rows sorted at a time; returns how many rows were there
    already."""
    write = TopicWrite(FakeProducer(stored, messages), sink(**given), lps_of, batch_id)
    try:
        for start in range(0, len(rows), cut):
            write.add(batch(rows[start : start + cut]))
            write._send_gathered()
        write.finish()
    except Cut:
        return -1
    assert write.rows == len(rows)
    return write.duplicates


KEYS = [b"a", b"b", b"c", b"d", b"e"]
pairs = st.lists(st.sampled_from(KEYS), max_size=14).map(
    lambda keys: [(key, b"%d" % number) for number, key in enumerate(keys)]
)


def in_order(rows: Sequence[Pair]) -> dict[int, list[Pair]]:
    found: dict[int, list[Pair]] = {}
    for row in rows:
        found.setdefault(lp_of(row[0]), []).append(row)
    return found


@given(batches=st.lists(st.tuples(pairs, st.lists(st.integers(0, 14), max_size=3)), max_size=3))
@settings(max_examples=80)
def test_repeats_of_the_same_rows_add_what_is_missing(
    batches: list[tuple[list[Pair], list[int]]],
) -> None:
    stored = Stored()
    wanted: list[Pair] = []
    for number, (rows, cuts) in enumerate(batches):
        # However the rows are cut, they are the same.
        for size, cut in enumerate(cuts, 1):
            attempt(stored, rows, number, cut, cut=size)
        attempt(stored, rows, number, cut=3)
        assert attempt(stored, rows, number, cut=5) == len(rows)
        wanted += rows
    assert stored.log == in_order(wanted)


@given(rows=pairs, cuts=st.lists(st.integers(0, 14), max_size=3), data=st.data())
@settings(max_examples=80)
def test_repeats_in_another_order_lose_nothing(
    rows: list[Pair], cuts: list[int], data: st.DataObject
) -> None:
    stored = Stored()
    for cut in cuts:
        attempt(stored, data.draw(st.permutations(rows)), 0, cut)
    last = data.draw(st.permutations(rows))
    attempt(stored, last)
    assert not Counter(rows) - Counter(stored.rows)
    assert attempt(stored, last) == len(rows)


def test_fewer_rows_than_before_are_other_rows() -> None:
    stored = Stored()
    attempt(stored, [(b"a", b"1"), (b"a", b"2"), (b"a", b"3")])
    assert attempt(stored, [(b"a", b"1"), (b"a", b"2")]) == 0
    assert [body for _, body in stored.rows] == [b"1", b"2", b"3", b"1", b"2"]


def test_an_older_batch_is_refused_and_without_idempotence_written_again() -> None:
    stored = Stored()
    attempt(stored, [(b"a", b"1")], 7)
    with pytest.raises(SourceError, match="batch 7 of this query, which is at batch 6"):
        attempt(stored, [(b"a", b"2")], 6)
    assert attempt(stored, [(b"a", b"2")], 6, idempotent="false") == 0
    assert [body for _, body in stored.rows] == [b"1", b"2"]


def test_positions_rise_and_those_of_others_are_refused() -> None:
    packed = [Position(batch, place, 9, bytes(16)).pack() for batch in (1, 2) for place in (1, 300)]
    assert packed == sorted(packed)
    assert Position.unpack(packed[1]) == Position(1, 300, 9, bytes(16))
    stored = Stored()
    stored.positions[0] = b"gtid 7"
    with pytest.raises(SourceError, match="another producerName"):
        attempt(stored, [(b"a", b"1")])


def test_rows_that_a_topic_does_not_take() -> None:
    with pytest.raises(SourceError, match="null or empty"):
        attempt(Stored(), [(b"a", b"1"), (b"", b"1")])
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

    def with_headers(*fields: tuple[str, bytes | None]) -> pa.RecordBatch:
        rows = [[{"key": name, "value": value} for name, value in fields]]
        return pa.RecordBatch.from_pydict(
            {"key": [b"k"], "value": [b"v"], "headers": pa.array(rows, kind)}
        )

    write = TopicWrite(FakeProducer(Stored()), sink(), lps_of, 0)
    write.add(pa.RecordBatch.from_pydict({"key": [None], "value": [b"v"]}))
    with pytest.raises(SourceError, match="null or empty"):
        write.finish()
    write = TopicWrite(FakeProducer(Stored()), sink(), lps_of, 0)
    write.add(with_headers((None, b"v")))  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="key of a header is null"):
        write.finish()


def with_fields(rows: Sequence[tuple[bytes, bytes, list[tuple[str, bytes | None]] | None]]) -> Any:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    fields = [
        None if own is None else [{"key": name, "value": value} for name, value in own]
        for *_, own in rows
    ]
    columns = {"key": pa.array([row[0] for row in rows], pa.binary())}
    columns["value"] = pa.array([row[1] for row in rows], pa.binary())
    return pa.RecordBatch.from_pydict({**columns, "headers": pa.array(fields, kind)})


odd_keys = st.sampled_from([b"a", b"b", b"\xff\xfe", b"long" * 100, "é".encode()])
some_headers = st.none() | st.lists(
    st.tuples(st.sampled_from(["a", "b", "x-order-key", ""]), st.none() | st.binary(max_size=3)),
    max_size=3,
)
odd_rows = st.lists(st.tuples(odd_keys, st.binary(max_size=5), some_headers), max_size=10)


@given(rows=odd_rows, lead=st.integers(0, 3), cut=st.integers(1, 10))
@settings(max_examples=150)
def test_headers_and_keys_of_any_kind_arrive(rows: list[Any], lead: int, cut: int) -> None:
    """What a sender chose in one topic fails no write to another: headers without a value, twice,
    or of the name that the order key has; keys that are no routing keys."""
    stored = Stored()
    write = TopicWrite(FakeProducer(stored), sink(), lps_of, 0)
    whole = with_fields([(b"lead", b"", [("l", b"l")])] * lead + rows).slice(lead)
    for start in range(0, len(rows), cut):
        write.add(whole.slice(start, cut))
        write._send_gathered()
    write.finish()
    assert stored.log == in_order([row[:2] for row in rows])
    found = Counter(
        tuple(pair for pair in own or () if pair[0] != "x-order-key") for own in stored.headers
    )
    assert found == Counter(
        tuple(pair for pair in own or () if pair[0] != "x-order-key") for *_, own in rows
    )
    again = TopicWrite(FakeProducer(stored), sink(), lps_of, 0)
    again.add(whole)
    again.finish()
    assert again.duplicates == len(rows)


def test_headers_tell_rows_apart() -> None:
    """A row whose header is missing, empty or another one is another row."""
    kinds: list[list[tuple[str, bytes | None]] | None] = [
        None, [("a", None)], [("a", b"")], [("a", b"1")], [("a1", b"")], [("b", b"1")],
    ]  # fmt: skip
    stored = Stored()
    for number, own in enumerate(kinds):
        write = TopicWrite(FakeProducer(stored), sink(), lps_of, 0)
        write.add(with_fields([(b"a", b"1", own)]))
        write.finish()
        assert write.duplicates == 0
        assert len(stored.rows) == number + 1


def test_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Noting(FakeProducer):
        def send_chunk(self, lp: int, chunk: RowChunk, *given: Any, **more: Any) -> Future[Any]:
            sizes.append(chunk.messages)
            return super().send_chunk(lp, chunk, *given, **more)

    monkeypatch.setattr(topic_writer, "CHUNK_ROWS_MAX", 3)
    monkeypatch.setattr(topic_writer, "CHUNK_BYTES_MAX", 100)
    stored = Stored()
    write = TopicWrite(Noting(stored), sink(), lps_of, 0)
    rows = [(b"a", bytes(size)) for size in (1, 1, 1, 1, 50, 50, 500, 1)]
    write.add(batch(rows))
    write.finish()
    assert stored.rows == rows
    assert sizes == [3, 2, 1, 1, 1]


def test_a_batch_write_goes_to_a_topic_by_its_name(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.topic("t", logical=LOGICAL)
    stored = Stored()
    names = []

    def producer(client: object, topic: str, name: str | None, pending_max: int) -> FakeProducer:
        names.append((topic, name, pending_max))
        return FakeProducer(stored)

    monkeypatch.setattr(clients, "topic_producer", producer)
    monkeypatch.setattr(topic_writer, "logical_partitions", lambda keys, *hashing: lps_of(keys))
    source = stream_source(topic="t", producerName="load", **{"convoymq.produce.maxRows": 7})
    writer = source.writer(WRITTEN, False)
    result = writer.write(iter([batch([(b"a", b"1"), (b"b", b"2")])]))
    assert (result.rows, result.duplicates) == (2, 0)
    assert names == [("t", "load:0", 7)]
    with pytest.raises(SchemaError, match="message ids"):
        stream_source(topic="t", messageId="auto").writer(WRITTEN, False)
    with pytest.raises(OptionError, match="append"):
        stream_source(topic="t").writer(WRITTEN, True)
