"""Rows of the trace of topics (ADR 0071): what the metadata group decides about routes and groups.

One trace for all topics of the virtual hosts that are traced, under the name
`model.trace.TOPICS_QUEUE`. A topic is a number here (`topic_id`); groups and members are the hashes
of their names, and NAME rows say what the names are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from convoymq.kernels.trace import TraceRows, name_hash
from convoymq.metadata.records import TopicRecord, Vhost
from convoymq.metadata.topic_settings import WEAK
from convoymq.metadata.topics import partition_queue_name
from convoymq.model import trace as words
from convoymq.topics.rules.group import (
    Advance,
    Grant,
    GroupCommand,
    GroupState,
    Owner,
    Recover,
    Release,
    Seek,
    Skip,
)
from convoymq.topics.rules.lineage import Mode
from convoymq.topics.rules.topic import DeclareLost, Delete, Publish, TopicCommand

NAME_BYTES_MAX = 64
"""A longer name is cut."""
_UNSIGNED = (1 << 64) - 1


def topic_id(record: TopicRecord) -> int:
    """Returns the number of a topic in the trace: another one when it is created again."""
    return name_hash(f"{record.vhost}\0{record.name}\0{record.created_ms}".encode())


@dataclass(slots=True)
class TopicTrace:
    """Writes the rows of one node's metadata machine."""

    vhosts: Collection[str]
    trace: TraceRows | None = None
    """The rows, while they are recorded."""
    entry: bytes = b""
    """The entry that is being applied, until a row of it is written."""

    def wants(self, vhost: str) -> bool:
        """Returns whether what happens to a topic is to be told."""
        return self.trace is not None and vhost in self.vhosts

    def restored(self, vhosts: Collection[Vhost], index: int) -> None:
        """The tree was replaced: what led there is not recorded here."""
        traced = any(vhost.topics for vhost in vhosts if vhost.name in self.vhosts)
        if self.trace is not None and traced:
            self.trace.restored(index)

    # --- topics ----------------------------------------------------------------------------

    def created(self, vhost: Vhost, record: TopicRecord) -> None:
        """A topic exists, with its first route."""
        topic = topic_id(record)
        self._name(topic, record.name)
        flags = words.WEAK if record.mode == WEAK else 0
        self._add(
            words.TOPIC, topic, record.logical, record.hash_seed, record.created_ms, flags=flags
        )
        self._route(vhost, record)

    def deleted(self, record: TopicRecord) -> None:
        """A topic is gone."""
        self._add(words.TOPIC, topic_id(record), 0, 0, 0, flags=words.GROUP_GONE)

    def changed(self, vhost: Vhost, record: TopicRecord, command: TopicCommand) -> None:
        """A command of a topic was applied."""
        if isinstance(command, Publish):
            self._route(vhost, record)
        elif isinstance(command, DeclareLost):
            self._add(words.GIVEN_UP, topic_id(record), command.pid, 0, 0)
        elif isinstance(command, Delete):
            for pid in sorted(command.expired):
                if record.state.lineage.partitions[pid].is_deleted:
                    self._add(words.GIVEN_UP, topic_id(record), pid, flags=words.GROUP_GONE)

    def _route(self, vhost: Vhost, record: TopicRecord) -> None:
        """The ranges of the newest version."""
        lineage = record.state.lineage
        route = lineage.latest
        for span in route.spans:
            queue = vhost.queues.get(partition_queue_name(record.name, span.pid))
            self._add(
                words.RANGE,
                topic_id(record),
                span.pid,
                route.version,
                span.lo,
                span.hi - span.lo,
                0 if queue is None else queue.group,
                lineage.partitions[span.pid].created_version,
            )

    # --- groups ----------------------------------------------------------------------------

    def group_created(self, record: TopicRecord, group: GroupState) -> None:
        """A consumer group exists."""
        self._name(self._hash(group.name), group.name)
        mode = 1 if group.mode is Mode.DAG else 0
        self._add(
            words.GROUP,
            topic_id(record),
            group.cv,
            self._hash(group.name),
            mode,
            0,
            group.group_epoch,
        )

    def group_deleted(self, record: TopicRecord, group: str) -> None:
        """A consumer group is gone."""
        self._add(words.GROUP, topic_id(record), 0, self._hash(group), 0, 0, flags=words.GROUP_GONE)

    def group_changed(
        self, record: TopicRecord, group: GroupState, command: GroupCommand, owner: Owner | None
    ) -> None:
        """A command of a group was applied. `owner`: of the command's partition, before it."""
        topic, name = topic_id(record), self._hash(group.name)
        match command:
            case Grant(pid, member):
                node, _, _ = member.partition("-")
                epoch = group.lease_epochs[pid]
                known = int(node) if node.isdecimal() else 0
                self._add(
                    words.GRANTED, topic, pid, name, self._hash(member), epoch,
                    group.group_epoch, known,
                )  # fmt: skip
            case Release(pid, epoch, expired) if owner is not None:
                flags = words.BY_TIME if expired else 0
                self._add(
                    words.RELEASED, topic, pid, name, self._hash(owner.member), epoch,
                    owner.group_epoch, flags=flags,
                )  # fmt: skip
            case Advance(group_epoch, expect, to):
                self._add(words.ADVANCED, topic, to, name, expect, 0, group_epoch)
            case Skip(pid, group_epoch):
                self._add(words.SKIPPED, topic, pid, name, 0, 0, group_epoch)
            case Recover(pid, group_epoch):
                gone = words.GROUP_GONE
                self._add(words.SKIPPED, topic, pid, name, 0, 0, group_epoch, flags=gone)
            case Seek(_, version):
                self._add(words.SOUGHT, topic, version, name, 0, 0, group.group_epoch)
            case _:
                pass

    # --- rows ------------------------------------------------------------------------------

    @staticmethod
    def _hash(name: str) -> int:
        return name_hash(name.encode())

    def _name(self, number: int, name: str) -> None:
        raw = name.encode()[:NAME_BYTES_MAX]
        padded = raw.ljust(NAME_BYTES_MAX, b"\0")
        parts = [
            int.from_bytes(padded[at : at + 8], "little", signed=True)
            for at in range(0, NAME_BYTES_MAX, 8)
        ]
        self._add(words.NAME, number, len(raw), *parts)

    def _add(
        self, kind: int, topic: int, consumer: int, seq: int = 0, first: int = 0, count: int = 0,
        at: int = 0, command: int = 0, place: int = 0, acquired: int = 0, delivered: int = 0,
        *, flags: int = 0,
    ) -> None:  # fmt: skip
        """A row of the entry that is being applied."""
        rows = self.trace
        if rows is None:
            return
        if self.entry:
            rows.begin_entry(self.entry)
            self.entry = b""
        rows.add(
            kind, flags, 0, topic & _UNSIGNED, consumer, seq, first, count, at, command, place,
            acquired, delivered,
        )  # fmt: skip
