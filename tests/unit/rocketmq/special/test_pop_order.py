from __future__ import annotations

import pytest

from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.special.pop_order import CLEAN_MS, OrderTable, PopOrder

PLACE = ("t", "g", 0)


def pop(order: PopOrder, now_ms: int, *offsets: int, attempt: str | None = None) -> list[int]:
    given = order.popped(*PLACE, offsets, pop_ms=now_ms, invisible_ms=1000, attempt=attempt)
    return [count for _, count in given]


def free(order: PopOrder, attempt: str | None = None) -> int:
    return order.free_ms(*PLACE, attempt=attempt, invisible_ms=1000)


def test_a_queue_is_held_until_all_is_acknowledged() -> None:
    order = PopOrder()
    assert free(order) == 0
    pop(order, 100, 5, 6, 9)
    assert free(order) == 1100
    assert order.ack(*PLACE, 6, 100) == 5
    assert order.ack(*PLACE, 5, 100) == 9
    assert order.ack(*PLACE, 9, 100) == 10
    assert free(order) == 0


def test_what_was_not_acknowledged_is_counted() -> None:
    order = PopOrder()
    assert pop(order, 0, 5, 6) == [0, 0]
    assert pop(order, 2000, 5, 6, 7) == [1, 1, 0]
    assert pop(order, 4000, 6, 7) == [2, 1]
    assert order.ack(*PLACE, 6, 2000) is None


def test_an_attempt_may_be_repeated() -> None:
    """A client whose answer was lost asks again with the same id."""
    order = PopOrder()
    pop(order, 0, 5, attempt="x")
    assert free(order, "x") == 0
    assert free(order, "y") == 1000
    assert pop(order, 10, 5, attempt="x") == [0]


def test_a_message_may_be_shown_earlier_or_later() -> None:
    order = PopOrder()
    pop(order, 0, 5, 6)
    order.show_at(*PLACE, 5, 0, 9000)
    assert free(order) == 9000
    order.ack(*PLACE, 5, 0)
    assert free(order) == 1000
    order.show_at(*PLACE, 6, 0, 10)
    order.show_at(*PLACE, 6, 77, 99_999)
    assert free(order) == 10


def test_an_acknowledgement_of_something_else_is_refused() -> None:
    order = PopOrder()
    assert order.ack(*PLACE, 5, 0) == 6
    pop(order, 0, 5)
    with pytest.raises(ValueError):
        order.ack(*PLACE, 6, 0)


def test_the_file_is_rocketmqs() -> None:
    text = b'{"table":{"t@g":{0:{"popTime":7,"i":1000,"o":[5,1,4],"ot":{6:99},"oc":{5:2},' \
        b'"l":7,"cm":1,"a":"x"}}}}'  # fmt: skip
    order = PopOrder(json.loads(text, OrderTable))
    assert free(order) == 1007
    assert pop(order, 2000, 5, 6) == [3, 1]
    assert json.loads(json.dumps(order.table), OrderTable) == order.table
    order.clean(2000 + CLEAN_MS + 1)
    assert order.table.table == {}
