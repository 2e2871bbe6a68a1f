"""The autoscaler: a table per rule, what holds it back, and that decisions do not turn round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from convoymq.cli.ctl.topic_scaling import shown
from convoymq.topics.rules.autoscaler import (
    Advice,
    Advised,
    Decision,
    Evaluation,
    GroupLoad,
    HotLogicalPartition,
    Layout,
    Merge,
    Move,
    PartitionLoad,
    Placement,
    Policy,
    Rates,
    ServerLoad,
    Split,
    evaluate,
    placements,
)
from convoymq.topics.rules.changes import next_route, plan_merge, plan_split
from convoymq.topics.rules.routes import Route, first_route
from tests.unit.topics.rules.histories import History

UNIT = 1000
NOW = 1_000_000
POLICY = Policy(unit_ms=UNIT, target_bytes=100.0, target_messages=10.0)
ROUTE = first_route(8, 2)
"""Partitions 0 and 1 with four logical partitions each."""


def decide(
    layout: Layout,
    loads: Mapping[int, PartitionLoad],
    groups: Sequence[GroupLoad],
    policy: Policy,
    now: int,
) -> Decision | None:
    """Only what is done next."""
    return evaluate(layout, loads, groups, policy, now).decision


def explained(found: Evaluation) -> str:
    """A line per rule that was met, then the decision."""
    lines = [
        f"{each.subject}: {each.rule} ({shown(each.inputs)}): {each.outcome}"
        for each in found.considered
    ]
    return "\n".join([*lines, f"decision: {found.summary}"])


OLD = NOW - 100 * UNIT


def ago(units: float) -> int:
    return round(NOW - units * UNIT)


def layout(route: Route = ROUTE, **fields: object) -> Layout:
    made = {pid: Placement("a", OLD) for pid in route.pids}
    return replace(Layout(route=route, placements=made), **fields)  # type: ignore[arg-type]


def load(*shares: float, lps: Sequence[float] = (1, 1, 1, 1)) -> PartitionLoad:
    """Bytes, as shares of the target over 2, 5, 10 and 20 units. One share stands for all."""
    rates = Rates(*(100.0 * share for share in (shares * 4 if len(shares) == 1 else shares)))
    return PartitionLoad(bytes=rates, lp_bytes=lps, lp_messages=lps)


CALM = load(0.9)
"""Neither for a split nor for a merge."""


def decision(
    loads: Mapping[int, PartitionLoad],
    groups: Sequence[GroupLoad] = (),
    policy: Policy = POLICY,
    **fields: object,
) -> Decision | None:
    return decide(layout(**fields), loads, groups, policy, NOW)  # type: ignore[arg-type]


def with_placement(pid: int, **fields: object) -> dict[int, Placement]:
    made = dict(layout().placements)
    made[pid] = replace(made[pid], **fields)  # type: ignore[arg-type]
    return made


# --- splits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "age", "rule"),
    [
        ((5.1, 0, 0, 0), 2, "load over 2 units is above 5 targets"),
        ((5.1, 0, 0, 0), 1.9, None),
        ((5.0, 0, 0, 0), 99, None),
        ((2.5, 2.1, 0, 0), 5, "load over 5 units is above 2 targets"),
        ((2.5, 2.1, 0, 0), 4.9, None),
        ((2.5, 2.0, 0, 0), 99, None),
        ((1.5, 1.5, 1.1, 0), 10, "load over 10 units is above 1 targets"),
        ((1.5, 1.5, 1.1, 0), 9.9, None),
        ((1.5, 1.5, 1.0, 9), 99, None),
    ],
)
def test_violent_load_splits_fast_and_mild_load_slowly(
    shares: tuple[float, ...], age: float, rule: str | None
) -> None:
    made = decision({0: load(*shares)}, placements=with_placement(0, created_at=ago(age)))
    if rule is None:
        assert made is None
    else:
        assert isinstance(made, Split)
        assert (made.pid, made.cuts, made.reason.rule) == (0, (2,), rule)
        assert made.reason.inputs["age"] == age


def test_of_bytes_and_messages_the_larger_counts_and_decides_the_cut() -> None:
    heavy = PartitionLoad(
        bytes=Rates(90, 90, 90, 90), messages=Rates(20, 20, 20, 20),
        lp_bytes=(0, 0, 0, 5), lp_messages=(3, 3, 0, 0),
    )  # fmt: skip
    made = decision({0: heavy})
    assert isinstance(made, Split)
    assert made.cuts == (1,)


def test_the_most_urgent_partition_is_split_first() -> None:
    made = decision({0: load(1.5), 1: load(9.0)})
    assert isinstance(made, Split)
    assert made.pid == 1
    made = decision({0: load(1.5), 1: load(9.0, lps=(0, 0, 1, 0))})
    assert isinstance(made, Split), "the next one is, when a split does not help the first"
    assert made.pid == 0


def test_a_hot_logical_partition_is_isolated() -> None:
    made = decision({1: load(2.0, lps=(2, 6, 1, 1))})
    assert isinstance(made, Split)
    assert (made.pid, made.cuts) == (1, (5, 6))
    assert made.reason.inputs["largest_share"] == 0.6


def test_a_hot_logical_partition_that_no_split_helps_is_reported() -> None:
    keys = {5: ("order-7", "order-9")}
    made = decision({1: replace(load(2.0, lps=(1, 17, 1, 1)), top_keys=keys)})
    assert isinstance(made, HotLogicalPartition)
    assert (made.pid, made.lp, made.keys) == (1, 5, keys[5])
    assert made.reason.inputs["share"] == 0.85


def test_a_partition_of_one_logical_partition_is_reported() -> None:
    route = first_route(2, 2)
    made = decide(layout(route), {1: load(3.0, lps=(4,))}, (), POLICY, NOW)
    assert isinstance(made, HotLogicalPartition)
    assert (made.pid, made.lp) == (1, 1)


@pytest.mark.parametrize(("policy", "gains"), [(0.2, True), (0.41, False)])
def test_a_split_that_gains_too_little_is_left(policy: float, gains: bool) -> None:
    made = decision({0: load(2.0, lps=(3, 3, 4, 0))}, policy=replace(POLICY, gain_min=policy))
    assert isinstance(made, Split) == gains


@pytest.mark.parametrize("lps", [(), (1, 1), (0, 0, 0, 0)])
def test_nothing_is_cut_blindly(lps: tuple[float, ...]) -> None:
    evaluation = evaluate(layout(), {0: load(9.0, lps=lps)}, (), POLICY, NOW)
    assert evaluation.decision is None
    assert "no loads of its logical partitions are known" in explained(evaluation)


def test_a_topic_gets_no_more_partitions_than_it_may_have() -> None:
    hot = {1: load(2.0, lps=(2, 6, 1, 1))}
    assert decision(hot, policy=replace(POLICY, partitions_max=2)) is None
    made = decision(hot, policy=replace(POLICY, partitions_max=3))
    assert isinstance(made, Split)
    assert made.cuts == (5,), "two parts, where three have no room"


# --- merges --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "merges"),
    [
        ((0.2,), (0.2,), True),
        ((0.9, 0.9, 0.2, 0.1), (0.9, 0.9, 0.2, 0.1), True),
        ((1.0, 0.1, 0.1, 0.1), (0.1,), False),
        ((0.1, 1.0, 0.1, 0.1), (0.1,), False),
        ((0.1, 0.1, 0.4, 0.1), (0.1,), False),
        ((0.1, 0.1, 0.1, 0.3), (0.2,), False),
        ((0.1,), (0.1, 0.1, 0.1, 0.5), False),
        ((0.25,), (0.25,), False),
        ((0.0,), (0.49,), True),
    ],
)
def test_neighbours_merge_when_both_and_their_sum_are_small(
    one: tuple[float, ...], other: tuple[float, ...], merges: bool
) -> None:
    made = decision({0: load(*one), 1: load(*other)})
    assert made == (None if not merges else made)
    assert isinstance(made, Merge) == merges
    if isinstance(made, Merge):
        assert made.pids == (0, 1)


@pytest.mark.parametrize(
    ("fields", "merges"),
    [
        ({"created_at": ago(20)}, False),
        ({"created_at": ago(20.1)}, True),
        ({"split_at": ago(9.9)}, False),
        ({"split_at": ago(10)}, True),
        ({"merges_before": 9}, True),
        ({"merges_before": 10}, False),
    ],
)
def test_a_merge_waits_for_age_and_splits_and_has_a_budget(
    fields: dict[str, object], merges: bool
) -> None:
    for pid in (0, 1):
        made = decision({0: load(0.1), 1: load(0.1)}, placements=with_placement(pid, **fields))
        assert isinstance(made, Merge) == merges


def test_a_partition_with_many_merges_behind_it_may_still_be_split() -> None:
    made = decision({0: load(9.0)}, placements=with_placement(0, merges_before=10))
    assert isinstance(made, Split)


def test_the_smallest_neighbours_merge_first() -> None:
    route = first_route(8, 4)
    loads = {pid: load(share) for pid, share in enumerate((0.2, 0.1, 0.15, 0.05))}
    made = decide(layout(route), loads, (), POLICY, NOW)
    assert isinstance(made, Merge)
    assert made.pids == (2, 3)


def test_a_topic_keeps_its_smallest_number_of_partitions() -> None:
    loads = {0: load(0.1), 1: load(0.1)}
    assert decision(loads, policy=replace(POLICY, partitions_min=2)) is None
    only = first_route(8, 1)
    assert decide(layout(only), {0: load(0.1, lps=(1,) * 8)}, (), POLICY, NOW) is None


def test_a_partition_without_a_load_is_left_alone() -> None:
    assert decision({0: load(0.1)}) is None
    assert decision({}) is None


# --- moves ---------------------------------------------------------------------------------


def servers(**loads: float) -> dict[str, ServerLoad]:
    return {name: ServerLoad(bytes=100.0 * each) for name, each in loads.items()}


@pytest.mark.parametrize(
    ("loads", "pid", "to"),
    [
        ({"a": 1.7, "b": 0.5}, 1, "b"),
        ({"a": 1.7, "b": 0.5, "c": 0.1}, 0, "c"),
        ({"a": 1.2, "b": 1.0}, None, ""),
        ({"a": 1.7}, None, ""),
        ({"a": 0.5, "b": 1.7}, None, ""),
        ({"a": 1.7, "b": 1.7, "c": 0.1}, None, ""),
        ({"a": 1.7, "b": 0.9, "c": 0.7, "d": 0.7}, 1, "c"),
        # It would gain an eighth only, and the next move could lead back.
        ({"a": 1.7, "b": 0.9, "c": 0.9, "d": 0.9}, None, ""),
        # Nobody is busy.
        ({"a": 0.99, "b": 0.0}, None, ""),
    ],
)
def test_a_busy_server_gives_a_partition_away_where_that_helps(
    loads: dict[str, float], pid: int | None, to: str
) -> None:
    made = decision({0: load(0.95), 1: load(0.6)}, servers=servers(**loads))
    assert isinstance(made, Move) == (pid is not None)
    if isinstance(made, Move):
        assert (made.pid, made.server) == (pid, to)


def test_a_move_waits_until_loads_show_the_last_one() -> None:
    loads, busy = {0: load(0.95), 1: load(0.6)}, servers(a=1.7, b=0.5)
    assert decision(loads, servers=busy, moved_at=ago(4.9)) is None
    assert isinstance(decision(loads, servers=busy, moved_at=ago(5)), Move)
    young = {pid: Placement("a", ago(4.9)) for pid in (0, 1)}
    assert decision(loads, servers=busy, placements=young) is None


def test_a_split_goes_before_a_move_and_a_move_before_a_merge() -> None:
    busy = servers(a=9.0, b=0.1)
    assert isinstance(decision({0: load(9.0), 1: load(0.1)}, servers=busy), Split)
    busy = servers(a=1.2, b=0.1)
    assert isinstance(decision({0: load(0.2), 1: load(0.28)}, servers=busy), Move)
    assert isinstance(decision({0: load(0.2), 1: load(0.1)}), Merge)


# --- lag -----------------------------------------------------------------------------------


def lagging(**fields: object) -> GroupLoad:
    made = GroupLoad(name="g", version=0, lag_s={0: 61.0}, drain_rate={0: 5.0}, spare_members=1)
    return replace(made, **fields)  # type: ignore[arg-type]


INCOMING = replace(CALM, messages=Rates(8, 8, 8, 8))
"""Below the target of 10 messages per second, above what one owner drains."""


def test_lag_splits_when_one_owner_cannot_keep_up_and_members_are_spare() -> None:
    made = decision({0: INCOMING, 1: CALM}, [lagging()])
    assert isinstance(made, Split)
    assert "more comes in than one owner consumes" in made.reason.rule


@pytest.mark.parametrize(
    ("fields", "advised"),
    [
        ({"spare_members": 0}, Advised.ADD_CONSUMERS),
        ({"spare_members": 0, "lanes": 4, "lanes_max": 8}, Advised.RAISE_LANES),
        ({"drain_rate": {0: 9.0}, "lanes": 4, "lanes_max": 8}, Advised.RAISE_LANES),
        ({"drain_rate": {0: 9.0}}, None),
        ({"lag_s": {0: 60.0}, "spare_members": 0}, None),
        ({"lag_s": {}}, None),
        ({"drain_rate": {}}, None),
        ({"is_active": False, "spare_members": 0}, None),
    ],
)
def test_lag_alone_is_no_reason_to_split(
    fields: dict[str, object], advised: Advised | None
) -> None:
    made = decision({0: INCOMING, 1: CALM}, [lagging(**fields)])
    if advised is None:
        assert made is None
    else:
        assert isinstance(made, Advice)
        assert (made.advised, made.group, made.pid) == (advised, "g", 0)


def test_partitions_that_one_owner_could_not_keep_up_with_are_not_merged() -> None:
    small = replace(load(0.1), messages=Rates(1, 1, 1, 1))
    loads = {0: small, 1: small}
    assert decision(loads, [lagging(lag_s={}, drain_rate={0: 1.5})]) is None
    assert isinstance(decision(loads, [lagging(lag_s={}, drain_rate={0: 2.0})]), Merge)


# --- guards --------------------------------------------------------------------------------


def ahead(versions: int) -> tuple[Route, list[GroupLoad]]:
    return Route(versions, 8, ROUTE.spans), [GroupLoad(name="g", version=0)]


@pytest.mark.parametrize(
    ("fields", "held", "free"),
    [
        ("is_changing", True, False),
        ("failed_over_at", ago(1.9), ago(2)),
        ("changes_at", [ago(n) for n in range(12)], [ago(n) for n in range(11)]),
        ("placements", with_placement(1, is_replicated=False), with_placement(1)),
    ],
)
def test_guards_hold_every_action_back(fields: str, held: object, free: object) -> None:
    for loads in ({0: load(9.0), 1: CALM}, {0: load(0.1), 1: load(0.1)}):
        assert decision(loads, **{fields: held}) is None  # type: ignore[arg-type]
        assert decision(loads, **{fields: free}) is not None  # type: ignore[arg-type]
    moving = {0: load(0.95), 1: load(0.6)}
    busy = servers(a=1.7, b=0.5)
    assert decision(moving, servers=busy, **{fields: held}) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("lag", "splits"), [(4, True), (5, False)])
def test_groups_that_are_versions_behind_hold_changes_back(lag: int, splits: bool) -> None:
    route, groups = ahead(lag)
    made = decide(layout(route), {0: load(9.0)}, groups, POLICY, NOW)
    assert isinstance(made, Split) == splits
    idle = [replace(group, is_active=False) for group in groups]
    assert isinstance(decide(layout(route), {0: load(9.0)}, idle, POLICY, NOW), Split)


@pytest.mark.parametrize(
    ("field", "units", "loads"),
    [
        ("split_at", 1, {0: load(9.0)}),
        ("merged_at", 5, {0: load(0.1), 1: load(0.1)}),
    ],
)
def test_cooldowns(field: str, units: float, loads: dict[int, PartitionLoad]) -> None:
    assert decision(loads, **{field: ago(units - 0.1)}) is None  # type: ignore[arg-type]
    assert decision(loads, **{field: ago(units)}) is not None  # type: ignore[arg-type]


def test_changes_of_more_than_an_hour_ago_do_not_count() -> None:
    long_ago = [NOW - 3_600_000] * 50
    assert isinstance(decision({0: load(9.0)}, changes_at=long_ago), Split)


def test_reports_are_made_while_actions_are_held_back() -> None:
    made = decision({1: load(2.0, lps=(0, 1, 0, 0))}, is_changing=True)
    assert isinstance(made, HotLogicalPartition)


# --- explanations --------------------------------------------------------------------------


def test_an_explanation_names_rule_inputs_and_decision() -> None:
    text = explained(evaluate(layout(), {0: load(9.0), 1: load(3.0)}, (), POLICY, NOW))
    assert text.splitlines() == [
        "split of partition 0 at 2: load over 2 units is above 5 targets (load=9, age=100, "
        "largest_share=0.5): chosen",
        "split of partition 1 at 6: load over 5 units is above 2 targets (load=3, age=100, "
        "largest_share=0.5): not first",
        "decision: split of partition 0 at 2",
    ]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "decision: nothing"),
        ({"loads": {0: load(0.1), 1: load(0.1)}}, "decision: merge of partitions 0 and 1"),
        (
            {"loads": {0: load(0.1), 1: load(0.1)}, "is_changing": True},
            "merge of partitions 0 and 1: both loads are small (sum=0.2): held back: a change is "
            "running",
        ),
        (
            {"loads": {0: load(0.95), 1: load(0.6)}, "servers": servers(a=1.7, b=0.5)},
            "decision: move of partition 1 to b",
        ),
        (
            {"loads": {0: replace(load(2.0, lps=(1, 0, 0, 0)), top_keys={0: ["k"]})}},
            "decision: report that logical partition 0 of partition 0 is hot, largest keys: k",
        ),
    ],
)
def test_explanations_are_lines(fields: dict[str, object], line: str) -> None:
    loads = fields.pop("loads", {})
    assert isinstance(loads, dict)
    text = explained(evaluate(layout(**fields), loads, (), POLICY, NOW))  # type: ignore[arg-type]
    assert line in text.splitlines()


def test_advice_is_explained() -> None:
    groups = [lagging(spare_members=0)]
    text = explained(evaluate(layout(), {0: INCOMING}, groups, POLICY, NOW))
    assert text.splitlines()[-1] == "decision: report for group 'g' on partition 0: add consumers"


# --- placements ----------------------------------------------------------------------------


def test_placements_come_from_the_lineage() -> None:
    """Histories publish version v at 100 v."""
    history = History.begin(8, 1)
    left, right = history.split(0, 4)
    (moved,) = history.move(left)
    made = placements(history.lineage, {moved: "a", right: "b"}, [right])
    assert made == {
        moved: Placement("a", 200, 0, 100),
        right: Placement("b", 100, 0, 100, is_replicated=False),
    }
    (merged,) = history.merge(moved, right)
    assert placements(history.lineage, {merged: "a"})[merged] == Placement("a", 300, 1, 100)
    history.lineage.retire([3])
    history.lineage.delete(lambda pid: True)
    history.lineage.trim([3])
    assert placements(history.lineage, {merged: "a"})[merged].created_at == 300


def test_a_range_that_was_never_split_says_so() -> None:
    history = History.begin(8, 2)
    history.move(0)
    made = placements(history.lineage, dict.fromkeys(history.open_pids, "a"))
    assert [each.split_at for each in made.values()] == [None, None]


# --- hysteresis ----------------------------------------------------------------------------


UNITS = 20
SERIES = st.lists(
    st.sampled_from((0.0, 0.0, 0.1, 0.3, 1.0, 3.0, 8.0)), min_size=UNITS, max_size=UNITS
)


def loads_of(route: Route, series: list[list[float]], messages: bool) -> dict[int, PartitionLoad]:
    """Loads of partitions from what their logical partitions took in each of the last units."""
    made = {}
    for span in route.spans:
        total = [sum(series[lp][unit] for lp in range(span.lo, span.hi)) for unit in range(UNITS)]
        means = Rates(*(sum(total[-units:]) / units for units in (2, 5, 10, 20)))
        lps = [sum(series[lp][-10:]) for lp in range(span.lo, span.hi)]
        if messages:
            rates = Rates(means.two * 10, means.five * 10, means.ten * 10, means.twenty * 10)
            made[span.pid] = PartitionLoad(messages=rates, lp_messages=lps)
        else:
            rates = Rates(means.two * 100, means.five * 100, means.ten * 100, means.twenty * 100)
            made[span.pid] = PartitionLoad(bytes=rates, lp_bytes=lps)
    return made


@given(st.lists(SERIES, min_size=2, max_size=8), st.integers(1, 4), st.booleans())
@settings(max_examples=60)
def test_a_decision_does_not_qualify_for_its_opposite(
    series: list[list[float]], partitions: int, messages: bool
) -> None:
    """Under the same loads, without any cool-down, and with partitions of any age: what was split
    is not merged again, what was merged is not split again."""
    route = first_route(len(series), min(partitions, len(series)))
    policy = replace(POLICY, merge_age=-1, split_cooldown=0, merge_cooldown=0)
    first = decide(layout(route), loads_of(route, series, messages), (), policy, NOW)
    assume(isinstance(first, Split | Merge))
    assert isinstance(first, Split | Merge)
    if isinstance(first, Split):
        change = plan_split(route, first.pid, first.cuts, 100, "c")
    else:
        change = plan_merge(route, first.pids, 100, "c")
    after = next_route(route, change)
    new = {span.pid for span in change.targets}
    again = evaluate(layout(after), loads_of(after, series, messages), (), policy, NOW)
    subjects = [each.subject for each in again.considered]
    if isinstance(first, Split):
        pairs = [(a, b) for a in new for b in new]
        assert not any(f"merge of partitions {a} and {b}" in subjects for a, b in pairs)
        fresh = {pid: Placement("a", NOW, split_at=NOW) for pid in new}
        now = layout(after, placements={**layout(after).placements, **fresh})
        second = decide(now, loads_of(after, series, messages), (), POLICY, NOW)
        assert not (isinstance(second, Merge) and new & set(second.pids))
    else:
        assert not any(each.startswith("split of partition 100") for each in subjects)


@given(
    st.lists(st.floats(0.01, 3.0), min_size=2, max_size=8),
    st.lists(st.sampled_from("abc"), min_size=8, max_size=8),
)
@settings(max_examples=60)
def test_a_move_lowers_the_largest_load_and_is_not_taken_back(
    shares: list[float], where: list[str]
) -> None:
    route = first_route(len(shares), len(shares))
    loads = {pid: load(0, share, 0.9, 0.9, lps=(1,)) for pid, share in enumerate(shares)}
    placed = {pid: Placement(where[pid], OLD) for pid in route.pids}

    def of_servers(placed: Mapping[int, Placement]) -> dict[str, ServerLoad]:
        sums = dict.fromkeys("abc", 0.0)
        for pid, placement in placed.items():
            sums[placement.server] += shares[pid]
        return servers(**sums)

    before = of_servers(placed)
    policy = replace(POLICY, move_cooldown=0, partitions_max=1)
    first = decide(layout(route, placements=placed, servers=before), loads, (), policy, NOW)
    assume(isinstance(first, Move))
    assert isinstance(first, Move)
    source = placed[first.pid].server
    placed[first.pid] = replace(placed[first.pid], server=first.server)
    after = of_servers(placed)
    assert max(each.bytes for each in after.values()) < max(each.bytes for each in before.values())
    second = decide(layout(route, placements=placed, servers=after), loads, (), policy, NOW)
    assert not (isinstance(second, Move) and (second.pid, second.server) == (first.pid, source))
