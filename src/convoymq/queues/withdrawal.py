"""Takes publishes back that nobody knows to be in the queue."""

from __future__ import annotations

from convoymq.kernels import batch, link_frames
from convoymq.kernels.batch import Chunk, CommandBuilder, PendingCommand, PublishTarget


def withdraw(target: PublishTarget, commands: list[PendingCommand]) -> None:
    """Replaces pending publishes, which must be sealed, by commands of the same numbers that do
    nothing; in the place of a publish that is in the log already, its twin is dropped as a repeat.

    Publishes of a named producer stay: the queue drops their repeats, and it may have heard of the
    producer already, whose name would go to the session's next messages.
    """
    pending = {command.seq: command for command in target.pending}
    for command in commands:
        assert command.type == batch.CMD_ENQUEUE, "only publishes are withdrawn"
        if not _is_named(target, command, pending.get(command.seq - 1)):
            _replace(target, command)


def _is_named(
    target: PublishTarget, command: PendingCommand, previous: PendingCommand | None
) -> bool:
    if previous is not None:
        return previous.type == batch.CMD_PRODUCER
    # What is known to be applied is not pending any more. A PRODUCER lies in its ENQUEUE's chunk.
    data = command.chunk.data
    assert data is not None, "an open batch is withdrawn"
    return any(
        type == batch.CMD_PRODUCER and session == target.session and seq == command.seq - 1
        for type, _, session, seq, *_ in batch.commands(data)
    )


def _replace(target: PublishTarget, command: PendingCommand) -> None:
    builder = CommandBuilder()
    builder.add(batch.CMD_SETTLE, 0, target.session, command.seq, 0, 0)
    chunk = Chunk()
    chunk.data = builder.take_forward(0, 0)
    target.pending_messages -= command.messages
    target.pending_bytes -= command.length - batch.COMMAND_SIZE
    target.budget.bytes -= command.length - batch.COMMAND_SIZE
    command.type = batch.CMD_SETTLE
    command.chunk = chunk
    command.offset = link_frames.HEADER_SIZE
    command.length = batch.COMMAND_SIZE
    command.messages = 0
    command.tags = None
