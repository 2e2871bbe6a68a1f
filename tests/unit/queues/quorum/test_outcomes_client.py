"""A client with credit, which says what becomes of messages, here and on a node without a
replica."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.kernels.batch import CommandBuilder, PublishTarget, record
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.values import Symbol, decode, encode
from convoymq.messages.record import content_of, names_of, read_record
from convoymq.model.errors import PreconditionFailed
from convoymq.queues.interface import Delivery, Modification
from convoymq.queues.outcomes import annotations_of, merged, with_headers
from convoymq.queues.quorum.machine import QuorumMachine
from tests.unit.queues.quorum.cluster import NODES, Cluster, publish, spec, tags

EACH = pytest.mark.parametrize("node", NODES)


class Newest(Cluster):
    newest = QuorumMachine.VERSION

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for node in self.nodes.values():
            if node.own is not None:
                node.own.machine.set_version(QuorumMachine.VERSION)


def annotations(**values: str) -> bytes:
    return encode({Symbol(f"x-{name}"): value for name, value in values.items()})


def credits(heard: list[Any]) -> list[tuple[int, int]]:
    return [each[2:] for each in heard if each[0] == "credit"]


@EACH
def test_a_drain_is_answered_behind_its_deliveries(node: int) -> None:
    cluster = Newest()
    client, events = cluster.nodes[node].open()
    client.subscribe(spec(credited=True))
    publish(client, 1, 5)
    cluster.run()
    assert tags(events) == []
    client.grant(1, 2)
    client.grant(1, 10, drain=True)
    cluster.run()
    assert tags(events) == [1, 2, 3, 4, 5]
    assert credits(events.heard) == [(2, 3), (5, 0)]
    assert events.heard[-1][0] == "credit"
    assert not client.is_waiting()


def test_a_grant_that_is_sent_again_counts_once() -> None:
    cluster = Newest()
    client, events = cluster.nodes[2].open()
    client.subscribe(spec(credited=True))
    publish(client, 1, 5)
    cluster.run()
    client.grant(1, 2)
    cluster.leader = None
    cluster.run()
    cluster.leader = 1
    for _ in range(3):
        client.resend(now=True)
    cluster.run()
    assert tags(events) == [1, 2]
    assert credits(events.heard) == [(2, 3)]


@EACH
def test_what_is_said_of_messages_adds_up(node: int) -> None:
    cluster = Newest()
    client, events = cluster.nodes[node].open()
    client.subscribe(spec())
    publish(client, 1, 2)
    cluster.run()
    for said in (annotations(a="1", b="1"), annotations(b="2")):
        last = events.messages[-1][1]
        modification = Modification(annotations=said)
        client.return_(1, (last, last), failed=False, modification=modification)
        cluster.run()
    found, _ = decode(events.said[-1], 0, len(events.said[-1]))
    assert found == {"x-a": "1", "x-b": "2"}
    client.settle(1, (0, 9))
    cluster.run()
    assert not client._annotated._known


@EACH
def test_a_removed_consumer_gives_all_back(node: int) -> None:
    cluster = Newest()
    client, events = cluster.nodes[node].open()
    client.subscribe(spec())
    publish(client, 1, 3)
    cluster.run()
    client.remove(1)
    cluster.run()
    assert events.heard[-1] == ("cancel-ok", 1)
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert machine.backlog.ready() == 3
    assert {run[6] for run in machine.backlog.returned.runs()} == {0}


@EACH
def test_clients_hear_who_is_active(node: int) -> None:
    cluster = Newest(single_active=1)
    client, events = cluster.nodes[node].open()
    client.subscribe(spec(1))
    client.subscribe(spec(2))
    cluster.run()
    client.cancel(1)
    cluster.run()
    heard = [each[1:] for each in events.heard if each[0] == "activity"]
    assert heard in (
        [(1, True), (2, False), (2, True)],
        [(1, False), (1, True), (2, False), (2, True)],
    )


def test_an_older_version_gives_no_credit_and_rejects_what_is_undeliverable() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[2].open()
    client.subscribe(spec(credited=True))
    kind, number, error = events.heard[-1]
    assert (kind, number) == ("subscribed", 1)
    assert isinstance(error, PreconditionFailed)
    client.subscribe(spec(2))
    publish(client, 1, 2)
    cluster.run()
    client.return_(2, (0, 0), failed=False, modification=Modification(undeliverable=True))
    client.return_(2, (1, 1), failed=False, modification=Modification(due_ms=1 << 60))
    client.discard(2, (2, 2), error=encode([Symbol("amqp:internal-error")]))
    cluster.run()
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert machine.backlog.dropped["rejected"] == 2


def test_errors_and_annotations_add_up() -> None:
    said = annotations_of(encode([Symbol("amqp:not-allowed"), "why", None]))
    both = merged(annotations(a="1"), said)
    assert decode(both, 0, len(both))[0] == {
        "x-a": "1",
        "x-opt-rejected-condition": "amqp:not-allowed",
        "x-opt-rejected-description": "why",
    }
    assert merged(both, b"") == both
    large = encode({Symbol("x-a"): "a" * (64 << 10)})
    assert merged(both, large) == both


def test_annotations_are_headers_for_protocols_that_know_no_others() -> None:
    builder = CommandBuilder()
    target = PublishTarget(builder, 0, None)
    for number in range(3):
        target.publish((names_of("", "q"), content_of(Properties(), b"%d" % number)), 1, 0, 0)
    builder.discard_unsent()
    block = bytes(target.pending[0].bytes())
    delivery = Delivery(1, 5, block, 0, 1, 2, 1, 3, annotations(a="v"))
    found = []
    for each in with_headers(delivery):
        read = read_record(record(each.block, each.command, each.first))
        found.append((each.first_id, each.messages, read.body, read.headers.to_plain()))
        assert (each.acquired_count, each.failed_delivery_count, each.annotations) == (1, 3, b"")
    assert found == [(5, 1, b"1", {"x-a": "v"}), (6, 1, b"2", {"x-a": "v"})]
    (damaged,) = with_headers(delivery.upto(1)._replace(annotations=encode({1: 1})))
    assert (damaged.block, damaged.annotations) == (block, b"")
