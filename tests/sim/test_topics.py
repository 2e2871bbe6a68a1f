"""Simulated ordered topics: seeds within a bounded time, and every rule that is switched off is
noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from convoymq.sim.engine import Result
from convoymq.sim.loads import run_seed
from convoymq.sim.runner import replay_command
from convoymq.sim.topics import events
from convoymq.sim.topics.plan import ALL_KINDS, draw_plan
from convoymq.sim.topics.referee import find_violations
from convoymq.sim.topics.world import TopicWorld
from convoymq.topics.rules.dedup import DedupTable
from tests.sim.topic_mutants import LIMIT, MUTANTS, Broken, Mutant, Patch, hunt

BLOCKS = 2
SEEDS_PER_BLOCK = 40
BLOCK_SECONDS_MAX = 2.0
"""A block ends early on a slow machine: fewer seeds, not a longer test."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_seeds(block: int) -> None:
    started = time.monotonic()
    for seed in range(block * 1000 + 1, block * 1000 + 1 + SEEDS_PER_BLOCK):
        result = run_seed(seed, load="topics")
        if result.failure is not None:
            tail = "\n".join(result.tail[-40:])
            replay = replay_command(seed, " --load topics")
            pytest.fail(f"{tail}\n{result.detail}\nreplay: {replay}", pytrace=False)
        if time.monotonic() - started > BLOCK_SECONDS_MAX:
            break


LATEST_KINDS = ("mute", "unheard", "keyless")
LATER_KINDS = ("forget", "window", *LATEST_KINDS)


def run_as_found(seed: int, *, since: Collection[str] = LATEST_KINDS) -> Result:
    """Runs a seed without the kinds of faults that there are since it was found."""
    return run_seed(seed, draw_plan(seed).kinds - set(since), load="topics")


@pytest.mark.parametrize("seed", [510031, 510340])
def test_parking_behind_a_lost_partition_is_judged(seed: int) -> None:
    """What was parked behind a lost partition is not lost with it, and a second lost partition does
    not bring back what the first one took: these seeds have both."""
    result = run_as_found(seed, since=LATER_KINDS)
    assert result.failure is None, result.detail


@pytest.mark.parametrize("seed", [738, 1877, 2581, 3385])
def test_what_a_weak_group_goes_on_without_has_a_record(seed: int) -> None:
    """Deleted while the group had expired, before and after a skip, and more than once in one
    partition; keys are parked in skipped partitions."""
    result = run_as_found(seed)
    assert result.failure is None, result.detail


@pytest.mark.parametrize("seed", [910671, 930299])
def test_a_source_that_a_merge_leaves_out_takes_messages_again(seed: int) -> None:
    """It was given up to be sealed from outside, and the merge was amended without it."""
    result = run_as_found(seed, since=LATER_KINDS)
    assert result.failure is None, result.detail


@pytest.mark.parametrize("seed", [20001381])
def test_a_lost_partition_that_comes_back_accepts_nothing(seed: int) -> None:
    """Its server got a lease again when its end was no longer waited for."""
    result = run_as_found(seed, since=LATER_KINDS)
    assert result.failure is None, result.detail


@pytest.mark.parametrize("seed", [2011, 912051, 20004316, 20004414])
def test_nothing_that_a_group_lost_is_handed_out_behind_what_follows(seed: int) -> None:
    """A member stood still while its group lost what it had fetched, and went on to the next
    partition."""
    result = run_as_found(seed, since=LATER_KINDS)
    assert result.failure is None, result.detail


def test_the_owner_of_a_lost_partition_keeps_it_until_it_has_heard_of_the_loss() -> None:
    """It handed parked messages out while the group went on."""
    result = run_as_found(23004606)
    assert result.failure is None, result.detail


def test_a_source_that_was_drained_before_is_not_skipped() -> None:
    """A weak group waited for the other source of a merge, and asked this one nothing."""
    result = run_as_found(31003422)
    assert result.failure is None, result.detail


@pytest.mark.parametrize("seed", [31001000, 31001753, 31002154, 33008013])
def test_parked_keys_of_what_was_skipped_hold_nothing_up_behind_it(seed: int) -> None:
    """The referee took the newest partition that was skipped for what cuts the park log off, or
    one behind it that was lost."""
    result = run_as_found(seed)
    assert result.failure is None, result.detail


def test_what_is_parked_in_what_was_skipped_goes_with_it() -> None:
    """It was deleted while the group had expired. The referee knew that of what is stored there,
    and not of what was handed over to it."""
    result = run_as_found(33004048)
    assert result.failure is None, result.detail


def test_partitions_remember_a_producer_whose_message_has_no_answer() -> None:
    """It tried for longer than producers are remembered here, 0.6 s for a week."""
    result = run_seed(40020722, load="topics")
    assert result.failure is None, result.detail


def test_a_view_that_comes_late_brings_no_parked_message_back() -> None:
    """A member heard of it after the answers that had made it done, and handed it out again."""
    result = run_seed(40038326, load="topics")
    assert result.failure is None, result.detail


def test_a_parked_message_that_was_skipped_is_not_tried_again() -> None:
    """Its member had heard of it, and handed it out once more."""
    result = run_seed(50036578, load="topics")
    assert result.failure is None, result.detail


def test_a_run_does_not_depend_on_how_keys_hash() -> None:
    """Else a seed that fails could not be replayed. A member took keys in the order of a set."""
    command = [sys.executable, "-m", "convoymq.sim", "--seed", "41000015", "--topics"]
    found = {
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.partition("faults")[0]
        for hash_seed in ("0", "2")
    }
    assert len(found) == 1, found


def test_what_is_deleted_is_not_skipped() -> None:
    """A coordinator that had not heard of the deletion skipped what nobody can read late."""
    result = run_as_found(35021789)
    assert result.failure is None, result.detail


def test_what_was_skipped_hands_nothing_over() -> None:
    """A coordinator that did not know yet what came before it froze a parked key there."""
    result = run_as_found(33006664)
    assert result.failure is None, result.detail


@pytest.mark.parametrize("seed", [34070062, 34071543])
def test_second_copies_behind_two_external_seals_are_passed_over(seed: int) -> None:
    """The second source had repeated a part only of what was stored in the first one."""
    result = run_seed(seed, load="topics")
    assert result.failure is None, result.detail


@pytest.mark.parametrize("seed", [34060856, 35004962, 35006060])
def test_a_second_copy_that_is_parked_too_is_another_one(seed: int) -> None:
    """In what was skipped, and behind it: the referee took both for parked in one partition, and
    the one that leaves the park log for the other."""
    result = run_seed(seed, load="topics")
    assert result.failure is None, result.detail


def test_a_second_copy_of_what_comes_late_is_passed_over() -> None:
    """The first one lies in a partition that was skipped, and what follows it had its table of
    duplicates: the referee wanted it read before."""
    result = run_seed(34082796, load="topics")
    assert result.failure is None, result.detail


def test_one_seed_gives_one_trace() -> None:
    lines: list[str] = []
    again: list[str] = []
    first = run_seed(7, sink=lines.append, load="topics")
    second = run_seed(7, sink=again.append, load="topics")
    assert first.digest == second.digest
    assert lines == again


def test_machines_keep_their_invariants_after_every_command() -> None:
    for seed in (3, 4):
        TopicWorld(draw_plan(seed), checks_machines=True).run()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_of_fault_happens(kind: str) -> None:
    """Within a few seeds; the network counts its own."""
    kinds = {"split", "merge", "move", "trim", kind}
    for seed in range(1, 12):
        world = TopicWorld(draw_plan(seed, kinds))
        world.run()
        if world.faults[kind] or {"loss": world.network.lost, "repeat": world.network.repeated}.get(
            kind
        ):
            return
        if kind in ("park", "empty", "abort", "silent") and _shows(world, kind):
            return
    pytest.fail(f"{kind} happened in no seed")


def _shows(world: TopicWorld, kind: str) -> bool:
    if kind == "park":
        return any(isinstance(event, events.Park) for event in world.trace)
    if kind == "empty":
        sealed = [event for event in world.trace if isinstance(event, events.Sealed)]
        return any(event.close_offset == 1 for event in sealed)
    return False


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_rule_that_is_switched_off_is_noticed(name: str) -> None:
    found = MUTANTS[name]
    assert hunt(found, found.first, LIMIT) is not None


def test_a_mutant_that_is_broken_is_not_noticed() -> None:
    """Its patch fails by itself, as after a rename."""

    def patches() -> list[Patch]:
        return [(DedupTable, "compare", staticmethod(lambda seq, last: seq.renamed))]

    with pytest.raises(Broken, match="AttributeError"):
        hunt(Mutant("broken", "", patches, None, 1), 1, LIMIT)


Trace = list[Any]


@pytest.fixture(scope="module")
def clean() -> Trace:
    """The trace of a clean run of a strict topic with parked keys."""
    plan = draw_plan(5, {"split", "merge", "park"})
    world = TopicWorld(replace(plan, weak=False, retries=False))
    world.run()
    assert find_violations(world.trace) == []
    return world.trace


def places(trace: Trace, kind: type[events.Event], **fields: object) -> list[int]:
    """Places of events of a kind with these fields."""
    return [
        number
        for number, event in enumerate(trace)
        if isinstance(event, kind)
        and all(getattr(event, name) == value for name, value in fields.items())
    ]


def first(trace: Trace, kind: type[events.Event], **fields: object) -> int:
    return places(trace, kind, **fields)[0]


def without(trace: Trace, *numbers: int) -> Trace:
    return [event for number, event in enumerate(trace) if number not in numbers]


def with_event(trace: Trace, number: int, event: events.Event) -> Trace:
    """The trace with an event more, behind that of a number."""
    return [*trace[: number + 1], event, *trace[number + 1 :]]


def moved(trace: Trace, number: int, behind: int) -> Trace:
    """The trace with an event where it comes later."""
    return without(with_event(trace, behind, trace[number]), number)


def altered(trace: Trace, number: int, **fields: object) -> Trace:
    return [*trace[:number], trace[number]._replace(**fields), *trace[number + 1 :]]


def exchanged(trace: Trace, one: int, other: int) -> Trace:
    """The trace with the messages of two events exchanged."""
    a, b = trace[one], trace[other]
    return altered(altered(trace, one, msg=b.msg), other, msg=a.msg)


def pair(trace: Trace, kind: type[events.Event], *names: str, **fields: object) -> tuple[int, int]:
    """The first two events of a kind that are alike in these fields, and in their producer."""
    sends = {event.msg: event for event in trace if isinstance(event, events.Send)}
    known: dict[tuple[object, ...], int] = {}
    for number in places(trace, kind, **fields):
        event = trace[number]
        send = sends[event.msg]
        like = (send.producer, send.lp, *(getattr(event, name) for name in names))
        if like in known and trace[known[like]].msg != send.msg:
            return known[like], number
        known.setdefault(like, number)
    raise AssertionError("no two are alike")


def stored_out_of_order(trace: Trace) -> Trace:
    # A message may be stored before the next one is sent.
    sends = places(trace, events.Send)
    trace = [*(trace[number] for number in sends), *without(trace, *sends)]
    return exchanged(trace, *pair(trace, events.Stored, "pid"))


def stored_twice(trace: Trace) -> Trace:
    number = first(trace, events.Stored)
    return with_event(trace, number, trace[number])


def lost(trace: Trace) -> Trace:
    return without(trace, first(trace, events.Stored))


def published_before_it_is_sealed(trace: Trace) -> Trace:
    return without(trace, first(trace, events.Sealed))


def stored_behind_close(trace: Trace) -> Trace:
    sealed = first(trace, events.Sealed)
    stored = places(trace, events.Stored, pid=trace[sealed].pid)[-1]
    return moved(trace, stored, sealed)


def version_left_out(trace: Trace) -> Trace:
    return without(trace, places(trace, events.Published)[1])


def step_left_out(trace: Trace) -> Trace:
    return without(trace, first(trace, events.Advance))


def child_before_its_parent_is_read(trace: Trace) -> Trace:
    sealed = first(trace, events.Sealed)
    pid = trace[sealed].pid
    return without(trace, places(trace, events.Ack, pid=pid)[-1])


def handed_out_before_the_acknowledgement(trace: Trace) -> Trace:
    one, other = pair(trace, events.Deliver, "group", "gen", "key", "pid", parked=False)
    event = trace[one]
    names = ("group", "gen", "pid", "offset")
    ack = first(trace, events.Ack, **{name: getattr(event, name) for name in names})
    return moved(trace, ack, other)


def handed_out_again(trace: Trace) -> Trace:
    return with_event(trace, first(trace, events.Ack), trace[first(trace, events.Deliver)])


def handed_out_without_a_lease(trace: Trace) -> Trace:
    return without(trace, first(trace, events.Grant))


def never_acknowledged(trace: Trace) -> Trace:
    return without(trace, first(trace, events.Ack))


def parked_in_silence(trace: Trace) -> Trace:
    return without(trace, first(trace, events.Park))


def never_applied(trace: Trace) -> Trace:
    return without(trace, first(trace, events.Effect))


def hole_in_the_log(trace: Trace) -> Trace:
    number = places(trace, events.Stored)[-1]
    offset = trace[number].offset
    return altered(trace, number, offset=offset + 1)


def close_behind_a_hole(trace: Trace) -> Trace:
    number = first(trace, events.Sealed)
    close = trace[number].close_offset
    return altered(trace, number, close_offset=close + 1)


def effects_in_another_order(trace: Trace) -> Trace:
    return exchanged(trace, *pair(trace, events.Effect, "group", "gen", "key", applied=True))


INJECTIONS: list[tuple[str, Callable[[Trace], Trace]]] = [
    ("A1", stored_out_of_order),
    ("A2", stored_twice),
    ("A3", lost),
    ("A4", published_before_it_is_sealed),
    ("A4", stored_behind_close),
    ("A5", version_left_out),
    ("A6", step_left_out),
    ("A7", child_before_its_parent_is_read),
    ("A8", handed_out_before_the_acknowledgement),
    ("A9", handed_out_again),
    ("A10", handed_out_without_a_lease),
    ("A11", never_acknowledged),
    ("A12", parked_in_silence),
    ("A13", never_applied),
    ("A14", hole_in_the_log),
    ("A14", close_behind_a_hole),
    ("A15", effects_in_another_order),
]


@pytest.mark.parametrize(
    ("check", "inject"), INJECTIONS, ids=lambda each: getattr(each, "__name__", each)
)
def test_the_referee_reads_nothing_but_the_trace(
    clean: Trace, check: str, inject: Callable[[Trace], Trace]
) -> None:
    """Each change of a clean trace is a violation of the named check."""
    assert check in {violation.split(":")[0] for violation in find_violations(inject(clean))}


def test_every_check_of_the_referee_is_shown_to_fire() -> None:
    assert {check for check, _ in INJECTIONS} == {f"A{number}" for number in range(1, 16)}
