"""Policies: keys, choice by name and type, and what acts in the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convoymq.broker.drivers  # noqa: F401
from convoymq.model.errors import ValidationFailed
from convoymq.model.tables import EMPTY, Table
from convoymq.routing.policies import (
    Chosen,
    Policies,
    Policy,
    check_policy,
    effective_settings,
    topic_settings,
)
from convoymq.routing.queue_types import TypeRules, add_type, rules_of
from convoymq.routing.topology import Topology
from convoymq.routing.types import Destination, DestinationKind, ExchangeType, Queue, QueueType
from convoymq.settings.definitions import MIRRORING_KEYS, checked_definition
from convoymq.settings.table import KEYS
from convoymq.settings.values import Setting


def policy(name: str = "p", pattern: str = "", **rest: object) -> Policy:
    definition = rest.pop("definition", {"max-length": 5})
    return Policy(name=name, pattern=pattern, definition=definition, **rest)  # type: ignore[arg-type]


def queue(name: str = "orders", type: str = "classic", **arguments: object) -> Queue:
    table = Table.of({key.replace("_", "-"): value for key, value in arguments.items()})
    return Queue(name=name, type=QueueType(type), durable=True, arguments=table)


def policies(*user: Policy, operator: tuple[Policy, ...] = ()) -> Policies:
    made = Policies()
    for each in user:
        made.put(each)
    for each in operator:
        made.put(each, operator=True)
    return made


@pytest.fixture
def quorum_serves_all() -> Iterator[None]:
    """Quorum queues serve every key that RabbitMQ's do."""
    before = rules_of("quorum")
    assert before is not None
    keys = {
        "message-ttl", "expires", "max-length", "max-length-bytes", "overflow", "delivery-limit",
        "dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy",
        "target-group-size", "consumer-timeout", "delayed-retry-type", "delayed-retry-min",
        "delayed-retry-max", "queue-leader-locator",
    }  # fmt: skip
    arguments = before.serves | {f"x-{key}" for key in keys} | {"x-quorum-target-group-size"}
    add_type(replace(before, policies=frozenset(keys), serves=arguments))
    yield
    add_type(before)


# --- keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "good", "bad", "reason"),
    [
        ("message-ttl", 0, -1, "-1 is not a valid message TTL"),
        ("message-ttl", 5, True, "true is not a valid message TTL"),
        ("expires", 1, 0, "0 is not a valid queue expiry"),
        ("max-length", 0, "5", '<<"5">> is not a valid maximum length'),
        ("max-length-bytes", 9, 1.5, "1.5 is not a valid maximum length in bytes"),
        ("max-in-memory-length", 9, -1, "-1 is not a valid maximum memory in bytes"),
        ("max-in-memory-bytes", 9, None, "null is not a valid maximum memory in bytes"),
        ("overflow", "drop-head", "drop", '<<"drop">> is not a valid overflow value'),
        ("overflow", "reject-publish-dlx", [], "[] is not a valid overflow value"),
        ("delivery-limit", -1, "no", '<<"no">> is not a valid delivery limit'),
        ("dead-letter-exchange", "", 1, "1 is not a valid dead letter exchange name"),
        ("dead-letter-routing-key", "k", ["k"], '[<<"k">>] is not a valid dead letter routing key'),
        ("dead-letter-strategy", "at-least-once", "x", '<<"x">> is not a valid dead letter'),
        ("queue-leader-locator", "balanced", "x", '<<"x">> is not a valid queue leader locator'),
        ("queue-master-locator", "random", "x", '<<"x">> is not a valid queue master locator'),
        ("ha-mode", "all", "some", '<<"some">> is not a valid ha-mode value'),
        ("queue-mode", "lazy", "x", '<<"x">> is not a valid queue-mode value'),
        ("queue-version", 2, 1, "1 is not a valid queue-version value"),
        ("target-group-size", 5, 0, "0 is not a valid target count"),
        ("consumer-timeout", 0, -1, "-1 is not a valid consumer timeout"),
        ("consumer-disconnected-timeout", 0, -1, "-1 is not a valid consumer disconnected"),
        ("delayed-retry-type", "disabled", "some", '<<"some">> is not a valid delayed retry type'),
        ("delayed-retry-min", 1, -1, "-1 is not a valid delayed retry minimum"),
        ("delayed-retry-max", 1, -1, "-1 is not a valid delayed retry maximum"),
        ("requeue-position", "front", "x", '<<"x">> is not a valid requeue position'),
        ("message-expiry", "due", "x", '<<"x">> is not a valid message expiry'),
        ("priority-mode", "two-classes", "x", '<<"x">> is not a valid priority mode'),
        ("deduplication-count", 0, 1_000_001, "1000001 is not a valid number of message-ids"),
        ("deduplication-time", 604_800_000, "1h", '<<"1h">> is not a valid deduplication time'),
        ("link-resume-timeout", 0, 86_400_001, "86400001 is not a valid link resume timeout"),
        ("max-age", "7D", "7d", '<<"7d">> is not a valid max age'),
        ("stream-max-segment-size-bytes", 1, 1 << 40, "1099511627776 is not a valid segment size"),
        ("stream-filter-size-bytes", 16, 15, "15 is not a valid filter size"),
        ("initial-cluster-size", 3, -1, "-1 is not a valid cluster size"),
        ("group-ttl", "7D", 7, "7 is not a valid time to live of groups"),
        ("autoscale", "on", True, "true is not a valid autoscale value"),
        ("autoscale-target-messages", 1, 0, "0 is not a valid number of messages a second"),
        ("autoscale-target-bytes", 1, "1", '<<"1">> is not a valid number of bytes a second'),
        ("autoscale-partitions-min", 1, 0, "0 is not a valid number of partitions"),
        ("autoscale-partitions-max", 1024, 1025, "1025 is not a valid number of partitions"),
        ("autoscale-changes-per-hour", 1, 0, "0 is not a valid number of changes an hour"),
        ("autoscale-unit", 100, 99, "99 is not a valid unit. Valid range is 100-3600000 ms"),
        ("weak-wait", "30s", 30, "30 is not a valid wait of weak topics"),
        ("lost-after", "1D", "1d", '<<"1d">> is not a valid time until a partition is lost'),
        ("seal-after", "30s", 30, "30 is not a valid time without a leader"),
        ("alternate-exchange", "x", {"a": 1}, '#{<<"a">> => 1} is not a valid alternate exchange'),
    ],
)
def test_every_key_takes_values_of_its_type_only(
    key: str, good: object, bad: object, reason: str
) -> None:
    assert checked_definition({key: good}) == {key: good}
    with pytest.raises(ValidationFailed) as caught:
        checked_definition({key: bad})
    assert caught.value.text.startswith(f"Validation failed\n\n{reason}")


def test_every_key_is_in_the_table_above() -> None:
    marks = test_every_key_takes_values_of_its_type_only.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in marks[0].args[1]} == set(KEYS) - set(MIRRORING_KEYS)


def test_unknown_keys_are_refused_as_clients_know_it() -> None:
    with pytest.raises(ValidationFailed) as caught:
        checked_definition({"max-priority": 5, "max-length": 1})
    assert caught.value.text == (
        'Validation failed\n\n[{<<"max-priority">>,5}] are not recognised policy settings'
    )
    with pytest.raises(ValidationFailed, match="not recognised"):
        checked_definition({"federation-upstream": "all"})
    with pytest.raises(ValidationFailed, match="no policy provided"):
        checked_definition({})


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        (
            {"ha-sync-mode": "automatic"},
            "ha-mode must be specified to specify ha-params, ha-sync-mode or "
            "ha-promote-on-shutdown",
        ),
        ({"ha-mode": "all", "ha-params": 2}, 'ha-mode="all" does not take parameters'),
        ({"ha-mode": "exactly"}, 'ha-mode="exactly" takes an integer, none given'),
        ({"ha-mode": "exactly", "ha-params": "2"}, 'takes an integer, <<"2">> given'),
        ({"ha-mode": "exactly", "ha-params": 0}, 'ha-mode="exactly" takes an integer, 0 given'),
        ({"ha-mode": "nodes", "ha-params": 2}, 'ha-mode="nodes" takes a list, 2 given'),
        ({"ha-mode": "nodes", "ha-params": []}, 'ha-mode="nodes" list must be non-empty'),
        (
            {"ha-mode": "nodes", "ha-params": ["a", 1]},
            'ha-mode="nodes" takes a list of strings, [1] was not a string',
        ),
        (
            {"ha-mode": "all", "ha-sync-batch-size": 0},
            "ha-sync-batch-size takes an integer greater than 0, 0 given",
        ),
        (
            {"ha-mode": "all", "ha-sync-mode": "x"},
            'ha-sync-mode must be "manual" or "automatic", got <<"x">>',
        ),
        (
            {"ha-mode": "all", "ha-promote-on-failure": True},
            'ha-promote-on-failure must be "always" or "when-synced", got true',
        ),
        (
            {"ha-mode": "all", "ha-promote-on-shutdown": "never"},
            'ha-promote-on-shutdown must be "always" or "when-synced", got <<"never">>',
        ),
    ],
)
def test_settings_of_mirroring_go_together(definition: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        checked_definition(definition)
    assert reason in caught.value.text


def test_nodes_of_mirrors_are_a_list_of_names() -> None:
    found = checked_definition({"ha-mode": "nodes", "ha-params": ["a", "b"]})
    assert found == {"ha-mode": "nodes", "ha-params": ("a", "b")}


@pytest.mark.parametrize(
    ("user", "operator", "joined"),
    [
        (("nodes", ("a",)), ("exactly", 2), ("exactly", 2)),
        (("exactly", 3), ("exactly", 2), ("exactly", 3)),
        (("nodes", ("a",)), ("nodes", ("b", "c")), ("nodes", ("b", "c"))),
        (("all", None), ("exactly", 2), ("all", 2)),
    ],
)
def test_an_operator_policy_asks_for_more_mirrors_only(
    user: tuple[str, object], operator: tuple[str, object], joined: tuple[str, object]
) -> None:
    def definition(mode: str, params: object) -> dict[str, object]:
        return {"ha-mode": mode, **({"ha-params": params} if params is not None else {})}

    chosen = policies(
        policy("u", definition=definition(*user)),
        operator=(policy("o", definition=definition(*operator)),),
    ).for_queue(queue())
    assert chosen.definition == definition(*joined)


def test_a_policy_of_mirrors_does_not_act_in_quorum_queues() -> None:
    found = policies(policy(definition={"ha-mode": "all", "max-length": 5}))
    assert effective_settings(queue(), found) == {"ha-mode": "all", "max-length": 5}
    assert effective_settings(queue(type="quorum"), found) == {}


def test_operator_policies_have_fewer_keys() -> None:
    allowed = {
        "message-ttl", "expires", "max-length", "max-length-bytes", "max-in-memory-length",
        "max-in-memory-bytes", "overflow", "delivery-limit", "queue-master-locator",
        "queue-version", "target-group-size", "delayed-retry-type", "delayed-retry-min",
        "delayed-retry-max", "ha-mode", "ha-params", "ha-sync-mode",
    }  # fmt: skip
    assert {key.name for key in KEYS.values() if key.operator} == allowed
    with pytest.raises(ValidationFailed, match=r"alternate-exchange.*not recognised"):
        checked_definition({"alternate-exchange": "x"}, operator=True)


# --- policies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (policy(pattern="("), "pattern should be a regular expression but is invalid"),
        (policy(pattern="(?=x)"), "pattern should be a regular expression but is invalid"),
        (policy(priority=1.5), "priority should be a number"),
        (policy(priority=True), "priority should be a number"),
        (policy(priority=1 << 40), "priority should be a number"),
        (policy(apply_to="tables"), "apply-to 'tables' unrecognised; should be one of"),
        (policy(apply_to=""), "apply-to '' unrecognised"),
        (policy(name=""), "a policy needs a name"),
        (policy(definition={"alternate-exchange": "x"}, apply_to="queues"), "exchanges only"),
        (policy(apply_to="exchanges"), "conflicts with max-length: for queues only"),
        (
            policy(definition={"queue-mode": "lazy"}, apply_to="quorum_queues"),
            "conflicts with queue-mode: for classic_queues only",
        ),
        (
            policy(definition={"max-in-memory-length": 5, "queue-mode": "lazy"}),
            "no queue type serves all of max-in-memory-length, queue-mode",
        ),
        (
            policy(definition={"stream-filter-size-bytes": 16}),
            "stream-filter-size-bytes is not served by any queue type",
        ),
        (policy(definition={"delayed-retry-type": "all"}), "needs delayed-retry-min"),
        (
            policy(definition={"delayed-retry-min": 5, "delayed-retry-max": 4}),
            "delayed-retry-max is less than delayed-retry-min",
        ),
    ],
)
def test_a_policy_that_is_malformed_or_would_act_nowhere_is_refused(
    made: Policy, reason: str
) -> None:
    with pytest.raises(ValidationFailed) as caught:
        check_policy(made)
    assert reason in caught.value.text


def test_a_policy_may_have_keys_for_queues_and_exchanges() -> None:
    check_policy(policy(definition={"max-length": 5, "alternate-exchange": "x"}))


def test_patterns_are_not_anchored_and_the_highest_priority_wins() -> None:
    table = policies(
        policy("a", "ord", priority=1, definition={"max-length": 1}),
        policy("b", "^orders$", priority=3, definition={"max-length": 2}),
        policy("c", "x", priority=9, definition={"max-length": 3}),
    )
    assert table.for_queue(queue("orders")).policy == table.user["b"]
    assert table.for_queue(queue("my-orders-2")).policy == table.user["a"]
    assert table.for_queue(queue("other")) == Chosen()
    table.delete("b")
    assert table.for_queue(queue("orders")).policy == table.user["a"]


def test_among_equal_priorities_the_first_by_name_is_taken() -> None:
    table = policies(policy("b"), policy("a"), policy("c"))
    assert table.for_queue(queue()).policy == table.user["a"]


def test_a_policy_with_a_key_that_the_type_does_not_serve_is_skipped_for_it() -> None:
    table = policies(
        policy("both", priority=5, definition={"max-length": 5, "queue-mode": "lazy"}),
        policy("quorum", priority=1, definition={"max-in-memory-length": 7}),
    )
    assert table.for_queue(queue(type="classic")).policy == table.user["both"]
    assert table.for_queue(queue(type="quorum")).policy == table.user["quorum"]
    assert table.for_queue(queue(type="stream")) == Chosen()
    assert table.for_queue(queue(type="of-a-later-release")) == Chosen()


def test_scopes_choose_among_types() -> None:
    key: Mapping[str, Setting] = {"queue-leader-locator": "balanced"}
    for scope, types in {
        "all": {"classic", "quorum", "stream"},
        "queues": {"classic", "quorum", "stream"},
        "classic_queues": {"classic"},
        "quorum_queues": {"quorum"},
        "streams": {"stream"},
        "exchanges": set(),
    }.items():
        table = policies(policy(apply_to=scope, definition=key))
        assert {
            each for each in ("classic", "quorum", "stream") if table.for_queue(queue(type=each))[0]
        } == types


def test_topics_and_their_partitions_get_policies_for_topics_only() -> None:
    part = queue("amq.partition.orders.3", "partition", x_partition_topic="orders")
    kept = {"max-length-bytes": 5}
    for scope in ("all", "queues", "streams"):
        table = policies(policy(apply_to=scope, definition=kept))
        assert table.for_topic("orders") == Chosen()
        assert table.for_queue(part) == Chosen()
    table = policies(
        policy("all of a topic", "^orders$", apply_to="topics", definition={"group-ttl": "1D"}),
        policy("parts", r"^amq\.", apply_to="topics", priority=9, definition=kept),
        operator=(policy(apply_to="topics", definition=kept),),
    )
    assert table.for_topic("orders").definition == {"group-ttl": "1D", **kept}
    assert effective_settings(part, table) == {"group-ttl": "1D", **kept}
    for other in ("classic", "quorum", "stream"):
        assert table.for_queue(queue("orders", other)) == Chosen()


def test_settings_of_a_topic_are_joined_as_those_of_a_queue() -> None:
    definition = {"max-age": "7D", "max-length-bytes": 9, "group-ttl": "1D"}
    table = policies(policy(apply_to="topics", definition=definition))
    own: Mapping[str, Setting] = {"max-age": "1h", "max-length-bytes": 20}
    assert topic_settings("orders", own, table) == {**definition, "max-age": "1h"}
    assert topic_settings("orders", own, policies()) == own


@pytest.mark.parametrize(
    ("definition", "scope", "reason"),
    [
        ({"max-length": 5}, "topics", "conflicts with max-length: for classic_queues, quorum"),
        ({"group-ttl": "1D"}, "queues", "conflicts with group-ttl: for topics only"),
        ({"group-ttl": "1D"}, "all", "conflicts with group-ttl: for topics only"),
        ({"group-ttl": 5}, "topics", "5 is not a valid time to live of groups"),
        ({"alternate-exchange": "x"}, "topics", "for exchanges only"),
    ],
)
def test_keys_and_scopes_of_topics_go_together(
    definition: Mapping[str, Setting], scope: str, reason: str
) -> None:
    with pytest.raises(ValidationFailed, match=reason):
        check_policy(policy(apply_to=scope, definition=definition))


def test_a_pattern_that_this_release_does_not_take_matches_nothing() -> None:
    assert policies(policy(pattern="(?=x)")).for_queue(queue("x")) == Chosen()


def test_operator_policies_come_beside_and_are_joined_key_by_key(quorum_serves_all: None) -> None:
    both = Chosen(
        policy(
            definition={
                "message-ttl": 5,
                "expires": 9,
                "overflow": "drop-head",
                "delivery-limit": -1,
                "target-group-size": 3,
                "delayed-retry-type": "all",
                "delayed-retry-min": 1,
                "delayed-retry-max": 9,
                "dead-letter-exchange": "x",
            }
        ),
        policy(
            definition={
                "message-ttl": 7,
                "expires": 8,
                "max-length": 4,
                "overflow": "reject-publish",
                "delivery-limit": 6,
                "target-group-size": 5,
                "delayed-retry-type": "failed",
                "delayed-retry-min": 2,
                "delayed-retry-max": 8,
            }
        ),
    )
    assert both.definition == {
        "message-ttl": 5,
        "expires": 8,
        "max-length": 4,
        "overflow": "reject-publish",
        "delivery-limit": 6,
        "target-group-size": 5,
        "delayed-retry-type": "failed",
        "delayed-retry-min": 2,
        "delayed-retry-max": 8,
        "dead-letter-exchange": "x",
    }


def test_the_overflow_of_a_policy_wins_in_quorum_queues_and_loses_in_classic_ones(
    quorum_serves_all: None,
) -> None:
    table = policies(policy(definition={"overflow": "reject-publish"}))
    declared = {"x_overflow": "drop-head"}
    assert effective_settings(queue(type="classic", **declared), table)["overflow"] == "drop-head"
    assert (
        effective_settings(queue(type="quorum", **declared), table)["overflow"] == "reject-publish"
    )


def test_arguments_of_dead_letters_win_and_limits_are_joined(quorum_serves_all: None) -> None:
    table = policies(
        policy(
            definition={
                "dead-letter-exchange": "by-policy",
                "dead-letter-routing-key": "k",
                "delivery-limit": 5,
                "target-group-size": 3,
                "max-length": 9,
            }
        )
    )
    found = effective_settings(
        queue(
            type="quorum",
            x_dead_letter_exchange="own",
            x_delivery_limit=-1,
            x_quorum_target_group_size=5,
            x_max_length=10,
        ),
        table,
    )
    assert found == {
        "dead-letter-exchange": "own",
        "dead-letter-routing-key": "k",
        "delivery-limit": 5,
        "target-group-size": 5,
        "max-length": 9,
    }


def test_an_argument_that_is_no_value_of_its_key_has_no_effect(quorum_serves_all: None) -> None:
    made = queue(type="quorum", x_delivery_limit="many")
    assert effective_settings(made, policies(policy(definition={"delivery-limit": 3}))) == {
        "delivery-limit": 3
    }
    assert effective_settings(made, Policies()) == {}


# --- a naive model ------------------------------------------------------------------------

LOWER = ("message-ttl", "expires", "max-length", "max-length-bytes")
names = st.text("abc", min_size=1, max_size=4)
values = st.fixed_dictionaries(
    {},
    optional={
        **{key: st.integers(1, 9) for key in LOWER},
        "overflow": st.sampled_from(["drop-head", "reject-publish"]),
        "queue-mode": st.just("lazy"),
        "max-in-memory-length": st.integers(1, 9),
    },
).filter(bool)
tables = st.lists(
    st.builds(
        Policy,
        name=names,
        pattern=st.sampled_from(["", "a", "^b", "c$", "^abc$"]),
        definition=values,
        apply_to=st.sampled_from(["all", "queues", "classic_queues", "quorum_queues", "exchanges"]),
        priority=st.integers(-2, 2),
    ),
    max_size=6,
    unique_by=lambda each: each.name,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        **{f"x-{key}": st.integers(1, 9) for key in LOWER},
        "x-overflow": st.sampled_from(["drop-head", "reject-publish"]),
        "x-custom": st.integers(0, 9),
    },
)


def naive(
    name: str, declared: Mapping[str, object], user: list[Policy], operator: list[Policy]
) -> dict[str, object]:
    """The effective settings of a classic queue, read off the rules in the plainest words."""

    def matches(each: Policy) -> bool:
        plain = {
            "": True,
            "a": "a" in name,
            "^b": name.startswith("b"),
            "c$": name.endswith("c"),
            "^abc$": name == "abc",
        }[each.pattern]
        return (
            plain
            and each.apply_to in ("all", "queues", "classic_queues")
            and "max-in-memory-length" not in each.definition
        )

    def best(table: list[Policy]) -> dict[str, object]:
        found: Policy | None = None
        for each in sorted(table, key=lambda one: one.name):
            if matches(each) and (found is None or each.priority > found.priority):
                found = each
        return dict(found.definition) if found else {}

    mine, theirs = best(user), best(operator)
    result: dict[str, object] = {}
    for key in LOWER:
        said = [mine.get(key), theirs.get(key), declared.get(f"x-{key}")]
        present = [each for each in said if isinstance(each, int)]
        if present:
            result[key] = min(present)
    for overflow in (declared.get("x-overflow"), theirs.get("overflow"), mine.get("overflow")):
        if overflow is not None:
            result["overflow"] = overflow
            break
    if "queue-mode" in mine or "queue-mode" in theirs:
        result["queue-mode"] = "lazy"
    return result


@settings(max_examples=300)
@given(name=names, declared=arguments, user=tables, operator=tables)
def test_effective_settings_are_those_of_the_naive_model(
    name: str, declared: dict[str, object], user: list[Policy], operator: list[Policy]
) -> None:
    table = policies(*user, operator=tuple(operator))
    made = Queue(name=name, type=QueueType.CLASSIC, arguments=Table.of(declared))
    assert effective_settings(made, table) == naive(name, declared, user, operator)


# --- exchanges ----------------------------------------------------------------------------


def test_an_alternate_exchange_acts_by_policy_and_its_argument_comes_first() -> None:
    topology = Topology("/")
    for name in ("orders", "own", "spare", "other"):
        given_argument = Table.of({"alternate-exchange": "other"}) if name == "own" else EMPTY
        topology.declare_exchange(name, ExchangeType.FANOUT, arguments=given_argument)
    for exchange in ("spare", "other"):
        topology.declare_queue(f"{exchange}-queue", QueueType.CLASSIC)
        topology.bind(exchange, Destination(DestinationKind.QUEUE, f"{exchange}-queue"))
    assert topology.route("orders", "k") == []
    alternate = policy("ae", "^o", definition={"alternate-exchange": "spare"})
    topology.policies.put(alternate)
    assert topology.route("orders", "k") == ["spare-queue"]
    assert topology.route("own", "k") == ["other-queue"]
    topology.policies.put(policy("higher", "^orders", priority=1, definition={"max-length": 1}))
    assert topology.route("orders", "k") == []  # one policy only, and that one has no alternate
    topology.policies.delete("higher")
    assert topology.route("orders", "k") == ["spare-queue"]
    topology.policies.delete("ae")
    assert topology.route("orders", "k") == []


def test_streams_take_age_length_and_segments_by_policy() -> None:
    definition = {
        "max-age": "7D",
        "max-length-bytes": 100,
        "stream-max-segment-size-bytes": 10,
    }
    made = policy(apply_to="streams", definition=definition)
    check_policy(made)
    declared = queue(type="stream", x_max_length_bytes=50, x_max_age="1h")
    found = effective_settings(declared, policies(made))
    assert found == {**definition, "max-length-bytes": 50, "max-age": "1h"}


def test_rules_of_types_name_policies_that_exist() -> None:
    for name in ("classic", "quorum", "stream"):
        rules = rules_of(name)
        assert isinstance(rules, TypeRules)
        assert rules.policies <= set(KEYS)
        assert rules.prevailing_arguments <= rules.serves
