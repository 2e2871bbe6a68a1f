"""Batches of a synchronisation."""

from __future__ import annotations

from array import array

import pytest

from convoymq.queues.mirrored.instructions import MESSAGES, Synced, decode
from convoymq.queues.mirrored.log import BroadcastLog
from convoymq.queues.mirrored.sync import (
    BATCH_BYTES_MAX,
    SLOWER,
    WINDOW_BYTES_MAX,
    WINDOW_BYTES_MIN,
    Synchronisation,
)
from convoymq.storage.files import MemoryDirectory, MemoryFile
from tests.unit.queues.classic.test_log import ManualWriter, command

MIRROR = 2


class Ring:
    """Keeps what is broadcast."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.has_room = True

    def may_broadcast(self) -> bool:
        return self.has_room

    def broadcast(self, payload: bytes) -> int:
        self.sent.append(payload)
        return len(self.sent)


def positions_in(payload: bytes) -> list[int]:
    return [
        each.position
        for each in decode(payload)
        if isinstance(each, Synced) and each.kind == MESSAGES
    ]


def loaded(count: int, size: int) -> tuple[BroadcastLog, Ring]:
    """Returns the log of a master with so many messages on disk, and its ring with one mirror."""
    writer, ring = ManualWriter(), Ring()
    log = BroadcastLog(MemoryDirectory(1 << 30), "7", writer, sync=True)
    for position in range(count):
        log.add_messages(position, command(position, size), live=1)
    log.flush(lambda error: None)
    writer.run()
    log.connect(ring)
    log.confirms.expect(MIRROR, 0)
    return log, ring


def test_a_window_of_bytes_is_on_its_way_and_what_is_stored_lets_more_follow() -> None:
    """Each step sends one batch: others have their turn between two."""
    size = BATCH_BYTES_MAX
    most = WINDOW_BYTES_MIN // size
    count = most + 3
    log, ring = loaded(count, size)
    sync = Synchronisation(log, [MIRROR], 1, array("Q"))
    assert sync.wait_ms(0) is None, "not on disk"
    sync.is_on_disk = True
    for number in range(1, most + 1):
        assert sync.wait_ms(0) == 0
        assert sync.step(0)
        assert len(ring.sent) == number
    assert sync.wait_ms(0) is None
    assert sync.step(0), "nothing is stored yet"
    assert len(ring.sent) == most
    log.confirms.on_stored(MIRROR, 1)
    assert sync.step(0)
    assert len(ring.sent) == most + 1
    log.confirms.on_stored(MIRROR, count)
    while sync.step(0):
        pass
    sync.end(count)
    assert [positions_in(payload) for payload in ring.sent[:count]] == [[n] for n in range(count)]
    assert sync.messages == count


@pytest.mark.parametrize(("flush_ms", "batch_ms"), [(0, 10), (100, 1), (20, 5)])
def test_the_window_follows_from_the_time_that_batches_take(flush_ms: int, batch_ms: int) -> None:
    """Of a mirror that stores with one flush what has come: the more a flush costs beside a batch,
    the more batches are on their way. They never take much longer than the limit allows."""
    count = 100
    log, ring = loaded(count, BATCH_BYTES_MAX)
    sync = Synchronisation(log, [MIRROR], 1, array("Q"))
    sync.is_on_disk = True
    now_ms = stored = 0
    sent_ms: list[int] = []
    took_ms: list[int] = []
    flushed: list[int] = []
    ends = False
    while not ends:
        while not ends and sync.wait_ms(now_ms) == 0:
            ends = not sync.step(now_ms)
            sent_ms += [now_ms] * (len(ring.sent) - len(sent_ms))
        batches = len(ring.sent) - stored
        flushed.append(batches)
        now_ms += flush_ms + batches * batch_ms
        stored += batches
        took_ms += [now_ms - sent for sent in sent_ms[len(took_ms) : stored]]
        log.confirms.on_stored(MIRROR, stored)
        ends = not sync.step(now_ms)
        sent_ms += [now_ms] * (len(ring.sent) - len(sent_ms))
    bytes_at_once = [batches * BATCH_BYTES_MAX for batches in flushed]
    assert max(bytes_at_once) <= WINDOW_BYTES_MAX + BATCH_BYTES_MAX
    quickest = min(took_ms) + 1
    assert max(took_ms) <= SLOWER * quickest + WINDOW_BYTES_MIN // BATCH_BYTES_MAX * batch_ms * 2
    if flush_ms >= 100:
        assert max(bytes_at_once) >= WINDOW_BYTES_MAX
    if not flush_ms:
        assert max(flushed) <= 8


def test_nothing_is_read_while_the_ring_has_no_room() -> None:
    log, ring = loaded(1, 8)
    sync = Synchronisation(log, [MIRROR], 1, array("Q"))
    sync.is_on_disk = True
    ring.has_room = False
    assert sync.wait_ms(0) is None
    assert sync.step(0)
    assert not sync.messages
    ring.has_room = True
    assert sync.wait_ms(0) == 0
    assert sync.step(0)
    assert [positions_in(payload) for payload in ring.sent] == [[0]]


@pytest.mark.parametrize("rate", [1_000_000, 1_000, 0])
def test_a_batch_waits_until_the_rate_allows_it(rate: int) -> None:
    log, ring = loaded(3, 8)
    sync = Synchronisation(log, [MIRROR], 1, array("Q"), rate=lambda: rate)
    sync.is_on_disk = True
    now_ms = 5_000
    assert sync.step(now_ms)
    for number in range(1, 3):
        assert len(ring.sent) == number
        log.confirms.on_stored(MIRROR, number)
        wait_ms = sync.wait_ms(now_ms)
        assert wait_ms == (-(-len(command(0)) * 1000 // rate) if rate else 0)
        if wait_ms:
            assert sync.step(now_ms + wait_ms - 1)
            assert len(ring.sent) == number, "before its time"
        now_ms += wait_ms
        assert sync.step(now_ms)
    assert len(ring.sent) == 3


def test_the_rate_may_change_while_a_batch_waits() -> None:
    log, ring = loaded(4, 8)
    rates = [1]
    sync = Synchronisation(log, [MIRROR], 1, array("Q"), rate=lambda: rates[0])
    sync.is_on_disk = True
    assert sync.step(5_000)
    wait_ms = sync.wait_ms(5_000)
    assert wait_ms is not None
    assert wait_ms > 1_000
    rates[0] = 1 << 20
    assert sync.step(6_000)
    assert len(ring.sent) == 2
    rates[0] = 0
    assert sync.step(6_000)
    assert sync.step(6_000)
    assert len(ring.sent) == 4


def test_a_synchronisation_reads_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is settled is known from the indexes of files. Nothing but the first messages is read
    before the first batch is sent."""
    writer, ring = ManualWriter(), Ring()
    log = BroadcastLog(MemoryDirectory(1 << 30), "7", writer, sync=True, file_bytes_max=4096)
    count = 500
    for position in range(count):
        log.add_messages(position, command(position), live=1)
        if position % 100 == 50:
            log.add_settled([position - 1, position])
            log.add_handed_out(position, 0)
        log.flush(lambda error: None)
        writer.run()
    log.connect(ring)
    log.confirms.expect(MIRROR, 0)
    read: list[int] = []
    pread = MemoryFile.pread

    def noted(file: MemoryFile, length: int, offset: int) -> bytes:
        data = pread(file, length, offset)
        read.append(len(data))
        return data

    monkeypatch.setattr(MemoryFile, "pread", noted)
    sync = Synchronisation(log, [MIRROR], 1, array("Q"))
    sync.is_on_disk = True
    assert sync.step(0)
    assert sum(read) < log.size_bytes // 3
    log.confirms.on_stored(MIRROR, 1 << 60)
    while sync.step(0):
        log.confirms.on_stored(MIRROR, 1 << 60)
    found = [position for payload in ring.sent for position in positions_in(payload)]
    settled = {p for n in range(50, count, 100) for p in (n - 1, n)}
    assert found == [position for position in range(count) if position not in settled]
