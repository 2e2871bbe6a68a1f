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
from convoymq.queues.stream.queue import awaited
from convoymq.topics.machine import reads
from convoymq.topics.machine.client import PartitionClient
from convoymq.topics.machine.queue import PartitionQueue

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
