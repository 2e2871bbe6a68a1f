"""A session opens once: on the machines of quorum queues and streams, whatever arrives how late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.sessions import PASSED_OVER_MAX, Openings
from convoymq.queues.stream.machine import StreamMachine
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_GAP
from tests.unit.queues.quorum.cluster import Cluster, publish, spec
from tests.unit.queues.quorum.support import Log, apply, session_id
from tests.unit.queues.stream.cluster import StreamCluster, reading, start

A = session_id(1, 1)
MACHINES = [QuorumMachine, StreamMachine]


class Script:
    """The commands of one session, as bytes that may arrive in any order."""

    def __init__(self, session: int, number: int, publishes: int = 1) -> None:
        self.session = session
        self.number = number
        builder = batch.CommandBuilder()
        target = batch.PublishTarget(builder, session, None)
        target.command(batch.CMD_SESSION_OPEN, 0, number & 0xFFFFFFFF, number >> 32)
        for _ in range(publishes):
            target.publish([b"\0\1q", b"h", b"body"], 4, 0)
            target.command(batch.CMD_SETTLE, 0, 0, 0)
        target.command(batch.CMD_SESSION_CLOSE, 0, number & 0xFFFFFFFF, number >> 32)
        self.data = builder.take_forward(7, 1)
        self.parts = [
            (at, at + length) for _, _, _, _, _, _, at, length in batch.commands(self.data)
        ]

    def send(self, log: Log, first: int = 0, last: int = -1) -> None:
        """Commands first … last arrive."""
        parts = self.parts[first : last + 1 or None]
        log.builder.adopt(self.data, parts[0][0], parts[-1][1])


def step(machine: Any, log: Log) -> list[Any]:
    effects = apply(machine, log.seal())
    if isinstance(machine, QuorumMachine):
        check_invariants(machine)
    else:
        machine.check_invariants()
    return effects


@pytest.mark.parametrize("kind", MACHINES)
def test_a_late_copy_of_a_session_enqueues_nothing_after_300_others(
    kind: Callable[[], Any],
) -> None:
    machine, log = kind(), Log()
    early = Script(A, 1)
    early.send(log)
    for number in range(2, 302):
        Script(session_id(1, number), number).send(log)
    step(machine, log)
    assert (machine.totals()["published"], machine.sessions) == (301, {})
    early.send(log, 0, 1)
    assert step(machine, log) == [(EFFECT_GAP, A, 0)]
    assert (machine.totals()["published"], machine.sessions) == (301, {})


@pytest.mark.parametrize("kind", MACHINES)
def test_a_session_begins_with_open_alone(kind: Callable[[], Any]) -> None:
    machine, log = kind(), Log()
    target = batch.PublishTarget(log.builder, A, None)
    target.publish([b"\0\1q", b"h", b"body"], 4, 0)
    assert step(machine, log) == [(EFFECT_GAP, A, 0)]
    assert (machine.totals()["published"], machine.sessions) == (0, {})


@pytest.mark.parametrize("kind", MACHINES)
def test_close_is_answered_when_the_session_ended_and_not_before_it_opened(
    kind: Callable[[], Any],
) -> None:
    machine, log = kind(), Log()
    script = Script(A, 1)
    close = len(script.parts) - 1
    script.send(log, close, close)
    # What came before it may be on its way: the client would take the answer for theirs too.
    assert step(machine, log) == [(EFFECT_GAP, A, 0)]
    script.send(log)
    step(machine, log)
    assert machine.totals()["published"] == 1
    script.send(log, close, close)
    assert step(machine, log) == [(EFFECT_APPLIED, A, close + 1, 0, None)]
    # One that can never open any more.
    log.node_up(1, 2)
    Script(session_id(1, 5), 5).send(log, close, close)
    assert step(machine, log) == [(EFFECT_APPLIED, session_id(1, 5), close + 1, 0, None)]


@pytest.mark.parametrize("kind", MACHINES)
def test_an_older_incarnation_opens_nothing(kind: Callable[[], Any]) -> None:
    machine, log = kind(), Log()
    Script(session_id(1, 1, incarnation=3), 1).send(log, 0, 1)
    step(machine, log)
    old = Script(session_id(1, 1, incarnation=2), 1)
    old.send(log, 0, 1)
    assert step(machine, log) == [(EFFECT_GAP, old.session, 0)]
    log.node_up(1, 4)
    Script(session_id(1, 2, incarnation=3), 2).send(log, 0, 1)
    step(machine, log)
    assert (machine.totals()["published"], machine.sessions) == (1, {})
    Script(session_id(1, 1, incarnation=4), 1).send(log, 0, 1)
    step(machine, log)
    assert machine.totals()["published"] == 2


@pytest.mark.parametrize("kind", MACHINES)
def test_a_node_that_was_given_up_opens_none_of_its_sessions_again(
    kind: Callable[[], Any],
) -> None:
    machine, log = kind(), Log()
    script = Script(A, 1)
    script.send(log, 0, 1)
    log.node_down(1, gone=True)
    script.send(log, 0, 1)
    step(machine, log)
    assert (machine.totals()["published"], machine.sessions) == (1, {})
    Script(session_id(1, 2), 2).send(log, 0, 1)
    step(machine, log)
    assert machine.totals()["published"] == 2


@pytest.mark.parametrize("kind", MACHINES)
def test_numbers_of_64_bits(kind: Callable[[], Any]) -> None:
    machine, log = kind(), Log()
    large = Script(A, (1 << 40) + 3)
    large.send(log)
    large.send(log, 0, 1)
    step(machine, log)
    assert machine.totals()["published"] == 1
    assert machine.openings[1].highest == (1 << 40) + 3


def test_what_is_passed_over_may_still_come_within_the_bound() -> None:
    row = Openings(1)
    for number in range(2, 2 * PASSED_OVER_MAX + 4, 2):
        assert row.take(number)
    assert len(row.passed_over) == PASSED_OVER_MAX
    assert not row.take(1), "the lowest range went"
    assert row.take(3)
    assert not row.take(3)
    assert row.take(10**6)
    assert row.take(5 * 10**5)
    assert not row.take(5 * 10**5)
    assert row.take(5 * 10**5 - 1)
    assert len(row.passed_over) == PASSED_OVER_MAX
    assert not row.take(0)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 40), max_size=120))
def test_every_number_is_taken_once(numbers: list[int]) -> None:
    row, taken = Openings(1), {0}
    for number in numbers:
        assert row.may_take(number) == (number not in taken)
        assert row.take(number) == (number not in taken)
        taken.add(number)
    missing = {n for first, last in row.passed_over for n in range(first, last + 1)}
    assert missing == set(range(row.highest)) - taken


class Model:
    """Every opening number opens at most one session; commands in order, each once."""

    def __init__(self) -> None:
        self.opened: set[tuple[int, int, int]] = set()
        self.latest: dict[int, int] = {}
        self.seqs: dict[int, int] = {}
        self.published: list[tuple[int, int]] = []

    def command(self, kind: int, session: int, seq: int, number: int) -> None:
        if session in self.seqs:
            if seq != self.seqs[session] + 1:
                return
        else:
            if kind not in (batch.CMD_SESSION_OPEN, batch.CMD_SESSION_CLOSE):
                return
            node, incarnation = session >> 56, (session >> 24) & 0xFFFFFFFF
            self.latest[node] = max(self.latest.get(node, 0), incarnation)
            refused = (node, incarnation, number) in self.opened
            if kind == batch.CMD_SESSION_CLOSE or refused or incarnation < self.latest[node]:
                return
            self.opened.add((node, incarnation, number))
        self.seqs[session] = seq
        if kind == batch.CMD_ENQUEUE:
            self.published.append((session, seq))
        elif kind == batch.CMD_SESSION_CLOSE:
            del self.seqs[session]

    def end(self, ends: Callable[[int], bool]) -> None:
        self.seqs = {s: seq for s, seq in self.seqs.items() if not ends(s)}


#: Of two nodes in two incarnations.
SCRIPTS = [
    Script(session_id(node, number, incarnation), number, 2)
    for node in (1, 2)
    for incarnation in (1, 2)
    for number in range(1, 6)
]
LENGTH = len(SCRIPTS[0].parts)
scripts = st.integers(0, len(SCRIPTS) - 1)
arrivals = st.one_of(
    st.tuples(st.just("part"), scripts, st.integers(0, LENGTH - 1), st.integers(1, LENGTH)),
    st.tuples(st.just("part"), scripts, st.just(0), st.integers(1, LENGTH)),
    st.tuples(st.just("whole"), scripts),
    st.tuples(st.just("session_down"), scripts),
    st.tuples(st.just("gone"), st.integers(1, 2)),
    st.tuples(st.just("up"), st.integers(1, 2), st.integers(1, 2)),
    st.tuples(st.just("seal")),
)


@settings(max_examples=300)
@given(st.lists(arrivals, max_size=80), st.sampled_from(MACHINES), st.integers(0, 80))
def test_whatever_arrives_in_whatever_order_each_session_happens_once(
    steps: list[tuple[Any, ...]], kind: Callable[[], Any], restored_at: int
) -> None:
    machine, log, model = kind(), Log(), Model()
    for at, each in enumerate([*steps, ("seal",)]):
        if each[0] == "part":
            script, first = SCRIPTS[each[1]], each[2]
            last = min(first + each[3], LENGTH) - 1
            script.send(log, first, last)
        elif each[0] == "whole":
            SCRIPTS[each[1]].send(log)
        elif each[0] == "session_down":
            log.session_down(SCRIPTS[each[1]].session)
        elif each[0] == "gone":
            log.node_down(each[1], gone=True)
        elif each[0] == "up":
            log.node_up(each[1], each[2])
        else:
            entry = log.seal()
            apply(machine, entry)
            follow(model, entry.data)
            assert machine.totals()["published"] == len(model.published)
            assert {s.id: s.seq for s in machine.sessions.values()} == model.seqs
        if at == restored_at:
            state = machine.snapshot()
            machine = kind()
            machine.restore(state)
            assert machine.snapshot() == state
    assert len(set(model.published)) == len(model.published)


def follow(model: Model, data: bytes) -> None:
    for kind, _, session, seq, count, arg, offset, _ in batch.commands(data):
        if session:
            model.command(kind, session, seq, arg << 32 | count)
            continue
        if kind == batch.CMD_NODE_DOWN:
            model.end(lambda s, node=arg: s >> 56 == node)
            continue
        value = int.from_bytes(batch.command_body(data, offset)[:8], "little")
        if kind == batch.CMD_SESSION_DOWN:
            model.end(lambda s, ended=value: s == ended)
        else:
            model.latest[arg] = max(model.latest.get(arg, 0), value)
            model.end(lambda s, node=arg, new=value: s >> 56 == node and s >> 24 & 0xFFFFFFFF < new)


# ------------------------------------------------------------------- clients


def kinds(cluster: Cluster) -> list[int]:
    return [c[0] for entry in cluster.log for c in batch.commands(entry.data)]


def test_open_goes_out_with_the_first_command_and_costs_32_bytes() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[1].open()
    assert cluster.nodes[1].builder.used == 0
    publish(client, 1, 3)
    cluster.run()
    publish(client, 4, 3)
    cluster.run()
    assert [len(batch.commands(entry.data)) for entry in cluster.log] == [2, 1]
    assert batch.commands(cluster.log[0].data)[0][7] == batch.COMMAND_SIZE
    assert kinds(cluster) == [batch.CMD_SESSION_OPEN, batch.CMD_ENQUEUE, batch.CMD_ENQUEUE]
    assert events.confirmed == [1, 2, 3, 4, 5, 6]


def test_a_client_that_sent_nothing_has_no_session() -> None:
    cluster = Cluster()
    client, _ = cluster.nodes[1].open()
    client.close()
    assert not cluster.nodes[1].queue.sessions()
    later, _ = cluster.nodes[1].open()
    later.subscribe(spec())
    cluster.run()
    machine = cluster.nodes[2].own.machine  # type: ignore[union-attr]
    assert (machine.openings[1].highest, machine.openings[1].passed_over) == (1, [])


def test_a_reader_of_a_stream_has_no_session() -> None:
    cluster = StreamCluster()
    client, _ = cluster.nodes[2].open()
    client.subscribe(reading(start("first")))
    cluster.run()
    client.close()
    cluster.run()
    assert cluster.log == []
    assert not cluster.nodes[2].queue.sessions()


def test_a_client_closed_before_it_was_heard_leaves_no_number_unopened() -> None:
    cluster = Cluster()
    cluster.elect(None)
    client, _ = cluster.nodes[4].open()
    publish(client, 1, 1)
    client.close()
    cluster.run()
    other, _ = cluster.nodes[4].open()
    publish(other, 1, 1)
    cluster.run()
    cluster.elect(2)
    cluster.run()
    # That it is closed is said again to who asks.
    cluster.wait(1250)
    cluster.run()
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.ready(), list(machine.sessions)) == (2, [other.session])
    assert (machine.openings[4].highest, machine.openings[4].passed_over) == (2, [])
    assert cluster.nodes[4].queue.sessions() == [other.session]


def test_a_client_whose_session_was_ended_opens_another_one() -> None:
    cluster = Cluster()
    client, events = cluster.nodes[4].open()
    target = client.target
    publish(client, 1, 1)
    cluster.run()
    first = client.session
    down = cluster.nodes[1].own
    assert down is not None
    down.propose(batch.CMD_SESSION_DOWN, 0, 0, 0, first.to_bytes(8, "little"))
    publish(client, 2, 1)
    cluster.run()
    for _ in range(4):
        cluster.wait(1000)
        cluster.run()
    assert events.refused == [2]
    assert client.session != first
    # Publishers hold the target.
    target.publish([b"\0\1q", b"h", b"m3"], 2, 3)
    cluster.run()
    assert events.confirmed == [1, 3]
    assert list(down.machine.sessions) == [client.session]
    assert (down.machine.openings[4].highest, down.machine.backlog.ready()) == (2, 2)


def test_a_close_that_overtakes_its_session_loses_no_message() -> None:
    cluster = Cluster()
    client, _ = cluster.nodes[4].open()
    publish(client, 1, 3)
    # The batch is lost, and nobody notices.
    cluster.cut.add(4)
    cluster.run()
    cluster.cut.discard(4)
    client.close()
    cluster.run()
    machine = cluster.nodes[1].own.machine  # type: ignore[union-attr]
    assert (machine.backlog.ready(), machine.sessions) == (3, {})
    assert not cluster.nodes[4].queue.sessions()
