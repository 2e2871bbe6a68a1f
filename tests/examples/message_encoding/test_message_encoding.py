"""An encoding is added in its own folder and with one line: AMQP 0-9-1 reads it on a real node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.edges import registry
from convoymq.messages import encodings
from tests.examples.message_encoding.card import NUMBER
from tests.patience import PATIENCE_S
from tests.running import Nodes

TYPES = ("quorum", "classic")


async def test_cards_are_read_by_amqp_and_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The registrations: in the source these are a line each.
    monkeypatch.setitem(encodings.ENCODINGS, NUMBER, "tests.examples.message_encoding.card")
    edges = [*registry.EDGES, "tests.examples.protocol_edge", "tests.examples.message_encoding"]
    monkeypatch.setattr(registry, "EDGES", edges)
    async with Nodes(tmp_path) as nodes, asyncio.timeout(PATIENCE_S):
        port = nodes.amqp_port()
        await asyncio.to_thread(declare, port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def ask(line: str) -> str:
            writer.write(line.encode() + b"\n")
            return (await reader.readline()).decode().rstrip("\n")

        assert await ask("CARDS\nLOGIN guest guest /") == "READY"
        for kind in TYPES:
            assert await ask(f"PUBLISH {kind} Greeting Hello, world") == "OK"
            await asyncio.to_thread(read_and_reject, port, kind)
            # A death changes the header alone: the card is what it was.
            assert await ask(f"GET dead-{kind}") == "Hello, world"
        writer.close()


def declare(port: int) -> None:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    channel = connection.channel()
    for kind in TYPES:
        arguments = {"x-queue-type": kind}
        channel.queue_declare(f"dead-{kind}", durable=True, arguments=arguments)
        arguments |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"dead-{kind}"}
        channel.queue_declare(kind, durable=True, arguments=arguments)
    connection.close()


def read_and_reject(port: int, kind: str) -> None:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    channel = connection.channel()
    tag, headers = next_card(channel, kind)
    channel.basic_reject(tag, requeue=False)
    channel.cancel()
    _, headers = next_card(channel, f"dead-{kind}")
    (death,) = headers["x-death"]
    assert (death["queue"], death["reason"], death["count"]) == (kind, "rejected", 1)
    # Closing returns it.
    connection.close()


def next_card(channel: Any, queue: str) -> tuple[int, dict[str, Any]]:
    method, properties, body = next(iter(channel.consume(queue)))
    assert (properties.headers["title"], body) == ("Greeting", b"Hello, world")
    return method.delivery_tag, properties.headers
