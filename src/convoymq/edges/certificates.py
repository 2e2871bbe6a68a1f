"""Until when certificates are good: the validity that X.509 writes into each of them (RFC 5280,
section 4.1)."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

_SEQUENCE = 0x30
_VERSION = 0xA0
_UTC_TIME = 0x17
_END = "-----END CERTIFICATE-----"


def expiry_of(chain: str) -> datetime:
    """Returns the time at which the first certificate of a chain expires.

    Args:
        chain: certificates in PEM.

    Raises:
        ValueError: it has no certificate, or one that cannot be read.
    """
    parts = [part[part.find("-----BEGIN CERTIFICATE") :] for part in chain.split(_END)[:-1]]
    if not parts:
        raise ValueError("there is no certificate")
    return min(_not_after(ssl.PEM_cert_to_DER_cert(part + _END)) for part in parts)


def _not_after(der: bytes) -> datetime:
    try:
        _, start, _ = _element(der, 0)
        _, at, _ = _element(der, start)
        tag, _, end = _element(der, at)
        # Before the validity: version (if it is not the first one), serial number, signature,
        # issuer.
        for _ in range(3 if tag == _VERSION else 2):
            _, _, end = _element(der, end)
        tag, at, _ = _element(der, end)
        if tag != _SEQUENCE:
            raise ValueError("a certificate has no validity")
        _, _, at = _element(der, at)
        tag, first, end = _element(der, at)
    except IndexError:
        raise ValueError("a certificate is cut off") from None
    text = der[first:end].decode("ascii", "replace")
    # Two digits of a year are of 1950 to 2049, as `%y` has it but for 1950 to 1968.
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text, form).replace(tzinfo=UTC)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Returns (tag, first byte of the content, byte after it) of the element at an offset. Raises
    IndexError, ValueError."""
    tag, length = der[at], der[at + 1]
    at += 2
    if length & 0x80:
        count = length & 0x7F
        length = int.from_bytes(der[at : at + count], "big")
        at += count
    if at + length > len(der):
        raise ValueError("a certificate is cut off")
    return tag, at, at + length
