# cython: annotation_typing=False
"""Links between nodes: one TCP or TLS connection per pair and direction, authenticated, FIFO.

Every node dials every other one. Own frames go out on the dialled connection, the peer's come in
on the accepted one. A peer is *up* when both stand and belong to the same process, *connected* when
the detector does not suspect it either. HELLO is described in `handshake`, frames are those of
docs/formats/entries-and-frames.md. A node that is not up is reached through another one where that
is possible (`relay`): whoever is told of nodes here sees no difference.
Urgent frames (heartbeats, append replies, short control requests) go ahead of queued bulk frames.

Flow control (ADR 0025): a receiver tells how many bytes it has taken (CREDIT), a sender knows how
many are under way. Beyond a window the node is in `full`, and whoever has bulk for it waits until
`on_room`. A receiver whose disk is behind tells nothing new (`is_congested`). Nothing is dropped
for that reason; urgent frames always pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from convoymq import __version__
from convoymq.kernels.batch import (
    FRAME_APPEND_REPLY,
    FRAME_CONTROL,
    FRAME_CREDIT,
    FRAME_GOODBYE,
    FRAME_HEARTBEAT,
    FRAME_RELAY,
    HEADER_SIZE,
    frame,
    frame_header,
)
from convoymq.kernels.sockets import LinkReader, LinkWriter
from convoymq.model.config import Address, ClusterConfig, parse_address
from convoymq.replication.versions import Supports
from convoymq.transport import relay
from convoymq.transport.cluster_clock import ClusterClock
from convoymq.transport.detector import Detector
from convoymq.transport.handshake import (
    CODE_DUPLICATE,
    CODE_FORGOTTEN,
    CODE_NUMBER_IN_USE,
    CODE_OLDER,
    CODE_SELF,
    INSTANCE_SIZE,
    Handshake,
    Hello,
    LinkRefused,
    PeerHello,
    read_hello,
    refusal,
)
from convoymq.transport.identity import NodeIdentity
from convoymq.transport.listening import ACCEPT_PAUSE_S, BACKLOG, Acceptor, addresses_of, listen
from convoymq.transport.processes import ProcessWatch, own_process, read_start

HELLO_SIZE_MAX = 65_536
SECRET_BITS_REFUSED = 0o077
HANDSHAKE_S = 3.0
CONNECT_S = 1.0
BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 0.5
RESOLVE_S = 10.0
HALF_LINK_S = 5.0
REJECTED_S = 5.0
"""A node that hears for so long only that its number is in use gives up."""
GOODBYE_S = 0.5
CLOCK_S = 1.0
"""A link that carries other frames still carries a heartbeat so often, for the clocks."""
RELAY_BACKLOG_SHARE = 4
"""Frames of others are handed on while the backlog is below that part of its bound."""
FLAG_NEIGHBOURS = 1
FULL_S = 1.0
"""A link that takes no bulk for so long is logged."""
WINDOW_SHARE = 8
"""Under way to a node is at most that part of the backlog's bound, and one frame."""
WINDOW_MIN_BYTES = 128 << 10
CREDIT_STEP_BYTES = 256 << 10
"""Credit is told after so many bytes, or a quarter of the window."""
CREDIT_REST_BYTES = 16 << 10
"""Less than that is not told by the tick either: no window is so small."""
URGENT_SIZE_MAX = 65_536
CONTROL_CLASSIC = 1
"""CONTROL kind that carries messages: bulk however short it is."""
TLS_TURN = 262_144


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

RunInput = Callable[[Callable[[], None]], None]
"""Calls its argument."""


class LinkEvents(Protocol):
    """What links report. Calls come from the event loop, outside of any call into `Links`."""

    def on_frame(self, node: int, data: bytes) -> None:
        """A whole frame of an authenticated peer that is linked both ways."""

    def on_up(self, node: int, incarnation: int) -> None:
        """The peer is linked. What was sent before may have been lost."""

    def on_down(self, node: int, definite: bool) -> None:
        """The peer is unlinked; `definite` when its process is known to be gone: it said goodbye,
        or it ran on this machine and does not any more.

        May come twice for one failure: first not definite, then definite."""

    def on_room(self, node: int) -> None:
        """A node that was in `full` takes bulk again. Comes without `on_up` only."""

    def on_suspect(self, node: int) -> None:
        """The linked peer has been silent for too long."""

    def on_unsuspect(self, node: int) -> None:
        """The suspected peer was heard; nothing was lost."""

    def on_rejected(self, text: str) -> None:
        """Nobody takes this node, because another process has its number."""


class _Wire(Protocol):
    """A connection that carries frames, plain or TLS."""

    on_frames: Callable[[list[bytes]], None]
    on_lost: Callable[[str], None]
    reader: LinkReader
    writer: LinkWriter
    closed: bool
    totals: list[int] | None

    def flush(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class _PlainWire:
    """A TCP connection, read and written by the kernels when the loop says it is ready."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, run_input: RunInput | None
    ) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = loop
        self._run_input = run_input
        self._sock = sock
        self._fd = sock.fileno()
        self._writing = False
        self._reading = False
        self.reader = LinkReader(self._fd, HELLO_SIZE_MAX)
        self.writer = LinkWriter(self._fd)
        self.closed = False
        self.totals: list[int] | None = None
        self.on_frames: Callable[[list[bytes]], None] = _ignore_frames
        self.on_lost: Callable[[str], None] = _ignore_loss

    def resume(self) -> None:
        if not self.closed and not self._reading:
            self._reading = True
            if self._run_input is None:
                self._loop.add_reader(self._fd, self._readable)
            else:
                self._loop.add_reader(self._fd, self._run_input, self._readable)

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        frames: list[bytes] = []
        reason = ""
        try:
            if not self.reader.read(frames):
                reason = "closed by the other side"
        except OSError as error:
            reason = os.strerror(error.errno or 0)
        except ValueError as error:
            reason = str(error)
        if frames:
            self.on_frames(frames)
        if reason and not self.closed:
            self.on_lost(reason)

    def flush(self) -> None:
        if self.closed or self._writing:
            return
        try:
            if not self.writer.flush():
                self._writing = True
                self._loop.add_writer(self._fd, self._writable)
        except OSError as error:
            self._loop.call_soon(self._report, os.strerror(error.errno or 0))

    def _report(self, reason: str) -> None:
        if not self.closed:
            self.on_lost(reason)

    def _writable(self) -> None:
        self._writing = False
        self._loop.remove_writer(self._fd)
        self.flush()

    def close(self) -> None:
        if self.closed:
            return
        self.pause()
        self.closed = True
        _count(self)
        if self._writing:
            self._loop.remove_writer(self._fd)
        self._sock.close()


class _TlsWire(asyncio.Protocol):
    """A TLS connection on the loop's own transport."""

    def __init__(self, on_made: Callable[[_TlsWire], None] | None = None) -> None:
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._full = False
        self.reader = LinkReader(-1, HELLO_SIZE_MAX)
        self.writer = LinkWriter(-1)
        self.closed = False
        self.totals: list[int] | None = None
        self.on_frames: Callable[[list[bytes]], None] = _ignore_frames
        self.on_lost: Callable[[str], None] = _ignore_loss

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        frames: list[bytes] = []
        reason = ""
        try:
            self.reader.feed(bytes(data), frames)
        except ValueError as error:
            reason = str(error)
        if frames:
            self.on_frames(frames)
        if reason and not self.closed:
            self.on_lost(reason)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed:
            self.on_lost(str(exc) if exc else "closed by the other side")

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.flush()

    def flush(self) -> None:
        while not self.closed and not self._full and self._transport is not None:
            parts = self.writer.take(TLS_TURN)
            if not parts:
                return
            self._transport.writelines(parts)

    def pause(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            _count(self)
            if self._transport is not None:
                self._transport.close()


def _count(wire: _Wire) -> None:
    """Adds what a closed connection carried to the sums of its links."""
    if wire.totals is not None:
        wire.totals[0] += wire.reader.bytes_in
        wire.totals[1] += wire.writer.bytes_out


def _ignore_frames(_frames: list[bytes]) -> None:
    return None


def _ignore_loss(_reason: str) -> None:
    return None


def _closer(wire: _Wire) -> Callable[[str], None]:
    return lambda _reason: wire.close()


class _Peer:
    """What is known of one other node."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.address = ""
        self.incarnation = 0
        self.hello: PeerHello | None = None
        """What the node said of itself when it was last linked."""
        self.watch: ProcessWatch | None = None
        self.outward: _Wire | None = None
        self.outward_life: tuple[str, int] | None = None
        self.inward: _Wire | None = None
        self.up = False
        self.formed = False
        self.leaves = False
        """It said goodbye."""
        self.gone = False
        """Its process was said to be gone."""
        self.dirty = False
        self.frames_out = 0
        self.told_clock = 0.0
        self.half_since = 0.0
        self.full_since = 0.0
        self.told_full = False
        """It was logged that this node takes no bulk."""
        self.totals = [0, 0]
        """Bytes received and sent on connections that are closed."""
        self.out_id: int = 0
        """The number by which both ends know the dialled connection; `in_id` of the accepted."""
        self.in_id: int = 0
        self.taken = 0
        """Bytes of the dialled connection that the peer says it has taken."""
        self.told = 0
        """Bytes of the accepted connection that the peer was told are taken."""
        self.largest = 0
        """Bytes of the largest frame since nothing was queued."""
        # The same for what is relayed; sessions are its numbers.
        self.relay_out_id: int = 0
        self.relay_in_id: int = 0
        self.relay_sent = 0
        self.relay_taken = 0
        self.relay_in = 0
        self.relay_told = 0

    @property
    def life(self) -> tuple[str, int] | None:
        """The process and incarnation of what was linked last."""
        return None if self.hello is None else (self.hello.instance, self.hello.incarnation)


class _Dial:
    """One address that is dialled until it turns out to be this node."""

    __slots__ = ("address", "last_error", "node", "wake")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.node = address.node
        self.last_error = ""
        self.wake = asyncio.Event()


class Links:
    """All links of one node; the node's `Transport`. Use as `async with`.

    Args:
        config: peers, secret, TLS and bounds.
        address: where to listen.
        identity: who this node is; see `set_identity`.
        events: told about frames and peers.
        on_dirty: called when something was sent: call `flush` at the end of the round.
        log: a structlog logger.
        run_input: calls what reads a connection, in place of the loop.
        supports, release: told to the peers; the range of link protocols is added.
        backlog: connections that the system accepts ahead of the node.
    """

    def __init__(
        self,
        config: ClusterConfig,
        address: Address,
        identity: NodeIdentity,
        events: LinkEvents,
        on_dirty: Callable[[], None],
        log: Any,
        run_input: RunInput | None = None,
        *,
        supports: Supports | None = None,
        release: str = __version__,
        backlog: int = BACKLOG,
    ) -> None:
        self._run_input = run_input
        self._accept_backlog = backlog
        self.config = config
        self.address = address
        self.identity = identity
        self.node_id = identity.node
        self.supports = dict(supports or {})
        self.release = release
        self.instance = os.urandom(INSTANCE_SIZE).hex()
        self.process = own_process()
        self.read_start = read_start
        self.events = events
        self.formed = False
        """Whether this node has cluster data; told to others when a link is made."""
        self.detector = Detector(config.heartbeat_ms, config.suspect_min_ms, config.suspect_max_ms)
        self.peers: dict[int, _Peer] = {}
        self.forgotten: set[int] = set()
        self.lists_itself = False
        """Whether one of the configured addresses has turned out to be this node's own."""
        self._secret = _read_secret(config)
        self._backlog_max = config.link_backlog_max_bytes
        self._window = max(WINDOW_MIN_BYTES, self._backlog_max // WINDOW_SHARE)
        self._relay_window = max(WINDOW_MIN_BYTES, self._window // 4)
        self._credit_step = min(CREDIT_STEP_BYTES, self._relay_window // 4)
        self.full: set[int] = set()
        """Nodes that take no bulk for now."""
        self.is_congested: Callable[[], bool] = lambda: False
        """Whether this node should be sent less."""
        self._withheld: set[int] = set()
        """Nodes that are not told what was taken, because this one is congested."""
        self._on_dirty = on_dirty
        self._dirty: list[_Peer] = []
        self._dials: dict[str, _Dial] = {}
        self._log = log
        self._tasks = asyncio.TaskGroup()
        self._running = False
        self._pending: set[_Wire] = set()
        self._listener: socket.socket | None = None
        self._server: Acceptor | asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._contexts = _tls_contexts(config)
        self._refusals: dict[str, str] = {}
        self.clock = ClusterClock()
        """Knows the clocks of the nodes that are up."""
        self.relay = relay.RelayTable(
            identity.node,
            random.SystemRandom().randrange(1, 1 << 31),
            lambda: msgspec.msgpack.encode(self._hello().to_builtins()),
            self._judge_relayed,
            self._relay_backlog,
            backlog_max_bytes=config.link_backlog_max_bytes // RELAY_BACKLOG_SHARE,
        )
        self._rejected_since = 0.0
        self._rejected_at = 0.0
        self._rejected_text = ""

    # -- life -------------------------------------------------------------------------------

    async def __aenter__(self) -> Links:
        self._loop = asyncio.get_running_loop()
        await self._tasks.__aenter__()
        self._listener = _listen(self.address, self._accept_backlog)
        if self._contexts is None:
            self._server = Acceptor(
                self._loop, self._listener, self._accepted_plain, self._not_accepted
            )
        else:
            self._server = await self._loop.create_server(
                lambda: _TlsWire(self._accepted),
                sock=self._listener,
                backlog=self._accept_backlog,
                ssl=self._contexts[0],
            )
        self._running = True
        for peer in self.config.peers:
            self.lists_itself |= self._is_own(peer)
            self.add_address(peer)
        if self.config.dns_name:
            self._tasks.create_task(self._resolve_forever())
        self._timer = self._loop.call_later(self.config.heartbeat_ms / 1000, self._tick)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        self._cancel_tasks()
        for wire in list(self._pending):
            wire.close()
        for peer in self.peers.values():
            for end in (peer.outward, peer.inward):
                if end is not None:
                    end.close()
        await self._tasks.__aexit__(None, None, None)

    def _is_own(self, address: Address) -> bool:
        own = (f"{self.address.host}:{self.address.port}", self.config.advertise)
        return address.node == self.node_id or f"{address.host}:{address.port}" in own

    def _cancel_tasks(self) -> None:
        for task in list(getattr(self._tasks, "_tasks", ())):
            task.cancel()

    def add_address(self, address: Address) -> None:
        """Starts dialling an address, unless that is done already or it is this node's own."""
        key = f"{address.host}:{address.port}"
        known = key in self._dials or self._is_own(address)
        if known or not self._running or len(self._dials) >= 2 * self.config.peers_max:
            return
        dial = self._dials[key] = _Dial(address)
        self._tasks.create_task(self._dial_forever(dial))

    def set_identity(self, identity: NodeIdentity) -> None:
        """Tells every node anew who this one is: all links break and are made again."""
        assert identity.node == self.node_id
        if identity == self.identity:
            return
        self.identity = identity
        for wire in list(self._pending):
            wire.close()
        self._pending.clear()
        for peer in list(self.peers.values()):
            if peer.outward is not None or peer.inward is not None:
                self._drop(peer, "the identity of this node has changed")
            self._perform(self.relay.forget(peer.node))

    def hello_of(self, node: int) -> PeerHello | None:
        """What a node said of itself when it was last linked."""
        peer = self.peers.get(node)
        return peer.hello if peer is not None else None

    async def goodbye(self) -> None:
        """Tells all linked nodes that this process ends. Nothing is sent or reported after it."""
        for node in self.relay.nodes():
            self.send(node, frame(FRAME_GOODBYE, 0, 0, 0, 0, 0, 0))
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
        self._cancel_tasks()
        ends = []
        for peer in self.peers.values():
            if peer.up and peer.outward is not None:
                peer.outward.writer.send(frame(FRAME_GOODBYE, 0, 0, 0, 0, 0, 0))
                peer.outward.flush()
                ends.append(peer.outward)
            peer.up = False
            for wire in (peer.outward, peer.inward):
                if wire is not None:
                    wire.on_frames = _ignore_frames
                    wire.on_lost = _closer(wire)
        deadline = self._loop.time() + GOODBYE_S
        while any(not end.closed and end.writer.queued_bytes for end in ends):
            if self._loop.time() > deadline:
                return
            await asyncio.sleep(0.005)

    def forget(self, node: int) -> None:
        """Drops the links of a node that left, and refuses it while it has cluster data."""
        self.forgotten.add(node)
        peer = self.peers.get(node)
        if peer is not None:
            self._drop(peer, "forgotten")
        self._perform(self.relay.forget(node))

    def remember(self, node: int) -> None:
        """The node may link again."""
        self.forgotten.discard(node)

    # -- transport --------------------------------------------------------------------------

    def send(self, node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
        """Queues a frame; nothing happens when the peer is not linked."""
        peer = self.peers.get(node)
        if peer is None:
            return
        if peer.up:
            self._queue(peer, frame, body, is_urgent(frame))
            return
        if not self._running:
            return
        urgent = is_urgent(frame)
        size = len(frame)
        for part in body:
            size += len(part)
        wrapped = self.relay.wrap(node, size, urgent)
        if wrapped is not None:
            self._queue(self.peers[wrapped[0]], wrapped[1], (frame, *body), urgent)
            peer.relay_sent += size
            if peer.relay_sent - peer.relay_taken > self._relay_window:
                self.full.add(node)

    def _queue(self, peer: _Peer, frame: bytes, body: Sequence[bytes], urgent: bool) -> None:
        if peer.outward is None:
            return
        writer = peer.outward.writer
        queued = writer.queued_bytes
        writer.send(frame, body, urgent)
        if writer.bytes_out + writer.queued_bytes - peer.taken > self._window and peer.up:
            self.full.add(peer.node)
        if not peer.dirty:
            peer.dirty = True
            if not self._dirty:
                self._on_dirty()
            self._dirty.append(peer)
        if not queued:
            peer.largest = 0
        peer.largest = max(peer.largest, writer.queued_bytes - queued)
        # One frame that is larger does not count: a link takes it, however large it is.
        if queued > self._backlog_max + peer.largest:
            self._loop.call_soon(self._drop, peer, "does not read: the backlog is full")

    def is_connected(self, node: int) -> bool:
        """True while the node is linked both ways or relayed, and not suspected."""
        peer = self.peers.get(node)
        if peer is None:
            return False
        if peer.up:
            return not self.detector.is_suspected(node)
        return self.relay.is_up(node) and not self.relay.is_suspected(node)

    def backlog_bytes(self, node: int) -> int:
        """Bytes queued to the node, or to the one that relays to it, and not yet written."""
        peer = self.peers.get(node)
        if peer is not None and peer.outward is None:
            peer = self.peers.get(self.relay.hop_of(node))
        return 0 if peer is None or peer.outward is None else peer.outward.writer.queued_bytes

    def _relay_backlog(self, node: int) -> int:
        """What counts of a backlog when a frame of another node is to be handed on."""
        peer = self.peers.get(node)
        return self.backlog_bytes(node) - (peer.largest if peer is not None else 0)

    def flush(self) -> None:
        """Writes what was sent in this round."""
        if self._withheld and not self.is_congested():
            self._tell_withheld()
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, []
        for peer in dirty:
            peer.dirty = False
            if peer.outward is not None:
                peer.outward.flush()

    # -- credit -----------------------------------------------------------------------------

    def _under_way(self, peer: _Peer) -> int:
        """Bytes that were sent to a node and that it has not told it has taken."""
        if peer.up and peer.outward is not None:
            writer = peer.outward.writer
            return int(writer.bytes_out + writer.queued_bytes - peer.taken)
        return int(peer.relay_sent - peer.relay_taken)

    def _tell_taken(self, peer: _Peer) -> None:
        """Gives a node credit for what it has sent."""
        if self.is_congested():
            self._withheld.add(peer.node)
            return
        if peer.up and peer.inward is not None:
            taken = peer.told = peer.inward.reader.bytes_in
            link = peer.in_id
        else:
            taken = peer.relay_told = peer.relay_in
            link = peer.relay_in_id
        self.send(peer.node, frame(FRAME_CREDIT, 0, 0, taken, link, 0, 0))

    def _tell_withheld(self) -> None:
        withheld, self._withheld = self._withheld, set()
        for node in sorted(withheld):
            self._tell_taken(self.peers[node])

    def _tell_rest(self, peer: _Peer) -> None:
        """Tells what is too little to be told at once."""
        if peer.up and peer.inward is not None:
            rest = peer.inward.reader.bytes_in - peer.told
        else:
            rest = peer.relay_in - peer.relay_told
        if rest >= CREDIT_REST_BYTES:
            self._tell_taken(peer)

    def _on_credit(self, peer: _Peer, taken: int, link: int) -> None:
        """A node tells how much it has taken. What it says of a former connection is void."""
        if link == peer.out_id and peer.outward is not None:
            writer = peer.outward.writer
            if taken > writer.bytes_out:
                raise ValueError(f"credit for {taken} bytes, {writer.bytes_out} were sent")
            peer.taken = max(peer.taken, taken)
        elif link == peer.relay_out_id:
            if taken > peer.relay_sent:
                raise ValueError(f"credit for {taken} bytes, {peer.relay_sent} were sent")
            peer.relay_taken = max(peer.relay_taken, taken)
        window = self._window if peer.up else self._relay_window
        if peer.node in self.full and self._under_way(peer) <= window:
            self.full.discard(peer.node)
            self.events.on_room(peer.node)

    def connected(self) -> list[int]:
        """Ids of all nodes that are up, ascending."""
        return sorted(node for node in self.peers if self.is_connected(node))

    def info(self) -> list[dict[str, Any]]:
        """One row per known peer, for status pages."""
        return [
            {
                "node": peer.node,
                "address": peer.address,
                "up": self.is_connected(peer.node),
                "suspected": self.detector.is_suspected(peer.node)
                or self.relay.is_suspected(peer.node),
                "relayed_by": 0 if peer.up else self.relay.hop_of(peer.node),
                "incarnation": peer.incarnation,
                "backlog_bytes": self.backlog_bytes(peer.node),
                "full": peer.node in self.full,
                "bytes_out": peer.totals[1]
                + (peer.outward.writer.bytes_out if peer.outward else 0),
                "bytes_in": peer.totals[0] + (peer.inward.reader.bytes_in if peer.inward else 0),
            }
            for peer in sorted(self.peers.values(), key=lambda peer: peer.node)
        ]

    def clock_skew(self) -> tuple[int, bool]:
        """How far this node's wall clock is ahead of the cluster's (ms), and whether too far."""
        return self.clock.skew_ms, self.clock.is_skewed

    # -- liveness ---------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self.config.heartbeat_ms / 1000, self._tick)
        now = time.monotonic()
        now_ms = int(now * 1000)
        for node in self.detector.tick(now_ms):
            self._log.warning("link.suspected", peer=node)
            self.events.on_suspect(node)
            self._perform(self.relay.suspected(node, True, now_ms))
        self._perform(self.relay.tick(now_ms))
        for peer in list(self.peers.values()):
            if peer.up and peer.outward is not None:
                writer = peer.outward.writer
                if writer.frames_out == peer.frames_out or now - peer.told_clock >= CLOCK_S:
                    self._beat(peer, b"")
                peer.frames_out = writer.frames_out
                self._tell_rest(peer)
            elif peer.half_since and now - peer.half_since > HALF_LINK_S:
                self._drop(peer, "linked one way only")
            self._watch_full(peer, now)
            if not peer.up and self.relay.is_up(peer.node):
                self._tell_rest(peer)
            elif not peer.up:
                self._look_for(peer)
        self._give_up(now)

    def _watch_full(self, peer: _Peer, now: float) -> None:
        """A link is full for moments under load; what lasts is worth a line."""
        full = peer.node in self.full
        if not full:
            peer.full_since = 0.0
        elif not peer.full_since:
            peer.full_since = now
        if full == peer.told_full or (full and now - peer.full_since < FULL_S):
            return
        peer.told_full = full
        if full:
            self._log.warning("link.full", peer=peer.node, under_way=self._under_way(peer))
        elif peer.up or self.relay.is_up(peer.node):
            self._log.info("link.has_room", peer=peer.node)

    def _beat(self, peer: _Peer, neighbours: bytes) -> None:
        """Sends a heartbeat."""
        peer.told_clock = time.monotonic()
        flags = FLAG_NEIGHBOURS if neighbours else 0
        data = frame(
            FRAME_HEARTBEAT, flags, 0, int(peer.told_clock * 1e6), 0, wall_ms(), 0, neighbours
        )
        self._queue(peer, data, (), True)

    def _perform(self, outputs: list[relay.Output]) -> None:
        """Carries out what the relay table wants."""
        for output in outputs:
            if isinstance(output, relay.Deliver):
                if output.data[4] == FRAME_GOODBYE:
                    self.peers[output.node].gone = True
                    self.relay.forget(output.node)
                    self.full.discard(output.node)
                    self.events.on_down(output.node, True)
                else:
                    self._on_relayed(self.peers[output.node], output.data)
            elif isinstance(output, relay.Send):
                peer = self.peers.get(output.to)
                if peer is not None and peer.up:
                    self._queue(peer, output.data, (), output.urgent)
            elif isinstance(output, relay.Announce):
                told = msgspec.msgpack.encode(self.relay.neighbours())
                for peer in self.peers.values():
                    if peer.up:
                        self._beat(peer, told)
            elif isinstance(output, relay.Up):
                self._log.info(
                    "link.relayed",
                    peer=output.node,
                    incarnation=output.incarnation,
                    relay=self.relay.hop_of(output.node),
                )
                self._begin_relayed(self.peers[output.node])
                self.events.on_up(output.node, output.incarnation)
            elif isinstance(output, relay.Down):
                self._log.info("link.relay_lost", peer=output.node)
                self.full.discard(output.node)
                self.events.on_down(output.node, False)
            elif isinstance(output, relay.Suspect):
                self.events.on_suspect(output.node)
            elif isinstance(output, relay.Unsuspect):
                self.events.on_unsuspect(output.node)
            else:
                self._drop(
                    self.peers[output.node], f"silent, and reached through node {output.relay}"
                )

    def _begin_relayed(self, peer: _Peer) -> None:
        """A node is reached through another one from now on."""
        peer.gone = False
        self.full.discard(peer.node)
        peer.relay_out_id, peer.relay_in_id = self.relay.sessions_of(peer.node)
        peer.relay_sent = peer.relay_taken = peer.relay_in = peer.relay_told = 0

    def _on_relayed(self, peer: _Peer, data: bytes) -> None:
        """Takes a frame that came through another node."""
        peer.relay_in += len(data)
        if data[4] == FRAME_CREDIT:
            _, _, _, _, taken, link, _, _ = frame_header(data)
            self._on_credit(peer, taken, link)
            return
        self.events.on_frame(peer.node, data)
        if peer.relay_in - peer.relay_told >= self._credit_step:
            self._tell_taken(peer)

    def _judge_relayed(self, node: int, data: bytes) -> int:
        """Reads HELLO of a node that wants to be relayed; 0 = it is not accepted."""
        try:
            body = msgspec.msgpack.decode(data, type=dict[str, Any])
            hello = read_hello(body, self._hello().to_builtins())
            if hello.node != node:
                return 0
            self._judge(hello)
            peer = self._peer(node)
        except msgspec.DecodeError:
            return 0
        except LinkRefused as error:
            self._note_refusal(error, node)
            return 0
        self._meet(peer, hello)
        return hello.incarnation

    def _give_up(self, now: float) -> None:
        """Says so when all that this node has heard for long is that its number is in use."""
        patience = max(REJECTED_S, 2 * self.config.suspect_max_ms / 1000)
        linked = any(peer.up for peer in self.peers.values()) or self.relay.nodes()
        if linked or now - self._rejected_at > patience:
            self._rejected_since = 0.0
        elif self._rejected_since and now - self._rejected_since > patience:
            self._rejected_since = 0.0
            self.events.on_rejected(self._rejected_text)

    def _on_told(self, error: LinkRefused) -> None:
        """Another node refuses this one."""
        if error.code == CODE_NUMBER_IN_USE:
            self._rejected_at = time.monotonic()
            self._rejected_since = self._rejected_since or self._rejected_at
            self._rejected_text = error.text

    def _look_for(self, peer: _Peer) -> None:
        """Reports an unlinked peer whose process does not run any more."""
        if not peer.gone and peer.watch is not None and peer.watch.is_gone():
            peer.gone = True
            self._log.info("link.process_gone", peer=peer.node)
            self.events.on_down(peer.node, True)

    def _evaluate(self, peer: _Peer) -> None:
        """Compares what stands with what was told, and tells."""
        stands = (
            peer.outward is not None and peer.inward is not None and peer.outward_life == peer.life
        )
        if stands and not peer.up:
            peer.up = True
            peer.half_since = 0.0
            peer.gone = peer.leaves = False
            now_ms = int(time.monotonic() * 1000)
            self.detector.linked(peer.node, now_ms)
            # What was told on a connection that broke may be lost.
            peer.told = 0
            self.full.discard(peer.node)
            # The first frame on the link tells the clock and the neighbours.
            self._perform(self.relay.linked(peer.node, peer.incarnation, now_ms))
            self._log.info("link.up", peer=peer.node, incarnation=peer.incarnation)
            self.events.on_up(peer.node, peer.incarnation)
            assert peer.inward is not None
            peer.inward.resume()
        elif not stands and peer.up:
            peer.up = False
            self.full.discard(peer.node)
            self.detector.unlinked(peer.node)
            self._log.info("link.down", peer=peer.node)
            peer.gone = peer.leaves
            self.clock.lost(peer.node)
            self.events.on_down(peer.node, peer.leaves)
            self._perform(self.relay.unlinked(peer.node, int(time.monotonic() * 1000)))
        if not peer.up:
            half = peer.outward is not None or peer.inward is not None
            peer.half_since = (peer.half_since or time.monotonic()) if half else 0.0
            if self._running and not self.relay.is_up(peer.node):
                self._look_for(peer)

    def _drop(self, peer: _Peer, reason: str) -> None:
        self._log.warning("link.dropped", peer=peer.node, reason=reason)
        for wire in (peer.outward, peer.inward):
            if wire is not None:
                wire.close()
        peer.outward = peer.inward = None
        self._wake(peer)
        self._evaluate(peer)

    def _wake(self, peer: _Peer) -> None:
        for dial in self._dials.values():
            if dial.node == peer.node:
                dial.wake.set()

    def _peer(self, node: int) -> _Peer:
        peer = self.peers.get(node)
        if peer is None:
            if len(self.peers) >= self.config.peers_max:
                raise LinkRefused(f"more than {self.config.peers_max} nodes")
            peer = self.peers[node] = _Peer(node)
        return peer

    # -- accepting --------------------------------------------------------------------------

    def _accepted_plain(self, sock: socket.socket, _peer: Any) -> None:
        self._accepted(_PlainWire(self._loop, sock, self._run_input))

    def _not_accepted(self, error: OSError) -> None:
        self._log.error("link.accept_failed", reason=str(error), pause_s=ACCEPT_PAUSE_S)

    def _accepted(self, wire: _Wire) -> None:
        if not self._running or len(self._pending) >= 4 * self.config.peers_max:
            wire.close()
            return
        self._pending.add(wire)
        shake = self._handshake(False)
        timer = self._loop.call_later(HANDSHAKE_S, lambda: lost("no HELLO"))

        def end() -> None:
            timer.cancel()
            self._pending.discard(wire)

        def lost(reason: str) -> None:
            end()
            wire.close()
            self._log.debug("link.handshake_broken", reason=reason)

        def frames(received: list[bytes]) -> None:
            for position, data in enumerate(received):
                try:
                    answer = shake.receive(data)
                    if shake.done and shake.peer is not None:
                        self._judge(shake.peer)
                except LinkRefused as error:
                    end()
                    if error.told:
                        wire.close()
                        self._on_told(error)
                    else:
                        self._refuse(wire, error, shake.peer.node if shake.peer else None)
                    return
                if answer is not None:
                    wire.writer.send(answer)
                    wire.flush()
                if shake.done:
                    end()
                    self._attach_inward(wire, shake, received[position + 1 :])
                    return

        wire.on_frames, wire.on_lost = frames, lost
        wire.resume()

    def _refuse(self, wire: _Wire, error: LinkRefused, who: Any) -> None:
        self._note_refusal(error, who)
        wire.writer.send(refusal(error.text, error.code))
        wire.flush()
        # The text must get through before the connection goes.
        self._pending.add(wire)

        def end(_reason: str = "") -> None:
            wire.close()
            self._pending.discard(wire)

        wire.on_frames, wire.on_lost = _ignore_frames, end
        self._loop.call_later(0.2, end)

    def _note_refusal(self, error: LinkRefused, who: Any) -> None:
        """Logs why a node is not accepted, once."""
        key, text = str(who), error.text
        if self._refusals.get(key) != text:
            if len(self._refusals) > 1000:
                self._refusals.clear()
            self._refusals[key] = text
            self._log.error("link.refused", peer=who, reason=text)

    def _judge(self, hello: PeerHello) -> None:
        """Refuses identities that cannot be true. Raises LinkRefused."""
        node = hello.node
        if node == self.node_id:
            if hello.instance == self.instance:
                raise LinkRefused("this is the node itself", CODE_SELF)
            raise LinkRefused(f"two nodes say they are number {node}", CODE_DUPLICATE)
        if node in self.forgotten and hello.formed:
            raise LinkRefused(f"node {node} was removed from the cluster", CODE_FORGOTTEN)
        peer = self.peers.get(node)
        known = peer.hello if peer is not None else None
        if peer is None or known is None:
            return
        same = hello.instance == known.instance
        if hello.directory == known.directory and (
            hello.incarnation < known.incarnation
            or (hello.incarnation == known.incarnation and not same)
        ):
            raise LinkRefused(
                f"node {node} shows incarnation {hello.incarnation} of its data directory, "
                f"another process had {known.incarnation}",
                CODE_OLDER,
            )
        if not same and self._is_alive(peer):
            raise LinkRefused(
                f"number {node} is in use: the node at {known.address} has it and is alive",
                CODE_NUMBER_IN_USE,
            )

    def _is_alive(self, peer: _Peer) -> bool:
        """Whether the process that is linked under a number shows life."""
        if peer.watch is not None and peer.watch.is_gone():
            return False
        if peer.up:
            return not self.detector.is_suspected(peer.node)
        if self.relay.is_up(peer.node):
            return not self.relay.is_suspected(peer.node)
        # It may be about to be linked both ways.
        age_s = time.monotonic() - peer.half_since
        return bool(peer.half_since) and age_s * 1000 < self.config.suspect_max_ms

    def _hello(self) -> Hello:
        return Hello(
            cluster=self.config.name,
            identity=self.identity,
            address=self.config.advertise or f"{self.address.host}:{self.address.port}",
            formed=self.formed,
            release=self.release,
            supports=self.supports,
            process=self.process,
            instance=self.instance,
        )

    def _handshake(self, dialler: bool) -> Handshake:
        return Handshake(
            dialler,
            self._secret,
            self._hello(),
            lambda: [peer.address for peer in self.peers.values() if peer.address],
        )

    def _learn(self, peer: _Peer, shake: Handshake) -> None:
        """Takes over what the peer said of itself and of others."""
        assert shake.peer is not None
        self._meet(peer, shake.peer)
        for text in [peer.address, *shake.known]:
            with contextlib.suppress(ValueError, TypeError):
                self.add_address(parse_address(text))

    def _meet(self, peer: _Peer, hello: PeerHello) -> None:
        """Takes over what an accepted peer said of itself."""
        life = (hello.instance, hello.incarnation)
        if life != peer.life:
            # A new life of the node: what stands belongs to the old one.
            if peer.inward is not None:
                peer.inward.close()
                peer.inward = None
            if peer.outward is not None and peer.outward_life != life:
                peer.outward.close()
                peer.outward = None
            self._evaluate(peer)
            if peer.hello is None or peer.hello.instance != hello.instance:
                peer.watch = ProcessWatch(self.process, hello.process, self.read_start)
                peer.gone = False
            self._wake(peer)
        peer.hello = hello
        peer.incarnation = hello.incarnation
        peer.formed = hello.formed
        peer.address = hello.address

    def _attach_inward(self, wire: _Wire, shake: Handshake, rest: list[bytes]) -> None:
        assert shake.peer is not None
        if shake.identity is not self.identity:
            wire.close()
            return
        try:
            peer = self._peer(shake.peer.node)
        except LinkRefused as error:
            self._refuse(wire, error, shake.peer.node)
            return
        self._learn(peer, shake)
        if peer.inward is not None:
            # The peer dialled again, so its old connection is of no use to it.
            peer.inward.close()
            peer.inward = None
            self._evaluate(peer)
        node = peer.node
        # What is relayed has a second header.
        wire.reader.frame_max = self.config.link_frame_max_bytes + HEADER_SIZE
        on_frame = self.events.on_frame
        heard = self.detector.heard
        step = self._credit_step

        def frames(received: list[bytes]) -> None:
            now_ms = int(time.monotonic() * 1000)
            if heard(node, now_ms):
                self._log.info("link.recovered", peer=node)
                self.events.on_unsuspect(node)
                self._perform(self.relay.suspected(node, False, now_ms))
            for data in received:
                if data[4] < FRAME_HEARTBEAT:
                    on_frame(node, data)
                    continue
                self._on_link_frame(peer, data, now_ms)
                if peer.inward is not wire:
                    return
            if wire.reader.bytes_in - peer.told >= step:
                self._tell_taken(peer)

        def lost(reason: str) -> None:
            wire.close()
            if peer.inward is wire:
                self._log.info("link.lost", peer=node, direction="in", reason=reason)
                peer.inward = None
                self._evaluate(peer)

        # Nothing is read until the link stands both ways: answers could not be sent.
        wire.pause()
        wire.on_frames, wire.on_lost = frames, lost
        peer.inward = wire
        peer.in_id, peer.told = shake.connection, 0
        wire.totals = peer.totals
        self._wake(peer)
        self._evaluate(peer)
        if rest and peer.inward is wire:
            frames(rest)

    def _on_link_frame(self, peer: _Peer, data: bytes, now_ms: int) -> None:
        """Takes a frame that is about links."""
        kind = data[4]
        try:
            if kind == FRAME_GOODBYE:
                peer.leaves = True
                self._drop(peer, "the node has stopped")
            elif kind == FRAME_CREDIT:
                _, _, _, _, taken, link, _, _ = frame_header(data)
                self._on_credit(peer, taken, link)
            elif kind == FRAME_RELAY:
                self._perform(self.relay.on_frame(peer.node, data, now_ms))
            elif kind == FRAME_HEARTBEAT:
                _, _, flags, _, _, _, wall, _ = frame_header(data)
                self.clock.heard(peer.node, wall, since_boot_ms())
                if flags & FLAG_NEIGHBOURS:
                    told = msgspec.msgpack.decode(data[HEADER_SIZE:])
                    self._perform(self.relay.heard(peer.node, told, now_ms))
        except (ValueError, msgspec.DecodeError) as error:
            self._log.error("link.bad_frame", peer=peer.node, type=kind, reason=str(error))

    # -- dialling ---------------------------------------------------------------------------

    async def _dial_forever(self, dial: _Dial) -> None:
        backoff = BACKOFF_MIN_S
        while self._running:
            peer = self.peers.get(dial.node) if dial.node else None
            # A forgotten node is not dialled before it has come by itself, with nothing.
            wanted = dial.node not in self.forgotten or (peer is not None and peer.inward)
            if wanted and (peer is None or peer.outward is None):
                wire, shake, error = await self._dial(dial)
                if shake is not None and wire is not None:
                    if await self._attach_outward(dial, wire, shake):
                        backoff = BACKOFF_MIN_S
                elif error == CODE_SELF:
                    self.lists_itself |= dial.address in self.config.peers
                    return
                if error and error != dial.last_error:
                    refused = error.startswith("refused by")
                    (self._log.error if refused else self._log.info)(
                        "link.dial_failed", address=str(dial.address), reason=error
                    )
                dial.last_error = error
            else:
                backoff = BACKOFF_MAX_S
            dial.wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(dial.wake.wait(), backoff)
                backoff = BACKOFF_MIN_S / 2
            backoff = min(backoff * 2, BACKOFF_MAX_S)

    async def _dial(self, dial: _Dial) -> tuple[_Wire | None, Handshake | None, str]:
        """One attempt: (wire, finished handshake, "") or (None, None, reason)."""
        wire: _Wire | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                wire = await self._connect(dial.address)
            async with asyncio.timeout(HANDSHAKE_S):
                shake = await self._shake(wire)
        except TimeoutError:
            if wire is not None:
                wire.close()
            return None, None, "no answer"
        except (OSError, ssl.SSLError) as error:
            peer = self.peers.get(dial.node)
            if peer is not None and not peer.up:
                self._look_for(peer)
            return None, None, os.strerror(error.errno) if error.errno else str(error)
        except LinkRefused as error:
            assert wire is not None
            if error.code == CODE_SELF:
                wire.close()
                return None, None, CODE_SELF
            if error.told:
                wire.close()
                self._on_told(error)
            else:
                self._refuse(wire, error, str(dial.address))
            return None, None, error.text
        except asyncio.CancelledError:
            if wire is not None:
                wire.close()
            raise
        return wire, shake, ""

    async def _connect(self, address: Address) -> _Wire:
        if self._contexts is not None:
            _, wire = await self._loop.create_connection(
                _TlsWire, address.host, address.port, ssl=self._contexts[1], server_hostname=""
            )
            return wire
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        host = address.host
        if family == socket.AF_INET and not host.replace(".", "").isdigit():
            found = await self._loop.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
            family, host = found[0][0], str(found[0][4][0])
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        try:
            await self._loop.sock_connect(sock, (host, address.port))
        except BaseException:
            sock.close()
            raise
        return _PlainWire(self._loop, sock, self._run_input)

    async def _shake(self, wire: _Wire) -> Handshake:
        shake = self._handshake(True)
        finished: asyncio.Future[Handshake] = self._loop.create_future()

        def fail(error: Exception) -> None:
            if not finished.done():
                finished.set_exception(error)

        def frames(received: list[bytes]) -> None:
            for data in received:
                try:
                    answer = shake.receive(data)
                    if shake.done and shake.peer is not None:
                        self._judge(shake.peer)
                except LinkRefused as error:
                    fail(error)
                    return
                if answer is not None:
                    wire.writer.send(answer)
                    wire.flush()
                if shake.done and not finished.done():
                    finished.set_result(shake)

        def lost(reason: str) -> None:
            wire.close()
            fail(OSError(reason))

        wire.on_frames, wire.on_lost = frames, lost
        wire.writer.send(shake.begin())
        wire.flush()
        wire.resume()
        return await finished

    async def _attach_outward(self, dial: _Dial, wire: _Wire, shake: Handshake) -> bool:
        """The dialled connection stands: frames may go out on it."""
        assert shake.peer is not None
        if shake.identity is not self.identity:
            wire.close()
            return False
        try:
            peer = self._peer(shake.peer.node)
        except LinkRefused as error:
            self._refuse(wire, error, shake.peer.node)
            return False
        dial.node = peer.node
        if peer.outward is not None or wire.closed:
            # Another address of the same node was faster.
            wire.close()
            return False
        self._learn(peer, shake)

        def lost(reason: str) -> None:
            wire.close()
            if peer.outward is wire:
                self._log.info("link.lost", peer=peer.node, direction="out", reason=reason)
                peer.outward = None
                self._evaluate(peer)
                dial.wake.set()

        def frames(_received: list[bytes]) -> None:
            lost("frames on the wrong connection")

        wire.on_frames, wire.on_lost = frames, lost
        peer.outward = wire
        peer.out_id, peer.taken = shake.connection, 0
        wire.totals = peer.totals
        peer.outward_life = (shake.peer.instance, shake.peer.incarnation)
        peer.frames_out = 0
        self._evaluate(peer)
        return True

    async def _resolve_forever(self) -> None:
        while True:
            try:
                found = await self._loop.getaddrinfo(
                    self.config.dns_name, self.address.port, type=socket.SOCK_STREAM
                )
                for entry in found[: self.config.peers_max]:
                    self.add_address(Address(str(entry[4][0]), self.address.port))
            except OSError as error:
                self._log.warning(
                    "link.resolve_failed", name=self.config.dns_name, reason=str(error)
                )
            pause = RESOLVE_S if self.connected() else RESOLVE_S / 10
            await asyncio.sleep(pause)


def wall_ms() -> int:
    """This machine's wall clock."""
    return time.time_ns() // 1_000_000


def since_boot_ms() -> int:
    """A clock that nobody sets and that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


def is_urgent(data: bytes) -> bool:
    """Frames that may overtake bulk: none of them says anything about frames queued before it."""
    kind = data[4]
    if kind == FRAME_CONTROL:
        size = int.from_bytes(data[:4], "little")
        return size <= URGENT_SIZE_MAX and data[24] != CONTROL_CLASSIC
    return kind in (FRAME_APPEND_REPLY, FRAME_HEARTBEAT, FRAME_CREDIT)


def _read_secret(config: ClusterConfig) -> bytes:
    if not config.secret_file:
        return config.secret.encode()
    try:
        with open(config.secret_file, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & SECRET_BITS_REFUSED:
                raise LinkRefused(
                    f"cluster.secret_file: others may read {config.secret_file} (mode {mode:04o}); "
                    "it must be for its owner alone (chmod 600)"
                )
            return file.read(4096).strip()
    except OSError as error:
        raise LinkRefused(f"cluster.secret_file: {error}") from None


def _listen(address: Address, backlog: int) -> socket.socket:
    try:
        # Peers are told one address, so `localhost` is the first of its two here.
        (sock,) = listen(addresses_of(address.host)[0], address.port, backlog)
    except OSError as error:
        raise OSError(error.errno, f"cluster.listen = {address}: {error.strerror}") from None
    return sock


def _tls_contexts(config: ClusterConfig) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """(accepting, dialling), both of which demand a certificate of the cluster's authority."""
    if not config.tls_certfile:
        return None
    made = []
    for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Nodes are known by the authority and by the secret, not by their host names.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(config.tls_certfile, config.tls_keyfile)
        context.load_verify_locations(config.tls_cacertfile)
        made.append(context)
    return made[0], made[1]
