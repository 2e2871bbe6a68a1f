"""Deliveries of a channel that are not acknowledged in time.

| made by               | time-out                                      | when it is over         |
|-----------------------|-----------------------------------------------|-------------------------|
| a quorum queue, to a  | `x-consumer-timeout` of the consumer, else of | they return, the        |
| consumer              | the queue or its policy, else configured      | consumer is cancelled   |
| anything else         | configured                                    | the channel closes: 406 |

Returned deliveries count as handed out, not as failed. A client that does not hear of a cancel has
its channel closed instead. Late acknowledgements of what was returned do nothing: the queue gave
the messages to others.

Time is that of the scans: each notes the next delivery tag, so that nothing is kept per message. A
delivery is late when it was made before a scan that long ago, and never too early.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import structlog

from convoymq.kernels.channel_codec import ConsumerDeliveries
from convoymq.model import refusals
from convoymq.model.refusals import queue_subject
from convoymq.model.tables import INTEGER_CODES, Table
from convoymq.queues.interface import TIMEOUT_ARGUMENT, Queue

if TYPE_CHECKING:
    from convoymq.edges.amqp091.channel import Channel
    from convoymq.edges.amqp091.consumers import Consumer

log = structlog.get_logger()

MARKS_MAX = 4096
"""Beyond it every second one of the older half goes: late deliveries are found later then."""


def consumer_timeout_ms(arguments: Table, queue: Queue) -> int | None:
    """Returns the time-out that a consumer asks for; None where it does not, 0 = none. Raises
    Refused."""
    field = arguments.get(TIMEOUT_ARGUMENT)
    if field is None:
        return None
    subject = queue_subject(queue.vhost, queue.name)
    value = field.value
    if field.code not in INTEGER_CODES or not isinstance(value, int):
        reason = f'"expected integer, got {field.type_name}"'
        raise refusals.invalid_argument(TIMEOUT_ARGUMENT, subject, reason)
    if value < 0:
        raise refusals.invalid_argument(TIMEOUT_ARGUMENT, subject, f"{{value_negative,{value}}}")
    return value


class _Timed:
    """A consumer whose deliveries have a time-out of their own; also when it is cancelled, for as
    long as it holds something."""

    __slots__ = ("asked_ms", "deliveries", "queue", "returned", "tag")

    def __init__(self, consumer: Consumer, asked_ms: int | None) -> None:
        self.asked_ms = asked_ms
        self.queue = consumer.queue
        self.deliveries = consumer.deliveries
        self.tag = consumer.tag
        #: Message ids below this were returned.
        self.returned = 0


class AcknowledgementTimeouts:
    """The time-outs of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._marks: deque[tuple[float, int]] = deque()
        """(time of a scan in s, next delivery tag then)."""
        self._timed: dict[int, _Timed] = {}

    def watch(self, consumer: Consumer, asked_ms: int | None) -> None:
        """A consumer begins; its queue times deliveries."""
        timed = self._timed[consumer.number] = _Timed(consumer, asked_ms)
        self._channel.connection.scan_within(self._timeout_ms(timed))

    def of(self, number: int) -> int | None:
        """Returns the time-out of a consumer that has one of its own, ms; None = for as long as it
        takes."""
        timed = self._timed.get(number)
        return self._configured_ms if timed is None else self._timeout_ms(timed)

    @property
    def _configured_ms(self) -> int | None:
        return self._channel.connection.settings.consumer_timeout_ms

    def _timeout_ms(self, timed: _Timed) -> int | None:
        asked = timed.asked_ms
        if asked is None:
            asked = timed.queue.consumer_timeout_ms
        if asked is None:
            asked = self._configured_ms
        return asked or None

    def shortest_ms(self) -> int | None:
        """Returns the shortest time-out here; None = there is none."""
        found = [self._timeout_ms(timed) for timed in self._timed.values()]
        return min((each for each in (*found, self._configured_ms) if each), default=None)

    def scan(self, now_s: float) -> None:
        """Looks for late deliveries; `now_s` rises from scan to scan."""
        channel = self._channel
        if channel.closed:
            return
        codec = channel.codec
        self._forget_gone()
        oldest = codec.oldest_unacked
        self._mark(now_s, oldest or codec.next_tag, codec.next_tag)
        shortest = self.shortest_ms()
        if shortest is None or not oldest or oldest >= self._first_in_time(now_s, shortest):
            return
        runs = codec.take(0, True) or []
        codec.put_back(runs)
        late: dict[int, list[int]] = {}
        for tag, count, deliveries, first_id in runs:
            timed = self._timed.get(deliveries.number)
            timeout_ms = self._configured_ms if timed is None else self._timeout_ms(timed)
            if timeout_ms is None:
                continue
            count = min(count, self._first_in_time(now_s, timeout_ms) - tag)
            if count <= 0:
                continue
            if timed is None:
                self._close(timeout_ms)
                return
            first, last = max(first_id, timed.returned), first_id + count - 1
            if first <= last:
                late.setdefault(deliveries.number, []).extend((first, last))
        for number, ranges in late.items():
            self._return(number, self._timed[number], ranges)

    def _return(self, number: int, timed: _Timed, ranges: list[int]) -> None:
        channel = self._channel
        timeout_ms = self._timeout_ms(timed) or 0
        found = channel.by_number.get(number)
        if found is not None and not channel.connection.capabilities.consumer_cancel_notify:
            self._close(timeout_ms)
        if channel.closed:
            return
        log.warning(
            "amqp.acknowledgement_late",
            vhost=timed.queue.vhost,
            queue=timed.queue.name,
            consumer_tag=timed.tag,
            connection=channel.connection.name,
            timeout_ms=timeout_ms,
            count=sum(ranges[1::2]) - sum(ranges[::2]) + len(ranges) // 2,
        )
        timed.returned = ranges[-1] + 1
        client = timed.deliveries.client
        if found is not None and found.active and not found.cancelling:
            # First: otherwise the messages could come to this consumer again.
            client.end_consumer(number)
            channel.on_cancelled(client, number, "acknowledgement late")
        client.return_(number, ranges, failed=False)

    def _close(self, timeout_ms: int) -> None:
        channel = self._channel
        channel.refuse(refusals.acknowledgement_late(channel.number, timeout_ms), 0, 0)

    def _first_in_time(self, now_s: float, timeout_ms: int) -> int:
        """Returns the first delivery tag that may be younger than the time-out."""
        found = 0
        for time_s, next_tag in self._marks:
            if time_s > now_s - timeout_ms / 1000:
                break
            found = next_tag
        return found

    def _mark(self, now_s: float, oldest: int, next_tag: int) -> None:
        """Notes the next tag, if it says anything, and forgets what says nothing any more."""
        marks = self._marks
        while marks and marks[0][1] <= oldest:
            marks.popleft()
        if next_tag > (marks[-1][1] if marks else oldest):
            marks.append((now_s, next_tag))
        if len(marks) > MARKS_MAX:
            half = MARKS_MAX // 2
            older = [marks.popleft() for _ in range(half)]
            marks.extendleft(reversed(older[::2]))

    def _forget_gone(self) -> None:
        channel = self._channel
        left = {deliveries.number for deliveries in channel.leaving}
        gone = [n for n in self._timed if n not in channel.by_number and n not in left]
        for number in gone:
            del self._timed[number]


def is_timed(deliveries: ConsumerDeliveries, queue: Queue) -> bool:
    """Returns whether a consumer's deliveries have a time-out of their own."""
    return queue.features.times_consumers and not deliveries.no_ack
