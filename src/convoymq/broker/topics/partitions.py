"""Handles of partitions by topic and number."""

from __future__ import annotations

from convoymq.broker.local_queues import LocalQueues
from convoymq.metadata.machine import MetadataMachine, QueueRecord
from convoymq.metadata.topics import partition_queue_name
from convoymq.queues.partition.queue import PartitionQueue


class TopicPartitions:
    """Partitions of the topics, as this node's tree has them."""

    def __init__(self, tree: MetadataMachine, local: LocalQueues) -> None:
        self._tree = tree
        self._local = local

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
        queue = None if record is None else self._local.find(record)
        return queue if isinstance(queue, PartitionQueue) else None
