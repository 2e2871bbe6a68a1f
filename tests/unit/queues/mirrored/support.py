"""Nodes with a mirrored queue on a clock that stands still, and their tree: a master goes when a
test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from convoymq.metadata.commands import ChangeView
from convoymq.metadata.machine import QueueRecord
from convoymq.model.tables import Table
from convoymq.queues.mirrored.master import MasterQueue
from convoymq.routing.policies import Policies, effective_settings
from convoymq.routing.types import Queue as DeclaredQueue
from tests.unit.queues.classic.support import Channel, Node, Time, Timer, queue_record, settle
from tests.unit.queues.dead_letter_targets import FakeQueue

STEP_MS = 250
STEPS_MAX = 400
MIRRORED: dict[str, object] = {"ha-mode": "all"}


class OwnTime(Time):
    """A node's clock, which ends with the node."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self.time = time
        self.runs = True

    def now_ms(self) -> int:
        return self.time.ms

    monotonic_ms = now_ms

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> Timer:
        return self.time.call_later(delay_ms, self._call, callback, arguments)

    def _call(self, callback: Any, arguments: Any) -> None:
        if self.runs:
            callback(*arguments)


class RingNode(Node):
    """A node whose tree is that of its cluster."""

    own_time: OwnTime

    def __init__(self, node: int, *, cluster: Cluster, **more: Any) -> None:
        self.cluster = cluster
        super().__init__(node, **more)

    def incarnation_of(self, node: int) -> int:
        return self.cluster.incarnation

    def record_members(self, command: Any, answer: Any) -> None:
        self.later.append(lambda: answer(self.cluster.record_view(command), None))


class Cluster:
    """Three nodes; `queue` is the record of the queue that was declared last."""

    def __init__(self, directory: Path, time: Time, size: int = 3, **more: Any) -> None:
        self.time = time
        self.nodes: dict[int, Node] = {}
        self.queue: QueueRecord
        self.arguments = Table.of({})
        self.settings: dict[str, object] = {}
        self.dead = FakeQueue(20, "dead")
        self.incarnation = 0
        self._make = partial(RingNode, nodes=self.nodes, directory=directory, **more)
        self._start(range(1, size + 1))

    def _start(self, numbers: Iterable[int]) -> None:
        self.incarnation += 1
        for number in numbers:
            own_time = OwnTime(self.time)
            node = self._make(number, cluster=self, time=own_time)
            node.own_time = own_time
            node.routes.queues = [self.dead]

    def restart(self, meanwhile: Callable[[], None]) -> None:
        """All nodes are killed, and start again."""
        numbers = sorted(self.nodes)
        for node in self.nodes.values():
            assert isinstance(node, RingNode)
            node.own_time.runs = False
            node.host.stop()
        self.nodes.clear()
        meanwhile()
        self._start(numbers)
        self._tell()

    # The tree.

    def declare(self, *, settings: dict[str, object] | None = None, **arguments: Any) -> None:
        """Declares a queue whose master is on node 1, with synchronised mirrors on the others."""
        self.declare_plain(settings=MIRRORED | (settings or {}), **arguments)
        self.until(self.is_synchronised)

    def is_synchronised(self) -> bool:
        """Returns whether every node has all of the queue."""
        member = self.master.member
        return member is not None and len(member.view.synchronised) == len(self.nodes)

    def declare_plain(self, *, settings: dict[str, object], **arguments: Any) -> None:
        """Declares a queue on node 1."""
        self.queue = queue_record(durable=True)
        self.arguments = Table.of({k.replace("_", "-"): v for k, v in arguments.items()})
        declared = DeclaredQueue(name="q", type=self.queue.type, arguments=self.arguments)
        found = effective_settings(declared, Policies())
        self.settings = {**found, **settings}
        self._tell()

    def record_view(self, command: ChangeView) -> bool:
        """See `metadata.queues.Queues.change_view`."""
        known = self.queue.view.version if self.queue.view is not None else 0
        if command.view.version != known + 1:
            return False
        self.queue = replace(self.queue, view=command.view, members=command.view.nodes())
        self._tell()
        return True

    def _tell(self) -> None:
        for node in list(self.nodes.values()):
            host = node.host
            if node.id in self.queue.members and host.get(self.queue.group) is None:
                host.open(self.queue, self.arguments, self.settings)
            host.follow(self.queue, self.arguments, self.settings)

    # Nodes.

    @property
    def master(self) -> MasterQueue:
        """Returns the master that serves."""
        found = self.nodes[self.queue.home].host.master_of(self.queue.group)
        assert found is not None
        return found

    def channel(self, node: int) -> Channel:
        """Returns a channel into the queue."""
        host = self.nodes[node].host
        return self.nodes[node].channel(host.find(self.queue, self.arguments))

    def fail(self, *, stops: bool = False) -> None:
        """The master's node is killed, or stops in order; returns when a mirror serves."""
        number = self.queue.home
        node = self.nodes[number]
        if stops:
            node.host.stop()
            self.settle()
        assert isinstance(node, RingNode)
        node.own_time.runs = False
        del self.nodes[number]
        for other in self.nodes.values():
            other.wire.down.add(number)
            other.host.on_node_down(number)
        self.until(self._has_master)
        if not stops:
            node.host.stop()

    def _has_master(self) -> bool:
        home = self.nodes.get(self.queue.home)
        master = home.host.master_of(self.queue.group) if home is not None else None
        handles = [node.host.get(self.queue.group) for node in self.nodes.values()]
        return master is not None and not any(
            getattr(handle, "waits_since_ms", None) is not None for handle in handles
        )

    # Time.

    def settle(self) -> None:
        """Until nothing moves without time."""
        settle(self.nodes)
        while any(due <= self.time.ms for due, _, _ in self.time.calls):
            self.time.pass_by(0)
            settle(self.nodes)
        for node in self.nodes.values():
            master = node.host.master_of(self.queue.group)
            if master is not None:
                master.machine.check_invariants()

    def pass_by(self, ms: int) -> None:
        """Lets time pass."""
        while ms > 0:
            self.time.pass_by(min(ms, STEP_MS))
            ms -= STEP_MS
            self.settle()

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets time pass until something is so."""
        self.settle()
        for _ in range(STEPS_MAX):
            if condition():
                return
            self.pass_by(STEP_MS)
        raise AssertionError("it does not come to that")
