"""The command line of `convoy perf`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import msgspec
import typer

from convoymq.cli.perf.connection import Address, BrokerSaid
from convoymq.cli.perf.latency_page import latency_page
from convoymq.cli.perf.run import Plan, Progress, Run, install_signal_handlers
from convoymq.cli.perf.schedule import steps_in
from convoymq.edges.amqp091._spec import Properties
from convoymq.model.tables import Table

if TYPE_CHECKING:
    from rich.live import Live

DEFAULT_URI = "amqp://guest:guest@127.0.0.1:5672/"

DeclaringOption = Annotated[
    list[str] | None, typer.Option(help="Nodes that declare: the leader starts there.")
]
TypeOption = Annotated[
    str,
    typer.Option(
        help="quorum, classic, stream, none (the broker's default); topic: publish to the ordered "
        "topic QUEUE_PREFIX, which exists, each message with a key of its own (--distinct), and "
        "consume as its group perf."
    ),
]
ArgumentsOption = Annotated[
    list[str] | None,
    typer.Option(help="Further queue arguments, key=value; of a topic: those of its consumers."),
]
PropertyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Message properties, name=value (priority, message_id …); ######## in one, or in a "
        "header, is the message's number."
    ),
]
HeaderOption = Annotated[list[str] | None, typer.Option(help="Message headers, key=value.")]
DistinctOption = Annotated[int, typer.Option(help="Numbers begin again after so many; 0 = never.")]
VariableRateOption = Annotated[
    list[str] | None,
    typer.Option(help="RATE:SECONDS, repeatable: one after the other, and again."),
]
HistogramOption = Annotated[
    Path | None, typer.Option(help="File for a page with the percentiles of latencies (HTML).")
]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Check order, loss and duplicates.")]


class _Roles(TypedDict):
    publisher_uris: list[Address]
    consumer_uris: list[Address]
    declare_uris: list[Address]


def _roles(every: list[str] | None, *roles: list[str] | None) -> _Roles:
    """Returns the addresses of publishers, consumers and declaring clients."""
    publish, consume, declare = (
        [Address.parse(text) for text in texts or every or (DEFAULT_URI,)] for texts in roles
    )
    return {"publisher_uris": publish, "consumer_uris": consume, "declare_uris": declare}


def _pairs(option: str, texts: list[str] | None) -> dict[str, bool | int | str]:
    """Reads k=v pairs: integers and booleans as such, everything else as text."""
    found: dict[str, bool | int | str] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"{option} takes key=value, not {text!r}")
        if value in ("true", "false"):
            found[key] = value == "true"
        else:
            try:
                found[key] = int(value)
            except ValueError:
                found[key] = value
    return found


def _properties(
    properties: list[str] | None, headers: list[str] | None, *, persistent: bool
) -> Properties:
    """Properties of the messages. Raises ValueError."""
    found: dict[str, object] = {"delivery_mode": 2} if persistent else {}
    found |= _pairs("--property", properties)
    if headers:
        found["headers"] = Table.of(_pairs("--header", headers))
    names = {name for name, _ in Properties.FIELDS}
    for name in found.keys() - names:
        raise ValueError(f"there is no message property {name!r}")
    if "expiration" in found:
        found["expiration"] = str(found["expiration"])
    return msgspec.convert(found, Properties)


def perf(
    uri: Annotated[list[str] | None, typer.Option(help="Node for every role; repeatable.")] = None,
    pub_uri: Annotated[list[str] | None, typer.Option(help="Nodes of the publishers.")] = None,
    cons_uri: Annotated[list[str] | None, typer.Option(help="Nodes of the consumers.")] = None,
    decl_uri: DeclaringOption = None,
    protocol: Annotated[str, typer.Option(help="amqp091 or amqp10.")] = "amqp091",
    queue_type: TypeOption = "quorum",
    declare_args: ArgumentsOption = None,
    queues: Annotated[int, typer.Option(help="Client i works on queue i mod QUEUES.")] = 1,
    publishers: int = 1,
    consumers: int = 1,
    queue_prefix: Annotated[str, typer.Option(help="Queues are called PREFIX-k.")] = "perf",
    size: Annotated[int, typer.Option(help="Body size in bytes.")] = 1024,
    persistent: bool = False,
    property: PropertyOption = None,
    header: HeaderOption = None,
    distinct: DistinctOption = 0,
    in_flight: Annotated[int, typer.Option(help="Unconfirmed messages per publisher.")] = 1000,
    prefetch: int = 1000,
    ack_every: Annotated[int, typer.Option(help="Ack after N; 0 = none; -N: 1.0 modified.")] = 50,
    seconds: Annotated[float, typer.Option(help="Measured window.")] = 15.0,
    warmup: Annotated[float, typer.Option(help="Seconds before the window.")] = 2.0,
    drain: Annotated[float, typer.Option(help="Seconds to wait for the rest at the end.")] = 20.0,
    rate: Annotated[float, typer.Option(help="Messages/s over all publishers; 0 = all.")] = 0.0,
    variable_rate: VariableRateOption = None,
    count: Annotated[int, typer.Option(help="Publish (or consume) exactly N instead.")] = 0,
    mode: Annotated[str, typer.Option(help="both, pub, cons.")] = "both",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the queues behind.")] = False,
    no_delete_first: Annotated[bool, typer.Option("--no-delete-first")] = False,
    verify: VerifyOption = False,
    pids: Annotated[str, typer.Option(help="Broker processes to meter, a,b,c.")] = "",
    kill_pid: Annotated[int, typer.Option(help="Process that gets a signal.")] = 0,
    kill_at: Annotated[float, typer.Option(help="… so many seconds after the start.")] = 0.0,
    kill_sig: Annotated[int, typer.Option(help="The signal's number.")] = 9,
    progress: Annotated[bool, typer.Option("--progress", help="A line a second.")] = False,
    label: str = "",
    histogram: HistogramOption = None,
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Publish and consume at an AMQP broker; measure and check (exit code 1 with a table)."""
    with _refused():
        plan = Plan(
            **_roles(uri, pub_uri, cons_uri, decl_uri),
            protocol=protocol,
            queue_type=queue_type,
            declare_arguments=_pairs("--declare-args", declare_args),
            queues=queues, publishers=publishers, consumers=consumers,
            queue_prefix=queue_prefix,
            size=size,
            properties=_properties(property, header, persistent=persistent),
            distinct=distinct,
            in_flight=in_flight,
            prefetch=prefetch,
            ack_every=ack_every,
            seconds=seconds,
            warmup=warmup,
            drain=drain,
            rate=rate,
            variable_rates=steps_in(variable_rate or ()),
            count=count,
            mode=mode,
            keep=keep,
            delete_first=not no_delete_first,
            verify=verify,
            pids=[int(pid) for pid in pids.split(",") if pid],
            kill_pid=kill_pid, kill_at=kill_at, kill_signal=kill_sig, label=label,
        )  # fmt: skip
    lines = progress or not sys.stderr.isatty()
    _measure(Run(plan), lines=lines, as_json=format == "json", page=histogram)


@contextmanager
def _refused() -> Iterator[None]:
    """A value that cannot be read is a wrong parameter."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _measure(run: Run, *, lines: bool, as_json: bool, page: Path | None) -> None:
    """Runs the plan, prints its report and writes the page of its latencies."""
    install_signal_handlers()
    try:
        report = _run(run, lines=lines, quiet=as_json)
        if page is not None:
            known = {"confirm": run.confirm_latency, "end to end": run.e2e_latency}
            page.write_text(latency_page(run.plan.label or "convoy perf", known))
    except (OSError, BrokerSaid) as error:
        print(f"perf: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(report))
        return
    _print_table(report)

    broken = ("missing", "out_of_order", "bad", "foreign")
    explained = _number(report, "redelivered") + _number(report, "resent")
    if any(report[key] for key in broken) or _number(report, "duplicates") > explained:
        raise typer.Exit(1)


def _number(report: Mapping[str, object], name: str) -> int:
    number = report[name]
    assert isinstance(number, int)
    return number


def _run(run: Run, *, lines: bool, quiet: bool) -> dict[str, object]:
    if lines:
        run.on_progress = None if quiet else _line
        return run.run()
    if quiet:
        return run.run()
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=2, transient=True) as live:
        run.on_progress = _live(live)
        return run.run()


def _line(now: Progress) -> None:
    print(
        f"{now.seconds:6.1f} s  {now.phase:<9}  published {now.published:>12,}  "
        f"confirmed {now.confirmed:>12,}  consumed {now.consumed:>12,}  "
        f"in flight {now.in_flight:>6,}  reconnects {now.reconnects}",
        file=sys.stderr,
        flush=True,
    )


def _live(live: Live) -> Callable[[Progress], None]:
    from rich.table import Table

    last = [0.0, 0, 0]

    def show(now: Progress) -> None:
        elapsed = max(1e-6, now.seconds - last[0])
        table = Table("phase", "s", "confirmed/s", "consumed/s", "confirmed", "consumed")
        table.add_row(
            now.phase,
            f"{now.seconds:.0f}",
            f"{(now.confirmed - last[1]) / elapsed:,.0f}",
            f"{(now.consumed - last[2]) / elapsed:,.0f}",
            f"{now.confirmed:,}",
            f"{now.consumed:,}",
        )
        last[:] = [now.seconds, now.confirmed, now.consumed]
        live.update(table)

    return show


def _print_table(report: Mapping[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("measure", "value", title=str(report["label"] or "convoy perf"))
    for key, value in report.items():
        if isinstance(value, dict):
            text = "  ".join(f"{name} {number / 1000:,.2f}" for name, number in value.items())
            table.add_row(key.replace("_us", " (ms)"), text)
        elif isinstance(value, float):
            table.add_row(key, f"{value:,.2f}")
        elif isinstance(value, int):
            table.add_row(key, f"{value:,}")
        elif key != "label":
            table.add_row(key, str(value))
    Console().print(table)
