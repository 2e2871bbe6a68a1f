"""Frames between nodes: layout in docs/formats/entries-and-frames.md."""

HEADER_SIZE: int  # 48

FRAME_APPEND: int
FRAME_APPEND_REPLY: int
FRAME_COMMIT: int
FRAME_FORWARD: int
FRAME_APPLIED: int
FRAME_DELIVER: int
FRAME_RAFT: int
FRAME_CONTROL: int
FRAME_HEARTBEAT: int
FRAME_HELLO: int
FRAME_RELAY: int
FRAME_GOODBYE: int
FRAME_CREDIT: int

def frame(
    type: int,
    flags: int,
    group: int,
    a: int,
    b: int,
    c: int,
    d: int,
    body: bytes = b"",
    body_length: int = -1,
) -> bytes:
    """Returns a link frame. With `body_length` the header counts a body that is sent separately."""

def frame_header(data: bytes | memoryview) -> tuple[int, int, int, int, int, int, int, int]:
    """Returns (length, type, flags, group, a, b, c, d). Raises ValueError."""
