"""Records in every encoding: one reader of their header, one view of their body."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from convoymq.edges.amqp091 import codec
from convoymq.kernels import batch, columns
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.content import split_record, with_counts
from convoymq.messages import encodings
from convoymq.messages.amqp091 import (
    ContentHeader,
    Properties,
    decode_header,
    encode_header,
    join_header,
    split_header,
)
from convoymq.messages.columns import ColumnWriter
from convoymq.messages.deaths import Death, dead_letter, dead_letter_run, first_death, history_of
from convoymq.messages.record import (
    CUT_OFF,
    as_amqp091,
    content_of,
    cut_body,
    head_of,
    names_of,
    read_record,
    read_stored,
    traits_of,
    with_body,
)
from convoymq.model.errors import Misuse, PeerError
from convoymq.model.tables import Table
from tests import hostile
from tests.examples.message_encoding.card import NUMBER, card_of
from tests.unit.kernels import reference
from tests.unit.kernels.test_frames import make_buffer, split

REJECTED = Death("q", "rejected", 5, "dlx", "dead")


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(encodings.ENCODINGS, NUMBER, "tests.examples.message_encoding.card")


def card(title: bytes, text: bytes) -> bytes:
    return names_of("x", "k") + card_of(title, text)[0]


def plain(body: bytes, **properties: Any) -> bytes:
    return names_of("x", "k") + content_of(Properties(**properties), body)


def block_of(records: list[bytes]) -> bytes:
    sizes = [read_stored(each).header.body_size for each in records]
    return reference.enqueue(1, 1, records, sizes, 0)


# --- the header ------------------------------------------------------------------------------


@settings(max_examples=300)
@given(hostile.PROPERTIES, st.data())
def test_what_the_scanner_takes_can_be_read(properties: Properties, data: st.DataObject) -> None:
    """ADR 0083. The spare flag was taken, and such a message was lost when it died."""
    payload = bytearray(encode_header(ContentHeader(body_size=0, properties=properties)))
    for _ in range(data.draw(st.integers(0, 2))):
        payload[data.draw(st.integers(12, len(payload) - 1))] = data.draw(st.integers(0, 255))
    header = bytes(payload)
    try:
        with_counts(header, 0, 0)
    except ValueError:
        return
    assert encode_header(decode_header(header))[14:] == header[14:]


def test_the_spare_flag_says_nothing() -> None:
    payload = bytearray(
        encode_header(ContentHeader(body_size=1, properties=Properties(priority=3)))
    )
    payload[13] |= 2
    assert decode_header(bytes(payload)).properties == Properties(priority=3)
    content = names_of("", "q") + b"\2\0\1" + struct.pack(">I", len(payload)) + payload + b"\xce"
    letter = dead_letter(content + b"\3\0\1\0\0\0\1a\xce", REJECTED)
    assert letter.deaths == (("q", "rejected"),)


@given(hostile.PROPERTIES)
def test_a_header_taken_apart_is_joined_to_the_same(properties: Properties) -> None:
    header = encode_header(ContentHeader(body_size=7, properties=properties))
    size, values = split_header(header)
    assert join_header(values, size) == header


@given(hostile.PROPERTIES, st.binary(max_size=20), st.data())
def test_traits_are_those_of_the_header_or_none(
    properties: Properties, body: bytes, data: st.DataObject
) -> None:
    record = names_of("x", "k") + content_of(properties, body)
    traits = traits_of(record)
    assert traits.whole
    assert traits.priority == properties.priority
    assert traits.persistent == (properties.delivery_mode == 2)
    assert traits.body_size == len(body)
    end = len(head_of(record)) - 1
    assert traits_of(record[: data.draw(st.integers(0, end - 1))]) == CUT_OFF


# --- encodings -------------------------------------------------------------------------------


def test_encoding_1_is_not_touched() -> None:
    content = split_record(plain(b"body"))[1]
    assert as_amqp091(content) is content
    assert content[:3] == b"\2\0\0"


def test_a_card_is_read_as_amqp_and_stored_as_it_is() -> None:
    record = card(b"title", b"text")
    assert read_stored(record).body == b"\x05titletext"
    message = read_record(record)
    assert (message.exchange, message.routing_key, message.body) == ("x", "k", b"text")
    assert message.headers.to_plain() == {"title": "title"}
    assert message.header.body_size == 4
    assert read_record(cut_body(record, 2)).body == b"te"
    # Its body in its encoding can be replaced, too.
    edited = with_body(split_record(record)[1], b"\0other")
    assert read_record(names_of("x", "k") + edited).body == b"other"


def test_what_is_not_known_or_damaged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    record = card(b"title", b"text")
    damaged = names_of("x", "k") + content_of(Properties(), b"\xff", NUMBER)
    with pytest.raises(PeerError, match="the card is cut off"):
        read_record(damaged)
    monkeypatch.delitem(encodings.ENCODINGS, NUMBER)
    with pytest.raises(PeerError, match="begins with 255"):
        read_record(record)
    with pytest.raises(Misuse, match="encoding 127"):
        content_of(Properties(), b"", NUMBER)
    _, (channel,) = make_buffer([1])
    deliveries = channel.add_consumer(None, 1, b"t")
    with pytest.raises(ValueError, match="begins with 255"):
        channel.deliver(deliveries, 0, block_of([record]), 0, 0, 1, 0, 0)
    with pytest.raises(ValueError, match="begins with 255"):
        ColumnWriter(columns.VALUE, 1, 1 << 20).append(block_of([record]), 0, 0, 1, 0, 0)


MESSAGES = st.lists(
    st.tuples(st.booleans(), st.binary(max_size=255), st.binary(max_size=3000)), max_size=12
)


@given(MESSAGES, st.sampled_from((4096, 131072)), st.booleans(), st.booleans())
def test_deliveries_of_any_mixture(
    given_: list[tuple[bool, bytes, bytes]], frame_max: int, counted: bool, offsets: bool
) -> None:
    """A card grows when it is converted: neighbours that are copied must still find room."""
    items = [(is_card, title.hex()[:200].encode(), text) for is_card, title, text in given_]
    records = [card(title, text) if is_card else plain(text) for is_card, title, text in items]
    ear, (channel,) = make_buffer([3])
    ear.buffer.frame_max = frame_max
    deliveries = channel.add_consumer(None, 1, b"tag", False, counted, offsets)
    channel.deliver(deliveries, 5, block_of(records), 0, 0, len(items), 1, 1)
    found: list[tuple[Properties, bytes]] = []
    for frame in split(ear.buffer.take_output()):
        kind, number, _ = struct.unpack_from(">BHI", frame)
        assert (number, frame[-1]) == (3, 206)
        assert len(frame) <= frame_max
        if kind == 2:
            found.append((codec.decode_header(frame[7:-1]).properties, b""))
        elif kind == 3:
            found[-1] = (found[-1][0], found[-1][1] + frame[7:-1])
    assert [body for _, body in found] == [text for _, _, text in items]
    for (properties, _), (is_card, title, _) in zip(found, items, strict=True):
        headers = {} if properties.headers is None else properties.headers.to_plain()
        assert headers.get("title") == (title.decode() if is_card else None)
        assert ("x-stream-offset" in headers) == offsets
        assert ("x-delivery-count" in headers) == (counted and not offsets)


def test_a_got_card_is_converted() -> None:
    ear, (channel,) = make_buffer([3])
    deliveries = channel.add_consumer(None, 0, b"")
    channel.send_get(deliveries, block_of([card(b"t", b"text")]), 0, 0, 1, 0, 0, 0, False)
    frames = split(ear.buffer.take_output())
    assert [frame[0] for frame in frames] == [1, 2, 3]
    assert frames[2][7:-1] == b"text"


@settings(max_examples=50)
@given(MESSAGES)
def test_columns_of_any_mixture(given_: list[tuple[bool, bytes, bytes]]) -> None:
    items = [(is_card, title.hex()[:200].encode(), text) for is_card, title, text in given_]
    records = [card(title, text) if is_card else plain(text) for is_card, title, text in items]
    writer = ColumnWriter(columns.VALUE | columns.ROUTING_KEY, 100, 1 << 20)
    if records:
        assert writer.append(block_of(records), 0, 0, len(records), 0, 0) == len(records)
    # The writer alone keeps what it made of cards.
    frame = ColumnFrame(writer.finish(len(records)))
    _, ends, data = frame.buffers(columns.VALUE)
    bounds = struct.unpack(f"<{len(records) + 1}i", bytes(ends))
    values = [bytes(data[bounds[i] : bounds[i + 1]]) for i in range(len(records))]
    assert values == [text for _, _, text in items]


def test_deaths_change_the_header_alone() -> None:
    """In the kernel the first time, in Python the second."""
    record = card(b"title", b"text")
    run = dead_letter_run(block_of([record]), 0, 0, 1, REJECTED, first_death(REJECTED))
    assert run is not None
    died = batch.record(run.records, 0, 0)
    again = b"".join(dead_letter(died, replace_queue("dlq")).parts)
    assert b"".join(dead_letter(record, REJECTED).parts) == died
    for each, queues in ((died, ["q"]), (again, ["dlq", "q"])):
        assert read_stored(each).body == b"\x05titletext"
        message = read_record(each)
        assert message.body == b"text"
        found = message.headers.get("x-death")
        assert found is not None
        assert [table.value.to_plain()["queue"] for table in found.value] == queues  # type: ignore[attr-defined, union-attr]
        assert message.headers.to_plain()["title"] == "title"
        history = history_of(message.content, message.headers)
        assert history is not None
        assert history.first.queue == "q"


def replace_queue(queue: str) -> Death:
    return Death(queue, "rejected", 5, "dlx", "dead")


def test_queues_read_the_header_of_every_encoding() -> None:
    headers = Table.of({"x-group-id": "g", "x-order-key": "o"})
    asked = Properties(headers=headers, priority=9, expiration="60")
    records = [
        names_of("x", "k") + content_of(asked, b"\0text", NUMBER),
        names_of("x", "k") + content_of(replace(asked, priority=None), b"\0text", NUMBER),
    ]
    from convoymq.kernels.message_attributes import attribute_runs
    from convoymq.kernels.ordered_runs import order_key

    runs = attribute_runs(block_of(records), 0, 0, 2)
    assert runs == [0, 1, 5, 9, 60, 1, 1, 5, 4, 60]
    assert [order_key(each) for each in records] == [b"o", b"o"]
    assert traits_of(records[0])[:4] == (False, 9, 60, 5)
