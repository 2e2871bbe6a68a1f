"""Configuration of a node: one frozen object, built from defaults < file < environment < flags.

A configuration file holds `key = value` lines; `#` starts a comment. Key names are RabbitMQ's
where the meaning is the same. In the environment a key is written in capitals, with `CONVOY_` in
front and `_` for every dot: `raft.segment_max_entries` is `CONVOY_RAFT_SEGMENT_MAX_ENTRIES`. An
unknown key is an error that names the nearest known one. `reference` makes docs/configuration.md.
"""

from __future__ import annotations

from convoymq.model.config.client_sections import (
    AlarmsConfig,
    AmqpConfig,
    DefaultsConfig,
    FetchConfig,
    LogConfig,
    ManagementConfig,
    TraceConfig,
)
from convoymq.model.config.config import Config, key_table, known_keys, sections
from convoymq.model.config.loading import ConfigError, load, parse_text
from convoymq.model.config.node_sections import (
    ClusterConfig,
    ListenersConfig,
    NodeConfig,
    RaftConfig,
    SslConfig,
)
from convoymq.model.config.reference import reference
from convoymq.model.config.values import Address, parse_address, parse_bytes, parse_listener

__all__ = [
    "Address",
    "AlarmsConfig",
    "AmqpConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DefaultsConfig",
    "FetchConfig",
    "ListenersConfig",
    "LogConfig",
    "ManagementConfig",
    "NodeConfig",
    "RaftConfig",
    "SslConfig",
    "TraceConfig",
    "key_table",
    "known_keys",
    "load",
    "parse_address",
    "parse_bytes",
    "parse_listener",
    "parse_text",
    "reference",
    "sections",
]
