"""Names of ordered topics, their partitions and their groups, and the arguments of partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from convoymq.metadata.records import TopicRecord, Vhost
from convoymq.metadata.topic_settings import PARTITION_SETTINGS
from convoymq.model.errors import NotFound, PreconditionFailed
from convoymq.model.tables import Table
from convoymq.settings.values import Setting

if TYPE_CHECKING:
    from convoymq.metadata.tree import Tree
    from convoymq.topics.rules.group import GroupState
    from convoymq.topics.rules.routes import Span

PARTITION_PREFIX = "amq.partition."
PARTITION_TYPE = "partition"
"""Type of a partition's queue."""
GROUP_SEPARATOR = "/"
"""Between the names of a topic and of a group, in the name by which clients consume."""


def partition_queue_name(topic: str, pid: int) -> str:
    """Returns the name of the queue that a partition is."""
    return f"{PARTITION_PREFIX}{topic}.{pid}"


def place_of_partition(queue: str) -> tuple[str, int]:
    """Returns the topic and the number of a partition, by the name of its queue."""
    topic, _, pid = queue.removeprefix(PARTITION_PREFIX).rpartition(".")
    return topic, int(pid)


def partition_arguments(
    topic: str, span: Span, version: int, settings: Mapping[str, Setting]
) -> Table:
    """Returns the arguments of the queue of a partition that a route version brings.

    Args:
        settings: of the topic.
    """
    own = {f"x-{name}": settings[name] for name in PARTITION_SETTINGS if name in settings}
    return Table.of(
        {
            "x-queue-type": PARTITION_TYPE,
            "x-partition-topic": topic,
            "x-partition-pid": span.pid,
            "x-partition-lo": span.lo,
            "x-partition-hi": span.hi,
            "x-partition-version": version,
            **own,
        }
    )


def find_topic(tree: Tree, vhost: str, name: str) -> TopicRecord | None:
    """Returns a topic; None when it, or its virtual host, does not exist."""
    place = tree.vhosts.get(vhost)
    return None if place is None else place.topics.get(name)


def get_topic(tree: Tree, vhost: str, name: str) -> TopicRecord:
    """Returns a topic. Raises NotFound."""
    record = tree.vhost(vhost).topics.get(name)
    if record is None:
        raise NotFound(f"no topic '{name}' in vhost '{vhost}'")
    return record


def get_group(record: TopicRecord, group: str) -> GroupState:
    """Returns a group of a topic. Raises NotFound."""
    state = record.groups.get(group)
    if state is None:
        raise NotFound(f"no group '{group}' of topic '{record.name}' in vhost '{record.vhost}'")
    return state


def topic_of_group(vhost: Vhost, name: str) -> tuple[TopicRecord, str] | None:
    """Returns the topic and the group that a queue name stands for; None for other names."""
    topic, separator, group = name.rpartition(GROUP_SEPARATOR)
    record = vhost.topics.get(topic) if separator else None
    return None if record is None or not group else (record, group)


def check_no_topic(vhost: Vhost, name: str) -> None:
    """Refuses a queue that would be named like a topic or a group of one. Raises
    PreconditionFailed."""
    if name in vhost.topics:
        raise PreconditionFailed(
            f"{topic_subject(vhost, name)} exists: a queue cannot have its name"
        )
    found = topic_of_group(vhost, name)
    if found is not None:
        raise PreconditionFailed(
            f"'{name}' names a group of {topic_subject(vhost, found[0].name)}: a queue cannot have "
            "that name"
        )


def topic_subject(vhost: Vhost, topic: str) -> str:
    """Names a topic in texts."""
    return f"topic '{topic}' in vhost '{vhost.name}'"
