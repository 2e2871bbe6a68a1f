"""The snapshot of a quorum queue: its state as plain values, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.queues.quorum.consumers import (
    CANCELLED,
    OUTCOMES_SINCE,
    QUIESCING,
    UP,
    Consumer,
    Consumers,
    QueueSession,
)
from convoymq.queues.sessions import Packed

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine

FORMAT = 3


def pack(machine: QuorumMachine) -> dict[str, object]:
    """Returns the state, equal for equal states."""
    backlog, consumers = machine.backlog, machine.consumers
    packed: dict[str, object] = {
        "format": FORMAT,
        "version": machine.version,
        "settings": dict(sorted(machine.settings.items())),
        "index": machine.index,
        "time_ms": machine.time_ms,
        "last_active_ms": consumers.last_active_ms,
        "fresh": backlog.fresh.pack(),
        "returned": backlog.returned.pack(),
        "sessions": [
            [
                s.id,
                s.seq,
                list(s.replies),
                [c.pack(machine.version) for c in s.consumers.values()],
                s.producer,
            ]
            for s in machine.sessions.values()
        ],
        "openings": machine._pack_openings(),
        "producers": machine._pack_producers(),
        "service": consumers.service_queue(),
        "waiting": [(c.session.id, c.number) for c in consumers.waiting],
        "down_nodes": [[node, *state] for node, state in machine.down_nodes.items()],
        "totals": [
            backlog.published,
            backlog.delivered,
            backlog.acked,
            backlog.returns,
            backlog.redelivered,
            backlog.purged,
            machine.duplicates,
        ],
        "dropped": dict(sorted(backlog.dropped.items())),
        "reservations": machine.reservations.pack(),
        "requeued": backlog.requeued.pack_tail(),
        "written": machine._pack_written(),
    }
    if machine.version >= 2:
        levels, beside = backlog.levels.pack(), backlog.beside
        packed["attributes"] = [levels, beside, backlog.refusing, machine.announced_due_ms]
        packed["order"] = [backlog.levels.restored.pack(), backlog.order.turn]
        if backlog.expiry is not None:
            packed["expiry"] = [backlog.expiry.swept_ms, backlog.expiry.wanted_ms]
        packed["groups"] = backlog.groups.pack()
        packed["dead_letters"] = machine.dead_letters.pack()
        remembered = machine.deduplication.pack()
        if remembered is not None:
            packed["deduplication"] = remembered
        if backlog.waiting.messages:
            packed["delayed"] = backlog.waiting.pack()
        packed["operations"] = machine.operations.pack()
    if machine.version >= OUTCOMES_SINCE:
        packed["notes"] = backlog.notes.pack()
        if machine.transactions.is_open:
            packed["transactions"] = machine.transactions.pack()
        if machine.links.is_used:
            packed["links"] = machine.links.pack()
    return packed


def unpack(machine: QuorumMachine, known: Packed) -> None:
    """Fills an empty machine that has the snapshot's settings."""
    backlog, consumers = machine.backlog, machine.consumers
    assert not machine.sessions, "a snapshot is restored over sessions"
    assert not backlog.published, "a snapshot is restored over messages"
    machine.index = known["index"]
    machine.time_ms = known["time_ms"]
    backlog.fresh.unpack(known["fresh"])
    backlog.returned.unpack(known["returned"])
    backlog.requeued.unpack_tail(known["requeued"])
    if machine.version >= 2:
        levels, backlog.beside, backlog.refusing, machine.announced_due_ms = known["attributes"]
        restored, backlog.order.turn = known["order"]
        backlog.levels.unpack(levels, restored)
        backlog.groups.unpack(*known["groups"])
        backlog.timed = backlog.may_expire()
        machine._follow_settings()
        if backlog.expiry is not None:
            backlog.expiry.swept_ms, backlog.expiry.wanted_ms = known["expiry"]
    for session_id, seq, replies, packed_consumers, producer in known["sessions"]:
        session = QueueSession(session_id)
        session.seq = seq
        session.producer = tuple(producer) if producer else None
        session.replies.extend((reply[0], reply[1], reply[2]) for reply in replies)
        machine.sessions[session_id] = session
        for packed in packed_consumers:
            consumer = Consumer(session, packed[0], packed[1])
            consumer.unpack(packed)
            session.consumers[consumer.number] = consumer
            backlog.hold(consumer.checked_out.messages, consumer.checked_out.size)
            _take_in(consumers, consumer)
    machine._unpack_openings(known["openings"])
    machine._unpack_producers(known["producers"])
    machine._unpack_written(known["written"])
    consumers.restore_queue(
        [machine.sessions[session].consumers[number] for session, number in known["service"]]
    )
    consumers.waiting = [machine.sessions[s].consumers[number] for s, number in known["waiting"]]
    machine.down_nodes = {node: [since, returned] for node, since, returned in known["down_nodes"]}
    (
        backlog.published,
        backlog.delivered,
        backlog.acked,
        backlog.returns,
        backlog.redelivered,
        backlog.purged,
        machine.duplicates,
    ) = known["totals"]
    backlog.dropped = known["dropped"]
    machine.reservations.unpack(known["reservations"])
    for reservation in machine.reservations.by_name.values():
        backlog.hold(reservation.held.messages, reservation.held.size)
    consumers.last_active_ms = known["last_active_ms"]
    if machine.version >= 2:
        machine.dead_letters.unpack(known["dead_letters"])
        if "deduplication" in known:
            machine.deduplication.unpack(known["deduplication"])
        if "delayed" in known:
            backlog.waiting.unpack(known["delayed"])
        machine.operations.unpack(known["operations"])
    if "notes" in known:
        backlog.notes.unpack(known["notes"])
    machine.links.unpack(*known.get("links", ((), (), ())))
    if "transactions" in known:
        machine.transactions.unpack(known["transactions"])
        for held in machine.transactions.held():
            backlog.hold(held.messages, held.size)


def _take_in(consumers: Consumers, consumer: Consumer) -> None:
    """Counts a consumer, and finds out whether it is the active one."""
    if consumer.state < CANCELLED:
        consumers.count += 1
    if consumers.single_active and (
        consumer.state in (UP, QUIESCING) or (consumers.strict and consumer.state == CANCELLED)
    ):
        assert consumers.active is None, "two consumers of a snapshot are active"
        consumers.active = consumer
