"""Migrates queues to another type under their names (ADR 0128).

    begin ─▶ recorded ─▶ frozen ─▶ known by nodes ─▶ copied ─▶ recorded: switched
      │          └──────────┴────────────┴──────────────┴────▶ recorded: undone ─▶ thawed
      └─▶ refused

The node that leads a queue, or is its home, migrates it. One that finds its queue frozen, or with
a successor, by a migration that is none of its own, undoes it. A queue thaws when the tree is
beyond its successor's group, and does not have the successor: whatever was proposed about it comes
too late then.

Requests between nodes: [BEGIN, group, type, drop, rate] to the node that leads, answered with the
successor's group; [OUTCOME, 0, successor] to every node, answered by that which began it with
its `Progress`; [HOLD, group, successor, {session: seq}] to
every node.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import structlog

from convoymq.broker.alarms import Alarms
from convoymq.broker.copier import Copier
from convoymq.broker.local_queues import LocalQueues
from convoymq.broker.migration_plan import Plan, plan_of
from convoymq.broker.registry import Counters
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.commands import BeginMigration, EndMigration
from convoymq.metadata.machine import Change, ChangeKind, QueueRecord
from convoymq.model.clock import Clock
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import BrokerError, NotFound, PreconditionFailed, Unavailable
from convoymq.model.refusals import queue_subject
from convoymq.model.tasks import Tasks
from convoymq.queues.interface import LETTERS_LEAVE, Queue
from convoymq.queues.placement import Placement, placed
from convoymq.routing.types import Queue as DeclaredQueue
from convoymq.routing.types import QueueType
from convoymq.transport.control import Body, ControlPlane
from convoymq.transport.frame_kinds import KIND_MIGRATION

log = structlog.get_logger()

BEGIN, OUTCOME, HOLD = "begin", "outcome", "hold"
NODE_TIMEOUT_S = 5.0
"""Longest wait for a node to say that it holds its clients."""
RETRY_S = 0.5
POLL_S = 0.2
MIGRATING, MIGRATED, UNDONE = "migrating", "migrated", "undone"
OUTCOMES_KEPT = 1024
LOOK_GROUPS = 256
"""Queues that one `tick` looks at."""
RATE_MAX = 1_000_000_000


class Progress(NamedTuple):
    """Progress of a migration, as far as a node knows; also as it is sent."""

    messages: int = 0
    copied: int = 0
    state: str = MIGRATING
    reason: str = ""
    """Reason of its end, if it was undone."""


class Migrations:
    """See the module text. One per node; single threaded."""

    def __init__(
        self,
        *,
        nodes: ClusterNodes,
        metadata: AsyncMetadataStore,
        local: LocalQueues,
        placement: Placement,
        alarms: Alarms,
        control: ControlPlane,
        clock: Clock,
        settings: DefaultsConfig,
        counters: Counters,
        tasks: Tasks,
    ) -> None:
        self._nodes = nodes
        self._metadata = metadata
        self._local = local
        self._placement = placement
        self._alarms = alarms
        self._control = control
        self._clock = clock
        self._settings = settings
        self._counters = counters
        self._tasks = tasks
        self._running: set[int] = set()
        """Groups of queues that this node migrates, or whose migration it undoes."""
        self._line: list[int] = []
        """Groups that `tick` has not looked at since it began anew."""
        self._outcomes: OrderedDict[int, Progress] = OrderedDict()
        """Successor's group -> progress of a migration that began here, the oldest first."""
        control.handle(KIND_MIGRATION, self._on_request)

    # --- what is asked ---------------------------------------------------------------------

    def plan(self, vhost: str, name: str, to: str) -> Plan:
        """Returns what a queue would become. Raises Refused."""
        return plan_of(self._metadata.tree, vhost, name, to)

    async def begin(
        self, vhost: str, name: str, to: str, *, drop: bool = False, rate: int = 0
    ) -> tuple[QueueRecord, int]:
        """Begins a migration, and returns the queue's record and the successor's group.

        Args:
            drop: arguments that the type does not serve are left out.
            rate: messages that are copied a second, at most; 0 = any number.
        Raises:
            Refused: the queue cannot be migrated; nothing has changed.
            Unavailable: nobody leads it, or no answer came in time.
        """
        plan = self.plan(vhost, name, to)
        request = [BEGIN, plan.record.group, to, drop, min(rate, RATE_MAX)]
        found = await self._ask_leader(plan.record, request)
        return plan.record, found

    async def wait(self, record: QueueRecord, successor: int, timeout: float) -> Progress:
        """Waits until a migration has ended, for a time at most, and returns how far it is."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        known = Progress()
        while True:
            known = await self._progress(successor) or known
            state = self._state(record, successor)
            if state != MIGRATING and record.group not in self._running:
                if known.state == MIGRATING:
                    reason = (
                        "" if state == MIGRATED else "the node that migrated the queue has ended"
                    )
                    known = known._replace(state=state, reason=reason)
                return known
            if loop.time() >= until:
                return known._replace(state=MIGRATING, reason="")
            await asyncio.sleep(POLL_S)

    async def _progress(self, successor: int) -> Progress | None:
        """Returns how far a migration is, from the node that began it; None: no node knows."""
        for node in self._nodes.running():
            # The others did not begin it, or are about to end.
            with suppress(BrokerError):
                request = [OUTCOME, 0, successor]
                found = await self._control.request(node, KIND_MIGRATION, request, NODE_TIMEOUT_S)
                return Progress(*found)
        return None

    def _state(self, record: QueueRecord, successor: int) -> str:
        """Returns what has become of a migration, as far as this node's tree says. One that is
        rebuilt, because its log was damaged, says nothing."""
        tree = self._metadata.tree
        if self._local.is_behind or successor >= tree.next_group:
            return MIGRATING
        groups = tree.queue_index.by_group
        if successor in groups:
            return MIGRATING if record.group in groups else MIGRATED
        place = tree.vhosts.get(record.vhost)
        known = place.queues.get(record.name) if place is not None else None
        # It may have been migrated again.
        return MIGRATED if known is not None and known.predecessor >= successor else UNDONE

    async def _ask_leader(self, record: QueueRecord, request: list[object]) -> Body:
        queue = self._local.find(record)
        leader = self._local.leader_of(record)
        if queue is None or leader is None:
            raise Unavailable(f"{queue_subject(record.vhost, record.name)} has no leader")
        timeout = self._settings.operation_timeout_s
        return await self._control.request(leader, KIND_MIGRATION, request, timeout)

    async def _on_request(self, node: int, body: list[object]) -> object:
        op, group = body[0], int(str(body[1]))
        if op == HOLD:
            self._hold(group, int(str(body[2])), body[3])
            return True
        if op == OUTCOME:
            outcome = self._outcomes.get(int(str(body[2])))
            if outcome is None:
                raise NotFound("this node did not begin the migration")
            return list(outcome)
        if op == BEGIN:
            return await self._begin(group, str(body[2]), bool(body[3]), int(str(body[4])))
        raise NotFound(f"there is no request {op}")

    def _hold(self, group: int, successor: int, seqs: object) -> None:
        record = self._metadata.tree.queue_index.by_group.get(group)
        if record is None or self._has_ended(successor) or not isinstance(seqs, dict):
            # A request may come after the tree has the end of the migration: nothing would release
            # the queue.
            return
        # Also where nobody uses it yet: a channel that comes now has to wait.
        queue = self._local.find(record)
        if queue is None:
            return
        own = {int(session): int(seq) for session, seq in seqs.items()}
        queue.hold(successor, own)

    # --- as the node that leads the queue --------------------------------------------------

    async def _begin(self, group: int, to: str, drop: bool, rate: int) -> int:
        record = self._metadata.tree.queue_index.by_group.get(group)
        if record is None:
            raise NotFound("the queue is not known here yet")
        subject = queue_subject(record.vhost, record.name)
        plan = self.plan(record.vhost, record.name, to)
        if plan.dropped and not drop:
            raise PreconditionFailed(
                f"{subject} has arguments that queues of type '{to}' do not serve: "
                f"{', '.join(plan.dropped)}; they have to be dropped explicitly",
                subject=subject,
            )
        queue = self._local.get(group)
        if queue is None or self._local.leader_of(record) != self._nodes.node_id:
            raise Unavailable(f"{subject} is led elsewhere")
        if queue.ended is not None:
            raise queue.ended
        if group in self._running:
            raise PreconditionFailed(f"{subject} is being migrated already", subject=subject)
        obstacle = queue.migration_obstacle()
        if obstacle not in ("", LETTERS_LEAVE):
            raise PreconditionFailed(f"{subject} cannot be migrated: {obstacle}", subject=subject)
        # The messages are there twice for a while.
        self._alarms.check()
        self._running.add(group)
        try:
            policies = self._metadata.tree.vhosts[record.vhost].policies
            declared = DeclaredQueue(
                name=record.name, type=QueueType(to), durable=True, arguments=plan.arguments
            )
            command = BeginMigration(
                vhost=record.vhost,
                name=record.name,
                group=group,
                members=self._placement.members_for(
                    placed(declared, policies), self._nodes.for_placement()
                ),
                arguments=plan.arguments.encoded,
            )
            reply = await self._metadata.execute(command, self._settings.operation_timeout_s)
        except BaseException:
            # It may have been recorded: then nobody drives it, and it is undone.
            self._running.discard(group)
            raise
        assert isinstance(reply, dict)
        successor = int(reply["group"])
        self._outcomes[successor] = Progress()
        while len(self._outcomes) > OUTCOMES_KEPT:
            self._outcomes.popitem(last=False)
        self._tasks.spawn(self._migrate(record, queue, successor, rate))
        return successor

    async def _migrate(self, record: QueueRecord, queue: Queue, successor: int, rate: int) -> None:
        began_ms = self._clock.monotonic_ms()
        facts = {"vhost": record.vhost, "queue": record.name, "successor": successor}
        reason = "the queue was deleted, or another node undid the migration"
        is_switched = False
        try:
            try:
                await self._copy_all(record, queue, successor, rate)
                is_switched = await self._end(record, successor, switched=True)
            except BrokerError as error:
                reason = error.text
            # The end may have been recorded although its answer was lost.
            if is_switched or await self._settle(record, successor):
                self._note(successor, state=MIGRATED)
                self._counters.queues_migrated += 1
                took = self._clock.monotonic_ms() - began_ms
                copied = self._outcomes[successor].copied
                log.info("queue.migrated", **facts, messages=copied, took_ms=took)
                return
            self._note(successor, state=UNDONE, reason=reason)
            log.warning("queue.migration_failed", **facts, reason=reason)
            self._thaw(record.group, successor)
        finally:
            self._running.discard(record.group)

    def _note(self, successor: int, **changes: object) -> None:
        known = self._outcomes.get(successor, Progress())
        self._outcomes[successor] = known._replace(**changes)  # type: ignore[arg-type]

    async def _copy_all(self, record: QueueRecord, queue: Queue, successor: int, rate: int) -> None:
        """Freezes a queue and copies it. Raises Refused, Unavailable."""
        timeout = self._settings.operation_timeout_s
        target = self._target(successor)
        await target.wait_until_open(timeout)
        await target.ready(timeout)
        await queue.freeze(successor, timeout)
        await self._until_unobstructed(queue)
        facts = {"vhost": record.vhost, "queue": record.name, "successor": successor}
        total = queue.stored_count()
        self._note(successor, messages=total)
        log.info("queue.migration_frozen", **facts, messages=total)
        await self._tell_nodes(record.group, successor, queue.applied_seqs())

        def moved(copied: int) -> None:
            self._note(successor, copied=copied)

        # The queue may have been deleted meanwhile, and its successor with it.
        target = self._target(successor)
        copier = Copier(target, self._local.new_session(), rate, self._alarms.check, moved)
        try:
            await copier.copy(queue)
        finally:
            if successor in self._metadata.tree.queue_index.by_group:
                copier.close()
        if queue.frozen != successor or self._local.leader_of(record) != self._nodes.node_id:
            raise Unavailable("another node leads the queue")
        log.info("queue.migration_copied", **facts, messages=copier.copied)

    async def _until_unobstructed(self, queue: Queue) -> None:
        """Waits until the dead letters of a frozen queue have left. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        until = loop.time() + NODE_TIMEOUT_S
        while (obstacle := queue.migration_obstacle()) == LETTERS_LEAVE and loop.time() < until:
            await asyncio.sleep(POLL_S / 10)
        if obstacle:
            raise Unavailable(obstacle)

    def _target(self, successor: int) -> Queue:
        record = self._metadata.tree.queue_index.by_group.get(successor)
        queue = self._local.find(record) if record is not None else None
        if queue is None:
            raise Unavailable("the successor is not open here")
        return queue

    async def _tell_nodes(self, group: int, successor: int, seqs: dict[int, int]) -> None:
        """Tells every node how far its sessions had come. One that does not answer refuses what is
        pending there when it hears of the switch."""
        by_node: dict[int, dict[int, int]] = {node: {} for node in self._nodes.running()}
        for session, seq in seqs.items():
            by_node.setdefault(session >> 56, {})[session] = seq

        async def tell(node: int, own: dict[int, int]) -> None:
            request = [HOLD, group, successor, own]
            try:
                await self._control.request(node, KIND_MIGRATION, request, NODE_TIMEOUT_S)
            except BrokerError as error:
                log.warning("queue.migration_unheard", node=node, reason=error.text)

        await asyncio.gather(*(tell(node, own) for node, own in by_node.items()))

    async def _end(self, record: QueueRecord, successor: int, *, switched: bool) -> bool:
        """Has the end of a migration recorded, and returns whether it was the end."""
        command = EndMigration(
            vhost=record.vhost,
            name=record.name,
            group=record.group,
            successor=successor,
            switched=switched,
        )
        try:
            return bool(await self._metadata.execute(command, self._settings.operation_timeout_s))
        except NotFound:
            # The virtual host is gone.
            return False

    async def _settle(self, record: QueueRecord, successor: int) -> bool:
        """Ends a migration whatever became of it, and returns whether the successor has taken the
        queue's place. The session of the tree keeps commands in order: once this one is answered,
        no earlier one comes."""
        while (state := self._state(record, successor)) == MIGRATING:
            # The tree may have no leader. Nobody else may undo it before this answer.
            with suppress(BrokerError):
                await self._end(record, successor, switched=False)
            if self._state(record, successor) == MIGRATING:
                await asyncio.sleep(RETRY_S)
        return state == MIGRATED

    def _thaw(self, group: int, successor: int) -> None:
        record = self._metadata.tree.queue_index.by_group.get(group)
        queue = self._local.get(group)
        if record is None or queue is None or queue.frozen != successor:
            return
        try:
            queue.thaw()
        except Unavailable:
            # The node that leads it does.
            return
        log.info(
            "queue.migration_undone", vhost=record.vhost, queue=record.name, successor=successor
        )

    # --- migrations of others --------------------------------------------------------------

    def on_change(self, change: Change) -> None:
        """The tree has changed: a queue whose successor is gone goes on."""
        record = change.record
        if change.kind is ChangeKind.RESTORED:
            for queue in list(self._local.handles()):
                self._release(queue)
        elif change.kind is ChangeKind.QUEUE_DELETED and record is not None and record.predecessor:
            held = self._local.get(record.predecessor)
            if held is not None:
                self._release(held)

    def _release(self, queue: Queue) -> None:
        if queue.group in self._metadata.tree.queue_index.by_group and self._has_ended(
            queue.known_seqs[0]
        ):
            queue.release()

    def _has_ended(self, successor: int) -> bool:
        """Returns whether the tree is beyond a migration that was undone."""
        tree = self._metadata.tree
        return successor < tree.next_group and successor not in tree.queue_index.by_group

    def tick(self) -> None:
        """Undoes what nobody drives, of queues that this node leads."""
        if self._local.is_behind:
            return
        tree = self._metadata.tree
        index = tree.queue_index
        for group, successor in list(index.successors.items()):
            record = index.by_group[group]
            if group not in self._running and self._local.leader_of(record) == self._nodes.node_id:
                self._running.add(record.group)
                self._tasks.spawn(self._undo(record, successor.group))
        for group in self._next_groups():
            queue = self._local.get(group)
            if queue is None:
                continue
            if queue.known_seqs[0]:
                # The change may have come while the tree was behind.
                self._release(queue)
            if queue.frozen and group not in self._running and self._has_ended(queue.frozen):
                self._thaw(group, queue.frozen)

    def _next_groups(self) -> list[int]:
        """Returns some groups of this node's queues, all of them in turn."""
        if not self._line:
            self._line = [queue.group for queue in self._local.handles()]
        taken = self._line[-LOOK_GROUPS:]
        del self._line[-LOOK_GROUPS:]
        return taken

    async def _undo(self, record: QueueRecord, successor: int) -> None:
        try:
            if not await self._settle(record, successor):
                self._thaw(record.group, successor)
        finally:
            self._running.discard(record.group)
