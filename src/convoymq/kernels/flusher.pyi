"""The thread that makes the write-ahead log durable."""

from collections.abc import Callable, Sequence

SYNC_FDATASYNC: int
SYNC_FSYNC: int
SYNC_DSYNC: int
SYNC_NONE: int

INLINE_BYTES_MAX: int
INLINE_AVERAGE_US_MAX: int
INLINE_HICCUP_US: int
INLINE_PAUSE_US: int
"""Bounds of inline flushes: bytes, average duration, one that ends the mode, and for how long."""

DIRECT_BLOCK: int
DIRECT_PAUSE_US: int
"""Direct writes begin and end at multiples of a block, and begin again so long after one that went
through the page cache."""

class Flusher:
    """Writes and syncs on a thread of its own that never takes the GIL.

    One submission is in flight at a time; its buffers are kept alive until it is answered.
    """

    on_completed: Callable[[object, int], None] | None
    """Called by `on_readable` (or by `submit`, inline) with (token, errno); 0 = durable."""
    inline_count: int
    """Flushes done in `submit`."""
    direct_count: int
    """Flushes that went past the page cache."""
    flush_count: int
    flushed_bytes: int
    flush_us: int
    """Of all flushes: how many, their bytes and their time."""
    def __init__(self, method: int = ..., inline: bool = False) -> None:
        """Starts the thread. `method`: one of SYNC_*. `inline`: flush small batches in `submit`
        while the disk is quick and mostly idle, and write small ones past the page cache, where
        the file need not grow for them. Raises OSError."""
    def submit(self, file: object, offset: int, buffers: Sequence[bytes], token: object) -> None:
        """Starts writing the buffers back to back at `offset` of `file` (it has `fileno()`).

        Raises RuntimeError while a submission is in flight or after `close`."""
    def fileno(self) -> int:
        """Descriptor that becomes readable when a submission is answered."""
    def completed(self) -> list[tuple[object, int]]:
        """Takes the answers that have come: (token, errno)."""
    def on_readable(self) -> None:
        """For the event loop: takes the answers and calls `on_completed` for each."""
    def wait(self) -> None:
        """Blocks until the submission in flight, if any, is done (it still has to be taken)."""
    def close(self) -> None:
        """Lets the submission in flight finish and ends the thread. May be called twice."""
