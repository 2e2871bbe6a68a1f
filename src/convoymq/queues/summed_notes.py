"""Events of one queue whose counts are summed up for a while before they are logged again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convoymq.model.clock import Clock

NOTE_EVERY_MS = 10_000


class SummedNotes:
    """Logs an event with a `count` at once, then every NOTE_EVERY_MS with the sum of what came
    since; events and reasons each have a sum of their own.

    Args:
        log: gets event and fields.
    """

    __slots__ = ("_clock", "_log", "_noted")

    def __init__(self, clock: Clock, log: Callable[[str, Mapping[str, object]], None]) -> None:
        self._clock = clock
        self._log = log
        #: (event, reason) -> messages that were noted since it was logged last.
        self._noted: dict[tuple[str, object], int] = {}

    def note(self, event: str, fields: Mapping[str, object]) -> None:
        """Logs an event, now or with the next sum; at once when it counts no messages."""
        count = fields.get("count")
        if not isinstance(count, int):
            self._log(event, fields)
            return
        reason = fields.get("reason")
        if (event, reason) in self._noted:
            self._noted[event, reason] += count
        else:
            self._log(event, fields)
            self._noted[event, reason] = 0
            self._clock.call_later(NOTE_EVERY_MS, self._log_sum, event, reason)

    def _log_sum(self, event: str, reason: object) -> None:
        count = self._noted.pop((event, reason))
        if count:
            self._log(
                event, {"count": count} if reason is None else {"count": count, "reason": reason}
            )
            self._noted[event, reason] = 0
            self._clock.call_later(NOTE_EVERY_MS, self._log_sum, event, reason)
