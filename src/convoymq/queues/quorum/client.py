"""One channel's command stream into a quorum queue, and what comes back.

The client numbers nothing itself: `PublishTarget` numbers commands and keeps the pending ones. What
the client knows is how far they were applied, and per consumer which message id comes next. So it
may hear everything twice, from its own replica and from a leader, and passes each thing on once:

| heard                    | below what is known | next      | beyond                            |
|--------------------------|---------------------|-----------|-----------------------------------|
| APPLIED seq              | dropped             | passed on | passed on (it answers all before) |
| GAP last                 | is it over? (below) | resends   |                                   |
| DELIVER first message id | dropped or trimmed  | passed on | asked for; passed on when `final` |

`final` deliveries come from the state, not from the log: what they skip is no more checked out.
A GAP below what was applied is either a late report or means that the queue ended the session (its
node was given up). Only when it is still so a second later does the client start anew.

Without a leader, questions (CHECKOUT, GET, PURGE, CANCEL) have a deadline. Publishes wait for as
long as it takes once the queue has answered this session; before, they are refused after a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from convoymq.kernels import batch
from convoymq.kernels.batch import PendingCommand, PublishTarget
from convoymq.model.errors import BrokerError, Subject, Unavailable
from convoymq.model.refusals import (
    exclusive_consumer,
    get_on_single_active_consumer,
    missing,
    queue_subject,
)
from convoymq.queues.interface import ClientEvents, ConsumerSpec, QueueClient
from convoymq.queues.sessions import APPLIED_OK

if TYPE_CHECKING:
    from convoymq.queues.quorum.queue import QuorumQueue

#: The least time between two resends of the same commands.
RESEND_PAUSE_MS = 100
#: How often a question is repeated whose reply was lost, about once a second.
QUESTIONS_MAX = 5
#: How long the queue must not know a session that it knew before the client gives the session up.
OVER_AFTER_MS = 1000
#: The same for a session that was never heard of: its first command may just be late.
OVER_UNHEARD_MS = 10_000


class _Consumer:
    """What the client knows of a consumer."""

    __slots__ = ("asked", "asked_at", "cancelled", "next_id", "paused", "subscribed")

    def __init__(self) -> None:
        self.next_id = 0
        self.subscribed = False
        self.cancelled = False
        self.asked = False
        self.paused = False
        #: `next_id` when this client last asked for what is missing; -1: nothing is on its way.
        self.asked_at = -1


class QuorumClient(QueueClient):
    """See `QueueClient`."""

    queue: QuorumQueue

    def __init__(self, queue: QuorumQueue, session: int, events: ClientEvents) -> None:
        self.queue = queue
        self.session = session
        self.target = PublishTarget(queue.builder, session, self)
        self.target.pending_bytes_max = queue.limits.pending_bytes_max
        self.target.pending_commands_max = queue.limits.pending_commands_max
        self.closed = False
        self.blocked = False
        #: Highest seq known to be applied.
        self.applied = 0
        self._events = events
        self._consumers: dict[int, _Consumer] = {0: _Consumer()}
        self._consumers[0].subscribed = True
        #: Messages of basic.get by id, until their reply is here:
        #: (block, command, record, acquired, delivered)
        self._got: dict[int, tuple[bytes, int, int, int, int]] = {}
        #: Replies of basic.get whose message is not here yet: (message id, ready, no_ack)
        self._gets: deque[tuple[int, int, bool]] = deque()
        self._asked_get = -1
        #: Added to message ids of basic.get on the way to the channel: a new session counts from 0
        #: again, and what the channel still holds of the old one must not be taken for those.
        self._get_shift = 0
        #: Questions that were passed over without their reply: seq → (command, times asked again)
        self._unanswered: dict[int, tuple[PendingCommand, int]] = {}
        self._resent_ms = -RESEND_PAUSE_MS
        self._resent_after = -1
        self._gap_again = False
        self._over_since_ms = -1
        self.progress_ms = 0
        #: How often `QuorumQueue.tick` has resent without an answer.
        self.silences = 0
        #: When the questions that wait for an answer are given up, in their order.
        self._deadlines: deque[int] = deque()
        #: Questions that were answered without the queue; what it says later is not passed on.
        self._given_up: set[int] = set()
        #: Since when something is expected of the queue; kept by `QuorumQueue.tick`.
        self.waiting_since_ms = queue.clock.monotonic_ms()

    # --- commands ------------------------------------------------------------------------

    def subscribe(self, spec: ConsumerSpec) -> None:
        """Registers a consumer."""
        self._consumers[spec.number] = _Consumer()
        body = msgspec.msgpack.encode(
            {
                "tag": spec.tag,
                "prefetch": spec.prefetch,
                "no_ack": spec.no_ack,
                "exclusive": spec.exclusive,
                "priority": spec.priority,
                "args": _plain(spec.arguments),
            }
        )
        self._question(batch.CMD_CHECKOUT, len(body), spec.number, body, spec.number)

    def cancel(self, consumer: int) -> None:
        """Ends a consumer."""
        self._question(batch.CMD_CANCEL, 0, consumer, b"", consumer)

    def set_credit(self, consumer: int, credit: int) -> None:
        """Replaces the consumer's window."""
        body = msgspec.msgpack.encode({"credit": credit})
        self._command(batch.CMD_CREDIT, len(body), consumer, body)

    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """Acknowledges."""
        ranges = self._of_session(consumer, ranges)
        if ranges:
            self._settle(consumer, ranges)

    def _settle(self, consumer: int, ranges: Sequence[int]) -> None:
        self._command(batch.CMD_SETTLE, len(ranges) // 2, consumer, batch.pack_ranges(ranges))

    def return_(self, consumer: int, ranges: Sequence[int], *, failed: bool) -> None:
        """Requeues."""
        ranges = self._of_session(consumer, ranges)
        if ranges:
            self._return(consumer, ranges, failed=failed)

    def _return(self, consumer: int, ranges: Sequence[int], *, failed: bool) -> None:
        body = batch.pack_ranges(ranges)
        self.target.command(batch.CMD_RETURN, int(failed), len(ranges) // 2, consumer, body)

    def discard(self, consumer: int, ranges: Sequence[int]) -> None:
        """Rejects without requeue."""
        ranges = self._of_session(consumer, ranges)
        if ranges:
            body = batch.pack_ranges(ranges)
            self._command(batch.CMD_DISCARD, len(ranges) // 2, consumer, body)

    def _of_session(self, consumer: int, ranges: Sequence[int]) -> Sequence[int]:
        """The machine's message ids without those of sessions that are over: these messages are
        back in the queue."""
        if consumer:
            # Numbers of consumers that are gone are not used again.
            return ranges
        shift = self._get_shift
        if not shift:
            return ranges
        left: list[int] = []
        for first, last in zip(ranges[::2], ranges[1::2], strict=True):
            if last >= shift:
                left += (max(first, shift) - shift, last - shift)
        return left

    def get(self, *, no_ack: bool) -> None:
        """basic.get. With no_ack the client settles what it has: a lost answer loses nothing."""
        self._question(batch.CMD_GET, 0, 0, b"", no_ack)

    def purge(self) -> None:
        """Drops ready messages."""
        self._question(batch.CMD_PURGE, 0, 0)

    def close(self) -> None:
        """The channel is gone; the client stays until the queue has heard it."""
        if self.closed:
            return
        self.closed = True
        self._got.clear()
        self._gets.clear()
        if self.target.seq == 0:
            self.queue.forget(self)
        else:
            self._command(batch.CMD_SESSION_CLOSE, 0, 0)

    def _command(
        self, type: int, count: int, consumer: int, body: bytes = b"", note: Any = None
    ) -> None:
        self.target.command(type, 0, count, consumer, body, note)

    def _question(
        self, type: int, count: int, consumer: int, body: bytes = b"", note: Any = None
    ) -> None:
        timeout_ms = self.queue.limits.question_timeout_ms
        self._deadlines.append(self.queue.clock.monotonic_ms() + timeout_ms)
        self._command(type, count, consumer, body, note)

    # --- what the machine says -----------------------------------------------------------

    def on_applied(self, seq: int, status: int, reply: Any) -> None:
        """Commands up to `seq` are applied; `status` and `reply` belong to `seq` itself."""
        if seq <= self.applied:
            if seq in self._unanswered and self._is_reply(self._unanswered[seq][0], status, reply):
                self._answer_late(seq, status, reply)
            return
        self.applied = seq
        self.progress_ms = self.queue.clock.monotonic_ms()
        self.silences = 0
        self._over_since_ms = -1
        confirmed: list[int] | None = None
        for command in self.target.applied(seq):
            tags = command.tags
            if tags:
                # Confirmed without a look at the status: the one refusal is a deleted queue, whose
                # publishes are confirmed as well.
                if confirmed is None:
                    confirmed = list(tags)
                elif confirmed[-1] + 1 == tags[0]:
                    confirmed[-1:] = tags[1:]
                else:
                    confirmed += tags
            elif not self.closed and command.type not in _SILENT:
                if command.seq == seq and self._is_reply(command, status, reply):
                    self._answer(command, status, reply)
                elif command.type in _TELLING:
                    self._ask_again(command, 0)
                else:
                    self._answer(command, APPLIED_OK, None)
        if confirmed is not None and not self.closed:
            self._events.on_published(self, confirmed, True)
        if self._gap_again:
            self._gap_again = False
            if self.target.pending:
                self.resend(seq, now=True)
        if self.blocked:
            self.check_flow()
        if self.closed and not self.target.pending and seq >= self.target.seq:
            self.queue.forget(self)

    @staticmethod
    def _is_reply(command: PendingCommand, status: int, reply: Any) -> bool:
        """False for a mere "applied" where the command asked for content."""
        return command.type != batch.CMD_GET or status != APPLIED_OK or reply is not None

    def is_waiting(self) -> bool:
        """True while something is expected from the queue."""
        return bool(self.target.pending or self._unanswered or self._gets)

    def _ask_again(self, command: PendingCommand, tries: int) -> None:
        """The reply was lost on the way; a repeated question gets it from the session's record."""
        self._unanswered[command.seq] = (command, tries)
        data = command.chunk.data
        if data is not None:
            end = command.offset + command.length
            self.target.builder.adopt(data, command.offset, end)

    def _answer_late(self, seq: int, status: int, reply: Any) -> None:
        command, _ = self._unanswered.pop(seq, (None, 0))
        if command is not None and not self.closed:
            self._answer(command, status, reply)

    def on_silence(self) -> None:
        """Called about once a second: asks again for what should long be here."""
        for seq, (command, tries) in list(self._unanswered.items()):
            if tries < QUESTIONS_MAX:
                self._ask_again(command, tries + 1)
            else:
                # The session keeps a bounded number of replies; this one is gone.
                self._answer_late(seq, APPLIED_OK, None)
        if self._gets:
            self._answer_gets(final=False)

    def _answer(self, command: PendingCommand, status: int, reply: Any) -> None:
        """Tells the channel what became of one command that it asked about."""
        if command.seq in self._given_up:
            self._given_up.discard(command.seq)
            return
        error = None if status == APPLIED_OK else self._refusal(reply)
        kind = command.type
        if kind == batch.CMD_CHECKOUT:
            number: int = command.note
            self._deadlines.popleft()
            if error is not None:
                self._consumers.pop(number, None)
                self._events.on_subscribed(self, number, error)
                return
            consumer = self._consumers[number]
            consumer.subscribed = True
            self._events.on_subscribed(self, number, None)
            if consumer.asked:
                consumer.asked = False
                self._ask(number, consumer)
        elif kind == batch.CMD_CANCEL:
            known = self._consumers.get(command.note)
            if known is not None:
                known.cancelled = True
            self._deadlines.popleft()
            self._events.on_cancel_ok(self, command.note)
        elif kind == batch.CMD_PURGE:
            self._deadlines.popleft()
            self._events.on_purged(self, reply if isinstance(reply, int) else 0, error)
        elif kind == batch.CMD_GET:
            if error is not None:
                self._deadlines.popleft()
                self._events.on_get(self, None, 0, 0, 0, 0, 0, 0, error)
            elif reply:
                self._gets.append((reply[0], reply[1], bool(command.note)))
            else:
                self._gets.append((-1, 0, False))
            self._answer_gets(final=False)

    def _answer_gets(self, *, final: bool) -> None:
        """Answers calls of `get` in their order, as far as their messages are here."""
        while self._gets and not self.closed:
            message_id, ready, no_ack = self._gets[0]
            if message_id < 0:
                self._gets.popleft()
                self._deadlines.popleft()
                self._events.on_get(self, None, 0, 0, 0, 0, 0, 0, None)
                continue
            found = self._got.pop(message_id, None)
            if found is None:
                if not final or message_id != self._asked_get:
                    self._asked_get = message_id
                    self._ask(0, self._consumers[0], message_id)
                    return
                # The queue took it back meanwhile: for this client the call found nothing.
                self._gets.popleft()
                self._deadlines.popleft()
                self._events.on_get(self, None, 0, 0, 0, 0, 0, 0, None)
                continue
            self._gets.popleft()
            self._deadlines.popleft()
            block, command, record, acquired, delivered = found
            if no_ack:
                self._settle(0, (message_id, message_id))
            get_id = message_id + self._get_shift
            self._events.on_get(
                self, block, command, record, get_id, acquired, delivered, ready, None
            )

    def check_deadlines(self, now_ms: int) -> None:
        """Called every `TICK_MS`: gives up what the queue should have answered by now."""
        if self.closed:
            return
        if self._deadlines and self._deadlines[0] <= now_ms:
            self._give_up_questions()
        if self.applied or now_ms - self.waiting_since_ms < self.queue.limits.register_timeout_ms:
            return
        self.waiting_since_ms = now_ms
        if not self.closed:
            self._refuse_publishes()

    def _give_up_questions(self) -> None:
        """Answers all questions at once: their channel closes with the first one's error."""
        subject = queue_subject(self.queue.vhost, self.queue.name)
        self._deadlines.clear()
        waiting = [command for command, _ in self._unanswered.values()]
        waiting += [command for command in self.target.pending if command.type in _ASKING]
        self._unanswered.clear()
        gets = len(self._gets)
        self._gets.clear()
        waiting = [command for command in waiting if command.seq not in self._given_up]
        self._given_up.update(command.seq for command in waiting if command.seq > self.applied)
        for _ in range(gets):
            self._events.on_get(
                self, None, 0, 0, 0, 0, 0, 0, _timed_out("getting a message", subject)
            )
        for command in waiting:
            if self.closed:
                return
            if command.type == batch.CMD_CHECKOUT:
                self._consumers.pop(command.note, None)
                error = _timed_out("consuming", subject)
                self._events.on_subscribed(self, command.note, error)
            elif command.type == batch.CMD_CANCEL:
                known = self._consumers.get(command.note)
                if known is not None:
                    known.cancelled = True
                self._events.on_cancel_ok(self, command.note)
            elif command.type == batch.CMD_GET:
                error = _timed_out("getting a message", subject)
                self._events.on_get(self, None, 0, 0, 0, 0, 0, 0, error)
            else:
                self._events.on_purged(self, 0, _timed_out("purging", subject))

    def _refuse_publishes(self) -> None:
        """The queue has never answered this session: nobody knows whether it ever will."""
        refused: list[int] = []
        for command in self.target.pending:
            if command.tags:
                refused += command.tags
                # Refused is final: if they get into the queue after all, nobody hears it.
                command.tags = None
        if refused:
            self._events.on_published(self, refused, False)

    def on_gap(self, last: int) -> None:
        """The queue has seen commands up to `last` only, and at least one beyond it."""
        pending = self.target.pending
        if not pending:
            return
        now = self.queue.clock.monotonic_ms()
        if last:
            self._over_since_ms = -1
        elif self._over_since_ms < 0:
            self._over_since_ms = now
        elif now - self._over_since_ms >= (OVER_AFTER_MS if self.applied else OVER_UNHEARD_MS):
            self._start_anew()
            return
        if last >= self.applied:
            self.resend(last)

    def resend(self, after: int | None = None, *, now: bool = False) -> None:
        """Sends pending commands above `after` again; not twice in a short time."""
        if after is None:
            after = self.applied
        time_ms = self.queue.clock.monotonic_ms()
        if not now and after == self._resent_after and time_ms < self._resent_ms + RESEND_PAUSE_MS:
            self._gap_again = True
            return
        self._resent_after = after
        self._resent_ms = time_ms
        self.target.resend(after)

    def _start_anew(self) -> None:
        """The queue ended this session: what was pending is not known to be safe, consumers are
        gone; later commands go in a new session."""
        if self.closed:
            self.queue.forget(self)
            return
        error = Unavailable("the queue ended this channel's session")
        self._events_end(error, published_ok=False, renew=True)

    def _renew(self) -> None:
        self._get_shift += self._consumers[0].next_id
        self.queue.renew(self)
        self.applied = 0
        self._gap_again = False
        self._resent_after = -1
        self._over_since_ms = -1
        self.waiting_since_ms = self.queue.clock.monotonic_ms()

    def on_deliver(
        self,
        consumer: int,
        first_id: int,
        block: bytes,
        command: int,
        first: int,
        count: int,
        acquired: int,
        delivered: int,
        final: bool,
    ) -> None:
        """Messages are checked out to a consumer; see the module's table."""
        if self.closed:
            return
        known = self._consumers.get(consumer)
        if known is None:
            return
        if consumer == 0:
            for k in range(count):
                if first_id + k >= known.next_id or any(g[0] == first_id + k for g in self._gets):
                    self._got[first_id + k] = (block, command, first + k, acquired, delivered)
            known.next_id = max(known.next_id, first_id + count)
            if self._gets:
                self._answer_gets(final=False)
            return
        if known.paused:
            # Still checked out: `resume` asks for it.
            return
        expected = known.next_id
        if first_id != expected:
            if first_id + count <= expected:
                return
            if first_id < expected:
                skip = expected - first_id
                first_id = expected
                first += skip
                count -= skip
            elif not final:
                self._ask(consumer, known)
                return
        if not known.subscribed:
            # Its reply was lost, and comes again: deliveries before it would surprise the channel.
            known.asked = True
            return
        known.next_id = first_id + count
        if known.cancelled:
            self._return(consumer, (first_id, first_id + count - 1), failed=False)
            return
        self._events.on_deliver(
            self, consumer, first_id, block, command, first, count, acquired, delivered
        )

    def _ask(self, number: int, consumer: _Consumer, from_id: int = -1) -> None:
        """Asks for what is checked out from the next id on."""
        consumer.asked_at = consumer.next_id
        self.queue.ask(self, number, consumer.next_id if from_id < 0 else from_id)

    def on_asked(self, consumer: int, *, complete: bool = False) -> None:
        """What came is all for now. Unless it is `complete` it may be a part: then the rest is
        asked for."""
        if consumer == 0:
            self._answer_gets(final=True)
            return
        known = self._consumers.get(consumer)
        if known is None or self.closed:
            return
        asked_at, known.asked_at = known.asked_at, -1
        if not complete and 0 <= asked_at < known.next_id and not known.paused:
            self._ask(consumer, known)

    def is_paused(self, consumer: int) -> bool:
        """Whether deliveries to the consumer are dropped for now."""
        known = self._consumers.get(consumer)
        return known is None or known.paused

    def pause(self, consumer: int) -> None:
        """Drops deliveries to the consumer: the log and the state keep them."""
        known = self._consumers.get(consumer)
        if known is not None:
            known.paused = True

    def resume(self, consumer: int) -> None:
        """Asks for what was dropped."""
        known = self._consumers.get(consumer)
        if known is not None and known.paused:
            known.paused = False
            if not known.cancelled and not self.closed:
                self._ask(consumer, known)

    def on_cancelled(self, consumer: int, reason: str) -> None:
        """The queue ended a consumer."""
        known = self._consumers.pop(consumer, None)
        if known is not None and not known.cancelled and not self.closed:
            self._events.on_cancelled(self, consumer, reason)

    # --- flow and end --------------------------------------------------------------------

    def check_flow(self) -> None:
        """Stops the channel above the bounds of what may be pending, and lets it go on at half."""
        target = self.target
        divisor = 2 if self.blocked else 1
        limits = self.queue.limits
        beyond = (
            target.pending_bytes * divisor > limits.pending_bytes_max
            or len(target.pending) * divisor > limits.pending_commands_max
        )
        if beyond != self.blocked and not self.closed:
            self.blocked = beyond
            self._events.on_flow(self, beyond)

    def on_deleted(self) -> None:
        """The queue is gone: everything that waits is answered, publishes as safe."""
        subject = queue_subject(self.queue.vhost, self.queue.name)
        self._events_end(missing(subject), published_ok=True)

    def _events_end(self, error: BrokerError, *, published_ok: bool, renew: bool = False) -> None:
        """Answers all that is pending and cancels all consumers. `renew`: in a new session, as the
        channel may go on at once with what it hears."""
        # One more command closes the open batch of publishes, so that its tags are pending too.
        self.target.command(batch.CMD_SETTLE, 0, 0, 0)
        waiting = self.target.applied(self.target.seq)
        consumers = [n for n, known in self._consumers.items() if known.subscribed and n]
        cancelled = [n for n in consumers if not self._consumers[n].cancelled]
        if renew:
            self._renew()
        self._consumers = {0: _Consumer()}
        self._consumers[0].subscribed = True
        self._asked_get = -1
        gets, self._gets = self._gets, deque()
        unanswered = [command for command, _ in self._unanswered.values()]
        given_up, self._given_up = self._given_up, set()
        self._unanswered.clear()
        self._deadlines.clear()
        self._got.clear()
        if self.closed:
            return
        for _ in gets:
            self._events.on_get(self, None, 0, 0, 0, 0, 0, 0, error)
        for command in [*unanswered, *waiting]:
            if command.seq in given_up:
                continue
            if command.tags:
                self._events.on_published(self, command.tags, published_ok)
            elif command.type == batch.CMD_CHECKOUT:
                self._events.on_subscribed(self, command.note, error)
            elif command.type == batch.CMD_CANCEL:
                self._events.on_cancel_ok(self, command.note)
                if command.note in cancelled:
                    cancelled.remove(command.note)
            elif command.type == batch.CMD_GET:
                self._events.on_get(self, None, 0, 0, 0, 0, 0, 0, error)
            elif command.type == batch.CMD_PURGE:
                self._events.on_purged(self, 0, error)
        for number in cancelled:
            self._events.on_cancelled(self, number, "deleted" if published_ok else "lost")
        if self.blocked:
            self.check_flow()

    def _refusal(self, reason: Any) -> BrokerError:
        """The machine's reason as the error that the channel shows."""
        subject = queue_subject(self.queue.vhost, self.queue.name)
        if reason == "exclusive":
            return exclusive_consumer(subject)
        if reason == "single_active":
            return get_on_single_active_consumer(subject, "quorum")
        if reason == "deleted":
            return missing(subject)
        return Unavailable(f"{subject} refused: {reason}")


_SILENT = frozenset(
    (
        batch.CMD_ENQUEUE,
        batch.CMD_SETTLE,
        batch.CMD_RETURN,
        batch.CMD_DISCARD,
        batch.CMD_CREDIT,
        batch.CMD_SESSION_CLOSE,
    )
)

#: Commands whose reply says more than whether they were refused.
_TELLING = frozenset((batch.CMD_CHECKOUT, batch.CMD_GET, batch.CMD_PURGE))

#: Commands that a channel waits for.
_ASKING = _TELLING | {batch.CMD_CANCEL}


def _timed_out(doing: str, subject: Subject) -> Unavailable:
    return Unavailable(f"timed out {doing} from quorum {subject}")


def _plain(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Consumer arguments as plain values: what has no plain form becomes its text."""
    if not arguments:
        return {}
    packed = msgspec.msgpack.encode(dict(arguments), enc_hook=str)
    return msgspec.msgpack.decode(packed, type=dict[str, Any])
