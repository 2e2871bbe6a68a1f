"""Kinds of frames between nodes, in one table.

A frame has a type, which is one byte of its header. A CONTROL frame has a kind as well, in field
`b`. Each row of the two tables says which package owns the kind, whether its frames go ahead of
queued bulk, and whether they wait until a node has opened its queues.

A package with frames of its own adds a row (`link_frame`, `control_kind`) and gives each node its
handler (`dispatch.FrameDispatch.own`, `control.ControlPlane.handle` or `handle_raw`). Numbers are
on the wire: none is used for anything else again. Releases do not use numbers from `FREE` on.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.kernels.link_frames import (
    FRAME_APPEND,
    FRAME_APPEND_REPLY,
    FRAME_APPLIED,
    FRAME_COMMIT,
    FRAME_CONTROL,
    FRAME_CREDIT,
    FRAME_DELIVER,
    FRAME_FORWARD,
    FRAME_GOODBYE,
    FRAME_HEARTBEAT,
    FRAME_HELLO,
    FRAME_RAFT,
    FRAME_RELAY,
)

FREE = 192
NUMBER_MAX = 255
URGENT_SIZE_MAX = 65_536
"""A longer frame is bulk, whatever its kind."""
FLAG_ANSWER = 1
"""Flag of a CONTROL frame that answers a request."""
LINKS = "links"
"""Owner of the frames that `Links` takes itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameKind:
    """A row of the tables.

    Attributes:
        owner: the package or module that takes frames of the kind.
        urgent: frames of up to `URGENT_SIZE_MAX` bytes go ahead of queued bulk. Such a frame says
            nothing about frames that were sent before it.
        waits: frames wait until the node has opened its queues.
        raw: of CONTROL: the body is not msgpack, and there are no answers.
        since_0_3: of CONTROL: nodes of earlier releases do not answer it.
    """

    number: int
    name: str
    owner: str
    urgent: bool
    waits: bool
    raw: bool = False
    since_0_3: bool = False


LINK_FRAMES: dict[int, FrameKind] = {}
"""By type."""
CONTROL_KINDS: dict[int, FrameKind] = {}
_urgent_types = bytearray(NUMBER_MAX + 1)
_urgent_controls = bytearray(NUMBER_MAX + 1)


def link_frame(
    number: int, name: str, owner: str, *, urgent: bool = False, waits: bool = False
) -> int:
    """Adds a type of frames and returns its number."""
    assert 0 < number <= NUMBER_MAX
    assert number not in LINK_FRAMES, f"{name} and {LINK_FRAMES[number].name}"
    LINK_FRAMES[number] = FrameKind(
        number=number, name=name, owner=owner, urgent=urgent, waits=waits
    )
    _urgent_types[number] = urgent
    return number


def control_kind(
    number: int,
    name: str,
    owner: str,
    *,
    urgent: bool = True,
    waits: bool = True,
    raw: bool = False,
    since_0_3: bool = False,
) -> int:
    """Adds a kind of CONTROL frames and returns its number."""
    assert 0 < number <= NUMBER_MAX
    assert number not in CONTROL_KINDS, f"{name} and {CONTROL_KINDS[number].name}"
    CONTROL_KINDS[number] = FrameKind(
        number=number,
        name=name,
        owner=owner,
        urgent=urgent,
        waits=waits,
        raw=raw,
        since_0_3=since_0_3,
    )
    _urgent_controls[number] = urgent
    return number


def is_urgent(data: bytes) -> bool:
    """Returns whether a frame may overtake queued bulk frames.

    Args:
        data: the frame, or its header alone.
    """
    type = data[4]
    if not _urgent_types[type] or (type == FRAME_CONTROL and not _urgent_controls[data[24]]):
        return False
    # Nearly every urgent frame is this short.
    return not (data[2] or data[3]) or int.from_bytes(data[:4], "little") <= URGENT_SIZE_MAX


link_frame(FRAME_APPEND, "APPEND", "shells.groups")
link_frame(FRAME_APPEND_REPLY, "APPEND_REPLY", "shells.groups", urgent=True)
link_frame(FRAME_COMMIT, "COMMIT", "shells.groups")
link_frame(FRAME_FORWARD, "FORWARD", "shells.groups")
link_frame(FRAME_APPLIED, "APPLIED", "shells.groups")
link_frame(FRAME_DELIVER, "DELIVER", "shells.groups")
link_frame(FRAME_RAFT, "RAFT", "shells.groups")
# Each CONTROL kind says whether it waits and whether it is bulk.
link_frame(FRAME_CONTROL, "CONTROL", "control", urgent=True, waits=True)
link_frame(FRAME_HEARTBEAT, "HEARTBEAT", LINKS, urgent=True)
link_frame(FRAME_HELLO, "HELLO", LINKS)
link_frame(FRAME_RELAY, "RELAY", LINKS)
link_frame(FRAME_GOODBYE, "GOODBYE", LINKS)
link_frame(FRAME_CREDIT, "CREDIT", LINKS, urgent=True)

KIND_CLASSIC = control_kind(1, "classic", "queues.classic", urgent=False, raw=True)
"""Commands for the home node of a classic queue, and events back."""
KIND_REPLY = control_kind(2, "reply", "broker.replies", raw=True)
"""A message for a direct reply-to consumer."""
KIND_REPLY_EXISTS = control_kind(3, "reply_exists", "broker.replies")
KIND_LIST = control_kind(4, "list", "broker.cluster_queries")
KIND_CLOSE_CONNECTION = control_kind(5, "close_connection", "broker.cluster_queries")
KIND_ALARM = control_kind(6, "alarm", "broker.alarms")
KIND_QUEUE_COUNTS = control_kind(7, "queue_counts", "broker.queue_questions")
KIND_CLASSIC_COUNTS = control_kind(8, "classic_counts", "queues.classic")
KIND_JOIN = control_kind(9, "join", "node.cluster_entry", waits=False)
KIND_RESERVATION = control_kind(10, "reservation", "broker.queue_questions")
KIND_STREAM = control_kind(11, "stream", "broker.queue_questions")
KIND_SESSIONS = control_kind(12, "sessions", "broker.queue_questions")
"""Question to a node about its sessions: those that are not live."""
KIND_FOUND = control_kind(13, "found", "node.cluster_entry", waits=False)
KIND_RECOVERY = control_kind(14, "recovery", "node.recovery", waits=False)
"""Requests of a recovery from a lost majority to other nodes."""
KIND_METADATA_END = control_kind(15, "metadata_end", "metadata.reads")
"""Question for the end of a node's metadata log."""
KIND_GROUP_ADMIN = control_kind(20, "group_admin", "broker.group_requests", since_0_3=True)
"""Operations on a group: its leadership and its members."""
KIND_OPERATOR = control_kind(21, "operator", "node.operator_access", waits=False, since_0_3=True)
"""Requests of an operator to another node than the one on the own machine."""
KIND_PREFETCH = control_kind(22, "prefetch", "broker.cluster_queries", since_0_3=True)
"""Changes the prefetch of running consumers: [vhost, queue, consumer tag, prefetch]."""
KIND_MIGRATION = control_kind(30, "migration", "broker.migrations", urgent=False)
"""Migrations of queues to another type (`broker.migrations`)."""
KIND_TOPIC_GROUP = control_kind(23, "topic_group", "topics.shell")
"""Between members of groups of topics and their coordinators (`topics.shell.group_messages`)."""
KIND_TOPIC_SCALING = control_kind(24, "topic_scaling", "topics.shell")
"""Question for the decision of a topic's autoscaler: [vhost, topic], to the metadata leader."""
KIND_RING = control_kind(25, "ring", "shells.ring", urgent=False, raw=True)
"""Between neighbours of a mirrored queue's ring."""
KIND_MIRROR_STORED = control_kind(26, "mirror_stored", "queues.mirrored", raw=True)
"""A mirror's word for its master: it has stored broadcasts up to a number."""
KIND_MIRROR_CLIENTS = control_kind(27, "mirror_clients", "queues.mirrored", urgent=False, raw=True)
"""Clients of a mirrored queue for a new master, and its answer."""
KIND_READ_MODEL = control_kind(28, "read_model", "broker.sampler", urgent=False)
"""Changes of a node's queues, connections and its own numbers in the last second."""
