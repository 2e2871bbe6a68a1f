"""Ordered topics: partitions, changes, groups (docs/topics.md)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from convoymq.edges.http.bodies import ApiError, bad_request
from convoymq.edges.http.call import CREATED, DONE, Call, Status
from convoymq.edges.http.fields import number, text_in
from convoymq.edges.http.routes import Routes
from convoymq.edges.http.topics import (
    GROUP_KEYS,
    MERGE_KEYS,
    MOVE_KEYS,
    NODE_KEYS,
    PARK_KEYS,
    PARTITION_KEYS,
    POSITION_KEYS,
    REPLACE_KEYS,
    SPLIT_KEYS,
    TOPIC_KEYS,
    body_in,
    change_id_in,
    keys_in,
    numbers_in,
    parked_json,
    position_in,
    scaling_in,
    settings_in,
    whole_number,
)
from convoymq.model.json import JsonObject
from convoymq.model.refusals import message_too_big
from convoymq.settings.table import AUTOSCALE_KEYS
from convoymq.topics.rules.lineage import Mode
from convoymq.topics.rules.routes import LOGICAL_DEFAULT

if TYPE_CHECKING:
    from convoymq.topics.shell.admin import TopicAdmin
    from convoymq.topics.shell.rows import ChangeRow

ACCEPTED = 202
ADVANCES = tuple(mode.value for mode in Mode)

routes = Routes()


def _not_found(text: str) -> ApiError:
    return ApiError(404, "not_found", text)


def _vhost(call: Call) -> str:
    """Returns the path's virtual host. Raises 404 or 401."""
    vhost = call.path["vhost"]
    if vhost not in call.broker.tree.vhosts.names():
        raise _not_found(f"no vhost '{vhost}'")
    return call.vhost()


def _topic(call: Call) -> tuple[str, str]:
    """Returns virtual host and name of the path's topic. Raises 404 or 401."""
    vhost, name = _vhost(call), call.path["name"]
    if name not in call.broker.tree.vhosts.get(vhost).topics:
        raise _not_found(f"no topic '{name}' in vhost '{vhost}'")
    return vhost, name


def _configurable(call: Call) -> tuple[str, str]:
    """As `_topic`, for who may configure its exchange."""
    vhost, name = _topic(call)
    call.may("configure", "exchange", name)
    return vhost, name


def _group(call: Call) -> tuple[str, str, str]:
    """Returns virtual host, topic and group of the path. Raises 404 or 401."""
    vhost, name = _topic(call)
    group = call.path["group"]
    if group not in call.broker.tree.vhosts.get(vhost).topics[name].groups:
        raise _not_found(f"no group '{group}' of topic '{name}' in vhost '{vhost}'")
    return vhost, name, group


def _readable(call: Call) -> tuple[str, str, str]:
    """As `_group`, for who may read from it."""
    vhost, name, group = _group(call)
    call.may("read", "queue", f"{name}/{group}")
    return vhost, name, group


def _admin(call: Call) -> TopicAdmin:
    return call.broker.topics


# --- topics ------------------------------------------------------------------------------------


@routes.listing("topics")
async def topics(call: Call) -> list[JsonObject]:
    return [dict(row) for row in await _admin(call).list() if row["vhost"] in call.visible]


@routes.listing("topics/{vhost}")
async def topics_in(call: Call) -> list[JsonObject]:
    return [dict(row) for row in await _admin(call).list(_vhost(call))]


@routes.add("GET", "topics/{vhost}/{name}")
async def topic(call: Call) -> object:
    return await _admin(call).describe(*_topic(call))


@routes.add("PUT", "topics/{vhost}/{name}")
async def put_topic(call: Call) -> Status:
    vhost, name = _vhost(call), call.path["name"]
    call.may("configure", "exchange", name)
    body = await call.json(keys=TOPIC_KEYS)
    is_new = await _admin(call).create(
        vhost,
        name,
        partitions=whole_number(body, "partitions"),
        logical=whole_number(body, "logical", LOGICAL_DEFAULT),
        mode=text_in(body, "mode", "strict"),
        settings=settings_in(body),
    )
    return Status(CREATED if is_new else DONE)


@routes.add("DELETE", "topics/{vhost}/{name}")
async def delete_topic(call: Call) -> Status:
    await _admin(call).delete(*_configurable(call))
    return Status(DONE)


@routes.listing("topics/{vhost}/{name}/route")
async def route(call: Call) -> list[JsonObject]:
    vhost, name = _topic(call)
    text = call.request.query_params.get("version")
    version = None if text is None else number(text)
    if text is not None and version is None:
        raise bad_request(f"version: {text!r} is not a number")
    lineage = call.flag("lineage")
    if lineage and version is not None:
        raise bad_request("lineage shows all versions: leave version out")
    return [dict(row) for row in await _admin(call).route(vhost, name, version, lineage=lineage)]


# --- autoscaling -------------------------------------------------------------------------------


@routes.add("GET", "topics/{vhost}/{name}/autoscale")
async def autoscale(call: Call) -> object:
    """Returns what the autoscaler decides for a topic, and from what."""
    return await call.broker.topic_parts.explain_scaling(*_topic(call))


@routes.add("PUT", "topics/{vhost}/{name}/autoscale")
async def set_autoscale(call: Call) -> Status:
    """Replaces settings of the autoscaler; null takes one away."""
    vhost, name = _configurable(call)
    await _admin(call).set_autoscale(vhost, name, scaling_in(await call.json(keys=AUTOSCALE_KEYS)))
    return Status(DONE)


# --- changes -----------------------------------------------------------------------------------


@routes.add("POST", "topics/{vhost}/{name}/split")
async def split(call: Call) -> object:
    """Begins a split; `changes` says when it has ended. A repeat with its id gets it as it is."""
    vhost, name = _configurable(call)
    body = await call.json(keys=SPLIT_KEYS)
    pid, cuts = whole_number(body, "pid"), numbers_in(body, "at")
    change_id = change_id_in(body)
    return ACCEPTED, await _admin(call).split(vhost, name, pid, cuts, change_id=change_id)


@routes.add("POST", "topics/{vhost}/{name}/merge")
async def merge(call: Call) -> object:
    """Begins a merge."""
    vhost, name = _configurable(call)
    body = await call.json(keys=MERGE_KEYS)
    pids, change_id = numbers_in(body, "pids"), change_id_in(body)
    return ACCEPTED, await _admin(call).merge(vhost, name, pids, change_id=change_id)


@routes.add("POST", "topics/{vhost}/{name}/move")
async def move(call: Call) -> object:
    """Begins a move."""
    vhost, name = _configurable(call)
    body = await call.json(keys=MOVE_KEYS)
    pid, node = whole_number(body, "pid"), _node(call, text_in(body, "node"))
    change_id = change_id_in(body)
    return ACCEPTED, await _admin(call).move(vhost, name, pid, node, change_id=change_id)


def _node(call: Call, text: str) -> int:
    for node in call.broker.tree.nodes.all():
        if text in (node.name, str(node.id)):
            return node.id
    raise _not_found(f"no node '{text}'")


@routes.listing("topics/{vhost}/{name}/changes")
async def changes(call: Call) -> list[JsonObject]:
    """Returns the change that runs, or the last one."""
    found = await _admin(call).change(*_topic(call))
    return [] if found is None else [dict(found)]


@routes.listing("topics/{vhost}/{name}/durations")
async def durations(call: Call) -> list[JsonObject]:
    """Returns how long the phases of the last changes took, as this node has seen them."""
    vhost, name = _topic(call)
    return [dict(row) for row in call.broker.topic_parts.change_times.rows(vhost, name)]


@routes.add("GET", "topics/{vhost}/{name}/changes/{change}")
async def change(call: Call) -> object:
    return await _change(call)


@routes.add("DELETE", "topics/{vhost}/{name}/changes/{change}")
async def abort(call: Call) -> Status:
    """Gives a change up that has sealed nothing."""
    vhost, name = _configurable(call)
    found = await _change(call)
    await _admin(call).abort(vhost, name, found["change_id"])
    return Status(DONE)


async def _change(call: Call) -> ChangeRow:
    vhost, name = _topic(call)
    found = await _admin(call).change(vhost, name, call.path["change"])
    if found is None:
        raise _not_found(f"change '{call.path['change']}' of topic '{name}' is not known any more")
    return found


@routes.add("POST", "topics/{vhost}/{name}/seal")
async def seal(call: Call) -> object:
    """Seals a partition from outside whose majority is gone."""
    call.need(call.is_administrator)
    vhost, name = _topic(call)
    pid = whole_number(await call.json(keys=PARTITION_KEYS), "pid")
    return ACCEPTED, await _admin(call).seal(vhost, name, pid)


@routes.add("POST", "topics/{vhost}/{name}/declare-lost")
async def declare_lost(call: Call) -> Status:
    call.need(call.is_administrator)
    vhost, name = _topic(call)
    await _admin(call).declare_lost(
        vhost, name, whole_number(await call.json(keys=PARTITION_KEYS), "pid")
    )
    return Status(DONE)


@routes.listing("topics/{vhost}/{name}/losses")
async def losses(call: Call) -> list[JsonObject]:
    """Returns what groups go on without."""
    return [dict(row) for row in await _admin(call).losses(*_topic(call))]


@routes.add("POST", "topics/drain")
async def drain(call: Call) -> object:
    """Has a node give its partitions away, and waits until it has no more that it could."""
    call.need(call.is_administrator)
    node = _node(call, text_in(await call.json(keys=NODE_KEYS), "node"))
    return await _admin(call).drains.drain(node)


@routes.listing("convoy/topics/drains")
async def drains(call: Call) -> list[JsonObject]:
    """Returns the nodes that give their partitions away, and what is left on them."""
    call.need(call.is_administrator)
    return [dict(row) for row in await _admin(call).drains.report()]


@routes.add("DELETE", "convoy/topics/drains/{node}")
async def revive(call: Call) -> Status:
    """Ends a drain."""
    call.need(call.is_administrator)
    await _admin(call).drains.revive(_node(call, call.path["node"]))
    return Status(DONE)


# --- groups ------------------------------------------------------------------------------------


@routes.listing("topics/{vhost}/{name}/groups")
async def groups(call: Call) -> list[JsonObject]:
    return [dict(row) for row in await _admin(call).groups(*_topic(call))]


@routes.add("PUT", "topics/{vhost}/{name}/groups/{group}")
async def put_group(call: Call) -> Status:
    """Creates a group; one that exists and advances as it is asked for is fine."""
    vhost, name = _topic(call)
    group = call.path["group"]
    call.may("read", "queue", f"{name}/{group}")
    body = await call.json(keys=GROUP_KEYS)
    advance = text_in(body, "advance") if "advance" in body else None
    if advance is not None and advance not in ADVANCES:
        raise bad_request(f"advance is one of {', '.join(ADVANCES)}, not {advance!r}")
    position = position_in(body) if body.keys() & POSITION_KEYS else "earliest"
    made = await _admin(call).create_group(vhost, name, group, position, advance)
    return Status(CREATED if made else DONE)


@routes.add("DELETE", "topics/{vhost}/{name}/groups/{group}")
async def delete_group(call: Call) -> Status:
    await _admin(call).delete_group(*_readable(call))
    return Status(DONE)


@routes.listing("topics/{vhost}/{name}/groups/{group}/lag")
async def lag(call: Call) -> list[JsonObject]:
    return [dict(row) for row in await _admin(call).lag(*_group(call))]


@routes.add("POST", "topics/{vhost}/{name}/groups/{group}/seek")
async def seek(call: Call) -> object:
    place = _readable(call)
    return await _admin(call).seek(*place, position_in(await call.json(keys=POSITION_KEYS)))


@routes.add("POST", "topics/{vhost}/{name}/groups/{group}/accept-loss")
async def accept_loss(call: Call) -> object:
    """Has the group go on behind messages that retention cut."""
    place = _readable(call)
    await call.json(keys=())
    return await _admin(call).accept_loss(*place)


@routes.listing("topics/{vhost}/{name}/groups/{group}/park")
async def parked(call: Call) -> list[JsonObject]:
    return [parked_json(row) for row in await _admin(call).parked.list(*_readable(call))]


@routes.add("POST", "topics/{vhost}/{name}/groups/{group}/park/resume")
async def resume(call: Call) -> Status:
    """Has the messages of parked keys delivered again, in order."""
    return await _with_keys(call, _admin(call).parked.resume)


@routes.add("POST", "topics/{vhost}/{name}/groups/{group}/park/retry")
async def retry(call: Call) -> Status:
    """Has the first messages of parked keys delivered again; the others wait on."""
    return await _with_keys(call, partial(_admin(call).parked.resume, once=True))


@routes.add("POST", "topics/{vhost}/{name}/groups/{group}/park/replace")
async def replace(call: Call) -> Status:
    """Gives the first message of a parked key another body."""
    place = _readable(call)
    body = await call.json(keys=REPLACE_KEYS)
    keys = keys_in(body)
    if len(keys) != 1:
        raise bad_request("a body replaces that of one key")
    payload = body_in(body)
    if len(payload) > call.served.message_bytes_max:
        raise message_too_big(len(payload), call.served.message_bytes_max)
    await _admin(call).parked.replace(*place, keys[0], payload, call.user)
    return Status(DONE)


@routes.add("POST", "topics/{vhost}/{name}/groups/{group}/park/skip")
async def skip(call: Call) -> Status:
    """Gives the first messages of parked keys up."""
    return await _with_keys(call, _admin(call).parked.skip)


async def _with_keys(call: Call, act: Callable[[str, str, str, bytes], Awaitable[None]]) -> Status:
    """Does something with each of the parked keys that the body names."""
    place = _readable(call)
    for key in keys_in(await call.json(keys=PARK_KEYS)):
        await act(*place, key)
    return Status(DONE)
