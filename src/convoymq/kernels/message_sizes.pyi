"""Sizes of published messages, counted by range (compiled only)."""

BOUNDS: tuple[int, ...]
"""The largest size of each range but the last, which has no bound."""

class MessageSizes:
    """Counts of one protocol. About 2 ns a message."""

    total: int
    """Bytes of all messages."""
    def add(self, size: int) -> None:
        """Counts a message."""
    def up_to(self) -> list[int]:
        """Returns how many messages were at most as large as each of `BOUNDS`, and how many there
        were."""
