"""Link sockets: whole frames in, queued frames out; and the tuning of the process's memory."""

from collections.abc import Sequence

READ_BUFFER_SIZE: int  # 128 KiB
LARGE_FRAME_SIZE: int  # frames above it are received straight into their own bytes object

class LinkReader:
    """Cuts what a peer sends into link frames (docs/formats/entries-and-frames.md)."""

    fd: int
    frame_max: int
    """A longer frame is refused before memory is set aside; raise it after authentication."""
    bytes_in: int
    frames_in: int
    def __init__(self, fd: int, frame_max: int) -> None: ...
    def read(self, frames: list[bytes]) -> bool:
        """Receives without blocking and appends whole frames; False at the end of the stream.

        At most about 1 MiB a call, so that one peer cannot hold up the others. Raises OSError, and
        ValueError for a length that no frame can have."""
    def feed(self, data: bytes, frames: list[bytes]) -> None:
        """The same for bytes that something else received (TLS). Raises ValueError."""

class LinkWriter:
    """Frames waiting for one peer; what is queued is never copied.

    Urgent frames go ahead of bulk frames at frame boundaries; each kind keeps its order."""

    fd: int
    queued_bytes: int
    bytes_out: int
    frames_out: int
    def __init__(self, fd: int) -> None: ...
    def send(self, frame: bytes, body: Sequence[bytes] = (), urgent: bool = False) -> None:
        """Queues a frame: `frame`, then the parts of `body`."""
    def flush(self) -> bool:
        """Writes without blocking; False when bytes remain (wait for room). Raises OSError."""
    def take(self, limit: int) -> list[bytes]:
        """Removes and returns the next bytes to write, `limit` or more if there are (TLS)."""

def tune_malloc() -> None:
    """Keeps freed memory of busy buffers in the process: entry buffers come and go all the time."""

def free_heap_bytes() -> int:
    """Returns the number of bytes that the C heap holds and nobody uses."""

def trim_malloc() -> None:
    """Gives unused heap memory back to the system; milliseconds for hundreds of MiB."""

def release_code() -> None:
    """Unmaps the pages of the program and its libraries that hold code and constants.

    What is used again is mapped again, from the system's page cache: a fault of a microsecond for
    16 pages. Pages that were written are left alone."""
