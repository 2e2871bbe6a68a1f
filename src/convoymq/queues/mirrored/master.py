# cython: annotation_typing=False
"""The master of a mirrored queue: a classic queue whose log goes to its mirrors as well.

Every classic queue is one: without mirrors nothing differs. A mirror takes part from a CUT on, and
what a client is told of as safe is stored by every mirror that takes part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import PreconditionFailed
from convoymq.model.tables import Table
from convoymq.queues.classic.backing import Line
from convoymq.queues.classic.gates import Gate
from convoymq.queues.classic.machine import APPLIED, GET_CONSUMER, WINDOW_DEFAULT
from convoymq.queues.classic.notes import pack_note
from convoymq.queues.classic.queue import LocalQueue
from convoymq.queues.classic.runs import Consumer, Former, Session
from convoymq.queues.interface import Row
from convoymq.queues.mirrored.copy import SESSIONS_MAX
from convoymq.queues.mirrored.features import FEATURES
from convoymq.queues.mirrored.instructions import (
    Cut,
    Depth,
    HandedOut,
    Noted,
    Serves,
    Stopping,
    TimeToLive,
)
from convoymq.queues.mirrored.log import BroadcastLog
from convoymq.queues.mirrored.policy import MirrorPolicy, policy_from
from convoymq.queues.mirrored.sync import Synchronisation
from convoymq.replication.ring.views import RingView
from convoymq.storage.types import Directory

if TYPE_CHECKING:
    from convoymq.queues.mirrored.host import MirroredHost
    from convoymq.shells.ring.shell import RingMember

GATHER_MS = 5_000
"""Consumers of a former master have so long to come back."""
AHEAD = 1000
"""So many messages count as handed out when one is: after a failover they may come with
`redelivered` although nobody has got them."""


class Mark(Enum):
    """State of what the files of a master say of themselves: which member of the ring they are."""

    MISSING = 1
    UNDER_WAY = 2
    WRITTEN = 3


class MasterQueue(LocalQueue):
    """See the module text."""

    features = FEATURES
    host: MirroredHost
    log: BroadcastLog
    is_damaged = False
    """Something in the files could not be read."""
    mark = Mark.MISSING
    """State of the mark in the files."""
    _changes_mirrors = True
    """Another view may follow from the policy."""

    def __init__(
        self,
        host: MirroredHost,
        record: QueueRecord,
        arguments: Table,
        settings: Mapping[str, object],
        directory: Directory,
        *,
        sessions: Mapping[int, tuple[int, int, int]] | None = None,
    ) -> None:
        """
        Args:
            sessions: the files are those of a mirror, with the messages of these sessions: seq of
                the first command, the last one, and the last one that was refused.
        """
        self.policy = policy_from(settings, host.sync_batch_size)
        self.member: RingMember | None = None
        taken_over = (sessions or {}).items()
        self._known = {session: last for session, (_, last, _) in taken_over}
        self._begun = {session: first for session, (first, _, _) in taken_over if first}
        self._refused = {session: refused for session, (_, _, refused) in taken_over if refused}
        self.syncing: Synchronisation | None = None
        self._sync_waits = False
        """A timer goes on with the synchronisation."""
        self._told: dict[int, int] = {}
        """Level -> positions below this are in the log as handed out."""
        self._stored: dict[int, int] = {}
        """The same, as every mirror has it, and the disk."""
        self._telling: list[tuple[Gate, dict[int, int]]] = []
        self._new: dict[int, int] = {}
        self._served: tuple[int, int] | None = None
        """See `MirrorCopy.served`."""
        self._gathers_until_ms = 0
        self._lacks = 0
        """Messages that equals have, and that cannot be read here."""
        super().__init__(
            host, record, arguments, settings, directory, takes_over=sessions is not None
        )

    # --- the ring ------------------------------------------------------------------------

    def attach(self, member: RingMember) -> None:
        """The queue has a ring, in which it is the master. What mirrors are to get must be in the
        log."""
        self.write_transient()
        self.member = member
        self.log.connect(member)

    @property
    def _is_copied(self) -> bool:
        return self.member is not None

    def is_member(self, number: int) -> bool:
        """Returns whether the queue is that member of its ring."""
        return self.member is not None and self.member.member == number

    @property
    def is_mirrorable(self) -> bool:
        """Returns whether the queue can have mirrors: it is durable, and of no one connection."""
        return self.durable

    def take_view(self, view: RingView) -> None:
        """A view is in force: new mirrors begin to take part, lost ones are not waited for."""
        assert self.member is not None
        confirms = self.log.confirms
        for number in list(confirms.stored):
            if not view.is_live(number):
                confirms.forget(number)
        if not self.has_equals:
            # What is lost here is lost: mirrors that come now equal what is left.
            self._lacks = 0
        for number in view.full():
            if number != self.member.member and number not in confirms.stored:
                # A mirror stores the cut, and all that follows it.
                confirms.expect(number, self.log.last_number)
                self.log.tell(Cut(number, self.depth))
                for line in self.machine.backing.lines:
                    told = max(line.delivered_to, self._told.get(line.level, 0))
                    if told:
                        self.log.tell(HandedOut(told, line.level))
                for entry in self.log.times.entries:
                    self.log.tell(TimeToLive(*entry))
                if self._served is not None:
                    self.log.tell(Serves(*self._served))
        self.send()

    def on_room(self) -> None:
        """The ring takes more."""
        self.send()
        self.step_sync()

    def send(self) -> None:
        """Broadcasts what waits."""
        self.log.send()

    def wait_for_mirrors(self) -> None:
        """Holds all answers back until every mirror has stored what the queue has now."""
        gate = [False]
        self._gates.add(gate, [])
        # Nothing is to be written: the mirrors' word for the next broadcast is waited for.
        self.log.tell(Depth(self.depth))

        def stored(_error: Exception | None) -> None:
            gate[0] = True
            self._gates.open()

        confirms = self.log.confirms
        confirms.on_written(
            confirms.add(self.log.send(), lambda e: self.host.contain(self, lambda: stored(e))),
            None,
        )

    # --- handing out ---------------------------------------------------------------------

    def _note_handed_out(self, line: Line) -> None:
        """See `LocalQueue`. Nobody gets a message as a new one again that a master handed out which
        was lost: the log says it before, of `AHEAD` messages at a time."""
        if self.member is None:
            super()._note_handed_out(line)
            return
        level = line.level
        while self._telling and self._telling[0][0][0]:
            self._stored.update(self._telling.pop(0)[1])
        stored = self._stored.get(level, 0)
        self._handed_out[level] = max(stored - AHEAD // 2, 0)
        if line.delivered_to <= self._handed_out[level]:
            return
        self._runs_ahead = self._runs_ahead or line.delivered_to > stored
        # While it is under way, more is said only when that is not enough.
        self._handed_out[level] = stored
        self._told[level] = self._new[level] = line.delivered_to + AHEAD
        self.log.add_handed_out(self._told[level], level)

    def _gate(self, *, is_open: bool) -> Gate:
        gate = super()._gate(is_open=is_open and not self._new)
        if self._new:
            self._telling.append((gate, self._new))
            self._new = {}
        return gate

    @property
    def depth(self) -> int:
        """Returns how many messages mirrors should have."""
        machine = self.machine
        here = machine.ready_count + machine.unsettled_count
        here += machine.leaving.count + machine.aside.count
        return here + self._lacks

    @property
    def has_equals(self) -> bool:
        """Returns whether a mirror has all that the queue has."""
        return self.member is not None and len(self.member.view.synchronised) > 1

    def _tell_of_damage(self, unreadable: int) -> None:
        """See `LocalQueue`. A mirror that has all takes the place of a damaged master."""
        self.is_damaged = self.is_damaged or bool(self.log.damages or unreadable)
        if self.has_equals:
            self._lacks = max(self._lacks + unreadable, 0)
        super()._tell_of_damage(unreadable)
        if self.is_damaged and self.has_equals:
            self.host.follow_policy(self)

    def on_stored(self, member: int, number: int) -> None:
        """A mirror has stored broadcasts up to a number."""
        if self.member is not None:
            self.log.confirms.on_stored(member, number)
            self.step_sync()

    # --- synchronisation -----------------------------------------------------------------

    def synchronise(self, *, cancels: bool = False) -> None:
        """See `Queue`."""
        if self.member is None or len(self.member.view.live) < 2:
            raise PreconditionFailed(f"{self.subject} is not mirrored", subject=self.subject)
        if cancels:
            self.end_synchronisation()
            return
        synchronised = self.member.view.synchronised
        members = sorted(set(self.log.confirms.stored) - set(synchronised))
        if self.syncing is None and members:
            # What is settled from now on reaches the mirrors as such; the records before are read
            # when they are on disk.
            self.host.changed.add(self.group)
            begun = self.syncing = Synchronisation(
                self.log,
                members,
                self.policy.sync_batch_size,
                self._unsaid,
                rate=self.host.sync_bytes_per_s,
            )
            self.send()
            self.host.writer.barrier(lambda: self.host.contain(self, lambda: self._on_disk(begun)))

    def _on_disk(self, begun: Synchronisation) -> None:
        if self.syncing is not begun or self.ended is not None:
            return
        if self.log.lacks_records:
            # What could not be written cannot be read: another one begins later.
            self.end_synchronisation()
            return
        begun.is_on_disk = True
        self.step_sync()

    def step_sync(self) -> None:
        """Goes on with a synchronisation."""
        syncing, now_ms = self.syncing, self.host.clock.monotonic_ms()
        if syncing is None:
            return
        if not syncing.step(now_ms):
            self.end_synchronisation()
            return
        wait_ms = syncing.wait_ms(now_ms)
        if wait_ms is not None and not self._sync_waits:
            self._sync_waits = True
            self.host.clock.call_later(wait_ms, self._on_sync_due)

    def _on_sync_due(self) -> None:
        self._sync_waits = False
        if self.ended is None:
            self.host.contain(self, self.step_sync)

    def end_synchronisation(self) -> None:
        """Ends a synchronisation, complete or not."""
        if self.syncing is not None:
            syncing, self.syncing = self.syncing, None
            for position, note in self.machine.backing.recovered.notes.items():
                self.log.tell(Noted(position, position, pack_note(note)))
            for run in self.machine.noted_runs():
                last = run.position + run.count - 1
                self.log.tell(Noted(run.position, last, pack_note(run.note)))
            self.host.changed.add(self.group)
            syncing.end(self.depth)

    def tell_depth(self) -> None:
        """Lets mirrors that are not synchronised compare."""
        if self._has_unsynchronised:
            self.log.tell(Depth(self.depth))
            self.send()
            if self.policy.syncs_by_itself and self.syncing is None:
                self.synchronise()
        self.step_sync()

    @property
    def _has_unsynchronised(self) -> bool:
        """Returns whether a mirror takes part that is not synchronised."""
        member = self.member
        if member is None:
            return False
        return not self.log.confirms.stored.keys() <= set(member.view.synchronised)

    # --- sessions ------------------------------------------------------------------------

    def resume_all(self, places: Iterable[tuple[int, int, int, int]]) -> None:
        """Clients of a node go on with their sessions."""
        sessions = set()
        for place in places:
            self.resume(*place)
            sessions.add(place[0])
        former = self.machine.former
        if former is not None and former.session not in sessions:
            self._give_up_active({session >> 56 for session in sessions})

    def succeed(self, served: tuple[int, int] | None) -> None:
        """Consumers of a former master may come back. Until then the queue is not unused, what it
        has is not too much, and the former's active consumer alone can be active."""
        self._served = served
        self.machine.had_consumer = served is not None
        self._gathers_until_ms = self.host.clock.monotonic_ms() + GATHER_MS
        former = self.machine.former = Former(*(served or (0, 0)))
        node = former.session >> 56
        self._give_up_active(set() if self.host.is_up(node) else {node})

    def _give_up_active(self, nodes: Collection[int]) -> None:
        """Consumers of these nodes that are not back do not come back."""
        former = self.machine.former
        if former is not None and former.session >> 56 in nodes:
            former.session = 0
            self.machine.choose_active()

    def tick(self, now_ms: int) -> None:
        """See `LocalQueue`."""
        machine = self.machine
        if machine.former and self.host.clock.monotonic_ms() >= self._gathers_until_ms:
            machine.former = None
            machine.choose_active()
            machine.check_unused()
        super().tick(now_ms)
        if self.is_mirrored and self.ended is None:
            self._changes_mirrors = self.host.see_to_mirrors(self)

    def rests_until(self, now_ms: int) -> int:
        """See `LocalQueue`."""
        if self.is_mirrored and (
            self._changes_mirrors or self._has_unsynchronised or self.syncing is not None
        ):
            return now_ms
        return super().rests_until(now_ms)

    @property
    def is_mirrored(self) -> bool:
        """Returns whether the queue has a ring, or is to have one."""
        return self.member is not None or bool(self.mirror_policy.mode)

    def resume(self, session: int, first: int, got: int, answered: int) -> None:
        """A client goes on with a session of a former master.

        Args:
            first: seq of its first command without an answer.
            got: id of the next message that it gets.
            answered: seq of the last question that it has the answer of.
        """
        now_ms = self.host.now_ms()
        self._apply_open_batch(now_ms)
        self._remember(session)
        if first < self._begun.pop(session, 0):
            # The mirror was not synchronised. What it has may come twice, and nothing is confirmed
            # that it lacks.
            self._known.pop(session, None)
            self._refused.pop(session, None)
        self.machine.session_down(session, now_ms)
        # What is sent at once comes before the answer to the client's node, which ignores it.
        self._carry_out()
        # What waits for the disk is for the session as it was.
        self._gates.forget(session)
        made = self.machine.sessions[session] = Session()
        # Other commands are carried out once more: all that the session had is taken from it.
        made.seq, made.answered_seq = first - 1, answered
        made.published_seq = self._known.get(session, 0)
        made.refused_seq = self._refused.get(session, 0)
        if got:
            holder = Consumer(session, GET_CONSUMER, "", WINDOW_DEFAULT, False, False, 0)
            holder.next_id = got
            made.consumers[GET_CONSUMER] = holder

    def _remember(self, session: int) -> None:
        known = self.machine.sessions.get(session)
        if known is not None:
            self._known[session] = max(known.seq, self._known.pop(session, 0))
            if known.refused_seq:
                self._refused[session] = known.refused_seq

    def node_down(self, node: int, now_ms: int) -> None:
        """See `LocalQueue`. The node may be back before it is known to have failed."""
        if self.member is not None:
            self._apply_open_batch(now_ms)
            for session in self.machine.sessions:
                if session >> 56 == node:
                    self._remember(session)
                    # It begins anew by `resume` only: frames of the broken link may be late.
                    self.machine.ended.add(session)
            self._give_up_active({node})
            while len(self._known) > SESSIONS_MAX:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._refused.pop(oldest, None)
        super().node_down(node, now_ms)

    def _carry_out(self) -> None:
        if self.member is not None:
            for effect in self.machine.effects:
                if effect[0] == APPLIED:
                    self.log.add_applied(effect[1], effect[2], max(effect[3], default=0))
            self._tell_consumers()
        super()._carry_out()

    def _tell_consumers(self) -> None:
        active = self.machine.active
        if self.machine.had_consumer and self.machine.former is None:
            served = (active.session, active.number) if active is not None else (0, 0)
            if served != self._served:
                self._served = served
                self.log.tell(Serves(*served))

    # --- Queue ---------------------------------------------------------------------------

    def configure(self, settings: Mapping[str, object]) -> None:
        """See `Queue`: another policy may want other mirrors."""
        super().configure(settings)
        self.policy = policy_from(settings, self.host.sync_batch_size)
        if self.ended is None:
            self.wake()
            self.host.follow_policy(self)

    @property
    def mirror_policy(self) -> MirrorPolicy:
        """Returns what is wanted of mirrors; nothing of a queue that cannot have any."""
        return self.policy if self.is_mirrorable else MirrorPolicy()

    @property
    def known_leader(self) -> int | None:
        """See `Queue`."""
        serves = self.ended is None and not self.host.is_paused
        return self.host.node_id if serves else None

    def tell_stopping(self) -> None:
        """The node is about to stop: mirrors learn that the master did not fail."""
        if self.member is not None:
            self.log.tell(Stopping())
            self.send()

    def info(self) -> Row:
        """See `LocalQueue`."""
        return {**super().info(), **self.mirror_info()}

    def mirror_info(self) -> Row:
        """Returns the fields about mirrors."""
        if self.member is None:
            return {}
        view = self.member.view
        mirrors = [m for m in view.members if view.is_live(m.number) and m.number != view.master]
        synchronised = [m for m in mirrors if m.number in view.synchronised]
        name, pid = self.host.node_name, self.host.process_name
        syncing = self.syncing
        state = {"sync_messages": syncing.messages} if syncing is not None else {}
        return {
            **state,
            "leader": self.known_leader,
            "slave_nodes": [name(m.node) for m in mirrors],
            "synchronised_slave_nodes": [name(m.node) for m in synchronised],
            "recoverable_slaves": [name(m.node) for m in synchronised],
            "slave_pids": [pid(self.group, m) for m in mirrors],
            "synchronised_slave_pids": [pid(self.group, m) for m in synchronised],
        }
