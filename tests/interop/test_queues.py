"""The life of queues as pika sees it: names, exclusivity, auto-delete, counts."""

from __future__ import annotations

import re
from typing import Any

import pika.exceptions  # type: ignore[import-untyped]
import pytest
from pika import spec

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import Inbox, eventually, fetch_all, numbered, publish_confirmed
from tests.raw_amqp import RawPeer

KINDS = ["quorum", "classic"]


def exists(connection: Any, queue: str) -> bool:
    """Whether a passive declare finds the queue; uses a channel of its own."""
    channel = connection.channel()
    try:
        channel.queue_declare(queue, passive=True)
    except pika.exceptions.ChannelClosedByBroker as error:
        if error.reply_code == 404:
            return False
        raise
    channel.close()
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_declare_twice_then_count_purge_and_delete(channel: Any, names: Names, kind: str) -> None:
    queue = names.queue()
    for _ in range(2):
        declared = channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
        assert (declared.method.message_count, declared.method.consumer_count) == (0, 0)
    publish_confirmed(channel, queue, numbered(5))
    Inbox(channel.connection.channel(), queue).wait(5)
    publish_confirmed(channel, queue, [])
    eventually(
        lambda: channel.queue_declare(queue, passive=True).method.consumer_count == 1,
        connection=channel.connection,
    )
    assert channel.queue_declare(queue, passive=True).method.message_count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_purge_and_delete_tell_how_many(channel: Any, names: Names, kind: str) -> None:
    queue = names.queue()
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
    publish_confirmed(channel, queue, numbered(5))
    method, _, _ = channel.basic_get(queue)
    assert channel.queue_purge(queue).method.message_count == 4
    channel.basic_nack(method.delivery_tag)
    eventually(
        lambda: channel.queue_declare(queue, passive=True).method.message_count == 1,
        connection=channel.connection,
    )
    assert channel.queue_delete(queue).method.message_count == 1
    assert not exists(channel.connection, queue)


@pytest.mark.parametrize("kind", KINDS)
def test_queue_is_visible_on_every_node_at_once(
    channel: Any, names: Names, open_connection: Any, kind: str
) -> None:
    others = [open_connection(node).channel() for node in (1, 2)]
    for number in range(10):
        queue = names.queue(str(number))
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
        for other in others:
            other.queue_declare(queue, passive=True)


def test_server_named_queue(channel: Any) -> None:
    queue = channel.queue_declare("", exclusive=True).method.queue
    assert re.fullmatch(r"amq\.gen-[\w-]{22}", queue)
    # An empty name means the queue declared last on this channel.
    channel.queue_bind("", "amq.fanout", "")
    channel.confirm_delivery()
    channel.basic_publish("amq.fanout", "", b"hello")
    method, _, body = channel.basic_get("", auto_ack=True)
    assert method is not None
    assert body == b"hello"


def test_server_named_consumer(raw_channel: RawPeer, names: Names) -> None:
    raw_channel.call(
        1, spec.Queue.Declare(queue=names.queue(), exclusive=True), spec.Queue.DeclareOk
    )
    tags = {
        raw_channel.call(1, spec.Basic.Consume(), spec.Basic.ConsumeOk).consumer_tag
        for _ in range(2)
    }
    assert len(tags) == 2
    assert all(re.fullmatch(r"amq\.ctag-[\w-]{22}", tag) for tag in tags)


def test_exclusive_queue_goes_with_its_connection(
    connection: Any, names: Names, open_connection: Any
) -> None:
    owner = open_connection(1)
    queue = names.queue()
    owner.channel().queue_declare(queue, exclusive=True)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        connection.channel().queue_declare(queue, passive=True)
    assert caught.value.reply_code == 405
    owner.close()
    eventually(lambda: not exists(connection, queue), connection=connection)


def test_a_queue_declared_again_after_its_last_consumer_left_is_a_new_one(
    channel: Any, names: Names
) -> None:
    """Goal: a declare right behind the cancel never gets the old queue that is about to go."""
    queue = names.queue()
    for _ in range(20):
        channel.queue_declare(queue, durable=False, auto_delete=True)
        channel.queue_bind(queue, "amq.direct", routing_key=queue)
        tag = channel.basic_consume(queue, lambda *_: None)
        channel.basic_cancel(tag)
    assert not exists(channel.connection, queue)


def test_auto_delete_queue_goes_with_its_last_consumer(
    connection: Any, channel: Any, names: Names
) -> None:
    queue = names.queue()
    channel.queue_declare(queue, auto_delete=True)
    publish_confirmed(channel, queue, [b"taken by get"])
    assert fetch_all(channel, queue) == [b"taken by get"]
    assert exists(connection, queue), "basic.get is no consumer"
    boxes = [Inbox(channel, queue) for _ in range(2)]
    channel.basic_cancel(boxes[0].tag)
    assert exists(connection, queue)
    channel.basic_cancel(boxes[1].tag)
    eventually(lambda: not exists(connection, queue), connection=connection)


def test_transient_queue_works_from_every_node(
    channel: Any, names: Names, open_connection: Any
) -> None:
    queue = names.queue()
    channel.queue_declare(queue, durable=False, auto_delete=True)
    inbox = Inbox(open_connection(2).channel(), queue, auto_ack=True)
    other = open_connection(1).channel()
    publish_confirmed(other, queue, numbered(10))
    assert inbox.wait(10) == numbered(10)


def test_new_lines_are_taken_out_of_names(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare = spec.Queue.Declare(queue=f"{queue}\r\n", exclusive=True)
    assert raw_channel.call(1, declare, spec.Queue.DeclareOk).queue == queue


def test_channels_of_a_connection_are_independent(connection: Any, names: Names) -> None:
    queue = names.queue()
    good, bad = connection.channel(), connection.channel()
    good.queue_declare(queue, exclusive=True)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        bad.queue_declare("interop-absent", passive=True)
    publish_confirmed(good, queue, [b"still here"])
    assert fetch_all(good, queue) == [b"still here"]


@pytest.mark.parametrize("kind", KINDS)
def test_many_channels_publish_to_one_queue(connection: Any, names: Names, kind: str) -> None:
    queue = names.queue()
    channels = [connection.channel() for _ in range(10)]
    channels[0].queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
    for number, channel in enumerate(channels):
        publish_confirmed(channel, queue, numbered(5, start=number * 5))
    assert fetch_all(channels[0], queue) == numbered(50)


def test_default_type_is_quorum_where_it_fits(channel: Any, names: Names, cluster: Cluster) -> None:
    if cluster.system == "rabbitmq":
        pytest.skip("RabbitMQ's default is classic")
    durable, transient = names.queue("durable"), names.queue("transient")
    channel.queue_declare(durable, durable=True)
    channel.queue_declare(durable, durable=True, arguments={"x-queue-type": "quorum"})
    channel.queue_declare(transient, durable=False, exclusive=True)
    channel.queue_declare(
        transient, durable=False, exclusive=True, arguments={"x-queue-type": "classic"}
    )
