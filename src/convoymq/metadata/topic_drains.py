"""Nodes that give their partitions of ordered topics away: a cluster-wide setting for each, so that
it survives whoever asked for it, and whoever carries it out.

No partition is placed on such a node while other nodes can have it. Its clients, queues and streams
stay: `metadata.maintenance` is about those.
"""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.metadata.commands import PutSetting

PREFIX = "topics.draining."


def draining_nodes(settings: Mapping[str, str]) -> frozenset[int]:
    """Returns the nodes that give partitions away, by the settings of the tree."""
    return frozenset(int(name[len(PREFIX) :]) for name in settings if name.startswith(PREFIX))


def set_draining(node: int, *, draining: bool) -> PutSetting:
    """Returns the command that has a node give its partitions away, or ends that."""
    return PutSetting(name=f"{PREFIX}{node}", value="true" if draining else None)
