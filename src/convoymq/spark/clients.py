"""Connection of this process to the broker. Workers are pooled by Spark, so connections last."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.client import Client
    from convoymq.client.topic_producer import TopicProducer
    from convoymq.rocketmq.client.blocking import Blocking
    from convoymq.spark.options import Connection

GROUP = "convoymq_spark"
"""Consumer group of reads that have none."""
_rocket: dict[tuple[int, Connection, str], Blocking] = {}


def connect(connection: Connection) -> Client:
    """Returns the client, which connects at its first call. Raises OptionError: no such secret."""
    from convoymq.client import pool

    return pool.client(connection.config())


def topic_producer(client: Client, topic: str, name: str | None, pending_max: int) -> TopicProducer:
    """Begins a session of an ordered topic's producer, which ends those of the same name."""
    from convoymq.client import topic_producer

    pending_max = min(pending_max, topic_producer.PENDING_MAX)
    return topic_producer.TopicProducer(client, topic, producer_id=name, pending_max=pending_max)


def rocket(connection: Connection, group: str | None) -> Blocking:
    """Returns this process's client of RocketMQ's brokers. Raises OptionError: no such secret."""
    from convoymq.rocketmq.client.blocking import Blocking

    name = group or GROUP
    key = (os.getpid(), connection, name)
    if key not in _rocket:
        _rocket[key] = Blocking(
            ";".join(connection.namesrv), name, connection.account,
            tls=connection.rocket_tls(), timeout_s=connection.timeout_ms / 1000,
        )  # fmt: skip
    return _rocket[key]
