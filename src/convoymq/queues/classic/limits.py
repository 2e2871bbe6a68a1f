"""Limits of a classic queue, from its arguments and its effective settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convoymq.model.tables import Table
from convoymq.queues.handing_over import KEEPS_ALL
from convoymq.routing.queue_arguments import takes_over_strictly
from convoymq.settings.table import CLASSIC, machine_settings

DROP_HEAD = "drop-head"
REJECT_PUBLISH = "reject-publish"
REJECT_PUBLISH_DLX = "reject-publish-dlx"


@dataclass(slots=True)
class Limits:
    """Limits by the queue's arguments; None = no limit."""

    message_ttl_ms: int | None = None
    length_max: int | None = None
    bytes_max: int | None = None
    overflow: str = DROP_HEAD
    dead_letters: bool = False
    """True if what leaves unacknowledged is published."""
    refused_are_dead_letters: bool = False
    """And so are publishes that the queue refuses because it is full."""
    single_active: bool = False
    single_active_strict: bool = True
    expires_ms: int | None = None
    keeps_all: bool = False
    """No message expires for the time being."""


def limits_from(arguments: Table, settings: Mapping[str, object]) -> Limits:
    """Returns what the queue's arguments and its effective settings ask for."""
    single = arguments.get("x-single-active-consumer")
    overflow = str(settings.get("overflow", ""))
    dead_letters = "dead-letter-exchange" in settings
    return Limits(
        **machine_settings(CLASSIC, settings),
        overflow=REJECT_PUBLISH if overflow.startswith(REJECT_PUBLISH) else DROP_HEAD,
        dead_letters=dead_letters,
        # Without an exchange it is reject-publish.
        refused_are_dead_letters=dead_letters and overflow == REJECT_PUBLISH_DLX,
        single_active=bool(single is not None and single.value),
        single_active_strict=takes_over_strictly(arguments),
        keeps_all=KEEPS_ALL in settings,
    )


def priority_max(arguments: Table) -> int:
    """Returns the highest priority that a queue tells from lower ones; 0 = it has none."""
    found = arguments.get("x-max-priority")
    return found.value if found is not None and isinstance(found.value, int) else 0
