"""The referee of a ring: which member has received which broadcasts, by what its sink was called
with.

A member is *present* while the tree has it as live and it has caught up. Whatever is complete, to
its sender or to any other member, every present member has received. A ring that is founded anew
is another one: the former members had all failed.
"""

from __future__ import annotations

from collections.abc import Callable

from convoymq.replication.ring.core import MEMBER, RingCore
from convoymq.replication.ring.views import RingView
from convoymq.shells.ring.shell import RingMember
from convoymq.sim.clients import Workload
from convoymq.sim.delivery_model import InvariantBroken


class Witness:
    """The referee's book about one member."""

    def __init__(self, core: RingCore, is_there: Callable[[], bool]) -> None:
        self.core = core
        self.is_there = is_there
        """Returns whether its process runs."""
        self.received: dict[int, int] = {}
        """Sender -> number up to which it has received the sender's broadcasts, or took them over
        from its neighbour."""
        self.has_begun = False
        self.is_expelled = False


class RingReferee:
    """See the module text.

    Args:
        name: of the queue.
        pending_bytes_max: bytes of one sender's broadcasts that a member may have to keep.
    """

    def __init__(self, name: str, pending_bytes_max: int, workload: Workload) -> None:
        self.name = name
        self.tree: RingView | None = None
        """The view in the tree."""
        self._pending_bytes_max = pending_bytes_max
        self._workload = workload
        self._witnesses: dict[int, Witness] = {}
        self._sent: dict[int, list[bytes]] = {}
        self._completed: dict[int, int] = {}

    def fail(self, text: str) -> None:
        """Raises InvariantBroken."""
        raise InvariantBroken(f"ring {self.name}: {text}")

    # What happens.

    def on_recorded(self, view: RingView) -> None:
        """The tree has a newer view."""
        if self.tree is not None and view.version != self.tree.version + 1:
            self.fail(f"view {view.version} is recorded after {self.tree.version}")
        self.tree = view

    def watch(self, opened: RingMember, is_there: Callable[[], bool]) -> None:
        """A member begins."""
        if opened.member in self._witnesses:
            self.fail(f"member {opened.member} begins twice")
        self._witnesses[opened.member] = Witness(opened.core, is_there)
        self.look(opened.core)

    def on_sent(self, member: int, number: int, payload: bytes) -> None:
        """A member broadcasts."""
        sent = self._sent.setdefault(member, [])
        sent.append(payload)
        if number != len(sent):
            self.fail(f"member {member} numbers broadcast {len(sent)} as {number}")
        self._witnesses[member].received[member] = number
        self._workload.published += 1

    def on_broadcast(self, member: int, sender: int, number: int, payload: bytes) -> None:
        """A member received a broadcast."""
        witness = self._witnesses[member]
        if witness.is_expelled:
            self.fail(f"member {member} receives {sender}:{number} after its end")
        sent = self._sent.get(sender, [])
        if number > len(sent) or sent[number - 1] != payload:
            self.fail(f"member {member} receives another broadcast as {sender}:{number}")
        last = witness.received.get(sender, 0)
        if number != last + 1:
            self.fail(f"member {member} receives {sender}:{number} after {last}")
        witness.received[sender] = number
        self._workload.delivered += 1

    def on_complete(self, member: int, number: int) -> None:
        """A member hears that its broadcasts up to a number are complete."""
        before = self._completed.get(member, 0)
        if not before < number <= len(self._sent.get(member, ())):
            self.fail(f"member {member} completes {number} after {before}")
        self._completed[member] = number
        self._workload.confirmed += number - before
        self._everybody_has(member, number, f"complete to member {member}")

    def on_expelled(self, member: int) -> None:
        """A member hears that the newest view does not have it."""
        self._witnesses[member].is_expelled = True

    def look(self, core: RingCore) -> None:
        """Looks at a member after it took something in."""
        core.check_invariants()
        if core.state != MEMBER:
            return
        witness = self._witnesses[core.member]
        if not witness.has_begun:
            # So far it has what it took over from its neighbour.
            witness.has_begun = True
            witness.received = {sender: each.last for sender, each in core.senders.items()}
        for sender, each in core.senders.items():
            if each.size > self._pending_bytes_max:
                self.fail(f"member {core.member} keeps {each.size} bytes of {sender}")
            self._everybody_has(sender, each.complete, f"forgotten by member {core.member}")

    # What must hold.

    def _present(self) -> list[Witness]:
        live = self.tree.live if self.tree is not None else ()
        found = (self._witnesses.get(member) for member in live)
        return [w for w in found if w is not None and w.is_there() and w.core.state == MEMBER]

    def _everybody_has(self, sender: int, number: int, why: str) -> None:
        assert self.tree is not None
        if not number or sender not in self.tree.ring:
            return
        for witness in self._present():
            if sender not in witness.core.view.ring:
                continue
            has = witness.received.get(sender, 0)
            if has < number:
                self.fail(f"{sender}:{number} is {why}, member {witness.core.member} has {has}")

    def waits_for(self, size: int) -> str:
        """Returns what has to happen before the end. `size`: members that the ring shall have."""
        view = self.tree
        if view is None or view.failed or view.newcomers or len(view.live) != size:
            return f"the members of {self.name}: {view}"
        present = {witness.core.member: witness for witness in self._present()}
        for member in view.live:
            witness = present.get(member)
            if witness is None or witness.core.view.version != view.version:
                return f"member {member} of {self.name}"
            pending = {s: each.last for s, each in witness.core.senders.items() if each.payloads}
            if pending:
                return f"member {member} of {self.name} to forget {pending}"
        return ""

    def check_at_rest(self) -> None:
        """Checks what holds in the end."""
        assert self.tree is not None
        present = self._present()
        for sender, sent in self._sent.items():
            ends = {w.core.member: w.received[sender] for w in present if sender in w.received}
            if sender in self.tree.live and self._completed.get(sender, 0) != len(sent):
                self.fail(f"{self._completed.get(sender, 0)} of {len(sent)} complete to {sender}")
            if len(set(ends.values())) > 1:
                self.fail(f"members have other broadcasts of {sender}: {ends}")
            if ends and min(ends.values()) < self._completed.get(sender, 0):
                self.fail(f"{sender}:{self._completed[sender]} was complete, members have {ends}")
