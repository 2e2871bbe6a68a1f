"""Performatives: what is written is read again, and what breaks the table is refused by name."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp10 import performatives
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Begin,
    Close,
    Composite,
    Disposition,
    Error,
    Flow,
    Modified,
    Open,
    Source,
    Target,
    Transfer,
    accepted,
    read,
)
from convoymq.messages.amqp10.values import Array, Described, Symbol, UInt, ULong, encode
from convoymq.model.errors import PeerError

ROWS = sorted(
    (
        row
        for row in vars(performatives).values()
        if isinstance(row, type) and issubclass(row, Composite) and row is not Composite
    ),
    key=lambda row: row.CODE,
)
SYMBOLS = st.text(alphabet="abc:-", max_size=8).map(Symbol)
KINDS = {
    "bytes": st.binary(max_size=16),
    "bool": st.booleans(),
    "dict": st.dictionaries(SYMBOLS, st.integers(0, 9).map(UInt), max_size=3),
    "str": st.text(max_size=8),
    "symbol": SYMBOLS,
    "symbols": st.lists(SYMBOLS, max_size=3).map(tuple),
    "ubyte": st.integers(0, 255),
    "uint": st.integers(0, (1 << 32) - 1),
    "ulong": st.integers(0, (1 << 64) - 1),
    "ushort": st.integers(0, 65535),
    "value": st.text(max_size=8),
    "delivery state": st.builds(Accepted) | st.builds(Modified, delivery_failed=st.booleans()),
    "map of delivery states": st.dictionaries(
        st.binary(max_size=4), st.none() | st.builds(Accepted), max_size=3
    ),
    "terminus": st.builds(Source, address=st.text(max_size=5))
    | st.builds(Target, address=st.none()),
    "error": st.builds(Error, condition=SYMBOLS, description=st.text(max_size=5)),
}


@st.composite
def composites(draw: st.DrawFn) -> Composite:
    row = draw(st.sampled_from(ROWS))
    made = {}
    for each in row.FIELDS:
        if each.must or draw(st.booleans()):
            made[each.name] = draw(KINDS[each.kind.name])
    return row(**made)


@given(composites())
def test_what_is_written_is_read_again(made: Composite) -> None:
    assert read(made.encoded()) == (made, b"")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.NAME)
def test_a_descriptor_may_be_a_symbol(row: type[Composite]) -> None:
    fields = {
        each.name: 1
        if each.kind.name.startswith("u")
        else b"x"
        if each.kind.name == "bytes"
        else "x"
        for each in row.FIELDS
        if each.must
    }
    if "role" in fields:
        fields["role"] = True
    if row.NAME == "sasl-mechanisms:list":
        fields["mechanisms"] = (Symbol("PLAIN"),)
    made = row(**fields)
    again = Described(Symbol(f"amqp:{row.NAME}"), made.described().value)
    assert read(encode(again)) == (made, b"")


def test_nulls_at_the_end_are_left_out_and_need_not_be() -> None:
    short = Close().encoded()
    assert short == b"\x00\x53\x18\x45"
    assert read(encode(Described(ULong(0x18), [None]))) == (Close(), b"")


def test_several_symbols_may_be_one_or_none() -> None:
    one = Described(ULong(0x28), [None] * 9 + [Symbol("amqp:accepted:list")])
    several = Described(ULong(0x28), [None] * 9 + [Array(Symbol, (Symbol("a"), Symbol("b")))])
    assert read(encode(one))[0].outcomes == ("amqp:accepted:list",)  # type: ignore[attr-defined]
    assert read(encode(several))[0].outcomes == ("a", "b")  # type: ignore[attr-defined]
    assert Source().outcomes == ()


def test_a_payload_follows_a_transfer_only() -> None:
    transfer = Transfer(handle=1, delivery_id=2)
    assert read(transfer.encoded() + b"payload") == (transfer, b"payload")
    with pytest.raises(PeerError, match="7 bytes behind close"):
        read(Close().encoded() + b"payload")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (encode(UInt(1)), "no performative"),
        (encode(Described(ULong(0x99), [])), "no performative"),
        (encode(Described(ULong(0x10), {})), "open:list has other fields"),
        (encode(Described(ULong(0x18), [None, None])), "close:list has other fields"),
        (encode(Described(ULong(0x10), [])), "open:list lacks its field container_id"),
        (
            encode(Described(ULong(0x10), [Symbol("a")])),
            "field container_id of open:list is no str",
        ),
        (encode(Described(ULong(0x11), [None, ULong(0)])), "field next_outgoing_id of begin"),
        (encode(Described(ULong(0x12), ["a", UInt(0), True, None, None, 5])), "no terminus"),
        (encode(Described([], [])), "no performative"),
        (b"", "cut off"),
    ],
)
def test_what_breaks_the_table_is_refused_by_name(body: bytes, text: str) -> None:
    with pytest.raises(PeerError, match=text):
        read(body)


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for head in (b"", b"\x00\x53\x12", b"\x00\x53\x14\xc0"):
        with suppress(PeerError):
            read(head + body)


def test_the_table_is_that_of_the_standard() -> None:
    """Numbers of fields, in the order of codes."""
    assert [(row.CODE, len(dataclasses.fields(row))) for row in ROWS] == [
        *((0x10, 10), (0x11, 8), (0x12, 14), (0x13, 11), (0x14, 11), (0x15, 6), (0x16, 3)),
        *((0x17, 1), (0x18, 1), (0x1D, 3), (0x24, 0), (0x25, 1), (0x26, 0), (0x27, 3)),
        *((0x28, 11), (0x29, 7), (0x30, 1), (0x31, 1), (0x32, 2), (0x33, 1), (0x34, 2)),
        *((0x40, 1), (0x41, 3), (0x44, 2)),
    ]
    assert Attach(name="", handle=0, role=True).snd_settle_mode == 2
    assert Open(container_id="").channel_max == 65535
    assert Begin(next_outgoing_id=0, incoming_window=0, outgoing_window=0).handle_max == 2**32 - 1
    assert not Flow(incoming_window=0, next_outgoing_id=0, outgoing_window=0).drain


@pytest.mark.parametrize("ids", [(0, 0), (1, 255), ((1 << 32) - 1, 7)])
def test_a_disposition_without_the_table_is_one(ids: tuple[int, int]) -> None:
    first, last = ids
    told = last if last != first else None
    found = Disposition(role=True, first=first, last=told, settled=True, state=Accepted())
    assert read(accepted(first, last)) == (found, b"")
