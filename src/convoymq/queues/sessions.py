# cython: annotation_typing=False
"""The session rule and the sequence rule of producers: what all replicated machines share.

A session is one ordered command stream into a machine. It is numbered without gaps, so a client may
resend everything that it has not seen applied, to whoever leads, and each command counts once:

| seq       | session known                       | unknown            | ended                |
|-----------|-------------------------------------|--------------------|----------------------|
| last + 1  | applied                             | 1: begins, applied | GAP(0)               |
| <= last   | answered again, with the kept reply | –                  | SESSION_CLOSE: again |
| beyond    | GAP(last)                           | GAP(0)             | GAP(0)               |

Plain answers of one entry are one APPLIED effect per session; an answer that says more is an effect
of its own and is kept, because the first one may get lost.

A producer is a name whose messages carry rising sequences, from whatever session. PRODUCER (name,
first sequence) stands before an ENQUEUE of the same session and says that record i of it has
sequence first + i. Records at or below the last known sequence of the name are dropped; because
sequences rise these are the first ones. Gaps are fine. Names that were not heard of for
`PRODUCER_KEPT_MS` of logged time are forgotten, and so are the oldest beyond `PRODUCERS_MAX`.

Source: docs/formats/entries-and-frames.md (session rule), ADR 0007 section 5.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from convoymq.cluster.interfaces import EFFECT_APPLIED, EFFECT_GAP, Effect
from convoymq.kernels import batch

APPLIED_OK = 0
APPLIED_REJECTED = 1

#: Replies that a session keeps for a repeat of the question; closed sessions that are remembered.
REPLIES_KEPT_MAX = 64
CLOSED_KEPT_MAX = 256

PRODUCERS_MAX = 65_536
PRODUCER_KEPT_MS = 7 * 24 * 3600 * 1000
PRODUCER_NAME_BYTES_MAX = 255


class Session:
    """One ordered command stream: its last seq and its latest replies."""

    __slots__ = ("applied_at", "id", "node", "producer", "replies", "seq")

    def __init__(self, session_id: int) -> None:
        self.id = session_id
        self.node = session_id >> 56
        self.seq = 0
        #: (seq, status, reply) of the latest commands whose answer says more than "applied".
        self.replies: list[tuple[int, int, Any]] = []
        #: Where in `effects` this entry's APPLIED of the session lies; -1 = none yet.
        self.applied_at = -1
        #: (name, first sequence) of the next ENQUEUE; None = it comes from no named producer.
        self.producer: tuple[bytes, int] | None = None


class SessionTable:
    """Base of the machines: `sessions`, `producers`, and the answers that go to `effects`."""

    effects: list[Effect]
    time_ms: int

    def _new_session(self, session_id: int) -> Any:
        """A session of the machine's own kind."""
        return Session(session_id)

    def _clear_sessions(self) -> None:
        self.sessions: dict[int, Any] = {}
        #: Sessions that ended, oldest first: a stray repeat of seq 1 is no new session.
        self.closed: dict[int, None] = {}
        #: Name -> (last sequence, when it was last heard of, ms), the longest silent first.
        self.producers: dict[bytes, tuple[int, int]] = {}
        #: Messages that were dropped as repeats of a producer.
        self.duplicates = 0
        self._nodes: frozenset[int] | None = None
        self._touched: list[Session] = []
        self._gaps: set[int] = set()

    # ---------------------------------------------------------------- the session rule

    def _accept(self, session_id: int, seq: int, kind: int) -> Any:
        """The session when this command is its next; otherwise answers and returns None."""
        session = self.sessions.get(session_id)
        if session is None:
            if session_id in self.closed:
                if kind == batch.CMD_SESSION_CLOSE:
                    self.effects.append((EFFECT_APPLIED, session_id, seq, APPLIED_OK, None))
                else:
                    self._gap(session_id, 0)
                return None
            if seq != 1:
                self._gap(session_id, 0)
                return None
            session = self._new_session(session_id)
            self.sessions[session_id] = session
            self._nodes = None
        elif seq <= session.seq:
            for known, status, reply in session.replies:
                if known == seq:
                    self.effects.append((EFFECT_APPLIED, session_id, seq, status, reply))
                    session.applied_at = -1
            if session.applied_at < 0:
                self._answer(session)
            return None
        elif seq != session.seq + 1:
            self._gap(session_id, session.seq)
            return None
        session.seq = seq
        return session

    def _gap(self, session_id: int, last: int) -> None:
        """Asks for the commands after `last`, once an entry."""
        if session_id not in self._gaps:
            self._gaps.add(session_id)
            self.effects.append((EFFECT_GAP, session_id, last))

    def _answer(self, session: Session) -> None:
        """APPLIED up to the session's last seq, one for all plain commands of an entry."""
        effect = (EFFECT_APPLIED, session.id, session.seq, APPLIED_OK, None)
        if session.applied_at >= 0:
            self.effects[session.applied_at] = effect
        else:
            session.applied_at = len(self.effects)
            self.effects.append(effect)
            self._touched.append(session)

    def _applied(self, session: Session | None) -> None:
        if session is not None:
            self._answer(session)

    def _reply(self, session: Session | None, status: int, reply: Any) -> None:
        """Answers with more than "applied"; kept, because the first answer may get lost."""
        if session is None:
            return
        session.replies.append((session.seq, status, reply))
        if len(session.replies) > REPLIES_KEPT_MAX:
            del session.replies[0]
        self.effects.append((EFFECT_APPLIED, session.id, session.seq, status, reply))
        session.applied_at = -1

    def _end_entry(self) -> None:
        """After the last command of an entry: later answers are new effects."""
        for session in self._touched:
            session.applied_at = -1
        self._touched.clear()
        self._gaps.clear()

    def _remove_session(self, session: Session) -> None:
        """Ends a session; its number is remembered for a while."""
        del self.sessions[session.id]
        self._nodes = None
        self.closed[session.id] = None
        if len(self.closed) > CLOSED_KEPT_MAX:
            del self.closed[next(iter(self.closed))]

    def _sessions_of(self, node: int) -> list[Any]:
        return [session for session in self.sessions.values() if session.node == node]

    def session_nodes(self) -> frozenset[int]:
        """Nodes that have a session here."""
        if self._nodes is None:
            self._nodes = frozenset(session.node for session in self.sessions.values())
        return self._nodes

    # ---------------------------------------------------------------- producers

    def _producer(self, session: Session, count: int, data: bytes, offset: int) -> None:
        """PRODUCER: names the producer of the session's next ENQUEUE."""
        body = batch.command_body(data, offset)
        if not 0 < count <= min(PRODUCER_NAME_BYTES_MAX, len(body) - 8):
            self._reply(session, APPLIED_REJECTED, "malformed producer")
            return
        session.producer = (body[8 : 8 + count], int.from_bytes(body[:8], "little"))
        self._answer(session)

    def _repeated(self, session: Session, count: int) -> int:
        """Takes the producer off the session for an ENQUEUE of `count` records and returns how many
        of the first of them are repeats."""
        assert session.producer is not None
        name, first = session.producer
        session.producer = None
        producers = self.producers
        last, _ = producers.pop(name, (-1, 0))
        repeated = min(max(last + 1 - first, 0), count)
        # Put back at the end: the longest silent stay in front.
        producers[name] = (max(last, first + count - 1), self.time_ms)
        if len(producers) > PRODUCERS_MAX:
            del producers[next(iter(producers))]
        self._forget_producers()
        self.duplicates += repeated
        return repeated

    def _forget_producers(self) -> None:
        """Drops the names that were silent for too long."""
        producers = self.producers
        horizon = self.time_ms - PRODUCER_KEPT_MS
        while producers:
            name = next(iter(producers))
            if producers[name][1] >= horizon:
                return
            del producers[name]

    # ---------------------------------------------------------------- snapshots

    def _pack_producers(self) -> list[tuple[bytes, int, int]]:
        return [(name, last, heard) for name, (last, heard) in self.producers.items()]

    def _unpack_producers(self, packed: Iterable[tuple[bytes, int, int]]) -> None:
        self.producers = {name: (last, heard) for name, last, heard in packed}


def decode_map(body: bytes, length: int) -> dict[str, Any]:
    """The msgpack map of a command's padded body; `length` 0 = not said. Raises ValueError."""
    if 0 < length <= len(body):
        body = body[:length]
    for padding in range(8):
        if padding and (padding > len(body) or body[len(body) - padding]):
            break
        try:
            return msgspec.msgpack.decode(body[: len(body) - padding], type=dict[str, Any])
        except msgspec.DecodeError:
            continue
    raise ValueError("command body is not a msgpack map")


def first_u64(data: bytes, offset: int) -> int:
    """The first u64 of a command's body. Raises ValueError."""
    body = batch.command_body(data, offset)
    if len(body) < 8:
        raise ValueError("command body is shorter than a u64")
    return int.from_bytes(body[:8], "little")
