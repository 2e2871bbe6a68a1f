"""A node's replicated queues follow the tree, without an event loop."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.broker.local_queues import SLICE_QUEUES, LocalQueues
from convoymq.kernels.batch import CommandBuilder
from convoymq.metadata.machine import (
    Change,
    ChangeKind,
    MetadataMachine,
    NodeRecord,
    QueueRecord,
    Vhost,
)
from convoymq.model.tables import EMPTY, Table
from convoymq.queues.null_events import NullEvents
from convoymq.queues.placement import Placement, placed
from convoymq.queues.quorum.driver import machine_settings
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.queue import QuorumQueue
from convoymq.queues.stream.driver import stream_settings
from convoymq.routing.policies import Policies, Policy
from convoymq.routing.topology import Topology
from convoymq.routing.types import Queue, QueueType

NODE = 1


class Host:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.machines: dict[int, Any] = {}
        self.leaders: dict[int, int] = {}

    def create_group(self, group: int, members: Any, machine: Any, sink: Any, **how: Any) -> None:
        self.machines[group] = machine
        self.calls.append(("create", group, members, how["learner"], how["wiped"]))

    def newest_of(self, kind: str, nodes: Any) -> int:
        return 1

    def await_room(self, node: int, item: Any) -> None:
        self.calls.append(("await_room", node))

    def watch_group(self, group: int, members: Any, sink: Any) -> None:
        self.calls.append(("watch", group, members))

    def unwatch_group(self, group: int) -> None:
        self.calls.append(("unwatch", group))

    def leave_group(self, group: int, members: Any) -> None:
        self.calls.append(("leave", group, members))

    def remove_group(self, group: int) -> None:
        self.calls.append(("remove", group))

    def builder_of(self, group: int) -> CommandBuilder:
        return CommandBuilder()

    def replica(self, group: int) -> Any:
        return None

    def leader_of(self, group: int) -> int | None:
        return self.leaders.get(group)


class World:
    def __init__(self, **options: Any) -> None:
        self.tree = MetadataMachine()
        self.tree.vhosts["/"] = Vhost("/", Topology("/"))
        self.host = Host()
        unused: Any = None
        self.local = LocalQueues(
            node=NODE,
            host=self.host,  # type: ignore[arg-type]
            tree=self.tree,
            transport=unused,
            incarnations={},
            new_session=lambda: 1,
            **{"clock": unused, **options},
        )
        # Of all queues, as if this node had a handle of each.
        self.placement = Placement(
            NODE, self.tree, lambda record: self.host.leader_of(record.group)
        )

    def put(self, name: str, group: int, *members: int, joined: tuple[int, ...] = ()) -> None:
        vhost = self.tree.vhosts["/"]
        known = vhost.queues.get(name)
        if known is None:
            arguments = Table.of({"x-queue-type": "quorum", "x-delivery-limit": 3})
            vhost.topology.declare_queue(name, QueueType.QUORUM, durable=True, arguments=arguments)
        vhost.queues[name] = record = QueueRecord(
            vhost="/",
            name=name,
            group=group,
            type=QueueType.QUORUM,
            durable=True,
            members=members,
            owner=None,
            created_ms=0,
            joined=joined,
        )
        self.tree.queue_index.put(record)
        self.tree.next_group = max(self.tree.next_group, group + 1)
        kind = ChangeKind.QUEUE_CREATED if known is None else ChangeKind.QUEUE_MEMBERS
        assert self.local.on_change(Change(kind, record, vhost="/"))

    def delete(self, name: str) -> None:
        vhost = self.tree.vhosts["/"]
        vhost.topology.delete_queue(name)
        record = vhost.queues.pop(name)
        self.tree.queue_index.drop(record)
        assert self.local.on_change(Change(ChangeKind.QUEUE_DELETED, record, vhost="/"))

    def reconciled(self) -> list[tuple[Any, ...]]:
        self.local.reconcile()
        calls, self.host.calls = self.host.calls, []
        return calls


def test_thousands_of_queues_are_opened_some_at_a_time() -> None:
    world = World()
    count = 2 * SLICE_QUEUES + 5
    for number in range(1, count + 1):
        world.put(f"q{number}", number, 1, 2)
    opened = []
    for left in (True, True, False):
        assert world.local.reconcile() is left
        calls, world.host.calls = world.host.calls, []
        assert len(calls) <= SLICE_QUEUES
        opened += [call[1] for call in calls]
    assert opened == list(range(1, count + 1))
    assert world.reconciled() == []


def test_what_changes_while_queues_wait_for_their_turn_is_seen_to() -> None:
    world = World()
    count = 2 * SLICE_QUEUES
    for number in range(1, count + 1):
        world.put(f"q{number}", number, 1, 2)
    assert world.local.reconcile()
    world.host.calls.clear()
    world.delete("q1")
    world.delete(f"q{count}")
    world.put("late", count + 1, 1)
    while world.local.reconcile():
        pass
    assert [call[:2] for call in world.host.calls] == [
        *(("create", number) for number in range(SLICE_QUEUES + 1, count)),
        ("remove", 1),
        ("create", count + 1),
    ]
    world.local.on_change(Change(ChangeKind.RESTORED))
    while world.local.reconcile():
        pass
    assert set(world.local.queues) == set(world.tree.queue_index.by_group)


def test_a_queue_is_opened_left_and_ended() -> None:
    world = World()
    world.put("q", 1, 1, 2)
    assert world.reconciled() == [("create", 1, (1, 2), False, False)]
    assert isinstance(world.host.machines[1], QuorumMachine)
    world.put("q", 1, 2, 3)
    assert world.reconciled() == [("leave", 1, (2, 3))]
    world.put("q", 1, 2, 1, joined=(1,))
    assert world.reconciled() == [("create", 1, (2, 1), True, False)]
    world.delete("q")
    assert world.reconciled() == [("remove", 1)]
    assert not world.local.queues
    assert not world.local.member_of


def test_a_look_up_opens_no_replica() -> None:
    world = World()
    world.put("q", 1, 1, 2)
    record = world.tree.vhosts["/"].queues["q"]
    assert world.local.find(record) is None
    assert world.local.may_open(record)
    assert world.host.calls == []
    world.local.open_new(Change(ChangeKind.QUEUE_CREATED, record, vhost="/"))
    assert world.local.find(record) is world.local.queues[1]
    assert world.reconciled() == [("create", 1, (1, 2), False, False)]


def test_a_look_up_makes_a_handle_of_a_queue_elsewhere() -> None:
    world = World()
    world.put("q", 1, 2, 3)
    record = world.tree.vhosts["/"].queues["q"]
    world.local.open_new(Change(ChangeKind.QUEUE_CREATED, record, vhost="/"))
    assert world.reconciled() == []
    assert world.local.find(record) is world.local.find(record)
    assert world.reconciled() == [("watch", 1, (2, 3))]


def test_a_queue_that_is_gone_with_the_batch_that_made_it_is_not_opened() -> None:
    world = World()
    world.put("q", 1, 1)
    record = world.tree.vhosts["/"].queues["q"]
    world.delete("q")
    world.local.open_new(Change(ChangeKind.QUEUE_CREATED, record, vhost="/"))
    assert world.host.calls == []


def test_a_restored_tree_has_its_queues_opened_at_once() -> None:
    world = World()
    world.put("a", 1, 1)
    world.put("b", 2, 2)
    world.local.open_new(Change(ChangeKind.RESTORED))
    assert world.host.calls == [("create", 1, (1,), False, False)]


def test_nothing_is_opened_by_a_tree_that_is_being_rebuilt() -> None:
    world = World()
    world.tree.applied_index = 5
    world.reconciled()
    world.tree.applied_index = 2
    world.put("q", 1, 1)
    record = world.tree.vhosts["/"].queues["q"]
    world.local.open_new(Change(ChangeKind.QUEUE_CREATED, record, vhost="/"))
    assert world.host.calls == []
    assert world.local.may_open(record)


def test_a_queue_elsewhere_is_watched() -> None:
    world = World()
    world.put("q", 1, 2, 3)
    assert world.reconciled() == []
    world.local.open(world.tree.vhosts["/"].queues["q"])
    assert world.reconciled() == [("watch", 1, (2, 3))]
    world.delete("q")
    assert world.reconciled() == [("unwatch", 1)]


def test_data_of_deleted_queues_is_removed_and_of_unknown_ones_kept() -> None:
    """Number 7 was not given out as far as this node has applied: its queue may come yet."""
    world = World(stored_groups=lambda: [0, 1, 2, 7])
    world.put("q", 2, 1)
    assert world.reconciled() == [("remove", 1), ("create", 2, (1,), False, False)]


@pytest.mark.parametrize(("stored", "wiped"), [((), True), ((2,), False)])
def test_a_lost_disk_is_told_of(stored: tuple[int, ...], wiped: bool) -> None:
    world = World(stored_groups=lambda: stored, lost_groups=2)
    world.put("q", 2, 1, joined=(1,))
    assert world.reconciled() == [("create", 2, (1,), not wiped, wiped)]


class Counted(dict[int, object]):
    """Groups on a disk, with the number of them that were looked at one after the other."""

    walked = 0

    def __iter__(self) -> Iterator[int]:
        self.walked += len(self)
        return super().__iter__()


def test_a_node_that_joined_opens_its_queues_in_linear_time() -> None:
    """Whether a group is on the disk was asked of a list of all groups, for each of them."""
    count = 400
    stored = Counted.fromkeys(range(1, count + 1))
    world = World(stored_groups=lambda: stored, lost_groups=count)
    for group in range(1, count + 1):
        world.put(f"q{group}", group, 1)
    while world.local.reconcile():
        pass
    assert len(world.host.calls) == count
    assert stored.walked <= 10 * count


def test_a_restored_tree_has_everything_looked_at() -> None:
    world = World()
    world.put("q", 1, 1)
    world.reconciled()
    world.tree.queue_index.drop(world.tree.vhosts["/"].queues.pop("q"))
    assert world.local.on_change(Change(ChangeKind.RESTORED))
    assert not world.local.reconcile()
    assert world.host.calls == [("remove", 1)]


def test_a_tree_that_is_being_rebuilt_ends_nothing() -> None:
    """The log of the tree was damaged here: it comes again from its beginning."""
    world = World()
    world.put("q", 1, 2, 1)
    world.tree.applied_index = 5
    world.reconciled()
    record = world.tree.vhosts["/"].queues.pop("q")
    world.tree.queue_index.drop(record)
    world.tree.applied_index = 0
    assert world.local.on_change(Change(ChangeKind.RESTORED))
    assert world.reconciled() == []
    world.tree.applied_index = 2
    world.put("q", 1, 2, 3)
    assert world.reconciled() == []
    world.tree.queue_index.drop(world.tree.vhosts["/"].queues["q"])
    world.tree.vhosts["/"].queues["q"] = record
    world.tree.queue_index.put(record)
    world.tree.applied_index = 5
    assert world.reconciled() == []
    world.tree.applied_index = 6
    world.delete("q")
    assert world.reconciled() == [("remove", 1)]


def test_changes_of_nodes_need_no_look() -> None:
    assert not World().local.on_change(Change(ChangeKind.NODE, node=2))


def test_a_change_of_policies_reaches_every_queue_of_the_virtual_host_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(QuorumQueue, "configure", lambda queue, s: told.update({queue.name: s}))
    world = World()
    count = SLICE_QUEUES + 5
    for number in range(1, count + 1):
        world.put(f"q{number}", number, 1, 2)
    world.put("other", count + 1, 1, 2)
    while world.local.reconcile():
        pass
    assert told == {name: {"delivery-limit": 3} for name in (*told,)}
    assert len(told) == count + 1
    world.reconciled()
    told.clear()
    policies = world.tree.vhosts["/"].policies
    policies.put(Policy(name="p", pattern="^q", definition={"max-in-memory-length": 7}))
    assert world.local.on_change(Change(ChangeKind.POLICIES, vhost="/"))
    assert world.local.reconcile() is True
    assert len(told) == SLICE_QUEUES
    assert world.local.reconcile() is False
    assert told.pop("other") == {"delivery-limit": 3}
    both = {"delivery-limit": 3, "max-in-memory-length": 7}
    assert told == {f"q{number}": both for number in range(1, count + 1)}
    assert world.host.calls == []
    world.local.on_change(Change(ChangeKind.POLICIES, vhost="gone meanwhile"))
    assert world.reconciled() == []


def test_a_policy_says_where_a_new_queue_is_led() -> None:
    world = World()
    for node in (1, 2, 3):
        world.tree.nodes[node] = NodeRecord(id=node, name=f"n{node}", incarnation=1, machine=node)
    world.put("q1", 1, 1)
    policies = Policies()
    declared = Queue(
        name="q",
        type=QueueType.QUORUM,
        arguments=Table.of({"x-queue-type": "quorum", "x-queue-leader-locator": "client-local"}),
    )
    assert world.placement.members_for(placed(declared, policies), (1, 2, 3))[0] == 1
    policies.put(Policy(name="p", pattern="", definition={"queue-leader-locator": "balanced"}))
    assert world.placement.members_for(placed(declared, policies), (1, 2, 3))[0] != 1
    stream = Queue(name="s", type=QueueType.STREAM, arguments=Table.of({"x-queue-type": "stream"}))
    assert len(world.placement.members_for(placed(stream, policies), (1, 2, 3))) == 3
    policies.put(
        Policy(name="p", pattern="", definition={"initial-cluster-size": 1}, apply_to="streams")
    )
    assert world.placement.members_for(placed(stream, policies), (1, 2, 3)) == (1,)


def test_settings_come_from_the_declaration() -> None:
    declared = Table.of({"x-delivery-limit": 3, "x-single-active-consumer": True})
    assert machine_settings(declared) == {"delivery_limit": 3, "single_active": True}
    assert machine_settings(EMPTY) == {}
    at_once = Table.of({"x-single-active-take-over": "immediate"})
    assert machine_settings(at_once) == {"single_active_strict": False}
    assert machine_settings(Table.of({"x-single-active-take-over": "strict"})) == {}
    assert stream_settings(Table.of({"x-max-length-bytes": 5, "x-max-age": "1h"})) == {
        "max_bytes": 5,
        "max_age_ms": 3_600_000,
    }


def test_balanced_does_not_count_for_every_declaration() -> None:
    world = World()
    asked: list[int] = []
    world.host.leader_of = lambda group: asked.append(group)  # type: ignore[method-assign,func-returns-value]
    for number in range(1, 641):
        world.put(f"q{number}", number, 1, 2)
    balanced = Table.of({"x-queue-type": "quorum", "x-queue-leader-locator": "balanced"})
    for node in (1, 2, 3):
        world.tree.nodes[node] = NodeRecord(id=node, name=f"n{node}", incarnation=1, machine=node)
    for _ in range(11):
        world.placement.members_for(balanced, [1, 2, 3])
    assert len(asked) <= 640
    # What was placed meanwhile counts.
    chosen = [world.placement.members_for(balanced, [1, 2, 3])[0] for _ in range(6)]
    assert sorted(chosen) == [2, 2, 2, 3, 3, 3]


def test_balanced_counts_who_leads_now() -> None:
    world = World()
    for node in (1, 2, 3):
        world.tree.nodes[node] = NodeRecord(id=node, name=f"n{node}", incarnation=1, machine=node)
    balanced = Table.of({"x-queue-type": "quorum", "x-queue-leader-locator": "balanced"})
    world.put("a", 1, 1, 2, 3)
    world.put("b", 2, 2, 3, 1)
    assert world.placement.members_for(balanced, [1, 2, 3])[0] == 3
    # Leaders have moved since: node 2 has none, though it was to lead a queue.
    world.host.leaders = {1: 3, 2: 1}
    assert world.placement.members_for(balanced, [1, 2, 3])[0] == 2
    plain = Table.of({"x-queue-type": "quorum"})
    assert world.placement.members_for(plain, [1, 2, 3])[0] == NODE


def test_only_queues_with_clients_are_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of queues that nobody uses cost a tick nothing."""
    world = World(clock=SimpleNamespace(monotonic_ms=lambda: 0))
    for group, name in enumerate(("used", "idle", "gone"), start=1):
        world.put(name, group, 1)
    world.reconciled()
    ticked: list[str] = []
    for queue in world.local.queues.values():
        monkeypatch.setattr(queue, "tick", lambda name=queue.name: ticked.append(name))
    used, gone = world.local.queues[1], world.local.queues[3]
    client = used.client(11, NullEvents())
    gone.client(12, NullEvents())
    world.local.tick()
    assert ticked == ["used", "gone"]
    world.delete("gone")
    world.reconciled()
    world.local.tick()
    assert ticked == ["used", "gone", "used"]
    used.forget(client)
    world.local.tick()
    assert ticked == ["used", "gone", "used"]
    used.client(13, NullEvents())
    world.local.tick()
    assert ticked == ["used", "gone", "used", "used"]
