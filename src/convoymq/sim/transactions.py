"""Transactions over quorum queues in the simulator: all of one counts, in all of its queues, or
nothing.

A channel has streams into all queues. It publishes and settles by itself, and in transactions,
which the real `Discharge` commits. Nodes and channels go at any step of it; what they leave behind
the real resolvers of the queues finish. What is in a queue is what the log has handed out of it in
the end, as every message is. What is asserted, beyond what holds for every group:

- a message comes into its queue once, and clients get what the log has handed out to them;
- of a transaction all messages come into their queues, or none, and all that it has settled stays
  away, or all of it comes again;
- what a client was told of its transaction is so, and what was confirmed is there;
- a message that has left was settled by whom it was handed out to last;
- nothing stays prepared, and every queue of a committed transaction hears of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from convoymq.kernels import batch
from convoymq.model.errors import BrokerError
from convoymq.queues.dead_letter_publisher import DeadLetterOptions, DeadLetterRoutes
from convoymq.queues.driver import GroupOptions
from convoymq.queues.group_queue import GroupQueue
from convoymq.queues.interface import (
    ConsumerSpec,
    Delivery,
    PublishOutcome,
    QueueClient,
)
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.transactions import Discharge, State, Work
from convoymq.sim.clients import ChannelParts, ranges_of, record_of
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.delivery_parts import name_of
from convoymq.sim.engine import Result
from convoymq.sim.faults import Plan
from convoymq.sim.given import Given, GivenLoad, GivenReferee
from convoymq.sim.group_node import GroupNode
from convoymq.sim.group_world import GroupWorld
from convoymq.sim.owners import OwnerChannel
from convoymq.sim.records import identity_of
from convoymq.sim.senders import WatchedQueue
from convoymq.sim.world import ChannelKind

DEADLINES_MS = (5, 30, 200, 5_000, 20_000)
COMMIT_CHANCE = 0.4
PUBLISH_CHANCE = 0.5
SETTLE_CHANCE = 0.2
LEAVE_CHANCE = 0.02
TIMEOUT_CHANCE = 0.02
"""Of a turn while a transaction is under way: its client has waited for long enough."""
PUBLISHED_MAX = 3
PREFETCH = 20


@dataclass(slots=True)
class _Part:
    """Part of a transaction in one queue."""

    published: list[bytes]
    settled: list[Given]


@dataclass(slots=True)
class _Transaction:
    parts: dict[int, _Part]
    """Group -> its part."""
    told: State | None = None


@dataclass(slots=True)
class Book:
    """Record of what all channels did, and were told."""

    transactions: dict[str, _Transaction] = field(default_factory=dict)
    sent: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    """Message -> its queue, and its transaction, if it has one."""
    confirmed: set[bytes] = field(default_factory=set)
    settled: set[tuple[int, Given]] = field(default_factory=set)
    """Messages that channels have settled by themselves."""

    def check(self, queues: dict[int, TransactionReferee]) -> None:
        """Asserts what holds at the end, when all queues are empty."""
        ended = set(self.settled)
        for id, each in self.transactions.items():
            ended |= self._check_one(id, each, queues)
        for identity in self.confirmed:
            group = self.sent[identity][0]
            if identity not in queues[group].keys:
                queues[group].fail(f"{name_of(identity)} was confirmed, and never came")
        for group, queue in queues.items():
            for identity, last in queue.last.items():
                if (group, last) not in ended:
                    queue.fail(f"{name_of(identity)} has left, and {last} was not settled")

    def _check_one(
        self, id: str, each: _Transaction, queues: dict[int, TransactionReferee]
    ) -> set[tuple[int, Given]]:
        """Returns what it has settled."""
        came = {
            (group, identity.hex()): identity in queues[group].keys
            for group, part in each.parts.items()
            for identity in part.published
        }
        happened = any(came.values())
        if happened != all(came.values()):
            raise InvariantBroken(f"transaction {id} came by halves: {came}")
        is_told = each.told in (State.COMMITTED, State.ABORTED)
        if is_told and happened != (each.told is State.COMMITTED):
            raise InvariantBroken(f"transaction {id} was {each.told}: {came}")
        settled = {(group, given) for group, part in each.parts.items() for given in part.settled}
        for group, given in settled:
            identity = queues[group].given[given]
            if happened != (queues[group].last[identity] == given):
                queues[group].fail(f"{id} happened: {happened}; not so its settling of {given}")
        return settled if happened else set()


class TransactionReferee(GivenReferee):
    """The referee of one queue."""

    def __init__(self, group: int, book: Book) -> None:
        super().__init__(group)
        self._book = book

    def on_given(self, given: Given, identity: bytes, acquired: int) -> None:
        """See `GivenReferee`."""
        group, id = self._book.sent[identity]
        if group != self.group:
            self.fail(f"{name_of(identity)} is of queue {group}")
        if id and self._book.transactions[id].told is State.ABORTED:
            self.fail(f"{name_of(identity)} is handed out, and {id} was aborted")
        super().on_given(given, identity, acquired)

    def unfinished(self, machine: QuorumMachine) -> tuple[object, ...]:
        """See `GivenReferee`."""
        known = machine.transactions
        untold = [id for id, each in known.decided.items() if each.left]
        return *super().unfinished(machine), sorted(known.prepared), untold


class TransactionChannel(OwnerChannel):
    """One channel with streams into all queues. What goes wrong ends it, and its streams."""

    def __init__(self, parts: ChannelParts, *, load: TransactionLoad) -> None:
        super().__init__(parts)
        self._load = load
        self._own = load.world.nodes[parts.node]
        self._count = 0
        self._commits = 0
        self._consumers = 0
        self._waiting: dict[int, bytes] = {}
        """Tag -> message that is not confirmed."""
        self._running: Discharge | None = None
        self._broken = False
        self._clients: dict[int, QueueClient] = {}
        self._held: dict[int, list[Given]] = {}
        for group, queue in sorted(self._own.queues.items()):
            self._clients[group] = queue.client(self._own.new_session(), self)
            self._held[group] = []
            self._subscribe(group)
        self._next_turn()

    def _turn(self) -> None:
        chance = self._scheduler.chance
        if self._closed:
            return
        if not self._draining and chance(LEAVE_CHANCE):
            self._close()
            return
        if self._running is not None:
            if chance(TIMEOUT_CHANCE):
                self._running.time_out(BrokerError("late"))
        elif self._broken:
            self._close()
            return
        else:
            self._work()
        self._next_turn()

    def _work(self) -> None:
        chance, groups = self._scheduler.chance, sorted(self._clients)
        if self._draining or chance(SETTLE_CHANCE):
            for group in groups:
                self._settle(group)
        elif chance(COMMIT_CHANCE):
            if all(queue.serves_transactions for queue in self._own.queues.values()):
                self._commit(groups)
        elif self._parts.publishes and chance(PUBLISH_CHANCE):
            group = self._scheduler.rng.choice(groups)
            for identity in self._draw(group, ""):
                self._waiting[self._count] = identity
                self._publish(group, identity, self._count)

    # Publishing.

    def _draw(self, group: int, id: str) -> list[bytes]:
        """Returns new messages."""
        made = []
        for _ in range(self._scheduler.between(1, 1 if not id else PUBLISHED_MAX)):
            self._count += 1
            made.append(self._number.to_bytes(4, "big") + self._count.to_bytes(8, "big"))
            self._load.book.sent[made[-1]] = group, id
        self._parts.workload.published += len(made)
        return made

    def _publish(self, group: int, identity: bytes, tag: int) -> None:
        body = identity + bytes(self._scheduler.between(0, self._parts.config.body_max))
        self._clients[group].target.publish(record_of(body), len(body), tag, 0)

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `PublisherEvents`."""
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                identity = self._waiting.pop(tag)
                if outcome is PublishOutcome.ACCEPTED:
                    self._load.book.confirmed.add(identity)
                    self._parts.workload.confirmed += 1

    # Consuming.

    def _subscribe(self, group: int) -> None:
        self._consumers += 1
        tag = f"{self.name}-{self._consumers}"
        self._clients[group].subscribe(
            ConsumerSpec(number=self._consumers, tag=tag, prefetch=PREFETCH, no_ack=False)
        )

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        self._broken |= error is not None

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """See `ClientEvents`."""
        self._broken = True

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """See `ClientEvents`."""
        group = client.queue.group
        for i in range(delivery.messages):
            given = Given(client.session, delivery.consumer, delivery.first_id + i)
            record = batch.record(delivery.block, delivery.command, delivery.first + i)
            self._load.referees[group].on_received(given, identity_of(record))
            self._held[group].append(given)
        self._parts.workload.delivered += delivery.messages

    def _settle(self, group: int) -> None:
        """Settles what the channel has of a queue, by itself."""
        held, self._held[group] = self._held[group], []
        self._load.book.settled.update((group, given) for given in held)
        self._tell(group, held)

    def _tell(self, group: int, held: list[Given]) -> None:
        for consumer in sorted({given.consumer for given in held}):
            numbers = sorted(given.number for given in held if given.consumer == consumer)
            self._clients[group].settle(consumer, ranges_of(numbers))
        self._parts.workload.settled += len(held)

    # Transactions.

    def _commit(self, groups: list[int]) -> None:
        rng = self._scheduler.rng
        self._commits += 1
        id = f"{self.name}-{self._commits}"
        made = _Transaction({})
        self._load.book.transactions[id] = made
        works = []
        for group in rng.sample(groups, self._scheduler.between(1, len(groups))):
            taken = [given for given in self._held[group] if rng.random() < 0.6]
            self._held[group] = [given for given in self._held[group] if given not in taken]
            part = made.parts[group] = _Part(self._draw(group, id), taken)
            tell = partial(self._tell_part, group, part)
            works.append(Work(self._own.queues[group], self._clients[group], tell, False))
        deadline_ms = self._own.clock.now_ms() + rng.choice(DEADLINES_MS)
        self._parts.trace.add(self.name, f"commits {id} in {sorted(made.parts)}")
        self._running = Discharge(id, works, deadline_ms, self._later, partial(self._done, id))
        self._running.start()

    def _tell_part(self, group: int, part: _Part) -> None:
        self._tell(group, part.settled)
        for identity in part.published:
            self._publish(group, identity, 0)

    def _later(self, delay_s: float, call: object) -> None:
        self._scheduler.after(int(delay_s * 1e6), self._parts.process, call)  # type: ignore[arg-type]

    def _done(self, id: str, state: State, error: BrokerError | None) -> None:
        text = error.text if error is not None else ""
        self._parts.trace.add(self.name, f"{id} is {state.value} {text}")
        self._load.book.transactions[id].told = state
        self._load.ended[state] += 1
        self._running = None
        # What it has tried to settle goes back with its streams.
        self._broken |= state is not State.COMMITTED

    # The end.

    def _close(self) -> None:
        self._closed = True
        self._parts.trace.add(self.name, "close")
        for client in self._clients.values():
            client.close()
        self._parts.on_closed(self)

    def waits_for(self) -> str:
        """See `OpenChannel`."""
        pending = sum(len(client.target.pending) for client in self._clients.values())
        waits = (self._running is not None, self._broken, len(self._waiting), pending)
        return f"{waits}" if any(waits) else ""


class _Routes:
    """Way from a queue to others, on one node."""

    def __init__(self, node: GroupNode) -> None:
        self._node = node

    def queue_of_group(self, _vhost: str, _name: str, group: int) -> GroupQueue:
        """See `DeadLetterRoutes`."""
        return self._node.queues[group]


class TransactionWorld(GroupWorld):
    """See the module text."""

    load: TransactionLoad

    def _final_checks(self) -> None:
        super()._final_checks()
        self.load.book.check(self.load.referees)

    def report(self, result: Result) -> None:
        """See `Simulation`."""
        super().report(result)
        result.workload |= {state.value: count for state, count in self.load.ended.items()}


class TransactionLoad(GivenLoad):
    """See the module text."""

    text = "transactions over two or three quorum queues"
    world_class = TransactionWorld

    def begin(self, world: GroupWorld) -> None:
        """See `GroupLoad`."""
        super().begin(world)
        self.book = Book()
        self.referees: dict[int, TransactionReferee] = {}
        self.ended = dict.fromkeys((State.COMMITTED, State.ABORTED, State.UNKNOWN), 0)

    def make_plan(self, seed: int, faults: Collection[str] | None) -> Plan:
        """See `PlannedLoad`: all groups are on few nodes."""
        return replace(super().make_plan(seed, faults), groups=2 + seed % 2)

    def make_referee(self, group: int, settings: dict[str, int]) -> TransactionReferee:
        """See `GroupLoad`."""
        made = self.referees[group] = TransactionReferee(group, self.book)
        return made

    def open_queue(self, node: GroupNode, parts: GroupOptions) -> WatchedQueue:
        """See `GivenLoad`."""
        routes = cast(DeadLetterRoutes, _Routes(node))
        options = DeadLetterOptions(routes=routes, confirm_timeout_ms=2_000)
        return WatchedQueue(**parts, dead_letters=options)

    def channel_kind(self, group: int) -> ChannelKind:
        """See `GroupLoad`."""
        return partial(TransactionChannel, load=self)
