"""Names, settings and handles of ordered topics that protocols use."""

from __future__ import annotations

from convoymq.metadata.topic_settings import (
    REFUSE,
    TOPIC_SETTINGS,
    WEAK,
    null_key_of,
    retry_exchange_of,
)
from convoymq.metadata.topics import GROUP_SEPARATOR
from convoymq.queues.partition import reads
from convoymq.queues.partition.client import PartitionClient
from convoymq.queues.partition.queue import PartitionQueue
from convoymq.queues.stream.queue import awaited

__all__ = [
    "GROUP_SEPARATOR",
    "REFUSE",
    "TOPIC_SETTINGS",
    "WEAK",
    "PartitionClient",
    "PartitionQueue",
    "awaited",
    "null_key_of",
    "reads",
    "retry_exchange_of",
]
