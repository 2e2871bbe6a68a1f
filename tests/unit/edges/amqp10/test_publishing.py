"""Links of publishers: targets, transfers, outcomes, credit, refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.edges.amqp10.config import Amqp10Config
from convoymq.edges.amqp10.frames import FrameReader, frame
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Detach,
    Disposition,
    End,
    Flow,
    Rejected,
    Released,
    Source,
    Target,
    Transfer,
)
from convoymq.edges.amqp10.receiving import Receiver
from convoymq.kernels.batch import record
from convoymq.kernels.content import content_parts, split_record
from convoymq.messages.amqp10.sections import section
from convoymq.messages.amqp10.values import Symbol, UInt
from convoymq.queues.interface import PublishOutcome
from tests.unit.edges.amqp10.fakes import Client, FakeBroker, message, of_kind


async def publisher(client: Client, address: str | None = "/queues/q", **fields: Any) -> None:
    found = await client.attach_sender(address, **fields)
    assert isinstance(found[0], Attach)
    assert found[0].target is not None, found


def outcomes(found: list[Any]) -> list[tuple[int, int | None, Any]]:
    return [(each.first, each.last, each.state) for each in of_kind(found, Disposition)]


async def told(client: Client, outcome: PublishOutcome) -> list[tuple[int, int | None, Any]]:
    """Returns what a client hears of a message with this outcome in its queue."""
    queue = client.broker.queue("q")
    queue.confirm = False
    await publisher(client)
    client.transfer(message())
    await client.heard()
    (stream,) = queue.clients
    stream.events.on_published(stream, (1, 1), outcome)
    return outcomes(await client.heard())


async def test_attach_is_answered_with_limits_and_credit(client: Client) -> None:
    client.broker.queue("q")
    attach, flow = await client.attach_sender("/queues/q")
    assert attach.role
    assert attach.target.address == "/queues/q"
    assert attach.max_message_size == 16 << 20
    assert (flow.handle, flow.delivery_count, flow.link_credit) == (0, 0, 170)


async def test_messages_are_accepted_in_ranges(client: Client) -> None:
    queue = client.broker.queue("q")
    await publisher(client)
    for _ in range(3):
        client.transfer(message())
    found = await client.heard()
    assert outcomes(found) == [(0, 2, Accepted())]
    assert all(each.settled and each.role for each in of_kind(found, Disposition))
    assert len(queue.ready) == 3


async def test_an_older_node_gets_what_it_knows(client: Client) -> None:
    """Its release does not read the encoding of AMQP 1.0."""
    queue = client.broker.queue("q")
    await publisher(client)
    client.transfer(message(b"new"))
    await client.heard()
    client.broker.serves_encodings = False
    client.transfer(message(b"old"))
    await client.heard()
    found = [split_record(record(block, at, k))[1] for block, at, k, _ in queue.ready]
    assert [content[0] for content in found] == [0x82, 2]
    assert content_parts(found[1])[1] == b"old"


async def test_settled_messages_get_no_outcome(client: Client) -> None:
    queue = client.broker.queue("q")
    await publisher(client, snd_settle_mode=1)
    client.transfer(message(), settled=True)
    assert outcomes(await client.heard()) == []
    assert len(queue.ready) == 1


async def test_a_message_of_several_transfers_is_one(client: Client) -> None:
    queue = client.broker.queue("q")
    await publisher(client)
    whole = message(b"x" * 1000)
    client.transfer(whole[:300], more=True)
    client.send(Transfer(handle=0, more=True, delivery_id=0), whole[300:600])
    client.send(Transfer(handle=0), whole[600:])
    assert outcomes(await client.heard()) == [(0, None, Accepted())]
    assert len(queue.ready) == 1


async def test_an_aborted_message_is_dropped_and_its_credit_used(client: Client) -> None:
    queue = client.broker.queue("q")
    await publisher(client)
    client.transfer(message()[:5], more=True)
    client.send(Transfer(handle=0, aborted=True))
    client.transfer(message())
    client.flow(handle=0, echo=True)
    found = await client.heard()
    assert outcomes(found) == [(1, None, Accepted())]
    assert len(queue.ready) == 1
    (flow,) = of_kind(found, Flow)
    assert (flow.delivery_count, flow.link_credit) == (2, 168)


async def test_what_has_no_route_is_released(client: Client) -> None:
    broker = client.broker
    broker.queue("q")
    await publisher(client, "/exchanges/amq.direct/none")
    client.transfer(message())
    client.transfer(message(), settled=True)
    assert outcomes(await client.heard()) == [(0, None, Released())]
    counters = broker.counters.of("amqp10")
    assert (counters.returned_unroutable, counters.dropped_unroutable) == (1, 1)


@pytest.mark.parametrize(
    ("outcome", "expected", "reason"),
    [
        (PublishOutcome.REFUSED_LENGTH, "amqp:resource-limit-exceeded", "maxlen"),
        (PublishOutcome.REFUSED_UNAVAILABLE, "amqp:precondition-failed", "unavailable"),
    ],
)
async def test_a_queue_that_refuses_is_named(
    client: Client, outcome: PublishOutcome, expected: str, reason: str
) -> None:
    ((_, _, state),) = await told(client, outcome)
    assert isinstance(state, Rejected)
    assert state.error.condition == expected  # type: ignore[attr-defined]
    assert state.error.info == {"queue": "q", "reason": reason}  # type: ignore[attr-defined]


async def test_a_queue_that_was_deleted_takes_nothing(client: Client) -> None:
    assert await told(client, PublishOutcome.DELETED) == [(0, None, Released())]


async def test_a_full_queue_refuses_at_once(client: Client) -> None:
    client.broker.queue("q").refuses_publishes = True
    await publisher(client)
    client.transfer(message())
    ((_, _, state),) = outcomes(await client.heard())
    assert state.error.description == "queue 'q' exceeded maximum length"


async def test_all_queues_of_a_message_decide(client: Client) -> None:
    broker = client.broker
    broker.queue("a")
    broker.queue("b").confirm = False
    broker.bindings = [("amq.fanout", "a", ""), ("amq.fanout", "b", "")]
    await publisher(client, "/exchanges/amq.fanout")
    client.transfer(message())
    assert outcomes(await client.heard()) == []
    broker.queues["b"].confirm = True
    assert outcomes(await client.heard()) == [(0, None, Accepted())]


async def test_messages_of_the_anonymous_terminus_say_where_they_go(client: Client) -> None:
    queue = client.broker.queue("q")
    await publisher(client, None)
    for to in ("/queues/q", None, "q", "/exchanges/none/k"):
        client.transfer(message(to=to))
    found = outcomes(await client.heard())
    assert len(queue.ready) == 1
    assert [getattr(state.error, "condition", "") if isinstance(state, Rejected) else state
            for _, _, state in found] == [
        "amqp:precondition-failed", "amqp:precondition-failed", "amqp:not-found", Accepted(),
    ]  # fmt: skip
    # The link lives on.
    client.transfer(message(to="/queues/q"))
    assert outcomes(await client.heard()) == [(4, None, Accepted())]


async def test_a_settled_message_without_a_place_detaches(client: Client) -> None:
    await publisher(client, None)
    client.transfer(message(), settled=True)
    (detach,) = of_kind(await client.heard(), Detach)
    assert detach.error.condition == "amqp:precondition-failed"
    assert detach.error.info == {"delivery-tag": b"0"}


# Credit


async def test_credit_follows_confirms(broker: FakeBroker) -> None:
    client = Client(broker, Amqp10Config(link_credit=10))
    await client.open()
    await client.begin()
    queue = broker.queue("q")
    queue.confirm = False
    await publisher(client)
    for _ in range(10):
        client.transfer(message())
    assert of_kind(await client.heard(), Flow) == []
    queue.confirm = True
    found = await client.heard()
    assert outcomes(found) == [(0, 9, Accepted())]
    assert [each.link_credit for each in of_kind(found, Flow)][-1] == 10


@pytest.mark.provokes("amqp.link_detached")
async def test_a_transfer_without_credit_detaches_its_link_only(broker: FakeBroker) -> None:
    client = Client(broker, Amqp10Config(link_credit=1))
    await client.open()
    await client.begin()
    broker.queue("q").confirm = False
    await publisher(client)
    await publisher(client, handle=1)
    client.transfer(message())
    client.transfer(message())
    (detach,) = of_kind(await client.heard(), Detach)
    assert (detach.handle, detach.closed) == (0, True)
    assert detach.error.condition == "amqp:link:transfer-limit-exceeded"
    # What comes before the client knows is dropped; then the handle is free.
    client.transfer(message())
    client.send(Detach(handle=0, closed=True))
    assert await client.heard() == []
    await publisher(client)


async def test_an_alarm_closes_the_window_and_gives_no_credit(client: Client) -> None:
    broker = client.broker
    broker.queue("q")
    await publisher(client)
    broker.alarms.effective = frozenset({"memory"})
    client.connection.set_alarms()
    (flow,) = of_kind(await client.heard(), Flow)
    assert flow.incoming_window == 0
    # What was under way is taken.
    for _ in range(100):
        client.transfer(message())
    found = await client.heard()
    assert outcomes(found) == [(0, 99, Accepted())]
    assert of_kind(found, Flow) == []
    broker.alarms.effective = frozenset()
    client.connection.set_alarms()
    flows = of_kind(await client.heard(), Flow)
    assert [each.incoming_window for each in flows] == [2048, 2048]
    assert flows[1].link_credit == 2000


@pytest.mark.parametrize(("size", "credit"), [(16, 2000), (50_000, 170)])
async def test_small_messages_get_more_credit(client: Client, size: int, credit: int) -> None:
    client.broker.queue("q")
    await publisher(client)
    for _ in range(90):
        client.transfer(message(b"x" * size))
    found = await client.heard()
    assert [each.link_credit for each in of_kind(found, Flow) if each.handle == 0][-1] == credit


async def test_a_closed_window_is_not_to_be_written_into(client: Client) -> None:
    broker = client.broker
    broker.queue("q")
    broker.alarms.effective = frozenset({"disk"})
    client.send(
        type(begun := (await client.begin(1)))(  # a session that begins under the alarm
            next_outgoing_id=0, incoming_window=1, outgoing_window=1
        ),
        channel=2,
    )
    assert begun.incoming_window == 0
    await client.heard()
    client.send(Transfer(handle=0, delivery_id=0), b"", channel=1)
    (end,) = await client.heard()
    assert end.error.condition == "amqp:session:window-violation"


# Refusals


@pytest.mark.provokes("amqp.link_refused")
@pytest.mark.parametrize(
    ("target", "condition", "text"),
    [
        (Target(address="/queues/none"), "amqp:not-found", "no queue 'none' in vhost '/'"),
        (Target(address="/exchanges/none/k"), "amqp:not-found", "no exchange 'none' in vhost '/'"),
        (Target(address="/queue/q"), "amqp:invalid-field", "'/queues/QUEUE'"),
        (None, "amqp:invalid-field", "Attach refused"),
        (Target(address="/management"), "amqp:invalid-field", "needs the property paired=true"),
        (Target(dynamic=True, capabilities=("x",)), "amqp:not-implemented", "not supported: x"),
        (Target(address="/exchanges/secret/k"), "amqp:unauthorized-access",
         "write access to exchange 'secret' in vhost '/' refused for user 'guest'"),
    ],
)  # fmt: skip
async def test_a_target_that_is_refused(
    client: Client, target: Any, condition: str, text: str
) -> None:
    client.broker.refuse.add(("write", "exchange", "secret"))
    client.send(
        Attach(
            name="l", handle=3, role=False, source=Source(), target=target, initial_delivery_count=0
        )
    )
    attach, detach = await client.heard()
    assert attach.target is None
    assert attach.role
    assert (detach.handle, detach.closed, detach.error.condition) == (3, True, condition)
    assert text in detach.error.description
    client.send(Detach(handle=3, closed=True))
    assert await client.heard() == []
    client.broker.queue("q")
    await publisher(client, handle=3)


@pytest.mark.parametrize(
    ("fields", "condition", "text"),
    [
        ({"unsettled": {b"a": None}}, "amqp:not-implemented", "Link recovery not supported"),
        ({"incomplete_unsettled": True}, "amqp:not-implemented", "Link recovery not supported"),
        ({"rcv_settle_mode": 1}, "amqp:not-implemented", "rcv-settle-mode second"),
        ({"initial_delivery_count": None}, "amqp:invalid-field", "initial-delivery-count"),
    ],
)
async def test_a_link_that_asks_for_more_is_refused(
    client: Client, fields: dict[str, Any], condition: str, text: str
) -> None:
    client.broker.queue("q")
    _, detach = await client.attach_sender("/queues/q", **fields)
    assert detach.error.condition == condition
    assert text in detach.error.description


@pytest.mark.parametrize(
    ("mode", "first", "second", "text"),
    [
        (0, {"settled": True}, None, "settled=true"),
        (1, {"settled": False}, None, "settled=false"),
        (2, {"delivery_id": None}, None, "lacks a delivery-id"),
        (2, {"more": True}, {"delivery_id": 9}, "delivery-id differs"),
        (2, {"more": True}, {"settled": True}, "settled differs"),
    ],
)
async def test_transfers_that_contradict_their_link(
    client: Client, mode: int, first: dict[str, Any], second: dict[str, Any] | None, text: str
) -> None:
    client.broker.queue("q")
    await publisher(client, snd_settle_mode=mode)
    client.transfer(message(), **first)
    if second is not None:
        client.send(Transfer(handle=0, **second), b"x")
    (detach,) = of_kind(await client.heard(), Detach)
    assert detach.error.condition == "amqp:invalid-field"
    assert text in detach.error.description


@pytest.mark.parametrize("payload", [b"", b"nonsense", message()[:-1]])
async def test_a_message_that_cannot_be_parsed_detaches(client: Client, payload: bytes) -> None:
    client.broker.queue("q")
    await publisher(client)
    client.transfer(payload)
    (detach,) = of_kind(await client.heard(), Detach)
    assert detach.error.condition == "amqp:decode-error"
    assert detach.error.description.startswith("failed to parse message: ")


async def test_a_message_of_another_user_detaches(client: Client) -> None:
    client.broker.queue("q")
    await publisher(client)
    client.transfer(message(user_id=b"guest"))
    client.transfer(message(user_id=b"somebody"))
    found = await client.heard()
    assert outcomes(found) == [(0, None, Accepted())]
    (detach,) = of_kind(found, Detach)
    assert detach.error.condition == "amqp:unauthorized-access"
    assert "user_id property set to 'somebody'" in detach.error.description


async def test_a_message_that_is_too_large_ends_the_session(broker: FakeBroker) -> None:
    client = Client(broker, message_size_max=100)
    await client.open()
    await client.begin()
    broker.queue("q")
    await publisher(client)
    client.transfer(message(b"x" * 60), more=True)
    client.send(Transfer(handle=0), b"y" * 60)
    (end,) = of_kind(await client.heard(), End)
    assert end.error.condition == "amqp:link:message-size-exceeded"


async def test_an_exchange_that_was_deleted_detaches(client: Client) -> None:
    broker = client.broker
    broker.exchanges["x"] = "direct"
    await publisher(client, "/exchanges/x/k")
    del broker.exchanges["x"]
    client.transfer(message())
    found = await client.heard()
    assert outcomes(found) == [(0, None, Released())]
    (detach,) = of_kind(found, Detach)
    assert detach.error.condition == "amqp:not-found"


async def test_a_publisher_may_not_care_any_more(client: Client) -> None:
    """Qpid Proton settles what it gives up; the session lives."""
    client.broker.queue("q").confirm = False
    await publisher(client)
    client.transfer(message())
    client.send(Disposition(role=False, first=0, settled=True))
    assert of_kind(await client.heard(), End) == []


def _plain_input(kinds: list[tuple[int, bool, int]]) -> bytes:
    """Returns transfers of these kinds: handle, settled, which message."""
    messages = (
        message(b"plain"),
        message(b"x" * 300, message_id="m"),
        message(b"of a user", user_id=b"guest"),
        section(0x72, {Symbol("x-a"): 1}) + message(b"annotated"),
        section(0x74, {"CC": "none"}) + message(b"named"),
        section(0x70, [True, None, UInt(5)]) + message(b"timed"),
    )
    return b"".join(
        frame(
            0,
            Transfer(
                handle=handle, delivery_id=each, delivery_tag=b"%d" % each, settled=settled
            ).encoded()
            + messages[kind],
        )
        for each, (handle, settled, kind) in enumerate(kinds)
    )


async def _published(data: bytes, step: int) -> tuple[list[Any], ...]:
    """Returns what a client hears and what queues have after this input, which comes in parts."""
    broker = FakeBroker()
    queues = [broker.queue("q"), broker.queue("r")]
    client = Client(broker, Amqp10Config(link_credit=8, incoming_window=6))
    await client.open()
    await client.begin()
    for handle, queue in enumerate("qr"):
        await client.attach_sender(f"/queues/{queue}", handle)
    for at in range(0, len(data), step):
        client.write(data[at : at + step])
    found = await client.heard()
    records = [[record(block, at, k) for block, at, k, _ in queue.ready] for queue in queues]
    counters = client.connection.counters
    return found, *records, [counters.published, counters.confirmed]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.integers(0, 5)), max_size=20),
    st.sampled_from([1, 7, 100]),
)
def test_runs_of_plain_messages_are_as_one_by_one(
    kinds: list[tuple[int, bool, int]], step: int
) -> None:
    """What no kernel looks at tells how it has to be: outcomes, flows, records, counters."""
    data = _plain_input(kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameReader, "plain", lambda _self: -1)
        expected = asyncio.run(_published(data, len(data) or 1))
    assert asyncio.run(_published(data, len(data) or 1)) == expected
    assert asyncio.run(_published(data, step)) == expected


async def test_plain_messages_are_not_looked_at(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = client.broker.queue("q")
    await publisher(client)
    monkeypatch.setattr(Receiver, "on_transfer", None)
    client.write(_plain_input([(0, False, 0), (0, False, 1), (0, True, 0), (0, False, 5)]))
    assert outcomes(await client.heard()) == [(0, 1, Accepted()), (3, None, Accepted())]
    assert len(queue.ready) == 4


async def test_a_way_is_forgotten_with_its_version(client: Client) -> None:
    broker = client.broker
    broker.queue("q")
    await publisher(client)
    client.transfer(message())
    await client.heard()
    other = broker.queue("q")
    client.transfer(message())
    await client.heard()
    assert not other.clients
    broker.route_versions.bump("/")
    client.transfer(message())
    await client.heard()
    assert len(other.ready) == 1


async def test_a_full_queue_refuses_plain_messages(client: Client) -> None:
    queue = client.broker.queue("q")
    await publisher(client)
    client.transfer(message())
    assert outcomes(await client.heard()) == [(0, None, Accepted())]
    queue.refuses_publishes = True
    client.transfer(message())
    ((first, _, state),) = outcomes(await client.heard())
    assert (first, type(state)) == (1, Rejected)


async def test_outcomes_of_a_part_of_a_run(client: Client) -> None:
    queue = client.broker.queue("q")
    queue.confirm = False
    await publisher(client)
    client.write(_plain_input([(0, False, 0)] * 6))
    await client.heard()
    (stream,) = queue.clients
    for tags, outcome in (
        ((2, 3), PublishOutcome.ACCEPTED),
        ((5, 5), PublishOutcome.DELETED),
        ((1, 1, 4, 4), PublishOutcome.ACCEPTED),
        ((1, 6), PublishOutcome.ACCEPTED),
    ):
        stream.events.on_published(stream, tags, outcome)
    assert outcomes(await client.heard()) == [
        (4, None, Released()),
        (1, 2, Accepted()),
        (0, None, Accepted()),
        (3, None, Accepted()),
        (5, None, Accepted()),
    ]
