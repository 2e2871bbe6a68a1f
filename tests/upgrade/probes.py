"""What a cluster refuses as long as a node has the release 0.2.0, and the requests that ask for it.

Each probe asks one node for one thing that 0.3.0 brings. `refusals` says by which words each was
refused; "" is one that was accepted.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]

from convoymq.cli.cluster import LocalCluster
from tests.clusters import answered
from tests.faults.traffic import connect

QUORUM = {"x-queue-type": "quorum"}
LETTERS = {"x-dead-letter-exchange": "", "x-overflow": "reject-publish"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "x-message-ttl": {"x-message-ttl": 60_000},
    "x-message-expiry": {"x-message-expiry": "due"},
    "x-expires": {"x-expires": 60_000},
    "x-max-length": {"x-max-length": 5},
    "x-max-length-bytes": {"x-max-length-bytes": 500},
    "x-overflow": {"x-overflow": "reject-publish"},
    "x-dead-letter-exchange": {"x-dead-letter-exchange": ""},
    "x-dead-letter-routing-key": {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "k"},
    "x-dead-letter-strategy": {"x-dead-letter-strategy": "at-least-once"},
    "x-consumer-timeout": {"x-consumer-timeout": 60_000},
    "x-consumer-disconnected-timeout": {"x-consumer-disconnected-timeout": 60_000},
    "x-requeue-position": {"x-requeue-position": "front"},
    "x-priority-mode": {"x-priority-mode": "two-classes"},
    "x-deduplication-count": {"x-deduplication-count": 100},
    "x-deduplication-time": {"x-deduplication-time": 60_000},
    "x-link-resume-timeout": {"x-link-resume-timeout": 60_000},
    "x-delayed-retry-type": {"x-delayed-retry-type": "all", "x-delayed-retry-min": 10},
    "x-delayed-retry-min": {"x-delayed-retry-min": 10},
    "x-delayed-retry-max": {"x-delayed-retry-max": 10},
}
"""Argument of a quorum queue -> arguments of a declaration that has it."""
PROPERTIES: dict[str, dict[str, Any]] = {
    "expiration": {"expiration": "60000"},
    "priority": {"priority": 9},
    "x-delay": {"headers": {"x-delay": 60_000}},
    "x-deliver-at": {"headers": {"x-deliver-at": 4_000_000_000_000}},
    "x-group-id": {"headers": {"x-group-id": "a"}},
}
POLICY = {"pattern": "^nothing$", "definition": {"message-ttl": 1000}, "apply-to": "queues"}


def http(cluster: LocalCluster, node: int, method: str, path: str, body: Any = None) -> Any:
    """A request to the HTTP API of a node. Raises HTTPError."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.nodes[node - 1].http_port}/api/{path}",
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"content-type": "application/json", "authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="},
    )
    with answered(request) as answer:
        content = answer.read()
        return json.loads(content) if content else None


def http_refusal(cluster: LocalCluster, node: int, method: str, path: str, body: Any = None) -> str:
    """Why the HTTP API refuses a request; "" when it does not."""
    try:
        http(cluster, node, method, path, body)
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    return ""


def amqp_refusal(cluster: LocalCluster, node: int, attempt: Callable[[Any], object]) -> str:
    """Why a node closes the channel, or the connection, in which something is tried; "" when it
    does not."""
    connection = connect(cluster, node)
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        attempt(channel)
    except (
        pika.exceptions.ChannelClosedByBroker,
        pika.exceptions.ConnectionClosedByBroker,
    ) as error:
        return str(error.reply_text)
    finally:
        if connection.is_open:
            connection.close()
    return ""


def _declaring(arguments: dict[str, Any]) -> Callable[[Any], object]:
    declared = {**QUORUM, **arguments}
    return lambda channel: channel.queue_declare("early", durable=True, arguments=declared)


def _publishing(queue: str, properties: dict[str, Any]) -> Callable[[Any], object]:
    sent = pika.BasicProperties(delivery_mode=2, **properties)
    return lambda channel: channel.basic_publish("", queue, b"early", sent)


def refusals(cluster: LocalCluster, node: int, queue: str, older: int) -> dict[str, str]:
    """Why a node of the new release refuses each probe.

    Args:
        queue: a quorum queue, which is led by `older`.
        older: a node of the earlier release.
    """
    found: dict[str, str] = {}
    for name, arguments in ARGUMENTS.items():
        found[name] = amqp_refusal(cluster, node, _declaring(arguments))
    for name, properties in PROPERTIES.items():
        found[name] = amqp_refusal(cluster, node, _publishing(queue, properties))
    found["if-empty"] = amqp_refusal(
        cluster, node, lambda channel: channel.queue_delete(queue, if_empty=True)
    )
    place = f"queues/%2F/{queue}"
    for what, method, path, body in (
        ("policies", "PUT", "policies/%2F/early", POLICY),
        ("operator-policies", "PUT", "operator-policies/%2F/early", POLICY),
        ("vhost-limits", "PUT", "vhost-limits/%2F/max-queues", {"value": 500}),
        ("user-limits", "PUT", "user-limits/guest/max-channels", {"value": 500}),
        ("operations", "POST", f"convoy/{place}/messages/delete", {"filter": {}}),
        ("browse", "GET", f"convoy/{place}/messages", None),
        ("scheduled", "GET", f"convoy/{place}/scheduled", None),
        ("prefetch", "PUT", f"convoy/consumers/%2F/{queue}/tag/prefetch", {"prefetch_count": 5}),
        ("drain", "POST", f"convoy/nodes/{older}/drain", None),
        ("rebalance", "POST", "rebalance/queues", {}),
    ):
        found[what] = http_refusal(cluster, node, method, path, body)
    return found


def is_named(name: str, text: str) -> bool:
    """Returns whether a refusal says what is refused, or which node is in the way and why."""
    asked = ARGUMENTS.get(name, {name: None})
    return any(each in text for each in asked) or "older release" in text
