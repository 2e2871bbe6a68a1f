"""Dead letters of classic queues: what leaves, where it goes, what waits for its targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.kernels.batch import (
    CMD_CHECKOUT,
    CMD_DISCARD,
    CMD_PURGE,
    CMD_SETTLE,
    CommandBuilder,
    PublishTarget,
    pack_ranges,
)
from convoymq.kernels.content import content_parts, split_record
from convoymq.messages.amqp091 import decode_header
from convoymq.queues.classic import leaving as leaving_module
from convoymq.queues.classic.dead_letter_sender import SLICE_MESSAGES
from convoymq.queues.classic.machine import DELIVER, ClassicMachine, Limits
from tests.unit.queues.classic.support import Node, Time, body_of, message, queue_record, settle
from tests.unit.queues.dead_letter_targets import FakeQueue

DLX: dict[str, Any] = {"dead-letter-exchange": "dlx"}


@pytest.fixture
def node(tmp_path: Path, time: Time) -> Iterator[Node]:
    made = Node(1, {}, tmp_path, time)
    made.routes.queues = [FakeQueue(20, "dead")]
    yield made
    made.host.stop()


def run(node: Node, time: Time) -> None:
    """Until nothing is left to do now."""
    settle(node.nodes)
    while any(due <= time.ms for due, _, _ in time.calls):
        time.pass_by(0)
        settle(node.nodes)
    for queue in node.host.queues.values():
        queue.machine.check_invariants()  # type: ignore[attr-defined]


def target(node: Node) -> FakeQueue:
    found: FakeQueue = node.routes.queues[0]
    return found


def lost(node: Node) -> list[tuple[int, str]]:
    return [
        (fields["count"], fields["reason"])
        for event, fields in node.notes
        if event == "queue.dead_letters_lost"
    ]


def opened(node: Node, *, durable: bool = True, **settings: Any) -> Any:
    queue = node.open(queue_record(durable=durable))
    queue.configure({key.replace("_", "-"): value for key, value in settings.items()})
    return queue


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_rejected_is_published_and_gone(
    node: Node, time: Time, tmp_path: Path, durable: bool
) -> None:
    queue = opened(node, durable=durable, **DLX)
    channel = node.channel(queue)
    channel.consume()
    channel.publish(b"a", b"b", b"c", b"d")
    run(node, time)
    channel.client.discard(1, [1, 2])
    channel.client.settle(1, [0, 0])
    run(node, time)
    assert target(node).bodies() == [b"b", b"c"]
    assert node.routes.asked[0] == ("/", "dlx", ("q",))
    assert queue.left() == {("at_most_once", "rejected"): 2}
    info = queue.info()
    assert (info["messages"], info["messages_dlx"], info["dead_letter_strategy"]) == (
        1,
        0,
        "at_most_once",
    )
    assert info["message_stats"]["ack"] == 1
    if durable:
        node.host.stop()
        again = Node(1, {}, tmp_path, time)
        assert again.open(queue_record(durable=True)).machine.ready_count == 1
        again.host.stop()


def test_headers_are_those_of_every_dead_letter(node: Node, time: Time) -> None:
    channel = node.channel(opened(node, **DLX, message_ttl=5_000, dead_letter_routing_key="k"))
    published: list[Any] = []
    target(node).client = lambda _session, events: Recorder(published)  # type: ignore
    channel.publish(b"a", expiration="20")
    run(node, time)
    time.pass_by(20)
    run(node, time)
    names, content = published[0]
    assert names == b"\x03dlx\x01k"
    properties = decode_header(content_parts(content)[0]).properties
    death = properties.headers.get("x-death").value[0].value  # type: ignore
    assert {name: death.get(name).value for name in ("queue", "reason", "count")} == {
        "queue": b"q",
        "reason": b"expired",
        "count": 1,
    }
    assert death.get("original-expiration").value == b"20"
    assert properties.expiration is None


class Recorder:
    """A target's client that keeps what it gets."""

    def __init__(self, published: list[Any]) -> None:
        self.target = self
        self.queue = self
        self.ended = None
        self.pending = False
        self._published = published

    def publish(self, parts: Any, _body_size: int, _tag: int, _flags: int) -> None:
        self._published.append(parts)

    def publish_records(self, command: bytes, count: int, _tag: int) -> None:
        self._published += [split_record(batch.record(command, 0, i)) for i in range(count)]

    def close(self) -> None:
        self.pending = False


def test_what_expires_leaves_in_time_and_in_order(node: Node, time: Time) -> None:
    queue = opened(node, **DLX, message_ttl=300)
    channel = node.channel(queue)
    channel.publish(b"a", b"b")
    run(node, time)
    time.pass_by(200)
    channel.publish(b"c")
    channel.publish(b"d", expiration="50")
    run(node, time)
    time.pass_by(99)
    run(node, time)
    assert target(node).bodies() == []
    time.pass_by(1)
    run(node, time)
    assert target(node).bodies() == [b"a", b"b"], "d stands behind c"
    time.pass_by(200)
    run(node, time)
    assert target(node).bodies() == [b"a", b"b", b"c", b"d"]
    assert queue.left() == {("at_most_once", "expired"): 4}


def test_what_is_too_much_leaves_from_the_head(node: Node, time: Time) -> None:
    queue = opened(node, **DLX, max_length=2)
    channel = node.channel(queue)
    channel.publish(b"a", b"b", b"c", b"d", b"e", tag=1)
    run(node, time)
    assert ("published", [1, 5], True) in channel.heard
    assert target(node).bodies() == [b"a", b"b", b"c"]
    queue.configure({**DLX, "max-length": 1})
    run(node, time)
    assert target(node).bodies() == [b"a", b"b", b"c", b"d"]
    assert queue.left() == {("at_most_once", "maxlen"): 4}


def test_refused_publishes_are_dead_letters_where_that_is_asked_for(
    node: Node, time: Time, tmp_path: Path
) -> None:
    queue = opened(node, **DLX, max_length=1, overflow="reject-publish-dlx")
    channel = node.channel(queue)
    channel.publish(b"a", tag=1)
    run(node, time)
    channel.publish(b"b", b"c", tag=2)
    run(node, time)
    assert ("published", [2, 3], False) in channel.heard
    assert target(node).bodies() == [b"b", b"c"]
    assert queue.left() == {("at_most_once", "maxlen"): 2}
    queue.configure({"max-length": 1, "overflow": "reject-publish-dlx"})
    channel.publish(b"d", tag=4)
    run(node, time)
    assert ("published", [4, 4], False) in channel.heard
    assert target(node).bodies() == [b"b", b"c"], "there is no exchange any more"
    node.host.stop()
    again = Node(1, {}, tmp_path, time)
    assert again.open(queue_record(durable=True)).machine.ready_count == 1
    again.host.stop()


def test_a_policy_switches_dead_letters_of_a_running_queue(node: Node, time: Time) -> None:
    queue = opened(node)
    channel = node.channel(queue)
    channel.consume()
    channel.publish(b"a", b"b", b"c")
    run(node, time)
    channel.client.discard(1, [0, 0])
    run(node, time)
    assert queue.left() == {("disabled", "rejected"): 1}
    queue.configure(DLX)
    channel.client.discard(1, [1, 1])
    run(node, time)
    queue.configure({})
    channel.client.discard(1, [2, 2])
    run(node, time)
    assert target(node).bodies() == [b"b"]
    assert queue.left() == {("disabled", "rejected"): 2, ("at_most_once", "rejected"): 1}


def test_without_an_exchange_or_a_route_they_are_lost_and_that_is_said(
    node: Node, time: Time
) -> None:
    channel = node.channel(opened(node, **DLX, max_length=0))
    node.routes.exists = False
    channel.publish(b"a")
    run(node, time)
    node.routes.exists, node.routes.queues = True, []
    channel.publish(b"b")
    run(node, time)
    assert lost(node) == [(1, "no exchange 'dlx'"), (1, "no route")]


def test_a_cycle_ends(node: Node, time: Time) -> None:
    """The only target is the queue in which the message has just died of length."""
    queue = opened(node, **DLX, max_length=0)
    node.routes.queues = [queue]
    channel = node.channel(queue)
    channel.publish(b"a")
    run(node, time)
    assert [event for event, _ in node.notes] == ["queue.dead_letter_cycle"]
    assert queue.left() == {("at_most_once", "maxlen"): 1}
    assert queue.info()["messages"] == 0


def test_a_blocked_target_is_waited_for_and_then_gets_all_in_order(node: Node, time: Time) -> None:
    queue = opened(node, **DLX, max_length=0)
    channel = node.channel(queue)
    channel.publish(b"first")
    run(node, time)
    client = target(node).clients[0]
    client.events.on_flow(client, True)
    bodies = [b"%d" % number for number in range(2 * SLICE_MESSAGES + 1)]
    channel.publish(*bodies)
    run(node, time)
    assert queue.info()["messages_dlx"] == len(bodies)
    assert queue.info()["messages"] == 0
    queue.configure({"max-length": 0})
    run(node, time)
    client.events.on_flow(client, False)
    run(node, time)
    assert target(node).bodies() == [b"first", *bodies], "what was leaving has kept its exchange"
    assert queue.info()["messages_dlx"] == queue.info()["message_bytes_dlx"] == 0
    assert not lost(node)


def test_what_has_not_been_published_is_in_the_queue_after_a_restart(
    node: Node, time: Time, tmp_path: Path
) -> None:
    queue = opened(node, **DLX)
    channel = node.channel(queue)
    channel.consume()
    channel.publish(b"a", b"b", b"c")
    run(node, time)
    channel.client.discard(1, [0, 0])
    run(node, time)
    client = target(node).clients[0]
    client.events.on_flow(client, True)
    channel.client.discard(1, [1, 1])
    run(node, time)
    node.host.stop()
    again = Node(1, {}, tmp_path, time)
    reader = again.channel(again.open(queue_record(durable=True)))
    reader.consume()
    settle(again.nodes)
    assert reader.deliveries() == [b"b", b"c"]
    again.host.stop()


def test_bodies_that_are_on_disk_are_read_when_their_turn_comes(
    node: Node, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.host.memory, "target_bytes", 4_000)
    queue = opened(node, **DLX)
    channel = node.channel(queue)
    bodies = [b"%03d" % number + bytes(500) for number in range(40)]
    for body in bodies:
        channel.publish(body)
        settle(node.nodes)
    assert queue.machine.backing.memory_bytes < 8_000
    queue.configure({**DLX, "max-length": 0})
    assert queue.machine.backing.memory_bytes < 8_000
    run(node, time)
    assert target(node).bodies() == bodies


def test_too_much_behind_a_blocked_target_is_lost(
    node: Node, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving_module, "RUNS_MAX", 3)
    queue = opened(node, **DLX, max_length=0)
    channel = node.channel(queue)
    channel.publish(b"a")
    run(node, time)
    client = target(node).clients[0]
    client.events.on_flow(client, True)
    for number in range(5):
        channel.publish(b"%d" % number)
        run(node, time)
    time.pass_by(10_000)
    run(node, time)
    assert lost(node) == [(1, "targets are too slow"), (1, "targets are too slow")]
    client.events.on_flow(client, False)
    run(node, time)
    assert target(node).bodies() == [b"a", b"0", b"1", b"2"]


def test_a_deleted_queue_says_what_it_takes_along(node: Node, time: Time) -> None:
    queue = opened(node, **DLX, max_length=0)
    channel = node.channel(queue)
    channel.publish(b"a")
    run(node, time)
    client = target(node).clients[0]
    client.events.on_flow(client, True)
    channel.publish(b"b")
    settle(node.nodes)
    node.host.delete(queue.group)
    assert lost(node) == [(1, "the queue was deleted")]
    assert client.closed
    assert node.host.dead_lettered() == Counter({("at_most_once", "maxlen"): 2})
    time.pass_by(1_000)
    assert target(node).bodies() == [b"a"]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 4)),
        st.tuples(st.just("settle"), st.integers(1, 5)),
        st.tuples(st.just("reject"), st.integers(1, 5)),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("time"), st.integers(1, 30)),
        st.tuples(st.just("purge"), st.just(0)),
    ),
    max_size=40,
)


@given(steps=STEPS, length=st.integers(0, 6), ttl=st.integers(10, 60), prefetch=st.integers(1, 5))
def test_every_message_leaves_once_as_in_a_naive_model(
    steps: list[tuple[str, int]], length: int, ttl: int, prefetch: int
) -> None:
    """One consumer; the model keeps lists of (body, due)."""

    def load(_block: object) -> tuple[bytes, int]:
        raise AssertionError("nothing was taken out of memory")

    limits = Limits(length_max=length, message_ttl_ms=ttl, dead_letters=True)
    machine = ClassicMachine(limits, load)
    builder = CommandBuilder()
    client = PublishTarget(builder, 1 << 56 | 1, None)
    body = b"\x81\xa8prefetch" + bytes([prefetch])
    client.command(CMD_CHECKOUT, 0, len(body), 1, body)
    now, number, next_id = 1_000, 0, 0
    ready: list[tuple[bytes, int]] = []
    held: list[tuple[int, bytes]] = []
    wanted: list[tuple[bytes, str]] = []
    found: list[tuple[bytes, str]] = []
    delivered: list[bytes] = []
    delivered_wanted: list[bytes] = []

    def serve() -> None:
        nonlocal next_id
        while ready and len(held) < prefetch and ready[0][1] >= now:
            name = ready.pop(0)[0]
            held.append((next_id, name))
            next_id += 1
            delivered_wanted.append(name)
        while ready and ready[0][1] <= now:
            wanted.append((ready.pop(0)[0], "expired"))
        while len(ready) > length:
            wanted.append((ready.pop(0)[0], "maxlen"))

    for step, count in [*steps, ("take", 1_000)]:
        if step == "publish":
            for _ in range(count):
                name = b"%d" % number
                number += 1
                client.publish([message(name)], len(name), 0, 0)
                ready.append((name, now + ttl))
        elif step == "time":
            now += count
            machine.tick(now)
        elif step == "purge":
            client.command(CMD_PURGE, 0, 0, 0)
            serve()
            ready.clear()
        elif step in ("settle", "reject") and held:
            gone, held[:] = held[:count], held[count:]
            kind = CMD_SETTLE if step == "settle" else CMD_DISCARD
            client.command(kind, 0, 1, 1, pack_ranges([gone[0][0], gone[-1][0]]))
            if step == "reject":
                wanted += [(name, "rejected") for _, name in gone]
        if builder.used:
            machine.apply(builder.take_forward(1, 0), now)
        serve()
        for effect in machine.effects:
            if effect[0] == DELIVER:
                _, _, _, _, (data, command), first, records, _ = effect
                delivered += [body_of(data, command, first + i) for i in range(records)]
        machine.effects = []
        machine.check_invariants()
        assert machine.leaving.count == len(wanted) - len(found)
        while step == "take" and machine.leaving.runs and count:
            run_, reason = machine.leaving.take(count)
            data, command = machine.body_of(run_.block)
            names = [body_of(data, command, run_.first + i) for i in range(run_.count)]
            found += [(name, reason) for name in names]
            count -= run_.count
            machine.forget(run_)
    assert found == wanted
    assert delivered == delivered_wanted
    assert machine.ready_count == len(ready)
    assert machine.leaving.left.total() == len(wanted)
