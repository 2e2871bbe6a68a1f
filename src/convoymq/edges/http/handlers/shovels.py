"""Shovels: status, restart, and the parameter that makes one."""

from __future__ import annotations

from convoymq.broker.shovels import Shovel, clear_shovel, local_vhosts, set_shovel, shovel_of
from convoymq.edges.http import policy_rows
from convoymq.edges.http.call import DONE, Call, Status, change, object_not_found, put_status
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject
from convoymq.settings.definitions import invalid

routes = Routes()


async def _status(call: Call, vhosts: set[str]) -> list[JsonObject]:
    """Returns the status of shovels; one that no node told of begins in a moment."""
    found = await call.broker.cluster.shovels()
    return [
        dict(found.get((shovel.vhost, shovel.name)) or _starting(shovel))
        for shovel in call.broker.tree.shovels.all(vhosts)
    ]


def _starting(shovel: Shovel) -> JsonObject:
    return {"vhost": shovel.vhost, "name": shovel.name, "type": "dynamic", "state": "starting"}


@routes.listing("shovels")
async def shovels(call: Call) -> list[JsonObject]:
    call.need(call.is_monitor)
    return await _status(call, call.visible)


@routes.listing("shovels/{vhost}")
async def shovels_in(call: Call) -> list[JsonObject]:
    call.need(call.is_monitor)
    return await _status(call, {call.vhost()})


@routes.add("GET", "shovels/vhost/{vhost}/{name}")
async def shovel(call: Call) -> JsonObject:
    call.need(call.is_monitor)
    return policy_rows.shovel_row(_known(call))


@routes.add("DELETE", "shovels/vhost/{vhost}/{name}")
async def delete_shovel(call: Call) -> Status:
    call.need(call.is_administrator)
    await change(call, clear_shovel(_known(call)))
    return Status(DONE)


@routes.add("DELETE", "shovels/vhost/{vhost}/{name}/restart")
async def restart_shovel(call: Call) -> Status:
    call.need(call.is_administrator)
    found = _known(call)
    await change(call, set_shovel(found.vhost, found.name, found.definition))
    return Status(DONE)


async def put_shovel(call: Call, value: object) -> Status:
    """Makes or changes the shovel of the path. Raises ValidationFailed."""
    vhost, name, tree = call.vhost(), call.path["name"], call.broker.tree
    command = set_shovel(vhost, name, value)
    assert isinstance(value, dict)
    may = tree.vhosts.names() if call.is_operator else call.broker.access.vhosts_of(call.user)
    for own in local_vhosts(shovel_of(vhost, name, value)):
        if own not in may:
            raise invalid(f'user "{call.user.name}" may not connect to vhost "{own}"')
    created = tree.shovels.find(vhost, name) is None
    if created:
        tree.shovels.check_number()
    await change(call, command)
    return put_status(created)


def _known(call: Call) -> Shovel:
    found = call.broker.tree.shovels.find(call.vhost(), call.path["name"])
    if found is None:
        raise object_not_found()
    return found
