"""Watches who sends: every delivery is carried out by the replica on its consumer's node while the
leader calls that replica live, and by the leader otherwise.

What a `WatchedQueue` asserts, each time a replica hands it effects:

- it passes every delivery on to the clients of its own node, whoever leads;
- only a leader sends for other nodes, and not for those whose replica is live;
- a leader sends every delivery that is still checked out to a node whose replica is not live;
- when it starts to, it sends everything that is checked out there;
- a client's question is answered by the leader, or by a replica that has something to answer: that
  a replica has nothing may mean that it is behind.

Live is a replica that the leader replicates to, over a link that is up, and that has acknowledged
all but `raft.lag_entries_max` of the committed entries (ADR 0003). Both may send for a while when
that changes; that no client passes a message on twice is for `sim.clients` and the referee to see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.quorum.client import QuorumClient
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.queue import QuorumQueue
from convoymq.replication.machine import EFFECT_DELIVER, Effect
from convoymq.replication.raft.types import REPLICATE
from convoymq.shells.groups.replica import Replica
from convoymq.sim.delivery_model import InvariantBroken

if TYPE_CHECKING:
    from convoymq.sim.clients import Workload

Sent = set[tuple[int, int, int]]
"""(session, consumer, message id)"""


def is_live(replica: Replica, node: int, lag_entries_max: int) -> bool:
    """Returns whether a leader may leave the sending to the replica of another node."""
    peer = replica.core.progress.get(node)
    if peer is None or not peer.connected or peer.state != REPLICATE:
        return False
    behind: int = replica.commit_index - peer.match
    if node in replica.lagging.behind_nodes or node in replica.lagging.lagging_nodes:
        return False
    return behind <= lag_entries_max


class WatchedQueue(QuorumQueue):
    """A quorum queue on one node that checks who sends what."""

    def watch(self, workload: Workload, lag_entries_max: int) -> None:
        """Begins to watch; called once, before anything happens.

        Args:
            workload: counts what was sent, and by whom.
            lag_entries_max: as of `RaftConfig`.
        """
        self._workload = workload
        self._lag_entries_max = lag_entries_max
        self._sent: dict[int, Sent] = {}
        """Node -> what was sent to it in this call."""
        self._passed: set[Effect] = set()
        """(session, consumer, first message id) of what was passed on here in this call."""

    def _fail(self, text: str) -> None:
        raise InvariantBroken(f"queue {self.group} on node {self.node}: {text}")

    def on_effects(self, effects: Sequence[Effect], replica: Replica) -> None:
        """Carries effects out, and looks at what was sent."""
        self._sent = {}
        self._passed = set()
        super().on_effects(effects, replica)
        leads = replica.is_leader
        machine = replica.machine
        assert isinstance(machine, QuorumMachine)
        if self._sent and not leads:
            self._fail(f"sends to {sorted(self._sent)}, and does not lead")
        live: dict[int, bool] = {}
        for effect in effects:
            if effect[0] != EFFECT_DELIVER:
                continue
            session = effect[1]
            node = session >> 56
            if node == self.node:
                # A client may have been told in between that its session is over.
                if session in self._clients and effect[1:4] not in self._passed:
                    self._fail(f"keeps {effect} from its own client")
            elif leads and self._transport.is_connected(node):
                if node not in live:
                    live[node] = is_live(replica, node, self._lag_entries_max)
                sent = self._sent.get(node, set())
                if live[node] and sent:
                    self._fail(f"sends to node {node}, whose replica is live")
                if not live[node]:
                    missing = messages_of(effect) - sent
                    if missing and missing & held_by(machine, session, effect[2]):
                        self._fail(f"leads, and does not send {effect} to node {node}")

    def _deliver(self, client: QuorumClient, effect: Effect) -> None:
        self._passed.add(effect[1:4])
        self._workload.sent_locally += effect[7]
        super()._deliver(client, effect)

    def _carry_out(self, client: QuorumClient, effects: Iterable[Effect], since: int) -> bool:
        effects = list(effects)
        replica = self._host.replica(self.group)
        if not effects and (replica is None or not replica.is_leader):
            self._fail(f"tells {client.session:x} that nothing is checked out from {since} on")
        return super()._carry_out(client, effects, since)

    def _forward(self, node: int, effect: Effect, since: int = -1) -> int:
        if effect[0] == EFFECT_DELIVER:
            self._sent.setdefault(node, set()).update(messages_of(effect))
            self._workload.sent_by_leader += effect[7]
        return super()._forward(node, effect, since)

    def _start_proxy(self, node: int, machine: GroupMachine) -> None:
        assert isinstance(machine, QuorumMachine)
        super()._start_proxy(node, machine)
        if node not in self._proxied:
            return
        sent = self._sent.get(node, set())
        for session in machine.sessions.values():
            if session.node == node:
                for number in session.consumers:
                    missing = held_by(machine, session.id, number) - sent
                    if missing:
                        self._fail(f"sends for node {node} from now on, and not {missing}")


def messages_of(effect: Effect) -> Sent:
    """Returns the messages of a DELIVER."""
    _, session, consumer, first_id, _, _, _, count, *_ = effect
    return {(session, consumer, first_id + i) for i in range(count)}


def held_by(machine: QuorumMachine, session: int, consumer: int) -> Sent:
    """Returns what a consumer holds."""
    return {
        (session, consumer, message_id + i)
        for message_id, run in machine.deliveries.holds(session, consumer)
        for i in range(run[3])
    }
