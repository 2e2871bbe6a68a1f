"""A cluster with a mirrored queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.queues.classic.support import Time
from tests.unit.queues.mirrored.support import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, Time())
    yield made
    for node in made.nodes.values():
        node.host.stop()
