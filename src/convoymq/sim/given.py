"""Base of the loads of links, transactions and filters, and of their referees: messages of a quorum
queue by what the log has handed out of it. In the end every message was handed out, and settled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple, NoReturn

from convoymq.kernels import batch
from convoymq.queues.driver import GroupOptions
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_DELIVER, Effect, Machine
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.delivery_parts import Key, name_of
from convoymq.sim.faults import KINDS, Plan
from convoymq.sim.group_node import GroupNode
from convoymq.sim.group_world import GroupLoad
from convoymq.sim.machines import FAULTS
from convoymq.sim.records import identity_of
from convoymq.sim.senders import WatchedQueue

INVARIANTS_EVERY = 4
"""Entries of a run after which a machine checks itself."""


class Given(NamedTuple):
    """A message as it was handed out."""

    session: int
    consumer: int
    number: int


class GivenReferee:
    """The referee of one queue; a `GroupReferee`."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.index = 0
        self._names: dict[Key, bytes] = {}
        """Place in the log -> message; of those that were resent, several."""
        self.keys: dict[bytes, Key] = {}
        """Message -> place in the log from which it came into the queue."""
        self.given: dict[Given, bytes] = {}
        self.last: dict[bytes, Given] = {}
        """Message -> how it was handed out last."""
        self._left = ""

    def fail(self, text: str) -> NoReturn:
        """Stops the run."""
        raise InvariantBroken(f"queue {self.group}, entry {self.index}: {text}")

    def on_entry(self, index: int, data: bytes, effects: list[Effect]) -> None:
        """See `GroupReferee`."""
        self.index = index
        for kind, _, session, seq, count, arg, offset, _ in batch.commands(data):
            if kind == batch.CMD_ENQUEUE:
                for i in range(count):
                    self._names[index, offset, i] = identity_of(batch.record(data, offset, i))
            elif kind == batch.CMD_CHECKOUT:
                self.on_checkout(session, seq, arg, batch.command_body(data, offset), count)
        for effect in effects:
            self.on_effect(effect)

    def on_checkout(self, session: int, seq: int, number: int, body: bytes, count: int) -> None:
        """A consumer is to begin."""

    def on_effect(self, effect: Effect) -> None:
        """The queue has done something, in the order of the log."""
        if effect[0] == EFFECT_DELIVER:
            _, session, consumer, first_id, at, offset, first, count, acquired, *_ = effect
            for i in range(count):
                key = (at, offset, first + i)
                identity = self._names[key]
                if self.keys.setdefault(identity, key) != key:
                    before = self.keys[identity]
                    self.fail(f"{name_of(identity)} is in the queue as {key}, and as {before}")
                self.on_given(Given(session, consumer, first_id + i), identity, acquired)

    def on_given(self, given: Given, identity: bytes, acquired: int) -> None:
        """The queue has handed a message out."""
        self.given[given] = identity
        self.last[identity] = given

    def check_machine(self, machine: Machine) -> None:
        """See `GroupReferee`."""
        assert isinstance(machine, QuorumMachine)
        if not self.index % INVARIANTS_EVERY:
            check_invariants(machine)
        waits = self.unfinished(machine)
        self._left = f"queue {self.group} has {waits}" if any(waits) else ""

    def unfinished(self, machine: QuorumMachine) -> tuple[object, ...]:
        """Returns what is left in a queue; true values have to go."""
        totals = machine.totals()
        return ({name: totals[name] for name in ("ready", "unacked") if totals[name]},)

    def waits_for(self) -> str:
        """See `GroupReferee`."""
        return self._left

    def on_received(self, given: Given, identity: bytes) -> None:
        """A client got a message."""
        if self.given.get(given) != identity:
            self.fail(f"{given} got {name_of(identity)}, which the log did not give it")

    def check(self, confirmed: set[bytes], settled: set[Given]) -> None:
        """Asserts what holds at the end, when the queue is empty."""
        for identity in confirmed:
            if identity not in self.keys:
                self.fail(f"{name_of(identity)} was accepted, and never came")
        for identity, last in self.last.items():
            if last not in settled:
                self.fail(f"{name_of(identity)} has left, and {last} was not settled")


class GivenLoad(GroupLoad):
    """A load of quorum queues whose messages leave only when they are settled."""

    machine_class = QuorumMachine
    kinds = tuple(kind for kind in KINDS if kind in FAULTS | {"membership"})

    def make_plan(self, seed: int, faults: Collection[str] | None) -> Plan:
        """See `PlannedLoad`."""
        plan = super().make_plan(seed, faults)
        settings = {**plan.settings, "delivery_limit": -1, "single_active": False}
        return replace(plan, settings=settings)

    def make_queue(self, node: GroupNode, parts: GroupOptions) -> WatchedQueue:
        """See `GroupLoad`."""
        queue = self.open_queue(node, parts)
        queue.watch(self.world.workload, self.world.plan.lag_entries_max)
        return queue

    def open_queue(self, node: GroupNode, parts: GroupOptions) -> WatchedQueue:
        """Returns the handle of a group on a node."""
        return WatchedQueue(**parts)
