"""The configuration as a whole, and the table of its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from convoymq.model.config.client_sections import (
    AlarmsConfig,
    DefaultsConfig,
    LogConfig,
    OtlpConfig,
    ReconciliationConfig,
    TraceConfig,
)
from convoymq.model.config.identity_sections import (
    AuthConfig,
    IdentityConfig,
    LdapConfig,
    OAuthConfig,
)
from convoymq.model.config.keys import Key, Section
from convoymq.model.config.node_sections import (
    ClusterConfig,
    ListenersConfig,
    NodeConfig,
    RaftConfig,
)
from convoymq.model.config.tls_sections import (
    MANAGEMENT_SSL,
    PROMETHEUS_SSL,
    SslConfig,
)
from convoymq.model.config.values import Address

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a node is told. Build it with `load`; pass parts of it down."""

    node: NodeConfig = field(default_factory=NodeConfig)
    listeners: ListenersConfig = field(default_factory=ListenersConfig)
    ssl: SslConfig = field(default_factory=SslConfig)
    management_ssl: SslConfig = field(default_factory=MANAGEMENT_SSL)
    prometheus_ssl: SslConfig = field(default_factory=PROMETHEUS_SSL)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    raft: RaftConfig = field(default_factory=RaftConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    otlp: OtlpConfig = field(default_factory=OtlpConfig)
    defaults: DefaultsConfig = field(default_factory=DefaultsConfig)
    reconciliation: ReconciliationConfig = field(default_factory=ReconciliationConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    oauth2: OAuthConfig = field(default_factory=OAuthConfig)
    ldap: LdapConfig = field(default_factory=LdapConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    edges: Mapping[type[Section], Section] = field(default_factory=dict)
    """Sections of edges that were given anything."""
    file: str = field(default="", compare=False)
    """Absolute path of the configuration file that was read; empty = none."""

    def of(self, kind: type[S]) -> S:
        """Returns the section of an edge."""
        found = self.edges.get(kind)
        return found if isinstance(found, kind) else kind()

    @property
    def identity(self) -> IdentityConfig:
        """Returns what decides who clients are."""
        return IdentityConfig(auth=self.auth, oauth2=self.oauth2, ldap=self.ldap)

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


class Keys:
    """All keys: of a node itself, and of the edges that it may have.

    Args:
        edges: sections of the edges.
    """

    def __init__(self, edges: Iterable[type[Section]] = ()) -> None:
        self.edges = tuple(edges)
        made = {entry.name: entry.default_factory for entry in dataclasses.fields(Config)}
        own = {
            name: cast("type[Any]", kind)
            for name, kind in made.items()
            if dataclasses.is_dataclass(kind)
        }
        self.sections: dict[str, Any] = own | {kind.NAME: kind for kind in self.edges}
        """Name -> class of the parts that have keys, in the order of the document."""
        self.table: dict[tuple[str, str], Key] = {
            (name, entry.name): entry.metadata["key"]
            for name, section in self.sections.items()
            for entry in dataclasses.fields(section)
            if "key" in entry.metadata
        }
        """(section, field) -> key, in the order of the document."""
        self.by_name = {name: place for place, key in self.table.items() for name in key.names}
        """Name of a key -> (section, field)."""
        self.by_prefix = {key.collects: at for at, key in self.table.items() if key.collects}
        """Prefix of names of the user's choice -> (section, field)."""

    def part(self, config: Config, name: str) -> object:
        """Returns a section of a configuration by its name."""
        kind = self.sections[name]
        return config.of(kind) if kind in self.edges else getattr(config, name)
