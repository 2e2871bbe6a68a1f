"""A broker group in the simulator, and its clients: they talk to brokers, which pass nothing on.

Name servers stand beside the clients: they reach all nodes, and name the master, or in its place
the smallest id that is alive. A client asks them again when a request fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.replication.faults import NODES, Fault
from benchmarks.replication.ledger import Delivered
from benchmarks.replication.simulated import BODY_BYTES, TURN_US, Maker, Measured, key_of, plan_of
from convoymq.replication.group.types import GroupSettings, SlaveState
from convoymq.rocketmq.store.settings import StoreSettings
from convoymq.rocketmq.store.types import Draft, GetStatus, Message, PutStatus
from convoymq.sim.broker_group.node import BrokerNode
from convoymq.sim.broker_group.referee import TOPIC, BrokerGroupReferee
from convoymq.sim.broker_group.world import BrokerGroupLoad, BrokerGroupWorld, is_linked

MASTER, QUEUES, PULL_MAX = NODES[0], len(NODES), 32
RETRY_US = 50_000
PULL_US = 2_000
"""From an answer without messages to the next pull: the broker would hold it for as long."""
REGISTER_US = 1_000_000
"""Longest time from a broker's start to its listing: `brokerHeartbeatInterval`."""


class Client:
    """A client: a producer of all queues, and the consumer of one."""

    def __init__(self, world: MeasuredGroup, number: int) -> None:
        self.world = world
        self.number = number
        self.sent = 0
        self.next = 0
        """Offset that it reads from; it keeps it, whatever brokers do."""
        self._pulls = 0
        self._later(0, self._send)
        self._later(int(world.fault.consume_from_s * 1e6), self._pull)

    def _later(self, delay_us: int, call: Callable[..., None], *arguments: object) -> None:
        self.world.scheduler.after(delay_us, None, call, *arguments)

    def _delay_us(self) -> int:
        network = self.world.plan.network
        return self.world.scheduler.between(network.delay_min_us, network.delay_max_us)

    # Producer.

    def _send(self) -> None:
        world = self.world
        if world.quiet:
            return
        self._later(world.scheduler.between(TURN_US // 2, TURN_US), self._send)
        master = world.nodes[MASTER]
        if not master.alive:
            return
        for _ in range(world.scheduler.between(1, 2)):
            self.sent += 1
            queue, number = self.sent % QUEUES, self.number << 32 | self.sent
            body = self.number.to_bytes(4, "big") + self.sent.to_bytes(8, "big")
            draft = Draft(TOPIC, queue, number.to_bytes(8, "big") + body + bytes(BODY_BYTES - 20))
            world.ledger.published[key_of(body)] = world.scheduler.now_us / 1e6
            world.workload.published += 1
            answered = self._answered(queue)
            world.scheduler.after(
                self._delay_us(), master.process, master.put, [(number, draft)], answered
            )

    def _answered(self, queue: int) -> Callable[[int, int, int, PutStatus], None]:
        def answered(number: int, offset: int, end: int, status: PutStatus) -> None:
            self.world.on_answer(number, queue, offset, end, status)
            if status is PutStatus.PUT_OK:
                self._later(self._delay_us(), self._on_confirm, number)

        return answered

    def _on_confirm(self, number: int) -> None:
        key = number >> 32, number & 0xFFFF_FFFF
        self.world.ledger.confirmed[key] = self.world.scheduler.now_us / 1e6, self.number

    # Consumer.

    def _pull(self) -> None:
        broker = self.world.named()
        if broker is None:
            self._later(RETRY_US, self._pull)
            return
        self._pulls += 1
        pull = self._pulls
        self.world.scheduler.after(self._delay_us(), broker.process, self._serve, broker, pull)
        self._await(broker, pull)

    def _await(self, broker: BrokerNode, pull: int) -> None:
        """Waits for the answer, or the end of the connection."""
        if pull != self._pulls:
            return
        if broker.alive and broker.process is self.world.nodes[broker.number].process:
            self._later(RETRY_US, self._await, broker, pull)
        else:
            self._pull()

    def _serve(self, broker: BrokerNode, pull: int) -> None:
        got = broker.store.get(TOPIC, self.number - 1, self.next, PULL_MAX)
        found = list(map(bytes, got.records)) if got.status is GetStatus.FOUND else []
        self._later(self._delay_us(), self._on_answer, pull, found)

    def _on_answer(self, pull: int, records: list[bytes]) -> None:
        if pull != self._pulls:
            return
        self._pulls += 1
        at_s = self.world.scheduler.now_us / 1e6
        for record in records:
            message = Message(memoryview(record))
            key = key_of(bytes(message.body[8:20]))
            self.world.ledger.delivered.append(
                Delivered(at_s, self.number, self.number, key, message.reconsume_times > 0)
            )
            self.next = message.queue_offset + 1
        self._later(0 if records else PULL_US, self._pull)


class MeasuredGroup(Measured, BrokerGroupWorld):
    """See `Measured`."""

    nodes: dict[int, BrokerNode]

    def _make_world(self) -> None:
        self.settings = GroupSettings(replicas=len(NODES), in_sync=2, flushes=True)
        self.store_settings = StoreSettings(log_file_bytes=64 << 20, flush="SYNC_FLUSH")
        self._make_nodes(len(NODES))
        self.referee = BrokerGroupReferee()
        self.debts = {}
        self._listed: dict[int, Any] = {}

    @property
    def ledger(self) -> Any:
        """Returns what clients were told."""
        return self.workload.ledger

    def _start_care(self) -> None:
        self.clients = [Client(self, number) for number in NODES]

    def on_opened(self, node: BrokerNode) -> None:
        """See `BrokerGroupWorld`: a name server lists the broker a little later."""
        super().on_opened(node)
        delay_us = self.scheduler.between(0, REGISTER_US)
        self.scheduler.after(delay_us, None, self._listed.__setitem__, node.number, node.process)
        self.scheduler.after(RETRY_US, node.process, self._follow, node)

    def _follow(self, node: BrokerNode) -> None:
        """As a replica does that gets online: slaves follow their master at once."""
        master = self.nodes[MASTER]
        slaves = [each for each in self.nodes.values() if node in (master, each) and each.slave]
        waiting = [each for each in slaves if each.alive and not is_linked(master, each)]
        for each in waiting:
            if each.slave.state is SlaveState.READY and each.transport.is_connected(MASTER):
                each.slave.follow(each.clock.monotonic_ms())
        if waiting:
            self.scheduler.after(RETRY_US, node.process, self._follow, node)

    def named(self) -> BrokerNode | None:
        """Returns the broker that name servers send consumers to."""
        for number, node in self.nodes.items():
            is_online = node.master.takes_writes if node.alive and node.master else True
            if node.alive and is_online and self._listed.get(number) is node.process:
                return node
        return None

    def stop_in_order(self, node: BrokerNode) -> int:
        """See `Measured`."""
        node.store.close()
        return 0

    def _unfinished(self) -> list[str]:
        waiting = super()._unfinished()
        if self.fault.is_for_good or waiting:
            return waiting
        ends = [self.nodes[MASTER].store.queue_max(TOPIC, queue) for queue in range(QUEUES)]
        reads = any(client.next < end for client, end in zip(self.clients, ends, strict=True))
        return ["consumers read"] if reads else []


def group(fault: Fault) -> Maker:
    """Broker groups."""
    world = type("World", (MeasuredGroup,), {"fault": fault})
    return lambda seed: world(plan_of(seed), BrokerGroupLoad())
