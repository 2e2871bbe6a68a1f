"""Content headers and content frames of AMQP messages (compiled only)."""

from collections.abc import Callable

RECORD_PRIORITY: int
RECORD_EXPIRATION: int
RECORD_HEADERS: int
RECORD_EXAMINE: int
RECORD_ASKS: int
RECORD_WAITS: int
RECORD_GROUPED: int

def set_converter(converter: Callable[[bytes], bytes]) -> None:
    """Sets the function by which content in other encodings becomes AMQP 0-9-1's. It may raise
    ValueError."""

def with_counts(header: bytes, acquired_count: int, failed_delivery_count: int) -> bytes:
    """Returns the content header payload with x-acquired-count and x-delivery-count set (0 =
    absent). Raises ValueError when it is broken."""

def split_record(record: bytes) -> tuple[bytes, bytes]:
    """Returns (exchange and routing key, content frames). Raises ValueError."""

def content_parts(content: bytes) -> tuple[bytes, bytes]:
    """Returns (content header payload, body in its encoding). Raises ValueError."""

def replace_header(content: bytes, header: bytes) -> bytes:
    """Returns the content frames with another content header payload. Raises ValueError."""

def data_content(content: bytes) -> bytes | None:
    """Returns a content of AMQP 1.0 as AMQP 0-9-1 has it (`messages.record.as_amqp091`), when its
    body is one data section in one frame; None: it is another, or damaged."""
