"""Proof that a node belongs to the cluster: the shared secret, and certificates."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from convoymq.model.config import ClusterConfig
from convoymq.transport.handshake import LinkRefused

if TYPE_CHECKING:
    import ssl

SECRET_BITS_REFUSED = 0o077


def read_secret(config: ClusterConfig) -> bytes:
    """Returns the configured secret. Raises LinkRefused when others may read its file."""
    if not config.secret_file:
        return config.secret.encode()
    try:
        with open(config.secret_file, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & SECRET_BITS_REFUSED:
                raise LinkRefused(
                    f"cluster.secret_file: others may read {config.secret_file} (mode {mode:04o}); "
                    "it must be for its owner alone (chmod 600)"
                )
            return file.read(4096).strip()
    except OSError as error:
        raise LinkRefused(f"cluster.secret_file: {error}") from None


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
