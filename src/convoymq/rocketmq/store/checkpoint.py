"""The checkpoint file: how far what follows from the log is on the disk.

    stored at of the last message that is flushed in the log, in consume queues and in the index,
    3 x 8 · flushed offset of the master 8 · confirmed offset 8 · … · at 64: our own part
    own part: magic 8 · copy of the first three 24 · physical offset 8 · index file 8 · units 8 ·
              CRC32C 4

RocketMQ starts to read a file of the log by times, a file further back at least. Our own part says
the very offset; it counts as long as the times beside it are those that it was written with, so it
is void once RocketMQ has run.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

from crc32c import crc32c

from convoymq.storage.types import Directory

NAME = "checkpoint"
BYTES = 4096
_OWN_AT = 64
_MAGIC = b"CONVOYCP"
_OWN = struct.Struct(">8sqqqqqq")
_TIMES = struct.Struct(">qqq")
_OFFSETS = struct.Struct(">qq")
SLACK_MS = 3000
"""RocketMQ's: times of flushes and of messages are not taken together."""


@dataclass(slots=True)
class Progress:
    """Place in the log before which everything that follows from it is durable."""

    physical: int
    index_file: int
    """Name of the last file; 0 without one."""
    index_units: int
    """Number of its next unit."""


@dataclass(slots=True)
class Checkpoint:
    """See the module text."""

    log_ms: int = 0
    queues_ms: int = 0
    index_ms: int = 0
    master_flushed: int = 0
    confirmed: int = 0
    progress: Progress | None = None

    @property
    def safe_ms(self) -> int:
        """Returns the time of messages that are durable in log and queues."""
        return max(0, min(self.log_ms, self.queues_ms) - SLACK_MS)

    def encode(self) -> bytes:
        """Returns the content of the file."""
        content = bytearray(BYTES)
        times = (self.log_ms, self.queues_ms, self.index_ms)
        _TIMES.pack_into(content, 0, *times)
        _OFFSETS.pack_into(content, _TIMES.size, self.master_flushed, self.confirmed)
        if self.progress is not None:
            own = _OWN.pack(_MAGIC, *times, *astuple(self.progress))
            content[_OWN_AT : _OWN_AT + len(own) + 4] = own + crc32c(own).to_bytes(4, "big")
        return bytes(content)


def decode(content: bytes) -> Checkpoint:
    """Returns what a file says; nothing where it is cut or damaged."""
    content = content.ljust(BYTES, b"\0")
    found = Checkpoint(*_TIMES.unpack_from(content), *_OFFSETS.unpack_from(content, _TIMES.size))
    own = content[_OWN_AT : _OWN_AT + _OWN.size]
    magic, *numbers = _OWN.unpack(own)
    check = int.from_bytes(content[_OWN_AT + _OWN.size : _OWN_AT + _OWN.size + 4], "big")
    times = [found.log_ms, found.queues_ms, found.index_ms]
    if magic == _MAGIC and check == crc32c(own) and numbers[:3] == times:
        found.progress = Progress(*numbers[3:])
    return found


def load(directory: Directory) -> Checkpoint:
    """Returns the checkpoint of a store; an empty one where there is none."""
    if not directory.exists(NAME):
        return Checkpoint()
    file = directory.open(NAME)
    try:
        return decode(file.pread(BYTES, 0))
    finally:
        file.close()


def save(directory: Directory, checkpoint: Checkpoint) -> None:
    """Makes a checkpoint durable. It lies within one sector. Raises OSError."""
    is_new = not directory.exists(NAME)
    file = directory.open(NAME, create=True)
    try:
        file.pwrite([checkpoint.encode()], 0)
        file.sync()
    finally:
        file.close()
    if is_new:
        directory.sync()
