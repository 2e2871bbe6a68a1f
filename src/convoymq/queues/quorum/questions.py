"""Ops of RESERVATION in a quorum queue: those on reservations, and questions of other kinds, each
answered with a map, or refused with a reason.

| op                               | since version |                                    |
|----------------------------------|---------------|------------------------------------|
| of `queues.reservations`         | 1             |                                    |
| delete_check                     | 2             | may the queue be deleted?          |
| cancel_scheduled                 | 2             | see `Delayed.cancel`               |
| of `quorum.operations`           | 2             |                                    |
| renew                            | 4             | the queue's lease begins anew      |
| of `queues.transactions`         | 6             |                                    |
| claim_link                       | 6             | see `Links.claim`                  |
| pick                             | 6             | see `filtering.pick`               |

A version that does not know an op refuses it as malformed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.queues import transactions
from convoymq.queues.link_claims import CLAIM
from convoymq.queues.quorum import filtering, operations
from convoymq.queues.quorum.consumers import OUTCOMES_SINCE, QueueSession
from convoymq.queues.quorum.delayed import BAD_CANCEL, CANCEL_SCHEDULED
from convoymq.queues.reservations import MALFORMED
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED, Packed, decode_map
from convoymq.replication.machine import EFFECT_TIMER

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine

DELETE_CHECK = "delete_check"
RENEW = "renew"
"""The time begins anew after which the queue goes when nobody uses it."""
EXPIRED_UNUSED = "expired"
"""The answer to RENEW that comes too late."""
RENEW_SINCE = 4
"""Version of the machine that brought RENEW."""
IN_USE = "in_use"
NOT_EMPTY = "not_empty"


def answer(machine: QuorumMachine, session: QueueSession, body: bytes, length: int) -> None:
    """Carries out one op."""
    try:
        op = decode_map(body, length)
    except ValueError:
        machine._reply(session, APPLIED_REJECTED, MALFORMED)
        return
    reason, reply = _apply(machine, session, op)
    if reason is not None:
        machine._reply(session, APPLIED_REJECTED, reason)
        return
    machine._reply(session, APPLIED_OK, reply)
    if op.get("op") in ("open", "lease"):
        reservation = machine.reservations.by_name.get(op["reservation"])
        if reservation is not None:
            machine.effects.append((EFFECT_TIMER, reservation.due_ms))


def _apply(machine: QuorumMachine, session: QueueSession, op: Packed) -> tuple[str | None, object]:
    kind, version = op.get("op"), machine.version
    if version >= 2 and kind == DELETE_CHECK:
        return _check_delete(machine, op)
    if version >= RENEW_SINCE and kind == RENEW:
        return _renew(machine)
    if version >= 2 and kind == CANCEL_SCHEDULED:
        cancelled = machine.delayed.cancel(op)
        return (BAD_CANCEL, None) if cancelled is None else (None, cancelled)
    if version >= 2 and kind in operations.OPS:
        return machine.operations.apply(op)
    if version >= OUTCOMES_SINCE and kind in transactions.OPS:
        return machine.transactions.apply(op)
    if version >= OUTCOMES_SINCE and kind == CLAIM:
        return machine.links.claim(op)
    if version >= OUTCOMES_SINCE and kind == filtering.PICK:
        return filtering.pick(machine, session, op)
    return machine.reservations.apply(op, machine.index, machine.time_ms)


def _check_delete(machine: QuorumMachine, op: Packed) -> tuple[str | None, object]:
    """Returns whether the queue may be deleted on a condition, by what is in it at this entry."""
    ready = machine.backlog.stored()
    if op.get("if_unused") is True and machine.consumers.count:
        return IN_USE, None
    if op.get("if_empty") is True and (ready or machine.waiting.messages):
        return NOT_EMPTY, None
    return None, {"messages": ready}


def _renew(machine: QuorumMachine) -> tuple[str | None, object]:
    """Somebody declares the queue again. One whose time is over is as good as gone: the leader has
    asked for its end, or is about to."""
    due = machine._unused_due_ms()
    if due is not None and due <= machine.time_ms:
        return EXPIRED_UNUSED, None
    machine.consumers.last_active_ms = machine.time_ms
    return None, {}
