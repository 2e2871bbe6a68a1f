"""Rows of the HTTP API about what real clients hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import api, eventually, publish_confirmed


@pytest.mark.parametrize("consuming", [False, True])
def test_queues_of_connections_have_what_rabbitmqs_have(
    cluster: Cluster, connection: Any, names: Names, consuming: bool
) -> None:
    if cluster.system == "rabbitmq":
        pytest.skip("the helper asks ConvoyMQ's HTTP API")
    channel = connection.channel()
    queue = names.queue()
    channel.queue_declare(queue, exclusive=True)
    publish_confirmed(channel, queue, [b"x" * 10, b"x" * 5])
    if consuming:
        channel.basic_qos(prefetch_count=5)
        channel.basic_consume(queue, lambda *_: None)

    def held() -> bool:
        row = api(cluster, "GET", f"queues/%2F/{queue}")
        return bool(row.get("messages_unacknowledged") == (2 if consuming else 0))

    eventually(held)
    row = api(cluster, "GET", f"queues/%2F/{queue}")
    assert row["message_bytes"] == 15
    assert row["message_bytes_ready"] == (0 if consuming else 15)
    assert row["message_bytes_unacknowledged"] == (15 if consuming else 0)
    assert row["consumer_capacity"] == (1.0 if consuming else 0.0)
    (owner,) = [
        each
        for each in api(cluster, "GET", "connections")
        if each["name"] == row["owner_pid_details"]["name"]
    ]
    assert {key: owner[key] for key in ("name", "peer_host", "peer_port")} == (
        row["owner_pid_details"]
    )
    assert "owner" not in row
    (listed,) = api(cluster, "GET", f"queues?name={queue}&columns=owner_pid_details.name")
    assert listed == {"owner_pid_details": {"name": owner["name"]}}
