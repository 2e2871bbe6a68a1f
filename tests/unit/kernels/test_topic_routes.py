"""Remembered routes of topics: one for every order key, none for messages without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import codec
from convoymq.kernels import batch
from convoymq.kernels.channel_codec import ChannelCodec
from convoymq.kernels.ordered_runs import SLOT_SEND, UNTAGGED, OrderedTarget, Slot, order_key
from convoymq.model.tables import Table
from tests.unit.kernels.test_frames import make_buffer

FULL = b"\x01t\x03"
"""Exchange and length of a routing key of three bytes."""


@dataclass
class Owner:
    """Of a channel codec whose exchange `t` is a topic's; `every` says whether keys matter."""

    target: OrderedTarget | None = None
    every: bool = True
    codec: ChannelCodec | None = None
    asked: list[tuple[bytes, bool]] = field(default_factory=list)
    """Keys whose routes were asked for, and whether the headers had an order key."""
    looked_at: list[bytes] = field(default_factory=list)

    def resolve_route(self, key: bytes) -> tuple[batch.PublishTarget, ...] | None:
        assert self.codec is not None
        assert self.target is not None
        assert not self.codec.every_key
        self.asked.append((key, self.codec.has_order_key))
        self.codec.every_key = self.every
        return (self.target,)

    def on_publish(self, key: bytes, *_message: Any) -> None:
        self.looked_at.append(key)

    def open_slot(self, slot: Slot) -> None:
        raise AssertionError("the slot is open")

    def check_flow(self) -> None:
        raise AssertionError("nothing waits")


def opened(*, every: bool = True) -> tuple[Owner, ChannelCodec, Any]:
    ear, (channel_codec,) = make_buffer((1,))
    owner = Owner(every=every)
    target = OrderedTarget(16, 0, owner)
    slot = Slot()
    slot.sender = batch.PublishTarget(batch.CommandBuilder(), 1 << 56, None)
    slot.state = SLOT_SEND
    target.set_ranges([0], [slot])
    owner.target, owner.codec = target, channel_codec
    channel_codec.owner = owner
    channel_codec.select_confirms()
    return owner, channel_codec, ear


def publish(ear: Any, routing_key: str, headers: dict[str, object] | None = None) -> None:
    method = spec.BasicPublish(exchange="t", routing_key=routing_key)
    properties = spec.Properties(headers=None if headers is None else Table.of(headers))
    data = codec.content_frames(1, method, properties, b"body", frame_bytes_max=4096)
    ear.buffer.feed(data)
    assert ear.events == []


def placed(owner: Owner) -> list[bytes]:
    """Order keys of what was sent, in order."""
    assert owner.target is not None
    sender = owner.target.slot_of(b"").sender
    assert sender is not None
    sender.builder.discard_unsent()
    keys = []
    for command in sender.applied(sender.seq):
        assert command.chunk.data is not None
        data = command.chunk.data
        keys += [order_key(batch.record(data, command.offset, i)) for i in range(command.messages)]
        assert max(command.tags or ()) < UNTAGGED
    return keys


def test_the_route_of_a_topic_is_asked_for_once() -> None:
    owner, channel_codec, ear = opened()
    for number in range(20):
        publish(ear, f"k{number}")
    assert owner.asked == [(b"\x01t\x02k0", False)]
    assert channel_codec.confirm_next == 21
    assert placed(owner) == [b"k%d" % number for number in range(20)]


def test_it_is_asked_for_again_when_something_has_changed() -> None:
    owner, channel_codec, ear = opened()
    publish(ear, "one")
    channel_codec.route_cache_version.bump()
    publish(ear, "two")
    assert owner.asked == [(FULL + b"one", False), (FULL + b"two", False)]


def test_a_message_without_an_order_key_is_asked_about_each_time() -> None:
    owner, _, ear = opened()
    publish(ear, "key")
    owner.every = False
    publish(ear, "")
    publish(ear, "", {"x-order-key": "k"})
    assert owner.asked == [(FULL + b"key", False), (b"\x01t\x00", False)]
    assert placed(owner) == [b"key", b"", b"k"]


def test_headers_that_have_an_order_key_are_told_of() -> None:
    owner, _, ear = opened()
    publish(ear, "", {"a": 1, "x-order-key": b"k"})
    publish(ear, "", {"x-order-key": "other"})
    assert owner.asked == [(b"\x01t\x00", True)]
    assert placed(owner) == [b"k", b"other"]


def test_routes_of_users_with_permissions_on_keys_are_kept_by_key() -> None:
    owner, _, ear = opened(every=False)
    for _ in range(2):
        publish(ear, "one")
        publish(ear, "two")
    assert owner.asked == [(FULL + b"one", False), (FULL + b"two", False)]


def test_an_order_key_that_is_none_needs_a_closer_look() -> None:
    owner, _, ear = opened()
    for value in (7, "", None, ["k"], True):
        publish(ear, "key", {"x-order-key": value})
    assert owner.looked_at == [FULL + b"key"] * 5
    assert owner.asked == []
