"""The logs of replicated queues, as operators look at them: the state of each member, a snapshot
that is saved now, and a write-ahead log that is emptied now.

Every member answers for itself. All of it may be asked for twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from convoymq.broker.group_requests import AGAIN, DONE, Answer, GroupOperations, GroupRequests
from convoymq.broker.membership import AT_ONCE
from convoymq.broker.selection import Selection, check_group
from convoymq.metadata.machine import QueueRecord
from convoymq.metadata.reads import METADATA_GROUP
from convoymq.model.errors import (
    BrokerError,
    Refused,
    StorageFault,
    Unavailable,
)
from convoymq.model.replica_status import REPLICA_COLUMNS
from convoymq.queues.interface import Row
from convoymq.replication.raft.membership import NEVER
from convoymq.replication.raft.types import ROLE_NAMES
from convoymq.shells.groups.replica import Replica

STATUS_TIMEOUT_S = 2.0
UPKEEP_TIMEOUT_S = 60.0
"""For a snapshot to be saved, or a file of the write-ahead log to be emptied."""
POLL_S = 0.02
COLUMNS = (*REPLICA_COLUMNS, "Reason")
"""Of `status`: why a replica has stopped comes last."""
NODE_DOWN = "nodedown"
NO_REPLICA = "noproc"
TIMED_OUT = "timeout"
_ROLES = dict(zip(ROLE_NAMES, ("follower", "pre_vote", "candidate", "leader"), strict=True))


def membership_of(replica: Replica, node: int) -> str:
    """Returns the kind of member that a node is, as a replica knows."""
    learner = replica.core.members.learner(node)
    if learner is None:
        return "voter"
    return "non_voter" if learner.promote_at == NEVER else "promotable"


class QueueLogs(GroupOperations):
    """See the module text. One per node."""

    def __init__(self, requests: GroupRequests) -> None:
        super().__init__(requests)
        requests.serve("status", self._on_status)
        requests.serve("checkpoint", self._on_checkpoint)
        requests.serve("reclaim", self._on_reclaim)

    # --- on any node ---------------------------------------------------------------------

    async def status(self, record: QueueRecord) -> list[Row]:
        """Returns a row for each member of a queue, by `COLUMNS`; those that do not answer have
        their state only. Raises PreconditionFailed."""
        check_group(record)
        return await self._rows(record.members, record.group)

    async def metadata_status(self) -> list[Row]:
        """Returns a row for each node of the cluster, as `status` does, of the metadata group."""
        return await self._rows(sorted(self._tree.nodes), METADATA_GROUP)

    async def _rows(self, nodes: Iterable[int], group: int) -> list[Row]:
        async def row(node: int) -> Row:
            state, values = await self._status_of(node, group)
            return dict(zip(COLUMNS, (self._nodes.name_of(node), state, *values), strict=True))

        return list(await asyncio.gather(*map(row, nodes)))

    async def _status_of(self, node: int, group: int) -> tuple[str, list[object]]:
        nothing: list[object] = [""] * (len(COLUMNS) - 2)
        if not self._nodes.is_up(node):
            return NODE_DOWN, nothing
        try:
            status, found = await self._requests.ask(
                node, "status", group, timeout_s=STATUS_TIMEOUT_S
            )
        except BrokerError:
            return TIMED_OUT, nothing
        if status != DONE or not isinstance(found, list) or len(found) != len(COLUMNS) - 1:
            return NO_REPLICA, nothing
        return str(found[0]), found[1:]

    async def force_checkpoint(self, selection: Selection) -> list[Row]:
        """Has every member of the selected queues save its state now; a row for each queue."""
        selection.check()
        found = [record for record in self._tree.records() if selection.matches(record)]
        turn = asyncio.Semaphore(AT_ONCE)

        async def row(record: QueueRecord) -> Row:
            result = "ok"
            async with turn:
                try:
                    await self._ask_members(record, "checkpoint")
                except BrokerError as error:
                    result = f"error: {error.text}"
            return {"vhost": record.vhost, "name": record.name, "result": result}

        ordered = sorted(found, key=lambda record: (record.vhost, record.name))
        return list(await asyncio.gather(*map(row, ordered)))

    async def reclaim_memory(self, record: QueueRecord) -> None:
        """Has every member's node empty what its write-ahead log holds so far, and give back what
        the queue has in memory.

        Raises:
            PreconditionFailed: the queue has no replicas.
            Unavailable: a member is away, or could not in time.
        """
        check_group(record)
        await self._ask_members(record, "reclaim")

    async def _ask_members(self, record: QueueRecord, name: str) -> None:
        """Asks all members. Raises BrokerError when one of them is away or could not."""

        async def ask(node: int) -> str:
            if not self._nodes.is_up(node):
                return NODE_DOWN
            status, detail = await self._requests.ask(
                node, name, record.group, timeout_s=UPKEEP_TIMEOUT_S
            )
            return "" if status == DONE else str(detail)

        answers = await asyncio.gather(*map(ask, record.members), return_exceptions=True)
        for node, answer in zip(record.members, answers, strict=True):
            if isinstance(answer, BrokerError):
                raise Unavailable(f"node {self._nodes.name_of(node)}: {answer.text}")
            if isinstance(answer, BaseException):
                raise answer
            if answer:
                raise Unavailable(f"node {self._nodes.name_of(node)}: {answer}")

    # --- on a member -----------------------------------------------------------------------

    async def _on_status(self, group: int, _arguments: list[object]) -> Answer:
        stopped = self._host.stopped.get(group)
        replica = self._host.replica(group) or stopped
        if replica is None:
            return AGAIN, NO_REPLICA
        status = self._host.status(group)
        return DONE, [
            "stopped" if stopped is not None else _ROLES[status.role],
            membership_of(replica, self._nodes.node_id),
            status.last_index,
            status.written_index,
            status.last_applied,
            status.commit_index,
            status.snapshot_index,
            status.term,
            status.version,
            stopped.stopped if stopped is not None else "",
        ]

    async def _on_checkpoint(self, group: int, _arguments: list[object]) -> Answer:
        replica = self._host.replica(group)
        plan = self._host.plan(group)
        if replica is None or plan is None:
            return AGAIN, NO_REPLICA
        log = replica.log
        if plan.applied <= log.snapshot_index:
            return DONE, log.snapshot_index
        if plan.take_snapshot is None:
            return AGAIN, "the replica is being replaced by a snapshot"
        saved: asyncio.Future[BaseException | None]
        saved = asyncio.get_running_loop().create_future()

        def done(error: BaseException | None) -> None:
            if not saved.done():
                saved.set_result(error)

        log.save_snapshot(plan.take_snapshot(), done)
        error = await saved
        # Refused: upkeep has just saved a newer one.
        if error is not None and not isinstance(error, Refused):
            raise StorageFault(f"the snapshot could not be saved: {error}")
        return DONE, log.snapshot_index

    async def _on_reclaim(self, group: int, _arguments: list[object]) -> Answer:
        replica = self._host.replica(group)
        if replica is None:
            return AGAIN, NO_REPLICA
        storage = self._host.storage
        generation = storage.turn_wal()
        await _until(lambda: storage.has_emptied(generation))
        storage.release_memory(replica.log)
        return DONE, True


async def _until(condition: Callable[[], bool]) -> None:
    """Waits for a condition. Raises Unavailable."""
    try:
        async with asyncio.timeout(UPKEEP_TIMEOUT_S):
            while not condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Unavailable("the write-ahead log could not be emptied in time") from None
