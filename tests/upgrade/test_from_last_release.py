"""Three nodes of the release 0.2.0 under load become nodes of this release, one by one.

The fixture upgrades them once: first one node, which goes back and comes again, then the others.
The tests look at what was refused meanwhile, and at what queues of both releases serve afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.queues.quorum.driver import QuorumDriver
from convoymq.replication.versions import announced
from tests.faults.traffic import Traffic, connect, in_step, until
from tests.ports import cluster_ports
from tests.upgrade import probes, releases
from tests.upgrade.mixed import MixedCluster, equal_states
from tests.upgrade.probes import QUORUM, http

pytestmark = pytest.mark.cluster
BASE_PORT = cluster_ports(__name__)
WORK = "work"
"""The queue that is published to and consumed from while the nodes are upgraded."""
PROBED = "probed"
WRITTEN = "written"
"""A queue of the old release, with messages that carry what it gives no meaning."""
FEATURES = (
    "limit",
    "ttl",
    "length",
    "priority",
    "delay",
    "repeats",
    "groups",
    "selection",
)
MARK = 7
"""A delivery limit by which the tests see that the policy of a queue is in force."""
EVERY = [(1, 2, 3), (2, 3, 1), (3, 1, 2)]


class Upgrade:
    """The cluster, and what was seen while it was upgraded."""

    def __init__(self, cluster: MixedCluster) -> None:
        self.cluster = cluster
        self.refused: dict[str, str] = {}
        self.left_behind: list[Any] = []

    def run(self) -> None:
        cluster = self.cluster
        self._declare_old()
        with Traffic(cluster, WORK, publish_at=(1, 2, 3), consume_at=EVERY) as traffic:
            traffic.goes_on()
            cluster.upgrade(3)
            traffic.goes_on()
            self._probe()
            # Asserts it for groups of which all replicas have applied the same index.
            equal_states(cluster)
            cluster.downgrade(3)
            traffic.goes_on()
            for number in (3, 2, 1):
                assert cluster.versions("quorum") == cluster.versions("metadata") == {1}
                cluster.upgrade(number)
                traffic.goes_on()
            for kind, (_, newest) in announced().items():
                until(lambda k=kind, n=newest: self._has(k, n), f"{kind} is not raised")
            traffic.goes_on()
            traffic.finish()
        in_step(cluster)
        until(lambda: equal_states(cluster), "the replicas do not come to rest")

    def _has(self, kind: str, version: int) -> bool:
        return self.cluster.versions(kind) <= {version}

    def _declare_old(self) -> None:
        with opened(self.cluster, 1) as channel:
            for name in (WORK, PROBED, WRITTEN, "old-dead", *(f"old-{each}" for each in FEATURES)):
                channel.queue_declare(name, durable=True, arguments=QUORUM)
            for number in range(6):
                sent = {"x-group-id": "g", "x-delay": 3_600_000}
                publish(channel, WRITTEN, b"%d" % number, priority=number % 5, headers=sent)

    def _probe(self) -> None:
        """Asks the only new node for all that is new."""
        cluster = self.cluster
        until(lambda: cluster.leader_of(PROBED) != 3, "node 3 leads")
        older = cluster.leader_of(PROBED)
        queues = cluster.api("queues", 3)
        self.refused = probes.refusals(cluster, 3, PROBED, older)
        with opened(cluster, 3) as channel:
            left = channel.queue_declare(PROBED, passive=True).method.message_count
        found = cluster.api("queues", 3)
        self.left_behind = [
            *({row["name"] for row in found} ^ {row["name"] for row in queues}),
            *cluster.api("policies", 3),
            *cluster.api("operator-policies", 3),
            *cluster.api("vhost-limits", 3),
            *cluster.api("user-limits", 3),
            *(row["name"] for row in cluster.api("nodes", 3) if row["being_drained"]),
            *[None] * left,
        ]


@contextmanager
def opened(cluster: MixedCluster, number: int) -> Iterator[Any]:
    """A channel with confirms."""
    with closing(connect(cluster, number)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def publish(channel: Any, queue: str, body: bytes = b"", **properties: Any) -> None:
    sent = pika.BasicProperties(delivery_mode=2, **properties)
    channel.basic_publish("", queue, body, sent)


@pytest.fixture(scope="module")
def upgrade(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgrade]:
    old = releases.source_of(releases.PREVIOUS)
    where = tmp_path_factory.mktemp("upgrade") / "cluster"
    with MixedCluster(where, BASE_PORT, old) as made:
        made.wait_ready()
        upgrade = Upgrade(made)
        upgrade.run()
        yield upgrade


@pytest.fixture
def channel(upgrade: Upgrade) -> Iterator[Any]:
    with opened(upgrade.cluster, 2) as made:
        yield made


@pytest.fixture(params=["old", "new"])
def queue(request: pytest.FixtureRequest, channel: Any) -> str:
    """The queue of a test, by its name: declared by the old release, or by this one."""
    name = f"{request.param}-{request.node.originalname.split('_')[1]}"
    if request.param == "new":
        channel.queue_declare("new-dead", durable=True, arguments=QUORUM)
        channel.queue_declare(name, durable=True, arguments=QUORUM)
    return name


def test_all_that_is_new_is_probed() -> None:
    assert set(probes.ARGUMENTS) == set(QuorumDriver.rules.first_versions)


def test_before_the_last_node_is_new_it_is_refused_by_name(upgrade: Upgrade) -> None:
    unnamed = {n: text for n, text in upgrade.refused.items() if not probes.is_named(n, text)}
    assert not unnamed
    assert not upgrade.left_behind


def test_what_the_old_release_wrote_keeps_its_meaning(upgrade: Upgrade, channel: Any) -> None:
    """Priorities, groups and times of messages that were in the log before the version rose."""
    row = upgrade.cluster.api(f"queues/%2F/{WRITTEN}")
    assert (row["messages_ready"], row["messages_delayed"]) == (6, 0)
    got = [channel.basic_get(WRITTEN)[2] for _ in range(6)]
    assert got == [b"%d" % number for number in range(6)]


def test_limit_of_failed_deliveries_by_policy(upgrade: Upgrade, queue: str, channel: Any) -> None:
    definition = {**letters(queue), "delivery-limit": 1, "dead-letter-strategy": "at-least-once"}
    put_policy(upgrade, queue, definition)
    publish(channel, queue, b"poison")

    def fails() -> bool:
        method, _, _ = channel.basic_get(queue)
        if method is not None:
            channel.basic_reject(method.delivery_tag, requeue=True)
        return died(upgrade, queue, "delivery_limit")

    until(fails, "it is not given up")


def test_ttl_by_policy(upgrade: Upgrade, queue: str, channel: Any) -> None:
    put_policy(upgrade, queue, {**letters(queue), "message-ttl": 1})

    publish(channel, queue)
    until(lambda: died(upgrade, queue, "expired"), "nothing expires")


def test_length_by_policy(upgrade: Upgrade, queue: str, channel: Any) -> None:
    put_policy(upgrade, queue, {"max-length": 2, "overflow": "reject-publish"})

    def refuses() -> bool:
        try:
            publish(channel, queue)
        except pika.exceptions.NackError:
            return True
        return False

    until(refuses, "it grows without a limit")
    assert info(upgrade, queue)["messages_ready"] <= 3


def test_priority_of_messages(queue: str, channel: Any) -> None:
    for priority in (None, 9, 31):
        publish(channel, queue, str(priority).encode(), priority=priority)
    # Queues of the old release follow RabbitMQ 4.3 with its levels, new ones 4.1 with two classes.
    expected = [b"31", b"9", b"None"] if queue.startswith("old") else [b"9", b"31", b"None"]
    assert [channel.basic_get(queue)[2] for _ in range(3)] == expected


def test_delay_of_messages(upgrade: Upgrade, queue: str, channel: Any) -> None:
    publish(channel, queue, b"late", headers={"x-delay": 3_600_000})
    publish(channel, queue, b"soon", headers={"x-delay": 1})
    waiting = http(upgrade.cluster, 1, "GET", f"convoy/queues/%2F/{queue}/scheduled")["messages"]
    assert waiting
    got: list[bytes] = []

    def comes() -> bool:
        body = channel.basic_get(queue)[2]
        got.extend([] if body is None else [body])
        return bool(got)

    until(comes, "nothing becomes due")
    assert got == [b"soon"]


def test_repeats_by_message_id(upgrade: Upgrade, queue: str, channel: Any) -> None:
    put_policy(upgrade, queue, {"deduplication-count": 100})
    for _ in range(2):
        publish(channel, queue, message_id="one")
    assert channel.basic_get(queue)[0] is not None
    assert channel.basic_get(queue)[0] is None


def test_groups_of_messages(queue: str, channel: Any) -> None:
    for body, group in ((b"a1", "a"), (b"a2", "a"), (b"b1", "b")):
        publish(channel, queue, body, headers={"x-group-id": group})
    first, _, body = channel.basic_get(queue)
    assert body == b"a1"
    assert channel.basic_get(queue)[2] == b"b1"
    assert channel.basic_get(queue)[0] is None
    channel.basic_ack(first.delivery_tag)
    assert channel.basic_get(queue)[2] == b"a2"


def test_selection_of_messages(upgrade: Upgrade, queue: str, channel: Any) -> None:
    cluster = upgrade.cluster
    for number in range(4):
        publish(channel, queue, b"%d" % number, headers={"n": number})
    path = f"convoy/queues/%2F/{queue}/messages"
    page = http(cluster, 3, "GET", path)
    assert [row["payload"] for row in page["messages"]] == ["0", "1", "2", "3"]
    target = f"{queue}-target"
    channel.queue_declare(target, durable=True, arguments=QUORUM)
    asked = {"filter": {"headers": {"n": 2}}, "queue": target}
    http(cluster, 1, "POST", f"{path}/move", asked)
    until(lambda: cluster.messages_in(target) == 1, "nothing is moved")
    assert channel.basic_get(target)[2] == b"2"
    assert cluster.messages_in(queue) == 3


def test_all_replicas_have_equal_states(upgrade: Upgrade) -> None:
    until(lambda: equal_states(upgrade.cluster), "the replicas do not come to rest")


def letters(queue: str) -> dict[str, Any]:
    """A policy's keys that send dead letters to the queue for those of the release."""
    return {
        "dead-letter-exchange": "",
        "dead-letter-routing-key": dead(queue),
        "overflow": "reject-publish",
    }


def dead(queue: str) -> str:
    return queue.partition("-")[0] + "-dead"


def put_policy(upgrade: Upgrade, queue: str, definition: dict[str, Any]) -> None:
    """Sets a policy for one queue, and waits until the queue's log has it."""
    definition = {"delivery-limit": MARK, **definition}
    body = {"pattern": f"^{queue}$", "definition": definition, "apply-to": "queues"}
    http(upgrade.cluster, 1, "PUT", f"policies/%2F/{queue}", body)
    limit = definition["delivery-limit"]
    until(lambda: info(upgrade, queue)["delivery_limit"] == limit, "the policy does not act")


def info(upgrade: Upgrade, queue: str) -> dict[str, Any]:
    found: dict[str, Any] = upgrade.cluster.api(f"queues/%2F/{queue}")
    return found


def died(upgrade: Upgrade, queue: str, reason: str) -> bool:
    """Returns whether a message of the queue is among the dead letters for that reason."""
    asked = {"filter": {"last_death": {"queue": queue, "reason": reason}}}
    path = f"convoy/queues/%2F/{dead(queue)}/messages/browse"
    return bool(http(upgrade.cluster, 1, "POST", path, asked)["messages"])
