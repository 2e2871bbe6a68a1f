"""Carries out the way back from a lost majority (`cluster.recovery_plan` decides it; ADR 0024).

Every node answers questions of the one that an operator talks to, in CONTROL requests of kind
`KIND_RECOVERY`:

| op     | answer                                                                        |
|--------|-------------------------------------------------------------------------------|
| report | the node's `NodeReport`                                                       |
| tree   | places of all groups and all nodes, as this node's log of the metadata has it |
| switch | takes the new cluster id: nodes with the former one are not linked any more   |
| take   | makes this node's copies of some groups go on as their only voters            |

Order of an execution: all reachable nodes switch to a new cluster id, so that missing ones that
come back cannot join what they have missed; then the metadata group goes on, then the queues; then
the missing nodes are forgotten and what may be lost is recorded in the tree.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
import structlog

from convoymq.admin_socket import Progress
from convoymq.cluster.commands import ForgetNode, RecordRecovery
from convoymq.cluster.control import KIND_RECOVERY
from convoymq.cluster.metadata import MetadataMachine
from convoymq.cluster.recovery_plan import (
    METADATA_GROUP,
    CopyReport,
    GroupPlace,
    NodeReport,
    Outcome,
    Plan,
    make_plan,
)
from convoymq.kernels import batch
from convoymq.model.errors import BrokerError, Misuse, StorageFault, Unavailable
from convoymq.replication.raft.membership import Membership
from convoymq.storage.log import NO_NODE

log = structlog.get_logger()

ASK_TIMEOUT_S = 30.0
SETTLE_TIMEOUT_S = 60.0
SWITCH_DELAY_S = 0.2
"""The answer to `switch` must be out before the links are made anew."""
POLL_S = 0.05
TAKE_GROUPS_MAX = 500
CONFIRMATION = "lose what is missing"
"""What an operator types before a plan is carried out."""


class Recovery:
    """One node's part; `node` is the `Node` it belongs to."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._running = False
        node.control.handle(KIND_RECOVERY, self._on_request)

    # -- for the operator -------------------------------------------------------------------

    async def plan(self, _request: dict[str, Any], _progress: Progress) -> dict[str, Any]:
        """Returns the plan as it is now, with its digest and what must be typed to carry it out."""
        plan = await self._make()
        return {**plan.to_builtins(), "digest": plan.digest, "confirmation": CONFIRMATION,
                "needed": plan.needed}  # fmt: skip

    async def history(self, _request: dict[str, Any], _progress: Progress) -> list[Any]:
        """Returns what earlier recoveries have recorded, oldest first."""
        return [dict(row) for row in self._node.machine.recoveries]

    async def execute(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Carries out the plan that was shown.

        Raises:
            Misuse: not confirmed, not the plan that was shown, nothing to do, or already running.
            Unavailable: a node did not do its part; what was done stays done, a new plan goes on
                from there.
        """
        if request.get("confirmation") != CONFIRMATION:
            raise Misuse("the plan was not confirmed")
        if self._running:
            raise Misuse("a recovery is running")
        self._running = True
        try:
            plan = await self._make()
            if request.get("digest") != plan.digest:
                raise Misuse("things have changed since the plan was shown: look at the new one")
            if not plan.needed:
                raise Misuse("every group has a majority: there is nothing to recover")
            return await self._execute(plan, progress)
        finally:
            self._running = False

    # -- planning ---------------------------------------------------------------------------

    async def _make(self) -> Plan:
        node = self._node
        if not node.identity.cluster:
            raise Misuse("this node is not part of a cluster yet")
        reports = {node.id: self._report()}
        answers = await asyncio.gather(
            *(self._ask(peer, {"op": "report"}) for peer in node.links.connected()),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                continue
            report = msgspec.convert(answer, NodeReport)
            reports[report.node] = report
        own = {report.node: copy for report in reports.values() for copy in report.copies
               if copy.group == METADATA_GROUP and not copy.unusable}  # fmt: skip
        if not own:
            raise Unavailable("no reachable node has a usable copy of the metadata")
        best = max(own, key=lambda n: (own[n].last_term, own[n].last_index, n == node.id))
        tree = await self._ask(best, {"op": "tree"})
        places = [msgspec.convert(place, GroupPlace) for place in tree["places"]]
        return make_plan(places=places, reports=reports, nodes=tree["nodes"])

    def _report(self) -> NodeReport:
        node = self._node
        copies = tuple(self._copy(group, found) for group, found in node.storage.logs.items())
        identity = node.identity
        return NodeReport(
            node=node.id,
            cluster=identity.cluster,
            former=identity.former,
            ready=node.usable,
            copies=copies,
        )

    def _copy(self, group: int, found: Any) -> CopyReport:
        replica = self._node.host.replica(group)
        unusable = ""
        voters: tuple[int, ...] = ()
        led = found.voted_for == self._node.id and found.term == found.last_term
        if found.damaged is not None:
            unusable = f"damaged: {found.damaged.reason}"
        elif replica is not None:
            unusable = replica.stopped or replica.faulty
            voters = replica.members
            led = led or replica.is_leader
        if not unusable and found.voted_for > NO_NODE:
            unusable = "its log was lost and is not back yet"
        last_time_ms = 0
        if not unusable and found.last_index:
            try:
                last_time_ms = found.entry(found.last_index).time_ms
            except (StorageFault, LookupError):
                # A log that ends with its snapshot.
                last_time_ms = 0
        return CopyReport(
            group=group,
            term=found.term,
            last_index=found.last_index,
            last_term=found.last_term,
            last_time_ms=last_time_ms,
            led=led,
            voters=voters,
            unusable=unusable,
        )

    def _tree(self) -> dict[str, Any]:
        """The metadata as they will be when this node's log of them is applied to its end."""
        found = self._node.storage.logs.get(METADATA_GROUP)
        if found is None:
            raise Unavailable("this node has no metadata")
        machine = MetadataMachine()
        try:
            snapshot = found.read_snapshot() if found.snapshot_index else None
            if snapshot is not None:
                machine.restore(snapshot.state)
            index = found.snapshot_index + 1
            while index <= found.last_index:
                for entry in found.entries(index, 4 << 20):
                    if entry.kind == batch.ENTRY_COMMANDS:
                        machine.apply(entry.index, entry.time_ms, entry.data)
                    index = entry.index + 1
        except (BrokerError, LookupError, ValueError) as error:
            raise Unavailable(
                f"the metadata of node {self._node.id} are unreadable: {error}"
            ) from None
        replica = self._node.host.replica(METADATA_GROUP)
        members = tuple(sorted(replica.core.members.nodes)) if replica is not None else ()
        nodes = sorted(set(machine.nodes) | set(members) or {self._node.id})
        places = [GroupPlace(group=METADATA_GROUP, vhost="", name="metadata",
                             members=members or tuple(nodes))]  # fmt: skip
        places += [
            GroupPlace(group=r.group, vhost=r.vhost, name=r.name, members=r.members)
            for r in machine.records()
            if r.type.is_replicated
        ]
        return {"nodes": nodes, "places": [asdict(place) for place in places]}

    # -- carrying out -----------------------------------------------------------------------

    async def _execute(self, plan: Plan, progress: Progress) -> dict[str, Any]:
        node = self._node
        former = plan.cluster
        cluster = secrets.token_hex(16)
        log.warning("recovery.started", node=node.id, cluster=former, new=cluster,
                    missing=list(plan.missing))  # fmt: skip
        others = [n for n in plan.reachable if n != node.id]
        switch = {"op": "switch", "former": former, "cluster": cluster,
                  "missing": list(plan.missing)}  # fmt: skip
        progress(f"new cluster id {cluster}, former {former}")
        for other in (*others, node.id):
            await self._ask(other, switch)
        await self._until(lambda: set(others) <= set(node.links.connected()),
                          "the reachable nodes are not linked again")  # fmt: skip
        recovered = [g for g in plan.groups if g.outcome is Outcome.RECOVER]
        for group in recovered:
            if group.group == METADATA_GROUP:
                progress(f"metadata: node {group.survivor} goes on")
                await self._take(group.survivor, [(group.group, group.followers)])
        await self._until_ready(plan.reachable)
        queues = [g for g in recovered if g.group != METADATA_GROUP]
        failed: list[str] = []
        for survivor in sorted({g.survivor for g in queues}):
            mine = [(g.group, g.followers) for g in queues if g.survivor == survivor]
            progress(f"node {survivor}: {len(mine)} queues go on")
            for at in range(0, len(mine), TAKE_GROUPS_MAX):
                failed += await self._take(survivor, mine[at : at + TAKE_GROUPS_MAX])
        touched = [g for g in plan.groups if g.outcome is not Outcome.INTACT]
        await node.store.execute(
            RecordRecovery(
                cluster_id=cluster,
                former_id=node.machine.cluster_id or former,
                lost_nodes=plan.missing,
                time_ms=time.time_ns() // 1_000_000,
                groups=tuple(
                    {
                        "group": g.group, "vhost": g.vhost, "name": g.name,
                        "outcome": g.outcome.value, "survivor": g.survivor,
                        "last_term": g.last_term, "last_index": g.last_index,
                        "last_time_ms": g.last_time_ms, "loss": g.loss,
                    }
                    for g in touched
                ),
            ),
            ASK_TIMEOUT_S,
        )  # fmt: skip
        for missing in plan.missing:
            progress(f"node {missing} is forgotten")
            await node.store.execute(ForgetNode(id=missing), ASK_TIMEOUT_S)
        log.warning("recovery.done", node=node.id, cluster=cluster, groups=len(recovered),
                    failed=failed)  # fmt: skip
        return {"cluster": cluster, "recovered": len(recovered), "failed": failed,
                "lost": sum(g.outcome is Outcome.LOST for g in plan.groups)}  # fmt: skip

    async def _take(self, survivor: int, groups: list[tuple[int, tuple[int, ...]]]) -> list[str]:
        asked = [[group, list(followers)] for group, followers in groups]
        answer = await self._ask(survivor, {"op": "take", "groups": asked})
        return [str(text) for text in answer]

    async def _until_ready(self, nodes: tuple[int, ...]) -> None:
        """Waits until every reachable node has opened its queues."""
        deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
        waiting = list(nodes)
        while waiting:
            node = waiting[0]
            try:
                if (await self._ask(node, {"op": "ready"}))["ready"]:
                    waiting.pop(0)
                    continue
            except BrokerError:
                pass
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"node {node} has not opened its queues; see its log")
            await asyncio.sleep(POLL_S)

    async def _until(self, condition: Callable[[], bool], text: str) -> None:
        deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(text)
            await asyncio.sleep(POLL_S)

    async def _ask(self, node: int, body: dict[str, Any]) -> Any:
        return await self._node.control.request(node, KIND_RECOVERY, body, ASK_TIMEOUT_S)

    # -- for other nodes --------------------------------------------------------------------

    async def _on_request(self, asker: int, body: Any) -> Any:
        match body["op"]:
            case "report":
                return asdict(self._report())
            case "tree":
                return self._tree()
            case "ready":
                return {"ready": self._node.usable}
            case "switch":
                return self._switch(body["former"], body["cluster"], body["missing"])
            case "take":
                return [text for group, followers in body["groups"]
                        if (text := self._take_over(group, followers))]  # fmt: skip
            case op:
                raise Misuse(f"unknown recovery op {op!r}")

    def _switch(self, former: str, cluster: str, missing: list[int]) -> bool:
        node = self._node
        if node.identity.cluster == cluster:
            return True
        if node.identity.cluster != former:
            raise Misuse(f"node {node.id} belongs to cluster {node.identity.cluster}")
        log.warning("recovery.switched", node=node.id, cluster=cluster, former=former,
                    missing=missing)  # fmt: skip
        node.switch_cluster(cluster, SWITCH_DELAY_S)
        return True

    def _take_over(self, group: int, followers: list[int]) -> str:
        """Makes this node's copy the only voter; returns what was wrong, or ""."""
        replica = self._node.host.replica(group)
        if replica is None:
            return f"group {group}: no copy on node {self._node.id}"
        learners = tuple(replica.core.new_learner(node) for node in followers)
        refused = replica.recover_membership(Membership(frozenset({self._node.id}), learners))
        if refused is not None:
            return f"group {group}: {refused}"
        log.warning("recovery.group", node=self._node.id, group=group, followers=followers)
        return ""
