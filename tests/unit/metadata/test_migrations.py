"""Migrations of queues in the replicated tree."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.metadata.commands import (
    BeginMigration,
    Bind,
    ChangeView,
    DeclareExchange,
    DeclareQueue,
    DeleteQueue,
    DeleteVhost,
    EndMigration,
    ForgetNode,
    PutNode,
    PutVhost,
    SetMembers,
)
from convoymq.metadata.machine import ChangeKind, MetadataMachine
from convoymq.model.errors import NotFound, NotServed, PreconditionFailed
from convoymq.model.tables import Table
from convoymq.replication.ring.views import founded
from convoymq.routing.types import QueueType
from tests.unit.metadata.test_machine import Tree, quorum, tree

__all__ = ["tree"]

QUORUM = Table.of({"x-queue-type": "quorum"}).encoded


@pytest.fixture
def sixth(tree: Tree) -> Tree:
    """A tree with a bound classic queue `c`, group 1."""
    tree.machine.set_version(6)
    tree.do(DeclareQueue(vhost="/", name="c", members=(2,), durable=True))
    tree.do(DeclareExchange(vhost="/", name="x", type="topic", durable=True))
    tree.do(Bind(vhost="/", source="x", kind="queue", destination="c", routing_key="a.#"))
    tree.machine.changes.clear()
    return tree


def begin(group: int = 1, **more: Any) -> BeginMigration:
    fields = {"members": (2, 1, 3), "arguments": QUORUM, **more}
    return BeginMigration(vhost="/", name="c", group=group, **fields)


def end(successor: int, *, group: int = 1, switched: bool = True) -> EndMigration:
    return EndMigration(vhost="/", name="c", group=group, successor=successor, switched=switched)


def changes(tree: Tree) -> list[tuple[ChangeKind, int]]:
    found = [(each.kind, each.record.group) for each in tree.machine.changes if each.record]
    tree.machine.changes.clear()
    return found


def restored(tree: Tree) -> MetadataMachine:
    made = MetadataMachine()
    made.restore(tree.machine.snapshot())
    made.check_invariants()
    assert made.state_hash() == tree.machine.state_hash()
    return made


def test_a_successor_keeps_the_user_that_declared_the_queue(tree: Tree) -> None:
    tree.machine.set_version(MetadataMachine.VERSION)
    tree.do(DeclareQueue(vhost="/", name="c", members=(2,), durable=True, user="ann"))
    tree.do(begin())
    assert restored(tree).vhosts["/"].successors["c"].declared.user == "ann"
    tree.do(end(2))
    declared = restored(tree).vhosts["/"].topology.queue("c")
    assert (declared.type, declared.user) == (QueueType.QUORUM, "ann")


def test_a_successor_gets_name_and_bindings_when_it_is_switched_to(sixth: Tree) -> None:
    assert sixth.do(begin()) == {"group": 2}
    assert changes(sixth) == [(ChangeKind.QUEUE_CREATED, 2)]
    place = sixth.machine.vhosts["/"]
    assert place.queues["c"].group == 1
    successor = sixth.machine.queue_index.by_group[2]
    declared = place.declared(successor)
    assert declared is not None
    assert (successor.members, successor.predecessor) == ((2, 1, 3), 1)
    assert (declared.type, declared.arguments.encoded) == (QueueType.QUORUM, QUORUM)
    assert place.declared(place.queues["c"]).type is QueueType.CLASSIC  # type: ignore[union-attr]

    assert sixth.do(end(2)) is True
    assert changes(sixth) == [(ChangeKind.QUEUE_DELETED, 1), (ChangeKind.QUEUE_CREATED, 2)]
    assert place.queues["c"].group == 2
    assert set(sixth.machine.queue_index.by_group) == {2}
    assert place.topology.route("x", "a.b") == ["c"]
    assert place.declared(place.queues["c"]).type is QueueType.QUORUM  # type: ignore[union-attr]


def test_an_end_that_comes_late_changes_nothing(sixth: Tree) -> None:
    sixth.do(begin())
    assert sixth.do(end(2, switched=False)) is True
    assert set(sixth.machine.queue_index.by_group) == {1}
    assert sixth.do(begin()) == {"group": 3}
    assert sixth.do(end(2)) is False
    assert sixth.machine.vhosts["/"].queues["c"].group == 1
    assert sixth.do(end(3)) is True
    assert sixth.do(end(3)) is False
    assert sixth.do(end(3, switched=False)) is False
    assert set(sixth.machine.queue_index.by_group) == {3}


def test_a_snapshot_keeps_migrations_and_what_was_migrated(sixth: Tree) -> None:
    sixth.do(begin())
    made = restored(sixth)
    assert made.vhosts["/"].successors == sixth.machine.vhosts["/"].successors
    sixth.do(end(2))
    sixth.do(begin(2, arguments=b""))
    made = restored(sixth)
    assert made.vhosts["/"].queues["c"].predecessor == 1
    assert made.vhosts["/"].successors["c"].record.predecessor == 2


def test_the_end_of_a_queue_is_that_of_its_migration(sixth: Tree) -> None:
    sixth.do(begin())
    sixth.do(DeleteQueue(vhost="/", name="c", group=1))
    assert not sixth.machine.queue_index.by_group
    assert sixth.do(end(2)) is False
    sixth.do(PutVhost(name="v"))
    sixth.do(DeclareQueue(vhost="v", name="c", members=(2,), durable=True))
    sixth.do(BeginMigration(vhost="v", name="c", group=3, members=(1,), arguments=QUORUM))
    sixth.do(DeleteVhost(name="v"))
    assert not sixth.machine.queue_index.by_group


def test_a_node_that_is_forgotten_undoes_the_migrations_to_it(sixth: Tree) -> None:
    sixth.do(PutNode(id=3, name="n3", incarnation=1))
    sixth.do(begin())
    sixth.do(ForgetNode(id=3))
    assert set(sixth.machine.queue_index.by_group) == {1}
    assert sixth.do(end(2)) is False


def test_a_queue_gets_no_mirrors_while_it_is_migrated(sixth: Tree) -> None:
    view = ChangeView(vhost="/", name="c", group=1, view=founded(2, 1))
    sixth.do(begin())
    assert sixth.do(view) is False
    sixth.do(end(2, switched=False))
    assert sixth.do(view) is True
    with pytest.raises(PreconditionFailed, match="has mirrors"):
        sixth.do(begin())


def test_members_of_a_successor_change_as_those_of_a_queue(sixth: Tree) -> None:
    sixth.do(begin())
    assert sixth.do(SetMembers(vhost="/", name="c", group=2, members=(1, 2), config=(1, 2)))
    assert sixth.machine.vhosts["/"].successors["c"].record.members == (1, 2)
    assert sixth.machine.vhosts["/"].queues["c"].members == (2,)


def test_what_cannot_be_migrated_is_refused_by_name(sixth: Tree) -> None:
    with pytest.raises(NotFound, match="no queue 'c'"):
        sixth.do(begin(7))
    sixth.do(begin())
    with pytest.raises(PreconditionFailed, match="being migrated already"):
        sixth.do(begin())
    sixth.do(end(2, switched=False))
    for arguments, text in (
        ({"x-queue-type": "quorum", "x-max-priority": 4}, "x-max-priority"),
        ({"x-queue-type": "other"}, "unsupported queue type"),
    ):
        with pytest.raises(PreconditionFailed, match=text):
            sixth.do(begin(arguments=Table.of(arguments).encoded))
    sixth.do(DeclareQueue(vhost="/", name="t", members=(2,)))
    with pytest.raises(PreconditionFailed, match="non-durable"):
        sixth.do(BeginMigration(vhost="/", name="t", group=3, members=(1,), arguments=QUORUM))
    assert set(sixth.machine.queue_index.by_group) == {1, 3}


def test_an_older_tree_migrates_nothing(tree: Tree) -> None:
    tree.do(quorum("c"))
    with pytest.raises(NotServed, match="version 6"):
        tree.do(begin())
