"""Nodes that give their partitions away, until they may be removed.

    DRAINING ──open partitions are moved──▶ READ_ONLY ──nothing is left──▶ REMOVABLE

    | state     | what the node still has                                                      |
    |-----------|------------------------------------------------------------------------------|
    | DRAINING  | open partitions that it leads, or of which it is a member that others can be |
    | READ_ONLY | members of sealed partitions, or of open ones that have no other node to go  |
    | REMOVABLE | nothing                                                                      |

That a node drains is a setting of the tree. The node that leads the metadata group has one
partition of each topic moved at a time, and of a few topics at once. It holds nothing: what is to
be done follows from the tree, so the next leader goes on.

Source: ordered topics, section 10.5.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum

import structlog

from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.machine import TopicRecord
from convoymq.metadata.topic_drains import draining_nodes, set_draining
from convoymq.model.errors import BrokerError, NotFound, PreconditionFailed
from convoymq.queues.placement import Placement
from convoymq.topics.rules.lineage import Partition
from convoymq.topics.shell import views
from convoymq.topics.shell.leader_task import LeaderTask, Place, TopicNode
from convoymq.topics.shell.rows import DrainRow, DrainRows, DrainStateRow, DrainStateRows

log = structlog.get_logger()

TOPICS_AT_ONCE = 4
STALL_TIMEOUT_S = 30.0
"""Longest wait for the next partition to be moved, of who asked for a drain; it goes on."""
POLL_S = 0.1
Move = Callable[[str, str, int, int], Awaitable[object]]
"""(vhost, topic, partition, node): begins to move a partition. Raises BrokerError."""


class DrainState(Enum):
    """States of a node that drains; see the module text."""

    DRAINING = "draining"
    READ_ONLY = "read_only"
    REMOVABLE = "removable"


class TopicDrains(LeaderTask):
    """See the module text. One per node.

    Args:
        timeout_s: for one command of the tree.
    """

    def __init__(
        self,
        own: TopicNode,
        *,
        nodes: ClusterNodes,
        placement: Placement,
        move: Move,
        timeout_s: float,
    ) -> None:
        super().__init__(own)
        self._nodes = nodes
        self._placement = placement
        self._move = move
        self._timeout_s = timeout_s

    # --- what operators ask for ------------------------------------------------------------

    async def drain(self, node: int) -> DrainRows:
        """Has a node give its partitions away from now on, and waits until it is READ_ONLY. What
        is not moved after half a minute without progress has an error in its row, and goes on.

        Raises:
            NotFound: no such node.
            PreconditionFailed: no other node could take them.
            Unavailable: no majority in time.
        """
        self._check_node(node)
        if not any(each != node for each in self._heirs()):
            raise PreconditionFailed("no other node could take the partitions")
        before = [
            Place(record.vhost, record.name, pid)
            for record in self._records()
            for pid in self._to_move(record, node, draining=self._draining() | {node})
        ]
        if node not in self._draining():
            await self._store.execute(set_draining(node, draining=True), self._timeout_s)
        await self._wait(before, node)
        under_way = self._places_left(node)
        found = (self._drain_row(place, node, under_way) for place in before)
        return [row for row in found if row is not None]

    async def revive(self, node: int) -> None:
        """Ends a drain: the node gets partitions again. Raises NotFound, Unavailable."""
        self._check_node(node)
        if node in self._draining():
            await self._store.execute(set_draining(node, draining=False), self._timeout_s)

    async def report(self) -> DrainStateRows:
        """Returns what is left on the nodes that drain."""
        return [await self._state_row(node) for node in sorted(self._draining())]

    def _check_node(self, node: int) -> None:
        if node not in self._store.tree.nodes:
            raise NotFound(f"node {node} is not in the cluster")

    async def _wait(self, places: list[Place], node: int) -> None:
        """Waits until partitions are moved, or none was for a while."""
        loop = asyncio.get_running_loop()
        left, until = len(places), loop.time() + STALL_TIMEOUT_S
        while loop.time() < until:
            now_left = len(self._places_left(node).intersection(places))
            if not now_left:
                return
            if now_left < left:
                left, until = now_left, loop.time() + STALL_TIMEOUT_S
            await asyncio.sleep(POLL_S)

    def _places_left(self, node: int) -> set[Place]:
        """Returns the partitions that a node gives away, and those that are being replaced."""
        draining = self._draining()
        found: set[Place] = set()
        for record in self._records():
            pids = self._to_move(record, node, draining=draining)
            running = record.state.running
            pids += [] if running is None else running.sources
            found.update(Place(record.vhost, record.name, pid) for pid in pids)
        return found

    def _drain_row(self, place: Place, node: int, under_way: set[Place]) -> DrainRow | None:
        record = self._record(place.key)
        if record is None:
            return None
        row: DrainRow = {
            "vhost": place.vhost, "topic": place.topic, "pid": place.pid, "to_pid": None,
            "node": self._nodes.name_of(node), "error": "",
        }  # fmt: skip
        children = record.state.lineage.partition(place.pid).children
        if place in under_way or not children:
            row["error"] = "it is not moved yet, and goes on"
        else:
            row["to_pid"] = children[0]
            row["node"] = self._nodes.name_of(self._partitions.leader(record, children[0]))
        return row

    # --- what is left ----------------------------------------------------------------------

    def placement_nodes(self) -> list[int]:
        """Returns the nodes that may get partitions; all that may get queues when no other is
        left."""
        nodes = self._nodes.for_placement()
        draining = self._draining()
        return [node for node in nodes if node not in draining] or nodes

    def is_draining(self, node: int) -> bool:
        """Returns whether a node gives its partitions away."""
        return node in self._draining()

    def _draining(self) -> frozenset[int]:
        tree = self._store.tree
        return draining_nodes(tree.settings) & tree.nodes.keys()

    def _heirs(self) -> list[int]:
        """Returns the nodes that can take partitions now."""
        draining = self._draining()
        return [
            node
            for node in self._nodes.running()
            if node not in draining and not self._nodes.is_drained(node)
        ]

    def _to_move(self, record: TopicRecord, node: int, *, draining: frozenset[int]) -> list[int]:
        """Returns the open partitions that a node can give away: those that it leads, and those of
        which it need not be a member."""
        heirs = [each for each in self._heirs() if each not in draining]
        return [
            pid
            for pid in record.state.route.pids
            if self._partitions.leader(record, pid) == node
            or (
                node in self._partitions.members(record, pid)
                and len(heirs) >= len(self._partitions.members(record, pid))
            )
        ]

    def _left(self, record: TopicRecord, node: int) -> list[Partition]:
        """Returns the partitions of which a node is a member."""
        return [
            each
            for each in views.kept_partitions(record)
            if node in self._partitions.members(record, each.pid)
        ]

    async def _state_row(self, node: int) -> DrainStateRow:
        draining = self._draining()
        to_move = opened = sealed = size = 0
        slowest, behind = "", 0
        for record in list(self._records()):
            left = self._left(record, node)
            to_move += len(self._to_move(record, node, draining=draining))
            closed = [each.sealed_version for each in left if each.sealed_version is not None]
            opened += len(left) - len(closed)
            sealed += len(closed)
            found = await self._partitions.describe_all(record, [each.pid for each in left])
            size += sum(said.bytes for said in found.values() if said is not None)
            for name, group in record.groups.items():
                if closed and max(closed) - group.cv > behind:
                    slowest, behind = f"{record.name}/{name}", max(closed) - group.cv
        state = DrainState.DRAINING
        if not to_move:
            state = DrainState.READ_ONLY if opened + sealed else DrainState.REMOVABLE
        return {
            "node": self._nodes.name_of(node),
            "state": state.value,
            "open": opened,
            "sealed": sealed,
            "bytes": size,
            "slowest_group": slowest,
        }

    # --- what is done about it -------------------------------------------------------------

    def tick(self) -> None:
        """Has the next partitions moved; to be called a few times a second."""
        if self._draining() and self._follow_term():
            self._spawn_once("moves", self._move_next)

    def _next(self) -> list[Place]:
        """Returns the partitions to be moved next: one of each topic that no change runs in."""
        draining = self._draining()
        running = 0
        due: list[Place] = []
        for record in self._records():
            pids = [
                pid for node in draining for pid in self._to_move(record, node, draining=draining)
            ]
            if pids and record.state.running is not None:
                running += 1
            elif pids:
                due.append(Place(record.vhost, record.name, pids[0]))
        return due[: max(0, TOPICS_AT_ONCE - running)]

    async def _move_next(self) -> None:
        for place in self._next():
            await self._move_away(place)

    async def _move_away(self, place: Place) -> None:
        record = self._record(place.key)
        leader = 0 if record is None else self._partitions.leader(record, place.pid)
        heirs = [node for node in self._heirs() if node != leader]
        if record is None or not heirs:
            return
        heir = self._placement.for_partitions(1, heirs)[0][0]
        try:
            await self._move(*place, heir)
        except BrokerError as error:
            # The next tick tries again: another change was first, or a node has gone.
            log.debug("topics.partition_not_moved", **place._asdict(), reason=error.text)
