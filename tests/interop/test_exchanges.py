"""Routing as pika sees it: every exchange type, bindings between exchanges, alternate exchanges."""

from __future__ import annotations

from typing import Any

import pytest
from pika import BasicProperties  # type: ignore[import-untyped]
from pika.exceptions import ChannelClosedByBroker, UnroutableError  # type: ignore[import-untyped]

from tests.interop.conftest import Names
from tests.interop.helpers import fetch_all, publish_confirmed


def queue_bound(
    channel: Any, names: Names, name: str, *bindings: tuple[str, str, dict[str, Any] | None]
) -> str:
    """Declare a queue of this connection, bound by (exchange, key, arguments)."""
    queue = names.queue(name)
    channel.queue_declare(queue, exclusive=True)
    for exchange, key, arguments in bindings:
        channel.queue_bind(queue, exchange, key, arguments)
    return queue


def exchange_of(channel: Any, names: Names, kind: str, name: str = "x", **more: Any) -> str:
    exchange = names.exchange(name)
    channel.exchange_declare(exchange, kind, **more)
    return exchange


def test_default_exchange_routes_by_queue_name(channel: Any, names: Names) -> None:
    queue = queue_bound(channel, names, "q")
    publish_confirmed(channel, queue, [b"one"])
    assert fetch_all(channel, queue) == [b"one"]


def test_direct_exchange_routes_by_equal_key(channel: Any, names: Names) -> None:
    exchange = exchange_of(channel, names, "direct")
    red = queue_bound(channel, names, "red", (exchange, "red", None))
    both = queue_bound(channel, names, "both", (exchange, "red", None), (exchange, "blue", None))
    channel.confirm_delivery()
    for key in ("red", "blue", "Red", ""):
        channel.basic_publish(exchange, key, key.encode())
    assert fetch_all(channel, red) == [b"red"]
    assert fetch_all(channel, both) == [b"red", b"blue"]


def test_fanout_exchange_ignores_the_key(channel: Any, names: Names) -> None:
    exchange = exchange_of(channel, names, "fanout")
    queues = [queue_bound(channel, names, f"q{n}", (exchange, "", None)) for n in range(3)]
    channel.confirm_delivery()
    channel.basic_publish(exchange, "whatever", b"all")
    assert [fetch_all(channel, queue) for queue in queues] == [[b"all"]] * 3


def test_two_matching_bindings_give_one_copy(channel: Any, names: Names) -> None:
    exchange = exchange_of(channel, names, "topic")
    queue = queue_bound(channel, names, "q", (exchange, "a.*", None), (exchange, "#", None))
    channel.confirm_delivery()
    channel.basic_publish(exchange, "a.b", b"once")
    assert fetch_all(channel, queue) == [b"once"]


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("#", ["", "a", "a.b.c"], []),
        ("*", ["a"], ["", "a.b"]),
        ("a.*", ["a.b", "a."], ["a", "a.b.c", "b.a"]),
        ("a.#", ["a", "a.b", "a.b.c"], ["b", "ab"]),
        ("#.z", ["z", "a.z", "a.b.z"], ["a", "z.a"]),
        ("a.#.z", ["a.z", "a.b.z", "a.b.c.z"], ["a", "z", "a.b"]),
        ("*.b.#", ["a.b", "a.b.c"], ["b", "a.a.b"]),
        ("a..b", ["a..b"], ["a.b", "a.c.b"]),
        ("a.*.b", ["a..b", "a.c.b"], ["a.b"]),
    ],
)
def test_topic_exchange(
    channel: Any, names: Names, pattern: str, matching: list[str], other: list[str]
) -> None:
    exchange = exchange_of(channel, names, "topic")
    queue = queue_bound(channel, names, "q", (exchange, pattern, None))
    channel.confirm_delivery()
    for key in matching + other:
        channel.basic_publish(exchange, key, key.encode())
    assert fetch_all(channel, queue) == [key.encode() for key in matching]


@pytest.mark.parametrize(
    ("arguments", "matching", "other"),
    [
        ({"x-match": "all", "a": 1, "b": "x"}, [{"a": 1, "b": "x", "c": 0}], [{"a": 1}, {}]),
        ({"a": 1, "b": "x"}, [{"a": 1, "b": "x"}], [{"a": 1}, {"a": 2, "b": "x"}]),
        ({"x-match": "any", "a": 1, "b": "x"}, [{"a": 1}, {"b": "x", "a": 9}], [{"a": 2}, {}]),
        ({"x-match": "all", "a": None}, [{"a": 1}, {"a": "any"}], [{"b": 1}]),
        ({"x-match": "all"}, [{}, {"a": 1}], []),
        ({"x-match": "any"}, [], [{}, {"a": 1}]),
        ({"x-match": "all", "x-a": 1}, [{}, {"x-a": 2}], []),
        ({"x-match": "all", "a": True}, [{"a": True}], [{"a": False}, {"a": "true"}]),
        pytest.param(
            {"x-match": "all-with-x", "x-a": 1},
            [{"x-a": 1}],
            [{}, {"x-a": 2}],
            marks=pytest.mark.rabbitmq_since("3.10"),
        ),
        pytest.param(
            {"x-match": "any-with-x", "x-a": 1, "b": 1},
            [{"x-a": 1}, {"b": 1}],
            [{}, {"x-a": 2}],
            marks=pytest.mark.rabbitmq_since("3.10"),
        ),
    ],
)
def test_headers_exchange(
    channel: Any,
    names: Names,
    arguments: dict[str, Any],
    matching: list[dict[str, Any]],
    other: list[dict[str, Any]],
) -> None:
    exchange = exchange_of(channel, names, "headers")
    queue = queue_bound(channel, names, "q", (exchange, "", arguments))
    channel.confirm_delivery()
    for headers in matching + other:
        channel.basic_publish(
            exchange, "", repr(headers).encode(), BasicProperties(headers=headers)
        )
    assert fetch_all(channel, queue) == [repr(headers).encode() for headers in matching]


def test_predeclared_exchanges_exist(channel: Any) -> None:
    kinds = {
        "amq.direct": "direct",
        "amq.fanout": "fanout",
        "amq.topic": "topic",
        "amq.headers": "headers",
        "amq.match": "headers",
    }
    for exchange, kind in kinds.items():
        channel.exchange_declare(exchange, kind, durable=True)


def test_exchanges_bound_to_exchanges(channel: Any, names: Names) -> None:
    source = exchange_of(channel, names, "topic", "source")
    middle = exchange_of(channel, names, "fanout", "middle", internal=True)
    channel.exchange_bind(middle, source, "news.#")
    queue = queue_bound(channel, names, "q", (middle, "", None))
    channel.confirm_delivery()
    channel.basic_publish(source, "news.local", b"yes")
    channel.basic_publish(source, "other", b"no")
    assert fetch_all(channel, queue) == [b"yes"]
    channel.exchange_unbind(middle, source, "news.#")
    channel.basic_publish(source, "news.local", b"gone")
    assert fetch_all(channel, queue) == []


def test_a_cycle_of_exchanges_ends(channel: Any, names: Names) -> None:
    one = exchange_of(channel, names, "fanout", "one")
    two = exchange_of(channel, names, "fanout", "two")
    channel.exchange_bind(one, two)
    channel.exchange_bind(two, one)
    queue = queue_bound(channel, names, "q", (one, "", None), (two, "", None))
    channel.confirm_delivery()
    channel.basic_publish(one, "", b"once")
    assert fetch_all(channel, queue) == [b"once"]


def test_alternate_exchange_takes_what_has_no_destination(channel: Any, names: Names) -> None:
    spare = exchange_of(channel, names, "fanout", "spare")
    first = exchange_of(channel, names, "direct", "first", arguments={"alternate-exchange": spare})
    known = queue_bound(channel, names, "known", (first, "known", None))
    rest = queue_bound(channel, names, "rest", (spare, "", None))
    channel.confirm_delivery()
    channel.basic_publish(first, "known", b"known", mandatory=True)
    channel.basic_publish(first, "unknown", b"unknown", mandatory=True)
    assert fetch_all(channel, known) == [b"known"]
    assert fetch_all(channel, rest) == [b"unknown"]


def test_cc_and_bcc_headers_add_routing_keys(channel: Any, names: Names) -> None:
    to, copy, blind = (queue_bound(channel, names, name) for name in ("to", "cc", "bcc"))
    channel.confirm_delivery()
    headers = {"CC": [copy], "BCC": [blind], "kept": 1}
    channel.basic_publish("", to, b"letter", BasicProperties(headers=headers))
    for queue in (to, copy, blind):
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        assert method is not None
        assert body == b"letter"
        assert properties.headers == {"CC": [copy], "kept": 1}


def test_unbinding_ends_routing(channel: Any, names: Names) -> None:
    exchange = exchange_of(channel, names, "direct")
    queue = queue_bound(channel, names, "q", (exchange, "k", None))
    channel.queue_unbind(queue, exchange, "k")
    channel.confirm_delivery()
    channel.basic_publish(exchange, "k", b"lost")
    assert fetch_all(channel, queue) == []


def test_auto_delete_exchange_goes_with_its_last_binding(channel: Any, names: Names) -> None:
    exchange = exchange_of(channel, names, "fanout", auto_delete=True)
    queue = queue_bound(channel, names, "q", (exchange, "", None))
    channel.exchange_declare(exchange, passive=True)
    channel.queue_unbind(queue, exchange, "")
    # Declared anew with another type: possible only when it is gone.
    channel.exchange_declare(exchange, "topic")


def test_bindings_reach_queues_of_every_type(channel: Any, names: Names) -> None:
    exchange = exchange_of(channel, names, "fanout", durable=True)
    queues = []
    for kind in ("quorum", "classic"):
        queues.append(names.queue(kind))
        channel.queue_declare(queues[-1], durable=True, arguments={"x-queue-type": kind})
        channel.queue_bind(queues[-1], exchange)
    channel.confirm_delivery()
    channel.basic_publish(exchange, "", b"both")
    assert [fetch_all(channel, queue) for queue in queues] == [[b"both"]] * 2


CHOOSING = ["x-consistent-hash", "x-modulus-hash", "x-random"]


def bound_queues(
    channel: Any, names: Names, exchange: str, key: str, count: int = 3, **arguments: str
) -> list[str]:
    """Durable queues that are bound to the exchange."""
    queues = [names.queue(f"q{number}") for number in range(count)]
    for queue in queues:
        channel.queue_declare(queue, durable=True, arguments=arguments or None)
        channel.queue_bind(queue, exchange, key)
    return queues


@pytest.mark.parametrize("kind", CHOOSING)
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_one_queue_is_chosen(channel: Any, names: Names, kind: str, queue_type: str) -> None:
    exchange = exchange_of(channel, names, kind)
    queues = bound_queues(channel, names, exchange, "10", **{"x-queue-type": queue_type})
    channel.confirm_delivery()
    for number in range(120):
        channel.basic_publish(exchange, str(number), str(number).encode(), mandatory=True)
    found = [fetch_all(channel, queue) for queue in queues]
    assert all(found)
    assert sorted(body for bodies in found for body in bodies) == sorted(
        str(number).encode() for number in range(120)
    )


@pytest.mark.parametrize("kind", ["x-consistent-hash", "x-modulus-hash"])
def test_a_key_goes_to_the_same_queue_from_every_node(
    open_connection: Any, names: Names, kind: str
) -> None:
    channels = [open_connection(node).channel() for node in range(3)]
    exchange = exchange_of(channels[0], names, kind)
    queues = bound_queues(channels[0], names, exchange, "10")
    for channel in channels:
        channel.confirm_delivery()
        for number in range(30):
            channel.basic_publish(exchange, str(number), str(number).encode(), mandatory=True)
    found = [fetch_all(channels[0], queue) for queue in queues]
    assert sum(len(bodies) for bodies in found) == 90
    assert sum(len(set(bodies)) for bodies in found) == 30


@pytest.mark.parametrize(
    ("arguments", "properties"),
    [
        ({"hash-header": "h"}, lambda n: BasicProperties(headers={"h": n})),
        ({"hash-property": "message_id"}, lambda n: BasicProperties(message_id=n)),
        ({"hash-property": "correlation_id"}, lambda n: BasicProperties(correlation_id=n)),
        ({"hash-property": "timestamp"}, lambda n: BasicProperties(timestamp=int(n))),
    ],
)
def test_headers_and_properties_are_hashed(
    channel: Any, names: Names, arguments: dict[str, str], properties: Any
) -> None:
    exchange = exchange_of(channel, names, "x-consistent-hash", arguments=arguments)
    queues = bound_queues(channel, names, exchange, "10")
    channel.confirm_delivery()
    for number in [*range(40), *range(40)]:
        body = str(number).encode()
        channel.basic_publish(exchange, "same", body, properties(str(number)), mandatory=True)
    found = [fetch_all(channel, queue) for queue in queues]
    assert all(found)
    assert sum(len(bodies) for bodies in found) == 80
    assert sum(len(set(bodies)) for bodies in found) == 40


def test_local_random_routes_on_the_publishers_node(open_connection: Any, names: Names) -> None:
    channels = [open_connection(node).channel() for node in range(3)]
    exchange = exchange_of(channels[0], names, "x-local-random")
    queues = [names.queue(f"q{number}") for number in range(2)]
    for queue, channel in zip(queues, channels, strict=False):
        # An exclusive queue is kept on the node of its connection.
        channel.queue_declare(queue, exclusive=True, arguments={"x-queue-type": "classic"})
        channel.queue_bind(queue, exchange, "")
    for node, queue in enumerate(queues):
        channels[node].confirm_delivery()
        for number in range(10):
            channels[node].basic_publish(exchange, "", str(number).encode(), mandatory=True)
        assert len(fetch_all(channels[node], queue)) == 10
    channels[2].confirm_delivery()
    with pytest.raises(UnroutableError):
        channels[2].basic_publish(exchange, "", b"nobody", mandatory=True)


@pytest.mark.parametrize(
    ("kind", "key", "text"),
    [
        ("x-consistent-hash", "abc", 'The binding key must be an integer: <<"abc">>'),
        ("x-consistent-hash", "0", "The binding key must be greater than 0"),
        ("x-local-random", "k", "Non empty binding 'k' key not permitted"),
    ],
)
def test_bindings_that_choosing_exchanges_refuse(
    open_connection: Any, names: Names, kind: str, key: str, text: str
) -> None:
    channel = open_connection(0).channel()
    exchange = exchange_of(channel, names, kind)
    queue = queue_bound(channel, names, "q")
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_bind(queue, exchange, key)
    assert caught.value.reply_code == 406
    assert caught.value.reply_text == f"PRECONDITION_FAILED - {text}"


def test_a_property_that_is_not_hashed_is_refused(open_connection: Any, names: Names) -> None:
    channel = open_connection(0).channel()
    with pytest.raises(ChannelClosedByBroker) as caught:
        exchange_of(channel, names, "x-consistent-hash", arguments={"hash-property": "app_id"})
    assert caught.value.reply_text == "PRECONDITION_FAILED - Unsupported property: app_id"
