"""Steps that a document of definitions asks for.

Each step is carried out twice: in a copy of the tree, where all of them are looked at before
anything is changed, and then in the cluster. `steps_of` also says what of a document is no step.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from convoymq.broker.changes import (
    SHA256,
    Bind,
    Command,
    DeclareExchange,
    DeclareQueue,
    PutPermission,
    PutSetting,
    PutTopicPermission,
    PutUser,
    PutUserLimit,
    PutVhost,
    PutVhostLimit,
    Rehearsal,
    set_global_parameter,
    set_protected,
    set_traced,
)
from convoymq.broker.facade import Broker
from convoymq.edges.http import policy_rows
from convoymq.edges.http.fields import tags_of, truth
from convoymq.edges.http.json_values import as_json
from convoymq.edges.http.messages import table_from_json
from convoymq.model.errors import BrokerError, PreconditionFailed
from convoymq.model.json import JsonObject
from convoymq.model.refusals import exchange_subject, queue_subject
from convoymq.model.tables import Table, decode_body
from convoymq.routing.declarations import check_exchange, check_queue
from convoymq.routing.default_type import with_default_type
from convoymq.routing.queue_arguments import type_name_of
from convoymq.routing.types import QueueType

ARGUMENTS_ENCODED = "arguments_encoded"
"""Key of a binding: base64 of its arguments as AMQP has them, where JSON loses a type."""
Key = tuple[str, ...]
"""Name of what a step makes or needs, such as ("queue", virtual host, name)."""

#: What a document says of itself.
_NOTES = frozenset((
    "rabbit_version", "rabbitmq_version", "product_name", "product_version",
    "rabbitmq_definition_format", "original_cluster_name", "original_vhost_name", "explanation",
    "description", "metadata", "default_queue_type",
))  # fmt: skip
_PARTS = ("policies", "parameters", "queues", "exchanges", "bindings")
_ACCESS = ("users", "vhosts", "permissions", "topic_permissions", "global_parameters")
#: How texts name one of a part, where it is not the part without its last letter.
_WORDS = {
    "policies": "policy",
    "global_parameters": "global parameter",
    "topic_permissions": "topic permission",
}
_SETTINGS = (PutSetting, PutUserLimit, PutVhostLimit)
FOREIGN_IDENTITY = "internal_cluster_id"
"""Global parameter that belongs to the cluster that was exported."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of a step in the copy of the tree."""

    created: bool
    note: str = ""
    """Note for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that a document asks for: a command of the tree."""

    part: str
    """The part of the document that it comes from."""
    subject: str
    """Subject of the step, as texts name it."""
    command: Command
    makes: Key = ()
    needs: Sequence[Key] = ()

    def rehearse(self, rehearsal: Rehearsal) -> Tried:
        """Carries it out in a copy of the tree. Raises BrokerError."""
        reply = rehearsal.carry_out(self.command)
        # What sets a value says that it did, whatever was there before.
        return Tried(reply is True and not isinstance(self.command, _SETTINGS))

    async def perform(self, broker: Broker, user: str) -> None:
        """Carries it out in the cluster, for a user. Raises BrokerError."""
        await broker.tree.execute(self.command)


@dataclass(frozen=True, slots=True, kw_only=True)
class _VhostStep(Step):
    """A virtual host; one that exists stays as it is."""

    command: PutVhost

    def rehearse(self, rehearsal: Rehearsal) -> Tried:
        if self.command.name in rehearsal.tree.vhosts:
            return Tried(False)
        return Step.rehearse(self, rehearsal)

    async def perform(self, broker: Broker, user: str) -> None:
        if self.command.name not in broker.tree.vhosts.names():
            await Step.perform(self, broker, user)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExchangeStep(Step):
    """An exchange; one that exists stays as it is."""

    command: DeclareExchange

    def rehearse(self, rehearsal: Rehearsal) -> Tried:
        asked = self.command
        topology = rehearsal.tree.vhost(asked.vhost).topology
        if topology.find_exchange(asked.name) is None:
            return Step.rehearse(self, rehearsal)

        def compare() -> None:
            check_exchange(
                topology,
                asked.name,
                asked.type,
                durable=asked.durable,
                auto_delete=asked.auto_delete,
                internal=asked.internal,
                arguments=decode_body(asked.arguments),
            )

        return _kept(self.subject, compare)

    async def perform(self, broker: Broker, user: str) -> None:
        asked = self.command
        if broker.tree.vhosts.get(asked.vhost).topology.find_exchange(asked.name) is None:
            await broker.tree.execute(msgspec.structs.replace(asked, user=user))


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueueStep(Step):
    """A queue; one that exists stays as it is."""

    command: DeclareQueue
    arguments: Table
    type_there: str
    """Type that the document gives beside the arguments; "" = none."""
    node_default: QueueType

    def rehearse(self, rehearsal: Rehearsal) -> Tried:
        asked = self.command
        vhost = rehearsal.tree.vhost(asked.vhost)
        default = vhost.default_queue_type
        arguments = with_default_type(
            self.arguments,
            durable=asked.durable,
            exclusive=False,
            auto_delete=asked.auto_delete,
            server_named=False,
            vhost_default=QueueType(default) if default else None,
            node_default=self.node_default,
        )

        def check() -> QueueType:
            return check_queue(
                vhost.topology,
                asked.name,
                durable=asked.durable,
                auto_delete=asked.auto_delete,
                arguments=arguments,
            )

        if vhost.topology.find_queue(asked.name) is not None:
            return _kept(self.subject, check)
        made = check()
        rehearsal.carry_out(
            DeclareQueue(
                vhost=asked.vhost,
                name=asked.name,
                durable=asked.durable,
                auto_delete=asked.auto_delete,
                arguments=arguments.encoded,
                members=asked.members,
            )
        )
        asked_type = self.type_there or type_name_of(self.arguments)
        if asked_type == made.value:
            return Tried(True)
        was = f"is {self.type_there} there" if self.type_there else "says no type"
        return Tried(True, f"{self.subject} {was} and becomes {made.value}")

    async def perform(self, broker: Broker, user: str) -> None:
        asked = self.command
        if asked.name not in broker.tree.vhosts.get(asked.vhost).queues:
            await broker.declarations.declare_queue(
                asked.vhost,
                asked.name,
                durable=asked.durable,
                exclusive=False,
                auto_delete=asked.auto_delete,
                arguments=self.arguments,
                user=user,
            )


@dataclass(frozen=True, slots=True)
class Unusable:
    """A part of a document that cannot become a step."""

    reason: str
    makes: Key = ()
    """Name of what it would have made."""


def steps_of(
    document: Mapping[str, object], only: str | None, node_default: QueueType
) -> Iterator[Step | Unusable]:
    """Yields the steps of a document in the order in which they have to be carried out, and what
    of it cannot become a step.

    Args:
        only: the virtual host into which everything goes; None: the document says.
        node_default: the type of queues that say none, where the virtual host says none either.
    """
    yield from _unknown_parts(document, single=only is not None)
    if only is None:
        yield from _each(document, "global_parameters", _global_parameter)
        yield from _each(document, "users", _user)
        yield from _each(document, "vhosts", _vhost)
        yield from _each(document, "permissions", _permission)
        yield from _each(document, "topic_permissions", _topic_permission)
    yield from _each(document, "parameters", lambda row: _parameter(row, only), only)
    yield from _each(document, "policies", lambda row: _policy(row, only), only)
    yield from _each(document, "exchanges", lambda row: _exchange(row, only), only)
    yield from _each(document, "queues", lambda row: _queue(row, only, node_default), only)
    yield from _each(document, "bindings", lambda row: _binding(row, only), only)


def vhost_command(name: str, body: Mapping[str, object]) -> PutVhost:
    """Returns the command for a virtual host's JSON. Raises PreconditionFailed."""
    meta = body.get("metadata") or {}
    if not isinstance(meta, dict):
        raise PreconditionFailed("key metadata is not an object")
    protection_of(body)
    default = body.get("default_queue_type") or meta.get("default_queue_type") or ""
    release = body.get("rabbitmq_compatibility") or meta.get("rabbitmq_compatibility") or ""
    return PutVhost(
        name=name,
        description=str(body.get("description") or meta.get("description") or ""),
        tags=tags_of(body.get("tags") or meta.get("tags") or ()),
        default_queue_type="" if default == "undefined" else str(default),
        compatibility="" if release == "undefined" else str(release),
    )


def reason_of(subject: str, error: BrokerError) -> str:
    """Returns why something is refused, as one line that names it."""
    text = " ".join(error.text.removeprefix("Validation failed").split())
    return text if subject in text else f"{subject}: {text}"


def _unknown_parts(document: Mapping[str, object], *, single: bool) -> Iterator[Unusable]:
    for key, value in document.items():
        known = key in _NOTES or key in _PARTS or (key in _ACCESS and not single)
        if not known and value not in ([], {}, None, ""):
            yield Unusable(f"{key}: not served")


def _each(
    document: Mapping[str, object],
    part: str,
    read: Callable[[JsonObject], Iterable[Step]],
    only: str | None = None,
) -> Iterator[Step | Unusable]:
    rows = document.get(part) or ()
    if not isinstance(rows, list | tuple) or not all(isinstance(row, dict) for row in rows):
        yield Unusable(f"malformed definitions: {part} is not a list of objects")
        return
    for row in rows:
        try:
            yield from read(row)
        except BrokerError as error:
            word, name = _WORDS.get(part, part.removesuffix("s")), str(row.get("name", ""))
            vhost = only or row.get("vhost")
            if vhost is None:
                yield Unusable(reason_of(f"{word} '{name}'", error), (word, name))
            else:
                subject = f"{word} '{name}' in vhost '{vhost}'"
                yield Unusable(reason_of(subject, error), (word, str(vhost), name))


# --- who may what ----------------------------------------------------------------------------


def _global_parameter(row: JsonObject) -> Iterator[Step]:
    name = _text(row, "name")
    if name == FOREIGN_IDENTITY:
        return
    subject = f"global parameter '{name}'"
    command = set_global_parameter(name, row.get("value"))  # type: ignore[arg-type]
    yield Step(part="global_parameters", subject=subject, command=command)


def _user(row: JsonObject) -> Iterator[Step]:
    name = _text(row, "name")
    subject = f"user '{name}'"
    command = PutUser(
        name=name,
        password_hash=_text(row, "password_hash", ""),
        algorithm=_text(row, "hashing_algorithm", SHA256),
        tags=tags_of(row.get("tags", ())),
    )
    yield Step(part="users", subject=subject, command=command, makes=("user", name))
    for limit in policy_rows.user_limit_commands(name, row.get("limits")):
        yield Step(part="user_limits", subject=subject, command=limit, needs=[("user", name)])


def _vhost(row: JsonObject) -> Iterator[Step]:
    name = _text(row, "name")
    subject = f"vhost '{name}'"
    yield _VhostStep(
        part="vhosts", subject=subject, command=vhost_command(name, row), makes=("vhost", name)
    )
    for limit in policy_rows.vhost_limit_commands(name, row.get("limits")):
        yield Step(part="vhost_limits", subject=subject, command=limit, needs=[("vhost", name)])
    if truth(row.get("tracing")):
        command = set_traced(name, traced=True)
        yield Step(part="vhosts", subject=subject, command=command, needs=[("vhost", name)])
    if protection_of(row):
        command = set_protected(name, protected=True)
        yield Step(part="vhosts", subject=subject, command=command, needs=[("vhost", name)])


def protection_of(row: Mapping[str, object]) -> bool | None:
    """Returns whether a virtual host's JSON protects it from deletion; None: it does not say.
    Raises PreconditionFailed."""
    meta = row.get("metadata")
    for source in (row, meta if isinstance(meta, dict) else {}):
        given = source.get("protected_from_deletion")
        if given is not None:
            if given not in (True, False, "true", "false") or type(given) is int:
                raise PreconditionFailed("key protected_from_deletion is not a boolean")
            return truth(given)
    return None


def _permission(row: JsonObject) -> Iterator[Step]:
    keys = ("user", "vhost", "configure", "write", "read")
    yield _access_step("permissions", PutPermission(**{key: _text(row, key) for key in keys}))


def _topic_permission(row: JsonObject) -> Iterator[Step]:
    keys = ("user", "vhost", "exchange", "write", "read")
    command = PutTopicPermission(**{key: _text(row, key) for key in keys})
    yield _access_step("topic_permissions", command)


def _access_step(part: str, command: PutPermission | PutTopicPermission) -> Step:
    return Step(
        part=part,
        subject=f"permission of user '{command.user}' in vhost '{command.vhost}'",
        command=command,
        needs=[("user", command.user), ("vhost", command.vhost)],
    )


# --- policies, queues, exchanges -------------------------------------------------------------


def _parameter(row: JsonObject, only: str | None) -> Iterator[Step]:
    vhost, name = only or _text(row, "vhost"), _text(row, "name")
    component = _text(row, "component")
    subject = f"parameter '{name}' of {component} in vhost '{vhost}'"
    if not policy_rows.is_served(component, name):
        raise PreconditionFailed(f"component {component} is not served")
    for command in policy_rows.parameter_commands(vhost, component, name, row.get("value")):
        yield Step(part="parameters", subject=subject, command=command, needs=[("vhost", vhost)])


def _policy(row: JsonObject, only: str | None) -> Iterator[Step]:
    vhost, name = only or _text(row, "vhost"), _text(row, "name")
    yield Step(
        part="policies",
        subject=f"policy '{name}' in vhost '{vhost}'",
        command=policy_rows.policy_command(vhost, name, row, operator=False),
        needs=[("vhost", vhost)],
    )


def _exchange(row: JsonObject, only: str | None) -> Iterator[Step]:
    command = DeclareExchange(
        vhost=only or _text(row, "vhost"),
        name=_text(row, "name"),
        type=_text(row, "type"),
        durable=truth(row.get("durable", True)),
        auto_delete=truth(row.get("auto_delete", False)),
        internal=truth(row.get("internal", False)),
        arguments=_table(row).encoded,
    )
    yield _ExchangeStep(
        part="exchanges",
        subject=str(exchange_subject(command.vhost, command.name)),
        command=command,
        makes=("exchange", command.vhost, command.name),
        needs=[("vhost", command.vhost)],
    )


def _queue(row: JsonObject, only: str | None, node_default: QueueType) -> Iterator[Step]:
    arguments = _table(row)
    command = DeclareQueue(
        vhost=only or _text(row, "vhost"),
        name=_text(row, "name"),
        durable=truth(row.get("durable", True)),
        auto_delete=truth(row.get("auto_delete", False)),
        arguments=arguments.encoded,
        # Where the queue comes to be is decided when it is declared.
        members=(1,),
    )
    if not command.name:
        raise PreconditionFailed("a queue without a name would get another one at each import")
    yield _QueueStep(
        part="queues",
        subject=str(queue_subject(command.vhost, command.name)),
        command=command,
        arguments=arguments,
        type_there=str(row.get("type") or ""),
        node_default=node_default,
        makes=("queue", command.vhost, command.name),
        needs=[("vhost", command.vhost)],
    )


def _binding(row: JsonObject, only: str | None) -> Iterator[Step]:
    kind = _text(row, "destination_type")
    if kind not in ("queue", "exchange"):
        raise PreconditionFailed("malformed definitions: destination_type of a binding")
    command = Bind(
        vhost=only or _text(row, "vhost"),
        source=_text(row, "source"),
        kind=kind,
        destination=_text(row, "destination"),
        routing_key=_text(row, "routing_key", ""),
        arguments=_binding_table(row).encoded,
    )
    yield Step(
        part="bindings",
        subject=f"binding '{command.routing_key}' of {kind} '{command.destination}' to exchange "
        f"'{command.source}' in vhost '{command.vhost}'",
        command=command,
        needs=[
            ("vhost", command.vhost),
            ("exchange", command.vhost, command.source),
            (kind, command.vhost, command.destination),
        ],
    )


def _kept(subject: str, compare: Callable[[], object]) -> Tried:
    try:
        compare()
    except BrokerError as error:
        return Tried(False, f"{subject} stays as it is: {error.text}")
    return Tried(False)


def _text(row: Mapping[str, object], key: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise PreconditionFailed(f"malformed definitions: {key} is missing or not a string")
    return value


def _binding_table(row: Mapping[str, object]) -> Table:
    """Returns the arguments of a binding, with their types unless somebody has edited them."""
    given = row.get(ARGUMENTS_ENCODED)
    if given is None:
        return _table(row)
    try:
        encoded = decode_body(base64.b64decode(str(given), validate=True))
    except (BrokerError, ValueError) as error:
        raise PreconditionFailed(f"malformed definitions: {ARGUMENTS_ENCODED}") from error
    same = json.loads(as_json(encoded.to_plain())) == (row.get("arguments") or {})
    return encoded if same and encoded.has_text_keys() else _table(row)


def _table(row: Mapping[str, object]) -> Table:
    value = row.get("arguments") or {}
    if not isinstance(value, dict):
        raise PreconditionFailed("malformed definitions: arguments are not an object")
    return table_from_json(value)
