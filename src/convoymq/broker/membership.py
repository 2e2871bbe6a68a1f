"""The members of replicated queues: adds and removes them, for one queue or for many.

The leader of a group changes its members, one at a time; `metadata.members` then records them and
the nodes open or drop their replicas. Asking twice is harmless (ADR 0041).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import StrEnum

from convoymq.broker.balance import Strategy, choose_successor, grows
from convoymq.broker.group_requests import (
    AGAIN,
    DONE,
    NOT_LEADER,
    TIMED_OUT,
    Answer,
    GroupOperations,
    GroupRequests,
)
from convoymq.broker.leadership import Leadership
from convoymq.broker.local_queues import successors
from convoymq.broker.ring_recovery import RingRecovery
from convoymq.broker.selection import ALL, Selection, check_group
from convoymq.metadata.machine import QueueRecord
from convoymq.metadata.members import MembershipManager
from convoymq.metadata.placement import spread
from convoymq.model.errors import BrokerError, NotFound, PreconditionFailed, Unavailable
from convoymq.queues.interface import Row
from convoymq.replication.raft.membership import NEVER
from convoymq.shells.groups.replica import Replica

TIMEOUT_S = 5.0
AT_ONCE = 64
"""Queues that are changed at a time."""
POLL_S = 0.02
LAST_MEMBER = "the last node cannot be removed"


class MemberKind(StrEnum):
    """Kind of a new member."""

    PROMOTABLE = "promotable"
    """Gets a vote when it has caught up."""
    VOTER = "voter"
    """The same: a vote before that could cost the majority."""
    NON_VOTER = "non_voter"


class QueueMembership(GroupOperations):
    """See the module text. One per node."""

    def __init__(
        self, requests: GroupRequests, leadership: Leadership, rings: RingRecovery
    ) -> None:
        super().__init__(requests)
        self.manager: MembershipManager | None = None
        """Records members and forgets nodes; made when the broker has started."""
        self._leadership = leadership
        self._rings = rings
        self.timeout_s = TIMEOUT_S
        """For one change of one queue."""
        requests.serve("add_member", self._on_add)
        requests.serve("delete_member", self._on_delete)

    # --- nodes ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Brings groups, tree and links closer to each other; call it a few times a second."""
        if self.manager is not None:
            self.manager.tick()

    def check_forget(self, node: int, *, force: bool) -> None:
        """Raises PreconditionFailed unless a node may be forgotten now."""
        if self.manager is None:
            raise PreconditionFailed("this node is starting")
        self.manager.check_forget(node, force=force)

    def groups_with(self, node: int) -> int:
        """Returns the number of groups that have a node as a member."""
        return self.manager.groups_with(node) if self.manager is not None else 0

    # --- one queue -----------------------------------------------------------------------

    async def add(
        self,
        record: QueueRecord,
        node: int,
        kind: MemberKind = MemberKind.PROMOTABLE,
    ) -> int:
        """Makes a node a member of a queue; returns how many there are then.

        Raises:
            Refused: the queue is not replicated, or the node is not in the cluster or is away.
            Unavailable: not in time; it may still be done.
        """
        check_group(record)
        if node not in self._tree.nodes or not self._nodes.is_up(node):
            raise PreconditionFailed(f"node_not_running: node {self._nodes.name_of(node)}")
        votes = kind is not MemberKind.NON_VOTER
        return await self._change(
            record, "add_member", node, votes,
            is_done=lambda members: node in members,
        )  # fmt: skip

    async def delete(self, record: QueueRecord, node: int) -> int:
        """Takes a member out of a queue; returns how many are left.

        Raises:
            Refused: it is the last one, or the queue is not replicated.
            Unavailable: not in time; it may still be done.
        """
        check_group(record)
        return await self._change(
            record, "delete_member", node,
            is_done=lambda members: node not in members,
        )  # fmt: skip

    async def _change(
        self,
        record: QueueRecord,
        name: str,
        *arguments: object,
        is_done: Callable[[Sequence[int]], bool],
    ) -> int:
        try:
            # A moment longer than the request, which says what it waited for.
            async with asyncio.timeout(self.timeout_s + 0.5):
                await self._requests.ask_leader(
                    record.group, record.members, name, *arguments, timeout_s=self.timeout_s
                )
                return await self._recorded(record, is_done)
        except TimeoutError:
            raise Unavailable(TIMED_OUT) from None

    async def until_recorded(
        self, record: QueueRecord, is_done: Callable[[Sequence[int]], bool]
    ) -> None:
        """Waits until the tree has the members of a queue as they should be.

        Raises:
            NotFound: the queue was deleted.
            Unavailable: not in time.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._recorded(record, is_done)
        except TimeoutError:
            raise Unavailable(TIMED_OUT) from None

    async def _recorded(self, record: QueueRecord, is_done: Callable[[Sequence[int]], bool]) -> int:
        while True:
            found = self._tree.queue_index.by_group.get(record.group)
            if found is None:
                raise NotFound(f"queue '{record.name}' was deleted")
            if is_done(found.members):
                return len(found.members)
            await asyncio.sleep(POLL_S)

    # --- many queues -----------------------------------------------------------------------

    async def grow(
        self,
        node: int,
        strategy: Strategy,
        selection: Selection,
        kind: MemberKind = MemberKind.PROMOTABLE,
    ) -> list[Row]:
        """Makes a node a member of all selected queues that it is not in; a row for each."""
        selection.check()
        if node not in self._tree.nodes or not self._nodes.is_up(node):
            raise PreconditionFailed(f"node_not_running: node {self._nodes.name_of(node)}")
        found = [
            record
            for record in self._selected(selection)
            if node not in record.members and grows(record.members, strategy)
        ]
        return await self._for_each(found, lambda record: self.add(record, node, kind))

    async def grow_to_count(
        self,
        count: int,
        strategy: Strategy,
        selection: Selection,
        kind: MemberKind = MemberKind.PROMOTABLE,
    ) -> list[Row]:
        """Gives all selected queues that have fewer as many members as `count`, as far as nodes
        run; a row for each."""
        selection.check()
        if not 1 <= count <= len(self._tree.nodes):
            raise PreconditionFailed(
                f"a queue has 1 to {len(self._tree.nodes)} members in this cluster, not {count}"
            )
        replicas = dict(self._tree.queue_index.replicas)

        async def grow(record: QueueRecord) -> int:
            size = len(record.members)
            members = list(record.members)
            while size < count:
                node = self._next_member(members, self._nodes.for_placement(), replicas)
                if not node:
                    raise PreconditionFailed("no other node runs")
                replicas[node] = replicas.get(node, 0) + 1
                size = await self.add(record, node, kind)
                members.append(node)
            return size

        found = [
            record
            for record in self._selected(selection)
            if len(record.members) < count and grows(record.members, strategy)
        ]
        return await self._for_each(found, grow)

    async def shrink(self, node: int, selection: Selection) -> list[Row]:
        """Takes a node out of all selected queues; a row for each that had it."""
        selection.check()
        if node not in self._tree.nodes:
            raise NotFound(f"node {node} is not in the cluster")
        found = [record for record in self._selected(selection) if node in record.members]
        return await self._for_each(found, lambda record: self.delete(record, node))

    async def release(
        self, node: int, size_of: Callable[[QueueRecord], int], *, forced: bool = False
    ) -> list[Row]:
        """Takes a node that is to be forgotten out of all replicated queues that have other
        members, before the cluster forgets it; a row for each. A mirrored queue whose master was
        there goes on with another copy.

        Where a queue would have fewer members than it should, another node that runs takes the
        place in the same step.

        Args:
            size_of: how many members a queue should have.
            forced: mirrored queues go on with copies that lack messages, where there are no others.
        """
        replicas = dict(self._tree.queue_index.replicas)

        async def release(record: QueueRecord) -> int:
            by = 0
            if record.view is not None:
                return await self._rings.release(record, node, forced=forced)
            if record.group not in self._tree.queue_index.by_group:
                return 0
            if len(record.members) <= size_of(record):
                running = [each for each in self._nodes.for_placement() if each != node]
                left = [each for each in record.members if each != node]
                by = self._next_member(left, running, replicas)
                replicas[by] = replicas.get(by, 0) + 1
            try:
                return await self._change(
                    record, "delete_member", node, by,
                    is_done=lambda members: node not in members,
                )  # fmt: skip
            except NotFound:
                return 0

        found = [
            record
            for record in self._selected(Selection(type=ALL))
            if node in record.members and len(record.members) > 1
        ]
        found += [record for record in self._tree.records() if self._rings.needs(record, node)]
        return await self._for_each(found, release)

    async def force_boot(self) -> list[Row]:
        """Has mirrored queues without a master go on with the copies that are there, whatever those
        lack; a row for each."""
        waiting = self._rings.waiting()
        return await self._for_each(
            waiting, lambda record: self._rings.release(record, 0, forced=True)
        )

    def _next_member(
        self, members: Collection[int], candidates: Collection[int], replicas: Mapping[int, int]
    ) -> int:
        """Returns the node that a queue gets as its next member; 0 = there is none."""
        found = spread(candidates, self._tree.places(), members=members, replicas=replicas)
        return found[0] if found else 0

    def _selected(self, selection: Selection) -> list[QueueRecord]:
        found = [record for record in self._tree.records() if selection.matches(record)]
        return sorted(found, key=lambda record: (record.vhost, record.name))

    async def _for_each(
        self, records: Sequence[QueueRecord], change: Callable[[QueueRecord], Awaitable[int]]
    ) -> list[Row]:
        turn = asyncio.Semaphore(AT_ONCE)

        async def row(record: QueueRecord) -> Row:
            size: int | str = len(record.members)
            result = "ok"
            async with turn:
                try:
                    size = await change(record)
                except Unavailable as error:
                    size, result = "?", f"error: {error.text}"
                except BrokerError as error:
                    result = f"error: {error.text}"
            return {"vhost": record.vhost, "name": record.name, "size": size, "result": result}

        return list(await asyncio.gather(*map(row, records)))

    # --- as leader ---------------------------------------------------------------------------

    async def _on_add(self, group: int, arguments: list[object]) -> Answer:
        node, votes = arguments
        assert isinstance(node, int)
        replica = self._host.replica(group)
        if replica is None or not replica.is_leader:
            return AGAIN, NOT_LEADER
        members = replica.core.members
        if node in members.nodes:
            learner = members.learner(node)
            if votes and learner is not None and learner.promote_at == NEVER:
                raise PreconditionFailed(
                    f"node {self._nodes.name_of(node)} is a member without a vote: delete it first"
                )
            return DONE, len(members.nodes)
        refusal = self._host.member_refusal(group, node)
        if refusal:
            raise PreconditionFailed(refusal)
        # A group that was never used has no entry of its term yet, which changes need.
        replica.open_term()
        self._host.wake()
        if self._host.add_member(group, node, voter=bool(votes)):
            self._host.wake()
            return DONE, len(replica.core.members.nodes)
        return AGAIN, "another change of the members is under way"

    async def _on_delete(self, group: int, arguments: list[object]) -> Answer:
        """The arguments are the member, and perhaps the node that takes its place."""
        node, by = (*arguments, 0)[:2]
        assert isinstance(node, int)
        assert isinstance(by, int)
        replica = self._host.replica(group)
        if replica is None or not replica.is_leader:
            return AGAIN, NOT_LEADER
        members = replica.core.members
        if node not in members.nodes:
            return DONE, len(members.nodes)
        if members.voters == {node}:
            raise PreconditionFailed(LAST_MEMBER)
        replica.open_term()
        self._host.wake()
        if by in members.nodes or self._host.member_refusal(group, by):
            by = 0
        return await self.remove_as_leader(replica, node, by)

    async def remove_as_leader(self, replica: Replica, node: int, by: int = 0) -> Answer:
        """Leader: takes a member out, which is not the only voter; `by`, which may be a learner,
        takes its place unless it is 0."""
        group, members = replica.group, replica.core.members
        if node == self._nodes.node_id:
            # The next leader takes this one out: clients wait for a transfer, not an election.
            avoid = [each for each in members.nodes if self._nodes.is_drained(each)]
            heirs = successors(self._host, replica)
            heir = choose_successor(heirs, {}, avoid) or choose_successor(heirs, {})
            if not heir:
                return AGAIN, "no other member could lead"
            await self._leadership.hand_over(group, heir)
            return AGAIN, "the leadership is handed over first"
        refusal = replica.core.changes.refusal_of(members.without(node))
        if refusal is not None:
            return AGAIN, refusal
        if self._host.replace_member(group, node, by):
            if self.manager is not None:
                self.manager.on_removal(group, node)
            self._host.wake()
            return DONE, len(replica.core.members.nodes)
        return AGAIN, "another change of the members is under way"
