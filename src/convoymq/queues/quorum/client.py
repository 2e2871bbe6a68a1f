"""One channel's command stream into a quorum queue, and what comes back.

Commands, confirms and flow are those of every session (`session_client`). Beyond that the client
knows per consumer which message id comes next, as deliveries too may come twice:

| heard                    | below what is known | next      | beyond                            |
|--------------------------|---------------------|-----------|-----------------------------------|
| DELIVER first message id | dropped or trimmed  | passed on | asked for, unless `since` says no |

Deliveries from the state, not from the log, say since which message id nothing else is checked out:
when that is beyond what is known too, those before it were lost. A question for what is missing is
repeated every second until it is answered.
Without a leader, questions (CHECKOUT, GET, PURGE, CANCEL) have a deadline, and so have consumers
whose owner hears that the queue ended them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from convoymq.kernels import batch
from convoymq.kernels.batch import PendingCommand
from convoymq.model.errors import BrokerError, PreconditionFailed, Subject, Unavailable
from convoymq.model.refusals import (
    OLDER_NODES,
    exclusive_consumer,
    filter_of_single_active,
    get_on_single_active_consumer,
)
from convoymq.queues.interface import (
    GET_EMPTY,
    LINK_TAKEN,
    MESSAGE_ID_MAX,
    NO_LEADER,
    NO_MODIFICATION,
    ClientEvents,
    ConsumerSpec,
    Delivery,
    GetResult,
    Modification,
    QueueClient,
)
from convoymq.queues.outcomes import (
    CMD_GRANT,
    CMD_MODIFY,
    FLAG_DRAIN,
    FLAG_FAILED,
    FLAG_REJECTED,
    FLAG_SUSPEND,
    FLAG_UNDELIVERABLE,
    FLAG_UNTRIED,
    Annotated,
    annotations_of,
    limit_of,
)
from convoymq.queues.quorum.consumers import FILTER_OF_SINGLE_ACTIVE, TAKEN, WINDOW_UNLIMITED
from convoymq.queues.quorum.known_consumer import KnownConsumer
from convoymq.queues.quorum.picking import Picker
from convoymq.queues.reservations import Answer, reservation_refused
from convoymq.queues.session_client import SessionClient
from convoymq.queues.sessions import APPLIED_OK
from convoymq.queues.transactions import CMD_BEGIN, CMD_END, Answered, TransactionRefused

if TYPE_CHECKING:
    from convoymq.queues.quorum.queue import QuorumQueue

#: How long a question for missing deliveries waits for its answer.
ASK_AGAIN_MS = 1000
#: How often a question is repeated whose reply was lost, about once a second.
QUESTIONS_MAX = 5


class QuorumClient(SessionClient):
    """See `QueueClient`."""

    queue: QuorumQueue

    def __init__(self, queue: QuorumQueue, session: int, events: ClientEvents) -> None:
        super().__init__(queue, session, events)
        self._consumers: dict[int, KnownConsumer] = {0: KnownConsumer()}
        self._consumers[0].subscribed = True
        self._annotated = Annotated()
        #: Messages of basic.get by id, one each, until their reply is here.
        self._got: dict[int, Delivery] = {}
        #: Replies of basic.get whose message is not here yet: (message id, ready, no_ack)
        self._gets: list[tuple[int, int, bool]] = []
        self._asked_get = -1
        self._is_asking_get = False
        #: Consumers with an `asked_at`.
        self._asking: set[int] = set()
        #: Added to message ids of basic.get on the way to the channel: a new session counts from 0
        #: again, and what the channel still holds of the old one must not be taken for those.
        self._get_shift = 0
        #: Questions that were passed over without their reply: seq → (command, times asked again)
        self._unanswered: dict[int, tuple[PendingCommand, int]] = {}
        #: When the questions that wait for an answer are given up, in their order.
        self._deadlines: list[int] = []
        #: Questions that were answered without the queue; what it says later is not passed on.
        self._given_up: set[int] = set()

    # --- commands ------------------------------------------------------------------------

    def subscribe(self, spec: ConsumerSpec) -> None:
        """Registers a consumer."""
        if spec.credited and not self.queue.serves_outcomes:
            error = PreconditionFailed(f"{self.queue.subject} gives no credit{OLDER_NODES}")
            self._events.on_subscribed(self, spec.number, error)
            return
        known = KnownConsumer(hears_cancel=spec.hears_cancel, link=spec.link)
        self._consumers[spec.number] = known
        asked = {
            "tag": spec.tag,
            "prefetch": spec.prefetch,
            "no_ack": spec.no_ack,
            "exclusive": spec.exclusive,
            "priority": spec.priority,
            "args": _plain(spec.arguments),
        }
        if spec.credited:
            asked["credited"] = True
        if spec.filters:
            asked["filtered"] = True
            known.picker = Picker(self, spec.number, spec.filters, self._drained)
        if spec.link:
            asked |= {"link": spec.link, "resumes": spec.resumes}
        body = msgspec.msgpack.encode(asked)
        self._question(batch.CMD_CHECKOUT, len(body), spec.number, body, spec.number)

    def cancel(self, consumer: int, flags: int = 0) -> None:
        """Ends a consumer."""
        known = self._consumers.get(consumer)
        if known is not None:
            known.cancelling = True
            known.stop_picking()
        self._question(batch.CMD_CANCEL, 0, consumer, b"", consumer, flags)

    def suspend(self, consumer: int) -> None:
        """See `QueueClient`."""
        self.cancel(consumer, FLAG_SUSPEND)

    def remove(self, consumer: int) -> None:
        """See `QueueClient`. Nothing is handed out between the two commands."""
        self.cancel(consumer)
        known = self._consumers.get(consumer)
        if known is not None:
            known.cancelled = True
        self._return(consumer, (0, MESSAGE_ID_MAX), FLAG_UNTRIED)

    def end_consumer(self, consumer: int) -> None:
        """See `QueueClient`. What the queue hands out before it hears this goes back."""
        self._consumers[consumer].cancelled = True
        self._consumers[consumer].stop_picking()
        self._given_up.add(self.target.command(batch.CMD_CANCEL, 0, 0, consumer))
        self.resume(consumer)

    def set_credit(self, consumer: int, credit: int) -> None:
        """Replaces the consumer's window."""
        body = msgspec.msgpack.encode({"credit": credit if credit > 0 else WINDOW_UNLIMITED})
        self._command(batch.CMD_CREDIT, len(body), consumer, body)

    def grant(self, consumer: int, limit: int, *, drain: bool = False) -> None:
        """See `QueueClient`. The command may be sent again: its limit counts from the start."""
        known = self._consumers.get(consumer)
        if known is None or known.cancelled:
            return
        if known.picker is None or not drain:
            self._grant(consumer, known, limit, FLAG_DRAIN if drain else 0)
        else:
            # `_drained` answers it.
            self.target.command(CMD_GRANT, 0, 0, consumer, limit_of(limit), consumer)
        if known.picker is not None:
            known.picker.grant(limit, drain=drain)

    def _grant(self, consumer: int, known: KnownConsumer, limit: int, flags: int) -> None:
        seq = self.target.command(CMD_GRANT, flags, 0, consumer, limit_of(limit), consumer)
        known.grants.append([seq, -1, 0])

    def _drained(self, consumer: int, limit: int) -> None:
        """All that a consumer with a filter gets by a drain is picked."""
        known = self._consumers.get(consumer)
        if known is not None and not known.cancelled and not self.closed:
            self._grant(consumer, known, limit, FLAG_DRAIN)

    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """Acknowledges."""
        ranges = self._of_session(consumer, ranges)
        self._annotated.forget(consumer, ranges)
        if ranges:
            self._settle(consumer, ranges)

    def _settle(self, consumer: int, ranges: Sequence[int]) -> None:
        self._command(batch.CMD_SETTLE, len(ranges) // 2, consumer, batch.pack_ranges(ranges))

    def return_(
        self,
        consumer: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification = NO_MODIFICATION,
    ) -> None:
        """Requeues."""
        ranges = self._of_session(consumer, ranges)
        if not ranges:
            return
        flags = (FLAG_FAILED if failed else 0) | (FLAG_UNTRIED if untried else 0)
        if modification == NO_MODIFICATION:
            self._annotated.forget(consumer, ranges)
            self._return(consumer, ranges, flags)
        elif self.queue.serves_outcomes:
            flags |= FLAG_UNDELIVERABLE if modification.undeliverable else 0
            said = (modification.due_ms, modification.annotations)
            for count, body in self._annotated.commands(consumer, ranges, *said):
                self._target.command(CMD_MODIFY, flags, count, consumer, body)
        elif modification.undeliverable:
            # As RabbitMQ does: nodes of older releases know of no other way.
            self.discard(consumer, ranges)
        else:
            self._return(consumer, ranges, flags)

    def _return(self, consumer: int, ranges: Sequence[int], flags: int) -> None:
        body = batch.pack_ranges(ranges)
        self.target.command(batch.CMD_RETURN, flags, len(ranges) // 2, consumer, body)

    def discard(
        self, consumer: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        """Rejects without requeue."""
        ranges = self._of_session(consumer, ranges)
        if not ranges:
            return
        if error and self.queue.serves_outcomes:
            said = annotations_of(error)
            flags = FLAG_REJECTED | (FLAG_FAILED if failed else 0)
            for count, body in self._annotated.commands(consumer, ranges, 0, said):
                self._target.command(CMD_MODIFY, flags, count, consumer, body)
        else:
            self._annotated.forget(consumer, ranges)
            body = batch.pack_ranges(ranges)
            self._command(batch.CMD_DISCARD, len(ranges) // 2, consumer, body)

    def _of_session(self, consumer: int, ranges: Sequence[int]) -> Sequence[int]:
        """Returns the machine's message ids without those of sessions that are over: these messages
        are back in the queue."""
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

    def transact(
        self, work: Callable[[], None], end: Mapping[str, object], answer: Answered
    ) -> None:
        """See `QueueClient`."""
        self.target.command(CMD_BEGIN, 0, 0, 0)
        work()
        body = msgspec.msgpack.encode(end)
        self.target.command(CMD_END, 0, len(body), 0, body, answer)

    def purge(self) -> None:
        """Drops ready messages."""
        self._question(batch.CMD_PURGE, 0, 0)

    def reservation(
        self, op: bytes, answer: Callable[[Answer | None, BrokerError | None], None]
    ) -> None:
        """Asks one op of a reservation (`queues.reservations`, msgpack); `answer` gets its reply or
        an error, once, unless the client is closed."""
        self._question(batch.CMD_RESERVATION, len(op), 0, op, answer)

    def close(self) -> None:
        """The channel is gone; the client stays until the queue has heard it."""
        self._got.clear()
        self._gets.clear()
        self._asking.clear()
        self._stop_picking()
        super().close()

    def _stop_picking(self) -> None:
        for known in self._consumers.values():
            known.stop_picking()

    def _question(
        self,
        type: int,
        count: int,
        consumer: int,
        body: bytes = b"",
        note: object = None,
        flags: int = 0,
    ) -> None:
        timeout_ms = self.queue.limits.operation_timeout_ms
        self._deadlines.append(self.queue.clock.monotonic_ms() + timeout_ms)
        self.target.command(type, flags, count, consumer, body, note)

    # --- what the machine says -----------------------------------------------------------

    def _answered(self, command: PendingCommand, seq: int, status: int, reply: object) -> None:
        if command.seq == seq and self._is_reply(command, status, reply):
            self._answer(command, status, reply)
        elif command.type in _TELLING:
            self._ask_again(command, 0)
        else:
            self._answer(command, APPLIED_OK, None)

    def _heard_again(self, seq: int, status: int, reply: object) -> None:
        if seq in self._unanswered and self._is_reply(self._unanswered[seq][0], status, reply):
            self._answer_late(seq, status, reply)

    def _is_reply(self, command: PendingCommand, status: int, reply: object) -> bool:
        """False for a mere "applied" where the command asked for content."""
        asked = command.type in (batch.CMD_GET, batch.CMD_RESERVATION, CMD_GRANT, CMD_END)
        if command.type == batch.CMD_CHECKOUT:
            known = self._consumers.get(command.note)
            asked = known is not None and known.link != b""
        return not asked or status != APPLIED_OK or reply is not None

    def is_waiting(self) -> bool:
        """Returns whether something is expected from the queue."""
        return bool(self._target.pending or self._unanswered or self._gets or self._asking)

    def _ask_again(self, command: PendingCommand, tries: int) -> None:
        """The reply was lost on the way; a repeated question gets it from the session's record."""
        self._unanswered[command.seq] = (command, tries)
        data = command.chunk.data
        if data is not None:
            end = command.offset + command.length
            self._target.builder.adopt(data, command.offset, end)

    def _answer_late(self, seq: int, status: int, reply: object) -> None:
        command, _ = self._unanswered.pop(seq, (None, 0))
        if command is not None and not self.closed:
            self._answer(command, status, reply)

    def wait_longer(self, now_ms: int) -> None:
        """See `SessionClient`."""
        super().wait_longer(now_ms)
        due_ms = now_ms + self.queue.limits.operation_timeout_ms
        self._deadlines = [due_ms] * len(self._deadlines)

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

    def on_replica_gone(self) -> None:
        """See `SessionClient`. What a consumer dropped while it was paused may have come again from
        a replica that was behind, so that even the newest deliveries can be missing."""
        for number, consumer in list(self._consumers.items()):
            if number and consumer.subscribed and not consumer.paused and not self.closed:
                self._ask(number, consumer)

    def _answer(self, command: PendingCommand, status: int, reply: Any) -> None:
        """Tells the channel what became of one command that it asked about."""
        if command.seq in self._given_up:
            self._given_up.discard(command.seq)
            return
        kind = command.type
        if kind == batch.CMD_RESERVATION:
            self._deadlines.pop(0)
            command.note(reply, self._reservation_error(status, reply))
            return
        if kind == CMD_GRANT:
            self._granted(command, reply)
            return
        if kind == CMD_END:
            command.note(self._end_error(status, reply))
            return
        error = None if status == APPLIED_OK else self._refusal(reply)
        if kind == batch.CMD_CHECKOUT:
            number: int = command.note
            self._deadlines.pop(0)
            if error is not None:
                self._consumers.pop(number, None)
                self._events.on_subscribed(self, number, error)
                return
            consumer = self._consumers[number]
            consumer.subscribed = True
            if isinstance(reply, list):
                next_id, *held = reply
                consumer.next_id = next_id
                if consumer.picker is not None:
                    consumer.picker.start(next_id)
                self._events.on_resumed(self, number, next_id, held)
            elif consumer.link:
                # What it holds is not known: it goes back.
                self.remove(number)
                error = Unavailable("the queue's answer was lost")
            self._events.on_subscribed(self, number, error)
            if consumer.asked:
                consumer.asked = False
                self._ask(number, consumer)
        elif kind == batch.CMD_CANCEL:
            known = self._consumers.get(command.note)
            if known is not None:
                known.cancelled = True
                # What was dropped meanwhile goes back.
                self.resume(command.note)
            self._deadlines.pop(0)
            self._events.on_cancel_ok(self, command.note)
        elif kind == batch.CMD_PURGE:
            self._deadlines.pop(0)
            self._events.on_purged(self, reply if isinstance(reply, int) else 0, error)
        elif kind == batch.CMD_GET:
            if error is not None:
                self._deadlines.pop(0)
                self._events.on_get(self, GetResult(error=error))
            elif reply:
                message_id, ready = reply
                self._gets.append((message_id, ready, bool(command.note)))
            else:
                self._gets.append((-1, 0, False))
            self._answer_gets(final=False)

    def _granted(self, command: PendingCommand, reply: object) -> None:
        """The queue has answered a GRANT; with None, when its answer was lost for good."""
        known = self._consumers.get(command.note)
        if known is None:
            return
        for grant in known.grants:
            if grant[0] == command.seq:
                grant[1:] = reply if isinstance(reply, list) else (known.next_id, 0)
        self._answer_grants(command.note, known)

    def _answer_grants(self, consumer: int, known: KnownConsumer) -> None:
        """Answers calls of `grant` in their order, as far as what was handed out is here."""
        grants = known.grants
        while grants and 0 <= grants[0][1] <= known.next_id and not known.cancelled:
            _, granted, ready = grants.pop(0)
            self._events.on_credit(self, consumer, granted, ready)
        missing = bool(grants) and grants[0][1] > known.next_id and not known.cancelled
        if missing and not known.paused and known.asked_at != known.next_id:
            self._ask(consumer, known)

    def on_activity(self, consumer: int, said: int) -> None:
        """The queue says whether it is the single active one, or that its link is another's."""
        known = self._consumers.get(consumer)
        if known is None or known.cancelled or self.closed:
            return
        if said == TAKEN:
            known.cancelled = True
            known.stop_picking()
            self._events.on_cancelled(self, consumer, LINK_TAKEN)
        elif known.active is not bool(said):
            known.active = bool(said)
            self._events.on_activity(self, consumer, known.active)

    def _answer_gets(self, *, final: bool) -> None:
        """Answers calls of `get` in their order, as far as their messages are here."""
        while self._gets and not self.closed:
            message_id, ready, no_ack = self._gets[0]
            if message_id < 0:
                self._gets.pop(0)
                self._deadlines.pop(0)
                self._events.on_get(self, GET_EMPTY)
                continue
            found = self._got.pop(message_id, None)
            if found is None:
                if not final or message_id != self._asked_get:
                    self._asked_get = message_id
                    # Answered from here, this comes back before it returns.
                    self._is_asking_get = True
                    self._ask(0, self._consumers[0], message_id)
                    self._is_asking_get = False
                    return
                # The queue took it back meanwhile: for this client the call found nothing.
                self._gets.pop(0)
                self._deadlines.pop(0)
                self._events.on_get(self, GET_EMPTY)
                continue
            self._gets.pop(0)
            self._deadlines.pop(0)
            if no_ack:
                self._settle(0, (message_id, message_id))
            get_id = message_id + self._get_shift
            if self.queue.trace is not None:
                self.queue.trace.sent(self.session, *found[:8])
            _, _, block, command, record, _, acquired_count, failed, _ = found
            result = GetResult(block, command, record, get_id, acquired_count, failed, ready)
            self._events.on_get(self, result)

    def _check_questions(self, now_ms: int) -> None:
        for number in list(self._asking):
            known = self._consumers.get(number)
            if known is None or known.paused:
                self._asking.discard(number)
            elif now_ms - known.asked_ms >= ASK_AGAIN_MS:
                self._ask(number, known)
        if self._deadlines and self._deadlines[0] <= now_ms:
            self._give_up_questions()

    def _give_up_questions(self) -> None:
        """Answers all questions at once: their channel closes with the first one's error."""
        subject = self.queue.subject
        self._deadlines.clear()
        waiting = [c for c, _ in self._unanswered.values() if c.type in _ASKING]
        waiting += [command for command in self._target.pending if command.type in _ASKING]
        self._unanswered.clear()
        gets = len(self._gets)
        self._gets.clear()
        waiting = [command for command in waiting if command.seq not in self._given_up]
        self._given_up.update(command.seq for command in waiting if command.seq > self.applied)
        for _ in range(gets):
            error = _timed_out("getting a message", subject)
            self._events.on_get(self, GetResult(error=error))
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
                    self.resume(command.note)
                self._events.on_cancel_ok(self, command.note)
            elif command.type == batch.CMD_GET:
                error = _timed_out("getting a message", subject)
                self._events.on_get(self, GetResult(error=error))
            elif command.type == batch.CMD_RESERVATION:
                command.note(None, _timed_out("reserving messages", subject))
            else:
                self._events.on_purged(self, 0, _timed_out("purging", subject))

    def on_leaderless(self, since_ms: int, now_ms: int) -> None:
        """See `SessionClient`; and cancels consumers that hear of it. When there is a leader again
        the queue hears it from here; what it hands out before that goes back."""
        super().on_leaderless(since_ms, now_ms)
        timeout_ms = self.queue.limits.leaderless_consumer_timeout_ms
        if not timeout_ms or now_ms - since_ms < timeout_ms:
            return
        for number, known in list(self._consumers.items()):
            ended = known.cancelled or known.cancelling or not known.subscribed
            if ended or not known.hears_cancel or self.closed:
                continue
            self.end_consumer(number)
            self._events.on_cancelled(self, number, NO_LEADER)

    def _ask_elsewhere(
        self, waiting: Sequence[PendingCommand], other: QueueClient, error: BrokerError
    ) -> None:
        """See `SessionClient`. Consumers are subscribed by their owner."""
        asked = [c for c, _ in self._unanswered.values() if c.type in _ASKING]
        asked += [command for command in waiting if command.type in _ASKING]
        for _, _, no_ack in self._gets:
            other.get(no_ack=no_ack)
        for command in asked:
            if command.seq in self._given_up:
                continue
            if command.type == batch.CMD_GET:
                other.get(no_ack=bool(command.note))
            elif command.type == batch.CMD_PURGE:
                other.purge()
            elif command.type == batch.CMD_CANCEL:
                self._events.on_cancel_ok(self, command.note)
            elif command.type == batch.CMD_RESERVATION:
                command.note(None, error)
        ends = [c for c, _ in self._unanswered.values() if c.type == CMD_END]
        for command in [*ends, *(c for c in waiting if c.type == CMD_END)]:
            command.note(error)

    def _renew(self) -> None:
        self._get_shift += self._consumers[0].next_id
        super()._renew()

    def on_deliver(self, delivery: Delivery, since: int) -> None:
        """Messages are checked out to a consumer; see the module's table. `since`: nothing else is,
        from that message id on; -1: they come from the log, which does not say."""
        if self.closed:
            return
        consumer, first_id, _, _, _, count, *_ = delivery
        known = self._consumers.get(consumer)
        if known is None:
            return
        if consumer == 0:
            self._take_got(delivery, known)
            return
        if known.paused:
            # Still checked out: `resume` asks for it.
            return
        if not known.subscribed:
            # Its reply was lost, and comes again: deliveries before it would surprise the channel.
            known.asked = True
            return
        expected = known.next_id
        end = first_id + count
        if first_id != expected:
            if end <= expected:
                return
            if first_id < expected:
                delivery = delivery.without(expected - first_id)
                first_id = expected
            elif since < 0 or since > expected:
                if known.asked_at == expected:
                    # An answer from the state comes behind what the state said before.
                    known.missed |= since < 0
                else:
                    self._ask(consumer, known)
                return
        known.next_id = end
        if known.cancelled:
            self._return(consumer, (first_id, end - 1), FLAG_UNTRIED)
            return
        if delivery.annotations:
            self._annotated.delivered(
                consumer, delivery.first_id, delivery.messages, delivery.annotations
            )
        self._events.on_deliver(self, delivery)
        if known.grants:
            self._answer_grants(consumer, known)

    def _take_got(self, delivery: Delivery, known: KnownConsumer) -> None:
        """Messages of basic.get are here; their reply may be, too."""
        first_id = delivery.first_id
        for k in range(delivery.messages):
            if first_id + k >= known.next_id or any(g[0] == first_id + k for g in self._gets):
                self._got[first_id + k] = delivery.without(k).upto(1)
        known.next_id = max(known.next_id, first_id + delivery.messages)
        if self._gets and not self._is_asking_get:
            self._answer_gets(final=False)

    def _ask(self, number: int, consumer: KnownConsumer, from_id: int = -1) -> None:
        """Asks for what is checked out from the next id on."""
        if number:
            consumer.asked_at = consumer.next_id
            consumer.asked_ms = self.queue.clock.monotonic_ms()
            consumer.missed = False
            self._asking.add(number)
        self.queue.ask(self, number, consumer.next_id if from_id < 0 else from_id)

    def on_asked(self, consumer: int, from_id: int, *, complete: bool = False) -> None:
        """Takes note that what came from a message id on is all for now. Unless it is `complete` it
        may be a part: then the rest is asked for."""
        if consumer == 0:
            # Others are answers about messages before it.
            if from_id == self._asked_get:
                self._answer_gets(final=True)
            return
        known = self._consumers.get(consumer)
        if known is None or known.asked_at != from_id or self.closed:
            return
        known.asked_at = -1
        self._asking.discard(consumer)
        if not complete and (known.missed or from_id < known.next_id) and not known.paused:
            self._ask(consumer, known)

    def on_position(self, consumer: int, end: int, next_id: int) -> None:
        """The leader has sent all that the consumer holds, up to message id `end`; what else there
        was below `next_id` it does not hold any more. A replica that is behind may still say so."""
        known = self._consumers.get(consumer)
        if not consumer or known is None or self.closed:
            return
        if end <= known.next_id:
            known.next_id = max(known.next_id, next_id)
            if known.grants:
                self._answer_grants(consumer, known)
        elif known.subscribed and not known.paused and known.asked_at != known.next_id:
            self._ask(consumer, known)

    def is_paused(self, consumer: int) -> bool:
        """Returns whether deliveries to the consumer are dropped for now."""
        known = self._consumers.get(consumer)
        return known is None or known.paused

    def pause(self, consumer: int) -> None:
        """Drops deliveries to the consumer: the log and the state keep them."""
        known = self._consumers.get(consumer)
        if known is not None:
            known.paused = True
            # Nothing of the answer will be taken.
            known.asked_at = -1
            self._asking.discard(consumer)

    def resume(self, consumer: int) -> None:
        """Asks for what was dropped."""
        known = self._consumers.get(consumer)
        if known is not None and known.paused:
            known.paused = False
            if not self.closed:
                self._ask(consumer, known)

    # --- the end -------------------------------------------------------------------------

    def _events_end(self, error: BrokerError, *, published_ok: bool, renew: bool = False) -> None:
        """Answers all that is pending and cancels all consumers."""
        waiting = self._take_pending()
        consumers = [n for n, known in self._consumers.items() if known.subscribed and n]
        cancelled = [n for n in consumers if not self._consumers[n].cancelled]
        if renew:
            self._renew()
        self._stop_picking()
        self._consumers = {0: KnownConsumer()}
        self._consumers[0].subscribed = True
        self._annotated.clear()
        self._asked_get = -1
        self._asking.clear()
        gets, self._gets = self._gets, []
        unanswered = [command for command, _ in self._unanswered.values()]
        given_up, self._given_up = self._given_up, set()
        self._unanswered.clear()
        self._deadlines.clear()
        self._got.clear()
        if self.closed:
            return
        if self.queue.trace is not None and published_ok:
            self.queue.trace.confirms(self.session, waiting, deleted=True)
        for _ in gets:
            self._events.on_get(self, GetResult(error=error))
        for command in [*unanswered, *waiting]:
            if command.seq in given_up:
                continue
            self._end_publishes(command, error, published_ok)
            if command.type == batch.CMD_CHECKOUT:
                self._events.on_subscribed(self, command.note, error)
            elif command.type == batch.CMD_CANCEL:
                self._events.on_cancel_ok(self, command.note)
                if command.note in cancelled:
                    cancelled.remove(command.note)
            elif command.type == batch.CMD_GET:
                self._events.on_get(self, GetResult(error=error))
            elif command.type == batch.CMD_PURGE:
                self._events.on_purged(self, 0, error)
            elif command.type == batch.CMD_RESERVATION:
                command.note(None, error)
            elif command.type == CMD_END:
                command.note(error)
        for number in cancelled:
            self._events.on_cancelled(self, number, "deleted" if published_ok else "lost")
        if self.blocked:
            self.check_flow()

    def _reservation_error(self, status: int, reply: object) -> BrokerError | None:
        if status != APPLIED_OK:
            return reservation_refused(str(reply), self.queue.subject)
        if reply is None:
            return Unavailable("the queue's answer was lost")
        return None

    def _end_error(self, status: int, reply: object) -> BrokerError | None:
        if status != APPLIED_OK:
            if reply == "deleted":
                return self._refusal(reply)
            return TransactionRefused(str(reply), self.queue.subject)
        if reply is None:
            return Unavailable("the queue's answer was lost")
        return None

    def _refusal(self, reason: object) -> BrokerError:
        if reason == "exclusive":
            return exclusive_consumer(self.queue.subject)
        if reason == FILTER_OF_SINGLE_ACTIVE:
            return filter_of_single_active(self.queue.subject)
        if reason == "single_active":
            return get_on_single_active_consumer(self.queue.subject, "quorum")
        return super()._refusal(reason)


#: Commands whose reply says more than whether they were refused.
_TELLING = frozenset(
    (batch.CMD_CHECKOUT, batch.CMD_GET, batch.CMD_PURGE, batch.CMD_RESERVATION, CMD_GRANT, CMD_END)
)

#: Commands that a channel waits for.
_ASKING = (_TELLING - {CMD_GRANT, CMD_END}) | {batch.CMD_CANCEL}


def _timed_out(doing: str, subject: Subject) -> Unavailable:
    return Unavailable(f"timed out {doing} from quorum {subject}")


def _plain(arguments: Mapping[str, object] | None) -> dict[str, object]:
    """Consumer arguments as plain values: what has no plain form becomes its text."""
    if not arguments:
        return {}
    packed = msgspec.msgpack.encode(dict(arguments), enc_hook=str)
    return msgspec.msgpack.decode(packed, type=dict[str, object])
