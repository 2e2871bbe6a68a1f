"""The table of a connection's states."""

from __future__ import annotations

from convoymq.edges.amqp091.opening import HANDLERS
from convoymq.edges.amqp091.states import ENDING, MOVES, State


def test_every_state_has_its_moves_and_can_end() -> None:
    assert set(MOVES) == set(State)
    assert MOVES[State.CLOSED] == frozenset()
    for state in set(State) - {State.CLOSED}:
        assert State.CLOSED in MOVES[state], state


def test_a_connection_that_ends_never_opens_again() -> None:
    for state in ENDING:
        assert MOVES[state] <= ENDING, state


def test_methods_are_heard_in_states_that_do_not_end() -> None:
    assert not {state for state, _ in HANDLERS} & ENDING
