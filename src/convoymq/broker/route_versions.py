"""Versions of what publishers remember: routes and permissions of one virtual host each.

A change of the tree moves the version of the virtual host that it is about, so that publishers of
other ones go on with what they remember. A new queue moves it only when publishers remember that
the default exchange does not lead to a queue of that name: no other remembered route leads past it,
because a queue is bound after it is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from convoymq.metadata.records import Change, ChangeKind

if TYPE_CHECKING:
    from convoymq.kernels.route_cache import RouteCacheVersion

SPARE_MAX = 16
"""Versions of virtual hosts without use that are kept until the next one is made."""
MISSING_MAX = 4096
"""Names of queues, of a virtual host, whose absence publishers remember."""


class RouteVersions:
    """The version of each virtual host that has publishers.

    Args:
        in_use: returns the virtual hosts that exist or have connections.
    """

    def __init__(
        self, make: Callable[[], RouteCacheVersion], in_use: Callable[[], Collection[str]]
    ) -> None:
        self._make = make
        self._in_use = in_use
        self._versions: dict[str, RouteCacheVersion] = {}
        self._prune_at = SPARE_MAX
        self._first = 0
        """Above all versions that were dropped: what was remembered by them is not that of another
        virtual host of the same name."""
        self._missing: defaultdict[str, set[str]] = defaultdict(set)
        """Virtual host -> names of queues whose absence is remembered by its version."""

    def __len__(self) -> int:
        return len(self._versions)

    def of(self, vhost: str) -> RouteCacheVersion:
        """Returns the version of a virtual host."""
        found = self._versions.get(vhost)
        if found is None:
            if len(self._versions) >= self._prune_at:
                self._prune()
            found = self._versions[vhost] = self._make()
            found.value += self._first
        return found

    def _prune(self) -> None:
        in_use = set(self._in_use())
        for vhost in self._versions.keys() - in_use:
            self._first = max(self._first, self._versions.pop(vhost).value)
            self._missing.pop(vhost, None)
        # Doubled, so that a look at all of them is rare.
        self._prune_at = 2 * len(self._versions) + SPARE_MAX

    def remember_missing(self, vhost: str, queue: str) -> bool:
        """Returns whether publishers may remember that the virtual host has no queue of that name:
        its version moves when one is made."""
        names = self._missing[vhost]
        if len(names) >= MISSING_MAX:
            return queue in names
        names.add(queue)
        return True

    def bump(self, vhost: str = "") -> None:
        """Has what publishers of a virtual host remember forgotten; "" = of all."""
        if not vhost:
            for version in self._versions.values():
                version.bump()
            self._missing.clear()
        elif vhost in self._versions:
            self._versions[vhost].bump()
            self._missing.pop(vhost, None)

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        if change.kind is ChangeKind.QUEUE_CREATED:
            assert change.record is not None
            if change.record.name not in self._missing.get(change.vhost, ()):
                return
        self.bump(change.vhost)
