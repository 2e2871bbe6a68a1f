"""What streams add to frames and batches: offsets on deliveries, producers in front of records."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import codec
from convoymq.edges.amqp091.codec import Properties
from convoymq.kernels import batch
from convoymq.model.tables import Field, Table
from tests.unit.kernels import reference
from tests.unit.kernels.columns_reference import Message
from tests.unit.kernels.test_columns import messages
from tests.unit.kernels.test_frames import ChannelEar, make_buffer, split

NAME = "x-stream-offset"


def delivered(
    items: list[Message], first_id: int, *, frame_max: int, counted: bool = False
) -> list[tuple[Properties, bytes, int]]:
    """(properties, body, largest frame) of each message as the client gets it."""
    ear, (channel_codec,) = make_buffer([3])
    ear.buffer.frame_max = frame_max
    deliveries = channel_codec.add_consumer(None, 1, b"tag", False, counted, True)
    block = reference.enqueue(
        1, 1, [item.record() for item in items], [len(item.body) for item in items], 0
    )
    channel_codec.deliver(deliveries, first_id, block, 0, 0, len(items), 0, 0)
    found: list[tuple[Properties, bytes, int]] = []
    properties, body, size, largest = Properties(), b"", -1, 0
    for frame in split(ear.buffer.take_output()):
        kind, channel, _ = struct.unpack_from(">BHI", frame)
        assert channel == 3
        assert frame[-1] == 206
        largest = max(largest, len(frame))
        if kind == 2:
            header = codec.decode_header(frame[7:-1])
            properties, body, size = header.properties, b"", header.body_size
        elif kind == 3:
            body += frame[7:-1]
        if kind != 1 and len(body) == size:
            found.append((properties, body, largest))
            largest = 0
    return found


@given(
    st.lists(messages, min_size=1, max_size=6),
    st.integers(0, (1 << 63) - 100),
    st.sampled_from((4096, 131072)),
    st.booleans(),
)
def test_deliveries_of_a_stream_say_their_offset(
    items: list[Message], first_id: int, frame_max: int, old: bool
) -> None:
    if old:
        # Messages that came from another stream have the header of that one.
        fields = [(NAME, Field("l", 77)), ("a", Field("S", b"x")), (NAME, Field("S", b"y"))]
        table = Table.from_fields(fields)
        items = [replace(i, properties=structs.replace(i.properties, headers=table)) for i in items]
    found = delivered(items, first_id, frame_max=frame_max)
    assert len(found) == len(items)
    for k, (item, (properties, body, largest)) in enumerate(zip(items, found, strict=True)):
        assert body == item.body
        assert largest <= frame_max
        kept = [] if item.properties.headers is None else list(item.properties.headers.items())
        kept = [pair for pair in kept if pair[0] != NAME]
        expected = Table.from_fields([*kept, (NAME, Field("l", first_id + k))])
        assert properties == structs.replace(item.properties, headers=expected)


def test_large_bodies_are_cut_for_the_client() -> None:
    body = bytes(range(256)) * 1000
    for cut in (131064, 5000):
        message = Message("", "q", Properties(), body, cut)
        ((properties, found, largest),) = delivered([message], 5, frame_max=4096)
        assert found == body
        assert largest <= 4096
        assert properties.headers == Table.of({NAME: 5})


def test_a_header_frame_never_outgrows_the_clients_limit() -> None:
    for size, fits in ((3900, True), (4060, False)):
        message = Message("", "q", Properties(headers=Table.of({"h": bytes(size)})), b"b")
        ((properties, _, largest),) = delivered([message], 5, frame_max=4096)
        assert largest <= 4096
        assert properties.headers is not None
        assert (NAME in properties.headers) == fits


@given(st.data())
def test_damaged_records_spoil_nothing(data: Any) -> None:
    ear, (channel_codec,) = make_buffer([1])
    deliveries = channel_codec.add_consumer(None, 1, b"t", False, False, True)
    table = Table.of({NAME: 7, "k": "v"})
    record = Message("ex", "rk", Properties(content_type="c", headers=table), b"body").record()
    block = bytearray(reference.enqueue(1, 1, [record] * 2, [4, 4], 0))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(40, len(block) - 1))
        block[at] = data.draw(st.integers(0, 255))
    try:
        channel_codec.deliver(deliveries, 0, bytes(block), 0, 0, 2, 0, 0)
    except ValueError:
        assert ear.buffer.take_output() == b""
        assert channel_codec.unacked == 0
    else:
        assert channel_codec.unacked == 2


# --- producers -------------------------------------------------------------------------------


def publish(target: batch.PublishTarget, body: bytes, tag: int = 0) -> None:
    target.publish([Message("", "q", Properties(), body).record()], len(body), tag)


def commands_of(builder: batch.CommandBuilder) -> list[tuple[int, int, int, bytes]]:
    """(type, session, count, body of a PRODUCER) of all commands."""
    entry = builder.take_entry(1, 1, 1, 1)
    return [
        (
            type_,
            session,
            count,
            batch.command_body(entry.data, at)[: 8 + count] if type_ == batch.CMD_PRODUCER else b"",
        )
        for type_, _, session, _, count, _, at, _ in batch.commands(entry.data)
    ]


def naming(name: bytes, sequence: int, session: int = 9) -> tuple[int, int, int, bytes]:
    return (batch.CMD_PRODUCER, session, len(name), sequence.to_bytes(8, "little") + name)


def records(count: int, session: int = 9) -> tuple[int, int, int, bytes]:
    return (batch.CMD_ENQUEUE, session, count, b"")


def test_sequences_in_succession_share_a_command() -> None:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 9, None)
    for sequence in (4, 5, 6, 8, 9):
        target.name_next(b"p", sequence)
        publish(target, b"x", sequence)
    assert commands_of(builder) == [naming(b"p", 4), records(3), naming(b"p", 8), records(2)]
    assert [item.tags for item in target.pending] == [None, [4, 6], None, [8, 9]]


def test_other_records_never_join_a_producers_command() -> None:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 9, None)
    publish(target, b"plain")
    target.name_next(b"p", 1)
    publish(target, b"named")
    publish(target, b"plain")
    target.name_next(b"p", 2)
    publish(target, b"named")
    target.name_next(b"q", 3)
    publish(target, b"named")
    assert commands_of(builder) == [
        records(1),
        naming(b"p", 1),
        records(1),
        records(1),
        naming(b"p", 2),
        records(1),
        naming(b"q", 3),
        records(1),
    ]


def test_another_session_between_ends_the_command() -> None:
    builder = batch.CommandBuilder()
    target, other = (batch.PublishTarget(builder, n, None) for n in (9, 8))
    target.name_next(b"p", 1)
    publish(target, b"a")
    publish(other, b"b")
    target.name_next(b"p", 2)
    publish(target, b"c")
    assert commands_of(builder) == [
        naming(b"p", 1),
        records(1),
        records(1, 8),
        naming(b"p", 2),
        records(1),
    ]


def test_a_new_batch_names_its_producer_again() -> None:
    builder = batch.CommandBuilder()
    taken: list[tuple[int, int, int, bytes]] = []
    builder.on_full = lambda: taken.extend(commands_of(builder))
    target = batch.PublishTarget(builder, 9, None)
    body = bytes(1 << 20)
    for sequence in range(12):
        target.name_next(b"p", sequence)
        publish(target, body)
    taken += commands_of(builder)
    at = 0
    for (kind, _, _, named), (_, _, count, _) in zip(taken[::2], taken[1::2], strict=True):
        assert kind == batch.CMD_PRODUCER
        assert named == at.to_bytes(8, "little") + b"p"
        at += count
    assert at == 12
    assert len(taken) > 2


@pytest.mark.parametrize("confirms", [False, True])
def test_only_messages_with_the_header_are_looked_at(confirms: bool) -> None:
    builder = batch.CommandBuilder()
    ear, (channel_codec,) = make_buffer([1], (batch.PublishTarget(builder, 9, None),))
    assert isinstance(channel_codec.owner, ChannelEar)
    if confirms:
        channel_codec.select_confirms()
    for headers, looked_at in (
        (None, False),
        (Table.of({"x-stream-producex": "p"}), False),
        (Table.of({"x-stream-sequence": 1}), False),
        (Table.of({"x-stream-producer": "p", "x-stream-sequence": 1}), True),
    ):
        ear.events.clear()
        method = spec.BasicPublish(exchange="", routing_key="q")
        ear.buffer.feed(
            codec.content_frames(
                1, method, Properties(headers=headers), b"body", frame_bytes_max=4096
            )
        )
        assert bool(ear.events) == looked_at
