"""The broker's errors in the words of the columnar protocol; the one table of this edge."""

from __future__ import annotations

from convoymq.model.columnar import ColumnarError, ErrorCode
from convoymq.model.errors import (
    AccessRefused,
    BrokerError,
    NotAllowed,
    NotFound,
    NotServed,
    OffsetOutOfRange,
    PeerError,
    PreconditionFailed,
    ReplicaBehind,
    ReservationRefused,
    ResourceExhausted,
    ResourceLocked,
    Unavailable,
)
from convoymq.topics.rules.refusals import TopicRefused

CODES: tuple[tuple[type[BrokerError], ErrorCode], ...] = (
    (OffsetOutOfRange, ErrorCode.OFFSET_OUT_OF_RANGE),
    (ReplicaBehind, ErrorCode.REPLICA_BEHIND),
    (ReservationRefused, ErrorCode.RESERVATION_GONE),
    (NotFound, ErrorCode.NOT_FOUND),
    (AccessRefused, ErrorCode.ACCESS_REFUSED),
    (NotAllowed, ErrorCode.ACCESS_REFUSED),
    (ResourceLocked, ErrorCode.ACCESS_REFUSED),
    (PreconditionFailed, ErrorCode.PRECONDITION_FAILED),
    (TopicRefused, ErrorCode.PRECONDITION_FAILED),
    (NotServed, ErrorCode.NOT_IMPLEMENTED),
    (ResourceExhausted, ErrorCode.UNAVAILABLE),
    (Unavailable, ErrorCode.UNAVAILABLE),
    (PeerError, ErrorCode.PRECONDITION_FAILED),
)
"""The first class that fits counts; what fits none is INTERNAL_ERROR."""


def as_error(error: BrokerError) -> ColumnarError:
    """Returns the error as this protocol tells it."""
    if isinstance(error, ColumnarError):
        return error
    details: dict[str, object] = {}
    match error:
        case OffsetOutOfRange():
            details = {"first": error.first, "high": error.high}
        case ReplicaBehind():
            details = {"high": error.high}
        case ReservationRefused():
            details = {"reason": error.reason}
        case TopicRefused():
            details = {"topic_code": error.code.value}
        case _:
            pass
    code = next((code for kind, code in CODES if isinstance(error, kind)), ErrorCode.INTERNAL_ERROR)
    return ColumnarError(code, error.text, details)
