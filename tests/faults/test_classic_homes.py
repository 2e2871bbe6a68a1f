"""Clients of a classic queue on other nodes, when its home goes and comes back: everybody gets an
answer and goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest
from pika import spec

from convoymq.cli.cluster import LocalCluster
from tests.faults.conftest import StartCluster
from tests.faults.test_mirrored import fill, has_mirrors, row, set_policy
from tests.faults.traffic import connect, log_has, name_of, parameters, until
from tests.interop.helpers import fetch_all
from tests.raw_amqp import RawPeer, assert_channel_error

QUEUE = "at-home"
MIRRORED = "mirrored"
CLASSIC = {"x-queue-type": "classic"}
PERSISTENT = pika.BasicProperties(delivery_mode=2)


class Client:
    """A thread with a connection to one node, which goes on after every refusal."""

    def __init__(self, cluster: LocalCluster, number: int, work: Callable[[Client], None]) -> None:
        self.port = cluster.nodes[number - 1].amqp_port
        self.done = 0
        """Answers that were no refusal."""
        self.refused = 0
        self.stopping = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.stopping.is_set():
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                self.connection = pika.BlockingConnection(parameters(self.port))
                try:
                    self._serve()
                finally:
                    with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                        self.connection.close()
            self.stopping.wait(0.05)

    def _serve(self) -> None:
        while not self.stopping.is_set():
            self.channel = self.connection.channel()
            try:
                self._work(self)
            except (pika.exceptions.AMQPChannelError, pika.exceptions.NackError):
                self.refused += 1
                self.stopping.wait(0.02)

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(10)


def publish(client: Client) -> None:
    client.channel.confirm_delivery()
    while not client.stopping.is_set():
        try:
            client.channel.basic_publish("", QUEUE, b"m", PERSISTENT)
            client.done += 1
        except pika.exceptions.NackError:
            client.refused += 1
        client.connection.sleep(0.02)


def consume(client: Client) -> None:
    client.channel.basic_qos(prefetch_count=10)
    for method, _, _ in client.channel.consume(QUEUE, inactivity_timeout=0.1):
        if client.stopping.is_set():
            return
        if method is not None:
            client.channel.basic_ack(method.delivery_tag)
            client.done += 1
    client.refused += 1


@pytest.fixture
def clients(cluster: LocalCluster) -> Iterator[list[Client]]:
    connection = connect(cluster, 1)
    connection.channel().queue_declare(QUEUE, durable=True, arguments=CLASSIC)
    connection.close()
    made = [Client(cluster, 2 + i % 2, publish) for i in range(6)]
    made += [Client(cluster, 2 + i % 2, consume) for i in range(6)]
    yield made
    for client in made:
        client.stop()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nobody_waits_for_ever_when_the_home_is_started_again(
    cluster: LocalCluster, clients: list[Client], how: signal.Signals
) -> None:
    """Links are up before the home has opened its queues, and until after it has closed them."""
    for _ in range(3):
        before = [client.done for client in clients]
        until(
            lambda before=before: all(  # type: ignore[misc]
                client.done > known for client, known in zip(clients, before, strict=True)
            ),
            "clients do not go on",
        )
        cluster.kill(1, how)
        until(lambda: not cluster._running(1), "the node does not end")
        cluster.start_node(1)
        cluster.wait_ready()
    before = [client.done for client in clients]
    until(
        lambda: all(client.done > known for client, known in zip(clients, before, strict=True)),
        "clients do not go on",
    )
    assert not log_has(cluster, 1, "node.fault")
    assert not log_has(cluster, 1, "link.bad_frame")


def test_queues_without_descriptors_refuse_and_go_on(start_cluster: StartCluster) -> None:
    """The first message of a durable classic queue makes its file."""
    cluster = start_cluster(1)
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()
    for number in range(8):
        channel.queue_declare(f"q{number}", durable=True, arguments=CLASSIC)
    channel.basic_publish("", "q0", b"m", PERSISTENT)
    pid = cluster.nodes[0].pid
    assert pid is not None
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
    for number in range(1, 7):
        with pytest.raises(pika.exceptions.NackError):
            channel.basic_publish("", f"q{number}", b"m", PERSISTENT)
    channel.basic_publish("", "q0", b"m", PERSISTENT)
    assert log_has(cluster, 1, "classic.disk_error", "Too many open files")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    for number in range(8):
        channel.basic_publish("", f"q{number}", b"m", PERSISTENT)
    assert not log_has(cluster, 1, "node.fault")
    assert not log_has(cluster, 1, "queue.crashed")
    connection.close()


def test_transient_queues_go_with_their_node(cluster: LocalCluster) -> None:
    """What they are bound to goes on without them, and they can be declared elsewhere."""
    first, second = connect(cluster, 1), connect(cluster, 2)
    transient = first.channel()
    transient.queue_declare("fleeting", durable=False, arguments=CLASSIC)
    channel = second.channel()
    channel.exchange_declare("fan", "fanout", durable=True)
    channel.queue_declare("kept", durable=True, arguments={"x-queue-type": "quorum"})
    for queue in ("kept", "fleeting"):
        channel.queue_bind(queue, "fan")
    channel.confirm_delivery()
    channel.basic_publish("fan", "", b"both")
    cluster.kill(1)
    # Also before the tree has let go of it.
    for _ in range(5):
        channel.basic_publish("fan", "", b"one")
    until(lambda: cluster.messages_in("kept") == 6, "the other queue lacks something")
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish("", "fleeting", b"m", mandatory=True)
    channel.queue_declare("fleeting", durable=False, arguments=CLASSIC)
    channel.basic_publish("", "fleeting", b"m", mandatory=True)
    found, _, body = channel.basic_get("fleeting", auto_ack=True)
    assert (found is not None, body) == (True, b"m")
    cluster.start_node(1)
    cluster.wait_ready()
    channel.basic_publish("", "fleeting", b"n", mandatory=True)
    with contextlib.suppress(pika.exceptions.AMQPError):
        first.close()
    second.close()


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_queue_that_no_node_serves_is_not_found_until_its_node_is_back(
    cluster: LocalCluster, mirrored: bool
) -> None:
    """Its node is away; of mirrors there is none that may follow."""
    connection = connect(cluster, 1)
    connection.channel().queue_declare(MIRRORED, durable=True, arguments=CLASSIC)
    connection.close()
    fill(cluster, 0, 1)
    if mirrored:
        set_policy(cluster, {"ha-mode": "all", "ha-promote-on-failure": "when-synced"})
        until(lambda: len(row(cluster, 1, MIRRORED)["slave_nodes"]) == 2, "no mirrors")
        assert not has_mirrors(cluster, 2, queue=MIRRORED)
    queue, home = f"queue '{MIRRORED}' in vhost '/'", name_of(cluster, 1)
    text = (
        f"failed to perform operation on {queue} due to timeout"
        if mirrored
        else f"home node '{home}' of durable {queue} is down or inaccessible"
    )
    cluster.kill(1)
    until(lambda: row(cluster, 2, MIRRORED)["state"] == "down", "the queue is not down")
    with RawPeer(cluster.nodes[1].uri) as peer:
        peer.handshake().open_channel(1)
        methods = (
            spec.Queue.Declare(queue=MIRRORED, passive=True),
            spec.Queue.Declare(queue=MIRRORED, durable=True, arguments=CLASSIC),
            spec.Queue.Purge(queue=MIRRORED),
            spec.Basic.Consume(queue=MIRRORED),
            spec.Basic.Get(queue=MIRRORED),
        )
        for method in methods:
            peer.send(1, method)
            assert_channel_error(peer, 404, f"NOT_FOUND - {text}", type(method))
    cluster.start_node(1)
    cluster.wait_ready()
    other = connect(cluster, 2)
    until(lambda: row(cluster, 2, MIRRORED)["state"] == "running", "the queue does not come back")
    assert fetch_all(other.channel(), MIRRORED) == [b"0"]
    other.close()
