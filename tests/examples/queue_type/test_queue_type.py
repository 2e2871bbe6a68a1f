"""A queue type is added in its own folder and with one line: by AMQP, on a real node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.queues import driver
from tests.examples.queue_type.driver import RingDriver
from tests.patience import PATIENCE_S
from tests.process_state import registries_restored
from tests.running import Nodes

RING = {"x-queue-type": "ring", "x-ring-size": 2}


@pytest.fixture
def ring() -> Iterator[None]:
    with registries_restored():
        # The registration: in the source this is a line of broker/drivers.py.
        driver.register(RingDriver())
        yield


@pytest.mark.usefixtures("ring")
async def test_a_new_type_is_declared_published_to_and_consumed_from(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes, asyncio.timeout(PATIENCE_S):
        port = nodes.amqp_port()
        await asyncio.to_thread(use_by_amqp, port)
        (row,) = json.loads(await nodes.api("queues/%2F"))
        assert (row["name"], row["type"], row["messages"]) == ("r", "ring", 1)


def use_by_amqp(port: int) -> None:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    channel = connection.channel()
    channel.queue_declare("r", durable=True, arguments=RING)
    channel.confirm_delivery()
    for body in (b"oldest", b"older", b"new"):
        channel.basic_publish("", "r", body)
    # Two were kept. One goes back, and comes again.
    method, _, body = channel.basic_get("r")
    assert (body, method.redelivered, method.message_count) == (b"older", False, 1)
    channel.basic_reject(method.delivery_tag, requeue=True)
    channel.basic_qos(prefetch_count=1)
    found = []
    for method, _, body in channel.consume("r", inactivity_timeout=PATIENCE_S):
        assert method is not None
        found.append((body, method.redelivered))
        channel.basic_ack(method.delivery_tag)
        if len(found) == 2:
            break
    assert found == [(b"older", True), (b"new", False)]
    channel.cancel()
    channel.basic_publish("", "r", b"left")
    refuse(connection, {**RING, "x-ring-size": 0}, "invalid_ring_size", "q")
    refuse(connection, {**RING, "x-ring-size": 3}, "inequivalent arg 'x-ring-size'")
    # What belongs to this type is foreign to others.
    refuse(connection, {"x-queue-type": "quorum", "x-ring-size": 2}, "rabbit_quorum_queue", "q")
    connection.close()


def refuse(
    connection: pika.BlockingConnection, arguments: dict[str, object], text: str, name: str = "r"
) -> None:
    """A declaration is refused with a text."""
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match=text):
        connection.channel().queue_declare(name, durable=True, arguments=arguments)
