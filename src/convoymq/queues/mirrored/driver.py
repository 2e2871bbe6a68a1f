"""Driver of classic queues, which policies may mirror."""

from __future__ import annotations

from convoymq.queues.classic.driver import ClassicDriver
from convoymq.queues.driver import HostParts
from convoymq.queues.mirrored.host import MirroredHost


class MirroredDriver(ClassicDriver):
    """See the module text."""

    def make_host(self, parts: HostParts) -> MirroredHost:
        """See `HostedDriver`."""
        return MirroredHost(parts)
