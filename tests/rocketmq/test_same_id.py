"""Two brokers that are started with one id of a group.

RocketMQ's name server gives an id to the last broker that registers. Its slaves follow that one,
and write over what they have; both masters go on to take messages. Its master counts two slaves of
one id as two copies.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.values import MemberGroupBody
from tests.ports import single_port
from tests.rocketmq.broker_client import Client
from tests.rocketmq.groups import Groups, eventually
from tests.rocketmq.processes import RoleProcess, Server, kill
from tests.rocketmq.test_replication import Begin, content, replication
from tests.rocketmq.test_replication import begin as begin
from tests.rocketmq.upstream import command, environment, needs_rocketmq, ports
from tests.running import until

pytestmark = pytest.mark.asyncio
COUNT = 50


class Member(RoleProcess):
    """A replica of group `n`."""

    def __init__(self, directory: Path, name: str, number: int, names: str, port: int) -> None:
        self.port = port
        super().__init__(
            directory, name, "broker", brokerName="n", brokerClusterName="c", brokerId=number,
            brokerRole="SLAVE" if number else "SYNC_MASTER", inSyncReplicas=2, totalReplicas=2,
            enableSlaveActingMaster="true", slaveReadEnable="true", namesrvAddr=names,
            compatibleWithOldNameSrv="false", brokerIP1="127.0.0.1", bindAddress="127.0.0.1",
            listenPort=port, haListenPort=ports()["haListenPort"],
            storePathRootDir=directory / f"store-{name}", mappedFileSizeCommitLog=16 << 20,
            mappedFileSizeConsumeQueue=60_000,
        )  # fmt: skip

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class Started:
    """What a test has started."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.names = ""

    def name_server(self, whose: str) -> None:
        if whose == "ours":
            server = Server(self.directory)
            self.names = server.address
            self.stack.callback(kill, server.process)
            return
        port = single_port()
        (self.directory / "names.conf").write_text(f"listenPort={port}\n")
        log = self.stack.enter_context((self.directory / "names.log").open("wb"))
        arguments = ("-c", str(self.directory / "names.conf"))
        process = subprocess.Popen(
            command(self.directory, "namesrv.NamesrvStartup", *arguments),
            env=environment(self.directory), stdout=log, stderr=log,
        )  # fmt: skip
        self.stack.callback(kill, process)
        self.names = f"127.0.0.1:{port}"

    def member(self, name: str, number: int, port: int | None = None) -> Member:
        port = port or ports()["listenPort"]
        made = Member(self.directory, name, number, self.names, port)
        self.stack.callback(kill, made.process)
        return made


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    with contextlib.ExitStack() as stack:
        yield Started(tmp_path, stack)


async def send(client: Client, wanted: list[bytes], count: int) -> None:
    """Sends messages until so many are acknowledged."""
    for _ in range(count):
        body = b"%d" % len(wanted)

        async def is_sent(body: bytes = body) -> bool:
            return (await client.send("orders", body)).code == Answer.SUCCESS

        await eventually(is_sent)
        wanted.append(body)


async def listed(client: Client) -> dict[int, str]:
    answer = await client.ask(Request.GET_BROKER_MEMBER_GROUP, clusterName="c", brokerName="n")
    return dict(json.loads(answer.body, MemberGroupBody).broker_member_group.broker_addrs)


@pytest.mark.provokes("rocketmq.id_taken")
@pytest.mark.parametrize(
    "whose", ["ours", pytest.param("theirs", marks=[needs_rocketmq, pytest.mark.optional])]
)
async def test_a_second_master_waits_until_the_first_is_gone(started: Started, whose: str) -> None:
    """The second one takes over when the first is killed, and keeps what that one had confirmed.
    Then the first one is the second."""
    started.name_server(whose)
    first, slave = started.member("first", 0), started.member("slave", 1)
    clients = {port: Client(port) for port in (first.port, int(started.names.partition(":")[2]))}
    master, names = clients.values()
    wanted: list[bytes] = []
    first.wait_for("rocketmq.online")
    await send(master, wanted, COUNT)
    twin = started.member("twin", 0)
    other = Client(twin.port)
    try:
        (taken, *_) = twin.wait_for("rocketmq.id_taken")
        assert (taken["level"], taken["holder"]) == ("error", first.address)
        assert (await other.send("orders", b"lost")).code == Answer.SERVICE_NOT_AVAILABLE
        await send(master, wanted, COUNT)
        assert await listed(names) == {0: first.address, 1: slave.address}
        assert not twin.events("rocketmq.online")

        kill(first.process)
        twin.wait_for("rocketmq.online")
        await send(other, wanted, COUNT)
        assert [m.body for m in await other.all("orders")] == wanted

        again = started.member("first", 0, first.port)
        (taken, *_) = again.wait_for("rocketmq.id_taken")
        assert taken["holder"] == twin.address
        assert (await master.send("orders", b"lost")).code == Answer.SERVICE_NOT_AVAILABLE
        assert twin.end() == 0
        again.wait_for("rocketmq.online")
        await send(master, wanted, COUNT)
        assert [m.body for m in await master.all("orders")] == wanted
        assert not slave.events("ha.forked")
    finally:
        for client in (master, names, other):
            await client.stop()


async def test_a_second_slave_waits_until_the_first_is_gone(groups: Groups) -> None:
    options = {"brokerRole": "SYNC_MASTER", "inSyncReplicas": 2, "skipPreOnline": True}
    master = await groups.broker("n", 0, **options)
    slave = await groups.online("n", 1)
    client = groups.client(master)
    wanted: list[bytes] = []
    await send(client, wanted, 3)
    twin = await groups.broker("n", 1, storePathRootDir=groups.directory / "twin")
    await until(lambda: twin.group._listed.get(1) == slave.role.address)
    assert twin.group.state is State.ISOLATED
    # What two of one id may not do: a master counts one.
    assert [view.slave for view in master.replication.links()] == [1]
    await groups.stop_broker(slave)
    await until(lambda: twin.group.state is State.SLAVE)
    await send(client, wanted, 3)
    await until(lambda: twin.store.max_offset == master.store.max_offset)
    await until(lambda: "orders" in twin.topics.table)
    got = [bytes(m.body) for m in await groups.client(twin).all("orders")]
    assert got == wanted


@pytest.mark.provokes("namesrv.id_taken")
async def test_without_acting_slaves_the_second_master_takes_no_writes(groups: Groups) -> None:
    """The last one that registers is listed, as with RocketMQ's name server, and the slave keeps
    its master: with `inSyncReplicas=2` the other one confirms nothing."""
    options = {
        "brokerRole": "SYNC_MASTER", "inSyncReplicas": 2, "enableSlaveActingMaster": False,
        "slaveTimeout": 10_000_000,
    }  # fmt: skip
    master = await groups.broker("n", 0, **options)
    slave = await groups.broker("n", 1, enableSlaveActingMaster=False)
    client = groups.client(master)
    wanted: list[bytes] = []
    await send(client, wanted, 3)
    twin = await groups.broker("n", 0, storePathRootDir=groups.directory / "twin", **options)

    async def is_displaced() -> bool:
        members = await slave.registrar.servers.members()
        return members is not None and members.get(0) == twin.role.address

    await eventually(is_displaced)
    await slave.registrar.register_all()
    assert (await groups.client(twin).send("orders", b"x")).code == Answer.SERVICE_NOT_AVAILABLE
    await send(client, wanted, 3)
    assert slave.replication.links() == ()
    assert slave.group.master == master.role.address


async def test_a_slave_of_another_master_keeps_it(begin: Begin) -> None:
    """A master with the id of one that is alive compares with its slave."""
    pair, other = begin(), begin()
    for name in ("master", "slave"):
        await pair.begin(name)
    pair.follow()
    await until(lambda: replication(pair.master).begin())
    await pair.master.client.send("orders", b"1")
    twin = await other.begin("master")
    address = f"127.0.0.1:{pair.slave.port}"
    assert not await replication(twin).compare_with(address)
    assert not replication(twin).begin()
    await pair.end(pair.master)
    await until(lambda: replication(pair.slave).master_silent_ms() is None)
    assert await replication(twin).compare_with(address)
    assert replication(twin).begin()
    assert content(twin) == content(pair.slave) != b""


async def test_a_master_names_its_log_and_a_slave_follows_the_one_that_does(
    groups: Groups, begin: Begin
) -> None:
    """Request 906, both ways; RocketMQ's slave follows whichever master asks last."""
    master = await groups.online("n", 0, skipPreOnline=True)
    slave = await groups.online("n", 1)
    code = Request.EXCHANGE_BROKER_HA_INFO
    answer = await groups.client(master).ask(code)
    own = {
        "masterHaAddress": f"127.0.0.1:{master.replication.port}",
        "masterAddress": master.role.address, "masterFlushOffset": str(master.store.max_offset),
    }  # fmt: skip
    assert (answer.code, answer.fields) == (Answer.SUCCESS, own)
    client = groups.client(slave)
    answer = await client.ask(code)
    assert (answer.code, answer.fields) == (Answer.SUCCESS, {})
    await until(lambda: slave.replication.master_silent_ms() is not None)

    pair = begin()
    other = await pair.begin("master")
    address = f"127.0.0.1:{other.port}"
    named = {"masterHaAddress": f"127.0.0.1:{replication(other).port}", "masterAddress": address}
    answer = await client.ask(code, masterFlushOffset=0, **named)
    assert answer.code == Answer.SERVICE_NOT_AVAILABLE
    assert answer.remark is not None
    assert master.role.address in answer.remark
    assert slave.group.master == master.role.address
    slave.replication.set_master(None)
    assert (await client.ask(code, masterFlushOffset=0, **named)).code == Answer.SUCCESS
    assert slave.group.master == address
    # A master follows nobody.
    assert (await groups.client(master).ask(code, **named)).code == Answer.SUCCESS
    assert master.group.master is None
