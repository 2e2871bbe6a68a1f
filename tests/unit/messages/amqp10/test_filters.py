"""Filters of a source: those that are served, and the messages that they want."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.filters import encoded, filter_name, filters_in
from convoymq.messages.amqp10.message import stored_of
from convoymq.messages.amqp10.sections import section
from convoymq.messages.amqp10.values import Described, Symbol, Timestamp, UInt, ULong, Value
from convoymq.messages.encodings import AMQP_10
from convoymq.messages.record import content_of, names_of
from convoymq.model.tables import Table

PROPERTIES, APPLICATION, SQL = (
    Symbol(f"amqp:{name}-filter") for name in ("properties", "application-properties", "sql")
)


def of_amqp10() -> bytes:
    fields: list[Value] = [ULong(9), b"u", None, "orders.new", None, "c", Symbol("text/plain")]
    payload = (
        section(0x70, [False, None])
        + section(0x73, [*fields, None, None, Timestamp(5)])
        + section(0x74, {"n": UInt(3), "region": "emea", "yes": True})
        + section(0x75, b"body")
    )
    stored = stored_of(payload)
    return names_of("x", "k") + content_of(stored.properties, stored.body, AMQP_10)


def of_amqp091() -> bytes:
    headers = Table.of({"n": 3, "region": "emea", "yes": True, "x-note": "n"})
    made = Properties(headers=headers, content_type="text/plain", correlation_id="c", priority=9)
    return names_of("x", "k") + content_of(made, b"body")


def wants(*filters: tuple[str, Symbol | ULong, Any]) -> Any:
    asked: dict[Value, Value] = {
        Symbol(name): Described(descriptor, value) for name, descriptor, value in filters
    }
    served, found = filters_in(asked, lambda: 0)
    assert (found is None) is (not served)
    return found


@pytest.mark.parametrize("record", [of_amqp10(), of_amqp091()])
@pytest.mark.parametrize(
    ("descriptor", "value", "wanted"),
    [
        (APPLICATION, {"n": 3}, True),
        (APPLICATION, {"n": 3.0, "region": "&p:em"}, True),
        (APPLICATION, {"n": 3, "region": "&s:x"}, False),
        (APPLICATION, {"region": "&s:ea"}, True),
        (APPLICATION, {"region": "&&p:em"}, False),
        (APPLICATION, {"none": None, "yes": True}, True),
        (APPLICATION, {"yes": 1}, False),
        (APPLICATION, {"none": 1}, False),
        (ULong(0x174), {"n": 4}, False),
        (PROPERTIES, {Symbol("content-type"): Symbol("text/plain")}, True),
        (ULong(0x173), {Symbol("correlation-id"): "c", Symbol("to"): None}, True),
        (PROPERTIES, {Symbol("correlation-id"): "d"}, False),
        (PROPERTIES, {Symbol("creation-time"): 5}, False),
    ],
)
def test_messages_of_both_protocols_are_filtered(
    record: bytes, descriptor: Symbol | ULong, value: Any, wanted: bool
) -> None:
    assert wants(("f", descriptor, value))(record) is wanted


def test_all_filters_count_and_sql_takes_their_place() -> None:
    record = of_amqp10()
    both = ("p", PROPERTIES, {Symbol("subject"): "&p:orders"}), ("a", APPLICATION, {"n": 4})
    assert not wants(*both)(record)
    assert wants(both[0])(record)
    assert wants(*both, ("sql-filter", SQL, "n = 3 AND h.priority = 4"))(record)
    assert wants(("sql-filter", ULong(0x120), "h.priority = 9"))(of_amqp091())
    selector = Symbol("apache.org:selector-filter:string")
    assert wants(("jms-selector", selector, "JMSPriority = 9 and n between 2 and 3"))(of_amqp091())
    assert not wants(both[0], ("jms-selector", selector, "n = 4"))(record)
    asked: dict[Value, Value] = {
        Symbol(name): Described(APPLICATION, {"n": n}) for name, n in (("a", 4), ("b", 3))
    }
    served, found = filters_in(asked, lambda: 0)
    assert list(served) == ["b"], "of two of a kind the later one counts"
    assert found is not None
    assert found(record)


@pytest.mark.parametrize(
    ("name", "descriptor", "value"),
    [
        ("f", SQL, "n = 3"),
        ("sql-filter", SQL, "n ="),
        ("sql-filter", SQL, 3),
        ("f", APPLICATION, {"a": "&x"}),
        ("f", APPLICATION, {"a": [1]}),
        ("f", APPLICATION, {}),
        ("f", APPLICATION, {f"n{number}": 1 for number in range(17)}),
        ("f", APPLICATION, [1]),
        ("f", APPLICATION, {1: 1}),
        ("f", PROPERTIES, {Symbol("nothing"): 1}),
        ("f", Symbol("apache.org:selector-filter:string"), "n ="),
        ("f", ULong(0x999), "n = 3"),
    ],
)
def test_filters_that_are_left_out(name: str, descriptor: Symbol | ULong, value: Any) -> None:
    assert wants((name, descriptor, value)) is None


def test_filters_have_one_name_in_whatever_order_and_others_another() -> None:
    assert filter_name(encoded({})) == ""
    names = [
        filter_name(encoded({Symbol("f"): Described(APPLICATION, value)}))
        for value in ({"n": 3, "m": "x"}, {"m": "x", "n": 3}, {"n": 3}, {"n": 4, "m": "x"})
    ]
    assert names[0] == names[1]
    assert len({*names}) == 3


def test_a_damaged_message_is_wanted_for_its_consumer_to_hear_of_it() -> None:
    record = names_of("x", "k") + content_of(Properties(), b"\xff", AMQP_10)
    assert wants(("a", APPLICATION, {"n": 4}))(record)
