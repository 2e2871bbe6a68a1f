"""Dead letters of quorum queues, by pika on three nodes: headers, and interrupted moves."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, cut_power, serves_policies, start_nodes
from tests.faults.conftest import StartCluster
from tests.faults.traffic import connect, drain, fill, log_has, until
from tests.patience import PATIENCE_S

PERSISTENT = pika.BasicProperties(delivery_mode=2)
AT_LEAST_ONCE = {
    "x-queue-type": "quorum",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
CLASSIC = {"x-queue-type": "classic"}
QUICK = {"dead_letter_worker_publisher_confirm_timeout": "1000"}
"""What waits is tried again every second."""


@pytest.fixture
def cluster(start_cluster: StartCluster) -> LocalCluster:
    """Three nodes, on which the second version of the tree's rules is in force."""
    made = start_cluster(settings=QUICK)
    until(lambda: serves_policies(made), "policies are not served")
    return made


Channels = Callable[[int], Any]


@pytest.fixture
def channels(cluster: LocalCluster) -> Iterator[Channels]:
    """Opens a channel to a node; its connection is closed at the end."""
    made: list[Any] = []

    def channel(node: int) -> Any:
        made.append(connect(cluster, node))
        opened = made[-1].channel()
        opened.confirm_delivery()
        return opened

    yield channel
    for connection in made:
        with contextlib.suppress(pika.exceptions.AMQPError):
            connection.close()


def set_policy(cluster: LocalCluster, name: str, pattern: str, definition: dict[str, Any]) -> bool:
    body = {"pattern": pattern, "definition": definition, "apply-to": "queues"}
    return call(cluster, "PUT", f"policies/%2F/{name}", body)[0] < 300


def declare(channel: Any, queue: str, exchange: str, **arguments: Any) -> None:
    """A queue whose dead letters go to an exchange, at least once unless said otherwise."""
    made = {**AT_LEAST_ONCE, "x-dead-letter-exchange": exchange, **arguments}
    channel.queue_declare(queue, durable=True, arguments=made)


def reject_all(channel: Any, queue: str, count: int) -> None:
    """Rejects the next messages of a queue, all at once."""
    last = 0
    messages = channel.consume(queue, inactivity_timeout=PATIENCE_S)
    for seen, (method, _, _) in enumerate(messages, 1):
        assert method is not None, f"{seen - 1} of {count} came"
        last = method.delivery_tag
        if seen == count:
            break
    # First: what comes back to the queue is not for this consumer, who would return it.
    channel.cancel()
    channel.basic_nack(last, multiple=True, requeue=False)


def take(channel: Any, queue: str) -> tuple[Any, Any, bytes]:
    """The next message of a queue."""
    found: list[Any] = []

    def came() -> bool:
        found[:] = channel.basic_get(queue, auto_ack=True)
        return found[0] is not None

    until(came, f"nothing comes to {queue}")
    return found[0], found[1], found[2]


def waiting(cluster: LocalCluster, queue: str) -> int:
    """Dead letters that a queue keeps."""
    return int(cluster.api(f"queues/%2F/{queue}")["messages_dlx"])


def moved_once(found: list[int], count: int) -> None:
    """At least once: none is missing, and only those that were under way may come again."""
    assert set(found) == set(range(count))


def test_headers_routing_and_counts_of_dead_letters(
    cluster: LocalCluster, channels: Channels
) -> None:
    """At most once: by the queue's own key, by the message's keys, over the limit, and on to a
    second exchange; what a publisher calls x-death means nothing."""
    channel = channels(1)
    channel.exchange_declare("dlx", "direct", durable=True)
    kind = {"x-queue-type": "quorum"}
    own = {**kind, "x-dead-letter-exchange": "dlx"}
    channel.queue_declare("work", durable=True, arguments=own)
    again = {**own, "x-dead-letter-routing-key": "second", "x-delivery-limit": 0}
    channel.queue_declare("first", durable=True, arguments=again)
    channel.queue_declare("second", durable=True, arguments=kind)
    channel.queue_bind("first", "dlx", "work")
    channel.queue_bind("second", "dlx", "second")
    forged = {
        "x-death": [{"queue": "first", "reason": "rejected", "count": 7}],
        "CC": ["cc"],
        "n": 1,
    }
    before = int(time.time()) - 1
    properties = pika.BasicProperties(headers=forged, delivery_mode=2, message_id="m")
    channel.basic_publish("", "work", b"body", properties)
    reject_all(channel, "work", 1)
    method, properties, body = take_back(channel, "first")
    assert (body, method.exchange, method.routing_key) == (b"body", "dlx", "work")
    headers = properties.headers
    death = headers["x-death"][0]
    assert before <= death.pop("time").timestamp() <= time.time() + 1
    assert len(headers["x-death"]) == 1
    assert death == {
        "count": 1,
        "reason": "rejected",
        "queue": "work",
        "exchange": "",
        "routing-keys": ["work", "cc"],
    }
    assert list(death) == ["count", "reason", "queue", "exchange", "routing-keys"]
    for when in ("first", "last"):
        assert headers[f"x-{when}-death-reason"] == "rejected"
        assert headers[f"x-{when}-death-queue"] == "work"
        assert headers[f"x-{when}-death-exchange"] == ""
    assert (headers["n"], headers["CC"], properties.message_id) == (1, ["cc"], "m")
    _, properties, body = take(channel, "second")
    headers = properties.headers
    assert body == b"body"
    assert "CC" not in headers
    assert [(d["queue"], d["reason"], d["count"]) for d in headers["x-death"]] == [
        ("first", "delivery_limit", 1),
        ("work", "rejected", 1),
    ]
    assert headers["x-death"][0]["routing-keys"] == ["work", "cc"]
    assert headers["x-death"][0]["exchange"] == "dlx"
    assert headers["x-first-death-queue"] == "work"
    assert headers["x-last-death-queue"] == "first"
    assert headers["x-last-death-exchange"] == "dlx"


def take_back(channel: Any, queue: str) -> tuple[Any, Any, bytes]:
    """Looks at the next message of a queue, and rejects it with requeue: a failure."""
    found: list[Any] = []

    def came() -> bool:
        found[:] = channel.basic_get(queue)
        return found[0] is not None

    until(came, f"nothing comes to {queue}")
    channel.basic_reject(found[0].delivery_tag, requeue=True)
    return found[0], found[1], found[2]


def test_a_cycle_ends_unless_somebody_rejects(cluster: LocalCluster, channels: Channels) -> None:
    """A message that is rejected goes round for as long as it is; by itself it goes round once."""
    channel = channels(1)
    kind = {"x-queue-type": "quorum", "x-dead-letter-exchange": "", "x-delivery-limit": 0}
    channel.queue_declare("a", durable=True, arguments={**kind, "x-dead-letter-routing-key": "a"})
    channel.basic_publish("", "a", b"round", PERSISTENT)
    for _ in range(3):
        reject_all(channel, "a", 1)
        until(lambda: cluster.messages_in("a") == 1, "it does not come back")
    _, properties, _ = take(channel, "a")
    assert [(d["reason"], d["count"]) for d in properties.headers["x-death"]] == [("rejected", 3)]
    channel.basic_publish("", "a", b"by itself", PERSISTENT)
    take_back(channel, "a")
    until(lambda: cluster.messages_in("a") == 0, "it goes round")
    leader = cluster.leader_of("a")
    until(lambda: log_has(cluster, leader, "queue.dead_letter_cycle"), "no event")


@pytest.mark.parametrize("victim", ["source", "target", "all"])
def test_no_dead_letter_is_lost_when_nodes_are_killed(
    cluster: LocalCluster, channels: Channels, victim: str
) -> None:
    """1,000 dead letters on their way from node 1 to node 2; nodes are killed in the middle."""
    count = 1_000
    channel = channels(1)
    declare(channel, "work", "", **{"x-dead-letter-routing-key": "dead"})
    channels(2).queue_declare("dead", durable=True, arguments={"x-queue-type": "quorum"})
    fill(cluster, 1, "work", count, 20)
    victims = {"source": [1], "target": [2], "all": [1, 2, 3]}[victim]
    reject_all(channel, "work", count)
    until(
        lambda: 0 < waiting(cluster, "work") < count or cluster.messages_in("dead") > 0, "no move"
    )
    cut_power(cluster, *victims)
    start_nodes(cluster, *victims)
    until(lambda: cluster.messages_in("dead") >= count, "not all are moved")
    until(lambda: waiting(cluster, "work") == 0, "some are kept")
    moved_once(drain(cluster, 3, "dead", count, 20), count)


def test_dead_letters_wait_for_exchange_route_and_room(
    cluster: LocalCluster, channels: Channels
) -> None:
    """At first there is no exchange, then no binding, then the target is full; nothing is lost, and
    all nodes are killed once while they wait."""
    channel = channels(1)
    declare(channel, "work", "later")
    for number in range(20):
        channel.basic_publish("", "work", b"%d" % number, PERSISTENT)
    reject_all(channel, "work", 20)
    until(lambda: waiting(cluster, "work") == 20, "they are not kept")
    leader = cluster.leader_of("work")
    until(lambda: log_has(cluster, leader, "queue.dead_letters_waiting", "later"), "no event")
    cut_power(cluster)
    start_nodes(cluster, 1, 2, 3)
    until(lambda: waiting(cluster, "work") == 20, "they are lost")
    channel = channels(2)
    channel.exchange_declare("later", "fanout", durable=True)
    full = {**CLASSIC, "x-max-length": 1, "x-overflow": "reject-publish"}
    channel.queue_declare("small", durable=True, arguments=full)
    channel.basic_publish("", "small", b"first", PERSISTENT)
    channel.queue_bind("small", "later")
    leader = cluster.leader_of("work")
    until(lambda: log_has(cluster, leader, "queue.dead_letters_waiting", "refused"), "not full")
    assert waiting(cluster, "work") == 20
    assert take(channel, "small")[2] == b"first"
    found: list[bytes] = []

    def all_came() -> bool:
        method, _, body = channel.basic_get("small", auto_ack=True)
        if method is not None:
            found.append(body)
        return len(set(found)) == 20

    until(all_came, "not all come when there is room")
    until(lambda: waiting(cluster, "work") == 0, "some are kept")
    assert set(Counter(found)) == {b"%d" % number for number in range(20)}


def test_strategies_change_while_dead_letters_wait(
    cluster: LocalCluster, channels: Channels
) -> None:
    """By policy: at-least-once keeps them; another strategy drops what is kept; a purge, too. Where
    overflow does not fit, the queue falls back and says so."""
    channel = channels(1)
    kept = {
        "dead-letter-exchange": "nowhere",
        "dead-letter-strategy": "at-least-once",
        "overflow": "reject-publish",
    }
    channel.queue_declare("work", durable=True, arguments={"x-queue-type": "quorum"})

    def strategy() -> str:
        return str(cluster.api("queues/%2F/work")["dead_letter_strategy"])

    def one_dies() -> None:
        channel.basic_publish("", "work", b"one", PERSISTENT)
        reject_all(channel, "work", 1)

    assert strategy() == "disabled"
    assert set_policy(cluster, "p", "^work$", kept)
    until(lambda: strategy() == "at_least_once", "the policy does not act")
    one_dies()
    until(lambda: waiting(cluster, "work") == 1, "it is not kept")
    channel.queue_purge("work")
    until(lambda: waiting(cluster, "work") == 0, "a purge leaves it")
    one_dies()
    until(lambda: waiting(cluster, "work") == 1, "it is not kept")
    assert set_policy(cluster, "p", "^work$", {**kept, "overflow": "drop-head"})
    until(lambda: strategy() == "at_most_once", "it does not fall back")
    row = cluster.api("queues/%2F/work")
    assert row["messages_dlx"] == 0
    assert "reject-publish" in row["dead_letter_warning"]
    leader = cluster.leader_of("work")
    until(lambda: log_has(cluster, leader, "queue.dead_letter_fallback"), "no event")
    one_dies()
    until(lambda: log_has(cluster, leader, "queue.dead_letters_lost", "nowhere"), "no event")
