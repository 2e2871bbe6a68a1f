# cython: annotation_typing=False
"""Links between nodes: one TCP or TLS connection per pair and direction, authenticated, FIFO.

Every node dials every other one. Own frames go out on the dialled connection, the peer's come in
on the accepted one. A peer is *up* when both stand and belong to the same process, *connected* when
the detector does not suspect it either. HELLO is described in `handshake`, frames are those of
docs/formats/entries-and-frames.md. A node that is not up is reached through another one where that
is possible (`relay`): whoever is told of nodes here sees no difference.
Frames of urgent kinds (`frame_kinds`) go ahead of queued bulk frames.

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
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from convoymq import __version__
from convoymq.kernels.link_frames import (
    FRAME_CREDIT,
    FRAME_GOODBYE,
    FRAME_HEARTBEAT,
    FRAME_RELAY,
    HEADER_SIZE,
    frame,
    frame_header,
)
from convoymq.model.config import Address, ClusterConfig, parse_address
from convoymq.model.rounds import run_each
from convoymq.replication.versions import Supports
from convoymq.transport import relay
from convoymq.transport.admission import Admission
from convoymq.transport.clocks import since_boot_ms, until_beat, wall_ms
from convoymq.transport.cluster_clock import ClusterClock
from convoymq.transport.connections import (
    Connection,
    PlainConnection,
    RunInput,
    TlsConnection,
    closer,
    ignore_frames,
)
from convoymq.transport.credentials import read_secrets, tls_contexts
from convoymq.transport.credit import Credit
from convoymq.transport.detector import Detector
from convoymq.transport.dialling import HANDSHAKE_S, Dial, Dialler
from convoymq.transport.frame_kinds import LINK_FRAMES, LINKS, NUMBER_MAX, is_urgent
from convoymq.transport.handshake import (
    INSTANCE_SIZE,
    Handshake,
    LinkRefused,
    PeerHello,
    read_hello,
)
from convoymq.transport.identity import NodeIdentity
from convoymq.transport.interfaces import LinkEvents
from convoymq.transport.listening import (
    ACCEPT_PAUSE_S,
    BACKLOG,
    Acceptor,
    SocketAddress,
    addresses_of,
    listen,
)
from convoymq.transport.peer import Peer
from convoymq.transport.processes import ProcessWatch, own_process, read_start

HALF_LINK_S = 5.0
GOODBYE_S = 0.5
CLOCK_S = 1.0
"""A link that carries other frames still carries a heartbeat so often, for the clocks."""
RELAY_BACKLOG_SHARE = 4
"""Frames of others are handed on while the backlog is below that part of its bound."""
FLAG_NEIGHBOURS = 1
_IS_OWN = bytes(
    number in LINK_FRAMES and LINK_FRAMES[number].owner == LINKS for number in range(NUMBER_MAX + 1)
)
"""By type: whether `Links` takes a frame itself."""


class Links:
    """All links of one node; the node's `Transport`. Use as `async with`.

    Args:
        config: peers, secret, TLS and bounds.
        address: where to listen.
        identity: who this node is; see `set_identity`.
        events: told about frames and peers.
        on_dirty: called when something was sent: call `flush` at the end of the round.
        log: a structlog logger.
        run_input: calls what reads a connection, and what the timer is for, in place of the loop.
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
        log: structlog.stdlib.BoundLogger,
        run_input: RunInput | None = None,
        *,
        supports: Supports | None = None,
        release: str = __version__,
        backlog: int = BACKLOG,
    ) -> None:
        self.run_input = run_input
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
        """True if this node has cluster data; told to others when a link is made."""
        self.detector = Detector(config.heartbeat_ms, config.suspect_min_ms, config.suspect_max_ms)
        self.peers: dict[int, Peer] = {}
        self.forgotten: set[int] = set()
        self.lists_itself = False
        """True if one of the configured addresses has turned out to be this node's own."""
        self.admission = Admission(self, read_secrets(config))
        self.dialler = Dialler(self)
        self._backlog_max = config.link_backlog_max_bytes
        self.credit = Credit(self, self._backlog_max)
        self.full: set[int] = set()
        """Nodes that take no bulk for now."""
        self.is_congested: Callable[[], bool] = lambda: False
        """Returns whether this node should be sent less."""
        self._on_dirty = on_dirty
        self._dirty: list[Peer] = []
        self.log = log
        self.tasks = asyncio.TaskGroup()
        self.running = False
        self.pending: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._server: Acceptor | asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.contexts = tls_contexts(config)
        self.clock = ClusterClock()
        """Knows the clocks of the nodes that are up."""
        self.relay = relay.RelayTable(
            identity.node,
            random.SystemRandom().randrange(1, 1 << 31),
            lambda: msgspec.msgpack.encode(self.admission.hello().to_builtins()),
            self._judge_relayed,
            self._relay_backlog,
            backlog_max_bytes=config.link_backlog_max_bytes // RELAY_BACKLOG_SHARE,
        )

    # -- start and end ----------------------------------------------------------------------

    async def __aenter__(self) -> Links:
        self.loop = asyncio.get_running_loop()
        await self.tasks.__aenter__()
        self._listener = _listen(self.address, self._accept_backlog)
        if self.contexts is None:
            self._server = Acceptor(
                self.loop, self._listener, self._accepted_plain, self._not_accepted
            )
        else:
            self._server = await self.loop.create_server(
                lambda: TlsConnection(self._accepted),
                sock=self._listener,
                backlog=self._accept_backlog,
                ssl=self.contexts[0],
            )
        self.running = True
        for peer in self.config.peers:
            self.lists_itself |= self.dialler.is_own(peer)
            self.dialler.add(peer)
        if self.config.dns_name:
            self.tasks.create_task(self.dialler.resolve_forever())
        self._timer = self._next_tick()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.running = False
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        self._cancel_tasks()
        for connection in list(self.pending):
            connection.close()
        for peer in self.peers.values():
            for end in (peer.outward, peer.inward):
                if end is not None:
                    end.close()
        await self.tasks.__aexit__(None, None, None)

    def _cancel_tasks(self) -> None:
        for task in list(getattr(self.tasks, "_tasks", ())):
            task.cancel()

    def set_identity(self, identity: NodeIdentity) -> None:
        """Tells every node anew who this one is: all links break and are made again."""
        assert identity.node == self.node_id
        if identity == self.identity:
            return
        self.identity = identity
        for connection in list(self.pending):
            connection.close()
        self.pending.clear()
        for peer in list(self.peers.values()):
            if peer.outward is not None or peer.inward is not None:
                self.drop(peer, "the identity of this node has changed")
            self._perform(self.relay.forget(peer.node))

    def hello_of(self, node: int) -> PeerHello | None:
        """Returns what a node told of itself when it was last linked."""
        peer = self.peers.get(node)
        return peer.hello if peer is not None else None

    async def goodbye(self) -> None:
        """Tells all linked nodes that this process ends. Nothing is sent or reported after it."""
        for node in self.relay.nodes():
            self.send(node, frame(FRAME_GOODBYE, 0, 0, 0, 0, 0, 0))
        self.running = False
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
            for connection in (peer.outward, peer.inward):
                if connection is not None:
                    connection.on_frames = ignore_frames
                    connection.on_lost = closer(connection)
        deadline = self.loop.time() + GOODBYE_S
        while any(not end.closed and end.writer.queued_bytes for end in ends):
            if self.loop.time() > deadline:
                return
            await asyncio.sleep(0.005)

    def forget(self, node: int) -> None:
        """Drops the links of a node that left, and refuses it while it has cluster data."""
        self.forgotten.add(node)
        peer = self.peers.get(node)
        if peer is not None:
            self.drop(peer, "forgotten")
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
        if not self.running:
            return
        urgent = is_urgent(frame)
        size = len(frame)
        for part in body:
            size += len(part)
        wrapped = self.relay.wrap(node, size, urgent)
        if wrapped is not None:
            self._queue(self.peers[wrapped[0]], wrapped[1], (frame, *body), urgent)
            peer.relay_sent += size
            if peer.relay_sent - peer.relay_taken > self.credit.relay_window:
                self.full.add(node)

    def _queue(self, peer: Peer, frame: bytes, body: Sequence[bytes], urgent: bool) -> None:
        if peer.outward is None:
            return
        writer = peer.outward.writer
        queued = writer.queued_bytes
        writer.send(frame, body, urgent)
        if writer.bytes_out + writer.queued_bytes - peer.taken > self.credit.window and peer.up:
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
            self.loop.call_soon(self.drop, peer, "does not read: the backlog is full")

    def is_connected(self, node: int) -> bool:
        """Returns whether the node is linked both ways or relayed, and not suspected."""
        peer = self.peers.get(node)
        if peer is None:
            return False
        if peer.up:
            return not self.detector.is_suspected(node)
        return self.relay.is_up(node) and not self.relay.is_suspected(node)

    def backlog_bytes(self, node: int) -> int:
        """Returns the number of bytes queued to the node, or to the one that relays to it, and not
        yet written."""
        peer = self.peers.get(node)
        if peer is not None and peer.outward is None:
            peer = self.peers.get(self.relay.hop_of(node))
        return 0 if peer is None or peer.outward is None else peer.outward.writer.queued_bytes

    def _relay_backlog(self, node: int) -> int:
        """Returns the part of a backlog that counts when a frame of another node is to be handed
        on."""
        peer = self.peers.get(node)
        return self.backlog_bytes(node) - (peer.largest if peer is not None else 0)

    def flush(self) -> None:
        """Writes what was sent in this round."""
        if self.credit.withheld and not self.is_congested():
            self.credit.tell_withheld()
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, []
        run_each(dirty, _flush, self._drop_failed)

    def _drop_failed(self, peer: Peer, error: Exception) -> None:
        """An error of our own on one link: it is dropped, and made anew."""
        self.loop.call_soon(self.drop, peer, f"a fault of this node: {error!r}")

    def connected(self) -> list[int]:
        """Ids of all nodes that are up, ascending."""
        return sorted(node for node in self.peers if self.is_connected(node))

    def info(self) -> list[dict[str, object]]:
        """Returns one row per known peer, for status pages."""
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
        """Returns how far this node's wall clock is ahead of the cluster's (ms), and whether too
        far."""
        return self.clock.skew_ms, self.clock.is_skewed

    # -- liveness ---------------------------------------------------------------------------

    def _next_tick(self) -> asyncio.TimerHandle:
        delay_s = until_beat(self.loop.time(), self.config.heartbeat_ms / 1000)
        if self.run_input is None:
            return self.loop.call_later(delay_s, self._tick)
        return self.loop.call_later(delay_s, self.run_input, self._tick)

    def _tick(self) -> None:
        self._timer = self._next_tick()
        now = time.monotonic()
        now_ms = int(now * 1000)
        for node in self.detector.tick(now_ms):
            self.log.warning("link.suspected", peer=node)
            self.events.on_suspect(node)
            self._perform(self.relay.suspected(node, True, now_ms))
        self._perform(self.relay.tick(now_ms))
        for peer in list(self.peers.values()):
            if peer.up and peer.outward is not None:
                writer = peer.outward.writer
                if writer.frames_out == peer.frames_out or now - peer.told_clock >= CLOCK_S:
                    self._beat(peer, b"")
                peer.frames_out = writer.frames_out
                self.credit.tell_rest(peer)
            elif peer.half_since and now - peer.half_since > HALF_LINK_S:
                self.drop(peer, "linked one way only")
            self.credit.watch(peer, now)
            if not peer.up and self.relay.is_up(peer.node):
                self.credit.tell_rest(peer)
            elif not peer.up:
                self.look_for(peer)
        self.admission.give_up(now)

    def _beat(self, peer: Peer, neighbours: bytes) -> None:
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
                self.log.info(
                    "link.relayed",
                    peer=output.node,
                    incarnation=output.incarnation,
                    relay=self.relay.hop_of(output.node),
                )
                self._begin_relayed(self.peers[output.node])
                self.events.on_up(output.node, output.incarnation)
            elif isinstance(output, relay.Down):
                self.log.info("link.relay_lost", peer=output.node)
                self.full.discard(output.node)
                self.events.on_down(output.node, False)
            elif isinstance(output, relay.Suspect):
                self.events.on_suspect(output.node)
            elif isinstance(output, relay.Unsuspect):
                self.events.on_unsuspect(output.node)
            else:
                self.drop(
                    self.peers[output.node], f"silent, and reached through node {output.relay}"
                )

    def _begin_relayed(self, peer: Peer) -> None:
        """A node is reached through another one from now on."""
        peer.gone = False
        self.full.discard(peer.node)
        peer.relay_out_id, peer.relay_in_id = self.relay.sessions_of(peer.node)
        peer.relay_sent = peer.relay_taken = peer.relay_in = peer.relay_told = 0

    def _on_relayed(self, peer: Peer, data: bytes) -> None:
        """Takes a frame that came through another node."""
        peer.relay_in += len(data)
        if data[4] == FRAME_CREDIT:
            _, _, _, _, taken, link, _, _ = frame_header(data)
            self.credit.on_credit(peer, taken, link)
            return
        self.events.on_frame(peer.node, data)
        if peer.relay_in - peer.relay_told >= self.credit.step:
            self.credit.tell(peer)

    def _judge_relayed(self, node: int, data: bytes) -> int:
        """Reads HELLO of a node that wants to be relayed; 0 = it is not accepted."""
        try:
            body = msgspec.msgpack.decode(data, type=dict[str, object])
            hello = read_hello(body, self.admission.hello().to_builtins())
            if hello.node != node:
                return 0
            self.admission.judge(hello)
            peer = self._peer(node)
        except msgspec.DecodeError:
            return 0
        except LinkRefused as error:
            self.admission.note(error, node)
            return 0
        self._meet(peer, hello)
        return hello.incarnation

    def look_for(self, peer: Peer) -> None:
        """Reports an unlinked peer whose process does not run any more."""
        if not peer.gone and peer.watch is not None and peer.watch.is_gone():
            peer.gone = True
            self.log.info("link.process_gone", peer=peer.node)
            self.events.on_down(peer.node, True)

    def _evaluate(self, peer: Peer) -> None:
        """Compares what stands with what was told, and tells."""
        stands = (
            peer.outward is not None
            and peer.inward is not None
            and peer.outward_process == peer.process
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
            self.log.info("link.up", peer=peer.node, incarnation=peer.incarnation)
            self.events.on_up(peer.node, peer.incarnation)
            assert peer.inward is not None
            peer.inward.resume()
        elif not stands and peer.up:
            peer.up = False
            self.full.discard(peer.node)
            self.detector.unlinked(peer.node)
            self.log.info("link.down", peer=peer.node)
            peer.gone = peer.leaves
            self.clock.lost(peer.node)
            self.events.on_down(peer.node, peer.leaves)
            self._perform(self.relay.unlinked(peer.node, int(time.monotonic() * 1000)))
        if not peer.up:
            half = peer.outward is not None or peer.inward is not None
            peer.half_since = (peer.half_since or time.monotonic()) if half else 0.0
            if self.running and not self.relay.is_up(peer.node):
                self.look_for(peer)

    def drop(self, peer: Peer, reason: str) -> None:
        self.log.warning("link.dropped", peer=peer.node, reason=reason)
        for connection in (peer.outward, peer.inward):
            if connection is not None:
                connection.close()
        peer.outward = peer.inward = None
        self.dialler.wake(peer)
        self._evaluate(peer)

    def _peer(self, node: int) -> Peer:
        peer = self.peers.get(node)
        if peer is None:
            if len(self.peers) >= self.config.peers_max:
                raise LinkRefused(f"more than {self.config.peers_max} nodes")
            peer = self.peers[node] = Peer(node)
        return peer

    # -- accepting --------------------------------------------------------------------------

    def _accepted_plain(self, sock: socket.socket, _peer: SocketAddress) -> None:
        self._accepted(PlainConnection(self.loop, sock, self.run_input))

    def _not_accepted(self, error: OSError) -> None:
        self.log.error("link.accept_failed", reason=str(error), pause_s=ACCEPT_PAUSE_S)

    def _accepted(self, connection: Connection) -> None:
        if not self.running or len(self.pending) >= 4 * self.config.peers_max:
            connection.close()
            return
        self.pending.add(connection)
        shake = self.admission.handshake(False)
        timer = self.loop.call_later(HANDSHAKE_S, lambda: lost("no HELLO"))

        def end() -> None:
            timer.cancel()
            self.pending.discard(connection)

        def lost(reason: str) -> None:
            end()
            connection.close()
            self.log.debug("link.handshake_broken", reason=reason)

        def frames(received: list[bytes]) -> None:
            for position, data in enumerate(received):
                try:
                    answer = shake.receive(data)
                    if shake.done and shake.peer is not None:
                        self.admission.judge(shake.peer)
                except LinkRefused as error:
                    end()
                    if error.told:
                        connection.close()
                        self.admission.on_told(error)
                    else:
                        self.admission.refuse(
                            connection, error, shake.peer.node if shake.peer else None
                        )
                    return
                if answer is not None:
                    connection.writer.send(answer)
                    connection.flush()
                if shake.done:
                    end()
                    self._attach_inward(connection, shake, received[position + 1 :])
                    return

        connection.on_frames, connection.on_lost = frames, lost
        connection.resume()

    def _learn(self, peer: Peer, shake: Handshake) -> None:
        """Takes over what the peer said of itself and of others."""
        assert shake.peer is not None
        self._meet(peer, shake.peer)
        for text in [peer.address, *shake.known]:
            with contextlib.suppress(ValueError, TypeError):
                self.dialler.add(parse_address(text))

    def _meet(self, peer: Peer, hello: PeerHello) -> None:
        """Takes over what an accepted peer said of itself."""
        process = (hello.instance, hello.incarnation)
        if process != peer.process:
            # Another process of the node: what stands belongs to the one before.
            if peer.inward is not None:
                peer.inward.close()
                peer.inward = None
            if peer.outward is not None and peer.outward_process != process:
                peer.outward.close()
                peer.outward = None
            self._evaluate(peer)
            if peer.hello is None or peer.hello.instance != hello.instance:
                peer.watch = ProcessWatch(self.process, hello.process, self.read_start)
                peer.gone = False
            self.dialler.wake(peer)
        peer.hello = hello
        peer.incarnation = hello.incarnation
        peer.formed = hello.formed
        peer.address = hello.address

    def _attach_inward(self, connection: Connection, shake: Handshake, rest: list[bytes]) -> None:
        assert shake.peer is not None
        if shake.identity is not self.identity:
            connection.close()
            return
        try:
            peer = self._peer(shake.peer.node)
        except LinkRefused as error:
            self.admission.refuse(connection, error, shake.peer.node)
            return
        self._learn(peer, shake)
        if peer.inward is not None:
            # The peer dialled again, so its old connection is of no use to it.
            peer.inward.close()
            peer.inward = None
            self._evaluate(peer)
        node = peer.node
        # What is relayed has a second header.
        connection.reader.frame_max = self.config.link_frame_max_bytes + HEADER_SIZE
        on_frame = self.events.on_frame
        heard = self.detector.heard
        step = self.credit.step

        def frames(received: list[bytes]) -> None:
            now_ms = int(time.monotonic() * 1000)
            if heard(node, now_ms):
                self.log.info("link.recovered", peer=node)
                self.events.on_unsuspect(node)
                self._perform(self.relay.suspected(node, False, now_ms))
            for data in received:
                if not _IS_OWN[data[4]]:
                    on_frame(node, data)
                    continue
                self._on_link_frame(peer, data, now_ms)
                if peer.inward is not connection:
                    return
            if connection.reader.bytes_in - peer.told >= step:
                self.credit.tell(peer)

        def lost(reason: str) -> None:
            connection.close()
            if peer.inward is connection:
                self.log.info("link.lost", peer=node, direction="in", reason=reason)
                peer.inward = None
                self._evaluate(peer)

        # Nothing is read until the link stands both ways: answers could not be sent.
        connection.pause()
        connection.on_frames, connection.on_lost = frames, lost
        peer.inward = connection
        peer.in_id, peer.told = shake.connection, 0
        connection.totals = peer.totals
        self.dialler.wake(peer)
        self._evaluate(peer)
        if rest and peer.inward is connection:
            frames(rest)

    def _on_link_frame(self, peer: Peer, data: bytes, now_ms: int) -> None:
        """Takes a frame that is about links."""
        kind = data[4]
        try:
            if kind == FRAME_GOODBYE:
                peer.leaves = True
                self.drop(peer, "the node has stopped")
            elif kind == FRAME_CREDIT:
                _, _, _, _, taken, link, _, _ = frame_header(data)
                self.credit.on_credit(peer, taken, link)
            elif kind == FRAME_RELAY:
                self._perform(self.relay.on_frame(peer.node, data, now_ms))
            elif kind == FRAME_HEARTBEAT:
                _, _, flags, _, _, _, wall, _ = frame_header(data)
                self.clock.heard(peer.node, wall, since_boot_ms())
                if flags & FLAG_NEIGHBOURS:
                    told = msgspec.msgpack.decode(data[HEADER_SIZE:])
                    self._perform(self.relay.heard(peer.node, told, now_ms))
        except (ValueError, msgspec.DecodeError) as error:
            self.log.error("link.bad_frame", peer=peer.node, type=kind, reason=str(error))

    # -- dialling ---------------------------------------------------------------------------

    async def attach_outward(self, dial: Dial, connection: Connection, shake: Handshake) -> bool:
        """The dialled connection stands: frames may go out on it."""
        assert shake.peer is not None
        if shake.identity is not self.identity:
            connection.close()
            return False
        try:
            peer = self._peer(shake.peer.node)
        except LinkRefused as error:
            self.admission.refuse(connection, error, shake.peer.node)
            return False
        dial.node = peer.node
        if peer.outward is not None or connection.closed:
            # Another address of the same node was faster.
            connection.close()
            return False
        self._learn(peer, shake)

        def lost(reason: str) -> None:
            connection.close()
            if peer.outward is connection:
                self.log.info("link.lost", peer=peer.node, direction="out", reason=reason)
                peer.outward = None
                self._evaluate(peer)
                # By this address or another one of the node.
                dial.wake.set()
                self.dialler.wake(peer)

        def frames(_received: list[bytes]) -> None:
            lost("frames on the wrong connection")

        connection.on_frames, connection.on_lost = frames, lost
        peer.outward = connection
        peer.out_id, peer.taken = shake.connection, 0
        connection.totals = peer.totals
        peer.outward_process = (shake.peer.instance, shake.peer.incarnation)
        peer.frames_out = 0
        self._evaluate(peer)
        return True


def _flush(peer: Peer) -> None:
    peer.dirty = False
    if peer.outward is not None:
        peer.outward.flush()


def _listen(address: Address, backlog: int) -> socket.socket:
    try:
        # Peers are told one address, so `localhost` is the first of its two here.
        (sock,) = listen(addresses_of(address.host)[0], address.port, backlog)
    except OSError as error:
        raise OSError(error.errno, f"cluster.listen = {address}: {error.strerror}") from None
    return sock
