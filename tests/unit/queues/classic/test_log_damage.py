"""Files of a classic queue's log that are damaged, missing, or not its own."""

from __future__ import annotations

import pytest

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
def test_a_missing_file_is_named(bench: Bench, number: int) -> None:
    bench.disk.remove(f"7/{number:08d}.log")
    gone = (2 * number - 1, 2 * number)
    assert bench.positions() == [n for n in range(1, MESSAGES + 1) if n not in gone]
    assert bench.log.damages == [(f"7/{number:08d}.log", 0, 0)]


def test_no_file_is_missing_when_the_oldest_went_in_order(bench: Bench) -> None:
    bench.opened()
    for number in range(2, 7):
        bench.log.keep(number, 1)
    bench.log.collect()
    bench.flush()
    assert bench.positions() == list(range(3, MESSAGES + 1))
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
