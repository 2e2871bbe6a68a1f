"""Placement of new queues on nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from convoymq.metadata.machine import MetadataMachine, QueueRecord
from convoymq.metadata.placement import (
    BALANCED,
    CLIENT_LOCAL,
    LOCATORS,
    choose_leader,
    choose_members,
    siblings,
)
from convoymq.model.tables import EMPTY, Table
from convoymq.queues.driver import driver_of
from convoymq.routing.policies import Policies, effective_settings
from convoymq.routing.queue_arguments import type_name_of
from convoymq.routing.types import Queue

LOCATOR_ARGUMENT = "x-queue-leader-locator"
_PLACING = (
    ("queue-master-locator", LOCATOR_ARGUMENT),
    ("queue-leader-locator", LOCATOR_ARGUMENT),
    ("initial-cluster-size", "x-initial-cluster-size"),
)
"""(key of policies, argument that it acts as); of two for one argument the later counts."""
COUNT_SHARE = 64
"""Leaders per node are counted anew with every 64th part of the queues that is added."""


def placed(queue: Queue, policies: Policies) -> Table:
    """Returns a queue's arguments, with what its policies say of where it goes."""
    arguments = queue.arguments
    if not policies and "x-queue-master-locator" not in arguments:
        return arguments
    settings = effective_settings(queue, policies)
    for key, argument in _PLACING:
        if key in settings:
            arguments = arguments.with_field(argument, settings[key])
    return arguments


class Placement:
    """Chooses by this node's copy of the tree.

    Args:
        leader_of: node that leads a queue, as far as known.
        group_size: members of a queue whose declaration does not say.
    """

    def __init__(
        self,
        node: int,
        tree: MetadataMachine,
        leader_of: Callable[[QueueRecord], int | None],
        group_size: int = 3,
    ) -> None:
        self._node = node
        self._tree = tree
        self._leader_of = leader_of
        self._group_size = group_size
        self._leaders: dict[int, int] = {}
        self._placed = 0
        """Queues placed by `_leaders` since they were counted."""

    def group_size_of(self, record: QueueRecord) -> int:
        """Returns how many members a queue should have, by its declaration or the settings."""
        topology = self._tree.vhosts[record.vhost].topology
        declared = topology.find_queue(record.name)
        arguments = placed(declared, topology.policies) if declared is not None else EMPTY
        driver = driver_of(record.type.value)
        return driver.size(arguments, self._group_size) if driver is not None else self._group_size

    def members_for(
        self, arguments: Table, running: Sequence[int], default_locator: str = CLIENT_LOCAL
    ) -> tuple[int, ...]:
        """Returns nodes for a new queue, the designated leader or home first.

        Args:
            arguments: after `placed`.
            running: nodes that are up and not drained, mostly this one among them.
        """
        driver = driver_of(type_name_of(arguments))
        asked = arguments.get(LOCATOR_ARGUMENT)
        locator = LOCATORS.get(asked.term() if asked is not None else default_locator, CLIENT_LOCAL)
        places = self._tree.places()
        leaders: dict[int, int] = {}
        near = siblings(self._node, running, places)
        if len(running) > 1 and (locator == BALANCED or near != [self._node]):
            leaders = self._count_leaders()
        leader = choose_leader(
            locator, client_node=self._node, running=running, leaders=leaders, places=places
        )
        leaders[leader] = leaders.get(leader, 0) + 1
        size = driver.size(arguments, self._group_size) if driver is not None else 1
        return choose_members(
            size,
            leader=leader,
            nodes=set(self._tree.nodes) | {self._node},
            running=running,
            replicas=self._tree.queue_index.replicas,
            places=places,
        )

    def for_partitions(
        self, count: int, running: Sequence[int], first: int = 0
    ) -> list[tuple[int, ...]]:
        """Returns nodes for new partitions of a topic, the designated leader of each first. Leaders
        are spread over the nodes.

        Args:
            running: nodes that are up and not drained.
            first: the node that shall lead, if it is one of them; 0 = any.
        """
        leaders = dict(self._count_leaders())
        replicas = dict(self._tree.queue_index.replicas)
        places = self._tree.places()
        placed = []
        for _ in range(count):
            leader = first
            if first not in running:
                leader = choose_leader(
                    BALANCED,
                    client_node=self._node,
                    running=running,
                    leaders=leaders,
                    places=places,
                )
            members = choose_members(
                self._group_size,
                leader=leader,
                nodes=set(self._tree.nodes) | {self._node},
                running=running,
                replicas=replicas,
                places=places,
            )
            leaders[leader] = leaders.get(leader, 0) + 1
            for member in members:
                replicas[member] = replicas.get(member, 0) + 1
            placed.append(members)
        return placed

    def _count_leaders(self) -> dict[int, int]:
        """Leaders and homes per node. Counted anew when so many were added that it may matter, or
        each declaration would look at all queues."""
        records = self._tree.queue_index.by_group
        self._placed += 1
        if self._placed * COUNT_SHARE > len(records):
            self._placed = 0
            leaders = self._leaders = {}
            for record in records.values():
                # Where nobody is known to lead, the designated leader is expected to.
                node = self._leader_of(record) or record.home
                leaders[node] = leaders.get(node, 0) + 1
        return self._leaders
