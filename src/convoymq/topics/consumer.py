"""A member of a consumer group: leases, key lanes and parking.

Events come in as calls, requests come out of `take_actions`. A heartbeat renews all leases of the
member; its answer lists them. A lease counts from when the heartbeat was sent, and `margin` before
its end nothing is started any more.

Within a partition, messages go to lanes by a hash of the key that has nothing to do with the one
that made the logical partition. A lane handles one message at a time:

    queued -> (its key is parked)     Park behind the key  -> answered -> next
           -> Handle -> ok            Ack                  -> answered -> next
                     -> failed        again, then Park     -> answered -> next

The next message of a key is handed out only when the answer is there, so it never comes before the
acknowledgement of the one before is in force (I14). A parked key that resumes is handled in the
same lane, head by head.

A message without a key has no order to keep: it goes to whichever lane is free. When one of them
has failed for good, those of the partition are settled one after the other, the lowest first, since
they are parked in the order of their offsets.

Where keys are not held (weak topics with a retry exchange) a lane takes the next message of the
partition, whatever its key: a message without an outcome holds its lane and nothing else. The
messages of a partition are begun in their order. What failed too often is to be parked as well;
who carries the request out sends a copy elsewhere and acknowledges, so nothing waits behind it.

A revoked lease is released when its lanes have finished what they had begun, at the latest after
`drain_ms`; a lease that ended is given up at once. What still runs then is not acknowledged.

Source: ordered topics, sections 6.3, 8, 9.2, 9.3 and 10.3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from convoymq.topics.answers import (
    AckAnswer,
    FetchAnswer,
    GroupView,
    ParkAnswer,
    ParkedEntry,
    Record,
)
from convoymq.topics.commands import Ack, DoneParked, Park
from convoymq.topics.cursor import Cursor
from convoymq.topics.heartbeats import MARGIN_MS, TTL_MS, Leases
from convoymq.topics.leaseholder import LOST, RENEW_MS, HeldLease, Leaseholder, SendHeartbeat
from convoymq.topics.park_versions import ParkVersions
from convoymq.topics.refusals import Code

LANES = 8
WINDOW = 256
RETRIES = 2
RETRY_MS = 100
TIMEOUT_MS = 1_000
FETCH_TIMEOUTS = 4
"""Timeouts that a fetch may wait for messages."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask the leader for messages. It may wait until there are some. `offset` -1: with a view."""

    pid: int
    group_epoch: int
    epoch: int
    offset: int
    count: int
    park_version: int


@dataclass(frozen=True, slots=True)
class Handle:
    """Hand a message to the application; the outcome comes to `on_handled`."""

    pid: int
    epoch: int
    lane: int
    key: bytes
    token_version: int
    """0 unless parked: else the version that created the partition where the message lay."""
    record: Record | ParkedEntry


@dataclass(frozen=True, slots=True)
class Request:
    """Send a command to the leader of a partition; the answer comes to `on_answer`."""

    pid: int
    epoch: int
    lane: int
    number: int
    command: Ack | Park | DoneParked


Action = SendHeartbeat | Fetch | Handle | Request


@dataclass(slots=True)
class Work:
    """One message in a lane, or the head of a parked key."""

    key: bytes
    record: Record | ParkedEntry
    failures: int = 0

    @property
    def parked(self) -> ParkedEntry | None:
        """The entry, for the head of a parked key."""
        return self.record if isinstance(self.record, ParkedEntry) else None


@dataclass(slots=True, eq=False)
class Lane:
    """One message at a time."""

    queue: deque[Work] = field(default_factory=deque)
    work: Work | None = None
    """Work that was begun."""
    running: bool = False
    """The application has it."""
    request: Request | None = None
    """Waits for an answer."""
    due_ms: int = 0
    """Time at which a request is repeated, or a handler called again."""


@dataclass(slots=True)
class Held(HeldLease):
    """A lease that this member holds."""

    lanes: list[Lane]
    unkeyed: deque[Work] = field(default_factory=deque)
    """Messages that wait for any lane: without a key, or where keys are not held."""
    acked: Cursor = field(default_factory=Cursor)
    parked: dict[bytes, ParkedEntry | None] = field(default_factory=dict)
    park_versions: ParkVersions = field(default_factory=ParkVersions)
    next_offset: int = -1
    fetch_due_ms: int = 0
    fetching: bool = False
    waiting_bytes: int = 0
    """Of the messages in the queues of the lanes."""
    revoked_ms: int = -1
    abandoned: bool = False
    """Given up with handlers that run."""

    @property
    def busy(self) -> bool:
        """True while something that was begun has no outcome."""
        return any(lane.work is not None for lane in self.lanes)

    @property
    def queued(self) -> int:
        """Returns the number of messages that wait or are being handled."""
        in_lanes = sum(len(lane.queue) + (lane.work is not None) for lane in self.lanes)
        return in_lanes + len(self.unkeyed)


class GroupConsumer(Leaseholder[Held]):
    """One member.

    Args:
        lane_hash: of a key; independent of the hash that makes logical partitions.
        window: messages of a partition that wait or are handled; beyond it nothing is fetched.
        window_bytes: likewise, of those that wait; 0 = no bound.
        retries: how often a handler is called again, before its message is parked; -1 = for ever.
        drain_ms: how long handlers may run on under a revoked lease; 0 = no bound.
        holds_keys: whether a message waits for the outcome of those of its key before it.
    """

    def __init__(
        self,
        group: str,
        member: str,
        lane_hash: Callable[[bytes], int],
        *,
        lanes: int = LANES,
        window: int = WINDOW,
        window_bytes: int = 0,
        retries: int = RETRIES,
        retry_ms: int = RETRY_MS,
        ttl_ms: int = TTL_MS,
        margin_ms: int = MARGIN_MS,
        renew_ms: int = RENEW_MS,
        timeout_ms: int = TIMEOUT_MS,
        drain_ms: int = 0,
        holds_keys: bool = True,
    ) -> None:
        super().__init__(member, ttl_ms=ttl_ms, margin_ms=margin_ms, renew_ms=renew_ms)
        self.group = group
        self._lane_hash = lane_hash
        self.lanes = lanes
        self.window = window
        self.window_bytes = window_bytes
        self.retries = retries
        self.retry_ms = retry_ms
        self.timeout_ms = timeout_ms
        self.drain_ms = drain_ms
        self.holds_keys = holds_keys
        self._next_number = 1
        self._actions: list[Action] = []

    # What the coordinator, the partitions and the application say

    def on_leases(self, answer: Leases, now_ms: int) -> None:
        """The answer to a heartbeat; one that an earlier answer has overtaken says nothing."""
        if self.take_leases(answer):
            self.step(now_ms)

    def _new_held(self, pid: int, epoch: int, group_epoch: int) -> Held:
        return Held(pid, epoch, group_epoch, 0, [Lane() for _ in range(self.lanes)])

    def running_of(self, held: Held) -> int:
        """Returns how many handlers run for a lease that ends."""
        return 0 if held.abandoned else sum(lane.running for lane in held.lanes)

    def on_fetched(self, fetch: Fetch, answer: FetchAnswer, now_ms: int) -> None:
        """Messages arrived, or a refusal."""
        held = self.held.get(fetch.pid)
        if held is None or held.epoch != fetch.epoch or not held.fetching:
            return
        held.fetching = False
        if answer.code is Code.LEASE_FENCED:
            self.end(held)
            self.heartbeat_due_ms = now_ms
            self.step(now_ms)
            return
        if answer.code is not Code.OK:
            held.fetch_due_ms = now_ms + self.retry_ms
            return
        held.fetch_due_ms = now_ms
        if answer.view is not None:
            self._take_view(held, answer.view)
        if fetch.offset == held.next_offset:
            held.next_offset = answer.next_offset
            if not held.revoked:
                for record in answer.records:
                    self._queue(held, Work(record.key, record))
        self.step(now_ms)

    def _take_view(self, held: Held, view: GroupView) -> None:
        newer = held.park_versions.take_view(view.park_version)
        if newer is None:
            return
        # What was passed over since the lease began is in it (`partition.GroupCursor.filter`).
        held.acked = Cursor.load(view.acked)
        told = {key: head for key, head in view.parked.items() if key not in newer}
        held.parked = {key: head for key, head in held.parked.items() if key in newer} | told
        for key, head in told.items():
            if head is not None:
                self._queue_head(held, key, head)

    def _queue(self, held: Held, work: Work) -> None:
        held.waiting_bytes += len(work.record.message)
        self._queue_of(held, self._lane_of(held, work.key), work.key).append(work)

    def _queue_of(self, held: Held, lane: Lane, key: bytes) -> deque[Work]:
        """Returns where a message of a lane's key waits."""
        return lane.queue if self.holds_keys and key else held.unkeyed

    def _queue_head(self, held: Held, key: bytes, head: ParkedEntry) -> None:
        """The head of a key that resumes waits in its lane once."""
        lane = self._lane_of(held, key)
        works = [*self._queue_of(held, lane, key), *(each.work for each in held.lanes)]
        if not any(w is not None and w.key == key and w.parked is not None for w in works):
            self._queue(held, Work(key, head))

    def _lane_of(self, held: Held, key: bytes) -> Lane:
        return held.lanes[self.lane_of(key, len(held.lanes))]

    def lane_of(self, key: bytes, lanes: int) -> int:
        """The lane of a key: always the same one, so that a key is handled in order."""
        return self._lane_hash(key) % lanes

    def on_handled(self, handle: Handle, ok: bool, now_ms: int) -> None:
        """The application has finished with a message."""
        held = self.held.get(handle.pid)
        if held is None or held.epoch != handle.epoch:
            self.handled_late(handle.pid, handle.epoch)
            self.step(now_ms)
            return
        lane = held.lanes[handle.lane]
        work = lane.work
        assert work is not None
        assert lane.running
        lane.running = False
        if not ok:
            work.failures += 1
        if not ok and (self.retries < 0 or work.failures <= self.retries):
            lane.due_ms = now_ms + self.retry_ms
        elif isinstance(work.record, ParkedEntry):
            done = DoneParked(
                self.group, held.group_epoch, held.epoch, work.key, work.record.token, not ok
            )
            self._request(held, lane, done, now_ms)
        elif ok:
            self._ack(held, lane, work.record, now_ms)
        elif self.holds_keys and not work.key:
            lane.work = None
            self._queue_unkeyed(held, work)
        else:
            self._park(held, lane, work.record, now_ms, follow=False)
        self.step(now_ms)

    @staticmethod
    def _queue_unkeyed(held: Held, work: Work) -> None:
        """A message without a key waits again, in its place."""
        held.waiting_bytes += len(work.record.message)
        behind = (
            at
            for at, each in enumerate(held.unkeyed)
            if each.parked is None and each.record.offset > work.record.offset
        )
        held.unkeyed.insert(next(behind, len(held.unkeyed)), work)

    def _takes_unkeyed(self, held: Held) -> bool:
        """Returns whether a lane may take a message that waits for any lane."""
        if not self.holds_keys:
            return True
        works = [each.work for each in held.lanes if each.work is not None and not each.work.key]
        failed = any(self._has_failed(work) for work in (*works, *held.unkeyed))
        return not works or not (failed or self.is_parked(held, b""))

    def _has_failed(self, work: Work) -> bool:
        return 0 <= self.retries < work.failures

    def on_unhandled(self, handle: Handle, now_ms: int) -> None:
        """The application has not begun with a message, and will not now: its lane begins again
        when it may."""
        held = self.held.get(handle.pid)
        if held is None or held.epoch != handle.epoch:
            self.handled_late(handle.pid, handle.epoch)
        else:
            lane = held.lanes[handle.lane]
            work, lane.work, lane.running = lane.work, None, False
            assert work is not None
            if not held.revoked:
                self._put_back(held, lane, work)
        self.step(now_ms)

    def on_answer(self, request: Request, answer: AckAnswer | ParkAnswer, now_ms: int) -> None:
        """A partition answered a request."""
        held = self.held.get(request.pid)
        if held is None or held.epoch != request.epoch:
            return
        lane = held.lanes[request.lane] if request.lane < len(held.lanes) else None
        if lane is None or lane.request is None or lane.request.number != request.number:
            return
        if answer.code in LOST:
            self.end(held)
            return
        work = lane.work
        assert work is not None
        if answer.code is Code.PARK_FULL:
            # The lane, and what is behind it, waits until an operator makes room.
            lane.due_ms = now_ms + self.retry_ms
            return
        lane.request = lane.work = None
        if isinstance(answer, ParkAnswer):
            self._parked(held, lane, work, answer)
        self.step(now_ms)

    def _parked(self, held: Held, lane: Lane, work: Work, answer: ParkAnswer) -> None:
        changed = answer.code is Code.OK
        if held.park_versions.take_answer(work.key, answer.version, changed=changed):
            if answer.live:
                held.parked.pop(work.key, None)
            else:
                held.parked[work.key] = answer.head
        head = held.parked.get(work.key)
        if answer.code is Code.NOT_PARKED and work.parked is None:
            # The key was released meanwhile: the message is handed out as any other.
            self._put_back(held, lane, work)
        elif head is not None:
            self._queue_head(held, work.key, head)

    def _put_back(self, held: Held, lane: Lane, work: Work) -> None:
        """A message waits again, before those that came behind it."""
        if self.holds_keys and not work.key and work.parked is None:
            self._queue_unkeyed(held, work)
            return
        held.waiting_bytes += len(work.record.message)
        self._queue_of(held, lane, work.key).appendleft(work)

    def leave(self, now_ms: int) -> None:
        """Gives everything back and leaves the group."""
        self.revoke_all(now_ms)
        self.step(now_ms)

    # What it does

    def step(self, now_ms: int) -> None:
        """Does whatever is possible now. Safe at any time, as often as wanted."""
        for held in list(self.held.values()):
            if held.revoked and self._give_back(held, now_ms):
                continue
            for number, lane in enumerate(held.lanes):
                self._step_lane(held, number, lane, now_ms)
            self._change_lanes(held)
            self._fetch(held, now_ms)
        heartbeat = self.take_heartbeat(now_ms)
        if heartbeat is not None:
            self._actions.append(heartbeat)

    def due_ms(self, now_ms: int) -> int:
        """Returns the time at which `step` is due."""
        times = [self.heartbeat_due_ms]
        for held in self.held.values():
            if self._may_fetch(held):
                times.append(held.fetch_due_ms)
            elif held.revoked_ms >= 0 and self.drain_ms:
                times.append(held.revoked_ms + self.drain_ms)
            startable = self.may_start(held, now_ms)
            times += [
                lane.due_ms
                for lane in held.lanes
                if lane.request is not None
                or (lane.work is not None and not lane.running and startable)
            ]
        return min(times)

    def take_actions(self) -> list[Action]:
        """Returns the actions that are due, in order."""
        actions, self._actions = self._actions, []
        return actions

    def _step_lane(self, held: Held, number: int, lane: Lane, now_ms: int) -> None:
        if lane.request is not None:
            if now_ms >= lane.due_ms:
                lane.due_ms = now_ms + self.timeout_ms
                self._actions.append(lane.request)
            return
        if lane.running or not self.may_start(held, now_ms):
            return
        if lane.work is not None:
            if now_ms < lane.due_ms:
                return
            if self._renew(held, lane.work):
                self._start(held, number, lane, lane.work)
                return
            lane.work = None
        while lane.work is None and not held.revoked:
            queue = lane.queue or held.unkeyed
            if not queue or (queue is held.unkeyed and not self._takes_unkeyed(held)):
                break
            work = queue.popleft()
            held.waiting_bytes -= len(work.record.message)
            self._begin(held, number, lane, work, now_ms)

    def _begin(self, held: Held, number: int, lane: Lane, work: Work, now_ms: int) -> None:
        if work.parked is not None:
            if self._renew(held, work):
                lane.work = work
                self._start(held, number, lane, work)
            return
        record = work.record
        assert isinstance(record, Record)
        if record.offset in held.acked:
            return
        lane.work = work
        if self.is_parked(held, work.key):
            self._park(held, lane, record, now_ms, follow=True)
        elif self.holds_keys and self._has_failed(work):
            self._park(held, lane, record, now_ms, follow=False)
        else:
            self._start(held, number, lane, work)

    @staticmethod
    def _renew(held: Held, work: Work) -> bool:
        """Returns whether a message may be handed out, now or again. Of a parked key that is its
        head, as it is by now: an operator may have skipped or replaced it."""
        if work.parked is None:
            return True
        head = held.parked.get(work.key)
        if head is None:
            return False
        if head.token != work.parked.token:
            work.failures = 0
        work.record = head
        return True

    @staticmethod
    def is_parked(held: Held, key: bytes) -> bool:
        """True when messages of the key wait behind a failed one."""
        return key in held.parked

    def _start(self, held: Held, number: int, lane: Lane, work: Work) -> None:
        lane.running = True
        version = work.record.version if isinstance(work.record, ParkedEntry) else 0
        handle = Handle(held.pid, held.epoch, number, work.key, version, work.record)
        self._actions.append(handle)

    def _ack(self, held: Held, lane: Lane, record: Record, now_ms: int) -> None:
        command = Ack(self.group, held.group_epoch, held.epoch, (record.offset,))
        self._request(held, lane, command, now_ms)

    def _park(self, held: Held, lane: Lane, record: Record, now_ms: int, *, follow: bool) -> None:
        command = Park(
            self.group,
            held.group_epoch,
            held.epoch,
            record.offset,
            record.key,
            record.lp,
            record.message,
            follow,
        )
        self._request(held, lane, command, now_ms)

    def _request(
        self, held: Held, lane: Lane, command: Ack | Park | DoneParked, now_ms: int
    ) -> None:
        number = self._next_number
        self._next_number += 1
        lane.request = Request(held.pid, held.epoch, held.lanes.index(lane), number, command)
        lane.due_ms = now_ms + self.timeout_ms
        self._actions.append(lane.request)

    def _give_back(self, held: Held, now_ms: int) -> bool:
        """A revoked lease: nothing is begun; it is released when nothing runs. Returns whether it
        is."""
        for lane in held.lanes:
            lane.queue.clear()
        held.unkeyed.clear()
        held.waiting_bytes = 0
        if held.revoked_ms < 0:
            held.revoked_ms = now_ms
        held.abandoned = self.drain_ms > 0 and now_ms >= held.revoked_ms + self.drain_ms
        if held.busy and not held.abandoned:
            return False
        self.end(held)
        self.heartbeat_due_ms = now_ms
        return True

    def set_lanes(self, lanes: int) -> None:
        """Another number of lanes; a partition takes it when its lanes are empty."""
        self.lanes = lanes

    def _change_lanes(self, held: Held) -> None:
        if len(held.lanes) != self.lanes and self.lanes_are_empty(held):
            held.lanes = [Lane() for _ in range(self.lanes)]

    @staticmethod
    def lanes_are_empty(held: Held) -> bool:
        """True when keys may change their lanes."""
        return held.queued == 0

    def _may_fetch(self, held: Held) -> bool:
        changing = len(held.lanes) != self.lanes
        full = 0 < self.window_bytes <= held.waiting_bytes
        return not (held.revoked or changing or full) and held.queued < self.window

    def _fetch(self, held: Held, now_ms: int) -> None:
        if now_ms < held.fetch_due_ms or not self._may_fetch(held):
            return
        held.fetching = True
        held.fetch_due_ms = now_ms + FETCH_TIMEOUTS * self.timeout_ms
        count = self.window - held.queued
        self._actions.append(
            Fetch(
                held.pid,
                held.group_epoch,
                held.epoch,
                held.next_offset,
                count,
                held.park_versions.known,
            )
        )
