"""A replicated counter: ADD raises it, each command counts once however often it is sent."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec

from convoymq.kernels.batch import CMD_NODE_DOWN, CMD_NODE_UP, CMD_TICK, commands
from convoymq.model.errors import UnknownCommand
from convoymq.replication import versions as supported
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_GAP, NEVER, Effect

CMD_ADD = 200
_OF_THE_LEADER = (CMD_NODE_DOWN, CMD_NODE_UP, CMD_TICK)


class CounterMachine:
    """See the module text. Implements `Machine`."""

    KIND = "counter"
    VERSION = OLDEST_VERSION = 1

    def __init__(self) -> None:
        self.version = 1
        self.time_ms = 0
        self.effects: list[Effect] = []
        self.total = 0
        self.sessions: dict[int, int] = {}
        """Session -> the last command of it that counted."""

    def set_version(self, version: int) -> None:
        self.version = supported.check_version(self, version)

    def command_types(self, version: int) -> bytes:
        return supported.command_table((CMD_ADD,))

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        self.time_ms = max(self.time_ms, time_ms)
        for kind, _, session, seq, _, arg, _, _ in commands(data):
            if kind == CMD_ADD:
                self._add(session, seq, arg)
            elif kind not in _OF_THE_LEADER:
                raise UnknownCommand(f"entry {index} has a command of type {kind}")

    def _add(self, session: int, seq: int, amount: int) -> None:
        last = self.sessions.get(session, 0)
        if seq > last + 1:
            self.effects.append((EFFECT_GAP, session, last))
            return
        if seq == last + 1:
            self.total += amount
            self.sessions[session] = seq
        self.effects.append((EFFECT_APPLIED, session, self.sessions[session], 0, b""))

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(
            [self.version, self.time_ms, self.total, sorted(self.sessions.items())]
        )

    def restore(self, state: bytes) -> None:
        version, self.time_ms, self.total, sessions = msgspec.msgpack.decode(state)
        self.set_version(version)
        self.sessions = dict(sessions)

    def resend(self, session_node: int) -> None:
        for session, seq in self.sessions.items():
            if session >> 56 == session_node:
                self.effects.append((EFFECT_APPLIED, session, seq, 0, b""))

    def live_ranges(self) -> Iterable[tuple[int, int]]:
        return ()

    def oldest_live(self) -> int:
        return NEVER

    def session_nodes(self) -> frozenset[int]:
        return frozenset(session >> 56 for session in self.sessions)

    def next_due_ms(self) -> int | None:
        return None

    def at_rest(self) -> bool:
        return True

    def state_hash(self) -> int:
        return zlib.crc32(self.snapshot())


supported.register(CounterMachine)
