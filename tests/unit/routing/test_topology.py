"""The tables of a virtual host: declarations, bindings, routes, and what clients read on a no."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from convoymq.model.errors import (
    AccessRefused,
    Misuse,
    NotFound,
    PreconditionFailed,
    Refused,
    ResourceLocked,
    StorageFault,
)
from convoymq.model.tables import EMPTY, Table
from convoymq.routing import Destination, DestinationKind
from tests.unit.routing.checked import CheckedTopology as Topology

LOCKED = (
    "cannot obtain exclusive access to locked queue 'q' in vhost '/'. It could be originally "
    "declared on another connection or the exclusive property value does not match that of the "
    "original declaration."
)


def queue(name: str) -> Destination:
    """A queue as destination."""
    return Destination(DestinationKind.QUEUE, name)


def exchange(name: str) -> Destination:
    """An exchange as destination."""
    return Destination(DestinationKind.EXCHANGE, name)


def text_of(kind: type[Refused], call: Callable[[], object]) -> str:
    """The text with which `call` is refused."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value.text


@pytest.fixture
def tables() -> Topology:
    """A virtual host with the queues q, r, s."""
    topology = Topology("/")
    for name in "qrs":
        topology.declare_queue(name)
    return topology


class TestExchanges:
    """Declare and delete."""

    def test_the_predeclared_ones_are_there(self) -> None:
        assert [e.name for e in Topology("/").exchanges()] == [
            "", "amq.direct", "amq.fanout", "amq.headers", "amq.match", "amq.rabbitmq.trace",
            "amq.topic",
        ]  # fmt: skip

    def test_declaring_again_changes_nothing(self, tables: Topology) -> None:
        assert tables.declare_exchange("x", "topic", durable=True)
        version = tables.version
        assert not tables.declare_exchange("x", "topic", durable=True)
        assert not tables.declare_exchange("amq.topic", "topic", durable=True)
        assert tables.version == version

    def test_a_redeclare_that_differs_is_refused(self, tables: Topology) -> None:
        tables.declare_exchange("x", "direct", arguments=Table.of({"alternate-exchange": "a"}))
        prefix = (
            "inequivalent arg '{}' for exchange 'x' in vhost '/': received {} but current is {}"
        )
        for key, received, current, call in [
            ("type", "'fanout'", "'direct'", lambda: tables.declare_exchange("x", "fanout")),
            ("durable", "'true'", "'false'",
             lambda: tables.declare_exchange("x", "direct", durable=True)),
            ("auto_delete", "'true'", "'false'",
             lambda: tables.declare_exchange("x", "direct", auto_delete=True)),
            ("internal", "'true'", "'false'",
             lambda: tables.declare_exchange("x", "direct", internal=True)),
            ("alternate-exchange", "none", "the value 'a' of type 'longstr'",
             lambda: tables.declare_exchange("x", "direct")),
        ]:  # fmt: skip
            found = text_of(PreconditionFailed, call)
            assert found == prefix.format(key, received, current)
        more = Table.of({"alternate-exchange": "a", "other": 1})
        assert not tables.declare_exchange("x", "direct", arguments=more)

    def test_refused_declarations(self, tables: Topology) -> None:
        default = "operation not permitted on the default exchange"
        assert text_of(AccessRefused, lambda: tables.declare_exchange("", "direct")) == default
        assert text_of(AccessRefused, lambda: tables.passive_exchange("")) == default
        assert text_of(AccessRefused, lambda: tables.delete_exchange("")) == default
        assert text_of(PreconditionFailed, lambda: tables.declare_exchange("x", "x-odd")) == (
            "unknown exchange type 'x-odd'"
        )
        assert text_of(AccessRefused, lambda: tables.declare_exchange("amq.x", "direct")) == (
            "exchange name 'amq.x' contains reserved prefix 'amq.*'"
        )
        wrong = Table.of({"alternate-exchange": 1})
        assert (
            text_of(
                PreconditionFailed, lambda: tables.declare_exchange("x", "direct", arguments=wrong)
            )
            == "invalid type 'long' for arg 'alternate-exchange' in exchange 'x' in vhost '/'"
        )

    def test_lookups(self, tables: Topology) -> None:
        tables.declare_exchange("i", "fanout", internal=True)
        missing = "no exchange 'x' in vhost '/'"
        assert text_of(NotFound, lambda: tables.exchange("x")) == missing
        assert text_of(NotFound, lambda: tables.exchange_for_publish("x")) == missing
        assert text_of(NotFound, lambda: tables.passive_exchange("x")) == missing
        assert text_of(AccessRefused, lambda: tables.exchange_for_publish("i")) == (
            "cannot publish to internal exchange 'i' in vhost '/'"
        )
        assert tables.exchange_for_publish("").name == ""

    def test_deleting(self, tables: Topology) -> None:
        assert text_of(AccessRefused, lambda: tables.delete_exchange("amq.topic")) == (
            "deletion of system exchange 'amq.topic' in vhost '/' not allowed"
        )
        assert not tables.delete_exchange("nobody")
        tables.declare_exchange("x", "direct")
        tables.declare_exchange("y", "fanout")
        tables.bind("x", queue("q"), "k")
        tables.bind("y", exchange("x"))
        assert (
            text_of(PreconditionFailed, lambda: tables.delete_exchange("x", if_unused=True))
            == "exchange 'x' in vhost '/' in use"
        )
        removed = tables.delete_exchange("x")
        assert [e.name for e in removed.exchanges] == ["x"]
        assert {b.source for b in removed.bindings} == {"x", "y"}
        assert tables.delete_exchange("y", if_unused=True)
        tables.check_invariants()

    def test_an_auto_delete_exchange_goes_with_its_last_binding(self, tables: Topology) -> None:
        tables.declare_exchange("x", "direct", auto_delete=True)
        tables.bind("x", queue("q"), "a")
        tables.bind("x", queue("q"), "b")
        assert not tables.unbind("x", queue("q"), "a").exchanges
        assert [e.name for e in tables.unbind("x", queue("q"), "b").exchanges] == ["x"]
        tables.check_invariants()

    def test_auto_delete_runs_up_a_chain(self, tables: Topology) -> None:
        """The queue goes, its exchange with it, then the one before; a fresh one stays."""
        for name in ("a", "b", "fresh"):
            tables.declare_exchange(name, "fanout", auto_delete=True)
        tables.bind("a", exchange("b"))
        tables.bind("b", queue("q"))
        version = tables.version
        removed = tables.delete_queue("q")
        assert [e.name for e in removed.exchanges] == ["b", "a"]
        assert [b.source for b in removed.bindings] == ["b", "a"]
        assert tables.version == version + 1
        assert tables.exchange("fresh").auto_delete
        tables.check_invariants()

    def test_an_exchange_bound_to_itself_can_go(self, tables: Topology) -> None:
        tables.declare_exchange("x", "fanout", auto_delete=True)
        tables.bind("x", exchange("x"))
        assert len(tables.delete_exchange("x").bindings) == 1
        tables.check_invariants()


class TestQueues:
    """Declare, look up, delete."""

    def test_declaring_again_changes_nothing(self, tables: Topology) -> None:
        version = tables.version
        assert not tables.declare_queue("q")
        assert tables.version == version

    def test_checks_of_a_redeclare_come_in_their_order(self, tables: Topology) -> None:
        def again(**properties: object) -> str:
            return text_of(
                ResourceLocked if "exclusive_owner" in properties else PreconditionFailed,
                lambda: tables.declare_queue("q", **properties),  # type: ignore[arg-type]
            )

        arguments = Table.of({"x-message-ttl": 1})
        prefix = "inequivalent arg '{}' for queue 'q' in vhost '/': received "
        assert again(exclusive_owner="c", durable=True) == LOCKED
        assert again(durable=True, auto_delete=True) == (
            prefix.format("durable") + "'true' but current is 'false'"
        )
        assert again(auto_delete=True, arguments=arguments) == (
            prefix.format("auto_delete") + "'true' but current is 'false'"
        )
        assert again(arguments=arguments) == (
            prefix.format("x-message-ttl") + "the value '1' of type 'long' but current is none"
        )

    def test_an_exclusive_queue_belongs_to_its_connection(self) -> None:
        tables = Topology("/")
        tables.declare_queue("q", exclusive_owner="c1")
        assert tables.queue("q", "c1").exclusive_owner == "c1"
        assert not tables.declare_queue("q", exclusive_owner="c1")
        assert text_of(ResourceLocked, lambda: tables.queue("q", "c2")) == LOCKED
        assert text_of(ResourceLocked, lambda: tables.queue("q")) == LOCKED
        assert text_of(ResourceLocked, lambda: tables.declare_queue("q")) == LOCKED
        bind = lambda: tables.bind("amq.direct", queue("q"), owner="c2")  # noqa: E731
        assert text_of(ResourceLocked, bind) == LOCKED
        unbind = lambda: tables.unbind("amq.direct", queue("q"), owner="c2")  # noqa: E731
        assert text_of(ResourceLocked, unbind) == LOCKED
        tables.declare_queue("other", exclusive_owner="c2")
        assert {q.name: q.exclusive_owner for q in tables.queues()} == {"other": "c2", "q": "c1"}

    def test_reserved_names_are_for_the_server(self, tables: Topology) -> None:
        assert text_of(AccessRefused, lambda: tables.declare_queue("amq.x")) == (
            "queue name 'amq.x' contains reserved prefix 'amq.*'"
        )
        assert tables.declare_queue("amq.gen-1", server_named=True)
        assert not tables.declare_queue("amq.gen-1")

    @pytest.mark.parametrize(
        ("properties", "text"),
        [
            ({"durable": False}, "invalid property 'non-durable' for queue 'n' in vhost '/'"),
            ({"exclusive_owner": "c"},
             "invalid property 'exclusive-owner' for queue 'n' in vhost '/'"),
            ({"auto_delete": True}, "invalid property 'auto-delete' for queue 'n' in vhost '/'"),
            ({"server_named": True},
             "Cannot declare a server-named queue for type rabbit_quorum_queue"),
        ],
    )  # fmt: skip
    def test_properties_that_quorum_queues_lack(
        self, tables: Topology, properties: dict[str, object], text: str
    ) -> None:
        arguments = Table.of({"x-queue-type": "quorum"})
        assert tables.declare_queue("good", durable=True, arguments=arguments)
        wanted = {"durable": True, "arguments": arguments} | properties
        call = lambda: tables.declare_queue("n", **wanted)  # type: ignore[arg-type] # noqa: E731
        assert text_of(PreconditionFailed, call) == text

    def test_a_bad_argument_changes_nothing(self, tables: Topology) -> None:
        before = tables.to_builtins()
        arguments = Table.of({"x-max-length": -5})
        assert (
            text_of(PreconditionFailed, lambda: tables.declare_queue("n", arguments=arguments))
            == "invalid arg 'x-max-length' for queue 'n' in vhost '/': {value_negative,-5}"
        )
        assert tables.to_builtins() == before

    def test_a_missing_queue_is_named_but_its_deletion_is_fine(self, tables: Topology) -> None:
        assert text_of(NotFound, lambda: tables.queue("n")) == "no queue 'n' in vhost '/'"
        assert tables.find_queue("n") is None
        assert not tables.delete_queue("n")

    def test_a_queue_declared_again_is_another_one(self, tables: Topology) -> None:
        first = tables.queue("q").declared_version
        tables.delete_queue("q")
        tables.declare_queue("q")
        assert tables.queue("q").declared_version > first

    def test_names_are_bounded(self, tables: Topology) -> None:
        assert tables.declare_queue("n" * 255)
        with pytest.raises(Misuse):
            tables.declare_queue("n" * 256)
        with pytest.raises(Misuse):
            tables.declare_queue("\ud800")


class TestBindings:
    """Bind and unbind."""

    def test_the_identity_includes_arguments_in_any_order(self, tables: Topology) -> None:
        assert tables.bind("amq.headers", queue("q"), "", Table.of({"a": 1, "b": 2}))
        assert not tables.bind("amq.headers", queue("q"), "", Table.of({"b": 2, "a": 1}))
        assert tables.bind("amq.headers", queue("q"), "", Table.of({"a": 1}))
        assert tables.bind("amq.headers", queue("q"), "k", Table.of({"a": 1}))
        assert len(tables.bindings(source="amq.headers", destination=queue("q"))) == 3
        assert tables.unbind("amq.headers", queue("q"), "", Table.of({"b": 2, "a": 1}))
        assert not tables.unbind("amq.headers", queue("q"), "", Table.of({"b": 2, "a": 1}))
        assert len(tables.bindings(destination=queue("q"))) == 2

    def test_both_ends_must_exist_to_bind_but_not_to_unbind(self, tables: Topology) -> None:
        bind = tables.bind
        assert text_of(NotFound, lambda: bind("x", queue("n"))) == "no exchange 'x' in vhost '/'"
        assert text_of(NotFound, lambda: bind("amq.direct", queue("n"))) == (
            "no queue 'n' in vhost '/'"
        )
        assert text_of(NotFound, lambda: bind("amq.direct", exchange("n"))) == (
            "no exchange 'n' in vhost '/'"
        )
        assert not tables.unbind("x", queue("n"))

    def test_the_default_exchange_is_untouchable(self, tables: Topology) -> None:
        for call in (
            lambda: tables.bind("", queue("q")),
            lambda: tables.unbind("", queue("q")),
            lambda: tables.bind("amq.direct", exchange("")),
            lambda: tables.unbind("amq.direct", exchange("")),
        ):
            assert text_of(AccessRefused, call) == "operation not permitted on the default exchange"

    def test_bad_patterns_and_modes_are_refused(self, tables: Topology) -> None:
        with pytest.raises(PreconditionFailed, match="uses 3 '#' wildcards"):
            tables.bind("amq.topic", queue("q"), "#.#.#")
        assert tables.bind("amq.direct", queue("q"), "#.#.#")
        with pytest.raises(PreconditionFailed, match="Invalid x-match field value"):
            tables.bind("amq.headers", queue("q"), "", Table.of({"x-match": "none"}))


class TestRoutes:
    """Where a message goes."""

    def test_the_default_exchange_leads_to_the_queue_of_that_name(self, tables: Topology) -> None:
        assert tables.route("", "q") == ["q"]
        assert tables.route("", "n") == []
        assert tables.route("", "q", extra_keys=("r", "q", "n")) == ["q", "r"]

    def test_direct_and_fanout(self, tables: Topology) -> None:
        tables.bind("amq.direct", queue("q"), "a")
        tables.bind("amq.direct", queue("r"), "a")
        tables.bind("amq.direct", queue("r"), "a", Table.of({"again": 1}))
        tables.bind("amq.fanout", queue("s"), "ignored")
        assert tables.route("amq.direct", "a") == ["q", "r"]
        assert tables.route("amq.direct", "b") == []
        assert tables.route("amq.fanout", "b") == ["s"]
        tables.unbind("amq.direct", queue("r"), "a")
        assert tables.route("amq.direct", "a") == ["q", "r"]
        tables.unbind("amq.direct", queue("r"), "a", Table.of({"again": 1}))
        assert tables.route("amq.direct", "a") == ["q"]
        with pytest.raises(NotFound):
            tables.route("x", "a")

    def test_topic_and_headers(self, tables: Topology) -> None:
        tables.bind("amq.topic", queue("q"), "a.*")
        tables.bind("amq.topic", queue("r"), "#")
        tables.bind("amq.headers", queue("s"), "", Table.of({"x-match": "any", "n": 1, "m": 2}))
        assert tables.route("amq.topic", "a.b") == ["q", "r"]
        assert tables.route("amq.topic", "b.b") == ["r"]
        assert tables.route("amq.headers", "", Table.of({"m": 2})) == ["s"]
        assert tables.route("amq.headers", "", EMPTY) == []
        tables.unbind("amq.headers", queue("s"), "", Table.of({"x-match": "any", "n": 1, "m": 2}))
        assert tables.route("amq.headers", "", Table.of({"m": 2})) == []

    def test_exchanges_behind_exchanges_cycles_included(self, tables: Topology) -> None:
        for name in ("a", "b", "c"):
            tables.declare_exchange(name, "fanout")
        tables.bind("a", exchange("b"))
        tables.bind("b", exchange("c"))
        tables.bind("c", exchange("a"))
        tables.bind("b", queue("q"))
        tables.bind("c", queue("q"))
        tables.bind("c", queue("r"))
        assert tables.route("a", "k") == tables.route("c", "k") == ["q", "r"]

    def test_an_alternate_exchange_gets_what_is_left(self, tables: Topology) -> None:
        def behind(name: str) -> Table:
            return Table.of({"alternate-exchange": name})

        tables.declare_exchange("one", "direct", arguments=behind("two"))
        tables.declare_exchange("two", "direct", arguments=behind("three"))
        tables.declare_exchange("three", "fanout", internal=True, arguments=behind("one"))
        tables.bind("one", queue("q"), "a")
        tables.bind("two", queue("r"), "b")
        assert tables.route("one", "a") == ["q"]
        assert tables.route("one", "b") == ["r"]
        assert tables.route("one", "c") == []
        tables.bind("three", queue("s"))
        assert tables.route("one", "c") == ["s"]
        assert tables.route("one", "a", extra_keys=["c"]) == ["q"]

    def test_an_alternate_exchange_may_be_missing(self, tables: Topology) -> None:
        arguments = Table.of({"alternate-exchange": "later"})
        tables.declare_exchange("x", "direct", arguments=arguments)
        assert tables.route("x", "a") == []
        tables.declare_exchange("later", "fanout")
        tables.bind("later", queue("q"))
        assert tables.route("x", "a") == ["q"]

    def test_a_bound_exchange_counts_as_destination(self, tables: Topology) -> None:
        """The alternate exchange is for messages that match no binding of that exchange alone."""
        arguments = Table.of({"alternate-exchange": "amq.fanout"})
        tables.declare_exchange("x", "direct", arguments=arguments)
        tables.bind("amq.fanout", queue("q"))
        tables.bind("x", exchange("amq.direct"), "a")
        assert tables.route("x", "a") == []
        assert tables.route("x", "b") == ["q"]

    def test_routes_know_whether_they_vary_by_message(self, tables: Topology) -> None:
        arguments = Table.of({"alternate-exchange": "amq.match"})
        tables.declare_exchange("x", "direct", arguments=arguments)
        tables.declare_exchange("y", "topic")
        tables.bind("y", exchange("x"), "a")
        assert not tables.varies_by_message("")
        assert not tables.varies_by_message("amq.topic")
        assert tables.varies_by_message("amq.headers")
        assert tables.varies_by_message("x")
        assert tables.varies_by_message("y")
        tables.unbind("y", exchange("x"), "a")
        assert not tables.varies_by_message("y")
        with pytest.raises(NotFound):
            tables.varies_by_message("n")


class TestState:
    """As plain values and back."""

    def test_a_broken_state_is_a_storage_fault(self, tables: Topology) -> None:
        tables.bind("amq.direct", queue("q"))
        good = tables.to_builtins()
        changes: tuple[dict[str, object], ...] = (
            {"format": 99},
            {"queues": []},
            {"bindings": good["bindings"] * 2},
            {"exchanges": [["x", "odd", True, False, False, b""]]},
            {"exchanges": [["x", "direct", True, False, False, b"\xff"]]},
            {"queues": [["q"]]},
        )
        for change in changes:
            with pytest.raises(StorageFault):
                Topology.from_builtins(good | change)
        with pytest.raises(StorageFault):
            Topology.from_builtins({})


NAMES = st.sampled_from(["a", "b", "c"])
KEYS = st.sampled_from(["", "k", "k.l", "*.l", "#"])
ARGUMENTS = st.sampled_from([EMPTY, Table.of({"n": 1}), Table.of({"x-match": "any", "n": 1})])
ENDS = st.builds(Destination, st.sampled_from(DestinationKind), NAMES)


class ReplicatedTopology(RuleBasedStateMachine):
    """Any operations: a replica that was restored from a snapshot half-way stays equal."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Topology("/")
        self.restored = Topology("/")

    def both(self, call: Callable[[Topology], object]) -> None:
        """Run on both replicas: the same answer, and the version tells whether it changed."""
        answers = []
        for tables in (self.tables, self.restored):
            before = tables.to_builtins()
            try:
                answers.append(repr(call(tables)))
            except Refused as refused:
                answers.append(refused.text)
                assert tables.to_builtins() == before
            changed = tables.to_builtins() != before
            assert tables.version == before["version"] + changed
        assert answers[0] == answers[1]

    @rule(name=NAMES, kind=st.sampled_from(["direct", "topic", "fanout", "headers"]),
          auto_delete=st.booleans(), alternate=st.none() | NAMES)  # fmt: skip
    def declare_exchange(
        self, name: str, kind: str, auto_delete: bool, alternate: str | None
    ) -> None:
        arguments = Table.of({"alternate-exchange": alternate}) if alternate else EMPTY
        self.both(
            lambda t: t.declare_exchange(name, kind, auto_delete=auto_delete, arguments=arguments)
        )

    @rule(name=NAMES, owner=st.sampled_from([None, "c1", "c2"]))
    def declare_queue(self, name: str, owner: str | None) -> None:
        self.both(lambda t: t.declare_queue(name, exclusive_owner=owner))

    @rule(source=NAMES, end=ENDS, key=KEYS, arguments=ARGUMENTS)
    def bind(self, source: str, end: Destination, key: str, arguments: Table) -> None:
        self.both(lambda t: t.bind(source, end, key, arguments, owner="c1"))

    @rule(source=NAMES, end=ENDS, key=KEYS, arguments=ARGUMENTS)
    def unbind(self, source: str, end: Destination, key: str, arguments: Table) -> None:
        self.both(lambda t: t.unbind(source, end, key, arguments, owner="c1"))

    @rule(name=NAMES, if_unused=st.booleans())
    def delete_exchange(self, name: str, if_unused: bool) -> None:
        self.both(lambda t: t.delete_exchange(name, if_unused=if_unused))

    @rule(name=NAMES)
    def delete_queue(self, name: str) -> None:
        self.both(lambda t: t.delete_queue(name))

    @rule(owner=st.sampled_from(["c1", "c2"]))
    def lose_connection(self, owner: str) -> None:
        for queue in list(self.tables.queues()):
            if queue.exclusive_owner == owner:
                self.both(lambda t, name=queue.name: t.delete_queue(name))

    @rule()
    def restart(self) -> None:
        self.restored = Topology.from_builtins(self.tables.to_builtins())

    @rule(name=NAMES, key=KEYS)
    def route(self, name: str, key: str) -> None:
        self.both(lambda t: t.route(name, key, Table.of({"n": 1})))
        self.both(lambda t: t.varies_by_message(name))

    @invariant()
    def tables_hold_together(self) -> None:
        self.tables.check_invariants()
        self.restored.check_invariants()
        assert self.tables.to_builtins() == self.restored.to_builtins()


ReplicatedTopology.TestCase.settings = settings(
    deadline=None, max_examples=40, stateful_step_count=40
)
TestReplicas = ReplicatedTopology.TestCase
