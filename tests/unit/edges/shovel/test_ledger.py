"""Confirms and settlements of a shovel, against a naive model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.shovel.ledger import Deliveries, Ledger


def test_a_confirm_may_be_about_many() -> None:
    ledger = Ledger(None)
    for sequence in range(1, 6):
        ledger.sent(sequence, 10 * sequence)
    assert ledger.confirmed(2, multiple=False, accepted=True) == [20]
    assert ledger.confirmed(4, multiple=True, accepted=True) == [10, 30, 40]
    assert ledger.confirmed(4, multiple=True, accepted=True) == []
    assert (ledger.pending, ledger.forwarded) == (1, 4)
    assert not ledger.is_done


def test_a_refused_message_is_still_wanted() -> None:
    ledger = Ledger(2)
    ledger.sent(1, 1)
    ledger.sent(2, 2)
    assert [ledger.is_full, ledger.confirmed(1, multiple=False, accepted=False)] == [True, [1]]
    assert [ledger.is_full, ledger.is_done] == [False, False]
    ledger.sent(3, 3)
    assert ledger.confirmed(3, multiple=True, accepted=True) == [2, 3]
    assert ledger.is_done


def test_nothing_to_move_is_done_at_once() -> None:
    assert Ledger(0).is_done
    assert Ledger(0).is_full


@given(st.lists(st.sets(st.integers(1, 30), min_size=1), max_size=12))
def test_each_delivery_is_settled_once(rounds: list[set[int]]) -> None:
    """A broker that takes the frames has exactly the deliveries left that nobody settled."""
    deliveries = Deliveries()
    for tag in range(1, 31):
        deliveries.add(tag)
    left, at_broker = set(range(1, 31)), set(range(1, 31))
    for asked in rounds:
        tags = asked & left
        left -= tags
        for tag, multiple in deliveries.settle(tags):
            assert tag in at_broker
            at_broker -= {each for each in at_broker if each <= tag} if multiple else {tag}
        assert at_broker == left
    assert len(deliveries) == len(left)
