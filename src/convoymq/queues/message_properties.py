"""Queues that do not serve what a message asks for (`messages.attributes`).

A quorum queue serves all of it (ADR 0043), unless its machine has still a version that knows none.
A stream keeps messages in their order, so it refuses an expiration, and a priority above what a
message without one has (ADR 0027). A classic queue serves expirations; priorities it ignores, as
RabbitMQ does where a queue has no `x-max-priority`. Only a quorum queue has messages wait for a
time (ADR 0049), and knows message groups: elsewhere their header means nothing (ADR 0051).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from convoymq.kernels.content import RECORD_ASKS, RECORD_GROUPED, RECORD_WAITS
from convoymq.messages.attributes import (
    DELAYS,
    GROUP_ID,
    NAME_CODES,
    ORDER_KEY,
    RECORD_EXPIRATION,
    RECORD_HEADERS,
    RECORD_PRIORITY,
    asked_property,
)
from convoymq.messages.record import read_record, traits_of
from convoymq.model.refusals import (
    exchange_subject,
    invalid_delay,
    invalid_order_key,
    queue_subject,
    unserved_property,
)
from convoymq.model.tables import Table
from convoymq.queues.interface import Queue


def check_served(asked: str | None, queues: Iterable[Queue]) -> None:
    """Refuses a message that one of its queues does not serve; none of them gets it then.

    Raises:
        PreconditionFailed: names the property and the queue.
    """
    if asked is None:
        return
    for queue in queues:
        if asked in DELAYS:
            served = queue.serves_delays
        else:
            served = queue.serves_groups if asked == GROUP_ID else queue.serves_attributes
        if not served:
            subject = queue_subject(queue.vhost, queue.name)
            raise unserved_property(asked, subject, queue.type, early=queue.is_early)


def short_way_of(queue: Queue) -> int:
    """Returns which messages that ask for something the queue serves, as `PublishTarget.serves` has
    it: for good, since a machine's version never falls."""
    return (
        (RECORD_ASKS if queue.serves_attributes else 0)
        | (RECORD_WAITS if queue.serves_delays else 0)
        | (RECORD_GROUPED if queue.serves_groups else 0)
    )


def check_waits_nowhere(asked: str | None) -> None:
    """Refuses a message that is to wait, and goes to a consumer of direct replies. Raises
    PreconditionFailed."""
    if asked in DELAYS:
        raise invalid_delay(asked, "is not served by direct replies")


def check_order_key(topic: Queue, routing_keys: Sequence[str], headers: Table | None) -> bool:
    """Checks the order key of a message to a topic: header `x-order-key`, or else the routing key.

    Returns:
        Whether it has one.
    Raises:
        PreconditionFailed: its header is no string or empty, or it has more than one routing key.
    """
    field = None if headers is None else headers.get(ORDER_KEY)
    if field is not None and (field.code not in NAME_CODES or not field.value):
        raise invalid_order_key(f"header '{ORDER_KEY}' must be a string that is not empty")
    if len(routing_keys) > 1:
        subject = exchange_subject(topic.vhost, topic.name)
        raise invalid_order_key(f"a topic stores it once, without CC and BCC: {subject}")
    return field is not None or bool(routing_keys[0])


def check_records(flags: int, records: Iterable[bytes], queues: Iterable[Queue]) -> None:
    """As `check_served`, for the records of an ENQUEUE with these flags. Raises PreconditionFailed.

    Cost: the records are looked at only when some have a priority, or headers for queues.
    """
    if flags & RECORD_HEADERS:
        records = list(records)
        for record in records:
            check_served(asked_property(None, None, read_record(record).headers), queues)
    if flags & RECORD_EXPIRATION:
        check_served("expiration", queues)
    if flags & RECORD_PRIORITY:
        for record in records:
            check_served(asked_property(None, traits_of(record).priority), queues)
