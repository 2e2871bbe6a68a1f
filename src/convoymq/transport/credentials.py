"""Proof that a node belongs to the cluster: the shared secret, and certificates."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from convoymq.model.config import ClusterConfig
from convoymq.transport.handshake import LinkRefused

if TYPE_CHECKING:
    import ssl

SECRET_BITS_REFUSED = 0o077


def read_secrets(config: ClusterConfig) -> list[bytes]:
    """Returns the configured secret, and then the one that is accepted as well, if there is one.
    Raises LinkRefused when others may read a file."""
    made = [config.secret.encode()]
    if config.secret_file:
        made = [_read("cluster.secret_file", config.secret_file)]
    if config.accepted_secret_file:
        accepted = _read("cluster.accepted_secret_file", config.accepted_secret_file)
        # An empty one would let everybody in.
        made += [accepted] if accepted else []
    return made


def _read(key: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & SECRET_BITS_REFUSED:
                raise LinkRefused(
                    f"{key}: others may read {path} (mode {mode:04o}); "
                    "it must be for its owner alone (chmod 600)"
                )
            return file.read(4096).strip()
    except OSError as error:
        raise LinkRefused(f"{key}: {error}") from None


def tls_contexts(config: ClusterConfig) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Returns (accepting, dialling), both of which demand a certificate of the cluster's
    authority."""
    if not config.tls_certfile:
        return None
    import ssl

    from convoymq.transport.tls import client_context, server_context

    files = config.tls_certfile, config.tls_keyfile
    made = (
        server_context(*files, authorities=config.tls_cacertfile, verify=ssl.CERT_REQUIRED),
        client_context(certificate=files[0], key=files[1], authorities=config.tls_cacertfile),
    )
    for context in made:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return made
