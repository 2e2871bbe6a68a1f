"""Policies and limits in the replicated tree: version 2 of its machine."""

from __future__ import annotations

import msgspec
import pytest

from convoymq.metadata.commands import (
    FIRST_VERSIONS,
    Command,
    DeclareQueue,
    DeletePolicy,
    DeleteUser,
    DeleteVhost,
    PutPolicy,
    PutUserLimit,
    PutVhost,
    PutVhostLimit,
)
from convoymq.metadata.machine import ChangeKind, MetadataMachine
from convoymq.model.errors import (
    NotFound,
    NotServed,
    PreconditionFailed,
    UnknownCommand,
    ValidationFailed,
)
from tests.unit.metadata.test_machine import Tree
from tests.unit.metadata.test_machine import tree as tree

POLICY = PutPolicy(vhost="/", name="p", pattern="^q", definition={"max-length": 5})
COMMANDS: tuple[Command, ...] = (
    POLICY,
    DeletePolicy(vhost="/", name="p"),
    PutVhostLimit(vhost="/", name="max-queues", value=1),
    PutUserLimit(user="guest", name="max-channels", value=1),
)


@pytest.fixture
def second(tree: Tree) -> Tree:
    tree.machine.set_version(2)
    return tree


def test_the_first_version_refuses_them_by_name_and_its_snapshot_has_none(tree: Tree) -> None:
    assert {type(command) for command in COMMANDS} == {
        kind for kind, version in FIRST_VERSIONS.items() if version == 2
    }
    for command in COMMANDS:
        with pytest.raises(NotServed, match="version 2 of the metadata machine is needed, 1 is in"):
            tree.do(command)
    state = msgspec.msgpack.decode(tree.machine.snapshot())
    assert {"policies", "vhost_limits", "user_limits"}.isdisjoint(state)
    tree.machine.set_version(2)
    later = msgspec.msgpack.decode(tree.machine.snapshot())
    assert {key: later[key] for key in state} == {**state, "version": 2}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_log_of_the_first_version_with_one_of_them_stops_the_replica(
    tree: Tree, command: Command
) -> None:
    with pytest.raises(UnknownCommand):
        tree.record(command)


def test_policies_are_set_replaced_and_removed(second: Tree) -> None:
    machine = second.machine
    machine.changes.clear()
    assert second.do(POLICY) is True
    assert [change.kind for change in machine.changes] == [ChangeKind.POLICIES]
    higher = msgspec.structs.replace(POLICY, priority=3, definition={"max-length": 7})
    assert second.do(higher) is False
    (kept,) = machine.vhosts["/"].policies.of()
    assert (kept.priority, kept.definition, kept.apply_to) == (3, {"max-length": 7}, "all")
    assert second.do(msgspec.structs.replace(POLICY, operator=True)) is True
    assert second.do(DeletePolicy(vhost="/", name="p")) is True
    assert second.do(DeletePolicy(vhost="/", name="p")) is False
    assert [each.name for each in machine.vhosts["/"].policies.of(operator=True)] == ["p"]
    with pytest.raises(NotFound, match="vhost x not found"):
        second.do(msgspec.structs.replace(POLICY, vhost="x"))


def test_what_no_release_could_use_is_not_proposed(second: Tree) -> None:
    for change, reason in (
        ({"definition": {"max-length": -1}}, "-1 is not a valid maximum length"),
        ({"definition": {"x": 1}}, "not recognised policy settings"),
        ({"definition": {"alternate-exchange": "x"}, "operator": True}, "not recognised"),
        ({"pattern": "("}, "regular expression"),
        ({"apply_to": "exchanges"}, "conflicts with max-length"),
    ):
        with pytest.raises(ValidationFailed, match=reason):
            second.do(msgspec.structs.replace(POLICY, **change))
    for command in (
        PutVhostLimit(vhost="/", name="max-channels", value=1),
        PutUserLimit(user="guest", name="max-queues", value=1),
    ):
        with pytest.raises(ValidationFailed, match="is not a limit; there are: max-connections"):
            second.do(command)
    assert not second.machine.vhosts["/"].policies


def test_limits_are_kept_with_their_virtual_host_and_user(second: Tree) -> None:
    machine = second.machine
    second.do(PutVhost(name="v"))
    assert second.do(PutVhostLimit(vhost="v", name="max-queues", value=3)) is True
    second.do(PutVhost(name="v", description="changed"))
    assert machine.vhosts["v"].limits == {"max-queues": 3}
    assert second.do(PutUserLimit(user="guest", name="max-channels", value=4)) is True
    assert second.do(PutUserLimit(user="guest", name="max-connections")) is False
    assert machine.user_limits == {"guest": {"max-channels": 4}}
    for missing in (
        PutVhostLimit(vhost="x", name="max-queues", value=1),
        PutUserLimit(user="x", name="max-channels", value=1),
    ):
        with pytest.raises(NotFound):
            second.do(missing)
    assert second.do(PutUserLimit(user="guest", name="max-channels")) is True
    assert machine.user_limits == {}
    second.do(PutUserLimit(user="guest", name="max-channels", value=4))
    second.do(DeleteUser(name="guest"))
    second.do(DeleteVhost(name="v"))
    second.do(PutVhost(name="v"))
    assert (machine.user_limits, machine.vhosts["v"].limits) == ({}, {})


def test_a_full_virtual_host_takes_no_new_queue(second: Tree) -> None:
    second.do(PutVhostLimit(vhost="/", name="max-queues", value=1))
    second.do(DeclareQueue(vhost="/", name="a", members=(1,)))
    second.do(DeclareQueue(vhost="/", name="a", members=(1,)))
    with pytest.raises(PreconditionFailed) as caught:
        second.do(DeclareQueue(vhost="/", name="b", members=(1,)))
    assert caught.value.text == "cannot declare queue 'b': queue limit in vhost '/' (1) is reached"
    second.do(PutVhostLimit(vhost="/", name="max-queues", value=-1))
    second.do(DeclareQueue(vhost="/", name="b", members=(1,)))


def test_a_snapshot_brings_all_of_it_back(second: Tree) -> None:
    second.do(POLICY)
    second.do(
        msgspec.structs.replace(
            POLICY, name="o", operator=True, priority=-2, apply_to="classic_queues"
        )
    )
    second.do(PutVhostLimit(vhost="/", name="max-queues", value=7))
    second.do(PutUserLimit(user="guest", name="max-connections", value=8))
    restored = MetadataMachine()
    restored.restore(second.machine.snapshot())
    assert restored.snapshot() == second.machine.snapshot()
    for operator in (False, True):
        assert list(restored.vhosts["/"].policies.of(operator=operator)) == list(
            second.machine.vhosts["/"].policies.of(operator=operator)
        )
    assert restored.vhosts["/"].limits == {"max-queues": 7}
    assert restored.user_limits == {"guest": {"max-connections": 8}}
    restored.check_invariants()
