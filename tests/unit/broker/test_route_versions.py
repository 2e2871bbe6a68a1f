"""Remembered routes are those of a fresh look-up, and changes elsewhere leave them alone."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.broker.route_versions import MISSING_MAX, SPARE_MAX, RouteVersions
from convoymq.metadata.commands import (
    Bind,
    Command,
    DeclareExchange,
    DeclareQueue,
    DeleteExchange,
    DeletePolicy,
    DeleteQueue,
    DeleteVhost,
    PutPolicy,
    PutVhost,
    Unbind,
)
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.errors import BrokerError
from convoymq.model.tables import EMPTY, Table

VHOSTS = st.sampled_from(("/", "b"))
QUEUES = st.sampled_from(("q", "r"))
EXCHANGES = st.sampled_from(("x", "y"))
KEYS = st.sampled_from(("q", "r", "k"))
COMMANDS = st.one_of(
    st.builds(PutVhost, name=VHOSTS),
    st.builds(DeleteVhost, name=st.just("b")),
    st.builds(
        DeclareQueue,
        vhost=VHOSTS,
        name=QUEUES,
        members=st.just((1,)),
        type=st.just("classic"),
        durable=st.just(True),
    ),
    st.builds(DeleteQueue, vhost=VHOSTS, name=QUEUES),
    st.builds(
        DeclareExchange,
        vhost=VHOSTS,
        name=EXCHANGES,
        type=st.sampled_from(("direct", "topic", "fanout")),
        durable=st.just(True),
        arguments=st.sampled_from((b"", Table.of({"alternate-exchange": "y"}).encoded)),
    ),
    st.builds(DeleteExchange, vhost=VHOSTS, name=EXCHANGES),
    *(
        st.builds(
            kind,
            vhost=VHOSTS,
            source=EXCHANGES,
            kind=st.just("queue"),
            destination=QUEUES,
            routing_key=KEYS,
        )
        for kind in (Bind, Unbind)
    ),
    st.builds(
        Bind,
        vhost=VHOSTS,
        source=st.just("x"),
        kind=st.just("exchange"),
        destination=st.just("y"),
        routing_key=KEYS,
    ),
    st.builds(
        PutPolicy,
        vhost=VHOSTS,
        name=st.just("p"),
        pattern=EXCHANGES,
        definition=st.just({"alternate-exchange": "y"}),
        apply_to=st.just("exchanges"),
    ),
    st.builds(DeletePolicy, vhost=VHOSTS, name=st.just("p")),
)
PLACES = [(v, x, k) for v in ("/", "b") for x in ("", "x", "y") for k in ("q", "r", "k")]


class Version:
    """As `RouteCacheVersion` of the kernels."""

    value = 0

    def bump(self) -> None:
        self.value += 1


class Bench:
    """A tree, and a publisher that remembers every route which channels may remember."""

    def __init__(self) -> None:
        self.tree = MetadataMachine()
        self.tree.version = self.tree.VERSION
        self.versions = RouteVersions(Version, lambda: self.tree.vhosts)  # type: ignore[arg-type]
        self.remembered: dict[tuple[str, str, str], tuple[int, list[str]]] = {}
        self.do(PutVhost(name="/"))

    def do(self, command: Command) -> None:
        with suppress(BrokerError):
            self.tree.carry_out(command, 0)
        for change in self.tree.changes:
            self.versions.on_change(change)
        self.tree.changes.clear()

    def fresh(self, vhost: str, exchange: str, key: str) -> list[str] | None:
        place = self.tree.vhosts.get(vhost)
        if place is None:
            return None
        try:
            place.topology.exchange_for_publish(exchange)
        except BrokerError:
            return None
        return sorted(place.topology.targets(exchange, key, EMPTY)[0])

    def look(self) -> None:
        """Remembers all routes, and holds those that are remembered against fresh ones."""
        for at in PLACES:
            version = self.versions.of(at[0]).value
            fresh = self.fresh(*at)
            known = self.remembered.get(at)
            if known is not None and known[0] == version:
                assert known[1] == fresh, at
            elif fresh is not None and (
                at[1] or fresh or self.versions.remember_missing(at[0], at[2])
            ):
                self.remembered[at] = (version, fresh)


@settings(max_examples=300)
@given(st.lists(COMMANDS, max_size=30))
def test_a_remembered_route_is_that_of_a_fresh_look_up(commands: list[Command]) -> None:
    bench = Bench()
    for command in commands:
        bench.look()
        bench.do(command)
    bench.look()


def queue(name: str, vhost: str = "/") -> DeclareQueue:
    return DeclareQueue(vhost=vhost, name=name, members=(1,), type="classic", durable=True)


def test_new_queues_and_other_virtual_hosts_leave_remembered_routes_alone() -> None:
    """Each forgotten route costs its publisher a look-up, so what is counted is versions."""
    bench = Bench()
    bench.do(PutVhost(name="b"))
    bench.do(queue("q"))
    own, other = bench.versions.of("/"), bench.versions.of("b")
    before = own.value, other.value
    for number in range(1000):
        bench.do(queue(f"q{number}", "b"))
    assert (own.value, other.value) == before
    bench.do(Bind(vhost="b", source="amq.direct", kind="queue", destination="q1", routing_key="k"))
    assert (own.value, other.value) == (before[0], before[1] + 1)
    bench.versions.bump()
    assert (own.value, other.value) == (before[0] + 1, before[1] + 2)


def test_a_new_queue_whose_absence_is_remembered_moves_the_version_once() -> None:
    bench = Bench()
    own = bench.versions.of("/")
    before = own.value
    assert bench.versions.remember_missing("/", "q")
    bench.do(queue("r"))
    assert own.value == before
    bench.do(queue("q"))
    assert own.value == before + 1
    bench.do(DeleteQueue(vhost="/", name="q"))
    after = own.value
    bench.do(queue("q"))
    assert own.value == after


def test_absent_queues_are_remembered_up_to_a_bound() -> None:
    bench = Bench()
    own = bench.versions.of("/")
    before = own.value
    names = [f"q{number}" for number in range(MISSING_MAX + 1)]
    assert [bench.versions.remember_missing("/", name) for name in names] == [
        *[True] * MISSING_MAX,
        False,
    ]
    assert bench.versions.remember_missing("/", names[0])
    bench.do(queue(names[-1]))
    assert own.value == before
    bench.do(queue(names[0]))
    assert own.value == before + 1
    assert bench.versions.remember_missing("/", names[-1])


def test_versions_of_deleted_virtual_hosts_go() -> None:
    """What was remembered by one is not that of another virtual host of its name."""
    bench = Bench()
    values = set()
    for number in range(1000):
        name = f"v{number % 50}"
        bench.do(PutVhost(name=name))
        bench.do(queue("q", name))
        version = bench.versions.of(name)
        values.add((name, version.value))
        assert len(bench.versions) <= 2 * len(bench.tree.vhosts) + SPARE_MAX
        bench.do(DeleteVhost(name=name))
        values.add((name, version.value))
    # Two of each: the one before and the one after its deletion.
    assert len(values) == 2000
