"""Coverage of entries by files: every entry is taken from one node whose rows of it are complete.

Every node that the trace names as a replica, or in whose name something was decided, must have
recorded too, in all its incarnations and up to the end: what is not there is a gap.

Pure: no Spark, no files. Ranges are (start, end]: start is excluded, as in COVERED marks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from convoymq.model.trace import Footer


class Range(NamedTuple):
    """Entries that one incarnation of a node covers."""

    node: int
    incarnation: int
    start: int
    end: int


class Gap(NamedTuple):
    """Something that no file covers. Of entries (start, end], or of a node's time in µs."""

    group: int
    node: int
    """0: the decided rows of these entries are nowhere; else the acts of this node."""
    start: int
    end: int
    why: str = "no file has them"


@dataclass(slots=True)
class QueueFacts:
    """Facts on one queue, from the footers."""

    group: int
    vhost: str
    queue: str
    type: str
    ranges: list[Range] = field(default_factory=list)
    """Everything that any node covers."""
    primary: list[Range] = field(default_factory=list)
    """Disjoint, ascending: from whom each entry is taken."""
    gaps: list[Gap] = field(default_factory=list)
    state_snapshots: list[dict[str, int]] = field(default_factory=list)
    """All summaries, with `node` and `incarnation`."""
    state_snapshot: dict[str, int] | None = None
    """The last complete one that the primary ranges reach."""
    lost: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    """Rows that files or their marks count and that are not there, by kind."""
    nodes: set[int] = field(default_factory=set)
    """Nodes whose files are there."""
    ends_us: dict[int, int] = field(default_factory=dict)
    """By node: until when its acts are there."""

    @property
    def start(self) -> int:
        """Entries up to here are older than the trace."""
        return self.primary[0].start if self.primary else 0

    @property
    def end(self) -> int:
        """Returns the last entry that is covered."""
        return self.primary[-1].end if self.primary else 0


def queue_facts(footers: Iterable[Footer]) -> list[QueueFacts]:
    """Joins the footers of all files to one `QueueFacts` per queue, by group.

    Raises ValueError when two queues claim one group: traces of different clusters were mixed.
    """
    found: dict[int, QueueFacts] = {}
    acts: dict[tuple[int, int], list[tuple[int, int, bool]]] = defaultdict(list)
    files: dict[int, list[Footer]] = defaultdict(list)
    for footer in footers:
        group = int(footer["group"])
        facts = found.get(group)
        if facts is None:
            facts = found[group] = QueueFacts(
                group, footer["vhost"], footer["queue"], footer["type"]
            )
        if (facts.vhost, facts.queue) != (footer["vhost"], footer["queue"]):
            raise ValueError(
                f"group {group} is queue '{facts.queue}' in one file and '{footer['queue']}' in "
                "another: audit the traces of one cluster at a time"
            )
        node, incarnation = int(footer["node"]), int(footer["incarnation"])
        files[group].append(footer)
        facts.nodes.add(node)
        facts.lost += int(footer["lost"])
        gone = int(footer["rows"]) - int(footer.get("found", footer["rows"]))
        if gone > 0:
            facts.missing["rows"] = facts.missing.get("rows", 0) + gone
        facts.ranges += [Range(node, incarnation, *each) for each in footer["covered"]]
        facts.state_snapshots += [
            {**each, "node": node, "incarnation": incarnation} for each in footer["state_snapshots"]
        ]
        spans = footer["acts"]
        acts[group, node] += [
            (start, end, bool(footer["closed"]) and [start, end] == spans[-1])
            for start, end in spans
        ]
    for facts in found.values():
        facts.ranges = _joined(facts.ranges)
        facts.primary = choose(facts.ranges)
        facts.gaps = [
            Gap(facts.group, 0, before.end, after.start)
            for before, after in zip(facts.primary, facts.primary[1:], strict=False)
            if before.end < after.start
        ]
        facts.state_snapshot = _last_state_snapshot(facts)
    for (group, node), known in sorted(acts.items()):
        if not known:
            continue
        known.sort()
        reached = known[0][1]
        in_order = True
        for start, end, closed in known:
            if start > reached and not in_order:
                found[group].gaps.append(Gap(group, node, reached, start))
            reached = max(reached, end)
            in_order = closed
        found[group].ends_us[node] = reached
    for group, facts in found.items():
        facts.gaps += _chain_gaps(facts, files[group])
        facts.gaps += _member_gaps(facts, files[group])
    return [found[group] for group in sorted(found)]


def _chain_gaps(facts: QueueFacts, footers: Iterable[Footer]) -> Iterable[Gap]:
    """Files that are not there: each names the one before it."""
    chains: dict[int, list[Footer]] = defaultdict(list)
    for footer in footers:
        chains[int(footer["node"])].append(footer)
    for node, chain in sorted(chains.items()):
        chain.sort(key=lambda footer: (footer["incarnation"], footer["number"]))
        before: list[int] | None = None
        reached = 0
        for footer in chain:
            spans = footer["acts"]
            start = spans[0][0] if spans else reached
            first = before is None and footer["number"] > 0
            if first or footer["previous"] != before:
                yield Gap(facts.group, node, reached, start, "files before are missing")
            before = [footer["incarnation"], footer["number"]]
            reached = spans[-1][1] if spans else reached


def _member_gaps(facts: QueueFacts, footers: list[Footer]) -> Iterable[Gap]:
    """Nodes, incarnations of nodes, and ends of what they recorded, that are not there."""
    last_us = max(facts.ends_us.values(), default=0)
    incarnations = {(int(footer["node"]), int(footer["incarnation"])) for footer in footers}
    members = {tuple(member) for footer in footers for member in footer["members"]}
    if not members:
        yield Gap(facts.group, 0, 0, 0, "no file says which nodes have replicas")
    replicas = {node for node, _, replica in members if replica}
    for node in sorted(replicas - facts.nodes):
        yield Gap(facts.group, node, 0, last_us, "a replica, and no file of it is there")
    for node, incarnation, replica in sorted(members):
        known = node in facts.nodes and replica and incarnation
        if known and (node, incarnation) not in incarnations:
            reached = facts.ends_us.get(node, 0)
            why = f"no file of its incarnation {incarnation} is there"
            yield Gap(facts.group, node, reached, last_us, why)
    closed = {}
    for footer in sorted(footers, key=lambda each: (each["incarnation"], each["number"])):
        closed[int(footer["node"])] = bool(footer["closed"])
    # The one that goes on longest may still run; but not when the others have ended in order.
    ended = any(closed.values())
    for node, reached in sorted(facts.ends_us.items()):
        if not closed[node] and (ended or reached < last_us):
            yield Gap(facts.group, node, reached, last_us, "it did not end its trace in order")


def _joined(ranges: list[Range]) -> list[Range]:
    """Contiguous ranges of one incarnation, which a new file had cut, as one."""
    made: list[Range] = []
    for each in sorted(ranges):
        last = made[-1] if made else None
        if last and last[:2] == each[:2] and each.start <= last.end:
            made[-1] = last._replace(end=max(last.end, each.end))
        else:
            made.append(each)
    return made


def choose(ranges: Iterable[Range]) -> list[Range]:
    """Disjoint ranges that cover all that `ranges` cover, with as few changes as possible."""
    left = sorted(ranges, key=lambda each: (each.start, -each.end))
    made: list[Range] = []
    reached = left[0].start if left else 0
    k = 0
    best: Range | None = None
    while k < len(left) or best is not None:
        while k < len(left) and left[k].start <= reached:
            if best is None or left[k].end > best.end:
                best = left[k]
            k += 1
        if best is not None and best.end > reached:
            made.append(best._replace(start=max(best.start, reached)))
            reached = best.end
            best = None
        else:
            best = None
            if k < len(left):
                reached = max(reached, left[k].start)
    return made


def _last_state_snapshot(facts: QueueFacts) -> dict[str, int] | None:
    """Returns the youngest complete state snapshot at an entry that is covered."""
    for state_snapshot in sorted(
        facts.state_snapshots, key=lambda each: each["index"], reverse=True
    ):
        index = state_snapshot["index"]
        reached = index == facts.start or any(r.start < index <= r.end for r in facts.primary)
        if state_snapshot["complete"] and reached:
            return state_snapshot
    return None
