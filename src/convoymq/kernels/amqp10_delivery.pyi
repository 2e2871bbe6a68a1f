"""Transfers of stored messages of AMQP 1.0."""

def plain_transfer(
    exchange: bytes,
    routing_key: bytes,
    content: bytes,
    acquired: int,
    failed: int,
    offset: int = -1,
) -> bytes | None:
    """Returns what `messages.amqp10.message.transfer_of` does, for a message that came by AMQP 1.0
    without annotations, or by AMQP 0-9-1 with simple properties and no headers, and did not die;
    None: another one, or one that is damaged."""

def transfer_frame(
    channel: int,
    handle: int,
    delivery_id: int,
    tag: bytes,
    settled: bool,
    message: bytes,
    at: int,
    room: int,
) -> bytes:
    """Returns the frame of a transfer with a part of a message: at most `room` bytes from `at` on.
    The first part has id, tag and settled; all but the last one say that there is more."""
