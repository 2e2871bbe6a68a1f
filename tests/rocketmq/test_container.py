"""Several brokers in one process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from convoymq.rocketmq.acting.container import Container, ContainerSettings
from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.values import TopicConfig
from convoymq.rocketmq.store.types import Draft, PutStatus, encode_properties
from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.rocketmq.broker_client import Client
from tests.rocketmq.processes import RoleProcess
from tests.running import until


def broker_text(directory: Path, name: str, number: int = 0, **settings: object) -> bytes:
    """The configuration of a broker as a request has it."""
    chosen = {
        "brokerName": name, "brokerId": number, "brokerRole": "SLAVE" if number else "ASYNC_MASTER",
        "listenPort": 0, "haListenPort": 0, "bindAddress": "127.0.0.1", "brokerIP1": "127.0.0.1",
        "storePathRootDir": directory / f"{name}-{number}", "mappedFileSizeCommitLog": 4 << 20,
        "mappedFileSizeConsumeQueue": 20_000, "brokerClusterName": "c",
        "enableSlaveActingMaster": "true",
    } | settings  # fmt: skip
    return "".join(f"{key}={value}\n" for key, value in chosen.items()).encode()


class Running:
    """A container with a name server, and a client of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name_server = NameServer(
            NamesrvSettings(port=0, host="127.0.0.1", kv_path=str(directory / "kv.json")),
            lambda: 0,
        )

    async def start(self) -> None:
        address = f"127.0.0.1:{await self.name_server.start()}"
        self.container = Container(
            ContainerSettings(port=0, host="127.0.0.1", name_servers=address)
        )
        self.client = Client(await self.container.start())

    async def stop(self) -> None:
        await self.client.stop()
        await self.container.stop()
        await self.name_server.stop()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    made = Running(tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.mark.provokes("rocketmq.broker_added", "rocketmq.broker_removed")
async def test_brokers_are_added_and_removed(running: Running) -> None:
    ask, directory = running.client.ask, running.directory
    assert (await ask(Request.ADD_BROKER, broker_text(directory, "m"))).code == Answer.SUCCESS
    again = await ask(Request.ADD_BROKER, broker_text(directory, "m"))
    assert again.code == Answer.SYSTEM_ERROR
    assert again.remark == "Broker already exists in current broker container"
    file = directory / "n.conf"
    file.write_bytes(broker_text(directory, "n", 1))
    assert (await ask(Request.ADD_BROKER, configPath=str(file))).code == Answer.SUCCESS
    assert list(running.container.brokers) == [("c", "m", 0), ("c", "n", 1)]
    names = {"brokerClusterName": "c", "brokerName": "m", "brokerId": 0}
    assert (await ask(Request.REMOVE_BROKER, **names)).code == Answer.SUCCESS
    missing = await ask(Request.REMOVE_BROKER, **names)
    assert (missing.code, missing.remark) == (Answer.SYSTEM_ERROR, "Broker not exist: c:m:0")
    # Its files are free: it may come again.
    assert (await ask(Request.ADD_BROKER, broker_text(directory, "m"))).code == Answer.SUCCESS


@pytest.mark.parametrize("text", [b"brokerNam=m\n", b"nonsense\n", b"\xff"])
async def test_a_wrong_configuration_is_answered_with_the_reason(
    running: Running, text: bytes
) -> None:
    answer = await running.client.ask(Request.ADD_BROKER, text)
    assert answer.code == Answer.SYSTEM_ERROR
    assert answer.remark
    assert answer.remark.startswith("start broker failed: ")


async def test_a_port_that_is_taken_harms_nobody(running: Running) -> None:
    ask, directory = running.client.ask, running.directory
    port = single_port()
    first = broker_text(directory, "m", listenPort=port)
    assert (await ask(Request.ADD_BROKER, first)).code == Answer.SUCCESS
    taken = await ask(Request.ADD_BROKER, broker_text(directory, "n", listenPort=port))
    assert taken.code == Answer.SYSTEM_ERROR
    assert (await ask(Request.ADD_BROKER, broker_text(directory, "n"))).code == Answer.SUCCESS


async def test_messages_escape_to_a_master_beside_their_slave(running: Running) -> None:
    """Without `enableRemoteEscape`: nothing leaves the process."""
    ask, directory = running.client.ask, running.directory
    await ask(Request.ADD_BROKER, broker_text(directory, "m"))
    await ask(Request.ADD_BROKER, broker_text(directory, "n", 1))
    master = running.container.brokers["c", "m", 0]
    acting = running.container.brokers["c", "n", 1]
    await until(lambda: acting.group.state is State.ACTING)
    master.topics.create(TopicConfig("orders", 2, 2, 6))
    for offset in (3, 4, 3):
        key = encode_properties({"ESCAPE_KEY": f"n:SCHEDULE_TOPIC_XXXX:0:{offset}"})
        placed = await acting.escape.put(Draft("orders", 5, b"late", key))
        assert placed.status is PutStatus.PUT_OK
    await until(lambda: master.store.queue_max("orders", 1) == 2)
    unknown = await acting.escape.put(Draft("elsewhere", 0, b"late"))
    assert unknown.status is PutStatus.SERVICE_NOT_AVAILABLE


def test_the_process_starts_the_brokers_of_its_files(tmp_path: Path) -> None:
    paths = []
    for name in ("m", "n"):
        paths.append(tmp_path / f"{name}.conf")
        paths[-1].write_bytes(broker_text(tmp_path, name))
    container = RoleProcess(
        tmp_path, "container", "broker-container", listenPort=0, bindAddress="127.0.0.1",
        brokerConfigPaths=":".join(map(str, paths)),
    )  # fmt: skip
    try:
        container.wait_for("role.ready")
    finally:
        container.process.terminate()
    assert container.process.wait(PATIENCE_S) == 0
    said = [
        json.loads(line) for line in container.log.read_text().splitlines() if line.startswith("{")
    ]
    added = [(each["broker"], each["id"]) for each in said if each["event"].endswith("_added")]
    assert added == [("m", 0), ("n", 0)]
