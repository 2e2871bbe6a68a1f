"""Requests between the handles of a queue on different nodes, and this node's answers."""

from __future__ import annotations

from contextlib import AsyncExitStack

from convoymq.broker.local_queues import LocalQueues
from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError, NotFound, PeerError
from convoymq.model.tasks import Tasks
from convoymq.queues.driver import Answer, GroupQuestions
from convoymq.transport.control import ControlPlane, Reply
from convoymq.transport.frame_kinds import (
    KIND_QUEUE_COUNTS,
    KIND_RESERVATION,
    KIND_SESSIONS,
    KIND_STREAM,
)

COUNTS_TIMEOUT_S = 2.0
RESERVATION_TIMEOUT_S = 15.0


class QueueQuestions:
    """Asks other nodes."""

    def __init__(self, control: ControlPlane, tasks: Tasks) -> None:
        self._control = control
        self._tasks = tasks

    def of_groups(self) -> GroupQuestions:
        """Returns the questions that handles of groups ask."""
        return GroupQuestions(
            counts=self._ask_counts, reservation=self._ask_reservation, node=self._ask_stream
        )

    async def _ask_counts(self, leader: int, group: int) -> tuple[int, int]:
        found = await self._control.request(leader, KIND_QUEUE_COUNTS, group, COUNTS_TIMEOUT_S)
        return int(found[0]), int(found[1])

    async def _ask_reservation(self, node: int, request: object) -> object:
        return await self._control.request(node, KIND_RESERVATION, request, RESERVATION_TIMEOUT_S)

    def _ask_stream(self, node: int, request: list[object], wait_ms: int, answer: Answer) -> None:
        self._ask(node, KIND_STREAM, request, wait_ms, answer)

    def ask_sessions(self, node: int, request: list[object], wait_ms: int, answer: Answer) -> None:
        """Asks for live sessions; see `session_audit.Ask`."""
        self._ask(node, KIND_SESSIONS, request, wait_ms, answer)

    def _ask(
        self, node: int, kind: int, request: list[object], wait_ms: int, answer: Answer
    ) -> None:
        async def ask() -> None:
            try:
                reply = await self._control.request(node, kind, request, wait_ms / 1000)
            except BrokerError as error:
                answer(None, error)
            else:
                answer(reply, None)

        self._tasks.spawn(ask())


class QueueAnswers:
    """Answers other nodes from this one's queues."""

    def __init__(self, control: ControlPlane, local: LocalQueues, clock: Clock) -> None:
        self._local = local
        self._clock = clock
        control.handle(KIND_QUEUE_COUNTS, self._on_counts)
        control.handle_replying(KIND_RESERVATION, self._on_reservation)
        control.handle_replying(KIND_STREAM, self._on_stream)
        control.handle(KIND_SESSIONS, self._on_sessions)

    async def _on_counts(self, node: int, group: object) -> tuple[int, int]:
        queue = self._local.queues.get(group) if isinstance(group, int) else None
        if queue is None:
            raise NotFound("the queue is not here")
        return queue.local_counts()

    async def _on_reservation(self, node: int, body: object, reply: Reply) -> None:
        if not isinstance(body, list) or not body or not isinstance(body[0], int):
            raise PeerError(f"malformed request about a reservation from node {node}")
        group, *request = body
        queue = self._local.get(group)
        if queue is None:
            raise NotFound("the queue is not here")
        until_ms = self._clock.monotonic_ms() + int(RESERVATION_TIMEOUT_S * 1000)
        async with AsyncExitStack() as turn:
            room = self._local.answers.room(node, until_ms)
            reply(await queue.serve_reservation(request, lambda: turn.enter_async_context(room)))

    async def _on_stream(self, node: int, body: object, reply: Reply) -> None:
        if not isinstance(body, list) or len(body) < 2 or not isinstance(body[1], int):
            raise PeerError(f"malformed request about a stream from node {node}")
        queue = self._local.queues.get(body[1])
        if queue is None:
            raise NotFound("the stream is not here")
        queue.serve(body, reply, node)

    async def _on_sessions(self, node: int, body: object) -> object:
        assert self._local.watch is not None
        return self._local.watch.serve(body)
