"""Bugs of the metadata group, and of queues that follow it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.sim.planted import parts
from tests.sim.planted.registry import late, planting

plant = planting("cluster")
_tree = late("convoymq.metadata.machine:MetadataMachine")


@plant("placement ignores zones", load="machines")
def placement_ignores_zones() -> None:
    from convoymq.queues import placement

    choose = placement.choose_members

    def planted(size: int, **more: Any) -> Any:
        return choose(size, **{**more, "places": {}})

    placement.choose_members = planted


@plant("voters of the metadata are chosen without their zones", load="machines")
def voters_ignore_zones() -> None:
    from convoymq.metadata import voters

    step = voters.voter_step

    def planted(now: Any, **more: Any) -> Any:
        return step(now, **{**more, "places": {}})

    voters.voter_step = planted  # type: ignore[assignment]


@plant(
    "a vote is given before the former one is taken away",
    "freeze,blackout,isolate",
    load="machines",
)
def vote_before_vote() -> None:
    from convoymq.metadata import voters

    step = voters.voter_step

    def planted(now: Any, **more: Any) -> Any:
        found = step(now, **more)
        is_swap = found.demote and len(now.seats) == 3
        return step(replace(now, seats=now.seats - {found.demote}), **more) if is_swap else found

    voters.voter_step = planted  # type: ignore[assignment]


@plant("a replica moves with a vote before it has none", "replica_move", load="machines")
def move_with_a_vote() -> None:
    from convoymq.shells.groups.host import ReplicaHost

    def planted(self: Any, group: int, node: int, source: int) -> bool:
        return bool(self.add_member(group, node))

    ReplicaHost.stand_in = planted  # type: ignore[method-assign]


@plant("a move forgets that a queue's only member leaves", "replica_move", load="machines")
def only_member_stays() -> None:
    from convoymq.shells.groups.member_changes import MemberChanges

    def planted(self: Any, node: int, source: int) -> bool:
        return bool(self.set_vote(node, votes=True))

    MemberChanges.succeed = planted  # type: ignore[method-assign]


@plant("the number of a deleted queue is given out again", "none")
def number_given_out_again() -> None:
    from convoymq.metadata.queues import Queues

    remove = Queues._remove_record

    def planted(self: Any, vhost: Any, record: Any) -> Any:
        removed = remove(self, vhost, record)
        if record.group == self._tree.next_group - 1:
            self._tree.next_group -= 1
        return removed

    Queues._remove_record = planted  # type: ignore[method-assign]


@plant("one node's tables refuse a queue that the others declare", "none")
def tables_decide_on_apply() -> None:
    from convoymq.metadata.queues import Queues
    from convoymq.model.errors import PreconditionFailed

    declare = Queues.declare

    def planted(self: Any, command: Any, *more: Any) -> Any:
        if self._tree.node.number == 2 and command.name == "b":
            raise PreconditionFailed("unknown argument")
        return declare(self, command, *more)

    Queues.declare = planted  # type: ignore[method-assign]


@plant("a restored tree has forgotten who was forgotten", "forget,crash,kill")
def forgotten_are_forgotten() -> None:
    tree = _tree()
    restore = tree.restore

    def planted(self: Any, state: bytes) -> None:
        restore(self, state)
        self.forgotten = set()

    tree.restore = planted


@plant("nodes of different clusters link")
def clusters_link() -> None:
    from convoymq.sim import cluster_node
    from convoymq.transport.handshake import read_hello

    def planted(body: Any, own: Any) -> Any:
        return read_hello(body, {**own, "cluster_id": ""})

    cluster_node.read_hello = planted  # type: ignore[attr-defined]


@plant("a leader lets a node in without asking the log", "newcomer,wipe")
def join_without_the_log() -> None:
    from convoymq.metadata.commands import Join
    from convoymq.metadata.store import MetadataStore

    submit = MetadataStore.submit

    def planted(self: Any, command: Any, done: Any, *more: Any) -> Any:
        if not isinstance(command, Join):
            return submit(self, command, done, *more)
        role = "wiped" if command.id in command.members else "learner"
        answer = {
            "role": role,
            "members": list(command.members),
            "groups": self.tree.next_group - 1,
            "incarnation": self.tree.incarnations.get(command.id, 0) + 1,
            "cluster_id": self.tree.cluster_id,
        }
        return done(answer, None)

    MetadataStore.submit = planted  # type: ignore[method-assign]


@plant(
    "who was let in while members change is never made a member",
    "newcomer,forget,isolate,partition,transfer,slow",
)
def let_in_and_left_out() -> None:
    from convoymq.metadata.members import MembershipManager

    MembershipManager._admit = lambda self: None  # type: ignore[method-assign]


@plant("an emptied member of a queue votes at once", "wipe,suspect,isolate")
def emptied_member_votes() -> None:
    from convoymq.broker.local_queues import LocalQueues

    become = LocalQueues._become_member

    def planted(self: Any, *arguments: Any) -> None:
        self.lost_groups = 0
        become(self, *arguments)

    LocalQueues._become_member = planted  # type: ignore[method-assign]


@plant("publishes of a session that was ended count as safe", "false_death,break")
def ended_session_confirms() -> None:
    from convoymq.queues.quorum.client import QuorumClient

    end = QuorumClient._events_end

    def planted(self: Any, error: Any, *, published_ok: bool, **how: Any) -> None:
        end(self, error, published_ok=True, **how)

    QuorumClient._events_end = planted  # type: ignore[method-assign]


@plant("a copy goes on from what it knows to be committed", "lost_majority,blackout")
def survivor_drops_its_end() -> None:
    force = parts.changes().force

    def planted(self: Any, members: Any) -> Any:
        core = self.core
        if core.commit_index < core.log.last_index:
            core.log.truncate_from(core.commit_index + 1)
        return force(self, members)

    parts.changes().force = planted


@plant("recovered queues are not filled up again", "lost_majority")
def recovered_queues_stay_small() -> None:
    from convoymq.metadata.members import MembershipManager

    MembershipManager._recovered = lambda self: set()  # type: ignore[method-assign]


@plant("a node that was lost comes back in an incarnation that was before", "lost_majority,kill")
def lives_come_again() -> None:
    from convoymq.metadata import nodes
    from convoymq.sim import metadata_referee

    nodes.STARTS_UNSEEN = metadata_referee.STARTS_UNSEEN = nodes.RECOVERY_STEP = 0


@plant("a node with a new disk joins in its former incarnation", "wipe")
def joins_as_before() -> None:
    from convoymq.metadata.nodes import Nodes

    def planted(self: Any, command: Any) -> int:
        return max(1, self._tree.incarnations.get(command.id, 0))

    Nodes._next_incarnation = planted  # type: ignore[method-assign]
