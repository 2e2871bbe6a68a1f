"""Links of consumers: credit, drain, echo, windows, outcomes, ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
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
    Error,
    Flow,
    Modified,
    Rejected,
    Released,
    Source,
    Target,
    Transfer,
)
from convoymq.edges.amqp10.sending import ASKS_MAX
from convoymq.edges.amqp10.session import Session
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.values import (
    Described,
    Int,
    Symbol,
    Timestamp,
    UInt,
    ULong,
    decode,
    encode,
)
from convoymq.messages.record import content_of, names_of
from convoymq.model.tables import Table
from tests.unit.edges.amqp10.fakes import WINDOW, Client, CreditQueue, FakeBroker, message, of_kind


async def fill(client: Client, queue: str, *bodies: bytes) -> None:
    """Publishes messages by a link of a second session."""
    if 9 not in client.connection.sessions_open:
        await client.begin(9)
        client.send(
            Attach(
                name="fill",
                handle=0,
                role=False,
                target=Target(),
                initial_delivery_count=0,
            ),
            channel=9,
        )
    for number, body in enumerate(bodies):
        client.send(
            Transfer(handle=0, delivery_id=number, settled=True),
            message(body, to=f"/queues/{queue}"),
            channel=9,
        )
    await client.heard()


@pytest.fixture
async def queue(client: Client) -> CreditQueue:
    """A queue with three messages."""
    made = client.broker.queue("q")
    await fill(client, "q", b"a", b"b", b"c")
    client.payloads.clear()
    return made


def transfers(found: list[Any]) -> list[Transfer]:
    return of_kind(found, Transfer)


def body(payload: bytes) -> bytes:
    """Returns the body of a message of one data section."""
    at, value = 0, None
    while at < len(payload):
        value, at = decode(payload, at, len(payload))
    assert isinstance(value, Described)
    return bytes(value.value)


def calls(queue: CreditQueue, *names: str) -> list[tuple[Any, ...]]:
    return [each for each in queue.calls if each[0] in names]


async def test_attach_says_what_is_in_force(client: Client, queue: CreditQueue) -> None:
    (attach,) = await client.attach_receiver("/queues/q", rcv_settle_mode=0, max_message_size=9999)
    assert not attach.role
    assert (attach.snd_settle_mode, attach.initial_delivery_count) == (0, 0)
    assert attach.source.distribution_mode == "move"
    assert attach.source.default_outcome == Released()
    assert len(attach.source.outcomes) == 4
    assert attach.max_message_size == 9999
    ((_, spec),) = calls(queue, "subscribe")
    assert (spec.tag, spec.credited, spec.no_ack) == ("0", True, False)
    (row,) = client.connection.consumer_infos()
    assert (row["consumer_tag"], row["ack_required"]) == ("0", True)


async def test_nothing_comes_without_credit(client: Client, queue: CreditQueue) -> None:
    await client.attach_receiver("/queues/q")
    assert await client.heard() == []
    client.credit(2)
    found = transfers(await client.heard())
    assert [(each.delivery_id, each.delivery_tag, each.settled) for each in found] == [
        (0, bytes(4), False),
        (1, b"\0\0\0\1", False),
    ]
    assert [body(payload) for payload in client.payloads] == [b"a", b"b"]
    # Settling grants nothing.
    client.settle(0, Accepted(), last=1)
    assert transfers(await client.heard()) == []
    client.credit(1, counted=2)
    assert len(transfers(await client.heard())) == 1


async def test_credit_counts_from_what_the_client_has_got(
    client: Client, queue: CreditQueue
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(2)
    await client.heard()
    # It was sent before the client got anything: no more than two in all.
    client.credit(2, counted=0)
    assert transfers(await client.heard()) == []


async def test_a_drain_is_answered_behind_the_transfers(client: Client, queue: CreditQueue) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(10, drain=True)
    found = await client.heard()
    assert [type(each) for each in found] == [Transfer, Transfer, Transfer, Flow]
    flow = found[-1]
    assert (flow.delivery_count, flow.link_credit, flow.drain, flow.available) == (10, 0, True, 0)
    await fill(client, "q", b"d")
    assert transfers(await client.heard()) == []
    client.credit(1, counted=10)
    (transfer,) = transfers(await client.heard())
    assert transfer.delivery_tag == b"\0\0\0\3"


async def test_a_drain_of_much_credit_goes_in_parts(broker: FakeBroker) -> None:
    client = Client(broker, Amqp10Config(queue_credit=2))
    await client.open()
    await client.begin()
    queue = broker.queue("q")
    await fill(client, "q", *(b"%d" % k for k in range(5)))
    await client.attach_receiver("/queues/q")
    client.credit(1000, drain=True)
    found = await client.heard()
    assert len(transfers(found)) == 5
    assert (found[-1].delivery_count, found[-1].link_credit) == (1000, 0)
    assert [each[2] for each in calls(queue, "grant")] == [2, 4, 6]


async def test_much_credit_is_handed_to_the_queue_in_parts(broker: FakeBroker) -> None:
    client = Client(broker, Amqp10Config(queue_credit=2))
    await client.open()
    await client.begin()
    queue = broker.queue("q")
    await fill(client, "q", *(b"%d" % k for k in range(7)))
    await client.attach_receiver("/queues/q")
    client.credit(6)
    assert len(transfers(await client.heard())) == 6
    assert max(each[2] for each in calls(queue, "grant")) == 6


async def test_echo_is_answered_with_what_is_there(client: Client, queue: CreditQueue) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(0, echo=True)
    (flow,) = await client.heard()
    assert (flow.handle, flow.link_credit, flow.available, flow.drain) == (0, 0, 3, False)
    client.credit(1, echo=True)
    transfer, flow = await client.heard()
    assert (flow.delivery_count, flow.link_credit, flow.available) == (1, 0, 2)
    client.flow(echo=True)
    (flow,) = await client.heard()
    assert flow.handle is None
    assert flow.next_outgoing_id == 1
    assert isinstance(transfer, Transfer)


async def test_a_closed_window_holds_transfers_and_the_flows_behind(
    client: Client, queue: CreditQueue
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(3, incoming_window=1, echo=True)
    found = await client.heard()
    assert [type(each) for each in found] == [Transfer]
    client.flow(next_incoming_id=1, incoming_window=1)
    assert [type(each) for each in await client.heard()] == [Transfer]
    client.flow(next_incoming_id=2, incoming_window=5)
    assert [type(each) for each in await client.heard()] == [Transfer, Flow]


async def test_the_window_of_a_late_flow_is_never_negative(
    client: Client, queue: CreditQueue
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(3, incoming_window=2)
    assert len(transfers(await client.heard())) == 2
    client.flow(next_incoming_id=0, incoming_window=1)
    assert await client.heard() == []
    client.flow(next_incoming_id=2, incoming_window=1)
    assert len(transfers(await client.heard())) == 1


async def test_an_id_that_was_not_sent_is_refused(client: Client) -> None:
    client.flow(next_incoming_id=1)
    (end,) = await client.heard()
    assert end.error.condition == "amqp:session:window-violation"


async def test_a_large_message_comes_in_frames_that_fit(broker: FakeBroker) -> None:
    client = Client(broker)
    await client.open(max_frame_size=512)
    await client.begin()
    broker.queue("q")
    await fill(client, "q", b"x" * 2000)
    client.payloads.clear()
    await client.attach_receiver("/queues/q")
    client.credit(1, incoming_window=3)
    found = transfers(await client.heard())
    assert [each.more for each in found] == [True, True, True]
    client.flow(next_incoming_id=3, incoming_window=10)
    found += transfers(await client.heard())
    assert [each.delivery_id for each in found] == [0] + [None] * (len(found) - 1)
    assert not found[-1].more
    assert body(b"".join(client.payloads)) == b"x" * 2000


async def test_settled_links_settle_what_they_send(client: Client, queue: CreditQueue) -> None:
    (attach,) = await client.attach_receiver("/queues/q", snd_settle_mode=1)
    assert attach.snd_settle_mode == 1
    client.credit(2)
    found = transfers(await client.heard())
    assert [(each.settled, each.delivery_tag) for each in found] == [(True, b""), (True, b"")]
    assert calls(queue, "settle") == [("settle", 1, [0, 0]), ("settle", 1, [1, 1])]


# Outcomes


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (Accepted(), [("settle", 1, [0, 1])]),
        (Released(), [("return", 1, [0, 1], False)]),
        (Rejected(), [("discard", 1, [0, 1]), ("error", True, b"")]),
        (Modified(), [("return", 1, [0, 1], False)]),
        (Modified(delivery_failed=True), [("return", 1, [0, 1], True)]),
    ],
)
async def test_outcomes_of_a_range(
    client: Client, queue: CreditQueue, state: Any, expected: list[Any]
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(3)
    await client.heard()
    client.settle(0, state, last=1)
    await client.heard()
    assert calls(queue, "settle", "return", "discard", "error") == expected
    # Once is enough, and unknown ids are skipped.
    client.settle(0, state, last=1)
    client.settle(70, state)
    assert await client.heard() == []
    assert calls(queue, "settle", "return", "discard", "error") == expected


async def test_an_error_is_kept_with_what_was_rejected(client: Client, queue: CreditQueue) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(1)
    await client.heard()
    error = Error(condition=Symbol("my:error"), description="broken")
    client.settle(0, Rejected(error=error))
    await client.heard()
    assert calls(queue, "error") == [("error", True, error.encoded())]


async def test_modified_says_what_becomes_of_the_message(
    client: Client, queue: CreditQueue
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(1)
    await client.heard()
    notes = {Symbol("x-opt-why"): "later", Symbol("x-opt-delivery-time"): Timestamp(123)}
    client.settle(0, Modified(delivery_failed=True, message_annotations=notes))
    await client.heard()
    ((_, modification),) = calls(queue, "modify")[-1:]
    assert modification.due_ms == 123
    assert decode(modification.annotations, 0, len(modification.annotations))[0] == {
        "x-opt-why": "later"
    }


async def test_annotations_of_modified_have_names_of_their_own(
    client: Client, queue: CreditQueue
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(1)
    await client.heard()
    client.settle(0, Modified(message_annotations={Symbol("mine"): 1}))
    (end,) = await client.heard()
    assert end.error.condition == "amqp:invalid-field"


async def test_an_outcome_that_is_not_settled_is_answered(
    client: Client, queue: CreditQueue
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(2)
    await client.heard()
    client.settle(0, Accepted(), last=1, settled=False)
    (answer,) = await client.heard()
    assert answer == Disposition(role=False, first=0, last=1, settled=True, state=Accepted())


@pytest.mark.provokes("amqp.session_ended")
@pytest.mark.parametrize("state", [None, Described(ULong(0x34), [b"tx"])])
async def test_a_state_that_is_no_outcome_ends_the_session(
    client: Client, queue: CreditQueue, state: Any
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(1)
    await client.heard()
    client.settle(0, state)
    (end,) = await client.heard()
    assert end.error.condition == "amqp:invalid-field"
    assert len(queue.ready) == 3


NOTES: dict[object, object] = {Symbol("x-a"): 1}
SETTLING: list[Any] = [
    *(Accepted(), Accepted(), Released(), Rejected(), Modified(delivery_failed=True)),
    *(Modified(undeliverable_here=True), Modified(message_annotations=NOTES)),
]


def _settling(kinds: list[tuple[int, int, int]]) -> bytes:
    """Returns dispositions of a range each, or flows of a link."""
    return b"".join(
        frame(
            0,
            (
                Disposition(
                    role=True, first=first, last=first + more, settled=True, state=SETTLING[kind]
                )
                if kind < len(SETTLING)
                else Flow(
                    next_incoming_id=first,
                    incoming_window=WINDOW,
                    next_outgoing_id=0,
                    outgoing_window=WINDOW,
                    handle=more % 2,
                    delivery_count=0,
                    # It only grows: a queue may have used what is taken back.
                    link_credit=5 + place,
                    echo=kind > len(SETTLING),
                )
            ).encoded(),
        )
        for place, (kind, first, more) in enumerate(kinds)
    )


async def _settled(data: bytes, step: int) -> tuple[Any, ...]:
    """Returns what a client hears, in any order of its links, and what a queue is told after this
    input, which comes in parts."""
    client = Client(FakeBroker())
    queue = client.broker.queue("q")
    await client.open()
    await client.begin()
    await fill(client, "q", *(b"%d" % k for k in range(20)))
    for handle in (0, 1):
        await client.attach_receiver("/queues/q", handle)
        client.credit(5, handle)
    await client.heard()
    for at in range(0, len(data), step):
        client.write(data[at : at + step])
    found = await client.heard()
    told = [
        (name, number, each, *more)
        for name, number, ids, *more in calls(queue, "settle", "return", "discard")
        for first, last in zip(ids[::2], ids[1::2], strict=True)
        for each in range(first, last + 1)
    ]
    told.sort(key=lambda each: each[1:3])
    heard = [
        (type(each).__name__, each.handle, getattr(each, "delivery_tag", b"")) for each in found
    ]
    return sorted(heard), told, client.connection.counters.acknowledged


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 10), st.integers(0, 5)), max_size=12),
    st.sampled_from([1, 7, 100]),
)
def test_runs_of_outcomes_and_flows_are_as_one_by_one(
    kinds: list[tuple[int, int, int]], step: int
) -> None:
    """What no kernel looks at tells how it has to be."""
    data = _settling(kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameReader, "plain", lambda _self: -1)
        expected = asyncio.run(_settled(data, len(data) or 1))
    assert asyncio.run(_settled(data, len(data) or 1)) == expected
    assert asyncio.run(_settled(data, step)) == expected


async def test_outcomes_of_one_input_are_told_at_once(
    client: Client, queue: CreditQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(3)
    await client.heard()
    monkeypatch.setattr(Session, "_serve", None)
    client.write(_settling([(0, 0, 0), (0, 1, 0), (0, 2, 0)]))
    assert calls(queue, "settle") == [("settle", 1, [0, 2])]


async def test_a_queue_is_asked_again_when_a_quarter_of_the_credit_is_used(
    client: Client, queue: CreditQueue
) -> None:
    await fill(client, "q", b"0")
    client.payloads.clear()
    await client.attach_receiver("/queues/q")
    client.credit(20)
    assert len(transfers(await client.heard())) == 4
    client.credit(20, counted=4)
    await client.heard()
    await fill(client, "q", b"x", b"y")
    client.credit(20, counted=6)
    await fill(client, "q", b"z")
    assert len(transfers(await client.heard())) == 0
    assert len(client.payloads) == 7
    assert [each[2] for each in calls(queue, "grant")] == [20, 26]
    # Less than what the queue was told is told at once.
    client.credit(3, counted=7)
    assert calls(queue, "grant")[-1][2] == 10


async def test_requests_do_not_wait_for_each_other_unless_the_client_hears_of_the_answer(
    client: Client, queue: CreditQueue
) -> None:
    """A request is in force when it is committed: one at a time would have the client wait."""
    await client.attach_receiver("/queues/q")
    stream: Any = queue.clients[-1]
    stream.answer_grants = lambda: False
    client.payloads.clear()
    for _ in range(30):
        client.credit(16, counted=len(client.payloads))
        await fill(client, "q", b"x")
        await client.heard()
    counted = len(client.payloads)
    grants = [each[2:] for each in calls(queue, "grant")]
    assert len(grants) == ASKS_MAX
    assert grants == [(limit, False) for limit in sorted(limit for limit, _ in grants)]
    client.credit(16, counted=counted, drain=True)
    await client.heard()
    assert len(calls(queue, "grant")) == ASKS_MAX
    del stream.answer_grants
    flow = of_kind(await client.heard(), Flow)[-1]
    assert (flow.drain, flow.link_credit) == (True, 0)
    assert calls(queue, "grant")[-1][3] is True
    assert len(queue.ready) == 0


# Ends


async def test_a_detach_gives_back_unfailed_and_is_answered_then(
    client: Client, queue: CreditQueue
) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(2)
    await client.heard()
    client.send(Detach(handle=0, closed=True))
    assert await client.heard() == [Detach(handle=0, closed=True)]
    assert calls(queue, "remove", "return") == [("remove", 1)]
    assert len(queue.ready) == 3
    client.settle(0, Accepted())
    assert await client.heard() == []
    await client.attach_receiver("/queues/q")


async def test_an_end_gives_back_what_links_have(client: Client, queue: CreditQueue) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(2)
    await client.heard()
    client.send(End())
    assert await client.heard() == [End()]
    assert len(queue.ready) == 3
    assert [each[0] for each in calls(queue, "remove", "close")] == ["remove", "close"]
    assert (await client.begin()).remote_channel == 0


async def test_a_lost_connection_gives_back_unfailed(client: Client, queue: CreditQueue) -> None:
    await client.attach_receiver("/queues/q")
    client.credit(3)
    await client.heard()
    client.connection.lost()
    assert len(queue.ready) == 3
    assert ("remove", 1) in queue.calls


async def test_a_deleted_queue_detaches_its_links(client: Client, queue: CreditQueue) -> None:
    await client.attach_receiver("/queues/q")
    await client.broker.delete_queue("/", "q", if_unused=False, if_empty=False, owner=1)
    (detach,) = await client.heard()
    assert detach.error.condition == "amqp:resource-deleted"


async def test_what_a_queue_ended_goes_back(client: Client, queue: CreditQueue) -> None:
    """A queue without a leader ends its consumers; they still have what they hold."""
    await client.attach_receiver("/queues/q")
    client.credit(3, incoming_window=2)
    await client.heard()
    (consumer,) = queue.consumers
    queue.consumers.clear()
    consumer.client.gone = consumer
    consumer.client.events.on_cancelled(consumer.client, 1, "no leader")
    (detach,) = await client.heard()
    assert detach.error.condition == "amqp:illegal-state"
    assert calls(queue, "return", "remove") == [("return", 1, [0, 2], False)]


async def test_a_message_above_the_clients_limit_counts_as_failed(
    client: Client, queue: CreditQueue
) -> None:
    await client.attach_receiver("/queues/q", max_message_size=10)
    client.credit(1)
    (detach,) = await client.heard()
    assert detach.error.condition == "amqp:link:message-size-exceeded"
    assert ("return", 1, [0, 0], True) in queue.calls


# Refusals


@pytest.mark.parametrize(
    ("source", "condition", "text"),
    [
        (Source(address="/queues/none"), "amqp:not-found", "no queue 'none' in vhost '/'"),
        (Source(address="/exchanges/x/k"), "amqp:invalid-field", "Attach refused: bad address"),
        (Source(), "amqp:invalid-field", "Attach refused"),
        (Source(address="/management"), "amqp:invalid-field", "needs the property paired=true"),
        (Source(dynamic=True), "amqp:not-implemented", "Dynamic source not supported"),
        (Source(address="/queues/q", outcomes=("amqp:other:list",)), "amqp:not-implemented",
         "Outcomes not supported: amqp:other:list"),
        (Source(address="/queues/other"), "amqp:resource-locked", "exclusive access to locked"),
        (Source(address="/queues/secret"), "amqp:unauthorized-access",
         "read access to queue 'secret' in vhost '/' refused for user 'guest'"),
    ],
)  # fmt: skip
async def test_a_source_that_is_refused(
    client: Client, queue: CreditQueue, source: Source, condition: str, text: str
) -> None:
    client.broker.queue("other", owner=client.connection.id + 1)
    client.broker.refuse.add(("read", "queue", "secret"))
    attach, detach = await client.attach_receiver(None, source=source)
    assert attach.source is None
    assert detach.error.condition == condition
    assert text in detach.error.description


async def test_a_queue_may_refuse_a_consumer(client: Client, queue: CreditQueue) -> None:
    await client.attach_receiver("/queues/q")
    spec = queue.consumers[0].spec
    object.__setattr__(spec, "exclusive", True)
    properties = {Symbol("rabbitmq:priority"): Int(5)}
    found = await client.attach_receiver("/queues/q", handle=1, properties=properties)
    assert calls(queue, "subscribe")[-1][1].priority == 5
    assert len(found) == 1


@pytest.mark.parametrize(
    ("performative", "condition"),
    [
        (Attach(name="x", handle=256, role=True), "amqp:connection:framing-error"),
        (Detach(handle=5), "amqp:session:unattached-handle"),
        (Transfer(handle=5, delivery_id=0), "amqp:session:unattached-handle"),
        (Attach(name="again", handle=0, role=True), "amqp:session:handle-in-use"),
    ],
)
async def test_what_ends_a_session_ends_no_other(
    client: Client, queue: CreditQueue, performative: Any, condition: str
) -> None:
    await client.attach_receiver("/queues/q")
    client.send(performative)
    (end,) = of_kind(await client.heard(), End)
    assert end.error.condition == condition
    # Nothing is heard in it until the client ends it, too.
    client.credit(1)
    assert await client.heard() == []
    client.send(End())
    await client.heard()
    assert (await client.begin()).remote_channel == 0


async def test_a_stream_is_read_from_an_offset(client: Client) -> None:
    queue = client.broker.queue("s", "stream")
    offset = Described(Symbol("rabbitmq:stream-offset-spec"), "first")
    source = Source(address="/queues/s", filter={Symbol("rabbitmq:stream-offset-spec"): offset})
    (attach,) = await client.attach_receiver(None, source=source)
    assert attach.source.distribution_mode == "copy"
    assert attach.source.filter == source.filter
    ((_, spec),) = calls(queue, "subscribe")
    assert spec.stream_offset.value == b"first"
    assert encode(offset)


async def test_a_consumer_hears_whether_it_is_the_active_one(
    client: Client, queue: CreditQueue
) -> None:
    await client.attach_receiver("/queues/q")
    ((_, spec),) = calls(queue, "subscribe")
    events = queue.clients[-1].events
    active = Symbol("rabbitmq:active")
    for said in (False, True, True):
        events.on_activity(queue.clients[-1], spec.number, said)
    flows = of_kind(await client.heard(), Flow)
    assert [(each.handle, each.properties[active]) for each in flows] == [(0, False), (0, True)]
    client.credit(10, drain=True)
    assert (await client.heard())[-1].properties == {active: True}


SQL = Described(Symbol("amqp:sql-filter"), "n > 1")
OTHER = Described(Symbol("example.org:filter"), "n > 1")


async def test_filters_that_are_served_are_in_the_answer(
    client: Client, queue: CreditQueue
) -> None:
    """Others are left out: of kinds that nobody knows, and of queues that have none."""
    asked = {Symbol("sql-filter"): SQL, Symbol("f"): OTHER}
    for served in (False, True):
        queue.features = replace(queue.features, filters=served)
        source = Source(address="/queues/q", filter=asked)
        attach = (await client.attach_receiver(None, handle=int(served), source=source))[0]
        _, spec = calls(queue, "subscribe")[-1]
        if served:
            assert attach.source.filter == {Symbol("sql-filter"): SQL}
            assert "AMQP_FILTEX_SQL_V1_0" in attach.offered_capabilities
            number = names_of("", "q") + content_of(Properties(headers=Table.of({"n": 2})), b"")
            assert spec.wants(number)
            assert not spec.wants(names_of("", "q") + content_of(Properties(), b""))
        else:
            assert (attach.source.filter, attach.offered_capabilities) == (None, ())
            assert spec.wants is None


@pytest.mark.parametrize(
    ("serves", "condition", "text"),
    [
        (False, "amqp:not-implemented", "Filters not supported"),
        (True, "amqp:invalid-field", "Attach refused: no selector: n >"),
    ],
)
async def test_a_selector_of_jms_is_refused(serves: bool, condition: str, text: str) -> None:
    broker = FakeBroker()
    queue = broker.queue("q")
    queue.features = replace(queue.features, filters=serves)
    client = Client(broker)
    await client.open()
    await client.begin()
    selector = Described(ULong(0x468C00000004), "n >")
    source = Source(address="/queues/q", filter={Symbol("jms-selector"): selector})
    client.send(Attach(name="l", handle=0, role=True, source=source, target=Target()))
    detach = (await client.heard())[-1]
    assert detach.error.condition == condition
    assert detach.error.description.startswith(text)


@pytest.mark.provokes("amqp.acknowledgement_late")
@pytest.mark.parametrize("by", ["link", "queue"])
async def test_what_is_not_settled_in_time_returns_and_the_link_goes_on(
    client: Client, queue: CreditQueue, by: str
) -> None:
    queue.features = replace(queue.features, times_consumers=True)
    queue.consumer_timeout_ms = 10_000 if by == "queue" else 70_000
    asked = {Symbol("rabbitmq:consumer-timeout"): UInt(10_000)} if by == "link" else None
    await client.attach_receiver("/queues/q", properties=asked)
    client.credit(2)
    assert len(of_kind(await client.heard(), Transfer)) == 2
    client.settle(1, Accepted())
    client.shell.advance(9)
    assert of_kind(await client.heard(), Disposition) == []
    client.shell.advance(5)
    client.shell.advance(5)
    (told,) = of_kind(await client.heard(), Disposition)
    assert told == Disposition(role=False, first=0, last=0, settled=False, state=Released())
    (returned,) = calls(queue, "return")
    assert list(returned[2]) == [0, 0]
    # What the client says of it now is late, and the link gets more.
    client.settle(0, Accepted())
    client.credit(5, counted=2)
    assert len(of_kind(await client.heard(), Transfer)) == 2
    client.connection.lost()
    await client.heard()
    client.shell.advance(20)
    assert len(calls(queue, "return")) == 1, "nobody looks any more"
