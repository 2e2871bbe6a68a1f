"""Streams over AMQP 0-9-1: declared, published to, read by offset on every node, never emptied."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest
from pika import spec

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import (
    Inbox,
    api,
    eventually,
    numbered,
    publish_confirmed,
    set_policy,
)
from tests.raw_amqp import RawPeer, assert_channel_error, assert_connection_error

STREAM = {"x-queue-type": "stream"}
ALL_ARGUMENTS = {
    **STREAM,
    "x-max-length-bytes": 1_000_000_000,
    "x-max-age": "1h",
    "x-stream-max-segment-size-bytes": 1_000_000,
    "x-initial-cluster-size": 3,
}
OFFSET = "x-stream-offset"
Opened = Callable[[int], Any]


@pytest.fixture
def only_convoy(cluster: Cluster) -> None:
    """For what RabbitMQ's streams do not do over AMQP 0-9-1, rejecting included."""
    if cluster.system == "rabbitmq":
        pytest.skip("RabbitMQ does not do this over AMQP 0-9-1")


@pytest.fixture
def stream(channel: Any, names: Names) -> str:
    """An empty stream; `channel` has a prefetch."""
    name = names.queue()
    channel.queue_declare(name, durable=True, arguments=STREAM)
    channel.basic_qos(prefetch_count=1000)
    return name


def read(channel: Any, stream: str, start: Any = None, **consume: Any) -> Inbox:
    """A consumer on a channel of its own, so that it has its own prefetch."""
    own = channel.connection.channel()
    own.basic_qos(prefetch_count=consume.pop("prefetch", 1000))
    arguments = consume.pop("arguments", {})
    if start is not None:
        arguments = {**arguments, OFFSET: start}
    return Inbox(own, stream, arguments=arguments, **consume)


def offsets(inbox: Inbox) -> list[int]:
    return [properties.headers[OFFSET] for _, properties, _ in inbox.deliveries]


# --- declaring -------------------------------------------------------------------------------


def test_declare_with_every_argument_twice(channel: Any, names: Names) -> None:
    queue = names.queue()
    for _ in range(2):
        declared = channel.queue_declare(queue, durable=True, arguments=ALL_ARGUMENTS)
        assert declared.method.queue == queue
    assert channel.queue_declare(queue, passive=True).method.queue == queue


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x-max-age", "2h"),
        ("x-max-length-bytes", 5),
        ("x-stream-max-segment-size-bytes", 2_000_000),
        ("x-queue-type", "quorum"),
    ],
)
def test_a_declare_that_differs_is_refused(
    channel: Any, names: Names, key: str, value: object
) -> None:
    queue = names.queue()
    channel.queue_declare(queue, durable=True, arguments=ALL_ARGUMENTS)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.queue_declare(queue, durable=True, arguments={**ALL_ARGUMENTS, key: value})
    assert caught.value.reply_code == 406
    assert f"inequivalent arg '{key}' for queue '{queue}' in vhost '/'" in caught.value.reply_text


@pytest.mark.parametrize(
    ("flags", "arguments", "text"),
    [
        ({"durable": False}, {}, "invalid property 'non-durable'"),
        ({"exclusive": True}, {}, "invalid property 'exclusive-owner'"),
        ({"auto_delete": True}, {}, "invalid property 'auto-delete'"),
        pytest.param(
            {},
            {"x-max-age": "soon"},
            "invalid arg 'x-max-age'",
            marks=pytest.mark.rabbitmq_since("4.0"),
        ),
        ({}, {"x-max-age": "10"}, "invalid arg 'x-max-age'"),
        ({}, {"x-max-length-bytes": -1}, "invalid arg 'x-max-length-bytes'"),
        ({}, {"x-max-length": 10}, "invalid arg 'x-max-length'"),
        ({}, {"x-message-ttl": 10}, "invalid arg 'x-message-ttl'"),
        ({}, {"x-dead-letter-exchange": "x"}, "invalid arg 'x-dead-letter-exchange'"),
        (
            {},
            {"x-stream-max-segment-size-bytes": "many"},
            "invalid arg 'x-stream-max-segment-size-bytes'",
        ),
        ({}, {"x-initial-cluster-size": 0}, "invalid arg 'x-initial-cluster-size'"),
    ],
)
def test_what_a_stream_cannot_be_is_refused(
    channel: Any, names: Names, flags: dict[str, bool], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.queue_declare(
            names.queue(), **{"durable": True, **flags}, arguments={**STREAM, **arguments}
        )
    assert caught.value.reply_code == 406
    assert text in caught.value.reply_text


def test_a_stream_needs_a_name(channel: Any) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.queue_declare("", durable=True, arguments=STREAM)
    assert caught.value.reply_code == 406
    assert "server-named queue for type rabbit_stream_queue" in caught.value.reply_text


def test_a_deleted_stream_ends_its_consumers(channel: Any, stream: str) -> None:
    publish_confirmed(channel, stream, numbered(3))
    inbox = read(channel, stream, "first")
    inbox.wait(3)
    channel.queue_delete(stream)
    eventually(lambda: inbox.cancelled, connection=channel.connection)
    channel.queue_declare(stream, durable=True, arguments=STREAM)
    again = read(channel, stream, "first")
    publish_confirmed(channel, stream, numbered(2))
    again.wait(2)
    assert offsets(again) == [0, 1]


# --- reading ---------------------------------------------------------------------------------


def test_every_node_reads_from_the_first(
    channel: Any, stream: str, open_connection: Opened
) -> None:
    bodies = numbered(500)
    publish_confirmed(channel, stream, bodies)
    for node in range(3):
        inbox = read(open_connection(node).channel(), stream, "first")
        assert inbox.wait(500) == bodies
        assert offsets(inbox) == list(range(500))
        assert not any(inbox.redelivered)
        assert [method.routing_key for method, _, _ in inbox.deliveries] == [stream] * 500


@pytest.mark.parametrize("node", range(3))
def test_a_reader_follows_what_is_published(
    channel: Any, stream: str, open_connection: Opened, node: int
) -> None:
    publish_confirmed(channel, stream, numbered(5))
    inbox = read(open_connection(node).channel(), stream, "next")
    inbox.settle()
    assert inbox.deliveries == []
    more = [f"later {n}".encode() for n in range(50)]
    publish_confirmed(channel, stream, more)
    assert inbox.wait(50) == more
    assert offsets(inbox) == list(range(5, 55))


@pytest.mark.parametrize("node", range(3))
def test_a_reader_begins_at_an_offset(
    channel: Any, stream: str, open_connection: Opened, node: int
) -> None:
    bodies = numbered(100)
    publish_confirmed(channel, stream, bodies)
    for start in (0, 1, 42, 99):
        inbox = read(open_connection(node).channel(), stream, start)
        assert inbox.wait(100 - start) == bodies[start:]
        assert offsets(inbox) == list(range(start, 100))


def test_the_last_chunk_holds_the_last_message(channel: Any, stream: str) -> None:
    for round_ in range(3):
        publish_confirmed(channel, stream, [f"{round_}.{n}".encode() for n in range(10)])
    inbox = read(channel, stream, "last")
    eventually(lambda: b"2.9" in inbox.bodies, connection=channel.connection)
    found = offsets(inbox)
    assert found == list(range(found[0], 30))


def test_without_a_start_a_reader_gets_what_comes(channel: Any, stream: str) -> None:
    publish_confirmed(channel, stream, numbered(3))
    inbox = read(channel, stream)
    publish_confirmed(channel, stream, [b"new"])
    assert inbox.wait(1) == [b"new"]
    assert offsets(inbox) == [3]


@pytest.mark.parametrize("node", range(3))
def test_a_reader_begins_at_a_time(
    channel: Any, stream: str, open_connection: Opened, node: int
) -> None:
    publish_confirmed(channel, stream, [b"old"] * 5)
    second = int(time.time()) + 1
    # AMQP's timestamps are whole seconds: the others have to be of a later one.
    eventually(lambda: time.time() > second + 0.5, connection=channel.connection)
    publish_confirmed(channel, stream, [b"new"] * 5)
    there = open_connection(node).channel()
    inbox = read(there, stream, datetime.fromtimestamp(second, UTC))
    assert inbox.wait(5) == [b"new"] * 5
    assert offsets(inbox) == list(range(5, 10))
    early = read(there, stream, datetime.fromtimestamp(second - 3600, UTC))
    early.wait(10)
    assert offsets(early) == list(range(10))
    late = read(there, stream, datetime.fromtimestamp(second + 3600, UTC))
    late.settle()
    publish_confirmed(channel, stream, [b"newest"])
    assert late.wait(1) == [b"newest"]


@pytest.mark.parametrize("interval", ["1h", "1D", "5m"])
def test_a_reader_begins_an_interval_ago(channel: Any, stream: str, interval: str) -> None:
    bodies = numbered(20)
    publish_confirmed(channel, stream, bodies)
    inbox = read(channel, stream, interval)
    assert inbox.wait(20) == bodies
    assert offsets(inbox) == list(range(20))


def test_reading_takes_nothing_away(channel: Any, stream: str, open_connection: Opened) -> None:
    bodies = numbered(200)
    publish_confirmed(channel, stream, bodies)
    inboxes = [read(open_connection(node).channel(), stream, "first") for node in (0, 1, 2, 0)]
    for inbox in inboxes:
        assert inbox.wait(200) == bodies
        inbox.channel.basic_ack(0, multiple=True)
        inbox.channel.close()
    again = read(channel, stream, "first")
    assert again.wait(200) == bodies
    assert offsets(again) == list(range(200))


def test_other_headers_and_properties_stay(channel: Any, stream: str) -> None:
    kept = {"a": 1, "b": "c", OFFSET: 77}
    properties = pika.BasicProperties(
        headers=kept, content_type="text/plain", priority=3, message_id="m", delivery_mode=2
    )
    channel.confirm_delivery()
    channel.basic_publish("", stream, b"with", properties)
    channel.basic_publish("", stream, b"without")
    inbox = read(channel, stream, "first")
    inbox.wait(2)
    (_, first, _), (_, second, _) = inbox.deliveries
    assert first.headers == {**kept, OFFSET: 0}
    assert (first.content_type, first.message_id) == ("text/plain", "m")
    assert second.headers == {OFFSET: 1}


def test_large_messages_and_empty_ones(channel: Any, stream: str) -> None:
    bodies = [b"", bytes(range(256)) * 2000, b"x", bytes(300_000), b""]
    publish_confirmed(channel, stream, bodies)
    inbox = read(channel, stream, "first")
    assert inbox.wait(5) == bodies
    assert offsets(inbox) == [0, 1, 2, 3, 4]


def test_a_bound_stream_gets_its_copy(channel: Any, stream: str, names: Names) -> None:
    exchange, queue = names.exchange(), names.queue("other")
    channel.exchange_declare(exchange, "topic")
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    channel.queue_bind(stream, exchange, "a.#")
    channel.queue_bind(queue, exchange, "a.*")
    channel.confirm_delivery()
    for key in ("a.b", "a.b.c", "a"):
        channel.basic_publish(exchange, key, key.encode())
    inbox = read(channel, stream, "first")
    assert inbox.wait(3) == [b"a.b", b"a.b.c", b"a"]
    assert [method.exchange for method, _, _ in inbox.deliveries] == [exchange] * 3
    assert Inbox(channel, queue).wait(1) == [b"a.b"]


# --- credit ----------------------------------------------------------------------------------


@pytest.mark.parametrize("node", range(3))
def test_prefetch_is_the_readers_credit(
    channel: Any, stream: str, open_connection: Opened, node: int
) -> None:
    bodies = numbered(50)
    for body in bodies:
        # Each a chunk of its own: RabbitMQ gives credit by chunks.
        publish_confirmed(channel, stream, [body])
    inbox = read(open_connection(node).channel(), stream, "first", prefetch=5)
    inbox.wait(5)
    inbox.settle()
    assert inbox.bodies == bodies[:5]
    inbox.channel.basic_ack(inbox.deliveries[2][0].delivery_tag, multiple=True)
    inbox.wait(8)
    inbox.settle()
    assert inbox.bodies == bodies[:8]
    while len(inbox.deliveries) < 50:
        seen = len(inbox.deliveries)
        inbox.channel.basic_ack(inbox.deliveries[-1][0].delivery_tag, multiple=True)
        inbox.wait(seen + 1)
    assert inbox.bodies == bodies
    assert offsets(inbox) == list(range(50))


@pytest.mark.usefixtures("only_convoy")
def test_a_log_takes_nothing_back(channel: Any, stream: str) -> None:
    bodies = numbered(6)
    for body in bodies:
        publish_confirmed(channel, stream, [body])
    inbox = read(channel, stream, "first", prefetch=2)
    inbox.wait(2)
    own = inbox.channel
    own.basic_nack(inbox.deliveries[0][0].delivery_tag, requeue=True)
    own.basic_reject(inbox.deliveries[1][0].delivery_tag, requeue=False)
    inbox.wait(4)
    own.basic_ack(0, multiple=True)
    inbox.wait(6)
    inbox.settle()
    assert inbox.bodies == bodies
    assert not any(inbox.redelivered)


def test_a_cancelled_reader_stops(channel: Any, stream: str) -> None:
    publish_confirmed(channel, stream, numbered(3))
    inbox = read(channel, stream, "first")
    inbox.wait(3)
    inbox.channel.basic_cancel(inbox.tag)
    publish_confirmed(channel, stream, [b"after"])
    inbox.settle()
    assert len(inbox.deliveries) == 3
    inbox.channel.basic_ack(0, multiple=True)
    inbox.settle()


# --- producers with a name -------------------------------------------------------------------


def publish_named(channel: Any, queue: str, name: str, sequences: range) -> None:
    channel.confirm_delivery()
    for sequence in sequences:
        headers = {"x-stream-producer": name, "x-stream-sequence": sequence}
        channel.basic_publish(
            "", queue, f"{name} {sequence}".encode(), pika.BasicProperties(headers=headers)
        )


@pytest.mark.usefixtures("only_convoy")
@pytest.mark.parametrize("kind", ["stream", "quorum"])
def test_repeats_of_a_named_producer_are_dropped(
    channel: Any, names: Names, open_connection: Opened, kind: str
) -> None:
    queue = names.queue()
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
    publish_named(channel, queue, "a", range(1, 6))
    publish_named(open_connection(1).channel(), queue, "a", range(3, 9))
    publish_named(open_connection(2).channel(), queue, "b", range(1, 4))
    publish_confirmed(channel, queue, [b"plain", b"plain"])
    publish_named(channel, queue, "a", range(1, 10))
    expected = [f"a {n}" for n in range(1, 9)] + [f"b {n}" for n in range(1, 4)]
    expected += ["plain", "plain", "a 9"]
    inbox = read(channel, queue, "first" if kind == "stream" else None)
    assert [body.decode() for body in inbox.wait(len(expected))] == expected
    inbox.settle()
    assert len(inbox.deliveries) == len(expected)


@pytest.mark.usefixtures("only_convoy")
def test_a_producer_that_does_not_wait_is_confirmed_for_all(peer: RawPeer, names: Names) -> None:
    queue = names.queue()
    peer.handshake().open_channel(1)
    declare = spec.Queue.Declare(queue=queue, durable=True, arguments=STREAM)
    peer.call(1, declare, spec.Queue.DeclareOk)
    peer.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    for sequence in (*range(200), *range(100, 300)):
        properties = spec.BasicProperties(
            headers={"x-stream-producer": "p", "x-stream-sequence": sequence}
        )
        encoded = b"".join(properties.encode())
        peer.publish(1, b"%d" % sequence, routing_key=queue, properties=encoded)
    confirmed = 0
    while confirmed < 400:
        ack = peer.expect(spec.Basic.Ack, channel=1)
        assert ack.multiple or ack.delivery_tag == confirmed + 1
        confirmed = ack.delivery_tag
    peer.call(1, spec.Basic.Qos(prefetch_count=1000), spec.Basic.QosOk)
    consume = spec.Basic.Consume(queue=queue, arguments={OFFSET: "first"})
    peer.call(1, consume, spec.Basic.ConsumeOk)
    for n in range(300):
        peer.expect(spec.Basic.Deliver, channel=1)
        assert peer.content()[1] == b"%d" % n


@pytest.mark.usefixtures("only_convoy")
def test_a_producer_header_that_makes_no_sense_is_refused(channel: Any, stream: str) -> None:
    headers = {"x-stream-producer": "p", "x-stream-sequence": "one"}
    channel.confirm_delivery()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish("", stream, b"x", pika.BasicProperties(headers=headers))
    assert caught.value.reply_code == 406
    assert "header 'x-stream-sequence' must be an integer" in caught.value.reply_text


# --- readers with a name ---------------------------------------------------------------------


@pytest.mark.usefixtures("only_convoy")
def test_a_named_reader_goes_on_where_it_was(
    channel: Any, stream: str, open_connection: Opened
) -> None:
    bodies = numbered(100)
    publish_confirmed(channel, stream, bodies)
    name = {"x-stream-consumer-name": "billing"}
    first = read(channel, stream, "first", arguments=name)
    first.wait(100)
    first.channel.basic_ack(first.deliveries[59][0].delivery_tag, multiple=True)
    # Out of order: what is not acknowledged without a gap has not been done.
    first.channel.basic_ack(first.deliveries[80][0].delivery_tag)
    first.channel.basic_cancel(first.tag)
    first.channel.close()
    for node in (1, 2):
        again = read(open_connection(node).channel(), stream, arguments=name)
        assert again.wait(40) == bodies[60:]
        assert offsets(again)[0] == 60
        again.channel.close()
    other = read(channel, stream, "first", arguments={"x-stream-consumer-name": "other"})
    assert other.wait(100) == bodies


# --- refusals --------------------------------------------------------------------------------


@pytest.fixture
def raw_stream(raw_channel: RawPeer, names: Names) -> tuple[RawPeer, str]:
    """A raw peer with channel 1 and a stream."""
    queue = names.queue()
    declare = spec.Queue.Declare(queue=queue, durable=True, arguments=STREAM)
    raw_channel.call(1, declare, spec.Queue.DeclareOk)
    return raw_channel, queue


def qos(peer: RawPeer, **options: Any) -> None:
    peer.call(1, spec.Basic.Qos(prefetch_count=10, **options), spec.Basic.QosOk)


@pytest.mark.rabbitmq_since("4.0")
def test_a_reader_needs_a_prefetch(raw_stream: tuple[RawPeer, str]) -> None:
    peer, queue = raw_stream
    for no_ack in (False, True):
        peer.send(1, spec.Basic.Consume(queue=queue, no_ack=no_ack))
        text = (
            "PRECONDITION_FAILED - consumer prefetch count is not set for stream "
            f"queue '{queue}' in vhost '/'"
        )
        assert_channel_error(peer, 406, text, spec.Basic.Consume)


@pytest.mark.rabbitmq_since("4.0")
def test_a_reader_has_to_acknowledge(raw_stream: tuple[RawPeer, str]) -> None:
    peer, queue = raw_stream
    qos(peer)
    peer.send(1, spec.Basic.Consume(queue=queue, no_ack=True))
    text = (
        "NOT_IMPLEMENTED - automatic acknowledgement not supported by stream "
        f"queue '{queue}' in vhost '/'"
    )
    assert_connection_error(peer, 540, text, spec.Basic.Consume)


@pytest.mark.rabbitmq_since("4.0")
def test_a_reader_cannot_share_its_prefetch(raw_stream: tuple[RawPeer, str]) -> None:
    peer, queue = raw_stream
    qos(peer)
    qos(peer, global_qos=True)
    peer.send(1, spec.Basic.Consume(queue=queue))
    text = f"NOT_IMPLEMENTED - queue '{queue}' in vhost '/' does not support global qos"
    assert_connection_error(peer, 540, text, spec.Basic.Consume)


def test_a_stream_has_no_basic_get(raw_stream: tuple[RawPeer, str]) -> None:
    peer, queue = raw_stream
    peer.send(1, spec.Basic.Get(queue=queue))
    text = (
        f"NOT_IMPLEMENTED - basic.get not supported by stream queues queue '{queue}' in vhost '/'"
    )
    assert_connection_error(peer, 540, text, spec.Basic.Get)


def test_a_stream_cannot_be_purged(raw_stream: tuple[RawPeer, str]) -> None:
    peer, queue = raw_stream
    peer.send(1, spec.Queue.Purge(queue=queue))
    closed = peer.expect(spec.Connection.Close, channel=0)
    assert closed.reply_code == 540


@pytest.mark.parametrize(
    "value", [pytest.param("soon", marks=pytest.mark.rabbitmq_since("4.0")), "3", "1x"]
)
def test_an_offset_that_is_none_is_refused(raw_stream: tuple[RawPeer, str], value: str) -> None:
    peer, queue = raw_stream
    qos(peer)
    peer.send(1, spec.Basic.Consume(queue=queue, arguments={OFFSET: value}))
    text = (
        f"PRECONDITION_FAILED - invalid arg 'x-stream-offset' for queue '{queue}' in vhost '/': "
        f'{{invalid_stream_offset_arg,{{longstr,<<"{value}">>}}}}'
    )
    assert_channel_error(peer, 406, text, spec.Basic.Consume)


@pytest.mark.usefixtures("only_convoy")
@pytest.mark.parametrize("value", [-1, True, None, ["first"]])
def test_offsets_of_other_types_are_refused(raw_stream: tuple[RawPeer, str], value: Any) -> None:
    peer, queue = raw_stream
    qos(peer)
    peer.send(1, spec.Basic.Consume(queue=queue, arguments={OFFSET: value}))
    closed = peer.expect(spec.Channel.Close, channel=1)
    assert closed.reply_code == 406
    assert closed.reply_text.startswith("PRECONDITION_FAILED - invalid arg 'x-stream-offset' for")


def test_a_policy_bounds_a_stream_that_is_in_use(
    cluster: Cluster, channel: Any, stream: str, only_convoy: None
) -> None:
    """Segments of another size first, so that there are some; then a length, which acts at once."""
    path = f"policies/%2F/{stream}"
    size = 50_000
    definition: dict[str, object] = {"stream-max-segment-size-bytes": 2 * size}
    policy = {"pattern": f"^{stream}$", "apply-to": "streams", "definition": definition}
    set_policy(cluster, path, policy)
    try:

        def in_segments() -> bool:
            publish_confirmed(channel, stream, [bytes(size)] * 3)
            return int(api(cluster, "GET", f"queues/%2F/{stream}")["segments"]) > 3

        eventually(in_segments)
        before = int(api(cluster, "GET", f"queues/%2F/{stream}")["messages"])
        definition["max-length-bytes"] = 4 * size
        set_policy(cluster, path, policy)
        eventually(
            lambda: int(api(cluster, "GET", f"queues/%2F/{stream}")["message_bytes"]) <= 4 * size
        )
        row = api(cluster, "GET", f"queues/%2F/{stream}")
        assert before > row["messages"] > 0
        assert row["effective_settings"] == definition
        first = read(channel, stream, "first")
        first.wait(1)
        assert offsets(first)[0] == row["first_offset"] > 0
    finally:
        set_policy(cluster, path, None)
