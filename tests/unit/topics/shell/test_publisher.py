"""Messages to a topic of a cluster of fakes: routed, placed, and read from its partitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from convoymq.metadata.commands import Bind, DeclareExchange
from convoymq.metadata.topics import partition_queue_name
from convoymq.model.errors import AccessRefused, Misuse, NotFound, PreconditionFailed
from convoymq.model.tables import Field, Table
from convoymq.queues.interface import ConsumerSpec
from convoymq.topics.rules.refusals import NoKey
from convoymq.topics.shell.handle import TopicHandle
from tests.unit.kernels.records import record_of
from tests.unit.queues.classic.support import Channel
from tests.unit.queues.fake_cluster import FakeCluster, until

KEYS = [f"key {number}" for number in range(20)]
FIRST = Field("S", b"first")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        made.raise_versions()
        await made.nodes[1].broker.topics.create("/", "orders", partitions=2, logical=16)
        yield made


def handle_of(cluster: FakeCluster, node: int) -> TopicHandle:
    found = cluster.nodes[node].broker.local_topics.find("/", "orders")
    assert found is not None
    return found


class Publisher(Channel):
    """A channel of a node; numbers are bodies and tags."""

    def __init__(self, cluster: FakeCluster, node: int) -> None:
        super().__init__()
        self.published: list[tuple[str, bytes]] = []
        self.made = handle_of(cluster, node).client(cluster.nodes[node].new_session(), self)
        self.client = self.made

    def send(self, count: int = 1, *, tagged: bool = True) -> None:
        for _ in range(count):
            number = len(self.published) + 1
            key, body = KEYS[number * 7 % len(KEYS)], b"%d" % number
            self.published.append((key, body))
            tag = number if tagged else 0
            self.made.target.publish([record_of("orders", key, body)], len(body), tag)

    def confirmed(self) -> list[int]:
        """Tags, each as often as it was confirmed."""
        return sorted(
            tag
            for event, *rest in self.heard
            if event == "published" and rest[1]
            for first, last in zip(rest[0][::2], rest[0][1::2], strict=True)
            for tag in range(first, last + 1)
        )


async def stored(cluster: FakeCluster) -> list[list[bytes]]:
    """Bodies in each partition, those of older route versions first."""
    node = cluster.nodes[2]
    found = []
    partitions = node.machine.vhosts["/"].topics["orders"].state.lineage.partitions
    for partition in sorted(partitions.values(), key=lambda each: each.created_version):
        record = node.machine.vhosts["/"].queues[partition_queue_name("orders", partition.pid)]
        queue = node.broker.local.find(record)
        assert queue is not None
        expected = queue.local_counts()[0]  # type: ignore[attr-defined]
        reader = Channel()
        reader.client = queue.client(node.new_session(), reader)
        reader.client.subscribe(
            ConsumerSpec(number=1, tag="t", prefetch=10_000, no_ack=False, stream_offset=FIRST)
        )
        await until(lambda got=reader, count=expected: len(got.got) == count)  # type: ignore[misc]
        found.append(reader.deliveries())
        reader.client.close()
    return found


async def check_order(cluster: FakeCluster, publisher: Publisher) -> None:
    """Each message is there once, in the order of its key."""
    found = [body for bodies in await stored(cluster) for body in bodies]
    for key in KEYS:
        mine = {body for each, body in publisher.published if each == key}
        expected = [body for each, body in publisher.published if each == key]
        assert [body for body in found if body in mine] == expected, key
    assert len(found) == len(publisher.published)


async def test_messages_go_to_the_partitions_of_their_keys(cluster: FakeCluster) -> None:
    publisher = Publisher(cluster, 3)
    publisher.send(50)
    await until(lambda: publisher.confirmed() == [*range(1, 51)])
    assert min(map(len, await stored(cluster))) > 0
    await check_order(cluster, publisher)
    assert not publisher.made.has_pending
    info = handle_of(cluster, 3).info()
    assert (info["partitions"], info["publishers"], info["sent_again"]) == (2, 1, 0)
    assert await handle_of(cluster, 3).counts() == (50, 0)
    publisher.made.close()
    assert handle_of(cluster, 3).info()["publishers"] == 0


async def test_order_holds_through_a_split_a_merge_and_a_move(cluster: FakeCluster) -> None:
    topics = cluster.nodes[1].broker.topics
    publishers = {node: Publisher(cluster, node) for node in (1, 2, 3)}
    publisher = publishers.pop(2)
    running = True

    async def publish() -> None:
        while running:
            publisher.send(7, tagged=len(publisher.published) % 3 > 0)
            await asyncio.sleep(0)

    task = asyncio.create_task(publish())
    split = await topics.split("/", "orders", 0)
    await topics.wait_change("/", "orders", split["change_id"])
    merge = await topics.merge("/", "orders", [3, 1])
    await topics.wait_change("/", "orders", merge["change_id"])
    (row,) = [each for each in await topics.route("/", "orders") if each["pid"] == 2]
    to = 1 if row["node"] != "n1" else 2
    move = await topics.move("/", "orders", 2, to)
    await topics.wait_change("/", "orders", move["change_id"])
    running = False
    await task
    await until(lambda: not publisher.made.has_pending)
    await check_order(cluster, publisher)
    assert publisher.made.sent_again > 0
    assert len(publisher.confirmed()) == len(set(publisher.confirmed()))
    assert not any(event == "published" and not rest[1] for event, *rest in publisher.heard)
    for other in publishers.values():
        other.send(3)
        await until(lambda it=other: it.confirmed() == [1, 2, 3])  # type: ignore[misc]


async def test_a_closed_channel_stores_what_it_has_published(cluster: FakeCluster) -> None:
    topics = cluster.nodes[1].broker.topics
    publisher = Publisher(cluster, 2)
    publisher.send(20, tagged=False)
    split = await topics.split("/", "orders", 0)
    publisher.send(20, tagged=False)
    publisher.made.close()
    await topics.wait_change("/", "orders", split["change_id"])
    await until(lambda: handle_of(cluster, 2).info()["publishers"] == 0)
    await check_order(cluster, publisher)
    assert publisher.heard == []


async def test_a_deleted_topic_answers_publishes_and_is_forgotten(cluster: FakeCluster) -> None:
    publisher = Publisher(cluster, 2)
    publisher.send(3)
    handle = handle_of(cluster, 2)
    await cluster.nodes[1].broker.topics.delete("/", "orders")
    await until(lambda: publisher.confirmed() == [1, 2, 3])
    assert isinstance(handle.ended, NotFound)
    local = cluster.nodes[2].broker.local_topics
    assert local.find("/", "orders") is None
    assert local.handles() == []
    with pytest.raises(NotFound):
        cluster.nodes[2].broker.publishing.route("/", "orders", ("key",), None)
    await cluster.nodes[1].broker.topics.create("/", "orders", partitions=1)
    assert handle_of(cluster, 2) is not handle


async def test_the_exchange_of_a_topic_leads_to_its_handle(cluster: FakeCluster) -> None:
    publishing = cluster.nodes[2].broker.publishing
    handle = handle_of(cluster, 2)
    route = publishing.route("/", "orders", ("key",), None)
    assert route == ((handle,), True, True)
    keyed = publishing.route("/", "orders", ("",), None, keyed=True)
    assert keyed == ((handle,), False, True)
    await cluster.nodes[1].store.execute(
        DeclareExchange(vhost="/", name="all", type="fanout", durable=True)
    )
    await cluster.nodes[1].store.execute(
        Bind(vhost="/", source="all", kind="exchange", destination="orders")
    )
    assert publishing.route("/", "all", ("key",), None) == ((handle,), True, False)
    header = Table.of({"x-order-key": "key"})
    assert publishing.route("/", "all", ("",), header) == ((handle,), False, False)
    assert publishing.route("/", "", ("orders",), None).queues == ()


async def test_what_a_topic_does_not_take_is_refused(cluster: FakeCluster) -> None:
    publishing = cluster.nodes[2].broker.publishing
    for keys, headers, asked, text in (
        (("",), None, None, "no order key"),
        (("key",), {"x-order-key": 7}, None, "must be a string that is not empty"),
        (("key",), {"x-order-key": ""}, None, "must be a string that is not empty"),
        (("key", "copy"), None, None, "without CC and BCC"),
        (("key",), None, "expiration", "'expiration' is not served by topic"),
        (("key",), None, "x-delay", "'x-delay' is not served by topic"),
    ):
        with pytest.raises((PreconditionFailed, NoKey), match=text):
            publishing.route("/", "orders", keys, Table.of(headers or {}), asked)
    with pytest.raises(AccessRefused, match="cannot publish to a partition"):
        publishing.route("/", "", (partition_queue_name("orders", 0),), None)
    with pytest.raises(Misuse, match="in groups"):
        Publisher(cluster, 1).made.purge()


async def test_a_dead_letter_without_an_order_key_has_no_route_to_a_topic(
    cluster: FakeCluster,
) -> None:
    publishing = cluster.nodes[2].broker.publishing
    route = publishing.route_dead_letter  # type: ignore[attr-defined]
    properties = publishing.route.__defaults__[-1]  # type: ignore[attr-defined]
    handle = handle_of(cluster, 2)
    assert route("/", "orders", ("key",), Table.of({}), properties) == (handle,)
    assert route("/", "orders", ("",), Table.of({"x-order-key": "k"}), properties) == (handle,)
    assert route("/", "orders", ("",), Table.of({}), properties) == ()
    partition = partition_queue_name("orders", 0)
    assert route("/", "", (partition,), Table.of({}), properties) == ()
