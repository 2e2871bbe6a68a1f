"""Offsets of groups of consumers.

A slave keeps the offsets that clients commit at it as *unsent* until a master has them (ADR 0230).
Of two replicas' offsets of a queue the one that operators set more often counts, else the larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.names import GIVEN_PREFIX, SYSTEM_GROUP_PREFIX
from convoymq.rocketmq.broker.values import OffsetTable, next_version
from convoymq.rocketmq.remoting.values import DataVersion


class Offsets:
    """See the module text. `persist` writes the file.

    Args:
        version_step: commits between two versions.
        is_slave: commits of clients are kept as unsent.
    """

    def __init__(
        self, file: ConfigFile, version_step: int, now_ms: Callable[[], int], *,
        is_slave: bool = False,
    ) -> None:  # fmt: skip
        self._file = file
        self._is_slave = is_slave
        self._version_step = version_step
        self._now_ms = now_ms
        self._commits = 0
        self._is_changed = False
        found = file.read(OffsetTable) or OffsetTable()
        self.table = found.offset_table
        self.version: DataVersion = found.data_version
        self._counts = found.resets
        self.unsent = found.unsent if is_slave else {}
        self._resets: dict[str, dict[int, int]] = {}
        """Offsets that operators set, until a consumer has been told."""
        self.on_commit: Callable[[str, str, int, int], None] | None = None
        """Called with group, topic, queue and an offset that another one was before."""

    def commit(
        self, group: str, topic: str, queue: int, offset: int, *, is_logged: bool = False
    ) -> None:
        """Enters how far a group is. `is_logged`: all replicas find it in their logs."""
        self._enter(group, topic, queue, offset)
        if self._is_slave and not (is_logged or group.startswith(SYSTEM_GROUP_PREFIX)):
            self.unsent.setdefault(f"{topic}@{group}", {})[queue] = offset
        self._commits += 1
        if self._commits % self._version_step == 0:
            self.version = next_version(self.version, self._now_ms())

    def learn_given(self, group: str, topic: str, queue: int, offset: int, end: int) -> None:
        """Enters the offset behind the last message that pops of another replica gave out; each one
        once, because an operator may reset the group afterwards. `end`: of the queue here."""
        learned = self.table.setdefault(f"{topic}@{GIVEN_PREFIX}{group}", {})
        if offset > learned.get(queue, -1):
            learned[queue] = offset
            self._is_changed = True
            if min(offset, end) > max(0, self.get(group, topic, queue)):
                self.commit(group, topic, queue, min(offset, end), is_logged=True)

    def begin_acting(self) -> None:
        """Begins a new version: RocketMQ's master that returns takes over what is not older, and
        its own is of its start if it was killed before it wrote its file."""
        self.version = next_version(self.version, self._now_ms())

    def get(self, group: str, topic: str, queue: int) -> int:
        """Returns how far a group is; -1: nowhere."""
        key = f"{topic}@{group}"
        reset = self._resets.get(key)
        if reset is not None and queue in reset:
            return reset[queue]
        return self.table.get(key, {}).get(queue, -1)

    def of(self, group: str, topic: str) -> dict[int, int]:
        """Returns the offsets of a group by queue."""
        return self.table.get(f"{topic}@{group}", {})

    def reset(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Sets an offset that the next pull is sent to."""
        self._resets.setdefault(f"{topic}@{group}", {})[queue] = offset
        self._set(f"{topic}@{group}", queue, offset)

    def _set(self, key: str, queue: int, offset: int) -> None:
        topic, _, group = key.partition("@")
        self._enter(group, topic, queue, offset)
        self._counts.setdefault(key, {})[queue] = self._count(key, queue) + 1

    def _count(self, key: str, queue: int) -> int:
        return self._counts.get(key, {}).get(queue, 0)

    def _enter(self, group: str, topic: str, queue: int, offset: int) -> None:
        known = self.table.setdefault(f"{topic}@{group}", {})
        if self.on_commit is not None and known.get(queue) != offset:
            self.on_commit(group, topic, queue, offset)
        known[queue] = offset
        self._is_changed = True

    def has_reset(self, group: str, topic: str, queue: int) -> bool:
        """Returns whether a consumer still has to be told of an offset."""
        return queue in self._resets.get(f"{topic}@{group}", ())

    def take_reset(self, group: str, topic: str, queue: int) -> int | None:
        """Returns the offset that a consumer is to be told, once."""
        if not self._resets:
            return None
        found = self._resets.get(f"{topic}@{group}")
        return None if found is None else found.pop(queue, None)

    def clone(self, source: str, target: str, topic: str) -> None:
        """Gives a group the offsets of another one."""
        found = self.table.get(f"{topic}@{source}")
        if found is not None:
            for queue, offset in found.items():
                self._set(f"{topic}@{target}", queue, offset)

    def topics_of(self, group: str) -> list[str]:
        """Returns topics that a group has offsets of."""
        return [topic for topic, found in self._keys() if found == group]

    def groups_of(self, topic: str) -> list[str]:
        """Returns groups that have offsets of a topic."""
        return [group for found, group in self._keys() if found == topic]

    def _keys(self) -> Iterable[tuple[str, str]]:
        for key in self.table:
            topic, _, group = key.partition("@")
            # A deletion does not end what was learned: other brokers keep the keys.
            if not group.startswith(GIVEN_PREFIX):
                yield topic, group

    def delete_topic(self, topic: str) -> None:
        """Forgets all about a topic."""
        self._delete(lambda found, _: found == topic)

    def delete_group(self, group: str) -> None:
        """Forgets all about a group."""
        self._delete(lambda _, found: found == group)

    def _delete(self, is_gone: Callable[[str, str], bool]) -> None:
        for topic, group in list(self._keys()):
            if is_gone(topic, group):
                key = f"{topic}@{group}"
                for table in (self.table, self._resets, self._counts, self.unsent):
                    table.pop(key, None)
                self._is_changed = True

    def content(self) -> OffsetTable:
        """Returns all offsets, with their version."""
        return OffsetTable(self.table, self.version, self._counts, self.unsent)

    @property
    def commits(self) -> int:
        """Returns the number of commits since the start."""
        return self._commits

    def replace(self, table: OffsetTable) -> None:
        """Takes over what a master has, as RocketMQ's slaves do: offsets that only this replica has
        are kept."""
        for source, own in (
            (table.offset_table, self.table), (table.resets, self._counts),
            (self.unsent, self.table),
        ):  # fmt: skip
            for key, offsets in source.items():
                own.setdefault(key, {}).update(offsets)
        self.version = table.data_version
        self._is_changed = True

    def merge(self, table: OffsetTable, end: Callable[[str, int], int] | None = None) -> None:
        """Takes over what another replica has.

        Args:
            end: returns the end of a queue here. A slave passes it, whose log may lack messages of
                the other one's: the next message gets their offset.
        """
        for key, offsets in table.offset_table.items():
            topic, _, group = key.partition("@")
            own, unsent = self.table.setdefault(key, {}), table.unsent.get(key, {})
            for queue, offset in offsets.items():
                if end is not None and not group.startswith(SYSTEM_GROUP_PREFIX):
                    offset = min(offset, end(topic, queue))
                count = table.resets.get(key, {}).get(queue, 0)
                if (count, offset) > (self._count(key, queue), own.get(queue, -1)):
                    own[queue] = offset
                    if count:
                        self._counts.setdefault(key, {})[queue] = count
                    self._commits += 1
                    if self._is_slave and queue in unsent:
                        self.unsent.setdefault(key, {})[queue] = offset
        self.version = max(self.version, table.data_version, key=_order)
        self._is_changed = True

    def to_send(self) -> OffsetTable:
        """Returns the unsent offsets."""
        found = {key: dict(offsets) for key, offsets in self.unsent.items()}
        return OffsetTable(found, self.version, self._counts)

    def sent(self, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """A master has these unsent offsets."""
        for key, found in offsets.items():
            own = self.unsent.get(key, {})
            for queue, offset in found.items():
                if own.get(queue) == offset:
                    del own[queue]
            if not own:
                self.unsent.pop(key, None)
        self._is_changed = True

    def limit_unsent(self, end: Callable[[str, int], int]) -> None:
        """The end of the log was cut: no unsent offset is behind the end of its queue. The master
        has, or will have, other messages there. Raises StorageFault."""
        for key, offsets in self.unsent.items():
            topic = key.partition("@")[0]
            for queue, offset in offsets.items():
                if offset > end(topic, queue):
                    offsets[queue] = end(topic, queue)
                    self._is_changed = True
        self.persist()

    def persist(self) -> None:
        """Writes the file if something has changed. Raises StorageFault."""
        if self._is_changed:
            self._file.write(self.content())
            self._is_changed = False


def _order(version: DataVersion) -> tuple[int, int, int]:
    return version.state_version, version.counter, version.timestamp
