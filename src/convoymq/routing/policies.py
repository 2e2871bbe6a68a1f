"""Policies: settings for all queues and exchanges of a virtual host whose names match a pattern.

A queue or an exchange gets at most one policy and one operator policy: of those that apply to its
kind, whose keys its type serves and whose pattern matches its name, the one with the highest
priority; among equals the first by name. They are not layered. Patterns are not anchored and
are matched in linear time (`model.patterns`).

A policy applies to a queue type only when the type serves all of its keys for queues; keys for
exchanges do not count there. What acts in the end are the *effective settings*: policy and operator
policy joined, and both joined with the queue's arguments, key by key (`settings.table`).

Ordered topics and their partitions get policies for `topics` only, by the name of the topic: what
is meant for queues must not shorten a log that groups rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from convoymq.model.errors import PreconditionFailed
from convoymq.model.patterns import Pattern, compile_pattern
from convoymq.model.tables import Field, Table
from convoymq.routing.queue_types import TypeRules, all_types, rules_of
from convoymq.routing.types import ALTERNATE_EXCHANGE, Exchange, Queue
from convoymq.settings.definitions import checked_definition, invalid
from convoymq.settings.table import BY_ARGUMENT, EXCHANGE_KEYS, KEYS, TOPIC_KEYS, Key
from convoymq.settings.values import Setting

ALL = "all"
QUEUES = "queues"
EXCHANGES = "exchanges"
TOPICS = "topics"
PRIORITY_MAX = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy or an operator policy."""

    name: str
    pattern: str
    definition: Mapping[str, Setting]
    apply_to: str = ALL
    priority: int = 0


class Chosen(NamedTuple):
    """The policies that one queue or exchange gets."""

    policy: Policy | None = None
    operator: Policy | None = None

    @property
    def definition(self) -> Mapping[str, Setting]:
        """Both joined."""
        if self.operator is None:
            return self.policy.definition if self.policy is not None else _NOTHING
        if self.policy is None:
            return self.operator.definition
        joined = dict(self.operator.definition)
        for name, value in self.policy.definition.items():
            key = KEYS.get(name)
            if name not in joined:
                joined[name] = value
            elif key is not None:
                joined[name] = key.with_operator(value, joined[name])
        return dict(sorted(joined.items()))


Ranked = Sequence[tuple[Policy, "Pattern | None"]]
"""Policies with their compiled patterns, the first that matches in force."""
_NOTHING: Mapping[str, Setting] = {}
_NONE = Chosen()


class Policies:
    """The policies of one virtual host, by name."""

    __slots__ = ("_alternates", "_ranked", "operator", "user")

    def __init__(self) -> None:
        """Starts without policies."""
        self.user: dict[str, Policy] = {}
        self.operator: dict[str, Policy] = {}
        self._changed()

    def put(self, policy: Policy, *, operator: bool = False) -> bool:
        """Adds a policy or replaces the one of that name; whether it is new."""
        table = self._table(operator)
        created = policy.name not in table
        table[policy.name] = policy
        self._changed()
        return created

    def delete(self, name: str, *, operator: bool = False) -> bool:
        """Removes a policy; False when there is none of that name."""
        gone = self._table(operator).pop(name, None) is not None
        self._changed()
        return gone

    def of(self, *, operator: bool = False) -> Iterator[Policy]:
        """Yields all policies, or all operator policies, by name."""
        table = self._table(operator)
        return (table[name] for name in sorted(table))

    def for_queue(self, queue: Queue) -> Chosen:
        """Returns the policies that a queue gets."""
        return self._first(*_reach_of(queue)) if self else _NONE

    def for_topic(self, name: str) -> Chosen:
        """Returns the policies that an ordered topic gets."""
        return self._first(name, _applies_to_topics) if self else _NONE

    def for_exchange(self, name: str) -> Chosen:
        """Returns the policies that an exchange gets."""
        return self._first(name, _applies_to_exchanges) if self else _NONE

    def all_for_queue(self, queue: Queue) -> list[Policy]:
        """Returns every policy that applies to a queue, the one in force first."""
        return list(_matching(self._ranked[0], *_reach_of(queue)))

    def all_for_exchange(self, name: str) -> list[Policy]:
        """Returns every policy that applies to an exchange, the one in force first."""
        return list(_matching(self._ranked[0], name, _applies_to_exchanges))

    def _first(self, name: str, applies: Callable[[Policy], bool]) -> Chosen:
        """Returns the first policies, by rank, that apply and match the name."""
        return Chosen(*(next(_matching(ranked, name, applies), None) for ranked in self._ranked))

    def alternate_of(self, exchange: Exchange) -> str | None:
        """Returns the name of the exchange that gets what this one can't route; its own argument
        comes first."""
        own = exchange.alternate
        if own is not None or not self:
            return own
        if exchange.name not in self._alternates:
            found = self.for_exchange(exchange.name).definition.get(ALTERNATE_EXCHANGE)
            self._alternates[exchange.name] = found if isinstance(found, str) else None
        return self._alternates[exchange.name]

    def forget(self, exchange: str) -> None:
        """An exchange is gone."""
        self._alternates.pop(exchange, None)

    def __bool__(self) -> bool:
        return bool(self.user or self.operator)

    def _table(self, operator: bool) -> dict[str, Policy]:
        return self.operator if operator else self.user

    def _changed(self) -> None:
        self._ranked = tuple(
            [(policy, _compiled(policy.pattern)) for policy in sorted(table.values(), key=_rank)]
            for table in (self.user, self.operator)
        )
        #: Exchange -> its alternate exchange by policy.
        self._alternates: dict[str, str | None] = {}


def _matching(ranked: Ranked, name: str, applies: Callable[[Policy], bool]) -> Iterator[Policy]:
    return (p for p, pattern in ranked if applies(p) and _matches(pattern, name))


def _reach_of(queue: Queue) -> tuple[str, Callable[[Policy], bool]]:
    """Returns the name that patterns have to match for a queue, and whether a policy applies."""
    rules = rules_of(queue.type.value)
    if rules is None:
        return queue.name, lambda _policy: False
    owner = queue.arguments.get(rules.owner_argument) if rules.owner_argument else None
    name = queue.name if owner is None else owner.term()
    return name, lambda policy: applies_to_type(policy, rules)


def _rank(policy: Policy) -> tuple[int, str]:
    return -policy.priority, policy.name


def _compiled(text: str) -> Pattern | None:
    try:
        return compile_pattern(text)
    except PreconditionFailed:
        # Another release took it. Here it matches nothing.
        return None


def _matches(pattern: Pattern | None, name: str) -> bool:
    return pattern is not None and pattern.search(name)


def applies_to_type(policy: Policy, rules: TypeRules) -> bool:
    """Returns whether a policy is for queues of a type, and the type serves its keys."""
    if policy.apply_to not in _scopes_of(rules):
        return False
    return all(key in rules.policies or key in EXCHANGE_KEYS for key in policy.definition)


def _scopes_of(rules: TypeRules) -> tuple[str, ...]:
    """Returns the scopes that reach queues of a type. Parts of something else have one of their
    own."""
    return (rules.policy_scope,) if rules.is_managed else (ALL, QUEUES, rules.policy_scope)


def _applies_to_exchanges(policy: Policy) -> bool:
    return policy.apply_to in (ALL, EXCHANGES)


def _applies_to_topics(policy: Policy) -> bool:
    return policy.apply_to == TOPICS and policy.definition.keys() <= TOPIC_KEYS


def check_policy(policy: Policy, *, operator: bool = False) -> None:
    """Refuses a policy that is malformed, or of which a key would act nowhere.

    Raises:
        ValidationFailed: a name, a pattern, a key, a value or a scope is not acceptable.
    """
    if not policy.name:
        raise invalid("a policy needs a name")
    try:
        compile_pattern(policy.pattern)
    except PreconditionFailed as error:
        raise invalid(
            f"pattern should be a regular expression but is invalid: {error.text}"
        ) from error
    if type(policy.priority) is not int or abs(policy.priority) > PRIORITY_MAX:
        raise invalid(f"priority should be a number, actually was {policy.priority}")
    scopes = {ALL, QUEUES, EXCHANGES, *(rules.policy_scope for rules in all_types())}
    if policy.apply_to not in scopes or not policy.apply_to:
        raise invalid(
            f"apply-to '{policy.apply_to}' unrecognised; should be one of: 'queues', "
            "'classic_queues', 'quorum_queues', 'streams', 'topics', 'exchanges', or 'all'"
        )
    checked_definition(policy.definition, operator=operator)
    _check_scope(policy)


def _check_scope(policy: Policy) -> None:
    """Refuses keys that would act nowhere: RabbitMQ takes such a policy in silence."""
    keys = set(policy.definition)
    if keys & EXCHANGE_KEYS and policy.apply_to not in (ALL, EXCHANGES):
        raise _conflict(policy, keys & EXCHANGE_KEYS, "exchanges only")
    wanted = keys - EXCHANGE_KEYS
    if not wanted:
        return
    if policy.apply_to == EXCHANGES:
        raise _conflict(policy, wanted, "queues only")
    types = [rules for rules in all_types() if policy.apply_to in _scopes_of(rules)]
    if any(wanted <= rules.policies for rules in types):
        return
    for key in sorted(wanted):
        serving = [rules.policy_scope for rules in all_types() if key in rules.policies]
        if not serving:
            raise invalid(f"{key} is not served by any queue type of this release")
        if not any(key in rules.policies for rules in types):
            raise _conflict(policy, {key}, f"{_listed(serving)} only")
    raise invalid(
        f"no queue type serves all of {_listed(sorted(wanted))}: the policy would apply to nothing"
    )


def _conflict(policy: Policy, keys: Iterable[str], where: str) -> PreconditionFailed:
    return invalid(
        f"apply-to '{policy.apply_to}' conflicts with {_listed(sorted(keys))}: for {where}"
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def effective_settings(queue: Queue, policies: Policies) -> Mapping[str, Setting]:
    """Returns what acts in a queue, by the keys of policies: its policies and its arguments.

    Keys that its type does not serve are left out; what is said neither by a policy nor by an
    argument is absent.
    """
    found = policies.for_queue(queue).definition if policies else _NOTHING
    if not found and not queue.arguments:
        return _NOTHING
    rules = rules_of(queue.type.value)
    if rules is None:
        return _NOTHING
    settings = {key: value for key, value in found.items() if key in rules.policies}
    for name, field in queue.arguments.items():
        key = BY_ARGUMENT.get(name)
        if key is None or name in rules.kept or not rules.takes(name):
            continue
        value = usable_value(key, field) if queue.arguments.get(name) is field else None
        if value is None:
            continue
        if key.name not in settings or name in rules.prevailing_arguments:
            settings[key.name] = value
        else:
            settings[key.name] = key.with_argument(settings[key.name], value)
    return settings


def declared_settings(arguments: Table) -> Mapping[str, Setting | None]:
    """Returns what arguments of a queue say, by the keys of policies, whether it acts or not."""
    found = {
        BY_ARGUMENT[name].name: arguments.get(name)
        for name, _ in arguments.items()
        if name in BY_ARGUMENT
    }
    return {name: _value_of(field) for name, field in found.items() if field is not None}


def usable_value(key: Key, field: Field) -> Setting | None:
    """Returns what an argument of a queue, which is like a policy's key, sets; None when its value
    has no effect: RabbitMQ does not look at every value at the declaration."""
    value = _value_of(field)
    return value if value is not None and key.values.accepts(value) else None


def _value_of(field: Field) -> Setting | None:
    if isinstance(field.value, bool | int):
        return field.value
    return field.term() if field.code == "S" else None


def topic_settings(
    name: str, own: Mapping[str, Setting], policies: Policies
) -> Mapping[str, Setting]:
    """Returns what acts in an ordered topic: its policies and the settings of its creation."""
    settings = dict(policies.for_topic(name).definition)
    for key, value in own.items():
        settings[key] = KEYS[key].with_argument(settings[key], value) if key in settings else value
    return settings
