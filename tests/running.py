"""Whole nodes in the tests' own process and loop: one is ready within 0.2 s.

They are the real thing, with sockets, disk and threads. What ends a process, and signals, need
nodes of their own processes (`convoymq.cli.cluster.LocalCluster`).
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any
from urllib.request import Request

from convoymq.edges.configuration import load
from convoymq.node.logs import LogOutput
from convoymq.node.node import Node
from tests.clusters import answered
from tests.patience import PATIENCE_S
from tests.ports import PORTS_PER_CLUSTER, lasting_ports

PORTS = ("listeners.tcp.default", "cluster.listen", "management.tcp.port", "prometheus.tcp.port")
_first = lasting_ports()
_ports = itertools.cycle(range(_first, _first + PORTS_PER_CLUSTER))
GUEST = "Basic Z3Vlc3Q6Z3Vlc3Q="


async def until(condition: Any, seconds: float = PATIENCE_S) -> None:
    """Waits for a condition with a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Nodes:
    """`async with Nodes(directory, 3) as nodes: nodes[1].broker`."""

    def __init__(self, directory: Path, count: int = 1, **settings: str) -> None:
        self.directory = directory
        self.settings = {name.replace("__", "."): value for name, value in settings.items()}
        ports = list(itertools.islice(_ports, count * len(PORTS)))
        self.ports = {
            number: dict(zip(PORTS, ports[number - 1 :: count], strict=True))
            for number in range(1, count + 1)
        }
        self.running: dict[int, Node] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Nodes:
        for number in self.ports:
            self.start(number)
        await self.ready()
        return self

    async def __aexit__(self, *_error: object) -> None:
        for number in list(self.running):
            await self.stop(number)

    def __getitem__(self, number: int) -> Any:
        return self.running[number]

    def data(self, number: int) -> Path:
        """A node's data directory."""
        return self.directory / f"node-{number}"

    def start(self, number: int, output: LogOutput | None = None, **more: str) -> Node:
        """Starts a node; `ready` waits for it."""
        node = self.running[number] = Node(load(flags=self.flags(number, **more)), output)
        self._tasks[number] = asyncio.ensure_future(node.run())
        return node

    def flags(self, number: int, **more: str) -> dict[str, str]:
        """Configuration of a node."""
        flags = {name: f"127.0.0.1:{port}" for name, port in self.ports[number].items()}
        listen = {n: each["cluster.listen"] for n, each in self.ports.items()}
        flags |= {
            "node.id": str(number),
            "data_dir": str(self.data(number)),
            "raft.wal_max_size_bytes": "16MiB",
            "disk_free_limit.absolute": "1MiB",
            "node.stop_timeout": "2000",
            **self.settings,
            **{name.replace("__", "."): value for name, value in more.items()},
        }
        if len(self.ports) > 1:
            flags["cluster.peers"] = ", ".join(f"{n}@127.0.0.1:{listen[n]}" for n in listen)
            flags["cluster.secret"] = "secret"
        return flags

    async def ready(self, *numbers: int) -> None:
        """Waits until nodes serve clients; raises what one failed with."""
        for number in numbers or list(self.running):
            task, node = self._tasks[number], self.running[number]
            await until(lambda: task.done() or node.ready.is_set())  # noqa: B023
            if task.done():
                await task

    async def stop(self, number: int) -> None:
        """Ends a node in an orderly way."""
        self.running.pop(number).stop()
        await self._tasks.pop(number)

    def amqp_port(self, number: int = 1) -> int:
        """Where a node takes AMQP clients."""
        return self.ports[number]["listeners.tcp.default"]

    async def metrics(self, number: int = 1, path: str = "/metrics") -> str:
        """What Prometheus gets of a node."""
        return await self._get(number, "prometheus.tcp.port", path)

    async def api(self, path: str, number: int = 1) -> str:
        """An answer of a node's HTTP API."""
        return await self._get(number, "management.tcp.port", f"/api/{path}")

    async def _get(self, number: int, port: str, path: str) -> str:
        where = f"http://127.0.0.1:{self.ports[number][port]}{path}"

        def get() -> str:
            with answered(Request(where, headers={"authorization": GUEST})) as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(get)
