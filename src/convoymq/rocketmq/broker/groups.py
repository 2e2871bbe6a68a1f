"""Groups of consumers: their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import structlog

from convoymq.rocketmq.broker import names
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.settings import BrokerSettings
from convoymq.rocketmq.broker.values import (
    GroupConfig,
    GroupTable,
    changed_attributes,
    enter_deletion,
    learn_deletions,
    next_version,
)
from convoymq.rocketmq.remoting.command import Refusal
from convoymq.rocketmq.remoting.values import DataVersion

log = structlog.get_logger()

FORBIDDEN_READ = 1 << 2
GROUPS_MAX = 100_000
"""Groups that clients make by asking for them; operators may make more."""


class Groups:
    """See the module text. Changes are in the file at the end of the turn of the event loop."""

    def __init__(
        self, settings: Callable[[], BrokerSettings], file: ConfigFile, now_ms: Callable[[], int]
    ) -> None:
        self._settings = settings
        self.file = file
        self._now_ms = now_ms
        found = file.read(GroupTable) or GroupTable()
        self.table = {name: GroupConfig(name) for name in names.SYSTEM_GROUPS}
        self.table.update(found.subscription_group_table)
        self.forbidden = found.forbidden_table
        self.version: DataVersion = found.data_version
        self.deleted = found.deleted
        self.forget: Callable[[str], None] = lambda _: None
        """Called with a group whose deletion was learnt from another replica."""

    def get(self, group: str) -> GroupConfig | None:
        """Returns a group."""
        return self.table.get(group)

    def find(self, group: str) -> GroupConfig | None:
        """Returns a group, made where the settings let clients make groups."""
        found = self.table.get(group)
        if found is not None:
            return found
        settings = self._settings()
        if not settings.auto_create_groups and not group.startswith(names.SYSTEM_GROUP_PREFIX):
            return None
        if len(self.table) >= GROUPS_MAX:
            return None
        try:
            names.check_group(group)
        except Refusal:
            return None
        log.info("rocketmq.group_created", group=group)
        made = self.table[group] = GroupConfig(group)
        self._changed()
        return made

    def content(self) -> GroupTable:
        """Returns all groups, with their version."""
        return GroupTable(self.table, self.forbidden, self.version, self.deleted)

    def update(self, groups: Iterable[GroupConfig]) -> None:
        """Makes or changes groups, whose attributes are changes as those of topics are."""
        for group in groups:
            known = self.table.get(group.group_name)
            attributes = changed_attributes(known.attributes if known else {}, group.attributes)
            self.table[group.group_name] = msgspec.structs.replace(group, attributes=attributes)
        self._changed()

    def delete(self, group: str) -> None:
        """Forgets a group."""
        self.forbidden.pop(group, None)
        if self.table.pop(group, None) is not None:
            log.info("rocketmq.group_deleted", group=group)
            enter_deletion(self.deleted, group, self._now_ms())
            self._changed()

    def may_read(self, group: str, topic: str) -> bool:
        """Returns whether nobody forbade the group to read the topic."""
        return not self.forbidden.get(group, {}).get(topic, 0) & FORBIDDEN_READ

    def set_readable(self, group: str, topic: str, *, readable: bool) -> None:
        """Forbids or allows a group to read a topic."""
        bits = self.forbidden.setdefault(group, {}).get(topic, 0)
        bits = bits & ~FORBIDDEN_READ if readable else bits | FORBIDDEN_READ
        self.forbidden[group][topic] = bits
        if not bits:
            del self.forbidden[group][topic]
        self._changed()

    def replace(self, table: GroupTable) -> None:
        """Takes over what another replica has, deletions as well."""
        for group in learn_deletions(self.deleted, table.deleted):
            log.info("rocketmq.group_deleted", group=group)
            self.forget(group)
        self.table = dict(table.subscription_group_table)
        self.forbidden = dict(table.forbidden_table)
        self.version = table.data_version
        self.file.write_soon(self.content)

    def _changed(self) -> None:
        self.version = next_version(self.version, self._now_ms())
        self.file.write_soon(self.content)
