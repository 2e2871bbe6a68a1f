"""Messages of weak topics that a group could not process, on their way to the retry exchange.

A copy is published as a dead letter is (ADR 0044): header `x-death` names the group, as
`TOPIC/GROUP`, and counts. The message is acknowledged when every queue and topic that the exchange
leads to has confirmed its copy, so it is there at least once. Without a route, and while a queue of
it refuses publishers, nothing is acknowledged: the copy is published again later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from convoymq.kernels import batch
from convoymq.messages.deaths import REJECTED, dead_letter
from convoymq.model.clock import Clock, Timer
from convoymq.model.errors import BrokerError
from convoymq.queues.dead_letter_publisher import (
    REFUSED,
    DeadLetterOptions,
    DeadLetterPublisher,
)
from convoymq.queues.interface import PublishOutcome, Queue, QueueClient
from convoymq.topics.shell.group_messages import GroupName

log = structlog.get_logger()

UNROUTED_MS = 1_000
"""Pause before a copy without a route, or for a full queue, is given back and published again."""
Stored = Callable[[bool], None]


@dataclass(slots=True)
class _Copy:
    """A copy on its way."""

    left: int
    """Targets that have not answered."""
    done: Stored
    ok: bool = True
    timer: Timer | None = None


class GroupRetries(DeadLetterPublisher):
    """Copies of one group's messages. See `DeadLetterSource` for the attributes."""

    def __init__(
        self,
        name: GroupName,
        clock: Clock,
        new_session: Callable[[], int],
        options: DeadLetterOptions,
    ) -> None:
        self.vhost = name.vhost
        self.name = name.queue
        self.clock = clock
        self.new_session = new_session
        self._timeout_ms = options.confirm_timeout_ms
        self._copies: dict[int, _Copy] = {}
        """By tag."""
        self._next_tag = 1
        super().__init__(self, options)

    def note(self, event: str, fields: Mapping[str, object]) -> None:
        """See `DeadLetterSource`."""
        log.warning(event, vhost=self.vhost, queue=self.name, **fields)

    def publish(self, exchange: str, message: bytes, done: Stored) -> None:
        """Publishes a copy; `done` hears whether it is stored everywhere.

        Args:
            message: an ENQUEUE command with one message.
        """
        self.configure({"dead-letter-exchange": exchange})
        death, _ = self._death(REJECTED)
        route: tuple[Queue, ...] = ()
        try:
            letter = dead_letter(batch.record(message, 0, 0), death)
            route = self._route(letter)
        except (BrokerError, ValueError) as error:
            why = str(error)
        else:
            why = "no route"
            if any(queue.refuses_publishes for queue in route):
                why, route = REFUSED, ()
        if not route:
            log.warning(
                "topics.retry_unroutable",
                vhost=self.vhost, group=self.name, exchange=exchange, reason=why,
            )  # fmt: skip
            self.clock.call_later(UNROUTED_MS, done, False)
            return
        tag = self._next_tag
        self._next_tag += 1
        copy = self._copies[tag] = _Copy(len(route), done)
        copy.timer = self.clock.call_later(self._timeout_ms, self._give_up, tag)
        self._count(route, 1)
        for queue in route:
            target = self._target(queue)
            target.open += 1
            letter.publish(target.client.target, tag)

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        for first, last in zip(tags[::2], tags[1::2], strict=True):
            for tag in range(first, last + 1):
                for target in self._targets.values():
                    target.open -= target.client is client
                copy = self._copies.get(tag)
                if copy is None:
                    continue
                copy.ok = copy.ok and bool(outcome)
                copy.left -= 1
                if not copy.left:
                    self._finish(tag, ok=copy.ok)

    def _give_up(self, tag: int) -> None:
        copy = self._copies.get(tag)
        if copy is not None:
            copy.timer = None
            self._finish(tag, ok=False)

    def _finish(self, tag: int, *, ok: bool) -> None:
        copy = self._copies.pop(tag)
        if copy.timer is not None:
            copy.timer.cancel()
        copy.done(ok)

    def _work(self) -> None:
        """Nothing waits here: who gave a message gives it again."""

    @property
    def waits(self) -> bool:
        return False


class Retries:
    """Copies of all groups on a node."""

    def __init__(
        self, clock: Clock, new_session: Callable[[], int], options: DeadLetterOptions
    ) -> None:
        self._clock = clock
        self._new_session = new_session
        self._options = options
        self._groups: dict[GroupName, GroupRetries] = {}

    def publish(self, name: GroupName, exchange: str, message: bytes, done: Stored) -> None:
        """See `GroupRetries.publish`."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = GroupRetries(
                name, self._clock, self._new_session, self._options
            )
        group.publish(exchange, message, done)

    def forget(self, vhost: str, topic: str) -> None:
        """A topic was deleted."""
        for name in [name for name in self._groups if name[:2] == (vhost, topic)]:
            self._groups.pop(name)._close()
