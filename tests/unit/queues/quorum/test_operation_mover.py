"""Chosen messages are moved by the node that leads; the tests answer for fake targets, which know
producers as a quorum queue does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from convoymq.model.errors import NotFound, Unavailable
from convoymq.queues.interface import PublishOutcome, QueueFeatures
from convoymq.queues.null_events import NullEvents
from convoymq.queues.quorum import operation_mover
from convoymq.queues.quorum.dead_letter_mover import DeadLetterOptions
from convoymq.queues.quorum.moves import EXCHANGE, FIRST, LAST, ORIGIN, QUEUE, MoveSpec, move_of
from convoymq.queues.quorum.operation_mover import PAUSE_MS
from convoymq.queues.quorum.operations import CANCEL, CLAIM
from convoymq.queues.quorum.queue import QuorumQueue
from tests.unit.messages.test_deaths import dies, record
from tests.unit.queues.quorum.cluster import Cluster, Node

BODIES = [b"m%d" % number for number in range(6)]


class FakeStream:
    """What is published to a fake queue in one session."""

    def __init__(self, queue: FakeQueue, events: Any) -> None:
        self.queue = queue
        self.target = self
        self.events = events
        self.waiting: list[tuple[int, bytes, int, bytes]] = []
        self.closed = False
        self.producer = (0, b"")

    def name_next(self, producer: bytes, sequence: int) -> None:
        self.producer = (sequence, producer)

    def publish(self, parts: Sequence[bytes], body_size: int, tag: int, flags: int) -> None:
        body = b"".join(parts)[-1 - body_size : -1]
        self.waiting.append((*self.producer, tag, body))

    def close(self) -> None:
        self.closed = True

    def arrive(self, count: int = 1000, *, told: bool = True) -> None:
        """The next messages are in the queue, unless it has them; their publisher hears it."""
        now, self.waiting = self.waiting[:count], self.waiting[count:]
        for sequence, producer, _, body in now:
            if sequence > self.queue.last.get(producer, -1):
                self.queue.last[producer] = sequence
                self.queue.got.append(body)
        if told and not self.closed:
            for _, _, tag, _ in now:
                self.events.on_published(self, [tag, tag], PublishOutcome.ACCEPTED)

    def refuse(self) -> None:
        """The session is lost."""
        now, self.waiting = self.waiting, []
        for _, _, tag, _ in now:
            self.events.on_published(self, [tag, tag], PublishOutcome.REFUSED_UNAVAILABLE)


class FakeQueue:
    """A target."""

    def __init__(self, group: int, name: str) -> None:
        self.group = group
        self.name = name
        self.ended = None
        self.deleted = False
        self.refuses_publishes = False
        self.serves_attributes = True
        self.features = QueueFeatures(drops_repeats=True)
        self.last: dict[bytes, int] = {}
        self.got: list[bytes] = []
        self.streams: list[FakeStream] = []

    def client(self, _session: int, events: Any) -> FakeStream:
        self.streams.append(FakeStream(self, events))
        return self.streams[-1]


class Routes:
    """Queues by name."""

    def __init__(self) -> None:
        self.queues = {name: FakeQueue(group, name) for group, name in ((20, "a"), (21, "b"))}
        self.usable = True
        self.asked = 0
        self.counted: Counter[tuple[str, ...]] = Counter()

    def count(self, _vhost: str, exchange: str, queues: Sequence[Any], messages: int) -> None:
        self.counted[exchange, *(queue.name for queue in queues)] += messages

    def route_dead_letter(self, _vhost: str, exchange: str, keys: Sequence[str], *_: Any) -> Any:
        self.asked += 1
        if not self.usable:
            raise Unavailable("not open yet")
        if exchange == "all":
            return tuple(self.queues.values())
        if exchange:
            raise NotFound("no exchange")
        return tuple(self.queues[key] for key in keys if key in self.queues)

    def queue_of_group(self, _vhost: str, name: str, group: int) -> Any:
        if not self.usable:
            raise Unavailable("not open yet")
        found = self.queues.get(name)
        return found if found is not None and found.group == group else None


class MovingNode(Node):
    cluster: MovingCluster

    def make_queue(self, **common: Any) -> Any:
        return QuorumQueue(dead_letters=DeadLetterOptions(routes=self.cluster.routes), **common)


class MovingCluster(Cluster):
    """A queue with six messages, and targets."""

    node_class = MovingNode

    def __init__(self) -> None:
        self.routes = Routes()
        super().__init__()
        for node in self.nodes.values():
            if node.own is not None:
                node.own.machine.set_version(2)
        self.client = self.nodes[3].queue.client(self.nodes[3].new_session(), NullEvents())
        for body in BODIES:
            self.client.target.publish([record(body, "x", "k")], len(body), 0, 0)
        self.run()

    @property
    def machine(self) -> Any:
        own = self.nodes[self.leader or 1].own
        assert own is not None
        return own.machine

    def claim(self, spec: MoveSpec, id: str = "o") -> None:
        runs = self.machine.backlog.in_order()
        ranges = [n for run in runs for n in (run[0], run[1], run[2], run[2] + run[3] - 1)]
        self.ask({"op": CLAIM, "operation": id, "part": 0, "last": True, "ranges": ranges,
                  "spec": spec.pack()})  # fmt: skip

    def ask(self, op: dict[str, Any]) -> None:
        self.client.reservation(msgspec.msgpack.encode(op), lambda _reply, _error: None)
        self.work()

    def work(self, passes_ms: int = 0) -> None:
        """Timers, and what they bring about."""
        self.run()
        for delay in (passes_ms, 1, 1, 1, 1):
            self.clock.advance(delay)
            self.run()

    def counts(self, id: str = "o") -> dict[str, int]:
        summary = self.machine.operations.summary(id)
        return {name: summary[name] for name in ("moved", "returned") if summary[name]}

    def stream(self, name: str = "a") -> FakeStream:
        return self.routes.queues[name].streams[-1]

    def settle(self, *names: str) -> None:
        """Everything arrives, until nothing is under way."""
        for _ in range(8):
            for name in names or ("a",):
                if self.routes.queues[name].streams:
                    self.stream(name).arrive()
            self.work(PAUSE_MS)


TO_A = MoveSpec(to=QUEUE, queue="a")


def test_messages_arrive_in_order_and_leave_when_they_are_confirmed() -> None:
    cluster = MovingCluster()
    cluster.claim(TO_A)
    assert [sequence for sequence, *_ in cluster.stream().waiting] == list(range(6))
    assert cluster.counts() == {}
    cluster.stream().arrive(2)
    cluster.work()
    assert cluster.counts() == {"moved": 2}
    cluster.settle()
    assert cluster.counts() == {"moved": 6}
    assert cluster.routes.queues["a"].got == BODIES
    assert cluster.stream().closed
    assert not cluster.machine.operations.by_id


def test_after_a_refusal_they_go_again_from_the_first_without_a_confirm() -> None:
    cluster = MovingCluster()
    cluster.claim(TO_A)
    first = cluster.stream()
    # Two are known to be there, two more are and nobody heard it, the rest is lost.
    first.arrive(2)
    first.arrive(2, told=False)
    first.refuse()
    cluster.work(PAUSE_MS)
    assert first.closed
    again = cluster.stream()
    assert again is not first
    assert [sequence for sequence, *_ in again.waiting] == [2, 3, 4, 5]
    cluster.settle()
    assert cluster.routes.queues["a"].got == BODIES
    assert cluster.counts() == {"moved": 6}


def test_another_leader_publishes_the_same_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MovingCluster()
    monkeypatch.setattr(operation_mover, "SLICE_MESSAGES", 4)
    cluster.claim(TO_A)
    first = cluster.stream()
    first.arrive(3, told=False)
    asked = cluster.routes.asked
    cluster.elect(2)
    cluster.work(PAUSE_MS)
    again = cluster.stream()
    assert again is not first
    assert again.waiting[0][:2] == (0, again.producer[1])
    # What was routed is not routed again, whatever bindings are now.
    assert cluster.routes.asked <= asked + 6
    again.arrive(1)
    # The former leader's last messages come late.
    first.arrive()
    cluster.settle()
    assert cluster.routes.queues["a"].got == BODIES
    assert cluster.counts() == {"moved": 6}


def test_all_targets_must_have_a_message() -> None:
    cluster = MovingCluster()
    cluster.claim(MoveSpec(to=EXCHANGE, exchange="all"))
    cluster.stream("a").arrive()
    cluster.work()
    assert cluster.counts() == {}
    cluster.settle("a", "b")
    assert cluster.counts() == {"moved": 6}
    assert cluster.routes.queues["a"].got == cluster.routes.queues["b"].got == BODIES
    assert cluster.routes.counted == {("all", "a", "b"): 6}


def test_what_has_no_way_comes_back_in_its_order() -> None:
    cluster = MovingCluster()
    for number, spec in enumerate(
        (
            MoveSpec(to=QUEUE, queue="none"),
            MoveSpec(to=EXCHANGE, exchange="missing", key="k"),
            # They did not die.
            MoveSpec(to=FIRST),
        )
    ):
        cluster.claim(spec, str(number))
        assert cluster.counts(str(number)) == {"returned": 6}
        assert cluster.machine.backlog.ready() == 6


def test_what_was_on_its_way_to_a_queue_that_is_deleted_comes_back() -> None:
    cluster = MovingCluster()
    cluster.claim(TO_A)
    queue = cluster.routes.queues.pop("a")
    queue.streams[-1].arrive(2)
    queue.deleted = True
    # Publishes to a deleted queue are confirmed.
    queue.streams[-1].arrive()
    cluster.work()
    assert cluster.counts() == {"moved": 2, "returned": 4}


def test_a_target_that_cannot_take_messages_now_is_waited_for() -> None:
    cluster = MovingCluster()
    cluster.routes.queues["a"].refuses_publishes = True
    cluster.claim(TO_A)
    mover = cluster.nodes[1].queue.operation_mover
    assert mover.waits_for("o") == "queue 'a' is full"
    cluster.routes.queues["a"].refuses_publishes = False
    cluster.routes.usable = False
    cluster.work(PAUSE_MS)
    assert mover.waits_for("o") == "not open yet"
    cluster.routes.usable = True
    cluster.work(PAUSE_MS)
    assert mover.waits_for("o") == ""
    cluster.settle()
    assert cluster.counts() == {"moved": 6}


def test_what_cannot_be_routed_yet_comes_back_when_the_operation_is_cancelled() -> None:
    cluster = MovingCluster()
    cluster.routes.usable = False
    cluster.claim(TO_A)
    assert cluster.nodes[1].queue.operation_mover.waits_for("o") == "not open yet"
    cluster.ask({"op": CANCEL, "operation": "o"})
    assert cluster.counts() == {"returned": 6}


def test_a_target_that_knows_no_producers_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MovingCluster()
    cluster.routes.queues["a"].features = QueueFeatures()
    monkeypatch.delattr(FakeStream, "name_next")
    cluster.claim(TO_A)
    assert len(cluster.stream().waiting) == 6


def test_a_spec_of_a_newer_release_gives_back() -> None:
    cluster = MovingCluster()
    cluster.claim(MoveSpec(to="mars"))
    assert cluster.counts() == {"returned": 6}


def test_dead_letters_say_where_they_came_from() -> None:
    died = dies(record(b"x", "orders", "red"), "first")[0]
    died = dies(b"".join(died.parts), "second", "expired")[0]
    dead = b"".join(died.parts)
    moves = {to: move_of(dead, MoveSpec(to=to)) for to in (FIRST, LAST, ORIGIN)}
    found = {to: (move.exchange, move.keys, move.parts[0]) for to, move in moves.items() if move}
    came = b"\6orders\3red"
    assert found == {
        FIRST: ("", ("first",), came),
        LAST: ("", ("second",), b"\3dlx\3red"),
        ORIGIN: ("orders", ("red",), came),
    }


def test_an_edited_message_takes_the_place_of_the_other() -> None:
    dead = b"".join(dies(record(b"x", "orders", "red"), "first")[0].parts)
    edited = record(b"better", "y", "z", priority=3, expiration="5")
    move = move_of(dead, MoveSpec(to=FIRST, record=edited))
    assert move is not None
    assert move.keys == ("first",)
    assert move.parts[0] == b"\6orders\3red"
    assert move.parts[1].endswith(b"better\xce")
    assert (move.flags, move.header.body_size) == (6, 6)


def test_what_is_broken_goes_nowhere() -> None:
    assert move_of(b"", TO_A) is None
    assert move_of(record()[:9], TO_A) is None
