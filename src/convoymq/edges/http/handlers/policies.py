"""Policies, operator policies, parameters, and limits of virtual hosts and users."""

from __future__ import annotations

from convoymq.broker.changes import (
    DeletePolicy,
    PutUserLimit,
    PutVhostLimit,
    clear_global_parameter,
    set_global_parameter,
)
from convoymq.broker.shovels import COMPONENT as SHOVEL
from convoymq.edges.http import policy_rows as rows_of
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import DONE, Call, Status, change, done, object_not_found, put_status
from convoymq.edges.http.handlers.exchanges import existing_exchange
from convoymq.edges.http.handlers.queues import existing_queue
from convoymq.edges.http.handlers.shovels import delete_shovel, put_shovel
from convoymq.edges.http.routes import Routes
from convoymq.model.json import JsonObject

routes = Routes()


def _register(path: str, *, operator: bool) -> None:
    """Registers the paths of policies, or of operator policies."""

    def may_change(call: Call) -> str:
        call.need(call.is_administrator or (not operator and "policymaker" in call.user.tags))
        return call.vhost()

    @routes.listing(path)
    async def policies(call: Call) -> list[JsonObject]:
        return rows_of.policy_rows(call.broker, call.visible, operator=operator)

    @routes.listing(f"{path}/{{vhost}}")
    async def policies_in(call: Call) -> list[JsonObject]:
        return rows_of.policy_rows(call.broker, {call.vhost()}, operator=operator)

    @routes.add("GET", f"{path}/{{vhost}}/{{name}}")
    async def policy(call: Call) -> JsonObject:
        rows = rows_of.policy_rows(call.broker, {call.vhost()}, operator=operator)
        return call.chosen(rows, "name")[0]

    @routes.add("PUT", f"{path}/{{vhost}}/{{name}}")
    async def put_policy(call: Call) -> Status:
        vhost = may_change(call)
        body = await call.json()
        command = rows_of.policy_command(vhost, call.path["name"], body, operator=operator)
        return put_status(await change(call, command))

    @routes.add("DELETE", f"{path}/{{vhost}}/{{name}}")
    async def delete_policy(call: Call) -> Status:
        vhost = may_change(call)
        await policy(call)
        return await done(
            call, DeletePolicy(vhost=vhost, name=call.path["name"], operator=operator)
        )


_register("policies", operator=False)
_register("operator-policies", operator=True)


@routes.listing("convoy/queues/{vhost}/{name}/policies")
async def policies_of_queue(call: Call) -> list[JsonObject]:
    vhost, name = existing_queue(call)
    place = call.broker.tree.vhosts.get(vhost)
    queue = place.topology.find_queue(name)
    found = place.policies.all_for_queue(queue) if queue is not None else []
    return [rows_of.policy_row(vhost, policy) for policy in found]


@routes.listing("convoy/exchanges/{vhost}/{name}/policies")
async def policies_of_exchange(call: Call) -> list[JsonObject]:
    found = existing_exchange(call)
    policies = call.broker.tree.vhosts.get(call.vhost()).policies
    return [
        rows_of.policy_row(call.vhost(), policy) for policy in policies.all_for_exchange(found.name)
    ]


# --- limits ----------------------------------------------------------------------------------


@routes.listing("vhost-limits")
async def vhost_limits(call: Call) -> list[JsonObject]:
    return rows_of.vhost_limit_rows(call.broker, call.visible)


@routes.listing("vhost-limits/{vhost}")
async def limits_of_vhost(call: Call) -> list[JsonObject]:
    return rows_of.vhost_limit_rows(call.broker, {call.vhost()})


@routes.add("PUT", "vhost-limits/{vhost}/{name}")
async def put_vhost_limit(call: Call) -> Status:
    call.need(call.is_administrator)
    vhost, name = call.vhost(), call.path["name"]
    value = rows_of.limit_in(name, await call.json())
    return await done(call, PutVhostLimit(vhost=vhost, name=name, value=value))


@routes.add("DELETE", "vhost-limits/{vhost}/{name}")
async def delete_vhost_limit(call: Call) -> Status:
    call.need(call.is_administrator)
    if not await change(call, PutVhostLimit(vhost=call.vhost(), name=call.path["name"])):
        raise object_not_found()
    return Status(DONE)


@routes.listing("user-limits")
async def user_limits(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    return rows_of.user_limit_rows(call.broker)


@routes.listing("user-limits/{user}")
async def limits_of_user(call: Call) -> list[JsonObject]:
    name = _user(call)
    return [row for row in rows_of.user_limit_rows(call.broker) if row["user"] == name]


@routes.add("PUT", "user-limits/{user}/{name}")
async def put_user_limit(call: Call) -> Status:
    user, name = _user(call), call.path["name"]
    value = rows_of.limit_in(name, await call.json())
    return await done(call, PutUserLimit(user=user, name=name, value=value))


@routes.add("DELETE", "user-limits/{user}/{name}")
async def delete_user_limit(call: Call) -> Status:
    if not await change(call, PutUserLimit(user=_user(call), name=call.path["name"])):
        raise object_not_found()
    return Status(DONE)


def _user(call: Call) -> str:
    call.need(call.is_administrator)
    name = call.path["user"]
    if call.broker.tree.users.find(name) is None:
        raise object_not_found()
    return name


# --- parameters ------------------------------------------------------------------------------


def _may_see_parameters(call: Call) -> None:
    call.need(call.is_administrator or "policymaker" in call.user.tags)


@routes.listing("parameters")
async def parameters(call: Call) -> list[JsonObject]:
    _may_see_parameters(call)
    return rows_of.parameter_rows(call.broker, call.visible)


@routes.listing("parameters/{component}")
async def parameters_of(call: Call) -> list[JsonObject]:
    component = call.path["component"]
    return [row for row in await parameters(call) if row["component"] == component]


@routes.listing("parameters/{component}/{vhost}")
async def parameters_in(call: Call) -> list[JsonObject]:
    vhost = call.vhost()
    return [row for row in await parameters_of(call) if row["vhost"] == vhost]


@routes.add("GET", "parameters/{component}/{vhost}/{name}")
async def parameter(call: Call) -> JsonObject:
    return call.chosen(await parameters_in(call), "name")[0]


@routes.add("PUT", "parameters/{component}/{vhost}/{name}")
async def put_parameter(call: Call) -> Status:
    call.need(call.is_administrator)
    vhost, path = call.vhost(), call.path
    value = (await call.json()).get("value")
    if path["component"] == SHOVEL:
        return await put_shovel(call, value)
    commands = list(rows_of.parameter_commands(vhost, path["component"], path["name"], value))
    known = [row["name"] for row in await parameters_in(call)]
    for command in commands:
        await change(call, command)
    return put_status(path["name"] not in known)


@routes.add("DELETE", "parameters/{component}/{vhost}/{name}")
async def delete_parameter(call: Call) -> Status:
    call.need(call.is_administrator)
    row = await parameter(call)
    vhost = call.vhost()
    if row["component"] == rows_of.OPERATOR_POLICY:
        return await done(call, DeletePolicy(vhost=vhost, name=call.path["name"], operator=True))
    if row["component"] == SHOVEL:
        return await delete_shovel(call)
    for name in list(call.broker.tree.vhosts.get(vhost).limits):
        await change(call, PutVhostLimit(vhost=vhost, name=name))
    return Status(DONE)


# --- global parameters ------------------------------------------------------------------------


@routes.listing("global-parameters")
async def global_parameters(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator or "policymaker" in call.user.tags)
    return rows_of.global_parameter_rows(call.broker)


@routes.add("GET", "global-parameters/{name}")
async def global_parameter(call: Call) -> JsonObject:
    return call.chosen(await global_parameters(call), "name")[0]


@routes.add("PUT", "global-parameters/{name}")
async def put_global_parameter(call: Call) -> Status:
    call.need(call.is_administrator)
    name, body, tree = call.path["name"], await call.json(), call.broker.tree
    if "value" not in body:
        raise bad_request("key value is missing")
    command = set_global_parameter(name, body["value"])  # type: ignore[arg-type]
    tree.parameters.check_number(name)
    created = not tree.parameters.has(command)
    await change(call, command)
    return put_status(created)


@routes.add("DELETE", "global-parameters/{name}")
async def delete_global_parameter(call: Call) -> Status:
    call.need(call.is_administrator)
    await global_parameter(call)
    return await done(call, clear_global_parameter(call.path["name"]))
