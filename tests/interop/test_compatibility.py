"""Rows of docs/compatibility.md that no other test shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from benchmarks.convoy import ConvoyCluster
from pika import spec  # type: ignore[import-untyped]

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import fetch_all, numbered, publish_confirmed
from tests.patience import PATIENCE_S
from tests.raw_amqp import RawPeer

QUORUM = {"x-queue-type": "quorum"}


def test_no_local_is_ignored(raw_channel: RawPeer, names: Names) -> None:
    """A consumer that does not want what its own connection publishes gets it, as in RabbitMQ."""
    queue = names.queue()
    declare = spec.Queue.Declare(queue=queue, durable=True, arguments=QUORUM)
    raw_channel.call(1, declare, spec.Queue.DeclareOk)
    consume = spec.Basic.Consume(queue=queue, no_local=True, no_ack=True)
    raw_channel.call(1, consume, spec.Basic.ConsumeOk)
    raw_channel.publish(1, b"mine", routing_key=queue)
    assert raw_channel.expect(spec.Basic.Deliver).routing_key == queue
    assert raw_channel.content()[1] == b"mine"


def test_a_passive_declaration_compares_nothing(channel: Any, names: Names) -> None:
    queue, exchange = names.queue(), names.exchange()
    channel.queue_declare(queue, durable=True, arguments=QUORUM | {"x-delivery-limit": 5})
    channel.exchange_declare(exchange, "topic", durable=True)
    other = {"x-queue-type": "classic", "x-max-length": 1}
    found = channel.queue_declare(queue, passive=True, durable=False, arguments=other)
    assert found.method.queue == queue
    channel.exchange_declare(exchange, "fanout", passive=True)


def test_cancelling_an_unknown_consumer_succeeds(channel: Any, names: Names) -> None:
    channel.queue_declare(names.queue(), durable=True, arguments=QUORUM)
    channel.basic_cancel("nobody")
    assert channel.is_open


def test_unbinding_what_is_not_bound_succeeds(channel: Any, names: Names) -> None:
    queue = names.queue()
    channel.queue_declare(queue, durable=True, arguments=QUORUM)
    channel.queue_unbind(queue, "amq.topic", "no.such.key")
    channel.exchange_unbind("amq.fanout", "amq.topic", "neither")
    assert channel.is_open


def test_a_member_without_a_vote_is_not_waited_for(
    cluster: Cluster, channel: Any, names: Names
) -> None:
    """Two voters would need each other: a voter and a member without a vote go on alone."""
    if not isinstance(cluster, ConvoyCluster):
        pytest.skip("it needs the HTTP API of a cluster that the tests have started")
    queue = names.queue()
    channel.queue_declare(
        queue, durable=True, arguments=QUORUM | {"x-quorum-initial-group-size": 1}
    )
    with httpx.Client(
        base_url=f"{cluster.api}/api", auth=("guest", "guest"), timeout=PATIENCE_S
    ) as api:
        answer = api.post(
            f"/queues/quorum/%2F/{queue}/replicas/add",
            json={"node": cluster.node_name(2), "membership": "non_voter"},
        )
        assert answer.is_success, answer.text
        members = api.get(f"/queues/%2F/{queue}").json()["members"]
        assert members == [cluster.node_name(1), cluster.node_name(2)]
    publish_confirmed(channel, queue, numbered(2))
    cluster.kill(1)
    try:
        publish_confirmed(channel, queue, numbered(2, start=2))
    finally:
        cluster.restart(1)
    assert fetch_all(channel, queue) == numbered(4)


def test_a_transient_exchange_survives_its_node(
    cluster: Cluster, open_connection: Callable[[int], Any], names: Names
) -> None:
    """The tree has it: it stays until somebody deletes it. RabbitMQ 4 with Khepri drops it."""
    if cluster.system == "rabbitmq":
        pytest.skip("RabbitMQ's metadata stores differ in this")
    exchange = names.exchange()
    open_connection(1).channel().exchange_declare(exchange, "fanout", durable=False)
    cluster.kill(1)
    cluster.restart(1)
    open_connection(0).channel().exchange_declare(exchange, passive=True)
