"""Results of the audit: plain values, for tables, JSON and the HTML page."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from convoymq.model import trace as words
from convoymq.spark.audit.coverage import Gap, QueueFacts
from convoymq.spark.audit.findings import (
    FATE_AGAIN,
    FATE_DROPPED,
    FATE_HELD,
    FATE_READY,
    FATE_SETTLED,
    METRICS,
    FindingRow,
    bucket_us,
)
from convoymq.spark.audit.invariants import PROMISES, Invariant

FATE_NAMES = {
    FATE_SETTLED: "settled",
    FATE_DROPPED: "dropped",
    FATE_READY: "ready",
    FATE_HELD: "checked out",
    FATE_AGAIN: "read again",
}
EXAMPLES_KEPT = 5
PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(slots=True)
class Verdict:
    """Verdict on one invariant."""

    invariant: Invariant
    rows: int = 0
    """Trace rows, or places between two of them, that break it."""
    messages: int = 0
    unproved: int = 0
    """Messages about which the trace can't tell: it begins later, or has a gap there."""
    examples: list[dict[str, object]] = field(default_factory=list)

    def add(
        self, facts: QueueFacts, rows: int, messages: int, examples: Iterable[Mapping[str, object]]
    ) -> None:
        """Takes violations of one queue up."""
        self.rows += rows
        self.messages += messages
        for example in examples:
            if len(self.examples) < EXAMPLES_KEPT:
                self.examples.append({"vhost": facts.vhost, "queue": facts.queue, **example})


@dataclass(slots=True, kw_only=True)
class Latency:
    """One hour of one queue, in ms."""

    hour: int
    """Hours since the epoch."""
    metric: str
    messages: int
    percentiles: dict[str, float]
    largest: float


@dataclass(slots=True, kw_only=True)
class Share:
    """Division of one hour's deliveries among consumers."""

    hour: int
    consumers: int
    messages: int
    smallest: int
    largest: int
    fairness: float
    """Jain's index: 1 = all equal, 1/n = one got everything."""


@dataclass(slots=True)
class QueueReport:
    """One queue."""

    facts: QueueFacts
    fates: dict[str, int] = field(default_factory=dict)
    violations: dict[str, int] = field(default_factory=dict)
    """Rows that break an invariant, by its name."""
    unproved: dict[str, int] = field(default_factory=dict)
    """Messages about which the trace can't tell, by the invariant's name."""
    published: int = 0
    """Messages that entered while it was traced."""
    entered_by_state_snapshot: int = 0
    """Of these, what entered up to the last complete state snapshot."""
    confirmed: int = 0
    queued_after_snapshot: int = 0
    """Messages that are queued by the log, decided after the last complete state snapshot."""
    latencies: list[Latency] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)

    @property
    def proved(self) -> bool:
        """No violation, and nothing that the trace could not tell."""
        facts = self.facts
        left_out = facts.gaps or facts.lost or facts.missing or facts.start
        return not (self.violations or self.unproved or left_out)

    def doubt(self, invariant: Invariant, messages: int) -> None:
        """Counts what is not proved of this queue."""
        name = invariant.name.lower()
        self.unproved[name] = self.unproved.get(name, 0) + messages

    def blame(self, invariant: Invariant, rows: int) -> None:
        """Counts violations of this queue."""
        name = invariant.name.lower()
        self.violations[name] = self.violations.get(name, 0) + rows


@dataclass(slots=True, kw_only=True)
class AuditReport:
    """All that was found."""

    queues: list[QueueReport]
    verdicts: list[Verdict]
    rows: int
    files: int
    duration_s: float = 0.0

    @property
    def violations(self) -> int:
        """Returns the number of rows that break a promise."""
        return sum(verdict.rows for verdict in self.verdicts)

    @property
    def proved(self) -> bool:
        """No violation, and nothing that the trace could not tell."""
        return all(queue.proved for queue in self.queues)

    @property
    def exit_code(self) -> int:
        """1 when a promise was broken, else 0."""
        return 1 if self.violations else 0

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "violations": self.violations,
            "proved": self.proved,
            "rows": self.rows,
            "files": self.files,
            "duration_s": round(self.duration_s, 3),
            "invariants": [
                {
                    "number": int(verdict.invariant),
                    "name": verdict.invariant.name.lower(),
                    "title": PROMISES[verdict.invariant].title,
                    "violations": verdict.rows,
                    "messages": verdict.messages,
                    "unproved": verdict.unproved,
                    "examples": verdict.examples,
                }
                for verdict in self.verdicts
            ],
            "queues": [_queue_dict(queue) for queue in self.queues],
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)


def _queue_dict(queue: QueueReport) -> dict[str, object]:
    facts = queue.facts
    return {
        "vhost": facts.vhost,
        "queue": facts.queue,
        "type": facts.type,
        "group": facts.group,
        "entries": [facts.start, facts.end],
        "published": queue.published,
        "confirmed": queue.confirmed,
        "proved": queue.proved,
        "violations": queue.violations,
        "unproved": queue.unproved,
        "fates": queue.fates,
        "queued_after_last_snapshot": queue.queued_after_snapshot,
        "state_snapshot": facts.state_snapshot["index"] if facts.state_snapshot else None,
        "gaps": [
            {"entries": [gap.start, gap.end]}
            if not gap.node
            else {"node": gap.node, "acts_us": [gap.start, gap.end], "why": gap.why}
            for gap in facts.gaps
        ],
        "nodes": sorted(facts.nodes),
        "rows_lost": facts.lost,
        "rows_missing": facts.missing,
        "latencies_ms": [
            {
                "hour": each.hour,
                "metric": each.metric,
                "messages": each.messages,
                **each.percentiles,
                "max": each.largest,
            }
            for each in queue.latencies
        ],
        "fairness": [
            {
                "hour": each.hour,
                "consumers": each.consumers,
                "messages": each.messages,
                "smallest": each.smallest,
                "largest": each.largest,
                "jain": each.fairness,
            }
            for each in queue.shares
        ],
    }


def gather(facts: Iterable[QueueFacts], rows: Iterable[FindingRow]) -> AuditReport:
    """Joins the sweeps' findings (already summed by key, or not) to a report."""
    queues = {each.group: QueueReport(each) for each in facts}
    verdicts = {invariant: Verdict(invariant) for invariant in Invariant}
    buckets: dict[tuple[int, int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    shares: dict[tuple[int, int], dict[tuple[int, int], int]] = defaultdict(
        lambda: defaultdict(int)
    )
    clients: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        queue = queues[row["group"]]
        n = row["n"]
        match row["what"]:
            case "violation":
                verdict = verdicts[Invariant(row["k1"])]
                verdict.add(queue.facts, row["k2"], n, json.loads(row["text"] or "[]"))
                queue.blame(verdict.invariant, row["k2"])
            case "unproved":
                verdicts[Invariant(row["k1"])].unproved += n
                queue.doubt(Invariant(row["k1"]), n)
            case "fate":
                name = FATE_NAMES[row["k1"]]
                if row["k1"] == FATE_DROPPED:
                    name += ": " + words.REASON_NAMES.get(row["k2"], str(row["k2"]))
                queue.fates[name] = queue.fates.get(name, 0) + n
                if row["k1"] >= FATE_READY and not row["k3"]:
                    queue.queued_after_snapshot += n
            case "entered":
                queue.published += n
                queue.entered_by_state_snapshot += n * row["k1"]
            case "missing":
                name = ("rows", *words.MARK_COLUMNS, "marks")[row["k1"]]
                queue.facts.missing[name] = queue.facts.missing.get(name, 0) + n
            case "client":
                clients[row["group"], row["k2"]][row["k1"]] += n
            case "confirmed":
                queue.confirmed += n
            case "latency":
                buckets[row["group"], row["k1"], row["k2"]][row["k3"]] += n
            case "share":
                shares[row["group"], row["k1"]][row["k2"], row["k3"]] += n
    for (group, node), counted in sorted(clients.items()):
        _check_client(queues[group], node, counted, verdicts)
    for (group, hour, metric), counted in sorted(buckets.items()):
        queues[group].latencies.append(_latency(hour, METRICS[metric], counted))
    for (group, hour), each in sorted(shares.items()):
        queues[group].shares.append(_share(hour, list(each.values())))
    for queue in queues.values():
        _check_totals(queue, verdicts[Invariant.TOTALS])
    return AuditReport(
        queues=list(queues.values()), verdicts=list(verdicts.values()), rows=0, files=0
    )


def _check_client(
    queue: QueueReport, node: int, counted: Mapping[int, int], verdicts: Mapping[Invariant, Verdict]
) -> None:
    """Adds that what was decided in the name of a node's clients is not proved without that node's
    acts."""
    facts = queue.facts
    if node in facts.nodes:
        return
    if not any(gap.node == node for gap in facts.gaps):
        facts.gaps.append(
            Gap(facts.group, node, 0, 0, "it had clients, and no file of it is there")
        )
    for invariant, kind in (
        (Invariant.CONFIRMED_IS_PUBLISHED, words.PUBLISHED),
        (Invariant.SENT_AS_DECIDED, words.DELIVERED),
    ):
        if kind in counted:
            verdicts[invariant].unproved += counted[kind]
            queue.doubt(invariant, counted[kind])


def _check_totals(queue: QueueReport, verdict: Verdict) -> None:
    facts = queue.facts
    # From the first entry to the state snapshot without a gap: then the log has what the queue
    # counted.
    whole = not facts.start and not any(gap.node == 0 for gap in facts.gaps)
    if facts.type == "quorum" and facts.state_snapshot is not None and whole:
        off = facts.state_snapshot["published"] - queue.entered_by_state_snapshot
        if off:
            example = {
                **facts.state_snapshot,
                "entered_by_the_log": queue.entered_by_state_snapshot,
            }
            verdict.add(facts, 1, abs(off), [example])
            queue.blame(Invariant.TOTALS, 1)
    for state_snapshot in facts.state_snapshots:
        if facts.type != "quorum":
            continue
        gone = state_snapshot["acked"] + state_snapshot["dropped"] + state_snapshot["purged"]
        off = (
            state_snapshot["published"] - gone - state_snapshot["ready"] - state_snapshot["unacked"]
        )
        if off:
            verdict.add(facts, 1, abs(off), [state_snapshot])
            queue.blame(Invariant.TOTALS, 1)


def _latency(hour: int, metric: str, counted: Mapping[int, int]) -> Latency:
    total = sum(counted.values())
    found = {}
    ordered = sorted(counted)
    for percentile in PERCENTILES:
        left = math.ceil(percentile * total)
        for bucket in ordered:
            left -= counted[bucket]
            if left <= 0:
                break
        found[f"p{percentile * 100:g}"] = _ms(bucket)
    return Latency(
        hour=hour, metric=metric, messages=total, percentiles=found, largest=_ms(ordered[-1])
    )


def _ms(bucket: int) -> float:
    # The lowest bucket holds what happened in the same millisecond of the log.
    return 0.0 if bucket == 0 else float(f"{bucket_us(bucket) / 1000:.3g}")


def _share(hour: int, counts: list[int]) -> Share:
    total = sum(counts)
    squares = sum(count * count for count in counts)
    return Share(
        hour=hour,
        consumers=len(counts),
        messages=total,
        smallest=min(counts),
        largest=max(counts),
        fairness=round(total * total / (len(counts) * squares), 4),
    )
