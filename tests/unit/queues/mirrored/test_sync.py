"""Batches of a synchronisation."""

from __future__ import annotations

from array import array

import pytest

from convoymq.queues.mirrored.instructions import MESSAGES, Synced, decode
from convoymq.queues.mirrored.log import BroadcastLog
from convoymq.queues.mirrored.sync import BATCHES_MAX, Synchronisation
from convoymq.storage.files import MemoryDirectory, MemoryFile
from tests.unit.queues.classic.test_log import ManualWriter, command

MIRROR = 2


class Ring:
    """Keeps what is broadcast."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def may_broadcast(self) -> bool:
        return True

    def broadcast(self, payload: bytes) -> int:
        self.sent.append(payload)
        return len(self.sent)


def positions_in(payload: bytes) -> list[int]:
    return [
        each.position
        for each in decode(payload)
        if isinstance(each, Synced) and each.kind == MESSAGES
    ]


def test_a_few_batches_are_on_their_way_and_each_that_is_stored_lets_one_follow() -> None:
    writer, ring = ManualWriter(), Ring()
    log = BroadcastLog(MemoryDirectory(1 << 30), "7", writer, sync=True)
    count = BATCHES_MAX + 5
    for position in range(count):
        log.add_messages(position, command(position), live=1)
    log.flush(lambda error: None)
    writer.run()
    log.connect(ring)
    log.confirms.expect(MIRROR, 0)
    sync = Synchronisation(log, [MIRROR], 1, array("Q"))
    sync.is_on_disk = True
    assert sync.step(0)
    assert sync.step(0), "nothing is stored yet"
    assert len(ring.sent) == BATCHES_MAX
    for number in range(1, 6):
        log.confirms.on_stored(MIRROR, number)
        assert sync.step(0)
        assert len(ring.sent) == BATCHES_MAX + number
    log.confirms.on_stored(MIRROR, 6)
    assert not sync.step(0)
    sync.end(count)
    assert [positions_in(payload) for payload in ring.sent[:count]] == [[n] for n in range(count)]
    assert sync.messages == count


@pytest.mark.parametrize("rate", [1_000_000, 1_000, 0])
def test_a_batch_waits_until_the_rate_allows_it(rate: int) -> None:
    writer, ring = ManualWriter(), Ring()
    log = BroadcastLog(MemoryDirectory(1 << 30), "7", writer, sync=True)
    for position in range(3):
        log.add_messages(position, command(position), live=1)
    log.flush(lambda error: None)
    writer.run()
    log.connect(ring)
    log.confirms.expect(MIRROR, 0)
    sync = Synchronisation(log, [MIRROR], 1, array("Q"), rate=lambda: rate)
    sync.is_on_disk = True
    now_ms = 5_000
    assert sync.step(now_ms) == bool(rate)
    for number in range(1, 3 if rate else 1):
        assert len(ring.sent) == number
        log.confirms.on_stored(MIRROR, number)
        assert sync.due_ms == now_ms + -(-len(command(0)) * 1000 // rate)
        assert sync.step(sync.due_ms - 1)
        assert len(ring.sent) == number, "before its time"
        now_ms = sync.due_ms
        assert sync.step(now_ms)
    assert len(ring.sent) == 3


def test_the_rate_may_change_while_a_batch_waits() -> None:
    writer, ring = ManualWriter(), Ring()
    log = BroadcastLog(MemoryDirectory(1 << 30), "7", writer, sync=True)
    for position in range(4):
        log.add_messages(position, command(position), live=1)
    log.flush(lambda error: None)
    writer.run()
    log.connect(ring)
    log.confirms.expect(MIRROR, 0)
    rates = [1]
    sync = Synchronisation(log, [MIRROR], 1, array("Q"), rate=lambda: rates[0])
    sync.is_on_disk = True
    assert sync.step(5_000)
    assert sync.due_ms > 6_000
    rates[0] = 1 << 20
    assert sync.step(6_000)
    assert len(ring.sent) == 2
    rates[0] = 0
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
