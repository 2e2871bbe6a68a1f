"""TLS on connections of the remoting protocol: settings, and the layer between bytes and commands.

One port takes both kinds of connections: a TLS record begins with the byte 22, a command with the
length of its frame, whose first byte is 0 or 1.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass

from convoymq.model.config.keys import Section, key
from convoymq.model.errors import FrameFault
from convoymq.transport.tls import client_context, server_context

DISABLED, PERMISSIVE, ENFORCING = "disabled", "permissive", "enforcing"
HANDSHAKE = 22
"""First byte of a connection with TLS."""
READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTlsSettings(Section):
    """Settings of TLS towards others, under the names of RocketMQ's system properties."""

    tls_client: bool = key(
        "tls.enable", False, "Connections to name servers and brokers have TLS; so they have "
        "with tls.server.mode=enforcing.",
    )  # fmt: skip
    tls_client_certificate: str = key(
        "tls.client.certPath", "", "File of the certificate for them, if they need one (PEM)."
    )
    tls_client_key: str = key("tls.client.keyPath", "", "File of its private key (PEM).")
    tls_client_password: str = key(
        "tls.client.keyPassword", "", "Password of that file, if it has one.", secret=True
    )
    tls_client_verifies: bool = key(
        "tls.client.authServer", False, "Their certificates need to be of tls.client.trustCertPath."
    )
    tls_client_authorities: str = key(
        "tls.client.trustCertPath", "", "File of the authorities of servers (PEM)."
    )

    @property
    def uses_tls(self) -> bool:
        """Returns whether connections to other servers have TLS."""
        return self.tls_client

    def client_tls(self) -> ssl.SSLContext | None:
        """Returns the TLS of connections to other servers; None: they have none. Raises OSError,
        ssl.SSLError."""
        if not self.uses_tls:
            return None
        return client_context(
            certificate=self.tls_client_certificate,
            key=self.tls_client_key,
            password=self.tls_client_password,
            authorities=self.tls_client_authorities,
            verify=ssl.CERT_REQUIRED if self.tls_client_verifies else ssl.CERT_NONE,
        )

    def check(self) -> None:
        """See `Section`."""
        if self.tls_client_verifies and not self.tls_client_authorities:
            raise ValueError("tls.client.authServer needs tls.client.trustCertPath")
        if bool(self.tls_client_certificate) != bool(self.tls_client_key):
            raise ValueError("tls.client.certPath and tls.client.keyPath go together")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings(ClientTlsSettings):
    """Settings of a server's TLS as well."""

    tls_mode: str = key(
        "tls.server.mode", PERMISSIVE,
        "`permissive`: connections with and without TLS, if there is a certificate; `enforcing`: "
        "with TLS only; `disabled`: without.",
        choices=(DISABLED, PERMISSIVE, ENFORCING),
    )  # fmt: skip
    tls_certificate: str = key(
        "tls.server.certPath", "", "File of the certificate, with those that vouch for it (PEM)."
    )
    tls_key: str = key("tls.server.keyPath", "", "File of its private key (PEM).")
    tls_password: str = key(
        "tls.server.keyPassword", "", "Password of that file, if it has one.", secret=True
    )
    tls_authorities: str = key(
        "tls.server.trustCertPath", "",
        "File of the authorities of clients (PEM): every client needs a certificate of one then.",
    )  # fmt: skip

    @property
    def uses_tls(self) -> bool:
        """See `ClientTlsSettings`: a server that requires TLS uses it as a client."""
        return self.tls_client or self.tls_mode == ENFORCING

    def check(self) -> None:
        """See `Section`."""
        ClientTlsSettings.check(self)
        if self.tls_mode == ENFORCING and not self.tls_certificate:
            raise ValueError("tls.server.mode=enforcing needs tls.server.certPath")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls.server.certPath and tls.server.keyPath go together")


class ServerTls:
    """TLS of a server. Raises OSError, ssl.SSLError for files that cannot be used.

    Attributes:
        is_required: connections without it are refused.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self.is_required = settings.tls_mode == ENFORCING
        self._context: ssl.SSLContext | None = None
        if settings.tls_mode != DISABLED and settings.tls_certificate:
            self._context = server_context(
                settings.tls_certificate,
                settings.tls_key,
                password=settings.tls_password,
                authorities=settings.tls_authorities,
                verify=ssl.CERT_REQUIRED if settings.tls_authorities else ssl.CERT_NONE,
            )

    def layer(self, first: bytes) -> TlsLayer | None:
        """Returns the layer of a connection that begins with some bytes; None: it has no TLS.
        Raises FrameFault."""
        if first[0] != HANDSHAKE:
            if self.is_required:
                raise FrameFault("a connection without TLS, which is required")
            return None
        if self._context is None:
            raise FrameFault("a connection with TLS, which is not set up")
        return TlsLayer(self._context)


class TlsLayer:
    """One connection's TLS, without sockets."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._is_open = False

    def receive(self, data: bytes) -> bytes:
        """Returns the content of bytes that arrived. `pending` has what they ask to be sent.
        Raises FrameFault."""
        self._incoming.write(data)
        parts: list[bytes] = []
        try:
            if not self._is_open:
                self._tls.do_handshake()
                self._is_open = True
            while part := self._tls.read(READ_BYTES):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            raise FrameFault(f"TLS: {error.reason}") from error
        return b"".join(parts)

    def wrap(self, parts: Iterable[bytes | memoryview]) -> bytes:
        """Returns content as it is sent."""
        self._tls.write(b"".join(parts))
        return self.pending()

    def pending(self) -> bytes:
        """Returns what is to be sent besides content."""
        return self._outgoing.read()
