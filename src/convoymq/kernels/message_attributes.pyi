"""Attributes of the records of an ENQUEUE command (compiled only)."""

LEVEL_MAX: int
LEVEL_DEFAULT: int
"""Of a message without a priority."""

def attribute_runs(data: bytes, command: int, first: int, count: int) -> list[int]:
    """Returns (first, count, body bytes, level, expiration in ms or -1) of each run of records with
    equal level and expiration, flat: of `count` records from `first` on of the ENQUEUE command at
    byte `command`. Raises ValueError when these are not in it."""
