"""Each refusal of a stranger's input: what it ends, its condition and its text. Whatever it is, a
second session and a second connection of the node go on."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from convoymq.edges.amqp10.frames import SASL, frame
from convoymq.edges.amqp10.opening import PLAIN_HEADER
from convoymq.edges.amqp10.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    End,
    Flow,
    Open,
    Source,
    Target,
    Transfer,
)
from convoymq.messages.amqp10.values import Described, Symbol, ULong, encode
from tests.unit.edges.amqp10.fakes import Client, FakeBroker, message, of_kind

Act = Callable[[Client], Awaitable[object]]


def writes(data: bytes) -> Act:
    async def act(client: Client) -> None:
        client.write(data)

    return act


def sends(*performatives: Any) -> Act:
    async def act(client: Client) -> None:
        for each in performatives:
            client.send(each)

    return act


def header(size: int, offset: int = 2, kind: int = 0, channel: int = 0) -> bytes:
    return struct.pack(">IBBH", size, offset, kind, channel)


def described(code: int, *fields: Any) -> bytes:
    return frame(0, encode(Described(ULong(code), list(fields))))


def transfers(**fields: Any) -> Act:
    """A publisher's link with `snd`, and one transfer that is not as it should be."""

    async def act(client: Client) -> None:
        client.broker.queue("q")
        await client.attach_sender("/queues/q", snd_settle_mode=fields.pop("snd", 2))
        client.transfer(fields.pop("payload", message()), **fields)

    return act


def parts(*differing: dict[str, Any]) -> Act:
    """Two transfers of one delivery."""

    async def act(client: Client) -> None:
        client.broker.queue("q")
        await client.attach_sender("/queues/q")
        client.transfer(b"", more=True, settled=False)
        for fields in differing:
            client.send(Transfer(handle=0, more=True, **fields))

    return act


async def without_credit(client: Client) -> None:
    await client.attach_sender("/queues/q")
    for _ in range(200):
        client.transfer(message())


async def into_a_closed_window(client: Client) -> None:
    client.broker.alarms.effective = frozenset({"disk"})
    await client.begin(2)
    client.broker.alarms.effective = frozenset()
    client.send(Transfer(handle=0, delivery_id=0), channel=2)


async def answers_no_begin(client: Client) -> None:
    begin = Begin(remote_channel=0, next_outgoing_id=0, incoming_window=1, outgoing_window=1)
    client.send(begin, channel=2)


async def a_state_that_is_none(client: Client) -> None:
    client.broker.queue("q")
    await client.attach_receiver("/queues/q")
    client.settle(0, None)


async def twice(client: Client) -> None:
    for name in "ab":
        target = Target(address="/queues/q")
        client.send(
            Attach(name=name, handle=0, role=False, target=target, initial_delivery_count=0)
        )


async def a_sequence_that_was_not_sent(client: Client) -> None:
    client.flow(next_incoming_id=7)


async def to_a_bad_address(client: Client) -> None:
    await client.attach_sender(None)
    client.transfer(message(to="q"), settled=True)


async def acquires_in_a_transaction(client: Client) -> None:
    client.broker.queue("q")
    await client.attach_receiver("/queues/q")
    client.credit(1, properties={Symbol("txn-id"): b"t"})


FRAMING, SESSION, LINK = "amqp:connection:framing-error", "amqp:session:", "amqp:link:"
RECEIVER = Attach(name="l", handle=256, role=True, source=Source(address="/queues/q"))

REFUSALS: list[tuple[str, Act, type, str, str]] = [
    # section a: frames
    ("size", writes(header(7)), Close, FRAMING, "frame size (7 bytes) < minimum"),
    ("huge", writes(header(1 << 30)), Close, FRAMING, "> maximum frame size (131072 bytes)"),
    ("doff", writes(header(8, 1)), Close, FRAMING, "data offset (1 words) < minimum (2 words)"),
    ("doff end", writes(header(8, 9)), Close, FRAMING, "data offset (36 bytes) > frame size (8"),
    ("type", writes(frame(0, b"", SASL)), Close, FRAMING, "frame type 1 where type 0 is due"),
    ("channel", writes(header(8, channel=64)), Close, FRAMING, "channel number (64) exceeds"),
    ("body", writes(frame(0, b"\x00\x53")), Close, "amqp:internal-error", "Reader error: "),
    ("descriptor", writes(described(0x99)), Close, "amqp:internal-error", "no performative"),
    ("field", writes(described(0x13, "x")), Close, "amqp:internal-error", "field next_incoming_id"),
    ("missing", writes(described(0x16)), Close, "amqp:internal-error", "lacks its field handle"),
    # section b: sessions
    ("open", sends(Open(container_id="x")), Close, "amqp:internal-error", "unexpected open"),
    ("answer", answers_no_begin, Close, "amqp:internal-error", "begin answers no begin"),
    (
        "begin",
        sends(Begin(next_outgoing_id=0, incoming_window=1, outgoing_window=1)),
        End,
        "amqp:internal-error",
        "Unexpected frame begin",
    ),
    ("handle", sends(RECEIVER), End, FRAMING, "link handle value (256) exceeds maximum"),
    ("in use", twice, End, SESSION + "handle-in-use", "handle 0 is already in use"),
    ("unattached", sends(Transfer(handle=9)), End, SESSION + "unattached-handle", "handle: 9"),
    ("detach", sends(Detach(handle=9)), End, SESSION + "unattached-handle", "link handle: 9"),
    (
        "flow",
        sends(
            Flow(
                next_incoming_id=0,
                incoming_window=1,
                next_outgoing_id=0,
                outgoing_window=1,
                handle=9,
            )
        ),
        End,
        SESSION + "unattached-handle",
        "link handle: 9",
    ),
    ("ahead", a_sequence_that_was_not_sent, End, SESSION + "window-violation", "FLOW (7) is ahead"),
    ("window", into_a_closed_window, End, SESSION + "window-violation", "window violation"),
    ("state", a_state_that_is_none, End, "amqp:invalid-field", "delivery state in DISPOSITION"),
    # section b: links
    ("credit", without_credit, Detach, LINK + "transfer-limit-exceeded", "insufficient credit"),
    ("tag", transfers(delivery_tag=b"t" * 33), Detach, "amqp:invalid-field", "more than 32 bytes"),
    ("no id", transfers(delivery_id=None), Detach, "amqp:invalid-field", "lacks a delivery-id"),
    ("mode", transfers(snd=0, settled=True), Detach, "amqp:invalid-field", "settled=true on a"),
    ("mode 1", transfers(snd=1, settled=False), Detach, "amqp:invalid-field", "settled=false on"),
    ("id", parts({"delivery_id": 5}), Detach, "amqp:invalid-field", "delivery-id differs"),
    ("settled", parts({"settled": True}), Detach, "amqp:invalid-field", "settled differs"),
    ("parse", transfers(payload=b"\x00"), Detach, "amqp:decode-error", "failed to parse message"),
    ("to", to_a_bad_address, Detach, "amqp:precondition-failed", "bad 'to' address string"),
    ("acquire", acquires_in_a_transaction, Detach, "amqp:not-implemented", "Transactional acq"),
]


@pytest.mark.parametrize(
    ("act", "ends", "condition", "text"),
    [pytest.param(*rest, id=name) for name, *rest in REFUSALS],
)
async def test_a_refusal_ends_what_it_names(
    client: Client, act: Act, ends: type, condition: str, text: str
) -> None:
    other = Client(client.broker)
    await other.open()
    await other.begin()
    await client.begin(1)
    client.broker.queue("q")
    await act(client)
    found = await client.heard()
    ended = of_kind(found, ends)[-1]
    assert ended.error.condition == condition
    assert text in ended.error.description
    if ends is not Close:
        assert of_kind(found, Close) == []
        client.send(
            Attach(name="n", handle=0, role=True, source=Source(address="/queues/q"),
                   target=Target()),
            channel=1,
        )  # fmt: skip
        assert of_kind(await client.heard(), Attach), "another session goes on"
    assert of_kind(await other.attach_receiver("/queues/q"), Attach)


@pytest.mark.parametrize(
    ("fields", "condition", "text"),
    [
        ({"max_frame_size": 511}, "amqp:frame-size-too-small", "frame_max=511 < 512 min size"),
        ({"idle_time_out": 999}, "amqp:not-allowed", "idle-time-out 999 ms is below"),
        (
            {"hostname": "vhost:none"}, "amqp:unauthorized-access",
            "AMQP 1.0 connection failed: vhost none",
        ),
    ],
)  # fmt: skip
async def test_a_refused_open_says_why(
    broker: FakeBroker, fields: dict[str, Any], condition: str, text: str
) -> None:
    client = Client(broker)
    await client.log_in()
    client.write(PLAIN_HEADER)
    client.send(Open(container_id="client", **fields))
    closed = of_kind(await client.heard(), Close)[0]
    assert closed.error.condition == condition
    assert text in closed.error.description
