"""Columnar frames, checked as a whole (compiled only)."""

from collections.abc import Sequence

from typing_extensions import Buffer

class ColumnFrame:
    """A columnar frame, checked as a whole: its buffers are as long as its columns need and no
    offset leaves its bytes. Text is not checked for UTF-8."""

    columns: int
    rows: int
    base: int
    next: int
    value_max: int
    """Bytes of the longest value."""
    def __init__(self, data: Buffer, body_max: int = ...) -> None:
        """`data` is kept, not copied, unless somebody could still change it. `body_max` bounds
        what a compressed body may become (bytes). Raises ValueError."""
    def buffers(self, column: int) -> list[memoryview]:
        """Returns the buffers of one column in the order of the format's table, bytes, without
        copies; length 0 where there is none. Raises ValueError without that column."""
    def offsets(self) -> memoryview:
        """Returns the offset of every row, int64 ('q'). Raises ValueError without an offset
        column."""
    def runs(self, column: int) -> list[tuple[int, int, bytes]]:
        """Returns (first row, rows, text) of rows in succession that have the same exchange or
        routing key. Raises ValueError without that column."""
    def rows_within(self, first: int, bytes_max: int, fixed: int = 128) -> int:
        """Returns how many rows from `first` make a command of at most `bytes_max`, at least one if
        there is one. `fixed`: bytes of a row that are not in the frame (names given to
        `encode_enqueue` and at most 70 of its own)."""

def build_frame(
    columns: int,
    rows: int,
    base: int,
    next: int,
    buffers: Sequence[Buffer | None],
    compression: str = "",
) -> bytes:
    """Returns a frame from Arrow's buffers in the order of the format's table. They may be longer
    than needed, and key, value, exchange, routing key and properties may be slices (their offsets
    need not begin at 0); validity has to begin at the first bit. None or empty = no buffer. Raises
    ValueError when they do not fit."""
