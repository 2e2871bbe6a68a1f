"""Every refusal that a client can provoke: its code, its text, and what it closes.

Texts are those of RabbitMQ 4.3; a row that older releases word differently names the release.
After a channel error the connection goes on and the channel number can be used again; after a
connection error only that connection is gone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from pika import spec  # type: ignore[import-untyped]

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.raw_amqp import (
    Closed,
    RawPeer,
    assert_channel_error,
    assert_connection_error,
    content_header,
    method_bytes,
)

ABSENT = "interop-absent"
QUORUM = {"x-queue-type": "quorum"}
CLASSIC = {"x-queue-type": "classic"}


def declare(peer: RawPeer, queue: str, arguments: dict[str, Any], **flags: bool) -> None:
    """Declare a durable queue on channel 1 and take the answer."""
    method = spec.Queue.Declare(queue=queue, arguments=arguments, **({"durable": True} | flags))
    peer.call(1, method, spec.Queue.DeclareOk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One method that a fresh channel refuses. `{q}` in the text is the test's own queue name."""

    method: Callable[[str], Any]
    code: int
    text: str
    hard: bool = False
    since: str = "0"


NO_QUEUE = f"NOT_FOUND - no queue '{ABSENT}' in vhost '/'"
NO_EXCHANGE = f"NOT_FOUND - no exchange '{ABSENT}' in vhost '/'"
DEFAULT_EXCHANGE = "ACCESS_REFUSED - operation not permitted on the default exchange"
RESERVED = "ACCESS_REFUSED - {} name 'amq.interop' contains reserved prefix 'amq.*'"
UNDECLARED = "NOT_FOUND - no previously declared queue"


def soft(method: Callable[[str], Any], code: int, text: str) -> Refusal:
    return Refusal(method=method, code=code, text=text)


def hard(method: Callable[[str], Any], code: int, text: str) -> Refusal:
    return Refusal(method=method, code=code, text=text, hard=True)


def quorum_declare(name: str, **more: Any) -> Any:
    arguments = QUORUM | more.pop("arguments", {})
    return spec.Queue.Declare(queue=name, arguments=arguments, **({"durable": True} | more))


def classic_declare(name: str, **arguments: Any) -> Any:
    named = {key.replace("_", "-"): value for key, value in arguments.items()}
    return spec.Queue.Declare(queue=name, durable=True, arguments=CLASSIC | named)


def invalid(argument: str, reason: str) -> str:
    return (
        f"PRECONDITION_FAILED - invalid arg '{argument}' for queue '{{q}}' in vhost '/': {reason}"
    )


REFUSALS = {
    # Names that do not exist.
    "passive queue": soft(lambda q: spec.Queue.Declare(queue=ABSENT, passive=True), 404, NO_QUEUE),
    "bind queue": soft(
        lambda q: spec.Queue.Bind(queue=ABSENT, exchange="amq.direct", routing_key="k"),
        404,
        NO_QUEUE,
    ),
    "consume": soft(lambda q: spec.Basic.Consume(queue=ABSENT), 404, NO_QUEUE),
    "get": soft(lambda q: spec.Basic.Get(queue=ABSENT), 404, NO_QUEUE),
    "purge": soft(lambda q: spec.Queue.Purge(queue=ABSENT), 404, NO_QUEUE),
    "passive exchange": soft(
        lambda q: spec.Exchange.Declare(exchange=ABSENT, passive=True), 404, NO_EXCHANGE
    ),
    "bind exchange": soft(
        lambda q: spec.Exchange.Bind(destination="amq.direct", source=ABSENT), 404, NO_EXCHANGE
    ),
    "bind to absent exchange": soft(
        lambda q: spec.Exchange.Bind(destination=ABSENT, source="amq.direct"), 404, NO_EXCHANGE
    ),
    "consume without declared queue": soft(lambda q: spec.Basic.Consume(), 404, UNDECLARED),
    "get without declared queue": soft(lambda q: spec.Basic.Get(), 404, UNDECLARED),
    "purge without declared queue": soft(lambda q: spec.Queue.Purge(), 404, UNDECLARED),
    # Names that are not the client's to use.
    "reserved queue": soft(
        lambda q: spec.Queue.Declare(queue="amq.interop"), 403, RESERVED.format("queue")
    ),
    "reserved exchange": soft(
        lambda q: spec.Exchange.Declare(exchange="amq.interop"), 403, RESERVED.format("exchange")
    ),
    "declare default exchange": soft(
        lambda q: spec.Exchange.Declare(exchange=""), 403, DEFAULT_EXCHANGE
    ),
    "delete default exchange": soft(
        lambda q: spec.Exchange.Delete(exchange=""), 403, DEFAULT_EXCHANGE
    ),
    "delete system exchange": soft(
        lambda q: spec.Exchange.Delete(exchange="amq.topic"),
        403,
        "ACCESS_REFUSED - deletion of system exchange 'amq.topic' in vhost '/' not allowed",
    ),
    # Properties and arguments.
    "quorum exclusive": soft(
        lambda q: quorum_declare(q, exclusive=True),
        406,
        "PRECONDITION_FAILED - invalid property 'exclusive-owner' for queue '{q}' in vhost '/'",
    ),
    "quorum transient": soft(
        lambda q: quorum_declare(q, durable=False),
        406,
        "PRECONDITION_FAILED - invalid property 'non-durable' for queue '{q}' in vhost '/'",
    ),
    "quorum auto-delete": soft(
        lambda q: quorum_declare(q, auto_delete=True),
        406,
        "PRECONDITION_FAILED - invalid property 'auto-delete' for queue '{q}' in vhost '/'",
    ),
    "quorum server-named": soft(
        lambda q: quorum_declare(""),
        406,
        "PRECONDITION_FAILED - Cannot declare a server-named queue for type rabbit_quorum_queue",
    ),
    "unknown exchange type": Refusal(
        method=lambda q: spec.Exchange.Declare(exchange=q, type="interop-x"),
        code=406,
        text="PRECONDITION_FAILED - unknown exchange type 'interop-x'",
        since="4.0",
    ),
    "negative length limit": soft(
        lambda q: classic_declare(q, x_max_length=-5),
        406,
        invalid("x-max-length", "{value_negative,-5}"),
    ),
    "zero expires": soft(
        lambda q: classic_declare(q, x_expires=0), 406, invalid("x-expires", "{value_zero,0}")
    ),
    "too many priorities": soft(
        lambda q: classic_declare(q, x_max_priority=256),
        406,
        invalid("x-max-priority", "{max_value_exceeded,256}"),
    ),
    "dead-letter key alone": soft(
        lambda q: classic_declare(q, x_dead_letter_routing_key="k"),
        406,
        invalid("x-dead-letter-routing-key", "routing_key_but_no_dlx_defined"),
    ),
    "priorities on quorum": soft(
        lambda q: quorum_declare(q, arguments={"x-max-priority": 5}),
        406,
        "PRECONDITION_FAILED - invalid arg 'x-max-priority' for queue '{q}' in vhost '/'"
        " of queue type rabbit_quorum_queue",
    ),
    "delivery limit on classic": soft(
        lambda q: classic_declare(q, x_delivery_limit=5),
        406,
        "PRECONDITION_FAILED - invalid arg 'x-delivery-limit' for queue '{q}' in vhost '/'"
        " of queue type rabbit_classic_queue",
    ),
    "unknown queue type": soft(
        lambda q: spec.Queue.Declare(queue=q, durable=True, arguments={"x-queue-type": "bogus"}),
        406,
        invalid("x-queue-type", "\"unsupported queue type 'bogus'\""),
    ),
    "queue type that is no string": soft(
        lambda q: spec.Queue.Declare(queue=q, durable=True, arguments={"x-queue-type": 5}),
        406,
        invalid("x-queue-type", "{unacceptable_type,signedint}"),
    ),
    "length limit that is no number": soft(
        lambda q: quorum_declare(q, arguments={"x-max-length": "ten"}),
        406,
        invalid("x-max-length", '"expected integer, got longstr"'),
    ),
    "too long a time to live": soft(
        lambda q: classic_declare(q, x_message_ttl=315_360_000_001),
        406,
        invalid("x-message-ttl", "{value_too_large,315360000001}"),
    ),
    "unknown overflow": soft(
        lambda q: classic_declare(q, x_overflow="bogus"),
        406,
        invalid("x-overflow", "invalid_overflow"),
    ),
    "single active consumer that is no boolean": soft(
        lambda q: quorum_declare(q, arguments={"x-single-active-consumer": "yes"}),
        406,
        invalid("x-single-active-consumer", "{unacceptable_type,longstr}"),
    ),
    "no members": soft(
        lambda q: quorum_declare(q, arguments={"x-quorum-initial-group-size": 0}),
        406,
        invalid("x-quorum-initial-group-size", "{value_zero,0}"),
    ),
    "unknown leader locator": soft(
        lambda q: quorum_declare(q, arguments={"x-queue-leader-locator": "bogus"}),
        406,
        invalid("x-queue-leader-locator", "invalid_queue_locator_arg"),
    ),
    "unknown dead-letter strategy": soft(
        lambda q: quorum_declare(q, arguments={"x-dead-letter-strategy": "bogus"}),
        406,
        invalid("x-dead-letter-strategy", "invalid_dlx_strategy"),
    ),
    "lazy quorum queue": soft(
        lambda q: quorum_declare(q, arguments={"x-queue-mode": "lazy"}),
        406,
        "PRECONDITION_FAILED - invalid arg 'x-queue-mode' for queue '{q}' in vhost '/'"
        " of queue type rabbit_quorum_queue",
    ),
    "group size on classic": soft(
        lambda q: classic_declare(q, x_quorum_initial_group_size=3),
        406,
        "PRECONDITION_FAILED - invalid arg 'x-quorum-initial-group-size' for queue '{q}'"
        " in vhost '/' of queue type rabbit_classic_queue",
    ),
    "alternate exchange that is no string": soft(
        lambda q: spec.Exchange.Declare(exchange=q, arguments={"alternate-exchange": 5}),
        406,
        "PRECONDITION_FAILED - invalid type 'signedint' for arg 'alternate-exchange'"
        " in exchange '{q}' in vhost '/'",
    ),
    "predeclared exchange with another type": soft(
        lambda q: spec.Exchange.Declare(exchange="amq.direct", type="fanout", durable=True),
        406,
        "PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'amq.direct' in vhost '/':"
        " received 'fanout' but current is 'direct'",
    ),
    "bind the default exchange": soft(
        lambda q: spec.Exchange.Bind(destination="", source="amq.direct"), 403, DEFAULT_EXCHANGE
    ),
    "reply address that never was": soft(
        lambda q: spec.Queue.Declare(queue="amq.rabbitmq.reply-to.bogus", passive=True),
        404,
        "NOT_FOUND - no queue 'amq.rabbitmq.reply-to.bogus' in vhost '/'",
    ),
    "delete without declared queue": soft(lambda q: spec.Queue.Delete(), 404, UNDECLARED),
    "bind without declared queue": soft(
        lambda q: spec.Queue.Bind(exchange="amq.direct", routing_key="k"), 404, UNDECLARED
    ),
    # Delivery tags and transactions.
    "ack unknown tag": soft(
        lambda q: spec.Basic.Ack(delivery_tag=7),
        406,
        "PRECONDITION_FAILED - unknown delivery tag 7",
    ),
    "ack unknown tags": soft(
        lambda q: spec.Basic.Ack(delivery_tag=7, multiple=True),
        406,
        "PRECONDITION_FAILED - unknown delivery tag 7",
    ),
    "nack unknown tag": soft(
        lambda q: spec.Basic.Nack(delivery_tag=7),
        406,
        "PRECONDITION_FAILED - unknown delivery tag 7",
    ),
    "reject unknown tag": soft(
        lambda q: spec.Basic.Reject(delivery_tag=7),
        406,
        "PRECONDITION_FAILED - unknown delivery tag 7",
    ),
    "commit": soft(
        lambda q: spec.Tx.Commit(), 406, "PRECONDITION_FAILED - channel is not transactional"
    ),
    "rollback": soft(
        lambda q: spec.Tx.Rollback(), 406, "PRECONDITION_FAILED - channel is not transactional"
    ),
    # What no broker of this family does.
    "prefetch size": hard(
        lambda q: spec.Basic.Qos(prefetch_size=4096),
        540,
        "NOT_IMPLEMENTED - prefetch_size!=0 (4096)",
    ),
    "recover without requeue": hard(
        lambda q: spec.Basic.Recover(requeue=False), 540, "NOT_IMPLEMENTED - requeue=false"
    ),
    "flow off": hard(
        lambda q: spec.Channel.Flow(active=False), 540, "NOT_IMPLEMENTED - active=false"
    ),
    "channel open twice": hard(
        lambda q: spec.Channel.Open(), 504, "CHANNEL_ERROR - second 'channel.open' seen"
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.rabbitmq_since(refusal.since))
        for name, refusal in REFUSALS.items()
    ],
)
def test_refused_method_closes_what_it_should(
    raw_channel: RawPeer, names: Names, case: str
) -> None:
    refusal, queue = REFUSALS[case], names.queue()
    method = refusal.method(queue)
    raw_channel.send(1, method)
    check = assert_connection_error if refusal.hard else assert_channel_error
    check(raw_channel, refusal.code, refusal.text.replace("{q}", queue), type(method))


def test_redeclaring_with_another_flag_is_refused(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    raw_channel.send(1, spec.Queue.Declare(queue=queue, durable=False, arguments=CLASSIC))
    assert_channel_error(
        raw_channel,
        406,
        f"PRECONDITION_FAILED - inequivalent arg 'durable' for queue '{queue}' in vhost '/':"
        " received 'false' but current is 'true'",
        spec.Queue.Declare,
    )


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            {"x-delivery-limit": 7},
            {"x-delivery-limit": 5},
            "'x-delivery-limit' for {Q}: received '5' but current is '7'",
        ),
        (
            {"x-delivery-limit": 7},
            {},
            "'x-delivery-limit' for {Q}: received none but current is the value '7'"
            " of type 'signedint'",
        ),
        (
            {},
            {"x-delivery-limit": 5},
            "'x-delivery-limit' for {Q}: received the value '5' of type 'signedint'"
            " but current is none",
        ),
    ],
)
def test_redeclaring_with_other_arguments_is_refused(
    raw_channel: RawPeer, names: Names, first: dict[str, Any], second: dict[str, Any], text: str
) -> None:
    queue = names.queue()
    declare(raw_channel, queue, QUORUM | first)
    raw_channel.send(1, quorum_declare(queue, arguments=second))
    expected = text.replace("{Q}", f"queue '{queue}' in vhost '/'")
    assert_channel_error(raw_channel, 406, f"PRECONDITION_FAILED - inequivalent arg {expected}")


def test_redeclaring_with_another_type_is_refused(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    raw_channel.send(1, quorum_declare(queue))
    assert_channel_error(
        raw_channel,
        406,
        f"PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue '{queue}' in vhost '/':"
        " received 'quorum' but current is 'classic'",
    )


def test_unknown_arguments_are_not_compared(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC | {"x-interop": 1})
    declare(raw_channel, queue, CLASSIC | {"x-interop": "two"})
    declare(raw_channel, queue, CLASSIC)


def test_redeclaring_an_exchange_with_another_type_is_refused(
    raw_channel: RawPeer, names: Names
) -> None:
    exchange = names.exchange()
    raw_channel.call(
        1,
        spec.Exchange.Declare(exchange=exchange, type="direct"),
        spec.Exchange.DeclareOk,
    )
    raw_channel.send(1, spec.Exchange.Declare(exchange=exchange, type="fanout"))
    assert_channel_error(
        raw_channel,
        406,
        f"PRECONDITION_FAILED - inequivalent arg 'type' for exchange '{exchange}' in vhost '/':"
        " received 'fanout' but current is 'direct'",
    )


def test_publish_to_absent_exchange(raw_channel: RawPeer) -> None:
    raw_channel.publish(1, b"lost", exchange=ABSENT, routing_key="k")
    assert_channel_error(raw_channel, 404, NO_EXCHANGE, spec.Basic.Publish)


def test_publish_to_internal_exchange(raw_channel: RawPeer, names: Names) -> None:
    exchange = names.exchange()
    raw_channel.call(
        1, spec.Exchange.Declare(exchange=exchange, internal=True), spec.Exchange.DeclareOk
    )
    raw_channel.publish(1, b"lost", exchange=exchange)
    assert_channel_error(
        raw_channel,
        403,
        f"ACCESS_REFUSED - cannot publish to internal exchange '{exchange}' in vhost '/'",
        spec.Basic.Publish,
    )


def test_publish_immediate(raw_channel: RawPeer) -> None:
    raw_channel.publish(1, b"now", routing_key=ABSENT, immediate=True)
    assert_connection_error(
        raw_channel, 540, "NOT_IMPLEMENTED - immediate=true", spec.Basic.Publish
    )


def user_id(value: str) -> bytes:
    return b"\x00\x10" + bytes([len(value)]) + value.encode()


def expiration(value: str) -> bytes:
    return b"\x01\x00" + bytes([len(value)]) + value.encode()


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        (
            user_id("mallory"),
            "user_id property set to 'mallory' but authenticated user was 'guest'",
        ),
        (expiration("abc"), "invalid expiration 'abc': no_integer"),
        (expiration("10s"), "invalid expiration '10s': {leftover_string,\"s\"}"),
        (expiration("-1"), "invalid expiration '-1': {value_negative,-1}"),
    ],
)
def test_bad_message_property(raw_channel: RawPeer, properties: bytes, text: str) -> None:
    raw_channel.publish(1, b"x", routing_key=ABSENT, properties=properties)
    assert_channel_error(raw_channel, 406, f"PRECONDITION_FAILED - {text}", spec.Basic.Publish)


@pytest.mark.parametrize("header", ["CC", "BCC"])
def test_extra_routing_keys_that_are_no_list(raw_channel: RawPeer, header: str) -> None:
    pair = bytes([len(header)]) + header.encode() + b"S\x00\x00\x00\x01k"
    properties = b"\x20\x00" + struct.pack(">I", len(pair)) + pair
    raw_channel.publish(1, b"x", routing_key=ABSENT, properties=properties)
    assert_channel_error(
        raw_channel,
        406,
        "PRECONDITION_FAILED - invalid message:"
        f' {{unacceptable_type_in_header,"{header}",longstr}}',
        spec.Basic.Publish,
    )


@pytest.mark.rabbitmq_since("4.0")
def test_message_above_the_largest_size(raw_channel: RawPeer) -> None:
    size = 16 * 1024 * 1024 + 1
    raw_channel.send_bytes(
        method_bytes(1, spec.Basic.Publish(routing_key=ABSENT)) + content_header(1, size)
    )
    assert_channel_error(
        raw_channel,
        406,
        f"PRECONDITION_FAILED - message size {size} is larger than configured max size {size - 1}",
    )


@pytest.mark.parametrize(
    ("first", "first_ok", "second", "text"),
    [
        (
            spec.Confirm.Select(),
            spec.Confirm.SelectOk,
            spec.Tx.Select(),
            "cannot switch from confirm to tx mode",
        ),
        (
            spec.Tx.Select(),
            spec.Tx.SelectOk,
            spec.Confirm.Select(),
            "cannot switch from tx to confirm mode",
        ),
    ],
)
def test_confirm_and_tx_do_not_mix(
    raw_channel: RawPeer, first: Any, first_ok: type, second: Any, text: str
) -> None:
    raw_channel.call(1, first, first_ok)
    raw_channel.send(1, second)
    assert_channel_error(raw_channel, 406, f"PRECONDITION_FAILED - {text}", type(second))


def test_tag_acknowledged_twice(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, QUORUM)
    raw_channel.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    raw_channel.publish(1, b"once", routing_key=queue)
    raw_channel.expect(spec.Basic.Ack)
    got = raw_channel.call(1, spec.Basic.Get(queue=queue), spec.Basic.GetOk)
    raw_channel.content()
    raw_channel.send(1, spec.Basic.Ack(delivery_tag=got.delivery_tag))
    raw_channel.send(1, spec.Basic.Ack(delivery_tag=got.delivery_tag))
    assert_channel_error(
        raw_channel, 406, f"PRECONDITION_FAILED - unknown delivery tag {got.delivery_tag}"
    )


LOCKED = (
    "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '{q}' in vhost '/'."
    " It could be originally declared on another connection or the exclusive property value"
    " does not match that of the original declaration."
)


@pytest.mark.parametrize(
    "use",
    [
        lambda q: spec.Queue.Declare(queue=q, exclusive=True),
        lambda q: spec.Queue.Declare(queue=q, passive=True),
        lambda q: spec.Basic.Consume(queue=q),
        lambda q: spec.Basic.Get(queue=q),
        lambda q: spec.Queue.Purge(queue=q),
        lambda q: spec.Queue.Delete(queue=q),
        lambda q: spec.Queue.Bind(queue=q, exchange="amq.direct", routing_key="k"),
    ],
    ids=["declare", "passive", "consume", "get", "purge", "delete", "bind"],
)
def test_exclusive_queue_of_another_connection(
    raw_channel: RawPeer, cluster: Cluster, names: Names, use: Callable[[str], Any]
) -> None:
    queue = names.queue()
    raw_channel.call(1, spec.Queue.Declare(queue=queue, exclusive=True), spec.Queue.DeclareOk)
    with RawPeer(cluster.uris[1]) as other:
        other.handshake().open_channel(1)
        other.send(1, use(queue))
        assert_channel_error(other, 405, LOCKED.replace("{q}", queue))


@pytest.mark.parametrize("first_is_exclusive", [True, False])
def test_exclusive_consumer_clash(
    raw_channel: RawPeer, names: Names, first_is_exclusive: bool
) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    raw_channel.call(
        1, spec.Basic.Consume(queue=queue, exclusive=first_is_exclusive), spec.Basic.ConsumeOk
    )
    raw_channel.send(1, spec.Basic.Consume(queue=queue, exclusive=not first_is_exclusive))
    assert_channel_error(
        raw_channel, 403, f"ACCESS_REFUSED - queue '{queue}' in vhost '/' in exclusive use"
    )


def test_get_from_single_active_consumer_queue(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, QUORUM | {"x-single-active-consumer": True})
    raw_channel.call(1, spec.Basic.Consume(queue=queue), spec.Basic.ConsumeOk)
    raw_channel.send(1, spec.Basic.Get(queue=queue))
    assert_channel_error(
        raw_channel,
        405,
        f"RESOURCE_LOCKED - cannot obtain access to locked queue '{queue}' in vhost '/'."
        " basic.get operations are not supported by quorum queues with single active consumer",
    )


def test_consumer_tag_in_use(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    consume = spec.Basic.Consume(queue=queue, consumer_tag="twice")
    raw_channel.call(1, consume, spec.Basic.ConsumeOk)
    raw_channel.send(1, consume)
    assert_connection_error(
        raw_channel, 530, "NOT_ALLOWED - attempt to reuse consumer tag 'twice'", spec.Basic.Consume
    )


def test_delete_if_unused_and_if_empty(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    raw_channel.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    raw_channel.publish(1, b"stays", routing_key=queue)
    raw_channel.expect(spec.Basic.Ack)
    raw_channel.send(1, spec.Queue.Delete(queue=queue, if_empty=True))
    assert_channel_error(
        raw_channel, 406, f"PRECONDITION_FAILED - queue '{queue}' in vhost '/' not empty"
    )
    raw_channel.call(1, spec.Queue.Purge(queue=queue), spec.Queue.PurgeOk)
    raw_channel.call(1, spec.Basic.Consume(queue=queue), spec.Basic.ConsumeOk)
    raw_channel.send(1, spec.Queue.Delete(queue=queue, if_unused=True))
    assert_channel_error(
        raw_channel, 406, f"PRECONDITION_FAILED - queue '{queue}' in vhost '/' in use"
    )


@pytest.mark.parametrize("flag", ["if_unused", "if_empty"])
def test_conditional_delete_of_a_quorum_queue(
    raw_channel: RawPeer, cluster: Cluster, names: Names, flag: str
) -> None:
    queue = names.queue()
    declare(raw_channel, queue, QUORUM)
    method = spec.Queue.Delete(queue=queue, **{flag: True})
    if cluster.system != "rabbitmq":
        if flag == "if_unused":
            raw_channel.call(1, spec.Basic.Consume(queue=queue), spec.Basic.ConsumeOk)
        else:
            raw_channel.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
            raw_channel.publish(1, b"stays", routing_key=queue)
            raw_channel.expect(spec.Basic.Ack)
        raw_channel.send(1, method)
        text = "in use" if flag == "if_unused" else "not empty"
        closed = raw_channel.expect(spec.Channel.Close, channel=1)
        assert (closed.reply_code, closed.reply_text) == (
            406,
            f"PRECONDITION_FAILED - queue '{queue}' in vhost '/' {text}",
        )
        raw_channel.send(1, spec.Channel.CloseOk())
        raw_channel.open_channel(1)
        raw_channel.call(1, spec.Queue.Purge(queue=queue), spec.Queue.PurgeOk)
        raw_channel.call(1, method, spec.Queue.DeleteOk)
        return
    raw_channel.send(1, method)
    assert_connection_error(
        raw_channel,
        540,
        f"NOT_IMPLEMENTED - cannot delete queue '{queue}' in vhost '/'. queue.delete operations"
        f" with {flag.replace('_', '-')} flag set are not supported by quorum queues",
    )


def test_delete_exchange_if_unused(raw_channel: RawPeer, names: Names) -> None:
    queue, exchange = names.queue(), names.exchange()
    declare(raw_channel, queue, CLASSIC)
    raw_channel.call(1, spec.Exchange.Declare(exchange=exchange), spec.Exchange.DeclareOk)
    raw_channel.call(1, spec.Queue.Bind(queue=queue, exchange=exchange), spec.Queue.BindOk)
    raw_channel.send(1, spec.Exchange.Delete(exchange=exchange, if_unused=True))
    assert_channel_error(
        raw_channel, 406, f"PRECONDITION_FAILED - exchange '{exchange}' in vhost '/' in use"
    )


@pytest.mark.parametrize("bind", [spec.Queue.Bind, spec.Queue.Unbind])
def test_binding_to_the_default_exchange(
    raw_channel: RawPeer, names: Names, bind: Callable[..., Any]
) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    raw_channel.send(1, bind(queue=queue, exchange="", routing_key="k"))
    assert_channel_error(raw_channel, 403, DEFAULT_EXCHANGE)


def test_deleting_what_is_absent_succeeds(raw_channel: RawPeer, names: Names) -> None:
    deleted = raw_channel.call(1, spec.Queue.Delete(queue=ABSENT), spec.Queue.DeleteOk)
    assert deleted.message_count == 0
    raw_channel.call(1, spec.Exchange.Delete(exchange=ABSENT), spec.Exchange.DeleteOk)
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    unbind = spec.Queue.Unbind(queue=queue, exchange="amq.direct", routing_key="never")
    raw_channel.call(1, unbind, spec.Queue.UnbindOk)
    raw_channel.call(1, spec.Basic.Cancel(consumer_tag="never-there"), spec.Basic.CancelOk)


def test_reply_consumer_must_not_acknowledge(raw_channel: RawPeer) -> None:
    raw_channel.send(1, spec.Basic.Consume(queue="amq.rabbitmq.reply-to", no_ack=False))
    assert_channel_error(
        raw_channel, 406, "PRECONDITION_FAILED - reply consumer cannot acknowledge"
    )


def test_second_reply_consumer(raw_channel: RawPeer) -> None:
    consume = spec.Basic.Consume(queue="amq.rabbitmq.reply-to", no_ack=True)
    raw_channel.call(1, consume, spec.Basic.ConsumeOk)
    raw_channel.send(1, consume)
    assert_channel_error(raw_channel, 406, "PRECONDITION_FAILED - reply consumer already set")


def test_reply_to_without_reply_consumer(raw_channel: RawPeer) -> None:
    reply_to = b"amq.rabbitmq.reply-to"
    raw_channel.publish(
        1,
        b"question",
        routing_key=ABSENT,
        properties=b"\x02\x00" + bytes([len(reply_to)]) + reply_to,
    )
    assert_channel_error(
        raw_channel, 406, "PRECONDITION_FAILED - fast reply consumer does not exist"
    )


def test_unknown_vhost(peer: RawPeer) -> None:
    peer.start()
    peer.start_ok()
    peer.expect(spec.Connection.Tune)
    peer.send(0, spec.Connection.TuneOk(channel_max=10, frame_max=131072, heartbeat=0))
    peer.send(0, spec.Connection.Open(virtual_host="interop-absent"))
    assert_connection_error(
        peer, 530, "NOT_ALLOWED - vhost interop-absent not found", spec.Connection.Open
    )


@pytest.mark.parametrize(("user", "password"), [("guest", "wrong"), ("nobody", "guest")])
def test_wrong_credentials(peer: RawPeer, user: str, password: str) -> None:
    peer.start()
    peer.start_ok(user=user, password=password)
    assert_connection_error(
        peer,
        403,
        "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN."
        " For details see the broker logfile.",
    )


def test_wrong_credentials_of_a_client_without_the_capability(peer: RawPeer) -> None:
    peer.start()
    peer.start_ok(password="wrong", capabilities={})
    assert peer.wait_closed() == b""


def test_unknown_mechanism(peer: RawPeer) -> None:
    peer.start()
    peer.start_ok(mechanism="INTEROP")
    try:
        closed = peer.expect(spec.Connection.Close)
    except Closed:
        return  # RabbitMQ up to 3.13 only closes the socket
    assert closed.reply_code == 503


@pytest.mark.parametrize(
    ("channel_max", "frame_max", "text"),
    [
        pytest.param(
            65535,
            131072,
            "negotiated channel_max = 65535 is higher than the maximum allowed value (2047)",
            id="channels",
        ),
        pytest.param(
            0,
            131072,
            "negotiated channel_max = 0 (no limit) is higher than the maximum allowed value (2047)",
            id="unlimited channels",
        ),
        pytest.param(
            100,
            1024,
            "negotiated frame_max = 1024 is lower than the minimum allowed value ({least})",
            id="frame size",
        ),
        pytest.param(
            100,
            262144,
            "negotiated frame_max = 262144 is higher than the maximum allowed value (131072)",
            id="large frame size",
        ),
    ],
)
@pytest.mark.rabbitmq_since("4.1")
def test_tuning_out_of_bounds(
    peer: RawPeer, cluster: Cluster, channel_max: int, frame_max: int, text: str
) -> None:
    peer.start()
    peer.start_ok()
    peer.expect(spec.Connection.Tune)
    peer.send(0, spec.Connection.TuneOk(channel_max=channel_max, frame_max=frame_max, heartbeat=0))
    least = "8192" if cluster.system == "rabbitmq" else "4096"
    assert_connection_error(peer, 530, f"NOT_ALLOWED - {text.replace('{least}', least)}")


def test_channel_above_the_negotiated_maximum(peer: RawPeer) -> None:
    peer.handshake(channel_max=2).open_channel(1).open_channel(2)
    peer.send(3, spec.Channel.Open())
    closed = peer.expect(spec.Connection.Close)
    assert closed.reply_code in (504, 530)


def test_unknown_way_to_match_headers(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    raw_channel.send(
        1, spec.Queue.Bind(queue=queue, exchange="amq.headers", arguments={"x-match": "bogus"})
    )
    closed = raw_channel.expect(spec.Channel.Close, channel=1)
    assert closed.reply_code == 406
    assert closed.reply_text.startswith("PRECONDITION_FAILED - Invalid x-match field value ")
    assert closed.reply_text.endswith("; expected all, any, all-with-x, or any-with-x")


def test_consumer_priority_that_is_no_number(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    raw_channel.send(1, spec.Basic.Consume(queue=queue, arguments={"x-priority": "high"}))
    assert_channel_error(
        raw_channel,
        406,
        f"PRECONDITION_FAILED - invalid arg 'x-priority' for queue '{queue}' in vhost '/':"
        ' "expected integer, got longstr"',
    )


@pytest.mark.rabbitmq_since("4.3")
def test_too_many_hashes_in_a_topic_binding(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare(raw_channel, queue, CLASSIC)
    raw_channel.send(1, spec.Queue.Bind(queue=queue, exchange="amq.topic", routing_key="#.a.#.b.#"))
    assert_channel_error(
        raw_channel,
        406,
        "PRECONDITION_FAILED - Topic binding key '#.a.#.b.#' uses 3 '#' wildcards,"
        " at most 2 are allowed",
    )
