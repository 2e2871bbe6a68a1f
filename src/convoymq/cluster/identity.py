"""Who a node is: its number, its data directory, its life, and the cluster that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What a node tells the others of itself, and keeps in `node.json`."""

    node: int
    directory: str
    """32 hex digits made with the data directory; they never change."""
    incarnation: int
    """A counter that rises with every start. Those of two directories are not comparable."""
    cluster: str = ""
    """32 hex digits: the cluster's id; empty = in no cluster yet."""
    candidate: str = ""
    """32 hex digits: the id of a cluster that this node would found."""
    former: tuple[str, ...] = ()
    """Ids that this cluster had before it was recovered from a lost majority."""
