"""Flags of virtual hosts: a cluster-wide setting for each that is set, so that every node follows
it, also after a restart."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from convoymq.metadata.commands import PutSetting

TRACED = "vhosts.traced."
"""The firehose publishes a copy of each message."""
PROTECTED = "vhosts.protected."
"""The virtual host cannot be deleted."""


def flagged_vhosts(
    settings: Mapping[str, str], vhosts: Collection[str], flag: str
) -> frozenset[str]:
    """Returns the virtual hosts that have a flag, by the settings of the tree."""
    return frozenset(vhost for vhost in vhosts if flag + vhost in settings)


def set_traced(vhost: str, *, traced: bool) -> PutSetting:
    """Returns the command that begins or ends the tracing of a virtual host."""
    return PutSetting(name=TRACED + vhost, value="true" if traced else None)


def set_protected(vhost: str, *, protected: bool) -> PutSetting:
    """Returns the command that protects a virtual host from deletion, or no longer."""
    return PutSetting(name=PROTECTED + vhost, value="true" if protected else None)
