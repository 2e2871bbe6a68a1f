"""Columnar frames (compiled only): layout in docs/formats/columnar-protocol.md."""

import builtins
from collections.abc import Sequence

from typing_extensions import Buffer

OFFSET: int
TIMESTAMP: int
KEY: int
VALUE: int
HEADERS: int
EXCHANGE: int
ROUTING_KEY: int
PROPERTIES: int
DELIVERY_COUNT: int
REDELIVERED: int

FRAME_HEADER_SIZE: int  # 64
ROWS_MAX: int  # of one frame, 4,194,304
BODY_MAX: int  # bytes of one frame's decompressed body, 1 GiB
COMPRESSIONS: tuple[str, ...]  # "" (none), "zstd", "lz4"

def raw_bytearray(size: int) -> bytearray:
    """A bytearray whose bytes are whatever was in memory: for who writes every one of them before
    anybody reads it. Raises ValueError for a size below 0."""

class ColumnWriter:
    """Records to one columnar frame. Values are not copied before `finish`; until then the blocks
    are kept."""

    columns: int
    rows: int
    bytes: int
    """Never below the length of the frame without compression."""
    full: bool
    """Either bound is reached, or a record did not fit any more."""
    def __init__(self, columns: int, max_rows: int, max_bytes: int) -> None:
        """`columns`: bits. `max_bytes` bounds `bytes`; only a first record alone may exceed it.
        Raises ValueError for columns that do not exist, or none."""
    def append(
        self,
        block: builtins.bytes,
        command: int,
        first: int,
        count: int,
        base: int,
        time_ms: int,
        acquired: int = 0,
        delivered: int = 0,
    ) -> int:
        """Adds records [first, first + count) of the ENQUEUE command at `command` of `block`, with
        offsets base, base + 1, …; returns how many were taken: fewer when the frame is full, at
        least one when it is empty. Raises ValueError when a record is damaged; the rows before it
        stand."""
    def finish(self, next: int, compression: str = "") -> builtins.bytes:
        """The whole frame. Raises ValueError for a compression that does not exist."""
    def frame(self, next: int) -> ColumnFrame:
        """The same, to be read in this process: there is no checksum to make and to check."""

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
        """The buffers of one column in the order of the format's table, bytes, without copies;
        length 0 where there is none. Raises ValueError without that column."""
    def offsets(self) -> memoryview:
        """The offset of every row, int64 ('q'). Raises ValueError without an offset column."""
    def runs(self, column: int) -> list[tuple[int, int, bytes]]:
        """(first row, rows, text) of rows in succession that have the same exchange or routing
        key. Raises ValueError without that column."""
    def rows_within(self, first: int, bytes_max: int, fixed: int = 128) -> int:
        """How many rows from `first` make a command of at most `bytes_max`, at least one if there
        is one. `fixed`: bytes of a row that are not in the frame (names given to `encode_enqueue`
        and at most 70 of its own)."""

def build_frame(
    columns: int,
    rows: int,
    base: int,
    next: int,
    buffers: Sequence[Buffer | None],
    compression: str = "",
) -> bytes:
    """A frame from Arrow's buffers in the order of the format's table. They may be longer than
    needed, and key, value, exchange, routing key and properties may be slices (their offsets need
    not begin at 0); validity has to begin at the first bit. None or empty = no buffer. Raises
    ValueError when they do not fit."""

def encode_enqueue(
    frame: ColumnFrame,
    first: int,
    count: int,
    exchange: bytes,
    routing_key: bytes | None,
    message_id_prefix: bytes = b"",
) -> tuple[bytes, int, int]:
    """Rows [first, first + count) as (body, count, arg) of an ENQUEUE command.

    `routing_key` None: from the routing key column. With a prefix, a row without a message id gets
    prefix + decimal of (base + row). Raises ValueError, with the row's number, for what must not
    be produced (docs/formats/columnar-protocol.md)."""

def enqueue_flags(frame: ColumnFrame, first: int, count: int) -> int:
    """The flags of the ENQUEUE command that `encode_enqueue` makes the body of. Raises
    ValueError."""
