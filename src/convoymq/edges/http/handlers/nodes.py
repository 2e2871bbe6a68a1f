"""Nodes: what they are and use, and removing one."""

from __future__ import annotations

from convoymq.broker.changes import ForgetNode
from convoymq.edges.http import resources
from convoymq.edges.http.bodies import ApiError, bad_request
from convoymq.edges.http.call import DONE, Call, Status, object_not_found
from convoymq.edges.http.fields import number, object_in, text_in
from convoymq.edges.http.json_values import count_in
from convoymq.edges.http.routes import Routes
from convoymq.model import machine_rows
from convoymq.model.errors import PreconditionFailed
from convoymq.model.json import JsonObject
from convoymq.model.slices import in_slices

routes = Routes()

LOG_LEVELS = ("debug", "info", "warning", "error", "none")
MEMORY_OF_KINDS = {"quorum": "quorum_queue_procs", "stream": "stream_queue_procs"}
"""Kind of machine -> RabbitMQ's name for what the indexes of such queues take."""
MEMORY_PARTS = (
    "connection_readers", "connection_writers", "connection_channels", "connection_other",
    "queue_procs", "quorum_queue_procs", "stream_queue_procs", "stream_queue_replica_reader_procs",
    "stream_queue_coordinator_procs", "plugins", "metadata_store", "other_proc", "metrics",
    "mgmt_db", "mnesia", "quorum_ets", "metadata_store_ets", "other_ets", "binary", "msg_index",
    "code", "atom", "other_system", "allocated_unused", "reserved_unallocated",
)  # fmt: skip
"""All parts that RabbitMQ has, which some clients need; here most are in `other_proc`."""


@routes.listing("nodes")
async def nodes(call: Call) -> list[JsonObject]:
    call.need(call.is_monitor)
    return await resources.nodes(call.broker, call.rates, call.ranges)


@routes.listing("convoy/machines")
async def machines(call: Call) -> list[JsonObject]:
    """Lists machines: the row of a machine's first process, with the sums of all."""
    return machine_rows.machines(await nodes(call))


@routes.add("GET", "nodes/{node}")
async def node(call: Call) -> JsonObject:
    for row in await nodes(call):
        if row["name"] == call.path["node"]:
            return row
    raise object_not_found()


@routes.add("GET", "nodes/{node}/memory")
async def node_memory(call: Call) -> JsonObject:
    """Tells what takes the memory of this node; of others the total. What is not counted is in
    `other_proc`."""
    row = await node(call)
    parts, total = await _memory_parts(call, row), count_in(row, "mem_used")
    totals = {"rss": total, "allocated": total, "erlang": total}
    return {"memory": {**parts, "strategy": "rss", "total": totals}}


@routes.add("GET", "nodes/{node}/memory/relative")
async def node_memory_shares(call: Call) -> JsonObject:
    """Tells the same in percent; what is there has 1 at least."""
    parts = await _memory_parts(call, await node(call))
    total = sum(parts.values()) or 1
    shares = {name: max(round(100 * part / total), part > 0) for name, part in parts.items()}
    return {"memory": {**shares, "total": 100}}


async def _memory_parts(call: Call, row: JsonObject) -> dict[str, int]:
    """Returns the bytes of each part of a node's memory."""
    broker, parts = call.broker, dict.fromkeys(MEMORY_PARTS, 0)
    if row["name"] == broker.node_name:
        async for kind, size in in_slices(broker.replicas.index_bytes()):
            if (name := MEMORY_OF_KINDS.get(kind)) is not None:
                parts[name] += size
        parts["binary"] = broker.replicas.storage().memory_bytes
    parts["other_proc"] = max(0, count_in(row, "mem_used") - sum(parts.values()))
    return parts


@routes.add("DELETE", "convoy/nodes/{node}")
async def forget_node(call: Call) -> Status:
    """Removes a node, by number or name, from all queues, and then from the cluster. `force`: even
    if it runs, or if queues cannot let go of it now."""
    call.need(call.is_administrator)
    broker, force = call.broker, call.flag("force")
    found = broker.tree.nodes.find(call.path["node"])
    if found is None:
        raise object_not_found()
    number = found.id
    try:
        broker.membership.check_forget(number, force=force)
        rows = await broker.membership.release(number, broker.group_size_of, forced=force)
        failed = [row for row in rows if row["result"] != "ok"]
        if failed and not force:
            raise PreconditionFailed(
                f"node {number} is still a member of {len(failed)} queues, of queue "
                f"'{failed[0]['name']}' in vhost '{failed[0]['vhost']}' for instance: "
                f"{failed[0]['result']}"
            )
        # A node may have been forgotten or declared needed meanwhile.
        broker.membership.check_forget(number, force=force)
        await broker.tree.execute(ForgetNode(id=number))
    except PreconditionFailed as error:
        raise ApiError(409, "conflict", error.text) from None
    return Status(DONE)


@routes.add("PUT", "convoy/node/watermarks")
async def put_watermarks(call: Call) -> Status:
    """Moves this node's alarms until its next start: `memory` and `disk`, in bytes as `absolute` or
    as a share of the machine's memory as `relative`."""
    call.need(call.is_administrator)
    body, marks = await call.json(), call.broker.node.watermarks
    if marks is None:
        raise bad_request("memory and disk are not watched here")
    memory, disk = (_bytes_in(body, key, marks.machine_memory) for key in ("memory", "disk"))
    if memory is not None:
        marks.memory = memory
    if disk is not None:
        marks.disk = disk
    return Status(DONE)


@routes.add("PUT", "convoy/node/log_level")
async def put_log_level(call: Call) -> Status:
    """Has this node leave out lines of its log below `level`, until its next start."""
    call.need(call.is_administrator)
    level = text_in(await call.json(keys=("level",)), "level")
    if level not in LOG_LEVELS:
        raise bad_request(f"level is one of {', '.join(LOG_LEVELS)}, not {level!r}")
    call.broker.node.set_log_level(level)
    return Status(DONE)


@routes.add("POST", "convoy/node/log/rotate")
async def rotate_log(call: Call) -> Status:
    """Has the log of this node go on in a new file of its name."""
    call.need(call.is_administrator)
    call.broker.node.reopen_log()
    return Status(DONE)


@routes.add("POST", "convoy/node/config/reload")
async def reload_config(call: Call) -> JsonObject:
    """Reads the configuration of this node again."""
    call.need(call.is_administrator)
    return call.broker.node.reload()


def _bytes_in(body: JsonObject, key: str, whole: int) -> int | None:
    """Returns a size, or a share of `whole`; None without one. Raises ApiError."""
    given = object_in(body, key)
    if not given:
        return None
    match given:
        case {"absolute": int(size)} if len(given) == 1 and size >= 0:
            return size
        case {"relative": int(share) | float(share)} if len(given) == 1 and share >= 0:
            if key == "disk" or share <= 1:
                return int(share * whole)
    raise bad_request(f"{key} is neither a size (absolute) nor a share (relative)")


@routes.add("GET", "convoy/nodes/{node}/groups")
async def groups_of_node(call: Call) -> JsonObject:
    """Counts the groups that have the node as a member; a forgotten one should end with 0."""
    call.need(call.is_monitor)
    node = number(call.path["node"])
    if node is None:
        raise object_not_found()
    return {"groups": call.broker.membership.groups_with(node)}


@routes.add("GET", "convoy/node")
async def own_node(call: Call) -> JsonObject:
    """Describes the node that answers, for `convoy status`."""
    call.need(call.is_monitor)
    broker = call.broker
    replicas = broker.replicas.counts()
    local, proxied = broker.local.deliveries()
    counters = broker.counters.as_dict()
    skew_ms, skewed = broker.node.clock_skew()
    return {
        "state": "running" if broker.tree.leader is not None else "no majority",
        "id": broker.node_id,
        "name": broker.node_name,
        "cluster_name": broker.cluster_name,
        "metadata_leader": broker.tree.leader,
        "metadata_voters": broker.replicas.metadata_voters(),
        "groups_led": replicas.led,
        "groups_followed": replicas.followed,
        "replicas_behind": replicas.lacking,
        "replicas_stopped": broker.local.stopped_rows(),
        "versions": broker.replicas.versions(),
        "connections": len(broker.connections),
        "published": counters["published"],
        "confirmed": counters["confirmed"],
        "delivered": counters["delivered"] + counters["delivered_no_ack"],
        "deliveries_local": local,
        "deliveries_proxied": proxied,
        "alarms": sorted({*broker.alarms.effective, *(("clock",) if skewed else ())}),
        "clock_skew_ms": skew_ms,
        "uptime_ms": broker.cluster.uptime_ms,
        "links": broker.node.links(),
        **broker.node.info(),
    }
