"""The quorum queue guide of RabbitMQ 4.1, row by row, where 4.1 and 4.3 or this broker differ.

A test is named after its row. Each runs in two virtual hosts of one cluster, one that follows 4.1
and one that follows 4.3. Rows about the configuration load it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest
from benchmarks.convoy import ConvoyCluster
from benchmarks.systems import connect, wait_usable

from convoymq.edges.configuration import load
from convoymq.model.compatibility import RELEASE_4_1, RELEASE_4_3, RELEASES
from convoymq.model.config import ConfigError
from tests.clusters import Cluster
from tests.interop.helpers import Inbox, api, eventually, publish_confirmed

QUORUM = {"x-queue-type": "quorum"}
MORE_THAN_THE_LIMIT = 60
MESSAGES_HELD = 20_000


@pytest.fixture(scope="module")
def vhosts(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Release -> a virtual host whose new queues follow it."""
    if cluster.system == "rabbitmq":
        pytest.skip("RabbitMQ follows itself")
    made = {release: f"guide-{release}" for release in RELEASES}
    for release, name in made.items():
        eventually(lambda n=name, r=release: _put(cluster, n, r))  # type: ignore[misc]
    yield made
    for name in made.values():
        api(cluster, "DELETE", f"vhosts/{name}")


def _put(cluster: Cluster, name: str, release: str) -> bool:
    """Makes a virtual host; False while the new metadata version is not in force."""
    try:
        api(cluster, "PUT", f"vhosts/{name}", {"rabbitmq_compatibility": release})
    except OSError:
        return False
    return True


class Guide:
    """A virtual host that follows one release, with a connection to one of the nodes."""

    def __init__(self, cluster: Cluster, vhost: str, release: str) -> None:
        self.cluster = cluster
        self.vhost = vhost
        self.release = release
        self.follows_4_1 = release == RELEASE_4_1
        self._connections: list[Any] = []
        self.connection = self.connect(0)
        self.channel = self.connection.channel()
        self._queues: list[str] = []

    def connect(self, node: int) -> Any:
        uri = f"{self.cluster.uris[node].rstrip('/')}/{self.vhost}"
        self._connections.append(connect(uri, timeout_s=30))
        return self._connections[-1]

    def queue(self, type: str | None = "quorum", **arguments: object) -> str:
        name = f"guide-{len(self._queues)}-{time.monotonic_ns()}"
        self._queues.append(name)
        spelt = {name.replace("_", "-"): value for name, value in arguments.items()}
        given = {"x-queue-type": type} if type else {}
        self.channel.queue_declare(name, durable=True, arguments={**given, **spelt})
        return name

    def row(self, queue: str) -> Any:
        return api(self.cluster, "GET", f"queues/{self.vhost}/{quote(queue, safe='')}")

    def length(self, queue: str) -> int:
        return int(self.channel.queue_declare(queue, passive=True).method.message_count)

    def hand_outs(self, queue: str, most: int, *, reject: bool) -> list[Any]:
        """Gives the only message back until it is gone; returns its properties each time."""
        seen: list[Any] = []
        while len(seen) < most:
            method, properties, _ = self.channel.basic_get(queue)
            if method is None:
                break
            seen.append(properties)
            give_back = self.channel.basic_reject if reject else self.channel.basic_nack
            give_back(method.delivery_tag, requeue=True)
        return seen

    def close(self) -> None:
        for queue in self._queues:
            path = f"queues/{self.vhost}/{quote(queue, safe='')}"
            with suppress(urllib.error.HTTPError):
                api(self.cluster, "DELETE", path)
        for each in self._connections:
            with suppress(pika.exceptions.AMQPError):
                each.close()


@pytest.fixture(params=RELEASES)
def guide(
    request: pytest.FixtureRequest, cluster: Cluster, vhosts: dict[str, str]
) -> Iterator[Guide]:
    made = Guide(cluster, vhosts[request.param], request.param)
    yield made
    made.close()


def _priority(value: int | None) -> pika.BasicProperties:
    return pika.BasicProperties(delivery_mode=2, priority=value)


def _taken(guide: Guide, queue: str, count: int) -> list[bytes]:
    """Takes messages one by one, so that each is next when it is taken."""
    bodies = []
    for _ in range(count):
        _, _, body = guide.channel.basic_get(queue, auto_ack=True)
        bodies.append(body)
    return bodies


# Delivery limits.


def test_a24_a_message_that_is_always_nacked_is_poison(guide: Guide) -> None:
    queue = guide.queue()
    publish_confirmed(guide.channel, queue, [b"poison"])
    seen = guide.hand_outs(queue, MORE_THAN_THE_LIMIT, reject=False)
    assert len(seen) == (21 if guide.follows_4_1 else MORE_THAN_THE_LIMIT)
    eventually(lambda: guide.length(queue) == (0 if guide.follows_4_1 else 1))


def test_a54_the_count_comes_with_every_redelivered_message(guide: Guide) -> None:
    queue = guide.queue()
    for reject in (False, True):
        publish_confirmed(guide.channel, queue, [b"m"])
        seen = guide.hand_outs(queue, 4, reject=reject)
        counts = [(properties.headers or {}).get("x-delivery-count", 0) for properties in seen]
        counted = guide.follows_4_1 or reject
        assert counts == [0, 1, 2, 3] if counted else counts == [0, 0, 0, 0]
        guide.channel.queue_purge(queue)


@pytest.mark.parametrize("reject", [False, True], ids=["nack", "reject"])
def test_a55_beyond_twenty_returns_it_is_dead_lettered(guide: Guide, reject: bool) -> None:
    target = guide.queue()
    queue = guide.queue(x_dead_letter_exchange="", x_dead_letter_routing_key=target)
    publish_confirmed(guide.channel, queue, [b"poison"])
    seen = guide.hand_outs(queue, MORE_THAN_THE_LIMIT, reject=reject)
    if not (guide.follows_4_1 or reject):
        assert len(seen) == MORE_THAN_THE_LIMIT
        return
    assert len(seen) == 21
    eventually(lambda: guide.length(target) == 1)
    _, properties, _ = guide.channel.basic_get(target, auto_ack=True)
    assert properties.headers["x-first-death-reason"] == "delivery_limit"


def test_a54_recover_counts_as_nack(guide: Guide) -> None:
    queue = guide.queue()
    publish_confirmed(guide.channel, queue, [b"m"])
    guide.channel.basic_get(queue)
    guide.channel.basic_recover(requeue=True)
    eventually(lambda: guide.length(queue) == 1)
    _, properties, _ = guide.channel.basic_get(queue)
    assert (properties.headers or {}).get("x-delivery-count", 0) == int(guide.follows_4_1)


def test_looking_by_http_does_not_count(guide: Guide) -> None:
    """Better than the guide: who looks at messages does not bring them nearer to the limit."""
    queue = guide.queue(x_delivery_limit=2)
    publish_confirmed(guide.channel, queue, [b"m"])
    question = {"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"}
    for _ in range(5):
        found = api(guide.cluster, "POST", f"queues/{guide.vhost}/{queue}/get", question)
        assert [row["payload"] for row in found] == ["m"]
    _, properties, _ = guide.channel.basic_get(queue)
    assert "x-delivery-count" not in (properties.headers or {})


@pytest.mark.parametrize("reject", [False, True], ids=["nack", "reject"])
def test_a133_without_a_limit_returned_messages_go_to_the_tail(guide: Guide, reject: bool) -> None:
    queue = guide.queue(x_delivery_limit=-1)
    publish_confirmed(guide.channel, queue, [b"%d" % i for i in range(5)])
    method, _, body = guide.channel.basic_get(queue)
    assert body == b"0"
    give_back = guide.channel.basic_reject if reject else guide.channel.basic_nack
    give_back(method.delivery_tag, requeue=True)
    eventually(lambda: guide.length(queue) == 5)
    to_the_tail = guide.follows_4_1 or not reject
    assert _taken(guide, queue, 5) == ([b"1", b"2", b"3", b"4", b"0"] if to_the_tail else
                                       [b"0", b"1", b"2", b"3", b"4"])  # fmt: skip


def test_with_a_limit_returned_messages_go_to_the_head(guide: Guide) -> None:
    queue = guide.queue()
    publish_confirmed(guide.channel, queue, [b"%d" % i for i in range(4)])
    method, _, _ = guide.channel.basic_get(queue)
    guide.channel.basic_nack(method.delivery_tag, requeue=True)
    eventually(lambda: guide.length(queue) == 4)
    assert _taken(guide, queue, 4) == [b"0", b"1", b"2", b"3"]


def test_a_closed_channel_counts(guide: Guide) -> None:
    queue = guide.queue()
    publish_confirmed(guide.channel, queue, [b"m"])
    other = guide.connection.channel()
    other.basic_get(queue)
    other.close()
    eventually(lambda: guide.length(queue) == 1)
    _, properties, _ = guide.channel.basic_get(queue)
    assert properties.headers["x-delivery-count"] == 1


# Priorities.


def test_a51_two_classes_share_two_to_one(guide: Guide) -> None:
    queue = guide.queue()
    guide.channel.confirm_delivery()
    for level in [1] * 6 + [9] * 6:
        guide.channel.basic_publish("", queue, b"%d" % level, _priority(level))
    wanted = "991991991111" if guide.follows_4_1 else "999999111111"
    assert b"".join(_taken(guide, queue, 12)).decode() == wanted


def test_a52_all_up_to_four_and_none_are_normal(guide: Guide) -> None:
    queue = guide.queue()
    guide.channel.confirm_delivery()
    for level in (1, 2, None, 4, 9, 5, 7, 0, 31, 200):
        guide.channel.basic_publish("", queue, str(level).encode(), _priority(level))
    wanted = "9 5 1 7 31 2 200 None 4 0" if guide.follows_4_1 else "31 200 9 7 5 None 4 2 1 0"
    assert b" ".join(_taken(guide, queue, 10)).decode() == wanted


@pytest.mark.parametrize("by_policy", [False, True], ids=["argument", "policy"])
def test_the_priority_mode_of_a_queue_comes_first(guide: Guide, by_policy: bool) -> None:
    other = "strict" if guide.follows_4_1 else "two-classes"
    queue = guide.queue() if by_policy else guide.queue(x_priority_mode=other)
    path = f"policies/{guide.vhost}/mode"
    if by_policy:
        policy = {"pattern": f"^{queue}$", "definition": {"priority-mode": other}}
        api(guide.cluster, "PUT", path, {**policy, "apply-to": "queues"})
    guide.channel.confirm_delivery()

    def served() -> str:
        for level in (1, 1, 9, 9, 9):
            guide.channel.basic_publish("", queue, b"%d" % level, _priority(level))
        return b"".join(_taken(guide, queue, 5)).decode()

    wanted = "99911" if other == "strict" else "99191"
    try:
        eventually(lambda: served() == wanted)
    finally:
        if by_policy:
            api(guide.cluster, "DELETE", path)


# Global prefetch, types, placement.


def test_a72_global_prefetch_is_refused_by_a_declared_quorum_queue(guide: Guide) -> None:
    queue = guide.queue()
    connection = guide.connect(1)
    channel = connection.channel()
    channel.basic_qos(prefetch_count=7, global_qos=True)
    if not guide.follows_4_1:
        Inbox(channel, queue)
        return
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
        channel.basic_consume(queue, lambda *_: None)
    assert closed.value.reply_code == 540
    assert "does not support global qos" in closed.value.reply_text


def test_a73_a_durable_queue_without_a_type_is_a_quorum_queue(guide: Guide) -> None:
    """Better than the guide: what is durable is replicated. It keeps accepting what a classic queue
    does: Celery and others share a prefetch over a channel."""
    queue = guide.queue(type=None)
    assert guide.row(queue)["type"] == "quorum"
    channel = guide.connection.channel()
    channel.basic_qos(prefetch_count=2, global_qos=True)
    inbox = Inbox(channel, queue)
    publish_confirmed(guide.channel, queue, [b"a", b"b", b"c"])
    inbox.wait(2)
    assert not any(body == b"c" for _, _, body in inbox.deliveries)


def test_a79_replicas_are_on_the_nodes_with_the_fewest(guide: Guide) -> None:
    def replicas() -> Counter[str]:
        rows = api(guide.cluster, "GET", "queues")
        return Counter(member for row in rows for member in row.get("members", ()))

    for _ in range(12):
        guide.queue(x_quorum_initial_group_size=2)
    own = guide.row(guide.queue())["leader"]
    others = [count for node, count in replicas().items() if node != own]
    assert max(others) - min(others) <= 1


# What a queue keeps.


def test_a_queue_keeps_what_it_was_declared_with(guide: Guide) -> None:
    queue = guide.queue()
    other = RELEASE_4_3 if guide.follows_4_1 else RELEASE_4_1
    path = f"vhosts/{guide.vhost}"
    api(guide.cluster, "PUT", path, {"rabbitmq_compatibility": other})
    try:
        assert api(guide.cluster, "GET", path)["rabbitmq_compatibility"] == other
        assert guide.row(queue)["rabbitmq_compatibility"] == guide.release
        later = guide.queue()
        assert guide.row(later)["rabbitmq_compatibility"] == other
        # Declared again, it is the same queue.
        guide.channel.queue_declare(queue, durable=True, arguments=QUORUM)
        publish_confirmed(guide.channel, queue, [b"m"])
        seen = guide.hand_outs(queue, 2, reject=False)
        counted = (seen[1].headers or {}).get("x-delivery-count", 0)
        assert counted == int(guide.follows_4_1)
    finally:
        api(guide.cluster, "PUT", path, {"rabbitmq_compatibility": guide.release})


def test_a120_a_message_takes_less_than_32_bytes(guide: Guide) -> None:
    queue = guide.queue()
    channel = guide.connection.channel()
    for _ in range(MESSAGES_HELD):
        channel.basic_publish("", queue, b"x", _priority(None))
    eventually(lambda: guide.length(queue) == MESSAGES_HELD, connection=guide.connection)
    assert guide.row(queue)["memory"] < 32 * MESSAGES_HELD


def test_a112_without_a_leader_publishes_are_nacked(
    cluster: Cluster, vhosts: dict[str, str]
) -> None:
    """Better than the guide: the answer is negative after 5 s, not missing."""
    guides = [Guide(cluster, vhost, release) for release, vhost in vhosts.items()]
    queues = [guide.queue() for guide in guides]
    for guide, queue in zip(guides, queues, strict=True):
        publish_confirmed(guide.channel, queue, [b"before"])
    stopped = (1, 2)
    for node in stopped:
        cluster.kill(node, signal.SIGSTOP)
    try:
        for guide, queue in zip(guides, queues, strict=True):
            with pytest.raises(pika.exceptions.NackError):
                guide.channel.basic_publish("", queue, b"lost", mandatory=True)
    finally:
        for node in stopped:
            cluster.kill(node, signal.SIGCONT)
        wait_usable(cluster.uris)
    for guide in guides:
        guide.close()


# Leases.


def test_declaring_a_queue_again_renews_its_lease(cluster: Cluster, vhosts: dict[str, str]) -> None:
    """Symfony, Laravel and others declare a delay queue before each message that they put into it:
    what waits there must not go with the queue, whatever its type became."""
    lease_ms = 8_000
    leases: list[tuple[str, bool, dict[str, object]]] = []
    for type in (None, "quorum", "classic"):
        for passive in (False, True):
            arguments: dict[str, object] = {"x-expires": lease_ms}
            if type is not None:
                arguments["x-queue-type"] = type
            leases.append((f"lease-{type}-{passive}-{time.monotonic_ns()}", passive, arguments))
    names = {name for name, _, _ in leases}
    guides = [Guide(cluster, vhost, release) for release, vhost in vhosts.items()]
    others = [guide.connect(2).channel() for guide in guides]
    for guide in guides:
        for name, _, arguments in leases:
            guide.channel.queue_declare(name, durable=True, arguments=arguments)
            publish_confirmed(guide.channel, name, [b"waits"])
    begun = time.monotonic()
    while time.monotonic() < begun + 1.5 * lease_ms / 1000:
        time.sleep(0.2)
        for other in others:
            for name, passive, arguments in leases:
                if passive:
                    other.queue_declare(name, passive=True)
                else:
                    other.queue_declare(name, durable=True, arguments=arguments)
    for guide in guides:
        for name in names:
            _, _, body = guide.channel.basic_get(name, auto_ack=True)
            assert body == b"waits", (guide.release, name)

    def are_gone() -> bool:
        return not names & {row["name"] for row in api(cluster, "GET", "queues")}

    eventually(are_gone, connection=guides[0].connection)
    for guide in guides:
        guide.close()


# Configuration and tools.


def test_a32_flags_of_rabbitmq_are_enabled(cluster: Cluster, vhosts: dict[str, str]) -> None:
    assert isinstance(cluster, ConvoyCluster)
    for flag in ("stream_queue", "quorum_queue", "khepri_db", "rabbitmq_4.1.0", "all"):
        done = subprocess.run(
            [sys.executable, "-m", "convoymq.cli.app", "ctl", "enable_feature_flag", flag],
            env={**os.environ, "CONVOY_DATA_DIR": str(cluster.directory / "convoy1")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (flag, done.stdout, done.stderr)


def test_a44_the_prefetch_of_the_dead_letter_worker() -> None:
    for name in (
        "dead_letter_worker_consumer_prefetch",
        "rabbit.dead_letter_worker_consumer_prefetch",
    ):
        assert load(flags={name: "32"}).defaults.dead_letter_prefetch == 32


def test_a115_the_soft_limit_of_commands() -> None:
    for name in ("quorum_commands_soft_limit", "quorum_queue.commands_soft_limit"):
        assert load(flags={name: "32"}).defaults.publish_pending_commands == 32


def test_a117_keys_of_advanced_config() -> None:
    flags = {"rabbit.quorum_cluster_size": "5", "rabbit.quorum_commands_soft_limit": "32"}
    defaults = load(flags=flags).defaults
    assert (defaults.quorum_group_size, defaults.publish_pending_commands) == (5, 32)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("raft.wal_max_entries", "500000", "raft.wal_max_size_bytes"),
        ("raft.wal_max_batch_size", "4096", "a flush takes all that waits"),
        ("raft.data_dir", "/var/lib/raft", "data_dir"),
        ("ra.data_dir", "/var/lib/raft", "data_dir"),
        ("net_ticktime", "60", "cluster.suspect_after_max"),
        ("kernel.net_ticktime", "60", "cluster.suspect_after_max"),
    ],
)
def test_a118_keys_without_a_place_are_refused_with_what_to_do(
    key: str, value: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        load(flags={key: value})
    assert "did you mean" not in str(refused.value)


def test_a123_the_size_of_write_ahead_files() -> None:
    """128 MiB where RabbitMQ has 512: less to read at a start."""
    assert load().raft.wal_max_size_bytes == 128 << 20
    assert load(flags={"raft.wal_max_size_bytes": "512MiB"}).raft.wal_max_size_bytes == 512 << 20
    assert load(flags={"raft.wal_compute_checksums": "true"}).raft == load().raft


def test_a137_strategies_of_partitions() -> None:
    """Of classic queues: what is replicated by Raft needs none."""
    assert load(flags={"cluster_partition_handling": "pause_minority"}) == load()
    for value in ("autoheal", "ignore"):
        assert load(flags={"cluster_partition_handling": value}) != load()
    with pytest.raises(ConfigError, match="must be one of"):
        load(flags={"cluster_partition_handling": "pause_if_all_down"})
    with pytest.raises(ConfigError, match="a majority of all nodes counts"):
        load(flags={"cluster_partition_handling.pause_if_all_down.recover": "autoheal"})
