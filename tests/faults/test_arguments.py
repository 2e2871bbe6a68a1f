"""Arguments of declarations and consumers in a cluster of three nodes: ignored ones are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.faults.test_administration import answers, connect, until
from tests.faults.test_policies import call
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports()
STRICT_PORT = cluster_ports()
DEADLINE_S = 25.0
QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("arguments"), 3, BASE_PORT) as made:
        made.wait_ready(DEADLINE_S)
        until(lambda: answers(made))
        yield made


@pytest.fixture
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One node that permits nothing deprecated, and takes quorum queues for classic ones."""
    settings = {
        "quorum_queue.property_equivalence.relaxed_checks_on_redeclaration": "true",
        "deprecated_features.permit.transient_nonexcl_queues": "false",
        "deprecated_features.permit.global_qos": "false",
    }
    with LocalCluster(tmp_path_factory.mktemp("strict"), 1, STRICT_PORT, settings) as made:
        made.wait_ready(DEADLINE_S)
        until(lambda: answers(made))
        yield made


def rows(cluster: LocalCluster, path: str) -> Any:
    status, body = call(cluster, "GET", path)
    assert status == 200, body
    return json.loads(body)


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
