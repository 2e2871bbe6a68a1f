"""A group of RocketMQ's brokers is taken over by ours, and taken back, under clients that go on:
docs/rocketmq.md, "Moving a RocketMQ cluster over, and back"."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from convoymq.rocketmq.remoting.connection import Unreachable
from tests.patience import PATIENCE_S
from tests.rocketmq.broker_client import Client
from tests.rocketmq.processes import BrokerProcess, Server, kill
from tests.rocketmq.test_peers import CLIENTS, built, java, node_program
from tests.rocketmq.upstream import broker, environment, mqadmin, needs_rocketmq, ports
from tests.running import until

pytestmark = [needs_rocketmq, pytest.mark.optional]

TOPIC, NAME, QUEUES = "moving", "n", 4
STEP_COUNT = 40
"""Messages that each client confirms and receives before the next broker goes or comes."""


class Mover:
    """A client that sends and consumes, and what it said."""

    def __init__(self, directory: Path, name: str, line: list[str], names: str) -> None:
        self.name = name
        self.sent: list[str] = []
        self.got: list[tuple[int, int, str]] = []
        self.is_done = False
        self._output = (directory / f"{name}.out").open("w+")
        with (directory / f"{name}.err").open("w") as errors:
            self.process = subprocess.Popen(
                [*line, names, TOPIC, NAME], stdin=subprocess.PIPE, stdout=self._output.fileno(),
                stderr=errors, env=environment(directory),
            )  # fmt: skip
        self._said = (directory / f"{name}.out").open()
        self._rest = ""

    def read(self) -> None:
        """Takes what it said since."""
        lines = (self._rest + self._said.read()).split("\n")
        self._rest = lines.pop()
        for line in lines:
            word, *values = line.split(" ")
            if word == "sent":
                self.sent.append(values[0])
            elif word == "got":
                self.got.append((int(values[0]), int(values[1]), values[2]))
            self.is_done |= word == "done"

    def has_all(self, bodies: set[str]) -> bool:
        self.read()
        assert self.process.poll() is None, f"{self.name} ended"
        return bodies <= {body for _, _, body in self.got}

    def finish(self) -> None:
        """Has it send no more."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        kill(self.process)
        assert self.process.stdin is not None
        for each in (self.process.stdin, self._output, self._said):
            each.close()


class Migration:
    """The group, and the clients that run through it all."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.names = Server(directory)
        stack.callback(kill, self.names.process)
        self.movers: list[Mover] = []

    def theirs(self, home: str, number: int, **more: object) -> tuple[subprocess.Popen[bytes], int]:
        """Starts a broker of RocketMQ's."""
        chosen = ports()
        settings = chosen | {
            "brokerName": NAME, "brokerId": number, "namesrvAddr": self.names.address,
            "brokerRole": "SLAVE" if number else "ASYNC_MASTER", "enableSlaveActingMaster": "true",
            "totalReplicas": 2, "slaveReadEnable": "true", "brokerIP2": "127.0.0.1",
            "timerWheelEnable": "true", "compatibleWithOldNameSrv": "false",
        } | more  # fmt: skip
        process = self.stack.enter_context(broker(self.directory / home, **settings))
        return process, chosen["listenPort"]

    def ours(self, home: str, number: int, **more: object) -> BrokerProcess:
        """Starts a broker of ours."""
        directory = self.directory / home
        directory.mkdir()
        settings = {
            "brokerClusterName": "c", "brokerName": NAME, "brokerId": number,
            "brokerRole": "SLAVE" if number else "SYNC_MASTER", "enableSlaveActingMaster": "true",
            "totalReplicas": 2, "slaveReadEnable": "true", "mappedFileSizeConsumeQueue": 60_000,
            "compatibleWithOldNameSrv": "false",
        } | more  # fmt: skip
        made = BrokerProcess(directory, self.names.address, **settings)
        self.stack.callback(kill, made.process)
        return made

    def admin(self, *arguments: str) -> str:
        return mqadmin(self.directory / "admin", *arguments, "-n", self.names.address)

    def start(self, name: str, line: list[str]) -> None:
        made = Mover(self.directory, name, line, self.names.address)
        self.stack.callback(made.stop)
        self.movers.append(made)

    async def go_on(self) -> None:
        """Waits until each client has sent some more, and has received what was sent till then."""
        for each in self.movers:
            each.read()
        begin = {each.name: len(each.sent) for each in self.movers}

        def have_sent() -> bool:
            for each in self.movers:
                each.read()
                assert each.process.poll() is None, f"{each.name} ended"
            return all(len(each.sent) >= begin[each.name] + STEP_COUNT for each in self.movers)

        await until(have_sent)
        await self.are_even()

    async def are_even(self) -> set[str]:
        """Waits until all clients have received what has been confirmed; returns it."""
        for each in self.movers:
            each.read()
        confirmed = {body for each in self.movers for body in each.sent}
        await until(lambda: all(each.has_all(confirmed) for each in self.movers))
        return confirmed

    async def has(self, port: int) -> list[list[str]]:
        """Reads what a replica has, queue by queue."""
        client = Client(port)
        found = []
        try:
            for number in range(QUEUES):
                messages = await client.all(TOPIC, queueId=number)
                found.append([bytes(each.body).decode() for each in messages])
        finally:
            await client.stop()
        return found

    async def until_has(self, port: int) -> None:
        """Waits until a replica serves all that is confirmed by now."""
        confirmed = {body for each in self.movers for body in each.sent}
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(Unreachable):
                    if confirmed <= {body for each in await self.has(port) for body in each}:
                        return
                await asyncio.sleep(0.5)


@pytest.fixture
async def migration(tmp_path: Path) -> AsyncIterator[Migration]:
    with contextlib.ExitStack() as stack:
        yield Migration(tmp_path, stack)


def first_numbers(bodies: list[str]) -> Iterator[tuple[str, list[int]]]:
    """The numbers of each sender in the order in which each was there first: a message that was
    sent again, or received again, counts once."""
    found: dict[str, dict[int, None]] = {}
    for body in bodies:
        sender, number = body.rsplit(":", 1)
        found.setdefault(sender, {}).setdefault(int(number))
    return ((sender, list(numbers)) for sender, numbers in found.items())


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a broker as an operator does."""
    process.terminate()
    process.wait()


async def test_a_group_is_taken_over_and_back(migration: Migration) -> None:
    """Nothing that was confirmed is lost, no place of a queue has ever two messages, and each queue
    is consumed in order."""
    master, master_port = migration.theirs("their-master", 0)
    wait = migration.go_on
    created = ""
    while "create topic to" not in created:
        with contextlib.suppress(AssertionError):
            created = migration.admin("updateTopic", "-c", "c", "-t", TOPIC, "-r", "4", "-w", "4")
    slave, slave_port = migration.theirs("their-slave", 1)
    await migration.until_has(slave_port)
    migration.start("java", java(migration.directory, CLIENTS / "Mover.java"))
    if shutil.which("go") is not None:
        migration.start("go", [built(migration.directory, CLIENTS / "mover.go")])
    if shutil.which("npm") is not None:
        migration.start("node", node_program(migration.directory, CLIENTS / "mover.js"))
    await wait()
    # Over: our slave joins, and is the only one.
    our_slave = migration.ours("our-slave", 2)
    await migration.until_has(our_slave.port)
    address = f"127.0.0.1:{master_port}"
    for replica in (address, our_slave.address):
        assert "commitLogMaxOffset" in migration.admin("brokerStatus", "-b", replica)
    end(slave)
    for key, value in (("inSyncReplicas", "2"), ("brokerRole", "SYNC_MASTER")):
        migration.admin("updateBrokerConfig", "-b", address, "-k", key, "-v", value)
    await wait()
    end(master)
    await migration.are_even()
    await migration.until_has(our_slave.port)
    our_master = migration.ours("our-master", 0, inSyncReplicas=2)
    await wait()
    # Back: their slave joins, and is the only one.
    slave, slave_port = migration.theirs("their-slave-again", 1)
    await migration.until_has(slave_port)
    our_slave.stop()
    await wait()
    our_master.stop()
    await migration.are_even()
    await migration.until_has(slave_port)
    store = migration.directory / "our-master" / "store"
    _, master_port = migration.theirs(
        "their-master-again", 0, storePathRootDir=store, storePathCommitLog=store / "commitlog"
    )
    await wait()
    for each in migration.movers:
        each.finish()
    await until(lambda: all(each.has_all(set()) and each.is_done for each in migration.movers))
    confirmed = await migration.are_even()
    places: dict[tuple[int, int], str] = {}
    for mover in migration.movers:
        for queue, offset, body in mover.got:
            assert places.setdefault((queue, offset), body) == body
    stored = await migration.has(master_port)
    assert confirmed <= {body for each in stored for body in each}
    for number, bodies in enumerate(stored):
        assert [places[number, n] for n in range(len(bodies))] == bodies
        # Node's client chooses queues by itself.
        for sender, numbers in first_numbers(bodies):
            assert numbers == sorted(numbers)
            assert sender.startswith("node") or numbers == list(range(len(numbers)))
    java_got = migration.movers[0].got
    for number in range(QUEUES):
        offsets = dict.fromkeys(offset for queue, offset, _ in java_got if queue == number)
        assert list(offsets) == sorted(offsets)
