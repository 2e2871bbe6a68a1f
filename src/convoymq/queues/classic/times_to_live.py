# cython: annotation_typing=False
"""The time to live that a queue gave its messages, by position. Pure.

A change counts for messages from a position on, so each keeps the time that was in force when it
was published. Every entry is true for its own position: entries may come in any order, and twice.
"""

from __future__ import annotations

from bisect import bisect_right, insort

ENTRIES_MAX = 4096
"""So many changes are known; messages from before have no limit."""
Entry = tuple[int, int | None]


class TimesToLive:
    """See the module text."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        """(position, ms): the time of messages from there on; None = they have no limit."""

    def add(self, position: int, ttl_ms: int | None) -> None:
        """Messages from a position on have a time, up to the next entry."""
        at = bisect_right(self.entries, position, key=_position_of)
        if at and self.entries[at - 1][0] == position:
            self.entries[at - 1] = (position, ttl_ms)
        else:
            insort(self.entries, (position, ttl_ms), key=_position_of)
        del self.entries[:-ENTRIES_MAX]

    def at(self, position: int) -> Entry:
        """Returns the entry that counts for a position."""
        at = bisect_right(self.entries, position, key=_position_of)
        return self.entries[at - 1] if at else (0, None)

    def join(self) -> None:
        """Forgets entries that say what the one before does; all have come."""
        known: list[Entry] = []
        for entry in self.entries:
            if not known or entry[1] != known[-1][1]:
                known.append(entry)
        self.entries = known


def _position_of(entry: Entry) -> int:
    return entry[0]
