"""Every release opens what an earlier one wrote: fixtures are opened and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.faults.traffic import log_has
from tests.upgrade import dataset, fixtures

pytestmark = pytest.mark.cluster


def test_there_are_fixtures() -> None:
    assert fixtures.names()


@pytest.mark.parametrize("name", fixtures.names())
def test_this_release_opens_the_data_of(name: str, tmp_path: Path) -> None:
    expected = fixtures.unpack(name, tmp_path / "cluster")
    settings = dict(fixtures.SETTINGS)
    with LocalCluster(tmp_path / "cluster", 3, fixtures.BASE_PORT, settings) as cluster:
        cluster.wait_ready()
        assert log_has(cluster, fixtures.TORN_NODE, "storage.torn_tail")
        assert not any(log_has(cluster, node, "storage.damaged") for node in (1, 2, 3))
        dataset.check(cluster, expected)
