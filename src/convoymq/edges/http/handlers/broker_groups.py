"""Broker groups of RocketMQ's protocol (docs/rocketmq.md#monitoring)."""

from __future__ import annotations

from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.broker_groups import BrokerGroups
from convoymq.edges.http.call import Call
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject

routes = Routes()


def _known(call: Call) -> BrokerGroups:
    """Returns who knows them. Raises 401, or 404 where nobody does."""
    call.need(call.is_monitor)
    for edge in call.served.edges():
        if isinstance(edge, BrokerGroups):
            return edge
    raise ApiError(404, "not_found", "rocketmq.namesrv is not set")


@routes.listing("broker-groups")
async def groups(call: Call) -> list[JsonObject]:
    return await _known(call).groups()


@routes.add("GET", "broker-groups/{name}")
async def group(call: Call) -> JsonObject:
    return await _known(call).group(call.path["name"])


@routes.listing("broker-groups/{name}/topics")
async def topics(call: Call) -> list[JsonObject]:
    return await _known(call).topics(call.path["name"])


@routes.add("GET", "broker-groups/{name}/topics/{topic}")
async def topic(call: Call) -> JsonObject:
    return await _known(call).topic(call.path["name"], call.path["topic"])
