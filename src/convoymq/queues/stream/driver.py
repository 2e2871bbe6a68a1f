"""Driver of streams.

The handle is imported for the first stream: a node without any does not carry them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.late_imports import import_late
from convoymq.model.tables import Table
from convoymq.queues.driver import GroupDriver, GroupOptions, GroupQuestions
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.stream.machine import StreamMachine
from convoymq.routing.policies import declared_settings
from convoymq.routing.queue_types import PlacementKind, rules_in_table
from convoymq.settings.table import STREAM, machine_settings

if TYPE_CHECKING:
    from convoymq.queues.stream.queue import StreamQueue


class StreamDriver(GroupDriver):
    """See the module text."""

    rules = rules_in_table("stream", PlacementKind.RAFT, "streams")
    group_size_argument = "x-initial-cluster-size"
    # As in RabbitMQ.
    heeds_conditions = False

    def make_machine(self, arguments: Table, release: str) -> StreamMachine:
        return StreamMachine(stream_settings(arguments))

    def make_handle(
        self, options: GroupOptions, ask: GroupQuestions, answers: LargeAnswers
    ) -> StreamQueue:
        import_late("convoymq.queues.stream.queue")
        from convoymq.queues.stream.queue import StreamQueue

        assert ask.node is not None
        return StreamQueue(ask_node=ask.node, answers=answers, **options)


def stream_settings(arguments: Table) -> dict[str, int]:
    """Returns what the machine of a stream takes from its declaration."""
    return machine_settings(STREAM, declared_settings(arguments))
