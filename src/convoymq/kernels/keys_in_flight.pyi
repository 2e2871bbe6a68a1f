"""Messages of a partition that a member of a group has begun with, one of each key at a time."""

class KeysInFlight:
    """Messages in flight, and those that wait for one of their key.

    A message that was ready is in flight when it is taken. Every message is admitted once. Cost:
    60 bytes for each message.
    """

    heads: int
    """Messages that are in flight or ready: one of each key."""
    waiting: int
    """Messages behind those."""
    ready: int
    """Messages that nobody has begun with, and that wait for none of their key."""

    def admit(
        self,
        batch: int,
        hashes: bytes,
        at: int,
        first: int,
        end: int,
        room: int,
        waiting_max: int,
    ) -> list[int]:
        """Takes the messages of a batch from offset `first` to below `end`, until `room` of them
        are in flight or one would have to wait beside `waiting_max` others.

        Args:
            batch: what `take` calls the batch.
            hashes: 8 bytes for each message of the batch, a hash of its key; 0 without a key.
            at: place of the first message in them.

        Returns:
            The offset behind the last message that was taken; then first offset and end of each
            run that is in flight.
        Raises:
            ValueError: there are fewer hashes.
        """

    def take(self, room: int) -> list[int]:
        """Returns (batch, first offset, end), flat, of at most `room` ready messages, the lowest
        first: they are in flight now."""

    def release(self, first: int, last: int) -> int:
        """The messages in flight from `first` to `last` are settled: those behind them are ready.
        Others, and those that are not known, stay as they are."""
