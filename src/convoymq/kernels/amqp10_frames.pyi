"""Transfers of publishers of AMQP 1.0: messages from a connection's input into a queue's batch."""

from convoymq.kernels.batch import PublishTarget
from convoymq.kernels.message_sizes import MessageSizes

def plain_content(payload: bytes) -> bytes | None:
    """Returns the content of a message as it is stored (`messages.amqp10.message.stored_of`, in
    encoding 2); None: it needs a closer look, or cannot be parsed."""

def next_plain(data: bytearray, at: int) -> int:
    """Returns what begins at `at`: channel << 33 | handle of a transfer, channel << 33 | 1 << 32 of
    a disposition or flow; -1: something else does, or too little of it is there."""

def publish_plain(
    data: bytearray,
    at: int,
    frame_max: int,
    channel: int,
    handle: int,
    mode: int,
    most: int,
    most_settled: int,
    message_size_max: int,
    names: bytes,
    target: PublishTarget,
    tag: int,
    sizes: MessageSizes,
    below: bytes | None,
) -> tuple[int, int, int, bool]:
    """Appends messages of a link to its queue, which lie in the input from `at` on, as long as each
    is one whole frame and needs no closer look, their delivery ids follow each other, and all are
    settled or none.

    Args:
        mode: snd-settle-mode of the link.
        most: so many messages at most; `most_settled` when they are settled.
        names: exchange and routing key, as a record begins with them.
        tag: of the first message; the next ones follow. Settled messages have none.
        sizes: counts the messages.
        below: bound of sampled traces (`trace_contexts.find_context`), whose messages need a closer
            look; None: no message does for its trace.

    Returns:
        The place behind them, their number, the first delivery id, and whether they are settled."""
