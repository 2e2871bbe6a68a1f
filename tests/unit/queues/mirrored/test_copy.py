"""A mirror's copy by itself."""

from __future__ import annotations

import struct

import pytest

from convoymq.model.errors import PeerError
from convoymq.queues.classic.log import ClassicLog
from convoymq.queues.classic.notes import Note, pack_note
from convoymq.queues.mirrored.copy import MirrorCopy
from convoymq.queues.mirrored.instructions import (
    MESSAGES,
    Cut,
    Noted,
    Settled,
    SyncBegin,
    Synced,
    SyncEnd,
    decode,
    encode,
)
from convoymq.storage.files import MemoryDirectory
from tests.unit.queues.classic.test_log import ManualWriter, command

MASTER, MIRROR, NEXT_MASTER = 1, 2, 3


class Mirror:
    """A copy, and what it says."""

    def __init__(self) -> None:
        self.writer = ManualWriter()
        self.stored: list[tuple[int, int]] = []
        self.equal: list[tuple[int, int]] = []
        self.failed: list[Exception] = []
        directory = MemoryDirectory(1 << 30)
        self.copy = MirrorCopy(
            MIRROR,
            0,
            lambda: ClassicLog(directory, "7", self.writer, sync=True),
            lambda sender, number: self.stored.append((sender, number)),
            lambda: self.equal.append(self.stored[-1]),
            self.failed.append,
        )

    def take_three(self) -> None:
        """Gets three messages of a master that has no more."""
        records = [Synced(MESSAGES, position, 0, command(position)) for position in range(3)]
        self.copy.on_broadcast(MASTER, 1, encode([Cut(MIRROR, 3), SyncBegin([MIRROR]), *records]))
        self.copy.on_broadcast(MASTER, 2, encode([SyncEnd(3)]))


def test_a_mirror_is_synchronised_when_it_has_stored_all() -> None:
    """When the master and the power go together, a synchronised mirror lacks nothing."""
    mirror = Mirror()
    mirror.take_three()
    assert not mirror.equal
    mirror.writer.run()
    assert mirror.equal == mirror.stored[-1:] == [(MASTER, 2)]
    assert not mirror.failed


def test_a_mirror_that_begins_anew_is_not_what_it_was() -> None:
    """It had all that a master had, whose place another one took before that was stored."""
    mirror = Mirror()
    mirror.take_three()
    mirror.copy.on_broadcast(NEXT_MASTER, 1, encode([Cut(MIRROR, 5)]))
    mirror.writer.run()
    assert not mirror.equal
    assert not mirror.failed


def test_a_mirror_keeps_what_was_said_of_its_messages() -> None:
    """Of those that it has, until they are gone; also where compaction moves them."""
    mirror = Mirror()
    mirror.take_three()
    note = pack_note(Note(1, b"said"))
    settled = struct.pack("<2Q", 0, 0)
    told = [Noted(0, 1, note), Noted(7, 8, note), Settled(settled)]
    mirror.copy.on_broadcast(MASTER, 3, encode(told))
    mirror.writer.run()
    assert mirror.copy.notes == {1: note}
    assert mirror.copy.log._index.notes == [(0, 0, note), (1, 1, note)]
    mirror.copy.on_broadcast(NEXT_MASTER, 4, encode([Cut(MIRROR, 5)]))
    assert not mirror.copy.notes, "it begins anew"


@pytest.mark.parametrize("note", [b"cut", b"\4\0\0\0abcd"])
def test_a_malformed_note_is_refused(note: bytes) -> None:
    with pytest.raises(PeerError, match="malformed instructions"):
        decode(encode([Noted(0, 1, note)]))
