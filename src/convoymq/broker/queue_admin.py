"""Finds queues, and deletes them: on request, with their connection, when nobody uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from convoymq.broker.local_queues import LocalQueues
from convoymq.broker.registry import Counters
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.commands import DeleteQueue, OwnerGone
from convoymq.metadata.machine import QueueRecord, Vhost
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import BrokerError, Refused, Unavailable
from convoymq.model.refusals import (
    managed_queue,
    queue_subject,
    timed_out,
    unserved_by_group,
    unserved_queue_type,
    vhost_missing,
)
from convoymq.model.tasks import Tasks
from convoymq.queues.driver import driver_of
from convoymq.queues.interface import Queue
from convoymq.routing.queue_types import PlacementKind

log = structlog.get_logger()

COUNTS_TIMEOUT_S = 2.0
EXPIRED_POLL_S = 0.02
"""Time between two looks whether a queue is gone that expired."""


class QueueAdmin:
    """See the module text."""

    def __init__(
        self,
        metadata: AsyncMetadataStore,
        local: LocalQueues,
        nodes: ClusterNodes,
        settings: DefaultsConfig,
        counters: Counters,
        tasks: Tasks,
    ) -> None:
        self._metadata = metadata
        self._local = local
        self._nodes = nodes
        self._counters = counters
        self._tasks = tasks
        self._timeout_s = settings.operation_timeout_s
        self.find_group: Callable[[Vhost, str], Queue | None] = lambda vhost, name: None
        """Returns the handle of a topic's group by its queue name; set by who has topics."""
        #: Queues whose deletion is under way because nobody uses them any more.
        self._going: dict[tuple[str, str], asyncio.Task[None]] = {}

    def find_queue(self, vhost: str, name: str, owner: int | None = None) -> Queue:
        """Returns a queue that the connection may use; opens nothing.

        Raises:
            NotFound: there is none, or its home node is away.
            ResourceLocked: it belongs to another connection.
            Unavailable: this node is not that far.
        """
        place = self._metadata.tree.vhosts.get(vhost)
        if place is None:
            raise vhost_missing(vhost)
        if name not in place.queues:
            group = self.find_group(place, name)
            if group is not None:
                return group
        place.topology.queue(name, self._nodes.owner_name(owner))
        record = place.queues[name]
        queue = self._local.find(record)
        if queue is not None:
            if queue.ended is not None:
                raise queue.ended
            return queue
        subject = queue_subject(vhost, name)
        if not record.type.is_served:
            raise unserved_queue_type(subject, record.type.value)
        if record.placement is not PlacementKind.RAFT:
            # It has no master, or its node is about to open it.
            raise timed_out(subject)
        raise Unavailable(f"{subject} is not open here yet")

    async def delete_queue(
        self,
        vhost: str,
        name: str,
        *,
        if_unused: bool = False,
        if_empty: bool = False,
        owner: int | None = None,
    ) -> int:
        """Deletes a queue and returns how many ready messages it had; 0 when there is none.

        Raises:
            PreconditionFailed: in use, or not empty.
            NotServed: a condition on a quorum queue, while nodes of release 0.2 are around.
            ResourceLocked: it belongs to another connection.
            AccessRefused: it is part of something else.
        """
        place = self._metadata.tree.vhosts.get(vhost)
        if place is None:
            raise vhost_missing(vhost)
        record = place.queues.get(name)
        if record is None and self.find_group(place, name) is not None:
            raise unserved_by_group("queue.delete", queue_subject(vhost, name))
        if record is None:
            return 0
        place.topology.queue(name, self._nodes.owner_name(owner))
        if record.type.is_managed:
            raise managed_queue(queue_subject(vhost, name))
        driver = driver_of(record.type.value)
        heeded = driver is None or driver.heeds_conditions
        messages = await self._check_delete(
            record, if_unused=if_unused and heeded, if_empty=if_empty and heeded
        )
        await self._delete(record)
        self._counters.queues_deleted += 1
        return messages

    async def _check_delete(self, record: QueueRecord, *, if_unused: bool, if_empty: bool) -> int:
        """Returns the number of ready messages of a queue that may be deleted; 0 when it does not
        say and need not."""
        queue = self._local.find(record)
        if queue is None:
            return 0
        needed = if_unused or if_empty
        try:
            async with asyncio.timeout(self._timeout_s if needed else COUNTS_TIMEOUT_S):
                return await queue.check_delete(if_unused=if_unused, if_empty=if_empty)
        except TimeoutError:
            if needed:
                subject = queue_subject(record.vhost, record.name)
                raise Unavailable(f"{subject} did not answer in time") from None
        except (Refused, Unavailable):
            # Without an answer a condition cannot be judged; plain deletion goes on.
            if needed:
                raise
        return 0

    async def _delete(self, record: QueueRecord) -> None:
        command = DeleteQueue(vhost=record.vhost, name=record.name, group=record.group)
        await self._metadata.execute(command, self._timeout_s)

    async def connection_closed(self, owner: int) -> None:
        """Deletes the exclusive queues of a connection that is gone."""
        name = self._nodes.owner_name(owner)
        assert name is not None
        if self._metadata.tree.queue_index.owned_by(name):
            await self._metadata.execute(OwnerGone(owner=name), self._timeout_s)

    async def until_gone(self, vhost: str, name: str) -> None:
        """A queue that lost its last consumer is as good as gone: a declare gets a new one."""
        going = self._going.get((vhost, name))
        if going is not None:
            await asyncio.wait({going}, timeout=self._timeout_s)

    async def renewed(
        self, vhost: str, name: str, owner: int | None, ready_s: float = 0.0
    ) -> Queue | None:
        """Returns a queue that is declared again, as if it had been used now; None when its time
        was over and it went. Raises as `find_queue`, and Unavailable.

        Args:
            ready_s: how long to wait until it serves; 0 = not at all.
        """
        queue = self.find_queue(vhost, name, owner)
        if ready_s:
            await queue.ready(ready_s)
        place = self._metadata.tree.vhosts[vhost]
        record = place.queues.get(name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while not await queue.renew_lease():
            if loop.time() > deadline:
                raise Unavailable(f"{queue_subject(vhost, name)} has expired and does not go")
            # Its leader deletes it.
            await asyncio.sleep(EXPIRED_POLL_S)
            known = place.queues.get(name)
            if record is None or known is None or known.group != record.group:
                return None
        return queue

    async def make_way(self, place: Vhost, name: str) -> None:
        """Returns when no queue has the name any more that is as good as gone: one that lost its
        last consumer, or a transient one whose node is gone."""
        await self.until_gone(place.name, name)
        record = place.queues.get(name)
        queue = self._local.find(record) if record is not None else None
        if record is not None and queue is not None and queue.is_lost:
            await self._delete(record)

    # --- what queues with a home report --------------------------------------------------

    def on_unused(self, record: QueueRecord) -> None:
        """The last consumer left: an auto-delete queue goes."""
        place = self._metadata.tree.vhosts.get(record.vhost)
        declared = place.topology.find_queue(record.name) if place is not None else None
        if declared is not None and declared.auto_delete:
            self._delete_later(record)

    def on_expired(self, record: QueueRecord) -> None:
        """Unused for longer than `x-expires`."""
        self._delete_later(record)

    def on_disk_error(self, record: QueueRecord, error: Exception) -> None:
        """A queue's files cannot be read or written."""
        log.error("classic.disk_error", vhost=record.vhost, queue=record.name, reason=str(error))

    def _delete_later(self, record: QueueRecord) -> None:
        async def work() -> None:
            try:
                await self._delete(record)
            except BrokerError as error:
                log.warning("queue.not_deleted", queue=record.name, reason=error.text)

        key = (record.vhost, record.name)
        task = self._going[key] = self._tasks.spawn(work())
        task.add_done_callback(lambda done: self._forget_going(key, done))

    def _forget_going(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._going.get(key) is task:
            del self._going[key]
