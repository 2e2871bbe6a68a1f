"""State tables: every state can be reached and left, and ends are ends."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import pytest

from convoymq.edges.amqp10.states import (
    ENDING,
    LINK_MOVES,
    MOVES,
    SESSION_MOVES,
    LinkState,
    SessionState,
    State,
)

TABLES = [
    (State, MOVES, State.HEADER, State.CLOSED),
    (SessionState, SESSION_MOVES, SessionState.OPENING, SessionState.ENDED),
    (LinkState, LINK_MOVES, LinkState.ATTACHING, LinkState.DETACHED),
]


@pytest.mark.parametrize(("states", "moves", "first", "last"), TABLES)
def test_every_state_is_reached_from_the_first_and_leads_to_the_last(
    states: type[Enum], moves: Mapping[Enum, frozenset[Enum]], first: Enum, last: Enum
) -> None:
    assert set(moves) == set(states)

    def reached(start: Enum) -> set[Enum]:
        found, new = {start}, {start}
        while new:
            new = {each for state in new for each in moves[state]} - found
            found |= new
        return found

    assert reached(first) == set(states)
    assert all(last in reached(state) for state in states)
    assert not moves[last]


def test_nothing_leads_back_from_an_end() -> None:
    assert all(MOVES[state] <= ENDING for state in ENDING)
