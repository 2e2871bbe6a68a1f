"""The cluster and its nodes: status, membership, start-up, watermarks, feature flags."""

from __future__ import annotations

import time

from convoymq.cli.ctl.arguments import Switch
from convoymq.cli.ctl.command import (
    CTL,
    DIAGNOSTICS,
    Command,
    Invocation,
    Request,
    Row,
    object_of,
    plain,
)
from convoymq.cli.ctl.failures import DATA, TIMED_OUT, UNAVAILABLE, Failure, Misused, Problem
from convoymq.cli.ctl.listeners import (
    alarms_of,
    listener_lines,
    listeners_of,
    nodes_of,
    own_listeners,
)
from convoymq.cli.ctl.outputs import Output, Rows, Text
from convoymq.model.config.values import parse_bytes
from convoymq.model.json import Json, JsonObject

BOTH = (CTL, DIAGNOSTICS)
START_TIMEOUT_S = 300
FORGET_TIMEOUT_S = 30
POLL_S = 0.2
GIGABYTE = 1_000_000_000
MEMORY_SHARE_MAX = 1000.0


def cluster_status(invocation: Invocation) -> Output:
    """Nodes, versions, alarms and listeners of the cluster."""
    overview = object_of(invocation.call("GET", "overview"))
    nodes, listeners = nodes_of(invocation), listeners_of(invocation)
    running = [str(node["name"]) for node in nodes if node.get("running")]
    own, others = alarms_of(invocation)
    release = overview["rabbitmq_version"]
    status: JsonObject = {
        "alarms": [*own, *others],
        "cluster_name": overview["cluster_name"],
        "cluster_tags": [],
        "cpu_cores": {n["name"]: n["processors"] for n in nodes if "processors" in n},
        "disk_nodes": [node["name"] for node in nodes],
        "ram_nodes": [],
        "feature_flags": invocation.get("feature-flags"),
        "listeners": {name: [row for row in listeners if row["node"] == name] for name in running},
        "maintenance_status": {str(node["name"]): _maintenance(node) for node in nodes},
        "partitions": {
            str(node["name"]): node["partitions"] for node in nodes if node.get("partitions")
        },
        "running_nodes": running,
        "versions": {
            str(node["name"]): {
                "rabbitmq_name": "ConvoyMQ",
                "rabbitmq_version": release,
                "convoymq_version": node["release"],
            }
            for node in nodes
            if node.get("running")
        },
    }
    return Text(_cluster_text(status, [r for r in listeners if r["node"] in running]), status)


def _maintenance(node: Row) -> str:
    return "marked for maintenance" if node.get("being_drained") else "not under maintenance"


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, "", *(lines or ["(none)"]), ""]


def _cluster_text(status: JsonObject, listeners: list[Row]) -> str:
    def names(key: str) -> list[str]:
        found = status[key]
        assert isinstance(found, list)
        return [str(name) for name in found]

    def facts(key: str) -> dict[str, JsonObject]:
        found = status[key]
        assert isinstance(found, dict)
        return found

    versions = [
        f"{node}: ConvoyMQ {row['convoymq_version']} (RabbitMQ {row['rabbitmq_version']})"
        for node, row in facts("versions").items()
    ]
    maintenance = [f"Node: {n}, status: {s}" for n, s in facts("maintenance_status").items()]
    cores = [f"Node: {node}, available CPU cores: {n}" for node, n in facts("cpu_cores").items()]
    partitions = [
        f"Node {node} cannot communicate with {', '.join(map(str, cut))}"
        for node, cut in facts("partitions").items()
    ]
    flags = status["feature_flags"]
    assert isinstance(flags, list)
    lines = [
        *_section("Basics", [f"Cluster name: {status['cluster_name']}"]),
        *_section("Disk Nodes", names("disk_nodes")),
        *_section("Running Nodes", names("running_nodes")),
        *_section("Versions", versions),
        *_section("CPU Cores", cores),
        *_section("Maintenance status", maintenance),
        *_section("Alarms", names("alarms")),
        *_section("Network Partitions", partitions),
        *_section("Listeners", listener_lines(listeners, nodes=True)),
        *_section("Feature flags", [f"Flag: {f['name']}, state: {f['state']}" for f in flags]),
    ]
    return "\n".join(lines).rstrip("\n")


def status(invocation: Invocation) -> Output:
    """Returns one node: process, memory, disk, totals, listeners."""
    overview = object_of(invocation.call("GET", "overview"))
    invocation.words["node"] = invocation.node
    node = object_of(invocation.call("GET", "nodes/{node}"))
    totals = object_of(overview["object_totals"])  # type: ignore[arg-type]
    own, others = alarms_of(invocation)
    found: JsonObject = {
        "pid": int(str(node["os_pid"])),
        "os": "Linux",
        "product_name": overview["product_name"],
        "product_version": overview["product_version"],
        "rabbitmq_version": overview["rabbitmq_version"],
        "uptime": _number(node, "uptime") // 1000,
        "is_under_maintenance": bool(node.get("being_drained")),
        "processes": {"used": node["proc_used"], "limit": node["proc_total"]},
        "run_queue": node["run_queue"],
        "net_ticktime": node["net_ticktime"],
        "active_plugins": [],
        "tags": [],
        # A node of an earlier release does not say where its files are.
        "data_directory": node.get("db_dir", ""),
        "raft_data_directory": node.get("raft_data_directory", ""),
        "config_files": node.get("config_files", []),
        "log_files": node.get("log_files", []),
        "alarms": [*own, *others],
        "memory": {"strategy": "rss", "total": {"rss": node["mem_used"]}},
        "vm_memory_calculation_strategy": "rss",
        "vm_memory_high_watermark_setting": node.get("vm_memory_high_watermark_setting", {}),
        "vm_memory_high_watermark_limit": node["mem_limit"],
        "file_descriptors": {
            "total_used": node["fd_used"],
            "total_limit": node["fd_total"],
            "sockets_used": node["sockets_used"],
            "sockets_limit": node["sockets_total"],
        },
        "disk_free": node["disk_free"],
        "disk_free_limit": node["disk_free_limit"],
        "totals": {
            "connection_count": node["connections"],
            "queue_count": totals["queues"],
            "virtual_host_count": len(invocation.get("vhosts")),
        },
        "listeners": own_listeners(invocation),
    }
    return Text(_status_text(found, invocation.node, node), found)


def _number(row: Row, key: str) -> int:
    value = row.get(key, 0)
    assert isinstance(value, int)
    return value


def _gb(count: int) -> str:
    return f"{round(count / GIGABYTE, 4)} gb"


def _watermark(setting: JsonObject) -> str:
    match setting:
        case {"relative": share}:
            return f"{share} of available memory, "
        case {"absolute": int(size)}:
            return f"{_gb(size)}, "
    return ""


def _status_text(found: JsonObject, name: str, node: Row) -> str:
    def part(key: str) -> JsonObject:
        value = found[key]
        assert isinstance(value, dict)
        return value

    def files_of(key: str) -> list[str]:
        value = found[key]
        assert isinstance(value, list)
        return [f" * {name}" for name in value]

    listeners, alarms = found["listeners"], found["alarms"]
    assert isinstance(listeners, list)
    assert isinstance(alarms, list)
    files, totals = part("file_descriptors"), part("totals")
    lines = [
        *_section("Runtime", [
            f"OS PID: {found['pid']}",
            "OS: Linux",
            f"Uptime (seconds): {found['uptime']}",
            f"Is under maintenance?: {str(found['is_under_maintenance']).lower()}",
            f"RabbitMQ version: {found['rabbitmq_version']}",
            f"ConvoyMQ version: {found['product_version']}",
            f"Node name: {name}",
        ]),
        *_section("Data directory", [
            f"Node data directory: {found['data_directory']}",
            f"Raft data directory: {found['raft_data_directory']}",
        ]),
        *_section("Config files", files_of("config_files")),
        *_section("Log file(s)", files_of("log_files")),
        *_section("Alarms", [str(each) for each in alarms]),
        *_section("Memory", [
            f"Total memory used: {_gb(_number(node, 'mem_used'))}",
            "Calculation strategy: rss",
            f"Memory high watermark setting: {_watermark(part('vm_memory_high_watermark_setting'))}"
            f"computed to: {_gb(_number(node, 'mem_limit'))}",
        ]),
        *_section("File Descriptors", [
            f"Total: {files['total_used']}, limit: {files['total_limit']}",
            f"Sockets: {files['sockets_used']}, limit: {files['sockets_limit']}",
        ]),
        *_section("Free Disk Space", [
            f"Low free disk space watermark: {_gb(_number(node, 'disk_free_limit'))}",
            f"Free disk space: {_gb(_number(node, 'disk_free'))}",
        ]),
        *_section("Totals", [
            f"Connection count: {totals['connection_count']}",
            f"Queue count: {totals['queue_count']}",
            f"Virtual host count: {totals['virtual_host_count']}",
        ]),
        *_section("Listeners", listener_lines(listeners)),
    ]  # fmt: skip
    return "\n".join(lines).rstrip("\n")


def _forget(invocation: Invocation) -> Output:
    target = invocation.word("target")
    known = [row for row in nodes_of(invocation) if target in (row["name"], str(row["id"]))]
    if not known:
        raise Failure(UNAVAILABLE, "The node selected is not in the cluster.")
    invocation.words["number"] = str(known[0]["id"])
    forced = str(invocation.flag("offline")).lower()
    invocation.call("DELETE", f"convoy/nodes/{{number}}?force={forced}")
    deadline = time.monotonic() + invocation.value("timeout", FORGET_TIMEOUT_S)
    while True:
        left = object_of(invocation.call("GET", "convoy/nodes/{number}/groups"))["groups"]
        if not left:
            return None
        if time.monotonic() > deadline:
            raise Failure(UNAVAILABLE, f"{target} is forgotten, but {left} groups still have it")
        time.sleep(POLL_S)


def _await_startup(invocation: Invocation) -> Output:
    timeout = invocation.value("timeout", START_TIMEOUT_S)
    deadline = time.monotonic() + timeout
    while True:
        try:
            if invocation.api.state().running:
                return None
        except Failure as failure:
            if failure.code != UNAVAILABLE or time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise Failure(TIMED_OUT, f"the node did not start within {timeout} seconds")
        time.sleep(POLL_S)


def _announce_wait(invocation: Invocation) -> None:
    invocation.words["timeout"] = str(invocation.value("timeout", START_TIMEOUT_S))


def _await_online_nodes(invocation: Invocation) -> Output:
    wanted = int(invocation.word("count"))
    deadline = time.monotonic() + invocation.value("timeout", START_TIMEOUT_S)
    while sum(bool(node.get("running")) for node in nodes_of(invocation)) < wanted:
        if time.monotonic() > deadline:
            raise Failure(TIMED_OUT, f"fewer than {wanted} nodes run")
        time.sleep(POLL_S)
    return None


def _check_count(invocation: Invocation) -> None:
    if not invocation.word("count").isdecimal():
        raise Misused("Bad argument: count is not a number")
    _announce_wait(invocation)


def _size(text: str) -> int:
    """Returns a size such as 2GB. Raises Misused."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise Misused("Bad argument.", DATA) from None


def _share(text: str, most: float) -> float:
    """Returns a share of the memory. Raises Misused."""
    try:
        share = float(text)
    except ValueError:
        raise Misused("Bad argument.", DATA) from None
    if not 0 <= share <= most:
        raise Misused(
            f"Bad argument: The threshold should be a fraction between 0.0 and {most}", DATA
        )
    return share


LOG_LEVELS = {
    "debug": "debug", "info": "info", "notice": "warning", "warning": "warning",
    "error": "error", "critical": "error", "alert": "error", "emergency": "error", "none": "none",
}  # fmt: skip
"""RabbitMQ's level -> the next one that nodes have."""


def _set_memory_watermark(invocation: Invocation) -> Output:
    first, second = invocation.word("fraction"), invocation.word("value")
    mark: dict[str, Json]
    if first == "absolute":
        mark, shown = {"absolute": _size(second)}, f"{second} bytes"
    elif second:
        raise Misused("too many arguments.")
    else:
        mark, shown = {"relative": _share(first, 1.0)}, first
    invocation.print_banner(f"Setting memory threshold on {invocation.node} to {shown} ...")
    invocation.call("PUT", "convoy/node/watermarks", {"memory": mark})
    return None


def _set_disk_watermark(invocation: Invocation) -> Output:
    first, second = invocation.word("disk_limit"), invocation.word("fraction")
    mark: dict[str, Json]
    if first == "mem_relative":
        mark = {"relative": _share(second, MEMORY_SHARE_MAX)}
        shown = f"{second} times the total RAM"
    elif second:
        raise Misused("too many arguments.")
    else:
        mark, shown = {"absolute": _size(first)}, f"{first} bytes"
    invocation.print_banner(f"Setting disk free limit on {invocation.node} to {shown} ...")
    invocation.call("PUT", "convoy/node/watermarks", {"disk": mark})
    return None


def _enable_feature_flag(invocation: Invocation) -> Output:
    name = invocation.word("feature_flag")
    everything = name == "all"
    which = "all feature flags" if everything else f'feature flag "{name}"'
    invocation.print_banner(f"Enabling {which} ...")
    states = {row["name"]: row["state"] for row in invocation.get("feature-flags")}
    if not everything and name not in states:
        raise Failure(UNAVAILABLE, f"{name}: feature flag is unsupported")
    wanted = states if everything else {name: states[name]}
    waiting = sorted(str(flag) for flag, state in wanted.items() if state != "enabled")
    if waiting:
        text = "enabled by themselves when every node and queue can do it"
        raise Failure(UNAVAILABLE, f"{', '.join(waiting)}: not enabled yet; they are {text}")
    return None


def _set_log_level(invocation: Invocation) -> Output:
    level = invocation.word("log_level")
    if level not in LOG_LEVELS:
        raise Misused(f"Invalid log level {level}: use one of {', '.join(LOG_LEVELS)}", DATA)
    invocation.print_banner(f'Setting log level to "{level}" ...')
    invocation.call("PUT", "convoy/node/log_level", {"level": LOG_LEVELS[level]})
    return None


def _rotate_logs(invocation: Invocation) -> Output:
    invocation.print_banner(f"Rotating logs for node {invocation.node} ...")
    invocation.call("POST", "convoy/node/log/rotate")
    return None


def _reload_config(invocation: Invocation) -> Output:
    invocation.print_banner(f"Reading the configuration of node {invocation.node} again ...")
    found = object_of(invocation.call("POST", "convoy/node/config/reload"))
    rows: list[JsonObject] = []
    for state, text in (("applied", "applied"), ("restart", "needs a restart")):
        names = found[state]
        assert isinstance(names, list)
        rows += [{"key": name, "state": text} for name in names]
    return Rows(["key", "state"], rows)


COMMANDS = (
    Command(
        "set_log_level log_level",
        "Sets the least level of lines in a node's log until its next start",
        run=_set_log_level,
    ),
    Command(
        "rotate_logs",
        "Has a node open its log file again, after it was moved away",
        run=_rotate_logs,
    ),
    Command(
        "reload_config",
        "Reads a node's configuration again: applies what needs no restart, names the rest",
        run=_reload_config,
    ),
    Command(
        "set_vm_memory_high_watermark fraction value?",
        "Sets the vm_memory_high_watermark setting of a node until its next start",
        run=_set_memory_watermark,
    ),
    Command(
        "set_disk_free_limit disk_limit fraction?",
        "Sets the disk_free_limit setting of a node until its next start",
        run=_set_disk_watermark,
    ),
    Command(
        "cluster_status",
        "Displays all the nodes in the cluster with their versions, alarms and listeners",
        tools=BOTH,
        banner="Cluster status of node {node} ...",
        run=cluster_status,
    ),
    Command(
        "status",
        "Displays status of a node",
        tools=BOTH,
        banner="Status of node {node} ...",
        run=status,
    ),
    Command(
        "forget_cluster_node target",
        "Removes a stopped node from the cluster; --offline: even if queues lose what only it has",
        switches=(Switch("offline"),),
        banner="Removing node {target} from the cluster",
        run=_forget,
        problems={404: Problem(UNAVAILABLE, "The node selected is not in the cluster.")},
    ),
    Command("await_startup", "Waits for the target node to serve clients", run=_await_startup),
    Command(
        "await_online_nodes count",
        "Waits for <count> nodes to join the cluster",
        check=_check_count,
        banner="Will wait for at least {count} nodes to join the cluster of {node}. "
        "Timeout: {timeout} seconds.",
        run=_await_online_nodes,
    ),
    Command(
        "list_feature_flags column*",
        "Lists feature flags",
        tools=BOTH,
        banner="Listing feature flags ...",
        request=Request("GET", "feature-flags"),
        columns=plain("name", "state", "stability", "provided_by", "desc"),
        shown=("name", "state"),
    ),
    Command(
        "enable_feature_flag feature_flag",
        "Says whether a feature flag, or all of them, is enabled: they rise by themselves",
        run=_enable_feature_flag,
    ),
    Command(
        "list_deprecated_features column*",
        "Lists deprecated features",
        tools=BOTH,
        banner="Listing deprecated features ...",
        request=Request("GET", "deprecated-features"),
        columns=plain("name", "deprecation_phase", "state", "provided_by", "desc", "doc_url"),
        shown=("name", "deprecation_phase"),
    ),
)
