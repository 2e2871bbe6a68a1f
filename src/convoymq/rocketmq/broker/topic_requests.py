"""Administration of topics: 17, 18, 21, 202, 215, 300, 303, 305, 316, 321, 351."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from convoymq.rocketmq.broker import names
from convoymq.rocketmq.broker.names import RETRY_PREFIX
from convoymq.rocketmq.broker.stats import TOPIC_PUT_NUMS
from convoymq.rocketmq.broker.values import MessageQueue, is_blank, keyed, object_of
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal
from convoymq.rocketmq.remoting.connection import Connection, Handler
from convoymq.rocketmq.remoting.values import DataVersion, TopicConfig, TopicList
from convoymq.rocketmq.store.types import Message

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

QUEUES_MAX = 65_536
TOPICS_OF_LIST_MAX = 10_000
ENTRIES_MAX = 32


class _Topics(msgspec.Struct, rename="camel"):
    topic_config_list: list[TopicConfig]


class TopicRequests:
    """See the module text."""

    def __init__(self, parts: Broker) -> None:
        self._parts = parts
        handlers: dict[int, Handler] = {
            Request.UPDATE_AND_CREATE_TOPIC: self._update,
            Request.UPDATE_AND_CREATE_TOPIC_LIST: self._update_list,
            Request.GET_ALL_TOPIC_CONFIG: self._all,
            Request.GET_TOPIC_CONFIG: self._get,
            Request.DELETE_TOPIC_IN_BROKER: self._delete,
            Request.CLEAN_UNUSED_TOPIC: self._clean_unused,
            Request.GET_TOPIC_STATS_INFO: self._stats,
            Request.QUERY_TOPIC_CONSUME_BY_WHO: self._consumed_by,
            Request.QUERY_CONSUME_TIME_SPAN: self._time_spans,
            Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self._system,
            Request.QUERY_CONSUME_QUEUE: self._entries,
        }
        for code, handler in handlers.items():
            parts.register(code, handler)

    # --- settings ------------------------------------------------------------------------

    async def _update(self, connection: Connection, command: Command) -> Command:
        topic = TopicConfig(
            command.needed("topic"), command.number("readQueueNums"),
            command.number("writeQueueNums"), command.number("perm"),
            command.fields.get("topicFilterType", "SINGLE_TAG"), command.number("topicSysFlag", 0),
            command.fields.get("order") == "true", attributes_of(command.fields.get("attributes")),
        )  # fmt: skip
        return await self._update_all(command, [topic])

    async def _update_list(self, connection: Connection, command: Command) -> Command:
        topics = json.loads(command.body, _Topics).topic_config_list
        if len(topics) > TOPICS_OF_LIST_MAX:
            raise Refusal(Answer.INVALID_PARAMETER, f"more than {TOPICS_OF_LIST_MAX} topics")
        return await self._update_all(command, topics)

    async def _update_all(self, command: Command, topics: list[TopicConfig]) -> Command:
        for topic in topics:
            names.check_topic(topic.topic_name)
            self._check_system(topic.topic_name)
            queues = (topic.read_queue_nums, topic.write_queue_nums)
            if not all(0 <= number <= QUEUES_MAX for number in queues):
                raise Refusal(Answer.INVALID_PARAMETER, f"a topic has at most {QUEUES_MAX} queues")
        self._parts.topics.update(topics)
        await self._parts.registrar.announced()
        return command.answer()

    def _check_system(self, topic: str) -> None:
        if self._parts.settings.validate_system_topics and self._parts.topics.is_system(topic):
            raise Refusal(
                Answer.INVALID_PARAMETER, f"The topic[{topic}] is conflict with system topic."
            )

    def _known(self, topic: str, text: str) -> TopicConfig:
        found = self._parts.topics.get(topic)
        if found is None:
            raise Refusal(Answer.TOPIC_NOT_EXIST, text)
        return found

    def _all(self, connection: Connection, command: Command) -> Command:
        """All at once: peers that ask for pages take what they are given."""
        content = self._parts.topics.content()
        body = json.dumps({
            "topicConfigTable": content.topic_config_table,
            "dataVersion": content.data_version,
            "deleted": content.deleted,
            "mappingDataVersion": DataVersion(),
            "topicQueueMappingInfoMap": {},
            "topicQueueMappingDetailMap": {},
        })  # fmt: skip
        count = len(content.topic_config_table)
        return command.answer(fields={"totalTopicNum": str(count)}, body=body)

    def _get(self, connection: Connection, command: Command) -> Command:
        topic = command.needed("topic")
        found = self._known(topic, f"No topic in this broker. topic: {topic}")
        return command.answer(body=json.dumps(found))

    async def _delete(self, connection: Connection, command: Command) -> Command:
        topic = command.fields.get("topic")
        if is_blank(topic):
            raise Refusal(Answer.INVALID_PARAMETER, "The specified topic is blank.")
        assert topic is not None
        self._check_system(topic)
        parts = self._parts
        retries = [
            name
            for group in parts.offsets.groups_of(topic)
            for name in (f"{RETRY_PREFIX}{group}+{topic}", f"{RETRY_PREFIX}{group}_{topic}")
        ]
        for name in (topic, *(n for n in retries if n in parts.topics.table)):
            parts.topics.delete(name, parts.store.max_offset)
        await parts.registrar.register_all()
        return command.answer()

    def _clean_unused(self, connection: Connection, command: Command) -> Command:
        for topic in self._parts.store.topics():
            if topic not in self._parts.topics.table and not self._parts.topics.is_system(topic):
                self._parts.store.delete_topic(topic)
        return command.answer()

    # --- what there is -------------------------------------------------------------------

    def _queue(self, topic: str, number: int) -> MessageQueue:
        return MessageQueue(topic, self._parts.role.name, number)

    def _stats(self, connection: Connection, command: Command) -> Command:
        topic = command.needed("topic")
        found = self._known(topic, f"topic[{topic}] not exist")
        store = self._parts.store
        table: dict[MessageQueue, object] = {}
        for queue in range(max(found.read_queue_nums, found.write_queue_nums)):
            high = store.queue_max(topic, queue)
            table[self._queue(topic, queue)] = {
                "minOffset": max(0, store.queue_min(topic, queue)),
                "maxOffset": high,
                "lastUpdateTimestamp": store.store_time(topic, queue, high - 1) if high else 0,
            }
        tps = self._parts.stats.tps(TOPIC_PUT_NUMS, topic)
        return command.answer(body=object_of(offsetTable=keyed(table), topicPutTps=json.dumps(tps)))

    def _consumed_by(self, connection: Connection, command: Command) -> Command:
        topic = command.needed("topic")
        groups = {*self._parts.clients.groups_of(topic), *self._parts.offsets.groups_of(topic)}
        return command.answer(body=json.dumps({"groupList": sorted(groups)}))

    def _time_spans(self, connection: Connection, command: Command) -> Command:
        topic, group = command.needed("topic"), command.needed("group")
        found = self._known(topic, f"topic[{topic}] not exist")
        store, now_ms = self._parts.store, self._parts.now_ms()
        spans = []
        for queue in range(found.write_queue_nums):
            begin, high = store.earliest_time(topic, queue), store.queue_max(topic, queue)
            offset = self._parts.offsets.get(group, topic, queue)
            span: dict[str, object] = {
                "messageQueue": self._queue(topic, queue),
                "minTimeStamp": begin,
                "maxTimeStamp": store.store_time(topic, queue, high - 1),
                "consumeTimeStamp": (
                    store.store_time(topic, queue, offset - 1) if offset > 0 else begin
                ),
                "delayTime": 0,
            }
            if offset < high:
                span["delayTime"] = now_ms - store.store_time(topic, queue, max(0, offset))
            spans.append(span)
        return command.answer(body=json.dumps({"consumeTimeSpanSet": spans}))

    def _system(self, connection: Connection, command: Command) -> Command:
        found = sorted(names.SYSTEM_TOPICS | self._parts.topics.system)
        return command.answer(body=json.dumps(TopicList(found)))

    def _entries(self, connection: Connection, command: Command) -> Command:
        """Entries of a queue, and whether a group's filter matches them."""
        topic, queue = command.needed("topic"), command.number("queueId")
        store = self._parts.store
        wanted = None
        group = command.fields.get("consumerGroup")
        if group is not None:
            wanted = self._parts.clients.subscription(group, topic)
        count = max(1, min(command.number("count", ENTRIES_MAX), ENTRIES_MAX))
        got = store.get(topic, queue, command.number("index"), count)
        rows = []
        for message in map(Message, got.records):
            matches = None if wanted is None else wanted.matches
            rows.append({
                "physicOffset": message.physical,
                "physicSize": message.size,
                "tagsCode": message.tags_code,
                "eval": matches is None or (
                    matches(message.tags_code, None) and matches(message.tags_code, message)
                ),
            })  # fmt: skip
        return command.answer(
            body=json.dumps({
                "subscriptionData": None if wanted is None else wanted.data,
                "filterData": None if wanted or not group else f"{group}@{topic} is not online!",
                "queueData": rows,
                "minQueueIndex": got.min,
                "maxQueueIndex": got.max,
            })
        )  # fmt: skip


def attributes_of(text: str | None) -> dict[str, str]:
    """Returns changes of attributes: `+name=value,-name`. Raises Refusal."""
    changes = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part.partition("=")
        if name[:1] not in "+-" or (name[:1] == "+") != bool(equals):
            raise Refusal(Answer.SYSTEM_ERROR, f"add/alter attribute format is wrong: {part}")
        changes[name] = value
    return changes
