"""A naive reference of columnar frames, the oracle of `test_columns`: rows as plain objects."""

from __future__ import annotations

import itertools
import json
import math
import struct
from dataclasses import dataclass, replace

from crc32c import crc32c
from msgspec import structs

from convoymq.edges.amqp091.codec import (
    ContentHeader,
    Properties,
    decode_header,
    encode_header,
)
from convoymq.kernels import columns as c
from convoymq.model.tables import Decimal, Field, Table

PAYLOAD_MAX = 131064


@dataclass(frozen=True)
class Message:
    """One message as a publisher means it."""

    exchange: str
    routing_key: str
    properties: Properties
    body: bytes
    cut: int = PAYLOAD_MAX
    """Payload bytes of its body frames."""

    @property
    def header(self) -> bytes:
        return encode_header(ContentHeader(body_size=len(self.body), properties=self.properties))

    def record(self) -> bytes:
        out = b""
        for name in (self.exchange.encode(), self.routing_key.encode()):
            out += bytes((len(name),)) + name
        out += frame(2, self.header)
        for at in range(0, len(self.body), self.cut):
            out += frame(3, self.body[at : at + self.cut])
        return out

    @property
    def key(self) -> bytes | None:
        for name, field in (self.properties.headers or Table(b"", ())).items():
            if name == "x-key" and isinstance(field.value, bytes):
                return field.value
        return self.routing_key.encode() if self.exchange else None

    @property
    def is_tombstone(self) -> bool:
        fields = (self.properties.headers or Table(b"", ())).items()
        return not self.body and any(self._is_marker(name, field) for name, field in fields)

    def _is_marker(self, name: str, field: Field) -> bool:
        return not self.body and name == "x-tombstone" and field.value is True

    @property
    def headers(self) -> list[tuple[bytes, bytes | None]] | None:
        if self.properties.headers is None:
            return None
        found: list[tuple[bytes, bytes | None]] = []
        key_seen = False
        for name, field in self.properties.headers.items():
            if name == "x-key" and isinstance(field.value, bytes) and not key_seen:
                key_seen = True
                continue
            if self._is_marker(name, field):
                continue
            found.append((name.encode(), text_of(field)))
        return found


@dataclass(frozen=True)
class Row:
    """One row of a frame; None = null, and what the frame does not have."""

    offset: int | None = None
    timestamp: int | None = None
    key: bytes | None = None
    value: bytes | None = None
    headers: list[tuple[bytes, bytes | None]] | None = None
    exchange: bytes | None = None
    routing_key: bytes | None = None
    properties: bytes | None = None
    delivery_count: int | None = None
    redelivered: int | None = None


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, 7, len(payload)) + payload + b"\xce"


def text_of(field: Field) -> bytes | None:
    if field.value is None:
        return None
    if isinstance(field.value, bytes):
        return field.value
    return json_of(field).encode()


def json_of(field: Field) -> str:
    value = field.value
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float():
            if math.isnan(value):
                return "NaN"
            return repr(value).replace("inf", "Infinity")
        case bytes():
            return json.dumps(value.decode("utf-8", "replace"), ensure_ascii=False)
        case Decimal(scale, number):
            digits = str(number).rjust(scale + 1, "0")
            return f"{digits[:-scale]}.{digits[-scale:]}" if scale else digits
        case Table():
            pairs = (f"{json.dumps(k, ensure_ascii=False)}:{json_of(v)}" for k, v in value.items())
            return "{" + ",".join(pairs) + "}"
        case tuple():
            return "[" + ",".join(json_of(item) for item in value) + "]"
        case _:
            return str(value)


def row_of(
    message: Message, columns: int, offset: int, time_ms: int, acquired: int, delivered: int
) -> Row:
    """What a frame with these columns has of a message."""
    all_of_it = {
        c.OFFSET: ("offset", offset),
        c.TIMESTAMP: ("timestamp", time_ms * 1000),
        c.KEY: ("key", message.key),
        c.VALUE: ("value", None if message.is_tombstone else message.body),
        c.HEADERS: ("headers", message.headers),
        c.EXCHANGE: ("exchange", message.exchange.encode()),
        c.ROUTING_KEY: ("routing_key", message.routing_key.encode()),
        c.PROPERTIES: ("properties", message.header),
        c.DELIVERY_COUNT: ("delivery_count", delivered),
        c.REDELIVERED: ("redelivered", acquired),
    }
    row = Row()
    for bit, (name, value) in all_of_it.items():
        if columns & bit:
            row = replace(row, **{name: value})
    return row


def bits(data: bytes, n: int) -> list[bool]:
    """Validity of n values."""
    if not data:
        return [True] * n
    assert len(data) == (n + 7) // 8
    return [bool(data[i // 8] >> (i % 8) & 1) for i in range(n)]


def pieces(ends: bytes, data: bytes, n: int) -> list[bytes]:
    found = struct.unpack(f"<{n + 1}i", ends)
    assert found[0] == 0
    assert found[-1] == len(data)
    assert list(found) == sorted(found)
    return [data[a:b] for a, b in itertools.pairwise(found)]


def nullable(validity: bytes, ends: bytes, data: bytes, n: int) -> list[bytes | None]:
    known = bits(validity, n)
    return [p if ok else None for ok, p in zip(known, pieces(ends, data, n), strict=True)]


def parse(data: bytes) -> tuple[int, int, list[Row]]:
    """(base, next, rows) of an uncompressed frame, straight from the document."""
    magic, version, compression, columns, n = struct.unpack_from("<IHHII", data)
    base, next_ = struct.unpack_from("<QQ", data, 16)
    count, check = struct.unpack_from("<II", data, 32)
    stored, length, spare = struct.unpack_from("<QQQ", data, 40)
    assert (magic, version, compression, spare) == (0x46435643, 1, 0, 0)
    assert check == crc32c(data[40:], crc32c(data[:36]))
    body = data[64 + 16 * count :]
    assert len(body) == stored == length
    table = [struct.unpack_from("<QQ", data, 64 + 16 * i) for i in range(count)]
    buffers, at = [], 0
    for offset, size in table:
        assert offset == at
        assert offset % 8 == 0
        buffers.append(body[offset : offset + size])
        at = -(-(offset + size) // 8) * 8
        assert not any(body[offset + size : at])
    assert at == length
    taken = iter(buffers)
    rows = [Row() for _ in range(n)]

    def fill(name: str, values: list) -> None:
        assert len(values) == n
        for i, value in enumerate(values):
            rows[i] = replace(rows[i], **{name: value})

    if columns & c.OFFSET:
        raw = next(taken)
        fill("offset", list(struct.unpack(f"<{n}q", raw)) if raw else list(range(base, base + n)))
    if columns & c.TIMESTAMP:
        fill("timestamp", list(struct.unpack(f"<{n}q", next(taken))))
    if columns & c.KEY:
        fill("key", nullable(next(taken), next(taken), next(taken), n))
    if columns & c.VALUE:
        fill("value", nullable(next(taken), next(taken), next(taken), n))
    if columns & c.HEADERS:
        known, lists = bits(next(taken), n), struct.unpack(f"<{n + 1}i", next(taken))
        m = lists[-1]
        names = pieces(next(taken), next(taken), m)
        texts = nullable(next(taken), next(taken), next(taken), m)
        pairs = list(zip(names, texts, strict=True))
        fill("headers", [pairs[lists[i] : lists[i + 1]] if known[i] else None for i in range(n)])
    for bit, name in (
        (c.EXCHANGE, "exchange"),
        (c.ROUTING_KEY, "routing_key"),
        (c.PROPERTIES, "properties"),
    ):
        if columns & bit:
            fill(name, pieces(next(taken), next(taken), n))
    for bit, name in ((c.DELIVERY_COUNT, "delivery_count"), (c.REDELIVERED, "redelivered")):
        if columns & bit:
            fill(name, list(struct.unpack(f"<{n}i", next(taken))))
    assert next(taken, None) is None
    return base, next_, rows


def validity(values: list) -> bytes:
    if all(value is not None for value in values):
        return b""
    out = bytearray((len(values) + 7) // 8)
    for i, value in enumerate(values):
        if value is not None:
            out[i // 8] |= 1 << i % 8
    return bytes(out)


def ends(values: list) -> bytes:
    at, found = 0, [0]
    for value in values:
        at += len(value or b"")
        found.append(at)
    return struct.pack(f"<{len(found)}i", *found)


def var(values: list) -> list[bytes]:
    return [ends(values), b"".join(v or b"" for v in values)]


def buffers_of(columns: int, rows: list[Row]) -> list[bytes]:
    """The buffers of a frame with these rows, as Arrow has them."""
    n = len(rows)
    out: list[bytes] = []
    if columns & c.OFFSET:
        out.append(struct.pack(f"<{n}q", *(row.offset for row in rows)))
    if columns & c.TIMESTAMP:
        out.append(struct.pack(f"<{n}q", *(row.timestamp for row in rows)))
    for bit, name in ((c.KEY, "key"), (c.VALUE, "value")):
        if columns & bit:
            values = [getattr(row, name) for row in rows]
            out += [validity(values), *var(values)]
    if columns & c.HEADERS:
        lists = [row.headers for row in rows]
        flat = [pair for pairs in lists for pair in pairs or []]
        texts = [text for _, text in flat]
        out += [validity(lists), ends(lists), *var([name for name, _ in flat])]
        out += [validity(texts), *var(texts)]
    for bit, name in (
        (c.EXCHANGE, "exchange"),
        (c.ROUTING_KEY, "routing_key"),
        (c.PROPERTIES, "properties"),
    ):
        if columns & bit:
            out += var([getattr(row, name) for row in rows])
    for bit, name in ((c.DELIVERY_COUNT, "delivery_count"), (c.REDELIVERED, "redelivered")):
        if columns & bit:
            out.append(struct.pack(f"<{n}i", *(getattr(row, name) for row in rows)))
    return out


def produced(
    row: Row, exchange: str, routing_key: str | None, message_id: str, *, has_value: bool = True
) -> Message:
    """The message that a produced row becomes."""
    properties = decode_header(row.properties).properties if row.properties else Properties()
    table = properties.headers
    if row.headers is not None:
        table = Table.from_fields(
            (name.decode(), field_for(text))
            for name, text in row.headers
            if row.key is None or name != b"x-key"
        )
    if row.key is not None:
        kept = [] if table is None else [pair for pair in table.items() if pair[0] != "x-key"]
        table = Table.from_fields([*kept, ("x-key", field_for(row.key))])
    if has_value and row.value is None:
        kept = [] if table is None else [pair for pair in table.items() if pair[0] != "x-tombstone"]
        table = Table.from_fields([*kept, ("x-tombstone", Field("t", True))])
    properties = structs.replace(properties, headers=table, delivery_mode=2)
    if row.timestamp is not None:
        properties = structs.replace(properties, timestamp=row.timestamp // 1_000_000)
    if message_id and properties.message_id is None:
        properties = structs.replace(properties, message_id=message_id)
    if routing_key is None:
        assert row.routing_key is not None
        routing_key = row.routing_key.decode()
    return Message(exchange, routing_key, properties, row.value or b"")


def field_for(text: bytes | None) -> Field:
    if text is None:
        return Field("V", None)
    try:
        text.decode()
    except UnicodeDecodeError:
        return Field("x", text)
    return Field("S", text)
