"""The exchange type `x-delayed-message`: it routes as the type that its argument names."""

from __future__ import annotations

import pytest

from convoymq.model.errors import PreconditionFailed
from convoymq.model.tables import Table
from convoymq.routing import Destination, DestinationKind
from convoymq.routing.ignored_arguments import ignored_of_exchange
from tests.unit.routing.checked import CheckedTopology as Topology

KIND = "x-delayed-message"


def made(rule: str, **more: object) -> Topology:
    tables = Topology("/")
    arguments = Table.of({"x-delayed-type": rule, **more})
    tables.declare_exchange("x", KIND, arguments=arguments)
    for name in ("q1", "q2"):
        tables.declare_queue(name)
    return tables


def bind(tables: Topology, queue: str, key: str) -> None:
    tables.bind("x", Destination(DestinationKind.QUEUE, queue), key)


def test_it_routes_by_the_rule_of_another_type() -> None:
    tables = made("topic")
    bind(tables, "q1", "a.*")
    bind(tables, "q2", "#")
    assert sorted(tables.route("x", "a.b")) == ["q1", "q2"]
    assert tables.route("x", "b") == ["q2"]
    tables = made("direct")
    bind(tables, "q1", "a.*")
    assert tables.route("x", "a.b") == []
    assert tables.route("x", "a.*") == ["q1"]


def test_bindings_and_arguments_are_checked_by_that_type() -> None:
    with pytest.raises(PreconditionFailed, match="must be an integer"):
        bind(made("x-consistent-hash"), "q1", "a")
    with pytest.raises(PreconditionFailed, match="Unsupported property"):
        made("x-consistent-hash", **{"hash-property": "app_id"})
    arguments = Table.of({"x-delayed-type": "x-consistent-hash", "hash-header": "h", "x": 1})
    assert ignored_of_exchange(KIND, arguments) == ["x"]


@pytest.mark.parametrize("arguments", [{}, {"x-delayed-type": 1}, {"x-delayed-type": KIND},
                                       {"x-delayed-type": "other"}])  # fmt: skip
def test_it_needs_a_type_to_route_by(arguments: dict[str, object]) -> None:
    with pytest.raises(PreconditionFailed, match="'x-delayed-type' must be an existing"):
        Topology("/").declare_exchange("x", KIND, arguments=Table.of(arguments))


def test_it_is_another_exchange_with_another_type_to_route_by() -> None:
    tables = made("topic")
    same = Table.of({"x-delayed-type": "topic"})
    tables.declare_exchange("x", KIND, arguments=same)
    with pytest.raises(PreconditionFailed, match="inequivalent arg 'x-delayed-type'"):
        tables.declare_exchange("x", KIND, arguments=Table.of({"x-delayed-type": "direct"}))
