"""Refusals of topics that name the exchange or queue for which a client has to do something."""

from __future__ import annotations

from convoymq.metadata.machine import TopicRecord
from convoymq.model.errors import PreconditionFailed, Refused, Subject
from convoymq.model.refusals import queue_subject
from convoymq.topics.rules.heartbeats import filter_of
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


def check_filter(record: TopicRecord, group: str, name: str = "") -> None:
    """Refuses a consumer with another filter than the members of its group (ADR 0224).

    Args:
        name: of the filter; empty: it wants every message.

    Raises:
        PreconditionFailed: the group has such members.
    """
    state = record.groups.get(group)
    if state is not None and any(filter_of(member) != name for member in state.members):
        subject = queue_subject(record.vhost, f"{record.name}/{group}")
        raise PreconditionFailed(
            f"consumers of a group have the same filter, and {subject} has some with another one, "
            "or with none",
            subject=subject,
        )
