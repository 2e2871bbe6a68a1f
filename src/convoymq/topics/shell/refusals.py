"""Refusals of topics that name the exchange or queue for which a client has to do something."""

from __future__ import annotations

from convoymq.model.errors import Refused, Subject
from convoymq.topics.rules.refusals import DataExpired, NoKey


class OrderKeyMissing(NoKey):
    """A message has no order key, and its topic takes no such message. AMQP: closes the channel."""

    def __init__(self, subject: Subject) -> None:
        Refused.__init__(
            self,
            "message has no order key, a routing key or header 'x-order-key', and the topic takes "
            f"no such message: {subject}",
            subject=subject,
        )


class GroupDataExpired(DataExpired):
    """A group had no member for so long that messages are deleted which it has not read."""

    def __init__(self, subject: Subject) -> None:
        Refused.__init__(
            self,
            f"DATA_EXPIRED: {subject} had no member for too long, and messages that it has not "
            "read are deleted: seek the group, or delete it",
            subject=subject,
        )
