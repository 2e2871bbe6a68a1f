"""An AMQP client as cheap as Python allows: what is measured shares its processors."""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import Self

TIMEOUT_S = 120.0
PROBE_PAUSE_S = 0.002
PROBE_QUEUE = "probe"
BODY = b"0123456789abcdef"
EXCLUSIVE = 4
DURABLE = 2


def _short(text: str) -> bytes:
    data = text.encode()
    return bytes((len(data),)) + data


def _type_argument(kind: str) -> bytes:
    pair = _short("x-queue-type") + b"S" + struct.pack(">I", len(kind)) + kind.encode()
    return struct.pack(">I", len(pair)) + pair


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def _method(class_id: int, method: int, body: bytes) -> bytes:
    return _frame(1, 1, struct.pack(">HH", class_id, method) + body)


def _publish(exchange: str, key: str) -> bytes:
    method = _method(60, 40, b"\0\0" + _short(exchange) + _short(key) + b"\0")
    return method + _frame(2, 1, struct.pack(">HHQH", 60, 0, len(BODY), 0)) + _frame(3, 1, BODY)


class Client:
    """One connection with one channel; every method waits for its answer."""

    def __init__(self, port: int, *, confirms: bool = True) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        try:
            self._open(confirms)
        except BaseException:
            self._socket.close()
            raise

    def _open(self, confirms: bool) -> None:
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._expect(10, 10)
        plain = b"\0guest\0guest"
        body = struct.pack(">I", 0) + _short("PLAIN") + struct.pack(">I", len(plain)) + plain
        self._send(0, 10, 11, body + _short("en_US"))
        channels, frame, _ = struct.unpack(">HIH", self._expect(10, 30)[:8])
        self._send(0, 10, 31, struct.pack(">HIH", channels, frame, 0))
        self._send(0, 10, 40, _short("/") + _short("") + b"\0")
        self._expect(10, 41)
        self._send(1, 20, 10, _short(""))
        self._expect(20, 11)
        if confirms:
            self._send(1, 85, 10, b"\0")
            self._expect(85, 11)

    def _send(self, channel: int, class_id: int, method: int, body: bytes) -> None:
        self._socket.sendall(_frame(1, channel, struct.pack(">HH", class_id, method) + body))

    def _expect(self, class_id: int, method: int, other: int = 0) -> bytes:
        """Returns the arguments of the next method, which is the one of two that is expected; of
        the other one, nothing."""
        while True:
            while len(self._buffer) < 7:
                self._receive()
            kind, _, size = struct.unpack(">BHI", self._buffer[:7])
            while len(self._buffer) < size + 8:
                self._receive()
            payload, self._buffer = self._buffer[7 : 7 + size], self._buffer[size + 8 :]
            if kind != 1:
                continue
            if payload[:4] == struct.pack(">HH", class_id, other):
                return b""
            if payload[:4] != struct.pack(">HH", class_id, method):
                raise ConnectionError(f"answer {payload[:120]!r}")
            return payload[4:]

    def _receive(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError("closed")
        self._buffer += data

    def declare(self, name: str, *, kind: str = "quorum", flags: int = DURABLE) -> str:
        """Declares a queue and returns its name."""
        self._send(1, 50, 10, b"\0\0" + _short(name) + bytes((flags,)) + _type_argument(kind))
        answer = self._expect(50, 11)
        return answer[1 : 1 + answer[0]].decode()

    def bind(self, name: str, exchange: str) -> None:
        """Binds a queue by its name."""
        body = b"\0\0" + _short(name) + _short(exchange) + _short(name) + b"\0" + bytes(4)
        self._send(1, 50, 20, body)
        self._expect(50, 21)

    def publish(self, name: str, exchange: str = "") -> None:
        """Publishes a message of 16 bytes and waits for its confirm."""
        self._socket.sendall(_publish(exchange, name))
        self._expect(60, 80)

    def send(self, name: str, exchange: str = "") -> None:
        """Publishes on a channel without confirms."""
        self._socket.sendall(_publish(exchange, name))

    def consume_one(self, name: str) -> None:
        """Consumes, waits for a message, and cancels."""
        tag = _short("c")
        self._send(1, 60, 20, b"\0\0" + _short(name) + tag + b"\x02" + bytes(4))
        self._expect(60, 21)
        self._expect(60, 60)
        self._send(1, 60, 30, tag + b"\0")
        self._expect(60, 31)

    def peek(self, name: str) -> bool:
        """Gets the message at the head and gives it back; False = there was none."""
        self._send(1, 60, 70, b"\0\0" + _short(name) + b"\0")
        answer = self._expect(60, 71, 72)
        if answer:
            self._send(1, 60, 120, answer[:8] + b"\x02")
        return bool(answer)

    def delete(self, name: str) -> None:
        """Deletes a queue."""
        self._send(1, 50, 40, b"\0\0" + _short(name) + b"\0")
        self._expect(50, 41)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Probe:
    """Publishes confirmed messages, one after the other, in a thread of its own."""

    def __init__(self, port: int, queue: str = PROBE_QUEUE) -> None:
        self.waits: list[float] = []
        self.failure: Exception | None = None
        self.queue = queue
        self._client = Client(port)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop:
                began = time.monotonic()
                self._client.publish(self.queue)
                self.waits.append(time.monotonic() - began)
                time.sleep(PROBE_PAUSE_S)
        except (OSError, ConnectionError) as error:
            self.failure = error

    def stop(self) -> float:
        """Returns the longest wait, ms."""
        self._stop = True
        self._thread.join(TIMEOUT_S)
        self._client.close()
        if self.failure is not None:
            raise self.failure
        return max(self.waits, default=0.0) * 1000
