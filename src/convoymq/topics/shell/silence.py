"""Has partitions sealed from outside that were without a majority for as long as their topic bears
(`seal-after`). Acts on the node that leads the metadata group.

A partition counts as silent while this node sees no majority of its members, or no leader. Whether
it really does not answer is asked before it is given up (`TopicAdmin.seal`). Topics without the
setting cost nothing.

Source: ordered topics, section 10.3; ADR 0074.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.machine import Change, ChangeKind, TopicRecord
from convoymq.metadata.topic_settings import SEAL_AFTER, duration_of
from convoymq.model.errors import BrokerError
from convoymq.topics.shell.leader_task import LeaderTask, Place, TopicKey, TopicNode

log = structlog.get_logger()

LOOK_MS = 1_000


class SilentPartitions(LeaderTask):
    """See the module text.

    Args:
        seal: `TopicAdmin.seal`.
    """

    def __init__(
        self,
        own: TopicNode,
        nodes: ClusterNodes,
        seal: Callable[[str, str, int], Awaitable[object]],
    ) -> None:
        super().__init__(own)
        self._nodes = nodes
        self._seal = seal
        self._limits_ms: dict[TopicKey, int] | None = None
        """Of the topics that have the setting; None: to be looked up."""
        self._since_ms: dict[Place, int] = {}
        self._looked_ms = 0

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        if change.kind in (ChangeKind.TOPIC, ChangeKind.POLICIES, ChangeKind.RESTORED):
            self._limits_ms = None

    def tick(self) -> None:
        """Looks for silent partitions when it is time; to be called a few times a second."""
        if not self._follow_term():
            return
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._looked_ms + LOOK_MS:
            return
        self._looked_ms = now_ms
        if self._limits_ms is None:
            self._limits_ms = self._look_up()
        silent: dict[Place, int] = {}
        for key, limit_ms in self._limits_ms.items():
            record = self._record(key)
            for pid in () if record is None else record.state.route.pids:
                place = Place(*key, pid)
                assert record is not None
                if not self._is_silent(record, pid):
                    continue
                silent[place] = self._since_ms.get(place, now_ms)
                if now_ms >= silent[place] + limit_ms:
                    self._spawn_once(place, partial(self._give_up, place))
        self._since_ms = silent

    def _end_term(self) -> None:
        super()._end_term()
        self._since_ms.clear()

    def _look_up(self) -> dict[TopicKey, int]:
        found: dict[TopicKey, int] = {}
        for record in self._records():
            limit_ms = duration_of(self._settings_of(record), SEAL_AFTER)
            if limit_ms is not None:
                found[TopicKey(record.vhost, record.name)] = limit_ms
        return found

    def _is_silent(self, record: TopicRecord, pid: int) -> bool:
        members = self._partitions.members(record, pid)
        if 2 * sum(map(self._nodes.is_up, members)) <= len(members):
            return True
        queue = self._partitions.find(record.vhost, record.name, pid)
        return queue is not None and queue.leader is None

    async def _give_up(self, place: Place) -> None:
        try:
            await self._seal(*place)
        except BrokerError as error:
            # It answers, or another change runs: its time begins anew.
            log.debug("topics.partition_not_given_up", reason=error.text, **place._asdict())
            self._since_ms.pop(place, None)
