"""Looks at what a configuration needs of its machine, before a node founds or joins a cluster:
files that can be read, and addresses that are free. Texts name key and file or address."""

from __future__ import annotations

import errno

from convoymq.edges.configuration import listeners, tls_in_use
from convoymq.model.config import Address, Config, ConfigError
from convoymq.transport.credentials import read_secret, tls_contexts
from convoymq.transport.listening import listen


def check_files(config: Config) -> None:
    """Reads secret and certificates. Raises ConfigError, LinkRefused."""
    read_secret(config.cluster)
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


def check_addresses(config: Config) -> None:
    """Binds every address and lets it go. Raises ConfigError."""
    wanted: dict[str, tuple[Address, ...]] = {"cluster.listen": (config.link_address,)}
    wanted |= {listener.key: listener.addresses for listener in listeners(config)}
    for key, addresses in wanted.items():
        for address in addresses:
            try:
                sockets = listen(address.host, address.port)
            except OSError as error:
                hint = ""
                if error.errno == errno.EADDRINUSE:
                    hint = "; does another node run there? Give it another port"
                raise ConfigError(f"{key}: {error.strerror}{hint}") from None
            for each in sockets:
                each.close()
