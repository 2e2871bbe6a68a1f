"""Runs of messages by their places in the log (compiled only)."""

from array import array

Run = tuple[int, int, int, int, int, int, int, int]
"""As in `queues.quorum.runs`."""

class PlaceHeap:
    """Runs that come in any order; the one that was published first is next. 40 bytes a run."""

    messages: int
    """Of all runs."""

    def __len__(self) -> int:
        """Returns the number of runs."""

    def add(self, run: Run) -> None:
        """Takes a run. Cost: O(log runs)."""

    def head(self) -> Run | None:
        """Returns the oldest run; None = there is none."""

    def head_place(self) -> tuple[int, int] | None:
        """Returns (entry index, offset above record) of the oldest run; None = there is none."""

    def take(self, limit: int) -> Run:
        """Removes at most `limit` messages: of the oldest run, and of those that continue it in the
        log with the same counts and mark. There must be one. Cost: O(log runs) for each run."""

    def runs(self) -> list[Run]:
        """Returns all runs, the oldest first. Cost: O(runs log runs)."""

    def indexes(self) -> list[int]:
        """Returns the entry index of every run."""

    def memory_bytes(self) -> int:
        """Returns the bytes of memory."""

    def words(self) -> array[int]:
        """Returns the runs, the oldest first, in five words each: index · offset, first · count,
        size · acquired_count, failed_delivery_count · mark."""
