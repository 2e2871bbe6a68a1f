"""Requests of groups to a physical partition, their answers, and what the answers are made of.

Offsets are those of the partition: the first message has offset 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from convoymq.model.errors import PeerError
from convoymq.streamlog.reader import Run
from convoymq.topics.machine.group_machine import FIRST_OFFSET, PartitionGroupMachine
from convoymq.topics.machine.partition import GroupCursor, PartitionMachine
from convoymq.topics.rules.answers import GroupView, ParkedEntry
from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.refusals import Code

Found = TypeVar("Found")


class Fetch(NamedTuple):
    """Request of a group's member for messages of a partition that it has leased."""

    group: str
    group_epoch: int
    lease_epoch: int
    offset: int
    """The next offset to read; below 0: from the group's cursor on, with a view."""
    max_messages: int
    max_bytes: int
    park_version: int = -1
    """Of the view that the member has; -1: none."""
    close_offset: int = -1
    """Offset of CLOSE, if the member knows it."""
    wait_ms: int = 0
    """Longest wait for messages, a newer view, or CLOSE, if the member does not know it."""


class Fetched(NamedTuple):
    """Answer to a fetch."""

    code: Code
    """OK, NOT_VISIBLE, LEASE_FENCED or DATA_EXPIRED."""
    runs: list[Run]
    """Messages from the group's watermark on, also what it has acknowledged above; their offsets
    are those of the partition."""
    next_offset: int = 0
    """Offset to read on from."""
    end_offset: int = 0
    """Offset behind the last message, as far as known."""
    close_offset: int = -1
    """Offset of CLOSE; -1: the partition is not sealed, as far as known."""
    view: GroupView | None = None
    """State of the group, when the member's is older."""


class GroupDescription(NamedTuple):
    """State of a group in a partition."""

    group_epoch: int
    watermark: int
    """All offsets below are acknowledged."""
    acked_above: int
    """Number of acknowledged messages above it."""
    lease_epoch: int
    member: str
    parked_keys: int
    parked_bytes: int
    drained: bool
    expired: bool
    """The watermark is below the start of the log: somebody has to accept the loss."""
    handed_over: bool


class PartitionDescription(NamedTuple):
    """State of a partition."""

    state: str
    """Name of a `PartitionState`."""
    end_offset: int
    close_offset: int
    """-1: it is not sealed."""
    log_start: int
    messages: int
    bytes: int
    sealed_by: str
    to_version: int
    last_time_ms: int
    groups: dict[str, GroupDescription]


class ParkedRow(NamedTuple):
    """A parked key of a group, and its first message."""

    key: bytes
    lp: int
    resuming: bool
    messages: int
    messages_bytes: int
    head: OrderToken
    message: bytes


def group_of(state: PartitionMachine, request: Fetch) -> tuple[Code, GroupCursor | None]:
    """Returns the group that a request is of, or why it gets nothing."""
    code = state.check_fetch(request.group, request.group_epoch, request.lease_epoch)
    return code, (state.groups[request.group] if code is Code.OK else None)


def messages_end(state: PartitionMachine) -> int:
    """Returns the offset behind the last message."""
    return state.end_offset if state.close_offset < 0 else state.close_offset


def start_of(state: PartitionMachine, own: GroupCursor, offset: int) -> int:
    """Returns where a read begins."""
    return max(offset, own.cursor.watermark, state.log_start, FIRST_OFFSET)


def wants_view(own: GroupCursor, request: Fetch) -> bool:
    """Returns whether the member has no view, or an older one."""
    return request.offset < 0 or request.park_version < own.park_version


def is_answerable(state: PartitionMachine, request: Fetch) -> bool:
    """Returns whether a fetch has anything to wait for no more."""
    _, own = group_of(state, request)
    return (
        own is None
        or wants_view(own, request)
        or start_of(state, own, request.offset) < messages_end(state)
        or request.close_offset != state.close_offset
    )


def describe(machine: PartitionGroupMachine) -> PartitionDescription:
    """Returns the state of a partition."""
    state = machine.state
    return PartitionDescription(
        state.state.name,
        state.end_offset,
        state.close_offset,
        state.log_start,
        machine.messages,
        machine.bytes,
        state.sealed_by,
        state.to_version,
        state.last_time_ms,
        {name: _described(state, name, own) for name, own in sorted(state.groups.items())},
    )


def _described(state: PartitionMachine, name: str, own: GroupCursor) -> GroupDescription:
    cursor = own.cursor
    return GroupDescription(
        own.group_epoch,
        cursor.watermark,
        sum(cursor.ends) - sum(cursor.starts),
        own.lease_epoch,
        own.member,
        len(own.parked.keys),
        own.parked.bytes_used,
        state.drained(name),
        own.expired,
        own.handed_over,
    )


def parked_rows(
    state: PartitionMachine, group: str, after: bytes, limit: int, max_bytes: int
) -> list[ParkedRow]:
    """Returns parked keys behind one, in their order; the first one comes whatever its size. What
    was handed over is no more here."""
    own = state.groups.get(group)
    rows: list[ParkedRow] = []
    if own is None or own.handed_over:
        return rows
    size = 0
    for key in sorted(key for key in own.parked.keys if key > after or not after):
        parked = own.parked.keys[key]
        head = parked.entries[0]
        size += len(head.message)
        if len(rows) >= limit or (rows and size > max_bytes):
            break
        rows.append(
            ParkedRow(
                key,
                parked.lp,
                parked.resuming,
                len(parked.entries),
                sum(len(entry.message) for entry in parked.entries),
                head.token,
                head.message,
            )
        )
    return rows


# --- on the way between nodes ----------------------------------------------------------------

PackedView = tuple[tuple[int, ...], list[tuple[bytes, ParkedEntry | None]], int]


def pack_view(view: GroupView | None) -> PackedView | None:
    """Returns a view as plain values."""
    if view is None:
        return None
    return (view.acked, list(view.parked.items()), view.park_version)


def unpack_view(packed: PackedView | None) -> GroupView | None:
    """Returns the view that was packed."""
    if packed is None:
        return None
    acked, parked, version = packed
    return GroupView(acked, dict(parked), version)


class PackedFetched(NamedTuple):
    """A `Fetched` as plain values."""

    code: Code
    runs: list[tuple[bytes, int, int, int]]
    """ENQUEUE command with just these records, messages, offset, time in ms."""
    next_offset: int
    end_offset: int
    close_offset: int
    view: PackedView | None


def unpack_fetched(fields: Sequence[object]) -> Fetched:
    """Returns the answer of another node. Raises PeerError."""
    code, runs, next_offset, end, close, view = converted(fields, PackedFetched)
    made = [Run(block, 0, 0, count, offset, time_ms) for block, count, offset, time_ms in runs]
    return Fetched(code, made, next_offset, end, close, unpack_view(view))


def converted(value: object, kind: type[Found]) -> Found:
    """Returns what another node sent as a type. Raises PeerError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise PeerError(f"malformed answer about a partition: {error}") from error
