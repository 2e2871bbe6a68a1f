"""Shovels of a node: an edge that listens for nobody.

The node that leads the metadata group runs all shovels. Another leader begins them anew: what was
not settled comes again from the source.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from convoymq.broker.shovels import Shovel, clear_shovel
from convoymq.edges.edge import Edge, NodeParts
from convoymq.edges.inside import connect_inside
from convoymq.model.late_imports import import_late
from convoymq.model.tasks import Tasks
from convoymq.queues.interface import Row

if TYPE_CHECKING:
    from convoymq.edges.shovel.worker import Worker

LOOK_S = 0.5
"""Time between two looks at the tree and at who leads."""


def open_edge(parts: NodeParts) -> ShovelEdge:
    """Makes the edge."""
    return ShovelEdge(parts)


class _Running(NamedTuple):
    worker: Worker
    task: asyncio.Task[None]


class ShovelEdge(Edge):
    """See the module text."""

    after_ready = True

    def __init__(self, parts: NodeParts) -> None:
        self._broker = parts.broker
        self._edges = parts.edges
        self._tasks = Tasks()
        self._running: dict[tuple[str, str], _Running] = {}
        parts.broker.cluster.shovel_rows = self.rows

    async def start(self) -> None:
        """Follows the tree from now on."""
        self._tasks.spawn(self._follow())

    async def stop(self) -> None:
        """Ends all shovels of this node."""
        await self._tasks.stop()
        self._running.clear()

    def rows(self) -> list[Row]:
        """Returns the status of the shovels that run here."""
        return [each.worker.row() for each in self._running.values()]

    async def _follow(self) -> None:
        while True:
            tree = self._broker.tree
            leads = tree.leader == self._broker.node_id
            await self._adjust(tree.shovels.all() if leads else [])
            await asyncio.sleep(LOOK_S)

    async def _adjust(self, wanted: list[Shovel]) -> None:
        """Ends shovels that are gone or changed, and begins those that are new."""
        shovels = {(each.vhost, each.name): each for each in wanted}
        ended = [
            key
            for key, running in self._running.items()
            if shovels.get(key) != running.worker.shovel
        ]
        for key in ended:
            self._running[key].task.cancel()
        for key in ended:
            await asyncio.wait([self._running.pop(key).task])
        for key, shovel in shovels.items():
            if key not in self._running:
                self._running[key] = self._begun(shovel)

    def _begun(self, shovel: Shovel) -> _Running:
        # With its clients, for the first shovel of a node.
        import_late("convoymq.edges.shovel.worker")
        from convoymq.edges.shovel.worker import Worker

        inside = partial(connect_inside, self._edges(), tasks=self._tasks)
        worker = Worker(shovel, self._broker.cluster_name, inside, self._finished)
        return _Running(worker, self._tasks.spawn(worker.run()))

    async def _finished(self, shovel: Shovel) -> None:
        """Deletes the parameter of a shovel that has done its work, unless it was changed
        meanwhile. Raises BrokerError."""
        tree = self._broker.tree
        if tree.shovels.find(shovel.vhost, shovel.name) == shovel:
            await tree.execute(clear_shovel(shovel))
