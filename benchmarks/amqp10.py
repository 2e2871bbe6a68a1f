"""The cases of AMQP 1.0: beside AMQP 0-9-1 on the same cluster, and beside RabbitMQ's plug-in."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Case, Figure, Run, Setup, rate_figure, throughput
from convoymq.cli.perf.amqp10 import Amqp10Connection
from convoymq.cli.perf.connection import Address
from convoymq.cli.perf.processes import resident_bytes

PLUGIN = Setup(plugins=("rabbitmq_amqp1_0",))
BOTH = ("amqp10", "amqp091")
REQUEUED = 1_000
"""Messages that are given back again and again."""
LINKS = 5
"""Of a session: three publish, two consume."""


def beside(size: int) -> Callable[[Run], dict[str, float]]:
    """The same load by both protocols."""

    def measure(run: Run) -> dict[str, float]:
        ours, other = (throughput(run.load(size=size, protocol=each)) for each in BOTH)
        return ours | {
            "share": ours["rate"] / other["rate"] * 100,
            "cpu_share": ours["cpu"] / other["cpu"] * 100,
        }

    return measure


def converted(run: Run) -> dict[str, float]:
    """Backlogs that one protocol publishes and another one reads, beside 0-9-1 alone."""

    def out(published: str, consumed: str) -> float:
        def step(protocol: str, mode: str, *flags: str) -> dict[str, Any]:
            return run.load(
                size=100,
                flags=("persistent", *flags),
                protocol=protocol,
                mode=mode,
                count=run.scale.backlog,
                queue_prefix="converted",
            )

        step(published, "pub", "keep")
        return float(step(consumed, "cons", "verify", "no-delete-first")["consumed_per_s"])

    plain = out("amqp091", "amqp091")
    there, back = out("amqp10", "amqp091"), out("amqp091", "amqp10")
    return {"there": there / plain * 100, "back": back / plain * 100}


def requeued(run: Run) -> dict[str, float]:
    """Messages that their consumer modifies (failed, without a delivery limit) for ever."""
    unlimited = {"declare_args": "x-delivery-limit=-1"} if run.cluster.system == "convoy" else {}
    options: dict[str, Any] = {"protocol": "amqp10", "queue_prefix": "requeued", **unlimited}
    run.load(size=100, flags=("persistent", "keep"), mode="pub", count=REQUEUED, **options)
    result = run.load(
        size=100,
        flags=("persistent", "no-delete-first"),
        mode="cons",
        ack_every=-50,
        prefetch=REQUEUED,
        **options,
    )
    return {"rate": result["consumed_per_s"]}


def connections(run: Run) -> dict[str, float]:
    """Resident memory of connections with two sessions of five links each, that are idle."""
    run.load(seconds=0.5, flags=("keep",), protocol="amqp10", queue_prefix="links")
    address = Address.parse(run.cluster.uris[0])
    opened: list[Amqp10Connection] = []

    def more(count: int) -> None:
        for _ in range(count):
            opened.append(Amqp10Connection(address))
            for session in (0, 1):
                opened[-1].open_links("links-0", session, publish=3, consume=LINKS - 3)

    more(run.scale.connections // 10)
    before = resident_bytes(run.cluster.pids[0])
    more(run.scale.connections)
    grown = resident_bytes(run.cluster.pids[0]) - before
    for each in opened:
        each.socket.shutdown(socket.SHUT_RDWR)
        each.socket.close()
    return {"memory": grown / run.scale.connections / 1024}


def share_figure(must: float, *, name: str = "share", title: str = "of 0-9-1") -> Figure:
    return Figure(name=name, title=title, unit="%", kind="share", must=must)


CASES = (
    *(
        Case(
            name=f"amqp10-{name}",
            title=f"{title}, in and out of a quorum queue",
            measure=beside(size),
            figures=(
                rate_figure(10, None),
                share_figure(85),
                Figure(name="cpu", title="broker CPU per million", unit="s", kind="shown"),
                Figure(name="cpu_share", title="CPU, of 0-9-1", unit="%", kind="shown"),
            ),
            setup=PLUGIN,
        )
        for name, title, size in (("1k", "1 KiB", 1024), ("16", "16 B", 16))
    ),
    Case(
        name="amqp10-converted",
        title="backlog of 100 B",
        measure=converted,
        figures=(
            share_figure(60, name="there", title="1.0 to 0-9-1, of 0-9-1"),
            share_figure(60, name="back", title="0-9-1 to 1.0, of 0-9-1"),
        ),
        setup=PLUGIN,
    ),
    Case(
        name="amqp10-modified",
        title="100 B, given back as failed",
        measure=requeued,
        figures=(rate_figure(5, None),),
        setup=PLUGIN,
    ),
    Case(
        name="amqp10-memory",
        title="a connection with two sessions and ten links",
        measure=connections,
        figures=(Figure(name="memory", title="memory", unit="KiB", kind="bound", must=40),),
        setup=PLUGIN,
    ),
)
