"""The configuration of a node together with the sections of its client protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from convoymq.edges.registry import edge_sections
from convoymq.model import config
from convoymq.model.config import Config, Keys, Listener, SslConfig


def keys() -> Keys:
    """Returns all keys."""
    return Keys(edge_sections())


def load(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Config:
    """See `model.config.load`."""
    return config.load(path, environment, flags, edge_sections())


def reference() -> str:
    """Returns docs/configuration.md."""
    return config.reference(keys())


def listeners(config: Config) -> Iterator[Listener]:
    """Yields what a node listens for on behalf of clients: the AMQP port, then the edges' own."""
    yield from config.listeners.listeners()
    for kind in edge_sections():
        yield from config.of(kind).listeners()


def tls_in_use(config: Config) -> Iterator[SslConfig]:
    """Yields the TLS of each kind of listener for clients that has an address."""
    for listener in listeners(config):
        if listener.addresses and listener.tls:
            yield getattr(config, listener.tls)
