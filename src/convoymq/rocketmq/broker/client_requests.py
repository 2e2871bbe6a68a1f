"""Requests of clients besides sends and pulls: heartbeats (34, 35, 46), members (38), offsets
(14, 15, 29-32), messages by key or place (12, 33)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.rocketmq.broker.clients import Client, Consumers
from convoymq.rocketmq.broker.names import RETRY_PREFIX
from convoymq.rocketmq.broker.pull import check_expression
from convoymq.rocketmq.broker.values import CheckClientBody, ConsumerData, HeartbeatData
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal, request
from convoymq.rocketmq.remoting.connection import Connection, Handler
from convoymq.rocketmq.store.types import Boundary, Message

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

UNIT_SUBSCRIPTION = 2
GROUPS_OF_HEARTBEAT_MAX = 4096
QUERY_MAX = 1024


def tell_members(group: Consumers) -> None:
    """Tells all clients of a group that its members have changed (40)."""
    for channel in group.members:
        if isinstance(channel, Connection):
            fields = {"consumerGroup": group.name}
            channel.send(request(Request.NOTIFY_CONSUMER_IDS_CHANGED, fields, one_way=True))


class ClientRequests:
    """See the module text."""

    def __init__(self, parts: Broker) -> None:
        self._parts = parts
        handlers: dict[int, Handler] = {
            Request.HEART_BEAT: self._heartbeat,
            Request.UNREGISTER_CLIENT: self._unregister,
            Request.CHECK_CLIENT_CONFIG: self._check,
            Request.GET_CONSUMER_LIST_BY_GROUP: self._members,
            Request.QUERY_CONSUMER_OFFSET: self._query_offset,
            Request.UPDATE_CONSUMER_OFFSET: self._update_offset,
            Request.SEARCH_OFFSET_BY_TIMESTAMP: self._search_offset,
            Request.GET_MAX_OFFSET: self._max_offset,
            Request.GET_MIN_OFFSET: self._min_offset,
            Request.GET_EARLIEST_MSG_STORETIME: self._earliest,
            Request.QUERY_MESSAGE: self._query,
            Request.VIEW_MESSAGE_BY_ID: self._view,
        }
        for code, handler in handlers.items():
            parts.register(code, handler)

    # --- heartbeats ----------------------------------------------------------------------

    def _heartbeat(self, connection: Connection, command: Command) -> Command:
        data = json.loads(command.body, HeartbeatData)
        if len(data.consumer_data_set) + len(data.producer_data_set) > GROUPS_OF_HEARTBEAT_MAX:
            raise Refusal(Answer.INVALID_PARAMETER, "a heartbeat of too many groups")
        parts = self._parts
        is_changed = data.heartbeat_fingerprint == 0
        for consumer in data.consumer_data_set:
            known = parts.clients.consumers.get(consumer.group_name)
            if known is not None and known.fingerprint != data.heartbeat_fingerprint:
                is_changed = True
            self._consumer(connection, command, data, consumer)
        for producer in data.producer_data_set:
            client = Client(connection, data.client_id, command.language, command.version)
            parts.clients.register_producer(producer.group_name, client, parts.steady_ms())
        return command.answer(
            fields={
                "IS_SUPPORT_HEART_BEAT_V2": "true",
                "IS_SUB_CHANGE": str(is_changed).lower(),
            }
        )

    def _consumer(
        self, connection: Connection, command: Command, data: HeartbeatData, consumer: ConsumerData
    ) -> None:
        parts = self._parts
        config = parts.groups.find(consumer.group_name)
        if config is None:
            return
        ordered = any(
            (topic := parts.topics.get(wanted.topic)) is not None and topic.order
            for wanted in consumer.subscription_data_set
        )
        unit = UNIT_SUBSCRIPTION if consumer.unit_mode else 0
        parts.topics.create_for_retry(
            RETRY_PREFIX + consumer.group_name, config.retry_queue_nums, unit, order=ordered
        )
        parts.clients.register_consumer(
            consumer,
            Client(connection, data.client_id, command.language, command.version),
            parts.steady_ms(),
            with_topics=not (data.heartbeat_fingerprint and data.without_sub),
            notify=config.notify_consumer_ids_changed_enable,
        )
        parts.clients.consumers[consumer.group_name].fingerprint = data.heartbeat_fingerprint

    def _unregister(self, connection: Connection, command: Command) -> Command:
        for name, is_consumer in (("producerGroup", False), ("consumerGroup", True)):
            group = command.fields.get(name)
            if group is not None:
                self._parts.clients.unregister(connection, group, consumer=is_consumer)
        return command.answer()

    def _check(self, connection: Connection, command: Command) -> Command:
        data = json.loads(command.body, CheckClientBody).subscription_data
        if data is not None:
            check_expression(
                data.expression_type, data.sub_string,
                allowed=self._parts.settings.property_filter,
            )  # fmt: skip
        return command.answer()

    def _members(self, connection: Connection, command: Command) -> Command:
        group = command.needed("consumerGroup")
        found = self._parts.clients.consumers.get(group)
        if found is None:
            raise Refusal(Answer.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return command.answer(body=json.dumps({"consumerIdList": found.ids()}))

    # --- offsets -------------------------------------------------------------------------

    def _query_offset(self, connection: Connection, command: Command) -> Command:
        group, topic = command.needed("consumerGroup"), command.needed("topic")
        queue = command.number("queueId")
        offset = self._parts.offsets.get(group, topic, queue)
        if offset < 0:
            offset = self._first_offset(command, topic, queue)
        return command.answer(fields={"offset": str(offset)})

    def _first_offset(self, command: Command, topic: str, queue: int) -> int:
        """Returns where a group begins that has no offset. Raises Refusal: it is to decide."""
        if command.fields.get("setZeroIfNotFound") == "false":
            raise Refusal(
                Answer.QUERY_NOT_FOUND,
                "Not found, do not set to zero, maybe this group boot first",
            )
        store = self._parts.store
        if store.queue_min(topic, queue) > 0 or store.queue_max(topic, queue) == 0:
            raise Refusal(
                Answer.QUERY_NOT_FOUND,
                "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first",
            )
        return 0

    def _update_offset(self, connection: Connection, command: Command) -> Command:
        group, topic = command.needed("consumerGroup"), command.needed("topic")
        queue, offset = command.number("queueId"), command.number("commitOffset")
        parts = self._parts
        if group not in parts.groups.table:
            raise Refusal(Answer.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} not exist!")
        found = parts.topics.get(topic)
        if found is None:
            raise Refusal(Answer.TOPIC_NOT_EXIST, f"Topic {topic} not exist!")
        if not 0 <= queue < max(found.read_queue_nums, found.write_queue_nums) or offset < 0:
            raise Refusal(Answer.INVALID_PARAMETER, f"queue {queue} and offset {offset} of {topic}")
        if parts.settings.reset_in_broker and parts.offsets.has_reset(group, topic, queue):
            return command.answer(remark="Offset has been previously reset")
        parts.offsets.commit(group, topic, queue, offset)
        return command.answer()

    def _search_offset(self, connection: Connection, command: Command) -> Command:
        topic, queue = command.needed("topic"), command.number("queueId")
        upper = command.fields.get("boundaryType", "").lower() == "upper"
        boundary = Boundary.UPPER if upper else Boundary.LOWER
        time = command.number("timestamp")
        offset = self._parts.store.offset_at(topic, queue, time, boundary)
        return command.answer(fields={"offset": str(offset)})

    def _max_offset(self, connection: Connection, command: Command) -> Command:
        offset = self._parts.store.queue_max(command.needed("topic"), command.number("queueId"))
        return command.answer(fields={"offset": str(offset)})

    def _min_offset(self, connection: Connection, command: Command) -> Command:
        offset = self._parts.store.queue_min(command.needed("topic"), command.number("queueId"))
        return command.answer(fields={"offset": str(offset)})

    def _earliest(self, connection: Connection, command: Command) -> Command:
        time = self._parts.store.earliest_time(command.needed("topic"), command.number("queueId"))
        return command.answer(fields={"timestamp": str(time)})

    # --- messages ------------------------------------------------------------------------

    def _query(self, connection: Connection, command: Command) -> Command:
        parts = self._parts
        count = command.number("maxNum")
        if command.fields.get("_UNIQUE_KEY_QUERY") == "true":
            count = parts.settings.query_count_max
        found = parts.store.query(
            command.needed("topic"), command.needed("key"), max(0, min(count, QUERY_MAX)),
            command.number("beginTimestamp"), command.number("endTimestamp"),
        )  # fmt: skip
        fields = {
            "indexLastUpdateTimestamp": str(parts.now_ms()),
            "indexLastUpdatePhyoffset": str(parts.store.dispatched),
        }
        if not found:
            raise Refusal(
                Answer.QUERY_NOT_FOUND, "can not find message, maybe time range not correct", fields
            )
        return with_records(command.answer(fields=fields), found)

    def _view(self, connection: Connection, command: Command) -> Command:
        offset = command.number("offset")
        found = self._parts.store.message_at(offset)
        if found is None:
            raise Refusal(Answer.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
        return with_records(command.answer(), [found])


def with_records(answer: Command, messages: list[Message]) -> Command:
    """Returns an answer with the records of messages as its body."""
    answer.slices = [message.record for message in messages]
    return answer
