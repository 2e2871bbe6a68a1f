from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.rocketmq.broker.names import SCHEDULE_TOPIC
from convoymq.rocketmq.special.levels import Done
from tests.unit.rocketmq.special.machine import Machine, keys


def test_a_level_delivers_when_its_time_is_over() -> None:
    machine = Machine()
    machine.send(b"a", DELAY=1, KEYS="k")
    machine.advance(900)
    assert machine.bodies() == []
    machine.advance(100)
    (message,) = machine.messages("t")
    assert message.properties == {"KEYS": "k", "ESCAPE_KEY": f"b:{SCHEDULE_TOPIC}:0:0"}
    assert machine.state.levels.offsets == {1: 1, 2: 0, 3: 0}


def test_a_level_above_the_last_is_the_last() -> None:
    machine = Machine()
    machine.send(b"a", DELAY=99)
    assert [m.properties["DELAY"] for m in machine.messages(SCHEDULE_TOPIC, 2)] == ["3"]


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    machine = Machine()
    machine.send(b"a", DELAY=1)
    machine.now_ms -= 3_600_000
    machine.state.stop()
    machine.state.start(is_acting=False)
    machine.advance(200)
    assert machine.bodies() == [b"a"]


def test_what_was_delivered_is_known_from_the_log() -> None:
    """RocketMQ writes offsets each ten seconds: a crash between delivers them again."""
    machine = Machine()
    for n in range(3):
        machine.send(b"%d" % n, DELAY=1)
    machine.now_ms += 1000
    assert machine.tick(crash_after=2)
    machine.advance(2000)
    assert machine.bodies() == [b"0", b"1", b"2"]


@pytest.mark.parametrize("later_ms", [100, 30_000])
def test_a_delivery_that_the_log_lost_is_made_again(later_ms: int) -> None:
    """A power failure takes the log's end, and leaves the files that were written after it: in
    RocketMQ's, the message counts as delivered."""
    machine = Machine()
    machine.send(b"a", DELAY=1)
    end = machine.opened.store.max_offset
    machine.advance(1100 + later_ms)
    assert machine.bodies() == [b"a"]
    machine.save()
    machine.opened.store.truncate(end)
    machine.kill()
    machine.advance(2000)
    assert machine.bodies() == [b"a"]


def test_a_topic_that_takes_nothing_holds_up_no_other() -> None:
    machine = Machine()
    machine.fails = lambda draft: draft.topic == "u"
    for n in range(3):
        machine.send(b"t%d" % n, DELAY=1)
        machine.send(b"u%d" % n, "u", DELAY=1)
    machine.advance(30_000)
    assert machine.bodies() == [b"t0", b"t1", b"t2"]
    assert machine.state.levels.offsets[1] == 1
    machine.fails = lambda _draft: False
    machine.advance(11_000)
    assert machine.bodies("u") == [b"u0", b"u1", b"u2"]
    assert machine.state.levels.offsets[1] == 6


def test_offsets_above_the_log_or_of_unknown_levels_do_no_harm() -> None:
    machine = Machine()
    machine.state.levels.restore({0: 5, 4: 7, 1: -3})
    machine.send(b"a", DELAY=1)
    machine.advance(1100)
    assert [found and found.offset for found in keys(machine.messages("t"))] == [0]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_done_is_a_set(steps: list[tuple[bool, int]]) -> None:
    done, naive = Done(), set[int]()
    for is_one, offset in steps:
        if is_one:
            done.add(offset)
            naive.add(offset)
        else:
            done.raise_to(offset)
            naive.update(range(offset))
        assert all((n in done) == (n in naive) for n in range(45))
        assert done.next == next(n for n in range(99) if n not in naive)
