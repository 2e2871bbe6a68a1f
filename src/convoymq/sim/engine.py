"""Engine of every simulation: chaos first, then everything heals and all promises fall due.

Safety is checked all the time, liveness in the second phase: within a bounded simulated time
nothing may be left undone, and within a shorter one something has to be done.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from convoymq.model.errors import InvariantViolated
from convoymq.sim.clock import Scheduler
from convoymq.sim.disk import PowerLost

EVENTS_MAX = 3_000_000
STALLED_US = 60_000_000
"""So long nothing of what is unfinished may stay as it is. A run with many messages has more time
until its end, but not for any single step towards it."""


class NotLive(AssertionError):
    """Something that had to happen in the quiet phase did not."""


@dataclass(slots=True)
class Result:
    """Result of a run."""

    seed: int
    failure: str | None = None
    detail: str = ""
    simulated_us: int = 0
    events: int = 0
    digest: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    workload: dict[str, int] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


class Simulation(ABC):
    """One run.

    Args:
        chaos_us: length of the first phase.
    """

    check_every_us = 200_000
    """Time between two looks at what is unfinished."""

    def __init__(self, seed: int, chaos_us: int) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.quiet = False
        self._chaos_us = chaos_us

    def own_rng(self, salt: int) -> Random:
        """Returns a source of draws of its own: with it or without, all other draws stay equal."""
        return Random(self.seed ^ salt)

    def run(self) -> None:
        """Chaos, then quiet. Raises what broke."""
        self._begin()
        self._first_phase()
        self.quiet = True
        self._heal()
        limit_us = self.scheduler.now_us + self._patience_us()
        former, stalled_us = list[str](), 0
        while True:
            self._run_until(self.scheduler.now_us + self.check_every_us)
            waiting = self._unfinished()
            if not waiting:
                break
            now_us = self.scheduler.now_us
            if waiting != former:
                former, stalled_us = waiting, now_us + STALLED_US
            if now_us >= min(limit_us, stalled_us):
                self._give_up(waiting)
        self._final_checks()

    def _first_phase(self) -> None:
        self._run_until(self._chaos_us)

    @abstractmethod
    def _begin(self) -> None:
        """Starts what runs, the load and the faults."""

    @abstractmethod
    def _heal(self) -> None:
        """Ends all faults."""

    @abstractmethod
    def _patience_us(self) -> int:
        """Returns the longest time that the quiet phase may take."""

    @abstractmethod
    def _unfinished(self) -> list[str]:
        """Returns what has not come to its end."""

    def _give_up(self, waiting: list[str]) -> None:
        raise NotLive("still waiting for: " + "; ".join(waiting[:20]))

    @abstractmethod
    def _final_checks(self) -> None:
        """Checks what holds at the end. Raises what does not."""

    def _on_power_lost(self, node: int) -> None:
        """The power of a node went in the middle of a file operation."""
        raise NotImplementedError

    def _run_until(self, until_us: int) -> None:
        while True:
            try:
                if self.scheduler.run(until_us, EVENTS_MAX):
                    return
                break
            except PowerLost as lost:
                self._on_power_lost(lost.node)
        raise NotLive(f"more than {EVENTS_MAX} events: somebody is turning in circles")

    @abstractmethod
    def report(self, result: Result) -> None:
        """Fills in the digest, faults, counters and trace of a run."""


def run_simulation(world: Simulation) -> Result:
    """Runs a world; a failure is in the result, with the tail of the trace."""
    result = Result(world.seed)
    try:
        world.run()
    except (Exception, InvariantViolated) as error:
        result.failure = f"{type(error).__name__}: {error}"
        result.detail = traceback.format_exc()
    result.simulated_us = world.scheduler.now_us
    result.events = world.scheduler.events
    world.report(result)
    return result
