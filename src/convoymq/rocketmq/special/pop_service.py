"""Requests of pop consumption: pop, acknowledgements, later visibility, peek, notification.

At an acting slave, records of pops go to another broker, by whose number the receipt names it
(docs/adr/0223).

A pop from several queues is one append of a checkpoint for each, and one wait for the disk and the
slaves. A queue is popped by one request of a group at a time; others take the next queue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convoymq.rocketmq import filters
from convoymq.rocketmq.acting.escape import HOME_MIN, position_key
from convoymq.rocketmq.broker import names
from convoymq.rocketmq.broker.clients import Subscription
from convoymq.rocketmq.broker.names import RETRY_PREFIX, TIMER_TOPIC
from convoymq.rocketmq.broker.types import STORED
from convoymq.rocketmq.broker.values import GroupConfig, SubscriptionData
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import PERM_READ, TopicConfig
from convoymq.rocketmq.special.names import POP_CHECKPOINT, keyed
from convoymq.rocketmq.special.polls import ANY_QUEUE, Polls
from convoymq.rocketmq.special.pop import Pops, TooLate
from convoymq.rocketmq.special.pop_order import OrderTable, PopOrder
from convoymq.rocketmq.special.pop_records import (
    ORDERED_REVIVE_QUEUE,
    POP_MAX,
    Ack,
    BatchAckBody,
    CheckPoint,
    Receipt,
    counts_info,
    offsets_info,
    real_topic,
    retry_flag,
    retry_topic,
    start_info,
)
from convoymq.rocketmq.special.rewriting import rewritten
from convoymq.rocketmq.special.settings import SpecialSettings
from convoymq.rocketmq.store.types import (
    Draft,
    GetStatus,
    Got,
    Matches,
    Message,
    Placed,
    PutStatus,
    Run,
)

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

POP_BYTES_MAX = 4 << 20
POLL_MS_MAX = 60_000
INVISIBLE_MS_MAX = 3 * 24 * 3600 * 1000
RETRY_FIRST_EACH = 5
"""Each so many pops look at messages that came back first."""
FILTERS_MAX = 4096
INIT_AT_MIN = 0

_WRONG_OFFSET = (
    GetStatus.OFFSET_TOO_SMALL, GetStatus.OFFSET_OVERFLOW_BADLY, GetStatus.OFFSET_FOUND_NULL
)  # fmt: skip


@dataclass(slots=True)
class _Asked:
    """A pop, peek or notification."""

    group: GroupConfig
    topic: TopicConfig
    queue: int
    count: int
    is_ordered: bool
    attempt: str | None
    invisible_ms: int
    init_mode: int
    matches: Matches | None
    deadline_ms: int
    pop_ms: int = 0
    revive_queue: int = 0

    @property
    def names(self) -> tuple[str, str, int]:
        """Returns topic, group and queue."""
        return self.topic.topic_name, self.group.group_name, self.queue


@dataclass(slots=True)
class _Taken:
    """Messages of one queue."""

    topic: str
    queue: int
    start: int
    next: int
    records: list[memoryview]
    offsets: list[int]


@dataclass(slots=True)
class _Found:
    """Messages that a pop has got so far."""

    taken: list[_Taken] = field(default_factory=list)
    rest: int = 0

    @property
    def count(self) -> int:
        """Returns the number of messages."""
        return sum(len(taken.offsets) for taken in self.taken)


class PopService:
    """See the module text.

    Args:
        await_running: waits for special services. Raises Refusal.
    """

    def __init__(
        self,
        parts: Broker,
        settings: SpecialSettings,
        pops: Pops,
        await_running: Callable[[], Awaitable[None]],
    ) -> None:
        self._parts = parts
        self._await_running = await_running
        self._settings = settings
        self.pops = pops
        self._file = parts.file("consumerOrderInfo.json")
        self._order = PopOrder(self._file.read(OrderTable))
        self._polls = Polls(settings.polls_max, settings.all_polls_max)
        self._busy: set[tuple[str, str, int]] = set()
        """Queues that are being popped."""
        # Any number will do; the clock makes no simulated run differ from the next.
        self._turn = parts.now_ms() % (1 << 16)
        self._filters: dict[tuple[str, str], Subscription] = {}
        parts.store.on_run.append(self._on_run)
        parts.register(Request.POP_MESSAGE, self._pop)
        parts.register(Request.PEEK_MESSAGE, self._peek)
        parts.register(Request.NOTIFICATION, self._notification)
        parts.register(Request.POLLING_INFO, self._polling_info)
        parts.register(Request.ACK_MESSAGE, self._ack)
        parts.register(Request.BATCH_ACK_MESSAGE, self._batch_ack)
        parts.register(Request.CHANGE_MESSAGE_INVISIBLETIME, self._change)

    def persist(self) -> None:
        """Writes the file of ordered pops."""
        self._order.clean(self._parts.now_ms())
        self._file.write(self._order.table)

    def wake_all(self) -> None:
        """Has all pops that wait look again."""
        self._polls.wake_all()

    # --- requests ---------------------------------------------------------------------------

    def _asked(self, connection: Connection, command: Command) -> _Asked:
        """Returns the fields of a request. Raises Refusal."""
        parts, settings = self._parts, self._parts.settings
        now_ms = parts.now_ms()
        if not settings.permission & PERM_READ:
            raise Refusal(
                Answer.NO_PERMISSION, f"the broker[{parts.role.address}] pop message is forbidden"
            )
        count = command.number("maxMsgNums", 1)
        if count > POP_MAX:
            raise Refusal(
                Answer.INVALID_PARAMETER,
                f"the broker[{parts.role.address}] pop message's num is greater than {POP_MAX}",
            )
        if not self._parts.settings.timer_wheel:
            raise Refusal(
                Answer.SYSTEM_ERROR,
                f"the broker[{parts.role.address}] pop message is forbidden because "
                "timerWheelEnable is false",
            )
        topic = self._topic(command.needed("topic"))
        if not topic.perm & PERM_READ:
            raise Refusal(
                Answer.NO_PERMISSION,
                f"the topic[{topic.topic_name}] peeking message is forbidden",
            )
        queue = command.number("queueId", ANY_QUEUE)
        if queue >= topic.read_queue_nums:
            raise _wrong_queue(Answer.INVALID_PARAMETER, queue, topic, connection)
        name = command.needed("consumerGroup")
        group = parts.groups.find(name)
        if group is None:
            raise Refusal(
                Answer.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{name}] does not exist, {names.MORE}",
            )
        if not group.consume_enable:
            raise Refusal(Answer.NO_PERMISSION, f"subscription group no permission, {name}")
        born_ms = command.number("bornTime", 0) or now_ms
        poll_ms = max(0, min(command.number("pollTime", 0), POLL_MS_MAX))
        return _Asked(
            group, topic, max(queue, ANY_QUEUE), max(count, 1),
            command.fields.get("order") == "true", command.fields.get("attemptId"),
            max(0, min(command.number("invisibleTime", 0), INVISIBLE_MS_MAX)),
            command.number("initMode", 0), self._filter(command, topic.topic_name),
            # A client whose clock is wrong does not wait for ever.
            min(born_ms, now_ms) + poll_ms if poll_ms else 0,
        )  # fmt: skip

    def _topic(self, name: str) -> TopicConfig:
        topic = self._parts.topics.get(name)
        if topic is None:
            raise Refusal(
                Answer.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please! {names.MORE}"
            )
        return topic

    def _filter(self, command: Command, topic: str) -> Matches | None:
        expression = command.fields.get("exp") or filters.ALL
        kind = command.fields.get("expType") or filters.TAG
        found = self._filters.get((kind, expression))
        if found is None:
            found = Subscription(SubscriptionData(topic, expression, expression_type=kind))
            if len(self._filters) >= FILTERS_MAX:
                self._filters.clear()
            self._filters[kind, expression] = found
        if found.fault:
            raise Refusal(
                Answer.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed"
            )
        return found.matches

    # --- pop -------------------------------------------------------------------------------------

    async def _pop(self, connection: Connection, command: Command) -> Command | None:
        asked = self._asked(connection, command)
        while True:
            await self._await_services()
            asked.pop_ms = self._parts.now_ms()
            found = self._take(asked)
            if found.taken:
                try:
                    await self._give(asked, found)
                finally:
                    self._busy.difference_update(
                        (taken.topic, asked.group.group_name, taken.queue) for taken in found.taken
                    )
                if found.rest > 0:
                    self._polls.wake(*asked.names)
                return self._answer(asked, found, command)
            code = await self._wait(asked)
            if code is not None:
                fields = self._fields(asked, found)
                return command.answer(code, fields, remark=GetStatus.NO_MESSAGE_IN_QUEUE.name)
            if not connection.is_open:
                return None

    async def _await_services(self) -> None:
        """Until special services run, this replica does not know what another one gave out. Raises
        Refusal."""
        if not self._parts.role.runs_special_services:
            raise Refusal(Answer.SYSTEM_ERROR, PutStatus.SERVICE_NOT_AVAILABLE.name)
        await self._await_running()

    async def _wait(self, asked: _Asked) -> Answer | None:
        """Waits until there may be messages; returns the answer's code when there are none."""
        left_ms = asked.deadline_ms - self._parts.now_ms()
        if left_ms <= 0:
            return Answer.POLLING_TIMEOUT
        if self._polls.is_full(*asked.names):
            return Answer.POLLING_FULL
        if asked.is_ordered:
            # Nothing arrives when a message becomes visible again.
            free = [self._free_ms(asked, queue) for queue in self._queues(asked.topic, asked.queue)]
            now_ms = self._parts.now_ms()
            left_ms = min([left_ms, *(ms - now_ms for ms in free if ms > now_ms)])
        await self._polls.wait(*asked.names, left_ms / 1000)
        return None

    def _free_ms(self, asked: _Asked, queue: int) -> int:
        return self._order.free_ms(
            asked.topic.topic_name, asked.group.group_name, queue, attempt=asked.attempt,
            invisible_ms=asked.invisible_ms,
        )  # fmt: skip

    def _take(self, asked: _Asked) -> _Found:
        """Takes messages of queues, which are busy then."""
        found = _Found()
        self._turn += 1
        queues = self._parts.settings.revive_queues
        asked.revive_queue = ORDERED_REVIVE_QUEUE if asked.is_ordered else self._turn % queues
        if self.pops.is_full:
            return found
        for topic, queue in self._places(asked):
            if found.count < asked.count:
                self._take_from(asked, topic, queue, found)
            else:
                found.rest += self._left(topic, asked.group.group_name, queue)
        return found

    def _queues(self, topic: TopicConfig, queue: int) -> Iterator[int]:
        if queue >= 0:
            yield queue
            return
        for n in range(topic.read_queue_nums):
            yield (self._turn + n) % topic.read_queue_nums

    def _places(self, asked: _Asked) -> Iterator[tuple[str, int]]:
        """Yields the queues that a pop looks at, in turn."""
        own = [(asked.topic.topic_name, n) for n in self._queues(asked.topic, asked.queue)]
        back: list[tuple[str, int]] = []
        if not asked.is_ordered:
            for is_v2 in {False, self._settings.retry_topic_v2}:
                name = retry_topic(asked.topic.topic_name, asked.group.group_name, is_v2=is_v2)
                topic = self._parts.topics.get(name)
                if topic is not None:
                    back += [(name, n) for n in self._queues(topic, ANY_QUEUE)]
        first, then = (back, own) if self._turn % RETRY_FIRST_EACH == 0 else (own, back)
        yield from first
        yield from then

    def _take_from(self, asked: _Asked, topic: str, queue: int, found: _Found) -> None:
        group = asked.group.group_name
        place = (topic, group, queue)
        if place in self._busy:
            return
        now_ms = self._parts.now_ms()
        offset = self._offset(asked, topic, queue)
        if asked.is_ordered and self._free_ms(asked, queue) > now_ms:
            return
        got = self._get(asked, topic, queue, offset, asked.count - found.count)
        if got.status in _WRONG_OFFSET:
            offset = got.next
            self._parts.offsets.commit(group, topic, queue, offset)
            got = self._get(asked, topic, queue, offset, asked.count - found.count)
        found.rest += max(0, got.max - got.next)
        if got.records:
            self._busy.add(place)
            offsets = [Message(record).queue_offset for record in got.records]
            found.taken.append(_Taken(topic, queue, offset, got.next, got.records, offsets))
        elif got.next > offset:
            self._parts.offsets.commit(group, topic, queue, got.next)

    def _get(self, asked: _Asked, topic: str, queue: int, offset: int, count: int) -> Got:
        matches = None if topic.startswith(RETRY_PREFIX) else asked.matches
        return self._parts.store.get(topic, queue, offset, count, POP_BYTES_MAX, matches)

    def _offset(self, asked: _Asked, topic: str, queue: int) -> int:
        """Returns where a group goes on in a queue."""
        offsets, group = self._parts.offsets, asked.group.group_name
        reset = offsets.take_reset(group, topic, queue)
        if reset is not None:
            self._order.forget(topic, group, queue)
            return reset
        offset = offsets.get(group, topic, queue)
        if offset < 0:
            store = self._parts.store
            offset = store.queue_min(topic, queue)
            if asked.init_mode != INIT_AT_MIN and not topic.startswith(RETRY_PREFIX):
                offset = max(offset, store.queue_max(topic, queue) - 1)
            offsets.commit(group, topic, queue, offset)
        return offset

    def _left(self, topic: str, group: str, queue: int) -> int:
        store = self._parts.store
        offset = self._parts.offsets.get(group, topic, queue)
        return max(0, store.queue_max(topic, queue) - max(offset, store.queue_min(topic, queue)))

    async def _give(self, asked: _Asked, found: _Found) -> None:
        """Stores the checkpoint of messages that a client gets. Raises Refusal."""
        if asked.is_ordered:
            return
        role, group = self._parts.role, asked.group.group_name
        home = await self._home()
        if home is not None:
            asked.revive_queue = home
        drafts = []
        for taken in found.taken:
            point = CheckPoint(
                start=taken.start, pop_ms=asked.pop_ms, invisible_ms=asked.invisible_ms,
                queue=taken.queue, topic=taken.topic, group=group, count=len(taken.offsets),
                differences=[offset - taken.start for offset in taken.offsets], broker=role.name,
            )  # fmt: skip
            draft = self._checkpoint(point, asked.revive_queue)
            if home is not None:
                last = taken.offsets[-1]
                keyed(draft, position_key(role.name, taken.topic, group, taken.queue, last))
            drafts.append(draft)
        await self._put(drafts, home)
        for taken in found.taken:
            if not self._parts.offsets.has_reset(group, taken.topic, taken.queue):
                self._parts.offsets.commit(group, taken.topic, taken.queue, taken.next)

    def _checkpoint(self, point: CheckPoint, revive_queue: int) -> Draft:
        return self.pops.checkpoint(point, self._record_queue(revive_queue), point.pop_ms)

    def _record_queue(self, revive_queue: int) -> int:
        """Returns the queue of the revive topic that a record names."""
        return revive_queue % self._parts.settings.revive_queues

    async def _home(self) -> int | None:
        """Returns the number of the broker that stores records of pops now, None: this one. Raises
        Refusal."""
        if self._parts.role.is_master:
            return None
        home = await self._parts.escape.home(TIMER_TOPIC)
        if home is None:
            raise Refusal(Answer.SYSTEM_ERROR, PutStatus.PUT_TO_REMOTE_BROKER_FAIL.name)
        return home

    async def _put(self, drafts: list[Draft], home: int | None) -> None:
        """Stores records of pop, here or at the broker of a number. Raises Refusal."""
        if home is None:
            _check_stored(await self._parts.put(drafts))
            return
        for draft in drafts:
            _check_stored([await self._parts.escape.put_at(draft, home)])

    def _answer(self, asked: _Asked, found: _Found, command: Command) -> Command:
        counts = []
        for taken in found.taken:
            self._parts.stats.pulled(
                asked.group.group_name, taken.topic, len(taken.records),
                sum(map(len, taken.records)),
            )  # fmt: skip
            if asked.is_ordered:
                given = self._order.popped(
                    taken.topic, asked.group.group_name, taken.queue, taken.offsets,
                    pop_ms=asked.pop_ms, invisible_ms=asked.invisible_ms, attempt=asked.attempt,
                )  # fmt: skip
                counts.append(counts_info(taken.topic, taken.queue, given))
                self._parts.offsets.commit(
                    asked.group.group_name, taken.topic, taken.queue, taken.start
                )
        fields = self._fields(asked, found)
        if asked.is_ordered:
            fields["orderCountInfo"] = ";".join(counts)
        answer = command.answer(fields=fields, remark=GetStatus.FOUND.name)
        answer.slices = [record for taken in found.taken for record in self._records(asked, taken)]
        return answer

    def _fields(self, asked: _Asked, found: _Found) -> dict[str, str]:
        return {
            "popTime": str(asked.pop_ms),
            "invisibleTime": str(asked.invisible_ms),
            "reviveQid": str(asked.revive_queue),
            "restNum": str(found.rest),
            "startOffsetInfo": ";".join(
                start_info(taken.topic, taken.queue, taken.start) for taken in found.taken
            ),
            "msgOffsetInfo": ";".join(
                offsets_info(taken.topic, taken.queue, taken.offsets) for taken in found.taken
            ),
        }

    def _records(self, asked: _Asked, taken: _Taken) -> list[memoryview]:
        """Returns the records for the client: returned messages have the original topic."""
        if not taken.topic.startswith(RETRY_PREFIX):
            return taken.records
        found = []
        for record in taken.records:
            message = Message(record)
            receipt = Receipt(
                taken.start, asked.pop_ms, asked.invisible_ms, asked.revive_queue,
                retry_flag(taken.topic), self._parts.role.name, taken.queue, message.queue_offset,
            )  # fmt: skip
            properties = {**message.properties, POP_CHECKPOINT: str(receipt)}
            found.append(
                memoryview(rewritten(message, asked.topic.topic_name, message.queue_id, properties))
            )
        return found

    # --- peek, notification ----------------------------------------------------------------------

    def _peek(self, connection: Connection, command: Command) -> Command:
        asked = self._asked(connection, command)
        asked.pop_ms = self._parts.now_ms()
        group, found = asked.group.group_name, _Found()
        for topic, queue in self._places(asked):
            if found.count >= asked.count:
                break
            low = self._parts.store.queue_min(topic, queue)
            offset = max(self._parts.offsets.get(group, topic, queue), low)
            got = self._get(asked, topic, queue, offset, asked.count - found.count)
            found.rest += max(0, got.max - got.next)
            if got.records:
                offsets = [Message(record).queue_offset for record in got.records]
                found.taken.append(_Taken(topic, queue, offset, got.next, got.records, offsets))
        status = GetStatus.FOUND if found.taken else GetStatus.NO_MESSAGE_IN_QUEUE
        answer = command.answer(
            Answer.SUCCESS if found.taken else Answer.PULL_NOT_FOUND, self._fields(asked, found),
            remark=status.name,
        )  # fmt: skip
        answer.slices = [record for taken in found.taken for record in taken.records]
        return answer

    async def _notification(self, connection: Connection, command: Command) -> Command | None:
        asked = self._asked(connection, command)
        while True:
            now_ms = self._parts.now_ms()
            has = any(
                self._left(topic, asked.group.group_name, queue) > 0
                for topic, queue in self._places(asked)
                if not asked.is_ordered or self._free_ms(asked, queue) <= now_ms
            )
            code = None if has else await self._wait(asked)
            if has or code is not None:
                fields = {
                    "hasMsg": str(has).lower(),
                    "pollingFull": str(code is Answer.POLLING_FULL).lower(),
                }
                return command.answer(fields=fields)
            if not connection.is_open:
                return None

    def _polling_info(self, _connection: Connection, command: Command) -> Command:
        topic = self._topic(command.needed("topic"))
        group, queue = command.needed("consumerGroup"), command.number("queueId", ANY_QUEUE)
        count = self._polls.counted(topic.topic_name, group, queue)
        return command.answer(fields={"pollingNum": str(count)})

    def _on_run(self, run: Run) -> None:
        if not self._polls.count:
            return
        for group in self._polls.groups(run.topic):
            self._polls.wake(run.topic, group, run.queue_id)
        if run.topic.startswith(RETRY_PREFIX):
            self._wake_retries(run.topic)

    def _wake_retries(self, topic: str) -> None:
        # A group's name may have what separates it from the topic's: all are tried.
        rest = topic.removeprefix(RETRY_PREFIX)
        for at, mark in enumerate(rest):
            if mark in "+_":
                self._polls.wake_any(rest[at + 1 :], rest[:at])

    # --- acknowledgements ------------------------------------------------------------------------

    def _place(self, connection: Connection, command: Command) -> tuple[TopicConfig, int]:
        """Returns topic and queue of an acknowledgement. Raises Refusal."""
        topic = self._topic(command.needed("topic"))
        queue = command.number("queueId")
        if not 0 <= queue < topic.read_queue_nums:
            raise _wrong_queue(Answer.MESSAGE_ILLEGAL, queue, topic, connection)
        return topic, queue

    async def _ack(self, connection: Connection, command: Command) -> Command:
        topic, queue = self._place(connection, command)
        receipt = Receipt.parse(command.needed("extraInfo"))
        group, offset = command.needed("consumerGroup"), command.number("offset")
        self._check_offset(topic.topic_name, queue, offset)
        if receipt.revive_queue == ORDERED_REVIVE_QUEUE:
            self._ack_ordered(topic.topic_name, group, queue, offset, receipt.pop_ms)
            return command.answer()
        ack = Ack(
            start=receipt.start, group=group, topic=topic.topic_name, queue=queue,
            pop_ms=receipt.pop_ms, offset=offset, broker=receipt.broker,
        )  # fmt: skip
        await self._store_ack(ack, receipt.revive_queue, receipt.pop_ms + receipt.invisible_ms)
        return command.answer()

    def _check_offset(self, topic: str, queue: int, offset: int) -> None:
        store = self._parts.store
        low, high = store.queue_min(topic, queue), store.queue_max(topic, queue)
        if not low <= offset <= high:
            raise Refusal(
                Answer.NO_MESSAGE,
                f"offset is illegal, key:{topic}@{queue}, commit:{offset}, store:{low}~{high}",
            )

    async def _store_ack(
        self, ack: Ack, revive_queue: int, revive_ms: int, successor: CheckPoint | None = None
    ) -> int:
        """Stores an acknowledgement; with `successor` the checkpoint that comes in the place of the
        message's, both at once. Nothing is stored of a message that was acknowledged. Returns the
        number of the successor's revive queue. Raises Refusal."""
        await self._await_services()
        now_ms = self._parts.now_ms() if successor is None else successor.pop_ms
        try:
            draft = self.pops.ack(ack, self._record_queue(revive_queue), revive_ms, now_ms)
        except TooLate:
            raise Refusal(
                Answer.NO_MESSAGE, "the message is visible again: its invisible time is over"
            ) from None
        if draft is None:
            return revive_queue
        self.pops.hold(ack)
        try:
            home = revive_queue if revive_queue >= HOME_MIN else None
            if home is None and not self._parts.role.is_master:
                return await self._let_escape(ack, revive_queue, revive_ms, successor)
            drafts = [draft]
            if successor is not None:
                drafts.insert(0, self._checkpoint(successor, revive_queue))
            await self._put(drafts, home)
            return revive_queue
        finally:
            self.pops.release(ack)

    async def _let_escape(
        self, ack: Ack, revive_queue: int, revive_ms: int, successor: CheckPoint | None
    ) -> int:
        """Stores an acknowledgement of a checkpoint that is in the log of this acting slave. Other
        replicas learn by their keys that the messages are done. As `_store_ack`."""
        pops = self.pops
        keys = pops.keys_of(ack)
        if not keys:
            raise Refusal(Answer.SYSTEM_ERROR, "the checkpoint is not in the log of this replica")
        if successor is not None:
            home = await self._home()
            revive_queue = revive_queue if home is None else home
            await self._put([self._checkpoint(successor, revive_queue)], home)
        for key, each in keys:
            queue = self._record_queue(revive_queue)
            draft = pops.ack_record(each, queue, revive_ms, self._parts.now_ms())
            _check_stored([await self._parts.escape.put(keyed(draft, key))])
            pops.on_key(key)
        return revive_queue

    def _ack_ordered(self, topic: str, group: str, queue: int, offset: int, pop_ms: int) -> None:
        """Raises Refusal."""
        offsets = self._parts.offsets
        if offset < offsets.get(group, topic, queue):
            return
        try:
            following = self._order.ack(topic, group, queue, offset, pop_ms)
        except ValueError:
            raise Refusal(
                Answer.MESSAGE_ILLEGAL,
                f"offset is illegal, key:{topic}@{group}@{queue}, commit:{offset}",
            ) from None
        if following is None:
            return
        if not offsets.has_reset(group, topic, queue):
            offsets.commit(group, topic, queue, following)
        free_ms = self._order.free_ms(topic, group, queue, attempt=None, invisible_ms=0)
        if free_ms <= self._parts.now_ms():
            self._polls.wake(topic, group, queue)

    async def _batch_ack(self, _connection: Connection, command: Command) -> Command:
        body = json.loads(command.body, BatchAckBody)
        for batch in body.acks:
            topic = real_topic(batch.topic, batch.group, batch.retry)
            store = self._parts.store
            low, high = store.queue_min(topic, batch.queue), store.queue_max(topic, batch.queue)
            offsets = [offset for offset in batch.offsets if low <= offset <= high]
            if batch.revive_queue == ORDERED_REVIVE_QUEUE:
                for offset in offsets:
                    self._ack_ordered(topic, batch.group, batch.queue, offset, batch.pop_ms)
            elif offsets:
                ack = Ack(
                    start=batch.start, group=batch.group, topic=topic, queue=batch.queue,
                    pop_ms=batch.pop_ms, broker=body.broker_name, offsets=offsets,
                )  # fmt: skip
                await self._store_ack(ack, batch.revive_queue, batch.pop_ms + batch.invisible_ms)
        return command.answer()

    async def _change(self, connection: Connection, command: Command) -> Command:
        topic, queue = self._place(connection, command)
        receipt = Receipt.parse(command.needed("extraInfo"))
        group, offset = command.needed("consumerGroup"), command.number("offset")
        invisible_ms = max(0, min(command.number("invisibleTime"), INVISIBLE_MS_MAX))
        self._check_offset(topic.topic_name, queue, offset)
        # Never the name of the checkpoint in whose place it comes.
        now_ms = max(self._parts.now_ms(), receipt.pop_ms + 1)
        fields = {"reviveQid": str(receipt.revive_queue)}
        if receipt.revive_queue == ORDERED_REVIVE_QUEUE:
            if offset >= self._parts.offsets.get(group, topic.topic_name, queue):
                self._order.show_at(
                    topic.topic_name, group, queue, offset, receipt.pop_ms, now_ms + invisible_ms
                )
            fields["popTime"] = str(receipt.pop_ms)
            fields["invisibleTime"] = str(now_ms + invisible_ms - receipt.pop_ms)
            return command.answer(fields=fields)
        point = CheckPoint(
            start=offset, pop_ms=now_ms, invisible_ms=invisible_ms, queue=queue,
            topic=topic.topic_name, group=group, count=1, differences=[0], broker=receipt.broker,
        )  # fmt: skip
        ack = Ack(
            start=receipt.start, group=group, topic=topic.topic_name, queue=queue,
            pop_ms=receipt.pop_ms, offset=offset, broker=receipt.broker,
        )  # fmt: skip
        revive_ms = receipt.pop_ms + receipt.invisible_ms
        revive_queue = await self._store_ack(ack, receipt.revive_queue, revive_ms, point)
        fields = {"reviveQid": str(revive_queue), "popTime": str(now_ms),
                  "invisibleTime": str(invisible_ms)}  # fmt: skip
        return command.answer(fields=fields)


def _check_stored(placed: Iterable[Placed]) -> None:
    """Raises Refusal for a record that is not stored."""
    for one in placed:
        if one.status not in STORED:
            raise Refusal(Answer.SYSTEM_ERROR, one.status.name)


def _wrong_queue(code: Answer, queue: int, topic: TopicConfig, connection: Connection) -> Refusal:
    return Refusal(
        code,
        f"queueId[{queue}] is illegal, topic:[{topic.topic_name}] "
        f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[{connection.name}]",
    )
