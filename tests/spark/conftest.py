"""Fixtures of the Spark tests: a broker in memory, one Spark session, one cluster of real nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from convoymq.spark import clients
from convoymq.spark.java import JavaMissing, java_home
from tests.forked_nodes import ForkedCluster
from tests.spark import delta
from tests.spark.cluster import BASE_PORT, Broker
from tests.spark.fakes import FakeBroker, FakeClient
from tests.spark.quick_start import SCRUBBED, spark_environment

HERE = Path(__file__).parent
REAL = ("nodes", "spark")
"""Fixtures that start processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and set(REAL) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    """A broker in memory; every connection that a data source makes leads to it."""
    made = FakeBroker()
    client = FakeClient(made)
    monkeypatch.setattr(clients, "connect", lambda _connection: client)
    return made


@pytest.fixture(scope="package")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one session of these tests: it takes seconds to start."""
    from convoymq.spark import session

    before = dict(os.environ)
    for name in SCRUBBED:
        os.environ.pop(name, None)
    try:
        java_home()
    except JavaMissing as error:
        pytest.skip(str(error))
    home = tmp_path_factory.mktemp("spark")
    os.environ.update(spark_environment())
    settings = {"spark.sql.warehouse.dir": str(home / "warehouse")}
    if delta.is_used():
        settings |= delta.DELTA_SETTINGS
    # A task that fails is repeated, as on a cluster; locally Spark's default is not to.
    made = session("tests", master="local[2,4]", conf=settings)
    yield made
    made.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="package")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Three nodes for all tests; a test that kills one brings it back."""
    settings = {"raft.wal_max_size_bytes": "16MiB"}
    with ForkedCluster(tmp_path_factory.mktemp("nodes"), 3, BASE_PORT, settings) as cluster:
        cluster.wait_ready()
        made = Broker(cluster)
        yield made
        made.client.close()
