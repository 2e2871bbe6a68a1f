"""Hash slots and units of RocketMQ's index files (compiled only): layout in the module."""

ROW_BYTES: int
UNIT_BYTES: int
PAGE_SLOTS: int
PAGE_BYTES: int

def pages_of(rows: bytes, slot_count: int) -> list[int]:
    """Returns the numbers of the pages that rows go to, ascending."""

def enter(
    rows: bytes, slot_count: int, first: int, begin_ms: int, pages: dict[int, bytearray]
) -> tuple[bytes, int]:
    """Enters rows as units from number `first` on: `pages`, by number, change.

    Returns:
        The units, and how many slots were empty before.
    """

def find(rows: bytes, hash_: int) -> list[tuple[int, int]]:
    """Returns physical offset and time of the rows with a hash, newest first."""

def rebuild(units: bytes, first: int, slot_count: int, slots: bytearray) -> int:
    """Enters units that exist, the first with number `first`, into all slots. Returns how many
    slots were empty before."""
