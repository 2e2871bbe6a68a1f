"""Requests and replies without a reply queue."""

from __future__ import annotations

from typing import Any

import pika.exceptions  # type: ignore[import-untyped]
import pytest
from pika import BasicProperties

from tests.interop.conftest import Names
from tests.interop.helpers import Inbox, eventually, numbered

REPLY_TO = "amq.rabbitmq.reply-to"


@pytest.mark.parametrize("node", [0, 1, 2])
def test_replies_come_back_from_every_node(
    channel: Any, names: Names, open_connection: Any, node: int
) -> None:
    queue = names.queue()
    server = open_connection(node).channel()
    server.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    requests = Inbox(server, queue, auto_ack=True)
    replies = Inbox(channel, REPLY_TO, auto_ack=True)
    for body in numbered(3):
        channel.basic_publish(
            "", queue, body, BasicProperties(reply_to=REPLY_TO, correlation_id=body.decode())
        )
    requests.wait(3)
    for _, properties, body in requests.deliveries:
        assert properties.reply_to.startswith(f"{REPLY_TO}.")
        server.basic_publish(
            "",
            properties.reply_to,
            b"re " + body,
            BasicProperties(correlation_id=properties.correlation_id),
        )
    assert replies.wait(3) == [b"re 0", b"re 1", b"re 2"]
    assert [properties.correlation_id for _, properties, _ in replies.deliveries] == ["0", "1", "2"]


def test_reply_address_can_be_checked_and_late_replies_vanish(
    channel: Any, names: Names, open_connection: Any
) -> None:
    queue = names.queue()
    server = open_connection(1).channel()
    server.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    requests = Inbox(server, queue, auto_ack=True)
    Inbox(channel, REPLY_TO, auto_ack=True)
    channel.basic_publish("", queue, b"question", BasicProperties(reply_to=REPLY_TO))
    requests.wait(1)
    address = requests.deliveries[0][1].reply_to
    server.queue_declare(address, passive=True)
    channel.close()
    server.basic_publish("", address, b"too late")
    eventually(lambda: address_is_gone(server.connection, address))


def address_is_gone(connection: Any, address: str) -> bool:
    """Whether a passive declare of the reply address is refused with 404."""
    try:
        connection.channel().queue_declare(address, passive=True)
    except pika.exceptions.ChannelClosedByBroker as error:
        if error.reply_code == 404:
            return True
        raise
    return False
