"""Plans the way back from a lost majority: which copy of each group goes on, and what may be lost.

Pure: reports of the nodes that can be reached go in, a plan comes out. The shell that gathers
reports and carries a plan out is `convoymq.node.recovery`.

| reachable members of a group          | plan                                                     |
|---------------------------------------|----------------------------------------------------------|
| a majority of its voters              | INTACT: nothing is done, the group elects by itself      |
| some, with a log that can be read     | RECOVER: the copy with the newest log goes on alone, the |
|                                       | other reachable copies follow it                         |
| none, or only damaged or empty logs   | LOST: no copy can be reached; the group is left alone    |

The newest log is the one with the highest (last term, last index), as in an election (Raft thesis
3.6.1). No log proves that nothing newer existed: an entry can be committed on the lost majority
alone. A copy whose last entry was written in a term that this node led holds everything that was
committed up to that term, so then only what lost nodes did without it can be missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import msgspec

from convoymq.replication.raft.quorum import has_majority

METADATA_GROUP = 0


class Outcome(Enum):
    """Decision of the plan about a group."""

    INTACT = "intact"
    RECOVER = "recover"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """One node's copy of one group: where its log ends."""

    group: int
    term: int
    last_index: int
    last_term: int
    last_time_ms: int = 0
    """Time of the last entry, ms since the epoch; 0 = not known."""
    led: bool = False
    """True if this node led the group in the term of its last entry."""
    voters: tuple[int, ...] = ()
    """The configuration that the log ends with; empty = the log does not say."""
    unusable: str = ""
    """Reason why the copy cannot go on: damaged, stopped, or lost its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Report of a reachable node on itself and its copies."""

    node: int
    cluster: str
    former: tuple[str, ...] = ()
    ready: bool = False
    """Clients are served: the node's broker is open."""
    copies: tuple[CopyReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A group as the metadata know it."""

    group: int
    vhost: str
    name: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Plan for one group."""

    group: int
    vhost: str
    name: str
    members: tuple[int, ...]
    reachable: tuple[int, ...]
    outcome: Outcome
    survivor: int = 0
    """The node whose copy goes on."""
    followers: tuple[int, ...] = ()
    """Reachable members that catch up from the survivor."""
    last_term: int = 0
    last_index: int = 0
    last_time_ms: int = 0
    loss: str = ""
    """Possible loss, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole plan. `digest` names it: only a plan that was shown is carried out."""

    cluster: str
    reachable: tuple[int, ...]
    missing: tuple[int, ...]
    """Nodes of the cluster that cannot be reached: they are removed from it."""
    groups: tuple[GroupPlan, ...] = field(default=())
    unfinished: bool = False
    """A recovery has begun and is not recorded: the tree has another id than the nodes."""

    @property
    def needed(self) -> bool:
        """Returns whether there is something to do: a copy goes on alone, or a recovery is
        finished.

        Groups of which nothing is left are not helped by it: whoever declared them deletes them.
        """
        return self.unfinished or any(group.outcome is Outcome.RECOVER for group in self.groups)

    @property
    def digest(self) -> str:
        """Equal for equal plans; where logs end counts too."""
        return hashlib.sha256(msgspec.msgpack.encode(self.to_builtins())).hexdigest()[:16]

    def to_builtins(self) -> dict[str, object]:
        """Returns plain values, for JSON."""
        return {
            "cluster": self.cluster,
            "reachable": list(self.reachable),
            "missing": list(self.missing),
            "unfinished": self.unfinished,
            "groups": [{**asdict(g), "outcome": g.outcome.value} for g in self.groups],
        }


def make_plan(
    *,
    places: Sequence[GroupPlace],
    reports: Mapping[int, NodeReport],
    nodes: Sequence[int],
    recorded: str = "",
) -> Plan:
    """Returns what would have to be done now.

    Args:
        places: the metadata group and all queues that are groups.
        reports: by node; nodes that do not answer are missing.
        nodes: all nodes of the cluster.
        recorded: id of the cluster by its tree; "" = it has none yet.
    """
    assert reports
    copies = {
        (report.node, copy.group): copy for report in reports.values() for copy in report.copies
    }
    made = [_plan_group(place, reports, copies) for place in sorted(places, key=_by_group)]
    cluster = next(iter(reports.values())).cluster
    return Plan(
        cluster=cluster,
        unfinished=recorded not in ("", cluster),
        reachable=tuple(sorted(reports)),
        missing=tuple(sorted(set(nodes) - set(reports))),
        groups=tuple(made),
    )


def _by_group(place: GroupPlace) -> int:
    return place.group


def _plan_group(
    place: GroupPlace,
    reports: Mapping[int, NodeReport],
    copies: Mapping[tuple[int, int], CopyReport],
) -> GroupPlan:
    reachable = tuple(node for node in place.members if node in reports)
    known = {node: copies[node, place.group] for node in reachable if (node, place.group) in copies}
    usable = {node: copy for node, copy in known.items() if not copy.unusable and copy.last_index}
    best = max(usable, key=lambda node: _newest(usable[node], node), default=0)
    # The log itself knows better than the metadata who votes: the record follows it later.
    voters = frozenset((usable[best].voters if best else ()) or place.members)
    able = {node for node, copy in known.items() if not copy.unusable}
    common: dict[str, Any] = {
        "group": place.group,
        "vhost": place.vhost,
        "name": place.name,
        "members": place.members,
        "reachable": reachable,
    }
    if has_majority(able, voters):
        return GroupPlan(**common, outcome=Outcome.INTACT, loss="none")
    if not best:
        reasons = sorted({copy.unusable for copy in known.values() if copy.unusable})
        why = f" ({'; '.join(reasons)})" if reasons else ""
        return GroupPlan(
            **common,
            outcome=Outcome.LOST,
            loss=f"everything: no usable copy on a reachable node{why}",
        )
    chosen = usable[best]
    return GroupPlan(
        **common,
        outcome=Outcome.RECOVER,
        survivor=best,
        followers=tuple(sorted(set(reachable) - {best})),
        last_term=chosen.last_term,
        last_index=chosen.last_index,
        last_time_ms=chosen.last_time_ms,
        loss=_loss(chosen),
    )


def _newest(copy: CopyReport, node: int) -> tuple[int, int, int]:
    return copy.last_term, copy.last_index, -node


def _loss(copy: CopyReport) -> str:
    if copy.led and copy.last_term == copy.term:
        return "none, unless the missing nodes went on without this one"
    return (
        f"what only the missing nodes had: entries after {copy.last_index} of term {copy.last_term}"
    )
