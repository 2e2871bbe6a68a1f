"""Publishes without an answer of a queue that was migrated, and the setting of its successor (ADR
0128)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from convoymq.kernels.batch import CMD_ENQUEUE, PendingCommand, PublishTarget, slice_records
from convoymq.queues.interface import Queue
from convoymq.queues.null_events import NullEvents

KEEPS_ALL = "keeps-all"
"""Setting of a successor until it takes the place of its queue: nothing in it expires. The queue
has the messages as well, and would publish their dead letters once more if it went on."""


def publish_again(command: PendingCommand, target: PublishTarget) -> None:
    """Publishes the messages of a pending ENQUEUE, whose batch is sealed, to another queue: under
    their tags, which its client answers."""
    data = command.chunk.data
    assert command.type == CMD_ENQUEUE
    assert data is not None, "an open batch is handed over"
    first = 0
    for tag, count in _runs_of(command):
        records = slice_records(data, command.offset, first, count)
        target.publish_records(records, count, tag)
        first += count


def publish_for_closed(
    waiting: Iterable[PendingCommand],
    known: int | None,
    held_for: int,
    successor: Queue,
    session: int,
) -> None:
    """Publishes what a channel that has closed left behind, whose queue was frozen: nobody waits
    for an answer.

    Args:
        known: see `QueueClient.replace`. 0: the queue does not have the client's session; whether
            it had all of it, or nothing, says
        held_for: the successor's group, if the client was made when the queue was frozen.
        session: a new one.
    """
    publishes = [command for command in waiting if command.type == CMD_ENQUEUE]
    is_over = not known and held_for != successor.group
    if known is None or is_over or not publishes:
        return
    client = successor.client(session, NullEvents())
    for command in publishes:
        if command.seq > known:
            publish_again(command, client.target)
    client.close()


def _runs_of(command: PendingCommand) -> Iterator[tuple[int, int]]:
    """Yields (first tag, messages); tag 0: nobody waits for an answer. Tags belong to the last
    messages: a channel that has begun to ask for confirms goes on to."""
    tags = command.tags or ()
    tagged = [(first, last - first + 1) for first, last in zip(tags[::2], tags[1::2], strict=True)]
    untagged = command.messages - sum(count for _, count in tagged)
    if untagged:
        yield 0, untagged
    yield from tagged
