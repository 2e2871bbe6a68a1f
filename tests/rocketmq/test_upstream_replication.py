"""A broker group of RocketMQ's broker and ours, either of them the master: equal logs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.connection import Unreachable
from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.rocketmq.broker_client import Client, Running
from tests.rocketmq.test_replication import GROUP, MASTER, SLAVE, content, replication
from tests.rocketmq.upstream import broker, needs_rocketmq
from tests.running import until

pytestmark = [needs_rocketmq, pytest.mark.optional, pytest.mark.asyncio]

JAVA_S = 40 * PATIENCE_S
COUNT = 200
NAME = {"brokerName": "b", "brokerClusterName": "c", "mappedFileSizeCommitLog": 4 << 20}


async def send_until(client: Client, body: bytes) -> None:
    """Sends a message until the broker takes it."""
    deadline = time.monotonic() + JAVA_S
    while True:
        try:
            answer = await client.send("TopicTest", body)
            if answer.code == Answer.SUCCESS:
                return
            reason = f"{answer.code}: {answer.remark}"
        except Unreachable as error:
            reason = error.text
        assert time.monotonic() < deadline, reason
        await asyncio.sleep(0.2)


def file_of(directory: Path, length: int) -> bytes:
    """The beginning of the log of a broker of RocketMQ's."""
    with (directory / "store" / "commitlog" / f"{0:020}").open("rb") as file:
        return file.read(length)


async def test_our_slave_copies_rocketmqs_master(tmp_path: Path) -> None:
    """The master waits for our slave's reports. Then it comes back with nothing: RocketMQ's begins
    at offset 0, idles until its log is longer than the slave's, and sends what lies there, in the
    middle of a record. Ours takes none of that."""
    _, _, port, ha_port = (single_port() for _ in range(4))
    settings = NAME | {
        "brokerId": 0, "brokerRole": "SYNC_MASTER", "listenPort": port, "haListenPort": ha_port,
        "inSyncReplicas": 2, "slaveTimeout": 60_000,
    }  # fmt: skip
    ours = await Running.begin(tmp_path / "ours", **(GROUP | SLAVE))
    slave = replication(ours).slave
    assert slave is not None
    client = Client(port)
    try:
        with broker(tmp_path / "theirs", **settings) as master:
            replication(ours).set_master(f"127.0.0.1:{ha_port}", f"127.0.0.1:{port}")
            await send_until(client, b"first")
            for number in range(COUNT):
                answer = await client.send("TopicTest", b"%d" % number * 40)
                assert answer.code == Answer.SUCCESS, answer.remark
            # Each was on both when it was acknowledged.
            copied = content(ours)
            assert file_of(tmp_path / "theirs", len(copied) + 8) == copied + bytes(8)
            master.kill()
            master.wait()
        with broker(tmp_path / "emptied", **(settings | {"inSyncReplicas": 1})):
            await send_until(client, b"a fork")
            await until(lambda: slave.state.value == "TRANSFER", JAVA_S)
            while slave.state.value == "TRANSFER":
                await client.send("TopicTest", bytes(1777))
            assert "no message" in slave.reason
        assert content(ours) == copied
    finally:
        await client.stop()
        await ours.stop()


async def test_rocketmqs_slave_copies_our_master(tmp_path: Path) -> None:
    """Our master waits for the reports of RocketMQ's slave. Then it comes back with nothing, and
    serves no fork to a slave that has more. A broker's second port is two below its first."""
    names = NameServer(
        NamesrvSettings(port=0, host="127.0.0.1", kv_path=str(tmp_path / "kv")),
        lambda: time.monotonic_ns() // 1_000_000,
    )
    addresses = {"namesrvAddr": f"127.0.0.1:{await names.start()}"}
    ports = [single_port() for _ in range(7)]
    roles = GROUP | MASTER | addresses | {"listenPort": ports[2]}
    ours = await Running.begin(tmp_path / "ours", **roles)
    ha_port = replication(ours).port
    settings = NAME | addresses | {
        "brokerId": 1, "brokerRole": "SLAVE", "listenPort": ports[5], "haListenPort": ports[6],
    }  # fmt: skip
    try:
        with broker(tmp_path / "theirs", **settings):
            await send_until(ours.client, b"first")
            for number in range(COUNT):
                answer = await ours.client.send("TopicTest", b"%d" % number * 40)
                assert answer.code == Answer.SUCCESS, answer.remark
            copied = content(ours)
            assert file_of(tmp_path / "theirs", len(copied) + 8) == copied + bytes(8)
            await ours.stop()
            ours = await Running.begin(tmp_path / "emptied", **(roles | {"haListenPort": ha_port}))
            master = replication(ours).master
            assert master is not None
            await until(lambda: bool(master.refused), JAVA_S)
            assert (await ours.client.send("TopicTest")).code == Answer.SERVICE_NOT_AVAILABLE
    finally:
        await ours.stop()
        await names.stop()
