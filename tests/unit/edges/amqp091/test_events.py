"""What the AMQP edge logs when it, or what it stands on, has a fault."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from convoymq.edges.acceptor import SharedPorts
from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.edge import AmqpEdge
from convoymq.edges.amqp091.states import State
from convoymq.kernels.connection_buffer import ConnectionBuffer, Outbox
from convoymq.model.errors import InvariantViolated, Unavailable
from convoymq.queues.interface import Delivery
from tests.loop_faults import loop_faults
from tests.sockets import full
from tests.unit.edges.amqp091.fakes import Client, FakeBroker


async def broken(*_arguments: Any, **_more: Any) -> None:
    raise RuntimeError("a fault")


@pytest.mark.provokes("amqp.authentication_failed")
async def test_a_fault_at_login(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "authenticate", broken)
    client = Client(broker)
    client.send_bytes(spec.PROTOCOL_HEADER)
    await client.heard()
    close = await client.ask(
        0, spec.ConnectionStartOk(mechanism="PLAIN", response=b"\0guest\0guest")
    )
    assert close.reply_code == 541


@pytest.mark.provokes("amqp.method_failed")
async def test_a_fault_in_a_method(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.broker, "declare_queue", broken)
    assert (await client.ask(1, spec.QueueDeclare(queue="q"))).reply_code == 541


@pytest.mark.provokes("amqp.input_failed")
async def test_a_fault_in_the_input(client: Client) -> None:
    try:
        raise RuntimeError("a fault")
    except RuntimeError:
        client.connection.failed()
    (close,) = await client.methods()
    assert close.reply_code == 541


@pytest.mark.provokes("amqp.socket_failed")
async def test_an_error_of_a_socket(client: Client) -> None:
    client.connection.input_failed(errno.ETIMEDOUT)
    assert client.state is State.CLOSED


@pytest.mark.provokes("amqp.channel_closed")
async def test_a_refused_method(client: Client) -> None:
    answer = await client.ask(1, spec.QueueDeclare(queue="nowhere", passive=True))
    assert answer.reply_code == 404


@pytest.mark.provokes("amqp.batch_damaged")
async def test_a_message_that_cannot_be_read_back(client: Client) -> None:
    queue = await client.declare("q")
    assert isinstance(
        await client.ask(1, spec.BasicConsume(queue="q", consumer_tag="t")), spec.BasicConsumeOk
    )
    consumer = queue.consumers[0]
    delivery = Delivery(consumer.spec.number, 0, b"no commands", 0, 0, 1, 0, 0)
    consumer.client.events.on_deliver(consumer.client, delivery)
    (close,) = await client.methods()
    assert close.reply_code == 541


@pytest.mark.provokes("amqp.exclusive_queues_left")
async def test_exclusive_queues_without_a_majority(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(owner: int) -> None:
        raise Unavailable("no majority")

    monkeypatch.setattr(client.broker, "connection_closed", refused)
    client.connection.eof()
    await client.settled()


@pytest.mark.provokes("amqp.accept_failed")
async def test_a_port_goes_on_after_faults(broker: FakeBroker) -> None:
    made: Any = broker
    edge = AmqpEdge(broker=made, settings=AmqpConfig(), outbox=Outbox())
    ports = SharedPorts([edge])
    await ports.listen("localhost", 0)
    faults = loop_faults()
    edge.spawn(broken())
    ports.spawn(broken())
    full(ports._acceptors[0])
    while len(faults) < 2:
        await Client(broker).settled()
    ports.stop()
    await edge.stop()


async def test_a_violated_invariant_is_no_fault_of_a_method(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this node believes is wrong: its process ends."""

    def violated(*_arguments: Any) -> None:
        raise InvariantViolated("a test says so")

    monkeypatch.setattr(client.connection, "_dispatch", violated)
    with pytest.raises(InvariantViolated):
        client.send(1, spec.BasicQos())


@pytest.mark.parametrize("where", ["authenticate", "declare_queue", "open_channel"])
async def test_a_violated_invariant_in_a_task_of_a_connection_ends_the_process(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Not one client with 541, as if the others could go on."""

    async def violated(*_arguments: Any, **_more: Any) -> None:
        raise InvariantViolated("a test says so")

    faults = loop_faults()
    client = Client(broker)
    if where == "authenticate":
        monkeypatch.setattr(broker, "authenticate", violated)
        client.send_bytes(spec.PROTOCOL_HEADER)
        client.send(0, spec.ConnectionStartOk(mechanism="PLAIN", response=b"\0guest\0guest"))
    else:
        await client.open()
        await client.channel()
        if where == "declare_queue":
            monkeypatch.setattr(broker, "declare_queue", violated)
            client.send(1, spec.QueueDeclare(queue="q"))
        else:
            client.connection.within_limits(violated(), 0, spec.ChannelOpen())
    await client.settled()
    assert [type(error) for error in faults] == [InvariantViolated]
    assert not any(isinstance(each, spec.ConnectionClose) for each in await client.methods())


@pytest.mark.provokes("amqp.output_failed")
async def test_a_fault_in_the_output_is_told_and_ends_the_connection(client: Client) -> None:
    client.connection.on_flush_failed(RuntimeError("a fault"))
    (close,) = await client.methods()
    assert close.reply_code == 541
    client.connection.on_flush_failed(RuntimeError("again"))
    assert client.state is State.CLOSED


def test_a_connection_that_fails_when_it_is_flushed_fails_alone() -> None:
    class Owner:
        def __init__(self, *, fails: bool) -> None:
            self.fails = fails
            self.heard: list[str] = []

        def on_output(self) -> None:
            if self.fails:
                raise RuntimeError("a fault")
            self.heard.append("output")

        def on_flush_failed(self, error: Exception) -> None:
            self.heard.append(str(error))

    outbox = Outbox()
    owners = [Owner(fails=number == 1) for number in range(3)]
    for owner in owners:
        ConnectionBuffer(owner, outbox).send_bytes(b"x")
    outbox.flush()
    assert [owner.heard for owner in owners] == [["output"], ["a fault"], ["output"]]
