# cython: annotation_typing=False
"""Groups of messages of a quorum queue: of each at most one message is ready or held (ADR 0051).

    published, its group has none in the queue --> ready
    published, its group has some ---------------> blocked, behind all others of the group
    the one that is ready or held leaves --------> the next one is ready, where it was published

The message of a group that is ready or held is its head. A head that comes back is ready again, at
its place: so a group keeps its order over retries, whatever its priorities and wherever others go
that come back. It leaves by an acknowledgement, when it is dropped or dead-lettered, expires, or is
purged. Messages of no group are in none of this.

A group is known for as long as it has a message in the queue. What is known of each message is in
`GroupTable`, which is compiled only: a call of it for each run or command.

Invariants: a group has one head, which is ready or held; what is blocked of a group was published
behind its head, and is in the order of the log.
"""

from __future__ import annotations

from typing import Any

from convoymq.kernels.group_table import GroupTable
from convoymq.queues.quorum.levels import Levels, due_of
from convoymq.queues.quorum.runs import Fifo, Run


class Groups(GroupTable):
    """The groups of a queue.

    Args:
        levels: where a message goes that is not blocked any more.
    """

    __slots__ = ("_levels",)

    def __init__(self, levels: Levels) -> None:
        self._levels = levels

    def gone(self, run: Run) -> bool:
        """Has those follow that are behind messages in their groups: these are in the queue no
        more, after they were ready or held. Returns whether one that follows expires. Cost:
        O(messages)."""
        expires = False
        for follower in self.leave(run):
            self._levels.restore(follower)
            if due_of(follower[7]):
                expires = True
        return expires

    # ---------------------------------------------------------------- snapshots

    def pack(self) -> list[object]:
        """Returns plain values, equal for equal content: the heads by their places, and the blocked
        messages of groups in the order in which these began to have some."""
        heads = [[*place, key] for place, key in sorted(self.keys().items())]
        blocked: list[list[object]] = []
        for key, runs in self.blocked_by_key().items():
            fifo = Fifo(False)
            for run in runs:
                fifo.push(*run)
            blocked.append([key, fifo.pack()])
        return [heads, blocked]

    def unpack(self, heads: list[list[Any]], blocked: list[list[Any]]) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        assert not self.heads, "groups are restored over others"
        found: list[tuple[bytes, list[Run]]] = []
        for key, packed in blocked:
            fifo = Fifo(False)
            fifo.unpack(packed)
            found.append((key, fifo.runs()))
        self.restore(heads, found)
