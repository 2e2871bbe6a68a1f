"""Types of AMQP 1.0 and their bytes."""

from __future__ import annotations

import math
from types import NoneType
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.messages.amqp10.values import (
    DEPTH_MAX,
    EMPTY_ITEMS_MAX,
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
    decode,
    encode,
)
from convoymq.model.errors import Misuse, PeerError
from tests.unit.messages.amqp10.strategies import VALUES

FORMS: list[tuple[str, Value, str]] = [
    # What is read, what it means, what is written.
    ("40", None, "40"),
    ("41", True, "41"),
    ("42", False, "42"),
    ("5601", True, "41"),
    ("5600", False, "42"),
    ("50ff", UByte(255), "50ff"),
    ("60ffff", UShort(65535), "60ffff"),
    ("43", UInt(0), "43"),
    ("52ff", UInt(255), "52ff"),
    ("7000000100", UInt(256), "7000000100"),
    ("7000000000", UInt(0), "43"),
    ("44", ULong(0), "44"),
    ("5314", ULong(20), "5314"),
    ("80ffffffffffffffff", ULong(2**64 - 1), "80ffffffffffffffff"),
    ("5180", Byte(-128), "5180"),
    ("61ff00", Short(-256), "61ff00"),
    ("5480", Int(-128), "5480"),
    ("71ffffff7f", Int(-129), "71ffffff7f"),
    ("5501", Long(1), "5501"),
    ("818000000000000000", Long(-(2**63)), "818000000000000000"),
    ("723fc00000", Float(1.5), "723fc00000"),
    ("823ff8000000000000", 1.5, "823ff8000000000000"),
    ("73000020ac", Char("€"), "73000020ac"),
    ("8300000000000003e8", Timestamp(1000), "8300000000000003e8"),
    ("7401020304", Decimal32(bytes((1, 2, 3, 4))), "7401020304"),
    ("84" + "07" * 8, Decimal64(b"\7" * 8), "84" + "07" * 8),
    ("94" + "07" * 16, Decimal128(b"\7" * 16), "94" + "07" * 16),
    ("98" + "01" * 16, UUID(bytes=b"\1" * 16), "98" + "01" * 16),
    ("a002abcd", b"\xab\xcd", "a002abcd"),
    ("b000000002abcd", b"\xab\xcd", "a002abcd"),
    ("a103e282ac", "€", "a103e282ac"),
    ("b10000000161", "a", "a10161"),
    ("a30161", Symbol("a"), "a30161"),
    ("b30000000161", Symbol("a"), "a30161"),
    ("45", [], "45"),
    ("c0030241" + "42", [True, False], "c003024142"),
    ("d00000000602" + "000000", None, ""),
    ("d0000000060000000241" + "42", [True, False], "c003024142"),
    ("c00100", [], "45"),
    ("c10502a3016140", {Symbol("a"): None}, "c10502a3016140"),
    ("d10000000400000000", {}, "c10100"),
    ("e00402500102", Array(UByte, (UByte(1), UByte(2))), "e00402500102"),
    ("e00602a301610162", Array(Symbol, (Symbol("a"), Symbol("b"))), "e00c02b300000001610000000162"),
    ("e0020341", Array(bool, (True,) * 3), "e0050356010101"),
    ("e0020240", Array(NoneType, (None, None)), "e0020240"),
    ("e0060200530550" + "01", None, ""),
    ("e0060200530550" + "0102"[:4], None, ""),
    (
        "e007020053055001" + "02",
        Array(UByte, (UByte(1), UByte(2)), ULong(5)),
        "e007020053055001" + "02",
    ),
    ("005370" + "45", Described(ULong(0x70), []), "00537045"),
    (
        "00a30161" + "00530141",
        Described(Symbol("a"), Described(ULong(1), True)),
        "00a3016100530141",
    ),
]


@pytest.mark.parametrize(("given_bytes", "value", "written"), [row for row in FORMS if row[2]])
def test_every_constructor_is_read(given_bytes: str, value: Value, written: str) -> None:
    data = bytes.fromhex(given_bytes)
    found, at = decode(data + b"\x41", 0, len(data) + 1)
    assert (found, type(found), at) == (value, type(value), len(data))
    assert encode(value).hex() == written


BROKEN = {
    "nothing": "",
    "no such constructor": "46",
    "constructor alone": "70",
    "integer cut off": "700000",
    "text cut off": "a10261",
    "size cut off": "b10000",
    "size beyond the end": "b1ffffffff61",
    "text that is not UTF-8": "a101ff",
    "symbol that is not ASCII": "a301ff",
    "boolean 2": "5602",
    "half of a surrogate pair": "730000d800",
    "character beyond Unicode": "73ffffffff",
    "list without its count": "d00000000200",
    "list that ends inside an item": "c002010050",
    "map with a key alone": "c1020141",
    "map without its last value": "c1020241",
    "map with a list as key": "c103024541",
    "four thousand million items": "d000000005ffffffff41",
    "four thousand million nulls": "f000000005ffffffff40",
    "array without a constructor": "e00100",
    "array of no type": "e0020146",
    "array of described nulls": "e005020053054" + "0",
    "array with bytes behind its items": "e0040150" + "0102",
    "array that ends inside an item": "e003016001",
    "array whose descriptor is cut off": "e0020100",
    "array with a descriptor alone": "e00401005305",
    "descriptor alone": "005370",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_broken_bytes_are_refused(data: str) -> None:
    broken = bytes.fromhex(data)
    with pytest.raises(PeerError):
        decode(broken, 0, len(broken))


def test_depth_is_bounded_for_reader_and_writer() -> None:
    value: Value = True
    for _ in range(DEPTH_MAX):
        value = [value]
    data = encode(value)
    assert decode(data, 0, len(data)) == (value, len(data))
    with pytest.raises(Misuse):
        encode([value])
    deeper = b"\xd0" + (len(data) + 4).to_bytes(4, "big") + b"\0\0\0\1" + data
    with pytest.raises(PeerError):
        decode(deeper, 0, len(deeper))
    described = b"\0\x41" * 100_000 + b"\x41"
    with pytest.raises(PeerError):
        decode(described, 0, len(described))


def test_items_without_bytes_are_counted() -> None:
    most = bytes((0xE0, 2, EMPTY_ITEMS_MAX, 0x40))
    assert decode(most, 0, 4)[0] == Array(NoneType, (None,) * EMPTY_ITEMS_MAX)
    more = b"\xf0\0\0\0\5" + (EMPTY_ITEMS_MAX + 1).to_bytes(4, "big") + b"\x40"
    with pytest.raises(PeerError):
        decode(more, 0, len(more))


@pytest.mark.parametrize(
    "value",
    [
        *(UByte(256), UByte(-1), UShort(65536), UInt(-1), UInt(2**32), ULong(2**64), ULong(-1)),
        *(Byte(128), Short(32768), Int(2**31), Long(2**63), 2**63, Timestamp(2**63)),
        *(Char(""), Char("ab"), Char("\ud800"), "\ud800", Symbol("é"), Decimal32(b"123")),
        *(..., {1, 2}, Described(1, ...), Array(object, ()), Array(UByte, (UInt(1),))),
    ],
    ids=repr,
)
def test_what_has_no_form_is_refused(value: Value) -> None:
    with pytest.raises(Misuse):
        encode(value)


def test_a_plain_integer_is_a_long() -> None:
    assert encode(5) == encode(Long(5))
    assert type(decode(encode(5), 0, 2)[0]) is Long


@given(VALUES)
def test_what_is_written_is_read(value: Value) -> None:
    data = encode(value)
    found, at = decode(data, 0, len(data))
    assert at == len(data)
    assert same(found, value)
    assert encode(found) == data


@given(VALUES, st.data())
def test_a_part_of_a_value_is_refused(value: Value, data: st.DataObject) -> None:
    whole = encode(value)
    end = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(PeerError):
        decode(whole, 0, end)


@given(st.binary(max_size=80), st.data())
def test_any_bytes_are_a_value_or_refused(noise: bytes, data: st.DataObject) -> None:
    # Most noise is no constructor: begin with one.
    noise = bytes((data.draw(st.sampled_from(sorted(KNOWN))),)) + noise
    try:
        value, at = decode(noise, 0, len(noise))
    except PeerError:
        return
    assert 0 < at <= len(noise)
    written = encode(value)
    assert same(decode(written, 0, len(written))[0], value)


KNOWN = {
    *(0x00, 0x40, 0x41, 0x43, 0x45, 0x50, 0x56, 0x61, 0x73, 0x83, 0x98, 0xA0, 0xA1, 0xA3),
    *(0xC0, 0xC1, 0xD0, 0xD1, 0xE0, 0xF0),
}


def same(one: Value, other: Value) -> bool:
    """Whether two values are equal in types too, all NaN being one."""
    if type(one) is not type(other):
        return False
    match one:
        case float():
            return one == other or (math.isnan(one) and math.isnan(other))
        case list():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
        case Array():
            described = same(one.descriptor, other.descriptor) and one.kind is other.kind
            return described and same(list(one.items), list(other.items))
        case Described():
            return same([one.descriptor, one.value], [other.descriptor, other.value])
    return bool(one == other)
