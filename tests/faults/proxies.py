"""A cluster whose links go through proxies, so that single ones can be cut."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec

from convoymq.cli.cluster import LocalCluster, LocalNode

PROXY_OFFSET = 40
HEADER_SIZE = 48
CHUNK = 65_536
SLOW_CHUNK = 8_192
START_S = 10.0


class _Proxy:
    """Stands in front of one node. Who dials is read from the first frame, HELLO."""

    def __init__(self, proxies: Proxies, node: LocalNode) -> None:
        self.proxies = proxies
        self.node = node
        self.server: asyncio.Server | None = None

    async def serve(self) -> None:
        self.server = await asyncio.start_server(
            self.accept, "127.0.0.1", self.node.link_port + PROXY_OFFSET
        )

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        task = asyncio.current_task()
        assert task is not None
        self.proxies.tasks.add(task)
        try:
            first = await reader.readexactly(4)
            first += await reader.readexactly(int.from_bytes(first, "little") - 4)
            dialler = int(msgspec.msgpack.decode(first[HEADER_SIZE:])["node"])
            pair = frozenset((dialler, self.node.number))
            if pair in self.proxies.cuts:
                return
            inner, outer = await asyncio.open_connection("127.0.0.1", self.node.link_port)
            ends.append(outer)
            outer.write(first)
            self.proxies.carried.setdefault(pair, set()).add(task)
            async with asyncio.TaskGroup() as group:
                group.create_task(self.pump(pair, reader, outer))
                group.create_task(self.pump(pair, inner, writer))
        except (OSError, asyncio.IncompleteReadError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            self.proxies.tasks.discard(task)
            for end in ends:
                end.close()

    async def pump(
        self, pair: frozenset[int], source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        while data := await source.read(CHUNK if pair not in self.proxies.rates else SLOW_CHUNK):
            if self.proxies.cuts.get(pair) == "silent":
                # As in a network that drops packets: what is sent now never arrives.
                await asyncio.Event().wait()
            target.write(data)
            await target.drain()
            if pair in self.proxies.rates:
                await asyncio.sleep(len(data) / self.proxies.rates[pair])
        raise ConnectionResetError


class Proxies:
    """The proxies of a cluster, in a thread of their own."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cuts: dict[frozenset[int], str] = {}
        self.rates: dict[frozenset[int], int] = {}
        """Bytes a second that get through between two nodes, either way."""
        self.carried: dict[frozenset[int], set[asyncio.Task[Any]]] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self._proxies = [_Proxy(self, node) for node in cluster.nodes]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxies:
        self._thread.start()
        for proxy in self._proxies:
            self._call(proxy.serve())
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    async def _end(self) -> None:
        for proxy in self._proxies:
            if proxy.server is not None:
                proxy.server.close()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_S)

    def slow(self, a: int, b: int, rate: int) -> None:
        """Lets so many bytes a second through between two nodes; 0 = as many as come."""
        if rate:
            self.rates[frozenset((a, b))] = rate
        else:
            self.rates.pop(frozenset((a, b)), None)

    def cut(self, a: int, b: int, how: str) -> None:
        """Cuts the links of two nodes: `broken`, connections end; `silent`, packets are lost."""
        self._call(self._cut(frozenset((a, b)), how))

    async def _cut(self, pair: frozenset[int], how: str) -> None:
        self.cuts[pair] = how
        if how == "broken":
            self._break(pair)

    def heal(self, a: int, b: int) -> None:
        """Lets everything through again; connections in which packets were lost end."""
        self._call(self._heal(frozenset((a, b))))

    async def _heal(self, pair: frozenset[int]) -> None:
        del self.cuts[pair]
        self._break(pair)

    def _break(self, pair: frozenset[int]) -> None:
        for task in self.carried.pop(pair, set()):
            task.cancel()


class ProxiedCluster(LocalCluster):
    """Nodes that advertise, and dial, the proxies."""

    def __init__(self, data: Path, nodes: int, base_port: int, settings: dict[str, str]) -> None:
        super().__init__(data, nodes, base_port, settings)
        self.proxies = Proxies(self)

    def _write_config(self, node: LocalNode) -> None:
        super()._write_config(node)
        peers = ", ".join(f"{n.number}@127.0.0.1:{n.link_port + PROXY_OFFSET}" for n in self.nodes)
        lines = self._config(node).read_text().splitlines()
        lines = [line for line in lines if not line.startswith("cluster.peers")]
        lines += [
            f"cluster.peers = {peers}",
            f"cluster.advertise = 127.0.0.1:{node.link_port + PROXY_OFFSET}",
        ]
        self._config(node).write_text("\n".join(lines) + "\n")

    def __enter__(self) -> ProxiedCluster:
        self.proxies.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.proxies.__exit__(*error)
