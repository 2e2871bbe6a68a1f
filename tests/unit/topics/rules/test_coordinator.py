"""What a coordinator makes of the heartbeats of members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoymq.topics.rules.answers import Answer, CursorAnswer, HandOverAnswer, LossAnswer
from convoymq.topics.rules.changes import Change, Phase, Seal, plan_merge, plan_move, plan_split
from convoymq.topics.rules.commands import AcceptLoss, HandOver, Lease, OpenCursor
from convoymq.topics.rules.coordinator import (
    AskDrained,
    Coordinator,
    Propose,
    Tell,
    WeakRules,
)
from convoymq.topics.rules.dedup import DedupTable
from convoymq.topics.rules.group import (
    Advance,
    Expire,
    Grant,
    GroupState,
    Join,
    Kept,
    Leave,
    Lose,
    Recover,
    Release,
    Seek,
    Skip,
)
from convoymq.topics.rules.heartbeats import Heartbeat, Leases
from convoymq.topics.rules.lineage import Lineage, Mode
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import TopicState


@pytest.mark.parametrize(("seen", "released"), [(1, False), (2, True)])
def test_a_lease_from_before_a_seek_ends_when_its_member_has_heard_of_the_seek(
    seen: int, released: bool
) -> None:
    """A heartbeat that was sent before the member was told of its lease may come after the seek."""
    state = GroupState.first("g", 0, {})
    for command in (Join("m"), Grant(0, "m", 1, 0), Seek(1, 0, {})):
        assert state.apply(command, latest=0)
    coordinator = Coordinator(state, Lineage.first(first_route(4, 1)), 0)
    coordinator.on_heartbeat(Heartbeat("m", 5, seen, {}, {}), 10)
    proposed = [a.command for a in coordinator.take_actions() if isinstance(a, Propose)]
    assert (Release(0, 1) in proposed) is released


def test_only_members_with_the_filter_of_the_owners_are_offered_partitions() -> None:
    """Members that joined at the same moment may have several filters."""
    state = GroupState.first("g", 0, {})
    for command in (Join("1~a"), Join("2~b"), Join("3")):
        assert state.apply(command, latest=0)
    coordinator = Coordinator(state, Lineage.first(first_route(4, 2)), 0)
    assert set(coordinator.wanted_owners([0, 1]).values()) == {"1~a"}
    assert state.apply(Grant(0, "2~b", 1, 0), latest=0)
    assert set(coordinator.wanted_owners([0, 1]).values()) == {"2~b"}
    assert state.apply(Join("4~b"), latest=0)
    assert set(coordinator.wanted_owners([0, 1]).values()) == {"2~b", "4~b"}
    coordinator.leaving = {"2~b", "4~b"}
    assert coordinator.wanted_owners([0, 1]) == {}, "an owner has to go first"


@pytest.mark.parametrize("held", [{}, {0: 1}])
def test_a_lease_that_its_partition_has_fenced_is_told_as_revoked(held: dict[int, int]) -> None:
    """Also to a member that has not heard of it: nobody else would ever release it."""
    state = GroupState.first("g", 0, {})
    for command in (Join("m"), Grant(0, "m", 1, 0)):
        assert state.apply(command, latest=0)
    coordinator = Coordinator(state, Lineage.first(first_route(4, 1)), 0)
    coordinator.on_answer(0, OpenCursor("g", 1), CursorAnswer(Code.OK), 1)
    coordinator.on_answer(0, Lease("g", 1, 1, "m"), Answer(Code.LEASE_FENCED), 2)
    answer = coordinator.answer_to(Heartbeat("m", 5, 1, held, {}))
    assert (answer.leases, answer.revoked) == ({0: 1}, frozenset({0}))


def test_a_lease_of_a_lost_partition_is_told_no_more_and_ends_in_time() -> None:
    """Until then its owner may hand out what it has, and the group stays."""
    state = GroupState.first("g", 0, {})
    for command in (Join("m"), Grant(0, "m", 1, 0)):
        assert state.apply(command, latest=0)
    lineage = Lineage.first(first_route(4, 1))
    coordinator = Coordinator(state, lineage, 0, lost=(0,), ttl_ms=100, margin_ms=10)
    assert coordinator.answer_to(Heartbeat("m", 5, 1, {0: 1}, {})).leases == {}
    for now_ms in (10, 60, 119):
        coordinator.on_heartbeat(Heartbeat("m", now_ms, 1, {0: 1}, {}), now_ms)
        assert not coordinator.is_drained(0)
    proposed = [a.command for a in coordinator.take_actions() if isinstance(a, Propose)]
    assert proposed == []
    coordinator.on_heartbeat(Heartbeat("m", 120, 1, {0: 1}, {}), 120)
    proposed = [a.command for a in coordinator.take_actions() if isinstance(a, Propose)]
    assert proposed == [Release(0, 1, expired=True)]
    assert state.apply(proposed[0], latest=0)
    assert coordinator.is_drained(0)


def test_a_dead_member_is_not_waited_for_and_its_heartbeats_count_no_more() -> None:
    state = GroupState.first("g", 0, {})
    for command in (Join("m"), Join("n"), Grant(0, "m", 1, 0)):
        assert state.apply(command, latest=0)
    coordinator = Coordinator(state, Lineage.first(first_route(4, 1)), 0)

    def proposed(now_ms: int) -> list[object]:
        coordinator.step(now_ms)
        return [a.command for a in coordinator.take_actions() if isinstance(a, Propose)]

    assert proposed(10) == []
    coordinator.dead = frozenset(("m",))
    assert proposed(20) == [Release(0, 1, expired=True)]
    coordinator.on_heartbeat(Heartbeat("m", 21, 1, {0: 1}, {}), 21)
    assert not [a for a in coordinator.take_actions() if isinstance(a, Leases)]
    assert not coordinator.may_renew(0, 1)
    assert state.apply(Release(0, 1, expired=True), latest=0)
    coordinator.on_answer(0, OpenCursor("g", 1), CursorAnswer(Code.OK), 22)
    assert Grant(0, "n", 1, 1) in proposed(30)
    assert Leave("m") in proposed(300)


# --- weak topics ---------------------------------------------------------------------------


class Weak:
    """A weak topic with one partition that was split, and a group's coordinator."""

    def __init__(self) -> None:
        topic = TopicState.first(first_route(4, 1))
        change = plan_split(topic.route, 0, [2], topic.next_pid, "c")
        seal = {0: Seal(8, DedupTable().pack())}
        published = replace(change, phase=Phase.PUBLISHED, seals=seal)
        topic.lineage.apply(published, published_at=0)
        self.state = GroupState.first("g", 0, {})
        self.core = Coordinator(self.state, topic.lineage, 0, weak=WeakRules(1_000, 400))

    def step(self, now_ms: int) -> list[object]:
        """What it does; what it proposes is applied, also when it comes again."""
        self.core.step(now_ms)
        done: list[object] = []
        for action in self.core.take_actions():
            if isinstance(action, Propose):
                self.state.apply(action.command, latest=1, time_ms=now_ms)
                done.append(action.command)
            else:
                done.append(action.command if isinstance(action, Tell) else action)
        return done


def test_a_weak_group_goes_on_without_a_silent_source_and_reads_it_late() -> None:
    weak = Weak()
    assert AskDrained(0, 1) in weak.step(0)
    weak.core.on_undrained(0, 1, 500)
    assert not any(isinstance(each, Skip) for each in weak.step(1_400))
    assert Skip(0, 1, 8) in weak.step(1_500)
    assert [(x.pid, x.end, x.reason) for x in weak.state.losses] == [(0, 8, "skipped")]
    for pid in (1, 2):
        weak.core.on_answer(pid, OpenCursor("g", 1), CursorAnswer(Code.OK), 1_600)
    assert Advance(1, 0, 1) in weak.step(1_800)
    # Kept for the group, and not readable before somebody answers.
    assert weak.state.held_version(weak.core.lineage) == 0
    assert weak.core.readable() == [1, 2]
    assert AskDrained(0, 1, whole=True) in weak.step(2_000)
    weak.core.on_undrained(0, 1, 2_100)
    assert 0 in weak.core.readable()
    # A report that says nothing of parked keys is not the end of it.
    weak.core.on_drained(0, 1, 2_200)
    assert Recover(0, 1) not in weak.step(2_300)
    weak.core.on_drained(0, 1, 2_400, whole=True)
    assert Recover(0, 1) in weak.step(2_700)
    assert weak.core.readable() == [1, 2]
    assert [x.reason for x in weak.state.losses] == ["read_late"]


def test_a_strict_group_waits_for_a_silent_source() -> None:
    weak = Weak()
    weak.core.weak = None
    weak.step(0)
    assert not any(isinstance(each, Skip) for each in weak.step(10**9))


def test_expired_messages_are_recorded_before_they_are_passed_over() -> None:
    weak = Weak()
    weak.core.on_expired(0, 1, 3, 6, 10)
    proposed = [a.command for a in weak.core.take_actions() if isinstance(a, Propose)]
    assert proposed == [Lose(0, 1, 3, 6)]
    assert weak.state.apply(proposed[0], latest=1)
    assert AcceptLoss("g", 6, 1) in weak.step(300)
    weak.core.on_answer(0, AcceptLoss("g", 6, 1), LossAnswer(Code.OK), 310)
    assert not any(isinstance(each, AcceptLoss) for each in weak.step(900))
    # More of the same has expired: one record for all of it.
    assert weak.state.apply(Lose(0, 1, 6, 7), latest=1)
    assert [(x.first, x.end) for x in weak.state.losses] == [(3, 7)]


def test_a_silent_member_of_a_weak_topic_loses_its_partitions_before_its_lease_ends() -> None:
    for rules, silence_ms in ((WeakRules(1_000, 400), 400), (None, 11_000)):
        state = GroupState.first("g", 0, {})
        for command in (Join("m"), Grant(0, "m", 1, 0)):
            assert state.apply(command, latest=0)
        core = Coordinator(state, Lineage.first(first_route(4, 1)), 0, weak=rules)
        expired = Propose(Release(0, 1, expired=True))
        core.step(silence_ms - 1)
        assert expired not in core.take_actions()
        core.step(silence_ms)
        assert expired in core.take_actions()


def test_a_weak_group_that_had_expired_comes_back_with_a_record() -> None:
    state = GroupState.first("g", 1, {})
    assert state.apply(Expire(0), 5)
    kept = Kept(oldest=3, whole=3, deleted={0: 1, 1: 2, 2: 3})
    assert not state.apply(Join("m"), 5, kept)
    assert state.apply(Join("m", loses=True), 5, kept, 7)
    assert [(x.pid, x.end, x.reason, x.time_ms) for x in state.losses] == [
        (1, None, "data_expired", 7),
        (2, None, "data_expired", 7),
    ]


def test_what_was_skipped_and_is_lost_has_one_record() -> None:
    weak = Weak()
    assert weak.state.apply(Skip(0, 1, 8), latest=1)
    assert not weak.state.apply(Skip(0, 1, 8), latest=1)
    again = GroupState.restore(weak.state.snapshot())
    assert again.skipped == {0}
    again.forget_skipped(0)
    assert (again.losses, again.skipped) == ([], set())
    assert not again.apply(Recover(0, 1), latest=1)
    # A seek begins anew.
    assert weak.state.apply(Seek(1, 0, {}), latest=1)
    assert weak.state.skipped == set()


def test_a_drained_source_that_nobody_asks_is_not_silent() -> None:
    """Of a merge: the other source takes longer than the group would wait for an answer."""
    topic = TopicState.first(first_route(4, 2))
    change = plan_merge(topic.route, [0, 1], topic.next_pid, "c")
    seal = Seal(8, DedupTable().pack())
    published = replace(change, phase=Phase.PUBLISHED, seals={0: seal, 1: seal})
    topic.lineage.apply(published, published_at=0)
    core = Coordinator(GroupState.first("g", 0, {}), topic.lineage, 0, weak=WeakRules(1_000, 400))
    core.step(0)
    core.on_drained(0, 1, 100)
    for now_ms in range(200, 3_000, 200):
        core.on_undrained(1, 1, now_ms)
        core.step(now_ms)
    core.on_drained(1, 1, 3_000)
    core.step(3_100)
    actions = core.take_actions()
    assert not any(isinstance(a, Propose) and isinstance(a.command, Skip) for a in actions)
    assert {a.pid for a in actions if isinstance(a, Tell)} == {0, 1}
    core.step(4_100)
    skipped = [a.command for a in core.take_actions() if isinstance(a, Propose)]
    assert skipped == [Skip(0, 1, 8), Skip(1, 1, 8)]


def test_what_was_skipped_is_told_to_hand_nothing_over() -> None:
    """Of a coordinator that does not know yet that its parent was handed over: what it froze there
    would never be read late."""
    topic = TopicState.first(first_route(4, 1))
    for pid, end in ((0, 8), (1, 4)):
        change = plan_move(topic.lineage.latest, pid, pid + 1, f"c{pid}")
        seal = {pid: Seal(end, DedupTable().pack())}
        topic.lineage.apply(replace(change, phase=Phase.PUBLISHED, seals=seal), published_at=0)
    state = GroupState.first("g", 0, {}, Mode.DAG)
    assert state.apply(Skip(1, 1, 4), latest=2)
    core = Coordinator(state, topic.lineage, 0, weak=WeakRules(1_000, 400))
    core.on_drained(0, 1, 10)
    core.on_drained(1, 1, 20)
    core.step(30)
    told = [(a.pid, a.command) for a in core.take_actions() if isinstance(a, Tell)]
    assert (0, HandOver("g", 1)) in told
    assert (1, HandOver("g", 1)) not in told
    core.on_answer(0, HandOver("g", 1), HandOverAnswer(Code.OK, b"[[],[]]"), 40)
    core.step(50)
    told = [(a.pid, a.command) for a in core.take_actions() if isinstance(a, Tell)]
    assert (2, OpenCursor("g", 1, without=(1,))) in told
    assert (1, HandOver("g", 1)) not in told


def test_what_was_handed_over_unheard_comes_back_where_no_target_began_with_it() -> None:
    """Its answer was lost for so long that the group skipped the partition; the coordinator before
    had opened one of two targets with it."""
    weak = Weak()
    weak.core.on_drained(0, 1, 0)
    assert HandOver("g", 1) in weak.step(10)
    assert Skip(0, 1, 8) in weak.step(1_010)
    assert OpenCursor("g", 1, without=(0,)) in weak.step(1_300)
    weak.core.on_answer(2, OpenCursor("g", 1, without=(0,)), CursorAnswer(Code.OK, (0,)), 1_310)
    # It answers before it is known what the other target began with: it may be read.
    weak.core.on_undrained(0, 1, 1_320)
    assert 0 in weak.core.readable()
    assert OpenCursor("g", 1) in weak.step(1_600)
    weak.core.on_answer(0, OpenCursor("g", 1), CursorAnswer(Code.OK), 1_610)
    assert not any(isinstance(each, OpenCursor) and each.taken for each in weak.step(1_900))
    weak.core.on_answer(1, OpenCursor("g", 1, without=(0,)), CursorAnswer(Code.OK), 2_000)
    returned = OpenCursor("g", 1, taken=((0, 2),))
    assert returned in weak.step(2_300)
    weak.core.on_answer(0, returned, CursorAnswer(Code.OK), 2_310)
    assert not any(isinstance(each, OpenCursor) for each in weak.step(2_600))


def test_a_new_coordinator_asks_the_targets_of_what_was_skipped_what_they_began_with() -> None:
    """Also when the group is beyond them."""
    topic = TopicState.first(first_route(4, 1))
    for pid in (0, 1):
        change = plan_move(topic.lineage.latest, pid, pid + 1, f"c{pid}")
        seal = {pid: Seal(8, DedupTable().pack())}
        topic.lineage.apply(replace(change, phase=Phase.PUBLISHED, seals=seal), published_at=0)
    state = GroupState.first("g", 0, {})
    for command in (Skip(0, 1, 8), Advance(1, 0, 1), Advance(1, 1, 2)):
        assert state.apply(command, latest=2)
    core = Coordinator(state, topic.lineage, 0, weak=WeakRules(1_000, 400))
    core.on_undrained(0, 1, 10)
    told = [(a.pid, a.command) for a in core.take_actions() if isinstance(a, Tell)]
    # Neither is opened again, so nothing of their parents is needed.
    assert (1, OpenCursor("g", 1)) in told
    assert (2, OpenCursor("g", 1)) in told
    core.on_answer(1, OpenCursor("g", 1), CursorAnswer(Code.OK, ()), 20)
    core.step(400)
    told = [(a.pid, a.command) for a in core.take_actions() if isinstance(a, Tell)]
    assert (0, OpenCursor("g", 1, taken=((0, 4),))) in told


def test_what_a_lost_target_began_with_comes_back() -> None:
    weak = Weak()
    assert weak.state.apply(Skip(0, 1, 8), latest=1)
    weak.core.lost = (1,)
    weak.core.on_undrained(0, 1, 10)
    weak.core.on_answer(2, OpenCursor("g", 1), CursorAnswer(Code.OK), 20)
    assert OpenCursor("g", 1, taken=((2, 4),)) in weak.step(300)


def test_a_weak_group_goes_on_without_a_closed_target_that_it_has_not_opened() -> None:
    """It is behind: the target took messages, and was sealed from outside when it fell silent."""
    topic = TopicState.first(first_route(4, 1))
    for pid, end in ((0, 8), (1, None)):
        change = plan_move(topic.lineage.latest, pid, pid + 1, f"c{pid}")
        seal = {pid: Seal(end, DedupTable().pack())}
        topic.lineage.apply(replace(change, phase=Phase.PUBLISHED, seals=seal), published_at=0)
    state = GroupState.first("g", 0, {})
    core = Coordinator(state, topic.lineage, 0, weak=WeakRules(1_000, 400))

    def proposed(now_ms: int) -> list[object]:
        core.step(now_ms)
        found = [a.command for a in core.take_actions() if isinstance(a, Propose)]
        for command in found:
            state.apply(command, latest=2)
        return found

    core.on_drained(0, 1, 10)
    handed = HandOverAnswer(Code.OK, b"[[],[]]")
    core.on_answer(0, HandOver("g", 1), handed, 20)
    assert Skip(1, 1, None) in proposed(30)
    assert Advance(1, 0, 1) in proposed(300)
    # What it begins with is kept for it.
    assert state.held_version(topic.lineage) == 0
    core.on_answer(2, OpenCursor("g", 1, without=(1,)), CursorAnswer(Code.OK, (1,)), 310)
    assert Advance(1, 1, 2) in proposed(600)
    core.on_undrained(1, 1, 900)
    told = [(a.pid, a.command) for a in core.take_actions() if isinstance(a, Tell)]
    assert (1, OpenCursor("g", 1, 0, (b"[[],[]]",), taken=())) in told


def test_a_target_that_waited_for_another_one_is_not_silent() -> None:
    """Nobody asked it anything between the opening of its cursor and the advance."""
    topic = TopicState.first(first_route(4, 1))
    split = plan_split(topic.route, 0, [2], 1, "c0")
    moved = plan_move(topic.lineage.apply(_published(split)), 1, 3, "c1")
    topic.lineage.apply(_published(moved))
    state = GroupState.first("g", 0, {})
    core = Coordinator(state, topic.lineage, 0, weak=WeakRules(1_000, 400))
    core.on_drained(0, 1, 10)
    core.on_answer(0, HandOver("g", 1), HandOverAnswer(Code.OK, b"[[],[]]"), 20)
    core.on_answer(1, OpenCursor("g", 1), CursorAnswer(Code.OK), 30)
    core.step(5_000)
    core.on_answer(2, OpenCursor("g", 1), CursorAnswer(Code.OK), 10_000)
    assert state.apply(Advance(1, 0, 1), latest=2)
    core.step(10_300)
    proposed = [a.command for a in core.take_actions() if isinstance(a, Propose)]
    assert not any(isinstance(each, Skip) for each in proposed)


def _published(change: Change) -> Change:
    seals = dict.fromkeys(change.sources, Seal(8, DedupTable().pack()))
    return replace(change, phase=Phase.PUBLISHED, seals=seals)
