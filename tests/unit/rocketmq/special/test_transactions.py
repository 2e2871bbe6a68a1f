from __future__ import annotations

from typing import Any

import pytest

from convoymq.rocketmq.broker.names import CHECKED_TOO_OFTEN_TOPIC, HALF_TOPIC, OP_TOPIC
from convoymq.rocketmq.special.names import IS_PREPARED
from convoymq.rocketmq.special.transactions import CHECKS_MAX, End, Refused
from convoymq.rocketmq.store.types import Message
from tests.unit.rocketmq.special.machine import Machine


def half_of(machine: Machine, body: bytes = b"a", **properties: object) -> Message:
    placed = machine.send(body, **{IS_PREPARED: "true", "PGROUP": "p", **properties})
    found = machine.opened.store.message_at(placed.physical)
    assert found is not None
    assert found.topic == HALF_TOPIC
    return found


def end(machine: Machine, half: Message | None, end: End, **named: Any) -> int:
    """Ends a transaction; returns how many records that was."""
    named = {
        "group": "p", "offset": 0 if half is None else half.queue_offset, "is_checked": False,
        **named,
    }  # fmt: skip
    drafts = machine.state.transactions.end(half, end=end, now_ms=machine.now_ms, **named)
    if drafts:
        machine.opened.put(*drafts)
    return len(drafts)


def test_a_commit_delivers_and_a_rollback_does_not() -> None:
    machine = Machine()
    first, second = half_of(machine, b"a", KEYS="k"), half_of(machine, b"b")
    assert end(machine, first, End.COMMIT) == 2
    assert end(machine, second, End.ROLLBACK) == 1
    (message,) = machine.messages("t")
    assert bytes(message.body) == b"a"
    assert message.prepared_offset == first.physical
    assert message.properties["KEYS"] == "k"
    assert not {IS_PREPARED, "REAL_TOPIC", "REAL_QID"} & message.properties.keys()
    assert machine.bodies(OP_TOPIC) == [b"0,", b"1,"]
    assert len(machine.state.transactions) == 0
    assert machine.state.transactions.offsets == (2, 2)


def test_a_repeated_end_appends_nothing_after_a_crash_too() -> None:
    """RocketMQ delivers a message once for each commit that names another copy of its half."""
    machine = Machine()
    half = half_of(machine)
    end(machine, half, End.COMMIT)
    assert end(machine, half, End.COMMIT) == 0
    machine.kill()
    assert end(machine, half, End.COMMIT) == 0
    machine.advance(100_000, 1000)
    assert machine.bodies() == [b"a"]
    assert machine.checks == []


def test_a_commit_whose_end_was_lost_is_a_commit() -> None:
    machine = Machine()
    half = half_of(machine)
    committed, _ = machine.state.transactions.end(
        half, end=End.COMMIT, group="p", offset=0, is_checked=False, now_ms=machine.now_ms
    )
    machine.put(committed)
    machine.kill()
    assert len(machine.state.transactions) == 0


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"group": "q"}, "The producer group wrong"),
        ({"offset": 7}, "The transaction state table offset wrong"),
    ],
)
def test_an_end_that_names_another_message_is_refused(named: dict[str, Any], text: str) -> None:
    machine = Machine()
    with pytest.raises(Refused, match=text):
        end(machine, half_of(machine), End.COMMIT, **named)
    with pytest.raises(Refused, match="Find prepared transaction message failed"):
        end(machine, None, End.COMMIT)
    machine.send(b"plain")
    with pytest.raises(Refused, match="Find prepared"):
        end(machine, machine.messages("t")[0], End.COMMIT)


def test_after_the_time_that_a_message_sets_only_a_check_decides() -> None:
    machine = Machine()
    half = half_of(machine, CHECK_IMMUNITY_TIME_IN_SECONDS=2)
    machine.advance(2100)
    assert [check.physical for check in machine.checks] == [half.physical]
    with pytest.raises(Refused) as refused:
        end(machine, half, End.COMMIT)
    assert refused.value.is_late
    assert end(machine, half, End.COMMIT, is_checked=True) == 2


def test_checks_come_after_the_immunity_and_then_in_their_interval() -> None:
    machine = Machine()
    half_of(machine)
    machine.advance(5900)
    assert machine.checks == []
    machine.advance(95_000, 500)
    assert [(check.offset, check.group) for check in machine.checks] == [(0, "p")] * 4


def test_checks_that_nobody_was_asked_do_not_count() -> None:
    """RocketMQ counts them: after fifteen a message is given up whose producer was away."""
    machine = Machine()
    half_of(machine)
    machine.advance(CHECKS_MAX * 60_000, 1000)
    assert len(machine.checks) > CHECKS_MAX
    assert machine.bodies(CHECKED_TOO_OFTEN_TOPIC) == []
    for _ in range(CHECKS_MAX):
        machine.state.transactions.checked(0)
    machine.advance(31_000, 1000)
    (given_up,) = machine.messages(CHECKED_TOO_OFTEN_TOPIC)
    assert given_up.properties["TRANSACTION_CHECK_TIMES"] == "15"
    assert len(machine.state.transactions) == 0


def test_a_half_message_that_the_log_will_lose_is_kept_elsewhere() -> None:
    machine = Machine()
    half_of(machine)
    machine.advance(73 * 3_600_000, 60_000)
    assert machine.bodies(CHECKED_TOO_OFTEN_TOPIC) == [b"a"]


def test_a_producer_whose_clock_is_years_behind_is_asked() -> None:
    """RocketMQ takes the age of a half message from its producer's clock, and gives it up."""
    machine = Machine()
    machine.born_ms = 0
    half_of(machine)
    machine.advance(7000)
    assert len(machine.checks) == 1


def test_an_acting_slave_lets_half_messages_escape_in_order_and_gives_none_up() -> None:
    """RocketMQ's acting slave passes over a half message after ten tries: it is lost."""
    machine = Machine(is_acting=True)
    halves = [half_of(machine, b"%d" % n) for n in range(3)]
    machine.state.start(is_acting=True)
    end(machine, halves[1], End.COMMIT)
    machine.fails = lambda _draft: True
    machine.advance(3_600_000, 1000)
    assert machine.escaped == []
    machine.fails = lambda _draft: False
    machine.advance(11_000)
    assert [draft.body for draft in machine.escaped] == [b"0", b"2"]
    assert {draft.topic for draft in machine.escaped} == {"t"}
    assert all(draft.sys_flag & 4 for draft in machine.escaped)
    assert all(b"TRAN_MSG\x01true" in draft.properties for draft in machine.escaped)
    assert len(machine.state.transactions) == 0


def test_ends_of_rocketmqs_brokers_are_read() -> None:
    """Its ends name several half messages; garbage in them is passed over."""
    machine = Machine()
    for n in range(4):
        half_of(machine, b"%d" % n)
    from convoymq.rocketmq.store.types import Draft, encode_properties

    machine.put(Draft(OP_TOPIC, 0, b"0,2,x,,", encode_properties({"TAGS": "d"})))
    machine.put(Draft(OP_TOPIC, 0, b"1", encode_properties({"TAGS": "other"})))
    transactions = machine.state.transactions
    assert [n in transactions for n in range(4)] == [False, True, False, True]
    assert transactions.offsets == (1, 0)


def test_open_half_messages_and_timers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoymq.rocketmq.special.transactions.OPEN_MAX", 1)
    monkeypatch.setattr("convoymq.rocketmq.special.wheel.TIMERS_MAX", 1)
    machine = Machine()
    assert not machine.state.transactions.is_full
    assert not machine.state.wheel.is_full
    half = half_of(machine)
    machine.send(b"a", TIMER_DELAY_MS=5000)
    assert machine.state.transactions.is_full
    assert machine.state.wheel.is_full
    end(machine, half, End.ROLLBACK)
    machine.advance(7000)
    assert not machine.state.transactions.is_full
    assert not machine.state.wheel.is_full
