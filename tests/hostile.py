"""Messages that a client may send and nobody expects: every value that the publish path takes."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.messages.amqp091 import Properties, PropertyType
from convoymq.messages.record import content_of
from convoymq.model.tables import Decimal, Field, Table, text_of
from convoymq.queues.interface import GetResult

EXTREMES = st.sampled_from([0, 1, (1 << 31) - 1, 1 << 31, (1 << 53) + 1, (1 << 63) - 1])
SHORT = st.one_of(
    st.text(max_size=20),
    st.binary(max_size=40).map(text_of),
    st.sampled_from(["", "\0", "x" * 255, text_of(b"\xff\xfe\x00\x01"), "Not UTF-8, base64 is: "]),
).filter(lambda text: len(text.encode("utf-8", "surrogateescape")) <= 255)
NUMBERS = {
    "b": (-128, 127), "B": (0, 255), "s": (-(1 << 15), (1 << 15) - 1), "u": (0, (1 << 16) - 1),
    "I": (-(1 << 31), (1 << 31) - 1), "i": (0, (1 << 32) - 1),
    "l": (-(1 << 63), (1 << 63) - 1), "L": (-(1 << 63), (1 << 63) - 1), "T": (0, (1 << 64) - 1),
}  # fmt: skip


def _number(code: str) -> st.SearchStrategy[Field]:
    low, high = NUMBERS[code]
    return st.one_of(st.integers(low, high), st.sampled_from([low, high])).map(
        lambda value: Field(code, value)
    )


FLOATS = st.one_of(st.floats(), st.sampled_from([float("nan"), float("inf"), -0.0, 5e-324]))
SIMPLE = st.one_of(
    *(_number(code) for code in NUMBERS),
    st.booleans().map(lambda value: Field("t", value)),
    FLOATS.map(lambda value: Field("d", value)),
    st.floats(width=32).map(lambda value: Field("f", value)),
    st.builds(Decimal, st.sampled_from([0, 2, 255]), st.integers(0, (1 << 32) - 1)).map(
        lambda value: Field("D", value)
    ),
    st.binary(max_size=60).map(lambda value: Field("S", value)),
    st.binary(max_size=60).map(lambda value: Field("x", value)),
    st.just(Field("V", None)),
)


def _nested(inner: st.SearchStrategy[Field]) -> st.SearchStrategy[Field]:
    pairs = st.lists(st.tuples(SHORT, inner), max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3).map(lambda items: Field("A", tuple(items))),
        pairs.map(lambda items: Field("F", Table.from_fields(items))),
    )


FIELDS = st.recursive(SIMPLE, _nested, max_leaves=12)
#: Names that only people see, and none by which a message asks for something.
HEADERS = st.lists(
    st.tuples(SHORT.filter(lambda name: name not in ("CC", "BCC")), FIELDS), max_size=5
).map(Table.from_fields)
TIMES = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.sampled_from([1_700_000_000_000, 1_700_000_000_000_000, 1_700_000_000_000_000_000]),
)
_VALUES: dict[PropertyType, st.SearchStrategy[object]] = {
    PropertyType.SHORTSTR: SHORT,
    PropertyType.TABLE: HEADERS,
    PropertyType.OCTET: st.integers(0, 255),
    PropertyType.TIMESTAMP: TIMES,
}
_SERVED_ELSEWHERE = ("user_id", "expiration", "priority")
PROPERTIES = st.builds(
    Properties,
    **{
        name: st.none() | _VALUES[kind]
        for name, kind in Properties.FIELDS
        if name not in _SERVED_ELSEWHERE
    },
)
BODIES = st.one_of(st.binary(max_size=50), st.sampled_from([b"", b"\xff", b"null", b"{"]))

SEVERAL = [
    Properties(correlation_id=text_of(b"\xff\xfe\x00\x01"), message_id=text_of(b"\x80")),
    Properties(headers=Table.of({text_of(b"\xe9"): "v"})),
    Properties(timestamp=1_700_000_000_000_000),
    Properties(timestamp=(1 << 64) - 1),
    Properties(headers=Table.of({"n": float("nan"), "i": float("inf"), "d": Decimal(255, 1)})),
    Properties(headers=Table.of({"x": b"\xff", "": [{"": [None, b"\x00"]}]})),
    Properties(content_type="", content_encoding=text_of(b"\xc3"), type="\0", app_id="\x85"),
]
"""One of each kind."""


def content(properties: Properties, body: bytes = b"m", channel: int = 1) -> bytes:
    """Returns content frames as a client sends them."""
    made = content_of(properties, body)
    return made[:1] + struct.pack(">H", channel) + made[3:]


def taken(result: GetResult) -> bytes:
    """Returns the record that a get has brought."""
    assert result.block is not None
    return batch.record(result.block, result.command, result.record)
