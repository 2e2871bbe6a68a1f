"""Publishing with pika: confirms, returns, transactions, and what a message carries."""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pika.exceptions  # type: ignore[import-untyped]
import pytest
from pika import BasicProperties, spec

from tests.interop.conftest import Names
from tests.interop.helpers import Inbox, eventually, fetch_all, numbered, publish_confirmed
from tests.raw_amqp import RawPeer

KINDS = ["quorum", "classic"]


@pytest.fixture(params=KINDS)
def queue(request: pytest.FixtureRequest, channel: Any, names: Names) -> str:
    """A durable queue of each type in turn."""
    name = names.queue()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": request.param})
    return name


def test_confirmed_messages_are_there_in_order(channel: Any, queue: str) -> None:
    publish_confirmed(channel, queue, numbered(20), properties=BasicProperties(delivery_mode=2))
    assert fetch_all(channel, queue) == numbered(20)


def test_unroutable_message_is_returned_before_its_confirm(raw_channel: RawPeer) -> None:
    raw_channel.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    raw_channel.publish(1, b"lost", routing_key="interop-absent", mandatory=True)
    returned = raw_channel.expect(spec.Basic.Return, channel=1)
    assert (returned.reply_code, returned.reply_text) == (312, "NO_ROUTE")
    assert (returned.exchange, returned.routing_key) == ("", "interop-absent")
    assert raw_channel.content()[1] == b"lost"
    assert raw_channel.expect(spec.Basic.Ack, channel=1).delivery_tag == 1


def test_unroutable_message_without_mandatory_is_confirmed(raw_channel: RawPeer) -> None:
    raw_channel.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    raw_channel.publish(1, b"lost", routing_key="interop-absent")
    assert raw_channel.expect(spec.Basic.Ack, channel=1).delivery_tag == 1


def test_pika_raises_for_an_unroutable_message(channel: Any) -> None:
    channel.confirm_delivery()
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish("", "interop-absent", b"lost", mandatory=True)


def test_confirms_cover_every_tag_once(raw_channel: RawPeer, queue: str) -> None:
    raw_channel.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    raw_channel.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    for body in numbered(100):
        raw_channel.publish(1, body, routing_key=queue)
    confirmed: list[int] = []
    while len(confirmed) < 100:
        ack = raw_channel.expect(spec.Basic.Ack, channel=1)
        open_tags = [tag for tag in range(1, 101) if tag not in confirmed]
        covered = [
            tag
            for tag in open_tags
            if tag == ack.delivery_tag or (ack.multiple and tag <= ack.delivery_tag)
        ]
        assert covered, "a confirm for nothing"
        confirmed += covered
    assert sorted(confirmed) == list(range(1, 101))


@pytest.mark.parametrize("size", [0, 1, 131_064, 131_065, 1_000_000])
def test_body_of_any_size(channel: Any, queue: str, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    publish_confirmed(channel, queue, [body])
    assert fetch_all(channel, queue) == [body]


def test_empty_body_at_wire_level(raw_channel: RawPeer, queue: str) -> None:
    raw_channel.publish(1, b"", routing_key=queue)
    raw_channel.publish(1, b"next", routing_key=queue)
    raw_channel.call(1, spec.Basic.Consume(queue=queue, no_ack=True), spec.Basic.ConsumeOk)
    bodies = []
    for _ in range(2):
        raw_channel.expect(spec.Basic.Deliver, channel=1)
        bodies.append(raw_channel.content()[1])
    assert bodies == [b"", b"next"]


def test_every_property_comes_back(
    channel: Any, queue: str, request: pytest.FixtureRequest
) -> None:
    # A quorum queue refuses an expiration.
    kind = request.node.callspec.params["queue"]
    sent = BasicProperties(
        content_type="application/json",
        content_encoding="gzip",
        headers={
            "text": "grüße",
            "number": 7,
            "negative": -7,
            "large": 2**40,
            "yes": True,
            "nothing": None,
            "bytes": b"\xff\x00",
            "decimal": Decimal("3.14"),
            "time": datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC),
            "list": [1, "two", [3], {"four": 5}],
            "table": {"inner": {"deep": "x"}},
        },
        delivery_mode=2,
        priority=3,
        correlation_id="correlation",
        reply_to="reply",
        expiration="600000" if kind == "classic" else None,
        message_id="message",
        timestamp=1_700_000_000,
        type="kind",
        user_id="guest",
        app_id="application",
        cluster_id="cluster",
    )
    channel.confirm_delivery()
    channel.basic_publish("", queue, b"body", sent, mandatory=True)
    _, got, _ = channel.basic_get(queue, auto_ack=True)
    expected, actual = dict(vars(sent)), dict(vars(got))
    sent_headers, got_headers = expected.pop("headers"), actual.pop("headers")
    time_sent, time_got = sent_headers.pop("time"), got_headers.pop("time")
    assert time_got.replace(tzinfo=UTC) == time_sent
    # RabbitMQ 3 adds a count of zero at the first delivery already.
    assert got_headers.pop("x-delivery-count", 0) == 0
    assert got_headers == sent_headers
    assert actual == expected


FIELDS = {
    "t": b"\x01",
    "b": b"\xfe",
    "B": b"\xfe",
    "s": b"\xff\xfe",
    "u": b"\xff\xfe",
    "I": b"\xff\xff\xff\xfe",
    "i": b"\xff\xff\xff\xfe",
    "l": b"\xff" * 8,
    "f": struct.pack(">f", 1.5),
    "d": struct.pack(">d", -2.25),
    "D": b"\x02\x00\x00\x01\x3a",
    "S": b"\x00\x00\x00\x03abc",
    "T": b"\x00\x00\x00\x00\x65\x00\x00\x00",
    "x": b"\x00\x00\x00\x02\xff\x00",
    "F": b"\x00\x00\x00\x04\x01kt\x01",
    "A": b"\x00\x00\x00\x04t\x01t\x00",
    "V": b"",
}


@pytest.mark.parametrize("code", FIELDS)
def test_header_field_keeps_its_type_and_bytes(raw_channel: RawPeer, queue: str, code: str) -> None:
    pair = b"\x03key" + code.encode() + FIELDS[code]
    properties = b"\x20\x00" + struct.pack(">I", len(pair)) + pair
    raw_channel.publish(1, b"x", routing_key=queue, properties=properties)
    raw_channel.call(1, spec.Basic.Consume(queue=queue, no_ack=True), spec.Basic.ConsumeOk)
    raw_channel.expect(spec.Basic.Deliver, channel=1)
    assert raw_channel.content() == (properties, b"x")


def test_committed_messages_appear_and_rolled_back_ones_do_not(channel: Any, queue: str) -> None:
    channel.tx_select()
    channel.basic_publish("", queue, b"dropped")
    channel.tx_rollback()
    channel.basic_publish("", queue, b"kept")
    assert channel.queue_declare(queue, passive=True).method.message_count == 0
    channel.tx_commit()
    other = channel.connection.channel()
    eventually(
        lambda: other.queue_declare(queue, passive=True).method.message_count == 1,
        connection=channel.connection,
    )
    assert fetch_all(other, queue) == [b"kept"]


def test_acknowledgements_wait_for_the_commit(
    channel: Any, queue: str, open_connection: Any
) -> None:
    publish_confirmed(channel, queue, numbered(2))
    connection = open_connection(1)
    consumer = connection.channel()
    consumer.tx_select()
    inbox = Inbox(consumer, queue)
    assert inbox.wait(2) == numbered(2)
    consumer.basic_ack(inbox.deliveries[0][0].delivery_tag)
    consumer.tx_commit()
    consumer.basic_ack(inbox.deliveries[1][0].delivery_tag)
    connection.close()
    again = Inbox(channel, queue, auto_ack=True)
    assert again.wait(1) == [b"1"]
    assert again.redelivered == [True]


def test_message_to_a_deleted_queue_is_confirmed(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    raw_channel.call(
        1,
        spec.Queue.Declare(queue=queue, durable=True, arguments={"x-queue-type": "quorum"}),
        spec.Queue.DeclareOk,
    )
    raw_channel.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    raw_channel.publish(1, b"first", routing_key=queue)
    raw_channel.expect(spec.Basic.Ack)
    raw_channel.call(1, spec.Queue.Delete(queue=queue), spec.Queue.DeleteOk)
    raw_channel.publish(1, b"late", routing_key=queue)
    assert raw_channel.expect(spec.Basic.Ack).delivery_tag == 2
