"""Durations of the phases of changes, topic by topic, as this node has seen them.

Every node applies the commands of the tree, so each sees each phase begin; it measures by its own
monotonic clock. A node that starts late, or gets a snapshot of the tree in place of commands, knows
nothing of what went before. Metrics count on the node that drives changes alone
(`measures.ChangePhases`), so that sums over nodes are right.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from convoymq.metadata.machine import Change, ChangeKind, MetadataMachine, TopicRecord
from convoymq.metadata.topics import find_topic
from convoymq.model.clock import Clock
from convoymq.topics.rules.changes import FINISHED, Phase
from convoymq.topics.rules.changes import Change as TopicChange
from convoymq.topics.shell.rows import ChangeTimesRow

CHANGES_MAX = 50
"""Changes of one topic that are remembered."""
TIMED = tuple(phase for phase in Phase if phase not in FINISHED)
"""The phases that take time, in their order."""


@dataclass(slots=True)
class _Times:
    """One change. `since_ms`: begin of the present phase; negative: it was not seen."""

    change_id: str
    kind: str
    phase: Phase
    since_ms: int
    phases_ms: dict[Phase, int] = field(default_factory=dict)

    def row(self) -> ChangeTimesRow:
        return {
            "change_id": self.change_id,
            "kind": self.kind,
            "phase": self.phase.value,
            "phases_ms": {phase.value: ms for phase, ms in self.phases_ms.items()},
        }


@dataclass(slots=True)
class _Topic:
    created_ms: int
    """Another topic of the same name has another one."""
    ended: deque[_Times] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    running: _Times | None = None


class ChangeTimes:
    """See the module text. One per node."""

    def __init__(self, tree: MetadataMachine, clock: Clock) -> None:
        self._tree = tree
        self._clock = clock
        self._topics: dict[tuple[str, str], _Topic] = {}

    def rows(self, vhost: str, name: str) -> list[ChangeTimesRow]:
        """Returns the last changes of a topic, the oldest first; one that runs is the last."""
        topic = self._topics.get((vhost, name))
        if topic is None:
            return []
        running = () if topic.running is None else (topic.running,)
        return [each.row() for each in (*topic.ended, *running)]

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        if change.kind is ChangeKind.RESTORED:
            self._restored()
        elif change.kind is ChangeKind.TOPIC:
            record = find_topic(self._tree, change.vhost, change.topic)
            if record is None:
                self._topics.pop((change.vhost, change.topic), None)
            else:
                self._look(record)

    def _restored(self) -> None:
        """Nobody saw what happened up to the snapshot: neither ends nor begins of phases."""
        for key, topic in list(self._topics.items()):
            topic.running = None
            record = find_topic(self._tree, *key)
            if record is None or record.created_ms != topic.created_ms:
                del self._topics[key]

    def _look(self, record: TopicRecord) -> None:
        change = record.state.change
        key = record.vhost, record.name
        topic = self._topics.get(key)
        if topic is not None and topic.created_ms != record.created_ms:
            topic = None
        if topic is None:
            self._topics[key] = topic = _Topic(record.created_ms)
        if change is None:
            return
        now_ms = self._clock.monotonic_ms()
        running = topic.running
        if running is None or running.change_id != change.change_id:
            topic.running = _begun(change, now_ms)
        elif running.phase is not change.phase:
            _go_on(running, change, now_ms)
            if change.is_finished:
                topic.running = None
                if running.phases_ms:
                    topic.ended.append(running)


def _begun(change: TopicChange, now_ms: int) -> _Times | None:
    """Returns a change that is seen for the first time. Later phases have begun before."""
    if change.is_finished:
        return None
    since_ms = now_ms if change.phase is Phase.PREPARED else -1
    return _Times(change.change_id, change.kind.value, change.phase, since_ms)


def _go_on(times: _Times, change: TopicChange, now_ms: int) -> None:
    if times.since_ms >= 0:
        times.phases_ms[times.phase] = max(0, now_ms - times.since_ms)
    if change.phase is not Phase.ABORTED:
        # Phases of one batch of commands are seen at once, at its end.
        at, to = TIMED.index(times.phase), _place(change.phase)
        times.phases_ms.update(dict.fromkeys(TIMED[at + 1 : to], 0))
    # A merge whose sources do not all answer becomes another kind.
    times.kind, times.phase, times.since_ms = change.kind.value, change.phase, now_ms


def _place(phase: Phase) -> int:
    return TIMED.index(phase) if phase in TIMED else len(TIMED)
