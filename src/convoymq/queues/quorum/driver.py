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
from convoymq.routing.queue_arguments import takes_over_strictly
from convoymq.routing.queue_types import PlacementKind, rules_in_table

if TYPE_CHECKING:
    from convoymq.queues.quorum.queue import QuorumQueue


class QuorumDriver(GroupDriver):
    """See the module text."""

    rules = rules_in_table("quorum", PlacementKind.RAFT, "quorum_queues")
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
