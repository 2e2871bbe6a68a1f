# cython: annotation_typing=False
"""Credit of consumers of a classic queue, and which of them is the single active one (ADR 0200)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.queues.outcomes import FLAG_DRAIN, FLAG_UNASKED

if TYPE_CHECKING:
    from convoymq.queues.classic.machine import ClassicMachine
    from convoymq.queues.classic.runs import Consumer

CREDIT = 10
ACTIVITY = 11
"""Kinds of effects: see `classic.machine`."""


def grant(machine: ClassicMachine, consumer: Consumer | None, flags: int, body: bytes) -> None:
    """GRANT: sets the limit of a consumer with credit; answered behind what it gets by that."""
    if consumer is None or consumer.cancelled or consumer.limit < 0:
        return
    consumer.limit = int.from_bytes(body[:8], "little")
    machine.serve()
    if flags & FLAG_DRAIN:
        consumer.limit = consumer.next_id
    if not flags & FLAG_UNASKED:
        active = not machine.limits.single_active or machine.active is consumer
        ready = machine.ready_count if active else 0
        machine.effects.append((CREDIT, consumer.session, consumer.number, consumer.next_id, ready))


def tell_activity(machine: ClassicMachine, consumer: Consumer, active: bool) -> None:
    """Has the consumer's client told. Nodes of older releases do not understand it, and have no
    consumers with credit."""
    if consumer.limit >= 0:
        machine.effects.append((ACTIVITY, consumer.session, consumer.number, active))
