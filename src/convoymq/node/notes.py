"""The log level of what cores say."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

NOTES_ERROR = frozenset({
    "queue.client_failed",
    "queue.commands_lost",
    "queue.crashed",
    "queue.mirror_failed",
    "queue.lost_with_disk",
    "queue.records_dropped",
    "raft.forward_malformed",
    "raft.frame_malformed",
    "raft.membership_forced",
    "raft.message_malformed",
    "raft.replica_damaged",
    "raft.replica_stopped",
    "raft.watch_failed",
    "raft.wipe_failed",
})  # fmt: skip
NOTES_WARNING = frozenset({
    "classic.minority",
    "queue.dead_letter_fallback",
    "queue.dead_letters_lost",
    "queue.dead_letters_waiting",
    "quorum.delivery_limit",
    "quorum.overflow_unserved",
})  # fmt: skip


def log_note(log: structlog.stdlib.BoundLogger, event: str, fields: Mapping[str, object]) -> None:
    """Logs what a core says, at the level that the event has."""
    if event in NOTES_ERROR:
        log.error(event, **fields)
    elif event in NOTES_WARNING:
        log.warning(event, **fields)
    else:
        log.info(event, **fields)
