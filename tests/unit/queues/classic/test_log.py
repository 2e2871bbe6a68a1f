"""The log of a classic queue on a disk that loses power, tears writes and fills up."""

from __future__ import annotations

import contextlib
import errno
import os
import random

import pytest

from convoymq.model.errors import StorageFault
from convoymq.queues.classic.log import (
    FILE_BYTES_MAX,
    HANDED_OUT,
    MESSAGES,
    SETTLED,
    ClassicLog,
)
from convoymq.queues.classic.log_writer import Buffers, Done, Job, Kind, carry_out
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.types import File


class PowerLoss(BaseException):
    """The machine goes dark in the middle of an operation."""


class ManualWriter:
    """Carries jobs out when it is told, on the thread of the test."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def write(self, file: File, offset: int, buffers: Buffers, sync: bool, done: Done) -> None:
        self.jobs.append(Job(Kind.WRITE, file, offset, buffers, sync, done))

    def retire(self, file: File) -> None:
        self.jobs.append(Job(Kind.CLOSE, file, 0, (), False, lambda error: None))

    def run(self, *, sync: bool = True) -> None:
        """Without `sync` the power fails before anything is durable: nobody is told."""
        jobs, self.jobs = self.jobs, []
        if not sync:
            jobs = [job._replace(sync=False, done=lambda error: None) for job in jobs]
        for finished in carry_out(jobs):
            finished()


class Bench:
    """A durable queue's log on a disk in memory."""

    def __init__(self, capacity: int = 1 << 40, *, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        self.disk = MemoryDirectory(capacity)
        self.file_bytes_max = file_bytes_max
        self.answers: list[OSError | None] = []
        self.position = 0
        self.opened()

    def opened(self) -> list[tuple[int, int, bytes]]:
        """Opens the log anew and returns what it has: (kind, position, body)."""
        self.writer = ManualWriter()
        self.log = ClassicLog(
            self.disk, "7", self.writer, sync=True, file_bytes_max=self.file_bytes_max
        )
        return [(found.kind, found.position, found.body) for found in self.log.recover()]

    def positions(self) -> list[int]:
        return [position for kind, position, _ in self.opened() if kind == MESSAGES]

    def add(self, size: int = 40) -> int:
        self.position += 1
        self.log.add_messages(self.position, bytes([self.position % 256]) * size)
        return self.position

    def flush(self) -> None:
        self.log.flush(self.answers.append)
        self.writer.run()


def test_records_come_back_in_their_order() -> None:
    bench = Bench()
    bench.add()
    bench.log.add_settled([1, 1])
    bench.log.add_handed_out(2)
    bench.flush()
    pairs = (1).to_bytes(8, "little") * 2
    assert bench.opened() == [
        (MESSAGES, 1, bytes([1]) * 40),
        (SETTLED, 0, pairs),
        (HANDED_OUT, 2, b""),
    ]
    assert bench.disk.list("7") == ["00000001.log"]


def test_nothing_is_on_disk_before_it_is_flushed() -> None:
    bench = Bench()
    bench.add()
    bench.log.flush(bench.answers.append)
    assert bench.answers == []
    bench.disk.crash(lambda: False)
    assert bench.opened() == []


@pytest.mark.parametrize("seed", range(60))
def test_a_power_failure_loses_nothing_that_was_confirmed(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench()
    confirmed = 0
    for _ in range(rng.randint(0, 4)):
        for _ in range(rng.randint(1, 4)):
            bench.add(rng.choice([8, 400, 2000]))
        bench.flush()
        confirmed = bench.position
    for _ in range(rng.randint(0, 6)):
        bench.add(rng.choice([8, 400, 2000]))
    bench.log.flush(bench.answers.append)
    bench.writer.run(sync=False)
    bench.disk.crash(lambda: rng.random() < 0.6)
    found = bench.positions()
    assert found == list(range(1, len(found) + 1))
    assert confirmed <= len(found) <= bench.position
    # It goes on behind what it found, and that lasts.
    bench.position = len(found)
    bench.add()
    bench.flush()
    bench.disk.crash(lambda: False)
    assert bench.positions() == list(range(1, len(found) + 2))


@pytest.mark.parametrize("seed", range(80))
def test_the_power_may_go_while_files_change(seed: int) -> None:
    """Between any two operations on the disk, with records of several files under way."""
    rng = random.Random(seed)
    bench = Bench(file_bytes_max=3000)
    for _ in range(4):
        for _ in range(rng.randint(1, 6)):
            bench.add(rng.choice([400, 2000]))
        bench.flush()
    confirmed = bench.position
    for _ in range(rng.randint(1, 6)):
        bench.add(rng.choice([400, 2000]))
    bench.log.flush(bench.answers.append)
    left = rng.randint(0, 12)

    def operation(*_: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise PowerLoss

    bench.disk.operation = operation
    with contextlib.suppress(PowerLoss):
        bench.writer.run()
    bench.disk.operation = None
    bench.disk.crash(lambda: rng.random() < 0.5)
    found = bench.positions()
    assert found == list(range(1, len(found) + 1))
    assert confirmed <= len(found) <= bench.position
    bench.position = len(found)
    bench.add()
    bench.flush()
    assert bench.positions() == list(range(1, bench.position + 1))


def test_a_file_whose_first_write_was_lost_is_begun_anew() -> None:
    bench = Bench()
    bench.add(4000)
    bench.log.flush(bench.answers.append)
    bench.writer.run(sync=False)
    sectors = iter([False])
    bench.disk.crash(lambda: next(sectors, True))
    assert bench.opened() == []
    bench.add()
    bench.flush()
    assert bench.positions() == [2]


def test_damage_in_an_older_file_costs_one_record() -> None:
    bench = Bench(file_bytes_max=200)
    for _ in range(6):
        bench.add()
        bench.flush()
    assert len(bench.disk.list("7")) > 1
    assert bench.positions() == [1, 2, 3, 4, 5, 6]
    bench.disk.open("7/00000001.log").pwrite([b"\xff"], 60)
    assert bench.positions() == [2, 3, 4, 5, 6]
    assert bench.log.damages == [("7/00000001.log", 16, 72)]
    bench.disk.open("7/00000002.log").pwrite([b"\xff"], 0)
    assert bench.positions() == [2, 3, 4, 5, 6]
    assert [name for name, _, _ in bench.log.damages] == ["7/00000001.log", "7/00000002.log"]


@pytest.mark.parametrize("at", range(5))
def test_damage_of_what_was_durable_costs_one_record(at: int) -> None:
    """In the one file of a queue, where a torn tail would be cut."""
    bench = Bench()
    for _ in range(6):
        bench.add()
        bench.flush()
    bench.disk.open("7/00000001.log").pwrite([b"\xff"], 16 + 72 * at + 40)
    expected = [n for n in range(1, 7) if n != at + 1]
    assert bench.positions() == expected
    assert bench.log.damages == [("7/00000001.log", 16 + 72 * at, 72)]
    # It goes on behind, and the damage stays what it is.
    bench.position = 6
    bench.add()
    bench.flush()
    assert bench.positions() == [*expected, 7]


def test_a_damaged_header_costs_nothing() -> None:
    bench = Bench()
    for _ in range(3):
        bench.add()
        bench.flush()
    bench.disk.open("7/00000001.log").pwrite([b"XXXX"], 0)
    assert bench.positions() == [1, 2, 3]
    assert len(bench.log.damages) == 1


def test_files_of_an_unknown_version_are_refused() -> None:
    bench = Bench()
    bench.add()
    bench.flush()
    bench.disk.open("7/00000001.log").pwrite([b"\x02"], 4)
    with pytest.raises(StorageFault, match="unknown version"):
        bench.opened()


@pytest.mark.parametrize("operation", ["make", "create", "sync"])
def test_a_file_that_cannot_be_created_is_a_write_that_failed(operation: str) -> None:
    bench = Bench()

    def refuse(name: str, path: str) -> None:
        if name == operation:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    bench.disk.operation = refuse
    for _ in range(2):
        bench.add()
        bench.flush()
    assert [error is None for error in bench.answers] == [False, False]
    bench.disk.operation = None
    bench.add()
    bench.flush()
    assert bench.answers[2] is None
    bench.disk.crash(lambda: False)
    assert bench.positions() == [1, 2, 3]


def test_a_file_that_cannot_be_removed_keeps_those_behind_it() -> None:
    bench = Bench(file_bytes_max=200)
    places = [bench.log.add_messages(number, bytes(40)) for number in range(6)]
    bench.flush()
    before = bench.disk.list("7")
    bench.disk.operation = lambda name, path: _refuse(name, path, "remove", "00000001")
    for place in places[:4]:
        bench.log.drop(place)
    bench.log.collect()
    assert bench.disk.list("7") == before
    bench.disk.operation = None
    bench.log.collect()
    bench.writer.run()
    assert bench.disk.list("7") == before[-1:]


def test_a_log_that_is_removed_before_its_first_write_leaves_nothing() -> None:
    bench = Bench()
    bench.add()
    bench.log.flush(bench.answers.append)
    bench.log.remove()
    bench.writer.run()
    assert bench.disk.list("7") == []
    assert bench.answers == [None]


def _refuse(name: str, path: str, operation: str, part: str) -> None:
    if name == operation and part in path:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_files_go_when_nothing_in_them_lives() -> None:
    bench = Bench(file_bytes_max=200)
    places = []
    for number in range(6):
        places.append(bench.log.add_messages(number, bytes(40)))
        bench.flush()
    before = bench.disk.list("7")
    for place in places[:4]:
        bench.log.drop(place)
    bench.log.collect()
    bench.writer.run()
    assert bench.disk.list("7") == before[1:]
    assert bench.log.read(places[5]) == bytes(40)


def test_a_full_disk_refuses_until_the_gap_is_filled() -> None:
    bench = Bench(capacity=1000)
    bench.add()
    bench.flush()
    assert bench.answers == [None]
    bench.add(4000)
    bench.flush()
    assert isinstance(bench.answers[1], OSError)
    # A small one has room, but recovery would not get to it.
    bench.add()
    bench.flush()
    assert isinstance(bench.answers[2], OSError)
    bench.disk.capacity = 1 << 40
    bench.add()
    bench.flush()
    assert bench.answers[3] is None
    bench.disk.crash(lambda: False)
    assert bench.positions() == [1, 2, 3, 4]


def test_a_failed_sync_confirms_nothing_of_that_file() -> None:
    bench = Bench()
    bench.add()
    bench.flush()
    failing = True

    def operation(name: str, path: str) -> None:
        if failing and name == "sync":
            raise OSError(5, "Input/output error", path)

    bench.disk.operation = operation
    for _ in range(2):
        bench.add()
        bench.log.flush(bench.answers.append)
    bench.writer.run()
    assert [answer is None for answer in bench.answers] == [True, False, False]
    failing = False
    bench.add()
    bench.flush()
    assert bench.answers[3] is None
    bench.disk.crash(lambda: False)
    assert bench.positions() == [1, 2, 3, 4]


def test_a_removed_log_leaves_nothing() -> None:
    bench = Bench()
    bench.add()
    bench.flush()
    bench.log.remove()
    bench.writer.run()
    assert not bench.disk.exists("7")
    assert bench.opened() == []
