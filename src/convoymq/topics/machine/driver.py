"""Driver of physical partitions of ordered topics.

Their queues are declared by the topic, with what is fixed about the partition as arguments, and
deleted by it. Machine and handle are imported for the first partition: a node without any does not
carry them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.late_imports import import_late
from convoymq.model.tables import Field, Table
from convoymq.queues.driver import GroupDriver, GroupOptions, GroupQuestions
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.stream.driver import stream_settings
from convoymq.routing.policies import TOPICS
from convoymq.routing.queue_types import Argument, PlacementKind, rules_in_table
from convoymq.topics.machine.versions import PARTITION

if TYPE_CHECKING:
    from convoymq.topics.machine.group_machine import PartitionGroupMachine
    from convoymq.topics.machine.queue import PartitionQueue

TOPIC_ARGUMENT = "x-partition-topic"
_NUMBERS = (
    ("x-partition-pid", "pid"),
    ("x-partition-lo", "lo"),
    ("x-partition-hi", "hi"),
    ("x-partition-version", "created_version"),
)
"""Argument -> setting of the machine."""


def _check_number(field: Field, _arguments: Table) -> str | None:
    return None if isinstance(field.value, int) and field.value >= 0 else "invalid_number"


def _check_name(field: Field, _arguments: Table) -> str | None:
    return None if isinstance(field.value, bytes) else "invalid_name"


class PartitionDriver(GroupDriver):
    """See the module text."""

    rules = rules_in_table(
        PARTITION,
        PlacementKind.RAFT,
        TOPICS,
        owner_argument=TOPIC_ARGUMENT,
        own=(
            Argument(TOPIC_ARGUMENT, _check_name),
            *(Argument(name, _check_number) for name, _ in _NUMBERS),
        ),
    )
    group_size_argument = "x-initial-cluster-size"
    heeds_conditions = False

    def make_machine(self, arguments: Table, release: str) -> PartitionGroupMachine:
        import_late("convoymq.topics.machine.group_machine")
        from convoymq.topics.machine.group_machine import PartitionGroupMachine

        settings = stream_settings(arguments)
        for name, setting in _NUMBERS:
            field = arguments.get(name)
            assert field is not None, name
            assert isinstance(field.value, int), name
            settings[setting] = field.value
        return PartitionGroupMachine(settings)

    def make_handle(
        self, options: GroupOptions, ask: GroupQuestions, answers: LargeAnswers
    ) -> PartitionQueue:
        import_late("convoymq.topics.machine.queue")
        from convoymq.topics.machine.queue import PartitionQueue

        assert ask.node is not None
        return PartitionQueue(ask_node=ask.node, answers=answers, fence=ask.fence, **options)
