"""The ring core under drawn schedules, and bugs planted in it, each of which must be found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from convoymq.model.errors import InvariantViolated, PeerError
from convoymq.replication.ring.core import MEMBER, RingCore
from convoymq.replication.ring.types import Deliver, Erase, Frame, Progress
from convoymq.replication.ring.views import RingView, founded
from tests.seeds import seeds
from tests.unit.replication.ring.world import Broken, RingWorld

STEPS = 400
SEEDS_TO_FIND = 200


@pytest.mark.parametrize("first", seeds(100)[::50])
def test_members_that_stay_deliver_the_same(first: int) -> None:
    happened = {"Complete": 0, "Erase": 0, "CaughtUp": 0, "Expelled": 0, "AskCatchUp": 0}
    for seed in range(first, first + 50):
        world = RingWorld(seed)
        world.run(STEPS)
        for name in happened:
            happened[name] += world.happened[name]
    assert all(count > 50 for count in happened.values()), happened


def test_a_neighbour_that_says_more_than_there_is_completes_nothing() -> None:
    view = founded(1, 1).joined(2, 1).caught_up(2)
    core = RingCore(1, view)
    core.broadcast(b"first")
    lie = Frame(
        version=view.version,
        catch_up=False,
        progress=(Progress(sender=2, complete=0, last=1, payloads=(b"own",)),
                  Progress(sender=1, complete=0, last=2)),
    )  # fmt: skip
    with pytest.raises(PeerError, match="its home has 1"):
        core.on_frame(2, lie)
    core.check_invariants()
    assert (core.senders[1].complete, 2 in core.senders) == (0, False)
    core.on_frame(2, replace(lie, progress=(Progress(sender=1, complete=0, last=1),)))
    assert core.senders[1].complete == 1


# --- planted bugs ----------------------------------------------------------------------------


class NoInheritance(RingCore):
    """Nobody completes the rounds of a failed sender."""

    def _take(self, progress: Progress) -> bool:
        if progress.sender in self.view.failed:
            return True
        return super()._take(progress)


class ForgetsEarly(RingCore):
    """A broadcast is complete once the right neighbour was sent it."""

    def take_frame(self) -> tuple[int, Frame] | None:
        taken = super().take_frame()
        if taken is not None and self.member in self.senders:
            self._complete(self.member, self.senders[self.member].sent)
        return taken


class SkipsViews(RingCore):
    """Every other view is not taken."""

    def on_view(self, view: RingView) -> None:
        if view.version % 2:
            super().on_view(view)


class ReordersSenders(RingCore):
    """Of two broadcasts in one frame the newer is taken first."""

    def _take(self, progress: Progress) -> bool:
        return super()._take(replace(progress, payloads=progress.payloads[::-1]))


class ConfirmsBeforeTheSlowest(RingCore):
    """Any report of the left neighbour completes all that was broadcast."""

    def _complete(self, sender: int, number: int) -> None:
        super()._complete(sender, self._broadcasts(sender).last)


class RepeatsAfterCatchUp(RingCore):
    """A catch-up frame is delivered whole, as if nothing of it were there."""

    def _take(self, progress: Progress) -> bool:
        each = self._broadcasts(progress.sender)
        first = progress.last - len(progress.payloads) + 1
        for number in range(first, min(each.last, progress.last) + 1):
            payload = progress.payloads[number - first]
            self.effects.append(Deliver(progress.sender, number, payload))
        return super()._take(progress)


class AdoptsNothing(RingCore):
    """A newcomer takes its neighbour's frame for seen without keeping its state."""

    def _adopt(self, frame: Frame) -> None:
        super()._adopt(replace(frame, progress=()))


class ListensToAnybody(RingCore):
    """Frames of members that are no left neighbours are taken, and newcomers take them, too."""

    def _left(self) -> int:
        return self._anybody or super()._left()

    _anybody = 0

    def on_frame(self, neighbour: int, frame: Frame) -> None:
        self._anybody = neighbour
        super().on_frame(neighbour, frame)
        self._anybody = 0


class ForgetsQuestions(RingCore):
    """A neighbour of a newer view that asks for the state is not answered."""

    def on_ask(self, neighbour: int, version: int) -> None:
        if version <= self.view.version:
            super().on_ask(neighbour, version)


class KeepsStateToItself(RingCore):
    """A new right neighbour is sent only what comes from now on."""

    def on_view(self, view: RingView) -> None:
        introduce = self._introduce
        super().on_view(view)
        self._introduce = introduce


class TrustsLinks(RingCore):
    """A link that stands anew has lost nothing."""

    def on_reachable(self, neighbour: int) -> None:
        return


class ErasesEarly(RingCore):
    """A failed sender is erased when its home knows of the failure."""

    def _erase_when_complete(self, sender: int) -> None:
        if sender in self.view.failed:
            self.effects.append(Erase(sender))


class NeverAcknowledges(RingCore):
    """Members keep their copies for ever: the acknowledgement round does not go on."""

    def _take(self, progress: Progress) -> bool:
        return super()._take(replace(progress, complete=0))


class TakesGaps(RingCore):
    """Broadcasts after a gap are taken as if none were missing."""

    def _take(self, progress: Progress) -> bool:
        each = self._broadcasts(progress.sender)
        last = min(progress.last, each.last + len(progress.payloads))
        return super()._take(replace(progress, last=last, complete=min(progress.complete, last)))


class ForgetsOnReceipt(RingCore):
    """A member forgets what it was sent, although members to its right may lack it."""

    def _take(self, progress: Progress) -> bool:
        taken = super()._take(progress)
        if taken and progress.sender in self.senders:
            each = self.senders[progress.sender]
            each.complete_up_to(each.last)
        return taken


class BroadcastsAsNewcomer(RingCore):
    """A member broadcasts before the tree has it as a full one."""

    def may_broadcast(self) -> bool:
        return self.state == MEMBER


PLANTED: list[type[RingCore]] = [
    NoInheritance,
    ForgetsEarly,
    SkipsViews,
    ReordersSenders,
    ConfirmsBeforeTheSlowest,
    RepeatsAfterCatchUp,
    AdoptsNothing,
    ListensToAnybody,
    ForgetsQuestions,
    KeepsStateToItself,
    TrustsLinks,
    ErasesEarly,
    NeverAcknowledges,
    TakesGaps,
    ForgetsOnReceipt,
    BroadcastsAsNewcomer,
]


def is_found(make: type[RingCore]) -> bool:
    for seed in range(SEEDS_TO_FIND):
        try:
            RingWorld(seed, make).run(STEPS)
        except (Broken, InvariantViolated, PeerError):
            return True
    return False


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_a_planted_bug_is_found(planted: type[RingCore]) -> None:
    assert is_found(planted)


def test_newcomers_that_outlive_their_neighbour_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the views: a newcomer does not go with the member that it takes its state from."""
    real = RingView.with_failed

    def stays(view: RingView, member: int) -> RingView:
        changed = real(view, member)
        if changed is view or member in view.newcomers:
            return changed
        return structs.replace(changed, members=view.members, newcomers=view.newcomers)

    monkeypatch.setattr(RingView, "with_failed", stays)
    assert is_found(RingCore)


def test_newcomers_that_inherit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the views: a newcomer stands right of failed members, and is their home."""
    real = RingView.joined

    def behind_failed(view: RingView, node: int, incarnation: int, left: int) -> RingView:
        changed = real(view, node, incarnation, left)
        ring = list(changed.members)
        place = changed.ring.index(view.next_member)
        while place + 1 < len(ring) and ring[place + 1].number in view.failed:
            ring[place], ring[place + 1] = ring[place + 1], ring[place]
            place += 1
        return structs.replace(changed, members=tuple(ring))

    monkeypatch.setattr(RingView, "joined", behind_failed)
    assert is_found(RingCore)
