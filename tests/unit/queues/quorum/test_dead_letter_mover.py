"""Dead letters are published by the node that leads; the tests answer for fake targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.queues.dead_letter_publisher import IDLE_MS, DeadLetterOptions
from convoymq.queues.interface import PublishOutcome
from convoymq.queues.quorum.client import QuorumClient
from convoymq.queues.quorum.dead_letter_mover import LINE_RUNS_MAX, SETTLE_AGAIN_MS
from convoymq.queues.quorum.queue import QuorumQueue
from tests.unit.messages.test_deaths import record
from tests.unit.queues.dead_letter_targets import FakeQueue, Routes
from tests.unit.queues.quorum.cluster import GROUP, Cluster, Node
from tests.unit.queues.quorum.cluster import spec as consumer

TIMEOUT_MS = 4_000
LEAST = {
    "dead-letter-exchange": "dlx",
    "dead-letter-strategy": "at-least-once",
    "overflow": "reject-publish",
}
MOST = {"dead-letter-exchange": "dlx"}


class MovingNode(Node):
    cluster: MovingCluster

    def make_queue(self, **common: Any) -> Any:
        options = DeadLetterOptions(
            routes=self.cluster.routes,
            prefetch=self.cluster.prefetch,
            confirm_timeout_ms=TIMEOUT_MS,
        )
        return QuorumQueue(dead_letters=options, **common)


class MovingCluster(Cluster):
    """A queue with machine version 2, and targets; a consumer on node 3 takes what is published."""

    node_class = MovingNode

    def __init__(self, settings: dict[str, object], prefetch: int = 4) -> None:
        self.routes = Routes()
        self.prefetch = prefetch
        super().__init__()
        self.targets = [FakeQueue(20, "t0"), FakeQueue(21, "t1")]
        self.routes.queues = self.targets[:1]
        for node in self.nodes.values():
            if node.own is not None:
                node.own.machine.set_version(2)
        self.configure(settings)
        self.client: QuorumClient = self.nodes[3].open()[0]
        self.client.subscribe(consumer(prefetch=1000))
        self.run()
        self.taken = 0

    def configure(self, settings: dict[str, object]) -> None:
        for node in self.nodes.values():
            node.queue.configure(settings)
        self.run()

    def reject(self, *bodies: bytes, keys: Sequence[str] = ("k",)) -> None:
        """Messages that are published in one command and rejected in another, with the keys in
        turn."""
        for i, body in enumerate(bodies):
            data = record(body, "x", keys[i % len(keys)])
            self.client.target.publish([data], len(body), 0, 0)
        self.run()
        self.client.discard(1, [self.taken, self.taken + len(bodies) - 1])
        self.taken += len(bodies)
        self.run()

    def work(self, passes_ms: int = 0) -> None:
        """Timers, and what they bring about."""
        for delay in (passes_ms, 1, 1):
            self.clock.advance(delay)
            self.run()

    def kept(self) -> int:
        counts = {
            node.own.machine.dead_letters.held.messages
            for node in self.nodes.values()
            if node.own is not None
        }
        assert len(counts) == 1, "replicas differ"
        return int(counts.pop())

    def events(self, name: str) -> list[dict[str, Any]]:
        return [fields for _, event, fields in self.notes if event == name]

    def lead(self, node: int) -> None:
        self.elect(node)
        self.run()


def numbered(count: int) -> list[bytes]:
    return [b"m%d" % number for number in range(count)]


def test_at_most_once_is_published_by_the_leader_alone() -> None:
    cluster = MovingCluster(MOST)
    cluster.reject(*numbered(3))
    assert cluster.targets[0].got == [], "nothing is published from within an apply"
    cluster.work()
    assert cluster.targets[0].got == [(0, body) for body in numbered(3)]
    assert len(cluster.targets[0].clients) == 1
    assert cluster.routes.asked == [("/", "dlx", ("k",))], "all go the same way"
    assert cluster.nodes[1].queue.left == {("at_most_once", "rejected"): 3}
    assert not cluster.nodes[2].queue.left
    assert cluster.kept() == 0


@pytest.mark.provokes("queue.dead_letters_lost")
def test_at_most_once_is_lost_without_a_route_or_an_exchange() -> None:
    cluster = MovingCluster(MOST)
    cluster.routes.queues = []
    cluster.reject(b"a")
    cluster.work()
    assert [each["reason"] for each in cluster.events("queue.dead_letters_lost")] == ["no route"]
    cluster.routes.exists = False
    cluster.reject(b"b")
    cluster.work(20_000)
    assert sum(each["count"] for each in cluster.events("queue.dead_letters_lost")) == 2


def test_at_most_once_is_lost_with_the_leader_and_never_published_twice() -> None:
    cluster = MovingCluster(MOST)
    cluster.reject(b"a")
    cluster.lead(2)
    cluster.work()
    assert cluster.targets[0].got == []
    cluster.reject(b"b")
    cluster.work()
    assert cluster.targets[0].bodies() == [b"b"]


@pytest.mark.provokes("queue.dead_letters_unknown")
def test_an_effect_of_an_earlier_term_is_not_carried_out() -> None:
    """The leader before may have published it, so it does not count as lost."""
    cluster = MovingCluster(MOST)
    cluster.nodes[1].queue.leader = None
    cluster.reject(b"a")
    cluster.nodes[1].queue.leader = 1
    cluster.work()
    assert cluster.targets[0].got == []
    assert sum(each["count"] for each in cluster.events("queue.dead_letters_unknown")) == 1
    assert not cluster.events("queue.dead_letters_lost")


def test_at_most_once_waits_for_a_slow_target_within_bounds() -> None:
    cluster = MovingCluster(MOST)
    cluster.reject(b"a")
    cluster.work()
    (client,) = cluster.targets[0].clients
    client.events.on_flow(client, True)
    mover = cluster.nodes[1].queue.mover
    cluster.reject(b"b", b"c")
    cluster.work()
    assert cluster.targets[0].bodies() == [b"a"]
    effect = mover._line[0]
    mover._line.extend([effect] * (LINE_RUNS_MAX - 1))
    cluster.reject(b"d")
    assert [each["reason"] for each in cluster.events("queue.dead_letters_lost")] == [
        "targets are too slow"
    ]
    while len(mover._line) > 1:
        mover._line.pop()
    client.events.on_flow(client, False)
    cluster.work()
    assert cluster.targets[0].bodies() == [b"a", b"b", b"c"]


def test_at_least_once_is_settled_when_all_targets_have_confirmed() -> None:
    cluster = MovingCluster(LEAST)
    cluster.routes.queues = cluster.targets
    cluster.reject(*numbered(6))
    assert cluster.kept() == 6
    cluster.work()
    first, second = (target.clients[0] for target in cluster.targets)
    assert cluster.targets[0].bodies() == numbered(4), "no more than the prefetch"
    first.answer()
    cluster.work()
    assert cluster.kept() == 6
    second.answer()
    cluster.work()
    assert cluster.kept() == 2
    first.answer()
    second.answer()
    cluster.work()
    assert cluster.kept() == 0
    assert cluster.targets[0].bodies() == cluster.targets[1].bodies() == numbered(6)
    assert cluster.nodes[1].queue.moved == 6
    assert cluster.nodes[1].queue.left == {("at_least_once", "rejected"): 6}


def test_a_new_leader_begins_with_what_is_kept() -> None:
    """A duplicate is allowed, a loss is not; what the old one hears later changes nothing."""
    cluster = MovingCluster(LEAST)
    cluster.reject(*numbered(3))
    cluster.work()
    old = cluster.targets[0].clients[0]
    cluster.lead(2)
    assert old.closed
    old.answer()
    cluster.work()
    assert cluster.kept() == 3
    assert cluster.targets[0].bodies() == numbered(3) * 2
    cluster.targets[0].clients[1].answer()
    cluster.work()
    assert cluster.kept() == 0
    cluster.lead(1)
    cluster.work()
    assert len(cluster.targets[0].got) == 6


def test_a_leader_that_restarts_from_a_snapshot_goes_on() -> None:
    """All nodes are killed: a machine that was restored still has what waits."""
    cluster = MovingCluster(LEAST)
    cluster.routes.queues = []
    cluster.reject(*numbered(3))
    cluster.work()
    cluster.install_snapshot(2)
    cluster.routes.queues = cluster.targets[:1]
    cluster.lead(2)
    cluster.work()
    cluster.targets[0].clients[0].answer()
    cluster.work()
    assert cluster.targets[0].bodies() == numbered(3)
    assert cluster.kept() == 0


@pytest.mark.provokes("queue.dead_letters_waiting")
@pytest.mark.parametrize("missing", ["exchange", "route", "open queue"])
def test_what_has_nowhere_to_go_waits_and_is_tried_again(missing: str) -> None:
    cluster = MovingCluster(LEAST)
    cluster.routes.exists = missing != "exchange"
    cluster.routes.usable = missing != "open queue"
    if missing == "route":
        cluster.routes.queues = []
    cluster.reject(b"a")
    cluster.work()
    cluster.work(1000)
    assert cluster.kept() == 1
    assert cluster.events("queue.dead_letters_waiting")
    cluster.routes.exists = cluster.routes.usable = True
    cluster.routes.queues = cluster.targets[:1]
    cluster.work(2000)
    cluster.targets[0].clients[0].answer()
    cluster.work()
    assert cluster.kept() == 0


def test_a_full_target_is_tried_again_alone() -> None:
    cluster = MovingCluster(LEAST)
    cluster.routes.queues = cluster.targets
    cluster.reject(b"a")
    cluster.work()
    cluster.targets[0].clients[0].answer()
    cluster.targets[1].clients[0].answer(False)
    cluster.work()
    assert cluster.kept() == 1
    cluster.work(1000)
    assert len(cluster.targets[0].got) == 1
    assert len(cluster.targets[1].got) == 2
    cluster.targets[1].clients[0].answer()
    cluster.work()
    assert cluster.kept() == 0


def test_at_most_once_is_lost_and_counted_where_a_target_refuses() -> None:
    """One that is known to be full, and one that says so in its answer."""
    cluster = MovingCluster(MOST)
    cluster.routes.queues = cluster.targets
    cluster.targets[0].refuses_publishes = True
    cluster.targets[1].features.answers_by_tags = True
    cluster.reject(b"a", b"b")
    cluster.work()
    assert cluster.targets[0].got == []
    assert cluster.targets[1].bodies() == [b"a", b"b"]
    cluster.targets[1].clients[0].answer(False)
    cluster.work(20_000)
    lost = cluster.events("queue.dead_letters_lost")
    assert {each["reason"] for each in lost} == {"refused by a queue"}
    assert sum(each["count"] for each in lost) == 4


def test_at_least_once_waits_for_a_target_that_refuses_publishers() -> None:
    """It is not sent what no client could publish; the other target gets it once."""
    cluster = MovingCluster(LEAST)
    cluster.routes.queues = cluster.targets
    cluster.targets[0].refuses_publishes = True
    cluster.reject(b"a", b"b")
    cluster.work()
    cluster.targets[1].clients[0].answer()
    cluster.work(5_000)
    assert cluster.targets[0].got == []
    assert len(cluster.targets[1].got) == 2
    assert cluster.kept() == 2
    waiting = cluster.events("queue.dead_letters_waiting")
    assert {each["reason"] for each in waiting} == {"refused by a queue"}
    cluster.targets[0].refuses_publishes = False
    cluster.work(10_000)
    cluster.targets[0].clients[0].answer()
    cluster.work()
    assert cluster.targets[0].bodies() == [b"a", b"b"]
    assert cluster.kept() == 0
    # What a target refused was not published to it.
    names = [target.name for target in cluster.targets]
    assert cluster.routes.counted == {("dlx", names[0]): 2, ("dlx", names[1]): 2}


def test_a_target_that_is_deleted_has_not_taken_anything() -> None:
    """Publishes to a queue that goes are confirmed; the message would be nowhere."""
    cluster = MovingCluster(LEAST)
    cluster.reject(b"a")
    cluster.work()
    gone = cluster.targets[0]
    gone.deleted = True
    cluster.routes.queues = cluster.targets[1:]
    gone.clients[0].answer()
    cluster.work()
    assert cluster.kept() == 1
    cluster.work(1000)
    cluster.targets[1].clients[0].answer()
    cluster.work()
    assert cluster.kept() == 0


def test_a_route_that_vanishes_after_one_confirm_is_not_waited_for() -> None:
    cluster = MovingCluster(LEAST)
    cluster.routes.queues = cluster.targets
    cluster.reject(b"a")
    cluster.work()
    cluster.targets[0].clients[0].answer()
    cluster.routes.queues = []
    cluster.work(TIMEOUT_MS)
    assert cluster.kept() == 0


def test_another_strategy_and_a_purge_end_what_is_under_way() -> None:
    cluster = MovingCluster(LEAST)
    cluster.reject(*numbered(3))
    cluster.work()
    cluster.configure(MOST)
    assert cluster.kept() == 0
    cluster.work()
    cluster.targets[0].clients[0].answer()
    cluster.work()
    cluster.configure(LEAST)
    cluster.reject(b"again")
    cluster.work()
    cluster.targets[0].clients[-1].answer()
    cluster.work()
    assert cluster.kept() == 0
    cluster.reject(b"purged")
    cluster.work()
    cluster.client.purge()
    cluster.run()
    assert cluster.kept() == 0
    cluster.work()
    cluster.targets[0].clients[-1].answer()
    cluster.reject(b"last")
    cluster.work()
    cluster.targets[0].clients[-1].answer()
    cluster.work()
    assert cluster.kept() == 0
    assert cluster.targets[0].bodies() == [*numbered(3), b"again", b"purged", b"last"]


@pytest.mark.provokes("queue.dead_letter_fallback")
def test_the_fallback_is_said_once_and_shown() -> None:
    cluster = MovingCluster({**LEAST, "overflow": "drop-head"})
    (first, *others) = cluster.events("queue.dead_letter_fallback")
    assert "reject-publish" in first["reason"]
    cluster.configure({**LEAST, "overflow": "drop-head", "delivery-limit": 3})
    assert len(cluster.events("queue.dead_letter_fallback")) == 1 + len(others)
    row = cluster.nodes[1].queue.info()
    assert (row["dead_letter_strategy"], row["dead_letter_warning"]) == (
        "at_most_once",
        "at-least-once needs overflow reject-publish",
    )
    cluster.configure(LEAST)
    row = cluster.nodes[1].queue.info()
    assert row["dead_letter_strategy"] == "at_least_once"
    assert "dead_letter_warning" not in row


@pytest.mark.provokes("queue.dead_letter_cycle")
@pytest.mark.parametrize("settings", [MOST, LEAST])
def test_a_message_that_would_go_round_by_itself_is_dropped(settings: dict[str, object]) -> None:
    """The only target is the queue itself, over its delivery limit."""
    cluster = MovingCluster({**settings, "delivery-limit": 0})
    cluster.routes.queues = [FakeQueue(GROUP, "q")]
    cluster.client.target.publish([record(b"a", "x", "k")], 1, 0, 0)
    cluster.run()
    cluster.client.return_(1, [0, 0], failed=True)
    cluster.run()
    cluster.work()
    assert cluster.routes.queues[0].got == []
    assert cluster.events("queue.dead_letter_cycle")
    assert cluster.kept() == 0


def test_a_target_that_is_idle_is_closed_and_one_that_owes_an_answer_is_not() -> None:
    cluster = MovingCluster(LEAST)
    cluster.routes.queues = cluster.targets
    cluster.reject(b"a")
    cluster.work()
    cluster.targets[0].clients[0].answer()
    cluster.work(IDLE_MS)
    assert [target.clients[0].closed for target in cluster.targets] == [True, False]
    cluster.targets[1].clients[0].answer()
    cluster.work(2 * IDLE_MS)
    assert cluster.targets[1].clients[0].closed
    cluster.reject(b"b")
    cluster.work()
    assert len(cluster.targets[1].clients) == 2


def test_a_deleted_queue_publishes_nothing_more() -> None:
    cluster = MovingCluster(LEAST)
    cluster.reject(b"a")
    cluster.work()
    for node in cluster.nodes.values():
        node.queue.on_deleted()
    assert cluster.targets[0].clients[0].closed
    cluster.work(TIMEOUT_MS)
    assert len(cluster.targets[0].got) == 1


def test_a_settle_that_the_leader_drops_is_proposed_again() -> None:
    """As when it is about to hand over, and stays; what is under way is not named."""
    cluster = MovingCluster(LEAST)
    cluster.reject(*numbered(3))
    cluster.work()
    client = cluster.targets[0].clients[0]
    client.pending.pop()
    client.answer()
    cluster.clock.advance(1)
    cluster.nodes[1].builder.discard_unsent()
    cluster.run()
    assert cluster.kept() == 3
    cluster.work(SETTLE_AGAIN_MS)
    assert cluster.kept() == 1
    assert cluster.nodes[1].queue.moved == 2


def test_a_target_that_goes_while_it_is_slow_holds_nobody_up() -> None:
    cluster = MovingCluster(MOST)
    cluster.reject(b"a")
    cluster.work()
    cluster.targets[0].clients[0].events.on_flow(cluster.targets[0].clients[0], True)
    cluster.targets[0].deleted = True
    cluster.routes.queues = cluster.targets[1:]
    cluster.reject(b"b")
    cluster.work()
    assert cluster.targets[1].bodies() == [b"b"]


def test_settles_of_the_leader_name_ranges() -> None:
    cluster = MovingCluster(LEAST)
    cluster.reject(*numbered(3))
    cluster.work()
    cluster.targets[0].clients[0].answer()
    cluster.work()
    (settle,) = [
        command
        for entry in cluster.log
        for command in batch.commands(entry.data)
        if command[0] == batch.CMD_SETTLE and command[2] == 0
    ]
    assert settle[4] == 1, "one range"


def test_a_new_leader_that_misses_later_letters_has_nothing_to_do_for_them() -> None:
    """They were settled before those that are left; the worker waits without looking again."""
    cluster = MovingCluster(LEAST)
    cluster.reject(*numbered(3))
    cluster.work()
    client = cluster.targets[0].clients[0]
    first = client.pending.pop(0)
    client.answer()
    cluster.work()
    assert (cluster.kept(), client.pending) == (1, [])
    assert first
    cluster.lead(2)
    cluster.work()
    cluster.targets[0].clients[1].answer()
    # It is settled, and its SETTLE is under way: until then only the repetition is due.
    mover = cluster.nodes[2].queue.mover
    cluster.clock.advance(1)
    assert mover._worker is not None
    assert (len(mover._worker), mover._worker.next_number) == (0, 3)
    assert mover._timer.due_ms >= cluster.clock.monotonic_ms() + SETTLE_AGAIN_MS - 1
    cluster.work()
    assert cluster.kept() == 0


@pytest.mark.parametrize("settings", [MOST, LEAST])
def test_neighbours_with_one_key_are_routed_together(settings: dict[str, object]) -> None:
    cluster = MovingCluster(settings, prefetch=10)
    cluster.reject(*numbered(4), keys=["a", "a", "a", "b"])
    cluster.work()
    assert cluster.routes.asked == [("/", "dlx", ("a",)), ("/", "dlx", ("b",))]
    cluster.configure({**settings, "dead-letter-routing-key": "own"})
    cluster.reject(*numbered(4), keys=["a", "b"])
    cluster.work()
    assert cluster.routes.asked[2:] == [("/", "dlx", ("own",))]
    assert cluster.targets[0].bodies() == numbered(4) * 2


@pytest.mark.parametrize("settings", [MOST, LEAST])
def test_where_a_route_depends_on_more_than_keys_each_is_routed(
    settings: dict[str, object],
) -> None:
    cluster = MovingCluster(settings, prefetch=10)
    cluster.routes.varies = True
    cluster.reject(*numbered(3))
    cluster.work()
    assert len(cluster.routes.asked) == 3
    assert cluster.targets[0].bodies() == numbered(3)


def test_of_a_run_only_what_was_refused_is_tried_again() -> None:
    cluster = MovingCluster(LEAST, prefetch=10)
    cluster.reject(*numbered(6))
    cluster.work()
    (client,) = cluster.targets[0].clients
    waiting, client.pending = client.pending, []
    client.events.on_published(
        client, [waiting[0], waiting[1], waiting[4], waiting[5]], PublishOutcome.ACCEPTED
    )
    client.events.on_published(client, [waiting[2], waiting[3]], PublishOutcome.REFUSED_UNAVAILABLE)
    cluster.work()
    assert cluster.kept() == 2
    assert sum(each["count"] for each in cluster.events("queue.dead_letters_waiting")) == 2
    cluster.work(1000)
    assert cluster.targets[0].bodies() == [*numbered(6), b"m2", b"m3"]
    client.answer()
    cluster.work()
    assert cluster.kept() == 0
    assert cluster.nodes[1].queue.moved == 6


def test_more_are_under_way_when_the_target_is_fast() -> None:
    """In turns, so that others have theirs."""
    cluster = MovingCluster(LEAST, prefetch=0)
    cluster.reject(*numbered(900))
    cluster.work()
    target = cluster.targets[0]
    under_way = []
    while cluster.kept():
        under_way.append(len(target.clients[0].pending))
        target.clients[0].answer()
        cluster.work()
    assert under_way == [32, 64, 128, 256, 420]
    assert target.bodies() == numbered(900)


def test_what_is_gone_meanwhile_is_not_waited_for() -> None:
    """A SETTLE of an earlier leader is applied when this one has taken the messages already."""
    cluster = MovingCluster(LEAST, prefetch=10)
    cluster.routes.exists = False
    cluster.reject(*numbered(5))
    cluster.work()
    own = cluster.nodes[1].own
    assert own is not None
    own.propose(batch.CMD_SETTLE, 0, 2, 0, batch.pack_ranges([1, 1, 4, 4]))
    cluster.run()
    cluster.routes.exists = True
    cluster.work(1000)
    assert cluster.targets[0].bodies() == [b"m0", b"m2", b"m3"]
    cluster.targets[0].clients[0].answer()
    cluster.work()
    assert cluster.kept() == 0
    worker = cluster.nodes[1].queue.mover._worker
    assert worker is not None
    assert len(worker) == 0
