"""Ordered topics as bytes: their commands in the log, and their state in snapshots.

A command is a msgpack array: its name and a map of its fields. Fields are only ever added, with
defaults, in a new version of the metadata machine; a command or a field that this release does not
know is refused, never skipped. The state is an array of rows in a fixed order: equal states give
equal bytes. Indexes of the lineage follow from the rows and are not in it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TypeAlias, TypeVar, get_args

import msgspec

from convoymq.metadata.records import TopicRecord
from convoymq.model.errors import StorageFault, UnknownCommand
from convoymq.topics.rules.changes import Change, Kind, Seal
from convoymq.topics.rules.group import GroupCommand, GroupState
from convoymq.topics.rules.lineage import Lineage, Partition, PartitionState, Published
from convoymq.topics.rules.routes import Route, Span
from convoymq.topics.rules.topic import DeclareLost, TopicCommand, TopicState

C = TypeVar("C")
FORMAT = 1
_TOPIC_COMMANDS: dict[str, type[TopicCommand]] = {
    kind.__name__: kind for kind in get_args(TopicCommand)
}
_GROUP_COMMANDS: dict[str, type[GroupCommand]] = {
    kind.__name__: kind for kind in get_args(GroupCommand)
}


# --- commands ------------------------------------------------------------------------------


def pack_command(command: TopicCommand | GroupCommand) -> bytes:
    """Returns a command of a topic or a group as it is logged."""
    return msgspec.msgpack.encode((type(command).__name__, command))


def unpack_topic_command(packed: bytes) -> TopicCommand:
    """Returns the command of `pack_command`. Raises UnknownCommand."""
    return _unpack(packed, _TOPIC_COMMANDS)


def unpack_group_command(packed: bytes) -> GroupCommand:
    """Returns the command of `pack_command`. Raises UnknownCommand."""
    return _unpack(packed, _GROUP_COMMANDS)


def _unpack(packed: bytes, known: dict[str, type[C]]) -> C:
    try:
        name, fields = msgspec.msgpack.decode(packed, type=tuple[str, dict[str, msgspec.Raw]])
        kind = known[name]
        unknown = fields.keys() - {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if unknown:
            raise UnknownCommand(f"{name} with the fields {', '.join(sorted(unknown))}")
        return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError) as error:
        raise UnknownCommand(f"not a command of a topic of this release: {error}") from error


# --- topics in snapshots ----------------------------------------------------------------------

TopicRow: TypeAlias = tuple[
    str,
    str,
    str,
    int,
    int,
    int,
    bytes,
    list[tuple[str, bytes]],
    list[tuple[int, int]],
    dict[str, bool | int | str],
]
"""(virtual host, name, mode, hash, its seed, created, state, groups, places, settings); state and
groups as `pack_state` and `GroupState.snapshot` have them"""


def to_row(topic: TopicRecord) -> TopicRow:
    """Returns a topic for a snapshot; equal ones give equal rows."""
    return (
        topic.vhost,
        topic.name,
        topic.mode,
        topic.hash_id,
        topic.hash_seed,
        topic.created_ms,
        pack_state(topic.state),
        [(name, group.snapshot()) for name, group in sorted(topic.groups.items())],
        sorted(topic.places.items()),
        dict(sorted(topic.settings.items())),
    )


def from_row(row: TopicRow) -> TopicRecord:
    """Returns the topic of `to_row`. Raises StorageFault."""
    vhost, name, mode, hash_id, hash_seed, created_ms, packed, groups, places, settings = row
    return TopicRecord(
        vhost=vhost,
        name=name,
        mode=mode,
        hash_id=hash_id,
        hash_seed=hash_seed,
        created_ms=created_ms,
        state=unpack_state(packed),
        groups={group: GroupState.restore(state) for group, state in groups},
        places=dict(places),
        settings=dict(settings),
    )


# --- the state of a topic ------------------------------------------------------------------


class _PartitionRow(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    pid: int
    lo: int
    hi: int
    created_version: int
    sealed_version: int | None
    open_offset: int
    close_offset: int | None
    parents: tuple[int, ...]
    children: tuple[int, ...]
    state: PartitionState


class _PublishedRow(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    version: int
    change_id: str
    kind: Kind | None
    published_at: int


class _ChangeRow(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    change: Change
    """Without its maps and sets, whose order would not be fixed."""
    seals: list[tuple[int, Seal]]
    ready: list[int]
    left_out: list[tuple[int, Seal | None]]


class _TopicRow(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    format: int
    logical: int
    next_pid: int
    min_version: int
    partitions: list[_PartitionRow]
    published: list[_PublishedRow]
    change: _ChangeRow | None
    left_out: list[int]
    sealed_early: list[tuple[int, Seal]]
    lost: list[DeclareLost]
    given_up: list[int]


_DECODER = msgspec.msgpack.Decoder(_TopicRow)


def pack_state(state: TopicState) -> bytes:
    """Returns the whole state of a topic; equal states give equal bytes."""
    lineage = state.lineage
    return msgspec.msgpack.encode(
        _TopicRow(
            FORMAT,
            state.route.logical,
            state.next_pid,
            lineage.min_version,
            [
                _PartitionRow(*map(partial(getattr, each), _PartitionRow.__struct_fields__))
                for _, each in sorted(lineage.partitions.items())
            ],
            [
                _PublishedRow(each.version, each.change_id, each.kind, each.published_at)
                for _, each in sorted(lineage.published.items())
            ],
            None if state.change is None else _change_row(state.change),
            sorted(state.left_out),
            sorted(state.sealed_early.items()),
            [lost for _, lost in sorted(state.lost.items())],
            sorted(state.given_up),
        )
    )


def _change_row(change: Change) -> _ChangeRow:
    bare = dataclasses.replace(change, seals={}, ready=frozenset(), left_out={})
    return _ChangeRow(
        bare,
        sorted(change.seals.items()),
        sorted(change.ready),
        sorted(change.left_out.items()),
    )


def unpack_state(packed: bytes) -> TopicState:
    """Returns the state of `pack_state`. Raises StorageFault."""
    try:
        row = _DECODER.decode(packed)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise StorageFault(f"not the state of a topic of this release: {error}") from error
    if row.format != FORMAT:
        raise StorageFault(f"the state of a topic has format {row.format}, known is {FORMAT}")
    change = None
    if row.change is not None:
        change = dataclasses.replace(
            row.change.change,
            seals=dict(row.change.seals),
            ready=frozenset(row.change.ready),
            left_out=dict(row.change.left_out),
        )
    return TopicState(
        _lineage(row),
        row.next_pid,
        change,
        set(row.left_out),
        dict(row.sealed_early),
        {lost.pid: lost for lost in row.lost},
        set(row.given_up),
    )


def _lineage(row: _TopicRow) -> Lineage:
    partitions = {each.pid: Partition(**msgspec.structs.asdict(each)) for each in row.partitions}
    published = {
        each.version: Published(each.version, each.change_id, each.kind, each.published_at)
        for each in row.published
    }
    by_range = sorted(partitions.values(), key=lambda each: each.lo)
    latest = Route(
        max(published),
        row.logical,
        tuple(Span(each.lo, each.hi, each.pid) for each in by_range if each.sealed_version is None),
    )
    created: dict[int, tuple[int, ...]] = {}
    sealed: dict[int, tuple[int, ...]] = {}
    for each in by_range:
        born, ended = each.created_version, each.sealed_version
        if born > row.min_version or row.min_version == 0:
            created[born] = (*created.get(born, ()), each.pid)
        if ended is not None and ended > row.min_version:
            sealed[ended] = (*sealed.get(ended, ()), each.pid)
    return Lineage(latest, partitions, published, row.min_version, created, sealed)
