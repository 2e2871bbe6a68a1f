"""Makes the rows that tools show, from the tree and from what partitions say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from convoymq.metadata.machine import TopicRecord
from convoymq.topics.machine.reads import GroupDescription, PartitionDescription
from convoymq.topics.rules.changes import Change, Kind, Phase
from convoymq.topics.rules.commands import EARLIEST, LATEST
from convoymq.topics.rules.group import GroupState, Loss
from convoymq.topics.rules.lineage import FIRST_USER_OFFSET, Lineage, Partition
from convoymq.topics.rules.routes import Span
from convoymq.topics.shell.rows import (
    ChangeRow,
    GroupRow,
    LagRow,
    LossRow,
    OwnerRow,
    PartitionDetail,
    PartitionRow,
    SpanRow,
    TopicRow,
)

Descriptions = Mapping[int, PartitionDescription | None]
"""Partition -> what it says; None: nothing in time."""
LOST = "lost"
SEALED_OUTSIDE = "sealed_outside"
"""State of a partition that was sealed from outside, and has not said where it ends."""


def topic_row(record: TopicRecord) -> TopicRow:
    """Returns the row of a topic."""
    state = record.state
    return {
        "vhost": record.vhost,
        "name": record.name,
        "mode": record.mode,
        "logical": record.logical,
        "hash_id": record.hash_id,
        "hash_seed": record.hash_seed,
        "version": state.route.version,
        "min_version": state.lineage.min_version,
        "partitions": len(state.route.spans),
        "groups": sorted(record.groups),
        "change": "" if state.running is None else state.running.change_id,
        "created_ms": record.created_ms,
        "settings": dict(record.settings),
    }


# --- changes -------------------------------------------------------------------------------


def change_row(change: Change) -> ChangeRow:
    """Returns the row of a change that is recorded."""
    return {
        "change_id": change.change_id,
        "kind": change.kind.value,
        "base_version": change.base_version,
        "next_version": change.next_version,
        "phase": change.phase.value,
        "attempt": change.attempt,
        "sources": list(change.sources),
        "targets": _spans(change.targets),
        "ready": sorted(change.ready),
        "sealed": sorted(change.seals),
        "is_finished": change.is_finished,
    }


def past_change_row(lineage: Lineage, change_id: str) -> ChangeRow | None:
    """Returns the row of a change that was published, as the lineage has it."""
    for version, published in lineage.published.items():
        if published.change_id != change_id or version == 0:
            continue
        sources = lineage.sources(version - 1)
        targets = [lineage.partition(pid) for pid in lineage.targets(version - 1)]
        return {
            "change_id": change_id,
            "kind": (published.kind or Kind.MOVE).value,
            "base_version": version - 1,
            "next_version": version,
            "phase": Phase.DONE.value,
            "attempt": 1,
            "sources": list(sources),
            "targets": _spans(Span(each.lo, each.hi, each.pid) for each in targets),
            "ready": [each.pid for each in targets],
            "sealed": sorted(sources),
            "is_finished": True,
        }
    return None


def _spans(spans: Iterable[Span]) -> list[SpanRow]:
    return [{"pid": span.pid, "lo": span.lo, "hi": span.hi} for span in spans]


# --- partitions ----------------------------------------------------------------------------


def partition_row(record: TopicRecord, partition: Partition, node: str) -> PartitionRow:
    """Returns the row of a partition. `node`: the name of its leader; empty when it has no queue
    any more."""
    return {
        "pid": partition.pid,
        "lo": partition.lo,
        "hi": partition.hi,
        "node": node,
        "state": _state(record, partition),
        "created_version": partition.created_version,
        "sealed_version": partition.sealed_version,
        "parents": list(partition.parents),
        "children": list(partition.children),
        "open_offset": partition.open_offset,
        "close_offset": partition.close_offset,
    }


def _state(record: TopicRecord, partition: Partition) -> str:
    if partition.pid in record.state.lost:
        return LOST
    if record.state.is_end_unknown(partition.pid):
        return SEALED_OUTSIDE
    return partition.state.value


def partition_detail(
    row: PartitionRow, members: list[str], found: PartitionDescription | None
) -> PartitionDetail:
    """Returns the row of a partition with what it says."""
    return {
        **row,
        "members": members,
        "log_start": None if found is None else found.log_start,
        "end_offset": None if found is None else found.end_offset,
        "messages": None if found is None else found.messages,
        "bytes": None if found is None else found.bytes,
    }


def kept_partitions(record: TopicRecord) -> list[Partition]:
    """Returns the partitions that can be asked, by version and range."""
    state = record.state
    return [
        each
        for each in state.lineage.oldest_first()
        if not each.is_deleted and each.pid not in state.lost
    ]


# --- groups --------------------------------------------------------------------------------


def group_row(record: TopicRecord, group: GroupState, found: Descriptions) -> GroupRow:
    """Returns the row of a group. `found`: of the partitions that its version waits for."""
    owners: list[OwnerRow] = [
        {"pid": pid, "member": owner.member, "epoch": owner.epoch}
        for pid, owner in sorted(group.owners.items())
    ]
    waits_for = [
        pid
        for pid in record.state.lineage.sources(group.cv)
        if pid not in record.state.lost and not _has_left(found.get(pid), group)
    ]
    return {
        "group": group.name,
        "mode": group.mode.value,
        "state": _group_state(record, group),
        "idle_since_ms": None if group.members else group.idle_since_ms,
        "cv": group.cv,
        "latest": record.state.route.version,
        "group_epoch": group.group_epoch,
        "members": sorted(group.members),
        "owners": owners,
        "waits_for": waits_for,
        "skipped": sorted(group.skipped),
    }


def _group_state(record: TopicRecord, group: GroupState) -> str:
    if group.has_lost_data(record.state.kept):
        return "data_expired"
    if group.expired:
        return "expired"
    return "active" if group.members else "idle"


def partitions_ahead(record: TopicRecord, group: GroupState) -> list[Partition]:
    """Returns the partitions that a group has not left behind, by version and range."""
    return [each for each in kept_partitions(record) if not each.is_behind(group.cv)]


def lag_row(
    record: TopicRecord, group: GroupState, partition: Partition, found: Descriptions
) -> LagRow:
    """Returns the row of a group in a partition that it has before it."""
    pid = partition.pid
    owner = group.owners.get(pid)
    said = found.get(pid)
    own = _own(said, group)
    lineage = record.state.lineage
    ahead = {each.pid for each in partitions_ahead(record, group)}
    waits_for = [
        each
        for each in lineage.ancestors(pid)
        if each in ahead and not _has_left(found.get(each), group)
    ]
    watermark = end = lag = None
    if said is not None:
        end = said.close_offset if said.close_offset >= 0 else said.end_offset
        watermark = own.watermark if own is not None else _start(group, partition, said, end)
        lag = max(0, end - watermark - (0 if own is None else own.acked_above))
    return {
        "pid": pid,
        "state": _state(record, partition),
        "owner": "" if owner is None else owner.member,
        "epoch": group.lease_epochs.get(pid, 0),
        "watermark": watermark,
        "end_offset": None if said is None else said.end_offset,
        "close_offset": partition.close_offset,
        "lag": lag,
        "parked_keys": 0 if own is None else own.parked_keys,
        "data_expired": own is not None and own.expired,
        "waits_for": sorted(waits_for),
    }


def loss_row(record: TopicRecord, group: GroupState, loss: Loss) -> LossRow:
    """Returns the row of what a group goes on without."""
    partition = record.state.lineage.partition(loss.pid)
    return {
        "group": group.name,
        "group_epoch": loss.group_epoch,
        "pid": loss.pid,
        "lo": partition.lo,
        "hi": partition.hi,
        "first": loss.first,
        "end": loss.end,
        "parked_keys": loss.parked_keys,
        "reason": loss.reason,
        "time_ms": loss.time_ms,
    }


def _own(said: PartitionDescription | None, group: GroupState) -> GroupDescription | None:
    """Returns the state of a group in a partition, if it is not from before the latest seek."""
    own = None if said is None else said.groups.get(group.name)
    return own if own is not None and own.group_epoch == group.group_epoch else None


def _has_left(said: PartitionDescription | None, group: GroupState) -> bool:
    own = _own(said, group)
    return own is not None and (own.drained or own.handed_over)


def _start(group: GroupState, partition: Partition, said: PartitionDescription, end: int) -> int:
    """Returns where a group will begin in a partition that it has not opened."""
    first = max(FIRST_USER_OFFSET, said.log_start)
    if not partition.is_in(group.start_version):
        return first
    start = group.starts.get(partition.pid, EARLIEST)
    return end if start == LATEST else max(first, start)
