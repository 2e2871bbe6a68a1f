"""The keys of policies: which values they take, and how a policy, an operator policy and a queue's
arguments are joined.

One row per key in `KEYS`. Which type of queue serves which key is said by its
`TypeRules.policies`; exchanges serve `EXCHANGE_KEYS`. Texts are those of RabbitMQ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from convoymq.model.durations import duration_ms
from convoymq.model.errors import ValidationFailed
from convoymq.routing.queue_arguments import (
    DEDUPLICATION_COUNT_MAX,
    DEDUPLICATION_TIME_MS_MAX,
    DURATION_MS_MAX,
    SEGMENT_BYTES_MAX,
)

Setting: TypeAlias = bool | int | str | tuple[str, ...]
"""The value of a key."""
Merge: TypeAlias = Callable[[Setting, Setting], Setting]
"""(from the policy, from the operator policy or the argument) -> what acts."""
Check: TypeAlias = Callable[[object], bool]

COUNT_MAX = (1 << 63) - 1
LIMIT_MAX = (1 << 31) - 1
FILTER_BYTES = range(16, 256)
RATE_MAX = 1_000_000_000_000
PARTITIONS_MAX = 1024
"""Of one route version of a topic."""
CHANGES_MAX = 3600
UNIT_MS = range(100, 3_600_001)
"""Of the autoscaler's times."""
HA_MODES = ("nodes", "exactly", "all")
"""Modes of mirroring; a later one asks for more."""
MIRRORING_KEYS = (
    "ha-params", "ha-sync-mode", "ha-sync-batch-size", "ha-promote-on-shutdown",
    "ha-promote-on-failure",
)  # fmt: skip
"""Keys that mean nothing without `ha-mode`."""
NAMES_MAX = 255
"""Of nodes in one value."""
KEYS_MAX = 64
"""Of one definition."""


def _first(policy: Setting, other: Setting) -> Setting:
    return policy


def _other(policy: Setting, other: Setting) -> Setting:
    return other


def _lower(policy: Setting, other: Setting) -> Setting:
    assert isinstance(policy, int)
    assert isinstance(other, int)
    return min(policy, other)


def _higher(policy: Setting, other: Setting) -> Setting:
    assert isinstance(policy, int)
    assert isinstance(other, int)
    return max(policy, other)


def _stricter(policy: Setting, other: Setting) -> Setting:
    """Returns the lower limit; a negative one is none."""
    assert isinstance(policy, int)
    assert isinstance(other, int)
    return max(policy, other) if min(policy, other) < 0 else min(policy, other)


def _more_mirrors(policy: Setting, other: Setting) -> Setting:
    """Returns the mode that asks for more mirrors."""
    assert isinstance(policy, str)
    assert isinstance(other, str)
    return max(policy, other, key=HA_MODES.index)


def _larger(policy: Setting, other: Setting) -> Setting:
    """Returns the larger number, or the longer list; a number comes before a list."""
    if isinstance(policy, tuple) and isinstance(other, tuple):
        return max(policy, other, key=len)
    if isinstance(policy, int) and isinstance(other, int):
        return max(policy, other)
    return other if isinstance(policy, tuple) else policy


def _any(value: object) -> bool:
    """`_check_mirrors` looks at it, with the others."""
    return True


def _text(value: object) -> bool:
    return isinstance(value, str)


def _one_of(*allowed: str) -> Check:
    return lambda value: isinstance(value, str) and value in allowed


def _integer(lowest: int, highest: int = COUNT_MAX) -> Check:
    return lambda value: type(value) is int and lowest <= value <= highest


def _max_age(value: object) -> bool:
    return isinstance(value, str) and duration_ms(value) is not None


_COUNT = _integer(0)
_DURATION = _integer(0, DURATION_MS_MAX)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of policies."""

    name: str
    check: Check
    noun: str
    """Noun for a value that is refused: `-1 is not a valid …`."""
    operator: Merge | None = None
    """Joins a policy and an operator policy; None: operator policies do not have the key."""
    with_argument: Merge = _other
    argument: str = ""
    """The queue argument that says the same; empty: the name with `x-` in front."""

    @property
    def with_operator(self) -> Merge:
        """Returns what joins a policy and an operator policy."""
        return self.operator or _other


def _ranged(name: str, low: int, high: int, noun: str, unit: str = "") -> Key:
    """Returns a key whose refusal names the range."""
    return Key(name, _integer(low, high), f"{noun}. Valid range is {low}-{high}{unit}")


_ROWS: tuple[Key, ...] = (
    Key("message-ttl", _DURATION, "message TTL", operator=_lower, with_argument=_lower),
    Key("expires", _integer(1, DURATION_MS_MAX), "queue expiry", operator=_lower,
        with_argument=_lower),
    Key("max-length", _COUNT, "maximum length", operator=_lower, with_argument=_lower),
    Key("max-length-bytes", _COUNT, "maximum length in bytes", operator=_lower,
        with_argument=_lower),
    Key("max-in-memory-length", _COUNT, "maximum memory in bytes", operator=_lower),
    Key("max-in-memory-bytes", _COUNT, "maximum memory in bytes", operator=_lower),
    # Classic queues do not follow the policy: `TypeRules.prevailing_arguments`.
    Key("overflow", _one_of("drop-head", "reject-publish", "reject-publish-dlx"), "overflow value",
        operator=_other, with_argument=_first),
    Key("delivery-limit", _integer(-LIMIT_MAX, LIMIT_MAX), "delivery limit", operator=_stricter,
        with_argument=_stricter),
    Key("dead-letter-exchange", _text, "dead letter exchange name"),
    Key("dead-letter-routing-key", _text, "dead letter routing key"),
    Key("dead-letter-strategy", _one_of("at-most-once", "at-least-once"), "dead letter strategy"),
    Key("queue-leader-locator",
        _one_of("client-local", "balanced", "random", "least-leaders", "min-masters"),
        "queue leader locator value", with_argument=_first),
    Key("queue-master-locator", _one_of("min-masters", "client-local", "random"),
        "queue master locator value", operator=_other, with_argument=_first),
    Key("ha-mode", _one_of(*HA_MODES), "ha-mode value", operator=_more_mirrors),
    Key("ha-params", _any, "ha-params value", operator=_larger),
    Key("ha-sync-mode", _any, "ha-sync-mode value", operator=_other),
    Key("ha-sync-batch-size", _any, "ha-sync-batch-size value"),
    Key("ha-promote-on-shutdown", _any, "ha-promote-on-shutdown value"),
    Key("ha-promote-on-failure", _any, "ha-promote-on-failure value"),
    Key("queue-mode", _one_of("default", "lazy"), "queue-mode value"),
    Key("queue-version", _integer(2, 2), "queue-version value", operator=_other),
    Key("target-group-size", _integer(1, 255), "target count", operator=_higher,
        with_argument=_higher, argument="x-quorum-target-group-size"),
    Key("consumer-timeout", _DURATION, "consumer timeout", with_argument=_lower),
    Key("consumer-disconnected-timeout", _DURATION, "consumer disconnected timeout",
        with_argument=_lower),
    Key("delayed-retry-type", _one_of("disabled", "all", "failed", "returned"),
        "delayed retry type", operator=_other, with_argument=_first),
    Key("delayed-retry-min", _DURATION, "delayed retry minimum", operator=_higher,
        with_argument=_lower),
    Key("delayed-retry-max", _DURATION, "delayed retry maximum", operator=_lower,
        with_argument=_lower),
    Key("requeue-position", _one_of("original", "front", "tail"), "requeue position"),
    Key("message-expiry", _one_of("head", "due"), "message expiry"),
    Key("priority-mode", _one_of("strict", "two-classes"), "priority mode"),
    _ranged("deduplication-count", 0, DEDUPLICATION_COUNT_MAX, "number of message-ids"),
    _ranged("deduplication-time", 0, DEDUPLICATION_TIME_MS_MAX, "deduplication time", " ms"),
    Key("max-age", _max_age, "max age"),
    Key("stream-max-segment-size-bytes", _integer(0, SEGMENT_BYTES_MAX), "segment size"),
    _ranged("stream-filter-size-bytes", FILTER_BYTES.start, FILTER_BYTES.stop - 1, "filter size"),
    Key("initial-cluster-size", _integer(0, 255), "cluster size"),
    Key("group-ttl", _max_age, "time to live of groups"),
    Key("autoscale", _one_of("on", "off"), "autoscale value"),
    _ranged("autoscale-target-messages", 1, RATE_MAX, "number of messages a second"),
    _ranged("autoscale-target-bytes", 1, RATE_MAX, "number of bytes a second"),
    _ranged("autoscale-partitions-min", 1, PARTITIONS_MAX, "number of partitions"),
    _ranged("autoscale-partitions-max", 1, PARTITIONS_MAX, "number of partitions"),
    _ranged("autoscale-changes-per-hour", 1, CHANGES_MAX, "number of changes an hour"),
    _ranged("autoscale-unit", UNIT_MS.start, UNIT_MS.stop - 1, "unit", " ms"),
    Key("seal-after", _max_age, "time without a leader"),
    Key("weak-wait", _max_age, "wait of weak topics"),
    Key("lost-after", _max_age, "time until a partition is lost"),
    Key("alternate-exchange", _text, "alternate exchange name"),
)  # fmt: skip

KEYS: Mapping[str, Key] = {key.name: key for key in _ROWS}
EXCHANGE_KEYS = frozenset(("alternate-exchange",))
"""Keys that act in exchanges, and mean nothing to a queue."""
AUTOSCALE_KEYS = (
    "autoscale", "autoscale-target-messages", "autoscale-target-bytes", "autoscale-partitions-min",
    "autoscale-partitions-max", "autoscale-changes-per-hour", "autoscale-unit",
)  # fmt: skip
"""Keys that say whether and how a topic scales by itself."""
TOPIC_KEYS = frozenset((
    "max-age", "max-length-bytes", "stream-max-segment-size-bytes", "group-ttl", "seal-after",
    "weak-wait", "lost-after", *AUTOSCALE_KEYS,
))  # fmt: skip
"""Keys that act in ordered topics."""
BY_ARGUMENT: Mapping[str, Key] = {
    key.argument or f"x-{key.name}": key for key in _ROWS if key.name not in EXCHANGE_KEYS
}
"""Queue argument -> the key that says the same."""


def checked_definition(
    definition: Mapping[str, object], *, operator: bool = False
) -> dict[str, Setting]:
    """Returns a definition whose keys and values are those of a policy, or an operator policy.

    Raises:
        ValidationFailed: they are not.
    """
    if not definition:
        raise invalid("no policy provided")
    if len(definition) > KEYS_MAX:
        raise invalid(f"a definition has at most {KEYS_MAX} keys")
    found: dict[str, Setting] = {}
    unknown: dict[str, object] = {}
    for name in sorted(definition):
        value = definition[name]
        key = KEYS.get(name)
        if key is None or (operator and key.operator is None):
            unknown[name] = value
        elif name == "ha-params" and isinstance(value, list | tuple):
            found[name] = _names_of_nodes(value)
        elif not key.check(value) or not isinstance(value, bool | int | str):
            raise invalid(f"{term(value)} is not a valid {key.noun}")
        else:
            found[name] = value
    if unknown:
        listed = ",".join(f"{{{term(name)},{term(value)}}}" for name, value in unknown.items())
        raise invalid(f"[{listed}] are not recognised policy settings")
    _check_retry(found)
    _check_mirrors(found)
    if reason := contradiction(found):
        raise invalid(reason)
    return found


def _names_of_nodes(value: Sequence[object]) -> tuple[str, ...]:
    """Returns a list of names. Raises ValidationFailed."""
    if not value or len(value) > NAMES_MAX:
        raise invalid('ha-mode="nodes" list must be non-empty')
    wrong = [each for each in value if not isinstance(each, str)]
    if wrong:
        raise invalid(f'ha-mode="nodes" takes a list of strings, {term(wrong)} was not a string')
    return tuple(str(each) for each in value)


def _check_mirrors(found: Mapping[str, Setting]) -> None:
    """Raises ValidationFailed for settings of mirroring that are wrong, or do not go together."""
    mode, params = found.get("ha-mode"), found.get("ha-params")
    if mode is None:
        if any(key in found for key in MIRRORING_KEYS):
            raise invalid(
                "ha-mode must be specified to specify ha-params, ha-sync-mode or "
                "ha-promote-on-shutdown"
            )
        return
    given = "none" if params is None else term(params)
    if mode == "all" and params is not None:
        raise invalid('ha-mode="all" does not take parameters')
    if mode == "exactly" and not (type(params) is int and 0 < params <= COUNT_MAX):
        raise invalid(f'ha-mode="exactly" takes an integer, {given} given')
    if mode == "nodes" and not isinstance(params, tuple):
        raise invalid(f'ha-mode="nodes" takes a list, {given} given')
    size = found.get("ha-sync-batch-size", 1)
    if not (type(size) is int and 0 < size <= COUNT_MAX):
        raise invalid(f"ha-sync-batch-size takes an integer greater than 0, {term(size)} given")
    for key, allowed in _MIRRORING_VALUES.items():
        value = found.get(key, allowed[0])
        if value not in allowed:
            first, second = allowed
            raise invalid(f'{key} must be "{first}" or "{second}", got {term(value)}')


_MIRRORING_VALUES = {
    "ha-sync-mode": ("manual", "automatic"),
    "ha-promote-on-shutdown": ("always", "when-synced"),
    "ha-promote-on-failure": ("always", "when-synced"),
}


def contradiction(found: Mapping[str, Setting]) -> str:
    """Returns what is wrong with bounds of an autoscaler that do not go together, or nothing."""
    least, most = found.get("autoscale-partitions-min"), found.get("autoscale-partitions-max")
    if isinstance(least, int) and isinstance(most, int) and most < least:
        return "autoscale-partitions-max is less than autoscale-partitions-min"
    return ""


def _check_retry(found: Mapping[str, Setting]) -> None:
    """Raises ValidationFailed for times of a delayed retry that do not go together."""
    least, most = found.get("delayed-retry-min"), found.get("delayed-retry-max")
    if found.get("delayed-retry-type", "disabled") != "disabled" and least is None:
        raise invalid("delayed-retry-type needs delayed-retry-min")
    if isinstance(least, int) and isinstance(most, int) and most < least:
        raise invalid("delayed-retry-max is less than delayed-retry-min")


def invalid(reason: str) -> ValidationFailed:
    """Returns a policy, a parameter or a limit that is not acceptable."""
    return ValidationFailed(f"Validation failed\n\n{reason}")


def term(value: object) -> str:
    """Returns a JSON value as RabbitMQ prints it inside these texts: as an Erlang term."""
    match value:
        case str():
            return f"<<{json.dumps(value, ensure_ascii=False)}>>"
        case list() | tuple():
            return f"[{','.join(term(each) for each in value)}]"
        case dict():
            inside = ",".join(f"{term(name)} => {term(each)}" for name, each in value.items())
            return f"#{{{inside}}}"
        case _:
            return json.dumps(value)
