"""Asks name servers and brokers what a node shows of them. Nothing is kept but connections.

| shown | asked |
|---|---|
| groups | all name servers, 106; their answers are joined |
| a group | each replica, 28 |
| its topics | the smallest id that answers, 21 |
| a topic | that one, 202 and 300 |
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from convoymq.edges.http.broker_groups import BrokerGroups
from convoymq.edges.http.json_values import count_in
from convoymq.model.errors import NotFound, PeerError, SyntaxFault, Unavailable
from convoymq.model.json import JsonObject
from convoymq.model.slices import in_slices
from convoymq.rocketmq.broker.names import is_system
from convoymq.rocketmq.broker.values import MessageQueue
from convoymq.rocketmq.client.routes import Routes
from convoymq.rocketmq.observer.config import RocketmqConfig
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.signing import Signer
from convoymq.rocketmq.remoting.values import MASTER_ID, BrokerData, ClusterInfo, TopicConfig
from convoymq.transport.tls import client_context

T = TypeVar("T")


class _Runtime(msgspec.Struct):
    table: dict[str, str]


class _Topics(msgspec.Struct, rename="camel"):
    topic_config_table: dict[str, TopicConfig]


class _Queue(msgspec.Struct, rename="camel"):
    min_offset: int
    max_offset: int
    last_update_timestamp: int = 0


class _TopicStats(msgspec.Struct, rename="camel"):
    offset_table: dict[str, _Queue]


class _Groups(msgspec.Struct, rename="camel"):
    group_list: list[str]


class ObservedGroups(BrokerGroups):
    """See the module text. Made inside a running loop."""

    def __init__(self, config: RocketmqConfig) -> None:
        self._timeout_s = config.timeout_ms / 1000
        self._remoting = RemotingClient(
            tls=client_context(authorities=config.authorities) if config.authorities else None,
            sign=Signer(config.access_key, config.secret_key) if config.access_key else None,
        )
        self._servers = Routes(config.name_servers, self._remoting)

    async def stop(self) -> None:
        await self._remoting.stop()

    # --- what is shown -------------------------------------------------------------------------

    async def groups(self) -> list[JsonObject]:
        found = await self._brokers()
        return [_row(found[name]) for name in sorted(found)]

    async def group(self, name: str) -> JsonObject:
        data = await self._find(name)
        answers = await asyncio.gather(
            *(self._try(address, Request.GET_BROKER_RUNTIME_INFO)
              for address in data.broker_addrs.values())
        )  # fmt: skip
        states = [_state(answer) for answer in answers]
        end = max((count_in(state, "log_end") for state in states), default=0)
        replicas = []
        for (number, address), state in zip(data.broker_addrs.items(), states, strict=True):
            if "log_end" in state:
                state["lag"] = end - count_in(state, "log_end")
            replicas.append({"id": number, "address": address, **state})
        return _row(data) | {"replicas": replicas}

    async def topics(self, name: str) -> list[JsonObject]:
        answer = await self._ask_first(await self._find(name), Request.GET_ALL_TOPIC_CONFIG, {})
        # RocketMQ's JSON may have to be read by hand: in a thread, however many topics there are.
        found = await asyncio.to_thread(_read, answer, _Topics)
        return [
            {
                "name": topic.topic_name, "read_queues": topic.read_queue_nums,
                "write_queues": topic.write_queue_nums, "permission": topic.perm,
                "ordered": topic.order, "system": is_system(topic.topic_name),
            }
            async for _, topic in in_slices(sorted(found.topic_config_table.items()))
        ]  # fmt: skip

    async def topic(self, name: str, topic: str) -> JsonObject:
        data, fields = await self._find(name), {"topic": topic}
        stats, consumers = await asyncio.gather(
            self._ask_first(data, Request.GET_TOPIC_STATS_INFO, fields),
            self._ask_first(data, Request.QUERY_TOPIC_CONSUME_BY_WHO, fields),
        )
        table = (await asyncio.to_thread(_read, stats, _TopicStats)).offset_table
        queues = {
            json.loads(key.encode(), MessageQueue).queue_id: queue for key, queue in table.items()
        }
        return {
            "name": topic,
            "consumer_groups": sorted(_read(consumers, _Groups).group_list),
            "queues": [
                {"queue": number, "min_offset": queue.min_offset, "max_offset": queue.max_offset,
                 "last_stored_ms": queue.last_update_timestamp}
                for number, queue in sorted(queues.items())
            ],
        }  # fmt: skip

    # --- questions -----------------------------------------------------------------------------

    async def _brokers(self) -> dict[str, BrokerData]:
        """Returns all groups; a replica counts as there if one name server has it."""
        answers = await self._servers.ask_all(
            Request.GET_BROKER_CLUSTER_INFO, {}, timeout_s=self._timeout_s
        )
        views = [a for a in answers.values() if a.code == Answer.SUCCESS]
        if not views:
            reasons = [*map(_reason, answers.values()), *self._servers.silent.values()]
            raise Unavailable(f"no name server answers: {reasons[0]}")
        found: dict[str, BrokerData] = {}
        for view in views:
            for name, data in _read(view, ClusterInfo).broker_addr_table.items():
                known = found.setdefault(name, data)
                known.broker_addrs = dict(sorted((known.broker_addrs | data.broker_addrs).items()))
        return found

    async def _find(self, name: str) -> BrokerData:
        found = (await self._brokers()).get(name)
        if found is None:
            raise NotFound(f"no broker group '{name}'")
        return found

    async def _ask_first(self, data: BrokerData, code: int, fields: Mapping[str, str]) -> Command:
        """Returns the answer of the first replica that answers: all have the same topics."""
        answer: Command | Unavailable | PeerError = Unavailable("it has no replica")
        for address in data.broker_addrs.values():
            answer = await self._try(address, code, fields)
            if isinstance(answer, Command):
                break
        if isinstance(answer, Command) and answer.code == Answer.SUCCESS:
            return answer
        if isinstance(answer, Command) and answer.code == Answer.TOPIC_NOT_EXIST:
            raise NotFound(_reason(answer))
        raise Unavailable(f"broker group '{data.broker_name}': {_reason(answer)}")

    async def _try(
        self, address: str, code: int, fields: Mapping[str, str] | None = None
    ) -> Command | Unavailable | PeerError:
        """Returns an answer, or why there is none."""
        try:
            return await self._remoting.ask(
                address, request(code, dict(fields or {})), self._timeout_s
            )
        except (Unavailable, PeerError) as error:
            return error


def _read(answer: Command, kind: type[T]) -> T:
    try:
        return json.loads(answer.body, kind)
    except SyntaxFault as error:
        raise Unavailable(error.text) from None


def _reason(answer: Command | Unavailable | PeerError) -> str:
    return f"code {answer.code}: {answer.remark}" if isinstance(answer, Command) else answer.text


def _row(data: BrokerData) -> JsonObject:
    ids = list(data.broker_addrs)
    acts = ids and ids[0] != MASTER_ID and data.enable_acting_master
    return {
        "name": data.broker_name, "cluster": data.cluster,
        "master": data.broker_addrs.get(MASTER_ID), "acting": ids[0] if acts else None,
        "members": [f"{number}@{address}" for number, address in data.broker_addrs.items()],
    }  # fmt: skip


def _state(answer: Command | Unavailable | PeerError) -> JsonObject:
    """Returns what a replica says of itself."""
    if not isinstance(answer, Command) or answer.code != Answer.SUCCESS:
        return {"running": False, "reason": _reason(answer)}
    try:
        table = _read(answer, _Runtime).table
        return {
            "running": True, "version": table.get("brokerVersionDesc", ""),
            "runs_special_services": table.get("brokerActive") == "true",
            "log_begin": int(table.get("commitLogMinOffset", 0)),
            "log_end": int(table["commitLogMaxOffset"]),
            "messages_in": int(table.get("msgPutTotalTodayNow", 0)),
            "messages_out": int(table.get("msgGetTotalTodayNow", 0)),
        }  # fmt: skip
    except (Unavailable, KeyError, ValueError) as error:
        return {"running": False, "reason": f"its answer cannot be read: {error}"}
