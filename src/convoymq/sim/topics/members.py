"""Simulated members with a window of many messages, as AMQP consumers are.

The shell of such a member answers for whatever it sends: what gets no answer in time is repeated,
and a fetch is given up. The client asks for one message of a key at a time, so what the referee
says of the order of deliveries holds for it as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from convoymq.sim.topics import events
from convoymq.sim.topics.clients import RENEW_MS, RETRIES, TIMEOUT_MS, WINDOW, SimConsumer
from convoymq.sim.topics.metadata import MARGIN_MS, TTL_MS
from convoymq.topics.answers import AckAnswer, FetchAnswer, ParkAnswer, ParkedEntry, Record
from convoymq.topics.consumer import Fetch
from convoymq.topics.hashing import key_hashes
from convoymq.topics.leaseholder import SendHeartbeat
from convoymq.topics.member import (
    Fetched,
    GroupMember,
    HandOut,
    HandOutParked,
    Send,
    TellDrained,
)
from convoymq.topics.partition import Outcome
from convoymq.topics.refusals import Code

if TYPE_CHECKING:
    from convoymq.sim.topics.world import TopicWorld

RETRY_MS = 5
FETCH_WAIT_MS = 120


@dataclass(frozen=True, slots=True)
class Records:
    """Neighbouring messages; see `topics.member.Batch`."""

    offset: int
    records: tuple[Record, ...]

    @property
    def messages(self) -> int:
        """Returns how many there are."""
        return len(self.records)

    @property
    def size(self) -> int:
        """Returns a byte for each."""
        return len(self.records)

    def hashes(self) -> bytes:
        """Returns 8 bytes for each message: a hash of its key."""
        return key_hashes(record.key for record in self.records)

    def key(self, offset: int) -> bytes:
        """Returns the order key of a message."""
        return self.records[offset - self.offset].key

    def copy(self, offset: int) -> bytes:
        """Returns a message as it is parked."""
        return self.records[offset - self.offset].message


class SimMember(SimConsumer):
    """One member with a window, and its client."""

    core: GroupMember

    def __init__(self, world: TopicWorld, group: str, member: str) -> None:
        self.world = world
        self.group = group
        self.member = member
        self.alive = True
        self.paused_until = 0
        self._waking = -1
        self._waits: set[int] = set()
        """Numbers of requests that have no answer."""
        self.core = GroupMember(
            group,
            member,
            world.lp_of,
            window=WINDOW,
            retries=RETRIES,
            retry_ms=RETRY_MS,
            ttl_ms=TTL_MS,
            margin_ms=MARGIN_MS,
            renew_ms=RENEW_MS,
            drain_ms=TTL_MS,
            one_of_key=True,
        )
        self.core.step(world.now)
        self._run()

    def _run(self) -> None:
        world = self.world
        now = world.now
        self.core.step(now)
        for action in self.core.take_actions():
            match action:
                case SendHeartbeat(heartbeat):
                    seat = world.metadata.groups[self.group]
                    world.network.send((self.member, self.group), seat.on_heartbeat, heartbeat)
                case Fetch():
                    world.network.send((self.member, action.pid), self._fetch, action)
                    world.after(FETCH_WAIT_MS, self._not_fetched, action)
                case HandOut():
                    for offset in range(action.first, action.end):
                        self._hand_out(action, offset)
                case HandOutParked():
                    self._hand_out_parked(action)
                case Send():
                    self._waits.add(action.number)
                    self._send(action)
                case TellDrained(pid, group_epoch):
                    seat = world.metadata.groups[self.group]
                    link = (self.member, self.group)
                    world.network.send(link, seat.on_drained, pid, group_epoch)
        due = max(self.core.due_ms(now), now + 1)
        if self._waking <= now or due < self._waking:
            self._waking = due
            world.at(due, self._wake, due)

    # Fetches and commands

    def _fetched(self, fetch: Fetch, answer: FetchAnswer) -> None:
        if self._is_away(self._fetched, fetch, answer):
            return
        neighbours = groupby(enumerate(answer.records), lambda each: each[1].offset - each[0])
        runs = [tuple(record for _, record in run) for _, run in neighbours]
        batches = [Records(run[0].offset, run) for run in runs]
        found = Fetched(answer.code, batches, answer.next_offset, answer.view)
        self.core.on_fetched(fetch, found, self.world.now)
        self._run()

    def _not_fetched(self, fetch: Fetch) -> None:
        if not self._is_away(self._not_fetched, fetch):
            self.core.on_fetched(fetch, Fetched(Code.NOT_LEADER), self.world.now)
            self._run()

    def _send(self, request: Send) -> None:
        """Sends a command, again and again until it is answered or its lease is over."""
        if self._is_away(self._send, request) or request.number not in self._waits:
            return
        held = self.core.held.get(request.pid)
        if held is None or held.epoch != request.epoch:
            self._waits.discard(request.number)
            return
        world = self.world
        world.network.send((self.member, request.pid), self._submit, request)
        world.after(TIMEOUT_MS, self._send, request)

    def _submit(self, request: Send) -> None:
        partition = self.world.partitions.get(request.pid)
        if partition is not None:
            partition.submit(
                request.command,
                lambda answer: self.world.network.send(
                    (request.pid, self.member), self._told, request, answer
                ),
            )

    def _told(self, request: Send, answer: Outcome) -> None:
        if self._is_away(self._told, request, answer) or request.number not in self._waits:
            return
        assert isinstance(answer, AckAnswer | ParkAnswer)
        self._waits.discard(request.number)
        self.core.on_answer(request, answer, self.world.now)
        self._run()

    # The client

    def _deliver(
        self, key: bytes, entry: ParkedEntry, pid: int, epoch: int, *, parked: bool
    ) -> tuple[int, int, int]:
        """The client gets a message; returns its token, as its sink keeps it."""
        world = self.world
        gen = self.core.held[pid].group_epoch
        world.trace.append(
            events.Deliver(
                world.now,
                self.group,
                gen,
                entry.pid,
                entry.offset,
                entry.version,
                key,
                int(entry.message),
                self.member,
                epoch,
                pid,
                parked,
            )
        )
        return gen, entry.version, entry.offset

    def _hand_out(self, action: HandOut, offset: int) -> None:
        pid, key = action.pid, action.batch.key(offset)
        version = self.world.created_version(pid)
        entry = ParkedEntry(version, offset, pid, action.batch.copy(offset))
        token = self._deliver(key, entry, pid, action.epoch, parked=False)
        self.world.after(
            self.world.handling_ms(), self._done, action, offset, key, int(entry.message), token
        )

    def _done(
        self, action: HandOut, offset: int, key: bytes, message: int, token: tuple[int, int, int]
    ) -> None:
        if self._is_away(self._done, action, offset, key, message, token):
            return
        now = self.world.now
        if self._succeeds(key, message, token):
            self.core.on_acknowledged(action.pid, action.epoch, offset, offset, now)
        else:
            self.core.on_returned(action.pid, action.epoch, offset, offset, now, final=False)
        self._run()

    def _hand_out_parked(self, action: HandOutParked) -> None:
        entry = action.entry
        token = self._deliver(action.key, entry, action.pid, action.epoch, parked=True)
        self.world.after(self.world.handling_ms(), self._done_parked, action, token)

    def _done_parked(self, action: HandOutParked, token: tuple[int, int, int]) -> None:
        if self._is_away(self._done_parked, action, token):
            return
        ok = self._succeeds(action.key, int(action.entry.message), token)
        now = self.world.now
        self.core.on_parked_done(action.pid, action.epoch, action.key, now, ok=ok)
        self._run()

    def _succeeds(self, key: bytes, message: int, token: tuple[int, int, int]) -> bool:
        """The client processes a message, or fails."""
        ok = not self.world.fails(self.group, message)
        if ok:
            self.world.sink(self.group, key, message, token)
        return ok
