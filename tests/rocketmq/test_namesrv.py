"""A name server on loopback, asked as brokers and clients ask it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from convoymq.kernels.remoting import frame
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import BINARY, Command, encode, request
from convoymq.rocketmq.remoting.connection import Connection, Unreachable, dispatch
from convoymq.rocketmq.remoting.server import RemotingServer
from convoymq.rocketmq.remoting.values import (
    ClusterInfo,
    DataVersion,
    KeyValues,
    MemberGroupBody,
    QueueData,
    RegisterBrokerBody,
    RouteData,
    TopicConfig,
    TopicList,
    TopicTable,
    crc32,
)
from tests.patience import PATIENCE_S
from tests.rocketmq.registrations import compressed
from tests.running import until

VERSION = DataVersion(0, 5, 6)
TABLE = TopicTable({"a": TopicConfig("a", 4, 4, 6), "b": TopicConfig("b", 1, 1, 6)}, VERSION)


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


async def invoke(client: RemotingClient, address: str, command: Command) -> Command:
    return await (await client.connected(address, PATIENCE_S)).request(command, PATIENCE_S)


class Client:
    """A client of one name server."""

    def __init__(self, server: NameServer, port: int, clock: Clock) -> None:
        self.server = server
        self.clock = clock
        self.address = f"127.0.0.1:{port}"
        self.remoting = RemotingClient()

    async def ask(
        self, code: int, fields: dict[str, str] | None = None, body: bytes = b""
    ) -> Command:
        return await invoke(self.remoting, self.address, request(code, fields, body))

    async def register(
        self, number: int = 0, remoting: RemotingClient | None = None, **fields: str
    ) -> Command:
        """Registers a replica, on the connection of `remoting`."""
        body = compressed(RegisterBrokerBody(TABLE))
        own = {
            "brokerName": "n", "brokerAddr": f"127.0.0.1:{number + 1}", "clusterName": "c",
            "haServerAddr": f"ha-{number}", "brokerId": str(number), "compressed": "true",
            "bodyCrc32": str(crc32(body)), "enableActingMaster": "true",
        }  # fmt: skip
        command = request(Request.REGISTER_BROKER, own | fields, body)
        return await invoke(remoting or self.remoting, self.address, command)

    async def route(self, topic: str = "a", **fields: str) -> RouteData | None:
        answer = await self.ask(Request.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, **fields})
        if answer.code == Answer.TOPIC_NOT_EXIST:
            assert answer.remark == f"No topic route info in name server for the topic: {topic}"
            return None
        assert answer.code == Answer.SUCCESS
        return json.loads(answer.body, RouteData)


Begin = Callable[..., Awaitable[Client]]


@pytest.fixture
async def begin(tmp_path: Path) -> AsyncIterator[Begin]:
    """Starts a name server; with settings of its own."""
    made: list[Client] = []

    async def start(**settings: object) -> Client:
        clock = Clock()
        chosen = NamesrvSettings(
            port=0, host="127.0.0.1", kv_path=str(tmp_path / "kv.json"), scan_ms=10,
            **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        server = NameServer(chosen, clock)
        made.append(Client(server, await server.start(), clock))
        return made[-1]

    yield start
    for client in made:
        await client.remoting.stop()
        await client.server.stop()


async def test_a_broker_registers_and_clients_find_its_topics(begin: Begin) -> None:
    client = await begin()
    assert await client.route() is None
    assert (await client.register()).fields == {}
    slave = await client.register(1, RemotingClient())
    assert slave.fields == {"haServerAddr": "ha-0", "masterAddr": "127.0.0.1:1"}
    route = await client.route()
    assert route is not None
    assert route.queue_datas == [QueueData("n", 4, 4, 6, 0)]
    assert route.broker_datas[0].broker_addrs == {0: "127.0.0.1:1", 1: "127.0.0.1:2"}
    info = json.loads((await client.ask(Request.GET_BROKER_CLUSTER_INFO)).body, ClusterInfo)
    assert info.cluster_addr_table == {"c": ["n"]}


async def test_a_binary_request_has_a_binary_answer(begin: Begin) -> None:
    client = await begin()
    command = request(Request.GET_ROUTEINFO_BY_TOPIC, {"topic": "x"})
    command.encoding = BINARY
    answer = await invoke(client.remoting, client.address, command)
    assert (answer.code, answer.encoding) == (Answer.TOPIC_NOT_EXIST, BINARY)


@pytest.mark.provokes("namesrv.min_id_changed", "namesrv.broker_not_told")
async def test_a_slave_is_told_when_its_connection_to_the_master_ends(begin: Begin) -> None:
    """One slave listens and hears of it; nobody waits for the other, which does not."""
    client = await begin(support_acting_master=True)
    told: list[Command] = []
    slave = RemotingServer(
        dispatch({Request.NOTIFY_MIN_BROKER_ID_CHANGE: lambda _c, command: told.append(command)}),
        lambda _connection: None,
    )
    port = await slave.listen("127.0.0.1", 0)
    await client.register(1, brokerAddr=f"127.0.0.1:{port}")
    await client.register(2)
    master = RemotingClient()
    await client.register(0, master)
    await until(lambda: len(told) == 1)
    assert told[0].fields == {
        "minBrokerId": "0", "minBrokerAddr": "127.0.0.1:1", "brokerName": "n",
        "haBrokerAddr": "ha-0",
    }  # fmt: skip
    await master.stop()
    await until(lambda: len(told) == 2)
    assert told[1].is_one_way
    assert told[1].fields == {
        "minBrokerId": "1", "minBrokerAddr": f"127.0.0.1:{port}", "brokerName": "n",
        "offlineBrokerAddr": "127.0.0.1:1",
    }  # fmt: skip
    route = await client.route()
    assert route is not None
    assert route.broker_datas[0].broker_addrs == {0: f"127.0.0.1:{port}", 2: "127.0.0.1:3"}
    assert route.queue_datas[0].perm == 4
    await slave.stop()


@pytest.mark.provokes("namesrv.broker_silent")
async def test_a_silent_broker_is_gone_and_its_connection_closed(begin: Begin) -> None:
    client = await begin()
    broker = RemotingClient()
    await client.register(0, broker, heartbeatTimeoutMillis="2000")
    beat = {"clusterName": "c", "brokerAddr": "127.0.0.1:1", "brokerName": "n"}
    client.clock.ms += 1500
    await client.ask(Request.BROKER_HEARTBEAT, beat)
    client.clock.ms += 1500
    answer = await client.ask(
        Request.QUERY_DATA_VERSION, {**beat, "brokerId": "0"}, json.dumps(VERSION)
    )
    assert answer.fields == {"changed": "false"}
    assert json.loads(answer.body, DataVersion) == VERSION
    client.clock.ms += 2001
    await until(lambda: not client.server.tables.topics())
    answer = await client.ask(
        Request.QUERY_DATA_VERSION, {**beat, "brokerId": "0"}, json.dumps(VERSION)
    )
    assert (answer.fields, answer.body) == ({"changed": "true"}, b"")
    await broker.stop()


async def test_a_silent_broker_is_looked_for_when_its_time_is_over(begin: Begin) -> None:
    client = await begin()
    server = client.server
    server.settings = replace(server.settings, scan_ms=5000)
    assert server.next_scan_ms() == 5000
    await client.register(0, heartbeatTimeoutMillis="10000")
    assert server.next_scan_ms() == 5000
    client.clock.ms += 7000
    assert server.next_scan_ms() == 3001
    await client.ask(Request.BROKER_HEARTBEAT, {"clusterName": "c", "brokerAddr": "127.0.0.1:1"})
    assert server.next_scan_ms() == 5000


async def test_members_of_a_group_are_asked_for_and_unregister(begin: Begin) -> None:
    client = await begin()
    await client.register(0)
    await client.register(2)
    asked = {"clusterName": "c", "brokerName": "n"}

    async def members() -> dict[int, str]:
        body = (await client.ask(Request.GET_BROKER_MEMBER_GROUP, asked)).body
        return json.loads(body, MemberGroupBody).broker_member_group.broker_addrs

    assert await members() == {0: "127.0.0.1:1", 2: "127.0.0.1:3"}
    gone = {**asked, "brokerAddr": "127.0.0.1:1", "brokerId": "0"}
    assert (await client.ask(Request.UNREGISTER_BROKER, gone)).code == Answer.SUCCESS
    assert await members() == {2: "127.0.0.1:3"}


async def test_registrations_that_are_wrong_are_refused(begin: Begin) -> None:
    client = await begin()
    refused = await client.register(bodyCrc32="1")
    assert (refused.code, refused.remark) == (Answer.SYSTEM_ERROR, "crc32 not match")
    refused = await client.register(brokerId="one")
    assert (refused.code, refused.remark) == (
        Answer.SYSTEM_ERROR, "the custom field <brokerId> is no number: one",
    )  # fmt: skip
    refused = await client.ask(Request.REGISTER_BROKER, {"brokerName": "n"})
    assert (refused.code, refused.remark) == (
        Answer.SYSTEM_ERROR, "the custom field <clusterName> is null",
    )  # fmt: skip
    refused = await client.register(compressed="false", bodyCrc32="0")
    assert refused.code == Answer.SYSTEM_ERROR
    assert client.server.tables.topics() == []
    unknown = await client.ask(9999)
    assert (unknown.code, unknown.remark) == (
        Answer.REQUEST_CODE_NOT_SUPPORTED, " request type 9999 not supported",
    )  # fmt: skip


async def test_zones_see_their_own_brokers(begin: Begin) -> None:
    client = await begin()
    await client.register(__ZONE_NAME="East")
    for zone, found in (("east", ["n"]), ("west", [])):
        route = await client.route(__ZONE_MODE="true", __ZONE_NAME=zone)
        assert route is not None
        assert [data.broker_name for data in route.broker_datas] == found
        assert [data.broker_name for data in route.queue_datas] == found
    route = await client.route(__ZONE_NAME="west")
    assert route is not None
    assert route.broker_datas[0].zone_name == "East"


async def test_topics_are_listed_and_permissions_changed(begin: Begin) -> None:
    client = await begin()
    await client.register()

    async def listed(code: int, **fields: str) -> list[str]:
        return json.loads((await client.ask(code, fields)).body, TopicList).topic_list

    assert await listed(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER) == ["a", "b"]
    assert await listed(Request.GET_TOPICS_BY_CLUSTER, cluster="c") == ["a", "b"]
    assert await listed(Request.GET_SYSTEM_TOPIC_LIST_FROM_NS) == ["c", "n"]
    route = RouteData([QueueData("n", 1, 1, 6, 1)])
    await client.ask(Request.REGISTER_TOPIC_IN_NAMESRV, {"topic": "u"}, json.dumps(route))
    assert await listed(Request.GET_UNIT_TOPIC_LIST) == ["u"]
    assert await listed(Request.GET_HAS_UNIT_SUB_TOPIC_LIST) == []
    assert await listed(Request.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST) == []
    await client.ask(Request.DELETE_TOPIC_IN_NAMESRV, {"topic": "u"})
    assert await client.route("u") is None
    wiped = await client.ask(Request.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "n"})
    assert wiped.fields == {"wipeTopicCount": "2"}
    added = await client.ask(Request.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "n"})
    assert added.fields == {"addTopicCount": "2"}
    server = await begin(topic_list=False, all_topic_list=False)
    for code in (Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, Request.GET_TOPICS_BY_CLUSTER):
        answer = await server.ask(code, {"cluster": "c"})
        assert (answer.code, answer.remark) == (Answer.SYSTEM_ERROR, "disable")


async def test_keys_and_values_outlive_the_server(begin: Begin) -> None:
    client = await begin()
    one = {"namespace": "ORDER_TOPIC_CONFIG", "key": "a"}
    assert (await client.ask(Request.GET_KV_CONFIG, one)).code == Answer.QUERY_NOT_FOUND
    await client.ask(Request.PUT_KV_CONFIG, {**one, "value": "n:4"})
    await client.ask(Request.PUT_KV_CONFIG, {**one, "key": "gone", "value": "x"})
    await client.ask(Request.DELETE_KV_CONFIG, {**one, "key": "gone"})
    again = await begin(order_enabled=True)
    assert (await again.ask(Request.GET_KV_CONFIG, one)).fields == {"value": "n:4"}
    listed = await again.ask(Request.GET_KVLIST_BY_NAMESPACE, {"namespace": "ORDER_TOPIC_CONFIG"})
    assert json.loads(listed.body, KeyValues).table == {"a": "n:4"}
    missing = await again.ask(Request.GET_KVLIST_BY_NAMESPACE, {"namespace": "unknown"})
    assert missing.code == Answer.QUERY_NOT_FOUND
    registered = await again.register()
    assert json.loads(registered.body, KeyValues).table == {"a": "n:4"}
    route = await again.route()
    assert route is not None
    assert route.order_topic_conf == "n:4"


async def test_a_damaged_file_of_keys_stops_the_start(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_bytes(b'{"configTable":{"a":')
    with pytest.raises(Exception, match=r"kv\.json: cannot be read"):
        await begin()


async def test_settings_are_shown_and_changed(begin: Begin) -> None:
    client = await begin()
    shown = bytes((await client.ask(Request.GET_NAMESRV_CONFIG)).body).decode()
    assert "supportActingMaster=false\n" in shown
    changed = await client.ask(Request.UPDATE_NAMESRV_CONFIG, {}, b"supportActingMaster=true\n")
    assert changed.code == Answer.SUCCESS
    assert client.server.tables.support_acting_master
    for body, code, text in (
        (b"kvConfigPath=/etc/passwd\n", Answer.NO_PERMISSION, "black list"),
        (b"supportActingMster=true\n", Answer.SYSTEM_ERROR, "did you mean supportActingMaster"),
        (b"scanNotActiveBrokerInterval=x\n", Answer.SYSTEM_ERROR, "not a whole number"),
        (b"\xff\xfe", Answer.SYSTEM_ERROR, "utf-8"),
    ):
        refused = await client.ask(Request.UPDATE_NAMESRV_CONFIG, {}, body)
        assert refused.code == code
        assert text in (refused.remark or "")


async def test_routes_wait_until_brokers_had_their_time(begin: Begin) -> None:
    client = await begin(wait_for_service=True, wait_s=45)
    await client.register()
    early = await client.ask(Request.GET_ROUTEINFO_BY_TOPIC, {"topic": "a"})
    assert (early.code, early.remark) == (Answer.SYSTEM_ERROR, "name server not ready")
    client.clock.ms += 45_000
    assert await client.route() is not None


# --- remoting -------------------------------------------------------------------------------


@pytest.mark.provokes("remoting.broken_frame")
async def test_a_broken_frame_ends_its_connection_and_no_other(begin: Begin) -> None:
    client = await begin()
    assert await client.route() is None
    host, port = client.address.split(":")
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        frame(0, b"nonsense", b""),
        b"\x16\x03\x01" + bytes(90),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()
    assert await client.route() is None


@pytest.mark.provokes("remoting.idle")
async def test_an_idle_connection_is_closed(begin: Begin) -> None:
    client = await begin(idle_s=1)
    host, port = client.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.provokes("remoting.fault")
async def test_a_request_that_fails_is_answered_and_the_others_too() -> None:
    def fail(_connection: Connection, _command: Command) -> Command:
        raise KeyError("a fault of ours")

    async def fail_later(_connection: Connection, _command: Command) -> Command:
        await asyncio.sleep(0)
        raise ValueError("later")

    def pass_by(_connection: Connection, command: Command) -> Command:
        return command.answer(fields=command.fields)

    server = RemotingServer(
        dispatch({1: fail, 2: fail_later, 3: pass_by}), lambda _connection: None
    )
    client = RemotingClient()
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    answers = await asyncio.gather(
        *(invoke(client, address, request(n, {"n": "x"})) for n in (1, 2, 3))
    )
    assert [answer.code for answer in answers] == [1, 1, 0]
    assert [answer.remark for answer in answers[:2]] == [
        "KeyError: 'a fault of ours'",
        "ValueError: later",
    ]
    await client.stop()
    await server.stop()


@pytest.mark.provokes("remoting.peer_does_not_read")
async def test_a_peer_that_does_not_read_holds_nobody_up(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoymq.rocketmq.remoting.connection.OUTPUT_BYTES_MAX", 1 << 20)
    client = await begin()
    names = {f"topic-{i:06}": TopicConfig(f"topic-{i:06}") for i in range(5000)}
    body = json.dumps(RegisterBrokerBody(TopicTable(names, VERSION)))
    fields = {"bodyCrc32": "0", "compressed": "false"}
    own = {"brokerName": "n", "brokerAddr": "a:1", "clusterName": "c", "brokerId": "0"}
    assert (await client.ask(Request.REGISTER_BROKER, own | fields, body)).code == Answer.SUCCESS
    host, port = client.address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    asked = encode(request(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))

    async def ask_for_ever() -> None:
        while True:
            writer.write(asked * 100)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(ask_for_ever(), PATIENCE_S)
    assert (await client.ask(Request.GET_BROKER_CLUSTER_INFO)).code == Answer.SUCCESS
    writer.close()


@pytest.mark.provokes("remoting.too_many_connections")
async def test_one_connection_too_many_is_refused(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await begin()
    assert await client.route() is None
    monkeypatch.setattr("convoymq.rocketmq.remoting.server.CONNECTIONS_MAX", 1)
    host, port = client.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    assert await client.route() is None


async def test_nobody_there_is_said_at_once() -> None:
    client = RemotingClient()
    for address in ("127.0.0.1:1", "no port", "127.0.0.1:0"):
        with pytest.raises(Unreachable):
            await invoke(client, address, request(1))
    await client.stop()
