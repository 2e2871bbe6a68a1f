"""The queue types of this release: one line each."""

from __future__ import annotations

from convoymq.queues.classic.driver import ClassicDriver
from convoymq.queues.driver import register
from convoymq.queues.partition.driver import PartitionDriver
from convoymq.queues.quorum.driver import QuorumDriver
from convoymq.queues.stream.driver import StreamDriver

register(ClassicDriver())
register(QuorumDriver())
register(StreamDriver())
register(PartitionDriver())
