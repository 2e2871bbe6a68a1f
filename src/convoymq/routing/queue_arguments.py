"""Arguments of declarations, and their comparison when a declaration is repeated.

`settings.table` has them, in the order in which RabbitMQ checks them; which type serves which is
said by its `TypeRules`. Keys that no row names are kept, shown, and never compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from convoymq.model.errors import Subject
from convoymq.model.refusals import (
    foreign_argument,
    inequivalent,
    invalid_argument,
    invalid_property,
    segment_too_large,
    server_named_queue,
    unserved_argument,
)
from convoymq.model.tables import Field, Table
from convoymq.routing.queue_types import (
    Argument,
    PlacementKind,
    home_type_with,
    own_arguments,
    rules_of,
    type_names,
)
from convoymq.routing.types import QueueType
from convoymq.settings.table import ARGUMENT_KEYS, SEGMENT_BYTES_MAX
from convoymq.settings.values import unacceptable

TYPE_ARGUMENT = "x-queue-type"
TAKE_OVER_ARGUMENT = "x-single-active-take-over"
IMMEDIATE = "immediate"
SEGMENT_ARGUMENT = "x-stream-max-segment-size-bytes"
COMMON_ARGUMENTS = (
    "x-dead-letter-exchange", "x-dead-letter-routing-key", "x-expires", "x-max-length",
    "x-max-length-bytes", "x-single-active-consumer", "x-message-ttl",
)  # fmt: skip
"""Arguments that are compared when a quorum queue is declared again as a classic one (RabbitMQ's
list)."""
RETRY_ARGUMENTS = ("x-delayed-retry-type", "x-delayed-retry-min", "x-delayed-retry-max")
FILTER_ARGUMENTS = ("x-stream-filter", "x-stream-match-unfiltered")
"""By these a consumer of a stream asks for some of its messages only."""


ARGUMENTS = tuple(
    Argument(key.argument_name, (key.arguments or key.values).refusal) for key in ARGUMENT_KEYS
)
"""Arguments that RabbitMQ has, and ours; a type may bring others (`TypeRules.own`)."""


def type_name_of(arguments: Table) -> str:
    """Returns the name of the type that the arguments ask for; without `x-queue-type` it is
    classic."""
    field = arguments.get(TYPE_ARGUMENT)
    return QueueType.CLASSIC.value if field is None else field.term()


def check_arguments(subject: Subject, arguments: Table) -> QueueType:
    """Refuses arguments of a new queue that no queue of its type could honour.

    Returns:
        The queue's type.
    Raises:
        PreconditionFailed: a bad value, an argument of another type, or one not served yet.
    """
    type_field = arguments.get(TYPE_ARGUMENT)
    if type_field is not None and (reason := _type_refusal(type_field)) is not None:
        raise invalid_argument(TYPE_ARGUMENT, subject, reason)
    queue_type = QueueType(type_name_of(arguments))
    rules = rules_of(queue_type.value)
    assert rules is not None
    given, present = set(arguments), list[str]()
    for argument in _all_arguments():
        field = arguments.get(argument.name) if argument.name in given else None
        if field is None:
            continue
        reason = argument.check(field, arguments)
        if reason is not None:
            raise invalid_argument(argument.name, subject, reason)
        present.append(argument.name)
    for name in present:
        if rules.is_foreign(name):
            raise foreign_argument(name, subject, queue_type.value)
    for name in present:
        if not rules.takes(name):
            by = home_type_with(name)
            raise unserved_argument(name, subject, queue_type.value, served_by=by)
    segment = arguments.get(SEGMENT_ARGUMENT)
    if segment and isinstance(segment.value, int) and segment.value > SEGMENT_BYTES_MAX:
        raise segment_too_large(subject)
    kind, least, most = (arguments.get(name) for name in RETRY_ARGUMENTS)
    if kind is not None and kind.term() != "disabled" and least is None:
        raise invalid_argument(RETRY_ARGUMENTS[0], subject, f"{RETRY_ARGUMENTS[1]} is needed")
    if _is_less(most, least):
        raise invalid_argument(RETRY_ARGUMENTS[2], subject, f"less than {RETRY_ARGUMENTS[1]}")
    return queue_type


def _type_refusal(field: Field) -> str | None:
    """Returns the reason to refuse the name of a type."""
    if field.code != "S":
        return unacceptable(field)
    return None if field.term() in type_names() else f"\"unsupported queue type '{field.term()}'\""


def _is_less(one: Field | None, other: Field | None) -> bool:
    """Returns whether two arguments are numbers, and the first is the smaller one."""
    return (
        one is not None
        and other is not None
        and isinstance(one.value, int)
        and isinstance(other.value, int)
        and one.value < other.value
    )


def _all_arguments() -> Iterator[Argument]:
    return chain(ARGUMENTS, own_arguments())


def takes_over_strictly(arguments: Table) -> bool:
    """Returns whether the next single active consumer waits until the one before it holds
    nothing."""
    field = arguments.get(TAKE_OVER_ARGUMENT)
    return field is None or field.term() != IMMEDIATE


def check_properties(
    subject: Subject,
    queue_type: QueueType,
    *,
    durable: bool,
    exclusive: bool,
    auto_delete: bool,
    server_named: bool,
) -> None:
    """Refuses properties that the type can't have.

    Raises:
        PreconditionFailed: a queue of a Raft group that is not durable, exclusive, auto-delete or
            unnamed.
    """
    if queue_type.placement is not PlacementKind.RAFT:
        return
    if server_named:
        raise server_named_queue(queue_type.value)
    if auto_delete:
        raise invalid_property("auto-delete", subject)
    if exclusive:
        raise invalid_property("exclusive-owner", subject)
    if not durable:
        raise invalid_property("non-durable", subject)


def check_equivalent_arguments(
    subject: Subject, queue_type: QueueType, current: Table, received: Table
) -> None:
    """Refuses a redeclare whose arguments differ in a key that the queue's type knows.

    Raises:
        PreconditionFailed: they do.
    """
    asked_type = type_name_of(received)
    if asked_type != queue_type.value:
        raise inequivalent(TYPE_ARGUMENT, subject, f"'{asked_type}'", f"'{queue_type.value}'")
    rules = rules_of(queue_type.value)
    for argument in _all_arguments():
        if rules is None or not rules.is_foreign(argument.name):
            check_equivalent_argument(argument.name, subject, current, received)


def is_quorum_as_classic(queue_type: QueueType, received: Table) -> bool:
    """Returns whether a redeclare takes a quorum queue for a classic one."""
    return queue_type is QueueType.QUORUM and type_name_of(received) == QueueType.CLASSIC.value


def check_common_arguments(subject: Subject, current: Table, received: Table) -> None:
    """Refuses a redeclare of a quorum queue as a classic one whose arguments differ in what both
    have. Raises PreconditionFailed."""
    for key in COMMON_ARGUMENTS:
        check_equivalent_argument(key, subject, current, received)


def check_equivalent_argument(key: str, subject: Subject, current: Table, received: Table) -> None:
    """Refuses a redeclare that differs in this argument.

    Raises:
        PreconditionFailed: it does.
    """
    old, new = current.get(key), received.get(key)
    if old is None and new is None:
        return
    if old is None or new is None:
        raise inequivalent(key, subject, _described(new), _described(old))
    if not old.equivalent(new):
        raise inequivalent(key, subject, f"'{new.term()}'", f"'{old.term()}'")


def _described(field: Field | None) -> str:
    if field is None:
        return "none"
    return f"the value '{field.term()}' of type '{field.type_name}'"
