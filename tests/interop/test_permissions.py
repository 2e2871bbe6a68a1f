"""What a user may not do: configure, write and read are refused one by one, with 403."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pika import spec  # type: ignore[import-untyped]

from tests.clusters import Cluster, version_tuple
from tests.interop.helpers import set_policy
from tests.interop.test_error_codes import QUORUM
from tests.raw_amqp import RawPeer, assert_channel_error

USER = "interop-limited"
MINE = "interop-mine"
FOREIGN = "interop-foreign"
NEW = "interop-mine-new"
LINKED = "interop-mine-linked"


@pytest.fixture(scope="module")
def limited(cluster: Cluster) -> Iterator[str]:
    """A user who may do everything to names that begin with `interop-mine`, and nothing else."""
    pattern = f"^{MINE}"
    cluster.add_user(USER, configure=pattern, write=pattern, read=pattern)
    with RawPeer(cluster.uris[0]) as guest:
        guest.handshake().open_channel(1)
        for queue in (MINE, FOREIGN):
            declare = spec.Queue.Declare(queue=queue, durable=True, arguments=QUORUM)
            guest.call(1, declare, spec.Queue.DeclareOk)
        yield USER
        for queue in (MINE, FOREIGN):
            guest.call(1, spec.Queue.Delete(queue=queue), spec.Queue.DeleteOk)
    cluster.delete_user(USER)


@pytest.fixture
def limited_channel(peer: RawPeer, limited: str) -> RawPeer:
    """Channel 1 of a connection of the limited user."""
    peer.start()
    peer.start_ok(user=limited, password=limited)
    peer.expect(spec.Connection.Tune)
    peer.send(0, spec.Connection.TuneOk(channel_max=10, frame_max=131072, heartbeat=0))
    peer.call(0, spec.Connection.Open(virtual_host="/"), spec.Connection.OpenOk)
    return peer.open_channel(1)


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "declare a queue": (
        lambda: spec.Queue.Declare(queue="interop-other", durable=True),
        "configure",
        "queue 'interop-other'",
    ),
    "delete a queue": (
        lambda: spec.Queue.Delete(queue=FOREIGN),
        "configure",
        f"queue '{FOREIGN}'",
    ),
    "declare an exchange": (
        lambda: spec.Exchange.Declare(exchange="interop-other"),
        "configure",
        "exchange 'interop-other'",
    ),
    "delete an exchange": (
        lambda: spec.Exchange.Delete(exchange="interop-other"),
        "configure",
        "exchange 'interop-other'",
    ),
    "consume": (lambda: spec.Basic.Consume(queue=FOREIGN), "read", f"queue '{FOREIGN}'"),
    "get": (lambda: spec.Basic.Get(queue=FOREIGN), "read", f"queue '{FOREIGN}'"),
    "purge": (lambda: spec.Queue.Purge(queue=FOREIGN), "read", f"queue '{FOREIGN}'"),
    "declare a queue whose dead letters go to a foreign exchange": (
        lambda: spec.Queue.Declare(
            queue=NEW, durable=True, arguments=QUORUM | {"x-dead-letter-exchange": "amq.fanout"}
        ),
        "write",
        "exchange 'amq.fanout'",
    ),
    "declare a queue whose dead letters go to any queue": (
        lambda: spec.Queue.Declare(
            queue=NEW, durable=True, arguments=QUORUM | {"x-dead-letter-exchange": ""}
        ),
        "write",
        "exchange 'amq.default'",
    ),
    "declare an exchange with a foreign one behind it": (
        lambda: spec.Exchange.Declare(exchange=NEW, arguments={"alternate-exchange": "amq.fanout"}),
        "write",
        "exchange 'amq.fanout'",
    ),
    "bind a queue": (
        lambda: spec.Queue.Bind(queue=FOREIGN, exchange="amq.direct", routing_key="k"),
        "write",
        f"queue '{FOREIGN}'",
    ),
    "bind to an exchange": (
        lambda: spec.Queue.Bind(queue=MINE, exchange="amq.direct", routing_key="k"),
        "read",
        "exchange 'amq.direct'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_method_is_refused(limited_channel: RawPeer, cluster: Cluster, case: str) -> None:
    make, right, subject = REFUSED[case]
    method = make()
    limited_channel.send(1, method)
    assert_channel_error(limited_channel, 403, refusal(cluster, right, subject), type(method))


def test_declaring_a_generated_name_is_refused(limited_channel: RawPeer) -> None:
    limited_channel.send(1, spec.Queue.Declare(queue="", exclusive=True))
    closed = limited_channel.expect(spec.Channel.Close)
    assert closed.reply_code == 403
    assert "access to queue 'amq.gen-" in closed.reply_text


def test_publish_is_refused(limited_channel: RawPeer, cluster: Cluster) -> None:
    limited_channel.publish(1, b"x", exchange="amq.direct", routing_key="k")
    assert_channel_error(
        limited_channel,
        403,
        refusal(cluster, "write", "exchange 'amq.direct'"),
        spec.Basic.Publish,
    )


def refusal(cluster: Cluster, right: str, subject: str) -> str:
    """The text of a refusal; RabbitMQ 3.10 does not yet say which right is missing."""
    silent = cluster.system == "rabbitmq" and version_tuple(cluster.version()) < (3, 11)
    what = "access" if silent else f"{right} access"
    return f"ACCESS_REFUSED - {what} to {subject} in vhost '/' refused for user '{USER}'"


def test_own_queue_can_be_used(limited_channel: RawPeer) -> None:
    declare = spec.Queue.Declare(queue=MINE, durable=True, arguments=QUORUM)
    limited_channel.call(1, declare, spec.Queue.DeclareOk)
    limited_channel.call(1, spec.Queue.Purge(queue=MINE), spec.Queue.PurgeOk)
    limited_channel.call(1, spec.Basic.Consume(queue=MINE, no_ack=True), spec.Basic.ConsumeOk)


def test_empty_patterns_permit_nothing(peer: RawPeer, cluster: Cluster, limited: str) -> None:
    cluster.add_user("interop-nobody", configure="", write="", read="")
    try:
        peer.start()
        peer.start_ok(user="interop-nobody", password="interop-nobody")
        peer.expect(spec.Connection.Tune)
        peer.send(0, spec.Connection.TuneOk(channel_max=10, frame_max=131072, heartbeat=0))
        peer.call(0, spec.Connection.Open(virtual_host="/"), spec.Connection.OpenOk)
        peer.open_channel(1)
        peer.send(1, spec.Queue.Declare(queue=MINE, durable=True, arguments=QUORUM))
        assert peer.expect(spec.Channel.Close).reply_code == 403
    finally:
        cluster.delete_user("interop-nobody")


STRATEGIES = {
    "quorum, at most once": QUORUM,
    "quorum, at least once": QUORUM
    | {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"},
    "classic": {"x-queue-type": "classic"},
}


@pytest.mark.parametrize("by", ["argument", "policy"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_permissions_of_dead_letters_are_asked_for_when_the_queue_is_made_and_never_again(
    limited_channel: RawPeer, cluster: Cluster, strategy: str, by: str
) -> None:
    """A user who may not write to the exchange declares the queue again, publishes to it and
    rejects from it: its dead letters go on. A policy asks for no permission at all."""
    arguments = STRATEGIES[strategy]
    own = {"x-dead-letter-exchange": "amq.fanout"} if by == "argument" else {}
    declare = spec.Queue.Declare(queue=LINKED, durable=True, arguments=arguments | own)
    target = spec.Queue.Declare(queue="interop-dead", durable=True)
    with RawPeer(cluster.uris[0]) as guest:
        guest.handshake().open_channel(1)
        guest.call(1, target, spec.Queue.DeclareOk)
        bind = spec.Queue.Bind(queue="interop-dead", exchange="amq.fanout", routing_key="")
        guest.call(1, bind, spec.Queue.BindOk)
        to_mine = spec.Queue.Bind(queue=LINKED, exchange=LINKED, routing_key="")
        guest.call(1, spec.Exchange.Declare(exchange=LINKED), spec.Exchange.DeclareOk)
        guest.call(1, declare, spec.Queue.DeclareOk)
        guest.call(1, to_mine, spec.Queue.BindOk)
        if by == "policy":
            definition = {"dead-letter-exchange": "amq.fanout"}
            set_policy(
                cluster,
                f"policies/%2F/{LINKED}",
                {"pattern": f"^{LINKED}$", "definition": definition},
            )
        try:
            limited_channel.call(1, declare, spec.Queue.DeclareOk)
            limited_channel.publish(1, b"dead", exchange=LINKED)
            limited_channel.send(1, spec.Basic.Consume(queue=LINKED, consumer_tag="c"))
            limited_channel.expect(spec.Basic.ConsumeOk)
            delivered = limited_channel.expect(spec.Basic.Deliver)
            limited_channel.content()
            limited_channel.send(1, spec.Basic.Reject(delivered.delivery_tag, requeue=False))
            guest.send(1, spec.Basic.Consume(queue="interop-dead", consumer_tag="c", no_ack=True))
            guest.expect(spec.Basic.ConsumeOk)
            guest.expect(spec.Basic.Deliver)
            assert guest.content()[1] == b"dead"
            guest.call(1, spec.Basic.Cancel(consumer_tag="c"), spec.Basic.CancelOk)
        finally:
            if by == "policy":
                set_policy(cluster, f"policies/%2F/{LINKED}", None)
            for queue in (LINKED, "interop-dead"):
                guest.call(1, spec.Queue.Delete(queue=queue), spec.Queue.DeleteOk)
            guest.call(1, spec.Exchange.Delete(exchange=LINKED), spec.Exchange.DeleteOk)
