"""The trace of a broker, and the checks of broker groups: real stores, no Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from convoymq.model import trace as words
from convoymq.replication.group.types import Life
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.offsets import Offsets
from convoymq.rocketmq.broker.tracing import GroupTrace, TraceSettings, group_of
from convoymq.rocketmq.store.types import Draft
from convoymq.spark.audit.coverage import queue_facts
from convoymq.spark.audit.plan import read_footers
from convoymq.storage.files import MemoryDirectory
from tests.unit.rocketmq.store.stores import Opened
from tests.unit.trace.broker_group_support import Row, judge

LIFE = Life(number=7, begin=0, is_proven=True)
LATER = Life(number=9, begin=1, is_proven=True)


class Replica:
    """A store and its trace, without a broker."""

    clock_us = 1_000_000

    def __init__(self, root: Path, number: int = 0, disk: MemoryDirectory | None = None,
                 *lives: Life) -> None:  # fmt: skip
        self.opened = Opened(disk)
        self.store = self.opened.store
        self.lives = lives or (LIFE,)
        self.trace = GroupTrace(
            root / str(number), TraceSettings(enabled=True), self.store, cluster="c", broker="b",
            broker_id=number, lives=lambda: self.lives, members=lambda: (), wall_us=self.clock,
        )  # fmt: skip
        self.trace.start()

    @classmethod
    def clock(cls) -> int:
        Replica.clock_us += 1000
        return Replica.clock_us

    def send(self, *numbers: int, queues: int = 2, confirmed: bool = True) -> None:
        drafts = [Draft("orders", n % queues, b"%d" % n) for n in numbers]
        placed = self.opened.put(*drafts)
        if confirmed:
            self.trace.confirmed(zip(drafts, placed, strict=True))

    def read(self, offset: int, queue: int = 0, *, again: bool = False) -> int:
        got = self.store.get("orders", queue, offset, 32)
        self.trace.read("g", "orders", queue, offset, got.next, got.records, again=again)
        return got.next

    def copy_to(self, other: Replica) -> None:
        start = other.store.max_offset
        while block := bytes(self.store.read_raw(start, 700)):
            other.store.append_raw(start, block)
            other.opened.settle()
            start += len(block)

    def stop(self) -> MemoryDirectory:
        self.trace.stop()
        return self.opened.close()

    def kill(self) -> MemoryDirectory:
        """The rows that were not handed over are gone."""
        self.trace._traces.join(30)
        assert self.trace._trace is not None
        segment = self.trace._trace._feed.segment
        assert segment is not None
        assert segment._file is not None
        segment._file.close()
        return self.opened.disk


def of_kind(rows: list[Row], kind: int, **wanted: int) -> list[Row]:
    found = [row for row in rows if row["kind"] == kind
             and all(row[key] == value for key, value in wanted.items())]  # fmt: skip
    return sorted(found, key=lambda row: (row["node"], row["time_us"]))


def middle(rows: list[Row], kind: int, **wanted: int) -> Row:
    found = of_kind(rows, kind, **wanted)
    return found[len(found) // 2]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a master and a slave: messages of two queues, read and committed."""
    root = tmp_path_factory.mktemp("two")
    master, slave = Replica(root), Replica(root, 1)
    offset = 0
    for k in range(30):
        master.send(*range(k * 8, k * 8 + 8))
        master.copy_to(slave)
        if k % 5 == 4:
            offset = slave.read(offset)
            slave.trace.committed("g", "orders", 0, offset)
        master.trace.flush()
        slave.trace.flush()
    slave.read(0, again=True)
    assert slave.opened.bodies("orders") == master.opened.bodies("orders")
    master.stop()
    slave.stop()
    return root


def test_a_whole_trace_is_clean(two: Path) -> None:
    assert judge(two) == {"entered": 240, "confirmed": 240, "fate 3": 240, "fate 5": 32}


def gap(rows: list[Row]) -> None:
    rows.remove(middle(rows, words.STORED, node=1))


def reorder(rows: list[Row]) -> None:
    one, other = of_kind(rows, words.STORED, node=2, consumer=1)[4:6]
    for name in ("position_index", "index"):
        one[name], other[name] = other[name], one[name]


def twice(rows: list[Row]) -> None:
    row = middle(rows, words.STORED, node=2)
    rows.append({**row, "time_us": row["time_us"] + 1})


def life_falls(rows: list[Row]) -> None:
    middle(rows, words.STORED, node=2)["position_command"] = 3


def elsewhere(rows: list[Row]) -> None:
    row = middle(rows, words.STORED, node=2)
    first = of_kind(rows, words.STORED, node=1, first_id=row["first_id"])[0]
    first["position_index"] += 1


def other_life(rows: list[Row]) -> None:
    middle(rows, words.ACCEPTED)["position_command"] = 8


def never_stored(rows: list[Row]) -> None:
    row = max(of_kind(rows, words.READ), key=lambda row: row["index"])
    row["index"] += 1000
    row["delivered"] += 1000
    row["first_id"] += 1000


def before_asked(rows: list[Row]) -> None:
    middle(rows, words.READ)["position_first"] += 1


def unmarked(rows: list[Row]) -> None:
    of_kind(rows, words.READ)[-1]["flags"] = 0


@pytest.mark.parametrize(
    ("injury", "names"),
    [
        (gap, {"group_numbered", "group_confirmed_stored"}),
        (reorder, {"group_log_order", "group_one_place"}),
        (twice, {"group_numbered", "group_log_order"}),
        (life_falls, {"group_log_order"}),
        (elsewhere, {"group_one_place"}),
        (other_life, {"group_confirmed_stored"}),
        (never_stored, {"group_read_stored"}),
        (before_asked, {"group_read_stored"}),
        (unmarked, {"group_repeats_marked"}),
    ],
)
def test_an_injury_is_found(
    two: Path, injury: Callable[[list[Row]], object], names: set[str]
) -> None:
    found = judge(two, injure=injury)
    assert {name for name in found if name.startswith("group_")} == names


def test_what_a_killed_broker_had_not_written_down_is_read_from_its_log(tmp_path: Path) -> None:
    first = Replica(tmp_path)
    first.send(*range(20))
    first.trace.flush()
    first.send(*range(20, 40), confirmed=False)
    disk = first.kill()
    again = Replica(tmp_path, 0, disk)
    again.send(*range(40, 50))
    again.stop()
    found = judge(tmp_path)
    assert found == {"entered": 50, "confirmed": 30, "fate 3": 50}


def test_a_lost_end_that_was_confirmed_is_found(tmp_path: Path) -> None:
    """It may come back by a slave; here another life takes its offsets."""
    master = Replica(tmp_path)
    master.send(*range(20))
    end = master.store.max_offset
    master.send(*range(20, 30))
    master.trace.flush()
    master.store.truncate(end)
    master.lives = (LIFE, Life(number=9, begin=end, is_proven=False))
    master.send(*range(20, 32))
    master.stop()
    found = judge(tmp_path)
    assert found.pop("group_confirmed_stored") == 10
    assert found == {"entered": 32, "confirmed": 42, "fate 3": 32}


def test_an_end_that_nobody_was_told_of_may_go(tmp_path: Path) -> None:
    master = Replica(tmp_path)
    master.send(*range(20))
    end = master.store.max_offset
    master.send(*range(20, 30), confirmed=False)
    master.store.truncate(end)
    master.lives = (LIFE, Life(number=9, begin=end, is_proven=True))
    master.send(*range(20, 32))
    master.stop()
    assert judge(tmp_path) == {"entered": 32, "confirmed": 32, "fate 3": 32}


def test_a_deleted_topic_begins_anew(tmp_path: Path) -> None:
    master = Replica(tmp_path)
    master.send(*range(20))
    master.store.delete_topic("orders")
    master.send(*range(4))
    master.stop()
    assert judge(tmp_path) == {"entered": 24, "confirmed": 24, "fate 3": 4}


def test_a_log_that_is_older_than_its_trace_proves_less(tmp_path: Path) -> None:
    opened = Opened()
    opened.put(*[Draft("orders", 0, b"x")] * 10)
    master = Replica(tmp_path, 0, opened.close())
    master.read(0)
    master.send(0, 2, 4)
    master.stop()
    found = judge(tmp_path)
    assert found == {"entered": 3, "confirmed": 3, "fate 3": 3, "group_read_stored?": 10}
    (facts,) = queue_facts(read_footers(tmp_path)[1])
    assert (facts.start > 0, facts.queue, facts.group) == (True, "b", group_of("c", "b"))


def test_offsets_tell_of_what_changes() -> None:
    told: list[tuple[str, str, int, int]] = []
    offsets = Offsets(ConfigFile(MemoryDirectory(), "config/o.json"), 500, lambda: 1)
    offsets.on_commit = lambda *place: told.append(place)
    for offset in (5, 5, 6):
        offsets.commit("g", "t", 1, offset)
    offsets.reset("g", "t", 1, 2)
    assert [offset for *_, offset in told] == [5, 6, 2]
