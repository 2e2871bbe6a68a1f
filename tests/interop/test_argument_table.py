"""Every argument of queues and consumers: what value, or which type of queue, is refused, and with
which text; and what of a declaration is compared when it is repeated."""

from __future__ import annotations

import pytest
from pika import spec  # type: ignore[import-untyped]

from tests.interop.conftest import Names
from tests.interop.test_error_codes import (
    CLASSIC,
    LOCKED,
    QUORUM,
    declare,
    expiration,
    invalid,
    quorum_declare,
)
from tests.raw_amqp import RawPeer, assert_channel_error

TEN_YEARS_MS = 315_360_000_000
NO_INTEGER = '"expected integer, got longstr"'
NEGATIVE = "{value_negative,-1}"


@pytest.mark.parametrize(
    ("kind", "argument", "value", "reason"),
    [
        ("classic", "x-message-ttl", "1s", NO_INTEGER),
        ("quorum", "x-message-ttl", -1, NEGATIVE),
        ("classic", "x-expires", TEN_YEARS_MS + 1, "{value_too_large,315360000001}"),
        ("quorum", "x-expires", 0, "{value_zero,0}"),
        ("quorum", "x-max-length", -1, NEGATIVE),
        ("classic", "x-max-length-bytes", "1k", NO_INTEGER),
        ("quorum", "x-max-length-bytes", -1, NEGATIVE),
        ("quorum", "x-overflow", "drop-tail", "invalid_overflow"),
        ("classic", "x-overflow", 1, "{unacceptable_type,signedint}"),
        ("classic", "x-dead-letter-exchange", 1, "{unacceptable_type,signedint}"),
        ("quorum", "x-dead-letter-routing-key", "k", "routing_key_but_no_dlx_defined"),
        ("quorum", "x-dead-letter-strategy", 1, "{unacceptable_type,signedint}"),
        ("classic", "x-single-active-consumer", 1, "{unacceptable_type,signedint}"),
        ("classic", "x-max-priority", -1, NEGATIVE),
        ("classic", "x-queue-mode", "sleepy", "invalid_queue_mode"),
        ("classic", "x-queue-version", 1, "\"unsupported queue version '1'\""),
        ("classic", "x-queue-leader-locator", "nearest", "invalid_queue_locator_arg"),
        ("classic", "x-queue-master-locator", "nearest", "invalid_queue_locator_arg"),
        ("quorum", "x-quorum-initial-group-size", "3", NO_INTEGER),
        ("quorum", "x-quorum-target-group-size", 0, "{value_zero,0}"),
        ("quorum", "x-max-in-memory-length", -1, NEGATIVE),
        ("quorum", "x-max-in-memory-bytes", -1, NEGATIVE),
        ("quorum", "x-consumer-timeout", "1m", NO_INTEGER),
        ("quorum", "x-consumer-disconnected-timeout", -1, NEGATIVE),
        ("quorum", "x-delayed-retry-type", "often", "invalid_delayed_retry_type"),
        ("quorum", "x-delayed-retry-min", -1, NEGATIVE),
        ("quorum", "x-delayed-retry-max", "1m", NO_INTEGER),
    ],
)
@pytest.mark.rabbitmq_since("4.3")
def test_a_bad_value_is_refused(
    raw_channel: RawPeer, names: Names, kind: str, argument: str, value: object, reason: str
) -> None:
    queue = names.queue()
    arguments = {"x-queue-type": kind, argument: value}
    raw_channel.send(1, spec.Queue.Declare(queue=queue, durable=True, arguments=arguments))
    text = invalid(argument, reason).replace("{q}", queue)
    assert_channel_error(raw_channel, 406, text, spec.Queue.Declare)


@pytest.mark.parametrize(
    ("kind", "argument", "value"),
    [
        ("classic", "x-dead-letter-strategy", "at-most-once"),
        ("classic", "x-delivery-limit", 5),
        ("classic", "x-quorum-initial-group-size", 3),
        ("classic", "x-max-in-memory-length", 5),
        ("classic", "x-max-in-memory-bytes", 5),
        ("classic", "x-consumer-timeout", 60_000),
        ("classic", "x-consumer-disconnected-timeout", 60_000),
        ("classic", "x-delayed-retry-type", "all"),
        ("classic", "x-delayed-retry-min", 1),
        ("classic", "x-delayed-retry-max", 1),
        ("quorum", "x-max-priority", 5),
        ("quorum", "x-queue-mode", "default"),
        ("quorum", "x-queue-version", 2),
        ("quorum", "x-queue-master-locator", "random"),
    ],
)
@pytest.mark.rabbitmq_since("4.3")
def test_an_argument_of_another_type_is_refused(
    raw_channel: RawPeer, names: Names, kind: str, argument: str, value: object
) -> None:
    queue = names.queue()
    arguments = {"x-queue-type": kind, argument: value}
    raw_channel.send(1, spec.Queue.Declare(queue=queue, durable=True, arguments=arguments))
    text = (
        f"PRECONDITION_FAILED - invalid arg '{argument}' for queue '{queue}' in vhost '/'"
        f" of queue type rabbit_{kind}_queue"
    )
    assert_channel_error(raw_channel, 406, text, spec.Queue.Declare)


@pytest.mark.parametrize(
    ("kind", "argument", "value"),
    [
        ("quorum", "x-max-in-memory-length", 5),
        ("quorum", "x-max-in-memory-bytes", 5),
        ("quorum", "x-delivery-limit", -1),
        ("quorum", "x-queue-leader-locator", "balanced"),
        ("classic", "x-queue-mode", "lazy"),
        ("classic", "x-queue-version", 2),
        ("classic", "x-queue-master-locator", "min-masters"),
        ("classic", "x-message-ttl", 0),
        ("classic", "x-max-length", 0),
        ("quorum", "x-interop", "anything"),
        ("classic", "x-interop", 5),
    ],
)
def test_what_is_taken_is_taken_again(
    raw_channel: RawPeer, names: Names, kind: str, argument: str, value: object
) -> None:
    queue = names.queue()
    for _ in range(2):
        declare(raw_channel, queue, {"x-queue-type": kind, argument: value})


@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize(
    ("argument", "value"), [("x-stream-offset", "first"), ("x-stream-filter", "a")]
)
def test_a_consumer_argument_of_streams_is_refused(
    raw_channel: RawPeer, names: Names, kind: str, argument: str, value: object
) -> None:
    queue = names.queue()
    declare(raw_channel, queue, {"x-queue-type": kind})
    raw_channel.send(1, spec.Basic.Consume(queue=queue, arguments={argument: value}))
    closed = raw_channel.expect(spec.Channel.Close, channel=1)
    assert closed.reply_code == 406
    assert f"invalid arg '{argument}' for queue '{queue}'" in closed.reply_text


def test_a_consumer_argument_of_quorum_queues_is_refused_by_classic_ones(
    raw_channel: RawPeer, names: Names
) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    consume = spec.Basic.Consume(queue=queue, arguments={"x-consumer-timeout": 60_000})
    raw_channel.send(1, consume)
    text = (
        f"PRECONDITION_FAILED - invalid arg 'x-consumer-timeout' for queue '{queue}' in vhost '/'"
        " of queue type rabbit_classic_queue"
    )
    assert_channel_error(raw_channel, 406, text, spec.Basic.Consume)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"durable": False}, "'durable' for {q}: received 'false' but current is 'true'"),
        ({"auto_delete": True}, "'auto_delete' for {q}: received 'true' but current is 'false'"),
    ],
)
def test_a_flag_that_differs(
    raw_channel: RawPeer, names: Names, flags: dict[str, bool], text: str
) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    declared = {"durable": True, **flags}
    raw_channel.send(1, spec.Queue.Declare(queue=queue, arguments=CLASSIC, **declared))
    text = text.replace("{q}", f"queue '{queue}' in vhost '/'")
    assert_channel_error(raw_channel, 406, f"PRECONDITION_FAILED - inequivalent arg {text}")


def test_the_exclusive_flag_is_compared_first(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    method = spec.Queue.Declare(queue=queue, durable=False, exclusive=True, arguments=QUORUM)
    raw_channel.send(1, method)
    assert_channel_error(raw_channel, 405, LOCKED.replace("{q}", queue), spec.Queue.Declare)


def test_integers_of_any_width_are_equal(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, QUORUM | {"x-delivery-limit": 5})
    # pika encodes what does not fit 32 bits, and only that, as 64.
    declare(raw_channel, queue, QUORUM | {"x-delivery-limit": 5, "x-wide": 1 << 40})
    raw_channel.send(1, quorum_declare(queue, arguments={"x-delivery-limit": 1 << 40}))
    assert_channel_error(
        raw_channel,
        406,
        f"PRECONDITION_FAILED - inequivalent arg 'x-delivery-limit' for queue '{queue}' in vhost"
        f" '/': received '{1 << 40}' but current is '5'",
    )


@pytest.mark.parametrize("flag", ["durable", "auto_delete", "internal"])
def test_a_flag_of_an_exchange_that_differs(raw_channel: RawPeer, names: Names, flag: str) -> None:
    exchange = names.exchange()
    raw_channel.call(1, spec.Exchange.Declare(exchange=exchange), spec.Exchange.DeclareOk)
    raw_channel.send(1, spec.Exchange.Declare(exchange=exchange, **{flag: True}))
    assert_channel_error(
        raw_channel,
        406,
        f"PRECONDITION_FAILED - inequivalent arg '{flag}' for exchange '{exchange}' in vhost '/':"
        " received 'true' but current is 'false'",
        spec.Exchange.Declare,
    )


def test_the_alternate_exchange_is_compared(raw_channel: RawPeer, names: Names) -> None:
    exchange = names.exchange()
    first = {"alternate-exchange": "amq.fanout"}
    raw_channel.call(
        1, spec.Exchange.Declare(exchange=exchange, arguments=first), spec.Exchange.DeclareOk
    )
    raw_channel.call(
        1,
        spec.Exchange.Declare(exchange=exchange, arguments=first | {"x-interop": 1}),
        spec.Exchange.DeclareOk,
    )
    raw_channel.send(1, spec.Exchange.Declare(exchange=exchange))
    assert_channel_error(
        raw_channel,
        406,
        f"PRECONDITION_FAILED - inequivalent arg 'alternate-exchange' for exchange '{exchange}'"
        " in vhost '/': received none but current is the value 'amq.fanout' of type 'longstr'",
    )


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_basic_get_from_a_single_active_consumer_queue(
    raw_channel: RawPeer, names: Names, kind: str
) -> None:
    queue = names.queue()
    declare(raw_channel, queue, {"x-queue-type": kind, "x-single-active-consumer": True})
    raw_channel.send(1, spec.Basic.Get(queue=queue))
    assert_channel_error(
        raw_channel,
        405,
        f"RESOURCE_LOCKED - cannot obtain access to locked queue '{queue}' in vhost '/'."
        f" basic.get operations are not supported by {kind} queues with single active consumer",
    )


def test_an_expiration_beyond_ten_years(raw_channel: RawPeer) -> None:
    value = str(TEN_YEARS_MS + 1)
    raw_channel.publish(1, b"x", routing_key="interop-absent", properties=expiration(value))
    assert_channel_error(
        raw_channel,
        406,
        f"PRECONDITION_FAILED - invalid expiration '{value}': {{value_too_large,{value}}}",
        spec.Basic.Publish,
    )
