"""Bugs of links that are resumed."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import late, planting

_links = late("convoymq.queues.quorum.links:Links")
plant = planting("links")


@plant("what was kept for a link goes back when the link is resumed", "break,crash")
def resumed_link_holds_nothing() -> None:
    attach = _links().attach

    def planted(self: Any, consumer: Any, key: bytes, resumes: bool) -> Any:
        return attach(self, consumer, key, False)

    _links().attach = planted


@plant("what a link takes over goes back to the queue as well", "break,crash")
def resumed_twice() -> None:
    attach = _links().attach

    def planted(self: Any, consumer: Any, key: bytes, resumes: bool) -> Any:
        before = self.receivers.get(key)
        held = [] if before is None else before.checked_out.held()
        reply = attach(self, consumer, key, resumes)
        for _, run in held if resumes else ():
            self._machine.backlog.hold(run[3], run[4])
            self._machine.deliveries.give_back(run, 0, 0)
        return reply

    _links().attach = planted


@plant("a message of an older connection is taken after its link was claimed", "break,crash")
def late_message_is_taken() -> None:
    note = _links().note

    def planted(self: Any, name: bytes, first: int) -> bool:
        note(self, name, first)
        return True

    _links().note = planted
