# cython: annotation_typing=False
"""Rounds of a node's event loop, and the jobs of its timer.

A round is one turn of the event loop that had work: readable sockets are parsed, then `Rounds.end`
carries out the steps: it seals and replicates entries, applies what is committed, and writes what
came of it (ADR 0001).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from operator import call
from typing import TYPE_CHECKING

import structlog

from convoymq.model.errors import BrokerError, ReplicaStopped
from convoymq.model.rounds import run_each
from convoymq.transport.clocks import until_beat

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker
    from convoymq.edges.edge import Edge
    from convoymq.shells.groups.host import ReplicaHost
    from convoymq.transport.links import Links

TICK_S = 0.1
SLEPT_NS = 15_000
"""A round that begins so long after the one before was waited for."""

Step = Callable[[], None]


class Rounds:
    """Ends the rounds of one node.

    Args:
        fail: ends the node, which cannot go on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        log: structlog.stdlib.BoundLogger,
        fail: Callable[[BrokerError], None],
    ) -> None:
        self._log = log
        self._fail = fail
        # Looked up once: they are used in every round.
        self._call_soon = loop.call_soon
        self._round = self.end
        self._steps: tuple[Step, ...] = ()
        self._replicas: Step | None = None
        self._scheduled = False
        self._reading = False
        """A connection is being read, which ends the round itself."""
        self._ended_ns = 0

    def carry_out(
        self,
        host: ReplicaHost,
        links: Links,
        broker: Broker | None = None,
        edges: Iterable[Edge] = (),
    ) -> None:
        """Makes the steps of every round from the parts that there are. Queues with a home come
        first: what they send leaves with the same flush of the links."""

        def end_homes() -> None:
            if broker is not None and broker.round_due:
                broker.end_of_round()

        def release_deferred() -> None:
            if host.deferred.release_due:
                host.deferred.release()
                links.flush()

        flushes = [edge.flush for edge in edges if edge.flush is not None]
        self._replicas = host.end_of_round
        self._steps = (end_homes, host.end_of_round, links.flush, *flushes, release_deferred)

    def close(self) -> None:
        """Ends the rounds: nothing is carried out any more."""
        self._steps = ()

    def wake(self) -> None:
        """Asks for the end of this round: a part has work for it."""
        if not self._scheduled:
            self._scheduled = True
            if not self._reading:
                self._call_soon(self._round)

    def run_input(self, read: Step) -> None:
        """Reads a connection, or does what a timer is for. When the loop has slept before, nothing
        else is likely to be ready: the round ends here instead of in a turn of the loop of its
        own."""
        due = self._scheduled
        if due:
            read()
            return
        self._reading = True
        try:
            read()
        finally:
            self._reading = False
            if self._scheduled:
                if time.monotonic_ns() - self._ended_ns > SLEPT_NS:
                    self.end()
                else:
                    self._call_soon(self._round)

    def end(self) -> None:
        """Ends the round."""
        self._scheduled = False
        run_each(self._steps, call, self._step_failed)
        self._ended_ns = time.monotonic_ns()

    def _step_failed(self, step: Step, error: Exception) -> None:
        """A step of a round failed outside of its members, which are contained one by one."""
        self._log.error("node.fault", message=f"in {step!r}", exc_info=error)
        if step == self._replicas:
            # The storage, or a replica that could not be stopped: the others must take over.
            self._fail(ReplicaStopped(f"a fault of this node in its replicas: {error!r}"))


class Ticks:
    """Does jobs every so many ticks of `TICK_S`, in the order in which they were added."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        log: structlog.stdlib.BoundLogger,
        run_input: Callable[[Step], None],
    ) -> None:
        self._loop = loop
        self._log = log
        self._run_input = run_input
        self._jobs: list[tuple[int, Step]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def every(self, ticks: int, job: Step) -> None:
        """Adds a job."""
        self._jobs.append((ticks, job))

    def tick(self) -> None:
        """Does what is due, and comes again."""
        delay_s = until_beat(self._loop.time(), TICK_S)
        self._timer = self._loop.call_later(delay_s, self._run_input, self.tick)
        self._count += 1
        due = [job for ticks, job in self._jobs if self._count % ticks == 0]
        run_each(due, call, self._job_failed)

    def close(self) -> None:
        """Ends the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _job_failed(self, job: Step, error: Exception) -> None:
        self._log.error("node.fault", message=f"in {job!r}", exc_info=error)
