"""Names that the server makes up."""

from __future__ import annotations

import base64
import secrets


def generated_name(prefix: str) -> str:
    """A fresh name: prefix and 22 characters of the base64url alphabet."""
    return prefix + base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")
