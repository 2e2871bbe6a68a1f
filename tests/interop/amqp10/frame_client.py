"""A client of AMQP 1.0 that sends frames: no client library sends maps of unsettled deliveries."""

from __future__ import annotations

import socket
from typing import Any, TypeVar
from urllib.parse import urlsplit

from convoymq.edges.amqp10.frames import AMQP, SASL, FrameReader, frame
from convoymq.edges.amqp10.opening import PLAIN_HEADER, SASL_HEADER
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Begin,
    Close,
    Composite,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    Source,
    Target,
    Transfer,
    read,
)
from convoymq.messages.amqp10.values import Described, ULong, encode
from tests.clusters import Cluster
from tests.patience import PATIENCE_S

WINDOW = 1 << 20
IN, OUT = 0, 1
C = TypeVar("C", bound=Composite)


def message(body: bytes) -> bytes:
    """Returns a message of one data section."""
    return encode(Described(ULong(0x75), body))


class FrameClient:
    """A connection with one session, to one node."""

    def __init__(self, cluster: Cluster, node: int, container: str) -> None:
        parts = urlsplit(cluster.uris[node])
        self._socket = socket.create_connection((parts.hostname, parts.port), PATIENCE_S)
        self._reader = FrameReader(1 << 20)
        self._kept: list[tuple[Composite, bytes]] = []
        self._deliveries = 0
        self._socket.sendall(SASL_HEADER)
        assert self._exactly(8) == SASL_HEADER
        self.hear(SaslMechanisms)
        self.send(SaslInit(mechanism="PLAIN", initial_response=b"\0guest\0guest"))
        self.hear(SaslOutcome)
        self._socket.sendall(PLAIN_HEADER)
        assert self._exactly(8) == PLAIN_HEADER
        self.send(Open(container_id=container))
        self.send(Begin(next_outgoing_id=0, incoming_window=WINDOW, outgoing_window=WINDOW))
        self.hear(Begin)

    def close(self) -> None:
        """Ends without a word, as a client whose process is killed."""
        self._socket.close()

    def send(self, performative: Composite, payload: bytes = b"") -> None:
        kind = SASL if isinstance(performative, SaslInit) else AMQP
        self._socket.sendall(frame(0, performative.encoded() + payload, kind))

    def hear(self, kind: type[C]) -> C:
        """Returns the next performative of a kind; others are kept."""
        return self.hear_with_payload(kind)[0]

    def hear_with_payload(self, kind: type[C]) -> tuple[C, bytes]:
        for at, (performative, payload) in enumerate(self._kept):
            if isinstance(performative, kind):
                del self._kept[at]
                return performative, payload
        while True:
            found = self._reader.frame()
            if found is None:
                data = self._socket.recv(1 << 16)
                assert data, "the node has closed the connection"
                self._reader.feed(data)
            elif found.body:
                performative, payload = read(found.body)
                if isinstance(performative, kind):
                    return performative, payload
                # Whoever waits for something else waits in vain.
                assert not isinstance(performative, (Detach, End, Close)), performative
                self._kept.append((performative, payload))

    def _exactly(self, size: int) -> bytes:
        while self._reader.waiting < size:
            self._reader.feed(self._socket.recv(1 << 16))
        found = self._reader.take(size)
        assert found is not None
        return found

    # Receiving

    def receive(self, queue: str, credit: int, unsettled: Any = None) -> Attach:
        """Attaches the receiver, and returns the answer."""
        source = Source(address=f"/queues/{queue}")
        self.send(
            Attach(
                name="in", handle=IN, role=True, source=source, target=Target(), unsettled=unsettled
            )
        )
        answer = self.hear(Attach)
        self.credit(credit)
        return answer

    def credit(self, credit: int, counted: int = 0) -> None:
        self.send(
            Flow(
                next_incoming_id=0,
                incoming_window=WINDOW,
                next_outgoing_id=0,
                outgoing_window=WINDOW,
                handle=IN,
                delivery_count=counted,
                link_credit=credit,
            )
        )

    def deliveries(self, count: int) -> list[tuple[Transfer, bytes]]:
        """Returns so many deliveries, with what was in their transfers."""
        return [self.hear_with_payload(Transfer) for _ in range(count)]

    def accept(self, first: int, last: int) -> None:
        self.send(Disposition(role=True, first=first, last=last, settled=True, state=Accepted()))

    # Publishing

    def publish_to(self, queue: str, unsettled: Any = None) -> Attach:
        """Attaches the sender, and returns the answer."""
        self.send(
            Attach(
                name="out",
                handle=OUT,
                role=False,
                snd_settle_mode=0,
                source=Source(),
                target=Target(address=f"/queues/{queue}"),
                unsettled=unsettled,
                initial_delivery_count=0,
            )
        )
        answer = self.hear(Attach)
        self.hear(Flow)
        return answer

    def publish(self, *bodies: bytes, resume: bool = False) -> None:
        """Sends messages, with their bodies as tags."""
        for body in bodies:
            self.send(
                Transfer(
                    handle=OUT,
                    delivery_id=self._deliveries,
                    delivery_tag=body,
                    settled=False,
                    resume=resume,
                ),
                message(body),
            )
            self._deliveries += 1

    def settled(self, count: int) -> int:
        """Waits for the outcomes of so many deliveries; returns how many were accepted."""
        heard = accepted = 0
        while heard < count:
            told = self.hear(Disposition)
            several = (told.first if told.last is None else told.last) - told.first + 1
            heard += several
            accepted += several * (told.state == Accepted())
        return accepted
