"""What a node finds out and does for the way back from a lost majority; the rest is in
`tests/sim` (lost majorities) and `tests/faults/test_recovery.py` (real nodes)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.kernels.entries import ENTRY_VERSION, Entry, encode_version, make_entry
from convoymq.metadata.commands import Bootstrap, RecordRecovery, encode_command
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.errors import PreconditionFailed, Unavailable
from convoymq.node import recovery
from convoymq.node.recovery import Recovery
from convoymq.replication.raft.types import LOST_STATE, QUARANTINED, WITHHELD
from convoymq.shells.groups.recovery_plan import CopyReport, NodeReport
from convoymq.transport.identity import NodeIdentity

SESSION = 1 << 56 | 7 << 24
FORMER = "f0" * 16
CLUSTER = "c1" * 16
EMPTIED = 2


def commands(index: int, seq: int, command: Any) -> Entry:
    body = encode_command(command)
    builder = batch.CommandBuilder()
    builder.add(batch.CMD_METADATA, 0, SESSION, seq, 0, len(body), body)
    return builder.take_entry(0, index, 1, 1000 + index)


def bootstrap() -> Bootstrap:
    return Bootstrap(
        vhost="/", user="guest", password_hash="", algorithm="", cluster_name="n",
        cluster_id=FORMER,
    )  # fmt: skip


class Log:
    """A log of group 0 without a disk."""

    def __init__(self, entries: list[Entry], voted_for: int = 0) -> None:
        self.all = entries
        self.voted_for = voted_for
        self.term = self.last_term = 1
        self.last_index = entries[-1].index if entries else 0
        self.snapshot_index = 0
        self.snapshot: Any = None
        self.damaged = None

    def entry(self, index: int) -> Entry:
        return next(entry for entry in self.all if entry.index == index)

    def entries(self, first: int, _max_bytes: int) -> list[Entry]:
        return [entry for entry in self.all if entry.index >= first][:1]

    def read_snapshot(self) -> Any:
        return self.snapshot


class FakeNode:
    """What `Recovery` needs of a node, and other nodes that answer as they are told."""

    def __init__(self, log: Log | None = None) -> None:
        self.id = 1
        self.identity = NodeIdentity(1, "d1" * 16, 1, FORMER, "a1" * 16)
        self.usable = True
        self.control = self.links = self.store = self.host = self
        self.clock = SimpleNamespace(now_ms=lambda: 5)
        self.storage = SimpleNamespace(logs={0: log} if log is not None else {})
        records = [SimpleNamespace(group=group) for group in (1, 2, 3)]
        self.machine = SimpleNamespace(cluster_id=FORMER, recoveries=[], records=lambda: records)
        self.others: dict[int, Any] = {}
        self.executed: list[Any] = []
        self.refusals: list[str] = []
        """Ids that the tree has got when it refuses the next commands."""
        self.handler: Callable[[int, Any], Awaitable[Any]] | None = None

    def handle(self, _kind: int, handler: Callable[[int, Any], Awaitable[Any]]) -> None:
        self.handler = handler

    def connected(self) -> list[int]:
        return sorted(self.others)

    def replica(self, _group: int) -> None:
        return None

    async def request(self, node: int, _kind: int, body: Any, _timeout: float) -> Any:
        if node == self.id:
            assert self.handler is not None
            return await self.handler(node, body)
        return msgspec.to_builtins(self.others[node])

    async def execute(self, command: Any, _timeout: float) -> Any:
        self.executed.append(command)
        if self.refusals:
            self.machine.cluster_id = self.refusals.pop(0)
            raise PreconditionFailed("the cluster has another id")
        return True


def test_the_tree_is_read_by_the_rules_that_each_entry_was_applied_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A release whose metadata machine knows version 2 raises it within the log."""
    seen: list[tuple[int, int]] = []

    class Next(MetadataMachine):
        VERSION = 2

        def set_version(self, version: int) -> None:
            self.version = version

        def apply(self, index: int, time_ms: int, data: bytes) -> None:
            seen.append((index, self.version))
            version, self.version = self.version, 1
            super().apply(index, time_ms, data)
            self.version = version

    monkeypatch.setattr(recovery, "MetadataMachine", Next)
    raised = make_entry(0, 2, 1, 0, ENTRY_VERSION, encode_version(2))
    older = make_entry(0, 3, 1, 0, ENTRY_VERSION, encode_version(1))
    log = Log([commands(1, 1, bootstrap()), raised, older, commands(4, 2, bootstrap())])
    found = Recovery(FakeNode(log))._tree()
    assert found["cluster"] == FORMER
    assert seen == [(1, 1), (4, 2)]


def test_a_version_that_this_release_does_not_know_makes_no_plan() -> None:
    raised = make_entry(0, 2, 1, 0, ENTRY_VERSION, encode_version(MetadataMachine.VERSION + 1))
    with pytest.raises(Unavailable, match="unreadable"):
        Recovery(FakeNode(Log([commands(1, 1, bootstrap()), raised])))._tree()


def test_a_snapshot_that_is_newer_than_the_log_knows_is_not_applied_again() -> None:
    machine = MetadataMachine()
    entries = [commands(1, 1, bootstrap()), commands(2, 2, bootstrap())]
    for entry in entries:
        machine.apply(entry.index, entry.time_ms, entry.data)
    log = Log(entries)
    log.snapshot_index, log.snapshot = 1, SimpleNamespace(state=machine.snapshot())
    assert Recovery(FakeNode(log))._tree()["cluster"] == FORMER


@pytest.mark.parametrize(
    ("vote", "usable"), [(0, True), (3, True), (WITHHELD, True), (LOST_STATE, False),
                         (QUARANTINED, False)],
)  # fmt: skip
def test_a_copy_that_has_caught_up_is_whole(vote: int, usable: bool) -> None:
    log = Log([commands(1, 1, bootstrap())], vote)
    copy = Recovery(FakeNode(log))._copy(0, log)
    assert (not copy.unusable) is usable


async def test_an_emptied_node_that_waits_to_be_let_in_is_missing() -> None:
    node = FakeNode(Log([commands(1, 1, bootstrap())]))
    node.others[EMPTIED] = NodeReport(node=EMPTIED, cluster="")
    plan = await Recovery(node)._make()
    assert (plan.reachable, plan.unfinished) == ((1,), False)
    copy = CopyReport(group=0, term=1, last_index=1, last_term=1)
    node.others[EMPTIED] = NodeReport(node=EMPTIED, cluster=FORMER, copies=(copy,))
    assert (await Recovery(node)._make()).reachable == (1, EMPTIED)


async def test_a_recovery_that_was_not_recorded_has_to_be_finished() -> None:
    node = FakeNode(Log([commands(1, 1, bootstrap())]))
    plan = await Recovery(node)._make()
    assert not plan.unfinished
    node.identity = NodeIdentity(1, "d1" * 16, 1, CLUSTER, "a1" * 16, (FORMER,))
    plan = await Recovery(node)._make()
    assert plan.unfinished
    assert plan.needed


async def test_the_record_follows_one_that_was_still_on_its_way() -> None:
    node = FakeNode(Log([commands(1, 1, bootstrap())]))
    plan = await Recovery(node)._make()
    node.refusals = [CLUSTER]
    await Recovery(node)._record(plan, "e1" * 16)
    assert [c.former_id for c in node.executed] == [FORMER, CLUSTER]
    assert all(isinstance(c, RecordRecovery) for c in node.executed)
    node.refusals = [CLUSTER]
    with pytest.raises(PreconditionFailed):
        await Recovery(node)._record(plan, "e2" * 16)


def recovery_of(
    node: FakeNode, answers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Recovery, list[Any]]:
    """A recovery that gets these answers, and the groups that it asks about."""
    asked: list[Any] = []

    async def ask(_node: int, body: Any) -> Any:
        asked.append([group for group, _ in body["groups"]])
        return answers.pop(0)

    found = Recovery(node)
    monkeypatch.setattr(found, "_ask", ask)
    return found, asked


async def test_groups_that_stand_for_election_first_are_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "POLL_S", 0)
    node = FakeNode()
    answers = [[[1, "a majority can be reached"]], []]
    found, asked = recovery_of(node, answers, monkeypatch)
    assert await found._take(1, [(1, ()), (2, ())]) == []
    assert asked == [[1, 2], [1]]


async def test_a_queue_that_was_deleted_meanwhile_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the plan and its turn; the others go on, and nothing is said to have failed."""
    monkeypatch.setattr(recovery, "POLL_S", 0)
    node = FakeNode()
    node.machine.records = lambda: [SimpleNamespace(group=1)]
    answers = [
        [[1, "a majority can be reached"], [2, "group 2: no copy on node 1"]],
        [[1, "a majority can be reached"]],
        [],
    ]
    found, asked = recovery_of(node, answers, monkeypatch)
    assert await found._take(1, [(1, ()), (2, ())]) == []
    assert asked == [[1, 2], [1], [1]]


async def test_what_stays_refused_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SETTLE_TIMEOUT_S", -1)

    async def ask(_node: int, _body: Any) -> Any:
        await asyncio.sleep(0)
        return [[3, "group 3: no copy on node 1"]]

    found = Recovery(FakeNode())
    monkeypatch.setattr(found, "_ask", ask)
    assert await found._take(1, [(3, ())]) == ["group 3: no copy on node 1"]
