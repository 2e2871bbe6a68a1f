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

def plain_transfers(
    place: tuple[int, int, int, bool, int, int],
    delivery: tuple[int, bytes, int, int, int, int, int],
    offset: int,
    most: int,
    bytes_most: int,
) -> tuple[bytes, int]:
    """Returns the frames of the first messages of a run, and how many messages that are: those up
    to the first that needs a closer look, which is one that is not plain or damaged, that the
    client does not take, or that fits no frame. No more than `most` are made, and none behind the
    one that exceeds `bytes_most`.

    Args:
        place: channel, handle, delivery id of the first, settled, bytes of a message that fit one
            frame, bytes of a message that the client takes.
        delivery: first_id, block, command, first, messages, acquired_count and
            failed_delivery_count of a `Delivery`.
        offset: of the first in its stream; negative: of none.
    """
