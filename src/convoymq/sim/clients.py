"""Simulated channels: they publish, consume, acknowledge, reject, get, cancel, close, and reopen.

A channel uses the real client of a quorum queue, as an AMQP channel does, and reports to the
referee what it is told. What it does is drawn from the run's randomness. Every message is one of a
kind: its body begins with the publisher's number and a count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from convoymq.kernels import batch
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.values import Symbol, encode
from convoymq.messages.attributes import DELAY, GROUP_ID
from convoymq.messages.record import PERSISTENT, content_of, names_of, read_record, traits_of
from convoymq.model.errors import Unavailable
from convoymq.model.tables import Field, Table, text_of
from convoymq.queues.group_queue import GroupQueue
from convoymq.queues.interface import (
    NO_LEADER,
    ClientEvents,
    ConsumerSpec,
    Delivery,
    GetResult,
    Modification,
    PublishOutcome,
    Queue,
    QueueClient,
)
from convoymq.queues.quorum.client import QuorumClient
from convoymq.queues.session_client import SessionClient
from convoymq.sim.clock import Process, Scheduler
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.ready_lines import group_of
from convoymq.sim.records import identity_of
from convoymq.sim.referee import Referee
from convoymq.sim.trace import Trace

GROUPS = (b"a", b"b", b"c", b"d", b"e")
"""Message groups, of all publishers."""
MESSAGE_IDS_KEPT = 60
"""Of one queue, among which a publisher chooses what it repeats."""
GRANT_MAX = 50
"""Credit of consumers that empty a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Behaviour of channels in one run. Chances are per turn of a channel."""

    turn_min_us: int = 1_000
    turn_max_us: int = 40_000
    publish_chance: float = 0.6
    burst_max: int = 8
    unconfirmed_max: int = 40
    body_max: int = 200
    body_large_chance: float = 0.0
    body_large_max: int = 20_000
    consume_chance: float = 0.2
    prefetch_max: int = 20
    no_ack_chance: float = 0.1
    priority_chance: float = 0.2
    settle_chance: float = 0.6
    reject_chance: float = 0.05
    requeue_chance: float = 0.1
    get_chance: float = 0.02
    get_no_ack_chance: float = 0.3
    """Of calls of get: nothing has to be acknowledged."""
    cancel_chance: float = 0.02
    credit_chance: float = 0.02
    pause_chance: float = 0.0
    purge_chance: float = 0.0
    close_chance: float = 0.01
    attribute_chance: float = 0.0
    """Of messages: they carry a priority, an expiration or a group, where their queue serves
    these."""
    repeat_chance: float = 0.0
    """Of messages: they have the message-id of an earlier one of their queue, where these mean
    something. The others have new ones."""
    delay_chance: float = 0.0
    """Of messages: they are to wait, where their queue serves that."""
    lose_chance: float = 0.0
    """Of those that close: their session is left behind."""
    late_chance: float = 0.0
    """Of a consumer: it acknowledges too late, so its channel returns what it holds and ends it."""
    outcome_chance: float = 0.0
    """Of a consumer with credit, and of a settling that says more of messages."""
    body_fixed: int = -1
    """Size of all bodies behind what makes them one of a kind; -1 = each has its own. A queue
    counts bytes exactly where they are equal."""


UNTRIED = 0.2
"""Share of what goes back unfailed that its client has only looked at."""


class Workload:
    """Counters over all channels of a world."""

    def __init__(self) -> None:
        self.publishers = 0
        self.published = 0
        self.confirmed = 0
        self.delivered = 0
        self.settled = 0
        self.channels = 0
        self.read = 0
        """Rows of reservations that were read."""
        self.message_ids: dict[int, deque[bytes]] = {}
        """Group -> the latest message-ids that were published to it, by whomever."""
        self.channels_disturbed = 0
        """Events by which a queue may forget what it has handed out."""
        self.sent_locally = 0
        """Messages that the replica on the consumer's node sent."""
        self.sent_by_leader = 0
        """Messages that a leader sent to another node, instead or as well."""


class ChannelReferee(Protocol):
    """Referee that a channel tells which of its messages are safe."""

    def on_confirmed(self, identity: bytes) -> None:
        """A publisher was told that a message is safe."""


@dataclass(slots=True, kw_only=True)
class Traits:
    """Properties of a message; None = it does not have that one."""

    priority: int | None = None
    expiration: int | None = None
    """In ms."""
    group: bytes | None = None
    message_id: bytes | None = None
    delay: int | None = None
    """In ms."""
    persistent: bool = False

    @property
    def flags(self) -> int:
        """Returns the flags of a publish."""
        has_more = self.group is not None or self.delay is not None
        return (self.priority is not None) << 1 | (self.expiration is not None) << 2 | has_more << 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelParts:
    """Parts that a channel is made with."""

    scheduler: Scheduler
    trace: Trace
    process: Process
    node: int
    group: int
    queue: Queue
    session: int
    config: ClientConfig
    workload: Workload
    referee: ChannelReferee
    """Referee of its queue."""
    publishes: bool
    consumes: bool
    on_closed: Callable[..., None]


class Credit:
    """Credit of a consumer, as its client knows it."""

    def __init__(self) -> None:
        self.limit = 0
        """By the last answer."""
        self.asked: deque[tuple[int, bool]] = deque()
        """Limits that were asked for since, and whether they drain."""


class Channel(ClientEvents):
    """One channel of one node into one queue."""

    def __init__(self, parts: ChannelParts) -> None:
        self._scheduler = parts.scheduler
        self._trace = parts.trace
        self._process = parts.process
        self.node = parts.node
        self.group = parts.group
        self.config = parts.config
        self._workload = workload = parts.workload
        self._referee = parts.referee
        self.publishes = parts.publishes
        self.consumes = parts.consumes
        self._on_closed = parts.on_closed
        workload.publishers += 1
        workload.channels += 1
        self.publisher = workload.publishers
        self.name = f"chan{self.publisher}"
        #: Draws of its own: runs without attributes stay as they were.
        self._attributes = Random(self.publisher)
        self._groups = Random(self.publisher ^ 0x6709)
        self._repeats = Random(self.publisher ^ 0xDED)
        self._delays = Random(self.publisher ^ 0xDE1A)
        self._lates = Random(self.publisher ^ 0x1A7E)
        self._outcomes = Random(self.publisher ^ 0x0C0E)
        self._credits: dict[int, Credit] = {}
        """Consumers with credit."""
        self._avoids: dict[int, set[bytes]] = {}
        """Consumer -> messages that it called undeliverable."""
        self._given: dict[tuple[int, int], bytes] = {}
        """(consumer, message id) -> message; of those that it may call so."""
        #: The same for who looks at messages only.
        self._looks = Random(self.publisher ^ 0x100C)
        self._count = 0
        self._tag = 0
        self.unconfirmed: dict[int, bytes] = {}
        self.confirmed: list[bytes] = []
        self.refused = 0
        self._numbers = 0
        self._consumers: dict[int, bool] = {}
        """Number -> no_ack, of consumers that are subscribed."""
        self._asked: set[int] = set()
        self._last_id: dict[int, int] = {}
        self._last_fresh: dict[tuple[int, int, int | None, bytes | None], int] = {}
        self._paused: set[int] = set()
        """Consumers whose deliveries the client drops for now."""
        self._seen: dict[bytes, int] = {}
        """Message -> how often it had been given out when it came here last."""
        self.held: dict[int, list[int]] = {}
        """Consumer number -> message ids not settled yet, ascending."""
        self.blocked = False
        self.closed = False
        self.lost = False
        """The node has forgotten the channel; nobody has closed its session."""
        self.draining = False
        self._gets = 0
        self._prepare()
        self.client: QueueClient = parts.queue.client(parts.session, self)
        self._session: int = self.client.session
        self._next_turn()

    def _prepare(self) -> None:
        """Sets what a kind of channel has of its own."""

    @property
    def _deliveries(self) -> Referee:
        assert isinstance(self._referee, Referee)
        return self._referee

    @property
    def _serves_outcomes(self) -> bool:
        """Returns whether the queue gives credit, and keeps what consumers say of messages."""
        queue = self.client.queue
        return bool(getattr(queue, "serves_outcomes", queue.features.modifies))

    @property
    def is_deleted(self) -> bool:
        """Returns whether its queue is deleted: what the channel hears then is no promise."""
        queue = self.client.queue
        return isinstance(queue, GroupQueue) and queue.deleted

    @property
    def is_over(self) -> bool:
        """Returns whether its handle is of no use any more: no route leads there."""
        return self.is_deleted or self.client.queue.ended is not None

    # Turns.

    def _next_turn(self) -> None:
        delay_us = self._scheduler.between(self.config.turn_min_us, self.config.turn_max_us)
        self._scheduler.after(delay_us, self._process, self._turn)

    def _turn(self) -> None:
        if self.closed or self.is_over:
            return
        config = self.config
        chance = self._scheduler.chance
        if self.draining:
            self._drain()
        else:
            if self.publishes and not self.blocked and chance(config.publish_chance):
                self._publish()
            if self.consumes:
                self._consume_turn()
            if chance(config.purge_chance):
                self.client.purge()
            if chance(config.close_chance):
                self.close()
                return
        self._next_turn()

    def _consume_turn(self) -> None:
        config = self.config
        chance = self._scheduler.chance
        subscribed = len(self._consumers) + len(self._asked)
        if not subscribed or (subscribed < 3 and chance(config.consume_chance * 0.1)):
            if chance(config.consume_chance):
                self._subscribe()
        elif chance(config.cancel_chance):
            number = self._scheduler.rng.choice(sorted(self._consumers)) if self._consumers else 0
            if number:
                self._trace.add(self.name, f"cancel {number}")
                self.client.cancel(number)
                del self._consumers[number]
                self._paused.discard(number)
        elif self._consumers and chance(config.credit_chance):
            number = self._scheduler.rng.choice(sorted(self._consumers))
            if not self._consumers[number] and number not in self._credits:
                self.client.set_credit(number, self._scheduler.between(1, config.prefetch_max))
        elif self._consumers and chance(config.pause_chance):
            self._pause(self._scheduler.rng.choice(sorted(self._consumers)))
        if chance(config.get_chance):
            self._gets += 1
            self.client.get(no_ack=chance(config.get_no_ack_chance))
        self._grant_some()
        if config.late_chance and self._lates.random() < config.late_chance:
            self._end_late()
        if self.held and chance(config.settle_chance):
            self._settle_some()

    def _end_late(self) -> None:
        """Ends a consumer as an edge does that waited for its acknowledgements for too long."""
        numbers = [n for n in self._consumers if n not in self._asked and not self._consumers[n]]
        if not numbers:
            return
        number = self._lates.choice(sorted(numbers))
        self._trace.add(self.name, f"consumer {number} is late")
        self._renewed()
        del self._consumers[number]
        self._paused.discard(number)
        self.client.end_consumer(number)
        ids = self.held.pop(number, [])
        if ids:
            self.client.return_(number, ranges_of(ids), failed=False)

    def _pause(self, number: int) -> None:
        """Has the consumer's reader pause, or go on."""
        if number in self._paused:
            self._paused.discard(number)
            self.client.resume(number)
        else:
            self._paused.add(number)
            self.client.pause(number)

    def _drain(self) -> None:
        """The quiet phase: consume and acknowledge everything, publish nothing."""
        if not self._consumers and not self._asked:
            self._subscribe()
        for number in sorted(self._credits):
            is_there = number in self._consumers and number not in self._asked
            if is_there and self._lacks_credit(number):
                self._grant(number, GRANT_MAX, drain=False)
        for number in sorted(self.held):
            self._settle(number, self.held.pop(number))

    def _lacks_credit(self, number: int) -> bool:
        """Returns whether one is to be granted more at the end; never before the last answer."""
        credit = self._credits[number]
        got = self._last_id.get(number, -1) + 1
        return not credit.asked and credit.limit - got < GRANT_MAX // 2

    def drain(self) -> None:
        """From now on only what empties the queue."""
        if self.is_over:
            return
        self.draining = True
        for number in sorted(self._paused):
            self._pause(number)

    # Publishing.

    def _publish(self) -> None:
        config = self.config
        for _ in range(self._scheduler.between(1, config.burst_max)):
            if len(self.unconfirmed) >= config.unconfirmed_max:
                return
            self._count += 1
            self._tag += 1
            identity = self.publisher.to_bytes(4, "big") + self._count.to_bytes(8, "big")
            large = self._scheduler.chance(config.body_large_chance)
            size = self._scheduler.skewed(0, config.body_large_max if large else config.body_max)
            if config.body_fixed >= 0:
                size = config.body_fixed
            body = identity + bytes(size)
            if self.client.queue.refuses_publishes:
                # What an edge answers by a nack.
                self.refused += 1
                continue
            self.unconfirmed[self._tag] = identity
            self._workload.published += 1
            traits = self._draw_traits(identity)
            self.client.target.publish(record_of(body, traits), len(body), self._tag, traits.flags)

    def _draw_traits(self, identity: bytes) -> Traits:
        """Draws the properties of a message."""
        config, queue, traits = self.config, self.client.queue, Traits()
        if config.attribute_chance and queue.serves_attributes:
            traits.priority, traits.expiration, traits.group = self._draw_attributes()
        if config.repeat_chance and queue.serves_attributes:
            traits.message_id = self._draw_message_id(identity)
        if config.delay_chance and traits.group is None and queue.serves_delays:
            traits.delay = self._draw_delay()
        return traits

    def _draw_attributes(self) -> tuple[int | None, int | None, bytes | None]:
        """Priority, expiration in ms and group of a message; None = it has none."""
        draw = self._attributes
        chance = self.config.attribute_chance
        priority = draw.choice((0, 3, 4, 5, 31, 200)) if draw.random() < chance else None
        expiration = draw.choice((0, 5, 100, 2_000)) if draw.random() < chance else None
        group = self._groups.choice(GROUPS) if self._groups.random() < chance else None
        return priority, expiration, group

    def _draw_message_id(self, identity: bytes) -> bytes:
        """Returns a new message-id, or one that came before: what a publisher sends again."""
        known = self._workload.message_ids.setdefault(self.group, deque(maxlen=MESSAGE_IDS_KEPT))
        if known and self._repeats.random() < self.config.repeat_chance:
            return self._repeats.choice(known)
        made = identity.hex().encode()
        known.append(made)
        return made

    def _draw_delay(self) -> int | None:
        """For how long a message is to wait, in ms; None = it does not say."""
        if self._delays.random() >= self.config.delay_chance:
            return None
        return self._delays.choice((-5, 0, 1, 20, 20, 300, 3_000))

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """Confirms."""
        for i in range(0, len(tags), 2):
            for tag in range(tags[i], tags[i + 1] + 1):
                identity = self.unconfirmed.pop(tag, None)
                if identity is None:
                    raise InvariantBroken(f"{self.name}: tag {tag} was confirmed twice or unasked")
                if self.is_deleted:
                    continue
                if outcome:
                    self._referee.on_confirmed(identity)
                    self._workload.confirmed += 1
                else:
                    self.refused += 1
        if not outcome:
            self._trace.add(self.name, f"publishes {list(tags)} are not safe")

    # Consuming.

    def _subscribe(self) -> None:
        config = self.config
        self._numbers += 1
        spec = ConsumerSpec(
            number=self._numbers,
            tag=f"{self.name}-{self._numbers}",
            prefetch=self._scheduler.between(1, config.prefetch_max),
            no_ack=self._scheduler.chance(config.no_ack_chance),
            priority=self._scheduler.between(-1, 2)
            if self._scheduler.chance(config.priority_chance)
            else 0,
            hears_cancel=self._numbers % 2 == 0,
            credited=self._draw_credited(),
        )
        if spec.credited:
            self._credits[spec.number] = Credit()
        self._asked.add(spec.number)
        self._consumers[spec.number] = spec.no_ack
        self._trace.add(self.name, f"subscribe {spec.number} prefetch {spec.prefetch}")
        self.client.subscribe(spec)

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """Subscribed, or refused."""
        if consumer not in self._asked:
            raise InvariantBroken(f"{self.name}: consumer {consumer} was answered twice")
        self._asked.discard(consumer)
        if error is not None:
            self._trace.add(self.name, f"consumer {consumer} refused: {error}")
            self._consumers.pop(consumer, None)
            if isinstance(error, Unavailable):
                # Nobody knows whether it was subscribed: an AMQP channel ends by that.
                self._scheduler.after(0, self._process, self._give_up)

    def _draw_credited(self) -> bool:
        chance = self.config.outcome_chance
        return bool(chance) and self._outcomes.random() < chance and self._serves_outcomes

    # Credit.

    def _grant_some(self) -> None:
        """Grants a consumer with credit more, or less, or drains it."""
        if not self._credits or self._outcomes.random() < 0.5:
            return
        number = self._outcomes.choice(sorted(self._credits))
        if number in self._consumers and number not in self._asked:
            more = self._outcomes.choice((0, 1, 1, 3, 10, 40))
            self._grant(number, more, drain=self._outcomes.random() < 0.3)

    def _grant(self, number: int, more: int, *, drain: bool) -> None:
        self._renewed()
        credit = self._credits[number]
        limit = self._last_id.get(number, -1) + 1 + more
        credit.asked.append((limit, drain))
        self._trace.add(self.name, f"grant {number} up to {limit}{', drain' if drain else ''}")
        self.client.grant(number, limit, drain=drain)

    def on_credit(self, client: QueueClient, consumer: int, granted: int, ready: int) -> None:
        """Credit was granted: all that was given by it is here."""
        self._renewed()
        credit = self._credits.get(consumer)
        if credit is None or not credit.asked:
            raise InvariantBroken(
                f"{self.name}: {consumer} hears of credit that it did not ask for"
            )
        limit, drain = credit.asked.popleft()
        got = self._last_id.get(consumer, -1) + 1
        if granted > got:
            # What did not come was taken back.
            self._deliveries.on_skipped(self.client.session, consumer, got, granted - 1)
            self._last_id[consumer] = granted - 1
        credit.limit = granted if drain else limit

    def _check_credit(self, consumer: int, end: int) -> None:
        """No message comes beyond what was granted."""
        credit = self._credits.get(consumer)
        if credit is None:
            return
        limit = max([credit.limit, *(asked for asked, _ in credit.asked)])
        if end > limit:
            raise InvariantBroken(f"{self.name}: {consumer} got {end} messages, of {limit}")

    def _give_up(self) -> None:
        if not self.closed:
            self.close()

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """Messages arrive."""
        consumer, first_id, block, command, first, count, acquired, failed, said = delivery
        if consumer in self._asked:
            raise InvariantBroken(f"{self.name}: delivery to consumer {consumer} before its answer")
        self._renewed()
        last = self._last_id.get(consumer, -1)
        if first_id <= last:
            raise InvariantBroken(
                f"{self.name}: consumer {consumer} got id {first_id} after {last}"
            )
        session = self.client.session
        if first_id > last + 1:
            self._deliveries.on_skipped(session, consumer, last + 1, first_id - 1)
        self._last_id[consumer] = first_id + count - 1
        self._check_credit(consumer, first_id + count)
        self._check_avoids(consumer, block, command, first, count)
        for i in range(count):
            record = batch.record(block, command, first + i)
            identity = identity_of(record)
            self._receive(consumer, first_id + i, identity, acquired, failed, said)
            # What waited for a time comes when that is over.
            if not acquired and DELAY not in read_record(record).headers:
                publisher = int.from_bytes(identity[:4], "big")
                number = int.from_bytes(identity[4:], "big")
                # Messages of one group, or of none and one priority, keep their order.
                group = group_of(record)
                priority = traits_of(record).priority if group is None else None
                line = (consumer, publisher, priority, group)
                if number <= self._last_fresh.get(line, 0):
                    raise InvariantBroken(
                        f"{self.name}: consumer {consumer} got {publisher}:{number} after"
                        f" {self._last_fresh[line]}"
                    )
                self._last_fresh[line] = number
        self._workload.delivered += count
        ids = list(range(first_id, first_id + count))
        if self.draining or self._consumers.get(consumer, False):
            self._settle(consumer, ids)
        else:
            self.held.setdefault(consumer, []).extend(ids)

    def _check_avoids(
        self, consumer: int, block: bytes, command: int, first: int, count: int
    ) -> None:
        """No message comes to a consumer again that called it undeliverable."""
        avoids = self._avoids.get(consumer)
        for i in range(count) if avoids else ():
            identity = identity_of(batch.record(block, command, first + i))
            if avoids and identity in avoids:
                raise InvariantBroken(f"{self.name}: {identity.hex()} came to {consumer} again")

    def _receive(
        self,
        consumer: int,
        message_id: int,
        identity: bytes,
        acquired: int,
        delivered: int,
        said: bytes | None = None,
    ) -> None:
        session = self.client.session
        self._deliveries.on_received(
            session, consumer, message_id, identity, acquired, delivered, said
        )
        if self.config.outcome_chance:
            self._given[consumer, message_id] = identity
        if acquired <= self._seen.get(identity, -1):
            raise InvariantBroken(
                f"{self.name}: {identity.hex()} came again, returned {acquired} times as before"
            )
        self._seen[identity] = acquired

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """An answer to get."""
        self._gets -= 1
        if self._gets < 0:
            raise InvariantBroken(f"{self.name}: more answers to get than calls")
        self._renewed()
        block, command, record, get_id, acquired, failed, _, _ = result
        if block is None:
            return
        identity = identity_of(batch.record(block, command, record))
        # A client of a quorum queue counts on over sessions; the queue begins again.
        shift = client._get_shift if isinstance(client, QuorumClient) else 0
        self._receive(0, get_id - shift, identity, acquired, failed)
        self._workload.delivered += 1
        ids = self.held.setdefault(0, [])
        ids.append(get_id)
        ids.sort()

    def _settle_some(self) -> None:
        number = self._scheduler.rng.choice(sorted(self.held))
        ids = self.held[number]
        draw = self._scheduler.rng.random()
        if draw < 0.4:
            # multiple: everything up to one of them
            at = self._scheduler.between(1, len(ids))
            chosen, rest = ids[:at], ids[at:]
        elif draw < 0.7:
            # out of order: some of them
            chosen = [m for m in ids if self._scheduler.chance(0.5)]
            taken = set(chosen)
            rest = [m for m in ids if m not in taken]
        else:
            chosen, rest = ids[:1], ids[1:]
        if rest:
            self.held[number] = rest
        else:
            del self.held[number]
        if chosen:
            self._settle(number, chosen)

    def _settle(self, consumer: int, ids: list[int]) -> None:
        self._renewed()
        config = self.config
        ranges = ranges_of(ids)
        no_ack = self._consumers.get(consumer, False)
        draw = 1.0 if no_ack or self.draining else self._scheduler.rng.random()
        if draw < 1.0 and self._outcomes.random() < config.outcome_chance:
            self._modify(consumer, ids)
        elif draw < config.reject_chance:
            self.client.discard(consumer, ranges)
        elif draw < config.reject_chance + config.requeue_chance:
            failed = self._scheduler.chance(0.5)
            untried = not failed and self._looks.random() < UNTRIED
            self.client.return_(consumer, ranges, failed=failed, untried=untried)
        else:
            self.client.settle(consumer, ranges)
        self._workload.settled += len(ids)

    def _modify(self, consumer: int, ids: list[int]) -> None:
        """Gives messages back, and says something of them."""
        draw, ranges = self._outcomes, ranges_of(ids)
        failed = draw.random() < 0.3
        said = encode({Symbol("x-by"): self.name}) if draw.random() < 0.6 else b""
        if draw.random() < 0.2:
            error = encode([Symbol("amqp:internal-error"), self.name])
            self.client.discard(consumer, ranges, failed=failed, error=error)
            return
        undeliverable = consumer > 0 and draw.random() < 0.3
        due_ms = 0
        if draw.random() < 0.3:
            due_ms = max(1, self._now_ms() + draw.choice((-50, 5, 50, 400)))
        if undeliverable and self._serves_outcomes:
            names = (self._given.get((consumer, each), b"") for each in ids)
            self._avoids.setdefault(consumer, set()).update(names)
        modification = Modification(undeliverable=undeliverable, due_ms=due_ms, annotations=said)
        self.client.return_(consumer, ranges, failed=failed, modification=modification)

    def _now_ms(self) -> int:
        queue = self.client.queue
        assert isinstance(queue, GroupQueue)
        return queue.clock.now_ms()

    def _renewed(self) -> None:
        """After the queue ended the session, what was held is not ours any more."""
        if self.client.session != self._session:
            self._session = self.client.session
            self.held.clear()
            self._last_id.clear()
            self._paused.clear()
            self._last_fresh.clear()
            self._credits.clear()
            self._avoids.clear()
            self._given.clear()

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        """Cancelled."""

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """The queue ended a consumer."""
        self._trace.add(self.name, f"consumer {consumer} was cancelled: {reason}")
        self._consumers.pop(consumer, None)
        self._paused.discard(consumer)
        if reason != NO_LEADER:
            self.held.pop(consumer, None)

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        """Purged."""

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """Flow control."""
        self.blocked = blocked

    def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
        """No queue is migrated here."""
        return None

    def on_rewound(self, referee: ChannelReferee) -> None:
        """Forgets what was decided lately, because those who had decided it are lost: messages may
        come again as if they had never come."""
        self._referee = referee
        self._seen.clear()
        self._last_fresh.clear()

    # The end.

    def close(self) -> None:
        """Closes the channel."""
        self.closed = True
        if self.config.lose_chance and self._scheduler.chance(self.config.lose_chance):
            self._trace.add(self.name, "is lost")
            self.lost = True
            queue = self.client.queue
            assert isinstance(queue, GroupQueue)
            assert isinstance(self.client, SessionClient)
            queue.forget(self.client)
        else:
            self._trace.add(self.name, "close")
            self.client.close()
        self._on_closed(self)

    def end(self) -> None:
        """Ends with its handle. Raises InvariantBroken when something was not answered."""
        waits = self.unconfirmed or self._asked or self._gets
        if waits:
            raise InvariantBroken(f"{self.name}: the queue is gone, {waits} not answered")
        self.closed = True
        self._on_closed(self)

    def waits_for(self) -> str:
        """Returns what is still outstanding; empty when nothing is."""
        missing = []
        if self.unconfirmed:
            missing.append(f"{len(self.unconfirmed)} confirms")
        if self._asked:
            missing.append(f"answers of consumers {sorted(self._asked)}")
        if self._gets:
            missing.append(f"{self._gets} answers to get")
        if self.client.target.pending:
            missing.append(f"{len(self.client.target.pending)} commands")
        if self.held:
            missing.append("settling")
        return ", ".join(missing)


def record_of(body: bytes, traits: Traits | None = None) -> tuple[bytes, ...]:
    """Returns the parts of a message as the edge hands them over."""
    traits = traits or Traits()
    headers: dict[str, object] = {}
    if traits.group is not None:
        headers[GROUP_ID] = Field("S", traits.group)
    if traits.delay is not None:
        headers[DELAY] = Field("l", traits.delay)
    expiration, message_id = traits.expiration, traits.message_id
    properties = Properties(
        headers=Table.of(headers) if headers else None,
        delivery_mode=PERSISTENT if traits.persistent else None,
        priority=traits.priority,
        expiration=None if expiration is None else str(expiration),
        message_id=None if message_id is None else text_of(message_id),
    )
    return (names_of("", "q"), content_of(properties, body))


def ranges_of(ids: list[int]) -> list[int]:
    """Ascending ids as ranges (first, last, first, last, …)."""
    made: list[int] = []
    for message_id in ids:
        if made and made[-1] == message_id - 1:
            made[-1] = message_id
        else:
            made += (message_id, message_id)
    return made
