"""Rows of the trace in preallocated memory: one call per run, no object per row (ADR 0009)."""

from collections.abc import Callable

COLUMNS: int
"""Columns of a row, all int64: `convoymq.model.trace.ROW_COLUMNS`."""

def name_hash(name: bytes) -> int:
    """Returns the 64 bits, signed, under which a name or an order key appears in a trace."""

class TraceRows:
    """Trace rows of one queue on one node, until `take`.

    The machine calls `begin` once per entry and `add` for what the entry decides; `act` is for what
    the node did itself. Cost: 8 bytes a column and row, about 0.2 µs a row.
    """

    skip_through: int
    """Entries up to this index are on disk already: `begin` leaves their rows out."""
    logical: int
    """Number of logical partitions of the topic that the keys belong to; 0 = not known."""
    seed: int
    """Of the hash of that topic's keys."""
    lost: int
    """Rows that found no room since it was last set to 0."""
    index: int
    """Last entry that was begun, or what `restored` said."""
    on_full: Callable[[], None] | None
    """Called when `rows_max` rows wait; it should `take` them, else the next rows are lost."""

    on_restored: Callable[[int], None] | None
    """Called by `restored` with the new index, while `index` is still the old one."""

    def __init__(self, capacity: int = 1024, rows_max: int = 65536) -> None: ...
    @property
    def rows(self) -> int:
        """Returns the number of rows that wait."""
    def begin(self, index: int, term: int, time_ms: int) -> None:
        """The following decided rows belong to this entry; the first gets ordinal 0."""
    def begin_entry(self, data: bytes) -> None:
        """As `begin`, from an entry's header. Raises ValueError when it is none."""
    def add(
        self,
        kind: int,
        flags: int,
        reason: int,
        session: int,
        consumer: int,
        seq: int,
        first_id: int,
        count: int,
        position_index: int,
        position_command: int,
        position_first: int,
        acquired: int,
        delivered: int,
        /,
    ) -> None:
        """A decided row. Every call counts in `ordinal`, whether or not there is room."""
    def keys(
        self,
        kind: int,
        data: bytes,
        index: int,
        command: int,
        first: int,
        count: int,
        offset: int,
        /,
    ) -> None:
        """Decided rows with the order keys of the records `first` and following of an ENQUEUE
        command, one for each run of equal keys: hash of the key as session, logical partition as
        consumer (-1: not known), number of its first message from `offset` on as first_id. About
        0.1 µs a message. Raises ValueError when the command has no such records."""
    def act(
        self,
        kind: int,
        flags: int,
        time_us: int,
        index: int,
        session: int,
        consumer: int,
        seq: int,
        first_id: int,
        count: int,
        position_index: int,
        position_command: int,
        position_first: int,
        acquired: int,
        delivered: int,
        /,
    ) -> None:
        """A node's own row: `ordinal` and `term` are 0, `index` as given."""
    def restored(self, index: int) -> None:
        """The state was replaced by one at `index`: what lies between is not recorded here."""
    def take(self) -> tuple[int, bytes]:
        """Returns (rows, their columns back to back, 8 bytes a value, native order); empties it."""
