"""Changes of topics go on whatever happens to who drives them (section 5 of ordered topics)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from convoymq.metadata.records import TopicRecord
from convoymq.model.errors import PreconditionFailed, Unavailable
from convoymq.topics.machine.queue import PartitionQueue
from convoymq.topics.rules.changes import Phase
from convoymq.topics.rules.commands import Open, Seal
from convoymq.topics.rules.controller import Controller
from convoymq.topics.rules.lineage import PartitionState, check_invariants
from convoymq.topics.rules.server_lease import ServerLeases
from convoymq.topics.rules.topic import Publish, TopicCommand
from convoymq.topics.shell.controller_loop import ControllerLoop
from convoymq.topics.shell.leader_task import TopicKey
from tests.unit.queues.fake_cluster import FakeCluster, until
from tests.unit.topics.shell.test_upkeep_loop import metrics

STEPS = 12
"""More than a split takes: creating two targets, telling that they exist, two phases, a seal with
what is proposed behind it, opening two targets, telling that they are open, the end."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        made.raise_versions()
        await made.nodes[3].broker.topics.create("/", "orders", partitions=2, logical=8)
        yield made


def record(cluster: FakeCluster, node: int = 3) -> TopicRecord:
    return cluster.nodes[node].machine.vhosts["/"].topics["orders"]


def loop_of(cluster: FakeCluster, node: int) -> ControllerLoop:
    return cluster.nodes[node].broker.topic_parts.controller


def elect(cluster: FakeCluster, node: int, term: int) -> None:
    """All but node 1, which may be dead or behind, hear of another leader of the tree."""
    for other in (2, 3):
        cluster.nodes[other].store.on_leader(0, node, term)


class Death:
    """A loop that dies after so many of its actions: what it has sent is on its way."""

    def __init__(self, loop: ControllerLoop, actions: int) -> None:
        self.left = actions
        self.is_dead = False
        for name in ("_submit", "_create", "_tell"):
            setattr(loop, name, self._counted(getattr(loop, name)))
        run = loop.tick
        loop.tick = lambda: None if self.is_dead else run()  # type: ignore[method-assign]
        is_current = loop._is_current
        loop._is_current = (  # type: ignore[method-assign]
            lambda *of: not self.is_dead and is_current(*of)
        )

    def _counted(self, act: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any) -> None:
            if self.left <= 0:
                self.is_dead = True
                return
            self.left -= 1
            act(*arguments)

        return counted


async def finished(cluster: FakeCluster, change_id: str) -> None:
    """Waits for the end of a change, and checks what it has left."""
    row = await cluster.nodes[3].broker.topics.wait_change("/", "orders", change_id, 10)
    assert row["phase"] == "done"
    state = record(cluster).state
    check_invariants(state.lineage)
    assert state.route.version == row["next_version"] == 1
    queues = cluster.nodes[3].machine.vhosts["/"].queues
    assert len(queues) == len(state.lineage.partitions)
    for pid, partition in state.lineage.partitions.items():
        queue = cluster.nodes[3].broker.topic_parts.partitions.find("/", "orders", pid)
        assert queue is not None
        found = await queue.description()
        closed = partition.is_closed
        assert found.state == (PartitionState.SEALED if closed else partition.state).name
        if closed:
            assert found.close_offset == partition.close_offset == found.end_offset - 1


@pytest.mark.parametrize("actions", range(STEPS + 1))
async def test_a_successor_goes_on_after_any_action(cluster: FakeCluster, actions: int) -> None:
    death = Death(loop_of(cluster, 1), actions)
    split = await cluster.nodes[3].broker.topics.split("/", "orders", 0)

    def has_ended() -> bool:
        change = record(cluster).state.change
        return death.is_dead or (change is not None and change.is_finished)

    await until(has_ended)
    elect(cluster, 2, 7)
    await finished(cluster, split["change_id"])
    assert record(cluster).state.route.pids == (2, 3, 1)


@pytest.mark.provokes("topics.step_refused")
async def test_a_step_that_was_made_already_is_refused(cluster: FakeCluster) -> None:
    merge = await cluster.nodes[3].broker.topics.merge("/", "orders", [0, 1])
    await finished(cluster, merge["change_id"])
    late = Publish(merge["change_id"], 1)
    loop_of(cluster, 1)._submit(TopicKey("/", "orders"), late)
    await until(lambda: not loop_of(cluster, 1)._under_way)


@pytest.mark.parametrize("phase", [each for each in Phase if each is not Phase.ABORTED])
async def test_two_loops_at_a_time_do_no_harm(cluster: FakeCluster, phase: Phase) -> None:
    """The former leader does not know yet that it is replaced, and goes on."""
    merge = await cluster.nodes[3].broker.topics.merge("/", "orders", [0, 1])

    def has_reached() -> bool:
        change = record(cluster).state.change
        return change is not None and (change.phase is phase or change.is_finished)

    await until(has_reached)
    elect(cluster, 2, 7)
    await finished(cluster, merge["change_id"])
    assert record(cluster).state.route.pids == (2,)


async def test_a_target_that_does_not_open_is_replaced(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = PartitionQueue.wait_until_open
    monkeypatch.setattr(
        "convoymq.topics.shell.controller_loop.Controller",
        lambda state, term: Controller(state, term, create_deadline_ms=50, retry_ms=10),
    )

    async def refuse(queue: PartitionQueue, timeout: float) -> None:
        if queue.name == "amq.partition.orders.2":
            raise Unavailable("its server is dead")
        await opens(queue, timeout)

    monkeypatch.setattr(PartitionQueue, "wait_until_open", refuse)
    move = await cluster.nodes[3].broker.topics.split("/", "orders", 0)
    await finished(cluster, move["change_id"])
    # On a machine that is busy the other target may not open in time either.
    replacing, other, third = record(cluster).state.route.pids
    assert (replacing > 3, other >= 3, third) == (True, True, 1)


async def test_a_merge_goes_on_with_the_sources_that_answer(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "convoymq.topics.shell.controller_loop.Controller",
        lambda state, term: Controller(state, term, merge_deadline_ms=50, retry_ms=10),
    )
    tell = PartitionQueue.tell
    held: list[Callable[[], None]] = []

    def slow(queue: PartitionQueue, command: object, done: Any) -> None:
        if (
            isinstance(command, Seal)
            and queue.name.endswith(".1")
            and record(cluster).state.running
        ):
            held.append(lambda: tell(queue, command, done))
        else:
            tell(queue, command, done)  # type: ignore[arg-type]

    monkeypatch.setattr(PartitionQueue, "tell", slow)
    merge = await cluster.nodes[3].broker.topics.merge("/", "orders", [0, 1])
    await finished(cluster, merge["change_id"])
    assert record(cluster).state.route.pids == (3, 1)
    assert record(cluster).state.left_out == {1}
    # The seal of the first attempt is heard late: what it closed is moved at once.
    late, held[:] = list(held), []
    for send in late:
        send()
    await until(lambda: record(cluster).state.route.version == 2)
    await until(lambda: record(cluster).state.running is None)
    assert record(cluster).state.route.pids == (3, 4)
    assert record(cluster).state.left_out == set()


async def test_a_merge_is_published_behind_seals_that_are_not_recorded_yet(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = PartitionQueue.tell
    answers: list[Callable[[], None]] = []

    def together(queue: PartitionQueue, command: Any, done: Any) -> None:
        def keep(outcome: Any, error: Any) -> None:
            answers.append(lambda: done(outcome, error))
            if len(answers) == 2:
                for answer in answers:
                    answer()

        tell(queue, command, keep if isinstance(command, Seal) else done)

    loop = loop_of(cluster, 1)
    submit = loop._submit
    steps: list[tuple[str, int]] = []

    def note(key: TopicKey, command: TopicCommand) -> None:
        running = record(cluster, 1).state.running
        steps.append((type(command).__name__, 0 if running is None else len(running.seals)))
        submit(key, command)

    monkeypatch.setattr(PartitionQueue, "tell", together)
    monkeypatch.setattr(loop, "_submit", note)
    merge = await cluster.nodes[3].broker.topics.merge("/", "orders", [0, 1])
    await finished(cluster, merge["change_id"])
    at = steps.index(("RecordSeal", 0))
    assert steps[at : at + 4] == [
        ("RecordSeal", 0), ("RecordSeal", 0), ("ToPhase", 0), ("Publish", 0),
    ]  # fmt: skip
    assert not loop._recording


async def test_targets_open_with_the_seed_of_their_sources(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell, told = PartitionQueue.tell, []

    def note(queue: PartitionQueue, command: Any, done: Any) -> None:
        told.append((queue.name, command))
        tell(queue, command, done)

    monkeypatch.setattr(PartitionQueue, "tell", note)
    split = await cluster.nodes[3].broker.topics.split("/", "orders", 1, [5, 6])
    await finished(cluster, split["change_id"])
    seals = {name: command for name, command in told if isinstance(command, Seal)}
    assert seals.keys() == {"amq.partition.orders.1"}
    opened = {name for name, command in told if isinstance(command, Open)}
    assert opened == {f"amq.partition.orders.{pid}" for pid in (2, 3, 4)}


async def test_a_topic_that_is_deleted_in_a_change_ends_it(cluster: FakeCluster) -> None:
    await cluster.nodes[3].broker.topics.split("/", "orders", 0)
    await cluster.nodes[3].broker.topics.delete("/", "orders")
    await until(lambda: not loop_of(cluster, 1)._controllers)
    assert cluster.nodes[3].machine.vhosts["/"].queues == {}
    await cluster.nodes[3].broker.topics.create("/", "orders", partitions=1, logical=8)
    split = await cluster.nodes[3].broker.topics.split("/", "orders", 0)
    await finished(cluster, split["change_id"])


async def test_a_restored_tree_is_followed(cluster: FakeCluster) -> None:
    """A snapshot replaces the objects that the loop has looked at."""
    death = Death(loop_of(cluster, 1), 3)
    split = await cluster.nodes[3].broker.topics.split("/", "orders", 0)
    await until(lambda: death.is_dead)
    node = cluster.nodes[2]
    elect(cluster, 2, 7)
    node.machine.restore(node.machine.snapshot())
    node.store.on_restored()
    await asyncio.sleep(0)
    await finished(cluster, split["change_id"])
    assert record(cluster, 2).state.route.version == 1


class Silence:
    """Partition 0 does not answer, and leases are over at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_over = False
        tell = PartitionQueue.tell
        unheard: list[tuple[PartitionQueue, Any, Any]] = []
        self.unheard = unheard

        def silent(queue: PartitionQueue, command: Any, done: Any) -> None:
            if queue.name.endswith(".0") and not self.is_over:
                unheard.append((queue, command, done))
            else:
                tell(queue, command, done)

        monkeypatch.setattr(PartitionQueue, "tell", silent)
        monkeypatch.setattr("convoymq.topics.shell.admin.QUESTION_TIMEOUT_S", 0.05)
        monkeypatch.setattr(
            ServerLeases, "is_over", lambda leases, server, now_ms: leases.is_given_up(server)
        )

    def end(self) -> None:
        """What was not heard is lost: it is asked again."""
        self.is_over = True
        for queue, command, done in self.unheard:
            queue.tell(command, done)


@pytest.mark.provokes(
    "topics.partition_given_up",
    "topics.partition_sealed_from_outside",
    "topics.partition_end_learnt",
)
@pytest.mark.moves(
    "convoy_topic_partitions_sealed_from_outside_total", "convoy_topic_partitions_end_unknown"
)
async def test_a_partition_is_sealed_from_outside(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = cluster.nodes[3].broker.topics
    with pytest.raises(PreconditionFailed, match="partition 0 answers: move it"):
        await topics.seal("/", "orders", 0)
    silence = Silence(monkeypatch)
    assert "convoy_topic_partitions_end_unknown 0" in await metrics(cluster)
    row = await topics.seal("/", "orders", 0)
    await topics.wait_change("/", "orders", row["change_id"], 10)
    state = record(cluster).state
    assert (state.route.pids, state.unknown_ends(), state.given_up) == ((2, 1), [0], set())
    shown = await metrics(cluster)
    assert "convoy_topic_partitions_sealed_from_outside_total 1" in shown
    assert "convoy_topic_partitions_end_unknown 1" in shown
    silence.end()
    await until(lambda: not record(cluster).state.unknown_ends())
    assert record(cluster).state.lineage.partition(0).close_offset == 1


@pytest.mark.provokes("topics.partition_lost")
async def test_a_lost_partition_is_gone_round(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = cluster.nodes[3].broker.topics
    await topics.create_group("/", "orders", "behind")
    with pytest.raises(Exception, match="partition 0 answers: nothing of it is lost"):
        await topics.declare_lost("/", "orders", 0)
    Silence(monkeypatch)
    await topics.declare_lost("/", "orders", 0)
    state = record(cluster).state
    assert (state.route.pids, set(state.lost), state.running) == ((2, 1), {0}, None)
    assert "amq.partition.orders.0" not in cluster.nodes[3].machine.vhosts["/"].queues
    rows = await topics.route("/", "orders", lineage=True)
    assert [(row["pid"], row["state"], row["node"]) for row in rows if row["pid"] == 0] == [
        (0, "lost", "")
    ]
    await topics.declare_lost("/", "orders", 0)
    # Who comes later begins behind it, or goes on without it as well.
    await topics.create_group("/", "orders", "ahead", "latest")
    assert await topics.create_group("/", "orders", "dag", advance="dag")
    assert not await topics.create_group("/", "orders", "dag")
    with pytest.raises(PreconditionFailed, match="has the advance 'dag', not 'linear'"):
        await topics.create_group("/", "orders", "dag", advance="linear")
    losses = await topics.losses("/", "orders")
    assert [(row["group"], row["pid"], row["first"], row["end"]) for row in losses] == [
        ("behind", 0, 1, 1), ("dag", 0, 1, 1),
    ]  # fmt: skip
    assert {row["reason"] for row in losses} == {"declared_lost"}
