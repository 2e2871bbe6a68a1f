# cython: annotation_typing=False
"""One channel's command stream into a classic queue, local or on another node.

Both kinds build the same commands; only the way of the sealed batch and of the answers differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

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
    PendingCommand,
    PublishTarget,
    pack_ranges,
)
from convoymq.model.errors import BrokerError, PreconditionFailed, Unavailable
from convoymq.model.refusals import (
    OLDER_NODES,
    exclusive_consumer,
    get_on_single_active_consumer,
)
from convoymq.queues.classic.credit import ACTIVITY, CREDIT
from convoymq.queues.classic.machine import (
    APPLIED,
    CANCEL_OK,
    CANCELLED,
    DELIVER,
    FLAG_SETTLE_AT_ONCE,
    GOT,
    PURGED,
    SUBSCRIBED,
    WINDOW_DEFAULT,
    Effect,
)
from convoymq.queues.handing_over import publish_again, publish_for_closed
from convoymq.queues.interface import (
    MESSAGE_ID_MAX,
    NO_MODIFICATION,
    ClientEvents,
    ConsumerSpec,
    Delivery,
    GetResult,
    Modification,
    PublishOutcome,
    QueueClient,
)
from convoymq.queues.outcomes import (
    CMD_GRANT,
    CMD_MODIFY,
    FLAG_DRAIN,
    FLAG_FAILED,
    FLAG_REJECTED,
    FLAG_UNDELIVERABLE,
    Annotated,
    annotations_of,
    limit_of,
)

if TYPE_CHECKING:
    from convoymq.queues.classic.queue import ClassicQueue
    from convoymq.queues.interface import Queue


class ClassicClient(QueueClient):
    """The channel's end; hears the machine's effects and tells the channel."""

    def __init__(self, queue: ClassicQueue, session: int, events: ClientEvents) -> None:
        self.queue: ClassicQueue = queue
        self.session = session
        self._target = PublishTarget(queue.builder, session, self)
        self.held_for = queue.known_seqs[0]
        self.closed = False
        self._is_stopped = False
        """The channel was told that the queue cannot keep up."""
        self._events = events
        self._consumers: set[int] = set()
        self._credited: set[int] = set()
        """Consumers with credit."""
        self._annotated = Annotated()
        self._removed: set[int] = set()
        """Consumers that get nothing more, until the queue has applied that."""
        #: (type of command, consumer) of what is to be answered by an effect of its own, in order.
        #: The command counts as applied only later, when the disk has what came with it.
        self._questions: list[tuple[int, int]] = []

    @property
    def target(self) -> PublishTarget:
        """See `QueueClient`."""
        return self._target

    # --- commands ------------------------------------------------------------------------

    def subscribe(self, spec: ConsumerSpec, first: int = 0) -> None:
        """Registers a consumer. `first`: id of its first message."""
        asked = {
            "tag": spec.tag,
            "prefetch": spec.prefetch,
            "no_ack": spec.no_ack,
            "exclusive": spec.exclusive,
            "priority": spec.priority,
            "args": dict(spec.arguments or {}),
            "first": first,
        }
        if spec.credited:
            asked["credited"] = True
            self._credited.add(spec.number)
        body = msgspec.msgpack.encode(asked, enc_hook=str)
        self._expect(CMD_CHECKOUT, spec.number)
        self._target.command(CMD_CHECKOUT, 0, len(body), spec.number, body)

    def _expect(self, kind: int, consumer: int = 0) -> None:
        """Notes a question; its batch waits for no others."""
        self._questions.append((kind, consumer))
        self.queue.is_urgent = True

    def cancel(self, consumer: int) -> None:
        """Ends a consumer."""
        self._expect(CMD_CANCEL, consumer)
        self._target.command(CMD_CANCEL, 0, 0, consumer)

    def remove(self, consumer: int) -> None:
        """See `QueueClient`. Nothing is handed out between the two commands."""
        self.cancel(consumer)
        self._removed.add(consumer)
        self.return_(consumer, (0, MESSAGE_ID_MAX), failed=False)

    def set_credit(self, consumer: int, credit: int) -> None:
        """Replaces the consumer's window."""
        body = msgspec.msgpack.encode({"credit": credit if credit > 0 else WINDOW_DEFAULT})
        self._target.command(CMD_CREDIT, 0, len(body), consumer, body)

    def grant(self, consumer: int, limit: int, *, drain: bool = False) -> None:
        """See `QueueClient`."""
        self._grant(consumer, limit, FLAG_DRAIN if drain else 0)

    def _grant(self, consumer: int, limit: int, flags: int) -> None:
        self.queue.is_urgent = True
        self._target.command(CMD_GRANT, flags, 0, consumer, limit_of(limit))

    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """Acknowledges."""
        self._annotated.forget(consumer, ranges)
        self._target.command(CMD_SETTLE, 0, len(ranges) // 2, consumer, pack_ranges(ranges))

    def return_(
        self,
        consumer: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification = NO_MODIFICATION,
    ) -> None:
        """Requeues to the original position."""
        if consumer not in self._credited or not (failed or modification != NO_MODIFICATION):
            self._annotated.forget(consumer, ranges)
            body = pack_ranges(ranges)
            self._target.command(CMD_RETURN, int(failed), len(ranges) // 2, consumer, body)
            return
        flags = FLAG_FAILED if failed else 0
        flags |= FLAG_UNDELIVERABLE if modification.undeliverable else 0
        self._modify(consumer, ranges, flags, modification.due_ms, modification.annotations)

    def _modify(
        self, consumer: int, ranges: Sequence[int], flags: int, due_ms: int, annotations: bytes
    ) -> None:
        # A home that gives credit knows the command.
        for count, body in self._annotated.commands(consumer, ranges, due_ms, annotations):
            self._target.command(CMD_MODIFY, flags, count, consumer, body)

    def discard(
        self, consumer: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        """Rejects without requeue."""
        said = annotations_of(error) if consumer in self._credited else b""
        if said:
            flags = FLAG_REJECTED | (FLAG_FAILED if failed else 0)
            self._modify(consumer, ranges, flags, 0, said)
            return
        self._annotated.forget(consumer, ranges)
        self._target.command(CMD_DISCARD, 0, len(ranges) // 2, consumer, pack_ranges(ranges))

    def when_settled(self, call: Callable[[bool], None]) -> None:
        """See `QueueClient`. An empty SETTLE follows the others: commands are applied in order."""
        self._target.command(CMD_SETTLE, 0, 0, 0, b"", call)

    def get(self, *, no_ack: bool) -> None:
        """basic.get."""
        if self.queue.limits.single_active:
            self._got_nothing(get_on_single_active_consumer(self.queue.subject, "classic"))
            return
        self._expect(CMD_GET)
        self._target.command(CMD_GET, FLAG_SETTLE_AT_ONCE if no_ack else 0, 0, 0, b"", no_ack)

    def purge(self) -> None:
        """Drops ready messages."""
        self._expect(CMD_PURGE)
        self._target.command(CMD_PURGE, 0, 0, 0)

    def close(self) -> None:
        """The channel is gone."""
        if not self.closed:
            self.closed = True
            self._target.command(CMD_SESSION_CLOSE, 0, 0, 0)
            if not self.queue.known_seqs[0]:
                # Otherwise the successor may get what it has published.
                self.queue.forget(self)

    # --- effects -------------------------------------------------------------------------

    def on_effect(self, effect: Effect) -> None:
        """One effect of the machine for this session."""
        if self.closed:
            return
        kind = effect[0]
        if kind == APPLIED:
            self._on_applied(effect[2], effect[3])
        elif kind == DELIVER:
            if effect[2] in self._removed:
                return
            _, _, consumer, first_id, (block, command), first, count, acquired_count, *said = effect
            failed_count, annotations = said or (0, b"")
            if annotations:
                self._annotated.delivered(consumer, first_id, count, annotations)
            delivery = Delivery(
                consumer, first_id, block, command, first, count, acquired_count, failed_count,
                annotations,
            )  # fmt: skip
            self._events.on_deliver(self, delivery)
        elif kind == GOT:
            self._questions.remove((CMD_GET, 0))
            _, _, place, record, number, acquired_count, ready = effect
            block, command = place or (None, 0)
            result = GetResult(block, command, record, number, acquired_count, 0, ready)
            self._events.on_get(self, result)
        elif kind == SUBSCRIBED:
            self._questions.remove((CMD_CHECKOUT, effect[2]))
            error: BrokerError | None = None
            if effect[3]:
                error = exclusive_consumer(self.queue.subject)
            elif effect[2] in self._credited and len(effect) < 5:
                # It has a window: what it is given meanwhile goes back.
                error = PreconditionFailed(f"{self.queue.subject} gives no credit{OLDER_NODES}")
                self.remove(effect[2])
            if error is None:
                self._consumers.add(effect[2])
            self._events.on_subscribed(self, effect[2], error)
        elif kind == CANCEL_OK:
            self._questions.remove((CMD_CANCEL, effect[2]))
            self._removed.discard(effect[2])
            if effect[2] in self._credited and effect[2] not in self._consumers:
                # The channel heard that it never was.
                self._credited.discard(effect[2])
                return
            self._credited.discard(effect[2])
            self._consumers.discard(effect[2])
            self._events.on_cancel_ok(self, effect[2])
        elif kind == CREDIT:
            if effect[2] not in self._removed:
                self._events.on_credit(self, effect[2], effect[3], effect[4])
        elif kind == ACTIVITY:
            if effect[2] not in self._removed:
                self._events.on_activity(self, effect[2], effect[3])
        elif kind == CANCELLED:
            self._consumers.discard(effect[2])
            self._events.on_cancelled(self, effect[2], effect[3])
        else:
            assert kind == PURGED
            self._questions.remove((CMD_PURGE, 0))
            self._events.on_purged(self, effect[2], None)

    def on_unsafe(self, seq: int) -> None:
        """The disk refused the batch up to `seq`: its publishes are refused."""
        for command in self._target.applied(seq):
            if self.closed:
                continue
            if command.type == CMD_ENQUEUE and command.tags:
                self._events.on_published(self, command.tags, PublishOutcome.REFUSED_UNAVAILABLE)
            elif command.type == CMD_SETTLE and command.note is not None:
                command.note(False)

    def replace(self, successor: Queue, known: int | None) -> None:
        """See `QueueClient`."""
        waiting = self._target.applied(self._target.seq)
        self.queue.forget(self)
        if self.closed:
            session = self.queue.host.new_session()
            publish_for_closed(waiting, known, self.held_for, successor, session)
            return
        other = self._events.on_replaced(self, successor)
        if other is None:
            self.cancel_all("migrated")
            self._answer(waiting, Unavailable("the queue was migrated"), published_ok=False)
            self.closed = True
            return
        self.closed = True
        gets: list[bool] = []
        for command in waiting:
            if command.type == CMD_ENQUEUE:
                if known is not None and command.seq > known:
                    publish_again(command, other.target)
                elif command.tags:
                    self._events.on_published(
                        self, command.tags, PublishOutcome.REFUSED_UNAVAILABLE
                    )
            elif command.type == CMD_SETTLE and command.note is not None:
                command.note(False)
            elif command.type == CMD_GET:
                gets.append(bool(command.note))
        for kind, consumer in self._questions:
            if kind == CMD_CANCEL:
                self._events.on_cancel_ok(self, consumer)
            elif kind == CMD_GET:
                # One that was applied before has lost its answer.
                other.get(no_ack=gets.pop(0) if gets else False)
            elif kind == CMD_PURGE:
                other.purge()

    def on_flow(self, blocked: bool) -> None:
        """The queue cannot keep up, or can again."""
        if not self.closed:
            # A queue that is being migrated is not released by its disk or its link.
            self._is_stopped = blocked or self.queue.known_seqs[0] > 0
            self._events.on_flow(self, self._is_stopped)

    def cancel_all(self, reason: str) -> None:
        """The queue is lost: all consumers end."""
        consumers, self._consumers = self._consumers, set()
        self._removed.clear()
        self._annotated.clear()
        for consumer in sorted(consumers):
            if not self.closed:
                self._events.on_cancelled(self, consumer, reason)

    def end(self, error: BrokerError, *, published_ok: bool) -> None:
        """The queue is gone: everything that waits is answered, and nothing holds the channel. The
        batch must be sealed."""
        self._answer(self._target.applied(self._target.seq), error, published_ok)
        if self._is_stopped and not self.closed:
            self._is_stopped = False
            self._events.on_flow(self, False)

    def fail(self) -> None:
        """An error of our own in what the channel did with an answer: see `begin_again`."""
        self.begin_again(Unavailable("internal error"))

    @property
    def is_waiting(self) -> bool:
        """Returns whether there are consumers, or commands without an answer."""
        return bool(self._consumers or self._target.pending)

    def begin_again(self, error: BrokerError) -> None:
        """All that is pending is refused, consumers end, and the channel goes on in a new
        session."""
        if self.queue.ended is not None:
            # Everything was answered when the queue ended.
            return
        target = self._target
        if not self.closed:
            target.command(CMD_SESSION_CLOSE, 0, 0, 0)
        waiting = target.applied(target.seq)
        self.queue.forget(self)
        if self.closed:
            return
        target.session = self.session = self.queue.host.new_session()
        target.seq = 0
        self.queue.clients[self.session] = self
        self.cancel_all("lost")
        self._answer(waiting, error, published_ok=False)

    def _answer(
        self, waiting: Sequence[PendingCommand], error: BrokerError, published_ok: bool
    ) -> None:
        outcome = PublishOutcome.DELETED if published_ok else PublishOutcome.REFUSED_UNAVAILABLE
        for command in waiting:
            if self.closed:
                continue
            if command.type == CMD_ENQUEUE:
                if command.tags:
                    self._events.on_published(self, command.tags, outcome)
            elif command.type == CMD_SETTLE and command.note is not None:
                command.note(published_ok)
        questions, self._questions = self._questions, []
        for kind, consumer in questions:
            if self.closed:
                return
            if kind == CMD_CHECKOUT:
                self._events.on_subscribed(self, consumer, error)
            elif kind == CMD_CANCEL:
                self._events.on_cancel_ok(self, consumer)
            elif kind == CMD_GET:
                self._got_nothing(error)
            else:
                self._events.on_purged(self, 0, error)

    def _on_applied(self, seq: int, rejected: Sequence[int]) -> None:
        confirmed: list[int] = []
        settled: list[Callable[[bool], None]] = []
        for command in self._target.applied(seq):
            if command.type == CMD_SETTLE and command.note is not None:
                settled.append(command.note)
                continue
            if command.type != CMD_ENQUEUE or not command.tags:
                continue
            if command.seq in rejected:
                self._events.on_published(self, command.tags, PublishOutcome.REFUSED_LENGTH)
            elif confirmed and confirmed[-1] + 1 == command.tags[0]:
                confirmed[-1:] = command.tags[1:]
            else:
                confirmed += command.tags
        if confirmed:
            self._events.on_published(self, confirmed, PublishOutcome.ACCEPTED)
        for call in settled:
            call(True)

    def _got_nothing(self, error: BrokerError) -> None:
        self._events.on_get(self, GetResult(error=error))
