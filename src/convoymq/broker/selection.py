"""Selection of the replicated queues that an operation for many of them applies to."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import PreconditionFailed
from convoymq.model.patterns import compile_pattern
from convoymq.routing.queue_types import PlacementKind

ALL = "all"
TYPES = (ALL, "quorum", "stream")
WITH_MIRRORED = (ALL, "classic", "quorum", "stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Queues of a type whose names, and those of their virtual hosts, match a pattern anywhere."""

    type: str = "quorum"
    """`all`, or the name of a type of replicated queues."""
    vhost_pattern: str = ".*"
    queue_pattern: str = ".*"
    mirrored: bool = False
    """The operation applies to mirrored queues as well."""

    def check(self) -> None:
        """Raises PreconditionFailed for what selects nothing."""
        if self.type not in (WITH_MIRRORED if self.mirrored else TYPES):
            raise PreconditionFailed(f"queues of type {self.type!r} have no replicas")
        for pattern in (self.vhost_pattern, self.queue_pattern):
            try:
                compile_pattern(pattern)
            except PreconditionFailed as error:
                raise PreconditionFailed(f"pattern {pattern!r}: {error.text}") from None

    def matches(self, record: QueueRecord) -> bool:
        """Returns whether a queue is selected."""
        return (
            record.placement is not PlacementKind.HOME
            and (self.mirrored or record.placement is PlacementKind.RAFT)
            and self.type in (ALL, record.type.value)
            and compile_pattern(self.vhost_pattern).search(record.vhost)
            and compile_pattern(self.queue_pattern).search(record.name)
        )


def check_group(record: QueueRecord) -> None:
    """Raises PreconditionFailed for a queue that is no Raft group: it has no replicas of a log."""
    if record.placement is not PlacementKind.RAFT:
        raise PreconditionFailed("classic_queue_not_supported: it has no replicas")
