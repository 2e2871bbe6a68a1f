"""Links that are resumed, in the three-node cluster: at another node, after kills of the leader and
of the client's node; by frames, and with Qpid Proton as a consumer beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from convoymq.edges.amqp10.performatives import Accepted, Detach, Error
from tests.clusters import Cluster
from tests.interop.amqp10.frame_client import FrameClient, message
from tests.interop.conftest import Names
from tests.interop.failover import LEADER
from tests.interop.helpers import api, eventually
from tests.patience import PATIENCE_S

KEPT = {"x-queue-type": "quorum", "x-link-resume-timeout": 600_000}
ELSEWHERE = 2


@pytest.fixture
def dial(cluster: Cluster, names: Names) -> Iterator[Callable[..., FrameClient]]:
    """Opens connections of one client: `dial(node)`."""
    opened: list[FrameClient] = []
    container = names.queue("container")

    def one(node: int) -> FrameClient:
        opened.append(FrameClient(cluster, node, container))
        return opened[-1]

    yield one
    for each in opened:
        each.close()


@pytest.fixture
def queue(cluster: Cluster, names: Names) -> str:
    """A queue that keeps links, led by the node LEADER."""
    from benchmarks.systems import connect

    name = names.queue()
    connection: Any = connect(cluster.uris[LEADER])
    connection.channel().queue_declare(name, durable=True, arguments=KEPT)
    connection.close()
    return name


def counts(cluster: Cluster, name: str) -> tuple[int, int]:
    """(ready, unacknowledged)"""
    row = api(cluster, "GET", f"queues/%2F/{name}")
    return row.get("messages_ready", -1), row.get("messages_unacknowledged", -1)


def fill(client: FrameClient, queue: str, *bodies: bytes) -> None:
    client.publish_to(queue)
    client.publish(*bodies)
    assert client.settled(len(bodies)) == len(bodies)


def resumed(client: FrameClient, queue: str, tags: list[bytes]) -> None:
    """The client has these deliveries, and gets them without their messages."""
    answer = client.receive(queue, 10, dict.fromkeys(tags))
    assert answer.unsettled == dict.fromkeys(tags)
    found = client.deliveries(len(tags))
    assert [(each.delivery_tag, each.resume, payload) for each, payload in found] == [
        (tag, True, b"") for tag in tags
    ]


def test_a_link_goes_on_at_another_node(
    dial: Callable[..., FrameClient], queue: str, cluster: Cluster
) -> None:
    client = dial(0)
    fill(client, queue, b"a", b"b", b"c")
    client.receive(queue, 3)
    tags = [each.delivery_tag or b"" for each, _ in client.deliveries(3)]
    client.close()
    again = dial(ELSEWHERE)
    resumed(again, queue, tags[:2])
    # The third one was not named: it comes again.
    (third,) = again.deliveries(1)
    assert (third[0].delivery_tag, third[0].resume) == (b"\0\0\0\3", False)
    assert third[1].endswith(message(b"c"))
    again.accept(0, 2)
    eventually(lambda: counts(cluster, queue) == (0, 0))


def test_a_second_link_of_one_name_takes_its_place(
    dial: Callable[..., FrameClient], queue: str, cluster: Cluster
) -> None:
    client, again = dial(0), dial(ELSEWHERE)
    fill(client, queue, b"a")
    client.receive(queue, 1)
    ((delivery, _),) = client.deliveries(1)
    resumed(again, queue, [delivery.delivery_tag or b""])
    error = client.hear(Detach).error
    assert isinstance(error, Error)
    assert error.condition == "amqp:link:stolen"
    again.accept(0, 0)
    eventually(lambda: counts(cluster, queue) == (0, 0))


@pytest.mark.parametrize("node", [LEADER, 0], ids=["leader", "client"])
def test_a_link_goes_on_after_a_node_was_killed(
    dial: Callable[..., FrameClient], queue: str, cluster: Cluster, node: int
) -> None:
    """The leader of the queue is killed, or another node that the client was connected to."""
    client = dial(node)
    fill(client, queue, b"a", b"b")
    client.receive(queue, 2)
    tags = [each.delivery_tag or b"" for each, _ in client.deliveries(2)]
    cluster.kill(node)
    try:
        again = dial(ELSEWHERE)
        resumed(again, queue, tags)
        again.accept(0, 1)
        fill(again, queue, b"c")
        ((rest, payload),) = again.deliveries(1)
        assert not rest.resume
        assert payload.endswith(message(b"c"))
    finally:
        cluster.restart(node)
    eventually(lambda: counts(cluster, queue) == (0, 1))


def test_a_publisher_learns_what_has_come(
    dial: Callable[..., FrameClient], queue: str, cluster: Cluster
) -> None:
    """The client's node, which leads the queue, is killed while messages are on their way."""
    client = dial(LEADER)
    client.publish_to(queue)
    first, rest = [b"%d" % n for n in range(50)], [b"%d" % n for n in range(50, 400)]
    client.publish(*first)
    assert client.settled(len(first)) == len(first)
    client.publish(*rest[:100])
    cluster.kill(LEADER)
    try:
        again = dial(ELSEWHERE)
        answer = again.publish_to(queue, dict.fromkeys(first + rest[:100]))
        known = dict(answer.unsettled or {})
        assert all(state == Accepted() for state in known.values())
        assert known.keys() >= set(first)
        missing = [each for each in rest[:100] if each not in known]
        again.publish(b"0", resume=True)
        assert again.settled(1) == 1
        again.publish(*missing)
        assert again.settled(len(missing)) == len(missing)
    finally:
        cluster.restart(LEADER)
    eventually(lambda: counts(cluster, queue) == (150, 0))


def test_the_time_of_a_link_is_over(
    dial: Callable[..., FrameClient], names: Names, channel: Any, cluster: Cluster
) -> None:
    """A policy gives a queue that exists a short time; what was kept goes to another consumer."""
    pytest.importorskip("proton", reason="Qpid Proton is not there: make test-amqp10")
    from proton.utils import BlockingConnection

    from tests.interop.amqp10.test_proton import url

    name = names.queue()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    definition = {"link-resume-timeout": 300}
    policy = {"pattern": f"^{name}$", "definition": definition, "apply-to": "quorum_queues"}
    api(cluster, "PUT", f"policies/%2F/{name}", policy)
    try:
        row = lambda: api(cluster, "GET", f"queues/%2F/{name}")  # noqa: E731
        eventually(lambda: row().get("effective_policy_definition") == definition)
        client = dial(0)
        fill(client, name, b"a")
        client.receive(name, 1)
        client.deliveries(1)
        client.close()
        connection: Any = BlockingConnection(url(cluster), allowed_mechs="PLAIN")
        receiver = connection.create_receiver(f"/queues/{name}", credit=1)
        found: Any = receiver.receive(timeout=PATIENCE_S)
        assert (bytes(found.body), found.delivery_count) == (b"a", 1)
        receiver.accept()
        connection.close()
    finally:
        api(cluster, "DELETE", f"policies/%2F/{name}")
