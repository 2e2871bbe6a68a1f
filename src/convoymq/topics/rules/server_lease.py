"""Leases of servers: who may accept messages, and when a silent server surely accepts none.

A server accepts messages only while the controller has answered it a short time ago; it counts from
when it asked. The controller counts from when it answered, and adds a margin. A partition that is
to be sealed from outside gets no lease any more, from the decision on.

Source: ordered topics, section 10.2 and 10.3.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

TTL_MS = 3_000
MARGIN_MS = 500


class ServerLeases:
    """Leases by server, for both ends. Times are those of the end that calls."""

    __slots__ = ("_answered_ms", "_asked_ms", "_given_up", "margin_ms", "ttl_ms")

    def __init__(self, ttl_ms: int = TTL_MS, margin_ms: int = MARGIN_MS) -> None:
        self.ttl_ms = ttl_ms
        self.margin_ms = margin_ms
        self._asked_ms: dict[Hashable, int] = {}
        self._answered_ms: dict[Hashable, int] = {}
        self._given_up: set[Hashable] = set()

    def renewed(self, server: Hashable, asked_ms: int) -> None:
        """The server has an answer to what it asked then."""
        self._asked_ms[server] = max(asked_ms, self._asked_ms.get(server, asked_ms))

    def holds(self, server: Hashable, now_ms: int) -> bool:
        """Returns whether the server may accept messages."""
        asked = self._asked_ms.get(server)
        return asked is not None and now_ms < asked + self.ttl_ms

    def answer(self, server: Hashable, now_ms: int) -> bool:
        """The controller renews a lease; False when the server is given up."""
        if server in self._given_up:
            return False
        self._answered_ms[server] = now_ms
        return True

    def give_up(self, server: Hashable) -> None:
        """The controller renews the lease no more."""
        self._given_up.add(server)

    def is_given_up(self, server: Hashable) -> bool:
        """Returns whether the controller renews the lease no more."""
        return server in self._given_up

    def take_back(self, needed: Collection[Hashable]) -> None:
        """The controller renews leases again but those of the servers that it still has to know
        to accept nothing: a merge may have been amended without one."""
        self._given_up.intersection_update(needed)

    def succeed(self, given_up: set[Hashable], now_ms: int) -> None:
        """Another controller begins: its predecessor may have answered every server just now. What
        the log says is given up stays so."""
        self._answered_ms = dict.fromkeys(self._answered_ms, now_ms)
        self._given_up = set(given_up)

    def is_over(self, server: Hashable, now_ms: int) -> bool:
        """Returns whether a server that is given up surely accepts nothing any more."""
        if server not in self._given_up:
            return False
        return now_ms >= self._answered_ms.get(server, now_ms) + self.ttl_ms + self.margin_ms
