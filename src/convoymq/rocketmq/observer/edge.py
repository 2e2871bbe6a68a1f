"""Broker groups as an edge of a node, which listens for nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.rocketmq.observer.config import RocketmqConfig

if TYPE_CHECKING:
    from convoymq.edges.edge import Edge, NodeParts


def open_edge(parts: NodeParts) -> Edge | None:
    """Makes the edge if name servers are configured."""
    config = parts.config.of(RocketmqConfig)
    if not config.name_servers:
        return None
    from convoymq.rocketmq.observer.groups import ObservedGroups

    return ObservedGroups(config)
