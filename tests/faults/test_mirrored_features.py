"""Features of classic queues whose master goes, by clients of real nodes. All cases of them:
tests/unit/queues/mirrored/test_features.py."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call
from tests.faults.test_mirrored import ALL, CLASSIC, has_mirrors, set_policy
from tests.faults.traffic import connect, until
from tests.interop.helpers import Inbox, fetch_all, numbered, publish_confirmed

pytestmark = pytest.mark.cluster

DEAD = "dead"
TO_DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
QUEUES: dict[str, dict[str, Any]] = {
    "priorities": {"x-max-priority": 5},
    "order": {},
    "late": {**TO_DEAD, "x-message-ttl": 4_000},
    "rejects": TO_DEAD,
    "short": {**TO_DEAD, "x-max-length": 3},
    "refuses": {**TO_DEAD, "x-max-length": 1, "x-overflow": "reject-publish-dlx"},
    "single": {"x-single-active-consumer": True},
    "exclusive": {},
    "purged": {"x-queue-mode": "lazy"},
    "expires": {"x-expires": 5_000},
    "deletes-itself": {},
}


def name_of(feature: str) -> str:
    return f"mirrored-{feature}"


class Feature:
    """Two connections to nodes that stay, and one to the master's."""

    def __init__(self, cluster: LocalCluster, master: int, others: tuple[int, int]) -> None:
        self.cluster = cluster
        self.home = connect(cluster, master).channel()
        self.connections = [connect(cluster, node) for node in others]
        self.inboxes: dict[str, Inbox] = {}

    def declare(self) -> None:
        self.home.queue_declare(DEAD, durable=True, arguments={"x-queue-type": "quorum"})
        for feature, arguments in QUEUES.items():
            self.home.queue_declare(
                name_of(feature),
                durable=True,
                auto_delete=feature == "deletes-itself",
                arguments={**CLASSIC, **arguments},
            )
        for feature in QUEUES:
            queue = name_of(feature)
            until(lambda queue=queue: has_mirrors(self.cluster, 2, queue=queue), "no mirrors")  # type: ignore[misc]

    def channel(self, number: int = 0) -> Any:
        return self.connections[number].channel()

    def publish(self, feature: str, *bodies: bytes, **properties: Any) -> None:
        more = pika.BasicProperties(delivery_mode=2, **properties)
        publish_confirmed(self.channel(), name_of(feature), bodies, properties=more)

    def consume(self, feature: str, number: int = 0, *, prefetch: int = 1, **more: Any) -> Inbox:
        channel = self.channel(number)
        channel.basic_qos(prefetch_count=prefetch)
        return Inbox(channel, name_of(feature), **more)

    def rest(self, feature: str) -> list[bytes]:
        return fetch_all(self.channel(), name_of(feature))

    def dead(self) -> list[tuple[bytes, list[tuple[str, str, int]]]]:
        """Dead letters that came, with their deaths."""
        found = []
        channel = self.channel()
        while True:
            method, properties, body = channel.basic_get(DEAD, auto_ack=True)
            if method is None:
                return found
            deaths = [
                (death["queue"], death["reason"], death["count"])
                for death in properties.headers["x-death"]
            ]
            found.append((body, deaths))

    def close(self) -> None:
        for connection in [*self.connections, self.home.connection]:
            with contextlib.suppress(pika.exceptions.AMQPError):
                connection.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_features_outlive_their_master(cluster: LocalCluster, how: signal.Signals) -> None:
    set_policy(cluster, ALL)
    on = Feature(cluster, 1, (2, 3))
    on.declare()
    # Priorities: two are held, three wait.
    for body, priority in ((b"a", 0), (b"b", 5), (b"c", 2), (b"d", 5), (b"e", 0)):
        on.publish("priorities", body, priority=priority)
    priorities = on.consume("priorities", prefetch=2)
    assert priorities.wait(2) == [b"b", b"d"]
    # Order: consumers on three nodes hold two each, of which one is settled.
    on.publish("order", *numbered(8))
    own = on.home.connection.channel()
    own.basic_qos(prefetch_count=2)
    holders = [Inbox(own, name_of("order")), *(on.consume("order", n, prefetch=2) for n in (0, 1))]
    for holder in holders:
        holder.wait(2)
    settled = holders[1].bodies[0]
    holders[1].channel.basic_ack(holders[1].deliveries[0][0].delivery_tag)
    holders[1].wait(3)
    for holder in holders[1:]:
        holder.channel.basic_cancel(holder.tag)
    # Dead letters: one that is rejected, one that waits for its time.
    on.publish("rejects", b"before", b"after")
    rejects = on.consume("rejects")
    rejects.wait(1)
    rejects.channel.basic_nack(rejects.deliveries[0][0].delivery_tag, requeue=False)
    rejects.wait(2)
    on.publish("late", b"late")
    # Limits.
    on.publish("short", *numbered(5))
    short = on.consume("short")
    assert short.wait(1) == [b"2"]
    on.publish("refuses", b"kept")
    with pytest.raises(pika.exceptions.NackError):
        on.publish("refuses", b"refused")
    # Consumers.
    active, waiting = on.consume("single", 1), on.consume("single", 0)
    on.publish("single", b"1", b"2")
    active.wait(1)
    exclusive = on.consume("exclusive", exclusive=True)
    on.publish("exclusive", b"1")
    exclusive.wait(1)
    on.publish("purged", *numbered(3))
    on.channel().queue_purge(name_of("purged"))
    on.publish("purged", b"stays")
    on.home.basic_consume(name_of("deletes-itself"), lambda *_: None)

    cluster.kill(1, how)

    assert priorities.wait(4)[2:] == [b"b", b"d"]
    priorities.channel.basic_ack(0, multiple=True)
    assert priorities.wait(6)[4:] == [b"c", b"a"]
    assert priorities.redelivered == [False, False, True, True, False, False]
    # What is acknowledged now was delivered by the former master.
    holders[2].channel.basic_ack(0, multiple=True)
    assert on.rest("order") == [body for body in numbered(8) if body != settled]
    assert active.wait(2)[1:] == [b"1"]
    assert active.redelivered == [False, True]
    active.channel.basic_ack(0, multiple=True)
    assert active.wait(3)[2:] == [b"2"]
    waiting.settle()
    assert waiting.bodies == []
    assert exclusive.wait(2) == [b"1", b"1"]
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        on.consume("exclusive", 1)
    assert refused.value.reply_code == 403
    assert on.rest("purged") == [b"stays"]
    assert short.wait(2) == [b"2", b"2"]
    on.publish("short", b"5")
    assert on.rest("short") == [b"3", b"4", b"5"]
    with pytest.raises(pika.exceptions.NackError):
        on.publish("refuses", b"refused again")
    assert on.rest("refuses") == [b"kept"]
    assert rejects.wait(3)[2:] == [b"after"]
    rejects.channel.basic_nack(0, multiple=True, requeue=False)
    letters: list[Any] = []

    def all_dead() -> bool:
        letters.extend(on.dead())
        return len(letters) >= 7

    until(all_dead, f"{letters} are dead")
    assert sorted(letters) == sorted(
        [
            (b"0", [(name_of("short"), "maxlen", 1)]),
            (b"1", [(name_of("short"), "maxlen", 1)]),
            (b"after", [(name_of("rejects"), "rejected", 1)]),
            (b"before", [(name_of("rejects"), "rejected", 1)]),
            (b"late", [(name_of("late"), "expired", 1)]),
            (b"refused", [(name_of("refuses"), "maxlen", 1)]),
            (b"refused again", [(name_of("refuses"), "maxlen", 1)]),
        ]
    )
    for feature in ("expires", "deletes-itself"):
        path = f"queues/%2F/{name_of(feature)}"
        until(lambda path=path: call(cluster, "GET", path, node=2)[0] == 404, f"{path} stays")  # type: ignore[misc]
    on.close()
