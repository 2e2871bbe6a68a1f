"""Machine versions in the log, and replicas that stop because they cannot follow it."""

from __future__ import annotations

from typing import Any

import crc32c
import pytest

from convoymq.kernels import batch, link_frames
from convoymq.kernels.batch import CMD_PURGE, commands
from convoymq.kernels.entries import ENTRY_VERSION, decode_version, encode_version, make_entry
from convoymq.model.config import RaftConfig
from convoymq.model.errors import InvariantViolated, Misuse, UnknownCommand
from convoymq.replication.raft.membership import Learner, Membership
from convoymq.replication.versions import command_table
from convoymq.shells.groups import transfer
from tests.unit.shells.groups.test_host import GROUP, ListMachine, Net

POISON = 666


class NextMachine(ListMachine):
    """The next release: from version 2 on it counts double."""

    VERSION = 2

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        super().apply(index, time_ms, data)
        if self.version > 1:
            self.values += [c[5] for c in commands(data) if c[2]]


class AfterNextMachine(NextMachine):
    VERSION = 3


class FragileMachine(ListMachine):
    """Trips over one value, when half of the entry is done."""

    error: BaseException = ZeroDivisionError("a bug")

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        super().apply(index, time_ms, data)
        self.effects.append((1, 0, 0, 0, None))
        if POISON in self.values:
            raise self.error

    def restore(self, state: bytes) -> None:
        if b"BROKEN" in state:
            raise ValueError("snapshot format 9 is not known")
        super().restore(state)


class StrictMachine(ListMachine):
    def command_types(self, version: int) -> bytes:
        return command_table((CMD_PURGE,))


def started(*machines: type[ListMachine], config: RaftConfig | None = None, nodes: int = 3) -> Net:
    net = Net(config)
    for node in range(1, nodes + 1):
        net.classes[node] = machines[min(node, len(machines)) - 1]
        net.add(node, tuple(range(1, nodes + 1)))
    net.run(3000)
    return net


def versions(net: Net) -> list[int]:
    return [machine.version for machine in net.machines.values()]


def notes(net: Net, event: str) -> list[tuple[int, dict[str, Any]]]:
    return [(node, fields) for node, said, fields in net.notes if said == event]


def upgrade(net: Net, node: int, release: type[ListMachine]) -> None:
    """The node is away and comes back with another release."""
    net.isolate(node)
    net.run(1000)
    net.classes[node] = release
    net.machines[node].__class__ = release
    net.join(node)
    net.run(3000)


# Versions.


@pytest.mark.provokes("raft.version_raised")
def test_a_version_is_raised_when_all_members_support_it() -> None:
    net = started(NextMachine)
    assert versions(net) == [2, 2, 2]
    net.put(net.leader, 5)
    net.run(300)
    assert [m.values for m in net.machines.values()] == [[5, 5]] * 3
    assert len(notes(net, "raft.version_raised")) == 3
    assert all(host.versions == {"list": 2} for host in net.hosts.values())


def test_a_cluster_is_upgraded_one_node_after_another() -> None:
    net = started(ListMachine)
    for node in (1, 2):
        upgrade(net, node, NextMachine)
        net.put(node, node)
        net.run(300)
        assert versions(net) == [1, 1, 1]
    upgrade(net, 3, NextMachine)
    assert versions(net) == [2, 2, 2]
    net.put(3, 3)
    net.run(300)
    assert [m.values for m in net.machines.values()] == [[1, 2, 3, 3]] * 3
    end = net.hosts[net.leader].groups[GROUP].log.last_index
    net.run(3000)
    assert net.hosts[net.leader].groups[GROUP].log.last_index == end


def test_the_version_is_the_newest_that_all_have() -> None:
    net = started(AfterNextMachine, AfterNextMachine, NextMachine)
    assert versions(net) == [2, 2, 2]
    upgrade(net, 3, AfterNextMachine)
    assert versions(net) == [3, 3, 3]


def test_no_version_is_raised_while_a_member_is_away() -> None:
    net = started(ListMachine)
    lost = next(n for n in net.hosts if n != net.leader)
    net.isolate(lost)
    for node in net.hosts:
        net.classes[node] = net.machines[node].__class__ = NextMachine
    for node in sorted(net.hosts.keys() - {lost, net.leader}):
        upgrade(net, node, NextMachine)
    assert versions(net) == [1, 1, 1]
    net.join(lost)
    net.run(3000)
    assert versions(net) == [2, 2, 2]


def test_a_version_waits_for_a_transfer_that_comes_to_nothing() -> None:
    net = started(ListMachine)
    lost, other = (n for n in net.hosts if n != net.leader)
    net.isolate(lost)
    for node in net.hosts:
        net.classes[node] = net.machines[node].__class__ = NextMachine
    upgrade(net, other, NextMachine)
    # The request to campaign is lost, and nobody has anything to write from now on.
    host = net.hosts[net.leader]
    host.groups[GROUP].core.transfer_target = other
    host.groups[GROUP]._transfer_began = host.now
    net.join(lost)
    net.run(3000)
    assert versions(net) == [2, 2, 2]


def test_a_version_can_be_raised_when_the_member_that_was_too_old_is_removed() -> None:
    net = started(NextMachine, NextMachine, ListMachine)
    net.run(1000)
    if net.leader == 3:
        assert net.hosts[3].transfer_leadership(GROUP, 1)
        net.run(1000)
    assert net.hosts[net.leader].remove_member(GROUP, 3)
    net.run(1000)
    assert versions(net)[:2] == [2, 2]


def test_versions_are_held_when_the_operator_says_so() -> None:
    net = started(NextMachine, config=RaftConfig(hold_versions=True))
    assert versions(net) == [1, 1, 1]


def test_a_new_group_gets_what_all_its_members_support() -> None:
    net = started(NextMachine, AfterNextMachine, ListMachine)
    host, kind = net.hosts[1], ListMachine.KIND
    assert host.newest_of(kind, (2, 3)) == 1
    assert host.newest_of(kind, (2,)) == 3
    # Never linked: nothing is known of it.
    assert host.newest_of(kind, (2, 5)) == 1
    held = started(NextMachine, config=RaftConfig(hold_versions=True)).hosts[1]
    assert held.newest_of(kind, (2, 3)) == 1


def test_who_does_not_support_the_version_in_force_is_not_taken_in() -> None:
    net = started(NextMachine)
    net.classes[4] = ListMachine
    net.watch(4, (1, 2, 3))
    host = net.hosts[net.leader]
    assert not host.add_member(GROUP, 4)
    assert host.member_refusal(GROUP, 4) == (
        "node 4 supports the versions 1 to 1 of the list machine as far as known;"
        " version 2 is in force"
    )
    assert not host.replace_member(GROUP, next(n for n in net.hosts if n != net.leader), 4)
    # Never linked: nothing is known of it.
    assert not host.add_member(GROUP, 5)
    net.classes[4] = NextMachine
    host.on_link_up(4, net.hosts[4].incarnation, net.supports(4))
    assert host.member_refusal(GROUP, 4) == ""
    assert host.add_member(GROUP, 4)


def test_the_version_in_force_is_in_the_snapshot_and_survives_a_restart() -> None:
    net = started(NextMachine)
    lost = next(n for n in net.hosts if n != net.leader)
    state = net.hosts[lost].groups[GROUP].snapshots.make().state
    machine = NextMachine()
    machine.restore(state)
    assert machine.version == 2
    net.add(lost, (1, 2, 3))
    net.run(3000)
    assert versions(net) == [2, 2, 2]


@pytest.mark.provokes("raft.replica_stopped")
def test_a_downgraded_node_stops_the_replica_and_keeps_its_data() -> None:
    net = started(NextMachine)
    lost = next(n for n in net.hosts if n != net.leader)
    net.put(lost, 5)
    net.run(1000)
    net.classes[lost] = ListMachine
    net.add(lost, (1, 2, 3))
    net.run(3000)
    host = net.hosts[lost]
    assert GROUP not in host.groups
    reason = host.stopped[GROUP].stopped
    assert "version 2 of the list machine is in force; this release supports 1 to 1" in reason
    assert host.stopped[GROUP].log.last_index >= 3
    assert host.storage.logs[GROUP].last_index >= 3
    assert [m.values for n, m in net.machines.items() if n != lost] == [[5, 5]] * 2


def test_a_snapshot_of_a_newer_version_replaces_nothing() -> None:
    net = started(ListMachine)
    follower = next(n for n in net.hosts if n != net.leader)
    replica = net.hosts[follower].groups[GROUP]
    end = replica.log.last_index
    begin = (transfer.BEGIN, replica.term, 1, end + 10, replica.term, b"", 4, 2)
    replica.on_message(net.leader, begin)
    assert "version 2 of the list machine" in replica.stopped
    assert replica.snapshots.receiving is None
    assert replica.log.last_index == end


# Fail-stop.


@pytest.mark.moves("convoy_raft_replicas_stopped_total")
@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), UnknownCommand("command 99")])
def test_a_follower_that_cannot_apply_stops_and_the_others_go_on(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FragileMachine, "error", error)
    net = started(ListMachine, ListMachine, FragileMachine)
    if net.leader == 3:
        assert net.hosts[3].transfer_leadership(GROUP, 1)
        net.run(1000)
    stopped: list[tuple[int, str]] = []
    net.hosts[3].on_stopped = lambda group, reason: stopped.append((group, reason))
    replica = net.hosts[3].groups[GROUP]
    net.put(1, 1)
    net.run(300)
    applied = replica.last_applied
    net.show(3)
    net.put(1, POISON)
    net.run(2000)
    assert replica.stopped == stopped[0][1]
    assert str(error) in replica.stopped
    assert stopped[0][0] == GROUP
    assert replica.last_applied == applied
    assert replica.machine.effects == []
    status = net.hosts[3].status(GROUP)
    assert (status.role, status.stopped) == ("stopped", replica.stopped)
    ((node, fields),) = notes(net, "raft.replica_stopped")
    assert (node, fields["group"], fields["index"]) == (3, GROUP, applied + 1)
    assert ("error" in fields) == isinstance(error, ZeroDivisionError)
    assert net.hosts[3].counters.replicas_stopped == 1
    net.show(3)
    # Storage keeps all that the replica has.
    assert net.hosts[3].plan(GROUP) is None
    assert replica.snapshots.plan() is None
    end = replica.log.last_index
    # Its clients are served by the others.
    for value in (7, 8):
        net.put(3, value)
        net.run(2000)
    assert [net.machines[n].values for n in (1, 2)] == [[1, POISON, 7, 8]] * 2
    assert replica.log.last_index == end
    assert net.sinks[3].gone == 1
    assert net.hosts[3].leader_of(GROUP) == net.leader
    assert net.hosts[3].read_entry(GROUP, 1).index == 1
    with pytest.raises(Misuse):
        net.hosts[3].create_group(GROUP, (1, 2, 3), ListMachine(), net.sinks[3])
    net.hosts[3].leave_group(GROUP, (1, 2))
    assert not net.hosts[3].stopped


def test_a_leader_that_cannot_apply_hands_over_at_once() -> None:
    net = started(FragileMachine, ListMachine, ListMachine)
    if net.leader != 1:
        assert net.hosts[net.leader].transfer_leadership(GROUP, 1)
        net.run(1000)
    assert net.leader == 1
    net.put(2, POISON)
    net.run(1000)
    assert net.hosts[1].stopped[GROUP].stopped
    assert net.leader in (2, 3)
    net.put(1, 5)
    net.run(2000)
    assert [net.machines[n].values for n in (2, 3)] == [[POISON, 5]] * 2


def test_a_replica_stops_at_an_entry_of_unknown_kind() -> None:
    net = started(ListMachine)
    replica = net.hosts[net.leader].groups[GROUP]
    index = replica.log.last_index + 1
    replica.sender.append(make_entry(GROUP, index, replica.term, net.time, 9, b""))
    net.run(1000)
    reasons = [h.stopped[GROUP].stopped for h in net.hosts.values() if h.stopped]
    # Those that know that it is committed. The last one does not find out without the others.
    assert len(reasons) >= 2
    assert all("entry kind 9 is not known" in text for text in reasons)
    assert not any(host.groups[GROUP].is_leader for host in net.hosts.values() if host.groups)


def test_a_replica_stops_at_an_entry_of_unknown_format() -> None:
    net = started(ListMachine)
    leader = net.leader
    follower = next(n for n in net.hosts if n != leader)
    replica = net.hosts[follower].groups[GROUP]
    end = replica.log.last_index
    data = bytearray(make_entry(GROUP, end + 1, replica.term, net.time, 0, b"").data)
    data[37] = 2
    data[4:8] = crc32c.crc32c(bytes(data[8:])).to_bytes(4, "little")
    frame = link_frames.frame(
        link_frames.FRAME_APPEND, 0, GROUP, replica.term, end, replica.term, 0, bytes(data)
    )
    net.hosts[follower].on_frame(leader, frame)
    assert replica.stopped.startswith(f"entry {end + 1}: entry format 2 is not known")
    assert replica.log.last_index == end


def test_an_invariant_that_does_not_hold_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FragileMachine, "error", InvariantViolated("the term fell"))
    net = started(FragileMachine)
    net.put(net.leader, POISON)
    with pytest.raises(InvariantViolated):
        net.run(1000)


def test_a_snapshot_that_cannot_be_restored_stops_the_replica() -> None:
    net = started(ListMachine, ListMachine, FragileMachine)
    if net.leader == 3:
        assert net.hosts[3].transfer_leadership(GROUP, 1)
        net.run(1000)
    leader = net.hosts[net.leader].groups[GROUP]
    replica = net.hosts[3].groups[GROUP]
    state = b"BROKEN"
    index = replica.log.last_index + 5
    membership = leader.snapshots.make().membership
    begin = (transfer.BEGIN, leader.term, 1, index, leader.term, membership, len(state), 1)
    for message in (
        begin,
        (transfer.STATE, leader.term, 1, 0, state),
        (transfer.END, leader.term, 1, 0),
    ):
        replica.on_message(net.leader, message)
        net.hosts[3].end_of_round()
    net.run(100)
    assert replica.stopped == f"snapshot {index}: ValueError: snapshot format 9 is not known"
    # After a restart it is found again, and stops again.
    net.add(3, (1, 2, 3))
    net.run(1000)
    again = net.hosts[3].stopped[GROUP]
    assert again is not replica
    assert "snapshot format 9 is not known" in again.stopped
    assert net.leader in (1, 2)


# What other nodes forward.


@pytest.mark.provokes("raft.forward_malformed")
def test_a_forwarded_command_that_is_not_in_the_version_in_force_is_refused() -> None:
    net = started(StrictMachine)
    follower = next(n for n in net.hosts if n != net.leader)
    builder = net.hosts[follower].builder_of(GROUP)
    session = follower << 56 | 1
    builder.add(CMD_PURGE, 0, session, 1, 0, 1)
    builder.add(99, 0, session, 2, 0, 2)
    net.run(500)
    assert [m.values for m in net.machines.values()] == [[]] * 3
    ((node, fields),) = notes(net, "raft.forward_malformed")
    assert (node, fields["node"]) == (net.leader, follower)
    assert "command type 99" in fields["error"]
    net.put(follower, 3)
    net.run(500)
    assert [m.values for m in net.machines.values()] == [[3]] * 3


def test_a_table_of_types_decides_about_all_commands_or_none() -> None:
    source: batch.CommandBuilder = batch.CommandBuilder()
    source.add(CMD_PURGE, 0, 1, 1, 0, 0)
    source.add(99, 0, 1, 2, 0, 0)
    data = source.take_forward(GROUP, 1)
    builder: batch.CommandBuilder = batch.CommandBuilder()
    with pytest.raises(ValueError, match="command type 99 is not in the version in force"):
        builder.adopt(data, link_frames.HEADER_SIZE, len(data), command_table((CMD_PURGE,)))
    assert builder.used == 0
    with pytest.raises(ValueError, match="256 bits"):
        builder.adopt(data, link_frames.HEADER_SIZE, len(data), b"\xff")
    builder.adopt(data, link_frames.HEADER_SIZE, len(data), command_table((CMD_PURGE, 99)))
    assert builder.used == len(data) - link_frames.HEADER_SIZE


def test_a_version_entry_reads_back() -> None:
    entry = make_entry(GROUP, 1, 1, 0, ENTRY_VERSION, encode_version(7))
    assert entry.size == 56
    assert decode_version(entry.data) == 7
    with pytest.raises(ValueError, match="56 bytes"):
        decode_version(entry.data + bytes(8))


# A majority that is linked and does not answer, and one that is lost.


def silence(net: Net, *nodes: int) -> None:
    for node in nodes:
        net.flushers[node].automatic = False


def test_a_leader_whose_followers_disks_are_stuck_steps_down_and_leads_again() -> None:
    net = started(ListMachine)
    old = net.leader
    others = sorted(net.hosts.keys() - {old})
    silence(net, *others)
    net.put(old, 1)
    net.run(4000)
    assert net.hosts[old].groups[GROUP].is_leader
    net.run(3000)
    assert not any(host.groups[GROUP].is_leader for host in net.hosts.values())
    assert {fields["peer"] for _, fields in notes(net, "raft.peer_silent")} == set(others)
    for node in others:
        net.flushers[node].automatic = True
        net.flushers[node].run()
    net.run(5000)
    assert net.leader
    assert [m.values for m in net.machines.values()] == [[1]] * 3


@pytest.mark.provokes("raft.peer_silent")
def test_a_leader_goes_on_when_one_of_three_disks_is_stuck() -> None:
    net = started(ListMachine)
    old = net.leader
    silence(net, next(n for n in net.hosts if n != old))
    net.put(old, 1)
    net.run(8000)
    assert net.leader == old
    assert sorted(m.values for m in net.machines.values())[1:] == [[1], [1]]


def test_a_leader_whose_majority_has_stopped_steps_down() -> None:
    net = started(ListMachine, FragileMachine)
    if net.leader != 1:
        assert net.hosts[net.leader].transfer_leadership(GROUP, 1)
        net.run(1000)
    net.put(1, POISON)
    net.run(1000)
    assert [bool(net.hosts[n].stopped) for n in (1, 2, 3)] == [False, True, True]
    net.put(1, 1)
    net.run(8000)
    assert not net.hosts[1].groups[GROUP].is_leader


def test_a_stopped_follower_is_served_by_the_leader() -> None:
    net = started(ListMachine, ListMachine, FragileMachine)
    if net.leader == 3:
        assert net.hosts[3].transfer_leadership(GROUP, 1)
        net.run(1000)
    net.put(1, POISON)
    net.run(300)
    assert net.hosts[3].stopped
    net.put(1, 1)
    net.run(6000)
    assert not net.hosts[net.leader].is_replica_live(GROUP, 3)
    assert net.hosts[net.leader].is_replica_live(GROUP, 3 - net.leader)


def survivor(net: Net, *, lags: bool = False) -> int:
    """The other two are gone for ever, with or without something that only they have."""
    node = next(n for n in net.hosts if n != net.leader)
    net.put(net.leader, 1)
    net.run(1000)
    if lags:
        net.isolate(node)
        net.put(net.leader, 2)
        net.run(1000)
    for other in sorted(net.hosts.keys() - {node}):
        net.hosts.pop(other)
        net.machines.pop(other)
        net.hosts[node].on_link_down(other, definite=True)
    net.cut.clear()
    net.run(2000)
    return node


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.provokes("raft.membership_forced")
def test_a_survivor_goes_on_and_takes_others_in(lags: bool) -> None:
    net = started(ListMachine)
    node = survivor(net, lags=lags)
    replica = net.hosts[node].groups[GROUP]
    assert not replica.is_leader
    term = replica.term
    alone = Membership(frozenset({node}), (Learner(4, 0),))
    assert replica.changes.force(alone) is None
    net.run(500)
    assert replica.is_leader
    assert replica.term > term
    assert (replica.members, replica.learners) == ((node,), (4,))
    net.put(node, 3)
    net.run(300)
    assert net.machines[node].values == [1, 3]
    net.add(4, (node,), learner=True)
    net.run(3000)
    assert net.machines[4].values == [1, 3]
    assert replica.members == tuple(sorted((node, 4)))


def test_a_membership_is_not_forced_on_a_replica_that_has_stopped() -> None:
    net = started(FragileMachine)
    node = net.leader
    replica = net.hosts[node].groups[GROUP]
    net.put(node, POISON)
    net.run(300)
    assert "a bug" in str(replica.changes.force(Membership(frozenset({node}))))
    assert not replica.core.changes.is_forced
