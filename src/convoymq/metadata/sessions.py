"""The sessions of clients of the tree: what was applied last, and the answers that may be asked for
again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

REPLIES_KEPT = 64
"""More than a client may have outstanding (`metadata_store.WINDOW`), so no answer is ever lost."""


class Session:
    """One client's numbered commands."""

    __slots__ = ("replies", "seq")

    def __init__(self) -> None:
        self.seq = 0
        self.replies: deque[tuple[int, int, object]] = deque(maxlen=REPLIES_KEPT)
        """Number, status and reply of the latest commands."""


class Sessions:
    """All sessions, by number: node, incarnation, counter."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}

    def __iter__(self) -> Iterator[tuple[int, Session]]:
        return iter(self._sessions.items())

    def get(self, number: int) -> Session | None:
        """Returns a session, when it is open."""
        return self._sessions.get(number)

    def open(self, number: int) -> Session:
        """Begins a session."""
        session = self._sessions[number] = Session()
        return session

    def close(self, number: int) -> None:
        """Forgets a session."""
        self._sessions.pop(number, None)

    def clear(self) -> None:
        """Forgets all."""
        self._sessions.clear()

    def drop(self, node: int, below_incarnation: int) -> None:
        """Forgets the sessions of a node's earlier incarnations."""
        for session in list(self._sessions):
            if session >> 56 == node and (session >> 24) & 0xFFFFFFFF < below_incarnation:
                del self._sessions[session]

    def nodes(self) -> frozenset[int]:
        """Nodes with a session."""
        return frozenset(session >> 56 for session in self._sessions)

    def to_builtins(self) -> list[list[object]]:
        """Returns the body of a snapshot, in a fixed order."""
        return [
            [session, state.seq, list(state.replies)]
            for session, state in sorted(self._sessions.items())
        ]

    def fill(self, raw: list[tuple[int, int, list[list[object]]]]) -> None:
        """Takes what `to_builtins` returned."""
        self.clear()
        for number, seq, replies in raw:
            session = self.open(number)
            session.seq = seq
            for done, status, reply in replies:
                assert isinstance(done, int)
                assert isinstance(status, int)
                session.replies.append((done, status, reply))
