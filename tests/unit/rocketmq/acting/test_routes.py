"""The route of a topic as several name servers have it."""

from __future__ import annotations

from convoymq.rocketmq.client.routes import merged_route
from convoymq.rocketmq.remoting.values import (
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    QueueData,
    RouteData,
)


def route(name: str, perm: int, address: str) -> RouteData:
    return RouteData(
        [QueueData(name, 2, 2, perm, 0)], [BrokerData("c", name, {0: address}, None, True)]
    )


def test_a_broker_that_one_name_server_dropped_is_in_the_route() -> None:
    found = merged_route([route("a", PERM_READ, "h:1"), route("b", PERM_READ | PERM_WRITE, "h:2")])
    assert [queues.broker_name for queues in found.queue_datas] == ["a", "b"]


def test_of_two_entries_the_one_that_can_be_written_to_counts() -> None:
    writable = route("a", PERM_READ | PERM_WRITE, "h:1")
    for routes in (
        [route("a", PERM_READ, "h:2"), writable],
        [writable, route("a", PERM_READ, "h:2")],
    ):
        found = merged_route(routes)
        assert found.queue_datas[0].perm & PERM_WRITE
        assert found.broker_datas[0].broker_addrs == {0: "h:1"}
