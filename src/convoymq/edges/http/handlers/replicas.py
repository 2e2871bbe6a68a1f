"""Members and leaders of replicated queues, and nodes that are drained."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

from convoymq.broker.balance import Strategy
from convoymq.broker.leadership import RATE_DEFAULT, RebalanceRequest
from convoymq.broker.membership import MemberKind
from convoymq.broker.records import QueueRecord
from convoymq.broker.selection import Selection
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import DONE, Call, Status, object_not_found
from convoymq.edges.http.fields import number_in, text_in, truth_in
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject

REBALANCE_TIMEOUT_S = 10.0
"""For an answer of the node that rebalances."""

Choice = TypeVar("Choice", bound=StrEnum)

routes = Routes()


def node_named(call: Call, text: str) -> int:
    """Returns the node of that name or number. Raises 404."""
    for node in call.broker.tree.nodes.all():
        if text in (node.name, str(node.id)):
            return node.id
    raise object_not_found()


def _visible_record(call: Call) -> QueueRecord:
    """Returns the path's queue, for who sees its virtual host. Raises 404 or 401."""
    record = call.broker.tree.queues.find(call.vhost(), call.path["name"])
    if record is None:
        raise object_not_found()
    return record


def _record(call: Call) -> QueueRecord:
    """As `_visible_record`; who changes members is an administrator."""
    call.need(call.is_administrator)
    return _visible_record(call)


def _node_in(call: Call, body: JsonObject) -> int:
    return node_named(call, text_in(body, "node"))


def _choice(body: JsonObject, key: str, kind: type[Choice], default: str) -> Choice:
    text = text_in(body, key, default)
    try:
        return kind(text)
    except ValueError:
        raise bad_request(f"{key} is one of {', '.join(kind)}, not {text!r}") from None


def _selection(body: JsonObject, key: str = "queue_type", default: str = "quorum") -> Selection:
    return Selection(
        type=text_in(body, key, default),
        vhost_pattern=text_in(body, "vhost_pattern", ".*"),
        queue_pattern=text_in(body, "queue_pattern", ".*"),
    )


@routes.add("POST", "queues/quorum/{vhost}/{name}/replicas/add")
async def add_member(call: Call) -> Status:
    record = _record(call)
    body = await call.json()
    kind = _choice(body, "membership", MemberKind, MemberKind.PROMOTABLE)
    await call.broker.membership.add(record, _node_in(call, body), kind)
    return Status(DONE)


@routes.add("DELETE", "queues/quorum/{vhost}/{name}/replicas/delete")
async def delete_member(call: Call) -> Status:
    record = _record(call)
    await call.broker.membership.delete(record, _node_in(call, await call.json()))
    return Status(DONE)


@routes.add("POST", "queues/quorum/replicas/on/{node}/grow")
async def grow(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    node, body = node_named(call, call.path["node"]), await call.json()
    return await call.broker.membership.grow(
        node,
        _choice(body, "strategy", Strategy, Strategy.ALL),
        _selection(body),
        _choice(body, "membership", MemberKind, MemberKind.PROMOTABLE),
    )


@routes.add("POST", "queues/quorum/replicas/grow_to_count")
async def grow_to_count(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    body = await call.json()
    count = number_in(body, "count", None)
    if count is None:
        raise bad_request("key count is missing")
    return await call.broker.membership.grow_to_count(
        count,
        _choice(body, "strategy", Strategy, Strategy.ALL),
        _selection(body),
        _choice(body, "membership", MemberKind, MemberKind.PROMOTABLE),
    )


@routes.add("DELETE", "queues/quorum/replicas/on/{node}/shrink")
async def shrink(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    node, body = node_named(call, call.path["node"]), await call.json()
    return await call.broker.membership.shrink(node, _selection(body))


@routes.add("POST", "queues/quorum/{vhost}/{name}/leader/transfer")
async def transfer(call: Call) -> Status:
    record = _record(call)
    await call.broker.leadership.transfer(record, _node_in(call, await call.json()))
    return Status(DONE)


@routes.add("GET", "queues/quorum/{vhost}/{name}/status")
async def quorum_status(call: Call) -> list[JsonObject]:
    """Returns the state of each member of a queue."""
    return await call.broker.queue_logs.status(_visible_record(call))


@routes.add("GET", "convoy/metadata-store/status")
async def metadata_store_status(call: Call) -> list[JsonObject]:
    """Returns the state of each node's replica of the metadata."""
    call.need(call.is_monitor)
    return await call.broker.queue_logs.metadata_status()


@routes.add("POST", "convoy/queues/{vhost}/{name}/memory/reclaim")
async def reclaim_memory(call: Call) -> Status:
    """The nodes of a queue's members empty their write-ahead logs, and the queue's memory."""
    await call.broker.queue_logs.reclaim_memory(_record(call))
    return Status(DONE)


@routes.add("POST", "convoy/queues/checkpoint")
async def force_checkpoint(call: Call) -> list[JsonObject]:
    """All members of the selected queues save their state."""
    call.need(call.is_administrator)
    return await call.broker.queue_logs.force_checkpoint(_selection(await call.json()))


@routes.add("POST", "convoy/queues/force_boot")
async def force_boot(call: Call) -> list[JsonObject]:
    """Mirrored queues without a master go on with the copies that are there."""
    call.need(call.is_administrator)
    return await call.broker.membership.force_boot()


@routes.add("POST", "rebalance/queues")
async def rebalance(call: Call) -> object:
    """Begins, and answers 204 as RabbitMQ does; with `dry_run` the moves that it would make."""
    call.need(call.is_administrator)
    body = await call.json()
    rate = number_in(body, "rate", RATE_DEFAULT)
    request = RebalanceRequest(
        queues=replace(_selection(body, "type", "all"), mirrored=True),
        by=text_in(body, "by", "count"),
        rate=RATE_DEFAULT if rate is None else rate,
        dry_run=truth_in(body, "dry_run"),
    )
    found = await call.broker.rebalancer.start(request, REBALANCE_TIMEOUT_S)
    return found if request.dry_run else Status(DONE)


@routes.add("GET", "convoy/rebalance")
async def rebalance_progress(call: Call) -> object:
    """Returns the rebalancing that runs, or ran last."""
    call.need(call.is_monitor)
    return await call.broker.rebalancer.progress(REBALANCE_TIMEOUT_S)


@routes.add("POST", "convoy/nodes/{node}/drain")
async def drain(call: Call) -> Status:
    """The node takes no more clients and hands its leaderships over; `machine`: all processes of
    its machine do."""
    return await _set_drained(call, drained=True)


@routes.add("POST", "convoy/nodes/{node}/revive")
async def revive(call: Call) -> Status:
    """Ends `drain`."""
    return await _set_drained(call, drained=False)


async def _set_drained(call: Call, *, drained: bool) -> Status:
    call.need(call.is_administrator)
    node = node_named(call, call.path["node"])
    for each in call.broker.tree.nodes.of_machine(node) if call.flag("machine") else [node]:
        await call.broker.maintenance.set_drained(each, drained=drained)
    return Status(DONE)
