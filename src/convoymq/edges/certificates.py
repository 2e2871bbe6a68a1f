"""Until when certificates are good."""

from __future__ import annotations

from datetime import datetime


def expiry_of(chain: bytes) -> datetime:
    """Returns the time at which the first certificate of a chain expires.

    Args:
        chain: certificates in PEM.

    Raises:
        ValueError: it has no certificate, or one that cannot be read.

    Cost: the first call imports the library, which takes 0.1 s and 16 MB.
    """
    from cryptography import x509

    return min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(chain))
