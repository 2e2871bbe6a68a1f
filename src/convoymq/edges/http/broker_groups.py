"""Broker groups, for the HTTP API: the edge that knows them implements this."""

from __future__ import annotations

from convoymq.edges.edge import Edge
from convoymq.model.json import JsonObject


class BrokerGroups(Edge):
    """Asks name servers and brokers. All raise Unavailable when none answers, NotFound for what
    they do not know."""

    async def groups(self) -> list[JsonObject]:
        """Returns the groups, as name servers have them."""
        raise NotImplementedError

    async def group(self, name: str) -> JsonObject:
        """Returns a group with the state of each replica."""
        raise NotImplementedError

    async def topics(self, name: str) -> list[JsonObject]:
        """Returns the topics of a group."""
        raise NotImplementedError

    async def topic(self, name: str, topic: str) -> JsonObject:
        """Returns a topic's queues and consumer groups."""
        raise NotImplementedError
