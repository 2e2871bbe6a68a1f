# cython: annotation_typing=False
"""The quorum queue: a replicated machine that decides from its log who gets which message.

Every replica applies the same entries and so reaches the same service queue and the same
assignments; the effects name a session, and the replica on that session's node carries them out
(ADR 0001, ADR 0003).

Messages:  ready or returned --assign--> checked out --settle--> gone
                    ^                        |---discard--> dropped (`rejected`)
                    +-------- return --------+--- over the limit --> dropped (`delivery_limit`)

Consumers: | state     | served | leaves it by                                               |
           | UP        | yes    | cancel; quiescing or waiting (single active consumer only) |
           | WAITING   | no     | activation; cancel                                         |
           | QUIESCING | no     | last settle -> WAITING; contender gone -> UP; cancel       |
           | CANCELLED | no     | last settle or return -> removed                           |
           | POLLER    | no     | (number 0: holds what basic.get took) end of the session   |
A consumer of a suspected node keeps its state and is not served until NODE_UP.

Single active consumer: with `single_active_strict` (the default) an active consumer that is
cancelled or whose node is suspected stays the active one for as long as it holds messages: the
next one begins when they are settled or back in the queue, so with prefetch 1 nothing overtakes
them. Without, the next one begins at once (RabbitMQ's rule). See ADR 0027.

Returns: to the end of `returned`, which is served before fresh messages. Without a delivery limit
what a client gives back unfailed goes to the tail instead, behind all that is in the queue by then.

Reservations (`queues.reservations`, ADR 0008) hold messages too, by their own rules, and belong to
no session and no node. With single active consumer, a reservation is who is active.

Invariants (`invariants.check_invariants`): a consumer is in the service queue exactly when it is
UP, its node is not suspected and it has credit; after an apply there is no message to serve or
nobody to serve; every message is in one place; counters equal the sums of the runs; with single
active consumer at most one is UP or QUIESCING.

Versions (ADR 0016): 1 is all that is described here. An ENQUEUE's flags for priority and expiration
(2, 4) mean nothing in version 1, for ever: whatever carries them is served first in, first out, and
stays until it is settled. Nodes refuse to publish such messages (ADR 0027).

Effects may be carried out twice (a replica and the leader, or after `resend`): message ids and
seqs only grow, so the receiver drops what it has.

Source: RabbitMQ 4.3 behaviour of quorum queues (returns before fresh messages, to the tail without
a limit, counts by cause, delivery limit tested when a message returns, single active consumer with
quiescing).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from convoymq.kernels import batch
from convoymq.model import trace as words
from convoymq.model.errors import UnknownCommand
from convoymq.queues.quorum import runs
from convoymq.queues.reservations import (
    MALFORMED,
    SINGLE_ACTIVE,
    TAKE_RUNS_MAX,
    Reservation,
    Reservations,
)
from convoymq.queues.sessions import (
    APPLIED_OK,
    APPLIED_REJECTED,
    Session,
    SessionTable,
    decode_map,
    first_u64,
)
from convoymq.replication import versions as supported
from convoymq.replication.machine import (
    EFFECT_APPLIED,
    EFFECT_DELIVER,
    EFFECT_NOTE,
    EFFECT_TIMER,
    FLAG_NODE_GONE,
    NEVER,
    Effect,
)

UP = 0
WAITING = 1
QUIESCING = 2
CANCELLED = 3
POLLER = 4

#: Window of a consumer that asks for no limit, and of no_ack (the channel settles as it sends).
WINDOW_UNLIMITED = 2000
DELIVERY_LIMIT_DEFAULT = 20
DISCONNECT_TIMEOUT_MS_DEFAULT = 60_000
#: A turn of one of n consumers is 1/(16 n) of the ready messages, 1 … TURN_MESSAGES_MAX (ADR 0003).
TURN_DIVISOR = 16
TURN_MESSAGES_MAX = 256

FLAG_FAILED = 1
FLAG_GET_SETTLED = 1

ENQUEUE = batch.CMD_ENQUEUE
SETTLE = batch.CMD_SETTLE
RETURN = batch.CMD_RETURN
DISCARD = batch.CMD_DISCARD
CHECKOUT = batch.CMD_CHECKOUT
CANCEL = batch.CMD_CANCEL
CREDIT = batch.CMD_CREDIT
GET = batch.CMD_GET

#: Version -> the command types that it knows.
COMMAND_TYPES = {
    1: supported.command_table((
        ENQUEUE, SETTLE, RETURN, DISCARD, CHECKOUT, CANCEL, CREDIT, GET, batch.CMD_PURGE,
        batch.CMD_SESSION_CLOSE, batch.CMD_SESSION_DOWN, batch.CMD_NODE_DOWN, batch.CMD_NODE_UP,
        batch.CMD_TICK, batch.CMD_PRODUCER, batch.CMD_RESERVATION, batch.CMD_SESSION_OPEN,
    )),
}  # fmt: skip


class Consumer:
    """One consumer and what it holds."""

    __slots__ = (
        "arguments",
        "checked_out",
        "exclusive",
        "next_id",
        "no_ack",
        "number",
        "priority",
        "queued",
        "session",
        "state",
        "tag",
        "window",
    )

    def __init__(self, session: QueueSession, number: int, state: int) -> None:
        self.session = session
        self.number = number
        self.state = state
        self.tag = ""
        self.window = 0
        self.no_ack = False
        self.exclusive = False
        self.priority = 0
        self.arguments: dict[str, Any] = {}
        self.next_id = 0
        self.queued = False
        self.checked_out = runs.CheckedOut()

    def pack(self) -> list[Any]:
        """Plain values for the snapshot."""
        return [
            self.number,
            self.state,
            self.tag,
            self.window,
            self.no_ack,
            self.exclusive,
            self.priority,
            self.arguments,
            self.next_id,
            self.checked_out.pack(),
        ]


class QueueSession(Session):
    """A session and its consumers."""

    __slots__ = ("consumers",)

    def __init__(self, session_id: int) -> None:
        super().__init__(session_id)
        self.consumers: dict[int, Consumer] = {}


class QuorumMachine(SessionTable):
    """State of one quorum queue. See the module docstring.

    Args of the constructor: settings that all replicas agree on: `delivery_limit` (-1 = none),
    `single_active` (bool), `single_active_strict` (bool), `disconnect_timeout_ms`,
    `exclusive_honoured` (bool; RabbitMQ's quorum queues ignore the flag of basic.consume, so
    False).
    """

    KIND = "quorum"
    VERSION = 1
    OLDEST_VERSION = 1

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.effects: list[Effect] = []
        #: `kernels.trace.TraceRows` of this replica, or None. It hears what is decided and decides
        #: nothing.
        self.trace: Any = None
        self.version = 1
        self.settings: dict[str, Any] = {
            "delivery_limit": DELIVERY_LIMIT_DEFAULT,
            "disconnect_timeout_ms": DISCONNECT_TIMEOUT_MS_DEFAULT,
            "exclusive_honoured": False,
            "single_active": False,
            "single_active_strict": True,
        }
        self.settings.update(settings or {})
        self._clear()

    def _clear(self) -> None:
        self.delivery_limit: int = self.settings["delivery_limit"]
        self.single_active: bool = self.settings["single_active"]
        self.strict: bool = self.settings["single_active_strict"]
        self.index = 0
        self.time_ms = 0
        self.last_active_ms = 0
        self.fresh = runs.Fifo(False)
        self.returned = runs.Fifo(True)
        #: What came back to the tail: each group of it behind the messages that were fresh then.
        self.requeued = runs.Tail()
        self._clear_sessions()
        #: Consumers with credit, by priority, the next to serve on the left. No level is empty.
        self._levels: dict[int, deque[Consumer]] = {}
        self._priorities: list[int] = []
        #: Single active consumer: who is UP or QUIESCING, or (strict) CANCELLED and still holds
        #: messages; and who waits, in order of arrival.
        self.active: Consumer | None = None
        self.waiting: list[Consumer] = []
        self.reservations = Reservations(self)
        #: node -> [time of NODE_DOWN in ms, 1 when its messages have been returned]
        self.down_nodes: dict[int, list[int]] = {}
        self.unacked = 0
        self.unacked_bytes = 0
        self.consumer_count = 0
        self.published = 0
        self.delivered = 0
        self.acked = 0
        self.returns = 0
        self.redelivered = 0
        self.purged = 0
        self.dropped: dict[str, int] = {"delivery_limit": 0, "rejected": 0}

    # ---------------------------------------------------------------- the log

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        """Applies a `commands` entry; appends to `effects`. Raises ValueError if malformed, and
        UnknownCommand."""
        self.index = index
        if time_ms > self.time_ms:
            self.time_ms = time_ms
        if self.trace is not None:
            self.trace.begin_entry(data)
        for kind, flags, session_id, seq, count, arg, offset, _length in batch.commands(data):
            session: QueueSession | None = None
            if session_id:
                session = self._accept(session_id, seq, kind, count, arg)
                if session is None:
                    continue
            if kind == ENQUEUE:
                repeated = 0
                if count:
                    size = batch.enqueue_bytes(data, offset)
                    if session is not None and session.producer is not None:
                        repeated = self._repeated(session, count)
                        size -= size * repeated // count
                        if repeated and self.trace is not None:
                            self._trace_published(
                                words.DUPLICATE, session_id, seq, repeated, index, offset, 0
                            )
                    if repeated < count:
                        count -= repeated
                        if self.trace is not None:
                            self._trace_published(
                                0, session_id, seq, count, index, offset, repeated
                            )
                        self.published += count
                        self.fresh.push(index, offset, repeated, count, size, 0, 0)
                if repeated:
                    self._reply(session, APPLIED_OK, repeated)
                else:
                    self._applied(session)
            elif session is not None:
                self._session_command(session, kind, flags, count, arg, data, offset)
            else:
                self._leader_command(kind, flags, count, arg, data, offset)
            if self._priorities and (
                self.fresh.messages or self.returned.messages or self.requeued.messages
            ):
                self._assign()
        self._end_entry()

    # ---------------------------------------------------------------- the trace

    def _trace_published(
        self, reason: int, session: int, seq: int, count: int, index: int, offset: int, first: int
    ) -> None:
        """Messages that a command brought; with a `reason` they did not enter the queue."""
        number = -1 if reason else self.published
        self.trace.add(
            words.PUBLISHED, 0, reason, session, 0, seq, number, count, index, offset, first, 0, 0
        )

    def _trace_run(
        self, kind: int, flags: int, reason: int, session: int, number: int, run: runs.Run
    ) -> None:
        """What became of a run that consumer `number` of `session` had; 0, 0 = it was ready."""
        index, offset, first, count, _size, acquired, delivered = run
        self.trace.add(
            kind, flags, reason, session, number, 0, 0, count, index, offset, first, acquired,
            delivered,
        )  # fmt: skip

    def _trace_purged(self) -> None:
        """All that is ready is about to go."""
        for owner, _, _, run in self.state_snapshot():
            if owner is None:
                self._trace_run(words.DROPPED, 0, words.PURGED, 0, 0, run)

    def _trace_owner(self, flags: int, consumer: Consumer) -> None:
        """A consumer may be served from now on (CAME), or no more (GONE)."""
        if consumer.no_ack:
            flags |= words.NO_ACK
        self.trace.add(
            words.OWNER, flags, 0, consumer.session.id, consumer.number, 0, consumer.next_id,
            0, 0, 0, 0, consumer.window, 0,
        )  # fmt: skip

    def _trace_reservation(self, flags: int, reservation: Reservation) -> None:
        """A reservation may take messages from now on (CAME), or is no more (GONE)."""
        self.trace.add(
            words.OWNER, flags | words.BY_RESERVATION, 0, reservation_session(reservation.name), 0,
            0, reservation.next, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def run_count(self) -> int:
        """Runs in the queue: what `state_snapshot` costs."""
        held = sum(consumer.checked_out.run_count() for consumer in self._consumers())
        held += sum(
            reservation.held.run_count() for reservation in self.reservations.by_name.values()
        )
        ready = self.fresh.run_count() + self.returned.run_count() + self.requeued.run_count()
        return int(ready + held)

    def state_snapshot(self) -> list[tuple[int | None, int, int, runs.Run]]:
        """(session, consumer number, first message id, run) of everything in the queue: what is
        ready first (session None), then what is checked out. A reservation counts as session
        `reservation_session(name)`. Cost: O(runs)."""
        made: list[tuple[int | None, int, int, runs.Run]] = [
            (None, 0, 0, run)
            for run in (*self.returned.runs(), *self.requeued.runs(), *self.fresh.runs())
        ]
        for consumer in self._consumers():
            made += [
                (consumer.session.id, consumer.number, message_id, run)
                for message_id, run in consumer.checked_out.held()
            ]
        for reservation in self.reservations.by_name.values():
            owner = reservation_session(reservation.name)
            made += [(owner, 0, message_id, run) for message_id, run in reservation.held.held()]
        return made

    # ---------------------------------------------------------------- commands

    def _new_session(self, session_id: int) -> QueueSession:
        return QueueSession(session_id)

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
                ranges = batch.ranges(data, offset, count)
                for i in range(0, len(ranges), 2):
                    self._release(consumer, kind, flags & FLAG_FAILED, ranges[i], ranges[i + 1])
                self._refresh(consumer)
            self._applied(session)
        elif kind == GET:
            self._get(session, flags & FLAG_GET_SETTLED != 0)
        elif kind == CHECKOUT:
            self._checkout(session, arg, decode_map(batch.command_body(data, offset), count))
        elif kind == CREDIT:
            consumer = session.consumers.get(arg)
            if consumer is not None and consumer.state < CANCELLED:
                consumer.window = int(decode_map(batch.command_body(data, offset), count)["credit"])
                self._refresh(consumer)
            self._applied(session)
        elif kind == CANCEL:
            consumer = session.consumers.get(arg)
            if consumer is not None and consumer.state < CANCELLED:
                self._cancel(consumer)
            self._reply(session, APPLIED_OK, None)
        elif kind == batch.CMD_PURGE:
            count = self.ready
            self.purged += count
            if self.trace is not None:
                self._trace_purged()
            self.fresh.clear()
            self.returned.clear()
            self.requeued.clear()
            self._reply(session, APPLIED_OK, count)
        elif kind == batch.CMD_SESSION_CLOSE:
            self._applied(session)
            self._end_sessions((session,), failed=True)
        elif kind == batch.CMD_PRODUCER:
            self._producer(session, count, arg, data, offset)
        elif kind == batch.CMD_RESERVATION:
            self._reservation(session, batch.command_body(data, offset), count)
        elif kind == batch.CMD_SESSION_OPEN:
            self._applied(session)
        else:
            raise UnknownCommand(f"a session's command of type {kind} is not known")

    def _leader_command(
        self, kind: int, flags: int, count: int, arg: int, data: bytes, offset: int
    ) -> None:
        if kind == batch.CMD_TICK:
            self._tick()
        elif kind == batch.CMD_SESSION_DOWN:
            session = self.sessions.get(first_u64(data, offset))
            if session is not None:
                self._end_sessions((session,), failed=True)
        elif kind == batch.CMD_NODE_DOWN:
            self._node_down(arg, flags & FLAG_NODE_GONE != 0)
        elif kind == batch.CMD_NODE_UP:
            self._node_up(arg, first_u64(data, offset))
        else:
            raise UnknownCommand(f"a command of type {kind} is not known")

    # ----------------------------------------------------------- serving

    def _serve_last(self, consumer: Consumer) -> None:
        """Puts a consumer at the end of the service queue, if it may be served and is not in it."""
        if (
            consumer.queued
            or consumer.state != UP
            or consumer.window <= consumer.checked_out.messages
            or consumer.session.node in self.down_nodes
        ):
            return
        consumer.queued = True
        level = self._levels.get(consumer.priority)
        if level is None:
            self._levels[consumer.priority] = deque((consumer,))
            self._priorities = sorted(self._levels, reverse=True)
        else:
            level.append(consumer)

    def _serve_no_more(self, consumer: Consumer) -> None:
        """Takes a consumer out of the service queue."""
        if consumer.queued:
            consumer.queued = False
            level = self._levels[consumer.priority]
            level.remove(consumer)
            if not level:
                self._drop_level(consumer.priority)

    def _drop_level(self, priority: int) -> None:
        del self._levels[priority]
        self._priorities = sorted(self._levels, reverse=True)

    def _assign(self) -> None:
        """Hands ready messages to consumers until one side has nothing left."""
        while self._priorities:
            ready = self.fresh.messages + self.returned.messages + self.requeued.messages
            if not ready:
                return
            priority = self._priorities[0]
            level = self._levels[priority]
            consumer = level.popleft()
            others = len(level)
            turn = consumer.window - consumer.checked_out.messages
            if others:
                fair = ready // (TURN_DIVISOR * (others + 1))
                fair = min(max(fair, 1), TURN_MESSAGES_MAX)
                turn = min(turn, fair)
            assert turn > 0
            while turn and ready:
                taken = self._hand_out(consumer, turn, True)
                turn -= taken
                ready -= taken
            if consumer.window > consumer.checked_out.messages:
                level.append(consumer)
            else:
                consumer.queued = False
                if not others:
                    self._drop_level(priority)

    def _hand_out(self, consumer: Consumer, limit: int, hold: bool) -> int:
        """Gives the consumer at most `limit` messages of the next run; returns how many."""
        source = self.returned
        if not source.messages:
            source = self.fresh
            if self.requeued.messages:
                ahead = self.requeued.ahead(self.published - self.fresh.messages)
                if ahead:
                    limit = min(limit, ahead)
                else:
                    source = self.requeued
        index, offset, first, count, size, acquired, delivered = source.take(limit)
        message_id = consumer.next_id
        consumer.next_id = message_id + count
        self.delivered += count
        if acquired:
            self.redelivered += count
        if self.trace is not None:
            flags = words.REDELIVERED if acquired else 0
            if consumer.no_ack:
                flags |= words.NO_ACK
            self.trace.add(
                words.DELIVERED, flags, 0, consumer.session.id, consumer.number, 0, message_id,
                count, index, offset, first, acquired, delivered,
            )  # fmt: skip
            if not hold:
                run = (index, offset, first, count, size, acquired, delivered)
                self._trace_run(words.ACKED, 0, 0, consumer.session.id, consumer.number, run)
        if hold:
            consumer.checked_out.add(
                message_id, index, offset, first, count, size, acquired, delivered
            )
            self.unacked += count
            self.unacked_bytes += size
        else:
            self.acked += count
        self.effects.append(
            (
                EFFECT_DELIVER,
                consumer.session.id,
                consumer.number,
                message_id,
                index,
                offset,
                first,
                count,
                acquired,
                delivered,
            )
        )
        return count

    def _get(self, session: QueueSession, settled: bool) -> None:
        """basic.get: DELIVER to consumer 0, then the reply [message id, ready left] or []."""
        self.last_active_ms = self.time_ms
        if self.single_active:
            self._reply(session, APPLIED_REJECTED, "single_active")
            return
        if not self.ready:
            self._reply(session, APPLIED_OK, [])
            return
        poller = session.consumers.get(0)
        if poller is None:
            poller = Consumer(session, 0, POLLER)
            session.consumers[0] = poller
            if self.trace is not None:
                self._trace_owner(words.CAME, poller)
        message_id = poller.next_id
        self._hand_out(poller, 1, not settled)
        self._reply(session, APPLIED_OK, [message_id, self.ready])

    def _release(self, consumer: Consumer, kind: int, failed: int, first: int, last: int) -> None:
        """Takes message ids first … last from the consumer, as far as it still holds them."""
        if last < first:
            return
        if kind == SETTLE:
            for run in consumer.checked_out.remove(first, last):
                if self.trace is not None:
                    self._trace_run(words.ACKED, 0, 0, consumer.session.id, consumer.number, run)
                self.acked += run[3]
                self.unacked -= run[3]
                self.unacked_bytes -= run[4]
        elif kind == RETURN:
            for run in consumer.checked_out.remove(first, last):
                if self.trace is not None:
                    flags = words.FAILED if failed else 0
                    self._trace_run(
                        words.RETURNED, flags, 0, consumer.session.id, consumer.number, run
                    )
                if not failed and self.delivery_limit < 0:
                    self._requeue(run)
                else:
                    self._return(run, failed)
        else:
            for run in consumer.checked_out.remove(first, last):
                if self.trace is not None:
                    self._trace_run(
                        words.DROPPED, words.HELD, words.REJECTED,
                        consumer.session.id, consumer.number, run,
                    )  # fmt: skip
                self.unacked -= run[3]
                self.unacked_bytes -= run[4]
                self._discard(run, "rejected")

    def _return(self, run: runs.Run, failed: int) -> None:
        """To the end of `returned`, or out when the delivery count passes the limit."""
        index, offset, first, count, size, acquired, delivered = run
        self.unacked -= count
        self.unacked_bytes -= size
        self.returns += count
        acquired += 1
        delivered += failed
        if 0 <= self.delivery_limit < delivered:
            run = (index, offset, first, count, size, acquired, delivered)
            if self.trace is not None:
                self._trace_run(words.DROPPED, 0, words.OVER_DELIVERY_LIMIT, 0, 0, run)
            self._discard(run, "delivery_limit")
            self.effects.append((EFFECT_NOTE, "quorum.delivery_limit", {"count": count}))
        else:
            self.returned.push(index, offset, first, count, size, acquired, delivered)

    def _requeue(self, run: runs.Run) -> None:
        """To the tail: behind all that is in the queue."""
        index, offset, first, count, size, acquired, delivered = run
        self.unacked -= count
        self.unacked_bytes -= size
        self.returns += count
        self.requeued.requeue(
            self.published, index, offset, first, count, size, acquired + 1, delivered
        )

    def _return_all(self, consumer: Consumer, failed: int) -> None:
        """Returns all that a consumer holds, in ascending message id."""
        for run in consumer.checked_out.remove_all():
            if self.trace is not None:
                flags = words.FAILED if failed else 0
                self._trace_run(words.RETURNED, flags, 0, consumer.session.id, consumer.number, run)
            self._return(run, failed)

    def _discard(self, run: runs.Run, reason: str) -> None:
        """Where messages leave other than by settling; dead-lettering takes them from here."""
        self.dropped[reason] = self.dropped.get(reason, 0) + run[3]

    # ---------------------------------------------------------- consumers

    def _checkout(self, session: QueueSession, number: int, spec: dict[str, Any]) -> None:
        exclusive = bool(spec.get("exclusive", False)) and bool(self.settings["exclusive_honoured"])
        refusal = None
        if number == 0 or number in session.consumers:
            refusal = "consumer_exists"
        elif self.settings["exclusive_honoured"] and self.consumer_count:
            others = [c for c in self._consumers() if c.state < CANCELLED]
            if exclusive or any(other.exclusive for other in others):
                refusal = "exclusive"
        if refusal is not None:
            self._reply(session, APPLIED_REJECTED, refusal)
            return
        consumer = Consumer(session, number, UP)
        consumer.tag = str(spec.get("tag", ""))
        consumer.no_ack = bool(spec.get("no_ack", False))
        consumer.priority = int(spec.get("priority", 0))
        consumer.arguments = dict(spec.get("args") or {})
        consumer.exclusive = exclusive
        prefetch = int(spec.get("prefetch", 0))
        consumer.window = WINDOW_UNLIMITED if prefetch <= 0 or consumer.no_ack else prefetch
        session.consumers[number] = consumer
        self.consumer_count += 1
        if self.trace is not None:
            self._trace_owner(words.CAME, consumer)
        # The reply goes first: a consumer hears that it exists before its first delivery.
        self._reply(session, APPLIED_OK, None)
        if self.single_active:
            consumer.state = WAITING
            self.waiting.append(consumer)
            self._choose_active()
        else:
            self._serve_last(consumer)

    def _cancel(self, consumer: Consumer) -> None:
        """No more deliveries; the record stays while the consumer holds messages."""
        self._serve_no_more(consumer)
        if consumer.state == WAITING:
            self.waiting.remove(consumer)
        consumer.state = CANCELLED
        if self.trace is not None:
            self._trace_owner(words.GONE, consumer)
        self.consumer_count -= 1
        self.last_active_ms = self.time_ms
        if not consumer.checked_out.messages:
            del consumer.session.consumers[consumer.number]
        if self.single_active:
            self._choose_active()

    def _refresh(self, consumer: Consumer) -> None:
        """After a consumer's holdings or window changed."""
        if consumer.state == UP:
            if not consumer.queued:
                self._serve_last(consumer)
            elif consumer.window <= consumer.checked_out.messages:
                self._serve_no_more(consumer)
        if consumer.checked_out.messages:
            return
        if consumer.state == CANCELLED:
            consumer.session.consumers.pop(consumer.number, None)
        if consumer is self.active and (consumer.state != UP or self.down_nodes):
            self._choose_active()

    def _best_waiting(self) -> Consumer | None:
        """Single active consumer: highest priority among those whose node is up, then arrival."""
        best: Consumer | None = None
        for consumer in self.waiting:
            if consumer.session.node in self.down_nodes:
                continue
            if best is None or consumer.priority > best.priority:
                best = consumer
        return best

    def _choose_active(self) -> None:
        """Single active consumer: swaps, quiesces or activates as the rules ask for it now."""
        if self.reservations.by_name:
            return
        active = self.active
        if active is not None and (
            active.state == CANCELLED or active.session.node in self.down_nodes
        ):
            self._serve_no_more(active)
            if self.strict and active.checked_out.messages:
                return
            if active.state != CANCELLED:
                active.state = WAITING
                self.waiting.append(active)
            self.active = active = None
        best = self._best_waiting()
        if active is not None:
            if best is None or best.priority <= active.priority:
                if active.state == QUIESCING:
                    active.state = UP
                    self._serve_last(active)
                return
            self._serve_no_more(active)
            if active.checked_out.messages:
                active.state = QUIESCING
                return
            active.state = WAITING
            self.waiting.append(active)
            self.active = None
        if best is not None:
            self.waiting.remove(best)
            best.state = UP
            self.active = best
            self._serve_last(best)

    def _end_sessions(self, sessions: Iterable[QueueSession], *, failed: bool) -> None:
        """Removes sessions, returning what their consumers hold. Only when all have ended somebody
        else may become active: a consumer of the last one must not, for the moment."""
        for session in sessions:
            self._remove_session(session)
            self._end_consumers(session, failed=failed)
        if self.single_active:
            self._choose_active()

    def _end_consumers(self, session: QueueSession, *, failed: bool) -> None:
        for consumer in list(session.consumers.values()):
            self._serve_no_more(consumer)
            if consumer.state == WAITING:
                self.waiting.remove(consumer)
            if consumer is self.active:
                self.active = None
            if consumer.state < CANCELLED:
                self.consumer_count -= 1
                self.last_active_ms = self.time_ms
            self._return_all(consumer, 1 if failed else 0)
            if self.trace is not None and consumer.state != CANCELLED:
                self._trace_owner(words.GONE, consumer)
            consumer.state = CANCELLED
        session.consumers.clear()

    # ------------------------------------------------------------- reservations

    def _reservation(self, session: QueueSession, body: bytes, length: int) -> None:
        """RESERVATION: one op of `queues.reservations`; answered with its map, or refused with a
        reason."""
        try:
            op = decode_map(body, length)
        except ValueError:
            self._reply(session, APPLIED_REJECTED, MALFORMED)
            return
        reason, answer = self.reservations.apply(op, self.index, self.time_ms)
        if reason is not None:
            self._reply(session, APPLIED_REJECTED, reason)
            return
        self._reply(session, APPLIED_OK, answer)
        if op["op"] in ("open", "lease") and op["reservation"] in self.reservations.by_name:
            due = self.reservations.by_name[op["reservation"]].due_ms
            self.effects.append((EFFECT_TIMER, due))

    def reservation_refusal(self) -> str | None:
        """See `reservations.Holder`."""
        if self.single_active and (self.active is not None or self.reservations.by_name):
            return SINGLE_ACTIVE
        return None

    def reservation_opened(self, reservation: Reservation) -> None:
        """See `reservations.Holder`."""
        reservation.held = runs.CheckedOut()
        self.consumer_count += 1
        if self.trace is not None:
            self._trace_reservation(words.CAME, reservation)

    def reservation_closed(self, reservation: Reservation) -> None:
        """See `reservations.Holder`."""
        self.consumer_count -= 1
        self.last_active_ms = self.time_ms
        if self.trace is not None:
            self._trace_reservation(words.GONE, reservation)
        if self.single_active:
            self._choose_active()

    def reservation_take(self, reservation: Reservation, limit: int) -> int:
        """See `reservations.Holder`: like a delivery, but nobody is told."""
        held = reservation.held
        size = held.size
        taken = again = pieces = 0
        while taken < limit and pieces < TAKE_RUNS_MAX and self.ready:
            source, room = self._next_source()
            moved, parts = held.take_from(
                source, reservation.next + taken, min(limit - taken, room), TAKE_RUNS_MAX - pieces
            )
            taken += moved
            pieces += parts
            if source is not self.fresh:
                again += moved
        if self.trace is not None:
            owner = reservation_session(reservation.name)
            for message_id, run in held.held_from(reservation.next):
                flags = words.BY_RESERVATION | (words.REDELIVERED if run[5] else 0)
                self.trace.add(
                    words.DELIVERED, flags, 0, owner, 0, 0, message_id,
                    run[3], run[0], run[1], run[2], run[5], run[6],
                )  # fmt: skip
        self.delivered += taken
        self.redelivered += again
        self.unacked += taken
        self.unacked_bytes += held.size - size
        return int(taken)

    def _next_source(self) -> tuple[runs.Fifo, int]:
        """Where the next message is, and how many of them may be taken there in a row. There must
        be one."""
        if self.returned.messages:
            return self.returned, self.returned.messages
        if self.requeued.messages:
            ahead = self.requeued.ahead(self.published - self.fresh.messages)
            return (self.fresh, ahead) if ahead else (self.requeued, self.requeued.together())
        return self.fresh, self.fresh.messages

    def reservation_settle(self, reservation: Reservation, first: int, last: int) -> None:
        """See `reservations.Holder`."""
        if self.trace is not None:
            owner = reservation_session(reservation.name)
            for _, run in reservation.held.between(first, last + 1, reservation.held.run_count()):
                self._trace_run(words.ACKED, words.BY_RESERVATION, 0, owner, 0, run)
        messages, size = reservation.held.drop_oldest(last)
        self.acked += messages
        self.unacked -= messages
        self.unacked_bytes -= size

    def reservation_return(
        self, reservation: Reservation, first: int, last: int, failed: bool
    ) -> None:
        """See `reservations.Holder`."""
        for run in reservation.held.remove(first, last):
            if self.trace is not None:
                owner = reservation_session(reservation.name)
                flags = words.BY_RESERVATION | (words.FAILED if failed else 0)
                self._trace_run(words.RETURNED, flags, 0, owner, 0, run)
            self._return(run, int(failed))

    # -------------------------------------------------------------- nodes

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
            consumer: Consumer
            for consumer in session.consumers.values():
                self._serve_no_more(consumer)
        if self.single_active:
            self._choose_active()
        due = self._nodes_due_ms()
        if due is not None:
            self.effects.append((EFFECT_TIMER, due))

    def _node_up(self, node: int, incarnation: int) -> None:
        """Ends the sessions of older incarnations of the node; the others go on."""
        self._hear_of(node, incarnation)
        was_down = self.down_nodes.pop(node, None) is not None
        sessions = self._sessions_of(node)
        older = [s for s in sessions if (s.id >> 24) & 0xFFFFFFFF < incarnation]
        # First: who takes over may be a consumer of this node that has waited longest.
        self._end_sessions(older, failed=True)
        if not was_down:
            return
        for session in self._sessions_of(node):
            for consumer in session.consumers.values():
                self._serve_last(consumer)
        if self.single_active:
            self._choose_active()

    def _tick(self) -> None:
        """Returns the messages of consumers whose node has been away for too long, and of
        reservations that nobody was heard of."""
        self._forget_producers()
        for reservation in self.reservations.expire(self.time_ms):
            self.effects.append(
                (EFFECT_NOTE, "quorum.reservation_expired", {"reservation": reservation.name})
            )
        timeout: int = self.settings["disconnect_timeout_ms"]
        for node, state in self.down_nodes.items():
            if state[1] or self.time_ms < state[0] + timeout:
                continue
            state[1] = 1
            for session in self._sessions_of(node):
                for consumer in list(session.consumers.values()):
                    self._return_all(consumer, 0)
                    self._refresh(consumer)
        due = self.next_due_ms()
        if due is not None:
            self.effects.append((EFFECT_TIMER, due))

    def next_due_ms(self) -> int | None:
        """When the leader must propose TICK (logged time, ms); None = nothing waits for time."""
        dues = [
            due
            for due in (self.reservations.next_due_ms(), self._nodes_due_ms())
            if due is not None
        ]
        return min(dues, default=None)

    def _nodes_due_ms(self) -> int | None:
        due: int | None = None
        timeout: int = self.settings["disconnect_timeout_ms"]
        for state in self.down_nodes.values():
            if not state[1] and (due is None or state[0] + timeout < due):
                due = state[0] + timeout
        return due

    # ---------------------------------------------------------- versions

    def set_version(self, version: int) -> None:
        """Carries out a `machine version` entry. Raises UnsupportedVersion."""
        self.version = supported.check_version(self, version)

    def command_types(self, version: int) -> bytes:
        """The command types that a version knows (Machine.command_types)."""
        return COMMAND_TYPES[version]

    # ------------------------------------------------------------ looking at it

    def _consumers(self) -> list[Consumer]:
        return [c for session in self.sessions.values() for c in session.consumers.values()]

    def at_rest(self) -> bool:
        """No message waits for a consumer's window, so a settle can wait a little."""
        return not self.ready

    @property
    def ready(self) -> int:
        """Messages that wait for a consumer."""
        return self.fresh.messages + self.returned.messages + self.requeued.messages

    @property
    def ready_bytes(self) -> int:
        """Body bytes of the messages that wait."""
        return self.fresh.size + self.returned.size + self.requeued.size

    def service_queue(self) -> list[tuple[int, int]]:
        """(session, consumer number) in the order in which they will be served."""
        return [
            (consumer.session.id, consumer.number)
            for priority in self._priorities
            for consumer in self._levels[priority]
        ]

    def holds(self, session: int, consumer: int) -> list[tuple[int, runs.Run]]:
        """(first message id, run) of what a consumer holds, ascending; [] when it is unknown."""
        found = self._consumer(session, consumer)
        return found.checked_out.held() if found is not None else []

    def _consumer(self, session: int, number: int) -> Consumer | None:
        known = self.sessions.get(session)
        return known.consumers.get(number) if known is not None else None

    def positions(self, session_node: int) -> list[tuple[int, int, int]]:
        """(session, consumer, next message id) of the subscribed consumers of a node."""
        return [
            (session.id, consumer.number, consumer.next_id)
            for session in self._sessions_of(session_node)
            for consumer in session.consumers.values()
            if consumer.state != POLLER
        ]

    def position(self, session: int, consumer: int) -> int:
        """A consumer's next message id; 0 when it is unknown."""
        found = self._consumer(session, consumer)
        return found.next_id if found is not None else 0

    def consumers(self) -> list[dict[str, Any]]:
        """What the management API shows of each consumer."""
        names = ("up", "waiting", "quiescing", "cancelled", "poller")
        made: list[dict[str, Any]] = []
        for consumer in self._consumers():
            if consumer.state == POLLER:
                continue
            status = names[consumer.state]
            if consumer.session.node in self.down_nodes:
                status = "suspected_down"
            elif self.single_active and consumer.state == UP:
                status = "single_active"
            made.append(
                {
                    "session": consumer.session.id,
                    "number": consumer.number,
                    "consumer_tag": consumer.tag,
                    "prefetch_count": consumer.window,
                    "ack_required": not consumer.no_ack,
                    "priority": consumer.priority,
                    "active": consumer.state == UP,
                    "activity_status": status,
                    "unacked": consumer.checked_out.messages,
                }
            )
        return made + self.reservations.infos()

    def totals(self) -> dict[str, int]:
        """Counters and gauges for metrics."""
        made = {
            "ready": self.ready,
            "unacked": self.unacked,
            "ready_bytes": self.ready_bytes,
            "unacked_bytes": self.unacked_bytes,
            "returned_ready": self.returned.messages + self.requeued.messages,
            "consumers": self.consumer_count,
            "published": self.published,
            "delivered": self.delivered,
            "acked": self.acked,
            "returned": self.returns,
            "redelivered": self.redelivered,
            "purged": self.purged,
            "duplicates": self.duplicates,
        }
        for reason, count in self.dropped.items():
            made["dropped_" + reason] = count
        return made

    def memory_bytes(self) -> int:
        """Bytes of the packed index: runs that are ready or checked out."""
        held = [consumer.checked_out for consumer in self._consumers()]
        held += [reservation.held for reservation in self.reservations.by_name.values()]
        ready: int = self.fresh.memory_bytes() + self.returned.memory_bytes()
        ready += self.requeued.memory_bytes()
        return ready + sum(part.memory_bytes() for part in held)

    def live_ranges(self) -> Iterable[tuple[int, int]]:
        """Ascending, disjoint, inclusive ranges of entry indexes whose bodies are still needed.

        What is fresh was published in one stretch of the log, so it is one range, with the few
        small entries that lie between; everything else is named entry by entry.
        """
        needed = set(self.returned.indexes())
        needed.update(self.requeued.indexes())
        for consumer in self._consumers():
            needed.update(consumer.checked_out.indexes())
        for reservation in self.reservations.by_name.values():
            needed.update(reservation.held.indexes())
        spans = [(index, index) for index in needed]
        if self.fresh.messages:
            spans.append((self.fresh.first_index(), self.fresh.last_index()))
        spans.sort()
        made: list[tuple[int, int]] = []
        low = 0
        high = -1
        for start, end in spans:
            if high < 0:
                low, high = start, end
            elif start <= high + 1:
                high = max(high, end)
            else:
                made.append((low, high))
                low, high = start, end
        if high >= 0:
            made.append((low, high))
        return made

    def oldest_live(self) -> int:
        """Nearly the first of `live_ranges`: messages that came back may lie before it."""
        oldest = NEVER
        for waiting in (self.fresh, self.returned, self.requeued):
            if waiting.messages:
                oldest = min(oldest, waiting.first_index())
        for consumer in self._consumers():
            if consumer.checked_out.messages:
                oldest = min(oldest, consumer.checked_out.first_index())
        for reservation in self.reservations.by_name.values():
            if reservation.held.messages:
                oldest = min(oldest, reservation.held.first_index())
        return oldest

    def resend(self, session_node: int) -> None:
        """Appends the effects that bring the clients of a node up to date (Machine.resend)."""
        for session in self._sessions_of(session_node):
            # What basic.get took comes before its reply, a subscription's reply before deliveries.
            self._redeliver(session, True)
            for seq, status, reply in session.replies:
                self.effects.append((EFFECT_APPLIED, session.id, seq, status, reply))
            self.effects.append((EFFECT_APPLIED, session.id, session.seq, APPLIED_OK, None))
            self._redeliver(session, False)

    def _redeliver(self, session: QueueSession, pollers: bool) -> None:
        for consumer in session.consumers.values():
            if (consumer.state == POLLER) == pollers:
                self.redeliver(session.id, consumer.number, 0)

    def redeliver(self, session: int, consumer: int, from_id: int) -> None:
        """Appends DELIVER effects for what the consumer holds from message id `from_id` on."""
        for message_id, run in self.holds(session, consumer):
            index, offset, first, count, _size, acquired, delivered = run
            skip = max(0, from_id - message_id)
            if skip < count:
                self.effects.append(
                    (
                        EFFECT_DELIVER,
                        session,
                        consumer,
                        message_id + skip,
                        index,
                        offset,
                        first + skip,
                        count - skip,
                        acquired,
                        delivered,
                    )
                )

    # -------------------------------------------------------------- snapshots

    def snapshot(self) -> bytes:
        """The state as msgpack of plain values and packed runs; equal for equal states."""
        state = {
            "format": 3,
            "version": self.version,
            "settings": dict(sorted(self.settings.items())),
            "index": self.index,
            "time_ms": self.time_ms,
            "last_active_ms": self.last_active_ms,
            "fresh": self.fresh.pack(),
            "returned": self.returned.pack(),
            "sessions": [
                [
                    s.id,
                    s.seq,
                    list(s.replies),
                    [c.pack() for c in s.consumers.values()],
                    s.producer,
                ]
                for s in self.sessions.values()
            ],
            "openings": self._pack_openings(),
            "producers": self._pack_producers(),
            "service": self.service_queue(),
            "waiting": [(c.session.id, c.number) for c in self.waiting],
            "down_nodes": [[node, *state] for node, state in self.down_nodes.items()],
            "totals": [
                self.published,
                self.delivered,
                self.acked,
                self.returns,
                self.redelivered,
                self.purged,
                self.duplicates,
            ],
            "dropped": dict(sorted(self.dropped.items())),
            "reservations": self.reservations.pack(),
            "requeued": self.requeued.pack_tail(),
            "written": self._pack_written(),
        }
        return msgspec.msgpack.encode(state)

    def restore(self, state: bytes) -> None:
        """Replaces the state. Raises ValueError for what is no snapshot of a known format."""
        try:
            known = msgspec.msgpack.decode(state)
            if known["format"] != 3:
                raise ValueError(f"snapshot format {known['format']} is not known")
            trace, self.trace = self.trace, None
            try:
                self._restore(known)
            finally:
                self.trace = trace
            if trace is not None:
                trace.restored(self.index)
        except (KeyError, TypeError, msgspec.DecodeError) as error:
            raise ValueError(f"damaged snapshot of a quorum queue: {error!r}") from error

    def _restore(self, known: dict[str, Any]) -> None:
        self.set_version(known["version"])
        self.settings = known["settings"]
        self._clear()
        self.index = known["index"]
        self.time_ms = known["time_ms"]
        self.last_active_ms = known["last_active_ms"]
        self.fresh.unpack(known["fresh"])
        self.returned.unpack(known["returned"])
        self.requeued.unpack_tail(known["requeued"])
        for session_id, seq, replies, consumers, producer in known["sessions"]:
            session = QueueSession(session_id)
            session.seq = seq
            session.producer = tuple(producer) if producer else None
            session.replies.extend((reply[0], reply[1], reply[2]) for reply in replies)
            self.sessions[session_id] = session
            for packed in consumers:
                self._restore_consumer(session, packed)
        self._unpack_openings(known["openings"])
        self._unpack_producers(known["producers"])
        self._unpack_written(known["written"])
        for session_id, number in known["service"]:
            consumer = self.sessions[session_id].consumers[number]
            consumer.queued = True
            self._levels.setdefault(consumer.priority, deque()).append(consumer)
        self._priorities = sorted(self._levels, reverse=True)
        self.waiting = [self.sessions[s].consumers[number] for s, number in known["waiting"]]
        self.down_nodes = {node: [since, returned] for node, since, returned in known["down_nodes"]}
        (
            self.published,
            self.delivered,
            self.acked,
            self.returns,
            self.redelivered,
            self.purged,
            self.duplicates,
        ) = known["totals"]
        self.dropped = known["dropped"]
        self.reservations.unpack(known["reservations"])
        for reservation in self.reservations.by_name.values():
            self.unacked += reservation.held.messages
            self.unacked_bytes += reservation.held.size

    def _restore_consumer(self, session: QueueSession, packed: list[Any]) -> None:
        consumer = Consumer(session, packed[0], packed[1])
        consumer.tag = packed[2]
        consumer.window = packed[3]
        consumer.no_ack = packed[4]
        consumer.exclusive = packed[5]
        consumer.priority = packed[6]
        consumer.arguments = packed[7]
        consumer.next_id = packed[8]
        consumer.checked_out.unpack(packed[9])
        session.consumers[consumer.number] = consumer
        self.unacked += consumer.checked_out.messages
        self.unacked_bytes += consumer.checked_out.size
        if consumer.state < CANCELLED:
            self.consumer_count += 1
        if self.single_active and (
            consumer.state in (UP, QUIESCING) or (self.strict and consumer.state == CANCELLED)
        ):
            self.active = consumer

    def state_hash(self) -> int:
        """Equal on replicas that applied the same index."""
        return zlib.crc32(self.snapshot())


def reservation_session(name: str) -> int:
    """The number under which a reservation appears among sessions in the trace; no node has it."""
    return zlib.crc32(name.encode())


supported.register(QuorumMachine)
