"""Checks of declarations and bindings: made by who proposes them, never by the tables that record.

These rules change from release to release: arguments, properties, types and patterns that are
known and served. They are applied before a change is proposed, to the tables as this node has them.
What then comes out of the log is recorded by `Topology` as it is (ADR 0015).
"""

from __future__ import annotations

from convoymq.model.errors import Misuse, PreconditionFailed
from convoymq.model.refusals import (
    default_exchange_untouchable,
    exchange_subject,
    exclusive_queue,
    invalid_argument_type,
    managed_queue,
    ordered_exchange,
    queue_subject,
    reserved_name,
    unknown_delayed_type,
    unknown_exchange_type,
)
from convoymq.model.tables import EMPTY, SHORT_STRING_BYTES_MAX, Table
from convoymq.routing.choosing import check_hash_arguments, check_local_binding, check_weight
from convoymq.routing.headers import check_match_arguments
from convoymq.routing.queue_arguments import (
    check_arguments,
    check_common_arguments,
    check_equivalent_argument,
    check_equivalent_arguments,
    check_properties,
    is_quorum_as_classic,
)
from convoymq.routing.topics import check_pattern
from convoymq.routing.topology import Topology, check_flag, check_same
from convoymq.routing.types import (
    ALTERNATE_EXCHANGE,
    DEFAULT_EXCHANGE,
    DELAYED_TYPE,
    RESERVED_PREFIX,
    Destination,
    DestinationKind,
    ExchangeType,
    QueueType,
)

_EXCHANGE_TYPES = {kind.value: kind for kind in ExchangeType}


def check_exchange(
    topology: Topology,
    name: str,
    exchange_type: str,
    *,
    durable: bool = False,
    auto_delete: bool = False,
    internal: bool = False,
    arguments: Table = EMPTY,
) -> ExchangeType:
    """Refuses an exchange that cannot be declared so, or differs from the one that exists.

    Raises:
        AccessRefused: the default exchange, or a new name with the reserved prefix.
        PreconditionFailed: unknown type, bad arguments, or a different one exists.
    """
    check_name(name)
    if name == DEFAULT_EXCHANGE:
        raise default_exchange_untouchable()
    known = _EXCHANGE_TYPES.get(exchange_type)
    if known is None:
        raise unknown_exchange_type(exchange_type)
    subject = exchange_subject(topology.vhost, name)
    current = topology.find_exchange(name)
    if current is not None:
        check_same(subject, "type", f"'{current.type.value}'", f"'{exchange_type}'")
        check_flag(subject, "durable", current.durable, durable)
        check_flag(subject, "auto_delete", current.auto_delete, auto_delete)
        check_flag(subject, "internal", current.internal, internal)
        check_equivalent_argument(ALTERNATE_EXCHANGE, subject, current.arguments, arguments)
        if known is ExchangeType.DELAYED:
            check_equivalent_argument(DELAYED_TYPE, subject, current.arguments, arguments)
        return known
    if name.startswith(RESERVED_PREFIX):
        raise reserved_name(subject)
    if known is ExchangeType.ORDERED:
        raise ordered_exchange(subject)
    alternate = arguments.get(ALTERNATE_EXCHANGE)
    if alternate is not None and alternate.code != "S":
        raise invalid_argument_type(ALTERNATE_EXCHANGE, subject, alternate.type_name)
    rule = _delayed_type(arguments) if known is ExchangeType.DELAYED else known
    if rule is ExchangeType.CONSISTENT_HASH:
        check_hash_arguments(arguments, subject)
    return known


def _delayed_type(arguments: Table) -> ExchangeType:
    """Returns the type by whose rule an `x-delayed-message` exchange chooses. Raises
    PreconditionFailed: there is no such type."""
    field = arguments.get(DELAYED_TYPE)
    found = _EXCHANGE_TYPES.get(field.term()) if field is not None and field.code == "S" else None
    if found is None or found in (ExchangeType.DELAYED, ExchangeType.ORDERED):
        raise unknown_delayed_type()
    return found


def check_queue(
    topology: Topology,
    name: str,
    *,
    durable: bool = False,
    exclusive_owner: str | None = None,
    auto_delete: bool = False,
    arguments: Table = EMPTY,
    server_named: bool = False,
    relaxed: bool = False,
) -> QueueType:
    """Refuses a queue that cannot be declared so, or differs from the one that exists.

    Args:
        name: for a server-named queue the generated name, with `server_named` set.
        exclusive_owner: the declaring connection when the queue is exclusive.
        arguments: after `with_default_type`.
        relaxed: a quorum queue that is declared again as a classic one need not have the same type
            and flags.
    Returns:
        Its type.
    Raises:
        AccessRefused: a new name with the reserved prefix.
        ResourceLocked: it belongs to another connection, or is exclusive and shall not be.
        PreconditionFailed: a different one exists, or the type can't have these properties.
    """
    check_name(name)
    subject = queue_subject(topology.vhost, name)
    current = topology.find_queue(name)
    if current is not None:
        if current.exclusive_owner != exclusive_owner:
            raise exclusive_queue(subject)
        if relaxed and is_quorum_as_classic(current.type, arguments):
            check_common_arguments(subject, current.arguments, arguments)
            return current.type
        check_flag(subject, "durable", current.durable, durable)
        check_flag(subject, "auto_delete", current.auto_delete, auto_delete)
        check_equivalent_arguments(subject, current.type, current.arguments, arguments)
        return current.type
    if name.startswith(RESERVED_PREFIX) and not server_named:
        raise reserved_name(subject)
    queue_type = check_arguments(subject, arguments)
    check_properties(
        subject,
        queue_type,
        durable=durable,
        exclusive=exclusive_owner is not None,
        auto_delete=auto_delete,
        server_named=server_named,
    )
    return queue_type


def check_binding(
    topology: Topology,
    source: str,
    destination: Destination,
    routing_key: str = "",
    arguments: Table = EMPTY,
    *,
    owner: str | None = None,
) -> None:
    """Refuses a binding that the type of its source does not take.

    An end that is missing here is not refused: the tables that record may have it already.

    Raises:
        PreconditionFailed: pattern, `x-match`, weight or kind of destination are not acceptable.
        AccessRefused: the destination is part of something else.
        AccessRefused, NotFound, ResourceLocked: they are not, and an end is not either.
    """
    check_name(routing_key)
    is_queue = destination.kind is DestinationKind.QUEUE
    queue = topology.find_queue(destination.name) if is_queue else None
    if queue is not None and queue.type.is_managed:
        raise managed_queue(queue_subject(topology.vhost, queue.name))
    exchange = topology.find_exchange(source)
    if exchange is None:
        return
    try:
        match exchange.rule:
            case ExchangeType.TOPIC:
                check_pattern(routing_key)
            case ExchangeType.HEADERS:
                check_match_arguments(arguments)
            case ExchangeType.CONSISTENT_HASH:
                check_weight(routing_key)
            case ExchangeType.LOCAL_RANDOM:
                check_local_binding(routing_key, queue)
    except PreconditionFailed:
        # Clients know the ends to be looked at first.
        topology.check_ends(source, destination, owner)
        raise


def check_name(name: str) -> None:
    """Refuses a name that AMQP cannot carry. Raises Misuse."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise Misuse(f"name {name!r} is not text") from error
    if size > SHORT_STRING_BYTES_MAX:
        raise Misuse(f"name of {size} bytes, at most {SHORT_STRING_BYTES_MAX} are allowed")
