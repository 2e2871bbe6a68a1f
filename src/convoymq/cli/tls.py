"""`convoy tls`: an authority of one's own, and the certificates of nodes and clients."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoymq.cli.output import fail

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName

tls_app = typer.Typer(help="Certificates of nodes and clients.", no_args_is_help=True)

AUTHORITY_DAYS = 3650
NODE_DAYS = 397
"""Longest life that browsers accept."""
SKEW = datetime.timedelta(hours=1)
"""Certificates count from this time before now, for clocks that are behind."""


class Authority:
    """The authority of a directory: `ca.pem` and `ca-key.pem`, which is made if it is missing."""

    def __init__(self, directory: Path, name: str) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        self._directory = directory
        certificate, key = directory / "ca.pem", directory / "ca-key.pem"
        self.is_new = not (certificate.exists() or key.exists())
        if self.is_new:
            self._key = _new_key()
            self._certificate = self._made_authority(name)
            _write_key(key, self._key)
            _write(certificate, [self._certificate])
            return
        try:
            self._certificate = x509.load_pem_x509_certificate(certificate.read_bytes())
            found = load_pem_private_key(key.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise fail(f"{directory} has no usable ca.pem and ca-key.pem: {error}") from None
        if found.public_key() != self._certificate.public_key():
            raise fail(f"{certificate} and {key} do not belong together")
        self._key = found  # type: ignore[assignment]

    def issue(self, name: str, days: int, *, is_client: bool) -> None:
        """Writes `NAME.pem`, with the authority's certificate behind it, and `NAME-key.pem`."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = _new_key()
        # Nodes dial each other with the certificate that they show to clients.
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if not is_client:
            usages.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        names: list[GeneralName] = [] if is_client else [_general_name(name)]
        if not is_client:
            names += [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            self._builder(name, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        if names:
            unique = x509.SubjectAlternativeName(list(dict.fromkeys(names)))
            builder = builder.add_extension(unique, critical=False)
        made = self._signed(builder)
        # The key first: a node that looks in between goes on with the pair that it has.
        _write_key(self._directory / f"{name}-key.pem", key)
        _write(self._directory / f"{name}.pem", [made, self._certificate])

    def _made_authority(self, name: str) -> Certificate:
        from cryptography import x509

        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        return self._signed(
            self._builder(name, self._key, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )

    def _builder(self, name: str, key: EllipticCurvePrivateKey, days: int) -> CertificateBuilder:
        from cryptography import x509
        from cryptography.x509.oid import NameOID

        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        authority = getattr(self, "_certificate", None)
        now = datetime.datetime.now(datetime.UTC)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority.subject if authority else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(own, critical=False)
        )

    def _signed(self, builder: CertificateBuilder) -> Certificate:
        from cryptography.hazmat.primitives.hashes import SHA256

        return builder.sign(self._key, SHA256())


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _general_name(name: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, certificates: list[Certificate]) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding

    _replace(path, b"".join(each.public_bytes(Encoding.PEM) for each in certificates), 0o644)


def _write_key(path: Path, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives import serialization as forms

    text = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    _replace(path, text, 0o600)


def _replace(path: Path, text: bytes, mode: int) -> None:
    """Writes a file as a whole: a node may read it at any time."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        os.fsync(file.fileno())
    fresh.replace(path)


def _checked(names: list[str]) -> list[str]:
    for name in names:
        if not name.isascii() or not name or "/" in name or name.startswith(("-", ".")):
            raise fail(f"{name!r} cannot be the name of a certificate", 64)
        if name in ("ca", "ca-key"):
            raise fail(f"{name!r} is the authority's own file", 64)
    return list(dict.fromkeys(names))


@tls_app.command("init")
def init(
    directory: Annotated[Path, typer.Argument(help="Where the files are, or shall be.")],
    node: Annotated[
        list[str], typer.Option("--node", help="Host name or address of a node; repeatable.")
    ] = [],  # noqa: B006
    client: Annotated[
        list[str], typer.Option("--client", help="Name of a client, for EXTERNAL; repeatable.")
    ] = [],  # noqa: B006
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="Life of certificates of nodes and clients.")
    ] = NODE_DAYS,
    name: Annotated[str, typer.Option(help="Name of a new authority.")] = "ConvoyMQ authority",
) -> None:
    """Makes an authority, and certificates that it signs; again, to renew them.

    An authority that is there already stays. Running nodes take renewed files by themselves.
    """
    nodes, clients = _checked(node), _checked(client)
    if not nodes and not clients:
        raise fail("for whom? give --node HOST or --client NAME", 64)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = Authority(directory, name)
        for each in nodes:
            authority.issue(each, days, is_client=False)
        for each in clients:
            authority.issue(each, days, is_client=True)
    except OSError as error:
        raise fail(f"{error.filename or directory}: {error.strerror}", 73) from None
    place = directory.absolute()
    print(f"{'made' if authority.is_new else 'used'} the authority {place / 'ca.pem'}")
    for each in (*nodes, *clients):
        print(f"made {place / f'{each}.pem'} and its key, for {days} days")
    if nodes:
        print("\nconvoy.conf of the node " + nodes[0] + ":\n")
        for prefix in ("ssl_options", "management.ssl", "prometheus.ssl", "cluster.tls"):
            print(f"{prefix}.certfile = {place / f'{nodes[0]}.pem'}")
            print(f"{prefix}.keyfile = {place / f'{nodes[0]}-key.pem'}")
            print(f"{prefix}.cacertfile = {place / 'ca.pem'}")
        print("listeners.ssl.default = 0.0.0.0:5671")
        print("management.ssl.port = 0.0.0.0:15671")
        print("prometheus.ssl.port = 0.0.0.0:15691")
