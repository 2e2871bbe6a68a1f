"""TLS of the ports for clients."""

from __future__ import annotations

import ssl

from convoymq.model.config import SslConfig
from convoymq.transport.tls import server_context


def client_tls(options: SslConfig) -> ssl.SSLContext:
    """Returns the TLS context of listeners with these keys. Raises OSError."""
    verify = ssl.CERT_NONE
    if options.verify == "verify_peer":
        verify = ssl.CERT_REQUIRED if options.fail_if_no_peer_cert else ssl.CERT_OPTIONAL
    return server_context(
        options.certfile,
        options.keyfile,
        password=options.password,
        authorities=options.cacertfile,
        verify=verify,
        versions=options.versions,
        ciphers=options.ciphers,
    )
