"""Publishes to a topic while partitions split, merge and move, against a naive model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from convoymq.kernels.batch import PendingBudget
from convoymq.queues.interface import PublishOutcome, QueueClient
from convoymq.topics.rules.changes import (
    Change,
    next_route,
    plan_merge,
    plan_move,
    plan_split,
)
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.routes import Route, Span, first_route
from convoymq.topics.shell.publishes import OrderedPublishes
from tests.unit.kernels.records import record_of
from tests.unit.topics.shell.fake_partitions import FakeClient, FakeClock, FakePartition

LOGICAL = 16
KEYS = [f"key {number}" for number in range(24)]


class Topic:
    """A topic with its partitions, and one channel that publishes to it. The channel's events end
    here."""

    def __init__(self, partitions: int = 2, bytes_max: int = 1 << 20) -> None:
        self.clock = FakeClock()
        self.route = first_route(LOGICAL, partitions)
        self.partitions = {span.pid: FakePartition(span, 0, "open") for span in self.route.spans}
        self.clients: list[FakeClient] = []
        self.absent: set[int] = set()
        """Partitions that are not open on this node yet."""
        self.confirmed: Counter[int] = Counter()
        self.failed: Counter[int] = Counter()
        self.flows: list[bool] = []
        self.deleted = False
        self.ended = 0
        self.published: list[tuple[str, bytes]] = []
        self.budget = PendingBudget(1 << 30)
        self.publishes = OrderedPublishes(
            self.route, 0, self, self.clock, bytes_max=bytes_max, budget=self.budget
        )

    # Outlet

    def open_client(self, pid: int) -> QueueClient | None:
        if pid in self.absent:
            return None
        client = FakeClient(self.partitions[pid], self.publishes)
        self.clients.append(client)
        return client  # type: ignore[return-value]

    def confirm(self, tags: Sequence[int], outcome: PublishOutcome) -> None:
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            (self.confirmed if outcome else self.failed).update(range(first, last + 1))

    def flow(self, blocked: bool) -> None:
        self.flows.append(blocked)

    def is_deleted(self) -> bool:
        return self.deleted

    def finished(self) -> None:
        self.ended += 1

    # what a test does

    def publish(self, key: str, *, tagged: bool = True) -> int:
        """Returns the tag; 0 = none."""
        number = len(self.published) + 1
        record = record_of("orders", key, b"%d" % number)
        self.published.append((key, record))
        self.publishes.target.publish([record], 1, number if tagged else 0)
        return number if tagged else 0

    def busy(self) -> list[FakeClient]:
        return [client for client in self.clients if client.has_commands]

    def begin(self, change: Change) -> None:
        """The targets of a change exist."""
        for span in change.targets:
            self.partitions[span.pid] = FakePartition(span, self.route.version + 1)

    def seal(self, pids: Sequence[int]) -> None:
        for pid in pids:
            self.partitions[pid].state = "sealed"

    def open(self, pids: Sequence[int]) -> None:
        for pid in pids:
            self.partitions[pid].state = "open"

    def change(self, change: Change) -> None:
        """A whole change, but that the publisher hears of it."""
        self.begin(change)
        self.seal(change.sources)
        self.route = next_route(self.route, change)
        self.open([span.pid for span in change.targets])

    def settle(self) -> None:
        """Everything that is under way ends."""
        self.publishes.on_route(self.route)
        for _ in range(200):
            for client in self.busy():
                while client.has_commands:
                    client.apply_next()
            self.clock.advance(100)
        assert not self.busy()

    def key_of(self, pid: int) -> str:
        """Returns a key of a partition."""
        return next(key for key in KEYS if lp_of(key) in self.partitions[pid].span)

    def check(self) -> None:
        """Each message is stored once, in the order of the channel for its key."""
        for key in KEYS:
            expected = [record for each, record in self.published if each == key]
            stored = [
                record
                for _, partition in sorted(
                    self.partitions.items(), key=lambda each: (each[1].version, each[0])
                )
                for each, record in partition.log
                if each == key.encode()
            ]
            assert stored == expected, key
        assert self.publishes.target.pending_bytes == 0
        assert self.budget.bytes == 0


def lp_of(key: str) -> int:
    return logical_partition(key.encode(), LOGICAL)


def split(route: Route, pid: int, next_pid: int) -> Change:
    span = route.span_of(pid)
    return plan_split(route, pid, (span.lo + span.width // 2,), next_pid, f"split {pid}")


# --- examples --------------------------------------------------------------------------------


def test_a_record_goes_at_once_to_the_client_of_its_partition() -> None:
    topic = Topic()
    tags = [topic.publish(key) for key in KEYS]
    assert len(topic.clients) == 2
    assert topic.publishes.target.pending_bytes == 0
    for client in topic.busy():
        client.apply_next()
    assert topic.confirmed == Counter(tags)
    topic.check()


def test_a_pause_lasts_from_confirm_to_confirm_of_a_range() -> None:
    topic = Topic(1)
    key = KEYS[0]
    for _ in range(2):
        topic.publish(key)
        topic.clients[0].target.builder.discard_unsent()
    topic.clock.time_ms = 100
    topic.clients[0].apply_next()
    # The second one is under way when the partition is sealed.
    topic.clock.time_ms = 110
    topic.change(split(topic.route, 0, 1))
    topic.clients[0].apply_next()
    topic.clock.time_ms = 130
    topic.publishes.on_route(topic.route)
    (client,) = topic.busy()
    topic.clock.time_ms = 150
    client.apply_next()
    assert (topic.publishes.pauses, topic.publishes.paused_ms) == (1, 50)
    topic.settle()
    assert topic.publishes.pauses == 1
    topic.check()


def test_a_publisher_with_nothing_under_way_does_not_pause_by_idling() -> None:
    topic = Topic(1)
    topic.publish(KEYS[0])
    topic.clients[0].apply_next()
    topic.clock.time_ms = 60_000
    topic.change(split(topic.route, 0, 1))
    topic.publishes.on_route(topic.route)
    topic.publish(KEYS[0])
    topic.settle()
    assert (topic.publishes.pauses, topic.publishes.paused_ms) == (0, 0)
    # What comes after the seal waits from its refusal on.
    topic.clock.time_ms = 120_000
    pid = next(pid for pid in topic.route.pids if topic.key_of(pid) == KEYS[0])
    topic.change(split(topic.route, pid, 3))
    topic.publish(KEYS[0])
    (client,) = topic.busy()
    client.apply_next()
    topic.clock.time_ms += 30
    topic.publishes.on_route(topic.route)
    (client,) = topic.busy()
    client.apply_next()
    assert (topic.publishes.pauses, topic.publishes.paused_ms) == (1, 30)
    topic.check()


def test_what_is_refused_goes_to_the_targets_before_what_comes_later() -> None:
    topic = Topic()
    key, other = topic.key_of(0), topic.key_of(1)
    first = [topic.publish(key) for _ in range(3)]
    topic.change(split(topic.route, 0, 2))
    topic.clients[0].apply_next()
    later = [topic.publish(key) for _ in range(3)]
    aside = topic.publish(other)
    topic.clients[1].apply_next()
    assert topic.confirmed == Counter([aside]), "another range goes on"
    assert len(topic.clients) == 2, "it waits for the tree"
    topic.publishes.on_route(topic.route)
    assert topic.clients[0].closed
    topic.settle()
    assert topic.confirmed == Counter([*first, aside, *later])
    assert topic.publishes.sent_again == 3
    topic.check()


def test_a_route_that_comes_first_waits_for_what_is_under_way() -> None:
    topic = Topic()
    key = topic.key_of(0)
    stored = topic.publish(key)
    topic.clients[0].target.builder.discard_unsent()
    refused = topic.publish(key)
    topic.publishes.on_route(next_route(topic.route, split(topic.route, 0, 2)))
    waits = topic.publish(key)
    assert len(topic.clients) == 1
    topic.clients[0].apply_next()
    assert topic.confirmed == Counter([stored])
    topic.change(split(topic.route, 0, 2))
    topic.settle()
    assert topic.confirmed == Counter([stored, refused, waits])
    topic.check()


def test_a_partition_that_is_not_open_yet_is_asked_again_by_another_client() -> None:
    topic = Topic()
    key = topic.key_of(0)
    change = split(topic.route, 0, 2)
    topic.change(change)
    target = next(span.pid for span in change.targets if lp_of(key) in span)
    topic.partitions[target].state = "creating"
    topic.publishes.on_route(topic.route)
    tags = [topic.publish(key) for _ in range(2)]
    topic.clients[0].apply_next()
    assert topic.clock.timers
    tags.append(topic.publish(key))
    topic.partitions[target].state = "open"
    assert len(topic.clients) == 1
    topic.clock.advance(2)
    assert len(topic.clients) == 2
    topic.settle()
    assert topic.confirmed == Counter(tags)
    topic.check()


def test_a_partition_that_this_node_has_not_opened_is_looked_for_again() -> None:
    topic = Topic()
    topic.absent = {0}
    tag = topic.publish(topic.key_of(0))
    topic.clock.advance(10)
    assert not topic.clients
    topic.absent.clear()
    topic.settle()
    assert topic.confirmed == Counter([tag])
    topic.check()


def test_publishes_without_tags_are_stored_and_not_confirmed() -> None:
    topic = Topic()
    key = topic.key_of(0)
    topic.publish(key, tagged=False)
    topic.change(split(topic.route, 0, 2))
    tag = topic.publish(key)
    topic.publish(key, tagged=False)
    topic.settle()
    assert topic.confirmed == Counter([tag])
    topic.check()


def test_what_waits_is_bounded_and_stops_the_channel() -> None:
    topic = Topic(bytes_max=1000)
    key = topic.key_of(0)
    topic.publish(key)
    topic.change(split(topic.route, 0, 2))
    topic.clients[0].apply_next()
    while not topic.flows:
        topic.publish(key)
    assert topic.flows == [True]
    assert 1000 < topic.publishes.target.pending_bytes < 1200
    assert topic.budget.bytes == topic.publishes.target.pending_bytes
    topic.settle()
    assert topic.flows == [True, False]
    topic.check()


def test_a_full_client_stops_the_channel_until_it_goes() -> None:
    topic = Topic()
    topic.publish(topic.key_of(0))
    topic.publish(topic.key_of(1))
    for client in topic.clients:
        topic.publishes.on_flow(client, True)  # type: ignore[arg-type]
    topic.publishes.on_flow(topic.clients[1], False)  # type: ignore[arg-type]
    assert topic.flows == [True]
    topic.change(plan_move(topic.route, 0, 2, "move"))
    topic.settle()
    assert topic.flows == [True, False]
    topic.check()


def test_the_budget_of_all_channels_stops_it_and_lets_it_go_on() -> None:
    topic = Topic()
    topic.absent = {0, 1}
    topic.budget.bytes_max = 100
    topic.budget.bytes = 90
    topic.publish(KEYS[0])
    assert topic.flows == [True]
    assert topic.publishes in topic.budget.waiting
    topic.budget.bytes -= 90
    topic.budget.bytes_max = 1000
    for waiting in list(topic.budget.waiting):
        waiting.check_flow()
    assert topic.flows == [True, False]
    assert not topic.budget.waiting


def test_a_closed_channel_ends_when_everything_is_stored() -> None:
    topic = Topic()
    key = topic.key_of(0)
    topic.publish(key)
    topic.change(split(topic.route, 0, 2))
    topic.publish(key, tagged=False)
    topic.clients[0].apply_next()
    topic.publish(key)
    topic.publishes.close()
    assert topic.publishes.has_pending
    assert topic.ended == 0
    topic.settle()
    assert topic.ended == 1
    assert not topic.confirmed
    assert all(client.closed for client in topic.clients)
    topic.check()


def test_an_idle_channel_ends_at_once() -> None:
    topic = Topic()
    topic.publishes.close()
    assert topic.ended == 1


def test_unknown_outcomes_fail_and_are_not_sent_again() -> None:
    topic = Topic()
    key = topic.key_of(0)
    lost = topic.publish(key)
    topic.clients[0].fail_all()
    assert topic.failed == Counter([lost])
    topic.published.clear()
    number = topic.publish(key)
    topic.settle()
    assert topic.confirmed == Counter([number])
    topic.check()


def test_a_deleted_topic_answers_as_a_deleted_queue_does() -> None:
    topic = Topic()
    key = topic.key_of(0)
    tags = [topic.publish(key)]
    topic.change(split(topic.route, 0, 2))
    topic.clients[0].apply_next()
    tags.append(topic.publish(key))
    tags.append(topic.publish(topic.key_of(1)))
    topic.deleted = True
    topic.publishes.end()
    topic.clients[1].fail_all()
    assert topic.confirmed == Counter(tags)
    topic.publishes.close()
    assert topic.ended == 1
    assert topic.budget.bytes == 0


# --- any order of events ---------------------------------------------------------------------


class World(Topic):
    """Random changes; the tree of this node lags behind."""

    def __init__(self, seed: int) -> None:
        super().__init__(partitions=1 + seed % 4)
        self.random = random.Random(seed)
        self.next_pid = len(self.partitions)
        self.running: Change | None = None
        self.unsealed: list[int] = []
        self.unheard: list[Route] = []
        self.tags: list[int] = []

    def step(self) -> None:
        """Something happens."""
        step = self.random.choice(
            [self.some, self.some, self.answer, self.answer, self.hear, self.on, self.on, self.wait]
        )
        step()

    def some(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            tag = self.publish(self.random.choice(KEYS), tagged=self.random.random() < 0.8)
            if tag:
                self.tags.append(tag)
        if self.random.random() < 0.5:
            for client in self.busy():
                client.target.builder.discard_unsent()

    def answer(self) -> None:
        busy = self.busy()
        if busy:
            self.random.choice(busy).apply_next()

    def hear(self) -> None:
        if self.unheard and self.random.random() < 0.5:
            at = self.random.randrange(len(self.unheard))
            self.publishes.on_route(self.unheard[at])
            del self.unheard[: at + 1]

    def wait(self) -> None:
        self.clock.advance(self.random.choice([1, 5, 60]))

    def on(self) -> None:
        """The next step of a change."""
        change = self.running
        if change is None:
            self.running = change = self.plan()
            self.next_pid += len(change.targets)
            self.begin(change)
            self.absent |= {s.pid for s in change.targets if self.random.random() < 0.3}
            self.unsealed = list(change.sources)
        elif self.unsealed:
            self.seal([self.unsealed.pop(self.random.randrange(len(self.unsealed)))])
        elif self.route.version == change.base_version:
            self.route = next_route(self.route, change)
            self.unheard.append(self.route)
        else:
            self.open([span.pid for span in change.targets])
            self.running = None
        self.absent = {pid for pid in self.absent if self.random.random() < 0.7}

    def plan(self) -> Change:
        route, name = self.route, f"change {self.route.version}"
        spans: list[Span] = list(route.spans)
        kind = self.random.randrange(3)
        at = self.random.randrange(len(spans))
        if kind == 0 and spans[at].width > 1:
            cut = self.random.randrange(spans[at].lo + 1, spans[at].hi)
            return plan_split(route, spans[at].pid, (cut,), self.next_pid, name)
        if kind == 1 and at + 1 < len(spans):
            end = self.random.randrange(at + 2, len(spans) + 1)
            pids = tuple(span.pid for span in spans[at:end])
            return plan_merge(route, pids, self.next_pid, name)
        return plan_move(route, spans[at].pid, self.next_pid, name)

    def finish(self) -> None:
        while self.running is not None:
            self.on()
        self.absent.clear()
        self.settle()


@given(seed=st.integers(0, 2**32), steps=st.integers(10, 250), closes=st.booleans())
@example(seed=10626051, steps=182, closes=False)
def test_order_and_outcomes_hold_through_any_changes(
    seed: int, steps: int, *, closes: bool
) -> None:
    world = World(seed)
    for _ in range(steps):
        world.step()
    if closes:
        heard = Counter(world.confirmed)
        world.publishes.close()
        world.finish()
        assert world.confirmed == heard
        assert world.ended == 1
    else:
        world.finish()
        assert world.confirmed == Counter(world.tags)
    assert not world.failed
    world.check()
