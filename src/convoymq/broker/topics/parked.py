"""Parked keys of consumer groups, for operators.

A group's park set lies in the partitions that it has before it: what it has left behind was handed
over to the partitions after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypedDict

from convoymq.broker.topics.partitions import TopicPartitions
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.records import TopicRecord
from convoymq.metadata.topics import topic_missing
from convoymq.model.errors import NotFound, Unavailable
from convoymq.queues.partition.queue import PartitionQueue
from convoymq.queues.partition.reads import ParkedRow
from convoymq.topics.answers import ParkAnswer
from convoymq.topics.commands import ResumeParked, SkipParked
from convoymq.topics.hashing import logical_partition
from convoymq.topics.lineage import Partition, PartitionState
from convoymq.topics.refusals import Code, NotParked

ELSEWHERE = frozenset((Code.NOT_PARKED, Code.NOT_VISIBLE))
"""Answers of a partition that has no such key, or has handed it over."""


class ParkedKeyRow(TypedDict):
    """A parked key of a group."""

    key: bytes
    lp: int
    pid: int
    resuming: bool
    messages: int
    messages_bytes: int
    order_token: str
    """Of its first message."""


class ParkedKeys:
    """See the module text. One per node."""

    def __init__(self, tree: MetadataMachine, partitions: TopicPartitions) -> None:
        self._tree = tree
        self._partitions = partitions

    async def list(self, vhost: str, name: str, group: str) -> list[ParkedKeyRow]:
        """Returns the parked keys of a group, by partition and key.

        Raises:
            NotFound: no such topic or group.
            Unavailable: a partition does not answer.
        """
        record = self._topic(vhost, name, group)
        return [
            {
                "key": row.key,
                "lp": row.lp,
                "pid": pid,
                "resuming": row.resuming,
                "messages": row.messages,
                "messages_bytes": row.messages_bytes,
                "order_token": str(row.head),
            }
            for pid in _ahead(record, group)
            async for row in _rows(self._partition(record, pid), group)
        ]

    async def resume(self, vhost: str, name: str, group: str, key: bytes) -> None:
        """Has the messages of a key delivered again, in order.

        Raises:
            NotFound: no such topic or group.
            NotParked: no such key.
            Unavailable: a partition does not answer.
        """
        record = self._topic(vhost, name, group)
        for pid in _ahead(record, group, key):
            answer = await self._partition(record, pid).ask(ResumeParked(group, key))
            if _is_done(answer):
                return
        raise NotParked(group, key)

    async def skip(self, vhost: str, name: str, group: str, key: bytes) -> None:
        """Gives the first message of a key up. Raises as `resume` does."""
        record = self._topic(vhost, name, group)
        for pid in _ahead(record, group, key):
            partition = self._partition(record, pid)
            async for row in _rows(partition, group):
                if row.key == key:
                    answer = await partition.ask(SkipParked(group, key, row.head))
                    if _is_done(answer):
                        return
        raise NotParked(group, key)

    def _topic(self, vhost: str, name: str, group: str) -> TopicRecord:
        place = self._tree.vhosts.get(vhost)
        record = None if place is None else place.topics.get(name)
        if record is None:
            raise topic_missing(vhost, name)
        if group not in record.groups:
            raise NotFound(f"no group '{group}' of topic '{name}' in vhost '{vhost}'")
        return record

    def _partition(self, record: TopicRecord, pid: int) -> PartitionQueue:
        found = self._partitions.find(record.vhost, record.name, pid)
        if found is None:
            raise Unavailable(f"partition {pid} of topic '{record.name}' is not open here yet")
        return found


def _ahead(record: TopicRecord, group: str, key: bytes | None = None) -> list[int]:
    """Returns the partitions that a group has not left behind, the oldest first; with a key those
    that may have it."""
    version = record.groups[group].cv
    lp = None if key is None else logical_partition(key, record.logical, record.hash_seed)

    def is_ahead(each: Partition) -> bool:
        return (
            each.state is not PartitionState.DELETED
            and (each.sealed_version is None or each.sealed_version > version)
            and (lp is None or each.lo <= lp < each.hi)
        )

    found = filter(is_ahead, record.state.lineage.partitions.values())
    return [each.pid for each in sorted(found, key=lambda each: (each.created_version, each.lo))]


async def _rows(partition: PartitionQueue, group: str) -> AsyncIterator[ParkedRow]:
    after = b""
    while rows := await partition.parked(group, after):
        for row in rows:
            yield row
        if rows[-1].key == after:
            return
        after = rows[-1].key


def _is_done(answer: object) -> bool:
    """Returns whether the partition had the key. Raises Unavailable for what it cannot do now."""
    assert isinstance(answer, ParkAnswer), answer
    if answer.code in ELSEWHERE:
        return False
    if answer.code is not Code.OK:
        raise Unavailable(f"the partition answers {answer.code.value}")
    return True
