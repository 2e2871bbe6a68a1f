"""Bugs of rings: of their cores, their views, their shell and the tree's rule about views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from tests.sim.planted.registry import late, planting

plant = planting("ring")
_core = late("convoymq.replication.ring.core:RingCore")
_view = late("convoymq.replication.ring.views:RingView")
_shell = late("convoymq.shells.ring.shell:RingShell")


@plant("nobody completes the broadcasts of a failed member", "kill,leave")
def forgotten_inheritance() -> None:
    core = _core()
    take = core._take

    def planted(self: Any, progress: Any) -> Any:
        return progress.sender in self.view.failed or take(self, progress)

    core._take = planted


@plant("a broadcast is complete once the right neighbour was sent it", "kill,leave")
def forgets_early() -> None:
    core = _core()
    take_frame = core.take_frame

    def planted(self: Any) -> Any:
        taken = take_frame(self)
        if taken is not None and self.member in self.senders:
            self._complete(self.member, self.senders[self.member].sent)
        return taken

    core.take_frame = planted


@plant("a member forgets what it received, although members to its right lack it", "kill")
def forgets_on_receipt() -> None:
    core = _core()
    take = core._take

    def planted(self: Any, progress: Any) -> Any:
        taken = take(self, progress)
        if taken and progress.sender in self.senders:
            each = self.senders[progress.sender]
            each.complete_up_to(each.last)
        return taken

    core._take = planted


@plant("every other view is not taken", "leave")
def view_is_skipped() -> None:
    core = _core()
    on_view = core.on_view

    def planted(self: Any, view: Any) -> None:
        if view.version % 2:
            on_view(self, view)

    core.on_view = planted


@plant("of two broadcasts in one frame the newer is taken first", "none")
def reordered_sender() -> None:
    core = _core()
    take = core._take
    core._take = lambda self, progress: take(
        self, replace(progress, payloads=progress.payloads[::-1])
    )


@plant("any report of the left neighbour completes all that was broadcast", "none")
def complete_before_the_slowest() -> None:
    core = _core()
    complete = core._complete
    core._complete = lambda self, sender, number: complete(
        self, sender, self._broadcasts(sender).last
    )


@plant("a catch-up frame is delivered whole, as if nothing of it were there", "break")
def repeat_after_catch_up() -> None:
    core = _core()
    take = core._take

    def planted(self: Any, progress: Any) -> Any:
        from convoymq.replication.ring.types import Deliver

        each = self._broadcasts(progress.sender)
        first = progress.last - len(progress.payloads) + 1
        for number in range(first, min(each.last, progress.last) + 1):
            payload = progress.payloads[number - first]
            self.effects.append(Deliver(progress.sender, number, payload))
        return take(self, progress)

    core._take = planted


@plant("a newcomer takes its neighbour's frame for seen without keeping its state", "leave")
def newcomer_keeps_nothing() -> None:
    core = _core()
    adopt = core._adopt
    core._adopt = lambda self, frame: adopt(self, replace(frame, progress=()))


@plant("a catch-up frame ends where another frame would", "leave,kill")
def catch_up_is_cut() -> None:
    core = _core()
    next_progress = core._next_progress

    def planted(self: Any, sender: int, room: int, introduce: bool) -> Any:
        return next_progress(self, sender, 1 if introduce else room, False)

    core._next_progress = planted


@plant("frames of members that are no left neighbours any more are taken", "leave,stale")
def frame_of_a_former_neighbour() -> None:
    core = _core()
    left, on_frame = core._left, core.on_frame

    def planted(self: Any, neighbour: int, frame: Any) -> None:
        core._left = lambda self: neighbour
        try:
            on_frame(self, neighbour, frame)
        finally:
            core._left = left

    core.on_frame = planted


@plant("a neighbour of a newer view that asks for the state gets no answer", "leave,kill")
def question_of_a_newer_view_is_ignored() -> None:
    core = _core()
    on_ask = core.on_ask

    def planted(self: Any, neighbour: int, version: int) -> None:
        if version <= self.view.version:
            on_ask(self, neighbour, version)

    core.on_ask = planted


@plant("a new right neighbour is sent only what comes from now on", "leave,kill")
def no_introduction() -> None:
    core = _core()
    on_view = core.on_view

    def planted(self: Any, view: Any) -> None:
        introduce = self._introduce
        on_view(self, view)
        self._introduce = introduce

    core.on_view = planted


@plant("a link that stands anew has lost nothing", "loss,break")
def link_has_lost_nothing() -> None:
    _core().on_reachable = lambda self, neighbour: None


@plant("broadcasts after a gap are taken as if none were missing", "loss,break")
def gap_is_unnoticed() -> None:
    core = _core()
    take = core._take

    def planted(self: Any, progress: Any) -> Any:
        each = self._broadcasts(progress.sender)
        last = min(progress.last, each.last + len(progress.payloads))
        return take(self, replace(progress, last=last, complete=min(progress.complete, last)))

    core._take = planted


@plant("a failed member is erased when its home knows of the failure", "kill,leave")
def erased_before_complete() -> None:
    from convoymq.replication.ring.types import Erase

    def planted(self: Any, sender: int) -> None:
        if sender in self.view.failed:
            self.effects.append(Erase(sender))

    _core()._erase_when_complete = planted


@plant("members keep their copies for ever", "none")
def acknowledgement_round_ends() -> None:
    core = _core()
    take = core._take
    core._take = lambda self, progress: take(self, replace(progress, complete=0))


@plant("a newcomer outlives the member that it takes its state from", "leave,kill")
def newcomer_outlives_its_neighbour() -> None:
    view = _view()
    with_failed = view.with_failed

    def planted(self: Any, member: int) -> Any:
        changed = with_failed(self, member)
        if changed is self or member in self.newcomers:
            return changed
        return structs.replace(changed, members=self.members, newcomers=self.newcomers)

    view.with_failed = planted


@plant("a newcomer stands right of failed members, and inherits from them", "leave,kill")
def newcomer_inherits() -> None:
    view = _view()
    joined = view.joined

    def planted(self: Any, node: int, incarnation: int, left: int = 0) -> Any:
        changed = joined(self, node, incarnation, left)
        ring = list(changed.members)
        place = changed.ring.index(self.next_member)
        while place + 1 < len(ring) and ring[place + 1].number in self.failed:
            ring[place], ring[place + 1] = ring[place + 1], ring[place]
            place += 1
        return structs.replace(changed, members=tuple(ring))

    view.joined = planted


@plant("the tree records a view that was made from an older one", "leave,kill")
def view_from_an_older_one() -> None:
    from convoymq.metadata.queues import Queues

    change_view = Queues.change_view

    def planted(self: Any, command: Any) -> bool:
        record = self._tree.vhosts[command.vhost].queues[command.name]
        if record.view is not None and command.view.version <= record.view.version:
            view = structs.replace(command.view, version=record.view.version + 1)
            command = structs.replace(command, view=view)
        return change_view(self, command)

    Queues.change_view = planted  # type: ignore[method-assign]


@plant("a member does not wait when too much of it is incomplete", "none")
def window_is_ignored() -> None:
    from convoymq.shells.ring.shell import RingMember

    RingMember.may_broadcast = lambda self: self.core.may_broadcast()  # type: ignore[method-assign]


@plant("a proposal that came too late is not made again", "leave,kill")
def proposal_is_given_up() -> None:
    _shell()._on_answer = lambda self, group, version, recorded, error: None


@plant("a node that starts again is taken for the member that it was", "kill,crash")
def former_member_lives_on() -> None:
    shell = _shell()
    wish = shell._wish

    def planted(self: Any, group: int) -> Any:
        return None if group in self._former else wish(self, group)

    shell._wish = planted
