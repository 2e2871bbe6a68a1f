"""Records to a columnar frame (compiled only)."""

import builtins

from convoymq.kernels.column_frame import ColumnFrame

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
        acquired_count: int = 0,
        failed_delivery_count: int = 0,
    ) -> int:
        """Adds records [first, first + count) of the ENQUEUE command at `command` of `block`, with
        offsets base, base + 1, …; returns how many were taken: fewer when the frame is full, at
        least one when it is empty. Raises ValueError when a record is damaged; the rows before it
        stand."""
    def finish(self, next: int, compression: str = "") -> builtins.bytes:
        """Returns the whole frame. Raises ValueError for a compression that does not exist."""
    def frame(self, next: int) -> ColumnFrame:
        """Returns the same, to be read in this process: there is no checksum to make and to
        check."""
