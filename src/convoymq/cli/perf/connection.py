"""A small blocking AMQP 0-9-1 client: handshake, declares and consumes for the load tool.

Once the channel is set up, the socket goes non-blocking and the compiled `perfclient` takes over.
"""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from convoymq.edges.amqp091 import _spec, codec
from convoymq.edges.amqp091._spec import Method
from convoymq.model.errors import PeerError
from convoymq.model.tables import Table

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 30.0
FRAME_BYTES_MAX = 131_072

M = TypeVar("M", bound=Method)


class BrokerSaid(Exception):
    """The broker closed the channel or connection; the text is what it gave as the reason."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a broker, and the user who logs in."""

    host: str
    port: int
    user: str = "guest"
    password: str = "guest"
    vhost: str = "/"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `amqp://user:password@host:port/vhost` or `host:port`.

        Raises:
            ValueError: the text is neither.
        """
        parts = urllib.parse.urlsplit(text if "://" in text else f"amqp://{text}")
        if parts.scheme != "amqp" or not parts.hostname:
            raise ValueError(f"not an AMQP address: {text}")
        path = urllib.parse.unquote(parts.path[1:])
        return cls(
            host=parts.hostname,
            port=parts.port or 5672,
            user=urllib.parse.unquote(parts.username or "guest"),
            password=urllib.parse.unquote(parts.password or "guest"),
            vhost=path or "/",
        )


def opened(address: Address) -> socket.socket:
    """Returns a connected socket. Raises OSError, whose text begins with the address."""
    try:
        made = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
    except OSError as error:
        place = f"{address.host}:{address.port}"
        raise OSError(f"{place}: {error.strerror or error}") from None
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


class Connection:
    """One connection with channel 1 open; every call waits for its reply.

    Raises (everywhere):
        OSError: the socket broke or a reply took too long.
        BrokerSaid: the broker closed the channel or the connection.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        place = f"{address.host}:{address.port}"
        self.socket = opened(address)
        try:
            self._input = b""
            try:
                self._greet()
            except (OSError, PeerError):
                raise OSError(
                    f"{place}: no answer of an AMQP broker; is that the port of "
                    "`listeners.tcp.default`, 5672 without it?"
                ) from None
            self._log_in()
        except BaseException:
            self.socket.close()
            raise

    def _greet(self) -> None:
        self.socket.sendall(b"AMQP\x00\x00\x09\x01")
        self.socket.settimeout(CONNECT_TIMEOUT_S)
        self._expect(0, _spec.ConnectionStart)

    def _log_in(self) -> None:
        self.socket.settimeout(REPLY_TIMEOUT_S)
        capabilities = {
            "publisher_confirms": True,
            "consumer_cancel_notify": True,
            "basic.nack": True,
            "connection.blocked": True,
            "authentication_failure_close": True,
        }
        properties = Table.of({"product": "convoy perf", "capabilities": capabilities})
        response = f"\0{self.address.user}\0{self.address.password}".encode()
        self.send(
            0,
            _spec.ConnectionStartOk(
                client_properties=properties, mechanism="PLAIN", response=response, locale="en_US"
            ),
        )
        tune = self._expect(0, _spec.ConnectionTune)
        self.frame_bytes_max = min(tune.frame_max or FRAME_BYTES_MAX, FRAME_BYTES_MAX)
        self.send(
            0,
            _spec.ConnectionTuneOk(
                channel_max=tune.channel_max, frame_max=self.frame_bytes_max, heartbeat=0
            ),
        )
        self.send(0, _spec.ConnectionOpen(virtual_host=self.address.vhost))
        self._expect(0, _spec.ConnectionOpenOk)
        self.open_channel()

    def open_channel(self) -> None:
        """Opens channel 1."""
        self.call(_spec.ChannelOpen(), _spec.ChannelOpenOk)

    def send(self, channel: int, method: Method) -> None:
        """Sends one method."""
        self.socket.sendall(codec.method_frame(channel, method))

    def call(self, method: Method, reply: type[M]) -> M:
        """Sends a method on channel 1 and returns its reply."""
        self.send(1, method)
        return self._expect(1, reply)

    def _expect(self, channel: int, wanted: type[M]) -> M:
        while True:
            frame = codec.decode_frame(self._input, 0, payload_bytes_max=1 << 20)
            if frame is None:
                data = self.socket.recv(65536)
                if not data:
                    raise ConnectionResetError("the broker closed the connection")
                self._input += data
                continue
            self._input = self._input[len(frame.payload) + 8 :]
            if frame.type != _spec.FRAME_METHOD:
                continue
            method = codec.decode_method(frame.payload)
            if isinstance(method, wanted):
                return method
            if isinstance(method, _spec.ConnectionClose):
                self.send(0, _spec.ConnectionCloseOk())
                raise BrokerSaid(method.reply_text)
            if isinstance(method, _spec.ChannelClose):
                self.send(1, _spec.ChannelCloseOk())
                raise BrokerSaid(method.reply_text)

    def delete_queue(self, name: str) -> None:
        """Deletes a queue, if it is there."""
        try:
            self.call(_spec.QueueDelete(queue=name), _spec.QueueDeleteOk)
        except BrokerSaid:
            self.open_channel()

    def declare_queue(self, name: str, arguments: Mapping[str, object]) -> None:
        """Declares a durable queue."""
        self.call(
            _spec.QueueDeclare(queue=name, durable=True, arguments=Table.of(arguments)),
            _spec.QueueDeclareOk,
        )

    def confirm(self) -> None:
        """Turns publisher confirms on."""
        self.call(_spec.ConfirmSelect(), _spec.ConfirmSelectOk)

    def consume(
        self,
        queue: str,
        prefetch: int,
        *,
        no_ack: bool,
        arguments: Mapping[str, bool | int | str],
    ) -> bytes:
        """Starts a consumer; returns bytes that came behind the reply."""
        if prefetch:
            self.call(_spec.BasicQos(prefetch_count=prefetch), _spec.BasicQosOk)
        consume = _spec.BasicConsume(
            queue=queue, no_ack=no_ack, arguments=Table.of(dict(arguments))
        )
        self.call(consume, _spec.BasicConsumeOk)
        behind, self._input = self._input, b""
        return behind

    def close(self) -> None:
        """Closes politely, without waiting long."""
        try:
            self.socket.settimeout(1.0)
            self.send(0, _spec.ConnectionClose(reply_code=200, reply_text="bye"))
            self._expect(0, _spec.ConnectionCloseOk)
        except (OSError, BrokerSaid, PeerError):
            # Deliveries that nobody reads any more may begin within a frame.
            pass
        finally:
            self.socket.close()


def publish_template(
    exchange: str,
    routing_key: str,
    size: int,
    properties: _spec.Properties,
    *,
    frame_bytes_max: int,
) -> bytes:
    """Returns the frames of one publish, body all zero."""
    return codec.content_frames(
        1,
        _spec.BasicPublish(exchange=exchange, routing_key=routing_key),
        properties,
        bytes(size),
        frame_bytes_max=frame_bytes_max,
    )


NUMBER = b"#" * 8
"""In a routing key, message id or header: stands for the number of the message."""


def number_position(template: bytes) -> int:
    """Offset of `NUMBER` in the template; -1 when it is not there."""
    return template.find(NUMBER)


def stamp_position(template: bytes, size: int) -> int:
    """Offset of the body's first byte in the template; -1 when it is too small for a stamp."""
    if size < 16:
        return -1
    at = 0
    while True:
        frame = codec.decode_frame(template, at, payload_bytes_max=1 << 30)
        assert frame is not None
        if frame.type == _spec.FRAME_BODY:
            return at + 7
        at += len(frame.payload) + 8
