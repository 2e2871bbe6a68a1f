"""What the bodies of commands hold that are maps."""

from __future__ import annotations

from typing import TypedDict


class CheckoutSpec(TypedDict, total=False):
    """What a consumer asks for."""

    prefetch: int
    no_ack: bool
    priority: int


ReservationOp = TypedDict(
    "ReservationOp",
    {
        "op": str,
        "reservation": str,
        "owner": str,
        "ttl_ms": int,
        "max": int,
        "after": int,
        "epoch": int,
        "fencing_token": int,
        "from": int,
        "upto": int,
        "failed": bool,
    },
    total=False,
)
"""An op on a reservation (ADR 0008)."""
