"""Positions of a group as its state keeps them: a route version, and starts in its partitions.

Partitions of later versions begin at their first message. So a vector is possible whose partitions
before that version are finished, and those behind it untouched.

Ends are offsets as well, read when the position is taken: a group that has no member yet is owed
what comes from then on, and what retention drops of it is a loss that is told. Only where a
partition does not answer is the end that of the time when the group's cursor is opened there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from convoymq.metadata.machine import TopicRecord
from convoymq.topics.rules import positions
from convoymq.topics.rules.commands import EARLIEST, LATEST
from convoymq.topics.rules.lineage import FIRST_USER_OFFSET
from convoymq.topics.rules.positions import Bounds
from convoymq.topics.rules.refusals import BadPosition

if TYPE_CHECKING:
    from convoymq.topics.shell.partitions import TopicPartitions

Position = Literal["earliest", "latest"] | int | Mapping[int, int]
"""Begin of a group: one end, a time (ms since the epoch), or an offset in each partition of a
vector."""
SKEW_MS = 1_000
"""Clocks of nodes may differ by less."""


class Cut(NamedTuple):
    """The start of a group."""

    version: int
    starts: dict[int, int]


async def cut_of(record: TopicRecord, position: Position, ask: TopicPartitions) -> Cut:
    """Returns a position as the state of a group keeps it.

    Raises:
        BadPosition: it does not give every logical partition one place, or one that cannot be kept.
        UnknownPartition: a vector names a partition that never was.
        DataExpired: it is deleted.
        Unavailable: a partition did not answer.
    """
    if isinstance(position, Mapping):
        return await _cut_of_vector(record, position, ask)
    if isinstance(position, int):
        return await _cut_of_time(record, position, ask)
    if position == "latest":
        version = record.state.route.version
        return Cut(version, await _ends(record, record.state.route.pids, LATEST, ask))
    if position == "earliest":
        version = record.state.lineage.first_version()
        return Cut(version, await _ends(record, _kept_pids(record, version), EARLIEST, ask))
    raise BadPosition(f"a position is earliest, latest, a time or a vector, not '{position}'")


async def _ends(
    record: TopicRecord, pids: Iterable[int], end: int, ask: TopicPartitions
) -> dict[int, int]:
    """Returns the offsets of one end, as far as partitions answer."""
    asked = [pid for pid in pids if pid not in record.state.lost]
    found = await ask.describe_all(record, asked)
    starts = dict.fromkeys(pids, end)
    for pid, said in found.items():
        if said is not None:
            starts[pid] = said.log_start if end == EARLIEST else said.end_offset
    return starts


def _kept_pids(record: TopicRecord, version: int) -> list[int]:
    """Returns the partitions of a version that a group can begin in: deleted ones are drained."""
    lineage = record.state.lineage
    return [pid for pid in lineage.route(version).pids if not lineage.partition(pid).is_deleted]


async def _cut_of_time(record: TopicRecord, time_ms: int, ask: TopicPartitions) -> Cut:
    lineage = record.state.lineage
    before = [
        version
        for version, published in lineage.published.items()
        if published.published_at <= time_ms - SKEW_MS
    ]
    version = max((*before, lineage.first_version()))
    pids = [pid for pid in _kept_pids(record, version) if pid not in record.state.lost]
    # Before the question for the time: what comes between the two is behind that end.
    ends = await _ends(record, pids, LATEST, ask)
    offsets = await asyncio.gather(*(ask.offset_at(record, pid, time_ms) for pid in pids))
    starts = {
        pid: ends[pid] if offset is None else offset
        for pid, offset in zip(pids, offsets, strict=True)
    }
    return Cut(version, starts)


async def _cut_of_vector(
    record: TopicRecord, vector: Mapping[int, int], ask: TopicPartitions
) -> Cut:
    lineage = record.state.lineage
    asked = [
        pid
        for pid in vector
        if not lineage.partition(pid).is_deleted and pid not in record.state.lost
    ]
    found = await asyncio.gather(*(ask.describe(record, pid) for pid in asked))
    bounds = {
        pid: Bounds(each.log_start, each.end_offset) for pid, each in zip(asked, found, strict=True)
    }
    position = positions.from_vector(lineage, vector, bounds)
    pids = lineage.route(position.version).pids
    begun = [
        pid
        for pid, offset in vector.items()
        if pid not in pids
        and offset > FIRST_USER_OFFSET
        and not lineage.partition(pid).is_behind(position.version)
    ]
    if begun:
        raise BadPosition(
            f"the vector has begun partition {begun[0]}, while partitions of version "
            f"{position.version} are not finished: a group keeps offsets of one version"
        )
    starts = {}
    for pid in _kept_pids(record, position.version):
        partition = lineage.partition(pid)
        if position.is_finished(partition):
            # Its end is known, or it would not be finished.
            starts[pid] = LATEST if partition.close_offset is None else partition.close_offset
        else:
            starts[pid] = position.cursor(pid)
    return Cut(position.version, starts)
