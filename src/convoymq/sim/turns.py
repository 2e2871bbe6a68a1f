"""Turns of consumers: how many messages one is given before the next one (ADR 0003, "A turn").

Written from the rules, in other words than the machine's: see `sim/delivery_model.py`.
"""

from __future__ import annotations

from convoymq.sim.delivery_parts import Consumer

SHARE = 16
MESSAGES_MAX = 256
BUSY_MAX = 64
QUICK_MS = 100


def has_settled(consumer: Consumer, messages: int, time_ms: int, version: int) -> None:
    """Follows a SETTLE that settled some messages."""
    if version >= 2:
        consumer.settled_at_once = messages
    if version >= 3:
        quick = time_ms - consumer.turn_ms <= QUICK_MS
        changed = consumer.quick_turn * (2 if quick else 0.5)
        consumer.quick_turn = min(max(int(changed), 1), BUSY_MAX)


def share_of(
    consumer: Consumer, ready: int, rivals: int, average: int, time_ms: int, version: int
) -> tuple[int, bool]:
    """Returns the most that a consumer is given in its turn, and whether all that it holds is then
    a multiple of what it settles at once.

    Args:
        ready: messages that are ready.
        rivals: consumers of its priority that may be served, itself among them.
        average: messages that consumers and reservations hold.
        time_ms: logged time.
        version: of the machine.
    """
    if rivals < 2:
        return ready, False
    share = min(max(ready // (SHARE * rivals), 1), MESSAGES_MAX)
    # Who settles many at once gets as many at once, when all have as much to do.
    busy = min(average, consumer.settled_at_once, BUSY_MAX)
    completes = False
    if version >= 3 and consumer.settled_at_once > share:
        # Or when it is quick; and just so many that it can settle all that it holds.
        if not consumer.held or time_ms - consumer.turn_ms <= QUICK_MS:
            busy = max(busy, consumer.quick_turn)
        whole = consumer.settled_at_once
        while whole <= len(consumer.held):
            whole += consumer.settled_at_once
        busy = min(busy, whole - len(consumer.held))
        completes = busy >= share and len(consumer.held) + busy == whole
    return max(share, busy), completes


def is_too_long(consumer: Consumer, given: int, ready: int, others: int, average: int) -> bool:
    """Returns whether one was given more than its share, and more than others have to do meanwhile.

    Args:
        given: messages of the turn.
        ready: messages that were ready.
        others: consumers of its priority that could have been served.
        average: messages that consumers hold, or that this one may have since it is quick.
    """
    share = min(MESSAGES_MAX, ready / (SHARE * (others + 1)))
    busy = min(average, BUSY_MAX) if consumer.settled_at_once >= given else 0
    return others > 0 and given > max(1, share, busy)
