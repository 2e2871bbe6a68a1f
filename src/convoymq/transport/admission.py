"""Admission of nodes to links, and the refusal of others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoymq.transport.connections import Connection, ignore_frames
from convoymq.transport.handshake import (
    CODE_DUPLICATE,
    CODE_FORGOTTEN,
    CODE_NUMBER_IN_USE,
    CODE_OLDER,
    CODE_SELF,
    Handshake,
    Hello,
    LinkRefused,
    PeerHello,
    refusal,
)

if TYPE_CHECKING:
    from convoymq.transport.links import Links
    from convoymq.transport.peer import Peer

REJECTED_S = 5.0
"""A node that hears for so long only that its number is in use gives up."""
REFUSALS_MAX = 1000
REFUSED_OPEN_S = 0.2
"""Time that a connection stays open, so that its other end reads why it is refused."""


class Admission:
    """Handshakes of one node.

    Args:
        secrets: what all nodes of the cluster know; nodes that dial may know another one of them
            than the first.
    """

    def __init__(self, links: Links, secrets: Sequence[bytes]) -> None:
        self.links = links
        self.refusals: dict[str, str] = {}
        """Reason why a node was not accepted: told once."""
        self.secrets = secrets
        self._rejected_since = 0.0
        self._rejected_at = 0.0
        self._rejected_text = ""

    def give_up(self, now: float) -> None:
        """Says so when all that this node has heard for long is that its number is in use."""
        links = self.links
        rejected_s = max(REJECTED_S, 2 * links.config.suspect_max_ms / 1000)
        linked = any(peer.up for peer in links.peers.values()) or links.relay.nodes()
        if linked or now - self._rejected_at > rejected_s:
            self._rejected_since = 0.0
        elif self._rejected_since and now - self._rejected_since > rejected_s:
            self._rejected_since = 0.0
            links.events.on_rejected(self._rejected_text)

    def on_told(self, error: LinkRefused) -> None:
        """Another node refuses this one."""
        if error.code == CODE_NUMBER_IN_USE:
            self._rejected_at = time.monotonic()
            self._rejected_since = self._rejected_since or self._rejected_at
            self._rejected_text = error.text

    def judge(self, hello: PeerHello) -> None:
        """Refuses identities that cannot be true. Raises LinkRefused."""
        links = self.links
        node = hello.node
        if node == links.node_id:
            if hello.instance == links.instance:
                raise LinkRefused("this is the node itself", CODE_SELF)
            raise LinkRefused(f"two nodes say they are number {node}", CODE_DUPLICATE)
        if node in links.forgotten and hello.formed:
            raise LinkRefused(f"node {node} was removed from the cluster", CODE_FORGOTTEN)
        peer = links.peers.get(node)
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

    def _is_alive(self, peer: Peer) -> bool:
        """Returns whether the process that is linked under a number still runs and answers."""
        links = self.links
        if peer.watch is not None and peer.watch.is_gone():
            return False
        if peer.up:
            return not links.detector.is_suspected(peer.node)
        if links.relay.is_up(peer.node):
            return not links.relay.is_suspected(peer.node)
        # It may be about to be linked both ways.
        age_s = time.monotonic() - peer.half_since
        return bool(peer.half_since) and age_s * 1000 < links.config.suspect_max_ms

    def refuse(self, connection: Connection, error: LinkRefused, who: int | str | None) -> None:
        """Tells who is at the other end why it is not accepted, and closes."""
        links = self.links
        self.note(error, who)
        connection.writer.send(refusal(error.text, error.code))
        connection.flush()
        # The text must get through before the connection goes.
        links.pending.add(connection)

        def end(_reason: str = "") -> None:
            connection.close()
            links.pending.discard(connection)

        connection.on_frames, connection.on_lost = ignore_frames, end
        links.loop.call_later(REFUSED_OPEN_S, end)

    def note(self, error: LinkRefused, who: int | str | None) -> None:
        """Logs why a node is not accepted, once."""
        links = self.links
        key, text = str(who), error.text
        if self.refusals.get(key) != text:
            if len(self.refusals) > REFUSALS_MAX:
                self.refusals.clear()
            self.refusals[key] = text
            links.log.error("link.refused", peer=who, reason=text)

    def hello(self) -> Hello:
        """Returns what this node says of itself."""
        links = self.links
        return Hello(
            cluster=links.config.name,
            identity=links.identity,
            address=links.config.advertise or f"{links.address.host}:{links.address.port}",
            formed=links.formed,
            release=links.release,
            supports=links.supports,
            process=links.process,
            instance=links.instance,
        )

    def handshake(self, dialler: bool) -> Handshake:
        """Begins a handshake."""
        links = self.links
        return Handshake(
            dialler,
            self.secrets,
            self.hello(),
            lambda: [peer.address for peer in links.peers.values() if peer.address],
        )
