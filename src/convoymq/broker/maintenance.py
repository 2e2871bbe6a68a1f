"""Drains this node while the tree says so: no clients, and every leadership goes to another node.

    revived ──set_drained──▶ ports closed ─▶ leaderships handed over ─▶ clients closed
       ▲                                             │ again, whenever an election brings one back
       └──────────── setting removed: ports open ◀───┘

That a node is drained is a setting of the tree (`metadata.maintenance`). Each node acts on its own,
so it does not matter who asked, who dies in between, or that the node starts again meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from convoymq.broker.balance import choose_successor
from convoymq.broker.group_requests import DONE
from convoymq.broker.leadership import Leadership
from convoymq.broker.local_queues import successors
from convoymq.broker.nodes import ClusterNodes
from convoymq.broker.registry import ConnectionRegistry
from convoymq.broker.tasks import Tasks
from convoymq.groups.host import ReplicaHost
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.maintenance import drained_nodes, set_drained
from convoymq.model.errors import BrokerError, NotFound, PreconditionFailed

log = structlog.get_logger()

REASON = "Node was put into maintenance mode"
AT_ONCE = 64
"""Leaderships that are handed over at a time: each costs an election."""
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

    async def attach(self, ports: Ports) -> None:
        """Listens for clients, unless this node is drained. Raises OSError."""
        self._ports = ports
        if not self.is_drained:
            await ports.open()
            self._is_open = True

    async def set_drained(self, node: int, *, drained: bool, timeout_s: float = TIMEOUT_S) -> None:
        """Drains a node of the cluster, or ends that. It acts when it hears of it.

        Raises:
            NotFound: there is no such node.
            PreconditionFailed: no other node would be left for clients.
        """
        tree = self._metadata.tree
        if node not in tree.nodes:
            raise NotFound(f"node {node} is not in the cluster")
        gone = drained_nodes(tree.settings)
        if drained == (node in gone):
            return
        if drained and len(tree.nodes) > 1 and tree.nodes.keys() <= gone | {node}:
            raise PreconditionFailed("all other nodes are drained: revive one of them first")
        await self._metadata.execute(set_drained(node, drained=drained), timeout_s)

    def tick(self) -> None:
        """Does what is due; to be called a few times a second and when the tree has changed."""
        if self._ports is None or (self._acting is not None and not self._acting.done()):
            return
        if self.is_drained:
            if self._is_open or self._movable():
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
            for connection in self._connections.all():
                connection.close(REASON)

    async def _revive(self) -> None:
        assert self._ports is not None
        try:
            await self._ports.open()
        except OSError as error:
            # The next tick tries again.
            log.warning("cluster.node_not_revived", node=self._nodes.node_id, reason=str(error))
            return
        self._is_open = True
        log.info("cluster.node_revived", node=self._nodes.node_id)

    def _movable(self) -> list[tuple[int, int]]:
        """Returns (group, who takes over) of the groups that this node leads and can hand over
        now."""
        avoid = drained_nodes(self._metadata.tree.settings)
        taken: dict[int, int] = {}
        found = []
        for group, replica in self._host.groups.items():
            if not replica.is_leader:
                continue
            heir = choose_successor(successors(self._host, replica), taken, avoid)
            if heir:
                taken[heir] = taken.get(heir, 0) + 1
                found.append((group, heir))
        return found

    async def _hand_over_all(self) -> None:
        turn = asyncio.Semaphore(AT_ONCE)

        async def hand_over(group: int, heir: int) -> bool:
            async with turn:
                try:
                    status, _ = await self._leadership.hand_over(group, heir)
                except BrokerError:
                    return False
                return status == DONE

        groups = self._movable()
        # What did not go is tried again with the next tick. The tree's own group goes last.
        others = [(group, heir) for group, heir in groups if group]
        await asyncio.gather(*(hand_over(*each) for each in others))
        await asyncio.gather(*(hand_over(*each) for each in groups if not each[0]))
