"""A name server: answers requests from its tables, and sends the notifications that follow."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import structlog

from convoymq.edges.http.exposition import Text
from convoymq.model.config.loading import ConfigError, parse_text
from convoymq.model.errors import Unavailable
from convoymq.model.tasks import Tasks
from convoymq.rocketmq.exposition import Exposition
from convoymq.rocketmq.machine import MACHINE, Machine
from convoymq.rocketmq.namesrv.key_values import ORDER_TOPICS, KeyValueStore
from convoymq.rocketmq.namesrv.metrics import HELP, write_name_server
from convoymq.rocketmq.namesrv.settings import UNSERVED, NamesrvSettings
from convoymq.rocketmq.namesrv.tables import (
    SYSTEM_FLAG_UNIT,
    SYSTEM_FLAG_UNIT_SUBSCRIPTION,
    TIMEOUT_MS,
    Notify,
    Registration,
    Replica,
    RouteTables,
)
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import VERSION_BODY_OF_REGISTRATION, Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.connection import Connection, Handler, dispatch
from convoymq.rocketmq.remoting.server import RemotingServer
from convoymq.rocketmq.remoting.tls import ServerTls
from convoymq.rocketmq.remoting.values import (
    MASTER_ID,
    DataVersion,
    KeyValues,
    MemberGroupBody,
    RouteData,
    TopicList,
    TopicTable,
    crc32,
    decode_registration,
)
from convoymq.rocketmq.settings import build, pairs_of

log = structlog.get_logger()

NOTIFY_TIMEOUT_S = 0.3
SCAN_MS_MIN = 10
"""A broker that cannot be told so soon finds out by asking."""

_Method: TypeAlias = Callable[[Command], Command]


def replica_of(command: Command) -> Replica:
    """Returns the replica that a request names. Raises SyntaxFault."""
    return Replica(
        cluster=command.needed("clusterName"),
        broker=command.needed("brokerName"),
        id=command.number("brokerId"),
        address=command.needed("brokerAddr"),
    )


class NameServer:
    """See the module text.

    Args:
        now_ms: monotonic time.
    """

    def __init__(
        self, settings: NamesrvSettings, now_ms: Callable[[], int], machine: Machine = MACHINE
    ) -> None:
        self.settings = settings
        self.tables = RouteTables()
        self._now_ms = now_ms
        path = settings.kv_path or Path.home() / "namesrv" / "kvConfig.json"
        self._key_values = KeyValueStore(Path(path))
        self._begun_ms = now_ms()
        self._tasks = Tasks()
        self._client = RemotingClient(tls=settings.client_tls())
        self.refused: Counter[int] = Counter()
        """Answers other than success, by code."""
        self.exposition = Exposition(settings, self._render, self._faults)
        self._server = RemotingServer(
            dispatch(self._handlers()),
            self._on_closed,
            idle_s=settings.idle_s,
            tls=ServerTls(settings),
            refused=self.refused,
            machine=machine,
        )
        self._use(settings)

    def _handlers(self) -> dict[int, Handler]:
        plain: dict[int, _Method] = {
            Request.PUT_KV_CONFIG: self._put_value,
            Request.GET_KV_CONFIG: self._get_value,
            Request.DELETE_KV_CONFIG: self._delete_value,
            Request.GET_KVLIST_BY_NAMESPACE: self._list_values,
            Request.UNREGISTER_BROKER: self._unregister,
            Request.BROKER_HEARTBEAT: self._heartbeat,
            Request.QUERY_DATA_VERSION: self._query_version,
            Request.GET_ROUTEINFO_BY_TOPIC: self._route,
            Request.GET_BROKER_CLUSTER_INFO: self._cluster_info,
            Request.GET_BROKER_MEMBER_GROUP: self._member_group,
            Request.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write_perm,
            Request.ADD_WRITE_PERM_OF_BROKER: self._add_write_perm,
            Request.REGISTER_TOPIC_IN_NAMESRV: self._register_topic,
            Request.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._all_topics,
            Request.GET_TOPICS_BY_CLUSTER: self._topics_of_cluster,
            Request.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            Request.UPDATE_NAMESRV_CONFIG: self._update_config,
            Request.GET_NAMESRV_CONFIG: self._get_config,
        }
        for code, is_wanted in _UNIT_LISTS.items():
            plain[code] = partial(self._unit_topics, is_wanted)
        handlers: dict[int, Handler] = {c: partial(_without, m) for c, m in plain.items()}
        handlers[Request.REGISTER_BROKER] = self._register
        return handlers

    async def start(self) -> int:
        """Begins to serve; returns the port. Raises OSError."""
        port = await self._server.listen(self.settings.host, self.settings.port)
        self.exposition.start()
        self._tasks.spawn(self._scan())
        return port

    async def stop(self) -> None:
        """Ends."""
        await self.exposition.stop()
        await self._tasks.stop()
        await self._server.stop()
        await self._client.stop()

    @property
    def connections(self) -> int:
        """Returns the number of open connections."""
        return len(self._server.connections)

    def _faults(self) -> list[str]:
        """Returns why clients get no routes."""
        return ["it waits for brokers (waitSecondsForService)"] if self._waits() else []

    def _waits(self) -> bool:
        waited_ms = self._now_ms() - self._begun_ms
        return self.settings.wait_for_service and waited_ms < 1000 * self.settings.wait_s

    async def _render(self, *, per_object: bool, open_metrics: bool) -> str:
        text = Text(HELP, open_metrics=open_metrics)
        write_name_server(text, self)
        return text.render()

    # --- brokers -------------------------------------------------------------------------

    def _register(self, connection: Connection, command: Command) -> Command:
        fields = command.fields
        body = command.body
        if command.number("bodyCrc32", 0) not in (0, crc32(bytes(body))):
            return command.answer(Answer.SYSTEM_ERROR, remark="crc32 not match")
        topics = TopicTable()
        filter_servers: list[str] = []
        if command.version >= VERSION_BODY_OF_REGISTRATION and body:
            compressed = fields.get("compressed") == "true"
            found = decode_registration(bytes(body), compressed=compressed, version=command.version)
            topics, filter_servers = found.topic_config_serialize_wrapper, found.filter_server_list
        replica = replica_of(command)
        is_old = "enableActingMaster" not in fields
        registration = Registration(
            replica=replica,
            ha_address=fields.get("haServerAddr", ""),
            topics=topics,
            timeout_ms=command.number("heartbeatTimeoutMillis", TIMEOUT_MS),
            enable_acting_master=fields.get("enableActingMaster") == "true",
            is_old=is_old,
            zone=fields.get("__ZONE_NAME"),
            filter_servers=tuple(filter_servers),
        )
        holder = self.tables.holder(replica)
        if holder is not None:
            log.error(
                "namesrv.id_taken", broker=replica.broker, id=replica.id, address=replica.address,
                holder=holder.replica.address, refused=registration.enable_acting_master,
            )  # fmt: skip
        done = self.tables.register(registration, connection, self._now_ms())
        self._tell(done.notify)
        answer = {"haServerAddr": done.ha_address, "masterAddr": done.master_address}
        order = self._key_values.list(ORDER_TOPICS) if self.settings.order_to_broker else None
        return command.answer(
            fields={name: value for name, value in answer.items() if value is not None},
            body=b"" if order is None else json.dumps(KeyValues(order)),
        )

    def _unregister(self, command: Command) -> Command:
        self._tell(self.tables.unregister([replica_of(command)]))
        return command.answer()

    def _heartbeat(self, command: Command) -> Command:
        cluster, address = command.needed("clusterName"), command.needed("brokerAddr")
        self.tables.heartbeat(cluster, address, self._now_ms())
        return command.answer()

    def _query_version(self, command: Command) -> Command:
        asked = json.loads(command.body, DataVersion)
        cluster, address = command.needed("clusterName"), command.needed("brokerAddr")
        known = self.tables.version_of(cluster, address, self._now_ms())
        return command.answer(
            fields={"changed": "false" if known == asked else "true"},
            body=b"" if known is None else json.dumps(known),
        )

    def _on_closed(self, connection: Connection) -> None:
        self._tell(self.tables.on_closed(connection))

    def next_scan_ms(self) -> int:
        """Returns the time until the next look: a silent broker ends on time, not up to an interval
        later."""
        end_ms, most_ms = self.tables.first_end_ms(), self.settings.scan_ms
        if end_ms is None:
            return most_ms
        return max(SCAN_MS_MIN, min(most_ms, end_ms - self._now_ms()))

    async def _scan(self) -> None:
        while True:
            await asyncio.sleep(self.next_scan_ms() / 1000)
            connections, notify = self.tables.scan(self._now_ms())
            for connection in connections:
                if isinstance(connection, Connection):
                    log.warning("namesrv.broker_silent", peer=connection.name)
                    connection.close()
            self._tell(notify)

    def _tell(self, notify: Iterable[Notify]) -> None:
        for told in notify:
            log.info(
                "namesrv.min_id_changed",
                broker=told.broker,
                min_id=told.min_id,
                offline=told.offline_address,
            )
            fields = {
                "minBrokerId": str(told.min_id),
                "minBrokerAddr": told.min_address,
                "brokerName": told.broker,
                "offlineBrokerAddr": told.offline_address,
                "haBrokerAddr": told.ha_address,
            }
            for address in told.addresses:
                self._tasks.spawn(self._tell_one(address, fields))

    async def _tell_one(self, address: str, fields: dict[str, str | None]) -> None:
        known = {name: value for name, value in fields.items() if value is not None}
        command = request(Request.NOTIFY_MIN_BROKER_ID_CHANGE, known, one_way=True)
        try:
            (await self._client.connected(address, NOTIFY_TIMEOUT_S)).send(command)
        except Unavailable as error:
            log.info("namesrv.broker_not_told", broker=address, reason=error.text)

    # --- clients -------------------------------------------------------------------------

    def _route(self, command: Command) -> Command:
        if self._waits():
            return command.answer(Answer.SYSTEM_ERROR, remark="name server not ready")
        topic = command.needed("topic")
        route = self.tables.route(topic)
        zone = command.fields.get("__ZONE_NAME")
        if route is not None and zone and command.fields.get("__ZONE_MODE") == "true":
            route = _in_zone(route, zone)
        if route is None:
            text = f"No topic route info in name server for the topic: {topic}"
            return command.answer(Answer.TOPIC_NOT_EXIST, remark=text)
        if self.settings.order_enabled:
            route = msgspec.structs.replace(
                route, order_topic_conf=self._key_values.get(ORDER_TOPICS, topic)
            )
        return command.answer(body=json.dumps(route))

    def _cluster_info(self, command: Command) -> Command:
        return command.answer(body=json.dumps(self.tables.cluster_info()))

    def _member_group(self, command: Command) -> Command:
        cluster, name = command.needed("clusterName"), command.needed("brokerName")
        group = self.tables.member_group(cluster, name)
        return command.answer(body=json.dumps(MemberGroupBody(group)))

    # --- topics --------------------------------------------------------------------------

    def _wipe_write_perm(self, command: Command) -> Command:
        count = self.tables.wipe_write_perm(command.needed("brokerName"))
        return command.answer(fields={"wipeTopicCount": str(count)})

    def _add_write_perm(self, command: Command) -> Command:
        count = self.tables.add_write_perm(command.needed("brokerName"))
        return command.answer(fields={"addTopicCount": str(count)})

    def _register_topic(self, command: Command) -> Command:
        route = json.loads(command.body, RouteData)
        self.tables.register_topic(command.needed("topic"), route.queue_datas)
        return command.answer()

    def _delete_topic(self, command: Command) -> Command:
        self.tables.delete_topic(command.needed("topic"), command.fields.get("clusterName"))
        return command.answer()

    def _all_topics(self, command: Command) -> Command:
        return self._topics(command, self.tables.topics(), allowed=self.settings.all_topic_list)

    def _topics_of_cluster(self, command: Command) -> Command:
        return self._topics(command, self.tables.topics_of_cluster(command.needed("cluster")))

    def _unit_topics(self, is_wanted: Callable[[int], bool], command: Command) -> Command:
        return self._topics(command, self.tables.unit_topics(is_wanted))

    def _topics(
        self, command: Command, topics: list[str], *, allowed: bool | None = None
    ) -> Command:
        if not (self.settings.topic_list if allowed is None else allowed):
            return command.answer(Answer.SYSTEM_ERROR, remark="disable")
        return command.answer(body=json.dumps(TopicList(topics)))

    def _system_topics(self, command: Command) -> Command:
        info = self.tables.cluster_info()
        names = list(dict.fromkeys((*info.cluster_addr_table, *info.broker_addr_table)))
        addresses = [a for b in info.broker_addr_table.values() for a in b.broker_addrs.values()]
        return command.answer(body=json.dumps(TopicList(names, next(iter(addresses), None))))

    # --- keys and values, configuration --------------------------------------------------

    def _put_value(self, command: Command) -> Command:
        name, value = command.needed("key"), command.needed("value")
        self._key_values.put(command.needed("namespace"), name, value)
        return command.answer()

    def _get_value(self, command: Command) -> Command:
        namespace, name = command.needed("namespace"), command.needed("key")
        value = self._key_values.get(namespace, name)
        if value is None:
            text = f"No config item, Namespace: {namespace} Key: {name}"
            return command.answer(Answer.QUERY_NOT_FOUND, remark=text)
        return command.answer(fields={"value": value})

    def _delete_value(self, command: Command) -> Command:
        self._key_values.delete(command.needed("namespace"), command.needed("key"))
        return command.answer()

    def _list_values(self, command: Command) -> Command:
        namespace = command.needed("namespace")
        found = self._key_values.list(namespace)
        if found is None:
            text = f"No config item, Namespace: {namespace}"
            return command.answer(Answer.QUERY_NOT_FOUND, remark=text)
        return command.answer(body=json.dumps(KeyValues(found)))

    def _update_config(self, command: Command) -> Command:
        try:
            pairs = parse_text(bytes(command.body).decode(), "request")
        except (UnicodeDecodeError, ConfigError) as error:
            return command.answer(Answer.SYSTEM_ERROR, remark=str(error))
        if not self.settings.refused_keys().isdisjoint(name for name, _, _ in pairs):
            return command.answer(
                Answer.NO_PERMISSION, remark="Can not update config in black list."
            )
        changed = {name for name, _, _ in pairs}
        kept = [pair for pair in self._pairs(shown=False) if pair[0] not in changed]
        settings, _ = build(NamesrvSettings, kept + pairs, UNSERVED)
        self._use(settings)
        return command.answer()

    def _get_config(self, command: Command) -> Command:
        text = "".join(f"{name}={value}\n" for name, value, _ in self._pairs(shown=True))
        return command.answer(body=text.encode())

    def _pairs(self, *, shown: bool) -> list[tuple[str, str, str]]:
        return pairs_of((self.settings,), shown=shown)

    def _use(self, settings: NamesrvSettings) -> None:
        self.settings = settings
        self.tables.support_acting_master = settings.support_acting_master
        self.tables.notify_min_id = settings.notify_min_id
        self.tables.delete_unregistered_topics = settings.delete_unregistered_topics
        self.tables.forget_routes()


_UNIT_LISTS: dict[int, Callable[[int], bool]] = {
    Request.GET_UNIT_TOPIC_LIST: lambda flag: bool(flag & SYSTEM_FLAG_UNIT),
    Request.GET_HAS_UNIT_SUB_TOPIC_LIST: lambda flag: bool(flag & SYSTEM_FLAG_UNIT_SUBSCRIPTION),
    Request.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: lambda flag: (
        flag & (SYSTEM_FLAG_UNIT | SYSTEM_FLAG_UNIT_SUBSCRIPTION) == SYSTEM_FLAG_UNIT_SUBSCRIPTION
    ),
}


def _without(method: _Method, _connection: Connection, command: Command) -> Command:
    return method(command)


def _in_zone(route: RouteData, zone: str) -> RouteData:
    """Returns the brokers of a zone, and those without anybody in the master's place."""
    kept = [
        broker
        for broker in route.broker_datas
        if (broker.zone_name or "").lower() == zone.lower() or MASTER_ID not in broker.broker_addrs
    ]
    names = {broker.broker_name for broker in kept}
    return RouteData(
        [queues for queues in route.queue_datas if queues.broker_name in names],
        kept,
        route.filter_server_table,
        route.order_topic_conf,
    )
