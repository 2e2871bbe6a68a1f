from __future__ import annotations

import msgspec
import pytest

from convoymq.rocketmq.broker.names import TIMER_TOPIC
from convoymq.rocketmq.special.pop import TooLate
from convoymq.rocketmq.special.pop_records import Ack, CheckPoint
from convoymq.rocketmq.store.types import Draft, encode_properties
from tests.unit.rocketmq.special.machine import CLUSTER, NAME, Machine

RETRY = "%RETRY%g_t"


def pop(machine: Machine, count: int = 3, invisible_ms: int = 5000) -> CheckPoint:
    start = machine.position("t", "g")
    messages, _ = machine.log.read("t", 0, start, count)
    point = CheckPoint(
        start=start, pop_ms=machine.now_ms, invisible_ms=invisible_ms, queue=0, topic="t",
        group="g", count=len(messages), broker=NAME,
        differences=[message.queue_offset - start for message in messages],
    )  # fmt: skip
    machine.put(machine.state.pops.checkpoint(point, 0, machine.now_ms))
    return point


def ack(machine: Machine, point: CheckPoint, *offsets: int) -> Draft | None:
    found = Ack(
        start=point.start, group="g", topic="t", queue=0, pop_ms=point.pop_ms, broker=NAME,
        offset=offsets[0] if len(offsets) == 1 else -1,
        offsets=list(offsets) if len(offsets) > 1 else None,
    )  # fmt: skip
    draft = machine.state.pops.ack(found, 0, point.revive_ms, machine.now_ms)
    if draft is not None:
        machine.put(draft)
    return draft


@pytest.fixture
def machine() -> Machine:
    made = Machine()
    for n in range(5):
        made.send(b"%d" % n)
    return made


def test_what_is_not_acknowledged_comes_back_once(machine: Machine) -> None:
    point = pop(machine)
    assert machine.position("t", "g") == 3
    ack(machine, point, 1)
    machine.advance(4900)
    assert machine.messages(RETRY) == []
    machine.advance(200)
    back = machine.messages(RETRY)
    assert [bytes(message.body) for message in back] == [b"0", b"2"]
    assert [message.reconsume_times for message in back] == [1, 1]
    assert back[0].properties["1ST_POP_TIME"] == str(point.pop_ms)
    machine.kill()
    machine.advance(60_000, 1000)
    assert machine.bodies(RETRY) == [b"0", b"2"]
    assert machine.position("t", "g") == 3


def test_an_acknowledgement_outlives_a_crash(machine: Machine) -> None:
    """RocketMQ keeps acknowledgements in a buffer first, and the group's offset in memory: after a
    crash, what was acknowledged is given out again."""
    point = pop(machine)
    ack(machine, point, 0, 1, 2)
    machine.kill()
    assert machine.position("t", "g") == 3
    machine.advance(60_000, 1000)
    assert machine.messages(RETRY) == []
    assert len(machine.state.pops) == 0


def test_an_acknowledgement_that_is_too_late_is_refused(machine: Machine) -> None:
    """RocketMQ answers that it succeeded, and delivers the message again."""
    point = pop(machine)
    machine.advance(5000)
    with pytest.raises(TooLate):
        ack(machine, point, 0)
    assert machine.bodies(RETRY) == [b"0", b"1", b"2"]


def test_a_repeated_acknowledgement_writes_nothing(machine: Machine) -> None:
    point = pop(machine)
    assert ack(machine, point, 0) is not None
    assert ack(machine, point, 0) is None
    assert ack(machine, point, 1, 2) is not None


def test_nothing_comes_back_while_an_acknowledgement_is_stored(machine: Machine) -> None:
    point = pop(machine, 1)
    found = Ack(start=0, group="g", topic="t", queue=0, pop_ms=point.pop_ms, offset=0)
    machine.state.pops.hold(found)
    machine.advance(6000)
    assert machine.messages(RETRY) == []
    machine.state.pops.release(found)
    machine.advance(200)
    assert machine.bodies(RETRY) == [b"0"]


def test_records_have_rocketmqs_form(machine: Machine) -> None:
    point = pop(machine)
    ack(machine, point, 1)
    ack(machine, point, 0, 2)
    records = machine.messages(TIMER_TOPIC)
    assert [record.properties["TAGS"] for record in records] == ["ck", "ack", "bAck"]
    assert msgspec.json.decode(records[0].body) == {
        "so": 0, "pt": point.pop_ms, "it": 5000, "q": 0, "t": "t", "c": "g", "n": 3, "bm": 0,
        "ro": 0, "d": [0, 1, 2], "bn": "b", "rp": None,
    }  # fmt: skip
    assert records[0].properties["UNIQ_KEY"] == f"t@0@0@g@{point.pop_ms}@b@ck"
    assert records[0].properties["REAL_TOPIC"] == f"rmq_sys_REVIVE_LOG_{CLUSTER}"
    assert records[1].properties["UNIQ_KEY"] == f"t@0@1@g@{point.pop_ms}@b@ack"
    assert msgspec.json.decode(records[2].body)["aol"] == [0, 2]


def test_checkpoints_of_another_broker_name_it(machine: Machine) -> None:
    """One that escaped to this broker: the group's offsets here are not its own."""
    point = CheckPoint(
        start=7, pop_ms=machine.now_ms, invisible_ms=1000, queue=0, topic="t", group="g", count=1,
        differences=[0], broker="other",
    )  # fmt: skip
    machine.put(machine.state.pops.checkpoint(point, 0, machine.now_ms))
    assert machine.position("t", "g") == 0
    machine.now_ms += 1000
    machine.state.pops.tick(machine.now_ms)
    (batch,) = machine.state.pops.outbox.take(machine.now_ms)
    assert machine.state.pops.wanted(batch.keys[0]) == (point, 7)


def test_checkpoints_that_rocketmqs_master_has_passed_are_closed(machine: Machine) -> None:
    point = CheckPoint(
        start=0, pop_ms=machine.now_ms, invisible_ms=1000, queue=0, topic="t", group="g", count=2,
    )  # fmt: skip
    revive = f"rmq_sys_REVIVE_LOG_{CLUSTER}"
    properties = encode_properties({"TAGS": "ck"})
    machine.put(Draft(revive, 3, msgspec.json.encode(point), properties))
    assert len(machine.state.pops) == 1
    assert machine.state.pops.revived_offsets == {3: 0}
    machine.state.pops.pass_revived({3: 1})
    assert len(machine.state.pops) == 0
    assert machine.state.pops.revived_offsets == {3: 1}


def test_records_that_cannot_be_read_are_passed_over(machine: Machine) -> None:
    for body in (b"", b"{", b"[]", b'{"so":"x"}'):
        for tag in ("ck", "ack", "bAck", "none"):
            machine.put(
                Draft(
                    f"rmq_sys_REVIVE_LOG_{CLUSTER}",
                    0,
                    body or b" ",
                    encode_properties({"TAGS": tag}),
                )
            )
    assert len(machine.state.pops) == 0
