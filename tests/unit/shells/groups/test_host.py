"""Three hosts on real storage in memory: elections, forwarding, damage, snapshots."""

from __future__ import annotations

import gc
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from msgspec.msgpack import encode

from convoymq.broker.replica_views import ReplicaViews
from convoymq.edges.http import metrics
from convoymq.edges.http.exposition import Text
from convoymq.kernels import batch, link_frames
from convoymq.kernels.batch import CMD_PURGE, CMD_SETTLE, commands, pack_ranges
from convoymq.kernels.entries import ENTRY_COMMANDS, ENTRY_MEMBERSHIP
from convoymq.kernels.link_frames import FRAME_FORWARD, frame
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.config import RaftConfig
from convoymq.node.notes import log_note
from convoymq.replication.machine import NEVER, Effect
from convoymq.replication.raft.types import VOTE
from convoymq.replication.versions import check_version, command_table
from convoymq.shells.groups import transfer
from convoymq.shells.groups.deferred import OPENING_MS
from convoymq.shells.groups.host import ReplicaHost
from convoymq.shells.groups.replica import BEHIND
from convoymq.storage.files import MemoryDirectory
from convoymq.storage.store import Storage
from convoymq.storage.types import Damage, StorageFault
from tests.unit.storage.inline import InlineFlusher, InlineWorker

GROUP = 5


class ListMachine:
    """Remembers the args of the commands of sessions."""

    KIND = "list"
    VERSION = 1
    OLDEST_VERSION = 1

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.version = 1
        self.time_ms = 0
        self.values: list[int] = []
        self.seen: list[tuple[int, int]] = []
        """(kind, argument) of all commands."""

    def set_version(self, version: int) -> None:
        self.version = check_version(self, version)

    def command_types(self, version: int) -> bytes:
        return command_table(range(256))

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        self.seen += [(c[0], c[5]) for c in commands(data)]
        self.values += [c[5] for c in commands(data) if c[2]]

    def snapshot(self) -> bytes:
        values = b"".join(value.to_bytes(4, "big") for value in self.values)
        return self.version.to_bytes(4, "big") + values

    def restore(self, state: bytes) -> None:
        self.set_version(int.from_bytes(state[:4], "big"))
        state = state[4:]
        self.values = [int.from_bytes(state[at : at + 4], "big") for at in range(0, len(state), 4)]

    def resend(self, session_node: int) -> None:
        pass

    def live_ranges(self) -> Iterable[tuple[int, int]]:
        return ()

    def oldest_live(self) -> int:
        return NEVER

    def session_nodes(self) -> frozenset[int]:
        return frozenset()

    def next_due_ms(self) -> int | None:
        return None

    def at_rest(self) -> bool:
        return True

    def state_hash(self) -> int:
        return hash(tuple(self.values))


class Sink:
    """Remembers who was said to lead."""

    def __init__(self) -> None:
        self.leaders: list[int | None] = []
        self.gone = 0
        self.versions: list[int] = []

    def on_effects(self, effects: Sequence[Effect], replica: Any) -> None:
        pass

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        self.leaders.append(leader)

    def on_link_frame(self, *arguments: Any) -> None:
        pass

    def on_restored(self) -> None:
        pass

    def on_version_raised(self, replica: Any) -> None:
        self.versions.append(replica.machine.version)

    def on_replica_gone(self) -> None:
        self.gone += 1


class Timer:
    def __init__(self, due: int, call: Any) -> None:
        self.due, self.call = due, call

    def cancel(self) -> None:
        self.call = None


class Net:
    """Clock and links of the three hosts."""

    def __init__(self, config: RaftConfig | None = None) -> None:
        self.config = config
        self.classes: dict[int, type[ListMachine]] = {}
        """node -> the machine of its release."""
        self.notes: list[tuple[int, str, dict[str, Any]]] = []
        self.time = 1_000_000
        self.timers: list[Timer] = []
        self.hosts: dict[int, ReplicaHost] = {}
        self.machines: dict[int, ListMachine] = {}
        self.sinks: dict[int, Sink] = {}
        self.directories: dict[int, MemoryDirectory] = {}
        self.flushers: dict[int, InlineFlusher] = {}
        self.queue: deque[tuple[int, int, bytes]] = deque()
        self.cut: set[int] = set()
        #: node -> those that take no bulk of it; (node, to) -> sizes of what it sent.
        self.full: dict[int, set[int]] = {}
        self.sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
        #: Hosts that asked for the end of a round. Here that a frame was sent does not end one.
        self.woken: set[int] = set()
        self.sent = 0
        self.random = random.Random(1).random

    def now_ms(self) -> int:
        return self.time

    def monotonic_ms(self) -> int:
        return self.time

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> Timer:
        timer = Timer(self.time + delay_ms, lambda: callback(*arguments))
        self.timers.append(timer)
        return timer

    def add(self, node: int, members: Sequence[int], **options: Any) -> None:
        self._start(node)
        self.machines[node] = self.classes.get(node, ListMachine)()
        self.hosts[node].create_group(
            GROUP, members, self.machines[node], self.sinks[node], **options
        )
        self._link(node)

    def watch(self, node: int, members: Sequence[int]) -> None:
        self._start(node)
        self.hosts[node].watch_group(GROUP, members, self.sinks[node])
        self._link(node)

    def _start(self, node: int) -> None:
        net = self

        class Transport:
            full = net.full.setdefault(node, set())

            def send(self, to: int, head: bytes, body: Sequence[bytes] = ()) -> None:
                net.sent += 1
                net.sizes[node, to].append(len(head) + sum(map(len, body)))
                if not {node, to} & net.cut and to in net.hosts:
                    net.queue.append((node, to, head + b"".join(body)))

            def is_connected(self, to: int) -> bool:
                return to not in net.cut

            def backlog_bytes(self, to: int) -> int:
                return 0

        directory = self.directories.setdefault(node, MemoryDirectory())
        flusher = self.flushers[node] = InlineFlusher(automatic=True)
        worker = InlineWorker(automatic=True)
        storage = Storage(directory, flusher, worker, RaftConfig(wal_preallocate=False))
        storage.recover()
        host = ReplicaHost(
            node=node,
            incarnation=self.time,
            storage=storage,
            transport=Transport(),
            clock=self,
            config=self.config,
            on_dirty=lambda: self.woken.add(node),
        )
        host.on_note = lambda event, fields: self.note(node, event, fields)
        self.hosts[node] = host
        self.sinks[node] = Sink()

    def show(self, node: int) -> None:
        """Renders the metrics of a host, as a node does."""
        text = Text({}, open_metrics=False)
        text.gauge("identity_info", 1, {"rabbitmq_node": str(node)})
        metrics._hosted(
            text, SimpleNamespace(replicas=ReplicaViews(self.hosts[node], MetadataMachine()))
        )
        text.render()

    def note(self, node: int, event: str, fields: dict[str, Any]) -> None:
        self.notes.append((node, event, fields))
        log_note(structlog.get_logger(), event, fields)

    def _link(self, node: int) -> None:
        for other in self.hosts:
            if other != node:
                self.hosts[other].on_link_up(node, self.time, self.supports(node))
                self.hosts[node].on_link_up(other, self.time, self.supports(other))

    def supports(self, node: int) -> dict[str, tuple[int, int]]:
        release = self.classes.get(node, ListMachine)
        return {release.KIND: (release.OLDEST_VERSION, release.VERSION)}

    def isolate(self, node: int) -> None:
        self.cut.add(node)
        for other in self.hosts:
            if other != node:
                self.hosts[other].on_link_down(node, definite=False)
                self.hosts[node].on_link_down(other, definite=False)

    def join(self, node: int) -> None:
        self.cut.discard(node)
        for other in self.hosts:
            if other != node and other not in self.cut:
                mine, others = self.hosts[node].incarnation, self.hosts[other].incarnation
                self.hosts[other].on_link_up(node, mine, self.supports(node))
                self.hosts[node].on_link_up(other, others, self.supports(other))

    def settle(self, lost: int = 0) -> None:
        """All that can happen without time passing; what `lost` sends or should get is dropped."""
        for _ in range(200):
            woken, self.woken = self.woken, set()
            for node in sorted(woken & self.hosts.keys()):
                self.hosts[node].end_of_round()
                if self.hosts[node].deferred.release_due:
                    self.hosts[node].deferred.release()
            if not self.queue and not self.woken:
                break
            for _ in range(len(self.queue)):
                sender, to, data = self.queue.popleft()
                if lost not in (sender, to):
                    self.hosts[to].on_frame(sender, data)

    def run(self, ms: int) -> None:
        end = self.time + ms
        while self.time < end:
            self.settle()
            self.time += 10
            due = [t for t in self.timers if t.due <= self.time and t.call]
            self.timers = [t for t in self.timers if t.due > self.time and t.call]
            for timer in due:
                if timer.call is not None:
                    timer.call()
            if self.time % 100 == 0:
                for host in self.hosts.values():
                    host.tick()

    @property
    def leader(self) -> int:
        here = [n for n, host in self.hosts.items() if GROUP in host.groups and n not in self.cut]
        led = [n for n in here if self.hosts[n].groups[GROUP].is_leader]
        assert len(led) == 1, led
        return led[0]

    def put(self, node: int, value: int) -> None:
        self.hosts[node].builder_of(GROUP).add(CMD_PURGE, 0, node << 56 | 1, value, 0, value)

    def settle_message(self, node: int, value: int) -> None:
        """A settle of a session; `value` is what it leaves in the machine."""
        body = pack_ranges((1, 1))
        self.hosts[node].builder_of(GROUP).add(CMD_SETTLE, 0, node << 56 | 2, value, 1, value, body)


@pytest.fixture
def net() -> Net:
    made = Net()
    for node in (1, 2, 3):
        made.add(node, (1, 2, 3))
    made.run(3000)
    return made


def test_commands_of_every_node_reach_every_machine(net: Net) -> None:
    for node in (1, 2, 3):
        net.put(node, node)
        net.run(300)
    assert [m.values for m in net.machines.values()] == [[1, 2, 3]] * 3
    assert all(sink.leaders[-1] == net.leader for sink in net.sinks.values())


def test_a_new_group_is_led_before_anything_is_sent_or_written() -> None:
    net = Net()
    founder = (2, net.time)
    for node in (1, 2, 3):
        net.add(node, (1, 2, 3), founder=founder)
        assert [n for n in net.sinks if net.sinks[n].leaders] == ([2] if node > 1 else [])
    assert net.leader == 2
    assert net.hosts[2].groups[GROUP].can_commit
    net.put(2, 6)
    net.run(300)
    net.put(1, 5)
    net.run(300)
    assert [sorted(m.values) for m in net.machines.values()] == [[5, 6]] * 3
    assert [net.hosts[n].groups[GROUP].term for n in (1, 2, 3)] == [1, 1, 1]
    assert not [note for note in net.notes if note[1] == "raft.role_changed"]


@pytest.mark.parametrize("members", [(1, 2, 3), (1, 2, 3, 4, 5)])
def test_all_members_hear_at_once_that_a_new_group_is_led(members: tuple[int, ...]) -> None:
    net = Net()
    for node in members:
        net.add(node, members, founder=(2, net.time))
    # No host ticks before.
    net.run(90)
    assert [sink.leaders for sink in net.sinks.values()] == [[2]] * len(members)


def founded(*nodes: int) -> Net:
    """Members of a group that node 2 founds."""
    made = Net()
    for node in nodes or (1, 2, 3):
        made.add(node, (1, 2, 3), founder=(2, made.time))
    return made


def kinds_of(net: Net, node: int) -> list[int]:
    """Kinds of the entries in a node's log."""
    log = net.hosts[node].groups[GROUP].log
    return [log.entry(index).kind for index in range(1, log.last_index + 1)]


def test_a_group_that_nobody_uses_opens_its_term_soon() -> None:
    net = founded()
    net.settle()
    assert net.leader == 2
    assert kinds_of(net, 2) == []
    net.run(10 * OPENING_MS)
    assert [kinds_of(net, node) for node in (1, 2, 3)] == [[ENTRY_MEMBERSHIP]] * 3
    assert net.hosts[2].groups[GROUP].commit_index == 1
    assert net.hosts[1].leader_of(GROUP) == 2


def test_the_first_command_opens_the_term() -> None:
    net = founded()
    net.settle()
    net.put(2, 7)
    net.settle()
    assert kinds_of(net, 2) == [ENTRY_MEMBERSHIP, ENTRY_COMMANDS]
    assert net.machines[2].values == [7]
    net.run(3 * OPENING_MS)
    assert kinds_of(net, 2) == [ENTRY_MEMBERSHIP, ENTRY_COMMANDS]


def test_a_founder_that_hands_over_opens_its_term_before() -> None:
    net = founded()
    net.settle()
    assert net.hosts[2].transfer_leadership(GROUP, 3)
    assert kinds_of(net, 2) == [ENTRY_MEMBERSHIP]
    net.run(500)
    assert net.leader == 3


def test_a_founder_that_leads_no_more_opens_nothing() -> None:
    net = founded(1, 2)
    net.settle()
    replica = net.hosts[2].groups[GROUP]
    # A member that had not heard of it stands, and is elected.
    net.hosts[2].on_frame(
        1, frame(link_frames.FRAME_RAFT, 0, GROUP, 2, 0, 0, 0, encode([VOTE, 2, 0, 0]))
    )
    assert not replica.is_leader
    assert replica.core.voted_for == 1
    net.hosts[2].deferred._open_terms()
    assert kinds_of(net, 2) == []
    net.run(1000)
    assert kinds_of(net, net.leader)[0] == ENTRY_MEMBERSHIP


def test_a_removed_founder_opens_nothing() -> None:
    net = founded()
    net.hosts[2].remove_group(GROUP)
    net.run(2 * OPENING_MS)
    assert GROUP not in net.hosts[2].groups


def test_a_founder_without_a_majority_leads_and_cannot_commit() -> None:
    net = Net()
    net.add(2, (1, 2, 3), founder=(2, net.time))
    assert net.leader == 2
    assert not net.hosts[2].groups[GROUP].can_commit


def test_a_founder_whose_replica_was_removed_does_not_lead_the_first_term_again() -> None:
    net = Net()
    for node in (1, 2, 3):
        net.add(node, (1, 2, 3), founder=(2, net.time))
    net.run(500)
    assert net.leader == 2
    host = net.hosts[2]
    host.remove_group(GROUP)
    again = host.create_group(
        GROUP, (1, 2, 3), ListMachine(), net.sinks[2], founder=(2, host.incarnation)
    )
    assert again.core.lost_state
    assert not again.is_leader


def test_nothing_keeps_a_replica_that_was_removed(net: Net) -> None:
    net.put(1, 5)
    net.run(300)
    host = net.hosts[1]
    machine = weakref.ref(net.machines.pop(1))
    assert machine() is not None
    # Its entries lie in a WAL file that stays for long.
    assert host.removals == 0
    host.remove_group(GROUP)
    assert host.removals == 1
    net.run(300)
    net.timers.clear()
    gc.collect()
    assert machine() is None


def test_a_founder_in_its_next_life_is_elected_as_everybody() -> None:
    net = Net()
    founder = (2, net.time - 1)
    for node in (1, 2, 3):
        net.add(node, (1, 2, 3), founder=founder)
    assert not any(host.groups[GROUP].is_leader for host in net.hosts.values())
    net.run(1000)
    assert net.hosts[net.leader].groups[GROUP].term == 2


def full_of_elections(net: Net, but: int) -> None:
    """Three seconds of groups wait for their elections on all nodes but one."""

    class Other:
        def __init__(self) -> None:
            self.election_timer = self

        def begin(self) -> bool:
            return True

    other: Any = Other()
    for node, host in net.hosts.items():
        if node != but:
            for _ in range(3000):
                host.deferred.defer_election(other)


def test_a_group_that_nobody_uses_elects_when_it_is_its_turn(net: Net) -> None:
    old = net.leader
    full_of_elections(net, old)
    net.isolate(old)
    net.run(2000)
    assert not any(h.groups[GROUP].is_leader for n, h in net.hosts.items() if n != old)
    net.run(2000)
    assert net.leader != old


def test_a_command_hurries_the_election(net: Net) -> None:
    old = net.leader
    full_of_elections(net, old)
    net.isolate(old)
    net.run(500)
    other = min(n for n in net.hosts if n != old)
    net.put(other, 7)
    net.run(500)
    assert net.leader == other


def test_a_group_in_use_elects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    monkeypatch.setattr(ListMachine, "session_nodes", lambda _: frozenset({2}))
    for node in (1, 2, 3):
        net.add(node, (1, 2, 3))
    net.run(1000)
    old = net.leader
    full_of_elections(net, old)
    net.isolate(old)
    net.run(500)
    assert net.leader != old


def test_a_watcher_with_commands_hurries_an_election() -> None:
    net = Net()
    for node in (1, 2, 3):
        net.add(node, (1, 2, 3))
    net.watch(4, (1, 2, 3))
    net.run(1000)
    old = net.leader
    full_of_elections(net, old)
    net.isolate(old)
    net.run(300)
    assert not any(h.groups[GROUP].is_leader for n, h in net.hosts.items() if n not in (4, old))
    net.hosts[4].builder_of(GROUP).add(CMD_PURGE, 0, 4 << 56 | 1, 9, 0, 9)
    net.run(1000)
    assert net.leader != old


def test_a_quiet_group_sends_nothing(net: Net) -> None:
    net.run(2000)
    before = net.sent
    net.run(5000)
    assert net.sent == before
    assert not [host for host in net.hosts.values() if host.active]


def test_an_isolated_leader_is_replaced_and_catches_up(net: Net) -> None:
    old = net.leader
    net.isolate(old)
    net.run(3000)
    assert net.leader != old
    assert not net.hosts[old].groups[GROUP].is_leader
    net.put(net.leader, 7)
    net.run(300)
    net.join(old)
    net.run(2000)
    assert [m.values for m in net.machines.values()] == [[7]] * 3


def test_a_leader_that_proposed_its_own_removal_is_missed_when_it_is_lost(net: Net) -> None:
    old = net.leader
    others = [n for n in net.hosts if n != old]
    assert net.hosts[old].remove_member(GROUP, old)
    # Both have the entry, and that they do is not heard any more.
    net.hosts[old].end_of_round()
    while net.queue:
        sender, to, data = net.queue.popleft()
        if sender == old:
            net.hosts[to].on_frame(sender, data)
    assert [net.hosts[n].groups[GROUP].members for n in others] == [tuple(others)] * 2
    assert all(
        net.hosts[n].groups[GROUP].commit_index < net.hosts[n].groups[GROUP].log.last_index
        for n in others
    )
    net.isolate(old)
    net.run(3000)
    assert net.leader in others
    net.put(net.leader, 7)
    net.run(300)
    assert [net.machines[n].values for n in others] == [[7]] * 2


def test_leadership_moves_on_request(net: Net) -> None:
    old = net.leader
    target = next(n for n in net.hosts if n != old)
    assert net.hosts[old].transfer_leadership(GROUP, target)
    net.run(1000)
    assert net.leader == target


def test_a_follower_serves_its_clients_when_it_hears_a_doubted_leader_again(net: Net) -> None:
    for node in net.hosts:
        net.put(node, node)
        net.run(300)
    leader = net.leader
    follower = next(n for n in net.hosts if n != leader)
    host, sink = net.hosts[follower], net.sinks[follower]
    term, end = host.groups[GROUP].term, host.groups[GROUP].log.last_index
    # Long enough for its election timer; the others hear the leader and refuse.
    host.on_suspect(leader)
    net.run(3000)
    assert sink.leaders[-1] is None
    host.on_unsuspect(leader)
    net.run(3000)
    # The same leader in the same term, and not an entry from which the follower could know it.
    assert (host.groups[GROUP].term, host.groups[GROUP].log.last_index) == (term, end)
    assert host.groups[GROUP].established_leader == leader
    assert sink.leaders[-1] == leader
    net.put(follower, 9)
    net.run(300)
    assert [m.values for m in net.machines.values()] == [[1, 2, 3, 9]] * 3


def test_a_session_that_begins_behind_the_end_of_its_node_is_told_of_it(net: Net) -> None:
    leader = net.leader
    lost = next(n for n in net.hosts if n != leader)
    host, machine = net.hosts[leader], net.machines[leader]
    net.put(lost, 7)
    net.hosts[lost].end_of_round()
    while net.queue:
        sender, to, data = net.queue.popleft()
        net.hosts[to].on_frame(sender, data)
    # In the leader's batch: the machine knows of no session of that node yet.
    assert machine.seen[-1:] != [(CMD_PURGE, 7)]
    host.on_link_down(lost, definite=False)
    host.end_of_round()
    assert machine.seen[-1:] != [(CMD_PURGE, 7)]
    host.on_link_up(lost, host.incarnation_of(lost) + 1)
    net.run(300)
    at = machine.seen.index((CMD_PURGE, 7))
    assert machine.seen[at + 1 :] == [(batch.CMD_NODE_DOWN, lost), (batch.CMD_NODE_UP, lost)]


def test_a_quiet_group_does_not_care_for_nodes_without_a_session(net: Net) -> None:
    leader = net.leader
    other = next(n for n in net.hosts if n != leader)
    host = net.hosts[leader]
    end = host.groups[GROUP].log.last_index
    host.on_suspect(other)
    host.on_unsuspect(other)
    net.run(300)
    assert host.groups[GROUP].log.last_index == end


def test_a_leader_is_heard_while_its_snapshot_is_replacing_the_log(net: Net) -> None:
    leader = net.leader
    lost = next(n for n in net.hosts if n != leader)
    net.isolate(lost)
    net.run(1000)
    for value in (1, 2):
        net.put(leader, value)
        net.run(300)
    replica, sink = net.hosts[lost].groups[GROUP], net.sinks[lost]
    snapshot, term = net.hosts[leader].groups[GROUP].snapshots.make(), replica.term
    begin = (
        *(transfer.BEGIN, term, 1, snapshot.index),
        *(snapshot.term, snapshot.membership, len(snapshot.state), 1),
    )
    replica.on_message(leader, begin)
    replica.on_message(leader, (transfer.STATE, term, 1, 0, snapshot.state))
    # The new log stands, but is not durable: the machine's state is older than where it begins.
    flusher = net.flushers[lost]
    flusher.automatic = False
    replica.on_message(leader, (transfer.END, term, 1, 0))
    assert replica.log.first_index > replica.last_applied + 1
    replica.on_unreachable(leader)
    net.run(1000)
    assert not replica.core.leader
    replica.on_message(leader, begin)
    assert replica.core.leader == leader
    assert not replica.established_leader
    flusher.automatic = True
    flusher.run()
    net.join(lost)
    net.run(1000)
    assert net.machines[lost].values == [1, 2]
    assert (replica.established_leader, sink.leaders[-1]) == (leader, leader)


def test_a_snapshot_that_its_leader_gave_up_does_not_keep_a_follower_from_entries(
    net: Net,
) -> None:
    """A BEGIN that comes late, behind the end of its transfer. Found by the simulator, seed
    5007307."""
    leader = net.leader
    lost = next(n for n in net.hosts if n != leader)
    net.isolate(lost)
    net.run(1000)
    for value in (1, 2):
        net.put(leader, value)
        net.run(300)
    replica = net.hosts[lost].groups[GROUP]
    snapshot, term = net.hosts[leader].groups[GROUP].snapshots.make(), replica.term
    replica.on_message(
        leader,
        (
            *(transfer.BEGIN, term, 1, snapshot.index),
            *(snapshot.term, snapshot.membership, len(snapshot.state), 1),
        ),
    )
    assert replica.snapshots.receiving is not None
    net.join(lost)
    net.run(1000)
    assert replica.snapshots.receiving is None
    assert net.machines[lost].values == [1, 2]


def test_who_left_the_group_tells_those_that_still_forward_to_it(net: Net) -> None:
    net.watch(4, (1, 2, 3))
    net.run(500)
    old = net.leader
    sink = net.sinks[4]
    assert sink.leaders == [old]
    assert net.hosts[old].remove_member(GROUP, old)
    net.run(3000)
    others = [n for n in (1, 2, 3) if n != old]
    assert net.sinks[old].gone == 0
    net.hosts[old].leave_group(GROUP, others)
    assert net.sinks[old].gone == 1
    net.run(500)
    # Nobody tells a node without sessions who leads now.
    assert sink.leaders == [old]
    net.put(4, 1)
    net.run(1000)
    assert sink.leaders == [old, None, net.leader]
    net.put(4, 2)
    net.run(300)
    assert [net.machines[n].values for n in others] == [[2], [2]]
    assert not net.hosts[4].active


def stale(net: Net) -> list[dict[str, Any]]:
    return [fields for _, event, fields in net.notes if event == "raft.forward_stale"]


@pytest.mark.provokes("raft.forward_stale")
@pytest.mark.moves("convoy_raft_forwards_stale_total")
def test_a_forward_of_another_term_is_dropped_and_its_sender_told(net: Net) -> None:
    net.watch(4, (1, 2, 3))
    net.run(500)
    led = net.leader
    term = net.hosts[led].groups[GROUP].term
    net.hosts[4].watched[GROUP].term = term - 1
    net.show(led)
    net.put(4, 1)
    net.run(300)
    net.show(led)
    assert net.machines[led].values == []
    assert [(found["node"], found["term"], found["sent_in"]) for found in stale(net)] == [
        (4, term, term - 1)
    ]
    assert net.hosts[led].counters.forwards_stale == 1
    # Told anew, its clients send again.
    assert net.sinks[4].leaders == [led, led]
    net.put(4, 2)
    net.run(300)
    assert [net.machines[n].values for n in (1, 2, 3)] == [[2]] * 3


def test_a_follower_that_missed_an_election_learns_the_term_and_sends_again(net: Net) -> None:
    led = net.leader
    third, other = (n for n in (1, 2, 3) if n != led)
    net.run(500)
    net.cut.add(other)
    for to in (third, led):
        assert net.hosts[net.leader].transfer_leadership(GROUP, to)
        net.settle()
    assert net.leader == led
    net.cut.discard(other)
    follower = net.hosts[other].groups[GROUP]
    assert follower.leader == led
    assert follower.term < net.hosts[led].groups[GROUP].term
    seen = len(net.sinks[other].leaders)
    net.put(other, 1)
    net.run(1000)
    assert len(stale(net)) == 1
    assert net.sinks[other].leaders[seen:] == [None, led]
    net.put(other, 2)
    net.run(300)
    assert [net.machines[n].values for n in (1, 2, 3)] == [[2]] * 3


def test_a_node_that_never_had_the_group_refuses_what_is_forwarded(net: Net) -> None:
    net.watch(4, (1, 2, 3))
    net.run(500)
    led = net.leader
    net.hosts[4].remove_group(GROUP)
    other = next(n for n in (1, 2, 3) if n != led)
    net.hosts[4].on_frame(other, frame(FRAME_FORWARD, 0, GROUP, 9, 0, 0, 0))
    assert [(sender, to) for sender, to, _ in net.queue] == [(4, other)]
    net.run(300)
    # A replica knows better.
    assert net.hosts[other].groups[GROUP].established_leader == led


def test_who_watches_goes_on_asking_while_it_cannot_reach_the_leader(net: Net) -> None:
    net.watch(4, (1, 2, 3))
    net.run(500)
    old = net.leader
    sink = net.sinks[4]
    # The others hear it still, and say so.
    net.hosts[4].on_suspect(old)
    net.run(1000)
    assert sink.leaders[-1] is None
    # Nobody tells a node without sessions who leads after that.
    net.isolate(old)
    net.run(5000)
    assert net.leader != old
    assert sink.leaders[-1] == net.leader
    net.put(4, 3)
    net.run(300)
    assert net.machines[net.leader].values == [3]
    assert not net.hosts[4].active


def test_a_leader_learns_from_a_refused_snapshot_that_its_term_is_over(net: Net) -> None:
    leader = net.leader
    net.put(leader, 1)
    net.run(300)
    lost, other = (n for n in net.hosts if n != leader)
    net.isolate(lost)
    replica, former = net.hosts[lost].groups[GROUP], net.hosts[leader].groups[GROUP]
    snapshot, term = former.snapshots.make(), former.term
    replica.on_message(other, (VOTE, term + 1, 0, 0))
    assert replica.term == term + 1
    # The leader sends nothing else: it is not told that the follower can be reached.
    net.cut.discard(lost)
    replica.on_message(
        leader,
        (
            *(transfer.BEGIN, term, 1, snapshot.index),
            *(snapshot.term, snapshot.membership, len(snapshot.state)),
        ),
    )
    assert replica.snapshots.receiving is None
    net.run(30)
    assert not former.is_leader
    net.join(lost)
    net.run(3000)
    assert net.hosts[net.leader].groups[GROUP].term > term


def test_a_wiped_node_is_taken_in_anew(net: Net) -> None:
    net.put(net.leader, 4)
    net.run(300)
    lost = next(n for n in net.hosts if n != net.leader)
    net.isolate(lost)
    net.hosts.pop(lost).groups[GROUP].stop()
    net.directories[lost] = MemoryDirectory()
    net.run(500)
    net.cut.discard(lost)
    net.add(lost, (1, 2, 3), wiped=True)
    net.run(6000)
    assert net.machines[lost].values == [4]
    assert not net.hosts[lost].groups[GROUP].core.lost_state
    assert net.hosts[net.leader].groups[GROUP].members == (1, 2, 3)


def _last(net: Net, node: int) -> int:
    return net.hosts[node].groups[GROUP].log.last_index


def _pace(net: Net) -> tuple[int, int, int]:
    """(leader, who gets entries at once, who is deferred)."""
    leader = net.leader
    net.put(leader, 1)
    net.run(100)
    peers = net.hosts[leader].groups[GROUP].core.peers
    [quick] = [peer.node for peer in peers if not peer.is_deferred]
    [slow] = [peer.node for peer in peers if peer.is_deferred]
    return leader, quick, slow


def test_a_follower_that_nobody_waits_for_gets_entries_together(net: Net) -> None:
    leader, quick, slow = _pace(net)
    end = _last(net, leader)
    for value in (2, 3, 4):
        net.put(leader, value)
        net.settle()
        assert net.machines[leader].values[-1] == value
    assert (_last(net, leader), _last(net, quick), _last(net, slow)) == (end + 3, end + 3, end)
    net.sent = 0
    net.run(30)
    # One append, its answer, and the commit index with the next append or tick.
    assert _last(net, slow) == end + 3
    assert net.sent <= 3
    net.run(200)
    assert net.machines[slow].values == [1, 2, 3, 4]


def test_when_something_waits_for_its_majority_nobody_is_deferred(net: Net) -> None:
    leader, quick, slow = _pace(net)
    end = _last(net, leader)
    net.put(leader, 2)
    net.settle(lost=quick)
    assert net.hosts[leader].groups[GROUP].commit_index == end
    net.time += 1
    net.put(leader, 3)
    net.settle(lost=quick)
    # The others take a while, as far as is known.
    assert _last(net, slow) == end
    net.time += 1
    net.put(leader, 4)
    net.settle(lost=quick)
    # The next entry, of both commands, found the first one waiting for too long.
    assert net.hosts[leader].groups[GROUP].commit_index == end + 2
    assert _last(net, slow) == end + 2
    assert net.machines[leader].values == [1, 2, 3, 4]


def test_commits_that_come_late_but_steadily_do_not_hide_that_they_are_late(net: Net) -> None:
    leader, quick, slow = _pace(net)
    replica = net.hosts[leader].groups[GROUP]
    end = _last(net, leader)
    late: list[tuple[int, int, bytes]] = []
    for value in range(2, 12):
        net.put(leader, value)
        net.time += 1
        net.hosts[leader].end_of_round()
        late += [each for each in net.queue if each[1] == quick]
        rest = [each for each in net.queue if each[1] != quick]
        net.queue.clear()
        net.queue.extend(rest)
        if len(late) > 5:
            # One entry is committed for each that is appended, five behind.
            net.queue.append(late.pop(0))
        net.settle()
    assert _last(net, slow) > end
    assert replica.commit_index == _last(net, leader)


def test_a_silent_follower_changes_places_with_the_deferred_one(net: Net) -> None:
    leader, quick, slow = _pace(net)
    net.put(leader, 2)
    net.settle(lost=quick)
    net.time += 20
    for timer in [t for t in net.timers if t.due <= net.time and t.call]:
        timer.call()
    net.settle(lost=quick)
    assert net.machines[leader].values == [1, 2]
    end = _last(net, leader)
    net.put(leader, 3)
    net.settle(lost=quick)
    # At once: it is counted on now.
    assert _last(net, slow) == end + 1
    assert net.machines[leader].values == [1, 2, 3]


def test_a_node_with_a_session_is_never_deferred(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _, slow = _pace(net)
    net.put(leader, 2)
    net.settle()
    end = _last(net, leader)
    assert _last(net, slow) == end - 1
    # Its first session comes while an entry is held back: the next commit notice brings that, too.
    monkeypatch.setattr(net.machines[leader], "session_nodes", lambda: frozenset({slow}))
    net.hosts[leader].mark_apply(net.hosts[leader].groups[GROUP])
    net.settle()
    assert _last(net, slow) == end
    assert net.machines[slow].values == [1, 2]
    net.run(100)
    net.put(leader, 3)
    net.settle()
    assert net.machines[slow].values == [1, 2, 3]


def test_leadership_can_go_to_the_deferred_one(net: Net) -> None:
    leader, _, slow = _pace(net)
    net.put(leader, 2)
    net.settle()
    assert _last(net, slow) < _last(net, leader)
    assert net.hosts[leader].transfer_leadership(GROUP, slow)
    net.settle()
    assert net.leader == slow


def test_late_frames_of_a_group_that_was_removed_are_not_kept(net: Net) -> None:
    leader = net.leader
    lost = next(n for n in net.hosts if n != leader)
    host = net.hosts[lost]
    host.remove_group(GROUP)
    net.put(leader, 1)
    net.run(500)
    assert not host.intake._early
    # As a member again it takes part as before.
    host.create_group(GROUP, (1, 2, 3), ListMachine(), net.sinks[lost], wiped=True)
    net.run(3000)
    assert host.groups[GROUP].last_applied == net.hosts[leader].groups[GROUP].last_applied


def test_a_settle_waits_for_what_comes_next(net: Net) -> None:
    leader = net.leader
    net.put(leader, 1)
    net.run(100)
    end = _last(net, leader)
    net.settle_message(leader, 2)
    net.settle()
    net.settle_message(leader, 3)
    net.settle()
    assert _last(net, leader) == end
    net.put(leader, 4)
    net.settle()
    assert _last(net, leader) == end + 1
    assert net.machines[leader].values == [1, 2, 3, 4]


def test_a_settle_does_not_wait_for_long(net: Net) -> None:
    leader = net.leader
    for value in (1, 2):
        net.settle_message(leader, value)
        net.settle()
        end = _last(net, leader)
        assert not net.machines[leader].values
        net.time += 5
    # The second one joined the first one, and did not begin to wait anew.
    net.run(30)
    assert _last(net, leader) == end + 1
    assert net.machines[leader].values == [1, 2]
    net.settle_message(leader, 3)
    net.settle()
    assert _last(net, leader) == end + 1
    net.run(30)
    assert net.machines[leader].values == [1, 2, 3]


def test_a_settle_that_somebody_waits_for_goes_at_once(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = net.leader
    monkeypatch.setattr(net.machines[leader], "at_rest", lambda: False)
    net.settle_message(leader, 1)
    net.settle()
    assert net.machines[leader].values == [1]


def test_a_settle_goes_at_once_while_something_is_not_committed(net: Net) -> None:
    leader = net.leader
    net.put(leader, 1)
    net.hosts[leader].end_of_round()
    end = _last(net, leader)
    net.time += net.hosts[leader].config.gather_ms
    net.settle_message(leader, 2)
    net.hosts[leader].end_of_round()
    assert _last(net, leader) == end + 1
    net.settle()
    assert net.machines[leader].values == [1, 2]


def test_a_settle_that_waits_does_not_stay_with_who_led(net: Net) -> None:
    leader = net.leader
    net.put(leader, 1)
    net.run(300)
    net.settle_message(leader, 2)
    net.settle()
    builder = net.hosts[leader].builder_of(GROUP)
    assert builder.held
    to = next(n for n in net.hosts if n != leader)
    assert net.hosts[leader].transfer_leadership(GROUP, to)
    net.run(300)
    # Its session has it among what is pending, and repeats that to the new leader.
    assert net.leader == to
    assert not builder.used
    assert not builder.held


def test_commands_gather_while_an_entry_is_under_way(net: Net) -> None:
    leader = net.leader
    replica = net.hosts[leader].groups[GROUP]
    before = replica.log.last_index
    for value in (1, 2, 3):
        net.put(leader, value)
        net.hosts[leader].end_of_round()
    assert replica.log.last_index == before + 1, "the second and third wait for the first's commit"
    net.settle()
    assert replica.log.last_index == before + 2
    assert [machine.values for machine in net.machines.values()][leader - 1] == [1, 2, 3]


def test_commands_do_not_gather_for_long_nor_without_bound(net: Net) -> None:
    leader = net.leader
    net.cut |= {1, 2, 3} - {leader}
    replica = net.hosts[leader].groups[GROUP]
    config = net.hosts[leader].config
    before = replica.log.last_index
    net.put(leader, 1)
    net.hosts[leader].end_of_round()
    net.put(leader, 2)
    net.hosts[leader].end_of_round()
    assert replica.log.last_index == before + 1
    net.time += config.gather_ms
    net.put(leader, 3)
    net.hosts[leader].end_of_round()
    assert replica.log.last_index == before + 2, "nothing is committed, and no entry is so new"
    net.put(leader, 4)
    net.hosts[leader].end_of_round()
    assert replica.log.last_index == before + 2
    body = bytes(config.gather_bytes_max)
    net.hosts[leader].builder_of(GROUP).add(CMD_PURGE, 0, leader << 56 | 1, 5, 0, 5, body)
    net.hosts[leader].end_of_round()
    assert replica.log.last_index == before + 3, "so much has gathered"
    net.put(leader, 6)
    net.hosts[leader].end_of_round()
    assert replica.log.last_index == before + 3
    net.run(2 * config.deferral_ms)
    assert replica.log.last_index == before + 4, "nothing else has happened"


def test_commands_of_other_nodes_do_not_wait_again(net: Net) -> None:
    leader = net.leader
    other = next(node for node in net.hosts if node != leader)
    replica = net.hosts[leader].groups[GROUP]
    net.put(leader, 1)
    net.hosts[leader].end_of_round()
    end = replica.log.last_index
    net.put(other, 2)
    net.hosts[other].end_of_round()
    sender, to, data = next(frame for frame in net.queue if frame[0] == other)
    net.queue.clear()
    assert (sender, to) == (other, leader)
    net.hosts[leader].on_frame(sender, data)
    net.hosts[leader].end_of_round()
    assert replica.log.last_index == end + 1
    net.put(leader, 3)
    net.hosts[leader].end_of_round()
    assert replica.log.last_index == end + 1, "its own commands gather as before"


def test_what_is_logged_reaches_the_disk_without_anybody_asking_for_it(net: Net) -> None:
    node = next(n for n in net.hosts if n != net.leader)
    log = net.hosts[node].groups[GROUP].log
    wal = net.hosts[node].storage.wal
    assert not net.woken
    log.save_vote(log.term + 1, 0)
    assert net.woken == {node}
    net.hosts[node].end_of_round()
    assert wal.written_sequence == wal.sequence


@pytest.mark.moves("convoy_raft_snapshots_sent_total", "convoy_raft_snapshots_installed_total")
def test_a_member_that_caught_up_by_a_snapshot_votes_although_nothing_follows() -> None:
    net = Net()
    net.add(1, (1,))
    net.run(1000)
    for value in range(5):
        net.put(1, value)
        net.run(100)
    leader = net.hosts[1].groups[GROUP]
    leader.log.save_snapshot(leader.snapshots.make())
    leader.log.raise_first(leader.last_applied + 1)
    net.hosts[1].add_member(GROUP, 2)
    net.run(100)
    net.show(1)
    net.add(2, (1,), learner=True)
    net.show(2)
    net.run(5000)
    net.show(1)
    net.show(2)
    assert leader.members == (1, 2)
    assert not net.hosts[2].groups[GROUP].core.quarantined


def test_a_vote_is_taken_away_and_given_back(net: Net) -> None:
    leader = net.hosts[net.leader].groups[GROUP]
    other = net.leader % 3 + 1
    assert net.hosts[net.leader].set_vote(GROUP, other, votes=False)
    net.run(1000)
    assert other not in leader.members
    assert other in leader.core.members.nodes
    net.put(net.leader, 8)
    net.run(1000)
    assert net.machines[other].values == net.machines[net.leader].values
    assert net.hosts[net.leader].set_vote(GROUP, other, votes=True)
    net.run(1000)
    assert other in leader.members
    assert not net.hosts[net.leader].set_vote(GROUP, 9, votes=True)
    assert not net.hosts[other].set_vote(GROUP, net.leader, votes=False)


def test_a_learner_takes_the_place_of_a_member() -> None:
    net = Net()
    for node in (1, 2, 3):
        net.add(node, (1, 2, 3))
    net.run(3000)
    net.put(net.leader, 8)
    net.run(100)
    source = net.leader % 3 + 1
    host, leader = net.hosts[net.leader], net.hosts[net.leader].groups[GROUP]
    assert host.stand_in(GROUP, 4, source)
    net.add(4, (1, 2, 3), learner=True)
    net.run(3000)
    assert leader.members == (1, 2, 3)
    assert net.machines[4].values == net.machines[net.leader].values
    assert leader.core.members.stand_in == (4, source)
    assert host.replace_member(GROUP, source, 4)
    net.run(3000)
    assert leader.core.members.voters == {1, 2, 3, 4} - {source}
    assert leader.core.members.learners == ()


def fill(net: Net, source: int, *to: int) -> None:
    net.full[source].update(to)


def make_room(net: Net, source: int, to: int) -> None:
    net.full[source].discard(to)
    net.hosts[source].on_room(to)


def others(net: Net) -> tuple[int, int, int]:
    leader = net.leader
    near, far = (node for node in (1, 2, 3) if node != leader)
    return leader, near, far


def put_some(net: Net, node: int, count: int, *, every_ms: int) -> None:
    """Puts 0 to count - 1, one after the other."""
    for value in range(count):
        net.put(node, value)
        net.run(every_ms)


def fall_behind(net: Net, leader: int, node: int) -> Any:
    """Fills the link to a follower until its replica hears that it lags; returns the replica."""
    fill(net, leader, node)
    put_some(net, leader, 15, every_ms=100)
    replica = net.hosts[node].groups[GROUP]
    assert replica.is_behind
    return replica


def test_entries_wait_while_a_link_is_full_and_are_sent_once(net: Net) -> None:
    """A follower whose link is full gets nothing large, however long that lasts; then it gets each
    entry once. The group goes on with the other one meanwhile."""
    leader, near, far = others(net)
    fill(net, leader, far)
    before = len(net.sizes[leader, far])
    put_some(net, leader, 20, every_ms=50)
    net.run(200)
    assert net.machines[near].values == list(range(20))
    assert net.machines[far].values == []
    assert max(net.sizes[leader, far][before:], default=0) < 100
    assert net.hosts[leader].groups[GROUP].is_leader
    sent = sum(net.sizes[leader, far])
    make_room(net, leader, far)
    net.run(500)
    assert net.machines[far].values == list(range(20))
    # 20 entries of one command each, in few frames.
    assert sum(net.sizes[leader, far]) - sent < 20 * 80 + 2_000


def test_bodies_are_needed_until_everybody_has_them(net: Net) -> None:
    leader, near, far = others(net)
    fill(net, leader, far)
    put_some(net, leader, 20, every_ms=50)
    host = net.hosts[leader]
    replica = host.groups[GROUP]
    missing = replica.core.progress[far].match + 1
    assert host.needed_from(GROUP) == missing < replica.last_applied
    assert net.hosts[near].needed_from(GROUP) > missing
    make_room(net, leader, far)
    net.run(500)
    assert host.needed_from(GROUP) == replica.last_applied + 1
    assert host.needed_from(99) == 0
    for node in (1, 2, 3):
        net.hosts[node].storage.logs[GROUP].forget(net.hosts[node].needed_from(GROUP) - 1)
    net.put(far, 20)
    net.run(300)
    assert [m.values for m in net.machines.values()] == [list(range(21))] * 3


def test_a_follower_behind_a_full_link_that_goes_on_is_not_silent(net: Net) -> None:
    leader, near, far = others(net)
    fill(net, leader, near, far)
    net.put(leader, 1)
    for _ in range(40):
        net.run(400)
        # Some other group's bulk takes the room each time.
        for node in (near, far):
            net.hosts[leader].on_room(node)
    assert not [note for note in net.notes if note[1] == "raft.peer_silent"]
    assert net.hosts[leader].groups[GROUP].is_leader
    for node in (near, far):
        make_room(net, leader, node)
    net.run(300)
    assert [m.values for m in net.machines.values()] == [[1]] * 3


def test_forwarded_commands_wait_in_order_for_a_full_link(net: Net) -> None:
    leader, near, _ = others(net)
    fill(net, near, leader)
    before = len(net.sizes[near, leader])
    for value in range(5):
        net.put(near, value)
        net.run(50)
    assert max(net.sizes[near, leader][before:], default=0) < 80
    make_room(net, near, leader)
    net.put(near, 5)
    net.run(300)
    assert net.machines[leader].values == [0, 1, 2, 3, 4, 5]


def test_commands_that_wait_for_a_leader_that_is_lost_are_not_sent(net: Net) -> None:
    """Clients send them again when they know the next leader."""
    leader, near, _ = others(net)
    fill(net, near, leader)
    net.put(near, 1)
    net.run(50)
    net.hosts[near].on_suspect(leader)
    net.hosts[near].on_unsuspect(leader)
    sent = len(net.sizes[near, leader])
    make_room(net, near, leader)
    net.run(100)
    assert max(net.sizes[near, leader][sent:], default=0) < 80
    assert net.machines[leader].values == []


def test_a_watcher_waits_for_a_full_link_too(net: Net) -> None:
    net.watch(4, (1, 2, 3))
    net.run(1000)
    fill(net, 4, net.leader)
    net.put(4, 1)
    net.run(100)
    assert net.machines[net.leader].values == []
    make_room(net, 4, net.leader)
    net.run(300)
    assert net.machines[net.leader].values == [1]


def test_many_groups_that_wait_for_a_link_take_turns(net: Net) -> None:
    """Whoever finds the link full again stands last."""
    host = net.hosts[1]
    full = net.full[1]
    turns = []

    class Waiter:
        def __init__(self, name: int, turns: int) -> None:
            self.name = name
            self.left = turns

        def on_room(self, node: int) -> None:
            turns.append(self.name)
            self.left -= 1
            full.add(node)
            if self.left:
                host.await_room(node, self)

        def on_lost(self, node: int) -> None:
            turns.append(-self.name)

    full.add(9)
    for name in (1, 2, 3):
        waiter = Waiter(name, 2)
        host.await_room(9, waiter)
        host.await_room(9, waiter)
    for _ in range(4):
        full.discard(9)
        host.on_room(9)
    host.on_link_down(9, definite=False)
    assert turns == [1, 2, 3, 1, -2, -3]


def catching_up(net: Net) -> tuple[int, int]:
    """A follower that was away for an election, and cannot apply what it missed: (leader, it)."""
    slow = next(node for node in (1, 2, 3) if node != net.leader)
    net.isolate(slow)
    net.put(net.leader, 1)
    net.run(500)
    former = net.leader
    net.isolate(former)
    net.join(slow)
    net.hosts[slow].config = replace(net.hosts[slow].config, apply_bytes_max=0)
    net.run(3000)
    assert net.leader != slow
    net.join(former)
    net.run(500)
    return net.leader, slow


def test_the_leader_serves_clients_of_a_replica_that_catches_up(net: Net) -> None:
    """Its clients learn the leader although it has not applied what is older than the term; the
    leader hears that it should send for the node, and when it need not any more."""
    leader, slow = catching_up(net)
    replica = net.hosts[slow].groups[GROUP]
    assert replica.established_leader == 0
    net.run(2000)
    assert replica.is_behind
    assert net.sinks[slow].leaders[-1] == leader
    assert not net.hosts[leader].is_replica_live(GROUP, slow)
    net.put(slow, 7)
    net.run(300)
    assert net.machines[leader].values[-1] == 7
    told = len(net.sinks[slow].leaders)
    net.hosts[slow].config = net.hosts[leader].config
    net.run(300)
    assert net.machines[slow].values == net.machines[leader].values
    assert not replica.is_behind
    assert replica.established_leader == leader
    assert net.hosts[leader].is_replica_live(GROUP, slow)
    # Or clients would send again what is under way.
    assert net.sinks[slow].leaders[told:] == []


def test_a_leader_that_was_away_hears_again_who_is_behind(net: Net) -> None:
    leader, slow = catching_up(net)
    net.run(2000)
    net.hosts[leader].on_suspect(slow)
    assert slow not in net.hosts[leader].groups[GROUP].lagging.behind_nodes
    net.hosts[leader].on_unsuspect(slow)
    net.hosts[slow].on_suspect(leader)
    assert net.sinks[slow].leaders[-1] is None
    net.hosts[slow].on_unsuspect(leader)
    net.run(100)
    assert net.sinks[slow].leaders[-1] == leader
    assert slow in net.hosts[leader].groups[GROUP].lagging.behind_nodes


def test_a_follower_whose_log_lags_for_long_does_not_count_as_live(net: Net) -> None:
    leader, near, far = others(net)
    fill(net, leader, far)
    for value in range(30):
        net.put(leader, value)
        net.run(100)
    assert net.hosts[leader].is_replica_live(GROUP, near)
    assert not net.hosts[leader].is_replica_live(GROUP, far)
    make_room(net, leader, far)
    net.run(500)
    assert net.hosts[leader].is_replica_live(GROUP, far)


@pytest.mark.provokes("raft.frame_malformed", "raft.message_malformed")
def test_frames_that_make_no_sense_are_dropped(net: Net) -> None:
    host = net.hosts[1]
    host.on_frame(2, frame(link_frames.FRAME_APPEND, 0, GROUP, 1, 0, 0, 0, b"no entries"))
    host.on_frame(2, frame(link_frames.FRAME_RAFT, 0, GROUP, 0, 0, 0, 0, b"no message"))
    net.run(2000)
    assert net.leader


@pytest.mark.provokes("raft.replica_damaged", "raft.wipe_failed")
def test_a_log_that_cannot_be_wiped_is_wiped_later(net: Net) -> None:
    net.run(2000)
    follower = net.leader % 3 + 1
    replica = net.hosts[follower].groups[GROUP]
    replica.damage.resynchronise(Damage(file="wal", offset=0, group=GROUP, reason="spoiled"))
    replica.damage.on_wiped(StorageFault("read-only"))
    net.run(5000)
    net.put(net.leader, 7)
    net.run(2000)
    assert net.machines[follower].values == [7]


def test_a_log_found_damaged_in_the_turn_of_an_election_takes_nothing(net: Net) -> None:
    """The damage is seen to when the round ends; until then the node leads."""
    net.put(net.leader, 7)
    net.run(300)
    former = net.leader
    replica = net.hosts[former].groups[GROUP]
    last = replica.log.last_index
    replica.log.mark_damaged(StorageFault("spoiled", path="wal", offset=0))
    replica._became_leader()
    assert not replica.changes.propose(replica.core.members)
    assert replica.log.last_index == last
    net.run(6000)
    net.put(net.leader, 8)
    net.run(2000)
    assert [machine.values for machine in net.machines.values()] == [[7, 8]] * 3


def test_clients_of_a_replica_that_is_rebuilt_are_served_by_the_leader(net: Net) -> None:
    """Its log was lost, and the link to it is full: long before it has its data again its clients
    know the leader, who serves them."""
    net.put(net.leader, 4)
    net.run(300)
    lost = next(n for n in net.hosts if n != net.leader)
    net.isolate(lost)
    net.hosts.pop(lost).groups[GROUP].stop()
    net.directories[lost] = MemoryDirectory()
    net.run(500)
    net.cut.discard(lost)
    fill(net, net.leader, lost)
    net.add(lost, (1, 2, 3), wiped=True)
    net.run(4000)
    leader = net.hosts[net.leader].groups[GROUP]
    assert net.machines[lost].values == []
    assert net.sinks[lost].leaders[-1:] == [net.leader]
    assert not net.hosts[net.leader].groups[GROUP].is_live(lost)
    make_room(net, net.leader, lost)
    net.run(6000)
    assert net.machines[lost].values == [4]
    assert leader.is_live(lost)


def hears_of_the_leader(net: Net, node: int) -> None:
    """Its clients know who leads, and what they send is committed."""
    assert net.sinks[node].leaders[-1:] == [net.leader]
    assert net.hosts[node].leader_of(GROUP) == net.leader
    assert not net.hosts[net.leader].is_replica_live(GROUP, node)
    net.put(node, 7)
    net.run(300)
    assert net.machines[net.leader].values[-1] == 7


def test_clients_of_a_replica_that_waits_to_be_taken_in_are_served_by_the_leader(net: Net) -> None:
    """Nobody takes it in yet, so no leader sends it anything: it asks the others who leads."""
    net.add(4, (1, 2, 3), learner=True)
    replica = net.hosts[4].groups[GROUP]
    net.run(2500)
    assert replica.core.lost_state
    assert replica.is_behind
    hears_of_the_leader(net, 4)
    # Another one leads: it is found as the first one was.
    former = net.leader
    net.isolate(former)
    assert net.sinks[4].leaders[-1] is None
    net.run(5000)
    hears_of_the_leader(net, 4)
    told = len(net.sinks[4].leaders)
    net.hosts[net.leader].add_member(GROUP, 4)
    net.run(3000)
    assert net.machines[4].values == net.machines[net.leader].values
    assert not replica.is_behind
    assert net.hosts[net.leader].is_replica_live(GROUP, 4)
    assert net.sinks[4].leaders[told:] in ([], [None, net.leader])


def test_who_led_without_a_word_is_asked_for_anew(net: Net) -> None:
    """The leader that clients of a replica without a log know hands over, and stays linked."""
    net.add(4, (1, 2, 3), learner=True)
    net.run(2500)
    former = net.leader
    assert net.hosts[former].transfer_leadership(GROUP, former % 3 + 1)
    net.run(500)
    assert net.leader != former
    net.put(4, 8)
    net.run(3000)
    hears_of_the_leader(net, 4)


def test_clients_of_a_replica_that_cannot_be_wiped_are_served_by_the_leader(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is damaged, and the disk takes long to forget it."""
    follower = net.leader % 3 + 1
    replica = net.hosts[follower].groups[GROUP]
    wiped: list[Any] = []
    monkeypatch.setattr(replica.log, "wipe", wiped.append)
    replica.damage.resynchronise(Damage(file="wal", offset=0, group=GROUP, reason="spoiled"))
    replica.run_effects()
    assert net.sinks[follower].leaders[-1] is None
    net.run(2500)
    assert replica.faulty
    hears_of_the_leader(net, follower)
    monkeypatch.undo()
    (done,) = wiped
    replica.log.wipe(done)
    net.run(6000)
    assert net.machines[follower].values == [7]
    assert net.hosts[net.leader].is_replica_live(GROUP, follower)
    assert net.sinks[follower].leaders[-1] == net.leader


@pytest.mark.moves("convoy_replicas_behind")
def test_a_replica_that_lags_hears_so_from_a_leader_that_stays(net: Net) -> None:
    """Its clients know the leader all the time; readers must hear that it is not up to date."""
    leader, near, far = others(net)
    net.show(far)
    replica = fall_behind(net, leader, far)
    net.show(far)
    assert not net.hosts[near].groups[GROUP].is_behind
    told = len(net.sinks[far].leaders)
    make_room(net, leader, far)
    net.run(500)
    assert net.machines[far].values == net.machines[leader].values
    assert not replica.is_behind
    assert net.sinks[far].leaders[told:] == []


def test_a_lag_that_nobody_confirms_is_over_soon(net: Net) -> None:
    """The word that it is over may be lost with the link."""
    leader, _, far = others(net)
    replica = fall_behind(net, leader, far)
    net.cut.add(far)
    net.run(10_000)
    assert not replica.is_behind


def test_a_lag_is_over_when_the_leader_that_told_of_it_is_away(net: Net) -> None:
    leader, _, far = others(net)
    replica = net.hosts[far].groups[GROUP]
    replica.on_message(leader, (BEHIND, replica.term, 1))
    assert replica.is_behind
    net.hosts[far].on_suspect(leader)
    assert not replica.is_behind


def test_a_lag_is_over_for_who_leads(net: Net) -> None:
    leader, _, far = others(net)
    replica = net.hosts[far].groups[GROUP]
    replica.on_message(leader, (BEHIND, replica.term, 1))
    assert net.hosts[leader].transfer_leadership(GROUP, far)
    net.run(300)
    assert replica.is_leader
    assert not replica.is_behind
