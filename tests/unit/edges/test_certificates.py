"""Until when a certificate is good, as the file says."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from convoymq.edges.certificates import expiry_of


def certificate(directory: Path, days: int) -> bytes:
    """A self-signed one."""
    path = directory / f"{days}.pem"
    made = subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-keyout", str(directory / "key.pem"), "-out", str(path),
            "-days", str(days), "-subj", "/CN=node",
        ],
        capture_output=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return path.read_bytes()


@pytest.mark.parametrize("days", [1, 20_000])
def test_the_end_is_read_in_both_forms(tmp_path: Path, days: int) -> None:
    """From 2050 on years have four digits."""
    expected = datetime.now(UTC) + timedelta(days=days)
    found = expiry_of(b"key or comment\n" + certificate(tmp_path, days))
    assert abs(found - expected) < timedelta(minutes=10)


def test_a_chain_is_as_good_as_its_worst_certificate(tmp_path: Path) -> None:
    short, long = certificate(tmp_path, 3), certificate(tmp_path, 900)
    assert expiry_of(long + short) == expiry_of(short + long) == expiry_of(short)


def test_what_is_no_certificate_is_refused(tmp_path: Path) -> None:
    begin, end = b"-----BEGIN CERTIFICATE-----\n", b"\n-----END CERTIFICATE-----\n"
    for text in (b"", b"nothing", *(begin + body + end for body in (b"MAA=", b"MIIB", b"?"))):
        with pytest.raises(ValueError, match=r"."):
            expiry_of(text)
