"""Stages beside consumers against a naive model that keeps a list entry per message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.cluster.interfaces import EFFECT_APPLIED
from convoymq.kernels import batch
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from tests.unit.queues.quorum.support import apply, expand
from tests.unit.queues.quorum.test_machine_model import (
    PLAIN,
    Message,
    Naive,
    Run,
    commands,
    compare,
    session_order,
)

TTL = 20_000
NAMES = ("s", "t")


@dataclass
class NaiveStage:
    """A stage as a list of messages."""

    lease: bool
    epoch: int
    owner: str
    heard: int
    fence: int = 1
    first: int = 0
    messages: list[Message] = field(default_factory=list)
    released: tuple[int, int] | None = None

    @property
    def next(self) -> int:
        return self.first + len(self.messages)

    def answer(self) -> dict[str, int]:
        return {"epoch": self.epoch, "fence": self.fence, "first": self.first, "next": self.next}


class StagedNaive(Naive):
    """The naive queue with stages."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.stages: dict[str, NaiveStage] = {}
        self.over: dict[str, NaiveStage] = {}

    def take(self, stage: NaiveStage, count: int) -> None:
        for _ in range(min(count, len(self.returned) + len(self.fresh))):
            stage.messages.append((self.returned or self.fresh).pop(0))

    def give_back(self, stage: NaiveStage, start: int, failed: bool) -> None:
        kept = start - stage.first
        back, stage.messages = stage.messages[kept:], stage.messages[:kept]
        for message in back:
            self.take_back(message, failed)

    def expire(self, now: int) -> None:
        for name in [n for n, stage in self.stages.items() if stage.heard + TTL <= now]:
            stage = self.stages.pop(name)
            self.give_back(stage, stage.first, True)

    def op(self, fields: dict[str, Any], index: int, now: int) -> Any:
        """The answer, or the reason of the refusal."""
        op, name = fields["op"], fields["stage"]
        stage = self.stages.get(name)
        if op == "open":
            if stage is None:
                stage = self.stages[name] = NaiveStage(False, index, fields["owner"], now)
            elif stage.lease:
                return "stage_kind"
            elif stage.owner != fields["owner"]:
                stage.owner = fields["owner"]
                stage.fence += 1
            stage.heard = now
            return stage.answer()
        if op == "lease":
            if stage is None and name in self.over:
                return self.over[name].answer()
            if stage is None:
                stage = NaiveStage(True, index, fields["owner"], now)
                self.take(stage, fields["max"])
                if stage.messages:
                    self.stages[name] = stage
                return stage.answer()
            if not stage.lease:
                return "stage_kind"
            stage.heard = now
            return stage.answer()
        return self.owner_op(op, name, stage, fields, index, now)

    def owner_op(
        self,
        op: str,
        name: str,
        stage: NaiveStage | None,
        fields: dict[str, Any],
        index: int,
        now: int,
    ) -> Any:
        if stage is None:
            if op == "close":
                return {}
            over = self.over.get(name)
            if op != "settle" or over is None:
                return "no_stage"
            if fields["epoch"] != over.epoch:
                return "stage_epoch"
            return over.answer() if fields["upto"] <= over.next else "stage_range"
        known = fields["epoch"] == stage.epoch and stage.epoch < index
        repeated = op == "release" and stage.released == (fields["epoch"], fields["from"])
        if not known and not repeated:
            return "stage_epoch"
        if fields["fence"] != stage.fence:
            return "stage_fenced"
        wanted = fields.get({"take": "after", "settle": "upto", "release": "from"}.get(op, ""), 0)
        if not repeated:
            if op == "take" and stage.lease:
                return "stage_kind"
            if wanted > stage.next:
                return "stage_range"
        stage.heard = now
        if repeated or op == "touch":
            return stage.answer()
        if op == "take":
            if wanted == stage.next:
                self.take(stage, fields["max"])
        elif op == "settle":
            while stage.first < wanted:
                stage.messages.pop(0)
                stage.first += 1
            if stage.lease and not stage.messages:
                self.over[name] = self.stages.pop(name)
        elif op == "release":
            self.give_back(stage, max(wanted, stage.first), fields["failed"])
            stage.released = (stage.epoch, wanted)
            stage.epoch = index
            if stage.lease and not stage.messages:
                del self.stages[name]
        else:
            self.give_back(stage, stage.first, fields["failed"])
            del self.stages[name]
            return {}
        return stage.answer()


def stage_op(op: str, names: tuple[str, ...] = NAMES) -> st.SearchStrategy[tuple[Any, ...]]:
    """(…, amount, shift, what the owner gets right, failed): see `StagedRun.write`."""
    return st.tuples(
        st.just("stage"),
        st.integers(0, 2),
        st.just(op),
        st.sampled_from(names),
        st.integers(0, 25),
        st.integers(-3, 3),
        st.sampled_from([*["right"] * 8, "epoch", "fence", "before"]),
        st.booleans(),
    )


def seals() -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just("seal"), st.sampled_from([1, 1, 1, 1, 5_000]))


def publishes() -> st.SearchStrategy[tuple[Any, ...]]:
    sizes = st.lists(st.integers(0, 9), min_size=1, max_size=30)
    return st.tuples(st.just("publish"), st.integers(0, 2), sizes)


#: One of these as often as any other; consumers are few, or nothing would be left to stage.
steps_of_both = st.lists(
    st.one_of(
        commands.map(lambda c: c if c[0] != "checkout" else (*c[:3], 1 + c[3] % 3, c[4])),
        publishes(),
        publishes(),
        publishes(),
        seals(),
        seals(),
        seals(),
        seals(),
        stage_op("open", ("s",)),
        stage_op("open"),
        stage_op("take", ("s",)),
        stage_op("take", ("s",)),
        stage_op("take"),
        stage_op("settle", ("s",)),
        stage_op("settle"),
        stage_op("release"),
        stage_op("close"),
        stage_op("lease", ("t",)),
        stage_op("lease"),
        stage_op("touch"),
    ),
    # Without a least size most lists have few steps.
    min_size=60,
    max_size=160,
)


class StagedRun(Run):
    """Feeds stage ops too; what an owner names in them is what it heard before the open entry."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.naive: StagedNaive = StagedNaive(limit)
        self.index = 0
        self.replies: list[tuple[int, Any]] = []

    def write(self, command: tuple[Any, ...]) -> None:
        if command[0] != "stage":
            super().write(command)
            return
        _, i, op, name, amount, shift, how, failed = command
        stage = self.naive.stages.get(name) or self.naive.over.get(name)
        epoch = stage.epoch if stage is not None else 1
        if stage is not None and how == "before" and stage.released is not None:
            epoch = stage.released[0]
        end = stage.next if stage is not None else 0
        first = stage.first if stage is not None else 0
        fields: dict[str, Any] = {"op": op, "stage": name}
        if op in ("open", "lease"):
            fields |= {"owner": f"o{amount % 2}", "ttl_ms": TTL, "max": amount}
        else:
            fields |= {
                "epoch": epoch + (how == "epoch"),
                "fence": (stage.fence if stage is not None else 1) + (how == "fence"),
                "max": amount,
                "after": max(0, end + shift * (shift < 2)),
                "upto": max(0, min(first + amount, end + max(shift, 0))),
                "from": max(0, end - amount) if shift else amount,
                "failed": failed,
            }
        session = self.session(i)
        self.log.stage(session, **fields)
        self.open.append(("stage", i, fields, session))

    def replay(self, entry: Any) -> None:
        self.index = entry.index
        super().replay(entry)

    def step(
        self, command: tuple[Any, ...], session: int, flags: int, arg: int, time_ms: int
    ) -> None:
        if command[0] == "stage":
            self.replies.append((session, self.naive.op(command[2], self.index, time_ms)))
            return
        if command[0] == "tick":
            self.naive.expire(time_ms)
        super().step(command, session, flags, arg, time_ms)


def compare_stages(machine: Any, run: StagedRun, entry: Any, effects: list[Any]) -> None:
    naive = run.naive
    assert {
        name: (stage.is_lease, stage.owner, stage.heard_ms, stage.answer(), stage.released)
        for name, stage in machine.stages.by_name.items()
    } == {
        name: (stage.lease, stage.owner, stage.heard, stage.answer(), stage.released)
        for name, stage in naive.stages.items()
    }
    for name, stage in naive.stages.items():
        held = machine.stages.by_name[name].held.held()
        assert {
            first + k: (place, piece[5], piece[6])
            for first, piece in held
            for k, place in enumerate(expand([piece]))
        } == {
            stage.first + k: (m.place, m.acquired, m.delivered)
            for k, m in enumerate(stage.messages)
        }
    asked = [
        (command[2], command[3])
        for command in batch.commands(entry.data)
        if command[0] == batch.CMD_STAGE
    ]
    told = {(e[1], e[2]): (e[3], e[4]) for e in effects if e[0] == EFFECT_APPLIED}
    expected = [(int(isinstance(reply, str)), reply) for _, reply in run.replies]
    assert [told[key] for key in asked] == expected
    run.replies.clear()


def play(steps: list[tuple[Any, ...]], limit: int, machine: Any) -> StagedRun:
    run = StagedRun(limit)
    for step in [*steps, ("seal", 1)]:
        if step[0] != "seal":
            run.write(step)
            continue
        entry = run.log.seal(step[1])
        run.session_order = session_order(machine, entry)
        effects = apply(machine, entry)
        run.replay(entry)
        check_invariants(machine)
        compare(machine, run.naive, effects)
        compare_stages(machine, run, entry, effects)
    return run


@settings(max_examples=200, deadline=None)
@given(steps_of_both, st.sampled_from([-1, 0, 1, 20]))
def test_stages_equal_lists_of_messages(steps: list[tuple[Any, ...]], limit: int) -> None:
    play(steps, limit, QuorumMachine({"delivery_limit": limit}))


@settings(max_examples=100, deadline=None)
@given(steps_of_both, st.booleans(), st.integers(0, 80))
def test_snapshot_and_rest_equal_the_whole_log(
    steps: list[tuple[Any, ...]], single_active: bool, split: int
) -> None:
    run = play(steps, 2, QuorumMachine({"delivery_limit": 2}))
    config = {"single_active": single_active, "delivery_limit": 2}
    whole, other, plain = QuorumMachine(config), QuorumMachine(config), PLAIN.QuorumMachine(config)
    for i, entry in enumerate(run.log.entries):
        effects = apply(whole, entry)
        if i == split % len(run.log.entries):
            taken = other
            other = QuorumMachine(config)
            other.restore(taken.snapshot())
            assert other.snapshot() == taken.snapshot()
        assert apply(other, entry) == effects
        assert apply(plain, entry) == effects
        check_invariants(other)
        assert other.state_hash() == whole.state_hash() == plain.state_hash()
        assert list(other.live_ranges()) == list(whole.live_ranges())


@pytest.mark.parametrize("op", ["take", "settle", "release", "close", "lease"])
def test_the_model_sees_every_op_do_something(op: str) -> None:
    """The strategies reach what they are for."""
    run = StagedRun(20)
    machine = QuorumMachine()
    right = ("right", False)
    ops: list[tuple[Any, ...]] = [
        ("publish", 0, [1] * 9),
        ("stage", 0, "open", "s", 0, 0, *right),
        ("seal", 1),
        ("stage", 0, "take", "s", 9, 0, *right),
        ("seal", 1),
    ]
    if op == "lease":
        ops = [("publish", 0, [1] * 9), ("stage", 0, "lease", "s", 9, 0, *right)]
    elif op != "take":
        ops.append(("stage", 0, op, "s", 4, 1, *right))
    for step in [*ops, ("seal", 1)]:
        if step[0] != "seal":
            run.write(step)
            continue
        entry = run.log.seal(step[1])
        effects = apply(machine, entry)
        run.replay(entry)
        compare_stages(machine, run, entry, effects)
    expected = {"take": (0, 9), "settle": (0, 5), "release": (4, 5), "close": (9, 0)}
    assert (machine.ready, machine.unacked) == expected.get(op, (0, 9))
