"""Ends sessions that nobody has any more: a leader asks the nodes of its groups' sessions.

A session ends by its client's SESSION_CLOSE, with its node's process, or by SESSION_DOWN. Whatever
keeps the first from the queue leaves a session behind, and what it holds goes to nobody else.

`SessionAudit` is the rule. It goes round by round: a round asks, once, about every session of every
group that this node leads, and begins at least an interval after the one before has ended. A
session that its node did not know in two successive rounds is over. One round would do: a node
knows its clients before their first command is sent, and a session that it does not know is known
to nobody. The second guards against a mistake in just that.

`SessionWatch` joins it to a node: it asks, answers, and proposes. A round is spread over ticks, so
that thousands of groups stall nothing. Nodes that were forgotten are not asked: all that they have
in a group that this node leads ends at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convoymq.kernels import batch
from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError, PeerError
from convoymq.queues.group_queue import GroupQueue
from convoymq.replication.machine import FLAG_NODE_GONE

if TYPE_CHECKING:
    from convoymq.shells.groups.host import ReplicaHost

INTERVAL_MS = 30_000
ANSWER_MS = 10_000
#: What a tick looks at, and what one question may hold.
GROUPS_PER_TICK = 256
SESSIONS_PER_TICK = 8192

SessionsOf = Mapping[int, Sequence[int]]
"""Group -> sessions."""

Ask = Callable[[int, list[object], int, Callable[[object, BrokerError | None], None]], None]
"""(node, request, how long to wait in ms, who hears the answer or why there is none)"""


@dataclass(frozen=True, slots=True)
class Question:
    """Question to a node about its sessions: those that are not live."""

    round: int
    node: int
    sessions: dict[int, list[int]] = field(default_factory=dict)
    """Group -> sessions."""


class SessionAudit:
    """See the module text. Does nothing by itself: it gets time, sessions and answers, and says
    whom to ask and what is over."""

    def __init__(self, interval_ms: int = INTERVAL_MS) -> None:
        self.interval_ms = interval_ms
        self.round = 0
        self._due_ms: int | None = None
        self._left: deque[int] = deque()
        self._found: dict[tuple[int, int], int] = {}
        """(group, session) -> the round in which its node did not know it."""

    def tick(
        self,
        now_ms: int,
        groups: Callable[[], Iterable[int]],
        sessions: Callable[[int], Iterable[int]],
    ) -> list[Question]:
        """Goes on with the round, or begins one when it is due.

        Args:
            groups: all groups that may have sessions.
            sessions: of a group, if this node leads it; otherwise nothing.
        """
        if not self._left:
            if self._due_ms is None:
                self._due_ms = now_ms + self.interval_ms
            if now_ms < self._due_ms:
                return []
            self.round += 1
            before = self.round - 1
            self._found = {key: found for key, found in self._found.items() if found >= before}
            self._left.extend(groups())
        questions: dict[int, Question] = {}
        room = SESSIONS_PER_TICK
        for _ in range(min(GROUPS_PER_TICK, len(self._left))):
            if room <= 0:
                break
            group = self._left.popleft()
            for session in sessions(group):
                room -= 1
                node = session >> 56
                question = questions.get(node)
                if question is None:
                    question = questions[node] = Question(self.round, node)
                question.sessions.setdefault(group, []).append(session)
        if not self._left:
            self._due_ms = now_ms + self.interval_ms
        return list(questions.values())

    def answered(self, question: Question, unknown: SessionsOf) -> dict[int, list[int]]:
        """The node of a question does not know these sessions. Returns those that are over."""
        over: dict[int, list[int]] = {}
        for group, sessions in question.sessions.items():
            gone = frozenset(unknown.get(group, ()))
            for session in sessions:
                found = self._found.pop((group, session), 0)
                if session not in gone:
                    continue
                if found and found == question.round - 1:
                    over.setdefault(group, []).append(session)
                else:
                    self._found[group, session] = question.round
        return over


class SessionWatch:
    """A node's part in it: asks as leader, answers for its own clients.

    Args:
        queues: this node's handles of its queues, by group.
        forgotten: nodes that the cluster has given up.
        note: (event, fields) for the log file.
    """

    def __init__(
        self,
        *,
        node: int,
        queues: Mapping[int, GroupQueue],
        host: ReplicaHost,
        clock: Clock,
        ask: Ask,
        forgotten: Callable[[], Iterable[int]] = tuple,
        note: Callable[[str, dict[str, object]], None] | None = None,
        interval_ms: int = INTERVAL_MS,
    ) -> None:
        self._node = node
        self._queues = queues
        self._host = host
        self._clock = clock
        self._ask = ask
        self._forgotten = forgotten
        self._note = note
        self.audit = SessionAudit(interval_ms)

    def tick(self) -> None:
        """Asks what is due."""
        questions = self.audit.tick(
            self._clock.monotonic_ms(), lambda: list(self._queues), self._sessions_of
        )
        for question in questions:
            if question.node == self._node:
                self._on_answer(question, self.unknown(question.sessions))
            elif question.node in self._forgotten():
                for group in question.sessions:
                    self._end_node(group, question.node)
            else:
                self._ask_node(question)

    def _sessions_of(self, group: int) -> list[int]:
        replica = self._host.replica(group)
        if replica is None or not replica.is_leader:
            return []
        return list(replica.machine.sessions)

    def _ask_node(self, question: Question) -> None:
        def heard(reply: object, error: BrokerError | None) -> None:
            if error is None:
                try:
                    unknown = decode_sessions(reply)
                except PeerError:
                    return
                self._on_answer(question, unknown)

        request: list[object] = [[group, sessions] for group, sessions in question.sessions.items()]
        self._ask(question.node, request, ANSWER_MS, heard)

    def _on_answer(self, question: Question, unknown: SessionsOf) -> None:
        for group, sessions in self.audit.answered(question, unknown).items():
            replica = self._host.replica(group)
            if replica is None or not replica.is_leader:
                continue
            for session in sessions:
                replica.propose(batch.CMD_SESSION_DOWN, 0, 0, 0, session.to_bytes(8, "little"))
            self._ended(group, question.node, len(sessions), "its node does not know it")

    def forget(self, node: int) -> None:
        """The cluster has given a node up: what it has in the groups that this node leads ends."""
        for group in list(self._queues):
            self._end_node(group, node)

    def _end_node(self, group: int, node: int) -> None:
        replica = self._host.replica(group)
        if replica is None or not replica.is_leader:
            return
        if node in replica.machine.session_nodes():
            count = sum(session >> 56 == node for session in replica.machine.sessions)
            replica.propose(batch.CMD_NODE_DOWN, FLAG_NODE_GONE, 0, node, b"")
            self._ended(group, node, count, "its node was forgotten")

    def _ended(self, group: int, node: int, count: int, reason: str) -> None:
        queue = self._queues.get(group)
        if self._note is not None and queue is not None:
            self._note(
                "queue.session_ended",
                {
                    "vhost": queue.vhost,
                    "queue": queue.name,
                    "group": group,
                    "peer": node,
                    "count": count,
                    "reason": reason,
                },
            )

    def serve(self, request: object) -> list[list[object]]:
        """Answers another node's question: those of its sessions that are not live here. Raises
        PeerError."""
        unknown = self.unknown(decode_sessions(request))
        return [[group, sessions] for group, sessions in unknown.items()]

    def unknown(self, asked: SessionsOf) -> dict[int, list[int]]:
        """Sessions among these that no client of this node has."""
        found: dict[int, list[int]] = {}
        for group, sessions in asked.items():
            queue = self._queues.get(group)
            gone = [s for s in sessions if queue is None or not queue.has_session(s)]
            if gone:
                found[group] = gone
        return found


def decode_sessions(body: object) -> dict[int, list[int]]:
    """Returns [[group, [session …]] …] as it comes from a node. Raises PeerError."""
    try:
        if not isinstance(body, Iterable):
            raise TypeError
        made: dict[int, list[int]] = {group: list(sessions) for group, sessions in body}
    except (TypeError, ValueError):
        raise PeerError("malformed list of sessions") from None
    numbers = [*made, *(session for sessions in made.values() for session in sessions)]
    if not all(isinstance(number, int) for number in numbers):
        raise PeerError("malformed list of sessions")
    return made
