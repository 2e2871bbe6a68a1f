"""Classes that planted bugs patch. Imported late: a bug is planted into what runs from source."""

from __future__ import annotations

from typing import Any


def machine() -> Any:
    from convoymq.queues.quorum.machine import QuorumMachine

    return QuorumMachine


def changes() -> Any:
    from convoymq.replication.raft.changes import MembershipChanges

    return MembershipChanges
