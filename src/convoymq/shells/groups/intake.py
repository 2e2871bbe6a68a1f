# cython: annotation_typing=False
"""Frames of other nodes for this node's groups: which replica or watched group takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from convoymq.kernels import link_frames
from convoymq.kernels.link_frames import frame, frame_header
from convoymq.model.errors import PeerError
from convoymq.replication.raft.types import Received
from convoymq.shells.groups.serving import LEADER_IS

if TYPE_CHECKING:
    from convoymq.shells.groups.host import ReplicaHost
    from convoymq.shells.groups.replica import Replica
    from convoymq.shells.watched import Watched

#: Frames kept for a group that is not created here yet: members learn of it at different times.
EARLY_FRAMES_MAX = 64
EARLY_GROUPS_MAX = 4096


class FrameIntake:
    """See the module text. A part of the host."""

    def __init__(self, host: ReplicaHost) -> None:
        self._host = host
        self._groups = host.groups
        self._watched = host.watched
        self._early: dict[int, list[tuple[int, bytes]]] = {}

    def take_early(self, group: int) -> None:
        """Takes the frames that came before this node's replica of a group."""
        for node, data in self._early.pop(group, ()):
            self.on_frame(node, data)

    def forget(self, group: int) -> None:
        """Drops the frames kept for a group."""
        self._early.pop(group, None)

    def on_frame(self, node: int, data: bytes) -> None:
        """Takes a link frame from another node. Malformed frames are noted and dropped."""
        try:
            self._take(node, data)
        except PeerError as error:
            self._host.note("raft.frame_malformed", node=node, error=error.text)

    def _take(self, node: int, data: bytes) -> None:
        _, kind, flags, group, a, b, c, d = frame_header(data)
        replica = self._groups.get(group)
        if replica is not None:
            if kind == link_frames.FRAME_APPEND:
                replica.on_append(node, data, a, b, c, d)
            elif kind == link_frames.FRAME_APPEND_REPLY:
                replica.on_append_reply(node, flags, a, b, c)
            elif kind == link_frames.FRAME_FORWARD:
                self._on_forward(replica, node, data, a)
            elif kind == link_frames.FRAME_COMMIT:
                replica.on_commit(node, a, d)
            elif kind == link_frames.FRAME_RAFT:
                self._on_raft(replica, node, data)
            else:
                replica.sink.on_link_frame(
                    node, kind, group, a, b, c, d, data[link_frames.HEADER_SIZE :]
                )
            return
        if kind == link_frames.FRAME_FORWARD:
            # Without a word the sender would take this node for the leader for ever.
            self.send_raft(node, group, (LEADER_IS, a, 0))
            return
        watched = self._watched.get(group)
        if watched is not None:
            if kind in (link_frames.FRAME_APPLIED, link_frames.FRAME_DELIVER):
                watched.sink.on_link_frame(
                    node, kind, group, a, b, c, d, data[link_frames.HEADER_SIZE :]
                )
            elif kind == link_frames.FRAME_RAFT:
                self._on_watched(watched, node, data)
            elif kind == link_frames.FRAME_APPEND:
                self._keep_early(group, node, data)
            return
        if group not in self._host.removed and kind in (
            link_frames.FRAME_APPEND,
            link_frames.FRAME_RAFT,
        ):
            self._keep_early(group, node, data)

    def on_frame_failed(self, data: bytes, error: Exception) -> None:
        """An error of our own in taking a frame: stops the replica that it was for."""
        group = frame_header(data)[3]
        item = self._groups.get(group) or self._watched.get(group)
        if item is None:
            raise error
        self._host.stop_failed(item, error)

    def _keep_early(self, group: int, node: int, data: bytes) -> None:
        if group in self._host.stopped:
            return
        kept = self._early.get(group)
        if kept is None:
            if len(self._early) >= EARLY_GROUPS_MAX:
                return
            kept = self._early[group] = []
        if len(kept) < EARLY_FRAMES_MAX:
            kept.append((node, data))

    def _on_forward(self, replica: Replica, node: int, data: bytes, term: int) -> None:
        """Takes commands that were sent to the leader of a term. A leader of another one drops
        them: its sender resends all that is pending once it knows this leader, and a copy may have
        been on its way for long."""
        if replica.is_leader:
            if term != replica.term:
                self._host.counters.forwards_stale += 1
                self._host.note(
                    "raft.forward_stale",
                    group=replica.group, node=node, term=replica.term, sent_in=term,
                )  # fmt: skip
                # A watcher learns the leader from this, a replica from the leader's own frames.
                self._tell_leader(replica, node)
                replica.sender.probe_member(node)
                return
            try:
                replica.builder.adopt(
                    data, link_frames.HEADER_SIZE, len(data), replica.versions.allowed
                )
                replica.has_forwarded = True
            except ValueError as error:
                self._host.note(
                    "raft.forward_malformed", group=replica.group, node=node, error=str(error)
                )
            return
        self._tell_leader(replica, node)
        replica.election_timer.campaign()

    def _tell_leader(self, replica: Replica, node: int) -> None:
        leader = replica.established_leader
        self.send_raft(node, replica.group, (LEADER_IS, replica.term, leader))

    def _decode(self, node: int, group: int, data: bytes) -> Received | None:
        try:
            message = msgspec.msgpack.decode(memoryview(data)[link_frames.HEADER_SIZE :])
        except msgspec.DecodeError as error:
            message = str(error)
        if (
            isinstance(message, list)
            and len(message) >= 2
            and isinstance(message[0], int)
            and isinstance(message[1], int)
        ):
            return message
        self._host.note("raft.message_malformed", group=group, node=node, error=repr(message)[:200])
        return None

    def _on_raft(self, replica: Replica, node: int, data: bytes) -> None:
        message = self._decode(node, replica.group, data)
        if message is None:
            return
        if message[0] == LEADER_IS and message[1] == 0:
            self._tell_leader(replica, node)
            if len(message) > 2 and message[2]:
                replica.election_timer.campaign()
            return
        replica.on_message(node, message)

    def _on_watched(self, watched: Watched, node: int, data: bytes) -> None:
        message = self._decode(node, watched.group, data)
        if message is None:
            return
        if message[0] != LEADER_IS or len(message) != 3:
            self._keep_early(watched.group, node, data)
            return
        watched.on_leader_is(node, message[1], message[2])

    def send_raft(self, node: int, group: int, message: tuple[int, ...]) -> None:
        """Sends a RAFT frame for a group without a replica that could."""
        body = msgspec.msgpack.encode(message)
        self._host.transport.send(node, frame(link_frames.FRAME_RAFT, 0, group, 0, 0, 0, 0, body))
