"""Topics that scale by themselves, on the node that leads the metadata group (ADR 0073).

`topics.rules.autoscaler` decides; here are what it decides from, and what comes of it. A few times
a unit the leaders of a topic's partitions are asked for their loads. An action is an ordinary
change, begun as an operator's is. Times of earlier changes come from the tree, so limits hold after
a change of the leader; loads stay with the leaders of the partitions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from convoymq.metadata.machine import Change, ChangeKind, TopicRecord
from convoymq.model.errors import BrokerError
from convoymq.topics.machine.load import LoadQuestion, LoadReport
from convoymq.topics.rules.autoscaler import (
    HOUR_MS,
    Action,
    Advice,
    Evaluation,
    GroupLoad,
    HotLogicalPartition,
    Layout,
    Merge,
    Move,
    Policy,
    Report,
    ServerLoad,
    Split,
    decision_text,
    evaluate,
    placements,
)
from convoymq.topics.rules.changes import Kind
from convoymq.topics.shell.controller_loop import has_work
from convoymq.topics.shell.leader_task import LeaderTask, TopicKey, TopicNode
from convoymq.topics.shell.rows import ChangeRow
from convoymq.topics.shell.scaling_facts import (
    group_row,
    groups_of,
    is_on,
    load_of,
    partition_rows,
    policy_of,
    policy_row,
)
from convoymq.topics.shell.scaling_rows import ScaledRow, ScalingRow

if TYPE_CHECKING:
    from convoymq.metadata.cluster_nodes import ClusterNodes
    from convoymq.topics.shell.admin import TopicAdmin

log = structlog.get_logger()

LOOKS_A_UNIT = 4
LOOK_MS_MIN = 250
FRESH_MS_MIN = 2_000
"""Shortest time for which the answer of a partition is used; else one unit."""
REPORT_LOOKS = 3
"""Looks after which a report is told: by then the largest keys are known."""
FORGET_UNITS = 5
"""Units after which a report that did not come again is over."""
HISTORY_MAX = 32
BY_ITSELF = "auto"
"""Ids of changes that the autoscaler began start so."""


@dataclass(slots=True)
class ScalingCounters:
    """Counts of what this node decided while it led the metadata group."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By action and rule; reports when they are new."""


@dataclass(slots=True, eq=False)
class _Reported:
    looks: int
    seen_ms: int
    report: Report


@dataclass(slots=True, eq=False)
class _Seat:
    """A topic that scales by itself."""

    policy: Policy
    due_ms: int = 0
    loads: dict[int, tuple[LoadReport, int]] = field(default_factory=dict)
    """By partition, the last answer and its time."""
    asked: set[int] = field(default_factory=set)
    is_acting: bool = False
    at_ms: int | None = None
    layout: Layout | None = None
    groups: list[GroupLoad] = field(default_factory=list)
    evaluation: Evaluation | None = None
    reported: dict[object, _Reported] = field(default_factory=dict)
    history: deque[ScaledRow] = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))

    def hot(self, pid: int) -> list[int]:
        """Returns the hot logical partitions of a partition."""
        reports = (each.report for each in self.reported.values())
        return [
            each.lp for each in reports if isinstance(each, HotLogicalPartition) and each.pid == pid
        ]


class ScalingLoop(LeaderTask):
    """See the module text.

    Args:
        targets: nodes that may get partitions.
    """

    def __init__(
        self,
        own: TopicNode,
        *,
        changes: TopicAdmin,
        nodes: ClusterNodes,
        targets: Callable[[], Collection[int]],
    ) -> None:
        super().__init__(own)
        self._changes = changes
        self._nodes = nodes
        self._targets = targets
        self.counters = ScalingCounters()
        self._term_ms = 0
        """Time at which this node began to lead."""
        self._all_changed = True
        """Settings of any topic may be others than its seat knows."""
        self._seats: dict[TopicKey, _Seat] = {}

    # --- when ------------------------------------------------------------------------------

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        super().on_change(change)
        self._all_changed |= change.kind in (ChangeKind.POLICIES, ChangeKind.RESTORED)

    def tick(self) -> None:
        """Does what is due; to be called a few times a second."""
        if not self._follow_term():
            return
        now_ms = self._clock.now_ms()
        if self._all_changed:
            self._all_changed = False
            self._due.update(self._seats, self._topics())
        for key in self._take_due():
            self._seat(key)
        for key, seat in list(self._seats.items()):
            if seat.due_ms <= now_ms:
                self._look(key, seat, now_ms)

    def _begin_term(self) -> None:
        super()._begin_term()
        self._term_ms = self._clock.now_ms()
        self._seats.clear()
        self._all_changed = True

    def _end_term(self) -> None:
        super()._end_term()
        self._seats.clear()

    def _seat(self, key: TopicKey) -> None:
        """Makes, changes or removes what is known of a topic, as its settings say."""
        record = self._record(key)
        settings = {} if record is None else self._settings_of(record)
        if not is_on(settings):
            self._seats.pop(key, None)
            return
        policy = policy_of(settings)
        seat = self._seats.get(key)
        if seat is None:
            self._seats[key] = _Seat(policy)
        elif seat.policy != policy:
            seat.policy, seat.due_ms = policy, 0

    # --- one topic -------------------------------------------------------------------------

    def _look(self, key: TopicKey, seat: _Seat, now_ms: int) -> None:
        record = self._record(key)
        if record is None:
            return
        seat.due_ms = now_ms + max(LOOK_MS_MIN, seat.policy.unit_ms // LOOKS_A_UNIT)
        fresh_ms = max(FRESH_MS_MIN, seat.policy.unit_ms)
        live = set(record.state.route.pids)
        seat.loads = {
            pid: (report, time_ms)
            for pid, (report, time_ms) in seat.loads.items()
            if pid in live and now_ms - time_ms <= fresh_ms
        }
        if seat.loads:
            seat.at_ms = now_ms
            seat.layout = self._layout(record, seat, now_ms)
            seat.groups = groups_of(record, seat.loads)
            loads = {pid: load_of(report) for pid, (report, _) in seat.loads.items()}
            found = evaluate(seat.layout, loads, seat.groups, seat.policy, now_ms)
            seat.evaluation = found
            self._note_reports(key, seat, found.reports, now_ms)
            if isinstance(found.decision, Split | Merge | Move) and not seat.is_acting:
                seat.is_acting = True
                self._spawn(self._act(key, seat, found.decision, now_ms))
        for pid in live:
            self._ask(key, seat, record, pid)

    def _ask(self, key: TopicKey, seat: _Seat, record: TopicRecord, pid: int) -> None:
        queue = self._partitions.find(*key, pid)
        if queue is None or pid in seat.asked:
            return
        seat.asked.add(pid)
        found = seat.evaluation
        question = LoadQuestion(
            seat.policy.unit_ms,
            record.logical,
            record.hash_seed,
            found is not None and pid in found.wants_weights,
            seat.hot(pid),
        )

        def answered(report: LoadReport | None, error: BrokerError | None) -> None:
            seat.asked.discard(pid)
            if report is not None:
                seat.loads[pid] = (report, self._clock.now_ms())

        queue.load(question, answered)

    # --- facts -----------------------------------------------------------------------------

    def _layout(self, record: TopicRecord, seat: _Seat, now_ms: int) -> Layout:
        state = record.state
        lineage, pids = state.lineage, state.route.pids
        servers = {pid: self._server_of(record, pid) for pid in pids}
        lagging = [
            pid for pid in pids if pid not in seat.loads or not seat.loads[pid][0].is_replicated
        ]
        placed = placements(lineage, servers, lagging)
        for pid, (report, _) in seat.loads.items():
            # A rate means nothing for longer than it was measured.
            since_ms = now_ms - report.known_ms
            if since_ms > placed[pid].created_at:
                placed[pid] = placed[pid].since(since_ms)
        published = [each for each in lineage.published.values() if each.kind is not None]

        def last(*kinds: Kind) -> int | None:
            return max(
                (each.published_at for each in published if each.kind in kinds), default=None
            )

        return Layout(
            route=state.route,
            placements=placed,
            servers=self._servers(),
            is_changing=has_work(state) or seat.is_acting,
            split_at=last(Kind.SPLIT),
            merged_at=last(Kind.MERGE),
            moved_at=last(Kind.MOVE, Kind.REBUCKET),
            changes_at=[
                each.published_at for each in published if now_ms - each.published_at < HOUR_MS
            ],
            failed_over_at=self._term_ms,
        )

    def _server_of(self, record: TopicRecord, pid: int) -> str:
        leader = self._partitions.leader(record, pid)
        return self._nodes.name_of(leader) if leader else ""

    def _servers(self) -> dict[str, ServerLoad]:
        """Returns the loads of the servers, by the partitions of all topics that scale by
        themselves."""
        found = {
            self._nodes.name_of(node): ServerLoad()
            for node in self._targets()
            if self._nodes.is_up(node)
        }
        for key, seat in self._seats.items():
            record = self._record(key)
            if record is None:
                continue
            for pid, (report, _) in seat.loads.items():
                name = self._server_of(record, pid)
                known = found.get(name)
                if known is not None:
                    found[name] = ServerLoad(
                        known.bytes + report.byte_rates[1], known.messages + report.message_rates[1]
                    )
        return found

    # --- what comes of it ------------------------------------------------------------------

    async def _act(self, key: TopicKey, seat: _Seat, action: Action, now_ms: int) -> None:
        rule = action.reason.name.value
        change_id = error = ""
        try:
            row = await self._begin(key, action)
            change_id = row["change_id"]
        except BrokerError as refused:
            error = refused.text
            seat.due_ms = self._clock.now_ms() + seat.policy.unit_ms
        finally:
            seat.is_acting = False
        said = decision_text(action)
        made: ScaledRow = {
            "time_ms": now_ms, "decision": said, "rule": rule, "change_id": change_id,
            "error": error,
        }  # fmt: skip
        seat.history.append(made)
        fields = {"vhost": key.vhost, "topic": key.name, "decision": said, "rule": rule}
        if error:
            log.warning("topics.autoscale_refused", **fields, reason=error)
            return
        self.counters.decisions[type(action).__name__.lower(), rule] += 1
        log.info("topics.autoscaled", **fields, change=change_id, **action.reason.inputs)

    async def _begin(self, key: TopicKey, action: Action) -> ChangeRow:
        """Begins a change as an operator would. Raises BrokerError."""
        match action:
            case Split(pid=pid, cuts=cuts):
                return await self._changes.split(*key, pid, cuts, by=BY_ITSELF)
            case Merge(pids=pids):
                return await self._changes.merge(*key, pids, by=BY_ITSELF)
            case Move(pid=pid, server=server):
                named = {self._nodes.name_of(node): node for node in self._targets()}
                return await self._changes.move(*key, pid, named[server], by=BY_ITSELF)

    def _note_reports(
        self, key: TopicKey, seat: _Seat, reports: Sequence[Report], now_ms: int
    ) -> None:
        for report in reports:
            name = _name_of(report)
            known = seat.reported.get(name)
            if known is None:
                known = seat.reported[name] = _Reported(0, now_ms, report)
            known.looks, known.seen_ms, known.report = known.looks + 1, now_ms, report
            if known.looks == REPORT_LOOKS:
                self._tell(key, report)
        until_ms = now_ms - FORGET_UNITS * seat.policy.unit_ms
        for name in [name for name, each in seat.reported.items() if each.seen_ms < until_ms]:
            del seat.reported[name]

    def _tell(self, key: TopicKey, report: Report) -> None:
        rule = report.reason.name.value
        match report:
            case HotLogicalPartition(pid=pid, lp=lp, keys=keys):
                self.counters.decisions["hot_lp", rule] += 1
                log.warning(
                    "topics.hot_logical_partition",
                    vhost=key.vhost, topic=key.name, partition=pid, lp=lp, keys=list(keys),
                    rule=rule, share=report.reason.inputs["share"],
                )  # fmt: skip
            case Advice(advised=advised, group=group, pid=pid):
                self.counters.decisions["advice", rule] += 1
                log.warning(
                    "topics.group_needs_help",
                    vhost=key.vhost, topic=key.name, group=group, partition=pid,
                    advised=advised.value, lag_s=report.reason.inputs["lag_s"],
                )  # fmt: skip

    @property
    def hot(self) -> int:
        """Returns how many logical partitions are hot."""
        return sum(
            isinstance(each.report, HotLogicalPartition)
            for seat in self._seats.values()
            for each in seat.reported.values()
        )

    # --- explaining ------------------------------------------------------------------------

    def explain(self, record: TopicRecord) -> ScalingRow:
        """Returns what was decided last about a topic, and from what."""
        vhost, name = record.vhost, record.name
        settings = self._settings_of(record)
        policy = policy_of(settings)
        row: ScalingRow = {
            "vhost": vhost, "name": name, "node": self._nodes.name_of(self._node),
            "version": record.state.route.version, "policy": policy_row(settings, policy),
            "at_ms": None, "held": "", "decision": "nothing", "rule": "", "considered": [],
            "partitions": [], "groups": [], "hot": [], "history": [],
        }  # fmt: skip
        seat = self._seats.get(TopicKey(vhost, name))
        if seat is None or seat.layout is None or seat.evaluation is None:
            return row
        found, now_ms = seat.evaluation, seat.at_ms or 0
        row["at_ms"], row["held"], row["decision"] = seat.at_ms, found.held, found.summary
        row["rule"] = "" if found.decision is None else found.decision.reason.name.value
        row["considered"] = [
            {"subject": each.subject, "rule": each.rule, "outcome": each.outcome,
             "inputs": dict(each.inputs)}
            for each in found.considered
        ]  # fmt: skip
        row["partitions"] = partition_rows(seat.layout, seat.loads, seat.policy, now_ms)
        row["groups"] = [group_row(each) for each in seat.groups]
        row["hot"] = [
            {"pid": each.report.pid, "lp": each.report.lp, "keys": list(each.report.keys)}
            for each in seat.reported.values()
            if isinstance(each.report, HotLogicalPartition)
        ]
        row["history"] = list(seat.history)
        return row


def _name_of(report: Report) -> object:
    match report:
        case HotLogicalPartition(pid=pid, lp=lp):
            return pid, lp
        case Advice(advised=advised, group=group, pid=pid):
            return advised, group, pid
