"""Ordered topics over HTTP: requests, permissions, refusals and their status."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from convoymq.edges.http.handlers.topics import routes as topic_routes
from convoymq.edges.http.topics import refusal_of
from convoymq.model.errors import NotServed, PreconditionFailed, Unavailable
from convoymq.topics.rules.refusals import (
    BadCut,
    BadPosition,
    BadTopic,
    ChangeRunning,
    Code,
    DataExpired,
    GroupLive,
    NoKey,
    NotAdjacent,
    StaleRoute,
    UnknownPartition,
)
from tests.unit.edges.http.test_api import api, client, cluster, ok
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]

CHANGE = {"change_id": "c1", "kind": "split", "phase": "prepared"}
PARKED = {"key": b"\xff", "lp": 3}
ORDERS = "/topics/%2F/orders"


class FakeAdmin:
    """Notes what it is asked for; raises what a test tells it to."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.refusal: Exception | None = None
        self.answers: dict[str, Any] = {
            "list": [{"vhost": "/", "name": "orders"}, {"vhost": "other", "name": "o"}],
            "describe": {"vhost": "/", "name": "orders"},
            "create": True,
            "route": [{"pid": 0}],
            "split": CHANGE, "merge": CHANGE, "move": CHANGE, "change": CHANGE,
            "groups": [{"group": "g"}],
            "lag": [{"pid": 0}],
            "seek": {"group": "g"},
            "accept_loss": [{"pid": 0, "first": 1, "end": 5}],
            "losses": [{"group": "g", "pid": 3}],
        }  # fmt: skip

    @property
    def parked(self) -> FakeAdmin:
        made = FakeAdmin("parked.")
        made.asked, made.answers = self.asked, {"list": [PARKED]}
        return made

    @property
    def drains(self) -> FakeAdmin:
        made = FakeAdmin("drains.")
        made.asked, made.answers = self.asked, {"drain": [{"pid": 0}], "report": [{"node": "n3"}]}
        return made

    def __getattr__(self, name: str) -> Any:
        async def method(*args: Any, **more: Any) -> Any:
            self.asked.append((self.prefix + name, args, more))
            if self.refusal is not None:
                raise self.refusal
            return None if args[2:] == ("c2",) else self.answers.get(name)

        return method


@pytest.fixture
def admin(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    """A topic `orders` with a group `g`."""
    made = FakeAdmin()
    broker = cluster.nodes[1].broker
    monkeypatch.setattr(type(broker), "topics", made)
    place = broker.metadata.tree.vhosts["/"]
    place.topics["orders"] = SimpleNamespace(groups={"g": None})  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "asked"),
    [
        ("GET", "/topics", None, 200, ("list", (), {})),
        ("GET", "/topics/%2F", None, 200, ("list", ("/",), {})),
        ("GET", ORDERS, None, 200, ("describe", ("/", "orders"), {})),
        (
            "PUT", "/topics/%2F/new", {"partitions": 4}, 201,
            ("create", ("/", "new"),
             {"partitions": 4, "logical": 1024, "mode": "strict", "settings": {}}),
        ),
        (
            "PUT", "/topics/%2F/new", {"partitions": 4, "logical": 8, "mode": "weak"}, 201,
            ("create", ("/", "new"),
             {"partitions": 4, "logical": 8, "mode": "weak", "settings": {}}),
        ),
        (
            "PUT", "/topics/%2F/new",
            {"partitions": 1, "max-age": "7D", "max-length-bytes": 9}, 201,
            ("create", ("/", "new"),
             {"partitions": 1, "logical": 1024, "mode": "strict",
              "settings": {"max-age": "7D", "max-length-bytes": 9}}),
        ),
        ("DELETE", ORDERS, None, 204, ("delete", ("/", "orders"), {})),
        (
            "PUT", ORDERS + "/autoscale", {"autoscale": "on", "autoscale-unit": None}, 204,
            ("set_autoscale", ("/", "orders", {"autoscale": "on", "autoscale-unit": None}), {}),
        ),
        (
            "GET", ORDERS + "/route", None, 200,
            ("route", ("/", "orders", None), {"lineage": False}),
        ),
        (
            "GET", ORDERS + "/route?version=3", None, 200,
            ("route", ("/", "orders", 3), {"lineage": False}),
        ),
        (
            "GET", ORDERS + "/route?lineage=true", None, 200,
            ("route", ("/", "orders", None), {"lineage": True}),
        ),
        (
            "POST", ORDERS + "/split", {"pid": 0, "at": [5, 9]}, 202,
            ("split", ("/", "orders", 0, (5, 9)), {"change_id": ""}),
        ),
        (
            "POST", ORDERS + "/split", {"pid": 0, "change_id": "a:1"}, 202,
            ("split", ("/", "orders", 0, ()), {"change_id": "a:1"}),
        ),
        (
            "POST", ORDERS + "/merge", {"pids": [0, 1], "change_id": "m" * 64}, 202,
            ("merge", ("/", "orders", (0, 1)), {"change_id": "m" * 64}),
        ),
        (
            "POST", ORDERS + "/move", {"pid": 0, "node": "n2"}, 202,
            ("move", ("/", "orders", 0, 2), {"change_id": ""}),
        ),
        (
            "POST", ORDERS + "/move", {"pid": 0, "node": "3", "change_id": "M_3"}, 202,
            ("move", ("/", "orders", 0, 3), {"change_id": "M_3"}),
        ),
        ("GET", ORDERS + "/changes", None, 200, ("change", ("/", "orders"), {})),
        ("GET", ORDERS + "/changes/c1", None, 200, ("change", ("/", "orders", "c1"), {})),
        ("DELETE", ORDERS + "/changes/c1", None, 204, ("abort", ("/", "orders", "c1"), {})),
        ("POST", ORDERS + "/seal", {"pid": 3}, 202, ("seal", ("/", "orders", 3), {})),
        (
            "POST", ORDERS + "/declare-lost", {"pid": 3}, 204,
            ("declare_lost", ("/", "orders", 3), {}),
        ),
        ("GET", ORDERS + "/losses", None, 200, ("losses", ("/", "orders"), {})),
        (
            "PUT", ORDERS + "/groups/new", {}, 204,
            ("create_group", ("/", "orders", "new", "earliest", None), {}),
        ),
        (
            "PUT", ORDERS + "/groups/new", {"advance": "dag", "time": 5}, 204,
            ("create_group", ("/", "orders", "new", 5, "dag"), {}),
        ),
        ("POST", "/topics/drain", {"node": "n3"}, 200, ("drains.drain", (3,), {})),
        ("GET", "/convoy/topics/drains", None, 200, ("drains.report", (), {})),
        ("DELETE", "/convoy/topics/drains/n3", None, 204, ("drains.revive", (3,), {})),
        ("GET", ORDERS + "/groups", None, 200, ("groups", ("/", "orders"), {})),
        ("GET", ORDERS + "/groups/g/lag", None, 200, ("lag", ("/", "orders", "g"), {})),
        ("DELETE", ORDERS + "/groups/g", None, 204, ("delete_group", ("/", "orders", "g"), {})),
        (
            "POST", ORDERS + "/groups/g/seek", {"position": "earliest"}, 200,
            ("seek", ("/", "orders", "g", "earliest"), {}),
        ),
        (
            "POST", ORDERS + "/groups/g/seek", {"time": 1700}, 200,
            ("seek", ("/", "orders", "g", 1700), {}),
        ),
        (
            "POST", ORDERS + "/groups/g/seek", {"vector": {"0": 5, "1": 7}}, 200,
            ("seek", ("/", "orders", "g", {0: 5, 1: 7}), {}),
        ),
        (
            "POST", ORDERS + "/groups/g/accept-loss", None, 200,
            ("accept_loss", ("/", "orders", "g"), {}),
        ),
        ("GET", ORDERS + "/groups/g/park", None, 200, ("parked.list", ("/", "orders", "g"), {})),
        (
            "POST", ORDERS + "/groups/g/park/resume", {"keys": ["k"]}, 204,
            ("parked.resume", ("/", "orders", "g", b"k"), {}),
        ),
        (
            "POST", ORDERS + "/groups/g/park/skip", {"keys": ["/w=="], "encoding": "base64"}, 204,
            ("parked.skip", ("/", "orders", "g", b"\xff"), {}),
        ),
        (
            "POST", ORDERS + "/groups/g/park/retry", {"keys": ["k"]}, 204,
            ("parked.resume", ("/", "orders", "g", b"k"), {"once": True}),
        ),
        (
            "POST", ORDERS + "/groups/g/park/replace",
            {"keys": ["k"], "payload": "/w==", "payload_encoding": "base64"}, 204,
            ("parked.replace", ("/", "orders", "g", b"k", b"\xff", ANY), {}),
        ),
    ],
)  # fmt: skip
async def test_what_requests_ask_for(
    api: httpx.AsyncClient,
    admin: FakeAdmin,
    method: str,
    path: str,
    body: Any,
    status: int,
    asked: tuple[str, tuple[Any, ...], dict[str, Any]],
) -> None:
    await ok(api.request(method, path, json=body), status)
    assert admin.asked[-1] == asked


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("PUT", "/topics/%2F/new", {}, 400, "key partitions is missing"),
        ("PUT", "/topics/%2F/new", {"partitions": -1}, 400, "-1 is not a number"),
        ("PUT", "/topics/%2F/new", {"partitions": True}, 400, "True is not a number"),
        ("PUT", "/topics/%2F/new", {"partitions": 1, "mode": 3}, 400, "key mode"),
        ("PUT", "/topics/none/new", {"partitions": 1}, 404, "no vhost 'none'"),
        ("GET", "/topics/none", None, 404, "no vhost 'none'"),
        ("GET", "/topics/%2F/none", None, 404, "no topic 'none' in vhost '/'"),
        ("DELETE", "/topics/%2F/none", None, 404, "no topic 'none'"),
        ("GET", ORDERS + "/route?version=x", None, 400, "'x' is not a number"),
        ("GET", ORDERS + "/route?version=1&lineage=true", None, 400, "leave version out"),
        ("PUT", ORDERS + "/autoscale", {}, 400, "give some of autoscale, autoscale-target"),
        ("PUT", ORDERS + "/autoscale", {"autoscale": [1]}, 400, "key autoscale: [1] is no"),
        ("GET", "/topics/%2F/others/autoscale", None, 404, "no topic 'others'"),
        ("POST", ORDERS + "/split", {}, 400, "key pid is missing"),
        ("POST", ORDERS + "/split", {"pid": 0, "at": 5}, 400, "key at is not a list"),
        ("POST", ORDERS + "/split", {"pid": 0, "at": ["a"]}, 400, "'a' is not a number"),
        ("POST", ORDERS + "/split", {"pid": 0, "change_id": "a/b"}, 400, "'a/b' is not 1 to 64"),
        ("POST", ORDERS + "/split", {"pid": 0, "change_id": ".."}, 400, "letter or digit first"),
        ("POST", ORDERS + "/merge", {"pids": [0, 1], "change_id": "m" * 65}, 400, "is not 1 to"),
        ("POST", ORDERS + "/split", {"pid": 0, "change_id": ""}, 400, "is not 1 to 64 letters"),
        ("POST", ORDERS + "/split", {"pid": 0, "change_id": 7}, 400, "change_id is missing or not"),
        (
            "POST", ORDERS + "/move", {"pid": 0, "node": "n2", "change_id": "auto-x"}, 400,
            "ids of nodes begin with auto- or reconcile-",
        ),
        ("POST", ORDERS + "/move", {"pid": 0}, 400, "key node is missing"),
        ("POST", ORDERS + "/move", {"pid": 0, "node": "n9"}, 404, "no node 'n9'"),
        ("POST", "/topics/drain", {"node": "9"}, 404, "no node '9'"),
        ("DELETE", "/convoy/topics/drains/9", None, 404, "no node '9'"),
        ("PUT", ORDERS + "/groups/g", {"advance": "up"}, 400, "advance is one of linear, dag"),
        ("GET", ORDERS + "/changes/c2", None, 404, "change 'c2' of topic 'orders'"),
        ("GET", "/topics/%2F/none/durations", None, 404, "no topic 'none'"),
        ("GET", ORDERS + "/groups/h/lag", None, 404, "no group 'h' of topic 'orders'"),
        ("POST", ORDERS + "/groups/g/seek", {}, 400, "one of position, time and vector"),
        ("PUT", ORDERS, {"partitions": 1, "max-age": [7]}, 400, "max-age: [7] is no setting"),
        (
            "POST", ORDERS + "/groups/g/seek", {"position": "latest", "time": 1}, 400,
            "one of position, time and vector",
        ),
        ("POST", ORDERS + "/groups/g/seek", {"position": "next"}, 400, "earliest, latest"),
        ("POST", ORDERS + "/groups/g/seek", {"vector": {}}, 400, "key vector is not"),
        ("POST", ORDERS + "/groups/g/seek", {"vector": {"a": 1}}, 400, "'a' is not a number"),
        ("POST", ORDERS + "/groups/g/seek", {"vector": {"0": -1}}, 400, "-1 is not a number"),
        ("POST", ORDERS + "/groups/g/park/skip", {}, 400, "keys must be a list"),
        ("POST", ORDERS + "/groups/g/park/replace", {"keys": ["k"]}, 400, "payload is not a"),
        (
            "POST", ORDERS + "/groups/g/park/replace", {"keys": ["k", "l"], "payload": ""}, 400,
            "that of one key",
        ),
        ("POST", ORDERS + "/groups/g/park/skip", {"keys": [7]}, 400, "7 is not a string"),
        (
            "POST", ORDERS + "/groups/g/park/skip", {"keys": ["?"], "encoding": "base64"}, 400,
            "'?' is not base64",
        ),
        (
            "POST", ORDERS + "/groups/g/park/skip", {"keys": ["k"], "encoding": "hex"}, 400,
            "encoding is one of",
        ),
        (
            "POST", ORDERS + "/groups/g/seek", {"vector": {"0": 1, "00": 1}}, 400,
            "names a partition twice",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_meant_is_refused(
    api: httpx.AsyncClient,
    admin: FakeAdmin,
    method: str,
    path: str,
    body: Any,
    status: int,
    text: str,
) -> None:
    answer = await ok(api.request(method, path, json=body), status)
    assert text in answer["reason"]


BODIES = [
    (route.method, "/" + "/".join(route.segments))
    for route in topic_routes
    if route.method in ("PUT", "POST")
]


@pytest.mark.parametrize(("method", "path"), BODIES)
async def test_keys_that_a_request_does_not_know_are_refused(
    api: httpx.AsyncClient, admin: FakeAdmin, method: str, path: str
) -> None:
    """Every request of topics that has a body."""
    at = path.format(vhost="%2F", name="orders", group="g")
    answer = await ok(api.request(method, at, json={"max-agee": "5s"}), 400)
    assert 'key <<"max-agee">> is unknown here; there are' in answer["reason"]
    assert not admin.asked


async def test_the_keys_that_a_request_knows_are_named(
    api: httpx.AsyncClient, admin: FakeAdmin
) -> None:
    body = {"partitions": 1, "max-age": "5s", "max_age": "5s"}
    answer = await ok(api.put("/topics/%2F/new", json=body), 400)
    assert answer["reason"].startswith(
        'key <<"max_age">> is unknown here; there are: partitions, logical, mode, max-age, max-'
    )
    answer = await ok(api.post(ORDERS + "/split", json={"pid": 0, "cuts": [1]}), 400)
    assert answer["reason"] == 'key <<"cuts">> is unknown here; there are: pid, at, change_id'


@pytest.mark.parametrize(
    ("refusal", "status", "error"),
    [
        (BadCut(0, 0, 512, (600,)), 400, "bad_request"),
        (BadTopic("more partitions than logical ones"), 400, "bad_request"),
        (NotAdjacent((0, 2)), 400, "bad_request"),
        (BadPosition("twice"), 400, "bad_request"),
        (UnknownPartition(7), 404, "not_found"),
        (StaleRoute(9, 0, 2), 404, "not_found"),
        (ChangeRunning("c0"), 409, "conflict"),
        (DataExpired(0, 5, 9), 410, "gone"),
        (GroupLive("g", 2), 400, "bad_request"),
        (NoKey(), 400, "bad_request"),
    ],
)
async def test_refusals_of_topics_have_a_status_a_code_and_a_text(
    api: httpx.AsyncClient, admin: FakeAdmin, refusal: Any, status: int, error: str
) -> None:
    admin.refusal = refusal
    answer = await ok(api.post(ORDERS + "/split", json={"pid": 0}), status)
    assert answer == {"error": error, "reason": refusal.text, "code": refusal.code.value}


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (PreconditionFailed("there is a queue of that name"), 400),
        (NotServed("until all nodes have this release"), 400),
        (Unavailable("no majority"), 503),
    ],
)
async def test_refusals_of_the_cluster(
    api: httpx.AsyncClient, admin: FakeAdmin, refusal: Any, status: int
) -> None:
    admin.refusal = refusal
    answer = await ok(api.put("/topics/%2F/new", json={"partitions": 1}), status)
    assert refusal.text in answer["reason"]


async def test_durations_of_changes_are_those_that_the_node_has_seen(
    api: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    cluster.raise_versions()
    topics = cluster.nodes[1].broker.topics
    await topics.create("/", "orders", partitions=1)
    assert await ok(api.get(ORDERS + "/durations")) == []
    split = await topics.split("/", "orders", 0)
    await topics.wait_change("/", "orders", split["change_id"])
    (row,) = await ok(api.get(ORDERS + "/durations"))
    assert (row["change_id"], row["kind"], row["phase"]) == (split["change_id"], "split", "done")
    assert list(row["phases_ms"]) == ["prepared", "targets_ready", "sealing", "sealed", "published"]


async def test_a_request_that_is_repeated_gets_the_same_change(
    api: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    cluster.raise_versions()
    topics = cluster.nodes[1].broker.topics
    await topics.create("/", "orders", partitions=1, logical=8)
    asked = {"pid": 0, "change_id": "mine"}
    begun = await ok(api.post(ORDERS + "/split", json=asked), 202)
    await topics.wait_change("/", "orders", begun["change_id"])
    again = await ok(api.post(ORDERS + "/split", json=asked), 202)
    assert (again["change_id"], again["phase"], again["targets"]) == (
        "mine", "done", begun["targets"],
    )  # fmt: skip
    assert await ok(api.get(ORDERS + "/changes/mine")) == again
    answer = await ok(api.post(ORDERS + "/split", json=asked | {"pid": 1}), 400)
    assert "change 'mine' of topic 'orders' in vhost '/' is the split of 0" in answer["reason"]


async def test_a_parked_key_that_is_no_text_is_shown(
    api: httpx.AsyncClient, admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ORDERS + "/groups/g/park"
    assert await ok(api.get(path)) == [{"key": "/w==", "encoding": "base64", "lp": 3}]
    monkeypatch.setitem(PARKED, "key", b"k")
    assert await ok(api.get(path)) == [{"key": "k", "encoding": "string", "lp": 3}]


def test_every_code_has_a_status() -> None:
    assert {refusal_of(code)[0] for code in Code} == {400, 404, 409, 410}


async def test_permissions(cluster: FakeCluster, api: httpx.AsyncClient, admin: FakeAdmin) -> None:
    await ok(api.put("/users/reader", json={"password": "p", "tags": "management"}), 201)
    permissions = {"configure": "^mine$", "write": "", "read": "^orders/g$"}
    await ok(api.put("/permissions/%2F/reader", json=permissions), 201)
    async with client(cluster, "reader", "p") as reader:
        assert await ok(reader.get("/topics")) == [{"vhost": "/", "name": "orders"}]
        await ok(reader.get(ORDERS + "/route"))
        await ok(reader.put("/topics/%2F/mine", json={"partitions": 1}), 201)
        for path in ("split", "merge", "move"):
            await ok(reader.post(f"{ORDERS}/{path}", json={}), 401)
        await ok(reader.put("/topics/%2F/other", json={"partitions": 1}), 401)
        await ok(reader.delete(ORDERS), 401)
        await ok(reader.post("/topics/drain", json={"node": "1"}), 401)
        await ok(reader.get("/convoy/topics/drains"), 401)
        await ok(reader.delete("/convoy/topics/drains/1"), 401)
        await ok(reader.put(ORDERS + "/groups/other", json={}), 401)
        await ok(reader.post(ORDERS + "/declare-lost", json={"pid": 0}), 401)
        await ok(reader.post(ORDERS + "/groups/g/seek", json={"time": 1}))
    await ok(api.put("/permissions/%2F/reader", json=permissions | {"read": ""}), 204)
    async with client(cluster, "reader", "p") as reader:
        await ok(reader.post(ORDERS + "/groups/g/seek", json={"time": 1}), 401)
        await ok(reader.delete(ORDERS + "/groups/g"), 401)
