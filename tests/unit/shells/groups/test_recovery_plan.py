"""Which copy goes on after a lost majority, and what is said about the loss."""

from __future__ import annotations

import msgspec

from convoymq.shells.groups.recovery_plan import (
    CopyReport,
    GroupPlace,
    NodeReport,
    Outcome,
    make_plan,
)

NODES = (1, 2, 3)


def copy(group: int = 1, term: int = 4, index: int = 10, **more: object) -> CopyReport:
    return CopyReport(group=group, term=term, last_index=index, last_term=term, **more)  # type: ignore[arg-type]


def report(node: int, *copies: CopyReport) -> NodeReport:
    return NodeReport(node=node, cluster="c" * 32, copies=copies)


def place(*members: int, group: int = 1) -> GroupPlace:
    return GroupPlace(group=group, vhost="/", name=f"q{group}", members=members)


def plan_of(places: list[GroupPlace], *reports: NodeReport, nodes: tuple[int, ...] = NODES):  # type: ignore[no-untyped-def]
    return make_plan(places=places, reports={r.node: r for r in reports}, nodes=nodes)


def test_a_group_with_a_majority_is_left_alone() -> None:
    plan = plan_of([place(1, 2, 3)], report(1, copy()), report(2, copy()))
    (group,) = plan.groups
    assert group.outcome is Outcome.INTACT
    assert not plan.needed
    assert plan.missing == (3,)


def test_the_newest_log_goes_on_and_the_others_follow() -> None:
    plan = plan_of(
        [place(1, 2, 3, 4, 5)],
        report(1, copy(term=4, index=50)),
        report(2, copy(term=5, index=12)),
        nodes=(1, 2, 3, 4, 5),
    )
    (group,) = plan.groups
    assert (group.outcome, group.survivor, group.followers) == (Outcome.RECOVER, 2, (1,))
    assert (group.last_term, group.last_index) == (5, 12)
    assert "entries after 12 of term 5" in group.loss
    assert plan.missing == (3, 4, 5)


def test_equal_logs_go_to_the_lowest_number() -> None:
    plan = plan_of([place(1, 2, 3, 4)], report(2, copy()), report(1, copy()), nodes=(1, 2, 3, 4))
    assert plan.groups[0].survivor == 1


def test_a_leader_of_its_last_term_has_what_was_committed_till_then() -> None:
    plan = plan_of([place(1, 2, 3)], report(3, copy(led=True)))
    assert plan.groups[0].loss == "none, unless the missing nodes went on without this one"
    later = CopyReport(group=1, term=6, last_index=10, last_term=4, led=True)
    assert "entries after 10" in plan_of([place(1, 2, 3)], report(3, later)).groups[0].loss


def test_a_damaged_copy_neither_goes_on_nor_counts_for_a_majority() -> None:
    bad = copy(unusable="damaged: a record is damaged", index=99)
    plan = plan_of([place(1, 2, 3)], report(1, bad), report(2, copy()))
    (group,) = plan.groups
    assert (group.outcome, group.survivor, group.followers) == (Outcome.RECOVER, 2, (1,))


def test_without_a_usable_copy_the_group_is_lost() -> None:
    bad = copy(unusable="damaged: a record is damaged")
    plan = plan_of([place(1, 2, 3), place(2, 3, group=2)], report(1, bad))
    assert [group.outcome for group in plan.groups] == [Outcome.LOST, Outcome.LOST]
    assert "a record is damaged" in plan.groups[0].loss
    assert not plan.needed


def test_an_empty_log_is_no_copy() -> None:
    empty = CopyReport(group=1, term=0, last_index=0, last_term=0)
    assert plan_of([place(1, 2, 3)], report(1, empty)).groups[0].outcome is Outcome.LOST


def test_the_voters_that_the_log_names_count_and_not_the_record() -> None:
    """The record of a queue follows its log: a member that joined lately votes already."""
    joined = copy(voters=(1, 2, 4))
    plan = plan_of([place(1, 2, 3)], report(1, joined), report(4, joined), nodes=(1, 2, 3, 4))
    assert plan.groups[0].outcome is Outcome.RECOVER
    plan = plan_of([place(1, 2, 4)], report(1, joined), report(4, joined), nodes=(1, 2, 3, 4))
    assert plan.groups[0].outcome is Outcome.INTACT


def test_the_digest_names_what_was_shown() -> None:
    first = plan_of([place(1, 2, 3)], report(1, copy()))
    assert first.digest == plan_of([place(1, 2, 3)], report(1, copy())).digest
    assert first.digest != plan_of([place(1, 2, 3)], report(1, copy(index=11))).digest
    assert first.digest != plan_of([place(1, 2, 3)], report(1, copy()), report(2)).digest


def test_reports_cross_a_link() -> None:
    sent = report(1, copy(voters=(1, 2), unusable="x"))
    assert msgspec.convert(msgspec.to_builtins(sent), NodeReport) == sent
