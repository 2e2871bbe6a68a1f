"""Mirrored classic queues on three nodes, by clients as they come."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, cut_power, start_nodes, stop_nodes
from tests.faults.traffic import Traffic, connect, log_has, name_of, until
from tests.interop.helpers import fetch_all

pytestmark = pytest.mark.cluster

QUEUE = "mirrored"
CLASSIC = {"x-queue-type": "classic"}
PERSISTENT = pika.BasicProperties(delivery_mode=2)
ALL = {"ha-mode": "all"}


def set_policy(cluster: LocalCluster, definition: dict[str, Any], node: int = 0) -> None:
    body = {"pattern": "^mirrored", "definition": definition, "apply-to": "queues"}
    until(
        lambda: call(cluster, "PUT", "policies/%2F/mirrors", body, node=node)[0] < 300, "no policy"
    )


def clear_policy(cluster: LocalCluster) -> None:
    call(cluster, "DELETE", "policies/%2F/mirrors")


def row(cluster: LocalCluster, node: int, queue: str = QUEUE) -> dict[str, Any]:
    status, found = call(cluster, "GET", f"queues/%2F/{queue}", node=node)
    assert status == 200, found
    return dict(found)


def has_mirrors(cluster: LocalCluster, count: int, node: int = 1, queue: str = QUEUE) -> bool:
    found = row(cluster, node, queue)
    return (
        len(found.get("slave_nodes", ())) == count
        and len(found.get("synchronised_slave_nodes", ())) == count
    )


def declare(cluster: LocalCluster, node: int, queue: str = QUEUE) -> None:
    connection = connect(cluster, node)
    connection.channel().queue_declare(queue, durable=True, arguments=CLASSIC)
    connection.close()


def declare_mirrored(cluster: LocalCluster, node: int, **more: Any) -> None:
    set_policy(cluster, {**ALL, **more})
    declare(cluster, node)
    until(lambda: has_mirrors(cluster, 2), "no synchronised mirrors")


@pytest.mark.provokes("queue.mirror_started", "queue.mirror_promoted")
def test_a_mirror_takes_over_with_all_that_was_confirmed(cluster: LocalCluster) -> None:
    declare_mirrored(cluster, 1)
    connection, other = connect(cluster, 1), connect(cluster, 2)
    channel = connection.channel()
    channel.confirm_delivery()
    for number in range(100):
        channel.basic_publish("", QUEUE, b"%d" % number, PERSISTENT)
    for _ in range(10):
        method, _, _ = channel.basic_get(QUEUE)
        channel.basic_ack(method.delivery_tag)
    # What was handed out and not acknowledged is delivered again.
    assert channel.basic_get(QUEUE)[0].redelivered is False
    channel = other.channel()
    assert channel.queue_declare(QUEUE, passive=True).method.message_count == 89
    cluster.kill(1, signal.SIGKILL)
    method, _, body = channel.basic_get(QUEUE, auto_ack=True)
    assert (method.redelivered, body) == (True, b"10")
    assert fetch_all(channel, QUEUE) == [b"%d" % number for number in range(11, 100)]
    other.close()
    with contextlib.suppress(pika.exceptions.AMQPError):
        connection.close()


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        pytest.param(signal.SIGSTOP, marks=pytest.mark.provokes("queue.master_deposed")),
    ],
)
def test_clients_elsewhere_go_on_when_the_master_goes(
    cluster: LocalCluster, how: signal.Signals
) -> None:
    """So do the clients of its own node, if that is not gone for good."""
    declare_mirrored(cluster, 1)
    own = ((1,),) if how is signal.SIGSTOP else ()
    traffic = Traffic(cluster, QUEUE, publish_at=(2,), consume_at=(*own, (2,), (3,)))
    with traffic:
        traffic.goes_on()
        cluster.kill(1, how)
        traffic.goes_on()
        if how is signal.SIGSTOP:
            cluster.kill(1, signal.SIGCONT)
            until(lambda: log_has(cluster, 1, "queue.master_deposed"), "two masters")
        else:
            traffic.all_consume()
            until(lambda: not cluster._running(1), "the node does not end")
            cluster.start_node(1)
        until(lambda: has_mirrors(cluster, 2, node=2), "the node does not come back as a mirror")
        traffic.goes_on()
        traffic.all_consume()
        traffic.finish()
    for client in (traffic.publisher, *traffic.consumers):
        assert client.attempt == 1, "a client had to connect again"
    assert not traffic.publisher.resent, "a publish was refused"


@pytest.mark.provokes("queue.mirror_stopped")
def test_a_policy_begins_and_ends_mirrors_while_clients_stay(cluster: LocalCluster) -> None:
    declare(cluster, 1)
    with Traffic(cluster, QUEUE, publish_at=(2,), consume_at=((1,), (3,))) as traffic:
        for definition, nodes in (
            (ALL, 2),
            ({"ha-mode": "exactly", "ha-params": 2}, 1),
            ({"ha-mode": "nodes", "ha-params": [name_of(cluster, 3), "elsewhere"]}, None),
            (ALL, 2),
        ):
            traffic.goes_on()
            set_policy(cluster, definition)
            if nodes is not None:
                until(lambda nodes=nodes: has_mirrors(cluster, nodes), "no mirrors")  # type: ignore[misc]
        traffic.goes_on()
        clear_policy(cluster)
        until(lambda: has_mirrors(cluster, 0), "mirrors stay")
        traffic.goes_on()
        traffic.finish()
    for client in (traffic.publisher, *traffic.consumers):
        assert client.attempt == 1, "a client had to connect again"
    assert not traffic.publisher.resent, "a publish was refused"
    assert row(cluster, 1)["type"] == "classic"


@pytest.mark.provokes("queue.mirror_failed")
def test_a_mirror_that_cannot_be_written_begins_anew(cluster: LocalCluster) -> None:
    declare_mirrored(cluster, 1)
    data = cluster.log_file(2).parent / "data"
    folder = next(data.rglob("member")).parent
    shutil.rmtree(folder)
    folder.write_text("in the way")
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_publish("", QUEUE, b"1", PERSISTENT)
    until(lambda: log_has(cluster, 2, "queue.mirror_failed"), "nothing failed")
    assert fetch_all(channel, QUEUE) == [b"1"]
    connection.close()
    until(lambda: has_mirrors(cluster, 2), "the mirror does not begin anew")


def fill(cluster: LocalCluster, first: int, count: int, *, node: int = 1) -> None:
    connection = connect(cluster, node)
    channel = connection.channel()
    channel.confirm_delivery()
    for number in range(first, first + count):
        channel.basic_publish("", QUEUE, b"%d" % number, PERSISTENT)
    connection.close()


def is_critical(cluster: LocalCluster, node: int) -> bool:
    return call(cluster, "GET", "health/checks/node-is-mirror-sync-critical", node=node)[0] == 503


def test_mirrors_are_synchronised_by_command_while_clients_go_on(cluster: LocalCluster) -> None:
    declare(cluster, 1)
    fill(cluster, 0, 300)
    taker = connect(cluster, 1)
    channel = taker.channel()
    for number in range(0, 120, 3):
        # Some are settled, some are held, from the front on.
        method, _, body = channel.basic_get(QUEUE)
        assert int(body) == number // 3
        if number % 2:
            channel.basic_ack(method.delivery_tag)
    set_policy(cluster, {**ALL, "ha-sync-batch-size": 7})
    until(lambda: len(row(cluster, 1)["slave_nodes"]) == 2, "no mirrors")
    fill(cluster, 300, 20)
    assert row(cluster, 2)["synchronised_slave_nodes"] == []
    assert is_critical(cluster, 1)
    assert not is_critical(cluster, 2)
    status, _ = call(cluster, "POST", f"queues/%2F/{QUEUE}/actions", {"action": "sync"}, node=3)
    assert status == 204
    fill(cluster, 320, 20)
    until(lambda: has_mirrors(cluster, 2), "mirrors are not synchronised")
    until(lambda: not is_critical(cluster, 1), "still critical")
    held = [number for number in range(40) if not (3 * number) % 2]
    other = connect(cluster, 2)
    cluster.kill(1, signal.SIGKILL)
    got = [int(body) for body in fetch_all(other.channel(), QUEUE)]
    assert got == [*held, *range(40, 340)]
    other.close()
    with contextlib.suppress(pika.exceptions.AMQPError):
        taker.close()


def test_mirrors_are_synchronised_by_themselves_where_the_policy_says_so(
    cluster: LocalCluster,
) -> None:
    declare(cluster, 1)
    fill(cluster, 0, 50)
    with Traffic(cluster, QUEUE, publish_at=(2,), consume_at=(), filled=50) as traffic:
        set_policy(cluster, {**ALL, "ha-sync-mode": "automatic"})
        until(lambda: has_mirrors(cluster, 2), "mirrors are not synchronised")
        traffic.goes_on()
        cluster.kill(1, signal.SIGKILL)
        traffic.goes_on()
        traffic.finish()
    assert traffic.publisher.attempt == 1
    connection = connect(cluster, 3)
    got = [int(body) for body in fetch_all(connection.channel(), QUEUE)]
    assert got == list(range(traffic.publisher.next))
    connection.close()


def test_a_consumer_that_asks_for_it_ends_when_another_master_takes_over(
    cluster: LocalCluster,
) -> None:
    declare_mirrored(cluster, 1)
    connection = connect(cluster, 2)
    asking, silent = connection.channel(), connection.channel()
    ended: list[str] = []
    asking.add_on_cancel_callback(lambda frame: ended.append(frame.method.consumer_tag))
    got: list[tuple[bytes, bool]] = []
    asking.basic_consume(
        QUEUE,
        lambda *_: None,
        consumer_tag="asks",
        arguments={"x-cancel-on-ha-failover": True, "x-priority": -1},
    )
    silent.basic_consume(
        QUEUE,
        lambda _channel, method, _properties, body: got.append((body, method.redelivered)),
        consumer_tag="silent",
    )
    fill(cluster, 0, 3)

    def pumped(condition: Callable[[], bool]) -> bool:
        connection.process_data_events(0.05)
        return condition()

    until(lambda: pumped(lambda: len(got) == 3), "nothing is delivered")
    cluster.kill(1, signal.SIGKILL)
    until(lambda: pumped(lambda: ended == ["asks"]), "the consumer is not cancelled")
    until(lambda: pumped(lambda: len(got) == 6), "nothing is delivered again")
    assert got[3:] == [(b"0", True), (b"1", True), (b"2", True)]
    # What the former master delivered is acknowledged in vain.
    silent.basic_ack(3, multiple=True)
    silent.basic_ack(6, multiple=True)
    until(lambda: pumped(lambda: cluster.messages_in(QUEUE) == 0), "nothing is settled")
    connection.close()


def test_a_queue_waits_for_its_master_where_no_mirror_may_follow(cluster: LocalCluster) -> None:
    declare(cluster, 1)
    fill(cluster, 0, 10)
    set_policy(cluster, {**ALL, "ha-promote-on-failure": "when-synced"})
    until(lambda: len(row(cluster, 1)["slave_nodes"]) == 2, "no mirrors")
    cluster.kill(1, signal.SIGKILL)
    until(lambda: row(cluster, 2)["state"] == "down", "the queue is not down")
    assert not log_has(cluster, 2, "queue.mirror_promoted")
    assert not log_has(cluster, 3, "queue.mirror_promoted")
    cluster.start_node(1)
    until(lambda: row(cluster, 2)["state"] == "running", "the master does not come back")
    connection = connect(cluster, 3)
    assert [int(body) for body in fetch_all(connection.channel(), QUEUE)] == list(range(10))
    connection.close()


@pytest.mark.parametrize("how", [stop_nodes, cut_power])
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
def test_all_nodes_stop_and_start(
    cluster: LocalCluster, how: Callable[[LocalCluster], None], order: tuple[int, ...]
) -> None:
    declare_mirrored(cluster, 1)
    fill(cluster, 0, 50)
    how(cluster)
    start_nodes(cluster, *order)
    until(lambda: row(cluster, 3)["state"] == "running", "the queue does not open")
    connection = connect(cluster, 2)
    assert [int(body) for body in fetch_all(connection.channel(), QUEUE)] == list(range(50))
    connection.close()


def test_the_last_master_opens_the_queue_without_those_before_it(cluster: LocalCluster) -> None:
    """Scenarios 1 and 3: the first master stops, then the second; the first stays away."""
    declare_mirrored(cluster, 1)
    fill(cluster, 0, 20)
    cluster.kill(1, signal.SIGTERM)
    until(lambda: log_has(cluster, 2, "queue.mirror_promoted"), "no mirror takes over")
    stop_nodes(cluster, 3, 2)
    until(lambda: not cluster._running(1), "the first node does not end")
    cluster.start_node(3)
    cluster.start_node(2)
    until(lambda: row(cluster, 3)["state"] == "running", "the queue does not open")
    connection = connect(cluster, 3)
    assert [int(body) for body in fetch_all(connection.channel(), QUEUE)] == list(range(20))
    connection.close()


def test_clients_of_a_deposed_master_lose_nothing_that_was_confirmed(cluster: LocalCluster) -> None:
    declare_mirrored(cluster, 1)
    with Traffic(cluster, QUEUE, publish_at=(1,), consume_at=((2, 3),)) as traffic:
        traffic.goes_on()
        cluster.kill(1, signal.SIGSTOP)
        until(
            lambda: any(log_has(cluster, node, "queue.mirror_promoted") for node in (2, 3)),
            "no mirror takes over",
        )
        cluster.kill(1, signal.SIGCONT)
        until(lambda: log_has(cluster, 1, "queue.master_deposed"), "two masters")
        traffic.goes_on()
        traffic.finish()
