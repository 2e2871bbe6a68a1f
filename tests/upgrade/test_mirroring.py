"""Classic queues that are full, and mirrored by a policy, while 0.3.0 becomes this release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.metadata.machine import MetadataMachine
from tests.faults.traffic import connect, until
from tests.ports import cluster_ports
from tests.upgrade import releases
from tests.upgrade.mixed import MixedCluster
from tests.upgrade.probes import http, http_refusal

pytestmark = pytest.mark.cluster
BASE_PORT = cluster_ports(__name__)
CLASSIC = {"x-queue-type": "classic"}
PERSISTENT = pika.BasicProperties(delivery_mode=2)
COUNT, SIZE = 2000, 1024
PATH = "policies/%2F/mirrors"
POLICY = {
    "pattern": "^full",
    "apply-to": "queues",
    "definition": {"ha-mode": "all", "ha-sync-mode": "automatic"},
}
NODES = (1, 2, 3)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MixedCluster]:
    old = releases.source_of(releases.NEWEST)
    with MixedCluster(tmp_path / "cluster", BASE_PORT, old) as made:
        made.wait_ready()
        yield made


def publish(cluster: MixedCluster, node: int, name: str, numbers: range) -> None:
    """Publishes in a transaction: all confirmed."""
    connection = connect(cluster, node)
    channel = connection.channel()
    channel.tx_select()
    for number in numbers:
        channel.basic_publish("", name, str(number).encode().ljust(SIZE), PERSISTENT)
    channel.tx_commit()
    connection.close()


def take(cluster: MixedCluster, node: int, name: str) -> list[int]:
    connection = connect(cluster, node)
    channel = connection.channel()
    found = []
    while (got := channel.basic_get(name, auto_ack=True))[0] is not None:
        found.append(int(got[2]))
    connection.close()
    return found


def row(cluster: MixedCluster, node: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = http(cluster, node, "GET", f"queues/%2F/{name}")
    return found


def mirrors(cluster: MixedCluster, node: int, name: str) -> tuple[int, int]:
    """Returns how many mirrors a queue has, and how many of them are synchronised."""
    found = row(cluster, node, name)
    return len(found.get("slave_nodes") or ()), len(found.get("synchronised_slave_nodes") or ())


@pytest.mark.long
def test_queues_get_mirrors_when_the_last_node_is_upgraded(cluster: MixedCluster) -> None:
    """The policy is refused as long as an old node is there, which would not follow it; nothing is
    mirrored, nothing migrated, nothing lost. Afterwards mirrors come by themselves, and a queue
    outlives its home."""
    for node in NODES:
        connection = connect(cluster, node)
        connection.channel().queue_declare(f"full{node}", durable=True, arguments=CLASSIC)
        connection.close()
        publish(cluster, node, f"full{node}", range(COUNT))
    assert "ha-mode" in http_refusal(cluster, 1, "PUT", PATH, POLICY)
    count = COUNT
    for node in (3, 1, 2):
        cluster.upgrade(node)
        for name in NODES:
            # Old nodes with a new home, and the other way round.
            publish(cluster, node, f"full{name}", range(count, count + 50))
        count += 50
        if len(cluster.upgraded) < len(NODES):
            reason = http_refusal(cluster, node, "PUT", PATH, POLICY)
            assert "older release" in reason, reason
            ask = {"to": "quorum"}
            path = f"convoy/queues/%2F/full{node}/migration"
            reason = http_refusal(cluster, node, "POST", path, ask)
            assert "older release" in reason, reason
            assert all(mirrors(cluster, node, f"full{name}") == (0, 0) for name in NODES)
    until(
        lambda: cluster.versions("metadata") == {MetadataMachine.VERSION},
        "the version was not raised",
    )
    until(lambda: not http_refusal(cluster, 1, "PUT", PATH, POLICY), "the policy is refused")
    for name in NODES:
        until(
            lambda name=name: mirrors(cluster, 1, f"full{name}") == (2, 2),  # type: ignore[misc]
            f"full{name} has no mirrors",
        )
    home = row(cluster, 1, "full3")["node"]
    cluster.kill(3)
    until(lambda: row(cluster, 1, "full3").get("node") not in (None, home), "no mirror took over")
    for name, node in ((1, 1), (2, 1), (3, 2)):
        until(lambda name=name: row(cluster, 1, f"full{name}")["messages"] == count)  # type: ignore[misc]
        assert take(cluster, node, f"full{name}") == list(range(count))
