"""Checks of commands about ordered topics: done once, by the node that proposes them.

A module of its own, which a node without topics does not load.
"""

from __future__ import annotations

from convoymq.metadata.commands import (
    ChangeGroup,
    ChangeTopic,
    CreateGroup,
    CreateTopic,
    SetTopic,
    TopicCommand,
)
from convoymq.metadata.limits import MAX_QUEUES, limit_of
from convoymq.metadata.topic_codec import unpack_group_command, unpack_topic_command
from convoymq.metadata.topic_settings import changed_settings, check_settings
from convoymq.metadata.topics import GROUP_SEPARATOR
from convoymq.metadata.tree import Tree
from convoymq.model.errors import NotServed, PreconditionFailed
from convoymq.model.refusals import partition_limit_reached
from convoymq.routing.types import RESERVED_PREFIX
from convoymq.settings.table import PARTITIONS_MAX
from convoymq.topics.rules.changes import Change, Kind
from convoymq.topics.rules.hashing import check_hash
from convoymq.topics.rules.lineage import Mode
from convoymq.topics.rules.refusals import TooManyPartitions
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import Begin

TOPIC_NAME_BYTES_MAX = 200
"""Names of its partitions' queues are longer, those of its groups as well."""
GROUP_NAME_BYTES_MAX = 54
SERVED_MODES = ("strict", "weak")


def check_topic_command(command: TopicCommand, tree: Tree) -> None:
    """Raises Refused for what no log should have, UnknownCommand for what nobody could apply."""
    match command:
        case CreateTopic():
            _check_topic(command)
            _check_queue_limit(tree, command.vhost, command.name, len(command.partitions))
        case CreateGroup():
            _check_group(command)
        case ChangeTopic():
            topic_command = unpack_topic_command(command.command)
            if isinstance(topic_command, Begin):
                _check_growth(tree, command.vhost, command.name, topic_command.change)
        case ChangeGroup():
            unpack_group_command(command.command)
        case SetTopic():
            record = tree.vhost(command.vhost).topics.get(command.name)
            if record is not None:
                changed_settings(record.settings, command.settings, record.mode)
        case _:
            # The others name things that the tree has, or has not.
            pass


def _check_topic(command: CreateTopic) -> None:
    name = command.name
    size = len(name.encode(errors="replace"))
    if not size or size > TOPIC_NAME_BYTES_MAX:
        raise PreconditionFailed(f"a topic's name has 1 to {TOPIC_NAME_BYTES_MAX} bytes")
    if name.startswith(RESERVED_PREFIX):
        raise PreconditionFailed(f"topic name '{name}' contains reserved prefix 'amq.*'")
    first_route(command.logical, len(command.partitions))
    if len(command.partitions) > PARTITIONS_MAX:
        raise TooManyPartitions(len(command.partitions), PARTITIONS_MAX)
    check_hash(command.hash_id, command.hash_seed)
    if command.mode not in SERVED_MODES:
        raise NotServed(f"topics of mode '{command.mode}' are not served, only: strict, weak")
    check_settings(command.settings, command.mode)


def _check_growth(tree: Tree, vhost: str, name: str, change: Change) -> None:
    """Refuses more partitions than a topic, or its virtual host, may have. Merges and moves are not
    refused: they do not raise the number of partitions that take messages. Raises
    TooManyPartitions, PreconditionFailed."""
    record = tree.vhost(vhost).topics.get(name)
    if record is None or change.kind is not Kind.SPLIT:
        return
    count = len(record.state.route.spans) + len(change.targets) - len(change.sources)
    if count > PARTITIONS_MAX:
        raise TooManyPartitions(count, PARTITIONS_MAX)
    _check_queue_limit(tree, vhost, name, len(change.targets))


def _check_queue_limit(tree: Tree, vhost: str, topic: str, more: int) -> None:
    """Partitions count as queues of their virtual host. Raises PreconditionFailed."""
    place = tree.vhost(vhost)
    limit = limit_of(place.limits, MAX_QUEUES)
    if limit is not None and len(place.queues) + more > limit:
        raise partition_limit_reached(topic, vhost, limit)


def _check_group(command: CreateGroup) -> None:
    name = command.group
    size = len(name.encode(errors="replace"))
    if not size or size > GROUP_NAME_BYTES_MAX or GROUP_SEPARATOR in name:
        raise PreconditionFailed(
            f"a group's name has 1 to {GROUP_NAME_BYTES_MAX} bytes and no '{GROUP_SEPARATOR}'"
        )
    if command.mode not in (mode.value for mode in Mode):
        raise PreconditionFailed(f"a group is linear or dag, not '{command.mode}'")
