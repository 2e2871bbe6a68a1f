"""Records of RocketMQ's commit log (compiled only): layout in the module."""

from collections.abc import Sequence

from typing_extensions import Buffer

ILLEGAL: int
PROPERTIES_TOO_LONG: int

ENDED: int
"""Every byte was read."""
BLANK: int
"""The rest of the file is blank: `size` bytes."""
ZEROS: int
"""Nothing was written here."""
CUT: int
"""A record of `size` bytes begins; 0 when not even that is there."""
DAMAGED: int
"""No record lies here, or not the one that was written."""

UNCHECKED: int
"""No checksum is compared."""
BODY: int
"""The body's is."""
RECORD: int
"""The checksum of the whole record as well, where a record has one."""
RECORD_ALWAYS: int
"""A record without one is damaged."""

def encode(
    drafts: Sequence[object],
    first: int,
    room: int,
    size_max: int,
    physical: int,
    next_offsets: dict[tuple[str, int], int],
    now_ms: int,
    host: bytes,
    with_crc: bool,
) -> tuple[bytes, list[tuple[int, int, int, list[int] | None]]]:
    """Makes records of drafts from number `first` on, as many as leave eight bytes of `room`.

    Args:
        size_max: bytes that one draft may become.
        physical: offset of the first record.
        next_offsets: the next offset of each (topic, queue) of the drafts; moved on.
        with_crc: the properties of all drafts end with room for the checksum, which is filled in.

    Returns:
        The records, and for each draft: bytes, messages, queue offset, physical offsets; or ILLEGAL
        or PROPERTIES_TOO_LONG instead of the bytes.
    """

def scan(
    block: Buffer, start: int, physical: int, check: int, delays: list[int]
) -> tuple[int, int, int, int, int, list[tuple[str, int, int, int, bytes, int]], bytes]:
    """Reads the records of a block that begins at `physical - start`… as far as they are whole.

    Args:
        physical: offset of the block's first byte in the log.
        check: see the constants.
        delays: of each delay level, in ms.

    Returns:
        Why it ended; where in the block; `size` of what is there; records; when the last was
        stored; runs of queue neighbours as (topic, queue, queue offset, count, entries, stored at
        of the last); rows of the index: hash 4, physical offset 8, stored at 8.
    """

def is_record(record: Buffer, physical: int, check: int) -> bool:
    """Returns whether these bytes are one whole record with that offset. `check` as in `scan`."""

def key_hash(topic: str, key: str) -> int:
    """Returns the hash of a key as the index has it."""
