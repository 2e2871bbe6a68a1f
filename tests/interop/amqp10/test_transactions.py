"""Transactions over Qpid Proton against the three-node cluster: one queue, sets of queues, and a
leader that is killed between the preparation and the decision."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

proton = pytest.importorskip("proton", reason="Qpid Proton is not there: make test-amqp10")
from proton import (  # noqa: E402
    Delivery,
    Described,
    Message,
    Terminus,
    symbol,
    ulong,
)
from proton.reactor import LinkOption  # noqa: E402
from proton.utils import BlockingConnection  # noqa: E402

from tests.clusters import Cluster  # noqa: E402
from tests.interop.amqp10.test_proton import QUORUM, bodies, dial, known, queue, send, url  # noqa: E402
from tests.interop.conftest import Names  # noqa: E402
from tests.interop.failover import LEADER, declare_on_leader, leader_killed  # noqa: E402
from tests.interop.helpers import api, eventually  # noqa: E402
from tests.patience import PATIENCE_S  # noqa: E402

__all__ = ["dial", "queue"]

ROLLBACK = "amqp:transaction:rollback"
ACCEPTED = 0x24
TRANSACTIONAL = 0x34


class _Coordinator(LinkOption):
    """Has a link lead to the coordinator."""

    def apply(self, link: Any) -> None:
        link.target.type = Terminus.COORDINATOR
        link.target.capabilities.put_object(symbol("amqp:local-transactions"))


class Transaction:
    """A transaction of a blocking client."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.link = connection.create_sender(None, name="txn-ctrl", options=[_Coordinator()])
        self.id = bytes(self._outcome(self._begin("declare", [None]))[1][0])

    def _begin(self, request: str, fields: list[Any]) -> Any:
        body = Described(symbol(f"amqp:{request}:list"), fields)
        return self.link.link.send(Message(body=body))

    def _outcome(self, delivery: Any) -> tuple[int, Any, str | None]:
        """Waits, and returns state, data and condition. A settled delivery is not looked at."""
        self.connection.wait(lambda: delivery.settled, timeout=PATIENCE_S)
        remote = delivery.remote
        condition = None if remote.condition is None else str(remote.condition.name)
        found = int(delivery.remote_state), remote.data, condition
        delivery.settle()
        return found

    def post(self, sender: Any, body: Any) -> tuple[bytes, Any]:
        """Sends a message; returns the transaction and the outcome that it is to have."""
        delivery = sender.link.send(Message(body=body))
        delivery.local.data = [self.id]
        delivery.update(TRANSACTIONAL)
        return tuple(self._outcome(delivery)[1])

    def retire(self, receiver: Any, outcome: int = ACCEPTED) -> Any:
        """Takes a message and gives it an outcome."""
        body = receiver.receive(timeout=PATIENCE_S).body
        delivery = receiver.fetcher.unsettled.pop()
        delivery.local.data = [self.id, Described(ulong(outcome), [])]
        delivery.update(TRANSACTIONAL)
        return body, delivery

    def begin_discharge(self) -> Any:
        """Asks for the commit, and does not wait."""
        delivery = self._begin("discharge", [self.id, False])
        sent = self.connection.conn.transport
        self.connection.wait(lambda: sent.pending() == 0, timeout=PATIENCE_S)
        return delivery

    def answer(self, delivery: Any) -> str | None:
        """Returns the condition with which a discharge is refused, or None."""
        state, _, condition = self._outcome(delivery)
        assert state in (Delivery.ACCEPTED, Delivery.REJECTED)
        return condition

    def discharge(self, *, fail: bool = False) -> str | None:
        """Ends the transaction; see `answer`."""
        return self.answer(self._begin("discharge", [self.id, fail]))


def counts(cluster: Cluster, name: str) -> tuple[int, int]:
    """(ready, unacknowledged)"""
    row = api(cluster, "GET", f"queues/%2F/{name}")
    # Of a queue whose leader has just died nothing is known.
    return row.get("messages_ready", -1), row.get("messages_unacknowledged", -1)


def test_a_commit_publishes_and_settles_together(
    dial: Callable[..., Any], queue: str, names: Names, channel: Any, cluster: Cluster
) -> None:
    other = names.queue("other")
    channel.queue_declare(other, durable=True, arguments=QUORUM)
    connection = dial()
    senders = [connection.create_sender(f"/queues/{name}") for name in (queue, other)]
    receiver = connection.create_receiver(f"/queues/{queue}", credit=2)
    assert send(senders[0], "in 1", "in 2") == [Delivery.ACCEPTED] * 2
    transaction = Transaction(connection)
    assert transaction.post(senders[0], "a")[0] == transaction.id
    assert [transaction.retire(receiver)[0] for _ in range(2)] == ["in 1", "in 2"]
    assert transaction.post(senders[1], "b")[1].descriptor == ACCEPTED
    eventually(lambda: counts(cluster, queue) == (0, 2))
    assert counts(cluster, other) == (0, 0)
    assert transaction.discharge() is None
    receiver.link.flow(1)
    assert bodies(receiver, 1) == ["a"]
    assert bodies(connection.create_receiver(f"/queues/{other}"), 1) == ["b"]
    connection.close()
    eventually(lambda: counts(cluster, queue) == counts(cluster, other) == (0, 0))


def test_a_rollback_leaves_deliveries_with_their_client(
    dial: Callable[..., Any], queue: str, cluster: Cluster
) -> None:
    connection = dial()
    sender = connection.create_sender(f"/queues/{queue}")
    receiver = connection.create_receiver(f"/queues/{queue}", credit=1)
    send(sender, "in")
    transaction = Transaction(connection)
    transaction.post(sender, "never")
    body, delivery = transaction.retire(receiver)
    assert body == "in"
    assert transaction.discharge(fail=True) is None
    delivery.update(Delivery.RELEASED)
    delivery.settle()
    receiver.link.flow(1)
    assert bodies(receiver, 1) == ["in"]
    connection.close()
    eventually(lambda: counts(cluster, queue) == (0, 0))


def test_a_delivery_that_went_back_fails_the_commit(
    dial: Callable[..., Any], queue: str, cluster: Cluster
) -> None:
    connection = dial()
    sender = connection.create_sender(f"/queues/{queue}")
    receiver = connection.create_receiver(f"/queues/{queue}", credit=1)
    send(sender, "in")
    transaction = Transaction(connection)
    transaction.post(sender, "never")
    transaction.retire(receiver)
    receiver.close()
    assert transaction.discharge() == ROLLBACK
    eventually(lambda: counts(cluster, queue) == (1, 0))


@pytest.mark.parametrize("kind", ["classic", "stream"])
def test_queues_of_other_types_are_refused_by_name(
    dial: Callable[..., Any], names: Names, channel: Any, kind: str
) -> None:
    name = names.queue()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind})
    connection = dial()
    sender = connection.create_sender(f"/queues/{name}")
    transaction = Transaction(connection)
    _, outcome = transaction.post(sender, "never")
    condition, text, *_ = outcome.value[0].value
    assert condition == "amqp:not-implemented"
    assert text == f"queue '{name}' in vhost '/' of type {kind} takes no part in transactions"
    assert transaction.discharge() == ROLLBACK


def test_a_transaction_that_nobody_declared(dial: Callable[..., Any], queue: str) -> None:
    transaction = Transaction(dial())
    assert transaction.discharge() is None
    assert transaction.discharge() == "amqp:transaction:unknown-id"


def test_a_home_whose_leader_is_killed_between_preparation_and_decision(
    dial: Callable[..., Any], names: Names, channel: Any, cluster: Cluster
) -> None:
    home, other = names.queue("home"), names.queue("other")
    declare_on_leader(cluster, home)
    channel.queue_declare(other, durable=True, arguments=QUORUM)
    connection = dial(0)
    senders = [connection.create_sender(f"/queues/{name}") for name in (home, other)]
    receiver = connection.create_receiver(f"/queues/{home}", credit=1)
    send(senders[0], "in")
    transaction = Transaction(connection)
    transaction.retire(receiver)
    for sender in senders:
        transaction.post(sender, "out")
    with leader_killed(cluster, True) as strike:
        # The other queue is prepared; nobody decides for the home.
        cluster.kill(LEADER, signal.SIGSTOP)
        delivery = transaction.begin_discharge()
        strike()
        assert transaction.answer(delivery) is None
        for name in (home, other):
            eventually(lambda name=name: sum(counts(cluster, name)) == 1)


def test_a_client_whose_node_is_killed_in_its_commit(
    dial: Callable[..., Any], names: Names, channel: Any, cluster: Cluster
) -> None:
    """Nobody knows the outcome; both queues have the same."""
    home, other = names.queue("home"), names.queue("other")
    declare_on_leader(cluster, home)
    channel.queue_declare(other, durable=True, arguments=QUORUM)
    # Not closed at the end: its node does not answer.
    connection = BlockingConnection(url(cluster, LEADER), PATIENCE_S, allowed_mechs="PLAIN")
    transaction = Transaction(connection)
    for name in (home, other):
        sender = known(lambda name=name: connection.create_sender(f"/queues/{name}"))
        transaction.post(sender, "out")
    with leader_killed(cluster, True) as strike:
        transaction.begin_discharge()
        strike()
        # What is not decided is undone when its time is over.
        marker = dial(0).create_sender(f"/queues/{other}")
        eventually(lambda: send(marker, "later") == [Delivery.ACCEPTED])
        eventually(lambda: sum(counts(cluster, home)) == sum(counts(cluster, other)) - 1)
