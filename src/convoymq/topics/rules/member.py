"""A member of a consumer group, for a consumer of AMQP or for handlers in threads: sans-IO.

Messages of a partition are handed out in the order of their offsets, as many as the window has room
for. A message leaves the window when its acknowledgement is in force, or when it was returned. With
key lanes (`Lanes`) each partition has a window of its own.

A client has one message of a key at a time (`one_of_key`): the next one waits until the
acknowledgement of the one before it is in force, or until that is parked; other keys go on. A
compiled table decides that for each message (`kernels.keys_in_flight`).

What a client returns makes its key slow. Of a slow key one message at a time is handed out, the
lowest first, and none before what the client still has of it; other keys go on:

    returned -> handed out again, `retries` times -> parked, later ones behind it
    rejected -> parked

    slow key -> nothing of it waits, is handed out or parked -> handed out as any other

So nothing that was not handed out before overtakes a returned message of its key. A client that
asks for no limit for each key may have later messages of a key when it returns one: those were
handed out before.

Messages without a key have no order to keep, and are slow together. In key lanes a returned one
waits alone until one of its partition has failed for good: they are parked in the order of their
offsets.

Where keys are not held (weak topics with a retry exchange), a returned message waits alone, and
later ones of its key are handed out meanwhile. What is to be parked is sent to the retry exchange
by who carries the request out, and acknowledged then.

A revoked lease is released when the client has settled what it holds, at the latest after the time
of a lease: then what it still holds is handed out by the next owner, and its acknowledgements are
ignored.

Source: ordered topics, sections 6.3, 8 and 9.3.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from convoymq.topics.rules.answers import AckAnswer, GroupView, ParkAnswer, ParkedEntry
from convoymq.topics.rules.batches import Batch, Hand, KeyOrder
from convoymq.topics.rules.commands import AckRanges, DoneParked, Park
from convoymq.topics.rules.cursor import Cursor
from convoymq.topics.rules.heartbeats import MARGIN_MS, TTL_MS, Leases
from convoymq.topics.rules.leaseholder import LOST, RENEW_MS, Leaseholder, SendHeartbeat
from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.share import Fetch, Send, Share, Single, SlowKey, SlowName

WINDOW = 1_000
"""Of a client that asks for no limit."""
RETRIES = 5
RETRY_MS = 100
FETCH_MESSAGES = 1_000
FETCH_TIMEOUT_MS = 20_000
EMPTY_MS = 5
"""Pause after an answer without messages."""
EXPIRED_MS = 1_000
"""Pause after DATA_EXPIRED: an operator decides."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Rules for handlers that run in threads of the member's process.

    The window is that of each partition. A lease that ended counts as held until its handlers have
    finished, so that no key is handled twice at once.
    """

    ahead: int
    """Messages of a partition that are fetched, and not acknowledged; beyond it none is fetched."""
    ahead_bytes: int
    """Likewise, bytes of the batches with messages that wait."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer to a fetch; messages that are acknowledged may be among them."""

    code: Code
    batches: Sequence[Batch] = ()
    next_offset: int = 0
    view: GroupView | None = None


@dataclass(frozen=True, slots=True)
class HandOut:
    """Hand messages of a batch to the client, from `first` to below `end`."""

    pid: int
    epoch: int
    batch: Batch
    first: int
    end: int
    failures: int
    """Above 0 for one that was returned."""


@dataclass(frozen=True, slots=True)
class HandOutParked:
    """Hand the head of a parked key that resumes to the client."""

    pid: int
    epoch: int
    key: bytes
    entry: ParkedEntry
    failures: int
    first: bool
    """The client had not had it when its key was parked, as far as this member knows."""


@dataclass(frozen=True, slots=True)
class TellDrained:
    """Tell the coordinator that the group has drained a partition; it finds out by itself too."""

    pid: int
    group_epoch: int


Action = SendHeartbeat | Fetch | HandOut | HandOutParked | Send | TellDrained


class GroupMember(Leaseholder[Share]):
    """One member.

    Args:
        lp_of: the logical partition of a key.
        retries: how often a message that was returned is handed out again, before it is parked; -1
            = for ever.
        drain_ms: how long a client may settle what it has of a revoked lease.
        one_of_key: whether a message waits until the one before it of its key is settled.
        holds_keys: whether a message waits behind a returned one of its key.
        lanes: None for a consumer of AMQP.
    """

    def __init__(
        self,
        group: str,
        member: str,
        lp_of: Callable[[bytes], int],
        *,
        window: int = WINDOW,
        retries: int = RETRIES,
        retry_ms: int = RETRY_MS,
        ttl_ms: int = TTL_MS,
        margin_ms: int = MARGIN_MS,
        renew_ms: int = RENEW_MS,
        drain_ms: int = TTL_MS,
        one_of_key: bool = False,
        holds_keys: bool = True,
        lanes: Lanes | None = None,
    ) -> None:
        super().__init__(member, ttl_ms=ttl_ms, margin_ms=margin_ms, renew_ms=renew_ms)
        self.group = group
        self.window = window
        self.limit: int | None = None
        """Messages that the client may get in all; None: its window alone says."""
        self.given = 0
        """Messages that were handed out, if there is a limit."""
        self.retries = retries
        self.retry_ms = retry_ms
        self.drain_ms = drain_ms
        self.one_of_key = one_of_key
        self.holds_keys = holds_keys
        self.lanes = lanes
        self.paused = False
        self._lp_of = lp_of
        self._next_number = 1
        self._turn = 0
        self._left: dict[tuple[int, int], int] = {}
        """Messages of leases that are over, which the client has: they take room in the window."""
        self._actions: list[Action] = []

    def _new_held(self, pid: int, epoch: int, group_epoch: int) -> Share:
        order = KeyOrder() if self.one_of_key else None
        return Share(pid, epoch, group_epoch, 0, revoked=self.leaves, order=order)

    def end(self, held: Share) -> None:
        """A lease has ended. What the client has of it counts until it is settled."""
        if held.in_hand:
            self._left[held.pid, held.epoch] = held.in_hand
            if self.lanes is not None and not held.abandoned:
                self._running[held.pid] = held.epoch
        super().end(held)

    def has_left(self, pid: int, epoch: int) -> bool:
        """True while the client has messages of a lease that is over."""
        return (pid, epoch) in self._left

    def _settle_left(self, pid: int, epoch: int, count: int) -> None:
        """The client has settled messages of a lease that is over: that is for its window only."""
        left = self._left.pop((pid, epoch), 0) - count
        if left > 0:
            self._left[pid, epoch] = left
        elif self._running.get(pid) == epoch:
            del self._running[pid]

    def _share(self, pid: int, epoch: int) -> Share | None:
        share = self.held.get(pid)
        return share if share is not None and share.epoch == epoch else None

    # What the coordinator and the partitions say

    def on_leases(self, answer: Leases, now_ms: int) -> None:
        """The answer to a heartbeat; one that an earlier answer has overtaken says nothing."""
        if self.take_leases(answer):
            self.step(now_ms)

    def on_fetched(self, fetch: Fetch, answer: Fetched, now_ms: int) -> None:
        """Messages arrived, or a refusal."""
        share = self._share(fetch.pid, fetch.epoch)
        if share is None or share.asked is not fetch:
            return
        share.asked = None
        if answer.code is Code.LEASE_FENCED:
            self.end(share)
            self.heartbeat_due_ms = now_ms
            self.step(now_ms)
            return
        if answer.code is not Code.OK:
            expired = answer.code is Code.DATA_EXPIRED
            share.fetch_due_ms = now_ms + (EXPIRED_MS if expired else self.retry_ms)
            return
        if answer.view is not None:
            self._take_view(share, answer.view)
        for batch in answer.batches:
            low, high = max(batch.offset, share.next_offset), batch.offset + batch.messages
            for first, end in share.acked.missing(low, high):
                share.buffer.append((batch, first, end))
        share.next_offset = max(share.next_offset, answer.next_offset)
        share.fetch_due_ms = now_ms + (0 if answer.batches else EMPTY_MS)
        self.step(now_ms)

    def _take_view(self, share: Share, view: GroupView) -> None:
        newer = share.park_versions.take_view(view.park_version)
        if newer is None:
            return
        # What was passed over since the lease began is in it (`partition.GroupCursor.filter`).
        share.acked = Cursor.load(view.acked)
        # In an order that does not depend on hashes, so that a simulated run can be repeated.
        slow_keys = (slow.key for slow in share.keys.values() if slow.name == slow.key)
        for key in dict.fromkeys((*slow_keys, *view.parked)):
            if key not in newer:
                parked = key in view.parked
                self._set_parked(self._slow(share, key, key), parked, view.parked.get(key))

    @staticmethod
    def _set_parked(slow: SlowKey, parked: bool, head: ParkedEntry | None) -> None:
        slow.parked = parked
        if head is None or slow.head is None or head.token != slow.head.token:
            slow.head_failures = 0
        slow.head = head

    def on_answer(self, request: Send, answer: AckAnswer | ParkAnswer | None, now_ms: int) -> None:
        """A partition answered a command; None: it could not be sent."""
        share = self._share(request.pid, request.epoch)
        if share is None:
            return
        if answer is not None and answer.code in LOST:
            self.end(share)
        elif share.ack_request is request:
            assert not isinstance(answer, ParkAnswer)
            self._acked(share, request, answer, now_ms)
        else:
            assert not isinstance(answer, AckAnswer)
            for slow in share.keys.values():
                if slow.request is request:
                    self._parked(share, slow, request, answer, now_ms)
                    break
        self.step(now_ms)

    def _acked(self, share: Share, request: Send, answer: AckAnswer | None, now_ms: int) -> None:
        assert isinstance(request.command, AckRanges)
        share.ack_request = None
        flat = request.command.ranges
        ranges = list(zip(flat[::2], flat[1::2], strict=True))
        if answer is None:
            share.acks[:0] = ranges
            share.ack_due_ms = now_ms + self.retry_ms
            return
        share.unconfirmed -= sum(last - first + 1 for first, last in ranges)
        for first, last in ranges:
            share.settled(first, last)
        for slow in share.keys.values():
            slow.acking = {
                offset
                for offset in slow.acking
                if not any(first <= offset <= last for first, last in ranges)
            }
        if answer.drained:
            self._actions.append(TellDrained(share.pid, share.group_epoch))

    def _parked(
        self, share: Share, slow: SlowKey, request: Send, answer: ParkAnswer | None, now_ms: int
    ) -> None:
        slow.request = None
        slow.due_ms = now_ms
        command = request.command
        if answer is None or answer.code is Code.PARK_FULL:
            # The key waits until an operator makes room.
            slow.due_ms = now_ms + self.retry_ms
            if isinstance(command, DoneParked):
                share_retry = self._done_parked(share, slow, command.token, command.failed)
                self._request(share, slow, share_retry)
            return
        assert isinstance(command, Park | DoneParked)
        changed = answer.code is Code.OK
        if share.park_versions.take_answer(command.key, answer.version, changed=changed):
            self._set_parked(slow, not answer.live, answer.head)
        if isinstance(command, Park) and answer.code is not Code.NOT_PARKED:
            # Parked, now or before; where its key is parked no more it is handed out.
            # Nothing waits any more when the lease was revoked meanwhile.
            parked = [each for each in slow.waiting if each.offset == command.offset]
            if slow.fresh_offset is None and parked and not parked[0].failures:
                slow.fresh_offset = command.offset
            slow.waiting = [each for each in slow.waiting if each.offset != command.offset]
            share.settled(command.offset, command.offset)

    # What the client says

    def on_acknowledged(self, pid: int, epoch: int, first: int, last: int, now_ms: int) -> None:
        """The client has processed messages. Those of a lease that is over are ignored."""
        share = self._share(pid, epoch)
        if share is None:
            self._settle_left(pid, epoch, last - first + 1)
            return
        for low, high, _ in share.hand.take(first, last + 1):
            share.acks.append((low, high - 1))
            share.unconfirmed += high - low
        for offset in self._slow_ones(share, first, last):
            slow = share.out.pop(offset)
            del slow.out[offset]
            slow.acking.add(offset)
            share.acks.append((offset, offset))
            share.unconfirmed += 1

    def pass_over(self, pid: int, epoch: int, first: int, last: int, now_ms: int) -> None:
        """The member's filter does not want messages that were handed out: the client does not get
        them, and they use no credit."""
        self.given -= last - first + 1
        self.on_acknowledged(pid, epoch, first, last, now_ms)
        self.step(now_ms)

    def on_returned(
        self,
        pid: int,
        epoch: int,
        first: int,
        last: int,
        now_ms: int,
        *,
        final: bool = False,
        unused: bool = False,
    ) -> None:
        """The client returns messages; `final`: it does not want them again; `unused`: it has not
        begun with them."""
        share = self._share(pid, epoch)
        if share is None:
            self._settle_left(pid, epoch, last - first + 1)
            return
        returned = [
            Single(offset, batch)
            for low, high, batch in share.hand.take(first, last + 1)
            for offset in range(low, high)
        ]
        for offset in self._slow_ones(share, first, last):
            returned.append(share.out.pop(offset).out.pop(offset))
        if share.revoked:
            # The next owner hands them out.
            return
        for single in returned:
            single.failures += not unused
            if final or 0 <= self.retries < single.failures:
                single.failures = -1
            slow = self._slow_of(share, single)
            insort(slow.waiting, single)
            slow.due_ms = now_ms + (0 if unused or single.failures < 0 else self.retry_ms)

    @staticmethod
    def _slow_ones(share: Share, first: int, last: int) -> list[int]:
        return sorted(offset for offset in share.out if first <= offset <= last)

    def on_parked_done(
        self,
        pid: int,
        epoch: int,
        key: bytes,
        now_ms: int,
        *,
        ok: bool = False,
        final: bool = False,
        unused: bool = False,
    ) -> None:
        """The client has processed the head of a parked key, or returns it, see `on_returned`."""
        share = self._share(pid, epoch)
        if share is None:
            self._settle_left(pid, epoch, 1)
            return
        slow = share.keys.get(key)
        if slow is None or not slow.head_out:
            return
        slow.head_out = False
        head = slow.head
        if head is None:
            # An operator has taken it away meanwhile.
            return
        slow.head_failures += not (ok or unused)
        if not ok and not final and (self.retries < 0 or slow.head_failures <= self.retries):
            slow.due_ms = now_ms + (0 if unused else self.retry_ms)
        elif slow.request is None:
            self._request(share, slow, self._done_parked(share, slow, head.token, not ok))
        else:
            # Something is parked behind it just now: it is handed out again after that.
            slow.due_ms = now_ms

    def set_window(self, window: int, now_ms: int) -> None:
        """Another window; 0 = the client asks for no limit."""
        self.window = window or WINDOW
        self.step(now_ms)

    def set_limit(self, limit: int, now_ms: int) -> None:
        """The client may get messages until it has got so many."""
        self.limit = limit
        self.step(now_ms)

    @property
    def ready(self) -> int:
        """Returns the messages that are here and wait for room."""
        return sum(share.buffered + share.held_back for share in self.held.values())

    def leave(self, now_ms: int) -> None:
        """Takes nothing new, gives everything back, and leaves the group."""
        self.revoke_all(now_ms)
        self.step(now_ms)

    def abandon(self, now_ms: int) -> None:
        """The client is gone: what it had goes to the next owner at once."""
        self._left.clear()
        self._running.clear()
        for share in self.held.values():
            share.hand = Hand()
            share.out.clear()
            share.keys = {key: slow for key, slow in share.keys.items() if slow.request is not None}
            for slow in share.keys.values():
                slow.head_out = False
        self.leave(now_ms)

    # Slow keys

    def _slow_of(self, share: Share, single: Single) -> SlowKey:
        """Returns what is slow when a message is returned: its key, or itself alone."""
        key = single.batch.key(single.offset)
        has_order = key or self.lanes is None or single.failures < 0 or key in share.keys
        name = key if self.holds_keys and has_order else single.offset
        return self._slow(share, key, name)

    def _slow(self, share: Share, key: bytes, name: SlowName) -> SlowKey:
        """A key becomes slow, with all that the client has of it; or one message."""
        slow = share.keys.get(name)
        if slow is None:
            slow = share.keys[name] = SlowKey(key, name)
            if name != key:
                return slow
            for offset in share.hand.of_key(key):
                ((_, _, batch),) = share.hand.take(offset, offset + 1)
                slow.out[offset] = Single(offset, batch)
                share.out[offset] = slow
            if self.holds_keys and not key:
                self._join(share, slow)
        return slow

    @staticmethod
    def _join(share: Share, slow: SlowKey) -> None:
        """Returned messages without a key do not wait alone any more."""
        alone = [each for each in share.keys.values() if each is not slow and not each.key]
        for other in alone:
            assert other.request is None, "what is parked has failed for good"
            slow.waiting = sorted((*slow.waiting, *other.waiting))
            slow.out |= other.out
            slow.acking |= other.acking
            share.out.update(dict.fromkeys(other.out, slow))
            del share.keys[other.name]

    def _step_key(self, share: Share, slow: SlowKey, room: int, now_ms: int) -> int:
        """Does what is possible for a slow key now; returns the room that is left."""
        if slow.request is not None or now_ms < slow.due_ms:
            return room
        lowest = slow.lowest_out
        first = slow.waiting[0] if slow.waiting else None
        if first is not None and (lowest is None or first.offset < lowest):
            if slow.parked or first.failures < 0:
                self._park(share, slow, first)
            elif room and (lowest is None or first.failures):
                # A first time comes alone; one that comes again overtakes nothing.
                del slow.waiting[0]
                slow.out[first.offset] = first
                share.out[first.offset] = slow
                room -= 1
                self._actions.append(
                    HandOut(
                        share.pid,
                        share.epoch,
                        first.batch,
                        first.offset,
                        first.offset + 1,
                        first.failures,
                    )
                )
        elif slow.head is not None and not slow.head_out and lowest is None and room:
            head, fresh = slow.head, slow.fresh_offset
            first_time = head.pid == share.pid and fresh is not None and head.offset >= fresh
            if first_time:
                slow.fresh_offset = head.offset + 1
            slow.head_out = True
            room -= 1
            self._actions.append(
                HandOutParked(
                    share.pid, share.epoch, slow.key, head, slow.head_failures, first_time
                )
            )
        return room

    def _park(self, share: Share, slow: SlowKey, single: Single) -> None:
        command = Park(
            self.group,
            share.group_epoch,
            share.epoch,
            single.offset,
            slow.key,
            self._lp_of(slow.key),
            single.batch.copy(single.offset),
            slow.parked,
        )
        self._request(share, slow, command)

    def _done_parked(
        self, share: Share, slow: SlowKey, token: OrderToken, failed: bool
    ) -> DoneParked:
        return DoneParked(self.group, share.group_epoch, share.epoch, slow.key, token, failed)

    def _request(self, share: Share, slow: SlowKey, command: Park | DoneParked) -> None:
        slow.request = self._send(share, command)

    def _send(self, share: Share, command: AckRanges | Park | DoneParked) -> Send:
        request = Send(share.pid, share.epoch, self._next_number, command)
        self._next_number += 1
        self._actions.append(request)
        return request

    # What it does

    def step(self, now_ms: int) -> None:
        """Does whatever is possible now. Safe at any time, as often as wanted."""
        for share in list(self.held.values()):
            self._acknowledge(share, now_ms)
            if share.revoked:
                self._give_back(share, now_ms)
        if not self.paused:
            self._hand_out(now_ms)
        for share in self.held.values():
            self._fetch(share, now_ms)
        heartbeat = self.take_heartbeat(now_ms)
        if heartbeat is not None:
            self._actions.append(heartbeat)

    def take_actions(self) -> list[Action]:
        """Returns the actions that are due, in order."""
        actions, self._actions = self._actions, []
        return actions

    def due_ms(self, now_ms: int) -> int:
        """Returns the time at which `step` is due."""
        times = [self.heartbeat_due_ms]
        for share in self.held.values():
            if share.revoked:
                times.append(share.revoked_ms + self.drain_ms)
            elif self._wanted(share):
                times.append(share.fetch_due_ms)
            if share.acks and share.ack_request is None:
                times.append(share.ack_due_ms)
            times += [
                slow.due_ms
                for slow in share.keys.values()
                if slow.due_ms > now_ms and slow.request is None
            ]
        return min(times)

    def _acknowledge(self, share: Share, now_ms: int) -> None:
        if not share.acks or share.ack_request is not None or now_ms < share.ack_due_ms:
            return
        ranges = tuple(_flat(_merged(share.acks)))
        share.acks = []
        command = AckRanges(self.group, share.group_epoch, share.epoch, ranges)
        share.ack_request = self._send(share, command)

    def _give_back(self, share: Share, now_ms: int) -> None:
        """A revoked lease: nothing is handed out; it is released when the client has settled what
        it has."""
        if share.revoked_ms < 0:
            share.revoked_ms = now_ms
        share.buffer.clear()
        for slow in share.keys.values():
            slow.waiting.clear()
        done = not share.in_hand and not share.requesting
        share.abandoned = now_ms >= share.revoked_ms + self.drain_ms
        if done or share.abandoned:
            self.end(share)
            self.heartbeat_due_ms = now_ms

    def _hand_out(self, now_ms: int) -> None:
        """Fills the window; the partitions take turns in being first."""
        room = self.window - sum(share.in_window for share in self.held.values())
        room -= sum(self._left.values())
        if self.limit is not None:
            room = min(room, self.limit - self.given)
        shares = [s for s in self.held.values() if not s.revoked and self.may_start(s, now_ms)]
        if not shares:
            return
        self._turn += 1
        at = self._turn % len(shares)
        for share in shares[at:] + shares[:at]:
            if self.lanes is not None:
                room = self.window - share.in_window
            room = max(room, 0)
            left = self._fill(share, room, now_ms)
            self.given += room - left
            room = left

    def _fill(self, share: Share, room: int, now_ms: int) -> int:
        """Hands out messages of a partition; returns the room that is left."""
        for name, slow in list(share.keys.items()):
            room = self._step_key(share, slow, max(0, room), now_ms)
            if slow.is_over:
                del share.keys[name]
        if share.order is not None and room > 0:
            for batch, first, end in share.order.take(room):
                room = self._give(share, batch, first, end, room, now_ms)
        while share.buffer and room > 0 and not share.is_full:
            room = self._hand_out_next(share, room, now_ms)
        return room

    def _hand_out_next(self, share: Share, room: int, now_ms: int) -> int:
        """Hands out the next messages of a buffer, as far as they have to wait for no others;
        returns the room that is left."""
        batch, first, end = share.buffer[0]
        if share.order is None:
            # Slow keys are few: what waits for them is counted again behind each run.
            end = min(end, first + room)
            if share.keys and batch.key(first) in share.keys:
                end = first + 1
            self._pass(share, end)
            return self._give(share, batch, first, end, room, now_ms)
        stop, runs = share.admit(share.order, room)
        self._pass(share, stop)
        for begin, until in zip(runs[::2], runs[1::2], strict=True):
            room = self._give(share, batch, begin, until, room, now_ms)
        return room

    def _give(
        self, share: Share, batch: Batch, first: int, end: int, room: int, now_ms: int
    ) -> int:
        """Hands messages out, those of slow keys as these allow it; returns the room that is
        left."""
        while first < end:
            stop = end
            if share.keys:
                slow = share.keys.get(batch.key(first))
                if slow is not None:
                    insort(slow.waiting, Single(first, batch))
                    room = self._step_key(share, slow, room, now_ms)
                    first += 1
                    continue
                live = (n for n in range(first + 1, end) if batch.key(n) in share.keys)
                stop = next(live, end)
            share.hand.add(first, stop, batch)
            self._actions.append(HandOut(share.pid, share.epoch, batch, first, stop, 0))
            room -= stop - first
            first = stop
        return room

    @staticmethod
    def _pass(share: Share, first: int) -> None:
        """The buffer goes on from `first`."""
        batch, _, end = share.buffer[0]
        if first < end:
            share.buffer[0] = (batch, first, end)
        else:
            share.buffer.popleft()

    def _wanted(self, share: Share) -> int:
        """Returns the number of messages to be fetched, 0 for none."""
        if share.revoked or share.buffered >= FETCH_MESSAGES:
            return 0
        lanes = self.lanes
        if lanes is None:
            return FETCH_MESSAGES
        if share.bytes_ahead >= lanes.ahead_bytes:
            return 0
        ahead = share.in_window + share.buffered + share.held_back
        return min(FETCH_MESSAGES, max(0, lanes.ahead - ahead))

    def _fetch(self, share: Share, now_ms: int) -> None:
        count = 0 if now_ms < share.fetch_due_ms else self._wanted(share)
        if not count:
            return
        share.fetch_due_ms = now_ms + FETCH_TIMEOUT_MS
        share.asked = Fetch(
            share.pid,
            share.group_epoch,
            share.epoch,
            share.next_offset,
            count,
            share.park_versions.known,
        )
        self._actions.append(share.asked)


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields runs in their order, neighbours as one."""
    ordered = sorted(ranges)
    first, last = ordered[0]
    for start, end in ordered[1:]:
        if start > last + 1:
            yield first, last
            first = start
        last = end
    yield first, last


def _flat(ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
    for first, last in ranges:
        yield first
        yield last
