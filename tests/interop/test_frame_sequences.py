"""Sequences of frames at the edges of the protocol, each as RabbitMQ answers it."""

from __future__ import annotations

import time
from itertools import pairwise

import pika.frame  # type: ignore[import-untyped]
import pytest
from pika import spec

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.raw_amqp import HEARTBEAT, METHOD, RawPeer, frame, method_bytes

HEARTBEAT_FRAME = frame(HEARTBEAT, 0, b"")
NO_SUCH_QUEUE = spec.Queue.Declare(queue="interop-no-such-queue", passive=True)
CHANNEL_CLOSE = spec.Channel.Close(reply_code=200, reply_text="bye", class_id=0, method_id=0)
CONNECTION_CLOSE = spec.Connection.Close(reply_code=200, reply_text="bye", class_id=0, method_id=0)
UNEXPECTED = "CHANNEL_ERROR - unexpected method in connection state running"


def test_heartbeats_go_out_every_half_interval(peer: RawPeer) -> None:
    peer.handshake(heartbeat=2)
    came = []
    for _ in range(6):
        assert isinstance(peer.frame(heartbeats=True), pika.frame.Heartbeat)
        came.append(time.monotonic())
        peer.send_bytes(HEARTBEAT_FRAME)
    # A busy machine delays some of them, but brings none early.
    assert min(after - before for before, after in pairwise(came)) < 1.8


@pytest.mark.parametrize("opened", [True, False])
def test_heartbeat_frames_belong_on_channel_0(peer: RawPeer, opened: bool) -> None:
    peer.handshake()
    if opened:
        peer.open_channel(1)
    peer.send_bytes(frame(HEARTBEAT, 1, b""))
    assert peer.expect(spec.Connection.Close).reply_code == 505


@pytest.mark.parametrize(
    "method",
    [spec.Channel.Open(), CHANNEL_CLOSE, spec.Basic.Qos(prefetch_count=1)],
    ids=["open", "close", "qos"],
)
def test_channel_methods_do_not_belong_on_channel_0(peer: RawPeer, method: object) -> None:
    peer.handshake().send(0, method)
    closed = peer.expect(spec.Connection.Close)
    assert (closed.reply_code, closed.reply_text) == (504, UNEXPECTED)


@pytest.mark.parametrize(
    "method",
    [CONNECTION_CLOSE, spec.Connection.UpdateSecret(new_secret="new", reason="why")],
    ids=["close", "update-secret"],
)
def test_connection_methods_belong_on_channel_0(raw_channel: RawPeer, method: object) -> None:
    raw_channel.send(1, method)
    closed = raw_channel.expect(spec.Connection.Close)
    assert (closed.reply_code, closed.reply_text) == (503, "COMMAND_INVALID - unimplemented method")


def test_close_ok_that_nobody_asked_for(raw_channel: RawPeer) -> None:
    raw_channel.send(1, spec.Channel.CloseOk())
    assert raw_channel.expect(spec.Connection.Close).reply_code == 503


def test_the_count_of_channels_is_limited_and_not_their_numbers(peer: RawPeer) -> None:
    peer.handshake(channel_max=2).open_channel(9).open_channel(2047)
    peer.send(1, spec.Channel.Open())
    closed = peer.expect(spec.Connection.Close)
    assert (closed.reply_code, closed.reply_text) == (
        530,
        "NOT_ALLOWED - number of channels opened (2) has reached the negotiated channel_max (2)",
    )


def test_a_closed_channel_makes_room_for_another(peer: RawPeer) -> None:
    peer.handshake(channel_max=1).open_channel(5)
    peer.call(5, CHANNEL_CLOSE, spec.Channel.CloseOk)
    peer.open_channel(6)


def test_channel_closes_that_cross(raw_channel: RawPeer) -> None:
    raw_channel.send_bytes(method_bytes(1, NO_SUCH_QUEUE) + method_bytes(1, CHANNEL_CLOSE))
    assert raw_channel.expect(spec.Channel.Close, channel=1).reply_code == 404
    raw_channel.expect(spec.Channel.CloseOk, channel=1)
    raw_channel.send(1, spec.Channel.CloseOk())
    raw_channel.open_channel(1)


def test_a_channel_that_closes_is_not_opened_again(raw_channel: RawPeer) -> None:
    raw_channel.send(1, NO_SUCH_QUEUE)
    raw_channel.expect(spec.Channel.Close, channel=1)
    raw_channel.send(1, spec.Channel.Open())
    closed = raw_channel.expect(spec.Connection.Close)
    assert (closed.reply_code, closed.reply_text) == (
        504,
        "CHANNEL_ERROR - second 'channel.open' seen",
    )


def test_a_closed_connection_is_read_until_the_client_closes_it(raw_channel: RawPeer) -> None:
    raw_channel.call(0, CONNECTION_CLOSE, spec.Connection.CloseOk)
    # A socket closed at the other end answers the first of these with a reset, so a later one
    # fails here.
    for _ in range(50):
        raw_channel.send(1, spec.Basic.Qos(prefetch_count=1))
        time.sleep(0.01)
    raw_channel.call(0, CONNECTION_CLOSE, spec.Connection.CloseOk)


def test_any_secret_will_do_without_a_back_end_that_expires(raw_channel: RawPeer) -> None:
    secret = spec.Connection.UpdateSecret(new_secret="not the password", reason="rotation")
    for _ in range(2):
        raw_channel.call(0, secret, spec.Connection.UpdateSecretOk)
    raw_channel.call(1, spec.Basic.Qos(prefetch_count=1), spec.Basic.QosOk)


def test_the_default_exchange_is_not_declared_even_passively(raw_channel: RawPeer) -> None:
    raw_channel.send(1, spec.Exchange.Declare(exchange="", passive=True))
    closed = raw_channel.expect(spec.Channel.Close)
    assert (closed.reply_code, closed.reply_text) == (
        403,
        "ACCESS_REFUSED - operation not permitted on the default exchange",
    )


@pytest.mark.parametrize("kind", ["classic", "quorum", "stream"])
def test_delete_ok_comes_before_the_cancel(raw_channel: RawPeer, names: Names, kind: str) -> None:
    queue = names.queue()
    declare = spec.Queue.Declare(queue=queue, durable=True, arguments={"x-queue-type": kind})
    raw_channel.call(1, declare, spec.Queue.DeclareOk)
    raw_channel.call(1, spec.Basic.Qos(prefetch_count=10), spec.Basic.QosOk)
    consume = spec.Basic.Consume(queue=queue, consumer_tag="tag")
    raw_channel.call(1, consume, spec.Basic.ConsumeOk)
    raw_channel.call(1, spec.Queue.Delete(queue=queue), spec.Queue.DeleteOk)
    assert raw_channel.expect(spec.Basic.Cancel).consumer_tag == "tag"


@pytest.mark.rabbitmq_since("4.1")
@pytest.mark.parametrize("size", [8192, 8193])
def test_frames_of_8192_bytes_are_taken_before_tuning(cluster: Cluster, size: int) -> None:
    with RawPeer(cluster.uris[0]) as peer:
        peer.start()
        client_properties = {"capabilities": {"authentication_failure_close": True}, "padding": ""}
        empty = _start_ok(client_properties)
        client_properties["padding"] = "x" * (size - len(empty) + 8)
        peer.send_bytes(_start_ok(client_properties))
        if size > 8192:
            assert spec.Connection.Tune not in [type(method) for method in _methods(peer)]
        else:
            peer.expect(spec.Connection.Tune)


def _start_ok(properties: dict[str, object]) -> bytes:
    response = spec.Connection.StartOk(
        client_properties=properties, mechanism="PLAIN", response="\0guest\0guest", locale="en_US"
    )
    data = method_bytes(0, response)
    assert data[0] == METHOD
    return data


def _methods(peer: RawPeer) -> list[object]:
    """What comes until the broker closes the socket."""
    came = peer.wait_closed()
    found: list[object] = []
    while came:
        size, value = pika.frame.decode_frame(came)
        assert value is not None
        found.append(value.method)
        came = came[size:]
    return found
