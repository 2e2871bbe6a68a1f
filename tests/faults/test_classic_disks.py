"""Classic queues, plain and mirrored, on nodes that are short of disk space or memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, cut_power, start_nodes
from tests.faults.conftest import StartCluster, ballast
from tests.faults.test_mirrored import ALL, QUEUE, declare, has_mirrors, set_policy
from tests.faults.traffic import Traffic, connect, log_has, until
from tests.interop.helpers import fetch_all

MIB = 1 << 20
PLAIN = "plain"
NODES = (1, 2, 3)


def declare_both(cluster: LocalCluster) -> None:
    set_policy(cluster, ALL)
    for queue in (PLAIN, QUEUE):
        declare(cluster, 1, queue)
    until(lambda: has_mirrors(cluster, 2), "no mirrors")


def set_memory(cluster: LocalCluster, mark: dict[str, object]) -> None:
    assert call(cluster, "PUT", "convoy/node/watermarks", {"memory": mark}, node=3)[0] < 300


def test_alarms_block_publishers_and_nobody_else(
    small_disk: Path, start_cluster: StartCluster
) -> None:
    settings = {"disk_free_limit.absolute": "20MiB", "raft.wal_max_size_bytes": "1MiB"}
    cluster = start_cluster(settings=settings)
    declare_both(cluster)
    with ExitStack() as stack:
        both = [
            stack.enter_context(Traffic(cluster, queue, publish_at=(2,)))
            for queue in (PLAIN, QUEUE)
        ]

        def blocks(*, alarm: str) -> None:
            for traffic in both:
                until(lambda t=traffic: t.publisher.blocked, f"{alarm}: not blocked")  # type: ignore[misc]
                until(
                    lambda t=traffic: cluster.messages_in(t.queue) == 0,  # type: ignore[misc]
                    f"{alarm}: consumers do not go on",
                )

        def goes_on() -> None:
            for traffic in both:
                until(lambda t=traffic: not t.publisher.blocked, "the publisher stays blocked")  # type: ignore[misc]
                traffic.goes_on()

        goes_on()
        heavy = ballast(small_disk, 10 * MIB)
        blocks(alarm="disk")
        heavy.unlink()
        goes_on()
        set_memory(cluster, {"absolute": 1})
        blocks(alarm="memory")
        set_memory(cluster, {"relative": 0.6})
        goes_on()
        for traffic in both:
            traffic.finish()
            assert not traffic.publisher.resent


def test_a_full_disk_loses_nothing_that_was_confirmed(
    small_disk: Path, start_cluster: StartCluster
) -> None:
    settings = {"disk_free_limit.absolute": "0", "raft.wal_max_size_bytes": "1MiB"}
    cluster = start_cluster(settings=settings)
    declare_both(cluster)
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                Traffic(cluster, queue, publish_at=(2,), consume_at=(), size=2000, window=50)
            )
            for queue in (PLAIN, QUEUE)
        ]
        for traffic in both:
            traffic.goes_on()
        heavy = ballast(small_disk, 0)
        until(lambda: log_has(cluster, 1, "classic.disk_error"), "the disk does not get full")
        # Publishes are refused while there is no room, and confirmed when there is.
        heavy.unlink()
        for traffic in both:
            traffic.goes_on()
        heavy = ballast(small_disk, 0)
        until(
            lambda: all(
                t.publisher.blocked or len(t.publisher.unconfirmed) + len(t.publisher.again) >= 50
                for t in both
            ),
            "publishers go on",
        )
        confirmed = [set(traffic.publisher.confirmed) for traffic in both]
        # The power fails while the disk is full.
        cut_power(cluster)
        heavy.unlink()
        start_nodes(cluster, *NODES)
        for traffic in both:
            traffic.goes_on()
            traffic.finish()
    connection = connect(cluster, 3)
    for traffic, before in zip(both, confirmed, strict=True):
        got = [int(body) for body in fetch_all(connection.channel(), traffic.queue)]
        assert before <= set(got)
        assert traffic.publisher.confirmed <= set(got)
    connection.close()
