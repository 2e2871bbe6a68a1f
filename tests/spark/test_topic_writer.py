"""Writes to a topic against a producer in memory: attempts that are cut, repeated and reordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType

from convoymq.client.topic_rows import checked_row
from convoymq.spark import clients
from convoymq.spark.errors import OptionError, SchemaError, SourceError
from convoymq.spark.option_table import Use, parse_options
from convoymq.spark.options import SinkOptions
from convoymq.spark.topic_writer import Position, TopicWrite, rows_of
from tests.spark.fakes import FakeBroker
from tests.spark.support import stream_source
from tests.spark.test_writer import schema

LOGICAL = 3
WRITTEN = schema(key=BinaryType(), value=BinaryType())
Pair = tuple[bytes, bytes]


def lp_of(key: bytes) -> int:
    return sum(key) % LOGICAL


class Cut(Exception):
    """The task dies."""


class Stored:
    """The topic: messages and last positions, by logical partition."""

    def __init__(self) -> None:
        self.log: dict[int, list[Pair]] = {}
        self.positions: dict[int, bytes] = {}

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

    def send(
        self,
        key: bytes | str,
        body: bytes,
        headers: Mapping[str, Any] | None = None,
        source_pos: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> Future[Any]:
        assert isinstance(key, bytes)
        checked_row(key, body, headers)
        if self.left is not None:
            if not self.left:
                raise Cut
            self.left -= 1
        lp = lp_of(key)
        if source_pos is not None:
            assert source_pos > self.stored.positions.get(lp, b""), "positions fall"
            self.stored.positions[lp] = source_pos
        self.stored.log.setdefault(lp, []).append((key, body))
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
    **given: str,
) -> int:
    """One attempt of a task; returns how many rows were there already."""
    write = TopicWrite(FakeProducer(stored, messages), sink(**given), lp_of, batch_id)
    try:
        for start in range(0, len(rows), 4):
            write.add(batch(rows[start : start + 4]))
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
@settings(max_examples=80, deadline=None)
def test_repeats_of_the_same_rows_add_what_is_missing(
    batches: list[tuple[list[Pair], list[int]]],
) -> None:
    stored = Stored()
    wanted: list[Pair] = []
    for number, (rows, cuts) in enumerate(batches):
        for cut in cuts:
            attempt(stored, rows, number, cut)
        attempt(stored, rows, number)
        assert attempt(stored, rows, number) == len(rows)
        wanted += rows
    assert stored.log == in_order(wanted)


@given(rows=pairs, cuts=st.lists(st.integers(0, 14), max_size=3), data=st.data())
@settings(max_examples=80, deadline=None)
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
        attempt(Stored(), [(b"", b"1")])
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

    def with_headers(*fields: tuple[str, bytes | None]) -> pa.RecordBatch:
        rows = [[{"key": name, "value": value} for name, value in fields]]
        return pa.RecordBatch.from_pydict(
            {"key": [b"k"], "value": [b"v"], "headers": pa.array(rows, kind)}
        )

    (found,) = rows_of(with_headers(("a", b"1"), ("b", b"")))
    assert found.headers == {"a": b"1", "b": b""}
    for wrong, text in (
        (with_headers(("a", None)), "no nulls"),
        (with_headers(("a", b"1"), ("a", b"2")), "stands twice"),
    ):
        with pytest.raises(SourceError, match=text):
            list(rows_of(wrong))
    write = TopicWrite(FakeProducer(Stored()), sink(), lp_of, 0)
    with pytest.raises(SourceError, match="x-order-key"):
        write.add(with_headers(("x-order-key", b"1")))


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
    source = stream_source(topic="t", producerName="load", **{"convoymq.produce.maxRows": 7})
    writer = source.writer(WRITTEN, False)
    result = writer.write(iter([batch([(b"a", b"1"), (b"b", b"2")])]))
    assert (result.rows, result.duplicates) == (2, 0)
    assert names == [("t", "load:0", 7)]
    with pytest.raises(SchemaError, match="message ids"):
        stream_source(topic="t", messageId="auto").writer(WRITTEN, False)
    with pytest.raises(OptionError, match="append"):
        stream_source(topic="t").writer(WRITTEN, True)
