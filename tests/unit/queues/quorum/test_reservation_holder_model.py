"""Reservations beside consumers against a naive model that keeps a list entry per message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_APPLIED
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
class NaiveReservation:
    """A reservation as a list of messages."""

    lease: bool
    epoch: int
    owner: str
    heard: int
    fencing_token: int = 1
    first: int = 0
    messages: list[Message] = field(default_factory=list)
    released: tuple[int, int] | None = None

    @property
    def next(self) -> int:
        return self.first + len(self.messages)

    def answer(self) -> dict[str, int]:
        return {
            "epoch": self.epoch,
            "fencing_token": self.fencing_token,
            "first": self.first,
            "next": self.next,
        }


class ReservedNaive(Naive):
    """The naive queue with reservations."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.reservations: dict[str, NaiveReservation] = {}
        self.over: dict[str, NaiveReservation] = {}

    def take(self, reservation: NaiveReservation, count: int) -> None:
        for _ in range(min(count, len(self.returned) + len(self.fresh))):
            reservation.messages.append((self.returned or self.fresh).pop(0))

    def give_back(self, reservation: NaiveReservation, start: int, failed: bool) -> None:
        kept = start - reservation.first
        back, reservation.messages = reservation.messages[kept:], reservation.messages[:kept]
        for message in back:
            self.take_back(message, failed)

    def expire(self, now: int) -> None:
        for name in [
            n for n, reservation in self.reservations.items() if reservation.heard + TTL <= now
        ]:
            reservation = self.reservations.pop(name)
            self.give_back(reservation, reservation.first, True)

    def op(self, fields: dict[str, Any], index: int, now: int) -> Any:
        """The answer, or the reason of the refusal."""
        op, name = fields["op"], fields["reservation"]
        reservation = self.reservations.get(name)
        if op == "open":
            if reservation is None:
                reservation = self.reservations[name] = NaiveReservation(
                    False, index, fields["owner"], now
                )
            elif reservation.lease:
                return "reservation_kind"
            elif reservation.owner != fields["owner"]:
                reservation.owner = fields["owner"]
                reservation.fencing_token += 1
            reservation.heard = now
            return reservation.answer()
        if op == "lease":
            if reservation is None and name in self.over:
                return self.over[name].answer()
            if reservation is None:
                reservation = NaiveReservation(True, index, fields["owner"], now)
                self.take(reservation, fields["max"])
                if reservation.messages:
                    self.reservations[name] = reservation
                return reservation.answer()
            if not reservation.lease:
                return "reservation_kind"
            reservation.heard = now
            return reservation.answer()
        return self.owner_op(op, name, reservation, fields, index, now)

    def owner_op(
        self,
        op: str,
        name: str,
        reservation: NaiveReservation | None,
        fields: dict[str, Any],
        index: int,
        now: int,
    ) -> Any:
        if reservation is None:
            if op == "close":
                return {}
            over = self.over.get(name)
            if op != "settle" or over is None:
                return "no_reservation"
            if fields["epoch"] != over.epoch:
                return "reservation_epoch"
            return over.answer() if fields["upto"] <= over.next else "reservation_range"
        known = fields["epoch"] == reservation.epoch and reservation.epoch < index
        repeated = op == "release" and reservation.released == (fields["epoch"], fields["from"])
        if not known and not repeated:
            return "reservation_epoch"
        if fields["fencing_token"] != reservation.fencing_token:
            return "reservation_fenced"
        wanted = fields.get({"take": "after", "settle": "upto", "release": "from"}.get(op, ""), 0)
        if not repeated:
            if op == "take" and reservation.lease:
                return "reservation_kind"
            if wanted > reservation.next:
                return "reservation_range"
        reservation.heard = now
        if repeated or op == "touch":
            return reservation.answer()
        if op == "take":
            if wanted == reservation.next:
                self.take(reservation, fields["max"])
        elif op == "settle":
            while reservation.first < wanted:
                reservation.messages.pop(0)
                reservation.first += 1
            if reservation.lease and not reservation.messages:
                self.over[name] = self.reservations.pop(name)
        elif op == "release":
            self.give_back(reservation, max(wanted, reservation.first), fields["failed"])
            reservation.released = (reservation.epoch, wanted)
            reservation.epoch = index
            if reservation.lease and not reservation.messages:
                del self.reservations[name]
        else:
            self.give_back(reservation, reservation.first, fields["failed"])
            del self.reservations[name]
            return {}
        return reservation.answer()


def reservation_op(op: str, names: tuple[str, ...] = NAMES) -> st.SearchStrategy[tuple[Any, ...]]:
    """(…, amount, shift, what the owner gets right, failed): see `ReservedRun.write`."""
    return st.tuples(
        st.just("reservation"),
        st.integers(0, 2),
        st.just(op),
        st.sampled_from(names),
        st.integers(0, 25),
        st.integers(-3, 3),
        st.sampled_from([*["right"] * 8, "epoch", "fencing_token", "before"]),
        st.booleans(),
    )


def seals() -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just("seal"), st.sampled_from([1, 1, 1, 1, 5_000]))


def publishes() -> st.SearchStrategy[tuple[Any, ...]]:
    sizes = st.lists(st.integers(0, 9), min_size=1, max_size=30)
    return st.tuples(st.just("publish"), st.integers(0, 2), sizes)


#: One of these as often as any other; consumers are few, or nothing would be left to reservation.
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
        reservation_op("open", ("s",)),
        reservation_op("open"),
        reservation_op("take", ("s",)),
        reservation_op("take", ("s",)),
        reservation_op("take"),
        reservation_op("settle", ("s",)),
        reservation_op("settle"),
        reservation_op("release"),
        reservation_op("close"),
        reservation_op("lease", ("t",)),
        reservation_op("lease"),
        reservation_op("touch"),
    ),
    # Without a least size most lists have few steps.
    min_size=60,
    max_size=160,
)


class ReservedRun(Run):
    """Feeds reservation ops too; what an owner names in them is what it heard before the open
    entry."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.naive: ReservedNaive = ReservedNaive(limit)
        self.index = 0
        self.replies: list[tuple[int, Any]] = []

    def write(self, command: tuple[Any, ...]) -> None:
        if command[0] != "reservation":
            super().write(command)
            return
        _, i, op, name, amount, shift, how, failed = command
        reservation = self.naive.reservations.get(name) or self.naive.over.get(name)
        epoch = reservation.epoch if reservation is not None else 1
        if reservation is not None and how == "before" and reservation.released is not None:
            epoch = reservation.released[0]
        end = reservation.next if reservation is not None else 0
        first = reservation.first if reservation is not None else 0
        fields: dict[str, Any] = {"op": op, "reservation": name}
        if op in ("open", "lease"):
            fields |= {"owner": f"o{amount % 2}", "ttl_ms": TTL, "max": amount}
        else:
            fields |= {
                "epoch": epoch + (how == "epoch"),
                "fencing_token": (reservation.fencing_token if reservation is not None else 1)
                + (how == "fencing_token"),
                "max": amount,
                "after": max(0, end + shift * (shift < 2)),
                "upto": max(0, min(first + amount, end + max(shift, 0))),
                "from": max(0, end - amount) if shift else amount,
                "failed": failed,
            }
        session = self.session(i)
        self.log.reservation(session, **fields)
        self.open.append(("reservation", i, fields, session))

    def replay(self, entry: Any) -> None:
        self.index = entry.index
        super().replay(entry)

    def step(
        self, command: tuple[Any, ...], session: int, flags: int, arg: int, time_ms: int
    ) -> None:
        if command[0] == "reservation":
            self.replies.append((session, self.naive.op(command[2], self.index, time_ms)))
            return
        if command[0] == "tick":
            self.naive.expire(time_ms)
        super().step(command, session, flags, arg, time_ms)


def compare_reservations(machine: Any, run: ReservedRun, entry: Any, effects: list[Any]) -> None:
    naive = run.naive
    assert {
        name: (
            reservation.is_lease,
            reservation.owner,
            reservation.heard_ms,
            reservation.answer(),
            reservation.released,
        )
        for name, reservation in machine.reservations.by_name.items()
    } == {
        name: (
            reservation.lease,
            reservation.owner,
            reservation.heard,
            reservation.answer(),
            reservation.released,
        )
        for name, reservation in naive.reservations.items()
    }
    for name, reservation in naive.reservations.items():
        held = machine.reservations.by_name[name].held.held()
        assert {
            first + k: (place, piece[5], piece[6])
            for first, piece in held
            for k, place in enumerate(expand([piece]))
        } == {
            reservation.first + k: (m.place, m.acquired, m.delivered)
            for k, m in enumerate(reservation.messages)
        }
    asked = [
        (command[2], command[3])
        for command in batch.commands(entry.data)
        if command[0] == batch.CMD_RESERVATION
    ]
    told = {(e[1], e[2]): (e[3], e[4]) for e in effects if e[0] == EFFECT_APPLIED}
    expected = [(int(isinstance(reply, str)), reply) for _, reply in run.replies]
    assert [told[key] for key in asked] == expected
    run.replies.clear()


def play(steps: list[tuple[Any, ...]], limit: int, machine: Any) -> ReservedRun:
    run = ReservedRun(limit)
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
        compare_reservations(machine, run, entry, effects)
    return run


@given(steps_of_both, st.sampled_from([-1, 0, 1, 20]))
def test_reservations_equal_lists_of_messages(steps: list[tuple[Any, ...]], limit: int) -> None:
    play(steps, limit, QuorumMachine({"delivery_limit": limit}))


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
    run = ReservedRun(20)
    machine = QuorumMachine()
    right = ("right", False)
    ops: list[tuple[Any, ...]] = [
        ("publish", 0, [1] * 9),
        ("reservation", 0, "open", "s", 0, 0, *right),
        ("seal", 1),
        ("reservation", 0, "take", "s", 9, 0, *right),
        ("seal", 1),
    ]
    if op == "lease":
        ops = [("publish", 0, [1] * 9), ("reservation", 0, "lease", "s", 9, 0, *right)]
    elif op != "take":
        ops.append(("reservation", 0, op, "s", 4, 1, *right))
    for step in [*ops, ("seal", 1)]:
        if step[0] != "seal":
            run.write(step)
            continue
        entry = run.log.seal(step[1])
        effects = apply(machine, entry)
        run.replay(entry)
        compare_reservations(machine, run, entry, effects)
    expected = {"take": (0, 9), "settle": (0, 5), "release": (4, 5), "close": (9, 0)}
    assert (machine.backlog.ready(), machine.backlog.unacked) == expected.get(op, (0, 9))
