"""Retention of topics, on the node that leads the metadata group (ADR 0068).

`topics.rules.retention` decides; here are the time, what partitions say, and the proposals. A topic
is looked at when the tree has changed it, when something of it is due, and, while it waits for a
number of bytes, every few seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import structlog

from convoymq.metadata.commands import ChangeGroup, ChangeTopic, Command
from convoymq.metadata.machine import ChangeKind, TopicRecord
from convoymq.metadata.topic_codec import pack_command
from convoymq.metadata.topic_settings import GROUP_TTL, MAX_AGE, Settings, duration_of, length_of
from convoymq.model.errors import BrokerError
from convoymq.topics.machine.reads import PartitionDescription
from convoymq.topics.rules import retention
from convoymq.topics.rules.commands import ExpireProducers
from convoymq.topics.rules.group import Expire, GroupState
from convoymq.topics.rules.lineage import FIRST_USER_OFFSET, PartitionState
from convoymq.topics.rules.retention import Limits, Stored, Verdict
from convoymq.topics.rules.topic import Delete, Retire, TopicCommand
from convoymq.topics.shell.leader_task import LeaderTask, TopicKey, TopicNode

log = structlog.get_logger()

RETRY_MS = 1_000
"""After a proposal that was not answered, or a partition that was not."""
SIZES_MS = 5_000
"""Time for which the size of a partition that takes messages is used."""
ASKED_MAX = 32
"""Partitions of one topic that are asked at a time."""
PRODUCERS_MS = 3_600_000
"""Time between two looks at the producers of all partitions."""


@dataclass(slots=True)
class UpkeepCounters:
    """Counts of what a node has done while it led the metadata group."""

    partitions_deleted: int = 0
    groups_expired: int = 0


@dataclass(slots=True, eq=False)
class _Known:
    """Answers of the partitions of a topic."""

    stored: dict[int, Stored] = field(default_factory=dict)
    fresh_ms: dict[int, int] = field(default_factory=dict)
    """Until when what an open partition said is used."""
    asked: set[int] = field(default_factory=set)

    def forget_old(self, now_ms: int) -> None:
        """Forgets what open partitions said long ago."""
        for pid in [pid for pid, until in self.fresh_ms.items() if until <= now_ms]:
            del self.fresh_ms[pid]
            self.stored.pop(pid, None)


class UpkeepLoop(LeaderTask):
    """See the module text.

    Args:
        group_ttl_ms: of groups of topics that say nothing about it.
    """

    BEGINS_ANEW = frozenset((ChangeKind.RESTORED, ChangeKind.POLICIES))

    def __init__(
        self,
        own: TopicNode,
        *,
        group_ttl_ms: int = retention.GROUP_TTL_MS,
        producer_ttl_ms: int = retention.PRODUCER_TTL_MS,
    ) -> None:
        super().__init__(own)
        self._group_ttl_ms = group_ttl_ms
        self._producer_ttl_ms = producer_ttl_ms
        self.counters = UpkeepCounters()
        self._due_ms: dict[TopicKey, int] = {}
        """Times at which topics are to be looked at, of those that wait for a time."""
        self._known: dict[TopicKey, _Known] = {}
        self._producers_ms = 0

    # --- when ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Does what is due; to be called a few times a second."""
        if not self._follow_term():
            return
        now_ms = self._clock.now_ms()
        due = self._take_due()
        due.update(key for key, due_ms in self._due_ms.items() if due_ms <= now_ms)
        for key in due:
            self._look(key, now_ms)
        if now_ms >= self._producers_ms:
            self._producers_ms = now_ms + PRODUCERS_MS
            self._forget_producers(now_ms)

    def _begin_term(self) -> None:
        super()._begin_term()
        self._due_ms.clear()
        self._known.clear()
        self._producers_ms = self._clock.now_ms() + PRODUCERS_MS
        self._due.update(self._topics())

    def _look_at(self, key: TopicKey, due_ms: int) -> None:
        """Has a topic looked at, at the latest then."""
        self._due_ms[key] = min(due_ms, self._due_ms.get(key, due_ms))

    # --- one topic -------------------------------------------------------------------------

    def _look(self, key: TopicKey, now_ms: int) -> None:
        self._due_ms.pop(key, None)
        record = self._record(key)
        if record is None:
            self._known.pop(key, None)
            return
        settings = self._settings_of(record)
        self._expire_groups(key, record, settings, now_ms)
        if retention.may_retire(record.state, record.held_versions):
            # What comes of it is looked at when it is applied.
            self._change(key, Retire())
        known = self._known.setdefault(key, _Known())
        known.forget_old(now_ms)
        limits = Limits(duration_of(settings, MAX_AGE), length_of(settings))
        verdict = retention.judge(record.state, record.held_versions, limits, known.stored, now_ms)
        self._carry_out(key, verdict, now_ms)

    def _carry_out(self, key: TopicKey, verdict: Verdict, now_ms: int) -> None:
        if verdict.deleted:
            self._change(key, Delete(frozenset(verdict.deleted)))
        for pid in verdict.asked[:ASKED_MAX]:
            self._ask(key, pid)
        if verdict.due_ms is not None:
            self._look_at(key, verdict.due_ms)
        if verdict.waits_for_bytes:
            self._look_at(key, now_ms + SIZES_MS)

    def _expire_groups(
        self, key: TopicKey, record: TopicRecord, settings: Settings, now_ms: int
    ) -> None:
        ttl_ms = duration_of(settings, GROUP_TTL) or self._group_ttl_ms
        due, next_ms = retention.due_groups(record.groups, ttl_ms, now_ms)
        for group in due:
            self._expire(key, group, now_ms)
        if next_ms is not None:
            self._look_at(key, next_ms)

    # --- proposals -------------------------------------------------------------------------

    def _expire(self, key: TopicKey, group: GroupState, now_ms: int) -> None:
        idle_since_ms, version = group.idle_since_ms, group.cv

        def expired() -> None:
            self.counters.groups_expired += 1
            log.warning(
                "topics.group_expired",
                vhost=key.vhost, topic=key.name, group=group.name,
                idle_s=(now_ms - idle_since_ms) // 1000, version=version,
            )  # fmt: skip

        command = pack_command(Expire(idle_since_ms))
        change = ChangeGroup(vhost=key.vhost, name=key.name, group=group.name, command=command)
        self._submit(key, (key, group.name, command), change, True, expired)

    def _change(self, key: TopicKey, command: TopicCommand) -> None:
        packed = pack_command(command)

        def changed() -> None:
            if isinstance(command, Delete):
                self._note_deleted(key, command)

        change = ChangeTopic(vhost=key.vhost, name=key.name, command=packed)
        self._submit(key, (key, type(command)), change, "", changed)

    def _note_deleted(self, key: TopicKey, command: Delete) -> None:
        record = self._record(key)
        if record is None:
            return
        lines = record.state.lineage.partitions
        # A group may have come back meanwhile that holds some of them.
        gone = [p for p in sorted(command.expired) if lines[p].is_deleted]
        known = self._known.get(key, _Known())
        for pid in gone:
            known.stored.pop(pid, None)
        self.counters.partitions_deleted += len(gone)
        if gone:
            log.info("topics.partitions_deleted", vhost=key.vhost, topic=key.name, partitions=gone)

    def _submit(
        self,
        key: TopicKey,
        proposal: Hashable,
        command: Command,
        wanted: object,
        done: Callable[[], None],
    ) -> None:
        """Proposes a command, unless it is under way. Calls back when its reply is the wanted one;
        otherwise the topic is looked at again."""

        def answered(reply: object, error: BrokerError | None) -> None:
            if error is None and reply == wanted:
                done()
            else:
                self._look_at(key, self._clock.now_ms() + RETRY_MS)

        self._propose_once(proposal, command, answered)

    # --- questions to partitions -----------------------------------------------------------

    def _ask(self, key: TopicKey, pid: int) -> None:
        known = self._known[key]
        queue = self._partitions.find(*key, pid)
        if pid in known.asked:
            return
        if queue is None:
            self._look_at(key, self._clock.now_ms() + RETRY_MS)
            return
        known.asked.add(pid)

        def answered(found: PartitionDescription | None, error: BrokerError | None) -> None:
            known.asked.discard(pid)
            if self._known.get(key) is not known:
                return
            now_ms = self._clock.now_ms()
            if found is None:
                self._look_at(key, now_ms + RETRY_MS)
                return
            is_cut = found.log_start > FIRST_USER_OFFSET
            known.stored[pid] = Stored(found.bytes, found.last_time_ms, is_cut)
            if found.state != PartitionState.SEALED.name:
                known.fresh_ms[pid] = now_ms + SIZES_MS
            self._look_at(key, now_ms)

        queue.describe(answered)

    # --- producers -------------------------------------------------------------------------

    def _forget_producers(self, now_ms: int) -> None:
        """Has partitions forget producers that sent nothing for long, by an entry of their logs."""
        before_ms = now_ms - self._producer_ttl_ms
        for key in self._topics():
            record = self._record(key)
            for each in () if record is None else retention.forgets_producers(record.state):
                queue = self._partitions.find(*key, each.pid)
                if queue is not None and queue.forgettable_producers(before_ms):
                    # The next look tells it again, if nobody heard it.
                    command = ExpireProducers(before_ms, now_ms)
                    queue.tell(command, lambda outcome, error: None)
