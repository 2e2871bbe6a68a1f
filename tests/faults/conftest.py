"""Fixtures of the fault tests: clusters of real node processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = os.geteuid() == 0 and shutil.which("mount") is not None
    if made:
        command = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(place)]
        made = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not made:
        pytest.skip("needs root and permission to mount a tmpfs")
    for number in (1, 2, 3):
        # Only what the broker stores lies there: not its log file, nor the test's own files.
        (place / str(number)).mkdir()
        (tmp_path / "cluster" / f"node-{number}").mkdir(parents=True)
        (tmp_path / "cluster" / f"node-{number}" / "data").symlink_to(place / str(number))
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def ballast(place: Path, left: int) -> Path:
    """A file that leaves at most so many bytes free."""
    path = place / "ballast"
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while (found := os.statvfs(place)).f_bavail * found.f_frsize > left:
            file.write(bytes(4096))
    return path
