"""The HTTP API for operators without a user: what they may, on which node, and what only their
tools ask for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from convoymq.broker.alarms import Watermarks
from convoymq.broker.node_view import NodeView
from convoymq.model.config import Config
from convoymq.model.errors import BrokerError, Misuse, NotFound, Unavailable
from convoymq.node import operator_access
from convoymq.node.operator_access import OperatorAccess
from tests.unit.queues.fake_cluster import FakeCluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        yield made


def access_of(cluster: FakeCluster, number: int) -> OperatorAccess:
    fake = cluster.nodes[number]
    node = SimpleNamespace(
        id=number,
        broker=fake.broker,
        usable=True,
        shown_name=f"n{number}",
        config=Config(),
        edges=(),
    )
    return OperatorAccess(node, fake.control)  # type: ignore[arg-type]


@pytest.fixture
def accesses(cluster: FakeCluster) -> dict[int, OperatorAccess]:
    return {number: access_of(cluster, number) for number in cluster.nodes}


async def ask(
    access: OperatorAccess, method: str, path: str, body: Any = None, status: int = 200,
    node: str = "", **more: object,
) -> Any:  # fmt: skip
    """Carries out a request, and returns the value of the answer."""
    text = None if body is None else json.dumps(body)
    request = {"op": "operator.http", "method": method, "path": f"/api/{path}", "body": text,
               "node": node, **more}  # fmt: skip
    found: Any = await access.handlers["operator.http"](request, lambda _text: None)
    assert found["status"] == status, found
    return json.loads(found["body"]) if found["body"] else None


async def test_an_operator_is_an_administrator_without_permissions_of_its_own(
    cluster: FakeCluster, accesses: dict[int, OperatorAccess]
) -> None:
    api = accesses[1]
    assert await ask(api, "GET", "whoami") == {
        "name": "",
        "tags": ["administrator", "impersonator"],
    }
    await ask(api, "PUT", "vhosts/v", {}, 201)
    assert [row["vhost"] for row in await ask(api, "GET", "permissions")] == ["/"]
    await ask(api, "PUT", "queues/v/q", {"arguments": {"x-queue-type": "quorum"}}, 201)
    await ask(api, "POST", "bindings/v/e/amq.topic/q/q", {"routing_key": "k"}, 201)
    assert [row["name"] for row in await ask(api, "GET", "queues")] == ["q"]
    await ask(api, "DELETE", "queues/v/q", status=204)
    await ask(api, "GET", "queues/v/q", status=404)
    # Nobody can log in as the operator.
    assert "" not in cluster.nodes[1].machine.users


async def test_a_request_goes_to_the_node_that_is_named(
    accesses: dict[int, OperatorAccess],
) -> None:
    for node, name in (("", "n1"), ("n1", "n1"), ("1", "n1"), ("n3", "n3"), ("2", "n2")):
        found = await ask(accesses[1], "GET", "overview", node=node)
        assert found["node"] == name
        request: dict[str, object] = {"op": "operator.state", "node": node}
        state: Any = await accesses[1].handlers["operator.state"](request, print)
        assert (state["name"], state["running"]) == (name, True)
    with pytest.raises(NotFound, match="node n9 is not known to node n1"):
        await ask(accesses[1], "GET", "overview", node="n9")


async def test_headers_and_queries_arrive(accesses: dict[int, OperatorAccess]) -> None:
    for name in ("a", "b"):
        await ask(accesses[1], "PUT", f"queues/%2F/{name}", {}, 201)
    rows = await ask(accesses[1], "GET", "queues?columns=name&sort=name&sort_reverse=true")
    assert rows == [{"name": "b"}, {"name": "a"}]
    await ask(accesses[1], "DELETE", "connections/none", status=404, headers={"X-Reason": "x"})


async def test_too_much_for_a_link_is_refused(
    accesses: dict[int, OperatorAccess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_access, "FORWARDED_BYTES_MAX", 100)
    with pytest.raises(Misuse, match="ask on that node's machine"):
        await ask(accesses[1], "POST", "definitions", "x" * 200, node="n2")
    with pytest.raises(BrokerError, match="ask on this node's machine"):
        await ask(accesses[1], "GET", "overview", node="n2")
    # On the own machine there is no link.
    await ask(accesses[1], "GET", "overview")


async def test_a_node_without_a_majority_says_so(cluster: FakeCluster) -> None:
    node = SimpleNamespace(id=1, broker=None, usable=False, shown_name="n1")
    access = OperatorAccess(node, cluster.nodes[1].control)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="node n1 is starting"):
        await ask(access, "GET", "overview")
    state: Any = await access.handlers["operator.state"]({"op": "operator.state"}, print)
    assert state == {"id": 1, "name": "n1", "running": False, "majority": False}
    with pytest.raises(NotFound):
        await ask(access, "GET", "overview", node="n2")


async def test_what_is_no_request_is_refused(accesses: dict[int, OperatorAccess]) -> None:
    for more in ({"headers": ["x"]}, {"body": 7}):
        request: dict[str, object] = {"op": "operator.http", "path": "/api/overview", **more}
        with pytest.raises(Misuse, match="not a request"):
            await accesses[1].handlers["operator.http"](request, print)


async def test_passwords_can_be_tried(accesses: dict[int, OperatorAccess]) -> None:
    path = "convoy/users/guest/authenticate"
    for password, good in (("guest", True), ("wrong", False)):
        found = await ask(accesses[1], "POST", path, {"password": password})
        assert found == {"authenticated": good}
    nobody = await ask(accesses[1], "POST", "convoy/users/x/authenticate", {"password": ""})
    assert nobody == {"authenticated": False}


async def test_feature_flags_are_the_versions_of_machines(
    cluster: FakeCluster,
    accesses: dict[int, OperatorAccess],
) -> None:
    machine = cluster.nodes[1].machine
    for version, state in ((1, "disabled"), (2, "enabled")):
        machine.set_version(version)
        rows = await ask(accesses[1], "GET", "feature-flags")
        flags = {row["name"]: row["state"] for row in rows}
        assert flags["metadata_version_2"] == state
    # Without a queue of a kind, what every node supports is enabled.
    assert flags["quorum_version_2"] == "disabled"
    cluster.nodes[1].host.floor_of = lambda _kind: 2
    rows = await ask(accesses[1], "GET", "feature-flags")
    assert {row["name"]: row["state"] for row in rows}["quorum_version_2"] == "enabled"


async def test_every_member_of_a_queue_tells_of_its_log(
    cluster: FakeCluster, accesses: dict[int, OperatorAccess]
) -> None:
    await ask(accesses[1], "PUT", "queues/%2F/q", {"arguments": {"x-queue-type": "quorum"}}, 201)
    cluster.down.add(3)
    rows = await ask(accesses[1], "GET", "queues/quorum/%2F/q/status")
    assert (rows[2]["Node Name"], rows[2]["Raft State"]) == ("n3", "nodedown")
    assert [row["Raft State"] for row in rows[:2]] == ["leader", "follower"]
    assert rows[0].keys() == {
        "Node Name", "Raft State", "Membership", "Last Log Index", "Last Written", "Last Applied",
        "Commit Index", "Snapshot Index", "Term", "Machine Version", "Reason",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"memory": {"relative": 0.5}}, (500, 7)), ({"memory": {"absolute": 3}}, (3, 7)),
        ({"memory": {"relative": 0}}, (0, 7)), ({"disk": {"relative": 2}}, (600, 2000)),
        ({"disk": {"absolute": 9}, "memory": {"absolute": 8}}, (8, 9)), ({}, (600, 7)),
    ],
)  # fmt: skip
async def test_watermarks_move(
    cluster: FakeCluster, accesses: dict[int, OperatorAccess], body: Any, found: tuple[int, int]
) -> None:
    marks = Watermarks(600, 7, 1000)
    cluster.nodes[1].broker.cluster.node = NodeView(watermarks=marks)
    await ask(accesses[1], "PUT", "convoy/node/watermarks", body, 204)
    assert (marks.memory, marks.disk) == found


@pytest.mark.parametrize(
    "body",
    [
        {"memory": {"relative": 1.5}}, {"memory": {"relative": -1}}, {"memory": {"absolute": -1}},
        {"memory": {"absolute": "1GB"}}, {"disk": {"other": 1}}, {"disk": 5},
        {"disk": {"absolute": 1, "relative": 1}},
    ],
)  # fmt: skip
async def test_watermarks_that_make_no_sense_are_refused(
    cluster: FakeCluster, accesses: dict[int, OperatorAccess], body: Any
) -> None:
    marks = Watermarks(600, 7, 1000)
    cluster.nodes[1].broker.cluster.node = NodeView(watermarks=marks)
    await ask(accesses[1], "PUT", "convoy/node/watermarks", body, 400)
    assert (marks.memory, marks.disk) == (600, 7)


async def test_requests_do_not_wait_for_each_other(accesses: dict[int, OperatorAccess]) -> None:
    asked = (ask(accesses[1], "GET", "overview", node=node) for node in ("", "n2", "n3"))
    assert [row["node"] for row in await asyncio.gather(*asked)] == ["n1", "n2", "n3"]


@pytest.mark.provokes("operator.requested")
async def test_who_asks_for_more_than_reading_is_logged(
    accesses: dict[int, OperatorAccess],
) -> None:
    """At the node of the machine and at the one that does it; secrets stay out."""
    who: dict[str, Any] = {"uid": 1234, "pid": 99}
    with structlog.testing.capture_logs() as logged:
        await ask(accesses[1], "GET", "users", **who)
        body = {"password": "secret", "tags": ""}
        await ask(accesses[1], "PUT", "users/new?reason=secret", body, 201, node="n2", **who)
        await ask(accesses[1], "DELETE", "users/nobody", None, 404, **who)
        with pytest.raises(NotFound):
            await ask(accesses[1], "DELETE", "users/new", node="n9", **who)
    events = [entry for entry in logged if entry["event"] == "operator.requested"]
    assert "secret" not in str(events)
    facts = [(e["method"], e["path"], e["at"], e["came_to"], e["result"]) for e in events]
    assert facts == [
        ("PUT", "/api/users/new", 2, 1, 201),
        ("PUT", "/api/users/new", 2, 1, 201),
        ("DELETE", "/api/users/nobody", 1, 1, 404),
    ]
    assert {(entry["uid"], entry["pid"]) for entry in events} == {(1234, 99)}


async def test_a_request_that_fails_is_logged_with_its_reason(cluster: FakeCluster) -> None:
    node = SimpleNamespace(id=1, broker=None, usable=False, shown_name="n1")
    access = OperatorAccess(node, cluster.nodes[1].control)  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logged, pytest.raises(Unavailable):
        await ask(access, "PUT", "users/new", {}, uid=7)
    (event,) = [entry for entry in logged if entry["event"] == "operator.requested"]
    assert event["uid"] == 7
    assert "starting" in event["result"]
