"""The membership manager: what it records and whom it replaces, without an event loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.kernels.batch import CommandBuilder, command_body, commands
from convoymq.metadata.commands import (
    Command,
    DeclareQueue,
    ForgetNode,
    Join,
    PutNode,
    PutVhost,
    RecordRecovery,
    decode_command,
)
from convoymq.metadata.machine import MetadataMachine, QueueRecord
from convoymq.metadata.members import SHORT_TICKS, TICKS_SETTLED, MembershipManager, config_of
from convoymq.metadata.snapshot import ZONES_VERSION
from convoymq.metadata.store import MetadataStore
from convoymq.model.errors import EntryGone, NotFound, PreconditionFailed, Unavailable
from convoymq.model.tables import Table
from convoymq.replication.raft.membership import Membership

SESSION = 1 << 56 | 7 << 24


class Log:
    snapshot_term = 4

    def term_at(self, index: int) -> int:
        if index < 10:
            raise EntryGone("in a snapshot")
        return 5


class Replica:
    is_leader = True

    def __init__(self, *voters: int) -> None:
        self.log = Log()
        self.core = SimpleNamespace(
            members=Membership(frozenset(voters)),
            members_index=0,
            commit_index=0,
            changes=SimpleNamespace(rejoining={}),
        )

    def becomes(self, *voters: int, index: int) -> None:
        self.core.members = Membership(frozenset(voters))
        self.core.members_index = self.core.commit_index = index


class World:
    """Node 1 of a cluster with one queue, whose group it leads."""

    node_id = 1

    def __init__(self) -> None:
        self.groups: dict[int, Replica] = {0: Replica(1, 2, 3), 1: Replica(1, 2, 3)}
        self.on_membership_changed: Any = None
        self.replaced: list[tuple[int, int, int]] = []
        self.added: list[tuple[int, int]] = []
        self.refused: set[int] = set()
        self.up = {1, 2, 3, 4}
        self.host = self
        self.forgotten: set[int] = set()
        self.links: Any = self
        clock: Any = SimpleNamespace(monotonic_ms=lambda: 0, call_later=lambda *later: None)
        self.builder = CommandBuilder()
        self.index = 0
        self.metadata = MetadataStore(MetadataMachine(), self.builder, SESSION, clock)
        self.asked: list[Command] = []
        self.do(PutVhost(name="/"))
        for node in (1, 2, 3, 4):
            directory = "mine" if node == self.node_id else f"d{node}"
            self.do(PutNode(id=node, name=f"n{node}", incarnation=7, directory=directory))
        arguments = Table.of({"x-queue-type": "quorum"}).encoded
        self.do(
            DeclareQueue(vhost="/", name="q", members=(1, 2, 3), durable=True, arguments=arguments)
        )
        self.removed = 0
        self.membership_manager = MembershipManager(
            self, self.links, self.metadata, self.links, self.on_removed, "mine"
        )
        self.ticks(1)

    def do(self, command: Command) -> None:
        self.metadata.submit(command, lambda reply, error: None)
        self.commit()

    def commit(self) -> None:
        """Applies what was asked for."""
        if not self.builder.used:
            return
        self.index += 1
        data = self.builder.take_entry(0, self.index, 1, 1000).data
        for _, _, _, _, _, arg, offset, _ in commands(data):
            self.asked.append(decode_command(command_body(data, offset)[:arg]))
        self.metadata.tree.apply(self.index, 1000, data)
        effects, self.metadata.tree.effects = self.metadata.tree.effects, []
        self.metadata.on_effects(effects, None)

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.membership_manager.tick()
            self.commit()

    @property
    def record(self) -> QueueRecord:
        return self.metadata.tree.vhosts["/"].queues["q"]

    # What the membership manager needs of broker, host and links.

    def on_removed(self) -> None:
        self.removed += 1

    def placement_nodes(self) -> list[int]:
        return sorted(self.up)

    def is_up(self, node: int) -> bool:
        return node in self.up

    def group_size_of(self, record: QueueRecord) -> int:
        return 3

    def replica(self, group: int) -> Replica | None:
        return self.groups.get(group)

    def member_refusal(self, group: int, node: int) -> str:
        return "too old" if node in self.refused else ""

    def replace_member(self, group: int, node: int, by: int = 0) -> bool:
        self.replaced.append((group, node, by))
        return True

    def add_member(self, group: int, node: int, *, voter: bool = True) -> bool:
        if group:
            self.added.append((group, node))
        return True

    def forget(self, node: int) -> None:
        self.forgotten.add(node)

    def remember(self, node: int) -> None:
        self.forgotten.discard(node)


def test_a_record_follows_what_the_group_has_committed() -> None:
    world = World()
    replica = world.groups[1]
    replica.becomes(1, 2, 3, 4, index=20)
    world.on_membership_changed(1, replica.core.members)
    replica.core.commit_index = 19
    world.ticks(3)
    assert world.record.members == (1, 2, 3), "not committed yet"
    replica.core.commit_index = 20
    world.ticks(1)
    assert (world.record.members, world.record.config) == ((1, 2, 3, 4), (5, 20))
    asked = len(world.asked)
    world.ticks(5)
    assert len(world.asked) == asked


def test_members_are_asked_to_be_recorded_once_until_there_is_an_answer() -> None:
    world = World()
    replica = world.groups[1]
    replica.becomes(1, 2, 3, 4, index=20)
    world.on_membership_changed(1, replica.core.members)
    for _ in range(3):
        world.membership_manager.tick()
    world.commit()
    assert [type(command).__name__ for command in world.asked].count("SetMembers") == 1


def test_a_member_that_is_taken_in_anew_stays_recorded_meanwhile() -> None:
    world = World()
    replica = world.groups[1]
    replica.becomes(1, 2, index=20)
    world.on_membership_changed(1, replica.core.members)
    world.ticks(TICKS_SETTLED)
    assert world.record.config == (0, 0)
    replica.core.changes.rejoining[3] = 1
    world.ticks(5)
    assert world.record.members == (1, 2, 3)
    del replica.core.changes.rejoining[3]
    world.ticks(1)
    assert (world.record.members, world.record.config) == ((1, 2), (5, 20))


@pytest.mark.provokes("cluster.node_forgotten")
def test_a_forgotten_node_is_replaced_by_one_whose_release_fits() -> None:
    world = World()
    world.do(ForgetNode(id=3))
    world.ticks(1)
    assert world.forgotten == {3}
    assert world.replaced == [(0, 3, 0), (1, 3, 4)]
    world.refused.add(4)
    world.replaced.clear()
    world.ticks(1)
    assert world.replaced == [(0, 3, 0), (1, 3, 0)]


def recover(world: World) -> None:
    """The group goes on with node 1 alone; nothing else is free."""
    world.groups[0].becomes(1, index=11)
    world.groups[1].becomes(1, index=11)
    world.up = {1}
    rows = ({"group": 1, "vhost": "/", "name": "q", "outcome": "recover", "loss": "?"},)
    world.do(RecordRecovery(
        cluster_id="b" * 32, former_id=world.metadata.tree.cluster_id, lost_nodes=(2, 3, 4),
        time_ms=1, groups=rows,
    ))  # fmt: skip
    for node in (2, 3, 4):
        world.do(ForgetNode(id=node))
    world.ticks(5)


def test_nodes_that_come_later_fill_up_a_recovered_group() -> None:
    world = World()
    recover(world)
    assert world.record.members == (1,)
    assert world.added == []
    for node in (5, 6):
        world.up.add(node)
        world.do(PutNode(id=node, name=f"n{node}", incarnation=1))
        world.ticks(3)
        assert set(world.added) == {(1, node)}
        world.added.clear()
        world.groups[1].becomes(*range(5, node + 1), 1, index=20 + node)
        world.membership_manager._on_membership(1, world.groups[1].core.members)
        world.ticks(3)
    assert sorted(world.record.members) == [1, 5, 6]
    world.up.add(7)
    world.do(PutNode(id=7, name="n7", incarnation=1))
    world.ticks(3)
    assert world.added == []


def test_a_forgotten_member_is_replaced_in_its_zone() -> None:
    world = World()
    world.metadata.tree.set_version(ZONES_VERSION)
    for node, zone in ((1, "a"), (2, "b"), (3, "c"), (4, "a"), (5, "b"), (6, "c")):
        directory = "mine" if node == 1 else f"d{node}"
        world.do(PutNode(id=node, name=f"n{node}", incarnation=7, directory=directory, zone=zone))
        world.up.add(node)
    world.do(ForgetNode(id=3))
    world.ticks(3)
    assert (1, 3, 6) in world.replaced


def test_a_recovered_group_is_filled_up_by_whoever_leads_it_later() -> None:
    """The node that came was not linked with the leader, and the leader of then is gone."""
    world = World()
    recover(world)
    world.groups[1].is_leader = False
    world.do(PutNode(id=5, name="n5", incarnation=1))
    world.ticks(3)
    assert world.added == []
    world.groups[1].is_leader = True
    world.ticks(SHORT_TICKS)
    assert world.added == []
    world.up.add(5)
    world.ticks(SHORT_TICKS)
    assert world.added[:1] == [(1, 5)]


def test_a_group_that_was_not_recovered_is_not_filled_up() -> None:
    world = World()
    world.groups[1].becomes(1, index=11)
    world.ticks(TICKS_SETTLED + 2)
    world.do(PutNode(id=5, name="n5", incarnation=1))
    world.ticks(3)
    assert world.added == []


@pytest.mark.provokes("cluster.removed")
def test_a_node_that_was_forgotten_itself_ends() -> None:
    world = World()
    world.do(ForgetNode(id=1))
    world.ticks(1)
    assert world.removed == 1


@pytest.mark.provokes("cluster.replaced")
def test_a_node_whose_number_another_directory_has_ends() -> None:
    world = World()
    world.do(Join(id=1, directory="other", incarnation=1, supports={}, members=(1, 2, 3)))
    world.ticks(1)
    assert world.removed == 1


def test_nodes_are_forgotten_one_after_the_other() -> None:
    world = World()
    world.up -= {2, 3}
    world.membership_manager.check_forget(3)
    world.do(ForgetNode(id=3))
    with pytest.raises(PreconditionFailed, match="node 3 is still being removed"):
        world.membership_manager.check_forget(2, force=True)
    world.groups[0].becomes(1, 2, index=11)
    world.membership_manager.check_forget(2)


def test_a_node_that_is_needed_is_not_forgotten() -> None:
    world = World()
    check = world.membership_manager.check_forget
    with pytest.raises(NotFound):
        check(9)
    with pytest.raises(PreconditionFailed, match="cannot forget itself"):
        check(1, force=True)
    with pytest.raises(PreconditionFailed, match="is running"):
        check(3)
    check(3, force=True)
    world.up.discard(3)
    check(3)


def test_a_configuration_from_a_snapshot_has_the_snapshot_s_term() -> None:
    replica = Replica(1)
    replica.becomes(1, 2, index=7)
    assert config_of(replica) == (4, 7)
    replica.becomes(1, 2, index=12)
    assert config_of(replica) == (5, 12)


@pytest.mark.provokes("cluster.members_not_recorded")
def test_a_change_of_members_without_an_answer_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    asked = []

    def refused(command: Any, done: Any, _timeout_ms: int) -> None:
        asked.append(command)
        done(None, Unavailable("no majority"))

    monkeypatch.setattr(world.metadata, "submit", refused)
    replica = world.groups[1]
    replica.becomes(1, 2, 3, 4, index=20)
    world.on_membership_changed(1, replica.core.members)
    world.ticks(3)
    assert len(asked) > 1
