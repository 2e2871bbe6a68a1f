"""Broker groups as a node shows them: over HTTP and in `convoy ctl`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from convoymq.edges.edge import NodeParts
from convoymq.edges.http.served import Served
from convoymq.edges.http.server import ManagementServer
from convoymq.model.errors import NotFound, Unavailable
from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.observer.config import RocketmqConfig
from convoymq.rocketmq.observer.edge import open_edge
from convoymq.rocketmq.observer.groups import ObservedGroups
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.server import RemotingServer
from tests.rocketmq.groups import Groups, eventually
from tests.rocketmq.test_acting import listed
from tests.running import until
from tests.unit.edges.http.test_api import client, cluster
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["cluster"]


@pytest.fixture
async def groups(tmp_path: Path) -> AsyncIterator[Groups]:
    made = Groups(tmp_path / "groups")
    (tmp_path / "groups").mkdir()
    await made.start()
    yield made
    await made.stop()


def observer(groups: Groups, *more: str) -> ObservedGroups:
    names = ";".join((groups.address, *more))
    return ObservedGroups(RocketmqConfig(name_servers=names, timeout_ms=60_000))


async def test_a_group_is_shown_with_its_replicas_and_topics(groups: Groups) -> None:
    slave = await groups.broker("n", 1)
    await until(lambda: slave.group.state is State.ACTING)
    # A name server that is not there harms nobody.
    shown = observer(groups, "127.0.0.1:9")

    async def acting() -> Any:
        rows = [row for row in await shown.groups() if row["name"] == "n"]
        return rows and rows[0]["acting"] == 1

    await eventually(acting)
    master = await groups.online("n", 0)
    send = groups.client(master)
    assert (await send.send("orders", b"x")).code == Answer.SUCCESS
    await send.heartbeat("c", "readers", orders="*")
    await until(lambda: slave.store.max_offset == master.store.max_offset)
    (row,) = await shown.groups()
    members = [f"0@{master.role.address}", f"1@{slave.role.address}"]
    assert row == {
        "name": "n", "cluster": "c", "master": master.role.address, "acting": None,
        "members": members,
    }  # fmt: skip
    found = await shown.group("n")
    replicas = cast("list[dict[str, Any]]", found["replicas"])
    assert [(r["id"], r["running"], r["lag"]) for r in replicas] == [(0, True, 0), (1, True, 0)]
    assert replicas[0]["log_end"] == master.store.max_offset
    assert (replicas[0]["runs_special_services"], replicas[0]["messages_in"]) == (True, 1)
    topics = {str(topic["name"]): topic for topic in await shown.topics("n")}
    assert topics["orders"] == {
        "name": "orders", "read_queues": 4, "write_queues": 4, "permission": 6, "ordered": False,
        "system": False,
    }  # fmt: skip
    assert topics["TBW102"]["system"]
    topic = await shown.topic("n", "orders")
    assert topic["consumer_groups"] == ["readers"]
    queues = cast("list[dict[str, int]]", topic["queues"])
    assert [(q["queue"], q["max_offset"]) for q in queues] == [(0, 1), (1, 0), (2, 0), (3, 0)]
    with pytest.raises(NotFound, match="no broker group 'other'"):
        await shown.topics("other")
    with pytest.raises(NotFound, match="absent"):
        await shown.topic("n", "absent")
    await shown.stop()


async def test_who_is_silent_harms_nobody_else(groups: Groups) -> None:
    """A replica that accepts connections and never answers is a row with the reason."""
    await groups.online("m", 0, totalReplicas=1)
    silent = RemotingServer(lambda _connection, _command: None, lambda _connection: None)
    port = await silent.listen("127.0.0.1", 0)
    listed(groups, "s", 0, port)
    shown = ObservedGroups(RocketmqConfig(name_servers=groups.address, timeout_ms=100))
    found = await shown.group("s")
    (replica,) = cast("list[dict[str, Any]]", found["replicas"])
    assert not replica["running"]
    assert "did not answer within 0.1 s" in replica["reason"]
    with pytest.raises(Unavailable, match="broker group 's'"):
        await shown.topics("s")
    patient = observer(groups)
    assert (await patient.group("m"))["master"]
    nobody = ObservedGroups(RocketmqConfig(name_servers=f"127.0.0.1:{port}", timeout_ms=100))
    with pytest.raises(Unavailable, match="no name server answers"):
        await nobody.groups()
    for each in (shown, patient, nobody):
        await each.stop()
    await silent.stop()


async def test_the_api_shows_groups_to_those_who_monitor(
    groups: Groups, cluster: FakeCluster
) -> None:
    master = await groups.online("n", 0, totalReplicas=1)
    shown = observer(groups)
    edges: dict[str, Any] = {"edges": lambda: [shown]}
    async with client(cluster, **edges) as api:
        (row,) = (await api.get("/broker-groups")).json()
        assert row["master"] == master.role.address
        assert (await api.get("/broker-groups/n")).json()["replicas"][0]["running"]
        page = (await api.get("/broker-groups/n/topics?page=1&page_size=2")).json()
        assert (len(page["items"]), page["total_count"]) == (2, len(master.topics.table))
        assert (await api.get("/broker-groups/n/topics/TBW102")).json()["name"] == "TBW102"
        assert (await api.get("/broker-groups/none")).status_code == 404
        made = await api.put("/users/looks", json={"password": "p", "tags": "management"})
        assert made.status_code == 201
    async with client(cluster, "looks", "p", **edges) as api:
        assert (await api.get("/broker-groups")).status_code == 401
    async with client(cluster) as api:
        refused = await api.get("/broker-groups")
        assert (refused.status_code, refused.json()["reason"]) == (
            404,
            "rocketmq.namesrv is not set",
        )
    await shown.stop()


async def test_the_commands_show_the_same(groups: Groups, cluster: FakeCluster) -> None:
    master = await groups.online("n", 0, totalReplicas=1)
    shown = observer(groups)
    server = ManagementServer(
        cluster.nodes[1].broker, [("127.0.0.1", 0)], served=Served(edges=lambda: [shown])
    )
    await server.start()

    async def ctl(*words: str) -> list[dict[str, Any]]:
        line = ["-m", "convoymq.cli", "ctl", "--url", f"http://127.0.0.1:{server.ports[0]}"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *line, *words, "--formatter", "json", "-q",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await process.communicate()
        assert process.returncode == 0
        return cast("list[dict[str, Any]]", json.loads(out))

    (row,) = await ctl("list_broker_groups", "name", "master")
    assert row == {"name": "n", "master": master.role.address}
    topics = await ctl("list_group_topics", "n", "name", "read_queues", "system")
    assert {"name": "TBW102", "read_queues": 8, "system": True} in topics
    await server.stop()
    await shown.stop()


def test_a_node_without_name_servers_has_no_such_edge() -> None:
    config = SimpleNamespace(of=lambda _: RocketmqConfig())
    assert open_edge(cast("NodeParts", SimpleNamespace(config=config))) is None
    config = SimpleNamespace(of=lambda _: RocketmqConfig(name_servers="127.0.0.1:9876"))
    assert open_edge(cast("NodeParts", SimpleNamespace(config=config))) is not None


async def test_an_answer_that_cannot_be_read_is_said(groups: Groups) -> None:
    server = RemotingServer(
        lambda _connection, command: command.answer(body=b"{nonsense"), lambda _connection: None
    )
    port = await server.listen("127.0.0.1", 0)
    shown = ObservedGroups(RocketmqConfig(name_servers=f"127.0.0.1:{port}", timeout_ms=60_000))
    with pytest.raises(Unavailable, match="cannot be read"):
        await shown.groups()
    await shown.stop()
    await server.stop()
