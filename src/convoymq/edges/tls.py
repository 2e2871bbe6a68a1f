"""TLS of the ports for clients."""

from __future__ import annotations

import ssl

from convoymq.model.config import Config


def client_tls(config: Config) -> ssl.SSLContext:
    """Returns the TLS context of client listeners. Raises OSError."""
    options = config.ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(options.certfile, options.keyfile, options.password or None)
    if options.cacertfile:
        context.load_verify_locations(options.cacertfile)
    if options.verify == "verify_peer":
        strict = options.fail_if_no_peer_cert
        context.verify_mode = ssl.CERT_REQUIRED if strict else ssl.CERT_OPTIONAL
    return context
