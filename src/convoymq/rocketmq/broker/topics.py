"""The topics of a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
import structlog

from convoymq.rocketmq.broker import names
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.settings import BrokerSettings
from convoymq.rocketmq.broker.values import (
    PERM_INHERIT,
    changed_attributes,
    enter_deletion,
    learn_deletions,
    next_version,
)
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.command import Refusal
from convoymq.rocketmq.remoting.values import (
    MEMBER_TOPIC_PREFIX,
    PERM_READ,
    PERM_WRITE,
    DataVersion,
    TopicConfig,
    TopicTable,
)

log = structlog.get_logger()

SCHEDULE_QUEUES = 18
READ_WRITE = PERM_READ | PERM_WRITE


def system_topics(settings: BrokerSettings) -> list[TopicConfig]:
    """Returns the topics that every broker has."""
    inherited = PERM_INHERIT | READ_WRITE
    queues = settings.default_topic_queues
    found = [
        TopicConfig(names.SELF_TEST, 1, 1),
        TopicConfig(names.BENCHMARK, 1024, 1024),
        TopicConfig(settings.cluster, 16, 16, inherited if settings.cluster_topic else 1),
        TopicConfig(settings.name, 1, 1, inherited if settings.broker_topic else 1),
        TopicConfig(names.OFFSET_MOVED, 1, 1),
        TopicConfig(names.SCHEDULE_TOPIC, SCHEDULE_QUEUES, SCHEDULE_QUEUES),
        TopicConfig(f"{settings.cluster}_REPLY_TOPIC", 1, 1),
        TopicConfig(
            f"{names.SYSTEM_PREFIX}REVIVE_LOG_{settings.cluster}",
            settings.revive_queues, settings.revive_queues,
        ),
        TopicConfig(MEMBER_TOPIC_PREFIX + settings.name, 1, 1, PERM_INHERIT),
        TopicConfig(names.HALF_TOPIC, 1, 1),
        TopicConfig(names.OP_TOPIC, 1, 1),
    ]  # fmt: skip
    if settings.auto_create_topics:
        found.append(TopicConfig(names.TEMPLATE, queues, queues, inherited))
    if settings.trace_topic:
        found.append(TopicConfig(settings.trace_topic_name, 1, 1))
    if settings.timer_wheel:
        found.append(TopicConfig(names.TIMER_TOPIC, 1, 1))
    return found


class Topics:
    """See the module text. Changes are in the file at the end of the turn of the event loop.

    Attributes:
        changed: called with the topics that were made or changed: name servers are to know.
        forget: called with a topic that was deleted here or at the master, and the end of the log
            at that time: offsets and queues go as well.
    """

    def __init__(
        self, settings: Callable[[], BrokerSettings], file: ConfigFile, now_ms: Callable[[], int]
    ) -> None:
        self.changed: Callable[[list[TopicConfig]], None] = lambda _: None
        self.forget: Callable[[str, int], None] = lambda _topic, _end: None
        self._settings = settings
        self.file = file
        self._now_ms = now_ms
        found = file.read(TopicTable) or TopicTable()
        self.table = {topic.topic_name: topic for topic in system_topics(settings())}
        self.system = frozenset(self.table)
        self.table.update(found.topic_config_table)
        self.version: DataVersion = found.data_version
        self.deleted = found.deleted

    def get(self, topic: str) -> TopicConfig | None:
        """Returns a topic."""
        return self.table.get(topic)

    def is_system(self, topic: str) -> bool:
        """Returns whether a topic is this broker's own."""
        return topic in self.system or names.is_system(topic)

    def content(self) -> TopicTable:
        """Returns all topics, with their version."""
        return TopicTable(self.table, self.version, self.deleted)

    def create(self, topic: TopicConfig) -> TopicConfig:
        """Makes a topic; one that exists is returned as it is."""
        return self.table.get(topic.topic_name) or self._put([topic])

    def create_for_send(
        self, topic: str, template: str, queues: int, system_flag: int
    ) -> TopicConfig | None:
        """Makes a topic as a template has it; None if the template does not exist, or may not be
        inherited from."""
        found = self.table.get(template)
        if found is None or not found.perm & PERM_INHERIT:
            return None
        if template == names.TEMPLATE and not self._settings().auto_create_topics:
            return None
        queues = max(0, min(queues, found.write_queue_nums))
        return self._put([
            TopicConfig(
                topic, queues, queues, found.perm & ~PERM_INHERIT, found.topic_filter_type,
                system_flag,
            )
        ])  # fmt: skip

    def create_for_retry(
        self, topic: str, queues: int, system_flag: int = 0, *, order: bool = False
    ) -> TopicConfig:
        """Makes a topic of messages that come back, or of dead letters."""
        found = self.table.get(topic)
        if found is None:
            return self._put([
                TopicConfig(
                    topic, queues, queues, READ_WRITE, topic_sys_flag=system_flag, order=order
                )
            ])  # fmt: skip
        if found.order != order:
            return self._put([msgspec.structs.replace(found, order=order)])
        return found

    def update(self, topics: Iterable[TopicConfig]) -> None:
        """Makes or changes topics, whose attributes are changes: `+name=value`, `-name`."""
        made = []
        for topic in topics:
            known = self.table.get(topic.topic_name)
            attributes = changed_attributes(known.attributes if known else {}, topic.attributes)
            topic = msgspec.structs.replace(topic, attributes=attributes)
            if topic != known:
                made.append(topic)
        if made:
            self._put(made)

    def set_order(self, ordered: Iterable[str]) -> None:
        """Marks topics as ordered, as a name server's configuration has it."""
        found = [t for name in ordered if (t := self.table.get(name)) and not t.order]
        if found:
            self._put([msgspec.structs.replace(topic, order=True) for topic in found])

    def delete(self, topic: str, log_end: int) -> None:
        """Forgets a topic."""
        if self.table.pop(topic, None) is not None:
            log.info("rocketmq.topic_deleted", topic=topic)
            enter_deletion(self.deleted, topic, log_end)
            self._changed()
        self.forget(topic, log_end)

    def replace(self, table: TopicTable) -> None:
        """Takes over what another replica has, deletions as well."""
        for topic in learn_deletions(self.deleted, table.deleted):
            log.info("rocketmq.topic_deleted", topic=topic)
            self.forget(topic, table.deleted[topic])
        self.table = dict(table.topic_config_table)
        self.version = table.data_version
        self.file.write_soon(self.content)

    def assume(self, queues: Mapping[str, int]) -> None:
        """Enters topics that are known by their messages, without a new version: the master's table
        is newer.

        Args:
            queues: topic -> number of queues.
        """
        for topic, count in queues.items():
            if topic not in self.table and topic not in self.deleted:
                log.info("rocketmq.topic_changed", topic=topic, perm=READ_WRITE)
                self.table[topic] = TopicConfig(topic, count, count, READ_WRITE)
        self.file.write_soon(self.content)

    def begin_life(self, log_end: int) -> None:
        """Lowers ends of the log at deletions to where a master goes on: what comes behind belongs
        to a topic that was made again."""
        beyond = [topic for topic, end in self.deleted.items() if end > log_end]
        if beyond:
            self.deleted.update(dict.fromkeys(beyond, log_end))
            self._changed()

    def touch(self) -> None:
        """Begins a new version: something that is registered with topics has changed."""
        self._changed()

    def _put(self, topics: list[TopicConfig]) -> TopicConfig:
        for topic in topics:
            log.info("rocketmq.topic_changed", topic=topic.topic_name, perm=topic.perm)
            self.table[topic.topic_name] = topic
        self._changed()
        self.changed(topics)
        return topics[0]

    def _changed(self) -> None:
        self.version = next_version(self.version, self._now_ms())
        self.file.write_soon(self.content)


def check_is_writable(topic: TopicConfig) -> None:
    """Raises Refusal for a topic that takes no messages."""
    if not topic.perm & PERM_WRITE:
        raise Refusal(
            Answer.NO_PERMISSION, f"the topic[{topic.topic_name}] sending message is forbidden"
        )
