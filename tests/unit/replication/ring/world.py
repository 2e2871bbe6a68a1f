"""A ring in memory: members that learn of views late, links that break, a tree that decides.

Every step is drawn from a seed. After each step the world checks what must hold at any time; at
rest, what must hold in the end.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from convoymq.replication.ring.core import EXPELLED, MEMBER, RingCore
from convoymq.replication.ring.types import (
    AskCatchUp,
    CaughtUp,
    Complete,
    Deliver,
    Erase,
    Expelled,
    Frame,
)
from convoymq.replication.ring.views import RingView, founded

MakeCore = Callable[[int, RingView, int], RingCore]


class Broken(AssertionError):
    """A promise of the ring does not hold."""


class RingWorld:
    """One ring, its members and the network between them."""

    def __init__(self, seed: int, make: MakeCore = RingCore) -> None:
        self.random = random.Random(seed)
        self.make = make
        self.views = [founded(1, 1)]
        self.cores: dict[int, RingCore] = {}
        self.known: dict[int, int] = {}
        self.links: dict[tuple[int, int], deque[Frame | AskCatchUp]] = {}
        self.sent: dict[int, list[bytes]] = {}
        self.completed: dict[int, int] = {}
        self.delivered: dict[tuple[int, int], list[int]] = {}
        self.expelled: set[int] = set()
        self.base: dict[tuple[int, int], int] = {}
        """What a member had of a sender when it began to deliver."""
        self.happened: Counter[str] = Counter()
        self.proposals: deque[Callable[[RingView], RingView]] = deque()
        self.open(1)

    # --- what happens ------------------------------------------------------------------------

    @property
    def tree(self) -> RingView:
        return self.views[-1]

    def change(self, view: RingView) -> None:
        if view is not self.tree:
            assert view.version == self.tree.version + 1
            self.views.append(view)

    def open(self, member: int) -> None:
        self.cores[member] = self.make(member, self.tree, self.random.choice((1, 40, 1 << 20)))
        self.known[member] = self.tree.version
        self.carry_out(member)

    def carry_out(self, member: int) -> None:
        core = self.cores[member]
        while core.effects:
            effect = core.effects.popleft()
            self.happened[type(effect).__name__] += 1
            match effect:
                case Deliver(sender, number, payload):
                    self.on_delivered(member, sender, number, payload)
                case Complete(number):
                    self.on_complete(member, number)
                case AskCatchUp(left, _):
                    self.links.setdefault((member, left), deque()).append(effect)
                case Erase(failed):
                    self.proposals.append(partial(RingView.erased, member=failed))
                case Expelled():
                    self.expelled.add(member)
                case CaughtUp():
                    for sender in core.view.ring:
                        known = core.senders.get(sender)
                        self.base[member, sender] = known.last if known is not None else 0
                    self.proposals.append(partial(RingView.caught_up, member=member))
        if core.state == MEMBER:
            for sender in core.view.ring:
                self.base.setdefault((member, sender), 0)
        core.check_invariants()

    def flush(self, member: int) -> None:
        core = self.cores.get(member)
        if core is None:
            return
        while (taken := core.take_frame()) is not None:
            self.links.setdefault((member, taken[0]), deque()).append(taken[1])
        core.check_invariants()

    def broadcast(self, member: int) -> None:
        core = self.cores.get(member)
        if core is not None and core.may_broadcast():
            payload = str(self.random.random()).encode()
            self.sent.setdefault(member, []).append(payload)
            assert core.broadcast(payload) == len(self.sent[member])
            self.carry_out(member)

    def learn(self, member: int) -> None:
        version = self.known[member]
        if version < self.tree.version:
            version = self.random.randint(version + 1, self.tree.version)
            self.known[member] = version
            self.cores[member].on_view(self.views[version - 1])
            self.carry_out(member)

    def arrive(self, link: tuple[int, int]) -> None:
        sender, receiver = link
        queue = self.links[link]
        item = queue.popleft()
        if not queue:
            del self.links[link]
        core = self.cores.get(receiver)
        if core is None:
            return
        if isinstance(item, Frame):
            core.on_frame(sender, item)
        else:
            core.on_ask(sender, item.version)
        self.carry_out(receiver)

    def break_link(self, one: int, other: int) -> None:
        for link in ((one, other), (other, one)):
            queue = self.links.get(link)
            if queue:
                for _ in range(self.random.randint(1, len(queue))):
                    queue.pop()
                if not queue:
                    del self.links[link]
        for member, neighbour in ((one, other), (other, one)):
            if member in self.cores and neighbour in self.cores:
                self.cores[member].on_reachable(neighbour)
                self.carry_out(member)

    def crash(self, member: int) -> None:
        """The process is gone; what it sent may still be under way, and part of it is lost."""
        self.cores.pop(member)
        for link in [link for link in self.links if link[0] == member]:
            queue = self.links[link]
            for _ in range(self.random.randint(0, len(queue))):
                queue.pop()
            if not queue:
                del self.links[link]

    def notice(self) -> None:
        for member in self.tree.live:
            if member not in self.cores and len(self.tree.live) > 1:
                self.change(self.tree.with_failed(member))
                return

    def decide(self) -> None:
        """The tree takes the oldest proposal of a member."""
        if self.proposals:
            self.change(self.proposals.popleft()(self.tree))

    def join(self) -> None:
        live = [m for m in self.tree.live if self.tree.is_full(m) and m in self.cores]
        if live and len(self.tree.live) < 6:
            member = self.tree.next_member
            self.change(self.tree.joined(member, 1, self.random.choice(live)))
            self.open(member)

    # --- what must hold ----------------------------------------------------------------------

    def on_delivered(self, member: int, sender: int, number: int, payload: bytes) -> None:
        if self.sent[sender][number - 1] != payload:
            raise Broken(f"{member} delivered another broadcast as {sender}:{number}")
        got = self.delivered.setdefault((member, sender), [])
        if got and number != got[-1] + 1:
            raise Broken(f"{member} delivered {sender}:{number} after {got[-1]}")
        got.append(number)

    def on_complete(self, member: int, number: int) -> None:
        if number <= self.completed.get(member, 0) or number > len(self.sent[member]):
            raise Broken(f"{member} completes {number} after {self.completed.get(member, 0)}")
        self.completed[member] = number
        self.everybody_has(member, number)

    def members(self) -> list[RingCore]:
        """Live members of the tree's view that are there and have caught up."""
        found = (self.cores.get(member) for member in self.tree.live)
        return [core for core in found if core is not None and core.state == MEMBER]

    def everybody_has(self, sender: int, number: int) -> None:
        for core in self.members():
            if sender not in core.view.ring or sender not in self.tree.ring:
                continue
            has = core.senders[sender].last if sender in core.senders else 0
            if has < number:
                raise Broken(f"{core.member} has {sender} up to {has}, not {number}")

    def check(self) -> None:
        for core in self.cores.values():
            for sender, each in core.senders.items():
                if core.state == MEMBER:
                    self.everybody_has(sender, each.complete)

    # --- schedules ---------------------------------------------------------------------------

    def step(self) -> None:
        draw = self.random.random()
        members = list(self.cores)
        member = self.random.choice(members)
        full = [member for member in self.tree.live if self.tree.is_full(member)]
        if draw < 0.12:
            self.broadcast(self.random.choice(self.tree.live or members))
        elif draw < 0.30:
            self.flush(self.random.choice(self.tree.live or members))
        elif draw < 0.80 and self.links:
            link = self.random.choice(list(self.links))
            self.arrive(link)
            if self.random.random() < 0.7:
                self.flush(link[1])
        elif draw < 0.89:
            self.learn(member)
        elif draw < 0.905:
            self.break_link(*self.random.choice([*self.links, (member, member)]))
        elif draw < 0.93:
            self.join()
        elif draw < 0.95:
            self.notice()
        elif draw < 0.985:
            self.decide()
        elif draw < 0.994:
            if len(self.members()) > 2:
                self.crash(member)
        elif len(full) > 2:
            # Declared failed by mistake: it is there, and hears of it late.
            self.change(self.tree.with_failed(member))
        self.check()

    def rest(self) -> None:
        """Everybody learns everything, nothing fails any more."""
        for _ in range(10_000):
            self.notice()
            while self.proposals:
                self.decide()
            for member in list(self.cores):
                while self.known[member] < self.tree.version:
                    self.learn(member)
                self.flush(member)
            if not self.links and not self.proposals and not self.is_unnoticed():
                break
            for link in list(self.links):
                while link in self.links:
                    self.arrive(link)
            self.check()
        else:
            raise Broken("the ring does not come to rest")
        self.check_at_rest()

    def is_unnoticed(self) -> bool:
        """A member that the tree has as live is not there."""
        live = self.tree.live
        return len(live) > 1 and any(member not in self.cores for member in live)

    def check_at_rest(self) -> None:
        if not any(member in self.cores for member in self.tree.live):
            return
        if self.tree.failed:
            raise Broken(f"{sorted(self.tree.failed)} are never erased")
        members = self.members()
        if len(members) != len(self.tree.live):
            raise Broken("a member never catches up")
        for core in members:
            own = len(self.sent.get(core.member, ()))
            if self.completed.get(core.member, 0) != own:
                raise Broken(f"{core.member} completed {self.completed.get(core.member)} of {own}")
            for sender, each in core.senders.items():
                if each.payloads:
                    raise Broken(f"{core.member} keeps broadcasts of {sender} for ever")
        for sender, sent in self.sent.items():
            ends = {
                self.delivered.get((core.member, sender), [self.base[core.member, sender]])[-1]
                for core in members
                if core.member != sender and (core.member, sender) in self.base
            }
            if sender in self.tree.live:
                ends.add(len(sent))
            if len(ends) > 1:
                raise Broken(f"not everybody delivered the same of {sender}: {ends}")
            if ends and ends.pop() < self.completed.get(sender, 0):
                raise Broken(f"completed broadcasts of {sender} are lost")

    def run(self, steps: int) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.join()
            self.rest()
        for _ in range(steps):
            if not self.cores:
                return
            self.step()
        self.rest()
        self.expelled_know()

    def expelled_know(self) -> None:
        for member, core in self.cores.items():
            if member not in self.tree.live and core.state != EXPELLED:
                raise Broken(f"{member} does not know that it was expelled")
