"""Limits of virtual hosts and users on connections and channels.

Counts come from all nodes that answer, when a client asks: nothing is counted where there is no
limit. Those who ask on one node take turns, so that they cannot pass together; on two nodes they
can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from convoymq.broker.cluster_queries import ClusterQueries
from convoymq.metadata.limits import MAX_CHANNELS, MAX_CONNECTIONS, limit_of
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.refusals import (
    user_channels_exceeded,
    user_connections_exceeded,
    vhost_connections_exceeded,
)


class ClientLimits:
    """See the module text. One per node."""

    def __init__(self, tree: MetadataMachine, cluster: ClusterQueries) -> None:
        self._tree = tree
        self._cluster = cluster
        self._turn = asyncio.Lock()

    def bound_connections(self, user: str, vhost: str) -> bool:
        """Returns whether the connections of a user, or to a virtual host, have a limit."""
        return self._of_vhost(vhost) is not None or self._of_user(user) is not None

    def bound_channels(self, user: str) -> bool:
        """Returns whether the channels of a user have a limit."""
        return limit_of(self._tree.user_limits.get(user), MAX_CHANNELS) is not None

    async def open_connection(self, user: str, vhost: str, opened: Callable[[], None]) -> None:
        """Calls `opened`, which registers a connection, when there may be one more. Raises
        NotAllowed."""
        async with self._turn:
            if self.bound_connections(user, vhost):
                rows = await self._cluster.list_connections()
                limit = self._of_vhost(vhost)
                if limit is not None and sum(row["vhost"] == vhost for row in rows) >= limit:
                    raise vhost_connections_exceeded(vhost, user, limit)
                limit = self._of_user(user)
                if limit is not None and sum(row["user"] == user for row in rows) >= limit:
                    raise user_connections_exceeded(user, limit)
            opened()

    async def open_channel(self, user: str, opened: Callable[[], None]) -> None:
        """Calls `opened`, which opens a channel, when there may be one more. Raises NotAllowed."""
        async with self._turn:
            limit = limit_of(self._tree.user_limits.get(user), MAX_CHANNELS)
            if limit is not None:
                rows = await self._cluster.list_connections()
                count = sum(row.get("channels", 0) for row in rows if row["user"] == user)
                if count >= limit:
                    raise user_channels_exceeded(user, limit)
            opened()

    def _of_vhost(self, vhost: str) -> int | None:
        place = self._tree.vhosts.get(vhost)
        return limit_of(place.limits, MAX_CONNECTIONS) if place is not None else None

    def _of_user(self, user: str) -> int | None:
        return limit_of(self._tree.user_limits.get(user), MAX_CONNECTIONS)
