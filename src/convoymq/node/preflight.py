"""Looks at what a configuration needs of its machine, before a node founds or joins a cluster:
files that can be read, addresses that are free, the machine itself. Texts name key and file or
address."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from convoymq.edges.configuration import listeners, tls_in_use
from convoymq.model.config import Address, Config, ConfigError
from convoymq.model.machine_checks import ERROR, WARNING, machine_findings
from convoymq.transport.credentials import read_secrets, tls_contexts
from convoymq.transport.listening import listen
from convoymq.transport.shared_sockets import Bound, bind

T = TypeVar("T")

log = structlog.get_logger()


def check_machine(config: Config) -> None:
    """Looks at files, memory, disk and clock, and logs what there is too little of. Raises
    ConfigError: the node cannot serve with it."""
    data = Path(config.node.data_dir)
    for finding in machine_findings(data, config.alarms.disk_absolute):
        if finding.level == ERROR:
            raise ConfigError(f"{finding.check}: {finding.text}")
        if finding.level == WARNING:
            log.warning("node.machine_low", check=finding.check, text=finding.text)


def check_files(config: Config) -> None:
    """Reads secret and certificates. Raises ConfigError, LinkRefused."""
    read_secrets(config.cluster)
    if config.cluster.tls_certfile:
        _readable(
            {
                "cluster.tls.certfile": config.cluster.tls_certfile,
                "cluster.tls.keyfile": config.cluster.tls_keyfile,
                "cluster.tls.cacertfile": config.cluster.tls_cacertfile,
            }
        )
        try:
            tls_contexts(config.cluster)
        except OSError as error:
            raise ConfigError(f"cluster.tls.certfile, .keyfile and .cacertfile: {error}") from None
    for options in tls_in_use(config):
        files = options.files()
        _readable(files)
        # Takes OpenSSL with it, which a node without TLS does not load.
        from convoymq.edges.tls import client_tls

        try:
            client_tls(options)
        except OSError as error:
            raise ConfigError(f"{', '.join(files)}: {error}") from None


def _readable(files: dict[str, str]) -> None:
    for key, path in files.items():
        try:
            if path:
                open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"{key}: {path}: {error.strerror}") from None


def check_addresses(config: Config, *, has_clients: bool = False) -> None:
    """Binds every address and lets it go. Raises ConfigError.

    Args:
        has_clients: the process has inherited the addresses of clients.
    """
    wanted: dict[str, tuple[Address, ...]] = {"cluster.listen": (config.link_address,)}
    if not has_clients:
        wanted |= {listener.key: listener.addresses for listener in listeners(config)}
    for key, addresses in wanted.items():
        for address in addresses:
            for each in _bound(key, lambda: listen(address.host, address.port)):  # noqa: B023
                each.close()


def bind_clients(config: Config) -> tuple[Bound, Bound]:
    """Binds the addresses of clients, for the processes of a machine: the AMQP ports, and the ports
    that edges have of their own. Raises ConfigError."""
    shared = {listener.key for listener in config.listeners.listeners()}
    bound: tuple[dict[tuple[str, int], Sequence[socket.socket]], ...] = ({}, {})
    for listener in listeners(config):
        found = _bound(listener.key, lambda: bind(listener.addresses))  # noqa: B023
        bound[listener.key not in shared].update(found)
    return bound[0], bound[1]


def _bound(key: str, bind: Callable[[], T]) -> T:
    """Returns what binds the addresses of a key. Raises ConfigError."""
    try:
        return bind()
    except OSError as error:
        hint = ""
        if error.errno == errno.EADDRINUSE:
            hint = "; does another node run there? Give it another port"
        raise ConfigError(f"{key}: {error.strerror}{hint}") from None
