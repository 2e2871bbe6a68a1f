"""Sessions that were left behind end: the rule, and brokers that ask each other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from convoymq.metadata.commands import ForgetNode
from convoymq.model.errors import PeerError
from convoymq.queues import session_audit
from convoymq.queues.interface import ConsumerSpec
from convoymq.queues.session_audit import Question, SessionAudit, decode_sessions
from tests.unit.queues.fake_cluster import FakeCluster, until
from tests.unit.queues.quorum.cluster import Events
from tests.unit.queues.quorum.support import session_id

INTERVAL = 1000
A, B, C = session_id(1, 1), session_id(2, 1), session_id(2, 2)


class Bench:
    """An audit, its clock, and what this node leads."""

    def __init__(self, led: dict[int, list[int]]) -> None:
        self.audit = SessionAudit(INTERVAL)
        self.led = led
        self.now = 0
        self.tick(0)

    def tick(self, after_ms: int) -> list[Question]:
        self.now += after_ms
        return self.audit.tick(self.now, lambda: list(self.led), self._sessions)

    def _sessions(self, group: int) -> Iterable[int]:
        return self.led.get(group, ())

    def round(self) -> dict[int, Question]:
        """The questions of a whole round, by node."""
        found: dict[int, Question] = {}
        for question in self.tick(INTERVAL):
            assert question.node not in found
            found[question.node] = question
        return found


def test_a_session_that_its_node_did_not_know_twice_in_succession_is_over() -> None:
    bench = Bench({7: [A, B, C], 8: [B]})
    asked = bench.round()
    assert asked[1].sessions == {7: [A]}
    assert asked[2].sessions == {7: [B, C], 8: [B]}
    assert bench.audit.answered(asked[1], {}) == {}
    assert bench.audit.answered(asked[2], {7: [C], 8: [B]}) == {}
    asked = bench.round()
    assert bench.audit.answered(asked[2], {7: [B, C]}) == {7: [C]}
    asked = bench.round()
    # B was known in group 8 meanwhile, and is found for the second time in group 7.
    assert bench.audit.answered(asked[2], {7: [B], 8: [B]}) == {7: [B]}


def test_rounds_are_an_interval_apart() -> None:
    bench = Bench({7: [A]})
    assert bench.tick(INTERVAL - 1) == []
    assert len(bench.tick(1)) == 1
    assert bench.tick(INTERVAL - 1) == []
    assert len(bench.tick(1)) == 1


def test_a_round_without_an_answer_breaks_the_succession() -> None:
    bench = Bench({7: [A]})
    assert bench.audit.answered(bench.round()[1], {7: [A]}) == {}
    assert 1 in bench.round()
    assert bench.audit.answered(bench.round()[1], {7: [A]}) == {}
    assert bench.audit.answered(bench.round()[1], {7: [A]}) == {7: [A]}


def test_two_answers_to_one_round_are_one_finding() -> None:
    bench = Bench({7: [A]})
    question = bench.round()[1]
    assert bench.audit.answered(question, {7: [A]}) == {}
    assert bench.audit.answered(question, {7: [A]}) == {}


def test_a_group_that_is_led_no_more_is_not_asked_about() -> None:
    bench = Bench({7: [A]})
    bench.audit.answered(bench.round()[1], {7: [A]})
    led, bench.led = bench.led, {}
    assert bench.round() == {}
    bench.led = led
    assert bench.audit.answered(bench.round()[1], {7: [A]}) == {}


def test_a_round_is_spread_over_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_audit, "GROUPS_PER_TICK", 3)
    bench = Bench({group: [A] if group % 2 else [] for group in range(1, 9)})
    seen = [[q.sessions for q in bench.tick(INTERVAL)]]
    seen += [[q.sessions for q in bench.tick(1)] for _ in range(3)]
    assert seen == [[{1: [A], 3: [A]}], [{5: [A]}], [{7: [A]}], []]
    # The next one begins an interval after its end.
    assert bench.tick(INTERVAL - 2) == []
    assert len(bench.tick(1)) == 1


def test_a_tick_looks_at_a_bounded_number_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_audit, "SESSIONS_PER_TICK", 4)
    bench = Bench({group: [session_id(1, group * 10 + i) for i in range(3)] for group in (1, 2, 3)})
    assert [sorted(q.sessions) for q in bench.tick(INTERVAL)] == [[1, 2]]
    assert [sorted(q.sessions) for q in bench.tick(1)] == [[3]]


def test_what_was_found_does_not_pile_up() -> None:
    bench = Bench({7: [A]})
    for number in range(100):
        bench.led[7] = [session_id(1, number)]
        bench.audit.answered(bench.round()[1], {7: bench.led[7]})
    assert len(bench.audit._found) <= 2


@pytest.mark.parametrize("body", [None, 3, [3], [[1]], [[1, 2]], [["a", [1]]], [[1, ["x"]]]])
def test_malformed_lists_are_refused(body: Any) -> None:
    with pytest.raises(PeerError):
        decode_sessions(body)


# ------------------------------------------------------------------- brokers


def consumer(cluster: FakeCluster, node: int, name: str) -> tuple[Any, Events]:
    queue = cluster.nodes[node].broker.queue_admin.find_queue("/", name)
    events = Events()
    client = queue.client(cluster.nodes[node].new_session(), events)
    client.subscribe(ConsumerSpec(number=1, tag="c", prefetch=10, no_ack=False))
    return client, events


def publish(cluster: FakeCluster, node: int, name: str, count: int) -> Any:
    queue = cluster.nodes[node].broker.queue_admin.find_queue("/", name)
    client = queue.client(cluster.nodes[node].new_session(), Events())
    for i in range(count):
        client.target.publish([b"\0\1q", b"h", b"m%d" % i], 2, i + 1)
    return client


def machine_of(cluster: FakeCluster, name: str) -> Any:
    record = cluster.nodes[1].machine.vhosts["/"].queues[name]
    return cluster.groups[record.group].replicas[1].machine


class Recording(SessionAudit):
    """Counts what is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = 0

    def tick(self, *arguments: Any) -> list[Question]:
        questions = super().tick(*arguments)
        self.open += len(questions)
        return questions

    def answered(self, question: Question, unknown: Any) -> dict[int, list[int]]:
        self.open -= 1
        return super().answered(question, unknown)


async def rounds(cluster: FakeCluster, node: int, count: int) -> None:
    """The node asks `count` times, as after so many intervals, and gets all answers."""
    watch = cluster.nodes[node].broker.local.watch
    assert watch is not None
    if not isinstance(watch.audit, Recording):
        watch.audit = Recording()
    audit = watch.audit
    for _ in range(count):
        audit._due_ms = 0
        watch.tick()
        assert not audit._left
        await until(lambda: not audit.open)


async def test_a_session_that_a_node_lost_ends_and_its_messages_go_to_another(
    tmp_path: Path,
) -> None:
    async with FakeCluster(tmp_path, nodes=3) as cluster:
        await cluster.queue(1, "q", arguments={"x-queue-type": "quorum"})
        lost, heard = consumer(cluster, 2, "q")
        publish(cluster, 1, "q", 3)
        await until(lambda: len(heard.messages) == 3)
        machine = machine_of(cluster, "q")
        # Its SESSION_CLOSE was never sent.
        lost.queue.forget(lost)
        _other, got = consumer(cluster, 3, "q")
        await until(lambda: machine.consumers.count == 2)
        before = set(machine.sessions)
        await rounds(cluster, 1, 1)
        assert set(machine.sessions) == before
        await rounds(cluster, 1, 1)
        await until(lambda: len(got.messages) == 3)
        assert set(machine.sessions) == before - {lost.session}
        await rounds(cluster, 1, 2)
        assert set(machine.sessions) == before - {lost.session}


async def test_a_session_of_the_leader_s_own_node_ends_too(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path, nodes=1) as cluster:
        await cluster.queue(1, "s", arguments={"x-queue-type": "stream"})
        client = publish(cluster, 1, "s", 1)
        machine = machine_of(cluster, "s")
        await until(lambda: list(machine.sessions) == [client.session])
        await rounds(cluster, 1, 3)
        assert list(machine.sessions) == [client.session]
        client.queue.forget(client)
        await rounds(cluster, 1, 2)
        await until(lambda: machine.sessions == {})


@pytest.mark.provokes("queue.session_ended")
async def test_sessions_of_a_forgotten_node_end_at_once(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path, nodes=3) as cluster:
        # Node 3 has no replica of it.
        arguments = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 1}
        await cluster.queue(1, "q", arguments=arguments)
        lost, heard = consumer(cluster, 3, "q")
        publish(cluster, 1, "q", 3)
        await until(lambda: len(heard.messages) == 3)
        machine = machine_of(cluster, "q")
        _other, got = consumer(cluster, 2, "q")
        await until(lambda: machine.consumers.count == 2)
        cluster.down.add(3)
        await cluster.nodes[1].store.execute(ForgetNode(id=3))
        await until(lambda: len(got.messages) == 3)
        assert lost.session not in machine.sessions
        assert 3 not in machine.down_nodes


async def test_who_leads_later_ends_the_sessions_of_a_forgotten_node(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path, nodes=3) as cluster:
        await cluster.queue(1, "q", arguments={"x-queue-type": "quorum"})
        lost, heard = consumer(cluster, 3, "q")
        publish(cluster, 1, "q", 1)
        await until(lambda: len(heard.messages) == 1)
        machine = machine_of(cluster, "q")
        cluster.down.add(3)
        # Nobody proposes anything about it: it is as if another node led until now.
        watch, cluster.nodes[1].broker.local.watch = cluster.nodes[1].broker.local.watch, None
        await cluster.nodes[1].store.execute(ForgetNode(id=3))
        assert lost.session in machine.sessions
        queue = cluster.nodes[1].broker.queue_admin.find_queue("/", "q")
        queue.on_leader(queue.group, 1, 2)
        await until(lambda: lost.session not in machine.sessions)
        cluster.nodes[1].broker.local.watch = watch
