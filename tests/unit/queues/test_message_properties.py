"""What a message asks of its queues, and who refuses it."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.edges.amqp091._spec import Properties
from convoymq.messages.attributes import (
    DELAY_MS_MAX,
    DELIVER_AT_MS_MAX,
    RECORD_HEADERS,
    asked_delay,
    asked_property,
)
from convoymq.messages.record import read_record
from convoymq.model.errors import PeerError, PreconditionFailed
from convoymq.model.tables import Field, Table
from convoymq.queues.message_properties import check_records, check_served, check_waits_nowhere
from tests.unit.kernels.columns_reference import Message


class Queue:
    vhost = "/"
    name = "q"

    def __init__(self, kind: str) -> None:
        self.type = kind
        self.serves_attributes = kind != "stream"
        self.serves_delays = kind == "quorum"
        self.serves_groups = True
        self.is_early = False


def headers(**given: object) -> Table:
    return Table.of({name.replace("_", "-"): value for name, value in given.items()})


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, None),
        ({"x_delay": 5}, "x-delay"),
        ({"x_delay": 0}, None),
        ({"x_delay": -5}, None),
        ({"x_delay": DELAY_MS_MAX}, "x-delay"),
        ({"x_deliver_at": DELIVER_AT_MS_MAX}, "x-deliver-at"),
        ({"x_group_id": "a"}, None),
    ],
)
def test_what_headers_ask(given: dict[str, object], asked: str | None) -> None:
    assert asked_delay(headers(**given)) == asked
    assert asked_property("5", 9, headers(**given)) == (asked or "expiration")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"x_delay": "5"}, "header 'x-delay' must be an integer"),
        ({"x_delay": True}, "header 'x-delay' must be an integer"),
        ({"x_delay": DELAY_MS_MAX + 1}, f"at most {DELAY_MS_MAX} ms"),
        ({"x_deliver_at": DELIVER_AT_MS_MAX + 1}, f"at most {DELIVER_AT_MS_MAX} ms"),
        ({"x_delay": 1, "x_group_id": "a"}, "header 'x-delay' excludes header 'x-group-id'"),
        ({"x_delay": -1, "x_deliver_at": 5}, "header 'x-deliver-at' excludes header 'x-delay'"),
    ],
)
def test_headers_that_are_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(PreconditionFailed, match=reason):
        asked_delay(headers(**given))


def test_only_queues_that_let_messages_wait_take_them() -> None:
    quorum: Any = Queue("quorum")
    for name in ("x-delay", "x-deliver-at"):
        check_served(name, [quorum])
        for kind in ("classic", "stream"):
            other: Any = Queue(kind)
            with pytest.raises(PreconditionFailed, match=f"header '{name}' is not .* {kind}"):
                check_served(name, [quorum, other])
        with pytest.raises(PreconditionFailed, match="direct replies"):
            check_waits_nowhere(name)
    check_waits_nowhere("expiration")


def test_a_group_is_refused_only_where_it_would_mean_nothing_in_silence() -> None:
    """A quorum queue whose version is behind; other types are not asked for an order."""
    assert asked_property(None, 4, headers(x_group_id="a")) == "x-group-id"
    assert asked_property("5", None, headers(x_group_id="a")) == "expiration"
    for field in (Field("x", b"a"), Field("l", 5)):
        named = asked_property(None, None, Table.from_fields([("x-group-id", field)]))
        assert (named is not None) == (field.code == "x")
    early: Any = Queue("quorum")
    others: list[Any] = [Queue("stream"), Queue("classic")]
    check_served("x-group-id", [early, *others])
    early.serves_groups, early.is_early = False, True
    with pytest.raises(PreconditionFailed, match=r"'x-group-id' is not .* older release"):
        check_served("x-group-id", [early])
    record = Message("x", "k", Properties(headers=headers(x_group_id="a")), b"").record()
    with pytest.raises(PreconditionFailed, match="x-group-id"):
        check_records(RECORD_HEADERS, [record], [early])


def test_records_are_looked_at_where_their_command_says_so() -> None:
    late = Table.from_fields([("a", Field("S", b"b")), ("x-delay", Field("b", 5))])
    plain = Properties(content_type="t", content_encoding="e")
    records = [
        Message("x", "k", each, b"body").record()
        for each in (plain, Properties(content_type="t", headers=late))
    ]
    assert [len(tuple(read_record(record).headers)) for record in records] == [0, 2]
    classic: Any = Queue("classic")
    check_records(0, iter(records), [classic])
    with pytest.raises(PreconditionFailed, match="x-delay"):
        check_records(RECORD_HEADERS, iter(records), [classic])
    with pytest.raises(PeerError, match="damaged"):
        check_records(RECORD_HEADERS, [b"\x05"], [classic])
