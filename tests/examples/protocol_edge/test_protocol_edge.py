"""A protocol is added in its own folder and with one line: on a real node, beside AMQP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.edges import registry
from tests.patience import PATIENCE_S
from tests.running import Nodes


async def test_lines_and_amqp_share_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The registration: in the source this is a line of the list.
    edges = [*registry.EDGES, "tests.examples.protocol_edge"]
    monkeypatch.setattr(registry, "EDGES", edges)
    async with Nodes(tmp_path, lines__line_max="1KiB") as nodes, asyncio.timeout(PATIENCE_S):
        port = nodes.amqp_port()
        await asyncio.to_thread(publish_by_amqp, port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def ask(line: str) -> str:
            writer.write(line.encode() + b"\n")
            return (await reader.readline()).decode().rstrip("\n")

        # The preface comes in parts: nothing is decided before it is whole.
        writer.write(b"LIN")
        await writer.drain()
        assert await ask("ES\nLOGIN guest guest /") == "READY"
        assert await ask("GET q") == "by AMQP"
        assert await ask("GET q") == "EMPTY"
        assert await ask("PUBLISH q by lines") == "OK"
        assert await asyncio.to_thread(get_by_amqp, port) == b"by lines"
        assert (await ask("GET missing")).startswith("ERROR no queue 'missing'")
        assert (await ask("SHOUT")).startswith("ERROR PUBLISH queue text")
        assert [row["protocol"] for row in await nodes[1].broker.cluster.list_connections()] == [
            "lines"
        ]
        # An orderly stop tells clients why.
        nodes[1].stop()
        assert (await reader.readline()) == b"ERROR the node stops\n"
        assert await reader.read() == b""
        writer.close()


def publish_by_amqp(port: int) -> None:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    channel = connection.channel()
    channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
    channel.confirm_delivery()
    channel.basic_publish("", "q", b"by AMQP")
    connection.close()


def get_by_amqp(port: int) -> bytes | None:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    _, _, body = connection.channel().basic_get("q", auto_ack=True)
    connection.close()
    return body
