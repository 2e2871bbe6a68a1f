"""Partitions of the network, and what classic queues and mirrored ones do on both sides
(`cluster_partition_handling`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from tests.clusters import call, wait_http
from tests.faults.conftest import BASE_PORT
from tests.faults.proxies import ProxiedCluster
from tests.faults.test_minority import Confirms
from tests.faults.test_mirrored import (
    PERSISTENT,
    QUEUE,
    declare,
    declare_mirrored,
    fill,
    has_mirrors,
    row,
    set_policy,
)
from tests.faults.traffic import Consumer, Traffic, connect, log_has, name_of, until
from tests.interop.helpers import fetch_all

PLAIN = "plain"
MODES = ("pause_minority", "ignore", "autoheal")
Start = Callable[..., ProxiedCluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts three nodes with a way of handling partitions."""
    with ExitStack() as stack:

        def begin(handling: str = "pause_minority") -> ProxiedCluster:
            settings = {
                "raft.wal_max_size_bytes": "16MiB",
                "cluster_partition_handling": handling,
            }
            made = ProxiedCluster(tmp_path / "cluster", 3, BASE_PORT, settings)
            stack.enter_context(made)
            made.wait_ready()
            wait_http(made)
            return made

        yield begin


def events(cluster: ProxiedCluster, node: int, event: str) -> int:
    text = cluster.log_file(node).read_text("utf-8", "replace")
    return sum(event in line for line in text.splitlines())


def isolate(cluster: ProxiedCluster, node: int, how: str = "broken") -> None:
    """Cuts a node off from both others, until it has noticed."""
    before = events(cluster, node, "classic.minority")
    for other in {1, 2, 3} - {node}:
        cluster.proxies.cut(node, other, how)
    until(lambda: events(cluster, node, "classic.minority") > before, "the node has a majority")


def heal(cluster: ProxiedCluster, node: int) -> None:
    """Ends `isolate`, until the node has a majority again."""
    before = events(cluster, node, "classic.majority")
    for other in {1, 2, 3} - {node}:
        cluster.proxies.heal(node, other)
    until(lambda: events(cluster, node, "classic.majority") > before, "no majority comes back")


def promoted(cluster: ProxiedCluster, *nodes: int) -> bool:
    return any(log_has(cluster, node, "queue.mirror_promoted") for node in nodes)


@pytest.mark.provokes("classic.minority", "classic.majority")
@pytest.mark.parametrize(
    ("handling", "how"),
    [
        ("pause_minority", "broken"),
        ("pause_minority", "silent"),
        ("ignore", "broken"),
        ("autoheal", "silent"),
    ],
)
def test_a_master_that_is_cut_off_confirms_nothing_and_is_replaced(
    start: Start, handling: str, how: str
) -> None:
    """The publisher is on the minority side, the consumers on the other one."""
    cluster = start(handling)
    declare_mirrored(cluster, 1)
    with Traffic(cluster, QUEUE, publish_at=(1,), consume_at=((2,), (3,))) as traffic:
        traffic.goes_on()
        isolate(cluster, 1, how)
        until(lambda: promoted(cluster, 2, 3), "no mirror takes over")
        confirmed = traffic.confirmed
        with closing(connect(cluster, 2)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for _ in range(20):
                # The other side confirms.
                channel.basic_publish("", QUEUE, b"-1".ljust(100), PERSISTENT)
        assert traffic.confirmed == confirmed, "two masters confirm"
        heal(cluster, 1)
        until(lambda: log_has(cluster, 1, "queue.master_deposed"), "two masters")
        until(lambda: has_mirrors(cluster, 2, node=2), "the former master is no mirror")
        traffic.goes_on()
        for consumer in traffic.consumers:
            consumer.deliveries = [each for each in consumer.deliveries if each[0] >= 0]
        traffic.finish()


def test_a_paused_node_gives_nothing_out_and_its_clients_go_on_later(start: Start) -> None:
    """One consumer is on the minority side, the other clients are not."""
    cluster = start()
    declare_mirrored(cluster, 1)
    with Traffic(cluster, QUEUE, publish_at=(2,), consume_at=((3,),)) as traffic:
        traffic.goes_on()
        isolate(cluster, 1)
        late = Consumer([cluster.nodes[0].amqp_port], QUEUE, 100, 10)
        traffic.consumers.append(late)
        late.start()
        for _ in range(3):
            confirmed = traffic.confirmed
            until(lambda c=confirmed: traffic.confirmed > c + 100, "the majority stands still")  # type: ignore[misc]
        assert not late.deliveries
        heal(cluster, 1)
        traffic.goes_on()
        traffic.all_consume()
        traffic.finish()
    assert traffic.publisher.attempt == 1, "a client of the majority had to connect again"


def test_what_a_paused_node_shows(start: Start) -> None:
    cluster = start()
    declare_mirrored(cluster, 1)
    declare(cluster, 1, PLAIN)
    assert call(cluster, "GET", "nodes", node=1)[1][0]["partitions"] == []
    one, two, three = (name_of(cluster, number) for number in (1, 2, 3))
    isolate(cluster, 1)
    found = {each["name"]: each for each in call(cluster, "GET", "nodes", node=1)[1]}
    assert set(found[one]["partitions"]) == {two, three}
    assert {row(cluster, 1, name)["state"] for name in (QUEUE, PLAIN)} == {"down"}
    # The other side sees a node that is down.
    found = {each["name"]: each for each in call(cluster, "GET", "nodes", node=2)[1]}
    assert not found[one]["running"]
    assert found[two]["partitions"] == []
    heal(cluster, 1)
    until(lambda: row(cluster, 1, PLAIN)["state"] == "running", "the queue stays down")
    assert call(cluster, "GET", f"nodes/{one}", node=1)[1]["partitions"] == []


@pytest.mark.parametrize("handling", MODES)
def test_a_plain_queue_of_a_node_that_is_cut_off(start: Start, handling: str) -> None:
    """Its only copy is on the minority side: it stands still, or serves the clients there."""
    cluster = start(handling)
    declare(cluster, 1, PLAIN)
    with closing(connect(cluster, 1)) as connection, closing(connect(cluster, 2)) as other:
        publisher = Confirms(connection)
        publisher.publish(1, PLAIN)
        publisher.until(lambda: publisher.acked == [1])
        isolate(cluster, 1)
        until(lambda: is_away(other), "clients elsewhere get no answer")
        publisher.publish(1, PLAIN)
        if handling == "pause_minority":
            # The publisher's connection is not read meanwhile.
            with closing(connect(cluster, 1)) as asking:
                assert is_away(asking)
            connection.process_data_events(0.5)
            assert publisher.acked == [1]
        else:
            publisher.until(lambda: publisher.acked == [1, 2])
            assert connection.channel().queue_declare(PLAIN, passive=True).method.message_count == 2
        heal(cluster, 1)
        publisher.publish(1, PLAIN)
        publisher.until(lambda: publisher.acked == [1, 2, 3])
        assert publisher.nacked == []
        until(lambda: not is_away(other), "clients elsewhere are refused")
        assert fetch_all(other.channel(), PLAIN) == [b"1", b"2", b"3"]


IS_AWAY = "of durable queue 'plain' in vhost '/' is down or inaccessible"


def is_away(connection: Any) -> bool:
    """Whether a client that asks for the plain queue is told that its home is away."""
    try:
        connection.channel().queue_declare(PLAIN, passive=True)
    except pika.exceptions.ChannelClosedByBroker as error:
        return error.reply_code == 404 and IS_AWAY in error.reply_text
    return False


@pytest.mark.parametrize("handling", MODES)
@pytest.mark.parametrize("sync_mode", ["manual", "automatic"])
def test_a_mirror_that_is_cut_off_comes_back_as_its_policy_says(
    start: Start, handling: str, sync_mode: str
) -> None:
    cluster = start(handling)
    declare_mirrored(cluster, 1, **{"ha-sync-mode": sync_mode})
    fill(cluster, 0, 30)
    isolate(cluster, 3)
    until(lambda: has_mirrors(cluster, 1), "the mirror is waited for")
    fill(cluster, 30, 30)
    heal(cluster, 3)
    until(lambda: len(row(cluster, 1)["slave_nodes"]) == 2, "the mirror does not come back")
    if sync_mode == "manual":
        fill(cluster, 60, 1)
        assert row(cluster, 1)["synchronised_slave_nodes"] == [name_of(cluster, 2)]
    else:
        until(lambda: has_mirrors(cluster, 2), "the mirror is not synchronised")
    with closing(connect(cluster, 3)) as connection:
        count = 61 if sync_mode == "manual" else 60
        assert [int(body) for body in fetch_all(connection.channel(), QUEUE)] == list(range(count))
    until(lambda: has_mirrors(cluster, 2), "the mirror is not synchronised when all is gone")


@pytest.mark.parametrize("handling", MODES)
def test_masters_are_cut_off_again_and_again_under_traffic(start: Start, handling: str) -> None:
    cluster = start(handling)
    declare_mirrored(cluster, 1)
    with Traffic(cluster, QUEUE, publish_at=(1, 2), consume_at=((3,),)) as traffic:
        for how in ("broken", "silent", "broken"):
            traffic.goes_on()
            home = row(cluster, 3)["node"]
            master = next(number for number in (1, 2, 3) if name_of(cluster, number, 3) == home)
            # Node 3 has the consumer, whose node a master does not hand out on its own side.
            cut = master if master != 3 else 2
            isolate(cluster, cut, how)
            others = sorted({1, 2, 3} - {cut})
            until(lambda n=others: has_mirrors(cluster, 1, node=n[0]), "nobody takes over")  # type: ignore[misc]
            heal(cluster, cut)
            until(lambda n=others: has_mirrors(cluster, 2, node=n[0]), "views do not heal")  # type: ignore[misc]
        traffic.goes_on()
        traffic.finish()


def test_copies_of_the_losing_side_begin_anew_with_autoheal(start: Start) -> None:
    """Also where the other side had no time, or was not allowed, to replace the master."""
    cluster = start("autoheal")
    declare_mirrored(cluster, 1, **{"ha-sync-mode": "automatic"})
    fill(cluster, 0, 20)
    first = row(cluster, 2)["slave_pids"]
    isolate(cluster, 3)
    heal(cluster, 3)
    until(
        lambda: has_mirrors(cluster, 2) and row(cluster, 2)["slave_pids"] != first,
        "the mirror does not begin anew",
    )
    home = name_of(cluster, 1)
    isolate(cluster, 1)
    heal(cluster, 1)
    until(lambda: row(cluster, 2)["node"] != home, "the losing side keeps the master")
    until(lambda: has_mirrors(cluster, 2, node=2), "the former master is no mirror")
    with closing(connect(cluster, 1)) as connection:
        assert [int(body) for body in fetch_all(connection.channel(), QUEUE)] == list(range(20))


def test_without_a_replacement_the_master_goes_on(start: Start) -> None:
    """No mirror has all, and none may follow: the queue waits, and the master loses nothing."""
    cluster = start()
    declare(cluster, 1)
    fill(cluster, 0, 10)
    set_policy(cluster, {"ha-mode": "all", "ha-promote-on-failure": "when-synced"})
    until(lambda: len(row(cluster, 1)["slave_nodes"]) == 2, "no mirrors")
    with closing(connect(cluster, 1)) as connection:
        publisher = Confirms(connection)
        isolate(cluster, 1)
        publisher.publish(1, QUEUE)
        until(lambda: row(cluster, 2)["state"] == "down", "the queue is not down")
        heal(cluster, 1)
        publisher.until(lambda: publisher.acked == [1])
        assert not promoted(cluster, 2, 3)
        assert [int(body) for body in fetch_all(connection.channel(), QUEUE)] == [*range(10), 1]
