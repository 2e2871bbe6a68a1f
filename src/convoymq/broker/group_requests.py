"""Requests of operators about one group, to the node that leads it, and this node's answers.

The leader decides and may not be known, may change, or may be changing something else: the request
is made again until it is answered or its time is over. So every operation can be asked for twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TypeAlias

from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError, PeerError, Refused, Unavailable
from convoymq.shells.groups.host import ReplicaHost
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_GROUP_ADMIN

DONE = "done"
AGAIN = "again"
"""Not now or not here; the detail says why."""
NOT_LEADER = "this node does not lead the group"
RETRY_S = 0.05
FIND_TIMEOUT_S = 1.0
TIMED_OUT = "the operation timed out and may not have been completed"

Answer: TypeAlias = tuple[str, object]
"""DONE and a result, or AGAIN and the reason."""
Operation: TypeAlias = Callable[[int, list[object]], Awaitable[Answer]]
"""Called with the group and the arguments of a request. Raises Refused."""


class GroupRequests:
    """See the module text. One per node."""

    def __init__(
        self,
        nodes: ClusterNodes,
        tree: MetadataMachine,
        control: ControlPlane,
        host: ReplicaHost,
        clock: Clock,
    ) -> None:
        self.nodes = nodes
        self.tree = tree
        self.host = host
        self.clock = clock
        self._control = control
        self._operations: dict[str, Operation] = {"leader": self._leader}
        control.handle(KIND_GROUP_ADMIN, self._on_request)

    def serve(self, name: str, operation: Operation) -> None:
        """Registers what carries an operation out on this node."""
        assert name not in self._operations
        self._operations[name] = operation

    def check_release(self, node: int) -> None:
        """Raises PreconditionFailed when a node's release does not answer these requests."""
        self._control.check_release(node)

    async def ask(
        self, node: int, name: str, group: int, *arguments: object, timeout_s: float
    ) -> Answer:
        """Asks one node. Raises Refused, Unavailable."""
        request = [name, group, *arguments]
        found = await self._control.request(node, KIND_GROUP_ADMIN, request, timeout_s)
        status, detail = found
        return str(status), detail

    async def ask_leader(
        self,
        group: int,
        members: Collection[int],
        name: str,
        *arguments: object,
        timeout_s: float,
    ) -> object:
        """Asks the node that leads a group, until it has done what was asked.

        Raises:
            Refused: it will not.
            Unavailable: it did not in time, or nobody leads.
        """
        until_ms = self.clock.monotonic_ms() + int(timeout_s * 1000)
        reason = ""
        wrong = 0
        while True:
            left_s = (until_ms - self.clock.monotonic_ms()) / 1000
            if left_s <= 0:
                raise Unavailable(f"{TIMED_OUT}: {reason}" if reason else TIMED_OUT)
            try:
                # Nodes without a replica may not have heard of the latest leader.
                leader = await self.find_leader(group, members, but=wrong)
                if leader:
                    status, detail = await self.ask(
                        leader, name, group, *arguments, timeout_s=left_s
                    )
                    if status == DONE:
                        return detail
                    reason = str(detail)
                    wrong = leader if reason == NOT_LEADER else 0
                else:
                    wrong = 0
                    reason = "the group has no leader"
            except Unavailable as error:
                reason = error.text
            await asyncio.sleep(min(RETRY_S, max(left_s, 0.001)))

    async def find_leader(self, group: int, members: Collection[int], but: int = 0) -> int:
        """Returns the node that leads a group, as far as this node or a member knows; 0 = nobody.

        Args:
            but: a node that has just said that it does not.
        """
        own = self.host.leader_of(group)
        if own and own != but:
            return own
        for node in members:
            if node != self.nodes.node_id and self.nodes.is_up(node):
                try:
                    _, found = await self.ask(node, "leader", group, timeout_s=FIND_TIMEOUT_S)
                except BrokerError:
                    continue
                if isinstance(found, int) and found not in (0, but):
                    return found
        return 0

    async def _leader(self, group: int, _arguments: list[object]) -> Answer:
        return DONE, self.host.leader_of(group) or 0

    async def _on_request(self, node: int, body: object) -> Answer:
        if not isinstance(body, list) or len(body) < 2:
            raise PeerError(f"malformed request about a group from node {node}")
        name, group, *arguments = body
        operation = self._operations.get(name) if isinstance(name, str) else None
        if operation is None:
            raise Refused(f"this release does not know the operation {name!r}")
        if not isinstance(group, int):
            raise PeerError(f"malformed request about a group from node {node}")
        return await operation(group, arguments)


class GroupOperations:
    """Base of the parts by which operators manage groups: what they need of their node."""

    def __init__(self, requests: GroupRequests) -> None:
        self._requests = requests
        self._nodes = requests.nodes
        self._tree = requests.tree
        self._host = requests.host
        self._clock = requests.clock
