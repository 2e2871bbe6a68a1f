# cython: annotation_typing=False
"""Common part of the machines of replicated queues, beside their sessions.

A machine is made of parts (`quorum.backlog`, `quorum.consumers`, …). They see it as a
`GroupMachine`: the entry that is being applied, the effects, the sessions, the trace.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

from convoymq.kernels import batch
from convoymq.kernels.trace import TraceRows
from convoymq.model.errors import UnknownCommand
from convoymq.queues.sessions import APPLIED_OK, Packed, Session, SessionTable, first_u64
from convoymq.replication import versions as supported
from convoymq.replication.machine import EFFECT_APPLIED, FLAG_NODE_GONE, Effect

Settings = dict[str, int]
"""Settings that all replicas of a queue agree on, by name; in every snapshot."""


class GroupMachine(SessionTable):
    """Base of the machines of quorum queues and streams."""

    KIND = ""
    VERSION = 1
    OLDEST_VERSION = 1
    SNAPSHOT_FORMAT = 0

    def __init__(self, settings: Settings) -> None:
        self.effects: list[Effect] = []
        #: Rows of this replica, or None. They hear what is decided and decide nothing.
        self.trace: TraceRows | None = None
        self.version = 1
        self.settings = settings
        self._clear()

    def _clear(self) -> None:
        """Begins anew, as an empty queue with these settings."""
        self.index = 0
        self.time_ms = 0
        self._clear_sessions()
        #: Suspected node -> [time of NODE_DOWN in ms, 1 when its messages have been returned]
        self.down_nodes: dict[int, list[int]] = {}

    # ---------------------------------------------------------- the leader's commands

    def _leader_command(
        self, kind: int, flags: int, count: int, arg: int, data: bytes, offset: int
    ) -> None:
        if kind == batch.CMD_TICK:
            self._tick()
        elif kind == batch.CMD_SESSION_DOWN:
            session = self.sessions.get(first_u64(data, offset))
            if session is not None:
                self._end_sessions((session,), failed=True)
        elif kind == batch.CMD_NODE_DOWN:
            self._node_down(arg, flags & FLAG_NODE_GONE != 0)
        elif kind == batch.CMD_NODE_UP:
            self._node_up(arg, first_u64(data, offset))
        else:
            raise UnknownCommand(f"a command of type {kind} is not known")

    def _tick(self) -> None:
        """Does what time asks for."""
        raise NotImplementedError

    def _end_sessions(self, sessions: Iterable[Any], *, failed: bool) -> None:
        """Removes sessions; `failed`: their clients are lost."""
        raise NotImplementedError

    def _node_down(self, node: int, gone: bool) -> None:
        """A node is suspected, or known to be `gone`."""
        raise NotImplementedError

    def _node_up(self, node: int, incarnation: int) -> None:
        """A node is heard of again; sessions of older incarnations end."""
        raise NotImplementedError

    def _older_sessions(self, node: int, incarnation: int) -> list[Any]:
        """Sessions of a node's former processes."""
        return [
            session
            for session in self._sessions_of(node)
            if (session.id >> 24) & 0xFFFFFFFF < incarnation
        ]

    # ---------------------------------------------------------- versions

    @property
    def configurable(self) -> bool:
        """Returns whether CONFIG changes the settings, in the version in force."""
        return False

    def knows_setting(self, name: str) -> bool:
        """Returns whether CONFIG may have a setting, in the version in force."""
        return self.configurable

    def set_version(self, version: int) -> None:
        """Carries out a `machine version` entry. Raises UnsupportedVersion."""
        self.version = supported.check_version(self, version)

    # ---------------------------------------------------------- answers again

    def resend(self, session_node: int) -> None:
        """Appends what brings the clients of a node up to date (Machine.resend)."""
        for session in self._sessions_of(session_node):
            self._resend_answers(session)

    def _resend_answers(self, session: Session) -> None:
        """Appends what a session was answered last."""
        for seq, status, reply in session.replies:
            self.effects.append((EFFECT_APPLIED, session.id, seq, status, reply))
        self.effects.append((EFFECT_APPLIED, session.id, session.seq, APPLIED_OK, None))

    # ---------------------------------------------------------- snapshots

    def _pack(self) -> dict[str, object]:
        """Returns the state as plain values, in the order in which the snapshot has them."""
        raise NotImplementedError

    def _restore(self, known: Packed) -> None:
        """Replaces the state by what `_pack` gave."""
        raise NotImplementedError

    def snapshot(self) -> bytes:
        """Returns the state as msgpack of plain values and packed words; equal for equal states."""
        return msgspec.msgpack.encode(self._pack())

    def restore(self, state: bytes) -> None:
        """Replaces the state. Raises ValueError for what is no snapshot of a known format."""
        try:
            known = msgspec.msgpack.decode(state)
            if known["format"] != self.SNAPSHOT_FORMAT:
                raise ValueError(f"snapshot format {known['format']} is not known")
            trace, self.trace = self.trace, None
            try:
                self._restore(known)
            finally:
                self.trace = trace
            if trace is not None:
                trace.restored(self.index)
        except (KeyError, TypeError, msgspec.DecodeError) as error:
            raise ValueError(f"damaged snapshot of a {self.KIND} queue: {error!r}") from error

    def state_hash(self) -> int:
        """Equal on replicas that applied the same index."""
        return zlib.crc32(self.snapshot())
