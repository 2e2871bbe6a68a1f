"""The interface of a backend of users.

A backend admits a client (`log_in`, `find`) and answers with a `User`. What that user may is asked
of the backend that gave the rights, without waiting: a backend with a distant source keeps what it
needs in the `Identity`, and brings it up to date beside the requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from convoymq.metadata.records import User
from convoymq.model.errors import Refused


class NotAdmitted(Refused):
    """A backend does not admit a client; the text is for the log, the client never sees it."""


class Backend:
    """A source of users. Methods raise `NotAdmitted` for a client that is refused for a reason
    which an operator wants to read, and return None for one that the backend does not know."""

    name: str

    async def log_in(self, name: str, password: bytes) -> User | None:
        """Returns the user whose password or token it is. Raises NotAdmitted."""
        raise NotImplementedError

    async def find(self, name: str) -> User | None:
        """Returns a user for whom somebody else vouches: a certificate, or another backend. Raises
        NotAdmitted."""
        return None

    async def renew(self, user: User, secret: bytes) -> User:
        """Returns the user with the rights that a new secret gives. Raises NotAdmitted."""
        return user

    def present(self, user: User) -> User | None:
        """Returns a user as it is now; None when it is no longer admitted."""
        return user

    async def refresh(self, user: User) -> bool:
        """Reads a user's rights again when they are old. Returns whether they have changed."""
        return False

    def opens(self, user: User, vhost: str) -> bool:
        """Returns whether a user may open a virtual host."""
        raise NotImplementedError

    def allows(self, user: User, vhost: str, permission: str, kind: str, name: str) -> bool:
        """Returns whether a user may configure, write or read a queue or exchange."""
        raise NotImplementedError

    def has_topic_rules(self, user: User, vhost: str) -> bool:
        """Returns whether `allows_key` can be false for a key."""
        return False

    def allows_key(self, user: User, vhost: str, permission: str, exchange: str, key: str) -> bool:
        """Returns whether a user may write or read a routing key of a topic exchange."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity(User):
    """A user with rights of another backend than the tree."""

    backend: Backend = field(compare=False, repr=False)
    rights: object = field(default=None, compare=False, repr=False)
    """Facts by which the backend decides."""
    expires_s: float | None = None
    """Wall clock at which it ends."""
