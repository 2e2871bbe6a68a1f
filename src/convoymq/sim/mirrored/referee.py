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

from convoymq.queues.classic.runs import Block
from convoymq.queues.mirrored.master import MasterQueue
from convoymq.replication.ring.views import RingView
from convoymq.sim.clients import Traits
from convoymq.sim.hosted.book import Book, Given, QueueReferee


class Life(Book):
    """One master's time."""

    referee: MirroredReferee

    def __init__(self, referee: MirroredReferee, number: int) -> None:
        super().__init__(referee)
        self.number = number
        """Of the ring's member; 0 = the queue had no ring yet."""
        self.had: set[bytes] = set()
        """Messages that were in the queue at its opening, or came since."""
        self._last_fresh = -1

    def begin(self, queue: MasterQueue) -> None:
        """Takes what an opened master has, and follows it."""
        self._queue = queue
        for found in self.found_in(queue.machine):
            identity, position = found.identity, found.position
            self.referee.on_found(self, identity, position)
            self.put(identity, position)
            self.had.add(identity)
        self.follow(queue)

    def on_added(self, identity: bytes, position: int, block: Block) -> None:
        """See `Book`."""
        self.referee.on_added(self, identity)
        self.had.add(identity)

    def on_given(self, given: Given, now_ms: int) -> None:
        """See `Book`."""
        identity = given.identity
        if self._queue.member is None or self._queue.log.lacks_records:
            # Without a ring a queue does not say before what it hands out, and a disk that refuses
            # to write does not keep consumers waiting.
            self.referee.unsaid.add(identity)
        if identity in self.referee.twice:
            return
        super().on_given(given, now_ms)
        position = self.positions[identity]
        if not given.acquired:
            if position <= self._last_fresh:
                self.referee.fail(
                    f"{identity.hex()} at {position} is given behind {self._last_fresh}"
                )
            self._last_fresh = position

    def on_gone(self, identity: bytes, position: int, now_ms: int, *, purged: bool) -> None:
        """See `Book`."""
        may_go = purged or identity in self.referee.twice or self.outcomes.is_avoided(identity)
        if identity not in self.held and not may_go:
            self.referee.fail(f"{identity.hex()} goes, and nobody had it")
        self.referee.gone.add(identity)


class MirroredReferee(QueueReferee):
    """The book of one queue. `size`: copies that it shall have."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name)
        self.size = size
        self.view: RingView | None = None
        """The view in the tree."""
        self.sent: dict[bytes, bool] = {}
        """Message -> whether it was confirmed."""
        self._transient: set[bytes] = set()
        self._founders: set[int] = {0, 1}
        """Members that were opened from the files of a former run."""
        self._unsynchronised: set[int] = set()
        """Masters that had not everything."""
        self.gone: set[bytes] = set()
        """Messages that have left in some life."""
        self.twice: set[bytes] = set()
        """Messages that came again after a restart."""
        self.unsaid: set[bytes] = set()
        """Messages that were handed out, and no disk may say it."""
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

    def on_forced(self) -> None:
        """An operator lets the queue go on with a copy that may lack messages."""
        if self.view is not None:
            self._informed[self.view.master] = False

    # What channels say.

    def on_sent(self, identity: bytes, traits: Traits) -> None:
        """See `QueueReferee`."""
        self.sent[identity] = False
        if not traits.persistent:
            self._transient.add(identity)

    def on_confirmed(self, identity: bytes) -> None:
        """See `QueueReferee`."""
        self.sent[identity] = True
        if self.newest is None or not self._has(self.newest, identity):
            self.fail(f"{identity.hex()} is confirmed, and the newest master never had it")

    def on_disk_error(self) -> None:
        """A master's disk refused to write: it may not have what was about to be handed out."""
        if self.newest is not None:
            self.unsaid.update(self.newest.given)

    def on_crashed(self) -> None:
        """A master was stopped, and is opened anew from its files: transient messages are gone."""
        if self.newest is not None:
            self._founders.add(self.newest.number)

    def on_received(self, receiver: tuple[int, int, int], identity: bytes, acquired: int) -> None:
        """See `QueueReferee`."""
        if acquired or identity in self.unsaid:
            return
        if identity in self._received:
            self.fail(f"{identity.hex()} is received again, as if it were new")
        self._received.add(identity)

    def _has(self, life: Life, identity: bytes) -> bool:
        return identity in life.had or identity in self.gone or identity in self._given_up

    # Lives.

    def watch(self, queue: MasterQueue) -> None:
        """A master was opened: compares what it has, and follows it."""
        if self.queue is None or self.queue.member is None:
            # A plain queue lost its consumers with its node, and what the disk had not got yet.
            self._received.clear()
        view = queue.record.view
        life = Life(self, view.master if view else 0)
        life.begin(queue)
        if self.newest is None or self._began(life.number) >= self._began(self.newest.number):
            self.masters += 1
            self._compare(life)
            self.newest, self.queue = life, queue

    def _began(self, number: int) -> int:
        return self._since.get(number, 0)

    def on_found(self, life: Life, identity: bytes, position: int) -> None:
        """A master has a message at its opening."""
        if identity not in self.sent:
            self.fail(f"master {life.number} has {identity.hex()}, which nobody published")
        is_known = identity in life.had or position in life.alive
        if is_known and identity not in self.twice:
            self.fail(f"master {life.number} has {identity.hex()} at {position} twice")

    def on_added(self, life: Life, identity: bytes) -> None:
        """A message comes to a master."""
        may_lack = life.number in self._founders or life.number in self._unsynchronised
        # One that was cut off may hear of it late, and confirms nothing any more.
        is_again = self.sent[identity] and life is self.newest
        if is_again or (identity in life.had and not may_lack):
            self.fail(f"{identity.hex()} comes to master {life.number} again")
        if identity in life.had:
            self.twice.add(identity)

    def _compare(self, life: Life) -> None:
        missing = [
            identity
            for identity, confirmed in self.sent.items()
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

    # The end.

    def waits_for(self) -> str:
        """See `QueueReferee`."""
        view = self.view
        if view is None or view.failed or view.newcomers or len(view.live) != self.size:
            return f"the members of {self.name}: {view}"
        if set(view.synchronised) != set(view.live):
            return f"mirrors of {self.name} to be synchronised: {view}"
        if self.newest is None or self.newest.number != view.master:
            return f"master {view.master} of {self.name}"
        return f"{len(self.newest.alive)} messages of {self.name}" if self.newest.alive else ""
