"""Spreads replicas over the processes of a machine: data that one process had are shared with those
that came later.

The first process of a machine that runs plans for the machine: one replica moves at a time, from
the process with the most to the one with the fewest. The leader of the queue carries the move out.

    no copy ─▶ learner that stands for the source, copies the data ─▶ has the vote of the source

The source keeps its vote until the copy is complete, so a queue has as many voters as before, on
as many machines. Source and target are in the group's log (`replication/raft/membership.py`,
`Membership.stand_in`): the next leader, and the next process that plans, go on with a move that was
begun (ADR 0227).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import structlog

from convoymq.broker.group_requests import (
    AGAIN,
    DONE,
    NOT_LEADER,
    Answer,
    GroupOperations,
    GroupRequests,
)
from convoymq.broker.membership import QueueMembership
from convoymq.metadata.machine import QueueRecord
from convoymq.metadata.placement import siblings
from convoymq.model.errors import BrokerError
from convoymq.model.slices import in_slices
from convoymq.model.tasks import Tasks
from convoymq.replication.raft.membership import NEVER, Membership
from convoymq.replication.raft.types import REPLICATE
from convoymq.routing.queue_types import PlacementKind
from convoymq.shells.groups.replica import Replica

log = structlog.get_logger()

LOOK_MS = 10_000
"""So often it is looked whether a replica should move."""
MOVE_TIMEOUT_S = 60.0
"""A longer move is asked for again."""
LACKS_MAX = 256
"""Entries that a copy may lack when it takes over the vote: what is under way."""
SCATTER = 2_654_435_761
"""A prime that scatters group numbers, so that queues of one application do not move together."""


class ReplicaMove(NamedTuple):
    """A replica that is to move."""

    group: int
    source: int
    target: int


class Step(Enum):
    """The next step of a move that was begun, as the leader of the queue takes it."""

    COPY = auto()
    """The target copies the data."""
    GIVE_VOTE = auto()
    """The source is the only member with a vote: the target gets one."""
    AWAIT_VOTE = auto()
    REMOVE = auto()
    """The source goes, and the target gets its vote if it has none."""


def next_step(members: Membership, *, complete: bool) -> Step:
    """Returns the next step of the move that the members of a queue show (`stand_in`).

    Args:
        complete: whether the target has all data.
    """
    assert members.stand_in is not None
    target, source = members.stand_in
    if members.leaving:
        return Step.REMOVE if target in members.voters else Step.AWAIT_VOTE
    if not complete:
        return Step.COPY
    return Step.GIVE_VOTE if members.voters == {source} else Step.REMOVE


def next_move(
    groups: Iterable[tuple[int, Sequence[int]]],
    *,
    processes: Collection[int],
    skip: Collection[int] = (),
) -> ReplicaMove | None:
    """Returns the next move between the processes of a machine; None = they have equal shares, or
    one more or less.

    A queue with two members on the machine comes first: its move was begun (source and target are 0
    then: its leader knows them).

    Args:
        groups: groups and their members.
        processes: those of the machine that run and are not drained.
        skip: groups with two members on the machine for another reason.
    """
    held: dict[int, list[int]] = {process: [] for process in processes}
    for group, members in groups:
        here = [node for node in members if node in held]
        if len(here) > 1 and group not in skip:
            return ReplicaMove(group, 0, 0)
        if len(here) == 1:
            held[here[0]].append(group)
    if len(held) < 2:
        return None
    source = max(held, key=lambda node: (len(held[node]), -node))
    target = min(held, key=lambda node: (len(held[node]), node))
    if len(held[source]) - len(held[target]) < 2:
        return None
    return ReplicaMove(min(held[source], key=_scattered), source, target)


def is_complete(replica: Replica, node: int) -> bool:
    """Returns, of a leader, whether a learner has all data but what is under way."""
    peer = replica.core.progress.get(node)
    return (
        peer is not None
        and peer.connected
        and peer.state == REPLICATE
        and not peer.voteless
        and peer.match + LACKS_MAX >= replica.log.last_index
    )


def _scattered(group: int) -> int:
    return group * SCATTER % (1 << 32)


class ReplicaMoves(GroupOperations):
    """See the module text. One per node."""

    def __init__(self, requests: GroupRequests, membership: QueueMembership, tasks: Tasks) -> None:
        super().__init__(requests)
        self._membership = membership
        self._tasks = tasks
        self._due_ms = self._clock.monotonic_ms() + LOOK_MS
        self._moving: asyncio.Task[None] | None = None
        self._skip: set[int] = set()
        requests.serve("move_member", self._on_move)

    def tick(self) -> None:
        """Begins to look when it is due; to be called a few times a second."""
        if self._clock.monotonic_ms() < self._due_ms:
            return
        if self._moving is None or self._moving.done():
            self._due_ms = self._clock.monotonic_ms() + LOOK_MS
            self._moving = self._tasks.spawn(self._move_all())

    async def _move_all(self) -> None:
        while (move := await self._plan()) is not None and await self._move(move):
            pass

    async def _plan(self) -> ReplicaMove | None:
        own, places = self._nodes.node_id, self._tree.places()
        if len(siblings(own, self._tree.nodes, places)) < 2:
            return None
        running = [node for node in self._nodes.running() if not self._nodes.is_drained(node)]
        processes = siblings(own, running, places)
        if not processes or min(processes) != own:
            return None
        groups = [
            (record.group, record.members)
            async for record in in_slices(list(self._tree.records()))
            if record.placement is PlacementKind.RAFT
        ]
        return next_move(groups, processes=processes, skip=self._skip)

    async def _move(self, move: ReplicaMove) -> bool:
        """Returns whether the next one may be looked for."""
        record = self._tree.queue_index.by_group.get(move.group)
        if record is None:
            return False
        try:
            found = await self._requests.ask_leader(
                move.group, record.members, "move_member", move.source, move.target,
                timeout_s=MOVE_TIMEOUT_S,
            )  # fmt: skip
            await self._is_recorded(record, move.source)
        except BrokerError as error:
            log.warning("queue.replica_not_moved", vhost=record.vhost, queue=record.name,
                        reason=error.text)  # fmt: skip
            return False
        if not found:
            self._skip.add(move.group)
        else:
            log.info("queue.replica_moved", vhost=record.vhost, queue=record.name,
                     source=move.source, target=move.target)  # fmt: skip
        return True

    async def _is_recorded(self, record: QueueRecord, source: int) -> None:
        """Waits until the tree has the members without the source."""
        await self._membership.until_recorded(record, lambda members: source not in members)

    # --- as leader ---------------------------------------------------------------------------

    async def _on_move(self, group: int, arguments: list[object]) -> Answer:
        """The arguments are source and target; both 0: what was begun. The answer is whether there
        was a move."""
        source, target = arguments
        assert isinstance(source, int)
        assert isinstance(target, int)
        replica = self._host.replica(group)
        if replica is None or not replica.is_leader:
            return AGAIN, NOT_LEADER
        replica.open_term()
        self._host.wake()
        members = replica.core.members
        begun = members.stand_in
        if begun is not None:
            target, source = begun
            return await self._go_on(replica, source, target)
        learner = members.learner(target)
        if learner is not None:
            if learner.promote_at > NEVER:
                # The source was removed meanwhile.
                self._host.set_vote(group, target, votes=True)
            return AGAIN, "the new member gets its vote"
        if source not in members.nodes:
            return DONE, target in members.voters
        if target in members.voters:
            return DONE, False
        refusal = self._host.member_refusal(group, target)
        if refusal:
            return DONE, False
        self._host.stand_in(group, target, source)
        return AGAIN, "the new member copies the data"

    async def _go_on(self, replica: Replica, source: int, target: int) -> Answer:
        members = replica.core.members
        match next_step(members, complete=is_complete(replica, target)):
            case Step.COPY:
                return AGAIN, "the new member copies the data"
            case Step.GIVE_VOTE:
                replica.changes.succeed(target, source)
                self._host.wake()
                return AGAIN, "the new member gets its vote"
            case Step.AWAIT_VOTE:
                return AGAIN, "the new member gets its vote"
            case Step.REMOVE:
                by = 0 if target in members.voters else target
                return await self._membership.remove_as_leader(replica, source, by)
