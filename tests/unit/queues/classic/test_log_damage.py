"""Files of a classic queue's log that are damaged, missing, or not its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoymq.queues.classic.limits import Limits
from convoymq.queues.classic.log import ClassicLog
from convoymq.queues.classic.machine import ClassicMachine
from convoymq.queues.classic.recovery import recover
from tests.unit.queues.classic.support import Node, Time, queue_record, settle
from tests.unit.queues.classic.test_log import RECORD_BYTES, Bench

MESSAGES = 12


def content(bench: Bench, name: str) -> bytes:
    file = bench.disk.open(f"7/{name}")
    return file.pread(file.size(), 0)


def put(bench: Bench, name: str, data: bytes) -> None:
    file = bench.disk.open(f"7/{name}", create=True)
    file.truncate(0)
    file.pwrite([data], 0)


@pytest.fixture
def bench() -> Bench:
    """Six files, two messages in each; all but the last have an index."""
    made = Bench(file_bytes_max=150)
    for _ in range(MESSAGES):
        made.add()
        made.flush()
    assert [name for name in made.disk.list("7") if name.endswith(".log")] == [
        f"{number:08d}.log" for number in range(1, 7)
    ]
    assert sum(name.endswith(".idx") for name in made.disk.list("7")) == 5
    return made


@pytest.mark.parametrize("number", range(1, 7))
def test_a_missing_file_is_named(tmp_path: Path, time: Time, number: int) -> None:
    record = queue_record(durable=True)
    node = Node(1, {}, tmp_path, time, file_bytes_max=200)
    channel = node.channel(node.open(record))
    for n in range(1, MESSAGES + 1):
        channel.publish(b"%d" % n)
        settle(node.nodes)
    node.host.stop()
    files = sorted((tmp_path / "node-1" / "1").glob("*.log"))
    assert len(files) == 6
    files[number - 1].unlink()
    node = Node(1, {}, tmp_path, time)
    channel = node.channel(node.open(record))
    channel.consume()
    settle(node.nodes)
    gone = (2 * number - 1, 2 * number)
    assert channel.deliveries() == [b"%d" % n for n in range(1, MESSAGES + 1) if n not in gone]
    ((event, fields),) = node.notes
    name = f"1/{number:08d}.log"
    # What the newest one had nobody can say.
    assert (event, fields["missing"]) == ("queue.records_dropped", [name])
    assert fields["messages"] == (2 if number < 6 else 0)
    node.host.stop()


def recovered(bench: Bench) -> tuple[ClassicMachine, int]:
    bench.log = ClassicLog(bench.disk, "7", bench.writer, sync=True, file_bytes_max=150)
    machine = ClassicMachine(Limits(), lambda _place: (b"", 0), read=bench.log.read_batch)
    unreadable, _ = recover(bench.log, machine, 0, keeps_transient=True)
    # The messages of a bench have no headers.
    return machine, unreadable - machine.ready_count


def test_no_file_is_missing_when_the_oldest_went_in_order(bench: Bench) -> None:
    """Its index may come back when the power fails."""
    index = content(bench, "00000001.idx")
    bench.log.add_settled([1, 2])
    bench.flush()
    recovered(bench)
    bench.writer.run()
    assert not bench.disk.exists("7/00000001.log")
    put(bench, "00000001.idx", index)
    machine, lost = recovered(bench)
    assert (machine.ready_count, lost) == (MESSAGES - 2, 0)
    assert bench.log.damages == []


def test_no_file_is_missing_when_the_next_one_could_not_be_created(bench: Bench) -> None:
    for _ in range(2):
        bench.add()
    assert bench.positions() == list(range(1, MESSAGES + 1))
    assert bench.log.damages == []


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("records", [0, 1, 1.5])
def test_an_older_file_that_is_too_short_is_named(
    bench: Bench, number: int, records: float
) -> None:
    name = f"{number:08d}.log"
    end = 16 + int(records * RECORD_BYTES)
    put(bench, name, content(bench, name)[:end])
    gone = range(2 * number - 1 + int(records), 2 * number + 1)
    assert bench.positions() == [n for n in range(1, MESSAGES + 1) if n not in gone]
    assert {damage[0] for damage in bench.log.damages} == {f"7/{name}"}


@pytest.mark.parametrize("number", range(1, 7))
def test_a_file_of_another_queue_is_not_served(bench: Bench, number: int) -> None:
    other = Bench(file_bytes_max=150)
    other.position = 100
    other.log._path = "8"
    for _ in range(MESSAGES):
        other.add()
        other.flush()
    name = f"{number:08d}.log"
    foreign = other.disk.open(f"8/{name}")
    put(bench, name, foreign.pread(foreign.size(), 0))
    gone = (2 * number - 1, 2 * number)
    kept = [n for n in range(1, MESSAGES + 1) if n not in gone]
    assert bench.positions() == kept
    assert (f"7/{name}", 0, foreign.size()) in bench.log.damages
    # It is not written to.
    bench.position = 200
    bench.add()
    bench.flush()
    assert bench.positions() == [*kept, 201]


def test_a_file_in_the_place_of_another_one_is_not_served(bench: Bench) -> None:
    put(bench, "00000002.log", content(bench, "00000004.log"))
    assert bench.positions() == [n for n in range(1, MESSAGES + 1) if n not in (3, 4)]


@pytest.mark.parametrize("change", ["other", "flipped", "short", "empty"])
def test_an_index_that_is_not_the_files_costs_nothing(bench: Bench, change: str) -> None:
    own = content(bench, "00000002.idx")
    put(
        bench,
        "00000002.idx",
        {
            "other": content(bench, "00000004.idx"),
            "flipped": own[:30] + bytes([own[30] ^ 1]) + own[31:],
            "short": own[:-1],
            "empty": b"",
        }[change],
    )
    assert bench.positions() == list(range(1, MESSAGES + 1))
    assert bench.log.damages == []


@pytest.mark.parametrize("at", range(16))
def test_a_flipped_bit_in_a_header_costs_nothing(bench: Bench, at: int) -> None:
    head = bytearray(content(bench, "00000003.log"))
    head[at] ^= 16
    put(bench, "00000003.log", bytes(head))
    assert bench.positions() == list(range(1, MESSAGES + 1))
    assert bench.log.damages == [("7/00000003.log", 0, 16)]
