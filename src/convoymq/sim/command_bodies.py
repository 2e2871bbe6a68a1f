"""Bodies of commands that are maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypedDict

if TYPE_CHECKING:
    from convoymq.sim.delivery_model import DeliveryModel
    from convoymq.sim.delivery_parts import Session


class CheckoutSpec(TypedDict, total=False):
    """Options of a consumer."""

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
        "messages": list[list[int]],
        "if_unused": bool,
        "if_empty": bool,
    },
    total=False,
)
"""An op on a reservation (ADR 0008), or one of the queue itself: `cancel_scheduled`,
`delete_check`, `renew`."""


class ChosenOp(TypedDict, total=False):
    """An op on chosen messages (ADR 0053)."""

    op: str
    operation: str
    part: int
    last: bool
    ranges: list[int]
    spec: bytes
    upto: int
    back: list[int]
    routed: int
    routes: list[tuple[int, list[object]]]


class OtherOps(Protocol):
    """Rules for ops that are none on reservations."""

    @property
    def open(self) -> Mapping[str, object]:
        """Operations that have begun and are not complete: the queue is in use for as long."""

    def apply(self, model: DeliveryModel, session: Session, op: ReservationOp) -> bool:
        """Follows an op; False: it is not one of these."""
