"""Views of rings in the replicated tree."""

from __future__ import annotations

import msgspec
import pytest

from convoymq.metadata.commands import ChangeView, DeclareQueue, PutNode, encode_command
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.records import QueueRecord
from convoymq.metadata.snapshot import VIEWS_VERSION
from convoymq.model.errors import NotFound, NotServed, PreconditionFailed, UnknownCommand
from convoymq.replication.ring.views import RingView, founded
from convoymq.routing.queue_types import PlacementKind
from tests.unit.metadata.test_machine import Tree, tree

__all__ = ["tree"]


def change(view: RingView, **changes: object) -> ChangeView:
    fields = {"vhost": "/", "name": "q", "group": 1, "view": view} | changes
    return msgspec.convert(fields, ChangeView, from_attributes=True)


@pytest.fixture
def mirrored(tree: Tree) -> Tree:
    tree.machine.set_version(VIEWS_VERSION)
    tree.do(DeclareQueue(vhost="/", name="q", members=(2,), durable=False))
    tree.machine.changes.clear()
    return tree


def record_in(tree: Tree) -> QueueRecord:
    record = tree.machine.vhosts["/"].queues["q"]
    assert tree.machine.queue_index.by_group[1] is record
    return record


def test_views_follow_one_another(mirrored: Tree) -> None:
    first = founded(2, 5)
    second = first.joined(3, 6)
    assert mirrored.do(change(second)) is False, "it has none yet"
    assert mirrored.do(change(first)) is True
    assert mirrored.do(change(first)) is False, "another one came first"
    assert mirrored.do(change(second)) is True
    assert record_in(mirrored).view == second
    assert [c.record.view for c in mirrored.machine.changes if c.record] == [first, second]
    assert mirrored.do(change(second.caught_up(2).caught_up(2), group=9)) is False
    assert mirrored.do(change(second.caught_up(2), name="other")) is False
    with pytest.raises(NotFound):
        mirrored.do(change(second, vhost="other"))


def test_the_members_of_the_record_are_the_nodes_of_live_ones(mirrored: Tree) -> None:
    view = founded(2, 5)
    assert record_in(mirrored).placement is PlacementKind.HOME
    mirrored.do(change(view))
    for node in (3, 1):
        view = view.joined(node, 6)
        mirrored.do(change(view))
    assert record_in(mirrored).members == (2, 3, 1)
    assert record_in(mirrored).placement is PlacementKind.RING
    view = view.caught_up(2)
    mirrored.do(change(view))
    mirrored.do(change(view.with_failed(1)))
    assert record_in(mirrored).members == (3,), "the newcomer to its right goes with it"


def test_a_mirrored_queue_stays_when_its_home_starts_again(mirrored: Tree) -> None:
    """A transient one has copies elsewhere."""
    view = founded(2, 5)
    mirrored.do(change(view))
    mirrored.do(change(view.joined(3, 6)))
    mirrored.do(PutNode(id=2, name="b", incarnation=6))
    assert mirrored.machine.lost_with(2) == []
    assert mirrored.queues() == ["q"]


def test_a_snapshot_has_the_views(mirrored: Tree) -> None:
    mirrored.do(change(founded(2, 5)))
    state = mirrored.machine.snapshot()
    again = MetadataMachine()
    again.restore(state)
    again.check_invariants()
    assert again.queue_index.by_group[1] == record_in(mirrored)
    assert again.snapshot() == state


def test_earlier_versions_have_no_views(mirrored: Tree) -> None:
    mirrored.machine.set_version(VIEWS_VERSION - 1)
    with pytest.raises(NotServed, match=f"version {VIEWS_VERSION} "):
        mirrored.do(change(founded(2, 5)))
    assert b"views" not in mirrored.machine.snapshot()
    with pytest.raises(UnknownCommand):
        mirrored.raw(encode_command(change(founded(2, 5))), mirrored.seq + 1)


def test_a_view_that_cannot_be_is_refused_by_its_proposer(mirrored: Tree) -> None:
    view = founded(2, 5)
    for wrong in (view.with_failed(1), msgspec.structs.replace(view, next_member=1)):
        with pytest.raises(PreconditionFailed, match="view"):
            mirrored.do(change(wrong))
    assert mirrored.record(change(msgspec.structs.replace(view, failed=(1,)))) is False
    assert record_in(mirrored).view is None
