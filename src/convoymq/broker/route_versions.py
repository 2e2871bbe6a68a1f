"""Versions of what publishers remember: routes and permissions of one virtual host each.

A change of the tree moves the version of the virtual host that it is about, so that publishers of
other ones go on with what they remember. A new queue moves none: no remembered route leads past it,
because a queue is bound after it is made, and that the default exchange leads nowhere is not
remembered (`edges/amqp091/channel.py:Channel.resolve_route`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from convoymq.metadata.records import Change, ChangeKind

if TYPE_CHECKING:
    from convoymq.kernels.route_cache import RouteCacheVersion


class RouteVersions:
    """The version of each virtual host that had publishers."""

    def __init__(self, make: Callable[[], RouteCacheVersion]) -> None:
        self._make = make
        self._versions: dict[str, RouteCacheVersion] = {}

    def of(self, vhost: str) -> RouteCacheVersion:
        """Returns the version of a virtual host."""
        found = self._versions.get(vhost)
        if found is None:
            found = self._versions[vhost] = self._make()
        return found

    def bump(self, vhost: str = "") -> None:
        """Has what publishers of a virtual host remember forgotten; "" = of all."""
        if not vhost:
            for version in self._versions.values():
                version.bump()
        elif vhost in self._versions:
            self._versions[vhost].bump()

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        if change.kind is not ChangeKind.QUEUE_CREATED:
            self.bump(change.vhost)
