"""Views of a quorum queue's machine: metrics, and its content for the trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.queues.quorum import runs
from convoymq.queues.quorum.backlog import EXPIRED, OVER_LENGTH
from convoymq.queues.quorum.levels import LEVEL_DEFAULT
from convoymq.queues.quorum.tracing import reservation_session

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine

Place = tuple[int | None, int, int, runs.Run]
"""(session or None, consumer number, first message id, run)"""


def totals(machine: QuorumMachine) -> dict[str, int]:
    """Counters and gauges for metrics."""
    backlog = machine.backlog
    made = {
        "ready": backlog.stored(),
        "blocked": backlog.groups.messages,
        "unacked": backlog.unacked,
        "ready_bytes": backlog.stored_bytes(),
        "unacked_bytes": backlog.unacked_bytes,
        "returned_ready": (
            backlog.returned.messages
            + backlog.requeued.messages
            + backlog.levels.restored.again
            + backlog.notes.avoided.messages
        ),
        "consumers": machine.consumers.count,
        "published": backlog.published,
        "delivered": backlog.delivered,
        "acked": backlog.acked,
        "returned": backlog.returns,
        "redelivered": backlog.redelivered,
        "purged": backlog.purged,
        "duplicates": machine.duplicates,
        "deduplicated": machine.deduplication.repeats,
        "delayed": backlog.waiting.messages,
        "delayed_bytes": backlog.waiting.size,
        "dlx": machine.dead_letters.held.messages,
        "dlx_bytes": machine.dead_letters.held.size,
    }
    for reason in (EXPIRED, OVER_LENGTH, *backlog.dropped):
        made["dropped_" + reason] = backlog.dropped.get(reason, 0)
    return made


def info(machine: QuorumMachine) -> dict[str, object]:
    """Returns the fields of the management API that a replica knows."""
    backlog, ids = machine.backlog, machine.deduplication
    ready, unacked = backlog.stored(), backlog.unacked
    ready_bytes, unacked_bytes = backlog.stored_bytes(), backlog.unacked_bytes
    memory = machine.memory_bytes()
    return {
        "messages_ready": ready,
        "messages_unacknowledged": unacked,
        "messages": ready + unacked,
        "message_bytes_ready": ready_bytes,
        "message_bytes_unacknowledged": unacked_bytes,
        "message_bytes": ready_bytes + unacked_bytes,
        "consumers": machine.consumers.count,
        "consumer_details": machine.consumers.infos() + machine.reservations.infos(),
        "memory": memory,
        "index_bytes": memory,
        "messages_by_priority": messages_by_priority(machine),
        "delivery_limit": backlog.delivery_limit,
        "single_active": machine.consumers.single_active,
        "messages_dlx": machine.dead_letters.held.messages,
        "message_bytes_dlx": machine.dead_letters.held.size,
        "messages_deduplicated": ids.repeats,
        "deduplication_ids": ids.count(),
        "deduplication_bytes": ids.memory_bytes(),
        "messages_delayed": machine.waiting.messages,
        "message_bytes_delayed": machine.waiting.size,
        "messages_blocked": backlog.groups.messages,
        "message_bytes_blocked": backlog.groups.size,
        "totals": totals(machine),
    }


def figures(machine: QuorumMachine) -> tuple[int, ...]:
    """Returns the numbers `queues.interface.FIGURES`."""
    backlog = machine.backlog
    return (
        backlog.stored(), backlog.unacked, backlog.stored_bytes(), backlog.unacked_bytes,
        machine.consumers.count, machine.memory_bytes(), backlog.published, backlog.delivered,
        backlog.acked, backlog.redelivered,
    )  # fmt: skip


def messages_by_priority(machine: QuorumMachine) -> dict[str, int]:
    """Returns the ready messages by priority level, without those that came back to the head."""
    backlog = machine.backlog
    made = {level: backlog.levels.count(level) for level in backlog.levels.with_messages()}
    plain = backlog.fresh.messages + backlog.requeued.messages
    if plain:
        made[LEVEL_DEFAULT] = made.get(LEVEL_DEFAULT, 0) + plain
    return {str(level): made[level] for level in sorted(made)}


def state_snapshot(machine: QuorumMachine) -> list[Place]:
    """Everything in the queue: what is ready or waits first (session None), then what is checked
    out. A reservation or operation counts as session `reservation_session(name)`. Cost: O(runs)."""
    made: list[Place] = [(None, 0, 0, run) for run in machine.backlog.ready_runs()]
    made += [(None, 0, 0, run) for run in machine.backlog.waiting.runs()]
    for consumer in [*machine.consumers.all(), *machine.links.kept()]:
        made += [
            (consumer.session.id, consumer.number, message_id, run)
            for message_id, run in consumer.checked_out.held()
        ]
    for reservation in machine.reservations.by_name.values():
        owner = reservation_session(reservation.name)
        made += [(owner, 0, message_id, run) for message_id, run in reservation.held.held()]
    for operation in machine.operations.by_id.values():
        owner = reservation_session(operation.name)
        made += [(owner, 0, offset, run) for offset, run in operation.held.held()]
    for transaction in machine.transactions.prepared.values():
        for number, holder in transaction.holders.items():
            made += [
                (transaction.session, number, message_id, run)
                for message_id, run in holder.checked_out.held()
            ]
    return made
