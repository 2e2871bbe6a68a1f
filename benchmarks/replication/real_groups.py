"""A broker group with real processes: a name server, and three brokers behind proxies.

Brokers are told addresses of proxies, which know by the process at the other end who dials.
Clients go to the brokers themselves, whose addresses name servers give them.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from tests.faults.proxies import Proxies, Proxy
from tests.faults.traffic import padded, until
from tests.rocketmq.broker_client import Client, records
from tests.rocketmq.processes import BrokerProcess, Server
from tests.rocketmq.upstream import ports

from benchmarks.replication.faults import NODES, Fault
from benchmarks.replication.ledger import Delivered, Ledger
from benchmarks.replication.real import BODY_BYTES, QUEUE, Clock, Outages, Runner, carry_out
from convoymq.model.errors import BrokerError
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.values import RouteData

HOST, PROXY_HOST = "127.0.0.1", "127.0.0.2"
DIRECTORY = "node-"
MASTER = NODES[0]
TICK_S, RETRY_S, HELD_MS = 0.01, 0.05, 1000
WINDOW = 300


class BrokerProxy(Proxy):
    """Stands in front of a port of a broker."""

    async def dialler(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, bytes, None]:
        """See `Proxy`."""
        _, port = writer.get_extra_info("peername")
        return await asyncio.to_thread(_node_at, port), b"", None


def _node_at(port: int) -> int:
    """Returns the broker whose connection has this port at its end; 0 = none."""
    with suppress(psutil.Error):
        for each in psutil.net_connections("tcp"):
            if each.laddr.port == port and each.pid:
                # The broker's configuration file is its last argument.
                command = " ".join(psutil.Process(each.pid).cmdline())
                found = re.search(rf"{DIRECTORY}([0-9]+)/broker\.conf$", command)
                return int(found[1]) if found else 0
    return 0


class BrokerProxies(Proxies):
    """The proxies of a group."""

    def __init__(self, chosen: Mapping[int, Mapping[str, int]]) -> None:
        super().__init__(())
        self.proxies = [
            BrokerProxy(self, number, port, (PROXY_HOST, port))
            for number, mine in chosen.items()
            for port in mine.values()
        ]


class FaultyGroup(Outages):
    """A name server, a master and two slaves that faults come to."""

    def __init__(self, data: Path, library: Path | None, settings: Mapping[str, object]) -> None:
        super().__init__()
        self.data, self.library, self.settings = data, library, settings
        self.ports = {node: ports() for node in NODES}
        self.brokers: dict[int, BrokerProcess] = {}
        self.proxies = BrokerProxies(self.ports)

    def __enter__(self) -> FaultyGroup:
        self.proxies.__enter__()
        self.names = Server(self.data)
        for node in NODES:
            self.start_node(node)
        self.wait_ready()
        return self

    def __exit__(self, *error: object) -> None:
        for broker in self.brokers.values():
            broker.process.kill()
            broker.process.wait()
        self.names.process.kill()
        self.names.process.wait()
        self.proxies.__exit__(*error)

    def start_node(self, number: int) -> None:
        """See `Outages`."""
        directory = self.data / f"{DIRECTORY}{number}"
        directory.mkdir(exist_ok=True)
        kind = type("Broker", (BrokerProcess,), {"environment": self.preloaded(number)})
        self.brokers[number] = kind(
            directory, self.names.address, **self.ports[number], **self.settings,
            brokerIP1=PROXY_HOST, brokerIP2=PROXY_HOST, brokerName="group",
            brokerId=number - MASTER, brokerRole="SLAVE" if number != MASTER else "SYNC_MASTER",
        )  # fmt: skip

    def kill(self, number: int, sign: int = 9) -> None:
        """See `Outages`."""
        self.brokers[number].process.send_signal(sign)

    def kill_process(self, node: int, sign: int) -> None:
        """See `Outages`."""
        self.kill(node, sign)
        self.brokers[node].process.wait()

    def wait_ready(self) -> None:
        """See `Outages`."""
        for broker in self.brokers.values():
            if broker.process.poll() is None:
                broker.wait_for("rocketmq.online")

    def leader_of(self, name: str) -> int:
        """See `Outages`."""
        return MASTER

    def link_bytes(self) -> int:
        """See `Outages`."""
        return self.proxies.bytes_passed


class GroupClient(threading.Thread):
    """A client in a thread of its own, which asks the name server where to go when it fails."""

    def __init__(self, number: int, names: str, ledger: Ledger, clock: Clock) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.names = names
        self.ledger = ledger
        self.clock = clock
        self.ending = self.stopping = False
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self.failure = error

    async def _main(self) -> None:
        self.client = Client(0)
        self.client.timeout_s = 3.0
        try:
            while not self.stopping:
                try:
                    await self.work()
                except BrokerError:
                    await asyncio.sleep(RETRY_S)
                    with suppress(BrokerError):
                        await self._find()
        finally:
            await self.client.stop()

    async def work(self) -> None:
        """Does a little. Raises BrokerError."""
        raise NotImplementedError

    async def _find(self) -> None:
        """Asks where the topic is: at the master, or the slave that acts in its place."""
        client = self.client
        client.address = self.names
        route = await client.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic=QUEUE)
        for each in json.loads(route.body, RouteData).broker_datas if not route.code else ():
            client.address = each.broker_addrs.get(0, "").replace(PROXY_HOST, HOST)


class GroupPublisher(GroupClient):
    """Sends everything once, to all queues in turn, and tells a ledger."""

    def __init__(self, number: int, names: str, ledger: Ledger, clock: Clock) -> None:
        super().__init__(number, names, ledger, clock)
        self.next = self.number * 1_000_000
        self.sending: set[asyncio.Task[None]] = set()
        self.failed = True

    @property
    def waits(self) -> bool:
        """See `Publishing`."""
        return bool(self.sending)

    async def work(self) -> None:
        """See `GroupClient`."""
        await asyncio.sleep(TICK_S)
        if self.failed:
            self.failed = False
            await self._find()
        client = self.client
        await client.remoting.connected(client.address, client.timeout_s)
        if not self.ending and len(self.sending) < WINDOW:
            number, self.next = self.next, self.next + 1
            self.ledger.published[self.number, number] = self.clock.now_s()
            task = asyncio.get_running_loop().create_task(self._send(number))
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)

    async def _send(self, number: int) -> None:
        try:
            body, queue = padded(number, BODY_BYTES), number % len(NODES)
            answer = await self.client.send(QUEUE, body, d=len(NODES), e=queue)
        except BrokerError:
            self.failed = True
            return
        if answer.code == Answer.SUCCESS:
            self.ledger.confirmed[self.number, number] = self.clock.now_s(), self.number
        else:
            self.failed = True


class GroupConsumer(GroupClient):
    """Pulls one queue, and keeps its position."""

    offset = 0

    async def work(self) -> None:
        """See `GroupClient`."""
        answer = await self.client.pull(QUEUE, self.offset, self.number - 1, wait_ms=HELD_MS)
        for message in records(answer) if answer.code == Answer.SUCCESS else ():
            number = int(bytes(message.body))
            key = number // 1_000_000, number
            repeated = message.reconsume_times > 0
            self.ledger.delivered.append(
                Delivered(self.clock.now_s(), self.number, self.number, key, repeated)
            )
            self.offset = message.queue_offset + 1
        if answer.code == Answer.PULL_OFFSET_MOVED:
            self.offset = int(answer.fields["nextBeginOffset"])
        if answer.code != Answer.SUCCESS:
            # Maybe there is a master again, or none any more.
            await self._find()


@contextmanager
def group_of(library: Path | None, settings: Mapping[str, object]) -> Iterator[FaultyGroup]:
    """A group that is online, and its topic."""
    with (
        tempfile.TemporaryDirectory(prefix="replication-") as directory,
        FaultyGroup(Path(directory), library, settings) as group,
    ):
        until(lambda: asyncio.run(_create(group.ports[MASTER]["listenPort"])), "no topic")
        yield group


async def _create(port: int) -> bool:
    client = Client(port)
    try:
        queues = len(NODES)
        answer = await client.ask(
            Request.UPDATE_AND_CREATE_TOPIC, topic=QUEUE, readQueueNums=queues,
            writeQueueNums=queues, perm=6, topicFilterType="SINGLE_TAG", topicSysFlag=0,
            order=False, defaultTopic="TBW102",
        )  # fmt: skip
        return answer.code == Answer.SUCCESS
    finally:
        await client.stop()


def group(settings: Mapping[str, object]) -> Runner:
    """Runs a group whose brokers have these settings."""

    def run(fault: Fault, library: Path | None) -> Ledger:
        ledger, clock = Ledger(), Clock()
        with group_of(library, settings) as found:
            address = found.names.address
            publishers = [GroupPublisher(n, address, ledger, clock) for n in NODES]
            consumers = [GroupConsumer(n, address, ledger, clock) for n in NODES]
            carry_out(found, fault, ledger, clock, publishers, consumers)
        return ledger

    return run
