"""Special services of a broker: puts due messages, asks producers, keeps the files.

| file of `config` | holds |
|---|---|
| `delayOffset.json` | offsets of delay levels |
| `timercheck` | the checkpoint of timers, and the position in the log (`state.py`) |
| `consumerOrderInfo.json` | ordered pops |
| `consumerOffset.json` | offsets of half messages, ends, and of the log of pop, among consumers' |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from convoymq.model.errors import StorageFault, SyntaxFault, Unavailable
from convoymq.rocketmq.acting.escape import KEY_PROPERTY, POSITION_MARK, Key, positions_of
from convoymq.rocketmq.acting.metadata import DelayOffsets
from convoymq.rocketmq.broker.names import (
    HALF_TOPIC,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANSACTION_GROUP,
)
from convoymq.rocketmq.broker.types import STORED
from convoymq.rocketmq.broker.values import next_version
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal, request
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import DataVersion
from convoymq.rocketmq.special.levels import DelayLevels
from convoymq.rocketmq.special.log_view import StoreLog
from convoymq.rocketmq.special.names import (
    FIRST_POP_TIME,
    REAL_QUEUE,
    REAL_TOPIC,
    REVIVE_GROUP,
    REVIVE_TOPIC_PREFIX,
    TIMER_DEQUEUED_MS,
    TIMER_ENQUEUED_MS,
    UNIQUE_KEY,
    changed,
    keyed,
    whole,
)
from convoymq.rocketmq.special.outbox import Batch
from convoymq.rocketmq.special.pop import Pops
from convoymq.rocketmq.special.pop_service import PopService
from convoymq.rocketmq.special.prepare import Preparation
from convoymq.rocketmq.special.recall import Recalls
from convoymq.rocketmq.special.rewriting import rewritten
from convoymq.rocketmq.special.settings import SpecialSettings
from convoymq.rocketmq.special.state import Part, Saved, SpecialState
from convoymq.rocketmq.special.transactions import (
    RESERVED_MS,
    Check,
    End,
    Refused,
    Transactions,
)
from convoymq.rocketmq.special.wheel import Checkpoint, TimerWheel
from convoymq.rocketmq.store.settings import StoreSettings, parse_delays
from convoymq.rocketmq.store.types import Draft, Placed, PutStatus, Run, decode_properties

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

log = structlog.get_logger()

TICK_S = 0.1
END_WAIT_S = 2.0
"""Less than clients wait for an answer."""
NEVER = frozenset((PutStatus.MESSAGE_ILLEGAL, PutStatus.PROPERTIES_SIZE_EXCEEDED))
"""Trying again would not help."""
_OURS = (KEY_PROPERTY, TIMER_ENQUEUED_MS, TIMER_DEQUEUED_MS, FIRST_POP_TIME)
"""Properties that a message can do without."""
_SYSTEM = frozenset((SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, OP_TOPIC))


class SpecialServices:
    """See the module text.

    Args:
        parts: a broker whose store is open.
    """

    name = "special"

    def __init__(
        self, parts: Broker, settings: SpecialSettings, store_settings: StoreSettings
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._in_flight = 0
        self._go_on = asyncio.Event()
        self._ending: dict[int, asyncio.Future[None]] = {}
        """Half messages whose end is being stored."""
        self._offsets_file = parts.file("delayOffset.json")
        self._checkpoint_file = parts.file("timercheck")
        self._version = DataVersion()
        self._delays_ms = parse_delays(store_settings.delay_levels)
        self.state = self._new_state()
        self._saved = self._load()
        self.state.open(self._saved)
        self._take_positions()
        Recalls(parts, settings)
        self.pop = PopService(parts, settings, self.state.pops, self._await_running)
        parts.store.on_run.append(self._on_run)
        parts.store.on_truncated.append(self._on_truncated)
        half_refusal = f"the broker[{parts.role.address}] sending transaction message is forbidden"
        parts.before_put.append(
            Preparation(
                len(self._delays_ms),
                parts.now_ms,
                may_time=parts.settings.timer_wheel,
                delay_max_s=settings.timer_delay_max_s,
                is_full=self._is_full,
                half_refusal=half_refusal if parts.settings.reject_transactions else "",
            )
        )
        parts.register(Request.END_TRANSACTION, self._end_transaction)
        parts.register(Request.GET_ALL_DELAY_OFFSET, self._delay_offsets)
        parts.register(Request.GET_TIMER_CHECK_POINT, self._timer_checkpoint)
        parts.register(Request.GET_TIMER_METRICS, self._timer_metrics)

    def _new_state(self) -> SpecialState:
        view, name = StoreLog(self._parts.store), self._parts.role.name
        return SpecialState(
            view,
            DelayLevels(name, self._delays_ms, view.read),
            TimerWheel(name, view.read),
            Transactions(
                name, view.read,
                immunity_ms=self._settings.transaction_immunity_ms,
                interval_ms=self._settings.transaction_interval_ms,
                checks_max=self._settings.transaction_checks_max,
            ),
            Pops(name, self._parts.role.cluster, is_v2=self._settings.retry_topic_v2),
        )  # fmt: skip

    def _is_full(self, topic: str) -> bool:
        part = self.state.wheel if topic == TIMER_TOPIC else self.state.transactions
        return part.is_full

    def _on_truncated(self) -> None:
        """The log has lost its end: the state that followed from it is made anew."""
        is_running = self.state.is_running
        self.state = self._new_state()
        self.pop.pops = self.state.pops
        self.state.open(self._saved)
        if is_running:
            self.start()

    # --- files -----------------------------------------------------------------------------------

    def _load(self) -> Saved:
        """Raises StorageFault."""
        offsets = self._offsets_file.read(DelayOffsets) or DelayOffsets()
        self._version = offsets.data_version
        checkpoint = Checkpoint()
        try:
            content = self._checkpoint_file.read_bytes()
            if content:
                checkpoint = Checkpoint.decode(content)
                if len(content) != len(checkpoint.encode()):
                    # RocketMQ's, whose position is not in this log, which has no keys.
                    checkpoint.physical = self._parts.store.dispatched
        except (OSError, ValueError) as error:
            # Without it, more of the log is read.
            log.warning("rocketmq.timer_checkpoint_unreadable", reason=str(error))
        get = self._parts.offsets.get
        revive = self.state.pops.revive_topic
        queues = range(self._parts.settings.revive_queues)
        return Saved(
            checkpoint,
            offsets.offset_table,
            *self._transaction_offsets(),
            # RocketMQ's offset is that of the last one that was revived.
            {queue: get(REVIVE_GROUP, revive, queue) + 1 for queue in queues},
        )

    def _transaction_offsets(self) -> tuple[int, int]:
        get = self._parts.offsets.get
        half, ends = (get(TRANSACTION_GROUP, topic, 0) for topic in (HALF_TOPIC, OP_TOPIC))
        return max(0, half), max(0, ends)

    def _take_positions(self) -> None:
        for (topic, group, queue), offset in self.state.pops.take_positions().items():
            if offset > self._parts.offsets.get(group, topic, queue):
                self._parts.offsets.commit(group, topic, queue, offset, is_logged=True)

    def saved(self) -> Saved:
        """Returns the state to save, which other replicas get as well."""
        parts = self._parts
        saved = self.state.saved(parts.now_ms())
        self._take_positions()
        for topic, offset in ((HALF_TOPIC, saved.half), (OP_TOPIC, saved.ends)):
            if offset > parts.offsets.get(TRANSACTION_GROUP, topic, 0):
                parts.offsets.commit(TRANSACTION_GROUP, topic, 0, offset)
        for queue, offset in saved.revived.items():
            if offset - 1 > parts.offsets.get(REVIVE_GROUP, self.state.pops.revive_topic, queue):
                parts.offsets.commit(REVIVE_GROUP, self.state.pops.revive_topic, queue, offset - 1)
        if dict(saved.levels) != dict(self._saved.levels):
            self._version = next_version(self._version, parts.now_ms())
        self._saved = saved
        return saved

    def persist(self) -> None:
        """Writes the files; offsets of consumers are written before the checkpoint."""
        saved = self.saved()
        try:
            self._parts.offsets.persist()
            self._offsets_file.write(DelayOffsets(dict(saved.levels), self._version))
            self.pop.persist()
            self._checkpoint_file.write_bytes(saved.checkpoint.encode())
        except (StorageFault, OSError) as error:
            # The log is read from the last checkpoint that was written.
            log.error("rocketmq.not_persisted", reason=str(error))

    # --- the log ---------------------------------------------------------------------------------

    def _on_run(self, run: Run) -> None:
        if run.topic in _SYSTEM or run.topic.startswith(REVIVE_TOPIC_PREFIX):
            for message in self._parts.store.messages(run):
                self.state.on_record(message)

    # --- running ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to give out due messages."""
        # They may have come from another replica.
        self.state.transactions.restore(*self._transaction_offsets())
        self.state.start(is_acting=self._parts.role.is_acting)
        self._take_positions()
        log.info("rocketmq.special_services", running=True, acting=self._parts.role.is_acting)

    async def stop(self) -> None:
        """Ends when nothing is being put any more, and persists."""
        self.state.is_running = False
        while self._in_flight:
            await asyncio.sleep(TICK_S / 10)
        self.state.stop()
        self.pop.wake_all()
        self.persist()
        log.info("rocketmq.special_services", running=False, acting=False)

    async def run(self) -> None:
        """Works as long as the broker runs, on slaves too: they follow the log."""
        while True:
            # More may be due when a batch has ended.
            self._go_on.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._go_on.wait()
            batches, checks = self.state.tick(self._parts.now_ms())
            for part, batch in batches:
                self._in_flight += 1
                self._parts.tasks.spawn(self._put_batch(part, batch))
            for check in checks:
                self._check(check)
            self._take_positions()

    async def _put_batch(self, part: Part, batch: Batch) -> None:
        count = 0
        try:
            if self._parts.role.is_master:
                count = await self._put_here(part, batch)
            else:
                for key in batch.keys:
                    if not await self._put(part, key):
                        break
                    count += 1
        finally:
            self._in_flight -= 1
            self.state.settle(part, batch, count, self._parts.now_ms())
            if count == len(batch.keys):
                self._go_on.set()

    async def _put_here(self, part: Part, batch: Batch) -> int:
        """Appends a batch to the own log at once; returns how many of its first ones are done."""
        drafts: dict[Key, Draft] = {}
        count = len(batch.keys)
        for n, key in enumerate(batch.keys):
            try:
                draft = await self._draft(part, key)
            except Unavailable as error:
                log.info("rocketmq.special_message_waits", key=str(key), reason=error.text)
                count = n
                break
            if draft is not None:
                drafts[key] = draft
        try:
            placed = await self._parts.put(list(drafts.values())) if drafts else []
        except Refusal:
            # One of them, which is told apart.
            placed = [Placed(PutStatus.PROPERTIES_SIZE_EXCEEDED)] * len(drafts)
        for key, found in zip(drafts, placed, strict=True):
            if found.status in NEVER:
                is_done = await self._put(part, key)
            else:
                is_done = self._is_done(key, found)
            if is_done:
                part.on_key(key)
            else:
                count = min(count, batch.keys.index(key))
        return count

    async def _put(self, part: Part, key: Key) -> bool:
        """Puts a message; returns whether it is dealt with."""
        try:
            draft = await self._draft(part, key)
            if draft is None:
                return True
            put = self._parts.escape.put
            placed = await put(draft)
            if placed.status is PutStatus.PROPERTIES_SIZE_EXCEEDED:
                # Rather twice after a crash than never.
                placed = await put(changed(draft, _OURS, {}, decode_properties(draft.properties)))
        except Refusal as refusal:
            log.warning("rocketmq.special_message_refused", key=str(key), reason=refusal.text)
            return True
        except Unavailable as error:
            log.info("rocketmq.special_message_waits", key=str(key), reason=error.text)
            return False
        if placed.status in NEVER:
            log.warning("rocketmq.special_message_refused", key=str(key), reason=placed.status.name)
            return True
        return self._is_done(key, placed)

    @staticmethod
    def _is_done(key: Key, placed: Placed) -> bool:
        if placed.status in STORED:
            return True
        log.info("rocketmq.special_message_waits", key=str(key), reason=placed.status.name)
        return False

    async def _draft(self, part: Part, key: Key) -> Draft | None:
        """Returns the message to put for a key, if any. Raises Unavailable."""
        if not isinstance(part, Pops):
            found = part.draft(key, self._parts.now_ms())
            return None if found is None else keyed(found, key)
        wanted = part.wanted(key)
        if wanted is None:
            return None
        point, offset = wanted
        own = self._parts.role.name
        broker = point.broker or own
        message = await self._parts.escape.get(point.topic, point.queue, offset, broker)
        if message is None:
            # Another broker may only be silent.
            if broker != own and self._parts.now_ms() - point.revive_ms < RESERVED_MS:
                raise Unavailable(f"broker {broker} does not show its message")
            return None
        draft = part.draft(point, message)
        self._parts.topics.create_for_retry(draft.topic, 1)
        return keyed(draft, key)

    # --- transactions ----------------------------------------------------------------------------

    def _check(self, check: Check) -> None:
        """Asks a producer about a half message; without one, it is not asked."""
        client = self._parts.clients.any_producer(check.group)
        message = self._parts.store.message_at(check.physical)
        if client is None or message is None or not isinstance(client.channel, Connection):
            return
        properties = message.properties
        topic = properties.get(REAL_TOPIC, "")
        unique = properties.get(UNIQUE_KEY, "")
        fields = {
            "topic": topic,
            "tranStateTableOffset": str(check.offset),
            "commitLogOffset": str(check.physical),
            "msgId": unique,
            "transactionId": unique,
            "offsetMsgId": message.message_id,
            "bname": self._parts.role.name,
        }
        body = rewritten(message, topic, whole(properties.get(REAL_QUEUE), 0), properties)
        client.channel.send(request(Request.CHECK_TRANSACTION_STATE, fields, body, one_way=True))
        self.state.transactions.checked(check.offset)

    async def _end_transaction(self, _connection: Connection, command: Command) -> Command:
        parts = self._parts
        if not parts.role.runs_special_services:
            raise Refusal(
                Answer.SLAVE_NOT_AVAILABLE, "Message store is slave mode, so end transaction is "
                "forbidden. ",
            )  # fmt: skip
        await self._await_running()
        number = command.number("commitOrRollback")
        if not number:
            # A producer that does not know yet: it is asked later.
            return command.answer()
        if number not in (End.COMMIT, End.ROLLBACK):
            raise Refusal(Answer.SYSTEM_ERROR, f"no end of a transaction: {number}")
        offset = command.number("tranStateTableOffset")
        while (other := self._ending.get(offset)) is not None:
            await other
        try:
            drafts = self.state.transactions.end(
                parts.store.message_at(command.number("commitLogOffset")),
                end=End(number),
                group=command.needed("producerGroup"),
                offset=offset,
                is_checked=command.fields.get("fromTransactionCheck") == "true",
                now_ms=parts.now_ms(),
            )
        except Refused as refused:
            code = Answer.ILLEGAL_OPERATION if refused.is_late else Answer.SYSTEM_ERROR
            return command.answer(code, remark=refused.text)
        if drafts:
            self._ending[offset] = done = asyncio.get_running_loop().create_future()
            try:
                await self._store_end(offset, drafts)
            finally:
                del self._ending[offset]
                done.set_result(None)
        return command.answer()

    async def _await_running(self) -> None:
        """Waits for special services: until they run, nobody here knows which half messages have
        left, and which messages were given out elsewhere. Raises Refusal: clients try again."""
        if self.state.is_running:
            return
        try:
            async with asyncio.timeout(END_WAIT_S):
                while not self.state.is_running:
                    await asyncio.sleep(TICK_S / 10)
        except TimeoutError:
            raise Refusal(Answer.SYSTEM_BUSY, "special services do not run yet") from None

    async def _store_end(self, offset: int, drafts: list[Draft]) -> None:
        """Stores an end. Raises Refusal."""
        parts = self._parts
        placed: list[Placed] = []
        if parts.role.is_master:
            placed = await parts.put(drafts)
        elif len(drafts) > 1:
            # What a slave knows of an end is the key at the other broker, or in memory: a half
            # message that was rolled back is asked about once more after a crash.
            placed = [await parts.escape.put(drafts[0])]
        for found in placed:
            if found.status not in STORED:
                raise Refusal(Answer.SYSTEM_ERROR, found.status.name)
        self.state.on_key(Key(parts.role.name, HALF_TOPIC, 0, offset))

    # --- requests of other replicas ----------------------------------------------------------

    def _delay_offsets(self, _connection: Connection, command: Command) -> Command:
        self.saved()
        body = DelayOffsets(self.state.levels.offsets, self._version)
        return command.answer(body=json.dumps(body))

    def _timer_checkpoint(self, _connection: Connection, command: Command) -> Command:
        return command.answer(body=self.saved().checkpoint.encode())

    def _timer_metrics(self, _connection: Connection, command: Command) -> Command:
        body = {"dataVersion": self._version, "timingCount": {}}
        return command.answer(body=json.dumps(body))

    def follow(self, levels: dict[int, int], check_point: bytes) -> None:
        """Takes over later positions of another replica (answers 45 and 60). Raises SyntaxFault."""
        try:
            found = Checkpoint.decode(check_point)
        except ValueError as error:
            raise SyntaxFault(str(error)) from None
        self.state.take_over(Saved(found, levels, *self._transaction_offsets()))

    def pass_over(self, keys: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Passes over records that have left: `topic:queue` -> ranges of offsets."""
        for topic, group, queue, offset in positions_of(keys):
            end = self._parts.store.queue_max(topic, queue)
            self._parts.offsets.learn_given(group, topic, queue, offset, end)
        left = {source: ranges for source, ranges in keys.items() if POSITION_MARK not in source}
        self.state.on_left(self._parts.role.name, left)
