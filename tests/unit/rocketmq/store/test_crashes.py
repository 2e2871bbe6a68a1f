"""Stores that lose power between any two file operations, on a disk that tears unflushed writes.

The rules after each start: what was acknowledged as durable is there; every queue is a beginning of
what was put into it; queues and index are what the log says, read by a reader of its own.
"""

from __future__ import annotations

import random
import struct
from collections import defaultdict

import pytest

from convoymq.kernels import rocketmq_records as records
from convoymq.kernels.rocketmq_records import key_hash
from convoymq.model.errors import StorageFault
from convoymq.rocketmq.store import recovery
from convoymq.rocketmq.store.consume_queues import ConsumeQueues
from convoymq.rocketmq.store.derived import Derived
from convoymq.rocketmq.store.index import Index
from convoymq.rocketmq.store.types import Draft, Message, encode_properties
from convoymq.storage import files
from convoymq.storage.files import MemoryDirectory
from tests.unit.rocketmq.store.stores import Opened

SEEDS = 30
BLANK = 0xCBD43194


class PowerLost(BaseException):
    pass


class Disk(MemoryDirectory):
    """A disk whose power goes at a count of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.operation = self._count

    def _count(self, _operation: str, _path: str) -> None:
        if self.left == 0:
            raise PowerLost
        self.left -= 1


class Unchecked:
    """The kernel, whose scan compares no checksums."""

    def __getattr__(self, name: str) -> object:
        return getattr(records, name)

    def scan(self, block: bytes, start: int, physical: int, _check: int, delays: list[int]):  # type: ignore[no-untyped-def]
        return records.scan(block, start, physical, records.UNCHECKED, delays)


def records_of(disk: MemoryDirectory, size: int) -> list[Message]:
    """Reads the log without the store."""
    found = []
    for name in sorted(disk.list("commitlog")):
        data = disk.names[f"commitlog/{name}"].content  # type: ignore[union-attr]
        at = 0
        while at < size:
            length, magic = struct.unpack_from(">II", data, at)
            if not length:
                return found
            if magic != BLANK:
                found.append(Message(memoryview(bytes(data[at : at + length]))))
                assert found[-1].physical == int(name) + at
            at += length
    return found


class Run:
    """One seed: lives of one store."""

    def __init__(self, seed: int, flush: str) -> None:
        self.random = random.Random(seed)
        self.flush = flush
        self.disk = Disk()
        self.put: dict[tuple[str, int], list[tuple[int, bytes]]] = defaultdict(list)
        """All that may be in a queue: (physical offset, body)."""
        self.durable = 0
        self.number = 0

    def open(self) -> Opened:
        return Opened(self.disk, flush=self.flush)

    def live(self, opened: Opened) -> None:
        store = opened.store
        for _ in range(self.random.randrange(5, 40)):
            match self.random.randrange(9):
                case 0 | 1 | 2 | 3:
                    self.send(opened)
                case 4:
                    store.kick()
                case 5 | 6:
                    opened.worker.run()
                case 7:
                    opened.now += self.random.choice((100, 1500, 11_000))
                    store.tick(opened.now)
                case 8 if self.random.random() < 0.1 and store.max_offset > store.min_offset:
                    self.cut(opened)
            self.durable = max(self.durable, store.flushed)

    def send(self, opened: Opened) -> None:
        drafts = []
        for _ in range(self.random.randrange(1, 6)):
            self.number += 1
            body = f"{self.number} ".encode() * self.random.randrange(1, 200)
            keys = encode_properties({"KEYS": f"k{self.number}", "UNIQ_KEY": f"u{self.number}"})
            place = (self.random.choice("ab"), self.random.randrange(3))
            drafts.append(Draft(*place, body, keys))
        for draft, placed in zip(drafts, opened.store.put(drafts, opened.now), strict=True):
            if placed.physical >= 0:
                queue = self.put[draft.topic, draft.queue_id]
                assert placed.queue_offset == len(queue)
                queue.append((placed.physical, draft.body))

    def cut(self, opened: Opened) -> None:
        """As a slave that has more than its master."""
        end = opened.store.max_offset
        starts = sorted(at for queue in self.put.values() for at, _ in queue if at < end)
        at = self.random.choice(starts[-10:])
        self.durable = min(self.durable, at)
        opened.store.truncate(at)
        self.forget(at)

    def forget(self, end: int) -> None:
        for queue in self.put.values():
            while queue and queue[-1][0] >= end:
                queue.pop()

    def check(self, opened: Opened) -> None:
        assert opened.store.max_offset >= self.durable
        self.forget(opened.store.max_offset)
        messages = records_of(self.disk, 8192)
        queues: dict[tuple[str, int], list[tuple[int, bytes]]] = defaultdict(list)
        for message in messages:
            queue = queues[message.topic, message.queue_id]
            assert message.queue_offset == len(queue)
            queue.append((message.physical, bytes(message.body)))
        for place, expected in self.put.items():
            assert queues[place] == expected, place
            assert opened.store.queue_max(*place) == len(expected), place
            assert opened.bodies(*place) == [body for _, body in expected], place
        for message in self.random.sample(messages, min(3, len(messages))):
            key = message.properties["UNIQ_KEY"]
            found = opened.store.query(message.topic, key, 5, 0, 1 << 60)
            assert [one.physical for one in found] == [message.physical]
            assert message.physical in opened.store._index.find(
                key_hash(message.topic, key.replace("u", "k")), 0, 1 << 60
            )

    def run(self) -> None:
        for _ in range(4):
            self.disk.left = self.random.choice((-1, self.random.randrange(1, 150)))
            try:
                opened = self.open()
                self.live(opened)
                if self.random.random() < 0.3:
                    opened.close()
            except PowerLost:
                pass
            self.disk.left = -1
            chance = self.random.choice((0.0, 0.2, 0.5, 0.9, 1.0))
            self.disk.crash(lambda chance=chance: self.random.random() < chance)  # type: ignore[misc]
            opened = self.open()
            self.check(opened)
            if self.random.random() < 0.5:
                opened.close()
                self.check(self.open())


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_stores_outlive_power_failures(flush: str) -> None:
    for seed in range(SEEDS):
        Run(seed, flush).run()


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_slaves_outlive_power_failures(flush: str) -> None:
    """Parts that end anywhere: a slave has the beginning of its master's log, and may go on."""
    for seed in range(SEEDS):
        random_ = random.Random(seed)
        run = Run(seed, "ASYNC_FLUSH")
        master = run.open()
        for _ in range(20):
            run.send(master)
        master.settle()
        disk, durable = Disk(), 0
        for _ in range(4):
            disk.left = random_.choice((-1, random_.randrange(1, 80)))
            try:
                slave = Opened(disk, flush=flush)
                durable = feed(slave, master, random_, durable)
                if random_.random() < 0.3:
                    slave.close()
            except PowerLost:
                pass
            disk.left = -1
            disk.crash(lambda: random_.random() < 0.5)  # noqa: B023
        slave = Opened(disk, flush=flush)
        end = slave.store.max_offset
        assert durable <= end == slave.store.whole
        if end:
            assert slave.store.checksum(end, end) == master.store.checksum(end, end)
        run.disk = disk
        run.check(slave)


def feed(slave: Opened, master: Opened, random_: random.Random, durable: int) -> int:
    """Gives a slave some more of the log. Returns how much of it was reported as durable."""
    for _ in range(random_.randrange(1, 40)):
        store, at = slave.store, slave.store.max_offset
        if part := master.store.read_raw(at, random_.randrange(1, 1500)):
            store.append_raw(at, bytes(part))
        store.kick()
        if random_.random() < 0.7:
            slave.worker.run()
        if random_.random() < 0.3:
            slave.now += random_.choice((100, 1500, 11_000))
            store.tick(slave.now)
        if random_.random() < 0.05:
            durable = min(durable, store.whole)
            store.truncate(store.whole)
        if store.dispatched <= store.flushed:
            durable = max(durable, store.dispatched)
    return durable


PLANTED = {
    "the log is not flushed": (files.MemoryFile, "sync", lambda _file: None),
    "a checkpoint is early": (Derived, "_is_flushed", lambda _self, _checkpoint: True),
    "queues and index are not flushed": (Derived, "_sync", lambda _self, _names: None),
    "a cut leaves the checkpoint": (Derived, "lower", lambda _self, _physical: None),
    "queues stay as they are after a crash": (ConsumeQueues, "_cut", lambda *_, **__: None),
    "the index stays as it is after a crash": (Index, "_cut", lambda *_: None),
    "checksums are not compared": (recovery, "records", Unchecked()),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, bug = PLANTED[name]
    monkeypatch.setattr(where, attribute, bug)
    runs = [Run(seed, "ASYNC_FLUSH") for seed in range(300)]
    with pytest.raises((AssertionError, StorageFault)):
        [run.run() for run in runs]
