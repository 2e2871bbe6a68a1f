"""The frame kernel against naive twins: scanner, acknowledgements, confirms, header injection."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import codec
from convoymq.kernels import batch
from convoymq.kernels import content as content_kernel
from convoymq.kernels.channel_codec import ChannelCodec
from convoymq.kernels.connection_buffer import CONNECTION_OPEN, ConnectionBuffer, Outbox
from convoymq.kernels.route_cache import RouteCacheVersion
from convoymq.model.tables import Table

FRAME_MAX = 4096
BODY_MAX = 20_000
Event = tuple[Any, ...]


# --- a naive scanner -------------------------------------------------------------------------


class Fault(Exception):
    """The peer broke the protocol."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def naive_value(data: bytes, at: int, end: int, depth: int) -> int:
    """Offset behind the field value at `at`."""
    if at >= end:
        raise Fault(502)
    code, at = data[at : at + 1], at + 1
    sizes = {b"tbB": 1, b"su": 2, b"Iif": 4, b"lLdT": 8, b"V": 0, b"D": 5}
    for codes, size in sizes.items():
        if code in [bytes([c]) for c in codes]:
            if at + size > end:
                raise Fault(502)
            return at + size
    if code not in (b"S", b"x", b"F", b"A") or at + 4 > end:
        raise Fault(502)
    stop = at + 4 + int.from_bytes(data[at : at + 4], "big")
    at += 4
    if stop > end or (code in (b"F", b"A") and depth >= 32):
        raise Fault(502)
    if code == b"F":
        naive_table(data, at, stop, depth + 1)
    while code == b"A" and at < stop:
        at = naive_value(data, at, stop, depth + 1)
    return stop


def naive_table(data: bytes, at: int, end: int, depth: int) -> set[bytes]:
    """Keys of the fields in [at, end)."""
    keys = set()
    while at < end:
        stop = at + 1 + data[at]
        if stop > end:
            raise Fault(502)
        keys.add(data[at + 1 : stop])
        at = naive_value(data, stop, end, depth)
    return keys


def naive_header(data: bytes) -> None:
    """Walk the properties of a content header payload."""
    (flags,) = struct.unpack_from(">H", data, 12)
    if flags & 1:
        raise Fault(502)
    at = 14
    for index in range(14):
        if not flags & (0x8000 >> index):
            continue
        if index == 2:
            if at + 4 > len(data):
                raise Fault(502)
            stop = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if stop > len(data):
                raise Fault(502)
            naive_table(data, at + 4, stop, 1)
            at = stop
        elif index in (3, 4):
            at += 1
        elif index == 9:
            at += 8
        else:
            if at >= len(data):
                raise Fault(502)
            at += 1 + data[at]
        if at > len(data):
            raise Fault(502)
    if at != len(data):
        raise Fault(502)


def naive_scan(data: bytes, channels: Sequence[int]) -> list[Event]:
    """What a connection with these open channels has to hear in `data`."""
    events: list[Event] = []
    pending: dict[int, list[Any]] = {}
    at = 0
    try:
        while len(data) - at >= 7:
            kind, channel, size = struct.unpack_from(">BHI", data, at)
            if kind not in (1, 2, 3, 8) or size > FRAME_MAX:
                raise Fault(501)
            if len(data) - at < size + 8:
                break
            payload = data[at + 7 : at + 7 + size]
            if data[at + 7 + size] != 206:
                raise Fault(501)
            at += size + 8
            if kind == 8:
                if channel or size:
                    raise Fault(505 if channel else 501)
            elif channel not in channels:
                if kind != 1:
                    raise Fault(505)
                events.append(("method", channel, payload))
            else:
                naive_frame(kind, channel, payload, pending, events)
    except Fault as fault:
        events.append(("fault", fault.code))
    return events


def naive_frame(
    kind: int, channel: int, payload: bytes, pending: dict[int, list[Any]], events: list[Event]
) -> None:
    """One frame of an open channel. `pending`: [key, bits, header, body] per channel."""
    state = pending.get(channel)
    if kind == 1:
        if state is not None:
            raise Fault(505)
        if len(payload) < 4:
            raise Fault(501)
        method = struct.unpack_from(">HH", payload)
        if method == (60, 40):
            if len(payload) < 9 or 7 + payload[6] >= len(payload):
                raise Fault(501)
            key = 2 + payload[6] + payload[7 + payload[6]]
            if len(payload) != 7 + key:
                raise Fault(501)
            pending[channel] = [payload[6 : 6 + key], payload[6 + key], None, b""]
        elif method in ((60, 80), (60, 90), (60, 120)) and len(payload) == 13:
            (tag,) = struct.unpack_from(">Q", payload, 4)
            if tag or method == (60, 90) or not payload[12] & 1:
                events.append(("unknown", channel, tag, method[1]))
        else:
            events.append(("method", channel, payload))
        return
    if kind == 2:
        if state is None or state[2] is not None:
            raise Fault(505)
        if len(payload) < 14:
            raise Fault(501)
        class_id, _, size = struct.unpack_from(">HHQ", payload)
        if class_id != 60:
            raise Fault(505)
        if size > BODY_MAX:
            events.append(("too big", channel, size))
            del pending[channel]
            return
        state[2] = payload
    else:
        if state is None or state[2] is None:
            raise Fault(505)
        state[3] += payload
    assert state is not None
    header: Any = state[2]
    (size,) = struct.unpack_from(">Q", header, 4)
    if len(state[3]) > size:
        raise Fault(501)
    if len(state[3]) == size:
        del pending[channel]
        naive_header(header)
        events.append(("publish", channel, state[0], state[1], header, state[3]))


# --- the kernel, heard the same way ----------------------------------------------------------


@dataclass
class Ear:
    """Owner of a connection buffer and of its channel codecs; notes what it hears."""

    events: list[Event] = field(default_factory=list)
    buffer: ConnectionBuffer = None  # type: ignore[assignment]

    def on_method(self, channel: int, payload: bytes) -> None:
        self.events.append(("method", channel, payload))

    def on_fault(self, code: int, text: str, channel: int, class_id: int, method_id: int) -> None:
        self.events.append(("fault", code))
        self.buffer.close()

    def on_protocol_header(self, data: bytes) -> None:
        raise AssertionError

    def on_publish_blocked(self) -> None:
        raise AssertionError

    def on_backlog_full(self, channel: int) -> None:
        raise AssertionError

    def on_output(self) -> None:
        pass

    def on_drained(self) -> None:
        pass

    def on_write_blocked(self, error: int) -> None:
        pass


@dataclass
class ChannelEar:
    """Owner of a channel codec."""

    ear: Ear
    number: int
    targets: tuple[batch.PublishTarget, ...] | None = None
    settled: int = 0

    def on_dropped(self) -> None:
        pass

    def resolve_route(self, key: bytes) -> tuple[batch.PublishTarget, ...] | None:
        return self.targets

    def on_publish(
        self, key: bytes, bits: int, content: bytes, body_size: int, flags: int, tag: int
    ) -> None:
        header, body = content_kernel.content_parts(content)
        assert len(body) == body_size
        self.ear.events.append(("publish", self.number, key, bits, header, body))

    def on_too_big(self, size: int) -> None:
        self.ear.events.append(("too big", self.number, size))

    def on_unknown_tag(self, tag: int, method_id: int) -> None:
        self.ear.events.append(("unknown", self.number, tag, method_id))

    def on_settled(self) -> None:
        self.settled += 1


def make_buffer(
    channels: Sequence[int], targets: tuple[batch.PublishTarget, ...] | None = None
) -> tuple[Ear, list[ChannelCodec]]:
    ear = Ear()
    ear.buffer = ConnectionBuffer(ear, Outbox(), -1, FRAME_MAX, BODY_MAX)
    ear.buffer.state = CONNECTION_OPEN
    version = RouteCacheVersion()
    channel_codecs = [
        ear.buffer.open_codec(number, ChannelEar(ear, number, targets), version)
        for number in channels
    ]
    return ear, channel_codecs


def kernel_scan(data: bytes, channels: Sequence[int], cuts: Sequence[int] = ()) -> list[Event]:
    ear, _ = make_buffer(channels)
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        ear.buffer.feed(data[at:cut])
        at = cut
    return ear.events


# --- input -----------------------------------------------------------------------------------

names = st.text(max_size=12)
properties = st.builds(
    spec.Properties,
    content_type=st.none() | names,
    headers=st.none()
    | st.dictionaries(
        st.sampled_from(["a", "CC", "BCC", "long-key", ""]),
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.text(max_size=20)
        | st.lists(st.text(max_size=5), max_size=3)
        | st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
        max_size=4,
    ).map(Table.of),
    delivery_mode=st.none() | st.sampled_from([1, 2]),
    priority=st.none() | st.integers(0, 255),
    reply_to=st.none() | st.sampled_from(["x", "amq.rabbitmq.reply-to"]),
    expiration=st.none() | st.just("100"),
    timestamp=st.none() | st.integers(0, 2**40),
    cluster_id=st.none() | names,
)


@st.composite
def publishes(draw: st.DrawFn, channel: int) -> list[bytes]:
    """Frames of one message."""
    size = draw(st.sampled_from([0, 1, 7, 100, 5000, 20_000, 20_001]))
    body = bytes(index & 255 for index in range(size))
    method = spec.BasicPublish(
        exchange=draw(names), routing_key=draw(names), mandatory=draw(st.booleans())
    )
    data = codec.content_frames(
        channel,
        method,
        draw(properties),
        body,
        frame_bytes_max=draw(st.sampled_from([64, 1000, FRAME_MAX])),
    )
    return split(data)


def split(data: bytes) -> list[bytes]:
    found = []
    at = 0
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at + 3 : at + 7], "big")
        found.append(data[at:end])
        at = end
    return found


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Frames of three channels, shuffled together; each channel keeps its own order."""
    queues: list[list[bytes]] = []
    for channel in (1, 2, 700):
        mine: list[bytes] = []
        for _ in range(draw(st.integers(0, 3))):
            kind = draw(st.sampled_from(["publish", "publish", "ack", "method"]))
            if kind == "publish":
                mine += draw(publishes(channel))
            elif kind == "ack":
                ack = spec.BasicAck(
                    delivery_tag=draw(st.integers(0, 3)), multiple=draw(st.booleans())
                )
                mine.append(codec.method_frame(channel, ack))
            else:
                mine.append(codec.method_frame(channel, spec.QueueDeclare(queue=draw(names))))
        queues.append(mine)
    queues.append([codec.HEARTBEAT] * draw(st.integers(0, 2)))
    queues.append([codec.method_frame(9, spec.ChannelOpen())] * draw(st.integers(0, 1)))
    out = []
    shuffle = random.Random(draw(st.integers(0, 1000)))
    together = draw(st.booleans())
    while any(queues):
        queue = shuffle.choice([q for q in queues if q])
        for _ in range(len(queue) if together else 1):
            out.append(queue.pop(0))
    return b"".join(out)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A stream with a few bytes changed, cut out or added."""
    data = bytearray(draw(streams()))
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        # Damage near frame heads is worth more than damage in bodies.
        at = draw(st.integers(0, min(len(data) - 1, draw(st.sampled_from([40, 200, 100_000])))))
        match draw(st.sampled_from(["flip", "set", "cut", "add", "end"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                data[at] = draw(st.sampled_from([0, 1, 2, 3, 8, 127, 206, 255]))
            case "cut":
                del data[at : at + draw(st.integers(1, 9))]
            case "add":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case _:
                del data[at:]
    return bytes(data)


CHANNELS = (1, 2, 700)


@settings(max_examples=150)
@given(data=streams())
def test_scanner_hears_what_the_naive_one_hears(data: bytes) -> None:
    assert kernel_scan(data, CHANNELS) == naive_scan(data, CHANNELS)


@given(data=streams(), seed=st.integers(0, 10_000))
def test_cuts_between_reads_change_nothing(data: bytes, seed: int) -> None:
    some = random.Random(seed)
    cuts = [some.randrange(len(data) + 1) for _ in range(some.randrange(30))]
    assert kernel_scan(data, CHANNELS, cuts) == naive_scan(data, CHANNELS)


@settings(max_examples=40)
@given(data=streams().filter(lambda data: len(data) < 12_000))
def test_byte_at_a_time_hears_the_same(data: bytes) -> None:
    assert kernel_scan(data, CHANNELS, range(len(data))) == naive_scan(data, CHANNELS)


@settings(max_examples=150)
@example(data=bytes.fromhex("01000200000009003c00280000000000ce0200020100000e"), seed=0)
@given(data=damaged(), seed=st.integers(0, 10_000))
def test_damaged_input_is_parsed_or_a_fault_and_nothing_else(data: bytes, seed: int) -> None:
    expected = naive_scan(data, CHANNELS)
    some = random.Random(seed)
    cuts = [some.randrange(len(data) + 1) for _ in range(10)]
    assert kernel_scan(data, CHANNELS) == expected
    assert kernel_scan(data, CHANNELS, cuts) == expected


@given(data=st.binary(max_size=200))
def test_noise_never_breaks_the_scanner(data: bytes) -> None:
    assert kernel_scan(data, CHANNELS) == naive_scan(data, CHANNELS)


@given(
    bodies=st.lists(st.tuples(st.integers(0, 6000), st.booleans()), max_size=20),
    seed=st.integers(0, 1000),
)
def test_publishes_become_records(bodies: list[tuple[int, bool]], seed: int) -> None:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56, None)
    ear, (channel_codec,) = make_buffer((5,), (target,))
    channel_codec.select_confirms()
    some = random.Random(seed)
    expected = []
    data = b""
    for index, (size, cc) in enumerate(bodies):
        body = some.randbytes(size)
        method = spec.BasicPublish(exchange="x", routing_key=f"key{index % 3}")
        kept = spec.Properties(message_id=str(index), priority=1 if cc else None)
        data += codec.content_frames(5, method, kept, body, frame_bytes_max=2000)
        header = codec.encode_header(codec.ContentHeader(body_size=size, properties=kept))
        expected.append((b"\x01x\x04key%d" % (index % 3), header, body))
    at = 0
    while at < len(data):
        end = at + some.randrange(1, 9000)
        ear.buffer.feed(data[at:end])
        at = end
    assert ear.events == []
    records = []
    entry = builder.take_entry(1, 1, 1, 0)
    for _, _, _, _, count, _, offset, _ in batch.commands(entry.data):
        for i in range(count):
            key, content = content_kernel.split_record(batch.record(entry.data, offset, i))
            records.append((key, *content_kernel.content_parts(content)))
    assert records == expected
    tags = [tag for command in target.applied(target.seq) for tag in command.tags or ()]
    assert tags == ([1, len(bodies)] if bodies else [])


# --- acknowledgements ------------------------------------------------------------------------


class Sink:
    """A queue client that notes what is settled."""

    def __init__(self) -> None:
        self.got: list[tuple[str, int, list[int]]] = []

    def settle(self, consumer: int, ranges: list[int]) -> None:
        self.got.append(("settle", consumer, ranges))

    def discard(self, consumer: int, ranges: list[int]) -> None:
        self.got.append(("discard", consumer, ranges))

    def return_(self, consumer: int, ranges: list[int], *, failed: bool) -> None:
        self.got.append(("failed" if failed else "return", consumer, ranges))


def block_of(count: int) -> tuple[bytes, int]:
    """A command with so many small messages."""
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1, None)
    header = codec.encode_header(codec.ContentHeader(body_size=1, properties=spec.Properties()))
    content = codec.frame(2, 9, header) + codec.frame(3, 9, b"b")
    for _ in range(count):
        target.publish([b"\x01x\x01k", content], 1, 0)
    entry = builder.take_entry(1, 1, 1, 0)
    return entry.data, 48


BLOCK, COMMAND = block_of(50)
KINDS = ("settle", "return", "failed", "discard")

acks = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(0, 2), st.integers(1, 50)),
        st.tuples(st.sampled_from(range(4)), st.integers(0, 80), st.booleans()),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("rollback"), st.integers(0, 80), st.booleans()),
    ),
    max_size=60,
)


@given(steps=acks)
def test_acknowledgements_settle_exactly_what_they_name(steps: list[Any]) -> None:
    ear, (channel_codec,) = make_buffer((1,))
    sink = Sink()
    all_deliveries = [
        channel_codec.add_consumer(sink, number, b"tag%d" % number) for number in range(3)
    ]
    next_ids = [0, 0, 0]
    outstanding: dict[int, tuple[int, int]] = {}  # tag -> (consumer, message id)
    expected: dict[tuple[str, int], list[int]] = {}
    tag = 0
    for name, number, value in steps:
        if name == "deliver":
            channel_codec.deliver(
                all_deliveries[number], next_ids[number], BLOCK, COMMAND, 0, value, 0, 0
            )
            for _ in range(value):
                tag += 1
                outstanding[tag] = (number, next_ids[number])
                next_ids[number] += 1
        elif name == "flush":
            ear.buffer.flush_settles()
        elif name == "rollback":
            taken = channel_codec.take(number, bool(value))
            if taken is not None:
                channel_codec.put_back(taken)
        else:
            known = number in outstanding or (value and number == 0)
            assert channel_codec.acknowledge(name, number, value) == known
            if not known:
                continue
            hit = [t for t in outstanding if t == number or (value and (t < number or not number))]
            for each in sorted(hit):
                consumer, message_id = outstanding.pop(each)
                expected.setdefault((KINDS[name], consumer), []).append(message_id)
        assert channel_codec.unacked == len(outstanding)
        for consumer, deliveries in enumerate(all_deliveries):
            assert deliveries.unacked == sum(1 for c, _ in outstanding.values() if c == consumer)
    ear.buffer.flush_settles()
    got: dict[tuple[str, int], list[int]] = {}
    for kind, consumer, ranges in sink.got:
        flat = [i for a, b in zip(ranges[::2], ranges[1::2], strict=True) for i in range(a, b + 1)]
        assert flat == sorted(set(flat))
        got.setdefault((kind, consumer), []).extend(flat)
    for key, ids in expected.items():
        if key[0] in ("return", "failed"):
            assert got[key] == ids
        else:
            assert sorted(got[key]) == sorted(ids)
    assert got.keys() == expected.keys()


def test_deliveries_of_one_batch_are_one_run() -> None:
    _, (channel_codec,) = make_buffer((1,))
    deliveries = channel_codec.add_consumer(Sink(), 1, b"t")
    for first in range(0, 500, 50):
        channel_codec.deliver(deliveries, first, BLOCK, COMMAND, 0, 50, 0, 0)
    taken = channel_codec.take(0, True)
    assert taken == [(1, 500, deliveries, 0)]


@pytest.mark.parametrize(
    ("command", "first", "count"), [(0, 0, 1), (COMMAND, 49, 2), (COMMAND, -1, 1), (10**6, 0, 1)]
)
def test_deliver_refuses_what_lies_outside_the_block(command: int, first: int, count: int) -> None:
    _, (channel_codec,) = make_buffer((1,))
    deliveries = channel_codec.add_consumer(Sink(), 1, b"t")
    with pytest.raises(ValueError):
        channel_codec.deliver(deliveries, 0, BLOCK, command, first, count, 0, 0)
    assert channel_codec.unacked == 0


@given(at=st.integers(48, len(BLOCK) - 1), value=st.integers(0, 255))
def test_deliver_survives_a_damaged_block(at: int, value: int) -> None:
    ear, (channel_codec,) = make_buffer((1,))
    deliveries = channel_codec.add_consumer(Sink(), 1, b"t")
    block = bytearray(BLOCK)
    block[at] = value
    try:
        channel_codec.deliver(deliveries, 0, bytes(block), COMMAND, 0, 50, 1, 1)
    except ValueError:
        assert ear.buffer.output_bytes == 0
        return
    assert channel_codec.unacked == 50


# --- confirms --------------------------------------------------------------------------------


@given(
    plan=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80),
    seed=st.integers(0, 10_000),
)
def test_every_publish_is_answered_once_and_never_too_early(
    plan: list[tuple[int, bool]], seed: int
) -> None:
    ear, (channel_codec,) = make_buffer((1,))
    channel_codec.select_confirms()
    some = random.Random(seed)
    waiting: list[tuple[int, bool]] = []
    open_answers: dict[int, int] = {}
    outcome: dict[int, bool] = {}
    for count, ok in plan:
        tag = channel_codec.next_confirm()
        channel_codec.expect_confirms(tag, count)
        open_answers[tag] = count
        outcome[tag] = ok or count == 0
        waiting += [(tag, ok if i == 0 else True) for i in range(count)]
    some.shuffle(waiting)
    answered: dict[int, bool] = {}

    def hear() -> None:
        ear.buffer.flush_confirms()
        for frame in split(ear.buffer.take_output()):
            method = codec.decode_method(frame[7:-1])
            assert isinstance(method, spec.BasicAck | spec.BasicNack)
            tags = [method.delivery_tag]
            if method.multiple:
                tags = [t for t in outcome if t <= method.delivery_tag and t not in answered]
            for tag in tags:
                assert tag not in answered
                assert open_answers[tag] == 0
                answered[tag] = isinstance(method, spec.BasicAck)

    for tag, ok in waiting:
        channel_codec.resolve([tag, tag], ok)
        open_answers[tag] -= 1
        if some.random() < 0.3:
            hear()
    hear()
    assert answered == outcome
    channel_codec.resolve([1, len(plan) + 5], True)
    hear()


def test_a_range_of_answers_is_one_frame() -> None:
    ear, (channel_codec,) = make_buffer((1,))
    channel_codec.select_confirms()
    for _ in range(5000):
        channel_codec.next_confirm()
    channel_codec.resolve([1, 4000, 4001, 5000], True)
    ear.buffer.flush_confirms()
    (frame,) = split(ear.buffer.take_output())
    assert codec.decode_method(frame[7:-1]) == spec.BasicAck(delivery_tag=5000, multiple=True)


# --- content headers -------------------------------------------------------------------------


@settings(max_examples=150)
@given(kept=properties, acquired=st.integers(0, 9), delivered=st.integers(0, 9))
def test_counts_are_added_to_the_headers(
    kept: spec.Properties, acquired: int, delivered: int
) -> None:
    header = codec.encode_header(codec.ContentHeader(body_size=3, properties=kept))
    changed = codec.decode_header(content_kernel.with_counts(header, acquired, delivered))
    again = codec.decode_header(
        content_kernel.with_counts(
            content_kernel.with_counts(header, acquired + 1, delivered + 1), acquired, delivered
        )
    )
    assert changed == again
    headers = changed.properties.headers
    assert headers is not None
    shown = dict(headers.items())
    assert ("x-acquired-count" in shown) == bool(acquired)
    if acquired:
        assert (shown["x-acquired-count"].code, shown["x-acquired-count"].value) == ("l", acquired)
    if delivered:
        assert shown["x-delivery-count"].value == delivered
    before = kept.headers.items() if kept.headers is not None else ()
    assert headers.items()[: len(before)] == before
    assert changed.properties.content_type == kept.content_type
    assert changed.properties.cluster_id == kept.cluster_id


def test_idle_buffers_keep_no_buffers_that_matter() -> None:
    ear, _ = make_buffer((1,))
    ear.buffer.feed(codec.method_frame(9, spec.ChannelOpen())[:5])
    assert ear.buffer.input_bytes == 5
    ear.buffer.feed(codec.method_frame(9, spec.ChannelOpen())[5:])
    assert ear.buffer.input_bytes == 0
