"""Groups of topics, as channels see them: a queue named `topic/group`.

A consumer of it is a member of the group. The group is created by its first consumer, which says
where it begins (`x-stream-offset`: `first`, the default, `next`, or a time) and how it goes from
route version to route version (`x-group-advance`: `linear`, the default, or `dag`). All members
have one filter (ADR 0224). Everything else that queues do, groups refuse by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from convoymq.kernels.batch import CommandBuilder, PublishTarget
from convoymq.kernels.order_headers import Place
from convoymq.messages.amqp10.filters import filter_name
from convoymq.metadata.machine import Change, ChangeKind, TopicRecord, Vhost
from convoymq.metadata.topic_settings import WEAK
from convoymq.metadata.topics import find_topic, topic_of_group
from convoymq.model.errors import BrokerError, PreconditionFailed, Subject
from convoymq.model.refusals import (
    invalid_argument,
    missing,
    unserved_by_group,
)
from convoymq.queues.interface import (
    NO_MODIFICATION,
    ClientEvents,
    ConsumerSpec,
    Delivery,
    GetResult,
    Modification,
    Queue,
    QueueClient,
    QueueFeatures,
    Row,
)
from convoymq.queues.stream.offsets import Start, parse_start
from convoymq.topics.rules.lineage import Mode
from convoymq.topics.rules.member import RETRIES
from convoymq.topics.shell.cuts import Position
from convoymq.topics.shell.group_messages import GroupName, member_name
from convoymq.topics.shell.member import Member, MemberParts
from convoymq.topics.shell.refusals import GroupDataExpired, check_filter

OFFSET_ARGUMENT = "x-stream-offset"
LIMIT_ARGUMENT = "x-delivery-limit"
"""Times that a returned message is handed out again, before it is parked; -1 = no limit."""
ADVANCE_ARGUMENT = "x-group-advance"
"""The way in which a group takes changes: a `lineage.Mode`."""
KEY_ARGUMENT = "x-key-in-flight"
"""Messages of a key that the client may have at a time: 1 or, for no limit, 0. A strict topic has 1
without the argument, a weak one 0."""
ADVANCES = frozenset(mode.value for mode in Mode)
COUNTS_TIMEOUT_S = 2.0

CreateGroup = Callable[[str, str, str, Position, str | None], Awaitable[object]]
"""(vhost, topic, group, position, advance): creates a group that does not exist. Raises
BrokerError."""


class Wanted(NamedTuple):
    """Wishes of a consumer."""

    position: Position
    """The start of a new group."""
    retries: int
    """Times that a message is handed out again."""
    advance: str | None
    """A `lineage.Mode`; None: whatever the group has, linear for a new one."""
    one_of_key: bool
    """True when a message waits until the one before it of its key is settled."""


class GroupClient(QueueClient):
    """One channel's members of a group; see `QueueClient`."""

    queue: GroupHandle

    def __init__(self, queue: GroupHandle, session: int, events: ClientEvents) -> None:
        self.queue = queue
        self.session = session
        self.closed = False
        self._events = events
        self._members: dict[int, Member] = {}
        self._places: dict[int, dict[int, Place]] = {}
        # Nothing is ever published here: no route leads to a group.
        self._target = PublishTarget(CommandBuilder(), session, self)

    @property
    def target(self) -> PublishTarget:
        """See `QueueClient`; no route leads here."""
        return self._target

    @property
    def members(self) -> int:
        """Returns the number of consumers that were not cancelled."""
        return sum(not member.core.leaves for member in self._members.values())

    def places_of(self, consumer: int) -> dict[int, Place]:
        return self._places.setdefault(consumer, {})

    # --- consumers ---------------------------------------------------------------------------

    def subscribe(self, spec: ConsumerSpec) -> None:
        """Registers a consumer: joins the group."""
        try:
            wanted = self._check(spec)
        except BrokerError as refusal:
            # A name of its own: that of the handler is gone when this is called.
            error = refusal
            self._soon(lambda: self._events.on_subscribed(self, spec.number, error))
            return
        self.queue.parts.spawn(self._join(spec, wanted))

    def _check(self, spec: ConsumerSpec) -> Wanted:
        """Raises BrokerError."""
        subject = self.queue.subject
        if spec.no_ack and not spec.credited:
            raise unserved_by_group("automatic acknowledgement", subject)
        if spec.exclusive:
            raise unserved_by_group("exclusive access", subject)
        limit = (spec.arguments or {}).get(LIMIT_ARGUMENT, RETRIES)
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < -1:
            raise invalid_argument(LIMIT_ARGUMENT, subject, '"expected integer from -1 on"')
        advance = (spec.arguments or {}).get(ADVANCE_ARGUMENT)
        if advance is not None and (not isinstance(advance, str) or advance not in ADVANCES):
            raise invalid_argument(ADVANCE_ARGUMENT, subject, '"expected linear or dag"')
        is_strict = self.queue.record.mode != WEAK
        in_flight = (spec.arguments or {}).get(KEY_ARGUMENT, int(is_strict))
        if isinstance(in_flight, bool) or in_flight not in (0, 1):
            raise invalid_argument(KEY_ARGUMENT, subject, '"expected 0 or 1"')
        return Wanted(self._position(spec, subject), limit, advance, in_flight == 1)

    def _position(self, spec: ConsumerSpec, subject: Subject) -> Position:
        """Returns where a new group begins. Raises BrokerError."""
        if spec.stream_offset is None:
            return "earliest"
        start = parse_start(spec.stream_offset, self.queue.parts.clock.now_ms())
        if isinstance(start, str):
            raise invalid_argument(OFFSET_ARGUMENT, subject, start)
        if start.kind is Start.FIRST:
            return "earliest"
        if start.kind is Start.NEXT:
            return "latest"
        if start.kind is Start.TIMESTAMP:
            return start.value
        raise invalid_argument(
            OFFSET_ARGUMENT, subject, '"a group begins at first, next or a time"'
        )

    async def _join(self, spec: ConsumerSpec, wanted: Wanted) -> None:
        queue = self.queue
        filters = filter_name(spec.filters)
        try:
            await queue.create(wanted.position, wanted.advance)
            check_filter(queue.record, queue.group_name.group, filters)
        except BrokerError as error:
            if not self.closed:
                self._events.on_subscribed(self, spec.number, error)
            return
        if self.closed:
            return
        parts = queue.parts
        member = self._members[spec.number] = Member(
            parts,
            queue.group_name,
            member_name(parts.node, parts.incarnation, self.session, spec.number, filters),
            lambda: queue.record,
            spec.number,
            self._deliver,
            window=spec.prefetch,
            retries=wanted.retries,
            one_of_key=wanted.one_of_key,
            wants=spec.wants,
        )
        member.places = self.places_of(spec.number)
        if spec.credited:
            member.core.limit = 0
        self._events.on_subscribed(self, spec.number, None)
        if not self.closed:
            member.start()

    def _deliver(self, delivery: Delivery) -> None:
        self._events.on_deliver(self, delivery)

    def _soon(self, answer: Callable[[], None]) -> None:
        """Answers a call that is still under way when it has returned."""
        self.queue.parts.clock.call_later(0, lambda: None if self.closed else answer())

    def cancel(self, consumer: int) -> None:
        """Ends a consumer; what it has it may still settle, for the time of a lease."""
        member = self._members.get(consumer)
        if member is not None:
            member.leave()
        self._soon(lambda: self._events.on_cancel_ok(self, consumer))

    def remove(self, consumer: int) -> None:
        """See `QueueClient`: what it has goes to others."""
        member = self._members.pop(consumer, None)
        if member is not None:
            member.abandon()
        self._soon(lambda: self._events.on_cancel_ok(self, consumer))

    def grant(self, consumer: int, limit: int, *, drain: bool = False) -> None:
        """See `QueueClient`. A drain ends when it is used up, or a moment later."""
        member = self._members.get(consumer)
        if member is None or member.core.leaves:
            return

        def granted(given: int, ready: int) -> None:
            self._soon(lambda: self._events.on_credit(self, consumer, given, ready))

        member.grant(limit, granted, drain=drain)

    def set_credit(self, consumer: int, credit: int) -> None:
        """Replaces the consumer's window."""
        member = self._members.get(consumer)
        if member is not None:
            member.set_window(credit)

    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """Acknowledges messages."""
        member = self._members.get(consumer)
        if member is not None:
            member.acknowledge(ranges)

    def return_(
        self,
        consumer: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification = NO_MODIFICATION,
    ) -> None:
        """Messages are handed out again in their places, and parked when they fail too often."""
        member = self._members.get(consumer)
        if member is not None:
            member.take_back(ranges, final=False, unused=untried)

    def discard(
        self, consumer: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        """Messages are parked."""
        member = self._members.get(consumer)
        if member is not None:
            member.take_back(ranges, final=True)

    def when_settled(self, call: Callable[[bool], None]) -> None:
        waiting = [member for member in self._members.values() if not member.is_gone]
        left = len(waiting)
        if not left:
            call(True)
            return

        def settled(_: bool) -> None:
            nonlocal left
            left -= 1
            if not left:
                call(True)

        for member in waiting:
            member.when_settled(settled)

    def get(self, *, no_ack: bool) -> None:
        """Refused."""
        error = self._unserved("basic.get")
        self._soon(lambda: self._events.on_get(self, GetResult(error=error)))

    def purge(self) -> None:
        """Refused."""
        error = self._unserved("queue.purge")
        self._soon(lambda: self._events.on_purged(self, 0, error))

    def _unserved(self, what: str) -> PreconditionFailed:
        return unserved_by_group(what, self.queue.subject)

    def pause(self, consumer: int) -> None:
        """Nothing more until `resume`."""
        member = self._members.get(consumer)
        if member is not None:
            member.pause()

    def resume(self, consumer: int) -> None:
        """Goes on where it was."""
        member = self._members.get(consumer)
        if member is not None:
            member.resume()

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """The channel is gone: its members leave at once, and what they have goes to others."""
        self.closed = True
        self.queue.clients.pop(self, None)
        for member in self._members.values():
            member.abandon()
        self._members.clear()

    def on_deleted(self) -> None:
        """The group is gone."""
        members, self._members = self._members, {}
        for number, member in members.items():
            member.end()
            if not self.closed and not member.core.leaves:
                self._events.on_cancelled(self, number, "deleted")


class GroupHandle(Queue):
    """A node's handle of a group; see `Queue`."""

    type = "topic-group"
    features = QueueFeatures(
        counts_failed_deliveries=True,
        filters=True,
        consumer_arguments=frozenset(
            (OFFSET_ARGUMENT, LIMIT_ARGUMENT, ADVANCE_ARGUMENT, KEY_ARGUMENT)
        ),
    )

    def __init__(
        self, parts: MemberParts, name: GroupName, record: TopicRecord, create: CreateGroup
    ) -> None:
        self.vhost = name.vhost
        self.name = name.queue
        self.group = 0
        self.group_name = name
        self.record = record
        self.parts = parts
        self.clients: dict[GroupClient, None] = {}
        self._create = create

    @property
    def exists(self) -> bool:
        """Returns whether the group has been created."""
        return self.group_name.group in self.record.groups

    def client(self, session: int, events: ClientEvents) -> GroupClient:
        client = GroupClient(self, session, events)
        self.clients[client] = None
        return client

    async def create(self, position: Position, advance: str | None) -> None:
        """Creates the group, unless it exists. Raises BrokerError."""
        state = self.record.groups.get(self.group_name.group)
        if state is None or advance is not None:
            await self._create(*self.group_name, position, advance)
        is_strict = self.record.mode != WEAK
        if state is not None and is_strict and state.has_lost_data(self.record.state.kept):
            raise GroupDataExpired(self.subject)

    async def ready(self, timeout: float) -> None:
        """See `Queue`: members wait by themselves."""

    async def counts(self) -> tuple[int, int]:
        """Returns (messages that are neither acknowledged nor parked, members), of the partitions
        that the group reads now and that answer in time."""
        state = self.record.groups.get(self.group_name.group)
        if state is None:
            return 0, 0
        # In DAG mode members own partitions of later versions as well.
        pids = {*self.record.state.lineage.route(state.cv).pids, *state.owners}
        lags = await asyncio.gather(*(self._lag(pid) for pid in pids))
        return sum(lags), len(state.members)

    async def _lag(self, pid: int) -> int:
        queue = self.parts.partitions.find(self.vhost, self.group_name.topic, pid)
        if queue is None:
            return 0
        try:
            found = await queue.description(COUNTS_TIMEOUT_S)
        except BrokerError:
            return 0
        own = found.groups.get(self.group_name.group)
        end = found.end_offset if found.close_offset < 0 else found.close_offset
        return max(0, end - own.watermark - own.acked_above) if own is not None else 0

    def info(self) -> Row:
        state = self.record.groups.get(self.group_name.group)
        return {"consumers": len(state.members) if state is not None else 0}

    def end(self) -> None:
        """The topic or the group is gone."""
        self.ended = missing(self.subject)
        for client in list(self.clients):
            client.on_deleted()


@dataclass(slots=True)
class TopicGroups:
    """The handles of groups on this node."""

    parts: MemberParts
    create: CreateGroup
    _handles: dict[GroupName, GroupHandle] = field(default_factory=dict)

    def find(self, vhost: Vhost, queue: str) -> GroupHandle | None:
        """Returns the handle of the group that a queue name stands for; None for other names."""
        found = topic_of_group(vhost, queue)
        if found is None:
            return None
        record, group = found
        name = GroupName(vhost.name, record.name, group)
        handle = self._handles.get(name)
        if handle is not None and handle.record is not record:
            handle.end()
            handle = None
        if handle is None:
            handle = self._handles[name] = GroupHandle(self.parts, name, record, self.create)
        return handle

    def on_change(self, change: Change) -> None:
        """The tree has changed: ends the handles of what is gone."""
        if change.kind not in (ChangeKind.TOPIC, ChangeKind.RESTORED):
            return
        for name, handle in list(self._handles.items()):
            if change.kind is ChangeKind.TOPIC and name[:2] != (change.vhost, change.topic):
                continue
            if not self._is_current(handle):
                del self._handles[name]
                handle.end()
            elif not handle.clients:
                # It is made again for the next client.
                del self._handles[name]

    def _is_current(self, handle: GroupHandle) -> bool:
        record = find_topic(self.parts.store.tree, handle.vhost, handle.group_name.topic)
        if record is None:
            return False
        # A tree that was restored has other objects for the same topic.
        if record is not handle.record and record.created_ms == handle.record.created_ms:
            handle.record = record
        members = any(client.members for client in handle.clients)
        return record is handle.record and (handle.exists or not members)
