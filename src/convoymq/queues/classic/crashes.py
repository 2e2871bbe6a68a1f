"""The queues of a node that raised: why, and when they are opened anew.

Sans-IO: the clock is handed in. A queue that raises is stopped, the others of the node go on. It is
opened anew from what is on disk, after a while that doubles when it fails again soon.
"""

from __future__ import annotations

import traceback
from collections.abc import KeysView
from dataclasses import dataclass

from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError

REOPEN_MS = 1_000
REOPEN_MS_MAX = 60_000
"""A queue that has crashed is opened anew after so long; after twice as long each time, unless the
last time was twice `REOPEN_MS_MAX` ago."""


@dataclass(slots=True)
class Crash:
    """A queue that was stopped, or could not be opened."""

    reason: str
    delay_ms: int
    """So long after its files are free is it opened anew."""
    due_ms: int | None = None
    """Time at which it is opened anew, by the monotonic clock; None while its files are in use."""


class Crashes:
    """See the module text. `reason` of a group, `due`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._crashes: dict[int, Crash] = {}
        self._delays: dict[int, tuple[int, int]] = {}
        """Group -> (delay before it is opened anew, when it crashed): the last time."""

    @property
    def groups(self) -> KeysView[int]:
        """Groups whose queues are stopped."""
        return self._crashes.keys()

    def reason(self, group: int) -> str | None:
        """Returns why a queue was stopped; None when it was not."""
        crash = self._crashes.get(group)
        return None if crash is None else crash.reason

    def waits(self, group: int) -> bool:
        """Returns whether a queue was stopped, and may not be opened anew yet."""
        return group in self._crashes and group not in self.due()

    def due(self) -> list[int]:
        """Returns the groups whose queues may be opened anew."""
        now = self._clock.monotonic_ms()
        crashes = self._crashes.items()
        return [group for group, c in crashes if c.due_ms is not None and c.due_ms <= now]

    def add(self, group: int, reason: str) -> Crash:
        """Notes that a queue was stopped. It is due when its files are free (`let_reopen`)."""
        now = self._clock.monotonic_ms()
        delay, since = self._delays.get(group, (0, 0))
        again_soon = delay and now - since < 2 * REOPEN_MS_MAX
        delay = min(2 * delay, REOPEN_MS_MAX) if again_soon else REOPEN_MS
        self._delays[group] = delay, now
        crash = self._crashes[group] = Crash(reason, delay)
        return crash

    def let_reopen(self, crash: Crash) -> None:
        """Nothing uses the files of the queue any more."""
        crash.due_ms = self._clock.monotonic_ms() + crash.delay_ms

    def end(self, group: int) -> bool:
        """The queue is open again. Returns whether it was stopped."""
        return self._crashes.pop(group, None) is not None

    def forget(self, group: int) -> bool:
        """The queue is gone. Returns whether it was stopped."""
        self._delays.pop(group, None)
        return self.end(group)


def facts(error: Exception) -> dict[str, str]:
    """Returns what a log line says of an error: `reason` in a line, and `error` with its frames."""
    text = error.text if isinstance(error, BrokerError) else str(error)
    name = "" if isinstance(error, BrokerError) else f"{type(error).__name__}: "
    lines = "".join(traceback.format_exception(error))
    return {"reason": f"{name}{text}", "error": lines}
