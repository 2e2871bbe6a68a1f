"""Queue shells over one shared, always committed log: hosts, links and clock are fakes.

Nodes 1 to 3 hold replicas, node 4 only watches. Everything happens in `Cluster.run`, in node order.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import structlog

from convoymq.kernels import batch, link_frames
from convoymq.kernels.batch import CommandBuilder, PendingBudget
from convoymq.kernels.entries import Entry
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import StorageFault
from convoymq.node.notes import log_note
from convoymq.queues.interface import ConsumerSpec, Delivery, GetResult, PublishOutcome
from convoymq.queues.quorum.client import QuorumClient
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.queue import QuorumQueue
from convoymq.replication.machine import Effect
from convoymq.shells.groups.group_time import GroupTime
from convoymq.storage.types import EntryGone
from tests.unit.queues.quorum.support import session_id

GROUP = 7
REPLICAS = (1, 2, 3)
NODES = (1, 2, 3, 4)


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.time_ms = 1_000_000
        #: What went by on the monotonic clock alone: the wall clock was set back.
        self.passed_ms = 0
        self.timers: list[tuple[int, Any, tuple[Any, ...], list[bool]]] = []

    def now_ms(self) -> int:
        return self.time_ms

    def monotonic_ms(self) -> int:
        return self.time_ms + self.passed_ms

    def random(self) -> float:
        return 0.5

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> Any:
        alive = [True]
        self.timers.append((self.time_ms + delay_ms, callback, arguments, alive))

        class Handle:
            def cancel(self) -> None:
                alive[0] = False

        return Handle()

    def advance(self, delay_ms: int) -> None:
        self.time_ms += delay_ms
        due = [t for t in self.timers if t[0] <= self.time_ms]
        self.timers = [t for t in self.timers if t[0] > self.time_ms]
        for _, callback, arguments, alive in due:
            if alive[0]:
                callback(*arguments)


class Events:
    """Writes down what a channel hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.confirmed: list[int] = []
        self.refused: list[int] = []
        #: (consumer, message id, body) in order
        self.messages: list[tuple[int, int, bytes]] = []
        #: Annotations of each.
        self.said: list[bytes] = []
        self.flow: list[bool] = []

    def on_published(self, client: Any, tags: Any, outcome: PublishOutcome) -> None:
        spread = [t for i in range(0, len(tags), 2) for t in range(tags[i], tags[i + 1] + 1)]
        (self.confirmed if outcome else self.refused).extend(spread)

    def on_deliver(self, client: Any, delivery: Delivery) -> None:
        consumer, first_id, block, command, first, count, acquired, failed, said = delivery
        for k in range(count):
            body = batch.record(block, command, first + k)
            self.messages.append((consumer, first_id + k, body))
            self.said.append(said)
            self.heard.append(("message", body, acquired, failed))

    def on_subscribed(self, client: Any, consumer: int, error: Exception | None) -> None:
        self.heard.append(("subscribed", consumer, error))

    def on_credit(self, client: Any, consumer: int, granted: int, ready: int) -> None:
        self.heard.append(("credit", consumer, granted, ready))

    def on_activity(self, client: Any, consumer: int, active: bool) -> None:
        self.heard.append(("activity", consumer, active))

    def on_cancel_ok(self, client: Any, consumer: int) -> None:
        self.heard.append(("cancel-ok", consumer))

    def on_cancelled(self, client: Any, consumer: int, reason: str) -> None:
        self.heard.append(("cancelled", consumer, reason))

    def on_get(self, client: Any, result: GetResult) -> None:
        block, command, record, get_id, acquired, _, ready, error = result
        body = batch.record(block, command, record) if block is not None else None
        self.heard.append(("get", body, get_id, acquired, ready, error))

    def on_purged(self, client: Any, count: int, error: Exception | None) -> None:
        self.heard.append(("purged", count, error))

    def on_flow(self, client: Any, blocked: bool) -> None:
        self.flow.append(blocked)

    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.messages]


class Replica:
    """A replica on the shared log."""

    is_behind = False
    faulty = ""

    def __init__(self, node: Node, settings: dict[str, Any]) -> None:
        self.node = node
        self.machine = node.make_machine(settings)
        self.time = GroupTime(node.cluster.clock)
        self.applied = 0
        self.can_commit = True
        self.campaigns = 0
        self.election_timer = self

    @property
    def last_applied(self) -> int:
        return self.applied

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(id for id, node in self.node.cluster.nodes.items() if node.own is not None)

    def campaign(self) -> None:
        self.campaigns += 1

    @property
    def is_leader(self) -> bool:
        return self.node.cluster.leader == self.node.id

    def propose(self, type: int, flags: int, count: int, arg: int, body: bytes) -> None:
        self.node.builder.add(type, flags, 0, 0, count, arg, body)


class Node:
    """Host, transport and shell of one node."""

    def __init__(self, cluster: Cluster, id: int, settings: dict[str, Any]) -> None:
        self.cluster = cluster
        self.id = id
        self.builder = CommandBuilder()
        self.own = Replica(self, settings) if id in REPLICAS else None
        self.stalled = False
        self.full: set[int] = set()
        self.awaiting: list[tuple[int, Any]] = []
        self.sessions = 0
        self.newest = cluster.newest
        self.incarnations = dict.fromkeys(NODES, 1)
        self.queue = self.make_queue(
            vhost="/",
            name="q",
            group=GROUP,
            node=id,
            host=self,
            transport=self,
            clock=cluster.clock,
            incarnations=self.incarnations,
            members=REPLICAS,
            new_session=self.new_session,
            limits=cluster.limits,
            budget=cluster.budget,
        )

    # what tests of other types of queues replace

    def make_machine(self, settings: dict[str, Any]) -> Any:
        return QuorumMachine(settings)

    def make_queue(self, **common: Any) -> Any:
        return QuorumQueue(**common)

    def check(self, machine: Any) -> None:
        check_invariants(machine)

    # sessions

    def new_session(self) -> int:
        self.sessions += 1
        return session_id(self.id, self.sessions)

    def open(self) -> tuple[Any, Events]:
        events = Events()
        return self.queue.client(self.new_session(), events), events

    # host

    def builder_of(self, group: int) -> CommandBuilder:
        return self.builder

    def leader_of(self, group: int) -> int | None:
        return self.cluster.leader

    def replica(self, group: int) -> Replica | None:
        return self.own

    def newest_of(self, kind: str, nodes: Any) -> int:
        return self.newest

    def is_replica_live(self, group: int, node: int) -> bool:
        return node in REPLICAS and not self.cluster.nodes[node].stalled

    def note(self, event: str, **fields: Any) -> None:
        self.cluster.notes.append((self.id, event, fields))
        log_note(structlog.get_logger(), event, fields)

    def read_entry(self, group: int, index: int) -> Entry:
        if index > len(self.cluster.log):
            raise EntryGone(index)
        return self.cluster.log[index - 1]

    def await_room(self, node: int, item: Any) -> None:
        self.awaiting.append((node, item))

    def make_room(self, node: int) -> None:
        self.full.discard(node)
        awaiting, self.awaiting = self.awaiting, []
        for at, item in awaiting:
            assert at == node
            item.on_room(node)

    # transport

    def send(self, node: int, frame: bytes, body: Any = ()) -> None:
        self.cluster.links.append((self.id, node, frame + b"".join(body)))

    def is_connected(self, node: int) -> bool:
        return not {self.id, node} & self.cluster.cut

    def backlog_bytes(self, node: int) -> int:
        return 0


class Cluster:
    """See the module docstring."""

    node_class = Node
    newest = 1
    """Machine version that all nodes support."""

    def __init__(
        self,
        limits: DefaultsConfig | None = None,
        budget: PendingBudget | None = None,
        **settings: Any,
    ) -> None:
        self.clock = Clock()
        self.limits = limits
        self.budget = budget
        self.log: list[Entry] = []
        self.links: deque[tuple[int, int, bytes]] = deque()
        self.cut: set[int] = set()
        self.drop_frames: set[int] = set()
        self.frames: list[tuple[int, int, int]] = []
        self.notes: list[tuple[int, str, dict[str, Any]]] = []
        self.leader: int | None = 1
        self.term = 1
        self.nodes = {id: self.node_class(self, id, settings) for id in NODES}
        for node in self.nodes.values():
            node.queue.on_leader(GROUP, 1, 1)

    def run(self) -> None:
        """Lets everything happen until nothing is left to do."""
        for _ in range(200):
            if not self._seal() and not self._apply() and not self._deliver():
                return
        raise AssertionError("the cluster does not come to rest")

    def _seal(self) -> bool:
        some = False
        for node in self.nodes.values():
            if node.id == self.leader or not node.builder.used:
                continue
            some = True
            if self.leader is None:
                node.builder.discard_unsent()
                continue
            data = node.builder.take_forward(GROUP, self.term)
            if not {node.id, self.leader} & self.cut:
                self.nodes[self.leader].builder.adopt(data, link_frames.HEADER_SIZE, len(data))
        if self.leader is not None and self.nodes[self.leader].builder.used:
            some = True
            builder = self.nodes[self.leader].builder
            index = len(self.log) + 1
            self.log.append(builder.take_entry(GROUP, index, self.term, self.clock.time_ms))
        return some

    def _apply(self) -> bool:
        some = False
        for node in self.nodes.values():
            replica = node.own
            if replica is None or node.stalled or node.id in self.cut:
                continue
            effects: list[Effect] = []
            while replica.applied < len(self.log):
                some = True
                entry = self.log[replica.applied]
                replica.applied += 1
                replica.machine.apply(entry.index, entry.time_ms, entry.data)
                node.check(replica.machine)
                effects += replica.machine.effects
                replica.machine.effects.clear()
            if effects:
                node.queue.on_effects(effects, replica)
        return some

    def _deliver(self) -> bool:
        if not self.links:
            return False
        while self.links:
            source, target, data = self.links.popleft()
            _, type, _, group, a, b, c, d = link_frames.frame_header(data)
            if {source, target} & self.cut or type in self.drop_frames:
                continue
            self.frames.append((source, target, type))
            body = data[link_frames.HEADER_SIZE :]
            self.nodes[target].queue.on_link_frame(source, type, group, a, b, c, d, body)
        return True

    def install_snapshot(self, id: int) -> None:
        """A replica that lags gets the leader's state instead of the entries in between."""
        assert self.leader is not None
        source, node = self.nodes[self.leader].own, self.nodes[id]
        assert source is not None
        assert node.own is not None
        node.own.machine.restore(source.machine.snapshot())
        node.own.applied = source.applied
        node.own.machine.resend(id)
        effects = list(node.own.machine.effects)
        node.own.machine.effects.clear()
        node.queue.on_effects(effects, node.own)

    def elect(self, leader: int | None) -> None:
        """A new leader, which has applied everything, as everybody learns."""
        self.leader = leader
        self.term += 1
        self._apply()
        for node in self.nodes.values():
            if node.id not in self.cut:
                node.queue.on_leader(GROUP, leader, self.term)

    def wait(self, delay_ms: int) -> None:
        """Time passes, in steps of the shells' tick."""
        for _ in range(0, delay_ms, 250):
            self.clock.advance(250)
            for node in self.nodes.values():
                node.queue.tick()
            self.run()


def publish(client: QuorumClient, first: int, count: int, size: int = 8) -> None:
    """Publishes with tags first, first + 1, …; a body is its tag."""
    for tag in range(first, first + count):
        body = tag.to_bytes(4, "big")
        client.target.publish([body, bytes(max(0, size - 4))], size, tag)


def tags(events: Events) -> list[int]:
    """The tags of the messages that a channel got."""
    return [int.from_bytes(body[:4], "big") for body in events.bodies()]


def spec(number: int = 1, prefetch: int = 100, **more: Any) -> ConsumerSpec:
    return ConsumerSpec(number=number, tag=f"c{number}", prefetch=prefetch, no_ack=False, **more)


def damage(cluster: Cluster, node: int, index: int) -> Any:
    """That node cannot read an entry any more; returns what makes it whole again."""
    there = cluster.nodes[node]
    read = there.read_entry

    def damaged(group: int, at: int) -> Any:
        if at == index:
            raise StorageFault(f"entry {at} is damaged", path="")
        return read(group, at)

    there.read_entry = damaged  # type: ignore[method-assign]
    return lambda: setattr(there, "read_entry", read)
