"""Arguments of declarations and consumers in a cluster of three nodes: ignored ones are shown."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.faults.test_administration import connect
from tests.faults.traffic import until
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports(__name__)
STRICT_PORT = cluster_ports(__name__)
QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with serving_cluster(tmp_path_factory.mktemp("arguments"), BASE_PORT) as made:
        yield made


@pytest.fixture
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One node that permits nothing deprecated, and takes quorum queues for classic ones."""
    settings = {
        "quorum_queue.property_equivalence.relaxed_checks_on_redeclaration": "true",
        "deprecated_features.permit.transient_nonexcl_queues": "false",
        "deprecated_features.permit.global_qos": "false",
    }
    directory = tmp_path_factory.mktemp("strict")
    with serving_cluster(directory, STRICT_PORT, settings, nodes=1) as made:
        yield made


def rows(cluster: LocalCluster, path: str) -> Any:
    status, body = call(cluster, "GET", path)
    assert status == 200, body
    return body


def test_ignored_arguments_are_logged_and_shown(cluster: LocalCluster) -> None:
    with closing(connect(cluster, "guest", node=1)) as connection:
        channel = connection.channel()
        odd = QUORUM | {"x-delivery-limits": 5}
        channel.queue_declare("misspelt", durable=True, arguments=odd)
        channel.queue_declare("misspelt", durable=True, arguments=odd)
        channel.exchange_declare("odd", "topic", arguments={"alternate": "amq.fanout"})
        channel.basic_consume(
            "misspelt",
            lambda *_: None,
            arguments={"x-cancel-on-ha-failover": True, "x-priority": 3},
        )
        until(lambda: len(rows(cluster, "consumers/%2F")) == 1)
        (consumer,) = rows(cluster, "consumers/%2F")
        assert consumer["ignored_arguments"] == ["x-cancel-on-ha-failover"]
        assert consumer["arguments"] == {"x-cancel-on-ha-failover": True, "x-priority": 3}
        queue = rows(cluster, "queues/%2F/misspelt")
        assert queue["ignored_arguments"] == ["x-delivery-limits"]
        assert rows(cluster, "exchanges/%2F/odd")["ignored_arguments"] == ["alternate"]
        assert rows(cluster, "exchanges/%2F/amq.topic")["ignored_arguments"] == []
    said = [
        line
        for line in cluster.log_file(1).read_text().splitlines()
        if "broker.argument_ignored" in line
    ]
    assert len(said) == 3
    for name in ("x-delivery-limits", "alternate", "x-cancel-on-ha-failover"):
        assert sum(name in line for line in said) == 1


@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_the_prefetch_of_a_running_consumer_changes(cluster: LocalCluster, kind: str) -> None:
    queue, got = f"window {kind}", list[int]()
    with closing(connect(cluster, "guest", node=2)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
        channel.basic_qos(prefetch_count=2)
        channel.basic_consume(queue, lambda *given: got.append(1), consumer_tag="c 1")
        for _ in range(10):
            channel.basic_publish("", queue, b"x")

        def hears(count: int) -> None:
            until(lambda: (connection.process_data_events(0.05), len(got) >= count)[1])
            connection.process_data_events(0.2)
            assert len(got) == count

        hears(2)
        path = f"convoy/consumers/%2F/window%20{kind}/c%201/prefetch"
        status, answer = call(cluster, "PUT", path, {"prefetch_count": 5}, node=1)
        assert (status, answer) == (200, {"consumers": 1, "prefetch_count": 5})
        hears(5)

        def listed() -> list[int]:
            found = rows(cluster, "consumers/%2F")
            return [row["prefetch_count"] for row in found if row["consumer_tag"] == "c 1"]

        until(lambda: listed() == [5], "the list has another prefetch")
        url = f"http://127.0.0.1:{cluster.nodes[2].http_port}"
        command = [sys.executable, "-m", "convoymq.cli", "queues", "set_prefetch"]
        subprocess.run([*command, "--url", url, queue, "c 1", "0"], check=True)
        hears(10)
        assert call(cluster, "PUT", path, {"prefetch_count": -1})[0] == 400
        assert call(cluster, "PUT", path.replace("c%201", "none"), {"prefetch_count": 1})[0] == 404


@pytest.mark.parametrize("by", ["consumer", "queue", "policy"])
def test_a_consumer_that_acknowledges_nothing_is_cancelled(cluster: LocalCluster, by: str) -> None:
    queue = f"late {by}"
    limit = {"x-consumer-timeout": 1_000}
    with closing(connect(cluster, "guest", node=3)) as connection:
        channel = connection.channel()
        arguments = QUORUM | (limit if by == "queue" else {})
        channel.queue_declare(queue, durable=True, arguments=arguments)
        if by == "policy":
            policy = {"pattern": f"^{queue}$", "definition": {"consumer-timeout": 1_000}}
            until(lambda: call(cluster, "PUT", "policies/%2F/late", policy)[0] in (201, 204))
        cancelled: list[object] = []
        channel.add_on_cancel_callback(cancelled.append)
        first, again = list[Any](), list[Any]()
        channel.basic_consume(
            queue,
            lambda _channel, method, *_: first.append(method),
            arguments=limit if by == "consumer" else {},
        )
        channel.basic_publish("", queue, b"x")
        until(lambda: (connection.process_data_events(0.05), bool(first))[1])
        until(lambda: (connection.process_data_events(0.05), bool(cancelled))[1])
        # A late acknowledgement is no error, and another consumer has the message.
        channel.basic_ack(first[0].delivery_tag)
        other = connection.channel()
        other.basic_consume(queue, lambda _c, method, *_: again.append(method), auto_ack=True)
        until(lambda: (connection.process_data_events(0.05), bool(again))[1])
        assert (len(first), again[0].redelivered, channel.is_open) == (1, True, True)


@pytest.mark.parametrize("node", [1, 2, 3])
def test_a_quorum_queue_is_deleted_on_condition(cluster: LocalCluster, node: int) -> None:
    queue = f"condition {node}"
    with closing(connect(cluster, "guest", node=node)) as connection:

        def refusal(**conditions: bool) -> str:
            with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
                connection.channel().queue_delete(queue, **conditions)
            return str(refused.value.reply_text)

        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments=QUORUM)
        channel.confirm_delivery()
        channel.basic_publish("", queue, b"x")
        channel.basic_consume(queue, lambda *given: None, consumer_tag="c")
        subject = f"PRECONDITION_FAILED - queue '{queue}' in vhost '/'"
        assert refusal(if_unused=True) == f"{subject} in use"
        channel.basic_cancel("c")
        channel.close()
        assert refusal(if_empty=True) == f"{subject} not empty"
        channel = connection.channel()
        channel.queue_purge(queue)
        channel.queue_delete(queue, if_unused=True, if_empty=True)
        with pytest.raises(pika.exceptions.ChannelClosedByBroker):
            channel.queue_declare(queue, passive=True)


def test_switches_of_deprecated_features_and_relaxed_redeclaration(strict: LocalCluster) -> None:
    assert {row["name"]: row["state"] for row in rows(strict, "deprecated-features")} == {
        "global_qos": "denied",
        "transient_nonexcl_queues": "denied",
    }
    with closing(connect(strict, "guest", node=1)) as connection:
        channel = connection.channel()
        channel.queue_declare("moved", durable=True, arguments=QUORUM | {"x-delivery-limit": 5})
        # As a client of classic queues still declares it, with other flags.
        classic = {"x-queue-type": "classic", "x-queue-mode": "lazy"}
        channel.queue_declare("moved", durable=False, auto_delete=True, arguments=classic)
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
            channel.queue_declare("moved", arguments=classic | {"x-message-ttl": 5})
        assert refused.value.reply_text == (
            "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'moved' in vhost '/':"
            " received the value '5' of type 'signedint' but current is none"
        )
        channel = connection.channel()
        channel.queue_declare("", exclusive=True)
        # Each consumer has the limit for itself: together they get more than one message.
        channel.basic_qos(prefetch_count=1, global_qos=True)
        for _ in range(2):
            channel.basic_publish("", "moved", b"x")
        got: list[bytes] = []
        for _ in range(2):
            channel.basic_consume("moved", lambda *given: got.append(given[3]))
        until(lambda: (connection.process_data_events(0.05), len(got) == 2)[1])
    channel = connect(strict, "guest", node=1).channel()
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
        channel.queue_declare("transient", durable=False)
    assert closed.value.reply_code == 541
    assert closed.value.reply_text.startswith(
        "INTERNAL_ERROR - Feature `transient_nonexcl_queues` is deprecated."
    )
    status, body = call(strict, "PUT", "queues/%2F/transient", {"durable": False})
    assert (status, "transient_nonexcl_queues" in body["reason"]) == (400, True)
