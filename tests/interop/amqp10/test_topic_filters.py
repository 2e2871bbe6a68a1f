"""Filters of groups of ordered topics, by frames, in the three-node cluster (ADR 0224)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.client import Client, ClientConfig, errors
from convoymq.client.topic_consumer import TopicConsumer
from convoymq.edges.amqp10.performatives import Attach, Detach, Source, Target
from convoymq.messages.amqp10.values import Described, Symbol
from tests.clusters import Cluster
from tests.interop.amqp10.frame_client import IN, FrameClient, message
from tests.interop.conftest import Names
from tests.interop.helpers import api, eventually

KEYS, COUNT = 5, 60
WANTED = [number for number in range(COUNT) if number % 3 == 0]


@contextmanager
def opened(cluster: Cluster, node: int, container: str) -> Iterator[FrameClient]:
    client = FrameClient(cluster, node, container)
    try:
        yield client
    finally:
        client.close()


def attach(client: FrameClient, address: str, expression: str) -> None:
    asked = {Symbol("sql-filter"): Described(Symbol("amqp:sql-filter"), expression)}
    source = Source(address=f"/queues/{address}", filter=asked if expression else None)
    client.send(Attach(name="in", handle=IN, role=True, source=source, target=Target()))
    assert client.hear(Attach).source is None or expression


def refused(cluster: Cluster, address: str, expression: str) -> bool:
    with opened(cluster, 1, "other") as client:
        attach(client, address, expression)
        client.send(Detach(handle=IN, closed=True))
        error = client.hear(Detach).error
    if error is None:
        return False
    assert error.condition == "amqp:precondition-failed"
    assert "consumers of a group have the same filter" in error.description
    return True


def publish(channel: Any, topic: str) -> None:
    channel.confirm_delivery()
    for number in range(COUNT):
        properties = pika.BasicProperties(delivery_mode=2, headers={"n": number})
        channel.basic_publish(topic, f"k{number % KEYS}", b"%d" % number, properties)


def lag(cluster: Cluster, topic: str) -> int:
    rows = api(cluster, "GET", f"topics/%2F/{topic}/groups/g/lag")
    return sum(row["lag"] for row in rows)


def test_a_group_gets_what_its_filter_wants_and_goes_past_the_rest(
    cluster: Cluster, channel: Any, names: Names
) -> None:
    """Two members, of which one dies; each key comes in order, and nothing is left behind."""
    topic = names.queue("topic")
    api(cluster, "PUT", f"topics/%2F/{topic}", {"partitions": 2})
    address = f"{topic}%2Fg"
    got: list[int] = []
    with opened(cluster, 0, "one") as one:
        attach(one, address, "n % 3 = 0")
        one.credit(1)
        publish(channel, topic)
        with opened(cluster, 2, "two") as two:
            attach(two, address, "n % 3 = 0")
        for taken in range(len(WANTED)):
            ((transfer, payload),) = one.deliveries(1)
            assert transfer.delivery_id is not None
            got.append(next(n for n in WANTED if payload.endswith(message(b"%d" % n))))
            one.accept(transfer.delivery_id, transfer.delivery_id)
            one.credit(1, taken + 1)
        eventually(lambda: lag(cluster, topic) == 0)
        assert sorted(got) == WANTED
        for key in range(KEYS):
            own = [number for number in got if number % KEYS == key]
            assert own == sorted(own)
        assert refused(cluster, address, "n % 3 = 1")
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
            channel.basic_consume(f"{topic}/g", lambda *_: None)
        assert closed.value.reply_code == 406
        port = urlsplit(cluster.uris[0]).port
        with (
            Client(ClientConfig((f"127.0.0.1:{port}",), spread=False)) as library,
            pytest.raises(errors.ClientError, match="the same filter"),
        ):
            TopicConsumer(library, topic, "g").run(lambda _: None)
    # The members are forgotten when they have left, and the next one may want something else.
    eventually(lambda: not refused(cluster, address, "n % 3 = 1"))
