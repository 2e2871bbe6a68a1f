"""Transfers of stored messages of AMQP 1.0."""

def plain_transfer(
    exchange: bytes, routing_key: bytes, content: bytes, acquired: int, failed: int
) -> bytes | None:
    """Returns what `messages.amqp10.message.transfer_of` does, for a message that came by AMQP 1.0
    without annotations and did not die; None: another one, or one that is damaged."""
