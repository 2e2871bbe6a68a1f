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
    # Checks A1 to A15 of ordered topics, in their order.
    TOPIC_LOG_ORDER = 18
    TOPIC_STORED_ONCE = 19
    TOPIC_ACCEPTED_STORED = 20
    TOPIC_ONE_PLACE = 21
    TOPIC_VERSIONS = 22
    TOPIC_GROUP_STEPS = 23
    TOPIC_GATE = 24
    TOPIC_DELIVERY_ORDER = 25
    TOPIC_REDELIVERY = 26
    TOPIC_ONE_OWNER = 27
    TOPIC_NOTHING_LOST = 28
    TOPIC_PARK_ORDER = 29
    TOPIC_EFFECTS_ONCE = 30
    TOPIC_COUNTS = 31
    TOPIC_END_STATE = 32
    # Checks G1 to G8 of broker groups, in their order.
    GROUP_NUMBERED = 33
    GROUP_LOG_ORDER = 34
    GROUP_ONE_PLACE = 35
    GROUP_CONFIRMED_STORED = 36
    GROUP_READ_STORED = 37
    GROUP_REPEATS_MARKED = 38
    GROUP_ESCAPED_ONCE = 39
    GROUP_ONE_LIFE = 40


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
    Invariant.TOPIC_LOG_ORDER: Promise(
        "A1 a key's messages are stored in the order of publishing",
        "By publisher and key, order tokens rise with delivery tags or sequences, over all "
        "partitions.",
    ),
    Invariant.TOPIC_STORED_ONCE: Promise(
        "A2 every publish is stored once",
        "No delivery tag of a channel and no sequence of a producer has two places in a topic.",
    ),
    Invariant.TOPIC_ACCEPTED_STORED: Promise(
        "A3 what was accepted is stored, and nothing else",
        "Every confirmed tag has its message in a partition's log, and every stored message came "
        "in a session that a node had opened.",
    ),
    Invariant.TOPIC_ONE_PLACE: Promise(
        "A4 a key is written in one place at a time",
        "Messages lie in the range of their partition, none at or behind CLOSE, and none in a "
        "target before its sources were closed.",
    ),
    Invariant.TOPIC_VERSIONS: Promise(
        "A5 route versions are consecutive and complete",
        "Each version covers every logical partition once, and differs from the one before by one "
        "split, merge or move of neighbours.",
    ),
    Invariant.TOPIC_GROUP_STEPS: Promise(
        "A6 groups go from version to version",
        "Each step goes to the next version, once, after it was published, and after the sources "
        "of its change were handed over.",
    ),
    Invariant.TOPIC_GATE: Promise(
        "A7 a partition is read after its ancestors",
        "A group gets the first message of a partition after its step to a version with that "
        "partition, and after the last acknowledgement in every ancestor.",
    ),
    Invariant.TOPIC_DELIVERY_ORDER: Promise(
        "A8 a key's messages are delivered in order",
        "First deliveries follow the order tokens; in another lease than the message before, only "
        "when that one was acknowledged or parked, or came there again; to a member that has one "
        "message of a key at a time, only when that one was acknowledged or parked.",
    ),
    Invariant.TOPIC_REDELIVERY: Promise(
        "A9 only what is not acknowledged comes again",
        "No delivery of a message after its acknowledgement, but for a seek.",
    ),
    Invariant.TOPIC_ONE_OWNER: Promise(
        "A10 one owner of a partition in a group",
        "Leases do not overlap and their epochs rise; what is delivered and acknowledged belongs "
        "to the lease in force.",
    ),
    Invariant.TOPIC_NOTHING_LOST: Promise(
        "A11 no message is lost on the way to a group",
        "When a group leaves a partition, each message is acknowledged, parked, or a recorded "
        "loss; nothing is acknowledged that was not delivered.",
    ),
    Invariant.TOPIC_PARK_ORDER: Promise(
        "A12 nothing overtakes a parked message",
        "While a message is parked, no later one of its key is delivered; parked ones come one "
        "after the other.",
    ),
    Invariant.TOPIC_EFFECTS_ONCE: Promise(
        "A13 effects happen once, in order",
        "Where sinks recorded effects: one is applied for each acknowledged message, and tokens "
        "of applied ones rise by key.",
    ),
    Invariant.TOPIC_COUNTS: Promise(
        "A14 counts of partitions are right",
        "A closed partition holds as many messages as lie between OPEN and CLOSE, and keys are "
        "known of all.",
    ),
    Invariant.TOPIC_END_STATE: Promise(
        "A15 sinks end in the state of the source",
        "Where both recorded: the last applied effect of every key has the value of its last "
        "change at the source.",
    ),
    Invariant.GROUP_NUMBERED: Promise(
        "G1 every message of a queue has one offset, with none left out",
        "What a replica stores in a queue goes on where it ended, but for what was cut off.",
    ),
    Invariant.GROUP_LOG_ORDER: Promise(
        "G2 a queue has the order of the log",
        "In a replica's queue, places in the log and lives of masters never fall.",
    ),
    Invariant.GROUP_ONE_PLACE: Promise(
        "G3 replicas have a message in the same place",
        "A message of a life and an offset lies at one place of the log, on every replica.",
    ),
    Invariant.GROUP_CONFIRMED_STORED: Promise(
        "G4 what was confirmed is in the group's log",
        "The log of the last master has every message that a master confirmed, of the same life.",
    ),
    Invariant.GROUP_READ_STORED: Promise(
        "G5 consumers get what is stored",
        "A replica hands out what it had stored before, from where it was asked on, in order.",
    ),
    Invariant.GROUP_REPEATS_MARKED: Promise(
        "G6 nothing comes again without a mark",
        "What a replica hands out below the offset that it took from the group is marked: the "
        "reader asked for it again.",
    ),
    Invariant.GROUP_ESCAPED_ONCE: Promise(
        "G7 a message escapes once",
        "No two brokers store a message of one key, none does so twice, and what a slave takes "
        "for stored is at its target.",
    ),
    Invariant.GROUP_ONE_LIFE: Promise(
        "G8 a life has one master",
        "No two replicas begin the same life.",
    ),
}
