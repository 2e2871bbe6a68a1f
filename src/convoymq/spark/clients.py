"""Connection of this process to the broker. Workers are pooled by Spark, so connections last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.client import Client
    from convoymq.client.topic_producer import TopicProducer
    from convoymq.spark.options import Connection


def connect(connection: Connection) -> Client:
    """Returns the client, which connects at its first call. Raises OptionError: no such secret."""
    from convoymq.client import pool

    return pool.client(connection.config())


def topic_producer(client: Client, topic: str, name: str | None, pending_max: int) -> TopicProducer:
    """Begins a session of an ordered topic's producer, which ends those of the same name."""
    from convoymq.client import topic_producer

    pending_max = min(pending_max, topic_producer.PENDING_MAX)
    return topic_producer.TopicProducer(client, topic, producer_id=name, pending_max=pending_max)
