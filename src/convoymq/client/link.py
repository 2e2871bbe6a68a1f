"""One authenticated connection to one server: a blocking socket, one request at a time."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from convoymq.client import errors
from convoymq.client.config import ClientConfig, TlsConfig
from convoymq.kernels.columns import raw_bytearray
from convoymq.model.columnar import (
    ANSWER,
    FRAME_MAX_LIMIT,
    HANDSHAKE_FRAME_MAX,
    PREFACE,
    VERSION,
    ErrorCode,
    Frame,
    FrameReader,
    Op,
    ProtocolError,
    encode_frame,
    preface_version,
)

if TYPE_CHECKING:
    from ssl import SSLContext

CONNECT_TIMEOUT_S = 5.0
WAKE_BYTES = 256 << 10
"""Of a large answer the system gathers so much before it wakes the process."""


class Lost(OSError):
    """The server closed the connection."""


class Link:
    """See the module text. After any error but an answer's own it has to be closed."""

    def __init__(self, config: ClientConfig, address: tuple[str, int], deadline: float) -> None:
        """Connects and authenticates.

        Raises:
            OSError: the server is not there, or not in time.
            ClientError: it speaks another protocol, or refuses.
        """
        self.address = address
        self.frame_max = HANDSHAKE_FRAME_MAX
        self.node = ""
        self._pid = os.getpid()
        self._correlation = 0
        self._reader = FrameReader(allocate=raw_bytearray)
        self._wake_bytes = 1
        self._plain = config.tls is None
        limit = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
        self._socket = socket.create_connection(address, _left(limit))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if config.tls is not None:
                name = config.tls.server_name or address[0]
                context = _context(config.tls)
                self._socket = context.wrap_socket(self._socket, server_hostname=name)
            self._greet(config, limit)
        except BaseException:
            self.close()
            raise

    def _greet(self, config: ClientConfig, deadline: float) -> None:
        request = {
            "mechanism": "PLAIN",
            "user": config.user,
            "password": config.password,
            "vhost": config.vhost,
            "client": config.name or f"convoymq-python, pid {self._pid}",
        }
        parts = encode_frame(Op.AUTHENTICATE, 0, 0, request)
        self._send([PREFACE, *parts], deadline)
        preface = bytearray(len(PREFACE))
        self._receive(memoryview(preface), deadline)
        try:
            version = preface_version(bytes(preface))
        except ProtocolError:
            raise errors.ProtocolError(
                f"{_text(self.address)} does not speak the columnar protocol"
            ) from None
        if version != VERSION:
            raise errors.ProtocolError(
                f"{_text(self.address)} speaks version {version} of the columnar protocol, "
                f"this client version {VERSION}"
            )
        answer = self._answer(Op.AUTHENTICATE, 0, deadline)
        if answer.status:
            raise errors.of_answer(answer.status, answer.map)
        frame_max = answer.map.get("frame_max")
        if not isinstance(frame_max, int) or not 0 < frame_max <= FRAME_MAX_LIMIT:
            raise errors.ProtocolError("the server named no frame_max")
        self.frame_max = self._reader.frame_max = frame_max
        # Whom the password was given to may have memory ahead as well: large answers copy nothing.
        self._reader.ahead = frame_max
        self.node = str(answer.map.get("node") or "")

    def ask(
        self, op: Op, fields: Mapping[str, object], payload: bytes | memoryview, deadline: float
    ) -> Frame:
        """Sends a request and returns its answer, which may be an error's.

        Raises:
            OSError: the connection is lost, or the deadline has passed (TimeoutError).
            PreconditionFailed: the request is larger than the server takes; nothing was sent.
            ProtocolError: what came is no answer to it.
        """
        return self._answer(op, self.post(op, fields, payload, deadline), deadline)

    def post(
        self, op: Op, fields: Mapping[str, object], payload: bytes | memoryview, deadline: float
    ) -> int:
        """Sends a request and returns the number that its answer carries. Raises as `ask` does."""
        self._correlation += 1
        parts = encode_frame(op, 0, self._correlation, fields, payload)
        length = sum(memoryview(part).nbytes for part in parts)
        if length > self.frame_max:
            raise errors.PreconditionFailed(
                f"request of {length} bytes, {_text(self.address)} takes at most {self.frame_max}"
            )
        self._send(parts, deadline)
        return self._correlation

    def fileno(self) -> int:
        """Returns the socket's descriptor."""
        return self._socket.fileno()

    @property
    def has_bytes(self) -> bool:
        """Returns whether bytes wait inside TLS, where no system call sees them."""
        return not self._plain and bool(self._socket.pending())  # type: ignore[attr-defined]

    def take(self) -> list[Frame]:
        """Returns the answers that are here, without waiting for more.

        Raises:
            OSError: the connection is lost.
            ClientError: the server says why it closes, or what came is not this protocol.
        """
        self._wake_at(1)
        self._socket.settimeout(0)
        room = self._reader.buffer()
        try:
            count = self._socket.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            if type(error).__name__ in ("SSLWantReadError", "SSLWantWriteError"):
                return []
            raise
        finally:
            # The view must be gone before the reader turns to its next buffer.
            room.release()
        if not count:
            raise Lost("the server closed the connection")
        try:
            frames = self._reader.advance(count)
        except ProtocolError as error:
            raise errors.ProtocolError(f"{_text(self.address)}: {error.text}") from error
        for frame in frames:
            if frame.status and (not frame.correlation or frame.status == ErrorCode.FRAME_ERROR):
                raise errors.of_answer(frame.status, frame.map)
        return frames

    def _answer(self, op: Op, correlation: int, deadline: float) -> Frame:
        reader = self._reader
        while True:
            self._wake_at(min(reader.missing, WAKE_BYTES) if reader.length else 1)
            room = reader.buffer()
            count = self._receive_some(room, deadline)
            # The view must be gone before the reader turns to its next buffer.
            room.release()
            try:
                frames = reader.advance(count)
            except ProtocolError as error:
                raise errors.ProtocolError(f"{_text(self.address)}: {error.text}") from error
            for frame in frames:
                if frame.correlation == correlation and frame.op == op + ANSWER:
                    return frame
                if frame.status == ErrorCode.FRAME_ERROR:
                    raise errors.of_answer(frame.status, frame.map)
                if not frame.correlation and frame.status:
                    # The server says why it closes.
                    raise errors.of_answer(frame.status, frame.map)

    def _wake_at(self, count: int) -> None:
        """Waiting ends when so many bytes are here. They will come, or the connection ends."""
        # Inside TLS the system sees other bytes than we do; elsewhere than on Linux it may refuse.
        if count != self._wake_bytes and sys.platform == "linux" and self._plain:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wake_bytes = count

    def _send(self, parts: list[bytes | memoryview], deadline: float) -> None:
        for part in parts:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(part)

    def _receive(self, view: memoryview, deadline: float) -> None:
        at = 0
        while at < len(view):
            at += self._receive_some(view[at:], deadline)

    def _receive_some(self, view: memoryview, deadline: float) -> int:
        self._socket.settimeout(_left(deadline))
        count = self._socket.recv_into(view)
        if not count:
            raise Lost("the server closed the connection")
        return count

    def close(self) -> None:
        """Closes the socket; a fork's copy leaves the parent's connection as it is."""
        self._socket.close()


def _context(tls: TlsConfig) -> SSLContext:
    """Raises PreconditionFailed: a file is missing or is no certificate; another try is no use."""
    try:
        return tls.context()
    except (OSError, ValueError) as error:
        files = ", ".join(name for name in (tls.ca_file, tls.cert_file, tls.key_file) if name)
        raise errors.PreconditionFailed(f"TLS with {files or 'no files'}: {error}") from error


def is_here(address: tuple[str, int]) -> bool:
    """Returns whether a server's address is one of this machine's own; nothing is sent to find
    out."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return bool(probe.getsockname()[0] == probe.getpeername()[0])
    except OSError:
        return False


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _text(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
