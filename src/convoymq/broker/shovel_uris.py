"""URIs of the brokers at the ends of a shovel, as RabbitMQ reads them.

    amqp://user:password@host:port/vhost?heartbeat=10      amqps: by TLS

Without a host it is the own cluster. Refusals are RabbitMQ's Erlang terms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

PORT, TLS_PORT = 5672, 5671
_FORM = re.compile(
    r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*)://(?:(?P<userinfo>[^@/?#]*)@)?"
    r"(?P<host>\[[^\]]*\]|[^:/?#]*)(?::(?P<port>\d*))?(?P<path>/[^?#]*)?(?:\?(?P<query>.*))?"
)
_BAD_ESCAPE = re.compile("%(?![0-9a-fA-F]{2})(.{0,2})")
_NUMBERS = ("heartbeat", "connection_timeout", "channel_max", "frame_max")


class BadUri(Exception):
    """Tells why text is no such URI, as an Erlang term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShovelUri:
    """Address of a broker, and the user who logs in."""

    host: str
    """Empty: the own cluster."""
    port: int
    tls: bool
    user: str | None = None
    password: str = ""
    vhost: str = "/"
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Returns whether it is the own cluster, without a password."""
        return not self.host and self.user is None

    def number(self, name: str, default: int) -> int:
        """Returns a number of the query."""
        return int(self.options.get(name, default))


def uri_of(text: str) -> ShovelUri:
    """Reads a URI. Raises BadUri."""
    found = _FORM.fullmatch(text)
    if found is None:
        reason = "no_scheme" if "://" not in text else "malformed_uri"
        raise BadUri(f"{{unable_to_parse_uri,{reason}}}")
    if found["scheme"].lower() not in ("amqp", "amqps"):
        raise BadUri(f'{{unexpected_uri_scheme,"{found["scheme"].lower()}"}}')
    tls = found["scheme"].lower() == "amqps"
    host, path = _plain(found["host"]).strip("[]"), found["path"]
    port = int(found["port"]) if found["port"] else TLS_PORT if tls else PORT
    if not 0 < port <= 0xFFFF:
        raise BadUri(f"{{port_out_of_range,{port}}}")
    if found["port"] and not host:
        raise BadUri("port_requires_host")
    if path is not None and "/" in path[1:]:
        raise BadUri(f'{{invalid_vhost,"{path[1:]}"}}')
    user, colon, password = (found["userinfo"] or "").partition(":")
    query = parse_qsl(found["query"] or "", keep_blank_values=True)
    for name, value in query:
        if name in _NUMBERS and not (value.isascii() and value.isdigit()):
            shown = ",".join(f'{{"{each}","{given}"}}' for each, given in query)
            raise BadUri(f'{{invalid_amqp_params_parameter,{name},"{value}",[{shown}],'
                         f'{{not_an_integer,"{value}"}}}}')  # fmt: skip
    return ShovelUri(
        host=host,
        port=port,
        tls=tls,
        user=_plain(user) if user or colon else None,
        password=_plain(password),
        vhost="/" if path is None else _plain(path[1:]),
        options=dict(query),
    )


def without_credentials(text: str) -> str:
    """Returns a URI as it may be shown: without user, password and query."""
    return re.sub(r"://[^@/]*@", "://", text.partition("?")[0])


def _plain(text: str) -> str:
    bad = _BAD_ESCAPE.search(text)
    if bad is not None:
        raise BadUri(f"{{invalid_entitiy,['%',{','.join(str(ord(each)) for each in bad[1])}]}}")
    return unquote(text, errors="surrogateescape")
