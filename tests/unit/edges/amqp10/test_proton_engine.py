"""Qpid Proton's engine, without sockets, as the other end of a connection: another implementation
of the codec, the windows and the credit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.unit.edges.amqp10.fakes import Client, FakeBroker

proton = pytest.importorskip("proton", reason="Qpid Proton is not there: make test-amqp10")


class Peer:
    """A connection of Proton, and ours."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.client = Client(broker)
        self.transport = proton.Transport()
        sasl = self.transport.sasl()
        sasl.allow_insecure_mechs = True
        sasl.allowed_mechs("PLAIN")
        self.connection = proton.Connection()
        self.connection.container = "proton"
        self.connection.user, self.connection.password = "guest", "guest"
        self.transport.bind(self.connection)
        self.connection.open()

    async def talk(self) -> None:
        """Passes bytes on until both have no more bytes."""
        for _ in range(40):
            self._write()
            output = await self._output()
            while output:
                size = min(len(output), self.transport.capacity())
                self.transport.push(output[:size])
                output = output[size:]
                self._write()

    def _write(self) -> None:
        while (pending := self.transport.pending()) > 0:
            data = self.transport.peek(pending)
            self.transport.pop(len(data))
            self.client.write(data)

    async def _output(self) -> bytes:
        await asyncio.sleep(0)
        for queue in self.broker.queues.values():
            queue.round()
        shell = self.client.shell
        shell.output += self.client.connection.take_output()
        data, shell.output = bytes(shell.output), bytearray()
        return data


@pytest.fixture
async def peer(broker: FakeBroker) -> AsyncIterator[Peer]:
    made = Peer(broker)
    await made.talk()
    assert made.connection.state & proton.Endpoint.REMOTE_ACTIVE
    yield made
    made.client.connection.lost()


async def published(peer: Peer, session: Any, *bodies: Any) -> list[Any]:
    """Publishes messages and returns the states of their deliveries."""
    sender = session.sender("out")
    sender.target.address = "/queues/q"
    sender.open()
    await peer.talk()
    found = []
    for number, body in enumerate(bodies):
        delivery = sender.delivery(str(number))
        sender.send(proton.Message(body=body, id=number).encode())
        sender.advance()
        await peer.talk()
        found.append(delivery.remote_state)
        delivery.settle()
    return found


def received(receiver: Any) -> list[Any]:
    """Takes what has come, and accepts it."""
    found = []
    while (delivery := receiver.current) is not None and not delivery.partial:
        message = proton.Message()
        message.decode(receiver.recv(delivery.pending))
        receiver.advance()
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
        found.append(message.body)
    return found


async def test_messages_go_in_and_out(peer: Peer) -> None:
    queue = peer.broker.queue("q")
    session = peer.connection.session()
    session.open()
    bodies = ["a", "b" * 300_000, {"c": [1, 2.5, None]}]
    assert await published(peer, session, *bodies) == [proton.Delivery.ACCEPTED] * 3
    receiver = session.receiver("in")
    receiver.source.address = "/queues/q"
    receiver.open()
    receiver.flow(10)
    await peer.talk()
    assert received(receiver) == bodies
    await peer.talk()
    assert ("settle", 1, [0, 2]) in queue.calls
    receiver.drain(5)
    await peer.talk()
    assert (receiver.credit, receiver.drained()) == (0, 12)
    receiver.close()
    peer.connection.close()
    await peer.talk()
    assert receiver.state & proton.Endpoint.REMOTE_CLOSED
    assert peer.connection.state & proton.Endpoint.REMOTE_CLOSED
    assert peer.connection.remote_condition is None
    assert peer.transport.condition is None


async def test_a_refused_link_leaves_the_session_alone(peer: Peer) -> None:
    session = peer.connection.session()
    session.open()
    receiver = session.receiver("in")
    receiver.source.address = "/queues/none"
    receiver.open()
    await peer.talk()
    assert receiver.remote_condition.name == "amqp:not-found"
    assert receiver.remote_condition.description == "no queue 'none' in vhost '/'"
    peer.broker.queue("q")
    assert await published(peer, session, "x") == [proton.Delivery.ACCEPTED]
