"""Questions to name servers, which share nothing. One that does not answer keeps nobody: answers of
the others count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from convoymq.model.errors import PeerError, Unavailable
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.values import PERM_WRITE, BrokerData, QueueData, RouteData

log = structlog.get_logger()

ASK_TIMEOUT_S = 1.0
"""One that hangs must not keep a slave from what others say."""


def merged_route(routes: Iterable[RouteData]) -> RouteData:
    """Returns the brokers of all routes. Of a broker that several have, the entry of one that lets
    clients write counts: the others have dropped its master, or not got it yet."""
    found: dict[str, tuple[QueueData, BrokerData]] = {}
    for route in routes:
        datas = {data.broker_name: data for data in route.broker_datas}
        for queues in route.queue_datas:
            known = found.get(queues.broker_name)
            if known is None or queues.perm & PERM_WRITE & ~known[0].perm:
                found[queues.broker_name] = queues, datas[queues.broker_name]
    return RouteData([queues for queues, _ in found.values()], [data for _, data in found.values()])


class Routes:
    """See the module text.

    Args:
        addresses: `host:port`, with `;` between.
    """

    def __init__(self, addresses: str, remoting: RemotingClient) -> None:
        self.addresses = tuple(a for a in (x.strip() for x in addresses.split(";")) if a)
        self._remoting = remoting
        self.ask_timeout_s = ASK_TIMEOUT_S
        self.silent: dict[str, str] = {}
        """Name servers that did not answer the last question, and why."""

    async def route(self, topic: str) -> RouteData | None:
        """Returns where a topic is, as all name servers together have it."""
        routes = await self.routes(topic)
        return merged_route(routes) if routes else None

    async def routes(self, topic: str) -> list[RouteData] | None:
        """Returns the routes that name servers have; None when none of them answers."""
        fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
        answers = await self.ask_all(Request.GET_ROUTEINFO_BY_TOPIC, fields)
        known = [
            answer
            for answer in answers.values()
            if answer.code in (Answer.SUCCESS, Answer.TOPIC_NOT_EXIST)
        ]
        if not known:
            return None
        return [json.loads(a.body, RouteData) for a in known if a.code == Answer.SUCCESS]

    async def ask_all(
        self,
        code: int,
        fields: dict[str, str],
        body: bytes = b"",
        timeout_s: float | None = None,
        addresses: tuple[str, ...] | None = None,
    ) -> dict[str, Command]:
        """Returns the answers of those that answer. `timeout_s`: None = `ask_timeout_s`."""
        connect_s = self.ask_timeout_s
        answer_s = connect_s if timeout_s is None else timeout_s
        answers: dict[str, Command] = {}

        async def one(address: str) -> None:
            try:
                connection = await self._remoting.connected(address, min(connect_s, answer_s))
                answers[address] = await connection.request(request(code, fields, body), answer_s)
            except (Unavailable, PeerError) as error:
                if address not in self.silent:
                    log.warning("rocketmq.name_server_silent", address=address, reason=error.text)
                self.silent[address] = error.text
                return
            self.silent.pop(address, None)
            if answers[address].code == Answer.SYSTEM_ERROR:
                remark = answers[address].remark
                log.warning("rocketmq.name_server_refused", address=address, reason=remark)

        await asyncio.gather(*map(one, self.addresses if addresses is None else addresses))
        return answers
