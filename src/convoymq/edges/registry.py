"""The list of client protocols: a new one is one line here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.edges.edge import Edge, NodeParts

EDGES = [
    "convoymq.edges.amqp091.edge",
    "convoymq.edges.columnar.edge",
    "convoymq.edges.http.edge",
]
"""Modules that define `open_edge(parts: NodeParts) -> Edge | None`; None = not configured. The
first whose `takes_unknown` is set gets connections that begin with no registered preface."""


def import_edges() -> None:
    """Imports the modules, which takes a while: before other nodes wait for signs of life."""
    for name in EDGES:
        importlib.import_module(name)


def open_edges(parts: NodeParts) -> Iterator[Edge]:
    """Makes the edges that are configured, in the order of the list."""
    for name in EDGES:
        edge: Edge | None = importlib.import_module(name).open_edge(parts)
        if edge is not None:
            yield edge
