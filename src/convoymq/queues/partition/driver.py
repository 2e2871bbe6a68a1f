"""Driver of physical partitions of ordered topics.

Their queues are declared by what owns the topic, with a `PartitionSpec` as arguments, and deleted
by it. The handle is imported for the first partition: a node without any does not carry it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from convoymq.model.late_imports import import_late
from convoymq.model.tables import Field, Table
from convoymq.queues.driver import GroupDriver, GroupOptions, GroupQuestions
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.partition.machine import PartitionGroupMachine
from convoymq.queues.stream.driver import stream_settings
from convoymq.routing.queue_arguments import TYPE_ARGUMENT
from convoymq.routing.queue_types import Argument, TypeRules
from convoymq.routing.types import QueueType

if TYPE_CHECKING:
    from convoymq.queues.partition.queue import PartitionQueue

PID_ARGUMENT = "x-partition-id"
LO_ARGUMENT = "x-partition-lo"
HI_ARGUMENT = "x-partition-hi"
VERSION_ARGUMENT = "x-partition-version"
WEAK_ARGUMENT = "x-partition-weak"
QUEUE_PREFIX = "amq.partition."
"""Names of partitions begin so: clients can declare no such queue."""


def partition_queue_name(topic: str, pid: int) -> str:
    """Returns the name of the queue that keeps a physical partition."""
    return f"{QUEUE_PREFIX}{topic}.{pid}"


class PartitionSpec(NamedTuple):
    """Facts about a partition that are fixed when its queue is declared."""

    pid: int
    lo: int
    hi: int
    created_version: int
    weak: bool = False
    max_bytes: int = -1
    """Retention; -1: keep everything."""
    max_age: str = ""
    """Retention, as `x-max-age`; empty: keep everything."""


_NUMBERS = (
    (PID_ARGUMENT, "pid"),
    (LO_ARGUMENT, "lo"),
    (HI_ARGUMENT, "hi"),
    (VERSION_ARGUMENT, "created_version"),
    (WEAK_ARGUMENT, "weak"),
)


def partition_arguments(spec: PartitionSpec) -> Table:
    """Returns the arguments of the queue that keeps a partition."""
    values: dict[str, object] = {
        TYPE_ARGUMENT: QueueType.PARTITION.value,
        PID_ARGUMENT: spec.pid,
        LO_ARGUMENT: spec.lo,
        HI_ARGUMENT: spec.hi,
        VERSION_ARGUMENT: spec.created_version,
        WEAK_ARGUMENT: int(spec.weak),
    }
    if spec.max_bytes >= 0:
        values["x-max-length-bytes"] = spec.max_bytes
    if spec.max_age:
        values["x-max-age"] = spec.max_age
    return Table.of(values)


def _check_number(field: Field, _arguments: Table) -> str | None:
    return None if isinstance(field.value, int) and field.value >= 0 else "invalid_number"


class PartitionDriver(GroupDriver):
    """See the module text."""

    rules = TypeRules(
        name=QueueType.PARTITION.value,
        is_replicated=True,
        is_managed=True,
        serves=frozenset(
            (
                "x-max-length-bytes",
                "x-queue-leader-locator",
                "x-trace",
                "x-max-age",
                "x-stream-max-segment-size-bytes",
                "x-initial-cluster-size",
            )
        ),
        own=tuple(Argument(name, _check_number) for name, _ in _NUMBERS),
    )
    group_size_argument = "x-initial-cluster-size"
    heeds_conditions = False

    def make_machine(self, arguments: Table) -> PartitionGroupMachine:
        """See `GroupDriver`."""
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
        """See `GroupDriver`."""
        import_late("convoymq.queues.partition.queue")
        from convoymq.queues.partition.queue import PartitionQueue

        assert ask.node is not None
        return PartitionQueue(ask_node=ask.node, answers=answers, **options)
