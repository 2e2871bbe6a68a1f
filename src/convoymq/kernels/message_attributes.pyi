"""Attributes of the records of an ENQUEUE command (compiled only)."""

LEVEL_MAX: int
LEVEL_DEFAULT: int
"""Of a message without a priority."""
EXPIRATION_MS_MAX: int
DUE_NONE: int
DUE_DELAY: int
"""By `x-delay`: milliseconds from the time at which the message is logged; may be negative."""
DUE_TIME: int
"""By `x-deliver-at`: milliseconds since the epoch; may be negative."""

def attribute_runs(data: bytes, command: int, first: int, count: int) -> list[int]:
    """Returns (first, count, body bytes, level, expiration in ms or -1) of each run of records with
    equal level and expiration, flat: of `count` records from `first` on of the ENQUEUE command at
    byte `command`. Raises ValueError when these are not in it."""

def header_runs(
    data: bytes, command: int, first: int, count: int
) -> list[tuple[int, int, int, int, bytes | None]]:
    """Returns (first, count, DUE_*, its number, group id or None) of each run of records that ask
    the same by headers: of `count` records from `first` on of the ENQUEUE command at byte
    `command`. A header of another type than an integer, or a string for the group, asks for
    nothing. Raises ValueError when the records are not in the command."""
