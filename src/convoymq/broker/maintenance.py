"""Drains this node while the tree says so: no clients, and every leadership goes to another node.

    revived ──set_drained──▶ ports closed ─▶ leaderships handed over ─▶ clients closed
       ▲                                             │ again, whenever an election brings one back
       └──────────── setting removed: ports open ◀───┘

That a node is drained is a setting of the tree (`metadata.maintenance`). Each node acts on its own,
so it does not matter who asked, who dies in between, or that the node starts again meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from itertools import islice
from typing import Protocol

import structlog

from convoymq.broker.balance import choose_successor
from convoymq.broker.leadership import POLL_S, TAKE_OVER_TIMEOUT_S, Leadership
from convoymq.broker.local_queues import successors
from convoymq.broker.registry import ConnectionRegistry
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.maintenance import drained_nodes, set_drained
from convoymq.model.errors import NotFound, PreconditionFailed, Unavailable
from convoymq.model.tasks import Tasks
from convoymq.shells.groups.host import ReplicaHost

log = structlog.get_logger()

REASON = "Node was put into maintenance mode"
AT_ONCE = 32
"""Leaderships that are handed over at a time: each costs an election, and publishers of its queue
wait for the others as well."""
TIMEOUT_S = 30.0


class Ports(Protocol):
    """Ports for clients: `edges.acceptor.SharedPorts`."""

    async def open(self) -> None:
        """Listens. Raises OSError."""

    def close(self) -> None:
        """Accepts no more; connections stay."""


class Maintenance:
    """See the module text. One per node."""

    def __init__(
        self,
        nodes: ClusterNodes,
        metadata: AsyncMetadataStore,
        host: ReplicaHost,
        leadership: Leadership,
        connections: ConnectionRegistry,
        tasks: Tasks,
    ) -> None:
        self._nodes = nodes
        self._metadata = metadata
        self._host = host
        self._leadership = leadership
        self._connections = connections
        self._tasks = tasks
        self._ports: Ports | None = None
        self._is_open = False
        self._acting: asyncio.Task[None] | None = None

    @property
    def is_drained(self) -> bool:
        """Returns whether this node is drained."""
        return self._nodes.is_drained(self._nodes.node_id)

    async def attach(self, ports: Ports, *, revive: bool = False) -> None:
        """Listens for clients, unless this node is drained. Raises OSError.

        Args:
            revive: a drained node is revived now, and listens when the tree has it.
        """
        self._ports = ports
        if not self.is_drained:
            await ports.open()
            self._is_open = True
        elif revive:
            self._tasks.spawn(self._set_revived())

    async def _set_revived(self) -> None:
        while self.is_drained:
            # Without a majority the next try waits for it.
            with contextlib.suppress(Unavailable):
                await self.set_drained(self._nodes.node_id, drained=False)

    async def set_drained(self, node: int, *, drained: bool, timeout_s: float = TIMEOUT_S) -> None:
        """Drains a node of the cluster, or ends that. It acts when it hears of it.

        Raises:
            NotFound: there is no such node.
            PreconditionFailed: no other node would be left for clients, or this one has a release
                that does not know of draining.
        """
        tree = self._metadata.tree
        if node not in tree.nodes:
            raise NotFound(f"node {node} is not in the cluster")
        gone = drained_nodes(tree.settings)
        if drained == (node in gone):
            return
        if drained and self._nodes.is_older(node):
            raise PreconditionFailed(
                f"{self._nodes.name_of(node)} has an older release, which cannot be drained"
            )
        if drained and len(tree.nodes) > 1 and tree.nodes.keys() <= gone | {node}:
            raise PreconditionFailed("all other nodes are drained: revive one of them first")
        await self._metadata.execute(set_drained(node, drained=drained), timeout_s)

    def tick(self) -> None:
        """Does what is due; to be called a few times a second and when the tree has changed."""
        if self._ports is None or (self._acting is not None and not self._acting.done()):
            return
        if self.is_drained:
            if self._is_open or self._leads_movable():
                self._acting = self._tasks.spawn(self._drain())
        elif not self._is_open:
            self._acting = self._tasks.spawn(self._revive())

    async def _drain(self) -> None:
        assert self._ports is not None
        was_open, self._is_open = self._is_open, False
        if was_open:
            log.info("cluster.node_drained", node=self._nodes.node_id)
            self._ports.close()
        await self._hand_over_all()
        if was_open and self.is_drained:
            self._connections.close_all(REASON)

    async def _revive(self) -> None:
        assert self._ports is not None
        self._connections.admit()
        try:
            await self._ports.open()
        except OSError as error:
            # The next tick tries again.
            log.warning("cluster.node_not_revived", node=self._nodes.node_id, reason=str(error))
            return
        self._is_open = True
        log.info("cluster.node_revived", node=self._nodes.node_id)

    def _leads_movable(self) -> bool:
        """Returns whether this node leads a group that it could hand over now."""
        avoid = drained_nodes(self._metadata.tree.settings)
        return any(
            choose_successor(successors(self._host, replica), {}, avoid) != 0
            for replica in self._host.groups.values()
            if replica.is_leader
        )

    async def _hand_over_all(self) -> None:
        """Hands over what this node leads. What does not go is tried again with the next tick."""
        led = [group for group, replica in self._host.groups.items() if replica.is_leader]
        await self._hand_over([group for group in led if group])
        # The tree's own group goes last.
        await self._hand_over([group for group in led if not group])

    async def _hand_over(self, groups: list[int]) -> None:
        """Hands groups over, a bounded number at a time.

        One task looks after all: a task for each of thousands of groups would stop the loop while
        they are made, and each would wake by itself to see whether its election is over.
        """
        loop = asyncio.get_running_loop()
        waiting = iter(groups)
        taken: dict[int, int] = {}
        under_way: dict[int, float] = {}
        while self.is_drained:
            begun = list(islice(waiting, AT_ONCE - len(under_way)))
            avoid = drained_nodes(self._metadata.tree.settings)
            until = loop.time() + TAKE_OVER_TIMEOUT_S
            under_way.update((group, until) for group in begun if self._begin(group, taken, avoid))
            if not begun and not under_way:
                return
            self._host.wake()
            await asyncio.sleep(POLL_S)
            now = loop.time()
            for group, end in list(under_way.items()):
                if now >= end or not self._leadership.is_under_way(group):
                    del under_way[group]

    def _begin(self, group: int, taken: dict[int, int], avoid: Collection[int]) -> bool:
        """Begins to hand a group to the voter that was given least so far."""
        replica = self._host.replica(group)
        if replica is None or not replica.is_leader:
            return False
        heir = choose_successor(successors(self._host, replica), taken, avoid)
        if not heir or self._leadership.begin(group, heir):
            return False
        taken[heir] = taken.get(heir, 0) + 1
        return True
