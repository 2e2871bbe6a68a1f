"""Consumers of a queue that was declared just before, at another node."""

from __future__ import annotations

from contextlib import closing

import pytest
from benchmarks.systems import connect

from tests.clusters import Cluster
from tests.interop.amqp10.frame_client import FrameClient

DECLARATIONS = 15
"""A declaration is answered some time before all nodes have the queue's first entries."""


@pytest.mark.parametrize("members", [1, 3])
def test_a_consumer_at_another_node_has_credit_at_once(cluster: Cluster, members: int) -> None:
    """With a replica beside it and without."""
    arguments = {"x-queue-type": "quorum", "x-quorum-initial-group-size": members}
    with connect(cluster.uris[0]) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number in range(DECLARATIONS):
            queue = f"new.{members}.{number}"
            channel.queue_declare(queue, durable=True, arguments=arguments)
            with closing(FrameClient(cluster, 2, "in")) as consumer:
                consumer.receive(queue, 10)
                channel.basic_publish("", queue, b"m")
                (transfer, _), *_ = consumer.deliveries(1)
                assert transfer.delivery_id == 0
            channel.queue_delete(queue)
