"""Pages of a queue's messages for a backup (ADR 0208).

A position names a message in the history of its queue: index of the entry, offset, or number of the
message, by the type of the queue. A page ends between two positions, so the next one can be made
elsewhere, from the position alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from convoymq.kernels.batch import slice_records
from convoymq.queues.interface import StoredRun

PAGE_BYTES = 1 << 20
"""A page ends after so many bytes. It is made in one turn of the loop."""


class CopiedPage(NamedTuple):
    """Messages behind a position, up to the point of the copy."""

    upto: int
    """Position of the newest message when the copy began."""
    after: int
    """Position of the last message that was looked at: the next page begins behind it."""
    is_last: bool
    messages: int
    commands: list[tuple[int, bytes]]
    """(position of the first message, ENQUEUE command), ascending."""
    first: int = 0
    """Lowest position that may have a message: retention dropped those below."""


def page_of(runs: Iterable[StoredRun], after: int, upto: int) -> CopiedPage:
    """Returns a page of runs that lie behind `after`, in their order. A run that goes beyond `upto`
    is cut, if its messages have positions of their own."""
    commands: list[tuple[int, bytes]] = []
    size = messages = 0
    for run in runs:
        if size >= PAGE_BYTES and run.position > after:
            return CopiedPage(upto, after, False, messages, commands)
        count = min(run.messages, upto - run.position + 1) if run.spreads else run.messages
        if run.position > upto or count <= 0:
            break
        command = slice_records(run.block, run.command, run.first, count)
        commands.append((run.position, command))
        size += len(command)
        messages += count
        after = run.position + count - 1 if run.spreads else run.position
    return CopiedPage(upto, upto, True, messages, commands)
