"""The classic queue's rules: a single-node FIFO that decides everything in memory.

Input is the sealed batch of commands that publishers and consumers built in one round (the entry
format of docs/formats/entries-and-frames.md), output a list of effects. Messages are kept in
*runs*, ranges of consecutive records of one ENQUEUE command; a run is cut only where its
messages part ways.

States of a message: ready → checked out → settled (gone), or back to ready at its old place. What
is rejected, expires or is too much is gone as well; if the queue has a dead-letter exchange it is
*leaving* until the shell has published it (ADR 0055). It is neither ready nor unsettled then, and
no purge or limit concerns it.

Effects (tuples, first item is the kind):

    APPLIED     session, last seq, rejected seqs
                commands up to seq are done; a durable queue's batch must be on disk before
    DELIVER     session, consumer, first id, block, first record, count, acquired_count
    SUBSCRIBED  session, consumer, error text or None
    CANCEL_OK   session, consumer
    CANCELLED   session, consumer, reason
    GOT         session, block or None, record, id, acquired_count, ready
    PURGED      session, count
    UNUSED      the last consumer has left
    GAP         session
                commands of the session are missing: it is over, and its client is to hear so

Invariants (`check_invariants`): positions in `ready` and in `returned` ascend, every returned
position is below every ready one, a record is in exactly one place, and a block counts the
records that live. What is leaving is in no other place.

Rules that differ from a quorum queue: a returned message goes back to its original position; a
consumer can be exclusive; expiry and length limits act on the head only. Nothing is handed out
after its time: with a time of 0 a message is handed out in the batch that brings it, or not at all.
With single active consumer and `single_active_strict`, the next one becomes active when a cancelled
one holds nothing any more, as in a quorum queue (ADR 0027).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
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
    record,
)
from convoymq.messages.deaths import EXPIRED, OVER_LENGTH, REJECTED
from convoymq.messages.record import traits_of
from convoymq.queues.classic.leaving import Leaving
from convoymq.queues.classic.reservation_holder import ReservationHolder
from convoymq.queues.classic.runs import Block, Consumer, Run
from convoymq.queues.reservations import Answer, Reservations

Effect = tuple[Any, ...]

APPLIED = 1
DELIVER = 2
SUBSCRIBED = 3
CANCEL_OK = 4
CANCELLED = 5
GOT = 6
PURGED = 7
UNUSED = 8
GAP = 9

FLAG_EXPIRATION = 4
FLAG_SETTLE_AT_ONCE = 1
GET_CONSUMER = 0
"""Messages that basic.get took are settled under this consumer number."""

WINDOW_DEFAULT = 20_000
"""Unsettled messages of a consumer that asked for no limit; bounds what one client can hold."""
WINDOW_NO_ACK = 2_000
"""Messages on their way to a no-ack consumer; the channel settles them when they are written."""
_AFTER_SERVING = frozenset((CMD_GET, CMD_PURGE, CMD_CANCEL, CMD_CHECKOUT))
DROP_HEAD = "drop-head"
REJECT_PUBLISH = "reject-publish"


@dataclass(slots=True)
class Limits:
    """Limits by the queue's arguments; None = no limit."""

    message_ttl_ms: int | None = None
    length_max: int | None = None
    bytes_max: int | None = None
    overflow: str = DROP_HEAD
    dead_letters: bool = False
    """True if what leaves unacknowledged is published."""
    refused_are_dead_letters: bool = False
    """And so are publishes that the queue refuses because it is full."""
    single_active: bool = False
    single_active_strict: bool = True
    expires_ms: int | None = None


def _position_of(run: Run) -> int:
    return run.position


class Session:
    """One channel's command stream."""

    __slots__ = ("consumers", "seq")

    def __init__(self) -> None:
        self.seq = 0
        self.consumers: dict[int, Consumer] = {}


class ClassicMachine:
    """The state of one classic queue."""

    def __init__(self, limits: Limits, load: Callable[[Block], tuple[bytes, int]]) -> None:
        """`load` returns the buffer and command offset of a block that is on disk only."""
        self.limits = limits
        self.effects: list[Effect] = []
        self.enqueued: list[Block] = []
        """Blocks that arrived since the shell last looked: written when the queue is durable."""
        self.settled: list[int] = []
        """Positions (first, last, …) that are gone since the shell last looked."""
        self.finished: list[Block] = []
        """Blocks in the log of which nothing is left since the shell last looked."""
        self.ready: deque[Run] = deque()
        self.returned: list[Run] = []
        self.ready_count = 0
        self.ready_bytes = 0
        self.unsettled_count = 0
        self.next_position = 0
        self.delivered_to = 0
        """Positions below this were handed out at least once."""
        self.sessions: dict[int, Session] = {}
        self.service: list[Consumer] = []
        """Consumers by falling priority; a served one goes behind its equals."""
        self.active: Consumer | None = None
        self.reservations = Reservations(ReservationHolder(self))
        self.had_consumer = False
        self.may_expire = False
        """Some message had a time limit."""
        self.memory_bytes = 0
        self.last_used_ms = 0
        self.now_ms = 0
        """Time of the present input."""
        self.published = 0
        self.delivered = 0
        self.acknowledged = 0
        self.leaving = Leaving()
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
                if kind == CMD_SESSION_CLOSE:
                    continue
                if seq != 1:
                    gaps[session_id] = None
                    continue
                session = self.sessions[session_id] = Session()
            if seq <= session.seq:
                done[session_id] = session.seq
                continue
            if seq != session.seq + 1:
                # What was sent before is lost. Without an answer the client would wait for ever.
                self._close(session_id, session, now_ms)
                done.pop(session_id, None)
                if kind != CMD_SESSION_CLOSE:
                    gaps[session_id] = None
                continue
            session.seq = seq
            done[session_id] = seq
            if kind in _AFTER_SERVING:
                # Consumers were there first: what was published before this is theirs.
                self._serve(now_ms)
            if kind == CMD_ENQUEUE:
                if self._overflows() and self.limits.overflow == REJECT_PUBLISH:
                    rejected.setdefault(session_id, []).append(seq)
                    if self.limits.refused_are_dead_letters and count:
                        self._leave_refused(data, count, offset, length, now_ms)
                else:
                    self._enqueue(data, flags, count, offset, length, now_ms)
            elif kind == CMD_SETTLE:
                self._settle(session, arg, ranges(data, offset, count))
            elif kind == CMD_DISCARD:
                self._discard(session, arg, ranges(data, offset, count))
            elif kind == CMD_RETURN:
                self._return(session, arg, ranges(data, offset, count))
            elif kind == CMD_CHECKOUT:
                body = command_body(data, offset)[:count]
                self._checkout(session_id, session, arg, body, now_ms)
            elif kind == CMD_CANCEL:
                self._cancel(session_id, session, arg, now_ms)
            elif kind == CMD_CREDIT:
                consumer = session.consumers.get(arg)
                if consumer is not None:
                    credit = msgspec.msgpack.decode(command_body(data, offset)[:count])
                    consumer.window = max(0, int(credit["credit"]))
            elif kind == CMD_GET:
                self._get(session_id, session, bool(flags & FLAG_SETTLE_AT_ONCE), now_ms)
            elif kind == CMD_PURGE:
                self.effects.append((PURGED, session_id, self.purge()))
            elif kind == CMD_SESSION_CLOSE:
                self._close(session_id, session, now_ms)
                done.pop(session_id, None)
        self._serve(now_ms)
        for session_id, seq in done.items():
            refused = rejected.get(session_id, ())
            self.effects.append((APPLIED, session_id, seq, tuple(refused)))
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

    def recover(
        self,
        block: Block,
        dead: list[tuple[int, int]],
        handed_out: int,
        expirations: list[int | None] | None,
        now_ms: int,
    ) -> None:
        """Takes a block from the log, oldest first; the time of its messages counts from when they
        came.

        Args:
            dead: record ranges (first, last) that were settled, ascending.
            handed_out: positions below this were handed out before.
            expirations: the messages' own, in ms, when some message has one.
        """
        assert block.position >= self.next_position
        self.next_position = block.position + block.count
        block.live = 0
        at = 0
        for first, last in [*dead, (block.count, block.count)]:
            for i, count in _pieces(at, first, handed_out - block.position, expirations):
                own = expirations[i] if expirations is not None else None
                # A clock that was set back makes no message live longer.
                expires = self._expiry(own, min(block.time_ms, now_ms))
                acquired_count = int(block.position + i < handed_out)
                self._push_ready(Run(block, i, count, acquired_count, expires))
                block.live += count
            at = last + 1

    def delete(self, reason: str) -> None:
        """Ends all consumers; the shell resolves what clients still wait for."""
        for consumer in list(self.service):
            self.effects.append((CANCELLED, consumer.session, consumer.number, reason))
        self.service.clear()
        self.sessions.clear()
        self.reservations.clear()

    def purge(self) -> int:
        """Drops ready messages and returns how many."""
        count = self.ready_count
        for run in self.returned:
            self.forget(run)
        for run in self.ready:
            self.forget(run)
        self.returned.clear()
        self.ready.clear()
        self.ready_count = 0
        self.ready_bytes = 0
        return count

    # --- publishing ----------------------------------------------------------------------

    def _enqueue(
        self, data: bytes, flags: int, count: int, offset: int, length: int, now_ms: int
    ) -> None:
        if count == 0:
            return
        size = enqueue_bytes(data, offset)
        block = Block(data, offset, length, count, self.next_position, size, now_ms)
        self.next_position += count
        self.published += count
        self.memory_bytes += length
        self.enqueued.append(block)
        if flags & FLAG_EXPIRATION:
            for i in range(count):
                own = traits_of(record(data, offset, i)).expiration_ms
                self._push_ready(Run(block, i, 1, 0, self._expiry(own, now_ms)))
        else:
            self._push_ready(Run(block, 0, count, 0, self._expiry(None, now_ms)))
        if self.limits.overflow == DROP_HEAD and self._overflows():
            # Consumers come first: what they take does not count against the limit.
            self._serve(now_ms)

    def _expiry(self, own_ms: int | None, now_ms: int) -> int:
        waits = [wait for wait in (own_ms, self.limits.message_ttl_ms) if wait is not None]
        if waits:
            self.may_expire = True
        return now_ms + min(waits) if waits else 0

    def _overflows(self) -> bool:
        limits = self.limits
        if limits.length_max is not None:
            if limits.overflow == DROP_HEAD and self.ready_count > limits.length_max:
                return True
            if limits.overflow == REJECT_PUBLISH and self.ready_count >= limits.length_max:
                return True
        return limits.bytes_max is not None and self.ready_bytes > limits.bytes_max

    def _excess(self) -> int:
        """Returns how many messages at the head are too many, of a queue that overflows; or
        fewer."""
        limits = self.limits
        if limits.length_max is not None and self.ready_count > limits.length_max:
            return self.ready_count - limits.length_max
        assert limits.bytes_max is not None
        head = (self.returned or self.ready)[0]
        return head.count if head.body_bytes() <= self.ready_bytes - limits.bytes_max else 1

    def _push_ready(self, run: Run) -> None:
        self.ready.append(run)
        self.ready_count += run.count
        self.ready_bytes += run.body_bytes()

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
        session.consumers[number] = consumer
        insort(self.service, consumer, key=_service_order)
        self.had_consumer = True
        self.last_used_ms = now_ms
        self.choose_active()
        self.effects.append((SUBSCRIBED, session_id, number, None))

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
        if (
            self.limits.single_active
            and self.active is None
            and self.service
            and not self.reservations
        ):
            self.active = self.service[0]

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
        if self.had_consumer and not self.consumer_count:
            self.effects.append((UNUSED,))

    def _get(self, session_id: int, session: Session, settle: bool, now_ms: int) -> None:
        self.last_used_ms = now_ms
        if not self.ready_count:
            self.effects.append((GOT, session_id, None, 0, 0, 0, 0))
            return
        holder = session.consumers.get(GET_CONSUMER)
        if holder is None:
            holder = Consumer(session_id, GET_CONSUMER, "", WINDOW_DEFAULT, False, False, 0)
            session.consumers[GET_CONSUMER] = holder
        run = self.take_head(1)
        self.take_in_memory(run.block)
        number = holder.hold(run)
        self.unsettled_count += 1
        self.delivered += 1
        # The offsets are kept beside the buffer: a settled block may leave memory before it is
        # sent.
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
                self._leave_unacknowledged(run, REJECTED)
        self._drop_if_done(session, consumer)

    def _return(self, session: Session, number: int, ids: list[int]) -> None:
        consumer = session.consumers.get(number)
        if consumer is None:
            return
        for i in range(0, len(ids), 2):
            self.give_back(consumer.release(ids[i], ids[i + 1]))
        self._drop_if_done(session, consumer)

    def _drop_if_done(self, session: Session, consumer: Consumer) -> None:
        if consumer.cancelled and not consumer.outstanding:
            session.consumers.pop(consumer.number, None)
            self._give_way(consumer)

    def give_back(self, runs: list[Run]) -> None:
        """Returns messages that were checked out to their old places."""
        for run in runs:
            self.unsettled_count -= run.count
            run.acquired_count += 1
            self.ready_count += run.count
            self.ready_bytes += run.body_bytes()
            insort(self.returned, run, key=_position_of)

    # --- handing out ---------------------------------------------------------------------

    def _serve(self, now_ms: int) -> None:
        """Hands out what can be, drops what nobody took in time and what exceeds the length."""
        self.now_ms = now_ms
        self._hand_out_ready()
        self._expire(now_ms)
        if self.limits.overflow == DROP_HEAD:
            while self.ready_count and self._overflows():
                self._leave_unacknowledged(self.take_head(self._excess()), OVER_LENGTH)

    def _hand_out_ready(self) -> None:
        self.drop_late()
        while self.ready_count:
            candidates = self._candidates()
            if not candidates:
                return
            # Alone, a consumer takes whole runs; equals take turns message by message.
            turns = len(candidates) > 1
            served: list[Consumer] = []
            for consumer in candidates:
                if not self.ready_count:
                    break
                served.append(consumer)
                limit = 1 if turns else consumer.window - consumer.outstanding
                self._hand_out(consumer, self.take_head(limit))
                self.drop_late()
            if turns:
                self._rotate(served)

    def _candidates(self) -> list[Consumer]:
        if self.limits.single_active:
            one = self.active
            fits = one is not None and not one.cancelled and one.outstanding < one.window
            return [one] if one is not None and fits else []
        found: list[Consumer] = []
        for consumer in self.service:
            if found and consumer.priority != found[0].priority:
                break
            if consumer.outstanding < consumer.window:
                found.append(consumer)
        return found

    def _rotate(self, served: list[Consumer]) -> None:
        # Who was served goes behind its equals, also when the messages ran out within the round.
        for consumer in served:
            self.service.remove(consumer)
        for consumer in served:
            insort(self.service, consumer, key=_service_order)

    def _hand_out(self, consumer: Consumer, run: Run) -> None:
        block = run.block
        self.take_in_memory(block)
        self.unsettled_count += run.count
        self.delivered += run.count
        first_id = consumer.hold(run)
        self.effects.append(
            (
                DELIVER, consumer.session, consumer.number, first_id,
                (block.data, block.command), run.first, run.count, run.acquired_count,
            )
        )  # fmt: skip

    def take_head(self, limit: int) -> Run:
        """Takes at most `limit` messages from the front."""
        assert limit > 0
        source = self.returned or self.ready
        run = source[0]
        if run.count <= limit:
            if self.returned:
                self.returned.pop(0)
            else:
                self.ready.popleft()
        else:
            source[0] = run.cut(limit, run.count - limit)
            run = run.cut(0, limit)
        self.ready_count -= run.count
        self.ready_bytes -= run.body_bytes()
        self.delivered_to = max(self.delivered_to, run.position + run.count)
        return run

    def drop_late(self) -> None:
        """Drops messages at the head whose time is over: they must not be handed out."""
        if self.may_expire:
            self._expire(self.now_ms - 1)

    def _expire(self, now_ms: int) -> None:
        for source in (self.returned, self.ready):
            while source and source[0].expires and source[0].expires <= now_ms:
                run = source[0]
                del source[0]
                self.ready_count -= run.count
                self.ready_bytes -= run.body_bytes()
                self._leave_unacknowledged(run, EXPIRED)
        if not self.ready_count:
            self.ready_bytes = 0

    # --- dead letters --------------------------------------------------------------------

    def _leave_unacknowledged(self, run: Run, reason: str) -> None:
        """Takes a run that is in no place any more."""
        if not self.leaving.add(run, reason, dead_letters=self.limits.dead_letters):
            self.forget(run)

    def _leave_refused(
        self, data: bytes, count: int, offset: int, length: int, now_ms: int
    ) -> None:
        """Publishes that the queue refuses: they were never in it, nor will they be on disk."""
        size = enqueue_bytes(data, offset)
        block = Block(data, offset, length, count, self.next_position, size, now_ms)
        self.next_position += count
        self.memory_bytes += length
        self._leave_unacknowledged(Run(block, 0, count, 0, 0), OVER_LENGTH)

    def next_expiry_ms(self) -> int:
        """Returns when the first message at a head expires; 0 = never."""
        times = [source[0].expires for source in (self.returned, self.ready) if source]
        return min((time for time in times if time), default=0)

    # --- blocks --------------------------------------------------------------------------

    def forget(self, run: Run) -> None:
        """Notes that messages are gone, and with the last of them their block."""
        block = run.block
        position = run.position
        settled = self.settled
        if settled and settled[-1] + 1 == position:
            settled[-1] = position + run.count - 1
        else:
            settled.append(position)
            settled.append(position + run.count - 1)
        block.live -= run.count
        assert block.live >= 0
        if block.live == 0:
            self.drop_body(block)
            if block.where is not None:
                self.finished.append(block)

    def take_in_memory(self, block: Block) -> None:
        """Reads a block that is on disk only. Raises StorageFault and OSError."""
        if block.data is None:
            block.data, block.command = self._load(block)
            self.memory_bytes += block.length

    def body_of(self, block: Block) -> tuple[bytes, int]:
        """Returns the buffer that holds a block and the command's offset in it; the block stays
        where it is. Raises StorageFault and OSError."""
        return self._load(block) if block.data is None else (block.data, block.command)

    def drop_body(self, block: Block) -> None:
        """Takes a block's bytes out of memory; they are on disk, or nobody needs them."""
        if block.data is not None:
            block.data = None
            self.memory_bytes -= block.length

    def blocks_behind_head(self, keep_bytes: int) -> Iterator[Block]:
        """Blocks in memory that may leave it so that `keep_bytes` stay: those of which messages are
        leaving, reserved ones, then ready ones, newest first."""
        excess = self.memory_bytes - keep_bytes
        for run in self.leaving:
            if run.block.data is not None and excess > 0:
                excess -= run.block.length
                yield run.block
        for reservation in self.reservations.by_name.values():
            # Whoever reads a reservation can wait for the disk, and reads it more than once.
            for run in reservation.held.runs:
                if run.block.data is not None and excess > 0:
                    excess -= run.block.length
                    yield run.block
        for run in reversed(self.ready):
            if excess <= 0:
                return
            block = run.block
            if block.data is not None and run.count == block.count:
                excess -= block.length
                yield block

    def blocks_in(self, file: int) -> list[Block]:
        """Living blocks that lie in a file of the log, oldest first. Cost: O(runs)."""
        blocks = (run.block for run in self._all_runs())
        found = {block for block in blocks if block.where is not None and block.where.file == file}
        return sorted(found, key=lambda block: block.position)

    def dead_in(self, block: Block) -> list[int]:
        """Positions (first, last, …) of a block that are settled. Cost: O(runs)."""
        dead: list[int] = []
        at = 0
        runs = [run for run in self._all_runs() if run.block is block]
        ends = [(run.first, run.first + run.count) for run in sorted(runs, key=_position_of)]
        for first, after in [*ends, (block.count, block.count)]:
            if first > at:
                dead += (block.position + at, block.position + first - 1)
            at = after
        return dead

    def _all_runs(self) -> Iterator[Run]:
        yield from self.returned
        yield from self.ready
        yield from self.leaving
        yield from self._held_runs()

    def _held_runs(self) -> Iterator[Run]:
        for session in self.sessions.values():
            for consumer in session.consumers.values():
                yield from consumer.runs
        for reservation in self.reservations.by_name.values():
            yield from reservation.held.runs

    # --- looking -------------------------------------------------------------------------

    @property
    def consumer_count(self) -> int:
        """Consumers that are subscribed, and reservations."""
        return len(self.service) + len(self.reservations)

    @property
    def unsettled_bytes(self) -> int:
        """Bytes of the bodies that consumers and reservations hold. Cost: O(runs)."""
        return sum(run.body_bytes() for run in self._held_runs())

    @property
    def takes_more(self) -> bool:
        """A message that came now would be delivered at once."""
        return not self.ready_count and any(
            consumer.outstanding < consumer.window and not consumer.cancelled
            for consumer in self.service
        )

    @property
    def is_exclusive(self) -> bool:
        """A consumer has the queue for itself."""
        return any(consumer.exclusive for consumer in self.service)

    def check_invariants(self) -> None:
        """Asserts what the module text promises. Cost: O(runs)."""
        places: list[Run] = [*self.returned, *self.ready]
        for before, after in pairwise(places):
            assert before.position + before.count <= after.position
        assert self.ready_count == sum(run.count for run in places)
        held = list(self._held_runs())
        for reservation in self.reservations.by_name.values():
            assert reservation.held.outstanding == reservation.next - reservation.first
        self.reservations.check()
        assert self.unsettled_count == sum(run.count for run in held)
        live: dict[Block, int] = {}
        seen: set[int] = set()
        assert self.leaving.count == sum(run.count for run in self.leaving)
        for run in [*places, *held, *self.leaving]:
            live[run.block] = live.get(run.block, 0) + run.count
            span = range(run.position, run.position + run.count)
            assert seen.isdisjoint(span)
            seen.update(span)
        assert all(block.live == count for block, count in live.items())
        for session in self.sessions.values():
            for consumer in session.consumers.values():
                assert consumer.outstanding == sum(run.count for run in consumer.runs)


def _service_order(consumer: Consumer) -> int:
    return -consumer.priority


def _pieces(
    first: int, after: int, split: int, expirations: list[int | None] | None
) -> Iterator[tuple[int, int]]:
    """Cuts records [first, after) at `split`, or into single ones when some expire on their own."""
    if expirations is not None:
        yield from ((i, 1) for i in range(first, after))
        return
    middle = min(max(split, first), after)
    if middle > first:
        yield first, middle - first
    if after > middle:
        yield middle, after - middle
