"""Checks of commands about ordered topics: done once, by the node that proposes them.

A module of its own, which a node without topics does not load.
"""

from __future__ import annotations

from convoymq.metadata.commands import (
    ChangeGroup,
    ChangeTopic,
    CreateGroup,
    CreateTopic,
    TopicCommand,
)
from convoymq.metadata.topic_codec import unpack_group_command, unpack_topic_command
from convoymq.metadata.topic_settings import check_settings
from convoymq.metadata.topics import GROUP_SEPARATOR
from convoymq.model.errors import NotServed, PreconditionFailed
from convoymq.routing.types import RESERVED_PREFIX
from convoymq.topics.hashing import check_hash
from convoymq.topics.lineage import Mode
from convoymq.topics.routes import first_route

TOPIC_NAME_BYTES_MAX = 200
"""Names of its partitions' queues are longer, those of its groups as well."""
GROUP_NAME_BYTES_MAX = 54
PARTITIONS_MAX = 1024
"""Created in one entry; splits may make more of them."""
SERVED_MODES = ("strict",)


def check_topic_command(command: TopicCommand) -> None:
    """Raises Refused for what no log should have, UnknownCommand for what nobody could apply."""
    match command:
        case CreateTopic():
            _check_topic(command)
        case CreateGroup():
            _check_group(command)
        case ChangeTopic():
            unpack_topic_command(command.command)
        case ChangeGroup():
            unpack_group_command(command.command)
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
        raise PreconditionFailed(f"a topic begins with at most {PARTITIONS_MAX} partitions")
    check_hash(command.hash_id, command.hash_seed)
    check_settings(command.settings)
    if command.mode not in SERVED_MODES:
        raise NotServed(f"topics of mode '{command.mode}' are not served, only: strict")


def _check_group(command: CreateGroup) -> None:
    name = command.group
    size = len(name.encode(errors="replace"))
    if not size or size > GROUP_NAME_BYTES_MAX or GROUP_SEPARATOR in name:
        raise PreconditionFailed(
            f"a group's name has 1 to {GROUP_NAME_BYTES_MAX} bytes and no '{GROUP_SEPARATOR}'"
        )
    if command.mode not in (mode.value for mode in Mode):
        raise PreconditionFailed(f"a group is linear or dag, not '{command.mode}'")
