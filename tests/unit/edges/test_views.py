"""Edges ask the broker's views: nothing of the tree, a replica or a link is read past them."""

from __future__ import annotations

import re
from pathlib import Path

import convoymq.edges

SOURCES = sorted(Path(convoymq.edges.__file__).parent.rglob("*.py"))
PAST_THE_VIEWS = re.compile(
    r"broker\.(metadata|host|control|new_session\.|local\.(host|tree|queues))\b"
)


def test_edges_read_nothing_past_the_views() -> None:
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PAST_THE_VIEWS.search(line)
    ]
    assert SOURCES
    assert not found
