"""Bytes that break the rules: only the connection that sent them suffers, and it learns why."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pika.frame  # type: ignore[import-untyped]
import pytest
from pika import spec

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.raw_amqp import (
    BODY,
    METHOD,
    PROTOCOL_HEADER,
    RawPeer,
    content_header,
    frame,
    method_bytes,
)

QUEUE_DECLARE = struct.pack(">HH", 50, 10)


@pytest.fixture(autouse=True)
def bystander(cluster: Cluster) -> Iterator[None]:
    """A well-behaved connection that must not notice anything."""
    with RawPeer(cluster.uris[0]) as quiet:
        quiet.handshake().open_channel(1)
        yield
        quiet.call(1, spec.Basic.Qos(prefetch_count=1), spec.Basic.QosOk)


def assert_closed_with(peer: RawPeer, *codes: int) -> None:
    """The next method is connection.close with one of the codes, then the socket ends."""
    closed = peer.expect(spec.Connection.Close, channel=0)
    assert closed.reply_code in codes, closed
    peer.send(0, spec.Connection.CloseOk())
    peer.wait_closed()


@pytest.mark.parametrize(
    "header",
    [
        b"AMQP\x00\x00\x09\x02",
        b"AMQP\x09\x09\x09\x09",
        b"AMQP\x03\x01\x00\x01",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["version", "nonsense", "amqp-1.0.1", "http", "tls"],
)
def test_wrong_protocol_header_is_answered_with_ours(peer: RawPeer, header: bytes) -> None:
    peer.send_bytes(header)
    assert peer.wait_closed() == PROTOCOL_HEADER


@pytest.mark.parametrize("end", [b"\x00", b"\xcd", b"\xff"])
def test_bad_end_octet(raw_channel: RawPeer, end: bytes) -> None:
    good = method_bytes(1, spec.Basic.Qos(prefetch_count=1))
    raw_channel.send_bytes(good[:-1] + end)
    assert_closed_with(raw_channel, 501)


@pytest.mark.parametrize("kind", [0, 4, 5, 7, 9, 255])
def test_unknown_frame_type(raw_channel: RawPeer, kind: int) -> None:
    raw_channel.send_bytes(frame(kind, 1, b"payload"))
    assert_closed_with(raw_channel, 501)


def test_frame_above_the_negotiated_size(peer: RawPeer) -> None:
    peer.handshake(frame_max=8192).open_channel(1)
    peer.send_bytes(struct.pack(">BHI", METHOD, 1, 8193) + b"\0" * 64)
    assert_closed_with(peer, 501)


def test_frame_that_claims_four_gigabytes(raw_channel: RawPeer) -> None:
    raw_channel.send_bytes(struct.pack(">BHI", BODY, 1, 0xFFFFFFFF) + b"\0" * 64)
    assert_closed_with(raw_channel, 501)


def test_frame_of_exactly_the_negotiated_size_is_taken(peer: RawPeer, names: Names) -> None:
    queue = names.queue()
    peer.handshake(frame_max=8192).open_channel(1)
    peer.call(1, spec.Queue.Declare(queue=queue, exclusive=True), spec.Queue.DeclareOk)
    body = bytes(8192 - 8)
    peer.publish(1, body, routing_key=queue)
    peer.call(1, spec.Basic.Get(queue=queue, no_ack=True), spec.Basic.GetOk)
    assert peer.content()[1] == body


@pytest.mark.parametrize(
    "data",
    [
        frame(BODY, 1, b"body without header"),
        content_header(1, 4),
        method_bytes(1, spec.Basic.Publish(routing_key="k"))
        + method_bytes(1, spec.Basic.Qos(prefetch_count=1)),
        method_bytes(1, spec.Basic.Publish(routing_key="k")) + frame(BODY, 1, b"body"),
        method_bytes(1, spec.Basic.Publish(routing_key="k"))
        + content_header(1, 4)
        + content_header(1, 4),
        method_bytes(1, spec.Basic.Publish(routing_key="k"))
        + content_header(1, 4)
        + method_bytes(1, spec.Basic.Qos(prefetch_count=1)),
    ],
    ids=[
        "body first",
        "header first",
        "method for header",
        "body for header",
        "header for body",
        "method for body",
    ],
)
def test_content_out_of_order(raw_channel: RawPeer, data: bytes) -> None:
    raw_channel.send_bytes(data)
    assert_closed_with(raw_channel, 505)


def test_body_longer_than_its_header_says(raw_channel: RawPeer) -> None:
    raw_channel.send_bytes(
        method_bytes(1, spec.Basic.Publish(routing_key="k"))
        + content_header(1, 4)
        + frame(BODY, 1, b"more than four bytes")
    )
    raw_channel.send(1, spec.Basic.Qos(prefetch_count=1))
    assert_closed_with(raw_channel, 501, 502, 505)


def test_content_header_of_another_class(raw_channel: RawPeer) -> None:
    raw_channel.send_bytes(
        method_bytes(1, spec.Basic.Publish(routing_key="k"))
        + frame(2, 1, struct.pack(">HHQH", 50, 0, 0, 0))
    )
    assert_closed_with(raw_channel, 505)


UNDECODABLE = {
    "empty": b"",
    "half an id": b"\x00\x32",
    "no arguments": QUEUE_DECLARE,
    "short string too long": QUEUE_DECLARE + b"\x00\x00\x20short",
    "table too long": QUEUE_DECLARE + b"\x00\x00\x01q\x02\x00\x00\xff\xff",
    "string in table too long": QUEUE_DECLARE
    + b"\x00\x00\x01q\x02\x00\x00\x00\x07\x02kS\x00\xff\xff\xff",
    "unknown table type": QUEUE_DECLARE + b"\x00\x00\x01q\x02\x00\x00\x00\x03\x01k?",
}
UNEXPLAINED = {"string in table too long", "unknown table type"}
"""RabbitMQ 3 drops the socket without a word in these cases."""


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(
            payload,
            id=name,
            marks=[pytest.mark.rabbitmq_since("4.3")] if name in UNEXPLAINED else [],
        )
        for name, payload in UNDECODABLE.items()
    ],
)
def test_method_that_cannot_be_decoded(raw_channel: RawPeer, payload: bytes) -> None:
    raw_channel.send_bytes(frame(METHOD, 1, payload))
    assert_closed_with(raw_channel, 501, 502, 503, 541)


@pytest.mark.rabbitmq_since("4.3")
@pytest.mark.parametrize(("class_id", "method_id"), [(60, 77), (99, 10), (0xFFFF, 0xFFFF)])
def test_unknown_method(raw_channel: RawPeer, class_id: int, method_id: int) -> None:
    raw_channel.send_bytes(frame(METHOD, 1, struct.pack(">HH", class_id, method_id)))
    assert_closed_with(raw_channel, 501, 503)


def test_method_before_channel_open(peer: RawPeer) -> None:
    peer.handshake()
    peer.publish(7, b"early", routing_key="k")
    closed = peer.expect(spec.Connection.Close, channel=0)
    assert (closed.reply_code, closed.reply_text) == (
        504,
        "CHANNEL_ERROR - expected 'channel.open'",
    )


def test_handshake_out_of_order_ends_the_connection(cluster: Cluster) -> None:
    """The node waits for the answers to its connection.close: all connections wait at a time."""
    with ExitStack() as stack:
        peers = []
        for data in (
            method_bytes(0, spec.Connection.Open(virtual_host="/")),
            method_bytes(1, spec.Channel.Open()),
            frame(METHOD, 0, b"\x00"),
            b"\x00" * 64,
        ):
            peers.append(stack.enter_context(RawPeer(cluster.uris[0])))
            peers[-1].start()
            peers[-1].send_bytes(data)
        for peer in peers:
            peer.wait_closed()


def test_method_cut_off_by_the_end_of_the_socket(raw_channel: RawPeer) -> None:
    data = method_bytes(1, spec.Basic.Qos(prefetch_count=1))
    raw_channel.send_bytes(data[:-3])
    raw_channel.socket.shutdown(socket.SHUT_WR)
    raw_channel.wait_closed()


def test_frames_that_arrive_byte_by_byte(raw_channel: RawPeer, names: Names) -> None:
    queue = names.queue()
    declare = spec.Queue.Declare(queue=queue, exclusive=True)
    for octet in method_bytes(1, declare):
        raw_channel.send_bytes(bytes([octet]))
    raw_channel.expect(spec.Queue.DeclareOk)
    data = (
        method_bytes(1, spec.Basic.Publish(routing_key=queue))
        + content_header(1, 6)
        + frame(BODY, 1, b"one")
        + frame(BODY, 1, b"two")
    )
    for octet in data:
        raw_channel.send_bytes(bytes([octet]))
    raw_channel.call(1, spec.Basic.Get(queue=queue, no_ack=True), spec.Basic.GetOk)
    assert raw_channel.content()[1] == b"onetwo"


def test_silent_connection_is_dropped_after_ten_seconds(cluster: Cluster) -> None:
    began = time.monotonic()
    with RawPeer(cluster.uris[0], timeout_s=30) as peer, RawPeer(cluster.uris[0]) as started:
        started.start()
        assert peer.wait_closed() == b""
        started.wait_closed()
    assert time.monotonic() - began >= 9


def test_heartbeats_come_and_silence_is_noticed(peer: RawPeer) -> None:
    peer.handshake(heartbeat=1)
    assert isinstance(peer.frame(heartbeats=True), pika.frame.Heartbeat)
    came = peer.wait_closed()
    assert set(came) <= set(frame(8, 0, b"")), "only heartbeats, no connection.close"


def test_heartbeat_frame_keeps_the_connection(peer: RawPeer) -> None:
    peer.handshake(heartbeat=1).open_channel(1)
    for _ in range(8):
        peer.frame(heartbeats=True)
        peer.send_bytes(frame(8, 0, b""))
    peer.call(1, spec.Basic.Qos(prefetch_count=1), spec.Basic.QosOk)


def test_close_is_answered_and_nothing_follows(raw_channel: RawPeer) -> None:
    raw_channel.call(
        0,
        spec.Connection.Close(reply_code=200, reply_text="bye", class_id=0, method_id=0),
        spec.Connection.CloseOk,
    )
    raw_channel.socket.shutdown(socket.SHUT_WR)
    assert raw_channel.wait_closed() == b""
