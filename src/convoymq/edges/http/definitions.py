"""Definitions: the whole tree as one JSON document, out and in.

Import merges: it creates what is missing and leaves what exists with other properties as it is.
Order: users, virtual hosts, limits, permissions, policies, exchanges and queues, bindings. All of
it is carried out in a copy of the tree first: when any part is not acceptable, nothing is changed,
and the answer names every part that is not. A dry run ends there. Empty lists and objects are fine,
as exports hold them. Operator policies and limits of virtual hosts are parameters, as in RabbitMQ's
documents. An import may leave out what is not acceptable instead, and lists it.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from convoymq import __version__
from convoymq.broker.changes import Rehearsal
from convoymq.broker.facade import Broker
from convoymq.edges.http import policy_rows, resources
from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.definition_steps import (
    ARGUMENTS_ENCODED,
    Key,
    Step,
    Unusable,
    reason_of,
    steps_of,
)
from convoymq.edges.http.messages import table_from_json
from convoymq.model.compatibility import COMPATIBLE_VERSION
from convoymq.model.errors import BrokerError, PreconditionFailed
from convoymq.model.json import JsonObject
from convoymq.routing.types import (
    RESERVED_PREFIX,
    Binding,
    DestinationKind,
    ExchangeType,
    QueueType,
)

NAMED_MAX = 20
"""Of what is refused, how much a reason names; the list beside it has all."""
_ENTITY = ("name", "vhost", "durable", "auto_delete", "arguments")


@dataclass(slots=True)
class Examination:
    """Preview of an import."""

    steps: list[Step] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Reasons why nothing is imported, a line for each part that is not acceptable."""
    dependent: list[str] = field(default_factory=list)
    """Parts that need a refused one."""
    notes: list[str] = field(default_factory=list)
    """Objects that exist with other properties, and queues that become another type."""
    creates: Counter[str] = field(default_factory=Counter)

    def to_builtins(self) -> JsonObject:
        """As the HTTP API says it."""
        creates = {part: count for part, count in self.creates.items() if count}
        return {"refused": self.refused, "notes": self.notes, "creates": creates}


def _binding_row(vhost: str, binding: Binding) -> JsonObject:
    """Returns a binding, and its arguments as they are where JSON has no form for a type."""
    row = resources.binding_row(vhost, binding)
    del row["properties_key"]
    encoded = binding.arguments.encoded
    try:
        lost = table_from_json(binding.arguments.to_plain()).encoded != encoded
    except PreconditionFailed:
        lost = True
    if lost:
        row[ARGUMENTS_ENCODED] = base64.b64encode(encoded).decode()
    return row


def export(broker: Broker, vhost: str | None = None) -> JsonObject:
    """Returns all definitions, or those of one virtual host. Messages, exclusive queues, ordered
    topics and what is always there are left out."""
    visible = {vhost} if vhost is not None else broker.tree.vhosts.names()
    queues = [
        {
            "name": queue.name,
            "vhost": place.name,
            "durable": queue.durable,
            "auto_delete": queue.auto_delete,
            "arguments": queue.arguments.to_plain(),
        }
        for place in broker.tree.vhosts.all(visible)
        for queue in place.topology.queues()
        if queue.exclusive_owner is None and not queue.type.is_managed
    ]
    kept = {(queue["vhost"], queue["name"]) for queue in queues}
    exchanges = [
        {key: row[key] for key in (*_ENTITY, "type", "internal")}
        for row in resources.exchanges(broker, visible)
        if row["name"]
        and not str(row["name"]).startswith(RESERVED_PREFIX)
        and row["type"] != ExchangeType.ORDERED.value
    ]
    bindings = [
        _binding_row(place.name, binding)
        for place in broker.tree.vhosts.all(visible)
        for binding in place.topology.bindings()
        if binding.destination.kind is not DestinationKind.QUEUE
        or (place.name, binding.destination.name) in kept
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
                resources.user_row(user, broker.tree.users.limits_of(user.name))
                for user in broker.tree.users.all()
            ],
            "vhosts": [
                resources.vhost_row(broker, place) for place in broker.tree.vhosts.all(visible)
            ],
            "permissions": resources.permissions(broker),
            "topic_permissions": resources.topic_permissions(broker),
            "parameters": policy_rows.parameter_rows(broker, visible),
            "global_parameters": policy_rows.global_parameter_rows(broker),
            "policies": policy_rows.policy_rows(broker, visible, operator=False),
        }
    return document | {"queues": queues, "exchanges": exchanges, "bindings": bindings}


async def examine(
    broker: Broker, document: Mapping[str, object], vhost: str | None = None
) -> Examination:
    """Returns what an import would do, and changes nothing. Cost: a copy of the tree, in a thread.

    Args:
        vhost: where everything goes; None: the document says.
    """
    return await asyncio.get_running_loop().run_in_executor(
        None,
        _examine,
        broker.tree.snapshot(),
        document,
        vhost,
        broker.declarations.default_queue_type,
    )


async def load(
    broker: Broker,
    document: Mapping[str, object],
    vhost: str | None = None,
    *,
    user: str,
    skips: bool = False,
) -> list[str]:
    """Creates what the document describes; with `vhost`, everything goes there. Returns what was
    left out.

    Args:
        user: recorded as the one that declared exchanges and queues.
        skips: parts that are not acceptable are left out, and those that need them.
    Raises:
        ApiError: parts of it are not acceptable, so nothing was changed.
        BrokerError: something else has changed meanwhile; what came before stays.
    """
    found = await examine(broker, document, vhost)
    if found.refused and not skips:
        named = "; ".join(found.refused[:NAMED_MAX])
        more = len(found.refused) - NAMED_MAX
        rest = f"; and {more} more" if more > 0 else ""
        raise ApiError(
            400,
            "bad_request",
            f"nothing was imported: {named}{rest}",
            {"refused": found.refused},
        )
    for step in found.steps:
        await step.perform(broker, user)
    return found.refused + found.dependent


def _examine(
    snapshot: bytes, document: Mapping[str, object], vhost: str | None, default: QueueType
) -> Examination:
    rehearsal = Rehearsal(snapshot)
    found = Examination()
    #: What is refused already: what needs it is not worth a line of its own.
    lost: set[Key] = set()
    for step in steps_of(document, vhost, default):
        if isinstance(step, Unusable):
            found.refused.append(step.reason)
            lost.add(step.makes)
            continue
        if not lost.isdisjoint(step.needs):
            lost.add(step.makes)
            found.dependent.append(f"{step.subject}: something that it needs is left out")
            continue
        try:
            tried = step.rehearse(rehearsal)
        except BrokerError as error:
            found.refused.append(reason_of(step.subject, error))
            lost.add(step.makes)
            continue
        found.steps.append(step)
        found.creates[step.part] += tried.created
        found.notes += [tried.note] if tried.note else []
    return found
