"""Registration of a broker with name servers: at the start, again and again, for new topics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec
import structlog

from convoymq.rocketmq.acting.name_servers import Identity, NameServers
from convoymq.rocketmq.broker.settings import BrokerSettings
from convoymq.rocketmq.broker.topics import READ_WRITE, Topics
from convoymq.rocketmq.broker.types import Role
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.values import TopicConfig, TopicTable

log = structlog.get_logger()

AGAIN_S = 1.0
"""Time between two looks whether there is a connection to each name server."""
ANNOUNCE_TIMEOUT_S = 3.0


class Registrar:
    """See the module text.

    Attributes:
        on_master: called with the addresses of the master, for clients and for slaves, that a name
            server answers a slave's registration with.
    """

    def __init__(
        self,
        chosen: Callable[[], BrokerSettings],
        role: Role,
        topics: Topics,
        remoting: RemotingClient,
        ha_address: str,
    ) -> None:
        settings = chosen()
        identity = Identity(
            cluster=role.cluster, name=role.name, id=role.id, address=role.address,
            ha_address=ha_address, acting_enabled=settings.acting_master,
            silence_ms=settings.not_active_timeout_ms,
            register_timeout_s=settings.register_timeout_ms / 1000,
            heartbeat_timeout_s=settings.heartbeat_timeout_ms / 1000,
            is_old_compatible=settings.old_name_servers,
        )  # fmt: skip
        self.servers = NameServers(settings.name_servers, identity, remoting)
        self.on_master: list[Callable[[str, str], None]] = []
        self._settings = chosen
        self._role = role
        self._topics = topics
        self._remoting = remoting
        self._is_registered = False
        self._pending: dict[str, TopicConfig] = {}
        self._announcement: asyncio.Task[None] | None = None
        topics.changed = self._on_topics

    @property
    def is_registered(self) -> bool:
        """Returns whether a name server has taken this broker's registration and is connected."""
        return self._is_registered and any(map(self._remoting.is_connected, self.servers.addresses))

    # --- registration --------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps this broker registered."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            servers = self.servers.addresses
            if loop.time() >= due:
                due = loop.time() + self._settings().register_ms / 1000
            else:
                servers = tuple(s for s in servers if not self._remoting.is_connected(s))
            await self.register_all(servers)
            await asyncio.sleep(AGAIN_S)

    async def beat(self) -> None:
        """Sends signs of life."""
        while True:
            await asyncio.sleep(self._settings().heartbeat_ms / 1000)
            if not self._role.is_isolated:
                await self.servers.heartbeat(self._topics.version)

    async def register_all(self, servers: tuple[str, ...] | None = None) -> None:
        """Registers all topics, with some name servers or with all."""
        if not self._role.is_isolated and servers != ():
            await self._register(self._topics.table.values(), servers)

    async def _register(
        self, topics: Iterable[TopicConfig], servers: tuple[str, ...] | None = None
    ) -> None:
        allowed = self._settings().permission
        table = {topic.topic_name: topic for topic in topics}
        if allowed & READ_WRITE != READ_WRITE:
            table = {
                name: msgspec.structs.replace(topic, perm=topic.perm & allowed)
                for name, topic in table.items()
            }
        content = TopicTable(table, self._topics.version)
        found = await self.servers.register(content, addresses=servers)
        if found is None:
            return
        if not self._is_registered:
            self._is_registered = True
            log.info("rocketmq.registered", broker=self._role.name, id=self._role.id)
        if found.ordered_topics:
            self._topics.set_order(found.ordered_topics)
        if found.master and self._role.id:
            for call in self.on_master:
                call(found.master, found.ha_address or "")

    # --- new topics ----------------------------------------------------------------------

    def _on_topics(self, topics: list[TopicConfig]) -> None:
        if not self._is_registered or self._role.is_isolated:
            return
        self._pending.update((topic.topic_name, topic) for topic in topics)
        if self._announcement is None:
            self._announcement = asyncio.get_running_loop().create_task(self._announce())

    async def _announce(self) -> None:
        try:
            while self._pending:
                topics, self._pending = self._pending, {}
                await self._register(topics.values())
        finally:
            self._announcement = None

    async def announced(self) -> None:
        """Waits until name servers know the topics that were made, for a while at most."""
        task = self._announcement
        if task is not None:
            await asyncio.wait((task,), timeout=ANNOUNCE_TIMEOUT_S)

    async def stop(self) -> None:
        """Has name servers forget this broker."""
        if self._announcement is not None:
            self._announcement.cancel()
        if self._is_registered:
            await self.servers.unregister()
