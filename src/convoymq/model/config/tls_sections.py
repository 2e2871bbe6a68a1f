"""Sections of TLS: the same keys below the prefix of each kind of listener."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from convoymq.model.config.keys import Key, key
from convoymq.model.config.values import parse_words

VERSIONS = ("tlsv1.2", "tlsv1.3")


def _parse_versions(text: str) -> tuple[str, ...]:
    words = parse_words(text)
    for word in words:
        if word not in VERSIONS:
            raise ValueError(f"served are {' and '.join(VERSIONS)}")
    return words


def _parse_ciphers(text: str) -> tuple[str, ...]:
    words = parse_words(text)
    for word in words:
        if word.startswith("TLS_"):
            raise ValueError("suites of TLS 1.3 cannot be chosen; this is for those of TLS 1.2")
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class SslConfig:
    """TLS for clients (`ssl_options.*`)."""

    certfile: str = key(
        "ssl_options.certfile",
        "",
        """The node's certificate chain, PEM. Files of certificates and keys that change are read
        again within seconds, and at once on SIGHUP; connections that are open stay.""",
    )
    keyfile: str = key("ssl_options.keyfile", "", "Private key of the certificate, PEM.")
    cacertfile: str = key(
        "ssl_options.cacertfile",
        "",
        """Authorities that client certificates are checked against, PEM. One that is added is
        read again as certificates are; one that is taken out counts until a restart.""",
    )
    verify: str = key(
        "ssl_options.verify",
        "verify_none",
        "Whether clients' certificates are checked.",
        choices=("verify_none", "verify_peer"),
    )
    fail_if_no_peer_cert: bool = key(
        "ssl_options.fail_if_no_peer_cert",
        False,
        "Refuse clients that show no certificate (with `verify_peer`).",
    )
    password: str = key("ssl_options.password", "", "Password of the private key.", secret=True)
    versions: tuple[str, ...] = key(
        "ssl_options.versions",
        VERSIONS,
        "Versions that are served, of `tlsv1.2` and `tlsv1.3`; `ssl_options.versions.N` for each.",
        parse=_parse_versions, type_name="words", collects="ssl_options.versions.",
    )  # fmt: skip
    ciphers: tuple[str, ...] = key(
        "ssl_options.ciphers",
        (),
        """Cipher suites of TLS 1.2 under OpenSSL's names; `ssl_options.ciphers.N` for each. Empty:
        OpenSSL's choice. Those of TLS 1.3 are all served.""",
        parse=_parse_ciphers, type_name="words", collects="ssl_options.ciphers.",
    )  # fmt: skip

    def files(self) -> dict[str, str]:
        """Returns the files by the name of their keys."""
        return {
            _key_of(self, name).name: getattr(self, name)
            for name in ("certfile", "keyfile", "cacertfile")
        }


def _key_of(section: SslConfig, name: str) -> Key:
    (found,) = (entry for entry in dataclasses.fields(section) if entry.name == name)
    made: Key = found.metadata["key"]
    return made


def _below(prefix: str, text: str) -> str:
    return text.replace("ssl_options.", f"{prefix}.")


def _fields(prefix: str) -> list[tuple[str, object, object]]:
    made = []
    for entry in dataclasses.fields(SslConfig):
        old: Key = entry.metadata["key"]
        new = dataclasses.replace(
            old,
            names=tuple(_below(prefix, name) for name in old.names),
            collects=_below(prefix, old.collects),
            doc=_below(prefix, old.doc),
        )
        default = dataclasses.field(default=entry.default, repr=entry.repr, metadata={"key": new})
        made.append((entry.name, entry.type, default))
    return made


def _section(name: str, prefix: str, doc: str) -> type[SslConfig]:
    """Makes a section with the same keys below another prefix."""
    namespace = {"__doc__": doc, "__module__": __name__}
    return dataclasses.make_dataclass(
        name, _fields(prefix), bases=(SslConfig,), namespace=namespace,
        frozen=True, slots=True, kw_only=True,
    )  # fmt: skip


MANAGEMENT_SSL = _section(
    "ManagementSslConfig",
    "management.ssl",
    "TLS for the HTTP API and the page (`management.ssl.*`).",
)
PROMETHEUS_SSL = _section(
    "PrometheusSslConfig", "prometheus.ssl", "TLS for metrics (`prometheus.ssl.*`)."
)
