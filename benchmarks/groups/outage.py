"""The time that consumers and timed messages lose when the master of a group is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.groups.systems import BASE_PORT, OTHER, System, broker_port
from convoymq.model.errors import Unavailable
from convoymq.rocketmq.broker.names import TIMER_TOPIC
from convoymq.rocketmq.client.client import Queue, RocketClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.special.names import TIMER_DELIVER_MS

T = TypeVar("T")
TOPIC, QUEUES = "outage", 4
MESSAGES = 200
DUE_MS = 3_000
TRY_S, PAUSE_S = 1.0, 0.01
START_S, PATIENCE_S = 300.0, 120.0
ACTING = {
    "enableSlaveActingMaster": True, "enableRemoteEscape": True, "slaveReadEnable": True,
    "totalReplicas": 2, "compatibleWithOldNameSrv": False, "brokerNotActiveTimeoutMillis": 10_000,
}  # fmt: skip


async def _until(work: Callable[[], Awaitable[T]], patience_s: float = PATIENCE_S) -> T:
    """Returns the first outcome that is something. Raises TimeoutError."""
    async with asyncio.timeout(patience_s):
        while True:
            try:
                async with asyncio.timeout(TRY_S):
                    found = await work()
                if found:
                    return found
            except (Unavailable, TimeoutError):
                pass
            await asyncio.sleep(PAUSE_S)


class _Outage:
    """A topic of a group `b`, and of the broker to which its messages escape."""

    def __init__(self, client: RocketClient) -> None:
        self._client = client
        self._queue = Queue("b", 0)

    async def _ask(self, port: int, code: int, **fields: object) -> Command | None:
        texts = {name: str(value) for name, value in fields.items()}
        answer = await self._client.remoting.ask(f"127.0.0.1:{port}", request(code, texts), TRY_S)
        return answer if answer.code == Answer.SUCCESS else None

    async def _slave_has(self, topic: str, count: int) -> bool:
        found = await self._ask(broker_port(1), Request.GET_MAX_OFFSET, topic=topic, queueId=0)
        return found is not None and found.number("offset") >= count

    async def _sent(self, properties: dict[str, str]) -> bool:
        await self._client.send(TOPIC, self._queue, bytes(1024), properties)
        return True

    async def _is_routed(self) -> bool:
        route = await self._client.route(TOPIC)
        return sum(len(data.broker_addrs) for data in route.broker_datas) == 3

    async def prepare(self) -> None:
        """Stores messages on both replicas."""
        for port in (broker_port(0), broker_port(OTHER)):
            made = partial(
                self._ask, port, Request.UPDATE_AND_CREATE_TOPIC, topic=TOPIC,
                defaultTopic="TBW102", readQueueNums=QUEUES, writeQueueNums=QUEUES, perm=6,
                topicFilterType="SINGLE_TAG", topicSysFlag=0, order="false",
            )  # fmt: skip
            await _until(made, START_S)
        await _until(self._is_routed, START_S)
        for _ in range(MESSAGES):
            await _until(lambda: self._sent({}), START_S)
        await _until(lambda: self._slave_has(TOPIC, MESSAGES), START_S)
        # RocketMQ's slave copies topics once a minute, and serves no other one while it acts.
        known = partial(self._ask, broker_port(1), Request.GET_TOPIC_CONFIG, topic=TOPIC)
        await _until(known, START_S)

    async def send_timed(self) -> float:
        """Stores a timed message on both; returns its time."""
        due_ms = int(time.time() * 1000) + DUE_MS
        await _until(lambda: self._sent({TIMER_DELIVER_MS: str(due_ms)}), START_S)
        await _until(lambda: self._slave_has(TIMER_TOPIC, 1), START_S)
        return due_ms / 1000

    async def resumed(self) -> bool:
        """Returns whether the rest of the queue can be read, by a client that looks for it."""
        await self._client.route(TOPIC)
        pulled = await self._client.pull(
            TOPIC, self._queue, MESSAGES // 2, count=32, bytes_max=1 << 20, hold_ms=0
        )
        return pulled.code == Answer.SUCCESS

    async def arrived(self) -> bool:
        """Returns whether the timed message has left for the other broker."""
        ends = [await self._client.ends(TOPIC, Queue("m", n)) for n in range(QUEUES)]
        return any(end for _, end in ends)


async def _measured(master: int, number: int) -> dict[str, float]:
    client = RocketClient(f"127.0.0.1:{BASE_PORT}", "bench")
    outage = _Outage(client)
    try:
        await outage.prepare()
        due_s = await outage.send_timed()
        os.kill(master, number)
        began_s = time.perf_counter()
        await _until(outage.resumed)
        figures = {"resumes_ms": 1e3 * (time.perf_counter() - began_s)}
        await _until(outage.arrived)
        return figures | {"timed_late_ms": max(0.0, 1e3 * (time.time() - due_s))}
    finally:
        await client.stop()


def lost(number: int, row: str, system: System, _seconds: float) -> dict[str, dict[str, float]]:
    """Runs the case: a signal is the end of a master."""
    with (
        tempfile.TemporaryDirectory() as directory,
        system.group(Path(directory), acting=True, **ACTING) as pids,
    ):
        try:
            return {row: asyncio.run(_measured(pids[0], number))}
        finally:
            os.kill(pids[0], signal.SIGKILL)


CASES = {
    "killed": partial(lost, signal.SIGKILL, "killed"),
    "silent": partial(lost, signal.SIGSTOP, "silent"),
}
