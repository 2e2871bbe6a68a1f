"""Batches of a synchronisation."""

from __future__ import annotations

from array import array

from convoymq.queues.mirrored.instructions import MESSAGES, Synced, decode
from convoymq.queues.mirrored.log import BroadcastLog
from convoymq.queues.mirrored.sync import BATCHES_MAX, Synchronisation
from convoymq.storage.files import MemoryDirectory
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
    assert sync.step()
    assert sync.step(), "nothing is stored yet"
    assert len(ring.sent) == BATCHES_MAX
    for number in range(1, 6):
        log.confirms.on_stored(MIRROR, number)
        assert sync.step()
        assert len(ring.sent) == BATCHES_MAX + number
    log.confirms.on_stored(MIRROR, 6)
    assert not sync.step()
    sync.end(count)
    assert [positions_in(payload) for payload in ring.sent[:count]] == [[n] for n in range(count)]
    assert sync.messages == count
