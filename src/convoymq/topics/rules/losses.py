"""Losses of groups by partitions that were declared lost (I15).

Each group that has such a partition before it gets a record: when the partition is declared lost,
when the group is created, and when it seeks to before it. What the record says of the range is as
exact as the replica was that was left when the operator gave the partition up.
"""

from __future__ import annotations

from convoymq.topics.rules.commands import EARLIEST, LATEST
from convoymq.topics.rules.group import GroupState, Loss
from convoymq.topics.rules.lineage import FIRST_USER_OFFSET
from convoymq.topics.rules.topic import DeclareLost, TopicState

DECLARED_LOST = "declared_lost"


def note_losses(topic: TopicState, group: GroupState) -> None:
    """Records what a group goes on without; repeats change nothing."""
    for pid, declared in topic.lost.items():
        sealed = topic.lineage.partition(pid).sealed_version
        if sealed is None:
            continue
        if pid in group.skipped:
            group.forget_skipped(pid)
            group.lose(_loss(group, declared))
        elif group.cv < sealed:
            group.lose(_loss(group, declared))


def _loss(group: GroupState, declared: DeclareLost) -> Loss:
    left = declared.groups.get(group.name)
    if left is not None and left.group_epoch != group.group_epoch:
        left = None
    first = _start(group, declared) if left is None else left.first
    return Loss(
        declared.pid,
        group.group_epoch,
        first,
        None if declared.end is None else max(first, declared.end),
        None if left is None else left.parked_keys,
        DECLARED_LOST,
        declared.time_ms,
    )


def _start(group: GroupState, declared: DeclareLost) -> int:
    """Returns where a group begins in a partition that says nothing of it."""
    start = group.starts.get(declared.pid, EARLIEST)
    if start == LATEST and declared.end is not None:
        return declared.end
    return max(start, FIRST_USER_OFFSET)
