"""Clients that mean harm, or are hasty: they get an answer, and harm nobody else."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from convoymq.edges.amqp10.config import Amqp10Config
from convoymq.edges.amqp10.frames import frame
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Source,
    Target,
    Transfer,
)
from convoymq.edges.amqp10.states import State
from convoymq.messages.amqp10.values import Described, Symbol, ULong, encode
from tests.unit.edges.amqp10.fakes import Client, FakeBroker, message, of_kind
from tests.unit.edges.amqp10.test_consuming import fill


def handles(found: list[Any], kind: type) -> list[int]:
    return [each.handle for each in of_kind(found, kind)]


# Hasty clients


@pytest.mark.parametrize("credit", [1 << 31, (1 << 32) - 1])
async def test_credit_has_32_bits(client: Client, credit: int) -> None:
    client.broker.queue("q")
    await fill(client, "q", b"a", b"b")
    await client.attach_receiver("/queues/q")
    client.credit(credit)
    assert len(of_kind(await client.heard(), Transfer)) == 2


async def test_a_flow_without_credit_changes_none(client: Client) -> None:
    client.broker.queue("q")
    await client.attach_receiver("/queues/q")
    client.credit(5)
    await client.heard()
    client.flow(handle=0, echo=True)
    (flow,) = of_kind(await client.heard(), Flow)
    assert flow.link_credit == 5


async def test_an_aborted_message_counts_as_settled(client: Client) -> None:
    client.broker.queue("q")
    await client.attach_sender("/queues/q", snd_settle_mode=0)
    first = client.transfer(b"part", more=True)
    client.send(Transfer(handle=0, delivery_id=first, settled=True, aborted=True))
    assert of_kind(await client.heard(), Detach) == []
    client.transfer(message())
    (outcome,) = of_kind(await client.heard(), Disposition)
    assert isinstance(outcome.state, Accepted)


@pytest.mark.parametrize("other", ["/queues/q", "/queues/r"])
async def test_a_handle_may_be_used_again_at_once(client: Client, other: str) -> None:
    """So Qpid Proton does it: a detach frees its handle."""
    queue = client.broker.queue("q")
    client.broker.queue("r")
    await client.attach_receiver("/queues/q")
    queue.clients[0].delayed = []
    client.send(Detach(handle=0, closed=True))
    client.send(
        Attach(name="again", handle=0, role=True, source=Source(address=other), target=Target())
    )
    client.credit(1)
    assert await client.heard() == []
    delayed, queue.clients[0].delayed = queue.clients[0].delayed, None
    for each in delayed:
        each()
    found = await client.heard()
    assert [type(each) for each in found] == [Detach, Attach]
    assert found[1].name == "again"
    await fill(client, other.removeprefix("/queues/"), b"a")
    assert len(client.payloads) == 1


async def test_a_handle_that_waits_holds_little(client: Client) -> None:
    queue = client.broker.queue("q")
    await client.attach_receiver("/queues/q")
    queue.clients[0].delayed = []
    client.send(Detach(handle=0, closed=True))
    for _ in range(1000):
        client.credit(1)
    (ended,) = await client.heard()
    assert ended.error.condition == "amqp:session:unattached-handle"


# Ends


async def test_nothing_is_sent_behind_our_close(client: Client) -> None:
    client.broker.queue("q")
    await client.attach_sender("/queues/q")
    client.transfer(message(), handle=0)
    await client.heard()
    client.transfer(message(to="/queues/none"))
    client.write(b"\0\0\0\4\2\0\0\0")
    found = await client.heard()
    assert isinstance(found[-1], Close)
    assert found[-1].error is not None


async def test_outcomes_go_before_an_end(client: Client) -> None:
    await client.attach_sender(None)
    client.transfer(message(to="/exchanges/amq.direct/nobody"))
    client.send(Close())
    found = await client.heard()
    assert [type(each) for each in found] == [Disposition, Close]


async def test_an_error_says_little_of_what_was_sent(client: Client) -> None:
    (_, detached) = await client.attach_receiver("/queues/" + "q" * 60_000)
    assert detached.error.condition == "amqp:not-found"
    assert len(detached.error.description.encode()) <= 512
    client.settle(0, None)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"snd_settle_mode": 3}, "snd-settle-mode"), ({"rcv_settle_mode": 2}, "rcv")],
)
async def test_settle_modes_that_do_not_exist(
    client: Client, fields: dict[str, Any], text: str
) -> None:
    client.broker.queue("q")
    (_, detached) = await client.attach_sender("/queues/q", **fields)
    assert detached.error.condition == "amqp:invalid-field"
    assert text in detached.error.description


async def test_a_tag_is_short(client: Client) -> None:
    client.broker.queue("q")
    await client.attach_sender("/queues/q")
    client.transfer(message(), delivery_tag=b"t" * 33)
    (detached,) = await client.heard()
    assert detached.error.condition == "amqp:invalid-field"
    assert "delivery-tag" in detached.error.description


async def test_a_refused_publisher_may_have_sent(client: Client) -> None:
    await client.attach_sender("/queues/none")
    client.transfer(message())
    assert of_kind(await client.heard(), End) == []


# Memory


def grown(client: Client, count: int, data: bytes) -> int:
    """Returns how much memory input keeps."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(count):
            client.write(data)
        client.shell.output += client.connection.take_output()
        client.shell.output.clear()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


async def test_parts_of_a_message_take_little_more_than_their_bytes(client: Client) -> None:
    await client.attach_sender(None)
    client.transfer(b"", more=True)
    part = frame(0, Transfer(handle=0, more=True).encoded())
    assert grown(client, 4000, part) < 20_000


async def test_links_keep_nothing_of_their_attach(client: Client) -> None:
    client.broker.queue("q")
    before = len(client.connection.sessions_open[0].links)
    properties = {Symbol("p"): [None] * 5000}
    attaches = [
        frame(
            0,
            Attach(
                name="n" * 10_000,
                handle=handle,
                role=bool(handle % 2),
                source=Source(address="/queues/q"),
                target=Target(address="/queues/q"),
                initial_delivery_count=0,
                properties=properties,
            ).encoded(),
        )
        for handle in range(6)
    ]
    tracemalloc.start()
    try:
        for each in attaches:
            client.write(each)
            client.connection.take_output()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(client.connection.sessions_open[0].links) == before + 6
    assert kept < 6 * 8000


async def test_links_have_no_dictionary_and_sessions_a_small_one(client: Client) -> None:
    """Attributes beyond 30 would have one of 1.6 KB for each object."""
    client.broker.queue("q")
    await client.attach_sender("/queues/q")
    await client.attach_receiver("/queues/q", handle=1)
    session = client.connection.sessions_open[0]
    assert [hasattr(link, "__dict__") for link in session.links.values()] == [False, False]
    assert max(len(vars(each)) for each in (session, client.connection)) <= 12


async def test_a_connection_holds_so_much_of_unfinished_messages(broker: FakeBroker) -> None:
    client = Client(broker, message_size_max=100_000)
    await client.open()
    await client.begin()
    for handle in range(10):
        await client.attach_sender(None, handle)
    part = bytes(90_000)
    for handle in range(10):
        client.transfer(part, handle, more=True)
    found = of_kind(await client.heard(), Detach)
    assert {each.error.condition for each in found} == {"amqp:resource-limit-exceeded"}
    assert 0 < len(found) < 10
    # Others have room again when they end.
    (first,) = {*range(10)} - {each.handle for each in found} - {*range(1, 10)}
    client.send(Transfer(handle=first, aborted=True))
    client.transfer(message(b"x", to="/exchanges/amq.direct/nobody"), handle=first)
    assert of_kind(await client.heard(), Disposition)


async def test_echoes_behind_a_closed_window_do_not_pile_up(client: Client) -> None:
    client.broker.queue("q")
    await fill(client, "q", b"a")
    await client.attach_receiver("/queues/q")
    client.credit(5, incoming_window=0)
    await client.heard()
    for _ in range(50):
        client.credit(5, incoming_window=0, echo=True)
        assert of_kind(await client.heard(), Flow) == []
    client.flow(incoming_window=9)
    found = await client.heard()
    assert [type(each) for each in found] == [Transfer, Flow]


# Work


async def test_ranges_that_name_nothing_cost_little(client: Client) -> None:
    """Every disposition and detach looked at all deliveries."""
    client.broker.queue("q")
    await client.attach_receiver("/queues/q")
    session = client.connection.sessions_open[0]
    sender = session.senders[0]
    for delivery_id in range(10_000):
        session.unsettled.add(delivery_id, sender, delivery_id)
    past = Disposition(role=True, first=20_000, last=60_000, settled=True, state=Accepted())
    wide = Disposition(role=True, first=1 << 30, last=(1 << 31) + 5, settled=True, state=Accepted())
    data = frame(0, past.encoded()) + frame(0, wide.encoded())
    for _ in range(10):
        client.write(data * 50)
    for handle in range(1, 20):
        data = frame(
            0,
            Attach(
                name="n",
                handle=handle,
                role=True,
                source=Source(address="/queues/q"),
                target=Target(),
            ).encoded(),
        )
        client.write((data + frame(0, Detach(handle=handle).encoded())) * 5)
    assert len(session.unsettled) == 10_000
    assert client.connection.state is State.OPEN


async def test_sections_in_front_of_the_body_have_a_limit(client: Client) -> None:
    client.broker.queue("q")
    await client.attach_sender("/queues/q")
    notes = encode(Described(ULong(0x74), {"k": "v" * (1 << 20)}))
    payload = notes + encode(Described(ULong(0x75), b"x"))
    step = 100_000
    client.transfer(payload[:step], more=True)
    for at in range(step, len(payload), step):
        client.send(Transfer(handle=0, more=at + step < len(payload)), payload[at : at + step])
    (detached,) = of_kind(await client.heard(), Detach)
    assert detached.error.condition == "amqp:decode-error"
    assert "application-properties" in detached.error.description


async def test_flows_do_not_pass_the_limit_of_unsettled_deliveries(broker: FakeBroker) -> None:
    """Each flow got as much as the queue may hand out at once, settled or not."""
    client = Client(broker, Amqp10Config(queue_credit=2, unsettled_max=4))
    await client.open()
    await client.begin()
    broker.queue("q")
    await fill(client, "q", *[b"x"] * 40)
    await client.attach_receiver("/queues/q")
    await client.attach_receiver("/queues/q", handle=1)
    found: list[Any] = []
    for _ in range(20):
        for handle in (0, 1):
            client.credit(100, handle, counted=len([each for each in found if not each.handle]))
            found += of_kind(await client.heard(), Transfer)
    assert len(found) <= 4 + 2 * 2
    # Both go on when the client settles.
    for _ in range(20):
        client.settle(0, Accepted(), last=39)
        found += of_kind(await client.heard(), Transfer)
    assert len(found) == 40


# Output


async def test_deliveries_go_on_when_the_socket_has_taken_much(broker: FakeBroker) -> None:
    """What the socket took at once was told by nobody, and the rest never came."""
    client = Client(broker, Amqp10Config(output_bytes_high=4000, output_bytes_low=1000))
    await client.open()
    await client.begin()
    broker.queue("q")
    await fill(client, "q", *[bytes(1500)] * 9)
    await client.attach_receiver("/queues/q", snd_settle_mode=1)
    client.credit(9)
    found: list[Any] = []
    for kept in (3000, 0, 0, 0, 0):
        found += of_kind(await client.heard(), Transfer)
        client.connection.on_kept(kept)
    assert [each.delivery_id for each in found if each.delivery_tag is not None] == [*range(9)]
