"""The queue types of this release: one line each."""

from __future__ import annotations

from convoymq.queues.driver import register
from convoymq.queues.mirrored.driver import MirroredDriver
from convoymq.queues.quorum.driver import QuorumDriver
from convoymq.queues.stream.driver import StreamDriver
from convoymq.topics.machine.driver import PartitionDriver

register(MirroredDriver())
register(QuorumDriver())
register(StreamDriver())
register(PartitionDriver())
