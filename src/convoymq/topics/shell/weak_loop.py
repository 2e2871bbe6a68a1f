"""Partitions of weak topics that nobody answers for, on the node that leads the metadata group.

What an operator does in a strict topic is done here, after a time:

    takes messages    sealed from outside (`TopicAdmin.seal`, ADR 0074) after `weak-wait`: its range
                      goes on in a new partition, groups skip it, and read it late when it is back
    so sealed         declared lost (`TopicAdmin.declare_lost`) after `lost-after`: groups have a
                      record, and what comes back is deleted

Partitions that were closed before they fell silent are never lost: groups skip them, and read them
late whenever they come back (`topics.rules.coordinator`).

A new leader of the metadata begins to wait anew. Partitions of strict topics are not asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from convoymq.metadata.machine import TopicRecord
from convoymq.metadata.topic_settings import WEAK, Settings, lost_after_of, weak_wait_of
from convoymq.model.errors import BrokerError
from convoymq.topics.shell.admin import TopicAdmin
from convoymq.topics.shell.leader_task import LeaderTask, Place, TopicNode

log = structlog.get_logger()

ASK_MS = 1_000
"""Pause between two questions to a partition."""
Waited = tuple[Place, bool]
"""A partition, and whether it is sealed from outside: then its time begins anew."""


class WeakLoop(LeaderTask):
    """See the module text."""

    def __init__(self, own: TopicNode, admin: TopicAdmin) -> None:
        super().__init__(own)
        self._admin = admin
        self._asked_ms = -ASK_MS
        self._heard_ms: dict[Waited, int] = {}
        """Times at which partitions answered last, or were asked first."""

    def tick(self) -> None:
        """Asks, and gives up what was silent for too long; to be called a few times a second."""
        if not self._follow_term():
            return
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._asked_ms + ASK_MS:
            return
        if now_ms > self._asked_ms + 4 * ASK_MS:
            # The node stood still, and heard nobody meanwhile.
            self._heard_ms.clear()
        self._asked_ms = now_ms
        seen: set[Waited] = set()
        for record in self._records():
            if record.mode == WEAK:
                seen |= self._look_at(record, self._settings_of(record), now_ms)
        for each in self._heard_ms.keys() - seen:
            del self._heard_ms[each]

    def _begin_term(self) -> None:
        super()._begin_term()
        self._heard_ms.clear()
        self._asked_ms = self._clock.monotonic_ms()

    def _end_term(self) -> None:
        super()._end_term()
        self._heard_ms.clear()

    def _look_at(self, record: TopicRecord, settings: Settings, now_ms: int) -> set[Waited]:
        state = record.state
        waited = {(Place(record.vhost, record.name, pid), False) for pid in state.route.pids}
        waited |= {(Place(record.vhost, record.name, pid), True) for pid in state.unknown_ends()}
        for place, sealed in waited:
            heard_ms = self._heard_ms.setdefault((place, sealed), now_ms)
            self._ask(place, sealed)
            wait_ms = lost_after_of(settings) if sealed else weak_wait_of(settings)
            if now_ms >= heard_ms + wait_ms:
                act = self._admin.declare_lost if sealed else self._admin.seal
                self._spawn_once((place, act), partial(self._go_on_without, place, act))
        return waited

    def _ask(self, place: Place, sealed: bool) -> None:
        queue = self._partitions.find(*place)
        if queue is None:
            return

        def answered(found: bool | None, error: BrokerError | None) -> None:
            if found is not None and (place, sealed) in self._heard_ms:
                self._heard_ms[place, sealed] = self._clock.monotonic_ms()

        # Of no group: it only tells whether somebody leads the partition.
        self._once((place, sealed), partial(queue.drained, "", 0), answered)

    async def _go_on_without(
        self, place: Place, act: Callable[[str, str, int], Awaitable[object]]
    ) -> None:
        try:
            await act(*place)
        except BrokerError as error:
            # It answers after all, a change runs, or too few nodes are there: it is tried again.
            log.debug("topics.partition_not_given_up", reason=error.text, **place._asdict())
