"""Enters this start of a node into the replicated tree, before it opens its queues.

A start that the tree knows a later one of is refused: its directory is an older copy. The first
node of a new cluster also enters the virtual host and the user that a cluster begins with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from convoymq import __version__
from convoymq.edges.configuration import listeners
from convoymq.metadata.access import SHA256, hash_sha256
from convoymq.metadata.commands import Bootstrap, PutNode
from convoymq.model.config import Address, Config
from convoymq.model.errors import Misuse, Unavailable
from convoymq.node.process_info import place_of
from convoymq.replication import versions as supported
from convoymq.transport.listening import addresses_of

if TYPE_CHECKING:
    from convoymq.metadata.async_store import AsyncMetadataStore
    from convoymq.metadata.commands import Command
    from convoymq.metadata.machine import MetadataMachine
    from convoymq.node.cluster_entry import ClusterEntry
    from convoymq.node.data_directory import DataDirectory

LEADER_TIMEOUT_S = 600.0
REGISTER_TIMEOUT_S = 10.0


class Registration:
    """One start of a node."""

    def __init__(
        self,
        config: Config,
        data: DataDirectory,
        machine: MetadataMachine,
        store: AsyncMetadataStore,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._config = config
        self._data = data
        self._machine = machine
        self._store = store
        self._log = log

    async def run(self, entry: ClusterEntry) -> None:
        """Returns when the tree has this start of the node.

        Raises:
            Misuse: the directory is an older copy, or of another cluster.
        """
        await self._store.wait_for_leader(LEADER_TIMEOUT_S)
        identity, node = self._data.identity, self._config.node.id
        if not self._machine.vhosts and self._store.leader == node:
            await self._bootstrap()
        is_newest = await self.persist(self._put_node())
        if not is_newest:
            raise Misuse(
                f"{self._data.path} is an older copy: the cluster knows a later incarnation of "
                f"node {node} than {identity.incarnation}; empty the directory"
            )
        entry.registered()
        if not self._machine.vhosts:
            await self._bootstrap()
        if self._machine.cluster_id not in (identity.cluster, *identity.former):
            raise Misuse(
                f"{self._data.path} belongs to cluster {identity.cluster}, but its log to cluster "
                f"{self._machine.cluster_id}"
            )

    def _put_node(self) -> PutNode:
        config, identity = self._config, self._data.identity
        return PutNode(
            id=config.node.id,
            name=config.node_name,
            incarnation=identity.incarnation,
            addresses=addresses(config),
            directory=identity.directory,
            release=__version__,
            supports=supported.announced(),
            **place_of(config)._asdict(),
        )

    async def _bootstrap(self) -> None:
        defaults = self._config.defaults
        await self.persist(
            Bootstrap(
                vhost=defaults.vhost,
                user=defaults.user,
                password_hash=hash_sha256(defaults.password.encode()),
                algorithm=SHA256,
                cluster_name=self._config.cluster.name,
                cluster_id=self._data.cluster,
            )
        )

    async def persist(self, command: Command) -> object:
        """Returns the answer to a command, which is sent until there is one."""
        while True:
            try:
                return await self._store.execute(command, REGISTER_TIMEOUT_S)
            except Unavailable as error:
                self._log.warning("cluster.not_usable", reason=str(error))


def addresses(config: Config) -> dict[str, str]:
    """Returns the addresses that other nodes and clients reach this node by; no names."""
    found = {"link": config.cluster.advertise or str(config.link_address)}
    for listener in listeners(config):
        if listener.addresses:
            first = listener.addresses[0]
            found[listener.name] = str(Address(addresses_of(first.host)[0], first.port))
    return found
