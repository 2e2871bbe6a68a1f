"""A directory by TLS (Debian's slapd): passwords go to nobody whose certificate is not good."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from convoymq.broker.identity.backend import NotAdmitted
from convoymq.broker.identity.ldap import LdapBackend
from convoymq.model.config import ConfigError, LdapConfig
from tests.faults.test_ldap import SLAPD, Directory, person, write_config
from tests.ports import cluster_ports

pytestmark = pytest.mark.skipif(SLAPD is None, reason="slapd is not there")

PORT = cluster_ports(__name__)
SECURE_PORT, BARE_PORT = PORT + 1, PORT + 2
CERTIFICATES = """TLSCACertificateFile {path}/ca.pem
TLSCertificateFile {path}/node.pem
TLSCertificateKeyFile {path}/node.key
"""
FORMS: list[dict[str, Any]] = [
    {"use_ssl": True, "port": SECURE_PORT},
    {"use_starttls": True, "port": PORT},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a certificate for localhost, and one without TLS; the authorities."""
    path = tmp_path_factory.mktemp("ldap_tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(path / "other.pem")
    made = authority.issue_cert("localhost")
    made.private_key_pem.write_to_path(path / "node.key")
    for blob in made.cert_chain_pems:
        blob.write_to_path(path / "node.pem", append=True)
    write_config(path, CERTIFICATES.format(path=path))
    urls = f"ldap://127.0.0.1:{{port}} ldaps://127.0.0.1:{SECURE_PORT}"
    bare = path / "bare"
    bare.mkdir()
    write_config(bare)
    started = [Directory(path, PORT, urls), Directory(bare, BARE_PORT)]
    try:
        for directory in started:
            directory.start()
        started[0].fill()
        yield path
    finally:
        for directory in started:
            directory.stop()


def log_in(password: bytes = b"bob-secret", **settings: Any) -> Any:
    config: dict[str, Any] = {
        "servers": ("localhost",), "timeout_ms": 60_000, "user_dn_pattern": person("${username}")
    }  # fmt: skip

    async def asked() -> Any:
        return await LdapBackend(LdapConfig(**(config | settings)), 1.0).log_in("bob", password)

    return asyncio.run(asked())


@pytest.mark.parametrize("form", FORMS)
def test_a_directory_with_a_good_certificate_admits(place: Path, form: dict[str, Any]) -> None:
    trusted = {**form, "cacertfile": str(place / "ca.pem")}
    assert log_in(**trusted).name == "bob"
    assert log_in(b"wrong", **trusted) is None
    assert log_in(**form, verify="verify_none").name == "bob"


@pytest.mark.parametrize("form", FORMS)
def test_a_directory_with_another_certificate_is_not_asked(
    place: Path, form: dict[str, Any]
) -> None:
    with pytest.raises(NotAdmitted, match="certificate verify failed"):
        log_in(**form, cacertfile=str(place / "other.pem"))
    with pytest.raises(NotAdmitted, match=r"127\.0\.0\.1"):
        log_in(**form, cacertfile=str(place / "ca.pem"), servers=("127.0.0.1",))


def test_no_password_is_sent_when_the_directory_has_no_tls(place: Path) -> None:
    with pytest.raises(NotAdmitted, match="startTLS failed"):
        log_in(use_starttls=True, port=BARE_PORT, cacertfile=str(place / "ca.pem"))
    with pytest.raises(NotAdmitted, match="does not answer"):
        log_in(use_ssl=True, port=BARE_PORT, cacertfile=str(place / "ca.pem"))
    with pytest.raises(ConfigError, match=r"cacertfile = .*none\.pem: .*No such file"):
        log_in(use_ssl=True, port=SECURE_PORT, cacertfile=str(place / "none.pem"))
