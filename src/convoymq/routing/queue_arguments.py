"""Queue arguments: which exist, and what values they take.

One row per argument in `ARGUMENTS`, in the order in which RabbitMQ checks them. Which type serves
which is said by its `TypeRules`. Keys that no row names are kept, shown, and never compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from convoymq.model.durations import duration_ms
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
from convoymq.model.tables import INTEGER_CODES, Field, Table
from convoymq.routing.queue_types import (
    Argument,
    Check,
    PlacementKind,
    home_type_with,
    own_arguments,
    rules_of,
    type_names,
)
from convoymq.routing.types import QueueType

TYPE_ARGUMENT = "x-queue-type"
DURATION_MS_MAX = 315_360_000_000
PRIORITY_MAX = 255
DEDUPLICATION_COUNT_MAX = 1_000_000
DEDUPLICATION_TIME_MS_MAX = 7 * 24 * 3600 * 1000
TAKE_OVER_ARGUMENT = "x-single-active-take-over"
STRICT = "strict"
IMMEDIATE = "immediate"
SEGMENT_ARGUMENT = "x-stream-max-segment-size-bytes"
SEGMENT_BYTES_MAX = 3_000_000_000
COMMON_ARGUMENTS = (
    "x-dead-letter-exchange", "x-dead-letter-routing-key", "x-expires", "x-max-length",
    "x-max-length-bytes", "x-single-active-consumer", "x-message-ttl",
)  # fmt: skip
"""Arguments that are compared when a quorum queue is declared again as a classic one (RabbitMQ's
list)."""
RETRY_ARGUMENTS = ("x-delayed-retry-type", "x-delayed-retry-min", "x-delayed-retry-max")
FILTER_ARGUMENTS = ("x-stream-filter", "x-stream-match-unfiltered")
"""By these a consumer of a stream asks for some of its messages only."""


def _unacceptable(field: Field) -> str:
    return f"{{unacceptable_type,{field.type_name}}}"


def _anything(field: Field, arguments: Table) -> str | None:
    return None


def _boolean(field: Field, arguments: Table) -> str | None:
    return None if field.code == "t" else _unacceptable(field)


def _string(field: Field, arguments: Table) -> str | None:
    return None if field.code == "S" else _unacceptable(field)


def _integer(minimum: int, maximum: int | None = None, above: str = "value_too_large") -> Check:
    def check(field: Field, arguments: Table) -> str | None:
        number = field.value
        if field.code not in INTEGER_CODES or not isinstance(number, int):
            return f'"expected integer, got {field.type_name}"'
        if number < 0:
            return f"{{value_negative,{number}}}"
        if number < minimum:
            return f"{{value_zero,{number}}}"
        if maximum is not None and number > maximum:
            return f"{{{above},{number}}}"
        return None

    return check


def _one_of(reason: str, *allowed: str) -> Check:
    def check(field: Field, arguments: Table) -> str | None:
        if field.code != "S":
            return _unacceptable(field)
        return None if field.term() in allowed else reason

    return check


def _dead_letter_key(field: Field, arguments: Table) -> str | None:
    if field.code == "S" and "x-dead-letter-exchange" not in arguments:
        return "routing_key_but_no_dlx_defined"
    return _string(field, arguments)


def _queue_type(field: Field, arguments: Table) -> str | None:
    if field.code != "S":
        return _unacceptable(field)
    return None if field.term() in type_names() else f"\"unsupported queue type '{field.term()}'\""


def _queue_version(field: Field, arguments: Table) -> str | None:
    reason = _integer(0)(field, arguments)
    if reason is None and field.value != 2:
        return f"\"unsupported queue version '{field.term()}'\""
    return reason


def _max_age(field: Field, arguments: Table) -> str | None:
    if field.code != "S":
        return _unacceptable(field)
    return "invalid_max_age" if duration_ms(field.term()) is None else None


_COUNT = _integer(0)
_DURATION = _integer(0, DURATION_MS_MAX)

ARGUMENTS: tuple[Argument, ...] = (
    Argument("x-expires", _integer(1, DURATION_MS_MAX)),
    Argument("x-message-ttl", _DURATION),
    Argument("x-dead-letter-exchange", _string),
    Argument("x-dead-letter-routing-key", _dead_letter_key),
    Argument(
        "x-dead-letter-strategy",
        _one_of("invalid_dlx_strategy", "at-most-once", "at-least-once"),
    ),
    Argument("x-max-length", _COUNT),
    Argument("x-max-length-bytes", _COUNT),
    Argument("x-max-in-memory-length", _COUNT),
    Argument("x-max-in-memory-bytes", _COUNT),
    Argument("x-max-priority", _integer(0, PRIORITY_MAX, "max_value_exceeded")),
    Argument(
        "x-overflow",
        _one_of("invalid_overflow", "drop-head", "reject-publish", "reject-publish-dlx"),
    ),
    Argument("x-queue-mode", _one_of("invalid_queue_mode", "default", "lazy")),
    Argument("x-queue-version", _queue_version),
    Argument("x-single-active-consumer", _boolean),
    # Ours: when the next consumer becomes active (docs/adr/0027-refused-until-served.md).
    Argument(TAKE_OVER_ARGUMENT, _one_of("invalid_single_active_take_over", STRICT, IMMEDIATE)),
    # Ours: where a message goes that comes back (docs/adr/0050-order-of-delivery.md).
    Argument(
        "x-requeue-position", _one_of("invalid_requeue_position", "original", "front", "tail")
    ),
    Argument("x-priority-mode", _one_of("invalid_priority_mode", "strict", "two-classes")),
    # Ours: whether messages expire behind others (docs/adr/0043-time-limits-lengths-priorities.md).
    Argument("x-message-expiry", _one_of("invalid_message_expiry", "head", "due")),
    Argument(TYPE_ARGUMENT, _queue_type),
    Argument("x-quorum-initial-group-size", _integer(1)),
    Argument("x-quorum-target-group-size", _integer(1)),
    Argument(
        "x-queue-leader-locator",
        _one_of("invalid_queue_locator_arg", "client-local", "balanced"),
    ),
    Argument(
        "x-queue-master-locator",
        _one_of("invalid_queue_locator_arg", "min-masters", "client-local", "random"),
    ),
    # RabbitMQ does not look at the value here either; -1 means without limit.
    Argument("x-delivery-limit", _anything),
    # Ours: records what becomes of every message (docs/adr/0009-trace.md).
    Argument("x-trace", _boolean),
    Argument("x-consumer-timeout", _DURATION),
    Argument("x-consumer-disconnected-timeout", _DURATION),
    Argument(
        "x-delayed-retry-type",
        _one_of("invalid_delayed_retry_type", "disabled", "all", "failed", "returned"),
    ),
    Argument("x-delayed-retry-min", _DURATION),
    Argument("x-delayed-retry-max", _DURATION),
    # Ours: repeats by message-id (docs/adr/0052-repeats-by-message-id.md).
    Argument("x-deduplication-count", _integer(0, DEDUPLICATION_COUNT_MAX)),
    Argument("x-deduplication-time", _integer(0, DEDUPLICATION_TIME_MS_MAX)),
    # These belong to streams.
    Argument("x-max-age", _max_age),
    Argument("x-stream-max-segment-size-bytes", _COUNT),
    Argument("x-stream-filter-size-bytes", _COUNT),
    Argument("x-initial-cluster-size", _integer(1)),
    # Of consumers; who asks for a filter here would get every message.
    *(Argument(name, _anything) for name in FILTER_ARGUMENTS),
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
    if type_field is not None and (reason := _queue_type(type_field, arguments)) is not None:
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
        if name != TYPE_ARGUMENT and not rules.takes(name):
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
        if argument.name == TYPE_ARGUMENT:
            continue
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
