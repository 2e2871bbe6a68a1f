"""How a replica gets online, step by step."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from convoymq.rocketmq.acting.preonline import (
    FRESH_MS,
    AskMaster,
    AskMembers,
    AwaitLink,
    CompareTails,
    Follow,
    IdTaken,
    Join,
    Online,
    Step,
    TakeOver,
    TellHaAddress,
    Wait,
    pre_online,
)

SECOND = Wait(1000)


def run(
    own_id: int, script: Iterable[tuple[Step, object]], *, skips: bool = False
) -> Online | Step:
    """Sends the results of a script; returns the end, or the step after it."""
    steps = pre_online(own_id, "h:own", skips=skips)
    step = next(steps)
    try:
        for expected, result in script:
            assert step == expected
            step = steps.send(result)
    except StopIteration as stop:
        online: Online = stop.value
        return online
    return step


@pytest.mark.parametrize("own_id", [0, 1])
def test_a_replica_alone_is_online_at_once(own_id: int) -> None:
    assert run(own_id, [(AskMembers(), {})]) == Online({})


@pytest.mark.parametrize("skips", [False, True])
def test_a_replica_waits_while_another_one_has_its_id(skips: bool) -> None:
    taken = {1: "h:9", 0: "h:0"}
    script: list[tuple[Step, object]] = [
        (AskMembers(), taken), (IdTaken("h:9"), None), (SECOND, None), (AskMembers(), taken),
        (IdTaken("h:9"), None), (SECOND, None), (AskMembers(), {1: "h:own"}),
    ]  # fmt: skip
    assert run(1, script, skips=skips) == Online({})


def test_name_servers_that_do_not_answer_are_asked_again() -> None:
    script = [(AskMembers(), None), (SECOND, None), (AskMembers(), {})]
    assert run(0, script) == Online({})


def test_a_master_takes_over_from_each_member_smallest_id_first() -> None:
    script: list[tuple[Step, object]] = [(AskMembers(), {2: "h:2", 1: "h:1"})]
    for number, address in ((100, "h:1"), (200, "h:2")):
        script += [(TellHaAddress(address), True), (CompareTails(address), True)]
        script += [(AwaitLink(address), True), (TakeOver(address), number)]
    online = run(0, script)
    assert online == Online({2: "h:2", 1: "h:1"}, None, 100)
    assert isinstance(online, Online)
    assert online.is_fresh(100 + FRESH_MS - 1)
    assert not online.is_fresh(100 + FRESH_MS)


@pytest.mark.parametrize("failing", range(4))
def test_a_member_that_fails_is_tried_again(failing: int) -> None:
    steps: list[Step] = [
        TellHaAddress("h:1"), CompareTails("h:1"), AwaitLink("h:1"), TakeOver("h:1"),
    ]  # fmt: skip
    script: list[tuple[Step, object]] = [(AskMembers(), {1: "h:1"})]
    script += [(step, True) for step in steps[:failing]]
    script += [(steps[failing], None), (SECOND, None)]
    assert run(0, script) == AskMembers()


def test_a_slave_follows_the_master_first() -> None:
    script: list[tuple[Step, object]] = [
        (AskMembers(), {0: "h:0", 2: "h:2"}), (AskMaster("h:0"), "ha"), (Follow("h:0", "ha"), True),
        (AwaitLink("h:0"), True),
    ]  # fmt: skip
    assert run(1, script) == Online({0: "h:0", 2: "h:2"}, "ha")


def test_a_slave_of_a_master_without_ha_address_is_online_at_once() -> None:
    assert run(1, [(AskMembers(), {0: "h:0"}), (AskMaster("h:0"), "")]) == Online({0: "h:0"})


def test_a_slave_without_a_master_joins_the_others_as_far_as_they_answer() -> None:
    others = {1: "h:1", 3: "h:3"}
    script = [(AskMembers(), others), (Join("h:1"), None), (Join("h:3"), None)]
    assert run(2, script) == Online(others)


def test_what_may_be_skipped_is_skipped() -> None:
    assert run(0, [(AskMembers(), {1: "h:1"})], skips=True) == Online({1: "h:1"})
