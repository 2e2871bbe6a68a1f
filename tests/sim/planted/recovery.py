"""Bugs of mirrored queues whose nodes stop, start and are lost: one for each scenario."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from tests.sim.planted.registry import late, planting

plant = planting("recovery")
_host = late("convoymq.queues.mirrored.host:MirroredHost")
_script = late("convoymq.sim.mirrored:recovery")


@plant("a former master opens the queue without the one that followed it")
def former_master_founds() -> None:
    host = _host()

    def planted(self: Any, record: Any) -> None:
        others = [each for each in record.view.members if each.node != self.node_id]
        if not any(map(self._is_running, others)):
            self._propose(
                record.group, record.view.refounded(self.node_id, self._parts.incarnation)
            )

    host._found_again = planted


@plant("files do not say whose copy they are")
def copies_without_a_name() -> None:
    from convoymq.queues.mirrored import proposals

    proposals.read_member = lambda files, group: None


@plant("only the last master's copy may go on when that is lost")
def mirrors_are_no_heirs() -> None:
    script = _script()
    heir = script.heir

    def planted(view: Any, copies: Any, **options: Any) -> int:
        found: int = heir(view, copies, **options)
        return found if found and copies[found].member == view.master else 0

    script.heir = planted


@plant("a copy that lacks messages is taken without force")
def forced_without_force() -> None:
    script = _script()
    heir = script.heir
    script.heir = lambda view, copies, **options: heir(view, copies, **{**options, "forced": True})


@plant("a node that was started anew does not offer its copy")
def copy_is_not_offered() -> None:
    from convoymq.queues.mirrored import host
    from convoymq.queues.mirrored.policy import CopyAge

    host.read_age = lambda files, group: CopyAge()


@plant("a node with a new disk opens an empty queue")
def empty_queue_is_opened() -> None:
    host = _host()
    found_again = host._found_again

    def planted(self: Any, record: Any) -> None:
        self._parts = replace(self._parts, lost_groups=int)
        found_again(self, record)

    host._found_again = planted


def _waiting_for(wait_ms: int) -> None:
    host = _host()
    found_again = host._found_again

    def planted(self: Any, record: Any) -> None:
        self.restart_wait_ms = wait_ms
        found_again(self, record)

    host._found_again = planted


@plant("a mirror does not wait for the last master")
def mirror_does_not_wait() -> None:
    _waiting_for(0)


@plant("a mirror waits for the last master for ever")
def mirror_waits_for_ever() -> None:
    _waiting_for(1 << 60)


@plant("a mirror that is not synchronised goes on by itself after a restart")
def unsynchronised_goes_on() -> None:
    host = _host()
    found_again = host._found_again

    def planted(self: Any, record: Any) -> None:
        view = msgspec.structs.replace(record.view, synchronised=tuple(record.view.full()))
        found_again(self, replace(record, view=view))

    host._found_again = planted


@plant("a mirror takes over that its master does not know of yet")
def unknown_mirror_takes_over() -> None:
    _host()._may_take_over_unsynchronised = lambda self, record: True


@plant("the copy of the member that came last counts as the newest")
def youngest_member_is_newest() -> None:
    from convoymq.queues.mirrored.policy import CopyAge

    CopyAge.rank = lambda self: (self.member,)  # type: ignore


@plant("a mirror whose copy was given up stays in the ring until it is told")
def void_copy_stays() -> None:
    host = _host()
    withdraw = host._withdraw

    def planted(self: Any, record: Any, own: Any) -> None:
        withdraw(self, record, own)
        self._void.clear()

    host._withdraw = planted


@plant("a node whose disk refuses a mirror gets the next one at once")
def mirrors_fail_without_a_pause() -> None:
    _host()._note_failures = lambda self, master, view: None


@plant("a master that gives way removes its files before another one leads")
def files_go_too_early() -> None:
    _host()._is_wanted = lambda self, master, record: False


@plant("the only whole copy is void when its node starts anew")
def whole_copy_is_void() -> None:
    host = _host()
    found_again = host._found_again

    def planted(self: Any, record: Any) -> None:
        view = record.view
        own = view.live_at(self.node_id)
        if own is not None and view.synchronised == (own.number,):
            self._propose(record.group, view.with_failed(own.number))
        else:
            found_again(self, record)

    host._found_again = planted
