"""Rules of credit, and of what consumers say of messages that they give back, in the model of
deliveries (ADR 0200, ADR 0201).

Part of `sim.delivery_model`, which calls these functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.kernels import batch
from convoymq.queues.sessions import APPLIED_OK
from convoymq.sim.delivery_parts import Place

if TYPE_CHECKING:
    from convoymq.sim.delivery_model import DeliveryModel
    from convoymq.sim.delivery_parts import Consumer, Message, Session

GRANT, MODIFY = 24, 25
SINCE = 6
"""Version of the machine that brought both."""
WINDOW_CREDITED = 32_768
AVOIDED_MAX = 256


def grant(
    model: DeliveryModel, session: Session, consumer: Consumer | None, flags: int, body: bytes
) -> None:
    """A consumer may get messages until it has got so many; with flag 1 those that are there."""
    if consumer is None or consumer.limit < 0 or consumer.cancelled:
        model._answer(session, APPLIED_OK, [0, 0])
        return
    consumer.limit = int.from_bytes(body[:8], "little")
    model._settle_down()
    if flags & 1:
        consumer.limit = consumer.next_id
    served = not model.single_active or (consumer is model.active and not model.quiescing)
    ready = len(model.ready()) if served else 0
    model._answer(session, APPLIED_OK, [consumer.next_id, ready])


def modify(
    model: DeliveryModel,
    consumer: Consumer | None,
    flags: int,
    count: int,
    data: bytes,
    offset: int,
) -> None:
    """Messages come back, or leave, with what their consumer says of them."""
    if consumer is None:
        return
    ranges = batch.ranges(data, offset, count)
    tail = batch.command_body(data, offset)[16 * count :]
    due_ms = int.from_bytes(tail[:8], "little")
    said = tail[12 : 12 + int.from_bytes(tail[8:12], "little")]
    failed = flags & 1
    counted = int(not flags & 2) if model.counts_returns else failed
    for first, last in zip(ranges[::2], ranges[1::2], strict=True):
        for message_id in sorted(i for i in consumer.held if first <= i <= last):
            message = consumer.held.pop(message_id)
            message.said = said or message.said
            if flags & 8:
                model.released.append((consumer.session, consumer.number, message_id))
                model._leave(message, Place.REJECTED)
                continue
            model.in_order = False
            key = (consumer.session, consumer.number)
            if flags & 4 and key not in message.avoids:
                message.avoids.append(key)
            by_rule = not model.limits.get("requeue_position", 0) and model.delivery_limit < 0
            if not due_ms and by_rule and (model.counts_returns or not failed):
                model._requeue(message, failed, counted)
            else:
                model._return(message, failed, counted, due_ms)


def serve_avoided(model: DeliveryModel) -> None:
    """Gives messages that some consumers do not get to others, in the order in which they came
    back; those that nobody may get leave, and those that all may get are ready."""
    consumers = [c for c in model.consumers() if c.number and not c.cancelled]
    known = [(c.session, c.number) for c in consumers]
    able = known
    if model.single_active:
        able = [(c.session, c.number) for c in consumers if c is model.active]
    kept = 0
    for message in list(model.avoided):
        message.avoids = [key for key in message.avoids if key in known]
        if not message.avoids:
            model.avoided.remove(message)
            model._put_back(message)
        elif (able and not {*able} - {*message.avoids}) or kept == AVOIDED_MAX:
            model.avoided.remove(message)
            model._leave(message, Place.REJECTED)
        else:
            kept += 1
    model._put_front()
    for message in list(model.avoided):
        served = [
            c
            for c in model.consumers()
            if c.waits_since and (c.session, c.number) not in message.avoids
        ]
        if not served:
            continue
        model.avoided.remove(message)
        if message.due_ms is not None and message.due_ms <= model.time_ms:
            model._leave(message, Place.EXPIRED)
            continue
        consumer = min(served, key=lambda c: (-c.priority, c.waits_since))
        model._give(consumer, message)
        if not model._may_be_served(consumer):
            consumer.waits_since = 0


def come_back(model: DeliveryModel, message: Message) -> bool:
    """Takes a message that some consumers do not get; False: all may get it."""
    if message.avoids:
        model.avoided.append(message)
    return bool(message.avoids)
