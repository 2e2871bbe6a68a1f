"""Simulated members of groups, as consumers of AMQP and as handlers in key lanes, and crashes.

A member repeats what gets no answer in time, and gives up a fetch. Unless a weak topic has a retry
exchange, its client has one message of a key at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from convoymq.sim.topics import events
from convoymq.sim.topics.clients import TIMEOUT_MS
from convoymq.sim.topics.metadata import MARGIN_MS, TTL_MS
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.rules.answers import AckAnswer, ParkAnswer, ParkedEntry
from convoymq.topics.rules.commands import Park
from convoymq.topics.rules.heartbeats import Leases
from convoymq.topics.rules.leaseholder import SendHeartbeat
from convoymq.topics.rules.member import (
    Fetched,
    GroupMember,
    HandOut,
    HandOutParked,
    Lanes,
    TellDrained,
)
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.share import Fetch, Send

if TYPE_CHECKING:
    from convoymq.sim.topics.world import TopicWorld

SEEN_DEAD_MS = 40
"""The end of a process is seen within this time, if ever."""
RENEW_MS = 50
RETRIES = 1
RETRY_MS = 5
WINDOW = 12
WINDOW_BYTES = 10
"""A message counts as one byte."""
FETCH_WAIT_MS = 120


class SimMember:
    """One member, and its client: a consumer of AMQP, or handlers in lanes.

    The client takes its time, and fails now and then.
    """

    def __init__(self, world: TopicWorld, group: str, member: str, *, has_lanes: bool) -> None:
        self.world = world
        self.group = group
        self.member = member
        self.alive = True
        self.paused_until = 0
        self._waking = -1
        self._waits: set[int] = set()
        """Numbers of requests that have no answer."""
        holds_keys = not world.plan.retries
        self.core = GroupMember(
            group,
            member,
            world.lp_of,
            window=world.plan.lanes if has_lanes else WINDOW,
            retries=RETRIES,
            retry_ms=RETRY_MS,
            ttl_ms=TTL_MS,
            margin_ms=MARGIN_MS,
            renew_ms=RENEW_MS,
            drain_ms=TTL_MS,
            one_of_key=holds_keys,
            holds_keys=holds_keys,
            lanes=Lanes(WINDOW, WINDOW_BYTES) if has_lanes else None,
        )
        self.core.step(world.now)
        self._run()

    def crash(self) -> None:
        """The process is gone, with all that it knew; of every other one that is seen."""
        self.alive = False
        number = zlib.crc32(self.member.encode())
        if number & 1:
            seat = self.world.metadata.groups[self.group]
            self.world.after(1 + number % SEEN_DEAD_MS, seat.on_dead, self.member)

    def leave(self) -> None:
        """The member leaves in order."""
        self.core.leave(self.world.now)
        self._run()

    def pause(self, until: int) -> None:
        """The process stands still, and goes on as if nothing had been."""
        self.paused_until = until

    def change_lanes(self, lanes: int) -> None:
        """The client has another number of lanes, where it has some."""
        if self.core.lanes is not None and self.paused_until <= self.world.now:
            self.core.set_window(lanes, self.world.now)
            # What is handed out now has a lease now.
            self._run()

    def _is_away(self, call: object, *arguments: object) -> bool:
        """True when nothing happens now; a paused process sees it when it goes on."""
        world = self.world
        if self.alive and world.now < self.paused_until:
            world.at(self.paused_until, call, *arguments)  # type: ignore[arg-type]
            return True
        return not self.alive

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
                    world.after(FETCH_WAIT_MS, self._fetched, action, Fetched(Code.NOT_LEADER))
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

    # Heartbeats

    def _wake(self, time: int) -> None:
        if time != self._waking or self._is_away(self._wake, time):
            return
        self._waking = -1
        self.core.step(self.world.now)
        self._run()

    def on_leases(self, leases: Leases) -> None:
        """The answer to a heartbeat arrived."""
        if not self._is_away(self.on_leases, leases):
            self.core.on_leases(leases, self.world.now)
            self._run()

    # Fetches and commands

    def _fetch(self, fetch: Fetch) -> None:
        world = self.world
        # Answers to commands may overtake messages, as those of a node do.
        end = (self.member, Fetch) if world.plan.has("unheard") else self.member
        link = (fetch.pid, end)
        partition = world.partitions.get(fetch.pid)
        if partition is not None:
            partition.fetch(
                fetch,
                self.group,
                lambda answer: world.network.send(link, self._fetched, fetch, answer),
            )

    def _fetched(self, fetch: Fetch, answer: Fetched) -> None:
        if not self._is_away(self._fetched, fetch, answer):
            self.core.on_fetched(fetch, answer, self.world.now)
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
        if partition is None:
            return
        command = request.command
        if isinstance(command, Park) and self.world.plan.retries:
            carry_out: Callable[..., None] = partition.retry
        else:
            carry_out = partition.submit
        carry_out(
            command,
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
