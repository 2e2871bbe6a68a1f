"""The maps of requests of groups' members (docs/formats/columnar-protocol.md)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from convoymq.edges.columnar.fields import INT64_MAX, Columns, Name, Offset, Positive, Text

Place = Annotated[int, msgspec.Meta(ge=-1, le=INT64_MAX)]
Start = Literal["earliest", "latest"] | Offset | list[tuple[Offset, Offset]]
"""One end, a time (ms since the epoch), or the offset in each partition of a vector."""


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every request of a group."""

    topic: Name
    group: Name


class GroupJoin(GroupRequest, frozen=True, kw_only=True):
    """GROUP_JOIN."""

    start: Start = "earliest"


class GroupHeartbeat(GroupRequest, frozen=True, kw_only=True):
    """GROUP_HEARTBEAT. Leases are [partition, epoch, …]."""

    member: Name
    sent_ms: Offset
    group_epoch: Offset
    held: list[Offset]
    released: list[Offset]
    leaves: bool = False


class GroupWake(GroupRequest, frozen=True, kw_only=True):
    """GROUP_WAKE."""

    member: Name
    wait_ms: Offset


class LeaseRequest(GroupRequest, frozen=True, kw_only=True):
    """Fields of every request of an owner to its partition."""

    pid: Offset
    group_epoch: Offset
    epoch: Offset


class GroupFetch(LeaseRequest, frozen=True, kw_only=True):
    """GROUP_FETCH."""

    offset: Place = -1
    max_rows: Positive = 1000
    max_bytes: Positive = 1 << 20
    park_version: Place = -1
    close_offset: Place = -1
    wait_ms: Offset = 0
    columns: Columns = 15


class GroupSettle(LeaseRequest, frozen=True, kw_only=True):
    """GROUP_SETTLE."""

    kind: Literal["ack", "park", "done"]
    member: Text = ""
    ranges: list[Offset] = []
    """Of `ack`: first and last offset of each range."""
    offset: Offset = 0
    """Of the message to park, or of the head that is done."""
    version: Offset = 0
    """Of a head that is done: the version that created its partition."""
    key: bytes = b""
    follow: bool = False
    failed: bool = False
    columns: Columns = 15


class GroupSeek(GroupRequest, frozen=True, kw_only=True):
    """GROUP_SEEK."""

    position: Start
