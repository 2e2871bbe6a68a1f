"""Records of an ENQUEUE command, as a classic queue sorts them (compiled only)."""

LEVELS: int
"""Priorities that a message can have."""

def split_levels(
    data: bytes, command: int, count: int, level_max: int
) -> list[tuple[int, bytes | None, int, int]]:
    """Returns (level, command, count, body bytes) of each level that occurs, highest first: an
    ENQUEUE command with just the records of that level, in their order. None instead of the command
    when all records have one level. A message without a priority has level 0, one with a higher
    priority than `level_max` has that. Raises ValueError when the records lie outside `data`."""

def level_of(data: bytes, command: int, level_max: int) -> int:
    """Returns the level of the first record of an ENQUEUE command; 0 when its flags say that no
    record has a priority. Raises ValueError."""

def transient_records(data: bytes, command: int, count: int) -> tuple[list[int], int]:
    """Returns the records of an ENQUEUE command that do not outlive a restart, as (first, last, …),
    and how many of them cannot be read. Raises ValueError when the records lie outside `data`."""
