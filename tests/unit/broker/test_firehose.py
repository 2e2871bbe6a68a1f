"""Copies of the firehose: of any message that the publish path takes, and of none that is one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.broker.firehose import TABLE_BYTES_MAX, TRACE_EXCHANGE, Firehose, Origin
from convoymq.kernels.content import content_parts, split_record
from convoymq.messages.amqp091 import ContentHeader, Properties, decode_header, encode_header
from convoymq.model.errors import Unavailable
from convoymq.model.tables import Field, Table, bytes_of, text_of

ORIGIN = Origin("a -> b", 3, "guest")
BINARY = b"\xff\xfe\x00"


def frame(kind: int, payload: bytes) -> bytes:
    return bytes((kind, 0, 0)) + len(payload).to_bytes(4, "big") + payload + b"\xce"


def content(properties: Properties, body: bytes = b"body") -> bytes:
    header = encode_header(ContentHeader(body_size=len(body), properties=properties))
    return frame(2, header) + frame(3, body)


class Publishing:
    """Leads to one queue, unless it fails."""

    def __init__(self) -> None:
        self.queue = SimpleNamespace(name="copies", refuses_publishes=False)
        self.fails = False
        self.keys: list[str] = []

    def route_dead_letter(
        self, _vhost: str, exchange: str, keys: tuple[str, ...], _headers: Table, _hashed: object
    ) -> tuple[Any, ...]:
        assert exchange == TRACE_EXCHANGE
        if self.fails:
            raise Unavailable("not open")
        self.keys += keys
        return (self.queue,)


@pytest.fixture
def publishing() -> Publishing:
    return Publishing()


@pytest.fixture
def firehose(publishing: Publishing) -> Firehose:
    tree: Any = SimpleNamespace(settings={"vhosts.traced.v": "true"}, vhosts={"v", "w"})
    return Firehose(tree, publishing, "n1")  # type: ignore[arg-type]


def headers_of(made: Any) -> dict[str, Field]:
    """The headers of a copy, by name."""
    header, body = content_parts(made.content)
    assert body == b"body"
    headers = decode_header(header).properties.headers
    assert headers is not None
    return dict(headers.items())


def test_virtual_hosts_that_are_there_are_traced(firehose: Firehose) -> None:
    assert firehose.vhosts == {"v"}


def test_any_bytes_are_copied(firehose: Firehose, publishing: Publishing) -> None:
    text = text_of(BINARY)
    properties = Properties(
        correlation_id=text, timestamp=(1 << 64) - 1, headers=Table.of({text: BINARY})
    )
    made = firehose.published("v", "x", ["k", text], content(properties), [], ORIGIN)
    found = headers_of(made)
    assert found["routing_keys"].value == (Field("S", b"k"), Field("S", BINARY))
    inner = found["properties"].value
    assert isinstance(inner, Table)
    copied = dict(inner.items())
    assert copied["correlation_id"].value == BINARY
    assert copied["headers"].value == properties.headers
    assert copied["timestamp"].code == "l"
    record = b"\x01x\x03" + BINARY + content(properties)
    made = firehose.delivered("v", "q", record, ORIGIN, redelivered=True)
    found = headers_of(made)
    assert found["redelivered"] == Field("I", 1)
    assert found["channel"] == Field("I", 3)
    assert made is not None
    assert split_record(made.key + made.content)[0] == made.key
    assert publishing.keys == ["publish.x", "deliver.q"]
    assert bytes_of(text) == BINARY


def test_copies_long_names_and_large_headers_fit(firehose: Firehose) -> None:
    large = Properties(headers=Table.of({"h": b"x" * TABLE_BYTES_MAX}))
    made = firehose.published("v", "x" * 255, ["k"], content(large), [], ORIGIN)
    assert headers_of(made)["properties"].value == Table.of({})
    assert made is not None
    assert len(made.key) == 2 + len(TRACE_EXCHANGE) + 255


def test_what_is_a_copy_or_cannot_be_made_or_stored_is_dropped(
    firehose: Firehose, publishing: Publishing
) -> None:
    name = TRACE_EXCHANGE.encode()
    copy = bytes((len(name),)) + name + b"\x01k" + content(Properties())
    assert firehose.delivered("v", "q", copy, ORIGIN, redelivered=False) is None
    for damaged in (b"", b"\x01", b"\x01x\x01k\x02\x00"):
        assert firehose.delivered("v", "q", damaged, ORIGIN, redelivered=False) is None
    plain = content(Properties())
    publishing.fails = True
    assert firehose.published("v", "x", ["k"], plain, [], ORIGIN) is None
    publishing.fails = False
    publishing.queue.refuses_publishes = True
    assert firehose.published("v", "x", ["k"], plain, [], ORIGIN) is None
