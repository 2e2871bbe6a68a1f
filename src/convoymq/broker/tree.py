"""The replicated tree as protocols see it: this node's copy, in views by subject, and the one way
to change it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from convoymq.broker.changes import Command, PutSetting
from convoymq.broker.records import (
    NodeRecord,
    PermissionSet,
    QueueRecord,
    TopicPermission,
    TopicRecord,
    User,
    Vhost,
)
from convoymq.broker.shovels import ShovelView
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.global_parameters import check_number, global_parameters
from convoymq.metadata.machine import Change, ChangeKind
from convoymq.metadata.maintenance import drained_nodes
from convoymq.metadata.placement import siblings
from convoymq.metadata.topics import find_topic, get_topic
from convoymq.metadata.tree import Tree
from convoymq.metadata.vhost_flags import PROTECTED, flagged_vhosts
from convoymq.model.json import Json
from convoymq.model.refusals import missing, queue_subject


class UserView:
    """Users, their permissions and limits."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def all(self) -> list[User]:
        """Returns all users, by name."""
        return [self._tree.users[name] for name in sorted(self._tree.users)]

    def find(self, name: str) -> User | None:
        """Returns a user; None = there is none of that name."""
        return self._tree.users.get(name)

    def limits_of(self, name: str) -> dict[str, int]:
        """Returns a user's limits."""
        return dict(self._tree.user_limits.get(name, ()))

    def limited(self) -> list[str]:
        """Returns the names of the users that have limits, in order."""
        return sorted(self._tree.user_limits)

    def permissions(self) -> list[tuple[tuple[str, str], PermissionSet]]:
        """Returns ((user, virtual host), permissions), in order."""
        return sorted(self._tree.permissions.items(), key=lambda item: item[0])

    def topic_permissions(self) -> list[tuple[tuple[str, str], dict[str, TopicPermission]]]:
        """Returns ((user, virtual host), exchange -> permission), in order."""
        return sorted(self._tree.topic_permissions.items(), key=lambda item: item[0])


class VhostView:
    """Virtual hosts with their exchanges, bindings, policies and limits."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def names(self) -> set[str]:
        """Returns the names of all."""
        return set(self._tree.vhosts)

    def all(self, names: Collection[str] | None = None) -> Iterator[Vhost]:
        """Yields virtual hosts by name: all, or those of the names that exist."""
        for name in sorted(self._tree.vhosts):
            if names is None or name in names:
                yield self._tree.vhosts[name]

    def protected(self) -> frozenset[str]:
        """Returns the names of those that cannot be deleted."""
        return flagged_vhosts(self._tree.settings, self._tree.vhosts, PROTECTED)

    def find(self, name: str) -> Vhost | None:
        """Returns a virtual host; None = there is none of that name."""
        return self._tree.vhosts.get(name)

    def get(self, name: str) -> Vhost:
        """Returns a virtual host. Raises NotFound."""
        return self._tree.vhost(name)


class QueueView:
    """Records of queues: placement, not content."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def all(self) -> Iterator[QueueRecord]:
        """Yields the queues of all virtual hosts, in each by name."""
        for vhost in self._tree.vhosts.values():
            for _, record in sorted(vhost.queues.items()):
                yield record

    def find(self, vhost: str, name: str) -> QueueRecord | None:
        """Returns a queue's record; None = there is no such queue."""
        place = self._tree.vhosts.get(vhost)
        return None if place is None else place.queues.get(name)

    def get(self, vhost: str, name: str) -> QueueRecord:
        """Returns a queue's record. Raises NotFound."""
        record = self.find(vhost, name)
        if record is None:
            raise missing(queue_subject(vhost, name))
        return record

    def of_group(self, group: int) -> QueueRecord | None:
        """Returns the record of the queue that a group is; None = it is none, or is gone."""
        return self._tree.queue_index.by_group.get(group)


class NodeListView:
    """Nodes of the cluster, those that are down too."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def __len__(self) -> int:
        return len(self._tree.nodes)

    def all(self) -> list[NodeRecord]:
        """Returns all nodes, by number."""
        return [self._tree.nodes[node] for node in sorted(self._tree.nodes)]

    def of_machine(self, node: int) -> list[int]:
        """Returns the numbers of all nodes on the machine of a node, itself included."""
        return siblings(node, sorted(self._tree.nodes), self._tree.places())

    def find(self, text: str) -> NodeRecord | None:
        """Returns a node by its name or number; None = there is none."""
        return next((each for each in self.all() if text in (each.name, str(each.id))), None)

    def named(self, name: str) -> NodeRecord | None:
        """Returns a node by its name; None = there is none."""
        return next((each for each in self.all() if each.name == name), None)

    def drained(self) -> frozenset[int]:
        """Returns the numbers of the nodes that are drained."""
        return drained_nodes(self._tree.settings)


class TopicView:
    """Records of ordered topics."""

    def __init__(self, store: AsyncMetadataStore) -> None:
        self._store = store

    def find(self, vhost: str, name: str) -> TopicRecord | None:
        """Returns a topic; None = there is no such topic."""
        return find_topic(self._store.tree, vhost, name)

    def get(self, vhost: str, name: str) -> TopicRecord:
        """Returns a topic. Raises NotFound."""
        return get_topic(self._store.tree, vhost, name)

    def watch(self, changed: Callable[[], None]) -> None:
        """Calls back from now on when any topic may have changed."""

        def on_change(change: Change) -> None:
            if change.kind in (ChangeKind.TOPIC, ChangeKind.RESTORED):
                changed()

        self._store.watch(on_change)


class ParameterView:
    """Global parameters."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def all(self, cluster_name: str) -> dict[str, Json]:
        """Returns all by name."""
        return global_parameters(self._tree.settings, cluster_name)

    def check_number(self, name: str) -> None:
        """Raises ValidationFailed when there are too many for one more of this name."""
        check_number(self._tree.settings, name)

    def has(self, command: PutSetting) -> bool:
        """Returns whether what the command sets has a value."""
        return command.name in self._tree.settings


class TreeView:
    """See the module text. One per node."""

    def __init__(self, store: AsyncMetadataStore) -> None:
        tree = store.tree
        self.users = UserView(tree)
        self.vhosts = VhostView(tree)
        self.queues = QueueView(tree)
        self.nodes = NodeListView(tree)
        self.topics = TopicView(store)
        self.parameters = ParameterView(tree)
        self.shovels = ShovelView(tree)
        self._store = store

    @property
    def leader(self) -> int | None:
        """Returns the node that leads the metadata group; None = nobody, as far as known here."""
        return self._store.leader

    @property
    def cluster_id(self) -> str:
        """Returns the id that the cluster got when it was founded, or recovered."""
        return self._store.tree.cluster_id

    async def execute(self, command: Command) -> object:
        """Changes the tree, and returns the reply when this node has applied it. Raises
        BrokerError."""
        return await self._store.execute(command)

    def snapshot(self) -> bytes:
        """Returns the whole tree, for a `Rehearsal`. Cost: O(everything)."""
        return self._store.tree.snapshot()
