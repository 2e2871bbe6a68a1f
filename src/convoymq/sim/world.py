"""One simulated cluster and its run: chaos first, then everything heals and all promises fall due.

Safety is checked all the time, liveness in the second phase: within a bounded simulated time every
publish is answered, every command applied, every message settled or dropped by a rule, and all
replicas are equal.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random

import msgspec

from convoymq.kernels import batch, link_frames
from convoymq.kernels.entries import Entry
from convoymq.model.compatibility import COMPATIBILITY, RELEASES
from convoymq.model.errors import InvariantViolated
from convoymq.queues.quorum.settings import machine_settings, settings_of_release
from convoymq.replication.machine import Effect
from convoymq.replication.raft.types import VOTE, VOTE_REPLY
from convoymq.shells.groups.replica import Replica
from convoymq.sim.clients import Channel, Workload
from convoymq.sim.clock import Scheduler
from convoymq.sim.dead_letters import POLICIES
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.disk import PowerLost
from convoymq.sim.faults import Injector, Plan, draw_plan
from convoymq.sim.invariants import GroupChecker
from convoymq.sim.network import Network
from convoymq.sim.nodes import (
    FIRST_INCARNATION,
    SimNode,
    WatchedMachine,
    WatchedPartition,
    WatchedStream,
)
from convoymq.sim.operations import Arrivals, Choosing, ChosenModel
from convoymq.sim.partitions import PartitionChannel, PartitionReferee
from convoymq.sim.records import IDENTITY_BYTES
from convoymq.sim.referee import GroupReferee, IndexedMachine, Referee
from convoymq.sim.relays import RelayBook
from convoymq.sim.reservations import ReservationChannel, ReservedReferee
from convoymq.sim.streams import StreamChannel, StreamReferee
from convoymq.sim.trace import Trace

LIVENESS_LIMIT_US = 90_000_000
LIVENESS_MESSAGE_US = 40_000
"""More of it for every message: one consumer may have to take them one by one."""
CHECK_EVERY_US = 200_000
POLICY_EVERY_US = 500_000
POLICY_PAUSE = 0.8
"""Share of these times at which no policy changes."""
LIMITED = 0.4
"""Share of the policies, where messages have attributes, with a limit of each kind."""
MORE_LIMITS = 0.4
"""Share of the worlds in which policies name bytes and times for nodes that are away."""
ORDERS: tuple[dict[str, object], ...] = (
    {},
    {},
    {"requeue-position": "original"},
    {"requeue-position": "front"},
    {"requeue-position": "tail", "priority-mode": "two-classes"},
    {"priority-mode": "two-classes"},
)
"""Policies for the order of deliveries."""
EVENTS_MAX = 3_000_000
RESERVATION_SHARE = 0.4
"""Of the channels of a plan with reservations, those that own one."""

COMMANDS = {
    getattr(batch, name): name[4:].lower() for name in dir(batch) if name.startswith("CMD_")
}


class NotLive(AssertionError):
    """Something that had to happen in the quiet phase did not."""


@dataclass(slots=True)
class GroupPlace:
    """Places of a group's replicas, as the metadata would have them."""

    members: set[int]
    """Nodes that are to have a replica."""
    began: dict[int, tuple[frozenset[int], bool]]
    """Node -> (members that its replica began with, whether it joined a group that existed)."""
    hint: int
    settings: dict[str, int]
    founder: tuple[int, int] = (0, 0)
    """Member that leads the first term without an election; (0, 0) = nobody."""
    leaving: set[int] = field(default_factory=set)
    """Nodes that have a replica until their removal is committed."""

    def has_replica(self, node: int) -> bool:
        """Returns True until the removal of the node is committed."""
        return node in self.members or node in self.leaving


@dataclass(slots=True)
class Result:
    """Result of a run."""

    seed: int
    failure: str | None = None
    detail: str = ""
    simulated_us: int = 0
    events: int = 0
    digest: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    workload: dict[str, int] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


class World:
    """A cluster under test."""

    node_class: type[SimNode] = SimNode
    nodes: Mapping[int, SimNode]
    checkers: Mapping[int, GroupChecker]

    def __init__(self, plan: Plan, sink: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan.seed)
        #: Draws of its own: runs without policies stay as they were.
        self._policy_rng = Random(plan.seed ^ 0x9011C7)
        #: The same for dead letters.
        self.dead_letter_rng = Random(plan.seed ^ 0xDEAD)
        #: The same for message-ids.
        self._window_rng = Random(plan.seed ^ 0xDED1)
        #: The same for retries.
        self._retry_rng = Random(plan.seed ^ 0x2E72)
        #: The same for the release of RabbitMQ whose rules a queue follows.
        self._release_rng = Random(plan.seed ^ 0xC0417)
        #: Group -> that release.
        self.releases: dict[int, str] = {}
        #: The same for what only some worlds have of limits.
        self._limit_rng = Random(plan.seed ^ 0x11419)
        self._has_more_limits = self._limit_rng.random() < MORE_LIMITS
        self.moved: set[bytes] = set()
        """Identities of the dead letters that their target has taken."""
        self.arrivals = Arrivals(self)
        #: Of its own as well: questions to queues themselves.
        self.questions = Random(plan.seed ^ 0xA5C)
        self.chosen: dict[int, ChosenModel] = {}
        #: Group -> its effective settings, as the metadata would have them.
        self.policies: dict[int, dict[str, object]] = {}
        self.trace = Trace(lambda: self.scheduler.now_us, sink)
        self.network = Network(self.scheduler, self.trace, plan.network)
        self.network.on_frame_sent = self._on_frame_sent
        self.relay_book = RelayBook(self) if plan.network.relays else None
        self.workload = Workload()
        self.channels: list[Channel | ReservationChannel] = []
        self.quiet = False
        self.broken: BaseException | None = None
        """Error that a check inside of a replica raised."""
        self.places: dict[int, GroupPlace] = {}
        """Places of the groups that the world itself places."""
        self.referees: dict[int, GroupReferee] = {}
        self._make_world()

    def _make_world(self) -> None:
        """Makes nodes and groups."""
        plan = self.plan
        self.nodes = {n: self.node_class(self, n) for n in range(1, plan.nodes + 1)}
        rng = self.scheduler.rng
        checkers: dict[int, GroupChecker] = {}
        self.checkers = checkers
        for group in range(1, plan.groups + 1):
            size = plan.nodes if plan.nodes == 3 or rng.random() < 0.5 else 3
            members = set(rng.sample(sorted(self.nodes), size))
            settings = dict(plan.settings)
            began = dict.fromkeys(sorted(members), (frozenset(members), False))
            hint = rng.choice(sorted(members))
            # Some groups begin with an election, as the tree's does.
            founder = (hint, FIRST_INCARNATION) if group % 4 else (0, 0)
            self.places[group] = GroupPlace(members, began, hint, settings, founder)
            if plan.partitions:
                self.referees[group] = PartitionReferee(group, settings)
            elif plan.streams:
                self.referees[group] = StreamReferee(group)
            else:
                release = self.releases[group] = self._release_rng.choice(RELEASES)
                settings |= settings_of_release(release)
                kind = ReservedReferee if plan.reservations else Referee
                referee = self.referees[group] = kind(group, settings, clients=True)
                referee.model.moved = self.moved
                referee.model.chosen = self.chosen[group] = ChosenModel(self.arrivals.taken)
                self._begin_policy(group, settings["delivery_limit"])
            checkers[group] = GroupChecker(group, self.referees[group], plan.hash_every, self.trace)
            self.checkers[group].founder = founder[0]
        self.trace.add("world", f"nodes {plan.nodes} faults {' '.join(sorted(plan.faults))}")
        for group, place in self.places.items():
            self.trace.add("world", f"group {group} on {sorted(place.members)} {place.settings}")

    # Running.

    def run(self) -> None:
        """Chaos, then quiet. Raises what broke."""
        self._start_nodes()
        injector = Injector(self)
        self._start_care()
        self._run_until(self.plan.duration_us)
        injector.stop()
        self._heal()
        limit_us = self.scheduler.now_us + LIVENESS_LIMIT_US
        limit_us += LIVENESS_MESSAGE_US * self.workload.published
        while True:
            self._run_until(self.scheduler.now_us + CHECK_EVERY_US)
            waiting = self._unfinished()
            if not waiting:
                break
            if self.scheduler.now_us >= limit_us:
                raise NotLive("still waiting for: " + "; ".join(waiting[:20]))
        self._final_checks()

    def _start_nodes(self) -> None:
        for node in self.nodes.values():
            self._start(node)

    def _start_care(self) -> None:
        """Starts who looks after channels, members and, where there are any, queues."""
        self.scheduler.after(0, None, self._keep_channels)
        self.scheduler.after(0, None, self._administrate)
        self.scheduler.after(POLICY_EVERY_US, None, self._change_policy)
        Choosing(self).start()

    def _begin_policy(self, group: int, delivery_limit: int) -> None:
        """Some queues begin with a policy for dead letters."""
        chosen = self.dead_letter_rng.choice(POLICIES)
        if chosen and not self.plan.cluster:
            self.policies[group] = {"delivery-limit": delivery_limit, **chosen}
        if self.plan.clients.repeat_chance and not self.plan.cluster:
            before = self.policies.get(group, {"delivery-limit": delivery_limit})
            self.policies[group] = {**before, **self._draw_window()}

    def _draw_window(self) -> dict[str, object]:
        """For how long a queue remembers message-ids."""
        draw, window = self._window_rng, dict[str, object]()
        if draw.random() < 0.7:
            window["deduplication-count"] = draw.choice((0, 1, 5, 40, 1_000))
        if draw.random() < 0.4:
            window["deduplication-time"] = draw.choice((1, 50, 1_000, 60_000))
        return window

    def _draw_limits(self) -> dict[str, object]:
        """Returns limits by bytes, and for how long nodes may be away."""
        draw = self._limit_rng
        limits: dict[str, object] = {}
        body = self.plan.clients.body_fixed
        if body >= 0 and draw.random() < LIMITED:
            one = IDENTITY_BYTES + body
            limits["max-length-bytes"] = draw.choice((0, one - 1, 5 * one, 40 * one + 1))
            limits["overflow"] = draw.choice(("drop-head", "reject-publish"))
        if draw.random() < LIMITED:
            limits["consumer-disconnected-timeout"] = draw.choice((0, 200, 2_000))
        return limits

    def _draw_retry(self) -> dict[str, object]:
        """Returns which messages that come back wait, and for how long."""
        draw = self._retry_rng
        kind = draw.choice(("disabled", "all", "failed", "returned"))
        times = {"delayed-retry-min": draw.choice((1, 50)), "delayed-retry-max": 200}
        return {"delayed-retry-type": kind, **times}

    def _change_policy(self) -> None:
        """All nodes hear that a policy gives a queue another limit, as from the metadata."""
        if self.quiet:
            return
        self.scheduler.after(POLICY_EVERY_US, None, self._change_policy)
        pause = LIMITED if self.plan.clients.attribute_chance else POLICY_PAUSE
        if self.plan.streams or self.plan.cluster or self._policy_rng.random() < pause:
            return
        group = self._policy_rng.choice(sorted(self.places))
        choice = self._policy_rng.choice
        policy: dict[str, object] = {"delivery-limit": choice((1, 3, 20, -1))}
        # Drawn apart: the other draws of a seed stay as they were.
        more = Random(choice((0, 1)) << 32 | self.scheduler.now_us ^ self.plan.seed)
        if self.plan.clients.attribute_chance and more.random() < LIMITED:
            policy["message-ttl"] = more.choice((0, 20, 300, 3_000))
        if self.plan.clients.attribute_chance and more.random() < LIMITED:
            policy["max-length"] = more.choice((0, 1, 5, 40))
            policy["overflow"] = more.choice(("drop-head", "reject-publish"))
        if self.plan.clients.attribute_chance and more.random() < LIMITED:
            policy["expires"] = more.choice((1, 500))
        order = Random(self.scheduler.now_us ^ self.plan.seed ^ 0x50)
        policy |= order.choice(ORDERS)
        if self.plan.clients.attribute_chance and order.random() < LIMITED:
            policy["message-expiry"] = "due"
        if self._has_more_limits:
            policy.update(self._draw_limits())
        if self.plan.clients.repeat_chance:
            policy.update(self._draw_window())
        if self.plan.clients.delay_chance:
            policy.update(self._draw_retry())
        self.policies[group] = {**policy, **self.dead_letter_rng.choice(POLICIES)}
        for node in self.nodes.values():
            if node.alive and group in node.queues:
                node.queues[group].configure(self.settings_of(group))

    def settings_of(self, group: int) -> dict[str, object]:
        """Returns the effective settings of a queue that has some."""
        release: dict[str, object] = {}
        if group in self.releases:
            release[COMPATIBILITY] = self.releases[group]
        return {**self.policies[group], **release}

    def _run_until(self, until_us: int) -> None:
        scheduler = self.scheduler
        while True:
            try:
                if scheduler.run(until_us, EVENTS_MAX):
                    return
                break
            except PowerLost as lost:
                self.crash(self.nodes[lost.node], restart_us=scheduler.skewed(1000, 2_000_000))
        raise NotLive(f"more than {EVENTS_MAX} events: somebody is turning in circles")

    def _start(self, node: SimNode) -> None:
        if node.alive:
            return
        try:
            node.start()
        except OSError as error:
            # A disk that cannot be read or written now: production exits and is started again.
            self.trace.add(node.name, f"cannot start: {error}")
            self.crash(node, restart_us=500_000)

    def crash(
        self,
        node: SimNode,
        *,
        restart_us: int,
        keep: float = 0.5,
        refuses: bool = False,
        wipe: bool = False,
    ) -> None:
        """Stops a node at once. `keep`: chance of each unsynced sector to be on the disk."""
        self.trace.add(node.name, f"down for {restart_us / 1e6:.3f} s")
        node.process.alive = False
        self.network.stop(node.number, refuses=refuses)
        chance = self.scheduler.chance
        node.disk.lose_power(lambda: chance(keep))
        if wipe:
            node.disk.wipe()
            self._on_wiped(node)
        self.channels = [c for c in self.channels if c.node != node.number]
        self.scheduler.after(restart_us, None, self._start, node)

    def _on_wiped(self, node: SimNode) -> None:
        node.wiped = {g for g, place in self.places.items() if place.has_replica(node.number)}
        for checker in self.checkers.values():
            checker.on_wiped(node.number)

    def _heal(self) -> None:
        self.trace.add("world", "quiet: everything heals")
        self.quiet = True
        self.network.heal_all()
        config = self.plan.network
        config.loss_chance = config.spike_chance = 0.0
        for node in self.nodes.values():
            node.disk.operations_left = -1
            node.disk.failing = False
            node.disk.empty()
            node.slow[0] = 0
        self.plan.disk.spike_chance = 0.0
        for channel in self.channels:
            channel.drain()

    # Channels.

    def _keep_channels(self) -> None:
        """Opens channels where there are too few; one by one, for ever."""
        self.scheduler.after(self.scheduler.between(5_000, 60_000), None, self._keep_channels)
        for node in self.nodes.values():
            if not node.alive:
                continue
            for group in self.places:
                mine = [c for c in self.channels if c.node == node.number and c.group == group]
                if len(mine) < self.plan.channels_max and self.scheduler.chance(0.3):
                    self._open_channel(node, group, bool(mine))
                    return

    def _open_channel(self, node: SimNode, group: int, second: bool) -> None:
        draw = self.scheduler.rng.random()
        consumes = draw < 0.75 or self.quiet
        publishes = not self.quiet and (draw > 0.4 or second)
        kind: Callable[..., Channel | ReservationChannel] = self._channel_kind(group)
        if self.plan.reservations and not self.quiet and self.scheduler.chance(RESERVATION_SHARE):
            kind = partial(ReservationChannel, replicas=self.replicas_of)
        channel = kind(
            scheduler=self.scheduler,
            trace=self.trace,
            process=node.process,
            node=node.number,
            group=group,
            queue=node.queues[group],
            session=node.new_session(),
            config=self.plan.clients,
            workload=self.workload,
            referee=self.referees[group],
            publishes=publishes,
            consumes=consumes,
            on_closed=self._on_closed,
        )
        if self.quiet:
            channel.drain()
        self.trace.add(channel.name, f"open, publishes {publishes}, consumes {consumes}")
        self.channels.append(channel)

    def _channel_kind(self, group: int) -> type[Channel]:
        if self.plan.partitions:
            return PartitionChannel
        return StreamChannel if self.plan.streams else Channel

    def replicas_of(self, group: int) -> list[tuple[SimNode, Replica]]:
        """Returns the replicas of a group on nodes that run, where they can be read."""
        return [
            (node, node.host.groups[group])
            for node in self.nodes.values()
            if node.alive and group in node.host.groups and not node.host.groups[group].faulty
        ]

    def _on_closed(self, channel: Channel | ReservationChannel) -> None:
        self.channels.remove(channel)

    # What nodes report.

    def poll(self, node: SimNode) -> None:
        """After a node did something: looks at its replicas."""
        if self.broken is not None:
            raise self.broken
        for group, replica in node.host.stopped.items():
            raise InvariantBroken(f"group {group} stops on {node.name}: {replica.stopped}")
        for group, replica in node.host.groups.items():
            self.checkers[group].on_poll(node.number, replica)

    def on_applied(
        self, node: SimNode, group: int, machine: IndexedMachine, data: bytes, effects: list[Effect]
    ) -> None:
        """A replica applied an entry of commands."""
        try:
            self._on_applied(node, group, machine, data, effects)
        except (Exception, InvariantViolated) as error:
            # The replica stops for whatever comes out of an apply: `poll` raises it.
            self.broken = self.broken or error
            raise

    def _on_applied(
        self, node: SimNode, group: int, machine: IndexedMachine, data: bytes, effects: list[Effect]
    ) -> None:
        entry = Entry(data)
        checker = self.checkers[group]
        checker.on_apply(node.number, node.host.replica(group), entry.index, entry.term, data)
        checker.on_effects(node.number, entry.index, effects)
        # Only now: what was lost may have been struck from the books a moment ago.
        referee = self.referees[group]
        if entry.index > referee.index:
            self.trace.add(
                node.name, f"group {group} entry {entry.index}: {summary(data)} -> {len(effects)}"
            )
            if isinstance(referee, Referee):
                referee.on_version(entry.index, machine.version)
            self._follow(group, entry.index, data, effects)
            referee.check_machine(machine)
        checker.on_state(node.number, machine, entry.index)

    def _follow(self, group: int, index: int, data: bytes, effects: list[Effect]) -> None:
        """An entry is applied for the first time."""
        self.referees[group].on_entry(index, data, effects)

    def on_restored(self, node: SimNode, group: int, machine: IndexedMachine) -> None:
        """A replica took its state from a snapshot."""
        try:
            self.checkers[group].on_state(node.number, machine, machine.index, restored=True)
        except (Exception, InvariantViolated) as error:
            self.broken = self.broken or error
            raise

    def _on_frame_sent(self, source: int, target: int, data: bytes) -> None:
        kind = data[4]
        if kind == link_frames.FRAME_APPEND_REPLY:
            _, _, _, group, term, match, rejected, _ = link_frames.frame_header(data)
            if not rejected:
                self.checkers[group].on_acknowledge(source, term, match)
        elif kind == link_frames.FRAME_RAFT:
            group = link_frames.frame_header(data)[3]
            message = msgspec.msgpack.decode(data[link_frames.HEADER_SIZE :])
            if message[0] == VOTE_REPLY and message[2]:
                self.checkers[group].on_vote(source, message[1], target)
            elif message[0] == VOTE:
                self.checkers[group].on_vote(source, message[1], source)

    def group_numbers(self) -> list[int]:
        """Groups whose members may be changed, ascending."""
        return sorted(self.places)

    def leads(self, node: SimNode) -> list[int]:
        """Groups that this node believes to lead."""
        if not node.alive:
            return []
        return [g for g, replica in node.host.groups.items() if replica.is_leader]

    # Faults that need to know more.

    def may_lose(self, number: int) -> bool:
        """Returns whether no other node has lost anything that it has not got back."""
        return not any(
            other != number for checker in self.checkers.values() for other in checker.excused
        )

    def excuse(self, number: int) -> None:
        """Allows the disk of a node to lose what was promised."""
        for checker in self.checkers.values():
            checker.excused.add(number)

    def leader_of(self, group: int) -> tuple[SimNode, Replica] | None:
        """Returns the running node that leads in the highest term, and its replica."""
        found: tuple[SimNode, Replica] | None = None
        for node in self.nodes.values():
            replica = node.host.groups.get(group) if node.alive else None
            if (
                replica is not None
                and replica.is_leader
                and (found is None or replica.term > found[1].term)
            ):
                found = (node, replica)
        return found

    def cluster_fault(self, kind: str) -> None:
        """A fault that only a cluster with a metadata group can have."""

    def change_membership(self, group: int) -> None:
        """Decides to add or remove a member; `_administrate` has it done."""
        place = self.places[group]
        rng = self.scheduler.rng
        outside = [n for n in self.nodes if n not in place.members]
        leading = self.leader_of(group)
        if place.leaving or leading is None:
            return
        least = 1
        if self.plan.faults & {"wipe", "rot", "rot_page", "lose_wal_file"}:
            # A majority must survive the loss of one: never fewer than three voters.
            least = 3
            if set(leading[1].members) != place.members:
                return
        leaves = joins = 0
        if outside and (len(place.members) <= least or self.scheduler.chance(0.5)):
            joins = rng.choice(outside)
        if len(place.members) > least and (not joins or self.scheduler.chance(0.4)):
            leaves = rng.choice(sorted(place.members))
        if not joins and not leaves:
            return
        self.trace.fault("membership", "world", f"group {group}: +{joins} -{leaves}")
        if leaves:
            place.members.discard(leaves)
            place.leaving.add(leaves)
        if joins:
            self._join(group, joins, frozenset(leading[1].members))
        if joins and leaves:
            self.trace.faults["member_replaced"] += 1

    def _join(self, group: int, number: int, members: frozenset[int]) -> None:
        """A node becomes a member: for the first time, or again with the disk that it has."""
        place = self.places[group]
        node = self.nodes[number]
        if number in place.began:
            self.trace.faults["member_returned"] += 1
        place.members.add(number)
        place.began[number] = (members, True)
        self.scheduler.after(
            self.scheduler.skewed(0, 500_000), node.process, self._open_joined, node, group
        )
        self._tell_members(group)

    def _open_joined(self, node: SimNode, group: int) -> None:
        # It may have left again by now.
        if self.places[group].has_replica(node.number):
            node.open_group(group)

    def _close_left(self, node: SimNode, group: int) -> None:
        # It may have come back before it was told that it had left.
        if not self.places[group].has_replica(node.number):
            node.close_group(group)

    def _tell_members(self, group: int) -> None:
        for node in self.nodes.values():
            if node.alive:
                node.members_changed(group)

    def _administrate(self) -> None:
        """Does the work of the metadata's owner: asks leaders until groups are where they should
        be."""
        self.scheduler.after(100_000, None, self._administrate)
        for group, place in self.places.items():
            leading = self.leader_of(group)
            if leading is None:
                continue
            node, replica = leading
            present = set(replica.members) | set(replica.learners)
            missing = sorted(place.members - present)
            leaving = sorted(place.leaving & present)
            if missing and leaving and set(replica.members) != set(leaving):
                node.host.replace_member(group, leaving[0], missing[0])
            elif missing:
                node.host.add_member(group, missing[0])
            elif leaving:
                node.host.remove_member(group, leaving[0])
            if replica.core.members_index <= replica.commit_index:
                gone = place.leaving - present
                for number in sorted(gone):
                    place.leaving.discard(number)
                    other = self.nodes[number]
                    delay_us = self.scheduler.skewed(0, 2_000_000)
                    self.scheduler.after(delay_us, other.process, self._close_left, other, group)
                if gone:
                    self._tell_members(group)

    # The end.

    def _waiting_channels(self) -> list[str]:
        waiting = [(channel.name, channel.waits_for()) for channel in self.channels]
        return [f"{name} waits for {waits}" for name, waits in waiting if waits]

    def _refusing_handles(self) -> list[str]:
        """Nodes that still refuse publishes, although the queues are empty."""
        return [
            f"{node.name} refuses publishes to group {group}"
            for node in self.nodes.values()
            for group, queue in node.queues.items()
            if queue.refuses_publishes
        ]

    def _unapplied_policies(self) -> list[str]:
        return [
            f"{node.name} has not {name} = {value} of group {group}"
            for group in self.policies
            for name, value in machine_settings(self.settings_of(group)).items()
            for node, replica in self.replicas_of(group)
            if replica.machine.settings.get(name, -1) != value  # type: ignore[attr-defined]
        ]

    def _unfinished(self) -> list[str]:
        found: list[str] = []
        for node in self.nodes.values():
            if not node.alive:
                found.append(f"{node.name} is down")
        if found:
            return found
        found += self._waiting_channels()
        found += self._unapplied_policies()
        found += self._refusing_handles()
        for group, referee in self.referees.items():
            place = self.places[group]
            waits = referee.waits_for()
            if waits:
                found.append(waits)
            if place.leaving:
                found.append(f"{place.leaving} did not leave group {group}")
            members = [self.nodes[n].host.groups.get(group) for n in sorted(place.members)]
            replicas = [replica for replica in members if replica is not None]
            if len(replicas) < len(members):
                found.append(f"group {group} is not open everywhere")
                continue
            if any(set(r.members) != place.members for r in replicas):
                found.append(f"voters of {group} are not {sorted(place.members)}")
            states = {(r.last_applied, r.log.last_index) for r in replicas}
            if len(states) > 1:
                found.append(f"replicas of {group} are at {sorted(states)}")
            if sum(r.is_leader for r in replicas) != 1:
                found.append(f"group {group} has no single leader")
            else:
                found += self._left_behind(group, next(r for r in replicas if r.is_leader))
        return found

    def _left_behind(self, group: int, replica: Replica) -> list[str]:
        """Sessions that the queue has and no client."""
        machine = replica.machine
        assert isinstance(machine, WatchedMachine | WatchedStream | WatchedPartition)
        return [
            f"session {session:x} in group {group} to end"
            for session in machine.sessions
            if not self.nodes[session >> 56].queues[group].has_session(session)
        ]

    def _final_checks(self) -> None:
        for group, place in self.places.items():
            self._check_equal(group, sorted(place.members))

    def _check_equal(self, group: int, members: Iterable[int]) -> None:
        """The replicas of these nodes are in the same state."""
        hashes = {
            number: self.nodes[number].host.groups[group].machine.state_hash() for number in members
        }
        if len(set(hashes.values())) > 1:
            self.checkers[group].fail(f"states differ at the end: {hashes}")


def summary(data: bytes) -> str:
    """Returns the commands of an entry, in short."""
    parts = []
    for kind, _flags, session, seq, count, arg, _offset, _length in batch.commands(data):
        name = COMMANDS.get(kind, str(kind))
        who = (
            f"{session >> 56}.{session >> 24 & 0xFF}.{session & 0xFFFFFF}#{seq}" if session else ""
        )
        parts.append(f"{name}({who} {count} {arg})")
    return " ".join(parts)


def run_seed(
    seed: int,
    faults: Collection[str] | None = None,
    sink: Callable[[str], None] | None = None,
    prepare: Callable[[World], None] | None = None,
    *,
    streams: bool = False,
    partitions: bool = False,
    reservations: bool = False,
    cluster: bool = False,
    mixed: bool = False,
) -> Result:
    """Runs one seed; a failure is in the result, with the tail of the trace."""
    result = Result(seed)
    plan = draw_plan(
        seed,
        faults,
        streams=streams,
        partitions=partitions,
        reservations=reservations,
        cluster=cluster,
    )
    if cluster:
        # It builds on this module.
        from convoymq.sim.cluster_world import ClusterWorld

        world: World = ClusterWorld(plan, sink)
    elif mixed:
        from convoymq.sim.mixed_world import MixedWorld

        world = MixedWorld(plan, sink)
    else:
        world = World(plan, sink)
    if prepare is not None:
        prepare(world)
    try:
        world.run()
    except (Exception, InvariantViolated) as error:
        result.failure = f"{type(error).__name__}: {error}"
        result.detail = traceback.format_exc()
        world.trace.add("world", result.failure)
    result.simulated_us = world.scheduler.now_us
    result.events = world.scheduler.events
    result.digest = world.trace.digest
    result.faults = world.trace.faults
    result.tail = list(world.trace.tail)
    load = world.workload
    result.workload = {
        "published": load.published,
        "confirmed": load.confirmed,
        "delivered": load.delivered,
        "settled": load.settled,
        "channels": load.channels,
        "read": load.read,
        "sent_locally": load.sent_locally,
        "sent_by_leader": load.sent_by_leader,
    }
    return result
