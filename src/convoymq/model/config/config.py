"""The configuration as a whole, and the table of its keys."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from convoymq.model.config.client_sections import (
    AlarmsConfig,
    AmqpConfig,
    DefaultsConfig,
    FetchConfig,
    LogConfig,
    ManagementConfig,
    ReconciliationConfig,
    TraceConfig,
)
from convoymq.model.config.keys import Key
from convoymq.model.config.node_sections import (
    ClusterConfig,
    ListenersConfig,
    NodeConfig,
    RaftConfig,
    SslConfig,
)
from convoymq.model.config.values import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a node is told. Build it with `load`; pass parts of it down."""

    node: NodeConfig = field(default_factory=NodeConfig)
    listeners: ListenersConfig = field(default_factory=ListenersConfig)
    ssl: SslConfig = field(default_factory=SslConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    raft: RaftConfig = field(default_factory=RaftConfig)
    amqp: AmqpConfig = field(default_factory=AmqpConfig)
    fetch: FetchConfig = field(default_factory=FetchConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    defaults: DefaultsConfig = field(default_factory=DefaultsConfig)
    reconciliation: ReconciliationConfig = field(default_factory=ReconciliationConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    management: ManagementConfig = field(default_factory=ManagementConfig)
    log: LogConfig = field(default_factory=LogConfig)
    file: str = field(default="", compare=False)
    """Absolute path of the configuration file that was read; empty = none."""

    @property
    def link_address(self) -> Address:
        """Returns the address where links are accepted."""
        listen = self.cluster.address
        return Address(listen.host, self.cluster.port or listen.port)

    @property
    def node_name(self) -> str:
        """Returns the name shown to people."""
        if self.node.name:
            return self.node.name
        import socket

        return f"convoy-{self.node.id}@{socket.gethostname().split('.')[0]}"


@cache
def sections() -> dict[str, Any]:
    """Returns name → class of the parts that have keys, in the order of the document."""
    hints = typing.get_type_hints(Config)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


@cache
def key_table() -> dict[tuple[str, str], Key]:
    """Returns (section, field) → key, in the order of the document."""
    return {
        (name, entry.name): entry.metadata["key"]
        for name, section in sections().items()
        for entry in dataclasses.fields(section)
    }


@cache
def by_name() -> dict[str, tuple[str, str]]:
    """Returns the name → (section, field)."""
    return {name: place for place, key in key_table().items() for name in key.names}


@cache
def by_prefix() -> dict[str, tuple[str, str]]:
    """Prefix of names of the user's choice → (section, field)."""
    return {key.collects: place for place, key in key_table().items() if key.collects}


def known_keys() -> list[str]:
    """Returns all key names, without those that end in a name of the user's choice."""
    return list(by_name())
