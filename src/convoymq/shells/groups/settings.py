"""Settings of a replica host, from the configuration."""

from __future__ import annotations

from convoymq.model.config import Config
from convoymq.replication.raft.types import RaftConfig


def host_config(config: Config) -> RaftConfig:
    """Returns the replica host's part of the configuration."""
    return RaftConfig(
        election_min_ms=config.raft.election_timeout_ms,
        in_flight_bytes_max=config.raft.link_window_bytes,
        deferral_ms=config.raft.deferral_ms,
        quorum_timeout_ms=config.raft.quorum_timeout_ms,
        hold_versions=config.raft.hold_versions,
    )
