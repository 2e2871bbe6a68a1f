"""Settings of a quorum queue, on which all its replicas agree."""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.queues.group_machine import Settings

DELIVERY_LIMIT_DEFAULT = 20
DISCONNECT_TIMEOUT_MS_DEFAULT = 60_000


def with_defaults(settings: Mapping[str, int] | None) -> Settings:
    """All settings, where only some are given."""
    return {
        # Failed deliveries that a message may have; -1 = no limit.
        "delivery_limit": DELIVERY_LIMIT_DEFAULT,
        # After this time the messages of a suspected node's consumers return.
        "disconnect_timeout_ms": DISCONNECT_TIMEOUT_MS_DEFAULT,
        # RabbitMQ's quorum queues ignore the flag of basic.consume.
        "exclusive_honoured": False,
        "single_active": False,
        # The next consumer begins when the one before it holds nothing any more (ADR 0027).
        "single_active_strict": True,
        **(settings or {}),
    }
