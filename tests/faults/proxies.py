"""A cluster whose links go through proxies, so that single ones can be cut, and frames be lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec

from convoymq.cli.cluster import LocalNode
from convoymq.kernels.link_frames import FRAME_COMMIT, FRAME_RAFT, FRAME_RELAY
from convoymq.transport.relay import FLAG_OPEN
from tests.forked_nodes import ForkedCluster
from tests.patience import PATIENCE_S

PROXY_OFFSET = 40
HEADER_SIZE = 48
CHUNK = 65_536
SLOW_CHUNK = 8_192
NO_GROUP = 0xFFFF_FFFF
"""A group that no node has: frames for it mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFrame:
    """A frame on its way."""

    sender: int
    receiver: int
    type: int
    group: int
    size: int
    """Bytes, header included."""
    message: int
    """RAFT: kind of the message. Else 0."""


class _Loss:
    """Loses frames of one connection's direction; each is replaced by one of the same length that
    means nothing, or the flow control of the link would wait for what was lost."""

    HEAD = 2 * HEADER_SIZE + 2
    """As much of a frame is looked at: with a frame inside, and the kind of a RAFT message."""

    def __init__(self, proxies: Proxies, sender: int, receiver: int) -> None:
        self.proxies = proxies
        self.sender = sender
        self.receiver = receiver
        self._head = bytearray()
        self._rest = 0

    def pass_on(self, data: bytes) -> bytes:
        """What goes on of what came, and of what was waiting for the rest of its head."""
        passed = bytearray()
        self._head += data
        while self._head:
            part = self._head[: self._rest]
            del self._head[: self._rest]
            passed += part
            self._rest -= len(part)
            size = int.from_bytes(self._head[:4], "little")
            if len(self._head) < 4 or len(self._head) < min(size, self.HEAD):
                break
            self._look(min(size, self.HEAD), size)
            self._rest = size
        return bytes(passed)

    def _look(self, end: int, size: int) -> None:
        head = self._head
        inside = head[4] == FRAME_RELAY and not head[5] & FLAG_OPEN and end > HEADER_SIZE
        at = HEADER_SIZE if inside else 0
        body = at + HEADER_SIZE
        # [kind, …]: a short array and a small number, one byte each.
        message = head[body + 1] if head[at + 4] == FRAME_RAFT and body + 1 < end else 0
        seen = SeenFrame(
            sender=head[24] if inside else self.sender,
            receiver=head[16] if inside else self.receiver,
            type=head[at + 4],
            group=int.from_bytes(head[at + 8 : at + 12], "little"),
            size=size - at,
            message=message,
        )
        if self.proxies.loses(seen):
            head[at + 4] = FRAME_COMMIT
            head[at + 8 : at + 12] = NO_GROUP.to_bytes(4, "little")


class Proxy:
    """Stands in front of one node's port. Who dials is read from the first frame, HELLO.

    Args:
        listens: its own host and port.
    """

    def __init__(self, proxies: Proxies, node: int, port: int, listens: tuple[str, int]) -> None:
        self.proxies = proxies
        self.node = node
        self.port = port
        self.listens = listens
        self.server: asyncio.Server | None = None

    async def serve(self) -> None:
        self.server = await asyncio.start_server(self.accept, *self.listens)

    async def dialler(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, bytes, _Loss | None]:
        """The node that dials, what was read to learn it, and which frames of it are lost."""
        first = await reader.readexactly(4)
        first += await reader.readexactly(int.from_bytes(first, "little") - 4)
        node = int(msgspec.msgpack.decode(first[HEADER_SIZE:])["node"])
        return node, first, _Loss(self.proxies, node, self.node)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        self.proxies.ends.add(writer)
        task = asyncio.current_task()
        assert task is not None
        try:
            dialler, first, loss = await self.dialler(reader, writer)
            pair = frozenset((dialler, self.node))
            if pair in self.proxies.cuts:
                return
            inner, outer = await asyncio.open_connection("127.0.0.1", self.port)
            ends.append(outer)
            self.proxies.ends.add(outer)
            outer.write(first)
            self.proxies.carried.setdefault(pair, set()).add(task)
            async with asyncio.TaskGroup() as group:
                group.create_task(self.pump(pair, reader, outer, loss))
                group.create_task(self.pump(pair, inner, writer))
        except (OSError, asyncio.IncompleteReadError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            for end in ends:
                end.close()

    async def pump(
        self,
        pair: frozenset[int],
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        loss: _Loss | None = None,
    ) -> None:
        while data := await source.read(CHUNK if pair not in self.proxies.rates else SLOW_CHUNK):
            if self.proxies.cuts.get(pair) == "silent":
                # As in a network that drops packets: what is sent now never arrives.
                await asyncio.Event().wait()
            self.proxies.bytes_passed += len(data)
            target.write(data if loss is None else loss.pass_on(data))
            await target.drain()
            if pair in self.proxies.rates:
                await asyncio.sleep(len(data) / self.proxies.rates[pair])
        raise ConnectionResetError


class Proxies:
    """The proxies of a cluster, in a thread of their own."""

    def __init__(self, nodes: Iterable[LocalNode]) -> None:
        self.cuts: dict[frozenset[int], str] = {}
        self.rates: dict[frozenset[int], int] = {}
        """Bytes a second that get through between two nodes, either way."""
        self.loses: Callable[[SeenFrame], bool] = lambda _: False
        """Which frames do not arrive."""
        self.carried: dict[frozenset[int], set[asyncio.Task[Any]]] = {}
        self.ends: WeakSet[asyncio.StreamWriter] = WeakSet()
        self.bytes_passed = 0
        self.proxies = [
            Proxy(self, n.number, n.link_port, ("127.0.0.1", n.link_port + PROXY_OFFSET))
            for n in nodes
        ]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxies:
        self._thread.start()
        for proxy in self.proxies:
            self._call(proxy.serve())
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _end(self) -> None:
        for proxy in self.proxies:
            if proxy.server is not None:
                proxy.server.close()
        # Connections that the system has accepted get their tasks first.
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in list(self.ends):
            # A node that is stopped never takes the rest of what was written.
            end.transport.abort()
        await asyncio.sleep(0)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

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


class ProxiedCluster(ForkedCluster):
    """Nodes that advertise, and dial, the proxies."""

    def __init__(self, data: Path, nodes: int, base_port: int, settings: dict[str, str]) -> None:
        super().__init__(data, nodes, base_port, settings)
        self.proxies = Proxies(self.nodes)

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
