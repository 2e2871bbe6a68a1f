"""The compiled transfer is that of the pure function."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp10.frames import frame
from convoymq.edges.amqp10.performatives import Transfer
from convoymq.kernels.amqp10_delivery import plain_transfer, plain_transfers, transfer_frame
from convoymq.kernels.batch import record
from convoymq.kernels.content import split_record
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.message import composed_transfer, stored_of
from convoymq.messages.amqp10.sections import DATA, VALUE, section, split
from convoymq.messages.amqp10.values import Symbol, UByte, UInt
from convoymq.messages.encodings import AMQP_10
from convoymq.messages.record import content_of, names_of, read_names, telling_deaths
from convoymq.model.errors import PeerError
from convoymq.model.tables import Table, bytes_of, is_text, text_of
from tests.unit.kernels.reference import enqueue
from tests.unit.messages.amqp10.strategies import FEW, MESSAGE_PROPERTIES, MESSAGES

BODY = section(DATA, b"hello")
NAMES = st.text(st.characters(codec="utf-8"), max_size=120).filter(
    lambda text: len(text.encode()) < 256
)
COUNTS = st.sampled_from([0, 1, 127, 128, 255, 256, (1 << 32) - 1])


def content_in(payload: bytes) -> bytes:
    stored = stored_of(payload)
    return content_of(stored.properties, stored.body, AMQP_10)


@FEW
@given(MESSAGES, NAMES, NAMES, COUNTS, COUNTS, st.integers(-1, (1 << 63) - 1))
def test_it_is_the_pure_functions(
    payload: bytes, exchange: str, key: str, acquired: int, failed: int, offset: int
) -> None:
    found = split(payload)
    counts = acquired, failed, offset
    made = plain_transfer(exchange.encode(), key.encode(), content_in(payload), *counts)
    if found.annotations:
        assert made is None
    else:
        content = content_in(payload)
        assert made == composed_transfer(exchange, key, content, acquired, failed, b"", offset)


@FEW
@given(MESSAGE_PROPERTIES, st.binary(max_size=300), NAMES, COUNTS)
def test_messages_of_0_9_1_too(properties: Properties, body: bytes, key: str, failed: int) -> None:
    content = content_of(properties, body)
    made = plain_transfer(b"x", key.encode(), content, 1, failed)
    assert made in (None, composed_transfer("x", key, content, 1, failed, b""))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "content_type": st.just("text/plain") | st.just("x" * 255),
            "content_encoding": st.just(""),
            "delivery_mode": st.sampled_from([1, 2]),
            "priority": st.integers(0, 255),
            "correlation_id": NAMES,
            "expiration": st.sampled_from(["0", "60000"]),
            "message_id": NAMES,
            "timestamp": st.integers(0, 1 << 40),
            "app_id": NAMES,
        },
    ),
    st.sampled_from([b"", b"hello", b"x" * 255, b"x" * 256, b"x" * 300_000]),
)
def test_plain_messages_of_0_9_1_need_no_closer_look(fields: dict[str, Any], body: bytes) -> None:
    content = content_of(Properties(**fields), body)
    made = plain_transfer(b"x", b"k", content, 0, 0)
    assert made == composed_transfer("x", "k", content, 0, 0, b"")


@given(COUNTS, COUNTS, st.binary(max_size=32), st.booleans(), st.binary(max_size=600), st.data())
def test_frames_are_those_of_the_performatives(
    handle: int, delivery_id: int, tag: bytes, settled: bool, message: bytes, data: st.DataObject
) -> None:
    room = data.draw(st.integers(1, 700))
    found = b""
    for at in range(0, max(len(message), 1), room):
        begins = at == 0
        performative = Transfer(
            handle=handle,
            delivery_id=delivery_id if begins else None,
            delivery_tag=tag if begins else None,
            message_format=0 if begins else None,
            settled=settled if begins else None,
            more=at + room < len(message),
        )
        part = message[at : at + room]
        made = transfer_frame(9, handle, delivery_id, tag, settled, message, at, room)
        assert made == frame(9, performative.encoded() + part)
        found += part
    assert found == message


KINDS = (
    content_in(BODY),
    content_in(section(0x70, [True, UByte(7), UInt(9)]) + section(DATA, b"x" * 900)),
    content_of(Properties(), b"hello"),
    content_of(Properties(message_id="m", delivery_mode=2), b"y" * 300),
    content_of(Properties(type="t"), b"needs a closer look"),
    content_in(BODY)[:-4],
)


def enqueue_all(records: list[bytes]) -> bytes:
    return enqueue(1, 1, records, [0] * len(records), 0)


def one_at_a_time(
    place: tuple[int, int, int, bool, int, int],
    delivery: tuple[int, bytes, int, int, int, int, int],
    offset: int,
    most: int,
    bytes_most: int,
) -> tuple[bytes, int]:
    """Does what `plain_transfers` does, by the functions for one message."""
    channel, handle, delivery_id, settled, room, size_max = place
    first_id, block, command, first, count, acquired, failed = delivery
    found, i = b"", 0
    while i < min(most, count) and len(found) <= bytes_most:
        names, content = split_record(record(block, command, first + i))
        exchange, key = (bytes_of(each) for each in read_names(names))
        at = offset + i if offset >= 0 else -1
        made = plain_transfer(exchange, key, content, acquired, failed, at)
        if made is None or len(made) > min(room, size_max) or not is_text(text_of(key)):
            break
        id = first_id + i
        tag = b"" if settled else id.to_bytes(4 if id < 1 << 32 else 8, "big")
        number = (delivery_id + i) % (1 << 32)
        found += transfer_frame(channel, handle, number, tag, settled, made, 0, room)
        i += 1
    return found, i


@FEW
@given(
    st.lists(st.tuples(st.sampled_from(["k", "", "ü", text_of(b"\xff")]),
                       st.sampled_from(KINDS)), min_size=1, max_size=9),
    st.tuples(st.just(9), COUNTS, st.sampled_from([0, 255, (1 << 32) - 2]), st.booleans(),
              st.sampled_from([100, 420, 5000]), st.sampled_from([100, 1000, (1 << 64) - 1])),
    st.sampled_from([0, (1 << 32) - 2]),
    st.tuples(COUNTS, COUNTS),
    st.sampled_from([-1, 0, 127]),
    st.integers(-1, 10),
    st.sampled_from([-1, 0, 300, 1 << 20]),
    st.data(),
)  # fmt: skip
def test_a_run_is_its_messages_one_at_a_time(
    messages: list[tuple[str, bytes]],
    place: tuple[int, int, int, bool, int, int],
    first_id: int,
    counts: tuple[int, int],
    offset: int,
    most: int,
    bytes_most: int,
    data: st.DataObject,
) -> None:
    block = enqueue_all([names_of("x", key) + content for key, content in messages])
    first = data.draw(st.integers(0, len(messages) - 1))
    delivery = (first_id, block, 0, first, len(messages) - first, *counts)
    limits = offset, most, bytes_most
    assert plain_transfers(place, delivery, *limits) == one_at_a_time(place, delivery, *limits)


@given(st.data())
def test_a_damaged_block_is_not_read_beyond_its_end(data: st.DataObject) -> None:
    whole = enqueue_all([names_of("x", "k") + content_in(BODY)] * 3)
    at = data.draw(st.integers(0, len(whole) - 1))
    broken = whole[:at] + data.draw(st.binary(max_size=8)) + whole[at + 1 :]
    place = 9, 1, 0, False, 5000, 5000
    for block in (broken, whole[:at]):
        for command in (0, 8, -1, 1 << 40):
            found = plain_transfers(place, (0, block, command, 0, 9, 0, 0), -1, 9, 1 << 20)
            assert 0 <= found[1] <= 9


def test_a_frame_of_no_part_is_refused() -> None:
    for tag, at, room in ((b"t" * 33, 0, 9), (b"", 6, 9), (b"", -1, 9), (b"", 0, 0)):
        with pytest.raises(ValueError, match="no such part"):
            transfer_frame(0, 0, 0, tag, False, b"hello", at, room)


@pytest.mark.parametrize("ttl", [None, 0, 1, 255, 256, (1 << 32) - 1])
@pytest.mark.parametrize("priority", [None, 0, 255])
@pytest.mark.parametrize("size", [0, 1, 131_064, 300_000])
def test_header_and_size(ttl: int | None, priority: int | None, size: int) -> None:
    header = section(
        0x70,
        [
            True,
            None if priority is None else UByte(priority),
            None if ttl is None else UInt(ttl),
        ],
    )
    content = content_in(header + section(DATA, bytes(size)))
    made = plain_transfer(b"x" * 255, b"k" * 255, content, 1, 1)
    assert made == composed_transfer("x" * 255, "k" * 255, content, 1, 1, b"")


@pytest.mark.parametrize(
    "content",
    [
        content_of(Properties(type="t"), b"body"),
        content_of(Properties(reply_to="r"), b"body"),
        content_of(Properties(user_id="u"), b"body"),
        content_of(Properties(headers=Table.of({"a": 1})), b"body"),
        content_of(Properties(message_id=f"urn:uuid:{UUID(int=9)}"), b"body"),
        content_of(Properties(message_id=text_of(b"\xff")), b"body"),
        content_of(Properties(content_type="grün"), b"body"),
        content_in(section(0x72, {Symbol("x-a"): 1}) + BODY),
        telling_deaths(content_in(BODY), told=True),
        content_of(Properties(expiration="soon"), BODY, AMQP_10),
        content_of(Properties(expiration="4294967296"), BODY, AMQP_10),
        content_of(Properties(), b"", AMQP_10),
        content_of(Properties(), b"\0\x53", AMQP_10),
        b"",
        b"\x82\0\0",
    ],
)
def test_others_are_left_to_it(content: bytes) -> None:
    assert plain_transfer(b"", b"", content, 0, 0) is None
    assert plain_transfer(b"x" * 256, b"", content_in(BODY), 0, 0) is None


@given(st.data())
def test_a_damaged_record_is_not_read_beyond_its_end(data: st.DataObject) -> None:
    whole = content_in(section(0x70, [True, UByte(1), UInt(9)]) + section(VALUE, "v"))
    at = data.draw(st.integers(0, len(whole) - 1))
    broken = whole[:at] + data.draw(st.binary(max_size=4)) + whole[at + 1 :]
    for content in (broken, whole[:at]):
        made = plain_transfer(b"x", b"k", content, 0, 0)
        try:
            expected = composed_transfer("x", "k", content, 0, 0, b"")
        except (PeerError, ValueError):
            continue
        if made is not None:
            assert made == expected
