"""A node's handle of a quorum queue: carries out the machine's effects for this node's clients.

Sessions and answers are those of every group (`group_queue`). Deliveries come from the replica
here, their bodies from its log, or else from the leader in link frames:

| frame   | a       | b        | c                | d                                              |
|---------|---------|----------|------------------|------------------------------------------------|
| DELIVER | session | consumer | first message id | count, final, failed, acquired; messages       |
| DELIVER | session | consumer | from message id  | count 0: a client asks the leader              |
| DELIVER | session | consumer | from message id  | count 0, final: that was all that was asked;   |
|         |         |          |                  | body: – or `end`, `next`, each u64             |
| APPLIED | 0       | entry    | 4                | 1: publishers are refused, 0: they are not     |
| APPLIED | session | consumer | 5                | 1: it is the single active one, 0: it is not   |

Bits of d: count 63..32, final 31, failed 30..16, acquired 15..0 (counts saturate). Messages are
one ENQUEUE command, and behind it are their annotations; if `final` (from the state, not from the
log) followed by `since`, u64: between `since` and the first message id nothing is checked out. Each
frame says so for itself, as those before it may not have arrived, or may have been dropped by a
paused client. `end` and `next`: who has everything below `end` holds nothing else below `next`.

A leader sends for a node as long as the host does not call that node's replica live; when it starts
to, it sends everything that is checked out there (`machine.resend`), because it cannot know what
the replica managed to. Clients drop repeats by seq and message id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

import msgspec

from convoymq.kernels import batch, link_frames
from convoymq.kernels.entries import Entry
from convoymq.model.compatibility import COMPATIBILITY, RELEASE_4_1, TYPE_GIVEN
from convoymq.model.errors import ReservationRefused, StorageFault, Unavailable
from convoymq.model.refusals import (
    OLDER_NODES,
    conditional_delete,
    in_use,
    not_empty,
)
from convoymq.queues import handing_over
from convoymq.queues.copying import CopiedPage
from convoymq.queues.dead_letter_publisher import DeadLetterOptions
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.group_queue import GroupQueue, effects_of
from convoymq.queues.interface import (
    LETTERS_LEAVE,
    PRIORITY_ARGUMENT,
    TIMEOUT_ARGUMENT,
    ClientEvents,
    Delivery,
    QueueFeatures,
    Row,
    ScheduledMessage,
    ScheduledPlace,
    StoredRun,
)
from convoymq.queues.link_claims import claim_of
from convoymq.queues.quorum import views
from convoymq.queues.quorum.browsing import Page, Question, page, record_at
from convoymq.queues.quorum.client import QuorumClient
from convoymq.queues.quorum.consumers import OUTCOMES_SINCE
from convoymq.queues.quorum.copying import Copying
from convoymq.queues.quorum.dead_letter_mover import DeadLetterMover
from convoymq.queues.quorum.delayed import CANCEL_SCHEDULED
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.operation_mover import OperationMover
from convoymq.queues.quorum.peeking import peek
from convoymq.queues.quorum.picking import FilterReader
from convoymq.queues.quorum.questions import (
    DELETE_CHECK,
    EXPIRED_UNUSED,
    IN_USE,
    NOT_EMPTY,
    RENEW,
)
from convoymq.queues.quorum.reservation_client import ReservationClient
from convoymq.queues.quorum.scheduled import scheduled
from convoymq.queues.quorum.settings import (
    FROZEN,
    KEEPS_ALL,
    LINK_RESUME_TIMEOUT,
    NONE,
    SINCE_VERSION_2,
    machine_settings,
)
from convoymq.queues.quorum.transaction_resolver import TransactionResolver
from convoymq.queues.reservation_reads import (
    Ask,
    Fields,
    ReservedRun,
    Room,
    RunsRequest,
    no_wait,
)
from convoymq.replication.machine import (
    EFFECT_ACTIVITY,
    EFFECT_DEAD_LETTERS,
    EFFECT_DEDUPLICATED,
    EFFECT_DELIVER,
    EFFECT_REFUSING,
    EFFECT_UNUSED,
    Effect,
)
from convoymq.storage.types import EntryGone

if TYPE_CHECKING:
    from convoymq.queues.driver import GroupOptions
    from convoymq.shells.groups.replica import Replica

FINAL = 1 << 31
STATUS_REFUSING = 4
STATUS_ACTIVITY = 5
ANSWER_BYTES_SOFT = 4 << 20
"""A leader that is asked for deliveries sends about this much at a time."""
FROZEN_VERSION = 5
"""Machine version from which a queue can be migrated."""
ATTRIBUTES_VERSION = 2
"""Machine version from which messages may expire and have priorities."""
FIRST_ENTRIES = 8
"""A new group's members, the begin of its first term and its version are among so many entries."""
REJECT_PUBLISH_DLX = "reject-publish-dlx"
SETTINGS_WAIT_S = 3.0
"""Longest wait of a declaration for settings that only a newer machine version has."""
SETTINGS_POLL_S = 0.005
RESERVATION_GRACE_MS = 60_000
"""Time that a new leader gives the owners of reservations to be heard of: while nobody led, they
could not be."""


class QuorumQueue(GroupQueue):
    """A quorum queue on this node; see `GroupQueue`.

    Args of its own:
        ask_node: asks another node's `serve_reservation`.
        dead_letters: how dead letters are published; None: they are not.
    """

    type = "quorum"
    features = QueueFeatures(
        counts_failed_deliveries=True,
        drops_repeats=True,
        consumer_arguments=frozenset((PRIORITY_ARGUMENT, TIMEOUT_ARGUMENT)),
        times_consumers=True,
        modifies=True,
        filters=True,
    )

    def __init__(
        self,
        *,
        ask_node: Ask | None = None,
        dead_letters: DeadLetterOptions | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(**options)
        self.unset = {KEEPS_ALL: 0, LINK_RESUME_TIMEOUT: 0}
        self.mover = DeadLetterMover(self, dead_letters)
        routes = dead_letters.routes if dead_letters is not None else None
        self.operation_mover = OperationMover(self, routes)
        self.resolver = TransactionResolver(self, routes)
        self._reservation_client = ReservationClient(self, ask_node)
        self._copying = Copying(self)
        #: The entry by which `refuses_publishes` is what it is.
        self._refusing_at = 0
        self._warned_overflow = False
        self._is_thawing = False
        #: Version that all members supported when this was opened.
        self._newest_at_first = self._newest()

    # --- clients -------------------------------------------------------------------------

    def client(self, session: int, events: ClientEvents) -> QuorumClient:
        made = super().client(session, events)
        assert isinstance(made, QuorumClient)
        return made

    def _new_client(self, session: int, events: ClientEvents) -> QuorumClient:
        return QuorumClient(self, session, events)

    def ask(self, client: QuorumClient, consumer: int, from_id: int) -> None:
        """Gets what is checked out to a consumer from a message id on, from here or the leader."""
        replica = self._host.replica(self.group)
        if replica is not None and not replica.is_behind:
            machine: QuorumMachine = replica.machine
            effects = effects_of(
                machine, machine.deliveries.redeliver, client.session, consumer, from_id
            )
            if (effects or replica.is_leader) and self._carry_out(client, effects, from_id):
                client.on_asked(consumer, from_id, complete=True)
                return
        leader = self.leader
        if leader is not None and leader != self.node:
            frame = link_frames.frame(
                link_frames.FRAME_DELIVER, 0, self.group, client.session, consumer, from_id, 0
            )
            self._transport.send(leader, frame)

    def _carry_out(self, client: QuorumClient, effects: Iterable[Effect], since: int) -> bool:
        """Effects are all that is checked out from message id `since` on. False when one cannot be
        read here: what follows it would tell the client that it is not checked out any more."""
        for effect in effects:
            _, _, consumer, first_id, index, command, first, count, acquired_count, *rest = effect
            if consumer and client.is_paused(consumer):
                break
            block = self._read(index)
            if block is None:
                return False
            client.on_deliver(
                Delivery(consumer, first_id, block, command, first, count, acquired_count, *rest),
                since,
            )
            since = first_id + count
        return True

    # --- EffectSink ----------------------------------------------------------------------

    def on_effects(self, effects: Sequence[Effect], replica: Replica) -> None:
        """See `GroupQueue`; and readers of reservations may wait for what was applied."""
        super().on_effects(effects, replica)
        if self._is_thawing and not replica.machine.is_frozen and replica.is_leader:
            # What happened to nodes meanwhile was not applied.
            self._is_thawing = False
            self._lead(replica)
        if self._reservation_client.waiters:
            self._reservation_client.on_applied()
        if replica.is_leader and replica.machine.operations.by_id:
            self.operation_mover.wake()
        if replica.is_leader and replica.machine.transactions.is_open:
            self.resolver.wake()

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        """See `EffectSink`; who leads publishes dead letters."""
        before = (self.leader, self.term)
        super().on_leader(group, leader, term)
        if (leader, term) != before:
            self._follow_refusing()
            replica = self.replica()
            leads = leader == self.node and replica is not None and replica.is_leader
            self.mover.on_leader(replica if leads else None)
            self.operation_mover.on_leader(replica if leads else None)
            self.resolver.on_leader(replica if leads else None)

    def configure(self, settings: Mapping[str, object]) -> None:
        self.mover.configure(settings)
        follows_4_1 = settings.get(COMPATIBILITY) == RELEASE_4_1
        self.refuses_global_qos = follows_4_1 and bool(settings.get(TYPE_GIVEN))
        timeout_ms, resume_ms = map(settings.get, ("consumer-timeout", "link-resume-timeout"))
        self.consumer_timeout_ms = timeout_ms if isinstance(timeout_ms, int) else None
        self.link_resume_ms = resume_ms if isinstance(resume_ms, int) else 0
        super().configure(settings)

    def _machine_settings(self, settings: Mapping[str, object]) -> dict[str, int]:
        unserved = settings.get("overflow") == REJECT_PUBLISH_DLX
        if unserved and not self._warned_overflow:
            self.note("quorum.overflow_unserved", {"overflow": REJECT_PUBLISH_DLX})
        self._warned_overflow = unserved
        keeps_all = int(handing_over.KEEPS_ALL in settings)
        return {LINK_RESUME_TIMEOUT: 0, **machine_settings(settings), KEEPS_ALL: keeps_all}

    # --- full queues ---------------------------------------------------------------------

    @property
    def serves_attributes(self) -> bool:
        """See `Queue`: from version 2 of the machine on."""
        return self._serves(ATTRIBUTES_VERSION)

    def _newest(self) -> int:
        """Returns the newest version of the machine that all members support."""
        return self._host.newest_of(QuorumMachine.KIND, self.members)

    def _serves(self, version: int) -> bool:
        """Returns whether the machine has a version, or a newer one."""
        replica = self._host.replica(self.group)
        if replica is None or replica.is_behind:
            return self._newest() >= version
        # Of a new queue the first entries are not applied here: its declaration waited for them.
        is_new = replica.last_applied <= FIRST_ENTRIES
        return replica.machine.version >= version or (is_new and self._newest_at_first >= version)

    @property
    def serves_delays(self) -> bool:
        """See `Queue`: as far as attributes."""
        return self.serves_attributes

    @property
    def is_early(self) -> bool:
        return not self.serves_attributes

    @property
    def serves_groups(self) -> bool:
        """See `Queue`: as far as attributes. Before that the order would be lost in silence."""
        return self.serves_attributes

    @property
    def serves_outcomes(self) -> bool:
        """Returns whether consumers may have credit, and modify what they give back."""
        return self._serves(OUTCOMES_SINCE)

    @property
    def serves_transactions(self) -> bool:
        """See `Queue`: as far as outcomes."""
        return self.serves_outcomes

    def _on_own_effect(self, effect: Effect, replica: Replica) -> None:
        machine: QuorumMachine = replica.machine
        if effect[0] == EFFECT_REFUSING:
            self._refuse(effect[1], machine.index)
            if replica.is_leader:
                for node in self._proxied:
                    self._tell_refusing(node, machine)
        elif effect[0] == EFFECT_DEAD_LETTERS:
            if replica.is_leader:
                self.mover.on_left(effect)
        elif effect[0] == EFFECT_DEDUPLICATED:
            if replica.is_leader:
                self.deduplicated += effect[1]
        elif effect[0] == EFFECT_UNUSED and replica.is_leader and self._on_unused is not None:
            self._on_unused()

    def _refuse(self, refuses: bool, index: int) -> None:
        """Refuses or accepts publishers, as the queue was at an entry."""
        if index < self._refusing_at:
            return
        self._refusing_at = index
        if refuses != self.refuses_publishes:
            self.refuses_publishes = refuses
            if self._on_routes is not None:
                self._on_routes()

    def _tell_refusing(self, node: int, machine: QuorumMachine) -> None:
        frame = link_frames.frame(
            link_frames.FRAME_APPLIED,
            0,
            self.group,
            0,
            machine.index,
            STATUS_REFUSING,
            int(machine.backlog.refusing),
        )
        self._transport.send(node, frame)

    def _start_proxy(self, node: int, machine: GroupMachine) -> None:
        super()._start_proxy(node, machine)
        assert isinstance(machine, QuorumMachine)
        if node in self._proxied and machine.version >= ATTRIBUTES_VERSION:
            self._tell_refusing(node, machine)

    def _follow_refusing(self) -> None:
        """Follows the replica on whether publishers are refused; without one that is up to date,
        accepts them. A publisher without need is told again."""
        replica = self._host.replica(self.group)
        if replica is None or replica.is_behind:
            self._refuse(False, self._refusing_at)
            return
        machine: QuorumMachine = replica.machine
        self._refuse(machine.backlog.refusing, max(machine.index, self._refusing_at))

    def on_restored(self) -> None:
        """See `EffectSink`."""
        super().on_restored()
        self._follow_refusing()

    def on_replica_gone(self) -> None:
        """See `EffectSink`: what the replica said last would stay for ever."""
        super().on_replica_gone()
        self._follow_refusing()

    def on_node_down(self, node: int, *, definite: bool) -> None:
        super().on_node_down(node, definite=definite)
        if node == self.leader:
            self._follow_refusing()

    def _first_due_ms(self, replica: Replica) -> int | None:
        machine: QuorumMachine = replica.machine
        due = machine.next_due_ms()
        times = [reservation.ttl_ms for reservation in machine.reservations.by_name.values()]
        if due is not None and times:
            due = max(due, replica.time.now_ms() + min(RESERVATION_GRACE_MS, min(times)))
        return due

    def _deliver(self, client: QuorumClient, effect: Effect) -> None:
        index = effect[4]
        block = self._block if index == self._block_index else self._read(index)
        if block is not None:
            _, _, consumer, first_id, _, command, first, count, acquired_count, failed, *said = (
                effect
            )
            self.delivered_local += count
            # As `Delivery(…)`, at half the price.
            annotations = said[0] if said else b""
            made = (
                consumer, first_id, block, command, first, count, acquired_count, failed,
                annotations,
            )  # fmt: skip
            client.on_deliver(tuple.__new__(Delivery, made), -1)

    def on_link_frame(
        self, node: int, type: int, group: int, a: int, b: int, c: int, d: int, body: bytes
    ) -> None:
        """APPLIED or DELIVER of this group, from the leader or, asking, from a client's node."""
        if type == link_frames.FRAME_APPLIED and c == STATUS_REFUSING:
            replica = self._host.replica(self.group)
            if replica is None or replica.is_behind:
                self._refuse(d != 0, b)
            return
        if type == link_frames.FRAME_APPLIED and c == STATUS_ACTIVITY:
            found = self._clients.get(a)
            if found is not None:
                found.on_activity(b, d)
            return
        if type == link_frames.FRAME_APPLIED:
            super().on_link_frame(node, type, group, a, b, c, d, body)
            return
        count = d >> 32
        if count == 0 and not d & FINAL:
            self._on_asked(node, a, b, c)
            return
        client = self._clients.get(a)
        if client is None:
            return
        if count == 0:
            if body:
                end = int.from_bytes(body[:8], "little")
                client.on_position(b, end, int.from_bytes(body[8:16], "little"))
            client.on_asked(b, c)
            return
        failed = (d >> 16) & 0x7FFF
        end = len(body) - 8 if d & FINAL else len(body)
        since = int.from_bytes(body[end:], "little") if d & FINAL else -1
        said = body[int.from_bytes(body[:4], "little") : end]
        client.on_deliver(Delivery(b, c, body, 0, 0, count, d & 0xFFFF, failed, said), since)

    # --- for others ----------------------------------------------------------------------

    def _forward_state(self, node: int, machine: GroupMachine, effects: Sequence[Effect]) -> None:
        """See `GroupQueue`: of every consumer, what is checked out from message id 0 on, and that
        nothing else is.

        The node's replica is behind. What it applies later may hand out what the queue has taken
        back, and given to others, since: consumers that hold nothing hear so before they could get
        anything else.
        """
        assert isinstance(machine, QuorumMachine)
        ends: dict[tuple[int, int], int] = {}
        holders = {(effect[1], effect[2]) for effect in effects if effect[0] == EFFECT_DELIVER}
        consumers = machine.consumers.positions(node)
        for session, consumer, next_id in consumers:
            if (session, consumer) not in holders:
                self._forward_end(node, session, consumer, 0, 0, next_id)
        for effect in effects:
            if effect[0] != EFFECT_DELIVER:
                self._forward(node, effect)
                continue
            key = (effect[1], effect[2])
            self._forward(node, effect, ends.get(key, 0))
            # Also when it could not be read here: what follows does not say that it is gone.
            ends[key] = effect[3] + effect[7]
        for session, consumer, next_id in consumers:
            if (session, consumer) in holders:
                self._forward_end(node, session, consumer, 0, ends[(session, consumer)], next_id)

    def _forward_end(
        self, node: int, session: int, consumer: int, from_id: int, end: int, next_id: int
    ) -> None:
        """Says that a consumer was sent all that it holds from one message id on: the last of that
        ends before `end`, and nothing else is checked out to it below `next_id`."""
        body = end.to_bytes(8, "little") + next_id.to_bytes(8, "little")
        self._forward_final(node, session, consumer, from_id, body)

    def _forward_final(
        self, node: int, session: int, consumer: int, from_id: int, body: bytes = b""
    ) -> None:
        """Says that nothing more follows of what was asked; see the module docstring for `body`."""
        head = link_frames.frame(
            link_frames.FRAME_DELIVER, 0, self.group, session, consumer, from_id, FINAL, body
        )
        self._transport.send(node, head)

    def _forward(self, node: int, effect: Effect, since: int = -1) -> int:
        """Sends one effect to a session's node; returns the bytes of its messages. `since`: of a
        DELIVER that comes from the state."""
        if effect[0] == EFFECT_ACTIVITY:
            said = (*effect[1:3], STATUS_ACTIVITY, int(effect[3]))
            frame = link_frames.frame(link_frames.FRAME_APPLIED, 0, self.group, *said)
            self._transport.send(node, frame)
            return 0
        if effect[0] != EFFECT_DELIVER:
            return super()._forward(node, effect)
        if self._held_back.add(node, (effect, since)):
            return 0
        _, session, consumer, first_id, index, command, first, count, acquired_count, failed = (
            effect[:10]
        )
        block = self._read(index)
        if block is None:
            return 0
        self.delivered_forwarded += count
        body = batch.slice_records(block, command, first, count)
        tail = b"".join(effect[10:]) + (b"" if since < 0 else since.to_bytes(8, "little"))
        d = count << 32 | min(failed, 0x7FFF) << 16 | min(acquired_count, 0xFFFF)
        head = link_frames.frame(
            link_frames.FRAME_DELIVER,
            0,
            self.group,
            session,
            consumer,
            first_id,
            d if since < 0 else d | FINAL,
            body_length=len(body) + len(tail),
        )
        self._transport.send(node, head, (body, tail) if tail else (body,))
        return len(body)

    def _on_asked(self, node: int, session: int, consumer: int, from_id: int) -> None:
        """A client elsewhere misses deliveries."""
        replica = self._host.replica(self.group)
        if replica is None or not replica.is_leader or session >> 56 != node:
            return
        if node in self._transport.full or node in self._held_back:
            # It asks again, unless what waits for the link is what it misses.
            return
        machine: QuorumMachine = replica.machine
        effects = effects_of(machine, machine.deliveries.redeliver, session, consumer, from_id)
        sent = 0
        since = from_id
        for effect in effects:
            if sent > ANSWER_BYTES_SOFT or node in self._transport.full:
                # The client asks again for what is missing, when it has passed this on.
                self._forward_final(node, session, consumer, from_id)
                return
            size = self._forward(node, effect, since)
            if not size:
                # Not to be read here: the client asks again, until somebody can.
                return
            sent += size
            since = effect[3] + effect[7]
        next_id = machine.consumers.position(session, consumer)
        self._forward_end(node, session, consumer, from_id, since, next_id)

    async def check_delete(self, *, if_unused: bool, if_empty: bool) -> int:
        """See `Queue`. The queue's log decides: both conditions held at one moment, of which all
        that was confirmed before is part."""
        if not if_unused and not if_empty:
            return (await self.counts())[0]
        subject = self.subject
        question = {"op": DELETE_CHECK, "if_unused": if_unused, "if_empty": if_empty}
        try:
            answer: Row = await self._reservation_client.ask(question)
        except ReservationRefused as refused:
            if refused.reason == IN_USE:
                raise in_use(subject) from None
            if refused.reason == NOT_EMPTY:
                raise not_empty(subject) from None
            # Version 1 of the machine does not know the question.
            raise conditional_delete("if-unused" if if_unused else "if-empty", subject) from None
        return int(answer["messages"])

    async def operation(self, op: Mapping[str, object]) -> Row:
        return await self._reservation_client.ask(op)

    def operations(self) -> list[tuple[str, Row, str]]:
        replica = self.replica()
        if replica is None:
            return []
        known = replica.machine.operations
        found = [(id, summary, "") for id, summary in known.finished.items()]
        for id, operation in known.by_id.items():
            found.append((id, operation.summary(), self.operation_mover.waits_for(id)))
        return found

    async def browse_page(self, question: Question) -> Page | None:
        replica = self.replica()
        if replica is None or replica.is_behind:
            return None
        return await page(self, replica.machine, question)

    def message_at(self, place: tuple[int, int, int]) -> bytes | None:
        entry = self.entry(place[0])
        return None if entry is None else record_at(entry, place[1], place[2])

    async def renew_lease(self) -> bool:
        """See `Queue`. The queue's log says so to all its replicas; without a leader there is
        nobody who could end the queue either."""
        if self._wanted.get("expires_ms", NONE) < 0 or not self._is_led():
            return True
        try:
            await self._reservation_client.ask({"op": RENEW})
        except ReservationRefused as refused:
            # Before version 4 of the machine the time was not renewed.
            return refused.reason != EXPIRED_UNUSED
        return True

    # --- migration to another type ------------------------------------------------------------

    @property
    def frozen(self) -> int:
        """See `Queue`."""
        replica = self.replica()
        return 0 if replica is None else int(replica.machine.settings.get(FROZEN, 0))

    def migration_obstacle(self) -> str:
        """See `Queue`."""
        replica = self.replica()
        if replica is None or not replica.is_leader:
            return "the queue is led elsewhere"
        machine: QuorumMachine = replica.machine
        if machine.version < FROZEN_VERSION:
            return OLDER_NODES
        if machine.reservations.by_name:
            return "messages are reserved"
        if machine.operations.by_id:
            return "operations on chosen messages are under way"
        if machine.waiting.messages:
            return "messages wait for a time"
        if machine.transactions.is_open:
            return "transactions are under way"
        leave = machine.dead_letters.held.messages or self.mover.waits
        return LETTERS_LEAVE if leave else ""

    async def freeze(self, successor: int, timeout: float) -> None:
        """See `Queue`. All members know by the log."""
        self._propose_frozen(successor)
        try:
            async with asyncio.timeout(timeout):
                while self.frozen != successor:
                    await asyncio.sleep(SETTINGS_POLL_S)
        except TimeoutError:
            raise Unavailable(f"queue '{self.name}' was not frozen in time") from None

    def thaw(self) -> None:
        """See `Queue`."""
        self._is_thawing = True
        self._propose_frozen(0)

    def _propose_frozen(self, successor: int) -> None:
        replica = self.replica()
        if replica is None or not replica.is_leader:
            raise Unavailable(f"queue '{self.name}' is led elsewhere")
        body = msgspec.msgpack.encode({FROZEN: successor})
        replica.propose(batch.CMD_CONFIG, 0, len(body), 0, body)

    def applied_seqs(self) -> dict[int, int]:
        """See `Queue`."""
        replica = self.replica()
        assert replica is not None
        return {session.id: session.seq for session in replica.machine.sessions.values()}

    def stored_count(self) -> int:
        """See `Queue`."""
        replica = self.replica()
        if replica is None:
            return 0
        machine: QuorumMachine = replica.machine
        return int(machine.backlog.stored() + machine.backlog.unacked)

    def stored_runs(self) -> Iterator[StoredRun]:
        """See `Queue`."""
        replica = self.replica()
        if replica is None or not replica.is_leader:
            raise Unavailable(f"queue '{self.name}' is led elsewhere")
        return self._copying.stored(replica.machine)

    async def copy_page(self, after: int, upto: int) -> CopiedPage:
        """See `Queue`."""
        replica = self.replica()
        if replica is None or replica.established_leader != self.node:
            raise Unavailable(f"queue '{self.name}' is led elsewhere")
        return self._copying.page(replica.machine, after, upto)

    # --- reservations --------------------------------------------------------------------------

    async def reservation(self, op: Mapping[str, object]) -> Row:
        return await self._reservation_client.op(op)

    @property
    def filter_reader(self) -> FilterReader:
        """Returns what scans replicas for consumers with a filter."""
        return self._reservation_client.filter_reader

    async def claim_link(self, key: bytes, tags: Iterable[bytes]) -> tuple[int, list[int]]:
        """See `Queue`."""
        answer: Row = await self._reservation_client.ask(claim_of(key, tags))
        return answer["epoch"], answer["known"]

    async def reservation_runs(self, request: RunsRequest) -> tuple[int, int, list[ReservedRun]]:
        return await self._reservation_client.runs(request)

    async def browse(
        self, cursor: Sequence[int] | None, max_rows: int, max_bytes: int
    ) -> tuple[list[int] | None, list[ReservedRun]]:
        return await self._reservation_client.browse(cursor, max_rows, max_bytes)

    def scheduled(self, after: ScheduledPlace | None, limit: int) -> list[ScheduledMessage]:
        replica = self.replica()
        if replica is None:
            raise Unavailable("the queue has no replica here")
        return scheduled(self, replica.machine, after, limit)

    async def cancel_scheduled(self, places: Sequence[ScheduledPlace]) -> int:
        """See `Queue`. The queue's log decides which of them still wait."""
        self.check_serves_delays()
        op = {"op": CANCEL_SCHEDULED, "messages": [list(place) for place in places]}
        answer: Row = await self._reservation_client.ask(op)
        return int(answer["cancelled"])

    async def peek(self, position: int) -> ReservedRun | None:
        replica = self.replica()
        if replica is None:
            raise Unavailable("the queue has no replica here")
        return peek(self, replica.machine, position)

    async def serve_reservation(self, request: Fields, room: Room = no_wait) -> list[object]:
        return await self._reservation_client.serve(request, room)

    def reservations(self) -> list[dict[str, object]]:
        replica = self.replica()
        if replica is None or not replica.is_leader:
            return []
        return list(replica.machine.reservations.infos())

    def activity(self) -> list[tuple[int, int, str]]:
        replica = self.replica()
        if replica is None or not replica.is_leader or not replica.machine.consumers.single_active:
            return []
        return [
            (row["session"], row["number"], row["activity_status"])
            for row in replica.machine.consumers.infos()
            if "session" in row
        ]

    def on_deleted(self) -> None:
        super().on_deleted()
        self._reservation_client.on_deleted()
        self.mover.on_deleted()
        self.operation_mover.stop()
        self.resolver.stop()

    def replica(self) -> Replica | None:
        """Returns the local replica, if any."""
        return self._host.replica(self.group)

    def note(self, event: str, fields: Mapping[str, object]) -> None:
        """Logs an event of this queue; counts of messages are summed for a while."""
        self._notes.note(event, fields)

    def entry_bytes(self, index: int) -> bytes | None:
        """As `entry`: its bytes. The last one is remembered."""
        return self._read(index)

    def entry(self, index: int) -> Entry | None:
        """Returns an entry of the local log; None when it cannot be read here."""
        try:
            return self._host.read_entry(self.group, index)
        except (StorageFault, EntryGone, KeyError):
            return None

    # --- new queues ----------------------------------------------------------------------

    async def wait_until_open(self, timeout: float) -> None:
        """See `Queue`. What a queue is declared with acts on its first message: where all members
        support the machine's version, its settings are in force when this returns."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        await super().wait_until_open(timeout)
        until = min(deadline, loop.time() + SETTINGS_WAIT_S)
        while loop.time() < until and not self._has_settings():
            await asyncio.sleep(SETTINGS_POLL_S)

    def _has_settings(self) -> bool:
        """Returns whether the machine here has what was asked for, or this node cannot know."""
        replica = self.replica()
        if replica is None or self.deleted:
            return True
        if replica.machine.version < self._newest():
            # Its first messages may need what the newer version brings.
            return False
        known = {**SINCE_VERSION_2, **self.unset, **replica.machine.settings}
        knows = replica.machine.knows_setting
        return all(known.get(name) == value for name, value in self._wanted.items() if knows(name))

    # --- looking at it -------------------------------------------------------------------

    def local_counts(self) -> tuple[int, int]:
        """Returns (ready messages, consumers) as the local replica knows; (0, 0) without one."""
        replica = self._host.replica(self.group)
        if replica is None:
            return (0, 0)
        return (replica.machine.backlog.stored(), replica.machine.consumers.count)

    def info(self) -> Row:
        """Returns the fields that the management API shows, from local knowledge."""
        made = super().info()
        replica = self._host.replica(self.group)
        if replica is not None:
            made |= views.info(replica.machine) | self.mover.info(replica.machine.dead_letters)
        return made
