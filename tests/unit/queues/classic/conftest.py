"""Two nodes with classic queues, and their clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.queues.classic.support import Node, Time


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def nodes(tmp_path: Path, time: Time) -> Iterator[dict[int, Node]]:
    made: dict[int, Node] = {}
    Node(1, made, tmp_path, time)
    Node(2, made, tmp_path, time)
    yield made
    for node in made.values():
        node.host.stop()
