"""Reads of the metadata tree that must not be stale.

Every node reads its own copy of the tree, which may be behind. That is well for most purposes; but
who is told that a queue does not exist, or is another one than before, may take its messages for
lost. Before that is said, the node catches up: it asks for the end of the metadata log on other
nodes until a majority of the voters has answered, and waits until its copy has applied the highest
of these. Every change committed before the question is in the log of one voter of any majority.

Votes move (`metadata.voters`), and a node that is behind may ask former voters. One of any majority
of them has the entry that took the vote of one away; then the voters of that entry are asked.
"""

from __future__ import annotations

import asyncio

from convoymq.metadata.replicas import Replica, Replicas
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_METADATA_END

METADATA_GROUP = 0
ANSWER_TIMEOUT_S = 2.0
APPLY_TIMEOUT_S = 5.0
PAUSE_S = 0.01


class MetadataReads:
    """See the module text."""

    def __init__(self, node_id: int, control: ControlPlane, host: Replicas) -> None:
        self._node_id = node_id
        self._control = control
        self._host = host
        control.handle(KIND_METADATA_END, self._on_end)

    async def catch_up(self) -> None:
        """Returns when the local tree has every change that was committed before the call.

        Raises:
            Unavailable: no majority answered, or the copy did not get that far in time.
        """
        replica = self._host.replica(METADATA_GROUP)
        if replica is None:
            raise Unavailable("this node has no copy of the metadata")
        voters: tuple[int, ...] = ()
        while voters != replica.members:
            voters = replica.members
            await self._catch_up_with(replica, voters)

    async def _catch_up_with(self, replica: Replica, voters: tuple[int, ...]) -> None:
        others = [node for node in voters if node != self._node_id]
        known = [replica.log.last_index] if self._node_id in voters else []
        needed = len(voters) // 2 + 1
        # Who does not answer holds nobody up as long as a majority does.
        asked = {asyncio.ensure_future(self._end_of(node)) for node in others}
        try:
            while asked and len(known) < needed:
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                known += [end for end in (each.result() for each in done) if end is not None]
        finally:
            for each in asked:
                each.cancel()
        if len(known) < needed:
            raise Unavailable("a majority of the nodes does not answer: metadata may be stale")
        target = max(known)
        try:
            async with asyncio.timeout(APPLY_TIMEOUT_S):
                while replica.last_applied < target:
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            raise Unavailable("this node's copy of the metadata is behind") from None

    async def _end_of(self, node: int) -> int | None:
        try:
            found = await self._control.request(node, KIND_METADATA_END, None, ANSWER_TIMEOUT_S)
        except BrokerError:
            return None
        return found if isinstance(found, int) else None

    async def _on_end(self, _node: int, _body: object) -> int:
        replica = self._host.replica(METADATA_GROUP)
        if replica is None:
            raise Unavailable("this node has no copy of the metadata")
        return replica.log.last_index
