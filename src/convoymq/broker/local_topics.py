"""A node's handles of topics, made when somebody publishes, and told what the tree says."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from convoymq.broker.local_queues import LocalQueues
from convoymq.metadata.machine import Change, ChangeKind, MetadataMachine, TopicRecord
from convoymq.metadata.topics import find_topic, partition_queue_name
from convoymq.model.late_imports import import_late
from convoymq.queues.interface import Queue

if TYPE_CHECKING:
    from convoymq.topics.shell.handle import TopicHandle


class LocalTopics:
    """See the module text. One per node."""

    def __init__(self, tree: MetadataMachine, local: LocalQueues) -> None:
        self._tree = tree
        self._local = local
        self._handles: dict[tuple[str, str], TopicHandle] = {}
        self._made = 0
        self._gone: list[tuple[int, int, int]] = []
        """Publishes sent again, pauses and their ms of handles that are no more, summed up."""

    def find(self, vhost: str, name: str) -> TopicHandle | None:
        """Returns the handle of a topic; None when there is none."""
        record = self._record(vhost, name)
        if record is None:
            return None
        handle = self._handles.get((vhost, name))
        if handle is None or not _is_same(handle.record, record):
            if handle is not None:
                self._retire(handle)
            handle = self._handles[vhost, name] = self._make(record)
        return handle

    def handles(self) -> list[TopicHandle]:
        """Returns those that were made."""
        return list(self._handles.values())

    def on_change(self, change: Change) -> None:
        """Takes note of a change of the tree."""
        if not self._handles or self._local.is_behind:
            return
        if change.kind is ChangeKind.RESTORED:
            for vhost, name in list(self._handles):
                self._follow(vhost, name)
        elif change.kind is ChangeKind.TOPIC:
            self._follow(change.vhost, change.topic)

    def _follow(self, vhost: str, name: str) -> None:
        handle = self._handles.get((vhost, name))
        if handle is None:
            return
        record = self._record(vhost, name)
        if record is not None and _is_same(handle.record, record):
            handle.follow(record)
        else:
            del self._handles[vhost, name]
            self._retire(handle)

    def _retire(self, handle: TopicHandle) -> None:
        handle.on_deleted()
        self._gone = [_sums([*self._gone, _counts_of(handle)])]

    def publish_counts(self) -> tuple[int, int, int]:
        """Returns how many publishes of this node's clients a partition refused, so that they were
        sent to the next one; how often a range of keys stood still at a change, and for how many ms
        in all."""
        return _sums([*self._gone, *map(_counts_of, self._handles.values())])

    def _record(self, vhost: str, name: str) -> TopicRecord | None:
        return find_topic(self._tree, vhost, name)

    def _make(self, record: TopicRecord) -> TopicHandle:
        import_late("convoymq.topics.shell.handle")
        from convoymq.topics.shell.handle import TopicHandle

        self._made += 1
        local = self._local
        return TopicHandle(
            record,
            -self._made,
            clock=local.clock,
            limits=local.limits,
            budget=local.budget,
            new_session=local.new_session,
            find_partition=partial(self._partition, record.vhost, record.name),
        )

    def _partition(self, vhost: str, topic: str, pid: int) -> Queue | None:
        place = self._tree.vhosts.get(vhost)
        record = None if place is None else place.queues.get(partition_queue_name(topic, pid))
        return None if record is None else self._local.find(record)


def _counts_of(handle: TopicHandle) -> tuple[int, int, int]:
    pauses = handle.pauses
    return handle.sent_again, pauses.count, pauses.total_ms


def _sums(rows: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    sent_again = pauses = paused_ms = 0
    for row in rows:
        sent_again, pauses, paused_ms = sent_again + row[0], pauses + row[1], paused_ms + row[2]
    return sent_again, pauses, paused_ms


def _is_same(known: TopicRecord, found: TopicRecord) -> bool:
    """Returns whether both describe one topic: after a snapshot it has another record."""
    return known is found or (
        (known.created_ms, known.hash_seed, known.logical)
        == (found.created_ms, found.hash_seed, found.logical)
        and known.state.route.version <= found.state.route.version
    )
