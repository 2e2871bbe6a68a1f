"""Facts of a node that only its configuration and its list of edges have, for the HTTP API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convoymq.edges.http.config import ManagementConfig
from convoymq.edges.sasl import LoginConfig

if TYPE_CHECKING:
    from convoymq.edges.edge import Edge
    from convoymq.model.config import Config

LARGE_BODY_BYTES_MAX = 20_000_000
"""Of definitions and of a message to publish; RabbitMQ's bound of all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """See the module text."""

    message_bytes_max: int = LARGE_BODY_BYTES_MAX
    """Body limit of messages."""
    login: LoginConfig = field(default_factory=LoginConfig)
    session_timeout_s: float = 8 * 3600
    connections_max: int = 65_536
    certificate_file: str = ""
    """Certificate of the TLS listeners; "" = they have none."""
    cluster_size_target: int = 0
    """Number of nodes that should run; 0 = all known."""
    edges: Callable[[], Sequence[Edge]] = tuple
    """Returns the edges of the node."""


def served_by(config: Config, edges: Callable[[], Sequence[Edge]]) -> Served:
    """Returns the facts of a node with this configuration."""
    return Served(
        message_bytes_max=config.listeners.max_message_size,
        login=config.of(LoginConfig),
        session_timeout_s=60 * config.of(ManagementConfig).session_timeout_min,
        connections_max=config.listeners.connections_max,
        certificate_file=config.ssl.certfile,
        cluster_size_target=config.cluster.size_hint,
        edges=edges,
    )
