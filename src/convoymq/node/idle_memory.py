"""Gives memory back to the system that a node at rest does not use.

Starting and work leave two kinds of it: heap that is free, and mapped pages of code and constants,
which count as resident although they are the system's page cache. What is needed again comes back
with page faults, a millisecond of them: so it is done once when work has ended, and seldom while
there is any, first when what only its beginning needed is done.
"""

from __future__ import annotations

from convoymq.kernels.sockets import release_code, trim_malloc

REST_LOOKS = 5
"""Work has ended when nothing has changed for so many looks."""
WORK_LOOKS = 2
WORK_LOOKS_EVERY = 30
"""While there is work, memory is given back at that look, and after every so many more."""


class IdleMemory:
    """Schedule by which one process gives memory back."""

    def __init__(self) -> None:
        self._activity = -1
        self._looks = 0
        self._busy_looks = 0

    def release(self) -> None:
        """Gives back what can be given back now."""
        trim_malloc()
        release_code()

    def watch(self, activity: int) -> None:
        """Looks whether work has ended; called at regular times.

        Args:
            activity: a counter of whatever the process does.
        """
        if activity != self._activity:
            self._activity = activity
            self._looks = 0
            self._busy_looks += 1
            if self._busy_looks % WORK_LOOKS_EVERY == WORK_LOOKS:
                self.release()
            return
        self._looks += 1
        if self._looks == REST_LOOKS:
            self._busy_looks = 0
            self.release()
