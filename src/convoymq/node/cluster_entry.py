"""Drives `metadata.formation` for a real node: asks the others, and writes what was decided.

Also answers those that ask: founders (`KIND_FOUND`), and nodes that want to be let in
(`KIND_JOIN`), whose answer is the reply of a `Join` command, so a majority stands behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Protocol

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
from convoymq.model.clock import Clock, Timer
from convoymq.model.config import ClusterConfig
from convoymq.model.errors import BrokerError, Misuse
from convoymq.model.tasks import Tasks
from convoymq.node.data_directory import DataDirectory
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_FOUND, KIND_JOIN
from convoymq.transport.handshake import PeerHello

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from convoymq.shells.groups.host import ReplicaHost
    from convoymq.shells.groups.replica import Replica
    from convoymq.storage.store import Storage
    from convoymq.transport.links import Links

LEADERLESS_MS = 30_000
"""A majority that is linked and healthy has elected a leader long before."""
POLL_S = 0.01
ASK_TIMEOUT_S = 5.0


class LeaderWatch:
    """Names the way out when the metadata group elects no leader although a majority of its members
    is linked: members whose metadata was damaged or lost do not vote before a leader has brought
    them anew, and a majority of these waits for ever."""

    def __init__(self, host: ReplicaHost, links: Links, clock: Clock, log: BoundLogger) -> None:
        self._host = host
        self._links = links
        self._clock = clock
        self._log = log
        self._since_ms: int | None = None
        self._told = False

    def tick(self) -> None:
        """Called about once a second."""
        replica = self._host.replica(0)
        if (
            replica is None
            or self._host.leader_of(0) is not None
            or not self._has_majority(replica)
        ):
            self._since_ms, self._told = None, False
            return
        now = self._clock.monotonic_ms()
        if self._since_ms is None:
            self._since_ms = now
        elif not self._told and now - self._since_ms >= LEADERLESS_MS:
            self._told = True
            reason = replica.faulty or ("its metadata was lost" if replica.core.quarantined else "")
            self._log.error(
                "cluster.no_leader",
                own_fault=reason,
                text="a majority of the nodes is linked, and none of them leads the cluster's "
                "metadata. Nodes with damaged or lost metadata cannot vote (storage.damaged, "
                "raft.replica_damaged in their logs). If they are many: convoy recover --plan",
            )

    def _has_majority(self, replica: Replica) -> bool:
        members = replica.members
        linked = [n for n in members if n == self._host.node or self._links.is_connected(n)]
        return 2 * len(linked) > len(members)


class OpenGroup(Protocol):
    """Opens the metadata group."""

    def __call__(
        self, members: tuple[int, ...], *, hint: int = 0, learner: bool = False, wiped: bool = False
    ) -> None: ...  # fmt: skip


class ClusterEntry:
    """One node's way into its cluster, and its word for those that come later.

    Args:
        open_group: opens the metadata group; called once.
        fail: ends the node.
    """

    def __init__(
        self,
        *,
        config: ClusterConfig,
        data: DataDirectory,
        storage: Storage,
        links: Links,
        control: ControlPlane,
        host: ReplicaHost,
        clock: Clock,
        log: BoundLogger,
        open_group: OpenGroup,
        fail: Callable[[BrokerError], None],
    ) -> None:
        self.config = config
        self.data = data
        self._storage = storage
        self._links = links
        self._control = control
        self._host = host
        self._clock = clock
        self._log = log
        self._open_group = open_group
        self._fail = fail
        self.leader_watch = LeaderWatch(host, links, clock, log)
        self._opened = False
        self._due = asyncio.Event()
        self._tasks = Tasks()
        self._timer: Timer | None = None
        metadata = storage.logs.get(0)
        has_log = metadata is not None and (metadata.last_index > 0 or metadata.snapshot_index > 0)
        if has_log:
            data.note_log()
        peers = {peer.node for peer in config.peers if peer.node}
        self.formation = Formation(
            data.identity,
            founding=data.founding,
            has_log=has_log,
            logged=data.logged,
            peers=peers,
            count=len(peers) or config.size_hint or max(1, len(config.peers)),
            founder=self._lists_itself(),
        )
        self.desk = JoinDesk(
            host=host,
            formation=self.formation,
            links=links,
            clock=clock,
            identity=lambda: data.identity,
            on_wiped=lambda node: log.warning("cluster.wiped_node", peer=node),
            metadata_voters=config.metadata_voters,
        )
        links.formed = has_log
        control.handle(KIND_JOIN, self._on_join)
        control.handle(KIND_FOUND, self._on_found)

    def _lists_itself(self) -> bool:
        config = self.config
        return not config.peers or bool(config.size_hint) or bool(self._links.lists_itself)

    async def enter(self) -> None:
        """Returns when the metadata group is open. Raises Misuse: this node must not start."""
        try:
            while not self._opened:
                self._due.clear()
                self.formation.founder = self._lists_itself()
                actions = self.formation.step(self._clock.monotonic_ms(), self._linked())
                self._act(actions)
                if not actions and not self._opened:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await self._due.wait()
        finally:
            self._tasks.cancel()

    def poke(self) -> None:
        """Something has changed: a node is linked, or has answered."""
        self._due.set()

    def close(self) -> None:
        """Ends what is left to do."""
        if self._timer is not None:
            self._timer.cancel()

    # -- doing ----------------------------------------------------------------------------------

    def _linked(self) -> dict[int, PeerHello]:
        hellos = {node: self._links.hello_of(node) for node in self._links.connected()}
        return {node: hello for node, hello in hellos.items() if hello is not None}

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Wait():
                    self._log.warning(
                        "cluster.waiting", reason=action.reason, missing=list(action.missing)
                    )
                case Fail():
                    raise Misuse(action.text)
                case AskToFound():
                    body = founding_to(action.founding)
                    for node in action.nodes:
                        self._ask(node, KIND_FOUND, body, self.formation.on_found_answer)
                case AskToJoin():
                    body = join_request(self.data.identity)
                    for node in action.nodes:
                        self._ask(node, KIND_JOIN, body, self.formation.on_join_answer)
                case Withdraw():
                    self.data.renew()
                    self.formation.renewed(self.data.identity)
                    self._links.set_identity(self.data.identity)
                case _:
                    self._settle(action)

    def _settle(self, action: Accept | Resume | Found | Joined) -> None:
        """Writes which cluster this node belongs to, and opens the metadata group."""
        if isinstance(action, Accept):
            self.data.found(action.founding)
            # Nobody has to hear of it from a new HELLO: all founders have agreed on it.
            self._links.identity = self.data.identity
            return
        if isinstance(action, Joined):
            self._log.info("cluster.joining", members=action.members, cluster=action.cluster,
                           learner=action.learner)  # fmt: skip
            self.data.join(action.cluster, action.incarnation, action.groups)
            self._host.incarnation = action.incarnation
        self._storage.set_identity(self.data.cluster, self.data.identity.former)
        self._links.formed = True
        if isinstance(action, Resume):
            self._open_group(action.members)
        elif isinstance(action, Found):
            self._log.info("cluster.forming", members=action.members, cluster=action.cluster)
            self._open_group(action.members, hint=action.hint)
        else:
            self._links.set_identity(self.data.identity)
            self._open_group(action.members, learner=action.learner, wiped=not action.learner)
        self._opened = True

    def registered(self) -> None:
        """Notes that the tree knows this incarnation of this node, so the log holds something: when
        it is empty at another start, it was lost. A founder that is late may still begin as one
        for `FOUNDED_MS`."""
        self.data.founded()
        self._timer = self._clock.call_later(FOUNDED_MS, self.formation.founded)

    def _ask(
        self,
        node: int,
        kind: int,
        body: object,
        on_answer: Callable[[int, object, str], list[Action]],
    ) -> None:
        async def ask() -> None:
            answer, reason = None, ""
            try:
                answer = await self._control.request(node, kind, body, ASK_TIMEOUT_S)
            except BrokerError as error:
                reason = error.text
            if not self._opened:
                self._act(on_answer(node, answer, reason))
                self.poke()

        self._spawn(ask())

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except BrokerError as error:
                self._fail(error)

        self._tasks.spawn(guarded())

    # -- answering ------------------------------------------------------------------------------

    async def _on_found(self, _node: int, body: object) -> dict[str, object]:
        answer, actions = self.formation.on_found(body, self._linked())
        self._act(actions)
        self.poke()
        return answer

    async def _on_join(self, node: int, body: object) -> dict[str, object]:
        """A node asks to be let in."""
        answer: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()

        def reply(found: dict[str, object]) -> None:
            if not answer.done():
                answer.set_result(found)

        self.desk.on_join(node, body, reply)
        return await answer
