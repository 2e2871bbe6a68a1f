"""The message-ids that a queue remembers (compiled only)."""

ID_HEAD_BYTES: int
"""Of a packed id, before its bytes: u64 time in ms, u8 length."""

class MessageIdWindow:
    """The latest distinct message-ids of a queue.

    Args:
        known_max: how many, at least 1.
        bytes_max: of all packed ids; the oldest go where there is no room for another.
    """

    def __init__(self, known_max: int, bytes_max: int) -> None: ...
    def __len__(self) -> int:
        """Returns how many ids are known."""

    def size_bytes(self) -> int:
        """Returns the number of bytes of the packed ids."""

    def memory_bytes(self) -> int:
        """Returns the number of bytes of memory, the hash table's included."""

    def oldest_ms(self) -> int | None:
        """Returns when the oldest id came; None = none is known."""

    def forget_until(self, time_ms: int) -> None:
        """Forgets the ids that came at that time or before."""

    def new_runs(
        self, data: bytes, command: int, first: int, count: int, time_ms: int
    ) -> list[int] | None:
        """Remembers the ids of `count` records from `first` on of the ENQUEUE command at byte
        `command`, which come at that time; times never descend. Returns None when no id is known
        yet; otherwise (first, count, body bytes) of each run of records that are no repeats, flat.
        A record without an id, with an empty one, or written by a dead-lettering queue is no
        repeat, and is not remembered. Raises ValueError when the records are not in the command."""

    def pack(self) -> bytes:
        """Returns the ids, the oldest first: u64 time in ms, u8 length, bytes."""

    def unpack(self, packed: bytes) -> None:
        """Replaces the ids by those of `pack`. Raises ValueError."""
