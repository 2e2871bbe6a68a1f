"""Each health check, sound and failing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from convoymq.broker.membership import NEVER
from convoymq.metadata.commands import PutNode
from convoymq.replication.raft.membership import Learner, Membership
from tests.unit.edges.http.test_api import api, client, cluster, ok
from tests.unit.edges.test_certificates import certificate
from tests.unit.queues.fake_cluster import INCARNATION, FakeCluster, until

__all__ = ["api", "cluster"]

HEALTHY = {"status": "ok"}


@pytest.fixture(autouse=True)
async def listening(cluster: FakeCluster) -> None:
    """The nodes have announced where they listen."""
    for number in cluster.nodes:
        addresses = {"amqp": f"127.0.0.1:567{number}", "http": f"127.0.0.1:1567{number}"}
        await announce(cluster, number, addresses)


async def announce(cluster: FakeCluster, number: int, addresses: dict[str, str]) -> None:
    await cluster.nodes[1].store.execute(
        PutNode(id=number, name=f"n{number}", incarnation=INCARNATION, addresses=addresses)
    )


async def check(api: httpx.AsyncClient, name: str, status: int = 200) -> Any:
    return await ok(api.get(f"/health/checks/{name}"), status)


async def test_a_sound_cluster_passes_all(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await cluster.queue(1, "q")
    for name in (
        "alarms", "local-alarms", "virtual-hosts", "is-in-service", "ready-to-serve-clients",
        "node-is-quorum-critical", "node-is-mirror-sync-critical", "metadata-store/initialized",
        "reached-target-cluster-size",
        "metadata-store/initialized/with-data",
        "quorum-queues-without-elected-leaders/all-vhosts/pattern/.*",
        "quorum-queues-without-elected-leaders/vhost/%2F/pattern/.*",
    ):  # fmt: skip
        assert await check(api, name) == HEALTHY
    assert (await check(api, "port-listener/5671"))["port"] == 5671
    assert (await check(api, "protocol-listener/amqp"))["protocol"] == "amqp"
    assert await ok(api.get("/aliveness-test/%2F")) == HEALTHY
    assert await ok(api.get("/aliveness-test/%2F")) == HEALTHY
    assert await ok(api.get("/healthchecks/node")) == HEALTHY


async def test_an_alarm_fails_its_checks(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    cluster.nodes[2].broker.alarms.set("memory", True)
    await until(lambda: cluster.nodes[1].broker.alarms.effective)
    assert (await check(api, "alarms", 503))["alarms"] == [{"node": "n2", "resource": "memory"}]
    assert await check(api, "local-alarms") == HEALTHY
    # Publishers are blocked on every node.
    assert (await check(api, "ready-to-serve-clients", 503))["alarms"] == ["memory"]
    assert await check(api, "is-in-service") == HEALTHY
    cluster.nodes[1].broker.alarms.set("disk", True)
    assert (await check(api, "local-alarms", 503))["alarms"] == ["disk"]
    answer = await ok(api.get("/healthchecks/node"))
    assert answer == {"status": "failed", "reason": "resource alarm(s) in effect"}


async def test_damaged_and_stopped_queues_fail_their_virtual_host(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    broker = cluster.nodes[1].broker
    await cluster.queue(1, "c", arguments={"x-queue-type": "classic"})
    (record,) = broker.metadata.tree.records()
    crashes = broker.local.hosts["classic"].crashes
    crashes.add(record.group, "torn")
    answer = await check(api, "virtual-hosts", 503)
    assert answer["virtual-hosts"] == ["/"]
    assert answer["queues"] == [{"name": "c", "virtual_host": "/", "type": "classic"}]
    assert (await ok(api.get("/healthchecks/node")))["status"] == "failed"
    assert (await ok(api.get("/queues/%2F/c")))["state"] == "crashed"
    crashes.end(record.group)
    assert await check(api, "virtual-hosts") == HEALTHY
    await cluster.queue(1, "q")
    group = max(record.group for record in broker.metadata.tree.records())
    cluster.nodes[1].host.stopped[group] = SimpleNamespace(stopped="entry 7")
    assert (await check(api, "virtual-hosts", 503))["queues"][0]["name"] == "q"


async def test_a_node_without_majority_is_not_in_service(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    cluster.nodes[1].store.leader = None
    for name in (
        "is-in-service", "ready-to-serve-clients", "metadata-store/initialized",
        "metadata-store/initialized/with-data",
    ):  # fmt: skip
        assert (await check(api, name, 503))["reason"] == "the metadata store has no leader"
    assert (await ok(api.get("/healthchecks/node")))["status"] == "failed"


async def test_a_node_without_listener_is_not_in_service(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await announce(cluster, 1, {})
    for name in ("is-in-service", "ready-to-serve-clients"):
        assert (await check(api, name, 503))["reason"] == "no AMQP listener"
    assert (await check(api, "port-listener/5671", 503))["missing"] == 5671
    assert (await check(api, "protocol-listener/amqp", 503))["protocols"] == []
    await ok(api.get("/health/checks/port-listener/²"), 400)


async def test_an_empty_metadata_store_has_no_data(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    del cluster.nodes[1].machine.nodes[1]
    answer = await check(api, "metadata-store/initialized/with-data", 503)
    assert answer["reason"] == "the metadata store has no data"


async def test_nodes_that_are_away_are_missed(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await cluster.queue(1, "q")
    cluster.down.add(3)
    answer = await check(api, "node-is-quorum-critical", 503)
    # The cluster's own store needs two of three nodes, too.
    assert [row["name"] for row in answer["queues"]] == ["rabbitmq_metadata", "q"]
    assert (await check(api, "reached-target-cluster-size", 503))["reason"] == "2 of 3 nodes run"


async def test_a_node_alone_is_not_asked_whether_it_is_critical(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path, nodes=1) as alone, client(alone) as api:
        await alone.queue(1, "q")
        assert await check(api, "node-is-quorum-critical") == {
            **HEALTHY,
            "reason": "single node cluster",
        }


async def test_a_queue_with_one_replica_depends_on_its_node(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q", arguments={"x-quorum-initial-group-size": 1})
    (row,) = (await check(api, "node-is-quorum-critical", 503))["queues"]
    assert row["readable_name"] == "queue 'q' in vhost '/'"


async def test_members_without_a_vote_make_no_majority(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    (record,) = cluster.nodes[1].broker.metadata.tree.records()
    leader = next(each for each in cluster.groups[record.group].replicas.values() if each.is_leader)
    # Of two voters both are needed.
    leader.core.progress = {3: SimpleNamespace(node=3, silent=False, voter=False)}
    assert (await check(api, "node-is-quorum-critical", 503))["queues"][0]["name"] == "q"
    leader.core.progress = {1: SimpleNamespace(node=1, silent=False, voter=False)}
    assert await check(api, "node-is-quorum-critical") == HEALTHY


async def test_new_replicas_of_this_node_are_waited_for(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    name = "quorum-queue-replicas-initial-sync"
    assert await check(api, name) == HEALTHY
    (record,) = cluster.nodes[1].broker.metadata.tree.records()
    core = cluster.groups[record.group].replicas[1].core
    core.members = Membership(frozenset((2, 3)), (Learner(1, 100),))
    assert (await check(api, name, 503))["queues"][0]["name"] == "q"
    core.members = Membership(frozenset((2, 3)), (Learner(1, NEVER),))
    assert await check(api, name) == HEALTHY


async def test_replicas_that_are_behind_do_not_stand_in(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    (record,) = cluster.nodes[1].broker.metadata.tree.records()
    replicas = cluster.groups[record.group].replicas
    await until(lambda: len(replicas) == 3)

    async def is_critical() -> None:
        answer = await check(api, "node-is-quorum-critical", 503)
        assert [row["name"] for row in answer["queues"]] == ["q"]

    # A follower that lags says so itself, and so does one that stopped.
    replicas[3].is_behind = True
    await is_critical()
    replicas[3].is_behind = False
    assert await check(api, "node-is-quorum-critical") == HEALTHY
    cluster.nodes[2].host.stopped[record.group] = SimpleNamespace(stopped="entry 7")
    await is_critical()
    cluster.nodes[2].host.stopped.clear()
    # Its leader knows of one that does not answer, or that has no vote yet.
    leader = next(replica for replica in replicas.values() if replica.is_leader)
    for silent, voter in ((True, True), (False, False)):
        leader.core.progress = {3: SimpleNamespace(node=3, silent=silent, voter=voter)}
        await is_critical()
    leader.core.progress = {3: SimpleNamespace(node=3, silent=False, voter=True)}
    assert await check(api, "node-is-quorum-critical") == HEALTHY
    # This node's own replica is not one of those that stand in.
    replicas[1].is_behind = True
    assert await check(api, "node-is-quorum-critical") == HEALTHY


async def test_the_target_size_of_the_cluster_counts(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    async with client(cluster, cluster_size_target=4) as asked:
        answer = await check(asked, "reached-target-cluster-size", 503)
    assert answer["reason"] == "3 of 4 nodes run"
    cluster.down.add(3)
    async with client(cluster, cluster_size_target=2) as asked:
        assert await check(asked, "reached-target-cluster-size") == HEALTHY


async def test_the_aliveness_test_fails_with_what_it_does(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    assert await ok(api.get("/aliveness-test/%2F")) == HEALTHY
    classic = cluster.nodes[1].broker.local.hosts["classic"]
    (group,) = classic.queues
    crashing = classic.queues[group]
    classic.contain(crashing, lambda: {}["a fault"])
    answer = await ok(api.get("/aliveness-test/%2F"), 503)
    assert "crashed" in answer["reason"]
    await until(classic.due)
    cluster.nodes[1].broker.local.tick()
    await ok(api.put("/users/weak", json={"password": "p", "tags": "management"}), 201)
    rules = {"configure": "", "write": "", "read": ""}
    await ok(api.put("/permissions/%2F/weak", json=rules), 201)
    async with client(cluster, "weak", "p") as weak:
        await ok(weak.get("/aliveness-test/%2F"), 401)


async def test_leaderless_queues_are_not_running(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    assert (await ok(api.get("/queues/%2F/q")))["state"] == "running"
    (record,) = cluster.nodes[1].broker.metadata.tree.records()
    for node in cluster.nodes.values():
        replica = node.host.groups.get(record.group)
        if replica is not None:
            replica.is_leader = False
    cluster.groups[record.group].leader = None  # type: ignore[assignment]
    for node in cluster.nodes.values():
        queue = node.broker.local.queues.get(record.group)
        if queue is not None:
            queue.on_leader(record.group, None, 1)
    row = await ok(api.get("/queues/%2F/q"))
    assert (row["state"], row.get("leader")) == ("down", None)
    assert (await ok(api.get("/queues")))[0]["state"] == "down"
    pattern = "quorum-queues-without-elected-leaders/all-vhosts/pattern"
    missing = [
        {
            "readable_name": "queue 'q' in vhost '/'",
            "name": "q",
            "virtual_host": "/",
            "type": "quorum",
        }
    ]
    assert (await check(api, f"{pattern}/%5Eq", 503))["queues"] == missing
    assert await check(api, f"{pattern}/%5EQ") == HEALTHY
    await check(api, f"{pattern}/(", 400)
    await check(api, f"{pattern}/(a)%5C1", 400)
    assert "convoy_queues_leaderless 1\n" in await metrics_text(api)
    cluster.down.update((2, 3))
    assert (await ok(api.get("/queues/%2F/q")))["state"] == "minority"


async def metrics_text(api: httpx.AsyncClient) -> str:
    answer = await api.get("http://api/metrics")
    assert answer.status_code == 200
    return answer.text


async def test_the_limit_of_connections_is_watched(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    found = await check(api, "below-node-connection-limit")
    assert found == {**HEALTHY, "current": 0, "limit": 65_536}
    async with client(cluster, connections_max=0) as asked:
        found = await check(asked, "below-node-connection-limit", 503)
    assert (found["status"], found["current"], found["limit"]) == ("failed", 0, 0)


async def test_certificates_that_end_soon_fail_their_check(
    cluster: FakeCluster, api: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert await check(api, "certificate-expiration/1/weeks") == HEALTHY, "no TLS, no certificate"
    await announce(cluster, 1, {"amqps": "127.0.0.1:5671", "amqp": "127.0.0.1:5672"})
    path = tmp_path / "node.pem"
    path.write_bytes(certificate(tmp_path, 20))
    async with client(cluster, certificate_file=str(path)) as asked:
        assert await check(asked, "certificate-expiration/2/weeks") == HEALTHY
        found = await check(asked, "certificate-expiration/1/months", 503)
        assert found["reason"] == "Certificates expiring"
        (row,) = found["expired"]
        assert (row["node"], row["port"], row["certfile"]) == ("n1", 5671, str(path))
        for name in ("certificate-expiration/1/moons", "certificate-expiration/x/days"):
            assert (await check(asked, name, 400))["reason"].startswith("Invalid expiration")
        path.unlink()
        assert (
            "cannot be read" in (await check(asked, "certificate-expiration/1/days", 503))["reason"]
        )
