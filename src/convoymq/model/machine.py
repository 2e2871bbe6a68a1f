"""Identity of this machine."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Returns the same for all processes of this machine until it starts again, and no other
    machine's; empty where the system has no such thing (elsewhere than on Linux)."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
