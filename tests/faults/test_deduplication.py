"""Repeats by message-id, by pika on three nodes: over reconnects, kills, policies and retries."""

from __future__ import annotations

import contextlib
import signal
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, cut_power, serving_cluster, start_nodes
from tests.faults.conftest import BASE_PORT
from tests.faults.traffic import connect, until
from tests.patience import PATIENCE_S

COUNT = 600
WINDOW = {"x-queue-type": "quorum", "x-deduplication-count": 10_000}
NAME = "convoy_messages_deduplicated_total"

Channels = Callable[[int], Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("deduplication")
    with serving_cluster(directory, BASE_PORT, policies=True) as made:
        yield made


@pytest.fixture
def channels(cluster: LocalCluster) -> Iterator[Channels]:
    """Opens a channel to a node; its connection is closed at the end."""
    made: list[Any] = []

    def channel(node: int, *, confirms: bool = True) -> Any:
        made.append(connect(cluster, node))
        opened = made[-1].channel()
        if confirms:
            opened.confirm_delivery()
        return opened

    yield channel
    for connection in made:
        with contextlib.suppress(pika.exceptions.AMQPError):
            connection.close()


def set_policy(cluster: LocalCluster, name: str, pattern: str, definition: dict[str, Any]) -> bool:
    body = {"pattern": pattern, "definition": definition, "apply-to": "quorum_queues"}
    return call(cluster, "PUT", f"policies/%2F/{name}", body)[0] < 300


def publish(channel: Any, queue: str, *ids: str | None) -> None:
    for message_id in ids:
        properties = pika.BasicProperties(message_id=message_id, delivery_mode=2)
        channel.basic_publish("", queue, (message_id or "none").encode(), properties)


def ready(channel: Any, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def take_all(channel: Any, queue: str, count: int) -> list[str]:
    """Consumes and acknowledges that many messages."""
    found: list[str] = []
    for method, _, body in channel.consume(queue, inactivity_timeout=PATIENCE_S):
        assert method is not None, f"{len(found)} of {count} came"
        found.append(body.decode())
        if len(found) == count:
            channel.basic_ack(method.delivery_tag, multiple=True)
            break
    channel.cancel()
    return found


def dropped(cluster: LocalCluster, queue: str) -> int:
    """Repeats, as the queue's leader counts them."""
    row = cluster.api(f"queues/%2F/{queue}", cluster.leader_of(queue))
    return int(row["messages_deduplicated"])


def test_a_publisher_repeats_everything_after_the_leader_was_killed(
    cluster: LocalCluster, channels: Channels
) -> None:
    """It waits for no confirm; its node, which leads, is killed; it publishes all again elsewhere.
    Then all nodes are killed, and it does so once more."""
    ids = [f"message-{number}" for number in range(COUNT)]
    first = channels(1, confirms=False)
    first.queue_declare("orders", durable=True, arguments=WINDOW)
    until(lambda: cluster.leader_of("orders"), "nobody leads")
    leader = cluster.leader_of("orders")
    publisher = channels(leader, confirms=False)
    publish(publisher, "orders", *ids[: COUNT // 2])
    until(lambda: cluster.messages_in("orders") > 0, "nothing arrives")
    with contextlib.suppress(pika.exceptions.AMQPError):
        publish(publisher, "orders", *ids[COUNT // 2 :])
    cluster.kill(leader, signal.SIGKILL)
    again = channels(leader % 3 + 1)
    publish(again, "orders", *ids)
    assert ready(again, "orders") == COUNT
    before = dropped(cluster, "orders")
    assert 0 < before <= COUNT
    cluster.start_node(leader)
    cluster.wait_ready()
    cut_power(cluster)
    start_nodes(cluster, 1, 2, 3)
    channel = channels(2)
    publish(channel, "orders", *ids)
    assert ready(channel, "orders") == COUNT
    until(lambda: dropped(cluster, "orders") == before + COUNT, "repeats are not counted")
    # What was consumed is remembered, too; what has no id is not looked at.
    assert take_all(channel, "orders", COUNT) == ids
    publish(channel, "orders", *ids[-100:], None, None, "new")
    assert ready(channel, "orders") == 3
    texts = [metrics(cluster, number) for number in (1, 2, 3)]
    counted = [line for text in texts for line in text.splitlines() if line.startswith(NAME)]
    assert sum(float(line.split()[-1]) for line in counted) > 0


def metrics(cluster: LocalCluster, number: int) -> str:
    port = cluster.nodes[number - 1].metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_a_policy_gives_a_live_queue_a_window(cluster: LocalCluster, channels: Channels) -> None:
    channel = channels(1)
    channel.queue_declare("live", durable=True, arguments={"x-queue-type": "quorum"})
    publish(channel, "live", "a", "a")
    assert ready(channel, "live") == 2
    until(lambda: set_policy(cluster, "window", "^live$", {"deduplication-time": 600_000}), "no")
    numbers = iter(range(1_000_000))

    def drops() -> bool:
        """Whether the second message with a new id is dropped."""
        before, message_id = ready(channel, "live"), f"probe-{next(numbers)}"
        publish(channel, "live", message_id, message_id)
        return ready(channel, "live") - before == 1

    until(drops, "the policy does not act")
    row = cluster.api("queues/%2F/live", cluster.leader_of("live"))
    assert row["effective_policy_definition"] == {"deduplication-time": 600_000}
    assert row["deduplication_ids"] > 0
    assert row["deduplication_bytes"] > 0
    assert call(cluster, "DELETE", "policies/%2F/window")[0] == 204
    until(lambda: not drops(), "the window stays")
    large = {"deduplication-count": 1_000_001}
    policy = {"pattern": "^live$", "definition": large, "apply-to": "quorum_queues"}
    status, refused = call(cluster, "PUT", "policies/%2F/window", policy)
    assert status == 400
    assert "1000001 is not a valid number of message-ids" in refused["reason"]


def test_messages_of_a_transaction_are_repeats_as_others(channels: Channels) -> None:
    channel = channels(3, confirms=False)
    channel.queue_declare("sums", durable=True, arguments=WINDOW)
    channel.tx_select()
    publish(channel, "sums", "a", "b", "a")
    channel.tx_commit()
    publish(channel, "sums", "b", "c")
    channel.tx_commit()
    publish(channel, "sums", "d")
    channel.tx_rollback()
    publish(channel, "sums", "d")
    channel.tx_commit()
    assert take_all(channels(2), "sums", 4) == ["a", "b", "c", "d"]


def test_a_message_comes_back_from_its_retry_queue(channels: Channels) -> None:
    """Its message-id is known to the queue that it was rejected by."""
    channel = channels(1)
    work = {**WINDOW, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "later"}
    later = {
        "x-queue-type": "quorum",
        "x-message-ttl": 50,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "work",
    }
    channel.queue_declare("work", durable=True, arguments=work)
    channel.queue_declare("later", durable=True, arguments=later)
    publish(channel, "work", "task", "task")
    turns = channel.consume("work", inactivity_timeout=PATIENCE_S)
    for turn, (method, properties, _) in enumerate(turns):
        assert method is not None, f"after {turn} turns"
        assert properties.message_id == "task"
        if turn == 2:
            channel.basic_ack(method.delivery_tag)
            break
        channel.basic_reject(method.delivery_tag, requeue=False)
    channel.cancel()
    assert ready(channel, "work") == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({**WINDOW, "x-deduplication-count": 1_000_001}, "{value_too_large,1000001}"),
        ({"x-queue-type": "quorum", "x-deduplication-time": -1}, "{value_negative,-1}"),
        ({"x-queue-type": "classic", "x-deduplication-count": 1}, "rabbit_classic_queue"),
        ({"x-queue-type": "stream", "x-deduplication-time": 1}, "rabbit_stream_queue"),
    ],
)
def test_what_cannot_be_remembered_is_refused(
    channels: Channels, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
        channels(1).queue_declare("odd", durable=True, arguments=arguments)
    assert refused.value.reply_code == 406
    assert "x-deduplication-" in refused.value.reply_text
    assert reason in refused.value.reply_text
