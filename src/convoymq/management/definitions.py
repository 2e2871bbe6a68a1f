"""Definitions: the whole tree as one JSON document, out and in.

Import merges: it creates what is missing and leaves what exists with other properties as it is.
Order: users, virtual hosts, limits, permissions, policies, exchanges and queues, bindings. What is
not served (parameters of components that there are not, protected virtual hosts, parts with other
names) is refused by name before anything is changed, and so is a policy that is not acceptable;
empty lists and objects are fine, as exports hold them. Operator policies and limits of virtual
hosts are parameters, as in RabbitMQ's documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from convoymq import __version__
from convoymq.broker.facade import Broker
from convoymq.management import policy_rows, resources
from convoymq.management.fields import tags_of, truth
from convoymq.management.messages import table_from_json
from convoymq.metadata.access import SHA256
from convoymq.metadata.commands import (
    PutPermission,
    PutPolicy,
    PutSetting,
    PutTopicPermission,
    PutUser,
    PutUserLimit,
    PutVhost,
    PutVhostLimit,
)
from convoymq.metadata.snapshot import POLICIES_VERSION
from convoymq.model.compatibility import COMPATIBLE_VERSION
from convoymq.model.errors import PreconditionFailed
from convoymq.model.json import JsonObject
from convoymq.model.tables import Table
from convoymq.routing.types import RESERVED_PREFIX, Destination, DestinationKind

NAMED_MAX = 20
"""Of what is refused, how much the answer names."""

#: What a document says of itself.
_NOTES = frozenset((
    "rabbit_version", "rabbitmq_version", "product_name", "product_version",
    "rabbitmq_definition_format", "original_cluster_name", "original_vhost_name", "explanation",
    "description", "metadata", "default_queue_type",
))  # fmt: skip
_PARTS = ("policies", "parameters", "queues", "exchanges", "bindings")
_ACCESS = ("users", "vhosts", "permissions", "topic_permissions", "global_parameters")
#: The name is taken over; the identity belongs to the cluster that was exported.
_GLOBAL_PARAMETERS = frozenset(("cluster_name", "internal_cluster_id", "cluster_tags"))
_ENTITY = ("name", "vhost", "durable", "auto_delete", "arguments")


def export(broker: Broker, vhost: str | None = None) -> JsonObject:
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
        if row["name"] and not str(row["name"]).startswith(RESERVED_PREFIX)
    ]
    bindings = [
        {key: value for key, value in row.items() if key != "properties_key"}
        for row in resources.bindings(broker, visible)
        if row["source"]
        and (row["destination_type"] != "queue" or (row["vhost"], row["destination"]) in kept)
    ]
    document: JsonObject = {
        "rabbit_version": COMPATIBLE_VERSION,
        "rabbitmq_version": COMPATIBLE_VERSION,
        "product_name": "ConvoyMQ",
        "product_version": __version__,
    }
    if vhost is not None:
        document |= {
            "rabbitmq_definition_format": "single_virtual_host",
            "original_vhost_name": vhost,
            "explanation": f"Definitions of virtual host '{vhost}'",
            "parameters": (parameters := policy_rows.parameter_rows(broker, visible)),
            "policies": (policies := policy_rows.policy_rows(broker, visible, operator=False)),
        }
        for rows in (queues, exchanges, bindings, parameters, policies):
            for row in rows:
                row.pop("vhost")
    else:
        document |= {
            "rabbitmq_definition_format": "cluster",
            "original_cluster_name": broker.cluster_name,
            "explanation": f"Definitions of cluster '{broker.cluster_name}'",
            "users": [
                resources.user_row(tree.users[name], tree.user_limits.get(name))
                for name in sorted(tree.users)
            ],
            "vhosts": [
                resources.vhost_row(place) for place in resources.vhosts_of(broker, visible)
            ],
            "permissions": resources.permissions(broker),
            "topic_permissions": resources.topic_permissions(broker),
            "parameters": policy_rows.parameter_rows(broker, visible),
            "global_parameters": [{"name": "cluster_name", "value": broker.cluster_name}],
            "policies": policy_rows.policy_rows(broker, visible, operator=False),
        }
    return document | {"queues": queues, "exchanges": exchanges, "bindings": bindings}


async def load(broker: Broker, document: Mapping[str, object], vhost: str | None = None) -> None:
    """Creates what the document describes; with `vhost`, everything goes there.

    Raises:
        PreconditionFailed: a part of it is malformed or not acceptable; what came before stays.
    """
    refused = list(unserved(document, single=vhost is not None))
    if refused:
        named = ", ".join(refused[:NAMED_MAX])
        more = f" and {len(refused) - NAMED_MAX} more" if len(refused) > NAMED_MAX else ""
        raise PreconditionFailed(f"not served, so nothing was imported: {named}{more}")
    commands = list(_policy_commands(document, vhost))
    if commands and broker.metadata.tree.version < POLICIES_VERSION:
        raise PreconditionFailed(
            "not served, so nothing was imported: policies and limits, as long as some nodes have "
            "an older release"
        )
    if vhost is None:
        await _load_access(broker, document)
    for command in commands:
        await broker.metadata.execute(command)
    await _load_topology(broker, document, vhost)


def unserved(document: Mapping[str, object], *, single: bool = False) -> Iterator[str]:
    """Yields the names of what a document asks for and this broker does not do.

    Raises:
        PreconditionFailed: a part that should be a list of objects is something else.
    """
    for key, value in document.items():
        known = key in _NOTES or key in _PARTS or (key in _ACCESS and not single)
        if not known and value not in ([], {}, None, ""):
            yield key
    for key in (*_PARTS, *_ACCESS):
        _rows(document, key)
    for row in _rows(document, "parameters"):
        component, name = row.get("component"), row.get("name")
        known = component == policy_rows.OPERATOR_POLICY or (
            component == policy_rows.VHOST_LIMITS_COMPONENT and name == policy_rows.LIMITS
        )
        if not known:
            yield _place(f"parameter of {component}", row)
    for row in _rows(document, "global_parameters"):
        if str(row.get("name")) not in _GLOBAL_PARAMETERS:
            yield _place("global parameter", row)
    for row in _rows(document, "vhosts"):
        yield from unserved_of_vhost(str(row.get("name")), row)


def unserved_of_vhost(name: str, row: Mapping[str, object]) -> Iterator[str]:
    """Yields the names of what a virtual host's JSON asks for and this broker does not do."""
    meta = row.get("metadata")
    if row.get("tracing") in (True, "true"):
        yield f"tracing of virtual host '{name}'"
    for source in (row, meta if isinstance(meta, dict) else {}):
        if source.get("protected_from_deletion") in (True, "true"):
            yield f"protection from deletion of virtual host '{name}'"


def _place(word: str, row: Mapping[str, object]) -> str:
    where = f" in virtual host '{row['vhost']}'" if "vhost" in row else ""
    return f"{word} '{row.get('name')}'{where}"


def _policy_commands(
    document: Mapping[str, object], only: str | None
) -> Iterator[PutPolicy | PutUserLimit | PutVhostLimit]:
    """Yields the commands for the limits and policies of a document. Raises PreconditionFailed."""
    if only is None:
        for row in _rows(document, "users"):
            yield from policy_rows.user_limit_commands(_text(row, "name"), row.get("limits"))
        for row in _rows(document, "vhosts"):
            yield from policy_rows.vhost_limit_commands(_text(row, "name"), row.get("limits"))
    for row in _rows(document, "parameters"):
        yield from policy_rows.parameter_commands(
            only or _text(row, "vhost"),
            _text(row, "component"),
            _text(row, "name"),
            row.get("value"),
        )
    for row in _rows(document, "policies"):
        vhost, name = only or _text(row, "vhost"), _text(row, "name")
        yield policy_rows.policy_command(vhost, name, row, operator=False)


async def _load_access(broker: Broker, document: Mapping[str, object]) -> None:
    store = broker.metadata
    for row in _rows(document, "global_parameters"):
        if row.get("name") == "cluster_name":
            name = _text(row, "value")
            await store.execute(PutSetting(name="cluster_name", value=name))
    for user in _rows(document, "users"):
        await store.execute(
            PutUser(
                name=_text(user, "name"),
                password_hash=_text(user, "password_hash", ""),
                algorithm=_text(user, "hashing_algorithm", SHA256),
                tags=tags_of(user.get("tags", ())),
            )
        )
    for vhost in _rows(document, "vhosts"):
        name = _text(vhost, "name")
        if name not in store.tree.vhosts:
            await store.execute(vhost_command(name, vhost))
    for rule in _rows(document, "permissions"):
        keys = ("user", "vhost", "configure", "write", "read")
        await store.execute(PutPermission(**{key: _text(rule, key) for key in keys}))
    for rule in _rows(document, "topic_permissions"):
        keys = ("user", "vhost", "exchange", "write", "read")
        await store.execute(PutTopicPermission(**{key: _text(rule, key) for key in keys}))


async def _load_topology(broker: Broker, document: Mapping[str, object], only: str | None) -> None:
    tree = broker.metadata.tree
    for row in _rows(document, "exchanges"):
        vhost, name = only or _text(row, "vhost"), _text(row, "name")
        known = tree.vhosts.get(vhost)
        if known is None or known.topology.find_exchange(name) is None:
            await broker.declarations.declare_exchange(
                vhost,
                name,
                _text(row, "type"),
                durable=truth(row.get("durable", True)),
                auto_delete=truth(row.get("auto_delete", False)),
                internal=truth(row.get("internal", False)),
                arguments=_table(row),
            )
    for row in _rows(document, "queues"):
        vhost, name = only or _text(row, "vhost"), _text(row, "name")
        known = tree.vhosts.get(vhost)
        if known is None or name not in known.queues:
            await broker.declarations.declare_queue(
                vhost,
                name,
                durable=truth(row.get("durable", True)),
                exclusive=False,
                auto_delete=truth(row.get("auto_delete", False)),
                arguments=_table(row),
            )
    for row in _rows(document, "bindings"):
        kind = _text(row, "destination_type")
        if kind not in ("queue", "exchange"):
            raise PreconditionFailed("malformed definitions: destination_type of a binding")
        await broker.declarations.bind(
            only or _text(row, "vhost"),
            _text(row, "source"),
            Destination(DestinationKind(kind), _text(row, "destination")),
            _text(row, "routing_key", ""),
            _table(row),
        )


def _rows(document: Mapping[str, object], key: str) -> Sequence[JsonObject]:
    rows = document.get(key) or ()
    if not isinstance(rows, list | tuple) or not all(isinstance(row, dict) for row in rows):
        raise PreconditionFailed(f"malformed definitions: {key} is not a list of objects")
    return rows


def _text(row: Mapping[str, object], key: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise PreconditionFailed(f"malformed definitions: {key} is missing or not a string")
    return value


def _table(row: Mapping[str, object]) -> Table:
    value = row.get("arguments") or {}
    if not isinstance(value, dict):
        raise PreconditionFailed("malformed definitions: arguments are not an object")
    return table_from_json(value)


def vhost_command(name: str, body: Mapping[str, object]) -> PutVhost:
    """Returns the command for a virtual host's JSON."""
    refused = list(unserved_of_vhost(name, body))
    if refused:
        raise PreconditionFailed(f"not served: {', '.join(refused)}")
    meta = body.get("metadata") or {}
    if not isinstance(meta, dict):
        raise PreconditionFailed("key metadata is not an object")
    default = body.get("default_queue_type") or meta.get("default_queue_type") or ""
    return PutVhost(
        name=name,
        description=str(body.get("description") or meta.get("description") or ""),
        tags=tags_of(body.get("tags") or meta.get("tags") or ()),
        default_queue_type="" if default == "undefined" else str(default),
    )
