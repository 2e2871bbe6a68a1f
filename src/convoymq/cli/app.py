"""Every command of `convoy` but `convoy node`, which `serve` runs without this module."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from convoymq.cli import role_of
from convoymq.cli.api import base_of, delete, get_json
from convoymq.cli.backup.command import backup, restore
from convoymq.cli.cluster import (
    DATA_DEFAULT,
    LocalCluster,
    LocalNode,
    cpu_seconds,
    find_cluster,
    read_state,
    resident_bytes,
)
from convoymq.cli.output import HELP, Format, FormatOption, fail, print_json, show, table
from convoymq.cli.recover import recover
from convoymq.cli.tls import tls_app
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.model.json import Json
from convoymq.model.machine_checks import ERROR, WARNING, machine_findings
from convoymq.model.machine_rows import machines, state_of
from convoymq.model.near_names import hint

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    help="ConvoyMQ: a replicated message broker.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
queues_app = typer.Typer(help="Queues of a running cluster.", no_args_is_help=True)
app.add_typer(queues_app, name="queues")
cluster_app = typer.Typer(help="Members of a running cluster.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")
app.add_typer(tls_app, name="tls")

STATUS_TIMEOUT_S = 10.0
FORGET_TIMEOUT_S = 600.0
"""Queues let go of the node first, 64 at a time."""
LIVE_TIMEOUT_S = 1.0


DataOption = Annotated[
    Path,
    typer.Option("--data", help="Directory of the local cluster; not needed when only one runs."),
]
UrlOption = Annotated[
    str, typer.Option("--url", help="HTTP API of any node, instead of a local cluster.")
]
UserOption = Annotated[
    str, typer.Option("--user", help="user:password for the HTTP API; guest:guest without it.")
]


def _show_version(asked: bool) -> None:
    if asked:
        import convoymq

        print(f"convoy {convoymq.__version__}")
        raise typer.Exit


@app.callback()
def convoy(
    _version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_show_version, is_eager=True,
                     help="Version of this program."),
    ] = False,
) -> None:  # fmt: skip
    """ConvoyMQ: a replicated message broker."""


# -- a local cluster --------------------------------------------------------------------------


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 3,
    processes: Annotated[
        int, typer.Option(help="Processes of each node: it is a machine with so many cores then.")
    ] = 1,
    data: DataOption = DATA_DEFAULT,
    base_port: Annotated[
        int, typer.Option(help="AMQP port of the first node; see below for the others.")
    ] = 5672,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value for all nodes; repeatable.")
    ] = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Run a cluster on this machine, in the foreground, with a live status table.

    Node k listens for AMQP on BASE_PORT + k - 1, for HTTP 10,000 above, for metrics 10,020 above
    and for the other nodes 20,000 above; 100, 200 and 300 above where that would exceed 65,535.
    """
    settings = {}
    for text in set_ or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise fail(f"--set takes KEY=VALUE, not {text!r}", 2)
        settings[key.strip()] = value.strip()
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: stopping.append(got))
    started = time.monotonic()
    _check_machine(data)
    try:
        cluster = LocalCluster(data, nodes, base_port, settings, processes)
        cluster.start()
    except BrokerError as error:
        raise fail(error.text) from None
    code = 0
    try:
        ports = f"AMQP from port {base_port}, HTTP from port {cluster.nodes[0].http_port}"
        _say(f"starting {nodes} nodes in {cluster.data}: {ports}")
        cluster.wait_ready(_say, lambda: stopping)
        took = time.monotonic() - started
        if format_ is Format.JSON and not stopping:
            print_json({"ready_after_s": round(took, 3), "nodes": status_rows(cluster.nodes)})
        _watch(cluster, stopping, took, live=format_ is Format.TABLE)
        if not stopping:
            print("convoy: all nodes have ended", file=sys.stderr)
            code = 1
    except BrokerError as error:
        print(f"convoy: {error.text}", file=sys.stderr)
        code = 1
    finally:
        cluster.stop()
    raise typer.Exit(code)


def _check_machine(data: Path) -> None:
    """Says what there is too little of; ends the command when no node could serve."""
    for finding in machine_findings(data):
        if finding.level == ERROR:
            raise fail(f"{finding.check}: {finding.text}")
        if finding.level == WARNING:
            _say(f"{finding.check}: {finding.text}")


def _say(line: str) -> None:
    print(f"convoy: {line}", file=sys.stderr, flush=True)


def _watch(cluster: LocalCluster, stopping: list[int], took: float, live: bool) -> None:
    """Shows the table until told to stop or until no node is left; without a terminal, a line for
    every change."""
    from rich.console import Console

    console = Console()
    if not live or not console.is_terminal:
        if live:
            show(_status_table(status_rows(cluster.nodes), f"ready after {took:.2f} s"))
        while not stopping and cluster.pids():
            time.sleep(0.1)
            for number in cluster.poll():
                print(f"node {number} ended: {cluster.last_words(number)}", file=sys.stderr)
        return
    from rich.live import Live

    sampler = Sampler()
    title = f"ready after {took:.2f} s · Ctrl-C stops all"
    with Live(console=console, auto_refresh=False) as view:
        while not stopping and cluster.pids():
            cluster.poll()
            rows = status_rows(cluster.nodes, sampler)
            view.update(_status_table(rows, title), refresh=True)
            for _ in range(10):
                if not stopping:
                    time.sleep(0.1)


class NodeRow(TypedDict, total=False):
    """Row of a node in lists; its HTTP API gives what follows `memory_bytes`, if it answers."""

    node: int
    pid: int | None
    state: str
    amqp_port: int
    http_port: int
    metrics_port: int
    link_port: int
    uri: str
    processes: int
    memory_bytes: int
    cpu_cores: float | None
    name: str | None
    leads: int | None
    follows: int | None
    connections: int | None
    alarms: list[str] | None
    versions: dict[str, dict[str, int]] | None
    replicas_stopped: list[dict[str, Json]] | None
    uptime_ms: int | None
    build: Json
    published_per_s: int | None
    delivered_per_s: int | None


class Sampler:
    """Turns counters into rates between calls."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def rate(self, name: str, value: float) -> float | None:
        """Increase per second since the last call for this name; None at the first."""
        now = time.monotonic()
        before = self._before.get(name)
        self._before[name] = (now, value)
        if before is None or value < before[1] or now <= before[0]:
            return None
        return (value - before[1]) / (now - before[0])


def status_rows(nodes: list[LocalNode], sampler: Sampler | None = None) -> list[NodeRow]:
    """Returns one row per node: process, ports, state, and what its HTTP API says of it."""
    rows: list[NodeRow] = []
    for node in nodes:
        row: NodeRow = {
            "node": node.number,
            "pid": node.pid,
            "state": "running" if node.pid is not None else "stopped",
            "amqp_port": node.amqp_port,
            "http_port": node.http_port,
            "metrics_port": node.metrics_port,
            "link_port": node.link_port,
            "uri": node.uri,
            "processes": node.processes,
            "memory_bytes": sum(map(resident_bytes, node.pids())),
        }
        if node.pid is not None:
            if sampler is not None:
                busy = sampler.rate(f"{node.number}.cpu", sum(map(cpu_seconds, node.pids())))
                row["cpu_cores"] = None if busy is None else round(busy, 2)
            row.update(_node_facts(node, sampler))
            if node.processes > 1 and row["state"] != "no answer":
                row.update(_machine_facts(node))
        rows.append(row)
    return rows


def _node_facts(node: LocalNode, sampler: Sampler | None) -> NodeRow:
    # A live table does not stop for a node that is frozen. The first answer of one that has just
    # started takes longer: it imports the HTTP server.
    timeout_s = STATUS_TIMEOUT_S if sampler is None else LIVE_TIMEOUT_S
    try:
        found = get_json(f"http://127.0.0.1:{node.http_port}/api/convoy/node", timeout_s)
    except (Unavailable, LookupError):
        return {"state": "no answer"}
    facts: NodeRow = {
        "state": found.get("state"),
        "name": found.get("name"),
        "leads": found.get("groups_led"),
        "follows": found.get("groups_followed"),
        "connections": found.get("connections"),
        "alarms": found.get("alarms"),
        "versions": found.get("versions"),
        "replicas_stopped": found.get("replicas_stopped"),
        "uptime_ms": found.get("uptime_ms"),
        "build": found.get("build"),
    }
    if sampler is not None:
        published = sampler.rate(f"{node.number}.published", float(found.get("published", 0)))
        facts["published_per_s"] = None if published is None else round(published)
        delivered = sampler.rate(f"{node.number}.delivered", float(found.get("delivered", 0)))
        facts["delivered_per_s"] = None if delivered is None else round(delivered)
    return facts


def _machine_facts(node: LocalNode) -> NodeRow:
    """Returns the sums over the processes of a node: its HTTP API tells of process 1 alone."""
    try:
        found = get_json(f"http://127.0.0.1:{node.http_port}/api/nodes", STATUS_TIMEOUT_S)
    except (Unavailable, LookupError):
        return {}
    own = [row for row in found if row["machine"] == node.number]
    (machine,) = machines(own)
    return {
        "state": f"{sum(row['running'] for row in own)}/{node.processes} running",
        "connections": machine["connections"],
        # Told by each process of itself alone.
        "leads": None,
        "follows": None,
    }


def _versions_text(versions: dict[str, dict[str, int]] | None) -> str | None:
    """`quorum 1 (to 2)`: in force, and the newest that the build supports when it is another."""
    if not versions:
        return None
    parts = []
    for kind, known in versions.items():
        low, high = known.get("in_force_min", 0), known.get("in_force_max", 0)
        if high:
            text = f"{kind} {low}" if low == high else f"{kind} {low}-{high}"
            parts.append(text if high == known["newest"] else f"{text} (to {known['newest']})")
    return ", ".join(parts)


def builds_text(builds: Sequence[tuple[object, object]]) -> str | None:
    """Returns what nodes run, from (node, build): one line for nodes of the same build."""
    nodes_of: dict[object, list[str]] = {}
    for node, build in builds:
        if build is not None:
            nodes_of.setdefault(build, []).append(str(node))
    if len(nodes_of) == 1:
        return f"build: {next(iter(nodes_of))}"
    lines = [f"build of {', '.join(nodes)}: {build}" for build, nodes in nodes_of.items()]
    return "\n".join(lines) or None


def _status_table(rows: list[NodeRow], title: str) -> Table:
    columns = ["node", "pid", "state", "amqp", "http", "metrics", "leads", "follows"]
    columns += ["clients", "in/s", "out/s", "memory MiB", "cores", "versions", "replicas stopped"]
    cells = [
        [
            row["node"],
            row["pid"],
            row["state"],
            row["amqp_port"],
            row["http_port"],
            row["metrics_port"],
            row.get("leads"),
            row.get("follows"),
            row.get("connections"),
            row.get("published_per_s"),
            row.get("delivered_per_s"),
            row["memory_bytes"] >> 20,
            row.get("cpu_cores"),
            _versions_text(row.get("versions")),
            len(row.get("replicas_stopped") or ()) or None,
        ]
        for row in rows
    ]
    builds = builds_text([(f"node {row['node']}", row.get("build")) for row in rows])
    return table(columns, cells, title, builds)


_ROLES = {
    "node": "Run one node: `convoy node --config FILE [--set KEY=VALUE]`.",
    "namesrv": "Run a RocketMQ name server: `convoy namesrv [-c FILE] [--set KEY=VALUE]`.",
    "broker": "Run a RocketMQ broker: `convoy broker [-c FILE] [--set KEY=VALUE]`.",
    "broker-container": "Run several RocketMQ brokers in one process: "
    "`convoy broker-container [-c FILE]`.",
    "bridge": "Move messages between ConvoyMQ and a RocketMQ topic: `convoy bridge -c FILE`.",
}
"""Commands that `cli.main` runs without this module when they come first."""


def _help_of(name: str) -> Callable[[], None]:
    def run() -> None:
        raise typer.Exit(role_of(name)(["--help"]))

    return run


for _name, _help in _ROLES.items():
    app.command(_name, help=_help)(_help_of(_name))


@app.command()
def status(
    data: DataOption = DATA_DEFAULT, url: UrlOption = "", user: UserOption = "",
    processes: Annotated[bool, typer.Option(
        "--processes", help="A line for each process, not for each machine.")] = False,
    format_: FormatOption = Format.TABLE,
) -> None:  # fmt: skip
    """Nodes of a cluster: processes, ports, roles, memory."""
    if processes and not url:
        url = _url(data, url)
    if url:
        found = _ask(url, "nodes", user)
        if format_ is Format.JSON:
            print_json({"nodes": found})
        else:
            columns = ["name", "running", "release", "uptime", "connections", "mem_used"]
            columns += ["mem_alarm", "supported_versions"]
            shown = found
            if not processes:
                shown = [{**row, "running": state_of(row)} for row in machines(found)]
            cells = [[row.get(column) for column in columns] for row in shown]
            builds = builds_text([(row.get("name"), row.get("build")) for row in found])
            show(table(columns, cells, caption=builds))
        return
    nodes = _local_nodes(data)
    rows = status_rows(nodes)
    if format_ is Format.JSON:
        print_json({"nodes": rows})
    else:
        show(_status_table(rows, str(data)))
    if any(row["state"] in ("stopped", "no answer") for row in rows):
        raise typer.Exit(3)


def _ask(url: str, path: str, user: str, missing: str = "") -> Any:
    """GET of a node's HTTP API; `missing` says what is not there when it answers 404."""
    try:
        url, user = base_of(url, user)
        name, _, password = user.partition(":")
        return get_json(f"{url}/api/{path}", 5.0, name, password)
    except BrokerError as error:
        raise fail(error.text) from None
    except LookupError:
        other = f"{url} has no /api/{path}: is it the HTTP API of a node of this release?"
        raise fail(missing or other, 4) from None


def _url(data: Path, url: str, but: int = 0) -> str:
    return url or _urls(data, but)[0]


def _urls(data: Path, but: int = 0) -> list[str]:
    """Returns the HTTP APIs of the nodes of a local cluster that run."""
    running = [node for node in _local_nodes(data) if node.pid is not None and node.number != but]
    if not running:
        raise fail(f"no other node of the cluster in {data} runs; give --url")
    return [f"http://127.0.0.1:{node.http_port}" for node in running]


def _local_nodes(data: Path) -> list[LocalNode]:
    try:
        return read_state(find_cluster(data))
    except BrokerError as error:
        raise fail(error.text) from None


@app.command()
def top(
    data: DataOption = DATA_DEFAULT, url: UrlOption = "", user: UserOption = "",
    list_: Annotated[str, typer.Option("--list", help="queues, nodes or consumers.")] = "queues",
    sort: Annotated[str, typer.Option(help="Order; its first column of numbers without it.")] = "",
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, as JSON.")] = False,
) -> None:  # fmt: skip
    """Show what the cluster does now: queues by rate, nodes, slow consumers."""
    from convoymq.cli import top as shown

    if list_ not in shown.LISTS:
        raise fail(f"--list: there is no {list_}{hint(list_, shown.LISTS)}", 2)
    sorts = shown.LISTS[list_].sorts
    if sort and sort not in sorts:
        raise fail(f"--sort: {list_} have {', '.join(sorts)}{hint(sort, sorts)}", 2)
    urls = [url] if url else _urls(data)
    view = shown.View(list_, sort)
    try:
        if once:
            print(shown.once(urls, user, view))
        elif not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise fail("a terminal is needed; `convoy top --once` prints one look", 2)
        else:
            shown.run(urls, user, interval, view)
    except BrokerError as error:
        raise fail(error.text) from None
    except KeyboardInterrupt:
        pass


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Print what makes a shell complete `convoy`: `eval "$(convoy completion bash)"`."""
    from convoymq.cli.completion import SCRIPTS, candidates

    if shell == "words":
        print("\n".join(candidates(words or [])))
    elif shell in SCRIPTS:
        print(SCRIPTS[shell], end="")
    else:
        raise fail(f"there is no completion for {shell}{hint(shell, SCRIPTS)}", 2)


# -- queues -----------------------------------------------------------------------------------

QUEUE_COLUMNS = {
    "name": "name",
    "vhost": "vhost",
    "type": "type",
    "state": "state",
    "leader": "leader",
    "messages_ready": "ready",
    "messages_unacknowledged": "unacked",
    "messages": "total",
    "consumers": "consumers",
}


@queues_app.command("list")
def queues_list(
    data: DataOption = DATA_DEFAULT, url: UrlOption = "", user: UserOption = "",
    vhost: Annotated[str, typer.Option(help="Only this virtual host.")] = "",
    format_: FormatOption = Format.TABLE,
) -> None:  # fmt: skip
    """All queues with their leaders and counts."""
    from urllib.parse import quote

    path = f"queues/{quote(vhost, safe='')}" if vhost else "queues"
    missing = f"there is no virtual host {vhost!r}" if vhost else ""
    found = _ask(_url(data, url), path, user, missing)
    if format_ is Format.JSON:
        print_json(found)
        return
    rows = [[queue.get(key) for key in QUEUE_COLUMNS] for queue in found]
    show(table(list(QUEUE_COLUMNS.values()), rows))


@queues_app.command("info")
def queues_info(
    name: Annotated[str, typer.Argument(help="Name of the queue.")],
    data: DataOption = DATA_DEFAULT, url: UrlOption = "", user: UserOption = "",
    vhost: Annotated[str, typer.Option(help="Its virtual host.")] = "/",
    format_: FormatOption = Format.TABLE,
) -> None:  # fmt: skip
    """Everything about one queue."""
    from urllib.parse import quote

    path = f"queues/{quote(vhost, safe='')}/{quote(name, safe='')}"
    missing = f"there is no queue {name!r} in virtual host {vhost!r}; see `convoy queues list`"
    found = _ask(_url(data, url), path, user, missing)
    if format_ is Format.JSON:
        print_json(found)
        return
    rows = [
        [key, json.dumps(value) if isinstance(value, (dict, list)) else value]
        for key, value in sorted(found.items())
    ]
    show(table(["what", "value"], rows, name))


# -- members ----------------------------------------------------------------------------------


@cluster_app.command("forget")
def cluster_forget(
    node: Annotated[int, typer.Argument(help="Number of the node.")],
    data: DataOption = DATA_DEFAULT, url: UrlOption = "", user: UserOption = "",
    force: Annotated[bool, typer.Option(
        "--force", help="Even if it runs, and with the queues that only it has.")] = False,
    machine: Annotated[bool, typer.Option(
        "--machine", help="All processes of the node's machine, one after the other.")] = False,
    wait: Annotated[float, typer.Option(
        help="Seconds to wait until no group has it as a member any more.")] = 30.0,
) -> None:  # fmt: skip
    """Remove a stopped node from the cluster for ever; others take over its replicas."""
    base = _url(data, url, but=node)
    nodes = [node]
    if machine:
        rows = _ask(base, "nodes", user)
        places = {row["id"]: row["machine"] for row in rows}
        nodes = [each for each in places if places[each] == places.get(node)] or nodes
    for each in nodes:
        _forget(each, base, user, force, wait)


def _forget(node: int, base: str, user: str, force: bool, wait: float) -> None:
    try:
        base, user = base_of(base, user)
        name, _, password = user.partition(":")
        delete(
            f"{base}/api/convoy/nodes/{node}?force={str(force).lower()}",
            FORGET_TIMEOUT_S,
            name,
            password,
        )
    except BrokerError as error:
        raise fail(error.text) from None
    except LookupError:
        raise fail(f"node {node} is not a member of the cluster", 4) from None
    deadline = time.monotonic() + wait
    while True:
        left = _ask(base, f"convoy/nodes/{node}/groups", user)["groups"]
        if not left:
            print(f"node {node} is forgotten")
            return
        if time.monotonic() > deadline:
            raise fail(f"node {node} is forgotten, but {left} groups still have it", 3)
        time.sleep(0.1)


app.command("recover")(recover)
app.command("backup")(backup)
app.command("restore")(restore)


# -- help for newcomers -----------------------------------------------------------------------


@app.command()
def doctor(
    data: DataOption = DATA_DEFAULT,
    base_port: Annotated[
        int, typer.Option(help="AMQP port of the first node; see below for the others.")
    ] = 5672,
    nodes: int = 3,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Check what a newcomer trips over. Exit code 1 when something keeps a cluster from working."""
    from convoymq.cli import doctor as checks

    found = checks.run(data, base_port, nodes)
    if format_ is Format.JSON:
        print_json([finding.row() for finding in found])
    else:
        from rich.text import Text

        colors = {"ok": "green", "warning": "yellow", "error": "red"}
        rows = [[f.check, Text(f.level, colors[f.level]), f.text] for f in found]
        show(table(["check", "result", "what was found"], rows))
    if any(finding.level == "error" for finding in found):
        raise typer.Exit(1)


@app.command()
def config(
    reference: Annotated[bool, typer.Option(help="Print docs/configuration.md.")] = False,
    file: Annotated[Path | None, typer.Argument(help="Check this file.")] = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """The configuration keys; with FILE, what that file amounts to."""
    import dataclasses

    from convoymq.edges import configuration

    if reference:
        sys.stdout.write(configuration.reference())
        return
    try:
        made = configuration.load(file, os.environ)
    except BrokerError as error:
        raise fail(error.text, 2) from None
    keys = configuration.keys()
    content = {
        section: {
            entry.name: str(getattr(part, entry.name)) if entry.repr else "(hidden)"
            for entry in dataclasses.fields(keys.sections[section])
            if "key" in entry.metadata
        }
        for section in keys.sections
        for part in [keys.part(made, section)]
    }
    if format_ is Format.JSON:
        print_json(content)
        return
    rows = [[s, name, value] for s, part in content.items() for name, value in part.items()]
    show(table(["section", "field", "value"], rows))


_FIRST_WORDS = {
    "perf": "Load tool for any AMQP 0-9-1 broker: `convoy perf --help`.",
    "ctl": "Users, permissions, policies, lists and more as `rabbitmqctl` has them: "
    "`convoy ctl help`.",
    "diagnostics": "Health checks as `rabbitmq-diagnostics` has them: `convoy diagnostics help`.",
    "topics": "Ordered topics: create, split, merge, move, groups: `convoy topics help`.",
    "upgrade": "Maintenance of nodes as `rabbitmq-upgrade` has it: `convoy upgrade help`.",
    "pipeline": "Ready jobs, most of them on Spark: `convoy pipeline --help`.",
}
"""Commands with command lines of their own, which they read when they come first."""


def _comes_first(name: str) -> Callable[[], None]:
    def run() -> None:
        raise fail(f"`{name}` must come first on the command line", 2)

    return run


for _name, _help in _FIRST_WORDS.items():
    app.command(_name, help=_help)(_comes_first(_name))


@app.command()
def version(format_: FormatOption = Format.TABLE) -> None:
    """Version of this program."""
    import convoymq

    if format_ is Format.JSON:
        print_json({"version": convoymq.__version__})
    else:
        print(convoymq.__version__)
