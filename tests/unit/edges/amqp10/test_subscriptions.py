"""Durable subscriptions and links that browse, over a real broker."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Detach,
    Disposition,
    End,
    Flow,
    Source,
    Target,
    Transfer,
)
from convoymq.messages.amqp10.sections import split
from convoymq.messages.amqp10.values import Symbol
from convoymq.model.tables import Table
from convoymq.routing.types import Destination, DestinationKind
from tests.unit.edges.amqp10.fakes import message, of_kind
from tests.unit.edges.amqp10.test_dynamic import queues, until_heard
from tests.unit.edges.amqp10.test_management import Manager, cluster, limited, opened
from tests.unit.queues.fake_cluster import FakeCluster, until

__all__ = ["cluster"]

QUEUE = "subscription.client:link%200"


@pytest.fixture
async def client(cluster: FakeCluster) -> Manager:
    return await opened(cluster)


async def subscribe(
    client: Manager, key: str = "news", handle: int = 0, **fields: Any
) -> list[Any]:
    asked: dict[str, Any] = {"durable": 2, "expiry_policy": "never"}
    made = Source(address=f"/exchanges/amq.direct/{key}", **(asked | fields))
    return await client.attach_receiver(None, handle, made)


async def publish(client: Manager, *bodies: bytes, key: str = "news", handle: int = 5) -> None:
    """Publishes by a link that is there for this."""
    await client.attach_sender(f"/exchanges/amq.direct/{key}", handle=handle)
    for body in bodies:
        client.transfer(message(body), handle=handle)
    count = 0
    while count < len(bodies):
        for each in of_kind(await client.heard(), Disposition):
            assert each.state == Accepted()
            count += 1 if each.last is None else each.last - each.first + 1
    client.send(Detach(handle=handle, closed=True))
    await until_heard(client, Detach)


async def got(client: Manager, count: int) -> list[bytes]:
    """Returns the bodies of so many messages."""
    while len(client.payloads) < count:
        await client.heard()
    found, client.payloads = client.payloads, []
    return [body(each) for each in found]


def body(payload: bytes) -> bytes:
    return payload[split(payload).body_at.start :][5:]


def arguments(cluster: FakeCluster) -> Table:
    topology = cluster.nodes[1].machine.vhosts["/"].topology
    return topology.queue(QUEUE, None).arguments


def bound_to(cluster: FakeCluster) -> list[tuple[str, str]]:
    topology = cluster.nodes[1].machine.vhosts["/"].topology
    found = topology.bindings(destination=Destination(DestinationKind.QUEUE, QUEUE))
    return [(each.source, each.routing_key) for each in found]


async def test_a_subscription_outlives_its_link_until_it_is_closed(
    client: Manager, cluster: FakeCluster
) -> None:
    (attach,) = await subscribe(client)
    assert attach.source.address == "/exchanges/amq.direct/news"
    assert (attach.source.durable, attach.source.expiry_policy) == (2, "never")
    assert queues(cluster) == {QUEUE}
    assert "x-expires" not in arguments(cluster)
    client.send(Detach(handle=0, closed=False))
    await until_heard(client, Detach)
    await publish(client, b"while away")
    client.connection.lost()
    again = await opened(cluster)
    await subscribe(again)
    again.credit(5)
    assert await got(again, 1) == [b"while away"]
    again.settle(0, Accepted())
    again.send(Detach(handle=0, closed=True))
    await until_heard(again, Detach)
    assert not queues(cluster)


async def test_a_subscription_may_expire(client: Manager, cluster: FakeCluster) -> None:
    await subscribe(client, expiry_policy="link-detach", timeout=3600)
    assert arguments(cluster).get("x-expires").value == 3_600_000


async def test_one_without_a_timeout_outlives_a_lost_connection(
    client: Manager, cluster: FakeCluster
) -> None:
    await subscribe(client, expiry_policy="session-end", timeout=0)
    assert arguments(cluster).get("x-expires").value == 60_000


async def test_another_key_replaces_the_first(client: Manager, cluster: FakeCluster) -> None:
    await subscribe(client, "a")
    client.send(Detach(handle=0))
    await until_heard(client, Detach)
    await subscribe(client, "b")
    assert bound_to(cluster) == [("amq.direct", "b")]


async def test_a_client_ends_a_subscription_that_it_does_not_know(
    client: Manager, cluster: FakeCluster
) -> None:
    """So JMS clients unsubscribe: they attach without a source, and close."""
    await subscribe(client)
    client.connection.lost()
    again = await opened(cluster)
    again.send(Attach(name="link 0", handle=0, role=True, target=Target()))
    (attach,) = await until_heard(again, Attach)
    assert attach.source.address == "/exchanges/amq.direct/news"
    again.send(Detach(handle=0, closed=True))
    await until_heard(again, Detach)
    assert not queues(cluster)
    again.send(Attach(name="link 0", handle=0, role=True, target=Target()))
    attach, detach = await again.heard()
    assert attach.source is None
    assert detach.error.condition == "amqp:not-found"


async def test_subscriptions_that_are_refused(client: Manager, cluster: FakeCluster) -> None:
    for attempt, condition in (
        (subscribe(client, handle=2, outcomes=(Symbol("odd"),)), "amqp:not-implemented"),
        (subscribe(client, "a/b", handle=3), "amqp:invalid-field"),
        (subscribe(client, handle=4, durable=0), "amqp:invalid-field"),
    ):
        attach, detach = await attempt
        assert attach.source is None
        assert detach.error.condition == condition
    client.send(
        Attach(
            name="n" * 300,
            handle=6,
            role=True,
            source=Source(address="/exchanges/amq.direct/k", durable=2),
            target=Target(),
        )
    )
    _, detach = await client.heard()
    assert detach.error.condition == "amqp:invalid-field"
    assert not queues(cluster)


@pytest.mark.parametrize("lacks", ["configure", "write", "read"])
async def test_a_subscription_needs_permissions(cluster: FakeCluster, lacks: str) -> None:
    rules = dict.fromkeys(("configure", "write", "read"), ".*") | {lacks: "^$"}
    client = await limited(cluster, **rules)
    _, detach = await subscribe(client, handle=7)
    assert detach.error.condition == "amqp:unauthorized-access"
    assert not queues(cluster)


# --- browsing --------------------------------------------------------------------------------


async def browse(client: Manager, handle: int = 1, **fields: Any) -> list[Any]:
    made = Source(address=f"/queues/{QUEUE.replace('%', '%25')}", distribution_mode="copy")
    return await client.attach_receiver(None, handle, made, **fields)


@pytest.fixture
async def filled(client: Manager) -> Manager:
    """A client whose subscription has three messages."""
    await subscribe(client)
    await publish(client, b"a", b"b", b"c")
    return client


async def test_a_link_that_copies_leaves_messages_where_they_are(filled: Manager) -> None:
    (attach,) = await browse(filled)
    assert (attach.source.distribution_mode, attach.snd_settle_mode) == ("copy", 1)
    filled.credit(2, handle=1)
    assert await got(filled, 2) == [b"a", b"b"]
    filled.credit(10, handle=1, counted=2, drain=True)
    found = await until_heard(filled, Flow)
    assert [each.settled for each in of_kind(found, Transfer)] == [True]
    assert (found[-1].delivery_count, found[-1].link_credit) == (12, 0)
    filled.payloads.clear()
    filled.credit(3)
    assert await got(filled, 3) == [b"a", b"b", b"c"]


async def test_at_the_end_it_is_over(filled: Manager) -> None:
    await browse(filled)
    filled.credit(10, handle=1, echo=True)
    assert await got(filled, 3) == [b"a", b"b", b"c"]
    await publish(filled, b"d")
    filled.credit(10, handle=1, counted=3, drain=True)
    found = await until_heard(filled, Flow)
    assert of_kind(found, Transfer) == []


async def test_one_that_reads_slowly_gets_pages(filled: Manager) -> None:
    await browse(filled)
    filled.credit(10, handle=1, incoming_window=1)
    assert await got(filled, 1) == [b"a"]
    filled.flow(next_incoming_id=1, incoming_window=5)
    assert await got(filled, 2) == [b"b", b"c"]


async def test_it_ends_like_other_links(filled: Manager) -> None:
    await browse(filled)
    filled.credit(1, handle=1)
    filled.send(Detach(handle=1, closed=True))
    await until_heard(filled, Detach)
    filled.send(End())
    await until_heard(filled, End)


async def test_large_messages_end_it(filled: Manager) -> None:
    await browse(filled, max_message_size=5)
    filled.credit(1, handle=1)
    (detach,) = of_kind(await until_heard(filled, Detach), Detach)
    assert detach.error.condition == "amqp:link:message-size-exceeded"
    await until(lambda: not len(filled.shell.tasks))
