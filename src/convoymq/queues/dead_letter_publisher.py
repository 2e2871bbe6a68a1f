"""Publishing of dead letters in every queue type: headers, route, targets (ADR 0044, ADR 0055).

Nothing is published from within an apply: work is done in calls of its own, some messages at a
time. Clients of targets are sessions of this node, opened when they are first needed and closed
when they have been idle for a while. They send again by themselves; confirms come once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from convoymq.kernels import batch
from convoymq.kernels.dead_letters import FirstDeath
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.message import annotated
from convoymq.messages.deaths import (
    DeadLetter,
    DeadLetterRun,
    Death,
    dead_letter,
    dead_letter_run,
    first_death,
    is_cycle,
)
from convoymq.model.clock import Clock, Timer
from convoymq.model.errors import BrokerError
from convoymq.queues.earliest_timer import EarliestTimer
from convoymq.queues.interface import PublishOutcome, Queue, QueueClient
from convoymq.queues.null_events import NullEvents

if TYPE_CHECKING:
    from convoymq.model.tables import Table

IDLE_MS = 60_000
"""A target's client that nobody used for so long is closed."""
DISABLED_NAME = "disabled"
AT_MOST_ONCE_NAME = "at_most_once"
AT_LEAST_ONCE_NAME = "at_least_once"
ONCE = 1 << 62
"""First tag of messages that are published at most once, to queues of which only answers say
that they are full."""
REFUSED = "refused by a queue"
STRATEGIES = (DISABLED_NAME, AT_MOST_ONCE_NAME, AT_LEAST_ONCE_NAME)
"""Names in metrics of the strategies for messages that leave unacknowledged."""


class DeadLetterRoutes(Protocol):
    """Routes of dead letters, by the bindings as this node knows them."""

    def route_dead_letter(
        self,
        vhost: str,
        exchange: str,
        routing_keys: Sequence[str],
        headers: Table,
        properties: Properties,
    ) -> tuple[Queue, ...]:
        """Returns the queues that get a message. Raises NotFound: there is no such exchange;
        Unavailable: a queue cannot be used yet."""

    def varies_by_message(self, vhost: str, exchange: str) -> bool:
        """Returns whether the route of a message may depend on more than its routing keys. False:
        there is no such exchange."""

    def queue_of_group(self, vhost: str, name: str, group: int) -> Queue | None:
        """Returns the queue of a name while it has this group; None: that queue is deleted. Raises
        Unavailable: it cannot be used yet."""

    def count(self, vhost: str, exchange: str, queues: Sequence[Queue], messages: int) -> None:
        """Counts messages that went from an exchange to queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterOptions:
    """Options of a dead-letter publisher."""

    routes: DeadLetterRoutes
    prefetch: int = 0
    """At least once: messages of a queue on their way; 0 = see `DeadLetterWorker`."""
    confirm_timeout_ms: int = 180_000


class DeadLetterSource(Protocol):
    """The queue whose messages are published."""

    vhost: str
    name: str

    @property
    def clock(self) -> Clock:
        """Returns the clock of this node."""

    def new_session(self) -> int:
        """Returns a fresh session id of this node."""

    def note(self, event: str, fields: Mapping[str, object]) -> None:
        """Logs an event of the queue; counts of messages are summed for a while."""


class Target:
    """A queue to which dead letters go."""

    __slots__ = ("blocked", "client", "open", "used_ms")

    def __init__(self, client: QueueClient, now_ms: int) -> None:
        self.client = client
        self.blocked = False
        self.open = 0
        """Publishes without an answer."""
        self.used_ms = now_ms


class Cause(NamedTuple):
    """Cause of the death of messages."""

    reason: str
    annotations: bytes = b""
    """Of all of them: what consumers have said, as a map of AMQP 1.0."""


class DeadLetterPublisher(NullEvents):
    """Publishes one queue's dead letters at most once. Events of its clients end here.

    Args:
        source: the queue.
        options: None: nothing can be published.
    """

    def __init__(self, source: DeadLetterSource, options: DeadLetterOptions | None) -> None:
        self._source = source
        self._options = options
        self._exchange = ""
        self._routing_key: str | None = None
        self._deaths: dict[str, tuple[Death, FirstDeath]] = {}
        """The newest for each reason."""
        self._targets: dict[int, Target] = {}
        self._once_tag = ONCE
        self._timer = EarliestTimer(source.clock, self._work)
        self._idle_timer: Timer | None = None

    def configure(self, settings: Mapping[str, object]) -> None:
        """The effective settings of the queue: they apply to what waits already, too. Without an
        exchange that goes where it was to go."""
        if "dead-letter-exchange" not in settings:
            return
        self._deaths.clear()
        self._exchange = str(settings["dead-letter-exchange"])
        key = settings.get("dead-letter-routing-key")
        self._routing_key = key if isinstance(key, str) else None

    # --- time ----------------------------------------------------------------------------

    @abstractmethod
    def _work(self) -> None:
        """Publishes some of what waits; called by the timer, which has gone off."""

    @property
    @abstractmethod
    def waits(self) -> bool:
        """Returns whether something waits that a blocked target may hold up."""

    def _close(self) -> None:
        """Ends the clients of all targets, and the timer."""
        targets, self._targets = self._targets, {}
        for target in targets.values():
            target.client.close()
        self._timer.cancel()

    # --- messages ------------------------------------------------------------------------

    def _publish_once(
        self, block: bytes | None, command: int, first: int, count: int, cause: Cause
    ) -> None:
        """Publishes records of a command once; None: it cannot be read."""
        if block is None:
            self._lose(count, "not readable")
            return
        end = first + count
        while first < end:
            letters = self._letters(block, command, first, end - first, cause)
            if letters is None:
                self._lose(1, "not readable")
                first += 1
            else:
                self._send_once(letters)
                first += letters.count

    def _send_once(self, letters: DeadLetter | DeadLetterRun) -> None:
        try:
            route = self._route(letters)
        except BrokerError:
            self._lose(letters.count, f"no exchange '{self._exchange}'")
            return
        queues = [queue for queue in route if not is_cycle(letters.deaths, queue.name)]
        if not queues:
            if route:
                self._source.note("queue.dead_letter_cycle", {"count": letters.count})
            else:
                self._lose(letters.count, "no route")
        open_ = [queue for queue in queues if not queue.refuses_publishes]
        if len(open_) < len(queues):
            self._lose(letters.count * (len(queues) - len(open_)), REFUSED)
        self._count(open_, letters.count)
        for queue in open_:
            # A replicated queue without a leader would refuse what has a tag, and not keep it.
            tag = self._once_tag if queue.features.answers_by_tags else 0
            letters.publish(self._target(queue).client.target, tag)
            self._once_tag += letters.count

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `PublisherEvents`: a message that was published once is lost when it is refused."""
        if not outcome and not is_gone(client):
            pairs = zip(tags[::2], tags[1::2], strict=True)
            self._lose(sum(last - first + 1 for first, last in pairs), REFUSED)

    def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
        """See `PublisherEvents`: nobody else would publish it again."""
        return self._target(successor).client

    def _lose(self, count: int, reason: str) -> None:
        self._source.note("queue.dead_letters_lost", {"count": count, "reason": reason})

    def _letters(
        self, block: bytes, command: int, first: int, limit: int, cause: Cause
    ) -> DeadLetter | DeadLetterRun | None:
        """Returns the dead letter of a record of a command, with those that follow it and go the
        same way, at most `limit`; None when it is broken."""
        assert self._options is not None
        death, kernel = self._death(cause.reason)
        try:
            if cause.annotations:
                record = annotated(batch.record(block, command, first), cause.annotations)
                return dead_letter(record, death)
            if not self._options.routes.varies_by_message(self._source.vhost, self._exchange):
                run = dead_letter_run(block, command, first, limit, death, kernel)
                if run is not None:
                    return run
            return dead_letter(batch.record(block, command, first), death)
        except (BrokerError, ValueError):
            return None

    def _death(self, reason: str) -> tuple[Death, FirstDeath]:
        """Returns the death of a message that dies now."""
        time_s = self._source.clock.now_ms() // 1000
        known = self._deaths.get(reason)
        if known is None or known[0].time_s != time_s:
            death = Death(
                queue=self._source.name,
                reason=reason,
                time_s=time_s,
                exchange=self._exchange,
                routing_key=self._routing_key,
            )
            known = self._deaths[reason] = death, first_death(death)
        return known

    def _route(self, letters: DeadLetter | DeadLetterRun) -> tuple[Queue, ...]:
        """Raises BrokerError."""
        assert self._options is not None
        return self._options.routes.route_dead_letter(
            self._source.vhost, self._exchange, letters.keys, letters.headers, letters.properties
        )

    def _count(self, queues: Sequence[Queue], messages: int) -> None:
        """Counts what was published to queues, if any take it."""
        if queues:
            assert self._options is not None
            self._options.routes.count(self._source.vhost, self._exchange, queues, messages)

    # --- targets -------------------------------------------------------------------------

    def _target(self, queue: Queue) -> Target:
        now = self._source.clock.monotonic_ms()
        target = self._targets.get(queue.group)
        if target is None or target.client.queue is not queue:
            if target is not None:
                target.client.close()
            target = Target(queue.client(self._source.new_session(), self), now)
            self._targets[queue.group] = target
            if self._idle_timer is None:
                self._idle_timer = self._source.clock.call_later(IDLE_MS, self._close_idle)
        target.used_ms = now
        return target

    @property
    def _is_blocked(self) -> bool:
        """Returns whether a target cannot keep up; when it can again, the work goes on by
        itself."""
        return any(each.blocked and not is_gone(each.client) for each in self._targets.values())

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        for target in self._targets.values():
            if target.client is client:
                target.blocked = blocked
        if not blocked and self.waits:
            self._timer.soon(0)

    def _close_idle(self) -> None:
        self._idle_timer = None
        now = self._source.clock.monotonic_ms()
        for group, target in list(self._targets.items()):
            pending = target.open or target.blocked or target.client.has_pending
            if not pending and now - target.used_ms >= IDLE_MS:
                del self._targets[group]
                target.client.close()
        if self._targets:
            self._idle_timer = self._source.clock.call_later(IDLE_MS, self._close_idle)


def is_gone(client: QueueClient) -> bool:
    """Returns whether a client's queue was deleted, or lost."""
    return client.queue.ended is not None or bool(getattr(client.queue, "deleted", False))
