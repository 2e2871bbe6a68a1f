"""Views of a ring: what each change makes of one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from convoymq.replication.ring.views import Member, RingView, check_view, founded


def ring_of(size: int) -> RingView:
    """Members 1, 2, … on nodes of the same numbers, all full and synchronised."""
    view = founded(1, 7)
    for node in range(2, size + 1):
        view = view.joined(node, 7)
        view = view.caught_up(node).with_synchronised(node)
    return view


def test_numbers_are_given_once() -> None:
    view = ring_of(3).with_failed(3).erased(3).joined(3, 8)
    assert view.ring == (1, 2, 4)
    assert view.live_at(3) == Member(4, 3, 8)
    assert view.next_member == 5
    assert view.version == ring_of(3).version + 3


def test_a_newcomer_stands_right_of_a_full_member() -> None:
    view = ring_of(3)
    assert view.joined(9, 1, 1).ring == (1, 4, 2, 3)
    assert view.joined(9, 1).ring == (1, 2, 3, 4), "right of the youngest"
    with pytest.raises(ValueError, match="node 2"):
        view.joined(2, 8)
    newcomer = view.joined(9, 1)
    with pytest.raises(ValueError, match="node 8"):
        newcomer.joined(8, 1, 4)
    assert newcomer.newcomers == (4,)
    assert newcomer.with_synchronised(4) is newcomer
    assert newcomer.caught_up(4).newcomers == ()
    assert newcomer.caught_up(2) is newcomer


def test_a_failed_member_keeps_its_place_until_it_is_erased() -> None:
    view = ring_of(3).with_failed(1)
    assert (view.ring, view.live, view.failed) == ((1, 2, 3), (2, 3), (1,))
    assert view.home_of(1) == 2
    assert view.synchronised == (2, 3)
    assert view.master == 1
    assert view.nodes() == (2, 3)
    assert view.with_failed(1) is view
    erased = view.erased(1)
    assert (erased.ring, erased.failed, erased.master) == ((2, 3), (), 1)
    assert erased.erased(1) is erased


def test_newcomers_go_with_the_member_to_their_left() -> None:
    view = ring_of(3).joined(8, 1, 2).joined(9, 1, 2)
    assert view.ring == (1, 2, 5, 4, 3)
    gone = view.with_failed(2)
    assert gone.ring == (1, 2, 3)
    assert gone.newcomers == ()
    alone = view.with_failed(5)
    assert alone.ring == (1, 2, 4, 3), "one that goes alone leaves no place: it sent nothing"
    assert alone.failed == ()


def test_the_next_master_has_all_that_the_failed_one_sent() -> None:
    failed = ring_of(3).with_failed(1)
    with pytest.raises(ValueError, match="cannot be promoted"):
        failed.promoted(2)
    view = failed.erased(1).promoted(2)
    assert (view.master, view.synchronised) == (2, (2, 3))
    assert view.nodes() == (2, 3)
    assert view.promoted(3).nodes() == (3, 2), "a live master may hand over"
    with pytest.raises(ValueError, match="member 4"):
        view.joined(9, 1).promoted(4)


def test_a_master_hands_over_to_a_synchronised_member() -> None:
    view = ring_of(4).handed_over(3)
    assert (view.failed, view.next_master, view.version) == ((1,), 3, ring_of(4).version + 1)
    check_view(view)
    assert view.with_failed(2).next_master == 3
    assert view.with_failed(3).next_master == 0
    assert view.erased(1).promoted(3).next_master == 0
    assert view.erased(1).refounded(2, 1).next_master == 0
    for member in (1, 5, 9):
        with pytest.raises(ValueError, match="cannot follow"):
            ring_of(4).joined(5, 1).handed_over(member)


def test_promotion_of_an_unsynchronised_member_makes_the_others_unsynchronised() -> None:
    view = replace(ring_of(3), synchronised=(1, 2)).with_failed(1).erased(1)
    assert view.promoted(3).synchronised == (3,)


def test_a_ring_is_founded_anew_without_the_others() -> None:
    view = ring_of(3).with_failed(2).refounded(3, 9)
    assert view.members == (Member(4, 3, 9),)
    assert (view.version, view.master, view.synchronised) == (ring_of(3).version + 2, 4, (4,))
    assert (view.failed, view.newcomers, view.next_member) == ((), (), 5)
    check_view(view)


@given(st.data())
def test_changes_make_views_that_can_be(data: st.DataObject) -> None:
    view = founded(1, 1)
    last = 0
    for _ in range(data.draw(st.integers(0, 30))):
        member = data.draw(st.sampled_from(view.ring))
        node = data.draw(st.integers(1, 9))
        changes = [view.caught_up, view.with_failed, view.erased, view.with_synchronised]
        full = view.full()
        choice = data.draw(st.integers(0, 5))
        if choice == 4 and view.live_at(node) is None:
            after = view.joined(node, 1, data.draw(st.sampled_from(full)))
        elif choice == 5 and member in full and view.master not in view.failed:
            after = view.promoted(member)
        elif choice % 4 == 1 and full == [member]:
            after = view.refounded(node, 2)
        else:
            after = changes[choice % 4](member)
        assert after is view or after.version == view.version + 1
        assert after.next_member >= view.next_member > last
        view, last = after, view.next_member - 1
        check_view(view)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=RingView) == view
        for each in view.live:
            assert view.left_of(view.right_of(each)) == each
            assert view.home_of(each) == each
        for failed in view.failed:
            assert view.is_full(view.home_of(failed)), "a newcomer inherits nothing"


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"next_member": 3},
        {"failed": (9,)},
        {"newcomers": (9,)},
        {"failed": (1, 2, 3)},
        {"newcomers": (1, 2, 3)},
        {"failed": (3,), "newcomers": (3,)},
        {"failed": (3,), "synchronised": (1, 3)},
        {"next_master": 9},
        {"members": (Member(1, 1, 7), Member(1, 2, 7))},
        {"members": (Member(1, 1, 7), Member(2, 1, 7), Member(3, 3, 7))},
        {"members": (Member(1, 256, 7), Member(2, 2, 7), Member(3, 3, 7))},
        {"members": (Member(1, 1, 0), Member(2, 2, 7), Member(3, 3, 7))},
        {"members": (), "synchronised": ()},
    ],
)
def test_a_view_that_no_changes_lead_to_is_refused(changes: dict[str, object]) -> None:
    check_view(ring_of(3))
    with pytest.raises(ValueError, match="view"):
        check_view(replace(ring_of(3), **changes))


def test_a_view_of_a_later_release_is_not_half_read() -> None:
    row = msgspec.to_builtins(founded(1, 1)) | {"later": 1}
    with pytest.raises(msgspec.ValidationError, match="later"):
        msgspec.convert(row, RingView)
