"""Exchanges that choose one destination: what they choose, and what they refuse."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.model.errors import PreconditionFailed
from convoymq.model.tables import Table, text_of
from convoymq.routing import Destination, DestinationKind
from convoymq.routing.choosing import POINTS_PER_WEIGHT, WEIGHT_MAX, HashRing, weight_of
from tests.unit.routing.checked import CheckedTopology as Topology

QUEUES = [f"q{number}" for number in range(5)]
WEIGHTS = st.dictionaries(
    st.integers(0, 30).map(lambda number: Destination(DestinationKind.QUEUE, f"q{number}")),
    st.integers(1, 5),
    min_size=1,
    max_size=8,
)
KEYS = [f"key {number}" for number in range(300)]


class Properties(NamedTuple):
    """What a message may be hashed by."""

    correlation_id: str | None = None
    message_id: str | None = None
    timestamp: int | None = None


class Node:
    """Draws what it is told, and keeps some queues."""

    def __init__(self, draws: list[int] | None = None, kept: tuple[str, ...] = ()) -> None:
        self.draws = draws or []
        self.bounds: list[int] = []
        self.kept = kept

    def random_below(self, count: int) -> int:
        self.bounds.append(count)
        return self.draws.pop(0)

    def keeps_queue(self, vhost: str, name: str) -> bool:
        assert vhost == "/"
        return name in self.kept


def to(name: str) -> Destination:
    return Destination(DestinationKind.QUEUE, name)


def tables(kind: str, key: str = "", **arguments: object) -> Topology:
    """An exchange of that type, `x`, bound to five classic queues."""
    made = Topology("/")
    made.declare_exchange(
        "x", kind, arguments=Table.of({k.replace("_", "-"): v for k, v in arguments.items()})
    )
    for name in QUEUES:
        made.declare_queue(name, arguments=Table.of({"x-queue-type": "classic"}))
        made.bind("x", to(name), key)
    return made


def ring_of(weights: dict[Destination, int]) -> HashRing:
    ring = HashRing()
    for destination, weight in weights.items():
        ring.add(destination, weight)
    return ring


def refused(call: object, *arguments: object, **more: object) -> str:
    assert callable(call)
    with pytest.raises(PreconditionFailed) as caught:
        call(*arguments, **more)
    return caught.value.text


class TestRing:
    """The consistent hash by itself."""

    def test_an_empty_ring_chooses_nothing(self) -> None:
        ring = HashRing()
        assert ring.choose("a") is None
        ring.add(to("q"), 2)
        assert ring.choose("a") == to("q")
        ring.remove(to("q"), 2)
        assert ring.choose("a") is None

    def test_shares_follow_the_weights(self) -> None:
        ring = ring_of({to("a"): 10, to("b"): 20, to("c"): 30})
        found = Counter(ring.choose(str(number)) for number in range(6_000))
        for name, weight in (("a", 10), ("b", 20), ("c", 30)):
            assert found[to(name)] == pytest.approx(weight * 100, rel=0.15)

    def test_many_equal_destinations_get_similar_shares(self) -> None:
        ring = ring_of({to(str(number)): 10 for number in range(10)})
        found = Counter(ring.choose(str(number)) for number in range(20_000))
        assert max(found.values()) < 1.25 * 2_000
        assert min(found.values()) > 0.75 * 2_000

    @given(weights=WEIGHTS, added=st.integers(31, 40), weight=st.integers(1, 5))
    @settings(max_examples=60)
    def test_a_new_destination_takes_keys_and_moves_no_others(
        self, weights: dict[Destination, int], added: int, weight: int
    ) -> None:
        ring = ring_of(weights)
        before = [ring.choose(key) for key in KEYS]
        new = to(f"q{added}")
        ring.add(new, weight)
        after = [ring.choose(key) for key in KEYS]
        moved = [end for start, end in zip(before, after, strict=True) if start != end]
        assert set(moved) <= {new}
        ring.remove(new, weight)
        assert [ring.choose(key) for key in KEYS] == before

    @given(weights=WEIGHTS, more=st.integers(1, 5))
    @settings(max_examples=60)
    def test_a_larger_weight_moves_keys_only_to_its_destination(
        self, weights: dict[Destination, int], more: int
    ) -> None:
        ring = ring_of(weights)
        before = [ring.choose(key) for key in KEYS]
        grown = next(iter(weights))
        ring.add(grown, more)
        after = [ring.choose(key) for key in KEYS]
        assert {e for s, e in zip(before, after, strict=True) if s != e} <= {grown}
        ring.remove(grown, more)
        assert [ring.choose(key) for key in KEYS] == before

    @given(weights=WEIGHTS, order=st.randoms(use_true_random=False))
    @settings(max_examples=40)
    def test_the_order_of_bindings_does_not_matter(
        self, weights: dict[Destination, int], order: object
    ) -> None:
        """A node that restored a snapshot chooses as one that saw every binding come and go."""
        other = HashRing()
        other.add(to("gone"), 3)
        other.choose("a")
        for destination, weight in reversed(weights.items()):
            other.add(destination, weight)
            other.choose("a")
        other.remove(to("gone"), 3)
        ring = ring_of(weights)
        assert [ring.choose(key) for key in KEYS] == [other.choose(key) for key in KEYS]

    def test_the_choice_stays_from_release_to_release(self) -> None:
        ring = ring_of({to(name): 1 for name in QUEUES})
        found = [ring.choose(key) for key in (None, "", "a", "b", "c")]
        assert found == [to(name) for name in ("q3", "q1", "q0", "q1", "q1")]

    def test_points_are_bounded(self) -> None:
        assert POINTS_PER_WEIGHT * WEIGHT_MAX <= 100_000
        assert weight_of("1" + "0" * 200) == WEIGHT_MAX
        assert [weight_of(key) for key in ("", "a", "-1", "0", "+3", "٣")] == [0, 0, 0, 0, 3, 0]


class TestConsistentHash:
    """The type `x-consistent-hash`."""

    def test_a_key_keeps_its_queue(self) -> None:
        made = tables("x-consistent-hash", "10")
        first = [made.route("x", key) for key in KEYS]
        assert [made.route("x", key) for key in KEYS] == first
        assert all(len(found) == 1 for found in first)
        assert {found[0] for found in first} == set(QUEUES)
        assert not made.varies_by_message("x")
        assert Topology.from_builtins(made.to_builtins()).route("x", KEYS[0]) == first[0]

    def test_further_keys_make_no_further_copies(self) -> None:
        made = tables("x-consistent-hash", "10")
        assert made.route("x", "a", extra_keys=("b", "c", "d")) == made.route("x", "a")

    def test_a_header_is_hashed(self) -> None:
        made = tables("x-consistent-hash", "10", hash_header="h")
        assert made.varies_by_message("x")
        found = {made.route("x", str(n), Table.of({"h": "same"}))[0] for n in range(50)}
        assert len(found) == 1
        found = {made.route("x", "", Table.of({"h": n}))[0] for n in range(100)}
        assert found == set(QUEUES)
        assert len({made.route("x", str(n))[0] for n in range(50)}) == 1

    @pytest.mark.parametrize("name", ["correlation_id", "message_id", "timestamp"])
    def test_a_property_is_hashed(self, name: str) -> None:
        made = tables("x-consistent-hash", "10", hash_property=name)
        assert made.varies_by_message("x")
        values = range(100) if name == "timestamp" else [str(number) for number in range(100)]
        found = [made.route("x", "", properties=Properties(**{name: each})) for each in values]
        assert {queue for queues in found for queue in queues} == set(QUEUES)
        # The others are not looked at.
        for other in {"correlation_id", "message_id"} - {name}:
            routes = [made.route("x", "", properties=Properties(**{other: str(n)})) for n in [1, 2]]
            assert routes[0] == routes[1] == made.route("x", "k")

    def test_weights_of_one_queue_add_up(self) -> None:
        made = Topology("/")
        made.declare_exchange("x", "x-consistent-hash")
        for name in ("a", "b"):
            made.declare_queue(name)
        for name, weight in (("a", "10"), ("b", "10"), ("b", "20")):
            made.bind("x", to(name), weight)
        found = Counter(made.route("x", str(number))[0] for number in range(4_000))
        assert found["b"] == pytest.approx(3_000, rel=0.1)
        made.unbind("x", to("b"), "20")
        found = Counter(made.route("x", str(number))[0] for number in range(4_000))
        assert found["b"] == pytest.approx(2_000, rel=0.15)

    def test_a_deleted_queue_leaves_its_keys_to_the_others(self) -> None:
        made = tables("x-consistent-hash", "3")
        before = {key: made.route("x", key) for key in KEYS}
        made.delete_queue("q0")
        for key, queues in before.items():
            after = made.route("x", key)
            assert after != ["q0"]
            assert after == queues or queues == ["q0"]

    def test_a_binding_key_that_is_no_weight_is_refused(self) -> None:
        made = Topology("/")
        made.declare_exchange("x", "x-consistent-hash")
        made.declare_queue("q")
        for key in ("", "abc", "1.5", "1 ", "٣"):
            assert refused(made.bind, "x", to("q"), key) == (
                f'The binding key must be an integer: <<"{key}">>'
            )
        for key in ("0", "-1"):
            assert refused(made.bind, "x", to("q"), key) == "The binding key must be greater than 0"
        assert refused(made.bind, "x", to("q"), "1001") == (
            "The binding key must be at most 1000, as a weight: 1001"
        )
        made.bind("x", to("q"), "1000")
        assert made.route("x", "any") == ["q"]

    def test_arguments_that_say_nothing_to_hash_are_refused(self) -> None:
        made = Topology("/")
        for arguments, text in [
            ({"hash-property": "app_id"}, "Unsupported property: app_id"),
            (
                {"hash-property": "message_id", "hash-header": "h"},
                "hash-header and hash-property are mutually exclusive",
            ),
            (
                {"hash-header": 1},
                "invalid type 'long' for arg 'hash-header' in exchange 'x' in vhost '/'",
            ),
        ]:
            table = Table.of(arguments)
            declare = made.declare_exchange
            assert refused(declare, "x", "x-consistent-hash", arguments=table) == text
        # Other types have no such arguments.
        assert made.declare_exchange("d", "direct", arguments=Table.of({"hash-header": 1}))


class TestOthers:
    """The types `x-modulus-hash`, `x-random`, `x-local-random`."""

    def test_modulus_hash_keeps_keys_and_uses_all_queues(self) -> None:
        made = tables("x-modulus-hash")
        found = {key: made.route("x", key) for key in KEYS}
        assert {queues[0] for queues in found.values()} == set(QUEUES)
        again = Topology.from_builtins(made.to_builtins())
        assert all(again.route("x", key) == queues for key, queues in found.items())
        assert not made.varies_by_message("x")
        assert len(made.route("x", "a", extra_keys=("b",))) == 1

    def test_random_takes_what_is_drawn(self) -> None:
        made = tables("x-random", "ignored")
        made.bind("x", to("q0"), "twice")
        node = Node([0, 4, 2])
        assert [made.route("x", "", node=node) for _ in range(3)] == [["q0"], ["q4"], ["q2"]]
        assert node.bounds == [5, 5, 5]
        assert made.varies_by_message("x")

    def test_local_random_takes_a_queue_of_its_node(self) -> None:
        made = tables("x-local-random")
        node = Node([1, 0], kept=("q1", "q3"))
        assert [made.route("x", "", node=node) for _ in range(2)] == [["q3"], ["q1"]]
        assert node.bounds == [2, 2]
        assert made.route("x", "", node=Node()) == []
        assert made.varies_by_message("x")

    def test_without_bindings_the_alternate_exchange_is_asked(self) -> None:
        for kind in ("x-consistent-hash", "x-modulus-hash", "x-random", "x-local-random"):
            made = Topology("/")
            made.declare_queue("q")
            made.bind("amq.fanout", to("q"))
            made.declare_exchange(
                "x", kind, arguments=Table.of({"alternate-exchange": "amq.fanout"})
            )
            assert made.route("x", "a") == ["q"]

    def test_an_exchange_behind_another_varies_too(self) -> None:
        made = tables("x-random")
        made.bind("amq.direct", Destination(DestinationKind.EXCHANGE, "x"), "a")
        assert made.varies_by_message("amq.direct")
        assert made.route("amq.direct", "a", node=Node([3])) == ["q3"]

    def test_local_random_refuses_keys_and_what_is_not_kept_on_one_node(self) -> None:
        made = tables("x-local-random")
        assert refused(made.bind, "x", to("q0"), "k") == "Non empty binding 'k' key not permitted"
        end = Destination(DestinationKind.EXCHANGE, "amq.fanout")
        assert refused(made.bind, "x", end) == "Destination not found"
        made.declare_queue("r", durable=True, arguments=Table.of({"x-queue-type": "quorum"}))
        assert refused(made.bind, "x", to("r")) == (
            "Queue type rabbit_quorum_queue not valid for this exchange type"
        )


@pytest.mark.parametrize(
    ("kind", "key", "arguments"),
    [
        ("direct", "k", {}), ("fanout", "", {}), ("topic", "#", {}), ("headers", "", {}),
        ("x-consistent-hash", "1", {}), ("x-consistent-hash", "1", {"hash_header": "h"}),
        ("x-consistent-hash", "1", {"hash_property": "correlation_id"}), ("x-modulus-hash", "", {}),
    ],
)  # fmt: skip
def test_keys_and_properties_that_are_no_text_are_routed_by_their_bytes(
    kind: str, key: str, arguments: dict[str, object]
) -> None:
    """Of copies, dead letters and properties: one way for one value, and no error."""
    made = tables(kind, key, **arguments)
    odd = text_of(b"\xff.\xfe")
    headers = Table.of({"h": b"\xff", odd: b"\xff"})
    properties = Properties(correlation_id=odd, message_id=odd)
    found = [made.route("x", odd, headers, (odd, "k"), properties) for _ in range(2)]
    assert found[0] == found[1]
    assert len(found[0]) == (1 if kind.startswith("x-") else len(QUEUES))
