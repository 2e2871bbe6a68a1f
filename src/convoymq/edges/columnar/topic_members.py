"""Members of topics' groups: requests that a node passes on for them.

The client is the member: it runs `topics.rules.member.GroupMember`, holds the leases and counts
their time. A node keeps nothing of it but that it wants to be woken, so any node serves any request
of a member, and a member outlives the node that it speaks through. What an owner may do is checked
by the partition, by its lease. Source: docs/formats/columnar-protocol.md, ADR 0067.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from convoymq.broker.records import TopicRecord
from convoymq.edges.columnar.building import Rows
from convoymq.edges.columnar.fields import read
from convoymq.edges.columnar.member_fields import (
    GroupFetch,
    GroupHeartbeat,
    GroupJoin,
    GroupRequest,
    GroupSeek,
    GroupSettle,
    GroupWake,
    LeaseRequest,
    Start,
)
from convoymq.edges.columnar.turns import Slice
from convoymq.edges.stream_spans import StreamSpans
from convoymq.kernels.channel_codec import RETURN_FAILED, SETTLE
from convoymq.model.columnar import Frame, Op
from convoymq.model.errors import NotFound, PreconditionFailed, Unavailable
from convoymq.streamlog.reader import Run
from convoymq.topics.rules.answers import AckAnswer, GroupView, ParkAnswer, ParkedEntry
from convoymq.topics.rules.commands import AckRanges, DoneParked, Park
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.heartbeats import MARGIN_MS, TTL_MS, Heartbeat
from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.refusals import BadPosition, Code
from convoymq.topics.shell.cuts import Position
from convoymq.topics.shell.group_messages import GroupName, pack_heartbeat, unpack_leases
from convoymq.topics.shell.member import MemberParts, RunBatch
from convoymq.topics.shell.refusals import check_filter
from convoymq.topics.shell.vocabulary import (
    WEAK,
    PartitionQueue,
    awaited,
    reads,
    retry_exchange_of,
)

if TYPE_CHECKING:
    from convoymq.edges.columnar.connection import FetchConnection

OPEN_WAIT_S = 0.02
"""Pause between two looks for a partition that is not open on this node yet."""

Answer = dict[str, object]


class Waiter:
    """A member that waits to be woken."""

    __slots__ = ("_woken",)

    def __init__(self) -> None:
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """See `Wakeable`."""
        self._woken.set()

    async def wait(self, wait_ms: int) -> bool:
        """Returns whether it was woken since the last time that it was, within the time."""
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True


class TopicMembers:
    """Requests of one connection's members."""

    def __init__(self, connection: FetchConnection, spans: StreamSpans | None) -> None:
        self._connection = connection
        self._spans = spans
        self._broker = connection.broker
        self._settings = connection.edge.settings
        self._waiters: dict[str, Waiter] = {}
        self.handlers: dict[int, Callable[[Frame], Awaitable[Answer | None]]] = {
            Op.GROUP_JOIN: self._join,
            Op.GROUP_HEARTBEAT: self._heartbeat,
            Op.GROUP_WAKE: self._wake,
            Op.GROUP_FETCH: self._fetch,
            Op.GROUP_SETTLE: self._settle,
            Op.GROUP_SEEK: self._seek,
        }

    def close(self) -> None:
        """The connection is gone; its members may come back by another one."""
        for member, waiter in self._waiters.items():
            known = self._parts.members
            if known.get(member) is waiter:
                del known[member]
        self._waiters.clear()

    @property
    def _parts(self) -> MemberParts:
        return self._broker.topic_parts.groups.parts

    def _topic(self, request: GroupRequest) -> TopicRecord:
        """Returns the topic of a group that the user may read. Raises AccessRefused, NotFound."""
        connection = self._connection
        name = f"{request.topic}/{request.group}"
        connection.permissions.check("read", "queue", name)
        return self._broker.tree.topics.get(connection.vhost, request.topic)

    def _name(self, request: GroupRequest) -> GroupName:
        return GroupName(self._connection.vhost, request.topic, request.group)

    # --- membership ------------------------------------------------------------------------

    async def _join(self, frame: Frame) -> Answer:
        request = read(GroupJoin, frame.map)
        record = self._topic(request)
        created = await self._broker.topics.create_group(
            *self._name(request), _start(request.start)
        )
        check_filter(record, request.group)
        return {
            "member": f"{self._broker.node_id}-{os.urandom(8).hex()}",
            "created": created,
            "logical": record.logical,
            "hash_seed": record.hash_seed,
            "ttl_ms": TTL_MS,
            "margin_ms": MARGIN_MS,
            "holds_keys": not retry_exchange_of(record.settings, record.mode),
        }

    async def _heartbeat(self, frame: Frame) -> Answer:
        request = read(GroupHeartbeat, frame.map)
        record = self._topic(request)
        if request.group not in record.groups:
            raise NotFound(f"no group '{request.group}' of topic '{request.topic}'")
        beat = Heartbeat(
            request.member,
            request.sent_ms,
            request.group_epoch,
            _pairs(request.held),
            _pairs(request.released),
            request.leaves,
        )
        answer = await self._parts.ask(pack_heartbeat(self._name(request), beat))
        leases, is_member = unpack_leases(request.member, answer)
        return {
            "sent_ms": leases.sent_ms,
            "group_epoch": leases.group_epoch,
            "leases": [number for lease in leases.leases.items() for number in lease],
            "revoked": sorted(leases.revoked),
            "is_member": is_member,
        }

    async def _wake(self, frame: Frame) -> Answer:
        request = read(GroupWake, frame.map)
        self._topic(request)
        waiter = self._waiters.get(request.member)
        if waiter is None:
            known = self._parts.members
            if not isinstance(known.get(request.member, None), Waiter | None):
                raise PreconditionFailed(f"GROUP_WAKE: '{request.member}' is a consumer of AMQP")
            waiter = self._waiters[request.member] = known[request.member] = Waiter()
        woken = await waiter.wait(min(request.wait_ms, self._settings.wait_ms_max))
        return {"woken": woken}

    async def _seek(self, frame: Frame) -> Answer:
        request = read(GroupSeek, frame.map)
        # A member that has left just now must not be one here any more.
        await self._broker.metadata_reads.catch_up()
        self._topic(request)
        row = await self._broker.topics.seek(*self._name(request), _start(request.position))
        return {"version": row["cv"]}

    # --- messages --------------------------------------------------------------------------

    async def _partition(self, request: LeaseRequest) -> tuple[TopicRecord, PartitionQueue]:
        """Returns the partition of a request. Raises NotFound, Unavailable."""
        record = self._topic(request)
        lineage = record.state.lineage
        lineage.partition(request.pid)
        queue = self._parts.partitions.find(record.vhost, record.name, request.pid)
        if queue is None:
            await asyncio.sleep(OPEN_WAIT_S)
            queue = self._parts.partitions.get(record, request.pid)
        return record, queue

    async def _fetch(self, frame: Frame) -> Answer | None:
        request = read(GroupFetch, frame.map)
        record, queue = await self._partition(request)
        wanted = reads.Fetch(
            request.group,
            request.group_epoch,
            request.epoch,
            request.offset,
            request.max_rows,
            request.max_bytes,
            request.park_version,
            request.close_offset,
            min(request.wait_ms, self._settings.wait_ms_max),
        )
        if wanted.wait_ms:
            # What came is asked for again below: many requests may wait, and none shall hold rows
            # meanwhile.
            found = await self._ask_fetch(queue, wanted._replace(max_messages=0))
            if found.code is not Code.OK:
                self._tell_expired(request, record, found.code)
                return {"code": found.code.value}
        async with self._connection.output():
            found = await self._ask_fetch(queue, wanted._replace(wait_ms=0))
            if found.code is not Code.OK:
                self._tell_expired(request, record, found.code)
                return {"code": found.code.value}
            answer: Answer = {
                "code": found.code.value,
                "close": found.close_offset,
                "version": record.state.lineage.partition(request.pid).created_version,
                "late": request.pid in record.groups[request.group].skipped,
            }
            heads = _heads(found.view)
            if heads:
                # Messages come with the next answer.
                runs: Sequence[Run] = [_run_of(head) for head in heads]
                rows = self._rows(request, len(runs), self._settings.frame_max // 2)
                got = await rows.add(runs)
                start = found.runs[0].offset if found.runs else found.next_offset
                answer["next"] = start if request.offset < 0 else request.offset
            else:
                runs = found.runs
                rows = self._rows(request, request.max_rows, request.max_bytes)
                got = await rows.add(runs)
                answer["next"] = _behind(runs, got, found.next_offset)
            if found.view is not None:
                answer["view"] = _packed_view(found.view, heads, got if heads else 0)
            del runs, found
            payload = await rows.finish(0, "")
            await self._connection.send_rows(frame, answer, payload)
            self._connection.edge.sent(rows.count)
        return None

    def _tell_expired(self, request: GroupFetch, record: TopicRecord, code: Code) -> None:
        """A weak topic goes on behind what has expired."""
        if code is Code.DATA_EXPIRED and record.mode == WEAK:
            parts = self._parts
            parts.spawn(parts.tell_expired(self._name(request), request.pid, request.group_epoch))

    async def _ask_fetch(self, queue: PartitionQueue, request: reads.Fetch) -> reads.Fetched:
        async with asyncio.timeout(self._settings.request_timeout_s + request.wait_ms / 1000):
            return await awaited(partial(queue.fetch, request))

    def _rows(self, request: GroupFetch | GroupSettle, max_rows: int, max_bytes: int) -> Rows:
        edge, spans = self._connection.edge, self._spans
        size, step = min(max_bytes, edge.settings.frame_max // 2), edge.settings.step_bytes
        taken = None
        if spans is not None:
            taken = partial(spans.sent, f"{request.topic}/{request.group}", _source(request))
        return Rows(Slice(edge.turns), request.columns, max_rows, size, step, taken)

    def _settled(self, request: GroupSettle, ranges: Sequence[int], outcome: int) -> None:
        if self._spans is not None:
            self._spans.settled_of(_source(request), ranges, outcome)

    async def _settle(self, frame: Frame) -> Answer | None:
        request = read(GroupSettle, frame.map)
        record, queue = await self._partition(request)
        if request.kind == "ack":
            return await self._acknowledge(request, record, queue)
        lease = (request.group, request.group_epoch, request.epoch)
        answer: object
        if request.kind == "done":
            token = OrderToken(request.version, request.offset)
            parked = (request.key, request.version)
            self._trace(request, record, queue, request.offset, parked=parked)
            done = DoneParked(*lease, request.key, token, request.failed)
            answer = await queue.ask(done, self._settings.request_timeout_s)
            outcome = RETURN_FAILED if request.failed else SETTLE
        else:
            answer = await self._park(request, record, queue)
            outcome = RETURN_FAILED
        self._settled(request, (request.offset, request.offset), outcome)
        if not isinstance(answer, ParkAnswer):
            raise Unavailable(f"partition {request.pid} gave another answer")
        told: Answer = {
            "code": answer.code.value,
            "live": answer.live,
            "park_version": answer.version,
            "head": _place(answer.head),
        }
        if answer.head is None:
            return told
        async with self._connection.output():
            rows = self._rows(request, 1, self._settings.frame_max)
            await rows.add([_run_of(answer.head)])
            await self._connection.send_rows(frame, told, await rows.finish(0, ""))
        return None

    async def _acknowledge(
        self, request: GroupSettle, record: TopicRecord, queue: PartitionQueue
    ) -> Answer:
        if len(request.ranges) % 2:
            raise PreconditionFailed("GROUP_SETTLE: a range has a first and a last offset")
        lease = (request.group, request.group_epoch, request.epoch)
        for first, last in zip(request.ranges[::2], request.ranges[1::2], strict=True):
            self._trace(request, record, queue, first, last)
        command = AckRanges(*lease, tuple(request.ranges))
        answer = await queue.ask(command, self._settings.request_timeout_s)
        assert isinstance(answer, AckAnswer), answer
        self._settled(request, request.ranges, SETTLE)
        if answer.drained:
            parts = self._parts
            parts.spawn(parts.tell_drained(self._name(request), request.pid, request.group_epoch))
        return {"code": answer.code.value, "drained": answer.drained}

    async def _park(
        self, request: GroupSettle, record: TopicRecord, queue: PartitionQueue
    ) -> object:
        """Has a message parked, as the log holds it."""
        lease = (request.group, request.group_epoch, request.epoch)
        found = await self._ask_fetch(queue, reads.Fetch(*lease, request.offset, 1, 1, -1))
        if found.code is not Code.OK:
            return ParkAnswer(found.code)
        if not found.runs or found.runs[0].offset != request.offset:
            # It is behind the group's watermark: parked or acknowledged before.
            view = found.view
            assert view is not None, "asked for a view"
            live = request.key not in view.parked
            head = view.parked.get(request.key)
            return ParkAnswer(Code.DUPLICATE, live, head, view.park_version)
        batch = RunBatch(found.runs[0])
        key = batch.key(request.offset)
        lp = logical_partition(key, record.logical, record.hash_seed)
        if not request.follow:
            self._trace(request, record, queue, request.offset)
        copy = batch.copy(request.offset)
        command = Park(*lease, request.offset, key, lp, copy, request.follow)
        exchange = retry_exchange_of(record.settings, record.mode)
        if exchange:
            retried: asyncio.Future[ParkAnswer] = asyncio.get_running_loop().create_future()

            def done(answer: ParkAnswer) -> None:
                if not retried.done():
                    retried.set_result(answer)

            self._parts.retry(self._name(request), request.pid, exchange, command, done)
            return await retried
        answer = await queue.ask(command, self._settings.request_timeout_s)
        self._parts.note_answer(self._name(request), request.pid, answer)
        return answer

    @staticmethod
    def _trace(
        request: GroupSettle,
        record: TopicRecord,
        queue: PartitionQueue,
        first: int,
        last: int = -1,
        parked: tuple[bytes, int] | None = None,
    ) -> None:
        """Has a trace say that messages were handed out: the node hears of it when they are
        settled. What this node's replica knows as settled, by a request that came before, is left
        out."""
        trace = queue.trace
        if trace is None:
            return
        # A member of ours has one message of a key at a time where keys are held.
        one_of_key = parked is None and not retry_exchange_of(record.settings, record.mode)
        runs = [(first, max(first, last) + 1)]
        machine = queue.machine()
        own = None if machine is None else machine.state.groups.get(request.group)
        if own is not None and parked is None:
            runs = list(own.cursor.missing(*runs[0]))
        for low, high in runs:
            lease = (request.group, request.member, request.epoch)
            trace.handed_out(
                *lease, low, high - low, 0, parked, one_of_key=one_of_key, at_settling=True
            )


def _source(request: GroupFetch | GroupSettle) -> tuple[str, str, int]:
    """Returns what numbers messages of a partition for a group."""
    return request.topic, request.group, request.pid


def _start(start: Start) -> Position:
    """Returns a position. Raises BadPosition."""
    if not isinstance(start, list):
        return start
    vector = dict(start)
    if len(vector) != len(start):
        raise BadPosition("the vector names a partition twice")
    return vector


def _pairs(flat: list[int]) -> dict[int, int]:
    if len(flat) % 2:
        raise PreconditionFailed("GROUP_HEARTBEAT: a lease is a partition and an epoch")
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _heads(view: GroupView | None) -> list[ParkedEntry]:
    """Returns the heads of the parked keys that resume."""
    return [] if view is None else [head for head in view.parked.values() if head is not None]


def _run_of(head: ParkedEntry) -> Run:
    return Run(head.message, 0, 0, 1, head.offset, 0)


def _place(head: ParkedEntry | None) -> list[int] | None:
    return None if head is None else [head.version, head.offset, head.pid]


def _packed_view(view: GroupView, heads: list[ParkedEntry], sent: int) -> Answer:
    """Returns the view; heads that did not fit count as not resuming, in an older version."""
    known = set(heads[:sent])
    return {
        "acked": list(view.acked),
        "parked": [
            [key, _place(head if head in known else None)] for key, head in view.parked.items()
        ],
        "park_version": view.park_version - (sent < len(heads)),
    }


def _behind(runs: Sequence[Run], rows: int, end: int) -> int:
    """Returns the offset behind the first `rows` messages of runs that end before `end`."""
    for run in runs:
        if rows < run.messages:
            return run.offset + rows
        rows -= run.messages
    return end
