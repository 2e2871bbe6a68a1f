"""Commands for support and for runbooks: memory by what takes it, queues that do not answer, a
report of everything, and checks that runbooks still name."""

from __future__ import annotations

from convoymq.cli.ctl import lists, permissions, policies
from convoymq.cli.ctl.arguments import VHOST, Switch
from convoymq.cli.ctl.cluster import cluster_status, status
from convoymq.cli.ctl.command import (
    CTL,
    DIAGNOSTICS,
    QUEUES,
    Command,
    Invocation,
    execute,
    object_of,
    pick,
    plain,
)
from convoymq.cli.ctl.failures import UNAVAILABLE, Failure, Misused
from convoymq.cli.ctl.formatting import rows_as
from convoymq.cli.ctl.listeners import said_of_single_node
from convoymq.cli.ctl.outputs import Output, Rows, Text
from convoymq.model.compatibility import COMPATIBLE_VERSION
from convoymq.model.json import JsonObject

BOTH = (CTL, DIAGNOSTICS)
UNITS = {"bytes": 1, "mb": 1_000_000, "gb": 1_000_000_000}
ATTEMPTS = ("protocol", "auth_attempts", "auth_attempts_failed", "auth_attempts_succeeded")
TIME_UNITS = ("days", "weeks", "months", "years")
CERTIFICATE_UNITS, CERTIFICATE_UNIT = 4, "weeks"
REPORTED = (lists.COMMANDS, permissions.COMMANDS, policies.COMMANDS)
REPORTED_ONCE = ("list_connections", "list_channels")
REPORTED_OF_VHOSTS = (
    "list_queues", "list_exchanges", "list_bindings", "list_permissions", "list_policies",
    "list_parameters",
)  # fmt: skip


def _check_unit(invocation: Invocation) -> None:
    unit = invocation.value("unit", "gb")
    if unit.lower() not in UNITS:
        raise Misused(f"unit '{unit}' is not supported. Please use one of: bytes, mb, gb")


def _memory_breakdown(invocation: Invocation) -> Output:
    unit = invocation.value("unit", "gb").lower()
    invocation.words["node"] = invocation.node
    memory = object_of(object_of(invocation.call("GET", "nodes/{node}/memory"))["memory"])  # type: ignore[arg-type]
    parts = {name: size for name, size in memory.items() if isinstance(size, int) and size}
    whole = sum(parts.values()) or 1
    shares: JsonObject = {
        name: {"bytes": size, "percentage": round(100 * size / whole, 2)}
        for name, size in sorted(parts.items(), key=lambda part: -part[1])
    }
    lines = [
        f"{name}: {round(size / UNITS[unit], 4):g} {unit} ({round(100 * size / whole, 2)}%)"
        for name, size in sorted(parts.items(), key=lambda part: -part[1])
    ]
    return Text("\n".join(lines), shares)


def _list_unresponsive(invocation: Invocation) -> Output:
    columns = tuple(name for word in invocation.rest for name in word.split(",")) or ("name",)
    rows = [
        {name: row.get(name) for name in columns}
        for row in invocation.get("queues/{vhost}")
        if row.get("state") in lists.OFFLINE_STATES
        and (not invocation.flag("local") or row.get("node") == invocation.node)
    ]
    return Rows(columns, rows)


def _report(invocation: Invocation) -> Output:
    commands = {command.name: command for table in REPORTED for command in table}
    parts = [_shown("Status", status(invocation))]
    parts.append(_shown("Cluster status", cluster_status(invocation)))
    parts += [_listed(invocation, commands[name], "") for name in REPORTED_ONCE]
    for row in invocation.get("vhosts"):
        vhost = str(row["name"])
        parts += [_listed(invocation, commands[name], vhost) for name in REPORTED_OF_VHOSTS]
    return Text("\n\n".join(parts))


def _listed(invocation: Invocation, command: Command, vhost: str) -> str:
    """Returns a list with all of its columns, or why there is none."""
    columns = list(command.columns) if any(a.endswith("*") for a in command.arguments) else []
    words = {"vhost": vhost} if vhost else {}
    silent = Invocation(command, words, columns, {}, invocation.api, lambda _text: None)
    title = f"{command.name} -p {vhost}" if vhost else command.name
    try:
        return _shown(title, execute(silent))
    except Failure as failure:
        return f"{title}\n\n{failure.text}"


def _shown(title: str, output: Output) -> str:
    match output:
        case Text(text):
            body = text
        case Rows():
            body = "\n".join(rows_as("table", output.columns, output.rows, headers=True))
        case _:
            body = ""
    return f"{title}\n\n{body or '(none)'}"


def _check_within(invocation: Invocation) -> None:
    unit = invocation.value("unit", CERTIFICATE_UNIT)
    if unit not in TIME_UNITS:
        raise Misused(f"unit '{unit}' is not supported. Please use one of: {', '.join(TIME_UNITS)}")


def _check_certificates(invocation: Invocation) -> Output:
    within = invocation.value("within", CERTIFICATE_UNITS)
    unit = invocation.value("unit", CERTIFICATE_UNIT)
    path = f"health/checks/certificate-expiration/{within}/{unit}"
    answer = invocation.api.request("GET", path)
    if answer.status < 300:
        label = unit[:-1] if within == 1 else unit
        text = f"No certificates are expiring within {within} {label}."
        return Text(text, {"result": "ok"})
    found = object_of(answer.content).get("expired")
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    lines = [
        f"{row['protocol']} on port {row['port']}: {row['certfile']} ends on"
        f" {row['certfile_expires_on']}"
        for row in rows
    ]
    shown: JsonObject = {"result": "error", "expired": rows}
    raise Failure(UNAVAILABLE, "\n".join(lines) or answer.reason, document=shown)


def _check_mirrors(invocation: Invocation) -> Output:
    node = invocation.node
    if (alone := said_of_single_node(invocation)) is not None:
        return alone
    invocation.call("GET", "health/checks/node-is-mirror-sync-critical")
    text = f"Node {node} reported no classic mirrored queues without online synchronised mirrors"
    return Text(text, {"result": "ok"})


def _check_mirroring_policies(invocation: Invocation) -> Output:
    found = [*invocation.get("policies"), *invocation.get("operator-policies")]
    names = [
        str(row["name"])
        for row in found
        if any(key.startswith("ha-") for key in object_of(row["definition"]))  # type: ignore[arg-type]
    ]
    if names:
        text = f"Policies that enable mirroring: {', '.join(names)}"
        raise Failure(UNAVAILABLE, text, document={"result": "error", "policies": list(names)})
    text = "Cluster reported no policies that enable classic queue mirroring"
    return Text(text, {"result": "ok"})


def _version(invocation: Invocation) -> Output:
    return Text(COMPATIBLE_VERSION, {"version": COMPATIBLE_VERSION})


def _list_auth_attempts(invocation: Invocation) -> Output:
    node = invocation.words["node"] = invocation.node
    attempts = invocation.get("auth/attempts/{node}")
    document: JsonObject = {"result": "ok", "node": node, "attempts": attempts}
    if not attempts:
        return Text(f"Node {node} reported no authentication attempt stats", document)
    rows = [pick(plain(*ATTEMPTS), ATTEMPTS, row) for row in attempts]
    return Rows(ATTEMPTS, rows, document=document)


def _reset_auth_attempts(invocation: Invocation) -> Output:
    invocation.words["node"] = invocation.node
    invocation.call("DELETE", "auth/attempts/{node}")
    return None


COMMANDS = (
    Command(
        "version",
        "Displays the RabbitMQ version that the tools are compatible with",
        tools=BOTH,
        run=_version,
    ),
    Command(
        "list_node_auth_attempt_stats",
        "Lists authentication attempts on the target node",
        tools=BOTH,
        banner='Listing authentication attempts for node "{node}" ...',
        run=_list_auth_attempts,
    ),
    Command(
        "reset_node_auth_attempt_metrics",
        "Resets auth attempt metrics on the target node",
        tools=BOTH,
        banner="Reset auth attempt metrics on node {node} ...",
        run=_reset_auth_attempts,
    ),
    Command(
        "memory_breakdown",
        "Provides a memory usage breakdown on the target node.",
        tools=(DIAGNOSTICS,),
        switches=(Switch("unit", str),),
        check=_check_unit,
        banner="Reporting memory breakdown on node {node}...",
        run=_memory_breakdown,
    ),
    Command(
        "list_unresponsive_queues column*",
        "Lists the queues that answer nobody now",
        tools=BOTH,
        switches=(VHOST, Switch("local")),
        banner="Listing unresponsive queues for vhost {vhost} ...",
        columns={name: name for name in ("name", "durable", "auto_delete", "arguments", "state")},
        shown=("name",),
        run=_list_unresponsive,
        absent_ok=True,
    ),
    Command(
        "report",
        "Generates a server status report, for support",
        tools=BOTH,
        banner="Reporting server status of node {node} ...",
        run=_report,
    ),
    Command(
        "check_certificate_expiration",
        "Checks the expiration date on the certificates for every listener configured to use TLS",
        tools=(DIAGNOSTICS,),
        switches=(Switch("within", int), Switch("unit", str)),
        check=_check_within,
        banner="Checking certificate expiration on node {node} ...",
        run=_check_certificates,
    ),
    Command(
        "check_if_node_is_mirror_sync_critical",
        "Health check that exits with a non-zero code if there are classic mirrored queues "
        "without online synchronised mirrors",
        tools=(QUEUES, DIAGNOSTICS),
        banner="Checking if node {node} is critical for data safety of any classic mirrored "
        "queues ...",
        run=_check_mirrors,
    ),
    Command(
        "check_if_cluster_has_classic_queue_mirroring_policy",
        "Health check that exits with a non-zero code if there are policies for mirrored queues",
        tools=(QUEUES, DIAGNOSTICS),
        banner="Checking if cluster {node} has any classic queue mirroring policy ...",
        run=_check_mirroring_policies,
    ),
)
