"""Queue types, as far as declarations go: drivers of the queues register them before a node
starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from convoymq.settings.table import ARGUMENT_KEYS, DECLARED_TYPES, policy_keys
from convoymq.settings.values import Check


class PlacementKind(Enum):
    """Placement of queues: their nodes, and what decides which of them serves."""

    HOME = "home"
    """One node has the queue: its home."""
    RAFT = "raft"
    """The members are a Raft group, which elects a leader. Such queues are durable, named by the
    client, and of no one connection."""
    RING = "ring"
    """The members are a view, in an order: the first is the master, the others have copies."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A queue argument, and what values it takes."""

    name: str
    check: Check


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRules:
    """Rules for declaring queues of a type.

    An argument that is neither served nor foreign is known, and not served yet.
    """

    name: str
    placement: PlacementKind
    serves: frozenset[str]
    """Arguments that do what they say."""
    first_versions: Mapping[str, int] = field(default_factory=dict)
    """Of those, the ones that need a newer version of the metadata machine than the first."""
    foreign: frozenset[str] = frozenset()
    """Arguments that are refused because they belong to other types."""
    kept: frozenset[str] = frozenset()
    """Arguments that are taken and mean nothing."""
    own: tuple[Argument, ...] = ()
    """Arguments that no other type has."""
    policies: frozenset[str] = frozenset()
    """Keys of policies that the type serves. A policy with another one does not apply to it."""
    policy_scope: str = ""
    """Name in `apply-to` of a policy for queues of the type; empty: they have no name of their
    own."""
    owner_argument: str = ""
    """Argument that names what the queues are parts of: policies match that name."""
    is_managed: bool = False
    """Queues of the type are parts of something else, which alone declares, binds, fills and
    deletes them."""
    prevailing_arguments: frozenset[str] = frozenset()
    """Arguments that come before a policy, where it is the other way round in other types."""

    def takes(self, argument: str) -> bool:
        """Returns whether a queue may be declared with an argument."""
        return argument in self.serves or argument in self.kept or argument in _names(self.own)

    def is_foreign(self, argument: str) -> bool:
        """Returns whether an argument belongs to other types."""
        return argument in self.foreign or any(
            argument in _names(rules.own) for rules in _TYPES.values() if rules is not self
        )


def rules_in_table(
    name: str,
    placement: PlacementKind,
    policy_scope: str,
    *,
    own: tuple[Argument, ...] = (),
    owner_argument: str = "",
    prevailing_arguments: frozenset[str] = frozenset(),
) -> TypeRules:
    """Returns the rules of a type of `settings.table`. The parameters are those of `TypeRules`."""
    known = {key.argument_name: key for key in ARGUMENT_KEYS}
    versions = {argument: key.serves[name] for argument, key in known.items() if name in key.serves}
    kept = {argument for argument, key in known.items() if name in key.kept}
    later = {argument for argument, key in known.items() if name in key.later}
    is_managed = name not in DECLARED_TYPES
    return TypeRules(
        name=name,
        placement=placement,
        serves=frozenset(versions),
        first_versions={argument: first for argument, first in versions.items() if first > 1},
        foreign=frozenset(() if is_managed else known.keys() - versions.keys() - kept - later),
        kept=frozenset(kept),
        own=own,
        policies=policy_keys(name),
        policy_scope=policy_scope,
        owner_argument=owner_argument,
        is_managed=is_managed,
        prevailing_arguments=prevailing_arguments,
    )


_TYPES: dict[str, TypeRules] = {}


def add_type(rules: TypeRules) -> None:
    """Makes a type known; a later one of the same name takes its place."""
    _TYPES[rules.name] = rules


def rules_of(name: str) -> TypeRules | None:
    """Returns the rules of a type; None for one that is not served."""
    return _TYPES.get(name)


def type_names() -> Iterator[str]:
    """Yields the types that clients may declare."""
    return (name for name, rules in _TYPES.items() if not rules.is_managed)


def all_types() -> Iterator[TypeRules]:
    """Yields the rules of the types that are served."""
    return iter(_TYPES.values())


def own_arguments() -> Iterator[Argument]:
    """Arguments that one type has."""
    for rules in _TYPES.values():
        yield from rules.own


def home_type_with(argument: str, version: int | None = None) -> str | None:
    """Returns the first type with a home that serves an argument. `version`: of the metadata
    machine; None: the newest."""
    for rules in _TYPES.values():
        is_new = version is not None and rules.first_versions.get(argument, 0) > version
        if rules.placement is PlacementKind.HOME and argument in rules.serves and not is_new:
            return rules.name
    return None


def _names(arguments: Iterable[Argument]) -> set[str]:
    return {argument.name for argument in arguments}
