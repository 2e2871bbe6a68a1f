"""Retention of topics in the replicated tree: settings, deleted partitions, expired groups, and
what a long history costs."""

from __future__ import annotations

import msgspec
import pytest

from convoymq.metadata.commands import ChangeGroup, CreateGroup, CreatePartition, DeleteTopic
from convoymq.metadata.machine import MetadataMachine, TopicRecord
from convoymq.metadata.topic_codec import pack_command, pack_state, unpack_state
from convoymq.metadata.topics import partition_arguments, partition_queue_name
from convoymq.model.errors import PreconditionFailed
from convoymq.topics.rules import changes, topic
from convoymq.topics.rules.changes import Phase, Seal
from convoymq.topics.rules.group import Expire, GroupCommand, Join, Leave, Seek
from convoymq.topics.rules.lineage import PartitionState, check_invariants
from convoymq.topics.rules.routes import Span
from tests.unit.metadata.test_machine import Tree
from tests.unit.metadata.test_topics import change, creation, partition
from tests.unit.metadata.test_topics import orders as orders
from tests.unit.metadata.test_topics import third as third
from tests.unit.metadata.test_topics import tree as tree

KEPT = {"max-age": "7D", "max-length-bytes": 5000, "stream-max-segment-size-bytes": 100}
CHANGES = 500
METADATA_MAX = 1_000_000


def move(tree: Tree, record: TopicRecord, pid: int) -> int:
    """Moves a partition, and returns its successor."""
    route, next_pid = record.state.route, record.state.next_pid
    change_id = f"move-{next_pid:016x}"
    planned = changes.plan_move(route, pid, next_pid, change_id)
    place = CreatePartition(
        vhost="/",
        topic="orders",
        pid=next_pid,
        partition=partition("orders", planned.targets[0], route.version + 1),
    )
    for step in (
        topic.Begin(planned),
        topic.TargetReady(change_id, 1, next_pid),
        topic.ToPhase(change_id, 1, Phase.TARGETS_READY),
        topic.ToPhase(change_id, 1, Phase.SEALING),
        topic.RecordSeal(change_id, pid, Seal(1_000_000 + pid, b"d" * 200)),
        topic.ToPhase(change_id, 1, Phase.SEALED),
        topic.Publish(change_id, 1_700_000_000_000 + pid),
        topic.TargetOpened(next_pid),
        topic.ToPhase(change_id, 1, Phase.DONE),
    ):
        assert tree.do(change(step)) == ""
        if isinstance(step, topic.Begin):
            tree.do(place)
    return next_pid


def of_group(command: GroupCommand, group: str = "g") -> ChangeGroup:
    return ChangeGroup(vhost="/", name="orders", group=group, command=pack_command(command))


def deleted(tree: Tree, record: TopicRecord, *pids: int) -> set[int]:
    """Has partitions retired and deleted, as far as may be; returns which are gone."""
    assert tree.do(change(topic.Retire())) == ""
    assert tree.do(change(topic.Delete(frozenset(pids)))) == ""
    lines = record.state.lineage.partitions
    gone = {pid for pid, each in lines.items() if each.state is PartitionState.DELETED}
    assert not any(partition_queue_name("orders", pid) in tree.queues() for pid in gone)
    return gone


# --- settings ------------------------------------------------------------------------------


def test_settings_are_kept_and_given_to_partitions(third: Tree) -> None:
    third.do(msgspec.structs.replace(creation(), settings={**KEPT, "group-ttl": "1h"}))
    record = third.machine.vhosts["/"].topics["orders"]
    assert record.settings == {**KEPT, "group-ttl": "1h"}
    restored = MetadataMachine()
    restored.restore(third.machine.snapshot())
    assert restored.vhosts["/"].topics["orders"] == record
    arguments = partition_arguments("orders", Span(0, 8, 2), 1, record.settings).to_plain()
    assert {name: arguments[f"x-{name}"] for name in KEPT} == KEPT
    assert "x-group-ttl" not in arguments


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max-length": 5}, '<<"max-length">> is not a setting of topics; there are: max-age'),
        ({"max-age": "soon"}, '<<"soon">> is not a valid max-age of a topic'),
        ({"max-age": 5}, "5 is not a valid max-age"),
        ({"group-ttl": "0s"}, '<<"0s">> is not a valid group-ttl'),
        ({"max-length-bytes": -1}, "-1 is not a valid max-length-bytes"),
    ],
)
def test_other_settings_are_refused(
    third: Tree, settings: dict[str, int | str], reason: str
) -> None:
    with pytest.raises(PreconditionFailed, match=reason):
        third.do(msgspec.structs.replace(creation(), settings=settings))


# --- partitions ----------------------------------------------------------------------------


def test_a_group_that_begins_in_retired_partitions_holds_them(
    third: Tree, orders: TopicRecord
) -> None:
    successor = move(third, orders, 0)
    third.do(change(topic.Retire()))
    assert orders.state.lineage.partition(0).state is PartitionState.RETIRED
    group = CreateGroup(vhost="/", name="orders", group="g", version=0, starts={0: -1, 1: -1})
    assert third.do(group) is True
    assert deleted(third, orders, 0) == set()
    assert third.do(of_group(Seek(1, 1, {successor: -1, 1: -1}))) is True
    assert deleted(third, orders, 0) == {0}
    assert orders.state.lineage.min_version == 1


def test_nobody_begins_in_what_is_deleted(third: Tree, orders: TopicRecord) -> None:
    successor = move(third, orders, 0)
    move(third, orders, 1)
    # The second range is older in time, and goes first.
    assert deleted(third, orders, 1) == {1}
    group = CreateGroup(vhost="/", name="orders", group="g", version=0, starts={0: -1, 1: -1})
    with pytest.raises(PreconditionFailed, match="cannot begin in a partition that is deleted"):
        third.do(group)
    assert third.do(msgspec.structs.replace(group, starts={0: -1})) is True
    assert third.do(of_group(Seek(1, 1, {successor: -1, 1: -1}))) is False
    assert deleted(third, orders, 0, 1) == {1}, "the group holds it"


def test_a_lost_partition_is_deleted_with_the_others(third: Tree, orders: TopicRecord) -> None:
    planned = changes.plan_move(orders.state.route, 0, 2, "c1")
    for step in (
        topic.Begin(planned),
        topic.TargetReady("c1", 1, 2),
        topic.ToPhase("c1", 1, Phase.TARGETS_READY),
        topic.ToPhase("c1", 1, Phase.SEALING),
        topic.GiveUp("c1", 0),
        topic.RecordSeal("c1", 0, Seal(None)),
        topic.ToPhase("c1", 1, Phase.SEALED),
        topic.Publish("c1", 5),
    ):
        assert third.do(change(step)) == ""
    assert deleted(third, orders, 0) == set(), "it is still asked for its end"
    assert orders.state.unknown_ends() == [0]
    assert third.do(change(topic.DeclareLost(0))) == ""
    assert deleted(third, orders, 0) == {0}


# --- groups --------------------------------------------------------------------------------


def test_an_expired_group_releases_its_hold_in_the_same_entry(
    third: Tree, orders: TopicRecord
) -> None:
    third.do(CreateGroup(vhost="/", name="orders", group="g", version=0))
    group = orders.groups["g"]
    created = group.idle_since_ms
    assert created > 0
    assert third.do(of_group(Join("m"))) is True
    assert third.do(of_group(Expire(created))) is False
    assert third.do(of_group(Leave("m"))) is True
    idle = group.idle_since_ms
    assert idle > created
    move(third, orders, 0)
    assert deleted(third, orders, 0) == set()
    assert third.do(of_group(Expire(idle))) is True
    assert orders.held_versions == []
    restored = MetadataMachine()
    restored.restore(third.machine.snapshot())
    assert restored.vhosts["/"].topics["orders"].groups["g"].expired
    assert deleted(third, orders, 0) == {0}
    assert orders.state.lineage.min_version == 0, "the group has a version, until it is gone"
    assert third.do(of_group(Join("m"))) is False


def test_an_expired_group_comes_back_while_its_messages_are_there(
    third: Tree, orders: TopicRecord
) -> None:
    third.do(CreateGroup(vhost="/", name="orders", group="g", version=0))
    move(third, orders, 0)
    assert third.do(of_group(Expire(orders.groups["g"].idle_since_ms))) is True
    third.do(change(topic.Retire()))
    assert third.do(of_group(Join("m"))) is True
    assert not orders.groups["g"].expired
    assert deleted(third, orders, 0) == set(), "it holds what was retired without it"


# --- costs ---------------------------------------------------------------------------------


def test_a_history_of_500_changes_is_small(third: Tree, orders: TopicRecord) -> None:
    """With every version described, and with all but the newest partitions deleted."""
    pid = 0
    for _ in range(CHANGES):
        pid = move(third, orders, pid)
    whole = len(pack_state(orders.state))
    assert whole < 100 * CHANGES
    assert len(third.machine.snapshot()) < METADATA_MAX
    assert len(deleted(third, orders, *range(pid))) == CHANGES
    assert orders.state.lineage.min_version == orders.state.route.version
    packed = pack_state(orders.state)
    assert len(packed) < 60 * CHANGES
    assert unpack_state(packed) == orders.state
    check_invariants(orders.state.lineage)
    assert third.do(DeleteTopic(vhost="/", name="orders")) is True
    assert third.queues() == []
