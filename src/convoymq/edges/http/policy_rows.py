"""Policies and limits as JSON: rows of the HTTP API, and the commands that bodies ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from convoymq.broker.changes import (
    USER_LIMITS,
    VHOST_LIMITS,
    PutPolicy,
    PutSetting,
    PutUserLimit,
    PutVhostLimit,
    check_limit,
)
from convoymq.broker.facade import Broker
from convoymq.broker.shovels import COMPONENT, Shovel, set_shovel
from convoymq.model.json import JsonObject
from convoymq.routing.policies import Policy, check_policy
from convoymq.settings.definitions import checked_definition, invalid, term

OPERATOR_POLICY = "operator_policy"
VHOST_LIMITS_COMPONENT = "vhost-limits"
LIMITS = "limits"
"""The name of the one parameter that has a virtual host's limits."""


def policy_row(vhost: str, policy: Policy) -> JsonObject:
    """Returns one policy."""
    return {"vhost": vhost, "name": policy.name, **policy_value(policy)}


def policy_value(policy: Policy) -> JsonObject:
    """Returns the content of a policy."""
    return {
        "pattern": policy.pattern,
        "apply-to": policy.apply_to,
        "definition": dict(policy.definition),
        "priority": policy.priority,
    }


def policy_rows(broker: Broker, visible: set[str], *, operator: bool) -> list[JsonObject]:
    """Returns all policies, or all operator policies."""
    return [
        policy_row(vhost.name, policy)
        for vhost in broker.tree.vhosts.all(visible)
        for policy in vhost.policies.of(operator=operator)
    ]


def policy_command(
    vhost: str, name: str, body: Mapping[str, object], *, operator: bool
) -> PutPolicy:
    """Returns the command for a policy's JSON. Raises ValidationFailed."""
    pattern, definition = body.get("pattern"), _pairs(body.get("definition"))
    if not isinstance(pattern, str):
        raise invalid("key pattern is missing or not a string")
    if not isinstance(definition, dict):
        raise invalid("definition must be a dictionary")
    apply_to = body.get("apply-to", "all")
    if not isinstance(apply_to, str):
        raise invalid(f"apply-to should be a string, actually was {term(apply_to)}")
    policy = Policy(
        name=name,
        pattern=pattern,
        definition=checked_definition(definition, operator=operator),
        apply_to=apply_to,
        priority=_number("priority", body.get("priority", 0)),
    )
    check_policy(policy, operator=operator)
    return PutPolicy(
        vhost=vhost,
        name=policy.name,
        pattern=policy.pattern,
        definition=dict(policy.definition),
        apply_to=policy.apply_to,
        priority=policy.priority,
        operator=operator,
    )


def vhost_limit_rows(broker: Broker, visible: set[str]) -> list[JsonObject]:
    """Limits of virtual hosts that have any."""
    return [
        {"vhost": vhost.name, "value": dict(vhost.limits)}
        for vhost in broker.tree.vhosts.all(visible)
        if vhost.limits
    ]


def user_limit_rows(broker: Broker) -> list[JsonObject]:
    """Limits of users that have any."""
    users = broker.tree.users
    return [{"user": name, "value": users.limits_of(name)} for name in users.limited()]


def vhost_limit_commands(vhost: str, value: object) -> Iterator[PutVhostLimit]:
    """Yields the commands for limits of a virtual host. Raises ValidationFailed."""
    for name, limit in _limits(value, VHOST_LIMITS):
        yield PutVhostLimit(vhost=vhost, name=name, value=limit)


def user_limit_commands(user: str, value: object) -> Iterator[PutUserLimit]:
    """Yields the commands for limits of a user. Raises ValidationFailed."""
    for name, limit in _limits(value, USER_LIMITS):
        yield PutUserLimit(user=user, name=name, value=limit)


def limit_in(name: str, body: Mapping[str, object]) -> int:
    """Returns the value of a limit. Raises ValidationFailed."""
    return _number(name, body.get("value"))


def _limits(value: object, known: tuple[str, ...]) -> list[tuple[str, int]]:
    """Returns (name, limit) of an object, or of a list of objects with `name` and `value`."""
    rows: list[tuple[object, object]]
    match _pairs(value):
        case None:
            rows = []
        case dict() as limits:
            rows = list(limits.items())
        case list() as limits if all(isinstance(row, dict) for row in limits):
            rows = [(row.get("name"), row.get("value")) for row in limits]
        case _:
            raise invalid("limits are neither an object nor a list of objects")
    found = []
    for name, limit in rows:
        number = _number(str(name), limit)
        check_limit(str(name), number, known)
        found.append((str(name), number))
    return found


def _pairs(value: object) -> object:
    """Returns an object that `rabbitmqctl export_definitions` has written as a list of [key,
    value]."""
    if isinstance(value, list) and all(
        isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in value
    ):
        return {row[0]: row[1] for row in value}
    return value


def _number(name: str, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdecimal():
        value = int(value) if len(value) < 20 else value
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or abs(value) >= 1 << 63:
        raise invalid(f"{name} should be a number, actually was {term(value)}")
    return value


def global_parameter_rows(broker: Broker) -> list[JsonObject]:
    """Returns the global parameters."""
    found = broker.tree.parameters.all(broker.cluster_name)
    return [{"name": name, "value": value} for name, value in found.items()]


def parameter_rows(broker: Broker, visible: set[str]) -> list[JsonObject]:
    """Returns the rows that definitions and RabbitMQ's tools know as parameters: operator policies,
    limits of virtual hosts, and shovels."""
    rows: list[JsonObject] = []
    for vhost in broker.tree.vhosts.all(visible):
        if vhost.limits:
            rows.append(
                {
                    "vhost": vhost.name,
                    "component": VHOST_LIMITS_COMPONENT,
                    "name": LIMITS,
                    "value": dict(vhost.limits),
                }
            )
        rows += [
            {
                "vhost": vhost.name,
                "component": OPERATOR_POLICY,
                "name": policy.name,
                "value": policy_value(policy),
            }
            for policy in vhost.policies.of(operator=True)
        ]
    return rows + [shovel_row(shovel) for shovel in broker.tree.shovels.all(visible)]


def shovel_row(shovel: Shovel) -> JsonObject:
    """Returns the parameter of a shovel."""
    return {
        "vhost": shovel.vhost,
        "component": COMPONENT,
        "name": shovel.name,
        "value": shovel.definition,
    }


def is_served(component: str, name: str) -> bool:
    """Returns whether there are parameters of a component."""
    is_limits = component == VHOST_LIMITS_COMPONENT and name == LIMITS
    return is_limits or component in (OPERATOR_POLICY, COMPONENT)


def parameter_commands(
    vhost: str, component: str, name: str, value: object
) -> Iterator[PutPolicy | PutVhostLimit | PutSetting]:
    """Yields the commands for a parameter. Raises ValidationFailed."""
    if component == OPERATOR_POLICY:
        if not isinstance(value, dict):
            raise invalid(f"{term(value)} is not an operator policy")
        yield policy_command(vhost, name, value, operator=True)
    elif component == COMPONENT:
        yield set_shovel(vhost, name, _pairs(value))
    elif component == VHOST_LIMITS_COMPONENT and name == LIMITS:
        yield from vhost_limit_commands(vhost, value)
    else:
        raise invalid(f"component {component} not found")
