"""Records of messages that die for the first time (compiled only)."""

class FirstDeath:
    """Changes of a record by the first death of its message; `queues.deaths` says what they mean.

    Args:
        exchange: the dead-letter exchange, a short string.
        routing_key: with which the messages go on, a short string; None = each with its own.
        entry: fields that every entry of `x-death` begins with, encoded.
        first: those of the first death but its exchange, encoded.
        last: those of the newest one but its exchange, encoded.
    """

    def __init__(
        self, exchange: bytes, routing_key: bytes | None, entry: bytes, first: bytes, last: bytes
    ) -> None: ...
    def records(
        self, data: bytes, command: int, first: int, limit: int
    ) -> tuple[int, bytes, bytes]:
        """Records `first` and following of the ENQUEUE command at offset `command`, as their
        messages go on: at most `limit`, all with one routing key, about 1 MiB.

        Returns how many, an ENQUEUE command with them, and the routing key. None of them: the
        first has died before, carries CC or a time to wait for, is damaged, or its headers would
        be too large. Raises ValueError when it lies outside the command."""
