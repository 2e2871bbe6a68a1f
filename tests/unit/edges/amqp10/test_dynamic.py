"""Dynamic termini: temporary queues and direct replies, over a real broker."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Detach,
    Disposition,
    End,
    Released,
    Source,
    Target,
    Transfer,
)
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.sections import split
from convoymq.messages.amqp10.values import Array, Described, Symbol, ULong
from convoymq.messages.record import content_of, names_of
from convoymq.metadata.commands import PutPermission
from tests.unit.edges.amqp10.fakes import message, of_kind
from tests.unit.edges.amqp10.test_management import Manager, cluster, limited, opened
from tests.unit.queues.fake_cluster import FakeCluster, until

__all__ = ["cluster"]

TEMPORARY = ("temporary-queue",)
VOLATILE = ("rabbitmq:volatile-queue",)
PREFIX = "/queues/amq.rabbitmq.reply-to."


@pytest.fixture
async def client(cluster: FakeCluster) -> Manager:
    return await opened(cluster)


def queues(cluster: FakeCluster) -> set[str]:
    return set(cluster.nodes[1].machine.vhosts["/"].queues)


async def source(client: Manager, handle: int = 0, **fields: Any) -> list[Any]:
    asked: dict[str, Any] = {"dynamic": True, "capabilities": TEMPORARY}
    made = Source(**(asked | fields))
    return await client.attach_receiver(None, handle, made, max_message_size=1 << 20)


async def replies(client: Manager, handle: int = 0, mode: int = 1, **fields: Any) -> list[Any]:
    asked: dict[str, Any] = {"dynamic": True, "capabilities": VOLATILE}
    asked["expiry_policy"] = "link-detach"
    made = Source(**(asked | fields))
    return await client.attach_receiver(None, handle, made, snd_settle_mode=mode)


async def target(client: Manager, handle: int = 0, **fields: Any) -> list[Any]:
    asked: dict[str, Any] = {"dynamic": True, "capabilities": TEMPORARY}
    client.send(
        Attach(
            name="to",
            handle=handle,
            role=False,
            source=Source(),
            target=Target(**(asked | fields)),
            initial_delivery_count=0,
        )
    )
    return await client.heard()


async def test_a_temporary_queue_comes_and_goes_with_its_link(
    client: Manager, cluster: FakeCluster
) -> None:
    (attach,) = await source(client)
    made = attach.source
    assert made.address.startswith("/queues/amq.dyn-client-link%200-")
    assert (made.dynamic, made.durable, made.timeout) == (True, 0, 0)
    assert (made.expiry_policy, made.capabilities) == ("link-detach", TEMPORARY)
    assert made.dynamic_node_properties == {
        Symbol("lifetime-policy"): Described(ULong(0x2B), []),
        Symbol("supported-dist-modes"): Array(Symbol, (Symbol("move"),)),
    }
    (name,) = queues(cluster)
    assert name.startswith("amq.dyn-client-link 0-")
    client.credit(10)
    await client.attach_sender(made.address, handle=1)
    client.transfer(message(b"hello"), handle=1)
    heard = await until_heard(client, Transfer)
    assert of_kind(heard, Transfer)
    client.send(Detach(handle=0, closed=True))
    assert of_kind(await until_heard(client, Detach), Detach)
    await until(lambda: not queues(cluster))


async def until_heard(client: Manager, kind: type) -> list[Any]:
    """Returns what came until something of that kind did."""
    found: list[Any] = []
    while not of_kind(found, kind):
        found += await client.heard()
    return found


async def test_a_temporary_target_is_published_to(client: Manager, cluster: FakeCluster) -> None:
    attach, flow = await target(client)
    assert attach.target.address.startswith("/queues/amq.dyn-client-to-")
    assert attach.target.dynamic
    assert flow.link_credit == 170
    client.transfer(message(b"hello"))
    (outcome,) = of_kind(await until_heard(client, Disposition), Disposition)
    assert outcome.state == Accepted()
    client.send(Detach(handle=0, closed=True))
    await client.heard()
    await until(lambda: not queues(cluster))


@pytest.mark.parametrize("how", ["end", "lost"])
async def test_temporary_queues_go_with_their_session(
    client: Manager, cluster: FakeCluster, how: str
) -> None:
    await source(client)
    await target(client, handle=1)
    assert len(queues(cluster)) == 2
    if how == "end":
        client.send(End())
    else:
        client.connection.lost()
    await client.rest()
    await until(lambda: not queues(cluster))


async def test_long_names_are_left_out(client: Manager, cluster: FakeCluster) -> None:
    client.send(
        Attach(
            name="x" * 200,
            handle=0,
            role=True,
            source=Source(dynamic=True, capabilities=TEMPORARY),
            target=Target(),
        )
    )
    await client.heard()
    (name,) = queues(cluster)
    assert name.startswith("amq.dyn.gen-")


async def test_dynamic_termini_that_are_refused(client: Manager, cluster: FakeCluster) -> None:
    for attempt, condition in (
        (source(client, 0, capabilities=()), "amqp:not-implemented"),
        (source(client, 1, capabilities=("other",)), "amqp:not-implemented"),
        (source(client, 2, address="/queues/q"), "amqp:invalid-field"),
        (target(client, 3, capabilities=VOLATILE), "amqp:not-implemented"),
        (replies(client, 4, mode=0), "amqp:not-implemented"),
        (replies(client, 5, durable=1), "amqp:not-implemented"),
    ):
        attach, detach = await attempt
        assert (attach.source if attach.role is False else attach.target) is None
        assert detach.error.condition == condition
    assert not queues(cluster)


async def test_a_temporary_queue_needs_permissions(cluster: FakeCluster) -> None:
    client = await limited(cluster, write=".*", read=".*")
    found = await source(client, 5)
    assert len(found) == 2, found
    _, detach = found
    assert detach.error.condition == "amqp:unauthorized-access"
    # A target needs write on the default exchange as well; its queue does not stay.
    rules = {"configure": ".*", "write": "^$", "read": ".*"}
    await cluster.nodes[1].store.execute(PutPermission(user="u", vhost="/", **rules))
    _, detach = await target(client, 6)
    assert detach.error.condition == "amqp:unauthorized-access"
    client.send(Detach(handle=6, closed=True))
    await client.heard()
    await until(lambda: not queues(cluster))


# --- direct replies --------------------------------------------------------------------------


async def test_replies_come_without_a_queue(client: Manager, cluster: FakeCluster) -> None:
    (attach,) = await replies(client)
    address = attach.source.address
    assert address.startswith(PREFIX)
    assert (attach.snd_settle_mode, attach.source.dynamic) == (1, True)
    assert attach.source.capabilities == VOLATILE
    assert not queues(cluster)
    client.credit(10)
    other = await opened(cluster)
    await other.attach_sender(address)
    await other.attach_sender(None, handle=1)
    other.transfer(message(b"one"))
    other.transfer(message(b"two", to=address), handle=1)
    outcomes = of_kind(await other.heard(), Disposition)
    assert [(each.first, each.last, each.state) for each in outcomes] == [(0, 1, Accepted())]
    transfers = of_kind(await client.heard(), Transfer)
    assert [each.settled for each in transfers] == [True, True]
    assert [split(each).annotations["x-routing-key"] for each in client.payloads] == [
        address.removeprefix("/queues/")
    ] * 2
    assert [each[-3:] for each in client.payloads] == [b"one", b"two"]


async def test_a_reply_of_another_protocol_is_read(client: Manager) -> None:
    (attach,) = await replies(client)
    client.credit(1)
    name = attach.source.address.removeprefix("/queues/")
    token = name.removeprefix("amq.rabbitmq.reply-to.")
    content = content_of(Properties(correlation_id="7"), b"answer")
    assert client.broker.replies.publish(token, names_of("", name) + content)
    await client.heard()
    assert split(client.payloads[-1]).properties["correlation-id"] == "7"


async def test_replies_beyond_credit_are_dropped(client: Manager, cluster: FakeCluster) -> None:
    (attach,) = await replies(client)
    client.credit(1)
    await client.attach_sender(attach.source.address, handle=1)
    for body in (b"first", b"lost"):
        client.transfer(message(body), handle=1)
    heard = await client.heard()
    assert len(of_kind(heard, Transfer)) == 1
    assert cluster.nodes[1].broker.counters.dropped_replies == 1


async def test_replies_to_nobody_are_released(client: Manager) -> None:
    (attach,) = await replies(client)
    address = attach.source.address
    await client.attach_sender(address, handle=1)
    client.send(Detach(handle=0, closed=True))
    await client.heard()
    client.transfer(message(b"late"), handle=1)
    (outcome,) = of_kind(await client.heard(), Disposition)
    assert outcome.state == Released()


async def test_a_requester_is_asked_for(client: Manager) -> None:
    (attach,) = await replies(client, handle=5)
    await client.pair()
    path = attach.source.address
    answer = await client.ask("GET", path)
    assert (answer.status, answer.body["consumer_count"]) == ("200", 1)
    client.send(Detach(handle=5, closed=True))
    await client.heard()
    assert (await client.ask("GET", path)).status == "404"


async def test_a_message_to_a_replier_that_cannot_be_parsed_is_left_out(client: Manager) -> None:
    (attach,) = await replies(client)
    client.credit(5)
    token = attach.source.address.removeprefix(PREFIX)
    client.broker.replies.publish(token, b"damaged")
    assert await client.heard() == []
