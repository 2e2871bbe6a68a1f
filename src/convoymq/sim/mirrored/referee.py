"""The referee of a mirrored queue: what each of its masters had, and what clients were told.

A *life* is one master, from its opening to its end. Two may run at a time: one that was cut off
does not know that another has taken over. What is asserted:

- a message that was confirmed is in the newest life, or has left the queue, unless a master took
  over that was not synchronised, which only policies allow, or it is transient and all were
  restarted;
- a message that was confirmed does not come into the queue again;
- a life has nothing that was not published, and nothing twice, but for a message that was not
  confirmed when all were restarted, or when a master took over that was not synchronised: nobody
  may know any more that it is there;
- within a life a message is in one pair of hands at most, messages that were never given out are
  given in the order in which they came, and a message that nobody holds leaves by a purge only;
- a message comes to channels once at most as one that was never given out;
- mirrors have no message that their master lacks, where both are at rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from convoymq.kernels.batch import record
from convoymq.queues.classic.machine import DELIVER, GOT, PURGED, ClassicMachine
from convoymq.queues.classic.runs import Block, Run
from convoymq.queues.mirrored.master import MasterQueue
from convoymq.replication.ring.views import RingView
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.records import identity_of


@dataclass(slots=True)
class Life:
    """One master's time."""

    number: int
    """Of the ring's member; 0 = the queue had no ring yet."""
    had: set[bytes] = field(default_factory=set)
    """Messages that were in the queue at its opening, or came since."""
    alive: dict[int, bytes] = field(default_factory=dict)
    held: set[bytes] = field(default_factory=set)
    given: dict[bytes, int] = field(default_factory=dict)
    """Message -> number of returns before its last delivery."""
    last_fresh: int = -1


class MirroredReferee:
    """The book of one queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.view: RingView | None = None
        """The view in the tree."""
        self._sent: dict[bytes, bool] = {}
        """Message -> whether it was confirmed."""
        self._transient: set[bytes] = set()
        self._founders: set[int] = {0, 1}
        """Members that were opened from the files of a former run."""
        self._unsynchronised: set[int] = set()
        """Masters that had not everything."""
        self._gone: set[bytes] = set()
        """Messages that have left in some life."""
        self._twice: set[bytes] = set()
        """Messages that came again after a restart."""
        self._received: set[bytes] = set()
        """Messages that came to a channel as new ones."""
        self._given_up: set[bytes] = set()
        """Messages that an unsynchronised master did not have."""
        self._informed: dict[int, bool] = {0: True}
        """Member -> whether it had everything when it became the master."""
        self._since: dict[int, int] = {}
        """Member -> version of the view that made it the master."""
        self.masters = 0
        self.newest: Life | None = None
        self.queue: MasterQueue | None = None
        """The newest master."""

    def fail(self, text: str) -> None:
        """Stops the run."""
        raise InvariantBroken(f"mirrored queue {self.name}: {text}")

    # The tree.

    def on_recorded(self, view: RingView) -> None:
        """The tree has the next view."""
        before = self.view
        self.view = view
        if before is not None and before.master != view.master:
            if view.master not in before.ring:
                # It has what the last one had, which may never have been opened.
                self._founders.add(view.master)
                is_whole = self._informed[before.master]
            else:
                is_whole = view.master in before.synchronised
                if before.synchronised and not is_whole:
                    self.fail(f"{view.master} follows, and {before.synchronised} have all")
                if not is_whole:
                    self._unsynchronised.add(view.master)
            self._informed[view.master] = is_whole
            self._since[view.master] = view.version
        elif before is None:
            # The queue goes on with a ring.
            self._informed[view.master] = True
            self._since[view.master] = view.version
            if self.newest is not None:
                self.newest.number = view.master

    # What channels say.

    def on_sent(self, identity: bytes, *, persistent: bool) -> None:
        """A channel publishes a message."""
        self._sent[identity] = False
        if not persistent:
            self._transient.add(identity)

    def on_confirmed(self, identity: bytes) -> None:
        """A channel was told that a message is safe."""
        self._sent[identity] = True
        if self.newest is None or not self._has(self.newest, identity):
            self.fail(f"{identity.hex()} is confirmed, and the newest master never had it")

    def on_received(self, identity: bytes, acquired: int) -> None:
        """A channel got a message, which was handed out `acquired` times before."""
        if acquired:
            return
        if identity in self._received:
            self.fail(f"{identity.hex()} is received again, as if it were new")
        self._received.add(identity)

    def _has(self, life: Life, identity: bytes) -> bool:
        return identity in life.had or identity in self._gone or identity in self._given_up

    # Lives.

    def watch(self, queue: MasterQueue, number: int) -> None:
        """A master was opened: compares what it has, and follows it."""
        life = Life(number)
        machine = queue.machine
        for run in machine.backing.walk(machine.backing.level_max, 0):
            data, command = machine.body_of(run.block)
            for i in range(run.count):
                self._on_found(
                    life, run.position + i, identity_of(record(data, command, run.first + i))
                )
        if self.newest is None or self._began(number) >= self._began(self.newest.number):
            self.masters += 1
            self._compare(life)
            self.newest, self.queue = life, queue
        self._follow(queue, machine, life)

    def _began(self, number: int) -> int:
        return self._since.get(number, 0)

    def _on_found(self, life: Life, position: int, identity: bytes) -> None:
        if identity not in self._sent:
            self.fail(f"master {life.number} has {identity.hex()}, which nobody published")
        is_known = identity in life.had or position in life.alive
        if is_known and identity not in self._twice:
            self.fail(f"master {life.number} has {identity.hex()} at {position} twice")
        life.had.add(identity)
        life.alive[position] = identity

    def _compare(self, life: Life) -> None:
        missing = [
            identity
            for identity, confirmed in self._sent.items()
            if confirmed and not self._has(life, identity)
        ]
        if life.number in self._founders:
            self._given_up.update(self._transient.intersection(missing))
            missing = [identity for identity in missing if identity not in self._given_up]
        if missing and self._informed.get(life.number, False):
            self.fail(f"master {life.number} lacks {len(missing)} confirmed messages:"
                      f" {[each.hex() for each in missing[:5]]}")  # fmt: skip
        self._given_up.update(missing)
        # What it lacks, nobody asks it for again.
        self._informed[life.number] = True

    def _follow(self, queue: MasterQueue, machine: ClassicMachine, life: Life) -> None:
        add, give_back, carry_out = machine._add, machine.give_back, queue._carry_out

        def added(block: Block) -> None:
            assert block.data is not None
            for i in range(block.count):
                identity = identity_of(record(block.data, block.command, i))
                may_lack = life.number in self._founders or life.number in self._unsynchronised
                # One that was cut off may hear of it late, and confirms nothing any more.
                is_again = self._sent[identity] and life is self.newest
                if is_again or (identity in life.had and not may_lack):
                    self.fail(f"{identity.hex()} comes to master {life.number} again")
                if identity in life.had:
                    self._twice.add(identity)
                life.had.add(identity)
                life.alive[block.position + i] = identity
            add(block)

        def given_back(runs: list[Run]) -> None:
            for run in runs:
                for position in range(run.position, run.position + run.count):
                    life.held.discard(life.alive[position])
            give_back(runs)

        def carried_out() -> None:
            self._look(machine, life)
            carry_out()

        machine._add = added  # type: ignore[method-assign]
        machine.give_back = given_back  # type: ignore[method-assign]
        queue._carry_out = carried_out  # type: ignore[method-assign]

    def _look(self, machine: ClassicMachine, life: Life) -> None:
        purged = False
        for effect in machine.effects:
            if effect[0] == DELIVER:
                _, _, _, _, (data, command), first, count, acquired = effect
                for i in range(count):
                    self._on_given(life, identity_of(record(data, command, first + i)), acquired)
            elif effect[0] == GOT and effect[2] is not None:
                _, _, (data, command), first, _, acquired, _ = effect
                self._on_given(life, identity_of(record(data, command, first)), acquired)
            purged = purged or effect[0] == PURGED
        settled = machine.settled
        for first, last in zip(settled[::2], settled[1::2], strict=True):
            for position in range(first, last + 1):
                identity = life.alive.pop(position, None)
                if identity is None:
                    if not purged:
                        self.fail(f"position {position} goes, and nothing is there")
                    # A span that is purged names all positions from its first to its last.
                    continue
                if identity not in life.held and identity not in self._twice and not purged:
                    self.fail(f"{identity.hex()} goes, and nobody had it")
                life.held.discard(identity)
                self._gone.add(identity)
        here = machine.ready_count + machine.unsettled_count + machine.leaving.count
        if here != len(life.alive):
            self.fail(f"{here} messages are there, the book has {len(life.alive)}")

    def _on_given(self, life: Life, identity: bytes, acquired: int) -> None:
        if identity in self._twice:
            return
        position = next((p for p, each in life.alive.items() if each == identity), None)
        if position is None:
            self.fail(f"{identity.hex()} is given, and is gone")
            return
        if identity in life.held and acquired <= life.given[identity]:
            self.fail(f"{identity.hex()} is given to a second one")
        if not acquired:
            if position <= life.last_fresh:
                self.fail(f"{identity.hex()} at {position} is given behind {life.last_fresh}")
            life.last_fresh = position
        life.held.add(identity)
        life.given[identity] = acquired

    # The end.

    def waits_for(self, size: int) -> str:
        """Returns what has to happen before the end. `size`: copies that the queue shall have."""
        view = self.view
        if view is None or view.failed or view.newcomers or len(view.live) != size:
            return f"the members of {self.name}: {view}"
        if set(view.synchronised) != set(view.live):
            return f"mirrors of {self.name} to be synchronised: {view}"
        if self.newest is None or self.newest.number != view.master:
            return f"master {view.master} of {self.name}"
        return f"{len(self.newest.alive)} messages of {self.name}" if self.newest.alive else ""
