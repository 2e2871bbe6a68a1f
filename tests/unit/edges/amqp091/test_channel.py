"""The channel's rules, over an in-memory broker facade and queues on real batches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from convoymq.broker.access import AMQP
from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import codec, declarations
from convoymq.edges.amqp091.channel import Channel
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.states import State
from convoymq.kernels import batch
from convoymq.model.tables import Table
from tests.unit.edges.amqp091.fakes import Client, FakeBroker

MakeClient = Callable[..., Client]

Q = "queue 'q' in vhost '/'"


async def fill(client: Client, queue: str, *bodies: bytes, **properties: Any) -> None:
    for body in bodies:
        client.publish("", queue, body, **properties)
    await client.settled()


async def consume(client: Client, queue: str = "q", **options: Any) -> list[Any]:
    client.send(1, spec.BasicConsume(queue=queue, consumer_tag=options.pop("tag", "t"), **options))
    return await client.heard()


def queue_type(name: str) -> dict[str, Any]:
    return {"x-queue-type": name}


async def refused(client: Client, code: int, text: str, *methods: spec.Method) -> None:
    """The methods close channel 1 with that error; its number and the connection go on working."""
    client.send(1, *methods)
    close = (await client.methods())[-1]
    assert isinstance(close, spec.ChannelClose), close
    assert (close.reply_code, close.reply_text) == (code, f"{_name(code)} - {text}")
    client.send(1, spec.BasicQos())
    assert await client.methods() == []
    client.send(1, spec.ChannelCloseOk())
    await client.channel(1)
    assert client.state is State.OPEN


def _name(code: int) -> str:
    return {
        403: "ACCESS_REFUSED",
        404: "NOT_FOUND",
        405: "RESOURCE_LOCKED",
        406: "PRECONDITION_FAILED",
    }[code]


# --- publishing and confirms -----------------------------------------------------------------


@pytest.mark.provokes("amqp.connection_opened")
async def test_published_messages_arrive_in_order_and_whole(client: Client) -> None:
    await client.declare("q")
    bodies = [bytes([index]) * (index * 97) for index in range(40)]
    await fill(client, "q", *bodies, content_type="text/plain", headers=Table.of({"k": 1}))
    heard = await consume(client, no_ack=True)
    assert isinstance(heard[0].method, spec.BasicConsumeOk)
    assert [message.body for message in heard[1:]] == bodies
    assert [message.method.delivery_tag for message in heard[1:]] == list(range(1, 41))
    last = heard[-1]
    assert (last.method.consumer_tag, last.method.exchange) == ("t", "")
    assert (last.method.routing_key, last.method.redelivered) == ("q", False)
    assert last.header.properties.content_type == "text/plain"
    assert last.header.properties.headers.to_plain() == {"k": 1}


async def test_body_split_over_many_frames_and_reads(client: Client) -> None:
    await client.declare("q")
    body = bytes(range(256)) * 1200
    method = spec.BasicPublish(routing_key="q")
    data = codec.content_frames(1, method, spec.Properties(), body, frame_bytes_max=4096)
    for start in range(0, len(data), 1013):
        client.send_bytes(data[start : start + 1013])
    await client.settled()
    heard = await consume(client, no_ack=True)
    assert heard[1].body == body


async def test_large_frames_are_split_for_a_client_with_a_small_frame_max(
    client: Client, make_client: MakeClient
) -> None:
    await client.declare("q")
    body = bytes(range(256)) * 700
    await fill(client, "q", body)
    small = make_client(AmqpConfig(frame_max=4096))
    await small.open()
    await small.channel()
    small.send(1, spec.BasicGet(queue="q"))
    await small.settled()
    data = bytes(small.shell.output)
    at = 0
    while at < len(data):
        frame = codec.decode_frame(data, at, payload_bytes_max=4088)
        assert frame is not None
        at += len(frame.payload) + 8
    assert (await small.heard())[0].body == body


async def test_confirms_come_as_one_multiple_acknowledgement(client: Client) -> None:
    await client.declare("q")
    assert isinstance(await client.ask(1, spec.ConfirmSelect()), spec.ConfirmSelectOk)
    for _ in range(10):
        client.publish("", "q")
    assert await client.methods() == [spec.BasicAck(delivery_tag=10, multiple=True)]
    client.publish("", "q")
    assert await client.methods() == [spec.BasicAck(delivery_tag=11, multiple=False)]


async def test_confirms_never_cover_an_open_tag(client: Client) -> None:
    slow, fast = await client.declare("slow"), await client.declare("fast")
    await client.ask(1, spec.ConfirmSelect())
    slow.confirm = False
    client.publish("", "fast")
    client.publish("", "slow")
    client.publish("", "fast")
    client.publish("", "fast")
    assert await client.methods() == [
        spec.BasicAck(delivery_tag=1, multiple=False),
        spec.BasicAck(delivery_tag=3, multiple=False),
        spec.BasicAck(delivery_tag=4, multiple=False),
    ]
    slow.confirm = True
    client.publish("", "fast")
    answers = await client.methods()
    assert answers == [spec.BasicAck(delivery_tag=5, multiple=True)] or answers == [
        spec.BasicAck(delivery_tag=2, multiple=False),
        spec.BasicAck(delivery_tag=5, multiple=False),
    ]
    assert fast.ready
    assert client.connection.channels[1].codec.confirm_low == 6


async def test_message_for_several_queues_is_confirmed_when_all_have_it(
    client: Client, broker: FakeBroker
) -> None:
    one, two = await client.declare("one"), await client.declare("two")
    for name in ("one", "two"):
        await client.ask(1, spec.QueueBind(queue=name, exchange="amq.fanout"))
    await client.ask(1, spec.ConfirmSelect())
    two.confirm = False
    client.publish("amq.fanout", "k")
    assert await client.methods() == []
    two.confirm = True
    assert await client.methods() == [spec.BasicAck(delivery_tag=1, multiple=False)]
    assert len(one.ready) == len(two.ready) == 1


async def test_refused_publish_is_nacked_once(client: Client) -> None:
    queue = await client.declare("q")
    await client.declare("other")
    await client.ask(1, spec.ConfirmSelect())
    queue.accept = False
    client.publish("", "other")
    client.publish("", "q")
    client.publish("", "other")
    answers = await client.methods()
    nacks = [answer for answer in answers if isinstance(answer, spec.BasicNack)]
    assert nacks == [spec.BasicNack(delivery_tag=2, multiple=False, requeue=False)]
    acked = [answer.delivery_tag for answer in answers if isinstance(answer, spec.BasicAck)]
    assert acked == [1, 3]
    client.publish("", "other")
    assert await client.methods() == [spec.BasicAck(delivery_tag=4, multiple=False)]


async def test_unroutable_is_acknowledged_and_mandatory_returned_first(client: Client) -> None:
    await client.ask(1, spec.ConfirmSelect())
    client.publish("", "nowhere", b"lost")
    client.publish("amq.direct", "nowhere", b"came back", mandatory=True, message_id="m")
    heard = await client.heard()
    assert isinstance(heard[0].method, spec.BasicReturn)
    returned = heard[0]
    assert (returned.method.reply_code, returned.method.reply_text) == (312, "NO_ROUTE")
    assert (returned.method.exchange, returned.method.routing_key) == ("amq.direct", "nowhere")
    assert returned.body == b"came back"
    assert returned.header is not None
    assert returned.header.properties.message_id == "m"
    assert [m.method for m in heard[1:]] == [spec.BasicAck(delivery_tag=2, multiple=True)]


async def test_every_unroutable_message_is_counted(client: Client, broker: FakeBroker) -> None:
    """Those of one batch, whose route is remembered, and those of a transaction."""
    for mandatory in (False, False, True, False, True):
        client.publish("", "nowhere", mandatory=mandatory)
    await client.heard()
    counters = broker.counters.of(AMQP)
    assert (counters.dropped_unroutable, counters.returned_unroutable) == (3, 2)
    await client.ask(1, spec.TxSelect())
    client.publish("", "nowhere")
    await client.ask(1, spec.TxCommit())
    assert (counters.dropped_unroutable, counters.returned_unroutable) == (4, 2)


async def test_routes_are_remembered_until_the_topology_changes(
    client: Client, broker: FakeBroker
) -> None:
    queue = await client.declare("q")
    await fill(client, "q", *[b"x"] * 50)
    assert len(broker.routed) == 1
    await client.ask(1, spec.QueueDelete(queue="q"))
    await fill(client, "q", *[b"dropped"] * 50)
    # That the default exchange leads nowhere is remembered as well.
    assert len(broker.routed) == 2
    assert broker.counters.of(AMQP).dropped_unroutable == 50
    again = await client.declare("q")
    await fill(client, "q", b"y")
    assert len(queue.ready) == 50
    assert len(again.ready) == 1


async def test_more_keys_than_the_route_table_holds(client: Client, broker: FakeBroker) -> None:
    queue = await client.declare("q")
    await client.ask(1, spec.QueueBind(queue="q", exchange="amq.fanout"))
    for index in range(5000):
        client.publish("amq.fanout", f"key{index}", b"")
    await client.settled()
    assert len(queue.ready) == 5000


async def test_priority_and_expiration_are_marked_on_the_command(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", b"a", priority=3)
    await fill(client, "q", b"a", expiration="1000")
    await fill(client, "q", b"a", user_id="guest")
    assert [flags & 6 for flags in queue.flags] == [2, 4, 0]


def unserved(name: str, kind: str, queue: str = "q") -> str:
    return f"message property '{name}' is not served by {kind} queues: queue '{queue}' in vhost '/'"


@pytest.mark.parametrize("kind", ["quorum", "stream"])
@pytest.mark.parametrize("asked", [{"expiration": "1000"}, {"priority": 5}, {"priority": 255}])
async def test_what_a_replicated_queue_does_not_serve_is_refused_by_name(
    client: Client, kind: str, asked: dict[str, Any]
) -> None:
    """A stream; a quorum queue whose machine has version 1."""
    queue = await client.declare("q", **queue_type(kind))
    queue.serves_attributes = False
    client.publish("", "q", b"x", **asked)
    await refused(client, 406, unserved(next(iter(asked)), kind))
    assert not queue.ready
    # Many clients send a priority of 0 with everything, JMS one of 4.
    for priority in range(5):
        client.publish("", "q", b"x", priority=priority)
    await client.settled()
    assert len(queue.ready) == 5


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_other_queues_take_every_priority_and_expiration(client: Client, kind: str) -> None:
    queue = await client.declare("q", **queue_type(kind))
    await fill(client, "q", b"x", priority=9, expiration="1000")
    await fill(client, "q", b"x", priority=255)
    assert len(queue.ready) == 2


async def test_what_the_queues_serve_is_published_without_a_closer_look(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await client.declare("q", **queue_type("quorum"))
    looked_at: list[bytes] = []
    publish = Channel.publish

    def observed(self: Channel, *arguments: Any) -> None:
        looked_at.append(arguments[0])
        publish(self, *arguments)

    monkeypatch.setattr(Channel, "publish", observed)
    await fill(client, "q", b"x", priority=9, expiration="99999999999")
    assert not looked_at
    # What RabbitMQ takes as well, and what may be too long.
    await fill(client, "q", b"x", expiration="+1")
    await fill(client, "q", b"x", expiration="100000000000")
    queue.serves_attributes = False
    client.broker.route_versions.bump()
    client.publish("", "q", b"x", priority=9)
    await refused(client, 406, unserved("priority", "quorum"))
    assert len(looked_at) == 3
    assert len(queue.ready) == 3


@pytest.mark.parametrize("kind", ["classic", "quorum", "stream"])
async def test_a_group_is_refused_by_a_queue_that_does_not_know_groups_yet(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    queue = await client.declare("q", **queue_type(kind))
    looked_at: list[bytes] = []
    publish = Channel.publish

    def observed(self: Channel, *arguments: Any) -> None:
        looked_at.append(arguments[0])
        publish(self, *arguments)

    monkeypatch.setattr(Channel, "publish", observed)
    headers = Table.of({"x-group-id": "a"})
    await fill(client, "q", b"x", headers=headers)
    assert not looked_at
    queue.serves_groups, queue.is_early = False, True
    client.broker.route_versions.bump()
    client.publish("", "q", b"x", headers=headers)
    refusal = unserved("x-group-id", kind).replace("property", "header")
    await refused(client, 406, f"{refusal}; some nodes have an older release")
    assert len(looked_at) == len(queue.ready) == 1


async def test_no_queue_gets_a_message_that_one_of_them_refuses(client: Client) -> None:
    queues = [await client.declare("plain"), await client.declare("safe", **queue_type("stream"))]
    for queue in queues:
        await client.ask(1, spec.QueueBind(queue=queue.name, exchange="amq.fanout"))
    client.publish("amq.fanout", "", b"x")
    client.publish("amq.fanout", "", b"x", expiration="1")
    await refused(client, 406, unserved("expiration", "stream", "safe"))
    assert [len(queue.ready) for queue in queues] == [1, 1]


async def test_a_transaction_refuses_when_it_is_told_and_not_in_its_commit(client: Client) -> None:
    queue = await client.declare("q", **queue_type("stream"))
    await client.ask(1, spec.TxSelect())
    client.publish("", "q", b"x")
    client.publish("", "q", b"x", priority=5)
    await refused(client, 406, unserved("priority", "stream"))
    assert not queue.ready


async def test_a_full_queue_refuses_and_the_others_of_the_route_do_not(client: Client) -> None:
    full = await client.declare("full", **queue_type("quorum"))
    other = await client.declare("other", **queue_type("quorum"))
    for queue in (full, other):
        await client.ask(1, spec.QueueBind(queue=queue.name, exchange="amq.fanout"))
    await client.ask(1, spec.ConfirmSelect())
    client.publish("amq.fanout", "", b"x")
    await client.settled()
    full.refuses_publishes = True
    client.broker.route_versions.bump()
    client.publish("amq.fanout", "", b"x")
    client.publish("", "full", b"x")
    client.publish("", "other", b"x")
    answers = await client.methods()
    assert [len(full.ready), len(other.ready)] == [1, 3]
    nacked = [answer for answer in answers if isinstance(answer, spec.BasicNack)]
    assert sum(answer.delivery_tag for answer in nacked) in (3, 5)
    full.refuses_publishes = False
    client.broker.route_versions.bump()
    client.publish("", "full", b"x")
    await client.settled()
    assert len(full.ready) == 2


async def test_a_commit_to_a_full_queue_is_refused(client: Client) -> None:
    queue = await client.declare("q", **queue_type("quorum"))
    queue.refuses_publishes = True
    await client.ask(1, spec.TxSelect())
    client.publish("", "q", b"x")
    client.send(1, spec.TxCommit())
    await refused(client, 406, "partial tx completion")
    assert not queue.ready


async def test_message_errors(client: Client) -> None:
    async def publish(code: int, text: str, **options: Any) -> None:
        client.publish(options.pop("exchange", ""), "q", **options)
        await refused(client, code, text)

    await client.declare("q")
    await publish(404, "no exchange 'x' in vhost '/'", exchange="x")
    await publish(
        406, "user_id property set to 'x' but authenticated user was 'guest'", user_id="x"
    )
    await publish(406, "invalid expiration 'abc': no_integer", expiration="abc")
    await publish(406, "invalid expiration '5s': {leftover_string,\"s\"}", expiration="5s")
    await publish(406, "invalid expiration '-1': {value_negative,-1}", expiration="-1")
    await publish(
        406,
        'invalid message: {unacceptable_type_in_header,"CC",longstr}',
        headers=Table.of({"CC": "a"}),
    )
    await publish(406, "fast reply consumer does not exist", reply_to="amq.rabbitmq.reply-to")


async def test_too_big_a_message_closes_the_channel(make_client: MakeClient) -> None:
    client = make_client(message_size_max=100)
    await client.open()
    await client.channel()
    queue = await client.declare("q")
    client.publish("", "q", bytes(100))
    client.publish("", "q", bytes(101))
    await refused(client, 406, "message size 101 is larger than configured max size 100")
    assert len(queue.ready) == 1


async def test_immediate_closes_the_connection(client: Client) -> None:
    client.publish("", "q", immediate=True)
    (close,) = await client.methods()
    assert isinstance(close, spec.ConnectionClose)
    assert (close.reply_code, close.reply_text) == (540, "NOT_IMPLEMENTED - immediate=true")
    assert (close.class_id, close.method_id) == (60, 40)


async def test_copies_are_routed_and_bcc_removed(client: Client, broker: FakeBroker) -> None:
    for name in ("a", "b", "c"):
        await client.declare(name)
    await fill(client, "a", b"x", headers=Table.of({"CC": ["b"], "BCC": ["c"]}))
    assert broker.routed[-1][:2] == ("", ("a", "b", "c"))
    for name in ("a", "b", "c"):
        client.send(1, spec.BasicGet(queue=name, no_ack=True))
    for message in await client.heard():
        assert message.header is not None
        headers = message.header.properties.headers
        assert headers is not None
        assert headers.to_plain() == {"CC": ["b"]}
        assert message.method.routing_key == "a"


async def test_write_permission_is_asked_for(client: Client, broker: FakeBroker) -> None:
    await client.declare("q")
    await fill(client, "q", b"x")
    broker.refuse.add(("write", "exchange", "amq.default"))
    broker.route_versions.bump()
    client.publish("", "q")
    await refused(
        client,
        403,
        "write access to exchange 'amq.default' in vhost '/' refused for user 'guest'",
    )


# --- consuming -------------------------------------------------------------------------------


async def test_prefetch_holds_deliveries_back(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", *[b"%d" % index for index in range(10)])
    await client.ask(1, spec.BasicQos(prefetch_count=3))
    heard = await consume(client)
    assert len(heard) == 4
    client.send(1, spec.BasicAck(delivery_tag=2, multiple=True))
    more = await client.methods()
    assert [method.delivery_tag for method in more] == [4, 5]
    assert queue.calls[-1] == ("settle", 1, [0, 1])


async def test_acknowledgements_of_one_read_become_one_settle(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", *[b"x"] * 10)
    await consume(client)
    queue.calls.clear()
    tags = [1, 3, 2, 10, 5]
    client.send(1, *[spec.BasicAck(delivery_tag=tag) for tag in tags])
    assert queue.calls == [("settle", 1, [0, 2, 4, 4, 9, 9])]
    client.send(1, spec.BasicAck(delivery_tag=0, multiple=True))
    assert queue.calls[1:] == [("settle", 1, [3, 3, 5, 8])]
    assert client.connection.channels[1].codec.unacked == 0


async def test_rejects_and_nacks(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", *[b"x"] * 4)
    await client.ask(1, spec.BasicQos(prefetch_count=4))
    await consume(client)
    queue.calls.clear()
    client.send(
        1,
        spec.BasicReject(delivery_tag=1, requeue=True),
        spec.BasicReject(delivery_tag=2, requeue=False),
        spec.BasicNack(delivery_tag=3, requeue=True),
        spec.BasicNack(delivery_tag=4, requeue=False),
    )
    assert sorted(queue.calls, key=str) == [
        ("discard", 1, [1, 1, 3, 3]),
        ("return", 1, [0, 0], True),
        ("return", 1, [2, 2], False),
    ]
    redelivered = await client.heard()
    assert [message.method.redelivered for message in redelivered] == [True, True]


async def test_returns_keep_the_order_in_which_they_came(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", *[b"x"] * 3)
    await consume(client, prefetch=3) if False else await consume(client)
    queue.calls.clear()
    client.send(
        1,
        spec.BasicNack(delivery_tag=3, requeue=True),
        spec.BasicNack(delivery_tag=1, requeue=True),
    )
    assert queue.calls == [("return", 1, [2, 2], False), ("return", 1, [0, 0], False)]


@pytest.mark.parametrize(
    "method",
    [
        spec.BasicAck(delivery_tag=2),
        spec.BasicAck(delivery_tag=9, multiple=True),
        spec.BasicReject(delivery_tag=9),
        spec.BasicNack(delivery_tag=9, multiple=True),
    ],
)
async def test_unknown_delivery_tags(client: Client, method: Any) -> None:
    await client.declare("q")
    await fill(client, "q", *[b"x"] * 3)
    await consume(client)
    client.send(1, spec.BasicAck(delivery_tag=2))
    await refused(client, 406, f"unknown delivery tag {method.delivery_tag}", method)


async def test_acknowledging_twice_closes_the_channel_and_requeues(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", b"a", b"b")
    await consume(client)
    client.send(1, spec.BasicAck(delivery_tag=1), spec.BasicAck(delivery_tag=1))
    (close,) = await client.methods()
    assert (close.reply_code, close.class_id, close.method_id) == (406, 60, 80)
    assert [message[3] for message in queue.ready] == [1]


async def test_counts_are_shown_for_quorum_queues_only(client: Client) -> None:
    for kind, expected in (
        ("quorum", {"x-acquired-count": 1, "x-delivery-count": 1}),
        ("classic", {}),
    ):
        await client.declare(kind, **queue_type(kind))
        await fill(client, kind, b"x", headers=Table.of({"a": "b"}))
        await client.ask(1, spec.BasicQos(prefetch_count=1))
        await consume(client, kind, tag=kind)
        tag = client.connection.channels[1].codec.next_tag - 1
        client.send(1, spec.BasicReject(delivery_tag=tag, requeue=True))
        (again,) = await client.heard()
        assert again.method.redelivered
        assert again.header is not None
        headers = again.header.properties.headers
        assert headers is not None
        assert headers.to_plain() == {"a": "b", **expected}
        if expected:
            assert headers.get("x-delivery-count").code == "l"  # type: ignore[union-attr]


async def test_deliveries_of_streams_say_their_offset(client: Client) -> None:
    await client.declare("s", **queue_type("stream"))
    await client.ask(1, spec.BasicQos(prefetch_count=10))
    await fill(client, "s", b"a", b"b", headers=Table.of({"a": "b"}))
    heard = await consume(client, "s", arguments=Table.of({"x-stream-offset": "first"}))
    shown = [message.header.properties.headers.to_plain() for message in heard[1:]]
    assert shown == [{"a": "b", "x-stream-offset": n} for n in range(2)]
    (call,) = [call for call in client.broker.queues["s"].calls if call[0] == "subscribe"]
    assert call[1].stream_offset.value == b"first"


async def test_streams_have_no_shared_prefetch(client: Client) -> None:
    await client.declare("s", **queue_type("stream"))
    client.send(1, spec.BasicQos(prefetch_count=10), spec.BasicQos(prefetch_count=10, global_=True))
    client.send(1, spec.BasicConsume(queue="s"))
    close = (await client.methods())[-1]
    assert isinstance(close, spec.ConnectionClose)
    assert (close.reply_code, close.reply_text) == (
        540,
        "NOT_IMPLEMENTED - queue 's' in vhost '/' does not support global qos",
    )


@pytest.mark.parametrize("kind", ["stream", "quorum", "classic"])
async def test_named_producers_are_told_to_machines_that_know_them(
    client: Client, kind: str
) -> None:
    await client.declare("q", **queue_type(kind))
    for sequence in (7, 8, None, 9):
        table = {"x-stream-producer": "me"}
        extra = {} if sequence is None else {"x-stream-sequence": sequence}
        client.publish("", "q", b"x", headers=Table.of({**table, **extra}))
    await client.settled()
    queue = client.broker.queues["q"]
    assert queue.producers == ([] if kind == "classic" else [(b"me", 7), (b"me", 9)])
    assert len(queue.ready) == 4


@pytest.mark.parametrize(
    ("name", "sequence", "header"),
    [
        ("", 1, "producer"),
        ("n" * 256, 1, "producer"),
        (7, 1, "producer"),
        ("me", -1, "sequence"),
        ("me", "1", "sequence"),
        ("me", True, "sequence"),
    ],
)
async def test_producers_that_make_no_sense_are_refused(
    client: Client, name: Any, sequence: Any, header: str
) -> None:
    await client.declare("q", **queue_type("stream"))
    table = Table.of({"x-stream-producer": name, "x-stream-sequence": sequence})
    client.publish("", "q", b"x", headers=table)
    close = (await client.methods())[-1]
    assert isinstance(close, spec.ChannelClose)
    assert close.reply_code == 406
    assert f"header 'x-stream-{header}' must be" in close.reply_text


@pytest.mark.provokes("amqp.connection_error")
async def test_consume_rules(client: Client) -> None:
    await client.declare("q")
    (ok,) = await consume(client, tag="")
    assert ok.method.consumer_tag.startswith("amq.ctag-")
    assert len(ok.method.consumer_tag) == len("amq.ctag-") + 22
    assert await consume(client, tag="same", nowait=True) == []
    close = (await consume(client, tag="same"))[0].method
    assert (close.reply_code, close.reply_text) == (
        530,
        "NOT_ALLOWED - attempt to reuse consumer tag 'same'",
    )
    assert isinstance(close, spec.ConnectionClose)


async def test_missing_queue_and_no_previous_queue(client: Client) -> None:
    await refused(client, 404, f"no {Q}", spec.BasicConsume(queue="q"))
    await refused(client, 404, f"no {Q}", spec.BasicGet(queue="q"))
    await refused(client, 404, f"no {Q}", spec.QueuePurge(queue="q"))
    await refused(client, 404, f"no {Q}", spec.QueueDeclare(queue="q", passive=True))
    await refused(client, 404, "no previously declared queue", spec.BasicConsume())


async def test_refused_consumer_closes_the_channel(client: Client) -> None:
    await client.declare("q")
    await client.channel(2)
    client.send(2, spec.BasicConsume(queue="q"))
    await client.heard()
    await refused(
        client, 403, f"{Q} in exclusive use", spec.BasicConsume(queue="q", exclusive=True)
    )


async def test_consumer_arguments(client: Client) -> None:
    await client.declare("q")

    async def check(text: str, **arguments: Any) -> None:
        table = Table.of({key.replace("_", "-"): value for key, value in arguments.items()})
        await refused(client, 406, text, spec.BasicConsume(queue="q", arguments=table))

    await check(
        f"invalid arg 'x-priority' for {Q}: \"expected integer, got longstr\"", x_priority="a"
    )
    await check(
        f"invalid arg 'x-stream-offset' for {Q} of queue type rabbit_classic_queue",
        x_stream_offset="first",
    )
    await check(
        f"invalid arg 'x-consumer-timeout' for {Q} of queue type rabbit_classic_queue",
        x_consumer_timeout=1000,
    )
    assert not client.connection.channels[1].consumers
    heard = await consume(client, arguments=Table.of({"x-priority": -3, "x-own": 1}))
    assert isinstance(heard[0].method, spec.BasicConsumeOk)


@pytest.mark.parametrize("key", ["x-stream-filter", "x-stream-match-unfiltered"])
async def test_consumers_cannot_filter_streams(client: Client, key: str) -> None:
    await client.declare("s", **queue_type("stream"))
    client.send(1, spec.BasicQos(prefetch_count=10))
    await client.heard()
    subject = "queue 's' in vhost '/'"
    text = f"invalid arg '{key}' for {subject}: not served yet by stream queues"
    table = Table.of({key: True})
    await refused(client, 406, text, spec.BasicConsume(queue="s", arguments=table))


@pytest.mark.parametrize(
    "key", ["x-stream-filter", "x-stream-match-unfiltered", "x-stream-consumer-name"]
)
@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_what_consumers_ask_of_streams_only_is_refused(
    client: Client, kind: str, key: str
) -> None:
    await client.declare("q", **queue_type(kind))
    text = f"invalid arg '{key}' for {Q} of queue type rabbit_{kind}_queue"
    table = Table.of({key: "a"})
    await refused(client, 406, text, spec.BasicConsume(queue="q", arguments=table))


async def test_too_many_consumers(make_client: MakeClient) -> None:
    client = make_client(AmqpConfig(consumer_max_per_channel=1))
    await client.open()
    await client.channel()
    await client.declare("q")
    await consume(client, tag="a")
    close = (await consume(client, tag="b"))[0].method
    assert (close.reply_code, close.reply_text) == (
        530,
        "NOT_ALLOWED - reached maximum (1) of consumers per channel",
    )


async def test_late_acknowledgement_closes_the_channel(make_client: MakeClient) -> None:
    client = make_client(AmqpConfig(consumer_timeout_ms=120_000, heartbeat_s=0))
    await client.open()
    await client.channel()
    await client.declare("q")
    await fill(client, "q", b"a", b"b")
    await consume(client)
    client.shell.advance(100)
    client.send(1, spec.BasicAck(delivery_tag=1))
    client.shell.advance(70)
    await fill(client, "q", b"c")
    closes = [m for m in await client.methods() if isinstance(m, spec.ChannelClose)]
    assert not closes
    client.shell.advance(70)
    closes = [m for m in await client.methods() if isinstance(m, spec.ChannelClose)]
    assert [(m.reply_code, m.reply_text) for m in closes] == [
        (
            406,
            "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value "
            "used: 120000 ms. This timeout value can be configured, see consumers doc guide to "
            "learn more",
        )
    ]


async def test_prompt_acknowledgements_are_never_late(make_client: MakeClient) -> None:
    client = make_client(AmqpConfig(consumer_timeout_ms=120_000, heartbeat_s=0))
    await client.open()
    await client.channel()
    await client.declare("q")
    await consume(client)
    for tag in range(1, 8):
        await fill(client, "q", b"a")
        client.shell.advance(60)
        client.send(1, spec.BasicAck(delivery_tag=tag))
    client.shell.advance(600)
    assert not [m for m in await client.methods() if isinstance(m, spec.ChannelClose)]


async def test_cancel_leaves_deliveries_acknowledgeable(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", b"a", b"b")
    await consume(client)
    assert await client.ask(1, spec.BasicCancel(consumer_tag="t")) == spec.BasicCancelOk(
        consumer_tag="t"
    )
    client.send(1, spec.BasicAck(delivery_tag=2, multiple=True))
    assert queue.calls[-1] == ("settle", 1, [0, 1])
    assert await client.ask(1, spec.BasicCancel(consumer_tag="unknown")) == spec.BasicCancelOk(
        consumer_tag="unknown"
    )
    assert client.state is State.OPEN


async def test_deleted_queue_cancels_its_consumers(client: Client) -> None:
    await client.declare("q")
    await consume(client)
    client.send(1, spec.QueueDelete(queue="q"))
    answers = await client.methods()
    assert answers == [
        spec.QueueDeleteOk(message_count=0),
        spec.BasicCancel(consumer_tag="t", nowait=True),
    ]


async def test_a_silent_delete_and_another_channel_hear_the_cancel(client: Client) -> None:
    await client.declare("q")
    await consume(client)
    client.send(1, spec.QueueDelete(queue="q", nowait=True))
    assert await client.methods() == [spec.BasicCancel(consumer_tag="t", nowait=True)]
    await client.channel(2)
    await client.declare("q")
    await consume(client)
    client.send(2, spec.QueueDelete(queue="q"))
    heard = {(message.channel, type(message.method)) for message in await client.heard()}
    assert heard == {(1, spec.BasicCancel), (2, spec.QueueDeleteOk)}


@pytest.mark.parametrize("deleted", ["p", "q"])
async def test_only_cancels_of_a_deleted_queue_wait_for_its_delete(
    client: Client, broker: FakeBroker, deleted: str
) -> None:
    queue = await client.declare("q")
    await client.declare("p")
    await consume(client)
    broker.gate = asyncio.Event()
    client.send(1, spec.QueueDelete(queue=deleted))
    await client.settled()
    consumer = queue.consumers[0]
    consumer.client.events.on_cancelled(consumer.client, 1, "deleted")
    cancel = spec.BasicCancel(consumer_tag="t", nowait=True)
    assert await client.methods() == ([cancel] if deleted == "p" else [])
    broker.gate.set()
    expected: list[spec.Method] = [spec.QueueDeleteOk(message_count=0)]
    assert await client.methods() == (expected if deleted == "p" else [*expected, cancel])


async def test_get(client: Client) -> None:
    queue = await client.declare("q")
    assert isinstance(await client.ask(1, spec.BasicGet(queue="q")), spec.BasicGetEmpty)
    await fill(client, "q", b"a", b"b", b"c")
    client.send(1, spec.BasicGet(), spec.BasicGet(), spec.BasicGet(no_ack=True))
    heard = await client.heard()
    assert [message.body for message in heard] == [b"a", b"b", b"c"]
    assert [message.method.delivery_tag for message in heard] == [1, 2, 3]
    assert [message.method.message_count for message in heard] == [2, 1, 0]
    client.send(1, spec.BasicAck(delivery_tag=2, multiple=True))
    assert queue.calls[-1] == ("settle", 0, [0, 1])
    await refused(client, 406, "unknown delivery tag 3", spec.BasicAck(delivery_tag=3))


async def test_global_prefetch_is_one_limit_for_all_consumers(client: Client) -> None:
    await client.declare("q")
    await client.declare("p", **queue_type("quorum"))
    for name in ("q", "p"):
        await fill(client, name, *[b"x"] * 10)
    await client.ask(1, spec.BasicQos(prefetch_count=4, global_=True))
    first = await consume(client, "q", tag="one")
    second = await consume(client, "p", tag="two")
    assert len(first) + len(second) == 2 + 4
    client.send(1, spec.BasicAck(delivery_tag=3, multiple=True))
    assert len(await client.methods()) == 3
    assert client.connection.channels[1].codec.unacked == 4
    client.send(1, spec.BasicQos(prefetch_count=0, global_=True))
    assert client.connection.channels[1].codec.unacked > 4


async def test_global_prefetch_does_not_hold_unacknowledged_consumers(client: Client) -> None:
    await client.declare("q")
    await client.declare("p")
    await client.ask(1, spec.BasicQos(prefetch_count=2, global_=True))
    await fill(client, "q", *[b"x"] * 5)
    await consume(client, "q", tag="one")
    await consume(client, "q", tag="two")
    await consume(client, "p", tag="free", no_ack=True)
    await fill(client, "p", *[b"%d" % index for index in range(5)])
    tags = {message.method.consumer_tag for message in await client.heard()}
    assert tags == {"free"}
    got = 2
    while got < 5:
        client.send(1, spec.BasicAck(delivery_tag=0, multiple=True))
        more = await client.methods()
        assert 1 <= len(more) <= 2
        got += len(more)


async def test_recover_requeues_everything(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", b"a", b"b")
    client.send(1, spec.BasicGet(queue="q"), spec.BasicGet(queue="q"))
    await client.heard()
    assert isinstance(await client.ask(1, spec.BasicRecover(requeue=True)), spec.BasicRecoverOk)
    assert queue.calls[-1] == ("return", 0, [0, 1], False)
    close = await client.ask(1, spec.BasicRecover(requeue=False))
    assert (close.reply_code, close.reply_text) == (540, "NOT_IMPLEMENTED - requeue=false")


async def test_closed_channel_gives_everything_back(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", b"a", b"b")
    await consume(client)
    assert isinstance(await client.ask(1, spec.ChannelClose()), spec.ChannelCloseOk)
    assert queue.calls[-1] == ("close",)
    assert len(queue.ready) == 2
    await client.channel(1)


async def test_slow_reader_gets_no_more_than_its_buffer(make_client: MakeClient) -> None:
    settings = AmqpConfig(output_bytes_high=10_000, output_bytes_low=1_000)
    client = make_client(settings)
    await client.open()
    await client.channel()
    queue = await client.declare("q")
    client.shell.full = True
    bodies = [b"%04d" % index + bytes(996) for index in range(100)]
    client.send(1, spec.BasicConsume(queue="q", consumer_tag="t", no_ack=True))
    for start in range(0, 100, 10):
        await fill(client, "q", *bodies[start : start + 10])
    assert client.connection.buffer.output_bytes < 25_000
    assert not client.reads()
    assert len([call for call in queue.calls if call[0] == "settle"]) < 20
    client.shell.full = False
    client.connection.on_output()
    await client.settled()
    client.connection.on_output()
    heard = await client.heard()
    got = [message.body for message in heard if isinstance(message.method, spec.BasicDeliver)]
    assert got == bodies[: len(got)]
    assert client.reads()


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_cancelled_consumer_without_acks_loses_nothing_it_was_not_sent(
    make_client: MakeClient, transactional: bool
) -> None:
    """What was sent is settled, the rest goes back, also while the client does not read: a strict
    single active consumer's successor waits for both."""
    settings = AmqpConfig(output_bytes_high=10_000, output_bytes_low=1_000)
    client = make_client(settings)
    await client.open()
    await client.channel()
    if transactional:
        await client.ask(1, spec.TxSelect())
    queue = await client.declare("q")
    sender = make_client()
    await sender.open()
    await sender.channel()
    await fill(sender, "q", *[bytes(1000)] * 40)
    client.shell.full = True
    # In one round: a client that is late is not read from, and the round's end settles.
    channel = client.connection.channels[1]
    channel.handle(spec.BasicConsume(queue="q", consumer_tag="t", no_ack=True))
    (consumer,) = queue.consumers
    queue.serve()
    assert len(consumer.out) == 40
    client.connection.on_output()
    channel.handle(spec.BasicCancel(consumer_tag="t"))
    assert not consumer.out
    client.shell.full = False
    client.connection.on_output()
    await client.settled()
    sent = [m for m in await client.heard() if isinstance(m.method, spec.BasicDeliver)]
    assert 0 < len(sent) < 40
    assert len(queue.ready) == 40 - len(sent)


async def test_a_queue_keeps_what_a_slow_reader_has_no_room_for(
    make_client: MakeClient,
) -> None:
    settings = AmqpConfig(output_bytes_high=10_000, output_bytes_low=1_000, held_bytes_max=5_000)
    client = make_client(settings)
    await client.open()
    await client.channel()
    queue = await client.declare("q")
    await fill(client, "q", *[bytes(1000)] * 40)
    client.shell.full = True
    client.send(1, spec.BasicConsume(queue="q", consumer_tag="t"))
    await client.settled()
    steps = [call[0] for call in queue.calls if call[0] in ("pause", "resume")]
    assert steps == ["pause"]
    client.shell.full = False
    for _ in range(8):
        client.connection.on_output()
        await client.settled()
    steps = [call[0] for call in queue.calls if call[0] in ("pause", "resume")]
    assert steps == ["pause", "resume"]


# --- declarations ----------------------------------------------------------------------------


async def test_names_lose_line_breaks(client: Client, broker: FakeBroker) -> None:
    answer = await client.ask(1, spec.QueueDeclare(queue="a\r\nb"))
    assert answer.queue == "ab"


async def test_empty_names_mean_the_last_declared_queue(client: Client, broker: FakeBroker) -> None:
    answer = await client.ask(1, spec.QueueDeclare(queue=""))
    assert re.fullmatch(r"amq\.gen-[A-Za-z0-9_-]{22}", answer.queue)
    await client.ask(1, spec.QueueBind(exchange="amq.direct"))
    assert broker.bindings == [("amq.direct", answer.queue, answer.queue)]
    assert isinstance(await client.ask(1, spec.QueuePurge()), spec.QueuePurgeOk)


@pytest.mark.parametrize("permission", ["configure", "read"])
async def test_generated_names_need_the_permissions_of_others(
    client: Client, broker: FakeBroker, permission: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declarations, "generated_name", lambda prefix: prefix + "name")
    broker.refuse.add((permission, "queue", "amq.gen-name"))
    await refused(
        client,
        403,
        f"{permission} access to queue 'amq.gen-name' in vhost '/' refused for user 'guest'",
        spec.QueueDeclare(queue="", arguments=Table.of({"x-dead-letter-exchange": "amq.direct"})),
    )
    assert broker.queues == {}


async def test_default_exchange_is_untouchable(client: Client) -> None:
    text = "operation not permitted on the default exchange"
    await client.declare("q")
    for method in (
        spec.ExchangeDeclare(exchange=""),
        spec.ExchangeDeclare(exchange="", passive=True),
        spec.ExchangeDeclare(exchange="\r\n", passive=True),
        spec.ExchangeDelete(exchange=""),
        spec.QueueBind(queue="q", exchange=""),
        spec.QueueUnbind(queue="q", exchange=""),
        spec.ExchangeBind(destination="", source="amq.direct"),
        spec.ExchangeUnbind(destination="amq.direct", source=""),
    ):
        await refused(client, 403, text, method)
    await refused(
        client,
        403,
        "deletion of system exchange 'amq.direct' in vhost '/' not allowed",
        spec.ExchangeDelete(exchange="amq.direct"),
    )


async def test_nowait_declarations_are_silent(client: Client, broker: FakeBroker) -> None:
    client.send(
        1,
        spec.QueueDeclare(queue="q", nowait=True),
        spec.ExchangeDeclare(exchange="x", nowait=True),
        spec.QueueBind(queue="q", exchange="x", nowait=True),
        spec.QueuePurge(queue="q", nowait=True),
        spec.ConfirmSelect(nowait=True),
        spec.QueueDelete(queue="q", nowait=True),
        spec.ExchangeDelete(exchange="x", nowait=True),
    )
    assert await client.methods() == []
    assert broker.queues == {}
    assert "x" not in broker.exchanges


async def test_permissions_are_asked_for(client: Client, broker: FakeBroker) -> None:
    await client.declare("q")
    cases: list[tuple[str, str, str, spec.Method]] = [
        ("configure", "queue", "q", spec.QueueDeclare(queue="q")),
        ("configure", "queue", "q", spec.QueueDelete(queue="q")),
        ("write", "queue", "q", spec.QueueBind(queue="q", exchange="amq.direct")),
        ("read", "exchange", "amq.direct", spec.QueueBind(queue="q", exchange="amq.direct")),
        ("read", "queue", "q", spec.BasicConsume(queue="q")),
        ("read", "queue", "q", spec.BasicGet(queue="q")),
        ("read", "queue", "q", spec.QueuePurge(queue="q")),
        ("configure", "exchange", "x", spec.ExchangeDeclare(exchange="x")),
        ("configure", "exchange", "x", spec.ExchangeDelete(exchange="x")),
    ]
    for permission, kind, name, method in cases:
        broker.refuse = {(permission, kind, name)}
        text = f"{permission} access to {kind} '{name}' in vhost '/' refused for user 'guest'"
        await refused(client, 403, text, method)
        broker.refuse = set()


async def test_exclusive_queue_belongs_to_its_connection(
    client: Client, make_client: MakeClient
) -> None:
    await client.ask(1, spec.QueueDeclare(queue="mine", exclusive=True))
    other = make_client()
    await other.open()
    await other.channel()
    close = await other.ask(1, spec.QueueDeclare(queue="mine", passive=True))
    assert close.reply_code == 405
    assert close.reply_text.startswith(
        "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue 'mine' in vhost '/'."
    )


async def test_small_methods(client: Client) -> None:
    assert await client.ask(1, spec.AccessRequest()) == spec.AccessRequestOk(ticket=1)
    assert await client.ask(1, spec.ChannelFlow(active=True)) == spec.ChannelFlowOk(active=True)
    bound = await client.ask(1, spec.ExchangeBind(destination="amq.direct", source="amq.fanout"))
    assert isinstance(bound, spec.ExchangeBindOk)
    unbound = await client.ask(
        1, spec.ExchangeUnbind(destination="amq.direct", source="amq.fanout")
    )
    assert isinstance(unbound, spec.ExchangeUnbindOk)


@pytest.mark.parametrize(
    ("method", "code", "text"),
    [
        (spec.ChannelFlow(active=False), 540, "NOT_IMPLEMENTED - active=false"),
        (spec.BasicQos(prefetch_size=1), 540, "NOT_IMPLEMENTED - prefetch_size!=0 (1)"),
        (spec.ConnectionTuneOk(), 503, "COMMAND_INVALID - unimplemented method"),
        (spec.ConnectionClose(), 503, "COMMAND_INVALID - unimplemented method"),
        (spec.ConnectionUpdateSecret(), 503, "COMMAND_INVALID - unimplemented method"),
        (spec.ChannelCloseOk(), 503, "COMMAND_INVALID - unimplemented method"),
        (spec.BasicDeliver(), 503, "COMMAND_INVALID - unimplemented method"),
    ],
)
async def test_methods_that_close_the_connection(
    client: Client, method: spec.Method, code: int, text: str
) -> None:
    close = await client.ask(1, method)
    assert isinstance(close, spec.ConnectionClose)
    assert (close.reply_code, close.reply_text) == (code, text)


def channel_close() -> spec.ChannelClose:
    return spec.ChannelClose(reply_code=200, reply_text="bye")


@pytest.mark.parametrize("busy", [False, True])
async def test_closes_that_cross_leave_the_channel_closing(
    client: Client, broker: FakeBroker, busy: bool
) -> None:
    failing: spec.Method = spec.QueueDeclare(queue="none", passive=True)
    if not busy:
        # Refused at once, before the next frame is looked at.
        failing = spec.ExchangeDeclare(exchange="none", passive=True)
    client.send(1, failing, spec.ConfirmSelect(), channel_close(), spec.ConfirmSelect())
    answers = await client.methods()
    assert [type(answer) for answer in answers] == [spec.ChannelClose, spec.ChannelCloseOk]
    assert answers[0].reply_code == 404
    client.send(1, spec.ConfirmSelect(), channel_close())
    assert await client.methods() == [spec.ChannelCloseOk()]
    client.send(1, spec.ChannelCloseOk())
    assert await client.methods() == []
    await client.channel(1)
    assert client.state is State.OPEN


async def test_a_channel_that_closes_is_not_opened_again(client: Client) -> None:
    close = await client.ask(1, spec.ExchangeDeclare(exchange="none", passive=True))
    assert isinstance(close, spec.ChannelClose)
    again = await client.ask(1, spec.ChannelOpen())
    assert (again.reply_code, again.reply_text) == (
        504,
        "CHANNEL_ERROR - second 'channel.open' seen",
    )


# --- transactions ----------------------------------------------------------------------------


async def test_transaction_holds_publishes_and_acknowledgements(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", b"a")
    client.send(1, spec.BasicGet(queue="q"))
    await client.heard()
    assert isinstance(await client.ask(1, spec.TxSelect()), spec.TxSelectOk)
    queue.calls.clear()
    client.publish("", "q", b"b")
    client.send(1, spec.BasicAck(delivery_tag=1))
    assert await client.methods() == []
    assert queue.calls == []
    assert not queue.ready
    queue.confirm = False
    client.send(1, spec.TxCommit())
    assert await client.methods() == []
    assert queue.calls == [("settle", 0, [0, 0])]
    assert len(queue.ready) == 1
    queue.confirm = True
    assert isinstance((await client.methods())[0], spec.TxCommitOk)
    assert isinstance(await client.ask(1, spec.TxCommit()), spec.TxCommitOk)


@pytest.mark.parametrize(
    "method",
    [
        spec.BasicAck(delivery_tag=2, multiple=True),
        spec.BasicNack(delivery_tag=2, multiple=True),
        spec.BasicNack(delivery_tag=2, multiple=True, requeue=True),
        spec.BasicReject(delivery_tag=1),
        spec.BasicReject(delivery_tag=1, requeue=True),
    ],
    ids=["ack", "discard", "requeue", "reject", "reject and requeue"],
)
async def test_commit_of_acknowledgements_waits_for_every_queue(
    client: Client, method: spec.Method
) -> None:
    await client.declare("p")
    await client.declare("q")
    await fill(client, "p", b"a")
    await fill(client, "q", b"b")
    client.send(1, spec.BasicGet(queue="p"), spec.BasicGet(queue="q"), spec.TxSelect(), method)
    await client.heard()
    queues = client.broker.queues
    for queue in queues.values():
        queue.confirm = False
    client.send(1, spec.TxCommit())
    assert await client.methods() == []
    waiting = {name for name, queue in queues.items() if queue.settled}
    assert waiting == {"p", "q"} if getattr(method, "multiple", False) else {"p"}
    queues["p"].confirm = True
    if "q" in waiting:
        assert await client.methods() == []
        queues["q"].confirm = True
    assert isinstance((await client.methods())[0], spec.TxCommitOk)


async def test_commit_of_acknowledgements_that_are_lost_is_refused(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", b"a")
    client.send(1, spec.BasicGet(queue="q"), spec.TxSelect(), spec.BasicAck(delivery_tag=1))
    await client.heard()
    queue.accept = False
    await refused(client, 406, "partial tx completion", spec.TxCommit())


async def test_acknowledgements_of_a_transaction_keep_their_stream_open(
    make_client: MakeClient,
) -> None:
    client = make_client(AmqpConfig(clients_per_channel_max=2))
    await client.open()
    await client.channel()
    held = await client.declare("held")
    await fill(client, "held", b"a")
    client.send(1, spec.BasicGet(queue="held"), spec.TxSelect(), spec.BasicAck(delivery_tag=1))
    await client.heard()
    for number in range(6):
        await client.declare(f"q{number}")
        client.send(1, spec.BasicGet(queue=f"q{number}"))
        await client.heard()
    assert ("close",) not in held.calls
    assert isinstance(await client.ask(1, spec.TxCommit()), spec.TxCommitOk)
    assert ("settle", 0, [0, 0]) in held.calls


async def test_rollback_restores_deliveries(client: Client) -> None:
    queue = await client.declare("q")
    await fill(client, "q", b"a", b"b", b"c")
    client.send(1, *[spec.BasicGet(queue="q")] * 3)
    await client.heard()
    await client.ask(1, spec.TxSelect())
    client.publish("", "q", b"never")
    client.send(1, spec.BasicAck(delivery_tag=2), spec.BasicNack(delivery_tag=1))
    assert isinstance(await client.ask(1, spec.TxRollback()), spec.TxRollbackOk)
    assert client.connection.channels[1].codec.unacked == 3
    client.send(1, spec.BasicAck(delivery_tag=3, multiple=True))
    assert isinstance(await client.ask(1, spec.TxCommit()), spec.TxCommitOk)
    assert queue.calls[-1] == ("settle", 0, [0, 2])
    assert not queue.ready


async def test_modes_do_not_mix(client: Client) -> None:
    await refused(client, 406, "channel is not transactional", spec.TxCommit())
    await refused(client, 406, "channel is not transactional", spec.TxRollback())
    await refused(
        client,
        406,
        "cannot switch from confirm to tx mode",
        spec.ConfirmSelect(nowait=True),
        spec.TxSelect(),
    )
    await client.ask(1, spec.TxSelect())
    await refused(client, 406, "cannot switch from tx to confirm mode", spec.ConfirmSelect())
    await client.ask(1, spec.TxSelect())
    client.publish("missing", "k")
    await refused(client, 404, "no exchange 'missing' in vhost '/'")


# --- direct reply-to -------------------------------------------------------------------------


async def test_direct_reply_to(client: Client, make_client: MakeClient) -> None:
    await client.declare("q")
    (ok,) = await consume(client, "amq.rabbitmq.reply-to", no_ack=True)
    assert isinstance(ok.method, spec.BasicConsumeOk)
    client.publish("", "q", b"question", reply_to="amq.rabbitmq.reply-to", correlation_id="7")
    server = make_client()
    await server.open()
    await server.channel()
    server.send(1, spec.BasicGet(queue="q", no_ack=True))
    await client.settled()
    (question,) = await server.heard()
    assert question.header is not None
    reply_to = question.header.properties.reply_to
    assert reply_to is not None
    assert reply_to.startswith("amq.rabbitmq.reply-to.")
    exists = await server.ask(1, spec.QueueDeclare(queue=reply_to, passive=True))
    assert (exists.message_count, exists.consumer_count) == (0, 1)
    await server.ask(1, spec.ConfirmSelect())
    server.publish("", reply_to, b"answer", correlation_id="7", mandatory=True)
    assert await server.methods() == [spec.BasicAck(delivery_tag=1, multiple=False)]
    (answer,) = await client.heard()
    assert isinstance(answer.method, spec.BasicDeliver)
    assert answer.body == b"answer"
    assert answer.method.routing_key == reply_to
    await client.ask(1, spec.BasicCancel(consumer_tag="t"))
    server.publish("", reply_to, b"too late")
    assert len(await server.methods()) == 1
    close = await server.ask(1, spec.QueueDeclare(queue=reply_to, passive=True))
    assert close.reply_code == 404


async def test_replies_that_a_client_does_not_read_are_dropped_and_counted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await consume(client, "amq.rabbitmq.reply-to", no_ack=True)
    broker = client.connection.broker
    monkeypatch.setattr(client.connection, "output_full", lambda: True)
    client.connection.channels[1].replies._on_reply(b"")
    assert await client.heard() == []
    assert broker.counters.dropped_replies == 1


async def test_direct_reply_to_errors(client: Client) -> None:
    name = "amq.rabbitmq.reply-to"
    await refused(client, 406, "reply consumer cannot acknowledge", spec.BasicConsume(queue=name))
    await refused(
        client,
        406,
        "reply consumer already set",
        spec.BasicConsume(queue=name, no_ack=True, nowait=True),
        spec.BasicConsume(queue=name, no_ack=True),
    )


async def test_streams_to_many_queues_are_bounded(make_client: MakeClient) -> None:
    client = make_client(AmqpConfig(clients_per_channel_max=10))
    await client.open()
    await client.channel()
    await client.ask(1, spec.ConfirmSelect())
    for index in range(60):
        await client.declare(f"q{index}")
        client.publish("", f"q{index}")
        assert len(await client.methods()) == 1
    clients = client.connection.channels[1].clients
    assert len(clients) <= 22
    assert batch.CMD_SESSION_CLOSE


async def test_deliveries_without_acknowledgement_are_settled_in_their_round(
    client: Client,
) -> None:
    queue = await client.declare("q")
    await consume(client, no_ack=True)
    await fill(client, "q", *[b"x"] * 5)
    assert sum(call[0] == "settle" for call in queue.calls) >= 1
    assert not queue.consumers[0].out


async def test_late_answers_of_a_closed_channel_are_not_sent(
    client: Client, broker: FakeBroker
) -> None:
    broker.gate = asyncio.Event()
    client.send(1, spec.QueueDeclare(queue="slow"))
    client.send(1, spec.BasicAck(delivery_tag=5))
    client.send(0, spec.ConnectionClose(reply_code=200))
    assert [type(m) for m in await client.methods()] == [spec.ConnectionCloseOk]
    broker.gate.set()
    assert await client.methods() == []
