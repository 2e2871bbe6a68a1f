"""`make demo-groups`: a broker group loses its master, under load, and gets it back.

A name server, a master and its slave (broker `n`), and another master (`m`), as processes.
Producers, consumers, timed messages and transactions go on all the time. After some seconds the
master of `n` is killed; its slave acts, and what is due leaves through `m`; the master returns.
Then every message is counted, and the report says who served what when.

    python examples/demo_groups.py [--seconds 5] [--directory DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path

from convoymq.model.errors import BrokerError
from convoymq.rocketmq.remoting import json as bodies
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import PERM_WRITE, QueueData, RouteData
from convoymq.rocketmq.store.types import Message

TOPIC = "orders"
QUEUES = 4
GROUP = "demo"
PREPARED, COMMIT = 4, 8
DELAY_MS = 1500
PATIENCE_S = 60.0


def ports(count: int) -> list[int]:
    """Returns ports that are free, each with two free ones around it."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return found


class Processes:
    """The four processes.

    Args:
        numbers: seven ports, each with two free ones around it; chosen if none are given.
    """

    def __init__(self, directory: Path, numbers: Sequence[int] = ()) -> None:
        self.directory = directory
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        numbers = numbers or ports(7)
        self.name_server = f"127.0.0.1:{numbers[0]}"
        common = {
            "namesrvAddr": self.name_server, "bindAddress": "127.0.0.1", "brokerIP1": "127.0.0.1",
            "brokerClusterName": "demo", "enableSlaveActingMaster": "true",
            "enableRemoteEscape": "true", "slaveReadEnable": "true",
            "mappedFileSizeCommitLog": 16 << 20, "mappedFileSizeConsumeQueue": 60_000,
            "transactionCheckInterval": 500, "transactionTimeOut": 1000,
            "loadBalancePollNameServerInterval": 1000,
        }  # fmt: skip
        group = {"brokerName": "n", "totalReplicas": 2}
        self.settings: dict[str, dict[str, object]] = {
            "namesrv": {
                "listenPort": numbers[0], "bindAddress": "127.0.0.1", "supportActingMaster": "true",
                "kvConfigPath": directory / "kv.json",
            },
            "n-0": common | group | {
                "brokerId": 0, "brokerRole": "SYNC_MASTER", "inSyncReplicas": 2,
                "minInSyncReplicas": 1, "enableAutoInSyncReplicas": "true",
                "listenPort": numbers[1], "haListenPort": numbers[2],
            },
            "n-1": common | group | {
                "brokerId": 1, "brokerRole": "SLAVE", "listenPort": numbers[3],
                "haListenPort": numbers[4],
            },
            "m-0": common | {
                "brokerName": "m", "brokerId": 0, "listenPort": numbers[5],
                "haListenPort": numbers[6],
            },
        }  # fmt: skip

    def start(self, name: str) -> None:
        """Starts one, and waits until its port is open."""
        settings = self.settings[name]
        if name != "namesrv":
            settings = settings | {"storePathRootDir": self.directory / name}
        config = self.directory / f"{name}.conf"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        role = "namesrv" if name == "namesrv" else "broker"
        log = self.directory / f"{name}.log"
        with log.open("ab") as out:
            begin = out.tell()
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "convoymq.cli", role, "-c", str(config)],
                stdout=out, stderr=out,
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while b"role.ready" not in log.read_bytes()[begin:]:
            if self.running[name].poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start:\n{log.read_text()[begin:]}")
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        """Kills one, as a crash does."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Ends all in order."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            process.wait(PATIENCE_S)

    def events(self, *names: str) -> list[tuple[float, str, dict[str, object]]]:
        """Returns what brokers logged, in order: time, process, event."""
        found = []
        for path in self.directory.glob("*.log"):
            for line in path.read_text().splitlines():
                if line.startswith("{") and (said := json.loads(line))["event"] in names:
                    found.append((_seconds(str(said["timestamp"])), path.stem, said))
        return sorted(found, key=lambda each: each[0])


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


class Client:
    """A client that finds brokers by the name server, as RocketMQ's do."""

    def __init__(self, name_server: str) -> None:
        self.remoting = RemotingClient(self._on_request)
        self._name_server = name_server
        self._route: RouteData | None = None
        self._asked = 0.0

    async def ask(self, address: str, code: int, body: bytes = b"", /, **fields: object) -> Command:
        """Returns an answer. Raises BrokerError."""
        connection = await self.remoting.connected(address, 1.0)
        texts = {key: str(value) for key, value in fields.items()}
        return await connection.request(request(code, texts, body), 5.0)

    async def route(self) -> RouteData:
        """Returns where the topic is, half a second old at most."""
        now = time.monotonic()
        if self._route is None or now - self._asked > 0.5:
            answer = await self.ask(
                self._name_server, Request.GET_ROUTEINFO_BY_TOPIC, topic=TOPIC,
                acceptStandardJsonOnly=True,
            )  # fmt: skip
            self._route, self._asked = bodies.loads(answer.body, RouteData), now
        return self._route

    async def masters(self) -> dict[str, tuple[str, QueueData]]:
        """Returns brokers of the topic: name -> address in the master's place, queues."""
        route = await self.route()
        queues = {each.broker_name: each for each in route.queue_datas}
        return {
            each.broker_name: (each.broker_addrs[0], queues[each.broker_name])
            for each in route.broker_datas
            if 0 in each.broker_addrs
        }

    async def heartbeat(self, address: str) -> None:
        """Says that this client produces and consumes."""
        body = {
            "clientID": f"demo@{id(self)}",
            "producerDataSet": [{"groupName": GROUP}],
            "consumerDataSet": [{
                "groupName": GROUP, "consumeType": "CONSUME_PASSIVELY",
                "messageModel": "CLUSTERING", "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                "unitMode": False, "subscriptionDataSet": [{
                    "topic": TOPIC, "subString": "*", "subVersion": 1, "tagsSet": [],
                    "codeSet": [], "expressionType": "TAG", "classFilterMode": False,
                }],
            }],
        }  # fmt: skip
        await self.ask(address, Request.HEART_BEAT, json.dumps(body).encode())

    def _on_request(self, connection: Connection, command: Command) -> Command | None:
        """A broker asks what became of a half message: all of ours are committed."""
        if command.code == Request.CHECK_TRANSACTION_STATE:
            fields = command.fields
            answer = {
                "producerGroup": GROUP, "commitOrRollback": str(COMMIT),
                "fromTransactionCheck": "true", "msgId": fields.get("msgId", ""),
                "transactionId": fields.get("transactionId", ""), "topic": TOPIC,
                "tranStateTableOffset": fields["tranStateTableOffset"],
                "commitLogOffset": fields["commitLogOffset"],
            }  # fmt: skip
            connection.send(request(Request.END_TRANSACTION, answer, one_way=True))
        return None


class Load:
    """What goes on all the time, and what was promised."""

    def __init__(self, processes: Processes) -> None:
        self.client = Client(processes.name_server)
        self.confirmed: set[bytes] = set()
        """Bodies of messages that were confirmed: each has to be there once."""
        self.uncertain: set[bytes] = set()
        """A send that failed may be there or not."""
        self.due_ms: dict[bytes, int] = {}
        self.consumed: Counter[bytes] = Counter()
        self.served: list[tuple[float, str, str]] = []
        """(Time, what, address) when another address served than before."""
        self._last: dict[str, str] = {}
        self._turn = itertools.count()
        self._produces = self._consumes = True
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins."""
        producers = (self._plain, self._timed, self._transactions)
        self._tasks = [
            *(asyncio.ensure_future(self._again(w, lambda: self._produces)) for w in producers),
            *(asyncio.ensure_future(self._again(w, lambda: self._consumes))
              for w in (self._consume, self._beat)),
        ]  # fmt: skip

    async def stop(self) -> None:
        """Ends producers, and consumers when they have everything."""
        self._produces = False
        with contextlib.suppress(TimeoutError):
            await until(self._has_all)
        self._consumes = False
        await asyncio.gather(*self._tasks)

    async def _has_all(self) -> bool:
        return self.confirmed <= self.consumed.keys()

    async def _again(
        self, work: Callable[[], Awaitable[None]], goes_on: Callable[[], bool]
    ) -> None:
        while goes_on():
            try:
                await work()
            except (BrokerError, KeyError):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.02)

    async def is_served_by(self, what: str, address: str) -> bool:
        """Returns whether an address was the last to serve."""
        return self._last.get(what) == address

    def _serves(self, what: str, address: str) -> None:
        if self._last.get(what) != address:
            self._last[what] = address
            self.served.append((time.time(), what, address))

    async def _send(
        self, kind: str, flag: int = 0, properties: str = ""
    ) -> tuple[str, bytes, Command] | None:
        """Sends a message to some broker that may be written to; returns broker, body, answer."""
        number = next(self._turn)
        body = f"{kind} {number}".encode()
        masters = await self.client.masters()
        writable = sorted(n for n, (_, queues) in masters.items() if queues.perm & PERM_WRITE)
        if not writable:
            return None
        name = writable[number % len(writable)]
        address = masters[name][0]
        try:
            answer = await self.client.ask(
                address, Request.SEND_MESSAGE_V2, body, a=GROUP, b=TOPIC, c="TBW102", d=QUEUES,
                e=number % QUEUES, f=flag, g=int(time.time() * 1000), h=0, i=properties, j=0,
                k="false", m="false",
            )  # fmt: skip
        except BrokerError:
            self.uncertain.add(body)
            raise
        if answer.code != Answer.SUCCESS:
            self.uncertain.add(body)
            return None
        self._serves(f"sends to {name}", address)
        return name, body, answer

    async def _plain(self) -> None:
        sent = await self._send("plain")
        if sent is not None:
            self.confirmed.add(sent[1])

    async def _timed(self) -> None:
        due_ms = int(time.time() * 1000) + DELAY_MS
        sent = await self._send("timed", properties=f"TIMER_DELIVER_MS\x01{due_ms}\x02")
        if sent is not None:
            self.confirmed.add(sent[1])
            self.due_ms[sent[1]] = due_ms
        await asyncio.sleep(0.05)

    async def _transactions(self) -> None:
        properties = f"TRAN_MSG\x01true\x02PGROUP\x01{GROUP}\x02"
        sent = await self._send("transaction", PREPARED, properties)
        if sent is None:
            return
        name, body, answer = sent
        # A half message that is stored is decided by a check at the latest.
        self.confirmed.add(body)
        await asyncio.sleep(0.2)
        if len(self.confirmed) % 5 == 0:
            return
        address = (await self.client.masters())[name][0]
        ended = await self.client.ask(
            address, Request.END_TRANSACTION, topic=TOPIC, producerGroup=GROUP,
            tranStateTableOffset=answer.fields["queueOffset"],
            commitLogOffset=int(answer.fields["msgId"][-16:], 16), commitOrRollback=COMMIT,
            fromTransactionCheck="false", msgId=answer.fields.get("transactionId", ""),
            transactionId=answer.fields.get("transactionId", ""),
        )  # fmt: skip
        if ended.code == Answer.SUCCESS:
            self._serves(f"ends of transactions of {name}", address)

    async def _beat(self) -> None:
        for address, _ in (await self.client.masters()).values():
            await self.client.heartbeat(address)
        await asyncio.sleep(0.5)

    async def _consume(self) -> None:
        for name, (address, queues) in (await self.client.masters()).items():
            for queue in range(queues.read_queue_nums):
                await self._consume_queue(name, address, queue)

    async def _consume_queue(self, name: str, address: str, queue: int) -> None:
        where = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": queue}
        known = await self.client.ask(
            address, Request.QUERY_CONSUMER_OFFSET, **where, setZeroIfNotFound="false"
        )
        offset = int(known.fields.get("offset", 0))
        messages, after = await pull(self.client, address, queue, offset)
        if after > offset:
            self.consumed.update(bytes(message.body) for message in messages)
            await self.client.ask(
                address, Request.UPDATE_CONSUMER_OFFSET, **where, commitOffset=after
            )
            self._serves(f"consumers of {name}", address)


async def pull(client: Client, address: str, queue: int, offset: int) -> tuple[list[Message], int]:
    """Returns messages of a queue, and the offset behind them."""
    answer = await client.ask(
        address, Request.PULL_MESSAGE, consumerGroup=GROUP, topic=TOPIC, queueId=queue,
        queueOffset=offset, maxMsgNums=32, sysFlag=4, commitOffset=0, suspendTimeoutMillis=0,
        subscription="*", subVersion=0, expressionType="TAG",
    )  # fmt: skip
    body, at, messages = memoryview(bytes(answer.body)), 0, []
    while answer.code == Answer.SUCCESS and at < len(body):
        (size,) = struct.unpack_from(">i", body, at)
        messages.append(Message(body[at : at + size]))
        at += size
    return messages, int(answer.fields["nextBeginOffset"]) if messages else offset


async def stored(client: Client) -> list[Message]:
    """Returns all messages of the topic on all brokers."""
    found = []
    for address, queues in (await client.masters()).values():
        for queue in range(queues.read_queue_nums):
            offset = 0
            while True:
                messages, after = await pull(client, address, queue, offset)
                if after == offset:
                    break
                found += messages
                offset = after
    return found


async def has_route(client: Client, brokers: int, *, writable: int) -> bool:
    """Returns whether so many brokers have the topic, and may be written to."""
    try:
        masters = await client.masters()
    except (BrokerError, KeyError):
        return False
    free = [queues for _, queues in masters.values() if queues.perm & PERM_WRITE]
    return len(masters) == brokers and len(free) == writable


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def run(processes: Processes, seconds: float) -> list[str]:
    """Runs the demonstration; returns promises that were broken."""
    for name in ("namesrv", "n-0", "n-1", "m-0"):
        processes.start(name)
    load = Load(processes)
    client = load.client
    for name in ("n-0", "m-0"):
        await client.ask(
            f"127.0.0.1:{processes.settings[name]['listenPort']}",
            Request.UPDATE_AND_CREATE_TOPIC, topic=TOPIC, defaultTopic="TBW102",
            readQueueNums=QUEUES, writeQueueNums=QUEUES, perm=6, topicFilterType="SINGLE_TAG",
            order="false",
        )  # fmt: skip
    await until(lambda: has_route(client, 2, writable=2))
    begun = time.time()
    load.start()
    await asyncio.sleep(seconds)
    processes.kill("n-0")
    killed = time.time()
    await until(lambda: has_route(client, 2, writable=1))
    with contextlib.suppress(TimeoutError):
        slave = f"127.0.0.1:{processes.settings['n-1']['listenPort']}"
        await until(lambda: load.is_served_by("consumers of n", slave))
    await asyncio.sleep(seconds)
    returned = time.time()
    # Producers answer checks of their transactions meanwhile.
    await asyncio.to_thread(processes.start, "n-0")
    await until(lambda: has_route(client, 2, writable=2))
    await asyncio.sleep(seconds)
    load_ended = time.time()
    await load.stop()
    messages = await stored(client)
    moments = (begun, killed, returned, load_ended)
    broken = report(processes, load, messages, moments)
    await client.remoting.stop()
    return broken


def report(
    processes: Processes,
    load: Load,
    messages: list[Message],
    moments: tuple[float, float, float, float],
) -> list[str]:
    """Prints the time line and the counts; returns promises that were broken."""
    begun, killed, returned, ended = moments
    counts = Counter(bytes(each.body) for each in messages)
    lost = load.confirmed - counts.keys()
    doubled = [body for body, count in counts.items() if count > 1]
    names = {f"127.0.0.1:{s['listenPort']}": n for n, s in processes.settings.items()}
    lines = [
        (begun, "load begins"),
        (killed, "n-0, the master of n, is killed"),
        (returned, "n-0 is started again"),
        (ended, "load ends"),
        *((at, f"{names.get(by, by)} serves {what}") for at, what, by in load.served),
    ]
    for at, process, said in processes.events("rocketmq.role", "rocketmq.services_started"):
        if at >= begun - 0.001:
            text = said.get("state", "runs special services")
            lines.append((at, f"{process}: {text}"))
    print("   time  what")
    for at, text in sorted(lines):
        print(f"{at - begun:7.2f}  {text}")
    late = [
        each.stored_ms - load.due_ms[bytes(each.body)]
        for each in messages
        if bytes(each.body) in load.due_ms
        and killed * 1000 <= load.due_ms[bytes(each.body)] <= returned * 1000
    ]
    escaped = sum("ESCAPE_KEY" in each.properties for each in messages)
    print(f"\nmessages confirmed         {len(load.confirmed)}")
    print(f"sends without an answer    {len(load.uncertain)}")
    print(f"stored once                {sum(count == 1 for count in counts.values())}")
    print(f"with a key of escape       {escaped}")
    print(f"lost                       {len(lost)}")
    print(f"doubled                    {len(doubled)}")
    print(f"consumed                   {len(load.confirmed & load.consumed.keys())}")
    print(f"consumed more than once    {sum(count > 1 for count in load.consumed.values())}")
    if late:
        print(f"timed, due without n-0     {len(late)}, at most {max(late)} ms late")
    broken = []
    if lost:
        broken.append(f"lost: {sorted(lost)[:5]}")
    if load.confirmed - load.consumed.keys():
        broken.append(f"not consumed: {len(load.confirmed - load.consumed.keys())}")
    if doubled:
        broken.append(f"doubled: {sorted(doubled)[:5]}")
    served = {what for at, what, by in load.served if killed < at < returned and "n-1" in
              names.get(by, "")}  # fmt: skip
    if "consumers of n" not in served:
        broken.append("n-1 served no consumer while n-0 was away")
    print("\nall promises kept" if not broken else f"\nBROKEN: {'; '.join(broken)}")
    return broken


def main() -> int:
    """Runs the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each part")
    parser.add_argument("--directory", type=Path, help="files of the processes; kept")
    chosen = parser.parse_args()
    directory = chosen.directory or Path(tempfile.mkdtemp(prefix="convoy-groups-"))
    directory.mkdir(parents=True, exist_ok=True)
    processes = Processes(directory)
    try:
        return 1 if asyncio.run(run(processes, chosen.seconds)) else 0
    finally:
        processes.stop()
        if chosen.directory is None:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
