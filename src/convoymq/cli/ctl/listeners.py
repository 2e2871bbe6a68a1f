"""Queries that several commands share: listeners and alarms, under RabbitMQ's words."""

from __future__ import annotations

from collections.abc import Iterable

from convoymq.cli.ctl.command import Invocation, Row, object_of
from convoymq.cli.ctl.outputs import Text
from convoymq.model.json import JsonObject

PURPOSES = {
    "amqp": "AMQP 0-9-1",
    "amqp/ssl": "AMQP 0-9-1 over TLS",
    "http": "HTTP API",
    "http/prometheus": "Prometheus exporter API over HTTP",
    "clustering": "inter-node communication",
}
ALARMS = {"memory": "Memory alarm on node {node}", "disk": "Free disk space alarm on node {node}"}


def listeners_of(invocation: Invocation) -> list[Row]:
    """Returns the listeners of the cluster's nodes."""
    overview = object_of(invocation.call("GET", "overview"))
    rows = overview.get("listeners")
    assert isinstance(rows, list)
    return [
        {
            "interface": row["ip_address"],
            "node": row["node"],
            "port": row["port"],
            "protocol": row["protocol"],
            "purpose": PURPOSES.get(str(row["protocol"]), ""),
        }
        for row in rows
    ]


def own_listeners(invocation: Invocation) -> list[Row]:
    """Returns the listeners of the asked node."""
    return [row for row in listeners_of(invocation) if row["node"] == invocation.node]


def listener_lines(rows: Iterable[Row], *, nodes: bool = False) -> list[str]:
    """Listeners for people."""
    lines = []
    for row in rows:
        interface = f"nterface: {row['interface']}, port: {row['port']}"
        protocol = f"protocol: {row['protocol']}, purpose: {row['purpose']}"
        start = f"Node: {row['node']}, i" if nodes else "I"
        lines.append(f"{start}{interface}, {protocol}")
    return lines


def alarms_of(invocation: Invocation) -> tuple[list[str], list[str]]:
    """Alarms of the asked node, and those of the others."""
    answer = invocation.api.request("GET", "health/checks/alarms")
    rows = object_of(answer.content).get("alarms") or []
    assert isinstance(rows, list)
    own: list[str] = []
    others: list[str] = []
    for row in rows:
        text = ALARMS.get(row["resource"], f"{row['resource']} alarm on node {{node}}")
        (own if row["node"] == invocation.node else others).append(text.format(node=row["node"]))
    return own, others


def nodes_of(invocation: Invocation) -> list[JsonObject]:
    """Returns all nodes of the cluster."""
    return invocation.get("nodes")


def said_of_single_node(invocation: Invocation) -> Text | None:
    """Returns what checks of a cluster say of a node that has no other one; None: it has."""
    if len(nodes_of(invocation)) != 1:
        return None
    text = "seems to be the only one in a single node cluster, the check does not apply"
    document: JsonObject = {"result": "ok", "message": f"Target node {text}"}
    return Text(f"Node {invocation.node} {text}", document)
