"""Features of classic queues that may have mirrors."""

from __future__ import annotations

from dataclasses import replace

from convoymq.queues.classic.queue import ClassicQueue
from convoymq.queues.mirrored.client import CANCEL_ON_FAILOVER

FEATURES = replace(
    ClassicQueue.features,
    consumer_arguments=ClassicQueue.features.consumer_arguments | {CANCEL_ON_FAILOVER},
)
