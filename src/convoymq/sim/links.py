"""Links that are resumed in the simulator: who holds a message after a session, and what has come.

A few clients have a link into each queue for each direction. A channel is a connection of one of
them, on any node: it resumes what the one before it had, which may still be there, or be on a node
that is dead. What is in a queue is what the log has handed out of it, as in `sim.transactions`.
What is asserted, beyond what holds for every group:

- what a link takes over is what the one before it held, and nobody has got it since;
- a link that resumes in time finds all that its client has, and nothing of that comes again;
- a message comes into its queue once, however often links of its publisher are resumed, and is
  there when its client was told so;
- a message that has left was settled by whom it was handed out to last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from convoymq.kernels import batch
from convoymq.model.errors import BrokerError
from convoymq.queues.interface import ConsumerSpec, Delivery, PublishOutcome, QueueClient
from convoymq.queues.link_claims import TAGGED, claim_of, digest_of
from convoymq.queues.quorum.client import QuorumClient
from convoymq.queues.sessions import APPLIED_OK, decode_map
from convoymq.replication.machine import EFFECT_APPLIED, Effect
from convoymq.sim.clients import ChannelParts, ranges_of, record_of
from convoymq.sim.delivery_parts import name_of
from convoymq.sim.engine import Result
from convoymq.sim.faults import Plan
from convoymq.sim.given import Given, GivenLoad, GivenReferee
from convoymq.sim.group_world import GroupWorld
from convoymq.sim.owners import OwnerChannel
from convoymq.sim.records import identity_of
from convoymq.sim.world import ChannelKind

CLIENTS = 2
"""Of each queue."""
TIMEOUTS_MS = (100_000, 100_000, 100_000, 400)
"""Times for which queues keep links; the short one runs out."""
PUBLISH_CHANCE = 0.5
SETTLE_CHANCE = 0.3
LEAVE_CHANCE = 0.06
GRANT = 10


@dataclass(slots=True)
class Client:
    """Knowledge of a client, whatever becomes of its connections."""

    key: bytes
    group: int
    owner: object = None
    """The newest connection of the client."""
    holder: tuple[int, int] = 0, 0
    """(session, consumer) by which it got what it has."""
    held: dict[int, bytes] = field(default_factory=dict)
    """Message id -> message that it has and has not settled."""
    sent: dict[bytes, None] = field(default_factory=dict)
    """Messages whose outcome it does not know."""


class LinkReferee(GivenReferee):
    """The referee of one queue."""

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self._asked: dict[tuple[int, int], tuple[int, bytes, bool] | None] = {}
        """(session, seq) of a CHECKOUT -> its consumer, the key of its link, whether it resumes;
        None: it was answered."""
        self._holders: dict[bytes, list[tuple[int, int]]] = {}
        """Key -> (session, consumer) of those that had the link since one began anew."""

    def on_checkout(self, session: int, seq: int, number: int, body: bytes, count: int) -> None:
        """See `GivenReferee`. One that is sent again is answered again, and takes nothing over."""
        spec = decode_map(body, count)
        self._asked.setdefault((session, seq), (number, spec["link"], spec["resumes"]))

    def on_effect(self, effect: Effect) -> None:
        """See `GivenReferee`."""
        super().on_effect(effect)
        if effect[0] == EFFECT_APPLIED and effect[3] == APPLIED_OK:
            taking = self._asked.get((effect[1], effect[2]))
            if taking is not None and isinstance(effect[4], list):
                number, key, resumes = taking
                self._asked[effect[1], effect[2]] = None
                self._on_taken((effect[1], number), key, resumes, effect[4][1:])

    def on_given(self, given: Given, identity: bytes, acquired: int) -> None:
        """See `GivenReferee`."""
        known = self.given.get(given)
        if known is not None and known != identity:
            self.fail(f"{given} is {name_of(identity)}, and was {name_of(known)}")
        if known is None:
            super().on_given(given, identity, acquired)

    def _on_taken(
        self, holder: tuple[int, int], key: bytes, resumes: bool, ranges: Sequence[int]
    ) -> None:
        """A link has a new consumer, which holds these ids of the one before it."""
        holders = self._holders.setdefault(key, [])
        before = holders[-1] if holders else None
        if not resumes:
            holders.clear()
        holders.append(holder)
        for first, last in zip(ranges[::2], ranges[1::2], strict=True):
            for number in range(first, last + 1):
                old = Given(*before, number) if before is not None else None
                identity = self.given.get(old) if old is not None else None
                if identity is None:
                    self.fail(f"a link holds {number}, which {before} was not given")
                if self.last[identity] != old:
                    self.fail(f"{name_of(identity)} is kept, and was handed to somebody else")
                given = Given(*holder, number)
                self.given[given] = identity
                self.last[identity] = given

    def follows(self, key: bytes, before: tuple[int, int]) -> bool:
        """Returns whether all since a consumer had a link have resumed it."""
        return before in self._holders.get(key, ())


class LinkChannel(OwnerChannel):
    """A connection of a client into one queue. What goes wrong ends it."""

    def __init__(self, parts: ChannelParts, *, load: LinkLoad) -> None:
        super().__init__(parts)
        self._load = load
        self._referee = load.referees[parts.group]
        clients = load.clients[parts.group]
        self._own = self._scheduler.rng.choice(clients)
        self._consumers = 0
        self._client: Client | None = None
        """Client that it is a connection of; None while it has no link."""
        self._epoch = -1
        self._count = 0
        self._waiting: dict[int, bytes] = {}
        """Tag -> message that is not confirmed."""
        self._limits: dict[int, int] = {}
        self._had: dict[int, bytes] = {}
        """Messages that its client had when it attached."""
        self._taken: list[Client] = []
        """Clients whose links it takes over when all is quiet: they do not come back."""
        queue = load.world.nodes[parts.node].queues[parts.group]
        client = queue.client(parts.session, self)
        assert isinstance(client, QuorumClient)
        self._stream = client
        self._next_turn()

    def _turn(self) -> None:
        chance, client = self._scheduler.chance, self._client
        if self._closed:
            return
        is_stolen = client is not None and client.owner is not self
        if is_stolen or (not self._draining and chance(LEAVE_CHANCE)):
            self._close()
            return
        if self._draining:
            self._take_all()
        elif client is None:
            if self._stream.queue.serves_outcomes:
                self._attach(self._own)
        else:
            self._work(client)
        self._next_turn()

    # Attaching.

    def _attach(self, client: Client) -> None:
        """Takes the client's links over, from whatever connection has them."""
        client.owner = self
        self._client = client
        self._had = dict(client.held)
        self._subscribe(client.key, bool(self._had))
        # Never without a tag: such a claim begins a link anew, and may come late.
        asked = [*client.sent, b"none"]
        op = claim_of(client.key, asked)
        self._stream.reservation(
            msgspec.msgpack.encode(op), lambda answer, error: self._claimed(asked, answer, error)
        )

    def _subscribe(self, key: bytes, resumes: bool) -> None:
        self._consumers += 1
        self._stream.subscribe(
            ConsumerSpec(
                number=self._consumers,
                tag=self.name,
                prefetch=0,
                no_ack=False,
                credited=True,
                hears_cancel=True,
                link=key,
                resumes=resumes,
            )
        )

    def on_resumed(
        self, client: QueueClient, consumer: int, next_id: int, held: Sequence[int]
    ) -> None:
        """See `ClientEvents`: what the queue and the client have of each other's."""
        there = [n for at in range(0, len(held), 2) for n in range(held[at], held[at + 1] + 1)]
        self._limits[consumer] = next_id
        if consumer > 1 or self._client is None or self._client.owner is not self:
            return
        self._load.resumed += bool(self._had)
        missing = [n for n in self._had if n not in there]
        followed = self._referee.follows(self._client.key, self._client.holder)
        self._client.holder = client.session, consumer
        if missing and followed and self._load.keeps_long(self.group):
            self._referee.fail(f"{self.name} resumes and has {missing}, which it does not hold")
        kept = self._client.held = {n: self._had[n] for n in there if n in self._had}
        for number, identity in kept.items():
            self._referee.on_received(Given(client.session, consumer, number), identity)
        self._load.taken_over += len(kept)
        rest = [number for number in there if number not in kept]
        if rest:
            self._stream.return_(consumer, ranges_of(rest), failed=False, untried=True)

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        if error is not None:
            self._close()
        else:
            self._grant(consumer)

    def _grant(self, consumer: int) -> None:
        self._limits[consumer] += GRANT
        self._stream.grant(consumer, self._limits[consumer])

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """See `ClientEvents`."""
        self._close()

    # Publishing.

    def _claimed(self, asked: list[bytes], answer: object, error: BrokerError | None) -> None:
        client = self._client
        if self._closed or client is None or client.owner is not self:
            return
        if error is not None or not isinstance(answer, dict):
            self._close()
            return
        self._epoch = answer["epoch"]
        known = [asked[at] for at in answer["known"]]
        self._load.known += len(known)
        self._load.confirmed[self.group].update(known)
        for identity in known:
            client.sent.pop(identity, None)
        for identity in list(client.sent):
            self._publish(client, identity)

    def _publish(self, client: Client, identity: bytes) -> None:
        self._count += 1
        self._waiting[self._count] = identity
        body = identity + bytes(self._scheduler.between(0, self._parts.config.body_max))
        target = self._stream.target
        target.name_next(client.key + digest_of(identity), TAGGED | self._epoch)
        target.publish(record_of(body), len(body), self._count, 0)

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `PublisherEvents`."""
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                identity = self._waiting.pop(tag)
                owned = self._client is not None and self._client.owner is self
                if outcome is PublishOutcome.ACCEPTED:
                    self._load.confirmed[self.group].add(identity)
                    self._parts.workload.confirmed += 1
                    if owned and self._client is not None:
                        self._client.sent.pop(identity, None)
                elif owned:
                    # Its outcome is not known: the next link asks.
                    self._scheduler.after(1, self._parts.process, self._close)

    # Consuming.

    def _work(self, client: Client) -> None:
        chance = self._scheduler.chance
        if self._epoch >= 0 and self._parts.publishes and chance(PUBLISH_CHANCE):
            for _ in range(self._scheduler.between(1, 3)):
                self._load.messages += 1
                identity = self._number.to_bytes(4, "big") + self._load.messages.to_bytes(8, "big")
                client.sent[identity] = None
                self._parts.workload.published += 1
                self._publish(client, identity)
        if self._limits and client.held and chance(SETTLE_CHANCE):
            ids = [number for number in client.held if chance(0.6)]
            self._settle(client, 1, ids)

    def _settle(self, client: Client, consumer: int, ids: list[int]) -> None:
        session = self._stream.session
        for number in ids:
            client.held.pop(number, None)
            self._load.settled[self.group].add(Given(session, consumer, number))
        if ids:
            self._stream.settle(consumer, ranges_of(sorted(ids)))
            self._parts.workload.settled += len(ids)

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """See `ClientEvents`."""
        owner, consumer = self._client, delivery.consumer
        ids = []
        for i in range(delivery.messages):
            number = delivery.first_id + i
            identity = identity_of(
                batch.record(delivery.block, delivery.command, delivery.first + i)
            )
            self._referee.on_received(Given(client.session, consumer, number), identity)
            ids.append(number)
            if owner is not None and owner.owner is self and not self._taken:
                owner.held[number] = identity
        self._parts.workload.delivered += delivery.messages
        if self._draining and owner is not None:
            self._settle(owner, consumer, ids)
        if ids[-1] + GRANT // 2 >= self._limits[consumer]:
            self._grant(consumer)

    # The end.

    def _take_all(self) -> None:
        """Takes over the links of all clients, and settles what comes."""
        if not self._stream.queue.serves_outcomes:
            return
        before = self._load.drains.setdefault(self.group, self)
        if before._closed:
            self._load.drains[self.group] = before = self
        if before is not self or self._taken:
            return
        if self._client is None:
            self._client = self._own
        self._parts.trace.add(self.name, "takes all links over")
        self._taken = list(self._load.clients[self.group])
        for client in self._taken:
            client.owner = self
            client.held.clear()
            self._subscribe(client.key, False)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._parts.trace.add(self.name, "close")
        self._stream.close()
        self._parts.on_closed(self)

    def waits_for(self) -> str:
        """See `OpenChannel`."""
        waits = (len(self._waiting), len(self._stream.target.pending))
        return f"{waits}" if any(waits) else ""


class LinkWorld(GroupWorld):
    """See the module text."""

    load: LinkLoad

    def _final_checks(self) -> None:
        super()._final_checks()
        for group, referee in self.load.referees.items():
            referee.check(self.load.confirmed[group], self.load.settled[group])

    def report(self, result: Result) -> None:
        """See `Simulation`."""
        super().report(result)
        load = self.load
        counts = {"resumed": load.resumed, "taken_over": load.taken_over, "known": load.known}
        result.workload |= counts


class LinkLoad(GivenLoad):
    """See the module text."""

    text = "links that are resumed, into quorum queues"
    world_class = LinkWorld

    def begin(self, world: GroupWorld) -> None:
        """See `GroupLoad`."""
        super().begin(world)
        self.referees: dict[int, LinkReferee] = {}
        self.clients: dict[int, list[Client]] = {}
        self.confirmed: dict[int, set[bytes]] = {}
        self.settled: dict[int, set[Given]] = {}
        self.drains: dict[int, LinkChannel] = {}
        """Group -> the channel that takes over all links when all is quiet."""
        self.messages = self.resumed = self.taken_over = self.known = 0

    def keeps_long(self, group: int) -> bool:
        """Returns whether nothing that a queue keeps goes back in a run."""
        timeout_ms: int = self.world.plan.settings["link_resume_timeout_ms"]
        return timeout_ms == TIMEOUTS_MS[0]

    def make_plan(self, seed: int, faults: Collection[str] | None) -> Plan:
        """See `PlannedLoad`."""
        plan = super().make_plan(seed, faults)
        timeout_ms = TIMEOUTS_MS[seed % len(TIMEOUTS_MS)]
        own = {"single_active": seed % 3 == 0, "link_resume_timeout_ms": timeout_ms}
        return replace(plan, settings={**plan.settings, **own})

    def make_referee(self, group: int, settings: dict[str, int]) -> LinkReferee:
        """See `GroupLoad`."""
        self.clients[group] = [
            Client(group.to_bytes(8, "big") + number.to_bytes(8, "big"), group)
            for number in range(CLIENTS)
        ]
        self.confirmed[group] = set()
        self.settled[group] = set()
        made = self.referees[group] = LinkReferee(group)
        return made

    def channel_kind(self, group: int) -> ChannelKind:
        """See `GroupLoad`."""
        return partial(LinkChannel, load=self)
