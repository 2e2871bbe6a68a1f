# cython: annotation_typing=False
"""Hands a classic queue's ready messages out: the highest priority of consumers first, equals in
turns."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.queues.classic.machine import ClassicMachine
    from convoymq.queues.classic.runs import Consumer, Run


DELIVER = 2
"""Kind of an effect: see `classic.machine`."""


def hand_out_ready(machine: ClassicMachine) -> None:
    """Hands out what consumers have room for."""
    while machine.ready_count:
        candidates = _candidates(machine)
        if not candidates:
            return
        # Alone, a consumer takes whole runs; equals take turns message by message.
        turns = len(candidates) > 1
        served: list[Consumer] = []
        for consumer in candidates:
            limit = 1 if turns else consumer.room()
            run = machine.take_head(limit)
            if run is None:
                break
            served.append(consumer)
            hand_out(machine, consumer, run)
        if not served:
            return
        if turns:
            rotate(machine, served)


def _candidates(machine: ClassicMachine) -> list[Consumer]:
    if machine.limits.single_active:
        one = machine.active
        fits = one is not None and not one.cancelled and one.room() > 0
        return [one] if one is not None and fits else []
    found: list[Consumer] = []
    for consumer in machine.service:
        if found and consumer.priority != found[0].priority:
            break
        if consumer.room() > 0:
            found.append(consumer)
    return found


def rotate(machine: ClassicMachine, served: list[Consumer]) -> None:
    """Has consumers go behind their equals that were served, also when the messages ran out
    within the round."""
    for consumer in served:
        machine.service.remove(consumer)
    for consumer in served:
        insort(machine.service, consumer, key=service_order)


def hand_out(machine: ClassicMachine, consumer: Consumer, run: Run) -> None:
    """Checks messages out that are in no other place."""
    block, note = run.block, run.note
    machine.take_in_memory(block)
    machine.unsettled_count += run.count
    machine.delivered += run.count
    first_id = consumer.hold(run)
    effect: tuple[object, ...] = (
        DELIVER, consumer.session, consumer.number, first_id,
        (block.data, block.command), run.first, run.count, run.acquired_count,
    )  # fmt: skip
    if consumer.limit >= 0 and (note.failed_count or note.annotations):
        # Nodes of older releases have no consumers with credit.
        effect = (*effect, note.failed_count, note.annotations)
    machine.effects.append(effect)


def service_order(consumer: Consumer) -> int:
    """Returns the key by which consumers are served."""
    return -consumer.priority
