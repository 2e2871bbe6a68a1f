"""Policies, operator policies, parameters and limits through the HTTP API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from convoymq.model.tables import Table
from convoymq.routing.types import ExchangeType
from tests.unit.edges.http.test_api import api, client, ok
from tests.unit.edges.http.test_api import cluster as first_version
from tests.unit.edges.http.test_behaviour import EXPORT, add_user
from tests.unit.queues.fake_cluster import FakeCluster, until

__all__ = ["api", "first_version"]

POLICY = {
    "pattern": "^o",
    "definition": {"max-length": 2},
    "priority": 3,
    "apply-to": "classic_queues",
}
CLASSIC = {"x-queue-type": "classic"}
NEEDED = "version 2 of the metadata machine is needed, 1 is in force: some nodes have an older"


@pytest.fixture
def cluster(first_version: FakeCluster) -> FakeCluster:
    for node in first_version.nodes.values():
        node.machine.set_version(2)
    return first_version


@pytest.mark.parametrize("kind", ["policies", "operator-policies"])
async def test_a_policy_is_set_shown_replaced_and_removed(
    api: httpx.AsyncClient, kind: str
) -> None:
    await ok(api.put(f"/{kind}/%2F/p", json=POLICY), 201)
    row = {"vhost": "/", "name": "p", **POLICY}
    for path in (f"/{kind}", f"/{kind}/%2F"):
        assert await ok(api.get(path)) == [row]
    assert await ok(api.get(f"/{kind}/%2F/p")) == row
    short = {"pattern": "", "definition": {"expires": 5}}
    await ok(api.put(f"/{kind}/%2F/p", json=short), 204)
    assert await ok(api.get(f"/{kind}/%2F/p")) == {
        "vhost": "/", "name": "p", "priority": 0, "apply-to": "all", **short,
    }  # fmt: skip
    await ok(api.delete(f"/{kind}/%2F/p"), 204)
    await ok(api.delete(f"/{kind}/%2F/p"), 404)
    await ok(api.get(f"/{kind}/%2F/p"), 404)
    await ok(api.put(f"/{kind}/none/p", json=POLICY), 404)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"definition": {"message-ttl": -1}}, "-1 is not a valid message TTL"),
        (
            {"definition": {"max-priority": 5}},
            '[{<<"max-priority">>,5}] are not recognised policy settings',
        ),
        ({"definition": {}}, "no policy provided"),
        ({"definition": "x"}, "definition must be a dictionary"),
        ({"pattern": None}, "key pattern is missing or not a string"),
        ({"pattern": "("}, "pattern should be a regular expression but is invalid: "),
        ({"priority": "high"}, 'priority should be a number, actually was <<"high">>'),
        ({"priority": 1.5}, "priority should be a number, actually was 1.5"),
        ({"apply-to": "tables"}, "apply-to 'tables' unrecognised"),
        ({"apply-to": 5}, "apply-to should be a string, actually was 5"),
        ({"apply-to": "exchanges"}, "apply-to 'exchanges' conflicts with max-length"),
    ],
)
async def test_bad_policies_are_refused_with_the_reason(
    api: httpx.AsyncClient, change: dict[str, Any], reason: str
) -> None:
    for kind in ("policies", "operator-policies"):
        answer = await ok(api.put(f"/{kind}/%2F/p", json=POLICY | change), 400)
        assert answer["error"] == "bad_request"
        assert answer["reason"].startswith(f"Validation failed\n\n{reason}")


async def test_the_first_version_refuses_by_name(
    first_version: FakeCluster,
) -> None:
    async with client(first_version) as api:
        for path, body in (
            ("/policies/%2F/p", POLICY),
            ("/operator-policies/%2F/p", POLICY),
            ("/vhost-limits/%2F/max-queues", {"value": 1}),
            ("/user-limits/guest/max-channels", {"value": 1}),
        ):
            answer = await ok(api.put(path, json=body), 400)
            assert NEEDED in answer["reason"]
        document = {"policies": [{"vhost": "/", "name": "p", **POLICY}]}
        answer = await ok(api.post("/definitions", json=document), 400)
        assert answer["reason"].startswith("nothing was imported: policy 'p' in vhost '/': ")
        assert NEEDED in answer["reason"]
        assert await ok(api.get("/policies")) == []


async def test_tags_say_who_may(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await add_user(api, "maker", "policymaker")
    await add_user(api, "viewer", "management")
    await ok(api.put("/vhosts/v"), 201)
    async with client(cluster, "maker", "p") as maker:
        await ok(maker.put("/policies/%2F/p", json=POLICY), 201)
        await ok(maker.put("/policies/v/p", json=POLICY), 401)
        await ok(maker.put("/operator-policies/%2F/p", json=POLICY), 401)
        await ok(maker.put("/vhost-limits/%2F/max-queues", json={"value": 1}), 401)
        await ok(maker.put("/user-limits/maker/max-channels", json={"value": 1}), 401)
        await ok(maker.put("/parameters/vhost-limits/%2F/limits", json={"value": {}}), 401)
        await ok(maker.put("/global-parameters/cluster_name", json={"value": "n"}), 401)
        assert await ok(maker.get("/parameters")) == []
    async with client(cluster, "viewer", "p") as viewer:
        assert [row["name"] for row in await ok(viewer.get("/policies"))] == ["p"]
        await ok(viewer.delete("/policies/%2F/p"), 401)
        await ok(viewer.put("/policies/%2F/p", json=POLICY), 401)
        await ok(viewer.get("/parameters"), 401)
        await ok(viewer.get("/user-limits"), 401)


async def test_queues_and_exchanges_show_what_acts(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "orders", arguments=CLASSIC)
    await cluster.queue(1, "other", arguments=CLASSIC)
    topology = cluster.nodes[1].machine.vhosts["/"].topology
    topology.declare_exchange("orders", ExchangeType.FANOUT, arguments=Table.of({}))
    await ok(api.put("/policies/%2F/p", json=POLICY), 201)
    operator = {"pattern": "", "definition": {"max-length": 1, "expires": 60_000}}
    await ok(api.put("/operator-policies/%2F/o", json=operator), 201)
    alternate = {"pattern": "", "definition": {"alternate-exchange": "x"}, "apply-to": "exchanges"}
    await ok(api.put("/policies/%2F/ae", json=alternate), 201)
    keys = ("policy", "operator_policy", "effective_policy_definition")
    row = await ok(api.get("/queues/%2F/orders"))
    assert [row[key] for key in keys] == ["p", "o", {"expires": 60_000, "max-length": 1}]
    assert row["effective_settings"] == {"expires": 60_000, "max-length": 1}
    rows = {row["name"]: row for row in await ok(api.get("/queues"))}
    assert [rows["other"][key] for key in keys] == ["p", "o", {"expires": 60_000, "max-length": 1}]
    row = await ok(api.get("/exchanges/%2F/orders"))
    assert row["policy"] == "ae"
    assert row["effective_policy_definition"]["alternate-exchange"] == "x"


async def test_a_policy_acts_in_a_running_queue_and_stops_with_it(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "orders", arguments=CLASSIC)
    message = {"properties": {}, "routing_key": "orders", "payload": "x"}

    async def publish(times: int) -> None:
        for _ in range(times):
            await ok(api.post("/exchanges/%2F/amq.default/publish", json=message))

    await publish(5)
    (queue,) = cluster.nodes[1].broker.local.hosts["classic"].queues.values()  # type: ignore[attr-defined]
    assert queue.machine.ready_count == 5
    await ok(api.put("/policies/%2F/p", json=POLICY), 201)
    await until(lambda: queue.machine.ready_count == 2)
    await publish(3)
    assert queue.machine.ready_count == 2
    await ok(api.delete("/policies/%2F/p"), 204)
    await until(lambda: queue.limits.length_max is None)
    await publish(3)
    assert queue.machine.ready_count == 5


async def test_limits_are_set_shown_and_removed(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await ok(api.put("/vhost-limits/%2F/max-queues", json={"value": 1}), 204)
    await ok(api.put("/vhost-limits/%2F/max-connections", json={"value": "7"}), 204)
    row = {"vhost": "/", "value": {"max-connections": 7, "max-queues": 1}}
    assert await ok(api.get("/vhost-limits")) == [row]
    assert await ok(api.get("/vhost-limits/%2F")) == [row]
    await ok(api.put("/user-limits/guest/max-channels", json={"value": 9}), 204)
    row = {"user": "guest", "value": {"max-channels": 9}}
    assert await ok(api.get("/user-limits")) == await ok(api.get("/user-limits/guest")) == [row]
    assert (await ok(api.get("/users/guest")))["limits"] == {"max-channels": 9}
    await cluster.queue(1, "a", arguments=CLASSIC)
    answer = await ok(api.put("/queues/%2F/b", json={"arguments": CLASSIC}), 400)
    assert answer["reason"] == (
        "406 PRECONDITION_FAILED - cannot declare queue 'b': queue limit in vhost '/' (1) is "
        "reached"
    )
    for path in ("/vhost-limits/%2F/max-queues", "/user-limits/guest/max-channels"):
        await ok(api.delete(path), 204)
        await ok(api.delete(path), 404)
    await ok(api.put("/queues/%2F/b", json={"arguments": CLASSIC}), 201)
    for path in ("/vhost-limits/%2F/max-channels", "/user-limits/guest/max-queues"):
        answer = await ok(api.put(path, json={"value": 1}), 400)
        assert "is not a limit; there are: max-connections" in answer["reason"]
    await ok(api.put("/vhost-limits/%2F/max-queues", json={"value": "many"}), 400)
    await ok(api.put("/user-limits/nobody/max-channels", json={"value": 1}), 404)


async def test_parameters_are_operator_policies_and_limits(api: httpx.AsyncClient) -> None:
    path = "/parameters/operator_policy/%2F/o"
    await ok(api.put(path, json={"value": POLICY}), 201)
    await ok(api.put("/parameters/vhost-limits/%2F/limits", json={"value": {"max-queues": 5}}), 201)
    assert await ok(api.get("/operator-policies")) == [{"vhost": "/", "name": "o", **POLICY}]
    assert [row["component"] for row in await ok(api.get("/parameters"))] == [
        "vhost-limits",
        "operator_policy",
    ]
    assert (await ok(api.get(path)))["value"] == POLICY
    assert len(await ok(api.get("/parameters/vhost-limits/%2F"))) == 1
    await ok(api.delete(path), 204)
    await ok(api.delete("/parameters/vhost-limits/%2F/limits"), 204)
    assert await ok(api.get("/parameters")) == []
    path = "/parameters/federation-upstream/%2F/s"
    answer = await ok(api.put(path, json={"value": {}}), 400)
    assert answer["reason"] == "Validation failed\n\ncomponent federation-upstream not found"


async def test_a_shovel_is_set_shown_restarted_exported_and_deleted(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    path, single = "/parameters/shovel/%2F/s", "/shovels/vhost/%2F/s"
    value = {"src-uri": "amqp://", "src-queue": "a", "dest-uri": ["amqp://h"], "dest-queue": "b"}
    await ok(api.put(path, json={"value": value}), 201)
    await ok(api.put(path, json={"value": value}), 204)
    row = {"vhost": "/", "component": "shovel", "name": "s", "value": value}
    assert await ok(api.get(path)) == await ok(api.get(single)) == row
    (status,) = await ok(api.get("/shovels"))
    assert status == {"vhost": "/", "name": "s", "type": "dynamic", "state": "starting"}
    assert await ok(api.get("/shovels/%2F")) == [status]
    tree = cluster.nodes[1].broker.tree
    before = tree.shovels.find("/", "s")
    await ok(api.delete(f"{single}/restart"), 204)
    assert tree.shovels.find("/", "s") != before
    document = await ok(api.get("/definitions"))
    assert document["parameters"] == [row]
    await ok(api.delete(single), 204)
    for gone in (single, f"{single}/restart", path):
        await ok(api.delete(gone), 404)
    await ok(api.post("/definitions", json=document), 204)
    assert await ok(api.get("/parameters/shovel/%2F")) == [row]
    await ok(api.put("/vhosts/v"), 201)
    await ok(api.put("/parameters/shovel/v/s", json={"value": value}), 201)
    await ok(api.delete("/vhosts/v"), 204)
    await ok(api.put("/vhosts/v"), 201)
    assert len(await ok(api.get("/shovels"))) == 1


async def test_only_administrators_set_shovels(api: httpx.AsyncClient) -> None:
    value = {"src-uri": "amqp://", "src-queue": "a", "dest-uri": "amqp://"}
    user = {"password": "p", "tags": "monitoring,policymaker"}
    await ok(api.put("/users/m", json=user), 201)
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    await ok(api.put("/permissions/%2F/m", json=everything), 201)
    await ok(api.put("/parameters/shovel/%2F/s", json={"value": value}), 201)
    for method, path, status in (
        ("PUT", "/parameters/shovel/%2F/s", 401),
        ("DELETE", "/parameters/shovel/%2F/s", 401),
        ("DELETE", "/shovels/vhost/%2F/s", 401),
        ("DELETE", "/shovels/vhost/%2F/s/restart", 401),
        ("GET", "/shovels", 200),
    ):
        await ok(api.request(method, path, json={"value": value}, auth=("m", "p")), status)
    await ok(api.put("/users/m", json={"password": "p", "tags": "management"}), 204)
    await ok(api.get("/shovels", auth=("m", "p")), 401)


async def test_definitions_bring_all_of_it_back(api: httpx.AsyncClient) -> None:
    await ok(api.put("/policies/%2F/p", json=POLICY), 201)
    await ok(api.put("/operator-policies/%2F/o", json=POLICY), 201)
    await ok(api.put("/vhost-limits/%2F/max-queues", json={"value": 50}), 204)
    await ok(api.put("/user-limits/guest/max-channels", json={"value": 90}), 204)
    paths = ("/policies", "/operator-policies", "/vhost-limits", "/user-limits")
    before = [await ok(api.get(path)) for path in paths]
    document = await ok(api.get("/definitions"))
    single = await ok(api.get("/definitions/%2F"))
    assert [row["name"] for row in document["policies"]] == ["p"]
    await ok(api.delete("/policies/%2F/p"), 204)
    await ok(api.delete("/operator-policies/%2F/o"), 204)
    await ok(api.delete("/vhost-limits/%2F/max-queues"), 204)
    await ok(api.delete("/user-limits/guest/max-channels"), 204)
    await ok(api.post("/definitions", json=document), 204)
    assert [await ok(api.get(path)) for path in paths] == before
    await ok(api.put("/vhosts/v"), 201)
    await ok(api.post("/definitions/v", json=single), 204)
    assert await ok(api.get("/policies/v")) == [{"vhost": "v", "name": "p", **POLICY}]
    assert await ok(api.get("/vhost-limits/v")) == [{"vhost": "v", "value": {"max-queues": 50}}]


async def test_lists_of_pairs_are_objects(api: httpx.AsyncClient) -> None:
    """`rabbitmqctl export_definitions` of 3.10 writes them so."""
    operator = {"pattern": "", "definition": [["max-length", 9]], "priority": 1}
    document = {
        "vhosts": [{"name": "v", "limits": [["max-connections", 4], ["max-queues", 5]]}],
        "parameters": [
            {"component": "operator_policy", "name": "o", "vhost": "v", "value": operator}
        ],
    }
    await ok(api.post("/definitions", json=document), 204)
    limits = {"max-connections": 4, "max-queues": 5}
    assert await ok(api.get("/vhost-limits/v")) == [{"vhost": "v", "value": limits}]
    (row,) = await ok(api.get("/operator-policies/v"))
    assert row["definition"] == {"max-length": 9}


@pytest.mark.parametrize(
    "more",
    [
        {"policies": [{"vhost": "/", "name": "p", "pattern": ".*", "definition": {"ha-mode": 1}}]},
        {"parameters": [{"vhost": "/", "component": "vhost-limits", "name": "limits", "value": 5}]},
        {"parameters": [{"component": "operator_policy", "name": "o", "vhost": "/", "value": []}]},
        {"users": [{"name": "u", "limits": {"max-queues": 5}}]},
        {"vhosts": [{"name": "v", "limits": [{"name": "max-queues", "value": "x"}]}]},
    ],
)
async def test_a_document_with_a_bad_policy_changes_nothing(
    api: httpx.AsyncClient, more: dict[str, Any]
) -> None:
    answer = await ok(api.post("/definitions", json=EXPORT | more), 400)
    (refused,) = answer["refused"]
    assert answer["reason"] == f"nothing was imported: {refused}"
    assert await ok(api.get("/cluster-name")) != {"name": "old"}
    assert [row["name"] for row in await ok(api.get("/vhosts"))] == ["/"]


async def test_every_policy_that_applies_is_listed_the_one_in_force_first(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q", arguments=CLASSIC)
    await ok(api.put("/exchanges/%2F/q", json={"type": "fanout"}), 201)

    async def policy(name: str, **others: object) -> None:
        row = {"pattern": "^q", "definition": {"max-length": 5}, **others}
        await ok(api.put(f"/policies/%2F/{name}", json=row), 201)

    await policy("all")
    await policy("first", priority=7, **{"apply-to": "classic_queues"})
    await policy("other-name", pattern="^x")
    await policy("quorum", **{"apply-to": "quorum_queues"})
    await policy("stream-key", definition={"max-age": "1D"})
    await policy("exchange", priority=1, definition={"alternate-exchange": "a"},
                 **{"apply-to": "exchanges"})  # fmt: skip

    async def names(path: str) -> list[str]:
        return [row["name"] for row in await ok(api.get(f"/convoy/{path}/policies"))]

    assert await names("queues/%2F/q") == ["first", "all"]
    assert await names("exchanges/%2F/q") == ["exchange", "all", "stream-key"]
    for path in ("queues/%2F/none", "exchanges/%2F/none", "queues/none/q"):
        await ok(api.get(f"/convoy/{path}/policies"), 404)
