"""Members of topics' groups on this node: each consumer of a group is one.

`topics.rules.member.GroupMember` decides; here are its heartbeats, its reads and commands at
partitions, and what the client gets. A message id is the number of a place (a partition under a
lease) and how far behind the place's base the message lies, so that a delivery of many messages
stays one block, and an acknowledgement says by itself which lease it is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol

import structlog

from convoymq.kernels import batch
from convoymq.kernels.order_headers import PLACE_BITS, Place
from convoymq.kernels.ordered_runs import key_hashes, order_key
from convoymq.metadata.machine import TopicRecord
from convoymq.metadata.store import MetadataStore
from convoymq.metadata.topic_settings import WEAK, retry_exchange_of
from convoymq.model.clock import Clock, Timer
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.queues.interface import Delivery
from convoymq.streamlog.reader import Run
from convoymq.topics.machine import reads
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.rules.answers import AckAnswer, ParkAnswer
from convoymq.topics.rules.commands import AckRanges, Park
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.heartbeats import Heartbeat
from convoymq.topics.rules.leaseholder import SendHeartbeat
from convoymq.topics.rules.member import (
    RETRIES,
    Fetched,
    GroupMember,
    HandOut,
    HandOutParked,
    TellDrained,
)
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.share import Fetch, Send
from convoymq.topics.shell.group_messages import (
    DRAINED,
    EXPIRED,
    GroupName,
    pack_heartbeat,
    unpack_leases,
)
from convoymq.topics.shell.partitions import TopicPartitions
from convoymq.topics.shell.retries import Retries
from convoymq.trace.recorder import QueueTrace
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_TOPIC_GROUP

log = structlog.get_logger()

FETCH_BYTES = 1 << 20
FETCH_WAIT_MS = 5_000
RETRY_MS = 250
"""Pause after a heartbeat that was not answered."""
HEARTBEAT_TIMEOUT_S = 3.0
LINGER_MS = 11_000
"""A member that left and is not heard any more is forgotten after the time of a lease."""
YIELD_MESSAGES = 64
PLACE_SIZE = 1 << PLACE_BITS
DRAIN_MS = 1_000
"""A drain that is not used up ends then: partitions that have nothing do not answer."""
FULL_SAID_MS = 60_000
"""Requests to park are repeated ten times a second; the event is said once in this time."""


Granted = Callable[[int, int], None]
"""Takes the messages that a client has got in all, and those that wait for room."""


class RunBatch:
    """A run of a partition's log; see `topics.rules.member.Batch`."""

    __slots__ = ("_hashes", "_keys", "messages", "offset", "run", "wanted")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.offset = run.offset
        self.messages = run.messages
        self.wanted: list[bool] = []
        """For each message, whether the member's filter wants it; empty: there is none."""
        self._keys: list[bytes | None] = []
        self._hashes = b""

    @property
    def size(self) -> int:
        """Returns the bytes of the block that it keeps in memory."""
        return len(self.run.block)

    def hashes(self) -> bytes:
        """Returns 8 bytes for each message: a hash of its order key."""
        run = self.run
        if not self._hashes:
            self._hashes = key_hashes(run.block, run.command, run.first, run.messages)
        return self._hashes

    def key(self, offset: int) -> bytes:
        """Returns the order key of a message."""
        if not self._keys:
            self._keys = [None] * self.messages
        at = offset - self.offset
        key = self._keys[at]
        if key is None:
            run = self.run
            key = self._keys[at] = order_key(batch.record(run.block, run.command, run.first + at))
        return key

    async def examine(self, wants: Callable[[bytes], bool]) -> None:
        """Notes which messages are wanted."""
        run = self.run
        for record in range(run.first, run.first + run.messages):
            self.wanted.append(wants(batch.record(run.block, run.command, record)))
            if not len(self.wanted) % YIELD_MESSAGES:
                await asyncio.sleep(0)

    def parts(self, first: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Yields messages from `first` to below `end` as (first, end, whether they are wanted)."""
        wanted = self.wanted[first - self.offset : end - self.offset] or [True] * (end - first)
        for is_wanted, same in groupby(wanted):
            count = sum(1 for _ in same)
            yield first, first + count, is_wanted
            first += count

    def copy(self, offset: int) -> bytes:
        """Returns an ENQUEUE command with one message."""
        run = self.run
        return batch.slice_records(run.block, run.command, run.first + offset - self.offset, 1)


class Wakeable(Protocol):
    """A member, for its coordinator."""

    def wake(self) -> None:
        """Has it send its heartbeat now."""


@dataclass(kw_only=True, slots=True)
class MemberParts:
    """Parts of a node that its members use."""

    node: int
    incarnation: int
    store: MetadataStore
    control: ControlPlane
    partitions: TopicPartitions
    clock: Clock
    spawn: Callable[[Coroutine[object, object, None]], object]
    retries: Retries
    members: dict[str, Wakeable] = field(default_factory=dict)
    """Members that speak through this node, by name, until their coordinator has heard that they
    left."""
    _full: dict[tuple[GroupName, int], int] = field(default_factory=dict)
    """(Group, partition) that parks no more -> until when that is not said again."""

    def wake(self, member: str) -> None:
        """A coordinator wants to hear of a member now."""
        found = self.members.get(member)
        if found is not None:
            found.wake()

    async def ask(self, message: list[object]) -> object:
        """Asks the coordinator of a group. Raises Refused, Unavailable."""
        leader = self.store.leader
        if leader is None:
            raise Unavailable("the metadata group has no leader")
        return await self.control.request(leader, KIND_TOPIC_GROUP, message, HEARTBEAT_TIMEOUT_S)

    async def tell_expired(self, name: GroupName, pid: int, group_epoch: int) -> None:
        """Tells the coordinator that messages expired before its group had read them."""
        try:
            await self.ask([EXPIRED, *name, pid, group_epoch])
        except BrokerError:
            # The next fetch is refused as well.
            return

    def note_answer(self, name: GroupName, pid: int, answer: object) -> None:
        """A partition has answered a request to park. Says when it has no room for it."""
        if not isinstance(answer, ParkAnswer) or answer.code is not Code.PARK_FULL:
            return
        now_ms = self.clock.monotonic_ms()
        if now_ms < self._full.get((name, pid), now_ms):
            return
        until_ms = {place: until for place, until in self._full.items() if now_ms < until}
        self._full = {**until_ms, (name, pid): now_ms + FULL_SAID_MS}
        log.warning(
            "topics.park_full",
            vhost=name.vhost, topic=name.topic, group=name.group, partition=pid,
        )  # fmt: skip

    def retry(
        self,
        name: GroupName,
        pid: int,
        exchange: str,
        park: Park,
        done: Callable[[ParkAnswer], None],
    ) -> None:
        """Has a copy of a message stored behind the retry exchange, and acknowledges it then."""
        lease = (park.group, park.group_epoch, park.epoch)

        def acknowledged(outcome: Outcome | None, error: BrokerError | None) -> None:
            if not isinstance(outcome, AckAnswer):
                done(ParkAnswer(Code.NOT_VISIBLE))
                return
            if outcome.drained:
                self.spawn(self.tell_drained(name, pid, park.group_epoch))
            done(ParkAnswer(outcome.code, live=True, version=-1))

        def stored(ok: bool) -> None:
            queue = self.partitions.find(name.vhost, name.topic, pid) if ok else None
            if queue is None:
                # As where there is no room for it: it is asked for again.
                done(ParkAnswer(Code.PARK_FULL))
            else:
                queue.tell(AckRanges(*lease, (park.offset, park.offset)), acknowledged)

        self.retries.publish(name, exchange, park.message, stored)

    async def tell_drained(self, name: GroupName, pid: int, group_epoch: int) -> None:
        """Tells the coordinator that its group has drained a partition."""
        try:
            await self.ask([DRAINED, *name, pid, group_epoch])
        except BrokerError:
            # The coordinator asks by itself.
            return


class Member:
    """One consumer of a group.

    Args:
        record: returns the topic as the tree has it.
        number: of the consumer in its channel.
        deliver: takes what the client gets.
        wants: whether the client wants a record; None: it wants all. What it does not want is
            acknowledged when its turn comes.
    """

    def __init__(
        self,
        parts: MemberParts,
        name: GroupName,
        member: str,
        record: Callable[[], TopicRecord],
        number: int,
        deliver: Callable[[Delivery], None],
        *,
        window: int,
        retries: int = RETRIES,
        one_of_key: bool = False,
        wants: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.name = name
        self.number = number
        self.places: dict[int, Place] = {}
        """By the upper bits of message ids."""
        self._parts = parts
        self._record = record
        self._deliver = deliver
        self._wants = wants
        self._clock = parts.clock
        topic = record()
        lp_of = partial(logical_partition, logical=topic.logical, seed=topic.hash_seed)
        self._retry_exchange = retry_exchange_of(topic.settings, topic.mode)
        """Fixed when the topic is created; empty: what fails is parked."""
        self.core = GroupMember(
            name.group, member, lp_of,
            retries=retries, one_of_key=one_of_key,
            holds_keys=one_of_key or not self._retry_exchange,
        )  # fmt: skip
        self.core.set_window(window, self._now())
        self._gone = False
        self._left_ms = -1
        self._slots: dict[tuple[int, int], int] = {}
        """(Partition, epoch) -> the place in use."""
        self._leases: dict[int, tuple[int, int]] = {}
        """Place -> (partition, epoch)."""
        self._parked_slots: dict[int, int] = {}
        self._parked: dict[int, tuple[int, int, bytes]] = {}
        """Message id -> (partition, epoch, key) of heads of parked keys."""
        self._closes: dict[tuple[int, int], int] = {}
        self._expired: set[tuple[int, int]] = set()
        """Leases of partitions of which retention has cut what the group has not read."""
        self._traces: dict[int, QueueTrace | None] = {}
        """By partition, as long as it is read; None where it is not traced."""
        self._settled: list[Callable[[bool], None]] = []
        self._running = False
        self._drain: tuple[Granted, Timer] | None = None
        """The drain that is under way."""
        self._timer: Timer | None = None
        self._due_ms = 0

    def _now(self) -> int:
        return self._clock.monotonic_ms()

    # --- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Joins the group."""
        self._parts.members[self.core.member] = self
        self.run()

    def wake(self) -> None:
        """The next heartbeat is due now."""
        # One within the same millisecond would be taken for the last one.
        self.core.heartbeat_due_ms = min(self.core.heartbeat_due_ms, self._now() + 1)
        self._schedule()

    def leave(self) -> None:
        """Takes nothing new; the client may settle what it has."""
        self._left_ms = self._now()
        self.core.leave(self._left_ms)
        self.run()

    def abandon(self) -> None:
        """The client is gone."""
        self._deliver = _drop
        if self._drain is not None:
            self._drain[1].cancel()
            self._drain = None
        if self._left_ms < 0:
            self._left_ms = self._now()
        self.core.abandon(self._now())
        self.run()
        self._tell_settled()

    def end(self) -> None:
        """The group is gone: nobody has to hear of it."""
        self._gone = True
        self._parts.members.pop(self.core.member, None)
        if self._timer is not None:
            self._timer.cancel()
        self._tell_settled()

    @property
    def is_gone(self) -> bool:
        """True when nothing of it is left."""
        return self._gone

    def _forget_if_gone(self, *, is_member: bool) -> None:
        """Ends a member that has left, once its coordinator knows."""
        if self.core.is_gone and not is_member:
            self.end()

    # --- what the client says ----------------------------------------------------------------

    def acknowledge(self, ranges: Sequence[int]) -> None:
        """The client has processed messages (first id, last id, …)."""
        now = self._now()
        for first, last in zip(ranges[::2], ranges[1::2], strict=True):
            lease = self._leases.get(first >> PLACE_BITS)
            if lease is not None:
                low = self._offset(first)
                self.core.on_acknowledged(*lease, low, low + last - first, now)
            else:
                for pid, epoch, key in self._take_parked(first, last):
                    self.core.on_parked_done(pid, epoch, key, now, ok=True)
        self.run()

    def take_back(self, ranges: Sequence[int], *, final: bool, unused: bool = False) -> None:
        """The client returns messages; `final`, `unused`: see `GroupMember.on_returned`."""
        now = self._now()
        for first, last in zip(ranges[::2], ranges[1::2], strict=True):
            lease = self._leases.get(first >> PLACE_BITS)
            if lease is not None:
                low = self._offset(first)
                high = low + last - first
                self.core.on_returned(*lease, low, high, now, final=final, unused=unused)
            else:
                for pid, epoch, key in self._take_parked(first, last):
                    self.core.on_parked_done(pid, epoch, key, now, final=final, unused=unused)
        self.run()

    def when_settled(self, call: Callable[[bool], None]) -> None:
        """Calls back when what was settled is in force, or counts no more."""
        self._settled.append(call)
        self._check_settled()

    def _check_settled(self) -> None:
        if self._settled and not any(share.requesting for share in self.core.held.values()):
            self._tell_settled()

    def _tell_settled(self) -> None:
        calls, self._settled = self._settled, []
        for call in calls:
            call(True)

    def set_window(self, window: int) -> None:
        """Another window; 0 = no limit asked for."""
        self.core.set_window(window, self._now())
        self.run()

    def grant(self, limit: int, done: Granted, *, drain: bool) -> None:
        """Lets the client have messages until it has got `limit`."""
        self._end_drain()
        self.core.set_limit(limit, self._now())
        self.run()
        if drain and self.core.given < limit and not self._gone:
            self._drain = done, self._clock.call_later(DRAIN_MS, self._end_drain)
        else:
            done(self.core.given, self.core.ready)

    def _end_drain(self) -> None:
        if self._drain is not None:
            done, timer = self._drain
            self._drain = None
            timer.cancel()
            self.core.limit = self.core.given
            done(self.core.given, self.core.ready)

    def pause(self) -> None:
        """The channel holds enough."""
        self.core.paused = True

    def resume(self) -> None:
        """Ends `pause`."""
        if self.core.paused:
            self.core.paused = False
            self.run()

    # --- message ids -------------------------------------------------------------------------

    def _offset(self, message_id: int) -> int:
        place = self.places[message_id >> PLACE_BITS]
        return place.base + (message_id & (PLACE_SIZE - 1))

    def _id(self, slot: int, offset: int) -> int:
        return (slot << PLACE_BITS) + offset - self.places[slot].base

    def _new_place(self, pid: int, version: int, offset: int) -> int:
        slot = len(self.places) + 1
        base = max(0, offset - PLACE_SIZE // 2)
        record = self._record()
        place = self.places[slot] = Place(pid, base, version, record.logical, record.hash_seed)
        group = record.groups.get(self.name.group)
        place.late = group is not None and pid in group.skipped
        return slot

    def _slot_of(self, pid: int, epoch: int, first: int, end: int) -> int:
        """Returns the place for messages of a lease."""
        slot = self._slots.get((pid, epoch), 0)
        if slot:
            base = self.places[slot].base
            if base <= first and end <= base + PLACE_SIZE:
                return slot
        version = self._record().state.lineage.partition(pid).created_version
        slot = self._new_place(pid, version, first)
        self._traces[pid] = self._trace_of(pid)
        self._slots[pid, epoch] = slot
        self._leases[slot] = (pid, epoch)
        return slot

    def _trace_of(self, pid: int) -> QueueTrace | None:
        queue = self._parts.partitions.find(self.name.vhost, self.name.topic, pid)
        return None if queue is None else queue.trace

    def _take_parked(self, first: int, last: int) -> list[tuple[int, int, bytes]]:
        """Returns the heads of parked keys that stand behind message ids, and forgets them."""
        ids = [each for each in self._parked if first <= each <= last]
        return [self._parked.pop(each) for each in ids]

    # --- what it does ------------------------------------------------------------------------

    def run(self) -> None:
        """Does what is due."""
        if self._running or self._gone:
            return
        self._running = True
        try:
            self.core.step(self._now())
            while actions := self.core.take_actions():
                for action in actions:
                    match action:
                        case HandOut():
                            self._hand_out(action)
                        case Fetch():
                            self._fetch(action)
                        case Send():
                            self._send(action)
                        case SendHeartbeat(heartbeat):
                            self._parts.spawn(self._send_heartbeat(heartbeat))
                        case HandOutParked():
                            self._hand_out_parked(action)
                        case TellDrained(pid, group_epoch):
                            self._parts.spawn(self._parts.tell_drained(self.name, pid, group_epoch))
        finally:
            self._running = False
        if self.core.given == self.core.limit:
            self._end_drain()
        self._check_settled()
        self._schedule()

    def _schedule(self) -> None:
        if self._gone:
            return
        now = self._now()
        if self._left_ms >= 0 and now >= self._left_ms + LINGER_MS + self.core.drain_ms:
            self.end()
            return
        due = max(self.core.due_ms(now), now + 1)
        if self._timer is not None:
            if now < self._due_ms <= due:
                return
            self._timer.cancel()
        self._due_ms = due
        self._timer = self._clock.call_later(due - now, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self.run()

    def _hand_out(self, action: HandOut) -> None:
        batch_of = action.batch
        assert isinstance(batch_of, RunBatch)
        run = batch_of.run
        slot = self._slot_of(action.pid, action.epoch, action.first, action.end)
        trace = self._traces.get(action.pid)
        for first, end, is_wanted in batch_of.parts(action.first, action.end):
            if trace is not None:
                trace.handed_out(
                    self.name.group,
                    self.core.member,
                    action.epoch,
                    first,
                    end - first,
                    action.failures,
                    one_of_key=self.core.one_of_key,
                    passed_over=not is_wanted,
                )
            if not is_wanted:
                self.core.pass_over(action.pid, action.epoch, first, end - 1, self._now())
                continue
            self._deliver(
                Delivery(
                    self.number,
                    self._id(slot, first),
                    run.block,
                    run.command,
                    run.first + first - run.offset,
                    end - first,
                    action.failures,
                    action.failures,
                )
            )

    def _hand_out_parked(self, action: HandOutParked) -> None:
        entry = action.entry
        slot = self._parked_slots.get(entry.pid, 0)
        if not slot or not 0 <= entry.offset - self.places[slot].base < PLACE_SIZE:
            slot = self._new_place(entry.pid, entry.version, entry.offset)
            self._parked_slots[entry.pid] = slot
        message_id = self._id(slot, entry.offset)
        self._parked[message_id] = (action.pid, action.epoch, action.key)
        failures = action.failures
        acquired = 0 if action.first else failures + 1
        trace = self._trace_of(action.pid)
        if trace is not None:
            parked = (action.key, entry.version)
            trace.handed_out(
                self.name.group, self.core.member, action.epoch, entry.offset, 1, failures, parked
            )
        self._deliver(Delivery(self.number, message_id, entry.message, 0, 0, 1, acquired, failures))

    def _fetch(self, fetch: Fetch) -> None:
        queue = self._parts.partitions.find(self.name.vhost, self.name.topic, fetch.pid)
        if queue is None:
            self._clock.call_later(RETRY_MS, self._fetched, fetch, None, None)
            return
        request = reads.Fetch(
            self.name.group,
            fetch.group_epoch,
            fetch.epoch,
            fetch.offset,
            fetch.count,
            FETCH_BYTES,
            fetch.park_version,
            self._closes.get((fetch.pid, fetch.epoch), -1),
            FETCH_WAIT_MS,
        )
        queue.fetch(request, partial(self._fetched, fetch))

    def _fetched(
        self, fetch: Fetch, found: reads.Fetched | None, error: BrokerError | None
    ) -> None:
        if found is None:
            answer = Fetched(Code.NOT_LEADER)
        else:
            if found.close_offset >= 0:
                self._closes[fetch.pid, fetch.epoch] = found.close_offset
            if found.code is Code.DATA_EXPIRED:
                self._note_expired(fetch.pid, fetch.epoch, fetch.group_epoch)
            batches = [RunBatch(run) for run in found.runs]
            answer = Fetched(found.code, batches, found.next_offset, found.view)
            if self._wants is not None and batches:
                self._parts.spawn(self._examine(fetch, answer, batches, self._wants))
                return
        self.core.on_fetched(fetch, answer, self._now())
        self.run()

    async def _examine(
        self,
        fetch: Fetch,
        answer: Fetched,
        batches: Sequence[RunBatch],
        wants: Callable[[bytes], bool],
    ) -> None:
        for each in batches:
            await each.examine(wants)
        self.core.on_fetched(fetch, answer, self._now())
        self.run()

    def _note_expired(self, pid: int, epoch: int, group_epoch: int) -> None:
        """Says once in a lease that the group has to wait for an operator; in a weak topic its
        coordinator has it go on."""
        if self._record().mode == WEAK:
            self._parts.spawn(self._parts.tell_expired(self.name, pid, group_epoch))
            return
        if (pid, epoch) not in self._expired:
            self._expired.add((pid, epoch))
            log.warning(
                "topics.data_expired",
                vhost=self.name.vhost, topic=self.name.topic, group=self.name.group, partition=pid,
            )  # fmt: skip

    def _send(self, request: Send) -> None:
        queue = self._parts.partitions.find(self.name.vhost, self.name.topic, request.pid)
        if queue is None:
            self._clock.call_later(RETRY_MS, self._answered, request, None, None)
            return
        command = request.command
        if self._retry_exchange and isinstance(command, Park):
            done = partial(self._retried, request)
            self._parts.retry(self.name, request.pid, self._retry_exchange, command, done)
            return
        queue.tell(request.command, partial(self._answered, request))

    def _retried(self, request: Send, answer: ParkAnswer) -> None:
        self.core.on_answer(request, answer, self._now())
        self.run()

    def _answered(self, request: Send, outcome: Outcome | None, error: BrokerError | None) -> None:
        self._parts.note_answer(self.name, request.pid, outcome)
        answer = outcome if isinstance(outcome, AckAnswer | ParkAnswer) else None
        self.core.on_answer(request, answer, self._now())
        self.run()

    async def _send_heartbeat(self, beat: Heartbeat) -> None:
        try:
            answer = await self._parts.ask(pack_heartbeat(self.name, beat))
            leases, is_member = unpack_leases(self.core.member, answer)
        except BrokerError:
            self.core.heartbeat_due_ms = self._now() + RETRY_MS
            self._schedule()
            return
        if self._gone:
            return
        self.core.on_leases(leases, self._now())
        self._forget_slots()
        self.run()
        self._forget_if_gone(is_member=is_member)

    def _forget_slots(self) -> None:
        """Forgets leases that are over; what the channel holds of them still finds its place."""
        core = self.core
        over = [
            (pid, epoch)
            for pid, epoch in self._slots
            if (pid not in core.held or core.held[pid].epoch != epoch)
            and not core.has_left(pid, epoch)
        ]
        for lease in over:
            self._slots.pop(lease)
            self._closes.pop(lease, None)
            self._expired.discard(lease)
            if lease[0] not in core.held:
                self._traces.pop(lease[0], None)
        if over:
            gone = frozenset(over)
            self._leases = {slot: each for slot, each in self._leases.items() if each not in gone}


def _drop(delivery: Delivery) -> None:
    """The client is gone."""
