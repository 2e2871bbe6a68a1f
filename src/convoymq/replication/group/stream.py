"""The byte stream between a master and its slaves, as RocketMQ's brokers have it.

| direction | bytes |
|---|---|
| slave → master | offset 8: end of the slave's log, as often as it changes |
| master → slave | offset 8 · size 4 · that many bytes of the log; size 0 is a heartbeat |

Between two of ours that have compared their logs there is more: the slave begins with two words,
-1 - its broker id and the session that it compared with; a block with a negative size has the
master's list of lives. Source: docs/adr/0155.
"""

from __future__ import annotations

import struct

from convoymq.model.errors import PeerError

WORD = struct.Struct(">q")
HEADER = struct.Struct(">qi")
BLOCK_BYTES_MAX = 4 << 20
"""RocketMQ's slaves have a buffer of that size."""
SLAVE_ID_MAX = 1 << 31

_RECORD = struct.Struct(">II20xq")
"""Size, magic, and physical offset of a record."""
_MAGICS = (0xDAA320A7, 0xDAA320AB)
_BLANK = 0xCBD43194
"""Magic of what fills up a file."""


def hello(slave: int, session: int) -> bytes:
    """Returns how a slave begins that has compared its log."""
    return WORD.pack(-1 - slave) + WORD.pack(session)


def is_record(block: bytes | memoryview, offset: int) -> bool:
    """Returns whether what begins at an offset can be a record that belongs there."""
    if len(block) < _RECORD.size:
        return len(block) < 8 or int.from_bytes(block[4:8]) in (*_MAGICS, _BLANK)
    size, magic, physical = _RECORD.unpack_from(block)
    return size > 0 and (magic == _BLANK or (magic in _MAGICS and physical == offset))


class WordReader:
    """Words of a slave, however they are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[int]:
        """Returns the whole words."""
        data = self._rest + data
        whole = len(data) // WORD.size * WORD.size
        self._rest = data[whole:]
        return [word for (word,) in WORD.iter_unpack(data[:whole])]


class BlockReader:
    """Blocks of a master, however they are cut."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[int, int, bytes]]:
        """Returns whole blocks: offset, size as sent, bytes. Raises PeerError."""
        found = []
        self._data += data
        at = 0
        while len(self._data) - at >= HEADER.size:
            offset, size = HEADER.unpack_from(self._data, at)
            if abs(size) > BLOCK_BYTES_MAX or offset < 0:
                raise PeerError(f"a block of {size} bytes at {offset}")
            end = at + HEADER.size + abs(size)
            if len(self._data) < end:
                break
            found.append((offset, size, bytes(self._data[at + HEADER.size : end])))
            at = end
        if at:
            del self._data[:at]
        return found
