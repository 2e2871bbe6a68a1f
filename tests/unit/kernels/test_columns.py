"""Columnar frames against the naive reference: written, read, built, produced, broken."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from convoymq.edges.amqp091.codec import Properties
from convoymq.kernels import batch, columns
from convoymq.kernels import content as content_kernel
from convoymq.kernels.batch import CommandBuilder, PublishTarget
from convoymq.kernels.column_frame import ColumnFrame, build_frame
from convoymq.kernels.column_records import encode_enqueue, enqueue_flags
from convoymq.kernels.column_writer import ColumnWriter
from convoymq.messages.record import names_of
from convoymq.model.tables import Decimal, Field, Table
from tests import hostile
from tests.unit.kernels import reference
from tests.unit.kernels.columns_reference import (
    Message,
    Row,
    buffers_of,
    parse,
    produced,
    row_of,
)

ALL = 1023
VECTORS = Path(__file__).parents[2] / "vectors" / "columnar"
EVERY = [1 << i for i in range(10)]

short = st.text(max_size=12)
integers = {"b": 8, "s": 16, "I": 32, "l": 64, "L": 64}
unsigned = {"B": 8, "u": 16, "i": 32, "T": 64}
leaves = st.one_of(
    st.booleans().map(lambda v: Field("t", v)),
    *(
        st.integers(-(1 << n - 1), (1 << n - 1) - 1).map(lambda v, k=k: Field(k, v))
        for k, n in integers.items()
    ),
    *(st.integers(0, (1 << n) - 1).map(lambda v, k=k: Field(k, v)) for k, n in unsigned.items()),
    st.floats(width=32).map(lambda v: Field("f", v)),
    st.floats().map(lambda v: Field("d", v)),
    st.builds(Decimal, st.integers(0, 255), st.integers(0, (1 << 32) - 1)).map(
        lambda v: Field("D", v)
    ),
    st.binary(max_size=20).map(lambda v: Field("S", v)),
    st.text(max_size=20).map(lambda v: Field("S", v.encode())),
    st.binary(max_size=20).map(lambda v: Field("x", v)),
    st.just(Field("V", None)),
)


def tables(values: Any) -> Any:
    return st.lists(st.tuples(short, values), max_size=4).map(Table.from_fields)


fields = st.recursive(
    leaves,
    lambda inner: (
        tables(inner).map(lambda v: Field("F", v))
        | st.lists(inner, max_size=4).map(lambda v: Field("A", tuple(v)))
    ),
    max_leaves=10,
)
names = short | st.sampled_from(("x-key", "x-delay", "x-deliver-at", "x-group-id", "x-tombstone"))
marker = st.just(("x-tombstone", Field("t", True)))
headers = st.none() | st.lists(st.tuples(names, fields) | marker, max_size=5).map(Table.from_fields)
octet = st.none() | st.integers(0, 255)
optional = st.none() | short
properties = st.builds(
    Properties,
    content_type=optional,
    content_encoding=optional,
    headers=headers,
    delivery_mode=octet,
    priority=octet,
    correlation_id=optional,
    reply_to=optional,
    expiration=st.none() | st.integers(0, 315_360_000_000).map(str),
    message_id=optional,
    timestamp=st.none() | st.integers(0, (1 << 64) - 1),
    type=optional,
    user_id=optional,
    app_id=optional,
    cluster_id=optional,
)
messages = st.builds(
    Message,
    exchange=short,
    routing_key=short,
    properties=properties,
    body=st.binary(max_size=60),
    cut=st.sampled_from((131064, 7, 1)),
)


def block_of(items: list[Message], lead: bytes = b"") -> tuple[bytes, int]:
    """(block, offset of the ENQUEUE command in it)."""
    command = reference.enqueue(
        1, 1, [item.record() for item in items], [len(item.body) for item in items], 0
    )
    return lead + command + bytes(16), len(lead)


def written(
    items: list[Message], wanted: int = ALL, max_rows: int = 1000, max_bytes: int = 1 << 20
) -> ColumnWriter:
    writer = ColumnWriter(wanted, max_rows, max_bytes)
    block, at = block_of(items)
    writer.append(block, at, 0, len(items), 5, 1000)
    return writer


def resealed(data: bytes) -> bytes:
    """The frame with a checksum that fits."""
    check = crc32c(data[40:], crc32c(data[:36]))
    return data[:36] + check.to_bytes(4, "little") + data[40:]


# --- records to columns ----------------------------------------------------------------------


@given(hostile.PROPERTIES, hostile.BODIES)
def test_whatever_a_client_sends_becomes_a_row(properties: Properties, body: bytes) -> None:
    builder = CommandBuilder()
    target = PublishTarget(builder, 0, None)
    parts = names_of("t", "route"), hostile.content(properties, body)
    target.publish(parts, len(body), 0)
    builder.discard_unsent()
    writer = ColumnWriter(ALL, 1, 1 << 20)
    assert writer.append(bytes(target.pending[0].bytes()), 0, 0, 1, 7, 0) == 1
    assert ColumnFrame(bytes(writer.finish(8))).rows == 1


@given(st.lists(st.lists(messages, min_size=1, max_size=6), max_size=4), st.data())
def test_a_frame_holds_what_the_records_say(runs: list[list[Message]], data: Any) -> None:
    wanted = data.draw(st.integers(1, ALL) | st.just(ALL))
    compression = data.draw(st.sampled_from(columns.COMPRESSIONS))
    writer = ColumnWriter(wanted, 1000, 1 << 24)
    expected: list[Row] = []
    bases: list[int] = []
    at = 0
    for items in runs:
        at += data.draw(st.integers(0, 2))
        first = data.draw(st.integers(0, len(items) - 1))
        count = data.draw(st.integers(0, len(items) - first))
        time_ms, acquired, delivered = (data.draw(st.integers(0, 1 << 20)) for _ in range(3))
        block, command = block_of(items, data.draw(st.sampled_from((b"", b"12345678"))))
        assert writer.append(block, command, first, count, at, time_ms, acquired, delivered) == (
            count
        )
        for k, item in enumerate(items[first : first + count]):
            expected.append(row_of(item, wanted, at + k, time_ms, acquired, delivered))
            bases.append(at + k)
        at += count
    plain = writer.finish(at + 9)
    assert len(plain) <= writer.bytes
    base, after, rows = parse(plain)
    assert rows == expected
    assert (base, after) == (bases[0] if bases else at + 9, at + 9)

    frame = ColumnFrame(writer.finish(at + 9, compression))
    assert (frame.columns, frame.rows, frame.base, frame.next) == (wanted, len(rows), base, after)
    assert buffers(frame) == buffers(ColumnFrame(plain))
    if wanted & columns.OFFSET:
        assert frame.offsets().tolist() == bases
        dense = not bases or bases == list(range(bases[0], bases[0] + len(bases)))
        assert (frame.buffers(columns.OFFSET)[0].nbytes == 0) == (dense or not rows)
    else:
        with pytest.raises(ValueError, match="offset"):
            frame.offsets()


def buffers(frame: ColumnFrame) -> dict[int, list[bytes]]:
    return {bit: [bytes(b) for b in frame.buffers(bit)] for bit in EVERY if frame.columns & bit}


@given(st.lists(messages, min_size=1, max_size=12), st.data())
def test_a_frame_takes_rows_up_to_its_bounds(items: list[Message], data: Any) -> None:
    max_rows = data.draw(st.integers(1, 14))
    max_bytes = data.draw(st.integers(0, 4000))
    block, at = block_of(items)
    done = 0
    while done < len(items):
        writer = ColumnWriter(ALL, max_rows, max_bytes)
        taken = writer.append(block, at, done, len(items) - done, done, 0)
        assert taken == writer.rows >= 1
        assert taken <= max_rows
        if taken < len(items) - done:
            assert writer.full
            assert writer.append(block, at, done + taken, 1, done + taken, 0) == 0
        made = writer.finish(done + taken)
        assert len(made) <= writer.bytes
        assert taken == 1 or writer.bytes <= max_bytes
        expected = [
            row_of(item, ALL, done + k, 0, 0, 0)
            for k, item in enumerate(items[done : done + taken])
        ]
        assert parse(made)[2] == expected
        done += taken


def test_a_large_body_in_many_frames_is_one_value() -> None:
    body = random.Random(1).randbytes(500_000)
    for cut in (131064, 4096):
        message = Message("", "q", Properties(), body, cut)
        writer = written([message, message], columns.VALUE, max_bytes=1 << 30)
        frame = ColumnFrame(writer.finish(2))
        assert frame.value_max == len(body)
        assert bytes(frame.buffers(columns.VALUE)[2]) == body + body


def test_a_first_record_above_the_bound_is_taken_alone() -> None:
    message = Message("", "q", Properties(), bytes(1000))
    writer = written([message, message], max_bytes=100)
    assert (writer.rows, writer.full) == (1, True)
    block, at = block_of([message])
    assert writer.append(block, at, 0, 1, 6, 0) == 0


def test_the_first_x_key_that_is_text_is_the_key() -> None:
    table = Table.from_fields(
        [
            ("x-key", Field("l", 3)),
            ("x-key", Field("x", b"\xff")),
            ("x-key", Field("S", b"late")),
        ]
    )
    message = Message("ex", "rk", Properties(headers=table), b"")
    _, _, (row,) = parse(written([message], columns.KEY | columns.HEADERS).finish(1))
    assert row.key == b"\xff"
    assert row.headers == [(b"x-key", b"3"), (b"x-key", b"late")]


@pytest.mark.parametrize(
    ("field", "body", "value", "shown"),
    [
        (Field("t", True), b"", None, []),
        (Field("t", True), b"x", b"x", [(b"x-tombstone", b"true")]),
        (Field("t", False), b"", b"", [(b"x-tombstone", b"false")]),
        (Field("S", b"true"), b"", b"", [(b"x-tombstone", b"true")]),
        (Field("V", None), b"", b"", [(b"x-tombstone", None)]),
    ],
)
def test_an_empty_body_with_the_marker_is_a_null_value(
    field: Field, body: bytes, value: bytes | None, shown: list[tuple[bytes, bytes | None]]
) -> None:
    message = Message(
        "", "q", Properties(headers=Table.from_fields([("x-tombstone", field)])), body
    )
    for wanted in (columns.VALUE, columns.VALUE | columns.HEADERS, ALL):
        _, _, (row,) = parse(written([message], wanted).finish(1))
        assert row.value == value
        if wanted & columns.HEADERS:
            assert row.headers == shown


def test_nulls_stay_nulls_and_empty_values_stay_empty() -> None:
    rows = [Row(value=value, headers=[(b"x-tombstone", b"h")]) for value in (b"a", None, b"", None)]
    wanted = columns.VALUE | columns.HEADERS
    frame = ColumnFrame(build_frame(wanted, 4, 0, 0, buffers_of(wanted, rows)))
    body, n, arg = encode_enqueue(frame, 0, 4, b"", b"q")
    command = reference.command(1, 0, 0, 0, n, arg, body)
    writer = ColumnWriter(wanted, 10, 10_000)
    assert writer.append(command, 0, 0, n, 0, 0) == n
    _, _, found = parse(writer.finish(n))
    assert [row.value for row in found] == [b"a", None, b"", None]
    # A text of that name is an ordinary header, which gives way to the marker.
    assert [row.headers for row in found] == [rows[0].headers, [], rows[2].headers, []]


def test_names_that_are_not_utf8_are_mended() -> None:
    fields = (
        b"\x02\xff\xfeS\x00\x00\x00\x01v" + b"\x01aF\x00\x00\x00\x08\x01\xffS\x00\x00\x00\x01\xc0"
    )
    header = struct.pack(">HHQH", 60, 0, 0, 0x2000) + struct.pack(">I", len(fields)) + fields
    record = b"\x00\x00\x02\x00\x01" + struct.pack(">I", len(header)) + header + b"\xce"
    writer = ColumnWriter(columns.HEADERS, 10, 10000)
    writer.append(reference.enqueue(1, 1, [record], [0], 0), 0, 0, 1, 0, 0)
    _, _, (row,) = parse(writer.finish(1))
    assert row.headers == [
        ("\ufffd\ufffd".encode(), b"v"),
        (b"a", '{"\ufffd":"\ufffd"}'.encode()),
    ]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (Field("t", True), b"true"),
        (Field("b", -128), b"-128"),
        (Field("l", -(1 << 63)), b"-9223372036854775808"),
        (Field("T", (1 << 64) - 1), b"18446744073709551615"),
        (Field("d", 0.1), b"0.1"),
        (Field("d", 1e16), b"1e+16"),
        (Field("d", 3.0), b"3.0"),
        (Field("d", float("-inf")), b"-Infinity"),
        (Field("f", 1.5), b"1.5"),
        (Field("D", Decimal(2, 315)), b"3.15"),
        (Field("D", Decimal(4, 7)), b"0.0007"),
        (Field("D", Decimal(0, 7)), b"7"),
        (Field("V", None), None),
        (Field("A", (Field("V", None), Field("S", b'\x01"\\\n'))), rb'[null,"\u0001\"\\\n"]'),
    ],
)
def test_headers_are_json_text(field: Field, text: bytes | None) -> None:
    message = Message("", "q", Properties(headers=Table.from_fields([("k", field)])), b"")
    _, _, (row,) = parse(written([message], columns.HEADERS).finish(1))
    assert row.headers == [(b"k", text)]


@settings(max_examples=200)
@given(st.lists(messages, min_size=1, max_size=3), st.data())
def test_damaged_records_are_refused_and_the_rows_before_them_stand(
    items: list[Message], data: Any
) -> None:
    block, at = block_of(items)
    broken = bytearray(block)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(broken[: data.draw(st.integers(0, len(broken)))])
    for damaged in (bytes(broken), cut):
        writer = ColumnWriter(ALL, 100, 1 << 20)
        try:
            taken = writer.append(damaged, at, 0, len(items), 0, 0)
        except ValueError:
            taken = writer.rows
        assert taken == writer.rows
        assert ColumnFrame(writer.finish(taken)).rows == taken


def test_arguments_outside_their_bounds_are_refused() -> None:
    for wanted in (0, 1024, -1, 1 << 40):
        with pytest.raises((ValueError, OverflowError)):
            ColumnWriter(wanted, 1, 1)
    block, at = block_of([Message("", "q", Properties(), b"x")])
    writer = ColumnWriter(ALL, 10, 1000)
    for arguments in (
        (block, at, 0, 2, 0, 0),
        (block, at, 1, 1, 0, 0),
        (block, at, -1, 1, 0, 0),
        (block, at, 0, -1, 0, 0),
        (block, at + 8, 0, 1, 0, 0),
        (block, len(block), 0, 1, 0, 0),
        (block, -8, 0, 1, 0, 0),
        (block, at, 0, 1, 1 << 63, 0),
        (block, at, 0, 1, 0, 1 << 63),
    ):
        with pytest.raises(ValueError):
            writer.append(*arguments)
    assert writer.rows == 0
    with pytest.raises(ValueError, match="compression"):
        writer.finish(0, "gzip")


# --- reading frames --------------------------------------------------------------------------


def sample(compression: str = "", wanted: int = ALL) -> bytes:
    table = Table.of({"a": 1, "b": "two", "x-key": "k", "v": None})
    items = [
        Message("ex", "rk", Properties(headers=table, priority=3), b"value"),
        Message("", "q", Properties(), b""),
        Message("", "q", Properties(content_type="text"), b"z" * 300),
    ]
    writer = written(items, wanted)
    block, at = block_of(items)
    writer.append(block, at, 0, 3, 100, 2000, 3, 2)
    return writer.finish(103, compression)


@settings(max_examples=500)
@given(st.sampled_from(columns.COMPRESSIONS), st.data())
def test_mutated_frames_are_refused_or_safe(compression: str, data: Any) -> None:
    made = bytearray(sample(compression))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(made) - 1))
        if data.draw(st.booleans()):
            made[at] = data.draw(st.integers(0, 255))
        else:
            at = min(at & ~3, len(made) - 4)
            made[at : at + 4] = data.draw(
                st.sampled_from((0, 1, 7, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 22, 1 << 30))
            ).to_bytes(4, "little")
    frame_bytes = resealed(bytes(made))
    if data.draw(st.booleans()):
        cut = bytes(made[: data.draw(st.integers(0, len(made)))])
        frame_bytes = resealed(cut) if len(cut) >= 40 else cut
    use(frame_bytes)


def use(data: bytes) -> None:
    """All that can be done with a frame; only ValueError may come out of it."""
    try:
        frame = ColumnFrame(data, 1 << 20)
    except ValueError:
        return
    buffers(frame)
    if frame.columns & columns.OFFSET:
        assert len(frame.offsets()) == frame.rows
    for bit in (columns.EXCHANGE, columns.ROUTING_KEY):
        if frame.columns & bit:
            assert sum(count for _, count, _ in frame.runs(bit)) == frame.rows
    for key in (b"q", None):
        try:
            body, count, arg = encode_enqueue(frame, 0, frame.rows, b"", key, b"id-")
        except ValueError:
            continue
        flags = enqueue_flags(frame, 0, frame.rows)
        check_command(reference.command(1, flags, 0, 0, count, arg, body), count)


def check_command(command: bytes, count: int) -> None:
    """The command is one that builders take and readers read."""
    batch.CommandBuilder().adopt(command, 0, len(command))
    for i in range(count):
        _, content = content_kernel.split_record(batch.record(command, 0, i))
        content_kernel.content_parts(content)
    again = ColumnWriter(ALL, 1 << 20, 1 << 30)
    assert again.append(command, 0, 0, count, 0, 0) == count


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    use(data)
    if len(data) >= 64:
        use(resealed(struct.pack("<IHH", 0x46435643, 1, 0) + data[8:]))


def test_every_byte_is_under_the_checksum() -> None:
    for compression in columns.COMPRESSIONS:
        made = sample(compression)
        for at in range(len(made)):
            changed = bytearray(made)
            changed[at] ^= 1
            with pytest.raises(ValueError):
                ColumnFrame(bytes(changed))


def test_every_cut_is_refused() -> None:
    made = sample()
    for length in range(len(made)):
        with pytest.raises(ValueError):
            ColumnFrame(made[:length])
        if length >= 64:
            with pytest.raises(ValueError):
                ColumnFrame(resealed(made[:length]))
    with pytest.raises(ValueError):
        ColumnFrame(resealed(made + bytes(8)))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_body_never_becomes_larger_than_it_says(compression: str) -> None:
    huge = [Message("", "q", Properties(), bytes(1 << 20))] * 8
    writer = written(huge, columns.VALUE, max_bytes=1 << 30)
    made = writer.finish(8, compression)
    assert len(made) < 1 << 18
    assert ColumnFrame(made).rows == 8
    with pytest.raises(ValueError, match="too large"):
        ColumnFrame(made, 1 << 20)
    lied = made[:48] + (4096).to_bytes(8, "little") + made[56:]
    with pytest.raises(ValueError):
        ColumnFrame(resealed(lied))


def test_bytes_that_may_change_are_copied() -> None:
    data = bytearray(sample())
    frame = ColumnFrame(data)
    before = buffers(frame)
    data[:] = bytes(len(data))
    assert buffers(frame) == before
    assert ColumnFrame(memoryview(bytes(8) + sample())[8:]).rows == 6


def test_a_column_that_is_not_there_has_no_buffers() -> None:
    frame = ColumnFrame(sample(wanted=columns.VALUE))
    for bit in (columns.KEY, 3, 0, 1024):
        with pytest.raises(ValueError):
            frame.buffers(bit)
    with pytest.raises(ValueError):
        frame.runs(columns.ROUTING_KEY)


def test_rows_at_the_bound_are_read_and_one_more_is_not() -> None:
    made = bytearray(build_frame(columns.OFFSET, columns.ROWS_MAX, 0, 0, [b""]))
    assert len(ColumnFrame(bytes(made)).offsets()) == columns.ROWS_MAX
    made[12:16] = (columns.ROWS_MAX + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="rows"):
        ColumnFrame(resealed(bytes(made)))
    with pytest.raises(ValueError, match="rows"):
        build_frame(columns.OFFSET, columns.ROWS_MAX + 1, 0, 0, [b""])


# --- columns to frames and records -----------------------------------------------------------

text = st.text(max_size=12).map(str.encode)
pairs = st.lists(
    st.tuples(
        text | st.sampled_from((b"x-key", b"x-delay", b"x-tombstone")),
        st.none() | text | st.binary(max_size=12),
    ),
    max_size=4,
)
clean = properties.map(lambda p: structs.replace(p, user_id=None))
rows_to_produce = st.builds(
    Row,
    offset=st.integers(0, 1 << 40),
    timestamp=st.integers(0, (1 << 63) - 1),
    key=st.none() | text | st.binary(max_size=12),
    value=st.none() | st.binary(max_size=60),
    headers=st.none() | pairs,
    exchange=text,
    routing_key=text,
    properties=st.just(b"") | clean.map(lambda p: Message("", "", p, b"").header),
    delivery_count=st.integers(0, 100),
    redelivered=st.integers(0, 100),
)


@given(st.lists(rows_to_produce, max_size=9), st.data())
def test_built_frames_are_read_again(rows: list[Row], data: Any) -> None:
    wanted = data.draw(st.integers(1, ALL) | st.just(ALL))
    compression = data.draw(st.sampled_from(columns.COMPRESSIONS))
    made = build_frame(
        wanted,
        len(rows),
        3,
        12,
        [b and b + bytes(40) for b in buffers_of(wanted, rows)],
        compression,
    )
    frame = ColumnFrame(made)
    flat = [bytes(b) for bit in EVERY if wanted & bit for b in frame.buffers(bit)]
    assert flat == buffers_of(wanted, rows)
    if not compression:
        assert parse(made)[:2] == (3, 12)


@given(st.lists(rows_to_produce, min_size=1, max_size=9), st.data())
def test_produced_rows_become_the_records_of_the_reference(rows: list[Row], data: Any) -> None:
    wanted = data.draw(st.integers(1, ALL) | st.just(ALL))
    frame = ColumnFrame(build_frame(wanted, len(rows), 40, 50, buffers_of(wanted, rows)))
    exchange, prefix = data.draw(short), data.draw(st.sampled_from(("", "job-")))
    key = data.draw(short) if not wanted & columns.ROUTING_KEY else data.draw(st.none() | short)
    first = data.draw(st.integers(0, len(rows) - 1))
    count = data.draw(st.integers(1, len(rows) - first))
    expected = []
    for i, row in enumerate(rows[first : first + count], first):
        seen = only(row, wanted)
        message_id = prefix and f"{prefix}{40 + i}"
        has_value = bool(wanted & columns.VALUE)
        expected.append(produced(seen, exchange, key, message_id, has_value=has_value))
    body, n, arg = encode_enqueue(
        frame,
        first,
        count,
        exchange.encode(),
        None if key is None else key.encode(),
        prefix.encode(),
    )
    flags = enqueue_flags(frame, first, count)
    command = reference.command(1, flags, 0, 0, n, arg, body)
    check_command(command, count)
    assert n == count
    found = [channel_zero(batch.record(command, 0, i)) for i in range(n)]
    assert found == [channel_zero(item.record()) for item in expected]
    assert batch.enqueue_bytes(command, 0) == sum(len(item.body) for item in expected)
    assert flags & 1 == (len({len(item.body) for item in expected}) == 1)
    assert bool(flags & 2) == any(item.properties.priority is not None for item in expected)
    assert bool(flags & 4) == any(item.properties.expiration is not None for item in expected)
    assert bool(flags & 8) == any(has_queue_header(item.properties) for item in expected)
    twin = reference.enqueue(0, 0, [batch.record(command, 0, i) for i in range(n)], [0] * n, 0)
    assert command[40:] == twin[40:]


def only(row: Row, wanted: int) -> Row:
    """The row as a frame with these columns shows it."""
    if not wanted & columns.TIMESTAMP:
        row = replace(row, timestamp=None)
    if not wanted & columns.KEY:
        row = replace(row, key=None)
    if not wanted & columns.VALUE:
        row = replace(row, value=None)
    if not wanted & columns.HEADERS:
        row = replace(row, headers=None)
    if not wanted & columns.PROPERTIES:
        row = replace(row, properties=None)
    return row


def has_queue_header(properties: Properties) -> bool:
    """Whether a message has a header that queues act on."""
    names = () if properties.headers is None else properties.headers
    return any(name in names for name in ("x-delay", "x-deliver-at", "x-group-id"))


def channel_zero(record: bytes) -> list[Any]:
    """A record without its channel numbers."""
    key, content = content_kernel.split_record(record)
    return [key, *content_kernel.content_parts(content)]


def test_commands_go_through_a_builder_as_they_are() -> None:
    frame = ColumnFrame(sample())
    body, count, arg = encode_enqueue(frame, 0, 6, b"ex", None)
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 77, None)
    target.command(batch.CMD_ENQUEUE, enqueue_flags(frame, 0, 6), count, arg, body)
    entry = builder.take_entry(1, 1, 1, 5)
    (found,) = batch.commands(entry.data)
    assert found[0] == batch.CMD_ENQUEUE
    writer = ColumnWriter(ALL, 10, 10_000)
    assert writer.append(entry.data, found[6], 0, 6, 0, 0) == 6
    _, _, rows = parse(writer.finish(6))
    assert [row.value for row in rows] == [b"value", b"", b"z" * 300] * 2
    assert [row.key for row in rows] == [b"k", b"q", b"q"] * 2


def test_a_large_value_is_split_into_frames() -> None:
    values = [random.Random(2).randbytes(n) for n in (131064, 131065, 400_000, 0)]
    rows = [Row(value=value) for value in values]
    wanted = columns.VALUE
    frame = ColumnFrame(build_frame(wanted, 4, 0, 0, buffers_of(wanted, rows)))
    body, n, arg = encode_enqueue(frame, 0, 4, b"", b"q")
    command = reference.command(1, 0, 0, 0, n, arg, body)
    for i, value in enumerate(values):
        record = batch.record(command, 0, i)
        _, content = content_kernel.split_record(record)
        assert content_kernel.content_parts(content)[1] == value
        assert max(len(part) for part in content_frames(content)) <= 131072


def content_frames(content: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(content):
        size = int.from_bytes(content[at + 3 : at + 7], "big") + 8
        found.append(content[at : at + size])
        at += size
    return found


def header_of(**values: Any) -> bytes:
    return Message("", "", Properties(**values), b"").header


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row(properties=header_of(user_id="guest")), "user-id"),
        (Row(properties=header_of(expiration="soon")), "expiration"),
        (Row(properties=header_of(expiration="")), "expiration"),
        (Row(properties=header_of(expiration="315360000001")), "expiration"),
        (Row(properties=header_of(reply_to="amq.rabbitmq.reply-to")), "reply"),
        (Row(properties=header_of(app_id="x")[:-1]), "properties"),
        (Row(properties=b"\x00"), "properties"),
        (Row(timestamp=-1), "timestamp"),
        (Row(routing_key=b"\xff"), "routing key"),
        (Row(routing_key=b"r" * 256), "routing key"),
        (Row(headers=[(b"\xff", b"")]), "header"),
        (Row(headers=[(b"h" * 256, b"")]), "header"),
        (Row(headers=[(b"h", bytes(131064))]), "content header"),
        (Row(key=bytes(131064)), "content header"),
    ],
)
def test_what_must_not_be_produced_is_refused_with_its_row(row: Row, reason: str) -> None:
    name = next(name for name, value in vars(row).items() if value is not None)
    bit = {
        "properties": columns.PROPERTIES,
        "timestamp": columns.TIMESTAMP,
        "routing_key": columns.ROUTING_KEY,
        "headers": columns.HEADERS,
        "key": columns.KEY,
    }[name]
    good = Row(timestamp=0, routing_key=b"r", properties=b"", headers=None, key=None, value=b"")
    frame = ColumnFrame(build_frame(bit, 2, 0, 0, buffers_of(bit, [good, row])))
    key = None if bit == columns.ROUTING_KEY else b"q"
    with pytest.raises(ValueError, match=f"row 1: .*{reason}"):
        encode_enqueue(frame, 0, 2, b"", key)
    assert encode_enqueue(frame, 0, 1, b"", key)[1] == 1


def test_arguments_of_a_produce_are_checked() -> None:
    frame = ColumnFrame(sample(wanted=columns.VALUE))
    for first, count in ((0, 0), (0, 7), (6, 1), (-1, 1), (0, -1), (1 << 62, 1 << 62)):
        with pytest.raises(ValueError):
            encode_enqueue(frame, first, count, b"", b"q")
        with pytest.raises(ValueError):
            enqueue_flags(frame, first, count)
    with pytest.raises(ValueError, match="routing key"):
        encode_enqueue(frame, 0, 1, b"", None)
    with pytest.raises(ValueError, match="255"):
        encode_enqueue(frame, 0, 1, b"x" * 256, b"q")
    with pytest.raises(ValueError, match="255"):
        encode_enqueue(frame, 0, 1, b"", b"q" * 256)
    with pytest.raises(ValueError, match="prefix"):
        encode_enqueue(frame, 0, 1, b"", b"q", b"p" * 236)
    assert encode_enqueue(frame, 0, 1, b"x" * 255, b"q" * 255, b"p" * 235)[1] == 1


def test_rows_within_a_bound() -> None:
    rows = [Row(value=bytes(1000)) for _ in range(100)]
    frame = ColumnFrame(build_frame(columns.VALUE, 100, 0, 0, buffers_of(columns.VALUE, rows)))
    done = 0
    while done < 100:
        count = frame.rows_within(done, 10_000)
        body, _, _ = encode_enqueue(frame, done, count, b"", b"q")
        assert len(body) <= 10_000
        done += count
    assert frame.rows_within(0, 1) == 1
    assert frame.rows_within(100, 1) == 0
    with pytest.raises(ValueError):
        frame.rows_within(101, 1)


def test_runs_of_equal_names() -> None:
    rows = [Row(routing_key=k) for k in (b"a", b"a", b"", b"", b"b", b"a")]
    wanted = columns.ROUTING_KEY
    frame = ColumnFrame(build_frame(wanted, 6, 0, 0, buffers_of(wanted, rows)))
    assert frame.runs(wanted) == [(0, 2, b"a"), (2, 2, b""), (4, 1, b"b"), (5, 1, b"a")]


def test_slices_of_arrays_begin_anywhere() -> None:
    ends = struct.pack("<4i", 3, 5, 5, 9)
    frame = ColumnFrame(build_frame(columns.VALUE, 3, 0, 0, [None, ends, b"abcdefghij"]))
    found = frame.buffers(columns.VALUE)
    assert bytes(found[1]) == struct.pack("<4i", 0, 2, 2, 6)
    assert bytes(found[2]) == b"defghi"


@pytest.mark.parametrize(
    ("wanted", "rows", "buffers"),
    [
        (columns.VALUE, 1, [b"", struct.pack("<2i", 0, 5), b"abc"]),
        (columns.VALUE, 2, [b"", struct.pack("<3i", 0, 3, 1), b"abc"]),
        (columns.VALUE, 2, [b"", struct.pack("<3i", 0, -1, 1), b"abc"]),
        (columns.VALUE, 1, [b"", struct.pack("<2i", -1, 2), b"abc"]),
        (columns.VALUE, 2, [b"", struct.pack("<2i", 0, 1), b"abc"]),
        (columns.VALUE, 9, [b"\x00", bytes(40), b""]),
        (columns.VALUE, 1, [b"", bytes(8)]),
        (columns.TIMESTAMP, 1, [b"1234"]),
        (columns.DELIVERY_COUNT, 1, [b""]),
        (columns.HEADERS, 1, [b"", struct.pack("<2i", 1, 2), bytes(12), b"", b"", bytes(12), b""]),
        (columns.HEADERS, 1, [b"", struct.pack("<2i", 0, 2), bytes(8), b"", b"", bytes(12), b""]),
        (columns.VALUE, -1, [b"", bytes(8), b""]),
        (0, 0, []),
        (1024, 0, [b""]),
    ],
)
def test_buffers_that_do_not_fit_are_refused(wanted: int, rows: int, buffers: list[bytes]) -> None:
    with pytest.raises(ValueError):
        build_frame(wanted, rows, 0, 0, buffers)


def test_an_empty_frame() -> None:
    made = build_frame(ALL, 0, 7, 7, [None] * 23)
    frame = ColumnFrame(made)
    assert (frame.rows, frame.base, frame.next) == (0, 7, 7)
    assert parse(made)[2] == []
    assert made == ColumnWriter(ALL, 1, 1).finish(7)


# --- what was written before -----------------------------------------------------------------


def test_frames_that_older_code_wrote_are_read() -> None:
    expected = buffers(ColumnFrame(sample()))
    for name in ("plain", "zstd", "lz4"):
        frame = ColumnFrame((VECTORS / f"{name}.bin").read_bytes())
        assert (frame.columns, frame.rows, frame.base, frame.next) == (ALL, 6, 5, 103)
        assert buffers(frame) == expected
    assert (VECTORS / "plain.bin").read_bytes() == sample()


def test_raw_bytearrays_have_their_length() -> None:
    for size in (0, 1, 4096, 5 << 20):
        assert len(columns.raw_bytearray(size)) == size
    with pytest.raises(ValueError, match="-1"):
        columns.raw_bytearray(-1)
