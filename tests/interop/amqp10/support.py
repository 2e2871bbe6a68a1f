"""A mark of tests whose consumers grant credit."""

from __future__ import annotations

import pytest

from convoymq.queues.interface import QueueClient
from convoymq.queues.quorum.client import QuorumClient

GIVES_CREDIT = pytest.mark.skipif(
    QuorumClient.grant is QueueClient.grant, reason="quorum queues hand out by windows only"
)
