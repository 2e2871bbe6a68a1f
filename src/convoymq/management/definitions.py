"""Definitions: the whole tree as one JSON document, out and in.

Import merges: it creates what is missing and leaves what exists with other properties as it is.
Order: users, virtual hosts, permissions, queues and exchanges, bindings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convoymq import __version__
from convoymq.cluster.access import SHA256
from convoymq.cluster.commands import PutPermission, PutTopicPermission, PutUser, PutVhost
from convoymq.management import resources
from convoymq.management.messages import table_from_json
from convoymq.model.errors import PreconditionFailed
from convoymq.queues.broker import Broker
from convoymq.routing.types import RESERVED_PREFIX

_ENTITY = ("name", "vhost", "durable", "auto_delete", "arguments")


def export(broker: Broker, vhost: str | None = None) -> dict[str, Any]:
    """Returns all definitions, or those of one virtual host. Messages, exclusive queues and what is
    always there are left out."""
    tree = broker.metadata.tree
    visible = {vhost} if vhost is not None else set(tree.vhosts)
    queues = [
        {
            "name": queue.name,
            "vhost": place.name,
            "durable": queue.durable,
            "auto_delete": queue.auto_delete,
            "arguments": queue.arguments.to_plain(),
        }
        for place in resources.vhosts_of(broker, visible)
        for queue in place.topology.queues()
        if queue.exclusive_owner is None
    ]
    kept = {(queue["vhost"], queue["name"]) for queue in queues}
    exchanges = [
        {key: row[key] for key in (*_ENTITY, "type", "internal")}
        for row in resources.exchanges(broker, visible)
        if row["name"] and not row["name"].startswith(RESERVED_PREFIX)
    ]
    bindings = [
        {key: value for key, value in row.items() if key != "properties_key"}
        for row in resources.bindings(broker, visible)
        if row["source"]
        and (row["destination_type"] != "queue" or (row["vhost"], row["destination"]) in kept)
    ]
    document: dict[str, Any] = {
        "rabbit_version": resources.COMPATIBLE_VERSION,
        "rabbitmq_version": resources.COMPATIBLE_VERSION,
        "product_name": "ConvoyMQ",
        "product_version": __version__,
    }
    if vhost is not None:
        document |= {
            "rabbitmq_definition_format": "single_virtual_host",
            "original_vhost_name": vhost,
            "explanation": f"Definitions of virtual host '{vhost}'",
            "parameters": [],
            "policies": [],
        }
        for rows in (queues, exchanges, bindings):
            for row in rows:
                row.pop("vhost")
    else:
        document |= {
            "rabbitmq_definition_format": "cluster",
            "original_cluster_name": broker.cluster_name,
            "explanation": f"Definitions of cluster '{broker.cluster_name}'",
            "users": [resources.user_row(tree.users[name]) for name in sorted(tree.users)],
            "vhosts": [
                resources.vhost_row(place) for place in resources.vhosts_of(broker, visible)
            ],
            "permissions": resources.permissions(broker),
            "topic_permissions": resources.topic_permissions(broker),
            "parameters": [],
            "global_parameters": [],
            "policies": [],
        }
    return document | {"queues": queues, "exchanges": exchanges, "bindings": bindings}


async def load(broker: Broker, document: Mapping[str, Any], vhost: str | None = None) -> None:
    """Creates what the document describes; with `vhost`, everything goes there.

    Raises:
        PreconditionFailed: a part of it is malformed or not acceptable; what came before stays.
    """
    try:
        if vhost is None:
            await _load_access(broker, document)
        await _load_topology(broker, document, vhost)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PreconditionFailed(f"malformed definitions: {error!r}") from error


async def _load_access(broker: Broker, document: Mapping[str, Any]) -> None:
    store = broker.metadata
    for user in document.get("users", ()):
        await store.execute(
            PutUser(
                name=user["name"],
                password_hash=user.get("password_hash", ""),
                algorithm=user.get("hashing_algorithm", SHA256),
                tags=tags_of(user.get("tags", ())),
            )
        )
    for vhost in document.get("vhosts", ()):
        if vhost["name"] not in store.tree.vhosts:
            await store.execute(vhost_command(vhost["name"], vhost))
    for rule in document.get("permissions", ()):
        await store.execute(
            PutPermission(**{k: rule[k] for k in ("user", "vhost", "configure", "write", "read")})
        )
    for rule in document.get("topic_permissions", ()):
        await store.execute(
            PutTopicPermission(
                **{k: rule[k] for k in ("user", "vhost", "exchange", "write", "read")}
            )
        )


async def _load_topology(broker: Broker, document: Mapping[str, Any], only: str | None) -> None:
    tree = broker.metadata.tree
    for row in document.get("exchanges", ()):
        vhost = only or row["vhost"]
        known = tree.vhosts.get(vhost)
        if known is None or all(e.name != row["name"] for e in known.topology.exchanges()):
            await broker.declare_exchange(
                vhost,
                row["name"],
                row["type"],
                durable=bool(row.get("durable", True)),
                auto_delete=bool(row.get("auto_delete", False)),
                internal=bool(row.get("internal", False)),
                arguments=table_from_json(row.get("arguments") or {}),
            )
    for row in document.get("queues", ()):
        vhost = only or row["vhost"]
        known = tree.vhosts.get(vhost)
        if known is None or row["name"] not in known.queues:
            await broker.declare_queue(
                vhost,
                row["name"],
                durable=bool(row.get("durable", True)),
                exclusive=False,
                auto_delete=bool(row.get("auto_delete", False)),
                arguments=table_from_json(row.get("arguments") or {}),
            )
    for row in document.get("bindings", ()):
        vhost = only or row["vhost"]
        bind = broker.bind_queue if row["destination_type"] == "queue" else broker.bind_exchange
        arguments = table_from_json(row.get("arguments") or {})
        await bind(vhost, row["destination"], row["source"], row.get("routing_key", ""), arguments)


def vhost_command(name: str, body: Mapping[str, Any]) -> PutVhost:
    """Returns the command for a virtual host's JSON."""
    meta = body.get("metadata") or {}
    default = body.get("default_queue_type") or meta.get("default_queue_type") or ""
    return PutVhost(
        name=name,
        description=str(body.get("description") or meta.get("description") or ""),
        tags=tags_of(body.get("tags") or meta.get("tags") or ()),
        default_queue_type="" if default == "undefined" else str(default),
    )


def tags_of(value: Any) -> tuple[str, ...]:
    """Returns tags given as a list or as words between commas."""
    words = value.split(",") if isinstance(value, str) else value
    return tuple(str(word).strip() for word in words if str(word).strip())
