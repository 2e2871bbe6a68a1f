"""Acts on a topic while a run goes: load, changes, operators and faults.

Each kind comes by itself, at times of its own. `heal` ends all faults, and leaves operators at work
who have nothing but the end in mind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from convoymq.sim.topics.members import SimMember
from convoymq.sim.topics.metadata import MARGIN_MS, TTL_MS, CoordinatorSeat
from convoymq.sim.topics.partitions import SimPartition
from convoymq.topics.rules.changes import Change, Kind, Phase, plan_merge, plan_move, plan_split
from convoymq.topics.rules.commands import (
    EARLIEST,
    LATEST,
    AcceptLoss,
    ExpireProducers,
    ResumeParked,
    SkipParked,
    Trim,
)
from convoymq.topics.rules.group import Expire, Seek
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.retention import forgets_producers
from convoymq.topics.rules.topic import Abort, Begin, DeclareLost, Delete, GiveUp, Retire

if TYPE_CHECKING:
    from convoymq.sim.topics.world import TopicWorld

VERSIONS_MAX = 14
OPERATOR_MS = 40
PRODUCER_TTL_MS = 600
"""Longer than any message waits for its outcome."""
KEYLESS = 0.2
"""Probability of a message without a key."""


class Operations:
    """Everything that a run does of itself."""

    def __init__(self, world: TopicWorld) -> None:
        self.world = world
        self.sent = 0
        self._members = 0
        self._changes = 0
        self._quick: list[int] = []
        """Partitions that are to be sealed again at once."""
        self._never_back: set[int] = set()

    def begin(self) -> None:
        """Starts the load and whatever the plan has."""
        world, plan = self.world, self.world.plan
        for group in self.world.metadata.groups:
            for _ in range(plan.members):
                world.after(world.draw(0, 30), self.join, group)
        world.after(1, self._produce)
        self._every(40, 160, self._change)
        self._every(OPERATOR_MS, OPERATOR_MS, self._operate)
        faults: dict[str, tuple[int, int, Callable[[], None]]] = {
            "leader": (30, 150, self._crash_leader),
            "controller": (60, 200, self._crash_controller),
            "coordinator": (60, 200, self._crash_coordinator),
            "consumer": (80, 300, self._crash_consumer),
            "pause": (100, 300, self._pause_consumer),
            "seek": (300, 700, self._seek),
            "outage": (200, 500, self._outage),
            "cutoff": (200, 500, self._cut_off),
            "silent": (100, 300, self._silence),
            "trim": (150, 400, self._trim),
            "restart": (150, 500, self._restart_producer),
            "lanes": (50, 200, self._change_lanes),
            "expire": (200, 500, self._abandon_group),
            "forget": (40, 160, self._forget_producers),
            "mute": (40, 160, self._mute),
            "unheard": (100, 300, self._lose_answers),
        }
        for kind, (low, high, call) in faults.items():
            if plan.has(kind):
                self._every(low, high, call)

    def _every(self, low: int, high: int, call: Callable[[], None]) -> None:
        def again() -> None:
            call()
            if self.world.chaos or call == self._operate:
                self.world.after(self.world.draw(low, high), again)

        self.world.after(self.world.draw(low, high), again)

    def _produce(self) -> None:
        world, plan = self.world, self.world.plan
        if self.sent >= plan.messages or not world.chaos:
            return
        for _ in range(self.world.draw(1, 3)):
            keyless = plan.has("keyless") and self.world.scheduler.chance(KEYLESS)
            if keyless:
                world.faults["keyless"] += 1
            key = b"" if keyless else b"k%d" % self.world.draw(0, plan.keys - 1)
            self.sent += 1
            producer = world.producers[self.world.draw(0, plan.producers - 1)]
            producer.produce(self.sent, key)
        gap = max(1, plan.chaos_ms * 2 // plan.messages)
        self.world.after(self.world.draw(1, 2 * gap), self._produce)

    # Members

    def join(self, group: str) -> None:
        """A new member of a group."""
        self._members += 1
        member = f"{group}m{self._members}"
        has_window = self.world.plan.has("window") and self.world.scheduler.chance(0.5)
        if has_window:
            self.world.fault("window", member)
        made = SimMember(self.world, group, member, has_lanes=not has_window)
        self.world.consumers[member] = made

    def _alive(self) -> list[SimMember]:
        return [consumer for consumer in self.world.consumers.values() if consumer.alive]

    def _crash_consumer(self) -> None:
        alive = self._alive()
        if not self.world.chaos or not alive:
            return
        consumer = self.world.scheduler.rng.choice(alive)
        if self.world.scheduler.chance(0.3):
            self.world.fault("leave", consumer.member)
            consumer.leave()
            self.world.after(TTL_MS, consumer.crash)
        else:
            self.world.fault("consumer", consumer.member)
            consumer.crash()
        self.world.after(self.world.draw(5, 150), self.join, consumer.group)

    def _pause_consumer(self) -> None:
        alive = self._alive()
        if self.world.chaos and alive:
            consumer = self.world.scheduler.rng.choice(alive)
            self.world.fault("pause", consumer.member)
            consumer.pause(self.world.now + self.world.draw(20, 2 * TTL_MS))

    def _change_lanes(self) -> None:
        alive = self._alive()
        if self.world.chaos and alive:
            consumer = self.world.scheduler.rng.choice(alive)
            lanes = self.world.draw(1, 5)
            self.world.fault("lanes", f"{consumer.member} {lanes}")
            consumer.change_lanes(lanes)

    # Changes

    def _change(self) -> None:
        topic = self.world.metadata.topic
        if not self.world.chaos:
            return
        running = topic.running
        if running is not None:
            aborts = self.world.plan.has("abort") and running.phase in (
                Phase.PREPARED,
                Phase.TARGETS_READY,
            )
            if aborts and self.world.scheduler.chance(0.5):
                self.world.fault("abort", running.change_id)
                self.world.metadata.controller.log.propose(Abort(running.change_id))
            return
        if topic.route.version < VERSIONS_MAX and self.world.metadata.controller.acting is not None:
            planned = self.draw_change()
            if planned is not None:
                self._propose_change(planned)

    def _propose_change(self, planned: Change) -> None:
        kind, sources = planned.kind.value, planned.sources
        self.world.fault(kind, f"{sources} to {[span.pid for span in planned.targets]}")
        self.world.metadata.controller.log.propose(Begin(planned))
        if self.world.plan.has("empty") and self.world.scheduler.chance(0.5):
            self.world.after(self.world.draw(1, 30), self._change)
        if self.world.plan.has("abort") and self.world.scheduler.chance(0.3):
            self.world.after(self.world.draw(3, 12), self._change)
        if self.world.plan.has("outage") and self.world.scheduler.chance(0.05):
            self.world.unbuildable.add(planned.targets[0].pid)

    def draw_change(self) -> Change | None:
        """A random change of the newest route that the plan has."""
        topic, random, plan = self.world.metadata.topic, self.world.scheduler.rng, self.world.plan
        route = topic.route
        self._changes += 1
        name = f"c{self._changes}"
        kinds = [kind for kind in ("split", "merge", "move") if plan.has(kind)]
        kind = random.choice(kinds) if kinds else ""
        wide = [span for span in route.spans if span.width >= 2]
        if kind == "split" and wide:
            span = random.choice(wide)
            cuts = sorted(
                random.sample(
                    range(span.lo + 1, span.hi), min(span.width - 1, random.choice((1, 1, 2)))
                )
            )
            return plan_split(route, span.pid, cuts, topic.next_pid, name)
        if kind == "merge" and len(route.spans) >= 2:
            count = min(len(route.spans), random.choice((2, 2, 3)))
            first = random.randrange(len(route.spans) - count + 1)
            pids = route.pids[first : first + count]
            return plan_merge(route, pids, topic.next_pid, name)
        if kind == "move":
            rebucket = random.random() < 0.2
            how = Kind.REBUCKET if rebucket else Kind.MOVE
            return plan_move(route, random.choice(route.pids), topic.next_pid, name, how)
        return None

    # Faults

    def _draw_partition(self, *, newest: bool = True) -> SimPartition | None:
        world = self.world
        pids = world.metadata.topic.route.pids if newest else tuple(world.partitions)
        partition = world.partitions.get(self.world.scheduler.rng.choice(pids))
        return partition if world.chaos else None

    def _crash_leader(self) -> None:
        partition = self._draw_partition(newest=self.world.scheduler.chance(0.6))
        if partition is not None and partition.serves:
            self.world.fault("leader", partition.pid)
            partition.crash(self.world.draw(5, 60))

    def _crash_controller(self) -> None:
        if self.world.chaos:
            self.world.fault("controller", "")
            zombie = self.world.scheduler.chance(0.4)
            self.world.metadata.controller.crash(self.world.draw(1, 80), zombie=zombie)

    def _crash_coordinator(self) -> None:
        if self.world.chaos:
            seat = self.world.scheduler.rng.choice(list(self.world.metadata.groups.values()))
            self.world.fault("coordinator", seat.state.name)
            seat.crash(self.world.draw(1, 80), zombie=self.world.scheduler.chance(0.4))

    def _outage(self) -> None:
        partition = self._draw_partition()
        if partition is not None and not partition.dark:
            world = self.world
            world.fault("outage", partition.pid)
            world.may_accept(partition)
            partition.go_dark()
            self.world.after(self.world.draw(40, 100), self._go_round, partition.pid)
            if self.world.scheduler.chance(0.2):
                self._never_back.add(partition.pid)
            else:
                self.world.after(self.world.draw(60, 500), self._come_back, partition)

    def _come_back(self, partition: SimPartition) -> None:
        if partition.dark or partition.cut:
            self.world.fault("return", partition.pid)
            partition.come_back()

    def _cut_off(self) -> None:
        partition = self._draw_partition()
        if partition is not None and not partition.dark and not partition.cut:
            world = self.world
            world.fault("cutoff", partition.pid)
            world.may_accept(partition)
            partition.cut = True
            self.world.after(self.world.draw(1, 20), self._go_round, partition.pid)
            self.world.after(self.world.draw(60, 400), self._come_back, partition)

    def _go_round(self, pid: int) -> None:
        """An operator has a partition moved whose server does not answer."""
        world, topic = self.world, self.world.metadata.topic
        partition = world.partitions.get(pid)
        if partition is None or not (partition.dark or partition.cut) or not world.chaos:
            return
        change = topic.running
        if change is None and pid in topic.route.pids:
            self._changes += 1
            name = f"c{self._changes}"
            self._propose_change(plan_move(topic.route, pid, topic.next_pid, name))
        elif change is not None and change.phase is Phase.SEALING and pid in change.sources:
            world.metadata.controller.log.propose(GiveUp(change.change_id, pid))
        self.world.after(self.world.draw(5, 40), self._go_round, pid)

    def _silence(self) -> None:
        partition = self._draw_partition()
        if partition is not None:
            self.world.fault("silent", partition.pid)
            partition.silent = True
            self.world.after(self.world.draw(100, 400), self._hear, partition)

    @staticmethod
    def _hear(partition: SimPartition) -> None:
        partition.silent = False

    def _mute(self) -> None:
        """A source that a group has before it is not heard by the group's coordinator."""
        metadata = self.world.metadata
        seat = self.world.scheduler.rng.choice(list(metadata.groups.values()))
        ahead = [
            pid
            for pid, partition in metadata.topic.lineage.partitions.items()
            if (partition.sealed_version or 0) > seat.state.cv
        ]
        if self.world.chaos and ahead:
            link = (self.world.scheduler.rng.choice(ahead), seat.state.name)
            self.world.fault("mute", f"{link[0]} to {link[1]}")
            self.world.network.mute.add(link)
            self.world.after(self.world.draw(60, 400), self.world.network.mute.discard, link)

    def _lose_answers(self) -> None:
        partition = self._draw_partition(newest=self.world.scheduler.chance(0.5))
        if partition is not None:
            mute = self.world.network.mute
            self.world.fault("unheard", partition.pid)
            mute.add(partition.pid)
            self.world.after(self.world.draw(60, 400), mute.discard, partition.pid)

    def _trim(self) -> None:
        partition = self._draw_partition(newest=False)
        if partition is not None and partition.serves and not partition.blocked:
            start = self.world.draw(1, max(1, partition.machine.end_offset))
            self.world.fault("trim", f"{partition.pid} to {start}")
            partition.submit(Trim(start), lambda answer: None)

    @property
    def _seals_from_outside(self) -> bool:
        """Returns whether partitions may be sealed from outside: nobody knows the source positions
        that they stored."""
        return bool(self.world.plan.kinds & {"outage", "cutoff"})

    def _restart_producer(self) -> None:
        if self.world.chaos and not self._seals_from_outside:
            producer = self.world.scheduler.rng.choice(self.world.producers)
            self.world.fault("restart", producer.producer)
            producer.restart()

    def _forget_producers(self) -> None:
        world = self.world
        if not world.chaos or self._seals_from_outside or world.plan.has("unheard"):
            return
        before_ms = self.world.now - PRODUCER_TTL_MS
        # Nobody sends the same for a week, for which this time stands.
        if any(producer.waits_since(before_ms) for producer in world.producers):
            return
        for each in forgets_producers(world.metadata.topic):
            partition = world.partitions[each.pid]
            oldest_ms = partition.machine.dedup.oldest_ms
            if partition.serves and oldest_ms is not None and oldest_ms < before_ms:
                world.fault("forget", partition.pid)
                partition.submit(ExpireProducers(before_ms, self.world.now), lambda answer: None)

    def _seek(self) -> None:
        world = self.world
        if not world.chaos:
            return
        lineage = world.metadata.topic.lineage
        seat = self.world.scheduler.rng.choice(list(world.metadata.groups.values()))
        latest = lineage.latest.version
        version = self.world.draw(lineage.first_version(), latest)
        start = LATEST if version == latest and self.world.scheduler.chance(0.3) else EARLIEST
        world.fault("seek", f"{seat.state.name} to {version}")
        self._seek_to(seat, version, start)

    def _seek_to(self, seat: CoordinatorSeat, version: int, start: int) -> None:
        topic = self.world.metadata.topic
        gone = topic.kept.deleted
        pids = [pid for pid in topic.lineage.route(version).pids if pid not in gone]
        seat.log.propose(Seek(seat.state.group_epoch, version, dict.fromkeys(pids, start)))

    def _abandon_group(self) -> None:
        """All members of a group are gone, for long."""
        if not self.world.chaos:
            return
        group = self.world.scheduler.rng.choice(list(self.world.metadata.groups))
        self.world.fault("expire", group)
        for consumer in self._alive():
            if consumer.group == group:
                consumer.crash()
        self.world.after(TTL_MS + 2 * MARGIN_MS, self._expire_group, group)

    def _expire_group(self, group: str) -> None:
        seat = self.world.metadata.groups[group]
        if seat.state.members:
            if self.world.chaos:
                self.world.after(MARGIN_MS, self._expire_group, group)
            return
        seat.log.propose(Expire(seat.state.idle_since_ms))
        self.world.after(self.world.draw(5, 200), self.join, group)

    # Operators

    def _operate(self) -> None:
        """Looks at parked keys, expired data, partitions to delete and lost ones."""
        world = self.world
        for partition in list(world.partitions.values()):
            if partition.serves and not partition.blocked:
                self._look_at(partition)
        topic, controller = world.metadata.topic, world.metadata.controller
        if controller.acting is None:
            return
        for seat in world.metadata.groups.values():
            if seat.state.has_lost_data(topic.kept) and not world.plan.weak:
                self._seek_to(seat, topic.lineage.first_version(), EARLIEST)
        if world.plan.kinds & {"trim", "empty", "expire"}:
            if self.world.scheduler.chance(0.3):
                controller.log.propose(Retire())
            retired = [
                pid
                for pid, partition in topic.lineage.partitions.items()
                if partition.state is PartitionState.RETIRED
            ]
            if retired and self.world.scheduler.chance(0.3):
                controller.log.propose(Delete(frozenset(retired[:2])))
        if not world.chaos:
            for pid in topic.unknown_ends():
                if pid in self._never_back:
                    controller.log.propose(DeclareLost(pid))

    def _look_at(self, partition: SimPartition) -> None:
        random = self.world.scheduler.rng
        for name, own in partition.machine.groups.items():
            if own.handed_over:
                continue
            if own.expired and not self.world.plan.weak:
                partition.submit(AcceptLoss(name), lambda answer: None)
            for key, parked in own.parked.keys.items():
                roll = random.random()
                if roll < 0.05 and not parked.resuming:
                    skip = SkipParked(name, key, parked.entries[0].token)
                    partition.submit(skip, lambda answer: None)
                elif not parked.resuming and (roll < 0.3 or not self.world.chaos):
                    partition.submit(ResumeParked(name, key), lambda answer: None)

    def heal(self) -> None:
        """Everything that can come back does."""
        world, topic = self.world, self.world.metadata.topic
        for partition in list(world.partitions.values()):
            partition.silent = False
            lost = partition.pid in self._never_back and partition.pid in topic.unknown_ends()
            if (partition.dark or partition.cut) and not lost:
                partition.come_back()
        self._never_back &= set(topic.unknown_ends())
        for group in world.metadata.groups:
            if not any(c.group == group and not c.core.leaves for c in self._alive()):
                self.join(group)
