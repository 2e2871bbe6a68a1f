"""Relayed links in the simulated network: the real `transport.relay.RelayTable` on simulated links.

`RelayedLinks` stands between the network and a process of a node, where `Links` does in production.
`RelayBook` watches all of them from outside:

- in one session between up and down, a node gets the frames that the other end sent in one of its
  own sessions, from the first one on, in order, each once, urgent and bulk ones apart;
- no session is received twice, and none after a later one;
- a node that is cut off from another one, while a third is linked to both, reaches it within
  `REACHED_US`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from convoymq.kernels.link_frames import (
    FRAME_HEARTBEAT,
    FRAME_RELAY,
    HEADER_SIZE,
    frame,
    frame_header,
)
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.transport import relay
from convoymq.transport.frame_kinds import is_urgent
from convoymq.transport.links import FLAG_NEIGHBOURS

if TYPE_CHECKING:
    from convoymq.sim.group_node import GroupNode
    from convoymq.sim.group_world import GroupWorld
    from convoymq.sim.network import Network, Receiver

TICK_US = 100_000
WAIT_MS = 200
"""Shorter than in production, for cuts that are shorter, too."""
REACHED_US = 3_000_000
"""A silent link is suspected after 1 s at most."""
SESSIONS_KEPT = 8

RelaySession = tuple[list[int], list[int]]
"""CRCs of bulk and urgent frames, in order."""

Path = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Node that relays, the connections on the way, and the incarnations of the nodes."""


class RelayBook:
    """Record of all relayed links of a world."""

    def __init__(self, world: GroupWorld) -> None:
        self._world = world
        self._sent: dict[tuple[int, int], list[tuple[int, RelaySession]]] = {}
        """(from, to) -> the last sessions, with their numbers."""
        self._sessions = 0
        self._open: dict[tuple[int, int], tuple[list[tuple[int, RelaySession]], list[int]]] = {}
        """(at, from) -> sessions that the present one may be, and frames of it so far."""
        self._received: dict[tuple[int, int], int] = {}
        """(at, from) -> number of the last session of which something came."""
        self._cut_since: dict[tuple[int, int], tuple[int, Path]] = {}
        """(a, b) -> since when they could be relayed and are not, and by which links."""
        world.scheduler.after(TICK_US, None, self._look)

    def on_up(self, node: int, peer: int) -> None:
        """A node has begun to reach another one."""
        self._world.trace.faults["relayed"] += 1
        self._sessions += 1
        kept = self._sent.setdefault((node, peer), [])
        kept.append((self._sessions, ([], [])))
        del kept[:-SESSIONS_KEPT]
        self._open.pop((node, peer), None)

    def on_sent(self, node: int, peer: int, data: bytes) -> None:
        """A frame is wrapped."""
        self._sent[node, peer][-1][1][is_urgent(data)].append(zlib.crc32(data))

    def on_received(self, node: int, peer: int, data: bytes) -> None:
        """A frame is unwrapped."""
        last = self._received.get((node, peer), 0)
        found = self._open.get((node, peer))
        if found is None:
            found = [each for each in self._sent.get((peer, node), ()) if each[0] > last], [0, 0]
        able, counts = found
        urgent, crc = is_urgent(data), zlib.crc32(data)
        at = counts[urgent]
        able = [each for each in able if each[1][urgent][at : at + 1] == [crc]]
        if not able:
            raise InvariantBroken(
                f"node {node} gets {'urgent' if urgent else 'bulk'} frame {at + 1} of node {peer}"
                " through a relay: that is not what was sent next"
            )
        counts[urgent] += 1
        self._open[node, peer] = able, counts

    def on_down(self, node: int, peer: int) -> None:
        """A node does not reach another one any more."""
        found = self._open.pop((node, peer), None)
        if found is not None:
            self._received[node, peer] = found[0][0][0]

    def _look(self) -> None:
        """Checks that nodes have a relayed link where one is possible."""
        world = self._world
        world.scheduler.after(TICK_US, None, self._look)
        network, now_us = world.network, world.scheduler.now_us
        running = sorted(network.receivers)
        since: dict[tuple[int, int], tuple[int, Path]] = {}
        for a in running:
            for b in running:
                if a == b or not (network.is_cut(a, b) and network.is_cut(b, a)):
                    continue
                by = next((how for c in running if (how := self._path(a, c, b))), None)
                if by is None or not network.may_link(a, b):
                    continue
                end = network.receivers[a]
                assert isinstance(end, RelayedLinks)
                if end.is_connected(b):
                    # Who relayed may be lost any time: only from then on another one is due.
                    continue
                began, path = self._cut_since.get((a, b), (now_us, by))
                if path != by:
                    began = now_us
                since[a, b] = (began, by)
                if now_us - began > REACHED_US:
                    raise InvariantBroken(
                        f"node {a} cannot reach node {b}, and {by[0]} is linked to both"
                    )
        self._cut_since = since

    def _path(self, a: int, c: int, b: int) -> Path | None:
        """Returns the links from a to b through c, where they stand and nobody is doubted; None."""
        network = self._world.network
        if c in (a, b):
            return None
        connections = []
        for one, other in ((a, c), (c, a), (c, b), (b, c)):
            if network.is_cut(one, other) or not network.is_connected(one, other):
                return None
            connections.append(network.connection_of(one, other))
        if any(network.is_frozen(n) for n in (a, b, c)):
            return None
        return c, tuple(connections), tuple(network.receivers[n].incarnation for n in (a, b, c))


class RelayedLinks:
    """One process of a node at the network: links, and nodes that others relay to."""

    def __init__(self, node: GroupNode, network: Network, book: RelayBook) -> None:
        self.node = node
        self.process = node.process
        self._network = network
        self._book = book
        self._direct: set[int] = set()
        self.full = network.full_of(node.number)
        """Nodes that take no bulk for now. What is relayed is not held back here."""
        number = node.number
        scheduler = node.world.scheduler
        self.table = relay.RelayTable(
            number,
            scheduler.between(1, (1 << 31) - 1_000_000),
            node.say,
            node.judge,
            lambda peer: network.backlog_bytes(number, peer),
            wait_ms=WAIT_MS,
        )
        scheduler.after(scheduler.between(0, TICK_US), self.process, self._tick)

    @property
    def incarnation(self) -> int:
        """Of the node."""
        return self.node.incarnation

    def may_link(self, peer: Receiver) -> bool:
        """Returns whether HELLO with another running node ends well."""
        assert isinstance(peer, RelayedLinks)
        return self.node.may_link(peer.node)

    def _now_ms(self) -> int:
        return self.node.clock.monotonic_ms()

    def _tick(self) -> None:
        self.node.world.scheduler.after(TICK_US, self.process, self._tick)
        self._perform(self.table.tick(self._now_ms()))

    def forget(self, peer: int) -> None:
        """Ends the relaying to a node; it may begin anew."""
        self._perform(self.table.forget(peer))

    def forget_all(self) -> None:
        """Forgets all relayed links, because what this node says of itself has changed."""
        for peer in self.table.nodes():
            self.forget(peer)

    # What the network says.

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A direct link stands."""
        self._direct.add(peer)
        self._perform(self.table.linked(peer, incarnation, self._now_ms()))
        self.node.on_link_up(peer, incarnation)

    def on_link_down(self, peer: int, definite: bool) -> None:
        """A direct link is gone, or the peer's process is known to be."""
        if peer not in self._direct:
            # Nobody looks for the process of a node that answers through another one.
            if not self.table.is_up(peer):
                self.node.on_link_down(peer, definite)
            return
        self._direct.discard(peer)
        self.node.on_link_down(peer, definite)
        self._perform(self.table.unlinked(peer, self._now_ms()))

    def on_suspected(self, peer: int, suspected: bool) -> None:
        """The detector's verdict about a direct link."""
        self.node.on_suspected(peer, suspected)
        self._perform(self.table.suspected(peer, suspected, self._now_ms()))

    def on_room(self, peer: int) -> None:
        """A direct link takes bulk again."""
        self.node.on_room(peer)

    def on_frame(self, peer: int, data: bytes) -> None:
        """A frame arrived on a direct link."""
        kind = data[4]
        if kind == FRAME_RELAY:
            self._perform(self.table.on_frame(peer, data, self._now_ms()))
        elif kind == FRAME_HEARTBEAT:
            told = msgspec.msgpack.decode(data[HEADER_SIZE:])
            self._perform(self.table.heard(peer, told, self._now_ms()))
        else:
            self.node.on_frame(peer, data)

    def _perform(self, outputs: list[relay.Output]) -> None:
        number, network, node = self.node.number, self._network, self.node
        for output in outputs:
            if isinstance(output, relay.Deliver):
                self._book.on_received(number, output.node, output.data)
                node.on_frame(output.node, output.data)
            elif isinstance(output, relay.Send):
                network.send(number, output.to, output.data, ())
            elif isinstance(output, relay.Announce):
                told = msgspec.msgpack.encode(self.table.neighbours())
                data = frame(FRAME_HEARTBEAT, FLAG_NEIGHBOURS, 0, 0, 0, 0, 0, told)
                for peer in sorted(self._direct):
                    network.send(number, peer, data, ())
            elif isinstance(output, relay.Up):
                node.world.trace.add(node.name, f"reaches {output.node} through another")
                self._book.on_up(number, output.node)
                node.on_relayed(output.node, output.incarnation, output.hello)
            elif isinstance(output, relay.Down):
                node.world.trace.add(node.name, f"does not reach {output.node} any more")
                self._book.on_down(number, output.node)
                node.on_link_down(output.node, False)
            elif isinstance(output, relay.Suspect):
                node.on_suspected(output.node, True)
            elif isinstance(output, relay.Unsuspect):
                node.on_suspected(output.node, False)
            else:
                network.break_link(number, output.node)

    # The node's `Transport`.

    def send(self, node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
        """Hands a frame to a link."""
        if not self.process.alive:
            return
        number = self.node.number
        if node in self._direct:
            self._network.send(number, node, frame, body)
            return
        data = b"".join((frame, *body)) if body else bytes(frame)
        wrapped = self.table.wrap(node, len(data), is_urgent(data))
        if wrapped is None:
            return
        self._book.on_sent(number, node, data)
        if self._network.on_frame_sent is not None:
            self._network.on_frame_sent(number, node, data)
        self._network.send(number, wrapped[0], wrapped[1], (data,))

    def is_connected(self, node: int) -> bool:
        """Linked or relayed, and not suspected."""
        if node in self._direct:
            return self._network.is_connected(self.node.number, node)
        return self.table.is_up(node) and not self.table.is_suspected(node)

    def backlog_bytes(self, node: int) -> int:
        """Not yet arrived, where it goes."""
        to = node if node in self._direct else self.table.hop_of(node)
        return self._network.backlog_bytes(self.node.number, to)


def is_urgent_frame(data: bytes) -> bool:
    """Returns whether a frame may overtake bulk; RELAY has the priority of its content."""
    if data[4] == FRAME_RELAY:
        return bool(frame_header(data)[2] & relay.FLAG_URGENT)
    return is_urgent(data)
