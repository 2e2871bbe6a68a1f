"""The connection's rules: headers, log-in, open, limits, idle time, close."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.edges.amqp10.config import Amqp10Config
from convoymq.edges.amqp10.frames import frame
from convoymq.edges.amqp10.opening import PLAIN_HEADER, SASL_HEADER, TLS_HEADER
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Begin,
    Close,
    Composite,
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
)
from convoymq.edges.amqp10.states import State
from tests.unit.edges.amqp10.fakes import Client, FakeBroker, message, of_kind


async def test_a_client_logs_in_and_opens(broker: FakeBroker) -> None:
    client = Client(broker)
    client.write(SASL_HEADER)
    (offered,) = await client.heard()
    assert offered == SaslMechanisms(mechanisms=("PLAIN", "ANONYMOUS"))
    client.send(SaslInit(mechanism="PLAIN", initial_response=b"\0guest\0guest"))
    assert await client.heard() == [SaslOutcome(code=0)]
    client.write(PLAIN_HEADER)
    client.send(Open(container_id="me", hostname="anything", channel_max=9))
    (opened,) = await client.heard()
    assert client.headers == [SASL_HEADER, PLAIN_HEADER]
    assert (opened.container_id, opened.max_frame_size) == ("test", 131_072)
    assert (opened.channel_max, opened.idle_time_out) == (9, 30_000)
    assert opened.properties["product"] == "RabbitMQ"
    assert opened.properties["version"].startswith("4.")
    assert broker.open == [client.connection]
    row = client.connection.info()
    assert (row["protocol"], row["container_id"], row["vhost"]) == ("AMQP 1-0", "me", "/")


@pytest.mark.parametrize("header", [PLAIN_HEADER, TLS_HEADER])
async def test_a_client_without_sasl_is_told_to_use_it(broker: FakeBroker, header: bytes) -> None:
    client = Client(broker)
    client.write(header)
    await client.heard()
    assert client.headers == [SASL_HEADER]
    assert client.shell.closed


async def test_everything_may_come_at_once(broker: FakeBroker) -> None:
    client = Client(broker)
    init = SaslInit(mechanism="ANONYMOUS").encoded()
    opens = Open(container_id="me").encoded()
    client.write(SASL_HEADER + frame(0, init, 1) + PLAIN_HEADER + frame(0, opens))
    found = await client.heard()
    assert isinstance(found[-1], Open)


async def test_a_wrong_password_gets_its_outcome_after_a_while(broker: FakeBroker) -> None:
    client = Client(broker)
    assert await client.log_in(b"\0guest\0wrong") == []
    client.shell.advance(client.connection.login.config.failed_login_delay_s)
    assert await client.heard() == [SaslOutcome(code=1)]
    assert client.shell.closed


@pytest.mark.parametrize(("mechanism", "response"), [("EXTERNAL", b""), ("PLAIN", b"guest")])
async def test_a_log_in_that_was_not_offered_ends_silently(
    broker: FakeBroker, mechanism: str, response: bytes
) -> None:
    client = Client(broker)
    assert await client.log_in(response, mechanism) == []
    client.shell.advance(client.connection.login.config.failed_login_delay_s)
    assert await client.heard() == []
    assert client.shell.closed


@pytest.mark.parametrize(
    ("fields", "condition"),
    [
        ({"hostname": "vhost:other"}, "amqp:unauthorized-access"),
        ({"max_frame_size": 511}, "amqp:frame-size-too-small"),
        ({"idle_time_out": 999}, "amqp:not-allowed"),
    ],
)
async def test_a_refused_open_is_answered_and_closed(
    broker: FakeBroker, fields: dict[str, object], condition: str
) -> None:
    client = Client(broker)
    await client.log_in()
    client.write(PLAIN_HEADER)
    client.send(Open(container_id="me", **fields))  # type: ignore[arg-type]
    opened, closed = await client.heard()
    assert isinstance(opened, Open)
    assert closed.error.condition == condition
    client.send(Close())
    await client.heard()
    assert client.shell.closed
    assert broker.open == []


@pytest.mark.provokes("amqp.connection_error")
@pytest.mark.parametrize(
    ("data", "condition", "text"),
    [
        (struct.pack(">IBBH", 4, 2, 0, 0), "amqp:connection:framing-error", "4 bytes"),
        (struct.pack(">IBBH", 1 << 20, 2, 0, 0), "amqp:connection:framing-error", "1048576"),
        (struct.pack(">IBBH", 8, 2, 1, 0), "amqp:connection:framing-error", "type 1"),
        (frame(64, Flow(incoming_window=0, next_outgoing_id=0, outgoing_window=0).encoded()),
         "amqp:connection:framing-error", r"\(64\) exceeds maximum channel number \(63\)"),
        (frame(0, b"\x00\x53\x11"), "amqp:internal-error", "Reader error"),
        (frame(0, Open(container_id="x").encoded()), "amqp:internal-error", "unexpected open"),
        (frame(1, Begin(remote_channel=1, next_outgoing_id=0, incoming_window=0,
                        outgoing_window=0).encoded()), "amqp:internal-error", "begin"),
    ],
)  # fmt: skip
async def test_what_breaks_the_protocol_closes_the_connection(
    client: Client, data: bytes, condition: str, text: str
) -> None:
    client.write(data)
    (closed,) = await client.heard()
    assert closed.error.condition == condition
    assert re.search(text, closed.error.description)
    client.send(Close())
    await client.heard()
    assert client.shell.closed


async def test_a_malformed_frame_before_open_ends_silently(broker: FakeBroker) -> None:
    client = Client(broker)
    client.write(SASL_HEADER)
    await client.heard()
    client.write(struct.pack(">IBBH", 8193, 2, 1, 0))
    assert await client.heard() == []
    client.shell.advance(3)
    assert client.shell.closed


async def test_a_close_is_answered_when_exclusive_queues_are_gone(client: Client) -> None:
    broker = client.broker
    broker.queue("mine", owner=client.connection.id)
    client.send(Close())
    assert of_kind(await client.heard(), Close) == [Close()]
    assert broker.closed == [client.connection.id]
    assert "mine" not in broker.queues
    assert client.connection.state is State.AWAITING_CLOSE
    client.shell.advance(Amqp10Config().peer_close_timeout_s)
    assert client.shell.closed


@pytest.mark.provokes("amqp.closed_without_close")
async def test_a_lost_connection_is_forgotten(client: Client) -> None:
    client.connection.lost()
    await client.heard()
    assert client.broker.open == []


@pytest.mark.provokes("amqp.handshake_timeout")
async def test_a_silent_client_is_dropped_before_open(broker: FakeBroker) -> None:
    client = Client(broker)
    client.write(SASL_HEADER)
    client.shell.advance(10)
    assert client.shell.closed


async def test_heartbeats_are_sent_where_nothing_else_is(broker: FakeBroker) -> None:
    client = Client(broker)
    await client.open(idle_time_out=8000)
    client.shell.advance(4)
    assert await client.heard() == [None]
    client.shell.advance(4)
    assert await client.heard() == [None]


async def test_a_client_that_takes_no_output_is_closed(broker: FakeBroker) -> None:
    """It was not read while its output waited, and so it counted as alive for ever."""
    client = Client(broker, Amqp10Config(output_bytes_high=4000, output_bytes_low=1000))
    await client.open()
    for kept in (9000, 8000, 7000, 6000, 5000, 5000, 5000, 5000):
        client.shell.kept = kept
        client.shell.advance(30)
        assert of_kind(await client.heard(), Close) == []
    assert not client.shell.reading
    client.shell.advance(30)
    (closed,) = of_kind(await client.heard(), Close)
    assert closed.error.condition == "amqp:resource-limit-exceeded"
    client.shell.advance(30)
    assert client.shell.closed


async def test_a_client_without_a_sign_of_life_is_closed(client: Client) -> None:
    client.shell.advance(119)
    assert of_kind(await client.heard(), Close) == []
    client.shell.advance(31)
    (closed,) = of_kind(await client.heard(), Close)
    assert closed.error.condition == "amqp:resource-limit-exceeded"
    assert "no frame received" in closed.error.description


async def test_a_heartbeat_is_a_sign_of_life(client: Client) -> None:
    for _ in range(20):
        client.shell.advance(30)
        client.write(frame(7, b""))
    assert of_kind(await client.heard(), Close) == []


async def test_an_operator_closes_with_a_reason(client: Client) -> None:
    client.connection.close("maintenance")
    (closed,) = await client.heard()
    assert closed.error.description == "Connection forced: maintenance"
    client.shell.advance(Amqp10Config().close_timeout_s)
    assert client.shell.closed


async def test_a_session_that_nobody_has_begun_is_ignored(client: Client) -> None:
    client.send(End(), channel=5)
    assert await client.heard() == []


def conversation() -> list[bytes]:
    """Returns what a client writes that publishes and consumes."""
    performatives: list[tuple[Composite, bytes]] = [
        (Open(container_id="me"), b""),
        (Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9), b""),
        (
            Attach(
                name="out",
                handle=0,
                role=False,
                target=Target(address="/queues/q"),
                initial_delivery_count=0,
            ),
            b"",
        ),
        (Transfer(handle=0, delivery_id=0, delivery_tag=b"a", settled=True), message(b"one")),
        (Transfer(handle=0, delivery_id=1, delivery_tag=b"b", more=True), message(b"two")[:9]),
        (Transfer(handle=0), message(b"two")[9:]),
        (Attach(name="in", handle=1, role=True, source=Source(address="/queues/q")), b""),
        (
            Flow(
                next_incoming_id=0,
                incoming_window=9,
                next_outgoing_id=3,
                outgoing_window=9,
                handle=1,
                delivery_count=0,
                link_credit=5,
                drain=True,
            ),
            b"",
        ),
        (Disposition(role=True, first=7, state=Accepted()), b""),
    ]
    init = SaslInit(mechanism="PLAIN", initial_response=b"\0guest\0guest").encoded()
    return [
        SASL_HEADER,
        frame(0, init, 1),
        PLAIN_HEADER,
        *(frame(0, each.encoded() + payload) for each, payload in performatives),
    ]


async def answers(pieces: Iterable[bytes]) -> list[str]:
    """Returns what the client hears that writes these pieces."""
    broker = FakeBroker()
    broker.queue("q")
    client = Client(broker)
    for piece in pieces:
        client.write(piece)
    return [str(each) for each in await client.heard()] + [str(client.payloads)]


@settings(max_examples=20, deadline=None)
@given(st.data())
async def test_pieces_of_any_size_are_the_same_conversation(data: st.DataObject) -> None:
    whole = b"".join(conversation())
    pieces, at = [], 0
    while at < len(whole):
        size = data.draw(st.integers(1, 60))
        pieces.append(whole[at : at + size])
        at += size
    assert await answers(pieces) == await answers([whole])


async def test_one_byte_at_a_time_is_the_same_conversation() -> None:
    whole = b"".join(conversation())
    found = await answers(conversation())
    assert "Transfer" in "".join(found)
    assert await answers(whole[k : k + 1] for k in range(len(whole))) == found


@settings(max_examples=60, deadline=None)
@given(st.data())
async def test_a_conversation_that_is_damaged_ends_or_goes_on(data: st.DataObject) -> None:
    """Whatever bytes come, nothing but a protocol's answer does."""
    parts = conversation()
    number = data.draw(st.integers(0, len(parts) - 1))
    part = bytearray(parts[number])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(part) - 1))
        part[at] = data.draw(st.integers(0, 255))
    with structlog.testing.capture_logs() as logs:
        await answers([*parts[:number], bytes(part), *parts[number + 1 :]])
    assert not [each for each in logs if each["event"].endswith("_failed")]
