"""`convoy broker-container`: several brokers in one process. Requests add others (902) and remove
them (903). What escapes from one goes to a master beside it first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from convoymq.edges.http.exposition import Text
from convoymq.model.config.keys import key
from convoymq.model.config.loading import ConfigError, parse_text
from convoymq.model.errors import StorageFault
from convoymq.rocketmq.acting.bridge import Intake
from convoymq.rocketmq.broker.configuration import Configuration
from convoymq.rocketmq.broker.metrics import HELP, faults_of, write_broker
from convoymq.rocketmq.broker.service import Broker
from convoymq.rocketmq.broker.settings import UNSERVED, BrokerSettings
from convoymq.rocketmq.exposition import Exposition, ServerSettings
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal
from convoymq.rocketmq.remoting.connection import Connection, Handler, dispatch
from convoymq.rocketmq.remoting.server import RemotingServer
from convoymq.rocketmq.remoting.tls import ServerTls
from convoymq.rocketmq.settings import load, read_pairs

log = structlog.get_logger()

BROKERS_MAX = 64
UNSERVED_KEYS = UNSERVED | {"configBlackList"}
Pairs = list[tuple[str, str, str]]
Name = tuple[str, str, int]
"""Cluster, name and id of a broker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings(ServerSettings):
    """The container's own configuration."""

    port: int = key("listenPort", 10811, "Port for requests to the container.", low=0, high=65535)
    host: str = key("bindAddress", "0.0.0.0", "Address that it listens on.")
    name_servers: str = key(
        "namesrvAddr", "", "Name servers of brokers whose configuration has none."
    )
    paths: str = key(
        "brokerConfigPaths", "", "Configuration files of the brokers to begin with, with `:` "
        "between.",
    )  # fmt: skip


class Container:
    """See the module text. Made inside a running loop."""

    def __init__(self, settings: ContainerSettings) -> None:
        self.brokers: dict[Name, Broker] = {}
        self._settings = settings
        self._changing = asyncio.Lock()
        handlers: dict[int, Handler] = {
            Request.ADD_BROKER: self._on_add, Request.REMOVE_BROKER: self._on_remove,
        }  # fmt: skip
        self._server = RemotingServer(
            dispatch(handlers), lambda _connection: None, tls=ServerTls(settings)
        )
        self.exposition = Exposition(settings, self._render, self._faults)

    @classmethod
    def load(cls, path: str | None, flags: Sequence[str]) -> tuple[ContainerSettings, list[str]]:
        """Returns the settings, and the keys that were passed over. Raises ConfigError."""
        return load(ContainerSettings, path, flags, UNSERVED_KEYS)

    async def start(self) -> int:
        """Begins to serve, and starts the brokers; returns the container's port. Raises OSError,
        StorageFault, ConfigError."""
        port = await self._server.listen(self._settings.host, self._settings.port)
        for path in filter(None, self._settings.paths.split(":")):
            await self.add(read_pairs(path, ()))
        self.exposition.start()
        return port

    async def stop(self) -> None:
        """Ends all brokers."""
        await self.exposition.stop()
        await self._server.stop()
        for name in list(self.brokers):
            await self.remove(name)

    def _faults(self) -> list[str]:
        return [f"{':'.join(map(str, name))}: {fault}" for name, broker in self.brokers.items()
                for fault in faults_of(broker)]  # fmt: skip

    async def _render(self, *, per_object: bool, open_metrics: bool) -> str:
        text = Text(HELP, open_metrics=open_metrics)
        for broker in list(self.brokers.values()):
            await write_broker(text, broker, per_object=per_object)
        return text.render()

    async def add(self, pairs: Pairs) -> Name:
        """Starts a broker. Raises ConfigError, Refusal, OSError, StorageFault."""
        if all(key != "namesrvAddr" for key, _, _ in pairs):
            pairs = [*pairs, ("namesrvAddr", self._settings.name_servers, "container")]
        configuration = Configuration(pairs)
        settings = configuration.section(BrokerSettings)
        name = settings.cluster, settings.name, settings.id
        async with self._changing:
            if name in self.brokers:
                raise Refusal(
                    Answer.SYSTEM_ERROR, "Broker already exists in current broker container"
                )
            if len(self.brokers) >= BROKERS_MAX:
                raise Refusal(Answer.SYSTEM_ERROR, f"more than {BROKERS_MAX} brokers")
            made = Broker(configuration, neighbours=self._neighbours_of(name))
            port = await made.start()
            self.brokers[name] = made
        log.info("rocketmq.broker_added", broker=name[1], id=name[2], port=port)
        return name

    def _neighbours_of(self, name: Name) -> Callable[[], Sequence[Intake]]:
        return lambda: [b.group.intake for n, b in self.brokers.items() if n != name]

    async def remove(self, name: Name) -> None:
        """Ends a broker. Raises Refusal."""
        async with self._changing:
            found = self.brokers.pop(name, None)
            if found is None:
                raise Refusal(Answer.SYSTEM_ERROR, f"Broker not exist: {':'.join(map(str, name))}")
            await found.stop()
        log.info("rocketmq.broker_removed", broker=name[1], id=name[2])

    # --- requests -----------------------------------------------------------------------------

    async def _on_add(self, connection: Connection, command: Command) -> Command:
        path = command.fields.get("configPath")
        try:
            if path:
                pairs = read_pairs(path, ())
            else:
                pairs = parse_text(bytes(command.body).decode(), "request")
            await self.add(pairs)
        except (ConfigError, StorageFault, OSError, UnicodeDecodeError) as error:
            raise Refusal(Answer.SYSTEM_ERROR, f"start broker failed: {error}") from error
        return command.answer()

    async def _on_remove(self, connection: Connection, command: Command) -> Command:
        name = command.needed("brokerClusterName"), command.needed("brokerName")
        await self.remove((*name, command.number("brokerId")))
        return command.answer()
