"""Fixtures of the fault tests: clusters of real node processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import wait_http
from tests.forked_nodes import ForkedCluster
from tests.ports import lasting_ports

HERE = Path(__file__).parent
# Below the ephemeral range with all offsets: an outgoing connection may sit on any port in it.
BASE_PORT = lasting_ports()

StartCluster = Callable[..., LocalCluster]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[StartCluster]:
    """Starts a cluster: `start_cluster(nodes=3, settings={...})`; with `forked=False` of processes
    as users start them."""
    with ExitStack() as stack:

        def start(
            nodes: int = 3, settings: dict[str, str] | None = None, *, forked: bool = True
        ) -> LocalCluster:
            small = {"raft.wal_max_size_bytes": "16MiB", "alarms.interval": "200"}
            kind = ForkedCluster if forked else LocalCluster
            made = kind(tmp_path / "cluster", nodes, BASE_PORT, {**small, **(settings or {})})
            stack.enter_context(made)
            made.wait_ready()
            wait_http(made)
            return made

        yield start


@pytest.fixture
def cluster(start_cluster: StartCluster) -> LocalCluster:
    """Three nodes."""
    return start_cluster()
