"""The words of the trace: what the recorder writes and the audit reads (ADR 0009).

A row is a run: messages [position_first, position_first + count) of the ENQUEUE command at byte
`position_command` of entry `position_index`, and what became of them. Decided rows carry the entry
that decided it and are equal on every replica; acts carry the clock of the node that acted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NotRequired, TypedDict

FORMAT: Final = 1
"""Version of files and columns; in every file's metadata under METADATA_KEY."""
METADATA_KEY: Final = b"convoymq.trace"


class Footer(TypedDict):
    """Metadata of a segment."""

    vhost: str
    queue: str
    type: str
    group: int
    node: int
    incarnation: int
    format: int
    covered: list[list[int]]
    """Entries of which every decided row is there: (start, end] each."""
    acts: list[list[int]]
    """Times of which every act is there: (start, end] each, µs."""
    state_snapshots: list[dict[str, int]]
    members: list[list[int]]
    """[node, incarnation or 0, whether it has a replica] of the nodes that record the queue."""
    marked: dict[str, int]
    """Rows that the marks count, by kind."""
    previous: list[int] | None
    """[incarnation, number] of the file before this one."""
    lost: int
    closed: bool
    rows: int
    host: NotRequired[str]
    """Names the machine's start: nodes with the same one have one clock."""
    found: NotRequired[int]
    """Rows of the file as it is."""
    number: NotRequired[int]
    """From the file's name."""


PUBLISHED: Final = 1
DELIVERED: Final = 2
ACKED: Final = 3
RETURNED: Final = 4
DROPPED: Final = 5
CONFIRMED: Final = 6
SENT: Final = 7
OWNER: Final = 8
STATE: Final = 9
COVERED: Final = 10
SUMMARY: Final = 11
MEMBER: Final = 12

# Of ordered topics (ADR 0071). Decided by a partition's machine:
KEYED: Final = 13
OPENED: Final = 14
SEALED: Final = 15
CURSOR: Final = 16
LEASED: Final = 17
SETTLED: Final = 18
PARKED: Final = 19
HANDED_OVER: Final = 20
LOST: Final = 21
UNGROUPED: Final = 22
PRODUCED: Final = 23
PASSED: Final = 36
# Acts of nodes, about a partition:
PUBLISHER: Final = 24
TAGGED: Final = 25
HANDED_OUT: Final = 26
# Decided by the metadata machine, in the trace TOPICS_QUEUE:
TOPIC: Final = 27
RANGE: Final = 28
GROUP: Final = 29
GRANTED: Final = 30
RELEASED: Final = 31
ADVANCED: Final = 32
SOUGHT: Final = 33
GIVEN_UP: Final = 34
NAME: Final = 35
SKIPPED: Final = 40
# Of broker groups (ADR 0192), all of them acts:
STORED: Final = 41
CUT: Final = 42
ACCEPTED: Final = 43
READ: Final = 44
COMMITTED: Final = 45
ESCAPED: Final = 46
TAKEN: Final = 47
LIFE: Final = 48
ACTING: Final = 49

TOPICS_QUEUE: Final = "amq.topics"
TOPICS_TYPE: Final = "topics"
"""Under which the metadata group's trace of topics appears; it has no virtual host."""
PARTITION_TYPE: Final = "partition"
PARTITION_PREFIX: Final = "amq.partition."
BROKER_GROUP_TYPE: Final = "broker group"
"""Of the trace of a broker, which is about all queues of its group."""
LOG_TYPES: Final = frozenset(("stream", PARTITION_TYPE, TOPICS_TYPE))
"""Types whose messages stay when they are consumed."""

TOPIC_DECIDED: Final = (
    KEYED, OPENED, SEALED, CURSOR, LEASED, SETTLED, PARKED, HANDED_OVER, LOST, UNGROUPED, PRODUCED,
    PASSED, TOPIC, RANGE, GROUP, GRANTED, RELEASED, ADVANCED, SOUGHT, GIVEN_UP, NAME, SKIPPED,
)  # fmt: skip

KIND_NAMES: Final = {
    PUBLISHED: "published",
    DELIVERED: "delivered",
    ACKED: "acked",
    RETURNED: "returned",
    DROPPED: "dropped",
    CONFIRMED: "confirmed",
    SENT: "sent",
    OWNER: "owner",
    STATE: "state",
    COVERED: "covered",
    SUMMARY: "summary",
    MEMBER: "member",
}

REDELIVERED: Final = 1
"""delivered, sent: `redelivered` is shown to the consumer. read: the reader asked for what its
group had committed."""
NO_ACK: Final = 2
"""delivered: the consumer settles by receiving."""
BY_RESERVATION: Final = 4
"""The owner is a reservation: `session` is its epoch, and no node has it."""
FAILED: Final = 8
"""returned: counts towards the delivery limit."""
CAME: Final = 16
GONE: Final = 32
"""owner: a consumer may be served from now on, or no more. acting: it begins, or ends."""
DELETED: Final = 64
"""confirmed: answered because the queue is deleted, not because it holds the message. cut: the
topic is deleted."""
HELD: Final = 128
"""state: checked out to (session, consumer); without it: ready. dropped: it was checked out to that
owner; without it: it was ready."""
COMPLETE: Final = 256
"""summary: the `state` rows of the same index are all there is in the queue."""

CLOSED: Final = 512
"""covered: the node ended the trace in order; until its next mark it did nothing."""

REPLICA: Final = 1024
"""member: the node has a replica of the queue."""

EXTERNAL: Final = 2048
"""sealed: the targets were opened before it."""
PARKED_HEAD: Final = 4096
"""handed_out: the head of a parked key that resumes, from its copy."""
GROUP_GONE: Final = 8192
"""group: it is deleted."""
BY_TIME: Final = 16384
"""released: its time ran out."""
WEAK: Final = 32768
"""topic: its mode is weak."""
ONE_OF_KEY: Final = 65536
"""handed_out: to a member that has one message of a key at a time."""
AT_SETTLING: Final = 131072
"""handed_out: before; the node hears of it as the member settles, which may ask twice, or late."""
PASSED_OVER: Final = 262144
"""handed_out: to the filter of the member, which did not want it: its client has not got it."""

PARK: Final = 1
PARK_BEHIND: Final = 2
PARK_RESUMED: Final = 3
PARK_DONE: Final = 4
PARK_STOPPED: Final = 5
PARK_SKIPPED: Final = 6
PARK_REPLACED: Final = 7
"""Reasons of parked: a failed message, one behind it; an operator resumes the key; the head was
processed, failed again, was given up, got another content."""

REJECTED: Final = 1
OVER_DELIVERY_LIMIT: Final = 2
PURGED: Final = 3
QUEUE_DELETED: Final = 4
EXPIRED: Final = 5
OVER_LENGTH: Final = 6
DUPLICATE: Final = 7
"""published: a named producer had sent these sequences before, or the queue remembers their
message-ids; they never entered the queue."""
RETENTION: Final = 8
"""A stream gave its oldest segment up."""

REASON_NAMES: Final = {
    REJECTED: "rejected",
    OVER_DELIVERY_LIMIT: "delivery_limit",
    PURGED: "purged",
    QUEUE_DELETED: "deleted",
    EXPIRED: "expired",
    OVER_LENGTH: "length",
    DUPLICATE: "duplicate",
    RETENTION: "retention",
}

ROW_COLUMNS: Final = (
    "kind", "flags", "reason", "ordinal", "index", "term", "time_us", "session", "consumer", "seq",
    "first_id", "count", "position_index", "position_command", "position_first", "acquired",
    "delivered",
)  # fmt: skip
"""Columns of a row, in the order of `kernels.trace.TraceRows`. In files `kind` and `reason` are
int8, `flags` and `ordinal` int32, the others int64 (`session` as a bit pattern)."""
NAME_COLUMNS: Final = ROW_COLUMNS[-8:]
"""Columns of a NAME row that keep bytes of it, eight each."""
SUMMARY_COLUMNS: Final = {
    "published": "seq",
    "acked": "first_id",
    "ready": "count",
    "unacked": "position_index",
    "dropped": "position_command",
    "purged": "position_first",
    "delivered": "acquired",
    "returned": "delivered",
}
"""Columns of a SUMMARY row that keep the machine's totals."""
MARK_COLUMNS: Final = {
    "confirmed": "position_command",
    "sent": "position_first",
    "rows": "acquired",
}
"""Columns of a COVERED row that keep how many rows there were since the one before, of some kinds
and in all: what has been taken out of a file is missed."""


def name_of(row: Mapping[str, int]) -> str:
    """Returns the name that a NAME row tells of."""
    raw = b"".join(row[name].to_bytes(8, "little", signed=True) for name in NAME_COLUMNS)
    return raw[: row["consumer"]].decode("utf-8", "replace")


def name_words(name: bytes) -> list[int]:
    """Returns the columns of a NAME row from `consumer` on."""
    room = 8 * len(NAME_COLUMNS)
    padded = name[:room].ljust(room, b"\0")
    parts = (padded[k : k + 8] for k in range(0, room, 8))
    return [min(len(name), room), *(int.from_bytes(part, "little", signed=True) for part in parts)]
