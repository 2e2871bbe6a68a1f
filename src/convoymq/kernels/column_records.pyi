"""Rows of a columnar frame to records (compiled only)."""

from convoymq.kernels.column_frame import ColumnFrame

def encode_enqueue(
    frame: ColumnFrame,
    first: int,
    count: int,
    exchange: bytes,
    routing_key: bytes | None,
    message_id_prefix: bytes = b"",
) -> tuple[bytes, int, int]:
    """Returns the rows [first, first + count) as (body, count, arg) of an ENQUEUE command.

    `routing_key` None: from the routing key column. With a prefix, a row without a message id gets
    prefix + decimal of (base + row). Raises ValueError, with the row's number, for what must not
    be produced (docs/formats/columnar-protocol.md)."""

def enqueue_flags(frame: ColumnFrame, first: int, count: int) -> int:
    """Returns the flags of the ENQUEUE command that `encode_enqueue` makes the body of. Raises
    ValueError."""
