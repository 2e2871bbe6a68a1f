"""What fixtures from 0.4.0 on hold beside `features`: ordered topics, the release of RabbitMQ
that a queue follows, and the age of messages in classic queues.

`fill` puts it into a running cluster and returns what `check` wants to find.
"""

from __future__ import annotations

from typing import Any

import pika  # type: ignore[import-untyped]

from convoymq.cli.cluster import LocalCluster
from tests.faults.topic_traffic import changed, create, open_pids
from tests.faults.traffic import until
from tests.patience import PATIENCE_S

QUORUM = {"x-queue-type": "quorum"}
TOPIC = "changes"
GROUP = f"{TOPIC}/sink"
KEYS = 8
BEFORE, AFTER, DONE = 80, 40, 24
"""Messages before the split and behind it; those that the group has acknowledged."""
PARKED = 30
"""The message that the group has parked, with those of its key behind it."""
YEARS_MS = 300_000_000_000
SOON_MS = 1_000
NEWER_VHOST = "newer"


def fill(cluster: LocalCluster, channel: Any, newer: Any, http: Any) -> dict[str, Any]:
    """Fills a cluster.

    Args:
        channel: with confirms, on virtual host `/`. newer: on NEWER_VHOST, which follows 4.3.
    """
    create(cluster, TOPIC, 2)
    for number in range(BEFORE):
        _send(channel, TOPIC, _key(number), number)
    channel.basic_qos(prefetch_count=1)
    for number, (method, _, content) in enumerate(
        channel.consume(GROUP, inactivity_timeout=PATIENCE_S)
    ):
        assert method is not None, f"{number} messages came"
        if int(content) == PARKED:
            channel.basic_reject(method.delivery_tag, requeue=False)
        else:
            channel.basic_ack(method.delivery_tag)
        if number >= DONE and _parked(cluster, http):
            break
    channel.cancel()
    split = open_pids(cluster, TOPIC)[0]
    changed(cluster, TOPIC, "split", pid=split)
    for number in range(BEFORE, BEFORE + AFTER):
        _send(channel, TOPIC, _key(number), number)
    for where in (channel, newer):
        where.queue_declare("guided", durable=True, arguments=QUORUM)
        _send(where, "", "guided", 0)
        where.basic_nack(where.basic_get("guided")[0].delivery_tag, requeue=True)
    channel.queue_declare("aged", durable=True, arguments={"x-queue-type": "classic"})
    _send(channel, "", "aged", 0, expiration=str(SOON_MS))
    _send(channel, "", "aged", 1, expiration=str(YEARS_MS))
    return {
        "route": http(cluster, "GET", f"topics/%2F/{TOPIC}/route"),
        "parked": _parked(cluster, http),
    }


def check(
    cluster: LocalCluster, channel: Any, newer: Any, http: Any, expected: dict[str, Any]
) -> None:
    """Asserts that all is there, and that the group goes on in order."""
    shown = ("pid", "lo", "hi")
    route = http(cluster, "GET", f"topics/%2F/{TOPIC}/route")
    assert [[row[name] for name in shown] for row in route] == [
        [row[name] for name in shown] for row in expected["route"]
    ]
    until(lambda: _parked(cluster, http) == expected["parked"], "the parked key is not there")
    _check_order(channel)
    for where, count in ((channel, 1), (newer, None)):
        method, properties, _ = where.basic_get("guided")
        assert method.redelivered
        assert (properties.headers or {}).get("x-delivery-count") == count
        where.basic_ack(method.delivery_tag)
    method, _, content = channel.basic_get("aged")
    assert int(content) == 1, "the age of a message is not kept"
    channel.basic_ack(method.delivery_tag)


def _check_order(channel: Any) -> None:
    """The group gets the rest of each key in order, and nothing of the parked key."""
    channel.basic_qos(prefetch_count=50)
    found: dict[str, list[int]] = {}
    whole = {_key(n): [m for m in range(BEFORE + AFTER) if _key(m) == _key(n)] for n in range(KEYS)}
    whole.pop(_key(PARKED))
    for method, _, content in channel.consume(GROUP, inactivity_timeout=PATIENCE_S):
        assert method is not None, f"only {found} came"
        found.setdefault(_key(int(content)), []).append(int(content))
        channel.basic_ack(method.delivery_tag)
        if all(found.get(key, [-1])[-1] == numbers[-1] for key, numbers in whole.items()):
            break
    channel.cancel()
    assert _key(PARKED) not in found, "a parked key is handed out"
    for key, numbers in found.items():
        assert numbers == whole[key][-len(numbers) :], key


def _key(number: int) -> str:
    return f"key-{number % KEYS}"


def _send(channel: Any, exchange: str, key: str, number: int, **properties: Any) -> None:
    sent = pika.BasicProperties(delivery_mode=2, **properties)
    channel.basic_publish(exchange, key, b"%d" % number, sent)


def _parked(cluster: LocalCluster, http: Any) -> list[list[Any]]:
    rows = http(cluster, "GET", f"topics/%2F/{TOPIC}/groups/sink/park")
    return [[row["key"], row["pid"]] for row in rows]
