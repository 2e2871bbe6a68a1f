"""The state of the replicated tree: tables, which the rules of each subject change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from convoymq.metadata.index import QueueIndex
from convoymq.metadata.placement import Place
from convoymq.metadata.records import (
    Change,
    ChangeKind,
    Joined,
    NodeRecord,
    PermissionSet,
    QueueRecord,
    Recovery,
    TopicPermission,
    User,
    Vhost,
)
from convoymq.model.errors import NotFound

if TYPE_CHECKING:
    from convoymq.metadata.topic_trace import TopicTrace


class Tree:
    """All tables, and what has changed since the watchers were last told."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.topic_trace: TopicTrace | None = None
        """Records what happens to topics, where that is wanted."""
        self.clear()

    def clear(self) -> None:
        """Empties all tables."""
        self.vhosts: dict[str, Vhost] = {}
        self.queue_index = QueueIndex()
        self.users: dict[str, User] = {}
        self.permissions: dict[tuple[str, str], PermissionSet] = {}
        self.topic_permissions: dict[tuple[str, str], dict[str, TopicPermission]] = {}
        self.user_limits: dict[str, dict[str, int]] = {}
        """User -> `max-connections`, `max-channels`; negative: none."""
        self.nodes: dict[int, NodeRecord] = {}
        self.forgotten: set[int] = set()
        """Nodes that were removed; refused until they come back with nothing."""
        self.directories: dict[int, str] = {}
        """The data directory that each node number belongs to."""
        self.joins: dict[int, Joined] = {}
        self.incarnations: dict[int, int] = {}
        """The highest of each node number, also of forgotten ones: what is older is ignored."""
        self.cluster_id = ""
        self.recoveries: list[Recovery] = []
        """Recoveries from losses of the majority, oldest first."""
        self.settings: dict[str, str] = {}
        self.next_group = 1
        self.applied_index = 0
        self.version = 1
        """The machine version in force."""
        self.change_count = 0

    def note(self, change: Change) -> None:
        """Notes a change for the watchers."""
        self.change_count += 1
        self.changes.append(change)

    def changed(self, changed: bool, vhost: str = "") -> bool:
        """Notes a change of something that is neither a queue nor a node, and returns `changed`."""
        if changed:
            self.note(Change(ChangeKind.OTHER, vhost=vhost))
        return changed

    def records(self) -> Iterator[QueueRecord]:
        """Yields all queues of all virtual hosts."""
        for vhost in self.vhosts.values():
            yield from vhost.queues.values()

    def places(self) -> dict[int, Place]:
        """Returns the zone and the machine of each node."""
        return {n.id: Place(n.zone, n.machine) for n in self.nodes.values()}

    def vhost(self, name: str) -> Vhost:
        """Returns a virtual host. Raises NotFound."""
        vhost = self.vhosts.get(name)
        if vhost is None:
            raise NotFound(f"vhost {name} not found")
        return vhost

    def check_access(self, user: str, vhost: str) -> None:
        """Raises NotFound unless both exist."""
        if user not in self.users:
            raise NotFound(f"user '{user}' not found")
        self.vhost(vhost)

    def check_invariants(self) -> None:
        """Asserts what the module text promises. Cost: O(everything)."""
        groups: set[int] = set()
        for vhost in self.vhosts.values():
            vhost.topology.check_invariants()
            assert {queue.name for queue in vhost.topology.queues()} == set(vhost.queues)
            assert set(vhost.successors) <= set(vhost.queues)
            for record in (
                *vhost.queues.values(),
                *(successor.record for successor in vhost.successors.values()),
            ):
                assert 0 < record.group < self.next_group
                assert record.group not in groups
                groups.add(record.group)
        successors = [each.record for v in self.vhosts.values() for each in v.successors.values()]
        self.queue_index.check_invariants([*self.records(), *successors])
        for user, where in (*self.permissions, *self.topic_permissions):
            assert user in self.users
            assert where in self.vhosts
        for vhost in self.vhosts.values():
            for topic in vhost.topics.values():
                assert vhost.topology.find_exchange(topic.name) is not None
                assert topic.name not in vhost.queues
                for group in topic.groups.values():
                    group.check_invariants()
        assert set(self.user_limits) <= set(self.users)
        assert all(self.user_limits.values())
