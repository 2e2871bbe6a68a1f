"""`convoy tls init` makes certificates that nodes and clients accept, and renews them."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import pytest
from cryptography.x509 import load_pem_x509_certificates
from typer.testing import CliRunner, Result

from convoymq.cli.app import app
from convoymq.edges.configuration import load


def convoy(*words: str) -> Result:
    return CliRunner().invoke(app, ["tls", "init", *words])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "tls"
    done = convoy(str(made), "--node", "localhost", "--node", "10.0.0.2", "--client", "device-7")
    assert done.exit_code == 0, done.output
    return made


def test_nodes_and_clients_accept_each_other(directory: Path) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=directory / "ca.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_cert_chain(directory / "localhost.pem", directory / "localhost-key.pem")
    client = ssl.create_default_context(cafile=directory / "ca.pem")
    client.load_cert_chain(directory / "device-7.pem", directory / "device-7-key.pem")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(up, down, server_side=True)
    theirs = client.wrap_bio(down, up, server_hostname="localhost")
    for side in (theirs, ours, theirs, ours):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    subject = ours.getpeercert()
    assert subject is not None
    assert subject["subject"] == ((("commonName", "device-7"),),)


def test_keys_are_for_their_owner_alone(directory: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        "ca-key.pem", "localhost-key.pem", "10.0.0.2-key.pem", "device-7-key.pem",
    }  # fmt: skip
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_second_time_renews_and_keeps_the_authority(directory: Path) -> None:
    authority = (directory / "ca.pem").read_bytes()
    (before, *_) = load_pem_x509_certificates((directory / "localhost.pem").read_bytes())
    done = convoy(str(directory), "--node", "localhost", "--days", "7")
    assert "used the authority" in done.output
    assert (directory / "ca.pem").read_bytes() == authority
    (after, *_) = load_pem_x509_certificates((directory / "localhost.pem").read_bytes())
    assert after.serial_number != before.serial_number
    assert after.not_valid_after_utc < before.not_valid_after_utc


def test_what_it_prints_is_a_configuration(directory: Path, tmp_path: Path) -> None:
    done = convoy(str(directory), "--node", "localhost")
    path = tmp_path / "convoy.conf"
    path.write_text(done.output.partition("convoy.conf of the node localhost:\n")[2])
    config = load(path, {}, {})
    assert config.management_ssl.certfile == str(directory / "localhost.pem")


@pytest.mark.parametrize(
    ("words", "code"),
    [((), 64), (("--node", "../x"), 64), (("--node", "ca"), 64), (("--client", ""), 64)],
)
def test_bad_names_make_nothing(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    assert convoy(str(tmp_path / "tls"), *words).exit_code == code
    assert not (tmp_path / "tls").exists()


def test_a_damaged_authority_is_named(directory: Path) -> None:
    (directory / "ca-key.pem").write_text("x")
    done = convoy(str(directory), "--node", "localhost")
    assert done.exit_code == 1
    assert "ca-key.pem" in done.output
