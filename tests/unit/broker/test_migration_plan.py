"""What `--dry-run` says: for each pair of types, of each argument and key that any type has."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from convoymq.broker import drivers as _registered  # noqa: F401
from convoymq.broker.migration_plan import Plan, plan_of
from convoymq.metadata.commands import DeclareQueue, PutPolicy, PutVhost
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.errors import PreconditionFailed, Refused
from convoymq.model.tables import Table
from convoymq.routing.policies import effective_settings
from convoymq.routing.queue_arguments import ARGUMENTS, TYPE_ARGUMENT
from convoymq.routing.queue_types import all_types, own_arguments, rules_of
from convoymq.settings.table import EXCHANGE_KEYS, KEYS

TYPES = sorted(rules.name for rules in all_types() if not rules.is_managed)
PAIRS = [pair for pair in product(TYPES, TYPES) if pair[0] not in (pair[1], "stream")]
VALUES: tuple[str | int | bool, ...] = (
    5, "x", True, "all", "reject-publish", "at-most-once", "client-local", "min-masters", "1D", 1,
    600_000, 1_000_000, "lazy", "original", "strict", "due", "failed", "takeover", "strictly",
    "balanced", "automatic", "always", "when-synced", "exactly",
)  # fmt: skip


def made(
    type: str, arguments: Mapping[str, object], policy: Mapping[str, object]
) -> MetadataMachine:
    """Returns a tree with the queue q. Raises Refused."""
    tree = MetadataMachine()
    tree.set_version(MetadataMachine.VERSION)
    tree.carry_out(PutVhost(name="/"), 0)
    table = Table.of({TYPE_ARGUMENT: type, **arguments}).encoded
    tree.carry_out(
        DeclareQueue(vhost="/", name="q", type=type, members=(1,), durable=True, arguments=table),
        0,
    )
    if policy:
        put = PutPolicy(vhost="/", name="p", pattern=".*", definition=dict(policy))  # type: ignore[arg-type]
        tree.carry_out(put, 0)
    return tree


def acting(tree: MetadataMachine, plan: Plan) -> tuple[dict[str, object], dict[str, object]]:
    """Returns what acts in the queue now, and would."""
    place = tree.vhosts["/"]
    declared = place.topology.find_queue("q")
    assert declared is not None
    before = dict(effective_settings(declared, place.policies))
    again = made(plan.to, {k: f.value for k, f in plan.arguments.items() if k != TYPE_ARGUMENT}, {})
    other = again.vhosts["/"].topology.find_queue("q")
    assert other is not None
    return before, dict(effective_settings(other, place.policies))


@pytest.mark.parametrize(("type", "to"), PAIRS)
def test_each_argument_is_kept_dropped_or_without_effect(type: str, to: str) -> None:
    """What the plan keeps can be declared; what it drops could not; and nothing is silent."""
    source, target = rules_of(type), rules_of(to)
    assert source is not None
    assert target is not None
    seen = 0
    for argument in [*ARGUMENTS, *own_arguments()]:
        if not source.takes(argument.name) or argument.name == TYPE_ARGUMENT:
            continue
        for value in VALUES:
            try:
                tree = made(type, {argument.name: value}, {})
            except Refused:
                continue
            seen += 1
            plan = plan_of(tree, "/", "q", to)
            takes = target.takes(argument.name)
            assert plan.dropped == (() if takes else (argument.name,))
            assert (plan.arguments.get(argument.name) is not None) == takes
            before, after = acting(tree, plan)
            text = "; ".join(plan.notes)
            assert (argument.name in target.kept) == (f"{argument.name} has no effect" in text)
            for key in before.keys() ^ after.keys():
                assert f"{key} {before.get(key, after.get(key))} " in text
            break
        else:
            pytest.fail(f"no value for {argument.name}")
    assert seen >= 5


@pytest.mark.parametrize(("type", "to"), PAIRS)
def test_each_key_of_policies_that_changes_is_named(type: str, to: str) -> None:
    changed = 0
    for name, key in KEYS.items():
        if name in EXCHANGE_KEYS:
            continue
        for value in VALUES:
            if not key.values.accepts(value):
                continue
            try:
                tree = made(type, {}, {name: value})
            except Refused:
                continue
            plan = plan_of(tree, "/", "q", to)
            before, after = acting(tree, plan)
            text = "; ".join(plan.notes)
            assert (name in before and name not in after) == (
                f"{name} {value} acts no more" in text
            )
            assert (name in after and name not in before) == (
                f"{name} {value} begins to act" in text
            )
            changed += name in before.keys() ^ after.keys()
            break
    assert changed


def test_a_lower_value_of_the_new_type_is_named() -> None:
    tree = made("classic", {"x-overflow": "drop-head"}, {"overflow": "reject-publish"})
    assert "overflow reject-publish is another one" in plan_of(tree, "/", "q", "quorum").notes


@pytest.mark.parametrize("type", TYPES)
def test_no_queue_becomes_what_is_managed_or_what_it_is(type: str) -> None:
    tree = made(type, {}, {})
    managed = [rules.name for rules in all_types() if rules.is_managed]
    for to in (type, *managed, "mirrored", "", "x"):
        with pytest.raises(PreconditionFailed):
            plan_of(tree, "/", "q", to)
    if type == "stream":
        for to in TYPES:
            with pytest.raises(PreconditionFailed):
                plan_of(tree, "/", "q", to)
