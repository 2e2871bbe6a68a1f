"""Python values to a columnar frame and back, for programs that do not work with Arrow.

Spark and pyarrow use the frame's buffers as they are (`ColumnFrame.buffers`): that makes no object
per row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from sys import byteorder

from convoymq.kernels.column_frame import ColumnFrame, build_frame
from convoymq.kernels.columns import HEADERS, KEY, ROUTING_KEY, TIMESTAMP, VALUE


def frame_of(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None = None,
    compression: str = "",
) -> bytes:
    """Returns the frame that `Client.produce` takes: a row for each value, None for a tombstone.

    Raises:
        ValueError: not as many keys as values, or a frame beyond the format's limits.
    """
    if keys is not None and len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys for {len(values)} values")
    columns = VALUE if keys is None else KEY | VALUE
    buffers = [*([] if keys is None else texts_of(keys)), *texts_of(values)]
    return build_frame(columns, len(values), 0, len(values), buffers, compression)


def values_of(frame: ColumnFrame) -> list[bytes | None]:
    """Returns the bodies of a frame's messages, None for tombstones. Raises ValueError without the
    value column."""
    return _column(frame, VALUE)


def keys_of(frame: ColumnFrame) -> list[bytes | None]:
    """Returns the keys of a frame's messages; None = a message without one. Raises ValueError
    without the key column."""
    return _column(frame, KEY)


def routing_keys_of(frame: ColumnFrame) -> list[bytes]:
    """Returns the routing keys of a frame's messages. Raises ValueError without that column."""
    ends, data = frame.buffers(ROUTING_KEY)
    return [bytes(data[start:end]) for start, end in pairwise(_bounds(ends))]


def times_of(frame: ColumnFrame) -> list[int]:
    """Returns when the messages of a frame were stored, in ms since the epoch. Raises ValueError
    without the timestamp column."""
    (times,) = frame.buffers(TIMESTAMP)
    found = array("q", bytes(times))
    if byteorder == "big":
        found.byteswap()
    return [each // 1000 for each in found]


def headers_of(frame: ColumnFrame) -> list[dict[str, bytes | None]]:
    """Returns the headers of a frame's messages; of a name that is there twice the first one
    counts. Raises ValueError without the headers column."""
    _, lists, names, names_data, valid, values, data = frame.buffers(HEADERS)
    name_bounds, value_bounds = _bounds(names), _bounds(values)
    found = []
    for first, end in pairwise(_bounds(lists)):
        row: dict[str, bytes | None] = {}
        for at in range(first, end):
            name = bytes(names_data[name_bounds[at] : name_bounds[at + 1]]).decode()
            there = not valid or valid[at >> 3] >> (at & 7) & 1
            value = bytes(data[value_bounds[at] : value_bounds[at + 1]]) if there else None
            row.setdefault(name, value)
        found.append(row)
    return found


def texts_of(values: Sequence[bytes | None]) -> list[bytes]:
    """Returns validity, ends and bytes of a column of texts. Raises ValueError: it is too large."""
    valid = bytearray()
    if None in values:
        valid = bytearray((len(values) + 7) // 8)
        for row, value in enumerate(values):
            valid[row >> 3] |= (value is not None) << (row & 7)
    texts = [value or b"" for value in values]
    total = sum(map(len, texts))
    if total > 0x7FFFFFFF:
        raise ValueError(f"{total} bytes in a column")
    ends = array("i", accumulate(map(len, texts), initial=0))
    if byteorder == "big":
        ends.byteswap()
    return [bytes(valid), ends.tobytes(), b"".join(texts)]


def _column(frame: ColumnFrame, column: int) -> list[bytes | None]:
    valid, ends, data = frame.buffers(column)
    bounds = _bounds(ends)
    return [
        bytes(data[start:end]) if not valid or valid[row >> 3] >> (row & 7) & 1 else None
        for row, (start, end) in enumerate(pairwise(bounds))
    ]


def _bounds(ends: memoryview) -> array[int]:
    """Returns where the items of a column begin and end."""
    bounds = array("i", bytes(ends))
    if byteorder == "big":
        bounds.byteswap()
    return bounds
