"""TLS contexts, for listeners and for connections to them."""

from __future__ import annotations

import ssl


def server_context(
    certificate: str,
    key: str,
    *,
    password: str = "",
    authorities: str = "",
    verify: ssl.VerifyMode = ssl.CERT_NONE,
) -> ssl.SSLContext:
    """Returns the context of a listener. Raises OSError, ssl.SSLError for files that cannot be
    used.

    Args:
        certificate, key, authorities: paths of PEM files; authorities are those of clients.
        verify: whether clients need a certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = verify
    return _filled(context, certificate, key, password, authorities)


def client_context(
    *,
    certificate: str = "",
    key: str = "",
    password: str = "",
    authorities: str = "",
    verify: ssl.VerifyMode = ssl.CERT_REQUIRED,
) -> ssl.SSLContext:
    """Returns the context of connections to others, which are known by their authority and not by
    the names of their hosts. Raises OSError, ssl.SSLError.

    Args:
        certificate, key: of this side; "" = none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = verify
    return _filled(context, certificate, key, password, authorities)


def _filled(
    context: ssl.SSLContext, certificate: str, key: str, password: str, authorities: str
) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate:
        context.load_cert_chain(certificate, key, password or None)
    if authorities:
        context.load_verify_locations(authorities)
    return context
