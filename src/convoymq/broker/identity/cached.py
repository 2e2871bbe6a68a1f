"""A backend that remembers log-ins for a while, so that a distant source is asked less often."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import NamedTuple

from convoymq.broker.identity.backend import Backend, NotAdmitted
from convoymq.metadata.records import User

ENTRIES_MAX = 10_000


class _Entry(NamedTuple):
    user: User | None
    reason: str
    ends_s: float


class CachedBackend(Backend):
    """Remembers log-ins of another backend.

    Args:
        ttl_s: how long.
        refusals: whether refusals are remembered too.
    """

    def __init__(self, backend: Backend, ttl_s: float, *, refusals: bool) -> None:
        self.name = backend.name
        self._backend = backend
        self._ttl_s = ttl_s
        self._refusals = refusals
        self._entries: dict[bytes, _Entry] = {}
        self._salt = secrets.token_bytes(32)
        """Passwords are in memory as keyed hashes only."""

    async def log_in(self, name: str, password: bytes) -> User | None:
        given = len(name).to_bytes(4, "big") + name.encode() + password
        key = hmac.digest(self._salt, given, hashlib.sha256)
        found = self._entries.get(key)
        if found is None or found.ends_s <= time.monotonic():
            found = await self._asked(name, password)
            if found.user is not None or self._refusals:
                self._remember(key, found)
        elif found.user is not None and self._backend.present(found.user) is None:
            del self._entries[key]
            return None
        if found.reason:
            raise NotAdmitted(found.reason)
        return found.user

    async def find(self, name: str) -> User | None:
        return await self._backend.find(name)

    async def _asked(self, name: str, password: bytes) -> _Entry:
        user, reason = None, ""
        try:
            user = await self._backend.log_in(name, password)
        except NotAdmitted as error:
            if not self._refusals:
                raise
            reason = error.text
        return _Entry(user, reason, time.monotonic() + self._ttl_s)

    def _remember(self, key: bytes, entry: _Entry) -> None:
        self._entries.pop(key, None)
        if len(self._entries) >= ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = entry
