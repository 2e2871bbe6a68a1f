"""Time-outs of acknowledgements: what is late, who hears of it, and what returns."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091 import timeouts
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.connection import SCAN_S
from convoymq.model.tables import Table
from tests.unit.edges.amqp091.fakes import Client, FakeQueue
from tests.unit.edges.amqp091.test_channel import MakeClient, consume, fill

QUORUM = {"x-queue-type": "quorum"}
LATE = "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value used: "


async def ready(make_client: MakeClient, configured_ms: int | None = 120_000) -> Client:
    client = make_client(AmqpConfig(consumer_timeout_ms=configured_ms, heartbeat_s=0))
    await client.open(consumer_cancel_notify=True)
    await client.channel()
    return client


def returned(queue: FakeQueue) -> list[Any]:
    return [call for call in queue.calls if call[0] in ("end", "return")]


async def heard(client: Client, seconds: float) -> list[Any]:
    """What the client is told in that time, but for deliveries."""
    client.shell.advance(seconds)
    return [m for m in await client.methods() if not isinstance(m, spec.BasicDeliver)]


@pytest.mark.provokes("amqp.acknowledgement_late")
async def test_late_deliveries_return_and_the_consumer_is_cancelled(
    make_client: MakeClient,
) -> None:
    client = await ready(make_client)
    queue = await client.declare("q", **QUORUM)
    await fill(client, "q", b"a", b"b")
    await consume(client)
    client.send(1, spec.BasicAck(delivery_tag=1))
    assert await heard(client, 110) == []
    assert await heard(client, 70) == [spec.BasicCancel(consumer_tag="t", nowait=True)]
    assert returned(queue) == [("end", 1), ("return", 1, [1, 1], False)]
    # A late acknowledgement is none, and nothing is said twice.
    client.send(1, spec.BasicAck(delivery_tag=2))
    assert await heard(client, 600) == []
    assert len(returned(queue)) == 2
    await consume(client, tag="again")
    assert client.connection.channels[1].consumers.keys() == {"again"}


@pytest.mark.parametrize(
    ("asked", "queue_ms", "configured_ms", "seconds"),
    [
        (10_000, 300_000, 600_000, 10),
        (300_000, 10_000, 10_000, 300),
        (None, 20_000, 600_000, 20),
        (None, 900_000, 10_000, 900),
        (None, None, 600_000, 600),
        (None, 30_000, None, 30),
    ],
)
async def test_the_consumer_comes_before_the_queue_and_that_before_the_configuration(
    make_client: MakeClient,
    asked: int | None,
    queue_ms: int | None,
    configured_ms: int | None,
    seconds: float,
) -> None:
    client = await ready(make_client, configured_ms)
    queue = await client.declare("q", **QUORUM)
    queue.consumer_timeout_ms = queue_ms
    await fill(client, "q", b"a")
    arguments = Table.of({} if asked is None else {"x-consumer-timeout": asked})
    await consume(client, arguments=arguments)
    (row,) = client.connection.consumer_infos()
    assert row["consumer_timeout"] == seconds * 1000
    assert await heard(client, seconds * 0.99) == []
    assert len(await heard(client, seconds + SCAN_S)) == 1
    assert returned(queue) == [("end", 1), ("return", 1, [0, 0], False)]


@pytest.mark.parametrize("asked", [0, None])
async def test_without_a_time_out_nothing_is_late(make_client: MakeClient, asked: object) -> None:
    client = await ready(make_client, 120_000 if asked == 0 else None)
    queue = await client.declare("q", **QUORUM)
    await fill(client, "q", b"a")
    arguments = Table.of({} if asked is None else {"x-consumer-timeout": asked})
    await consume(client, arguments=arguments)
    assert await heard(client, 10_000) == []
    assert returned(queue) == []


async def test_a_changed_policy_counts_at_the_next_scan(make_client: MakeClient) -> None:
    client = await ready(make_client, 600_000)
    queue = await client.declare("q", **QUORUM)
    await fill(client, "q", b"a")
    await consume(client)
    assert await heard(client, 120) == []
    queue.consumer_timeout_ms = 60_000
    assert len(await heard(client, 61)) == 1


async def test_a_client_that_hears_of_no_cancel_has_its_channel_closed(
    make_client: MakeClient,
) -> None:
    client = make_client(AmqpConfig(consumer_timeout_ms=120_000, heartbeat_s=0))
    await client.open()
    await client.channel()
    await client.declare("q", **QUORUM)
    await fill(client, "q", b"a")
    await consume(client, arguments=Table.of({"x-consumer-timeout": 10_000}))
    (close,) = await heard(client, 16)
    assert isinstance(close, spec.ChannelClose)
    assert (close.reply_code, close.reply_text) == (
        406,
        f"{LATE}10000 ms. This timeout value can be configured, see consumers doc guide to learn"
        " more",
    )


async def test_what_a_cancelled_consumer_keeps_returns_in_silence(
    make_client: MakeClient,
) -> None:
    client = await ready(make_client)
    queue = await client.declare("q", **QUORUM)
    await fill(client, "q", b"a", b"b")
    await consume(client)
    await client.ask(1, spec.BasicCancel(consumer_tag="t"))
    assert await heard(client, 240) == []
    assert returned(queue) == [("return", 1, [0, 1], False)]
    client.send(1, spec.BasicAck(delivery_tag=2, multiple=True))
    assert await heard(client, 60) == []


async def test_other_consumers_of_the_channel_go_on(make_client: MakeClient) -> None:
    client = await ready(make_client, None)
    queue = await client.declare("q", **QUORUM)
    other = await client.declare("c", **{"x-queue-type": "classic"})
    await fill(client, "q", b"a")
    await fill(client, "c", b"b")
    await consume(client, arguments=Table.of({"x-consumer-timeout": 10_000}))
    await consume(client, "c", tag="u")
    assert await heard(client, 60) == [spec.BasicCancel(consumer_tag="t", nowait=True)]
    client.send(1, spec.BasicAck(delivery_tag=2))
    assert other.calls[-1] == ("settle", 2, [0, 0])
    assert returned(queue) == [("end", 1), ("return", 1, [0, 0], False)]


@pytest.mark.parametrize(
    ("value", "reason"),
    [("1m", '"expected integer, got longstr"'), (-1, "{value_negative,-1}")],
)
async def test_a_bad_time_out_is_refused(client: Client, value: object, reason: str) -> None:
    await client.declare("q", **QUORUM)
    table = Table.of({"x-consumer-timeout": value})
    client.send(1, spec.BasicConsume(queue="q", arguments=table))
    (close,) = await client.methods()
    assert close.reply_text == (
        "PRECONDITION_FAILED - invalid arg 'x-consumer-timeout' for queue 'q' in vhost '/':"
        f" {reason}"
    )


async def test_scans_keep_a_bounded_record(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "MARKS_MAX", 8)
    client = await ready(make_client, 3_600_000)
    queue = await client.declare("q", **QUORUM)
    await consume(client)
    for _ in range(50):
        await fill(client, "q", b"a")
        assert await heard(client, 60) == []
    watch = client.connection.channels[1].timeouts
    assert len(watch._marks) <= 8
    assert len(await heard(client, 3_600)) == 1
    assert returned(queue)[0] == ("end", 1)
