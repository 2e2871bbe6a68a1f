"""The message groups of a queue (compiled only)."""

KEY_BYTES_MAX: int
"""Of a group's name; for a longer one its digest stands."""

Run = tuple[int, int, int, int, int, int, int, int]
"""As in `queues.quorum.runs`."""

class GroupTable:
    """Groups that have a message in the queue: the place of each one's head, and what is blocked.

    Keys are kept in full. The hash that finds them has a key of the process, so nobody can choose
    names that collide; what it says does not depend on it.
    """

    heads: int
    """Groups."""
    messages: int
    """Blocked ones."""
    size: int
    """Their body bytes."""

    def enqueue(
        self,
        data: bytes,
        index: int,
        command: int,
        first: int,
        count: int,
        time_ms: int,
        ttl_ms: int,
    ) -> list[int]:
        """Takes `count` records from `first` on of the ENQUEUE command at byte `command` of entry
        `index`, which is published at `time_ms` to a queue with a time limit (-1 = none): each in
        its group, if it has one. Returns (due ms, first, count, body bytes, mark), flat, of each
        run of records that are not blocked: the due time is 0 for those that are ready, and for
        others when they will be. Raises ValueError when the records are not in the command."""

    def parts(self, run: Run) -> list[tuple[Run, bool]]:
        """Returns a run in parts: (part, its messages are heads)."""

    def leave(self, run: Run) -> list[Run]:
        """Forgets messages that were ready or held, and are in the queue no more; returns those
        that are heads now in their place. Cost: O(messages)."""

    def take_blocked(self, limit: int) -> Run:
        """Takes at most `limit` blocked messages out, the oldest of the group that has had some for
        the longest time. Raises ValueError when nothing is blocked."""

    def blocked_amount(self) -> tuple[int, int]:
        """Returns (messages, body bytes) of the run of `take_blocked`."""

    def purge(self, held: list[Run]) -> int:
        """Drops what is blocked, and knows only those heads that are `held`; returns how many
        messages it dropped."""

    def blocked_runs(self) -> list[Run]:
        """Returns what is blocked, group by group. Cost: O(runs)."""

    def blocked_by_key(self) -> dict[bytes, list[Run]]:
        """Returns what is blocked of each group that has something, in the order in which they
        began to have some."""

    def indexes(self) -> set[int]:
        """Returns the entries of what is blocked."""

    def oldest_index(self) -> int | None:
        """Returns nearly the first entry of what is blocked: that of the group that has had some
        for the longest time; None = nothing is."""

    def keys(self) -> dict[tuple[int, int], bytes]:
        """Returns where the head of each group was published (entry index, offset above record),
        and the group's key."""

    def run_count(self) -> int:
        """Returns the number of runs that are blocked, and of heads."""

    def memory_bytes(self) -> int:
        """Returns the bytes of memory, without keys longer than 15 bytes."""

    def restore(self, heads: list[list[object]], blocked: list[tuple[bytes, list[Run]]]) -> None:
        """Fills an empty table: [entry index, offset above record, key] of each head; (key, runs)
        of what is blocked. Raises ValueError."""
