# cython: annotation_typing=False
"""A node's handle of a queue that is a Raft group: sessions of this node's channels, and the
effects of the group's machine for them.

On a node with a replica the effects come from the replica itself. On a node without one, or whose
replica is behind, they come from the leader in link frames:

| frame   | a       | b        | c                | d                        |
|---------|---------|----------|------------------|--------------------------|
| APPLIED | session | seq      | 0 ok, 1 rejected | body: msgpack reply or – |
| APPLIED | session | last seq | 2 gap            |                          |

A leader sends for a node as long as the host does not call that node's replica live; when it starts
to, it sends everything again that the node may not know (`machine.resend`), because it cannot know
what the replica managed to. Clients drop repeats.
"""

from __future__ import annotations

import asyncio
import traceback
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from convoymq.kernels import batch, link_frames
from convoymq.kernels.batch import CommandBuilder, PendingBudget
from convoymq.model.clock import Clock, Timer
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import NotFound, StorageFault, Unavailable
from convoymq.model.rounds import run_each
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.held_back import HeldBack
from convoymq.queues.interface import ClientEvents, Queue, Row
from convoymq.queues.reservation_reads import Fields
from convoymq.queues.summed_notes import SummedNotes
from convoymq.replication.machine import (
    EFFECT_ACTIVITY,
    EFFECT_APPLIED,
    EFFECT_DELIVER,
    EFFECT_GAP,
    EFFECT_NOTE,
    EFFECT_TIMER,
    FLAG_NODE_GONE,
    Effect,
)
from convoymq.storage.types import EntryGone
from convoymq.transport.interfaces import Transport

if TYPE_CHECKING:
    from convoymq.queues.session_client import SessionClient
    from convoymq.shells.groups.host import ReplicaHost
    from convoymq.shells.groups.replica import Replica

STATUS_GAP = 2

RESEND_AFTER_MS = 1000
RESEND_DOUBLINGS_MAX = 4
"""A queue may be silent because its disks are behind: every resend without an answer doubles the
wait for the next one, or the repeats would be what the disks cannot keep up with."""
READY_POLL_S = 0.05
TICK_MS = 250
"""Time between two calls of `tick`."""


def group_state(leader: int | None, online: int, members: int) -> str:
    """`running` while a leader is known; without one `minority`, or `down` while a majority of the
    members is up and has not elected one."""
    if leader is not None:
        return "running"
    return "down" if 2 * online > members else "minority"


def effects_of(machine: GroupMachine, call: Callable[..., None], *arguments: int) -> list[Effect]:
    """Returns the effects that a call of a machine's method makes; its other effects stay as they
    are."""
    kept, machine.effects = machine.effects, []
    call(*arguments)
    made: list[Effect]
    made, machine.effects = machine.effects, kept
    return made


class GroupQueue(Queue):
    """See `Queue`; also the `EffectSink` of its group. Types of queues derive from it.

    Args:
        node: this node's id.
        host: all groups of this node.
        transport: to send effects to nodes without a live replica.
        incarnations: node → latest incarnation known here; kept up to date by its owner.
        members: nodes with a replica, as the metadata say.
        new_session: numbers a session of this node.
        is_forgotten: whether the cluster has given a node up.
        ask_counts: asks the node that leads for (ready, consumers).
        on_routes: edges are to forget the routes that they remember.
        on_unused: the queue was not used for as long as it may be: it is to be deleted.
        served: the node's queues with clients, by group: the queue puts itself in, and who calls
            `tick` takes it out.
        changed: groups whose rows in lists may have changed: the queue puts itself in.
    """

    unset: Mapping[str, int] = {}
    """Settings of the machine that CONFIG may not have named, where that means a value."""

    def __init__(
        self,
        *,
        vhost: str,
        name: str,
        group: int,
        node: int,
        host: ReplicaHost,
        transport: Transport,
        clock: Clock,
        incarnations: Mapping[int, int],
        members: Sequence[int],
        new_session: Callable[[], int],
        is_forgotten: Callable[[int], bool] = lambda _node: False,
        ask_counts: Callable[[int, int], Awaitable[tuple[int, int]]] | None = None,
        on_routes: Callable[[], None] | None = None,
        on_unused: Callable[[], None] | None = None,
        limits: DefaultsConfig | None = None,
        budget: PendingBudget | None = None,
        served: dict[int, GroupQueue] | None = None,
        changed: set[int] | None = None,
    ) -> None:
        self.vhost = vhost
        self.name = name
        self.group = group
        self.node = node
        self.clock = clock
        self.members = tuple(members)
        self.limits = limits or DefaultsConfig()
        self.budget = budget or PendingBudget()
        self.leader: int | None = None
        self.term = 0
        self.deleted = False
        #: Effects carried out here, and sent to other nodes, by the message.
        self.delivered_local = 0
        self.delivered_forwarded = 0
        #: (strategy, reason) -> messages that left unacknowledged while this node led.
        self.left: Counter[tuple[str, str]] = Counter()
        #: Dead letters that this node moved at least once.
        self.moved = 0
        #: Repeats by message-id that were dropped while this node led.
        self.deduplicated = 0
        self._host = host
        self._transport = transport
        self._incarnations = incarnations
        self.new_session = new_session
        self._is_forgotten = is_forgotten
        self._ask_counts = ask_counts
        self._on_routes = on_routes
        self._on_unused = on_unused
        self._served = served
        self._changed = changed if changed is not None else set()
        #: Session -> client, of the queue's own kind.
        self._clients: dict[int, Any] = {}
        self._openings = 0
        #: Nodes for which this node, leading, carries out the effects.
        self._proxied: set[int] = set()
        #: Deliveries as (effect, since). Bodies are read when they are sent.
        self._held_back: HeldBack[tuple[Effect, int]] = HeldBack(transport, host.await_room, self)
        self._timer: Timer | None = None
        self._timer_due_ms = 0
        #: Settings that the machine should have, and in this term what it has when all that was
        #: proposed is applied.
        self._wanted: dict[str, int] = {}
        self._proposed: tuple[int, dict[str, int]] = (0, {})
        self._notes = SummedNotes(clock, self._log)
        self._block_index, self._block = -1, b""
        #: Since when nobody leads the queue; None: somebody does. Kept by `tick`.
        self._leaderless_since_ms: int | None = None
        self._waiting: list[asyncio.Future[None]] = []

    # --- clients -------------------------------------------------------------------------

    @property
    def builder(self) -> CommandBuilder:
        """Returns this node's open batch for the queue."""
        return self._host.builder_of(self.group)

    @abstractmethod
    def _new_client(self, session: int, events: ClientEvents) -> SessionClient:
        """Returns a client of the queue's own kind."""

    def client(self, session: int, events: ClientEvents) -> SessionClient:
        """Opens a channel's command stream."""
        made = self._new_client(session, events)
        made.progress_ms = self.clock.monotonic_ms()
        self._clients[session] = made
        if self._served is not None:
            self._served[self.group] = self
        return made

    def next_opening(self) -> int:
        """Numbers a session of this node and incarnation into the queue, from 1."""
        self._openings += 1
        return self._openings

    @property
    def has_clients(self) -> bool:
        """Returns whether `tick` has anything to look after."""
        return bool(self._clients)

    def sessions(self) -> list[int]:
        """Sessions of this node that the queue may still hear of."""
        return list(self._clients)

    def has_session(self, session: int) -> bool:
        """Returns whether one of them has that number."""
        return session in self._clients

    def forget(self, client: SessionClient) -> None:
        """The client's session is over."""
        self._clients.pop(client.session, None)

    def renew(self, client: SessionClient) -> None:
        """Gives a client whose session was ended by the queue a new one."""
        self._clients.pop(client.session, None)
        client.start_session(self.new_session())
        self._clients[client.session] = client

    def on_member(self) -> None:
        """Called when this node has got a replica of the group."""

    # --- EffectSink ----------------------------------------------------------------------

    def _deliver(self, client: Any, effect: Effect) -> None:
        """Carries out a DELIVER for a client of this node."""

    def _on_own_effect(self, effect: Effect, replica: Replica) -> None:
        """Carries out an effect that is about no session, and that only this type has."""

    def on_effects(self, effects: Sequence[Effect], replica: Replica) -> None:
        """Carries out effects for this node; as leader also for nodes that cannot themselves."""
        leads: bool = replica.is_leader
        live: dict[int, bool] = {}
        if leads:
            self._changed.add(self.group)
        run_each(
            effects,
            lambda effect: self._carry_out_one(effect, effects, replica, leads, live),
            self._not_carried_out,
        )

    def _carry_out_one(
        self,
        effect: Effect,
        effects: Sequence[Effect],
        replica: Replica,
        leads: bool,
        live: dict[int, bool],
    ) -> None:
        kind = effect[0]
        if kind >= EFFECT_TIMER:
            if kind > EFFECT_NOTE:
                self._on_own_effect(effect, replica)
            elif leads and kind == EFFECT_TIMER:
                self._arm(effect[1])
            elif leads and kind == EFFECT_NOTE:
                self._notes.note(effect[1], effect[2])
            return
        session: int = effect[1]
        target = session >> 56
        if target == self.node:
            client = self._clients.get(session)
            if client is None:
                return
            if kind == EFFECT_APPLIED:
                client.on_applied(effect[2], effect[3], effect[4])
            elif kind == EFFECT_DELIVER:
                self._deliver(client, effect)
            elif kind == EFFECT_GAP:
                client.on_gap(effect[2])
            elif kind == EFFECT_ACTIVITY:
                client.on_activity(effect[2], effect[3])
        elif leads:
            served = live.get(target)
            if served is None:
                served = self._host.is_replica_live(self.group, target)
                live[target] = served
                if served:
                    self._proxied.discard(target)
                elif target not in self._proxied:
                    # Includes what this batch has for the node: the state is ahead of it.
                    self._start_proxy(target, replica.machine)
                    self._forward_transients(effects, target)
                    live[target] = True
                    return
            if not served:
                self._forward(target, effect)

    def _not_carried_out(self, effect: Effect, error: Exception) -> None:
        """An error of our own: if it is that of a client here, only the client ends."""
        client = self._clients.get(effect[1]) if effect[0] < EFFECT_TIMER else None
        if client is None:
            raise error
        lines = "".join(traceback.format_exception(error))
        facts = {"session": client.session, "reason": repr(error), "error": lines}
        place = {"vhost": self.vhost, "queue": self.name, "group": self.group}
        self._host.note("queue.client_failed", **place, **facts)
        # Its channel may be what fails: then nobody is left to hear more.
        run_each((client,), lambda failed: failed.fail(), lambda failed, _: self.forget(failed))

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        """Sends what is pending to a new leader; as leader, takes over for others.

        Called again for the same leader, it says that what was sent may have been lost.
        """
        changed = (leader, term) != (self.leader, self.term)
        self.leader = leader
        self.term = term
        self._changed.add(self.group)
        if leader is None:
            return
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
        for client in list(self._clients.values()):
            client.resend(now=True)
        if not changed:
            return
        self._proxied.clear()
        self._held_back.clear()
        replica = self._host.replica(self.group)
        if leader == self.node and replica is not None and replica.is_leader:
            self._lead(replica)

    def on_link_frame(
        self, node: int, type: int, group: int, a: int, b: int, c: int, d: int, body: bytes
    ) -> None:
        """An APPLIED frame of this group, from the leader."""
        if type != link_frames.FRAME_APPLIED:
            return
        client = self._clients.get(a)
        if client is None:
            return
        if c == STATUS_GAP:
            client.on_gap(b)
            return
        reply = msgspec.msgpack.decode(body) if body else None
        client.on_applied(b, c, reply)

    def on_version_raised(self, replica: Replica) -> None:
        """See `EffectSink`: what could not be proposed before may be now."""
        if replica.is_leader:
            self._propose_settings(replica)
            due = self._first_due_ms(replica)
            if due is not None:
                self._arm(due)

    def on_restored(self) -> None:
        """See `EffectSink`."""

    def on_replica_gone(self) -> None:
        """See `EffectSink`: the leader, which no longer counts on this node's replica, says again
        what it left to that."""
        for client in list(self._clients.values()):
            client.on_replica_gone()

    # --- for others ----------------------------------------------------------------------

    @property
    def reader_count(self) -> int:
        """Consumers of this node's channels that the leader does not know of."""
        return 0

    def serve(self, request: Fields, reply: Callable[[list[object]], None], node: int) -> None:
        """Answers what another node's handle asks. Raises NotFound where nothing is asked for."""
        raise NotFound("the stream is not here")

    def on_room(self, node: int) -> None:
        """The link to a node takes bulk again."""
        replica = self._host.replica(self.group)
        if replica is None or not replica.is_leader:
            # A new leader says what is to be said.
            self._held_back.forget(node)
            return
        self._held_back.send(node, lambda held: self._forward(node, *held))

    def on_lost(self, node: int) -> None:
        """A node for which something waited is away: it gets everything anew when it is back."""
        self._held_back.forget(node)

    def _forward(self, node: int, effect: Effect, since: int = -1) -> int:
        """Sends one effect to a session's node; returns the bytes of its messages. `since`: of a
        delivery that comes from the state."""
        kind = effect[0]
        session: int = effect[1]
        status = 0
        reply: object = None
        if kind == EFFECT_APPLIED:
            status, reply = effect[3], effect[4]
        else:
            assert kind == EFFECT_GAP
            status = STATUS_GAP
        packed = b"" if reply is None else msgspec.msgpack.encode(reply)
        frame = link_frames.frame(
            link_frames.FRAME_APPLIED, 0, self.group, session, effect[2], status, 0, packed
        )
        self._transport.send(node, frame)
        return 0

    def _start_proxy(self, node: int, machine: GroupMachine) -> None:
        """From now on this leader sends for the node: first all that is out there."""
        if not self._transport.is_connected(node):
            return
        self._proxied.add(node)
        self._forward_state(node, machine, effects_of(machine, machine.resend, node))

    def _forward_state(self, node: int, machine: GroupMachine, effects: Sequence[Effect]) -> None:
        """Sends what the state says of all sessions of a node."""
        for effect in effects:
            self._forward(node, effect)

    def _forward_transients(self, effects: Sequence[Effect], node: int) -> None:
        """Forwards what the state does not repeat: gaps, and messages already settled."""
        for effect in effects:
            if effect[0] == EFFECT_GAP and effect[1] >> 56 == node:
                self._forward(node, effect)

    def _read(self, index: int) -> bytes | None:
        """Returns an entry's bytes; None when this node cannot read it: its replica stops being
        live."""
        if index == self._block_index:
            return self._block
        try:
            data = self._host.read_entry(self.group, index).data
        except (StorageFault, EntryGone):
            return None
        self._block_index = index
        self._block = data
        return data

    # --- as leader -----------------------------------------------------------------------

    def _lead(self, replica: Replica) -> None:
        """Compares what the machine believes of other nodes with what is known here."""
        machine = replica.machine
        for node in sorted(machine.session_nodes() | set(machine.down_nodes)):
            if node == self.node or self._transport.is_connected(node):
                self._propose_up(replica, node)
                if node != self.node and not self._host.is_replica_live(self.group, node):
                    self._start_proxy(node, machine)
            elif self._is_forgotten(node):
                replica.propose(batch.CMD_NODE_DOWN, FLAG_NODE_GONE, 0, node, b"")
            elif node not in machine.down_nodes:
                replica.propose(batch.CMD_NODE_DOWN, 0, 0, node, b"")
        due = self._first_due_ms(replica)
        if due is not None:
            self._arm(due)
        self._propose_settings(replica)

    def configure(self, settings: Mapping[str, object]) -> None:
        """See `Queue`. The leader proposes what differs from what the machine has."""
        self._wanted = self._machine_settings(settings)
        replica = self._host.replica(self.group)
        if replica is not None and replica.is_leader:
            self._propose_settings(replica)

    def _machine_settings(self, settings: Mapping[str, object]) -> dict[str, int]:
        """Returns the settings of the machine for those of the queue; {} = they cannot change."""
        return {}

    def _propose_settings(self, replica: Replica) -> None:
        """CONFIG, unless it would change nothing, or is under way already."""
        machine = replica.machine
        if not machine.configurable:
            return
        term, proposed = self._proposed
        known = {**machine.settings, **proposed} if term == self.term else machine.settings
        wanted = [(k, v) for k, v in self._wanted.items() if machine.knows_setting(k)]
        changed = {k: v for k, v in wanted if known.get(k, self.unset.get(k)) != v}
        if changed:
            self._proposed = (self.term, {**known, **changed})
            body = msgspec.msgpack.encode(changed)
            replica.propose(batch.CMD_CONFIG, 0, len(body), 0, body)

    def _first_due_ms(self, replica: Replica) -> int | None:
        """Returns when a new leader proposes its first TICK."""
        due: int | None = replica.machine.next_due_ms()
        return due

    def _propose_up(self, replica: Replica, node: int) -> None:
        """NODE_UP, unless it would change nothing."""
        machine = replica.machine
        incarnation = self._incarnations.get(node, 0)
        stale = any(
            session >> 56 == node and (session >> 24) & 0xFFFFFFFF < incarnation
            for session in machine.sessions
        )
        if stale or node in machine.down_nodes:
            body = incarnation.to_bytes(8, "little")
            replica.propose(batch.CMD_NODE_UP, 0, 0, node, body)

    def on_node_up(self, node: int) -> None:
        """A node is reachable (again); `incarnations` knows it."""
        replica = self._host.replica(self.group)
        if replica is None or not replica.is_leader:
            return
        self._proxied.discard(node)
        self._propose_up(replica, node)
        nodes = replica.machine.session_nodes()
        if node in nodes and not self._host.is_replica_live(self.group, node):
            self._start_proxy(node, replica.machine)

    def on_node_down(self, node: int, *, definite: bool) -> None:
        """A node is suspected, or (`definite`) its process is known to be gone."""
        replica = self._host.replica(self.group)
        if replica is None or not replica.is_leader:
            return
        self._proxied.discard(node)
        machine = replica.machine
        if node in machine.session_nodes() and (definite or node not in machine.down_nodes):
            flags = FLAG_NODE_GONE if definite else 0
            replica.propose(batch.CMD_NODE_DOWN, flags, 0, node, b"")

    def _arm(self, due_ms: int) -> None:
        """Proposes TICK at the time; an earlier one that is armed stays."""
        if self._timer is not None:
            if self._timer_due_ms <= due_ms:
                return
            self._timer.cancel()
        self._timer_due_ms = due_ms
        replica = self._host.replica(self.group)
        delay = replica.time.delay_ms(due_ms) if replica is not None else 0
        self._timer = self.clock.call_later(delay + 1, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        replica = self._host.replica(self.group)
        if replica is not None and replica.is_leader:
            replica.propose(batch.CMD_TICK, 0, 0, 0, b"")

    def _log(self, event: str, fields: Mapping[str, object]) -> None:
        self._host.note(event, vhost=self.vhost, queue=self.name, group=self.group, **fields)

    # --- time, flow, end -----------------------------------------------------------------

    def tick(self) -> None:
        """Every TICK_MS: bounds of what is pending, and a resend of what got no answer for long."""
        # Nobody reads this entry again soon, and it may be large.
        self._block_index = -1
        self._block = b""
        now = self.clock.monotonic_ms()
        leader = self.known_leader
        leaderless_since = self._leaderless_since(leader, now)
        for client in list(self._clients.values()):
            if client.blocked:
                client.check_flow()
            if leaderless_since is not None:
                client.on_leaderless(leaderless_since, now)
            if self.known_seqs[0]:
                # It is being migrated, and applies nothing.
                client.wait_longer(now)
                continue
            if not client.is_waiting():
                client.progress_ms = client.answered_ms = now
                client.waiting_since_ms = now
                client.silences = 0
                continue
            client.check_flow()
            client.check_deadlines(now)
            wait_ms = RESEND_AFTER_MS << min(client.silences, RESEND_DOUBLINGS_MAX)
            if now - client.progress_ms >= wait_ms and leader is not None:
                client.progress_ms = now
                client.silences += 1
                client.on_silence()
                client.ask_for_lost()

    def _leaderless_since(self, leader: int | None, now_ms: int) -> int | None:
        if leader is not None:
            self._leaderless_since_ms = None
        elif self._leaderless_since_ms is None:
            self._leaderless_since_ms = now_ms
        return self._leaderless_since_ms

    @property
    def known_leader(self) -> int | None:
        return self.leader if self.leader is not None else self._host.leader_of(self.group)

    def follow_members(self, members: tuple[int, ...], config: tuple[int, int]) -> None:
        self.members = members

    def replace(self, successor: Queue) -> None:
        """See `Queue`."""
        if self._clients and self.builder.used:
            # Sealed, so that it can be published elsewhere.
            self.builder.take_forward(self.group, self.term)
        group = successor.group
        run_each(
            list(self._clients.values()),
            lambda client: client.replace(successor, self.known_seq(client.session, group)),
            self._not_replaced,
        )

    def _not_replaced(self, client: SessionClient, error: Exception) -> None:
        """An error of our own in what a client's owner did: the others go on."""
        self._log("queue.client_failed", {"session": client.session, "reason": repr(error)})
        run_each((client,), lambda failed: failed.fail(), lambda _failed, _error: None)
        # The end of the queue would confirm what it asks.
        self.forget(client)

    def on_deleted(self) -> None:
        """The metadata say that the queue is gone. The node's batch of it is not sent any more."""
        if self.deleted:
            return
        self.deleted = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for client in list(self._clients.values()):
            client.on_deleted()
        self._clients.clear()
        self._held_back.clear()

    # --- looking at it -------------------------------------------------------------------

    async def ready(self, timeout: float) -> None:
        """Waits until a leader is known, which can commit. Raises Unavailable."""
        if self._is_led():
            return
        try:
            async with asyncio.timeout(timeout):
                await self._until_led()
        except TimeoutError:
            raise Unavailable(f"queue '{self.name}' has no leader") from None

    def _is_led(self) -> bool:
        if self.known_leader is None:
            return False
        replica = self._host.replica(self.group)
        # The founder of a group leads before anybody has answered it.
        return replica is None or not replica.is_leader or replica.can_commit

    async def _until_led(self) -> None:
        replica = self._host.replica(self.group)
        if replica is not None:
            replica.election_timer.campaign()
        while not self._is_led():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            # Nothing is said when nodes come that make a majority.
            await asyncio.wait({waiter}, timeout=READY_POLL_S)
            if not waiter.done():
                self._waiting.remove(waiter)

    async def counts(self) -> tuple[int, int]:
        """Returns (ready messages, consumers), from the leader where there is one."""
        local = self.local_counts()
        leader = self.leader
        if leader is None or leader == self.node or self._ask_counts is None:
            return local
        try:
            return await self._ask_counts(leader, self.group)
        except Unavailable:
            return local

    @abstractmethod
    def local_counts(self) -> tuple[int, int]:
        """Returns (ready messages, consumers) as this node knows."""

    def _online(self) -> list[int]:
        return [n for n in self.members if n == self.node or self._transport.is_connected(n)]

    @property
    def state(self) -> str:
        """See `group_state`."""
        return group_state(self.leader, len(self._online()), len(self.members))

    def messages_handled(self) -> int:
        """Returns the number of messages that were published and delivered so far, by the local
        replica."""
        replica = self._host.replica(self.group)
        totals = replica.machine.totals() if replica is not None else {}
        return int(totals.get("published", 0) + totals.get("delivered", 0))

    def figures(self) -> tuple[int, ...] | None:
        """See `Queue`."""
        replica = self._host.replica(self.group)
        if replica is None or not replica.is_leader:
            return None
        found: tuple[int, ...] = replica.machine.figures()
        return found

    def info(self) -> Row:
        """Returns the fields that the management API shows, from local knowledge."""
        replica = self._host.replica(self.group)
        return {
            "name": self.name,
            "vhost": self.vhost,
            "type": self.type,
            "group": self.group,
            "leader": self.leader,
            "members": list(self.members),
            "online": self._online(),
            "state": self.state,
            "machine_version": replica.machine.version if replica is not None else None,
            "delivered_local": self.delivered_local,
            "delivered_forwarded": self.delivered_forwarded,
        }
