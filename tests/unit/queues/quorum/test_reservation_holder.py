"""Reservations and leases in the quorum queue's machine, op by op."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.reservations import (
    FINISHED_KEPT_MAX,
    REASONS,
    RESERVATIONS_MAX,
    TAKE_RUNS_MAX,
    TTL_MS_DEFAULT,
    TTL_MS_MIN,
)
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_DELIVER, EFFECT_TIMER
from tests.unit.queues.quorum.support import Log, apply, deliveries, expand, session_id

A = session_id(1)
B = session_id(2)
TTL = 60_000


class Bench:
    """A machine and its log; every op is an entry of its own."""

    def __init__(self, **settings: Any) -> None:
        self.machine = QuorumMachine(settings)
        self.log = Log()
        self.effects: list[Any] = []

    def seal(self, after_ms: int = 1) -> list[Any]:
        self.effects = apply(self.machine, self.log.seal(after_ms))
        check_invariants(self.machine)
        return self.effects

    def publish(self, count: int, size: int = 10) -> None:
        self.log.publish(B, [size] * count)
        self.seal()

    def op(self, op: str, reservation: str = "s", session: int = A, **fields: Any) -> Any:
        """The answer, or the reason of the refusal."""
        self.log.reservation(session, op, reservation, **fields)
        answers = [e for e in self.seal() if e[0] == EFFECT_APPLIED and e[1] == session]
        status, reply = answers[-1][3:]
        assert (status == 0) == isinstance(reply, dict)
        return reply

    def open(self, reservation: str = "s", owner: str = "me", ttl_ms: int = TTL) -> dict[str, int]:
        answer: dict[str, int] = self.op("open", reservation, owner=owner, ttl_ms=ttl_ms)
        return {"epoch": answer["epoch"], "fencing_token": answer["fencing_token"]}

    def tick(self, after_ms: int) -> list[Any]:
        self.log.leader(batch.CMD_TICK)
        return self.seal(after_ms)

    def reserved(self, reservation: str = "s") -> list[tuple[int, int, int]]:
        return expand(run for _, run in self.machine.reservations.by_name[reservation].held.held())

    def ready(self) -> list[tuple[int, int, int]]:
        return expand([*self.machine.backlog.returned.runs(), *self.machine.backlog.fresh.runs()])

    def counts(self) -> tuple[int, int]:
        return self.machine.backlog.ready(), self.machine.backlog.unacked


def test_a_reservation_takes_what_is_ready_in_queue_order_under_dense_offsets() -> None:
    bench = Bench()
    bench.publish(5)
    bench.publish(5)
    everything = bench.ready()
    mine = bench.open()
    assert bench.op("take", **mine, max=4, after=0) == {**mine, "first": 0, "next": 4}
    assert bench.op("take", **mine, max=100, after=4) == {**mine, "first": 0, "next": 10}
    assert bench.reserved() == everything
    assert bench.counts() == (0, 10)
    assert not [e for e in bench.effects if e[0] == EFFECT_DELIVER]
    totals = bench.machine.totals()
    assert (totals["delivered"], totals["unacked_bytes"]) == (10, 100)


def test_take_leaves_no_credit_behind() -> None:
    bench = Bench()
    mine = bench.open()
    assert bench.op("take", **mine, max=10, after=0)["next"] == 0
    bench.publish(3)
    assert bench.counts() == (3, 0)


def test_a_repeated_take_takes_nothing() -> None:
    bench = Bench()
    bench.publish(10)
    mine = bench.open()
    first = bench.op("take", **mine, max=4, after=0)
    assert bench.op("take", **mine, max=4, after=0) == first
    assert bench.op("take", **mine, max=4, after=3) == first
    assert bench.op("take", **mine, max=4, after=4)["next"] == 8
    assert bench.op("take", **mine, max=4, after=9) == "reservation_range"


def test_settle_is_monotone_and_repeatable() -> None:
    bench = Bench()
    bench.publish(10)
    mine = bench.open()
    bench.op("take", **mine, max=8, after=0)
    assert bench.op("settle", **mine, upto=5) == {**mine, "first": 5, "next": 8}
    assert bench.op("settle", **mine, upto=5) == {**mine, "first": 5, "next": 8}
    assert bench.op("settle", **mine, upto=2) == {**mine, "first": 5, "next": 8}
    assert bench.op("settle", **mine, upto=9) == "reservation_range"
    assert bench.counts() == (2, 3)
    assert bench.machine.backlog.acked == 5
    assert bench.op("settle", **mine, upto=8) == {**mine, "first": 8, "next": 8}
    assert bench.op("take", **mine, max=9, after=8) == {**mine, "first": 8, "next": 10}


def test_release_gives_the_tail_back_to_the_head_in_order_and_raises_the_epoch() -> None:
    bench = Bench()
    bench.publish(10)
    places = bench.ready()
    mine = bench.open()
    bench.op("take", **mine, max=8, after=0)
    answer = bench.op("release", **mine, **{"from": 3}, failed=False)
    assert answer == {"epoch": bench.machine.index, "fencing_token": 1, "first": 0, "next": 3}
    assert answer["epoch"] > mine["epoch"]
    assert bench.ready() == places[3:]
    assert {run[5:7] for run in bench.machine.backlog.returned.runs()} == {(1, 0)}
    assert bench.op("take", **mine, max=8, after=3) == "reservation_epoch"
    # The repeat of who did not hear the answer.
    assert bench.op("release", **mine, **{"from": 3}, failed=False) == answer
    assert bench.op("release", **mine, **{"from": 2}, failed=False) == "reservation_epoch"
    mine["epoch"] = answer["epoch"]
    assert bench.op("take", **mine, max=100, after=3)["next"] == 10
    assert bench.reserved() == places


def test_failed_releases_count_towards_the_delivery_limit() -> None:
    bench = Bench(delivery_limit=1)
    bench.publish(3)
    mine = bench.open()
    for failed in (True, False, True):
        bench.op("take", **mine, max=10, after=0)
        mine["epoch"] = bench.op("release", **mine, **{"from": 0}, failed=failed)["epoch"]
    assert bench.counts() == (0, 0)
    assert bench.machine.backlog.dropped["delivery_limit"] == 3


def test_another_owner_fences_the_older_and_finds_what_is_reserved() -> None:
    bench = Bench()
    bench.publish(6)
    old = bench.open(owner="old")
    bench.op("take", **old, max=4, after=0)
    bench.op("settle", **old, upto=1)
    answer = bench.op("open", owner="new", ttl_ms=TTL)
    assert answer == {"epoch": old["epoch"], "fencing_token": 2, "first": 1, "next": 4}
    assert bench.op("open", owner="new", ttl_ms=TTL) == answer
    for op in ("take", "settle", "release", "close", "touch"):
        fields = {"max": 1, "after": 4, "upto": 2, "from": 1, "failed": False}
        assert bench.op(op, **old, **fields) == "reservation_fenced"
    assert bench.op("settle", epoch=old["epoch"], fencing_token=2, upto=4)["first"] == 4


def test_close_returns_what_is_reserved_and_its_repeat_is_fine() -> None:
    bench = Bench()
    bench.publish(5)
    places = bench.ready()
    mine = bench.open()
    bench.op("take", **mine, max=5, after=0)
    bench.op("settle", **mine, upto=2)
    assert bench.op("close", **mine, failed=True) == {}
    assert bench.op("close", **mine, failed=True) == {}
    assert bench.ready() == places[2:]
    assert {run[5:7] for run in bench.machine.backlog.returned.runs()} == {(1, 1)}
    assert bench.op("touch", **mine) == "no_reservation"
    again = bench.open()
    assert again["epoch"] > mine["epoch"]
    assert bench.op("touch", **mine) == "reservation_epoch"
    assert bench.op("close", **mine, failed=True) == "reservation_epoch"


def test_a_lease_is_filled_once_and_answers_the_same_when_repeated() -> None:
    bench = Bench()
    bench.publish(10)
    answer = bench.op("lease", "l1", ttl_ms=TTL, max=4)
    assert (answer["first"], answer["next"]) == (0, 4)
    assert bench.op("lease", "l1", ttl_ms=TTL, max=9) == answer
    assert bench.op("lease", "l2", ttl_ms=TTL, max=9)["next"] == 6
    epoch = answer["epoch"]
    assert bench.op("take", "l1", epoch=epoch, max=9, after=4) == "reservation_kind"
    assert bench.op("open", "l1", owner="me", ttl_ms=TTL) == "reservation_kind"
    assert bench.op("settle", "l1", epoch=epoch, upto=2)["first"] == 2
    # Settled to its end it is over, and a repeat is no error.
    assert bench.op("settle", "l1", epoch=epoch, upto=4) == {**answer, "first": 4}
    assert "l1" not in bench.machine.reservations.by_name
    assert bench.op("settle", "l1", epoch=epoch, upto=4) == {**answer, "first": 4}
    assert bench.op("lease", "l1", ttl_ms=TTL, max=4) == {**answer, "first": 4}
    assert bench.op("settle", "l1", epoch=epoch + 1, upto=4) == "reservation_epoch"
    assert bench.op("settle", "l1", epoch=epoch, upto=5) == "reservation_range"
    mine = bench.open()
    assert mine["fencing_token"] == 1
    assert bench.op("lease", "s", ttl_ms=TTL, max=1) == "reservation_kind"


def test_an_empty_lease_is_answered_and_not_kept() -> None:
    bench = Bench()
    assert bench.op("lease", "l", ttl_ms=TTL, max=4)["next"] == 0
    assert len(bench.machine.reservations) == 0
    assert bench.machine.consumers.count == 0
    bench.publish(2)
    assert bench.op("lease", "l", ttl_ms=TTL, max=4)["next"] == 2


def test_a_reservation_that_nobody_hears_of_expires_at_tick_as_a_failed_delivery() -> None:
    bench = Bench()
    bench.publish(4)
    places = bench.ready()
    mine = bench.open()
    timers = [e[1] for e in bench.effects if e[0] == EFFECT_TIMER]
    assert timers == [bench.log.time_ms + TTL]
    bench.op("take", **mine, max=3, after=0)
    bench.tick(TTL - 1)
    assert bench.counts() == (1, 3)
    assert [e[1] for e in bench.effects if e[0] == EFFECT_TIMER] == [bench.log.time_ms + 1]
    bench.op("touch", **mine)
    bench.tick(TTL - 1)
    assert bench.counts() == (1, 3)
    bench.op("touch", epoch=mine["epoch"])
    assert bench.machine.next_due_ms() == bench.log.time_ms + TTL
    bench.tick(TTL)
    assert bench.ready() == places
    assert {run[5:7] for run in bench.machine.backlog.returned.runs()} == {(1, 1)}
    assert bench.op("settle", **mine, upto=3) == "no_reservation"
    assert bench.machine.next_due_ms() is None
    assert bench.open()["epoch"] > mine["epoch"]


@pytest.mark.parametrize("op", ["open", "take", "settle", "release", "touch"])
def test_every_op_of_the_owner_keeps_the_reservation_alive(op: str) -> None:
    bench = Bench()
    mine = bench.open()
    fields = {**mine, "max": 1, "after": 0, "upto": 0, "from": 0, "owner": "me", "ttl_ms": TTL}
    bench.tick(TTL - 10)
    assert isinstance(bench.op(op, **fields), dict)
    bench.tick(TTL - 10)
    assert len(bench.machine.reservations) == 1


def test_refused_ops_do_not_keep_a_reservation_alive() -> None:
    bench = Bench()
    mine = bench.open()
    bench.tick(TTL - 10)
    assert bench.op("touch", epoch=mine["epoch"] + 1) == "reservation_epoch"
    assert bench.op("touch", epoch=mine["epoch"], fencing_token=9) == "reservation_fenced"
    assert bench.op("take", **mine, max=1, after=7) == "reservation_range"
    assert bench.op("settle", **mine, upto=7) == "reservation_range"
    assert bench.op("release", **mine, **{"from": 7}) == "reservation_range"
    bench.tick(20)
    assert len(bench.machine.reservations) == 0


def test_nodes_and_sessions_do_not_matter_to_a_reservation() -> None:
    bench = Bench()
    bench.publish(4)
    mine = bench.open()
    bench.op("take", **mine, max=4, after=0)
    bench.log.node_down(1)
    bench.seal()
    bench.log.node_down(1, gone=True)
    bench.seal()
    bench.log.node_up(1, 5)
    bench.seal()
    assert bench.counts() == (0, 4)
    assert bench.op("settle", session=B, **mine, upto=4)["first"] == 4


def test_returned_messages_are_taken_first_with_their_counts() -> None:
    bench = Bench()
    bench.publish(4)
    mine = bench.open("x")
    bench.op("take", "x", **mine, max=2, after=0)
    bench.op("close", "x", **mine, failed=True)
    mine = bench.open()
    bench.op("take", **mine, max=3, after=0)
    held = bench.machine.reservations.by_name["s"].held.held()
    assert [(first, run[3], run[5], run[6]) for first, run in held] == [(0, 2, 1, 1), (2, 1, 0, 0)]
    assert bench.machine.totals()["redelivered"] == 2


def test_what_a_reservation_releases_goes_to_waiting_consumers_at_once() -> None:
    bench = Bench()
    bench.publish(4)
    mine = bench.open()
    bench.op("take", **mine, max=4, after=0)
    bench.log.checkout(B, 1, 10)
    bench.seal()
    assert not deliveries(bench.effects, B, 1)
    bench.op("close", **mine, failed=False)
    assert len(deliveries(bench.effects, B, 1)) == 4
    assert bench.counts() == (0, 4)


def test_with_single_active_consumer_a_reservation_is_a_contender() -> None:
    bench = Bench(single_active=True)
    bench.publish(4)
    bench.log.checkout(B, 1, 10)
    bench.seal()
    assert bench.op("open", owner="me", ttl_ms=TTL) == "single_active"
    assert bench.op("lease", ttl_ms=TTL, max=3) == "single_active"
    bench.log.cancel(B, 1)
    bench.log.return_(B, 1, 0, 3)
    bench.seal()
    mine = bench.open()
    assert bench.op("open", "other", owner="me", ttl_ms=TTL) == "single_active"
    bench.log.checkout(B, 2, 10)
    bench.seal()
    assert bench.machine.consumers.active is None
    bench.op("take", **mine, max=2, after=0)
    assert bench.counts() == (2, 2)
    bench.op("close", **mine, failed=False)
    assert bench.counts() == (0, 4)
    assert bench.machine.consumers.active.number == 2
    # The same when it expires.
    bench.log.cancel(B, 2)
    bench.log.return_(B, 2, 0, 3)
    bench.seal()
    bench.open()
    bench.log.checkout(B, 3, 10)
    bench.seal()
    bench.tick(TTL)
    assert bench.machine.consumers.active.number == 3
    assert bench.counts() == (0, 4)


def test_purge_drops_what_is_ready_and_leaves_what_is_reserved() -> None:
    bench = Bench()
    bench.publish(5)
    mine = bench.open()
    bench.op("take", **mine, max=2, after=0)
    bench.log.command(B, batch.CMD_PURGE)
    bench.seal()
    assert bench.counts() == (0, 2)
    assert bench.machine.backlog.purged == 3


def test_reservations_of_a_queue_are_bounded() -> None:
    bench = Bench()
    for i in range(RESERVATIONS_MAX):
        bench.log.reservation(A, "open", f"s{i}", owner="me", ttl_ms=TTL)
    bench.seal()
    assert bench.machine.consumers.count == RESERVATIONS_MAX
    assert bench.op("open", "more", owner="me", ttl_ms=TTL) == "reservation_limit"
    assert bench.op("lease", "more", ttl_ms=TTL, max=1) == "reservation_limit"
    assert bench.op("close", "s0", epoch=1, fencing_token=1) == {}
    bench.open("more")


def test_finished_leases_that_are_remembered_are_bounded() -> None:
    bench = Bench()
    bench.publish(FINISHED_KEPT_MAX + 1)
    for i in range(FINISHED_KEPT_MAX + 1):
        epoch = bench.op("lease", f"l{i}", ttl_ms=TTL, max=1)["epoch"]
        bench.op("settle", f"l{i}", epoch=epoch, upto=1)
    assert len(bench.machine.reservations.finished) == FINISHED_KEPT_MAX
    assert bench.op("settle", "l0", epoch=2, upto=1) == "no_reservation"


def test_one_take_moves_a_bounded_number_of_runs() -> None:
    bench = Bench()
    extra = 10
    for _ in range(TAKE_RUNS_MAX + extra):
        bench.machine.backlog.fresh.push(
            1, bench.machine.backlog.fresh.messages * 100, 0, 1, 1, 0, 0
        )
        bench.machine.backlog.published += 1
    mine = bench.open()
    assert bench.op("take", **mine, max=1 << 40, after=0)["next"] == TAKE_RUNS_MAX
    assert bench.op("take", **mine, max=1 << 40, after=TAKE_RUNS_MAX)["next"] == (
        TAKE_RUNS_MAX + extra
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"op": "open"},
        {"op": "open", "reservation": ""},
        {"op": "open", "reservation": 7, "owner": "me"},
        {"op": "open", "reservation": "x" * 256, "owner": "me"},
        {"op": "open", "reservation": "s", "owner": "é" * 128},
        {"op": "open", "reservation": "s", "owner": "me", "ttl_ms": TTL_MS_MIN - 1},
        {"op": "open", "reservation": "s", "owner": "me", "ttl_ms": 10**12},
        {"op": "open", "reservation": "s", "owner": None},
        {"op": "lease", "reservation": "s", "ttl_ms": TTL},
        {"op": "lease", "reservation": "s", "ttl_ms": TTL, "max": -1},
        {"op": "lease", "reservation": "s", "ttl_ms": TTL, "max": True},
        {"op": "take", "reservation": "known", "max": 1.5},
        {"op": "take", "reservation": "known", "max": 1},
        {"op": "settle", "reservation": "known", "upto": "1"},
        {"op": "settle", "reservation": "known", "epoch": 2, "fencing_token": 1},
        {"op": "release", "reservation": "known", "from": 0, "failed": 1},
        {"op": "explode", "reservation": "known"},
        {"op": ["open"], "reservation": "known"},
    ],
)
def test_malformed_ops_are_refused_and_change_nothing(fields: dict[str, Any]) -> None:
    bench = Bench()
    bench.publish(2)
    bench.open("known")
    before = bench.machine.reservations.pack()
    body = msgspec.msgpack.encode(fields)
    bench.log.command(A, batch.CMD_RESERVATION, count=len(body), body=body)
    bench.seal()
    assert bench.effects[-1][3:] == (1, "malformed")
    assert bench.machine.reservations.pack() == before
    assert bench.counts() == (2, 0)


def test_a_body_that_is_no_map_is_refused() -> None:
    bench = Bench()
    for body in (b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({1: 2})):
        bench.log.command(A, batch.CMD_RESERVATION, count=len(body), body=body)
        bench.seal()
        assert bench.effects[-1][3:] == (1, "malformed")


def test_an_epoch_of_the_same_entry_was_guessed() -> None:
    bench = Bench()
    bench.publish(2)
    index = bench.machine.index + 1
    bench.log.reservation(A, "open", owner="me", ttl_ms=TTL)
    bench.log.reservation(A, "take", epoch=index, fencing_token=1, max=1, after=0)
    bench.seal()
    assert [e[3:] for e in bench.effects if e[0] == EFFECT_APPLIED][-1] == (1, "reservation_epoch")


def test_a_repeated_command_is_answered_again() -> None:
    bench = Bench()
    bench.publish(3)
    mine = bench.open()
    answer = bench.op("take", **mine, max=1, after=0)
    target = bench.log.targets[A]
    target.resend(0)
    bench.seal()
    replies = [e[4] for e in bench.effects if e[0] == EFFECT_APPLIED and e[1] == A]
    assert answer in replies
    assert bench.counts() == (2, 1)


def test_a_snapshot_holds_reservations() -> None:
    bench = Bench()
    bench.publish(10)
    mine = bench.open()
    bench.op("take", **mine, max=6, after=0)
    bench.op("settle", **mine, upto=2)
    mine["epoch"] = bench.op("release", **mine, **{"from": 4}, failed=True)["epoch"]
    lease = bench.op("lease", "l", ttl_ms=TTL, max=2)
    over = bench.op("lease", "over", ttl_ms=TTL, max=2)
    bench.op("settle", "over", epoch=over["epoch"], upto=2)
    copy = QuorumMachine()
    copy.restore(bench.machine.snapshot())
    check_invariants(copy)
    assert copy.snapshot() == bench.machine.snapshot()
    assert copy.state_hash() == bench.machine.state_hash()
    assert (copy.backlog.unacked, copy.backlog.unacked_bytes) == (4, 40)
    assert list(copy.live_ranges()) == list(bench.machine.live_ranges())
    assert copy.consumers.infos() == bench.machine.consumers.infos()
    assert not copy.effects
    bench.machine = copy
    assert bench.op("settle", **mine, upto=4)["first"] == 4
    assert bench.op("settle", "l", epoch=lease["epoch"], upto=2)["first"] == 2
    assert bench.op("settle", "over", epoch=over["epoch"], upto=2)["first"] == 2
    bench.op("close", **mine)
    assert bench.counts() == (2, 0)


def test_reserved_messages_keep_their_entries() -> None:
    bench = Bench()
    bench.publish(2)
    bench.publish(2)
    mine = bench.open()
    bench.op("take", **mine, max=1, after=0)
    bench.log.command(B, batch.CMD_PURGE)
    bench.seal()
    assert list(bench.machine.live_ranges()) == [(1, 1)]
    bench.op("settle", **mine, upto=1)
    assert not list(bench.machine.live_ranges())


def test_a_reservation_counts_as_a_consumer() -> None:
    bench = Bench()
    bench.publish(3)
    mine = bench.open("nightly")
    bench.op("take", "nightly", **mine, max=2, after=0)
    shown = bench.machine.reservations.infos()
    assert [(row["kind"], row["reservation"], row["unacked"]) for row in shown] == [
        ("reservation", "nightly", 2)
    ]
    assert bench.machine.consumers.count == 1
    assert bench.machine.memory_bytes() > 0
    bench.op("close", "nightly", **mine)
    assert bench.machine.consumers.count == 0


def test_a_lease_without_a_ttl_lives_as_long_as_the_default() -> None:
    bench = Bench()
    bench.publish(1)
    bench.op("lease", max=1)
    bench.tick(TTL_MS_DEFAULT - 1)
    assert bench.counts() == (0, 1)
    bench.tick(1)
    assert bench.counts() == (1, 0)


def test_every_reason_has_a_text() -> None:
    assert all(len(text) > 20 for text in REASONS.values())
