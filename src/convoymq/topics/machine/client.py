# cython: annotation_typing=False
"""One publisher's stream of messages into a physical partition, one reader's, or this node's
commands.

Publishes are those of every session (`session_client`), but for refusals: a partition that is not
open refuses a session for ever (`topics.machine.group_machine`), and its publisher hears which tags
were refused and where their keys live now. It goes on in a new client.

Commands are repeated until they are answered: within a session each counts once; one whose session
ended with the answer under way is sent again in the next one, so commands must bear that. A client
that sends commands publishes nothing: its answers are not those of publishes.

Messages of a producer with sequences are PRODUCE and ENQUEUE, answered with the outcome of each
run. They are no publishes of a channel, and have no tags. When the session ends nobody knows what
became of them, and their sequences tell when they are sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from convoymq.kernels import batch
from convoymq.kernels.batch import PendingCommand
from convoymq.kernels.ordered_runs import UNTAGGED
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.model.refusals import managed_queue, missing
from convoymq.queues.interface import ClientEvents, PublisherEvents, PublishOutcome, QueueClient
from convoymq.queues.sessions import APPLIED_REJECTED, REPLIES_KEPT_MAX
from convoymq.queues.stream.client import StreamClient
from convoymq.topics.machine.codec import (
    CMD_PARTITION,
    CMD_PRODUCE,
    decode_outcome,
    encode_command,
    encode_runs,
)
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.rules.answers import RunsAnswer
from convoymq.topics.rules.commands import Command, ProducedRun
from convoymq.topics.rules.refusals import Code

if TYPE_CHECKING:
    from convoymq.topics.machine.queue import PartitionQueue

Enqueue = tuple[int, int, int, bytes]
"""Flags, messages, position of the offsets table, and body of an ENQUEUE command."""

Told = Callable[["Outcome | None", "BrokerError | None"], None]
"""Gets the outcome of a command, or why there is none; called once."""

RunsTold = Callable[["RunsAnswer | None", "BrokerError | None"], None]
"""Gets the outcome of a producer's runs, or why nobody knows it; called once."""

UNDER_WAY_MAX = REPLIES_KEPT_MAX * 3 // 4
"""Commands that one session may have under way: the partition keeps answers for repeats of no more
than the latest ones."""


@runtime_checkable
class PartitionPublisherEvents(PublisherEvents, Protocol):
    """Events that a publisher to partitions gets from its clients."""

    def on_closed(
        self, client: QueueClient, command: PendingCommand, code: Code, to_version: int
    ) -> None:
        """The partition has refused an ENQUEUE as a whole: nothing of it is stored, and no later
        publish of this client will be. `code` CLOSED: the keys live in the partitions of route
        `to_version`; NOT_OPEN: the partition takes messages a little later. Comes once for each
        command, in their order, behind the confirms of what was stored before them."""


@runtime_checkable
class OfChannel(Protocol):
    """Events of a publisher that sends the messages of a channel on."""

    publisher: int
    """Session of the channel, for the trace."""


class _Command:
    """A command that was told, until it is answered."""

    __slots__ = ("body", "done", "lost")

    def __init__(self, body: bytes, done: Told) -> None:
        self.body = body
        self.done = done
        self.lost: PendingCommand | None = None
        """The same command, when it is applied and its answer was lost."""


class _Runs:
    """Runs of a producer that were sent, until they are answered."""

    __slots__ = ("done", "lost")

    def __init__(self, done: RunsTold) -> None:
        self.done = done
        self.lost: PendingCommand | None = None
        """Their ENQUEUE, when it is applied and its answer was lost."""


class PartitionClient(StreamClient):
    """See the module text and `QueueClient`."""

    queue: PartitionQueue

    def __init__(self, queue: PartitionQueue, session: int, events: ClientEvents) -> None:
        super().__init__(queue, session, events)
        #: Code of the session's refusal; None: nothing was refused.
        self.refusal: Code | None = None
        #: Seq -> command under way, in order; then those that wait for their turn.
        self._told: dict[int, _Command] = {}
        self._untold: deque[_Command] = deque()
        #: Seq of an ENQUEUE -> runs under way, in order.
        self._runs: dict[int, _Runs] = {}

    # --- trace ---------------------------------------------------------------------------

    def _open(self) -> None:
        super()._open()
        trace = self.queue.trace
        if trace is not None:
            events = self._events
            trace.publisher(self.session, events.publisher if isinstance(events, OfChannel) else 0)

    def _trace_confirms(self, done: Sequence[PendingCommand], *, deleted: bool = False) -> None:
        super()._trace_confirms(done, deleted=deleted)
        trace = self.queue.trace
        if trace is not None and not deleted:
            trace.tagged(self.session, done, UNTAGGED)

    # --- commands ------------------------------------------------------------------------

    def tell(self, command: Command, done: Told) -> None:
        """Has a command applied, after those that were told before."""
        self._untold.append(_Command(encode_command(command), done))
        self._send()

    def _send(self) -> None:
        while self._untold and not self.closed:
            if self._told and self._target.seq - next(iter(self._told)) >= UNDER_WAY_MAX:
                return
            told = self._untold.popleft()
            body = told.body
            seq = self.target.command(CMD_PARTITION, 0, 0, len(body), body)
            self._told[seq] = told

    @property
    def takes_runs(self) -> bool:
        """Returns whether the session may have more runs under way: it takes two numbers each."""
        if not self._runs:
            return True
        return self._target.seq - next(iter(self._runs)) < UNDER_WAY_MAX - 2

    def produce(
        self,
        producer: int,
        epoch: int,
        runs: Sequence[ProducedRun],
        enqueue: Enqueue,
        done: RunsTold,
    ) -> None:
        """Has messages of a producer with sequences stored; `done` gets the outcome of each run.

        Args:
            enqueue: their records, in the order of the runs.
        """
        sent = _Runs(done)

        def unknown(_duplicates: int, error: BrokerError | None) -> None:
            if self._runs.pop(seq, None) is not None:
                subject = self.queue.subject
                sent.done(None, error or Unavailable(f"{subject} ended the session"))

        announced = encode_runs(producer, epoch, runs)
        self.target.command(CMD_PRODUCE, 0, 0, len(announced), announced)
        flags, messages, position, body = enqueue
        seq = self._target.command(batch.CMD_ENQUEUE, flags, messages, position, body, unknown)
        self._runs[seq] = sent

    def _produced(self, command: PendingCommand, seq: int, status: int, reply: object) -> None:
        sent = self._runs.get(command.seq)
        if sent is None:
            super()._produced(command, seq, status, reply)
        elif command.seq != seq or not self._tell_runs(seq, reply):
            sent.lost = command
            self._repeat(command)

    def _tell_runs(self, seq: int, reply: object) -> bool:
        """Passes the answer to runs on; False when it is none: one for all commands up to `seq`."""
        outcome = decode_outcome(reply) if isinstance(reply, bytes) else None
        if isinstance(outcome, RunsAnswer):
            self._runs.pop(seq).done(outcome, None)
        elif isinstance(reply, str):
            self._runs.pop(seq).done(None, self._refusal(reply))
        else:
            return False
        return True

    def _answered(self, command: PendingCommand, seq: int, status: int, reply: object) -> None:
        if command.type != CMD_PARTITION:
            super()._answered(command, seq, status, reply)
        elif command.seq == seq and isinstance(reply, bytes):
            self._tell_outcome(seq, reply)
        else:
            told = self._told.get(command.seq)
            if told is not None:
                told.lost = command
                self._ask_again(told)

    def _heard_again(self, seq: int, status: int, reply: object) -> None:
        if seq in self._runs:
            self._tell_runs(seq, reply)
        elif seq in self._told and isinstance(reply, bytes):
            self._tell_outcome(seq, reply)
        else:
            super()._heard_again(seq, status, reply)

    def _tell_outcome(self, seq: int, reply: bytes) -> None:
        told = self._told.pop(seq, None)
        if told is not None:
            told.done(decode_outcome(reply), None)
            self._send()

    def _ask_again(self, told: _Command) -> None:
        """A repeated command gets its answer from the session's record."""
        if told.lost is not None:
            self._repeat(told.lost)

    def _repeat(self, command: PendingCommand) -> None:
        if command.chunk.data is not None:
            end = command.offset + command.length
            self._target.builder.adopt(command.chunk.data, command.offset, end)

    def is_waiting(self) -> bool:
        """Returns whether something is expected from the queue."""
        return bool(self._told or self._runs) or super().is_waiting()

    def on_silence(self) -> None:
        """Called about once a second while something is expected: asks again."""
        super().on_silence()
        for told in list(self._told.values()):
            self._ask_again(told)
        for sent in list(self._runs.values()):
            if sent.lost is not None:
                self._repeat(sent.lost)

    # --- publishes -----------------------------------------------------------------------

    def on_applied(self, seq: int, status: int, reply: object) -> None:
        """Commands up to `seq` are applied. A refusal is about all publishes from some seq on."""
        if status != APPLIED_REJECTED or not isinstance(reply, list) or seq <= self.applied:
            super().on_applied(seq, status, reply)
            return
        code, first, to_version = Code(reply[0]), reply[1], reply[2]
        self.refusal = code
        refused = self._take_refused(first, seq)
        super().on_applied(seq, status, reply)
        events = self._events
        for command, tags, note in refused:
            command.tags, command.note = tags, note
            if self.closed:
                continue
            if isinstance(events, PartitionPublisherEvents):
                events.on_closed(self, command, code, to_version)
            elif tags:
                events.on_published(self, tags, PublishOutcome.REFUSED_UNAVAILABLE)
            elif note is not None:
                note(0, Unavailable(f"{self.queue.subject} takes no messages: {code.value}"))

    def _take_refused(
        self, first: int, last: int
    ) -> list[tuple[PendingCommand, list[int] | None, Callable[..., None] | None]]:
        """Keeps refused publishes from being confirmed; returns (command, tags, note) of each."""
        refused = []
        for command in self._target.pending:
            if command.seq > last:
                break
            # What became of a producer's runs their own answer says.
            is_publish = command.type == batch.CMD_ENQUEUE and command.seq not in self._runs
            if command.seq >= first and is_publish:
                refused.append((command, command.tags, command.note))
                command.tags = command.note = None
        return refused

    # --- what is the topic's business ----------------------------------------------------

    def purge(self) -> None:
        """Refused."""
        error = managed_queue(self.queue.subject)
        self._soon(lambda: self._events.on_purged(self, 0, error))

    # --- the end -------------------------------------------------------------------------

    def give_up(self) -> None:
        """The partition was sealed from outside: nobody knows what becomes of what is under way to
        it. Commands are sent on; who publishes hears that the outcome is unknown."""
        publishes = isinstance(self._events, PartitionPublisherEvents) or bool(self._runs)
        if self.closed or not publishes or not self.opening:
            return
        error = Unavailable(f"{self.queue.subject} is sealed, and does not answer")
        # Its commands will never all arrive: it goes on in a new session, if it does.
        self._events_end(error, published_ok=False, renew=True)

    def on_deleted(self) -> None:
        """The partition is gone. What was under way may have been refused before."""
        self._events_end(missing(self.queue.subject), published_ok=False)

    def _events_end(self, error: BrokerError, *, published_ok: bool, renew: bool = False) -> None:
        unanswered = [*self._told.values(), *self._untold]
        self._told.clear()
        self._untold.clear()
        lost = [sent for sent in self._runs.values() if sent.lost is not None]
        for sent in lost:
            sent.done(None, error)
        super()._events_end(error, published_ok=published_ok, renew=renew)
        self._runs.clear()
        if renew:
            self.refusal = None
            for told in unanswered:
                told.lost = None
            self._untold.extend(unanswered)
            self._send()
        else:
            for told in unanswered:
                told.done(None, error)
