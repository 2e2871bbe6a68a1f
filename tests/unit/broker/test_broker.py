"""The broker as edges see it: permissions, declarations, routing, reply-to, lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.broker.facade import Broker
from convoymq.edges.http.metrics import render
from convoymq.metadata.commands import (
    DeclareQueue,
    DeleteUser,
    DeleteVhost,
    PutPermission,
    PutTopicPermission,
    PutUser,
    PutVhost,
)
from convoymq.metadata.machine import User
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import (
    AccessRefused,
    NotAllowed,
    NotFound,
    NotServed,
    PreconditionFailed,
    ResourceLocked,
    Unavailable,
)
from convoymq.model.tables import Field, Table
from convoymq.queues.stream.queue import StreamQueue
from tests.provocation import Observed
from tests.unit.queues.classic.support import Channel, message
from tests.unit.queues.fake_cluster import (
    INCARNATION,
    FakeCluster,
    FakeConnection,
    exchange_end,
    queue_end,
    until,
)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    settings = DefaultsConfig(operation_timeout_ms=300)
    async with FakeCluster(tmp_path, nodes=3, settings=settings) as made:
        yield made


def channel(cluster: FakeCluster, node: int, name: str, owner: int | None = None) -> Channel:
    made = Channel()
    queue = cluster.nodes[node].broker.queue_admin.find_queue("/", name, owner)
    made.client = queue.client(cluster.nodes[node].new_session(), made)
    return made


async def user(cluster: FakeCluster, **patterns: str) -> User:
    store = cluster.nodes[1].store
    await store.execute(PutUser(name="u"))
    rules = {"configure": "", "write": "", "read": "", **patterns}
    await store.execute(PutPermission(user="u", vhost="/", **rules))
    return cluster.nodes[1].machine.users["u"]


async def test_only_the_right_password_from_the_right_place_is_accepted(
    cluster: FakeCluster,
) -> None:
    broker = cluster.nodes[2].broker
    assert (await broker.access.authenticate("guest", b"guest", "127.0.0.1")).name == "guest"
    assert (await broker.access.authenticate("guest", b"guest", "::ffff:127.0.0.1")).name == "guest"
    for name, password, peer in (
        ("guest", b"wrong", "127.0.0.1"),
        ("guest", b"guest", "10.0.0.1"),
        ("nobody", b"guest", "127.0.0.1"),
    ):
        with pytest.raises(AccessRefused, match="Login was refused"):
            await broker.access.authenticate(name, password, peer)
    assert broker.counters.auth_failed == 3


async def test_a_virtual_host_must_exist_and_admit_the_user(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    broker.access.open_vhost(cluster.guest, "/")
    with pytest.raises(NotAllowed, match="vhost x not found"):
        broker.access.open_vhost(cluster.guest, "x")
    await cluster.nodes[2].store.execute(PutVhost(name="v"))
    await until(lambda: "v" in cluster.nodes[1].machine.vhosts)
    with pytest.raises(NotAllowed, match="access to vhost 'v' refused for user 'guest'"):
        broker.access.open_vhost(cluster.guest, "v")


async def test_permissions_are_matched_by_name(cluster: FakeCluster) -> None:
    someone = await user(cluster, write="^amq.default$|^mine", read="^mine")
    broker = cluster.nodes[1].broker
    broker.access.check_permission(someone, "/", "write", "exchange", "")
    broker.access.check_permission(someone, "/", "read", "queue", "mine-1")
    with pytest.raises(AccessRefused, match="configure access to queue 'mine-1' in"):
        broker.access.check_permission(someone, "/", "configure", "queue", "mine-1")


async def test_topic_permissions_bind_topic_exchanges_only(cluster: FakeCluster) -> None:
    someone = await user(cluster)
    store, broker = cluster.nodes[1].store, cluster.nodes[1].broker
    assert not broker.access.has_topic_permissions(someone, "/")
    for exchange in ("amq.topic", "amq.direct"):
        await store.execute(
            PutTopicPermission(user="u", vhost="/", exchange=exchange, write="^a", read="^b")
        )
    assert broker.access.has_topic_permissions(someone, "/")
    broker.access.check_topic_permission(someone, "/", "write", "amq.topic", "a.b")
    broker.access.check_topic_permission(someone, "/", "write", "amq.direct", "z")
    with pytest.raises(AccessRefused, match=r"read access to topic 'a\.b' in"):
        broker.access.check_topic_permission(someone, "/", "read", "amq.topic", "a.b")


async def test_the_default_type_follows_the_properties(cluster: FakeCluster) -> None:
    async def type_of(**properties: Any) -> str:
        name, _, _ = await cluster.queue(1, properties.pop("name", "q"), **properties)
        found = cluster.nodes[1].broker.queue_admin.find_queue("/", name, 1).type
        await cluster.nodes[1].broker.queue_admin.delete_queue("/", name, owner=1)
        return found

    assert await type_of() == "quorum"
    assert await type_of(durable=False) == "classic"
    assert await type_of(auto_delete=True) == "classic"
    assert await type_of(exclusive=True, owner=1) == "classic"
    assert await type_of(name="") == "classic"
    limits = ({"x-expires": 100_000}, {"x-message-ttl": 5}, {"x-max-length": 1})
    for served in limits:
        # Nodes of the release before do not know them.
        with pytest.raises(PreconditionFailed, match="not served yet by quorum queues"):
            await type_of(arguments=served)
    for node in cluster.nodes.values():
        node.machine.set_version(2)
    for served in limits:
        assert await type_of(arguments=served) == "quorum"
        assert await type_of(arguments=served, durable=False) == "classic"
        assert await type_of(arguments={**served, "x-queue-type": "classic"}) == "classic"
    assert await type_of(arguments={"x-queue-type": "classic"}) == "classic"


@pytest.mark.parametrize("arguments", [{}, {"x-queue-type": "classic"}])
@pytest.mark.parametrize("node", [1, 2])
async def test_a_declared_queue_works_from_every_node(
    cluster: FakeCluster, arguments: dict[str, str], node: int
) -> None:
    assert await cluster.queue(1, "q", arguments=arguments) == ("q", 0, 0)
    await until(lambda: "q" in cluster.nodes[node].machine.vhosts["/"].queues)
    publisher, consumer = channel(cluster, 3, "q"), channel(cluster, node, "q")
    publisher.publish(b"a", b"b", tag=1)
    await until(lambda: ("published", [1, 2], True) in publisher.heard)
    assert await cluster.queue(node, "q", arguments=arguments) == ("q", 2, 0)
    consumer.consume(prefetch=10)
    await until(lambda: consumer.deliveries() == [b"a", b"b"])
    assert await cluster.nodes[node].broker.declarations.passive_declare("/", "q") == ("q", 0, 1)
    assert await cluster.nodes[node].broker.queue_admin.delete_queue("/", "q") == 0
    await until(lambda: ("cancelled", 1, "deleted") in consumer.heard)
    with pytest.raises(NotFound):
        cluster.nodes[node].broker.queue_admin.find_queue("/", "q")


@pytest.mark.moves("rabbitmq_global_messages_dead_lettered_delivery_limit_total")
async def test_messages_over_the_delivery_limit_are_in_the_metrics(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q", arguments={"x-delivery-limit": 0})
    node = cluster.nodes[1]
    reader = channel(cluster, 1, "q")
    await render(node.broker)
    reader.publish(b"poison")
    reader.consume()
    await until(lambda: reader.deliveries() == [b"poison"])
    reader.client.return_(1, [0, 0], failed=True)
    await until(lambda: node.host.notes)
    event, fields = node.host.notes[0]
    assert (event, fields["queue"], fields["count"]) == ("quorum.delivery_limit", "q", 1)
    name = "rabbitmq_global_messages_dead_lettered_delivery_limit_total"
    name += '{queue_type="rabbit_quorum_queue"'
    text = await render(node.broker)
    lines = [line for line in text.splitlines() if line.startswith(name)]
    counts = {line.partition("strategy=")[2] for line in lines}
    assert counts == {'"disabled"} 1', '"at_most_once"} 0', '"at_least_once"} 0'}
    await node.broker.queue_admin.delete_queue("/", "q")
    assert node.broker.local.dead_lettered() == {("disabled", "delivery_limit"): 1}


@pytest.mark.moves(
    "rabbitmq_global_messages_dead_lettered_rejected_total",
    "rabbitmq_global_messages_dead_lettered_confirmed_total",
)
async def test_dead_letters_go_from_queue_to_queue_and_are_in_the_metrics(
    cluster: FakeCluster,
) -> None:
    """By the real bindings, into a quorum queue and a classic one."""
    node = cluster.nodes[1]
    cluster.raise_versions()
    arguments = {
        "x-dead-letter-exchange": "dlx",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    await cluster.queue(1, "work", arguments=arguments)
    await cluster.queue(1, "dead")
    await cluster.queue(2, "copy", arguments={"x-queue-type": "classic"})
    declarations = node.broker.declarations
    await declarations.declare_exchange(
        "/", "dlx", "fanout", durable=True, auto_delete=False, internal=True
    )
    for name in ("dead", "copy"):
        await declarations.bind("/", "dlx", queue_end(name), "")
    await render(node.broker)
    reader = channel(cluster, 1, "work")
    reader.publish(b"a", b"b")
    reader.consume()
    await until(lambda: reader.deliveries() == [b"a", b"b"])
    reader.client.discard(1, [0, 1])
    others = [channel(cluster, 1, name) for name in ("dead", "copy")]
    for other in others:
        other.consume()
    await until(lambda: all(other.deliveries() == [b"a", b"b"] for other in others))
    await until(lambda: node.broker.local.dead_letters_moved() == 2)
    text = await render(node.broker)
    labels = '{queue_type="rabbit_quorum_queue",dead_letter_strategy="at_least_once"} 2'
    for name in ("rejected", "confirmed"):
        assert f"rabbitmq_global_messages_dead_lettered_{name}_total{labels}" in text
    await node.broker.queue_admin.delete_queue("/", "work")
    assert node.broker.local.dead_letters_moved() == 2


@pytest.mark.moves(
    "rabbitmq_global_messages_dead_lettered_expired_total",
    "rabbitmq_global_messages_dead_lettered_maxlen_total",
)
async def test_what_classic_queues_drop_is_in_the_metrics(cluster: FakeCluster) -> None:
    node = cluster.nodes[1]
    kind: dict[str, object] = {"x-queue-type": "classic"}
    await cluster.queue(1, "short", arguments={**kind, "x-max-length": 1})
    await cluster.queue(1, "old", arguments={**kind, "x-message-ttl": 0})
    await render(node.broker)
    for name in ("short", "old"):
        channel(cluster, 1, name).publish(b"a", b"b", b"c")
    prefix = "rabbitmq_global_messages_dead_lettered_"
    wanted = {"expired": "3", "maxlen": "2", "rejected": "0", "delivery_limit": "0"}

    async def counted() -> dict[str, str]:
        samples = (line for line in (await render(node.broker)).splitlines())
        labels = '{queue_type="rabbit_classic_queue",dead_letter_strategy="disabled"} '
        return {
            line.removeprefix(prefix).partition("_total")[0]: line.rpartition(" ")[2]
            for line in samples
            if line.startswith(prefix) and labels in line
        }

    left = node.broker.local.hosts["classic"].dead_lettered
    await until(lambda: left() == {("disabled", "expired"): 3, ("disabled", "maxlen"): 2})
    assert await counted() == wanted
    await node.broker.queue_admin.delete_queue("/", "short")
    await node.broker.queue_admin.delete_queue("/", "old")
    assert await counted() == wanted


@pytest.mark.moves("convoy_messages_deduplicated_total")
async def test_repeats_by_message_id_are_in_the_metrics_and_shown(cluster: FakeCluster) -> None:
    cluster.raise_versions()
    node = cluster.nodes[1]
    await cluster.queue(1, "q", arguments={"x-deduplication-count": 5})
    publisher = channel(cluster, 1, "q")
    await render(node.broker)
    for number, message_id in enumerate("abaab"):
        record = message(b"m", message_id=message_id)
        publisher.client.target.publish([record], 1, number + 1)
    await until(lambda: node.broker.local.deduplicated() == 3)
    assert "\nconvoy_messages_deduplicated_total 3\n" in await render(node.broker)
    row = node.broker.queue_admin.find_queue("/", "q").info()
    assert (row["messages_deduplicated"], row["deduplication_ids"]) == (3, 2)
    assert row["deduplication_bytes"] > 0
    confirmed = [tags for what, tags, ok in publisher.heard if what == "published" and ok]
    assert sum(last - first + 1 for first, last in confirmed) == 5
    await node.broker.queue_admin.delete_queue("/", "q")
    assert node.broker.local.deduplicated() == 3


async def test_what_quorum_queues_drop_is_in_the_metrics(cluster: FakeCluster) -> None:
    for each in cluster.nodes.values():
        each.machine.set_version(2)
    node = cluster.nodes[1]
    await cluster.queue(1, "q")
    queue = node.broker.queue_admin.find_queue("/", "q")
    machine = node.host.replica(queue.group).machine
    machine.set_version(2)
    queue.configure({"max-length": 1})
    publisher = channel(cluster, 1, "q")
    await until(lambda: machine.backlog.max_length == 1)
    publisher.publish(b"a", b"b", b"c")
    left = ("disabled", "maxlen")
    await until(lambda: node.broker.local.dead_lettered()[left] == 2)
    text = await render(node.broker)
    assert 'dead_lettered_maxlen_total{queue_type="rabbit_quorum_queue"' in text
    await node.broker.queue_admin.delete_queue("/", "q")
    assert node.broker.local.dead_lettered()[left] == 2


async def test_a_different_redeclare_is_refused(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q")
    with pytest.raises(PreconditionFailed, match="inequivalent arg 'durable'"):
        await cluster.queue(2, "q", durable=False)
    with pytest.raises(AccessRefused, match="reserved prefix"):
        await cluster.queue(2, "amq.mine")
    with pytest.raises(PreconditionFailed, match="name of more than 255 bytes"):
        await cluster.queue(2, "q" * 256)


async def test_a_queue_without_a_leader_leaves_no_trace(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    await cluster.queue(1, "first")
    # Group 0 commits on, but a new group finds nobody who announces himself.
    for node in cluster.nodes.values():
        node.host._announce = lambda group: None  # type: ignore[method-assign]
        node.host.leader_of = lambda group: None  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await cluster.queue(1, "q")
    assert sorted(cluster.nodes[1].machine.vhosts["/"].queues) == ["first"]
    with pytest.raises(NotFound):
        broker.queue_admin.find_queue("/", "q")


async def test_changes_without_a_majority_are_unavailable(cluster: FakeCluster) -> None:
    cluster.has_leaders = False
    with pytest.raises(Unavailable):
        await cluster.queue(1, "q")


async def test_exclusive_queues_belong_to_their_connection(cluster: FakeCluster) -> None:
    name, _, _ = await cluster.queue(1, "", exclusive=True, durable=False, owner=5)
    assert name.startswith("amq.gen-")
    assert len(name) == len("amq.gen-") + 22
    cluster.nodes[1].broker.queue_admin.find_queue("/", name, 5)
    for node, owner in ((1, 6), (2, 5)):
        await until(lambda node=node: name in cluster.nodes[node].machine.vhosts["/"].queues)
        with pytest.raises(ResourceLocked):
            cluster.nodes[node].broker.queue_admin.find_queue("/", name, owner)
    # Anybody may publish to it: a reply comes from wherever the responder is.
    (queue,) = cluster.nodes[2].broker.publishing.route("/", "", [name], None).queues
    assert queue.name == name
    await cluster.nodes[1].broker.queue_admin.connection_closed(5)
    with pytest.raises(NotFound):
        cluster.nodes[1].broker.queue_admin.find_queue("/", name, 5)


async def test_names_of_a_lost_node_get_free_also_when_it_led_the_tree(
    cluster: FakeCluster,
) -> None:
    await cluster.queue(3, "mine", exclusive=True, durable=False, owner=5)
    broker = cluster.nodes[1].broker
    await until(lambda: "mine" in cluster.nodes[1].machine.vhosts["/"].queues)
    tree = cluster.nodes[1].host.groups[0]
    tree.is_leader = False
    cluster.down.add(3)
    broker.on_node_down(3, definite=True)
    tree.is_leader = True
    await until(lambda: "mine" not in cluster.nodes[1].machine.vhosts["/"].queues)


async def test_names_of_a_node_that_stays_away_get_free_after_the_disconnect_timeout(
    tmp_path: Path,
) -> None:
    settings = DefaultsConfig(disconnect_timeout_ms=600)
    async with FakeCluster(tmp_path, 3, settings) as cluster:
        await cluster.queue(3, "mine", exclusive=True, durable=False, owner=5)
        queues = cluster.nodes[1].machine.vhosts["/"].queues
        await until(lambda: "mine" in queues)
        broker = cluster.nodes[1].broker
        # Away and back: it starts anew.
        cluster.down.add(3)
        broker.on_node_down(3)
        await until(lambda: 3 in broker._absent_nodes._away)
        cluster.down.clear()
        broker.on_node_up(3, INCARNATION)
        await until(lambda: 3 not in broker._absent_nodes._away)
        assert "mine" in queues
        cluster.down.add(3)
        broker.on_node_down(3)
        await until(lambda: "mine" not in queues)
        await until(lambda: not broker._absent_nodes._gone)
        assert broker._absent_nodes._away[3] is None


async def test_a_face_that_was_made_while_its_home_was_suspected_is_made_anew(
    cluster: FakeCluster,
) -> None:
    await cluster.queue(1, "c", arguments={"x-queue-type": "classic"})
    broker = cluster.nodes[2].broker
    await until(lambda: "c" in cluster.nodes[2].machine.vhosts["/"].queues)
    cluster.down.add(1)
    broker.on_suspect(1)
    with pytest.raises(NotFound):
        broker.queue_admin.find_queue("/", "c")
    cluster.down.clear()
    broker.on_unsuspect(1)
    assert await broker.declarations.passive_declare("/", "c") == ("c", 0, 0)


async def test_an_auto_delete_queue_goes_with_its_last_consumer(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q", auto_delete=True, durable=False)
    consumer = channel(cluster, 2, "q")
    consumer.consume()
    await until(lambda: consumer.heard)
    consumer.client.cancel(1)
    await until(lambda: "q" not in cluster.nodes[1].machine.vhosts["/"].queues)


async def test_conditions_of_a_delete(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    await cluster.queue(1, "c", arguments={"x-queue-type": "classic"})
    sender = channel(cluster, 1, "c")
    sender.publish(b"a")
    with pytest.raises(PreconditionFailed, match="not empty"):
        await broker.queue_admin.delete_queue("/", "c", if_empty=True)
    sender.consume()
    await until(lambda: sender.got)
    with pytest.raises(PreconditionFailed, match="in use"):
        await broker.queue_admin.delete_queue("/", "c", if_unused=True)
    await cluster.queue(1, "q")
    with pytest.raises(NotServed, match="if-unused flag set are not supported by quorum queues"):
        await broker.queue_admin.delete_queue("/", "q", if_unused=True)
    assert await broker.queue_admin.delete_queue("/", "never-there") == 0


async def test_routes_say_whether_they_may_be_remembered(cluster: FakeCluster) -> None:
    node = cluster.nodes[1]
    broker: Broker = node.broker
    await cluster.queue(1, "q")
    version = broker.route_versions.of("/")
    before = version.value
    await broker.declarations.declare_exchange(
        "/", "x", "topic", durable=True, auto_delete=False, internal=False
    )
    assert await broker.declarations.bind("/", "x", queue_end("q"), "a.*") is True
    assert await broker.declarations.bind("/", "x", queue_end("q"), "a.*") is False
    assert version.value > before
    route = broker.publishing.route("/", "x", ["a.b"], None)
    assert [queue.name for queue in route.queues] == ["q"]
    assert route.cacheable
    assert broker.publishing.route("/", "x", ["b", "a.c"], None).queues == route.queues
    await broker.declarations.bind("/", "x", exchange_end("amq.headers"), "#")
    assert not broker.publishing.route("/", "x", ["a.b"], Table.of({})).cacheable
    await broker.declarations.unbind("/", "x", exchange_end("amq.headers"), "#")
    await broker.declarations.unbind("/", "x", queue_end("q"), "a.*")
    assert broker.publishing.route("/", "x", ["a.b"], None).queues == ()
    await broker.declarations.delete_exchange("/", "x")
    with pytest.raises(NotFound):
        broker.publishing.route("/", "x", ["a.b"], None)


async def test_replies_find_their_channel_on_other_nodes(cluster: FakeCluster) -> None:
    heard: list[bytes] = []
    asker, responder = cluster.nodes[1].broker, cluster.nodes[2].broker
    token = asker.replies.register(heard.append)
    assert await responder.replies.exists(token)
    assert responder.replies.publish(token, b"far")
    assert asker.replies.publish(token, b"near")
    await until(lambda: sorted(heard) == [b"far", b"near"])
    asker.replies.unregister(token)
    assert not asker.replies.publish(token, b"x")
    assert not await responder.replies.exists(token)
    assert not await responder.replies.exists("nonsense")


async def test_replies_to_a_node_that_takes_nothing_are_dropped(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would break its link, and everything else on it."""
    heard: list[bytes] = []
    asker, responder = cluster.nodes[1].broker, cluster.nodes[2].broker
    token = asker.replies.register(heard.append)
    bound = responder.replies.backlog_bytes_max
    waiting = bound + 1
    monkeypatch.setattr(responder.control.transport, "backlog_bytes", lambda node: waiting)
    assert responder.replies.publish(token, b"dropped")
    waiting = bound
    assert responder.replies.publish(token, b"sent")
    await until(lambda: bool(heard))
    assert heard == [b"sent"]
    assert responder.counters.dropped_replies == 1


@pytest.mark.moves("convoy_direct_replies_dropped_total")
async def test_replies_that_nobody_gets_are_in_the_metrics(cluster: FakeCluster) -> None:
    asker, responder = cluster.nodes[1].broker, cluster.nodes[2].broker
    await render(asker)
    token = asker.replies.register(lambda record: None)
    asker.replies.unregister(token)
    assert not asker.replies.publish(token, b"late")
    # The responder's node does not know that the requester is gone; the requester's does.
    assert responder.replies.publish(token, b"late")
    await until(lambda: asker.counters.dropped_replies == 2)
    assert "convoy_direct_replies_dropped_total 2\n" in await render(asker)
    assert responder.counters.dropped_replies == 0
    cluster.down.add(1)
    assert not responder.replies.publish(token, b"late")
    assert not responder.replies.publish("nonsense", b"lost")
    assert responder.counters.dropped_replies == 2


async def test_a_lost_home_node_is_named(cluster: FakeCluster) -> None:
    await cluster.queue(1, "c", arguments={"x-queue-type": "classic"})
    broker = cluster.nodes[2].broker
    await until(lambda: "c" in cluster.nodes[2].machine.vhosts["/"].queues)
    sender = channel(cluster, 2, "c")
    cluster.down.add(1)
    broker.on_node_down(1)
    with pytest.raises(NotFound, match="home node 'n1' of durable queue 'c' in vhost '/' is down"):
        broker.queue_admin.find_queue("/", "c")
    sender.publish(b"a", tag=1)
    await until(lambda: ("published", [1, 1], False) in sender.heard)
    (queue,) = broker.publishing.route("/", "", ["c"], None).queues
    late = Channel()
    late.client = queue.client(cluster.nodes[2].new_session(), late)
    late.publish(b"b", tag=1)
    await until(lambda: ("published", [1, 1], False) in late.heard)
    cluster.down.clear()
    broker.on_node_up(1, 7)
    assert await broker.declarations.passive_declare("/", "c") == ("c", 0, 0)


async def test_a_transient_queue_of_a_lost_node_holds_nobody_up(cluster: FakeCluster) -> None:
    """Neither a message for others nor who needs its name; a node that is silent is not lost."""
    await cluster.queue(1, "gone", durable=False, arguments={"x-queue-type": "classic"})
    await cluster.queue(2, "here", durable=False, arguments={"x-queue-type": "classic"})
    broker = cluster.nodes[2].broker
    await until(lambda: "gone" in cluster.nodes[2].machine.vhosts["/"].queues)
    former = cluster.nodes[2].machine.vhosts["/"].queues["gone"].group
    cluster.down.add(1)
    broker.on_suspect(1)
    assert len(broker.publishing.route("/", "", ["gone"], None).queues) == 1
    broker.on_node_down(1)
    assert broker.publishing.route("/", "", ["gone"], None).queues == ()
    both = broker.publishing.route("/", "", ["gone", "here"], None)
    assert [queue.name for queue in both.queues] == ["here"]
    with pytest.raises(NotFound, match="home node 'n1' of queue 'gone' in vhost '/' is down"):
        broker.queue_admin.find_queue("/", "gone")
    await cluster.queue(2, "gone", durable=False, arguments={"x-queue-type": "classic"})
    assert cluster.nodes[2].machine.vhosts["/"].queues["gone"].group > former
    assert len(broker.publishing.route("/", "", ["gone"], None).queues) == 1


async def test_alarms_count_for_the_whole_cluster(cluster: FakeCluster) -> None:
    heard: list[frozenset[str]] = []
    cluster.nodes[2].broker.alarms.listeners.append(heard.append)
    cluster.nodes[1].broker.alarms.set("memory", True)
    await until(lambda: heard == [frozenset({"memory"})])
    cluster.nodes[2].broker.alarms.set("disk", True)
    assert cluster.nodes[2].broker.alarms.effective == {"memory", "disk"}
    cluster.nodes[1].broker.alarms.set("memory", False)
    await until(lambda: heard[-1] == {"disk"})


class Listed(FakeConnection):
    """A connection whose one channel has one consumer."""

    def __init__(self, id: int, reader: Channel) -> None:
        self.id, self.name, self.reader = id, f"client {id}", reader

    def consumer_infos(self) -> list[dict[str, Any]]:
        key = {"session": self.reader.client.session, "number": 1}
        return [{"consumer_tag": self.name, "active": True, "activity_status": "up", **key}]


@pytest.mark.parametrize("kind", ["quorum", "classic"])
@pytest.mark.parametrize("single", [True, False])
async def test_lists_say_which_consumer_is_the_active_one(
    cluster: FakeCluster, kind: str, single: bool
) -> None:
    arguments = {"x-queue-type": kind, "x-single-active-consumer": single}
    await cluster.queue(1, "q", arguments=arguments)
    await until(lambda: "q" in cluster.nodes[2].machine.vhosts["/"].queues)
    readers = {node: channel(cluster, node, "q") for node in (1, 2)}
    for node, reader in readers.items():
        reader.consume()
        await until(lambda reader=reader: ("subscribed", 1, None) in reader.heard)
        cluster.nodes[node].broker.connections.add(Listed(node, reader))

    async def states(node: int) -> dict[str, tuple[bool, str]]:
        await cluster.tell()
        rows = await cluster.nodes[node].broker.cluster.list_consumers()
        assert all(row.keys() == {"consumer_tag", "active", "activity_status"} for row in rows)
        return {row["consumer_tag"]: (row["active"], row["activity_status"]) for row in rows}

    first, second = (True, "single_active"), (False, "waiting")
    if not single:
        first = second = (True, "up")
    for node in (1, 2, 3):
        assert await states(node) == {"client 1": first, "client 2": second}
    readers[1].client.cancel(1)
    await until(lambda: ("cancel-ok", 1) in readers[1].heard)
    assert (await states(3))["client 2"] == first


async def test_lists_cover_the_cluster_and_connections_can_be_closed(cluster: FakeCluster) -> None:
    class Connection(FakeConnection):
        closed = ""

        def channel_infos(self) -> list[dict[str, Any]]:
            return [{"name": "client (1)"}]

        def consumer_infos(self) -> list[dict[str, Any]]:
            return [{"consumer_tag": "c"}]

        def close(self, reason: str) -> None:
            self.closed = reason

    connection = Connection()
    cluster.nodes[2].broker.connections.add(connection)
    broker = cluster.nodes[1].broker
    assert await broker.cluster.list_connections() == [{"name": "client", "node": "n2"}]
    await cluster.tell()
    (known,) = await broker.cluster.connections()
    assert known.row == {"name": "client", "node": "n2"}
    assert [known.row for known in await broker.cluster.channels()] == [{"name": "client (1)"}]
    assert await broker.cluster.list_consumers() == [{"consumer_tag": "c"}]
    assert sorted(await broker.cluster.nodes()) == ["n1", "n2", "n3"]
    assert await broker.cluster.close_connection("client", "why")
    assert connection.closed == "why"
    assert not await broker.cluster.close_connection("nobody", "why")


async def test_connections_end_with_their_virtual_host_or_user(cluster: FakeCluster) -> None:
    class Connection:
        def __init__(self, id: int, vhost: str, user: str) -> None:
            self.id, self.name, self.vhost, self.closed = id, f"client {id}", vhost, ""
            self.user = User(name=user)

        def close(self, reason: str) -> None:
            self.closed = reason

    broker = cluster.nodes[1].broker
    await broker.metadata.execute(PutVhost(name="other"), 5.0)
    await broker.metadata.execute(PutUser(name="eve"), 5.0)
    await until(lambda: "eve" in cluster.nodes[2].machine.users)
    made = [Connection(1, "/", "guest"), Connection(2, "other", "guest"), Connection(3, "/", "eve")]
    for connection in made:
        cluster.nodes[2].broker.connections.add(connection)  # type: ignore[arg-type]
    await broker.metadata.execute(DeleteVhost(name="other"), 5.0)
    await until(lambda: made[1].closed == "vhost 'other' is deleted")
    assert (made[0].closed, made[2].closed) == ("", "")
    await broker.metadata.execute(DeleteUser(name="eve"), 5.0)
    await until(lambda: made[2].closed == "user 'eve' is deleted")
    assert made[0].closed == ""


@pytest.mark.parametrize("arguments", [{}, {"x-queue-type": "classic"}])
async def test_sessions_are_live_until_the_queue_has_heard_of_their_end(
    cluster: FakeCluster, arguments: dict[str, str]
) -> None:
    await cluster.queue(1, "q", arguments=arguments)
    await until(lambda: "q" in cluster.nodes[2].machine.vhosts["/"].queues)
    broker = cluster.nodes[2].broker
    user = channel(cluster, 2, "q")
    session = user.client.session
    assert broker.live_sessions() == [session]
    user.consume()
    await until(lambda: ("subscribed", 1, None) in user.heard)
    user.client.close()
    await until(lambda: broker.live_sessions() == [])


async def test_a_new_face_of_an_old_name_is_another_queue(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q")
    first = cluster.nodes[1].broker.queue_admin.find_queue("/", "q")
    await cluster.nodes[1].broker.queue_admin.delete_queue("/", "q")
    await cluster.queue(1, "q")
    second = cluster.nodes[1].broker.queue_admin.find_queue("/", "q")
    assert first is not second
    assert (first.group, second.group) == (1, 2)


STREAM = {"x-queue-type": "stream"}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("node", [1, 2])
async def test_a_stream_is_published_to_and_read_on_every_node(
    cluster: FakeCluster, node: int, size: int
) -> None:
    arguments = {**STREAM, "x-initial-cluster-size": size}
    assert await cluster.queue(1, "s", arguments=arguments) == ("s", 0, 0)
    record = cluster.nodes[1].machine.vhosts["/"].queues["s"]
    assert len(record.members) == size
    assert cluster.nodes[1].broker.group_size_of(record) == size
    await until(lambda: "s" in cluster.nodes[node].machine.vhosts["/"].queues)
    broker = cluster.nodes[node].broker
    publisher, reader = channel(cluster, 3, "s"), channel(cluster, node, "s")
    publisher.publish(b"a", b"b", tag=1)
    await until(lambda: ("published", [1, 2], True) in publisher.heard)
    for number in (1, 2):
        reader.consume(number, prefetch=5, stream_offset=Field("S", b"first"))
        await until(lambda n=number: reader.deliveries(n) == [b"a", b"b"])
    assert (await broker.declarations.passive_declare("/", "s"))[:2] == ("s", 2)
    stream = broker.local.get(record.group)
    assert isinstance(stream, StreamQueue)
    assert await stream.offsets("latest", None) == (2, None)
    chunks = await stream.fetch_chunks(1, None, 10, 1000, 0)
    assert (chunks.first, chunks.high, chunks.next) == (0, 2, 2)
    await stream.store_offset("me", 1)
    assert await stream.query_offset("me") == 1
    await cluster.tell()
    known = cluster.nodes[3].broker.cluster.queue(record)
    assert known is not None
    assert known.row["consumers"] == 2
    # Streams take no notice of conditions, as in RabbitMQ.
    assert await broker.queue_admin.delete_queue("/", "s", if_unused=True, if_empty=True) == 2
    await until(lambda: ("cancelled", 1, "deleted") in reader.heard)


async def test_the_arguments_of_a_stream_reach_its_machine(cluster: FakeCluster) -> None:
    arguments = {
        **STREAM,
        "x-max-length-bytes": 10_000,
        "x-max-age": "7D",
        "x-stream-max-segment-size-bytes": 500,
        "x-queue-leader-locator": "client-local",
    }
    await cluster.queue(2, "s", arguments=arguments)
    record = cluster.nodes[2].machine.vhosts["/"].queues["s"]
    assert record.home == 2
    machine = cluster.nodes[2].host.replica(record.group).machine
    assert machine.settings == {
        "max_age_ms": 7 * 24 * 3600 * 1000,
        "max_bytes": 10_000,
        "segment_bytes": 500,
    }
    await cluster.queue(1, "s", arguments=arguments)
    with pytest.raises(PreconditionFailed, match="inequivalent arg 'x-max-age'"):
        await cluster.queue(1, "s", arguments={**arguments, "x-max-age": "8D"})
    with pytest.raises(PreconditionFailed, match="inequivalent arg 'x-queue-type'"):
        await cluster.queue(1, "s", arguments={"x-queue-type": "quorum"})


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        ({"durable": False}, "invalid property 'non-durable' for queue 's'"),
        ({"exclusive": True, "owner": 1}, "invalid property 'exclusive-owner' for queue 's'"),
        ({"auto_delete": True}, "invalid property 'auto-delete' for queue 's'"),
    ],
)
async def test_properties_that_no_stream_has(
    cluster: FakeCluster, properties: dict[str, Any], text: str
) -> None:
    with pytest.raises(PreconditionFailed, match=text):
        await cluster.queue(1, "s", arguments=STREAM, **properties)
    with pytest.raises(PreconditionFailed, match="server-named queue for type rabbit_stream_queue"):
        await cluster.queue(1, "", arguments=STREAM)


async def test_a_declare_that_lost_a_race_is_compared_as_any_other(cluster: FakeCluster) -> None:
    """Somebody declared the same name after this node had looked: equal is what counts as equal for
    clients, not what is equal byte for byte."""
    broker = cluster.nodes[1].broker
    ttl = Field("l", 1000)

    async def race(first: Table, second: Table) -> Any:
        loser = asyncio.create_task(
            broker.declarations.declare_queue(
                "/", "q", durable=False, exclusive=False, auto_delete=False, arguments=second
            )
        )
        command = DeclareQueue(vhost="/", name="q", members=(1,), arguments=first.encoded)
        await broker.metadata.execute(command)
        return await loser

    narrow, odd = Table.of({"x-message-ttl": Field("I", 1000)}), Table.of({"other": 1})
    wide = Table.of({"x-message-ttl": ttl, "other": 1})
    try:
        assert await race(wide, narrow) == ("q", 0, 0)
        await broker.queue_admin.delete_queue("/", "q")
        with pytest.raises(PreconditionFailed, match="inequivalent arg 'x-message-ttl'"):
            await race(wide, odd)
    finally:
        await broker.queue_admin.delete_queue("/", "q")


@pytest.mark.provokes("queue.not_deleted", "classic.disk_error")
async def test_queues_that_cannot_go_or_be_read_are_named(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, observed: Observed
) -> None:
    await cluster.queue(1, "q", auto_delete=True, durable=False)
    broker = cluster.nodes[1].broker
    record = cluster.nodes[1].machine.vhosts["/"].queues["q"]

    async def refused(_command: object, _timeout_s: float) -> None:
        raise Unavailable("no majority")

    monkeypatch.setattr(broker.metadata, "execute", refused)
    broker.queue_admin.on_unused(record)
    broker.queue_admin.on_disk_error(record, OSError(5, "input/output error"))
    await until(lambda: "queue.not_deleted" in observed.events)


async def test_dead_letters_are_refused_by_name_until_all_nodes_know_them(
    cluster: FakeCluster,
) -> None:
    for name in ("x-dead-letter-exchange", "x-dead-letter-strategy", "x-overflow"):
        value = "at-least-once" if name.endswith("strategy") else "reject-publish"
        with pytest.raises(PreconditionFailed, match=f"'{name}'.* not served yet by quorum queues"):
            await cluster.queue(1, "work", arguments={name: value})
    cluster.raise_versions()
    await cluster.queue(1, "work", arguments={"x-dead-letter-exchange": "later"})
    replica = cluster.nodes[1].host.groups[
        cluster.nodes[1].machine.vhosts["/"].queues["work"].group
    ]
    assert replica.machine.dead_letters.strategy == 1, "the declaration answers when it acts"
