"""Queue arguments: which exist, what values they take, which types know and serve them.

One row per argument in `RULES`, in the order in which RabbitMQ checks them. To serve an argument
from now on, add the type to its row's `served_by`. Keys that no row names are kept, shown, and
never compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
from convoymq.routing.types import QueueType

TYPE_ARGUMENT = "x-queue-type"
DURATION_MS_MAX = 315_360_000_000
PRIORITY_MAX = 255
TAKE_OVER_ARGUMENT = "x-single-active-take-over"
STRICT = "strict"
IMMEDIATE = "immediate"
SEGMENT_ARGUMENT = "x-stream-max-segment-size-bytes"
SEGMENT_BYTES_MAX = 3_000_000_000
FILTER_ARGUMENTS = ("x-stream-filter", "x-stream-match-unfiltered")
"""By these a consumer of a stream asks for some of its messages only."""

Check = Callable[[Field, Table], "str | None"]
"""Returns the reason to refuse a value, as an Erlang term, or None."""


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
    known = {queue_type.value for queue_type in QueueType}
    return None if field.term() in known else f"\"unsupported queue type '{field.term()}'\""


def _queue_version(field: Field, arguments: Table) -> str | None:
    reason = _integer(0)(field, arguments)
    if reason is None and field.value != 2:
        return f"\"unsupported queue version '{field.term()}'\""
    return reason


def _max_age(field: Field, arguments: Table) -> str | None:
    if field.code != "S":
        return _unacceptable(field)
    return "invalid_max_age" if duration_ms(field.term()) is None else None


@dataclass(frozen=True, slots=True)
class Rule:
    """One argument. `served_by`: types that do what it says. `foreign_to`: types that refuse it
    as belonging to others; a type in neither knows it and does not serve it yet.
    """

    name: str
    check: Check
    served_by: frozenset[QueueType]
    foreign_to: frozenset[QueueType] = frozenset()


_CLASSIC = frozenset({QueueType.CLASSIC})
_QUORUM = frozenset({QueueType.QUORUM})
_STREAM = frozenset({QueueType.STREAM})
_BOTH = _CLASSIC | _QUORUM
_ALL = _BOTH | _STREAM
_NONE: frozenset[QueueType] = frozenset()

_COUNT = _integer(0)
_DURATION = _integer(0, DURATION_MS_MAX)

RULES: tuple[Rule, ...] = (
    Rule("x-expires", _integer(1, DURATION_MS_MAX), _CLASSIC, _STREAM),
    Rule("x-message-ttl", _DURATION, _CLASSIC, _STREAM),
    Rule("x-dead-letter-exchange", _string, _NONE, _STREAM),
    Rule("x-dead-letter-routing-key", _dead_letter_key, _NONE, _STREAM),
    Rule(
        "x-dead-letter-strategy",
        _one_of("invalid_dlx_strategy", "at-most-once", "at-least-once"),
        _NONE,
        _CLASSIC | _STREAM,
    ),
    Rule("x-max-length", _COUNT, _CLASSIC, _STREAM),
    Rule("x-max-length-bytes", _COUNT, _CLASSIC | _STREAM),
    # Accepted without effect, as RabbitMQ does since 3.10.
    Rule("x-max-in-memory-length", _COUNT, _QUORUM, _CLASSIC | _STREAM),
    Rule("x-max-in-memory-bytes", _COUNT, _QUORUM, _CLASSIC | _STREAM),
    Rule(
        "x-max-priority", _integer(0, PRIORITY_MAX, "max_value_exceeded"), _NONE, _QUORUM | _STREAM
    ),
    Rule(
        "x-overflow",
        _one_of("invalid_overflow", "drop-head", "reject-publish", "reject-publish-dlx"),
        _CLASSIC,
        _STREAM,
    ),
    # Accepted without effect, as RabbitMQ does since 3.12.
    Rule(
        "x-queue-mode",
        _one_of("invalid_queue_mode", "default", "lazy"),
        _CLASSIC,
        _QUORUM | _STREAM,
    ),
    Rule("x-queue-version", _queue_version, _CLASSIC, _QUORUM | _STREAM),
    Rule("x-single-active-consumer", _boolean, _BOTH, _STREAM),
    # Ours: when the next consumer becomes active (docs/adr/0027-refused-until-served.md).
    Rule(
        TAKE_OVER_ARGUMENT,
        _one_of("invalid_single_active_take_over", STRICT, IMMEDIATE),
        _BOTH,
        _STREAM,
    ),
    Rule(TYPE_ARGUMENT, _queue_type, _ALL),
    Rule("x-quorum-initial-group-size", _integer(1), _QUORUM, _CLASSIC | _STREAM),
    # Classic queues keep it like any key they have never heard of.
    Rule("x-quorum-target-group-size", _integer(1), _CLASSIC, _STREAM),
    Rule(
        "x-queue-leader-locator",
        _one_of("invalid_queue_locator_arg", "client-local", "balanced"),
        _ALL,
    ),
    Rule(
        "x-queue-master-locator",
        _one_of("invalid_queue_locator_arg", "min-masters", "client-local", "random"),
        _CLASSIC,
        _QUORUM | _STREAM,
    ),
    # RabbitMQ does not look at the value here either; -1 means without limit.
    Rule("x-delivery-limit", _anything, _QUORUM, _CLASSIC | _STREAM),
    # Ours: records what becomes of every message (docs/adr/0009-trace.md).
    Rule("x-trace", _boolean, _QUORUM | _STREAM),
    Rule("x-consumer-timeout", _DURATION, _NONE, _CLASSIC | _STREAM),
    Rule("x-consumer-disconnected-timeout", _DURATION, _NONE, _CLASSIC | _STREAM),
    Rule(
        "x-delayed-retry-type",
        _one_of("invalid_delayed_retry_type", "disabled", "all", "failed", "returned"),
        _NONE,
        _CLASSIC | _STREAM,
    ),
    Rule("x-delayed-retry-min", _DURATION, _NONE, _CLASSIC | _STREAM),
    Rule("x-delayed-retry-max", _DURATION, _NONE, _CLASSIC | _STREAM),
    # These belong to streams.
    Rule("x-max-age", _max_age, _STREAM, _BOTH),
    Rule("x-stream-max-segment-size-bytes", _COUNT, _STREAM, _BOTH),
    Rule("x-stream-filter-size-bytes", _COUNT, _NONE, _BOTH),
    Rule("x-initial-cluster-size", _integer(1), _STREAM, _BOTH),
    # Of consumers; who asks for a filter here would get every message.
    *(Rule(name, _anything, _NONE, _BOTH) for name in FILTER_ARGUMENTS),
)


def type_of(arguments: Table) -> QueueType:
    """Return the type that the arguments ask for; without `x-queue-type` it is classic.

    The value must have passed `check_arguments`.
    """
    field = arguments.get(TYPE_ARGUMENT)
    return QueueType.CLASSIC if field is None else QueueType(field.term())


def check_arguments(subject: Subject, arguments: Table) -> QueueType:
    """Refuse arguments of a new queue that no queue of its type could honour.

    Returns:
        The queue's type.
    Raises:
        PreconditionFailed: a bad value, an argument of another type, or one not served yet.
    """
    type_field = arguments.get(TYPE_ARGUMENT)
    if type_field is not None and (reason := _queue_type(type_field, arguments)) is not None:
        raise invalid_argument(TYPE_ARGUMENT, subject, reason)
    queue_type = type_of(arguments)
    present = [(rule, field) for rule in RULES if (field := arguments.get(rule.name)) is not None]
    for rule, field in present:
        reason = rule.check(field, arguments)
        if reason is not None:
            raise invalid_argument(rule.name, subject, reason)
    for rule, _ in present:
        if queue_type in rule.foreign_to:
            raise foreign_argument(rule.name, subject, queue_type.value)
    for rule, _ in present:
        if queue_type not in rule.served_by:
            by_classic = QueueType.CLASSIC in rule.served_by and "quorum" not in rule.name
            raise unserved_argument(rule.name, subject, queue_type.value, by_classic=by_classic)
    segment = arguments.get(SEGMENT_ARGUMENT)
    if segment and isinstance(segment.value, int) and segment.value > SEGMENT_BYTES_MAX:
        raise segment_too_large(subject)
    return queue_type


def takes_over_strictly(arguments: Table) -> bool:
    """Whether the next single active consumer waits until the one before it holds nothing."""
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
    """Refuse properties that the type can't have.

    Raises:
        PreconditionFailed: a replicated queue that is not durable, exclusive, auto-delete or
            unnamed.
    """
    if not queue_type.is_replicated:
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
    """Refuse a redeclare whose arguments differ in a key that the queue's type knows.

    Raises:
        PreconditionFailed: they do.
    """
    asked = received.get(TYPE_ARGUMENT)
    asked_type = asked.term() if asked is not None else QueueType.CLASSIC.value
    if asked_type != queue_type.value:
        raise inequivalent(TYPE_ARGUMENT, subject, f"'{asked_type}'", f"'{queue_type.value}'")
    for rule in RULES:
        if rule.name != TYPE_ARGUMENT and queue_type not in rule.foreign_to:
            check_equivalent_argument(rule.name, subject, current, received)


def check_equivalent_argument(key: str, subject: Subject, current: Table, received: Table) -> None:
    """Refuse a redeclare that differs in this argument.

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
