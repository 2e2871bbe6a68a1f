"""Configuration of a node: one frozen object, built from defaults < file < environment < flags.

A configuration file holds `key = value` lines; `#` starts a comment. Key names are RabbitMQ's
where the meaning is the same. In the environment a key is written in capitals, with `CONVOY_` in
front and `_` for every dot: `raft.segment_max_entries` is `CONVOY_RAFT_SEGMENT_MAX_ENTRIES`. An
unknown key is an error that names the nearest known one. `reference` makes docs/configuration.md.
Client protocols have sections of their own: `edges.configuration` loads all of them.
"""

from __future__ import annotations

from convoymq.model.config.client_sections import (
    AlarmsConfig,
    DefaultsConfig,
    LogConfig,
    OtlpConfig,
    ReconciliationConfig,
    TraceConfig,
)
from convoymq.model.config.config import Config, Keys
from convoymq.model.config.identity_sections import (
    AuthConfig,
    IdentityConfig,
    LdapConfig,
    OAuthConfig,
)
from convoymq.model.config.keys import Section
from convoymq.model.config.loading import ConfigError, load, parse_text
from convoymq.model.config.node_sections import (
    ClusterConfig,
    ListenersConfig,
    NodeConfig,
    RaftConfig,
)
from convoymq.model.config.reference import reference
from convoymq.model.config.tls_sections import SslConfig
from convoymq.model.config.values import (
    Address,
    Listener,
    parse_address,
    parse_bytes,
    parse_listener,
)

__all__ = [
    "Address",
    "AlarmsConfig",
    "AuthConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DefaultsConfig",
    "IdentityConfig",
    "Keys",
    "LdapConfig",
    "Listener",
    "ListenersConfig",
    "LogConfig",
    "NodeConfig",
    "OAuthConfig",
    "OtlpConfig",
    "RaftConfig",
    "ReconciliationConfig",
    "Section",
    "SslConfig",
    "TraceConfig",
    "load",
    "parse_address",
    "parse_bytes",
    "parse_listener",
    "parse_text",
    "reference",
]
