"""Virtual hosts whose messages are traced: a cluster-wide setting for each, so that every node
follows it, also after a restart."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from convoymq.metadata.commands import PutSetting

PREFIX = "vhosts.traced."


def traced_vhosts(settings: Mapping[str, str], vhosts: Collection[str]) -> frozenset[str]:
    """Returns the virtual hosts that are traced, by the settings of the tree."""
    return frozenset(vhost for vhost in vhosts if PREFIX + vhost in settings)


def set_traced(vhost: str, *, traced: bool) -> PutSetting:
    """Returns the command that begins or ends the tracing of a virtual host."""
    return PutSetting(name=PREFIX + vhost, value="true" if traced else None)
