"""Queues."""

from __future__ import annotations

from functools import partial

from convoymq.broker.records import QueueRecord
from convoymq.edges.http import resources
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import DONE, Call, Status, object_not_found, put_status
from convoymq.edges.http.fields import number, number_in, table_in, text_in, truth, truth_in
from convoymq.edges.http.json_values import count_in, part
from convoymq.edges.http.lists import Lazy
from convoymq.edges.http.resources import DECLARED_BY
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject

routes = Routes()

DRY_RUN = "dry run"
WAIT_S = 3600
"""Longest wait of an answer for the end of a migration, in seconds; also where the request does not
say."""


@routes.listing("queues")
async def queues(call: Call) -> Lazy[QueueRecord]:
    return await _listed(call, call.visible)


@routes.listing("queues/detailed")
async def queues_detailed(call: Call) -> Lazy[QueueRecord]:
    return await queues(call)


@routes.listing("queues/{vhost}")
async def queues_in(call: Call) -> Lazy[QueueRecord]:
    return await _listed(call, {call.vhost()})


@routes.listing("users/{user}/queues")
async def queues_of_user(call: Call) -> Lazy[QueueRecord]:
    return await _listed(call, call.visible, call.path["user"])


async def _listed(call: Call, visible: set[str], user: str | None = None) -> Lazy[QueueRecord]:
    """Returns the queues of virtual hosts, of the types in `type` alone where it is given, and of a
    user alone likewise; rows are made of those that are shown."""
    broker, rates, ranges = call.broker, call.rates, call.ranges
    wanted = call.request.query_params.get("type", "")
    types = wanted.split(",") if wanted else None
    await broker.cluster.sampler.read_figures()

    def row(record: QueueRecord) -> JsonObject | None:
        if call.flag("disable_stats"):
            return resources.plain_queue_row(
                broker, record, with_totals=call.flag("enable_queue_totals")
            )
        known = broker.cluster.queue(record)
        return resources.queue_row(broker, record, known, rates, ranges)

    return Lazy(
        items=[
            record
            for record in broker.tree.queues.all()
            if record.vhost in visible
            and (types is None or record.type.value in types)
            and (user is None or resources.queue_value(broker, record, DECLARED_BY) == user)
        ],
        name=lambda record: record.name,
        row=row,
        value=partial(resources.queue_value, broker),
    )


async def _partners(call: Call, vhost: str, name: str) -> JsonObject:
    """Returns from which exchanges a queue got messages, and what which channel got of them."""
    cluster, rates = call.broker.cluster, call.rates
    into: JsonObject = {
        exchange: count_in(part(row, "out"), name)
        for (place, exchange), row in (await cluster.published()).items()
        if place == vhost and name in part(row, "out")
    }
    incoming: list[JsonObject] = [
        {"exchange": {"name": exchange, "vhost": vhost}, "stats": stats}
        for exchange, stats in resources.flow(rates, ("queue", vhost, name), into)
    ]
    deliveries = [
        resources.detailed(
            {"channel_details": resources.channel_details(channel.row)},
            channel.row,
            partial(resources.delivered_stats, name),
            rates,
            channel.series,
        )
        for channel in await cluster.channels()
        if channel.row.get("vhost") == vhost and name in part(channel.row, "delivered_from")
    ]
    return {"incoming": incoming, "deliveries": deliveries}


@routes.add("GET", "queues/{vhost}/{name}")
async def queue(call: Call) -> JsonObject:
    broker = call.broker
    record = broker.tree.queues.find(call.vhost(), call.path["name"])
    if record is None:
        raise object_not_found()
    known = await broker.cluster.ask_queue(record)
    consumers = await broker.cluster.list_consumers()
    row = resources.queue_row(broker, record, known, call.rates, call.ranges)
    if row is None:
        # It went away meanwhile.
        raise object_not_found()
    row["consumer_details"] = [
        consumer
        for consumer in consumers
        if consumer.get("queue") == {"name": record.name, "vhost": record.vhost}
    ]
    return row | await _partners(call, record.vhost, record.name)


@routes.add("PUT", "queues/{vhost}/{name}")
async def put_queue(call: Call) -> Status:
    vhost, name = call.vhost(), call.path["name"]
    call.may("configure", "queue", name)
    body = await call.json()
    arguments = table_in(body)
    call.broker.declarations.check_link(vhost, "queue", name, arguments, call.may)
    place = call.broker.tree.vhosts.find(vhost)
    exists = place is not None and name in place.queues
    await call.broker.declarations.declare_queue(
        vhost,
        name,
        durable=truth(body.get("durable", True)),
        exclusive=False,
        auto_delete=truth(body.get("auto_delete", False)),
        arguments=arguments,
        user=call.user.name,
    )
    return put_status(not exists)


def existing_queue(call: Call) -> tuple[str, str]:
    """Returns virtual host and name of the path's queue. Raises 404 or 401."""
    vhost, name = call.vhost(), call.path["name"]
    if name not in call.broker.tree.vhosts.get(vhost).queues:
        raise object_not_found()
    return vhost, name


@routes.add("DELETE", "queues/{vhost}/{name}")
async def delete_queue(call: Call) -> Status:
    vhost, name = existing_queue(call)
    call.may("configure", "queue", name)
    await call.broker.queue_admin.delete_queue(
        vhost, name, if_unused=call.flag("if-unused"), if_empty=call.flag("if-empty")
    )
    return Status(DONE)


@routes.listing("queues/{vhost}/{name}/bindings")
async def queue_bindings(call: Call) -> list[JsonObject]:
    return resources.bindings_at(call.broker, call.vhost(), "queue", call.path["name"])


MIGRATION_KEYS = ("to", "dry_run", "drop_arguments", "rate", "wait")


@routes.add("POST", "convoy/queues/{vhost}/{name}/migration")
async def migrate(call: Call) -> JsonObject:
    """Migrates a queue to another type and answers how it ended; or what that would be like."""
    vhost, name = existing_queue(call)
    for permission in ("configure", "read", "write"):
        call.may(permission, "queue", name)
    body = await call.json(keys=MIGRATION_KEYS)
    migrations, to = call.broker.migrations, text_in(body, "to")
    is_dry, drop = truth_in(body, "dry_run"), truth_in(body, "drop_arguments")
    rate = number_in(body, "rate", 0) or 0
    wait_s = min(number_in(body, "wait", WAIT_S) or 0, WAIT_S)
    plan = migrations.plan(vhost, name, to)
    row: JsonObject = {
        "vhost": vhost,
        "name": name,
        "type": plan.record.type.value,
        "to": to,
        "dropped_arguments": list(plan.dropped),
        "notes": list(plan.notes),
    }
    if is_dry:
        messages, consumers = await call.broker.queue_admin.find_queue(vhost, name).counts()
        return row | {"messages": messages, "consumers": consumers, "state": DRY_RUN}
    record, successor = await migrations.begin(vhost, name, to, drop=drop, rate=rate)
    progress = await migrations.wait(record, successor, wait_s)
    return row | {"successor": successor} | progress._asdict()


@routes.add("GET", "convoy/queues/{vhost}/{name}/migration")
async def migration(call: Call) -> JsonObject:
    """Waits for the end of a migration, for a time at most, and answers how far it is."""
    vhost, name = existing_queue(call)
    query = call.request.query_params
    successor, wait_s = number(query.get("successor", "")), number(query.get("wait", "0"))
    if successor is None or wait_s is None:
        raise bad_request("successor and wait must be numbers")
    record = call.broker.tree.vhosts.get(vhost).queues[name]
    progress = await call.broker.migrations.wait(record, successor, min(wait_s, WAIT_S))
    return {"vhost": vhost, "name": name, "successor": successor} | progress._asdict()
