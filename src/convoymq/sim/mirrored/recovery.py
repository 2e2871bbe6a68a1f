"""Mirrored queues whose nodes stop, start, are lost and cut off by a script: what is kept, what is
lost, and what the operator types (docs/mirrored.md).

A, the first master, is node 1, and B node 2; a third node has no copy. In a cluster of two each of
them alone is no majority. The script is the seed's; the order and the length of what it does are
drawn. Nobody consumes before its end, so that the queue is what was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import TypeVar

from convoymq.metadata.commands import ChangeView
from convoymq.queues.mirrored.policy import heir, policy_from
from convoymq.replication.ring.views import RingView
from convoymq.sim.clients import Traits
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.disk import SimDisk
from convoymq.sim.engine import NotLive
from convoymq.sim.faults import Plan
from convoymq.sim.hosted.channel import QueueChannel
from convoymq.sim.hosted.world import FILE_BYTES_MAX, RESTART_WAIT_MS, QueueInjector
from convoymq.sim.mirrored.referee import Life, MirroredReferee
from convoymq.sim.mirrored.world import MirroredLoad, MirroredWorld
from convoymq.sim.world import ChannelKind, World

A, B, C = 1, 2, 3
T = TypeVar("T")
NEVER_US = 10**15
POLL_US = 5_000
KEEP_US = 20_000
CHANGES_MAX = 8
"""Changes of a ring by a mirror that fails, and by the next that fails some seconds later."""
STEP_US_MAX = 30_000_000
"""Longest simulated time of one step of a script."""
Steps = Iterator[Callable[[], bool]]
"""A script: each step waits for a condition."""


class PersistentChannel(QueueChannel):
    """A channel whose messages are all persistent."""

    def _draw_traits(self, identity: bytes) -> Traits:
        traits = Traits(persistent=True)
        self._book.on_sent(identity, traits)
        return traits


class Script(QueueInjector):
    """Carries the scenario of a `RecoveryWorld` out."""

    world: RecoveryWorld

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_over = False
        self.at_first: set[bytes] = set()
        """Messages that were confirmed when A stopped, or before B joined."""
        self.later: set[bytes] = set()
        """Messages that A never had."""
        self._steps = self.world.scenario(self)
        self._condition: Callable[[], bool] = lambda: True
        self._since_us = 0
        world.scheduler.after(0, None, self._go_on)

    def _go_on(self) -> None:
        now_us = self.world.scheduler.now_us
        while self._condition():
            found = next(self._steps, None)
            if found is None:
                self.is_over = True
                return
            self._condition, self._since_us = found, now_us
        if now_us - self._since_us > STEP_US_MAX:
            raise NotLive(f"{self.world.scenario.__name__} waits, and {self.world.view}")
        self.world.scheduler.after(POLL_US, None, self._go_on)

    # What is waited for.

    def passed(self, ms_max: int, ms_min: int = 0) -> Callable[[], bool]:
        """Some time has gone by."""
        scheduler = self.world.scheduler
        until_us = scheduler.now_us + scheduler.between(ms_min * 1000, ms_max * 1000)
        return lambda: scheduler.now_us >= until_us

    def more(self, count: int) -> Callable[[], bool]:
        """So many more messages are confirmed."""
        before = len(self.confirmed)
        return lambda: len(self.confirmed) >= before + count

    def led(self, *nodes: int, size: int = 1) -> Callable[[], bool]:
        """One of these nodes has the master, and all copies, which are so many, are synchronised;
        0 = any number of copies."""
        world = self.world

        def is_so() -> bool:
            view, life = world.view, world.referee.newest
            if (
                view is None
                or life is None
                or life.number != view.master
                or not view.is_live(life.number)
            ):
                return False
            node = world.nodes[view.node_of(view.master)]
            serves = node.alive and node.host.master_of(world.group) and not node.host.is_paused
            is_whole = size in (0, len(view.live)) and len(view.synchronised) >= size
            return bool(serves) and is_whole and node.number in nodes

        return is_so

    def members(self, *, is_full: bool) -> list[int]:
        """Returns the members of the ring, or the full ones."""
        view = self.world.view
        return [] if view is None else view.full() if is_full else list(view.live)

    def draw(self, *choices: T) -> T:
        """Draws one of them."""
        return self.world.scheduler.rng.choice(choices)

    # What is there.

    @property
    def confirmed(self) -> set[bytes]:
        """Returns the messages that were confirmed."""
        return {each for each, is_safe in self.world.referee.sent.items() if is_safe}

    @property
    def life(self) -> Life:
        """Returns the newest master."""
        assert self.world.referee.newest is not None
        return self.world.referee.newest

    def must_have(self, messages: set[bytes], *, without: set[bytes] | None = None) -> None:
        """Asserts what the queue has; `without`: what it must have lost."""
        found = set(self.life.alive.values())
        if messages - found or found & (without or set()):
            raise InvariantBroken(
                f"{self.world.scenario.__name__}: of {len(messages)} messages"
                f" {len(messages - found)} are lost, and {len(found & (without or set()))} are"
                " there that cannot be"
            )

    def nobody_serves(self, masters: int) -> None:
        """Asserts that no master was opened since there were so many."""
        if self.world.referee.masters != masters:
            raise InvariantBroken(f"{self.world.scenario.__name__}: a copy serves that must wait")

    # Nodes.

    def stop_nodes(self, *numbers: int) -> None:
        """Stops nodes, or kills them, until they are started."""
        for node in [self.world.nodes[number] for number in numbers]:
            kills = self.world.scheduler.chance(0.3)
            self.world.trace.fault("kill" if kills else "stop", node.name)
            if not kills:
                node.host.stop()
            self.world.crash(node, restart_us=NEVER_US, keep=1.0, refuses=True)

    def lose_disks(self, *numbers: int) -> None:
        """Disks of stopped nodes are gone."""
        for number in numbers:
            self.world.trace.fault("wipe", f"node{number}")
            node = self.world.nodes[number]
            node.disk.wipe()
            node.lost_groups = self.world.group

    def move_disk(self, number: int) -> None:
        """A stopped node gets another machine, with a copy of its disk."""
        node = self.world.nodes[number]
        disk = SimDisk()
        disk.owner = number
        disk.names, disk.durable_names = deepcopy((node.disk.names, node.disk.durable_names))
        node.disk = disk

    def start_nodes(self, *numbers: int) -> None:
        """Starts nodes; one that was given up is a new one."""
        for number in numbers:
            self.world.forgotten.discard(number)
            self.world._start(self.world.nodes[number])

    def cut_off(self, number: int) -> None:
        """A node and all others do not reach each other."""
        self.world.trace.fault("isolate", f"node{number}")
        for other in set(self.world.nodes) - {number}:
            breaks = self.world.scheduler.chance(0.5)
            self.world.network.cut(number, other, breaks=breaks)
            self.world.network.cut(other, number, breaks=breaks)

    # Operators.

    def refound(self, *, forced: bool, lost: int = 0) -> bool:
        """Has the queue go on with a copy on nodes that run, as `forget_cluster_node` and
        `force_boot` do; returns False when there is none that may."""
        world, view = self.world, self.world.view
        assert view is not None
        running = {number: node for number, node in world.nodes.items() if node.alive}
        copies = {number: node.host.copy_of(world.group) for number, node in running.items()}
        policy = policy_from(world.rules[world.group][1])
        lenient = policy.promotes_on_failure
        found = heir(view, copies, follows_unsynchronised=lenient, forced=forced)
        if found:
            world.trace.add("operator", f"{copies} -> {found}")
            world.forgotten.add(lost)
            world.referee.on_forced()
            record = world.tree.queue_index.by_group[world.group]
            command = ChangeView(
                vhost="/",
                name=record.name,
                group=record.group,
                view=view.refounded(found, running[found].incarnation),
            )
            world.propose(running[found], command, lambda _reply, _error: None)
        return bool(found)


# Scenarios: the six of the documentation, and the rules that they rest on.


def _begin(script: Script) -> Steps:
    """A and B have the same messages."""
    yield script.led(A, size=2)
    yield script.more(10)


def _stop_a_then_b(script: Script) -> Steps:
    """A stops; where there is a majority B follows, and gets more messages; B stops."""
    script.at_first = script.confirmed
    script.stop_nodes(A)
    at_a = set(script.life.alive.values())
    if len(script.world.nodes) > 2:
        yield script.led(B)
        yield script.more(10)
    else:
        yield script.passed(2_000)
    script.later = script.confirmed - script.at_first - at_a
    script.stop_nodes(B)
    yield script.passed(500)


def _give_up(script: Script, lost: int, *, takes: int) -> Steps:
    """The operator gives a node up, or none; the queue opens on another one."""
    is_open = script.led(*script.world.nodes, size=0)
    while not is_open():
        # A proposal may be lost: then the operator types it again.
        if not script.refound(forced=True, lost=lost):
            raise InvariantBroken("no copy is found, and there is one")
        yield script.passed(3_000, 3_000)
    if not script.led(takes, size=0)():
        raise InvariantBroken(f"another copy than that of node {takes} is taken")


def first_then_second(script: Script) -> Steps:
    """Scenario 1: A stops, then B; the last to stop opens the queue."""
    yield from _begin(script)
    yield from _stop_a_then_b(script)
    kept, masters = script.confirmed, script.world.referee.masters
    order = script.draw((A, B), (B, A))
    script.start_nodes(order[0])
    yield script.passed(2 * RESTART_WAIT_MS, RESTART_WAIT_MS)
    if order[0] == A or len(script.world.nodes) == 2:
        script.nobody_serves(masters)
    script.start_nodes(order[1])
    yield script.led(A, B, size=2)
    script.must_have(kept)


def both_at_once(script: Script) -> Steps:
    """Scenario 2: either order, and any time between them."""
    yield from _begin(script)
    script.stop_nodes(*script.draw((A, B), (B, A)))
    kept = script.confirmed
    order = script.draw((A, B), (B, A))
    script.start_nodes(order[0])
    yield script.passed(2 * RESTART_WAIT_MS, RESTART_WAIT_MS)
    script.start_nodes(order[1])
    yield script.led(A, B, size=2)
    script.must_have(kept)


def first_is_lost(script: Script) -> Steps:
    """Scenario 3: A stops, then B; A is lost. B has all."""
    yield from _begin(script)
    yield from _stop_a_then_b(script)
    kept = script.confirmed
    script.lose_disks(A)
    yield from _go_on_with_b(script, kept)


def _go_on_with_b(script: Script, kept: set[bytes]) -> Steps:
    masters = script.world.referee.masters
    script.start_nodes(B)
    if len(script.world.nodes) == 2:
        yield script.passed(2 * RESTART_WAIT_MS, RESTART_WAIT_MS)
        script.nobody_serves(masters)
        yield from _give_up(script, A, takes=B)
    yield script.led(B)
    script.start_nodes(A)
    yield script.led(B, size=2)
    script.must_have(kept)


def last_is_lost(script: Script) -> Steps:
    """Scenario 4: A stops, then B; B is lost. A has what was there when it stopped."""
    yield from _begin(script)
    yield from _stop_a_then_b(script)
    script.lose_disks(B)
    yield from _go_on_with_a(script)


def _go_on_with_a(script: Script) -> Steps:
    masters = script.world.referee.masters
    script.start_nodes(A)
    yield script.passed(2 * RESTART_WAIT_MS, RESTART_WAIT_MS)
    script.nobody_serves(masters)
    if len(script.world.nodes) > 2 and script.refound(forced=False):
        raise InvariantBroken("a copy that lacks messages is taken without force")
    yield from _give_up(script, B, takes=A)
    script.must_have(script.at_first, without=script.later)
    script.start_nodes(B)
    yield script.led(A, size=2)


def one_disk_is_left(script: Script) -> Steps:
    """Scenario 5: both machines are lost; a copy of one disk goes into another machine."""
    yield from _begin(script)
    yield from _stop_a_then_b(script)
    kept = script.confirmed
    saved = script.draw(A, B)
    script.move_disk(saved)
    script.lose_disks(A + B - saved)
    yield from _go_on_with_a(script) if saved == A else _go_on_with_b(script, kept)


def no_disk_is_left(script: Script) -> Steps:
    """Scenario 6: nothing is kept, and no empty queue takes the place of the lost one."""
    yield from _begin(script)
    yield from _stop_a_then_b(script)
    masters = script.world.referee.masters
    script.lose_disks(A, B)
    script.start_nodes(A, B)
    yield script.passed(2 * RESTART_WAIT_MS, RESTART_WAIT_MS)
    script.nobody_serves(masters)
    if script.refound(forced=True):
        raise InvariantBroken("a queue is opened from a copy that does not exist")
    script.world.is_lost = True


def mirror_waits(script: Script) -> Steps:
    """A synchronised mirror waits for the last master as long as the setting says."""
    yield from _begin(script)
    script.stop_nodes(A, B)
    kept, masters = script.confirmed, script.world.referee.masters
    script.start_nodes(B)
    yield script.passed(RESTART_WAIT_MS // 2)
    script.nobody_serves(masters)
    yield script.led(B)
    script.must_have(kept)
    script.start_nodes(A)
    yield script.led(B, size=2)
    script.must_have(kept)


def _join(script: Script) -> Steps:
    """A has messages; B gets a mirror, which is not synchronised."""
    yield script.more(10)
    script.at_first = script.confirmed
    script.world.set_policy({"ha-params": ["node1", "node2"]})


def forced_boot(script: Script) -> Steps:
    """The last master is away, and a mirror that is not synchronised takes its place by force."""
    yield from _join(script)
    yield lambda: len(script.members(is_full=True)) == 2
    yield script.passed(1_000, 1_000)
    before = set(script.world.referee.sent)
    yield script.more(10)
    kept, masters = script.confirmed - before, script.world.referee.masters
    script.stop_nodes(A, B)
    script.start_nodes(B)
    yield script.passed(2 * RESTART_WAIT_MS, RESTART_WAIT_MS)
    script.nobody_serves(masters)
    yield from _give_up(script, 0, takes=B)
    script.must_have(kept, without=script.at_first)
    script.start_nodes(A)


def cut_off_at_a_join(script: Script) -> Steps:
    """A is cut off when B has joined the ring, perhaps before A hears of it. B may follow as a
    mirror that is not synchronised: A must not have confirmed anything since."""
    yield from _join(script)
    is_full = script.draw(True, True, False)
    yield lambda: len(script.members(is_full=is_full)) == 2
    yield script.passed(script.draw(1, 1, 100))
    script.cut_off(A)
    yield script.passed(8_000, 4_000)
    script.world.network.heal_all()
    yield script.passed(2_000)


def newest_copy(script: Script) -> Steps:
    """A, B and C have copies. C is lost first, then A, then B, for good: A's copy is the newest,
    and not that of the member that came last."""
    yield script.led(A, size=3)
    yield script.more(10)
    script.stop_nodes(C)
    yield script.led(A, size=2)
    yield script.more(10)
    yield from _stop_a_then_b(script)
    script.lose_disks(B)
    script.start_nodes(A, C)
    yield script.passed(2 * RESTART_WAIT_MS, RESTART_WAIT_MS)
    yield from _give_up(script, B, takes=A)
    script.must_have(script.at_first, without=script.later)
    script.start_nodes(B)


def mirror_cannot_write(script: Script) -> Steps:
    """B's disk refuses everything for a while: B is no mirror meanwhile, nobody waits for it, and
    the ring does not change again and again."""
    yield from _begin(script)
    world = script.world
    assert world.view is not None
    version, disk = world.view.version, world.nodes[B].disk
    disk.failing = True
    yield script.led(A)
    yield script.more(10)
    yield script.passed(8_000, 4_000)
    disk.failing = False
    if world.view.version > version + CHANGES_MAX:
        raise InvariantBroken(f"the ring changed {world.view.version - version} times")
    kept = script.confirmed
    yield script.led(A, size=2)
    script.must_have(kept)


def heir_restarts(script: Script) -> Steps:
    """A gives way to B, which is not the master yet when it is stopped; C's mirror is empty. What A
    and B have is not lost, whichever of them opens the queue."""
    yield from _begin(script)
    script.world.set_policy({"ha-params": ["node2", "node3"], "ha-sync-mode": "manual"})

    def gives_way() -> bool:
        view = script.world.view
        return view is not None and not view.is_live(view.master)

    yield gives_way
    kept = script.confirmed
    script.stop_nodes(B)
    yield script.passed(script.draw(50, 1_000, 6_000))
    script.start_nodes(B)
    yield script.led(A, B, size=0)
    script.must_have(kept)


Scenario = Callable[[Script], Steps]
SCENARIOS: tuple[Scenario, ...] = (
    first_then_second,
    both_at_once,
    first_is_lost,
    last_is_lost,
    one_disk_is_left,
    no_disk_is_left,
    mirror_waits,
    forced_boot,
    cut_off_at_a_join,
    newest_copy,
    mirror_cannot_write,
    heir_restarts,
)
NODES: Mapping[Scenario, tuple[int, ...]] = {
    mirror_waits: (3,),
    forced_boot: (3,),
    cut_off_at_a_join: (3,),
    newest_copy: (5,),
    heir_restarts: (3,),
}


class RecoveryWorld(MirroredWorld):
    """See the module text."""

    injector_class = Script
    _injector: Script
    scenario: Scenario
    is_lost = False
    """The queue is lost for good: nothing is waited for."""

    def _draw_queues(self, draw: Random) -> None:
        self.scenario = SCENARIOS[self.seed % len(SCENARIOS)]
        self.forgotten: set[int] = set()
        """Nodes that are no part of the cluster any more."""
        self.group = 0
        self.size = 3 if self.scenario is newest_copy else 2
        names = [f"node{number}" for number in range(1, self.size + 1)]
        self.settings = {"ha-mode": "nodes", "ha-params": names, "ha-sync-mode": "automatic"}
        if self.scenario in (forced_boot, cut_off_at_a_join):
            self.settings |= {"ha-params": names[:1], "ha-sync-mode": "manual"}
        may_wait = draw.random() < 0.5 and self.scenario is not cut_off_at_a_join
        if may_wait or self.scenario is heir_restarts:
            self.settings["ha-promote-on-failure"] = "when-synced"
        self.file_bytes_max = draw.choice(FILE_BYTES_MAX)
        self._make_nodes(draw)
        self._add_queue(1, A)
        (self.group,) = self.referees
        self.trace.add("world", f"{self.scenario.__name__}, {self.plan.nodes} nodes")

    @property
    def referee(self) -> MirroredReferee:
        """Returns the referee of the queue."""
        return self.referees[self.group]

    @property
    def view(self) -> RingView | None:
        """Returns the queue's ring, as the tree has it."""
        return self.tree.queue_index.by_group[self.group].view

    def is_excused(self, group: int, event: str, reason: str) -> bool:
        """See `QueueWorld`."""
        return event == "queue.mirror_failed" and self.scenario is mirror_cannot_write

    def voters(self) -> Collection[int]:
        """See `LateWorld`."""
        return self.nodes.keys() - self.forgotten

    # The script in place of chaos.

    def _first_phase(self) -> None:
        while not self._injector.is_over:
            self._run_until(self.scheduler.now_us + POLL_US)

    def channel_kind(self, group: int) -> ChannelKind:
        """See `World`."""
        return PersistentChannel

    def _keep_channels(self) -> None:
        """A publisher on each node, and at the end a consumer."""
        self.scheduler.after(KEEP_US, None, self._keep_channels)
        self._end_channels()
        for node in self.nodes.values():
            mine = [c for c in self.channels if c.node == node.number]
            if node.alive and not mine and self.group in self.groups_of(node):
                self._open(node, self.group, publishes=not self.quiet, consumes=self.quiet)

    def _heal(self) -> None:
        super()._heal()
        self.set_policy({"ha-params": [f"node{n}" for n in range(1, self.size + 1)]})
        for node in self.nodes.values():
            self._start(node)

    def _unfinished(self) -> list[str]:
        return [] if self.is_lost else super()._unfinished()


class RecoveryLoad(MirroredLoad):
    """Recovery of mirrored queues."""

    text = "mirrored queues whose nodes stop, start, are lost and cut off by a script"
    world_class = RecoveryWorld
    kinds = ()

    def make_plan(self, seed: int, faults: Collection[str] | None) -> Plan:
        """See `PlannedLoad`: nothing happens but what the script says."""
        plan = super().make_plan(seed, ())
        sizes = NODES.get(SCENARIOS[seed % len(SCENARIOS)], (2, 3))
        clients = replace(
            plan.clients,
            turn_max_us=40_000,
            publish_chance=0.5,
            unconfirmed_max=20,
            body_large_chance=0.0,
            purge_chance=0.0,
            close_chance=0.0,
            get_chance=0.0,
        )
        return replace(
            plan, groups=1, nodes=sizes[seed // len(SCENARIOS) % len(sizes)], clients=clients
        )
