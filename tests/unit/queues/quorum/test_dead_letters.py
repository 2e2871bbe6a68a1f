"""What leaves a quorum queue unacknowledged: the machine's FIFO of dead letters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.queues.quorum.dead_letters import AT_LEAST_ONCE, AT_MOST_ONCE, OFF
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.settings import dead_letter_strategy, machine_settings
from convoymq.replication.machine import EFFECT_DEAD_LETTERS
from tests.unit.queues.quorum.support import Queue, session_id

A = session_id(1)


def queue(strategy: int = AT_LEAST_ONCE, **more: Any) -> Queue:
    made = Queue(**more)
    made.machine.set_version(2)
    configure(made, dead_letters=strategy)
    made.step()
    return made


def configure(to: Queue, **changed: int) -> None:
    body = msgspec.msgpack.encode(changed)
    to.log.builder.add(batch.CMD_CONFIG, 0, 0, 0, len(body), 0, body)


def settle(to: Queue, *ranges: int) -> None:
    """What the leader's worker proposes."""
    body = batch.pack_ranges(list(ranges))
    to.log.builder.add(batch.CMD_SETTLE, 0, 0, 0, len(ranges) // 2, 0, body)


def rejected(to: Queue, count: int, number: int = 1) -> list[Any]:
    """Messages that are published, taken and rejected."""
    to.log.publish(A, [1] * count)
    to.log.checkout(A, number, count)
    to.step()
    to.log.discard(A, number, 0, count - 1)
    return to.step()


def letters(of: Queue) -> list[tuple[int, str]]:
    """(number, reason) of all that is kept."""
    return [
        (first + i, reason)
        for first, _, _, _, count, reason, _ in of.machine.dead_letters.letters(0, 1000)
        for i in range(count)
    ]


@pytest.mark.parametrize("strategy", [OFF, AT_MOST_ONCE, AT_LEAST_ONCE])
def test_what_leaves_is_counted_and_told_to_the_leader(strategy: int) -> None:
    made = queue(strategy)
    effects = [e for e in rejected(made, 3) if e[0] == EFFECT_DEAD_LETTERS]
    assert [(e[1], e[2], e[5], e[6]) for e in effects] == [(strategy, "rejected", 0, 3)]
    assert made.machine.backlog.dropped["rejected"] == 3
    kept = 3 if strategy == AT_LEAST_ONCE else 0
    assert made.machine.totals()["dlx"] == made.machine.totals()["dlx_bytes"] == kept
    assert made.machine.backlog.ready() == made.machine.backlog.unacked == 0


def test_version_1_drops_and_keeps_its_snapshot() -> None:
    old = Queue()
    rejected(old, 2)
    assert old.machine.dead_letters.strategy == OFF
    known = msgspec.msgpack.decode(old.machine.snapshot())
    assert "dead_letters" not in known
    assert "dead_letters" not in known["settings"]


def test_what_is_kept_pins_its_entries_until_it_is_settled() -> None:
    made = queue()
    rejected(made, 4)
    made.log.publish(A, [1])
    made.step()
    entry = made.machine.dead_letters.letters(0, 1)[0][1]
    assert made.machine.oldest_live() == entry
    settle(made, 1, 2)
    made.step()
    assert [number for number, _ in letters(made)] == [0, 3]
    settle(made, 0, 0, 3, 3)
    settle(made, 0, 3)
    made.step()
    assert letters(made) == []
    assert all(low > entry for low, _ in made.machine.live_ranges())
    assert made.machine.dead_letters.next_number == 4


def test_reasons_are_kept_in_their_order() -> None:
    made = queue(delivery_limit=0)
    made.log.publish(A, [1] * 6)
    made.log.checkout(A, 1, 6)
    made.step()
    made.log.discard(A, 1, 0, 1)
    made.log.return_(A, 1, 2, 3, failed=True)
    made.log.discard(A, 1, 4, 4)
    made.step()
    reasons = ["rejected"] * 2 + ["delivery_limit"] * 2 + ["rejected"]
    assert letters(made) == list(enumerate(reasons))
    settle(made, 0, 2)
    made.step()
    assert letters(made) == [(3, "delivery_limit"), (4, "rejected")]
    assert [first for first, *_ in made.machine.dead_letters.letters(4, 9)] == [4]


def test_a_purge_drops_what_is_kept_and_counts_only_what_was_ready() -> None:
    made = queue()
    rejected(made, 3)
    made.log.cancel(A, 1)
    made.log.publish(A, [1])
    made.log.command(A, batch.CMD_PURGE)
    effects = made.step()
    assert effects[-1][-1] == 1
    assert letters(made) == []
    rejected(made, 1, 2)
    assert letters(made) == [(3, "rejected")], "numbers are not used again"


@pytest.mark.parametrize("strategy", [OFF, AT_MOST_ONCE])
def test_another_strategy_drops_what_is_kept(strategy: int) -> None:
    made = queue()
    rejected(made, 3)
    configure(made, delivery_limit=5)
    made.step()
    assert len(letters(made)) == 3, "another setting changed"
    configure(made, dead_letters=strategy)
    made.step()
    assert letters(made) == []
    assert made.machine.oldest_live() > made.machine.index


def test_a_snapshot_has_all_of_it() -> None:
    made = queue(delivery_limit=0)
    rejected(made, 3)
    settle(made, 1, 1)
    made.step()
    copy = QuorumMachine()
    copy.restore(made.machine.snapshot())
    check_invariants(copy)
    assert copy.snapshot() == made.machine.snapshot()
    assert copy.dead_letters.letters(0, 9) == made.machine.dead_letters.letters(0, 9)
    damaged = msgspec.msgpack.decode(made.machine.snapshot())
    damaged["dead_letters"]["reasons"] = [[0, 99]]
    with pytest.raises(ValueError, match="reason 99"):
        copy.restore(msgspec.msgpack.encode(damaged))


def test_which_strategy_the_settings_come_to() -> None:
    least = {"dead-letter-exchange": "", "dead-letter-strategy": "at-least-once"}
    assert dead_letter_strategy({}) == (OFF, "")
    assert dead_letter_strategy({"dead-letter-exchange": ""}) == (AT_MOST_ONCE, "")
    assert dead_letter_strategy({**least, "overflow": "reject-publish"}) == (AT_LEAST_ONCE, "")
    assert dead_letter_strategy(least) == (
        AT_MOST_ONCE,
        "at-least-once needs overflow reject-publish",
    )
    assert dead_letter_strategy({"dead-letter-strategy": "at-least-once"}) == (
        OFF,
        "dead-letter-strategy needs a dead-letter-exchange",
    )
    assert machine_settings({"dead-letter-exchange": "x"})["dead_letters"] == AT_MOST_ONCE


STEPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 5)),
    st.tuples(st.sampled_from(["settle", "fail", "reject"]), st.integers(0, 7), st.integers(0, 3)),
    st.tuples(st.just("moved"), st.integers(0, 20), st.integers(0, 4)),
    st.tuples(st.just("strategy"), st.sampled_from([OFF, AT_MOST_ONCE, AT_LEAST_ONCE])),
    st.tuples(st.sampled_from(["purge", "restart"])),
)


@settings(max_examples=150)
@given(st.lists(STEPS, max_size=40))
def test_the_fifo_is_a_list_of_what_left(steps: list[Any]) -> None:
    """Against a list of (message, reason) by number: what is rejected or fails twice is appended,
    what was moved goes, a purge and another strategy empty it."""
    made = queue(delivery_limit=1)
    made.log.checkout(A, 1, 1000)
    made.step()
    held: dict[int, tuple[int, int, int]] = {}
    fails: dict[tuple[int, int, int], int] = {}
    kept: dict[int, tuple[tuple[int, int, int], str]] = {}
    strategy, number, next_id = AT_LEAST_ONCE, 0, 0

    def leave(message: tuple[int, int, int], reason: str) -> None:
        nonlocal number
        if strategy == AT_LEAST_ONCE:
            kept[number] = (message, reason)
            number += 1

    for name, *arguments in steps:
        given_out: list[tuple[int, int, int]] = []
        if name == "publish":
            made.log.publish(A, [3] * arguments[0])
            at = len(made.log.entries) + 1
            given_out = [(at, 48, i) for i in range(arguments[0])]
        elif name in ("settle", "fail", "reject"):
            first, last = arguments[0], arguments[0] + arguments[1]
            chosen = [i for i in sorted(held) if first <= i % 8 + 0 <= last]
            if not chosen:
                continue
            ranges = [n for i in chosen for n in (i, i)]
            if name == "settle":
                made.log.settle(A, 1, *ranges)
            elif name == "reject":
                made.log.discard(A, 1, *ranges)
            else:
                made.log.return_(A, 1, *ranges, failed=True)
            for i in chosen:
                message = held.pop(i)
                if name == "reject":
                    leave(message, "rejected")
                elif name == "fail":
                    fails[message] = fails.get(message, 0) + 1
                    if fails[message] > 1:
                        leave(message, "delivery_limit")
                    else:
                        given_out.append(message)
        elif name == "moved":
            first, last = arguments[0], arguments[0] + arguments[1]
            settle(made, first, last)
            for i in range(first, last + 1):
                kept.pop(i, None)
        elif name == "strategy":
            strategy = arguments[0]
            configure(made, dead_letters=strategy)
            if strategy != AT_LEAST_ONCE:
                kept.clear()
        elif name == "purge":
            made.log.command(A, batch.CMD_PURGE)
            kept.clear()
        else:
            copy = QuorumMachine()
            copy.restore(made.machine.snapshot())
            made.machine = copy
            continue
        made.step()
        for message in given_out:
            held[next_id] = message
            next_id += 1
        found = {
            first + i: ((entry, command, record + i), reason)
            for first, entry, command, record, count, reason, _ in (
                made.machine.dead_letters.letters(0, 10_000)
            )
            for i in range(count)
        }
        assert found == kept
        assert made.machine.totals()["dlx_bytes"] == 3 * len(kept)
