"""The settings of queues, exchanges and ordered topics, one row each: its argument and its key of
policies, the values it may have, how several sources of it are joined, the types that serve it, the
first version of the metadata machine that knows its argument there, and its name in machines.

Rows are in the order in which RabbitMQ checks arguments; texts are RabbitMQ's. A queue type that is
not in this table says itself what it serves (`routing.queue_types.TypeRules`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from convoymq.settings.values import (
    Ages,
    Boolean,
    DeadLetterKey,
    Integers,
    Name,
    Setting,
    Text,
    Values,
    Version,
    Words,
)

Merge: TypeAlias = Callable[[Setting, Setting], Setting]
"""(from the policy, from the operator policy or the argument) -> what acts."""

CLASSIC, QUORUM, STREAM = "classic", "quorum", "stream"
PARTITION, EXCHANGE = "partition", "exchange"
DECLARED_TYPES = (CLASSIC, QUORUM, STREAM)
"""Types that refuse arguments of each other."""
DURATION_MS_MAX = 315_360_000_000
LINK_RESUME_MS_MAX = 24 * 3600 * 1000
DEDUPLICATION_COUNT_MAX = 1_000_000
LIMIT_MAX = (1 << 31) - 1
PARTITIONS_MAX = 1024
"""Of one route version of a topic."""
SEGMENT_BYTES_MAX = 3_000_000_000
HA_MODES = ("nodes", "exactly", "all")
"""Modes of mirroring; a later one asks for more."""


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


@dataclass(frozen=True, slots=True)
class Key:
    """A row of the table."""

    name: str
    """Key of policies."""
    noun: str
    """Noun for a value that a policy may not have: `-1 is not a valid …`; empty: policies do not
    have the key."""
    values: Values
    serves: Mapping[str, int] = field(default_factory=dict)
    """Type that serves it -> first version of the metadata machine that knows its argument."""
    operator: Merge | None = None
    """Joins a policy and an operator policy; None: operator policies do not have the key."""
    with_argument: Merge = _other
    kept: tuple[str, ...] = ()
    """Types that take it without effect."""
    later: tuple[str, ...] = ()
    """Types that know it, and do not serve it yet."""
    only: Collection[str] | None = None
    """Types that have the key of policies, where others have the argument too."""
    arguments: Values | None = None
    """Values of the argument, where they differ from those of policies."""
    argument: str = ""
    """Name of the argument; empty: the key with `x-` in front."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Type -> setting of its queues' machine that has the value (`Values.number`)."""

    @property
    def argument_name(self) -> str:
        """Returns the name of the argument."""
        return self.argument or f"x-{self.name}"

    @property
    def policies(self) -> Collection[str]:
        """Returns the types to which policies with the key apply."""
        return (*self.serves, *self.kept) if self.only is None else self.only

    def with_operator(self, policy: Setting, other: Setting) -> Setting:
        """Joins a policy and an operator policy."""
        return (self.operator or _other)(policy, other)


def _ranged(low: int, high: int, unit: str = "") -> Integers:
    """Returns numbers whose refusal names the range."""
    return Integers(low, high, range_text=f". Valid range is {low}-{high}{unit}")


_COUNT = Integers()
_POSITIVE = Integers(1)
_DURATION = Integers(0, DURATION_MS_MAX)
_ANY = Values()
_TEXT = Text()
_AGE = Ages()
_BOTH = {CLASSIC: 1, QUORUM: 2}
_NEW = {QUORUM: 2}
_LOGS = {STREAM: 1, PARTITION: 1}
_TOPIC = {PARTITION: 1}
_LEADER_LOCATORS = ("client-local", "balanced", "random", "least-leaders", "min-masters")
_DEDUPLICATION_MS = _ranged(0, 7 * 24 * 3600 * 1000, " ms")
_LOCATOR = "invalid_queue_locator_arg"

ARGUMENT_KEYS: tuple[Key, ...] = (
    Key("expires", "queue expiry", Integers(1, DURATION_MS_MAX), _BOTH, _lower, _lower,
        machine=dict.fromkeys(_BOTH, "expires_ms")),
    Key("message-ttl", "message TTL", _DURATION, _BOTH, _lower, _lower,
        machine=dict.fromkeys(_BOTH, "message_ttl_ms")),
    Key("dead-letter-exchange", "dead letter exchange name", _TEXT, {CLASSIC: 2, QUORUM: 2}),
    Key("dead-letter-routing-key", "dead letter routing key", _TEXT, {CLASSIC: 2, QUORUM: 2},
        arguments=DeadLetterKey()),
    Key("dead-letter-strategy", "dead letter strategy",
        Words("invalid_dlx_strategy", "at-most-once", "at-least-once"), _NEW),
    Key("max-length", "maximum length", _COUNT, _BOTH, _lower, _lower,
        machine={CLASSIC: "length_max", QUORUM: "max_length"}),
    Key("max-length-bytes", "maximum length in bytes", _COUNT, {**_BOTH, **_LOGS}, _lower, _lower,
        machine={CLASSIC: "bytes_max", QUORUM: "max_length_bytes", STREAM: "max_bytes"}),
    # Quorum queues accept both without effect, as RabbitMQ does since 3.10.
    Key("max-in-memory-length", "maximum memory in bytes", _COUNT, operator=_lower, kept=(QUORUM,)),
    Key("max-in-memory-bytes", "maximum memory in bytes", _COUNT, operator=_lower, kept=(QUORUM,)),
    Key("max-priority", "", Integers(0, 255, "max_value_exceeded"), {CLASSIC: 5}),
    # Classic queues do not follow the policy: `TypeRules.prevailing_arguments`.
    Key("overflow", "overflow value",
        Words("invalid_overflow", "drop-head", "reject-publish", "reject-publish-dlx"), _BOTH,
        _other, _first),
    # Classic queues accept both without effect, as RabbitMQ does since 3.12.
    Key("queue-mode", "queue-mode value", Words("invalid_queue_mode", "default", "lazy"),
        kept=(CLASSIC,)),
    Key("queue-version", "queue-version value", Version(), operator=_other, kept=(CLASSIC,)),
    Key("single-active-consumer", "", Boolean(), {CLASSIC: 1, QUORUM: 1}),
    # Ours: when the next consumer becomes active (docs/adr/0027-refused-until-served.md).
    Key("single-active-take-over", "",
        Words("invalid_single_active_take_over", "strict", "immediate"), {CLASSIC: 1, QUORUM: 1}),
    # Ours: where a message goes that comes back (docs/adr/0050-order-of-delivery.md).
    Key("requeue-position", "requeue position",
        Words("invalid_requeue_position", "original", "front", "tail"), _NEW),
    Key("priority-mode", "priority mode", Words("invalid_priority_mode", "strict", "two-classes"),
        _NEW, machine={QUORUM: "two_priority_classes"}),
    # Ours: whether messages expire behind others (docs/adr/0043-time-limits-lengths-priorities.md).
    Key("message-expiry", "message expiry", Words("invalid_message_expiry", "head", "due"), _NEW,
        machine={QUORUM: "expire_by_due"}),
    Key("quorum-initial-group-size", "", _POSITIVE, {QUORUM: 1}),
    # A classic queue keeps the argument like any key that it has never heard of.
    Key("target-group-size", "target count", Integers(1, 255), {QUORUM: 1}, _higher, _higher,
        kept=(CLASSIC,), only=(QUORUM,), arguments=_POSITIVE,
        argument="x-quorum-target-group-size"),
    Key("queue-leader-locator", "queue leader locator value", Words(_LOCATOR, *_LEADER_LOCATORS),
        {CLASSIC: 1, QUORUM: 1, **_LOGS}, with_argument=_first, only=DECLARED_TYPES,
        arguments=Words(_LOCATOR, "client-local", "balanced")),
    Key("queue-master-locator", "queue master locator value",
        Words(_LOCATOR, "min-masters", "client-local", "random"), {CLASSIC: 1}, _other, _first),
    # RabbitMQ does not look at the argument either; -1 means without limit.
    Key("delivery-limit", "delivery limit", Integers(-LIMIT_MAX, LIMIT_MAX), {QUORUM: 1},
        _stricter, _stricter, arguments=_ANY, machine={QUORUM: "delivery_limit"}),
    # Ours: records what becomes of every message (docs/adr/0009-trace.md).
    Key("trace", "", Boolean(), {QUORUM: 1, **_LOGS}, later=(CLASSIC,)),
    Key("consumer-timeout", "consumer timeout", _DURATION, _NEW, with_argument=_lower),
    Key("consumer-disconnected-timeout", "consumer disconnected timeout", _DURATION, _NEW,
        with_argument=_lower, machine={QUORUM: "consumer_disconnected_timeout_ms"}),
    Key("delayed-retry-type", "delayed retry type",
        Words("invalid_delayed_retry_type", "disabled", "all", "failed", "returned"), _NEW,
        _other, _first, machine={QUORUM: "delayed_retry"}),
    Key("delayed-retry-min", "delayed retry minimum", _DURATION, _NEW, _higher, _lower,
        machine={QUORUM: "delayed_retry_min_ms"}),
    Key("delayed-retry-max", "delayed retry maximum", _DURATION, _NEW, _lower, _lower,
        machine={QUORUM: "delayed_retry_max_ms"}),
    # Ours: repeats by message-id (docs/adr/0052-repeats-by-message-id.md).
    Key("deduplication-count", "number of message-ids", _ranged(0, DEDUPLICATION_COUNT_MAX), _NEW,
        machine={QUORUM: "deduplication_count"}),
    Key("deduplication-time", "deduplication time", _DEDUPLICATION_MS, _NEW,
        machine={QUORUM: "deduplication_time_ms"}),
    # Ours: what links of AMQP 1.0 leave behind (docs/adr/0202-links-that-are-resumed.md).
    Key("link-resume-timeout", "link resume timeout", _ranged(0, LINK_RESUME_MS_MAX, " ms"),
        {QUORUM: 7}, machine={QUORUM: "link_resume_timeout_ms"}),
    Key("max-age", "max age", _AGE, _LOGS, machine={STREAM: "max_age_ms"}),
    Key("stream-max-segment-size-bytes", "segment size", Integers(0, SEGMENT_BYTES_MAX), _LOGS,
        arguments=_COUNT, machine={STREAM: "segment_bytes"}),
    Key("stream-filter-size-bytes", "filter size", _ranged(16, 255), later=(STREAM,),
        arguments=_COUNT),
    Key("initial-cluster-size", "cluster size", Integers(0, 255), _LOGS, only=(STREAM,),
        arguments=_POSITIVE),
    # Of consumers; who asks for a filter here would get every message.
    Key("stream-filter", "", _ANY, later=(STREAM,)),
    Key("stream-match-unfiltered", "", _ANY, later=(STREAM,)),
)  # fmt: skip
"""Settings with an argument of declarations, those of RabbitMQ and ours."""

_RATE = _ranged(1, 1_000_000_000_000)
_PARTITIONS = _ranged(1, PARTITIONS_MAX)
_MIRRORED = {CLASSIC: 1}

OTHER_KEYS: tuple[Key, ...] = (
    # `definitions` looks at the values of mirroring together.
    Key("ha-mode", "ha-mode value", Words("", *HA_MODES), _MIRRORED, _more_mirrors),
    Key("ha-params", "ha-params value", _ANY, _MIRRORED, _larger),
    Key("ha-sync-mode", "ha-sync-mode value", _ANY, _MIRRORED, _other),
    Key("ha-sync-batch-size", "ha-sync-batch-size value", _ANY, _MIRRORED),
    Key("ha-promote-on-shutdown", "ha-promote-on-shutdown value", _ANY, _MIRRORED),
    Key("ha-promote-on-failure", "ha-promote-on-failure value", _ANY, _MIRRORED),
    Key("group-ttl", "time to live of groups", _AGE, _TOPIC),
    Key("autoscale", "autoscale value", Words("", "on", "off"), _TOPIC),
    Key("autoscale-target-messages", "number of messages a second", _RATE, _TOPIC),
    Key("autoscale-target-bytes", "number of bytes a second", _RATE, _TOPIC),
    Key("autoscale-partitions-min", "number of partitions", _PARTITIONS, _TOPIC),
    Key("autoscale-partitions-max", "number of partitions", _PARTITIONS, _TOPIC),
    Key("autoscale-changes-per-hour", "number of changes an hour", _ranged(1, 3600), _TOPIC),
    Key("autoscale-unit", "unit", _ranged(100, 3_600_000, " ms"), _TOPIC),
    Key("seal-after", "time without a leader", _AGE, _TOPIC),
    Key("weak-wait", "wait of weak topics", _AGE, _TOPIC),
    Key("lost-after", "time until a partition is lost", _AGE, _TOPIC),
    # Topics are created with these; policies do not have them.
    Key("null-key", "", Words("", "refuse", "sticky", "spread"), _TOPIC),
    Key("retry-exchange", "", Name(), _TOPIC),
    Key("alternate-exchange", "alternate exchange name", _TEXT, {EXCHANGE: 1}),
)
"""Settings that no queue is declared with: keys of policies, and settings of topics."""

SETTINGS: Mapping[str, Key] = {key.name: key for key in (*ARGUMENT_KEYS, *OTHER_KEYS)}
"""Name -> row of the table."""
KEYS: Mapping[str, Key] = {name: key for name, key in SETTINGS.items() if key.noun}
"""Key of policies -> its row."""
BY_ARGUMENT: Mapping[str, Key] = {key.argument_name: key for key in ARGUMENT_KEYS if key.noun}
"""Argument of queues -> the key of policies that says the same."""


def policy_keys(type_name: str) -> frozenset[str]:
    """Returns the keys of policies that act in a type."""
    return frozenset(name for name, key in KEYS.items() if type_name in key.policies)


EXCHANGE_KEYS = policy_keys(EXCHANGE)
"""Keys that act in exchanges, and mean nothing to a queue."""
TOPIC_KEYS = policy_keys(PARTITION)
"""Keys that act in ordered topics."""
AUTOSCALE_KEYS = tuple(name for name in KEYS if name.startswith("autoscale"))
"""Keys that say whether and how a topic scales by itself."""


def machine_settings(type_name: str, settings: Mapping[str, object]) -> dict[str, int]:
    """Returns what the machine of a queue takes from its effective settings (keys of policies)."""
    found: dict[str, int] = {}
    for name, value in settings.items():
        key = KEYS.get(name)
        number = key.values.number(value) if key is not None else None
        if key is not None and number is not None and type_name in key.machine:
            found[key.machine[type_name]] = number
    return found
