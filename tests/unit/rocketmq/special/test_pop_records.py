from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.special.pop_records import (
    BatchAckBody,
    CheckPoint,
    Receipt,
    counts_info,
    offsets_info,
    real_topic,
    retry_flag,
    retry_topic,
    start_info,
)


@given(
    st.integers(0, 1 << 60), st.integers(0, 1 << 60), st.integers(0, 1 << 40),
    st.sampled_from([0, 7, 999]), st.sampled_from("012"), st.integers(0, 1000),
    st.none() | st.integers(0, 1 << 60),
)  # fmt: skip
def test_receipts_are_read_as_they_were_written(
    start: int, pop_ms: int, invisible_ms: int, revive: int, retry: str, queue: int,
    offset: int | None,
) -> None:  # fmt: skip
    receipt = Receipt(start, pop_ms, invisible_ms, revive, retry, "broker-a", queue, offset)
    assert Receipt.parse(str(receipt)) == receipt


def test_a_receipt_as_javas_client_makes_it() -> None:
    found = Receipt.parse("0 1690000000000 15000 3 1 broker-a 5 42")
    assert (found.revive_queue, found.retry, found.broker, found.offset) == (3, "1", "broker-a", 42)


@pytest.mark.parametrize("text", ["", "a b c d e f", "1 2 3 4", "1 2 3 x 0 b"])
def test_a_receipt_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(SyntaxFault, match="cannot be read"):
        Receipt.parse(text)


def test_topics_of_messages_that_come_back() -> None:
    first, second = retry_topic("t_1", "g"), retry_topic("t_1", "g", is_v2=True)
    assert (first, second) == ("%RETRY%g_t_1", "%RETRY%g+t_1")
    assert [retry_flag(topic) for topic in ("t", first, second)] == ["0", "1", "2"]
    assert [real_topic("t_1", "g", flag) for flag in "012"] == ["t_1", first, second]


def test_infos_name_queues_and_offsets() -> None:
    assert start_info("t", 2, 7) == "0 2 7"
    assert offsets_info("%RETRY%g_t", 0, [7, 9]) == "1 0 7,9"
    assert counts_info("t", 2, [(7, 1), (8, 0)]) == "0 qo2%7 1;0 2 0"


def test_bits_of_a_batch_are_javas() -> None:
    body = b'{"brokerName":"b","acks":[{"c":"g","t":"t","r":"0","so":10,"q":0,"rq":1,"pt":5,' \
        b'"it":60000,"b":"BQE="}]}'  # fmt: skip
    (found,) = json.loads(body, BatchAckBody).acks
    assert found.offsets == [10, 12, 18]


def test_old_checkpoints_name_the_first_and_a_count() -> None:
    point = CheckPoint(start=5, pop_ms=0, invisible_ms=0, queue=0, topic="t", group="g", count=3)
    assert point.offsets == [5, 6, 7]
