"""Checks of `convoy diagnostics`: 69 when something is not as it should be."""

from __future__ import annotations

import socket

from convoymq.cli.ctl.arguments import VHOST, Switch
from convoymq.cli.ctl.command import (
    CTL,
    DIAGNOSTICS,
    QUEUES,
    UPGRADE,
    Command,
    Invocation,
    Request,
    Row,
    object_of,
    plain,
    rows_of,
)
from convoymq.cli.ctl.failures import DATA, UNAVAILABLE, Failure, Misused
from convoymq.cli.ctl.listeners import alarms_of, listener_lines, own_listeners, said_of_single_node
from convoymq.cli.ctl.outputs import Output, Text
from convoymq.cli.ctl.transport import segment
from convoymq.model.json import JsonObject
from convoymq.model.replica_status import REPLICA_COLUMNS

PORT_MAX = 65_535
CONNECT_TIMEOUT_S = 30.0
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "localhost"}


def _unhealthy(text: str, *, heading: str = "Error:", **document: object) -> Failure:
    shown: JsonObject = {"result": "error", "message": text, **document}
    return Failure(UNAVAILABLE, text, heading=heading, document=shown)


def _ping(invocation: Invocation) -> Output:
    invocation.api.state()
    return Text("Ping succeeded")


def _running_text(invocation: Invocation) -> tuple[bool, str]:
    state = invocation.api.state()
    if state.running:
        return True, f"RabbitMQ on node {state.name} is fully booted and running"
    return False, (
        f"RabbitMQ on node {state.name} is not running or has not fully booted yet "
        "(check with is_booting)"
    )


def _check_running(invocation: Invocation) -> Output:
    running, text = _running_text(invocation)
    if not running:
        raise _unhealthy(text)
    return Text(text)


def _is_running(invocation: Invocation) -> Output:
    running, text = _running_text(invocation)
    return Text(text, {"result": running, "message": text})


def _is_booting(invocation: Invocation) -> Output:
    state = invocation.api.state()
    text = (
        f"RabbitMQ on node {state.name} is fully booted (check with is_running), stopped or has "
        "not started booting yet"
        if state.running
        else f"RabbitMQ on node {state.name} is booting"
    )
    return Text(text, {"result": not state.running, "message": text})


def _server_version(invocation: Invocation) -> Output:
    return Text(str(object_of(invocation.call("GET", "overview"))["rabbitmq_version"]))


def _log_location(invocation: Invocation) -> Output:
    files = object_of(invocation.call("GET", f"nodes/{segment(invocation.node)}"))["log_files"]
    assert isinstance(files, list)
    return Text("\n".join(map(str, files)), {"paths": files})


def _alarms(invocation: Invocation) -> Output:
    own, others = alarms_of(invocation)
    node = invocation.node
    if not own and not others:
        text = f"Node {node} reported no alarms, local or clusterwide"
        return Text(text, {"result": "ok", "node": node, "alarms": []})
    document: JsonObject = {
        "result": "ok",
        "local": own,
        "global": others,
        "message": f"Node {node} reported alarms",
    }
    return Text("\n".join([*own, *others]), document)


def _check_alarms(invocation: Invocation) -> Output:
    own, others = alarms_of(invocation)
    node = invocation.node
    if own or others:
        document: JsonObject = {
            "result": "error",
            "local": own,
            "global": others,
            "message": f"Node {node} reported alarms",
        }
        raise Failure(UNAVAILABLE, "\n".join([*own, *others]), heading="", document=document)
    return Text(f"Node {node} reported no alarms, local or clusterwide", {"result": "ok"})


def _check_local_alarms(invocation: Invocation) -> Output:
    own, _ = alarms_of(invocation)
    if own:
        document: JsonObject = {
            "result": "error",
            "local": own,
            "message": f"Node {invocation.node} reported local alarms",
        }
        raise Failure(UNAVAILABLE, "\n".join(own), document=document)
    return Text(f"Node {invocation.node} reported no local alarms", {"result": "ok"})


def listeners(invocation: Invocation) -> Output:
    """Lists the addresses where the node listens."""
    rows = own_listeners(invocation)
    document: JsonObject = {"result": "ok", "node": invocation.node, "listeners": rows}
    return Text("\n".join(listener_lines(rows)), document)


def _ports(rows: list[Row]) -> str:
    return ", ".join(map(str, sorted({int(str(row["port"])) for row in rows})))


def _check_port(invocation: Invocation) -> None:
    port = invocation.word("port")
    if not port.isdecimal() or not 1 <= int(port) <= PORT_MAX:
        raise Misused(f"Bad argument: {port} is not a port", DATA)


def _check_port_listener(invocation: Invocation) -> Output:
    rows, port, node = own_listeners(invocation), invocation.word("port"), invocation.node
    if all(str(row["port"]) != port for row in rows):
        raise _unhealthy(
            f"No listener for port {port} is active on node {node}. "
            f"Found listeners that use the following ports: {_ports(rows)}",
            heading="",
            missing=port,
            ports=[row["port"] for row in rows],
            listeners=rows,
        )
    document: JsonObject = {"result": "ok", "port": int(port)}
    return Text(f"A listener for port {port} is running on node {node}.", document)


def _check_protocol_listener(invocation: Invocation) -> Output:
    rows, asked, node = own_listeners(invocation), invocation.word("protocol"), invocation.node
    known = sorted({str(row["protocol"]) for row in rows})
    alias = {"amqp091": "amqp", "amqps": "amqp/ssl", "prometheus": "http/prometheus"}
    if alias.get(asked, asked) not in known:
        raise _unhealthy(
            f"No listener for protocol {asked} is active on node {node}. "
            f"Found listeners for the following protocols: {', '.join(known)}",
            missing=asked,
            protocols=known,
        )
    document: JsonObject = {"result": "ok", "protocol": asked}
    return Text(f"A listener for protocol {asked} is running on node {node}.", document)


def _check_port_connectivity(invocation: Invocation) -> Output:
    rows, node = own_listeners(invocation), invocation.node
    failed = []
    for row in rows:
        interface = str(row["interface"])
        host = str(invocation.values.get("address") or LOOPBACK.get(interface, interface))
        try:
            port = int(str(row["port"]))
            socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
        except OSError:
            failed.append(row)
    if failed:
        raise _unhealthy(
            f"Connection to ports of the following listeners on node {node} failed:\n"
            + "\n".join(listener_lines(failed)),
            listeners=failed,
        )
    document: JsonObject = {"result": "ok", "node": node, "listeners": rows}
    return Text(f"Successfully connected to ports {_ports(rows)} on node {node}.", document)


def _check_virtual_hosts(invocation: Invocation) -> Output:
    answer = invocation.api.request("GET", "health/checks/virtual-hosts")
    if answer.status >= 300:
        down = object_of(answer.content).get("virtual-hosts")
        names = [str(name) for name in down] if isinstance(down, list) else []
        text = f"Some virtual hosts on node {invocation.node} are down:\n" + "\n".join(names)
        raise _unhealthy(text, down_virtual_hosts=names)
    return Text(f"Node {invocation.node} reported all vhosts as running", {"result": "ok"})


def _check_queues(invocation: Invocation, check: str, message: str, line: str) -> None:
    """Asks the node for a health check that names queues. Raises Failure with a line for each."""
    answer = invocation.api.request("GET", f"health/checks/{check}")
    if answer.status < 300:
        return
    queues = object_of(answer.content).get("queues")
    rows = [row for row in queues if isinstance(row, dict)] if isinstance(queues, list) else []
    if not rows:
        raise _unhealthy(answer.reason)
    lines = [line.format(queue=row["readable_name"], node=invocation.node) for row in rows]
    shown: JsonObject = {"result": "error", "queues": rows, "message": message}
    raise Failure(UNAVAILABLE, "\n".join(lines), document=shown)


def _check_quorum_critical(invocation: Invocation) -> Output:
    node = invocation.node
    if (alone := said_of_single_node(invocation)) is not None:
        return alone
    _check_queues(
        invocation,
        "node-is-quorum-critical",
        f"Node {node} reported local queues with minimum online quorum",
        "{queue} will become unavailable if node {node} stops",
    )
    text = f"Node {node} reported no queues/streams with minimum quorum"
    return Text(text, {"result": "ok"})


def _check_initial_sync(invocation: Invocation) -> Output:
    node = invocation.node
    _check_queues(
        invocation,
        "quorum-queue-replicas-initial-sync",
        f"Node {node} reported local queues promotable replicas",
        "{queue} hasn't finished synchronization with target node {node}.",
    )
    return Text(f"Node {node} reported no queues with promotable replicas", {"result": "ok"})


def _check_leaders(invocation: Invocation) -> Output:
    scope = "all-vhosts" if invocation.flag("across_all_vhosts") else "vhost/{vhost}"
    path = f"health/checks/quorum-queues-without-elected-leaders/{scope}/pattern/{{pattern}}"
    answer = invocation.api.request("GET", invocation.path(path))
    if answer.status == 503:
        queues = object_of(answer.content).get("queues")
        rows = queues if isinstance(queues, list) else []
        lines = [f"queue '{row['name']}' in vhost '{row['virtual_host']}'" for row in rows]
        raise _unhealthy(
            "Quorum queues without an elected leader:\n" + "\n".join(lines), queues=rows
        )
    if answer.status >= 300:
        invocation.need_present()
        raise Failure(UNAVAILABLE, answer.reason)
    return Text("There are no quorum queues without an elected leader", {"result": "ok"})


def _checked(invocation: Invocation, check: str, failed: str, passed: str) -> Output:
    """Asks the node for a health check whose answer is its reason."""
    answer = invocation.api.request("GET", f"health/checks/{check}")
    if answer.status >= 300:
        raise _unhealthy(f"{failed}: {answer.reason}")
    return Text(passed, {"result": "ok"})


def _check_metadata(invocation: Invocation) -> Output:
    store = f"Metadata store on node {invocation.node} is"
    return _checked(
        invocation, "metadata-store/initialized", f"{store} not ready", f"{store} initialized"
    )


def _check_metadata_data(invocation: Invocation) -> Output:
    store = f"Metadata store on node {invocation.node} is"
    return _checked(
        invocation,
        "metadata-store/initialized/with-data",
        f"{store} not ready",
        f"{store} initialized and has data",
    )


def _check_size(invocation: Invocation) -> Output:
    node = invocation.node
    return _checked(
        invocation,
        "reached-target-cluster-size",
        f"Target cluster size on node {node} has not been reached",
        f"Target cluster size has been reached on node {node}",
    )


def _check_deprecated_features(invocation: Invocation) -> Output:
    used = [str(row["name"]) for row in rows_of(invocation.call("GET", "deprecated-features/used"))]
    if used:
        document: JsonObject = {
            "result": "error",
            "deprecated_features": list(used),
            "message": "Cluster reported deprecated features in use",
        }
        raise Failure(UNAVAILABLE, "\n".join(used), document=document)
    return Text("Cluster reported no deprecated features in use", {"result": "ok"})


COMMANDS = (
    Command(
        "ping",
        "Checks that the node's process runs and answers",
        tools=(CTL, DIAGNOSTICS),
        banner="Will ping {node}. This only checks if the OS process is running and answers.",
        run=_ping,
    ),
    Command(
        "check_running",
        "Health check that exits with a non-zero code if the target node does not serve clients",
        banner="Checking if RabbitMQ is running on node {node} ...",
        run=_check_running,
    ),
    Command(
        "is_running",
        "Checks if RabbitMQ is fully booted and running on the target node",
        banner="Asking node {node} for its status ...",
        run=_is_running,
    ),
    Command(
        "is_booting",
        "Checks if RabbitMQ is still booting on the target node",
        banner="Asking node {node} for its boot status ...",
        run=_is_booting,
    ),
    Command(
        "server_version",
        "Displays the RabbitMQ version that the target node is compatible with",
        banner="Asking node {node} for its RabbitMQ version...",
        run=_server_version,
    ),
    Command(
        "log_location",
        "Shows where the log of the target node goes",
        banner="Log file(s) on node {node} ...",
        run=_log_location,
    ),
    Command(
        "alarms",
        "Lists resource alarms (local or cluster-wide) in effect on the target node",
        banner="Asking node {node} to report any known resource alarms ...",
        run=_alarms,
    ),
    Command(
        "check_alarms",
        "Health check that exits with a non-zero code if the target node reports any "
        "alarms, local or cluster-wide.",
        banner="Asking node {node} to report any local resource alarms ...",
        run=_check_alarms,
    ),
    Command(
        "check_local_alarms",
        "Health check that exits with a non-zero code if the target node reports any local alarms",
        banner="Asking node {node} to report any local resource alarms ...",
        run=_check_local_alarms,
    ),
    Command(
        "listeners",
        "Lists active connection listeners on the target node",
        banner="Asking node {node} to report its protocol listeners ...",
        run=listeners,
    ),
    Command(
        "check_port_listener port",
        "Health check that exits with a non-zero code if target node does not have an "
        "active listener for given port",
        check=_check_port,
        banner="Asking node {node} if there's an active listener on port {port} ...",
        run=_check_port_listener,
    ),
    Command(
        "check_protocol_listener protocol",
        "Health check that exits with a non-zero code if target node does not have an "
        "active listener for given protocol",
        banner="Asking node {node} if there's an active listener for protocol {protocol} ...",
        run=_check_protocol_listener,
    ),
    Command(
        "check_port_connectivity",
        "Basic TCP connectivity health check for each listener's port on the target node",
        switches=(Switch("address", str),),
        banner="Testing TCP connections to all active listeners on node {node} ...",
        run=_check_port_connectivity,
    ),
    Command(
        "check_virtual_hosts",
        "Health check that checks if all vhosts are running in the target node",
        banner="Checking if all vhosts are running on node {node} ...",
        run=_check_virtual_hosts,
    ),
    Command(
        "check_if_any_deprecated_features_are_used",
        "Health check that exits with a non-zero code if deprecated features are in use",
        tools=(CTL, DIAGNOSTICS),
        banner="Checking if any deprecated features are used ...",
        run=_check_deprecated_features,
    ),
    Command(
        "check_if_metadata_store_is_initialized",
        "Health check that exits with a non-zero code if the target node does not have the "
        "cluster's metadata",
        banner="Checking if metadata store on node {node} is initialized ...",
        run=_check_metadata,
    ),
    Command(
        "check_if_metadata_store_is_initialized_with_data",
        "Health check that exits with a non-zero code if the target node does not have the "
        "cluster's metadata with data in it",
        banner="Checking if metadata store on node {node} is initialized and has data ...",
        run=_check_metadata_data,
    ),
    Command(
        "has_reached_target_cluster_size",
        "Health check that exits with a non-zero code if the cluster has not yet reached its "
        "target size",
        tools=(CTL, DIAGNOSTICS, UPGRADE),
        banner="Checking if target cluster size has been reached on node {node} ...",
        run=_check_size,
    ),
    Command(
        "metadata_store_status",
        "Displays the state of each node's replica of the metadata",
        formatter="pretty_table",
        banner="Status of the metadata store on node {node} ...",
        request=Request("GET", "convoy/metadata-store/status"),
        columns=plain(*REPLICA_COLUMNS),
    ),
    Command(
        "check_if_node_is_quorum_critical",
        "Health check that exits with a non-zero code if there are queues with minimum "
        "online quorum (queues that would lose their quorum if the target node is shut down)",
        tools=(DIAGNOSTICS, QUEUES),
        banner="Checking if node {node} is critical for quorum of any queues/streams ...",
        run=_check_quorum_critical,
    ),
    Command(
        "check_if_new_quorum_queue_replicas_have_finished_initial_sync",
        "Health check that exits with a non-zero code while replicas on the target node "
        "are not full members yet",
        tools=(QUEUES, DIAGNOSTICS),
        banner="Checking if node {node} runs promotable replicas of any queues ...",
        run=_check_initial_sync,
    ),
    Command(
        "check_for_quorum_queues_without_an_elected_leader pattern",
        "Health check that exits with a non-zero code if quorum queues that match have no leader",
        tools=(DIAGNOSTICS, QUEUES),
        switches=(VHOST, Switch("across-all-vhosts")),
        banner="Checking for quorum queues without an elected leader ...",
        run=_check_leaders,
    ),
)
