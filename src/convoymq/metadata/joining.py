"""Answers nodes that ask to be let in (`frame_kinds.KIND_JOIN`). Sans-IO.

Only the leader of the metadata group can say yes, and the reply of a `Join` command is its answer,
so a majority stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from convoymq.metadata.commands import Join
from convoymq.metadata.formation import Formation
from convoymq.metadata.records import JOIN_LEARNER
from convoymq.metadata.replicas import Host, Replica
from convoymq.metadata.store import MetadataStore
from convoymq.metadata.voters import takes_learners
from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError
from convoymq.transport.handshake import PeerHello
from convoymq.transport.identity import NodeIdentity

ANSWER_MS = 5000
ASKED_LATELY_MS = 5000


class Links(Protocol):
    """Interface of `transport.links.Links` that joining needs."""

    def hello_of(self, node: int) -> PeerHello | None:
        """Returns what a node told of itself when it was last linked."""

    def is_connected(self, node: int) -> bool:
        """Returns whether a node is reached."""


class JoinDesk:
    """One node's word for those that come later.

    Args:
        identity: says who this node is now.
        metadata_voters: how many nodes vote; 0 = all.
        on_wiped: hears of members that have lost their data.
    """

    def __init__(
        self,
        *,
        host: Host,
        formation: Formation,
        links: Links,
        clock: Clock,
        identity: Callable[[], NodeIdentity],
        on_wiped: Callable[[int], None] = lambda _node: None,
        metadata_voters: int = 0,
    ) -> None:
        self.store: MetadataStore | None = None
        """Set when the metadata group is open."""
        self._host = host
        self._formation = formation
        self._links = links
        self._clock = clock
        self._identity = identity
        self._on_wiped = on_wiped
        self._metadata_voters = metadata_voters
        self._asked_at: dict[int, int] = {}
        """Nodes that have asked to be let in, and when the last time."""

    def on_join(self, node: int, body: object, reply: Callable[[dict[str, object]], None]) -> None:
        """A node asks; `reply` hears the answer, once."""
        answer = self._formation.answer_join
        request = body if isinstance(body, dict) else {}
        self._asked_at[node] = self._clock.monotonic_ms()
        replica, store = self._host.replica(0), self.store
        if replica is None or store is None:
            reply(answer("it is in no cluster itself yet"))
            return
        if not replica.is_leader:
            reply(answer(self._why_not(replica)))
            return
        tree = store.tree
        if not tree.cluster_id:
            reply(answer("the cluster is being founded"))
            return
        if tree.cluster_id != self._identity().cluster:
            # Whoever came in now would get the id that the cluster is about to lose.
            reply(answer("the cluster is being recovered"))
            return
        if request.get("cluster") not in ("", tree.cluster_id):
            reply(answer(f"it is in cluster {tree.cluster_id}"))
            return
        hello = self._links.hello_of(node)
        if hello is None or hello.directory != request.get("directory"):
            reply(answer("another process with that number is linked"))
            return
        members = tuple(sorted(replica.members))

        def done(found: object, error: BrokerError | None) -> None:
            if error is not None:
                reply(answer(error.text))
                return
            assert isinstance(found, dict)
            if not replica.is_leader or tuple(sorted(replica.members)) != members:
                reply(answer("the members are changing"))
            elif found["cluster_id"] != self._identity().cluster:
                reply(answer("the cluster is being recovered"))
            else:
                self._let_in(node, found)
                reply({"ok": True, **found})

        command = Join(
            id=node,
            directory=hello.directory,
            incarnation=max(hello.incarnation, int(request["incarnation"])),
            supports={kind: (low, high) for kind, (low, high) in hello.supports.items()},
            members=members,
        )
        store.submit(command, done, ANSWER_MS)

    def _let_in(self, node: int, found: dict[str, object]) -> None:
        if found["role"] == JOIN_LEARNER:
            assert self.store is not None
            learns = self._metadata_voters and takes_learners(self.store.tree)
            self._host.add_member(0, node, voter=not learns)
            self._host.wake()
        else:
            # The votes and entries that it once promised to keep are gone.
            self._on_wiped(node)

    def _why_not(self, replica: Replica) -> str:
        if replica.leader:
            return f"node {replica.leader} leads"
        now = self._clock.monotonic_ms()
        members = sorted(replica.members)
        lately = {n for n, at in self._asked_at.items() if now - at < ASKED_LATELY_MS}
        here = [
            n
            for n in members
            if n == self._identity().node or (self._links.is_connected(n) and n not in lately)
        ]
        if 2 * len(here) > len(members):
            return "its cluster is electing a leader"
        return (
            f"no majority: of the members {members} of its cluster only {here} run with their "
            "data; start the others, and if a majority has lost its data see `convoy recover`"
        )
