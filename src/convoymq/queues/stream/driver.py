"""Driver of streams.

The handle is imported for the first stream: a node without any does not carry them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.durations import duration_ms
from convoymq.model.late_imports import import_late
from convoymq.model.tables import Table
from convoymq.queues.driver import GroupDriver, GroupOptions, GroupQuestions
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.stream.machine import NO_LIMIT, StreamMachine
from convoymq.routing.queue_arguments import TAKE_OVER_ARGUMENT
from convoymq.routing.queue_types import PlacementKind, TypeRules

if TYPE_CHECKING:
    from convoymq.queues.stream.queue import StreamQueue


class StreamDriver(GroupDriver):
    """See the module text."""

    rules = TypeRules(
        name="stream",
        placement=PlacementKind.RAFT,
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
        foreign=frozenset(
            (
                "x-expires",
                "x-message-ttl",
                "x-dead-letter-exchange",
                "x-dead-letter-routing-key",
                "x-dead-letter-strategy",
                "x-max-length",
                "x-max-in-memory-length",
                "x-max-in-memory-bytes",
                "x-max-priority",
                "x-overflow",
                "x-queue-mode",
                "x-queue-version",
                "x-single-active-consumer",
                TAKE_OVER_ARGUMENT,
                "x-requeue-position",
                "x-priority-mode",
                "x-message-expiry",
                "x-quorum-initial-group-size",
                "x-quorum-target-group-size",
                "x-queue-master-locator",
                "x-delivery-limit",
                "x-consumer-timeout",
                "x-consumer-disconnected-timeout",
                "x-deduplication-count",
                "x-deduplication-time",
                "x-delayed-retry-type",
                "x-delayed-retry-min",
                "x-delayed-retry-max",
            )
        ),
        policies=frozenset(
            (
                "queue-leader-locator",
                "initial-cluster-size",
                "max-length-bytes",
                "max-age",
                "stream-max-segment-size-bytes",
            )
        ),
        policy_scope="streams",
    )
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
    settings: dict[str, int] = {}
    for name, argument in (
        ("max_bytes", "x-max-length-bytes"),
        ("segment_bytes", "x-stream-max-segment-size-bytes"),
    ):
        limit = arguments.get(argument)
        if limit is not None and isinstance(limit.value, int):
            settings[name] = limit.value
    age = arguments.get("x-max-age")
    if age is not None:
        settings["max_age_ms"] = duration_ms(age.term()) or NO_LIMIT
    return settings
