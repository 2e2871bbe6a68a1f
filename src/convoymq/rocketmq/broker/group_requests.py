"""Administration of groups of consumers, their members and offsets: 43, 200, 201, 203, 204, 207,
208, 222, 223, 225, 307, 308, 309, 314, 317, 328, 343, 345, 352, 353."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from convoymq.model.errors import Unavailable
from convoymq.rocketmq.broker import names
from convoymq.rocketmq.broker.clients import Client
from convoymq.rocketmq.broker.stats import GROUP_GET_NUMS
from convoymq.rocketmq.broker.values import (
    ClientConnection,
    ConsumerConnections,
    GroupConfig,
    GroupConfigList,
    MessageQueue,
    array_of,
    is_blank,
    keyed,
    object_of,
)
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import LANGUAGES, Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal, request
from convoymq.rocketmq.remoting.connection import Connection, Handler
from convoymq.rocketmq.remoting.values import TopicList

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

CALL_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 5.0
_OFFSET_BYTES = 16


class GroupRequests:
    """See the module text."""

    def __init__(self, parts: Broker) -> None:
        self._parts = parts
        handlers: dict[int, Handler] = {
            Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._update,
            Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self._update_list,
            Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._all,
            Request.GET_SUBSCRIPTIONGROUP_CONFIG: self._get,
            Request.DELETE_SUBSCRIPTIONGROUP: self._delete,
            Request.UPDATE_AND_GET_GROUP_FORBIDDEN: self._forbidden,
            Request.GET_CONSUMER_CONNECTION_LIST: self._consumers,
            Request.GET_PRODUCER_CONNECTION_LIST: self._producers,
            Request.GET_ALL_PRODUCER_INFO: self._all_producers,
            Request.GET_CONSUME_STATS: self._stats,
            Request.GET_BROKER_CONSUME_STATS: self._all_stats,
            Request.GET_ALL_CONSUMER_OFFSET: self._all_offsets,
            Request.QUERY_TOPICS_BY_CONSUMER: self._topics,
            Request.QUERY_SUBSCRIPTION_BY_CONSUMER: self._subscription,
            Request.QUERY_CORRECTION_OFFSET: self._correction,
            Request.CLONE_GROUP_OFFSET: self._clone,
            Request.INVOKE_BROKER_TO_RESET_OFFSET: self._reset,
            Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self._status,
            Request.GET_CONSUMER_RUNNING_INFO: self._running_info,
            Request.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
        }
        for code, handler in handlers.items():
            parts.register(code, handler)

    # --- settings ------------------------------------------------------------------------

    def _update(self, connection: Connection, command: Command) -> Command:
        return self._update_all(command, [json.loads(command.body, GroupConfig)])

    def _update_list(self, connection: Connection, command: Command) -> Command:
        return self._update_all(
            command, json.loads(command.body, GroupConfigList).group_config_list
        )

    def _update_all(self, command: Command, groups: list[GroupConfig]) -> Command:
        for group in groups:
            names.check_group(group.group_name)
        self._parts.groups.update(groups)
        return command.answer()

    def _all(self, connection: Connection, command: Command) -> Command:
        content = self._parts.groups.content()
        count = len(content.subscription_group_table)
        return command.answer(fields={"totalGroupNum": str(count)}, body=json.dumps(content))

    def _get(self, connection: Connection, command: Command) -> Command:
        found = self._parts.groups.find(command.needed("group"))
        if found is None:
            raise Refusal(Answer.SUBSCRIPTION_GROUP_NOT_EXIST, "No group in this broker")
        return command.answer(body=json.dumps(found))

    def _delete(self, connection: Connection, command: Command) -> Command:
        group = command.needed("groupName")
        self._parts.groups.delete(group)
        if command.fields.get("cleanOffset") == "true":
            self._parts.offsets.delete_group(group)
        return command.answer()

    def _forbidden(self, connection: Connection, command: Command) -> Command:
        group, topic = command.needed("group"), command.needed("topic")
        readable = command.fields.get("readable")
        groups = self._parts.groups
        if readable is not None:
            groups.set_readable(group, topic, readable=readable == "true")
        found = {"group": group, "topic": topic, "readable": groups.may_read(group, topic)}
        return command.answer(body=json.dumps(found), remark="")

    # --- members -------------------------------------------------------------------------

    def _consumers(self, connection: Connection, command: Command) -> Command:
        group = command.needed("consumerGroup")
        found = self._parts.clients.consumers.get(group)
        if found is None:
            raise Refusal(Answer.CONSUMER_NOT_ONLINE, f"the consumer group[{group}] not online")
        body = ConsumerConnections(
            _connections(found.members.values()),
            {topic: wanted.data for topic, wanted in found.subscriptions.items()},
            found.consume_type, found.model, found.consume_from,
        )  # fmt: skip
        return command.answer(body=json.dumps(body))

    def _producers(self, connection: Connection, command: Command) -> Command:
        group = command.needed("producerGroup")
        found = self._parts.clients.producers.get(group)
        if found is None:
            raise Refusal(Answer.SYSTEM_ERROR, f"the producer group[{group}] not exist")
        return command.answer(body=json.dumps({"connectionSet": _connections(found.values())}))

    def _all_producers(self, connection: Connection, command: Command) -> Command:
        now_ms, steady_ms = self._parts.now_ms(), self._parts.steady_ms()
        table = {
            group: [
                {"clientId": row.client_id, "remoteIP": row.client_addr, "language": row.language,
                 "version": row.version,
                 "lastUpdateTimestamp": now_ms - (steady_ms - member.heard_ms)}
                for row, member in zip(
                    _connections(members.values()), members.values(), strict=True
                )
            ]
            for group, members in self._parts.clients.producers.items()
        }  # fmt: skip
        return command.answer(body=json.dumps({"data": table}))

    def _topics(self, connection: Connection, command: Command) -> Command:
        topics = self._parts.offsets.topics_of(command.needed("group"))
        return command.answer(body=json.dumps(TopicList(topics, self._parts.role.address)))

    def _subscription(self, connection: Connection, command: Command) -> Command:
        group, topic = command.needed("group"), command.needed("topic")
        found = self._parts.clients.subscription(group, topic)
        data = None if found is None else found.data
        body = {"group": group, "topic": topic, "subscriptionData": data}
        return command.answer(body=json.dumps(body))

    # --- how far they are ----------------------------------------------------------------

    def _all_offsets(self, connection: Connection, command: Command) -> Command:
        return command.answer(body=json.dumps(self._parts.offsets.content()))

    def _stats(self, connection: Connection, command: Command) -> Command:
        group, topic = command.needed("consumerGroup"), command.fields.get("topic")
        listed = command.fields.get("topicList")
        if listed:
            topics = [name for name in listed.split(";") if name]
        else:
            topics = self._consumed(group, topic)
        return command.answer(body=self._stats_of(group, topics)[0])

    def _consumed(self, group: str, topic: str | None) -> list[str]:
        """Returns topics of a group, without those that its consumers left."""
        topics = self._parts.offsets.topics_of(group) if is_blank(topic) else [str(topic)]
        online = self._parts.clients.consumers.get(group)
        if online is not None and online.subscriptions:
            return [name for name in topics if name in online.subscriptions]
        return topics

    def _stats_of(self, group: str, topics: Iterable[str]) -> tuple[bytes, int, int]:
        """Returns the statistics of a group, how many messages it has not committed, and how many
        of them are out."""
        parts = self._parts
        table: dict[MessageQueue, object] = {}
        tps, behind = 0.0, 0
        for topic in topics:
            config = parts.topics.get(topic)
            if config is None:
                continue
            for queue in range(config.read_queue_nums):
                high = parts.store.queue_max(topic, queue)
                offset = max(0, parts.offsets.get(group, topic, queue))
                at = parts.store.store_time(topic, queue, offset - 1) if offset else 0
                table[MessageQueue(topic, parts.role.name, queue)] = {
                    "brokerOffset": high, "consumerOffset": offset, "pullOffset": offset,
                    "lastTimestamp": max(0, at),
                }  # fmt: skip
                behind += high - offset
            tps += parts.stats.tps(GROUP_GET_NUMS, f"{topic}@{group}")
        return object_of(offsetTable=keyed(table), consumeTps=json.dumps(tps)), behind, 0

    def _all_stats(self, connection: Connection, command: Command) -> Command:
        only_ordered = command.fields.get("isOrder") == "true"
        parts = self._parts
        rows, total = [], 0
        for group in list(parts.groups.table):
            found = []
            for topic in self._consumed(group, None):
                config = parts.topics.get(topic)
                if config is None or (only_ordered and not config.order):
                    continue
                stats, behind, _ = self._stats_of(group, [topic])
                found.append(stats)
                total += behind
            rows.append(b"{" + json.dumps(group) + b":" + array_of(found) + b"}")
        return command.answer(
            body=object_of(
                brokerAddr=json.dumps(parts.role.address), consumeStatsList=array_of(rows),
                totalDiff=json.dumps(total), totalInflightDiff=b"0",
            )
        )  # fmt: skip

    def _correction(self, connection: Connection, command: Command) -> Command:
        """The smallest offset that any group has in each queue."""
        topic, compared = command.needed("topic"), command.fields.get("compareGroup", "")
        left_out = (command.fields.get("filterGroups") or "").split(",")
        offsets, found = self._parts.offsets, dict[int, int]()
        for group in offsets.groups_of(topic):
            if group in left_out:
                continue
            for queue, offset in offsets.of(group, topic).items():
                if offset >= self._parts.store.queue_min(topic, queue):
                    found[queue] = min(offset, found.get(queue, offset))
        for queue, offset in offsets.of(compared, topic).items():
            if found.get(queue, 0) > offset:
                found[queue] = (1 << 63) - 1
        return command.answer(body=json.dumps({"correctionOffsets": found}))

    def _clone(self, connection: Connection, command: Command) -> Command:
        source, target = command.needed("srcGroup"), command.needed("destGroup")
        topic = command.fields.get("topic")
        topics = self._parts.offsets.topics_of(source) if is_blank(topic) else [str(topic)]
        for name in topics:
            if name in self._parts.topics.table:
                self._parts.offsets.clone(source, target, name)
        return command.answer()

    # --- resets --------------------------------------------------------------------------

    def _reset(self, connection: Connection, command: Command) -> Command:
        topic, group = command.needed("topic"), command.needed("group")
        parts = self._parts
        config = parts.topics.get(topic)
        if config is None:
            raise Refusal(Answer.TOPIC_NOT_EXIST, f"Topic {topic} does not exist")
        if group not in parts.groups.table:
            raise Refusal(Answer.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} does not exist")
        if not parts.settings.reset_in_broker:
            return self._reset_in_clients(command, topic, group, config.write_queue_nums)
        if parts.role.id:
            raise Refusal(Answer.SYSTEM_ERROR, "Can not reset offset in slave broker")
        time = command.number("timestamp")
        queue, offset = command.number("queueId", -1), command.number("offset", -1)
        if queue >= 0:
            chosen = {queue: self._target(topic, queue, time, offset)}
        else:
            chosen = {q: self._at(topic, q, time) for q in range(config.read_queue_nums)}
        for number, target in chosen.items():
            parts.offsets.reset(group, topic, number, target)
        return command.answer(body=self._offset_table(topic, chosen))

    def _at(self, topic: str, queue: int, time: int) -> int:
        store = self._parts.store
        return store.queue_max(topic, queue) if time < 0 else store.offset_at(topic, queue, time)

    def _target(self, topic: str, queue: int, time: int, offset: int) -> int:
        if offset < 0:
            return self._at(topic, queue, time)
        low, high = self._parts.store.queue_min(topic, queue), self._parts.store.queue_max(
            topic, queue
        )  # fmt: skip
        if not low <= offset <= high:
            raise Refusal(
                Answer.SYSTEM_ERROR,
                f"Target offset {offset} not in consume queue range [{low}-{high}]",
            )
        return offset

    def _offset_table(self, topic: str, offsets: dict[int, int]) -> bytes:
        name = self._parts.role.name
        table: dict[MessageQueue, object] = {
            MessageQueue(topic, name, queue): offset for queue, offset in offsets.items()
        }
        return object_of(offsetTable=keyed(table))

    def _reset_in_clients(self, command: Command, topic: str, group: str, queues: int) -> Command:
        """Tells consumers to begin elsewhere."""
        time, force = command.number("timestamp"), command.fields.get("isForce") == "true"
        chosen = {}
        for queue in range(queues):
            offset = self._parts.offsets.get(group, topic, queue)
            if offset < 0:
                raise Refusal(Answer.SYSTEM_ERROR, f"THe consumer group <{group}> not exist")
            target = self._at(topic, queue, time)
            chosen[queue] = target if force or target < offset else offset
        body = self._offset_table(topic, chosen)
        found = self._parts.clients.consumers.get(group)
        if found is None:
            raise Refusal(
                Answer.CONSUMER_NOT_ONLINE,
                f"Consumer not online, so can not reset offset, Group: {group} Topic: {topic} "
                f"Timestamp: {time}",
            )
        fields = {"topic": topic, "group": group, "timestamp": str(time)}
        for channel in found.members:
            if isinstance(channel, Connection):
                code = Request.RESET_CONSUMER_CLIENT_OFFSET
                channel.send(request(code, fields, body, one_way=True))
        return command.answer(body=body)

    # --- questions that consumers answer -------------------------------------------------

    async def _status(self, connection: Connection, command: Command) -> Command:
        topic, group = command.needed("topic"), command.needed("group")
        only = command.fields.get("clientAddr")
        found = self._parts.clients.consumers.get(group)
        if found is None:
            raise Refusal(
                Answer.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{group}]"
            )
        rows = []
        for channel, client in list(found.members.items()):
            if not isinstance(channel, Connection) or only not in (None, "", client.id):
                continue
            code = Request.GET_CONSUMER_STATUS_FROM_CLIENT
            asked = request(code, {"topic": topic, "group": group})
            try:
                answer = await channel.request(asked, STATUS_TIMEOUT_S)
            except Unavailable:
                continue
            if answer.code == Answer.SUCCESS and answer.body:
                table = json.loads(answer.body, dict[str, dict[str, int]])
                rows.append(
                    json.dumps(client.id) + b":" + _again(table.get("messageQueueTable", {}))
                )
        return command.answer(body=object_of(consumerTable=b"{" + b",".join(rows) + b"}"))

    async def _running_info(self, connection: Connection, command: Command) -> Command:
        return await self._call(command, dict(command.fields), b"")

    async def _consume_directly(self, connection: Connection, command: Command) -> Command:
        fields = dict(command.fields) | {"brokerName": self._parts.role.name}
        topic = self._parts.topics.get(fields.get("topic", ""))
        if topic is not None:
            fields["topicSysFlag"] = str(topic.topic_sys_flag)
        group = self._parts.groups.get(command.needed("consumerGroup"))
        if group is not None:
            fields["groupSysFlag"] = str(group.group_sys_flag)
        text = command.needed("msgId")
        try:
            place = int(text[-_OFFSET_BYTES:], 16)
        except ValueError:
            place = -1
        message = self._parts.store.message_at(place)
        if message is None:
            raise Refusal(Answer.SYSTEM_ERROR, f"can not find message by the offset, {place}")
        return await self._call(command, fields, bytes(message.record))

    async def _call(self, command: Command, fields: dict[str, str], body: bytes) -> Command:
        """Has a consumer answer a request."""
        group, client_id = command.needed("consumerGroup"), command.needed("clientId")
        found = self._parts.clients.consumers.get(group)
        client = None if found is None else found.member(client_id)
        if client is None or not isinstance(client.channel, Connection):
            raise Refusal(Answer.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        try:
            answer = await client.channel.request(
                request(command.code, fields, body), CALL_TIMEOUT_S
            )
        except Unavailable as error:
            raise Refusal(
                Answer.CONSUME_MSG_TIMEOUT,
                f"consumer <{group}> <{client_id}> Timeout: {error.text}",
            ) from None
        return command.answer(answer.code, answer.fields, answer.body, answer.remark)


def _connections(clients: Iterable[Client]) -> list[ClientConnection]:
    return [
        ClientConnection(
            client.id, client.channel.name if isinstance(client.channel, Connection) else "",
            LANGUAGES[client.language % len(LANGUAGES)], client.version,
        )
        for client in clients
    ]  # fmt: skip


def _again(table: dict[str, int]) -> bytes:
    """Returns a map whose keys are queues as `json.loads` has them, as RocketMQ writes it."""
    return keyed({
        msgspec.json.decode(name.encode(), type=MessageQueue): offset
        for name, offset in table.items()
    })  # fmt: skip
