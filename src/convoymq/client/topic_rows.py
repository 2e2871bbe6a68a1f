"""Messages of an ordered topic as a columnar frame.

The order key is the routing key where that can hold it (UTF-8, at most 255 bytes), so that the
message is that of an AMQP publisher. Other keys are the header `x-order-key`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
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
    body: bytes
    headers: Headers | None = None

    @property
    def size(self) -> int:
        """Returns about how many bytes it takes."""
        more = sum(len(name) + len(value) for name, value in (self.headers or {}).items())
        return 64 + len(self.key) + len(self.body) + more


def checked_row(key: bytes, body: bytes, headers: Headers | None) -> TopicRow:
    """Returns a message; without a key if it is empty. Raises ValueError: no server would take
    it."""
    for name in headers or ():
        if name == ORDER_KEY:
            raise ValueError(f"header '{ORDER_KEY}' is the order key's")
        if not 0 < len(name.encode()) <= HEADER_NAME_BYTES_MAX:
            raise ValueError(f"the name of a header has 1 to {HEADER_NAME_BYTES_MAX} bytes")
    return TopicRow(key, body, headers)


def frame_of_rows(rows: Sequence[TopicRow]) -> bytes:
    """Returns the frame that TOPIC_PRODUCE takes."""
    keys = [row.key if _is_routing_key(row.key) else b"" for row in rows]
    columns = VALUE | ROUTING_KEY
    headers: list[bytes] = []
    if any(row.headers or (row.key and not key) for row, key in zip(rows, keys, strict=True)):
        columns |= HEADERS
        headers = _headers([_fields(row, key) for row, key in zip(rows, keys, strict=True)])
    values = texts_of([row.body for row in rows])
    buffers = [*values, *headers, *texts_of(keys)[1:]]
    return build_frame(columns, len(rows), 0, len(rows), buffers)


def _is_routing_key(key: bytes) -> bool:
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
