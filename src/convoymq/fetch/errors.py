"""The broker's errors in the words of the columnar protocol; the one table of this edge."""

from __future__ import annotations

from typing import Any

from convoymq.model.columnar import ColumnarError, ErrorCode
from convoymq.model.errors import (
    AccessRefused,
    BrokerError,
    NotAllowed,
    NotFound,
    NotServed,
    PeerError,
    PreconditionFailed,
    ResourceExhausted,
    ResourceLocked,
    StageRefused,
    Unavailable,
)

CODES: tuple[tuple[type[BrokerError], ErrorCode], ...] = (
    (StageRefused, ErrorCode.STAGE_GONE),
    (NotFound, ErrorCode.NOT_FOUND),
    (AccessRefused, ErrorCode.ACCESS_REFUSED),
    (NotAllowed, ErrorCode.ACCESS_REFUSED),
    (ResourceLocked, ErrorCode.ACCESS_REFUSED),
    (PreconditionFailed, ErrorCode.PRECONDITION_FAILED),
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
    details: dict[str, Any] = {}
    for name in ("first", "high", "reason"):
        if hasattr(error, name):
            details[name] = getattr(error, name)
    code = next((code for kind, code in CODES if isinstance(error, kind)), ErrorCode.INTERNAL_ERROR)
    return ColumnarError(code, error.text, details)
