"""Builds logs of quorum queue commands for the tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from convoymq.kernels import batch
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_DELIVER


def session_id(node: int, counter: int = 1, incarnation: int = 1) -> int:
    """A session as in docs/formats/entries-and-frames.md."""
    return node << 56 | incarnation << 24 | counter


def with_attributes(
    size: int, priority: int | None, expiration: str | None, message_id: bytes | None = None
) -> tuple[bytes, int]:
    """A record as the edge hands it over, and the flags of its ENQUEUE."""
    properties = b"" if priority is None else bytes([priority])
    if expiration is not None:
        properties += bytes([len(expiration)]) + expiration.encode()
    if message_id is not None:
        properties += bytes([len(message_id)]) + message_id
    bits = (priority is not None) << 11 | (expiration is not None) << 8
    bits |= (message_id is not None) << 7
    payload = b"\x00\x3c\x00\x00" + size.to_bytes(8, "big") + bits.to_bytes(2, "big") + properties
    header = b"\x02\x00\x01" + len(payload).to_bytes(4, "big") + payload + b"\xce"
    body = b"\x03\x00\x01" + size.to_bytes(4, "big") + bytes(size) + b"\xce"
    flags = (priority is not None) << 1 | (expiration is not None) << 2
    return b"\x00\x01q" + header + body, flags


class Log:
    """A growing list of entries; sessions open and number their commands by themselves."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.builder = batch.CommandBuilder()
        self.targets: dict[int, batch.PublishTarget] = {}
        self.openings: dict[int, int] = {}
        self.time_ms = 1_000_000
        self.term = 1

    def _target(self, session: int) -> batch.PublishTarget:
        if session not in self.targets:
            target = self.targets[session] = batch.PublishTarget(self.builder, session, None)
            life = session >> 24
            self.openings[session] = sum(s >> 24 == life for s in self.openings) + 1
            target.command(batch.CMD_SESSION_OPEN, 0, self.openings[session], 0)
        return self.targets[session]

    def publish(self, session: int, sizes: Iterable[int]) -> None:
        """One ENQUEUE per run of this session's publishes between other commands."""
        for size in sizes:
            self._target(session).publish([b"\0\1q", b"h", bytes(size)], size, 0)

    def publish_as(
        self,
        session: int,
        size: int,
        priority: int | None = None,
        expiration: str | None = None,
        message_id: bytes | None = None,
    ) -> None:
        """A message with a priority, an expiration or a message-id."""
        record, flags = with_attributes(size, priority, expiration, message_id)
        self._target(session).publish([record], size, 0, flags)

    def configure(self, **changed: int) -> None:
        """CONFIG."""
        body = msgspec.msgpack.encode(changed)
        self.builder.add(batch.CMD_CONFIG, 0, 0, 0, len(body), 0, body)

    def command(
        self,
        session: int,
        type: int,
        arg: int = 0,
        flags: int = 0,
        count: int = 0,
        body: bytes = b"",
    ) -> None:
        """Any other command of a session."""
        self._target(session).command(type, flags, count, arg, body)

    def checkout(self, session: int, number: int, prefetch: int = 10, **spec: Any) -> None:
        spec = {"prefetch": prefetch, "no_ack": False, "tag": f"c{number}", **spec}
        self.command(session, batch.CMD_CHECKOUT, number, body=msgspec.msgpack.encode(spec))

    def cancel(self, session: int, number: int) -> None:
        self.command(session, batch.CMD_CANCEL, number)

    def credit(self, session: int, number: int, credit: int) -> None:
        body = msgspec.msgpack.encode({"credit": credit})
        self.command(session, batch.CMD_CREDIT, number, body=body)

    def ranges(
        self, session: int, type: int, number: int, ranges: list[int], flags: int = 0
    ) -> None:
        body = batch.pack_ranges(ranges)
        self.command(session, type, number, flags, len(ranges) // 2, body)

    def settle(self, session: int, number: int, *ranges: int) -> None:
        self.ranges(session, batch.CMD_SETTLE, number, list(ranges))

    def return_(self, session: int, number: int, *ranges: int, failed: bool = False) -> None:
        self.ranges(session, batch.CMD_RETURN, number, list(ranges), int(failed))

    def discard(self, session: int, number: int, *ranges: int) -> None:
        self.ranges(session, batch.CMD_DISCARD, number, list(ranges))

    def get(self, session: int, *, settled: bool = False) -> None:
        self.command(session, batch.CMD_GET, flags=int(settled))

    def reservation(self, session: int, op: str, reservation: str = "s", **fields: Any) -> None:
        body = msgspec.msgpack.encode({"op": op, "reservation": reservation, **fields})
        self.command(session, batch.CMD_RESERVATION, count=len(body), body=body)

    def close(self, session: int) -> None:
        self._target(session)
        self.command(session, batch.CMD_SESSION_CLOSE, count=self.openings[session])

    def leader(self, type: int, arg: int = 0, flags: int = 0, body: bytes = b"") -> None:
        """A command from the leader itself."""
        self.builder.add(type, flags, 0, 0, 0, arg, body)

    def session_down(self, session: int) -> None:
        self.leader(batch.CMD_SESSION_DOWN, body=session.to_bytes(8, "little"))

    def node_down(self, node: int, *, gone: bool = False) -> None:
        self.leader(batch.CMD_NODE_DOWN, node, int(gone))

    def node_up(self, node: int, incarnation: int = 1) -> None:
        self.leader(batch.CMD_NODE_UP, node, body=incarnation.to_bytes(8, "little"))

    def seal(self, after_ms: int = 1) -> Any:
        """Closes the open commands as the next entry."""
        self.time_ms += after_ms
        index = len(self.entries) + 1
        entry = self.builder.take_entry(7, index, self.term, self.time_ms)
        self.entries.append(entry)
        return entry


def apply(machine: Any, entry: Any) -> list[Any]:
    """Applies an entry and returns its effects."""
    machine.apply(entry.index, entry.time_ms, entry.data)
    effects = list(machine.effects)
    machine.effects.clear()
    return effects


def expand(runs: Iterable[Any]) -> list[tuple[int, int, int]]:
    """(index, offset, record) of every message of some runs."""
    return [(r[0], r[1], r[2] + k) for r in runs for k in range(r[3])]


def deliveries(effects: Iterable[Any], session: int, consumer: int) -> list[tuple[int, int]]:
    """(message id, entry index) of every message that the effects hand to a consumer."""
    return [
        (effect[3] + k, effect[4])
        for effect in effects
        if effect[0] == EFFECT_DELIVER and effect[1] == session and effect[2] == consumer
        for k in range(effect[7])
    ]


class Queue:
    """A machine and its log."""

    def __init__(self, **settings: Any) -> None:
        self.machine = QuorumMachine(settings)
        self.log = Log()

    def step(self, after_ms: int = 1) -> list[Any]:
        effects = apply(self.machine, self.log.seal(after_ms))
        check_invariants(self.machine)
        return effects

    def status(self) -> dict[int, str]:
        return {c["session"]: c["activity_status"] for c in self.machine.consumers.infos()}


A, B, C = session_id(1), session_id(2), session_id(3)


def replies(effects: list[Any], session: int) -> list[tuple[int, int, Any]]:
    """Answers to a session's commands, without that to OPEN."""
    return [e[2:] for e in effects if e[0] == EFFECT_APPLIED and e[1] == session and e[2] > 1]


def places(queue: Queue, effects: list[Any], session: int) -> list[int]:
    """Entries of what a consumer gets."""
    return [index for _, index in deliveries(effects, session, 1)]


def single() -> Queue:
    return Queue(single_active=True)


def in_turn(queue: Queue) -> None:
    """Two consumers with prefetch 1; the first has the first of two messages."""
    queue.log.checkout(A, 1, 1)
    queue.log.checkout(B, 1, 1)
    queue.log.publish(C, [1])
    queue.log.publish(C, [1])
    queue.step()
    assert queue.machine.backlog.unacked == 1


def second(**settings: Any) -> Queue:
    """A queue of version 2 with these settings."""
    queue = Queue()
    queue.machine.set_version(2)
    if settings:
        queue.log.configure(**settings)
        queue.step()
    return queue


def restored(queue: Queue) -> None:
    """From now on a copy that began with a snapshot."""
    copy = QuorumMachine()
    copy.restore(queue.machine.snapshot())
    assert copy.snapshot() == queue.machine.snapshot()
    assert copy.state_hash() == queue.machine.state_hash()
    queue.machine = copy
