"""Fixtures of the fault tests: clusters of real node processes, and an end to tests that hang."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import wait_http
from tests.ports import cluster_ports

HERE = Path(__file__).parent
# Below the ephemeral range with all offsets: an outgoing connection may sit on any port in it.
BASE_PORT = cluster_ports()
TEST_TIME_LIMIT_S = 120

StartCluster = Callable[..., LocalCluster]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Ends a test that hangs, with a traceback of where."""

    def expired(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took more than {TEST_TIME_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(TEST_TIME_LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[StartCluster]:
    """Starts a cluster: `start_cluster(nodes=3, settings={...})`."""
    with ExitStack() as stack:

        def start(nodes: int = 3, settings: dict[str, str] | None = None) -> LocalCluster:
            small = {"raft.wal_max_size_bytes": "16MiB", "alarms.interval": "200"}
            made = LocalCluster(
                tmp_path / "cluster", nodes, BASE_PORT, {**small, **(settings or {})}
            )
            stack.enter_context(made)
            made.wait_ready()
            wait_http(made)
            return made

        yield start


@pytest.fixture
def cluster(start_cluster: StartCluster) -> LocalCluster:
    """Three nodes."""
    return start_cluster()
