"""The log of a classic queue on a disk that loses power, tears writes and fills up."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import struct

import pytest
from crc32c import crc32c

from convoymq.model.errors import StorageFault
from convoymq.queues.classic.file_index import FileIndex
from convoymq.queues.classic.limits import Limits
from convoymq.queues.classic.log import FILE_BYTES_MAX, ClassicLog
from convoymq.queues.classic.log_writer import Buffers, Done, Job, Kind, carry_out, joined
from convoymq.queues.classic.machine import ClassicMachine
from convoymq.queues.classic.recovery import recover
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.types import File

RECORD_BYTES = 88
"""Length of a record with a command of no more than that."""


def command(number: int, size: int = 8) -> bytes:
    """An ENQUEUE command with one record of so many bytes."""
    size += -size % 4
    length = 40 + size + 8
    length += -length % 8
    head = struct.pack("<IBBHQQIIQ", length, 1, 0, 0, 1, 1, 1, 40 + size, size)
    body = head + bytes([number % 256]) * size + struct.pack("<II", 40, 40 + size)
    return body.ljust(length, b"\0")


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

    def opened(self) -> list[FileIndex]:
        """Opens the log anew and returns what it has."""
        self.writer = ManualWriter()
        self.log = ClassicLog(
            self.disk, "7", self.writer, sync=True, file_bytes_max=self.file_bytes_max
        )
        return list(self.log.recover())

    def positions(self) -> list[int]:
        """Opens the log anew and reads its messages."""
        found: list[int] = []
        for index in self.opened():
            for line in index.lines.values():
                at = line.start
                while at < line.end:
                    stored, at = self.log.read_batch(index.number, at, line.end)
                    found += [each.position for each in stored]
        return found

    def add(self, size: int = 8) -> int:
        self.position += 1
        self.log.add_messages(self.position, command(self.position, size))
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
    (index,) = bench.opened()
    assert index.lines[0].pairs.tolist() == [1, 1]
    assert index.settled.tolist() == [1, 1]
    assert index.handed_out == {0: 2}
    assert bench.positions() == [1]
    assert bench.disk.list("7") == ["00000001.log"]


def test_nothing_is_on_disk_before_it_is_flushed() -> None:
    bench = Bench()
    bench.add()
    bench.log.flush(bench.answers.append)
    assert bench.answers == []
    bench.disk.crash(lambda: False)
    assert bench.positions() == []


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
    assert bench.positions() == []
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
    rest = bench.positions()
    assert rest == [2, 3, 4, 5, 6]
    assert bench.log.damages == [("7/00000001.log", 16, RECORD_BYTES)]
    bench.disk.open("7/00000002.log").pwrite([b"\xff"], 0)
    assert bench.positions() == rest
    names = sorted(name for name, _, _ in bench.log.damages)
    assert names == ["7/00000001.log", "7/00000002.log"]


@pytest.mark.parametrize("at", range(5))
def test_damage_of_what_was_durable_costs_one_record(at: int) -> None:
    """In the one file of a queue, where a torn tail would be cut."""
    bench = Bench()
    for _ in range(6):
        bench.add()
        bench.flush()
    bench.disk.open("7/00000001.log").pwrite([b"\xff"], 16 + RECORD_BYTES * at + 40)
    expected = [n for n in range(1, 7) if n != at + 1]
    assert bench.positions() == expected
    assert bench.log.damages == [("7/00000001.log", 16 + RECORD_BYTES * at, RECORD_BYTES)]
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


@pytest.mark.parametrize("is_checked", [False, True])
def test_files_of_an_unknown_version_are_refused(is_checked: bool) -> None:
    bench = Bench()
    bench.add()
    bench.flush()
    head = b"CVCQ\x02".ljust(12, b"\0")
    check = struct.pack("<I", crc32c(head) if is_checked else 0)
    bench.disk.open("7/00000001.log").pwrite([head + check], 0)
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
    places = [bench.log.add_messages(number, command(number)) for number in range(6)]
    bench.flush()
    before = bench.disk.list("7")
    bench.disk.operation = lambda name, path: _refuse(name, path, "remove", "00000001")
    for place in places[:4]:
        bench.log.drop(place.file, 1)
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


def test_a_log_without_a_file_is_removed_without_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that lives for one message is opened, which removes what may be left, and deleted."""
    bench = Bench()
    asked: list[str] = []
    monkeypatch.setattr(bench.disk, "remove", asked.append)
    bench.log.remove()
    bench.log.remove()
    assert asked == ["7"]
    bench.add()
    bench.log.remove()
    assert asked == ["7", "7"]


def _refuse(name: str, path: str, operation: str, part: str) -> None:
    if name == operation and part in path:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_files_go_when_nothing_in_them_lives() -> None:
    bench = Bench(file_bytes_max=200)
    places = []
    for number in range(6):
        places.append(bench.log.add_messages(number, command(number)))
        bench.flush()
    before = [name for name in bench.disk.list("7") if name.endswith(".log")]
    for place in places[:4]:
        bench.log.drop(place.file, 1)
    bench.log.collect()
    bench.writer.run()
    assert bench.disk.list("7") == before[1:]  # With the file went its index.
    assert bench.log.read(places[5]) == command(5)


def handed_out(indexes: list[FileIndex]) -> dict[int, int]:
    """Priority -> positions below this were handed out, by all files together."""
    found: dict[int, int] = {}
    for index in indexes:
        for level, position in index.handed_out.items():
            found[level] = max(position, found.get(level, 0))
    return found


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_handed_out_is_known_when_its_file_is_gone(*, restarts: bool) -> None:
    """Its message is moved to a younger file."""
    bench = Bench(file_bytes_max=100)
    first = bench.log.add_messages(1, command(1))
    bench.log.add_handed_out(2)
    bench.flush()
    for number in range(2, 5):
        bench.log.add_messages(number, command(number))
        bench.flush()
    if restarts:
        for index in bench.opened():
            bench.log.keep(index.number, 1)
    bench.log.move_messages(1, command(1), 0, [])
    bench.flush()
    bench.log.drop(first.file, 1)
    bench.log.collect()
    bench.writer.run()
    assert f"{first.file:08}.log" not in bench.disk.list("7")
    assert handed_out(bench.opened()) == {0: 2}


def test_what_only_an_older_file_says_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 0.4.0 began files without it."""
    bench = Bench(file_bytes_max=100)
    first = bench.log.add_messages(0, command(0))
    bench.log.add_handed_out(1)
    bench.flush()
    monkeypatch.setattr(bench.log, "add_handed_out", lambda *_: None)
    bench.add()
    bench.add()
    bench.flush()
    assert [index.handed_out for index in bench.opened()] == [{0: 1}, {}, {}]
    bench.log = ClassicLog(bench.disk, "7", bench.writer, sync=True, file_bytes_max=100)
    recover(bench.log, ClassicMachine(Limits(), lambda _place: b""), 0, keeps_transient=True)
    bench.flush()
    bench.log.drop(first.file, 1)
    bench.log.collect()
    bench.writer.run()
    assert handed_out(bench.opened()) == {0: 1}


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
    assert bench.positions() == []


def test_writes_that_follow_each_other_are_one() -> None:
    disk = MemoryDirectory()
    a, b = disk.open("a", create=True), disk.open("b", create=True)

    def write(file: File, offset: int, *buffers: bytes) -> tuple[Job, File]:
        return Job(Kind.WRITE, file, offset, buffers, True, lambda error: None), file

    writes = [
        write(a, 16, b"1", b"23"), write(b, 8, b"x"), write(a, 19, b"4"), write(a, 30, b"5"),
        write(b, 0, b"begin"), write(a, 31, b"6"), write(b, 5, b"s"),
    ]  # fmt: skip
    assert [(p.file, p.offset, b"".join(p.buffers), p.end) for p in joined(writes)] == [
        (a, 16, b"1234", 20), (b, 8, b"x", 9), (a, 30, b"5", 31),
        # What comes behind the begin of a file stays there.
        (b, 0, b"begins", 6), (a, 31, b"6", 32),
    ]  # fmt: skip
