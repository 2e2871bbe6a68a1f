# cython: annotation_typing=False
"""The classic queue's rules: a single-node FIFO that decides everything in memory.

Input is the sealed batch of commands that publishers and consumers built in one round (the entry
format of docs/formats/entries-and-frames.md), output a list of effects. Messages are kept in
*runs*, ranges of consecutive records of one ENQUEUE command; a run is cut only where its
messages part ways.

States of a message: ready → checked out → settled (gone), or back to ready at its old place. What
is rejected, expires or is too much is gone as well; if the queue has a dead-letter exchange it is
*leaving* until the shell has published it (ADR 0055). It is neither ready nor unsettled then, and
no purge or limit concerns it. What came back may be set *aside* (`classic.notes`).

Effects (tuples, first item is the kind):

    APPLIED     session, last seq, rejected seqs
                commands up to seq are done; a durable queue's batch must be on disk before
    DELIVER     session, consumer, first id, block, first record, count, acquired_count; and, for a
                consumer with credit, deliveries that have failed and annotations, if there are some
    SUBSCRIBED  session, consumer, error text or None; and True for a consumer with credit: a node
                of an older release does not say so, and knows no credit
    CANCEL_OK   session, consumer
    CANCELLED   session, consumer, reason
    GOT         session, block or None, record, id, acquired_count, ready
    PURGED      session, count
    CREDIT      session, consumer, id of its next message, ready
                answers a GRANT
    ACTIVITY    session, consumer, whether it is the single active one from now on
    UNUSED      the last consumer has left
    GAP         session
                commands of the session are missing: it is over, and its client is to hear so

Invariants (`check_invariants`): positions in a line ascend, every returned one is below every other
ready one, a record is in exactly one place, and a block counts the records that live. What is
leaving is in no other place.

Rules that differ from a quorum queue: a returned message goes back to its original position; a
consumer can be exclusive; expiry and length limits act on the heads of the priorities only, and a
limit drops from the lowest one (ADR 0127). Nothing is handed out after its time: with a time of 0
in the batch that brings it, or not at all. With single active consumer and `single_active_strict`,
the next one becomes active when a cancelled one holds nothing any more, as there (ADR 0027).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec

from convoymq.kernels.batch import (
    CMD_CANCEL,
    CMD_CHECKOUT,
    CMD_CREDIT,
    CMD_DISCARD,
    CMD_ENQUEUE,
    CMD_GET,
    CMD_PURGE,
    CMD_RETURN,
    CMD_SESSION_CLOSE,
    CMD_SETTLE,
    command_body,
    commands,
    enqueue_bytes,
    ranges,
)
from convoymq.kernels.classic_records import split_levels
from convoymq.messages.deaths import EXPIRED, OVER_LENGTH, REJECTED
from convoymq.queues.classic import notes
from convoymq.queues.classic.backing import (
    RUN_BYTES,
    Backing,
    Line,
    ReadBatch,
    Span,
    no_log,
    position_of,
)
from convoymq.queues.classic.credit import grant, tell_activity
from convoymq.queues.classic.handing_out import DELIVER as DELIVER
from convoymq.queues.classic.handing_out import hand_out_ready, service_order
from convoymq.queues.classic.invariants import check_invariants
from convoymq.queues.classic.leaving import Leaving
from convoymq.queues.classic.limits import DROP_HEAD, REJECT_PUBLISH, Limits
from convoymq.queues.classic.notes import NOTES_MAX, NOTHING, Note
from convoymq.queues.classic.reservation_holder import ReservationHolder
from convoymq.queues.classic.runs import Block, Consumer, Ended, Former, Run, Session, runs_of
from convoymq.queues.outcomes import CMD_GRANT, CMD_MODIFY, Modified, unpack_modified
from convoymq.queues.reservations import Answer, Reservations

Effect = tuple[Any, ...]

APPLIED = 1
SUBSCRIBED = 3
CANCEL_OK = 4
CANCELLED = 5
GOT = 6
PURGED = 7
UNUSED = 8
GAP = 9
FLAG_PRIORITY = 2
FLAG_SETTLE_AT_ONCE = 1
GET_CONSUMER = 0
"""Messages that basic.get took are settled under this consumer number."""

WINDOW_DEFAULT = 20_000
"""Unsettled messages of a consumer that asked for no limit; bounds what one client can hold."""
WINDOW_NO_ACK = 2_000
"""Messages on their way to a no-ack consumer; the channel settles them when they are written."""
QUESTIONS = frozenset((CMD_CHECKOUT, CMD_CANCEL, CMD_GET, CMD_PURGE))
"""Commands with an answer of their own. Consumers that were there first are served before."""
DROPS_MAX = 20_000
"""Runs that are dropped at a time; `unfinished` tells that there are more."""
LEAVING_RUNS_MAX = 100_000
"""Of so many runs that wait to be dead letters, the next that expire stay where they are."""


class ClassicMachine:
    """The state of one classic queue."""

    def __init__(
        self,
        limits: Limits,
        load: Callable[[Block], tuple[bytes, int]],
        *,
        level_max: int = 0,
        read: ReadBatch = no_log,
    ) -> None:
        """
        Args:
            load: returns the buffer and command offset of a block that is on disk only.
            level_max: highest priority of messages; 0 = all have one.
            read: see `Backing`.
        """
        self.is_transient: Callable[[Block], bool] = lambda _block: False
        """Decides whether a block goes to the log only to leave memory."""
        self.limits = limits
        self.effects: list[Effect] = []
        self.enqueued: list[Block] = []
        """Blocks that arrived since the shell last looked."""
        self.settled: list[int] = []
        """Positions (first, last, …) of the log that are gone since the shell last looked."""
        self.unwritten = 0
        """Living blocks that go to the log only to leave memory, and have not yet."""
        self.handed_out = False
        """Messages of the log were handed out since the shell last looked."""
        self.freed: Counter[int] = Counter()
        """File of the log -> messages in it that are gone since the shell last looked."""
        self.backing = Backing(level_max, read)
        """The ready messages."""
        self.unfinished = False
        """More is to be dropped than was dropped at once."""
        self.may_exceed = False
        """Messages came, or came back, since the length was looked at."""
        self.unsettled_count = 0
        self.next_position = 0
        self.sessions: dict[int, Session] = {}
        self.ended = Ended()
        self.service: list[Consumer] = []
        """Consumers by falling priority; a served one goes behind its equals."""
        self.active: Consumer | None = None
        self.reservations = Reservations(ReservationHolder(self))
        self.had_consumer = False
        self.former: Former | None = None
        """Consumers of a former master may still come back."""
        self.last_used_ms = 0
        self.now_ms = 0
        """Time of the present input."""
        self.published = self.delivered = self.acknowledged = 0
        self.leaving = Leaving()
        self.aside = notes.Aside()
        self.noted: list[tuple[int, int, Note]] = []
        """Notes of positions first … last since the shell last looked."""
        self.noted_count = 0
        """Messages with notes."""
        self._load = load

    # --- input ---------------------------------------------------------------------------

    def apply(self, data: bytes, now_ms: int) -> None:
        """Applies a sealed batch of commands. Raises ValueError when it is malformed."""
        self.now_ms = now_ms
        done: dict[int, int] = {}
        rejected: dict[int, list[int]] = {}
        gaps: dict[int, None] = {}
        for kind, flags, session_id, seq, count, arg, offset, length in commands(data):
            session = self.sessions.get(session_id)
            if session is None:
                if kind == CMD_SESSION_CLOSE or session_id in self.ended:
                    continue
                if seq != 1:
                    self.ended.add(session_id)
                    gaps[session_id] = None
                    continue
                session = self.sessions[session_id] = Session()
            if seq <= session.seq:
                done[session_id] = session.seq
                continue
            if seq != session.seq + 1:
                # What was sent before is lost. Without an answer the client would wait for ever.
                self._close(session_id, session, now_ms)
                self.ended.add(session_id)
                done.pop(session_id, None)
                if kind != CMD_SESSION_CLOSE:
                    gaps[session_id] = None
                continue
            session.seq = seq
            done[session_id] = seq
            if kind in QUESTIONS:
                self._serve(now_ms)
            known_seq = session.published_seq if kind == CMD_ENQUEUE else session.answered_seq
            if seq <= known_seq and (kind == CMD_ENQUEUE or kind in QUESTIONS):
                if kind == CMD_ENQUEUE and seq <= session.refused_seq:  # Maybe it was refused.
                    rejected.setdefault(session_id, []).append(seq)
                continue
            if kind == CMD_ENQUEUE:
                if self._overflows() and self.limits.overflow == REJECT_PUBLISH:
                    session.refused_seq = seq
                    rejected.setdefault(session_id, []).append(seq)
                    self._leave_refused(data, count, offset, length)
                else:
                    self._enqueue(data, flags, count, offset, length, now_ms)
            elif kind == CMD_SETTLE:
                self._settle(session, arg, ranges(data, offset, count))
            elif kind == CMD_DISCARD:
                self._discard(session, arg, ranges(data, offset, count))
            elif kind == CMD_RETURN:
                self._return(session, arg, ranges(data, offset, count))
            elif kind == CMD_CHECKOUT:
                self._checkout(session_id, session, arg, command_body(data, offset)[:count], now_ms)
            elif kind == CMD_CANCEL:
                self._cancel(session_id, session, arg, now_ms)
            elif kind == CMD_CREDIT:
                self._credit(session, arg, command_body(data, offset)[:count])
            elif kind == CMD_GRANT:
                self._grant(session.consumers.get(arg), flags, command_body(data, offset))
            elif kind == CMD_MODIFY:
                self._modify(session, arg, flags, unpack_modified(data, offset, count))
            elif kind == CMD_GET:
                self._get(session_id, session, bool(flags & FLAG_SETTLE_AT_ONCE), now_ms)
            elif kind == CMD_PURGE:
                self.effects.append((PURGED, session_id, self.purge()))
            elif kind == CMD_SESSION_CLOSE:
                self._close(session_id, session, now_ms)
                self.ended.add(session_id)
                done.pop(session_id, None)
        self._serve(now_ms)
        self.effects += [(APPLIED, s, seq, tuple(rejected.get(s, ()))) for s, seq in done.items()]
        self.effects += [(GAP, session_id) for session_id in gaps]

    def tick(self, now_ms: int) -> None:
        """Drops what has expired at the head, and ends reservations that nobody was heard of."""
        self.reservations.expire(now_ms)
        self._serve(now_ms)

    def reservation(
        self, op: Mapping[str, object], epoch: int, now_ms: int
    ) -> tuple[str | None, Answer | None]:
        """Carries out an op on a reservation; see `Reservations.apply`."""
        # Consumers were there first.
        self._serve(now_ms)
        self.last_used_ms = now_ms
        found = self.reservations.apply(op, epoch, now_ms)
        self._serve(now_ms)
        return found

    def session_down(self, session_id: int, now_ms: int) -> None:
        """A session is gone without a word: as its own close."""
        session = self.sessions.get(session_id)
        if session is not None:
            self._close(session_id, session, now_ms)
            self._serve(now_ms)

    def node_down(self, node: int, now_ms: int) -> None:
        """All sessions of a node are gone."""
        for session_id in [s for s in self.sessions if s >> 56 == node]:
            self.session_down(session_id, now_ms)

    def configure(self, limits: Limits) -> None:
        """Sets other limits."""
        self.limits = limits
        self.may_exceed = True

    def delete(self, reason: str) -> None:
        """Ends all consumers; the shell resolves what clients still wait for."""
        for consumer in list(self.service):
            self.effects.append((CANCELLED, consumer.session, consumer.number, reason))
        self.service.clear()
        self.sessions.clear()
        self.reservations.clear()

    def purge(self) -> int:
        """Drops ready messages and returns how many."""
        count = self.ready_count + self.aside.count
        aside = self.aside.clear()
        held: list[Run] | None = None
        for item in self.backing.clear():
            if isinstance(item, Run):
                self.forget(item)
                continue
            if held is None:
                held = sorted([*self.held_runs(), *self.leaving, *aside], key=position_of)
            self._forget_span(item, held)
        for run in aside:
            self.forget(run)
        self.noted_count = sum(run.count for run in self.noted_runs())
        return count

    # --- publishing ----------------------------------------------------------------------

    def _enqueue(
        self, data: bytes, flags: int, count: int, offset: int, length: int, now_ms: int
    ) -> None:
        if count == 0:
            return
        self.published += count
        level_max = self.backing.level_max
        if level_max and flags & FLAG_PRIORITY:  # A block has one level: others are copied apart.
            for level, command, part, _size in split_levels(data, offset, count, level_max):
                place = (data, offset, length) if command is None else (command, 0, len(command))
                self._add(self._block(*place, part, level))
        else:
            self._add(self._block(data, offset, length, count))
        if self.limits.overflow == DROP_HEAD and self._overflows():
            # Consumers come first: what they take does not count against the limit.
            self._serve(now_ms)

    def _block(self, data: bytes, at: int, length: int, count: int, level: int = 0) -> Block:
        size = enqueue_bytes(data, at)
        block = Block(data, at, length, count, self.next_position, size, self.now_ms, level)
        block.transient = self.is_transient(block)
        self.unwritten += block.transient
        self.next_position += count
        self.backing.memory_bytes += length
        return block

    def _add(self, block: Block) -> None:
        self.may_exceed = True
        self.enqueued.append(block)
        for run in runs_of(block, [], 0, self.limits.message_ttl_ms):
            if run.expires:
                self.backing.may_expire = True
            self.backing.push(run)

    def _overflows(self) -> bool:
        limits = self.limits
        drops = limits.overflow == DROP_HEAD
        if limits.length_max is not None and self.ready_count >= limits.length_max + drops:
            return True
        return limits.bytes_max is not None and self.ready_bytes > limits.bytes_max

    def _drop_excess(self) -> None:
        """Drops messages at the head of the lowest priority until the queue does not overflow."""
        drops = self.limits.overflow == DROP_HEAD
        for _ in range(DROPS_MAX):
            line = self.backing.bottom() if drops and self._overflows() else None
            self.may_exceed = line is not None
            if line is None:
                return
            self.leave_unacknowledged(self.take(line, self._excess(line)), OVER_LENGTH)
        self.unfinished = True

    def _excess(self, line: Line) -> int:
        """Returns how many messages at the head of a line are too many, of a queue that overflows;
        or fewer."""
        limits = self.limits
        if limits.length_max is not None and self.ready_count > limits.length_max:
            return self.ready_count - limits.length_max
        assert limits.bytes_max is not None
        head = line.head()
        return head.count if head.body_bytes() <= self.ready_bytes - limits.bytes_max else 1

    # --- consuming -----------------------------------------------------------------------

    def _checkout(
        self, session_id: int, session: Session, number: int, body: bytes, now_ms: int
    ) -> None:
        spec = msgspec.msgpack.decode(body)
        if self.is_exclusive or (spec.get("exclusive") and self.consumer_count):
            self.effects.append((SUBSCRIBED, session_id, number, "exclusive"))
            return
        no_ack = bool(spec.get("no_ack"))
        prefetch = int(spec.get("prefetch") or 0)
        window = WINDOW_NO_ACK if no_ack else (prefetch or WINDOW_DEFAULT)
        consumer = Consumer(
            session=session_id,
            number=number,
            tag=str(spec.get("tag", "")),
            window=window,
            no_ack=no_ack,
            exclusive=bool(spec.get("exclusive")),
            priority=int(spec.get("priority") or 0),
            prefetch=prefetch,
            arguments=dict(spec.get("args") or {}),
            next_id=int(spec.get("first") or 0),
        )
        credited = bool(spec.get("credited"))
        if credited:
            consumer.limit = consumer.next_id
        session.consumers[number] = consumer
        insort(self.service, consumer, key=service_order)
        self.had_consumer = True
        self.last_used_ms = now_ms
        told = (SUBSCRIBED, session_id, number, None)
        self.effects.append((*told, True) if credited else told)
        if self.limits.single_active and self.active is not None:
            tell_activity(self, consumer, False)
        self.choose_active()

    def _credit(self, session: Session, number: int, body: bytes) -> None:
        consumer = session.consumers.get(number)
        if consumer is not None:
            consumer.window = max(0, int(msgspec.msgpack.decode(body)["credit"]))

    def _cancel(self, session_id: int, session: Session, number: int, now_ms: int) -> None:
        consumer = session.consumers.get(number)
        if consumer is not None and not consumer.cancelled:
            self._leave(consumer, now_ms)
            if not consumer.outstanding:
                del session.consumers[number]
        self.effects.append((CANCEL_OK, session_id, number))
        self.check_unused()

    def choose_active(self) -> None:
        """Single active consumer: the first one in line, unless a reservation is active."""
        if self.limits.single_active and self.active is None and not self.reservations:
            self.active = (self.former or Former()).choose(self.service)
            if self.active is not None:
                tell_activity(self, self.active, True)

    def _give_way(self, consumer: Consumer) -> None:
        """Single active consumer: a cancelled one makes room; if strict, when it holds nothing."""
        waits = self.limits.single_active_strict and consumer.outstanding
        if self.active is consumer and not waits:
            self.active = None
            self.choose_active()

    def _leave(self, consumer: Consumer, now_ms: int) -> None:
        consumer.cancelled = True
        self.last_used_ms = now_ms
        if consumer in self.service:
            self.service.remove(consumer)
        self._give_way(consumer)

    def _close(self, session_id: int, session: Session, now_ms: int) -> None:
        had = False
        for consumer in session.consumers.values():
            if consumer.number != GET_CONSUMER and not consumer.cancelled:
                had = True
                self._leave(consumer, now_ms)
            self.give_back(consumer.release(0, consumer.next_id))
            self._give_way(consumer)
        del self.sessions[session_id]
        if had:
            self.check_unused()

    def check_unused(self) -> None:
        """Tells when the last of all consumers and reservations has left."""
        if self.had_consumer and not self.consumer_count and self.former is None:
            self.effects.append((UNUSED,))

    def _get(self, session_id: int, session: Session, settle: bool, now_ms: int) -> None:
        self.last_used_ms = now_ms
        run = self.take_head(1)
        if run is None:
            self.effects.append((GOT, session_id, None, 0, 0, 0, 0))
            return
        holder = session.consumers.get(GET_CONSUMER)
        if holder is None:
            holder = Consumer(session_id, GET_CONSUMER, "", WINDOW_DEFAULT, False, False, 0)
            session.consumers[GET_CONSUMER] = holder
        self.take_in_memory(run.block)
        number = holder.hold(run)
        self.unsettled_count += 1
        self.delivered += 1
        # Offsets stay beside the buffer: a settled block may leave memory before it is sent.
        self.effects.append(
            (
                GOT, session_id, (run.block.data, run.block.command), run.first, number,
                run.acquired_count, self.ready_count,
            )
        )  # fmt: skip
        if settle:
            self._settle(session, GET_CONSUMER, [number, number])

    def _settle(self, session: Session, number: int, ids: list[int]) -> None:
        consumer = session.consumers.get(number)
        if consumer is None:
            return
        for i in range(0, len(ids), 2):
            for run in consumer.release(ids[i], ids[i + 1]):
                self.unsettled_count -= run.count
                self.acknowledged += run.count
                self.forget(run)
        self._drop_if_done(session, consumer)

    def _discard(self, session: Session, number: int, ids: list[int]) -> None:
        consumer = session.consumers.get(number)
        if consumer is None:
            return
        for i in range(0, len(ids), 2):
            for run in consumer.release(ids[i], ids[i + 1]):
                self.unsettled_count -= run.count
                self.leave_unacknowledged(run, REJECTED)
        self._drop_if_done(session, consumer)

    def _return(self, session: Session, number: int, ids: list[int]) -> None:
        consumer = session.consumers.get(number)
        if consumer is None:
            return
        for i in range(0, len(ids), 2):
            self.give_back(consumer.release(ids[i], ids[i + 1]))
        self._drop_if_done(session, consumer)

    def _grant(self, consumer: Consumer | None, flags: int, body: bytes) -> None:
        grant(self, consumer, flags, body)

    def _modify(self, session: Session, number: int, flags: int, modified: Modified) -> None:
        consumer = session.consumers.get(number)
        if consumer is not None:
            notes.modify(self, consumer, flags, modified)
            self._drop_if_done(session, consumer)

    def _drop_if_done(self, session: Session, consumer: Consumer) -> None:
        if consumer.cancelled and not consumer.outstanding:
            session.consumers.pop(consumer.number, None)
            self._give_way(consumer)

    def give_back(self, runs: list[Run]) -> None:
        """Returns messages that were checked out to their old places."""
        for run in runs:
            self.unsettled_count -= run.count
            self.may_exceed = True
            run.acquired_count += 1
            self.put_back(run)

    def put_back(self, run: Run) -> None:
        """Has messages that were handed out be ready, or wait."""
        if not self.sets_aside(run):
            self.backing.give_back(run)

    def sets_aside(self, run: Run) -> bool:
        """Returns whether messages have to wait, and has them wait then."""
        return run.note is not NOTHING and self.aside.add(run, self.now_ms)

    def note(self, run: Run, note: Note) -> None:
        """Notes what a consumer has said of messages, while there is room for it."""
        if run.note == NOTHING and note != NOTHING:
            if self.noted_count + run.count > NOTES_MAX:
                return
            self.noted_count += run.count
        if note != NOTHING:
            run.note = note
            self.noted.append((run.position, run.position + run.count - 1, note))

    # --- handing out ---------------------------------------------------------------------

    def serve(self) -> None:
        """Hands out what can be, within an input."""
        self._serve(self.now_ms)

    def _serve(self, now_ms: int) -> None:
        """Hands out what can be, drops what nobody took in time and what exceeds the length."""
        self.now_ms = now_ms
        self.unfinished = False
        if self.aside.count:
            notes.serve_aside(self)
        hand_out_ready(self)
        if self.backing.may_expire and not self.limits.keeps_all:
            self._expire(now_ms)
        if self.may_exceed:
            self._drop_excess()

    def take_head(self, limit: int) -> Run | None:
        """Takes at most `limit` messages whose time is not over, of one run, from the front; None =
        there are none. Raises StorageFault and OSError."""
        while True:
            line = self.backing.top()
            if line is None:
                return None
            if self.limits.keeps_all or not self._is_late(line, self.now_ms - 1):
                run = self.take(line, limit)
                if not self.sets_aside(run):
                    return run
                # It waits since before a restart.
                continue
            if not self._drop_late(line, self.now_ms - 1):
                return None

    def take(self, line: Line, limit: int) -> Run:
        """Takes at most `limit` messages from the front of a line."""
        run = self.backing.take(line, limit)
        line.delivered_to = max(line.delivered_to, run.position + run.count)
        self.handed_out = self.handed_out or run.block.is_logged
        return run

    def _expire(self, now_ms: int) -> None:
        for line in self.backing.occupied():
            self._drop_late(line, now_ms)

    @staticmethod
    def _is_late(line: Line, now_ms: int) -> bool:
        expires = line.head().expires
        return bool(expires) and expires <= now_ms

    def _drop_late(self, line: Line, now_ms: int) -> bool:
        """Drops the messages at the heads of a line whose time is over; False = there are more."""
        for source in (line.returned, line.waiting):
            for _ in range(DROPS_MAX):
                if not (source is line.returned and source) and not self.backing.head_is_here(line):
                    break
                if not source:
                    break
                run = source[0]
                assert isinstance(run, Run)
                if not run.expires or run.expires > now_ms:
                    break
                if len(self.leaving.runs) >= LEAVING_RUNS_MAX:
                    self.unfinished = True
                    return False
                self.leave_unacknowledged(self.backing.take_from(line, source), EXPIRED)
            else:
                self.unfinished = True
                return False
        return True

    # --- dead letters --------------------------------------------------------------------

    def leave_unacknowledged(self, run: Run, reason: str) -> None:
        """Takes a run that is in no place any more."""
        run.note = run.note._replace(avoiding=(), due_ms=0) if run.note.avoiding else run.note
        if not self.leaving.add(run, reason, dead_letters=self.limits.dead_letters):
            self.forget(run)

    def _leave_refused(self, data: bytes, count: int, offset: int, length: int) -> None:
        """Publishes that the queue refuses: they were never in it, nor will they be on disk."""
        if not count or not self.limits.refused_are_dead_letters:
            return
        run = Run(self._block(data, offset, length, count), 0, count, 0, 0)
        self.leave_unacknowledged(run, OVER_LENGTH)

    def next_due_ms(self) -> int:
        """Returns when the first message at a head expires, or one need not wait any more; 0 =
        never."""
        times = [self.aside.next_due_ms]
        if self.backing.may_expire and not self.limits.keeps_all:
            times += [
                source[0].expires
                for line in self.backing.occupied()
                for source in (line.returned, line.waiting)
                if source and isinstance(source[0], Run)
            ]
        return min((time for time in times if time), default=0)

    # --- blocks --------------------------------------------------------------------------

    def forget(self, run: Run) -> None:
        """Notes that messages are gone, and with the last of them their block."""
        block, position, settled = run.block, run.position, self.settled
        block.live -= run.count
        if run.note != NOTHING:
            self.noted_count -= run.count
        assert block.live >= 0
        if not block.is_logged:
            self.unwritten -= not block.live
        elif settled and settled[-1] + 1 == position:
            settled[-1] = position + run.count - 1
        else:
            settled += (position, position + run.count - 1)
        if block.where is not None:
            self.freed[block.where.file] += run.count
        if block.live == 0:
            self.drop_body(block)

    def _forget_span(self, span: Span, held: list[Run]) -> None:
        """As `forget`. Others, which are `held`, may have positions in between."""
        self.freed[span.file] += span.count
        at = span.first
        for run in held:
            if at <= run.position <= span.last:
                if run.position > at:
                    self.settled += (at, run.position - 1)
                at = run.position + run.count
        if at <= span.last:
            self.settled += (at, span.last)

    def take_in_memory(self, block: Block) -> None:
        """Reads a block that is on disk only. Raises StorageFault and OSError."""
        if block.data is None:
            block.data, block.command = self._load(block)
            self.backing.memory_bytes += block.length

    def body_of(self, block: Block) -> tuple[bytes, int]:
        """Returns the buffer that holds a block and the command's offset in it; the block stays
        where it is. Raises StorageFault and OSError."""
        return self._load(block) if block.data is None else (block.data, block.command)

    def drop_body(self, block: Block) -> None:
        """Takes a block's bytes out of memory; they are on disk, or nobody needs them."""
        if block.data is not None:
            block.data = None
            self.backing.memory_bytes -= block.length

    def page_out(self, keep_bytes: int) -> None:
        """Leaves memory until about `keep_bytes` are in use: first the bodies of messages that are
        leaving, of reserved ones and of those that came back; then see `Backing.page_out`."""
        for run in self._patient():
            if run.block.written and self.footprint > keep_bytes:
                self.drop_body(run.block)
        self.backing.page_out(keep_bytes, self.drop_body)

    def _patient(self) -> Iterator[Run]:
        """Yields the runs that are not handed out next."""
        yield from self.leaving
        yield from self.aside
        # Whoever reads a reservation can wait for the disk, and reads it more than once.
        for reservation in self.reservations.by_name.values():
            yield from reservation.held.runs
        for line in self.backing.occupied():
            yield from line.returned

    @property
    def footprint(self) -> int:
        """Returns about how many bytes of memory the queue takes."""
        return self.backing.footprint + RUN_BYTES * (len(self.leaving.runs) + len(self.aside))

    def to_spill(self) -> Iterator[Block]:
        """Yields the blocks that are in memory only, in the order in which they leave it."""
        runs = chain(self._patient(), self.backing.newest())
        return (run.block for run in runs if not run.block.is_logged)

    def parts(self, wants: Callable[[Block], bool]) -> dict[Block, list[Run]]:
        """Returns living blocks, oldest first, with what lives of them. Cost: O(runs)."""
        found: dict[Block, list[Run]] = {}
        for run in self._all_runs():
            if wants(run.block):
                found.setdefault(run.block, []).append(run)
        return {block: found[block] for block in sorted(found, key=lambda block: block.position)}

    def noted_runs(self) -> list[Run]:
        """Returns the runs in memory with notes. Cost: O(runs)."""
        return [run for run in self._all_runs() if run.note != NOTHING] if self.noted_count else []

    def _all_runs(self) -> Iterator[Run]:
        for line in self.backing.occupied():
            yield from line.runs()
        yield from self.leaving
        yield from self.aside
        yield from self.held_runs()

    def held_runs(self) -> Iterator[Run]:
        """Yields what consumers and reservations hold."""
        for session in self.sessions.values():
            for consumer in session.consumers.values():
                yield from consumer.runs
        for reservation in self.reservations.by_name.values():
            yield from reservation.held.runs

    # --- looking -------------------------------------------------------------------------

    @property
    def ready_count(self) -> int:
        """Messages that wait for a consumer."""
        return self.backing.count

    @property
    def ready_bytes(self) -> int:
        """Bytes of their bodies."""
        return self.backing.bytes

    @property
    def consumer_count(self) -> int:
        """Consumers that are subscribed, and reservations."""
        return len(self.service) + len(self.reservations)

    @property
    def unsettled_bytes(self) -> int:
        """Bytes of the bodies that consumers and reservations hold. Cost: O(runs)."""
        return sum(run.body_bytes() for run in self.held_runs())

    @property
    def takes_more(self) -> bool:
        """A message that came now would be delivered at once."""
        return not self.ready_count and any(
            one.room() > 0 and not one.cancelled for one in self.service
        )

    @property
    def is_exclusive(self) -> bool:
        """A consumer has the queue for itself."""
        return any(one.exclusive for one in self.service)

    def check_invariants(self) -> None:
        """Asserts what the module text promises. Cost: O(runs)."""
        check_invariants(self)
