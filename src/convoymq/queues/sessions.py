# cython: annotation_typing=False
"""The session rule and the sequence rule of producers: what all replicated machines share.

A session is one ordered command stream into a machine. It is numbered without gaps, so a client may
resend everything that it has not seen applied, to whoever leads, and each command counts once:

| command               | session known                       | session unknown               |
|-----------------------|-------------------------------------|-------------------------------|
| seq == last + 1       | applied                             | GAP(0)                        |
| seq <= last           | answered again, with the kept reply | –                             |
| seq beyond            | GAP(last)                           | GAP(0)                        |
| OPEN, seq 1           | answered again                      | number may open: begins       |
|                       |                                     | otherwise: GAP(0)             |
| CLOSE                 | by its seq, as above; ends          | number may still open: GAP(0) |
|                       |                                     | otherwise: applied            |

The first command of a session is OPEN. It carries the opening number, which a node counts up from 1
for every group in every incarnation; CLOSE carries it again. `Openings` knows which numbers have
opened a session, so each does so once: a copy of a session's first commands that arrives after its
end changes nothing, however late it is.

Plain answers of one entry are one APPLIED effect per session; an answer that says more is an effect
of its own and is kept, because the first one may get lost.

A producer is a name whose messages carry rising sequences, from whatever session. PRODUCER (name,
first sequence) stands before an ENQUEUE of the same session and says that record i of it has
sequence first + i. Records at or below the last known sequence of the name are dropped; because
sequences rise these are the first ones. Gaps are fine. Names that were not heard of for
`PRODUCER_KEPT_MS` of logged time are forgotten, and so are the oldest beyond `PRODUCERS_MAX`.

A PRODUCER with a digest is of a writer whose rows may come in another order when they come again.
Then a sequence says only where a row stood, and a record is dropped when a request of this name and
digest has brought it: the digest is that of the request's rows and their place (`Written`). What is
not known is appended, so an order that changes costs duplicates and never records.

Source: docs/formats/entries-and-frames.md (session rule), ADR 0007 section 5, ADR 0029.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import msgspec

from convoymq.kernels import batch
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_GAP, Effect

APPLIED_OK = 0
APPLIED_REJECTED = 1

#: Replies that a session keeps for a repeat of the question.
REPLIES_KEPT_MAX = 64
#: Ranges of opening numbers of one node that were passed over and may still come.
PASSED_OVER_MAX = 256

PRODUCERS_MAX = 65_536
PRODUCER_KEPT_MS = 7 * 24 * 3600 * 1000
PRODUCER_NAME_BYTES_MAX = 255

DIGEST_BYTES = 16
#: The upper bits of a sequence are the number of its micro-batch.
MICRO_BATCH_SHIFT = 32
#: Of one writer, its latest micro-batches and requests; of all writers together.
MICRO_BATCHES_KEPT_MAX = 8
REQUESTS_KEPT_MAX = 8192
REQUESTS_OF_ALL_MAX = 262_144


class Session:
    """One ordered command stream: its last seq and its latest replies."""

    __slots__ = ("applied_at", "id", "node", "producer", "replies", "seq")

    def __init__(self, session_id: int) -> None:
        self.id = session_id
        self.node = session_id >> 56
        self.seq = 0
        #: (seq, status, reply) of the latest commands whose answer says more than "applied".
        self.replies: list[tuple[int, int, object]] = []
        #: Where in `effects` this entry's APPLIED of the session lies; -1 = none yet.
        self.applied_at = -1
        #: (name, first sequence, digest or nothing) of the next ENQUEUE; None = it comes from no
        #: named producer.
        self.producer: tuple[bytes, int, bytes] | None = None


class Openings:
    """Opening numbers of one node, in its latest incarnation heard of, that have opened a session.

    All up to `highest` have, but for those in `passed_over`. A range gets there when a number
    arrives before a smaller one, as after a lost batch, and goes as its numbers arrive. Beyond
    `PASSED_OVER_MAX` ranges the lowest one goes: its numbers open nothing any more, and the clients
    that have them start anew with new ones.
    """

    __slots__ = ("highest", "incarnation", "passed_over")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.highest = 0
        #: (first, last), ascending and apart.
        self.passed_over: list[tuple[int, int]] = []

    def may_take(self, number: int) -> bool:
        """Returns whether `take` would return True."""
        if number > self.highest:
            return True
        at = bisect_right(self.passed_over, number, key=_first)
        return at > 0 and number <= self.passed_over[at - 1][1]

    def take(self, number: int) -> bool:
        """Notes that a number opens a session; False when it must not."""
        if not self.may_take(number):
            return False
        assert number > 0, "opening numbers count from 1"
        ranges = self.passed_over
        if number > self.highest:
            if number > self.highest + 1:
                ranges.append((self.highest + 1, number - 1))
            self.highest = number
        else:
            at = bisect_right(ranges, number, key=_first) - 1
            first, last = ranges[at]
            left = [(first, number - 1)] if first < number else []
            if number < last:
                left.append((number + 1, last))
            ranges[at : at + 1] = left
        if len(ranges) > PASSED_OVER_MAX:
            del ranges[0]
        return True


def _first(passed_over: tuple[int, int]) -> int:
    return passed_over[0]


class Written:
    """Requests that a writer with digests has brought, by micro-batch and digest."""

    __slots__ = ("heard_ms", "micro_batches", "requests")

    def __init__(self) -> None:
        #: Micro-batch -> digest -> (first, last) sequence; both in the order in which they came.
        self.micro_batches: dict[int, dict[bytes, tuple[int, int]]] = {}
        self.heard_ms = 0
        self.requests = 0
        """In all micro-batches."""

    def repeated(self, first: int, count: int, digest: bytes) -> int:
        """Returns how many of the first of `count` records are known; notes them all."""
        micro_batch = first >> MICRO_BATCH_SHIFT
        requests = self.micro_batches.get(micro_batch)
        if requests is None:
            requests = self.micro_batches[micro_batch] = {}
            if len(self.micro_batches) > MICRO_BATCHES_KEPT_MAX:
                self.requests -= len(self.micro_batches.pop(next(iter(self.micro_batches))))
        end = first + count - 1
        known = requests.get(digest)
        if known is not None and known[0] <= first:
            # Inside a request sequences rise, with gaps where rows went to other targets.
            requests[digest] = (known[0], max(known[1], end))
            return min(max(known[1] + 1 - first, 0), count)
        # A request may come in several commands: what stood before this one is not known here.
        requests[digest] = (first, end)
        if known is None:
            self.requests += 1
            if self.requests > REQUESTS_KEPT_MAX:
                self._forget_oldest()
        return 0

    def _forget_oldest(self) -> None:
        micro_batch, requests = next(iter(self.micro_batches.items()))
        # By an iterator: looking for the first key again and again is slow in a large dict.
        for digest in list(requests)[: max(1, len(requests) // 8)]:
            del requests[digest]
            self.requests -= 1
        if not requests:
            del self.micro_batches[micro_batch]


Packed = dict[str, Any]
"""A map as msgpack gives it; what a value is depends on its name."""


class SessionTable:
    """Base of the machines: `sessions`, `producers`, and the answers that go to `effects`."""

    effects: list[Effect]
    time_ms: int

    def _new_session(self, session_id: int) -> Session:
        """Returns a session of the machine's own kind."""
        return Session(session_id)

    def _clear_sessions(self) -> None:
        self.sessions: dict[int, Any] = {}
        #: Node -> what it has opened.
        self.openings: dict[int, Openings] = {}
        #: Name -> (last sequence, when it was last heard of, ms), the longest silent first.
        self.producers: dict[bytes, tuple[int, int]] = {}
        #: Name -> what a writer with digests has brought, the longest silent first.
        self.written: dict[bytes, Written] = {}
        self._requests_known = 0
        #: Messages that were dropped as repeats of a producer.
        self.duplicates = 0
        self._nodes: frozenset[int] | None = None
        self._touched: list[Session] = []
        self._gaps: set[int] = set()

    # ---------------------------------------------------------------- the session rule

    def _accept(self, session_id: int, seq: int, kind: int, count: int, arg: int) -> Any:
        """Returns the session when this command is its next; otherwise answers and returns None."""
        session = self.sessions.get(session_id)
        if session is None:
            if not self._begins(session_id, seq, kind, arg << 32 | count):
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
        assert session.seq + 1 == seq, "a command is applied out of its order"
        session.seq = seq
        return session

    def _begins(self, session_id: int, seq: int, kind: int, number: int) -> bool:
        """Returns whether a command of an unknown session opens it; otherwise answers."""
        if kind in (batch.CMD_SESSION_OPEN, batch.CMD_SESSION_CLOSE):
            incarnation = (session_id >> 24) & 0xFFFFFFFF
            row = self._hear_of(session_id >> 56, incarnation)
            if row.incarnation != incarnation or not row.may_take(number):
                if kind == batch.CMD_SESSION_CLOSE:
                    self.effects.append((EFFECT_APPLIED, session_id, seq, APPLIED_OK, None))
                    return False
            elif kind == batch.CMD_SESSION_OPEN and seq == 1:
                return row.take(number)
        self._gap(session_id, 0)
        return False

    def _hear_of(self, node: int, incarnation: int) -> Openings:
        """Returns what a node has opened; a higher incarnation than the known one has opened
        nothing."""
        row = self.openings.get(node)
        if row is None or row.incarnation < incarnation:
            row = self.openings[node] = Openings(incarnation)
        assert row.incarnation >= incarnation, "an older incarnation is the latest"
        return row

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

    def _reply(self, session: Session | None, status: int, reply: object) -> None:
        """Answers with more than "applied"; kept, because the first answer may get lost."""
        if session is None:
            return
        replies = session.replies
        assert not replies or replies[-1][0] <= session.seq, "an older command is answered later"
        replies.append((session.seq, status, reply))
        if len(replies) > REPLIES_KEPT_MAX:
            del replies[0]
        self.effects.append((EFFECT_APPLIED, session.id, session.seq, status, reply))
        session.applied_at = -1

    def _end_entry(self) -> None:
        """After the last command of an entry: later answers are new effects."""
        for session in self._touched:
            session.applied_at = -1
        self._touched.clear()
        self._gaps.clear()

    def _remove_session(self, session: Session) -> None:
        """Ends a session."""
        assert self.sessions.get(session.id) is session, "a session ends twice"
        del self.sessions[session.id]
        self._nodes = None

    def _sessions_of(self, node: int) -> list[Any]:
        return [session for session in self.sessions.values() if session.node == node]

    def session_nodes(self) -> frozenset[int]:
        """Nodes that have a session here."""
        if self._nodes is None:
            self._nodes = frozenset(session.node for session in self.sessions.values())
        return self._nodes

    # ---------------------------------------------------------------- producers

    def _producer(self, session: Session, count: int, arg: int, data: bytes, offset: int) -> None:
        """PRODUCER: names the producer of the session's next ENQUEUE; `arg`: bytes of its digest,
        which stand behind the name."""
        body = batch.command_body(data, offset)
        if not 0 < count <= min(PRODUCER_NAME_BYTES_MAX, len(body) - 8 - arg) or arg not in (
            0,
            DIGEST_BYTES,
        ):
            self._reply(session, APPLIED_REJECTED, "malformed producer")
            return
        end = 8 + count
        first = int.from_bytes(body[:8], "little")
        session.producer = (body[8:end], first, body[end : end + arg])
        self._answer(session)

    def _repeated(self, session: Session, count: int) -> int:
        """Takes the producer off the session for an ENQUEUE of `count` records and returns how many
        of the first of them are repeats."""
        assert session.producer is not None
        name, first, digest = session.producer
        session.producer = None
        if digest:
            repeated = self._repeated_request(name, first, count, digest)
        else:
            producers = self.producers
            last, _ = producers.pop(name, (-1, 0))
            repeated = min(max(last + 1 - first, 0), count)
            # Put back at the end: the longest silent stay in front.
            producers[name] = (max(last, first + count - 1), self.time_ms)
            if len(producers) > PRODUCERS_MAX:
                del producers[next(iter(producers))]
        assert 0 <= repeated <= count, "more is repeated than was sent"
        self._forget_producers()
        self.duplicates += repeated
        return repeated

    def _repeated_request(self, name: bytes, first: int, count: int, digest: bytes) -> int:
        writers = self.written
        writer = writers.pop(name, None)
        if writer is None:
            writer = Written()
        writers[name] = writer
        writer.heard_ms = self.time_ms
        before = writer.requests
        repeated = writer.repeated(first, count, digest)
        self._requests_known += writer.requests - before
        while len(writers) > 1 and (
            len(writers) > PRODUCERS_MAX or self._requests_known > REQUESTS_OF_ALL_MAX
        ):
            self._forget_writer(next(iter(writers)))
        return repeated

    def _forget_writer(self, name: bytes) -> None:
        self._requests_known -= self.written.pop(name).requests
        assert self._requests_known >= 0, "more requests are forgotten than are known"

    def _forget_producers(self) -> None:
        """Drops the names that were silent for too long."""
        horizon = self.time_ms - PRODUCER_KEPT_MS
        producers = self.producers
        while producers:
            name = next(iter(producers))
            if producers[name][1] >= horizon:
                break
            del producers[name]
        writers = self.written
        while writers:
            name = next(iter(writers))
            if writers[name].heard_ms >= horizon:
                break
            self._forget_writer(name)

    # ---------------------------------------------------------------- snapshots

    def _pack_openings(self) -> list[tuple[int, int, int, list[tuple[int, int]]]]:
        return [
            (node, row.incarnation, row.highest, row.passed_over)
            for node, row in self.openings.items()
        ]

    def _unpack_openings(self, packed: Iterable[tuple[int, int, int, list[list[int]]]]) -> None:
        for node, incarnation, highest, passed_over in packed:
            row = self.openings[node] = Openings(incarnation)
            row.highest = highest
            row.passed_over = [(first, last) for first, last in passed_over]

    def _pack_producers(self) -> list[tuple[bytes, int, int]]:
        return [(name, last, heard) for name, (last, heard) in self.producers.items()]

    def _unpack_producers(self, packed: Iterable[tuple[bytes, int, int]]) -> None:
        self.producers = {name: (last, heard) for name, last, heard in packed}

    def _pack_written(self) -> list[object]:
        return [
            [
                name,
                writer.heard_ms,
                [
                    [micro_batch, [[digest, *known] for digest, known in requests.items()]]
                    for micro_batch, requests in writer.micro_batches.items()
                ],
            ]
            for name, writer in self.written.items()
        ]

    def _unpack_written(
        self, packed: Iterable[tuple[bytes, int, list[tuple[int, list[tuple[bytes, int, int]]]]]]
    ) -> None:
        self._requests_known = 0
        self.written = {}
        for name, heard, micro_batches in packed:
            writer = self.written[name] = Written()
            writer.heard_ms = heard
            for micro_batch, requests in micro_batches:
                writer.micro_batches[micro_batch] = {
                    digest: (first, last) for digest, first, last in requests
                }
                writer.requests += len(requests)
            self._requests_known += writer.requests


def check_written(table: SessionTable) -> None:
    """Asserts what `Written` promises, and that all requests are counted."""
    assert table._requests_known == sum(writer.requests for writer in table.written.values())
    for writer in table.written.values():
        assert len(writer.micro_batches) <= MICRO_BATCHES_KEPT_MAX
        assert writer.requests == sum(map(len, writer.micro_batches.values())) <= REQUESTS_KEPT_MAX
        for micro_batch, requests in writer.micro_batches.items():
            for first, last in requests.values():
                assert first >> MICRO_BATCH_SHIFT == micro_batch
                assert first <= last


def check_openings(table: SessionTable) -> None:
    """Asserts what `Openings` promises, and that every session's node has opened something."""
    for row in table.openings.values():
        assert len(row.passed_over) <= PASSED_OVER_MAX
        end = 0
        for first, last in row.passed_over:
            assert end < first <= last < row.highest, "ranges overlap, touch or lie too high"
            end = last + 1
    assert table.session_nodes() <= table.openings.keys()


def decode_map(body: bytes, length: int) -> Packed:
    """Returns the msgpack map of a command's padded body; `length` 0 = not said. Raises
    ValueError."""
    if 0 < length <= len(body):
        body = body[:length]
    for padding in range(8):
        if padding and (padding > len(body) or body[len(body) - padding]):
            break
        try:
            return msgspec.msgpack.decode(body[: len(body) - padding], type=Packed)
        except msgspec.DecodeError:
            continue
    raise ValueError("command body is not a msgpack map")


def first_u64(data: bytes, offset: int) -> int:
    """Returns the first u64 of a command's body. Raises ValueError."""
    body = batch.command_body(data, offset)
    if len(body) < 8:
        raise ValueError("command body is shorter than a u64")
    return int.from_bytes(body[:8], "little")
