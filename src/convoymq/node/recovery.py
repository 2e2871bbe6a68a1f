"""Carries out the way back from a lost majority (`groups.recovery_plan` decides it; ADR 0024).

Every node answers questions of the one that an operator talks to, in CONTROL requests of kind
`KIND_RECOVERY`:

| op     | answer                                                                        |
|--------|-------------------------------------------------------------------------------|
| report | the node's `NodeReport`                                                       |
| tree   | places of all groups and all nodes, as this node's log of the metadata has it |
| switch | takes the new cluster id: nodes with the former one are not linked any more   |
| take   | makes this node's copies of some groups go on as their only voters            |

Order of an execution: all reachable nodes switch to a new cluster id, so that missing ones that
come back cannot join what they have missed; then the metadata group goes on; then mirrored queues
whose master is missing go on with other copies; then one command records in the tree what may be
lost, gives the cluster its new id and forgets the missing nodes; then the queues go on. Whatever
ends it early, a new plan goes on from there: until the record is made the tree has another id than
the nodes, and nobody is let in.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import structlog

from convoymq.kernels.entries import ENTRY_COMMANDS, ENTRY_VERSION, decode_version
from convoymq.metadata.commands import RecordRecovery
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.errors import (
    BrokerError,
    Misuse,
    PreconditionFailed,
    StorageFault,
    Unavailable,
)
from convoymq.node.admin_socket import Progress
from convoymq.replication.raft.membership import Membership
from convoymq.replication.raft.types import LOST_STATE, QUARANTINED
from convoymq.routing.queue_types import PlacementKind
from convoymq.shells.groups.recovery_plan import (
    METADATA_GROUP,
    CopyReport,
    GroupPlace,
    NodeReport,
    Outcome,
    Plan,
    make_plan,
)
from convoymq.transport.control import Body
from convoymq.transport.frame_kinds import KIND_RECOVERY

if TYPE_CHECKING:
    from convoymq.metadata.commands import Command
    from convoymq.model.clock import Clock
    from convoymq.queues.interface import Row
    from convoymq.shells.groups.host import ReplicaHost
    from convoymq.storage.log import GroupLog
    from convoymq.storage.store import Storage
    from convoymq.transport.handshake import PeerHello
    from convoymq.transport.identity import NodeIdentity

log = structlog.get_logger()

ASK_TIMEOUT_S = 30.0
SETTLE_TIMEOUT_S = 60.0
SWITCH_DELAY_S = 0.2
"""The answer to `switch` must be out before the links are made anew."""
POLL_S = 0.05
TAKE_GROUPS_MAX = 500
CONFIRMATION = "lose what is missing"
"""Text that an operator types before a plan is carried out."""


def _random_id() -> str:
    return secrets.token_hex(16)


class Control(Protocol):
    """Interface of `ControlPlane` that recovery needs."""

    def handle(
        self, kind: int, handler: Callable[[int, object], Coroutine[object, None, object]], /
    ) -> None:
        """Registers who answers requests of a kind."""

    async def request(self, node: int, kind: int, body: object, timeout: float, /) -> object:
        """Asks a node, itself included."""


class Links(Protocol):
    """Interface of `transport.links.Links` that recovery needs."""

    def connected(self) -> list[int]:
        """Nodes that are reached."""

    def hello_of(self, node: int, /) -> PeerHello | None:
        """Returns what a node told of itself when it was last linked."""


class Store(Protocol):
    """Interface of `AsyncMetadataStore` that recovery needs."""

    async def execute(self, command: Command, timeout: float, /) -> object:
        """Applies a command in the whole cluster."""


class RecoveredNode(Protocol):
    """Interface of `Node` that recovery needs."""

    @property
    def id(self) -> int:
        """Returns the node's number."""

    @property
    def identity(self) -> NodeIdentity:
        """Returns its present identity."""

    @property
    def usable(self) -> bool:
        """Returns whether clients may come."""

    @property
    def machine(self) -> MetadataMachine:
        """Returns the tree."""

    @property
    def storage(self) -> Storage:
        """Returns the node's logs."""

    @property
    def host(self) -> ReplicaHost:
        """Returns the node's groups."""

    @property
    def clock(self) -> Clock:
        """Time."""

    @property
    def control(self) -> Control:
        """Requests to other nodes."""

    @property
    def links(self) -> Links:
        """Returns the node's links."""

    @property
    def store(self) -> Store:
        """Writes into the tree."""

    async def force_boot(self) -> list[Row]:
        """Has mirrored queues go on without masters that do not run; a row for each."""

    def switch_cluster(self, cluster: str, delay_s: float, /) -> None:
        """Gives the cluster another id; links are made anew after the delay."""


class Recovery:
    """One node's part; `node` is the `Node` it belongs to.

    Args:
        new_id: makes the id of the cluster that goes on.
    """

    def __init__(self, node: RecoveredNode, new_id: Callable[[], str] = _random_id) -> None:
        self._node = node
        self._new_id = new_id
        self._running = False
        node.control.handle(KIND_RECOVERY, self._on_request)

    # -- for the operator -------------------------------------------------------------------

    async def plan(self, _request: dict[str, object], _progress: Progress) -> dict[str, Any]:
        """Returns the plan as it is now, with its digest and what must be typed to carry it out."""
        plan = await self._make()
        return {**plan.to_builtins(), "digest": plan.digest, "confirmation": CONFIRMATION,
                "needed": plan.needed}  # fmt: skip

    async def history(
        self, _request: dict[str, object], _progress: Progress
    ) -> list[dict[str, object]]:
        """Returns what earlier recoveries have recorded, oldest first."""
        return [dict(row) for row in self._node.machine.recoveries]

    async def execute(self, request: dict[str, object], progress: Progress) -> dict[str, object]:
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
        reports: dict[int, NodeReport] = {}
        answers = await asyncio.gather(
            *(self._ask(each, {"op": "report"}) for each in (node.id, *node.links.connected())),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, Exception):
                continue
            if isinstance(answer, BaseException):
                raise answer
            report = msgspec.convert(answer, NodeReport)
            # A node that was emptied and waits to be let in is as good as missing.
            if report.cluster == node.identity.cluster:
                reports[report.node] = report
        if node.id not in reports:
            raise Unavailable("this node cannot read its own data")
        own = {report.node: copy for report in reports.values() for copy in report.copies
               if copy.group == METADATA_GROUP and not copy.unusable}  # fmt: skip
        if not own:
            raise Unavailable("no reachable node has a usable copy of the metadata")
        best = max(own, key=lambda n: (own[n].last_term, own[n].last_index, n == node.id))
        tree = await self._ask(best, {"op": "tree"})
        places = [msgspec.convert(place, GroupPlace) for place in tree["places"]]
        return make_plan(
            places=places, reports=reports, nodes=tree["nodes"], recorded=tree["cluster"]
        )

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

    def _copy(self, group: int, found: GroupLog) -> CopyReport:
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
        # Who has its log again, and votes from the next term on (WITHHELD), is whole.
        if not unusable and found.voted_for in (LOST_STATE, QUARANTINED):
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

    def _tree(self) -> dict[str, object]:
        """Returns the metadata as they will be when this node's log of them is applied to its
        end."""
        found = self._node.storage.logs.get(METADATA_GROUP)
        if found is None:
            raise Unavailable("this node has no metadata")
        machine = MetadataMachine()
        try:
            snapshot = found.read_snapshot() if found.snapshot_index else None
            if snapshot is not None:
                machine.restore(snapshot.state)
            # The newest snapshot may lie on the disk before the log counts on it.
            index = max(found.snapshot_index, machine.applied_index) + 1
            while index <= found.last_index:
                for entry in found.entries(index, 4 << 20):
                    if entry.kind == ENTRY_COMMANDS:
                        machine.apply(entry.index, entry.time_ms, entry.data)
                    elif entry.kind == ENTRY_VERSION:
                        # As `Replica` does: from here on the rules are others.
                        version = decode_version(entry.data)
                        if version > machine.version:
                            machine.set_version(version)
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
            if r.placement is PlacementKind.RAFT
        ]
        return {
            "nodes": nodes,
            "places": [asdict(place) for place in places],
            "cluster": machine.cluster_id,
        }

    # -- carrying out -----------------------------------------------------------------------

    async def _execute(self, plan: Plan, progress: Progress) -> dict[str, object]:
        node = self._node
        former = plan.cluster
        cluster = self._new_id()
        log.warning("recovery.started", node=node.id, cluster=former, new=cluster,
                    missing=list(plan.missing))  # fmt: skip
        others = [n for n in plan.reachable if n != node.id]
        switch = {"op": "switch", "former": former, "cluster": cluster,
                  "missing": list(plan.missing)}  # fmt: skip
        progress(f"new cluster id {cluster}, former {former}")
        for other in (*others, node.id):
            await self._ask(other, switch)
        await self._until(lambda: self._linked_as(cluster, others),
                          "the reachable nodes are not linked again")  # fmt: skip
        recovered = [g for g in plan.groups if g.outcome is Outcome.RECOVER]
        for group in recovered:
            if group.group == METADATA_GROUP:
                progress(f"metadata: node {group.survivor} goes on")
                failed = await self._take(group.survivor, [(group.group, group.followers)])
                if failed:
                    raise Unavailable(f"the metadata do not go on: {failed[0]}")
        await self._until_ready(plan.reachable)
        # The record deletes the queues of which only missing nodes have a copy.
        for row in await node.force_boot():
            progress(f"mirrored queue '{row['name']}' in vhost '{row['vhost']}': {row['result']}")
        progress("the recovery is recorded, missing nodes are forgotten")
        await self._record(plan, cluster)
        queues = [g for g in recovered if g.group != METADATA_GROUP]
        failed = []
        for survivor in sorted({g.survivor for g in queues}):
            mine = [(g.group, g.followers) for g in queues if g.survivor == survivor]
            progress(f"node {survivor}: {len(mine)} queues go on")
            for at in range(0, len(mine), TAKE_GROUPS_MAX):
                failed += await self._take(survivor, mine[at : at + TAKE_GROUPS_MAX])
        log.warning("recovery.done", node=node.id, cluster=cluster, groups=len(recovered),
                    failed=failed)  # fmt: skip
        return {"cluster": cluster, "recovered": len(recovered), "failed": failed,
                "lost": sum(g.outcome is Outcome.LOST for g in plan.groups)}  # fmt: skip

    def _linked_as(self, cluster: str, nodes: list[int]) -> bool:
        links = self._node.links
        hellos = [links.hello_of(n) for n in nodes]
        told = all(hello is not None and hello.cluster_id == cluster for hello in hellos)
        return told and set(nodes) <= set(links.connected())

    async def _record(self, plan: Plan, cluster: str) -> None:
        """Writes into the tree what may be lost, the new id, and that missing nodes are gone."""
        node = self._node
        groups = tuple(
            {
                "group": g.group, "vhost": g.vhost, "name": g.name,
                "outcome": g.outcome.value, "survivor": g.survivor,
                "last_term": g.last_term, "last_index": g.last_index,
                "last_time_ms": g.last_time_ms, "loss": g.loss,
            }
            for g in plan.groups if g.outcome is not Outcome.INTACT
        )  # fmt: skip
        while True:
            former = node.machine.cluster_id
            if former == cluster:
                # The tree began anew after the switch: what it was is in the identity only.
                former = node.identity.former[-1]
            try:
                await node.store.execute(
                    RecordRecovery(
                        cluster_id=cluster,
                        former_id=former,
                        lost_nodes=plan.missing,
                        time_ms=node.clock.now_ms(),
                        groups=groups,
                    ),
                    ASK_TIMEOUT_S,
                )
            except PreconditionFailed:
                # The record of an earlier attempt may have been on its way until now.
                if node.machine.cluster_id == former:
                    raise
            else:
                return

    async def _take(self, survivor: int, groups: list[tuple[int, tuple[int, ...]]]) -> list[str]:
        """Has copies of a node go on; returns what was wrong with those that did not."""
        deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
        while True:
            asked = [[group, list(followers)] for group, followers in groups]
            answer: list[tuple[int, str]] = await self._ask(
                survivor, {"op": "take", "groups": asked}
            )
            # Queues may have been deleted since the plan was made: clients are served again.
            kept = {METADATA_GROUP, *(record.group for record in self._node.machine.records())}
            answer = [(group, text) for group, text in answer if group in kept]
            if not answer or asyncio.get_running_loop().time() > deadline:
                return [str(text) for _, text in answer]
            # A replica that still hears somebody stands for election first.
            refused = {group for group, _ in answer}
            groups = [each for each in groups if each[0] in refused]
            await asyncio.sleep(POLL_S)

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

    async def _ask(self, node: int, body: Mapping[str, object]) -> Body:
        return await self._node.control.request(node, KIND_RECOVERY, body, ASK_TIMEOUT_S)

    # -- for other nodes --------------------------------------------------------------------

    async def _on_request(self, asker: int, body: Body) -> object:
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
                return [[group, text] for group, followers in body["groups"]
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
        if replica.is_leader and replica.core.members.voters == {self._node.id}:
            return ""
        learners = tuple(replica.core.changes.new_learner(node) for node in followers)
        refused = replica.changes.force(Membership(frozenset({self._node.id}), learners))
        if refused is not None:
            return f"group {group}: {refused}"
        log.warning("recovery.group", node=self._node.id, group=group, followers=followers)
        return ""
