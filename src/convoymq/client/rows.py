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
from convoymq.kernels.columns import KEY, VALUE


def frame_of(
    values: Sequence[bytes], keys: Sequence[bytes | None] | None = None, compression: str = ""
) -> bytes:
    """Returns the frame that `Client.produce` takes: a row for each value.

    Raises:
        ValueError: not as many keys as values, or a frame beyond the format's limits.
    """
    if keys is not None and len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys for {len(values)} values")
    columns = VALUE if keys is None else KEY | VALUE
    buffers = [*([] if keys is None else _texts(keys)), *_texts(values)]
    return build_frame(columns, len(values), 0, len(values), buffers, compression)


def values_of(frame: ColumnFrame) -> list[bytes | None]:
    """Returns the bodies of a frame's messages. Raises ValueError without the value column."""
    return _column(frame, VALUE)


def keys_of(frame: ColumnFrame) -> list[bytes | None]:
    """Returns the keys of a frame's messages; None = a message without one. Raises ValueError
    without the key column."""
    return _column(frame, KEY)


def _texts(values: Sequence[bytes | None]) -> list[bytes]:
    """Validity, ends and bytes of a column."""
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
    bounds = array("i", bytes(ends))
    if byteorder == "big":
        bounds.byteswap()
    return [
        bytes(data[start:end]) if not valid or valid[row >> 3] >> (row & 7) & 1 else None
        for row, (start, end) in enumerate(pairwise(bounds))
    ]
