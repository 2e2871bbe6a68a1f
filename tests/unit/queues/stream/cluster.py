"""Streams' shells over one shared log (`quorum.cluster`); questions between nodes are fakes too."""

from __future__ import annotations

from collections import deque
from typing import Any

from convoymq.kernels.entries import Entry
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.model.tables import Field
from convoymq.queues.interface import ConsumerSpec
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.stream.machine import StreamMachine
from convoymq.queues.stream.queue import Answer, StreamQueue
from convoymq.storage.types import EntryGone
from tests.unit.queues.quorum.cluster import GROUP, Cluster, Node


class StreamNode(Node):
    """A node whose queue is a stream."""

    cluster: StreamCluster

    def make_machine(self, settings: dict[str, Any]) -> Any:
        return StreamMachine(settings)

    def make_queue(self, **common: Any) -> Any:
        self.answers = LargeAnswers(self, self.await_room, common["clock"])
        return StreamQueue(ask_node=self.ask_node, answers=self.answers, **common)

    def check(self, machine: Any) -> None:
        machine.check_invariants()

    def read_span(self, group: int, index: int, max_bytes: int) -> list[Entry]:
        if index in self.cluster.gone:
            raise EntryGone(index)
        end = index if index + 1 in self.cluster.gone else index + 1
        return self.cluster.log[index - 1 : end]

    def ask_node(self, node: int, request: list[Any], wait_ms: int, answer: Answer) -> None:
        self.cluster.questions.append((self.id, node, request, answer))


class StreamCluster(Cluster):
    """See the module docstring."""

    node_class = StreamNode
    nodes: dict[int, StreamNode]  # type: ignore[assignment]

    def __init__(self, **settings: Any) -> None:
        self.questions: deque[tuple[int, int, list[Any], Answer]] = deque()
        self.asked: list[tuple[int, int, list[Any]]] = []
        self.gone: set[int] = set()
        super().__init__(**settings)

    def fall_behind(self, id: int) -> None:
        """A node's replica catches up or waits to be taken in, and the leader serves meanwhile."""
        node = self.nodes[id]
        assert node.own is not None
        node.own.is_behind = True
        node.queue.on_leader(GROUP, self.leader, self.term)

    def catch_up(self, id: int) -> None:
        """It has caught up. Clients are not told: they know the leader."""
        node = self.nodes[id]
        assert node.own is not None
        node.own.is_behind = node.stalled = False
        node.own.faulty = ""

    def run(self) -> None:
        """Lets everything happen, what is due at once included."""
        while True:
            super().run()
            self.clock.advance(0)
            if not self._ask() and not self._busy():
                return

    def _busy(self) -> bool:
        return any(node.builder.used for node in self.nodes.values()) or any(
            due <= self.clock.time_ms for due, *_ in self.clock.timers
        )

    def _ask(self) -> bool:
        some = bool(self.questions)
        for _ in range(len(self.questions)):
            source, target, request, answer = self.questions.popleft()
            self.asked.append((source, target, request))
            if {source, target} & self.cut:
                answer(None, Unavailable("not connected"))
                continue
            self.nodes[target].queue.serve(
                request, lambda reply, answer=answer: answer(reply, None), source
            )
        return some


def start(value: str | int) -> Field:
    """The argument x-stream-offset."""
    return Field("S", value.encode()) if isinstance(value, str) else Field("l", value)


def reading(at: Field | None = None, number: int = 1, prefetch: int = 100, **arguments: Any) -> Any:
    """A consumer of a stream."""
    return ConsumerSpec(
        number=number,
        tag=f"c{number}",
        prefetch=prefetch,
        no_ack=False,
        arguments=arguments,
        stream_offset=at,
    )


class Result:
    """What a callback of `StreamQueue` got."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, BrokerError | None]] = []

    def __call__(self, found: Any, error: BrokerError | None) -> None:
        self.calls.append((found, error))

    @property
    def found(self) -> Any:
        ((found, error),) = self.calls
        assert error is None
        return found

    @property
    def error(self) -> BrokerError | None:
        ((_, error),) = self.calls
        return error
