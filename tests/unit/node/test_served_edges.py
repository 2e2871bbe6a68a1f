"""Edges of a node begin and end in order, on the ports of the configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from convoymq.edges.configuration import load
from convoymq.edges.edge import Edge
from convoymq.model.errors import BrokerError
from convoymq.node.rounds import Rounds
from convoymq.node.served_edges import ServedEdges
from convoymq.transport.listening import addresses_of
from tests.sockets import backlog_of


def fail(error: BrokerError) -> None:
    pytest.fail(str(error))


def served(
    monkeypatch: pytest.MonkeyPatch, directory: Path, done: list[str], **more: str
) -> ServedEdges:
    """Edges that note what they do, one of them late."""

    class NotedEdge(Edge):
        def __init__(self, name: str, *, after_ready: bool) -> None:
            self.name = name
            self.after_ready = after_ready

        async def start(self) -> None:
            done.append(f"{self.name} begins")

        async def stop(self) -> None:
            done.append(f"{self.name} ends")

        def activity(self) -> int:
            return 5

    edges = [NotedEdge("late", after_ready=True), NotedEdge("early", after_ready=False)]
    monkeypatch.setattr("convoymq.node.served_edges.open_edges", lambda _parts: edges)
    rounds = Rounds(asyncio.get_running_loop(), structlog.get_logger(), fail)
    config = load(flags={"data_dir": str(directory), **more})
    broker: Any = None
    return ServedEdges(config, broker, rounds, lambda: 0)


async def test_late_edges_begin_last_and_end_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []
    edges = served(monkeypatch, tmp_path, done)
    await edges.begin()
    assert done == ["early begins"]
    await edges.begin_late()
    await edges.end_late()
    await edges.end()
    assert done[1:] == ["late begins", "late ends", "early ends"]
    assert edges.activity() == 10


async def test_what_did_not_begin_can_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A node that is stopped while it starts."""
    done: list[str] = []
    await served(monkeypatch, tmp_path, done).end()
    assert done == ["early ends"]


async def test_listeners_are_as_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = {"listeners.tcp.default": "0", "tcp_listen_options.backlog": "7"}
    ports = await served(monkeypatch, tmp_path, [], **flags).begin()
    await ports.open()
    try:
        assert [sock.getsockname()[0] for sock in ports.sockets] == list(addresses_of("localhost"))
        assert {backlog_of(sock) for sock in ports.sockets} == {7}
    finally:
        ports.stop()
