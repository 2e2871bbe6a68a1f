from __future__ import annotations

import pytest

from convoymq.rocketmq.broker.names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from convoymq.rocketmq.remoting.command import Refusal
from convoymq.rocketmq.special.prepare import Preparation
from convoymq.rocketmq.store.types import Draft, SysFlag, decode_properties, encode_properties

NOW_MS = 1_700_000_000_500
prepare = Preparation(18, lambda: NOW_MS)


def draft(sys_flag: int = 0, **properties: object) -> Draft:
    texts = {name: str(value) for name, value in properties.items()}
    return Draft("t", 3, b"x", encode_properties(texts), sys_flag=sys_flag)


def test_a_level_goes_before_a_time() -> None:
    found = prepare(draft(DELAY=4, TIMER_DELAY_MS=5))
    assert (found.topic, found.queue_id) == (SCHEDULE_TOPIC, 3)
    assert decode_properties(found.properties) == {
        "DELAY": "4", "REAL_TOPIC": "t", "REAL_QID": "3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("properties", "out_ms"),
    [
        ({"TIMER_DELIVER_MS": NOW_MS + 1}, NOW_MS - 500),
        ({"TIMER_DELAY_MS": 500}, NOW_MS - 500),
        ({"TIMER_DELAY_MS": 501}, NOW_MS + 500),
        ({"TIMER_DELAY_SEC": 10}, NOW_MS + 9500),
    ],
)
def test_a_time_is_the_second_that_ends_with_it(properties: dict[str, object], out_ms: int) -> None:
    found = prepare(draft(**properties))
    assert (found.topic, found.queue_id) == (TIMER_TOPIC, 0)
    assert decode_properties(found.properties)["TIMER_OUT_MS"] == str(out_ms)


def test_a_time_that_is_over_is_none() -> None:
    assert prepare(draft(TIMER_DELIVER_MS=NOW_MS)).topic == "t"
    assert prepare(draft(TIMER_OUT_MS=1, TIMER_DELAY_SEC=5)).topic == "t"


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELAY_SEC": 3 * 86400 + 1}, {"TIMER_DELIVER_MS": "soon"}, {"TIMER_DELAY_MS": -5},
        {"TIMER_DELIVER_MS": NOW_MS, "TIMER_DEL_UNIQKEY": "t+x"},
    ],
)  # fmt: skip
def test_a_time_that_is_too_far_or_none_is_refused(properties: dict[str, object]) -> None:
    with pytest.raises(Refusal) as refused:
        prepare(draft(**properties))
    assert refused.value.code == 13


def test_without_a_wheel_there_are_no_times() -> None:
    with pytest.raises(Refusal, match="timerWheelEnable is false"):
        Preparation(18, lambda: NOW_MS, may_time=False)(draft(TIMER_DELAY_MS=5))


@pytest.mark.parametrize(
    ("properties", "topic"),
    [({"TIMER_DELAY_MS": 5}, TIMER_TOPIC), ({"TRAN_MSG": "true"}, HALF_TOPIC)],
)
def test_what_waits_is_bounded(properties: dict[str, object], topic: str) -> None:
    full = Preparation(18, lambda: NOW_MS, is_full=lambda name: name == topic)
    with pytest.raises(Refusal, match=f"too many messages wait in {topic}"):
        full(draft(**properties))
    assert full(draft(DELAY=1)).topic == SCHEDULE_TOPIC


def test_half_messages_may_be_refused() -> None:
    refusing = Preparation(18, lambda: NOW_MS, half_refusal="no transactions")
    with pytest.raises(Refusal, match="no transactions") as refused:
        refusing(draft(SysFlag.PREPARED, TRAN_MSG="true"))
    assert refused.value.code == 16
    assert refusing(draft()).topic == "t"


def test_a_prepared_message_becomes_a_half_one() -> None:
    found = prepare(draft(SysFlag.PREPARED, TRAN_MSG="true", UNIQ_KEY="u", DELAY=1))
    assert (found.topic, found.queue_id, found.sys_flag) == (HALF_TOPIC, 0, 0)
    properties = decode_properties(found.properties)
    assert properties["__transactionId__"] == "u"
    assert (properties["REAL_TOPIC"], properties["REAL_QID"]) == ("t", "3")


def test_a_committed_message_may_have_a_delay() -> None:
    assert prepare(draft(SysFlag.COMMIT, DELAY=1)).topic == SCHEDULE_TOPIC
