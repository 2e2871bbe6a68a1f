"""Keeps the garbage collector away from what queues consist of.

A full collection looks at every object of the process that may be part of a cycle, and nothing else
happens meanwhile: about 100 objects a replica, 150 ms for 4,000 of them (ADR 0026). They live for
long, and what is freed one by one needs no collector: so they are frozen as they come. What is
frozen and in a cycle is given back only by `gc.unfreeze`, which is due when enough replicas are
gone.
"""

from __future__ import annotations

import gc

FREEZE_REPLICAS = 128
"""Replicas that are opened between two freezes, at least: a collection of what is not frozen then
takes some 5 ms."""
THAW_REPLICAS = 512
THAW_SHARE = 4
"""Everything is looked at when so many replicas, and that part of those that are there, are gone
since it was done last."""

YOUNG_OBJECTS = 4_000
"""New objects between two collections of the young ones: Python's 700 are those of a dozen queues,
most of which then still live. A collection of so many takes less than half a millisecond."""


class FrozenHeap:
    """Objects that one process has frozen. The collector is switched off until `begin`."""

    def __init__(self) -> None:
        self._opened = 0
        self._removed = 0

    def begin(self) -> None:
        """The process has started: what it has made so far is no garbage."""
        gc.set_threshold(YOUNG_OBJECTS)
        gc.freeze()
        gc.enable()

    def watch(self, replicas: int, removed: int) -> None:
        """Freezes, or looks at everything, when it is due; called now and then.

        Args:
            replicas: those that are there.
            removed: how many have been removed so far.
        """
        gone = removed - self._removed
        opened = replicas + removed
        if gone >= max(THAW_REPLICAS, replicas // THAW_SHARE):
            gc.unfreeze()
            self._removed = removed
        elif opened - self._opened < FREEZE_REPLICAS:
            return
        self._opened = opened
        gc.collect()
        gc.freeze()
