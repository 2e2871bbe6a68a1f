"""A slave goes on where its master was, and the master where the slave was."""

from __future__ import annotations

import random

import pytest

from convoymq.rocketmq.acting.escape import KEY_PROPERTY, Key, KeyTable, key_of
from convoymq.rocketmq.broker.names import HALF_TOPIC
from convoymq.rocketmq.special.names import IS_PREPARED
from convoymq.rocketmq.special.transactions import End
from convoymq.rocketmq.store.types import Draft, decode_properties
from tests.unit.rocketmq.special.machine import Machine, keys, seeded
from tests.unit.rocketmq.special.test_transactions import end, half_of

BIG = {"log_file_bytes": 1 << 20, "queue_file_bytes": 20_000}


def slave_of(master: Machine) -> Machine:
    made = Machine(now_ms=master.now_ms, is_acting=True, **BIG)
    copy(master, made)
    return made


def copy(master: Machine, slave: Machine, limit: int = 1 << 20) -> None:
    """Has the slave copy its master's log."""
    store = slave.opened.store
    while block := master.opened.store.read_raw(store.max_offset, limit):
        store.append_raw(store.max_offset, bytes(block))
        slave.opened.settle()
    slave.now_ms = master.now_ms


def key_in(draft: Draft) -> Key:
    found = key_of(decode_properties(draft.properties)[KEY_PROPERTY])
    assert found is not None
    return found


def act(slave: Machine) -> None:
    slave.state.start(is_acting=True)


def test_an_acting_slave_delivers_on_time_what_was_not_due_yet() -> None:
    """From its own log alone: nothing was synchronised. RocketMQ's slave starts with offsets that
    are up to a minute old, and delivers that minute again."""
    master = Machine(**BIG)
    for seconds in (1, 3, 8):
        master.send(b"timed %d" % seconds, TIMER_DELAY_SEC=seconds)
    for level in (1, 2, 3):
        master.send(b"level %d" % level, DELAY=level)
    master.advance(2000)
    slave = slave_of(master)
    act(slave)
    begin_ms = slave.now_ms
    slave.advance(1500)
    assert [draft.body for draft in slave.escaped] == [b"timed 3"]
    slave.advance(9000)
    assert [draft.body for draft in slave.escaped] == [
        b"timed 3", b"level 2", b"timed 8", b"level 3",
    ]  # fmt: skip
    assert slave.now_ms - begin_ms < 11_000
    assert sorted(master.bodies()) == [b"level 1", b"timed 1"]


def test_an_end_at_an_acting_slave_counts() -> None:
    """RocketMQ's acting slave refuses END_TRANSACTION."""
    master = Machine(**BIG)
    halves = [half_of(master, b"%d" % n) for n in range(3)]
    slave = slave_of(master)
    act(slave)
    own = slave.opened.store.message_at(halves[0].physical)
    drafts = slave.state.transactions.end(
        own, end=End.COMMIT, group="p", offset=0, is_checked=False, now_ms=slave.now_ms
    )
    assert (drafts[0].topic, drafts[0].body) == ("t", b"0")
    assert key_in(drafts[0]) == Key("b", HALF_TOPIC, 0, 0)
    slave.state.on_key(key_in(drafts[0]))
    slave.advance(7000)
    assert [draft.body for draft in slave.escaped] == [b"1", b"2"]
    assert all(IS_PREPARED.encode() in draft.properties for draft in slave.escaped)


def test_a_master_passes_over_what_left_while_it_was_away() -> None:
    master = Machine(**BIG)
    for level in (1, 2, 3):
        master.send(b"level %d" % level, DELAY=level)
    master.send(b"timed", TIMER_DELAY_SEC=4)
    half_of(master, b"half")
    slave = slave_of(master)
    act(slave)
    slave.advance(8000)
    left = KeyTable()
    for draft in slave.escaped:
        left.add(key_in(draft))
    assert len(slave.escaped) == 4
    master.now_ms = slave.now_ms
    master.kill()
    master.state.stop()
    master.state.on_left("b", left.of("b"))
    master.state.start(is_acting=False)
    master.advance(60_000, 1000)
    assert master.bodies() == [b"level 3"]
    assert master.checks == []


def test_what_a_slave_has_saved_is_enough_for_its_next_start() -> None:
    master = Machine(**BIG)
    master.send(b"soon", TIMER_DELAY_SEC=1)
    master.send(b"later", TIMER_DELAY_SEC=100)
    master.advance(20_000)
    slave = slave_of(master)
    slave.advance(15_000, 1000)
    slave.save()
    assert slave.saved.checkpoint.physical > 0
    slave.kill()
    act(slave)
    slave.advance(90_000, 1000)
    assert [draft.body for draft in slave.escaped] == [b"later"]


def test_what_a_master_of_rocketmqs_has_saved_is_taken_over() -> None:
    """Its log has no keys: its offsets and its checkpoint say what it has delivered."""
    from convoymq.rocketmq.special.state import Saved
    from convoymq.rocketmq.special.wheel import Checkpoint

    master = Machine(**BIG)
    for n in range(3):
        master.send(b"level %d" % n, DELAY=1)
    master.send(b"early", TIMER_DELAY_SEC=2)
    master.send(b"late", TIMER_DELAY_SEC=9)
    slave = slave_of(master)
    slave.state.take_over(Saved(Checkpoint(read_ms=master.now_ms + 3000), {1: 2}))
    act(slave)
    slave.advance(12_000)
    assert [draft.body for draft in slave.escaped] == [b"level 2", b"late"]


@pytest.mark.parametrize("seed", range(10))
def test_each_message_leaves_or_is_delivered_once(seed: int) -> None:
    """A master dies anywhere, its slave acts, restarts anywhere, and the master returns."""
    rng: random.Random = seeded(seed)
    master = Machine(**BIG)
    sent = 0
    for _ in range(rng.randint(5, 40)):
        if rng.random() < 0.5:
            master.send(b"%d" % sent, rng.choice("tu"), DELAY=rng.randint(1, 3))
        else:
            master.send(b"%d" % sent, rng.choice("tu"), TIMER_DELAY_MS=rng.randint(1, 20_000))
        sent += 1
        master.advance(rng.randint(0, 800))
        if rng.random() < 0.1:
            master.save()
    slave = slave_of(master)
    act(slave)
    for _ in range(rng.randint(1, 40)):
        slave.advance(rng.randint(1, 300))
        if rng.random() < 0.1:
            slave.save()
        if rng.random() < 0.1:
            slave.kill()
            act(slave)
    # A target stores a key once.
    stored = {key_in(draft): draft.body for draft in slave.escaped}
    left = KeyTable()
    for key in stored:
        left.add(key)
    master.now_ms = slave.now_ms
    master.kill()
    master.state.stop()
    master.state.on_left("b", left.of("b"))
    master.state.start(is_acting=False)
    master.advance(40_000, 500)
    here = master.messages("t") + master.messages("u")
    bodies = [bytes(message.body) for message in here] + list(stored.values())
    assert sorted(bodies) == sorted(b"%d" % n for n in range(sent))
    assert not set(keys(here)) & stored.keys()


def test_a_state_that_is_stopped_gives_nothing_out() -> None:
    machine = Machine()
    machine.send(b"a", DELAY=1)
    half = half_of(machine)
    machine.state.stop()
    machine.advance(60_000, 1000)
    assert machine.bodies() == []
    assert machine.checks == []
    machine.state.start(is_acting=False)
    machine.advance(200)
    assert machine.bodies() == [b"a"]
    assert end(machine, half, End.ROLLBACK) == 1
