"""Leadership of queues: handed over one by one, or balanced over all nodes.

Rebalancing runs on the node that leads the metadata group, which makes it one at a time in the
whole cluster. It keeps nothing: when that node loses the metadata group, rebalancing ends with what
has moved so far, and may be asked for again (ADR 0041).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import msgspec
import structlog

from convoymq.broker.balance import LedGroup, Move, plan_by_count, plan_by_load
from convoymq.broker.group_requests import (
    AGAIN,
    DONE,
    NOT_LEADER,
    Answer,
    GroupOperations,
    GroupRequests,
)
from convoymq.broker.local_queues import LocalQueues
from convoymq.broker.selection import WITH_MIRRORED, Selection
from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import BrokerError, PreconditionFailed, Refused, Unavailable
from convoymq.model.slices import in_slices
from convoymq.model.tasks import Tasks
from convoymq.queues.interface import Row
from convoymq.routing.queue_types import PlacementKind

if TYPE_CHECKING:
    from convoymq.broker.cluster_queries import ClusterQueries

log = structlog.get_logger()

IN_PROGRESS = "rebalance_in_progress"
LEADERS_TRIES = 20
LEADERS_PAUSE_S = 0.05
TRANSFER_TIMEOUT_S = 5.0
TAKE_OVER_TIMEOUT_S = 2.0
"""Longest time that the next leader may take; the former one goes on before that."""
POLL_S = 0.005
SAMPLE_S = 1.0
"""Time for which messages are counted to get the load of a queue."""
PASSES_MAX = 3
"""Moves that failed, or what elections changed meanwhile, are planned for anew."""
RATE_DEFAULT = 50
RATE_MAX = 10_000
BY_COUNT = "count"
BY_LOAD = "load"


class Leadership(GroupOperations):
    """Transfers of leadership, asked for on any node."""

    def __init__(self, requests: GroupRequests, local: LocalQueues) -> None:
        super().__init__(requests)
        self._local = local
        self.timeout_s = TRANSFER_TIMEOUT_S
        """For one transfer."""
        requests.serve("transfer", self._on_transfer)

    async def transfer(self, record: QueueRecord, node: int) -> None:
        """Makes a node the leader of a queue, or the master's.

        Raises:
            Refused: it leads already, is no voting member, has no synchronised mirror, is away or
                drained.
            Unavailable: it could not in time, mostly because it is behind.
        """
        if record.placement is PlacementKind.HOME:
            raise PreconditionFailed("Cannot transfer leadership of a non-quorum queue")
        if node not in self._tree.nodes or not self._nodes.is_up(node):
            raise PreconditionFailed(f"node_not_running: node {self._nodes.name_of(node)}")
        if self._nodes.is_drained(node):
            raise PreconditionFailed(f"node {self._nodes.name_of(node)} is drained")
        is_ring = record.placement is PlacementKind.RING
        leader = (
            record.home
            if is_ring
            else await self._requests.find_leader(record.group, record.members)
        )
        if leader == node:
            raise PreconditionFailed("The target node is already the leader of this queue")
        if is_ring:
            await self._requests.ask(
                leader, "transfer", record.group, node, timeout_s=self.timeout_s
            )
            await self._await_master(record.group, node)
            return
        await self._requests.ask_leader(
            record.group, record.members, "transfer", node, timeout_s=self.timeout_s
        )

    async def _on_transfer(self, group: int, arguments: list[object]) -> Answer:
        (to,) = arguments
        assert isinstance(to, int)
        record = self._tree.queue_index.by_group.get(group)
        if record is not None and record.placement is PlacementKind.RING:
            self._local.hand_over(record, to)
            return DONE, to
        return await self.hand_over(group, to)

    async def _await_master(self, group: int, node: int) -> None:
        """Returns when the tree of this node says that a node has the master of a queue."""
        try:
            async with asyncio.timeout(self.timeout_s):
                while (record := self._tree.queue_index.by_group.get(group)) is not None:
                    if record.home == node:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            name = self._nodes.name_of(node)
            raise Unavailable(f"node {name} did not take over in time") from None

    async def hand_over(self, group: int, to: int) -> Answer:
        """As leader: hands a group to a voter and waits until it leads. Raises Refused."""
        replica = self._host.replica(group)
        if to == self._nodes.node_id and replica is not None and replica.is_leader:
            return DONE, to
        reason = self.begin(group, to)
        if reason or replica is None:
            return AGAIN, reason
        self._host.wake()
        try:
            async with asyncio.timeout(TAKE_OVER_TIMEOUT_S):
                while self.is_under_way(group):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return AGAIN, "the election after the transfer has no result yet"
        if replica.leader == to:
            return DONE, to
        return AGAIN, f"node {self._nodes.name_of(to)} did not take over"

    def begin(self, group: int, to: int) -> str:
        """As leader: begins to hand a group to a voter. Returns why it cannot now; "" = it has
        begun, and the host is to be woken. Raises Refused."""
        replica = self._host.replica(group)
        if replica is None or not replica.is_leader:
            return NOT_LEADER
        if to not in replica.members:
            raise PreconditionFailed(f"node {self._nodes.name_of(to)} is not a voting member")
        if not replica.is_live(to):
            # Commands would wait for it: the queue must not pause longer than for an election.
            return f"node {self._nodes.name_of(to)} is behind or cannot be reached"
        if replica.core.transfer_target or not self._host.transfer_leadership(group, to):
            return "another transfer is under way"
        return ""

    def is_under_way(self, group: int) -> bool:
        """Returns whether a transfer of a group has no result yet: it is prepared, or its
        election runs."""
        replica = self._host.replica(group)
        if replica is None:
            return False
        if replica.is_leader:
            return replica.core.transfer_target != 0
        return replica.leader is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceRequest:
    """Queues to rebalance, and the way to do it."""

    queues: Selection
    by: str = BY_COUNT
    rate: int = RATE_DEFAULT
    """Leaderships per second at most."""
    dry_run: bool = False

    def check(self) -> None:
        """Raises PreconditionFailed for what cannot be done."""
        if self.by not in (BY_COUNT, BY_LOAD):
            raise PreconditionFailed(f"leaders are balanced by count or by load, not {self.by!r}")
        if not 1 <= self.rate <= RATE_MAX:
            raise PreconditionFailed(f"the rate is 1 to {RATE_MAX} per second")
        self.queues.check()


@dataclass(slots=True, kw_only=True)
class Progress:
    """State of the latest rebalancing of this node."""

    running: bool = False
    by: str = BY_COUNT
    moved: int = 0
    planned: int = 0
    failed: list[Row] = field(default_factory=list)
    ended: str = ""
    """`done`, or why it ended before."""
    number: int = 0
    """Counts the rebalancings that this node ran."""
    leaders: dict[str, dict[str, int]] = field(default_factory=dict)
    """Node name -> type -> queues that it leads, of those that took part."""


class Rebalancer(GroupOperations):
    """Moves leaderships until no node has more than its share."""

    def __init__(
        self,
        requests: GroupRequests,
        leadership: Leadership,
        cluster: ClusterQueries,
        tasks: Tasks,
    ) -> None:
        super().__init__(requests)
        self._leadership = leadership
        self._cluster = cluster
        self._tasks = tasks
        self._progress = Progress()
        requests.serve("rebalance", self._on_start)
        requests.serve("rebalance_progress", self._on_progress)
        requests.serve("rebalance_plan", self._on_plan)

    # --- on any node ---------------------------------------------------------------------

    async def start(self, request: RebalanceRequest, timeout_s: float) -> object:
        """Starts rebalancing and returns its progress, or with `dry_run` the planned moves.

        Raises:
            PreconditionFailed: `rebalance_in_progress`, the request makes no sense, or a node has a
                release that does not do this.
            Unavailable: nobody leads the metadata group.
        """
        request.check()
        for node in self._nodes.running():
            # What such a node leads would be missing in the plan.
            self._requests.check_release(node)
        name = "rebalance_plan" if request.dry_run else "rebalance"
        return await self._ask(name, asdict(request), timeout_s=timeout_s)

    async def progress(self, timeout_s: float) -> object:
        """Returns the progress of the latest rebalancing, as the leader of the metadata group has
        it."""
        return await self._ask("rebalance_progress", timeout_s=timeout_s)

    async def _ask(self, name: str, *arguments: object, timeout_s: float) -> object:
        members = list(self._tree.nodes)
        return await self._requests.ask_leader(0, members, name, *arguments, timeout_s=timeout_s)

    # --- on the leader of the metadata group -----------------------------------------------

    @property
    def _coordinates(self) -> bool:
        metadata = self._host.replica(0)
        return metadata is not None and metadata.is_leader

    async def _on_start(self, _group: int, arguments: list[object]) -> Answer:
        request = _request_in(arguments)
        if not self._coordinates:
            return AGAIN, NOT_LEADER
        if self._progress.running:
            raise PreconditionFailed(IN_PROGRESS)
        self._progress = Progress(running=True, by=request.by, number=self._progress.number + 1)
        self._tasks.spawn(self._run(request, self._progress))
        return DONE, asdict(self._progress)

    async def _on_progress(self, _group: int, _arguments: list[object]) -> Answer:
        return DONE, asdict(self._progress)

    async def _on_plan(self, _group: int, arguments: list[object]) -> Answer:
        request = _request_in(arguments)
        if not self._coordinates:
            return AGAIN, NOT_LEADER
        moves = await self._plan(request, await self._leaders(request), frozenset())
        return DONE, [self._move_row(move) for move in moves]

    async def _run(self, request: RebalanceRequest, progress: Progress) -> None:
        log.info("queue.rebalance_started", node=self._nodes.node_id, by=request.by)
        failed: set[int] = set()
        seen: set[int] = set()
        try:
            for _ in range(PASSES_MAX):
                leaders = await self._leaders_of(request, seen)
                seen.update(each.group for each in leaders)
                moves = await self._plan(request, leaders, failed)
                if not moves:
                    break
                progress.planned += len(moves)
                await self._carry_out(request, moves, progress, failed)
            progress.leaders = self._count(await self._leaders_of(request, seen))
            progress.ended = "done"
        except BrokerError as error:
            progress.ended = error.text
        except asyncio.CancelledError:
            progress.ended = "the node stops"
            raise
        finally:
            progress.running = False
            log.info("queue.rebalance_ended", node=self._nodes.node_id, moved=progress.moved,
                     failed=len(progress.failed), result=progress.ended)  # fmt: skip

    async def _carry_out(
        self, request: RebalanceRequest, moves: Sequence[Move], progress: Progress, failed: set[int]
    ) -> None:
        for move in moves:
            due_ms = self._clock.monotonic_ms() + math.ceil(1000 / request.rate)
            if not self._coordinates:
                raise Refused("another node leads the metadata group now")
            record = self._tree.queue_index.by_group.get(move.group)
            if record is None:
                continue
            try:
                await self._leadership.transfer(record, move.target)
                progress.moved += 1
            except BrokerError as error:
                failed.add(move.group)
                progress.failed.append({**self._move_row(move), "reason": error.text})
            wait_ms = due_ms - self._clock.monotonic_ms()
            if wait_ms > 0:
                await asyncio.sleep(wait_ms / 1000)

    async def _leaders(self, request: RebalanceRequest) -> list[LedGroup]:
        """Returns the groups that take part, with their leaders as these say."""
        rows = await self._cluster.leaderships()
        before = {row["group"]: row["messages"] for row in rows}
        if request.by == BY_LOAD:
            await asyncio.sleep(SAMPLE_S)
            rows = await self._cluster.leaderships()
        records = self._tree.queue_index.by_group
        found = []
        async for row in in_slices(rows):
            record = records.get(row["group"])
            if record is not None and request.queues.matches(record):
                messages = row["messages"]
                found.append(
                    LedGroup(
                        group=row["group"],
                        leader=row["leader"],
                        targets=tuple(row["targets"]),
                        log_entries=row["log_entries"],
                        load=max(0, messages - before.get(row["group"], messages)) / SAMPLE_S,
                    )
                )
        return found

    async def _leaders_of(self, request: RebalanceRequest, groups: set[int]) -> list[LedGroup]:
        """Returns the leaders when all groups have one again, or after a second: a new leader may
        not have begun to lead when the one before it has ended."""
        for _ in range(LEADERS_TRIES):
            leaders = await self._leaders(request)
            missing = groups.difference(each.group for each in leaders)
            if not missing.intersection(self._tree.queue_index.by_group):
                break
            await asyncio.sleep(LEADERS_PAUSE_S)
        return leaders

    async def _plan(
        self, request: RebalanceRequest, leaders: Sequence[LedGroup], failed: Iterable[int]
    ) -> list[Move]:
        nodes = [node for node in self._nodes.running() if not self._nodes.is_drained(node)]
        plan = plan_by_load if request.by == BY_LOAD else plan_by_count
        return [move for move in plan(leaders, nodes) if move.group not in failed]

    def _count(self, leaders: Sequence[LedGroup]) -> dict[str, dict[str, int]]:
        nodes = {*self._nodes.running(), *(each.leader for each in leaders)}
        counts = {node: dict.fromkeys(WITH_MIRRORED[1:], 0) for node in sorted(nodes)}
        for each in leaders:
            record = self._tree.queue_index.by_group.get(each.group)
            if record is not None:
                counts[each.leader][record.type.value] += 1
        return {self._nodes.name_of(node): found for node, found in counts.items()}

    def _move_row(self, move: Move) -> Row:
        record = self._tree.queue_index.by_group.get(move.group)
        return {
            "vhost": record.vhost if record is not None else "",
            "name": record.name if record is not None else "",
            "from": self._nodes.name_of(move.source),
            "to": self._nodes.name_of(move.target),
        }


def _request_in(arguments: list[object]) -> RebalanceRequest:
    (fields,) = arguments
    assert isinstance(fields, dict)
    return msgspec.convert(fields, RebalanceRequest)
