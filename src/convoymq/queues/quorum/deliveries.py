# cython: annotation_typing=False
"""Deliveries of a quorum queue: ready messages go to consumers, and come back or leave.

Messages:  ready or returned --assign--> checked out --settle--> gone
                    ^                        |---discard--> leaves (`rejected`)
                    +-------- return --------+--- over the limit --> leaves (`delivery_limit`)
           ready --time is over, at a head--> leaves (`expired`; anywhere by `expire_by_due`)
           ready --the queue is too long----> leaves (`maxlen`)

What leaves is dropped or dead-lettered (`DeadLetters.leave`). Of a group at most one message is
ready or checked out (`Groups`).

Returns: to the end of `returned`, which is served before fresh messages. Without a delivery limit
what a client gives back unfailed goes to the tail instead, behind all that is in the queue by then.
The setting `requeue_position` says otherwise (`Backlog.give_back`). With `counts_returns` all that
a client gives back has failed, and goes to the tail without a limit (ADR 0086).

Turns (`assign`): see ADR 0003. Since version 3 a turn ends where the consumer's batch is complete,
the messages that it settles at once, if it is quick enough to be given that many.

Invariants: after `assign` there is no message to serve or nobody to serve; nothing that has expired
is handed out.
"""

from __future__ import annotations

from convoymq.kernels import batch
from convoymq.model import trace as words
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.outcomes import (
    FLAG_FAILED,
    FLAG_REJECTED,
    FLAG_UNDELIVERABLE,
    FLAG_UNTRIED,
    Modified,
)
from convoymq.queues.quorum import runs, tracing
from convoymq.queues.quorum.backlog import (
    EXPIRED,
    OVER_DELIVERY_LIMIT,
    OVER_LENGTH,
    REJECTED,
    Backlog,
)
from convoymq.queues.quorum.consumers import (
    BATCHES_SINCE,
    BUSY_TURN_MAX,
    CANCELLED,
    Consumer,
    Consumers,
)
from convoymq.queues.quorum.dead_letters import DeadLetters
from convoymq.queues.quorum.levels import due_of
from convoymq.queues.quorum.notes import AVOIDED_MAX, Key, cut
from convoymq.replication.machine import EFFECT_DELIVER, EFFECT_REFUSING

#: A turn of one of n consumers is 1/(16 n) of the ready messages, 1 … TURN_MESSAGES_MAX (ADR 0003).
TURN_DIVISOR = 16
TURN_MESSAGES_MAX = 256

SETTLE = batch.CMD_SETTLE
RETURN = batch.CMD_RETURN


class Deliveries:
    """Moves messages between the backlog and the consumers of a machine."""

    def __init__(
        self,
        machine: GroupMachine,
        backlog: Backlog,
        consumers: Consumers,
        dead_letters: DeadLetters,
    ) -> None:
        self.machine = machine
        self.backlog = backlog
        self.consumers = consumers
        self.dead_letters = dead_letters

    # ---------------------------------------------------------------- handing out

    def assign(self) -> None:
        """Hands ready messages to consumers until one side has nothing left."""
        backlog = self.backlog
        consumers = self.consumers
        while consumers.priorities:
            ready = backlog.ready()
            if not ready:
                return
            priority = consumers.priorities[0]
            level = consumers.levels[priority]
            consumer = level.popleft()
            others = len(level)
            turn = consumer.room()
            completes = False
            if others:
                fair = ready // (TURN_DIVISOR * (others + 1))
                fair = min(max(fair, 1), TURN_MESSAGES_MAX)
                if fair < consumer.settled_at_once:
                    busy = min(backlog.unacked // consumers.count, BUSY_TURN_MAX)
                    if self.machine.version < BATCHES_SINCE:
                        fair = max(fair, min(busy, consumer.settled_at_once))
                    else:
                        missing = consumer.missing_in_batch()
                        busy = min(max(busy, consumer.turn_of(self.machine.time_ms)), missing)
                        if busy >= fair:
                            fair = busy
                            completes = busy == missing
                turn = min(turn, fair)
            assert turn > 0, "a consumer without credit is in the service queue"
            if self.machine.version >= BATCHES_SINCE:
                consumer.turn_ms = self.machine.time_ms
            while turn and ready:
                taken = self.hand_out(consumer, turn, True)
                turn -= taken
                ready = ready - taken if not backlog.timed else backlog.ready()
            if consumer.room() > 0:
                if completes and turn:
                    # What the consumer settles at once is to be complete before the next one's
                    # turn, or it waits in pieces for a whole round.
                    level.appendleft(consumer)
                else:
                    level.append(consumer)
            else:
                consumer.queued = False
                if not others:
                    consumers.drop_level(priority)

    def hand_out(self, consumer: Consumer, limit: int, hold: bool) -> int:
        """Gives the consumer at most `limit` messages of the next run; returns how many. What has
        expired behind them leaves."""
        backlog = self.backlog
        run = backlog.take(limit)
        assert 0 < run[3] <= limit, "not what was asked for is handed out"
        self._give(consumer, run, hold)
        if backlog.timed:
            self.expire()
        count: int = run[3]
        return count

    def _give(self, consumer: Consumer, run: runs.Run, hold: bool) -> None:
        """Gives the consumer a run that was taken out of the backlog."""
        backlog = self.backlog
        index, offset, first, count, size, acquired_count, failed_delivery_count, mark = run
        message_id = consumer.next_id
        consumer.next_id = message_id + count
        if self.machine.trace is not None:
            self._trace_handed_out(consumer, message_id, run, hold)
        if hold:
            consumer.checked_out.add(
                message_id,
                index,
                offset,
                first,
                count,
                size,
                acquired_count,
                failed_delivery_count,
                mark,
            )
            backlog.hold(count, size)
        else:
            backlog.acked += count
        session, number = consumer.session.id, consumer.number
        if backlog.notes.by_place:
            self._deliver_noted(session, number, message_id, run)
        else:
            self.machine.effects.append(
                (
                    EFFECT_DELIVER,
                    session,
                    number,
                    message_id,
                    index,
                    offset,
                    first,
                    count,
                    acquired_count,
                    failed_delivery_count,
                )
            )
        if not hold and backlog.follows():
            backlog.gone(run)

    def _deliver_noted(self, session: int, number: int, message_id: int, run: runs.Run) -> None:
        """Appends DELIVER effects for messages of which some have annotations."""
        for part, note in self.backlog.notes.parts(run):
            effect = (EFFECT_DELIVER, session, number, message_id, *part[:4], part[5], part[6])
            self.machine.effects.append((*effect, note[0]) if note[0] else effect)
            message_id += part[3]

    def trace_passed_on(self, before: Consumer, consumer: Consumer) -> None:
        """Records that a consumer has what another one held."""
        if self.machine.trace is not None:
            for message_id, run in consumer.checked_out.held():
                self._trace(words.RETURNED, 0, 0, before, run)
                self._trace_handed_out(consumer, message_id, run, True)

    def _trace_handed_out(
        self, consumer: Consumer, message_id: int, run: runs.Run, hold: bool
    ) -> None:
        rows = self.machine.trace
        assert rows is not None, "the queue is not traced"
        session, number = consumer.session.id, consumer.number
        flags = words.NO_ACK if consumer.no_ack else 0
        tracing.delivered(rows, flags, session, number, message_id, run)
        if not hold:
            tracing.left(rows, words.ACKED, 0, 0, session, number, run)

    def serve_avoided(self) -> None:
        """Hands out what certain consumers do not get, or has it leave, or be ready again."""
        consumers, notes = self.consumers, self.backlog.notes
        if notes.checked != (consumers.changes, notes.came):
            self._check_avoided()
            notes.checked = (consumers.changes, notes.came)
        if not consumers.priorities:
            return
        hopeless: set[tuple[Key, ...]] = set()
        for came, run in list(notes.avoided.rows()):
            avoiding = notes.of(run)[1]
            for record in range(run[2], run[2] + run[3]):
                if avoiding in hopeless:
                    break
                consumer = consumers.next_without(avoiding)
                if consumer is None:
                    hopeless.add(avoiding)
                    break
                taken = notes.avoided.remove(came, run[0], run[1], record)
                assert taken is not None, "a message is not where it is avoided"
                if 0 < due_of(taken[7]) <= self.machine.time_ms and not self.backlog.keeps_all:
                    self.dead_letters.leave(taken, EXPIRED)
                    continue
                self.backlog.delivered += 1
                self.backlog.redelivered += 1
                self._give(consumer, taken, True)
                consumers.refresh(consumer)

    def _check_avoided(self) -> None:
        """Consumers came or went, or messages came back: who may get each of these now?"""
        notes = self.backlog.notes
        consumers = [c for c in self.consumers.all() if c.state < CANCELLED]
        known = {(c.session.id, c.number) for c in consumers}
        if self.consumers.single_active:
            # Whoever waits to be active may wait for ever.
            consumers = [c for c in consumers if c is self.consumers.active]
        able = {(c.session.id, c.number) for c in consumers}
        rows = list(notes.avoided.rows())
        kept = 0
        for came, run in rows:
            before = notes.of(run)[1]
            avoiding = tuple(key for key in before if key in known)
            is_avoided = avoiding and not (able and able <= {*avoiding})
            if is_avoided and kept + run[3] <= AVOIDED_MAX:
                kept += run[3]
                if avoiding != before:
                    notes.let_in(run, avoiding)
                continue
            for record in range(run[2], run[2] + run[3]):
                taken = notes.avoided.remove(came, run[0], run[1], record)
                assert taken is not None, "a message is not where it is avoided"
                notes.let_in(taken, ())
                if avoiding:
                    self.dead_letters.leave(taken, REJECTED)
                else:
                    self.backlog.restore(taken)
        if self.backlog.fronted:
            self.backlog.put_front()

    # ---------------------------------------------------------------- leaving

    def expire(self) -> None:
        """Drops what stands at a head and has expired."""
        backlog = self.backlog
        run = backlog.take_expired(self.machine.time_ms)
        while run is not None:
            self.dead_letters.leave(run, EXPIRED)
            run = backlog.take_expired(self.machine.time_ms)

    def sweep(self) -> None:
        """Drops what has expired, wherever it stands, when it is time to look."""
        backlog = self.backlog
        assert backlog.expiry is not None, "messages expire at heads only"
        if backlog.keeps_all:
            return
        taken = backlog.expiry.sweep(self.machine.time_ms)
        for run in taken:
            self.dead_letters.leave(run, EXPIRED)
        if taken:
            self.expire()

    def keep_length(self) -> None:
        """After a command, when consumers were served: keeps the queue within its limits, or says
        that publishers are to be refused, or no more."""
        backlog = self.backlog
        if not backlog.refuses:
            while backlog.exceeds():
                self.dead_letters.leave(backlog.take_excess(), OVER_LENGTH)
                if backlog.timed:
                    self.expire()
        refusing = backlog.refuses and (
            backlog.exceeds() or (backlog.refusing and not backlog.has_room())
        )
        if refusing != backlog.refusing:
            backlog.refusing = refusing
            self.machine.effects.append((EFFECT_REFUSING, refusing))

    # ---------------------------------------------------------------- coming back

    def release(self, consumer: Consumer, kind: int, flags: int, first: int, last: int) -> None:
        """Takes message ids first … last from the consumer, as far as it still holds them."""
        if last < first:
            return
        failed = flags & FLAG_FAILED
        if kind == SETTLE:
            for run in consumer.checked_out.remove(first, last):
                if self.machine.trace is not None:
                    self._trace(words.ACKED, 0, 0, consumer, run)
                self.backlog.settle(run[3], run[4])
                if self.backlog.follows():
                    self.backlog.gone(run)
        elif kind == RETURN:
            counted = failed
            if self.backlog.counts_returns and not flags & FLAG_UNTRIED:
                counted = 1
            for run in consumer.checked_out.remove(first, last):
                if self.machine.trace is not None:
                    self._trace(words.RETURNED, words.FAILED if counted else 0, 0, consumer, run)
                if self.backlog.goes_to_tail(failed):
                    self.backlog.requeue(run, failed, counted)
                else:
                    self.give_back(run, failed, counted)
        else:
            for run in consumer.checked_out.remove(first, last):
                self.backlog.let_go(run)
                self.dead_letters.leave(run, REJECTED, consumer)

    def modify(self, consumer: Consumer, flags: int, modified: Modified) -> None:
        """Takes messages from the consumer, as `release`, with what it says of them."""
        notes = self.backlog.notes
        avoids = None
        if flags & FLAG_UNDELIVERABLE:
            avoids = (consumer.session.id, consumer.number)
        counted = failed = flags & FLAG_FAILED
        if self.backlog.counts_returns and not flags & FLAG_UNTRIED:
            counted = 1
        for first, last in zip(modified.ranges[::2], modified.ranges[1::2], strict=True):
            for run in consumer.checked_out.remove(first, last) if first <= last else ():
                if modified.annotations or avoids is not None:
                    notes.add(run, modified.annotations, avoids)
                if flags & FLAG_REJECTED:
                    self.backlog.let_go(run)
                    self.dead_letters.leave(run, REJECTED, consumer)
                    continue
                if self.machine.trace is not None:
                    self._trace(words.RETURNED, words.FAILED if counted else 0, 0, consumer, run)
                if not modified.due_ms and self.backlog.goes_to_tail(failed):
                    self.backlog.requeue(run, failed, counted)
                else:
                    self.give_back(run, failed, counted, modified.due_ms)

    def give_back(self, run: runs.Run, failed: int, counted: int, due_ms: int = 0) -> None:
        """To the end of `returned`, or out when it has failed more often than the limit allows."""
        assert counted in (0, 1), "one return counts as several failures"
        over = self.backlog.give_back(run, failed, counted, due_ms)
        if over is not None:
            self.dead_letters.leave(over, OVER_DELIVERY_LIMIT)

    def give_back_all(self, consumer: Consumer, failed: int) -> None:
        """Returns all that a consumer holds, in ascending message id."""
        counted = 1 if self.backlog.counts_returns else failed
        for run in consumer.checked_out.remove_all():
            if self.machine.trace is not None:
                self._trace(words.RETURNED, words.FAILED if counted else 0, 0, consumer, run)
            self.give_back(run, failed, counted)
        assert not consumer.checked_out.messages, "a consumer holds what it gave back"

    def _trace(self, kind: int, flags: int, reason: int, consumer: Consumer, run: runs.Run) -> None:
        assert self.machine.trace is not None, "the queue is not traced"
        session, number = consumer.session.id, consumer.number
        tracing.left(self.machine.trace, kind, flags, reason, session, number, run)

    # ---------------------------------------------------------------- again

    def redeliver(self, session: int, number: int, from_id: int) -> None:
        """Appends DELIVER effects for what the consumer holds from message id `from_id` on."""
        for message_id, run in self.holds(session, number):
            index, offset, first, count, _size, acquired_count, failed_delivery_count, _mark = run
            skip = max(0, from_id - message_id)
            if skip < count and self.backlog.notes.by_place:
                part = cut(run, skip, count - skip)
                self._deliver_noted(session, number, message_id + skip, part)
            elif skip < count:
                self.machine.effects.append(
                    (
                        EFFECT_DELIVER,
                        session,
                        number,
                        message_id + skip,
                        index,
                        offset,
                        first + skip,
                        count - skip,
                        acquired_count,
                        failed_delivery_count,
                    )
                )

    def holds(self, session: int, number: int) -> list[tuple[int, runs.Run]]:
        """Returns (first message id, run) of what a consumer holds, ascending; [] when it is
        unknown."""
        found = self.consumers.find(session, number)
        return found.checked_out.held() if found is not None else []
