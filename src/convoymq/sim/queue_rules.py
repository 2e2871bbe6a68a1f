"""Rules of a queue as a whole, in the model of deliveries: how long it may be, when it is
unused, and what it answers to questions about itself.

Part of `sim.delivery_model`, which calls these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from convoymq.queues.reservations import MALFORMED
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED
from convoymq.sim.delivery_parts import Place

if TYPE_CHECKING:
    from convoymq.sim.command_bodies import ReservationOp
    from convoymq.sim.delivery_model import DeliveryModel
    from convoymq.sim.delivery_parts import Session

AT_LEAST_ONCE = 2
"""The strategy for dead letters by which a queue keeps them until their targets have them."""
QUEUE_OPS = {"cancel_scheduled": 2, "delete_check": 2, "renew": 4}
"""Ops that are about the queue itself -> the version of the machine that brought them."""


def answer_queue_op(model: DeliveryModel, session: Session, op: ReservationOp) -> bool:
    """Follows a question to the queue itself; False: it is none."""
    if op["op"] not in QUEUE_OPS:
        return False
    if not model.in_force(QUEUE_OPS[op["op"]]):
        model._answer(session, APPLIED_REJECTED, MALFORMED)
        return True
    if op["op"] == "cancel_scheduled":
        cancelled = 0
        for due_ms, index, offset, record in op["messages"]:
            waits = (due_ms, (index, offset, record))
            if waits in model.scheduled:
                model.scheduled.remove(waits)
                model._move(model.messages[waits[1]], Place.PURGED)
                cancelled += 1
        model._answer(session, APPLIED_OK, {"cancelled": cancelled})
        return True
    if op["op"] == "renew":
        if is_unused(model):
            model._answer(session, APPLIED_REJECTED, "expired")
        else:
            model.used_ms = model.time_ms
            model._answer(session, APPLIED_OK, {})
        return True
    if op["if_unused"] and model.consumer_count() + model.reservation_count():
        model._answer(session, APPLIED_REJECTED, "in_use")
    elif op["if_empty"] and length(model):
        model._answer(session, APPLIED_REJECTED, "not_empty")
    else:
        model._answer(session, APPLIED_OK, {"messages": len(model.ready())})
    return True


def purge(model: DeliveryModel, session: Session) -> None:
    """Drops all that nobody has."""
    purged = [*model.ready(), *(model.messages[key] for _, key in model.scheduled)]
    model.scheduled.clear()
    model._answer(session, APPLIED_OK, len(purged))
    model.blocked.clear()
    model.avoided.clear()
    for message in purged:
        model._move(message, Place.PURGED)
    model.returned.clear()
    model.fresh.clear()
    model.levels.clear()
    model.turn = 0
    model.kept.clear()


def configure(model: DeliveryModel, changed: Mapping[str, int]) -> None:
    """Changes settings of a queue while it runs."""
    for name, value in changed.items():
        if name == "delivery_limit":
            model.delivery_limit = int(value)
        elif name == "dead_letters":
            model.strategy = int(value)
        elif not model.remembered.configure(name, int(value)):
            if name == "two_priority_classes" and model.limits.get(name, 0) != int(value):
                model.turn = 0
            if name == "expire_by_due" and int(value) <= 0:
                model.swept_ms = 0
            model.limits[name] = int(value)
    if "expires_ms" in changed:
        model.used_ms = model.time_ms
    model.remembered.forget(model.time_ms)
    if model.strategy != AT_LEAST_ONCE:
        model.kept.clear()


def is_unused(model: DeliveryModel) -> bool:
    """Returns whether nobody has used the queue for as long as it may be unused."""
    in_use = model.consumer_count() + model.reservation_count()
    if in_use or (model.chosen is not None and model.chosen.open):
        return False
    return 0 <= model.limits["expires_ms"] <= model.time_ms - model.used_ms


def keep_length(model: DeliveryModel) -> None:
    """Drops what would be next, or has publishers refused."""
    if model.limits["reject_publish"] > 0:
        kept = model.kept.values()
        filled = (
            (length(model) + len(kept), model.limits["max_length"]),
            (length_bytes(model) + sum(m.size for m in kept), model.limits["max_length_bytes"]),
        )
        if any(0 <= limit < count for count, limit in filled):
            model.refusing = True
        elif all(limit < 0 or count <= limit * 4 // 5 for count, limit in filled):
            model.refusing = False
        return
    model.refusing = False
    most, most_bytes = model.limits["max_length"], model.limits["max_length_bytes"]
    while 0 <= most < length(model) or 0 <= most_bytes < length_bytes(model):
        if model.ready():
            message = model._pop()
        else:
            message = model.messages[model.scheduled.pop(0)[1]]
        model._leave(message, Place.OVER_LENGTH)
        model._expire()


def length(model: DeliveryModel) -> int:
    """Returns how many messages are ready or blocked, or wait."""
    return len(model.ready()) + len(model.scheduled)


def length_bytes(model: DeliveryModel) -> int:
    """Returns the bytes of what is ready or blocked: what waits for a time does not count."""
    if model.limits["max_length_bytes"] < 0:
        return 0
    return sum(message.size for message in model.ready())
