"""Bugs of mirrored queues."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import late, planting

plant = planting("mirrored")
_host = late("convoymq.queues.mirrored.host:MirroredHost")
_master = late("convoymq.queues.mirrored.master:MasterQueue")
_copy = late("convoymq.queues.mirrored.copy:MirrorCopy")


@plant("a publish is confirmed before the slowest mirror has it", "kill,slow,spike")
def confirmed_before_the_slowest_mirror() -> None:
    from convoymq.queues.mirrored.confirms import Confirms

    Confirms.has_stored = lambda self, number: True  # type: ignore[method-assign]


@plant("a mirror counts as synchronised before it has what the master has", "kill")
def synchronised_too_early() -> None:
    copy = _copy()
    copy._compare = lambda self, depth: None if self.is_synchronised else self._on_equal()


@plant("a mirror that is not synchronised takes over although another one is", "kill")
def unsynchronised_takes_over() -> None:
    from convoymq.replication.ring.views import RingView

    promoted = RingView.promoted

    def planted(self: Any, member: int) -> Any:
        return promoted(self, max(self.full()))

    RingView.promoted = planted  # type: ignore[method-assign]


@plant("mirrors do not hear what was settled", "none")
def settled_is_not_told() -> None:
    from convoymq.queues.mirrored import log

    add_settled = log.ClassicLog.add_settled
    log.BroadcastLog.add_settled = add_settled  # type: ignore[method-assign]


@plant("a new master does not know how far sessions are", "kill")
def sessions_begin_anew() -> None:
    master = _master()
    remember = master._remember

    def planted(self: Any, session: int) -> None:
        remember(self, session)
        self._known.pop(session, None)

    master._remember = planted


@plant("questions that have their answer are asked again", "break,loss")
def answered_twice() -> None:
    from convoymq.queues.mirrored.client import MirroredClient

    place = MirroredClient.place
    MirroredClient.place = lambda self: (*place(self)[:3], 0)  # type: ignore[method-assign]


@plant("questions without an answer are not asked again", "break,loss")
def never_answered() -> None:
    master = _master()
    resume = master.resume

    def planted(self: Any, session: int, first: int, got: int, answered: int) -> None:
        resume(self, session, first, got, 1 << 60)

    master.resume = planted


@plant("a master that was taken for failed drops the only whole copy", "isolate,kill,suspect")
def last_copy_is_dropped() -> None:
    _host()._is_wanted = lambda self, master, record: False


@plant("a host without a master of its own from the start does not tick", "kill")
def ticks_never_begin() -> None:
    host = _host()
    follow = host.follow

    def planted(self: Any, *arguments: Any) -> None:
        timer = self._timer
        self._timer = timer or object()
        try:
            follow(self, *arguments)
        finally:
            self._timer = timer

    host.follow = planted


@plant("a message is handed out before the mirrors know that", "kill,freeze,slow")
def handed_out_too_early() -> None:
    from convoymq.queues.classic.queue import LocalQueue

    _master()._note_handed_out = LocalQueue._note_handed_out


@plant("publishes that a lost master may have handed out count as new", "kill,loss")
def sent_again_as_new() -> None:
    from convoymq.queues.mirrored.client import MirroredClient

    MirroredClient.lose_master = lambda self: None  # type: ignore[method-assign]


@plant("what comes overtakes deliveries that wait for the log", "none")
def deliveries_are_overtaken() -> None:
    from convoymq.queues.classic.gates import Gates

    Gates.holds = property(lambda self: False)  # type: ignore[assignment,method-assign]


@plant("a new file of the log does not say what was handed out", "kill,stop")
def hand_outs_stay_in_the_old_file() -> None:
    from convoymq.queues.classic.log import ClassicLog

    roll, add = ClassicLog._roll_if_full, ClassicLog.add_handed_out

    def planted(self: Any) -> None:
        ClassicLog.add_handed_out = lambda *_: None  # type: ignore[method-assign]
        try:
            roll(self)
        finally:
            ClassicLog.add_handed_out = add  # type: ignore[method-assign]

    ClassicLog._roll_if_full = planted  # type: ignore[method-assign]


# Faults of former days, planted again.


@plant("a former master may not hear late of a message (the referee's)", "isolate,slow")
def late_messages_are_refused() -> None:
    from convoymq.sim.mirrored.referee import MirroredReferee

    on_added = MirroredReferee.on_added

    def planted(self: Any, life: Any, identity: bytes) -> None:
        newest, self.newest = self.newest, life
        try:
            on_added(self, life, identity)
        finally:
            self.newest = newest

    MirroredReferee.on_added = planted  # type: ignore[method-assign]


@plant("a master whose disk refused its mark never gets mirrors", "full,errors,crash,stop")
def mark_is_never_tried_again() -> None:
    from convoymq.queues.mirrored.master import Mark

    host = _host()
    mark = host._mark

    def planted(self: Any, master: Any, member: Any) -> None:
        if not getattr(master, "tried", False):
            master.tried = True
            mark(self, master, member)
        assert master.mark is not Mark.WRITTEN

    host._mark = planted


def _partitioned() -> Any:
    from convoymq.queues.mirrored.partitions import PartitionedHost

    return PartitionedHost


@plant("a node without a majority serves on in pause_minority", "partition,isolate")
def minority_serves() -> None:
    _partitioned().is_paused = False


@plant(
    "a paused node goes on before its tree has what was recorded",
    "partition,isolate",
)
def resumed_too_early() -> None:
    host = _partitioned()
    look = host._look

    def planted(self: Any) -> None:
        look(self)
        if self._lost_ms is not None and self._parts.has_majority():
            self._on_read(self._losses, None)

    host._look = planted


@plant("autoheal keeps the copies of the losing side", "partition,isolate")
def losing_side_is_kept() -> None:
    _partitioned()._give_way = lambda self: self._giving_way.clear()


@plant("a master that is cut off confirms without its mirrors", "partition,isolate")
def cut_off_master_confirms() -> None:
    host = _host()
    on_node_down = host.on_node_down

    def planted(self: Any, node: int) -> None:
        on_node_down(self, node)
        for master in [self.master_of(group) for group in self._rings]:
            if master is not None and master.member is not None:
                for each in master.member.view.members:
                    if each.node == node:
                        master.log.confirms.forget(each.number)

    host.on_node_down = planted


@plant("credit counts twice at a new master", "kill,crash")
def credit_counts_twice_at_a_new_master() -> None:
    from convoymq.queues.mirrored.client import MirroredClient

    grant_again = MirroredClient._grant_again

    def planted(self: Any, consumer: int) -> None:
        self._limits[consumer] = self._limits.get(consumer, 0) + self._next_ids.get(consumer, 0)
        grant_again(self, consumer)

    MirroredClient._grant_again = planted  # type: ignore[method-assign]


@plant("a master forgets what consumers said of messages", "none")
def master_forgets_notes() -> None:
    from convoymq.queues.classic.machine import ClassicMachine

    note = ClassicMachine.note

    def planted(self: Any, run: Any, said: Any) -> None:
        note(self, run, said._replace(annotations=b""))

    ClassicMachine.note = planted  # type: ignore[method-assign]


@plant("a master rests before its mirrors are what the policy wants", "kill")
def master_rests_too_early() -> None:
    from convoymq.queues.classic.queue import LocalQueue

    _master().rests_until = LocalQueue.rests_until
