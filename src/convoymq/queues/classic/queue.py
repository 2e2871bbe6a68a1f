# cython: annotation_typing=False
"""A node's handle of a classic queue: `LocalQueue` at its home, `RemoteQueue` everywhere else.

A local queue seals its open batch at the end of a round, lets the machine apply it, writes what
has to be on disk, and carries the effects out. Confirms of persistent messages wait for the disk
when the queue is durable; deliveries do not. A remote queue sends the sealed batch to the home node
and gets the effects back.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from convoymq.kernels.batch import CommandBuilder
from convoymq.kernels.classic_records import transient_records
from convoymq.metadata.machine import QueueRecord
from convoymq.model.clock import Clock, Timer
from convoymq.model.errors import Refused, StorageFault
from convoymq.model.refusals import missing
from convoymq.model.rounds import run_each
from convoymq.model.tables import Table
from convoymq.queues.classic.backing import RUN_BYTES, Line
from convoymq.queues.classic.client import ClassicClient
from convoymq.queues.classic.dead_letter_sender import DeadLetterSender
from convoymq.queues.classic.facts import facts_of
from convoymq.queues.classic.gates import Gate, Gates
from convoymq.queues.classic.limits import limits_from, priority_max
from convoymq.queues.classic.machine import (
    APPLIED,
    GAP,
    UNUSED,
    ClassicMachine,
    Effect,
)
from convoymq.queues.classic.memory import SHARE_MIN_BYTES, Rates
from convoymq.queues.classic.migration import Freezable, Replaceable
from convoymq.queues.classic.notes import NOTHING, pack_note
from convoymq.queues.classic.recovery import recover
from convoymq.queues.classic.reservation_clients import HomeReservations
from convoymq.queues.classic.resting import NEVER
from convoymq.queues.classic.runs import Block, Run, dead_in
from convoymq.queues.interface import (
    PRIORITY_ARGUMENT,
    SINGLE_ACTIVE,
    WAITING,
    ClientEvents,
    Queue,
    QueueFeatures,
    Row,
)
from convoymq.queues.summed_notes import SummedNotes
from convoymq.storage.types import Directory

if TYPE_CHECKING:
    from convoymq.queues.classic.host import ClassicHost

EXPIRY_WAIT_MS_MAX = 60_000
"""The wall clock may jump: no timer for an expiry is set for longer."""
STEPS = 16
"""Paging out is tried again when so small a part of what a queue may keep has come."""
_NONE: Counter[int] = Counter()
GATHER_BYTES_MAX = 256 << 10
UNFINISHED_WAIT_MS = 1
"""Pause of a queue that drops many messages, before it drops more."""


class ClassicQueue(Replaceable, Queue):
    """Common part of both handles: the open batch and this node's clients."""

    type = "classic"
    features = QueueFeatures(
        serves_expiration=True,
        answers_by_tags=True,
        modifies=True,
        consumer_arguments=frozenset((PRIORITY_ARGUMENT,)),
    )

    is_urgent = False
    """The open batch has a question, or commands of another node, which gathered there."""

    def __init__(
        self,
        host: ClassicHost,
        record: QueueRecord,
        arguments: Table,
        settings: Mapping[str, object],
    ) -> None:
        self.vhost = record.vhost
        self.name = record.name
        self.record = record
        self.group = record.group
        self.arguments = arguments
        self.limits = limits_from(arguments, settings)
        self.host = host
        self.clients: dict[int, ClassicClient] = {}
        self._published_ok = True
        self.builder = CommandBuilder(self._on_first)

    def _on_first(self) -> None:
        self.host.mark_dirty(self)

    def wake(self) -> None:
        """The queue may have work for ticks, if it is here."""

    def client(self, session: int, events: ClientEvents) -> ClassicClient:
        """Opens a channel's command stream."""
        made = self.host.client_class(self, self._session_for(session), events)
        self.clients[made.session] = made
        if self.known_seqs[0]:
            self.host.soon(lambda: self._tell_frozen(made))
        return made

    def configure(self, settings: Mapping[str, object]) -> None:
        """See `Queue`."""
        self.limits = limits_from(self.arguments, settings)

    def _session_for(self, session: int) -> int:
        return session

    def forget(self, client: ClassicClient) -> None:
        """A client has closed."""
        self.clients.pop(client.session, None)

    def end(self, error: Refused, *, published_ok: bool) -> None:
        """The queue is deleted or lost: answers everything that waits, now and later."""
        self.release()
        self.ended = error
        self._published_ok = published_ok
        self._seal_ended()

    def _seal_ended(self) -> None:
        assert self.ended is not None
        if self.builder.used:
            self.builder.discard_unsent()
        ended, ok = self.ended, self._published_ok
        self.tell_all(lambda client: client.end(ended, published_ok=ok))

    def crash(self, error: Refused) -> None:
        """Stops the queue after an error of our own; its clients are answered."""
        self._cancel_all("crashed")
        self.end(error, published_ok=False)

    def _cancel_all(self, reason: str) -> None:
        self.tell_all(lambda client: client.cancel_all(reason))

    def tell_all(self, step: Callable[[ClassicClient], None]) -> None:
        """Tells every client of this node something."""
        run_each(list(self.clients.values()), step, self._client_failed)

    def tell(self, client: ClassicClient, step: Callable[[ClassicClient], None]) -> None:
        """Tells a client something; an error in it is that of its channel, and ends neither the
        queue nor other clients."""
        run_each((client,), step, self._client_failed)

    def _client_failed(self, client: ClassicClient, error: Exception) -> None:
        self.host.note_client_failed(self, client, error)
        # Its channel may be what fails: then what it is told of that fails as well.
        run_each((client,), lambda failed: failed.fail(), lambda _failed, _error: None)

    @abstractmethod
    def delete(self) -> None:
        """The queue is gone from the tree."""

    @abstractmethod
    def end_of_round(self, now_ms: int) -> None:
        """Seals the open batch and passes it on."""

    @abstractmethod
    async def ready(self, timeout: float) -> None:
        """Raises NotFound when the queue cannot be used."""


class LocalQueue(Freezable, HomeReservations, ClassicQueue):
    """The queue itself, at its home node."""

    _keeps_length = False
    """Excess of messages at the opening has left."""
    _runs_ahead = False
    """No message of this round may reach a client before the log says that it was handed out."""

    def __init__(
        self,
        host: ClassicHost,
        record: QueueRecord,
        arguments: Table,
        settings: Mapping[str, object],
        directory: Directory,
        *,
        takes_over: bool = False,
    ) -> None:
        """Opens the queue and recovers what a former run left. Raises StorageFault on damage.

        Args:
            takes_over: the files are a copy of a queue that was running until now: its transient
                messages stay.
        """
        super().__init__(host, record, arguments, settings)
        self._directory = directory
        self._takes_over = takes_over
        self.durable = not record.is_fleeting
        self.log = host.make_log(record, directory, sync=self.durable)
        self.machine = ClassicMachine(
            self.limits, self._load, level_max=priority_max(arguments), read=self.log.read_batch
        )
        self.machine.is_transient = self._is_transient
        self.machine.last_used_ms = host.now_ms()
        self._gates = Gates(self._hand_on, lambda *ends: host.dispatch_unsafe(self, *ends))
        self._handed_out: dict[int, int] = {}
        """Priority -> positions below this were handed out, as the log has it."""
        self._moved: Counter[int] = Counter()
        """File -> messages that were moved out of it, and whose copies were not handed over, or
        could not be written."""
        self._moving = 0
        """Writes with copies that are under way."""
        self._unwritten: list[Block] = []
        #: Writes that were handed over, and finished; who waits for the n-th of them.
        self._writes = 0
        self._writes_done = 0
        self._flushed = 0
        """Number of a write: all that was written up to it is durable."""
        self._applied_ms = 0
        """Time of the last batch, by the monotonic clock."""
        self.rates = Rates()
        self._stays = 0
        """Bytes that stayed when paging out was tried last, since anything was written."""
        self._unspilled = False
        """Transient messages are being written."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._notes = SummedNotes(host.clock, self._log)
        self._sender = DeadLetterSender(self, host.dead_letters)
        self._sender.configure(settings)
        self._frozen = self._frozen_before()
        self._expiry_timer: Timer | None = None
        self._expiry_due_ms = 0
        self.senders: set[int] = set()
        """Nodes that have sent commands."""
        if self.durable:
            unreadable, self._unsaid = recover(
                self.log, self.machine, host.now_ms(), keeps_transient=self._takes_over
            )
            self._handed_out = {
                line.level: line.delivered_to for line in self.machine.backing.lines
            }
            for name, offset in self.log.cut:
                host.note("storage.torn_tail", file=name, offset=offset)
            self._tell_of_damage(unreadable)
        else:
            self.log.remove()
        self.log.set_time_to_live(self.machine.next_position, self.limits.message_ttl_ms)

    def _take_limits(self, now_ms: int) -> None:
        machine, limits = self.machine, self.limits
        if limits.expires_ms != machine.limits.expires_ms:
            # Counts from now on, or a queue that was idle would go at once.
            machine.last_used_ms = now_ms
        machine.configure(limits)
        self.log.set_time_to_live(machine.next_position, limits.message_ttl_ms)
        machine.tick(now_ms)

    def configure(self, settings: Mapping[str, object]) -> None:
        """See `Queue`: what is too long now goes at once. Messages that are in the queue keep their
        time."""
        before = self.limits
        super().configure(settings)
        self._sender.configure(settings)
        if self.limits == before:
            self.limits = before
        elif self.ended is None and not self.stands_still:
            self.settle_round(self.host.now_ms())

    # --- rounds --------------------------------------------------------------------------

    def end_of_round(self, now_ms: int) -> None:
        """Applies the open batch."""
        if self.ended is not None:
            self._seal_ended()
        elif self.builder.used and not self.stands_still and not self._may_gather():
            self.settle_round(now_ms)

    def _may_gather(self) -> bool:
        """Commands gather for a moment while a write is under way (ADR 0170)."""
        if (
            self._writes_done == self._writes
            or self.is_urgent
            or self.builder.used >= GATHER_BYTES_MAX
            or self.host.clock.monotonic_ms() - self._applied_ms >= self.host.gather_ms
        ):
            return False
        return self.host.gather(self)

    def _apply_open_batch(self, now_ms: int) -> None:
        if self.builder.used:
            self._applied_ms = self.host.clock.monotonic_ms()
            self.is_urgent = False
            self.machine.apply(self.builder.take_forward(self.group, 0), now_ms)

    def tick(self, now_ms: int) -> None:
        """Once a second: rates, memory, expiry."""
        expires = self.limits.expires_ms
        machine = self.machine
        self._flush([True], durable=True)
        self.rates.note(machine.published, machine.delivered, machine.acknowledged, now_ms)
        if self.host.memory.keep(self.group, machine.footprint) is not None:
            # Others want the memory of a queue that does nothing.
            self._stays = 0
            self._carry_out()
        if not self._keeps_length and machine.former is None:
            self._keeps_length = machine.may_exceed = True
        is_due = (
            expires is not None
            or machine.backing.may_expire
            or machine.reservations
            or machine.aside.count
        )
        if not is_due and not machine.may_exceed:
            return
        machine.tick(now_ms)
        self._carry_out()
        if (
            expires is not None
            and not (self.machine.consumer_count or self.machine.former)
            and now_ms - self.machine.last_used_ms >= expires
        ):
            self.host.on_expired(self)

    def wake(self) -> None:
        """See `ClassicQueue`."""
        self.host.ticked.wake(self)

    def rests_until(self, now_ms: int) -> int:
        """Returns until when ticks would change nothing, unless the queue is woken; or `now_ms`."""
        machine = self.machine
        if (
            self.ended is not None
            or self.stands_still
            or machine.limits is not self.limits
            or self._writes_done != self._writes
            or not self.log.is_settled
            or machine.may_exceed
            or machine.former is not None
            or machine.reservations
            or machine.aside.count
            or (machine.ready_count and not self._keeps_length)
            or (machine.backing.may_expire and machine.ready_count)
            or (self.host.memory.is_short and machine.footprint > SHARE_MIN_BYTES)
        ):
            return now_ms
        expires = self.limits.expires_ms
        if expires is None or machine.consumer_count:
            return NEVER
        return machine.last_used_ms + expires

    def node_down(self, node: int, now_ms: int) -> None:
        """A node's clients are gone. What they sent before is applied first: it would begin their
        sessions anew, and nothing would end these."""
        if not self._is_down_later(node):
            self._apply_open_batch(now_ms)
            self.machine.node_down(node, now_ms)
            self._carry_out()

    def delete(self) -> None:
        """The queue is gone from the tree: its consumers hear it, its files go."""
        self.machine.delete("deleted")
        self._carry_out()
        self.end(missing(self.subject), published_ok=True)
        self._sender.on_deleted()
        self._stop_timers()
        self.log.remove()

    def stop(self) -> None:
        """The node stops."""
        self._flush([True], durable=True)
        self._stop_timers()
        self.log.close()

    def crash(self, error: Refused) -> None:
        """See `ClassicQueue`. Its files stay as they are, for when the queue is opened anew."""
        self._sender.on_crashed()
        self._stop_timers()
        self.log.close()
        super().crash(error)

    def _stop_timers(self) -> None:
        self._sender.stop()
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
            self._expiry_timer = None

    # --- dead letters --------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """See `DeadLetterSource`."""
        return self.host.clock

    def new_session(self) -> int:
        """See `DeadLetterSource`."""
        return self.host.new_session()

    def note(self, event: str, fields: Mapping[str, object]) -> None:
        """See `DeadLetterSource`."""
        self._notes.note(event, fields)

    def _log(self, event: str, fields: Mapping[str, object]) -> None:
        self.host.note(event, vhost=self.vhost, queue=self.name, group=self.group, **fields)

    def _dead_letters(self) -> None:
        """Lets what left be published soon, and what expires next leave in time."""
        machine = self.machine
        if machine.leaving.count or machine.leaving.lost:
            self._sender.on_left()
        due = machine.next_due_ms()
        if machine.unfinished:
            due = self.host.now_ms() + UNFINISHED_WAIT_MS
        if not due or (self._expiry_timer is not None and self._expiry_due_ms <= due):
            return
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        self._expiry_due_ms = due
        delay = max(0, due - self.host.now_ms())
        self._expiry_timer = self.clock.call_later(min(delay, EXPIRY_WAIT_MS_MAX), self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry_timer = None
        if self.ended is None and not self.stands_still:
            self.host.contain(self, self._expire)

    def _expire(self) -> None:
        self.machine.tick(self.host.now_ms())
        self._carry_out()

    # --- reservations --------------------------------------------------------------------------

    def settle_round(self, now_ms: int) -> None:
        """See `HomeReservations`. Raises Unavailable."""
        self.check_moving()
        if self.machine.limits is not self.limits:
            # Maybe they were set while the queue stood still.
            self._take_limits(now_ms)
        self._apply_open_batch(now_ms)
        self._carry_out()

    async def written(self) -> None:
        """See `HomeReservations`. Raises StorageFault."""
        self._flush([True], durable=True)
        if self._writes_done < self._writes:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((self._writes, waiter))
            await waiter

    def _tell_waiting(self, failed: Exception | None) -> None:
        while self._waiting and self._waiting[0][0] <= self._writes_done:
            waiter = self._waiting.pop(0)[1]
            if waiter.done():
                continue
            if failed is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(StorageFault(f"{self.subject}: {failed}"))

    # --- Queue ---------------------------------------------------------------------------

    def client(self, session: int, events: ClientEvents) -> ClassicClient:
        """See `ClassicQueue`; one that comes while publishers wait is told so."""
        made = super().client(session, events)
        if self.host.holds(self):
            self.host.soon(lambda: self.tell(made, lambda it: it.on_flow(self.host.holds(self))))
        return made

    @property
    def writes(self) -> bool:
        """Returns whether what is published goes to disk."""
        return self.durable or self.host.memory.is_short

    async def ready(self, timeout: float) -> None:
        """Raises NotFound when the queue has ended."""
        if self.ended is not None:
            raise self.ended
        self.host.check_home(self)

    async def counts(self) -> tuple[int, int]:
        """Returns (ready messages, consumers)."""
        self.host.check_home(self)
        self.machine.last_used_ms = self.host.now_ms()
        if self.builder.used and not self.stands_still:
            self.settle_round(self.machine.last_used_ms)
        return self.machine.ready_count + self.machine.aside.count, self.machine.consumer_count

    def activity(self) -> list[tuple[int, int, str]]:
        """See `Queue`."""
        machine = self.machine
        if not self.limits.single_active:
            return []
        return [
            (
                consumer.session,
                consumer.number,
                SINGLE_ACTIVE if consumer is machine.active else WAITING,
            )
            for consumer in machine.service
        ]

    def egress_bytes(self) -> float:
        """Returns about how many bytes of memory it gives out in a second."""
        waiting = self.machine.ready_count
        size = self.machine.ready_bytes / waiting if waiting else 0.0
        return self.rates.egress * (size + RUN_BYTES)

    def left(self) -> Counter[tuple[str, str]]:
        """Returns (strategy, reason) -> messages that left unacknowledged."""
        return self.machine.leaving.left

    def figures(self) -> tuple[int, ...] | None:
        """See `Queue`."""
        machine = self.machine
        return (
            machine.ready_count, machine.unsettled_count, machine.ready_bytes,
            machine.unsettled_bytes, machine.consumer_count, machine.footprint, machine.published,
            machine.delivered, machine.acknowledged, 0,
        )  # fmt: skip

    def info(self) -> Row:
        """Returns the fields that the management API shows."""
        return facts_of(self)

    # --- inside --------------------------------------------------------------------------

    def _carry_out(self) -> None:
        machine = self.machine
        self.host.changed.add(self.group)
        effects, machine.effects = machine.effects, []
        self._give_up_missing()
        wrote = self._write()
        gate = self._gate(is_open=not wrote)
        holds = self._runs_ahead or self._gates.holds
        waiting: list[Effect] = []
        for effect in effects:
            if holds or effect[0] == APPLIED:
                waiting.append(effect)
            else:
                self._hand_on(effect)
        if waiting or not gate[0]:
            self._gates.add(gate, waiting, holds=holds)
            # Publishers wait while what leaves memory is written: memory would not suffice.
            if gate[0] and not self._is_copied and not self._unspilled:
                self._gates.open()
        self._runs_ahead = False
        self._flush(gate, durable=bool(wrote))
        if (
            self.limits.dead_letters
            or machine.leaving.count
            or machine.unfinished
            or machine.aside.count
        ):
            self._dead_letters()
        self._give_up_missing()
        self._leave_memory()

    def _gate(self, *, is_open: bool) -> Gate:
        """Returns the gate of a round: confirms wait until it is open."""
        return [is_open]

    def _hand_on(self, effect: Effect) -> None:
        kind = effect[0]
        if kind == UNUSED:
            self.host.on_unused(self)
        elif kind == GAP:
            self.host.dispatch_gap(self, effect[1])
        else:
            self.host.dispatch(self, effect)

    def _write(self) -> list[Block]:
        """Adds to the log what has to be there; returns the blocks that confirms wait for."""
        machine = self.machine
        wrote: list[Block] = []
        for block in machine.enqueued:
            if block.live and block.data is not None and not block.transient:
                self._store(block)
                wrote.append(block)
        if self.durable:
            if machine.settled:
                self.log.add_settled(machine.settled)
            for first, last, note in machine.noted:
                self.log.add_noted(first, last, pack_note(note))
            is_told = machine.handed_out or self._is_copied
            for line in machine.backing.lines if is_told else ():
                if line.delivered_to > self._handed_out.get(line.level, 0):
                    self._note_handed_out(line)
        self._unwritten = [*wrote, *self._spill()]
        machine.enqueued = []
        machine.settled = []
        machine.noted = []
        machine.handed_out = False
        if machine.freed:
            for file, count in machine.freed.items():
                self.log.drop(file, count)
            machine.freed.clear()
            self._unwritten += self._compact()
        return wrote

    @property
    def _is_copied(self) -> bool:
        """Returns whether mirrors have what the log has: everything is to be in it."""
        return False

    def _is_transient(self, block: Block) -> bool:
        """Returns whether the log can do without a block while it is in memory."""
        if not self.durable:
            return True
        assert block.data is not None
        if self._is_copied or transient_records(block.data, block.command, 1) != ([0, 0], 0):
            return False
        all_of_it = [0, block.count - 1]
        return transient_records(block.data, block.command, block.count) == (all_of_it, 0)

    def _note_handed_out(self, line: Line) -> None:
        self._handed_out[line.level] = line.delivered_to
        self.log.add_handed_out(line.delivered_to, line.level)

    def _spill(self) -> list[Block]:
        """Writes the newest transient messages of a queue that takes too much memory; returns the
        blocks."""
        if not self.machine.unwritten or self._unspilled:
            return []
        keep = self.host.memory.keep(self.group, self.machine.footprint)
        if keep is None:
            return []
        excess = self.machine.footprint - keep
        chosen: set[Block] = set()
        for block in self.machine.to_spill():
            if excess <= 0:
                break
            if block not in chosen:
                excess -= block.length + RUN_BYTES
                chosen.add(block)
        self._unspilled = bool(chosen)
        return self._write_late(chosen)

    def _write_late(self, blocks: set[Block]) -> list[Block]:
        """Adds blocks to the log that it did without, in their order: a span is a part of a file.
        Returns them."""
        # The log does not know what of them is gone.
        cut = {block for block in blocks if self.durable and block.live < block.count}
        parts = self.machine.parts(cut.__contains__) if cut else {}
        ordered = sorted(blocks, key=lambda block: block.position)
        for block in ordered:
            if block in parts:
                self._move(block, parts[block])
            else:
                self._store(block)
        self.machine.unwritten -= len(ordered)
        return ordered

    def write_transient(self) -> None:
        """Writes what the log could do without."""
        if self.durable and self.machine.unwritten:
            unwritten = self.machine.parts(lambda block: not block.is_logged)
            self._unwritten += self._write_late(set(unwritten))
            self._flush([True], durable=True)

    def _store(self, block: Block) -> None:
        block.where = self.log.add_messages(
            block.position, _body(block), block.time_ms, level=block.level, live=block.live
        )

    def _flush(self, gate: Gate, *, durable: bool) -> None:
        """Hands over what the log got. `durable`: somebody waits for the disk; else a power failure
        may take it until the next such flush, or the next second."""
        durable = durable or self._is_copied or bool(self._moved)
        # Whatever the queue has carried out ends here.
        self.host.ticked.wake(self)
        blocks, self._unwritten = self._unwritten, []
        moved = _NONE
        if self._moved:
            moved, self._moved = self._moved, Counter()
        self._moving += bool(moved)
        number = self._writes + 1

        def done(failed: Exception | None) -> None:
            self._unspilled = False
            self._stays = 0
            self._moving -= bool(moved)
            self._writes_done += 1
            self._tell_waiting(failed)
            if self.ended is not None:
                # Its clients were answered when it ended.
                return
            if failed is None:
                if durable:
                    self._flushed = number
                for block in blocks:
                    block.written = True
                gate[0] = True
                # What compaction moved is on disk: the old files may go.
                for file, count in moved.items():
                    self.log.drop(file, count)
                self.log.collect()
            else:
                self._moved += moved
                self.host.on_disk_error(self, failed)
                self._gates.refuse()
            self._gates.open()
            self._leave_memory()
            if self.builder.held:
                self.host.mark_dirty(self)

        if self.log.flush(
            lambda failed: self.host.contain(self, lambda: done(failed)), durable=durable
        ):
            self._writes += 1
        else:
            self._moved += moved
            self._moving -= bool(moved)
            gate[0] = True
            self._gates.open()
            if not self.durable:
                self.log.collect()

    def _leave_memory(self) -> None:
        """Pages out what this queue has too much in memory."""
        machine = self.machine
        keep = self.host.memory.keep(self.group, machine.footprint)
        if keep is None or machine.footprint - self._stays < keep // STEPS:
            return
        machine.page_out(keep)
        self._stays = machine.footprint
        self.host.memory.weigh(self.group, self._stays)

    def _give_up_missing(self) -> None:
        """Takes messages that could not be read back off the books: before what was settled of
        their files is, for that may be more than the books had (a negative number of them)."""
        missing, self.machine.backing.missing = self.machine.backing.missing, []
        if not missing and not self.log.damages:
            return
        for file, count in missing:
            self.log.drop(file, count)
        self._tell_of_damage(sum(count for _, count in missing))

    def _may_compact(self) -> bool:
        return self.durable and not self._moved and not self._moving

    def _compact(self) -> list[Block]:
        """Moves the blocks of a file that few messages of them pin to the end; returns them. One
        stuck message must not keep all files behind it."""
        sparse = self.log.oldest_is_sparse() if self._may_compact() else None
        if sparse is None:
            return []
        self.machine.backing.load_file(sparse)
        parts = self.machine.parts(
            lambda block: block.where is not None and block.where.file == sparse
        )
        for block, runs in parts.items():
            old = block.place()
            # Until it is written it can be read from memory only.
            self.machine.take_in_memory(block)
            block.written = False
            self._move(block, runs)
            self._moved[old.file] += block.live
        return list(parts)

    def _move(self, block: Block, runs: list[Run]) -> None:
        """Adds what lives of a block to the end of the log."""
        dead = dead_in(block, runs)
        block.where = self.log.move_messages(
            block.position, _body(block), block.time_ms, dead, level=block.level
        )
        for run in runs:
            if run.note != NOTHING and self.durable:
                last = run.position + run.count - 1
                self.log.add_noted(run.position, last, pack_note(run.note))

    def _load(self, block: Block) -> tuple[bytes, int]:
        return self.log.read(block.place()), 0

    def _tell_of_damage(self, unreadable: int) -> None:
        damages, self.log.damages = self.log.damages, []
        if damages or unreadable > 0:
            file, offset, _ = damages[0] if damages else ("", 0, 0)
            facts = {"places": len(damages), "bytes": sum(length for _, _, length in damages)}
            missing = [name for name, _, length in damages if not length]
            more = {"messages": unreadable, "file": file, "offset": offset, "missing": missing}
            place = {"vhost": self.vhost, "queue": self.name, "group": self.group}
            self.host.note("queue.records_dropped", **place, **facts, **more)


def _body(block: Block) -> memoryview:
    """Returns the command of a block that is in memory."""
    assert block.data is not None
    return memoryview(block.data)[block.command : block.command + block.length]
