"""Formation: how a starting node comes to its cluster. Sans-IO.

A driver (`node`, the simulator) calls `step` a hundred times a second with what links have told,
hands in the answers to what it was told to ask, and does what comes back, in order. Everything that
names a cluster is durable before anything follows from it: `Accept` and `Joined` are written to
`node.json` before the next call and before an answer is sent.

    own directory            the others                                what follows
    ───────────────────────  ────────────────────────────────────────  ─────────────────────────────
    log                      any                                       Resume
    log, but no cluster      any                                       Fail
    fresh or wiped           linked nodes are in different clusters    Fail
    fresh                    somebody names a cluster                  AskToJoin all that are linked
    fresh, not a founder     nobody does                               AskToJoin all that are linked
    fresh, founder           a founder is not linked                   Wait
    fresh, founder           all founders are linked and fresh         Accept, AskToFound
    founding                 some founders have not accepted           AskToFound, Wait
    founding                 all have accepted, or one has opened      Found
    founding                 a founder has accepted another cluster    Withdraw
    founding                 the cluster exists already                AskToJoin  (as if wiped)
    founding                 a founder shows another directory         Wait: all must begin anew
    cluster, empty log       any                                       AskToJoin, Wait  (wiped)

    answer to AskToJoin      taken in                                  Joined
                             founding that lists this directory        Accept, AskToFound
                             no                                        Wait with the reason

`fresh`: no cluster id; `founding`: the id with a founding record, and a log that was always empty;
`wiped`: the id, and neither. A founder opens the metadata group only when every founder has
accepted, and a directory accepts once (who withdraws takes another directory id): so of two sets of
founders that share a node at most one makes a cluster, and nobody who ran before is counted as a
founder. Source: ADR 0020.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from convoymq.metadata.records import JOIN_LEARNER
from convoymq.transport.handshake import PeerHello
from convoymq.transport.identity import Founding, NodeIdentity, is_id

ASK_AGAIN_MS = 200
FOUNDED_MS = 10_000
"""So long after the tree knows this node a founder that is late is told that it may still begin as
one; the driver then calls `founded`. Before, nobody knows that a majority has anything: what is in
the log of one founder may be nowhere else."""
WAIT_SAID_MS = 1000
"""A wait that ends sooner is not worth a word."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Write the founding to `node.json`; now, before anything else."""

    founding: Founding


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Give up the founding that was accepted: give the directory new ids, and tell `renewed`."""


@dataclass(frozen=True, slots=True)
class AskToFound:
    """Ask these founders to accept; hand answers to `on_found_answer`."""

    nodes: tuple[int, ...]
    founding: Founding


@dataclass(frozen=True, slots=True)
class AskToJoin:
    """Ask these nodes to be let in; hand answers to `on_join_answer`."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Open the metadata group from the log."""

    members: tuple[int, ...]
    """Only of use while the log knows none."""


@dataclass(frozen=True, slots=True)
class Found:
    """Open the metadata group as a founder."""

    members: tuple[int, ...]
    cluster: str
    hint: int
    """The founder that stands for the first election."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Write cluster and incarnation to `node.json`, then open the metadata group."""

    learner: bool
    """False = a member without its data."""
    members: tuple[int, ...]
    cluster: str
    incarnation: int
    groups: int
    """Groups up to this number may count on data that this node does not have."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Say why nothing happens; comes once per change."""

    reason: str
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fail:
    """The node must not start; the text says why."""

    text: str


Action = Accept | Withdraw | AskToFound | AskToJoin | Resume | Found | Joined | Wait | Fail


class Formation:
    """The way of one start. See the module's docstring.

    Args:
        founding: the founding that the directory has accepted and that is not over.
        has_log: whether the log of the metadata group holds anything.
        logged: whether it did at an earlier start: an empty one was lost then, and the founding
            is over for this directory.
        peers: numbers of the configured nodes, if they have numbers.
        count: how many nodes found a cluster when they have none.
        founder: whether this node is one of them, as far as is known.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        *,
        founding: Founding | None = None,
        has_log: bool = False,
        logged: bool = False,
        peers: Collection[int] = (),
        count: int = 1,
        founder: bool = True,
    ) -> None:
        self.identity = identity
        self.founding = founding if has_log or not logged else None
        self.has_log = has_log
        self.founder = founder
        self.opened = False
        """The metadata group is open, or about to be."""
        self._peers = frozenset(peers)
        self._count = count
        self._accepted: set[int] = set()
        self._asked: dict[int, int] = {}
        """Nodes that were asked something, and when; until they have answered, or for
        `ASK_AGAIN_MS`."""
        self._answers: dict[int, str] = {}
        """Reason of each node's last refusal."""
        self._reason = ""
        self._reason_since = 0
        self._said: Wait | None = None

    # -- what happens ---------------------------------------------------------------------------

    def step(self, now_ms: int, linked: Mapping[int, PeerHello]) -> list[Action]:
        """Returns what to do now.

        Args:
            linked: the nodes that are linked, with what they have told of themselves.
        """
        if self.opened:
            return []
        own = self.identity.cluster
        if self.has_log:
            if not own:
                return [Fail("the log holds data of a cluster, but node.json names none")]
            return [self._open(Resume(tuple(sorted(self._peers | {self.identity.node}))))]
        if self.founding is not None:
            return self._go_on_founding(now_ms, linked, self.founding)
        named = {node: hello.cluster_id for node, hello in linked.items() if hello.cluster_id}
        formed = {node: cluster for node, cluster in named.items() if linked[node].formed}
        if own:
            formed[self.identity.node] = own
        if len(set(formed.values())) > 1:
            text = ", ".join(f"node {node} is in {formed[node]}" for node in sorted(formed))
            return [Fail(f"cluster.peers leads to nodes of different clusters: {text}")]
        if own:
            return self._rejoin(now_ms, linked)
        if named:
            # A founder's HELLO may be older than the cluster that it names by now.
            return self._ask_to_join(now_ms, sorted(linked))
        return self._begin(now_ms, linked)

    def on_join_answer(self, node: int, answer: object, reason: str = "") -> list[Action]:
        """A node has answered `AskToJoin`: a map (`answer_join`, the reply of `Join`), or None."""
        if self.opened or self.has_log:
            return []
        if not isinstance(answer, dict):
            self._answers[node] = reason
            return []
        if answer.get("ok"):
            return self._joined(node, answer)
        self._answers[node] = str(answer.get("reason", ""))
        founding = founding_from(answer.get("founding"))
        if founding is None or not self._may_accept(founding):
            return []
        return self._accept(founding)

    def on_found_answer(self, node: int, answer: object, reason: str = "") -> list[Action]:
        """A founder has answered `AskToFound`: what `on_found` returned, or None and why."""
        founding = self.founding
        if self.opened or founding is None or node not in founding.members:
            return []
        if not isinstance(answer, dict):
            self._answers[node] = reason
            return []
        cluster = answer.get("cluster")
        if cluster == founding.cluster and answer.get("founded"):
            self.founding = None
        elif cluster == founding.cluster:
            self._accepted.add(node)
            if answer.get("opened"):
                self._accepted.update(founding.members)
        elif cluster and answer.get("directory") == dict(founding.directories)[node]:
            # It never accepts this founding: nobody has opened the group, nobody will.
            return [Withdraw()]
        else:
            self._answers[node] = str(answer.get("reason", ""))
        return []

    def renewed(self, identity: NodeIdentity) -> None:
        """`Withdraw` is done."""
        self.identity = identity
        self.founding = None
        self._accepted.clear()
        self._asked.clear()
        self._answers.clear()

    def on_found(
        self, body: object, linked: Mapping[int, PeerHello]
    ) -> tuple[dict[str, object], list[Action]]:
        """Another founder asks whether this node founds with it: the answer, and what to do first.

        The answer is sent when what comes with it is done.
        """
        founding = founding_from(body)
        if founding is None:
            return {"cluster": "", "reason": "malformed"}, []
        done: list[Action] = []
        reason = ""
        if not self.identity.cluster:
            if any(hello.cluster_id not in ("", founding.cluster) for hello in linked.values()):
                reason = "it sees a cluster that exists"
            elif self._may_accept(founding):
                done = self._accept(founding)
            else:
                reason = "its configuration names other founders, or its directory is another"
        own = self.identity
        answer = {
            "cluster": own.cluster,
            "directory": own.directory,
            "opened": self.opened,
            "founded": bool(own.cluster) and self.founding is None,
            "reason": reason,
        }
        return answer, done

    def answer_join(self, reason: str) -> dict[str, object]:
        """Returns the answer to a node that asks to join when this one cannot let it in."""
        answer: dict[str, object] = {"ok": False, "reason": reason}
        if self.founding is not None:
            answer["founding"] = founding_to(self.founding)
        return answer

    def founded(self) -> None:
        """The cluster exists: from now on whoever comes joins it."""
        self.founding = None

    # -- inside ---------------------------------------------------------------------------------

    def _begin(self, now_ms: int, linked: Mapping[int, PeerHello]) -> list[Action]:
        """Nobody is in a cluster."""
        own = self.identity
        if not self._is_founder():
            # Linked before its cluster formed, a node has not told that it has one.
            return self._ask_to_join(now_ms, sorted(linked))
        if self._peers:
            members = sorted(self._peers)
            missing = tuple(node for node in members if node != own.node and node not in linked)
            if missing:
                return self._wait(now_ms, f"{_nodes(missing)} not linked yet", missing)
        else:
            members = sorted([own.node, *linked])[: self._count]
            if len(members) < self._count:
                reason = f"{len(members)} of the {self._count} nodes that found it are linked"
                return self._wait(now_ms, reason)
            if own.node not in members:
                return self._ask_to_join(now_ms, sorted(linked))
        hellos: dict[int, NodeIdentity | PeerHello] = {own.node: own, **linked}
        cluster = hellos[members[0]].candidate
        directories = tuple((node, hellos[node].directory) for node in members)
        if not is_id(cluster) or not all(is_id(directory) for _, directory in directories):
            return self._wait(now_ms, "a node has not told its directory")
        return self._accept(Founding(cluster=cluster, directories=directories))

    def _is_founder(self) -> bool:
        return self.identity.node in self._peers if self._peers else self.founder

    def _may_accept(self, founding: Founding) -> bool:
        """Returns whether this directory may become a founder of that cluster."""
        own = self.identity
        if own.cluster or self.has_log or self.opened or not self._is_founder():
            return False
        if (own.node, own.directory) not in founding.directories:
            return False
        if self._peers:
            return self._peers == set(founding.members)
        return len(founding.members) == self._count

    def _accept(self, founding: Founding) -> list[Action]:
        self.founding = founding
        self.identity = replace(self.identity, cluster=founding.cluster)
        self._accepted = {self.identity.node}
        self._asked.clear()
        self._answers.clear()
        return [Accept(founding)]

    def _go_on_founding(
        self, now_ms: int, linked: Mapping[int, PeerHello], founding: Founding
    ) -> list[Action]:
        own = self.identity.node
        self._accepted.add(own)
        left = [node for node in founding.members if node not in self._accepted]
        if not left:
            members = founding.members
            return [self._open(Found(members, founding.cluster, members[0]))]
        expected = dict(founding.directories)
        here = [node for node in left if node in linked]
        lost = [node for node in here if linked[node].directory != expected[node]]
        due = self._due(now_ms, [node for node in here if node not in lost])
        asked: list[Action] = [AskToFound(due, founding)] if due else []
        missing = tuple(node for node in left if node not in linked)
        if lost:
            reason = (
                f"{_nodes(lost)} not the one that founded cluster {founding.cluster} any more: "
                "empty the directories of all nodes to begin anew"
            )
            return asked + self._wait(now_ms, reason, missing)
        reason = f"{_nodes(left)} not accepted yet to found cluster {founding.cluster}"
        return asked + self._wait(now_ms, reason + self._told(left), missing)

    def _rejoin(self, now_ms: int, linked: Mapping[int, PeerHello]) -> list[Action]:
        """Rejoins the cluster after the loss of this node's log."""
        missing = tuple(
            node
            for node in sorted(self._peers)
            if node != self.identity.node and node not in linked
        )
        reason = (
            f"this directory belongs to cluster {self.identity.cluster} but its log is empty: "
            "it waits to be let in again"
        )
        return self._ask_to_join(now_ms, sorted(linked), reason, missing)

    def _ask_to_join(
        self,
        now_ms: int,
        nodes: list[int],
        reason: str = "this node waits to be let in",
        missing: tuple[int, ...] = (),
    ) -> list[Action]:
        due = self._due(now_ms, nodes)
        asked: list[Action] = [AskToJoin(due)] if due else []
        return asked + self._wait(now_ms, reason + self._told(nodes), missing)

    def _due(self, now_ms: int, nodes: list[int]) -> tuple[int, ...]:
        due = tuple(n for n in nodes if now_ms - self._asked.get(n, -ASK_AGAIN_MS) >= ASK_AGAIN_MS)
        for node in due:
            self._asked[node] = now_ms
        return due

    def _joined(self, node: int, answer: dict[str, object]) -> list[Action]:
        own = self.identity
        cluster, role = answer.get("cluster_id"), answer.get("role")
        members, incarnation = answer.get("members"), answer.get("incarnation")
        if not is_id(cluster) or not isinstance(members, list | tuple) or not members:
            self._answers[node] = "its answer makes no sense"
            return []
        if own.cluster not in ("", cluster):
            if self.founding is not None:
                return []
            return [Fail(f"node {node} is in cluster {cluster}, this directory in {own.cluster}")]
        assert isinstance(cluster, str)
        groups = answer.get("groups", 0)
        assert isinstance(incarnation, int)
        assert isinstance(groups, int)
        incarnation = max(incarnation, own.incarnation)
        self.identity = replace(own, cluster=cluster, incarnation=incarnation)
        self.founding = None
        return [
            self._open(
                Joined(
                    # Who was a member and has no log counts as wiped, ran it before or not.
                    learner=role == JOIN_LEARNER,
                    members=tuple(sorted(int(member) for member in members)),
                    cluster=cluster,
                    incarnation=incarnation,
                    groups=groups,
                )
            )
        ]

    def _open(self, action: Action) -> Action:
        self.opened = True
        return action

    def _told(self, nodes: Collection[int]) -> str:
        told = [f"node {n}: {self._answers[n]}" for n in nodes if self._answers.get(n)]
        return f" ({'; '.join(told)})" if told else ""

    def _wait(self, now_ms: int, reason: str, missing: tuple[int, ...] = ()) -> list[Action]:
        wait = Wait(reason, missing)
        if not self._reason:
            self._reason_since = now_ms
        self._reason = reason
        if wait == self._said or now_ms - self._reason_since < WAIT_SAID_MS:
            return []
        self._said = wait
        return [wait]


def join_request(identity: NodeIdentity) -> dict[str, object]:
    """Returns what a node tells of itself when it asks to be let in."""
    return {
        "directory": identity.directory,
        "incarnation": identity.incarnation,
        "cluster": identity.cluster,
    }


def founding_to(founding: Founding) -> dict[str, object]:
    """Returns the founding as it travels."""
    return {"cluster": founding.cluster, "directories": founding.directories}


def founding_from(body: object) -> Founding | None:
    """Reads `founding_to`; None when it is none."""
    if not isinstance(body, dict):
        return None
    try:
        pairs = [(int(node), str(directory)) for node, directory in body["directories"]]
        cluster = body["cluster"]
    except (TypeError, ValueError, KeyError):
        return None
    sound = is_id(cluster) and all(is_id(directory) for _, directory in pairs)
    if not sound or len(dict(pairs)) != len(pairs):
        return None
    return Founding(cluster=cluster, directories=tuple(sorted(pairs)))


def _nodes(nodes: Collection[int]) -> str:
    numbers = " and ".join(map(str, sorted(nodes)))
    return f"node {numbers} is" if len(nodes) == 1 else f"nodes {numbers} are"
