"""The AMQP codec: every method and header survives, broken bytes give a PeerError."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp091 import _spec, codec
from convoymq.edges.amqp091._spec import FieldType, Method, Properties
from convoymq.messages.amqp091 import PropertyType
from convoymq.model.errors import CommandFault, FrameFault, Misuse, PeerError, SyntaxFault
from convoymq.model.tables import Table, field_of, text_of

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
TABLES = st.dictionaries(
    TEXTS,
    st.one_of(st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.binary(max_size=9)),
    max_size=3,
).map(Table.of)
VALUES: dict[FieldType, st.SearchStrategy[Any]] = {
    FieldType.OCTET: st.integers(0, 255),
    FieldType.SHORT: st.integers(0, (1 << 16) - 1),
    FieldType.LONG: st.integers(0, (1 << 32) - 1),
    FieldType.LONGLONG: st.integers(0, (1 << 64) - 1),
    FieldType.BIT: st.booleans(),
    FieldType.SHORTSTR: TEXTS,
    FieldType.LONGSTR: st.binary(max_size=60),
    FieldType.TABLE: TABLES,
}


def method_of(cls: type[Method]) -> st.SearchStrategy[Method]:
    """The methods of one class with any arguments."""
    return st.builds(cls, **{name: VALUES[kind] for name, kind in cls.ARGUMENTS})


METHODS = st.sampled_from(list(_spec.METHODS.values())).flatmap(method_of)
LOSSLESS = st.binary(max_size=60).map(text_of)
PROPERTY_VALUES: dict[PropertyType, st.SearchStrategy[Any]] = {
    PropertyType.OCTET: st.integers(0, 255),
    PropertyType.TIMESTAMP: st.integers(0, (1 << 64) - 1),
    PropertyType.SHORTSTR: LOSSLESS,
    PropertyType.TABLE: TABLES | st.dictionaries(LOSSLESS, st.booleans(), max_size=3).map(Table.of),
}
PROPERTIES = st.builds(
    Properties, **{name: st.none() | PROPERTY_VALUES[kind] for name, kind in Properties.FIELDS}
)

METHOD_VECTORS: list[tuple[str, Method]] = [
    ("000a001e 07ff 00020000 003c",
     _spec.ConnectionTune(channel_max=2047, frame_max=131072, heartbeat=60)),
    ("000a0028 012f 00 00", _spec.ConnectionOpen(virtual_host="/")),
    ("0032000a 0000 0161 0a 00000000", _spec.QueueDeclare(queue="a", durable=True,
                                                          auto_delete=True)),
    ("0028000a 0000 0178 05746f706963 16 00000000",
     _spec.ExchangeDeclare(exchange="x", type="topic", durable=True, auto_delete=True,
                           nowait=True)),
    ("00280033", _spec.ExchangeUnbindOk()),
    ("003c0050 0000000000000007 01", _spec.BasicAck(delivery_tag=7, multiple=True)),
    ("003c0078 0000000000000007 02", _spec.BasicNack(delivery_tag=7, requeue=True)),
    ("003c003c 0163 0000000000000001 01 00 0171",
     _spec.BasicDeliver(consumer_tag="c", delivery_tag=1, redelivered=True, routing_key="q")),
    ("001e000a 00 1e", _spec.AccessRequest()),
    ("0055000a 00", _spec.ConfirmSelect()),
]  # fmt: skip


@pytest.mark.parametrize(("data", "method"), METHOD_VECTORS, ids=lambda value: str(value)[:24])
def test_methods_have_the_bytes_of_the_specification(data: str, method: Method) -> None:
    assert codec.encode_method(method).hex() == data.replace(" ", "")
    assert codec.decode_method(bytes.fromhex(data)) == method


def test_every_method_of_the_broker_is_there() -> None:
    indexes = {
        10: [10, 11, 20, 21, 30, 31, 40, 41, 50, 51, 60, 61, 70, 71],
        20: [10, 11, 20, 21, 40, 41],
        30: [10, 11],
        40: [10, 11, 20, 21, 30, 31, 40, 51],
        50: [10, 11, 20, 21, 30, 31, 40, 41, 50, 51],
        60: [10, 11, 20, 21, 30, 31, 40, 50, 60, 70, 71, 72, 80, 90, 100, 110, 111, 120],
        85: [10, 11],
        90: [10, 11, 20, 21, 30, 31],
    }
    assert sorted(_spec.METHODS) == [(c, m) for c, found in indexes.items() for m in found]


@given(METHODS)
def test_methods_survive_the_buffer(method: Method) -> None:
    assert codec.decode_method(codec.encode_method(method)) == method


@given(PROPERTIES, st.integers(0, (1 << 64) - 1))
def test_headers_survive_the_buffer(properties: Properties, size: int) -> None:
    header = codec.ContentHeader(body_size=size, properties=properties)
    assert codec.decode_header(codec.encode_header(header)) == header


def test_properties_have_the_bytes_of_the_specification() -> None:
    properties = Properties(content_type="a/b", delivery_mode=2, expiration="60", cluster_id="c")
    data = "9104 03612f62 02 023630 0163"
    assert codec.encode_properties(properties).hex() == data.replace(" ", "")


def test_further_flags_words_may_follow_when_they_say_nothing() -> None:
    assert codec.decode_properties(bytes.fromhex("1001 0001 0000 02")) == Properties(
        delivery_mode=2
    )
    for unknown in ("0001 8000", "0001 0002"):
        with pytest.raises(SyntaxFault, match="unknown property flags"):
            codec.decode_properties(bytes.fromhex(unknown))
    with pytest.raises(FrameFault):
        codec.decode_properties(bytes.fromhex("0001"))


def mutated(data: st.DataObject, encoded: bytes) -> bytes:
    """A few bytes changed, the end cut off."""
    out = bytearray(encoded)
    for _ in range(data.draw(st.integers(0, 3))):
        out[data.draw(st.integers(0, len(out) - 1))] = data.draw(st.integers(0, 255))
    return bytes(out[: data.draw(st.integers(0, len(out)))])


@given(st.data())
def test_mutated_methods_give_a_method_or_a_peer_error(data: st.DataObject) -> None:
    raw = mutated(data, codec.encode_method(data.draw(METHODS)))
    try:
        method = codec.decode_method(raw)
    except PeerError:
        return
    assert codec.decode_method(codec.encode_method(method)) == method


@given(st.data())
def test_mutated_headers_give_a_header_or_a_peer_error(data: st.DataObject) -> None:
    header = codec.ContentHeader(body_size=1, properties=data.draw(PROPERTIES))
    raw = mutated(data, codec.encode_header(header))
    try:
        decoded = codec.decode_header(raw)
    except PeerError:
        return
    assert codec.decode_header(codec.encode_header(decoded)) == decoded


@given(st.binary(max_size=64))
def test_any_bytes_give_a_value_or_a_peer_error(raw: bytes) -> None:
    for decode in (
        codec.decode_method,
        codec.decode_header,
        codec.decode_properties,
        lambda data: codec.decode_frame(data, payload_bytes_max=100),
    ):
        try:
            decode(raw)
        except PeerError:
            continue


def test_every_cut_of_a_method_is_refused() -> None:
    arguments = Table.of({"x-queue-type": "quorum", "n": [1, {"a": None}]})
    whole = codec.encode_method(_spec.QueueDeclare(queue="orders", arguments=arguments))
    for cut in range(len(whole)):
        with pytest.raises(PeerError):
            codec.decode_method(whole[:cut])
    with pytest.raises(SyntaxFault, match="1 bytes behind"):
        codec.decode_method(whole + b"x")


def test_unknown_methods_and_foreign_text_are_refused() -> None:
    with pytest.raises(CommandFault, match="unimplemented method"):
        codec.decode_method(bytes.fromhex("003c 0063"))
    with pytest.raises(FrameFault, match="Malformed UTF-8 in shortstr"):
        codec.decode_method(bytes.fromhex("000a0028 01ff 00 00"))
    arguments = Table.of({"x": [{text_of(b"\xff"): None}]})
    declare = codec.encode_method(_spec.QueueDeclare(arguments=arguments))
    with pytest.raises(FrameFault, match="Malformed UTF-8 in shortstr"):
        codec.decode_method(declare)


@pytest.mark.parametrize(
    "method",
    [
        _spec.QueueDeclare(queue="q" * 256),
        _spec.QueueDeclare(queue="\ud800"),
        _spec.ChannelClose(reply_code=65536),
        _spec.BasicAck(delivery_tag=-1),
    ],
)
def test_own_values_that_do_not_fit_are_misuse(method: Method) -> None:
    with pytest.raises(Misuse):
        codec.encode_method(method)


def test_frames_are_cut_out_of_a_buffer_one_byte_at_a_time() -> None:
    data = codec.method_frame(3, _spec.ChannelOpenOk())
    assert data.hex() == "0100030000000800" + "14000b00000000" + "ce"
    for cut in range(len(data)):
        assert codec.decode_frame(data[:cut], payload_bytes_max=8) is None
    expected = codec.Frame(_spec.FRAME_METHOD, 3, data[7:-1])
    assert codec.decode_frame(b"??" + data, 2, payload_bytes_max=8) == expected
    assert codec.frame(_spec.FRAME_HEARTBEAT, 0, b"") == codec.HEARTBEAT


def test_broken_frames_are_refused() -> None:
    data = codec.frame(_spec.FRAME_BODY, 1, b"12345678")
    with pytest.raises(FrameFault, match="ends with 0 instead of 206"):
        codec.decode_frame(data[:-1] + b"\0", payload_bytes_max=8)
    with pytest.raises(FrameFault, match="frame of 8 bytes, at most 7 are allowed"):
        codec.decode_frame(data, payload_bytes_max=7)
    with pytest.raises(FrameFault, match="unknown frame type 4"):
        codec.decode_frame(b"\x04" + data[1:], payload_bytes_max=8)


def test_bodies_are_cut_to_the_frame_limit() -> None:
    method = _spec.BasicReturn(reply_code=312, reply_text="NO_ROUTE", routing_key="k")
    data = codec.content_frames(1, method, Properties(), b"x" * 25, frame_bytes_max=18)
    sizes = []
    offset = 0
    while offset < len(data):
        found = codec.decode_frame(data, offset, payload_bytes_max=1000)
        assert found is not None
        offset += len(found.payload) + codec.FRAME_OVERHEAD_BYTES
        if found.type == _spec.FRAME_BODY:
            sizes.append(len(found.payload))
    assert sizes == [10, 10, 5]
    empty = codec.content_frames(1, method, Properties(), b"", frame_bytes_max=18)
    assert empty.count(bytes((_spec.FRAME_END,))) == 2


def test_the_type_of_a_header_survives() -> None:
    headers = Table.from_fields([("n", field_of(5)), ("m", field_of(None))])
    decoded = codec.decode_properties(codec.encode_properties(Properties(headers=headers)))
    assert decoded.headers == headers
