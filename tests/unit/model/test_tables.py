"""Field tables: bytes in, the same bytes out; broken bytes give a PeerError."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.model.errors import Misuse, PeerError, SyntaxFault
from convoymq.model.tables import (
    DEPTH_MAX,
    EMPTY,
    Decimal,
    Field,
    Table,
    bytes_of,
    bytes_shown,
    decode_body,
    decode_table,
    encode_table,
    erlang_term,
    shown,
    text_of,
)

VECTORS = {
    "74 01": Field("t", True),
    "62 ff": Field("b", -1),
    "42 ff": Field("B", 255),
    "73 ff fe": Field("s", -2),
    "75 ff fe": Field("u", 65534),
    "49 ff ff ff ff": Field("I", -1),
    "69 ff ff ff ff": Field("i", 4294967295),
    "6c ff ff ff ff ff ff ff ff": Field("l", -1),
    "4c ff ff ff ff ff ff ff fe": Field("L", -2),
    "66 3f c0 00 00": Field("f", 1.5),
    "64 3f f8 00 00 00 00 00 00": Field("d", 1.5),
    "44 02 00 00 01 3b": Field("D", Decimal(2, 315)),
    "53 00 00 00 02 68 69": Field("S", b"hi"),
    "78 00 00 00 02 00 ff": Field("x", b"\x00\xff"),
    "54 00 00 00 00 65 00 00 00": Field("T", 0x65000000),
    "56": Field("V", None),
    "46 00 00 00 04 01 61 74 00": Field("F", Table.of({"a": False})),
    "41 00 00 00 03 74 01 56": Field("A", (Field("t", True), Field("V", None))),
}


@cache
def fields(depth: int = 2) -> st.SearchStrategy[Field]:
    """Any value of any type code."""
    leaves = st.one_of(
        st.builds(Field, st.just("t"), st.booleans()),
        st.builds(Field, st.just("b"), st.integers(-128, 127)),
        st.builds(Field, st.just("B"), st.integers(0, 255)),
        st.builds(Field, st.just("s"), st.integers(-(1 << 15), (1 << 15) - 1)),
        st.builds(Field, st.just("u"), st.integers(0, (1 << 16) - 1)),
        st.builds(Field, st.just("I"), st.integers(-(1 << 31), (1 << 31) - 1)),
        st.builds(Field, st.just("i"), st.integers(0, (1 << 32) - 1)),
        st.builds(Field, st.sampled_from("lL"), st.integers(-(1 << 63), (1 << 63) - 1)),
        st.builds(Field, st.just("T"), st.integers(0, (1 << 64) - 1)),
        st.builds(Field, st.just("f"), st.floats(width=32, allow_nan=False)),
        st.builds(Field, st.just("d"), st.floats(allow_nan=False)),
        st.builds(
            Field,
            st.just("D"),
            st.builds(Decimal, st.integers(0, 255), st.integers(0, (1 << 32) - 1)),
        ),
        st.builds(Field, st.sampled_from("Sx"), st.binary(max_size=40)),
        st.just(Field("V", None)),
    )
    if depth == 0:
        return leaves
    inner = fields(depth - 1)
    return st.one_of(
        leaves,
        st.builds(Field, st.just("A"), st.lists(inner, max_size=4).map(tuple)),
        st.builds(Field, st.just("F"), tables(depth - 1)),
    )


@cache
def tables(depth: int = 2) -> st.SearchStrategy[Table]:
    """Any table, duplicate keys included."""
    keys = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=10)
    return st.lists(st.tuples(keys, fields(depth)), max_size=4).map(Table.from_fields)


@pytest.mark.parametrize("code", VECTORS)
def test_each_type_has_the_bytes_of_the_dialect(code: str) -> None:
    encoded = b"\x01k" + bytes.fromhex(code)
    assert Table.from_fields([("k", VECTORS[code])]).encoded == encoded
    assert decode_body(encoded).items() == (("k", VECTORS[code]),)


@given(tables())
def test_tables_survive_the_wire(table: Table) -> None:
    data = encode_table(table)
    decoded, end = decode_table(b"##" + data + b"tail", 2, 2 + len(data))
    assert end == 2 + len(data)
    assert decoded == table
    assert decoded.items() == table.items()
    assert encode_table(decoded) == data


@given(st.data())
def test_mutated_bytes_give_a_table_or_a_peer_error(data: st.DataObject) -> None:
    encoded = bytearray(encode_table(data.draw(tables())))
    for _ in range(data.draw(st.integers(0, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    raw = bytes(encoded[:cut])
    try:
        table, end = decode_table(raw, 0, len(raw))
    except PeerError:
        return
    assert encode_table(table) == raw[:end]


@given(st.binary(max_size=200))
def test_any_bytes_give_a_table_or_a_peer_error(raw: bytes) -> None:
    try:
        table = decode_body(raw)
    except PeerError:
        return
    assert table.encoded == raw


def test_odd_encodings_are_emitted_as_they_came() -> None:
    raw = b"\x01at\x02\x01at\x00\x01bf\x7f\xa0\x00\x01"
    table = decode_body(raw)
    assert table.encoded == raw
    first = table.get("a")
    assert first is not None
    assert first.value is True
    assert table.keys() == ("a", "a", "b")


def nested(depth: int) -> bytes:
    """A table that holds a table that holds …, `depth` in all."""
    body = b""
    for _ in range(depth - 1):
        body = b"\x01nF" + len(body).to_bytes(4, "big") + body
    return body


def test_depth_is_bounded() -> None:
    assert decode_body(nested(DEPTH_MAX)).keys() == ("n",)
    with pytest.raises(SyntaxFault, match="nested deeper than 32"):
        decode_body(nested(DEPTH_MAX + 1))
    value: object = 1
    for _ in range(DEPTH_MAX + 1):
        value = [value]
    with pytest.raises(Misuse, match="nested deeper"):
        Table.of({"k": value})


def test_a_length_beyond_the_input_is_refused_before_it_is_used() -> None:
    with pytest.raises(SyntaxFault):
        decode_table(b"\xff\xff\xff\xff\x01a", 0, 6)
    with pytest.raises(SyntaxFault):
        decode_body(b"\x01aS\xff\xff\xff\xffx")


def test_keys_that_are_no_text_keep_their_bytes() -> None:
    table = decode_body(b"\x01\xffV")
    assert not table.has_text_keys()
    assert Table.from_fields(table.items()).encoded == table.encoded
    assert table.to_plain() == {"Not UTF-8, base64 is: /w==": None}
    assert not Table.of({"a": [{"b": table}]}).has_text_keys()
    with pytest.raises(Misuse):
        Table.of({"k" * 256: 1})
    with pytest.raises(Misuse):
        Table.of({"\ud800": 1})


@given(st.binary(max_size=40))
def test_what_people_see_of_bytes_leads_back_to_them(data: bytes) -> None:
    assert bytes_of(text_of(data)) == data
    assert bytes_shown(shown(data)) == data
    assert shown(text_of(data)) == shown(data)
    assert json.loads(json.dumps(shown(data), ensure_ascii=False).encode()) == shown(data)


def test_text_that_only_looks_like_bytes_stays_as_it_is() -> None:
    for text in ("Not UTF-8, base64 is: ", "Not UTF-8, base64 is: ?", "Not UTF-8, base64 is: YQ=="):
        assert bytes_shown(text) == text.encode()
    with pytest.raises(Misuse):
        bytes_shown("\ud800")


@pytest.mark.parametrize(
    "field", [Field("b", 200), Field("S", 1), Field("f", 1e300), Field("t", b""), Field("I", 1.5)]
)
def test_values_that_do_not_fit_are_misuse(field: Field) -> None:
    with pytest.raises(Misuse):
        Table.from_fields([("k", field)])


def test_integers_of_any_width_are_equivalent_but_not_to_other_classes() -> None:
    assert Field("I", 5).equivalent(Field("l", 5))
    assert not Field("I", 5).equivalent(Field("l", 6))
    assert not Field("I", 1).equivalent(Field("t", True))
    assert not Field("I", 1).equivalent(Field("d", 1.0))
    assert Field("f", 1.5).equivalent(Field("d", 1.5))
    assert not Field("T", 5).equivalent(Field("l", 5))
    assert not Field("S", b"a").equivalent(Field("x", b"a"))


def test_a_changed_table_keeps_the_rest() -> None:
    table = Table.of({"CC": ["a"], "BCC": ["b"], "n": 1})
    assert table.without("BCC").keys() == ("CC", "n")
    assert table.without("x") is table
    assert table.with_field("CC", "z").to_plain() == {"CC": "z", "BCC": ["b"], "n": 1}
    assert table.with_field("new", None).keys() == ("CC", "BCC", "n", "new")
    assert Table.of({"b": 1, "a": 2}).canonical() == Table.of({"a": 2, "b": 1})
    assert EMPTY.canonical() is EMPTY


def test_terms_read_like_those_of_error_texts() -> None:
    table = Table.of({"k": 1})
    assert erlang_term(Field("S", b"foo")) == '<<"foo">>'
    assert Field("S", b"foo").term() == "foo"
    assert Field("t", True).term() == "true"
    assert Field("F", table).term() == '[{<<"k">>,long,1}]'
    assert Field("A", (Field("I", 1),)).term() == "[{signedint,1}]"
    assert Field("D", Decimal(2, 3)).term() == "{2,3}"
