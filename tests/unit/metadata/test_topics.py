"""Ordered topics in the replicated tree: version 3 of its machine."""

from __future__ import annotations

import msgspec
import pytest

from convoymq.metadata.commands import (
    FIRST_VERSIONS,
    Bind,
    ChangeGroup,
    ChangeTopic,
    Command,
    CreateGroup,
    CreatePartition,
    CreateTopic,
    DeclareExchange,
    DeclareQueue,
    DeleteExchange,
    DeleteGroup,
    DeleteQueue,
    DeleteTopic,
    DeleteVhost,
    NewPartition,
    PutVhost,
    SetTopic,
)
from convoymq.metadata.machine import ChangeKind, MetadataMachine, TopicRecord
from convoymq.metadata.topic_codec import (
    pack_command,
    pack_state,
    unpack_group_command,
    unpack_state,
    unpack_topic_command,
)
from convoymq.metadata.topics import partition_arguments, partition_queue_name, topic_of_group
from convoymq.model.errors import (
    AccessRefused,
    NotFound,
    NotServed,
    PreconditionFailed,
    Refused,
    StorageFault,
    UnknownCommand,
)
from convoymq.topics.rules import changes, topic
from convoymq.topics.rules.changes import Phase, Seal
from convoymq.topics.rules.group import Grant, Join, Seek
from convoymq.topics.rules.hashing import MURMUR3_X86_32
from convoymq.topics.rules.lineage import Mode, PartitionState
from convoymq.topics.rules.lineage import check_invariants as check_lineage
from convoymq.topics.rules.refusals import BadTopic, Code
from convoymq.topics.rules.routes import Span, first_route
from tests.unit.metadata.test_machine import Tree
from tests.unit.metadata.test_machine import tree as tree


def partition(name: str, span: Span, version: int = 0) -> NewPartition:
    arguments = partition_arguments(name, span, version, {}).encoded
    return NewPartition(members=(1, 2, 3), arguments=arguments)


def creation(name: str = "orders", partitions: int = 2, vhost: str = "/") -> CreateTopic:
    return CreateTopic(
        vhost=vhost,
        name=name,
        logical=16,
        mode="strict",
        hash_id=MURMUR3_X86_32,
        partitions=tuple(partition(name, span) for span in first_route(16, partitions).spans),
    )


def change(command: topic.TopicCommand, **places: int) -> ChangeTopic:
    return ChangeTopic(vhost="/", name="orders", command=pack_command(command))


COMMANDS: tuple[Command, ...] = (
    creation(),
    DeleteTopic(vhost="/", name="orders"),
    SetTopic(vhost="/", name="orders", settings={"autoscale": "on", "autoscale-unit": None}),
    change(topic.Retire()),
    CreatePartition(vhost="/", topic="orders", pid=2, partition=partition("orders", Span(0, 8, 2))),
    CreateGroup(vhost="/", name="orders", group="g", version=0),
    DeleteGroup(vhost="/", name="orders", group="g"),
    ChangeGroup(vhost="/", name="orders", group="g", command=pack_command(Join("m"))),
)


@pytest.fixture
def third(tree: Tree) -> Tree:
    tree.machine.set_version(3)
    return tree


@pytest.fixture
def orders(third: Tree) -> TopicRecord:
    third.do(creation())
    return third.machine.vhosts["/"].topics["orders"]


def split(tree: Tree, record: TopicRecord, change_id: str = "c1") -> changes.Change:
    """Begins to split partition 0 of `orders`."""
    planned = changes.plan_split(record.state.route, 0, (4,), record.state.next_pid, change_id)
    assert tree.do(change(topic.Begin(planned))) == ""
    running = record.state.running
    assert running is not None
    return running


def publish(tree: Tree, record: TopicRecord, change_id: str = "c1") -> None:
    """Takes a split through its phases."""
    running = split(tree, record, change_id)
    for span in running.targets:
        place = CreatePartition(
            vhost="/", topic="orders", pid=span.pid, partition=partition("orders", span, 1)
        )
        assert tree.do(place)["created"] is True
        assert tree.do(change(topic.TargetReady(change_id, 1, span.pid))) == ""
    for step in (
        topic.ToPhase(change_id, 1, Phase.TARGETS_READY),
        topic.ToPhase(change_id, 1, Phase.SEALING),
        topic.RecordSeal(change_id, 0, Seal(7, b"d")),
        topic.ToPhase(change_id, 1, Phase.SEALED),
        topic.Publish(change_id, 99),
    ):
        assert tree.do(change(step)) == ""


def test_older_versions_refuse_them_by_name_and_their_snapshots_have_none(tree: Tree) -> None:
    tree.machine.set_version(2)
    assert {type(command) for command in COMMANDS} == {
        kind for kind, version in FIRST_VERSIONS.items() if version == 3
    }
    for command in COMMANDS:
        with pytest.raises(NotServed, match="version 3 of the metadata machine is needed, 2 is in"):
            tree.do(command)
    state = msgspec.msgpack.decode(tree.machine.snapshot())
    assert "topics" not in state
    tree.machine.set_version(3)
    later = msgspec.msgpack.decode(tree.machine.snapshot())
    assert later == {**state, "version": 3, "topics": []}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: type(each).__name__)
def test_a_log_of_an_older_version_with_one_of_them_stops_the_replica(
    tree: Tree, command: Command
) -> None:
    tree.machine.set_version(2)
    with pytest.raises(UnknownCommand):
        tree.record(command)


def test_settings_of_the_autoscaler_are_replaced_and_outlive_a_snapshot(third: Tree) -> None:
    third.do(creation())
    third.machine.changes.clear()
    command = SetTopic(vhost="/", name="orders", settings={"autoscale": "on", "group-ttl": None})
    with pytest.raises(PreconditionFailed, match="is not a setting of the autoscaler"):
        third.do(command)
    command = SetTopic(vhost="/", name="orders", settings={"autoscale": "on"})
    assert third.do(command) is True
    assert third.do(command) is False
    assert [each.kind for each in third.machine.changes] == [ChangeKind.TOPIC]
    third.machine.restore(third.machine.snapshot())
    record = third.machine.vhosts["/"].topics["orders"]
    assert record.settings["autoscale"] == "on"
    third.do(SetTopic(vhost="/", name="orders", settings={"autoscale": None}))
    assert "autoscale" not in third.machine.vhosts["/"].topics["orders"].settings
    with pytest.raises(NotFound):
        third.do(SetTopic(vhost="/", name="others", settings={"autoscale": None}))


def test_a_topic_comes_with_its_exchange_and_its_partitions(third: Tree) -> None:
    third.machine.changes.clear()
    assert third.do(creation()) is True
    place = third.machine.vhosts["/"]
    record = place.topics["orders"]
    assert (record.logical, record.mode, record.state.route.pids) == (16, "strict", (0, 1))
    assert record.state.lineage.published[0].published_at == record.created_ms > 0
    assert third.queues() == ["amq.partition.orders.0", "amq.partition.orders.1"]
    queue = place.topology.queue("amq.partition.orders.1")
    assert (queue.type.value, queue.durable) == ("partition", True)
    assert queue.arguments.to_plain() == {
        "x-queue-type": "partition",
        "x-partition-topic": "orders",
        "x-partition-pid": 1,
        "x-partition-lo": 8,
        "x-partition-hi": 16,
        "x-partition-version": 0,
    }
    exchange = place.topology.exchange("orders")
    assert (exchange.type.value, exchange.durable) == ("x-ordered", True)
    kinds = [each.kind for each in third.machine.changes]
    assert kinds == [ChangeKind.QUEUE_CREATED, ChangeKind.QUEUE_CREATED, ChangeKind.TOPIC]
    assert (third.machine.changes[-1].vhost, third.machine.changes[-1].topic) == ("/", "orders")


def test_a_name_is_a_topic_or_a_queue_or_an_exchange(third: Tree) -> None:
    third.do(DeclareQueue(vhost="/", name="queue", members=(1,)))
    third.do(DeclareExchange(vhost="/", name="exchange", type="direct", durable=True))
    third.do(DeclareQueue(vhost="/", name="shop/group", members=(1,)))
    third.do(creation())
    for name, reason in (
        ("orders", "topic 'orders' in vhost '/' exists"),
        ("queue", "there is a queue of that name"),
        ("exchange", "there is an exchange of that name"),
        ("shop", "queue 'shop/group' is named like a group of it"),
    ):
        with pytest.raises(PreconditionFailed, match=reason):
            third.do(creation(name))
    for name, reason in (
        ("orders", "topic 'orders' in vhost '/' exists: a queue cannot have its name"),
        ("orders/g", "'orders/g' names a group of topic 'orders'"),
    ):
        with pytest.raises(PreconditionFailed, match=reason):
            third.do(DeclareQueue(vhost="/", name=name, members=(1,)))
    with pytest.raises(NotFound, match="vhost x not found"):
        third.do(creation(vhost="x"))
    place = third.machine.vhosts["/"]
    assert topic_of_group(place, "orders/g") == (place.topics["orders"], "g")
    for other in ("orders", "orders/", "other/g", "shop/group"):
        assert topic_of_group(place, other) is None


@pytest.mark.parametrize(
    ("changed", "kind", "reason"),
    [
        ({"name": ""}, PreconditionFailed, "1 to 200 bytes"),
        ({"name": "x" * 201}, PreconditionFailed, "1 to 200 bytes"),
        ({"name": "amq.x"}, PreconditionFailed, "reserved prefix"),
        ({"logical": 1}, BadTopic, "1 logical partitions has 1 to 1 partitions, not 2"),
        ({"logical": 70_000}, BadTopic, "1 to 65536 logical partitions"),
        ({"partitions": ()}, BadTopic, "not 0"),
        ({"hash_id": 9}, BadTopic, "hash 9 is not known"),
        ({"mode": "loose"}, NotServed, "mode 'loose' are not served"),
    ],
)
def test_a_topic_that_is_none_is_not_proposed(
    third: Tree, changed: dict[str, object], kind: type[Refused], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        third.do(msgspec.structs.replace(creation(), **changed))
    assert third.queues() == []


def test_what_belongs_to_a_topic_is_left_alone_by_clients(third: Tree, orders: TopicRecord) -> None:
    name = partition_queue_name("orders", 0)
    bind = Bind(vhost="/", source="amq.fanout", kind="queue", destination=name)
    for command, reason in (
        (DeleteQueue(vhost="/", name=name), "is a partition: it goes with its topic"),
        (DeleteExchange(vhost="/", name="orders"), "it is deleted with the topic"),
        (bind, "is a partition of a topic: publish to the topic"),
        (
            msgspec.structs.replace(
                bind, source="orders", kind="exchange", destination="amq.topic"
            ),
            "it is not bound",
        ),
    ):
        with pytest.raises(AccessRefused, match=reason):
            third.do(command)
    with pytest.raises(PreconditionFailed, match="an exchange of type 'x-ordered' comes with its"):
        third.do(DeclareExchange(vhost="/", name="other", type="x-ordered", durable=True))
    third.do(DeclareExchange(vhost="/", name="orders", type="x-ordered", durable=True))


@pytest.mark.parametrize("how", ["topic", "vhost"])
def test_partitions_and_exchange_go_with_the_topic(third: Tree, how: str) -> None:
    third.do(PutVhost(name="v"))
    third.do(creation(vhost="v"))
    third.do(creation())
    third.machine.changes.clear()
    if how == "topic":
        assert third.do(DeleteTopic(vhost="v", name="orders")) is True
        assert third.do(DeleteTopic(vhost="v", name="orders")) is False
        place = third.machine.vhosts["v"]
        assert (place.topics, place.queues) == ({}, {})
        assert place.topology.find_exchange("orders") is None
        third.do(creation(vhost="v"))
    else:
        third.do(DeleteVhost(name="v"))
    told = [each.vhost for each in third.machine.changes if each.kind is ChangeKind.TOPIC]
    assert told[0] == "v"
    assert third.queues() == ["amq.partition.orders.0", "amq.partition.orders.1"]


def test_a_change_goes_through_its_phases_by_commands(third: Tree, orders: TopicRecord) -> None:
    publish(third, orders)
    assert orders.state.route.pids == (2, 3, 1)
    assert third.do(change(topic.TargetOpened(2))) == ""
    assert third.do(change(topic.TargetOpened(3))) == ""
    assert third.do(change(topic.ToPhase("c1", 1, Phase.DONE))) == ""
    assert orders.state.running is None
    # The sealed partition stays: groups have to finish it.
    assert third.queues() == [partition_queue_name("orders", pid) for pid in range(4)]
    arguments = third.machine.vhosts["/"].topology.queue("amq.partition.orders.3").arguments
    assert arguments.to_plain()["x-partition-version"] == 1


def test_refusals_are_codes_and_change_nothing(third: Tree, orders: TopicRecord) -> None:
    split(third, orders)
    before = third.machine.snapshot()
    other = changes.plan_move(orders.state.route, 1, 9, "c2")
    third.machine.changes.clear()
    for command, code in (
        (topic.Begin(other), Code.CHANGE_RUNNING),
        (topic.Publish("c1", 5), Code.CHANGE_PHASE),
        (topic.TargetReady("c1", 1, 77), Code.UNKNOWN_PARTITION),
        (topic.Abort("other"), Code.CHANGE_PHASE),
    ):
        assert third.do(change(command)) == code.value
    assert third.machine.changes == []
    later, former = (msgspec.msgpack.decode(each) for each in (third.machine.snapshot(), before))
    assert later["topics"] == former["topics"]
    with pytest.raises(NotFound, match="no topic 'none' in vhost '/'"):
        third.do(msgspec.structs.replace(change(topic.Retire()), name="none"))
    with pytest.raises(PreconditionFailed, match="not a command of a topic of this release"):
        third.do(msgspec.structs.replace(change(topic.Retire()), command=b"\x01"))


def test_a_number_is_not_given_to_two_changes(third: Tree, orders: TopicRecord) -> None:
    late = changes.plan_move(orders.state.route, 1, orders.state.next_pid, "late")
    split(third, orders)
    assert third.do(change(topic.Abort("c1"))) == ""
    assert third.do(change(topic.Begin(late))) == Code.VERSION_CONFLICT.value


def test_a_repeated_begin_keeps_the_wanted_nodes(third: Tree, orders: TopicRecord) -> None:
    planned = changes.plan_move(orders.state.route, 1, 2, "c1")
    begin = msgspec.structs.replace(change(topic.Begin(planned)), places={2: 3})
    assert third.do(begin) == ""
    assert third.do(msgspec.structs.replace(begin, places={2: 1})) == ""
    assert orders.places == {2: 3}


def test_queues_of_targets_exist_while_their_change_wants_them(
    third: Tree, orders: TopicRecord
) -> None:
    place = CreatePartition(
        vhost="/", topic="orders", pid=2, partition=partition("orders", Span(0, 4, 2), 1)
    )
    with pytest.raises(
        PreconditionFailed, match="partition 2 of topic 'orders' in vhost '/' is no"
    ):
        third.do(place)
    split(third, orders)
    first = third.do(place)
    assert first["created"] is True
    assert third.do(place) == {**first, "created": False}
    # Its server is dead: another one takes its place.
    assert third.do(change(topic.ReplaceTarget("c1", 1, 2))) == ""
    assert partition_queue_name("orders", 2) not in third.queues()
    third.do(msgspec.structs.replace(place, pid=4))
    assert partition_queue_name("orders", 4) in third.queues()
    assert third.do(change(topic.Abort("c1"))) == ""
    assert third.queues() == ["amq.partition.orders.0", "amq.partition.orders.1"]


def test_a_deleted_partition_loses_its_queue(third: Tree, orders: TopicRecord) -> None:
    publish(third, orders)
    assert third.do(change(topic.Retire())) == ""
    assert partition_queue_name("orders", 0) in third.queues()
    assert third.do(change(topic.Delete(frozenset((0,))))) == ""
    assert partition_queue_name("orders", 0) not in third.queues()
    assert orders.state.lineage.partition(0).state is PartitionState.DELETED


def test_groups_hold_partitions_back(third: Tree, orders: TopicRecord) -> None:
    group = CreateGroup(vhost="/", name="orders", group="g", version=0, starts={0: -1}, mode="dag")
    assert third.do(group) is True
    assert third.do(msgspec.structs.replace(group, version=5)) is False
    assert (orders.groups["g"].mode, orders.groups["g"].starts) == (Mode.DAG, {0: -1})
    with pytest.raises(PreconditionFailed, match="begins at version 0 to 0, not 1"):
        third.do(msgspec.structs.replace(group, group="h", version=1))
    for changed in ({"group": ""}, {"group": "a/b"}, {"group": "x" * 55}, {"mode": "both"}):
        with pytest.raises(PreconditionFailed, match="a group"):
            third.do(msgspec.structs.replace(group, **changed))
    publish(third, orders)
    third.do(change(topic.Retire()))
    assert orders.state.lineage.partition(0).state is PartitionState.SEALED
    delete = DeleteGroup(vhost="/", name="orders", group="g")
    assert third.do(delete) is True
    assert third.do(delete) is False
    third.do(change(topic.Retire()))
    assert orders.state.lineage.partition(0).state is PartitionState.RETIRED


def test_commands_of_groups_say_whether_they_were_in_time(third: Tree, orders: TopicRecord) -> None:
    third.do(CreateGroup(vhost="/", name="orders", group="g", version=0))

    def do(command: Join | Grant | Seek, group: str = "g") -> object:
        return third.do(
            ChangeGroup(vhost="/", name="orders", group=group, command=pack_command(command))
        )

    third.machine.changes.clear()
    assert do(Join("m")) is True
    assert do(Grant(0, "m", 1, 0)) is True
    assert [each.topic for each in third.machine.changes] == ["orders", "orders"]
    assert do(Grant(0, "m", 1, 0)) is False
    assert do(Seek(1, 3, {})) is False
    assert len(third.machine.changes) == 2
    with pytest.raises(NotFound, match="no group 'h' of topic 'orders'"):
        do(Join("m"), "h")


def test_a_snapshot_brings_topics_and_groups_back(third: Tree, orders: TopicRecord) -> None:
    third.do(CreateGroup(vhost="/", name="orders", group="g", version=0, starts={1: 5}))
    publish(third, orders)
    planned = changes.plan_merge(orders.state.route, (3, 1), orders.state.next_pid, "c2")
    for step in (
        topic.TargetOpened(2),
        topic.TargetOpened(3),
        topic.ToPhase("c1", 1, Phase.DONE),
        topic.Begin(planned),
        topic.TargetReady("c2", 1, 4),
    ):
        assert third.do(change(step)) == ""
    packed = third.machine.snapshot()
    restored = MetadataMachine()
    restored.restore(packed)
    assert restored.snapshot() == packed
    restored.check_invariants()
    check_lineage(orders.state.lineage)
    found = restored.vhosts["/"].topics["orders"]
    assert found == orders
    assert found.state.lineage.sources(0) == (0,)
    assert restored.state_hash() == third.machine.state_hash()


def test_states_pack_in_one_way_whatever_made_them() -> None:
    state = topic.TopicState.first(first_route(16, 3))
    state.left_out |= {2, 0}
    state.sealed_early[2] = Seal(4, b"x")
    state.sealed_early[0] = Seal(None)
    state.lost = {1: topic.DeclareLost(1, 5, 9, {"g": topic.LeftBehind(1, 4, 0)})}
    other = unpack_state(pack_state(state))
    assert other == state
    other.sealed_early = dict(reversed(other.sealed_early.items()))
    assert pack_state(other) == pack_state(state)
    for broken in (b"\xc1", msgspec.msgpack.encode([9, 1]), pack_state(state)[:-1]):
        with pytest.raises(StorageFault):
            unpack_state(broken)
    future = msgspec.msgpack.decode(pack_state(state))
    with pytest.raises(StorageFault, match="format 2, known is 1"):
        unpack_state(msgspec.msgpack.encode([2, *future[1:]]))


def test_commands_come_back_and_unknown_ones_are_refused() -> None:
    planned = changes.plan_split(first_route(16, 2), 0, (4,), 2, "c")
    begin = topic.Begin(planned)
    assert unpack_topic_command(pack_command(begin)) == begin
    seek = Seek(1, 0, {0: -2})
    assert unpack_group_command(pack_command(seek)) == seek
    for broken in (
        pack_command(seek),
        b"",
        msgspec.msgpack.encode(["Abort", {"change_id": "c", "why": 1}]),
        msgspec.msgpack.encode(["Abort", {"change_id": 5}]),
        msgspec.msgpack.encode(["Abort", {}]),
    ):
        with pytest.raises(UnknownCommand):
            unpack_topic_command(broken)
