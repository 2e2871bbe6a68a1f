"""The keys of policies: which values they take, and how a policy, an operator policy and a queue's
arguments are joined.

One row per key in `KEYS`. Which type of queue serves which key is said by its
`TypeRules.policies`; exchanges serve `EXCHANGE_KEYS`. Texts are those of RabbitMQ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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

Setting: TypeAlias = bool | int | str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of policies."""

    name: str
    check: Check
    noun: str
    """Noun for a value that is refused: `-1 is not a valid …`."""
    for_operators: bool = False
    """Operator policies may have it."""
    with_operator: Merge = _other
    with_argument: Merge = _other
    argument: str = ""
    """The queue argument that says the same; empty: the name with `x-` in front."""


_ROWS: tuple[Key, ...] = (
    Key(
        name="message-ttl",
        check=_DURATION,
        noun="message TTL",
        for_operators=True,
        with_operator=_lower,
        with_argument=_lower,
    ),
    Key(
        name="expires",
        check=_integer(1, DURATION_MS_MAX),
        noun="queue expiry",
        for_operators=True,
        with_operator=_lower,
        with_argument=_lower,
    ),
    Key(
        name="max-length",
        check=_COUNT,
        noun="maximum length",
        for_operators=True,
        with_operator=_lower,
        with_argument=_lower,
    ),
    Key(
        name="max-length-bytes",
        check=_COUNT,
        noun="maximum length in bytes",
        for_operators=True,
        with_operator=_lower,
        with_argument=_lower,
    ),
    Key(
        name="max-in-memory-length",
        check=_COUNT,
        noun="maximum memory in bytes",
        for_operators=True,
        with_operator=_lower,
    ),
    Key(
        name="max-in-memory-bytes",
        check=_COUNT,
        noun="maximum memory in bytes",
        for_operators=True,
        with_operator=_lower,
    ),
    Key(
        name="overflow",
        check=_one_of("drop-head", "reject-publish", "reject-publish-dlx"),
        noun="overflow value",
        for_operators=True,
        # Classic queues do not follow: `TypeRules.prevailing_arguments`.
        with_argument=_first,
    ),
    Key(
        name="delivery-limit",
        check=_integer(-LIMIT_MAX, LIMIT_MAX),
        noun="delivery limit",
        for_operators=True,
        with_operator=_stricter,
        with_argument=_stricter,
    ),
    Key(name="dead-letter-exchange", check=_text, noun="dead letter exchange name"),
    Key(name="dead-letter-routing-key", check=_text, noun="dead letter routing key"),
    Key(
        name="dead-letter-strategy",
        check=_one_of("at-most-once", "at-least-once"),
        noun="dead letter strategy",
    ),
    Key(
        name="queue-leader-locator",
        check=_one_of("client-local", "balanced", "random", "least-leaders", "min-masters"),
        noun="queue leader locator value",
        with_argument=_first,
    ),
    Key(
        name="queue-master-locator",
        check=_one_of("min-masters", "client-local", "random"),
        noun="queue master locator value",
        for_operators=True,
        with_argument=_first,
    ),
    Key(name="queue-mode", check=_one_of("default", "lazy"), noun="queue-mode value"),
    Key(
        name="queue-version",
        check=_integer(2, 2),
        noun="queue-version value",
        for_operators=True,
    ),
    Key(
        name="target-group-size",
        check=_integer(1, 255),
        noun="target count",
        for_operators=True,
        with_operator=_higher,
        with_argument=_higher,
        argument="x-quorum-target-group-size",
    ),
    Key(
        name="consumer-timeout",
        check=_DURATION,
        noun="consumer timeout",
        with_argument=_lower,
    ),
    Key(
        name="consumer-disconnected-timeout",
        check=_DURATION,
        noun="consumer disconnected timeout",
        with_argument=_lower,
    ),
    Key(
        name="delayed-retry-type",
        check=_one_of("disabled", "all", "failed", "returned"),
        noun="delayed retry type",
        for_operators=True,
        with_argument=_first,
    ),
    Key(
        name="delayed-retry-min",
        check=_DURATION,
        noun="delayed retry minimum",
        for_operators=True,
        with_operator=_higher,
        with_argument=_lower,
    ),
    Key(
        name="delayed-retry-max",
        check=_DURATION,
        noun="delayed retry maximum",
        for_operators=True,
        with_operator=_lower,
        with_argument=_lower,
    ),
    Key(
        name="requeue-position",
        check=_one_of("original", "front", "tail"),
        noun="requeue position",
    ),
    Key(name="message-expiry", check=_one_of("head", "due"), noun="message expiry"),
    Key(name="priority-mode", check=_one_of("strict", "two-classes"), noun="priority mode"),
    Key(
        name="deduplication-count",
        check=_integer(0, DEDUPLICATION_COUNT_MAX),
        noun=f"number of message-ids. Valid range is 0-{DEDUPLICATION_COUNT_MAX}",
    ),
    Key(
        name="deduplication-time",
        check=_integer(0, DEDUPLICATION_TIME_MS_MAX),
        noun=f"deduplication time. Valid range is 0-{DEDUPLICATION_TIME_MS_MAX} ms",
    ),
    Key(name="max-age", check=_max_age, noun="max age"),
    Key(
        name="stream-max-segment-size-bytes",
        check=_integer(0, SEGMENT_BYTES_MAX),
        noun="segment size",
    ),
    Key(
        name="stream-filter-size-bytes",
        check=_integer(FILTER_BYTES.start, FILTER_BYTES.stop - 1),
        noun="filter size. Valid range is 16-255",
    ),
    Key(name="initial-cluster-size", check=_integer(0, 255), noun="cluster size"),
    Key(name="group-ttl", check=_max_age, noun="time to live of groups"),
    Key(name="autoscale", check=_one_of("on", "off"), noun="autoscale value"),
    Key(
        name="autoscale-target-messages",
        check=_integer(1, RATE_MAX),
        noun=f"number of messages a second. Valid range is 1-{RATE_MAX}",
    ),
    Key(
        name="autoscale-target-bytes",
        check=_integer(1, RATE_MAX),
        noun=f"number of bytes a second. Valid range is 1-{RATE_MAX}",
    ),
    Key(
        name="autoscale-partitions-min",
        check=_integer(1, PARTITIONS_MAX),
        noun=f"number of partitions. Valid range is 1-{PARTITIONS_MAX}",
    ),
    Key(
        name="autoscale-partitions-max",
        check=_integer(1, PARTITIONS_MAX),
        noun=f"number of partitions. Valid range is 1-{PARTITIONS_MAX}",
    ),
    Key(
        name="autoscale-changes-per-hour",
        check=_integer(1, CHANGES_MAX),
        noun=f"number of changes an hour. Valid range is 1-{CHANGES_MAX}",
    ),
    Key(
        name="autoscale-unit",
        check=_integer(UNIT_MS.start, UNIT_MS.stop - 1),
        noun=f"unit. Valid range is {UNIT_MS.start}-{UNIT_MS.stop - 1} ms",
    ),
    Key(name="seal-after", check=_max_age, noun="time without a leader"),
    Key(name="weak-wait", check=_max_age, noun="wait of weak topics"),
    Key(name="lost-after", check=_max_age, noun="time until a partition is lost"),
    Key(name="alternate-exchange", check=_text, noun="alternate exchange name"),
)

KEYS: Mapping[str, Key] = {key.name: key for key in _ROWS}
EXCHANGE_KEYS = frozenset(("alternate-exchange",))
"""Keys that act in exchanges, and mean nothing to a queue."""
AUTOSCALE_KEYS = (
    "autoscale", "autoscale-target-messages", "autoscale-target-bytes", "autoscale-partitions-min",
    "autoscale-partitions-max", "autoscale-changes-per-hour", "autoscale-unit",
)  # fmt: skip
"""Keys that say whether and how a topic scales by itself."""
TOPIC_KEYS = frozenset(
    (
        "max-age",
        "max-length-bytes",
        "stream-max-segment-size-bytes",
        "group-ttl",
        "seal-after",
        "weak-wait",
        "lost-after",
        *AUTOSCALE_KEYS,
    )
)
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
        if key is None or (operator and not key.for_operators):
            unknown[name] = value
        elif not key.check(value) or not isinstance(value, bool | int | str):
            raise invalid(f"{term(value)} is not a valid {key.noun}")
        else:
            found[name] = value
    if unknown:
        listed = ",".join(f"{{{term(name)},{term(value)}}}" for name, value in unknown.items())
        raise invalid(f"[{listed}] are not recognised policy settings")
    _check_retry(found)
    if reason := contradiction(found):
        raise invalid(reason)
    return found


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
