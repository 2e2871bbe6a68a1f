"""States of a connection, and the moves between them.

state           hears                                   goes to
HEADER          protocol header                         START
START           start-ok (→ authentication)             TUNE
TUNE            tune-ok                                 OPENING
OPENING         open                                    OPEN
OPEN            everything                              CLOSING (our close), LEAVING (theirs)
CLOSING         close, close-ok; the rest is dropped    CLOSED
LEAVING         close; the rest is dropped              AWAITING_CLOSE (close-ok is sent)
AWAITING_CLOSE  close; the rest is dropped              CLOSED (the peer closes, or too late)
CLOSED          nothing
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """State of a connection; see the module's table."""

    HEADER = "header"
    START = "starting"
    AUTHENTICATING = "authenticating"
    TUNE = "tuning"
    OPENING = "opening"
    OPEN = "running"
    CLOSING = "closing"
    LEAVING = "leaving"
    AWAITING_CLOSE = "awaiting_close"
    CLOSED = "closed"


ENDING = frozenset((State.CLOSING, State.LEAVING, State.AWAITING_CLOSE, State.CLOSED))
"""Nothing is refused or closed by the server any more."""

_ENDS = (State.CLOSING, State.LEAVING, State.CLOSED)

MOVES: dict[State, frozenset[State]] = {
    State.HEADER: frozenset((State.START, State.CLOSED)),
    State.START: frozenset((State.AUTHENTICATING, *_ENDS)),
    State.AUTHENTICATING: frozenset((State.TUNE, *_ENDS)),
    State.TUNE: frozenset((State.OPENING, *_ENDS)),
    State.OPENING: frozenset((State.OPEN, *_ENDS)),
    State.OPEN: frozenset(_ENDS),
    State.CLOSING: frozenset((State.CLOSED,)),
    State.LEAVING: frozenset((State.AWAITING_CLOSE, State.CLOSED)),
    State.AWAITING_CLOSE: frozenset((State.CLOSED,)),
    State.CLOSED: frozenset(),
}
"""Moves that are legal, by state."""
