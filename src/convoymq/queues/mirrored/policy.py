"""Policies of mirroring: which nodes shall have a queue, and when a mirror may take over. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from convoymq.metadata.placement import Places, spread
from convoymq.replication.ring.views import RingView

ALL = "all"
EXACTLY = "exactly"
NODES = "nodes"
SYNC_BATCH_SIZE = 4096
FAILED_AGAIN_MS = 10_000
"""Time before a node gets a mirror again that could not write one."""


class CopyAge(NamedTuple):
    """Age of a node's copy of a queue."""

    member: int = 0
    """Number of the ring's member that wrote it; 0 = there is none."""
    version: int = 0
    """The newest view that the member was part of, as far as the files say."""
    synchronised: bool = False
    """Mark of that view for the member."""
    leads: bool = False
    """The member is the master of that view: others may have got less of it."""

    def rank(self) -> tuple[bool, int, bool, int]:
        """Returns what is greater for a newer copy."""
        return self.synchronised, self.version, self.leads, -self.member


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorPolicy:
    """Settings of one queue (docs/mirrored.md)."""

    mode: str = ""
    """"": the queue has no mirrors."""
    count: int = 1
    names: tuple[str, ...] = ()
    syncs_by_itself: bool = False
    sync_batch_size: int = SYNC_BATCH_SIZE
    promotes_on_shutdown: bool = False
    """A mirror that is not synchronised may follow a master that was stopped."""
    promotes_on_failure: bool = True
    """A mirror that is not synchronised may follow a master that failed."""


def policy_from(settings: Mapping[str, object], batch_size: int = SYNC_BATCH_SIZE) -> MirrorPolicy:
    """Returns what the effective settings of a queue say of its mirrors."""
    mode = settings.get("ha-mode")
    if not isinstance(mode, str):
        return MirrorPolicy()
    params = settings.get("ha-params")
    size = settings.get("ha-sync-batch-size")
    return MirrorPolicy(
        mode=mode,
        count=params if isinstance(params, int) else 1,
        names=tuple(map(str, params)) if isinstance(params, list | tuple) else (),
        syncs_by_itself=settings.get("ha-sync-mode") == "automatic",
        sync_batch_size=size if isinstance(size, int) else batch_size,
        promotes_on_shutdown=settings.get("ha-promote-on-shutdown") == "always",
        promotes_on_failure=settings.get("ha-promote-on-failure") != "when-synced",
    )


def wanted_nodes(
    policy: MirrorPolicy,
    *,
    master: int,
    mirrors: Sequence[int],
    running: Collection[int],
    named: Mapping[str, int],
    load: Mapping[int, int],
    places: Places,
) -> tuple[int, ...]:
    """Returns the nodes that shall have a queue, the master first.

    Args:
        mirrors: nodes that have it now, oldest first.
        running: nodes that may get a mirror: they run, and are not drained.
        named: name -> node.
        load: node -> queues that it has; of nodes in zones with as few copies, those with fewer get
            the next mirror.
    """
    kept = [node for node in mirrors if node != master]
    present = (master, *kept)
    free = spread(running, places, members=present, count=len(running), replicas=load)
    if policy.mode == ALL:
        return (*present, *free)
    if policy.mode == EXACTLY:
        return (*present, *free)[: max(policy.count, 1)]
    if policy.mode == NODES:
        # Names of nodes that are no part of the cluster mean nothing.
        listed = {named[name] for name in policy.names if name in named}
        return (master, *(node for node in (*kept, *free) if node in listed))
    return (master,)


class MirrorFailures:
    """Mirrors that failed on nodes that run: their disks refuse something. Such a node gets another
    one after a while, or the ring would change without a pause."""

    def __init__(self) -> None:
        self._since_ms: dict[tuple[int, int], int] = {}
        """(group, node) -> time of the last failure."""

    def note(self, group: int, node: int, now_ms: int) -> None:
        """A mirror is in the ring no more, and its node runs."""
        self._since_ms[group, node] = now_ms

    def forget(self, group: int) -> None:
        """A queue is gone."""
        for key in [key for key in self._since_ms if key[0] == group]:
            del self._since_ms[key]

    def concerns(self, group: int, now_ms: int) -> bool:
        """Returns whether some node may not have a mirror of a queue now."""
        least = now_ms - FAILED_AGAIN_MS
        return any(key[0] == group and since > least for key, since in self._since_ms.items())

    def without(self, group: int, nodes: Iterable[int], now_ms: int) -> list[int]:
        """Returns the nodes of them that may have a mirror now."""
        since_ms = self._since_ms
        due = now_ms - FAILED_AGAIN_MS
        return [node for node in nodes if since_ms.get((group, node), due) <= due]


def master_nodes(policy: MirrorPolicy, named: Mapping[str, int]) -> set[int]:
    """Returns the nodes that may have the master: a master elsewhere is followed by a synchronised
    mirror on one of them.

    Args:
        named: name -> node, of those that run, and are not drained.
    """
    listed = {named[name] for name in policy.names if name in named and policy.mode == NODES}
    # Without a node of the list, the list means nothing.
    return listed or set(named.values())


def heir(
    view: RingView, copies: Mapping[int, CopyAge], *, follows_unsynchronised: bool, forced: bool
) -> int:
    """Returns the node whose copy a queue goes on with when its master is lost for good and no
    member of its ring runs; 0 = none may.

    The first of these that is there: a synchronised copy, another copy of the view, a copy of a
    former ring. The oldest of the view comes first. Of former rings, the copy that was synchronised
    in the newest view comes first: a member's number says when it came, not how long it stayed.

    Args:
        copies: node -> copy that it has, on running nodes.
        follows_unsynchronised: the policy lets a copy of the view follow that lacks messages.
        forced: an operator accepts what any copy lacks.
    """
    nodes = {copy.member: node for node, copy in copies.items() if copy.member}
    recorded = [number for number in sorted(nodes) if view.is_live(number)]
    for number in recorded:
        if number in view.synchronised:
            return nodes[number]
    if recorded and (forced or follows_unsynchronised):
        return nodes[recorded[0]]
    if not nodes or not forced:
        return 0
    return max(nodes.values(), key=lambda node: copies[node].rank())
