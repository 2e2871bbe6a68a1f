"""The replicated tree: commands, sessions, snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.cluster import access
from convoymq.cluster.commands import (
    AdmitNode,
    Bind,
    Bootstrap,
    Command,
    DeclareExchange,
    DeclareQueue,
    DeleteQueue,
    DeleteUser,
    DeleteVhost,
    ForgetNode,
    OwnerGone,
    PutNode,
    PutPermission,
    PutTopicPermission,
    PutUser,
    PutVhost,
    SetMembers,
    encode_command,
)
from convoymq.cluster.interfaces import EFFECT_APPLIED, EFFECT_GAP
from convoymq.cluster.metadata import ChangeKind, MetadataMachine, owner_text
from convoymq.kernels.batch import CMD_METADATA, CMD_NODE_DOWN, CMD_NODE_UP, CommandBuilder
from convoymq.model.errors import NotFound, PreconditionFailed, StorageFault, refusal_from_builtins
from convoymq.model.tables import Table

SESSION = 1 << 56 | 7 << 24


class Tree:
    """Applies commands one by one, as a log would bring them."""

    def __init__(self) -> None:
        self.machine = MetadataMachine()
        self.index = 0
        self.seq = 0

    def entry(self, builder: CommandBuilder) -> list[Any]:
        self.index += 1
        self.machine.effects.clear()
        entry = builder.take_entry(0, self.index, 1, 1000 + self.index)
        self.machine.apply(self.index, entry.time_ms, entry.data)
        self.machine.check_invariants()
        return list(self.machine.effects)

    def raw(self, body: bytes, seq: int, session: int = SESSION) -> list[Any]:
        builder = CommandBuilder()
        builder.add(CMD_METADATA, 0, session, seq, 0, len(body), body)
        return self.entry(builder)

    def do(self, command: Command) -> Any:
        self.seq += 1
        effects = self.raw(encode_command(command), self.seq)
        (applied,) = [effect for effect in effects if effect[0] == EFFECT_APPLIED]
        assert applied[:3] == (EFFECT_APPLIED, SESSION, self.seq)
        if applied[3]:
            raise refusal_from_builtins(applied[4])
        return applied[4]

    def notice(self, kind: int, node: int, body: bytes = b"", flags: int = 0) -> list[Any]:
        builder = CommandBuilder()
        builder.add(kind, flags, 0, 0, 0, node, body)
        return self.entry(builder)

    def queues(self, vhost: str = "/") -> list[str]:
        return sorted(self.machine.vhosts[vhost].queues)


@pytest.fixture
def tree() -> Tree:
    made = Tree()
    made.do(
        Bootstrap(
            vhost="/",
            user="guest",
            password_hash=access.hash_sha256(b"guest", b"salt"),
            algorithm=access.SHA256,
            cluster_name="convoy",
        )
    )
    return made


def quorum(name: str, members: tuple[int, ...] = (1, 2, 3)) -> DeclareQueue:
    arguments = Table.of({"x-queue-type": "quorum"}).encoded
    return DeclareQueue(vhost="/", name=name, members=members, durable=True, arguments=arguments)


def test_bootstrap_happens_once(tree: Tree) -> None:
    assert tree.machine.users["guest"].tags == ("administrator",)
    tree.do(DeleteUser(name="guest"))
    again = Bootstrap(vhost="x", user="guest", password_hash="", algorithm="", cluster_name="y")
    assert tree.do(again) is False
    assert "guest" not in tree.machine.users


def test_a_queue_gets_a_group_and_its_name_a_new_one_after_deletion(tree: Tree) -> None:
    first = tree.do(quorum("q"))
    assert first == {"created": True, "group": 1}
    assert tree.do(quorum("q")) == {"created": False, "group": 1}
    assert tree.do(DeleteQueue(vhost="/", name="q", group=1))
    assert tree.do(quorum("q")) == {"created": True, "group": 2}
    assert tree.do(DeleteQueue(vhost="/", name="q", group=1)) is False
    assert tree.queues() == ["q"]


def test_a_refused_declare_leaves_no_trace(tree: Tree) -> None:
    with pytest.raises(PreconditionFailed, match="'non-durable'"):
        tree.do(
            DeclareQueue(
                vhost="/",
                name="q",
                members=(1,),
                arguments=Table.of({"x-queue-type": "quorum"}).encoded,
            )
        )
    assert tree.queues() == []
    assert tree.machine.next_group == 1


def test_a_classic_queue_has_one_home(tree: Tree) -> None:
    tree.do(DeclareQueue(vhost="/", name="c", members=(2, 1, 3)))
    assert tree.machine.vhosts["/"].queues["c"].members == (2,)


def test_a_repeated_command_is_answered_from_memory(tree: Tree) -> None:
    tree.do(quorum("q"))
    effects = tree.raw(encode_command(quorum("q")), tree.seq)
    assert effects == [(EFFECT_APPLIED, SESSION, tree.seq, 0, {"created": True, "group": 1})]
    assert tree.machine.next_group == 2


def test_a_gap_is_reported_and_not_applied(tree: Tree) -> None:
    effects = tree.raw(encode_command(quorum("q")), tree.seq + 2)
    assert effects == [(EFFECT_GAP, SESSION, tree.seq)]
    assert tree.queues() == []


def test_an_unknown_session_starts_with_one(tree: Tree) -> None:
    assert tree.raw(encode_command(quorum("q")), 2, session=SESSION + 1) == []
    assert tree.queues() == []


def test_a_malformed_command_is_refused_and_consumes_its_number(tree: Tree) -> None:
    tree.seq += 1
    (effect,) = tree.raw(b"\xc1\x00", tree.seq)
    assert effect[:4] == (EFFECT_APPLIED, SESSION, tree.seq, 1)
    assert tree.do(quorum("q"))["created"]


def test_exclusive_queues_end_with_their_owner(tree: Tree) -> None:
    mine, other = owner_text(1, 7, 1), owner_text(1, 7, 2)
    tree.do(DeclareQueue(vhost="/", name="a", members=(1,), owner=mine))
    tree.do(DeclareQueue(vhost="/", name="b", members=(1,), owner=other))
    assert tree.do(OwnerGone(owner=mine)) == 1
    assert tree.queues() == ["b"]


def test_a_lost_node_frees_the_names_of_its_exclusive_queues(tree: Tree) -> None:
    tree.do(DeclareQueue(vhost="/", name="a", members=(2,), owner=owner_text(2, 7, 1)))
    tree.do(DeclareQueue(vhost="/", name="kept", members=(2,), durable=True))
    tree.notice(CMD_NODE_DOWN, 2)
    assert tree.queues() == ["a", "kept"], "it is only suspected"
    tree.notice(CMD_NODE_DOWN, 2, flags=1)
    assert tree.queues() == ["kept"]


def test_a_restarted_node_has_lost_its_transient_queues(tree: Tree) -> None:
    tree.do(PutNode(id=2, name="n2", incarnation=10))
    tree.do(DeclareQueue(vhost="/", name="transient", members=(2,)))
    tree.do(DeclareQueue(vhost="/", name="durable", members=(2,), durable=True))
    tree.do(DeclareQueue(vhost="/", name="elsewhere", members=(1,)))
    tree.do(PutNode(id=2, name="n2", incarnation=10, addresses={"amqp": "x"}))
    assert tree.queues() == ["durable", "elsewhere", "transient"]
    tree.do(PutNode(id=2, name="n2", incarnation=11))
    assert tree.queues() == ["durable", "elsewhere"]
    assert tree.do(PutNode(id=2, name="n2", incarnation=9)) is False


def test_a_forgotten_node_takes_its_classic_queues_along(tree: Tree) -> None:
    tree.do(PutNode(id=2, name="n2", incarnation=10))
    tree.do(DeclareQueue(vhost="/", name="durable", members=(2,), durable=True))
    tree.do(quorum("q", (2, 1, 3)))
    assert tree.do(ForgetNode(id=2))
    assert tree.queues() == ["q"]


def test_sessions_of_older_incarnations_end(tree: Tree) -> None:
    old, new = 2 << 56 | 5 << 24, 2 << 56 | 6 << 24
    tree.raw(encode_command(quorum("a")), 1, session=old)
    tree.raw(encode_command(quorum("b")), 1, session=new)
    tree.notice(CMD_NODE_UP, 2, (6).to_bytes(8, "little"))
    assert tree.raw(encode_command(quorum("c")), 2, session=old) == []
    tree.raw(encode_command(quorum("d")), 2, session=new)
    assert tree.queues() == ["a", "b", "d"]


def test_members_change_only_for_the_queue_that_was_meant(tree: Tree) -> None:
    tree.do(quorum("q"))
    assert not tree.do(SetMembers(vhost="/", name="q", group=9, members=(1, 2)))
    assert tree.do(SetMembers(vhost="/", name="q", group=1, members=(1, 2)))
    assert tree.machine.vhosts["/"].queues["q"].members == (1, 2)


def test_a_snapshot_keeps_who_joined_later_and_who_was_forgotten(tree: Tree) -> None:
    tree.do(PutNode(id=3, name="n3", incarnation=10))
    tree.do(quorum("q"))
    tree.do(ForgetNode(id=3))
    tree.do(SetMembers(vhost="/", name="q", group=1, members=(1, 2, 4)))
    restored = MetadataMachine()
    restored.restore(tree.machine.snapshot())
    for machine in (tree.machine, restored):
        record = machine.vhosts["/"].queues["q"]
        assert (record.members, record.joined, machine.forgotten) == ((1, 2, 4), (4,), {3})
    tree.do(SetMembers(vhost="/", name="q", group=1, members=(1, 2)))
    assert tree.machine.vhosts["/"].queues["q"].joined == ()
    tree.do(AdmitNode(id=3))
    assert not tree.machine.forgotten


def test_permissions_need_user_and_vhost_and_a_readable_pattern(tree: Tree) -> None:
    with pytest.raises(NotFound):
        tree.do(PutPermission(user="x", vhost="/", configure="", write="", read=""))
    with pytest.raises(NotFound):
        tree.do(PutPermission(user="guest", vhost="x", configure="", write="", read=""))
    with pytest.raises(PreconditionFailed):
        tree.do(PutPermission(user="guest", vhost="/", configure="(", write="", read=""))


def test_what_a_vhost_held_goes_with_it(tree: Tree) -> None:
    tree.do(PutVhost(name="v"))
    tree.do(PutPermission(user="guest", vhost="v", configure="", write="", read=""))
    tree.do(DeclareQueue(vhost="v", name="c", members=(1,)))
    tree.machine.changes.clear()
    assert tree.do(DeleteVhost(name="v"))
    kinds = [change.kind for change in tree.machine.changes]
    assert kinds == [ChangeKind.QUEUE_DELETED, ChangeKind.OTHER]
    assert ("guest", "v") not in tree.machine.permissions


def test_a_snapshot_restores_everything(tree: Tree) -> None:
    tree.do(quorum("q"))
    tree.do(DeclareQueue(vhost="/", name="c", members=(2,), owner=owner_text(2, 7, 1)))
    tree.do(DeclareExchange(vhost="/", name="x", type="topic", durable=True))
    tree.do(Bind(vhost="/", source="x", kind="queue", destination="q", routing_key="a.#"))
    tree.do(PutUser(name="u", tags=("monitoring",)))
    tree.do(PutTopicPermission(user="u", vhost="/", exchange="x", write="a", read="b"))
    tree.do(PutNode(id=3, name="n3", incarnation=1, addresses={"http": "127.0.0.1:1"}))
    other = MetadataMachine()
    other.restore(tree.machine.snapshot())
    other.check_invariants()
    assert other.state_hash() == tree.machine.state_hash()
    assert [change.kind for change in other.changes] == [ChangeKind.RESTORED]
    assert other.vhosts["/"].topology.route("x", "a.b") == ["q"]
    other.resend(1)
    assert other.effects[-1] == (EFFECT_APPLIED, SESSION, tree.seq, 0, True)


def test_a_snapshot_of_another_format_is_refused() -> None:
    with pytest.raises(StorageFault):
        MetadataMachine().restore(b"\x80")
