"""A master and its slaves on loopback: copies, confirmations, returns with and without the past."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from convoymq.replication.group.lives import Book
from convoymq.replication.group.types import SlaveState
from convoymq.rocketmq.ha.service import GroupReplication
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.store.types import Draft, PutStatus
from tests.patience import PATIENCE_S
from tests.rocketmq.broker_client import Client, Running
from tests.running import until

GROUP = {"totalReplicas": 2, "inSyncReplicas": 2, "slaveTimeout": 10_000_000}
MASTER = {"brokerId": 0, "brokerRole": "SYNC_MASTER"}
SLAVE = {"brokerId": 1, "brokerRole": "SLAVE", "slaveReadEnable": True}


class Pair:
    """A master and its slave; each may be ended and begun again, in its directory or a new one."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.directory = directory
        self.settings = GROUP | settings
        self.master: Running
        self.slave: Running
        self.all: list[Running] = []

    async def begin(self, name: str, **settings: object) -> Running:
        role = MASTER if name == "master" else SLAVE
        made = await Running.begin(self.directory / name, **(self.settings | role | settings))
        self.all.append(made)
        setattr(self, name, made)
        return made

    async def end(self, running: Running) -> None:
        self.all.remove(running)
        await running.stop()

    def follow(self) -> None:
        """Has the slave copy the master, as name servers tell it."""
        address = f"127.0.0.1:{self.master.port}"
        ha_address = f"127.0.0.1:{replication(self.master).port}"
        replication(self.slave).set_master(ha_address, address)

    async def stop(self) -> None:
        for each in list(self.all):
            await self.end(each)


def replication(running: Running) -> GroupReplication:
    found = running.broker.replication
    assert isinstance(found, GroupReplication)
    return found


def content(running: Running) -> bytes:
    """A broker's whole log."""
    store = running.broker.store
    parts, at = [], store.min_offset
    while at < store.max_offset:
        parts.append(store.read_raw(at, 1 << 20))
        at += len(parts[-1])
    return b"".join(parts)


def copy(directory: Path, source: str, target: str) -> None:
    """Gives a broker the log and the book of another. Indexes are large, and made anew."""
    shutil.rmtree(directory / target, ignore_errors=True)
    for part in ("commitlog", "config"):
        shutil.copytree(directory / source / part, directory / target / part)


async def equal(one: Running, other: Running) -> None:
    await until(lambda: one.broker.store.max_offset == other.broker.store.max_offset)
    assert content(one) == content(other)


async def bodies(client: Client, topic: str) -> list[bytes]:
    return [bytes(message.body) for message in await client.all(topic)]


Begin = Callable[..., Pair]


@pytest_asyncio.fixture
async def begin(tmp_path: Path) -> AsyncIterator[Begin]:
    made: list[Pair] = []

    def make(**settings: object) -> Pair:
        made.append(Pair(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield make
    for each in made:
        await each.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.provokes("ha.life_began", "ha.connected", "ha.disconnected", "ha.slave_left")
async def test_an_acknowledged_message_is_on_both(begin: Begin, flush: str) -> None:
    pair = begin(flushDiskType=flush, mappedFileSizeCommitLog=64 << 10)
    master, slave = await pair.begin("master"), await pair.begin("slave")
    # Which has nothing: whether that was always so it cannot know.
    assert (await master.client.send("t")).code == Answer.SERVICE_NOT_AVAILABLE
    pair.follow()
    await until(lambda: replication(master).refusal() is None)
    for number in range(20):
        answers = await asyncio.gather(
            *(master.client.send("t", b"%d" % i * 900) for i in range(10))
        )
        assert {answer.code for answer in answers} == {Answer.SUCCESS}
        copied = slave.broker.store
        assert copied.max_offset == master.broker.store.max_offset, number
        assert flush == "ASYNC_FLUSH" or copied.flushed == copied.max_offset
    await equal(master, slave)
    assert replication(slave).state == "TRANSFER"
    (link,) = replication(master).links()
    assert (link.slave, link.acked, link.in_sync) == (1, copied.max_offset, True)
    assert copied.queue_max("t", 0) == 200
    await check_status(pair, copied.max_offset)
    await pair.end(master)
    await until(lambda: replication(slave).state == "READY")
    assert replication(slave).master_silent_ms() is None


async def check_status(pair: Pair, end: int) -> None:
    """Both tell what `mqadmin haStatus` asks for."""
    await until(lambda: replication(pair.master).links()[0].sent == end)
    answer = await pair.master.client.ask(Request.GET_BROKER_HA_STATUS)
    status = json.loads(bytes(answer.body))
    (slave,) = status["haConnectionInfo"]
    assert slave.pop("transferredByteInSecond") >= 0
    assert slave == {
        "addr": pair.slave.client.address, "slaveAckOffset": end, "diff": 0, "inSync": True,
        "transferFromWhere": end,
    }  # fmt: skip
    assert (status["master"], status["inSyncSlaveNums"]) == (True, 1)
    assert status["masterCommitLogMaxOffset"] == end
    answer = await pair.slave.client.ask(Request.GET_BROKER_HA_STATUS)
    status = json.loads(bytes(answer.body))
    link, now_ms = status["haClientRuntimeInfo"], pair.master.broker.now_ms()
    assert (status["master"], link["maxOffset"]) == (False, end)
    assert link["masterAddr"] == f"127.0.0.1:{replication(pair.master).port}"
    for name in ("lastReadTimestamp", "lastWriteTimestamp"):
        assert abs(now_ms - link[name]) < 1000 * PATIENCE_S


@pytest.mark.asyncio
async def test_without_its_slave_a_send_is_stored_and_says_so(begin: Begin) -> None:
    pair = begin()
    master, _ = await pair.begin("master"), await pair.begin("slave")
    pair.follow()
    await until(lambda: replication(master).refusal() is None)
    assert (await master.client.send("t")).code == Answer.SUCCESS
    await pair.end(pair.slave)
    await until(lambda: not replication(master).links())
    loop, status = asyncio.get_running_loop(), asyncio.Future[PutStatus]()
    end = master.broker.store.max_offset + 1
    replication(master).when_copied(end, 0.01, lambda s: loop.call_soon(status.set_result, s))
    assert await status is PutStatus.FLUSH_SLAVE_TIMEOUT
    replication(master).set_alive(1)
    await pair.end(master)
    master = await pair.begin("master", enableSlaveActingMaster=True, totalReplicas=1)
    # It ended in order, so that it lacks nothing; but nobody would have a copy.
    assert (await master.client.send("t")).code == Answer.SYSTEM_ERROR


@pytest.mark.asyncio
@pytest.mark.provokes("ha.fetched")
async def test_a_master_that_lost_its_disk_fetches_before_it_takes_writes(begin: Begin) -> None:
    """Upstream: the master starts empty, takes messages at offset 0, and its slave, which is ahead,
    is sent nothing until the master's log is longer; then bytes from mid-record."""
    pair = begin()
    master, slave = await pair.begin("master"), await pair.begin("slave")
    pair.follow()
    await until(lambda: replication(master).refusal() is None)
    for number in range(30):
        assert (await master.client.send("t", b"%d" % number)).code == Answer.SUCCESS
    had = content(master)
    await pair.end(master)
    shutil.rmtree(pair.directory / "master")
    master = await pair.begin("master")
    assert (await master.client.send("t")).code == Answer.SERVICE_NOT_AVAILABLE
    pair.follow()
    await until(lambda: replication(master).refusal() is None)
    assert content(master) == had
    assert (await master.client.send("t", b"next")).fields["queueOffset"] == "30"
    assert await bodies(master.client, "t") == [*(b"%d" % n for n in range(30)), b"next"]
    await equal(master, slave)


@pytest.mark.asyncio
@pytest.mark.provokes("ha.cut", "ha.forked")
async def test_surplus_is_cut_where_nobody_acknowledged_it_and_else_kept(begin: Begin) -> None:
    """The slave has messages of a life that its master's log goes on without. Was that proven, it
    cuts them; else it stops and says so."""
    pair = begin()
    master, slave = await pair.begin("master"), await pair.begin("slave")
    pair.follow()
    await until(lambda: replication(master).refusal() is None)
    await master.client.send("t", b"both")
    await equal(master, slave)
    for each in (slave, master):
        await pair.end(each)
    copy(pair.directory, "master", "early")
    master = await pair.begin("master")
    # Only the master has it, and a copy of its disk becomes the slave's: surplus.
    master.broker.store.put([Draft("t", 0, b"surplus")], 1)
    await pair.end(master)
    for name in ("slave", "fork"):
        copy(pair.directory, "master", name)
    for life, name, state in ((True, "slave", "TRANSFER"), (False, "fork", "SUSPEND")):
        copy(pair.directory, "early", "master")
        book = pair.directory / "master" / "config" / "groupLives.json"
        book.write_bytes(Book(lives=Book.decode(book.read_bytes()).lives, is_whole=life).encode())
        master = await pair.begin("master", inSyncReplicas=1)
        slave = await Running.begin(pair.directory / name, **(pair.settings | SLAVE))
        pair.all.append(slave)
        pair.slave = slave
        pair.follow()
        await until(lambda slave=slave, state=state: replication(slave).state == state)
        assert (b"surplus" in content(slave)) is not life
        for each in (slave, master):
            await pair.end(each)


@pytest.mark.asyncio
@pytest.mark.provokes("ha.slave_refused")
async def test_a_slave_that_reads_nothing_holds_up_nobody(begin: Begin) -> None:
    """One link is not read, one says nonsense, one claims a longer log: the good slave goes on."""
    pair = begin()
    master, slave = await pair.begin("master"), await pair.begin("slave")
    pair.follow()
    await until(lambda: replication(master).refusal() is None)
    port = replication(master).port
    _, stuck = await asyncio.open_connection("127.0.0.1", port)
    stuck.write(bytes(8))
    stuck.transport.pause_reading()  # type: ignore[attr-defined]
    for word in (-1 << 63, 1 << 60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(struct.pack(">q", word) * 3)
        async with asyncio.timeout(10 * PATIENCE_S):
            assert await reader.read() == b""
        writer.close()
    body = bytes(1 << 20)
    for _ in range(12):
        assert (await master.client.send("t", body)).code == Answer.SUCCESS
    await equal(master, slave)
    stuck.close()


@pytest.mark.asyncio
@pytest.mark.provokes(
    "ha.not_connected", "ha.comparison_failed", "ha.book_unreadable", "ha.not_persisted"
)
async def test_what_cannot_be_reached_or_read_is_said(begin: Begin) -> None:
    pair = begin()
    book = pair.directory / "slave" / "config" / "groupLives.json"
    book.parent.mkdir(parents=True)
    book.write_text("{")
    master, slave = await pair.begin("master"), await pair.begin("slave")
    own = replication(slave).slave
    assert own is not None
    replication(slave).set_master("127.0.0.1:1", f"127.0.0.1:{master.port}")
    await until(lambda: own.reason)
    assert not await replication(master).compare_with("127.0.0.1:1")
    other = await master.client.ask(Request.COMPARE_LOGS, brokerName="other", start=0, end=0)
    assert other.code == Answer.SYSTEM_ERROR
    # The list of lives cannot be written.
    own_book = pair.directory / "master" / "config" / "groupLives.json"
    own_book.unlink(missing_ok=True)
    own_book.with_suffix(".json.new").mkdir()
    pair.follow()
    await until(lambda: replication(slave).state == "TRANSFER")
    await until(lambda: replication(master).failures > 0)
    assert replication(master).refusal() is PutStatus.SERVICE_NOT_AVAILABLE
    own_book.with_suffix(".json.new").rmdir()
    await until(lambda: replication(master).refusal() is None)
    replication(slave).set_master(None)
    assert replication(slave).state == SlaveState.SHUTDOWN.value
