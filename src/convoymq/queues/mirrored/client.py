# cython: annotation_typing=False
"""A channel's command stream into a classic queue that may get another master.

The new master goes on with the session: commands that have no answer are sent again under their
numbers, and consumers are registered again. They count their messages from where they were, so an
acknowledgement of what the former master delivered settles nothing. Publishes that it may have had
say so (`FLAG_AGAIN`): it may have handed them out.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from convoymq.kernels.batch import CMD_CANCEL, CMD_CHECKOUT, CMD_ENQUEUE, CMD_SETTLE
from convoymq.model.errors import BrokerError
from convoymq.queues.classic.client import ClassicClient
from convoymq.queues.classic.credit import CREDIT
from convoymq.queues.classic.machine import (
    APPLIED,
    CANCEL_OK,
    CANCELLED,
    DELIVER,
    GET_CONSUMER,
    GOT,
    QUESTIONS,
    SUBSCRIBED,
    Effect,
)
from convoymq.queues.classic.runs import FLAG_AGAIN
from convoymq.queues.interface import ClientEvents, ConsumerSpec
from convoymq.queues.outcomes import CMD_GRANT, FLAG_DRAIN, FLAG_UNASKED

if TYPE_CHECKING:
    from convoymq.queues.classic.queue import ClassicQueue

CANCEL_ON_FAILOVER = "x-cancel-on-ha-failover"
"""A consumer's argument: it ends when another master takes over."""
PENDING_BYTES_MAX = 32 << 20
"""Commands of a channel without an answer: with more, the channel stops reading publishes."""


class MirroredClient(ClassicClient):
    """See the module text."""

    def __init__(self, queue: ClassicQueue, session: int, events: ClientEvents) -> None:
        super().__init__(queue, session, events)
        self._target.pending_bytes_max = PENDING_BYTES_MAX
        self._blocked = False
        self._sent = 0
        """Commands up to this seq may have reached a master that is lost."""
        self._held = False
        self._specs: dict[int, ConsumerSpec] = {}
        self._credits: dict[int, int] = {}
        self._limits: dict[int, int] = {}
        """Consumer -> limit of its last GRANT that was answered."""
        self._grants: dict[int, deque[tuple[int, int]]] = {}
        """Consumer -> limit and flags of each GRANT without an answer."""
        #: Consumer -> id of its next message.
        self._next_ids: dict[int, int] = {}
        self._again: set[int] = set()
        """Consumers that a new master is asked for."""

    # --- commands ------------------------------------------------------------------------

    def subscribe(self, spec: ConsumerSpec, first: int = 0) -> None:
        """See `ClassicClient`."""
        self._specs[spec.number] = spec
        super().subscribe(spec, first)

    def set_credit(self, consumer: int, credit: int) -> None:
        """See `ClassicClient`."""
        self._credits[consumer] = credit
        super().set_credit(consumer, credit)

    def _grant(self, consumer: int, limit: int, flags: int) -> None:
        self._grants.setdefault(consumer, deque()).append((limit, flags))
        super()._grant(consumer, limit, flags)

    def _grant_again(self, consumer: int) -> None:
        """A new master has the consumer: its credit counts from the start."""
        limit = self._limits.get(consumer, 0)
        super()._grant(consumer, limit, FLAG_UNASKED)
        for limit, flags in self._grants.get(consumer, ()):
            super()._grant(consumer, limit, flags)

    # --- another master ------------------------------------------------------------------

    def lose_master(self) -> None:
        """Notes that a master is lost which may have all that was sent so far."""
        self._sent = self._target.seq

    def move_to(self, queue: ClassicQueue) -> None:
        """Sends the channel's commands to another handle. The open batch must be sealed."""
        self.queue = queue
        self._target.builder = queue.builder

    def place(self) -> tuple[int, int, int, int]:
        """Returns (session, seq of the first command without an answer, id of the next message
        that is got, seq of the last question that has its answer). The open batch must be sealed.

        A question may have its answer before it counts as done.
        """
        pending = self._target.pending
        first = pending[0].seq if pending else self._target.seq + 1
        questions = [command.seq for command in pending if command.type in QUESTIONS]
        answered = questions[: len(questions) - len(self._questions)]
        got = self._next_ids.get(GET_CONSUMER, 0)
        return self.session, first, got, answered[-1] if answered else 0

    def go_on(self) -> None:
        """A new master knows the session: it gets what has no answer, and the consumers."""
        self._send_again()
        # Those that a former new master did not answer are among the commands above.
        for consumer in sorted(self._consumers - self._again):
            if {(CMD_CANCEL, consumer), (CMD_CHECKOUT, consumer)} & {*self._questions}:
                continue
            spec = self._specs[consumer]
            if (spec.arguments or {}).get(CANCEL_ON_FAILOVER):
                self._consumers.discard(consumer)
                self._forget(consumer)
                self._events.on_cancelled(self, consumer, "failover")
                continue
            self._again.add(consumer)
            super().subscribe(spec, self._next_ids.get(consumer, 0))
            if consumer in self._credits:
                super().set_credit(consumer, self._credits[consumer])
            if spec.credited:
                self._grant_again(consumer)

    def _send_again(self) -> None:
        asked: set[int] = set()
        for command in self._target.pending:
            data = bytes(command.bytes())
            consumer = int.from_bytes(data[28:32], "little")
            if command.type == CMD_CHECKOUT:
                asked.add(consumer)
            elif command.type == CMD_GRANT and consumer not in asked:
                # `_grant_again` follows its consumer; an empty command takes its number.
                self._target.builder.add(CMD_SETTLE, 0, self.session, command.seq, 0, 0, b"")
                continue
            if command.type == CMD_ENQUEUE and command.seq <= self._sent:
                data = data[:5] + bytes((data[5] | FLAG_AGAIN,)) + data[6:]
            self._target.builder.adopt(data, 0, len(data))

    # --- effects -------------------------------------------------------------------------

    def on_effect(self, effect: Effect) -> None:
        """See `ClassicClient`."""
        kind = effect[0]
        if kind == DELIVER:
            self._next_ids[effect[2]] = effect[3] + effect[6]
        elif kind == GOT and effect[2] is not None:
            self._next_ids[GET_CONSUMER] = effect[4] + 1
        elif kind == CREDIT and self._grants.get(effect[2]):
            limit, flags = self._grants[effect[2]].popleft()
            self._limits[effect[2]] = effect[3] if flags & FLAG_DRAIN else limit
        elif kind in (CANCEL_OK, CANCELLED):
            self._forget(effect[2])
        elif kind == SUBSCRIBED and effect[2] in self._again:
            self._subscribed_again(effect[2], effect[3])
            return
        super().on_effect(effect)
        if kind == APPLIED and self._blocked:
            self.check_flow()

    def cancel_all(self, reason: str) -> None:
        """See `ClassicClient`. The channel did not ask again for the consumers that it has."""
        for consumer in self._again:
            self._questions.remove((CMD_CHECKOUT, consumer))
        self._again.clear()
        self._specs.clear()
        self._credits.clear()
        self._limits.clear()
        self._grants.clear()
        self._next_ids.clear()
        super().cancel_all(reason)

    def _subscribed_again(self, consumer: int, error: str | None) -> None:
        self._again.discard(consumer)
        self._questions.remove((CMD_CHECKOUT, consumer))
        if error is not None and not self.closed:
            self._consumers.discard(consumer)
            self._forget(consumer)
            self._events.on_cancelled(self, consumer, "lost")

    def _forget(self, consumer: int) -> None:
        self._specs.pop(consumer, None)
        self._credits.pop(consumer, None)
        self._limits.pop(consumer, None)
        self._grants.pop(consumer, None)
        self._next_ids.pop(consumer, None)

    def end(self, error: BrokerError, *, published_ok: bool) -> None:
        """See `ClassicClient`."""
        self._blocked = self._held = False
        super().end(error, published_ok=published_ok)

    # --- flow ----------------------------------------------------------------------------

    def on_flow(self, blocked: bool) -> None:
        """See `ClassicClient`."""
        self._held = blocked
        if not self._blocked:
            super().on_flow(blocked)

    def check_flow(self) -> None:
        """Stops the channel when too much has no answer, and lets it go on at half of it."""
        limit = PENDING_BYTES_MAX // 2 if self._blocked else PENDING_BYTES_MAX
        blocked = self._target.pending_bytes > limit
        if blocked != self._blocked and not self.closed:
            self._blocked = blocked
            if not self._held:
                super().on_flow(blocked)
