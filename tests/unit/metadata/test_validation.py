"""Who proposes decides, apply records: one log makes one tree, whatever a release accepts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.kernels.batch import CMD_METADATA, CommandBuilder
from convoymq.metadata import validation
from convoymq.metadata.access import SHA256, hash_sha256
from convoymq.metadata.commands import (
    Bind,
    Bootstrap,
    Command,
    DeclareExchange,
    DeclareQueue,
    DeleteExchange,
    DeleteQueue,
    DeleteVhost,
    PutNode,
    PutPermission,
    PutTopicPermission,
    PutUser,
    PutVhost,
    Unbind,
    encode_command,
)
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.validation import validated
from convoymq.model.errors import NotFound, NotServed, PreconditionFailed, Refused
from convoymq.model.tables import Table
from convoymq.routing import (
    Exchange,
    ExchangeType,
    bindings,
    headers,
    queue_arguments,
    queue_types,
    topics,
)
from convoymq.routing.matchers import Matcher
from convoymq.routing.queue_types import PlacementKind, TypeRules

SESSION = 1 << 56 | 7 << 24
EVERY_ARGUMENT = frozenset(argument.name for argument in queue_arguments.ARGUMENTS)
LARGER = {
    name: TypeRules(
        name=name,
        placement=PlacementKind.RAFT if name in ("quorum", "stream") else PlacementKind.HOME,
        serves=EVERY_ARGUMENT,
    )
    for name in ("classic", "quorum", "stream", "delayed")
}


@contextmanager
def build(larger: bool) -> Iterator[None]:
    """A release, or a later one that accepts more: its tables and checks are other ones."""
    if not larger:
        yield
        return
    with (
        mock.patch.object(queue_types, "_TYPES", LARGER),
        mock.patch.object(topics, "MANY_WILDCARDS_MAX", 9),
        mock.patch.object(headers, "_MODES", {*headers._MODES, b"most"}),
        mock.patch.object(validation, "pattern_error", return_value=None),
        mock.patch.object(validation, "is_known_hash", return_value=True),
    ):
        yield


class Log:
    """The commands that proposers let through, and machines that apply them."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.machine = MetadataMachine()
        bootstrap = Bootstrap(
            vhost="/",
            user="guest",
            password_hash=hash_sha256(b"guest", b"salt"),
            algorithm=SHA256,
            cluster_name="convoy",
        )
        self.record(bootstrap)

    def record(self, command: Command) -> None:
        self.bodies.append(encode_command(command))
        apply(self.machine, len(self.bodies), self.bodies[-1])

    def propose(self, command: Command, *, larger: bool = False) -> None:
        """As a node of that release."""
        with build(larger):
            try:
                checked = validated(command, self.machine)
            except Refused:
                return
        self.record(checked)

    def replay(self, *, larger: bool) -> MetadataMachine:
        machine = MetadataMachine()
        with build(larger):
            for index, body in enumerate(self.bodies, 1):
                apply(machine, index, body)
            machine.check_invariants()
            restored = MetadataMachine()
            restored.restore(machine.snapshot())
            assert restored.snapshot() == machine.snapshot()
        return machine


def apply(machine: MetadataMachine, index: int, body: bytes) -> None:
    builder = CommandBuilder()
    builder.add(CMD_METADATA, 0, SESSION, index, 0, len(body), body)
    machine.apply(index, 1000, builder.take_entry(0, index, 1, 1000).data)
    machine.effects.clear()
    machine.changes.clear()


def quorum(name: str, **arguments: Any) -> DeclareQueue:
    table = Table.of({"x-queue-type": "quorum", **arguments})
    return DeclareQueue(
        vhost="/", name=name, members=(1, 2, 3), durable=True, arguments=table.encoded
    )


@pytest.mark.parametrize("proposer", [False, True])
def test_a_release_that_accepts_more_replays_the_same_groups(proposer: bool) -> None:
    """`x-message-ttl` is not served by quorum queues yet; a later release serves it."""
    log = Log()
    log.propose(quorum("orders"), larger=proposer)
    log.propose(quorum("tried", **{"x-message-ttl": 1000}), larger=proposer)
    log.propose(quorum("payments"), larger=proposer)
    old, new = log.replay(larger=False), log.replay(larger=True)
    assert old.snapshot() == new.snapshot()
    groups = {name: record.group for name, record in new.vhosts["/"].queues.items()}
    expected = (
        {"orders": 1, "tried": 2, "payments": 3} if proposer else {"orders": 1, "payments": 2}
    )
    assert groups == expected


NAMES = st.sampled_from(["a", "b", "amq.topic", "amq.x", "", "n" * 256])
KEYS = st.sampled_from(["", "k", "#.#.#", "a.*"])
ARGUMENTS = st.sampled_from(
    [
        {},
        {"x-queue-type": "quorum"},
        {"x-queue-type": "stream"},
        {"x-queue-type": "delayed"},
        {"x-queue-type": 1},
        {"x-message-ttl": 5},
        {"x-message-ttl": -5},
        {"x-queue-type": "quorum", "x-message-ttl": 5},
        {"x-match": "most", "h": 1},
        {"x-match": "any", "h": 1},
        {"alternate-exchange": 3},
    ]
).map(lambda values: Table.of(values).encoded)
KINDS = st.sampled_from(["queue", "exchange"])
COMMANDS: st.SearchStrategy[Command] = st.one_of(
    st.builds(
        DeclareQueue,
        vhost=st.sampled_from(["/", "v", "none"]),
        name=NAMES,
        members=st.sampled_from([(1,), (2, 1, 3), ()]),
        durable=st.booleans(),
        owner=st.sampled_from([None, "1.7.1"]),
        auto_delete=st.booleans(),
        arguments=ARGUMENTS,
        type=st.sampled_from(["classic", "quorum", "delayed"]),
    ),
    st.builds(
        DeclareExchange,
        vhost=st.just("/"),
        name=NAMES,
        type=st.sampled_from(["direct", "topic", "headers", "x-other"]),
        auto_delete=st.booleans(),
        arguments=ARGUMENTS,
    ),
    *(
        st.builds(
            kind,
            vhost=st.just("/"),
            source=NAMES,
            kind=KINDS,
            destination=NAMES,
            routing_key=KEYS,
            arguments=ARGUMENTS,
        )
        for kind in (Bind, Unbind)
    ),
    st.builds(DeleteQueue, vhost=st.just("/"), name=NAMES),
    st.builds(DeleteExchange, vhost=st.just("/"), name=NAMES, if_unused=st.booleans()),
    st.builds(
        PutVhost,
        name=st.sampled_from(["v", ""]),
        default_queue_type=st.sampled_from(["", "delayed"]),
    ),
    st.builds(DeleteVhost, name=st.just("v")),
    st.builds(PutUser, name=st.sampled_from(["u", ""]), password_hash=st.sampled_from(["", "?"])),
    st.builds(
        PutPermission,
        user=st.sampled_from(["u", "guest"]),
        vhost=st.sampled_from(["/", "v"]),
        configure=st.sampled_from(["", "("]),
        write=st.just(""),
        read=st.just(""),
    ),
    st.builds(
        PutTopicPermission,
        user=st.just("guest"),
        vhost=st.just("/"),
        exchange=NAMES,
        write=st.sampled_from(["", "("]),
        read=st.just(""),
    ),
    st.builds(PutNode, id=st.sampled_from([1, 2, 999]), name=st.just("n"), incarnation=st.just(7)),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(COMMANDS, st.sampled_from(["old", "new", "unasked"])), max_size=40))
def test_any_log_makes_the_same_tree_under_two_releases(
    commands: list[tuple[Command, str]],
) -> None:
    log = Log()
    for command, proposer in commands:
        if proposer == "unasked":
            log.record(command)
        else:
            log.propose(command, larger=proposer == "new")
    old, new = log.replay(larger=False), log.replay(larger=True)
    assert old.snapshot() == new.snapshot() == log.machine.snapshot()
    assert [r.group for r in old.records()] == [r.group for r in new.records()]


def refusal(log: Log, command: Command) -> str:
    with pytest.raises(Refused) as caught:
        validated(command, log.machine)
    return caught.value.text


def test_what_is_malformed_is_refused_before_it_is_proposed() -> None:
    log = Log()
    odd = Table.of({"x-match": "most"}).encoded
    bind = Bind(vhost="/", source="amq.headers", kind="queue", destination="q", arguments=odd)
    # An end that is missing here too is named first, as ever.
    assert refusal(log, bind) == "no queue 'q' in vhost '/'"
    log.propose(quorum("q"))
    assert refusal(log, bind).startswith("Invalid x-match field value")
    topic = Bind(vhost="/", source="amq.topic", kind="queue", destination="q", routing_key="#.#.#")
    assert "uses 3 '#' wildcards" in refusal(log, topic)
    assert refusal(log, PutVhost(name="")) == "invalid vhost name"
    assert refusal(log, PutVhost(name="v", default_queue_type="x")) == "unsupported queue type 'x'"
    assert refusal(log, PutUser(name="u" * 256)) == "invalid user name"
    hashed = PutUser(name="u", password_hash="x", algorithm="md5")
    assert refusal(log, hashed) == "unsupported hashing algorithm 'md5'"
    assert refusal(log, PutNode(id=256, name="n", incarnation=1)) == "node id 256 is out of range"
    rules = {"vhost": "/", "configure": "(", "write": "", "read": ""}
    assert refusal(log, PutPermission(user="u", **rules)) == "user 'u' not found"
    assert refusal(log, PutPermission(user="guest", **rules)).startswith("invalid pattern '(': ")
    with pytest.raises(NotFound, match="vhost x not found"):
        validated(DeclareQueue(vhost="x", name="q", members=(1,)), log.machine)
    with pytest.raises(PreconditionFailed, match="beyond the end"):
        validated(DeclareQueue(vhost="/", name="n", members=(1,), arguments=b"\x05x"), log.machine)


def test_the_proposer_resolves_type_and_home() -> None:
    log = Log()
    checked = validated(DeclareQueue(vhost="/", name="c", members=(2, 1, 3)), log.machine)
    assert isinstance(checked, DeclareQueue)
    assert (checked.type, checked.members) == ("classic", (2,))
    checked = validated(quorum("q"), log.machine)
    assert isinstance(checked, DeclareQueue)
    assert (checked.type, checked.members) == ("quorum", (1, 2, 3))


def test_a_command_of_a_later_version_waits_until_it_is_in_force() -> None:
    log = Log()
    with mock.patch.object(validation, "FIRST_VERSIONS", {PutVhost: 2}):
        with pytest.raises(NotServed, match="version 2 of the metadata machine is needed"):
            validated(PutVhost(name="v"), log.machine)
        log.machine.version = 2
        validated(PutVhost(name="v"), log.machine)


@pytest.mark.parametrize(
    "kind", ["x-consistent-hash", "x-modulus-hash", "x-random", "x-local-random"]
)
def test_only_the_proposer_knows_the_types_that_choose(kind: str) -> None:
    """A release without these types records the same tree, and refuses by name to route there."""
    log = Log()
    log.record(DeclareExchange(vhost="/", name="x", type=kind))
    log.record(DeclareQueue(vhost="/", name="q", members=(1,), type="classic"))
    key = "1" if kind == "x-consistent-hash" else ""
    log.record(Bind(vhost="/", source="x", kind="queue", destination="q", routing_key=key))
    known = log.replay(larger=False)
    assert known.version == 1
    matcher_for = bindings.matcher_for

    def matcher_before(exchange: Exchange, vhost: str) -> Matcher:
        """What the release before has for a type that it does not know."""
        other = ExchangeType("x-other") if exchange.name == "x" else exchange.type
        return matcher_for(replace(exchange, type=other), vhost)

    with mock.patch.object(bindings, "matcher_for", matcher_before):
        older = log.replay(larger=False)
    assert older.snapshot() == known.snapshot()
    assert known.vhosts["/"].topology.exchange("x").type.is_served
    with pytest.raises(NotServed, match="exchanges of type 'x-other' are not served"):
        older.vhosts["/"].topology.route("x", "")


def test_types_of_later_releases_are_kept_as_they_are() -> None:
    log = Log()
    log.record(DeclareExchange(vhost="/", name="x", type="x-other"))
    log.record(DeclareQueue(vhost="/", name="d", members=(1,), type="delayed"))
    log.record(Bind(vhost="/", source="x", kind="queue", destination="d"))
    machine = log.replay(larger=False)
    record = machine.vhosts["/"].queues["d"]
    assert (record.type.value, record.type.is_served, record.placement) == (
        "delayed", False, PlacementKind.HOME
    )  # fmt: skip
    topology = machine.vhosts["/"].topology
    assert topology.exchange("x").type.value == "x-other"
    with pytest.raises(NotServed, match="exchanges of type 'x-other' are not served"):
        topology.route("x", "k")
    assert refusal(log, DeclareExchange(vhost="/", name="y", type="x-other")) == (
        "unknown exchange type 'x-other'"
    )
