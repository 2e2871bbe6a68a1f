"""A node's handles of topics, made when somebody publishes, and told what the tree says."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from convoymq.broker.local_queues import LocalQueues
from convoymq.metadata.machine import Change, ChangeKind, MetadataMachine, TopicRecord
from convoymq.metadata.topics import partition_queue_name
from convoymq.model.late_imports import import_late
from convoymq.queues.group_queue import FlowLimits
from convoymq.queues.interface import Queue

if TYPE_CHECKING:
    from convoymq.broker.topics.handle import TopicHandle


class LocalTopics:
    """See the module text. One per node."""

    def __init__(self, tree: MetadataMachine, local: LocalQueues) -> None:
        self._tree = tree
        self._local = local
        self._handles: dict[tuple[str, str], TopicHandle] = {}
        self._made = 0

    def find(self, vhost: str, name: str) -> TopicHandle | None:
        """Returns the handle of a topic; None when there is none."""
        record = self._record(vhost, name)
        if record is None:
            return None
        handle = self._handles.get((vhost, name))
        if handle is None or not _is_same(handle.record, record):
            if handle is not None:
                handle.on_deleted()
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
            handle.on_deleted()

    def _record(self, vhost: str, name: str) -> TopicRecord | None:
        place = self._tree.vhosts.get(vhost)
        return None if place is None else place.topics.get(name)

    def _make(self, record: TopicRecord) -> TopicHandle:
        import_late("convoymq.broker.topics.handle")
        from convoymq.broker.topics.handle import TopicHandle

        self._made += 1
        local = self._local
        return TopicHandle(
            record,
            -self._made,
            clock=local.clock,
            limits=local.limits or FlowLimits(),
            new_session=local.new_session,
            find_partition=partial(self._partition, record.vhost, record.name),
        )

    def _partition(self, vhost: str, topic: str, pid: int) -> Queue | None:
        place = self._tree.vhosts.get(vhost)
        record = None if place is None else place.queues.get(partition_queue_name(topic, pid))
        return None if record is None else self._local.find(record)


def _is_same(known: TopicRecord, found: TopicRecord) -> bool:
    """Returns whether both describe one topic: after a snapshot it has another record."""
    return known is found or (
        (known.created_ms, known.hash_seed, known.logical)
        == (found.created_ms, found.hash_seed, found.logical)
        and known.state.route.version <= found.state.route.version
    )
