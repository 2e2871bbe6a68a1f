# cython: annotation_typing=False
"""The messages of a quorum queue: those that are ready, and how many are elsewhere.

What is `fresh` was never handed out. What came back is in `returned`, which is served first; or in
`requeued`, when a client gave it back unfailed to a queue without a delivery limit: then its turn
comes behind all that was in the queue by then.

What has a priority other than the default one is in `levels`: a higher level comes before `fresh`,
a lower one behind it. With `timed`, messages may expire: at the head of what came back or of a
level, never behind one that does not (ADR 0043), unless the queue asks for that (`expiry`).

The setting `requeue_position` says otherwise where what comes back goes (ADR 0050): to its place in
the log (`levels.restored`), to the head, or to the tail.

Messages in a group of which another one is ready or held are blocked: neither ready nor held
(`groups`, ADR 0051). What is `waiting` becomes ready at a time (`Delayed`, ADR 0049).

Invariants: published = ready + blocked + waiting + unacked + acked + purged + dropped; `fresh` is
in the order of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from convoymq.queues.quorum import runs
from convoymq.queues.quorum.due_expiry import DueExpiry, SegmentedFifo, plain
from convoymq.queues.quorum.groups import Groups
from convoymq.queues.quorum.levels import (
    LEVEL_BITS,
    LEVEL_DEFAULT,
    LEVEL_MAX,
    Levels,
    due_of,
    fresh_fifo,
    level_of,
)
from convoymq.queues.quorum.notes import Notes
from convoymq.queues.quorum.order import Order
from convoymq.queues.quorum.restored import place_of
from convoymq.queues.quorum.waiting import Waiting
from convoymq.replication.machine import NEVER

if TYPE_CHECKING:
    from convoymq.queues.quorum.delayed import Delayed

OVER_DELIVERY_LIMIT = "delivery_limit"
REJECTED = "rejected"
EXPIRED = "expired"
OVER_LENGTH = "maxlen"

#: Values of the setting `requeue_position`: where a message goes that comes back.
AS_RABBITMQ = 0
ORIGINAL = 1
FRONT = 2
TAIL = 3


class Backlog:
    """Ready messages and the counters of all messages."""

    __slots__ = (
        "acked", "beside", "bounded", "counts_returns", "dead_letters", "delayed", "delivered",
        "delivery_limit", "dropped", "expiry", "fresh", "fronted", "groups", "keeps_all",
        "levels", "max_bytes", "max_length", "message_ttl_ms", "notes", "order", "published",
        "purged", "redelivered", "refuses", "refusing", "requeue_position", "requeued",
        "returned", "returns", "stirred", "timed", "two_classes", "unacked", "unacked_bytes",
        "waiting",
    )  # fmt: skip

    def __init__(self, delivery_limit: int) -> None:
        self.delivery_limit = delivery_limit
        self.fresh = runs.Fifo(False)
        self.returned = runs.Fifo(True)
        #: What came back to the tail: each group of it behind the messages that were fresh then.
        self.requeued = runs.Tail()
        #: Messages that were never handed out, of priorities other than the default one; how many
        #: entered there.
        self.levels = Levels()
        self.beside = 0
        self.groups = Groups(self.levels)
        self.order = Order(self)
        #: Priorities make two classes, not 32 levels (ADR 0050).
        self.two_classes = False
        self.requeue_position = AS_RABBITMQ
        #: Whatever a client gives back has failed, as in RabbitMQ 4.0 to 4.2 (ADR 0086).
        self.counts_returns = False
        #: What came back to the head with the command that is being applied: see `put_front`.
        self.fronted: list[runs.Run] = []
        #: Something may have become ready elsewhere than behind all that was published before.
        self.stirred = False
        #: What consumers have said of messages, and those that wait for certain consumers.
        self.notes = Notes()
        #: What becomes ready at a time; and who decides it, when there is somebody.
        self.waiting = Waiting()
        self.delayed: Delayed | None = None
        #: What leaves by its due time, wherever it stands; None = at heads only.
        self.expiry: DueExpiry | None = None
        #: Some message has a time at which it expires: a short cut, for queues without.
        self.timed = False
        #: Nothing expires for the time being.
        self.keeps_all = False
        self.message_ttl_ms = -1
        #: Limits of what is ready; -1 = none.
        self.max_length = -1
        self.max_bytes = -1
        #: Beyond a limit publishers are refused, and nothing is dropped.
        self.refuses = False
        #: Some limit is set, or publishers are refused since one was.
        self.bounded = False
        self.refusing = False
        #: What `DeadLetters` keeps.
        self.dead_letters = runs.CheckedOut()
        self.unacked = 0
        self.unacked_bytes = 0
        self.published = 0
        self.delivered = 0
        self.acked = 0
        self.returns = 0
        self.redelivered = 0
        self.purged = 0
        self.dropped: dict[str, int] = {OVER_DELIVERY_LIMIT: 0, REJECTED: 0}

    # ---------------------------------------------------------------- ready messages

    def ready(self) -> int:
        """Returns the number of messages that wait for a consumer."""
        return (
            self.fresh.messages
            + self.returned.messages
            + self.requeued.messages
            + self.levels.messages
        )

    def ready_bytes(self) -> int:
        """Returns the body bytes of the messages that wait."""
        return int(self.fresh.size + self.returned.size + self.requeued.size + self.levels.size)

    def stored(self) -> int:
        """Returns the number of messages that nobody holds: ready ones, those that are blocked in
        their groups, and those that wait for certain consumers."""
        return self.ready() + int(self.groups.messages) + int(self.notes.avoided.messages)

    def stored_bytes(self) -> int:
        """Returns the body bytes of the messages that nobody holds."""
        return self.ready_bytes() + int(self.groups.size) + int(self.notes.avoided.size)

    def ready_runs(self) -> list[runs.Run]:
        """Returns all that nobody holds, FIFO by FIFO. Cost: O(runs)."""
        beside = [run for fifo in self.levels.fifos() for run in fifo.runs()]
        beside += self.levels.restored.all_runs()
        beside += self.groups.blocked_runs()
        beside += self.notes.avoided.runs()
        return [*self.returned.runs(), *self.requeued.runs(), *self.fresh.runs(), *beside]

    def in_order(self) -> Iterator[runs.Run]:
        """Yields all that nobody holds, in the order in which it would be delivered if nothing
        happened meanwhile; what is blocked comes last. Cost: O(runs listed)."""
        yield from self.returned.runs()
        yield from self.order.runs()
        yield from self.groups.blocked_runs()
        yield from self.notes.avoided.runs()

    def enqueue(
        self, index: int, offset: int, first: int, count: int, size: int, mark: int
    ) -> None:
        """Takes a run that is published with an expiry or a priority."""
        if due_of(mark):
            self.expects(mark)
        if mark & LEVEL_MAX:
            self.beside += count
            self.levels.push(index, offset, first, count, size, mark)
        else:
            self.fresh.push(index, offset, first, count, size, 0, 0, mark)

    def arrive(self, run: runs.Run) -> None:
        """Takes a run that has waited. One that came back goes where such runs go; another one
        behind all that is in the queue at the default level, and with a priority above that to what
        came back."""
        if due_of(run[7]):
            self.expects(run[7])
        if run[5]:
            self._return(run)
        else:
            self._put_back(run, AS_RABBITMQ if level_of(run[7]) > LEVEL_DEFAULT else TAIL)

    def take(self, limit: int) -> runs.Run:
        """Removes at most `limit` messages of the next run. There must be one."""
        run = self._remove(limit)
        count = run[3]
        self.delivered += count
        if run[5]:
            self.redelivered += count
        return run

    def _remove(self, limit: int) -> runs.Run:
        """Takes at most `limit` messages of the next run out, wherever they go."""
        source = self.returned
        if not source.messages:
            if self.levels.messages:
                if self.two_classes or self.levels.restored.messages:
                    return self.order.take(limit)
                level = self.levels.highest()
                if level > LEVEL_DEFAULT or not (self.fresh.messages or self.requeued.messages):
                    return self.levels.take(level, limit, False)
            source = self.fresh
            if self.requeued.messages:
                ahead = self.ahead()
                if ahead:
                    limit = min(limit, ahead)
                else:
                    source = self.requeued
        assert source.messages, "nothing is ready"
        run = source.take(limit)
        if self.two_classes and source is not self.returned:
            self.order.took(run[3])
        return run

    def ahead(self) -> int:
        """Returns how many messages of the default level come before the next one that went to the
        tail."""
        return self.requeued.ahead(self.entered() - self.fresh.messages)

    def entered(self) -> int:
        """Returns how many messages have entered the default level."""
        return self.published - self.beside

    def take_into(self, held: runs.CheckedOut, first_id: int, limit: int, runs_max: int) -> int:
        """Moves at most `limit` messages, in at most `runs_max` runs, to `held`, under ids from
        `first_id` on; returns how many."""
        taken = again = pieces = 0
        while taken < limit and pieces < runs_max and self.ready():
            source, room = self._next_source()
            if source is None:
                run = self._remove(limit - taken)
                held.add(first_id + taken, *run)
                taken += run[3]
                if run[5]:
                    again += run[3]
                pieces += 1
                continue
            moved, parts, before = held.take_from(
                source, first_id + taken, min(limit - taken, room), runs_max - pieces
            )
            assert moved > 0, "a message is ready and was not taken"
            if self.two_classes and source is not self.returned:
                self.order.took(moved)
            taken += moved
            pieces += parts
            again += before
        assert taken <= limit, "more was taken than was asked for"
        self.delivered += taken
        self.redelivered += again
        return int(taken)

    def _next_source(self) -> tuple[runs.Fifo | None, int]:
        """Returns the FIFO with the next message, and how many of them may be taken there in a row;
        None = in one of the levels, or at its place. There must be one."""
        if self.returned.messages:
            return self.returned, self.returned.messages
        if self.levels.messages and (
            self.two_classes
            or self.levels.restored.messages
            or self.levels.highest() > LEVEL_DEFAULT
            or not (self.fresh.messages or self.requeued.messages)
        ):
            return None, self.levels.messages
        if self.requeued.messages:
            ahead = self.ahead()
            return (self.fresh, ahead) if ahead else (self.requeued, self.requeued.together())
        return self.fresh, self.fresh.messages

    def purge(self, held: Iterable[runs.Run] = ()) -> int:
        """Drops what is not `held`; returns how many messages."""
        notes = self.notes
        count = self.ready() + int(notes.avoided.messages)
        if notes.by_place:
            for run in self.ready_runs():
                notes.forget(run)
            notes.avoided.clear()
        if self.groups.heads:
            count += self.groups.purge(list(held))
        self.purged += count
        self.fresh.clear()
        self.returned.clear()
        self.requeued.clear()
        self.levels.clear()
        self.order.turn = 0
        assert self.purged <= self.published, "more was purged than published"
        assert not self.ready(), "messages were left by a purge"
        return count

    # ---------------------------------------------------------------- expiry

    def expects(self, mark: int) -> None:
        """Notes that a message with a mark, which may have a time, is to be ready."""
        self.timed = True
        if self.expiry is not None and due_of(mark):
            self.expiry.expect(due_of(mark))

    def use_due(self, by_due: bool) -> None:
        """Has what has expired leave wherever it stands, or at heads only, from now on. Cost of a
        change: O(runs)."""
        if by_due == (self.expiry is not None):
            return
        if by_due:
            self.levels.use(SegmentedFifo, SegmentedFifo.of)
            self.fresh = SegmentedFifo.of(self.fresh)
            self.expiry = DueExpiry(self)
            self.expiry.begin()
        else:
            self.levels.use(fresh_fifo, plain)
            self.fresh = plain(self.fresh)
            self.expiry = None

    def may_expire(self) -> bool:
        """Returns whether something that is ready will expire. Cost: O(runs) with marks."""
        fifos = (self.fresh, self.returned, self.requeued, *self.levels.fifos())
        if any(due_of(run[7]) for run in self.levels.restored.all_runs()):
            return True
        return any(due_of(run[7]) for fifo in fifos if fifo.has_marks for run in fifo.runs())

    def due_ms(self) -> int:
        """Returns when the first message expires of those that stand at a head; 0 = none does."""
        if self.keeps_all:
            return 0
        due = due_of(self.returned.head_mark())
        for mark in self._head_marks():
            other = due_of(mark)
            if other and (not due or other < due):
                due = other
        return due

    def _head_marks(self) -> list[int]:
        """Of the oldest run of every level."""
        if self.levels.messages:
            return self.order.head_marks()
        if self.requeued.messages and not self.ahead():
            return [self.requeued.head_mark()]
        return [self.fresh.head_mark()]

    def take_expired(self, now_ms: int) -> runs.Run | None:
        """Takes a run out that stands at a head, and whose time is over; None = there is none."""
        if self.keeps_all:
            return None
        # One by one where each may make room for another one of its group.
        limit = 1 if self.groups.heads else runs.LOW
        if 0 < due_of(self.returned.head_mark()) <= now_ms:
            return self.returned.take(limit)
        if self.levels.messages:
            return self.order.take_expired(now_ms, limit)
        if self.requeued.messages:
            ahead = self.ahead()
            if not ahead:
                if 0 < due_of(self.requeued.head_mark()) <= now_ms:
                    return self.requeued.take(limit)
                return None
            if 0 < due_of(self.fresh.head_mark()) <= now_ms:
                return self.fresh.take(min(ahead, limit))
            return None
        if 0 < due_of(self.fresh.head_mark()) <= now_ms:
            return self.fresh.take(limit)
        return None

    # ---------------------------------------------------------------- length

    def length(self) -> int:
        """Returns the number of messages that count toward the limit: those that nobody holds, what
        waits, and dead letters that are kept."""
        return self.stored() + int(self.waiting.messages) + int(self.dead_letters.messages)

    def length_bytes(self) -> int:
        """Returns the body bytes that count toward the limit."""
        return self.stored_bytes() + int(self.dead_letters.size)

    def exceeds(self) -> bool:
        """Returns whether there is more than a limit allows."""
        return 0 <= self.max_length < self.length() or 0 <= self.max_bytes < self.length_bytes()

    def has_room(self) -> bool:
        """Returns whether there is 80 % of all limits, or less."""
        return (self.max_length < 0 or self.length() * 5 <= self.max_length * 4) and (
            self.max_bytes < 0 or self.length_bytes() * 5 <= self.max_bytes * 4
        )

    def take_excess(self) -> runs.Run:
        """Takes messages out that would be delivered next, of one run, so that what is left comes
        nearer to the limits and not below them. Some limit must be exceeded. What is blocked goes
        when nothing is ready, and last what waits."""
        excess = 0
        if self.max_length >= 0:
            excess = self.stored() + int(self.waiting.messages) - self.max_length
            if excess > 0 and not self.stored():
                return self.waiting.take(excess)
        over = self.stored_bytes() - self.max_bytes if self.max_bytes >= 0 else 0
        assert excess > 0 or over > 0, "no limit is exceeded"
        limit = max(excess, 0)
        if over > 0:
            count, size = self._next_amount()
            # At most as many as it takes, one at least: sizes are averages within a run.
            limit = max(limit, count if size <= over else max(1, count * over // size))
        if self.groups.heads:
            # Each may make room for another one of its group.
            limit = 1
        if self.ready():
            return self._remove(limit)
        if self.groups.messages:
            return self.groups.take_blocked(limit)
        return self.notes.avoided.take(limit)

    def _next_amount(self) -> tuple[int, int]:
        """Returns (messages, body bytes) of the run that would be delivered next, or of what is
        blocked."""
        if not self.ready():
            if self.groups.messages:
                return self.groups.blocked_amount()
            run = self.notes.avoided.runs()[0]
            return run[3], run[4]
        source, _ = self._next_source()
        return self.order.next_amount() if source is None else source.head_amount()

    # ---------------------------------------------------------------- checked-out messages

    def hold(self, messages: int, size: int) -> None:
        """Messages that were taken are held by a consumer or a reservation."""
        assert messages >= 0 and size >= 0, "less than nothing is held"  # noqa: PT018
        self.unacked += messages
        self.unacked_bytes += size

    def settle(self, messages: int, size: int) -> None:
        """Messages that were held are acknowledged."""
        self.acked += messages
        self.unacked -= messages
        self.unacked_bytes -= size
        assert self.unacked >= 0, "more was settled than is checked out"
        assert self.unacked_bytes >= 0, "more bytes were settled than are checked out"
        assert self.acked <= self.published, "more was settled than published"

    def give_back(
        self, run: runs.Run, failed: int, counted: int, due_ms: int = 0
    ) -> runs.Run | None:
        """Takes a run back, behind all that came back before. Returns it as it is now when it has
        failed too often: then it is to leave (`DeadLetters.leave`).

        Args:
            failed: the client says that it has failed: retries ask for it.
            counted: what is added to its failed deliveries.
            due_ms: the client has it wait until then; 0 = the settings say.
        """
        index, offset, first, count, size, acquired_count, failed_delivery_count, mark = run
        self._came_back(count, size)
        if mark:
            self.expects(mark)
        acquired_count += 1
        failed_delivery_count += counted
        if 0 <= self.delivery_limit < failed_delivery_count:
            return (index, offset, first, count, size, acquired_count, failed_delivery_count, mark)
        back = (index, offset, first, count, size, acquired_count, failed_delivery_count, mark)
        if self.delayed is None or not self.delayed.retries(back, failed, due_ms):
            self._return(back)
        return None

    def _return(self, back: runs.Run) -> None:
        """A run that was handed out is ready again, or waits for certain consumers."""
        self.stirred = True
        if self.notes.by_place:
            for part, note in self.notes.parts(back):
                if note[1]:
                    self.notes.avoid(part)
                else:
                    self._return_ready(part)
        else:
            self._return_ready(back)

    def restore(self, run: runs.Run) -> None:
        """Takes a run back that was avoided: it is ready, where such runs go that come back."""
        if due_of(run[7]):
            self.expects(run[7])
        self._return_ready(run)

    def _return_ready(self, back: runs.Run) -> None:
        if self.groups.heads:
            for part, grouped in self.groups.parts(back):
                self._put_back(part, ORIGINAL if grouped else self.requeue_position)
        else:
            self._put_back(back, self.requeue_position)

    def _put_back(self, run: runs.Run, position: int) -> None:
        self.stirred = True
        # Without an asterisk: calls of compiled containers have none.
        index, offset, first, count, size, acquired_count, failed_delivery_count, mark = run
        if position == AS_RABBITMQ:
            self.returned.push(
                index, offset, first, count, size, acquired_count, failed_delivery_count, mark
            )
        elif position == ORIGINAL:
            self.levels.restore(run)
        elif position == FRONT:
            self.fronted.append(run)
        else:
            self.requeued.requeue(
                self.entered(),
                index,
                offset,
                first,
                count,
                size,
                acquired_count,
                failed_delivery_count,
                due_of(mark) << LEVEL_BITS,
            )

    def goes_to_tail(self, failed: int) -> bool:
        """Returns whether what a client gives back goes to the tail by RabbitMQ's rule: up to 4.2
        all of it, later what has not failed."""
        return (
            self.delivery_limit < 0
            and self.requeue_position == AS_RABBITMQ
            and (self.counts_returns or not failed)
        )

    def requeue(self, run: runs.Run, failed: int, counted: int) -> None:
        """Takes a run back, behind all that is in the queue, at the default level. For `failed` and
        `counted` see `give_back`."""
        self._came_back(run[3], run[4])
        self.stirred = True
        if run[7]:
            self.expects(run[7])
        back = (*run[:5], run[5] + 1, run[6] + counted, run[7])
        if self.counts_returns and self.delayed is not None and self.delayed.retries(back, failed):
            return
        if self.notes.by_place:
            for piece, note in self.notes.parts(back):
                if note[1]:
                    self.notes.avoid(piece)
                else:
                    self._requeue(piece)
        else:
            self._requeue(back)

    def _requeue(self, back: runs.Run) -> None:
        for part, grouped in self.groups.parts(back) if self.groups.heads else ((back, False),):
            self._put_back(part, ORIGINAL if grouped else TAIL)

    def use_classes(self, two_classes: bool) -> None:
        """From now on priorities make two classes, or 32 levels."""
        if two_classes != self.two_classes:
            self.two_classes = two_classes
            self.order.turn = 0

    def put_front(self) -> None:
        """Puts what came back to the head with one command there, in the order of the log."""
        self.fronted.sort(key=place_of)
        for run in reversed(self.fronted):
            self.returned.push_front(run)
        self.fronted.clear()

    def _came_back(self, count: int, size: int) -> None:
        self.unacked -= count
        self.unacked_bytes -= size
        self.returns += count
        assert self.unacked >= 0, "more came back than is checked out"
        assert self.unacked_bytes >= 0, "more bytes came back than are checked out"

    def follows(self) -> bool:
        """Returns whether `gone` is to be called: some message is in a group, or has a note."""
        return bool(self.groups.heads or self.notes.by_place)

    def gone(self, run: runs.Run) -> None:
        """Messages that were ready or held are in the queue no more: what was blocked by them is
        ready, and what was said of them forgotten."""
        if self.notes.by_place:
            self.notes.forget(run)
        if self.groups.heads:
            self.gone_from_group(run)

    def gone_from_group(self, run: runs.Run) -> None:
        """As `gone`, of messages whose notes are kept."""
        self.stirred = True
        if self.groups.gone(run):
            self.timed = True

    def let_go(self, run: runs.Run) -> None:
        """A run that was held is held no more, and does not come back."""
        self.unacked -= run[3]
        self.unacked_bytes -= run[4]
        assert self.unacked >= 0, "more was rejected than is checked out"
        assert self.unacked_bytes >= 0, "more bytes were rejected than are checked out"

    def drop(self, count: int, reason: str) -> None:
        """Counts messages that leave other than by settling and purging; `DeadLetters.leave` says
        what becomes of them."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    # ---------------------------------------------------------------- the log

    def live_ranges(self, held: Iterable[runs.CheckedOut | Waiting]) -> list[tuple[int, int]]:
        """See `Machine.live_ranges`; `held`: what consumers and reservations hold.

        What is fresh was published in one range of the log, so it is one range, with the few small
        entries that lie between, and so is every level; everything else is named entry by entry, as
        is what may have lost messages from its middle.
        """
        needed = set(self.returned.indexes())
        needed.update(self.levels.restored.indexes())
        needed.update(self.groups.indexes())
        needed.update(self.requeued.indexes())
        needed.update(self.notes.avoided.indexes())
        for part in held:
            needed.update(part.indexes())
        spans = [(index, index) for index in needed]
        for fifo in (self.fresh, *self.levels.fifos()):
            if isinstance(fifo, SegmentedFifo):
                spans += fifo.spans()
            elif fifo.messages:
                spans.append((fifo.first_index(), fifo.last_index()))
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

    def oldest_live(self, held: Iterable[runs.CheckedOut | Waiting]) -> int:
        """See `Machine.oldest_live`: messages that came back may lie before it."""
        oldest = NEVER
        for waiting in (self.fresh, self.returned, self.requeued, *self.levels.fifos()):
            if waiting.messages:
                oldest = min(oldest, waiting.first_index())
        for level in self.levels.restored.levels():
            place = self.levels.restored.head_place(level)
            oldest = min(oldest, place[0] if place is not None else oldest)
        if self.notes.avoided.messages:
            oldest = min(oldest, *self.notes.avoided.indexes())
        blocked = self.groups.oldest_index()
        if blocked is not None:
            oldest = min(oldest, blocked)
        for part in held:
            if part.messages:
                oldest = min(oldest, part.first_index())
        return oldest

    # ---------------------------------------------------------------- looking at it

    def run_count(self) -> int:
        """Runs that are ready."""
        beside = sum(fifo.run_count() for fifo in self.levels.fifos())
        beside += self.levels.restored.run_count() + self.groups.run_count()
        came_back = self.returned.run_count() + self.requeued.run_count()
        came_back += self.notes.avoided.run_count()
        return int(self.fresh.run_count() + came_back + beside)

    def memory_bytes(self) -> int:
        """Returns the number of bytes of the packed index of what is ready."""
        ready = self.fresh.memory_bytes() + self.returned.memory_bytes()
        beside = sum(fifo.memory_bytes() for fifo in self.levels.fifos())
        beside += self.levels.restored.memory_bytes() + self.groups.memory_bytes()
        beside += self.notes.avoided.memory_bytes()
        return int(ready + self.requeued.memory_bytes() + beside)
