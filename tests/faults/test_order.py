"""The order of deliveries of quorum queues, by pika on three nodes, while a leader is killed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.faults.test_limits import QUORUM, Open, leader_of, opening, publish
from tests.faults.test_policies import length
from tests.faults.traffic import until
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports(__name__)
LEADER = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes, on which the second version of the machines is in force."""
    with serving_cluster(tmp_path_factory.mktemp("order"), BASE_PORT, policies=True) as made:
        yield made


@pytest.fixture
def opened(cluster: LocalCluster) -> Iterator[Open]:
    with opening(cluster) as channel:
        yield channel


def declare(opened: Open, queue: str, **arguments: object) -> Any:
    """A queue that is led by LEADER; a channel to that node."""
    channel = opened(LEADER)
    spelt = {name.replace("_", "-"): value for name, value in arguments.items()}
    channel.queue_declare(queue, durable=True, arguments={**QUORUM, **spelt})
    return channel


def take(channel: Any, queue: str, count: int) -> list[bytes]:
    """Takes that many messages and acknowledges each."""
    taken: list[bytes] = []

    def more() -> bool:
        method, _, body = channel.basic_get(queue)
        if method is not None:
            channel.basic_ack(method.delivery_tag)
            taken.append(body)
        return len(taken) == count

    until(more)
    return taken


def restart(cluster: LocalCluster) -> None:
    cluster.start_node(LEADER)
    cluster.wait_ready()


def test_two_classes_of_priorities_and_a_new_leader(cluster: LocalCluster, opened: Open) -> None:
    """The turns go on under the next leader, and a policy changes the rule of a live queue."""
    channel = declare(opened, "classes", x_priority_mode="two-classes")
    policy = {"pattern": "^strict$", "definition": {"priority-mode": "strict"}}
    assert call(cluster, "PUT", "policies/%2F/classes", policy)[0] in (201, 204)
    declare(opened, "strict")
    published = {b"a": 0, b"b": 1, b"c": 9, b"d": 5, b"e": 31, b"f": 6, b"g": 2}
    for body, priority in published.items():
        publish(channel, "classes", body, priority=priority)
    holder = opened(1)
    until(lambda: length(holder, "classes") == 7)
    assert take(holder, "classes", 1) == [b"c"]
    before = leader_of(cluster, "classes")
    assert before
    cluster.kill(LEADER)
    until(lambda: leader_of(cluster, "classes") not in ("", before))
    assert take(holder, "classes", 6) == [b"d", b"a", b"e", b"f", b"b", b"g"]
    until(lambda: leader_of(cluster, "strict") not in ("", before))

    def strictly() -> bool:
        for body, priority in ((b"low", 0), (b"1", 9), (b"2", 9), (b"3", 9)):
            publish(holder, "strict", body, priority=priority)
        return take(holder, "strict", 4) == [b"1", b"2", b"3", b"low"]

    assert strictly()
    policy["definition"] = {"priority-mode": "two-classes"}
    assert call(cluster, "PUT", "policies/%2F/classes", policy)[0] in (201, 204)
    until(lambda: not strictly())
    restart(cluster)


class Workers:
    """Consumers on several connections that take one message of a group at a time, or fail."""

    def __init__(self, opened: Open, queue: str, nodes: tuple[int, ...]) -> None:
        self.inbox: deque[tuple[Any, Any, str, int]] = deque()
        #: Group -> who has a message of it, and which.
        self.out: dict[str, tuple[Any, int]] = {}
        self.done: dict[str, list[int]] = defaultdict(list)
        self.tried: set[tuple[str, int]] = set()
        self.channels = [opened(node) for node in nodes]
        for channel in self.channels:
            channel.basic_qos(prefetch_count=2)
            channel.basic_consume(queue, self._deliver)

    def _deliver(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        group = (properties.headers or {}).get("x-group-id", "")
        if group:
            assert group not in self.out, f"{self.out[group]} and {body!r} are out"
            self.out[group] = (channel, int(body))
        self.inbox.append((channel, method, group, int(body)))

    def work(self) -> None:
        """Each second message of a group fails once."""
        for channel in self.channels:
            channel.connection.process_data_events(time_limit=0.02)
        if not self.inbox:
            return
        channel, method, group, number = self.inbox.popleft()
        self.out.pop(group, None)
        if group and number % 2 and (group, number) not in self.tried:
            self.tried.add((group, number))
            channel.basic_nack(method.delivery_tag, requeue=True)
        else:
            self.done[group].append(number)
            channel.basic_ack(method.delivery_tag)

    def leave(self, channel: Any) -> None:
        """One goes, with what it has."""
        self.channels.remove(channel)
        self.inbox = deque(each for each in self.inbox if each[0] is not channel)
        self.out = {group: held for group, held in self.out.items() if held[0] is not channel}
        channel.connection.close()

    def count(self) -> int:
        return sum(len(done) for done in self.done.values())


def test_groups_keep_their_order_when_a_leader_is_killed(
    cluster: LocalCluster, opened: Open
) -> None:
    """Three consumers, of which one goes; messages that fail; a new leader."""
    declare(opened, "groups", x_requeue_position="tail")
    publisher = opened(1)
    groups = ("a", "b", "c")
    for number in range(8):
        for group in groups:
            publish(publisher, "groups", b"%d" % number, headers={"x-group-id": group})
        publish(publisher, "groups", b"%d" % number)
    before = leader_of(cluster, "groups")
    assert before
    workers = Workers(opened, "groups", (1, 3, 3))

    def has(count: int) -> bool:
        workers.work()
        return workers.count() >= count

    until(lambda: has(6))
    workers.leave(workers.channels[-1])
    until(lambda: has(10))
    cluster.kill(LEADER)
    until(lambda: has(32))
    assert {group: workers.done[group] for group in groups} == {
        group: list(range(8)) for group in groups
    }
    assert sorted(workers.done[""]) == list(range(8))
    assert len(workers.tried) == 12, "some message did not fail"
    assert leader_of(cluster, "groups") != before
    until(lambda: length(publisher, "groups") == 0)
    restart(cluster)


def test_what_comes_back_goes_where_the_queue_says(cluster: LocalCluster, opened: Open) -> None:
    """The second message comes back, then the first; then the leader is killed."""
    expected = {
        "original": [b"0", b"1", b"2", b"3"],
        "front": [b"0", b"1", b"2", b"3"],
        "tail": [b"2", b"3", b"1", b"0"],
        "rabbitmq": [b"1", b"0", b"2", b"3"],
    }
    holder = opened(1)
    for queue in expected:
        arguments = {} if queue == "rabbitmq" else {"x_requeue_position": queue}
        channel = declare(opened, queue, **arguments)
        for number in range(4):
            publish(channel, queue, b"%d" % number)
        until(lambda queue=queue: length(holder, queue) == 4)  # type: ignore[misc]
        tags = [holder.basic_get(queue)[0].delivery_tag for _ in range(2)]
        for tag in reversed(tags):
            holder.basic_nack(tag, requeue=True)
        until(lambda queue=queue: length(holder, queue) == 4)  # type: ignore[misc]
    before = leader_of(cluster, "tail")
    assert before
    cluster.kill(LEADER)
    for queue, order in expected.items():
        until(lambda queue=queue: leader_of(cluster, queue) not in ("", before))  # type: ignore[misc]
        assert take(holder, queue, 4) == order
    policy = {"pattern": "^rabbitmq$", "definition": {"requeue-position": "tail"}}
    assert call(cluster, "PUT", "policies/%2F/order", policy)[0] in (201, 204)
    assert (
        call(
            cluster,
            "PUT",
            "policies/%2F/wrong",
            {**policy, "definition": {"requeue-position": "middle"}},
        )[0]
        == 400
    )

    def goes_to_the_tail() -> bool:
        for body in (b"a", b"b"):
            publish(holder, "rabbitmq", body)
        holder.basic_nack(holder.basic_get("rabbitmq")[0].delivery_tag, requeue=True)
        return take(holder, "rabbitmq", 2) == [b"b", b"a"]

    until(goes_to_the_tail)
    restart(cluster)
