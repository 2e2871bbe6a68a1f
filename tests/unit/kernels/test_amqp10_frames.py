"""The compiled content of a message is that of the pure functions."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels.amqp10_frames import plain_content
from convoymq.messages.amqp10.message import stored_of
from convoymq.messages.amqp10.sections import DATA, FOOTER, VALUE, section
from convoymq.messages.amqp10.values import (
    Byte,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
    Value,
)
from convoymq.messages.encodings import AMQP_10
from convoymq.messages.record import content_of
from convoymq.model.errors import PeerError
from tests.unit.messages.amqp10.strategies import FEW, MESSAGES, SIMPLE, TEXT

BODY = section(DATA, b"hello")
NUMBER = UUID(int=0x0123456789ABCDEF0123456789ABCDEF)
PLAIN_VALUES: list[Value] = [
    *(None, True, False, UByte(9), UShort(9), UInt(0), UInt(9), UInt(1 << 31), ULong(0), ULong(9)),
    *(ULong((1 << 63) - 1), Byte(-9), Short(-9), Int(-9), Int(-900), Long(-9), Long(1 << 40)),
    *(Float(1.5), -2.5, Timestamp(1999), NUMBER, b"\xff\0", "grün", "x" * 300, Symbol("sym")),
]
SHORT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN_MESSAGES = st.tuples(
    st.just(b"") | st.just(section(0x70, [True, UByte(7), UInt(60_000), False, UInt(1)])),
    st.just(b"")
    | st.tuples(
        *(st.none() | one for one in (SIMPLE[UUID] | SIMPLE[ULong] | SHORT, st.nothing(), SHORT)),
        *(st.none() | SHORT, st.none() | SHORT | st.just("/queues/r"), st.none() | SIMPLE[UUID]),
        *(st.none() | SHORT.filter(str.isascii).map(Symbol) for _ in range(2)),
        *(st.none() | st.integers(0, 1 << 62).map(Timestamp) for _ in range(2)),
        *(st.none() | SHORT, st.none() | SIMPLE[UInt], st.none() | SHORT),
    ).map(lambda fields: section(0x73, list(fields))),
    st.just(b"")
    | st.dictionaries(
        SHORT.filter(lambda name: name not in ("CC", "BCC")), st.sampled_from(PLAIN_VALUES)
    ).map(lambda values: section(0x74, values) if len(values) <= 4 else b""),
    st.binary(max_size=300).map(lambda body: section(DATA, body))
    | (SIMPLE[bytes] | TEXT).map(lambda body: section(VALUE, body))
    | st.lists(SHORT, min_size=1).map(
        lambda parts: b"".join(section(DATA, part.encode()) for part in parts)
    ),
).map(b"".join)


def pure(payload: bytes) -> bytes:
    stored = stored_of(payload)
    return content_of(stored.properties, stored.body, AMQP_10)


@FEW
@given(MESSAGES)
def test_it_is_the_pure_functions_or_nothing(payload: bytes) -> None:
    assert plain_content(payload) in (None, pure(payload))


@given(PLAIN_MESSAGES)
def test_plain_messages_need_no_closer_look(payload: bytes) -> None:
    assert plain_content(payload) == pure(payload)


@given(PLAIN_MESSAGES, st.data())
def test_what_is_broken_is_left_to_them(payload: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(payload) - 1))
    broken = payload[:at] + data.draw(st.binary(max_size=2)) + payload[at + 1 :]
    for each in (broken, payload[:at], broken + payload):
        made = plain_content(each)
        if made is not None:
            assert made == pure(each)


@pytest.mark.parametrize("value", PLAIN_VALUES)
def test_values_of_application_properties(value: Value) -> None:
    payload = section(0x74, {"one": value, "two": value}) + BODY
    assert plain_content(payload) == pure(payload)


@pytest.mark.parametrize("size", [0, 255, 256, 131_064, 131_065, 300_000])
def test_bodies_of_several_frames(size: int) -> None:
    payload = section(DATA, bytes(size))
    assert plain_content(payload) == pure(payload)


@pytest.mark.parametrize(
    "payload",
    [
        section(0x71, {Symbol("x-a"): 1}) + BODY,
        section(0x72, {Symbol("x-a"): 1}) + BODY,
        section(0x73, [None, b"guest"]) + BODY,
        section(0x73, [None, None, None, None, "/queues/a%2Fb"]) + BODY,
        section(0x73, [b"binary"]) + BODY,
        section(0x74, {"CC": "copy"}) + BODY,
        section(0x74, {"list": []}) + BODY,
        section(0x74, {str(each): each for each in range(33)}) + BODY,
        section(0x74, {"long": "x" * 2048}) + BODY,
        b"\0\x53\x74\xc1\x09\x04\xa1\x01a\x40\xa1\x01a\x40" + BODY,
        BODY + section(FOOTER, {}),
        BODY + section(VALUE, "two bodies"),
        section(0x73, []),
        b"",
    ],
)
def test_the_rest_is_left_to_them(payload: bytes) -> None:
    assert plain_content(payload) is None


def test_nothing_wrong_is_taken() -> None:
    for payload in (
        section(0x74, {}) + section(0x73, []) + BODY,
        b"\0\x53\x73\xc0\x05\x01\xa1\x02\xff\xff" + BODY,
        BODY[:-1],
        BODY + b"\0",
    ):
        assert plain_content(payload) is None
        with pytest.raises(PeerError):
            pure(payload)
