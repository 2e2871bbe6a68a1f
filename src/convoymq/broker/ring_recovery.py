"""Mirrored queues whose master is lost for good: they go on with a copy on a node that runs.

The node that an operator asks collects which nodes have a copy of a queue, chooses one
(`queues.mirrored.policy.heir`), and has a new ring of that node alone recorded. Its host opens the
queue from the copy. A ring that goes on by itself is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec
import structlog

from convoymq.broker.group_requests import DONE, Answer, GroupOperations, GroupRequests
from convoymq.broker.local_queues import LocalQueues
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.commands import ChangeView
from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import BrokerError, PeerError, PreconditionFailed, Unavailable
from convoymq.queues.mirrored.policy import CopyAge, heir, policy_from
from convoymq.replication.ring.views import RingView

log = structlog.get_logger()

ASK_TIMEOUT_S = 5.0
SETTLE_S = 10.0
"""Time for a ring to go on: members that failed are known after some seconds."""
POLL_S = 0.05


class RingRecovery(GroupOperations):
    """See the module text. One per node."""

    def __init__(
        self, requests: GroupRequests, local: LocalQueues, store: AsyncMetadataStore
    ) -> None:
        super().__init__(requests)
        self._local = local
        self._store = store
        requests.serve("ring_copy", self._on_copy)

    def waiting(self) -> list[QueueRecord]:
        """Returns the queues with a ring whose master does not run."""
        return [
            record
            for record in self._tree.records()
            if record.view is not None and not self._is_served(record.view)
        ]

    def needs(self, record: QueueRecord, lost: int) -> bool:
        """Returns whether a queue has to let go of a node, or waits for it."""
        view = record.view
        if view is None:
            return False
        away = {node for node in self._tree.nodes if not self._nodes.is_up(node)}
        waits = view.master not in view.ring and away <= {lost}
        return lost in record.members or (waits and not self._is_served(view))

    async def release(self, record: QueueRecord, lost: int, *, forced: bool) -> int:
        """Has a queue go on without a node, or let go of it; returns how many copies it has then.

        Args:
            lost: the node; 0 = all that do not run.
            forced: also with a copy that lacks messages.

        Raises:
            PreconditionFailed: no node that runs has a copy that may be the queue.
            Unavailable: not in time; it may still be done.
        """
        try:
            async with asyncio.timeout(SETTLE_S):
                while True:
                    found = self._tree.queue_index.by_group.get(record.group)
                    if found is None or found.view is None:
                        return 0
                    is_served = self._is_served(found.view)
                    if is_served and lost not in found.members:
                        return len(found.members)
                    if not is_served and not self._goes_on(found.view):
                        await self._refound(found, found.view, lost, forced=forced)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable("the queue's ring does not go on in time") from None

    async def _refound(
        self, record: QueueRecord, view: RingView, lost: int, *, forced: bool
    ) -> None:
        name = self._nodes.name_of
        if lost and view.master in view.ring and view.node_of(view.master) != lost:
            master = name(view.node_of(view.master))
            raise PreconditionFailed(f"the queue waits for its master on node {master}")
        copies = await self._copies(record)
        policy = policy_from(self._local.settings_of(record))
        lenient = policy.promotes_on_failure
        node = heir(view, copies, follows_unsynchronised=lenient, forced=forced)
        if not node:
            node = heir(view, copies, follows_unsynchronised=lenient, forced=True)
            reason = f"only node {name(node)} has a copy, which may lack messages" if node else (
                "no node that runs has a copy"
            )  # fmt: skip
            raise PreconditionFailed(reason)
        command = ChangeView(
            vhost=record.vhost,
            name=record.name,
            group=record.group,
            view=view.refounded(node, self._tree.incarnations[node]),
        )
        # False: another view was recorded meanwhile, which is looked at next.
        if await self._store.execute(command, ASK_TIMEOUT_S):
            is_complete = copies[node].member in (view.master, *view.synchronised)
            log.warning(
                "queue.ring_refounded", node=self._nodes.node_id, vhost=record.vhost,
                queue=record.name, copy=name(node), complete=is_complete,
            )  # fmt: skip

    async def _copies(self, record: QueueRecord) -> dict[int, CopyAge]:
        """Returns node -> copy that it has, of nodes that run."""
        nodes = self._nodes.running()
        answers = await asyncio.gather(
            *(
                self._requests.ask(node, "ring_copy", record.group, timeout_s=ASK_TIMEOUT_S)
                for node in nodes
            ),
            return_exceptions=True,
        )
        found: dict[int, CopyAge] = {}
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, BrokerError):
                # A node that cannot say it has none to give.
                continue
            if isinstance(answer, BaseException):
                raise answer
            age = _age(node, answer[1])
            if age.member:
                found[node] = age
        return found

    def _running(self, view: RingView) -> Collection[int]:
        return [
            each.number
            for each in view.members
            if view.is_live(each.number)
            and self._tree.incarnations.get(each.node) == each.incarnation
            and self._nodes.is_up(each.node)
        ]

    def _is_served(self, view: RingView) -> bool:
        return view.master in self._running(view)

    def _goes_on(self, view: RingView) -> bool:
        """Returns whether a mirror takes over by itself."""
        return bool(set(self._running(view)) & set(view.synchronised))

    async def _on_copy(self, group: int, _arguments: list[object]) -> Answer:
        return DONE, [*self._local.copy_of(group)]


def _age(node: int, answer: object) -> CopyAge:
    try:
        return msgspec.convert(answer, CopyAge)
    except msgspec.ValidationError as error:
        raise PeerError(f"malformed copy of a queue on node {node}: {error}") from error
