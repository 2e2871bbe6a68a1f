"""The promises that the audit proves, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Invariant(IntEnum):
    """Numbers of the promises, stable: findings and reports name them."""

    REPLICAS_AGREE = 1
    LOG_ORDER = 2
    NUMBERED = 3
    PUBLISHER_ORDER = 4
    CONFIRMED_IS_PUBLISHED = 5
    CONFIRMED_ONCE = 6
    DELIVERED_IS_PUBLISHED = 7
    ONE_OWNER = 8
    ENDED_STAYS_ENDED = 9
    LEFT_BY_OWNER = 10
    FIRST_DELIVERY_ORDER = 11
    DELIVERY_NUMBERS = 12
    REDELIVERED = 13
    SENT_AS_DECIDED = 14
    NOTHING_LOST = 15
    DROPPED_BY_RULE = 16
    TOTALS = 17


@dataclass(frozen=True, slots=True)
class Promise:
    """Text of an invariant, for people."""

    title: str
    meaning: str


PROMISES: dict[Invariant, Promise] = {
    Invariant.REPLICAS_AGREE: Promise(
        "replicas decide the same",
        "Every entry has the same rows in the trace of every node that covers it.",
    ),
    Invariant.LOG_ORDER: Promise(
        "time and term of the log never fall",
        "From entry to entry neither the logged time nor the term goes back.",
    ),
    Invariant.NUMBERED: Promise(
        "every message enters once, with no number left out",
        "A published run has its place in the log once, and continues the numbers of the queue.",
    ),
    Invariant.PUBLISHER_ORDER: Promise(
        "a channel's publishes keep their order",
        "Within a session, commands enter the queue in the order in which they were sent.",
    ),
    Invariant.CONFIRMED_IS_PUBLISHED: Promise(
        "what was confirmed is in the log",
        "The publish commands that a confirm covers were decided, with as many messages.",
    ),
    Invariant.CONFIRMED_ONCE: Promise(
        "no publish is confirmed twice",
        "The confirms of a session do not overlap.",
    ),
    Invariant.DELIVERED_IS_PUBLISHED: Promise(
        "nothing comes from nowhere",
        "Every message that was delivered, settled, returned or dropped was published before.",
    ),
    Invariant.ONE_OWNER: Promise(
        "one owner at a time",
        "A message is checked out to nobody else before its owner gave it back.",
    ),
    Invariant.ENDED_STAYS_ENDED: Promise(
        "what is settled or dropped stays so",
        "After its end a message is not delivered, returned, settled or dropped again.",
    ),
    Invariant.LEFT_BY_OWNER: Promise(
        "only the owner settles, returns or rejects",
        "Whoever settles, returns or rejects a message holds it, with the counts it was given.",
    ),
    Invariant.FIRST_DELIVERY_ORDER: Promise(
        "first deliveries keep the queue's order",
        "Messages that a consumer gets for the first time come in the order of publishing, and so "
        "in the order of each channel.",
    ),
    Invariant.DELIVERY_NUMBERS: Promise(
        "deliveries of a consumer are numbered without gaps",
        "Message ids continue each other from the consumer's beginning; none after its end.",
    ),
    Invariant.REDELIVERED: Promise(
        "redelivered flag and counts are right",
        "The counts shown are the number of returns before, in all and of failed ones.",
    ),
    Invariant.SENT_AS_DECIDED: Promise(
        "nodes send what was decided",
        "What a node wrote to a consumer was decided for it: once, with the same counts.",
    ),
    Invariant.NOTHING_LOST: Promise(
        "nothing is lost",
        "Every published message is settled, dropped by a rule, or in the queue's last state "
        "snapshot; and the state snapshot holds nothing else.",
    ),
    Invariant.DROPPED_BY_RULE: Promise(
        "drops name their rule",
        "A message that left without being settled names one of the known reasons.",
    ),
    Invariant.TOTALS: Promise(
        "the queue's own totals balance",
        "In every state snapshot, published = settled + dropped + purged + in the queue.",
    ),
}
