# cython: annotation_typing=False
"""Guaranteed multicast on a ring, for one member of it. Sans-IO.

| state    | becomes  | when                                                               |
| JOINING  | MEMBER   | the left neighbour's catch-up frame came, or a view has it as full |
| any      | EXPELLED | a view in which it is not live                                     |

A broadcast goes around the ring, each member keeping a copy: the *publish round*. The member left
of the sender reports what has arrived, and the sender confirms it: every member has it. The number
up to which that is so goes around as the *acknowledgement round*; each member then forgets its
copies. The member that completes a failed sender's rounds is that sender's home.

Inputs are the `on_…` methods and `broadcast`. Outputs are `effects`, and `take_frame`, which a
shell calls at the end of each round of its loop: everything that changed since goes to the right
neighbour in one frame. Frames of a link arrive in order; a broken link may lose any of them. What
was lost is noticed by the numbers, or when the link stands again (`on_reachable`), and the left
neighbour sends its whole state: a frame like any other, so taking one in twice changes nothing.

Invariants, for each sender along the ring from its home (`check` in production too):
- what members have of it falls: nobody has more than its left neighbour, and nobody more than home;
- what is complete falls as well, and nothing is complete that any member lacks.

Guarantee: members that stay live deliver the same broadcasts of each sender, in the sender's order.
Of a sender that fails in the middle of a broadcast all of them deliver it, or none. There is no
order between senders. A newcomer delivers what comes after the catch-up frame, without gaps.

Source: docs/adr/0116-guaranteed-multicast-on-a-ring.md.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from convoymq.model.errors import PeerError, check
from convoymq.replication.ring.types import (
    AskCatchUp,
    CaughtUp,
    Complete,
    Deliver,
    Effect,
    Erase,
    Expelled,
    Frame,
    Progress,
)
from convoymq.replication.ring.views import RingView

JOINING = 0
MEMBER = 1
EXPELLED = 2


class Broadcasts:
    """Broadcasts of one sender at one member: `complete` < numbers of `payloads` <= `last`."""

    __slots__ = ("complete", "last", "payloads", "sent", "sent_complete", "size")

    def __init__(self, complete: int = 0, last: int = 0) -> None:
        self.complete = complete
        self.last = last
        self.payloads: deque[bytes] = deque()
        self.size = 0
        """Bytes of the payloads."""
        #: What the right neighbour was sent of it.
        self.sent = complete
        self.sent_complete = complete

    def append(self, payload: bytes) -> int:
        """Adds the next broadcast; returns its number."""
        self.payloads.append(payload)
        self.size += len(payload)
        self.last += 1
        return self.last

    def complete_up_to(self, number: int) -> bool:
        """Forgets the broadcasts up to `number`; returns whether that is news."""
        if number <= self.complete:
            return False
        for _ in range(number - self.complete):
            self.size -= len(self.payloads.popleft())
        self.complete = number
        self.sent = max(self.sent, number)
        return True


class RingCore:
    """One member's part in a ring.

    Args:
        member: this member's number.
        view: the newest view that is known; must have the member as a live one.
        frame_bytes_max: payload bytes after which a frame takes no further broadcast; a single one
            may be larger. A catch-up frame is whole: windows of the senders bound it.
    """

    def __init__(self, member: int, view: RingView, frame_bytes_max: int = 1 << 20) -> None:
        check(view.is_live(member), "a member begins in a view that has it")
        self.member = member
        self.view = view
        self.frame_bytes_max = frame_bytes_max
        self.effects: deque[Effect] = deque()
        self.state = JOINING
        self.senders: dict[int, Broadcasts] = {}
        self._changed: dict[int, None] = {}
        #: The next frame to the right is a catch-up frame.
        self._introduce = True
        #: A neighbour of a newer view sent something that this member did not take.
        self._behind = False
        self._enter_view()
        if self.state == JOINING:
            self._ask()

    # --- inputs ------------------------------------------------------------------------------

    def may_broadcast(self) -> bool:
        """Returns whether this member is a full one as far as it knows."""
        return self.state == MEMBER and self.view.is_full(self.member)

    def pending_bytes(self) -> int:
        """Returns the bytes of this member's broadcasts that are not complete."""
        own = self.senders.get(self.member)
        return own.size if own is not None else 0

    def right(self) -> int:
        """Returns the member that gets this one's frames; itself when it is alone."""
        return self._right()

    def broadcast(self, payload: bytes) -> int:
        """Sends to all members; returns the broadcast's number, which a `Complete` covers when
        every member has it."""
        check(self.may_broadcast(), "nobody would complete the broadcasts of a newcomer")
        number = self._broadcasts(self.member).append(payload)
        self._changed[self.member] = None
        if self._is_alone():
            self._complete(self.member, number)
        return number

    def on_view(self, view: RingView) -> None:
        """Takes a view of the tree; older ones are ignored."""
        if view.version <= self.view.version or self.state == EXPELLED:
            return
        left, right = self._left(), self._right()
        self.view = view
        if not view.is_live(self.member):
            self.state = EXPELLED
            self.effects.append(Expelled())
            return
        for sender in [sender for sender in self.senders if sender not in view.ring]:
            del self.senders[sender]
            self._changed.pop(sender, None)
        if self._right() != right or self._behind:
            self._introduce = True
        self._enter_view()
        if self._left() != left or self._behind:
            self._ask()
        self._behind = False

    def on_frame(self, neighbour: int, frame: Frame) -> None:
        """Takes a frame in. One of another member than the left neighbour is of a view that is
        over: what it says comes again by the ring that there is. Raises PeerError, and takes
        nothing of it, when it has more of a sender than the sender's home, which is here."""
        if self.state == EXPELLED:
            return
        if frame.version > self.view.version:
            self._behind = True
            return
        if neighbour != self._left() or (self.state == JOINING and not frame.catch_up):
            return
        for progress in frame.progress:
            self._check_possible(progress)
        if self.state == JOINING:
            self._adopt(frame)
            self.state = MEMBER
            self.effects.append(CaughtUp())
            return
        gaps = 0
        for progress in frame.progress:
            gaps += not self._take(progress)
        if gaps:
            self._ask()

    def on_ask(self, neighbour: int, version: int) -> None:
        """The right neighbour needs this member's state. One of a newer view is answered when that
        view arrives here, if it is the neighbour then."""
        if self.state == EXPELLED:
            return
        if version > self.view.version:
            self._behind = True
        elif neighbour == self._right():
            self._introduce = True

    def on_reachable(self, neighbour: int) -> None:
        """A link to that member stands anew: frames may be lost."""
        if self.state == EXPELLED:
            return
        if neighbour == self._right():
            self._introduce = True
        if neighbour == self._left():
            self._ask()

    # --- output ------------------------------------------------------------------------------

    def take_frame(self) -> tuple[int, Frame] | None:
        """Returns the right neighbour and what it is to be sent now; None when that is nothing.
        To be called until then."""
        if self.state != MEMBER or self._is_alone():
            return None
        introduce, self._introduce = self._introduce, False
        if introduce:
            for sender, broadcasts in self.senders.items():
                broadcasts.sent = broadcasts.complete
                self._changed[sender] = None
        room = self.frame_bytes_max
        progress: list[Progress] = []
        for sender in list(self._changed):
            if room <= 0 and not introduce:
                break
            each = self._next_progress(sender, room, introduce)
            room -= sum(map(len, each.payloads)) if each is not None else 0
            if each is not None:
                progress.append(each)
        if not progress and not introduce:
            return None
        frame = Frame(
            version=self.view.version,
            catch_up=introduce,
            progress=tuple(progress),
        )
        return self._right(), frame

    def check_invariants(self) -> None:
        """Raises InvariantViolated for a state that no inputs lead to."""
        for sender, each in self.senders.items():
            check(sender in self.view.ring or self.state == EXPELLED, "senders are in the ring")
            check(each.complete <= each.last, "nothing is complete that is not here")
            check(len(each.payloads) == each.last - each.complete, "every other one is kept")
            check(each.complete <= each.sent <= each.last, "sent is what is here")

    # --- neighbours --------------------------------------------------------------------------

    def _left(self) -> int:
        return self.view.left_of(self.member)

    def _right(self) -> int:
        return self.view.right_of(self.member)

    def _is_alone(self) -> bool:
        return self._right() == self.member

    def _ask(self) -> None:
        if not self._is_alone():
            self.effects.append(AskCatchUp(self._left(), self.view.version))

    def _enter_view(self) -> None:
        """Draws the conclusions of a view: alone, everything is complete; failed senders whose
        broadcasts are complete can go."""
        if self.state == JOINING and self.view.is_full(self.member):
            self.state = MEMBER
        if self.state != MEMBER:
            return
        if self._is_alone():
            for sender, broadcasts in list(self.senders.items()):
                self._complete(sender, broadcasts.last)
        for sender in self.view.failed:
            self._erase_when_complete(sender)

    # --- broadcasts --------------------------------------------------------------------------

    def _broadcasts(self, sender: int) -> Broadcasts:
        broadcasts = self.senders.get(sender)
        if broadcasts is None:
            broadcasts = self.senders[sender] = Broadcasts()
        return broadcasts

    def _next_progress(self, sender: int, room: int, introduce: bool) -> Progress | None:
        """Returns what the right neighbour does not have of a sender, as far as there is room.
        Payloads end at the member left of the sender's home: it reports their number only."""
        each = self.senders[sender]
        del self._changed[sender]
        if self.view.home_of(sender) == self._right():
            if each.sent == each.last and not introduce:
                return None
            each.sent, each.sent_complete = each.last, each.complete
            return Progress(sender=sender, complete=each.complete, last=each.last)
        if each.sent == each.last and each.sent_complete == each.complete and not introduce:
            return None
        payloads: list[bytes] = []
        for payload in islice(each.payloads, each.sent - each.complete, None):
            if room <= 0 and not introduce:
                self._changed[sender] = None
                break
            payloads.append(payload)
            room -= len(payload)
        each.sent += len(payloads)
        each.sent_complete = each.complete
        return Progress(
            sender=sender, complete=each.complete, last=each.sent, payloads=tuple(payloads)
        )

    def _check_possible(self, progress: Progress) -> None:
        sender = progress.sender
        if sender not in self.view.ring or self.view.home_of(sender) != self.member:
            return
        each = self.senders.get(sender)
        last = each.last if each is not None else 0
        if progress.last > last:
            raise PeerError(f"{progress.last} broadcasts of {sender}, and its home has {last}")

    def _take(self, progress: Progress) -> bool:
        """Takes in what the left neighbour has of a sender; returns whether nothing is missing."""
        sender = progress.sender
        if sender not in self.view.ring:
            return True
        if self.view.home_of(sender) == self.member:
            self._complete(sender, progress.last)
            return True
        each = self._broadcasts(sender)
        first = progress.last - len(progress.payloads) + 1
        if first > each.last + 1:
            return False
        for payload in progress.payloads[each.last + 1 - first :]:
            self.effects.append(Deliver(sender, each.append(payload), payload))
            self._changed[sender] = None
        check(progress.complete <= each.last, "nothing is complete that a member lacks")
        if each.complete_up_to(progress.complete):
            self._changed[sender] = None
        return True

    def _adopt(self, frame: Frame) -> None:
        """Takes the left neighbour's state over, without delivering what it has."""
        for progress in frame.progress:
            if progress.sender not in self.view.ring:
                continue
            each = Broadcasts(progress.last - len(progress.payloads))
            each.last = each.complete
            for payload in progress.payloads:
                each.append(payload)
            each.complete_up_to(progress.complete)
            self.senders[progress.sender] = each

    def _complete(self, sender: int, number: int) -> None:
        """Notes that every member has a sender's broadcasts up to `number`: this member is its
        home."""
        each = self._broadcasts(sender)
        check(number <= each.last, "nobody has what the sender's home lacks")
        if each.complete_up_to(number):
            self._changed[sender] = None
            if sender == self.member:
                self.effects.append(Complete(number))
        self._erase_when_complete(sender)

    def _erase_when_complete(self, sender: int) -> None:
        if sender not in self.view.failed or self.view.home_of(sender) != self.member:
            return
        each = self.senders.get(sender)
        if each is None or each.complete == each.last:
            self.effects.append(Erase(sender))
