"""Consumers with filters in the simulator: their nodes scan replicas and pick (ADR 0216).

Every message has a number, and a filter wants those with one rest of its division by three. The
real pickers run, on a simulated loop for each node; a node without a replica asks others. Consumers
with and without filters compete, settle, give back, drain and leave. When all is quiet, consumers
with filters are all that is left to empty the queues. What is in a queue is what the log has handed
out of it (`sim.given`). What is asserted, beyond what holds for every group:

- a consumer gets what its filter wants, and not more than it has credit for;
- a message is handed out again only when it has come back, and has counted that;
- what no consumer has had before comes to each in the order of the log;
- all comes in the end, what filters have passed by too, and was settled by whom it went to last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from convoymq.kernels import batch
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.filters import encoded
from convoymq.messages.amqp10.values import Described, Symbol, Value
from convoymq.messages.record import content_of, names_of
from convoymq.model.errors import Unavailable
from convoymq.model.tables import Table
from convoymq.queues.driver import GroupOptions
from convoymq.queues.interface import ConsumerSpec, Delivery, PublishOutcome, QueueClient
from convoymq.queues.quorum.client import QuorumClient
from convoymq.queues.quorum.queue import QuorumQueue
from convoymq.queues.reservation_reads import Fields
from convoymq.sim.clients import ChannelParts, ranges_of
from convoymq.sim.delivery_parts import Key, name_of
from convoymq.sim.engine import Result
from convoymq.sim.given import Given, GivenLoad, GivenReferee
from convoymq.sim.group_node import GroupNode
from convoymq.sim.group_world import GroupWorld
from convoymq.sim.loop import LoopTasks, SimLoop
from convoymq.sim.nodes import SimNode
from convoymq.sim.owners import OwnerChannel
from convoymq.sim.records import identity_of
from convoymq.sim.senders import WatchedQueue
from convoymq.sim.world import ChannelKind

RESTS = 3
ALL = -1
"""Rest of consumers without a filter."""
PLAIN_CHANCE = 0.25
"""Of a consumer to have no filter."""
PUBLISH_CHANCE = 0.5
SETTLE_CHANCE = 0.3
RETURN_CHANCE = 0.1
GRANT_CHANCE = 0.3
DRAIN_CHANCE = 0.2
LEAVE_CHANCE = 0.04
GRANT = 5
ASK_MS_MAX = 20


def rest_of(identity: bytes) -> int:
    """Returns the rest of a message's number."""
    return int.from_bytes(identity[4:], "big") % RESTS


def filters_of(rest: int) -> bytes:
    """Returns the filter that wants messages with a rest."""
    sql: dict[Value, Value] = {
        Symbol("sql-filter"): Described(Symbol("amqp:sql-filter"), f"n % {RESTS} = {rest}")
    }
    return encoded(sql)


class FilterReferee(GivenReferee):
    """The referee of one queue."""

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self.rests: dict[tuple[int, int], int] = {}
        """(session, consumer) -> rest that it wants."""
        self._acquired: dict[bytes, int] = {}
        self._newest: dict[tuple[int, int], Key] = {}
        """(session, consumer) -> the last place from which it got something fresh."""

    def on_given(self, given: Given, identity: bytes, acquired: int) -> None:
        """See `GivenReferee`."""
        consumer, key = given[:2], self.keys[identity]
        rest = self.rests[consumer]
        if rest not in (ALL, rest_of(identity)):
            self.fail(f"{given} gets {name_of(identity)}, and wants those with rest {rest}")
        if acquired <= self._acquired.get(identity, -1):
            self.fail(f"{given} gets {name_of(identity)}, which {self.last[identity]} has")
        self._acquired[identity] = acquired
        if not acquired:
            if key < self._newest.get(consumer, key):
                self.fail(f"{given} gets {name_of(identity)} behind {self._newest[consumer]}")
            self._newest[consumer] = key
        super().on_given(given, identity, acquired)


class FilterChannel(OwnerChannel):
    """A channel with consumers of one queue. What goes wrong ends it."""

    def __init__(self, parts: ChannelParts, *, load: FilterLoad) -> None:
        super().__init__(parts)
        self._load = load
        self._referee = load.referees[parts.group]
        self._count = 0
        self._consumers = 0
        self._waiting: dict[int, bytes] = {}
        """Tag -> message that is not confirmed."""
        self._limits: dict[int, int] = {}
        self._held: dict[int, list[int]] = {}
        """Consumer -> ids that it has and has not settled."""
        self._is_last = False
        queue = load.world.nodes[parts.node].queues[parts.group]
        client = queue.client(parts.session, self)
        assert isinstance(client, QuorumClient)
        self._stream = client
        self._next_turn()

    def _turn(self) -> None:
        chance = self._scheduler.chance
        if self._closed:
            return
        if not self._draining and chance(LEAVE_CHANCE):
            self._close()
            return
        if not self._consumers and not self._stream.queue.serves_outcomes:
            # Its version is not known here yet.
            pass
        elif self._draining:
            self._empty()
        elif not self._consumers:
            plain = chance(PLAIN_CHANCE)
            self._subscribe(ALL if plain else self._scheduler.between(0, RESTS - 1))
        else:
            self._work()
        self._next_turn()

    def _work(self) -> None:
        chance = self._scheduler.chance
        if self._parts.publishes and chance(PUBLISH_CHANCE):
            for _ in range(self._scheduler.between(1, 4)):
                self._publish()
        for consumer, ids in self._held.items():
            some = [number for number in ids if chance(0.6)]
            if not some:
                continue
            if chance(SETTLE_CHANCE):
                self._settle(consumer, some)
            elif chance(RETURN_CHANCE):
                self._held[consumer] = [number for number in ids if number not in some]
                self._stream.return_(consumer, ranges_of(some), failed=chance(0.5))
        for consumer in list(self._limits):
            if chance(GRANT_CHANCE):
                self._grant(consumer, drain=chance(DRAIN_CHANCE))

    def _empty(self) -> None:
        """Has the queue emptied by consumers with filters alone."""
        if not self._is_last:
            self._is_last = True
            for rest in range(RESTS):
                self._subscribe(rest)
        for consumer in list(self._limits):
            if self._referee.rests[self._stream.session, consumer] == ALL:
                # What it has not settled goes back.
                self._stream.remove(consumer)
                del self._limits[consumer], self._held[consumer]
        for consumer, ids in self._held.items():
            self._settle(consumer, list(ids))
        for consumer in list(self._limits):
            self._grant(consumer)

    # Publishing.

    def _publish(self) -> None:
        self._count += 1
        number = self._load.next_number()
        identity = self._number.to_bytes(4, "big") + number.to_bytes(8, "big")
        body = identity + bytes(self._scheduler.between(0, self._parts.config.body_max))
        properties = Properties(headers=Table.of({"n": number}))
        record = (names_of("", "q"), content_of(properties, body))
        self._waiting[self._count] = identity
        self._stream.target.publish(record, len(body), self._count, 0)
        self._parts.workload.published += 1

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `PublisherEvents`."""
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                identity = self._waiting.pop(tag)
                if outcome is PublishOutcome.ACCEPTED:
                    self._load.confirmed[self.group].add(identity)
                    self._parts.workload.confirmed += 1

    # Consuming.

    def _subscribe(self, rest: int) -> None:
        self._consumers += 1
        self._referee.rests[self._stream.session, self._consumers] = rest
        self._stream.subscribe(
            ConsumerSpec(
                number=self._consumers,
                tag=self.name,
                prefetch=0,
                no_ack=False,
                credited=True,
                hears_cancel=True,
                filters=filters_of(rest) if rest != ALL else b"",
            )
        )

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        if error is not None:
            self._close()
            return
        self._limits[consumer] = 0
        self._held[consumer] = []
        self._grant(consumer)

    def _grant(self, consumer: int, *, drain: bool = False) -> None:
        self._limits[consumer] += self._scheduler.between(1, GRANT)
        self._stream.grant(consumer, self._limits[consumer], drain=drain)

    def on_credit(self, client: QueueClient, consumer: int, granted: int, ready: int) -> None:
        """See `ClientEvents`: what a drain has left over of the credit is gone."""
        self._load.answers += 1

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """See `ClientEvents`."""
        self._close()

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """See `ClientEvents`."""
        consumer, count = delivery.consumer, delivery.messages
        if consumer not in self._limits:
            return
        for i in range(count):
            record = batch.record(delivery.block, delivery.command, delivery.first + i)
            given = Given(client.session, consumer, delivery.first_id + i)
            self._referee.on_received(given, identity_of(record))
            if given.number >= self._limits[consumer]:
                self._referee.fail(f"{given} is beyond the credit of {self._limits[consumer]}")
            self._held[consumer].append(given.number)
        self._parts.workload.delivered += count
        self._load.picked += count * (self._referee.rests[client.session, consumer] != ALL)

    def _settle(self, consumer: int, ids: list[int]) -> None:
        if not ids:
            return
        held, session = self._held[consumer], self._stream.session
        self._held[consumer] = [number for number in held if number not in ids]
        self._load.settled[self.group].update(Given(session, consumer, each) for each in ids)
        self._stream.settle(consumer, ranges_of(ids))
        self._parts.workload.settled += len(ids)

    # The end.

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._parts.trace.add(self.name, "close")
        self._stream.close()
        self._parts.on_closed(self)

    def waits_for(self) -> str:
        """See `OpenChannel`."""
        return f"{len(self._waiting)} confirms" if self._waiting else ""


class FilterNode(GroupNode):
    """A node whose pickers run on a simulated loop."""

    loop: SimLoop

    def make_loop(self) -> SimLoop:
        """Returns the loop of the process that runs."""
        known: SimLoop | None = getattr(self, "loop", None)
        if known is None or known.process is not self.process:
            self.loop = SimLoop(self.world.scheduler, self.process)
        return self.loop

    async def ask_member(self, number: int, request: list[object]) -> Fields:
        """Asks another node, as control requests do. Raises Unavailable, and what it raises."""
        group, _, *fields = request
        loop, peer = self.make_loop(), self.world.nodes[number]
        assert isinstance(group, int)
        for _ in range(2):
            await loop.pause(self.world.scheduler.between(0, ASK_MS_MAX) / 1000)
            if not (peer.alive and self.transport.is_connected(number) and group in peer.queues):
                raise Unavailable("the node does not answer")
        queue = peer.queues[group]
        assert isinstance(queue, QuorumQueue)
        return await queue.filter_reader.serve(fields)


class FilterWorld(GroupWorld):
    """See the module text."""

    load: FilterLoad
    node_class = FilterNode

    def crash(
        self,
        node: SimNode,
        *,
        restart_us: int,
        keep: float = 0.5,
        refuses: bool = False,
        wipe: bool = False,
    ) -> None:
        """See `World`."""
        if node.alive:
            self._end_loop(node)
        super().crash(node, restart_us=restart_us, keep=keep, refuses=refuses, wipe=wipe)

    def _end_loop(self, node: SimNode) -> None:
        assert isinstance(node, FilterNode)
        node.make_loop().end()

    def _final_checks(self) -> None:
        super()._final_checks()
        for node in self.nodes.values():
            self._end_loop(node)
        for group, referee in self.load.referees.items():
            referee.check(self.load.confirmed[group], self.load.settled[group])

    def report(self, result: Result) -> None:
        """See `Simulation`."""
        super().report(result)
        result.workload |= {"picked": self.load.picked, "answers": self.load.answers}


class FilterLoad(GivenLoad):
    """See the module text."""

    text = "consumers with filters of quorum queues"
    world_class = FilterWorld

    def begin(self, world: GroupWorld) -> None:
        """See `GroupLoad`."""
        super().begin(world)
        self.referees: dict[int, FilterReferee] = {}
        self.confirmed: dict[int, set[bytes]] = {}
        self.settled: dict[int, set[Given]] = {}
        self._numbers = self.picked = self.answers = 0

    def next_number(self) -> int:
        """Returns the number of a new message."""
        self._numbers += 1
        return self._numbers

    def make_referee(self, group: int, settings: dict[str, int]) -> FilterReferee:
        """See `GroupLoad`."""
        self.confirmed[group] = set()
        self.settled[group] = set()
        made = self.referees[group] = FilterReferee(group)
        return made

    def open_queue(self, node: GroupNode, parts: GroupOptions) -> WatchedQueue:
        """See `GivenLoad`."""
        assert isinstance(node, FilterNode)
        queue = WatchedQueue(**parts, ask_node=node.ask_member)
        queue.filter_reader.tasks = LoopTasks(node.make_loop())
        return queue

    def channel_kind(self, group: int) -> ChannelKind:
        """See `GroupLoad`."""
        return partial(FilterChannel, load=self)
