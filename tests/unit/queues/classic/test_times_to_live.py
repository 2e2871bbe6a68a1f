"""The time to live of messages, as the files of a log say it."""

from __future__ import annotations

from random import Random

import pytest

from convoymq.queues.classic.log import ClassicLog
from convoymq.queues.classic.times_to_live import ENTRIES_MAX, TimesToLive
from convoymq.storage.files import MemoryDirectory
from tests.unit.queues.classic.test_log import ManualWriter, command


def test_an_entry_counts_from_its_position_on_in_whichever_order_it_comes() -> None:
    for order in ((5, 9, 2), (9, 5, 2), (2, 9, 5)):
        times = TimesToLive()
        for position in order:
            times.add(position, position * 10)
        assert [times.at(p)[1] for p in (0, 2, 4, 5, 8, 9, 99)] == [None, 20, 20, 50, 50, 90, 90]


def test_entries_are_bounded_and_the_oldest_go() -> None:
    times = TimesToLive()
    for position in range(ENTRIES_MAX + 1):
        times.add(position, position)
    assert len(times.entries) == ENTRIES_MAX
    assert (times.at(0), times.at(1)) == ((0, None), (1, 1))


@pytest.mark.parametrize("seed", range(30))
def test_files_that_are_left_say_the_time_of_all_messages_that_live(seed: int) -> None:
    """Messages come, are moved by compaction, and go with their files, while the time changes."""
    rng = Random(seed)
    directory, writer = MemoryDirectory(1 << 30), ManualWriter()
    log = ClassicLog(directory, "7", writer, sync=True, file_bytes_max=512)
    truth: dict[int, int | None] = {}
    where: dict[int, int] = {}
    ttl_ms: int | None = None
    for position in range(150):
        if rng.random() < 0.2:
            ttl_ms = rng.choice((None, 10, 20, 30))
            log.set_time_to_live(position, ttl_ms)
        truth[position] = ttl_ms
        where[position] = log.add_messages(position, command(position), live=1).file
        for moved in [p for p, file in where.items() if file + 3 < where[position]]:
            old = where.pop(moved)
            if rng.random() < 0.1:
                where[moved] = log.move_messages(moved, command(moved), 0, []).file
            log.drop(old, 1)
        log.flush(lambda _error: None)
        writer.run()
        log.collect()
    log.close()
    writer.run()
    again = ClassicLog(directory, "7", writer, sync=True, file_bytes_max=512)
    list(again.recover())
    assert {p: again.times.at(p)[1] for p in where} == {p: truth[p] for p in where}
    assert len(again.times.entries) < 150
