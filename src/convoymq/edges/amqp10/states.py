"""States of a connection, a session and a link, and the moves between them.

Connection
state           hears                                    goes to
HEADER          protocol header with SASL                SASL
SASL            sasl-init (→ authentication)             AUTHENTICATING
AUTHENTICATING  nothing                                  AMQP_HEADER
AMQP_HEADER     protocol header                          AWAITING_OPEN
AWAITING_OPEN   open (→ virtual host, limits)            OPENING
OPENING         nothing                                  OPEN
OPEN            everything                               CLOSING (our close), LEAVING (theirs)
CLOSING         close; the rest is dropped               CLOSED
LEAVING         nothing                                  AWAITING_CLOSE (our close is sent)
AWAITING_CLOSE  nothing                                  CLOSED (the peer closes, or too late)
CLOSED          nothing

Session
OPENING         nothing: limits are asked                MAPPED
MAPPED          everything                               ENDING (our end), ENDED (theirs)
ENDING          end; the rest is dropped                 ENDED
ENDED           nothing

Link
ATTACHING       flow, detach: a queue is asked           ATTACHED, DETACHING
ATTACHED        everything                               DETACHING (our detach), DETACHED (theirs)
DETACHING       detach; the rest is dropped              DETACHED
DETACHED        nothing
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """State of a connection; see the module's table."""

    HEADER = "header"
    SASL = "starting"
    AUTHENTICATING = "authenticating"
    AMQP_HEADER = "waiting_amqp0100"
    AWAITING_OPEN = "waiting_open"
    OPENING = "opening"
    OPEN = "running"
    CLOSING = "closing"
    LEAVING = "leaving"
    AWAITING_CLOSE = "awaiting_close"
    CLOSED = "closed"


class SessionState(Enum):
    """State of a session; see the module's table."""

    OPENING = "opening"
    MAPPED = "mapped"
    ENDING = "ending"
    ENDED = "ended"


class LinkState(Enum):
    """State of a link; see the module's table."""

    ATTACHING = "attaching"
    ATTACHED = "attached"
    DETACHING = "detaching"
    DETACHED = "detached"


ENDING = frozenset((State.CLOSING, State.LEAVING, State.AWAITING_CLOSE, State.CLOSED))
"""Nothing is refused or closed by the server any more."""

MOVES: dict[State, frozenset[State]] = {
    State.HEADER: frozenset((State.SASL, State.CLOSED)),
    State.SASL: frozenset((State.AUTHENTICATING, State.CLOSED)),
    State.AUTHENTICATING: frozenset((State.AMQP_HEADER, State.CLOSED)),
    State.AMQP_HEADER: frozenset((State.AWAITING_OPEN, State.CLOSED)),
    State.AWAITING_OPEN: frozenset((State.OPENING, State.CLOSED)),
    State.OPENING: frozenset((State.OPEN, State.CLOSING, State.CLOSED)),
    State.OPEN: frozenset((State.CLOSING, State.LEAVING, State.CLOSED)),
    State.CLOSING: frozenset((State.CLOSED,)),
    State.LEAVING: frozenset((State.AWAITING_CLOSE, State.CLOSED)),
    State.AWAITING_CLOSE: frozenset((State.CLOSED,)),
    State.CLOSED: frozenset(),
}
"""Moves of a connection that are legal, by state."""

SESSION_MOVES: dict[SessionState, frozenset[SessionState]] = {
    SessionState.OPENING: frozenset((SessionState.MAPPED, SessionState.ENDED)),
    SessionState.MAPPED: frozenset((SessionState.ENDING, SessionState.ENDED)),
    SessionState.ENDING: frozenset((SessionState.ENDED,)),
    SessionState.ENDED: frozenset(),
}

LINK_MOVES: dict[LinkState, frozenset[LinkState]] = {
    LinkState.ATTACHING: frozenset((LinkState.ATTACHED, LinkState.DETACHING, LinkState.DETACHED)),
    LinkState.ATTACHED: frozenset((LinkState.DETACHING, LinkState.DETACHED)),
    LinkState.DETACHING: frozenset((LinkState.DETACHED,)),
    LinkState.DETACHED: frozenset(),
}
