"""The connection's rules, over an in-memory broker facade."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import codec
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.states import State
from convoymq.model.tables import Table
from tests.unit.edges.amqp091.fakes import Client, FakeBroker

MakeClient = Callable[..., Client]


def start_ok(
    response: bytes = b"\0guest\0guest", mechanism: str = "PLAIN", **can: bool
) -> spec.Method:
    table = Table.of({"capabilities": dict(can)})
    return spec.ConnectionStartOk(client_properties=table, mechanism=mechanism, response=response)


async def started(make_client: MakeClient, settings: AmqpConfig | None = None) -> Client:
    client = make_client(settings)
    client.send_bytes(spec.PROTOCOL_HEADER)
    await client.heard()
    return client


async def tuning(make_client: MakeClient, settings: AmqpConfig | None = None) -> Client:
    client = await started(make_client, settings)
    assert isinstance(await client.ask(0, start_ok()), spec.ConnectionTune)
    return client


async def test_handshake_opens_and_registers(client: Client, broker: FakeBroker) -> None:
    assert client.state is State.OPEN
    assert broker.open == [client.connection]
    assert client.connection.info()["user"] == "guest"


async def test_start_announces_what_clients_look_at(make_client: MakeClient) -> None:
    client = make_client()
    client.send_bytes(spec.PROTOCOL_HEADER)
    (start,) = await client.methods()
    properties = start.server_properties.to_plain()
    assert (start.version_major, start.version_minor) == (0, 9)
    assert properties["product"] == "RabbitMQ"
    assert str(properties["version"]).startswith("4.")
    assert all(value is True for value in properties["capabilities"].values())
    assert {"basic.nack", "publisher_confirms", "connection.blocked"} <= set(
        properties["capabilities"]
    )
    assert start.mechanisms.split() == [b"PLAIN", b"AMQPLAIN", b"ANONYMOUS"]


@pytest.mark.parametrize(
    "greeting", [b"GET / HTTP/1.1\r\n", b"AMQP\x00\x01\x00\x00", b"\x16\x03\x01"]
)
async def test_wrong_protocol_header_gets_ours_back(
    make_client: MakeClient, greeting: bytes
) -> None:
    client = make_client()
    client.send_bytes(greeting)
    (answer,) = await client.heard()
    assert answer.method == spec.PROTOCOL_HEADER
    assert client.gone()


async def test_legacy_protocol_header_is_taken(make_client: MakeClient) -> None:
    client = make_client()
    client.send_bytes(b"AMQP\x01\x01\x00\x09")
    assert isinstance((await client.methods())[0], spec.ConnectionStart)


@pytest.mark.provokes("amqp.handshake_timeout")
async def test_handshake_has_a_time_limit(make_client: MakeClient) -> None:
    client = await started(make_client)
    client.shell.advance(9.9)
    assert not client.gone()
    client.shell.advance(0.2)
    assert client.gone()


async def test_handshake_limit_does_not_hit_an_open_connection(client: Client) -> None:
    client.shell.advance(60)
    assert not client.gone()


@pytest.mark.provokes("amqp.login_refused")
async def test_bad_password_with_the_capability_closes_with_403(make_client: MakeClient) -> None:
    client = await started(make_client)
    close = await client.ask(0, start_ok(b"\0guest\0wrong", authentication_failure_close=True))
    assert close.reply_code == 403
    assert close.reply_text == (
        "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. "
        "For details see the broker logfile."
    )
    assert (close.class_id, close.method_id) == (0, 0)


async def test_bad_password_without_the_capability_is_silence(make_client: MakeClient) -> None:
    client = await started(make_client)
    client.send(0, start_ok(b"\0guest\0wrong"))
    assert await client.methods() == []
    assert not client.gone()
    client.shell.advance(3.1)
    assert client.gone()


@pytest.mark.parametrize(
    ("mechanism", "response", "code"),
    [("PLAIN", b"guest", 502), ("AMQPLAIN", b"\x05LOG", 501), ("KERBEROS", b"", 503)],
)
async def test_broken_sasl_answers(
    make_client: MakeClient, mechanism: str, response: bytes, code: int
) -> None:
    client = await started(make_client)
    close = await client.ask(0, start_ok(response, mechanism))
    assert close.reply_code == code


async def test_amqplain_and_anonymous_are_accepted(make_client: MakeClient) -> None:
    table = Table.of({"LOGIN": "guest", "PASSWORD": "guest"})
    for mechanism, response in (("AMQPLAIN", table.encoded), ("ANONYMOUS", b"")):
        client = await started(make_client)
        tune = await client.ask(0, start_ok(response, mechanism))
        assert (tune.channel_max, tune.frame_max, tune.heartbeat) == (2047, 131072, 60)


@pytest.mark.parametrize(
    ("channel_max", "frame_max", "text"),
    [
        (2047, 1024, "negotiated frame_max = 1024 is lower than the minimum allowed value (4096)"),
        (
            9999,
            4096,
            "negotiated channel_max = 9999 is higher than the maximum allowed value (2047)",
        ),
        (
            0,
            131072,
            "negotiated channel_max = 0 (no limit) is higher than the maximum allowed value (2047)",
        ),
        (10, 0, "negotiated frame_max = 0 is higher than the maximum allowed value (131072)"),
        (
            1,
            131073,
            "negotiated frame_max = 131073 is higher than the maximum allowed value (131072)",
        ),
    ],
)
async def test_tune_ok_beyond_the_limits(
    make_client: MakeClient, channel_max: int, frame_max: int, text: str
) -> None:
    client = await tuning(make_client)
    close = await client.ask(
        0, spec.ConnectionTuneOk(channel_max=channel_max, frame_max=frame_max, heartbeat=0)
    )
    assert (close.reply_code, close.reply_text) == (530, f"NOT_ALLOWED - {text}")


async def test_unknown_vhost(make_client: MakeClient) -> None:
    client = await tuning(make_client)
    client.send(0, spec.ConnectionTuneOk(channel_max=1, frame_max=4096, heartbeat=0))
    close = await client.ask(0, spec.ConnectionOpen(virtual_host="nowhere"))
    assert (close.reply_code, close.reply_text) == (530, "NOT_ALLOWED - vhost nowhere not found")
    assert (close.class_id, close.method_id) == (10, 40)


async def test_methods_out_of_order_close_the_connection(make_client: MakeClient) -> None:
    client = await started(make_client)
    close = await client.ask(0, spec.ConnectionOpen(virtual_host="/"))
    assert (close.reply_code, close.reply_text) == (
        504,
        "CHANNEL_ERROR - unexpected method in connection state starting",
    )


@pytest.mark.provokes("amqp.heartbeat_missed")
async def test_heartbeats_are_sent_and_expected(make_client: MakeClient) -> None:
    client = await tuning(make_client)
    client.send(0, spec.ConnectionTuneOk(channel_max=1, frame_max=4096, heartbeat=10))
    await client.ask(0, spec.ConnectionOpen(virtual_host="/"))
    for _ in range(4):
        client.shell.advance(5)
        assert await client.methods() == ["heartbeat"]
    client.send_bytes(codec.HEARTBEAT)
    client.shell.advance(19)
    assert not client.gone()
    client.shell.advance(11)
    assert client.gone()
    assert not any(isinstance(m, spec.ConnectionClose) for m in await client.methods())


async def test_close_is_answered_after_exclusive_queues_are_gone(
    client: Client, broker: FakeBroker
) -> None:
    answer = await client.ask(0, spec.ConnectionClose(reply_code=200, reply_text="bye"))
    assert isinstance(answer, spec.ConnectionCloseOk)
    assert broker.closed == [client.connection.id]
    assert broker.open == []
    assert not client.gone()


async def test_a_closed_connection_is_read_until_the_peer_closes_it(client: Client) -> None:
    bye = spec.ConnectionClose(reply_code=200, reply_text="bye")
    assert isinstance(await client.ask(0, bye), spec.ConnectionCloseOk)
    client.publish("", "q", b"late")
    client.send(1, spec.QueueDeclare(queue="q"))
    client.send_bytes(codec.HEARTBEAT + codec.frame(9, 0, b"") + bytes(100))
    assert await client.methods() == []
    assert client.reads()
    client.connection.eof()
    assert client.gone()


async def test_a_repeated_close_is_answered_again(client: Client) -> None:
    bye = spec.ConnectionClose(reply_code=200, reply_text="bye")
    for _ in range(3):
        assert isinstance(await client.ask(0, bye), spec.ConnectionCloseOk)
    assert not client.gone()


@pytest.mark.parametrize(("heartbeat_s", "limit_s"), [(0, 30), (60, 30), (10, 10)])
async def test_a_peer_that_does_not_close_has_its_time(
    make_client: MakeClient, heartbeat_s: int, limit_s: int
) -> None:
    client = await tuning(make_client)
    client.send(0, spec.ConnectionTuneOk(channel_max=1, frame_max=4096, heartbeat=heartbeat_s))
    await client.ask(0, spec.ConnectionOpen(virtual_host="/"))
    await client.ask(0, spec.ConnectionClose(reply_code=200, reply_text="bye"))
    client.shell.advance(limit_s - 0.1)
    assert not client.gone()
    client.shell.advance(0.2)
    assert client.gone()


async def test_a_stop_does_not_wait_for_who_has_said_all(client: Client) -> None:
    await client.ask(0, spec.ConnectionClose(reply_code=200, reply_text="bye"))
    client.connection.close("shutdown")
    assert client.gone()


async def test_a_stop_while_a_close_is_answered(client: Client) -> None:
    client.send(0, spec.ConnectionClose(reply_code=200, reply_text="bye"))
    client.connection.close("shutdown")
    assert [type(method) for method in await client.methods()] == [spec.ConnectionCloseOk]
    assert client.gone()


async def test_connection_closes_that_cross(client: Client) -> None:
    client.connection.close("shutdown")
    client.send(0, spec.ConnectionClose(reply_code=200, reply_text="bye"))
    answers = await client.methods()
    assert [type(each) for each in answers] == [spec.ConnectionClose, spec.ConnectionCloseOk]
    assert not client.gone()
    client.send(0, spec.ConnectionCloseOk())
    await client.settled()
    assert client.gone()


async def test_close_before_open_ends_the_socket(make_client: MakeClient) -> None:
    client = await tuning(make_client)
    bye = spec.ConnectionClose(reply_code=200, reply_text="bye")
    assert isinstance(await client.ask(0, bye), spec.ConnectionCloseOk)
    assert client.gone()


async def test_a_stop_while_a_password_is_checked(make_client: MakeClient) -> None:
    client = await started(make_client)
    client.send(0, start_ok())
    client.connection.close("shutdown")
    (close,) = await client.methods()
    assert close.reply_code == 320
    assert client.state is State.CLOSING


async def test_lost_socket_gives_everything_back(client: Client, broker: FakeBroker) -> None:
    client.connection.lost()
    await client.settled()
    assert broker.closed == [client.connection.id]
    assert client.state is State.CLOSED


async def test_the_reason_of_a_close_is_cut_by_bytes(client: Client) -> None:
    client.connection.close("終" * 100)
    (close,) = await client.methods()
    assert close.reply_text == "CONNECTION_FORCED - " + "終" * 78


async def test_after_a_server_close_only_close_ok_is_heard(client: Client) -> None:
    client.connection.close("Closed via management plugin")
    (close,) = await client.methods()
    assert close.reply_code == 320
    assert close.reply_text == "CONNECTION_FORCED - Closed via management plugin"
    client.publish("", "q")
    client.send(1, spec.QueueDeclare(queue="q"))
    assert await client.methods() == []
    assert not client.gone()
    client.send(0, spec.ConnectionCloseOk())
    await client.settled()
    assert client.gone()


async def test_server_close_does_not_wait_for_ever(client: Client) -> None:
    client.connection.close("shutdown")
    client.shell.advance(5.1)
    assert client.gone()


async def test_channel_rules(client: Client) -> None:
    again = await client.ask(1, spec.ChannelOpen())
    assert (again.reply_code, again.reply_text) == (
        504,
        "CHANNEL_ERROR - second 'channel.open' seen",
    )


async def test_first_method_of_a_channel_is_open(client: Client) -> None:
    close = await client.ask(2, spec.QueueDeclare(queue="q"))
    assert isinstance(close, spec.ConnectionClose)
    assert (close.reply_code, close.reply_text) == (504, "CHANNEL_ERROR - expected 'channel.open'")


async def test_channel_max_is_enforced(make_client: MakeClient) -> None:
    client = make_client(AmqpConfig(channel_max=2))
    await client.open()
    await client.channel(1)
    await client.channel(2)
    close = await client.ask(3, spec.ChannelOpen())
    assert (close.reply_code, close.reply_text) == (
        530,
        "NOT_ALLOWED - number of channels opened (2) has reached the negotiated channel_max (2)",
    )


async def test_any_channel_number_may_be_used(make_client: MakeClient) -> None:
    client = make_client(AmqpConfig(channel_max=2))
    await client.open()
    await client.channel(65534)
    await client.channel(7)
    assert (await client.ask(1, spec.BasicQos())).reply_code == 530


async def test_the_number_that_marks_deaths_is_no_channel(client: Client) -> None:
    """A publisher there would have its own `x-death` believed."""
    close = await client.ask(65535, spec.ChannelOpen())
    assert isinstance(close, spec.ConnectionClose)
    assert (close.reply_code, close.reply_text) == (
        530,
        "NOT_ALLOWED - channel number 65535 is reserved",
    )


@pytest.mark.parametrize(
    "method", [spec.ChannelOpen(), spec.ChannelClose(), spec.BasicQos(), spec.ConnectionOpen()]
)
async def test_what_is_not_for_channel_0_is_a_channel_error(
    client: Client, method: spec.Method
) -> None:
    close = await client.ask(0, method)
    assert (close.reply_code, close.reply_text, close.class_id, close.method_id) == (
        504,
        "CHANNEL_ERROR - unexpected method in connection state running",
        method.CLASS_ID,
        method.METHOD_ID,
    )


@pytest.mark.parametrize("number", [1, 9])
async def test_heartbeats_belong_on_channel_0(client: Client, number: int) -> None:
    client.send_bytes(codec.frame(8, number, b""))
    (close,) = await client.methods()
    assert (close.reply_code, close.class_id, close.method_id) == (505, 0, 0)


async def test_connection_methods_on_a_channel_that_is_not_open(client: Client) -> None:
    close = await client.ask(2, spec.ConnectionClose())
    assert (close.reply_code, close.reply_text) == (504, "CHANNEL_ERROR - expected 'channel.open'")


@pytest.mark.parametrize(("size", "code"), [(8192, 503), (8193, 501)])
async def test_frames_before_tuning_are_bounded(
    make_client: MakeClient, size: int, code: int
) -> None:
    client = await started(make_client)
    client.send_bytes(codec.frame(1, 0, bytes(size)))
    (close,) = await client.methods()
    assert close.reply_code == code


async def test_unknown_method_is_503(client: Client) -> None:
    client.send_bytes(codec.frame(1, 1, b"\x00\x3c\x00\xff"))
    (close,) = await client.methods()
    assert isinstance(close, spec.ConnectionClose)
    assert close.reply_code == 503


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (codec.frame(9, 0, b""), 501),
        (b"\x01\x00\x01\x00\x00\x00\x00\xcd", 501),
        (b"\x01\x00\x01\x7f\x00\x00\x00", 501),
        (codec.frame(3, 1, b"body"), 505),
        (codec.frame(2, 1, b"\x00\x3c" + bytes(12)), 505),
        (codec.frame(3, 0, b"body"), 505),
        (codec.frame(3, 7, b"body"), 505),
        (2 * codec.method_frame(1, spec.BasicPublish()), 505),
        (codec.frame(1, 1, b"\x00"), 501),
    ],
)
async def test_malformed_frames_close_the_connection(
    client: Client, data: bytes, code: int
) -> None:
    client.send_bytes(data)
    (close,) = await client.methods()
    assert isinstance(close, spec.ConnectionClose)
    assert close.reply_code == code


async def test_blocked_is_told_to_publishers_only(client: Client, broker: FakeBroker) -> None:
    queue = await client.declare("q")
    broker.alarms.effective = frozenset(("memory", "disk"))
    client.connection.set_alarms(broker.alarms.effective)
    assert await client.methods() == []
    client.publish("", "q", b"one")
    (blocked,) = await client.methods()
    assert blocked == spec.ConnectionBlocked(reason="low on memory & disk")
    assert not client.reads()
    assert not queue.ready
    broker.alarms.effective = frozenset()
    client.connection.set_alarms(broker.alarms.effective)
    assert await client.methods() == [spec.ConnectionUnblocked()]
    assert client.reads()
    assert len(queue.ready) == 1


async def test_update_secret_asks_for_permissions_again(client: Client, broker: FakeBroker) -> None:
    await client.declare("q")
    client.publish("", "q")
    await client.settled()
    broker.refuse.add(("write", "exchange", "amq.default"))
    answer = await client.ask(0, spec.ConnectionUpdateSecret(new_secret=b"fresh", reason="r"))
    assert isinstance(answer, spec.ConnectionUpdateSecretOk)
    client.publish("", "q")
    (close,) = await client.methods()
    assert close.reply_code == 403


async def test_any_secret_will_do_and_a_user_without_the_vhost_is_refused(
    client: Client, broker: FakeBroker
) -> None:
    secret = spec.ConnectionUpdateSecret(new_secret=b"neither password nor token", reason="r")
    assert isinstance(await client.ask(0, secret), spec.ConnectionUpdateSecretOk)
    broker.vhosts.clear()
    close = await client.ask(0, secret)
    assert (close.reply_code, close.class_id, close.method_id) == (530, 10, 70)


async def test_update_secret_ends_channels_whose_consumers_lost_their_permission(
    client: Client, broker: FakeBroker
) -> None:
    await client.declare("q")
    await client.channel(2)
    await client.ask(1, spec.BasicConsume(queue="q"))
    broker.refuse.add(("read", "queue", "q"))
    client.send(0, spec.ConnectionUpdateSecret(new_secret=b"fresh", reason="r"))
    close, answer = await client.heard()
    assert (close.channel, close.method.reply_code) == (1, 403)
    assert (close.method.class_id, close.method.method_id) == (60, 20)
    assert isinstance(answer.method, spec.ConnectionUpdateSecretOk)
    assert isinstance(await client.ask(2, spec.ChannelFlow(active=True)), spec.ChannelFlowOk)


async def test_a_waiting_channel_does_not_stall_the_others(
    client: Client, broker: FakeBroker
) -> None:
    await client.channel(2)
    broker.gate = asyncio.Event()
    client.send(1, spec.QueueDeclare(queue="slow"), spec.ChannelFlow(active=True))
    assert await client.methods() == []
    assert isinstance(await client.ask(2, spec.ChannelFlow(active=True)), spec.ChannelFlowOk)
    broker.gate.set()
    answers = await client.heard()
    assert [answer.channel for answer in answers] == [1, 1]
    assert isinstance(answers[0].method, spec.QueueDeclareOk)
    assert isinstance(answers[1].method, spec.ChannelFlowOk)


async def test_what_a_waiting_channel_keeps_is_bounded(
    make_client: MakeClient, broker: FakeBroker
) -> None:
    client = make_client(AmqpConfig(channel_backlog_bytes_max=1000))
    await client.open()
    await client.channel()
    queue = await client.declare("q")
    broker.gate = asyncio.Event()
    client.send(1, spec.QueueDeclare(queue="slow"))
    for index in range(20):
        client.publish("", "q", b"%03d" % index + bytes(97))
    assert not client.reads()
    await client.settled()
    broker.gate.set()
    await client.settled()
    assert client.reads()
    bodies = await drained(client, 20)
    assert bodies == [b"%03d" % index for index in range(20)]
    assert not queue.ready


async def drained(client: Client, count: int) -> list[bytes]:
    await client.heard()
    for _ in range(count):
        client.send(1, spec.BasicGet(queue="q", no_ack=True))
    return [message.body[:3] for message in await client.heard()]
