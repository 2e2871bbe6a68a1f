"""Headers of deliveries from an ordered topic, beside those of other consumers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from convoymq.edges.amqp091 import codec
from convoymq.edges.amqp091.codec import Properties
from convoymq.kernels.channel_codec import ConsumerDeliveries
from convoymq.kernels.order_headers import PLACE_BITS, Place
from convoymq.model.tables import Field, Table
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.order_token import OrderToken
from tests.unit.kernels import reference
from tests.unit.kernels.columns_reference import Message
from tests.unit.kernels.test_columns import messages
from tests.unit.kernels.test_frames import make_buffer, split

NAMES = ("x-pid", "x-offset", "x-lp", "x-route-version", "x-order-token")
SEED = 5


def delivered(
    items: Sequence[Message],
    first_id: int,
    *,
    places: dict[int, Place] | None = None,
    frame_max: int = 131072,
    counted: bool = False,
    offsets: bool = False,
    failures: int = 0,
) -> list[tuple[Properties, bytes]]:
    """(properties, body) of each message as the client gets it."""
    ear, (channel_codec,) = make_buffer([3])
    ear.buffer.frame_max = frame_max
    deliveries: ConsumerDeliveries = channel_codec.add_consumer(
        None, 1, b"tag", False, counted, offsets
    )
    deliveries.places = places
    sizes = [len(item.body) for item in items]
    block = reference.enqueue(1, 1, [item.record() for item in items], sizes, 0)
    channel_codec.deliver(deliveries, first_id, block, 0, 0, len(items), failures, failures)
    found: list[tuple[Properties, bytes]] = []
    properties, body, size = Properties(), b"", -1
    for frame in split(ear.buffer.take_output()):
        kind, channel, _ = struct.unpack_from(">BHI", frame)
        assert (channel, frame[-1]) == (3, 206)
        assert len(frame) <= frame_max
        if kind == 2:
            header = codec.decode_header(frame[7:-1])
            properties, body, size = header.properties, b"", header.body_size
        elif kind == 3:
            body += frame[7:-1]
        if kind != 1 and len(body) == size:
            found.append((properties, body))
    return found


def expected(item: Message, place: Place, offset: int, failures: int) -> Table:
    kept = [] if item.properties.headers is None else list(item.properties.headers.items())
    kept = [pair for pair in kept if pair[0] not in NAMES]
    if failures:
        kept += [(name, Field("l", failures)) for name in ("x-acquired-count", "x-delivery-count")]
    # A message without a key has no logical partition.
    key = item.routing_key.encode()
    lp = logical_partition(key, 1024, SEED) if key else -1
    numbers = (place.pid, offset, lp, place.version)
    kept += [(name, Field("l", value)) for name, value in zip(NAMES, numbers, strict=False)]
    token = str(OrderToken(place.version, offset)).encode()
    kept.append(("x-order-token", Field("S", token)))
    if place.late:
        kept.append(("x-late", Field("t", True)))
    return Table.from_fields(kept)


@given(
    st.lists(messages, min_size=1, max_size=6),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, 1 << 50),
    st.integers(0, 1 << 20),
    st.sampled_from((4096, 131072)),
    st.booleans(),
    st.integers(0, 2),
)
def test_deliveries_of_a_topic_say_where_they_lie(
    items: list[Message],
    pid: int,
    base: int,
    behind: int,
    frame_max: int,
    old: bool,
    failures: int,
) -> None:
    if old:
        # Messages that came from another topic have the headers of that one.
        fields = [(name, Field("S", b"old")) for name in NAMES]
        table = Table.from_fields([*fields[:2], ("a", Field("l", 1)), *fields[2:]])
        items = [replace(i, properties=structs.replace(i.properties, headers=table)) for i in items]
    place = Place(pid, base, 7, 1024, SEED)
    place.late = bool(behind % 2)
    first_id = (9 << PLACE_BITS) + behind
    found = delivered(
        items, first_id, places={9: place}, frame_max=frame_max, counted=True, failures=failures
    )
    assert len(found) == len(items)
    for k, (item, (properties, body)) in enumerate(zip(items, found, strict=True)):
        assert body == item.body
        table = expected(item, place, base + behind + k, failures)
        assert properties == structs.replace(item.properties, headers=table)


def test_the_header_of_the_order_key_comes_before_the_routing_key() -> None:
    headers = Table.of({"x-order-key": "account-7"})
    message = Message("", "other", Properties(headers=headers), b"b")
    ((properties, _),) = delivered([message], 1 << PLACE_BITS, places={1: Place(0, 1, 0, 64, 0)})
    assert properties.headers is not None
    lp = properties.headers.get("x-lp")
    assert lp == Field("l", logical_partition(b"account-7", 64))


@pytest.mark.parametrize(
    ("counted", "offsets", "failures", "names"),
    [
        (False, False, 0, []),
        (False, False, 2, []),
        (True, False, 0, []),
        (True, False, 2, ["x-acquired-count", "x-delivery-count"]),
        (False, True, 0, ["x-stream-offset"]),
    ],
)
def test_other_consumers_have_no_place(
    counted: bool, offsets: bool, failures: int, names: list[str]
) -> None:
    message = Message("ex", "rk", Properties(content_type="c"), b"body")
    found = delivered([message] * 2, 4, counted=counted, offsets=offsets, failures=failures)
    assert [body for _, body in found] == [b"body"] * 2
    for properties, _ in found:
        assert sorted(properties.headers or {}) == names
        assert properties.content_type == "c"


def test_a_topic_has_logical_partitions() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Place(0, 0, 0, 0, 0)
