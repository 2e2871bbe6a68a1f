"""Simulated producers: the real client, an application, and new sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoymq.sim.topics import events
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.rules import producer as producing
from convoymq.topics.rules.answers import ProduceAnswer, ProducerAnswer
from convoymq.topics.rules.commands import OpenProducer, Produce
from convoymq.topics.rules.producer import TopicProducer
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Route

if TYPE_CHECKING:
    from convoymq.sim.topics.world import TopicWorld

TIMEOUT_MS = 45


@dataclass(frozen=True, slots=True)
class Sourced:
    """A message of the application, in its own order."""

    msg: int
    key: bytes
    lp: int
    time_ms: int


class SimProducer:
    """An application with a source of messages, and its producer sessions."""

    def __init__(self, world: TopicWorld, producer: int) -> None:
        self.world = world
        self.producer = producer
        self.epoch = 1
        self.source: list[Sourced] = []
        self.core = self._session()
        self._opening: dict[int, int] | None = None
        """Last source positions by logical partition, while a session asks for them."""
        self._asked_ms = 0
        self._session_route = world.metadata.topic.route
        self._waking = -1

    def _session(self) -> TopicProducer:
        world = self.world
        return TopicProducer(
            self.producer,
            self.epoch,
            world.metadata.topic.route,
            timeout_ms=TIMEOUT_MS,
            jitter=lambda bound: int(world.scheduler.rng.random() * bound),
        )

    @property
    def idle(self) -> bool:
        """True when everything is stored."""
        return self._opening is None and self.core.idle

    def waits_since(self, time_ms: int) -> bool:
        """Returns whether a message has had no answer since before a time."""
        confirmed = self.world.confirmed
        return any(each.time_ms < time_ms and each.msg not in confirmed for each in self.source)

    def produce(self, msg: int, key: bytes) -> None:
        """The application has one more message."""
        sourced = Sourced(msg, key, self.world.lp_of(key), self.world.now)
        self.source.append(sourced)
        if self._opening is None:
            self._send(sourced)
            self._run()

    def _send(self, sourced: Sourced) -> None:
        world = self.world
        position = b"%08d" % sourced.msg
        queue = self.core.queues.get(sourced.lp)
        seq = 1 if queue is None else queue.next_seq
        world.messages[self.producer, self.epoch, sourced.lp, seq] = sourced.msg
        world.trace.append(
            events.Send(
                world.now,
                sourced.key,
                sourced.lp,
                self.producer,
                self.epoch,
                seq,
                sourced.msg,
            )
        )
        self.core.send(sourced.lp, sourced.key, world.now, position)

    def _run(self) -> None:
        world = self.world
        is_forgotten = False
        for action in self.core.take_actions():
            match action:
                case producing.SendRequest(pid, ticket, request):
                    world.network.send((self.producer, pid), self._request, pid, ticket, request)
                case producing.RefreshRoute():
                    world.network.send((self.producer, "k"), self._refresh, self.epoch)
                case producing.Stored(lp, seq):
                    self._confirm(lp, seq)
                case producing.Failed(_, _, Code.OUT_OF_SEQ) if world.plan.has("forget"):
                    is_forgotten = True
                case producing.Failed(lp, _, code):
                    now = world.now
                    world.trace.append(events.Abandoned(now, self.producer, lp, code.value))
        if is_forgotten:
            self.restart()
            return
        due = self.core.due_ms()
        if due is not None and (self._waking < world.now or due < self._waking):
            self._waking = max(due, world.now + 1)
            world.at(self._waking, self._wake, self._waking)

    def _confirm(self, lp: int, seq: int) -> None:
        world = self.world
        while seq:
            msg = world.messages[self.producer, self.epoch, lp, seq]
            if msg in world.confirmed:
                break
            self._confirm_message(msg)
            seq -= 1

    def _confirm_message(self, msg: int) -> None:
        if msg not in self.world.confirmed:
            self.world.confirmed.add(msg)
            self.world.trace.append(events.Confirmed(self.world.now, msg))

    def _wake(self, time: int) -> None:
        if time == self._waking:
            self._waking = -1
            self.core.tick(self.world.now)
            self._run()

    def _request(self, pid: int, ticket: int, request: Produce) -> None:
        world = self.world
        partition = world.partitions.get(pid)
        if partition is None:
            answer = world.answer_for_missing(pid)
            world.network.send((pid, self.producer), self._answered, request.epoch, ticket, answer)
            return
        partition.submit(
            request,
            lambda answer: world.network.send(
                (pid, self.producer), self._answered, request.epoch, ticket, answer
            ),
        )

    def _answered(self, epoch: int, ticket: int, answer: ProduceAnswer) -> None:
        if epoch == self.epoch and self._opening is None:
            self.core.on_answer(ticket, answer, self.world.now)
            self._run()

    def _refresh(self, epoch: int) -> None:
        world = self.world
        if world.metadata.controller.acting is not None:
            route = world.metadata.topic.route
            world.network.send(("k", self.producer), self._refreshed, epoch, route)

    def _refreshed(self, epoch: int, route: Route) -> None:
        if epoch == self.epoch and self._opening is None:
            self.core.on_route(route, self.world.now)
            self._run()

    # A new session

    def restart(self) -> None:
        """The process is replaced: what was not confirmed is found out from source positions."""
        if self._opening is not None:
            return
        self.epoch += 1
        self._opening = {}
        self._session_route = self.world.metadata.topic.route
        self._covered: dict[int, bool] = {}
        self._ask(self.epoch)

    def _ask(self, epoch: int) -> None:
        world = self.world
        if epoch != self.epoch or self._opening is None:
            return
        self._session_route = world.metadata.topic.route
        for span in self._session_route.spans:
            if not all(lp in self._covered for lp in range(span.lo, span.hi)):
                world.network.send((self.producer, span.pid), self._open, span.pid, epoch)
        world.after(TIMEOUT_MS, self._ask, epoch)

    def _open(self, pid: int, epoch: int) -> None:
        world = self.world
        partition = world.partitions.get(pid)
        if partition is not None:
            partition.submit(
                OpenProducer(self.producer, epoch),
                lambda answer: world.network.send(
                    (pid, self.producer), self._session_opened, pid, epoch, answer
                ),
            )

    def _session_opened(self, pid: int, epoch: int, answer: Outcome) -> None:
        if epoch != self.epoch or self._opening is None or pid not in self._session_route.pids:
            return
        if not isinstance(answer, ProducerAnswer) or answer.code is not Code.OK:
            return
        for lp, _, position in answer.stored:
            self._opening[lp] = int(position)
        span = self._session_route.span_of(pid)
        self._covered.update(dict.fromkeys(range(span.lo, span.hi), True))
        if len(self._covered) == self._session_route.logical:
            self._resume(self._opening)

    def _resume(self, stored: dict[int, int]) -> None:
        self._opening = None
        self.core = self._session()
        for sourced in self.source:
            # What it knows to be stored may be forgotten there.
            is_known = sourced.msg in self.world.confirmed
            if sourced.msg > stored.get(sourced.lp, -1) and not is_known:
                self._send(sourced)
            else:
                self._confirm_message(sourced.msg)
        self._run()
