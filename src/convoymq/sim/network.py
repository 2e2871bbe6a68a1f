"""The simulated network: the `Transport` of every node, and the faults of its links.

A link joins two nodes as one TCP connection does: both directions keep their order while it lasts,
everything in flight may go when it breaks, and both ends learn of a break at their own time. So
loss, duplication and reordering happen where production can show them: around breaks. Frames of a
broken connection may still arrive after the next one is up (`stale`): they were in a socket buffer
that is read late. Delay, bursts, stalls and one-way partitions happen inside a connection.

The failure detector is simulated by its verdicts: a node suspects a peer that it has not been able
to hear for a drawn timeout, and is told when it hears it again; `suspect_falsely` makes one wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from convoymq.sim.clock import Process, Scheduler, Timer
from convoymq.sim.relays import is_urgent_frame
from convoymq.sim.trace import Trace

STALE_FRAMES_MAX = 8
CREDIT_US = 300
"""Delay of the word that there is room on a link."""


class Receiver(Protocol):
    """Running node that receives from the network."""

    @property
    def process(self) -> Process:
        """Returns the process that hears it."""

    @property
    def incarnation(self) -> int:
        """Of the node."""

    def may_link(self, peer: Receiver) -> bool:
        """Returns whether HELLO with another running node ends well."""

    def on_frame(self, peer: int, data: bytes) -> None:
        """A whole link frame arrived."""

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A connection to that run of the peer works."""

    def on_link_down(self, peer: int, definite: bool) -> None:
        """The connection is gone; `definite`: the peer's process is known to be gone."""

    def on_room(self, peer: int) -> None:
        """The link to the peer is not full any more."""

    def on_suspected(self, peer: int, suspected: bool) -> None:
        """The failure detector changed its mind about a linked peer."""


@dataclass(slots=True, kw_only=True)
class NetworkConfig:
    """Rates of one run. Times in microseconds."""

    delay_min_us: int = 50
    delay_max_us: int = 400
    spike_chance: float = 0.0
    """Of a frame being held up (with all behind it) for up to `spike_max_us`."""
    spike_max_us: int = 50_000
    loss_chance: float = 0.0
    """Of a frame being lost: the connection carries nothing more and breaks a little later."""
    stale_chance: float = 0.0
    """Of each frame lost in a break arriving on the next one, out of order, perhaps twice."""
    suspect_min_us: int = 150_000
    suspect_max_us: int = 1_000_000
    reconnect_max_us: int = 200_000
    overtake: bool = False
    """Urgent frames overtake bulk, as the writers of links let them."""
    window_bytes: int = 0
    """Beyond that under way to a node, its link is full; 0 = never."""
    relays: bool = False
    """Nodes that are cut off from one another are reached through a third."""


class Direction:
    """Frames from one node to another on the present connection."""

    __slots__ = ("blocked", "bytes", "frames", "last_us", "lost", "pumping", "timer", "urgent_us")

    def __init__(self) -> None:
        self.frames: deque[tuple[int, bytes]] = deque()
        """(arrival time, frame)"""
        self.bytes = 0
        self.last_us = 0
        self.blocked = False
        """Nothing gets through, nothing is lost: a partition, or a stalled connection."""
        self.lost = False
        """A frame was lost: nothing behind it may arrive."""
        self.pumping = False
        self.timer: Timer | None = None
        """Of the pump."""
        self.urgent_us = 0
        """Time when the last urgent frame arrives: they keep their order among each other."""

    def clear(self) -> list[bytes]:
        """Loses what is in flight; returns it."""
        gone = [frame for _, frame in self.frames]
        self.frames.clear()
        self.bytes = 0
        self.lost = False
        return gone


class Network:
    """All links between the nodes of a world."""

    def __init__(self, scheduler: Scheduler, trace: Trace, config: NetworkConfig) -> None:
        self.scheduler = scheduler
        self.trace = trace
        self.config = config
        self.receivers: dict[int, Receiver] = {}
        """Running nodes."""
        self._directions: dict[tuple[int, int], Direction] = {}
        self._connections: dict[tuple[int, int], int] = {}
        """Pair -> number of its present connection; odd while there is one."""
        self._seen: dict[tuple[int, int], int] = {}
        """(node, peer) -> the connection that the node believes in; missing = none."""
        self._suspected: set[tuple[int, int]] = set()
        self._cut: set[tuple[int, int]] = set()
        """Directions through which nothing gets."""
        self._stale: dict[tuple[int, int], list[bytes]] = {}
        self.full: dict[int, set[int]] = {}
        """Node -> those to which its links are full."""
        self.bytes_sent = 0
        self.frames_sent = 0
        self.on_frame_sent: Callable[[int, int, bytes], None] | None = None

    # Nodes.

    def start(self, node: int, receiver: Receiver) -> None:
        """A node begins to run and to connect."""
        self.receivers[node] = receiver
        self.full_of(node).clear()
        for peer in sorted(self.receivers):
            if peer != node:
                self._connect_later(node, peer)

    def stop(self, node: int, *, refuses: bool) -> None:
        """A node is gone at once; its peers learn it at their time.

        `refuses`: only the process died, so its machine refuses connections and peers are sure.
        """
        self.receivers.pop(node, None)
        if refuses:
            for peer in sorted(self.receivers):
                delay_us = self.scheduler.between(1000, 500_000)
                process = self.receivers[peer].process
                self.scheduler.after(delay_us, process, self._refused, peer, node)
        for key in [k for k in self._seen if k[0] == node]:
            del self._seen[key]
        self._suspected = {k for k in self._suspected if k[0] != node}
        for a, b in list(self._connections):
            if node in (a, b):
                self.break_link(a, b)
        # Socket buffers die with either process.
        self._stale = {k: v for k, v in self._stale.items() if node not in k}

    def full_of(self, node: int) -> set[int]:
        """Returns the nodes to which that one should send no bulk for now."""
        return self.full.setdefault(node, set())

    def _tell_room(self, source: int, target: int, connection: int) -> None:
        receiver = self.receivers.get(source)
        full = self.full_of(source)
        # Who sends has it from the same connection, or not at all.
        if receiver is None or self._seen.get((source, target)) != connection or target not in full:
            return
        if self._direction(source, target).bytes <= self.config.window_bytes:
            full.discard(target)
            receiver.on_room(target)

    # Connections.

    def _direction(self, source: int, target: int) -> Direction:
        found = self._directions.get((source, target))
        if found is None:
            found = self._directions[(source, target)] = Direction()
        return found

    def _connect_later(self, a: int, b: int) -> None:
        delay_us = self.scheduler.between(100, self.config.reconnect_max_us)
        self.scheduler.after(delay_us, None, self._connect, min(a, b), max(a, b))

    def _connect(self, a: int, b: int) -> None:
        connection = self._connections.get((a, b), 0)
        if connection & 1 or a not in self.receivers or b not in self.receivers:
            return
        if (a, b) in self._cut or (b, a) in self._cut:
            self._connect_later(a, b)
            return
        if self.is_frozen(a) or self.is_frozen(b):
            self._connect_later(a, b)
            return
        if not self.may_link(a, b):
            self._connect_later(a, b)
            return
        self._connections[(a, b)] = connection + 1
        for source, target in ((a, b), (b, a)):
            direction = self._direction(source, target)
            direction.clear()
            direction.blocked = False
            direction.last_us = direction.urgent_us = self.scheduler.now_us
            delay_us = self.scheduler.between(0, 2000)
            receiver = self.receivers[target]
            self.scheduler.after(
                delay_us, receiver.process, self._linked, target, source, connection + 1
            )

    def _linked(self, node: int, peer: int, connection: int) -> None:
        if self._connections[_pair(node, peer)] != connection or peer not in self.receivers:
            return
        if (node, peer) in self._seen:
            self._unlinked(node, peer, self._seen[(node, peer)])
        self._seen[(node, peer)] = connection
        self._suspected.discard((node, peer))
        self.full_of(node).discard(peer)
        self.trace.add(f"node{node}", f"link up {peer}")
        receiver = self.receivers[node]
        self._tell_clock(node, peer)
        receiver.on_link_up(peer, self.receivers[peer].incarnation)
        stale = self._stale.pop((peer, node), None)
        if stale:
            self.trace.fault("stale_frames", f"{peer}->{node}", str(len(stale)))
            for data in stale:
                self._queue(peer, node, data)
        self._pump(peer, node)

    def _unlinked(self, node: int, peer: int, connection: int) -> None:
        if self._seen.get((node, peer)) != connection:
            return
        del self._seen[(node, peer)]
        self._suspected.discard((node, peer))
        self.full_of(node).discard(peer)
        self.trace.add(f"node{node}", f"link down {peer}")
        receiver = self.receivers.get(node)
        if receiver is not None:
            receiver.process.cluster.lost(peer)
            receiver.on_link_down(peer, False)

    def _tell_clock(self, node: int, peer: int) -> None:
        """Tells a node the peer's wall clock, as a heartbeat does."""
        self.receivers[node].process.cluster.heard(
            peer,
            self.scheduler.wall_ms(self.receivers[peer].process),
            self.scheduler.now_us // 1000,
        )

    def break_link(self, a: int, b: int) -> None:
        """The connection breaks: a prefix of what is in flight still arrives, the rest is lost."""
        pair = _pair(a, b)
        connection = self._connections.get(pair, 0)
        if not connection & 1:
            return
        self._connections[pair] = connection + 1
        for source, target in (pair, (pair[1], pair[0])):
            direction = self._direction(source, target)
            gone = direction.clear()
            receiver = self.receivers.get(target)
            if receiver is None:
                continue
            if self.config.stale_chance and source in self.receivers:
                kept = [d for d in gone if self.scheduler.chance(self.config.stale_chance)]
                kept += [d for d in kept if self.scheduler.chance(0.2)]
                self.scheduler.rng.shuffle(kept)
                if kept:
                    self._stale[(source, target)] = kept[:STALE_FRAMES_MAX]
            if (target, source) in self._seen:
                delay_us = self.scheduler.skewed(0, 100_000)
                self.scheduler.after(
                    delay_us, receiver.process, self._unlinked, target, source, connection
                )
        if a in self.receivers and b in self.receivers:
            self._connect_later(a, b)

    def drop(self, a: int, b: int) -> None:
        """One of the two ends the link."""
        self.break_link(a, b)

    def redial(self, node: int) -> None:
        """The node drops all its links and connects anew: what it tells of itself has changed."""
        for pair in self.links():
            if node in pair:
                self.break_link(*pair)

    def _refused(self, node: int, peer: int) -> None:
        if peer not in self.receivers and (node, peer) not in self._seen:
            self.trace.add(f"node{node}", f"sure that {peer} is gone")
            self.receivers[node].on_link_down(peer, True)

    def links(self) -> list[tuple[int, int]]:
        """Pairs with a connection."""
        return sorted(pair for pair, connection in self._connections.items() if connection & 1)

    # Frames.

    def send(self, source: int, target: int, frame: bytes, body: Sequence[bytes]) -> None:
        """One node hands over a frame."""
        connection = self._seen.get((source, target))
        if connection is None:
            return
        data = b"".join((frame, *body)) if body else bytes(frame)
        self.frames_sent += 1
        self.bytes_sent += len(data)
        if self.on_frame_sent is not None:
            self.on_frame_sent(source, target, data)
        if self._connections[_pair(source, target)] != connection:
            return
        self._queue(source, target, data)

    def _queue(self, source: int, target: int, data: bytes) -> None:
        direction = self._direction(source, target)
        if direction.lost:
            return
        config = self.config
        scheduler = self.scheduler
        if scheduler.chance(config.loss_chance):
            direction.lost = True
            self.trace.fault("frame_lost", f"{source}->{target}")
            connection = self._connections[_pair(source, target)]
            scheduler.after(
                scheduler.between(1000, 300_000), None, self._break_if, source, target, connection
            )
            return
        delay_us = scheduler.between(config.delay_min_us, config.delay_max_us)
        if scheduler.chance(config.spike_chance):
            delay_us += scheduler.skewed(0, config.spike_max_us)
            self.trace.faults["frame_delayed"] += 1
        direction.bytes += len(data)
        if config.window_bytes and direction.bytes > config.window_bytes:
            full = self.full_of(source)
            if target not in full:
                full.add(target)
                self.trace.faults["link_full"] += 1
        if config.overtake and is_urgent_frame(data):
            self._overtake(direction, scheduler.now_us + delay_us, data)
        else:
            direction.last_us = max(direction.last_us, scheduler.now_us + delay_us)
            direction.frames.append((direction.last_us, data))
        self._pump(source, target)

    def _overtake(self, direction: Direction, due_us: int, data: bytes) -> None:
        due_us = direction.urgent_us = max(direction.urgent_us, due_us)
        at = len(direction.frames)
        while at and direction.frames[at - 1][0] > due_us:
            at -= 1
        if at < len(direction.frames):
            self.trace.faults["frame_overtook"] += 1
        direction.frames.insert(at, (due_us, data))
        if at == 0 and direction.timer is not None and not direction.blocked:
            # The pump waits for what was the first one.
            direction.timer.cancel()
            direction.timer = None
            direction.pumping = False

    def _break_if(self, a: int, b: int, connection: int) -> None:
        if self._connections[_pair(a, b)] == connection:
            self.break_link(a, b)

    def _pump(self, source: int, target: int) -> None:
        direction = self._direction(source, target)
        if direction.pumping or direction.blocked or not direction.frames:
            return
        receiver = self.receivers.get(target)
        if receiver is None:
            return
        direction.pumping = True
        delay_us = direction.frames[0][0] - self.scheduler.now_us
        connection = self._connections[_pair(source, target)]
        # Not bound to the receiver's process: the flag must fall whoever lives then.
        direction.timer = self.scheduler.after(
            delay_us, None, self._arrive, source, target, connection
        )

    def _arrive(self, source: int, target: int, connection: int) -> None:
        direction = self._direction(source, target)
        direction.pumping = False
        direction.timer = None
        receiver = self.receivers.get(target)
        if receiver is None:
            return
        if self._connections[_pair(source, target)] != connection or direction.blocked:
            self._pump(source, target)
            return
        if self._seen.get((target, source)) != connection:
            # The receiver has not finished connecting: `_linked` goes on.
            return
        now_us = self.scheduler.now_us
        if receiver.process.frozen_until_us > now_us:
            direction.pumping = True
            self.scheduler.after(
                receiver.process.frozen_until_us - now_us,
                None,
                self._arrive,
                source,
                target,
                connection,
            )
            return
        if direction.frames and direction.frames[0][0] <= now_us:
            _, data = direction.frames.popleft()
            direction.bytes -= len(data)
            if (target, source) in self._suspected:
                self._trust(target, source)
            if source in self.receivers:
                self._tell_clock(target, source)
            if target in self.full_of(source) and direction.bytes <= self.config.window_bytes:
                process = self.receivers[source].process if source in self.receivers else None
                if process is not None:
                    self.scheduler.after(
                        CREDIT_US, process, self._tell_room, source, target, connection
                    )
            receiver.on_frame(source, data)
        self._pump(source, target)

    def connection_of(self, node: int, peer: int) -> int:
        """Returns the number of the connection that the node believes in; 0 = none."""
        return self._seen.get((node, peer), 0)

    def is_frozen(self, node: int) -> bool:
        """Returns whether the process stands still."""
        return self.receivers[node].process.frozen_until_us > self.scheduler.now_us

    def may_link(self, a: int, b: int) -> bool:
        """Returns whether HELLO between two running nodes ends well at both ends."""
        return all(self.receivers[n].may_link(self.receivers[m]) for n, m in ((a, b), (b, a)))

    def is_connected(self, node: int, peer: int) -> bool:
        """The node believes that the link works and the peer lives."""
        return (node, peer) in self._seen and (node, peer) not in self._suspected

    def backlog_bytes(self, node: int, peer: int) -> int:
        """Returns the number of bytes that have not arrived."""
        found = self._directions.get((node, peer))
        return found.bytes if found is not None else 0

    # Partitions, stalls, suspicion.

    def cut(self, source: int, target: int, *, breaks: bool) -> None:
        """Nothing gets from source to target until `heal`. Held, or lost with the connection."""
        self._cut.add((source, target))
        direction = self._direction(source, target)
        direction.blocked = True
        self._suspect_later(target, source)
        if breaks:
            connection = self._connections.get(_pair(source, target), 0)
            if connection & 1:
                delay_us = self.scheduler.between(0, 3_000_000)
                self.scheduler.after(delay_us, None, self._break_if, source, target, connection)

    def heal(self, source: int, target: int) -> None:
        """Undoes `cut`."""
        self._cut.discard((source, target))
        direction = self._direction(source, target)
        if direction.blocked:
            direction.blocked = False
            now_us = self.scheduler.now_us
            held = direction.frames
            direction.frames = deque((max(due, now_us + 100), data) for due, data in held)
            direction.last_us = max(direction.last_us, now_us + 100)
            self._pump(source, target)
        self._trust_later(target, source)

    def is_cut(self, source: int, target: int) -> bool:
        """Returns True between `cut` and `heal`."""
        return (source, target) in self._cut

    def heal_all(self) -> None:
        """Everything gets through again."""
        for source, target in sorted(self._cut):
            self.heal(source, target)

    def silence(self, node: int) -> None:
        """The node stopped running for a while: its peers will suspect it."""
        for peer in sorted(self.receivers):
            if peer != node:
                self._suspect_later(peer, node)

    def suspect_falsely(self, node: int, peer: int, duration_us: int) -> None:
        """The node suspects a live peer for a while."""
        self._suspect(node, peer)
        self.scheduler.after(duration_us, None, self._trust, node, peer)

    def declare_dead(self, node: int, peer: int) -> None:
        """The node is told that a peer is gone for certain, although it lives; the link goes."""
        if self._seen.pop((node, peer), None) is None:
            return
        self._suspected.discard((node, peer))
        self.receivers[node].on_link_down(peer, True)
        self.break_link(node, peer)

    def _suspect_later(self, node: int, peer: int) -> None:
        receiver = self.receivers.get(node)
        if receiver is None:
            return
        delay_us = self.scheduler.between(self.config.suspect_min_us, self.config.suspect_max_us)
        self.scheduler.after(delay_us, receiver.process, self._suspect_if_silent, node, peer)

    def _suspect_if_silent(self, node: int, peer: int) -> None:
        other = self.receivers.get(peer)
        frozen = other is not None and other.process.frozen_until_us > self.scheduler.now_us
        if frozen or (peer, node) in self._cut:
            self._suspect(node, peer)
            if frozen and other is not None:
                wait_us = other.process.frozen_until_us - self.scheduler.now_us
                self.scheduler.after(wait_us + 1000, None, self._trust, node, peer)

    def _suspect(self, node: int, peer: int) -> None:
        if (node, peer) in self._seen and (node, peer) not in self._suspected:
            self._suspected.add((node, peer))
            self.trace.add(f"node{node}", f"suspects {peer}")
            self.receivers[node].on_suspected(peer, True)

    def _trust_later(self, node: int, peer: int) -> None:
        self.scheduler.after(self.scheduler.between(0, 120_000), None, self._trust, node, peer)

    def _trust(self, node: int, peer: int) -> None:
        receiver = self.receivers.get(node)
        if receiver is None or (node, peer) not in self._suspected or (peer, node) in self._cut:
            return
        if receiver.process.frozen_until_us > self.scheduler.now_us:
            self._trust_later(node, peer)
            return
        other = self.receivers.get(peer)
        if other is not None and other.process.frozen_until_us > self.scheduler.now_us:
            wait_us = other.process.frozen_until_us - self.scheduler.now_us
            self.scheduler.after(wait_us + 1000, None, self._trust, node, peer)
            return
        self._suspected.discard((node, peer))
        self.trace.add(f"node{node}", f"trusts {peer}")
        receiver.on_suspected(peer, False)


class NodeTransport:
    """One node's `Transport`."""

    def __init__(self, network: Network, node: int, process: Process) -> None:
        self._network = network
        self._node = node
        self._process = process
        self.full = network.full_of(node)

    def send(self, node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
        """Hands a frame to the link."""
        if self._process.alive:
            self._network.send(self._node, node, frame, body)

    def is_connected(self, node: int) -> bool:
        """Linked and not suspected."""
        return self._network.is_connected(self._node, node)

    def backlog_bytes(self, node: int) -> int:
        """Not yet arrived."""
        return self._network.backlog_bytes(self._node, node)


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)
