"""Dispatch of connections to protocols, by their first bytes."""

from __future__ import annotations

from collections.abc import Iterable

from convoymq.edges.edge import Edge
from convoymq.model.errors import Misuse

PREFACE_BYTES_MAX = 8
"""No more is read before it is known whose connection it is."""


class Prefaces:
    """The prefaces that are registered.

    Args:
        edges: edges without prefaces have no part in shared ports.
    """

    def __init__(self, edges: Iterable[Edge]) -> None:
        self._edges: dict[bytes, Edge] = {}
        self._unknown: Edge | None = None
        for edge in edges:
            for preface in edge.prefaces:
                self._add(preface, edge)
            if edge.takes_unknown and self._unknown is None:
                self._unknown = edge

    def _add(self, preface: bytes, edge: Edge) -> None:
        if not 1 <= len(preface) <= PREFACE_BYTES_MAX:
            raise Misuse(f"a preface has 1 to {PREFACE_BYTES_MAX} bytes, not {preface!r}")
        for other in self._edges:
            if preface.startswith(other) or other.startswith(preface):
                raise Misuse(f"the prefaces {other!r} and {preface!r} begin alike")
        self._edges[preface] = edge

    def is_undecided(self, head: bytes) -> bool:
        """Returns whether more bytes are needed to tell."""
        return any(len(head) < len(each) and each.startswith(head) for each in self._edges)

    def edge_of(self, head: bytes) -> Edge | None:
        """Returns the edge that serves the connection; None = none does."""
        for preface, edge in self._edges.items():
            if head.startswith(preface):
                return edge
        return self._unknown
