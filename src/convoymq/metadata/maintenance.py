"""Drained nodes: a cluster-wide setting for each, so that it survives restarts.

A drained node takes no clients, and no leader or new replica is placed on it while another node can
have it (ADR 0041).
"""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.metadata.commands import PutSetting

PREFIX = "node.drained."


def drained_nodes(settings: Mapping[str, str]) -> frozenset[int]:
    """Returns the drained nodes by the settings of the tree."""
    return frozenset(int(name[len(PREFIX) :]) for name in settings if name.startswith(PREFIX))


def set_drained(node: int, *, drained: bool) -> PutSetting:
    """Returns the command that drains a node, or ends that."""
    return PutSetting(name=f"{PREFIX}{node}", value="true" if drained else None)
