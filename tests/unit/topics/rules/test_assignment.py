"""Assignment: cover, what stays where it is, children, balance."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.topics.rules.assignment import assign
from convoymq.topics.rules.routes import Span
from tests.unit.topics.rules.histories import History, histories

MEMBERS = ("ann", "bob", "cid", "dan", "eve")


def spans(count: int, first: int = 0) -> list[Span]:
    return [Span(n, n + 1, first + n) for n in range(count)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Span], list[str], dict[int, str]]:
    """Partitions, members, former owners of whom some left."""
    layout = spans(draw(st.integers(0, 12)))
    members = draw(st.lists(st.sampled_from(MEMBERS), unique=True, max_size=5))
    few = draw(st.integers(1, 5))
    owners = st.one_of(st.just("gone"), st.sampled_from(MEMBERS[:few]))
    previous = {pid: draw(owners) for pid in range(14) if draw(st.integers(0, 3))}
    return layout, members, previous


@given(cases())
@settings(max_examples=60)
def test_every_partition_has_one_owner_and_members_have_as_much_to_do(
    case: tuple[list[Span], list[str], dict[int, str]],
) -> None:
    layout, members, previous = case
    owners = assign(layout, members, previous)
    if not members:
        assert owners == {}
        return
    assert list(owners) == [span.pid for span in layout]
    assert set(owners.values()) <= set(members)
    counts = Counter(dict.fromkeys(members, 0))
    counts.update(owners.values())
    assert max(counts.values()) - min(counts.values()) <= 1


@given(cases())
@settings(max_examples=60)
def test_a_result_stays_as_it_is(
    case: tuple[list[Span], list[str], dict[int, str]],
) -> None:
    layout, members, previous = case
    owners = assign(layout, members, previous)
    assert assign(reversed(layout), members[::-1], owners) == owners


@given(cases(), st.data())
@settings(max_examples=60)
def test_only_the_partitions_of_who_left_move(
    case: tuple[list[Span], list[str], dict[int, str]], data: st.DataObject
) -> None:
    layout, members, _ = case
    before = assign(layout, members)
    if len(members) < 2:
        return
    gone = data.draw(st.sampled_from(members))
    after = assign(layout, [m for m in members if m != gone], before)
    moved = {pid for pid in before if after[pid] != before[pid]}
    assert moved == {pid for pid, owner in before.items() if owner == gone}


@given(st.integers(1, 30), st.integers(1, 5))
@settings(max_examples=60)
def test_who_joins_takes_no_more_than_its_part(count: int, members: int) -> None:
    before = assign(spans(count), MEMBERS[: members - 1])
    after = assign(spans(count), MEMBERS[:members], before)
    counts = Counter(dict.fromkeys(MEMBERS[:members], 0))
    counts.update(after.values())
    assert max(counts.values()) - min(counts.values()) <= 1
    moved = [pid for pid in after if before and after[pid] != before[pid]]
    assert len(moved) == (counts[MEMBERS[members - 1]] if before else 0)


@given(histories(), st.integers(1, 5))
@settings(max_examples=60)
def test_a_child_goes_to_an_owner_of_a_parent(history: History, members: int) -> None:
    """Through a whole history: of each change some child does, the only one of a
    move or merge always; who else keeps what it has moves only for balance."""
    team = MEMBERS[:members]
    owners = assign(history.routes[0].spans, team)
    for route, change in zip(history.routes[1:], history.changes, strict=True):
        of_parents = [owners[pid] for pid in change.sources]
        parents = {span.pid: of_parents for span in change.targets}
        after = assign(route.spans, team, owners, parents)
        children = [after[span.pid] for span in change.targets]
        assert set(children) & set(of_parents)
        kept = [pid for pid in after if pid in owners and after[pid] != owners[pid]]
        assert len(kept) <= len(change.sources)
        owners = after


def test_both_children_stay_where_there_is_room() -> None:
    owners = {0: "ann", 1: "bob", 2: "bob"}
    layout = [Span(0, 1, 3), Span(1, 2, 4), Span(2, 3, 1), Span(3, 4, 2)]
    after = assign(layout, ["ann", "bob"], owners, {3: ["ann"], 4: ["ann"]})
    assert after == {3: "ann", 4: "ann", 1: "bob", 2: "bob"}


def test_a_member_without_work_gets_a_child_instead_of_the_owner_of_its_parent() -> None:
    layout = [Span(0, 1, 1), Span(1, 2, 2)]
    after = assign(layout, ["ann", "bob"], {0: "ann"}, {1: ["ann"], 2: ["ann"]})
    assert after == {1: "ann", 2: "bob"}


def test_more_members_than_partitions_leave_some_standing_by() -> None:
    after = assign(spans(2), MEMBERS)
    assert sorted(Counter(after.values()).values()) == [1, 1]
