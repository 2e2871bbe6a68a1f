"""The publisher and the consumer of `convoy perf` by AMQP 1.0, over a pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from convoymq.cli.perf.amqp10 import template_of
from convoymq.edges.amqp10.frames import FrameReader, frame
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Composite,
    Disposition,
    Flow,
    Released,
    Transfer,
    read,
)
from convoymq.kernels.perfclient import Histogram, Ledger
from convoymq.kernels.perfclient_amqp10 import Consumer10, Publisher10
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.sections import split
from convoymq.messages.record import content_of

FRAME_MAX = 4096
WINDOW = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    for each in ends:
        each.setblocking(False)
    yield ends
    for each in ends:
        each.close()


def sent(peer: socket.socket) -> list[tuple[Composite, bytes]]:
    reader = FrameReader(1 << 20)
    try:
        while data := peer.recv(1 << 20):
            reader.feed(data)
    except BlockingIOError:
        pass
    found = []
    while (each := reader.frame()) is not None:
        found.append(read(each.body))
    return found


def flow(limit: int, window: int = WINDOW) -> bytes:
    made = Flow(
        next_incoming_id=0,
        incoming_window=window,
        next_outgoing_id=0,
        outgoing_window=0,
        handle=0,
        delivery_count=0,
        link_credit=limit,
    )
    return frame(0, made.encoded())


def disposition(first: int, last: int | None, state: Composite) -> bytes:
    made = Disposition(role=True, first=first, last=last, settled=True, state=state)
    return frame(0, made.encoded())


def publisher(own: socket.socket, size: int, window: int = WINDOW) -> Publisher10:
    made = Publisher10(Ledger(), 0, 7, 1000, Histogram())
    properties = Properties(delivery_mode=2, message_id="m")
    template = template_of(size, properties, frame_bytes_max=FRAME_MAX)
    places = template.places(window)
    made.start(own.fileno(), template.frames, template.body_at, -1, 0, places)
    return made


def test_a_publisher_keeps_to_its_credit(pair: tuple[socket.socket, socket.socket]) -> None:
    own, peer = pair
    load = publisher(own, 100)
    load.pump(-1, False)
    assert sent(peer) == []
    load.feed(flow(3))
    load.pump(-1, False)
    transfers = sent(peer)
    assert [t.delivery_id for t, _ in transfers if isinstance(t, Transfer)] == [0, 1, 2]
    for number, (_, message) in enumerate(transfers):
        found = split(message)
        assert found.properties == {"message-id": "m"}
        assert found.header.durable
        assert message[-100:][8:12] == (number + 1).to_bytes(4, "little")
    load.feed(disposition(0, 1, Accepted()) + disposition(2, None, Released()))
    assert (load.ledger.confirmed, load.outstanding, load.nacked, load.returned) == (2, 0, 1, 1)
    assert load.bad == 0


def test_a_large_message_is_several_transfers(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    own, peer = pair
    load = publisher(own, 10_000, window=7)
    load.feed(flow(5, window=7))
    load.pump(-1, False)
    transfers = [(t, part) for t, part in sent(peer) if isinstance(t, Transfer)]
    # Of a message: three; two fit into the session's window.
    assert [t.delivery_id for t, _ in transfers] == [0, None, None, 1, None, None]
    assert [t.more for t, _ in transfers] == [True, True, False] * 2
    message = b"".join(part for _, part in transfers[:3])
    assert len(message) - 10_000 < 100
    assert split(message).body_kind


def test_what_was_not_settled_is_sent_again(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    own, peer = pair
    load = publisher(own, 100)
    load.feed(flow(2))
    load.pump(-1, False)
    sent(peer)
    load.feed(disposition(0, None, Accepted()))
    load.lost()
    template = template_of(100, Properties(), frame_bytes_max=FRAME_MAX)
    load.start(own.fileno(), template.frames, template.body_at, -1, 0, template.places(WINDOW))
    load.feed(flow(5))
    load.pump(2, True)
    (again,) = sent(peer)
    assert again[1][-100:][8:12] == (2).to_bytes(4, "little")
    assert load.resent == 1


def transfer(number: int, message: bytes, *, more: bool = False) -> bytes:
    made = Transfer(handle=0, delivery_id=number, delivery_tag=b"t", settled=False, more=more)
    return frame(0, made.encoded() + message)


def test_a_consumer_settles_and_renews_credit(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    from convoymq.messages.amqp10.message import transfer_of

    own, peer = pair
    ledger = Ledger()
    load = Consumer10([ledger], 0, 2, False, Histogram(), True)
    load.start(own.fileno(), 10)
    ((first, _),) = sent(peer)
    assert isinstance(first, Flow)
    assert (first.handle, first.delivery_count, first.link_credit) == (0, 0, 10)
    bodies = [bytes(8) + number.to_bytes(4, "little") + bytes(4 + 84) for number in (1, 2, 3)]
    messages = [transfer_of("x", "k", content_of(Properties(), body)) for body in bodies]
    again = transfer_of("x", "k", content_of(Properties(), bodies[0]), acquired_count=1)
    data = transfer(0, messages[0]) + transfer(1, messages[1][:100], more=True)
    # One byte at a time.
    for byte in data + transfer(1, messages[1][100:]):
        load.feed(bytes((byte,)))
    load.on_readable()
    (settled, _), (credit, _) = sent(peer)
    assert isinstance(settled, Disposition)
    assert (settled.first, settled.last, settled.settled) == (0, 1, True)
    assert isinstance(settled.state, Accepted)
    assert isinstance(credit, Flow)
    assert (credit.next_incoming_id, credit.delivery_count, credit.link_credit) == (3, 2, 10)
    load.feed(transfer(2, messages[2]) + transfer(3, again))
    assert (load.consumed, load.redelivered, load.out_of_order, load.bad) == (4, 1, 0, 0)
    assert (ledger.unique, ledger.duplicates) == (3, 1)


@pytest.mark.parametrize(
    "data", [b"\0\0\0\x04\x02\0\0\0", b"\0\0\0\x08\x01\0\0\0", b"\x7f\0\0\0\x02\0\0\0"]
)
def test_what_is_no_frame_ends_the_connection(
    pair: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    load = publisher(pair[0], 100)
    load.feed(data)
    assert load.closed
    assert load.bad == 1
