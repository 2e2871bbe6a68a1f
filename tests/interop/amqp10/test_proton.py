"""Qpid Proton, the client library of AMQP 1.0's authors, against the three-node cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from time import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.failover import declare_on_leader, leader_killed
from tests.interop.helpers import api, eventually
from tests.patience import PATIENCE_S

proton = pytest.importorskip("proton", reason="Qpid Proton is not there: make test-amqp10")
from proton.reactor import Container, Copy, DurableSubscription, Filter  # noqa: E402
from proton.utils import (  # noqa: E402
    BlockingConnection,
    LinkDetached,
    SendException,
)

QUORUM = {"x-queue-type": "quorum"}


def url(cluster: Cluster, node: int = 0, login: str = "guest:guest") -> str:
    return f"amqp://{login}@127.0.0.1:{urlsplit(cluster.uris[node]).port}"


@pytest.fixture
def dial(cluster: Cluster) -> Iterator[Callable[..., Any]]:
    """Opens blocking connections: `dial(node)`."""
    opened: list[Any] = []

    def one(node: int = 0, login: str = "guest:guest", **options: Any) -> Any:
        # Proton waits for answers with this limit.
        options = {"timeout": PATIENCE_S, "allowed_mechs": "PLAIN", **options}
        opened.append(BlockingConnection(url(cluster, node, login), **options))
        return opened[-1]

    yield one
    for each in opened:
        with suppress(Exception):
            each.close()


@pytest.fixture
def queue(channel: Any, names: Names) -> str:
    """A quorum queue."""
    name = names.queue()
    channel.queue_declare(name, durable=True, arguments=QUORUM)
    return name


def bodies(receiver: Any, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        found.append(receiver.receive(timeout=PATIENCE_S).body)
        receiver.accept()
    return found


def send(sender: Any, *bodies: Any, **fields: Any) -> list[Any]:
    """Sends messages and returns the states of their deliveries."""
    return [sender.send(proton.Message(body=each, **fields)).remote_state for each in bodies]


def known(action: Callable[[], Any]) -> Any:
    """Returns what an action gives at a node that may not know yet what another one declared."""
    found: list[Any] = []

    def done() -> bool:
        try:
            found.append(action())
        except (LinkDetached, SendException):
            return False
        return True

    eventually(done)
    return found[0]


def test_messages_go_in_and_out(dial: Callable[..., Any], queue: str) -> None:
    connection = dial()
    sender = connection.create_sender(f"/queues/{queue}")
    assert send(sender, "a", "b", {"c": 1}) == [proton.Delivery.ACCEPTED] * 3
    receiver = connection.create_receiver(f"/queues/{queue}", credit=10)
    assert bodies(receiver, 3) == ["a", "b", {"c": 1}]


def test_a_large_message_comes_back_bit_by_bit(dial: Callable[..., Any], queue: str) -> None:
    connection = dial()
    body = bytes(range(256)) * 4096
    sender = connection.create_sender(f"/queues/{queue}")
    assert send(sender, body) == [proton.Delivery.ACCEPTED]
    receiver = connection.create_receiver(f"/queues/{queue}")
    assert bytes(receiver.receive(timeout=PATIENCE_S).body) == body
    receiver.accept()


def test_properties_come_back(dial: Callable[..., Any], queue: str) -> None:
    connection = dial()
    sender = connection.create_sender(f"/queues/{queue}")
    message = proton.Message(
        body="x",
        id="my id",
        subject="s",
        reply_to="/queues/other",
        correlation_id=7,
        content_type="text/plain",
        group_id="g",
        properties={"n": 1, "text": "ü"},
        annotations={proton.symbol("x-opt-mine"): "kept"},
        durable=True,
        priority=3,
        ttl=3600,
    )
    sender.send(message)
    found = connection.create_receiver(f"/queues/{queue}").receive(timeout=PATIENCE_S)
    for name in ("body", "id", "subject", "reply_to", "correlation_id", "content_type", "group_id",
                 "properties", "durable", "priority", "ttl"):  # fmt: skip
        assert getattr(found, name) == getattr(message, name), name
    assert found.first_acquirer
    assert found.delivery_count == 0
    assert found.annotations["x-opt-mine"] == "kept"
    assert found.annotations["x-routing-key"] == queue


# Both protocols


def test_a_message_of_1_0_is_read_by_pika_and_back(
    dial: Callable[..., Any], queue: str, channel: Any
) -> None:
    connection = dial()
    sender = connection.create_sender(f"/queues/{queue}")
    sender.send(proton.Message(body=b"to pika", id="one", properties={"k": "v"}, inferred=True))
    found: list[Any] = []

    def got() -> bool:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is not None:
            found.extend((properties, body))
        return bool(found)

    eventually(got)
    properties, body = found
    assert (body, properties.message_id, properties.headers["k"]) == (b"to pika", "one", "v")
    channel.basic_publish("", queue, body, properties)
    message = connection.create_receiver(f"/queues/{queue}").receive(timeout=PATIENCE_S)
    assert (bytes(message.body), message.id, message.properties["k"]) == (body, "one", "v")


def test_an_exchange_routes_by_key(
    dial: Callable[..., Any], queue: str, channel: Any, names: Names
) -> None:
    exchange = names.exchange()
    channel.exchange_declare(exchange, "topic")
    channel.queue_bind(queue, exchange, "a.*")
    sender = dial().create_sender(f"/exchanges/{exchange}/a.b")
    assert send(sender, "routed") == [proton.Delivery.ACCEPTED]
    other = dial().create_sender(f"/exchanges/{exchange}/b")
    with pytest.raises(SendException) as refused:
        send(other, "unrouted")
    assert refused.value.state == proton.Delivery.RELEASED


def test_the_anonymous_terminus_asks_every_message(dial: Callable[..., Any], queue: str) -> None:
    connection = dial()
    sender = connection.create_sender(None)
    assert send(sender, "x", address=f"/queues/{queue}") == [proton.Delivery.ACCEPTED]
    with pytest.raises(SendException):
        send(sender, "x")
    assert send(sender, "y", address=f"/queues/{queue}") == [proton.Delivery.ACCEPTED]


# Outcomes


def test_what_is_released_comes_again_unfailed(dial: Callable[..., Any], queue: str) -> None:
    connection = dial()
    send(connection.create_sender(f"/queues/{queue}"), "again")
    receiver = connection.create_receiver(f"/queues/{queue}", credit=1)
    receiver.receive(timeout=PATIENCE_S)
    receiver.release(delivered=False)
    again = receiver.receive(timeout=PATIENCE_S)
    assert (again.body, again.delivery_count, again.first_acquirer) == ("again", 0, False)
    receiver.accept()


KINDS = pytest.mark.parametrize("kind", ["quorum", "classic", "mirrored"])
"""Classic queues whose name begins so have mirrors."""


def declare(channel: Any, names: Names, kind: str) -> tuple[str, str]:
    """Returns a queue of a kind, and the queue of its dead letters."""
    dead, queue = names.queue("dead"), names.queue(f"{kind}-q")
    channel.queue_declare(dead, durable=True, arguments=QUORUM)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    arguments |= QUORUM if kind == "quorum" else {"x-queue-type": "classic"}
    channel.queue_declare(queue, durable=True, arguments=arguments)
    return queue, dead


def modify(
    receiver: Any, *, failed: bool = False, undeliverable: bool = False, **annotations: Any
) -> None:
    """Gives back what a receiver got, with annotations `x-opt-…`."""
    delivery = receiver.fetcher.unsettled.popleft()
    delivery.local.failed, delivery.local.undeliverable = failed, undeliverable
    delivery.local.annotations = {
        proton.symbol("x-opt-" + name.replace("_", "-")): value
        for name, value in annotations.items()
    }
    delivery.update(proton.Delivery.MODIFIED)
    delivery.settle()


@KINDS
@pytest.mark.parametrize("by", ["1.0", "0-9-1"])
def test_what_is_rejected_is_dead_lettered_with_its_error(
    dial: Callable[..., Any], channel: Any, names: Names, mirroring: None, kind: str, by: str
) -> None:
    queue, dead = declare(channel, names, kind)
    connection = dial()
    if by == "1.0":
        send(connection.create_sender(f"/queues/{queue}"), b"bad")
    else:
        channel.basic_publish("", queue, b"bad")
    receiver = connection.create_receiver(f"/queues/{queue}", credit=1)
    receiver.receive(timeout=PATIENCE_S)
    modify(receiver, failed=True, rate=0.5)
    again = receiver.receive(timeout=PATIENCE_S)
    assert (again.delivery_count, again.annotations["x-opt-rate"]) == (1, 0.5)
    delivery = receiver.fetcher.unsettled.popleft()
    delivery.local.condition = proton.Condition("app:bad", "it is bad")
    delivery.update(proton.Delivery.REJECTED)
    delivery.settle()
    letter = connection.create_receiver(f"/queues/{dead}").receive(timeout=PATIENCE_S)
    assert bytes(letter.body) == b"bad"
    said = {name: letter.annotations[name] for name in (
        "x-first-death-reason", "x-opt-rejected-condition", "x-opt-rejected-description",
        "x-opt-rate",
    )}  # fmt: skip
    assert said == {
        "x-first-death-reason": "rejected",
        "x-opt-rejected-condition": "app:bad",
        "x-opt-rejected-description": "it is bad",
        "x-opt-rate": 0.5,
    }


def test_what_was_said_of_a_message_is_read_by_pika(
    dial: Callable[..., Any], queue: str, channel: Any
) -> None:
    connection = dial()
    send(connection.create_sender(f"/queues/{queue}"), b"x", inferred=True)
    receiver = connection.create_receiver(f"/queues/{queue}", credit=1)
    receiver.receive(timeout=PATIENCE_S)
    modify(receiver, reason="later")
    receiver.close()
    for method, properties, body in channel.consume(queue, auto_ack=True):
        assert (method.redelivered, body) == (True, b"x")
        assert properties.headers["x-opt-reason"] == "later"
        break
    channel.cancel()


@KINDS
def test_what_is_undeliverable_here_goes_to_others_until_none_is_left(
    dial: Callable[..., Any], channel: Any, names: Names, mirroring: None, kind: str
) -> None:
    queue, dead = declare(channel, names, kind)
    connection = dial(1)
    send(connection.create_sender(f"/queues/{queue}"), "x")
    first = connection.create_receiver(f"/queues/{queue}", credit=1)
    assert first.receive(timeout=PATIENCE_S).body == "x"
    other = connection.create_receiver(f"/queues/{queue}", credit=1, name="other")
    modify(first, undeliverable=True, by="first")
    found = other.receive(timeout=PATIENCE_S)
    assert (found.body, found.annotations["x-opt-by"]) == ("x", "first")
    due = int(time() * 1000) + 300
    modify(other, delivery_time=due)
    assert other.receive(timeout=PATIENCE_S).body == "x"
    assert time() * 1000 >= due
    modify(other, undeliverable=True)
    letter = connection.create_receiver(f"/queues/{dead}").receive(timeout=PATIENCE_S)
    assert (letter.body, letter.annotations["x-opt-by"]) == ("x", "first")


# Credit


def test_a_receiver_gets_as_much_as_its_credit(
    dial: Callable[..., Any], queue: str, channel: Any
) -> None:
    connection = dial()
    send(connection.create_sender(f"/queues/{queue}"), *"abcde")
    # With a number, the helper would grant it twice and again for each delivery.
    receiver = connection.create_receiver(f"/queues/{queue}", credit=0)
    receiver.link.flow(2)
    connection.wait(lambda: len(receiver.fetcher.incoming) == 2, timeout=PATIENCE_S)
    assert [receiver.fetcher.pop().body for _ in "ab"] == ["a", "b"]
    eventually(lambda: channel.queue_declare(queue, passive=True).method.message_count == 3)
    receiver.accept()


def test_a_drain_ends_with_what_is_there(dial: Callable[..., Any], queue: str) -> None:
    connection = dial()
    send(connection.create_sender(f"/queues/{queue}"), *"abc")
    receiver = connection.create_receiver(f"/queues/{queue}", credit=0)
    receiver.link.drain(50)
    connection.wait(lambda: receiver.link.credit == 0, timeout=PATIENCE_S)
    assert bodies(receiver, 3) == ["a", "b", "c"]


def test_a_closed_receiver_gives_back(dial: Callable[..., Any], queue: str) -> None:
    connection = dial()
    send(connection.create_sender(f"/queues/{queue}"), "a")
    receiver = connection.create_receiver(f"/queues/{queue}", credit=1)
    receiver.receive(timeout=PATIENCE_S)
    receiver.close()
    other = connection.create_receiver(f"/queues/{queue}", credit=1, name="other")
    assert other.receive(timeout=PATIENCE_S).delivery_count == 0
    other.accept()


def test_a_copy_leaves_messages_where_they_are(dial: Callable[..., Any], queue: str) -> None:
    connection = dial()
    send(connection.create_sender(f"/queues/{queue}"), *"abc")
    browser = connection.create_receiver(f"/queues/{queue}", credit=0, options=Copy())
    browser.link.drain(50)
    connection.wait(lambda: browser.link.credit == 0, timeout=PATIENCE_S)
    assert [browser.fetcher.pop().body for _ in "abc"] == ["a", "b", "c"]
    receiver = connection.create_receiver(f"/queues/{queue}", name="taker", credit=3)
    assert bodies(receiver, 3) == ["a", "b", "c"]


def test_a_durable_subscription_outlives_its_connection(
    dial: Callable[..., Any], names: Names
) -> None:
    key = names.queue()

    def subscribed(node: int) -> tuple[Any, Any]:
        container = Container()
        container.container_id = f"client of {key}"
        connection = dial(node, container=container)
        return connection, connection.create_receiver(
            f"/exchanges/amq.direct/{key}", name="news", options=DurableSubscription(), credit=5
        )

    connection, receiver = subscribed(0)
    sender = dial(2).create_sender(f"/exchanges/amq.direct/{key}")
    assert known(lambda: send(sender, "here")) == [proton.Delivery.ACCEPTED]
    assert bodies(receiver, 1) == ["here"]
    connection.close()
    assert send(sender, "away") == [proton.Delivery.ACCEPTED]
    connection, receiver = subscribed(1)
    assert bodies(receiver, 1) == ["away"]
    receiver.close()
    with pytest.raises(SendException) as refused:
        sender.send(proton.Message(body="nobody"))
    assert refused.value.state == proton.Delivery.RELEASED


# Refusals


def test_wrong_login(dial: Callable[..., Any]) -> None:
    with pytest.raises(proton.ConnectionException, match=r"[Aa]uthentication failed|unauthorized"):
        dial(login="guest:wrong")


def test_unknown_queue(dial: Callable[..., Any]) -> None:
    connection = dial()
    for attach in (connection.create_sender, connection.create_receiver):
        with pytest.raises(LinkDetached, match="no queue 'none' in vhost '/'"):
            attach("/queues/none")


def test_an_old_address_names_the_new_form(dial: Callable[..., Any], queue: str) -> None:
    with pytest.raises(LinkDetached, match="/queues/QUEUE"):
        dial().create_sender(f"/queue/{queue}")


def test_permission_denied(cluster: Cluster, dial: Callable[..., Any], queue: str) -> None:
    api(cluster, "PUT", "users/reader", {"password": "secret", "tags": ""})
    rules = {"configure": "", "write": "", "read": ".*"}
    api(cluster, "PUT", "permissions/%2F/reader", rules)
    connection = dial(login="reader:secret")
    with pytest.raises(LinkDetached, match=r"write access to exchange 'amq\.default'"):
        connection.create_sender(f"/queues/{queue}")
    # The session lives.
    connection.create_receiver(f"/queues/{queue}")
    api(cluster, "DELETE", "users/reader")


# Lists


def test_a_connection_is_listed(cluster: Cluster, dial: Callable[..., Any], queue: str) -> None:
    connection = dial()
    connection.create_receiver(f"/queues/{queue}")
    rows = [each for each in api(cluster, "GET", "connections") if each["protocol"] == "AMQP 1-0"]
    assert [row["user"] for row in rows] == ["guest"]
    consumers = [
        each for each in api(cluster, "GET", "consumers") if each["queue"]["name"] == queue
    ]
    assert [each["ack_required"] for each in consumers] == [True]


# Behaviours that RabbitMQ's own suites try (its cases in brackets)


def test_all_queues_of_a_message_decide(
    dial: Callable[..., Any], channel: Any, names: Names
) -> None:
    """[target_quorum_queue_rejects, target_queues_deleted_accepted, target_queue_deleted,
    last_queue_confirms]"""
    exchange, full, other = names.queue("fan"), names.queue("full"), names.queue("other")
    channel.exchange_declare(exchange, "fanout")
    limits = {**QUORUM, "x-max-length": 1, "x-overflow": "reject-publish"}
    for name, arguments in ((full, limits), (other, QUORUM)):
        channel.queue_declare(name, durable=True, arguments=arguments)
        channel.queue_bind(name, exchange)
    sender = dial().create_sender(f"/exchanges/{exchange}")

    def outcome(body: str) -> Any:
        try:
            return send(sender, body)[0]
        except SendException as refused:
            return refused.state

    eventually(lambda: outcome("x") == proton.Delivery.REJECTED)
    delivery = sender.link.send(proton.Message(body="y"))
    sender.connection.wait(lambda: delivery.settled, timeout=PATIENCE_S)
    condition = delivery.remote.condition
    assert condition.name == "amqp:resource-limit-exceeded"
    assert {str(k): v for k, v in condition.info.items()} == {"queue": full, "reason": "maxlen"}
    channel.queue_delete(full)
    eventually(lambda: outcome("z") == proton.Delivery.ACCEPTED)
    channel.queue_delete(other)
    eventually(lambda: outcome("z") == proton.Delivery.RELEASED)
    channel.exchange_delete(exchange)


def test_many_links_are_drained_and_get_single_messages(
    dial: Callable[..., Any], channel: Any, names: Names
) -> None:
    """[drain_many, sync_get_unsettled, sync_get_settled, timed_get, stop]"""
    queues = [names.queue(f"d{number}") for number in range(10)]
    connection = dial()
    receivers = []
    for number, name in enumerate(queues):
        channel.queue_declare(name, durable=True, arguments=QUORUM)
        for body in range(number % 3):
            channel.basic_publish("", name, b"%d" % body)
        receivers.append(connection.create_receiver(f"/queues/{name}", name=name, credit=0))
    for receiver in receivers:
        receiver.link.drain(2)
    for number, receiver in enumerate(receivers):
        connection.wait(lambda link=receiver.link: link.credit == 0, timeout=PATIENCE_S)
        assert len(receiver.fetcher.incoming) == number % 3
    empty = receivers[0]
    for _ in range(2):
        # One message, or the answer that there is none.
        empty.link.drain(1)
        connection.wait(lambda: empty.link.credit == 0, timeout=PATIENCE_S)
        found = [bytes(empty.fetcher.pop().body) for _ in empty.fetcher.incoming.copy()]
        channel.basic_publish("", queues[0], b"later")
        eventually(lambda: channel.queue_declare(queues[0], passive=True).method.message_count >= 1)
    assert found == [b"later"]


def test_what_a_connection_holds_goes_to_another_in_order(
    dial: Callable[..., Any], queue: str
) -> None:
    """[detach_requeues_two_connections, requeue_multiple_message_order]"""
    send(dial().create_sender(f"/queues/{queue}"), *range(5))
    first = dial(1)
    receiver = first.create_receiver(f"/queues/{queue}", credit=5)
    first.wait(lambda: len(receiver.fetcher.incoming) == 5, timeout=PATIENCE_S)
    first.close()
    second = dial(2)
    again = known(lambda: second.create_receiver(f"/queues/{queue}", credit=5))
    found = [again.receive(timeout=PATIENCE_S) for _ in range(5)]
    assert [(each.body, each.delivery_count) for each in found] == [(n, 0) for n in range(5)]
    for _ in found:
        again.accept()


def test_dead_letters_go_into_a_stream_by_what_was_said(
    dial: Callable[..., Any], channel: Any, names: Names
) -> None:
    """[dead_letter_headers_exchange, dead_letter_into_stream, modified_quorum_queue]"""
    exchange, stream, queue = names.queue("by"), names.queue("stream"), names.queue()
    channel.exchange_declare(exchange, "headers")
    channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
    channel.queue_bind(
        stream, exchange, arguments={"x-match": "all-with-x", "x-opt-why": "too large"}
    )
    arguments = {**QUORUM, "x-dead-letter-exchange": exchange}
    channel.queue_declare(queue, durable=True, arguments=arguments)
    connection = dial()
    send(connection.create_sender(f"/queues/{queue}"), "a", "b", "c")
    receiver = connection.create_receiver(f"/queues/{queue}", credit=3)
    for why in ("too large", "other", "too large"):
        receiver.receive(timeout=PATIENCE_S)
        modify(receiver, undeliverable=True, why=why)
    first = proton.Described(proton.symbol("rabbitmq:stream-offset-spec"), "first")
    letters = connection.create_receiver(
        f"/queues/{stream}", name="letters", credit=5, options=Filter({proton.symbol("o"): first})
    )
    found = [letters.receive(timeout=PATIENCE_S) for _ in "ac"]
    assert [(each.body, each.annotations["x-first-death-queue"]) for each in found] == [
        ("a", queue),
        ("c", queue),
    ]
    channel.exchange_delete(exchange)


def test_single_active_consumers_take_over_and_wait_drained(
    dial: Callable[..., Any], channel: Any, names: Names
) -> None:
    """[single_active_consumer_quorum_queue, single_active_consumer_drain]"""
    queue = names.queue()
    arguments = {**QUORUM, "x-single-active-consumer": True}
    channel.queue_declare(queue, durable=True, arguments=arguments)
    one, other = dial(0), dial(1)
    active = one.create_receiver(f"/queues/{queue}", name="one", credit=1)
    waiting = other.create_receiver(f"/queues/{queue}", name="other", credit=0)
    send(one.create_sender(f"/queues/{queue}"), "a", "b")
    assert active.receive(timeout=PATIENCE_S).body == "a"
    waiting.link.drain(3)
    other.wait(lambda: waiting.link.credit == 0, timeout=PATIENCE_S)
    assert not waiting.fetcher.incoming
    waiting.link.flow(3)
    active.close()
    assert bodies(waiting, 2) == ["a", "b"]


def test_what_a_message_says_of_itself(
    dial: Callable[..., Any], channel: Any, names: Names, queue: str
) -> None:
    """[durable_field, message_ttl, x_cc_annotation, user_id, decimal_types, attach_to_exclusive]"""
    copy = names.queue("copy")
    channel.queue_declare(copy, durable=True, arguments=QUORUM)
    connection = dial()
    sender = connection.create_sender(f"/queues/{queue}")
    decimal = proton.decimal64(0x2230000000000001)
    send(
        sender, {"d": decimal}, durable=True, priority=7, user_id=b"guest",
        annotations={proton.symbol("x-cc"): [copy]},
    )  # fmt: skip
    for name in (queue, copy):
        receiver = connection.create_receiver(f"/queues/{name}", name=name)
        found = receiver.receive(timeout=PATIENCE_S)
        receiver.accept()
        assert (found.durable, found.priority, found.user_id) == (True, 7, b"guest")
        assert found.body == {"d": decimal}
        assert found.annotations["x-routing-key"] == queue
    send(sender, "gone", ttl=0.05)
    eventually(lambda: channel.queue_declare(queue, passive=True).method.message_count == 0)
    with pytest.raises(LinkDetached, match="user_id property set to 'other'"):
        send(sender, "x", user_id=b"other")
    mine = names.queue("exclusive")
    channel.queue_declare(mine, exclusive=True)
    with pytest.raises(LinkDetached, match="resource-locked"):
        connection.create_receiver(f"/queues/{mine}", name="locked")


# Failures


def test_a_killed_leader_costs_nothing(
    cluster: Cluster, dial: Callable[..., Any], names: Names
) -> None:
    """Publisher and consumer speak to other nodes than the one that leads the queue and dies."""
    queue = names.queue()
    declare_on_leader(cluster, queue)
    first, third = dial(0), dial(2)
    sender = known(lambda: first.create_sender(f"/queues/{queue}"))
    receiver = known(lambda: third.create_receiver(f"/queues/{queue}", credit=20))
    count, found = 60, []
    with leader_killed(cluster, True) as strike:
        for number in range(count):
            if number == count // 3:
                strike()
            assert send(sender, number) == [proton.Delivery.ACCEPTED]
            if number % 2:
                found += bodies(receiver, 2)
    assert found == list(range(count))


def test_a_group_of_an_ordered_topic_is_consumed(
    cluster: Cluster, dial: Callable[..., Any], channel: Any
) -> None:
    api(cluster, "PUT", "topics/%2F/orders-of-amqp10", {"partitions": 2})
    connection = dial()
    receiver = connection.create_receiver("/queues/orders-of-amqp10%2Fg", credit=2)
    sender = connection.create_sender("/exchanges/orders-of-amqp10/key")
    assert send(sender, *"abcde") == [proton.Delivery.ACCEPTED] * 5
    first = receiver.receive(timeout=PATIENCE_S)
    receiver.accept()
    assert first.body == "a"
    again = receiver.receive(timeout=PATIENCE_S)
    receiver.release(delivered=False)
    assert (again.body, receiver.receive(timeout=PATIENCE_S).body) == ("b", "b")
    receiver.accept()
    receiver.close()
    other = connection.create_receiver("/queues/orders-of-amqp10%2Fg", name="other", credit=10)
    assert bodies(other, 3) == ["c", "d", "e"]


def selected(expression: str) -> Any:
    """A filter by SQL."""
    name = proton.symbol("sql-filter")
    return Filter({name: proton.Described(proton.symbol("amqp:sql-filter"), expression)})


def test_filters_of_a_queue_outlive_its_leader(
    cluster: Cluster, dial: Callable[..., Any], names: Names
) -> None:
    """Two consumers at two nodes want a third of the messages each; the last third stays, and is
    read without a filter."""
    queue = names.queue()
    declare_on_leader(cluster, queue)
    connections = [dial(node) for node in (0, 2)]
    sender = known(lambda: connections[0].create_sender(f"/queues/{queue}"))
    receivers = [
        known(
            lambda at=at, rest=rest: at.create_receiver(
                f"/queues/{queue}", name=f"r{rest}", credit=5, options=selected(f"n % 3 = {rest}")
            )
        )
        for rest, at in enumerate(connections)
    ]
    count = 60
    with leader_killed(cluster, True) as strike:
        for number in range(count):
            if number == count // 3:
                strike()
            assert send(sender, number, properties={"n": number}) == [proton.Delivery.ACCEPTED]
            if number % 3 == 2:
                assert bodies(receivers[0], 1) == [number - 2]
                failed = receivers[1].receive(timeout=PATIENCE_S)
                receivers[1].release(delivered=True)
                assert bodies(receivers[1], 1) == [failed.body] == [number - 1]
    rest = dial(0).create_receiver(f"/queues/{queue}", credit=count)
    assert bodies(rest, count // 3) == list(range(2, count, 3))


def test_a_stream_is_filtered(dial: Callable[..., Any], channel: Any, names: Names) -> None:
    stream = names.queue("stream")
    channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
    connection = dial()
    sender = connection.create_sender(f"/queues/{stream}")
    for number in range(6):
        send(sender, number, properties={"n": number, "region": ("emea", "apac")[number % 2]})
    first = proton.Described(proton.symbol("rabbitmq:stream-offset-spec"), "first")
    by_map = proton.Described(
        proton.symbol("amqp:application-properties-filter"), {"region": "&p:em"}
    )
    by_sql = proton.Described(proton.symbol("amqp:sql-filter"), "n > 1 AND region LIKE 'a%'")
    for name, chosen, wanted in (("f", by_map, [0, 2, 4]), ("sql-filter", by_sql, [3, 5])):
        asked = {proton.symbol("offset"): first, proton.symbol(name): chosen}
        receiver = connection.create_receiver(
            f"/queues/{stream}", name=name, credit=3, options=Filter(asked)
        )
        assert bodies(receiver, len(wanted)) == wanted
