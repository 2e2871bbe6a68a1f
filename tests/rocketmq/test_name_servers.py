"""A broker's view of several name servers, one of which may be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from convoymq.rocketmq.acting.name_servers import Identity, NameServers, Registered
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.values import DataVersion, TopicConfig, TopicTable
from tests.patience import PATIENCE_S

VERSION = DataVersion(0, 5, 6)
TOPICS = TopicTable(
    {"orders": TopicConfig("orders", 4, 4, 6),
     "rmq_sys_SYNC_BROKER_MEMBER_n": TopicConfig("rmq_sys_SYNC_BROKER_MEMBER_n", 1, 1, 1)},
    VERSION,
)  # fmt: skip
SLAVE = Identity(
    cluster="c", name="n", id=1, address="127.0.0.1:1", ha_address="127.0.0.1:2",
    acting_enabled=True, heartbeat_timeout_s=PATIENCE_S,
)  # fmt: skip
MASTER = replace(SLAVE, id=0, address="127.0.0.1:3", ha_address="127.0.0.1:4")


class Servers:
    """Two name servers, and one that is away."""

    def __init__(self, directory: Path) -> None:
        self.now_ms = 1_000_000
        settings = [
            NamesrvSettings(port=0, host="127.0.0.1", kv_path=str(directory / f"{n}.json"),
                            scan_ms=10, support_acting_master=True)
            for n in range(2)
        ]  # fmt: skip
        self.servers = [NameServer(each, lambda: self.now_ms) for each in settings]
        self.remotings: list[RemotingClient] = []
        self.addresses: list[str] = []

    async def start(self) -> None:
        self.addresses = [f"127.0.0.1:{await each.start()}" for each in self.servers]

    def view(self, own: Identity, *, old: bool = False, away: bool = False) -> NameServers:
        self.remotings.append(RemotingClient())
        addresses = ["127.0.0.1:9", *self.addresses] if away else self.addresses
        own = replace(own, is_old_compatible=old)
        view = NameServers(" ; ".join(addresses), own, self.remotings[-1])
        # A machine may stand still for longer than a broker waits.
        view.ask_timeout_s = PATIENCE_S
        return view

    async def stop(self) -> None:
        for remoting in self.remotings:
            await remoting.stop()
        for server in self.servers:
            await server.stop()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    made = Servers(tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.provokes("rocketmq.name_server_silent")
async def test_a_group_is_what_all_name_servers_list_together(servers: Servers, old: bool) -> None:
    slave, master = servers.view(SLAVE, old=old, away=True), servers.view(MASTER, old=old)
    assert await slave.members() == {}
    assert await slave.register(TOPICS) == Registered()
    assert await master.register(TOPICS, addresses=(servers.addresses[1],)) == Registered()
    # The first name server does not list the master.
    assert await slave.members() == {0: MASTER.address, 1: SLAVE.address}
    assert await slave.register(TOPICS) == Registered(MASTER.address, MASTER.ha_address)
    assert await slave.brokers() == {"n": {0: MASTER.address, 1: SLAVE.address}}
    route = await master.route("orders")
    assert route is not None
    assert route.queue_datas[0].broker_name == "n"
    assert await master.route("other") is None
    await master.unregister()
    assert await slave.members() == {1: SLAVE.address}


@pytest.mark.parametrize("old", [False, True])
async def test_heartbeats_keep_a_replica(servers: Servers, old: bool) -> None:
    """A version query is one for name servers before RocketMQ 5."""
    slave, master = servers.view(SLAVE, old=old), servers.view(MASTER)
    await slave.register(TOPICS)
    await master.register(TOPICS)
    servers.now_ms += 9_000
    await slave.heartbeat(VERSION)
    # Behind the heartbeat on the same connections.
    assert await slave.members()
    servers.now_ms += 9_000

    async with asyncio.timeout(PATIENCE_S):
        while await slave.members() != {1: SLAVE.address}:
            await asyncio.sleep(0.005)


@pytest.mark.provokes("rocketmq.name_server_refused")
async def test_a_registration_that_is_refused_everywhere_is_none(servers: Servers) -> None:
    one = TopicTable({"orders": TopicConfig("orders", 4, 4, 6)}, VERSION)
    assert await servers.view(SLAVE).register(one) is None


async def test_nobody_answers(servers: Servers) -> None:
    view = NameServers("127.0.0.1:9", SLAVE, RemotingClient())
    assert await view.register(TOPICS) is None
    assert await view.members() is None
    assert await view.route("orders") is None
    assert await view.brokers() is None
    await view.heartbeat(VERSION)
    await view.unregister()
