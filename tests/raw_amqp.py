"""An AMQP peer on a bare socket, for tests that no well-behaved client can make.

It sends and receives single frames and shows exactly what the broker answers. Methods and frames
are pika's generated classes; bytes that break the rules are sent with `send_bytes`.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Self
from urllib.parse import urlsplit

import pika.frame  # type: ignore[import-untyped]
import pika.spec  # type: ignore[import-untyped]

from tests.patience import PATIENCE_S

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
FRAME_END = b"\xce"
METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
CAPABILITIES = {
    "authentication_failure_close": True,
    "basic.nack": True,
    "connection.blocked": True,
    "consumer_cancel_notify": True,
    "exchange_exchange_bindings": True,
    "publisher_confirms": True,
}


def frame(kind: int, channel: int, payload: bytes, *, end: bytes = FRAME_END) -> bytes:
    """The bytes of one frame."""
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


def content_header(channel: int, body_size: int, properties: bytes = b"\x00\x00") -> bytes:
    """A content header frame of class basic. Args: `properties`: flags and values as sent."""
    return frame(HEADER, channel, struct.pack(">HHQ", 60, 0, body_size) + properties)


def method_bytes(channel: int, method: Any) -> bytes:
    """One method frame."""
    return bytes(pika.frame.Method(channel, method).marshal())


class Closed(Exception):
    """The broker closed the socket."""


class RawPeer:
    """One socket to a broker. Every wait ends after `timeout_s`."""

    def __init__(self, uri: str, *, timeout_s: float = PATIENCE_S) -> None:
        parts = urlsplit(uri)
        self.timeout_s = timeout_s
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, channel: int, method: Any) -> None:
        self.send_bytes(method_bytes(channel, method))

    def receive_bytes(self) -> bytes:
        """Whatever comes next. Raises Closed when the socket is at its end."""
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            raise Closed
        return data

    def frame(self, *, heartbeats: bool = False) -> Any:
        """The next frame (heartbeats only when asked for). Raises Closed, TimeoutError."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            size, value = pika.frame.decode_frame(self._received)
            if value is not None:
                self._received = self._received[size:]
                if heartbeats or not isinstance(value, pika.frame.Heartbeat):
                    return value
            elif time.monotonic() > deadline:
                raise TimeoutError("only heartbeats came")
            else:
                self._received += self.receive_bytes()

    def method(self) -> tuple[int, Any]:
        """The next frame, which must be a method: its channel and the method."""
        value = self.frame()
        assert isinstance(value, pika.frame.Method), f"expected a method, got {value!r}"
        return value.channel_number, value.method

    def expect(self, kind: type, *, channel: int | None = None) -> Any:
        """The next method, which must be of the type (and on the channel) given."""
        number, method = self.method()
        assert isinstance(method, kind), f"expected {kind.__name__}, got {method!r}"
        assert channel is None or number == channel
        return method

    def call(self, channel: int, method: Any, reply: type) -> Any:
        """Send a method and return the broker's reply to it."""
        self.send(channel, method)
        return self.expect(reply, channel=channel)

    def wait_closed(self) -> bytes:
        """Read until the broker closes the socket. Returns: what came. Raises TimeoutError."""
        deadline = time.monotonic() + self.timeout_s
        came = self._received
        self._received = b""
        while time.monotonic() < deadline:
            try:
                came += self.receive_bytes()
            except Closed:
                return came
        raise TimeoutError("the broker keeps the connection")

    def start(self) -> Any:
        """Send the protocol header. Returns: connection.start."""
        self.send_bytes(PROTOCOL_HEADER)
        return self.expect(pika.spec.Connection.Start)

    def start_ok(
        self,
        *,
        user: str = "guest",
        password: str = "guest",
        mechanism: str = "PLAIN",
        capabilities: dict[str, bool] | None = None,
    ) -> None:
        self.send(
            0,
            pika.spec.Connection.StartOk(
                client_properties={
                    "capabilities": CAPABILITIES if capabilities is None else capabilities
                },
                mechanism=mechanism,
                response=f"\0{user}\0{password}",
                locale="en_US",
            ),
        )

    def handshake(
        self,
        *,
        vhost: str = "/",
        channel_max: int = 100,
        frame_max: int = 131072,
        heartbeat: int = 0,
    ) -> Self:
        """Go through to connection.open-ok with guest's credentials."""
        self.start()
        self.start_ok()
        self.expect(pika.spec.Connection.Tune)
        self.send(
            0,
            pika.spec.Connection.TuneOk(
                channel_max=channel_max, frame_max=frame_max, heartbeat=heartbeat
            ),
        )
        self.call(0, pika.spec.Connection.Open(virtual_host=vhost), pika.spec.Connection.OpenOk)
        return self

    def open_channel(self, channel: int = 1) -> Self:
        self.call(channel, pika.spec.Channel.Open(), pika.spec.Channel.OpenOk)
        return self

    def publish(
        self,
        channel: int,
        body: bytes,
        *,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        properties: bytes = b"\x00\x00",
    ) -> None:
        """Send basic.publish with its content in one body frame (none when the body is empty)."""
        method = pika.spec.Basic.Publish(
            exchange=exchange, routing_key=routing_key, mandatory=mandatory, immediate=immediate
        )
        data = method_bytes(channel, method) + content_header(channel, len(body), properties)
        if body:
            data += frame(BODY, channel, body)
        self.send_bytes(data)

    def content(self) -> tuple[bytes, bytes]:
        """The content that follows a method. Returns: property bytes as they came, and the body."""
        while len(self._received) < 7:
            self._received += self.receive_bytes()
        kind, _, size = struct.unpack(">BHI", self._received[:7])
        assert kind == HEADER, f"expected a content header, got frame type {kind}"
        while len(self._received) < size + 8:
            self._received += self.receive_bytes()
        payload = self._received[7 : 7 + size]
        self._received = self._received[size + 8 :]
        (left,) = struct.unpack(">Q", payload[4:12])
        body = b""
        while len(body) < left:
            part = self.frame()
            assert isinstance(part, pika.frame.Body)
            body += part.fragment
        return payload[12:], body


def assert_channel_error(peer: RawPeer, code: int, text: str, method: type | None = None) -> None:
    """The next answer closes channel 1 with code and text; channel and connection stay usable."""
    closed = peer.expect(pika.spec.Channel.Close, channel=1)
    assert (closed.reply_code, closed.reply_text) == (code, text), closed
    if method is not None:
        assert (closed.class_id << 16 | closed.method_id) == method.INDEX  # type: ignore[attr-defined]
    peer.send(1, pika.spec.Channel.CloseOk())
    peer.open_channel(1)


def assert_connection_error(
    peer: RawPeer, code: int, text: str, method: type | None = None
) -> None:
    """The next answer closes the connection with code and text, and the socket after close-ok."""
    closed = peer.expect(pika.spec.Connection.Close, channel=0)
    assert (closed.reply_code, closed.reply_text) == (code, text), closed
    if method is not None:
        assert (closed.class_id << 16 | closed.method_id) == method.INDEX  # type: ignore[attr-defined]
    peer.send(0, pika.spec.Connection.CloseOk())
    assert peer.wait_closed() == b""
