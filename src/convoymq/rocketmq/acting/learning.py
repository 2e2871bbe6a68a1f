"""Learns, before special services begin, which messages of this broker others have.

Two questions, with one *generation*, go out before the first message may leave:

1. The other slaves of the group name the brokers that they have sent to (`KeyLog.targets`, written
   before the first attempt). A slave that has answered begins with no other broker under an
   earlier generation.
2. These brokers send the keys that they have, and take no attempts of earlier generations.

Services wait for a broker of the second question that does not answer; of others nobody needs to
know anything. Where a slave does not name its targets (it is away, or has lost its disk, or is
RocketMQ's) all brokers of the cluster are asked. Source: docs/adr/0189.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import structlog

from convoymq.model.errors import BrokerError, Unavailable
from convoymq.rocketmq.acting.bridge import Bridge
from convoymq.rocketmq.acting.escape import KeyTable
from convoymq.rocketmq.acting.key_log import KeyLog
from convoymq.rocketmq.acting.name_servers import NameServers
from convoymq.rocketmq.acting.settings import ActingSettings
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import MASTER_ID, EscapeKeys

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker
    from convoymq.rocketmq.special.service import SpecialServices

log = structlog.get_logger()

ASK_TIMEOUT_S = 3.0
FORGOTTEN_TIMES = 6
"""After so many time-outs of a silent broker nothing is under way that a former life of this
replica has sent."""


class KeyLearner:
    """See the module text.

    Args:
        members: other replicas that name servers list.
    """

    def __init__(
        self,
        parts: Broker,
        settings: ActingSettings,
        keys: KeyLog,
        bridge: Bridge,
        follower: SpecialServices | None,
        members: Callable[[], Mapping[int, str]],
    ) -> None:
        self._parts = parts
        self._replicas = settings.replicas
        self._keys = keys
        self._bridge = bridge
        self._follower = follower
        self._members = members
        self._name_servers: NameServers = parts.registrar.servers
        parts.register(Request.GET_ESCAPE_KEYS, self._answer)

    async def learn(self) -> None:
        """Has special services pass over what other brokers have of ours, and other replicas of
        ours no more sent. Raises Unavailable: a broker that may have some does not answer."""
        if not await self.look_for_holders():
            raise Unavailable("no name server answers")
        own = self._parts.role.name
        earlier = max(self._bridge.generation, self._keys.generations.of(own))
        generation = max(self._parts.now_ms(), earlier + 1)
        while True:
            targets, known = await self._targets(generation)
            found = await self._ask_holders(targets, generation)
            highest = max((known, *(each.generation for each in found.values())))
            if highest <= generation:
                break
            # Another replica's clock is ahead.
            generation = highest + 1
        self._bridge.generation = generation
        if targets is None:
            self._keys.complete(_with_keys(found))
        if self._follower is not None:
            table = KeyTable()
            for each in found.values():
                table.merge(own, each.ranges)
            self._follower.pass_over(table.of(own))

    async def look_for_holders(self) -> bool:
        """Enters the brokers of the cluster; returns whether a name server knows them."""
        brokers = await self._name_servers.brokers()
        if brokers is not None:
            self._keys.on_listed(brokers, self._parts.now_ms())
        return brokers is not None

    async def complete(self) -> None:
        """Finds the targets of a former life of this replica, of which it has no file."""
        pause_s = FORGOTTEN_TIMES * self._parts.settings.not_active_timeout_ms / 1000
        while not self._keys.is_complete:
            await asyncio.sleep(pause_s)
            try:
                if await self.look_for_holders():
                    self._keys.complete(_with_keys(await self._ask_holders(None, 0)))
            except BrokerError as error:
                log.info("rocketmq.member_silent", address="cluster", reason=error.text)

    async def _targets(self, generation: int) -> tuple[set[str] | None, int]:
        """Asks the other slaves; returns the brokers that slaves have sent to, None where one does
        not name all of them, and the highest generation that one takes. Raises Unavailable: one
        that a slave names is not listed."""
        own = self._parts.role
        slaves = [address for n, address in self._members().items() if n != MASTER_ID]
        answers = await asyncio.gather(*(self._ask_slave(each, generation) for each in slaves))
        known = max((each.generation for each in answers if each is not None), default=0)
        named = [each for each in answers if each is not None and each.targets is not None]
        awaited = self._replicas - 1 - (own.id != MASTER_ID)
        is_whole = len(named) >= awaited and all(each.is_complete for each in named)
        targets = set(self._keys.lasting_targets())
        for each in named:
            targets.update(each.targets or ())
        if unlisted := sorted(targets - self._keys.holders().keys()):
            # The slave remembers it: all of them, and name servers, may have just restarted.
            raise Unavailable(f"{unlisted} may have messages of {own.name}, and are not listed")
        return targets if is_whole and self._keys.is_complete else None, known

    async def _ask_slave(self, address: str, generation: int) -> EscapeKeys | None:
        try:
            return await self._ask(address, generation)
        except (BrokerError, ValueError) as error:
            log.info("rocketmq.member_silent", address=address, reason=str(error))
            return None

    async def _ask_holders(
        self, targets: set[str] | None, generation: int
    ) -> dict[str, EscapeKeys]:
        """Returns name -> answer of these brokers, of all where None. Raises Unavailable."""
        holders = {
            name: replicas
            for name, replicas in self._keys.holders().items()
            if targets is None or name in targets
        }
        asked = (self._ask_holder(*each, generation) for each in holders.items())
        return dict(zip(holders, await asyncio.gather(*asked), strict=True))

    async def _ask_holder(
        self, name: str, replicas: Mapping[int, str], generation: int
    ) -> EscapeKeys:
        """Asks a broker: its master, or a replica that has its log. Raises Unavailable."""
        for _, address in sorted(replicas.items()):
            try:
                return await self._ask(address, generation)
            except (BrokerError, ValueError) as error:
                log.info("rocketmq.member_silent", address=address, reason=str(error))
        raise Unavailable(
            f"{name} may have messages of {self._parts.role.name}, and does not answer"
        )

    async def _ask(self, address: str, generation: int) -> EscapeKeys:
        """Raises Unavailable, PeerError, ValueError."""
        fields = {"brokerName": self._parts.role.name, "generation": str(generation)}
        connection = await self._parts.remoting.connected(address, ASK_TIMEOUT_S)
        asked = request(Request.GET_ESCAPE_KEYS, fields)
        answer = await connection.request(asked, ASK_TIMEOUT_S)
        if answer.code == Answer.REQUEST_CODE_NOT_SUPPORTED:
            # RocketMQ's, which has no keys.
            return EscapeKeys()
        if answer.code != Answer.SUCCESS:
            # It has not promised anything: its disk may be full.
            raise Unavailable(answer.remark or f"code {answer.code}")
        found = json.loads(answer.body, EscapeKeys)
        KeyTable().merge(self._parts.role.name, found.ranges)
        return found

    def _answer(self, _connection: Connection, command: Command) -> Command:
        keys, name = self._keys, command.needed("brokerName")
        generation = keys.generations.raise_to(name, command.number("generation", 0))
        # Before the answer: the promise holds after a crash.
        keys.persist()
        is_own = name == self._parts.role.name
        targets = keys.lasting_targets() if is_own else None
        found = EscapeKeys(keys.of(name), generation, targets, keys.is_complete)
        return command.answer(body=json.dumps(found))


def _with_keys(found: Mapping[str, EscapeKeys]) -> Iterable[str]:
    return [name for name, each in found.items() if each.ranges]
