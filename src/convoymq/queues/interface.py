"""The one interface behind which all queue types live.

`Queue` is a node's handle of a queue, wherever its replicas are. `QueueClient` is one AMQP
channel's ordered command stream into it. `ClientEvents` is what the channel implements to hear
back. All calls are synchronous and cheap; results come as events, in the same loop round or later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from convoymq.kernels.batch import PublishTarget
from convoymq.model.errors import BrokerError, PreconditionFailed, Refused, Subject
from convoymq.model.refusals import OLDER_NODES, in_use, not_empty, queue_subject
from convoymq.model.tables import Field
from convoymq.queues.reservation_reads import Fields, ReservedRun, Room, RunsRequest, no_wait

if TYPE_CHECKING:
    from convoymq.kernels.order_headers import Place
    from convoymq.queues.copying import CopiedPage
    from convoymq.queues.quorum.browsing import Page, Question
    from convoymq.trace.recorder import QueueTrace

SINGLE_ACTIVE = "single_active"
"""Activity status of the consumer that is served."""
WAITING = "waiting"
"""Activity status of one that is not."""

FIGURES = (
    "messages_ready", "messages_unacknowledged", "message_bytes_ready",
    "message_bytes_unacknowledged", "consumers", "memory", "publish", "deliver_get", "ack",
    "redeliver",
)  # fmt: skip
"""Numbers of `Queue.figures`, by their names in the HTTP API."""

PRIORITY_ARGUMENT = "x-priority"
"""A consumer's argument: others are served only while those of a higher number cannot be."""
TIMEOUT_ARGUMENT = "x-consumer-timeout"
"""A consumer's argument: ms that its client has to acknowledge a delivery; 0 = any."""
NO_LEADER = "no leader"
"""Reason of a consumer's end when nobody leads its queue. What it holds can still be settled."""

LINK_TAKEN = "link taken"
"""Reason of a consumer's end when another one has its link, and what it held."""

Row = dict[str, Any]
"""Facts by name, as the management API shows them; what they are depends on the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFeatures:
    """Features that clients may ask for in queues of a type."""

    counts_failed_deliveries: bool = False
    """Deliveries carry `x-delivery-count`."""
    times_consumers: bool = False
    """Consumers, the queue and policies may limit the time to acknowledge a delivery; what is late
    returns, and the consumer ends."""
    drops_repeats: bool = False
    """Messages of a named producer that were published before are dropped."""
    reads_by_offset: bool = False
    """A log: consumers choose where to read, and nothing goes when it is acknowledged."""
    serves_expiration: bool = False
    """Messages may carry an expiration, and any priority."""
    answers_by_tags: bool = False
    """Clients tell of publishes by their tags only, not by a command's note."""
    modifies: bool = False
    """Consumers may say what becomes of messages that they give back (`Modification`)."""
    filters: bool = False
    """Consumers may say which messages they want; others stay where they are."""
    consumer_arguments: frozenset[str] = frozenset()
    """Arguments of a consumer that do what they say."""
    unserved_consumer_arguments: frozenset[str] = frozenset()
    """Arguments of a consumer that the type has in RabbitMQ and that are not served yet."""


class ScheduledPlace(NamedTuple):
    """Place of a delayed message: the time it waits for, and its place in the log. In the order of
    delivery."""

    due_ms: int
    entry: int
    offset: int
    record: int


class ScheduledMessage(NamedTuple):
    """A message that waits for a time."""

    place: ScheduledPlace
    head: bytes
    """Record without the body (docs/formats/entries-and-frames.md)."""
    size: int
    """Bytes of its body."""
    acquired_count: int
    """Number of earlier deliveries: above 0 it waits for a retry."""
    failed_delivery_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """Options of a consumer."""

    number: int
    """Unique within the client's session; names the consumer in every later call and event."""
    tag: str
    prefetch: int
    """Unacknowledged messages at a time; 0 = no limit asked for."""
    no_ack: bool
    exclusive: bool = False
    priority: int = 0
    arguments: Mapping[str, object] | None = None
    hears_cancel: bool = False
    """True if its owner hears that the queue ended it, so that it may end before the queue has
    gone."""
    stream_offset: Field | None = None
    """Streams: the argument `x-stream-offset` as it came, as its meaning depends on its type."""
    credited: bool = False
    """The consumer gets as many messages as `QueueClient.grant` has granted, 0 at first, instead
    of a window."""
    link: bytes = b""
    """Key of its link, with which it may go on in another session (`Queue.link_resume_ms`)."""
    resumes: bool = False
    """The consumer gets what the one before it of its link holds; else that goes back."""
    wants: Callable[[bytes], bool] | None = None
    """Returns whether it wants a record, in types with `QueueFeatures.filters`; None: it wants
    all."""
    filters: bytes = b""
    """Filters that `wants` evaluates, for other nodes (`messages.amqp10.filters.encoded`)."""


class PublishOutcome(Enum):
    """Outcome of publishes; the values are the reasons that RabbitMQ's clients know. True
    unless the queue has refused them."""

    ACCEPTED = "accepted"
    DELETED = "deleted"
    """The queue is gone, and the messages with it. A protocol that has no word for it confirms
    them, as RabbitMQ does."""
    REFUSED_LENGTH = "maxlen"
    """The queue is full."""
    REFUSED_UNAVAILABLE = "unavailable"
    """Nobody knows whether they are safe."""
    REFUSED_TAKEN = "link taken"
    """Another link has the name of theirs; they are not in the queue."""

    def __bool__(self) -> bool:
        return self in _SAFE


_SAFE = (PublishOutcome.ACCEPTED, PublishOutcome.DELETED)


def outcome_of(ok: bool) -> PublishOutcome:
    """Returns the outcome of a queue that is there, and says no reason."""
    return PublishOutcome.ACCEPTED if ok else PublishOutcome.REFUSED_UNAVAILABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Modification:
    """Wishes of a consumer for messages that it gives back."""

    undeliverable: bool = False
    """The consumer does not get them again. They leave as rejected when no other one may get
    them."""
    due_ms: int = 0
    """Time until which they wait (ms since 1970); 0 = as the queue says."""
    annotations: bytes = b""
    """Encoded map of AMQP 1.0; what it says replaces what deliveries said under the same keys."""


NO_MODIFICATION = Modification()


MESSAGE_ID_MAX = (1 << 62) - 1
"""No message id of a consumer is above."""


class Delivery(NamedTuple):
    """Neighbouring messages that are checked out to one consumer: records [first, first + messages)
    of one ENQUEUE command."""

    consumer: int
    """0: what `QueueClient.get` took."""
    first_id: int
    """Message id of the first; the others follow it."""
    block: bytes
    command: int
    """Offset of the command in `block`."""
    first: int
    messages: int
    acquired_count: int
    """More than 0 sets `redelivered`."""
    failed_delivery_count: int
    """More than 0 adds the header x-delivery-count."""
    annotations: bytes = b""
    """Of all of them: what their consumers have said so far (`Modification.annotations`)."""

    def without(self, skip: int) -> Delivery:
        """Returns all but the first `skip` messages."""
        assert 0 <= skip < self.messages
        return self._replace(
            first_id=self.first_id + skip, first=self.first + skip, messages=self.messages - skip
        )

    def upto(self, messages: int) -> Delivery:
        """Returns the first of the messages."""
        assert 0 < messages <= self.messages
        return self._replace(messages=messages)


class GetResult(NamedTuple):
    """Result of `QueueClient.get`."""

    block: bytes | None = None
    """None: nothing, or `error`."""
    command: int = 0
    record: int = 0
    get_id: int = 0
    """By this id it is settled, with consumer number 0."""
    acquired_count: int = 0
    failed_delivery_count: int = 0
    ready: int = 0
    """Messages that are left."""
    error: Exception | None = None


GET_EMPTY = GetResult()


class StoredRun(NamedTuple):
    """Neighbouring messages of a queue that is being migrated or copied: records [first, first +
    messages) of one ENQUEUE command."""

    block: bytes
    command: int
    first: int
    messages: int
    acquired_count: int
    """More than 0: they were handed out before."""
    position: int = 0
    """Place of the first message in the history of the queue."""
    spreads: bool = False
    """Each message has a position of its own; otherwise they share one."""


LETTERS_LEAVE = "dead letters are on their way"
"""The obstacle to a migration that ends by itself, also while the queue is frozen."""


class PublisherEvents(Protocol):
    """Events that a publisher gets from its clients. `client` is the one that calls."""

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """The publishes with these tag ranges (first, last, first, last, …) have this outcome."""

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """The queue asks the channel to stop (True) or go on (False) reading publishes."""

    def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
        """The queue was migrated to another type (ADR 0128), and its client ends.

        Returns:
            The client of the successor that gets the publishes without an answer; None: they are
            refused.
        """
        return None


class ClientEvents(PublisherEvents, Protocol):
    """Events that a channel gets from its clients. `client` is the one that calls."""

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """Messages are checked out to a consumer. Each message id comes exactly once, ascending per
        consumer: the client has removed repeats."""

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """The consumer is registered (comes before its first delivery), or refused with `error`."""

    def on_resumed(
        self, client: QueueClient, consumer: int, next_id: int, held: Sequence[int]
    ) -> None:
        """The consumer has taken over the ranges `held` of message ids from the one of its link
        before it; it gets others from `next_id` on. Comes before `on_subscribed`."""
        return

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        """The channel's own cancel is done; unacknowledged deliveries stay with it."""

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """The queue ended the consumer ("deleted", "lost", `NO_LEADER` or `LINK_TAKEN`)."""

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """Answers `get`, in the order of the calls."""

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        """Answer to `purge`."""

    def on_credit(self, client: QueueClient, consumer: int, granted: int, ready: int) -> None:
        """Answers `grant`, in the order of the calls, behind what was handed out before.

        Args:
            granted: messages that the consumer has got in all; of a drain, its limit from now on.
            ready: messages that are left for others, or for a later grant.
        """
        return

    def on_activity(self, client: QueueClient, consumer: int, active: bool) -> None:
        """The consumer of a queue with a single active one begins to be served, or is served no
        more for now."""
        return


class QueueClient(ABC):
    """One channel's command stream into one queue."""

    queue: Queue
    session: int
    """Number of the stream; a queue that ended it gives the client a new one."""

    @property
    @abstractmethod
    def target(self) -> PublishTarget:
        """Returns the target to which the frame scanner appends this channel's publishes to this
        queue."""

    @property
    def has_pending(self) -> bool:
        """Returns whether anything that was sent has no answer yet."""
        return bool(self.target.pending)

    @abstractmethod
    def subscribe(self, spec: ConsumerSpec) -> None:
        """Registers a consumer; answered by `on_subscribed`."""

    @abstractmethod
    def cancel(self, consumer: int) -> None:
        """Ends a consumer; answered by `on_cancel_ok`."""

    @abstractmethod
    def set_credit(self, consumer: int, credit: int) -> None:
        """Replaces the consumer's window (global QoS is enforced with this by the channel); 0 = no
        limit asked for, as `ConsumerSpec.prefetch`."""

    def grant(self, consumer: int, limit: int, *, drain: bool = False) -> None:
        """Lets a consumer with `ConsumerSpec.credited` get messages until it has got `limit` since
        it was subscribed; answered by `on_credit`. `drain`: those that are there now, no more."""
        raise NotImplementedError("consumers of this type have windows only")

    def suspend(self, consumer: int) -> None:
        """Ends a consumer with `ConsumerSpec.link`, whose queue keeps what it holds; answered by
        `on_cancel_ok`."""
        raise NotImplementedError("consumers of this type are not resumed")

    def remove(self, consumer: int) -> None:
        """Ends a consumer and gives back, unfailed, what it holds; answered by `on_cancel_ok`.
        Nothing more comes for it, and nothing of it can be settled."""
        raise NotImplementedError("consumers of this type are cancelled only")

    @abstractmethod
    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """Acknowledges message ids (first, last, first, last, …; inclusive, ascending)."""

    @abstractmethod
    def return_(
        self,
        consumer: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification = NO_MODIFICATION,
    ) -> None:
        """Requeues. What has `failed` counts towards the delivery limit (basic.reject, lost
        consumer), and in queues that follow RabbitMQ 4.1 all that is not `untried` (ADR 0086).
        Types without `QueueFeatures.modifies` do nothing with the `modification`."""

    @abstractmethod
    def discard(
        self, consumer: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        """Rejects without requeue.

        Args:
            failed: the delivery counts as failed, as far as the dead letter says so.
            error: encoded error of AMQP 1.0; the dead letter keeps it as annotations.
        """

    @abstractmethod
    def when_settled(self, call: Callable[[bool], None]) -> None:
        """Calls back once: True when all that was settled, returned and discarded before is
        applied or the queue is deleted, False when it is lost. At once where nothing is waited
        for."""

    @abstractmethod
    def get(self, *, no_ack: bool) -> None:
        """basic.get; answered by `on_get`."""

    @abstractmethod
    def purge(self) -> None:
        """Drops ready messages; answered by `on_purged`."""

    def transact(
        self,
        work: Callable[[], None],
        end: Mapping[str, object],
        answer: Callable[[BrokerError | None], None],
    ) -> None:
        """Has what `work` tells this client (publishes, settle, return_, discard) count together,
        or be prepared to (`queues.transactions`). `answer` gets None when it is applied; a
        TransactionRefused: nothing of it is; any other error: nobody knows. Not called when the
        client is closed. Queues that do not serve this are not asked."""
        raise NotImplementedError("queues of this type take no part in transactions")

    def reservation(
        self, op: bytes, answer: Callable[[Row | None, BrokerError | None], None]
    ) -> None:
        """Asks one op of a transaction, as it is encoded."""
        raise NotImplementedError("queues of this type take no part in transactions")

    def places_of(self, consumer: int) -> dict[int, Place] | None:
        """Returns where the messages of a consumer lie that is about to be registered, by the upper
        bits of their ids, for deliveries to say so; None where they say nothing of it."""
        return None

    def replace(self, successor: Queue, known: int | None) -> None:
        """The queue was migrated: publishes without an answer go to the successor, and what was
        asked is asked there. Nothing more happens here.

        Args:
            known: seq up to which the queue had applied what this client sent; None: nobody has
                said, and pending publishes are refused.
        """
        raise NotImplementedError("queues of this type are not migrated")

    def end_consumer(self, consumer: int) -> None:
        """Ends a consumer without an answer: its owner has been told. Nothing more comes for it;
        what it holds it may still settle."""
        raise NotImplementedError("queues of this type end no consumers by themselves")

    def pause(self, consumer: int) -> None:  # noqa: B027
        """The channel holds enough for a consumer: nothing more for it until `resume`, if the queue
        can get it again later. What comes nevertheless has to be taken."""

    def resume(self, consumer: int) -> None:  # noqa: B027
        """Ends `pause`; what was not handed over meanwhile follows."""

    @abstractmethod
    def close(self) -> None:
        """The channel is gone: consumers go, what they hold returns (failed). No events follow."""


class Queue(ABC):
    """A node's handle of one queue."""

    vhost: str
    name: str
    group: int
    """Number of the queue, of its Raft group if it is one; never given out twice."""
    type: str
    features: QueueFeatures
    refuses_global_qos = False
    """A channel whose consumers share a limit must not consume from it."""
    trace: QueueTrace | None = None
    """Clients and channels tell it what they did."""
    consumer_timeout_ms: int | None = None
    """Longest time that deliveries may stay unacknowledged, by the queue's arguments and policies;
    0 = for as long as it takes, None = they do not say."""
    link_resume_ms: int = 0
    """Time for which the queue keeps what links held whose sessions ended; 0 = it does not."""
    ended: Refused | None = None
    """Reason why nothing can be done any more."""
    is_lost: bool = False
    """A transient queue whose node is gone: messages go past it, and its name is free. The tree
    deletes it soon."""
    leader: int | None = None
    """Node that leads the queue, if it has several members and one is known."""
    refuses_publishes: bool = False
    """The queue is full, and publishers are to hear so. When it changes, edges forget the routes
    that they remember."""

    known_seqs: tuple[int, Mapping[int, int]] = (0, {})
    """(group of the successor, session of this node -> seq up to which the frozen queue has
    applied it)."""

    @property
    def subject(self) -> Subject:
        """Returns the queue in texts of refusals."""
        return queue_subject(self.vhost, self.name)

    @property
    def serves_attributes(self) -> bool:
        """Returns whether messages may carry an expiration, or a priority above the default one."""
        return self.features.serves_expiration

    @property
    def serves_delays(self) -> bool:
        """Returns whether messages may wait for a time before they are delivered."""
        return False

    @property
    def serves_groups(self) -> bool:
        """Returns whether messages may name a group: a type where that means nothing takes
        them."""
        return True

    @property
    def serves_transactions(self) -> bool:
        """Returns whether clients may `transact`."""
        return False

    @abstractmethod
    def client(self, session: int, events: ClientEvents) -> QueueClient:
        """Opens a channel's command stream. `session`: see docs/formats/entries-and-frames.md."""

    @abstractmethod
    async def ready(self, timeout: float) -> None:
        """Waits until the queue can serve. Raises Unavailable."""

    async def wait_until_open(self, timeout: float) -> None:
        """Waits until a queue that was declared just now can serve. Raises Unavailable."""
        await self.ready(timeout)

    async def renew_lease(self) -> bool:
        """Begins the time anew after which the queue goes when nobody uses it (`x-expires`): it is
        declared again. A type whose `counts` does that has nothing to do here.

        Returns:
            False when that time is over: the queue is about to go.
        Raises:
            Unavailable: the queue does not answer.
        """
        return True

    async def claim_link(self, key: bytes, tags: Iterable[bytes]) -> tuple[int, list[int]]:
        """Begins a publisher's link anew, where `link_resume_ms` is set (`queues.link_claims`).
        Returns its epoch, and the indices of the delivery-tags that the queue has. Raises
        Unavailable."""
        raise NotImplementedError("links of this type are not resumed")

    def synchronise(self, *, cancels: bool = False) -> None:
        """Begins to bring mirrors up to date that are not synchronised, or ends that. Raises
        PreconditionFailed: the queue has no mirrors."""
        raise PreconditionFailed(f"{self.subject} is not mirrored", subject=self.subject)

    # --- migration to another type (ADR 0128) ----------------------------------------------------

    def migration_obstacle(self) -> str:
        """Returns why the queue cannot be migrated now, or ""; to be asked where it is led."""
        return f"queues of type {self.type} cannot be migrated to another type"

    @property
    def frozen(self) -> int:
        """Returns the group of the queue that shall take the place of this one, which stands still
        meanwhile; 0 = it does not. To be asked where it is led."""
        return 0

    async def freeze(self, successor: int, timeout: float) -> None:
        """Has the queue stand still, whoever leads it, until `thaw`. Raises Unavailable."""
        raise NotImplementedError

    def thaw(self) -> None:
        """Ends `freeze`."""
        raise NotImplementedError

    def applied_seqs(self) -> dict[int, int]:
        """Returns session -> seq of the last command that the frozen queue has applied."""
        raise NotImplementedError

    def stored_count(self) -> int:
        """Returns how many messages the frozen queue has, ready and unacknowledged."""
        raise NotImplementedError

    def stored_runs(self) -> Iterator[StoredRun]:
        """Yields what the frozen queue has, in the order in which it was published. Raises
        Unavailable."""
        raise NotImplementedError

    async def copy_page(self, after: int, upto: int) -> CopiedPage:
        """Returns stored messages behind the position `after` up to `upto`; negative: from the
        first one, and up to the newest one now. To be asked where the queue is decided about.

        Raises:
            PreconditionFailed: queues of this type cannot be copied.
            Unavailable: it is decided elsewhere, or a message cannot be read.
        """
        raise PreconditionFailed(f"queues of type {self.type} cannot be copied")

    def hold(self, successor: int, seqs: Mapping[int, int]) -> None:
        """Takes note on a node that the queue is frozen, and of `applied_seqs` of its sessions."""
        self.known_seqs = (successor, dict(seqs))

    def release(self) -> None:
        """The migration was undone: clients go on."""
        self.known_seqs = (0, {})

    def replace(self, successor: Queue) -> None:
        """The queue was migrated: its clients on this node go on in the successor."""
        raise NotImplementedError

    def known_seq(self, session: int, successor: int) -> int | None:
        """Returns `known` of `QueueClient.replace`."""
        group, seqs = self.known_seqs
        return seqs.get(session, 0) if group == successor else None

    @property
    def known_leader(self) -> int | None:
        """Returns the node that leads the queue, as far as this node knows."""
        return self.leader

    def follow_members(self, members: tuple[int, ...], config: tuple[int, int]) -> None:  # noqa: B027
        """Takes note that the tree records other members. `config`: see `QueueRecord`."""

    def configure(self, settings: Mapping[str, object]) -> None:  # noqa: B027
        """Takes the effective settings of the queue: those of its arguments and policies, by the
        keys of policies (`message-ttl`, `max-length`, …). Replicas agree on them by the log."""

    @abstractmethod
    async def counts(self) -> tuple[int, int]:
        """Returns (ready messages, consumers), from the leader where there is one."""

    async def check_delete(self, *, if_unused: bool, if_empty: bool) -> int:
        """Returns how many ready messages a queue has that is to be deleted.

        Raises:
            PreconditionFailed: it is in use, or not empty, and must not be.
            NotServed: a condition that a queue cannot judge yet.
            Unavailable: it does not say.
        """
        messages, consumers = await self.counts()
        if if_unused and consumers:
            raise in_use(self.subject)
        if if_empty and messages:
            raise not_empty(self.subject)
        return messages

    async def reservation(self, op: Mapping[str, object]) -> Row:
        """Carries out one op on a reservation or lease (`queues.reservations`) and returns its
        answer.

        Every op may be repeated, so who got Unavailable just asks again.

        Raises:
            ReservationRefused: with the reason.
            NotFound: the queue is gone.
            PreconditionFailed: queues of this type have no reservations.
            Unavailable: no leader, or no answer in time.
        """
        raise self._without_reservations()

    async def reservation_runs(self, request: RunsRequest) -> tuple[int, int, list[ReservedRun]]:
        """Returns (first unsettled offset, where to go on, runs) of what is reserved; the same
        messages every time.

        A page may end before `request.end`. The first message comes whatever its size. Raises as
        `reservation`.
        """
        raise self._without_reservations()

    async def browse(
        self, cursor: Sequence[int] | None, max_rows: int, max_bytes: int
    ) -> tuple[list[int] | None, list[ReservedRun]]:
        """Returns (cursor of the rest or None at the end, runs) of ready messages, which stay where
        they are; offsets count from 0. `cursor` None = from the start. Raises as `reservation`."""
        raise self._without_reservations()

    async def peek(self, position: int) -> ReservedRun | None:
        """Returns the ready message at a position, counted from 1, as a run of one; None = there is
        none. To be asked where the queue is decided about.

        Raises:
            PreconditionFailed: not served by queues of this type.
            Unavailable: it cannot be read here.
        """
        raise PreconditionFailed(f"Cannot peek into a {self.type} queue")

    @property
    def is_early(self) -> bool:
        """Returns whether what its type serves waits for nodes of an older release to be
        upgraded."""
        return False

    def check_serves_delays(self) -> None:
        """Raises PreconditionFailed where messages do not wait for a time."""
        if not self.serves_delays:
            reason = OLDER_NODES if self.is_early else ""
            raise PreconditionFailed(
                f"Messages do not wait for a time in a {self.type} queue{reason}"
            )

    def scheduled(self, after: ScheduledPlace | None, limit: int) -> list[ScheduledMessage]:
        """At most `limit` messages that wait for a time, behind a place, in the order in which they
        are due. To be asked where the queue is decided about. Raises Unavailable: one cannot be
        read here."""
        raise NotImplementedError

    async def cancel_scheduled(self, places: Sequence[ScheduledPlace]) -> int:
        """Drops messages that wait for a time; returns how many still did. Raises
        PreconditionFailed, Unavailable."""
        raise NotImplementedError

    async def browse_page(self, question: Question) -> Page | None:
        """Returns the ready messages by a filter, as this node knows them (`quorum.browsing`);
        None: its replica is behind, or it has none. Raises PreconditionFailed: not served by queues
        of this type."""
        raise PreconditionFailed(f"Cannot browse a {self.type} queue")

    def message_at(self, place: tuple[int, int, int]) -> bytes | None:
        """Returns the record of a message by its place in the log (entry, command offset, record);
        None: there is none, or it cannot be read here."""
        return None

    async def operation(self, op: Mapping[str, object]) -> Row:
        """Carries out one op on chosen messages (`quorum.operations`) and returns its answer. Every
        op may be repeated. Raises as `reservation`."""
        raise PreconditionFailed(f"Messages of a {self.type} queue cannot be chosen")

    def operations(self) -> list[tuple[str, Row, str]]:
        """Returns (name, summary, what it waits for) of operations on chosen messages, as this node
        knows them: those that have ended lately first."""
        return []

    async def serve_reservation(self, request: Fields, room: Room = no_wait) -> list[object]:
        """Answers what another node's handle of the queue asks; `room`: see
        `reservation_reads.serve`."""
        raise self._without_reservations()

    def reservations(self) -> list[Row]:
        """Reservations of the queue (`Reservations.infos`), if this node decides about it;
        otherwise []."""
        return []

    def activity(self) -> list[tuple[int, int, str]]:
        """Returns (session, number, activity status) of each consumer of a queue with a single
        active one, if this node decides about it; otherwise []."""
        return []

    def _without_reservations(self) -> PreconditionFailed:
        return PreconditionFailed(f"a queue of type {self.type} has no reservations")

    def figures(self) -> tuple[int, ...] | None:
        """Returns the numbers `FIGURES`, which are cheap; None when this node does not decide about
        the queue."""
        return None

    @abstractmethod
    def info(self) -> Row:
        """Returns the fields that the management API shows, from local knowledge: messages_ready,
        messages_unacknowledged, consumers, leader, members, online, state, memory …"""
