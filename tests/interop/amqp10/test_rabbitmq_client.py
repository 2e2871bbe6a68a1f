"""RabbitMQ's own Python client of AMQP 1.0 against the three-node cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clusters import Cluster
from tests.interop.conftest import Names

rabbitmq = pytest.importorskip(
    "rabbitmq_amqp_python_client", reason="Qpid Proton is not there: make test-amqp10"
)
COUNT = 50


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[Any]:
    """A connection to the first node."""
    environment = rabbitmq.Environment(uri=cluster.uris[0].replace("localhost", "127.0.0.1"))
    opened = environment.connection()
    opened.dial()
    yield opened
    environment.close()


@pytest.fixture
def queue(cluster: Cluster, channel: Any, names: Names) -> str:
    name = names.queue()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    return name


@pytest.fixture
def channel(cluster: Cluster) -> Iterator[Any]:
    """A channel of pika: queues are declared by it."""
    from benchmarks.systems import connect

    opened = connect(cluster.uris[0])
    yield opened.channel()
    opened.close()


class Handler(rabbitmq.AMQPMessagingHandler):  # type: ignore[misc, name-defined]
    """Settles messages in turn: every fifth is first given back."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: list[Any] = []
        self.requeued: set[Any] = set()

    def on_amqp_message(self, event: Any) -> None:
        body = rabbitmq.Converter.bytes_to_string(event.message.body)
        if int(body) % 5 == 0 and body not in self.requeued:
            self.requeued.add(body)
            self.delivery_context.requeue(event)
            return
        self.accepted.append(body)
        self.delivery_context.accept(event)
        if len(self.accepted) == COUNT:
            raise KeyboardInterrupt


def test_messages_are_published_and_settled(connection: Any, queue: str) -> None:
    address = rabbitmq.AddressHelper.queue_address(queue)
    publisher = connection.publisher(address)
    for number in range(COUNT):
        body = rabbitmq.Converter.string_to_bytes(str(number))
        outcome = publisher.publish(rabbitmq.Message(body=body))
        assert outcome.remote_state == rabbitmq.OutcomeState.ACCEPTED
    publisher.close()
    handler = Handler()
    consumer = connection.consumer(address, message_handler=handler)
    with pytest.raises(KeyboardInterrupt):
        consumer.run()
    consumer.close()
    assert sorted(map(int, handler.accepted)) == list(range(COUNT))


def test_what_has_no_route_is_released(connection: Any) -> None:
    address = rabbitmq.AddressHelper.exchange_address("amq.direct", "nothing here")
    publisher = connection.publisher(address)
    with pytest.raises(Exception, match=str(int(rabbitmq.OutcomeState.RELEASED))):
        publisher.publish(rabbitmq.Message(body=b"x"))
    publisher.close()


def test_a_queue_that_is_not_there_is_named(connection: Any) -> None:
    with pytest.raises(Exception, match="no queue 'none'"):
        connection.publisher(rabbitmq.AddressHelper.queue_address("none"))
