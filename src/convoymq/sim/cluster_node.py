"""A simulated node of a cluster that keeps its own books: the metadata group says what is where.

It does what `node` and `broker.facade` do in production around the same cores: `Formation` decides
how the node comes to its cluster, `MetadataStore` carries commands into the tree, `LocalQueues`
opens and ends queues by the tree, `MembershipManager` keeps groups, records and links in step.
`node.json` is `Saved`: replaced whole, and durable at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from convoymq.broker.local_queues import LocalQueues, make_machine
from convoymq.metadata.commands import Bootstrap, PutNode
from convoymq.metadata.formation import (
    FOUNDED_MS,
    Accept,
    Action,
    AskToFound,
    AskToJoin,
    Fail,
    Formation,
    Found,
    Joined,
    Resume,
    Wait,
    Withdraw,
    founding_to,
    join_request,
)
from convoymq.metadata.joining import JoinDesk
from convoymq.metadata.machine import Change, MetadataMachine, QueueRecord
from convoymq.metadata.members import NOWHERE, MembershipManager
from convoymq.metadata.store import MetadataSink, MetadataStore
from convoymq.metadata.voters import MetadataVoters
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.model.tables import Table
from convoymq.queues.driver import GroupQuestions, QueueMachine
from convoymq.queues.group_queue import TICK_MS
from convoymq.queues.placement import Placement
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.stream.machine import StreamMachine
from convoymq.replication import versions as supported
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.group_node import AUDIT_MS, GroupNode, watch
from convoymq.sim.lost_majority import RecoveryPort
from convoymq.sim.network import Receiver
from convoymq.storage.log import GroupLog
from convoymq.transport.frame_kinds import KIND_FOUND, KIND_JOIN, KIND_RECOVERY
from convoymq.transport.handshake import Hello, LinkRefused, OwnHello, PeerHello, read_hello
from convoymq.transport.identity import Founding, NodeIdentity

if TYPE_CHECKING:
    from convoymq.sim.cluster_world import ClusterWorld

FORM_TICK_US = 10_000
MEMBER_TICK_US = 200_000
JOIN_WAIT_MS = 5000
REGISTER_MS = 2000
VOTER_AWAY_MS = 1000
NAME = "sim"


@dataclass(slots=True)
class Saved:
    """Content of `node.json`."""

    identity: NodeIdentity
    founding: Founding | None = None
    logged: bool = False
    lost_groups: int = 0


class IndexedTree(MetadataMachine):
    """The metadata machine, with the index of other machines."""

    @property
    def index(self) -> int:
        """Index of the latest entry that was applied."""
        return self.applied_index


class SimLinks:
    """Links, as a `MembershipManager` uses them."""

    def __init__(self, node: ClusterNode) -> None:
        self.forgotten: set[int] = set()
        self._node = node

    def forget(self, node: int) -> None:
        """Drops and refuses a node."""
        self.forgotten.add(node)
        self._node.world.network.drop(self._node.number, node)
        if self._node.relays is not None:
            self._node.relays.forget(node)

    def remember(self, node: int) -> None:
        """Takes it again."""
        self.forgotten.discard(node)


class ClusterNode(GroupNode):
    """One node of a `ClusterWorld`.

    Args:
        peers: numbers of the nodes that its configuration names as founders.
        is_foreign: it is of another cluster.
    """

    world: ClusterWorld

    def __init__(
        self,
        world: ClusterWorld,
        number: int,
        peers: tuple[int, ...],
        *,
        is_foreign: bool = False,
    ) -> None:
        super().__init__(world, number)
        self.is_foreign = is_foreign
        self.place = NOWHERE
        self.node_id = number
        self.peers = peers
        self.saved: Saved | None = None
        self.removed = False
        """The node was told that it is no part of the cluster, and has stopped for good."""
        self.incarnation = 0
        self.hellos: dict[int, PeerHello] = {}
        self.local: LocalQueues | None = None
        self.store: MetadataStore | None = None
        self.membership_manager: MembershipManager | None = None
        self.formation: Formation | None = None
        self.desk: JoinDesk | None = None
        self.metadata: MetadataStore | None = None
        self._reconciling = False

    # Start.

    def _begin_incarnation(self) -> None:
        world = self.world
        if self.saved is None:
            made = NodeIdentity(self.number, world.new_id(), 0, "", world.new_id())
            self.saved = Saved(made)
        identity = self.saved.identity
        self.saved.identity = replace(identity, incarnation=identity.incarnation + 1)
        self.incarnation = self.saved.identity.incarnation
        self.local = self.store = self.metadata = self.membership_manager = None
        self.hellos = {}
        self.linked_as = self.saved.identity
        self.sim_links = SimLinks(self)
        self._reconciling = False

    def wipe(self) -> None:
        """The whole data directory is gone."""
        self.saved = None

    @property
    def identity(self) -> NodeIdentity:
        """Returns the identity in `node.json`."""
        assert self.saved is not None
        return self.saved.identity

    @property
    def is_serving(self) -> bool:
        """Returns whether clients may come."""
        return self.alive and self.local is not None

    def _name_storage(self) -> None:
        identity = self.identity
        self.storage.set_identity(identity.cluster, identity.former)

    def _open_groups(self) -> None:
        assert self.saved is not None
        self.recovery = RecoveryPort(self)
        log = self.storage.logs.get(0)
        has_log = log is not None and (log.last_index > 0 or log.snapshot_index > 0)
        self.saved.logged |= has_log and self.saved.founding is not None
        self.formation = Formation(
            self.identity,
            founding=self.saved.founding,
            has_log=has_log,
            logged=self.saved.logged,
            peers=self.peers,
        )
        self.desk = JoinDesk(
            host=self.host,
            formation=self.formation,
            links=self,
            clock=self.clock,
            identity=lambda: self.identity,
            metadata_voters=self.world.metadata_voters,
        )
        self._form()

    def watch_log(self, group: int, log: GroupLog) -> None:
        """Has the group's checker follow this log."""
        if not self.is_foreign:
            super().watch_log(group, log)

    def on_log_removed(self, group: int) -> None:
        """The storage is about to remove a log."""
        checker = self.world.checkers.get(group)
        if checker is not None and not self.is_foreign:
            self.world.on_log_removed(self, group)
            checker.on_removed(self.number)

    # Recovery.

    def on_note(self, event: str, fields: dict[str, object]) -> None:
        """See `Node`."""
        super().on_note(event, fields)
        if event == "raft.membership_forced":
            group, last_index = fields["group"], fields["last_index"]
            assert isinstance(group, int)
            assert isinstance(last_index, int)
            self.world.on_forced(self, group, last_index)

    def switch_cluster(self, cluster: str, delay_us: int) -> None:
        """Gives the cluster another id, after a recovery; links are made anew after the delay."""
        assert self.saved is not None
        former = self.saved.identity
        self.saved.identity = replace(
            former, cluster=cluster, former=(*former.former, former.cluster)
        )
        self._name_storage()
        self.world.scheduler.after(delay_us, self.process, self._link_anew)

    def _link_anew(self) -> None:
        self.linked_as = self.identity
        self._redial()

    def _redial(self) -> None:
        self.world.network.redial(self.number)
        if self.relays is not None:
            self.relays.forget_all()

    # Formation.

    def _watch_sessions(self) -> None:
        """Nothing yet: `LocalQueues` does, once it follows the tree."""
        self.watch = None

    def _form(self) -> None:
        formation = self.formation
        assert formation is not None
        if formation.opened:
            return
        self._act(formation.step(self.clock.monotonic_ms(), self.hellos))
        if not formation.opened:
            self.world.scheduler.after(FORM_TICK_US, self.process, self._form)

    def _act(self, actions: list[Action]) -> None:
        formation = self.formation
        saved = self.saved
        assert formation is not None
        assert saved is not None
        for action in actions:
            if isinstance(action, Accept):
                saved.founding = action.founding
                # Nobody has to hear of it from a new HELLO: all founders have agreed on it.
                saved.identity = replace(saved.identity, cluster=action.founding.cluster)
                self.linked_as = saved.identity
            elif isinstance(action, Withdraw):
                saved.founding = None
                fresh = self.world.new_id(), self.world.new_id()
                self._take(
                    replace(saved.identity, cluster="", directory=fresh[0], candidate=fresh[1])
                )
                formation.renewed(saved.identity)
            elif isinstance(action, AskToFound):
                body = founding_to(action.founding)
                for node in action.nodes:
                    self.ask(node, KIND_FOUND, body, JOIN_WAIT_MS, partial(self._on_found, node))
            elif isinstance(action, AskToJoin):
                request = join_request(saved.identity)
                for node in action.nodes:
                    done = partial(self._on_join_answer, node)
                    self.ask(node, KIND_JOIN, request, JOIN_WAIT_MS, done)
            elif isinstance(action, Resume):
                self._open_metadata(action.members)
            elif isinstance(action, Found):
                self._open_metadata(action.members, hint=action.hint)
            elif isinstance(action, Joined):
                self._on_joined(action)
            elif isinstance(action, Wait):
                self.world.trace.add(self.name, f"waits: {action.reason}")
            elif isinstance(action, Fail):
                self.world.on_node_failed(self, action.text)

    def _take(self, identity: NodeIdentity) -> None:
        """Writes who the node is, and tells the others."""
        assert self.saved is not None
        self.saved.identity = self.linked_as = identity
        self.incarnation = identity.incarnation
        self.incarnations[self.number] = identity.incarnation
        self.host.incarnation = identity.incarnation
        self._name_storage()
        self.world.trace.add(self.name, f"is {identity}")
        self._redial()

    def _on_found(self, node: int, answer: object, error: BrokerError | None) -> None:
        assert self.formation is not None
        reason = error.text if error is not None else ""
        self._act(self.formation.on_found_answer(node, answer, reason))

    def _on_join_answer(self, node: int, answer: object, error: BrokerError | None) -> None:
        assert self.formation is not None
        reason = error.text if error is not None else ""
        self._act(self.formation.on_join_answer(node, answer, reason))

    def _on_joined(self, action: Joined) -> None:
        assert self.saved is not None
        assert self.formation is not None
        self.world.on_joined(self, action)
        self.saved.founding = None
        self.saved.lost_groups = action.groups
        self._take(self.formation.identity)
        self._open_metadata(action.members, learner=action.learner, wiped=not action.learner)

    def _open_metadata(
        self, members: tuple[int, ...], *, hint: int = 0, learner: bool = False, wiped: bool = False
    ) -> None:
        world = self.world
        self._name_storage()
        self.tree = watch(IndexedTree, self, 0)
        world.trace.add(self.name, f"opens the tree with {members}, learner {learner}")
        # The store needs the builder of the group, the group its sink.
        sink = MetadataSink()
        assert self.desk is not None
        self.host.create_group(
            0,
            sorted(members),
            self.tree,
            sink,
            leader_hint=hint,
            learner=learner,
            wiped=wiped,
        )
        self.store = MetadataStore(
            self.tree, self.host.builder_of(0), self.new_session(), self.clock
        )
        self.metadata = self.desk.store = self.store
        sink.attach(self.store)
        world.scheduler.after(0, self.process, self._register)
        self.wake()

    def _register(self) -> None:
        """Has the tree know this incarnation, then opens what it says."""
        store = self.store
        assert store is not None
        if store.leader is None:
            self.world.scheduler.after(50_000, self.process, self._register)
            return
        if not self.tree.vhosts:
            bootstrap = Bootstrap(
                vhost="/",
                user="guest",
                password_hash="",
                algorithm="",
                cluster_name=NAME,
                cluster_id=self.identity.cluster,
            )
            store.submit(bootstrap, lambda _reply, _error: None, REGISTER_MS)
        put = PutNode(
            id=self.number,
            name=self.name,
            incarnation=self.incarnation,
            directory=self.identity.directory,
            supports=supported.supports(),
            **self.place._asdict(),
        )
        store.submit(put, self._on_registered, REGISTER_MS)

    def _on_registered(self, reply: object, error: BrokerError | None) -> None:
        if error is None and not reply:
            raise InvariantBroken(f"{self.name} is an older copy of itself")
        if error is None:
            assert self.saved is not None
            assert self.formation is not None
            self.saved.founding = None
            self.clock.call_later(FOUNDED_MS, self.formation.founded)
        if error is None and self.tree.vhosts:
            self._open_queues()
        elif error is None or isinstance(error, Unavailable):
            self.world.scheduler.after(20_000, self.process, self._register)
        else:
            self.world.trace.add(self.name, f"is refused: {error}")
            self._on_removed()

    def _open_queues(self) -> None:
        assert self.store is not None
        assert self.saved is not None
        world = self.world
        self.local = LocalQueues(
            node=self.number,
            host=self.host,
            tree=self.tree,
            transport=self.transport,
            clock=self.clock,
            incarnations=self.incarnations,
            new_session=self.new_session,
            ask=GroupQuestions(node=self.ask_node),
            ask_sessions=self.ask_sessions,
            audit_interval_ms=AUDIT_MS,
            stored_groups=lambda: self.storage.logs,
            machine_for=self._machine_for,
            lost_groups=self.saved.lost_groups,
        )
        self.placement = Placement(self.number, self.tree, self.local.leader_of)
        self.queues = self.local.queues
        self.watch = self.local.watch
        self.store.watch(self._on_change)
        self.local.reconcile()
        self.membership_manager = MembershipManager(
            self,
            self.host,
            self.store,
            self.sim_links,
            self._on_removed,
            self.identity.directory,
            self.place,
            self._make_voters(),
        )
        world.scheduler.after(
            world.scheduler.between(0, MEMBER_TICK_US), self.process, self._tick_members
        )
        world.trace.add(self.name, "serves")
        world.on_serving(self)
        self.wake()

    def _make_voters(self) -> MetadataVoters | None:
        count = self.world.metadata_voters
        if not count:
            return None
        return MetadataVoters(
            self.host, self.tree, self.clock, count=count, away_max_ms=VOTER_AWAY_MS
        )

    def _on_removed(self) -> None:
        self.world.scheduler.after(0, None, self.world.on_removed, self, self.process)

    def _machine_for(self, record: QueueRecord, arguments: Table) -> QueueMachine:
        """Returns the machine that production would make, watched, and with shorter time-outs."""
        self.world.on_open(self, record)
        made = make_machine(record, arguments)
        if isinstance(made, QuorumMachine):
            settings = dict(made.settings)
            settings["disconnect_timeout_ms"] = self.world.plan.settings["disconnect_timeout_ms"]
            return watch(QuorumMachine, self, record.group, settings)
        assert isinstance(made, StreamMachine)
        return watch(StreamMachine, self, record.group, made.settings)

    def _on_change(self, change: Change) -> None:
        assert self.local is not None
        if self.local.on_change(change) and not self._reconciling:
            self._reconciling = True
            self.world.scheduler.after(0, self.process, self._reconcile)

    def _reconcile(self) -> None:
        self._reconciling = False
        assert self.local is not None
        self.local.reconcile()
        self.wake()

    def _tick_queues(self) -> None:
        self.world.scheduler.after(TICK_MS * 1000, self.process, self._tick_queues)
        if self.local is not None:
            self.local.tick()

    def _tick_members(self) -> None:
        self.world.scheduler.after(MEMBER_TICK_US, self.process, self._tick_members)
        assert self.membership_manager is not None
        self.membership_manager.tick()

    # What a `MembershipManager` asks its broker.

    def placement_nodes(self) -> list[int]:
        """Nodes that may get replicas."""
        return self.running_nodes()

    def running_nodes(self) -> list[int]:
        """Nodes that can be reached."""
        nodes = set(self.tree.nodes) | {self.number}
        return sorted(n for n in nodes if n == self.number or self.is_up(n))

    def is_up(self, node: int) -> bool:
        """Returns whether a node can be reached."""
        return node == self.number or self.transport.is_connected(node)

    def group_size_of(self, record: QueueRecord) -> int:
        """Returns how many members a queue began with, or would have."""
        return self.placement.group_size_of(record)

    # Requests.

    def on_request(
        self, peer: int, kind: int, body: object, reply: Callable[[object], None]
    ) -> None:
        """Another node asks something."""
        if kind == KIND_FOUND:
            assert self.formation is not None
            answer, actions = self.formation.on_found(body, self.hellos)
            self._act(actions)
            reply(answer)
        elif kind == KIND_JOIN:
            assert self.desk is not None
            self.desk.on_join(peer, body, reply)
        elif kind == KIND_RECOVERY:
            reply(self.recovery.serve(peer, body))
        else:
            super().on_request(peer, kind, body, reply)

    # Links.

    def hello_of(self, node: int) -> PeerHello | None:
        """Returns what a node told of itself when it was linked."""
        return self.hellos.get(node)

    def is_connected(self, node: int) -> bool:
        """Returns whether a node is reached."""
        return bool(self.transport.is_connected(node))

    def hello(self) -> OwnHello:
        """Returns what this node tells of itself."""
        said = Hello(
            cluster=NAME,
            identity=self.linked_as,
            address="",
            formed=self.formation is not None and self.formation.opened,
            supports=supported.supports(),
        )
        return said.to_builtins()

    def may_link(self, peer: Receiver) -> bool:
        """Returns whether HELLO with another running node ends well."""
        assert isinstance(peer, ClusterNode)
        if self.is_foreign != peer.is_foreign and not (
            self.linked_as.cluster and peer.linked_as.cluster
        ):
            # No configuration leads a fresh node to another cluster.
            return False
        try:
            told = read_hello(peer.hello(), self.hello())
            if told.formed and told.node in self.sim_links.forgotten:
                return False
        except LinkRefused:
            return False
        return True

    def say(self) -> bytes:
        return msgspec.msgpack.encode(self.hello())

    def judge(self, peer: int, said: bytes) -> int:
        try:
            told = read_hello(msgspec.msgpack.decode(said), self.hello())
        except LinkRefused:
            return 0
        refused = told.node != peer or (told.formed and peer in self.sim_links.forgotten)
        return 0 if refused else told.incarnation

    def on_link_up(self, peer: int, incarnation: int) -> None:
        """A peer is linked."""
        self._meet(peer, incarnation, self.world.node_of(peer).hello())

    def on_relayed(self, peer: int, incarnation: int, said: bytes) -> None:
        """A peer is reached through another one."""
        self._meet(peer, incarnation, msgspec.msgpack.decode(said))

    def _meet(self, peer: int, incarnation: int, said: Mapping[str, object]) -> None:
        cluster = said["cluster_id"]
        assert isinstance(cluster, str)
        self.world.on_linked(self, peer, cluster)
        self.hellos[peer] = read_hello(said, self.hello())
        super().on_link_up(peer, incarnation)

    def on_link_down(self, peer: int, definite: bool) -> None:
        """A peer is unlinked, or known to be gone."""
        self.hellos.pop(peer, None)
        super().on_link_down(peer, definite)
