"""What a shovel changes in a message, and what it leaves alone."""

from __future__ import annotations

from typing import Any

from convoymq.broker.shovels import checked, shovel_of
from convoymq.edges.shovel.ends import Message
from convoymq.edges.shovel.forwarding import Forwarding
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.message import EXCHANGE
from convoymq.messages.amqp10.sections import (
    Header,
    annotations_section,
    header_section,
    section,
    split,
)
from convoymq.messages.amqp10.values import Symbol
from convoymq.model.tables import Table

OLD = {"src-uri": "amqp://u:p@h", "src-queue": "a", "dest-uri": "amqp://"}
TEN = {"src-uri": "amqp://h", "src-queue": "a", "dest-protocol": "amqp10", "dest-uri": "amqp://",
       "dest-address": "/queues/b"}  # fmt: skip
MESSAGE = Message(1, "x", "k", Properties(priority=3, headers=Table.of({"n": 1})), b"body")
NOW_MS = 1_700_000_000_500


def forwarded(value: dict[str, Any], message: Message = MESSAGE) -> Message:
    shovel = shovel_of("v", "s", checked("s", value))
    made = Forwarding(shovel, "cluster", "amqp://u:p@h", "amqp://")
    return made.forwarded(message, NOW_MS)


def test_without_a_destination_a_message_keeps_its_place() -> None:
    assert forwarded(OLD) == MESSAGE


def test_queue_exchange_and_key_replace_its_place() -> None:
    to_queue = forwarded(OLD | {"dest-queue": "q"})
    assert (to_queue.exchange, to_queue.routing_key) == ("", "q")
    to_exchange = forwarded(OLD | {"dest-exchange": "e"})
    assert (to_exchange.exchange, to_exchange.routing_key) == ("e", "k")
    to_key = forwarded(OLD | {"dest-exchange": "e", "dest-exchange-key": "z"})
    assert (to_key.exchange, to_key.routing_key) == ("e", "z")


def test_headers_tell_of_each_hop_and_of_the_time() -> None:
    more = OLD | {"dest-queue": "q", "dest-add-forward-headers": True,
                  "dest-add-timestamp-header": True}  # fmt: skip
    twice = forwarded(more, forwarded(more))
    headers = twice.properties.headers
    assert headers is not None
    plain: dict[str, Any] = headers.to_plain()
    assert len(plain["x-shovelled"]) == 2
    assert plain["x-shovelled"][0] == {
        "shovelled-by": "cluster", "shovel-type": "dynamic", "shovel-name": "s",
        "shovel-vhost": "v", "src-uri": "amqp://h", "dest-uri": "amqp://", "src-queue": "a",
        "dest-queue": "q",
    }  # fmt: skip
    assert plain["x-shovelled-timestamp"] == NOW_MS // 1000
    assert plain["n"] == 1


def test_properties_are_set() -> None:
    made = forwarded(OLD | {"dest-publish-properties": {"delivery_mode": 2, "app_id": "x"}})
    assert (made.properties.delivery_mode, made.properties.app_id) == (2, "x")
    assert made.properties.priority == 3


def test_a_message_becomes_one_of_amqp_10() -> None:
    more = {"dest-application-properties": {"own": "1"}, "dest-properties": {"content_type": "t"},
            "dest-message-annotations": {"x-own": "2"}, "dest-add-forward-headers": True,
            "dest-add-timestamp-header": True}  # fmt: skip
    found = split(forwarded(TEN | more).sections)
    assert found.header.priority == 3
    assert found.application_properties == {
        "n": 1, "own": "1", "shovelled-by": "cluster", "shovel-type": "dynamic",
        "shovel-name": "s",
    }  # fmt: skip
    assert found.annotations == {Symbol("x-own"): "2"}
    assert found.properties["content-type"] == "t"
    assert found.properties["creation-time"] == NOW_MS


def test_a_bare_message_of_amqp_10_stays() -> None:
    """Down to its footer; what its broker told of the delivery goes."""
    bare = section(0x73, ["id", None, "to"]) + section(0x77, [1, "two"]) + section(0x78, {})
    notes = annotations_section({EXCHANGE: "x", Symbol("x-kept"): 1})
    payload = header_section(Header(durable=True, delivery_count=4)) + notes + bare
    message = MESSAGE._replace(sections=payload, properties=Properties(delivery_mode=2))
    made = forwarded(TEN, message).sections
    found = split(made)
    assert made[found.bare_at :] == bare
    assert found.annotations == {Symbol("x-kept"): 1}
    assert (found.header.durable, found.header.delivery_count) == (True, 0)
