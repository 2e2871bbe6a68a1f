"""A broker group with its name servers, and two other brokers to which messages escape.

Brokers and name servers are production's, whole: only their sockets, disks and clocks are
simulated. Clients send real requests, but for plain messages, which go into the master by a call.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import structlog

from convoymq.rocketmq.acting.lock_requests import place_of
from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.remoting.values import MASTER_ID
from convoymq.sim.broker_group.acting_clients import QUEUE, ClientNode
from convoymq.sim.broker_group.acting_faults import ACTING_KINDS, OUTAGES, ActingInjector
from convoymq.sim.broker_group.acting_node import GROUP, ActingNode, NameServerNode, running
from convoymq.sim.broker_group.acting_pops import PopBook
from convoymq.sim.broker_group.acting_referee import LATE_US, ActingReferee
from convoymq.sim.broker_group.referee import Replica
from convoymq.sim.broker_group.world import BrokerGroupLoad, BrokerGroupWorld
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.engine import NotLive, Result
from convoymq.sim.faults import Plan, Variation
from convoymq.sim.nodes import SimNode
from convoymq.sim.sockets import SocketNode, process_name
from convoymq.sim.world import World

if TYPE_CHECKING:
    from structlog.typing import EventDict

LOOK_US = 50_000
ONLINE_MS_MAX = 1_000
SETTLED_US = 12_000_000
"""A slave acts after the master's lease, and attempts that failed before are repeated after 10 s
at the latest."""
AWAY_US = 20_000_000
TARGETS_AWAY_US = 6_000_000
DISAGREED_US = 4_000_000
SUPERSEDED_US = 3_000_000
OUTAGE_PLAN_US = 12_000_000


class ActingWorld(BrokerGroupWorld):
    """A broker group under test, whose slaves act for its master."""

    injector_class = ActingInjector
    pauses_us = (60_000, 300_000)
    nodes: dict[int, SimNode]
    replicas: Mapping[int, ActingNode]

    def _make_nodes(self, replicas: int) -> None:
        alone = replace(self.settings, replicas=1, in_sync=1, in_sync_min=1, auto=False)
        durable = replace(self.store_settings, flush="SYNC_FLUSH")
        draw = self.own_rng(0xAC7)
        self.is_old_compatible = draw.random() < 0.3
        self.pause_ms = draw.choice((60, 300, 800))
        self.stays_away = draw.random() < 0.25
        self.targets_too = draw.random() < 0.5
        self.timed_ms_max = 22_000 if self.stays_away else 6_000
        self.acting = ActingReferee()
        self.restarts = self.locked = self.taken_over = 0
        self.told: dict[int, int] = {}
        """Target -> generation below which it takes nothing."""
        self.refused: dict[tuple[object, int], int] = {}
        """Process, its generation -> time of the first attempt that a target had to refuse."""
        self._disagreed_us = -2 * DISAGREED_US
        self._numbers = 1 << 40
        self.pops = PopBook()
        self.twins: dict[int, ActingNode] = {}
        """Brokers with the id of a replica, by their numbers."""
        self.name_servers: list[NameServerNode] = []
        made = {
            n: ActingNode(self, n, self.settings, self.store_settings)
            for n in range(1, replicas + 1)
        }
        first = replicas + 1
        self.targets = {n: ActingNode(self, n, alone, durable) for n in (first, first + 1)}
        self.name_servers = [NameServerNode(self, n) for n in (first + 2, first + 3)]
        self.replicas = made
        self._twin_number = first + 5
        others = {node.number: node for node in (*self.name_servers, ClientNode(self, first + 4))}
        self.nodes = {**made, **self.targets, **others}

    def _start_care(self) -> None:
        super()._start_care()
        self.scheduler.after(0, None, self._look)

    @property
    def brokers(self) -> list[ActingNode]:
        """Returns the brokers that consumers read from: the master, and the targets."""
        return [*self.replicas.values(), *self.targets.values()]

    def serving(self) -> ActingNode | None:
        """Returns the replica that a client of the group finds."""
        return next((node for node in self.replicas.values() if node.serves), None)

    def found(self) -> ActingNode | None:
        """Returns a replica that a client of the group finds: name servers may disagree."""
        serving = [node for node in self.replicas.values() if node.serves]
        return self.scheduler.rng.choice(serving) if serving else None

    def new_number(self) -> int:
        """Returns the number of a new message."""
        self._numbers += 1
        return self._numbers

    def run(self) -> None:
        """See `Simulation`: what production logs is part of the trace."""
        before = structlog.get_config()
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            processors=[self._on_logged],
        )
        try:
            super().run()
        finally:
            structlog.configure(**before)
            for node in self.nodes.values():
                self._on_down(node)

    def _on_down(self, node: SimNode) -> None:
        if isinstance(node, SocketNode) and node.alive:
            node.loop.end()

    def _on_logged(self, _logger: object, _level: str, event: EventDict) -> EventDict:
        text = " ".join(f"{name}={value}" for name, value in event.items() if name != "event")
        self.trace.add(process_name(), f"{event['event']} {text}")
        raise structlog.DropEvent

    # Reports of nodes and clients.

    def on_opened(self, node: Replica) -> None:
        """See `BrokerGroupWorld`."""
        if node.number in self.replicas:
            super().on_opened(node)
        self.restarts += 1

    def on_escape(self, body: bytes, end: int) -> None:
        """A message of an acting slave arrives at a target. `end`: of the slave's log."""
        self.acting.on_escape(int.from_bytes(body[:8], "big"), self.scheduler.now_us, end)

    def on_attempt(self, target: ActingNode, sender: ActingNode, generation: int) -> bool:
        """An attempt arrives at a target; returns whether the target has to refuse it."""
        if generation >= self.told.get(target.number, 0):
            return False
        since_us = self.refused.setdefault((sender.process, generation), self.scheduler.now_us)
        if self.scheduler.now_us - since_us > SUPERSEDED_US:
            self.broken = InvariantBroken(f"{sender.name} goes on, and was superseded")
        return True

    def on_told(self, target: ActingNode, generation: int) -> None:
        """A target promised to take no attempts of earlier generations."""
        self.told[target.number] = max(generation, self.told.get(target.number, 0))

    def on_locked(self, node: ActingNode, client: str, asked: tuple[int, int]) -> None:
        """A client has a lock. `asked`: `known_epoch` of the referee when it asked."""
        self.locked += 1
        if self.twins:
            # They vote beside the replicas whose ids they have.
            self.acting.on_disk_lost()
        locks, place = node.broker.locks, place_of(QUEUE)
        self.acting.on_locked(QUEUE, client, locks.epoch(GROUP, place), asked, self.restarts)
        if locks.may_consume(GROUP, "another", place, node.steady_ms()):
            raise InvariantBroken(f"{node.name}: another client may pull from {QUEUE}")

    def on_taken_over(
        self,
        node: ActingNode,
        peer: ActingNode,
        offsets: Mapping[str, Mapping[int, int]],
        topics: set[str],
        groups: set[str],
    ) -> None:
        """A master took metadata of a slave over; the slave had these before."""
        self.taken_over += 1
        own = node.broker
        for key, table in offsets.items():
            for queue, offset in table.items():
                if own.offsets.table.get(key, {}).get(queue, -1) < offset:
                    raise InvariantBroken(
                        f"{node.name}: {key} {queue} fell below what {peer.name} has: {offset}"
                    )
        lost = topics - own.topics.table.keys() | groups - own.groups.table.keys()
        if lost:
            raise InvariantBroken(f"{node.name} lacks {sorted(lost)}, which {peer.name} has")

    def on_persisted(self, node: ActingNode, table: Mapping[str, Mapping[int, int]]) -> None:
        """A replica persisted what clients committed."""
        if node.number in self.replicas:
            self.acting.on_persisted(node.number, table.get(f"{QUEUE.topic}@{GROUP}", {}))

    def _look(self) -> None:
        self.scheduler.after(LOOK_US, None, self._look)
        self._look_at_services()
        for node in self.replicas.values():
            self._look_at_isolation(node)

    def _look_at_services(self) -> None:
        """Special services run on the master or on slaves."""
        now_us = self.scheduler.now_us
        lists = {
            MASTER_ID in node.server.tables.member_group("c", "a").broker_addrs
            for node in self.name_servers if node.alive
        }  # fmt: skip
        if len(lists) > 1 or any(now_us < node.knows_us for node in self.name_servers):
            self._disagreed_us = now_us
        found = running(self.replicas.values(), now_us)
        # Of two slaves the targets refuse one.
        if len(found) > 1 and found[0].is_master:
            self.acting.splits += 1
            if now_us - self._disagreed_us > DISAGREED_US:
                names = [node.name for node in found]
                raise InvariantBroken(f"special services run on {names}")

    def _look_at_isolation(self, node: ActingNode) -> None:
        """A slave is online within a second of its link."""
        slave = node.slave
        is_waiting = (
            node.alive and slave is not None and node.state is State.ISOLATED
            and slave.silent_ms(node.steady_ms()) is not None
        )  # fmt: skip
        if not is_waiting or node.process.frozen_until_us > self.scheduler.now_us:
            node.transfers_ms = None
        elif node.transfers_ms is None:
            node.transfers_ms = node.steady_ms()
        elif node.steady_ms() - node.transfers_ms > ONLINE_MS_MAX:
            raise InvariantBroken(f"{node.name} transfers, and is not online a second later")

    # Faults.

    def on_jump(self, node: SimNode, jump_ms: int) -> None:
        """A wall clock jumps: what it dates is late or early by so much."""
        self.trace.fault("jump", node.name, f"{jump_ms} ms")
        node.wall_offset_ms += jump_ms
        node.process.wall_offset_ms += jump_ms
        self.acting.clocks_ms += abs(jump_ms)

    def crash(
        self,
        node: SimNode,
        *,
        restart_us: int,
        keep: float = 0.5,
        refuses: bool = False,
        wipe: bool = False,
    ) -> None:
        """See `World`. Targets keep their disks: each is the only one of its broker."""
        if node.number in self.replicas:
            if wipe:
                self.acting.on_disk_lost()
            if wipe or (keep < 1 and not self.store_settings.is_sync):
                # Without the log that they belong to, offsets are lost.
                self.acting.persisted.pop(node.number, None)
            super().crash(node, restart_us=restart_us, keep=keep, refuses=refuses, wipe=wipe)
        else:
            World.crash(self, node, restart_us=restart_us, keep=keep, refuses=refuses)

    def start_twin(self, original: ActingNode, duration_us: int) -> None:
        """A broker with the id of a replica and an empty disk runs for a while."""
        if self.owes_any() or self.twins:
            return
        number = self._twin_number
        self._twin_number += 1
        twin = ActingNode(self, number, self.settings, self.store_settings,
                          twin_of=original.number)  # fmt: skip
        self.trace.fault("twin", f"{twin.name} is {original.name} too")
        self.twins[number] = self.nodes[number] = twin
        self._start(twin)
        self.scheduler.after(duration_us, None, self._end_twin, twin, original.number)

    def _end_twin(self, twin: ActingNode, original: int) -> None:
        """Ends a twin for ever. Copies on its disk are lost, as those of one replica may be."""
        if twin.alive:
            self._on_down(twin)
            twin.process.alive = False
            self.network.stop(twin.number, refuses=True)
        del self.nodes[twin.number], self.twins[twin.number]
        self.acting.on_disk_lost()
        self.debts[original] = self.referee.end
        self.trace.add(twin.name, "ends for ever")

    def _start(self, node: SimNode) -> None:
        # A twin that was down at its end stays so.
        if node.number in self.nodes:
            super()._start(node)

    def owes_any(self) -> bool:
        """See `BrokerGroupWorld`: what a twin has, it will lose."""
        return bool(self.twins) or super().owes_any()

    def copies(self) -> list[int]:
        """See `BrokerGroupWorld`."""
        return [*super().copies(), *(twin.copied for twin in self.twins.values())]

    # Phases.

    def _first_phase(self) -> None:
        super()._first_phase()
        if self.stays_away:
            self._master_stays_away()

    def _master_stays_away(self) -> None:
        """All but the master heal: what falls due in a slave's log leaves on time."""
        self._injector.stop()
        self._heal()
        # Messages that are far from due.
        self._run_until(self.scheduler.now_us + 1_000_000)
        master = self.replicas[1]
        if master.alive:
            self.trace.fault("stays_away", master.name)
            self.crash(master, restart_us=AWAY_US + 1_000_000, keep=1.0, refuses=True)
        begun_us = self.scheduler.now_us
        if self.targets_too:
            # Half messages have time to fail at them.
            for target in self.targets.values():
                self.crash(target, restart_us=TARGETS_AWAY_US, keep=1.0, refuses=True)
        self._run_until(begun_us + AWAY_US)
        acting = self.serving()
        if master.alive or acting is None or not acting.runs_special:
            return
        settled_us = begun_us + SETTLED_US + self.targets_too * TARGETS_AWAY_US
        until_us = begun_us + AWAY_US - LATE_US
        late = self.acting.late(settled_us, until_us, acting)
        if late:
            raise NotLive(f"{acting.name} acts, and {late[:5]} did not leave on time")

    def _unfinished(self) -> list[str]:
        waiting = [f"{node.name} opens" for node in self.brokers if not node.is_ready]
        waiting = waiting or super()._unfinished()
        waiting += [f"{n.name} has unsent offsets" for n in self.brokers if n.is_ready
                    and n.broker.offsets.unsent]  # fmt: skip
        if waiting:
            return waiting
        master = self.replicas[1]
        if not master.runs_special:
            return [f"the master does not run special services: {master.state}"]
        served = [master, *self.targets.values()]
        lacking = self.acting.lacking(served, self.acting.sent)
        if not lacking:
            return [f"{number} is to be popped" for number in self.pops.lacking(served)[:5]]
        return [f"{number} is to be delivered" for number in lacking[:5]]

    def _final_checks(self) -> None:
        super()._final_checks()
        self.acting.check_at_rest([self.replicas[1], *self.targets.values()])
        self.acting.check_offsets(self.replicas[1].broker.offsets.of(GROUP, QUEUE.topic))

    def report(self, result: Result) -> None:
        """See `Simulation`."""
        super().report(result)
        result.workload |= {
            "special": len(self.acting.sent),
            "escaped": len(self.acting.escapes),
            "doubled": self.acting.doubled,
            "splits": self.acting.splits,
            "locked": self.locked,
            "taken over": self.taken_over,
            "popped": self.pops.popped,
            "popped again": self.pops.again,
        }


class ActingLoad(BrokerGroupLoad):
    """Broker groups whose slaves act for their master."""

    text = "broker groups, their name servers, and special services that escape to other brokers"
    kinds = (
        *(kind for kind in BrokerGroupLoad.kinds if kind != "clock"), *ACTING_KINDS,
    )  # fmt: skip
    world_class = ActingWorld

    def vary(self, seed: int, share: float) -> Variation:
        """See `PlannedLoad`."""
        draw = Random(seed ^ 0x0A7E)
        return Variation(kinds=frozenset(kind for kind in ACTING_KINDS if draw.random() < share))

    def make_plan(self, seed: int, faults: Collection[str] | None) -> Plan:
        """See `PlannedLoad`: time for an outage, and for what comes after it."""
        plan = super().make_plan(seed, faults)
        if plan.faults.intersection(OUTAGES):
            plan.duration_us = max(plan.duration_us, OUTAGE_PLAN_US)
        return plan
