"""Driver of classic queues, which policies may mirror."""

from __future__ import annotations

from dataclasses import replace

from convoymq.queues.classic.driver import ClassicDriver
from convoymq.queues.driver import HostParts
from convoymq.queues.mirrored.host import MirroredHost

MIRRORING_KEYS = (
    "ha-mode",
    "ha-params",
    "ha-sync-mode",
    "ha-sync-batch-size",
    "ha-promote-on-shutdown",
    "ha-promote-on-failure",
)


class MirroredDriver(ClassicDriver):
    """See the module text."""

    rules = replace(
        ClassicDriver.rules, policies=ClassicDriver.rules.policies | frozenset(MIRRORING_KEYS)
    )

    def make_host(self, parts: HostParts) -> MirroredHost:
        """See `HostedDriver`."""
        return MirroredHost(parts)
