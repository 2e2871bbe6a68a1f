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

from functools import partial
from typing import NamedTuple

import structlog

from convoymq.metadata.machine import TopicRecord
from convoymq.metadata.topic_settings import WEAK, Settings, lost_after_of, weak_wait_of
from convoymq.model.errors import BrokerError
from convoymq.topics.shell.admin import TopicAdmin
from convoymq.topics.shell.leader_task import LeaderTask, TopicNode

log = structlog.get_logger()

ASK_MS = 1_000
"""Pause between two questions to a partition."""


class Place(NamedTuple):
    """A partition of a topic. `sealed`: from outside; then its time begins anew."""

    vhost: str
    topic: str
    pid: int
    sealed: bool


class WeakLoop(LeaderTask):
    """See the module text."""

    def __init__(self, own: TopicNode, admin: TopicAdmin) -> None:
        super().__init__(own)
        self._admin = admin
        self._asked_ms = -ASK_MS
        self._heard_ms: dict[Place, int] = {}
        """Times at which partitions answered last, or were asked first."""
        self._acting: set[Place] = set()

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
        seen: set[Place] = set()
        for record in self._records():
            if record.mode == WEAK:
                seen |= self._look_at(record, self._settings_of(record), now_ms)
        for place in self._heard_ms.keys() - seen:
            del self._heard_ms[place]

    def _begin_term(self) -> None:
        super()._begin_term()
        self._heard_ms.clear()
        self._asked_ms = self._clock.monotonic_ms()

    def _end_term(self) -> None:
        self._heard_ms.clear()

    def _look_at(self, record: TopicRecord, settings: Settings, now_ms: int) -> set[Place]:
        state = record.state
        places = {Place(record.vhost, record.name, pid, False) for pid in state.route.pids}
        places |= {Place(record.vhost, record.name, pid, True) for pid in state.unknown_ends()}
        for place in places:
            heard_ms = self._heard_ms.setdefault(place, now_ms)
            self._ask(place)
            wait_ms = lost_after_of(settings) if place.sealed else weak_wait_of(settings)
            if now_ms >= heard_ms + wait_ms and place not in self._acting:
                self._acting.add(place)
                self._spawn(self._go_on_without(place))
        return places

    def _ask(self, place: Place) -> None:
        queue = self._partitions.find(*place[:3])
        if queue is None:
            return

        def answered(found: bool | None, error: BrokerError | None) -> None:
            if found is not None and place in self._heard_ms:
                self._heard_ms[place] = self._clock.monotonic_ms()

        # Of no group: it only tells whether somebody leads the partition.
        self._once(place, partial(queue.drained, "", 0), answered)

    async def _go_on_without(self, place: Place) -> None:
        act = self._admin.declare_lost if place.sealed else self._admin.seal
        try:
            await act(*place[:3])
        except BrokerError as error:
            # It answers after all, a change runs, or too few nodes are there: it is tried again.
            log.debug("topics.partition_not_given_up", reason=error.text, **place._asdict())
        finally:
            self._acting.discard(place)
