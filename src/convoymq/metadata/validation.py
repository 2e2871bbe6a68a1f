"""Checks of commands for the replicated tree: done once, by the node that proposes them.

Names, arguments, properties, types, patterns and hashes are judged here, by tables and libraries
that differ from release to release, and never when a command is applied: a log has to make the same
tree under every release (ADR 0015). `MetadataStore.submit` is the only way into the log, and asks.

The tree of this node may be behind. What it says about the tree decides only which refusal comes
first; what exists, is equal or has an owner is decided when the command is applied.
"""

from __future__ import annotations

import msgspec

from convoymq.metadata.access import ALGORITHMS, is_known_hash, pattern_error
from convoymq.metadata.commands import (
    FIRST_VERSIONS,
    TOPIC_COMMANDS,
    BeginMigration,
    Bind,
    Bootstrap,
    ChangeView,
    Command,
    DeclareExchange,
    DeclareQueue,
    DeleteVhost,
    Join,
    PutNode,
    PutPermission,
    PutPolicy,
    PutTopicPermission,
    PutUser,
    PutUserLimit,
    PutVhost,
    PutVhostLimit,
    Unbind,
)
from convoymq.metadata.limits import (
    USER_LIMITS,
    VHOST_LIMITS,
    check_limit,
    check_queue_limit,
)
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.snapshot import COMPATIBILITY_VERSION, USERS_VERSION, ZONES_VERSION
from convoymq.metadata.vhost_flags import PROTECTED
from convoymq.model.compatibility import RELEASES
from convoymq.model.errors import BrokerError, NotServed, PreconditionFailed, Protected, Refused
from convoymq.model.late_imports import import_late
from convoymq.model.refusals import missing, queue_subject, unserved_argument, vhost_protected
from convoymq.model.tables import decode_body
from convoymq.replication.ring.views import check_view
from convoymq.routing.declarations import check_binding, check_exchange, check_queue
from convoymq.routing.policies import Policy, check_policy
from convoymq.routing.queue_arguments import check_arguments, check_properties
from convoymq.routing.queue_types import PlacementKind, home_type_with, rules_of, type_names
from convoymq.routing.types import Destination, DestinationKind

NAME_BYTES_MAX = 255
NODE_MAX = 255
INCARNATION_MAX = (1 << 32) - 1


def validated(command: Command, tree: MetadataMachine) -> Command:
    """Returns the command as it goes into the log, with what is resolved here filled in.

    Raises:
        Refused: this release does not take it, or the version in force does not know it.
    """
    first = FIRST_VERSIONS.get(type(command), 1)
    if tree.version < first:
        raise _too_early(first, tree)
    try:
        if isinstance(command, TOPIC_COMMANDS):
            import_late("convoymq.metadata.topic_validation")
            from convoymq.metadata.topic_validation import check_topic_command

            check_topic_command(command, tree)
            return command
        if isinstance(command, BeginMigration):
            return _begin_migration(command, tree)
        return _checked(command, tree)
    except Refused:
        raise
    except BrokerError as error:
        raise PreconditionFailed(error.text) from error


def _too_early(version: int, tree: MetadataMachine) -> NotServed:
    return NotServed(
        f"version {version} of the metadata machine is needed, {tree.version} is in force: some "
        "nodes have an older release"
    )


def _checked(command: Command, tree: MetadataMachine) -> Command:
    match command:
        case DeclareQueue():
            return _declare_queue(command, tree)
        case DeclareExchange():
            arguments = decode_body(command.arguments)
            check_exchange(
                tree.vhost(command.vhost).topology,
                command.name,
                command.type,
                durable=command.durable,
                auto_delete=command.auto_delete,
                internal=command.internal,
                arguments=arguments,
            )
            return msgspec.structs.replace(command, user=_recorded_user(command, tree))
        case Bind():
            check_binding(
                tree.vhost(command.vhost).topology,
                command.source,
                _destination(command),
                command.routing_key,
                decode_body(command.arguments),
                owner=command.owner,
            )
        case Unbind():
            _destination(command)
            decode_body(command.arguments)
        case DeleteVhost(name=name):
            if PROTECTED + name in tree.settings:
                raise Protected(vhost_protected(name))
        case PutVhost():
            _check_vhost(command, tree)
        case PutUser():
            _check_user(command.name, command.password_hash, command.algorithm)
        case PutPermission():
            _check_patterns(command, tree, command.write, command.read, command.configure)
        case PutTopicPermission():
            _check_patterns(command, tree, command.write, command.read)
        case Bootstrap():
            _check_name("vhost", command.vhost)
            _check_user(command.user, command.password_hash, command.algorithm)
        case PutPolicy():
            _check_name("policy", command.name)
            policy = Policy(
                name=command.name,
                pattern=command.pattern,
                definition=command.definition,
                apply_to=command.apply_to,
                priority=command.priority,
            )
            tree.vhost(command.vhost)
            check_policy(policy, operator=command.operator)
            if "ha-mode" in command.definition and tree.version < FIRST_VERSIONS[ChangeView]:
                raise _too_early(FIRST_VERSIONS[ChangeView], tree)
        case PutVhostLimit():
            check_limit(command.name, command.value, VHOST_LIMITS)
        case PutUserLimit():
            check_limit(command.name, command.value, USER_LIMITS)
        case ChangeView():
            try:
                check_view(command.view)
            except ValueError as error:
                raise PreconditionFailed(str(error)) from None
        case Join() | PutNode():
            return _node(command, tree)
        case _:
            # The others name things that the tree has, or has not.
            pass
    return command


def _declare_queue(command: DeclareQueue, tree: MetadataMachine) -> DeclareQueue:
    arguments = decode_body(command.arguments)
    queue_type = check_queue(
        tree.vhost(command.vhost).topology,
        command.name,
        durable=command.durable,
        exclusive_owner=command.owner,
        auto_delete=command.auto_delete,
        arguments=arguments,
        server_named=command.server_named,
    )
    rules = rules_of(queue_type.value)
    for name, first in rules.first_versions.items() if rules is not None else ():
        if tree.version < first and name in arguments:
            subject = queue_subject(command.vhost, command.name)
            by = home_type_with(name, tree.version)
            raise unserved_argument(name, subject, queue_type.value, served_by=by, early=True)
    check_queue_limit(tree, command.vhost, command.name)
    has_home = queue_type.placement is PlacementKind.HOME
    members = command.members[:1] if has_home else command.members
    recorded = tree.version >= COMPATIBILITY_VERSION
    return msgspec.structs.replace(
        command,
        type=queue_type.value,
        members=members,
        compatibility=command.compatibility if recorded else "",
        type_given=command.type_given and recorded,
        user=_recorded_user(command, tree),
    )


def _recorded_user(command: DeclareExchange | DeclareQueue, tree: MetadataMachine) -> str:
    return command.user if tree.version >= USERS_VERSION else ""


def _begin_migration(command: BeginMigration, tree: MetadataMachine) -> BeginMigration:
    vhost = tree.vhost(command.vhost)
    subject = queue_subject(command.vhost, command.name)
    record, declared = vhost.queues.get(command.name), vhost.topology.find_queue(command.name)
    if record is None or declared is None:
        raise missing(subject)
    arguments = decode_body(command.arguments)
    queue_type = check_arguments(subject, arguments)
    check_properties(
        subject,
        queue_type,
        durable=record.durable,
        exclusive=record.owner is not None,
        auto_delete=declared.auto_delete,
        server_named=False,
    )
    has_home = queue_type.placement is PlacementKind.HOME
    members = command.members[:1] if has_home else command.members
    return msgspec.structs.replace(command, type=queue_type.value, members=members)


def _node(command: Join | PutNode, tree: MetadataMachine) -> Join | PutNode:
    if not 0 < command.id <= NODE_MAX:
        raise PreconditionFailed(f"node id {command.id} is out of range")
    if not 0 <= command.incarnation <= INCARNATION_MAX:
        raise PreconditionFailed(f"incarnation {command.incarnation} is out of range")
    if isinstance(command, PutNode) and tree.version < ZONES_VERSION:
        return msgspec.structs.replace(command, zone="", machine=0, process=1)
    return command


def _destination(command: Bind | Unbind) -> Destination:
    try:
        return Destination(DestinationKind(command.kind), command.destination)
    except ValueError as error:
        raise PreconditionFailed(str(error)) from None


def _check_vhost(command: PutVhost, tree: MetadataMachine) -> None:
    _check_name("vhost", command.name)
    release = command.compatibility
    if release and release not in RELEASES:
        raise PreconditionFailed(
            f"unknown rabbitmq_compatibility '{release}', must be one of {', '.join(RELEASES)}"
        )
    if release and tree.version < COMPATIBILITY_VERSION:
        raise _too_early(COMPATIBILITY_VERSION, tree)
    if command.default_queue_type and command.default_queue_type not in type_names():
        raise PreconditionFailed(f"unsupported queue type '{command.default_queue_type}'")


def _check_user(name: str, password_hash: str, algorithm: str) -> None:
    _check_name("user", name)
    if not password_hash or is_known_hash(password_hash, algorithm):
        return
    if algorithm in ALGORITHMS:
        raise PreconditionFailed(f"password_hash is not a hash of algorithm '{algorithm}'")
    raise PreconditionFailed(f"unsupported hashing algorithm '{algorithm}'")


def _check_patterns(
    command: PutPermission | PutTopicPermission, tree: MetadataMachine, *patterns: str
) -> None:
    for pattern in patterns:
        error = pattern_error(pattern)
        if error is not None:
            # Clients know user and virtual host to be looked at first.
            tree.check_access(command.user, command.vhost)
            raise PreconditionFailed(f"invalid pattern '{pattern}': {error}")


def _check_name(word: str, name: str) -> None:
    if not name or len(name.encode(errors="replace")) > NAME_BYTES_MAX:
        raise PreconditionFailed(f"invalid {word} name")
