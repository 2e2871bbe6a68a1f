"""Who serves what in a group, and in which order a replica changes over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.rocketmq.acting.roles import (
    HAND_OVER_MS,
    RETRY_MS,
    AskHaAddress,
    Attach,
    Detach,
    Register,
    Roles,
    RoleSettings,
    RunServices,
    State,
    Step,
    WakePulls,
)

LEASE_MS = 10_000
MASTER, FIRST, SECOND = "h:1", "h:2", "h:3"
ADDRESSES = {0: MASTER, 1: FIRST, 2: SECOND}


def roles(number: int, **changes: object) -> Roles:
    chosen: dict[str, object] = {"acting_enabled": True, "replicas": 2, "lease_ms": LEASE_MS}
    return Roles(
        RoleSettings(id=number, address=ADDRESSES[number], **(chosen | changes))  # type: ignore[arg-type]
    )


def carried_out(core: Roles, now_ms: int) -> list[Step]:
    """Carries all steps out that are due."""
    steps = []
    while (step := core.next_step(now_ms)) is not None:
        steps.append(step)
        core.done(step)
        if isinstance(step, AskHaAddress):
            core.on_ha_address(step.master, "ha")
        core.check_invariants()
        assert len(steps) < 20, steps
    return steps


def slave_of(master: str | None, number: int = 1) -> Roles:
    core = roles(number)
    core.on_pre_online_ended({} if master is None else {0: master}, "ha", 0)
    carried_out(core, 0)
    core.on_members({number: ADDRESSES[number]} | ({} if master is None else {0: master}), 0)
    carried_out(core, 0)
    return core


def test_a_replica_that_starts_is_isolated_and_does_nothing() -> None:
    core = roles(1)
    core.on_members({0: MASTER, 1: FIRST}, 0)
    core.on_min_id(0, MASTER, None, "ha")
    assert core.state is State.ISOLATED
    assert core.next_step(0) is None


def test_one_replica_alone_is_never_isolated() -> None:
    assert roles(0, replicas=1).state is State.MASTER
    assert roles(0, acting_enabled=False).state is State.MASTER
    assert roles(1, acting_enabled=False).state is State.SLAVE
    assert carried_out(roles(0, replicas=1), 0) == [RunServices(True)]


def test_a_slave_becomes_acting_when_its_master_goes_and_steps_back_in_order() -> None:
    core = slave_of(MASTER)
    assert core.state is State.SLAVE
    core.on_min_id(1, FIRST, MASTER, None)
    assert core.state is State.ACTING
    assert carried_out(core, 10) == [RunServices(True), Detach(MASTER)]
    core.on_min_id(0, MASTER, None, None)
    assert core.state is State.SLAVE
    steps = carried_out(core, 20)
    assert steps == [RunServices(False), AskHaAddress(MASTER), Attach(MASTER, "ha"), WakePulls()]


def test_a_poll_finds_what_no_notification_said() -> None:
    core = slave_of(MASTER)
    core.on_members({1: FIRST}, 1000)
    assert core.state is State.ACTING
    core.on_members({0: MASTER, 1: FIRST}, 2000)
    assert core.state is State.SLAVE


def test_only_the_smallest_of_the_slaves_acts() -> None:
    core = roles(2)
    core.on_pre_online_ended({0: MASTER, 1: FIRST}, "ha", 0)
    core.on_min_id(1, FIRST, MASTER, None)
    assert core.state is State.SLAVE
    core.on_min_id(2, SECOND, FIRST, None)
    assert core.state is State.ACTING
    core.on_min_id(1, FIRST, None, None)
    assert core.state is State.SLAVE


def test_a_failed_step_is_tried_again_before_the_next_one() -> None:
    core = slave_of(MASTER)
    core.on_min_id(1, FIRST, MASTER, None)
    assert core.next_step(10) == RunServices(True)
    core.failed(RunServices(True), 10)
    assert core.next_step(10 + RETRY_MS - 1) is None
    assert carried_out(core, 10 + RETRY_MS) == [RunServices(True), Detach(MASTER)]


def test_a_step_that_is_pointless_is_not_tried_again() -> None:
    core = slave_of(MASTER)
    core.on_min_id(1, FIRST, MASTER, None)
    core.failed(RunServices(True), 10)
    core.on_min_id(0, MASTER, None, "ha")
    # It was never detached: nothing is left to do but to wake clients.
    assert carried_out(core, 11) == [WakePulls()]


def test_pulls_are_not_woken_for_a_master_that_has_gone_again() -> None:
    """Found by the simulator: a client ahead of an acting slave was answered at once."""
    core = slave_of(MASTER)
    core.on_min_id(1, FIRST, MASTER, None)
    assert carried_out(core, 10) == [RunServices(True), Detach(MASTER)]
    core.on_min_id(0, MASTER, None, None)
    core.on_min_id(1, FIRST, MASTER, None)
    assert carried_out(core, 20) == []


def test_services_end_at_once_while_something_else_waits_for_its_retry() -> None:
    core = slave_of(None)
    assert core.services_run
    core.on_members({}, 0)
    core.failed(Register(), 10)
    core.on_hand_over(11)
    assert core.next_step(11) == RunServices(False)


def test_a_replica_that_is_not_listed_registers_again() -> None:
    """RocketMQ's heartbeats never bring back an entry that a name server dropped."""
    core = slave_of(MASTER)
    core.on_members({0: MASTER}, 1000)
    assert carried_out(core, 1000) == [Register()]
    core.on_members({}, 2000)
    assert carried_out(core, 2000) == [Register()]
    assert core.state is State.SLAVE


def test_an_acting_slave_lets_nothing_escape_while_it_hears_its_master() -> None:
    """RocketMQ's slave goes by the name server alone: a master that lost its connection to it
    only delivers delayed messages as well, and each arrives twice."""
    core = slave_of(MASTER)
    core.on_link(MASTER, 5000)
    core.on_min_id(1, FIRST, MASTER, None)
    assert core.state is State.ACTING
    assert carried_out(core, 6000) == []
    core.on_link_ended(MASTER)
    assert carried_out(core, 6001) == [RunServices(True), Detach(MASTER)]


def test_a_silent_link_is_no_link() -> None:
    core = slave_of(MASTER)
    core.on_link(MASTER, 5000)
    core.on_min_id(1, FIRST, MASTER, None)
    core.on_members({1: FIRST}, 5000 + 1)
    assert core.next_step(5000 + LEASE_MS - 1) is None
    assert core.next_step(5000 + LEASE_MS) == RunServices(True)


def test_a_master_without_a_lease_ends_its_services_and_has_to_get_online_again() -> None:
    """RocketMQ's master that was stopped for a while delivers what its slave let escape."""
    core = roles(0)
    core.on_pre_online_ended({1: FIRST}, None, 0)
    assert carried_out(core, 0) == [Register()]
    core.on_members({0: MASTER, 1: FIRST}, 1000)
    assert carried_out(core, 1000) == [RunServices(True)]
    assert carried_out(core, 1000 + LEASE_MS - 1) == []
    assert carried_out(core, 1000 + LEASE_MS) == [RunServices(False)]
    assert core.needs_pre_online
    core.on_members({0: MASTER, 1: FIRST}, 20_000)
    assert not core.services_wanted(20_000)
    core.on_pre_online_ended({1: FIRST}, None, 21_000)
    assert carried_out(core, 21_000) == [Register()]


def test_a_master_whose_slaves_answer_needs_no_name_server() -> None:
    core = roles(0, replicas=3)
    core.on_pre_online_ended({1: FIRST, 2: SECOND}, None, 0)
    carried_out(core, 0)
    core.on_members({0: MASTER, 1: FIRST, 2: SECOND}, 0)
    core.on_link(FIRST, 29_000)
    core.on_link(SECOND, 28_000)
    assert core.services_wanted(28_000 + LEASE_MS - 1)
    assert not core.services_wanted(28_000 + LEASE_MS)


def test_a_slave_takes_services_back_that_a_master_never_began() -> None:
    core = slave_of(None)
    assert core.services_run
    core.on_hand_over(100)
    assert carried_out(core, 100) == [RunServices(False)]
    core.on_members({1: FIRST}, HAND_OVER_MS)
    assert carried_out(core, 100 + HAND_OVER_MS) == [RunServices(True)]


def test_an_acting_slave_that_is_not_listed_ends_its_services() -> None:
    """Name servers that lost their memory told a master that nobody is there."""
    core = slave_of(None)
    assert core.next_step(LEASE_MS - 1) is None
    assert core.next_step(LEASE_MS) == RunServices(False)


def test_a_slave_whose_attempts_are_refused_learns_what_another_one_sent() -> None:
    """A second slave acted for a moment: targets refused this one's attempts for ever after."""
    core = slave_of(None)
    core.on_superseded()
    assert carried_out(core, 1) == [RunServices(False), RunServices(True)]


def test_replicas_that_start_together_run_special_services_once() -> None:
    """Neither sees the other in pre-online: each ran them, until a notification came."""
    master, slave = roles(0), roles(1)
    for core in (master, slave):
        core.on_pre_online_ended({}, None, 0)
        assert carried_out(core, 0) == [Register()]
    both = {0: MASTER, 1: FIRST}
    slave.on_members(both, 1)
    assert RunServices(True) not in carried_out(slave, 1)
    master.on_members(both, 1)
    assert master.needs_pre_online
    assert carried_out(master, 1) == []


def test_a_master_that_looked_at_its_slaves_goes_on_when_it_is_listed() -> None:
    core = roles(0)
    core.on_pre_online_ended({1: FIRST}, None, 0)
    carried_out(core, 0)
    core.on_members({0: MASTER, 1: FIRST}, 1)
    assert not core.needs_pre_online
    assert carried_out(core, 1) == [RunServices(True)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_replica_whose_id_another_one_has_gets_online_again(number: int) -> None:
    core = roles(number)
    core.on_pre_online_ended({}, None, 0)
    carried_out(core, 0)
    core.on_members({number: ADDRESSES[number]}, 1)
    assert carried_out(core, 1) == [RunServices(True)]
    core.on_members({number: "h:9"}, 2)
    assert (core.state, core.needs_pre_online) == (State.ISOLATED, True)
    assert carried_out(core, 2) == [RunServices(False)]
    core.check_invariants()


def test_a_master_at_another_address_is_another_one() -> None:
    core = slave_of(MASTER)
    core.on_link(MASTER, 0)
    core.on_members({0: "h:9", 1: FIRST}, 1)
    # Another one has its id, as long as it is heard.
    assert carried_out(core, 1) == []
    core.on_link_ended(MASTER)
    steps = carried_out(core, 1)
    assert steps == [
        Detach(MASTER), AskHaAddress("h:9"), Attach("h:9", "ha"), WakePulls(),
    ]  # fmt: skip


def test_a_slave_without_acting_follows_the_master_that_it_is_told() -> None:
    core = roles(1, acting_enabled=False)
    core.on_registered(MASTER, "ha")
    assert carried_out(core, 0) == [Attach(MASTER, "ha")]
    core.on_min_id(1, FIRST, MASTER, None)
    core.on_members({1: FIRST}, 1)
    assert core.state is State.SLAVE
    assert core.master == MASTER


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["view", "notify", "link", "unlink", "step", "fail", "hand over", "online"]
        ),
        st.sampled_from([{}, {0: MASTER}, {0: MASTER, 1: FIRST}, {1: FIRST}, {0: "h:9"}]),
        st.integers(0, 4000),
    ),
    max_size=40,
)


@given(st.sampled_from([0, 1]), EVENTS)
def test_steps_converge_whatever_came_before(
    number: int, events: list[tuple[str, dict[int, str], int]]
) -> None:
    core = roles(number)
    now_ms = 0
    for name, members, passed_ms in events:
        now_ms += passed_ms
        match name:
            case "view":
                core.on_members(members, now_ms)
            case "notify" if members:
                core.on_min_id(min(members), members[min(members)], None, None)
            case "link":
                core.on_link(MASTER if number else FIRST, now_ms)
            case "unlink":
                core.on_link_ended(MASTER if number else FIRST)
            case "step" | "fail" if (step := core.next_step(now_ms)) is not None:
                core.failed(step, now_ms) if name == "fail" else core.done(step)
            case "hand over":
                core.on_hand_over(now_ms)
            case "online":
                others = {n: a for n, a in members.items() if n != number}
                core.on_pre_online_ended(others, None, now_ms)
        core.check_invariants()
    now_ms += RETRY_MS
    carried_out(core, now_ms)
    assert core.services_run == core.services_wanted(now_ms)
