"""What the publish path takes, every other path takes as well: messages of a raw client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convoymq.messages.amqp091 import Properties, decode_properties, encode_properties
from convoymq.model.tables import EMPTY, Table, text_of
from tests import hostile
from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import api, eventually
from tests.raw_amqp import RawPeer

Basic, Confirm, Queue, Tx = pika.spec.Basic, pika.spec.Confirm, pika.spec.Queue, pika.spec.Tx
ID = text_of(b"\xff\xfe\x00\x01")
ODD = Properties(
    correlation_id=ID, message_id=ID, headers=Table.of({text_of(b"\xe9"): "v", "k": 1})
)


def declared(peer: RawPeer, queue: str, **arguments: object) -> str:
    spelt = {name.replace("_", "-"): value for name, value in arguments.items()}
    declare = Queue.Declare(queue=queue, durable=True, arguments=spelt)
    peer.call(1, declare, Queue.DeclareOk)
    return queue


def publish(
    peer: RawPeer, queue: str, properties: Properties, body: bytes = b"m", **to: Any
) -> None:
    """Publishes and waits for the confirm."""
    peer.publish(1, body, routing_key=queue, properties=encode_properties(properties), **to)
    peer.expect(Basic.Ack)


def taken(peer: RawPeer, queue: str) -> tuple[int, Properties] | None:
    """Takes a message: its tag and properties."""
    peer.send(1, Basic.Get(queue=queue))
    _, method = peer.method()
    if isinstance(method, Basic.GetEmpty):
        return None
    properties, _ = peer.content()
    return method.delivery_tag, decode_properties(properties)


def arrived(peer: RawPeer, queue: str) -> tuple[int, Properties]:
    found: list[tuple[int, Properties]] = []

    def look() -> bool:
        one = taken(peer, queue)
        if one is not None:
            found.append(one)
        return one is not None

    eventually(look)
    return found[0]


def as_sent(got: Properties, sent: Properties) -> bool:
    """Returns whether nothing is missing; the broker may have added headers."""
    mine = dict((got.headers or EMPTY).items())
    return all(mine.get(name) == field for name, field in (sent.headers or EMPTY).items()) and all(
        getattr(got, name) == getattr(sent, name)
        for name, _ in Properties.FIELDS
        if name != "headers"
    )


@pytest.fixture
def confirming(raw_channel: RawPeer) -> RawPeer:
    raw_channel.call(1, Confirm.Select(), Confirm.SelectOk)
    return raw_channel


@pytest.mark.parametrize("kind", ["at-most-once", "at-least-once", "classic"])
def test_a_message_dies_twice_and_keeps_its_bytes(
    confirming: RawPeer, names: Names, kind: str
) -> None:
    peer = confirming
    last = declared(peer, names.queue("c"), x_queue_type="quorum")
    queues = [last]
    for stem in ("b", "a"):
        more: dict[str, object] = {"x_queue_type": "classic"}
        if kind != "classic":
            more = {"x_queue_type": "quorum", "x_dead_letter_strategy": kind}
        if kind == "at-least-once":
            more["x_overflow"] = "reject-publish"
        target = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": queues[-1]}
        queues.append(declared(peer, names.queue(stem), **more, **target))
    for sent in (ODD, *hostile.SEVERAL):
        publish(peer, queues[2], sent)
        for queue in (queues[2], queues[1]):
            tag, _ = arrived(peer, queue)
            peer.send(1, Basic.Reject(delivery_tag=tag, requeue=False))
        tag, got = arrived(peer, last)
        peer.send(1, Basic.Ack(delivery_tag=tag))
        if "n" not in (sent.headers or ()):
            # A number that is none equals nothing, itself included.
            assert as_sent(got, sent)
        assert got.headers is not None
        assert [item.code for item in got.headers.get("x-death").value] == ["F", "F"]  # type: ignore


def test_routes_that_look_at_a_message_take_it(
    confirming: RawPeer, channel: Any, names: Names
) -> None:
    """Headers, a hash of the property, copies, and a mandatory one that comes back."""
    peer = confirming
    queue = declared(peer, names.queue())
    channel.queue_bind(queue, "amq.headers", "", {"x-match": "any", "k": 1})
    hashed = names.exchange("hash")
    arguments = {"hash-property": "correlation_id"}
    channel.exchange_declare(hashed, "x-consistent-hash", durable=True, arguments=arguments)
    channel.queue_bind(queue, hashed, "1")
    publish(peer, "", ODD, exchange="amq.headers")
    publish(peer, "", ODD, exchange=hashed)
    copied = Properties(correlation_id=ID, headers=Table.of({"CC": [queue, b"\xff"]}))
    publish(peer, "nowhere", copied)
    blind = Properties(message_id=ID, headers=Table.of({"BCC": [queue], text_of(b"\xe9"): 1}))
    publish(peer, "nowhere", blind)
    without = Properties(message_id=ID, headers=Table.of({text_of(b"\xe9"): 1}))
    for sent in (ODD, ODD, copied, without):
        assert arrived(peer, queue)[1] == sent
    peer.publish(1, b"m", routing_key="nowhere", mandatory=True, properties=encode_properties(ODD))
    peer.expect(Basic.Return)
    assert decode_properties(peer.content()[0]) == ODD
    peer.expect(Basic.Ack)


def test_a_request_and_its_reply_keep_their_bytes(raw_channel: RawPeer, names: Names) -> None:
    peer = raw_channel
    queue = declared(peer, names.queue())
    reply = "amq.rabbitmq.reply-to"
    peer.call(1, Basic.Consume(queue=reply, no_ack=True), Basic.ConsumeOk)
    request = Properties(correlation_id=ID, reply_to=reply)
    peer.publish(1, b"m", routing_key=queue, properties=encode_properties(request))
    _, got = arrived(peer, queue)
    assert got.correlation_id == ID
    assert got.reply_to is not None
    answer = Properties(correlation_id=got.correlation_id)
    peer.publish(1, b"r", routing_key=got.reply_to, properties=encode_properties(answer))
    peer.expect(Basic.Deliver)
    assert decode_properties(peer.content()[0]) == answer


def test_a_transaction_takes_them_and_refuses_at_the_publish(
    raw_channel: RawPeer, names: Names
) -> None:
    """A property that is not acceptable is refused where it is sent, not in the middle of a
    commit."""
    peer = raw_channel
    queue = declared(peer, names.queue())
    peer.call(1, Tx.Select(), Tx.SelectOk)
    peer.publish(1, b"m", routing_key=queue, properties=encode_properties(ODD))
    peer.call(1, Tx.Commit(), Tx.CommitOk)
    assert arrived(peer, queue)[1] == ODD
    wrong = encode_properties(Properties(user_id="somebody else"))
    peer.publish(1, b"m", routing_key=queue, properties=wrong)
    assert peer.expect(pika.spec.Channel.Close).reply_code == 406


@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_a_look_over_http_costs_no_message_a_delivery(
    confirming: RawPeer, cluster: Cluster, names: Names, kind: str
) -> None:
    """More often than the delivery limit, with one among them whose header has no text as name."""
    peer = confirming
    queue = declared(peer, names.queue(), x_queue_type=kind)
    for properties in (*[Properties()] * 5, ODD):
        publish(peer, queue, properties)
    look = {"count": 10, "ackmode": "ack_requeue_true", "encoding": "auto"}
    for _ in range(23):
        assert len(api(cluster, "POST", f"queues/%2F/{queue}/get", look)) == 6
    assert len([arrived(peer, queue) for _ in range(6)]) == 6


@pytest.mark.parametrize("kind", ["quorum", "classic"])
@settings(max_examples=6, suppress_health_check=list(HealthCheck), derandomize=True)
@given(messages=st.lists(st.tuples(hostile.PROPERTIES, hostile.BODIES), min_size=20, max_size=40))
def test_whatever_a_client_sends_is_read_by_all_and_changed_by_none(
    cluster: Cluster, kind: str, messages: list[tuple[Properties, bytes]]
) -> None:
    """Looked at over HTTP and by browsing, then taken by a client with the bytes as they were."""
    with RawPeer(cluster.uris[0]) as peer:
        peer.handshake().open_channel(1)
        peer.call(1, Confirm.Select(), Confirm.SelectOk)
        queue = declared(peer, f"hostile.{kind}", x_queue_type=kind)
        try:
            for properties, body in messages:
                publish(peer, queue, properties, body)
            body_ = {"count": 100, "ackmode": "ack_requeue_true", "encoding": "auto"}
            for _ in range(2):
                rows = api(cluster, "POST", f"queues/%2F/{queue}/get", body_)
                assert len(rows) == len(messages)
            if kind == "quorum":
                page = api(cluster, "POST", f"convoy/queues/%2F/{queue}/messages/browse", {})
                assert len(page["messages"]) == len(messages)
                assert not any("unreadable" in row for row in page["messages"])
                for place in range(1, 4):
                    api(cluster, "GET", f"queues/quorum/%2F/{queue}/peek/{place}")
            for properties, _ in messages:
                _, got = arrived(peer, queue)
                assert got.headers is None or got.headers == properties.headers or kind == "quorum"
                for name, _ in Properties.FIELDS:
                    if name != "headers":
                        assert getattr(got, name) == getattr(properties, name)
        finally:
            peer.call(1, Queue.Delete(queue=queue), Queue.DeleteOk)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("source", ["at-most-once", "at-least-once", "classic"])
def test_a_full_target_refuses_dead_letters_as_it_refuses_publishers(
    cluster: Cluster,
    names: Names,
    channel: Any,
    open_connection: Callable[[int], Any],
    source: str,
    node: int,
) -> None:
    """Of a source that is led, or kept, by the target's leader's node, and by another one."""
    dead = names.queue("dead")
    full = {"x-queue-type": "quorum", "x-max-length": 10, "x-overflow": "reject-publish"}
    channel.queue_declare(dead, durable=True, arguments=full)
    work = names.queue("work")
    arguments: dict[str, object] = {
        "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead,
        "x-queue-leader-locator": "client-local", "x-queue-type": "classic",
    }  # fmt: skip
    if source != "classic":
        arguments |= {"x-queue-type": "quorum", "x-dead-letter-strategy": source}
        if source == "at-least-once":
            arguments["x-overflow"] = "reject-publish"
    there = open_connection(node).channel()
    there.confirm_delivery()
    there.queue_declare(work, durable=True, arguments=arguments)
    for _ in range(10):
        there.basic_publish("", dead, b"direct")

    def refuses() -> bool:
        try:
            there.basic_publish("", dead, b"more")
        except pika.exceptions.NackError:
            return True
        return False

    eventually(refuses)
    before = _messages(cluster, dead)["messages"]
    for _ in range(30):
        there.basic_publish("", work, b"x")
    for _ in range(30):
        method, _, _ = there.basic_get(work)
        there.basic_reject(method.delivery_tag, requeue=False)
    kept = 30 if source == "at-least-once" else 0
    eventually(lambda: _messages(cluster, work).get("messages_dlx", 0) == kept)
    eventually(lambda: not _messages(cluster, work)["messages"])
    assert _messages(cluster, dead)["messages"] == before
    if kept:
        channel.queue_purge(dead)
        eventually(lambda: _messages(cluster, dead)["messages"] >= 10)


def _messages(cluster: Cluster, queue: str) -> Any:
    return api(cluster, "GET", f"queues/%2F/{queue}")
