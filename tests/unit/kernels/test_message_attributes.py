"""What records ask of their queue, against a naive reading by the AMQP codec."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import codec
from convoymq.kernels import batch
from convoymq.kernels.content import RECORD_ASKS, RECORD_GROUPED, RECORD_WAITS
from convoymq.kernels.group_table import GroupTable
from convoymq.messages.attributes import DELAY_MS_MAX, DELIVER_AT_MS_MAX, asked_delay
from convoymq.model.tables import INTEGER_CODES, Field, Table
from tests.unit.kernels import reference
from tests.unit.kernels.columns_reference import Message
from tests.unit.kernels.test_columns import fields, properties, short
from tests.unit.kernels.test_frames import make_buffer

NAMES = ("x-delay", "x-deliver-at", "x-group-id")
BOUNDS = {
    "b": (-(1 << 7), (1 << 7) - 1),
    "B": (0, (1 << 8) - 1),
    "s": (-(1 << 15), (1 << 15) - 1),
    "u": (0, (1 << 16) - 1),
    "I": (-(1 << 31), (1 << 31) - 1),
    "i": (0, (1 << 32) - 1),
    "l": (-(1 << 63), (1 << 63) - 1),
    "L": (-(1 << 63), (1 << 63) - 1),
}
numbers = st.sampled_from(sorted(BOUNDS)).flatmap(
    lambda code: st.builds(Field, st.just(code), st.integers(*BOUNDS[code]))
)
groups = st.builds(Field, st.sampled_from("Sx"), st.sampled_from([b"", b"a", b"b", b"\xff" * 9]))
tables = st.lists(
    st.tuples(st.sampled_from(NAMES), numbers | groups | fields) | st.tuples(short, fields),
    max_size=5,
).map(Table.from_fields)
messages = st.builds(
    Message,
    exchange=short,
    routing_key=short,
    properties=st.builds(
        spec.Properties,
        content_type=st.none() | short,
        content_encoding=st.none() | short,
        headers=st.none() | tables,
        priority=st.none() | st.integers(0, 255),
    )
    | properties,
    body=st.binary(max_size=9),
)


NOW_MS = 1_000_000
DUE_NONE = 0
DUE_DELAY = 1
DUE_TIME = 2


def naive(message: Message) -> tuple[int, bytes | None]:
    """(until when it waits, or 0; its group) of one message that is published at NOW_MS."""
    headers = codec.decode_header(message.header).properties.headers
    when: tuple[int, int] | None = None
    group: Field | None = None
    for name, field in () if headers is None else headers.items():
        if name in NAMES[:2] and when is None:
            when = DUE_NONE, 0
            if field.code in INTEGER_CODES:
                assert isinstance(field.value, int)
                when = (DUE_DELAY if name == "x-delay" else DUE_TIME), field.value
        if name == "x-group-id" and group is None:
            group = field
    found = group.value if group is not None and group.code in "Sx" else None
    assert found is None or isinstance(found, bytes)
    kind, number = when or (DUE_NONE, 0)
    due_ms = 0
    if kind == DUE_DELAY:
        due_ms = NOW_MS + min(number, DELAY_MS_MAX)
    elif kind == DUE_TIME:
        due_ms = min(number, (1 << 48) - 1)
    return (due_ms, None) if due_ms > NOW_MS else (0, found)


@given(st.lists(messages, min_size=1, max_size=8), st.data())
def test_headers_are_what_the_codec_reads(items: list[Message], data: st.DataObject) -> None:
    items = [item for item in items for _ in range(data.draw(st.integers(1, 2)))]
    command = reference.enqueue(
        1, 1, [item.record() for item in items], [len(item.body) for item in items], 0
    )
    first = data.draw(st.integers(0, len(items)))
    count = data.draw(st.integers(0, len(items) - first))
    table = GroupTable()
    found = table.enqueue(bytes(48) + command, 7, 48, first, count, NOW_MS, -1)
    given: dict[int, tuple[int, int]] = {}
    sizes = 0
    for at in range(0, len(found), 5):
        due_ms, begun, length, size, mark = found[at : at + 5]
        assert size == sum(len(item.body) for item in items[begun : begun + length])
        sizes += size
        given.update((record, (due_ms, mark)) for record in range(begun, begun + length))
    assert list(given) == sorted(given)
    seen: set[bytes] = set()
    for record in range(first, first + count):
        due_ms, group = naive(items[record])
        assert (record not in given) == (group in seen)
        if record in given:
            assert given[record][0] == due_ms
        if group is not None:
            seen.add(group)
    assert set(table.keys().values()) == seen
    assert sizes + table.size == sum(len(item.body) for item in items[first : first + count])
    assert table.messages == count - len(given)


@given(messages, st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_record_is_read_within_its_bounds(
    message: Message, place: int, octet: int
) -> None:
    record = bytearray(message.record())
    record[place % len(record)] = octet
    command = reference.enqueue(1, 1, [bytes(record)], [0], 0)
    table = GroupTable()
    due_ms, first, count, _, _ = table.enqueue(command, 7, 0, 0, 1, NOW_MS, -1)
    assert (first, count) == (0, 1)
    assert due_ms == 0 or due_ms > NOW_MS
    assert all(key in bytes(record) for key in table.keys().values())


def test_records_outside_the_command_are_refused() -> None:
    message = Message("", "q", spec.Properties(), b"")
    command = reference.enqueue(1, 1, [message.record()], [0], 0)
    for first, count in ((0, 2), (1, 1), (-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            GroupTable().enqueue(command, 7, 0, first, count, NOW_MS, -1)


@given(messages)
def test_the_scanner_flags_headers_that_queues_act_on(message: Message) -> None:
    """Either the command says so that the message was put in, or the owner of the channel that is
    to look at it hears so."""
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56, None)
    ear, (channel,) = make_buffer([1], (target,))
    method = spec.BasicPublish(exchange=message.exchange, routing_key=message.routing_key)
    heard: list[int] = []
    channel.owner.on_publish = lambda key, bits, content, size, flags, tag: heard.append(flags)
    ear.buffer.feed(
        codec.content_frames(1, method, message.properties, message.body, frame_bytes_max=4096)
    )
    assert not ear.events
    if not heard:
        entry = builder.take_entry(7, 1, 1, 1)
        ((_, flags, *_),) = batch.commands(entry.data)
        heard.append(flags)
    names = (
        {name for name, _ in message.properties.headers.items()}
        if (message.properties.headers is not None)
        else set()
    )
    assert bool(heard[0] & 8) == bool(names.intersection(NAMES))
    assert bool(heard[0] & 2) == (message.properties.priority is not None)
    assert bool(heard[0] & 4) == (message.properties.expiration is not None)


def took_the_short_way(headers: Table, serves: int) -> bool:
    """Whether a message was put into its queue's batch without a closer look."""
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56, None)
    target.serves = serves
    ear, (channel,) = make_buffer([1], (target,))
    heard: list[int] = []
    channel.owner.on_publish = lambda *given: heard.append(1)
    sent = spec.Properties(headers=headers)
    ear.buffer.feed(
        codec.content_frames(1, spec.BasicPublish(routing_key="q"), sent, b"", frame_bytes_max=4096)
    )
    assert not ear.events
    assert bool(heard) == (builder.used == 0)
    return not heard


@given(tables)
def test_only_times_that_are_acceptable_go_the_short_way(headers: Table) -> None:
    if took_the_short_way(headers, RECORD_WAITS):
        asked_delay(headers)


@pytest.mark.parametrize("name", ["x-delay", "x-deliver-at"])
def test_a_time_goes_the_short_way_to_a_queue_that_serves_it(name: str) -> None:
    most = DELAY_MS_MAX if name == "x-delay" else DELIVER_AT_MS_MAX
    for code, (low, high) in BOUNDS.items():
        for number in (low, 5, min(high, most)):
            headers = Table.from_fields([("a", Field("S", b"b")), (name, Field(code, number))])
            assert took_the_short_way(headers, RECORD_WAITS)
            assert not took_the_short_way(headers, RECORD_ASKS)
    for field in (Field("l", most + 1), Field("S", b"5"), Field("t", True)):
        assert not took_the_short_way(Table.from_fields([(name, field)]), RECORD_WAITS)


def test_a_group_goes_the_short_way_to_a_queue_that_serves_it() -> None:
    headers = Table.from_fields([("a", Field("S", b"b")), ("x-group-id", Field("S", b"g"))])
    assert took_the_short_way(headers, RECORD_GROUPED)
    assert not took_the_short_way(headers, RECORD_ASKS | RECORD_WAITS)
