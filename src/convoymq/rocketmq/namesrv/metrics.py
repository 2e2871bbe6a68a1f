"""Metrics of a name server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.edges.http.exposition import Text

if TYPE_CHECKING:
    from convoymq.rocketmq.namesrv.service import NameServer

OWN = "convoy_namesrv_"
HELP = {
    f"{OWN}groups": "Broker groups with a replica that is registered",
    f"{OWN}groups_without_master": "Those whose master is not",
    f"{OWN}replicas": "Replicas that are registered",
    f"{OWN}topics": "Topics that have a route",
    f"{OWN}connections": "Connections of clients and brokers",
    f"{OWN}refused_requests_total": "Answers other than success, by code",
}


def write_name_server(text: Text, server: NameServer) -> None:
    """Writes the metrics of a name server."""
    groups, headless, replicas, topics = server.tables.counts()
    text.gauge(f"{OWN}groups", groups)
    text.gauge(f"{OWN}groups_without_master", headless)
    text.gauge(f"{OWN}replicas", replicas)
    text.gauge(f"{OWN}topics", topics)
    text.gauge(f"{OWN}connections", server.connections)
    for code, count in sorted(server.refused.items()):
        text.counter(f"{OWN}refused_requests_total", count, {"code": str(code)})
