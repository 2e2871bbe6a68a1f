"""Rows of ordered topics: keys from the kernel, and what machines and nodes tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convoymq.kernels import batch
from convoymq.kernels.trace import TraceRows, name_hash
from convoymq.model import trace as words
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.commands import ProducedRun as Run
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.order_token import OrderToken
from convoymq.trace.effects import EffectLog, SourceLog
from tests.unit.topics.machine.support import SETTINGS, Bench
from tests.unit.trace.support import rows_of
from tests.unit.trace.topic_support import KEYS, LOGICAL, MEMBERS, SEED, Routes, run

Row = dict[str, int]


def taken(rows: TraceRows) -> list[Row]:
    """Rows as dicts."""
    count, data = rows.take()
    values = memoryview(data).cast("q")
    return [
        {name: values[k * count + i] for k, name in enumerate(words.ROW_COLUMNS)}
        for i in range(count)
    ]


def test_keys_come_in_runs_with_hash_and_logical_partition() -> None:
    bench = Bench(created_version=0, opened=False)
    rows = bench.machine.trace = TraceRows()
    rows.logical, rows.seed = LOGICAL, SEED
    keys = [b"a", b"a", b"b", b"a"]
    for key in keys:
        target = bench.log._target(1 << 56 | 1)
        target.publish([b"\0" + bytes([len(key)]) + key, b"h", b"body"], 4, 0)
    bench.seal()
    found = [row for row in taken(rows) if row["kind"] == words.KEYED]
    assert [(row["session"], row["consumer"], row["first_id"], row["count"]) for row in found] == [
        (name_hash(key), logical_partition(key, LOGICAL, SEED), first, count)
        for key, first, count in ((b"a", 1, 2), (b"b", 3, 1), (b"a", 4, 1))
    ]
    assert [row["position_first"] for row in found] == [0, 2, 3]
    assert len({row["ordinal"] for row in found}) == 3


def test_keys_of_entries_that_are_on_disk_are_counted_and_left_out() -> None:
    bench = Bench(created_version=0, opened=False)
    rows = bench.machine.trace = TraceRows()
    rows.skip_through = 1
    bench.publish(1, 1)
    assert taken(rows) == []
    bench.publish(1)
    assert {row["index"] for row in taken(rows)} == {2}


def test_a_command_without_these_records_has_no_keys() -> None:
    bench = Bench(created_version=0, opened=False)
    bench.publish(1, 1)
    data = bench.log.entries[0].data
    offset = next(each[6] for each in batch.commands(data) if each[0] == batch.CMD_ENQUEUE)
    with pytest.raises(ValueError):
        TraceRows().keys(words.KEYED, data, 1, offset, 1, 2, 1)


def test_names_have_64_bits_that_differ() -> None:
    hashes = {name_hash(b"key-%d" % number) for number in range(10_000)}
    assert len(hashes) == 10_000
    assert min(hashes) < 0 < max(hashes)
    assert len({each & 0xFFFF for each in hashes}) > 8_000


def test_what_is_refused_or_changes_nothing_is_not_told() -> None:
    bench = Bench()
    rows = bench.machine.trace = TraceRows()
    bench.ask(c.Open("change-1", 2, 1))
    bench.ask(c.Lease("g", 1, 1, "1-1-1-1"))
    bench.ask(c.OpenCursor("g", 1))
    bench.ask(c.OpenCursor("g", 1))
    bench.ask(c.Lease("g", 1, 2, "1-1-1-1"))
    bench.ask(c.AckRanges("g", 1, 1, (1, 1)))
    bench.ask(c.AckRanges("g", 1, 2, (1, 1)))
    kinds = [row["kind"] for row in taken(rows)]
    assert kinds == [words.CURSOR, words.LEASED]


def test_every_replica_tells_the_same() -> None:
    bench = Bench(created_version=0, opened=False)
    bench.publish(1, 2, 3)
    bench.ask(c.OpenCursor("g", 1))
    bench.ask(c.Lease("g", 1, 1, "2-1-1-1"))
    bench.ask(c.Park("g", 1, 1, 2, b"q", 3, b"copy", False))
    bench.ask(c.ResumeParked("g", b"q"))
    bench.ask(c.DoneParked("g", 1, 1, b"q", OrderToken(0, 2)))
    bench.ask(c.AckRanges("g", 1, 1, (1, 3)))
    bench.ask(c.Seal("c", 1, 1, (), term=1))
    bench.ask(c.HandOver("g", 1))
    told = [replayed(bench), replayed(bench)]
    assert told[0] == told[1]
    kinds = {row["kind"] for row in told[0]}
    assert kinds >= {words.PARKED, words.SETTLED, words.SEALED, words.HANDED_OVER, words.LEASED}
    settled = next(row for row in told[0] if row["kind"] == words.SETTLED)
    assert (settled["first_id"], settled["count"]) == (1, 3)


def replayed(bench: Bench) -> list[Row]:
    machine = PartitionGroupMachine({**SETTINGS, "created_version": 0})
    rows = machine.trace = TraceRows()
    for entry in bench.log.entries:
        machine.apply(entry.index, entry.time_ms, entry.data)
    return taken(rows)


def test_runs_of_a_producer_are_told_with_what_was_stored_of_them() -> None:
    bench = Bench(created_version=0, opened=False)
    rows = bench.machine.trace = TraceRows()
    bench.produce(Run(1, 1, 2), Run(6, 1, 1))
    bench.produce(Run(1, 1, 2), Run(6, 1, 3), Run(2, 2, 2))
    found = taken(rows)
    produced = [row for row in found if row["kind"] == words.PRODUCED]
    names = ("session", "consumer", "seq", "first_id", "count", "position_first")
    assert [tuple(row[name] for name in names) for row in produced] == [
        (5, 1, 1, 1, 2, 1),
        (5, 1, 1, 6, 1, 3),
        (5, 1, 2, 6, 2, 4),
    ]
    keyed = [row for row in found if row["kind"] == words.KEYED]
    assert sum(row["count"] for row in keyed) == 5
    published = [row for row in found if row["kind"] == words.PUBLISHED]
    assert [(row["reason"], row["count"]) for row in published] == [
        (0, 3), (0, 2), (words.DUPLICATE, 5)
    ]  # fmt: skip
    # Only the first row of a command begins at 0: the audit takes others for another command.
    assert [row["position_first"] for row in published] == [0, 3, 2]


def test_a_topic_tells_of_all_that_happens_to_it(tmp_path: Path) -> None:
    routes = Routes(tmp_path)
    topic = run(routes, "orders")
    routes.close()
    rows = rows_of(tmp_path)
    told = {row["kind"] for row in rows}
    silent = {words.LOST, words.UNGROUPED, words.PRODUCED, words.SOUGHT, words.GIVEN_UP}
    silent |= {words.PASSED, words.SKIPPED}
    also = {words.PUBLISHER, words.TAGGED, words.HANDED_OUT}
    assert told >= {*words.TOPIC_DECIDED, *also} - silent
    mine = [row for row in rows if row["kind"] == words.RANGE]
    assert {row["session"] for row in mine} == {topic.number}
    assert [(row["seq"], row["consumer"]) for row in mine] == [
        (0, 0), (0, 1), (1, 2), (1, 3), (1, 1)
    ]  # fmt: skip
    granted = [row for row in rows if row["kind"] == words.GRANTED]
    assert {row["first_id"] for row in granted} == {name_hash(name.encode()) for name in MEMBERS}
    keys = {row["session"] for row in rows if row["kind"] == words.KEYED}
    assert keys == {name_hash(key) for key in KEYS}


def test_lines_of_sinks_and_sources_have_rising_times(tmp_path: Path) -> None:
    with SourceLog(tmp_path / "new", "p", "orders") as source:
        for number in range(3):
            source.changed("k", str(number))
    with EffectLog(tmp_path / "new", "s", "orders", "g") as sink:
        sink.applied("k", "0" * 16 + "-" + "0" * 16, "1")
        sink.ignored("k", "0" * 16 + "-" + "0" * 16)
    lines = [
        json.loads(line) for line in (tmp_path / "new" / "source-p.jsonl").read_text().splitlines()
    ]
    times = [line["time_us"] for line in lines]
    assert times == sorted(set(times))
    effects = [
        json.loads(line) for line in (tmp_path / "new" / "effects-s.jsonl").read_text().splitlines()
    ]
    assert [line["applied"] for line in effects] == [True, False]
