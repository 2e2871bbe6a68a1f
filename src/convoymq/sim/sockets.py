"""Connections of asyncio on the simulated network, and a machine that has them.

Production opens connections and ports as ever: `loop.create_connection` and `Machine.listen`. All
connections of two nodes share their link, and end when it breaks.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from convoymq.rocketmq.machine import Listening, Machine
from convoymq.sim.disk import SimWorker
from convoymq.sim.loop import SimLoop
from convoymq.sim.nodes import SimNode
from convoymq.storage.types import Directory, Worker
from convoymq.transport.interfaces import Transport

if TYPE_CHECKING:
    from convoymq.sim.world import World

P = TypeVar("P", bound=asyncio.BaseProtocol)
T = TypeVar("T")
Accept = Callable[[], asyncio.BaseProtocol]

HEAD = struct.Struct(">cQ")
_PORT = struct.Struct(">H")
_OPEN, _ACCEPTED, _REFUSED, _DATA, _END = b"o", b"a", b"r", b"d", b"e"
UNLINKED_S = 0.001
BUFFER_BYTES = 64 << 10
ROOM_S = 0.002


def host_of(number: int) -> str:
    """Returns the host of a node."""
    return f"10.0.0.{number}"


def node_of(host: str) -> int:
    """Returns the node at a host."""
    return int(host.rpartition(".")[2])


class SimSocket(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self, sockets: Sockets, peer: int, port: int, number: int, protocol: asyncio.BaseProtocol
    ) -> None:
        super().__init__({"peername": (host_of(peer), port), "number": number})
        self.peer = peer
        self._sockets = sockets
        self._number = number
        self._protocol = cast("asyncio.Protocol", protocol)
        self._is_closing = False
        self._held: deque[bytes] | None = None
        """Bytes that arrived while reading was paused."""
        self._limit = BUFFER_BYTES
        self._is_full = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `asyncio.Transport`."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """See `asyncio.Transport`."""
        if self._is_closing:
            return
        self._sockets.send(self.peer, _DATA, self._number, *map(bytes, list_of_data))
        if not self._is_full and self.get_write_buffer_size() > self._limit:
            self._is_full = True
            self._protocol.pause_writing()
            self._sockets.loop.call_later(ROOM_S, self._look_for_room)

    def _look_for_room(self) -> None:
        if self._is_closing:
            return
        if self.get_write_buffer_size() > self._limit:
            self._sockets.loop.call_later(ROOM_S, self._look_for_room)
        else:
            self._is_full = False
            self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        """See `asyncio.Transport`."""
        return self._sockets.transport.backlog_bytes(self.peer)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See `asyncio.Transport`."""
        self._limit = min(high or BUFFER_BYTES, BUFFER_BYTES)

    def is_closing(self) -> bool:
        """See `asyncio.Transport`."""
        return self._is_closing

    def pause_reading(self) -> None:
        """See `asyncio.Transport`."""
        if self._held is None:
            self._held = deque()

    def resume_reading(self) -> None:
        """See `asyncio.Transport`."""
        held, self._held = self._held, None
        for data in held or ():
            self._sockets.loop.call_soon(self.receive, data)

    def receive(self, data: bytes) -> None:
        """Bytes of the peer arrived."""
        if self._is_closing:
            return
        if self._held is not None:
            self._held.append(data)
        else:
            self._protocol.data_received(data)

    def close(self) -> None:
        """See `asyncio.Transport`."""
        if not self._is_closing:
            self._sockets.forget(self.peer, self._number)
            self._sockets.send(self.peer, _END, self._number)
            self.lost(None)

    def abort(self) -> None:
        """See `asyncio.Transport`."""
        self.close()

    def begin(self) -> None:
        """The connection stands."""
        self._protocol.connection_made(self)

    def lost(self, error: Exception | None) -> None:
        """The connection is over."""
        if not self._is_closing:
            self._is_closing = True
            self._sockets.loop.call_soon(self._protocol.connection_lost, error)


class Sockets:
    """The connections of one process."""

    def __init__(self, loop: SocketLoop, transport: Transport, first: int) -> None:
        self.loop = loop
        self.transport = transport
        self.ports: dict[int, Accept] = {}
        self._last = first
        self._open: dict[tuple[int, int], SimSocket] = {}
        """(peer, number) -> the end of a connection."""
        self._dialled: dict[tuple[int, int], asyncio.Future[None]] = {}

    def send(self, peer: int, kind: bytes, number: int, *parts: bytes) -> None:
        """Sends a frame of a connection."""
        self.transport.send(peer, HEAD.pack(kind, number), list(parts))

    def forget(self, peer: int, number: int) -> None:
        """A connection is closed here."""
        self._open.pop((peer, number), None)

    async def connect(
        self, make: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """Opens a connection. Raises OSError."""
        peer = node_of(host)
        if not self.transport.is_connected(peer):
            await asyncio.sleep(UNLINKED_S)
            raise ConnectionRefusedError(f"{host} is not linked")
        self._last += 1
        key = peer, self._last
        answer = self._dialled[key] = asyncio.get_running_loop().create_future()
        self.send(peer, _OPEN, key[1], _PORT.pack(port))
        try:
            await answer
        finally:
            self._dialled.pop(key, None)
        protocol = make()
        socket = self._open[key] = SimSocket(self, peer, port, key[1], protocol)
        socket.begin()
        return socket, protocol

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived."""
        kind, number = HEAD.unpack_from(data)
        key = peer, number
        if kind == _OPEN:
            self._accept(peer, number, *_PORT.unpack_from(data, HEAD.size))
        elif kind in (_ACCEPTED, _REFUSED):
            answer = self._dialled.get(key)
            if answer is None or answer.done():
                # Nobody waits for the connection any more.
                self.send(peer, _END, number)
            elif kind == _ACCEPTED:
                answer.set_result(None)
            else:
                answer.set_exception(ConnectionRefusedError("nobody listens there"))
        elif (socket := self._open.get(key)) is None:
            return
        elif kind == _DATA:
            socket.receive(data[HEAD.size :])
        else:
            del self._open[key]
            socket.lost(None)

    def _accept(self, peer: int, number: int, port: int) -> None:
        accept = self.ports.get(port)
        if accept is None:
            self.send(peer, _REFUSED, number)
            return
        self.send(peer, _ACCEPTED, number)
        socket = self._open[peer, number] = SimSocket(self, peer, port, number, accept())
        socket.begin()

    def on_link_down(self, peer: int) -> None:
        """The link to a peer broke, and all connections with it."""
        error = ConnectionResetError("the link broke")
        for key in [key for key in self._open if key[0] == peer]:
            self._open.pop(key).lost(error)
        for key in [key for key in self._dialled if key[0] == peer]:
            answer = self._dialled.pop(key)
            if not answer.done():
                answer.set_exception(ConnectionResetError("the link broke"))


class SocketLoop(SimLoop):
    """An event loop with connections."""

    sockets: Sockets

    async def create_connection(
        self, protocol_factory: Callable[[], P], host: str, port: int, *, ssl: object = None
    ) -> tuple[asyncio.BaseTransport, P]:
        """See `asyncio.AbstractEventLoop`."""
        assert not ssl
        transport, protocol = await self.sockets.connect(protocol_factory, host, port)
        return transport, cast("P", protocol)


def process_name() -> str:
    """Returns the name of the process that runs now."""
    loop: object = asyncio.get_running_loop()
    return loop.process.name if isinstance(loop, SimLoop) else "world"


class _Port(Listening):
    def __init__(self, ports: dict[int, Accept], port: int) -> None:
        self._ports, self._port = ports, port

    def close(self) -> None:
        """See `Listening`."""
        self._ports.pop(self._port, None)


class _LoopWorker(SimWorker):
    """A worker whose answers come to a loop."""

    loop: SimLoop

    def submit(
        self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """See `SimWorker`."""
        super().submit(work, lambda result, error: self.loop.enter(done, result, error))


class SocketNode(SimNode, Machine):
    """A node that runs coroutines of production, and is their machine."""

    queues = {}  # noqa: RUF012
    world: World
    loop: SocketLoop
    sockets: Sockets

    def __init__(self, world: World, number: int) -> None:
        SimNode.__init__(self, world, number)

    def _open_loop(self) -> None:
        self.transport = self._make_transport()
        self.loop = SocketLoop(self.world.scheduler, self.process)
        self.sockets = Sockets(
            self.loop, self.transport, self.number << 56 | self.incarnation << 20
        )
        self.loop.sockets = self.sockets

    # --- the machine --------------------------------------------------------------------------

    def wall_ms(self) -> int:
        """See `Machine`."""
        return self.clock.now_ms()

    def steady_ms(self) -> int:
        """See `Machine`."""
        return self.clock.monotonic_ms()

    def directory(self, path: str | Path) -> Directory:
        """See `Machine`: a node has one disk."""
        return self.disk

    def worker(self) -> Worker:
        """See `Machine`."""
        world = self.world
        made = _LoopWorker(world.scheduler, self.process, world.plan.disk, self.slow, self.wake)
        made.loop = self.loop
        return made

    def disk_used(self, path: str | Path) -> float:
        """See `Machine`."""
        return 0.1

    async def listen(self, accept: Accept, host: str, port: int) -> tuple[Sequence[Listening], int]:
        """See `Machine`."""
        assert port not in self.sockets.ports
        self.sockets.ports[port] = accept
        return [_Port(self.sockets.ports, port)], port

    # --- the network --------------------------------------------------------------------------

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived."""
        self.loop.enter(self.sockets.on_frame, peer, data)
        self.world.poll(self)

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A peer is linked."""

    def on_link_down(self, peer: int, definite: bool) -> None:
        """A peer is unlinked."""
        self.loop.enter(self.sockets.on_link_down, peer)

    def on_room(self, peer: int) -> None:
        """The link to a peer takes bulk again."""

    def on_suspected(self, peer: int, suspected: bool) -> None:
        """The detector's verdict, which nobody asks for here."""

    def end_of_round(self) -> None:
        """See `SimNode`: nothing gathers."""
