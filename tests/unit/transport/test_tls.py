"""Contexts take renewed files, and what cannot be used changes nothing."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import pytest
import trustme

from convoymq.transport.tls import renew, server_context


class Ends:
    """A server's files, and handshakes with it in memory."""

    def __init__(self, directory: Path) -> None:
        self.certificate, self.key = directory / "node.pem", directory / "node-key.pem"
        self.authority = trustme.CA()
        self.write()

    def write(self, *, with_key: bool = True) -> None:
        made = self.authority.issue_cert("localhost")
        made.cert_chain_pems[0].write_to_path(self.certificate)
        if with_key:
            made.private_key_pem.write_to_path(self.key)

    def serial(self, server: ssl.SSLContext, client: ssl.SSLContext | None = None) -> str:
        """The serial number that a client sees."""
        if client is None:
            client = ssl.create_default_context()
            self.authority.configure_trust(client)
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = server.wrap_bio(up, down, server_side=True)
        theirs = client.wrap_bio(down, up, server_hostname="localhost")
        for _ in range(3):
            for side in (theirs, ours):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        found = theirs.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path)


def test_a_renewed_certificate_is_served(ends: Ends) -> None:
    context = server_context(str(ends.certificate), str(ends.key))
    before = ends.serial(context)
    assert str(ends.certificate) not in dict(renew())
    ends.write()
    assert ends.serial(context) == before
    assert dict(renew())[str(ends.certificate)] is None
    assert ends.serial(context) != before
    assert str(ends.certificate) not in dict(renew())


def test_a_certificate_without_its_key_waits_for_it(ends: Ends) -> None:
    context = server_context(str(ends.certificate), str(ends.key))
    before = ends.serial(context)
    ends.write(with_key=False)
    assert isinstance(dict(renew())[str(ends.certificate)], ssl.SSLError)
    assert str(ends.certificate) not in dict(renew()), "the same error again"
    assert ends.serial(context) == before
    ends.key.unlink()
    assert isinstance(dict(renew())[str(ends.certificate)], FileNotFoundError)
    assert ends.serial(context) == before
    ends.write()
    assert dict(renew())[str(ends.certificate)] is None
    assert ends.serial(context) != before


def test_contexts_that_are_gone_are_not_renewed(ends: Ends) -> None:
    context = server_context(str(ends.certificate), str(ends.key))
    del context
    ends.write()
    assert str(ends.certificate) not in dict(renew())


def test_versions_and_ciphers_are_chosen(ends: Ends) -> None:
    files = str(ends.certificate), str(ends.key)
    old = ssl.create_default_context()
    ends.authority.configure_trust(old)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert ends.serial(server_context(*files), old)
    assert ends.serial(server_context(*files, versions=["tlsv1.2"]), old)
    with pytest.raises(ssl.SSLError):
        ends.serial(server_context(*files, versions=["tlsv1.3"]), old)
    chosen = server_context(*files, ciphers=["ECDHE-ECDSA-AES256-GCM-SHA384"])
    names = [each["name"] for each in chosen.get_ciphers() if each["protocol"] == "TLSv1.2"]
    assert names == ["ECDHE-ECDSA-AES256-GCM-SHA384"]
    with pytest.raises(ssl.SSLError):
        server_context(*files, ciphers=["ROT13"])
