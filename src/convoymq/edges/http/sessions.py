"""Sessions of browsers: one log-in, then a cookie.

A session lives in the memory of the node that made it. It ends by log-out, at its time limit, when
its user is deleted or gets another password, and when its user's token expires. The cookie
authenticates a request that changes something only if the request has the session's CSRF token as
well, which no other site can read.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from convoymq.broker.records import User

SESSIONS_MAX = 1000
USER_SESSIONS_MAX = 20
"""Beyond either, the oldest session (of the user) ends."""
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One browser that has logged in."""

    token: str
    csrf: str
    user: User
    """The user's record at the log-in."""
    ends_s: float


class Sessions:
    """The sessions of a node, the oldest first.

    Args:
        present: returns a user as it is now; None when it is no longer admitted.
        timeout_s: life of a session.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        present: Callable[[User], User | None],
        timeout_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._present = present
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, user: User) -> Session:
        """Begins a session of a user who has just logged in."""
        for token in list(self._open):
            self.user_of(token)  # Closes one that has ended.
        own = [each for each in self._open.values() if each.user.name == user.name]
        if len(own) >= USER_SESSIONS_MAX:
            self.close(own[0].token)
        elif len(self._open) >= SESSIONS_MAX:
            self.close(next(iter(self._open)))
        session = Session(
            token=secrets.token_urlsafe(TOKEN_BYTES),
            csrf=secrets.token_urlsafe(TOKEN_BYTES),
            user=user,
            ends_s=self._now_s() + self._timeout_s,
        )
        self._open[session.token] = session
        return session

    def find(self, token: str) -> Session | None:
        """Returns the session with this token, unless it has ended."""
        return self._open[token] if self.user_of(token) is not None else None

    def user_of(self, token: str) -> User | None:
        """Returns the present record of a session's user; None when the session has ended."""
        session = self._open.get(token)
        if session is None:
            return None
        user = self._present(session.user)
        if (
            user is None
            or (user.password_hash, user.algorithm)
            != (session.user.password_hash, session.user.algorithm)
            or self._now_s() >= session.ends_s
        ):
            self.close(token)
            return None
        return user

    def close(self, token: str) -> None:
        """Ends a session, if there is one."""
        self._open.pop(token, None)

    def left_s(self, session: Session) -> int:
        """Returns the rest of a session's life."""
        return max(0, int(session.ends_s - self._now_s()))
