"""Partitions' shells over one shared log (`quorum.cluster`)."""

from __future__ import annotations

from typing import Any

import msgspec

from convoymq.queues.large_answers import LargeAnswers
from convoymq.topics.machine.client import PartitionPublisherEvents
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from convoymq.topics.machine.queue import PartitionQueue
from tests.unit.queues.quorum.cluster import Events
from tests.unit.queues.stream.cluster import Answer, Result, StreamCluster, StreamNode
from tests.unit.topics.machine.support import SETTINGS


class PublisherEvents(Events, PartitionPublisherEvents):
    """Writes down what a publisher hears."""

    def __init__(self) -> None:
        super().__init__()
        #: (tags, code, version, bytes of the command)
        self.closed: list[tuple[list[int], str, int, bytes]] = []

    def on_closed(self, client: Any, command: Any, code: Any, to_version: int) -> None:
        self.heard.append(("closed", list(command.tags)))
        self.closed.append((list(command.tags), code.value, to_version, bytes(command.bytes())))


class PartitionNode(StreamNode):
    """A node whose queue is a partition."""

    def make_machine(self, settings: dict[str, Any]) -> Any:
        return PartitionGroupMachine(settings)

    def make_queue(self, **common: Any) -> Any:
        self.answers = LargeAnswers(self, self.await_room, common["clock"])
        return PartitionQueue(ask_node=self.ask_node, answers=self.answers, **common)

    def open(self) -> tuple[Any, PublisherEvents]:
        events = PublisherEvents()
        return self.queue.client(self.new_session(), events), events

    def ask_node(self, node: int, request: list[Any], wait_ms: int, answer: Answer) -> None:
        """As links do: what is sent is plain values."""

        def packed(reply: object, error: Any) -> None:
            answer(msgspec.msgpack.decode(msgspec.msgpack.encode(reply)), error)

        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
        super().ask_node(node, plain, wait_ms, packed)


class PartitionCluster(StreamCluster):
    """See the module docstring."""

    node_class = PartitionNode

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**SETTINGS, "created_version": 0, **settings})

    def tell(self, command: Any, node: int = 1) -> Any:
        """The outcome of a command, told by a node."""
        told = Result()
        self.nodes[node].queue.tell(command, told)
        self.run()
        return told.found
