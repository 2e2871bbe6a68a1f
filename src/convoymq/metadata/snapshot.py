"""The replicated tree as plain values: the body of its snapshots (docs/formats/metadata.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict, TypeVar

import msgspec

from convoymq.metadata.records import (
    Joined,
    NodeRecord,
    PermissionSet,
    QueueRecord,
    Recovery,
    Successor,
    TopicPermission,
    User,
    Vhost,
)
from convoymq.metadata.tree import Tree
from convoymq.model.late_imports import import_late
from convoymq.model.tables import decode_body
from convoymq.replication.ring.views import RingView
from convoymq.routing.policies import Policy
from convoymq.routing.topology import Topology, TopologyState
from convoymq.routing.types import QueueType
from convoymq.settings.values import Setting

if TYPE_CHECKING:
    from convoymq.metadata.topic_codec import TopicRow

FORMAT = 1

Key = TypeVar("Key", int, str, tuple[str, str])
Value = TypeVar("Value")


POLICIES_VERSION = 2
"""The version of the machine since which there are policies and limits."""
TOPICS_VERSION = 3
"""The version of the machine since which there are ordered topics."""
COMPATIBILITY_VERSION = 4
"""The version of the machine since which queues record the release whose rules they follow."""
MIGRATIONS_VERSION = 6
"""The version of the machine since which queues migrate to another type."""
VIEWS_VERSION = 6
"""The version of the machine since which there are rings of mirrored queues."""
ZONES_VERSION = 8
"""The version of the machine since which nodes record their zone and process."""
USERS_VERSION = 9
"""The version of the machine since which exchanges and queues record the user that declared
them."""


class TreeState(TypedDict):
    """The body of a snapshot, as it is read."""

    format: int
    index: int
    version: int
    changes: int
    cluster_id: str
    recoveries: list[Recovery]
    next_group: int
    vhosts: list[tuple[str, str, list[str], str, TopologyState, list[QueueRow]]]
    users: list[tuple[str, str, str, list[str]]]
    permissions: list[tuple[str, str, str, str, str]]
    topic_permissions: list[tuple[str, str, str, str, str]]
    nodes: list[tuple[int, str, int, dict[str, str], str, dict[str, list[int]]]]
    directories: list[tuple[int, str]]
    incarnations: list[tuple[int, int]]
    joins: list[tuple[int, str, int, int, str]]
    forgotten: list[int]
    settings: dict[str, str]
    sessions: list[tuple[int, int, list[list[object]]]]
    policies: NotRequired[list[PolicyRow]]
    vhost_limits: NotRequired[list[tuple[str, dict[str, int]]]]
    user_limits: NotRequired[list[tuple[str, dict[str, int]]]]
    topics: NotRequired[list[TopicRow]]
    compatibility: NotRequired[list[tuple[str, str, list[tuple[str, str, bool]]]]]
    """(virtual host, release for new queues, (queue, release, whether it said its type) …)"""
    views: NotRequired[list[tuple[int, dict[str, object]]]]
    """(group, view)"""
    successors: NotRequired[list[tuple[str, QueueRow, bytes, str]]]
    """(virtual host, queue, its arguments, release) of queues that shall take the place of those
    whose names they have."""
    predecessors: NotRequired[list[tuple[str, str, int]]]
    """(virtual host, queue, group that it had before it was migrated)"""
    zones: NotRequired[list[tuple[int, str, int, int]]]
    """(node, zone, machine, process)"""
    declared_by: NotRequired[list[tuple[str, dict[str, str], dict[str, str]]]]
    """(virtual host, user by exchange, user by queue)"""


QueueRow: TypeAlias = tuple[
    str, int, str, bool, list[int], str | None, int, list[int], tuple[int, int], tuple[int, int]
]

PolicyRow: TypeAlias = tuple[str, bool, str, str, str, int, dict[str, Setting | list[str]]]
"""(virtual host, operator policy, name, pattern, apply-to, priority, definition)"""


def to_builtins(tree: Tree) -> dict[str, object]:
    """Returns all but the sessions, in a fixed order."""
    state = _first_version(tree)
    if tree.version >= POLICIES_VERSION:
        state |= _second_version(tree)
    if tree.version >= TOPICS_VERSION:
        state["topics"] = _topics(tree)
    if tree.version >= COMPATIBILITY_VERSION:
        state["compatibility"] = _compatibility(tree)
    if tree.version >= VIEWS_VERSION:
        state["views"] = [
            [record.group, record.view]
            for _, record in sorted(tree.queue_index.by_group.items(), key=_key)
            if record.view is not None
        ]
    if tree.version >= MIGRATIONS_VERSION:
        state |= _migrations(tree)
    if tree.version >= ZONES_VERSION:
        state["zones"] = [[n.id, n.zone, n.machine, n.process] for n in _sorted_values(tree.nodes)]
    if tree.version >= USERS_VERSION:
        state["declared_by"] = [
            [
                vhost.name,
                {each.name: each.user for each in vhost.topology.exchanges() if each.user},
                {each.name: each.user for each in vhost.topology.queues() if each.user},
            ]
            for vhost in _sorted_values(tree.vhosts)
        ]
    return state


def _migrations(tree: Tree) -> dict[str, object]:
    places = _sorted_values(tree.vhosts)
    return {
        "successors": [
            [
                vhost.name,
                _row(successor.record),
                successor.declared.arguments.encoded,
                successor.record.compatibility,
            ]
            for vhost in places
            for successor in _sorted_values(vhost.successors)
        ],
        "predecessors": [
            [vhost.name, record.name, record.predecessor]
            for vhost in places
            for record in _sorted_values(vhost.queues)
            if record.predecessor
        ],
    }


def _compatibility(tree: Tree) -> list[list[object]]:
    return [
        [
            vhost.name,
            vhost.compatibility,
            [
                [record.name, record.compatibility, record.type_given]
                for record in _sorted_values(vhost.queues)
                if record.compatibility or record.type_given
            ],
        ]
        for vhost in _sorted_values(tree.vhosts)
    ]


def _topics(tree: Tree) -> list[TopicRow]:
    if not any(vhost.topics for vhost in tree.vhosts.values()):
        return []
    from convoymq.metadata.topic_codec import to_row

    return [
        to_row(topic)
        for vhost in _sorted_values(tree.vhosts)
        for topic in _sorted_values(vhost.topics)
    ]


def _second_version(tree: Tree) -> dict[str, object]:
    return {
        "policies": [
            [
                vhost.name,
                operator,
                each.name,
                each.pattern,
                each.apply_to,
                each.priority,
                dict(sorted(each.definition.items())),
            ]
            for vhost in _sorted_values(tree.vhosts)
            for operator in (False, True)
            for each in vhost.policies.of(operator=operator)
        ],
        "vhost_limits": [
            [vhost.name, dict(sorted(vhost.limits.items()))]
            for vhost in _sorted_values(tree.vhosts)
            if vhost.limits
        ],
        "user_limits": [
            [user, dict(sorted(limits.items()))]
            for user, limits in sorted(tree.user_limits.items(), key=_key)
        ],
    }


def _first_version(tree: Tree) -> dict[str, object]:
    return {
        "format": FORMAT,
        "index": tree.applied_index,
        "version": tree.version,
        "changes": tree.change_count,
        "cluster_id": tree.cluster_id,
        "recoveries": tree.recoveries,
        "next_group": tree.next_group,
        "vhosts": [
            [
                v.name,
                v.description,
                v.tags,
                v.default_queue_type,
                v.topology.to_builtins(),
                [_row(record) for record in _sorted_values(v.queues)],
            ]
            for v in _sorted_values(tree.vhosts)
        ],
        "users": [
            [u.name, u.password_hash, u.algorithm, u.tags] for u in _sorted_values(tree.users)
        ],
        "permissions": [
            [user, vhost, p.configure, p.write, p.read]
            for (user, vhost), p in sorted(tree.permissions.items(), key=_key)
        ],
        "topic_permissions": [
            [user, vhost, exchange, p.write, p.read]
            for (user, vhost), rules in sorted(tree.topic_permissions.items(), key=_key)
            for exchange, p in sorted(rules.items(), key=_key)
        ],
        "nodes": [
            [
                n.id,
                n.name,
                n.incarnation,
                dict(sorted(n.addresses.items())),
                n.release,
                dict(sorted(n.supports.items())),
            ]
            for n in (tree.nodes[i] for i in sorted(tree.nodes))
        ],
        "directories": sorted(tree.directories.items()),
        "incarnations": sorted(tree.incarnations.items()),
        "joins": [
            [node, j.directory, j.asked, j.granted, j.role]
            for node, j in sorted(tree.joins.items(), key=_key)
        ],
        "forgotten": sorted(tree.forgotten),
        "settings": dict(sorted(tree.settings.items())),
    }


def fill(tree: Tree, raw: TreeState) -> None:
    """Puts what `to_builtins` returned into an empty tree."""
    tree.applied_index = raw["index"]
    tree.change_count = raw["changes"]
    tree.cluster_id = raw["cluster_id"]
    tree.recoveries = raw["recoveries"]
    tree.next_group = raw["next_group"]
    for name, description, tags, default_type, topology, queues in raw["vhosts"]:
        vhost = Vhost(
            name, Topology.from_builtins(topology), description, tuple(tags), default_type
        )
        for queue_row in queues:
            record = _record(name, queue_row)
            vhost.queues[record.name] = record
            tree.queue_index.put(record)
        tree.vhosts[name] = vhost
    for name, password_hash, algorithm, tags in raw["users"]:
        tree.users[name] = User(
            name=name, password_hash=password_hash, algorithm=algorithm, tags=tuple(tags)
        )
    for user, where, configure, write, read in raw["permissions"]:
        tree.permissions[user, where] = PermissionSet(configure=configure, write=write, read=read)
    for user, where, exchange, write, read in raw["topic_permissions"]:
        rules = tree.topic_permissions.setdefault((user, where), {})
        rules[exchange] = TopicPermission(write=write, read=read)
    for node, name, incarnation, addresses, release, supports in raw["nodes"]:
        tree.nodes[node] = NodeRecord(
            id=node,
            name=name,
            incarnation=incarnation,
            addresses=addresses,
            release=release,
            supports=_ranges(supports),
            machine=node,
        )
    for node, zone, machine, process in raw.get("zones", ()):
        known = tree.nodes[node]
        tree.nodes[node] = replace(known, zone=zone, machine=machine, process=process)
    for vhost_name, *users in raw.get("declared_by", ()):
        tree.vhosts[vhost_name].topology.set_users(*users)
    tree.directories = dict(raw["directories"])
    tree.incarnations = dict(raw["incarnations"])
    for node, directory, asked, granted, role in raw["joins"]:
        tree.joins[node] = Joined(directory=directory, asked=asked, granted=granted, role=role)
    tree.forgotten = set(raw["forgotten"])
    tree.settings = raw["settings"]
    for row in raw.get("policies", ()):
        _fill_policy(tree, row)
    for vhost_name, limits in raw.get("vhost_limits", ()):
        tree.vhosts[vhost_name].limits = limits
    tree.user_limits = dict(raw.get("user_limits", ()))
    _fill_topics(tree, raw.get("topics", []))
    for vhost_name, release, rows in raw.get("compatibility", ()):
        _fill_compatibility(tree, tree.vhosts[vhost_name], release, rows)
    _fill_migrations(tree, raw)
    for group, view in raw.get("views", ()):
        _put(tree, replace(tree.queue_index.by_group[group], view=msgspec.convert(view, RingView)))


def _fill_policy(tree: Tree, row: PolicyRow) -> None:
    vhost_name, operator, name, pattern, apply_to, priority, definition = row
    settings = {
        key: tuple(value) if isinstance(value, list) else value for key, value in definition.items()
    }
    policy = Policy(
        name=name, pattern=pattern, definition=settings, apply_to=apply_to, priority=priority
    )
    tree.vhosts[vhost_name].policies.put(policy, operator=operator)


def _row(record: QueueRecord) -> list[object]:
    return [
        record.name,
        record.group,
        record.type.value,
        record.durable,
        record.members,
        record.owner,
        record.created_ms,
        record.joined,
        record.config,
        record.founder,
    ]


def _record(vhost: str, row: QueueRow) -> QueueRecord:
    name, group, kind, durable, members, owner, created, joined, config, founder = row
    return QueueRecord(
        vhost=vhost,
        name=name,
        group=group,
        type=QueueType(kind),
        durable=durable,
        members=tuple(members),
        owner=owner,
        created_ms=created,
        joined=tuple(joined),
        config=(config[0], config[1]),
        founder=(founder[0], founder[1]),
    )


def _fill_migrations(tree: Tree, raw: TreeState) -> None:
    for vhost_name, name, group in raw.get("predecessors", ()):
        _put(tree, replace(tree.vhosts[vhost_name].queues[name], predecessor=group))
    for vhost_name, row, arguments, release in raw.get("successors", ()):
        vhost = tree.vhosts[vhost_name]
        made = _record(vhost_name, row)
        record = replace(
            made,
            compatibility=release,
            type_given=True,
            predecessor=vhost.queues[made.name].group,
        )
        declared = vhost.topology.find_queue(made.name)
        assert declared is not None
        queue = replace(declared, type=made.type, arguments=decode_body(arguments))
        vhost.successors[made.name] = Successor(record=record, declared=queue)
        tree.queue_index.put(record)


def _fill_compatibility(
    tree: Tree, vhost: Vhost, release: str, rows: list[tuple[str, str, bool]]
) -> None:
    vhost.compatibility = release
    for name, compatibility, type_given in rows:
        record = vhost.queues[name]
        _put(tree, replace(record, compatibility=compatibility, type_given=type_given))


def _put(tree: Tree, record: QueueRecord) -> None:
    tree.vhosts[record.vhost].replace_record(record)
    tree.queue_index.put(record)


def _fill_topics(tree: Tree, rows: list[TopicRow]) -> None:
    if not rows:
        return
    import_late("convoymq.metadata.topic_codec")
    from convoymq.metadata.topic_codec import from_row

    for row in rows:
        record = from_row(row)
        tree.vhosts[record.vhost].topics[record.name] = record


def _ranges(raw: dict[str, list[int]]) -> dict[str, tuple[int, int]]:
    return {kind: (lowest, highest) for kind, (lowest, highest) in raw.items()}


def _key(item: tuple[Key, object]) -> Key:
    return item[0]


def _sorted_values(table: Mapping[Key, Value]) -> list[Value]:
    return [table[key] for key in sorted(table)]
