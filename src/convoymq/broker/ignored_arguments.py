"""Warnings about arguments of declarations and consumers that do nothing."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from convoymq.model.clock import Clock

log = structlog.get_logger()

PERIOD_MS = 60_000
"""The same declaration is warned about once in this time: clients repeat theirs when they connect
again."""
WARNINGS_MAX = 20
"""As many different ones are warned about in it."""


class IgnoredArguments:
    """Logs them, not more often than somebody would read it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_ms = clock.monotonic_ms()
        self._said: set[tuple[str, str, str, tuple[str, ...]]] = set()
        self._suppressed = 0

    def warn(self, kind: str, vhost: str, name: str, arguments: Sequence[str]) -> None:
        """Says that a client gave arguments without effect.

        Args:
            kind: `queue`, `exchange` or `consumer`.
            name: of the queue, the exchange, or the queue that is consumed.
        """
        if not arguments:
            return
        now = self._clock.monotonic_ms()
        suppressed = 0
        if now - self._begin_ms >= PERIOD_MS:
            self._begin_ms = now
            self._said.clear()
            suppressed, self._suppressed = self._suppressed, 0
        case = (kind, vhost, name, tuple(arguments))
        if case in self._said:
            return
        if len(self._said) >= WARNINGS_MAX:
            self._suppressed += 1
            return
        self._said.add(case)
        log.warning(
            "broker.argument_ignored",
            kind=kind,
            vhost=vhost,
            name=name,
            arguments=list(arguments),
            suppressed=suppressed,
        )
