"""What a message asks of its queues by its properties, and which queues do not do it.

A quorum queue serves both (ADR 0043), unless its machine has still a version that knows neither. A
stream keeps messages in their order, so it refuses an expiration, and a priority above what a
message without one has (ADR 0027). A classic queue serves expirations; priorities it ignores, as
RabbitMQ does where a queue has no `x-max-priority`.
"""

from __future__ import annotations

from collections.abc import Iterable

from convoymq.model.refusals import invalid_expiration, queue_subject, unserved_property
from convoymq.queues.classic.records import traits_of
from convoymq.queues.interface import Queue

PRIORITY_NORMAL_MAX = 4
"""Up to here a priority is that of a message without one: 0 is what many clients always send, and 4
is the default of JMS."""
EXPIRATION_MS_MAX = 315_360_000_000
RECORD_PRIORITY = 2
RECORD_EXPIRATION = 4
"""Flags of ENQUEUE: some record carries the property."""
RECORD_HEADERS = 8
"""Some record carries one of `QUEUE_HEADERS`."""
DELAY = "x-delay"
DELIVER_AT = "x-deliver-at"
GROUP_ID = "x-group-id"
QUEUE_HEADERS = (DELAY, DELIVER_AT, GROUP_ID)
"""Headers that queues act on."""


def asked_property(expiration: object, priority: int | None) -> str | None:
    """The property by which a message asks for what only some queues do; None = none."""
    if expiration is not None:
        return "expiration"
    if priority is not None and priority > PRIORITY_NORMAL_MAX:
        return "priority"
    return None


def check_expiration(text: str) -> None:
    """Checks the expiration property: milliseconds, not negative, at most ten years.

    Raises:
        PreconditionFailed: it is something else; the reason names what.
    """
    sign = 1 if text[:1] in ("-", "+") else 0
    end = sign
    while end < len(text) and text[end] in "0123456789":
        end += 1
    if end == sign:
        raise invalid_expiration(text, "no_integer")
    if end < len(text):
        raise invalid_expiration(text, f'{{leftover_string,"{text[end:]}"}}')
    value = int(text)
    if value < 0:
        raise invalid_expiration(text, f"{{value_negative,{value}}}")
    if value > EXPIRATION_MS_MAX:
        raise invalid_expiration(text, f"{{value_too_large,{value}}}")


def check_served(asked: str | None, queues: Iterable[Queue]) -> None:
    """Refuses a message that one of its queues does not serve; none of them gets it then.

    Raises:
        PreconditionFailed: names the property and the queue.
    """
    if asked is None:
        return
    for queue in queues:
        if not queue.serves_attributes:
            raise unserved_property(asked, queue_subject(queue.vhost, queue.name), queue.type)


def check_records(flags: int, records: Iterable[bytes], queues: Iterable[Queue]) -> None:
    """As `check_served`, for the records of an ENQUEUE with these flags. Raises PreconditionFailed.

    Cost: the records are looked at only when some have a priority.
    """
    if flags & RECORD_EXPIRATION:
        check_served("expiration", queues)
    if flags & RECORD_PRIORITY:
        for record in records:
            check_served(asked_property(None, traits_of(record).priority), queues)
