"""Backups: what there is to back up, pages of queues, and messages back into queues (ADR 0208)."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from convoymq.broker.records import QueueRecord, TopicRecord
from convoymq.edges.http import definitions
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import Call, object_not_found
from convoymq.edges.http.fields import number
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject
from convoymq.queues.interface import Queue

routes = Routes()

MSGPACK = "application/msgpack"
BODY_SPARE_BYTES = 20_000_000
"""Beyond the largest message: a command may have others, and headers."""


@routes.add("GET", "convoy/copies")
async def listing(call: Call) -> JsonObject:
    """Returns definitions and queues, as one version of the tree has them."""
    call.need(call.is_administrator)
    broker = call.broker
    return {
        "cluster": broker.cluster_name,
        "cluster_id": broker.tree.cluster_id,
        "definitions": definitions.export(broker),
        "queues": [
            _queue_row(call, record)
            for record in broker.tree.queues.all()
            if not record.type.is_managed
        ],
        "topics": [
            _topic_row(call, topic)
            for vhost in broker.tree.vhosts.all()
            for topic in vhost.topics.values()
        ],
    }


def _queue_row(call: Call, record: QueueRecord) -> JsonObject:
    declared = call.broker.tree.vhosts.get(record.vhost).topology.find_queue(record.name)
    return {
        "vhost": record.vhost,
        "name": record.name,
        "type": record.type.value,
        "group": record.group,
        "durable": record.durable,
        "exclusive": declared is not None and declared.exclusive_owner is not None,
    }


def _topic_row(call: Call, topic: TopicRecord) -> JsonObject:
    return {
        "vhost": topic.vhost,
        "name": topic.name,
        "mode": topic.mode,
        "logical": topic.logical,
        "partitions": len(topic.state.route.pids),
        "settings": topic.settings,
        "queues": call.broker.copies.partitions(topic),
    }


@routes.add("GET", "convoy/copies/queues/{vhost}/{name}")
async def get_page(call: Call) -> Response:
    call.need(call.is_administrator)
    record = call.broker.tree.queues.get(call.vhost(), call.path["name"])
    copied = await call.broker.copies.page(
        record, _position(call, "after"), _position(call, "upto")
    )
    body = {"group": record.group, "source": copied.source, **copied.page._asdict()}
    return Response(msgspec.msgpack.encode(body), media_type=MSGPACK)


def _position(call: Call, name: str) -> int:
    text = call.request.query_params.get(name, "")
    found = number(text) if text else -1
    if found is None:
        raise bad_request(f"{name} is not a number")
    return found


@routes.add("POST", "convoy/copies/queues/{vhost}/{name}")
async def publish_to_queue(call: Call) -> JsonObject:
    call.need(call.is_administrator)
    vhost, name = call.vhost(), call.path["name"]
    return await _publish(call, call.broker.queue_admin.find_queue(vhost, name))


@routes.add("POST", "convoy/copies/topics/{vhost}/{name}")
async def publish_to_topic(call: Call) -> JsonObject:
    call.need(call.is_administrator)
    topic = call.broker.local_topics.find(call.vhost(), call.path["name"])
    if topic is None:
        raise object_not_found()
    return await _publish(call, topic)


async def _publish(call: Call, queue: Queue) -> JsonObject:
    most = call.served.message_bytes_max + BODY_SPARE_BYTES
    data = await call.bodies.read_bytes(call.request, most)
    try:
        return {"messages": await call.broker.copies.publish(queue, data)}
    except ValueError as error:
        raise bad_request(f"the body is not ENQUEUE commands: {error}") from None
