"""What RabbitMQ's second `rabbitmqadmin` and its client library for Rust ask for: the program ends
with an error when a field is missing or of another type, so each that it needs is looked at."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from convoymq.edges.http.handlers import ROUTES
from convoymq.edges.http.handlers.nodes import MEMORY_PARTS
from convoymq.edges.http.routes import find
from tests.unit.edges.http.test_api import api, cluster
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]

REQUESTS = """
GET auth/attempts/N · GET bindings · GET bindings/V · POST bindings/V/e/X/q/Q
POST bindings/V/e/X/e/Y · DELETE bindings/V/e/X/q/Q/P · GET queues/V/Q/bindings
GET exchanges/V/X/bindings/source · GET exchanges/V/X/bindings/destination · GET channels
GET vhosts/V/channels · GET connections/C/channels · GET channels/C · GET cluster-name
PUT cluster-name · GET connections · GET connections/C · DELETE connections/C
GET connections/username/U · DELETE connections/username/U · GET vhosts/V/connections
GET stream/connections · GET stream/connections/V · GET stream/publishers
GET stream/publishers/V · GET stream/consumers · GET stream/consumers/V · GET consumers
GET consumers/V · GET definitions · POST definitions · GET definitions/V · POST definitions/V
GET deprecated-features · GET deprecated-features/used · GET exchanges · GET exchanges/V
GET exchanges/V/X · PUT exchanges/V/X · DELETE exchanges/V/X · POST exchanges/V/X/publish
GET feature-flags · PUT feature-flags/F/enable · GET federation-links
GET health/checks/alarms · GET health/checks/local-alarms
GET health/checks/node-is-quorum-critical · GET health/checks/port-listener/1
GET health/checks/protocol-listener/amqp · GET user-limits · GET user-limits/U
PUT user-limits/U/L · DELETE user-limits/U/L · GET vhost-limits · GET vhost-limits/V
PUT vhost-limits/V/L · DELETE vhost-limits/V/L · POST queues/V/Q/get · GET nodes · GET nodes/N
GET nodes/N/memory · GET overview · GET parameters · GET parameters/C · GET parameters/C/V
GET parameters/C/V/N · PUT parameters/C/V/N · DELETE parameters/C/V/N · GET global-parameters
GET global-parameters/N · PUT global-parameters/N · DELETE global-parameters/N · GET permissions
GET vhosts/V/permissions · GET users/U/permissions · GET permissions/V/U · PUT permissions/V/U
DELETE permissions/V/U · GET topic-permissions · GET vhosts/V/topic-permissions
GET users/U/topic-permissions · GET topic-permissions/V/U · PUT topic-permissions/V/U
DELETE topic-permissions/V/U · GET policies · GET policies/V · GET policies/V/P
PUT policies/V/P · DELETE policies/V/P · GET operator-policies · GET operator-policies/V
GET operator-policies/V/P · PUT operator-policies/V/P · DELETE operator-policies/V/P
GET queues · GET queues/V · GET queues/detailed · GET queues/V/Q · PUT queues/V/Q
DELETE queues/V/Q · DELETE queues/V/Q/contents · POST rebalance/queues · GET shovels
GET shovels/V · GET users · GET users/without-permissions · GET users/U · PUT users/U
DELETE users/U · POST users/bulk-delete · GET whoami · GET vhosts · GET vhosts/V · PUT vhosts/V
DELETE vhosts/V · POST vhosts/V/deletion/protection · DELETE vhosts/V/deletion/protection
"""

NUMBER, TEXT, TRUTH, OBJECT, LIST = int, str, bool, dict, list
QUEUE = {"name": TEXT, "vhost": TEXT, "type": TEXT, "durable": TRUTH, "auto_delete": TRUTH,
         "exclusive": TRUTH, "arguments": OBJECT}  # fmt: skip
EXCHANGE = {key: kind for key, kind in QUEUE.items() if key != "exclusive"}
PERMISSION = {"user": TEXT, "vhost": TEXT, "configure": TEXT, "read": TEXT, "write": TEXT}
POLICY = {"name": TEXT, "vhost": TEXT, "pattern": TEXT, "apply-to": TEXT, "priority": NUMBER,
          "definition": OBJECT}  # fmt: skip

#: Path -> the fields without which the program fails, of the object or of each row.
NEEDED: dict[str, dict[str, Any]] = {
    "overview": {
        "cluster_name": TEXT, "node": TEXT, "erlang_full_version": TEXT, "erlang_version": TEXT,
        "rabbitmq_version": TEXT, "product_name": TEXT, "product_version": TEXT,
        "statistics_db_event_queue": NUMBER, "message_stats": OBJECT,
        "churn_rates": dict.fromkeys(
            ("connection_created", "connection_closed", "queue_declared", "queue_created",
             "queue_deleted", "channel_created", "channel_closed"), NUMBER),
        "queue_totals": {"messages": NUMBER, "messages_details": OBJECT},
        "object_totals": dict.fromkeys(
            ("connections", "channels", "queues", "exchanges", "consumers"), NUMBER),
        "listeners": LIST,
    },
    "nodes/{node}/memory": {
        "memory": {
            **dict.fromkeys(MEMORY_PARTS, NUMBER), "strategy": TEXT,
            "total": dict.fromkeys(("rss", "allocated", "erlang"), NUMBER),
        },
    },
    "nodes": {"name": TEXT, "rates_mode": TEXT, "enabled_plugins": LIST, "being_drained": TRUTH},
    "cluster-name": {"name": TEXT},
    "whoami": {"name": TEXT, "tags": LIST},
    "queues": QUEUE,
    "queues/detailed": QUEUE,
    "exchanges": EXCHANGE,
    "bindings": {"vhost": TEXT, "source": TEXT, "destination": TEXT, "destination_type": TEXT,
                 "routing_key": TEXT, "arguments": OBJECT},
    "users": {"name": TEXT, "tags": LIST, "password_hash": TEXT},
    "vhosts": {"name": TEXT},
    "permissions": PERMISSION,
    "topic-permissions": {"user": TEXT, "vhost": TEXT, "exchange": TEXT, "read": TEXT,
                          "write": TEXT},
    "policies": POLICY,
    "operator-policies": POLICY,
    "parameters": {"name": TEXT, "vhost": TEXT, "component": TEXT, "value": OBJECT},
    "global-parameters": {"name": TEXT},
    "user-limits": {"user": TEXT, "value": OBJECT},
    "vhost-limits": {"vhost": TEXT, "value": OBJECT},
    "feature-flags": dict.fromkeys(
        ("name", "state", "desc", "doc_url", "stability", "provided_by"), TEXT),
    "deprecated-features": dict.fromkeys(
        ("name", "desc", "deprecation_phase", "doc_url", "provided_by"), TEXT),
}  # fmt: skip

MADE = {
    "queues/%2F/q": {"durable": True, "arguments": {"x-queue-type": "quorum"}},
    "users/u": {"password": "secret", "tags": "monitoring"},
    "permissions/%2F/u": {"configure": "", "write": "", "read": ""},
    "topic-permissions/%2F/u": {"exchange": "amq.topic", "write": "", "read": ""},
    "policies/%2F/p": {"pattern": "x", "definition": {"max-length": 5}},
    "operator-policies/%2F/o": {"pattern": "x", "definition": {"max-length": 5}},
    "user-limits/u/max-channels": {"value": 5},
    "vhost-limits/%2F/max-queues": {"value": 50},
}


@pytest.mark.parametrize("request_line", [line for row in REQUESTS.splitlines()
                                          for line in row.split(" · ") if line])  # fmt: skip
def test_a_request_has_a_handler(request_line: str) -> None:
    method, _, path = request_line.partition(" ")
    find(ROUTES, method, path.split("/"))


async def test_answers_have_the_fields_that_the_program_needs(
    cluster: FakeCluster, api: httpx.AsyncClient
) -> None:
    cluster.raise_versions()
    for path, body in MADE.items():
        assert (await api.put(f"/{path}", json=body)).status_code in (201, 204), path
    [node, *_] = [row["name"] for row in (await api.get("/nodes")).json()]
    for path, needed in NEEDED.items():
        found = (await api.get(f"/{path.format(node=node)}")).json()
        rows = found if isinstance(found, list) else [found]
        assert rows, path
        for row in rows:
            assert lacking(row, needed) == [], path


def lacking(row: Any, needed: dict[str, Any]) -> list[str]:
    """Returns the fields that a row lacks, or has with another type."""
    found = []
    for key, kind in needed.items():
        value = row.get(key)
        if isinstance(kind, dict):
            found += lacking(value if isinstance(value, dict) else {}, kind)
        elif not isinstance(value, kind):
            found.append(f"{key}: {value!r}")
    return found
