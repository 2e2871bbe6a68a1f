"""Messages of an ordered topic as a columnar frame.

The order key is the routing key where that can hold it (UTF-8, at most 255 bytes), so that the
message is that of an AMQP publisher. Other keys are the header `x-order-key`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from sys import byteorder
from typing import NamedTuple

from convoymq.client.rows import texts_of
from convoymq.kernels.column_frame import build_frame
from convoymq.kernels.columns import HEADERS, ROUTING_KEY, VALUE

ORDER_KEY = "x-order-key"
ROUTING_KEY_BYTES_MAX = 255
HEADER_NAME_BYTES_MAX = 255

Headers = Mapping[str, str | bytes]


class TopicRow(NamedTuple):
    """A message to be published."""

    key: bytes
    body: bytes | None
    """None: a null value, a tombstone."""
    headers: Headers | None = None

    @property
    def messages(self) -> int:
        """Returns the number of messages."""
        return 1

    @property
    def size(self) -> int:
        """Returns about how many bytes it takes."""
        more = sum(len(name) + len(value) for name, value in (self.headers or {}).items())
        return 64 + len(self.key) + len(self.body or b"") + more


class Texts(NamedTuple):
    """A column of texts: their ends, one more than there are, and their bytes."""

    ends: Sequence[int]
    data: bytes | memoryview
    nulls: frozenset[int] = frozenset()
    """Numbers of those that are null: empty, with another meaning."""


class HeaderTexts(NamedTuple):
    """A column of headers: where each message's fields end, and the fields."""

    ends: Sequence[int]
    names: Texts
    values: Texts


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Messages as columns. The order keys fit routing keys (UTF-8, at most 255 bytes); where they
    do not, they are headers already, and the key is empty."""

    keys: Texts
    values: Texts
    headers: HeaderTexts | None = None


class RowChunk(NamedTuple):
    """Messages [start, end) of a block: of one logical partition, with one outcome."""

    block: RowBlock
    start: int
    end: int

    @property
    def key(self) -> bytes:
        """Returns nothing: their keys are in the block."""
        return b""

    @property
    def messages(self) -> int:
        """Returns the number of messages."""
        return self.end - self.start

    @property
    def size(self) -> int:
        """Returns about how many bytes they take."""
        block, start, end = self
        size = 64 * self.messages
        for texts in (block.keys, block.values):
            size += texts.ends[end] - texts.ends[start]
        if block.headers is not None:
            first, last = block.headers.ends[start], block.headers.ends[end]
            for texts in (block.headers.names, block.headers.values):
                size += texts.ends[last] - texts.ends[first]
        return size


def checked_row(key: bytes, body: bytes | None, headers: Headers | None) -> TopicRow:
    """Returns a message; without a key if it is empty. Raises ValueError: no server would take
    it."""
    for name in headers or ():
        if name == ORDER_KEY:
            raise ValueError(f"header '{ORDER_KEY}' is the order key's")
        if not 0 < len(name.encode()) <= HEADER_NAME_BYTES_MAX:
            raise ValueError(f"the name of a header has 1 to {HEADER_NAME_BYTES_MAX} bytes")
    return TopicRow(key, body, headers)


def frame_of_rows(rows: Sequence[TopicRow | RowChunk]) -> bytes:
    """Returns the frame that TOPIC_PRODUCE takes."""
    if any(isinstance(row, RowChunk) for row in rows):
        return _frame_of_chunks([_as_chunk(row) for row in rows])
    return _frame_of_single([row for row in rows if isinstance(row, TopicRow)])


def _frame_of_single(rows: Sequence[TopicRow]) -> bytes:
    keys = [row.key if is_routing_key(row.key) else b"" for row in rows]
    columns = VALUE | ROUTING_KEY
    headers: list[bytes] = []
    if any(row.headers or (row.key and not key) for row, key in zip(rows, keys, strict=True)):
        columns |= HEADERS
        headers = _headers([_fields(row, key) for row, key in zip(rows, keys, strict=True)])
    values = texts_of([row.body for row in rows])
    buffers = [*values, *headers, *texts_of(keys)[1:]]
    return build_frame(columns, len(rows), 0, len(rows), buffers)


def _as_chunk(row: TopicRow | RowChunk) -> RowChunk:
    if isinstance(row, RowChunk):
        return row
    key = row.key if is_routing_key(row.key) else b""
    fields = _fields(row, key)
    names = _texts([name for name, _ in fields])
    values = _texts([value for _, value in fields])
    headers = HeaderTexts((0, len(fields)), names, values) if fields else None
    return RowChunk(RowBlock(_texts([key]), _texts([row.body]), headers), 0, 1)


def _texts(values: Sequence[bytes | None]) -> Texts:
    texts = [value or b"" for value in values]
    nulls = frozenset(at for at, value in enumerate(values) if value is None)
    return Texts([*accumulate(map(len, texts), initial=0)], b"".join(texts), nulls)


def _frame_of_chunks(chunks: Sequence[RowChunk]) -> bytes:
    parts = _joined(chunks)
    rows = sum(part.messages for part in parts)
    columns = VALUE | ROUTING_KEY
    buffers = _slices([(block.values, start, end) for block, start, end in parts])
    if any(block.headers is not None for block, _, _ in parts):
        columns |= HEADERS
        buffers += _header_slices(parts)
    buffers += _slices([(block.keys, start, end) for block, start, end in parts])[1:]
    return build_frame(columns, rows, 0, rows, buffers)


def _joined(chunks: Sequence[RowChunk]) -> list[RowChunk]:
    """Returns chunks with those joined that follow each other in a block."""
    made: list[RowChunk] = []
    for chunk in chunks:
        if made and made[-1].block is chunk.block and made[-1].end == chunk.start:
            made[-1] = made[-1]._replace(end=chunk.end)
        else:
            made.append(chunk)
    return made


def _slices(parts: Sequence[tuple[Texts, int, int]]) -> list[bytes]:
    """Returns validity, ends and bytes of a column of texts."""
    ends = array("i", (0,))
    data = []
    nulls: list[int] = []
    for (bounds, text, null), start, end in parts:
        nulls += [at - start + len(ends) - 1 for at in null if start <= at < end]
        first = bounds[start]
        shift = ends[-1] - first
        ends.extend([bound + shift for bound in bounds[start + 1 : end + 1]])
        data.append(text[first : bounds[end]])
    return [_validity(nulls, len(ends) - 1), _native(ends), b"".join(data)]


def _validity(nulls: Sequence[int], rows: int) -> bytes:
    if not nulls:
        return b""
    valid = bytearray(b"\xff" * ((rows + 7) // 8))
    for at in nulls:
        valid[at >> 3] &= ~(1 << (at & 7))
    return bytes(valid)


def _header_slices(parts: Sequence[RowChunk]) -> list[bytes]:
    """Returns the buffers of a column of headers."""
    lists = array("i", (0,))
    names: list[tuple[Texts, int, int]] = []
    values: list[tuple[Texts, int, int]] = []
    for block, start, end in parts:
        headers = block.headers
        if headers is None:
            lists.extend([lists[-1]] * (end - start))
            continue
        first, last = headers.ends[start], headers.ends[end]
        shift = lists[-1] - first
        lists.extend([bound + shift for bound in headers.ends[start + 1 : end + 1]])
        names.append((headers.names, first, last))
        values.append((headers.values, first, last))
    return [b"", _native(lists), *_slices(names)[1:], *_slices(values)]


def _native(ends: array[int]) -> bytes:
    if byteorder == "big":
        ends.byteswap()
    return ends.tobytes()


def is_routing_key(key: bytes) -> bool:
    """Returns whether an order key can be a routing key."""
    if len(key) > ROUTING_KEY_BYTES_MAX:
        return False
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def _fields(row: TopicRow, routing_key: bytes) -> list[tuple[bytes, bytes]]:
    fields = [
        (name.encode(), value.encode() if isinstance(value, str) else value)
        for name, value in (row.headers or {}).items()
    ]
    if row.key and not routing_key:
        fields.append((ORDER_KEY.encode(), row.key))
    return fields


def _headers(rows: Sequence[Sequence[tuple[bytes, bytes]]]) -> list[bytes]:
    """Buffers of the headers column."""
    ends = array("i", accumulate(map(len, rows), initial=0))
    if byteorder == "big":
        ends.byteswap()
    fields = list(chain.from_iterable(rows))
    names = texts_of([name for name, _ in fields])[1:]
    return [b"", ends.tobytes(), *names, *texts_of([value for _, value in fields])]
