# cython: annotation_typing=False
"""The quorum queue: a replicated machine that decides from its log who gets which message.

Every replica applies the same entries and so reaches the same service queue and the same
assignments; the effects name a session, and the replica on that session's node carries them out
(ADR 0001, ADR 0003).

The machine takes a command to the part that it is about:

| part                 | decides                                                     |
|----------------------|-------------------------------------------------------------|
| `sessions`           | which commands count, and what they are answered            |
| `backlog`            | which message is next; what becomes of one that comes back  |
| `groups`             | which messages wait for another one of their group          |
| `consumers`          | which consumer is served next, which one is active          |
| `deliveries`         | how many messages a consumer gets in its turn               |
| `dead_letters`       | what becomes of messages that leave unacknowledged          |
| `deduplication`      | which published messages are repeats, by their message-ids  |
| `delayed`            | which messages wait for a time, and until when              |
| `operations`         | what becomes of messages that an operator chose (ADR 0053)  |
| `links`              | what outlives the sessions of clients that resume (ADR 0202)|
| `transactions`       | what counts together with others, here and elsewhere        |
| `reservations`       | what named readers may do (ADR 0008), by their own rules;   |
|                      | `reservation_holder` says what that means here              |
| `filtering`          | what consumers with a filter get (ADR 0216)                 |
| `questions`          | what is asked by ops, and answered by a map                 |
| `snapshot`           | how all that is kept                                        |

Invariants are asserted where they could break, and all at once in `invariants.check_invariants`:
every message is in one place; counters equal the sums of the runs; after an apply there is no
message to serve or nobody to serve.

Versions (ADR 0016):
    1: the queue of release 0.2. An ENQUEUE's flags for priority and expiration (2, 4) mean nothing:
       a message that carries them is served first in, first out, and stays until it is settled.
    2: release 0.3. CONFIG, by which the leader changes settings while the queue runs; time limits,
       lengths and priorities (ADR 0043); dead letters: a setting for their strategy, and SETTLE
       from the leader for those that were published (ADR 0044); conditions of queue.delete;
       operations on chosen messages (ADR 0053). The order of delivery is a setting (ADR 0050).
       ENQUEUE's flag 8, records carry headers for the queue, means message groups (ADR 0051) and
       times before which messages wait (ADR 0049), as retries do. Repeats by message-id are dropped
       (ADR 0052).
    3: a turn of a consumer completes the batch that it settles at once (ADR 0003).
    4: RENEW, a declaration that renews a queue's lease (ADR 0087).
    5: the settings `frozen`: the queue is being migrated, and stands still; `keeps_all`: it is a
       successor that nobody uses yet, and nothing expires (ADR 0128).
    6: GRANT, credit of consumers as an absolute limit (ADR 0200); MODIFY, what a consumer says of
       messages that it gives back (ADR 0201). Clients are told who is the single active consumer.
       BEGIN and END, transactions (ADR 0204). Links that are resumed (ADR 0202). Consumers with a
       filter (ADR 0216).
The rules of RabbitMQ 4.1 are settings that a queue is made with, in clusters where every node knows
them (ADR 0086).

Effects may be carried out twice (a replica and the leader, or after `resend`): message ids and
seqs only grow, so the receiver drops what it has.

Source: RabbitMQ 4.3 behaviour of quorum queues (returns before fresh messages, to the tail without
a limit, counts by cause, delivery limit tested when a message returns, single active consumer with
quiescing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from convoymq.kernels import batch
from convoymq.kernels.command_walk import CommandWalk
from convoymq.kernels.message_attributes import attribute_runs
from convoymq.model import trace as words
from convoymq.model.errors import UnknownCommand
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.link_claims import FENCED, KEY_BYTES, TAGGED
from convoymq.queues.outcomes import (
    CMD_GRANT,
    CMD_MODIFY,
    FLAG_DRAIN,
    FLAG_SUSPEND,
    LIMIT_MAX,
    unpack_modified,
)
from convoymq.queues.quorum import questions, runs, snapshot, tracing, views
from convoymq.queues.quorum.backlog import AS_RABBITMQ, Backlog
from convoymq.queues.quorum.consumers import (
    CANCELLED,
    OUTCOMES_SINCE,
    POLLER,
    UP,
    Consumer,
    Consumers,
    QueueSession,
)
from convoymq.queues.quorum.dead_letters import DeadLetters
from convoymq.queues.quorum.deduplication import Deduplication
from convoymq.queues.quorum.delayed import Delayed
from convoymq.queues.quorum.deliveries import Deliveries
from convoymq.queues.quorum.levels import LEVEL_DEFAULT, due_of, mark_of
from convoymq.queues.quorum.links import Links
from convoymq.queues.quorum.operations import Operations
from convoymq.queues.quorum.reservation_holder import ReservationHolder
from convoymq.queues.quorum.settings import (
    COUNTS_RETURNS,
    DISCONNECTED_TIMEOUT,
    FROZEN,
    KEEPS_ALL,
    LINK_RESUME_TIMEOUT,
    NONE,
    SINCE_VERSION_2,
    check_changes,
    with_defaults,
)
from convoymq.queues.quorum.transactions import Transactions
from convoymq.queues.quorum.waiting import Waiting
from convoymq.queues.reservations import SINGLE_ACTIVE, Reservations
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED, Packed, decode_map, first_u64
from convoymq.queues.transactions import CMD_BEGIN, CMD_END
from convoymq.replication import versions as supported
from convoymq.replication.machine import EFFECT_NOTE, EFFECT_TIMER, EFFECT_UNUSED

UNUSED_AGAIN_MS = 5_000
"""Time between two requests to the leader to delete a queue that nobody uses."""
FLAG_HEADERS = 8
"""Of ENQUEUE: records carry headers that queues act on."""
FLAGS_ATTRIBUTES = 2 | 4 | FLAG_HEADERS
"""Of ENQUEUE: records carry a priority, an expiration, such headers."""
FLAG_GET_SETTLED = 1

ENQUEUE = batch.CMD_ENQUEUE
SETTLE = batch.CMD_SETTLE
RETURN = batch.CMD_RETURN
DISCARD = batch.CMD_DISCARD
CHECKOUT = batch.CMD_CHECKOUT
CANCEL = batch.CMD_CANCEL
CREDIT = batch.CMD_CREDIT
GET = batch.CMD_GET

_SINCE_VERSION_1 = (
    ENQUEUE, SETTLE, RETURN, DISCARD, CHECKOUT, CANCEL, CREDIT, GET, batch.CMD_PURGE,
    batch.CMD_SESSION_CLOSE, batch.CMD_SESSION_DOWN, batch.CMD_NODE_DOWN, batch.CMD_NODE_UP,
    batch.CMD_TICK, batch.CMD_PRODUCER, batch.CMD_RESERVATION, batch.CMD_SESSION_OPEN,
)  # fmt: skip
_SINCE_VERSION_2 = (*_SINCE_VERSION_1, batch.CMD_CONFIG)
#: Version -> the command types that it knows.
COMMAND_TYPES = {
    1: supported.command_table(_SINCE_VERSION_1),
    2: supported.command_table(_SINCE_VERSION_2),
    3: supported.command_table(_SINCE_VERSION_2),
    4: supported.command_table(_SINCE_VERSION_2),
    5: supported.command_table(_SINCE_VERSION_2),
    6: supported.command_table((*_SINCE_VERSION_2, CMD_GRANT, CMD_MODIFY, CMD_BEGIN, CMD_END)),
}


class QuorumMachine(GroupMachine):
    """State of one quorum queue. See the module docstring; `settings.with_defaults` has the
    settings."""

    KIND = "quorum"
    VERSION = 6
    OLDEST_VERSION = 1
    SNAPSHOT_FORMAT = snapshot.FORMAT

    def __init__(self, settings: Mapping[str, int] | None = None) -> None:
        super().__init__(with_defaults(settings))

    def _clear(self) -> None:
        super()._clear()
        self.backlog = Backlog(self.settings["delivery_limit"])
        #: Flags of ENQUEUE that mean something.
        self._attributes = FLAGS_ATTRIBUTES if self.version >= 2 else 0
        #: The last entry by which a message may have become ready before others that already were
        #: (`filtering`); no part of the state.
        self.stirred_at = self.index
        #: When the next message expires that is at a head, or the queue, as the effects said last.
        self.announced_due_ms = 0
        self._expires_ms = NONE
        self.deduplication = Deduplication(self)
        self._deduplicates = False
        self.delayed = Delayed(self, self.backlog)
        self.backlog.delayed = self.delayed
        self.waiting: Waiting = self.backlog.waiting
        self._follow_settings()
        self.consumers = Consumers(self)
        self.dead_letters = DeadLetters(self, self.backlog)
        self.deliveries = Deliveries(self, self.backlog, self.consumers, self.dead_letters)
        self.operations = Operations(self, self.backlog, self.consumers, self.deliveries)
        holder = ReservationHolder(self, self.backlog, self.consumers, self.deliveries)
        self.reservations = Reservations(holder)
        self.transactions = Transactions(self)
        self.links = Links(self)

    def _new_session(self, session_id: int) -> QueueSession:
        return QueueSession(session_id)

    # ---------------------------------------------------------------- the log

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        """Applies a `commands` entry; appends to `effects`. Raises ValueError if malformed, and
        UnknownCommand."""
        assert index > 0, "entries count from 1"
        backlog, consumers, deliveries = self.backlog, self.consumers, self.deliveries
        self.index = index
        if time_ms > self.time_ms:
            self.time_ms = time_ms
        if self.trace is not None:
            self.trace.begin_entry(data)
        if self.is_frozen:
            self._apply_frozen(data)
            return
        if self._deduplicates:
            self.deduplication.forget_old()
        if self.waiting.messages:
            self._fire()
        if backlog.timed:
            deliveries.expire()
        if backlog.expiry is not None:
            deliveries.sweep()
        staged = self.transactions.staged
        walk = CommandWalk(data)
        while walk.next():
            kind, flags, count, arg, offset = (
                walk.type, walk.flags, walk.count, walk.arg, walk.offset,
            )  # fmt: skip
            session_id = walk.session
            session: QueueSession | None = None
            if session_id:
                session = self._accept(session_id, walk.seq, kind, count, arg)
                if session is None:
                    continue
                if staged and self.transactions.stage(session, walk, data):
                    continue
            if kind == ENQUEUE:
                self._enqueue(session, index, flags, count, data, offset)
            elif session is not None:
                self._session_command(session, kind, flags, count, arg, data, offset)
            else:
                self._leader_command(kind, flags, count, arg, data, offset)
            if backlog.fronted:
                backlog.put_front()
            if backlog.timed:
                deliveries.expire()
            if backlog.notes.avoided.messages:
                deliveries.serve_avoided()
            if consumers.priorities and backlog.ready():
                deliveries.assign()
            if backlog.bounded:
                deliveries.keep_length()
        if backlog.stirred:
            backlog.stirred = False
            self.stirred_at = index
        # `timed` is a short cut that may differ between replicas; what was announced may not.
        timed = backlog.timed or backlog.expiry is not None
        if timed or self._expires_ms >= 0 or self.waiting.messages or self.announced_due_ms:
            self._announce_due()
        assert not (consumers.priorities and backlog.ready()), "a message and a consumer wait"
        self._end_entry()

    def _apply_frozen(self, data: bytes) -> None:
        """Applies an entry of a queue that stands still: only what thaws it, and what is known of
        dead letters. Clients send the rest again; the leader looks at nodes anew."""
        walk = CommandWalk(data)
        while walk.next():
            if not walk.session and walk.type in (batch.CMD_CONFIG, SETTLE):
                self._leader_command(walk.type, walk.flags, walk.count, walk.arg, data, walk.offset)
        if not self.is_frozen:
            # Time has passed.
            self.effects.append((EFFECT_TIMER, self.time_ms))
        self._end_entry()

    def _fire(self) -> None:
        """Makes ready what has waited until now, and serves it."""
        if not self.delayed.fire():
            return
        if self.backlog.timed:
            self.deliveries.expire()
        if self.backlog.notes.avoided.messages:
            self.deliveries.serve_avoided()
        if self.consumers.priorities and self.backlog.ready():
            self.deliveries.assign()
        if self.backlog.bounded:
            self.deliveries.keep_length()

    def _enqueue(
        self,
        session: QueueSession | None,
        index: int,
        flags: int,
        count: int,
        data: bytes,
        offset: int,
    ) -> None:
        """Messages of one command, without those that their producer has sent before."""
        repeated = 0
        if count:
            backlog = self.backlog
            size = batch.enqueue_bytes(data, offset)
            if session is not None and session.producer is not None:
                if self._is_fenced(session):
                    self._reply(session, APPLIED_REJECTED, FENCED)
                    return
                repeated = self._repeated(session, count) if session.producer is not None else 0
                size -= size * repeated // count
            count -= repeated
            if not self._deduplicates or not self.deduplication.enqueue(
                session, flags, repeated, count, data, offset, index, self.enqueue_run
            ):
                if self.trace is not None:
                    number = backlog.published
                    tracing.published(self.trace, session, repeated, count, number, index, offset)
                self.enqueue_run(index, flags, repeated, count, size, data, offset)
        if repeated:
            self._reply(session, APPLIED_OK, repeated)
        else:
            self._applied(session)

    def _is_fenced(self, session: QueueSession) -> bool:
        """Notes the tag of a link's message; returns whether the link has gone on without it."""
        assert session.producer is not None, "nothing is known of an origin"
        name, first, _ = session.producer
        if first < TAGGED or self.version < OUTCOMES_SINCE:
            return False
        session.producer = None
        return not self.links.note(name, first)

    def enqueue_run(
        self, index: int, flags: int, first: int, count: int, size: int, data: bytes, offset: int
    ) -> None:
        """Takes `count` records of an ENQUEUE from `first` on."""
        backlog = self.backlog
        backlog.published += count
        if flags & self._attributes or backlog.message_ttl_ms >= 0:
            self._enqueue_marked(index, flags, first, count, size, data, offset)
        elif count:
            backlog.fresh.push(index, offset, first, count, size, 0, 0)

    def _enqueue_marked(
        self, index: int, flags: int, first: int, count: int, size: int, data: bytes, offset: int
    ) -> None:
        """As `_enqueue`, for messages that may expire or have a priority."""
        backlog = self.backlog
        ttl = backlog.message_ttl_ms
        if not flags & self._attributes:
            if count:
                mark = mark_of(LEVEL_DEFAULT, self.time_ms + max(ttl, 1))
                backlog.enqueue(index, offset, first, count, size, mark)
            return
        if flags & self._attributes & FLAG_HEADERS:
            if backlog.expiry is not None:
                self._expect(first, count, data, offset)
            self.delayed.enqueue(index, first, count, data, offset)
            return
        found = attribute_runs(data, offset, first, count)
        for at in range(0, len(found), 5):
            mark = self.mark_for(found[at + 3], found[at + 4])
            backlog.enqueue(index, offset, found[at], found[at + 1], found[at + 2], mark)

    def _expect(self, first: int, count: int, data: bytes, offset: int) -> None:
        """Notes when records expire, which may be blocked in their groups."""
        found = attribute_runs(data, offset, first, count)
        for at in range(0, len(found), 5):
            mark = self.mark_for(found[at + 3], found[at + 4])
            if due_of(mark):
                self.backlog.expects(mark)

    def mark_for(self, level: int, expiration: int) -> int:
        """Returns the mark of a message that is published now; `expiration`: its own, -1 = none."""
        ttl = self.backlog.message_ttl_ms
        if expiration < 0 or 0 <= ttl < expiration:
            expiration = ttl
        # Time limit 0: for a consumer that waits already.
        return mark_of(level, self.time_ms + max(expiration, 1) if expiration >= 0 else 0)

    def _message_due_ms(self) -> int:
        """Returns when the next message expires that is at a head, or is to be looked for behind
        others, or becomes ready; 0 = none does."""
        due = self.backlog.due_ms()
        waits = self.waiting.first_due_ms()
        if waits and (not due or waits < due):
            due = waits
        expiry = self.backlog.expiry
        wanted = expiry.wanted_ms if expiry is not None and not self.backlog.keeps_all else 0
        if wanted and (not due or wanted < due):
            due = wanted
        return due

    def _announce_due(self) -> None:
        """Asks for a TICK when the next message expires or becomes ready, or the queue expires,
        once for each such time, and again when the timer of such a time is over."""
        due = message = self._message_due_ms()
        unused = self._unused_due_ms()
        if unused is not None and (not due or unused < due):
            due = unused
        if due != self.announced_due_ms:
            self.announced_due_ms = due
            if due:
                self.effects.append((EFFECT_TIMER, due))
        elif 0 < message <= self.time_ms:
            # Its timer is over: a command that followed the TICK in its entry brought it back.
            self.effects.append((EFFECT_TIMER, self.time_ms + 1))

    # ---------------------------------------------------------------- commands of sessions

    def _session_command(
        self,
        session: QueueSession,
        kind: int,
        flags: int,
        count: int,
        arg: int,
        data: bytes,
        offset: int,
    ) -> None:
        if kind in (SETTLE, RETURN, DISCARD):
            consumer = session.consumers.get(arg)
            if consumer is not None:
                self.settle_ranges(consumer, kind, flags, batch.ranges(data, offset, count))
            self._applied(session)
        elif kind == GET:
            self._get(session, flags & FLAG_GET_SETTLED != 0)
        elif kind == CHECKOUT:
            self._checkout(session, arg, decode_map(batch.command_body(data, offset), count))
        elif kind == CREDIT:
            consumer = session.consumers.get(arg)
            if consumer is not None and consumer.state < CANCELLED:
                spec = decode_map(batch.command_body(data, offset), count)
                self.consumers.set_window(consumer, int(spec["credit"]))
            self._applied(session)
        elif kind == CMD_GRANT and self.version >= OUTCOMES_SINCE:
            self._grant(session, flags, arg, first_u64(data, offset))
        elif kind == CMD_MODIFY and self.version >= OUTCOMES_SINCE:
            modified = unpack_modified(data, offset, count)
            consumer = session.consumers.get(arg)
            if consumer is not None:
                self.deliveries.modify(consumer, flags, modified)
                self.consumers.refresh(consumer)
            self._applied(session)
        elif kind == CMD_BEGIN and self.version >= OUTCOMES_SINCE:
            self.transactions.begin(session)
        elif kind == CMD_END and self.version >= OUTCOMES_SINCE:
            self.transactions.end(session, data, offset, count)
        elif kind == CANCEL:
            consumer = session.consumers.get(arg)
            if consumer is not None and consumer.state < CANCELLED:
                if flags & FLAG_SUSPEND and consumer.link:
                    self._end_consumer(consumer, failed=False)
                    self._follow_active()
                else:
                    self.links.drop(consumer)
                    self.consumers.cancel(consumer)
            self._reply(session, APPLIED_OK, None)
        elif kind == batch.CMD_PURGE:
            self._purge(session)
        elif kind == batch.CMD_SESSION_CLOSE:
            self._applied(session)
            self._end_sessions((session,), failed=True)
        elif kind == batch.CMD_PRODUCER:
            self._producer(session, count, arg, data, offset)
        elif kind == batch.CMD_RESERVATION:
            questions.answer(self, session, batch.command_body(data, offset), count)
        elif kind == batch.CMD_SESSION_OPEN:
            self._applied(session)
        else:
            raise UnknownCommand(f"a session's command of type {kind} is not known")

    def settle_ranges(self, consumer: Consumer, kind: int, flags: int, ranges: list[int]) -> None:
        """Takes what one SETTLE, RETURN or DISCARD names from its consumer."""
        deliveries = self.deliveries
        settled = consumer.checked_out.messages
        for i in range(0, len(ranges), 2):
            deliveries.release(consumer, kind, flags, ranges[i], ranges[i + 1])
        settled -= consumer.checked_out.messages
        if settled and kind == SETTLE:
            consumer.settled(settled, self.time_ms, self.version)
        self.consumers.refresh(consumer)

    def _grant(self, session: QueueSession, flags: int, number: int, limit: int) -> None:
        """GRANT: DELIVERs, then the reply [messages that the consumer has got, ready messages]."""
        consumer = session.consumers.get(number)
        if consumer is None or consumer.limit < 0 or consumer.state >= CANCELLED:
            self._reply(session, APPLIED_OK, [0, 0])
            return
        consumers = self.consumers
        consumers.grant(consumer, min(limit, LIMIT_MAX))
        if self.backlog.notes.avoided.messages:
            self.deliveries.serve_avoided()
        if consumers.priorities and self.backlog.ready():
            self.deliveries.assign()
        if flags & FLAG_DRAIN:
            consumers.grant(consumer, consumer.next_id)
        # Nobody knows how many a filter wants.
        ready = self.backlog.stored() if consumer.state == UP and not consumer.filtered else 0
        self._reply(session, APPLIED_OK, [consumer.next_id, ready])

    def _get(self, session: QueueSession, settled: bool) -> None:
        """basic.get: DELIVER to consumer 0, then the reply [message id, ready left] or []."""
        consumers = self.consumers
        consumers.last_active_ms = self.time_ms
        if consumers.single_active:
            self._reply(session, APPLIED_REJECTED, SINGLE_ACTIVE)
            return
        if not self.backlog.ready():
            self._reply(session, APPLIED_OK, [])
            return
        poller = consumers.poller(session)
        message_id = poller.next_id
        self.deliveries.hand_out(poller, 1, not settled)
        assert poller.next_id == message_id + 1, "basic.get took more than one message"
        self._reply(session, APPLIED_OK, [message_id, self.backlog.stored()])

    def _checkout(self, session: QueueSession, number: int, spec: Packed) -> None:
        refusal = self.consumers.refusal(session, number, spec)
        if refusal is not None:
            self._reply(session, APPLIED_REJECTED, refusal)
            return
        consumer = self.consumers.add(session, number, spec)
        reply, link = None, spec.get("link")
        if self.version >= OUTCOMES_SINCE and isinstance(link, bytes) and len(link) == KEY_BYTES:
            reply = self.links.attach(consumer, link, bool(spec.get("resumes")))
        # The reply goes first: a consumer hears that it exists before its first delivery.
        self._reply(session, APPLIED_OK, reply)
        self.consumers.begin(consumer)

    def _purge(self, session: QueueSession) -> None:
        if self.trace is not None:
            for run in self.backlog.ready_runs():
                tracing.left(self.trace, words.DROPPED, 0, words.PURGED, 0, 0, run)
        self.dead_letters.drop_all()
        waited = self.delayed.purge()
        grouped = self.backlog.groups.heads
        held = [run for part in self._held() for _, run in part.held()] if grouped else []
        self._reply(session, APPLIED_OK, self.backlog.purge(held) + waited)

    # ---------------------------------------------------------------- settings

    def _leader_command(
        self, kind: int, flags: int, count: int, arg: int, data: bytes, offset: int
    ) -> None:
        if kind == batch.CMD_CONFIG and self.version >= 2:
            self._configure(decode_map(batch.command_body(data, offset), count))
        elif kind == SETTLE and self.version >= 2:
            self.dead_letters.settle(batch.ranges(data, offset, count))
        else:
            super()._leader_command(kind, flags, count, arg, data, offset)

    @property
    def configurable(self) -> bool:
        return self.version >= 2

    def knows_setting(self, name: str) -> bool:
        """See `GroupMachine`."""
        return self.version >= (OUTCOMES_SINCE if name == LINK_RESUME_TIMEOUT else 2)

    def set_version(self, version: int) -> None:
        """See `GroupMachine`; what the version brings begins as if it were not there."""
        super().set_version(version)
        self._attributes = FLAGS_ATTRIBUTES if version >= 2 else 0
        if version >= 2:
            self.settings = {**SINCE_VERSION_2, **self.settings}
            self._follow_settings()

    def _configure(self, settings: Mapping[str, int]) -> None:
        """CONFIG: these settings are other ones from now on. Raises ValueError."""
        check_changes(settings)
        self.settings.update(self.transactions.allowed(settings))
        self._follow_settings()
        self.dead_letters.on_configured()
        if "expires_ms" in settings:
            # Counts from now on, or a queue that was idle would go at once.
            self.consumers.last_active_ms = self.time_ms
        due = self._nodes_due_ms()
        if due is not None:
            self.effects.append((EFFECT_TIMER, due))

    def _follow_settings(self) -> None:
        """Has the parts work by the settings."""
        backlog, settings = self.backlog, self.settings
        self.is_frozen = settings.get(FROZEN, 0) > 0
        backlog.keeps_all = settings.get(KEEPS_ALL, 0) > 0
        backlog.delivery_limit = settings["delivery_limit"]
        backlog.message_ttl_ms = settings.get("message_ttl_ms", NONE)
        self._expires_ms = settings.get("expires_ms", NONE)
        self.delayed.follow(settings)
        backlog.max_length = settings.get("max_length", NONE)
        backlog.max_bytes = settings.get("max_length_bytes", NONE)
        backlog.refuses = settings.get("reject_publish", NONE) > 0
        backlog.requeue_position = settings.get("requeue_position", AS_RABBITMQ)
        backlog.counts_returns = settings.get(COUNTS_RETURNS, 0) > 0
        # A snapshot of version 1 does not say whose turn it is.
        backlog.use_classes(self.version >= 2 and settings.get("two_priority_classes", 0) > 0)
        backlog.use_due(settings.get("expire_by_due", 0) > 0)
        limited = backlog.max_length >= 0 or backlog.max_bytes >= 0
        backlog.bounded = limited or backlog.refusing
        self.deduplication.follow(settings)
        self._deduplicates = self.deduplication.ids is not None

    # ---------------------------------------------------------------- sessions and nodes end

    def _end_sessions(self, sessions: Iterable[QueueSession], *, failed: bool) -> None:
        """Removes sessions, returning what their consumers hold. Only when all have ended somebody
        else may become active: a consumer of the last one must not, for the moment."""
        for session in sessions:
            self._remove_session(session)
            self.transactions.session_ended(session.id)
            for consumer in list(session.consumers.values()):
                self._end_consumer(consumer, failed=failed)
        self._follow_active()

    def _end_consumer(self, consumer: Consumer, *, failed: bool) -> None:
        """Takes a consumer out of its session: what it holds is kept for its link, or returned."""
        ended = self.consumers.end(consumer)
        del consumer.session.consumers[consumer.number]
        if not self.links.keep(consumer):
            self.deliveries.give_back_all(consumer, 1 if failed else 0)
        if ended:
            tracing.owner(self.trace, words.GONE, consumer)

    def _follow_active(self) -> None:
        if self.consumers.single_active:
            self.consumers.choose_active()

    def _node_down(self, node: int, gone: bool) -> None:
        """Suspects a node; when it is known to be `gone`, its sessions end at once."""
        if gone:
            self.down_nodes.pop(node, None)
            self._end_sessions(self._sessions_of(node), failed=True)
            return
        if node in self.down_nodes:
            return
        self.down_nodes[node] = [self.time_ms, 0]
        for session in self._sessions_of(node):
            for consumer in session.consumers.values():
                self.consumers.serve_no_more(consumer)
        self._follow_active()
        due = self._nodes_due_ms()
        if due is not None:
            self.effects.append((EFFECT_TIMER, due))

    def _node_up(self, node: int, incarnation: int) -> None:
        """Ends the sessions of older incarnations of the node; the others go on."""
        self._hear_of(node, incarnation)
        was_down = self.down_nodes.pop(node, None) is not None
        # First: who takes over may be a consumer of this node that has waited longest.
        self._end_sessions(self._older_sessions(node, incarnation), failed=True)
        if not was_down:
            return
        for session in self._sessions_of(node):
            for consumer in session.consumers.values():
                self.links.heard(consumer)
                self.consumers.serve_last(consumer)
        self._follow_active()

    def _tick(self) -> None:
        """Returns the messages of consumers whose node has been away for too long, and of
        reservations that nobody was heard of."""
        self._forget_producers()
        for reservation in self.reservations.expire(self.time_ms):
            self.effects.append(
                (EFFECT_NOTE, "quorum.reservation_expired", {"reservation": reservation.name})
            )
        timeout = self._disconnect_timeout_ms()
        for node, state in self.down_nodes.items():
            if state[1] or self.time_ms < state[0] + timeout:
                continue
            state[1] = 1
            for session in self._sessions_of(node):
                for consumer in list(session.consumers.values()):
                    if not self.links.waits(consumer, state[0]):
                        self.deliveries.give_back_all(consumer, 0)
                        self.consumers.refresh(consumer)
        self.links.expire()
        unused = self._unused_due_ms()
        if unused is not None and unused <= self.time_ms:
            self.effects.append((EFFECT_UNUSED,))
            unused = self.time_ms + UNUSED_AGAIN_MS
        due = self._next_due_ms(unused)
        if due is not None:
            self.effects.append((EFFECT_TIMER, due))

    def next_due_ms(self) -> int | None:
        """Returns when the leader must propose TICK (logged time, ms); None = nothing waits for
        time."""
        return self._next_due_ms(self._unused_due_ms())

    def _next_due_ms(self, unused: int | None) -> int | None:
        dues = [
            due
            for due in (
                self.reservations.next_due_ms(),
                self.links.next_due_ms(),
                self._nodes_due_ms(),
                self._message_due_ms() or None,
                unused,
            )
            if due is not None
        ]
        return min(dues, default=None)

    def _unused_due_ms(self) -> int | None:
        """Returns when the queue will have been unused for too long; None = it is in use, or may
        wait."""
        if self._expires_ms < 0 or self.consumers.count:
            return None
        if self.operations.by_id or self.transactions.is_open:
            return None
        return self.consumers.last_active_ms + self._expires_ms

    def _disconnect_timeout_ms(self) -> int:
        set_ms: int = self.settings.get(DISCONNECTED_TIMEOUT, NONE)
        return set_ms if set_ms >= 0 else self.settings["disconnect_timeout_ms"]

    def _nodes_due_ms(self) -> int | None:
        timeout = self._disconnect_timeout_ms()
        waiting = [since for since, returned in self.down_nodes.values() if not returned]
        return min(waiting) + timeout if waiting else None

    # ---------------------------------------------------------------- what the shell asks for

    def command_types(self, version: int) -> bytes:
        """Returns the command types that a version knows (Machine.command_types)."""
        return COMMAND_TYPES[version]

    def at_rest(self) -> bool:
        """No message waits for a consumer's window, or for another one of its group, so a settle
        can wait a little."""
        return not self.backlog.stored()

    def _held(self) -> list[runs.CheckedOut]:
        return [consumer.checked_out for consumer in self.consumers.all()] + self._held_by_others()

    def _held_by_others(self) -> list[runs.CheckedOut]:
        held = [each.held for each in self.reservations.by_name.values()]
        held += self.operations.held() + self.transactions.held()
        held += [consumer.checked_out for consumer in self.links.kept()]
        held.append(self.dead_letters.held)
        return held

    def _elsewhere(self) -> list[runs.CheckedOut | Waiting]:
        return [*self._held(), *self.transactions.incoming(), self.waiting]

    def live_ranges(self) -> Iterable[tuple[int, int]]:
        """Entries whose bodies are still needed (Machine.live_ranges)."""
        return self.backlog.live_ranges(self._elsewhere())

    def oldest_live(self) -> int:
        """Nearly the first of `live_ranges`: messages that came back may lie before it."""
        beside = [*self._held_by_others(), *self.transactions.incoming()]
        oldest = self.backlog.oldest_live([*beside, self.waiting])
        return int(min(oldest, self.consumers.oldest_live()))

    def resend(self, session_node: int) -> None:
        """Appends the effects that bring the clients of a node up to date (Machine.resend)."""
        for session in self._sessions_of(session_node):
            # What basic.get took comes before its reply, a subscription's reply before deliveries.
            self._redeliver(session, True)
            self._resend_answers(session)
            self._redeliver(session, False)
            self.consumers.tell_activity(session)

    def _redeliver(self, session: QueueSession, pollers: bool) -> None:
        for consumer in session.consumers.values():
            if (consumer.state == POLLER) == pollers:
                self.deliveries.redeliver(session.id, consumer.number, 0)

    def _pack(self) -> dict[str, object]:
        return snapshot.pack(self)

    def _restore(self, known: Packed) -> None:
        self.set_version(known["version"])
        self.settings = known["settings"]
        self._clear()
        snapshot.unpack(self, known)
        self.stirred_at = self.index

    # ---------------------------------------------------------------- looking at it

    def totals(self) -> dict[str, int]:
        """Counters and gauges for metrics."""
        return views.totals(self)

    def figures(self) -> tuple[int, ...]:
        """Returns the numbers `queues.interface.FIGURES`."""
        return views.figures(self)

    def memory_bytes(self) -> int:
        """Returns the number of bytes of the packed index: runs that are ready, wait, are checked
        out or dead letters; and of the message-ids that are remembered."""
        held = sum(part.memory_bytes() for part in self._elsewhere())
        return int(self.backlog.memory_bytes() + held + self.deduplication.memory_bytes())

    def run_count(self) -> int:
        """Runs in the queue: what `state_snapshot` costs."""
        return int(self.backlog.run_count() + sum(part.run_count() for part in self._elsewhere()))

    def state_snapshot(self) -> list[views.Place]:
        """Everything in the queue, for the trace; see `views.state_snapshot`."""
        return views.state_snapshot(self)


supported.register(QuorumMachine)
