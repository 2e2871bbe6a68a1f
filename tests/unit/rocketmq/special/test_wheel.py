from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.rocketmq.broker.names import TIMER_TOPIC
from convoymq.rocketmq.special.wheel import DELAY_MAX_S, ROLL_MS, Checkpoint, slot_of
from tests.unit.rocketmq.special.machine import START_MS, Machine

DAY_MS = 24 * 3600 * 1000


@pytest.mark.parametrize("ahead_ms", [1, 999, 1000, 1001, 12_345])
@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "TIMER_DELAY_MS"])
def test_a_message_is_delivered_at_its_time(ahead_ms: int, name: str) -> None:
    """RocketMQ's leave when their second is over: up to a second late."""
    machine = Machine()
    machine.send(b"a", **{name: ahead_ms + (START_MS if name == "TIMER_DELIVER_MS" else 0)})
    machine.advance(ahead_ms + 200)
    (message,) = machine.messages("t")
    assert ahead_ms <= message.stored_ms - START_MS < ahead_ms + 200


def test_a_message_is_recalled_when_its_second_has_begun() -> None:
    machine = Machine()
    machine.send(b"a", TIMER_DELIVER_MS=START_MS + 5900, UNIQ_KEY="a")
    machine.advance(5500)
    machine.send(b"0", TIMER_DELIVER_MS=START_MS + 5900, UNIQ_KEY="a", TIMER_DEL_UNIQKEY="t+a")
    machine.advance(2000)
    assert machine.bodies() == []


def test_what_is_far_ahead_is_put_into_the_log_again() -> None:
    """The log keeps three days: the last copy of a message is never older than two."""
    machine = Machine()
    machine.send(b"a", TIMER_DELAY_SEC=DELAY_MAX_S)
    machine.advance(3 * DAY_MS - 60_000, 60_000)
    assert [m.properties.get("TIMER_ROLL_TIMES") for m in machine.messages(TIMER_TOPIC)] == [
        None, "1",
    ]  # fmt: skip
    assert machine.bodies() == []
    machine.advance(62_000)
    assert machine.bodies() == [b"a"]


def test_a_slave_that_acts_keeps_what_is_far_ahead() -> None:
    machine = Machine(is_acting=True)
    machine.send(b"a", TIMER_DELAY_SEC=DELAY_MAX_S)
    machine.state.start(is_acting=True)
    machine.advance(3 * DAY_MS - 60_000, 60_000)
    assert machine.escaped == []
    machine.advance(62_000)
    assert [draft.body for draft in machine.escaped] == [b"a"]


def test_a_start_reads_what_waits_and_nothing_that_was_delivered() -> None:
    machine = Machine()
    for seconds in (1, 5, 40, 200_000):
        machine.send(b"%d" % seconds, TIMER_DELAY_SEC=seconds)
    machine.advance(20_000)
    machine.save()
    machine.advance(30_000, 1000)
    assert machine.bodies() == [b"1", b"5", b"40"]
    machine.kill()
    assert machine.state.wheel.count == 1
    machine.advance(60_000, 1000)
    assert machine.bodies() == [b"1", b"5", b"40"]


def test_without_its_checkpoint_the_whole_log_is_read() -> None:
    machine = Machine()
    for seconds in (1, 30):
        machine.send(b"%d" % seconds, TIMER_DELAY_SEC=seconds)
    machine.advance(10_000)
    machine.kill()
    machine.advance(40_000)
    assert machine.bodies() == [b"1", b"30"]


def test_a_message_is_recalled_by_its_unique_key() -> None:
    machine = Machine()
    for name in ("a", "b"):
        machine.send(name.encode(), TIMER_DELAY_MS=5000, UNIQ_KEY=name)
    machine.send(b"0", TIMER_DELAY_MS=5000, UNIQ_KEY="a", TIMER_DEL_UNIQKEY="t+a")
    machine.advance(7000)
    assert machine.bodies() == [b"b"]


def test_the_checkpoint_has_the_form_of_request_60() -> None:
    point = Checkpoint(1, 2, 3, 4, 5, 6, 7)
    data = point.encode()
    assert data == b"".join(n.to_bytes(8, "big") for n in range(1, 8))
    assert Checkpoint.decode(data + bytes(4040)) == point
    assert Checkpoint.decode(data[:32]) == Checkpoint(1, 2, 3, 4)
    with pytest.raises(ValueError, match="has 31 bytes"):
        Checkpoint.decode(data[:31])


@given(st.integers(0, 10 * DAY_MS), st.integers(0, 4 * DAY_MS))
def test_slots_reach_the_time_in_steps_of_at_most_two_days(stored_ms: int, ahead_ms: int) -> None:
    out_ms = stored_ms + ahead_ms
    for _ in range(4):
        slot = slot_of(out_ms, stored_ms)
        assert slot <= out_ms
        assert slot - stored_ms <= ROLL_MS
        if slot == out_ms // 1000 * 1000:
            return
        assert slot - stored_ms >= ROLL_MS // 2 - 1000
        stored_ms = slot + 1000
    raise AssertionError("four steps were not enough")
