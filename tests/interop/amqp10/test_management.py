"""RabbitMQ's own Python client declares by the node /management, against the three-node cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import eventually

rabbitmq = pytest.importorskip(
    "rabbitmq_amqp_python_client", reason="it needs Qpid Proton, which has no wheel for Linux"
)
from rabbitmq_amqp_python_client.exceptions import ValidationCodeException  # noqa: E402

COUNT = 5


@pytest.fixture
def dial(cluster: Cluster) -> Iterator[Callable[..., Any]]:
    """Opens connections: `dial(node, login)`."""
    environments: list[Any] = []

    def one(node: int = 0, login: str = "guest:guest") -> Any:
        uri = cluster.uris[node].replace("localhost", "127.0.0.1")
        environments.append(rabbitmq.Environment(uri=uri.replace("guest:guest", login)))
        opened = environments[-1].connection()
        opened.dial()
        return opened

    yield one
    for each in environments:
        with suppress(Exception):
            each.close()


def publish(connection: Any, address: str, count: int) -> None:
    publisher = connection.publisher(address)
    for number in range(count):
        body = rabbitmq.Converter.string_to_bytes(str(number))
        outcome = publisher.publish(rabbitmq.Message(body=body))
        assert outcome.remote_state == rabbitmq.OutcomeState.ACCEPTED
    publisher.close()


class Handler(rabbitmq.AMQPMessagingHandler):  # type: ignore[misc, name-defined]
    """Accepts messages."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[Any] = []

    def on_amqp_message(self, event: Any) -> None:
        self.bodies.append(rabbitmq.Converter.bytes_to_string(event.message.body))
        self.delivery_context.accept(event)
        if len(self.bodies) == COUNT:
            raise KeyboardInterrupt


def test_everything_from_declaration_to_deletion(dial: Callable[..., Any], names: Names) -> None:
    connection = dial()
    management = connection.management()
    queue, exchange = names.queue(), names.exchange()
    management.declare_exchange(
        rabbitmq.ExchangeSpecification(name=exchange, exchange_type=rabbitmq.ExchangeType.topic)
    )
    management.declare_queue(rabbitmq.QuorumQueueSpecification(name=queue, max_len=1000))
    binding = rabbitmq.ExchangeToQueueBindingSpecification(
        source_exchange=exchange, destination_queue=queue, binding_key="a.#"
    )
    path = management.bind(binding)
    publish(connection, rabbitmq.AddressHelper.exchange_address(exchange, "a.b"), COUNT)
    info = management.queue_info(queue)
    assert (info.name, info.is_durable, info.queue_type) == (queue, True, rabbitmq.QueueType.quorum)
    assert info.arguments == {"x-queue-type": "quorum", "x-max-length": 1000}
    assert info.leader in list(info.members)
    assert len(list(info.members)) == 3
    eventually(lambda: management.queue_info(queue).message_count == COUNT)
    handler = Handler()
    address = rabbitmq.AddressHelper.queue_address(queue)
    consumer = connection.consumer(address, message_handler=handler)
    with pytest.raises(KeyboardInterrupt):
        consumer.run()
    consumer.close()
    assert handler.bodies == [str(number) for number in range(COUNT)]
    publish(connection, address, 3)
    eventually(lambda: management.queue_info(queue).message_count == 3)
    assert management.purge_queue(queue) == 3
    management.unbind(path)
    management.unbind(binding)
    management.delete_queue(queue)
    management.delete_exchange(exchange)
    management.delete_exchange(exchange)
    with pytest.raises(ValidationCodeException, match="404"):
        management.queue_info(queue)
    management.close()


def test_queues_of_every_type_are_declared(dial: Callable[..., Any], names: Names) -> None:
    management = dial().management()
    for type_name, specification in (
        ("classic", rabbitmq.ClassicQueueSpecification),
        ("quorum", rabbitmq.QuorumQueueSpecification),
        ("stream", rabbitmq.StreamSpecification),
    ):
        queue = names.queue(type_name)
        management.declare_queue(specification(name=queue))
        management.declare_queue(specification(name=queue))
        info = management.queue_info(queue)
        assert (info.queue_type.value, info.message_count) == (type_name, 0)
        management.delete_queue(queue)


def test_a_queue_that_differs_is_refused(dial: Callable[..., Any], names: Names) -> None:
    management = dial().management()
    queue = names.queue()
    management.declare_queue(rabbitmq.QuorumQueueSpecification(name=queue))
    with pytest.raises(ValidationCodeException, match="ErrPreconditionFailed"):
        management.declare_queue(rabbitmq.ClassicQueueSpecification(name=queue))
    management.delete_queue(queue)


def test_names_of_any_characters(dial: Callable[..., Any], names: Names) -> None:
    management = dial().management()
    queue = names.queue() + " /?;=&%"
    management.declare_queue(rabbitmq.QuorumQueueSpecification(name=queue))
    path = management.bind(
        rabbitmq.ExchangeToQueueBindingSpecification(
            source_exchange="amq.topic", destination_queue=queue, binding_key="a/b;c"
        )
    )
    management.unbind(path)
    assert management.queue_info(queue).name == queue
    management.delete_queue(queue)


def test_a_missing_permission_leaves_the_session(
    cluster: Cluster, dial: Callable[..., Any], names: Names
) -> None:
    cluster.add_user("reader", configure="^$", write="^$", read=".*")
    try:
        management = dial(login="reader:reader").management()
        with pytest.raises(ValidationCodeException, match="403"):
            management.declare_queue(rabbitmq.QuorumQueueSpecification(name=names.queue()))
        with pytest.raises(ValidationCodeException, match="404"):
            management.queue_info("none")
    finally:
        cluster.delete_user("reader")
