"""Sections of a message are found, in their order, and refused otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.messages.amqp10.sections import (
    DATA,
    FOOTER,
    SECTIONS_MAX,
    SEQUENCE,
    VALUE,
    Header,
    header_section,
    section,
    skip,
    split,
)
from convoymq.messages.amqp10.values import (
    Described,
    Symbol,
    UByte,
    UInt,
    ULong,
    Value,
    decode,
    encode,
)
from convoymq.model.errors import PeerError
from tests.unit.messages.amqp10.strategies import FEW, MESSAGES, VALUES

HEADER = section(0x70, [True, UByte(3), UInt(500), False, UInt(2)])
DELIVERY = section(0x71, {Symbol("x-d"): 1})
ANNOTATIONS = section(0x72, {Symbol("x-a"): 1})
PROPERTIES = section(0x73, ["id", None, "/queues/q"])
APPLICATION = section(0x74, {"k": True})
BODY = section(DATA, b"one")
END = section(FOOTER, {Symbol("crc"): 1})
ALL = (HEADER, DELIVERY, ANNOTATIONS, PROPERTIES, APPLICATION, BODY, END)


def test_all_sections_are_found() -> None:
    payload = b"".join(ALL)
    found = split(payload)
    assert found.header == Header(
        durable=True, priority=3, ttl_ms=500, first_acquirer=False, delivery_count=2
    )
    assert found.delivery_annotations == {"x-d": 1}
    assert found.annotations == {"x-a": 1}
    assert found.properties == {"message-id": "id", "to": "/queues/q"}
    assert found.application_properties == {"k": True}
    assert payload[found.annotations_at] == ANNOTATIONS
    assert payload[found.properties_at] == PROPERTIES
    assert payload[found.application_properties_at] == APPLICATION
    assert payload[found.body_at] == BODY
    assert payload[found.footer_at] == END
    assert payload[found.bare_at :] == PROPERTIES + APPLICATION + BODY + END
    assert found.body_kind == DATA


def test_a_body_alone_is_a_message() -> None:
    for kind, value in ((DATA, b""), (SEQUENCE, []), (VALUE, None)):
        payload = section(kind, value) + section(kind, value) * (kind != VALUE)
        found = split(payload)
        assert (found.body_kind, payload[found.body_at]) == (kind, payload)
        assert (found.header, found.bare_at) == (Header(), 0)


def test_sections_are_known_by_name_and_by_long_code() -> None:
    by_name = [
        encode(Described(Symbol("amqp:header:list"), [True])),
        encode(Described(Symbol("amqp:message-annotations:map"), {})),
        encode(Described(Symbol("amqp:data:binary"), b"x")),
        encode(Described(Symbol("amqp:footer:map"), {})),
    ]
    found = split(b"".join(by_name))
    assert (found.header.durable, found.body_kind) == (True, DATA)
    value = encode(Described(Symbol("amqp:amqp-value:*"), 1))
    assert split(value).body_kind == VALUE
    sequence = encode(Described(Symbol("amqp:amqp-sequence:list"), [1]))
    assert split(sequence).body_kind == SEQUENCE
    long_code = b"\x00\x80\0\0\0\0\0\0\0\x75" + encode(b"x")
    assert split(long_code).body_kind == DATA


@given(st.permutations(range(len(ALL))), st.sets(st.integers(0, len(ALL) - 1)))
@FEW
def test_order_is_checked(order: list[int], left: set[int]) -> None:
    kept = [number for number in order if number in left]
    payload = b"".join(ALL[number] for number in kept)
    if kept == sorted(kept) and 5 in kept:
        split(payload)
    else:
        with pytest.raises(PeerError):
            split(payload)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"", "a message without a body"),
        (HEADER, "a message without a body"),
        (BODY + section(VALUE, 1), "section amqp-value behind section data"),
        (section(VALUE, 1) * 2, "section amqp-value behind section amqp-value"),
        (HEADER + HEADER + BODY, "section header behind section header"),
        (END + BODY, "section data behind section footer"),
        (b"\x41", "bytes that are no section"),
        (section(0x79, 1), "a described value that is no section"),
        (encode(Described(Symbol("data"), b"")), "a described value that is no section"),
        (section(DATA, "text"), "a data section without binary"),
        (section(SEQUENCE, {}), "an amqp-sequence section without a list"),
        (section(0x70, {}) + BODY, "section header holds another type"),
        (section(0x70, [1]) + BODY, "section header holds another type"),
        (section(0x70, [None, UInt(1)]) + BODY, "section header holds another type"),
        (section(0x73, {}) + BODY, "section properties holds another type"),
        (section(0x74, []) + BODY, "section application-properties holds another type"),
        (section(0x74, {1: 2}) + BODY, "an application property whose name is no text"),
        (section(0x74, {Symbol("a"): 2}) + BODY, "an application property whose name is no text"),
        (section(0x72, []) + BODY, "annotations that are no map"),
        (section(0x72, {Symbol("a"): 1}) + BODY, "annotation a is reserved"),
        (section(0x72, {ULong(7): 1}) + BODY, "annotation 7 is reserved"),
        (section(0x71, {"x-a": 1}) + BODY, "annotation x-a is reserved"),
        (BODY * (SECTIONS_MAX + 1), f"more than {SECTIONS_MAX} sections"),
        (BODY[:-1], "a section is cut off"),
        (bytes((0, 0x53, VALUE)), "a section is cut off"),
        (bytes((0, 0x53, VALUE, 0x31)), "0x31 is no constructor of a type"),
        (bytes((0, 0x53, VALUE)) + b"\0\x41" * 100_000, "values are nested deeper than 32"),
        (bytes((0, 0x53, 0x74, 0xC1, 4, 2, 0xA1, 1)) + BODY, "a value is cut off"),
    ],
)
def test_what_is_no_message_is_refused(payload: bytes, text: str) -> None:
    with pytest.raises(PeerError) as refused:
        split(payload)
    assert refused.value.text == text


def test_the_most_sections_are_served() -> None:
    assert split(BODY * SECTIONS_MAX).body_at == slice(0, len(BODY) * SECTIONS_MAX)


@given(VALUES)
def test_a_value_is_skipped_by_its_size(value: Value) -> None:
    data = encode(value)
    assert skip(data + b"\x41", 0, len(data) + 1) == decode(data, 0, len(data))[1]


@given(MESSAGES, st.data())
@FEW
def test_any_bytes_are_a_message_or_refused(payload: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(payload) - 1))
    flipped = payload[:at] + data.draw(st.binary(min_size=1, max_size=3)) + payload[at + 1 :]
    for broken in (payload[:at], flipped):
        try:
            found = split(broken)
        except PeerError:
            continue
        assert found.body_kind in (DATA, SEQUENCE, VALUE)


def test_a_header_that_is_written_is_read() -> None:
    header = Header(durable=True, priority=0, ttl_ms=0, first_acquirer=True, delivery_count=9)
    assert split(header_section(header) + BODY).header == header
    assert split(header_section(Header()) + BODY).header == Header()
