"""The autoscaler: which change a topic needs, from loads, as a pure function (section 13).

At most one action at a time: a split, else a move, else a merge; where nothing of that helps, a
report. Every decision carries the rule that fired and what it was computed from.

Times are ms. `unit` (u) is a minute in production. Rates are per second, as means over the last 2,
5, 10 and 20 units. A *load* is a rate as a share of its target; of bytes and messages the larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from convoymq.topics.rules.cuts import Cut, best_cut
from convoymq.topics.rules.lineage import Lineage
from convoymq.topics.rules.routes import Route, Span

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Bounds for changes that a topic makes by itself. The times are in units."""

    unit_ms: int = 60_000
    target_bytes: float = 4_000_000.0
    target_messages: float = 10_000.0
    """The targets: rates per second that a partition should take."""
    partitions_min: int = 1
    partitions_max: int = 256
    changes_per_hour_max: int = 12
    """Manual ones count as well."""
    split_cooldown: int = 1
    move_cooldown: int = 5
    merge_cooldown: int = 5
    merge_age: int = 20
    merge_after_split: int = 10
    merges_max: int = 10
    """In the ancestry of a partition; then it is merged no more, only split."""
    merge_sum_max: float = 0.5
    version_lag_max: int = 4
    failover_pause: int = 2
    gain_min: float = 0.2
    """By how much a split or a move lowers the largest load, at least."""
    server_ratio: float = 1.3
    server_load_min: float = 1.0
    """Load of a server below which nothing is moved off it."""
    lag_max_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Means over the last 2, 5, 10 and 20 units, per second."""

    two: float = 0.0
    five: float = 0.0
    ten: float = 0.0
    twenty: float = 0.0


WINDOWS = {"two": 2, "five": 5, "ten": 10, "twenty": 20}
SPLIT_RULES = (("two", 5.0), ("five", 2.0), ("ten", 1.0))
"""By window, the load above which a partition is split: violent load fast, mild load slowly."""
MERGE_RULES = (("two", 1.0), ("five", 1.0), ("ten", 1.0), ("twenty", 0.5))
"""By window, the load below which both of two neighbours are for a merge."""
MERGE_SUM_WINDOWS = ("ten", "twenty")
"""Windows in which their sum is small. So the result meets no rule of a split."""


@dataclass(frozen=True, slots=True)
class PartitionLoad:
    """Rates of one partition."""

    bytes: Rates = Rates()
    messages: Rates = Rates()
    lp_bytes: Sequence[float] = ()
    lp_messages: Sequence[float] = ()
    """By logical partition of its range, in any unit; empty when not known."""
    top_keys: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """By hot logical partition, its largest keys."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Place and origin of a partition of the newest version."""

    server: str
    created_at: int
    merges_before: int = 0
    split_at: int | None = None
    """Time of the last split of its range."""
    is_replicated: bool = True
    """All of its replicas are up to date."""

    def since(self, time_ms: int) -> Placement:
        """Return the same with a later time: its load is known since then only."""
        return replace(self, created_at=time_ms)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Rates of a server, of all topics, as a mean over 5 units, per second."""

    bytes: float = 0.0
    messages: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The topic as it is now."""

    route: Route
    placements: Mapping[int, Placement]
    servers: Mapping[str, ServerLoad] = field(default_factory=dict)
    """By name, the servers that may take partitions."""
    is_changing: bool = False
    split_at: int | None = None
    merged_at: int | None = None
    moved_at: int | None = None
    """The last change of each kind."""
    changes_at: Sequence[int] = ()
    """All changes of the last hour."""
    failed_over_at: int | None = None
    """Time of the last change of the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """Lag and capacity of one group."""

    name: str
    version: int
    is_active: bool = True
    spare_members: int = 0
    lanes: int = 1
    lanes_max: int = 1
    lag_s: Mapping[int, float] = field(default_factory=dict)
    """By partition."""
    drain_rate: Mapping[int, float] = field(default_factory=dict)
    """By partition, messages per second that one owner manages with all lanes busy."""


Input = float | int | str


class Rule(Enum):
    """Rules that call for something, by the name that metrics and events have for them."""

    LOAD_2 = "load_2"
    LOAD_5 = "load_5"
    LOAD_10 = "load_10"
    OWNER_BEHIND = "owner_behind"
    SERVER_BUSY = "server_busy"
    BOTH_SMALL = "both_small"
    GROUP_LAGS = "group_lags"


RULE_OF_WINDOW = {"two": Rule.LOAD_2, "five": Rule.LOAD_5, "ten": Rule.LOAD_10}


@dataclass(frozen=True, slots=True)
class Reason:
    """The rule that fired, and what it was computed from."""

    rule: str
    inputs: Mapping[str, Input]
    name: Rule


@dataclass(frozen=True, slots=True)
class Split:
    """Split a partition at `cuts`."""

    pid: int
    cuts: tuple[int, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge two neighbours."""

    pids: tuple[int, int]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Move:
    """Move a partition to another server."""

    pid: int
    server: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class HotLogicalPartition:
    """A report: one logical partition is too much for a partition, and no split helps."""

    pid: int
    lp: int
    keys: tuple[str, ...]
    reason: Reason


class Advised(Enum):
    """Means of an operator to help a group that a split does not help."""

    RAISE_LANES = "raise lanes"
    ADD_CONSUMERS = "add consumers"


@dataclass(frozen=True, slots=True)
class Advice:
    """A report: a group lags behind on a partition."""

    advised: Advised
    group: str
    pid: int
    reason: Reason


Action = Split | Merge | Move
Report = HotLogicalPartition | Advice
Decision = Action | Report


@dataclass(frozen=True, slots=True)
class Considered:
    """A rule that was met, or an action that was held back."""

    subject: str
    rule: str
    outcome: str
    inputs: Mapping[str, Input]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A decision, and what was considered on the way."""

    decision: Decision | None
    considered: tuple[Considered, ...]
    held: str = ""
    """Reason for which no change is made now, whatever is met; empty: there is none."""
    reports: tuple[Report, ...] = ()
    wants_weights: frozenset[int] = frozenset()
    """Partitions that meet a rule for a split: the loads of their logical partitions are used."""

    @property
    def summary(self) -> str:
        """The decision in words."""
        return decision_text(self.decision)


def evaluate(
    layout: Layout,
    loads: Mapping[int, PartitionLoad],
    groups: Sequence[GroupLoad],
    policy: Policy,
    now: int,
) -> Evaluation:
    """Return what to do next, if anything, with all that was considered. A partition without a load
    is left alone."""
    return _Evaluator(layout, loads, groups, policy, now).run()


def placements(
    lineage: Lineage, servers: Mapping[int, str], lagging: Sequence[int] = ()
) -> dict[int, Placement]:
    """Return the placements of the newest version: where partitions are is given, where they come
    from is in the lineage.

    Args:
        servers: by partition.
        lagging: partitions with a replica that is not up to date.
    """
    oldest = lineage.published[lineage.min_version].published_at

    def created_at(pid: int) -> int:
        published = lineage.published.get(lineage.partitions[pid].created_version)
        return oldest if published is None else published.published_at

    def split_at(pid: int) -> int | None:
        for each in (pid, *lineage.ancestors(pid)):
            parents = map(lineage.partitions.__getitem__, lineage.partitions[each].parents)
            if any(len(parent.children) > 1 for parent in parents):
                return created_at(each)
        return None

    return {
        pid: Placement(
            servers[pid], created_at(pid), lineage.merges_before(pid), split_at(pid),
            is_replicated=pid not in lagging,
        )
        for pid in lineage.latest.pids
    }  # fmt: skip


class _Evaluator:
    """One evaluation."""

    def __init__(
        self,
        layout: Layout,
        loads: Mapping[int, PartitionLoad],
        groups: Sequence[GroupLoad],
        policy: Policy,
        now: int,
    ) -> None:
        self.layout = layout
        self.loads = loads
        self.groups = [group for group in groups if group.is_active]
        self.policy = policy
        self.now = now
        self.considered: list[Considered] = []
        self.reports: list[Report] = []
        self.wants_weights: set[int] = set()

    def run(self) -> Evaluation:
        held = self._held()
        action = self._first((*self._splits(), *self._moves(), *self._merges()), held)
        self._advise()
        decision = action or next(iter(self.reports), None)
        return Evaluation(
            decision,
            tuple(self.considered),
            held,
            tuple(self.reports),
            frozenset(self.wants_weights),
        )

    def _first(self, actions: Sequence[Action], held: str) -> Action | None:
        for number, action in enumerate(actions):
            outcome = f"held back: {held}" if held else "not first" if number else "chosen"
            self._note(_subject(action), action.reason, outcome)
        return actions[0] if actions and not held else None

    def _note(self, subject: str, reason: Reason, outcome: str) -> None:
        self.considered.append(Considered(subject, reason.rule, outcome, reason.inputs))

    # --- what holds all actions back (13.3, 13.4) --------------------------------------------

    def _held(self) -> str:
        """Return what forbids every change now, or nothing."""
        layout, policy = self.layout, self.policy
        if layout.is_changing:
            return "a change is running"
        if lagging := [pid for pid, each in layout.placements.items() if not each.is_replicated]:
            return f"partition {lagging[0]} is under-replicated"
        for group in self.groups:
            if layout.route.version - group.version > policy.version_lag_max:
                return f"group '{group.name}' is at version {group.version}"
        if self._is_recent(layout.failed_over_at, policy.failover_pause):
            return "the controller has just changed"
        recent = [at for at in layout.changes_at if self.now - at < HOUR_MS]
        if len(recent) >= policy.changes_per_hour_max:
            return f"{len(recent)} changes within an hour"
        return ""

    def _is_recent(self, at: int | None, units: int) -> bool:
        return at is not None and self.now - at < units * self.policy.unit_ms

    def _age(self, pid: int) -> float:
        """Return the age of a partition, in units."""
        return (self.now - self.layout.placements[pid].created_at) / self.policy.unit_ms

    def _load(self, pid: int, window: str) -> float:
        load = self.loads[pid]
        of_bytes: float = getattr(load.bytes, window) / self.policy.target_bytes
        of_messages: float = getattr(load.messages, window) / self.policy.target_messages
        return max(of_bytes, of_messages)

    def _weights(self, pid: int, window: str) -> Sequence[float]:
        """Return the loads of a partition's logical partitions, by what is larger of the two."""
        load = self.loads[pid]
        of_bytes = getattr(load.bytes, window) / self.policy.target_bytes
        of_messages = getattr(load.messages, window) / self.policy.target_messages
        return load.lp_bytes if of_bytes >= of_messages else load.lp_messages

    # --- splits ------------------------------------------------------------------------------

    def _splits(self) -> list[Split]:
        """Return the splits that may be made, the most urgent first."""
        wanted = [
            each
            for span in self.layout.route.spans
            if span.pid in self.loads and (each := self._wants_split(span))
        ]
        splits = []
        for _, span, window, reason in sorted(wanted, key=lambda each: (-each[0], each[1].lo)):
            if split := self._split(span, window, reason):
                splits.append(split)
        return splits

    def _wants_split(self, span: Span) -> tuple[float, Span, str, Reason] | None:
        """Return how urgent a split is, and why; None if no rule is met."""
        age = self._age(span.pid)
        for window, limit in SPLIT_RULES:
            load = self._load(span.pid, window)
            if load > limit and age >= WINDOWS[window]:
                rule = f"load over {WINDOWS[window]} units is above {limit:g} targets"
                reason = Reason(rule, {"load": load, "age": age}, RULE_OF_WINDOW[window])
                return load / limit, span, window, reason
        for group in self.groups:
            if self._is_behind(group, span.pid) and group.spare_members and age >= WINDOWS["five"]:
                rate, drain = self._rate(span.pid), group.drain_rate[span.pid]
                inputs: dict[str, Input] = {
                    "group": group.name, "lag_s": group.lag_s[span.pid], "rate": rate,
                    "drain_rate": drain, "spare_members": group.spare_members,
                }  # fmt: skip
                rule = "more comes in than one owner consumes, and members are spare"
                reason = Reason(rule, inputs, Rule.OWNER_BEHIND)
                return rate / max(drain, 1e-9) - 1.0, span, "five", reason
        return None

    def _rate(self, pid: int) -> float:
        return self.loads[pid].messages.five

    def _is_behind(self, group: GroupLoad, pid: int) -> bool:
        """Return whether a group lags, and more comes in than one owner with all lanes consumes."""
        drain = group.drain_rate.get(pid)
        is_late = group.lag_s.get(pid, 0.0) > self.policy.lag_max_s
        return is_late and drain is not None and self._rate(pid) > drain

    def _split(self, span: Span, window: str, reason: Reason) -> Split | None:
        """Return the split to make, or note why there is none."""
        self.wants_weights.add(span.pid)
        room = self.policy.partitions_max - len(self.layout.route.spans)
        weights = self._weights(span.pid, window)
        is_known = len(weights) == span.width and sum(weights) > 0.0
        cut = best_cut(weights, room) if is_known else None
        if cut is not None and cut.hot_share > 1.0 - self.policy.gain_min:
            self._report_hot(span, cut, reason)
        why = ""
        if cut is None:
            why = "no loads of its logical partitions are known"
        elif span.width == 1:
            why = "it has one logical partition"
        elif room < 1:
            why = "the topic has as many partitions as it may"
        elif cut.share > 1.0 - self.policy.gain_min:
            why = f"it would gain {1.0 - cut.share:.0%} only"
        elif self._is_recent(self.layout.split_at, self.policy.split_cooldown):
            why = "the last split was just now"
        if cut is None or why:
            self._refuse(f"split of partition {span.pid}", reason, why)
            return None
        cuts = tuple(span.lo + at for at in cut.at)
        inputs = {**reason.inputs, "largest_share": cut.share}
        return Split(span.pid, cuts, Reason(reason.rule, inputs, reason.name))

    def _refuse(self, subject: str, reason: Reason, why: str) -> None:
        self._note(subject, reason, f"held back: {why}")

    def _report_hot(self, span: Span, cut: Cut, reason: Reason) -> None:
        assert cut.hot is not None
        lp = span.lo + cut.hot
        keys = tuple(self.loads[span.pid].top_keys.get(lp, ()))
        inputs = {**reason.inputs, "lp": lp, "share": cut.hot_share}
        hot = Reason(reason.rule, inputs, reason.name)
        self.reports.append(HotLogicalPartition(span.pid, lp, keys, hot))

    # --- moves -------------------------------------------------------------------------------

    def _moves(self) -> list[Move]:
        """Return the move that relieves the busiest server most, if one does."""
        servers = {name: self._server_load(each) for name, each in self.layout.servers.items()}
        if len(servers) < 2 or self._is_recent(self.layout.moved_at, self.policy.move_cooldown):
            return []
        busiest = max(servers, key=lambda name: (servers[name], name))
        idlest = min(servers, key=lambda name: (servers[name], name))
        mean = sum(servers.values()) / len(servers)
        most = servers[busiest]
        policy = self.policy
        if most <= policy.server_ratio * mean or most <= policy.server_load_min:
            return []
        others = max(load for name, load in servers.items() if name != busiest)
        best: tuple[float, int] | None = None
        for pid in self._movable(busiest):
            load = self._load(pid, "five")
            after = max(most - load, servers[idlest] + load, others)
            gains = after <= (1.0 - policy.gain_min) * most
            if gains and (best is None or (after, pid) < best):
                best = after, pid
        if best is None:
            return []
        rule = f"a server's load over 5 units is above {policy.server_ratio:g} times the mean"
        inputs: dict[str, Input] = {
            "server": busiest,
            "load": most,
            "mean": mean,
            "largest_after": best[0],
        }
        return [Move(best[1], idlest, Reason(rule, inputs, Rule.SERVER_BUSY))]

    def _movable(self, server: str) -> Iterator[int]:
        for pid, placement in self.layout.placements.items():
            is_known = placement.server == server and pid in self.loads
            if is_known and self._age(pid) >= WINDOWS["five"]:
                yield pid

    def _server_load(self, load: ServerLoad) -> float:
        policy = self.policy
        return max(load.bytes / policy.target_bytes, load.messages / policy.target_messages)

    # --- merges ------------------------------------------------------------------------------

    def _merges(self) -> list[Merge]:
        """Return the merges that may be made, the smallest first."""
        spans = self.layout.route.spans
        too_few = len(spans) - 1 < max(1, self.policy.partitions_min)
        if too_few or self._is_recent(self.layout.merged_at, self.policy.merge_cooldown):
            return []
        found = []
        for one, other in itertools.pairwise(spans):
            if self._wants_merge(one.pid, other.pid):
                total = self._sum(one.pid, other.pid, "ten")
                reason = Reason("both loads are small", {"sum": total}, Rule.BOTH_SMALL)
                if why := self._keeps_apart(one.pid, other.pid):
                    self._refuse(f"merge of partitions {one.pid} and {other.pid}", reason, why)
                else:
                    found.append((total, one.lo, Merge((one.pid, other.pid), reason)))
        return [merge for *_, merge in sorted(found, key=lambda each: each[:2])]

    def _wants_merge(self, one: int, other: int) -> bool:
        if one not in self.loads or other not in self.loads:
            return False
        return all(
            self._load(pid, window) < limit for pid in (one, other) for window, limit in MERGE_RULES
        ) and all(
            self._sum(one, other, window) < self.policy.merge_sum_max
            for window in MERGE_SUM_WINDOWS
        )

    def _sum(self, one: int, other: int, window: str) -> float:
        return self._load(one, window) + self._load(other, window)

    def _keeps_apart(self, one: int, other: int) -> str:
        """Return why two partitions with little load are not merged, or nothing."""
        for pid in (one, other):
            placement = self.layout.placements[pid]
            if self._age(pid) <= self.policy.merge_age:
                return f"partition {pid} is too young"
            if self._is_recent(placement.split_at, self.policy.merge_after_split):
                return f"the range of partition {pid} was split just now"
            if placement.merges_before >= self.policy.merges_max:
                return f"partition {pid} comes from {placement.merges_before} merges"
        rate = self._rate(one) + self._rate(other)
        for group in self.groups:
            drains = [group.drain_rate[pid] for pid in (one, other) if pid in group.drain_rate]
            if drains and rate > min(drains):
                return f"one owner in group '{group.name}' would not keep up"
        return ""

    # --- reports -----------------------------------------------------------------------------

    def _advise(self) -> None:
        """Say what helps groups that lag where a split does not."""
        for group in self.groups:
            for pid, lag_s in sorted(group.lag_s.items()):
                if lag_s <= self.policy.lag_max_s or pid not in self.loads:
                    continue
                if group.lanes < group.lanes_max:
                    advised = Advised.RAISE_LANES
                elif self._is_behind(group, pid) and not group.spare_members:
                    advised = Advised.ADD_CONSUMERS
                else:
                    continue
                inputs: dict[str, Input] = {
                    "group": group.name,
                    "lag_s": lag_s,
                    "lanes": group.lanes,
                }
                reason = Reason("a group lags behind", inputs, Rule.GROUP_LAGS)
                self.reports.append(Advice(advised, group.name, pid, reason))
                self._note(f"partition {pid}", reason, advised.value)


def _subject(action: Action) -> str:
    match action:
        case Split(pid=pid, cuts=cuts):
            return f"split of partition {pid} at {', '.join(map(str, cuts))}"
        case Merge(pids=(one, other)):
            return f"merge of partitions {one} and {other}"
        case Move(pid=pid, server=server):
            return f"move of partition {pid} to {server}"


def decision_text(decision: Decision | None) -> str:
    """Return a decision in words."""
    match decision:
        case None:
            return "nothing"
        case HotLogicalPartition(pid=pid, lp=lp, keys=keys):
            named = f", largest keys: {', '.join(keys)}" if keys else ""
            return f"report that logical partition {lp} of partition {pid} is hot{named}"
        case Advice(advised=advised, group=group, pid=pid):
            return f"report for group '{group}' on partition {pid}: {advised.value}"
        case _:
            return _subject(decision)
