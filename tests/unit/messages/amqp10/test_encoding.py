"""Conversions between AMQP 1.0 and 0-9-1: total in both directions, and by the tables."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given

from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.encoding import ENCODING, to_amqp10, view_of
from convoymq.messages.amqp10.fields import field_of, value_of
from convoymq.messages.amqp10.message import stored_of
from convoymq.messages.amqp10.sections import (
    DATA,
    FIELDS,
    FOOTER,
    SEQUENCE,
    VALUE,
    section,
    split,
)
from convoymq.messages.amqp10.values import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
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
from convoymq.model.tables import Decimal, Field, Table
from tests.unit.messages.amqp10.strategies import (
    FEW,
    FIELDS_OF_TABLES,
    MESSAGE_PROPERTIES,
    MESSAGES,
    SIMPLE,
    VALUES,
)
from tests.unit.messages.amqp10.test_values import same

BODY = section(DATA, b"hello")
UUID_1 = UUID(bytes=b"\1" * 16)
URN = "urn:uuid:01010101-0101-0101-0101-010101010101"


def view(payload: bytes) -> tuple[Properties, bytes]:
    """The message as AMQP 0-9-1 has it."""
    stored = stored_of(payload)
    return ENCODING.to_amqp091(stored.properties, stored.body)


def headers(payload: bytes) -> dict[str, Field]:
    found = view(payload)[0].headers
    return {} if found is None else dict(found.items())


def properties(**given: Value) -> bytes:
    named = {name.replace("_", "-"): value for name, value in given.items()}
    return section(0x73, [named.get(name) for name in FIELDS])


@given(MESSAGES)
@FEW
def test_every_message_becomes_one_of_amqp_091(payload: bytes) -> None:
    found, body = view(payload)
    sent = split(payload)
    if sent.body_kind == DATA:
        assert found.type != "amqp-1.0"
        assert len(body) <= len(payload)
    else:
        assert found.type == "amqp-1.0"
        assert body == payload[sent.body_at.start :]


@given(MESSAGE_PROPERTIES, SIMPLE[bytes])
@FEW
def test_every_message_becomes_one_of_amqp_10(given_: Properties, body: bytes) -> None:
    split(to_amqp10(given_, body))
    split(to_amqp10(given_, body, deaths_told=True))


@given(MESSAGES)
@FEW
def test_a_message_that_was_converted_stays_the_same(payload: bytes) -> None:
    """1.0 to 0-9-1 to 1.0 to 0-9-1: the second way changes nothing more."""
    once = view(payload)
    # What the header says has no place in sections behind it.
    again = view(to_amqp10(*once))
    twice = view(to_amqp10(*again))
    assert again == twice or equal(again, twice)


def equal(one: tuple[Properties, bytes], other: tuple[Properties, bytes]) -> bool:
    """Whether messages are equal but for NaN."""
    return repr(one) == repr(other)


@given(FIELDS_OF_TABLES)
@FEW
def test_a_field_comes_back(field: Field) -> None:
    found = field_of(value_of(field))
    assert found is not None
    if field.code in "tbBsuIilfdVD":
        assert repr(found) == repr(field)


@given(VALUES)
def test_every_value_is_a_field_or_none(value: Value) -> None:
    field = field_of(value)
    if field is not None:
        value_of(field)


@pytest.mark.parametrize(
    ("value", "field", "back"),
    [
        ("€", Field("S", "€".encode()), "€"),
        (Symbol("s"), Field("S", b"s"), "s"),
        (b"\xff", Field("S", b"\xff"), b"\xff"),
        (Char("c"), Field("S", b"c"), "c"),
        (UUID_1, Field("S", URN.encode()), URN),
        (True, Field("t", True), True),
        (Byte(-1), Field("b", -1), Byte(-1)),
        (UByte(255), Field("B", 255), UByte(255)),
        (Short(-1), Field("s", -1), Short(-1)),
        (UShort(65535), Field("u", 65535), UShort(65535)),
        (Int(-1), Field("I", -1), Int(-1)),
        (UInt(2**32 - 1), Field("i", 2**32 - 1), UInt(2**32 - 1)),
        (Long(-1), Field("l", -1), Long(-1)),
        (ULong(5), Field("l", 5), Long(5)),
        (ULong(2**64 - 1), Field("S", b"18446744073709551615"), "18446744073709551615"),
        (Float(1.5), Field("f", 1.5), Float(1.5)),
        (1.25, Field("d", 1.25), 1.25),
        (Timestamp(1999), Field("T", 1), Timestamp(1000)),
        (None, Field("V", None), None),
        ([True, None], Field("A", (Field("t", True), Field("V", None))), [True, None]),
        (Array(UByte, (UByte(1),)), Field("A", (Field("B", 1),)), [UByte(1)]),
        ({Symbol("k"): 1, 2: 3}, Field("F", Table.of({"k": 1, "2": 3})), {"k": Long(1), "2": 3}),
        (Described(ULong(9), "v"), Field("S", b"v"), "v"),
        # 12.34 as decimal64: exponent -2.
        (
            Decimal64(((398 - 2) << 53 | 1234).to_bytes(8, "big")),
            Field("D", Decimal(2, 1234)),
            Decimal64(((398 - 2) << 53 | 1234).to_bytes(8, "big")),
        ),
    ],
)
def test_values_become_fields_and_fields_values(value: Value, field: Field, back: Value) -> None:
    assert field_of(value) == field
    found = value_of(field)
    if isinstance(back, dict):
        assert found == back
    else:
        assert same(found, back)


@pytest.mark.parametrize(
    "value",
    [
        *(Decimal32(b"1234"), Decimal128(b"1" * 16), Timestamp(-1)),
        Decimal64(b"\xff" * 8),
        Decimal64(((398 + 1) << 53 | 1).to_bytes(8, "big")),
        Decimal64((398 << 53 | 1 << 32).to_bytes(8, "big")),
    ],
)
def test_values_without_an_equal_are_left_out(value: Value) -> None:
    assert field_of(value) is None
    assert headers(section(0x74, {"a": value, "b": 1}) + BODY) == {"b": Field("l", 1)}
    assert headers(section(0x74, {"a": [value, 1]}) + BODY) == {"a": Field("A", (Field("l", 1),))}


def test_text_that_is_long_or_has_a_nul_is_binary() -> None:
    assert value_of(Field("S", b"a" * 4096)) == "a" * 4096
    assert value_of(Field("S", b"a" * 4097)) == b"a" * 4097
    assert value_of(Field("S", b"a\0")) == b"a\0"
    assert value_of(Field("x", b"a")) == b"a"


LONG_TEXT = "€" * 86


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"message_id": "m"}, {"message_id": "m"}),
        ({"message_id": UUID_1}, {"message_id": URN}),
        ({"correlation_id": ULong(2**64 - 1)}, {"correlation_id": "18446744073709551615"}),
        (
            {"message_id": b"\1"},
            {"headers": Table.from_fields([("x-message-id", Field("x", b"\1"))])},
        ),
        ({"correlation_id": LONG_TEXT}, {"headers": Table.of({"x-correlation-id": LONG_TEXT})}),
        ({"user_id": b"u"}, {"user_id": "u"}),
        ({"user_id": b"u\0"}, {}),
        ({"user_id": b"\xff"}, {}),
        ({"reply_to": "/queues/a%2Fb"}, {"reply_to": "a/b"}),
        ({"reply_to": "/exchanges/x/k"}, {"reply_to": "/exchanges/x/k"}),
        ({"reply_to": LONG_TEXT}, {}),
        ({"content_type": Symbol("a/b")}, {"content_type": "a/b"}),
        ({"content_encoding": Symbol("gzip")}, {"content_encoding": "gzip"}),
        ({"creation_time": Timestamp(1999)}, {"timestamp": 1}),
        ({"creation_time": Timestamp(-1)}, {}),
        ({"group_id": "g"}, {"app_id": "g"}),
        ({"to": "t", "subject": "s", "absolute_expiry_time": Timestamp(1)}, {}),
        ({"group_sequence": UInt(1), "reply_to_group_id": "r"}, {}),
        # Of another type than the standard's.
        ({"content_type": 5, "creation_time": "now", "group_id": b"g", "message_id": 5}, {}),
    ],
)
def test_properties_become_those_of_amqp_091(
    given_: dict[str, Value], expected: dict[str, object]
) -> None:
    assert view(properties(**given_) + BODY)[0] == Properties(delivery_mode=1, **expected)  # type: ignore[arg-type]


def test_the_header_becomes_properties() -> None:
    header = section(0x70, [True, UByte(7), UInt(500)])
    expected = Properties(delivery_mode=2, priority=7, expiration="500")
    assert view(header + BODY)[0] == expected
    basic = {Symbol("x-basic-priority"): 9, Symbol("x-basic-expiration"): "9"}
    notes = section(0x72, {**basic, Symbol("x-basic-type"): "t"})
    assert view(header + notes + BODY)[0] == Properties(
        delivery_mode=2, priority=7, expiration="500", type="t"
    )
    assert view(notes + BODY)[0] == Properties(
        delivery_mode=1, priority=9, expiration="9", type="t"
    )


def test_annotations_become_headers() -> None:
    notes = {
        "x-cc": ["a", "b"],
        "x-opt-rabbitmq-received-time": Timestamp(5000),
        "x-any": UByte(1),
        "x-exchange": "x",
        "x-routing-key": "k",
        "x-death": [],
        "x-opt-deaths": [],
        "x-basic-type": "t",
        "x-" + "n" * 300: 1,
    }
    payload = section(0x72, {Symbol(key): value for key, value in notes.items()}) + BODY
    assert headers(payload) == {
        "CC": Field("A", (Field("S", b"a"), Field("S", b"b"))),
        "timestamp_in_ms": Field("T", 5),
        "x-any": Field("B", 1),
    }


def test_a_delivery_time_is_a_delay() -> None:
    def asked(notes: dict[str, Value]) -> dict[str, Field]:
        return headers(section(0x72, {Symbol(key): value for key, value in notes.items()}) + BODY)

    at = 1_900_000_000_000
    assert asked({"x-opt-delivery-time": Timestamp(at)}) == {"x-deliver-at": Field("l", at)}
    assert asked({"x-opt-delivery-time": at}) == {"x-deliver-at": Field("l", at)}
    assert asked({"x-opt-delivery-delay": UInt(50)}) == {"x-delay": Field("l", 50)}
    both = {"x-opt-delivery-delay": 50, "x-opt-delivery-time": at}
    assert asked(both) == {"x-deliver-at": Field("l", at)}


def test_an_application_property_asks_for_no_copies() -> None:
    named = {"CC": ["a"], "BCC": ["b"], "x-group-id": "g", "k": "v", "n" * 300: 1}
    assert headers(section(0x74, named) + BODY) == {
        "x-group-id": Field("S", b"g"),
        "k": Field("S", b"v"),
    }
    both = section(0x72, {Symbol("x-a"): 1}) + section(0x74, {"x-a": 2}) + BODY
    assert headers(both) == {"x-a": Field("l", 1)}


def test_a_value_that_is_too_deep_for_a_table_is_left_out() -> None:
    value: Value = 1
    for _ in range(31):
        value = [value]
    # A described value costs no depth in a table.
    assert headers(section(0x74, {"deep": value, "k": 1}) + BODY)["k"] == Field("l", 1)
    nested: Value = 1
    for _ in range(31):
        nested = {Symbol("k"): nested}
    assert headers(section(0x74, {"deep": nested, "k": 1}) + BODY)["k"] == Field("l", 1)


def test_bodies() -> None:
    assert view(section(DATA, b"a") + section(DATA, b"") + section(DATA, b"b"))[1] == b"ab"
    assert view(section(DATA, b"a") + section(FOOTER, {}))[1] == b"a"
    for body in (section(VALUE, "v"), section(SEQUENCE, [1]) + section(SEQUENCE, [2])):
        stored = body + section(FOOTER, {Symbol("x-f"): 1})
        found, encoded = view(section(0x74, {"k": 1}) + stored)
        assert (found.type, encoded) == ("amqp-1.0", stored)
        # And back.
        assert to_amqp10(Properties(type="amqp-1.0"), encoded) == stored
    lies = Properties(type="amqp-1.0")
    notes = section(0x72, {Symbol("x-basic-type"): "amqp-1.0"})
    for body in (b"", b"text", section(0x73, ["m"]) + section(VALUE, 1), section(FOOTER, {})):
        assert to_amqp10(lies, body) == notes + section(DATA, body)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"message_id": "m"}, {"message-id": "m"}),
        ({"message_id": URN}, {"message-id": UUID_1}),
        ({"correlation_id": URN.upper()}, {"correlation-id": URN.upper()}),
        ({"message_id": "urn:uuid:no"}, {"message-id": "urn:uuid:no"}),
        ({"message_id": "\udcff"}, {"message-id": b"\xff"}),
        ({"user_id": "u"}, {"user-id": b"u"}),
        ({"reply_to": "a/b~c"}, {"reply-to": "/queues/a%2Fb~c"}),
        ({"reply_to": "/exchanges/x"}, {"reply-to": "/exchanges/x"}),
        ({"app_id": "g"}, {"group-id": "g"}),
        ({"app_id": "\udcff"}, {}),
        ({"timestamp": 5}, {"creation-time": Timestamp(5000)}),
        ({"timestamp": 2**64 - 1}, {}),
        ({"content_type": "a/b"}, {"content-type": Symbol("a/b")}),
        ({"content_encoding": "é"}, {}),
        ({"cluster_id": "c"}, {}),
    ],
)
def test_properties_of_amqp_091_become_properties(
    given_: dict[str, object], expected: dict[str, Value]
) -> None:
    found = split(to_amqp10(Properties(**given_), b"b"))  # type: ignore[arg-type]
    assert same(found.properties, expected)


def test_headers_become_annotations_and_application_properties() -> None:
    table = Table.from_fields(
        [
            ("CC", Field("A", (Field("S", b"a"),))),
            ("x-list", Field("A", (Field("l", 1),))),
            ("x-map", Field("F", Table.of({"a": 1, "é": 2}))),
            ("x-é", Field("l", 1)),
            ("k", Field("S", b"v")),
            ("k", Field("S", b"second")),
            ("list", Field("A", ())),
            ("map", Field("F", Table.of({}))),
            ("\udcff", Field("l", 1)),
            ("é", Field("t", True)),
        ]
    )
    found = split(to_amqp10(Properties(headers=table, type="t"), b"b"))
    assert found.annotations == {
        "x-cc": ["a"],
        "x-list": [1],
        "x-map": {"a": 1, "é": 2},
        "x-basic-type": "t",
    }
    assert found.application_properties == {"k": "v", "é": True}
    assert all(type(key) is str for key in found.application_properties)


def test_a_view_is_of_the_message_alone() -> None:
    """Delivery-annotations are for one delivery."""
    sections = split(section(0x71, {Symbol("x-a"): 1}) + BODY)
    assert view_of(sections).headers is None
