"""Browsing a queue and operations on chosen messages, over HTTP and in a cluster whose replication
is immediate."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from convoymq.broker import browse as browse_module
from convoymq.edges.http.selections import place_of
from convoymq.queues.quorum import browsing
from convoymq.queues.quorum.moves import QUEUE, MoveSpec
from tests.patience import PATIENCE_S
from tests.unit.edges.http.test_api import api, client, cluster, ok
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]

WORK, DEAD, PARKED = "work", "dead", "parked"


async def publish(api: httpx.AsyncClient, queue: str, payload: str, **properties: Any) -> None:
    body = {
        "routing_key": queue, "payload": payload, "payload_encoding": "string",
        "properties": properties,
    }  # fmt: skip
    assert (await ok(api.post("/exchanges/%2F/amq.default/publish", json=body)))["routed"]


async def take(api: httpx.AsyncClient, queue: str, count: int, mode: str) -> list[dict[str, Any]]:
    body = {"count": count, "ackmode": mode, "encoding": "auto"}
    rows: list[dict[str, Any]] = await ok(api.post(f"/queues/%2F/{queue}/get", json=body))
    return rows


async def drained(api: httpx.AsyncClient, queue: str) -> list[str]:
    return [row["payload"] for row in await take(api, queue, 1000, "ack_requeue_false")]


async def browse(api: httpx.AsyncClient, queue: str, code: int = 200, **body: Any) -> Any:
    return await ok(api.post(f"/convoy/queues/%2F/{queue}/messages/browse", json=body), code)


async def seen(api: httpx.AsyncClient, queue: str, **body: Any) -> list[str]:
    """Payloads, page by page."""
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = await browse(api, queue, **{**body, **cursor})
        found += [row["payload"] for row in page["messages"]]
        if page["cursor"] is None:
            return found
        cursor = {"cursor": page["cursor"]}


async def ids(api: httpx.AsyncClient, queue: str, *payloads: str) -> list[str]:
    rows = (await browse(api, queue))["messages"]
    by_payload = {row["payload"]: row["id"] for row in rows}
    return [by_payload[each] for each in payloads]


async def act(
    api: httpx.AsyncClient, source: str, verb: str, code: int = 200, /, **body: Any
) -> dict[str, Any]:
    """Begins an operation and waits for its end."""
    begun = await ok(api.post(f"/convoy/queues/%2F/{source}/messages/{verb}", json=body), code)
    if code != 200:
        return dict(begun)
    path = f"/convoy/queues/%2F/{source}/operations/{begun['operation']}"
    async with asyncio.timeout(PATIENCE_S):
        while (found := await ok(api.get(path)))["state"] != "done":
            await asyncio.sleep(0.01)
    return dict(found)


def counts(found: dict[str, Any]) -> dict[str, int]:
    names = ("selected", "gone", "deleted", "moved", "returned")
    return {name: found[name] for name in names if found[name]}


@pytest.fixture
async def letters(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    """Three dead letters, the middle one of another exchange and with a header."""
    cluster.raise_versions()
    for name in (DEAD, PARKED):
        await cluster.queue(1, name)
    arguments = {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": DEAD,
    }
    declaration = {"durable": True, "arguments": arguments}
    await ok(api.put(f"/queues/%2F/{WORK}", json=declaration), 201)
    await ok(api.post(f"/bindings/%2F/e/amq.direct/q/{WORK}", json={"routing_key": "blue"}), 201)
    await publish(api, WORK, "one")
    body = {
        "routing_key": "blue", "payload": "two", "payload_encoding": "string",
        "properties": {"headers": {"color": "blue", "n": 2}, "message_id": "id-2"},
    }  # fmt: skip
    assert (await ok(api.post("/exchanges/%2F/amq.direct/publish", json=body)))["routed"]
    await publish(api, WORK, "three", headers={"n": 3})
    assert len(await take(api, WORK, 3, "reject_requeue_false")) == 3

    async def arrived() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await browse(api, DEAD))["messages_ready"] < 3:
                await asyncio.sleep(0.01)

    await arrived()


async def test_pages_show_all_messages_in_the_order_of_delivery(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    cluster.raise_versions()
    await cluster.queue(1, "q")
    for number in range(7):
        await publish(api, "q", str(number), headers={"n": number})
    await take(api, "q", 3, "reject_requeue_true")
    await publish(api, "q", "high", priority=9)
    await publish(api, "q", "low", priority=0)
    for count in (1, 2, 3, 100):
        payloads = await seen(api, "q", count=count)
        assert payloads == ["0", "1", "2", "high", "3", "4", "5", "6", "low"]
    page = await browse(api, "q", count=2, filter={"position": {"from": 3}})
    assert [row["position"] for row in page["messages"]] == [3, 4]
    first = page["messages"][0]
    assert (first["redelivered"], first["delivery_count"], first["payload"]) == (True, 1, "2")
    assert first["properties"]["headers"] == {"n": 2}
    assert first["enqueued_at"] > 0
    assert (await ok(api.get("/convoy/queues/%2F/q/messages?count=1")))["messages"][0]["id"]
    assert await drained(api, "q") == ["0", "1", "2", "high", "3", "4", "5", "6", "low"]


@pytest.mark.parametrize(("runs", "examined"), [(1, 100), (2, 3), (100, 1)])
async def test_small_pages_add_up(
    cluster: FakeCluster,
    api: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    runs: int,
    examined: int,
) -> None:
    """The order of what came back to the tail, among fresh messages; led by another node."""
    cluster.raise_versions()
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": -1}
    await cluster.queue(2, "q", arguments=arguments)
    for number in range(6):
        await publish(api, "q", str(number))
    await take(api, "q", 2, "ack_requeue_true")
    for number in range(6, 9):
        await publish(api, "q", str(number))
    await take(api, "q", 1, "ack_requeue_true")
    await take(api, "q", 1, "reject_requeue_true")
    await publish(api, "q", "low", priority=1)
    monkeypatch.setattr(browsing, "RUNS_MAX", runs)
    monkeypatch.setattr(browsing, "EXAMINED_MAX", examined)
    shown = await seen(api, "q")
    late = await seen(api, "q", filter={"position": {"from": 4}})
    few = await seen(api, "q", filter={"position": {"from": 2, "to": 5}})
    # What was seen last leaves between two pages.
    page = await browse(api, "q", count=3)
    gone = [row["id"] for row in page["messages"]]
    await act(api, "q", "delete", ids=gone)
    rest = await seen(api, "q", cursor=page["cursor"]) if page["cursor"] else []
    left = await drained(api, "q")
    assert shown == [row["payload"] for row in page["messages"]] + left
    assert len(shown) == 10
    assert (late, few) == (shown[3:], shown[1:5])
    # Nothing is shown twice; what came back and moved up may be left out.
    assert rest == left[len(left) - len(rest) :]


async def test_without_a_leader_the_replica_here_answers(
    cluster: FakeCluster, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.queue(2, "q")
    await publish(api, "q", "x")
    monkeypatch.setattr(browse_module, "LEADER_TIMEOUT_S", 0.1)
    cluster.has_leaders = False
    assert await seen(api, "q") == ["x"]
    answer = await ok(api.get("/convoy/queues/%2F/q/operations"), 503)
    assert answer["error"] == "service_unavailable"


async def test_filters_choose_by_position_time_and_headers(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    for number in range(4):
        await publish(api, "q", str(number), headers={"n": number, f"h{number % 2}": True})
        await asyncio.sleep(0.002)
    rows = (await browse(api, "q"))["messages"]
    times = [row["enqueued_at"] for row in rows]
    for wanted, expected in (
        ({"position": {"from": 2, "to": 3}}, "12"),
        ({"position": {"from": 9}}, ""),
        ({"time": {"from": times[1], "to": times[2]}}, "12"),
        ({"headers": {"n": 3}}, "3"),
        ({"headers": {"n": "3"}}, "3"),
        ({"headers": {"h1": "true"}}, "13"),
        ({"headers": {"n": 3, "h1": False}}, ""),
        ({"header_exists": ["h0"]}, "02"),
        ({"first_death": {"queue": "x"}}, ""),
    ):
        assert "".join(await seen(api, "q", filter=wanted, count=1)) == expected
    for wrong in ({"colour": 1}, {"position": {"from": "x"}}, {"header_exists": [1]}):
        await browse(api, "q", 400, filter=wrong)
    for wrong in ("x", "1.2", "0.0.0.0.0.0"):
        await browse(api, "q", 400, cursor=wrong)


async def test_bodies_are_cut(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await cluster.queue(1, "q")
    await publish(api, "q", "abcdef")
    row = (await browse(api, "q", truncate=3))["messages"][0]
    assert (row["payload"], row["payload_bytes"], row["truncated"]) == ("abc", 6, True)
    row = (await browse(api, "q", truncate=6, encoding="base64"))["messages"][0]
    assert (row["payload"], row["truncated"]) == ("YWJjZGVm", False)


@pytest.mark.usefixtures("letters")
async def test_dead_letters_show_where_they_died(api: httpx.AsyncClient) -> None:
    rows = (await browse(api, DEAD))["messages"]
    assert [row["first_death"]["routing_keys"] for row in rows] == [[WORK], ["blue"], [WORK]]
    assert rows[1]["last_death"] == {
        "queue": WORK, "reason": "rejected", "exchange": "amq.direct", "routing_keys": ["blue"],
    }  # fmt: skip
    for wanted, expected in (
        ({"first_death": {"queue": WORK, "reason": "rejected"}}, ["one", "two", "three"]),
        ({"last_death": {"reason": "expired"}}, []),
        ({"last_death": {"reason": "rejected"}, "headers": {"n": 3}}, ["three"]),
    ):
        assert await seen(api, DEAD, filter=wanted) == expected


@pytest.mark.usefixtures("letters")
async def test_messages_are_deleted_by_name_and_by_filter(api: httpx.AsyncClient) -> None:
    chosen = await ids(api, DEAD, "two")
    found = await act(api, DEAD, "delete", ids=[*chosen, *chosen, "1.2.3"], operation="d")
    assert counts(found) == {"selected": 2, "gone": 1, "deleted": 1}
    assert await act(api, DEAD, "delete", ids=chosen, operation="d") == found
    found = await act(api, DEAD, "delete", filter={"headers": {"n": "3"}})
    assert counts(found) == {"selected": 1, "deleted": 1}
    assert await drained(api, DEAD) == ["one"]
    names = [row["operation"] for row in await ok(api.get(f"/convoy/queues/%2F/{DEAD}/operations"))]
    assert len(names) == 2


@pytest.mark.usefixtures("letters")
async def test_dead_letters_go_back_to_where_they_came_from(api: httpx.AsyncClient) -> None:
    found = await act(api, DEAD, "retry", filter={"first_death": {"queue": WORK}}, operation="r")
    assert counts(found) == {"selected": 3, "moved": 3}
    # The same question again does nothing.
    assert await act(api, DEAD, "retry", filter={}, operation="r") == found
    rows = await take(api, WORK, 10, "reject_requeue_false")
    assert [row["payload"] for row in rows] == ["one", "two", "three"]
    assert [(row["exchange"], row["routing_key"]) for row in rows] == [
        ("", WORK), ("amq.direct", "blue"), ("", WORK),
    ]  # fmt: skip
    # They die again, and it counts.
    async with asyncio.timeout(PATIENCE_S):
        while (await browse(api, DEAD))["messages_ready"] < 3:
            await asyncio.sleep(0.01)
    rows = (await browse(api, DEAD))["messages"]
    assert [row["properties"]["headers"]["x-death"][0]["count"] for row in rows] == [2, 2, 2]
    found = await act(api, DEAD, "retry", filter={}, to="origin")
    assert counts(found) == {"selected": 3, "moved": 3}
    assert await drained(api, WORK) == ["one", "two", "three"]


@pytest.mark.usefixtures("letters")
async def test_messages_are_moved_to_a_queue_and_to_an_exchange(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    chosen = await ids(api, DEAD, "three", "one")
    found = await act(api, DEAD, "move", ids=chosen, queue=PARKED)
    assert counts(found) == {"selected": 2, "moved": 2}
    assert await drained(api, PARKED) == ["three", "one"]
    found = await act(api, DEAD, "move", filter={}, exchange="amq.direct", routing_key="nowhere")
    # Nobody would get it.
    assert counts(found) == {"selected": 1, "returned": 1}
    await cluster.queue(1, "old", arguments={"x-queue-type": "classic"})
    found = await act(api, DEAD, "move", filter={}, exchange="", routing_key="old")
    assert counts(found) == {"selected": 1, "moved": 1}
    assert await drained(api, "old") == ["two"]


@pytest.mark.usefixtures("letters")
async def test_one_message_is_edited_on_its_way(api: httpx.AsyncClient) -> None:
    one, two, three = await ids(api, DEAD, "one", "two", "three")
    found = await act(api, DEAD, "republish", id=one, payload="uno", queue=PARKED, operation="e")
    assert counts(found) == {"selected": 1, "moved": 1}
    assert await act(api, DEAD, "republish", id=one, payload="x", queue=PARKED, operation="e") == (
        found
    )
    await act(api, DEAD, "republish", id=two, payload="ZG9z", payload_encoding="base64")
    properties = {"headers": {"fixed": True}, "content_type": "text/plain", "priority": 7}
    await act(api, DEAD, "republish", id=three, properties=properties)
    assert await drained(api, PARKED) == ["uno"]
    rows = await take(api, WORK, 2, "ack_requeue_false")
    by_payload = {row["payload"]: row["properties"] for row in rows}
    assert by_payload["dos"]["message_id"] == "id-2"
    assert by_payload["dos"]["headers"]["color"] == "blue"
    assert by_payload["three"] == {**properties}
    answer = await act(api, DEAD, "republish", 404, id=f"{one}9", queue=PARKED)
    assert answer["reason"] == "the message is not in the queue any more"


@pytest.mark.usefixtures("letters")
async def test_a_move_that_runs_waits_while_an_alarm_blocks_publishers(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    """And none begins meanwhile."""
    path = f"/convoy/queues/%2F/{DEAD}"
    places = [place_of(each) for each in await ids(api, DEAD, "one", "two", "three")]
    for node in cluster.nodes.values():
        node.broker.alarms.set("disk", on=True)
    broker = cluster.nodes[1].broker
    record = broker.metadata.tree.vhosts["/"].queues[DEAD]
    await broker.browsing.claim(record, "late", places, MoveSpec(to=QUEUE, queue=PARKED).pack())
    async with asyncio.timeout(PATIENCE_S):
        while (found := await ok(api.get(f"{path}/operations/late")))["waits_for"] == "":
            await asyncio.sleep(0.01)
    assert found["waits_for"] == "publishers are blocked by an alarm: disk"
    assert found["moved"] == 0
    await act(api, DEAD, "move", 503, filter={}, queue=PARKED)
    for node in cluster.nodes.values():
        node.broker.alarms.set("disk", on=False)
    async with asyncio.timeout(PATIENCE_S):
        while (await ok(api.get(f"{path}/operations/late")))["state"] != "done":
            await asyncio.sleep(0.01)
    assert await drained(api, PARKED) == ["one", "two", "three"]


@pytest.mark.usefixtures("letters")
async def test_an_edited_message_passes_the_checks_of_a_publish(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    """Neither a value that no publish takes, nor anybody else's validated user-id."""
    await publish(api, DEAD, "pay 1 to bob", user_id="guest")
    await ok(api.put("/users/mallory", json={"password": "p", "tags": "management"}), 201)
    may = {"configure": ".*", "write": ".*", "read": ".*"}
    await ok(api.put("/permissions/%2F/mallory", json=may), 201)
    one, paid = await ids(api, DEAD, "one", "pay 1 to bob")
    refused: list[tuple[str, dict[str, Any], str]] = [
        (one, {"properties": {"expiration": "abc"}}, "invalid expiration 'abc'"),
        (one, {"properties": {"expiration": "-5"}}, "invalid expiration '-5'"),
        (one, {"properties": {"user_id": "guest"}}, "user_id property set to 'guest'"),
        (one, {"properties": {"headers": {"CC": "x"}}}, "unacceptable_type_in_header"),
        (one, {"properties": {"headers": {"x-delay": "soon"}}}, "header 'x-delay'"),
        (one, {"properties": {"reply_to": "amq.rabbitmq.reply-to"}}, "fast reply consumer"),
        (one, {"properties": {"headers": {"a": "x" * 131_072}}}, "properties and headers of"),
        (paid, {"payload": "pay 1000 to mallory"}, "user_id property set to 'guest'"),
    ]
    async with client(cluster, "mallory", "p") as mallory:
        for id, body, reason in refused:
            answer = await act(mallory, DEAD, "republish", 400, id=id, queue=PARKED, **body)
            assert reason in answer["reason"], answer
        edited = {"payload": "pay 1000 to mallory", "properties": {}}
        found = await act(mallory, DEAD, "republish", id=paid, queue=PARKED, **edited)
        assert counts(found) == {"selected": 1, "moved": 1}
    rows = await take(api, PARKED, 9, "ack_requeue_false")
    assert [(row["payload"], row["properties"]) for row in rows] == [("pay 1000 to mallory", {})]


async def test_what_did_not_die_stays(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    cluster.raise_versions()
    await cluster.queue(1, "q")
    # Sent by a publisher, these mean nothing.
    forged = {"x-first-death-queue": "q", "x-first-death-reason": "rejected"}
    await publish(api, "q", "alive", headers=forged)
    found = await act(api, "q", "retry", filter={})
    assert counts(found) == {"selected": 1, "returned": 1}
    assert await drained(api, "q") == ["alive"]


@pytest.mark.usefixtures("letters")
async def test_a_full_target_is_waited_for_or_cancelled(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    arguments = {"x-queue-type": "quorum", "x-max-length": 0, "x-overflow": "reject-publish"}
    await ok(api.put("/queues/%2F/full", json={"arguments": arguments, "durable": True}), 201)
    body = {"routing_key": "full", "payload": "x", "payload_encoding": "string", "properties": {}}
    await ok(api.post("/exchanges/%2F/amq.default/publish", json=body))
    body = {"filter": {}, "queue": "full", "operation": "m"}
    path = f"/convoy/queues/%2F/{DEAD}/operations/m"
    begun = await ok(api.post(f"/convoy/queues/%2F/{DEAD}/messages/move", json=body))
    assert begun["state"] == "running"
    async with asyncio.timeout(PATIENCE_S):
        while (await ok(api.get(path)))["waits_for"] != "queue 'full' is full":
            await asyncio.sleep(0.01)
    await ok(api.delete("/queues/%2F/full"), 204)
    async with asyncio.timeout(PATIENCE_S):
        while (await ok(api.get(path)))["state"] != "done":
            await asyncio.sleep(0.01)
    assert counts(await ok(api.delete(path))) == {"selected": 3, "returned": 3}
    assert await drained(api, DEAD) == ["one", "two", "three"]
    await ok(api.delete(f"/convoy/queues/%2F/{DEAD}/operations/unknown"), 404)
    await ok(api.get(f"/convoy/queues/%2F/{DEAD}/operations/unknown"), 404)


@pytest.mark.usefixtures("letters")
async def test_another_leader_goes_on(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    tree = cluster.nodes[1].broker.metadata.tree
    group = tree.vhosts["/"].queues[DEAD].group
    queues = {n: node.broker.local.queues[group] for n, node in cluster.nodes.items()}
    leader = queues[cluster.groups[group].leader]
    leader.operation_mover._routes = None
    body = {"filter": {}, "queue": PARKED, "operation": "m"}
    await ok(api.post(f"/convoy/queues/%2F/{DEAD}/messages/move", json=body))
    other = next(n for n in queues if n != cluster.groups[group].leader)
    cluster.groups[group].leader = other
    for node, queue in queues.items():
        cluster.groups[group].replicas[node].is_leader = node == other
        queue.on_leader(group, other, 2)
    path = f"/convoy/queues/%2F/{DEAD}/operations/m"
    async with asyncio.timeout(PATIENCE_S):
        while (await ok(api.get(path)))["state"] != "done":
            await asyncio.sleep(0.01)
    assert await drained(api, PARKED) == ["one", "two", "three"]


@pytest.mark.usefixtures("letters")
async def test_what_cannot_be_asked_for_is_refused(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    for verb, body in (
        ("delete", {}),
        ("delete", {"ids": ["1.2.3"], "filter": {}}),
        ("delete", {"ids": ["x"]}),
        ("delete", {"ids": "1.2.3"}),
        ("delete", {"filter": {}, "operation": ""}),
        ("delete", {"filter": {}, "operation": "x" * 200}),
        ("move", {"filter": {}}),
        ("move", {"filter": {}, "queue": PARKED, "exchange": ""}),
        ("move", {"filter": {}, "queue": "missing"}),
        ("move", {"filter": {}, "exchange": "missing"}),
        ("retry", {"filter": {}, "to": "mars"}),
        ("republish", {"id": "1.2"}),
    ):
        assert (await act(api, DEAD, verb, 400, **body))["reason"]
    one = (await ids(api, DEAD, "one"))[0]
    for body in ({"payload": 1}, {"payload": "%", "payload_encoding": "base64"},
                 {"properties": {"priority": "x"}}, {"payload": "x" * (3 << 20)}):  # fmt: skip
        assert (await act(api, DEAD, "republish", 400, id=one, queue=PARKED, **body))["reason"]
    await cluster.queue(1, "classic", arguments={"x-queue-type": "classic"})
    assert (await browse(api, "classic", 400))["reason"].endswith("Cannot browse a classic queue")
    await browse(api, "missing", 404)
    assert (await browse(api, DEAD))["messages_ready"] == 3


@pytest.mark.usefixtures("letters")
async def test_who_may_do_it(cluster: FakeCluster, api: httpx.AsyncClient) -> None:
    await ok(api.put("/users/weak", json={"password": "p", "tags": "management"}), 201)

    async def allow(read: str, write: str, code: int = 204) -> None:
        rules = {"configure": "", "write": write, "read": read}
        await ok(api.put("/permissions/%2F/weak", json=rules), code)

    await allow("", ".*", 201)
    async with client(cluster, "weak", "p") as weak:
        await browse(weak, DEAD, 401)
        await act(weak, DEAD, "delete", 401, filter={})
        await allow(".*", "")
        await browse(weak, DEAD)
        for verb, body in (("move", {"queue": PARKED}), ("retry", {}), ("retry", {"to": "last"})):
            await act(weak, DEAD, verb, 401, filter={}, **body)
        await allow(".*", ".*")
        await act(weak, DEAD, "retry", 401, filter={}, to="origin")
        found = await act(weak, DEAD, "move", filter={}, queue=PARKED)
        assert counts(found) == {"selected": 3, "moved": 3}


async def test_version_1_of_the_machine_refuses(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    await cluster.queue(1, "q")
    await publish(api, "q", "x")
    answer = await act(api, "q", "delete", 400, filter={})
    assert "some nodes have an older release" in answer["reason"]
    assert await seen(api, "q") == ["x"]
