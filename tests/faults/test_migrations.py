"""Queues that are migrated to another type while clients use them: nothing confirmed is lost,
nothing comes twice unless it is redelivered, and each publisher's order stays."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.api import get_json
from convoymq.cli.cluster import LocalCluster
from convoymq.model.errors import BrokerError
from tests.faults.traffic import connect, log_has, parameters, until
from tests.patience import PATIENCE_S
from tests.running import Nodes
from tests.running import until as in_time

QUEUE = "moving"
FROZEN, COPIED = "queue.migration_frozen", "queue.migration_copied"
CLASSIC = {"x-queue-type": "classic"}
PERSISTENT = pika.BasicProperties(delivery_mode=2)


def migrate(cluster: LocalCluster, to: str, node: int = 1, **options: Any) -> dict[str, Any]:
    """Asks a node to migrate the queue, and returns its answer."""
    port = cluster.nodes[node - 1].http_port
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/convoy/queues/%2F/{QUEUE}/migration",
        json.dumps({"to": to, **options}).encode(),
        {"content-type": "application/json", "authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


class Publisher:
    """A thread that publishes numbers one by one, and notes what was confirmed."""

    def __init__(self, cluster: LocalCluster, node: int, name: str) -> None:
        self.port = cluster.nodes[node - 1].amqp_port
        self.name = name
        self.confirmed: list[int] = []
        self.refused = 0
        self.connections = 0
        self.errors: list[str] = []
        self.stopping = threading.Event()
        self._next = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.stopping.is_set():
            try:
                connection = pika.BlockingConnection(parameters(self.port))
                self.connections += 1
                channel = connection.channel()
                channel.confirm_delivery()
                while not self.stopping.is_set():
                    self._publish(channel)
                connection.close()
            except (pika.exceptions.AMQPError, OSError) as error:
                self.errors.append(repr(error))
                self.stopping.wait(0.05)

    def _publish(self, channel: Any) -> None:
        self._next += 1
        try:
            channel.basic_publish(
                "", QUEUE, f"{self.name} {self._next}".encode(), PERSISTENT, mandatory=True
            )
            self.confirmed.append(self._next)
        except pika.exceptions.NackError:
            self.refused += 1

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


class Consumer:
    """A thread with one consumer, which notes what it gets."""

    def __init__(self, cluster: LocalCluster, node: int, prefetch: int = 20) -> None:
        self.port = cluster.nodes[node - 1].amqp_port
        self.got: list[tuple[str, int, bool]] = []
        self.connections = 0
        self.cancelled = 0
        self.stopping = threading.Event()
        self._prefetch = prefetch
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.stopping.is_set():
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                connection = pika.BlockingConnection(parameters(self.port))
                self.connections += 1
                channel = connection.channel()
                channel.basic_qos(prefetch_count=self._prefetch)
                for method, _, body in channel.consume(QUEUE, inactivity_timeout=0.05):
                    if self.stopping.is_set():
                        break
                    if method is not None:
                        name, number = body.decode().split()
                        self.got.append((name, int(number), method.redelivered))
                        if len(self.got) % 3 == 0:
                            channel.basic_ack(method.delivery_tag, multiple=True)
                else:
                    self.cancelled += 1
                connection.close()
            self.stopping.wait(0.05)

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def take_all(cluster: LocalCluster, node: int) -> list[tuple[str, int, bool]]:
    """Takes what is left in the queue."""
    connection = connect(cluster, node)
    channel = connection.channel()
    found: list[tuple[str, int, bool]] = []
    while True:
        method, _, body = channel.basic_get(QUEUE, auto_ack=True)
        if method is None:
            break
        name, number = body.decode().split()
        found.append((name, int(number), method.redelivered))
    connection.close()
    return found


def places(got: list[tuple[str, int, bool]], name: str, number: int) -> list[int]:
    return [at for at, each in enumerate(got) if each[:2] == (name, number)]


def check(
    publishers: list[Publisher], got: list[tuple[str, int, bool]], left: list[tuple[str, int, bool]]
) -> None:
    """All that was confirmed came, to the consumer or at the end; in each publisher's order, but
    for what is redelivered; twice only as that."""
    got = got + left
    for publisher in publishers:
        numbers = [(number, again) for name, number, again in got if name == publisher.name]
        came = {number for number, _ in numbers}
        missing = set(publisher.confirmed) - came
        assert not missing, (
            f"{publisher.name}: {len(missing)} confirmed are lost: {sorted(missing)[:9]}"
        )
        seen: set[int] = set()
        for number, again in numbers:
            assert number not in seen or again, (
                f"{publisher.name}: {number} came twice, at {places(got, publisher.name, number)}, "
                f"of which the last {len(left)} of {len(got)} were left"
            )
            seen.add(number)
        order = [number for number, again in numbers if not again]
        assert order == sorted(order), f"{publisher.name}: out of order"


@pytest.fixture
def declare(cluster: LocalCluster) -> Callable[[str], None]:
    def declare(type: str) -> None:
        connection = connect(cluster, 1)
        connection.channel().queue_declare(QUEUE, durable=True, arguments={"x-queue-type": type})
        connection.close()

    return declare


@pytest.fixture
def clients(
    cluster: LocalCluster,
) -> Iterator[Callable[[], tuple[list[Publisher], list[Consumer]]]]:
    started: list[Any] = []

    def start() -> tuple[list[Publisher], list[Consumer]]:
        publishers = [Publisher(cluster, node, f"p{node}") for node in (1, 2, 3)]
        consumers = [Consumer(cluster, 2)]
        started.extend((*publishers, *consumers))
        until(lambda: all(len(p.confirmed) > 20 for p in publishers), "nothing is published")
        until(lambda: len(consumers[0].got) > 20, "nothing is consumed")
        return publishers, consumers

    yield start
    for each in started:
        each.stopping.set()


@pytest.mark.provokes("queue.migration_frozen", "queue.migration_copied", "queue.migrated")
@pytest.mark.parametrize(("type", "to"), [("classic", "quorum"), ("quorum", "classic")])
def test_clients_go_on_in_a_queue_of_another_type(
    cluster: LocalCluster,
    declare: Callable[[str], None],
    clients: Callable[[], tuple[list[Publisher], list[Consumer]]],
    type: str,
    to: str,
) -> None:
    declare(type)
    publishers, consumers = clients()
    found = migrate(cluster, to, node=3)
    assert (found["state"], found["reason"]) == ("migrated", "")
    before = [len(p.confirmed) for p in publishers]
    got = len(consumers[0].got)
    until(
        lambda: all(len(p.confirmed) > b + 20 for p, b in zip(publishers, before, strict=True)),
        "publishers do not go on",
    )
    until(lambda: len(consumers[0].got) > got + 20, "the consumer does not go on")
    for each in (*publishers, *consumers):
        each.stop()
    assert [p.errors for p in publishers] == [[], [], []]
    assert [p.refused for p in publishers] == [0, 0, 0]
    assert (consumers[0].connections, consumers[0].cancelled) == (1, 0)
    check(publishers, consumers[0].got, take_all(cluster, 1))


def type_of(cluster: LocalCluster, node: int) -> str:
    port = cluster.nodes[node - 1].http_port
    rows = get_json(f"http://127.0.0.1:{port}/api/queues/%2F")
    assert [row["name"] for row in rows] == [QUEUE]
    return str(rows[0]["type"])


def in_background(cluster: LocalCluster, to: str, node: int, **options: Any) -> threading.Thread:
    """Asks for a migration; the answer may get lost with a node."""

    def work() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            migrate(cluster, to, node, **options)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def migrating(cluster: LocalCluster, event: str) -> int:
    """Returns the node that has logged an event of the migration; 0: none has."""
    return next((node for node in (1, 2, 3) if log_has(cluster, node, event)), 0)


@pytest.mark.parametrize(
    ("other", "event"),
    [
        pytest.param(False, FROZEN, marks=pytest.mark.provokes("queue.migration_undone")),
        (False, COPIED),
        (True, FROZEN),
        (True, COPIED),
    ],
)
@pytest.mark.parametrize(("type", "to"), [("classic", "quorum"), ("quorum", "classic")])
def test_a_kill_leaves_one_queue_with_all_that_was_confirmed(
    cluster: LocalCluster,
    declare: Callable[[str], None],
    clients: Callable[[], tuple[list[Publisher], list[Consumer]]],
    type: str,
    to: str,
    other: bool,
    event: str,
) -> None:
    """The node that leads the queue, or is its home, migrates it. The victim: that one, or the next
    one of the cluster."""
    declare(type)
    publishers, consumers = clients()
    consumers[0].stop()
    before = [len(p.confirmed) for p in publishers]
    until(
        lambda: all(len(p.confirmed) > b + 100 for p, b in zip(publishers, before, strict=True)),
        "publishers do not go on",
    )
    asked = in_background(cluster, to, 3, rate=600)
    until(lambda: migrating(cluster, event), "the migration does not get so far")
    leader = migrating(cluster, event)
    victim = leader % 3 + 1 if other else leader
    cluster.kill(victim)
    until(lambda: not cluster._running(victim), "the node does not end")
    cluster.start_node(victim)
    cluster.wait_ready()
    before = [len(p.confirmed) for p in publishers]
    until(
        lambda: all(len(p.confirmed) > b + 20 for p, b in zip(publishers, before, strict=True)),
        "publishers do not go on",
    )
    asked.join(60)
    assert not asked.is_alive()
    for publisher in publishers:
        publisher.stop()
    left = type_of(cluster, 3)
    assert left in (type, to)
    check(publishers, consumers[0].got, take_all(cluster, 2))
    # Nothing is left of the other one: it can be migrated again.
    back = {type, to} - {left}
    assert migrate(cluster, back.pop(), node=2)["state"] == "migrated"


@pytest.mark.provokes("queue.migration_unheard")
def test_a_node_that_stands_still_refuses_what_it_does_not_know(
    cluster: LocalCluster,
    declare: Callable[[str], None],
    clients: Callable[[], tuple[list[Publisher], list[Consumer]]],
) -> None:
    declare("quorum")
    publishers, consumers = clients()
    pid = cluster.nodes[2].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        assert migrate(cluster, "classic", node=1)["state"] == "migrated"
        assert migrating(cluster, "queue.migration_unheard")
    finally:
        os.kill(pid, signal.SIGCONT)
    before = [len(p.confirmed) for p in publishers]
    until(
        lambda: all(len(p.confirmed) > b + 20 for p, b in zip(publishers, before, strict=True)),
        "publishers do not go on",
    )
    for each in (*publishers, *consumers):
        each.stop()
    check(publishers, consumers[0].got, take_all(cluster, 1))


@pytest.mark.provokes("queue.migration_failed")
@pytest.mark.moves("convoy_queues_migrated_total")
async def test_migrations_are_counted_and_refusals_say_why(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        broker = nodes[1].broker
        migrations, tree = broker.migrations, broker.metadata.tree
        await in_time(lambda: tree.version >= 6)

        def work() -> None:
            connection = pika.BlockingConnection(parameters(nodes.amqp_port()))
            channel = connection.channel()
            channel.confirm_delivery()
            for name in ("q", "gone"):
                channel.queue_declare(name, durable=True, arguments={"x-queue-type": "classic"})
                for number in range(10):
                    channel.basic_publish("", name, str(number).encode(), PERSISTENT)
            full = {"x-overflow": "reject-publish", **CLASSIC}
            channel.queue_declare("full", durable=True, arguments=full)
            channel.queue_declare("brief", arguments=CLASSIC)
            channel.queue_declare("own", exclusive=True, durable=True, arguments=CLASSIC)
            refused = {
                ("none", "quorum"): "no queue 'none'",
                ("q", "other"): "cannot be migrated to type 'other'",
                ("q", "mirrored"): "a policy that has ha-mode",
                ("q", "classic"): "is of type 'classic' already",
                ("brief", "quorum"): "not durable",
                ("own", "quorum"): "exclusive",
            }
            for (name, to), text in refused.items():
                with pytest.raises(BrokerError, match=text):
                    migrations.plan("/", name, to)
            connection.close()

        await asyncio.to_thread(work)
        with pytest.raises(BrokerError, match="do not serve: x-overflow"):
            await migrations.begin("/", "full", "stream")
        await nodes.metrics()
        for to in ("quorum", "stream"):
            record, successor = await migrations.begin("/", "q", to)
            ended = await migrations.wait(record, successor, PATIENCE_S)
            assert ended == (10, 10, "migrated", "")
            await broker.queue_admin.find_queue("/", "q").ready(PATIENCE_S)
        await nodes.metrics()
        with pytest.raises(BrokerError, match="count on offsets"):
            await migrations.begin("/", "q", "quorum")

        record, successor = await migrations.begin("/", "gone", "quorum", rate=5)
        with pytest.raises(BrokerError, match="being migrated already"):
            await migrations.begin("/", "gone", "quorum")
        await broker.queue_admin.delete_queue("/", "gone")
        ended = await migrations.wait(record, successor, PATIENCE_S)
        assert ended.state == "undone"
        await in_time(lambda: not migrations._running)
        assert set(tree.queue_index.successors) == set()

        def read() -> list[bytes]:
            connection = pika.BlockingConnection(parameters(nodes.amqp_port()))
            channel = connection.channel()
            channel.basic_qos(prefetch_count=20)
            offsets = {"x-stream-offset": "first"}
            found = []
            for _, _, body in channel.consume("q", arguments=offsets):
                found.append(body)
                if len(found) == 10:
                    break
            connection.close()
            return found

        assert await asyncio.to_thread(read) == [str(number).encode() for number in range(10)]
