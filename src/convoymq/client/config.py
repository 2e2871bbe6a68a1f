"""Address and credentials of a client: frozen, hashable, picklable; secrets are never printed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT = 5672
DEFAULT_TLS_PORT = 5671
_SERVER = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:\s/@]+))(?::(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Encryption of a connection.

    Without `ca_file` the system's authorities are trusted. `verify` off accepts any certificate:
    then anybody between client and broker can read the password.
    """

    ca_file: str = ""
    cert_file: str = ""
    """The client's certificate chain, PEM; its key is in `key_file`, or in the same file."""
    key_file: str = ""
    key_password: str = field(default="", repr=False)
    verify: bool = True
    server_name: str = ""
    """Name that the certificate must be for; empty = the host that is connected to."""

    def context(self) -> ssl.SSLContext:
        """Returns what `ssl` needs. Raises OSError: a file is missing or is no certificate."""
        # Imported late: it costs milliseconds, and most clients are plain.
        import ssl

        made = ssl.create_default_context(cafile=self.ca_file or None)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        if not self.verify:
            made.check_hostname = False
            made.verify_mode = ssl.CERT_NONE
        if self.cert_file:
            made.load_cert_chain(self.cert_file, self.key_file or None, self.key_password or None)
        return made


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """See the module text.

    Raises:
        ValueError: no server, a server that is not `host:port`, or a timeout that is not positive.
    """

    servers: tuple[str, ...]
    """`host:port` of one node or more; the others are tried when one does not answer. Without a
    port 5672, or 5671 with TLS."""
    user: str = "guest"
    password: str = field(default="guest", repr=False)
    vhost: str = "/"
    tls: TlsConfig | None = None
    timeout: float = 30.0
    """Seconds until a call gives up, all its repetitions included."""
    name: str = ""
    """Shown to operators in the list of connections."""
    spread: bool = True
    """Begin with a server chosen at random; False: with the first one."""

    def __post_init__(self) -> None:
        given: object = self.servers
        if isinstance(given, str) or not given:
            raise ValueError("servers must be a tuple of one host:port or more")
        # Lists are taken as well, but a pool needs a key that does not change.
        object.__setattr__(self, "servers", tuple(self.servers))
        self.addresses()
        if not self.timeout > 0:
            raise ValueError("timeout must be positive, in seconds")

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each server."""
        default = DEFAULT_PORT if self.tls is None else DEFAULT_TLS_PORT
        found = []
        for server in self.servers:
            match = _SERVER.fullmatch(server.strip())
            port = int(match[3] or default) if match is not None else -1
            if match is None or not 0 < port < 65536:
                raise ValueError(f"server {server!r} is not host:port")
            found.append((match[1] or match[2], port))
        return tuple(found)
