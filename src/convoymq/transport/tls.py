"""TLS contexts, for listeners and for connections to them.

Contexts read their files again when these change (`renew`), so a certificate is renewed without a
restart: handshakes from then on use the new one.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

_VERSIONS = {"tlsv1.2": ssl.TLSVersion.TLSv1_2, "tlsv1.3": ssl.TLSVersion.TLSv1_3}


@dataclass(slots=True)
class _Files:
    """The files of a TLS context, and the stamp of those that are loaded."""

    certificate: str
    key: str
    password: str
    authorities: str
    stamp: tuple[tuple[int, int], ...] = ()
    refused: str = ""
    """Text of the error that was reported last, until they can be used."""

    def load(self, context: ssl.SSLContext) -> None:
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key, self.password or None)
        if self.authorities:
            context.load_verify_locations(self.authorities)

    def now(self) -> tuple[tuple[int, int], ...]:
        """Returns a value that changes with the files. Raises OSError."""
        paths = [path for path in (self.certificate, self.key, self.authorities) if path]
        return tuple((found.st_mtime_ns, found.st_ino) for found in map(os.stat, paths))


_MADE: WeakKeyDictionary[ssl.SSLContext, _Files] = WeakKeyDictionary()
"""Contexts of this process that are in use."""


def server_context(
    certificate: str,
    key: str,
    *,
    password: str = "",
    authorities: str = "",
    verify: ssl.VerifyMode = ssl.CERT_NONE,
    versions: Sequence[str] = ("tlsv1.2", "tlsv1.3"),
    ciphers: Sequence[str] = (),
) -> ssl.SSLContext:
    """Returns the context of a listener. Raises OSError, ssl.SSLError for files that cannot be
    used, and for ciphers that OpenSSL does not know.

    Args:
        certificate, key, authorities: paths of PEM files; authorities are those of clients.
        verify: whether clients need a certificate.
        versions: `tlsv1.2`, `tlsv1.3`.
        ciphers: suites of TLS 1.2; none: OpenSSL's choice.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = verify
    _fill(context, _Files(certificate, key, password, authorities))
    wanted = [_VERSIONS[name] for name in versions]
    context.minimum_version, context.maximum_version = min(wanted), max(wanted)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    if ciphers:
        context.set_ciphers(":".join(ciphers))
    return context


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
    _fill(context, _Files(certificate, key, password, authorities))
    return context


def _fill(context: ssl.SSLContext, files: _Files) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files.load(context)
    files.stamp = files.now()
    _MADE[context] = files


def renew() -> Iterator[tuple[str, OSError | None]]:
    """Reads again what has changed; yields each certificate or authority, with the error of one
    that cannot be used. Its context goes on with what it had, and the next call tries again, but
    yields the same error only once."""
    for context, files in list(_MADE.items()):
        name = files.certificate or files.authorities
        try:
            stamp = files.now()
            if stamp == files.stamp:
                files.refused = ""
                continue
            # A pair that does not belong together would leave a context with neither.
            files.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            files.load(context)
            files.stamp, files.refused = stamp, ""
        except OSError as error:
            if files.refused != str(error):
                files.refused = str(error)
                yield name, error
        else:
            yield name, None
