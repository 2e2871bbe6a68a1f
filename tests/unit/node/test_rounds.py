"""The end of a round, and the jobs of the timer: order, and faults that stay where they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from convoymq.model.errors import BrokerError, ReplicaStopped
from convoymq.node import rounds
from convoymq.node.rounds import Rounds, Ticks

LOG = structlog.get_logger()


class Loop:
    """Keeps the callbacks of the next turn."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.call_soon = self.soon.append


def fail(error: BrokerError) -> None:
    pytest.fail(str(error))


def made(
    loop: Any, done: list[str], failing: str = "", *, due: bool = True
) -> tuple[Rounds, list[BrokerError]]:
    """Rounds of all parts, of which one fails."""

    def step(name: str) -> Any:
        def run_step() -> None:
            if name == failing:
                raise KeyError("a fault of our own")
            done.append(name)

        return run_step

    failures: list[BrokerError] = []
    found = Rounds(loop, LOG, failures.append)
    parts: Any = SimpleNamespace(
        broker=SimpleNamespace(round_due=due, end_of_round=step("broker")),
        host=SimpleNamespace(
            end_of_round=step("replicas"),
            deferred=SimpleNamespace(release_due=True, release=step("deferred")),
        ),
        links=SimpleNamespace(flush=step("links")),
        edges=(SimpleNamespace(flush=step("edge")), SimpleNamespace(flush=None)),
    )
    found.carry_out(parts.host, parts.links, parts.broker, parts.edges)
    return found, failures


@pytest.mark.provokes("node.fault")
@pytest.mark.parametrize("failing", ["broker", "links", "edge", "replicas"])
def test_a_step_of_a_round_that_fails_keeps_no_other_from_its_turn(failing: str) -> None:
    """Only without its replicas a node cannot go on."""
    done: list[str] = []
    found, failures = made(Loop(), done, failing)
    found.end()
    expected = ["broker", "replicas", "links", "edge", "deferred", "links"]
    assert done == [name for name in expected if name != failing]
    assert [type(each) for each in failures] == [ReplicaStopped] * (failing == "replicas")


def test_queues_with_a_home_have_a_part_in_the_rounds_that_they_ask_for() -> None:
    """At low rates a round is for one message, and each step that does nothing costs it."""
    done: list[str] = []
    found, _ = made(Loop(), done, due=False)
    found.end()
    assert done == ["replicas", "links", "edge", "deferred", "links"]


def test_a_round_ends_once_however_often_it_is_asked_for() -> None:
    loop, done = Loop(), list[str]()
    found, _ = made(loop, done)
    found.wake()
    found.wake()
    (end,) = loop.soon
    end()
    assert done.count("replicas") == 1
    found.wake()
    assert len(loop.soon) == 2


@pytest.mark.parametrize("slept", [True, False])
def test_input_after_a_sleep_ends_its_round_at_once(
    slept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the loop is busy, input of several connections shares a round."""
    loop, done = Loop(), list[str]()
    found, _ = made(loop, done)
    monkeypatch.setattr(rounds, "SLEPT_NS", -1 if slept else 1 << 62)
    found.run_input(found.wake)
    assert bool(done) == slept
    assert bool(loop.soon) != slept


def test_a_closed_node_carries_out_nothing() -> None:
    loop, done = Loop(), list[str]()
    found, _ = made(loop, done)
    found.wake()
    found.close()
    loop.soon.pop()()
    assert done == []


@pytest.mark.provokes("node.fault")
async def test_jobs_come_every_so_many_ticks_and_fail_alone() -> None:
    done: list[str] = []

    def fault() -> None:
        raise KeyError("a fault of our own")

    ticks = Ticks(asyncio.get_running_loop(), LOG, lambda job: job())
    ticks.every(2, fault)
    ticks.every(1, lambda: done.append("each"))
    ticks.every(3, lambda: done.append("third"))
    for _ in range(6):
        ticks.close()
        ticks.tick()
    ticks.close()
    assert done == ["each", "each", "each", "third", "each", "each", "each", "third"]
