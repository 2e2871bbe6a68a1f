"""Arguments of declarations and consumers in a cluster of three nodes: ignored ones are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.faults.test_administration import answers, connect, until
from tests.faults.test_policies import call
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports()
DEADLINE_S = 25.0
QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("arguments"), 3, BASE_PORT) as made:
        made.wait_ready(DEADLINE_S)
        until(lambda: answers(made))
        yield made


def rows(cluster: LocalCluster, path: str) -> Any:
    status, body = call(cluster, "GET", path)
    assert status == 200, body
    return json.loads(body)


def test_ignored_arguments_are_logged_and_shown(cluster: LocalCluster) -> None:
    with closing(connect(cluster, "guest", node=1)) as connection:
        channel = connection.channel()
        odd = QUORUM | {"x-delivery-limits": 5}
        channel.queue_declare("misspelt", durable=True, arguments=odd)
        channel.queue_declare("misspelt", durable=True, arguments=odd)
        channel.exchange_declare("odd", "topic", arguments={"alternate": "amq.fanout"})
        channel.basic_consume(
            "misspelt",
            lambda *_: None,
            arguments={"x-cancel-on-ha-failover": True, "x-priority": 3},
        )
        until(lambda: len(rows(cluster, "consumers/%2F")) == 1)
        (consumer,) = rows(cluster, "consumers/%2F")
        assert consumer["ignored_arguments"] == ["x-cancel-on-ha-failover"]
        assert consumer["arguments"] == {"x-cancel-on-ha-failover": True, "x-priority": 3}
        queue = rows(cluster, "queues/%2F/misspelt")
        assert queue["ignored_arguments"] == ["x-delivery-limits"]
        assert rows(cluster, "exchanges/%2F/odd")["ignored_arguments"] == ["alternate"]
        assert rows(cluster, "exchanges/%2F/amq.topic")["ignored_arguments"] == []
    said = [
        line
        for line in cluster.log_file(1).read_text().splitlines()
        if "broker.argument_ignored" in line
    ]
    assert len(said) == 3
    for name in ("x-delivery-limits", "alternate", "x-cancel-on-ha-failover"):
        assert sum(name in line for line in said) == 1
