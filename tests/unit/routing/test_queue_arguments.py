"""Queue arguments: what each type takes, and the texts of the refusals."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from convoymq.model.errors import PreconditionFailed
from convoymq.model.refusals import queue_subject
from convoymq.model.tables import Field, Table
from convoymq.routing.default_type import with_default_type
from convoymq.routing.queue_arguments import (
    ARGUMENTS,
    COMMON_ARGUMENTS,
    check_arguments,
    check_common_arguments,
    check_equivalent_arguments,
    is_quorum_as_classic,
)
from convoymq.routing.queue_types import rules_of, type_names
from convoymq.routing.types import QueueType
from convoymq.settings.table import DURATION_MS_MAX

SUBJECT = queue_subject("/", "q")
Q = "queue 'q' in vhost '/'"


def refusal(arguments: Mapping[str, object]) -> str:
    """The text with which these arguments are refused."""
    with pytest.raises(PreconditionFailed) as caught:
        check_arguments(SUBJECT, Table.of(arguments))
    return caught.value.text


def accepted(arguments: Mapping[str, object]) -> QueueType:
    """The type of a queue with these arguments."""
    return check_arguments(SUBJECT, Table.of(arguments))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("x-queue-type", "warren", "\"unsupported queue type 'warren'\""),
        ("x-queue-type", 1, "{unacceptable_type,long}"),
        ("x-expires", 0, "{value_zero,0}"),
        ("x-expires", -1, "{value_negative,-1}"),
        ("x-expires", DURATION_MS_MAX + 1, "{value_too_large,315360000001}"),
        ("x-message-ttl", "10", '"expected integer, got longstr"'),
        ("x-message-ttl", True, '"expected integer, got bool"'),
        ("x-message-ttl", -5, "{value_negative,-5}"),
        ("x-max-length", -5, "{value_negative,-5}"),
        ("x-max-length-bytes", 1.5, '"expected integer, got double"'),
        ("x-max-priority", 256, "{max_value_exceeded,256}"),
        ("x-overflow", "drop-tail", "invalid_overflow"),
        ("x-overflow", 1, "{unacceptable_type,long}"),
        ("x-dead-letter-exchange", 1, "{unacceptable_type,long}"),
        ("x-dead-letter-routing-key", "k", "routing_key_but_no_dlx_defined"),
        ("x-dead-letter-strategy", "sometimes", "invalid_dlx_strategy"),
        ("x-single-active-consumer", "true", "{unacceptable_type,longstr}"),
        ("x-queue-mode", "sleepy", "invalid_queue_mode"),
        ("x-queue-version", 1, "\"unsupported queue version '1'\""),
        ("x-queue-leader-locator", "nearest", "invalid_queue_locator_arg"),
        ("x-quorum-initial-group-size", 0, "{value_zero,0}"),
        ("x-quorum-initial-group-size", -3, "{value_negative,-3}"),
        ("x-deduplication-count", -1, "{value_negative,-1}"),
        ("x-deduplication-count", 1_000_001, "{value_too_large,1000001}"),
        ("x-deduplication-count", "many", '"expected integer, got longstr"'),
        ("x-deduplication-time", 604_800_001, "{value_too_large,604800001}"),
    ],
)
def test_bad_values_are_refused_with_their_reason(key: str, value: object, reason: str) -> None:
    assert refusal({key: value}) == f"invalid arg '{key}' for {Q}: {reason}"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"x-queue-type": "quorum", "x-queue-mode": "lazy"}, "x-queue-mode"),
        ({"x-queue-type": "quorum", "x-max-priority": 5}, "x-max-priority"),
        ({"x-delivery-limit": 5}, "x-delivery-limit"),
        ({"x-queue-type": "classic", "x-dead-letter-strategy": "at-most-once"},
         "x-dead-letter-strategy"),
        ({"x-max-age": "1D"}, "x-max-age"),
        ({"x-quorum-initial-group-size": 3}, "x-quorum-initial-group-size"),
        ({"x-deduplication-count": 3}, "x-deduplication-count"),
        ({"x-queue-type": "stream", "x-deduplication-time": 3}, "x-deduplication-time"),
    ],
)  # fmt: skip
def test_arguments_of_another_type_are_refused(arguments: Mapping[str, object], key: str) -> None:
    queue_type = arguments.get("x-queue-type", "classic")
    assert (
        refusal(arguments) == f"invalid arg '{key}' for {Q} of queue type rabbit_{queue_type}_queue"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x-message-ttl", 1),
        ("x-expires", 1),
        ("x-max-length", 1),
        ("x-max-length-bytes", 0),
    ],
)
def test_classic_and_quorum_queues_are_limited_by_the_same_arguments(
    key: str, value: object
) -> None:
    arguments = {"x-queue-type": "quorum", key: value}
    assert accepted(arguments) is QueueType.QUORUM
    del arguments["x-queue-type"]
    assert accepted(arguments) is QueueType.CLASSIC
    # A durable queue of no type is a quorum queue: nothing makes it an unreplicated one silently.
    assert default_type(arguments) == "quorum"
    assert default_type(arguments, durable=False) == "classic"


def test_where_a_message_goes_that_comes_back_can_be_said() -> None:
    key = "x-requeue-position"
    for value in ("original", "front", "tail"):
        assert accepted({"x-queue-type": "quorum", key: value}) is QueueType.QUORUM
    assert "invalid_requeue_position" in refusal({"x-queue-type": "quorum", key: "middle"})
    for queue_type in ("classic", "stream"):
        assert key in refusal({"x-queue-type": queue_type, key: "tail"})


def test_how_messages_expire_can_be_said() -> None:
    key = "x-message-expiry"
    for value in ("head", "due"):
        assert accepted({"x-queue-type": "quorum", key: value}) is QueueType.QUORUM
    assert "invalid_message_expiry" in refusal({"x-queue-type": "quorum", key: "any"})
    for queue_type in ("classic", "stream"):
        assert key in refusal({"x-queue-type": queue_type, key: "due"})


def test_how_priorities_are_served_can_be_said() -> None:
    key = "x-priority-mode"
    for value in ("strict", "two-classes"):
        assert accepted({"x-queue-type": "quorum", key: value}) is QueueType.QUORUM
    assert "invalid_priority_mode" in refusal({"x-queue-type": "quorum", key: "fair"})
    for queue_type in ("classic", "stream"):
        assert key in refusal({"x-queue-type": queue_type, key: "strict"})


def test_when_the_next_single_active_consumer_begins_can_be_said() -> None:
    key = "x-single-active-take-over"
    for queue_type in ("quorum", "classic"):
        for value in ("strict", "immediate"):
            assert accepted({"x-queue-type": queue_type, key: value}).value == queue_type
        assert "invalid_single_active_take_over" in refusal({"x-queue-type": queue_type, key: "x"})
    assert key in refusal({"x-queue-type": "stream", key: "strict"})


def test_the_times_of_a_delayed_retry_go_together() -> None:
    kind = {"x-queue-type": "quorum", "x-delayed-retry-type": "failed"}
    assert "x-delayed-retry-min is needed" in refusal(kind)
    least = kind | {"x-delayed-retry-min": 10}
    assert "less than x-delayed-retry-min" in refusal(least | {"x-delayed-retry-max": 9})
    for arguments in (least, least | {"x-delayed-retry-max": 10}, {"x-delayed-retry-min": 10}):
        assert accepted({"x-queue-type": "quorum", **arguments}).value == "quorum"
    assert accepted(kind | {"x-delayed-retry-type": "disabled"}).value == "quorum"


def test_served_and_unknown_arguments_are_taken() -> None:
    quorum = {
        "x-queue-type": "quorum",
        "x-delivery-limit": -1,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "k",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-single-active-consumer": True,
        "x-quorum-initial-group-size": Field("b", 3),
        "x-queue-leader-locator": "balanced",
        "x-max-in-memory-length": 0,
        "x-mine": "anything",
    }
    assert accepted(quorum) is QueueType.QUORUM
    assert accepted({"x-queue-mode": "lazy", "x-queue-version": 2}) is QueueType.CLASSIC
    classic = {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "k",
        "x-overflow": "reject-publish-dlx",
    }
    assert accepted(classic) is QueueType.CLASSIC
    assert accepted({}) is QueueType.CLASSIC


def test_no_rule_both_serves_and_refuses() -> None:
    names = {argument.name for argument in ARGUMENTS}
    assert len(names) == len(ARGUMENTS)
    for name in type_names():
        rules = rules_of(name)
        assert rules is not None
        assert not (rules.serves | rules.kept) & rules.foreign
        assert rules.serves | rules.kept | rules.foreign <= names


def inequivalence(
    queue_type: QueueType, current: Mapping[str, object], new: Mapping[str, object]
) -> str:
    """The text with which a redeclare is refused; empty when it is not."""
    try:
        check_equivalent_arguments(SUBJECT, queue_type, Table.of(current), Table.of(new))
    except PreconditionFailed as refused:
        return refused.text
    return ""


def test_known_arguments_are_compared_by_class_and_value() -> None:
    classic, quorum = QueueType.CLASSIC, QueueType.QUORUM
    ttl = "x-message-ttl"
    prefix = f"inequivalent arg '{ttl}' for {Q}: received "
    assert inequivalence(classic, {ttl: Field("I", 200)}, {ttl: Field("l", 200)}) == ""
    assert inequivalence(classic, {ttl: 200}, {ttl: 100}) == prefix + "'100' but current is '200'"
    assert inequivalence(classic, {ttl: Field("I", 200)}, {}) == (
        prefix + "none but current is the value '200' of type 'signedint'"
    )
    assert inequivalence(classic, {}, {ttl: "a"}) == (
        prefix + "the value 'a' of type 'longstr' but current is none"
    )
    limit = "x-delivery-limit"
    assert inequivalence(quorum, {limit: 1}, {"x-queue-type": "quorum", limit: 2}) != ""
    assert inequivalence(classic, {}, {"x-mine": 1}) == ""
    assert inequivalence(classic, {}, {limit: 1}) == ""
    active = "x-single-active-consumer"
    assert inequivalence(classic, {active: True}, {active: False}).endswith(
        "received 'false' but current is 'true'"
    )


def test_the_type_is_compared_and_no_type_is_classic() -> None:
    current = {"x-queue-type": "classic"}
    assert inequivalence(QueueType.CLASSIC, current, {}) == ""
    assert inequivalence(QueueType.CLASSIC, {}, current) == ""
    assert inequivalence(QueueType.CLASSIC, {}, {"x-queue-type": "quorum"}) == (
        f"inequivalent arg 'x-queue-type' for {Q}: received 'quorum' but current is 'classic'"
    )


def default_type(arguments: Mapping[str, object], **properties: bool) -> object:
    """The type filled in on a node whose default is quorum."""
    found = with_default_type(
        Table.of(arguments),
        durable=properties.get("durable", True),
        exclusive=properties.get("exclusive", False),
        auto_delete=properties.get("auto_delete", False),
        server_named=properties.get("server_named", False),
        vhost_default=None,
        node_default=QueueType.QUORUM,
    )
    return found.to_plain().get("x-queue-type", "classic")


def test_the_default_type_is_taken_where_it_fits() -> None:
    assert default_type({}) == "quorum"
    assert default_type({"x-delivery-limit": 3, "x-mine": 1}) == "quorum"
    assert default_type({}, durable=False) == "classic"
    assert default_type({}, exclusive=True) == "classic"
    assert default_type({}, auto_delete=True) == "classic"
    assert default_type({}, server_named=True) == "classic"
    assert default_type({"x-queue-mode": "lazy"}) == "quorum"
    assert default_type({"x-queue-type": "classic"}) == "classic"


def test_the_virtual_host_decides_before_the_node() -> None:
    table = with_default_type(
        Table.of({}), durable=True, exclusive=False, auto_delete=False, server_named=False,
        vhost_default=QueueType.CLASSIC, node_default=QueueType.QUORUM,
    )  # fmt: skip
    assert len(table) == 0
    table = with_default_type(
        Table.of({}), durable=True, exclusive=False, auto_delete=False, server_named=False,
        vhost_default=QueueType.STREAM, node_default=QueueType.QUORUM,
    )  # fmt: skip
    assert table.to_plain() == {"x-queue-type": "stream"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x-max-length-bytes", 0),
        ("x-max-age", "7D"),
        ("x-max-age", "1Y"),
        ("x-max-age", "10s"),
        ("x-stream-max-segment-size-bytes", 3_000_000_000),
        ("x-initial-cluster-size", 1),
        ("x-queue-leader-locator", "balanced"),
        ("x-trace", True),
    ],
)
def test_what_streams_serve(key: str, value: object) -> None:
    assert accepted({"x-queue-type": "stream", key: value}) is QueueType.STREAM


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("x-max-age", "7", "invalid_max_age"),
        ("x-max-age", "D", "invalid_max_age"),
        ("x-max-age", "0D", "invalid_max_age"),
        ("x-max-age", "7d", "invalid_max_age"),
        ("x-max-age", "1h30m", "invalid_max_age"),
        ("x-max-age", 7, "{unacceptable_type,long}"),
        ("x-initial-cluster-size", 0, "{value_zero,0}"),
        ("x-max-length-bytes", -1, "{value_negative,-1}"),
        ("x-queue-leader-locator", "here", "invalid_queue_locator_arg"),
        ("x-trace", "yes", "{unacceptable_type,longstr}"),
    ],
)
def test_bad_values_of_streams(key: str, value: object, reason: str) -> None:
    arguments = {"x-queue-type": "stream", key: value}
    assert refusal(arguments) == f"invalid arg '{key}' for {Q}: {reason}"


def test_segments_have_a_largest_size() -> None:
    arguments = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": 3_000_000_001}
    assert refusal(arguments) == "Exceeded max value for x-stream-max-segment-size-bytes"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x-stream-filter", "a"),
        ("x-stream-match-unfiltered", True),
        ("x-stream-filter-size-bytes", 32),
    ],
)
def test_filters_of_streams_are_refused(key: str, value: object) -> None:
    for queue_type in ("quorum", "classic"):
        text = f"invalid arg '{key}' for {Q} of queue type rabbit_{queue_type}_queue"
        assert refusal({"x-queue-type": queue_type, key: value}) == text
    stream = {"x-queue-type": "stream", key: value}
    assert refusal(stream) == f"invalid arg '{key}' for {Q}: not served yet by stream queues"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x-expires", 1000),
        ("x-message-ttl", 1),
        ("x-dead-letter-exchange", "d"),
        ("x-max-length", 5),
        ("x-max-priority", 5),
        ("x-overflow", "drop-head"),
        ("x-single-active-consumer", True),
        ("x-delivery-limit", 5),
        ("x-quorum-initial-group-size", 3),
        ("x-consumer-timeout", 1),
    ],
)
def test_what_belongs_to_queues_is_refused_for_streams(key: str, value: object) -> None:
    arguments = {"x-queue-type": "stream", key: value}
    assert refusal(arguments) == f"invalid arg '{key}' for {Q} of queue type rabbit_stream_queue"


def redeclared_as_classic(current: Mapping[str, object], new: Mapping[str, object]) -> str:
    """The text with which a relaxed redeclare of a quorum queue is refused; empty when it is
    not."""
    try:
        check_common_arguments(SUBJECT, Table.of(current), Table.of(new))
    except PreconditionFailed as refused:
        return refused.text
    return ""


def test_a_quorum_queue_declared_as_classic_is_compared_by_what_both_have() -> None:
    quorum = {"x-queue-type": "quorum", "x-delivery-limit": 3, "x-single-active-consumer": True}
    assert is_quorum_as_classic(QueueType.QUORUM, Table.of({"x-queue-type": "classic"}))
    assert is_quorum_as_classic(QueueType.QUORUM, Table.of({}))
    assert not is_quorum_as_classic(QueueType.QUORUM, Table.of({"x-queue-type": "quorum"}))
    assert not is_quorum_as_classic(QueueType.STREAM, Table.of({}))
    assert not is_quorum_as_classic(QueueType.CLASSIC, Table.of({}))
    lazy = {"x-queue-mode": "lazy", "x-max-priority": 5, "x-single-active-consumer": True}
    assert redeclared_as_classic(quorum, lazy) == ""
    for key in COMMON_ARGUMENTS:
        assert f"inequivalent arg '{key}' for {Q}" in redeclared_as_classic({key: "a"}, {})
        assert f"inequivalent arg '{key}' for {Q}" in redeclared_as_classic({}, {key: 5})
        assert redeclared_as_classic({key: 5}, {key: 5}) == ""
