"""Follows a queue that a host keeps: what it takes in, gives out, takes back and lets go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from convoymq.kernels.batch import record
from convoymq.queues.classic.machine import DELIVER, GOT, PURGED, ClassicMachine
from convoymq.queues.classic.runs import Block, Run
from convoymq.queues.mirrored.master import MasterQueue
from convoymq.sim.clients import Traits
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.hosted.outcomes import Outcomes, Said
from convoymq.sim.records import identity_of

INVARIANTS_EVERY = 4


class QueueReferee(ABC):
    """Judges one queue. Implements `ChannelReferee`."""

    queue: MasterQueue | None = None
    """The queue, while it is open at its newest home."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: dict[bytes, set[Said]] = {}
        """Message -> all that consumers ever said of it."""

    def fail(self, text: str) -> NoReturn:
        """Stops the run."""
        raise InvariantBroken(f"queue {self.name}: {text}")

    @abstractmethod
    def watch(self, queue: MasterQueue) -> None:
        """The queue was opened."""

    @abstractmethod
    def on_sent(self, identity: bytes, traits: Traits) -> None:
        """A channel publishes a message."""

    @abstractmethod
    def on_confirmed(self, identity: bytes) -> None:
        """A channel was told that a message is safe."""

    @abstractmethod
    def on_received(self, receiver: tuple[int, int, int], identity: bytes, acquired: int) -> None:
        """A channel got a message, which had been returned `acquired` times.

        Args:
            receiver: session, consumer and number of the delivery.
        """

    @abstractmethod
    def waits_for(self) -> str:
        """Returns what has to happen before the end."""


@dataclass(frozen=True, slots=True)
class Found:
    """A message in an opened queue."""

    identity: bytes
    position: int
    run: Run


@dataclass(frozen=True, slots=True)
class Given:
    """A message on its way to a channel."""

    identity: bytes
    acquired: int
    """Returns before this delivery."""
    receiver: tuple[int, int, int]
    """(session, consumer, number)"""


class Book(ABC):
    """The messages in a queue, and who has them."""

    def __init__(self, referee: QueueReferee) -> None:
        self.referee = referee
        self.begin_again()
        self._looks = 0

    def begin_again(self) -> None:
        """The queue is opened anew, with nothing in the book."""
        self.alive: dict[int, bytes] = {}
        """Position -> message, of what is in the queue."""
        self.positions: dict[bytes, int] = {}
        self.given: dict[bytes, int] = {}
        """Message that somebody has, or had -> returns before its last delivery."""
        self.held: set[bytes] = set()
        self._unsaid: list[int] = []
        """Positions (first, last, …) that are gone, and that the log need not know of."""
        self.missing = 0
        """Messages that are there, and cannot be read."""
        self.outcomes = Outcomes(self.referee.told, self.referee.fail)

    def put(self, identity: bytes, position: int) -> None:
        """A message is in the queue."""
        self.alive[position] = identity
        self.positions[identity] = position

    def found_in(self, machine: ClassicMachine) -> Iterator[Found]:
        """Yields the messages that an opened queue has."""
        for run in machine.backing.walk(machine.backing.level_max, 0):
            data, command = machine.body_of(run.block)
            for i in range(run.count):
                identity = identity_of(record(data, command, run.first + i))
                self.outcomes.found(identity, run)
                yield Found(identity, run.position + i, run)

    def follow(self, queue: MasterQueue) -> None:
        """Has an opened queue report what it does."""
        machine = queue.machine
        add, give_back, carry_out = machine._add, machine.give_back, queue._carry_out
        forget = machine.forget

        def added(block: Block) -> None:
            assert block.data is not None
            for i in range(block.count):
                identity = identity_of(record(block.data, block.command, i))
                self.on_added(identity, block.position + i, block)
                self.put(identity, block.position + i)
            add(block)

        def given_back(runs: list[Run]) -> None:
            for run in runs:
                for position in range(run.position, run.position + run.count):
                    self.on_returned(position)
            give_back(runs)

        def forgotten(run: Run) -> None:
            if not run.block.is_logged:
                self._unsaid += (run.position, run.position + run.count - 1)
            forget(run)

        def carried_out() -> None:
            self._look(machine)
            carry_out()

        self.outcomes.follow(machine)
        machine._add = added  # type: ignore[method-assign]
        machine.give_back = given_back  # type: ignore[method-assign]
        machine.forget = forgotten  # type: ignore[method-assign]
        queue._carry_out = carried_out  # type: ignore[method-assign]

    @abstractmethod
    def on_added(self, identity: bytes, position: int, block: Block) -> None:
        """A message comes into the queue."""

    def on_returned(self, position: int) -> None:
        """A message comes back from a channel."""
        self.held.discard(self.alive[position])

    def on_given(self, given: Given, now_ms: int) -> None:
        """A message is given to a channel: the one that has none."""
        identity = given.identity
        if identity not in self.positions:
            self.referee.fail(f"{identity.hex()} is given, and is gone")
        if identity in self.held and given.acquired <= self.given[identity]:
            self.referee.fail(f"{identity.hex()} is given to a second one")
        self.held.add(identity)
        self.given[identity] = given.acquired

    @abstractmethod
    def on_gone(self, identity: bytes, position: int, now_ms: int, *, purged: bool) -> None:
        """A message leaves the queue."""

    def _look(self, machine: ClassicMachine) -> None:
        """Follows what a batch of commands, or the time, has brought about."""
        now_ms, purged = machine.now_ms, False
        for effect in machine.effects:
            if effect[0] == DELIVER:
                _, session, consumer, number, (data, command), first, count, *more = effect
                acquired, said = more[0], more[1:]
                for i in range(count):
                    identity = identity_of(record(data, command, first + i))
                    given = Given(identity, acquired, (session, consumer, number + i))
                    self.on_given(given, now_ms)
                    self.outcomes.on_given(identity, given.receiver, said, now_ms)
            elif effect[0] == GOT and effect[2] is not None:
                _, session, (data, command), first, number, acquired, _ = effect
                identity = identity_of(record(data, command, first))
                self.on_given(Given(identity, acquired, (session, 0, number)), now_ms)
            purged = purged or effect[0] == PURGED
        self.outcomes.on_looked()
        settled = [*machine.settled, *self._unsaid]
        self._unsaid.clear()
        for first, last in zip(settled[::2], settled[1::2], strict=True):
            for position in range(first, last + 1):
                self._let_go(position, now_ms, purged=purged)
        here = machine.ready_count + machine.unsettled_count + machine.leaving.count
        here += machine.aside.count
        if not len(self.alive) <= here <= len(self.alive) + self.missing:
            self.referee.fail(f"{here} messages are there, the book has {len(self.alive)}")
        self._looks += 1
        if not self._looks % INVARIANTS_EVERY:
            machine.check_invariants()

    def _let_go(self, position: int, now_ms: int, *, purged: bool) -> None:
        identity = self.alive.pop(position, None)
        if identity is None:
            # A span that is purged names all positions from its first to its last.
            if not purged:
                self.referee.fail(f"position {position} goes, and nothing is there")
            return
        self.on_gone(identity, position, now_ms, purged=purged)
        if self.positions.get(identity) == position:
            del self.positions[identity]
        self.held.discard(identity)
