"""What members on a node say to its operator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import structlog

from convoymq.topics.rules.answers import AckAnswer, ParkAnswer
from convoymq.topics.rules.refusals import Code
from convoymq.topics.shell.group_messages import GroupName
from convoymq.topics.shell.member import FULL_SAID_MS, Member, MemberParts

FULL = ParkAnswer(Code.PARK_FULL)
NAME = GroupName("/", "orders", "g")


class Rig:
    """A member of the group `g`, and a clock."""

    def __init__(self) -> None:
        self.now_ms = 1000
        nothing: Any = None
        clock: Any = SimpleNamespace(monotonic_ms=lambda: self.now_ms)
        self.parts = MemberParts(
            node=1, incarnation=1, store=nothing, control=nothing, partitions=nothing,
            clock=clock, spawn=nothing, retries=nothing,
        )  # fmt: skip
        self.member = object.__new__(Member)
        self.member.name, self.member._parts, self.member._clock = NAME, self.parts, clock
        self.heard: list[object] = []
        core: Any = SimpleNamespace(
            on_answer=lambda _request, answer, _now: self.heard.append(answer)
        )
        self.member.core = core
        self.member.run = lambda: None  # type: ignore[method-assign]

    def answer(self, pid: int, answer: object) -> None:
        request: Any = SimpleNamespace(pid=pid)
        self.member._answered(request, answer, None)


def test_a_partition_that_parks_no_more_is_named_once_a_minute() -> None:
    rig = Rig()
    with structlog.testing.capture_logs() as logs:
        for pid in (0, 0, 3):
            rig.answer(pid, FULL)
        rig.now_ms += FULL_SAID_MS - 1
        rig.answer(0, FULL)
        assert [(each["event"], each["partition"]) for each in logs] == [
            ("topics.park_full", 0), ("topics.park_full", 3),
        ]  # fmt: skip
        assert (logs[0]["topic"], logs[0]["group"]) == ("orders", "g")
        rig.now_ms += 1
        rig.answer(0, FULL)
    assert [each["partition"] for each in logs] == [0, 3, 0]
    assert rig.heard == [FULL] * 5
    assert set(rig.parts._full) == {(NAME, 0)}, "what need not be known any more is forgotten"


def test_other_answers_say_nothing() -> None:
    rig = Rig()
    with structlog.testing.capture_logs() as logs:
        rig.answer(0, ParkAnswer(Code.OK))
        rig.answer(0, AckAnswer(Code.OK))
        rig.answer(0, None)
    assert logs == []


class Credit:
    """A member with credit, whose partitions hand out when told, and a clock."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []
        self.timers: list[Any] = []
        clock: Any = SimpleNamespace(monotonic_ms=lambda: 1000, call_later=self._call_later)
        self.member = object.__new__(Member)
        self.member._clock, self.member._drain, self.member._gone = clock, None, False
        self.core: Any = SimpleNamespace(given=0, ready=4, limit=0)
        self.core.set_limit = lambda limit, _now: setattr(self.core, "limit", limit)
        self.member.core = self.core
        self.member.run = lambda: None  # type: ignore[method-assign]

    def _call_later(self, _ms: int, call: Any) -> Any:
        timer = SimpleNamespace(call=call, cancel=lambda: self.timers.remove(timer))
        self.timers.append(timer)
        return timer

    def grant(self, limit: int, *, drain: bool) -> None:
        self.member.grant(limit, lambda *found: self.heard.append(found), drain=drain)


def test_a_drain_of_a_member_ends_after_a_moment_with_what_it_has_got() -> None:
    credit = Credit()
    credit.grant(3, drain=False)
    assert credit.heard == [(0, 4)]
    credit.grant(3, drain=True)
    assert (credit.heard, len(credit.timers)) == ([(0, 4)], 1)
    credit.core.given = 2
    credit.timers[0].call()
    assert credit.heard[1:] == [(2, 4)]
    assert credit.core.limit == 2
    assert not credit.timers


def test_another_grant_ends_a_drain() -> None:
    credit = Credit()
    credit.grant(3, drain=True)
    credit.grant(9, drain=False)
    assert (credit.heard, credit.core.limit, credit.timers) == ([(0, 4), (0, 4)], 9, [])
