# cython: annotation_typing=False
"""One channel's command stream into a queue that is a Raft group: what is pending, when it is sent
again, what is confirmed, and when the channel has to wait.

The client numbers nothing itself: `PublishTarget` numbers commands and keeps the pending ones. The
first is OPEN, which goes out when another command is about to. What the client knows is how far
they were applied. So it may hear everything twice, from its own replica and from a leader, and
passes each thing on once:

| heard       | below what is known    | next      | beyond                            |
|-------------|------------------------|-----------|-----------------------------------|
| APPLIED seq | dropped                | passed on | passed on (it answers all before) |
| GAP last    | is it over? (below)    | resends   |                                   |

A GAP below what was applied is either a late report or means that the queue ended the session (its
node was given up). Only when it is still so a second later does the client start anew.

Publishes that wait for an answer while nobody leads the queue are refused after a while, and
withdrawn as far as they can be. While somebody leads it, they wait for as long as it takes once the
queue has answered this session; before, they are refused after a longer while.

An ENQUEUE or SETTLE whose note is a callable is answered to that instead of to the channel:
`note(duplicates, error)`, once: how many of its records were repeats of a producer (0 as well when
that answer was lost), or why nobody knows whether it is in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from convoymq.kernels import batch
from convoymq.kernels.batch import PendingCommand, PublishTarget
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.model.refusals import missing
from convoymq.queues.handing_over import publish_again, publish_for_closed
from convoymq.queues.interface import ClientEvents, PublishOutcome, Queue, QueueClient
from convoymq.queues.link_claims import FENCED
from convoymq.queues.sessions import APPLIED_OK
from convoymq.queues.transactions import CMD_BEGIN, outside_transactions
from convoymq.queues.withdrawal import withdraw

if TYPE_CHECKING:
    from convoymq.queues.group_queue import GroupQueue

#: The least time between two resends of the same commands.
RESEND_PAUSE_MS = 100
#: How long the queue must not know a session that it knew before the client gives the session up.
OVER_AFTER_MS = 1000
#: The same for a session that was never heard of: its first command may just be late.
OVER_UNHEARD_MS = 10_000
#: Of more than this the queue is asked first whether it was lost.
RESEND_BYTES_SOFT = 64 << 10

#: Commands whose answer nobody waits for, unless it is the confirm of publishes.
SILENT = frozenset((
    batch.CMD_ENQUEUE, batch.CMD_SETTLE, batch.CMD_RETURN, batch.CMD_DISCARD, batch.CMD_CREDIT,
    batch.CMD_SESSION_OPEN, batch.CMD_SESSION_CLOSE, batch.CMD_PRODUCER, batch.CMD_STORE_OFFSET,
    CMD_BEGIN,
))  # fmt: skip


class SessionClient(QueueClient):
    """See the module text; types of queues derive their clients from it."""

    queue: GroupQueue

    def __init__(self, queue: GroupQueue, session: int, events: ClientEvents) -> None:
        self.queue = queue
        self.session = session
        self._target = PublishTarget(queue.builder, session, self)
        self._target.pending_messages_max = queue.limits.publish_pending_messages
        self._target.pending_bytes_max = queue.limits.pending_bytes_max
        self._target.pending_commands_max = queue.limits.publish_pending_commands
        self._budget = self._target.budget = queue.budget
        #: The session's opening number; 0 = no command was sent.
        self.opening = 0
        self.held_for = queue.known_seqs[0]
        self.closed = False
        self.blocked = False
        #: Highest seq known to be applied.
        self.applied = 0
        self._events = events
        self._resent_ms = -RESEND_PAUSE_MS
        self._resent_after = -1
        self._gap_again = False
        self._over_since_ms = -1
        self.progress_ms = 0
        #: When the queue last answered, or nothing was expected of it; also when publishes were
        #: refused for it.
        self.answered_ms = queue.clock.monotonic_ms()
        #: How often `GroupQueue.tick` has resent without an answer.
        self.silences = 0
        #: Since when something is expected of the queue; kept by `GroupQueue.tick`.
        self.waiting_since_ms = queue.clock.monotonic_ms()

    # --- for the types -------------------------------------------------------------------

    def _answered(self, command: PendingCommand, seq: int, status: int, reply: object) -> None:
        """A command that somebody waits for is applied; `status` and `reply` are those of `seq`."""

    def _heard_again(self, seq: int, status: int, reply: object) -> None:
        """An answer about a command that was passed over."""

    def _check_questions(self, now_ms: int) -> None:
        """Called every `TICK_MS`."""

    def wait_longer(self, now_ms: int) -> None:
        """Called every `TICK_MS` while the queue is being migrated: nothing is late."""
        self.waiting_since_ms = self.progress_ms = self.answered_ms = now_ms

    def on_activity(self, consumer: int, said: int) -> None:
        """A consumer begins to be served, or is served no more; of types that say so."""

    def on_silence(self) -> None:
        """Called about once a second while something is expected: asks again."""

    def on_replica_gone(self) -> None:
        """Asks for what this node's replica, which applies no more, may have left out."""

    # --- commands ------------------------------------------------------------------------

    def close(self) -> None:
        """The channel is gone; the client stays until the queue has heard it."""
        if self.closed:
            return
        self.closed = True
        self._budget.waiting.discard(self)
        if self.opening:
            self._number(batch.CMD_SESSION_CLOSE)
        else:
            self.queue.forget(self)

    def _command(
        self, type: int, count: int, consumer: int, body: bytes = b"", note: object = None
    ) -> None:
        self.target.command(type, 0, count, consumer, body, note)

    @property
    def target(self) -> PublishTarget:
        """See `QueueClient`; whoever asks is about to send something."""
        if not self.opening:
            self._open()
        return self._target

    def start_session(self, session: int) -> None:
        """Goes on in another session, which is open at once: publishers hold the target."""
        self.session = self._target.session = session
        self._target.seq = 0
        self._open()

    def _open(self) -> None:
        """OPEN, the first command of a session."""
        self.opening = self.queue.next_opening()
        self._number(batch.CMD_SESSION_OPEN)

    def _number(self, type: int) -> None:
        """OPEN or CLOSE."""
        self._target.command(type, 0, self.opening & 0xFFFFFFFF, self.opening >> 32)

    def when_settled(self, call: Callable[[bool], None]) -> None:
        """See `QueueClient`. An empty SETTLE follows the others: commands are applied in order."""

        def note(_duplicates: int, error: BrokerError | None) -> None:
            call(error is None)

        self._command(batch.CMD_SETTLE, 0, 0, b"", note)

    # --- what the machine says -----------------------------------------------------------

    def on_applied(self, seq: int, status: int, reply: object) -> None:
        """Commands up to `seq` are applied; `status` and `reply` belong to `seq` itself."""
        if seq <= self.applied:
            self._heard_again(seq, status, reply)
            return
        self.applied = seq
        self.progress_ms = self.answered_ms = self.queue.clock.monotonic_ms()
        self.silences = 0
        self._over_since_ms = -1
        confirmed: list[int] | None = None
        done = self._target.applied(seq)
        if self.queue.trace is not None and not self.closed:
            self._trace_confirms(done)
        for command in done:
            tags = command.tags
            if tags:
                # A deleted queue refuses, too: its publishes are confirmed.
                if status != APPLIED_OK and reply == FENCED and command.seq == seq:
                    taken = PublishOutcome.REFUSED_TAKEN
                    self._events.on_published(self, tags, taken)
                elif confirmed is None:
                    confirmed = list(tags)
                elif confirmed[-1] + 1 == tags[0]:
                    confirmed[-1:] = tags[1:]
                else:
                    confirmed += tags
            elif self.closed:
                continue
            elif command.type not in SILENT:
                self._answered(command, seq, status, reply)
            elif command.note is not None:
                self._produced(command, seq, status, reply)
        if confirmed is not None and not self.closed:
            self._events.on_published(self, confirmed, PublishOutcome.ACCEPTED)
        if self._gap_again:
            self._gap_again = False
            if self._target.pending:
                self.resend(seq, now=True)
        waiting = self._budget.waiting
        if self.blocked:
            self.check_flow()
        if waiting and self._budget.bytes * 2 <= self._budget.bytes_max:
            for client in list(waiting):
                client.check_flow()
        if self.closed and not self._target.pending and seq >= self._target.seq:
            self.queue.forget(self)

    def _produced(self, command: PendingCommand, seq: int, status: int, reply: object) -> None:
        """An ENQUEUE or SETTLE with an owner of its own is applied."""
        error: BrokerError | None = None
        duplicates = 0
        if command.seq == seq:
            if status != APPLIED_OK:
                error = self._refusal(reply)
            elif isinstance(reply, int):
                duplicates = reply
        command.note(duplicates, error)

    def is_waiting(self) -> bool:
        """Returns whether something is expected from the queue."""
        return bool(self._target.pending)

    def on_leaderless(self, since_ms: int, now_ms: int) -> None:
        """Called every `TICK_MS` while nobody leads the queue, since then: refuses publishes whose
        time is over."""
        timeout_ms = self.queue.limits.leaderless_publish_timeout_ms
        # A leader that was known a moment ago may be known again in the next.
        waited_ms = now_ms - max(since_ms, self.answered_ms)
        if not timeout_ms or waited_ms < timeout_ms or self.closed:
            return
        self.answered_ms = now_ms
        refused = [
            command
            for command in self._target.pending
            if command.tags and command.chunk.data is not None
        ]
        if not refused:
            return
        tags = [tag for command in refused for tag in command.tags or ()]
        for command in refused:
            command.tags = None
        withdraw(self._target, refused)
        self._events.on_published(self, tags, PublishOutcome.REFUSED_UNAVAILABLE)
        if self.blocked:
            self.check_flow()

    def check_deadlines(self, now_ms: int) -> None:
        """Called every `TICK_MS`: gives up what the queue should have answered by now."""
        if self.closed:
            return
        self._check_questions(now_ms)
        timeout_ms = self.queue.limits.publish_register_timeout_ms
        if self.applied or now_ms - self.waiting_since_ms < timeout_ms:
            return
        self.waiting_since_ms = now_ms
        if not self.closed:
            self._refuse_publishes()

    def _refuse_publishes(self) -> None:
        """The queue has never answered this session: nobody knows whether it ever will."""
        refused: list[int] = []
        for command in self._target.pending:
            if command.tags:
                refused += command.tags
                # Refused is final: if they get into the queue after all, nobody hears it.
                command.tags = None
            elif command.type in SILENT and command.note is not None:
                note, command.note = command.note, None
                note(0, Unavailable(f"{self.queue.subject} did not answer"))
        if refused:
            self._events.on_published(self, refused, PublishOutcome.REFUSED_UNAVAILABLE)

    def on_gap(self, last: int) -> None:
        """The queue has seen commands up to `last` only, and at least one beyond it."""
        pending = self._target.pending
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
        self._target.resend(after)

    def ask_for_lost(self) -> None:
        """After silence: sends a little again. Of more, nothing but a question: a queue that is
        only slow must not get it all twice, and one that lacks something answers with a GAP."""
        if self.closed or self._target.pending_bytes <= RESEND_BYTES_SOFT:
            self.resend(now=True)
        else:
            self._target.command(batch.CMD_SETTLE, 0, 0, 0)

    def _start_anew(self) -> None:
        """The queue ended this session: what was pending is not known to be safe, consumers are
        gone; later commands go in a new session."""
        if self.closed:
            self.queue.forget(self)
            return
        error = Unavailable("the queue ended this channel's session")
        self._events_end(error, published_ok=False, renew=True)

    def _renew(self) -> None:
        self.queue.renew(self)
        self.applied = 0
        self._gap_again = False
        self._resent_after = -1
        self._over_since_ms = -1
        self.waiting_since_ms = self.queue.clock.monotonic_ms()

    def _trace_confirms(self, done: Sequence[PendingCommand], *, deleted: bool = False) -> None:
        """Records that publishes are about to be confirmed; the queue is traced."""
        if self.queue.trace is not None:
            self.queue.trace.confirms(self.session, done, deleted=deleted)

    # --- flow and end --------------------------------------------------------------------

    def check_flow(self) -> None:
        """Stops the channel above the bounds of what may be pending, and lets it go on at half."""
        target = self._target
        divisor = 2 if self.blocked else 1
        limits = self.queue.limits
        beyond = (
            target.pending_messages * divisor > limits.publish_pending_messages
            or target.pending_bytes * divisor > limits.pending_bytes_max
            or len(target.pending) * divisor > limits.publish_pending_commands
            or self._budget.bytes * divisor > self._budget.bytes_max
        )
        if beyond != self.blocked and not self.closed:
            self.blocked = beyond
            if beyond:
                self._budget.waiting.add(self)
            else:
                self._budget.waiting.discard(self)
            self._events.on_flow(self, beyond)

    def replace(self, successor: Queue, known: int | None) -> None:
        """See `QueueClient`."""
        if self.closed:
            self.queue.forget(self)
            left = outside_transactions(self._target.applied(self._target.seq))
            session = self.queue.new_session()
            publish_for_closed(left, known, self.held_for, successor, session)
            return
        if known is not None and known > self.applied:
            self.on_applied(known, APPLIED_OK, None)
        error = Unavailable("the queue was migrated")
        other = self._events.on_replaced(self, successor)
        if other is None:
            self._events_end(error, published_ok=False)
        self.closed = True
        self._budget.waiting.discard(self)
        self.queue.forget(self)
        if other is None:
            return
        waiting = self._target.applied(self._target.seq)
        for command in outside_transactions(waiting):
            publishes = command.type == batch.CMD_ENQUEUE and command.note is None
            if publishes and known is not None:
                publish_again(command, other.target)
            elif command.type in SILENT:
                self._end_publishes(command, error, False)
        self._ask_elsewhere(waiting, other, error)

    def _ask_elsewhere(
        self, waiting: Sequence[PendingCommand], other: QueueClient, error: BrokerError
    ) -> None:
        """Asks another queue's client what is not answered, or gives it up."""

    def on_deleted(self) -> None:
        """The queue is gone: everything that waits is answered, publishes as safe."""
        self._events_end(missing(self.queue.subject), published_ok=True)

    def fail(self) -> None:
        """An error of our own in what this client or its channel did with an answer: all that is
        pending is refused, its consumers end, and it goes on in a new session."""
        if self.opening:
            self._number(batch.CMD_SESSION_CLOSE)
        if self.closed:
            self.queue.forget(self)
        else:
            self._events_end(Unavailable("internal error"), published_ok=False, renew=True)

    def _events_end(self, error: BrokerError, *, published_ok: bool, renew: bool = False) -> None:
        """Answers all that is pending. `renew`: in a new session, as the channel may go on at once
        with what it hears. Types end their consumers too."""
        waiting = self._take_pending()
        if self.queue.trace is not None and published_ok and not self.closed:
            self._trace_confirms(waiting, deleted=True)
        if renew:
            self._renew()
        if self.closed:
            return
        for command in waiting:
            self._end_publishes(command, error, published_ok)
        if self.blocked:
            self.check_flow()

    def _take_pending(self) -> list[PendingCommand]:
        """Returns all commands of a session that is over."""
        if not self.opening:
            return []
        # One more command closes the open batch of publishes, so that its tags are pending too.
        self._target.command(batch.CMD_SETTLE, 0, 0, 0)
        return self._target.applied(self._target.seq)

    def _end_publishes(
        self, command: PendingCommand, error: BrokerError, published_ok: bool
    ) -> None:
        """Answers a command if it is one of publishes."""
        if command.tags:
            outcome = PublishOutcome.DELETED if published_ok else PublishOutcome.REFUSED_UNAVAILABLE
            self._events.on_published(self, command.tags, outcome)
        elif command.type in SILENT and command.note is not None:
            command.note(0, None if published_ok else error)

    def _refusal(self, reason: object) -> BrokerError:
        """Returns the machine's reason as the error that the channel shows."""
        subject = self.queue.subject
        if reason == "deleted":
            return missing(subject)
        return Unavailable(f"{subject} refused: {reason}")
