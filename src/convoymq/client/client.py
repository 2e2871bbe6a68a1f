"""The blocking client: one call, one answer, whichever server gives it.

A call that can be repeated without harm is repeated, on the next server, until its deadline.
Everything but PRODUCE can; PRODUCE can with a producer's name, because the broker drops what it
has. One socket is open at a time; threads wait for each other, a fork connects anew.
"""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from convoymq.client import errors
from convoymq.client.config import ClientConfig
from convoymq.client.link import Link, is_here
from convoymq.client.results import (
    FetchResult,
    GroupMembership,
    ProduceResult,
    ProducerSession,
    QueueInfo,
)
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.model.columnar import ErrorCode, Frame, Op

if TYPE_CHECKING:
    from datetime import datetime
    from types import TracebackType

    from convoymq.client.arrow import StreamRead
    from convoymq.client.local import LocalReads
    from convoymq.client.topics import TopicRoute

MAX_ROWS = 100_000
MAX_BYTES = 16 << 20
DEFAULT_COLUMNS = 1 | 2 | 4 | 8
"""offset, timestamp, key and value."""
ATTEMPT_TIMEOUT_S = 10.0
"""A server that says nothing for this long is given up for the next one, if there is one."""
QUEUE_TYPES = ("stream", "quorum", "classic")
"""Queues that clients declare; METADATA lists partitions of topics as well."""
CLOSER_S = 10.0
"""A choice of node is good for so long; leaders seldom change."""
CLOSER_TIMEOUT_S = 0.5
"""So long is waited for a node that is only preferred."""
PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 1.0
Start = Literal["earliest", "latest"] | int | Mapping[int, int]
"""Position in an ordered topic: an end, a time (ms since the epoch), or offsets by partition."""
_AGAIN = frozenset((ErrorCode.UNAVAILABLE, ErrorCode.REPLICA_BEHIND, ErrorCode.RESOURCE_ALARM))
_ELSEWHERE = frozenset((ErrorCode.UNAVAILABLE, ErrorCode.REPLICA_BEHIND))


class Client:
    """See the module text. Every call may raise what `convoymq.client.errors` lists."""

    def __init__(self, config: ClientConfig) -> None:
        """Connects at the first call, not yet."""
        self.config = config
        self._addresses = config.addresses()
        self._at = random.randrange(len(self._addresses)) if config.spread else 0
        self._link: Link | None = None
        self._was_connected = False
        #: Servers that the call in progress can't use, however often it tries.
        self._useless: set[int] = set()
        #: Names of the nodes at the addresses, as far as they were asked.
        self._names: dict[int, str] = {}
        self._closer: tuple[str, float] = ("", 0.0)
        #: Which servers are on this machine; None = nobody has looked.
        self._here: list[int] | None = None
        self._local: LocalReads | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"Client({self.config!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; a later call opens another."""
        with self._lock:
            self._drop()
        if self._local is not None:
            self._local.close()

    def abandon(self) -> None:
        """Closes a fork's copy of the connection; the parent's stays as it is."""
        # No lock: the thread that held it in the parent does not exist here.
        self._drop()

    # --- what there is -------------------------------------------------------------------

    def metadata(
        self,
        names: Iterable[str] | None = None,
        pattern: str | None = None,
        types: Sequence[str] = ("stream",),
        *,
        current: bool = False,
    ) -> list[QueueInfo]:
        """Returns the queues of these types that the user may read, by name.

        Args:
            names: only these; unknown ones are left out.
            current: as of now or later. Otherwise the node that answers may be behind: what was
                declared just now may be missing, what was deleted may be there.
            pattern: only those that this regular expression matches as a whole.
        """
        try:
            wanted = re.compile(pattern) if pattern is not None else None
        except re.error as error:
            raise errors.PreconditionFailed(f"pattern {pattern!r}: {error}") from None
        fields: dict[str, object] = {
            "names": None if names is None else list(names),
            "types": list(types),
        }
        if current:
            fields["current"] = True
        answer = self._call(Op.METADATA, fields)
        rows = [_queue(row) for row in _list(answer, "queues")]
        return sorted(
            (row for row in rows if wanted is None or wanted.fullmatch(row.name)),
            key=lambda row: row.name,
        )

    def offsets(
        self, queries: Iterable[tuple[str, str, int | None]]
    ) -> list[tuple[int | None, int | None]]:
        """Answers (stream, "earliest" | "latest" | "timestamp", ms since the epoch) queries.

        Returns:
            (offset, time in ms or None) each; (None, None): no message at or after the time.
            "latest" is the offset that the next message gets.
        """
        asked = [list(query) for query in queries]
        rows = _list(self._call(Op.OFFSETS, {"queries": asked}), "offsets")
        pairs = [row for row in rows if isinstance(row, list) and len(row) >= 2]
        if len(pairs) != len(rows) or len(rows) != len(asked):
            raise errors.ProtocolError(f"{len(pairs)} offsets for {len(asked)} queries")
        return [(pair[0], pair[1]) for pair in pairs]

    def go_closer(self, queue: str) -> None:
        """Goes to the node where reading a stream or queue costs least.

        That is a replica on this machine if only some of the servers are on it, else the one before
        the leader in the order of ids: the leader waits for the others first (`raft.deferral`). A
        preference: who can't be reached is not gone to, nothing fails.
        """
        chosen, until = self._closer
        if chosen == queue and time.monotonic() < until:
            return
        try:
            found = self.metadata(names=[queue], types=(*QUEUE_TYPES, "partition"))
        except errors.ClientError:
            return
        self._closer = (queue, time.monotonic() + CLOSER_S)
        members = found[0].members if found else ()
        leader = found[0].leader if found else None
        everywhere = range(len(self._addresses))
        if self._here is None:
            self._here = [at for at in everywhere if is_here(self._addresses[at])]
        with self._lock:
            if 0 < len(self._here) < len(everywhere) and self._go_to(members, self._here):
                return
            if leader in members:
                self._go_to((members[members.index(leader) - 1],), everywhere)

    # --- streams -------------------------------------------------------------------------

    def fetch(
        self,
        stream: str,
        offset: int,
        *,
        end: int | None = None,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        columns: int = DEFAULT_COLUMNS,
        wait_ms: int = 0,
        compression: str = "",
        local: bool = False,
        group: int = 0,
    ) -> FetchResult:
        """Returns rows from `offset` on: at least one, or none when there is none yet.

        Args:
            end: the offset to stop before; None = the committed end.
            max_rows, max_bytes: at most so much; the server may send less.
            columns: bits of `convoymq.kernels.columns`.
            wait_ms: how long the server waits for the first row.
            compression: "", "zstd" or "lz4".
            local: read from the node's file where that is on this machine and may be opened.
            group: of this stream and no other of its name; 0 = whichever there is.

        Raises:
            Recreated: the stream of this name is of another group.
        """
        fields: dict[str, object] = {
            "stream": stream,
            "offset": offset,
            "end": end,
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "columns": columns,
            "wait_ms": wait_ms,
            "compression": compression,
        }
        if group:
            fields["group"] = group
        while local:
            files = self._local_reads()
            found = files.rows(stream, group, offset, end, max_rows, max_bytes, columns)
            if found is not None:
                return found
            answer = self._call(
                Op.FETCH, {**fields, "machine": files.machine}, extra_s=wait_ms / 1000
            )
            first, high = _int(answer, "first"), _int(answer, "high")
            if not answer.map.get("excerpt"):
                return _rows(answer, first, high)
            # From its file, or, when that can't be read, once more without naming the machine.
            files.open(stream, group, offset, answer.payload, first, high)
        answer = self._call(Op.FETCH, fields, extra_s=wait_ms / 1000)
        return _rows(answer, _int(answer, "first"), _int(answer, "high"))

    def read(
        self,
        stream: str,
        *,
        start: int | datetime | Literal["earliest", "latest"] = "earliest",
        end: int | None = None,
        columns: Sequence[str] = ("offset", "timestamp", "key", "value", "headers"),
        local: bool = False,
    ) -> StreamRead:
        """Returns a part of a stream for programs with Arrow: record batches one after the other,
        or all as a table. Needs pyarrow.

        Args:
            start: an offset; the first message stored at or after a time; or an end.
            end: the offset to stop before; None = the end as it is now.
            columns: of `convoymq.client.arrow.COLUMNS`.
            local: see `fetch`.

        Raises:
            ValueError: there is no such column.
        """
        from convoymq.client.arrow import StreamRead

        queries: list[tuple[str, str, int | None]] = [(stream, "latest", None)]
        if isinstance(start, str):
            queries.append((stream, start, None))
        elif not isinstance(start, int):
            queries.append((stream, "timestamp", int(start.timestamp() * 1000)))
        (latest, _), *others = self.offsets(queries)
        until = end if end is not None else latest or 0
        first = start if isinstance(start, int) else others[0][0]
        # Nothing was stored since that time.
        return StreamRead(self, stream, until if first is None else first, until, columns, local)

    def _local_reads(self) -> LocalReads:
        if self._local is None:
            # Imported late: what reads the log is of no use to other clients.
            from convoymq.client.local import LocalReads

            self._local = LocalReads()
        return self._local

    def produce(
        self,
        frame: bytes | memoryview,
        *,
        stream: str | None = None,
        queue: str | None = None,
        exchange: str | None = None,
        routing_key: str | None = None,
        producer: str | None = None,
        sequence: int = 0,
        digest: bytes | None = None,
        mandatory: bool = False,
    ) -> ProduceResult:
        """Publishes the rows of a columnar frame and returns when all are safe.

        Args:
            frame: made by `convoymq.kernels.column_frame.build_frame`.
            stream, queue, exchange: where to; exactly one of them.
            routing_key: with `exchange`; None = the column of that name.
            producer, sequence: the producer's name and the number of row 0. Rows that are not above
                the last number of that name in a target are dropped there.
            digest: 16 bytes that stand for the rows and their place, for rows whose order may
                change when they are sent again: then only rows are dropped that a request of this
                name and digest has brought, whatever their numbers are.
            mandatory: publish nothing of a frame of which a row has no queue to go to.

        Raises:
            MaybeProduced: without a producer, the connection broke before the answer.
            PreconditionFailed: among others, with `mandatory`, for a row without a queue.
        """
        fields: dict[str, object] = {
            "stream": stream,
            "queue": queue,
            "exchange": exchange,
            "routing_key": routing_key,
            "producer": producer,
            "sequence": sequence,
            "digest": digest,
        }
        if mandatory:
            fields["mandatory"] = True
        answer = self._call(Op.PRODUCE, fields, frame, again=producer is not None)
        return ProduceResult(
            count=_int(answer, "count"),
            duplicates=_int(answer, "duplicates"),
            unroutable=_int(answer, "unroutable"),
        )

    def check_produce(
        self, frame: bytes | memoryview, *, producer: str | None = None, mandatory: bool = False
    ) -> int:
        """Raises what `produce` would raise for a frame whose columns say where its rows go, and
        publishes nothing. Returns how many rows have no queue to go to.

        Raises:
            ClientError: among others NOT_IMPLEMENTED, by a server of release 0.2.
        """
        fields: dict[str, object] = {"producer": producer, "mandatory": mandatory}
        return _int(self._call(Op.CHECK_PRODUCE, fields, frame), "unroutable")

    def store_offset(self, stream: str, consumer: str, offset: int) -> None:
        """Stores how far a named consumer is; the last write wins."""
        fields = {"stream": stream, "consumer": consumer, "offset": offset}
        self._call(Op.STORE_OFFSET, fields)

    def query_offset(self, stream: str, consumer: str) -> int | None:
        """Returns what was stored last under the name, or None."""
        answer = self._call(Op.QUERY_OFFSET, {"stream": stream, "consumer": consumer})
        found = answer.map.get("offset")
        return found if isinstance(found, int) else None

    # --- queues --------------------------------------------------------------------------

    def reservation(self, queue: str, op: str, **fields: object) -> dict[str, object]:
        """Carries out an op of ADR 0008 on a queue's reservation and returns its answer."""
        return dict(self._call(Op.RESERVATION, {**fields, "queue": queue, "op": op}).map)

    def reservation_fetch(
        self,
        queue: str,
        reservation: str,
        epoch: int,
        offset: int,
        *,
        end: int | None,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        columns: int = DEFAULT_COLUMNS,
        compression: str = "",
    ) -> FetchResult:
        """Returns reserved messages from `offset` up to `end`. It can be repeated at will."""
        fields = {
            "queue": queue,
            "reservation": reservation,
            "epoch": epoch,
            "offset": offset,
            "end": end,
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "columns": columns,
            "compression": compression,
        }
        answer = self._call(Op.RESERVATION_FETCH, fields)
        return _rows(answer, _int(answer, "first"), _int(answer, "next"))

    def browse(
        self,
        queue: str,
        cursor: object = None,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        columns: int = DEFAULT_COLUMNS,
        compression: str = "",
    ) -> tuple[FetchResult, object]:
        """Returns ready messages without taking them, and the cursor to go on; None at the end."""
        fields = {
            "queue": queue,
            "cursor": cursor,
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "columns": columns,
            "compression": compression,
        }
        answer = self._call(Op.BROWSE, fields)
        result = _rows(answer, 0, 0)
        return result, answer.map.get("cursor")

    # --- ordered topics ------------------------------------------------------------------

    def topic_route(
        self,
        topic: str,
        *,
        group: str | None = None,
        newer_than: int = -1,
        wait_ms: int = 0,
        lineage: bool = True,
    ) -> TopicRoute:
        """Returns the newest route of an ordered topic.

        Args:
            group: for a user who may only read in this group.
            newer_than: a version; the server waits up to `wait_ms` for a newer one, and answers
                with what it has then.
            lineage: with all partitions that ever were.

        Raises:
            NotFound: no such topic.
        """
        # Imported late: what knows topics is of no use to other clients.
        from convoymq.client.topics import route_of

        fields = {
            "topic": topic,
            "group": group,
            "newer_than": newer_than,
            "wait_ms": wait_ms,
            "lineage": lineage,
        }
        return route_of(self._call(Op.TOPIC_ROUTE, fields, extra_s=wait_ms / 1000).map)

    def open_producer(
        self, topic: str, producer: int, *, epoch: int = 0, query: bool = False
    ) -> ProducerSession:
        """Begins a session of an ordered topic's producer, and ends those before it.
        `TopicProducer` does the rest.

        Args:
            producer: its number; `client.topic_producer.producer_number` gives that of a name.
            epoch: number of the session; 0: the next one.
            query: begin nothing, and only say what is stored.

        Raises:
            NotFound: no such topic.
            ProducerFenced: there is a newer session.
        """
        fields = {"topic": topic, "producer": producer, "epoch": epoch, "query": query}
        answer = self._call(Op.TOPIC_PRODUCER, fields)
        stored: dict[int, tuple[int, bytes]] = {}
        for row in _list(answer, "stored"):
            match row:
                case [int(lp), int(seq), bytes(position)]:
                    stored[lp] = (seq, position)
                case _:
                    raise errors.ProtocolError(f"{row!r} is no state of a producer")
        return ProducerSession(epoch=_int(answer, "epoch"), stored=stored)

    # --- groups of ordered topics --------------------------------------------------------

    def join_group(self, topic: str, group: str, start: Start = "earliest") -> GroupMembership:
        """Creates a group of an ordered topic unless there is one, and returns a name for a member
        of it. `TopicConsumer` does the rest.

        Args:
            start: where a group begins that is new: an end, a time (ms since the epoch), or a
                vector of partitions and offsets.

        Raises:
            NotFound: no such topic.
            BadPosition, UnknownPartition, DataExpired: no group can begin there.
        """
        fields = {"topic": topic, "group": group, "start": _position(start)}
        answer = self._call(Op.GROUP_JOIN, fields)
        member = answer.map.get("member")
        if not isinstance(member, str):
            raise errors.ProtocolError("answer without member")
        return GroupMembership(
            member=member,
            created=bool(answer.map.get("created")),
            logical=_int(answer, "logical"),
            hash_seed=_int(answer, "hash_seed"),
            ttl_ms=_int(answer, "ttl_ms"),
            margin_ms=_int(answer, "margin_ms"),
            holds_keys=bool(answer.map.get("holds_keys", True)),
        )

    def seek_group(self, topic: str, group: str, position: Start) -> None:
        """Has a group of an ordered topic read again, or skip, from a position; see `join_group`.

        Raises:
            NotFound: no such topic or group.
            GroupLive: the group has members.
            BadPosition, UnknownPartition, DataExpired: no group can begin there.
        """
        fields = {"topic": topic, "group": group, "position": _position(position)}
        self._call(Op.GROUP_SEEK, fields)

    # --- calls ---------------------------------------------------------------------------

    def _call(
        self,
        op: Op,
        fields: Mapping[str, object],
        payload: bytes | memoryview = b"",
        *,
        extra_s: float = 0.0,
        again: bool = True,
    ) -> Frame:
        """Asks until there is an answer. `extra_s`: how long the server may wait on purpose."""
        deadline = time.monotonic() + self.config.timeout + extra_s
        attempt_s = ATTEMPT_TIMEOUT_S + extra_s
        tries = 0
        with self._lock:
            self._useless.clear()
            while True:
                error = self._attempt(op, fields, payload, deadline, attempt_s, again)
                if isinstance(error, Frame):
                    return error
                if len(self._useless) == len(self._addresses):
                    raise errors.Unavailable(
                        f"none of {', '.join(self.config.servers)} can be used; last: {error}"
                    ) from error
                tries += 1
                self._pause(error, tries, deadline)

    def _attempt(
        self,
        op: Op,
        fields: Mapping[str, object],
        payload: bytes | memoryview,
        deadline: float,
        attempt_s: float,
        again: bool,
    ) -> Frame | Exception:
        """One try on one server: its answer, or why another try is worth while."""
        sent = False
        until = deadline
        if again and len(self._addresses) > 1:
            until = min(deadline, time.monotonic() + attempt_s)
        try:
            link = self._connected(until)
            sent = True
            answer = link.ask(op, fields, payload, until)
        except errors.PreconditionFailed:
            raise
        except errors.Unavailable as error:
            self._next_server()
            if sent and not again:
                raise errors.MaybeProduced(error.text) from error
            return error
        except errors.ClientError:
            self._drop()
            raise
        except OSError as error:
            where = self.config.servers[self._at]
            if not sent and self._is_lasting(error):
                self._useless.add(self._at)
            self._next_server()
            if sent and not again:
                raise errors.MaybeProduced(
                    f"the connection to {where} was lost before the answer: {error}"
                ) from error
            return errors.Unavailable(f"{where}: {error}")
        except BaseException:
            # Interrupted half way: what comes next on this socket would answer another question.
            self._drop()
            raise
        if not answer.status:
            return answer
        failure = errors.of_answer(answer.status, answer.map)
        if answer.map.get("maybe") and not again:
            raise errors.MaybeProduced(failure.text)
        if answer.status not in _AGAIN:
            raise failure
        if answer.status in _ELSEWHERE:
            self._next_server()
        return failure

    def _is_lasting(self, error: OSError) -> bool:
        """Returns whether the next try would fail at a server too: its name is unknown, its
        certificate is not trusted, or it has no TLS. Names may vanish while a cluster restarts."""
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME and not self._was_connected
        if self.config.tls is None:
            return False
        import ssl

        lost = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
        return isinstance(error, ssl.SSLError) and not isinstance(error, lost)

    def _connected(self, deadline: float) -> Link:
        if self._pid != os.getpid():
            self._drop()
            self._pid = os.getpid()
        if self._link is None:
            self._link = Link(self.config, self._addresses[self._at], deadline)
            self._was_connected = True
        return self._link

    def _go_to(self, nodes: Collection[str], places: Collection[int]) -> bool:
        """Connects to one of these servers that is one of the nodes, if there is one."""
        if self._link is not None and self._at in places and self._link.node in nodes:
            return True
        for at in places:
            if at == self._at or (at in self._names and self._names[at] not in nodes):
                continue
            try:
                link = Link(self.config, self._addresses[at], time.monotonic() + CLOSER_TIMEOUT_S)
            except (OSError, errors.ClientError):
                continue
            self._names[at] = link.node
            if link.node in nodes:
                self._drop()
                self._link, self._at = link, at
                return True
            link.close()
        return False

    def _next_server(self) -> None:
        self._drop()
        self._at = (self._at + 1) % len(self._addresses)

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _pause(self, error: Exception, tries: int, deadline: float) -> None:
        """Waits before the next try, longer after each round. Raises when there is no time left."""
        left = deadline - time.monotonic()
        rounds = tries // len(self._addresses)
        pause = min(PAUSE_MAX_S, PAUSE_MIN_S * 2 ** min(rounds, 10)) if rounds else 0.0
        if left <= pause:
            if isinstance(error, errors.ReplicaBehind):
                raise error
            text = error.text if isinstance(error, errors.ClientError) else str(error)
            raise errors.Unavailable(
                f"no answer from {', '.join(self.config.servers)} within "
                f"{self.config.timeout:g} s; last: {text}"
            ) from error
        time.sleep(pause)


def _rows(answer: Frame, first: int, high: int) -> FetchResult:
    try:
        frame = ColumnFrame(answer.payload)
    except ValueError as error:
        raise errors.ProtocolError(f"columnar frame: {error}") from error
    return FetchResult(frame=frame, first=first, high=high)


def _queue(row: object) -> QueueInfo:
    if not isinstance(row, dict):
        raise errors.ProtocolError(f"queue that is a {type(row).__name__}")
    try:
        return QueueInfo(
            name=row["name"],
            type=row["type"],
            group=row["group"],
            leader=row["leader"],
            members=tuple(row["members"]),
            first=row["first"],
            next=row["next"],
            bytes=row["bytes"],
            arguments=row["arguments"],
        )
    except (KeyError, TypeError) as error:
        raise errors.ProtocolError(f"queue without {error}") from error


def _position(start: Start) -> object:
    if isinstance(start, Mapping):
        return [[pid, offset] for pid, offset in start.items()]
    return start


def _list(answer: Frame, name: str) -> list[object]:
    found = answer.map.get(name)
    if not isinstance(found, list):
        raise errors.ProtocolError(f"answer without {name}")
    return found


def _int(answer: Frame, name: str) -> int:
    found = answer.map.get(name)
    if not isinstance(found, int):
        raise errors.ProtocolError(f"answer without {name}")
    return found
