"""Lost majorities in the simulator: most disks are gone at once, and an operator has what is left
go on, through the production path (`convoymq.node.recovery`, ADR 0024).

From the moment of the loss on, what may be missing is known: whatever no surviving disk had. So for
every group the longest beginning of what was committed is noted that one survivor holds durably
(`ClusterChecker.floor`). When a recovered leader opens its term, what was committed up to where its
log agrees with it stays true, and all behind is struck from the books of checkers and referees.
That place must not lie before the floor, and nobody may strike anything out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Never, TypeVar

from convoymq.metadata.commands import Command
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.errors import BrokerError, Misuse, Unavailable
from convoymq.node.recovery import CONFIRMATION, Recovery
from convoymq.queues.interface import Row
from convoymq.sim.clock import Process
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.loop import SimLoop
from convoymq.transport.handshake import PeerHello
from convoymq.transport.identity import NodeIdentity

if TYPE_CHECKING:
    from convoymq.sim.cluster_node import ClusterNode
    from convoymq.sim.cluster_world import ClusterWorld

Result = TypeVar("Result")
Answer = Callable[[object, BrokerError | None], None]
"""Hears what was answered, or why nothing was."""

LOOK_US = 300_000
"""An operator looks again."""


@dataclass(slots=True)
class Disaster:
    """A majority is lost and not recovered yet."""

    survivors: frozenset[int]
    cluster: str
    """Id of the cluster when it was lost."""


class RecoveryPort:
    """Parts of a node that `Recovery` needs: requests to others, and its own parts.

    A node's own part of a request is an event of its own, as an answer from elsewhere is.
    """

    def __init__(self, node: ClusterNode) -> None:
        self._node = node
        self._loop = SimLoop(node.world.scheduler, node.process)
        self._handler: Callable[[int, object], Coroutine[object, None, object]] | None = None
        self.id = node.number
        self.clock = node.clock
        self.control = self.links = self.store = self
        self.storage = node.storage
        self.host = node.host
        self.recovery = Recovery(self, node.world.new_id)

    @property
    def identity(self) -> NodeIdentity:
        """Returns the identity in `node.json`."""
        return self._node.identity

    @property
    def usable(self) -> bool:
        """Returns whether clients may come."""
        return self._node.is_serving

    @property
    def machine(self) -> MetadataMachine:
        """Returns the tree."""
        return self._node.tree

    def switch_cluster(self, cluster: str, delay_s: float) -> None:
        """Gives the cluster another id; links are made anew after the delay."""
        self._node.switch_cluster(cluster, int(delay_s * 1e6))

    async def force_boot(self) -> list[Row]:
        """Returns a row for each mirrored queue without a master: this world has none."""
        return []

    # `Links`.

    def connected(self) -> list[int]:
        """Nodes that are reached."""
        return [n for n in sorted(self._node.hellos) if self._node.transport.is_connected(n)]

    def hello_of(self, node: int) -> PeerHello | None:
        """Returns what a node told of itself when it was linked."""
        return self._node.hellos.get(node)

    # `AsyncMetadataStore`.

    async def execute(self, command: Command, timeout: float) -> object:
        """Applies a command in the whole cluster."""
        store = self._node.store
        if store is None:
            raise Unavailable("the metadata group is not open")
        return await self._answer(lambda done: store.submit(command, done, int(timeout * 1000)))

    # `ControlPlane`.

    def handle(
        self, _kind: int, handler: Callable[[int, object], Coroutine[object, None, object]]
    ) -> None:
        """Registers who answers."""
        self._handler = handler

    async def request(self, node: int, kind: int, body: object, timeout: float) -> object:
        """Asks a node, this one included."""
        if node != self.id:
            wait_ms = int(timeout * 1000)
            answered = await self._answer(
                lambda done: self._node.ask(node, kind, body, wait_ms, done)
            )
        else:
            answered = await self._answer(
                lambda done: self._node.clock.call_later(
                    0, lambda: done(self.serve(node, body), None)
                )
            )
        assert isinstance(answered, list)
        sound, found = answered
        if not sound:
            raise Misuse(found)
        return found

    def serve(self, asker: int, body: object) -> list[object]:
        """[True, answer], or [False, why there is none]."""
        assert self._handler is not None
        work = self._handler(asker, body)
        try:
            work.send(None)
        except StopIteration as end:
            return [True, end.value]
        except BrokerError as error:
            return [False, error.text]
        raise AssertionError("answers of a recovery wait for nothing")

    async def _answer(self, ask: Callable[[Answer], object]) -> object:
        answer = self._loop.create_future()

        def done(reply: object, error: BrokerError | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(reply)

        ask(done)
        return await answer

    # The operator.

    def start(
        self,
        work: Coroutine[object, Never, Result],
        done: Callable[[Result | None, BrokerError | None], None],
    ) -> None:
        """Runs what an operator has typed at this node."""
        self._loop.start(work, done)


class Operator:
    """Operator who notices that a majority is lost, has the survivors go on, and tries again until
    it is done."""

    def __init__(self, world: ClusterWorld, disaster: Disaster) -> None:
        self._world = world
        self._disaster = disaster
        self._busy: Process | None = None
        """The process at which something was typed."""
        self._again()

    def _again(self) -> None:
        self._world.scheduler.after(LOOK_US, None, self._look)

    def _look(self) -> None:
        world, survivors = self._world, self._disaster.survivors
        if world.disaster is not self._disaster:
            return
        self._again()
        if self._busy is not None and self._busy.alive:
            return
        nodes = [world.nodes[n] for n in sorted(survivors)]
        able = [
            node
            for node in nodes
            if node.alive and survivors - {node.number} <= set(node.recovery.connected())
        ]
        if not able or not all(node.alive and node.formation is not None for node in nodes):
            return
        node = world.scheduler.rng.choice(able)
        self._busy = node.process
        world.trace.add(node.name, "convoy recover")
        node.recovery.start(self._recover(node), self._on_done)

    async def _recover(self, node: ClusterNode) -> bool:
        """Carries out a recovery; returns whether nothing is left to do."""
        world, recovery = self._world, node.recovery.recovery
        plan = await recovery.plan({}, self._progress)
        if not self._disaster.survivors <= set(plan["reachable"]):
            return False
        gone = [group for group in plan["groups"] if group["outcome"] == "lost"]
        for group in gone:
            # None: its declaration is in a survivor's log, and not committed yet.
            checker = world.checkers.get(group["group"])
            if checker is not None and checker.floor:
                raise InvariantBroken(f"the plan gives up {group}, of which a copy is left")
        if not plan["needed"]:
            # Until they are deleted the lost nodes cannot come back under their numbers.
            for group in gone:
                world.delete_queue(node, group["name"], group["group"])
            return not gone
        if world.metadata.cluster_id != self._disaster.cluster and plan["missing"]:
            # It is recorded, and lost nodes have come back: they are only not linked now.
            return False
        world.trace.add(node.name, f"plan {plan}")
        typed = {"digest": plan["digest"], "confirmation": CONFIRMATION}
        world.trace.faults["recovered"] += 1
        await recovery.execute(typed, self._progress)
        return False

    def _progress(self, text: str) -> None:
        self._world.trace.add("operator", text)

    def _on_done(self, finished: bool | None, error: BrokerError | None) -> None:
        self._busy = None
        if error is not None:
            self._world.trace.add("operator", f"is refused: {error}")
        elif finished:
            self._world.on_recovered(self._disaster)
