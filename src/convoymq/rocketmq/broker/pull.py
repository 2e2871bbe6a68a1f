"""Pulls (11, 361), and the pulls that wait for messages.

A pull that finds nothing is held until a message of its queue arrives that its filter may want, or
its time is over. All messages that arrive in one turn of the event loop wake a pull once. Pulls of
one queue are answered in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq import filters
from convoymq.rocketmq.broker import names
from convoymq.rocketmq.broker.clients import Consumers, Subscription
from convoymq.rocketmq.broker.names import RETRY_PREFIX
from convoymq.rocketmq.broker.settings import BrokerSettings
from convoymq.rocketmq.broker.values import BROADCASTING, GroupConfig, SubscriptionData
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import MASTER_ID, PERM_READ, TopicConfig
from convoymq.rocketmq.store.types import GetStatus, Got, Matches, Run

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

log = structlog.get_logger()

COMMIT = 1
SUSPEND = 2
SUBSCRIPTION = 4

HELD_MAX = 100_000
"""Of pulls that wait; one more is answered as if it had waited."""
SWEEP_S = 0.5
SUSPEND_MS_MAX = 3_600_000
_FILTERS_MAX = 4096

BROKER_FORBIDDEN, GROUP_FORBIDDEN, TOPIC_FORBIDDEN = "1", "2", "3"
BROADCASTING_FORBIDDEN, SUBSCRIPTION_FORBIDDEN = "4", "5"

_CODES = {
    GetStatus.FOUND: Answer.SUCCESS,
    GetStatus.NO_MATCHED_MESSAGE: Answer.PULL_RETRY_IMMEDIATELY,
    GetStatus.MESSAGE_WAS_REMOVING: Answer.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_FOUND_NULL: Answer.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: Answer.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: Answer.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: Answer.PULL_OFFSET_MOVED,
}


@dataclass(slots=True)
class Pull:
    """One pull."""

    connection: Connection
    command: Command
    group: GroupConfig
    topic: str
    queue: int
    offset: int
    count: int
    bytes_max: int
    matches: Matches | None
    deadline_ms: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """Returns the queue."""
        return self.topic, self.queue


class Puller:
    """See the module text."""

    def __init__(self, parts: Broker) -> None:
        self._parts = parts
        self._held: dict[tuple[str, int], list[Pull]] = {}
        self._held_count = 0
        self._arrived: set[tuple[str, int]] = set()
        self._loop = asyncio.get_running_loop()
        self._expressions: dict[tuple[str, str], Matches | None] = {}
        self.guards: list[Callable[[Connection, str, str, int], None]] = []
        """Called with the group, topic and queue of a pull; they raise Refusal."""
        parts.register(Request.PULL_MESSAGE, self._pull)
        parts.register(Request.LITE_PULL_MESSAGE, self._pull)
        parts.store.on_run.append(self._on_run)

    @property
    def _settings(self) -> BrokerSettings:
        return self._parts.settings

    @property
    def held(self) -> int:
        """Returns the number of pulls that wait."""
        return self._held_count

    # --- checks --------------------------------------------------------------------------

    def _pull(self, connection: Connection, command: Command) -> Command | None:
        settings, role = self._settings, self._parts.role
        if role.id != MASTER_ID and not settings.slave_reads:
            raise Refusal(
                Answer.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while"
            )
        if not settings.permission & PERM_READ:
            raise _forbidden(
                BROKER_FORBIDDEN, f"the broker[{role.address}] pulling message is forbidden"
            )
        if command.code == Request.LITE_PULL_MESSAGE and not settings.lite_pull:
            raise _forbidden(
                BROKER_FORBIDDEN,
                f"the broker[{role.address}] for lite pull consumer is forbidden",
            )
        name, topic_name = command.needed("consumerGroup"), command.needed("topic")
        group = self._group(name)
        topic = self._topic(topic_name)
        queue = command.number("queueId")
        if not 0 <= queue < topic.read_queue_nums:
            raise Refusal(
                Answer.INVALID_PARAMETER,
                f"queueId[{queue}] is illegal, topic:[{topic_name}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[{connection.name}]",
            )
        for guard in self.guards:
            guard(connection, name, topic_name, queue)
        flags = command.number("sysFlag")
        matches = self._filter(command, group, topic_name, flags)
        pull = Pull(
            connection, command, group, topic_name, queue, command.number("queueOffset"),
            max(1, min(command.number("maxMsgNums"), settings.pull_count_max)),
            min(command.number("maxMsgBytes", settings.pull_bytes_max), settings.pull_bytes_max),
            matches,
        )  # fmt: skip
        answer, code = self._look(pull, topic)
        if flags & COMMIT and (offset := command.number("commitOffset", -1)) >= 0:
            self._parts.offsets.commit(name, topic_name, queue, offset)
        if code is Answer.PULL_NOT_FOUND and flags & SUSPEND and self._hold(pull):
            return None
        return answer

    def _group(self, name: str) -> GroupConfig:
        group = self._parts.groups.find(name)
        if group is None:
            raise Refusal(
                Answer.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{name}] does not exist, {names.MORE}",
            )
        if not group.consume_enable:
            raise _forbidden(GROUP_FORBIDDEN, f"subscription group no permission, {name}")
        return group

    def _topic(self, name: str) -> TopicConfig:
        topic = self._parts.topics.get(name)
        if topic is None:
            raise Refusal(
                Answer.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please! {names.MORE}"
            )
        if not topic.perm & PERM_READ:
            raise _forbidden(TOPIC_FORBIDDEN, f"the topic[{name}] pulling message is forbidden")
        return topic

    def _filter(
        self, command: Command, group: GroupConfig, topic: str, flags: int
    ) -> Matches | None:
        if flags & SUBSCRIPTION:
            kind = command.fields.get("expressionType") or filters.TAG
            matches = self._of_expression(kind, command.fields.get("subscription") or filters.ALL)
        else:
            found = self._subscription(command, group, topic)
            kind = found.data.expression_type or filters.TAG
            matches = found.matches
        if not filters.is_tags(kind) and not self._settings.property_filter:
            raise Refusal(
                Answer.SYSTEM_ERROR,
                f"The broker does not support consumer to filter message by {kind}",
            )
        if topic.startswith(RETRY_PREFIX) and not self._settings.filter_retries:
            return None
        return matches

    def _of_expression(self, kind: str, expression: str) -> Matches | None:
        """Returns the filter of a pull that has its own expression."""
        key = (kind, expression)
        if key not in self._expressions:
            found = Subscription(SubscriptionData("", expression, expression_type=kind))
            if found.fault:
                raise Refusal(
                    Answer.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed"
                )
            if len(self._expressions) >= _FILTERS_MAX:
                self._expressions.clear()
            self._expressions[key] = found.matches
        return self._expressions[key]

    def _subscription(self, command: Command, group: GroupConfig, topic: str) -> Subscription:
        """Returns what the group's heartbeats say that it wants."""
        consumers: Consumers | None = self._parts.clients.consumers.get(group.group_name)
        if consumers is None:
            raise Refusal(
                Answer.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist{names.MORE}"
            )
        if not group.consume_broadcast_enable and consumers.model == BROADCASTING:
            raise _forbidden(
                BROADCASTING_FORBIDDEN,
                f"the consumer group[{group.group_name}] can not consume by broadcast way",
            )
        if not self._parts.groups.may_read(group.group_name, topic):
            raise _forbidden(
                SUBSCRIPTION_FORBIDDEN,
                f"the consumer group[{group.group_name}] is forbidden for topic[{topic}]",
            )
        found = consumers.subscriptions.get(topic)
        if found is None:
            raise Refusal(
                Answer.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's subscription not exist{names.MORE}",
            )
        if found.data.sub_version < command.number("subVersion", 0):
            raise Refusal(Answer.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        if found.fault:
            raise Refusal(
                Answer.FILTER_DATA_NOT_EXIST,
                "The broker's consumer filter data is not exist!Your expression may be wrong!",
            )
        return found

    # --- answers -------------------------------------------------------------------------

    def _look(self, pull: Pull, topic: TopicConfig) -> tuple[Command, Answer]:
        """Returns the answer to a pull as things are now, and its code."""
        store, role = self._parts.store, self._parts.role
        group = pull.group.group_name
        reset = self._parts.offsets.take_reset(group, pull.topic, pull.queue)
        if reset is not None and self._settings.reset_in_broker:
            low, high = store.queue_min(*pull.place), store.queue_max(*pull.place)
            got = Got(GetStatus.OFFSET_TOO_SMALL, reset, low, high)
            status = "OFFSET_RESET"
        else:
            got = store.get(
                pull.topic, pull.queue, pull.offset, pull.count, pull.bytes_max, pull.matches
            )
            status = got.status.name
        code = _CODES.get(got.status)
        if code is None:
            # There is no queue, or nothing in it.
            code = Answer.PULL_OFFSET_MOVED if pull.offset else Answer.PULL_NOT_FOUND
        suggested = pull.group.broker_id if self._settings.slave_reads else MASTER_ID
        next_offset = got.next
        if role.id != MASTER_ID:
            if role.min_id == MASTER_ID:
                suggested = MASTER_ID
                if code is not Answer.SUCCESS:
                    code = Answer.PULL_RETRY_IMMEDIATELY
            elif code is Answer.PULL_OFFSET_MOVED and not self._settings.check_offsets_in_slave:
                # The consumer is ahead of what this slave has. RocketMQ's slaves answer at once
                # that it is to try again, and it does, without a pause; here it waits.
                code, next_offset = Answer.PULL_RETRY_IMMEDIATELY, pull.offset
                if pull.offset >= got.max:
                    code = Answer.PULL_NOT_FOUND
        fields = {
            "suggestWhichBrokerId": str(suggested),
            "nextBeginOffset": str(next_offset),
            "minOffset": str(got.min),
            "maxOffset": str(got.max),
            "topicSysFlag": str(topic.topic_sys_flag),
            "groupSysFlag": str(pull.group.group_sys_flag),
        }
        answer = pull.command.answer(code, fields, remark=status)
        if code is Answer.SUCCESS:
            answer.slices = got.records
            size = sum(map(len, got.records))
            self._parts.stats.pulled(group, pull.topic, len(got.records), size)
            trace = self._parts.trace
            if trace is not None:
                again = pull.offset < self._parts.offsets.get(group, *pull.place)
                trace.read(group, *pull.place, pull.offset, got.next, got.records, again=again)
        return answer, code

    # --- waiting -------------------------------------------------------------------------

    def _hold(self, pull: Pull) -> bool:
        if self._held_count >= HELD_MAX:
            return False
        wait_ms = pull.command.number("suspendTimeoutMillis", 0)
        if not self._settings.long_polling:
            wait_ms = self._settings.short_polling_ms
        pull.deadline_ms = self._parts.steady_ms() + max(0, min(wait_ms, SUSPEND_MS_MAX))
        self._held.setdefault(pull.place, []).append(pull)
        self._held_count += 1
        return True

    def _on_run(self, run: Run) -> None:
        place = (run.topic, run.queue_id)
        if place not in self._held or place in self._arrived:
            return
        if not self._arrived:
            self._loop.call_soon(self._wake_arrived)
        self._arrived.add(place)

    def _wake_arrived(self) -> None:
        arrived, self._arrived = self._arrived, set()
        for place in arrived:
            self._wake(place, self._parts.steady_ms())

    def wake_all(self) -> None:
        """Answers all that wait."""
        for place in list(self._held):
            self._wake(place, None)

    def _wake(self, place: tuple[str, int], now_ms: int | None) -> None:
        """Looks again for the pulls of a queue, which go on waiting if there is nothing for them
        and their time is not over. None: it is."""
        pulls = self._held.pop(place, [])
        self._held_count -= len(pulls)
        topic = self._parts.topics.get(place[0])
        for pull in pulls:
            if not pull.connection.is_open:
                continue
            if topic is None:
                refusal = f"topic[{place[0]}] not exist, apply first please! {names.MORE}"
                answer = pull.command.answer(Answer.TOPIC_NOT_EXIST, remark=refusal)
                pull.connection.answer(pull.command, answer)
                continue
            answer, code = self._look(pull, topic)
            passed_over = answer.remark == GetStatus.NO_MATCHED_MESSAGE.name
            nothing = passed_over or code is Answer.PULL_NOT_FOUND
            if not nothing or now_ms is None or pull.deadline_ms <= now_ms:
                pull.connection.answer(pull.command, answer)
                continue
            if passed_over:
                pull.offset = int(answer.fields["nextBeginOffset"])
            self._held.setdefault(place, []).append(pull)
            self._held_count += 1

    async def sweep(self) -> None:
        """Answers pulls whose time is over, as long as it runs."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_ms = self._parts.steady_ms()
            for place, pulls in list(self._held.items()):
                if any(p.deadline_ms <= now_ms or not p.connection.is_open for p in pulls):
                    self._wake(place, now_ms)


def _forbidden(kind: str, text: str) -> Refusal:
    return Refusal(Answer.NO_PERMISSION, text, {"forbiddenType": kind})


def check_expression(kind: str | None, expression: str, *, allowed: bool) -> None:
    """Raises Refusal for an expression that consumers may not have."""
    if filters.is_tags(kind):
        return
    if not allowed:
        raise Refusal(
            Answer.SYSTEM_ERROR, f"The broker does not support consumer to filter message by {kind}"
        )
    try:
        filters.compile_expression(expression)
    except SyntaxFault as error:
        raise Refusal(Answer.SUBSCRIPTION_PARSE_FAILED, error.text) from None
