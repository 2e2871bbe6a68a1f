"""What is frozen is not looked at, and what is gone of it is given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from convoymq.node.frozen_heap import (
    FREEZE_REPLICAS,
    THAW_REPLICAS,
    THAW_SHARE,
    YOUNG_OBJECTS,
    FrozenHeap,
)


class Part:
    """A replica, its machine, its queue: they know each other."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def heap() -> Iterator[FrozenHeap]:
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    before = gc.get_threshold()
    made = FrozenHeap()
    made.begin()
    yield made
    gc.set_threshold(*before)
    gc.unfreeze()
    if was_frozen:
        gc.collect()
        gc.freeze()


def test_what_the_start_has_made_is_frozen(heap: FrozenHeap) -> None:
    assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_threshold()[0] == YOUNG_OBJECTS


def test_replicas_are_frozen_as_they_come(heap: FrozenHeap) -> None:
    before = gc.get_freeze_count()
    parts = [Part() for _ in range(1000)]
    heap.watch(FREEZE_REPLICAS - 1, 0)
    assert gc.get_freeze_count() <= before
    heap.watch(FREEZE_REPLICAS, 0)
    frozen = gc.get_freeze_count()
    assert frozen >= before + len(parts)
    more = [Part() for _ in range(1000)]
    heap.watch(FREEZE_REPLICAS + 10, 0)
    # Somebody else's frozen objects may go meanwhile; none is added.
    assert gc.get_freeze_count() <= frozen
    frozen = gc.get_freeze_count()
    heap.watch(2 * FREEZE_REPLICAS, 0)
    assert gc.get_freeze_count() >= frozen + len(more)


def test_garbage_is_not_frozen(heap: FrozenHeap) -> None:
    gone = weakref.ref(Part())
    heap.watch(FREEZE_REPLICAS, 0)
    assert gone() is None


def test_replicas_in_place_of_others_are_frozen_too(heap: FrozenHeap) -> None:
    heap.watch(FREEZE_REPLICAS, 0)
    before = gc.get_freeze_count()
    parts = [Part() for _ in range(1000)]
    heap.watch(FREEZE_REPLICAS, FREEZE_REPLICAS)
    assert gc.get_freeze_count() >= before + len(parts) / 2


@pytest.mark.parametrize("left", [0, THAW_SHARE * THAW_REPLICAS])
def test_what_is_gone_of_the_frozen_is_given_back(heap: FrozenHeap, left: int) -> None:
    part: Part | None = Part()
    gone = weakref.ref(part)
    heap.watch(left + THAW_REPLICAS, 0)
    part = None
    heap.watch(left + 1, THAW_REPLICAS - 1)
    assert gone() is not None
    heap.watch(left, THAW_REPLICAS)
    assert gone() is None
    assert gc.get_freeze_count() > 0
    again = weakref.ref(Part())
    heap.watch(left + FREEZE_REPLICAS, THAW_REPLICAS)
    assert again() is None


def test_of_many_replicas_a_share_has_to_be_gone(heap: FrozenHeap) -> None:
    many = 4 * THAW_SHARE * THAW_REPLICAS
    part: Part | None = Part()
    gone = weakref.ref(part)
    heap.watch(many, 0)
    part = None
    heap.watch(many - THAW_REPLICAS, THAW_REPLICAS)
    assert gone() is not None
    heap.watch(many - 2 * many // THAW_SHARE, 2 * many // THAW_SHARE)
    assert gone() is None
