"""Driver of quorum queues.

The handle is imported for the first queue: a node without any does not carry them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.model.late_imports import import_late
from convoymq.model.tables import Table
from convoymq.queues.driver import GroupDriver, GroupOptions, GroupQuestions
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.settings import settings_of_release
from convoymq.routing.queue_arguments import (
    FILTER_ARGUMENTS,
    TAKE_OVER_ARGUMENT,
    takes_over_strictly,
)
from convoymq.routing.queue_types import PlacementKind, TypeRules

if TYPE_CHECKING:
    from convoymq.queues.quorum.queue import QuorumQueue

SINCE_VERSION_2 = (
    "x-message-ttl", "x-expires", "x-max-length", "x-max-length-bytes", "x-overflow",
    "x-dead-letter-exchange", "x-dead-letter-routing-key", "x-dead-letter-strategy",
    "x-consumer-timeout", "x-consumer-disconnected-timeout", "x-requeue-position",
    "x-priority-mode", "x-message-expiry", "x-deduplication-count", "x-deduplication-time",
    "x-delayed-retry-type", "x-delayed-retry-min", "x-delayed-retry-max",
)  # fmt: skip
"""Arguments that the first version of the machine does not know (ADR 0043, ADR 0044, ADR 0049, ADR
0050, ADR 0052)."""


class QuorumDriver(GroupDriver):
    """See the module text."""

    rules = TypeRules(
        name="quorum",
        placement=PlacementKind.RAFT,
        serves=frozenset(
            (
                "x-single-active-consumer",
                TAKE_OVER_ARGUMENT,
                "x-quorum-initial-group-size",
                "x-quorum-target-group-size",
                "x-queue-leader-locator",
                "x-delivery-limit",
                *SINCE_VERSION_2,
                "x-trace",
            )
        ),
        first_versions=dict.fromkeys(SINCE_VERSION_2, 2),
        # Accepted without effect, as RabbitMQ does since 3.10.
        kept=frozenset(("x-max-in-memory-length", "x-max-in-memory-bytes")),
        foreign=frozenset(
            (
                "x-max-priority",
                "x-queue-mode",
                "x-queue-version",
                "x-queue-master-locator",
                "x-max-age",
                "x-stream-max-segment-size-bytes",
                "x-stream-filter-size-bytes",
                "x-initial-cluster-size",
                *FILTER_ARGUMENTS,
            )
        ),
        # The first two are accepted without effect, as RabbitMQ does since 3.10.
        policies=frozenset(
            (
                "max-in-memory-length",
                "max-in-memory-bytes",
                "queue-leader-locator",
                "delivery-limit",
                "message-ttl",
                "expires",
                "max-length",
                "max-length-bytes",
                "dead-letter-exchange",
                "dead-letter-routing-key",
                "dead-letter-strategy",
                "overflow",
                "consumer-timeout",
                "consumer-disconnected-timeout",
                "requeue-position",
                "priority-mode",
                "message-expiry",
                "deduplication-count",
                "deduplication-time",
                "delayed-retry-type",
                "delayed-retry-min",
                "delayed-retry-max",
                "target-group-size",
            )
        ),
        policy_scope="quorum_queues",
    )
    group_size_argument = "x-quorum-initial-group-size"

    def make_machine(self, arguments: Table, release: str) -> QuorumMachine:
        return QuorumMachine({**settings_of_release(release), **machine_settings(arguments)})

    def make_handle(
        self, options: GroupOptions, ask: GroupQuestions, answers: LargeAnswers
    ) -> QuorumQueue:
        import_late("convoymq.queues.quorum.queue")
        from convoymq.queues.quorum.queue import QuorumQueue

        return QuorumQueue(ask_node=ask.reservation, dead_letters=ask.dead_letters, **options)


def machine_settings(arguments: Table) -> dict[str, int]:
    """Returns what the machine of a quorum queue takes from its declaration."""
    settings: dict[str, int] = {}
    limit = arguments.get("x-delivery-limit")
    if limit is not None and isinstance(limit.value, int):
        settings["delivery_limit"] = limit.value
    single = arguments.get("x-single-active-consumer")
    if single is not None:
        settings["single_active"] = bool(single.value)
    if not takes_over_strictly(arguments):
        settings["single_active_strict"] = False
    return settings
