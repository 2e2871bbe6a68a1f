"""Trace contexts of messages (compiled only)."""

PARENT_BYTES: int
"""Length of a traceparent."""
BELOW_BYTES: int
"""Length of a bound: the lower half of a trace id."""

def find_context(content: bytes, below: bytes) -> tuple[bytes, bytes] | None:
    """Returns traceparent and tracestate (b"" = none) of content frames, when the context is
    sampled and the lower half of its trace id lies below `below`, characters as in the header;
    None: the message has no such context."""

def find_contexts(
    data: bytes, command: int, first: int, count: int, below: bytes
) -> list[tuple[int, tuple[bytes, bytes]]]:
    """Returns the contexts of `count` records from `first` on of the ENQUEUE command at byte
    `command`, each behind its place among them. Raises ValueError when these are not in it."""

def find_produced(
    body: bytes, count: int, position: int, below: bytes
) -> list[tuple[bytes, tuple[bytes, bytes]]]:
    """Returns the contexts of the records of an ENQUEUE command without its head, whose offsets lie
    at `position`, each behind the names of its message (exchange and routing key, as short
    strings). Raises ValueError when the offsets are not in it."""
