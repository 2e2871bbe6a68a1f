"""Values of every type of AMQP 1.0, for Hypothesis."""

from __future__ import annotations

from types import NoneType
from uuid import UUID

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from convoymq.messages.amqp091 import Properties, PropertyType
from convoymq.messages.amqp10.sections import DATA, FOOTER, SEQUENCE, VALUE, section
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
from convoymq.model.tables import Decimal, Field, Table, text_of

FEW = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
"""Of tests of whole messages, which take milliseconds to make."""
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
SYMBOLS = st.text(st.characters(max_codepoint=127), max_size=300).map(Symbol)


def _integers(kind: type, bits: int, *, signed: bool) -> st.SearchStrategy[Value]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    near = st.sampled_from([low, high, 0, 1, 127, 128, 255, 256, -1, -128, -129])
    return st.one_of(st.integers(low, high), near.filter(lambda number: low <= number <= high)).map(
        kind
    )


SIMPLE: dict[type, st.SearchStrategy[Value]] = {
    NoneType: st.none(),
    bool: st.booleans(),
    UByte: _integers(UByte, 8, signed=False),
    UShort: _integers(UShort, 16, signed=False),
    UInt: _integers(UInt, 32, signed=False),
    ULong: _integers(ULong, 64, signed=False),
    Byte: _integers(Byte, 8, signed=True),
    Short: _integers(Short, 16, signed=True),
    Int: _integers(Int, 32, signed=True),
    Long: _integers(Long, 64, signed=True),
    Float: st.floats(width=32).map(Float),
    float: st.floats(),
    Decimal32: st.binary(min_size=4, max_size=4).map(Decimal32),
    Decimal64: st.binary(min_size=8, max_size=8).map(Decimal64),
    Decimal128: st.binary(min_size=16, max_size=16).map(Decimal128),
    Char: st.characters(exclude_categories=["Cs"]).map(Char),
    Timestamp: _integers(Timestamp, 64, signed=True),
    UUID: st.uuids(),
    bytes: st.binary(max_size=300),
    str: TEXT,
    Symbol: SYMBOLS,
}
"""Values of each type that holds no others."""

SIMPLE_VALUES = st.one_of(*SIMPLE.values())
DESCRIPTORS = st.one_of(SIMPLE[ULong], SYMBOLS)


def _arrays(values: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    """Arrays of simple values, and of compound ones."""

    def of(kind: type, items: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
        described = st.none() if kind is NoneType else st.none() | DESCRIPTORS
        return st.builds(Array, st.just(kind), st.lists(items, max_size=4).map(tuple), described)

    return st.one_of(
        *(of(kind, items) for kind, items in SIMPLE.items()),
        of(list, st.lists(values, max_size=3)),
        of(dict, st.dictionaries(SYMBOLS, values, max_size=3)),
    )


VALUES = st.recursive(
    SIMPLE_VALUES,
    lambda values: st.one_of(
        st.lists(values, max_size=4),
        st.dictionaries(SYMBOLS | TEXT | SIMPLE[ULong], values, max_size=4),
        _arrays(values),
        st.builds(Described, DESCRIPTORS, values),
    ),
    max_leaves=12,
)
"""Values of every type."""

ANNOTATIONS = st.dictionaries(
    st.text(st.characters(codec="ascii"), max_size=40).map(lambda text: Symbol("x-" + text)),
    VALUES,
    max_size=4,
)
APPLICATION_PROPERTIES = st.dictionaries(TEXT, VALUES, max_size=4)
_IDENTIFIERS = st.one_of(SIMPLE[ULong], SIMPLE[UUID], SIMPLE[bytes], TEXT)


def _nullable(*each: st.SearchStrategy[Value]) -> st.SearchStrategy[list[Value]]:
    return st.tuples(*(st.none() | one for one in each)).map(list)


PROPERTIES = _nullable(
    *(_IDENTIFIERS, SIMPLE[bytes], TEXT, TEXT, TEXT, _IDENTIFIERS, SYMBOLS, SYMBOLS),
    *(SIMPLE[Timestamp], SIMPLE[Timestamp], TEXT, SIMPLE[UInt], TEXT),
)
"""Values of the properties section."""
HEADERS = _nullable(*(SIMPLE[kind] for kind in (bool, UByte, UInt, bool, UInt)))
BODIES = st.one_of(
    st.lists(SIMPLE[bytes].map(lambda part: section(DATA, part)), min_size=1, max_size=3),
    st.lists(
        st.lists(VALUES, max_size=3).map(lambda part: section(SEQUENCE, part)),
        min_size=1,
        max_size=3,
    ),
    VALUES.map(lambda value: [section(VALUE, value)]),
).map(b"".join)


def _maybe(code: int, values: st.SearchStrategy[Value]) -> st.SearchStrategy[bytes]:
    return st.just(b"") | values.map(lambda value: section(code, value))


BARE_MESSAGES = st.tuples(
    _maybe(0x73, PROPERTIES),
    _maybe(0x74, APPLICATION_PROPERTIES),
    BODIES,
    _maybe(FOOTER, ANNOTATIONS),
).map(b"".join)
MESSAGES = st.tuples(
    _maybe(0x70, HEADERS), _maybe(0x71, ANNOTATIONS), _maybe(0x72, ANNOTATIONS), BARE_MESSAGES
).map(b"".join)
"""Messages as publishers send them."""

_NAMES = st.binary(max_size=40).map(text_of) | st.sampled_from(
    ["CC", "BCC", "x-delay", "x-death", "x-first-death-queue", "x-message-id", "plain"]
)
FIELDS_OF_TABLES = st.recursive(
    st.one_of(
        st.builds(Field, st.just("t"), st.booleans()),
        *(
            st.builds(Field, st.just(code), st.integers(low, high))
            for code, low, high in (
                *(("b", -128, 127), ("B", 0, 255), ("s", -(1 << 15), (1 << 15) - 1)),
                *(("u", 0, 65535), ("I", -(1 << 31), (1 << 31) - 1), ("i", 0, (1 << 32) - 1)),
                *(("l", -(1 << 63), (1 << 63) - 1), ("L", -(1 << 63), (1 << 63) - 1)),
                ("T", 0, (1 << 64) - 1),
            )
        ),
        st.builds(Field, st.just("f"), st.floats(width=32)),
        st.builds(Field, st.just("d"), st.floats()),
        st.builds(
            Field,
            st.just("D"),
            st.builds(Decimal, st.integers(0, 255), st.integers(0, (1 << 32) - 1)),
        ),
        st.builds(Field, st.sampled_from("Sx"), st.binary(max_size=40)),
        st.builds(Field, st.just("S"), TEXT.map(str.encode)),
        st.just(Field("V", None)),
    ),
    lambda fields: st.one_of(
        st.builds(Field, st.just("A"), st.lists(fields, max_size=3).map(tuple)),
        st.builds(
            Field,
            st.just("F"),
            st.lists(st.tuples(_NAMES, fields), max_size=3).map(Table.from_fields),
        ),
    ),
    max_leaves=8,
)
TABLES = st.lists(st.tuples(_NAMES, FIELDS_OF_TABLES), max_size=5).map(Table.from_fields)
_SHORT_STRINGS = st.one_of(
    st.binary(max_size=255).map(text_of),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.uuids().map(lambda found: found.urn),
    st.sampled_from(["/queues/a%2Fb", "/exchanges/x/k", "amqp-1.0", "urn:uuid:nonsense", "60000"]),
)
MESSAGE_PROPERTIES = st.builds(
    Properties,
    **{
        name: st.none()
        | {
            PropertyType.SHORTSTR: _SHORT_STRINGS,
            PropertyType.OCTET: st.integers(0, 255),
            PropertyType.TIMESTAMP: st.integers(0, (1 << 64) - 1),
            PropertyType.TABLE: TABLES,
        }[kind]
        for name, kind in Properties.FIELDS
    },
)
"""Properties as AMQP 0-9-1 has them."""
