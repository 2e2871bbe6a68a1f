"""Gives quorum queues the members that they should have: continuous membership reconciliation.

Each node looks after the queues that it leads, and nothing is remembered between two checks: what
a node that dies has begun, the next leader goes on with. A check makes at most one change of each
queue; a change makes the next check due soon (ADR 0048).
"""

from __future__ import annotations

import asyncio

import structlog

from convoymq.broker.balance import MemberStep, reconciling_step
from convoymq.broker.group_requests import GroupOperations, GroupRequests
from convoymq.broker.membership import AT_ONCE, QueueMembership
from convoymq.metadata.machine import Change, QueueRecord
from convoymq.model.config import ReconciliationConfig
from convoymq.model.errors import BrokerError
from convoymq.model.slices import in_slices
from convoymq.model.tasks import Tasks
from convoymq.replication.raft.membership import NEVER
from convoymq.routing.policies import effective_settings
from convoymq.routing.queue_types import rules_of
from convoymq.shells.groups.replica import Replica

log = structlog.get_logger()

KEY = "target-group-size"


class MembershipReconciliation(GroupOperations):
    """See the module text. One per node."""

    def __init__(
        self,
        requests: GroupRequests,
        *,
        settings: ReconciliationConfig,
        membership: QueueMembership,
        tasks: Tasks,
    ) -> None:
        super().__init__(requests)
        self._settings = settings
        self._membership = membership
        self._tasks = tasks
        self._due_ms = self._clock.monotonic_ms() + settings.trigger_interval_ms
        self._checking: asyncio.Task[None] | None = None

    def on_change(self, _change: Change) -> None:
        """The tree has changed: queues, their members, policies, nodes, who is drained."""
        self.trigger()

    def trigger(self) -> None:
        """Something has happened after which a queue may need another member."""
        soon_ms = self._clock.monotonic_ms() + self._settings.trigger_interval_ms
        self._due_ms = min(self._due_ms, soon_ms)

    def tick(self) -> None:
        """Begins a check when it is due; to be called a few times a second."""
        if not self._settings.enabled or self._clock.monotonic_ms() < self._due_ms:
            return
        if self._checking is None or self._checking.done():
            self._due_ms = self._clock.monotonic_ms() + self._settings.interval_ms
            self._checking = self._tasks.spawn(self._check())

    def target_of(self, record: QueueRecord) -> int:
        """Returns how many members a quorum queue should have; 0 = not configured."""
        vhost = self._tree.vhosts[record.vhost]
        declared = vhost.topology.find_queue(record.name)
        assert declared is not None
        asked = effective_settings(declared, vhost.policies).get(KEY, 0)
        assert isinstance(asked, int)
        return max(asked, self._settings.target_group_size or 0)

    async def _check(self) -> None:
        if self._nodes.is_drained(self._nodes.node_id):
            # Its leaderships move away.
            return
        steps, waiting = await self._plan()
        turn = asyncio.Semaphore(AT_ONCE)

        async def change(record: QueueRecord, step: MemberStep) -> None:
            async with turn:
                await self._change(record, step)

        await asyncio.gather(*(change(record, step) for record, step in steps))
        if steps or waiting:
            self.trigger()

    async def _plan(self) -> tuple[list[tuple[QueueRecord, MemberStep]], bool]:
        """Returns the changes to make now, and whether a queue waits for a new member to get its
        vote."""
        replicas = dict(self._tree.queue_index.replicas)
        steps: list[tuple[QueueRecord, MemberStep]] = []
        waiting = False
        async for record in in_slices(list(self._tree.records())):
            rules = rules_of(record.type.value)
            replica = self._host.replica(record.group)
            if replica is None or not replica.is_leader or rules is None:
                continue
            if KEY not in rules.policies or record.group not in self._tree.queue_index.by_group:
                continue
            if self._is_joining(replica):
                waiting = True
                continue
            step = self._step(record, replica, replicas)
            if step is not None:
                replicas[step.add] = replicas.get(step.add, 0) + 1
                steps.append((record, step))
        return steps, waiting

    def _step(
        self, record: QueueRecord, replica: Replica, replicas: dict[int, int]
    ) -> MemberStep | None:
        target = self.target_of(record)
        members = replica.core.members.nodes
        if len(members) >= target and not self._settings.auto_remove:
            return None
        candidates = [
            node
            for node in self._nodes.running()
            if node in self._tree.nodes
            and not self._nodes.is_drained(node)
            # One with an older release may not know the rules that the group has in force.
            and not self._host.member_refusal(record.group, node)
        ]
        return reconciling_step(
            members,
            target=target,
            cluster=self._tree.nodes.keys(),
            candidates=candidates,
            replicas=replicas,
            places=self._tree.places(),
            auto_remove=self._settings.auto_remove,
        )

    def _is_joining(self, replica: Replica) -> bool:
        """Returns whether a new member that can be reached has no vote yet: the next one waits for
        it."""
        return any(
            learner.promote_at != NEVER and self._nodes.is_up(learner.node)
            for learner in replica.core.members.learners
        )

    async def _change(self, record: QueueRecord, step: MemberStep) -> None:
        try:
            if step.remove:
                size = await self._membership.delete(record, step.remove)
            else:
                size = await self._membership.add(record, step.add)
        except BrokerError as error:
            # The next check tries again.
            log.warning(
                "quorum.members_not_reconciled",
                vhost=record.vhost, queue=record.name, added=step.add, removed=step.remove,
                reason=error.text,
            )  # fmt: skip
            return
        log.info(
            "quorum.members_reconciled",
            vhost=record.vhost, queue=record.name, added=step.add, removed=step.remove, size=size,
        )  # fmt: skip
