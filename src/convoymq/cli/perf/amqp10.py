"""A small blocking AMQP 1.0 client for the load tool: log-in, one session, one link.

Queues are declared by AMQP 0-9-1, on the same port. Once the link is attached, the socket goes
non-blocking and the compiled `perfclient_amqp10` takes over.
"""

from __future__ import annotations

import socket
from typing import NamedTuple, TypeVar
from urllib.parse import quote
from uuid import uuid4

from convoymq.cli.perf.connection import (
    FRAME_BYTES_MAX,
    REPLY_TIMEOUT_S,
    Address,
    BrokerSaid,
    opened,
)
from convoymq.edges.amqp10.frames import AMQP, DATA_OFFSET, HEADER_BYTES, SASL, frame
from convoymq.edges.amqp10.opening import PLAIN_HEADER, SASL_HEADER
from convoymq.edges.amqp10.performatives import (
    Attach,
    Begin,
    Close,
    Composite,
    Detach,
    End,
    Error,
    Open,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    Source,
    Target,
    read,
)
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.encoding import sections_of
from convoymq.messages.amqp10.message import header_of
from convoymq.messages.amqp10.sections import annotations_section, header_section

P = TypeVar("P", bound=Composite)

WINDOW = (1 << 31) - 1
_ID_AT, _TAG_AT = 16, 22
_FIRST = bytes.fromhex("005314c01006 43 7000000000 a00400000000 43 42")
_NEXT = bytes.fromhex("005314c00706 43 40404040")
_NO_MORE, _MORE = b"\x42", b"\x41"
_TRANSFER_BYTES = 21


class Template(NamedTuple):
    """Frames of one publish."""

    frames: bytes
    transfers: int
    body_at: int
    """Place of the body's first byte."""

    def places(self, window: int) -> tuple[int, int, int, int]:
        """Returns what `Publisher10.start` takes: places of delivery-id and -tag, transfers, and
        the session's window."""
        return _ID_AT, _TAG_AT, self.transfers, window


class Amqp10Connection:
    """One connection with session 0; every call waits for its reply.

    Raises (everywhere):
        OSError: the socket broke or a reply took too long.
        BrokerSaid: the broker ended the link, the session or the connection.
    """

    def __init__(self, address: Address) -> None:
        self.socket = opened(address)
        try:
            self.socket.settimeout(REPLY_TIMEOUT_S)
            self._input = b""
            self._log_in(address)
            self._open(address)
        except BaseException:
            self.socket.close()
            raise

    def _log_in(self, address: Address) -> None:
        self.socket.sendall(SASL_HEADER)
        if self._take(len(SASL_HEADER)) != SASL_HEADER:
            raise BrokerSaid("the broker speaks no AMQP 1.0")
        self._expect(SaslMechanisms)
        response = f"\0{address.user}\0{address.password}".encode()
        self._send(SaslInit(mechanism="PLAIN", initial_response=response), SASL)
        if self._expect(SaslOutcome).code:
            raise BrokerSaid("the broker refuses the log-in")
        self.socket.sendall(PLAIN_HEADER)
        self._take(len(PLAIN_HEADER))

    def _open(self, address: Address) -> None:
        self._send(
            Open(
                # A link of another client with the same container and name would take its place.
                container_id=f"convoy perf {uuid4()}",
                hostname=f"vhost:{address.vhost}",
                max_frame_size=FRAME_BYTES_MAX,
            )
        )
        opened = self._expect(Open)
        self.frame_bytes_max = min(opened.max_frame_size, FRAME_BYTES_MAX)
        version = str((opened.properties or {}).get("version", "4"))
        # Before RabbitMQ 4, addresses have another form.
        old = version.partition(".")[0] in ("0", "1", "2", "3")
        self._stem = "/amq/queue/" if old else "/queues/"
        self._send(Begin(next_outgoing_id=0, incoming_window=WINDOW, outgoing_window=WINDOW))
        self.window = self._expect(Begin).incoming_window

    def publish(self, queue: str) -> bytes:
        """Attaches a link of a publisher; returns bytes that came behind the reply."""
        target = Target(address=self._address(queue))
        self._attach(Attach(name=queue, handle=0, role=False, source=Source(), target=target,
                            snd_settle_mode=0, initial_delivery_count=0))  # fmt: skip
        return self._input

    def consume(self, queue: str, *, settled: bool) -> bytes:
        """Attaches a link of a consumer; returns bytes that came behind the reply."""
        source = Source(address=self._address(queue))
        self._attach(Attach(name=queue, handle=0, role=True, source=source, target=Target(),
                            snd_settle_mode=int(settled)))  # fmt: skip
        return self._input

    def open_links(self, queue: str, session: int, *, publish: int, consume: int) -> None:
        """Attaches further links, those of consumers without credit; session 1 begins."""
        if session:
            self._send(
                Begin(next_outgoing_id=0, incoming_window=WINDOW, outgoing_window=WINDOW),
                session=session,
            )
            self._expect(Begin)
        address = self._address(queue)
        for handle in range(publish + consume):
            role = handle >= publish
            attach = Attach(
                name=f"{session}-{handle}",
                handle=handle,
                role=role,
                source=Source(address=address) if role else Source(),
                target=Target() if role else Target(address=address),
                initial_delivery_count=None if role else 0,
            )
            self._send(attach, session=session)
            self._expect(Attach)

    def _address(self, queue: str) -> str:
        return self._stem + quote(queue, safe="")

    def _attach(self, attach: Attach) -> None:
        self._send(attach)
        answer = self._expect(Attach)
        if (answer.source if attach.role else answer.target) is None:
            # The reason follows.
            self._expect(Detach)

    def _send(self, performative: Composite, kind: int = AMQP, session: int = 0) -> None:
        self.socket.sendall(frame(session, performative.encoded(), kind))

    def _take(self, count: int) -> bytes:
        while len(self._input) < count:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionResetError("the broker closed the connection")
            self._input += data
        taken, self._input = self._input[:count], self._input[count:]
        return taken

    def _expect(self, wanted: type[P]) -> P:
        while True:
            head = self._take(HEADER_BYTES)
            body = self._take(int.from_bytes(head[:4], "big") - HEADER_BYTES)
            if not body:
                continue
            performative = read(body[4 * (head[4] - DATA_OFFSET) :])[0]
            reason = reason_of(performative)
            if reason:
                raise BrokerSaid(reason)
            if isinstance(performative, wanted):
                return performative

    def close(self) -> None:
        """Closes politely, without waiting long."""
        try:
            self.socket.settimeout(1.0)
            self._send(Close())
            self.socket.shutdown(socket.SHUT_WR)
            while self.socket.recv(65536):
                pass
        except OSError:
            pass
        finally:
            self.socket.close()


def reason_of(performative: Composite) -> str:
    """Returns why a broker ended something; empty: it did not."""
    if not isinstance(performative, Detach | End | Close):
        return ""
    error = performative.error
    return str(error.description or error.condition) if isinstance(error, Error) else "closed"


def template_of(size: int, properties: Properties, *, frame_bytes_max: int) -> Template:
    """Returns the frames of one publish, body all zero."""
    notes, bare = sections_of(properties, bytes(size), deaths_told=False)
    message = header_section(header_of(properties, first_acquirer=False, delivery_count=0))
    if notes:
        message += annotations_section(notes)
    message += bare
    room = frame_bytes_max - HEADER_BYTES - _TRANSFER_BYTES
    frames = []
    for at in range(0, len(message), room):
        more = _MORE if at + room < len(message) else _NO_MORE
        head = _NEXT if at else _FIRST
        frames.append(frame(0, head + more + message[at : at + room]))
    body_at = HEADER_BYTES + len(_FIRST) + 1 + len(message) - size
    return Template(b"".join(frames), len(frames), body_at)
