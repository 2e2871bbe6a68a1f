"""A producer of ordered topics: gives messages sequences, and keeps their order through a change.

Events come in as calls, requests come out of `take_actions`. Per logical partition a few requests
are in flight, and what is not acknowledged is sent again with the same sequences, in order, from
the first one on:

| answer                  | what follows                                                     |
|-------------------------|------------------------------------------------------------------|
| OK, DUPLICATE           | this and all earlier ones are stored: sequences have no gaps     |
| CLOSED                  | the partition is dead here; one refresh for all; to its targets  |
| NOT_OPEN                | again after 1, 2, 4 ... 50 ms, at the same target                |
| WRONG_RANGE, STALE_ROUTE| one refresh; again when the route is there                       |
| NOT_LEADER              | again after a pause                                              |
| no answer               | unknown: one refresh; again, wherever the logical partition lives |
| OUT_OF_SEQ              | an earlier one is missing: again from the first unacknowledged   |
| PRODUCER_FENCED, BAD_HASH | fails, and all later ones of the logical partition             |

Source: ordered topics, section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from convoymq.topics.rules.answers import ProduceAnswer
from convoymq.topics.rules.commands import Produce
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Route, Span

IN_FLIGHT_MAX = 3
TIMEOUT_MS = 60
BACKOFF_MS = (1, 2, 4, 8, 16, 32, 50)
REFRESH_ATTEMPTS = 4
FATAL = frozenset((Code.PRODUCER_FENCED, Code.BAD_HASH))
REFRESHES = frozenset((Code.WRONG_RANGE, Code.STALE_ROUTE))


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send to the leader of a partition. `ticket` comes back with the answer."""

    pid: int
    ticket: int
    request: Produce


@dataclass(frozen=True, slots=True)
class RefreshRoute:
    """Ask for the newest route; once, however many messages wait for it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Messages up to `seq` of a logical partition are stored."""

    lp: int
    seq: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Messages of a logical partition from `seq` on are given up."""

    lp: int
    seq: int
    code: Code


Action = SendRequest | RefreshRoute | Stored | Failed


@dataclass(slots=True)
class Message:
    """A message that is not acknowledged, or several that are sent together."""

    seq: int
    key: bytes
    source_pos: bytes = b""
    count: int = 1

    @property
    def last(self) -> int:
        """Returns the sequence of the last of them."""
        return self.seq + self.count - 1


class Flight(NamedTuple):
    """A request without an outcome."""

    deadline_ms: int
    seq: int
    """Of its last message."""
    pid: int


@dataclass(slots=True)
class LogicalQueue:
    """Messages of one logical partition, to be sent."""

    lp: int
    messages: deque[Message] = field(default_factory=deque)
    next_seq: int = 1
    sent: int = 0
    """Number of the first messages that were sent in this round."""
    round: int = 0
    """Rises when sending starts again from the first message: older refusals are void."""
    attempt: int = 0
    resume_ms: int = 0
    """Nothing is sent before."""
    waits_for_route: int = -1
    """Nothing is sent before the route is newer than this version."""
    flights: dict[int, Flight] = field(default_factory=dict)
    """Requests without an outcome, by ticket."""
    failed: Code | None = None


class TopicProducer:
    """One producer session.

    Args:
        jitter: called with a bound; returns a number of ms below it.
    """

    def __init__(
        self,
        producer: int,
        epoch: int,
        route: Route,
        *,
        in_flight_max: int = IN_FLIGHT_MAX,
        timeout_ms: int = TIMEOUT_MS,
        jitter: Callable[[int], int] = lambda bound: 0,
    ) -> None:
        self.producer = producer
        self.epoch = epoch
        self.route = route
        self.in_flight_max = in_flight_max
        self.timeout_ms = timeout_ms
        self._jitter = jitter
        self.queues: dict[int, LogicalQueue] = {}
        self.redirects: dict[int, tuple[Span, ...]] = {}
        """Dead partitions, with the targets that they named; kept until a newer route is known."""
        self.refreshing = False
        self._refresh_due_ms = 0
        self._tickets: dict[int, LogicalQueue] = {}
        self._next_ticket = 1
        self._actions: list[Action] = []

    # What the application and the network say

    def send(
        self, lp: int, key: bytes, now_ms: int, source_pos: bytes = b"", count: int = 1
    ) -> int:
        """Takes a message, or so many that are sent in one request and have one outcome; returns
        the sequence of the first. Together they are at most `in_flight_max`."""
        assert 1 <= count <= self.in_flight_max, count
        queue = self.queues.get(lp)
        if queue is None:
            queue = self.queues[lp] = LogicalQueue(lp)
        message = Message(queue.next_seq, key, source_pos, count)
        queue.next_seq += count
        if queue.failed is not None:
            self._actions.append(Failed(lp, message.seq, queue.failed))
            return message.seq
        queue.messages.append(message)
        self._pump(queue, now_ms)
        return message.seq

    def on_route(self, route: Route, now_ms: int) -> None:
        """A route arrived; an older one than the known one only ends the refresh."""
        self.refreshing = False
        if route.version > self.route.version:
            self.route = route
            self.redirects.clear()
        for queue in self.queues.values():
            if queue.waits_for_route >= self.route.version:
                # The leader told of a change that this route does not have yet: ask again.
                queue.waits_for_route = -1
                self._back_off(queue, now_ms)
            else:
                queue.waits_for_route = -1
            self._pump(queue, now_ms)

    def on_answer(self, ticket: int, answer: ProduceAnswer, now_ms: int) -> None:
        """An answer arrived. After the deadline of its request it says nothing new: sent again."""
        queue = self._tickets.pop(ticket, None)
        if queue is None:
            return
        flight = queue.flights.pop(ticket)
        if answer.code in (Code.OK, Code.DUPLICATE):
            self._stored(queue, flight.seq)
        elif ticket >= queue.round:
            self._refused(queue, flight, answer, now_ms)
        self._pump(queue, now_ms)

    def is_stale(self, ticket: int) -> bool:
        """Returns whether a request that was not sent yet needs not be sent any more: its message
        has an outcome, or comes again in another request."""
        queue = self._tickets.get(ticket)
        if queue is None:
            return True
        waits = bool(queue.messages) and queue.messages[0].seq <= queue.flights[ticket].seq
        if waits and ticket >= queue.round:
            return False
        del queue.flights[ticket], self._tickets[ticket]
        return True

    def tick(self, now_ms: int) -> None:
        """Gives up requests whose deadline has passed, and sends what may be sent by now."""
        if self.refreshing and self._refresh_due_ms <= now_ms:
            self.refreshing = False
            self._refresh(now_ms)
        for queue in self.queues.values():
            late = [t for t, flight in queue.flights.items() if flight.deadline_ms <= now_ms]
            for ticket in late:
                del queue.flights[ticket], self._tickets[ticket]
            if late and late[-1] >= queue.round:
                self._begin_again(queue)
                # Nobody may answer there any more.
                self._refresh(now_ms)
            self._pump(queue, now_ms)

    def due_ms(self) -> int | None:
        """Returns the time at which `tick` is due; None for never."""
        times = [self._refresh_due_ms] if self.refreshing else []
        for queue in self.queues.values():
            if queue.flights:
                times.append(min(flight.deadline_ms for flight in queue.flights.values()))
            if queue.resume_ms and queue.sent < len(queue.messages):
                times.append(queue.resume_ms)
        return min(times) if times else None

    def fail(self, lp: int, code: Code) -> None:
        """Gives up what is not stored of a logical partition, and all that comes later."""
        queue = self.queues.setdefault(lp, LogicalQueue(lp))
        queue.failed = code
        first = queue.messages[0].seq if queue.messages else queue.next_seq
        queue.messages.clear()
        queue.sent = 0
        self._actions.append(Failed(lp, first, code))

    def take_actions(self) -> list[Action]:
        """Returns the actions that are due, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def idle(self) -> bool:
        """True when everything has an outcome."""
        return not any(queue.messages for queue in self.queues.values())

    # What follows

    def _stored(self, queue: LogicalQueue, seq: int) -> None:
        """Sequences are contiguous, so everything before is stored as well."""
        queue.attempt = 0
        done = 0
        while queue.messages and queue.messages[0].last <= seq:
            queue.messages.popleft()
            done += 1
        queue.sent = max(0, queue.sent - done)
        if done:
            self._actions.append(Stored(queue.lp, seq))

    def _refused(
        self, queue: LogicalQueue, flight: Flight, answer: ProduceAnswer, now_ms: int
    ) -> None:
        code = answer.code
        # The broker has forgotten what it acknowledged: nothing can be sent again.
        lost = bool(queue.messages) and answer.expected < queue.messages[0].seq
        if code in FATAL or (code is Code.OUT_OF_SEQ and lost):
            self.fail(queue.lp, code)
            return
        self._begin_again(queue)
        if code is Code.CLOSED:
            self._redirect(queue, flight.pid, answer, now_ms)
        elif code in REFRESHES:
            queue.waits_for_route = self.route.version
            self._refresh(now_ms)
        else:
            self._back_off(queue, now_ms)
            if queue.attempt >= REFRESH_ATTEMPTS:
                # What CLOSED named may never be opened: its change was amended.
                self._refresh(now_ms)

    def _redirect(self, queue: LogicalQueue, pid: int, answer: ProduceAnswer, now_ms: int) -> None:
        if self.pid_of(queue.lp) != pid:
            # What is known by now leads elsewhere.
            return
        self._refresh(now_ms)
        newer = answer.to_version > self.route.version
        if newer and any(queue.lp in span for span in answer.targets):
            self.redirects[pid] = answer.targets
        else:
            queue.waits_for_route = self.route.version

    def _refresh(self, now_ms: int) -> None:
        if not self.refreshing:
            self.refreshing = True
            self._refresh_due_ms = now_ms + self.timeout_ms
            self._actions.append(RefreshRoute())

    def _back_off(self, queue: LogicalQueue, now_ms: int) -> None:
        wait = BACKOFF_MS[min(queue.attempt, len(BACKOFF_MS) - 1)]
        queue.attempt += 1
        queue.resume_ms = now_ms + wait + self._jitter(wait)

    def _begin_again(self, queue: LogicalQueue) -> None:
        """From the first unacknowledged message on, with the same sequences."""
        queue.sent = 0
        queue.round = self._next_ticket

    def pid_of(self, lp: int) -> int:
        """Returns the partition of a logical partition, as far as is known here."""
        pid = self.route.pid_of(lp)
        seen = {pid}
        while pid in self.redirects:
            pid = next(span.pid for span in self.redirects[pid] if lp in span)
            if pid in seen:
                break
            seen.add(pid)
        return pid

    def _pump(self, queue: LogicalQueue, now_ms: int) -> None:
        if queue.resume_ms > now_ms or queue.waits_for_route >= 0:
            return
        queue.resume_ms = 0
        while queue.sent < min(self.in_flight_max, len(queue.messages)):
            message = queue.messages[queue.sent]
            # Sequences have no gaps, so it is their number that counts.
            if message.last - queue.messages[0].seq >= self.in_flight_max:
                break
            queue.sent += 1
            self._send(queue, message, now_ms)

    def _send(self, queue: LogicalQueue, message: Message, now_ms: int) -> None:
        ticket = self._next_ticket
        self._next_ticket += 1
        pid = self.pid_of(queue.lp)
        queue.flights[ticket] = Flight(now_ms + self.timeout_ms, message.last, pid)
        self._tickets[ticket] = queue
        request = Produce(
            self.producer,
            self.epoch,
            queue.lp,
            message.seq,
            message.key,
            base=queue.messages[0].seq,
            time_ms=now_ms,
            source_pos=message.source_pos,
        )
        self._actions.append(SendRequest(pid, ticket, request))
