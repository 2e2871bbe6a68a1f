"""A partition, a member of a group, and its client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoymq.topics.machine.partition import PartitionMachine
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.answers import AckAnswer, ParkAnswer
from convoymq.topics.rules.hashing import key_hashes
from convoymq.topics.rules.heartbeats import TTL_MS, Leases
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

RETRIES = 1
RETRY_MS = 5


@dataclass(frozen=True)
class Keys:
    """Messages of which only the keys matter."""

    offset: int
    keys: Sequence[bytes]

    @property
    def messages(self) -> int:
        return len(self.keys)

    @property
    def size(self) -> int:
        return len(self.keys)

    def hashes(self) -> bytes:
        return key_hashes(self.keys)

    def key(self, offset: int) -> bytes:
        return self.keys[offset - self.offset]

    def copy(self, offset: int) -> bytes:
        return b"%d" % offset


class World:
    """A partition, one member of a group, and its client."""

    def __init__(
        self,
        keys: Sequence[bytes],
        window: int = 100,
        *,
        one_of_key: bool = False,
        holds_keys: bool = True,
        lanes: Lanes | None = None,
        drain_ms: int = TTL_MS,
        limit: int | None = None,
    ) -> None:
        self.now = 0
        self.keys = keys
        self.machine = PartitionMachine(3, 0, 8, 0)
        self.machine.apply(c.Open("creation", 0, 1))
        self.machine.apply(c.OpenCursor("g", 1))
        for key in keys:
            self.machine.apply(c.Produce(1, 1, 0, 0, key))
        self.epoch = 0
        self.member = GroupMember(
            "g",
            "m",
            lambda key: 0,
            window=window,
            retries=RETRIES,
            retry_ms=RETRY_MS,
            one_of_key=one_of_key,
            holds_keys=holds_keys,
            lanes=lanes,
            drain_ms=drain_ms,
        )
        self.member.limit = limit
        self.holds_keys = holds_keys
        self.hand: list[int] = []
        self.parked_hand: list[HandOutParked] = []
        self.first: list[int] = []
        """Messages in the order in which they came first under this lease."""
        self.returned: set[int] = set()
        self.acked: set[int] = set()
        self.sent: list[Send] = []
        self.drained = 0
        self.heartbeats: list[SendHeartbeat] = []
        self.lease()

    def lease(self) -> None:
        self.epoch += 1
        self.machine.apply(c.Lease("g", 1, self.epoch, "m"))
        self.tell({3: self.epoch})

    def tell(self, leases: dict[int, int], *revoked: int) -> None:
        self.now += 1
        self.member.on_leases(Leases("m", self.now, 1, leases, frozenset(revoked)), self.now)
        self.run()

    def run(self) -> None:
        """Performs what is due; commands wait for `answer`."""
        self.member.step(self.now)
        while actions := self.member.take_actions():
            for action in actions:
                match action:
                    case Fetch():
                        self._fetch(action)
                    case HandOut():
                        self._hand_out(action)
                    case HandOutParked():
                        self.parked_hand.append(action)
                    case Send():
                        self.sent.append(action)
                    case TellDrained():
                        self.drained += 1
                    case SendHeartbeat():
                        self.heartbeats.append(action)
            assert sum(s.in_window for s in self.member.held.values()) <= self.member.window

    def _fetch(self, fetch: Fetch) -> None:
        machine = self.machine
        code = machine.check_fetch("g", fetch.group_epoch, fetch.epoch)
        own = machine.groups["g"]
        view = None
        if fetch.offset < 0 or fetch.park_version < own.park_version:
            view = machine.view("g")
        first = max(fetch.offset, own.cursor.watermark, 1)
        end = min(first + min(3, fetch.count), len(self.keys) + 1)
        if view is None and first >= end:
            return
        batches = [Keys(first, self.keys[first - 1 : end - 1])] if first < end else []
        answer = Fetched(code, batches, max(first, end), view)
        self.member.on_fetched(fetch, answer, self.now)

    def _hand_out(self, action: HandOut) -> None:
        for offset in range(action.first, action.end):
            assert offset not in self.acked, "handed out after it was acknowledged"
            assert offset not in self.hand
            if self.member.one_of_key and self.keys[offset - 1]:
                key, cursor = action.batch.key(offset), self.machine.groups["g"].cursor
                same = [n for n in self.first if self.keys[n - 1] == key and n < offset]
                assert all(n in cursor for n in same), f"{offset} comes before {same} is settled"
            if not action.failures and offset not in self.first:
                key = action.batch.key(offset)
                waits = [n for n in self.returned if self.keys[n - 1] == key and n < offset]
                alone = not key and self.member.lanes is not None
                waits = waits if self.holds_keys and not alone else []
                assert not waits, f"{offset} of {key!r} overtakes {waits}"
                assert key not in self.machine.groups["g"].parked.keys
                before = [n for n in self.first if self.keys[n - 1] == key]
                assert alone or not before or before[-1] < offset
                self.first.append(offset)
            self.returned.discard(offset)
            self.hand.append(offset)

    def answer(self, number: int = 0) -> None:
        """One command is applied and answered."""
        request = self.sent.pop(number)
        outcome = self.machine.apply(request.command)
        self.machine.check_invariants()
        if isinstance(request.command, c.Park) and outcome.code is Code.OK:
            self.returned.discard(request.command.offset)
        assert isinstance(outcome, AckAnswer | ParkAnswer)
        self.member.on_answer(request, outcome, self.now)
        self.run()

    def acknowledge(self, at: int) -> None:
        offset = self.hand.pop(at)
        self.acked.add(offset)
        self.member.on_acknowledged(3, self.epoch, offset, offset, self.now)
        self.run()

    def give_back(self, at: int, *, final: bool = False, unused: bool = False) -> None:
        offset = self.hand.pop(at)
        self.returned.add(offset)
        self.first = [n for n in self.first if n != offset or not unused]
        self.member.on_returned(3, self.epoch, offset, offset, self.now, final=final, unused=unused)
        self.run()

    def take_view(self) -> None:
        """A fetch brings what an operator has changed."""
        share = self.member.held[3]
        assert share.asked is not None
        view = self.machine.view("g")
        answer = Fetched(Code.OK, [], share.next_offset, view)
        self.member.on_fetched(share.asked, answer, self.now)
        self.run()

    def settle_former(self) -> None:
        """The client settles what it has of a lease that is over."""
        hand, self.hand = self.hand, []
        heads, self.parked_hand = self.parked_hand, []
        for offset in hand:
            self.member.on_acknowledged(3, self.epoch, offset, offset, self.now)
        for head in heads:
            self.member.on_parked_done(3, head.epoch, head.key, self.now, ok=True)
        self.run()

    def lose_lease(self) -> None:
        """The lease ends and comes again: what was not acknowledged is handed out again."""
        self.sent.clear()
        self.returned.clear()
        cursor = self.machine.groups["g"].cursor
        self.acked = {n for n in range(1, len(self.keys) + 1) if n in cursor}
        self.first.clear()
        self.tell({})
        self.settle_former()
        self.lease()

    def finish_parked(self, *, ok: bool = False, unused: bool = False) -> None:
        head = self.parked_hand.pop(0)
        self.member.on_parked_done(3, head.epoch, head.key, self.now, ok=ok, unused=unused)
        self.run()

    def wait(self, ms: int) -> None:
        self.now += ms
        self.run()


def answer_all(world: World) -> None:
    while world.sent:
        world.answer()
