"""Partitions by topic and number: their queues, who leads them, and what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from convoymq.metadata.machine import MetadataMachine, QueueRecord, TopicRecord
from convoymq.metadata.topics import partition_queue_name
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.queues.interface import Queue
from convoymq.topics.machine.group_machine import FIRST_OFFSET
from convoymq.topics.machine.queue import PartitionQueue
from convoymq.topics.machine.reads import PartitionDescription

QUESTION_TIMEOUT_S = 2.0
"""For one partition that is to be shown: one without a leader has no say in the list."""


class TopicPartitions:
    """Partitions of the topics, as this node's tree has them.

    Args:
        handle_of: this node's handle of a queue; None while it has none.
        leader_of: the node that leads a queue, as far as known.
    """

    def __init__(
        self,
        tree: MetadataMachine,
        handle_of: Callable[[QueueRecord], Queue | None],
        leader_of: Callable[[QueueRecord], int | None],
    ) -> None:
        self._tree = tree
        self._handle_of = handle_of
        self._leader_of = leader_of

    # --- queues ----------------------------------------------------------------------------

    def record(self, vhost: str, topic: str, pid: int) -> QueueRecord | None:
        """Returns the record of a partition's queue; None when there is none."""
        place = self._tree.vhosts.get(vhost)
        return None if place is None else place.queues.get(partition_queue_name(topic, pid))

    def exists(self, vhost: str, topic: str, pid: int) -> bool:
        """Returns whether a partition has a queue."""
        return self.record(vhost, topic, pid) is not None

    def find(self, vhost: str, topic: str, pid: int) -> PartitionQueue | None:
        """Returns this node's handle of a partition; None when there is no such partition, or it is
        not open here yet."""
        record = self.record(vhost, topic, pid)
        queue = None if record is None else self._handle_of(record)
        return queue if isinstance(queue, PartitionQueue) else None

    def get(self, topic: TopicRecord, pid: int) -> PartitionQueue:
        """Returns this node's handle of a partition. Raises Unavailable."""
        queue = self.find(topic.vhost, topic.name, pid)
        if queue is None:
            raise Unavailable(f"partition {pid} of topic '{topic.name}' is not open here")
        return queue

    def leader(self, topic: TopicRecord, pid: int) -> int:
        """Returns the node that leads a partition, or is expected to; 0 when it has no queue."""
        record = self.record(topic.vhost, topic.name, pid)
        return 0 if record is None else self._leader_of(record) or record.home

    def members(self, topic: TopicRecord, pid: int) -> tuple[int, ...]:
        """Returns the nodes that have a partition."""
        record = self.record(topic.vhost, topic.name, pid)
        return () if record is None else record.members

    # --- questions -------------------------------------------------------------------------

    async def describe(self, topic: TopicRecord, pid: int) -> PartitionDescription:
        """Returns the state of a partition. Raises Unavailable."""
        return await self.get(topic, pid).description(QUESTION_TIMEOUT_S)

    async def describe_all(
        self, topic: TopicRecord, pids: Iterable[int]
    ) -> dict[int, PartitionDescription | None]:
        """Returns the states of partitions; None for what did not answer in time."""

        async def ask(pid: int) -> PartitionDescription | None:
            try:
                return await self.describe(topic, pid)
            except BrokerError:
                return None

        asked = list(pids)
        found = await asyncio.gather(*(ask(pid) for pid in asked))
        return dict(zip(asked, found, strict=True))

    async def offset_at(self, topic: TopicRecord, pid: int, time_ms: int) -> int | None:
        """Returns the first offset at or after a time; None where there is none. Raises
        Unavailable."""
        try:
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                found, _ = await self.get(topic, pid).offsets("timestamp", time_ms)
        except TimeoutError:
            raise Unavailable(f"partition {pid} of topic '{topic.name}' does not answer") from None
        return None if found is None else found + FIRST_OFFSET
