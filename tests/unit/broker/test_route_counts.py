"""Messages by exchange and queue: sums over channels, what is deleted, and the bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.broker import route_counts
from convoymq.broker.route_counts import ChannelRoutes, RouteCounts
from convoymq.kernels.route_cache import RouteCount
from convoymq.metadata.commands import (
    Command,
    DeclareExchange,
    DeclareQueue,
    DeleteExchange,
    DeleteQueue,
    PutVhost,
)
from convoymq.metadata.machine import MetadataMachine


class Bench:
    """A tree with an exchange `x` and queues `q` and `r`, and what is published in it."""

    def __init__(self) -> None:
        self.tree = MetadataMachine()
        self.tree.version = self.tree.VERSION
        self.counts = RouteCounts(self.tree)
        self.do(PutVhost(name="/"))
        self.do(DeclareExchange(vhost="/", name="x", type="direct", durable=True))
        for name in ("q", "r"):
            self.declare(name)

    def declare(self, name: str) -> None:
        made = DeclareQueue(vhost="/", name=name, members=(1,), type="classic", durable=True)
        self.do(made)

    def do(self, command: Command) -> None:
        self.tree.carry_out(command, 0)
        for change in self.tree.changes:
            self.counts.on_change(change)
        self.tree.changes.clear()

    def channel(self) -> ChannelRoutes:
        return ChannelRoutes(self.counts, "/", RouteCount)

    def rows(self) -> dict[str, tuple[int, dict[str, int]]]:
        return {row["exchange"]: (row["in"], row["out"]) for row in self.counts.rows()}


def to(*names: str) -> Any:
    return [SimpleNamespace(name=name) for name in names]


def test_messages_are_counted_by_exchange_and_queue() -> None:
    bench = Bench()
    one, two = bench.channel(), bench.channel()
    one.count_of("x", to("q", "r")).messages += 3
    one.count_of("x", to("q")).messages += 2
    one.count_of("", to("q")).messages += 1
    two.count_of("x", ()).messages += 10
    assert bench.rows() == {"x": (15, {"q": 5, "r": 3}), "": (1, {"q": 1})}
    one.count_of("x", to("q")).messages += 1
    assert one.published() == {"x": 6, "": 1}
    assert bench.rows()["x"] == (16, {"q": 6, "r": 3})
    # The counts of a channel outlast it.
    two.clear()
    one.clear()
    assert bench.rows()["x"] == (16, {"q": 6, "r": 3})
    assert two.published() == {"x": 10}


def test_what_is_deleted_has_no_counts() -> None:
    bench = Bench()
    channel = bench.channel()
    channel.count_of("x", to("q", "r")).messages += 3
    channel.count_of("x", to("a topic")).messages += 1
    assert bench.rows() == {"x": (4, {"q": 3, "r": 3})}
    bench.do(DeleteQueue(vhost="/", name="q"))
    bench.declare("q")
    assert bench.rows() == {"x": (4, {"r": 3})}
    bench.do(DeleteExchange(vhost="/", name="x"))
    assert bench.rows() == {}
    assert (bench.counts._pairs, bench.counts._out) == (0, {})


def test_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pairs beyond the bound the exchange still counts; a channel begins anew."""
    bench = Bench()
    monkeypatch.setattr(route_counts, "ROUTES_MAX", 1)
    monkeypatch.setattr(route_counts, "CHANNEL_ROUTES_MAX", 2)
    channel = bench.channel()
    channel.count_of("x", to("q")).messages += 1
    assert not channel.is_full
    channel.count_of("x", to("r")).messages += 1
    assert channel.is_full
    channel.clear()
    assert not channel.is_full
    channel.count_of("x", to("q")).messages += 1
    channel.count_of("", to("q")).messages += 1
    assert bench.rows() == {"x": (3, {"q": 2})}
