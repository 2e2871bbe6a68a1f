"""The list of client protocols: a new one is one line here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from convoymq.edges.sasl import LoginConfig

if TYPE_CHECKING:
    from convoymq.edges.edge import Edge, NodeParts
    from convoymq.model.config import Section

EDGES = [
    "convoymq.edges.amqp091",
    "convoymq.edges.amqp10",
    "convoymq.edges.columnar",
    "convoymq.edges.http",
    "convoymq.edges.shovel",
    "convoymq.rocketmq.observer",
]
"""Packages. Module `edge` defines `open_edge(parts: NodeParts) -> Edge | None`; None = not
configured. Module `config`, where there is one, defines `SECTION`, the edge's section of the
configuration. The first edge whose `takes_unknown` is set gets connections that begin with no
registered preface."""


def import_edges() -> None:
    """Imports the modules, which takes a while: before other nodes wait for signs of life."""
    for name in EDGES:
        importlib.import_module(f"{name}.edge")


def open_edges(parts: NodeParts) -> Iterator[Edge]:
    """Makes the edges that are configured, in the order of the list."""
    for name in EDGES:
        edge: Edge | None = importlib.import_module(f"{name}.edge").open_edge(parts)
        if edge is not None:
            yield edge


def edge_sections() -> Iterator[type[Section]]:
    """Yields the sections of the configuration that edges have together, and each its own."""
    yield LoginConfig
    for name in EDGES:
        if importlib.util.find_spec(f"{name}.config") is not None:
            yield importlib.import_module(f"{name}.config").SECTION
