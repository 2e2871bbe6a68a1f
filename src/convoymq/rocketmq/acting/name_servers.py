"""A broker's view of its name servers: registers with each, asks them all.

A replica that one of them lists is alive, so that the members of a group are what all of them list
together.

`compatibleWithOldNameSrv`: name servers before RocketMQ 5 know neither heartbeats (a version query
refreshes a replica too) nor groups (a topic with the broker's name in it, whose route shows true
ids everywhere).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from convoymq.model.errors import Unavailable
from convoymq.rocketmq.client.routes import Routes
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import request
from convoymq.rocketmq.remoting.values import (
    MEMBER_TOPIC_PREFIX,
    ClusterInfo,
    DataVersion,
    KeyValues,
    MemberGroupBody,
    RegisterBrokerBody,
    TopicTable,
    crc32,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A replica as name servers have it, and how it speaks with them."""

    cluster: str
    name: str
    id: int
    address: str
    ha_address: str
    acting_enabled: bool = False
    silence_ms: int = 10_000
    """`brokerNotActiveTimeoutMillis`"""
    register_timeout_s: float = 24.0
    heartbeat_timeout_s: float = 1.0
    is_old_compatible: bool = True


@dataclass(frozen=True, slots=True)
class Registered:
    """Answers to a registration, together."""

    master: str | None = None
    ha_address: str | None = None
    ordered_topics: Mapping[str, str] | None = None


class NameServers(Routes):
    """See the module text."""

    def __init__(self, addresses: str, own: Identity, remoting: RemotingClient) -> None:
        super().__init__(addresses, remoting)
        self.own = own

    # --- this replica ---------------------------------------------------------------------

    async def register(
        self, topics: TopicTable, *, addresses: tuple[str, ...] | None = None
    ) -> Registered | None:
        """Registers with every name server, or some; returns None when none took it."""
        own = self.own
        body = json.dumps(RegisterBrokerBody(topics))
        fields = self._names() | {
            "haServerAddr": own.ha_address,
            "compressed": "false",
            "bodyCrc32": str(crc32(body)),
            "enableActingMaster": "true" if own.acting_enabled else "false",
        }
        if own.acting_enabled:
            fields["heartbeatTimeoutMillis"] = str(own.silence_ms)
        answers = await self.ask_all(
            Request.REGISTER_BROKER, fields, body, own.register_timeout_s, addresses
        )
        taken = [answer for answer in answers.values() if answer.code == Answer.SUCCESS]
        if not taken:
            return None
        master = next((a.fields["masterAddr"] for a in taken if a.fields.get("masterAddr")), None)
        ha = next((a.fields["haServerAddr"] for a in taken if a.fields.get("haServerAddr")), None)
        order = next((json.loads(a.body, KeyValues).table for a in taken if a.body), None)
        return Registered(master, ha, order)

    async def unregister(self) -> None:
        """Says that this replica ends."""
        fields, timeout_s = self._names(), self.own.heartbeat_timeout_s
        await self.ask_all(Request.UNREGISTER_BROKER, fields, b"", timeout_s)

    async def heartbeat(self, version: DataVersion) -> None:
        """Says that this replica is alive. Name servers that cannot be reached are passed over."""
        fields = self._names()
        code = Request.QUERY_DATA_VERSION if self.own.is_old_compatible else (
            Request.BROKER_HEARTBEAT
        )  # fmt: skip
        body = json.dumps(version) if self.own.is_old_compatible else b""

        async def one(address: str) -> None:
            timeout_s = self.own.heartbeat_timeout_s
            try:
                connection = await self._remoting.connected(address, timeout_s)
                connection.send(request(code, fields, body, one_way=True))
            except Unavailable:
                # What is asked next says so.
                return

        await asyncio.gather(*map(one, self.addresses))

    # --- others -----------------------------------------------------------------------------

    async def members(self) -> dict[int, str] | None:
        """Returns the replicas of this broker: id -> address; None when no name server answers."""
        own = self.own
        if own.is_old_compatible:
            route = await self.routes(MEMBER_TOPIC_PREFIX + own.name)
            if route is None:
                return None
            datas = [d for r in route for d in r.broker_datas]
            found = [d.broker_addrs for d in datas if (d.cluster, d.broker_name) == self._key]
        else:
            fields = {"clusterName": own.cluster, "brokerName": own.name}
            answers = await self.ask_all(Request.GET_BROKER_MEMBER_GROUP, fields)
            taken = [a for a in answers.values() if a.code == Answer.SUCCESS]
            if not taken:
                return None
            groups = [json.loads(a.body, MemberGroupBody).broker_member_group for a in taken]
            found = [group.broker_addrs for group in groups]
        members: dict[int, str] = {}
        for addresses in found:
            members.update(addresses)
        return members

    @property
    def _key(self) -> tuple[str, str]:
        return self.own.cluster, self.own.name

    async def brokers(self) -> dict[str, dict[int, str]] | None:
        """Returns all brokers of the own cluster: name -> id -> address."""
        answers = await self.ask_all(Request.GET_BROKER_CLUSTER_INFO, {})
        taken = [a for a in answers.values() if a.code == Answer.SUCCESS]
        if not taken:
            return None
        found: dict[str, dict[int, str]] = {}
        for answer in taken:
            for name, data in json.loads(answer.body, ClusterInfo).broker_addr_table.items():
                if data.cluster == self.own.cluster:
                    found.setdefault(name, {}).update(data.broker_addrs)
        return found

    # --- requests -----------------------------------------------------------------------------

    def _names(self) -> dict[str, str]:
        own = self.own
        return {
            "brokerName": own.name,
            "brokerAddr": own.address,
            "clusterName": own.cluster,
            "brokerId": str(own.id),
        }
