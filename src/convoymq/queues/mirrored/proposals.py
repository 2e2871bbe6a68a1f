"""Views that a node's host of mirrored queues proposes: what policies want, who takes over, which
ring is founded again, and which copies of this node leave.

Each is the next version of the recorded view; of two that are proposed at a time one is recorded,
and what is still wanted is proposed again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator

from convoymq.metadata.commands import ChangeView
from convoymq.metadata.records import QueueRecord
from convoymq.model.errors import BrokerError, PreconditionFailed
from convoymq.queues.driver import HostParts
from convoymq.queues.interface import Row
from convoymq.queues.mirrored.copy import MirrorCopy, State, read_member
from convoymq.queues.mirrored.master import Mark, MasterQueue
from convoymq.queues.mirrored.partitions import PartitionedHost
from convoymq.queues.mirrored.policy import (
    MirrorFailures,
    MirrorPolicy,
    master_nodes,
    policy_from,
    wanted_nodes,
)
from convoymq.replication.ring.views import Member, RingView, founded
from convoymq.shells.ring.shell import RingRecord
from convoymq.storage.types import Worker


class ProposingHost(PartitionedHost):
    """Part of `MirroredHost`; see the module text."""

    def __init__(self, parts: HostParts, worker: Worker | None = None) -> None:
        self.restart_wait_ms = parts.settings.mirror_restart_wait_ms
        self._copies: dict[int, MirrorCopy] = {}
        self._proposed: set[int] = set()
        """Groups for which a view of this host is under way."""
        self._failures = MirrorFailures()
        self._started_ms = parts.clock.monotonic_ms()
        super().__init__(parts, worker)

    def master_of(self, group: int) -> MasterQueue | None:
        """Returns the master of a queue, if it is on this node."""
        queue = self.queues.get(group)
        return queue if isinstance(queue, MasterQueue) and queue.ended is None else None

    def _withdraw(self, record: QueueRecord, own: Member) -> None:
        """Has a member leave whose copy is void. As long as the view has it, its master waits for
        its word, and it could be taken for a copy of the queue."""
        assert record.view is not None
        self._propose(record.group, record.view.with_failed(own.number))

    def _take_over(self, record: QueueRecord, own: Member) -> None:
        """Proposes this node's mirror as the master, if it is its turn."""
        view = record.view
        assert view is not None
        if view.is_live(view.master) or view.master in view.failed:
            # Until what it has sent is complete everywhere, nobody knows how far it was.
            return
        full = view.full()
        ready = [number for number in full if number in view.synchronised]
        if not ready and self._may_take_over_unsynchronised(record):
            ready = full
        if ready and own.number == (view.next_master or ready[0]):
            self._propose(record.group, view.promoted(own.number))

    def _may_take_over_unsynchronised(self, record: QueueRecord) -> bool:
        assert record.view is not None
        policy = policy_from(self._records[record.group][2])
        copy = self._copies.get(record.group)
        if copy is None or copy.state is State.WAITING:
            # The master may not know of it yet: then it confirms what this copy never gets.
            return False
        stopped = copy.stopping_master == record.view.master
        return policy.promotes_on_shutdown if stopped else policy.promotes_on_failure

    def _submit(
        self,
        record: RingRecord,
        view: RingView,
        done: Callable[[object, BrokerError | None], None],
    ) -> object:
        command = ChangeView(vhost=record.vhost, name=record.name, group=record.group, view=view)
        return self._parts.record_members(command, done)

    def _propose(self, group: int, view: RingView) -> None:
        """Has a view recorded, unless another one of this host is under way."""
        if group in self._proposed or not self._parts.has_majority():
            return
        record = self._records[group][0] if group in self._records else self.queues[group].record
        self._proposed.add(group)
        self._submit(record, view, lambda _reply, _error: self._proposed.discard(group))

    def follow_policy(self, master: MasterQueue) -> bool:
        """Proposes the next view on the way to what the policy of a queue wants; returns whether
        another one may follow while nothing else changes."""
        record = master.record
        policy = master.mirror_policy
        view = record.view
        if view is None and not policy.mode:
            return False
        if self._stopped or master.frozen:
            return True
        if view is None:
            wanted = self._wanted_nodes(master, ())
            if len(wanted) > 1:
                self._propose(record.group, founded(self.node_id, self._parts.incarnation))
            return len(wanted) > 1
        if master.member is None or master.member.view != view or master.mark is not Mark.WRITTEN:
            return True
        mirrors = [
            each
            for each in sorted(view.members, key=lambda each: each.number)
            if view.is_live(each.number) and each.node != self.node_id
        ]
        wanted = self._wanted_nodes(master, [each.node for each in mirrors])
        for each in mirrors:
            if each.node not in wanted:
                self._propose(record.group, view.with_failed(each.number))
                return True
        for node in wanted:
            if view.live_at(node) is None:
                self._propose(
                    record.group,
                    view.joined(node, self._parts.incarnation_of(node), left=view.master),
                )
                return True
        if master.is_damaged and master.has_equals:
            # The oldest of them follows when its broadcasts are complete.
            self._propose(record.group, view.with_failed(view.master))
            return True
        if self.node_id not in self._master_nodes(policy):
            for node in self._next_masters(record.group)[:1]:
                self.hand_over(record.group, node)
                return True
        return self._failures.concerns(record.group, self.clock.monotonic_ms())

    def _master_nodes(self, policy: MirrorPolicy) -> set[int]:
        running = self._parts.running_nodes()
        return master_nodes(policy, {self.node_name(node): node for node in running})

    def leader_rows(self) -> Iterator[Row]:
        """See `QueueHost`."""
        for group in list(self._rings):
            targets, master = self._next_masters(group), self.master_of(group)
            if master is not None:
                machine = master.machine
                yield {
                    "group": group,
                    "leader": self.node_id,
                    "targets": targets,
                    "log_entries": master.depth,
                    "messages": machine.published + machine.delivered,
                }

    def _next_masters(self, group: int) -> tuple[int, ...]:
        """Returns the nodes that a queue with its master here could be handed to now, the one with
        the oldest mirror first."""
        master = self.master_of(group)
        view = master.record.view if master is not None else None
        if master is None or view is None or master.mark is not Mark.WRITTEN:
            return ()
        able = self._master_nodes(master.mirror_policy)
        ready = (view.node_of(number) for number in sorted(view.synchronised))
        return tuple(node for node in ready if node in able and node != self.node_id)

    def hand_over(self, group: int, node: int) -> None:
        """See `QueueHost`."""
        record = self._records[group][0]
        view = record.view
        member = view.live_at(node) if view is not None else None
        if view is None or member is None or node not in self._next_masters(group):
            raise PreconditionFailed(f"node {self.node_name(node)} has no mirror that may follow")
        # As if the master had failed: the next one follows when its broadcasts are complete.
        self._propose(group, view.handed_over(member.number))

    def _wanted_nodes(self, master: MasterQueue, mirrors: Iterable[int]) -> tuple[int, ...]:
        now_ms = self.clock.monotonic_ms()
        running = self._failures.without(master.group, self._parts.running_nodes(), now_ms)
        return wanted_nodes(
            master.mirror_policy,
            master=self.node_id,
            mirrors=list(mirrors),
            running=running,
            named={self.node_name(node): node for node in running},
            load=self._parts.load(),
            places=self._parts.places(),
        )

    def _note_failures(self, master: MasterQueue, view: RingView) -> None:
        before = master.record.view
        lost = () if before is None else (m for m in before.members if before.is_live(m.number))
        gone = [m for m in lost if not view.is_live(m.number) and self._is_running(m)]
        wanted = self._wanted_nodes(master, [m.node for m in gone]) if gone else ()
        for each in gone:
            if each.node in wanted:
                self._failures.note(master.group, each.node, self.clock.monotonic_ms())

    def _found_again(self, record: QueueRecord) -> None:
        """Begins another ring from this node's files, if the recorded one is over and these are the
        ones to go on with."""
        view = record.view
        assert view is not None
        own = view.live_at(self.node_id)
        live = [each for each in view.members if view.is_live(each.number)]
        others = [each for each in live if each is not own]
        number = read_member(self._directory, record.group)
        is_lost = number is None and record.group <= self._parts.lost_groups()
        if own is not None and view.full() == [own.number] == [view.master] and not is_lost:
            # Nobody else ever had anything of this ring, whoever wrote the files before it.
            number = view.master
        elif self._is_whole(record):
            # Waiting for the others would make this copy void.
            number = view.master
        elif any(self._is_running(each) for each in others):
            if own is not None:
                self._propose(record.group, view.with_failed(own.number))
            elif number == view.master and not view.synchronised:
                # Nobody may take over from the copy that is here.
                self._propose(record.group, view.refounded(self.node_id, self._parts.incarnation))
            return
        if (
            own is not None
            and set(view.synchronised) - {own.number}
            and self._is_damaged(record, own, number)
        ):
            # Another one has all.
            self._withdraw(record, own)
            return
        if number is None:
            return
        if number != view.master:
            if own is None or own.number != number or number not in view.synchronised:
                return
            if (
                view.is_live(view.master)
                and self.clock.monotonic_ms() - self._started_ms < self.restart_wait_ms
            ):
                return
        self._propose(record.group, view.refounded(self.node_id, self._parts.incarnation))

    @abstractmethod
    def _is_damaged(self, record: QueueRecord, own: Member, number: int | None) -> bool:
        """Returns whether the files of a former run's member `own` are not what it had. `number`:
        of the member that wrote them."""

    def _is_whole(self, record: RingRecord) -> bool:
        """Returns whether a former run of this node has the only copy with all messages."""
        view = record.view
        own = view.live_at(self.node_id) if view is not None else None
        if view is None or own is None or view.synchronised != (own.number,):
            return False
        return read_member(self._directory, record.group) == own.number

    def _is_running(self, member: Member) -> bool:
        """Returns whether a member's run of its node can be reached."""
        newest = self._parts.incarnation_of(member.node)
        return member.incarnation == newest and self.is_up(member.node)
