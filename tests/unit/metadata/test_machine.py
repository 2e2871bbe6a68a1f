"""The replicated tree: commands, sessions, snapshots."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from convoymq.kernels.batch import (
    CMD_METADATA,
    CMD_NODE_DOWN,
    CMD_NODE_UP,
    CMD_TICK,
    CommandBuilder,
)
from convoymq.metadata import access
from convoymq.metadata.commands import (
    TOPIC_COMMANDS,
    Bind,
    Bootstrap,
    Command,
    DeclareExchange,
    DeclareQueue,
    DeleteQueue,
    DeleteUser,
    DeleteVhost,
    ForgetNode,
    Join,
    OwnerGone,
    PutNode,
    PutPermission,
    PutTopicPermission,
    PutUser,
    PutVhost,
    RecordRecovery,
    SetMembers,
    encode_command,
)
from convoymq.metadata.machine import (
    ChangeKind,
    MetadataMachine,
    owner_text,
)
from convoymq.metadata.nodes import RECOVERIES_KEPT, RECOVERY_STEP, STARTS_UNSEEN, STEPS_SINCE
from convoymq.metadata.placement import Place
from convoymq.metadata.snapshot import USERS_VERSION, ZONES_VERSION
from convoymq.metadata.validation import validated
from convoymq.model.errors import (
    NotFound,
    PreconditionFailed,
    StorageFault,
    UnknownCommand,
    UnsupportedVersion,
    refusal_from_builtins,
)
from convoymq.model.tables import Table
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_GAP

SESSION = 1 << 56 | 7 << 24
CLUSTER = "c1" * 16


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
        """What a store and the log do with a command."""
        return self.record(validated(command, self.machine))

    def record(self, command: Command) -> Any:
        """What the log does with a command, wherever it comes from."""
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
            cluster_id=CLUSTER,
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


def test_an_unknown_command_is_not_skipped(tree: Tree) -> None:
    encode = msgspec.msgpack.encode
    with pytest.raises(UnknownCommand):
        tree.raw(b"\xc1\x00", tree.seq + 1)
    with pytest.raises(UnknownCommand):
        tree.raw(encode({"op": "vhost_rename", "name": "v"}), tree.seq + 1)
    with pytest.raises(UnknownCommand):
        tree.raw(encode({"op": "vhost_delete", "name": "/", "keep": True}), tree.seq + 1)
    assert list(tree.machine.vhosts) == ["/"]
    assert tree.notice(CMD_TICK, 0) == []
    with pytest.raises(UnknownCommand, match="a command of type 99"):
        tree.notice(99, 0)


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


@pytest.mark.parametrize("version", [2, 3])
def test_a_lost_node_takes_its_transient_queues_along_since_version_3(
    tree: Tree, version: int
) -> None:
    tree.machine.version = version
    for name, durable, home in (("a", False, 2), ("b", True, 2), ("c", False, 1)):
        tree.do(DeclareQueue(vhost="/", name=name, members=(home,), durable=durable))
    tree.notice(CMD_NODE_DOWN, 2)
    assert tree.queues() == ["a", "b", "c"]
    tree.notice(CMD_NODE_DOWN, 2, flags=1)
    assert tree.queues() == (["b", "c"] if version == 3 else ["a", "b", "c"])
    tree.machine.queue_index.check_invariants(list(tree.machine.records()))


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
    assert not tree.do(SetMembers(vhost="/", name="q", group=9, members=(1, 2), config=(2, 8)))
    assert tree.do(SetMembers(vhost="/", name="q", group=1, members=(1, 2), config=(2, 8)))
    assert tree.machine.vhosts["/"].queues["q"].members == (1, 2)


def test_a_late_record_of_members_never_replaces_a_newer_one(tree: Tree) -> None:
    def members(*nodes: int, config: tuple[int, int]) -> Any:
        return tree.do(SetMembers(vhost="/", name="q", group=1, members=nodes, config=config))

    tree.do(quorum("q"))
    assert members(1, 2, config=(2, 8))
    assert members(1, 2, 4, config=(2, 9))
    assert not members(1, 2, config=(2, 8)), "late"
    assert not members(1, 2, config=(2, 9)), "repeated"
    restored = MetadataMachine()
    restored.restore(tree.machine.snapshot())
    record = restored.vhosts["/"].queues["q"]
    assert (record.members, record.joined, record.config) == ((1, 2, 4), (4,), (2, 9))
    # A group that was recovered alone goes on in a higher term, maybe with a shorter log.
    assert members(1, config=(3, 5))


def test_a_snapshot_keeps_who_joined_later_and_who_was_forgotten(tree: Tree) -> None:
    tree.do(PutNode(id=3, name="n3", incarnation=10))
    tree.do(quorum("q"))
    tree.do(ForgetNode(id=3))
    tree.do(SetMembers(vhost="/", name="q", group=1, members=(1, 2, 4), config=(1, 2)))
    restored = MetadataMachine()
    restored.restore(tree.machine.snapshot())
    for machine in (tree.machine, restored):
        record = machine.vhosts["/"].queues["q"]
        assert (record.members, record.joined, machine.forgotten) == ((1, 2, 4), (4,), {3})
    tree.do(SetMembers(vhost="/", name="q", group=1, members=(1, 2), config=(1, 3)))
    assert tree.machine.vhosts["/"].queues["q"].joined == ()


SUPPORTS = {"metadata": (1, 1), "quorum": (1, 1), "stream": (1, 1)}


def join(node: int, directory: str, incarnation: int = 1, **more: Any) -> Join:
    fields: dict[str, Any] = {"supports": SUPPORTS, "members": (1, 2, 3), **more}
    return Join(id=node, directory=directory, incarnation=incarnation, **fields)


def put(node: int, directory: str, incarnation: int) -> PutNode:
    return PutNode(id=node, name=f"n{node}", incarnation=incarnation, directory=directory)


def test_the_tree_says_as_what_a_node_joins(tree: Tree) -> None:
    tree.do(quorum("q"))
    answer = {"members": [1, 2, 3], "groups": 1, "cluster_id": CLUSTER}
    assert tree.do(join(3, "c")) == {"role": "founder", "incarnation": 1, **answer}
    assert tree.do(put(3, "c", 1))
    assert tree.do(join(3, "d")) == {"role": "wiped", "incarnation": 2, **answer}
    assert tree.do(join(4, "e")) == {"role": "learner", "incarnation": 1, **answer}
    assert tree.do(put(4, "e", 1))
    members = (1, 2, 3, 4)
    assert tree.do(join(4, "e", members=members))["role"] == "learner", "it asks again"
    assert tree.do(join(4, "e", 2, members=members))["role"] == "wiped"


def test_a_lost_directory_had_starts_that_the_tree_does_not_know_of(tree: Tree) -> None:
    """Queues may have heard of them: they take no sessions of an earlier incarnation."""
    tree.machine.set_version(3)
    supports = {"metadata": (1, 3)}
    tree.do(put(3, "c", 5))
    assert tree.do(join(3, "d", supports=supports))["incarnation"] == 5 + STARTS_UNSEEN
    again = tree.do(join(3, "d", 2, supports=supports))
    assert again["incarnation"] == 6 + STARTS_UNSEEN, "its directory counts its starts"
    assert tree.do(join(4, "e", supports=supports))["incarnation"] == 1, "a new node"


def test_a_member_that_was_let_in_before_is_never_a_founder_again(tree: Tree) -> None:
    tree.do(join(4, "a"))
    # It may have got a vote, and lost it, before it told its addresses.
    assert tree.do(join(4, "b", members=(1, 2, 3, 4)))["role"] == "wiped"


def test_who_asks_again_in_one_life_gets_the_same_answer(tree: Tree) -> None:
    """The answer was lost, or a former leader's proposal is applied after the node has entered."""
    tree.do(put(3, "old", 7))
    first = tree.do(join(3, "new"))
    assert (first["role"], first["incarnation"]) == ("wiped", 8)
    assert tree.do(put(3, "new", 8))
    restored = MetadataMachine()
    restored.restore(tree.machine.snapshot())
    assert restored.joins == tree.machine.joins
    assert tree.do(join(3, "new")) == first
    assert tree.do(put(3, "new", 8)), "it is not an earlier life"
    # It lost its log, but not its directory, and was started again.
    assert tree.do(join(3, "new", 9))["incarnation"] == 9
    with pytest.raises(PreconditionFailed, match="was started again since"):
        tree.do(join(3, "new", 8))


def test_only_the_directory_that_was_let_in_last_has_the_number(tree: Tree) -> None:
    assert tree.do(put(2, "old", 7))
    assert tree.do(join(2, "new"))["incarnation"] == 8
    with pytest.raises(PreconditionFailed, match="another data directory: new"):
        tree.do(put(2, "old", 9))
    assert tree.do(put(2, "new", 8))
    assert not tree.do(put(2, "new", 7))
    assert tree.machine.directories == {2: "new"}
    assert tree.machine.nodes[2].incarnation == 8


def test_a_number_in_use_and_a_release_that_is_too_old_are_refused(tree: Tree) -> None:
    tree.do(put(2, "here", 7))
    with pytest.raises(PreconditionFailed, match="another process with this number is running"):
        tree.do(join(2, "there", reachable=True))
    tree.do(join(2, "here", reachable=True))
    for supports in ({"metadata": (2, 3)}, {"metadata": (0, 0)}):
        with pytest.raises(PreconditionFailed, match="does not support version 1"):
            tree.do(join(5, "x", supports=supports))
    assert 5 not in tree.machine.incarnations


def test_a_forgotten_node_comes_back_when_nothing_counts_on_it(tree: Tree) -> None:
    tree.do(put(3, "old", 7))
    tree.do(quorum("q"))
    tree.do(ForgetNode(id=3))
    for refused in (join(3, "new"), join(3, "new", members=(1, 2))):
        with pytest.raises(PreconditionFailed, match="groups still have the node"):
            tree.do(refused)
    tree.do(SetMembers(vhost="/", name="q", group=1, members=(1, 2), config=(1, 9)))
    with pytest.raises(PreconditionFailed, match="was removed from the cluster"):
        tree.do(put(3, "old", 8))
    answer = tree.do(join(3, "new", members=(1, 2)))
    assert (answer["role"], answer["incarnation"]) == ("learner", 8)
    assert not tree.machine.forgotten
    with pytest.raises(PreconditionFailed, match="another data directory"):
        tree.do(put(3, "old", 9))
    assert tree.do(put(3, "new", 8))


def test_commands_of_an_earlier_life_are_refused_and_leave_nothing(tree: Tree) -> None:
    old, new = 2 << 56 | 7 << 24 | 1, 2 << 56 | 8 << 24 | 1
    tree.do(put(2, "a", 7))
    tree.raw(encode_command(quorum("a")), 1, session=old)
    tree.do(put(2, "a", 8))
    before = tree.machine.snapshot()
    (told,) = tree.raw(encode_command(quorum("b")), 1, session=old)
    assert told[:4] == (EFFECT_APPLIED, old, 1, 1)
    assert told[4][1] == "node 2 has a later incarnation: 8, this is 7"
    unchanged = MetadataMachine()
    unchanged.restore(before)
    unchanged.applied_index = tree.index
    assert unchanged.snapshot() == tree.machine.snapshot()
    tree.raw(encode_command(quorum("c")), 1, session=new)
    tree.do(ForgetNode(id=2))
    (told,) = tree.raw(encode_command(quorum("d")), 1, session=new)
    assert told[4][1] == "node 2 was removed from the cluster"
    assert tree.queues() == ["a", "c"]


def test_a_recovery_from_a_lost_majority_is_kept(tree: Tree) -> None:
    rows = ({"group": 1, "index": 7, "lost": 2},)
    recovery = RecordRecovery(
        cluster_id="new", former_id=CLUSTER, lost_nodes=(2, 3), time_ms=5, groups=rows
    )
    assert tree.do(recovery)
    assert tree.do(recovery) is False
    with pytest.raises(PreconditionFailed, match="the cluster has the id new"):
        tree.do(RecordRecovery(cluster_id="x", former_id="y", lost_nodes=(), time_ms=5))
    restored = MetadataMachine()
    restored.restore(tree.machine.snapshot())
    (kept,) = restored.recoveries
    assert (kept["former_id"], kept["lost_nodes"], kept["groups"]) == (CLUSTER, [2, 3], list(rows))
    assert restored.cluster_id == "new"


def test_a_recovery_forgets_lost_nodes_and_begins_new_lives_behind_unseen_ones(tree: Tree) -> None:
    for node in (1, 2, 3):
        tree.do(PutNode(id=node, name=f"n{node}", incarnation=3, directory=f"{node}" * 32))
    tree.do(RecordRecovery(cluster_id="d1" * 16, former_id=CLUSTER, lost_nodes=(2, 3), time_ms=5))
    assert tree.machine.forgotten == {2, 3}
    assert sorted(tree.machine.nodes) == [1]
    # Node 2 may have lived on, and used its lives up, in what is lost.
    joined = tree.do(
        Join(id=2, directory="e" * 32, incarnation=1, supports={"metadata": (1, 1)}, members=(1,))
    )
    assert joined["incarnation"] > 3 + STARTS_UNSEEN
    assert joined["cluster_id"] == "d1" * 16


def test_a_node_joins_above_all_incarnations_before_the_newest_recovery(tree: Tree) -> None:
    """What was lost may have let a node in that the tree does not know, or let one in again."""
    tree.machine.set_version(STEPS_SINCE)
    supports = {"metadata": (1, STEPS_SINCE)}
    assert tree.do(join(9, "a", supports=supports))["incarnation"] == 1
    former = CLUSTER
    for number in range(1, RECOVERIES_KEPT + 3):
        lost = () if number % 2 else (9,)
        new = f"c{number}"
        tree.do(RecordRecovery(cluster_id=new, former_id=former, lost_nodes=lost, time_ms=5))
        former = new
        first = number * RECOVERY_STEP + 1
        assert tree.machine.recoveries[-1]["number"] == number
        assert tree.do(join(9, f"b{number}", supports=supports))["incarnation"] == first
        assert tree.do(join(number + 10, "c", supports=supports))["incarnation"] == first
    tree.do(put(9, f"b{number}", first + 7))
    again = tree.do(join(9, "d", supports=supports))
    assert again["incarnation"] == first + 7 + STARTS_UNSEEN, "and above its own"


@pytest.mark.parametrize(("version", "recorded"), [(STEPS_SINCE - 1, False), (STEPS_SINCE, True)])
def test_a_tree_that_began_anew_records_its_recovery(
    tree: Tree, version: int, recorded: bool
) -> None:
    """The survivor's copy ended before the first entry, and the id was switched before the new one:
    the record was taken for one that was there already, so lost nodes began at 1 again."""
    tree.machine.set_version(version)
    recovery = RecordRecovery(cluster_id=CLUSTER, former_id="old", lost_nodes=(2,), time_ms=5)
    assert tree.do(recovery) is recorded
    assert tree.do(recovery) is False
    assert len(tree.machine.recoveries) == recorded


def test_a_join_after_a_recovery_keeps_its_meaning_in_earlier_versions(tree: Tree) -> None:
    tree.machine.set_version(STEPS_SINCE - 1)
    supports = {"metadata": (1, STEPS_SINCE)}
    tree.do(RecordRecovery(cluster_id="new", former_id=CLUSTER, lost_nodes=(), time_ms=5))
    assert "number" not in tree.machine.recoveries[-1]
    assert tree.do(join(9, "a", supports=supports))["incarnation"] == 1


def test_the_newest_recoveries_are_kept(tree: Tree) -> None:
    former = CLUSTER
    for number in range(RECOVERIES_KEPT + 3):
        cluster = f"{number:032x}"
        tree.do(RecordRecovery(cluster_id=cluster, former_id=former, lost_nodes=(), time_ms=number))
        former = cluster
    kept = [row["time_ms"] for row in tree.machine.recoveries]
    assert kept == list(range(3, RECOVERIES_KEPT + 3))


def test_a_version_outside_of_what_this_release_knows_is_refused(tree: Tree) -> None:
    tree.machine.set_version(1)
    unknown = MetadataMachine.VERSION + 1
    for version in (0, unknown):
        with pytest.raises(UnsupportedVersion):
            tree.machine.set_version(version)
    newer = msgspec.msgpack.decode(tree.machine.snapshot()) | {"version": unknown}
    with pytest.raises(UnsupportedVersion):
        MetadataMachine().restore(msgspec.msgpack.encode(newer))


@pytest.mark.parametrize("version", [ZONES_VERSION - 1, ZONES_VERSION])
def test_zones_and_processes_are_recorded_since_version_8(tree: Tree, version: int) -> None:
    tree.machine.set_version(version)
    given = msgspec.structs.replace(put(34, "d34", 7), zone="hall", machine=2, process=2)
    tree.do(validated(given, tree.machine))
    restored = MetadataMachine()
    restored.restore(tree.machine.snapshot())
    recorded = Place("hall", 2) if version == ZONES_VERSION else Place("", 34)
    assert restored.places()[34] == tree.machine.places()[34] == recorded


@pytest.mark.parametrize("version", [USERS_VERSION - 1, USERS_VERSION])
def test_users_that_declare_are_recorded_since_version_9(tree: Tree, version: int) -> None:
    tree.machine.set_version(version)
    for command in (
        DeclareExchange(vhost="/", name="x", type="topic", user="ann"),
        DeclareQueue(vhost="/", name="q", members=(1,), user="ann"),
        DeclareQueue(vhost="/", name="q", members=(1,), user="ben"),
        DeclareQueue(vhost="/", name="of-nobody", members=(1,)),
    ):
        checked = validated(command, tree.machine)
        if version < USERS_VERSION:
            assert b"user" not in encode_command(checked), "the last release would stop at it"
        tree.do(checked)
    restored = MetadataMachine()
    restored.restore(tree.machine.snapshot())
    assert restored.state_hash() == tree.machine.state_hash()
    user = "ann" if version == USERS_VERSION else ""
    for machine in (tree.machine, restored):
        topology = machine.vhosts["/"].topology
        assert topology.exchange("x").user == user
        assert [each.user for each in topology.queues()] == ["", user]


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


def test_every_command_has_one_rule() -> None:
    rules, timed = MetadataMachine()._rules, MetadataMachine()._timed_rules
    assert {*rules, *timed, *TOPIC_COMMANDS} == set(get_args(Command))
    assert len(rules) + len(timed) + len(TOPIC_COMMANDS) == len(get_args(Command))
    topics = MetadataMachine()._topic_rules()
    assert {*topics._rules, *topics._timed_rules} == set(TOPIC_COMMANDS)
