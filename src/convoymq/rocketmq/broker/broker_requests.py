"""Administration of a broker: its configuration (25, 26), what it does (28, 315), files (306, 329),
and how consumers take messages (400, 401, 402)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from convoymq.model.config.loading import ConfigError, parse_text
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.configuration import Configuration
from convoymq.rocketmq.broker.names import RETRY_PREFIX
from convoymq.rocketmq.broker.stats import BROKER_GET_NUMS, BROKER_PUT_NUMS
from convoymq.rocketmq.broker.values import (
    BROADCASTING,
    AssignmentQuery,
    MessageQueue,
    RequestMode,
    RequestModes,
)
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import VERSION, Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal
from convoymq.rocketmq.remoting.connection import Connection, Handler
from convoymq.rocketmq.remoting.values import PERM_READ, RouteData

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

log = structlog.get_logger()

VERSION_TEXT = "V5_3_3"


class BrokerRequests:
    """See the module text.

    Args:
        configure: puts another configuration in the place of the one that is used.
        root: directory of all files.
    """

    def __init__(
        self,
        parts: Broker,
        configuration: Callable[[], Configuration],
        configure: Callable[[Configuration], None],
        modes: ConfigFile,
        root: Path,
    ) -> None:
        self._parts = parts
        self._configuration = configuration
        self._configure = configure
        self._modes_file = modes
        self._modes = modes.read(RequestModes) or RequestModes()
        self._root = root
        self._begun_ms = parts.now_ms()
        handlers: dict[int, Handler] = {
            Request.UPDATE_BROKER_CONFIG: self._update_config,
            Request.GET_BROKER_CONFIG: self._get_config,
            Request.GET_BROKER_RUNTIME_INFO: self._runtime_info,
            Request.VIEW_BROKER_STATS_DATA: self._stats,
            Request.CLEAN_EXPIRED_CONSUMEQUEUE: self._clean,
            Request.DELETE_EXPIRED_COMMITLOG: self._clean,
            Request.QUERY_ASSIGNMENT: self._assignment,
            Request.SET_MESSAGE_REQUEST_MODE: self._set_mode,
            Request.GET_ALL_MESSAGE_REQUEST_MODE: self._all_modes,
        }
        for code, handler in handlers.items():
            parts.register(code, handler)

    # --- configuration -------------------------------------------------------------------

    async def _update_config(self, connection: Connection, command: Command) -> Command:
        try:
            pairs = parse_text(bytes(command.body).decode(), "request")
            changed = {name for name, _, _ in pairs}
            if not changed.isdisjoint(self._parts.settings.refused_keys()):
                raise Refusal(Answer.NO_PERMISSION, "Can not update config in black list.")
            self._configure(self._configuration().changed(pairs))
        except (UnicodeDecodeError, ConfigError) as error:
            raise Refusal(Answer.SYSTEM_ERROR, str(error)) from None
        log.info("rocketmq.configuration_changed", keys=sorted(changed), peer=connection.name)
        if "brokerPermission" in changed:
            self._parts.topics.touch()
            await self._parts.registrar.register_all()
        return command.answer()

    def _get_config(self, connection: Connection, command: Command) -> Command:
        pairs = self._configuration().pairs(shown=True)
        text = "".join(f"{name}={value}\n" for name, value, _ in pairs)
        version = json.dumps(self._parts.topics.version).decode()
        return command.answer(fields={"version": version}, body=text.encode())

    # --- what it does --------------------------------------------------------------------

    def _runtime_info(self, connection: Connection, command: Command) -> Command:
        parts = self._parts
        store, stats, cluster = parts.store, parts.stats, parts.role.cluster
        puts, gets = stats.total(BROKER_PUT_NUMS, cluster), stats.total(BROKER_GET_NUMS, cluster)
        put_tps = f"{stats.tps(BROKER_PUT_NUMS, cluster):.2f}"
        get_tps = f"{stats.tps(BROKER_GET_NUMS, cluster):.2f}"
        disk = shutil.disk_usage(self._root)
        first = store.message_at(store.min_offset)
        used = f"{disk.used / disk.total:.2f}"
        table = {
            "brokerVersion": str(VERSION),
            "brokerVersionDesc": VERSION_TEXT,
            "brokerActive": str(parts.role.runs_special_services).lower(),
            "bootTimestamp": str(self._begun_ms),
            "runtime": f"{(parts.now_ms() - self._begun_ms) // 1000} s",
            "putTps": f"{put_tps} {put_tps} {put_tps}",
            "getTransferredTps": f"{get_tps} {get_tps} {get_tps}",
            "getTransferedTps": f"{get_tps} {get_tps} {get_tps}",
            "getTotalTps": f"{get_tps} {get_tps} {get_tps}",
            "getFoundTps": f"{get_tps} {get_tps} {get_tps}",
            "getMissTps": "0 0 0",
            "putMessageTimesTotal": str(puts),
            "msgPutTotalYesterdayMorning": "0",
            "msgPutTotalTodayMorning": "0",
            "msgPutTotalTodayNow": str(puts),
            "msgGetTotalYesterdayMorning": "0",
            "msgGetTotalTodayMorning": "0",
            "msgGetTotalTodayNow": str(gets),
            "dispatchBehindBytes": str(store.max_offset - store.dispatched),
            "dispatchMaxBuffer": "0",
            "pageCacheLockTimeMills": "0",
            "commitLogMinOffset": str(store.min_offset),
            "commitLogMaxOffset": str(store.max_offset),
            "commitLogDiskRatio": used,
            "consumeQueueDiskRatio": used,
            "commitLogDirCapacity": f"Total : {disk.total}, Free : {disk.free}.",
            "remainHowManyDataToFlush": f"{store.max_offset - store.flushed} B",
            "remainTransientStoreBufferNumbs": "0",
            "earliestMessageTimeStamp": str(-1 if first is None else first.stored_ms),
            "startAcceptSendRequestTimeStamp": "0",
            "timerReadBehind": "0",
            "timerOffsetBehind": "0",
            "timerCongestNum": "0",
            "timerEnqueueTps": "0.0",
            "timerDequeueTps": "0.0",
            "pid": str(os.getpid()),
        }
        for pool in ("send", "pull", "litePull", "query", "ack"):
            table[f"{pool}ThreadPoolQueueSize"] = "0"
            table[f"{pool}ThreadPoolQueueCapacity"] = "0"
            table[f"{pool}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        return command.answer(body=json.dumps({"table": table}))

    def _stats(self, connection: Connection, command: Command) -> Command:
        name, key = command.needed("statsName"), command.needed("statsKey")
        spans = self._parts.stats.spans(name, key)
        if spans is None:
            raise Refusal(Answer.SYSTEM_ERROR, f"The stats <{name}> <{key}> not exist")
        body = {
            span: asdict(found) | {"avgpt": 0.0}
            for span, found in zip(("statsMinute", "statsHour", "statsDay"), spans, strict=True)
        }
        return command.answer(body=json.dumps(body))

    def _clean(self, connection: Connection, command: Command) -> Command:
        self._parts.store.clean(self._parts.now_ms())
        return command.answer()

    # --- how consumers take messages -----------------------------------------------------

    def _mode(self, topic: str, group: str) -> RequestMode:
        found = self._modes.message_request_mode_map.get(topic, {}).get(group)
        if found is not None:
            return found
        settings = self._parts.settings
        mode = "PULL" if topic.startswith(RETRY_PREFIX) else settings.request_mode
        return RequestMode(topic, group, mode, settings.pop_share_queues if mode == "POP" else 0)

    def _set_mode(self, connection: Connection, command: Command) -> Command:
        mode = json.loads(command.body, RequestMode)
        if mode.topic.startswith(RETRY_PREFIX):
            raise Refusal(Answer.NO_PERMISSION, "retry topic is not allowed to set mode")
        if mode.mode not in ("PULL", "POP"):
            raise Refusal(Answer.INVALID_PARAMETER, f"{mode.mode} is neither PULL nor POP")
        if self._parts.topics.get(mode.topic) is None:
            raise Refusal(Answer.TOPIC_NOT_EXIST, f"topic[{mode.topic}] not exist")
        if self._parts.groups.find(mode.consumer_group) is None:
            raise Refusal(Answer.SUBSCRIPTION_GROUP_NOT_EXIST, "subscription group does not exist")
        groups = self._modes.message_request_mode_map.setdefault(mode.topic, {})
        groups[mode.consumer_group] = mode
        self._modes_file.write(self._modes)
        return command.answer()

    def _all_modes(self, connection: Connection, command: Command) -> Command:
        return command.answer(body=json.dumps(self._modes))

    async def _assignment(self, connection: Connection, command: Command) -> Command:
        query = json.loads(command.body, AssignmentQuery)
        mode = self._mode(query.topic, query.consumer_group)
        route = await self._parts.registrar.servers.route(query.topic)
        chosen = None if route is None else self._assigned(query, mode, _readable(query, route))
        if chosen is None:
            return command.answer(body=b"{}")
        rows = [{"messageQueue": queue, "mode": mode.mode} for queue in chosen]
        return command.answer(body=json.dumps({"messageQueueAssignments": rows}))

    def _assigned(
        self, query: AssignmentQuery, mode: RequestMode, queues: list[MessageQueue]
    ) -> list[MessageQueue] | None:
        """Returns the queues of a consumer; None: it is to keep what it has."""
        if query.message_model == BROADCASTING:
            return queues
        group = self._parts.clients.consumers.get(query.consumer_group)
        if group is None or query.strategy_name not in _STRATEGIES:
            return None
        ids = sorted(group.ids())
        if query.client_id not in ids:
            return []
        divide = _STRATEGIES[query.strategy_name]
        share = divide(queues, len(ids), at := ids.index(query.client_id))
        if mode.mode != "POP":
            return share
        shared = mode.pop_share_queue_num
        if not 0 < shared < len(ids) - 1:
            # Everybody pops from all queues: -1 stands for any of a broker.
            return sorted({MessageQueue(q.topic, q.broker_name, -1) for q in queues})
        if len(ids) > len(queues):
            return [queues[at % len(queues)]] if queues else []
        for i in range(1, shared + 1):
            share = share + divide(queues, len(ids), (at + i) % len(ids))
        return share


def _readable(query: AssignmentQuery, route: RouteData) -> list[MessageQueue]:
    return sorted(
        MessageQueue(query.topic, queues.broker_name, number)
        for queues in route.queue_datas if queues.perm & PERM_READ
        for number in range(queues.read_queue_nums)
    )  # fmt: skip


def averagely(queues: list[MessageQueue], clients: int, at: int) -> list[MessageQueue]:
    """Returns neighbouring queues for the client at a place."""
    size, more = divmod(len(queues), clients)
    begin = at * size + min(at, more)
    return queues[begin : begin + size + (at < more)]


def by_circle(queues: list[MessageQueue], clients: int, at: int) -> list[MessageQueue]:
    """Returns every so-many-th queue for the client at a place."""
    return queues[at::clients]


_STRATEGIES = {"AVG": averagely, "AVG_BY_CIRCLE": by_circle}
