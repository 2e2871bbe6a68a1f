"""Errors as AMQP 1.0 clients see them: conditions, and one table from error classes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from convoymq.edges.amqp10.performatives import Error
from convoymq.messages.amqp10.values import Symbol, Value
from convoymq.model.errors import (
    AccessRefused,
    BrokerError,
    ForcedClosure,
    FrameFault,
    NotAllowed,
    NotFound,
    NotPermitted,
    NotServed,
    PeerError,
    PreconditionFailed,
    Refused,
    ResourceExhausted,
    ResourceLocked,
    SyntaxFault,
    Unavailable,
)

DECODE_ERROR = "amqp:decode-error"
FRAMING_ERROR = "amqp:connection:framing-error"
FRAME_SIZE_TOO_SMALL = "amqp:frame-size-too-small"
HANDLE_IN_USE = "amqp:session:handle-in-use"
ILLEGAL_STATE = "amqp:illegal-state"
INTERNAL_ERROR = "amqp:internal-error"
INVALID_FIELD = "amqp:invalid-field"
LINK_STOLEN = "amqp:link:stolen"
MESSAGE_SIZE_EXCEEDED = "amqp:link:message-size-exceeded"
NOT_ALLOWED = "amqp:not-allowed"
NOT_FOUND = "amqp:not-found"
NOT_IMPLEMENTED = "amqp:not-implemented"
PRECONDITION_FAILED = "amqp:precondition-failed"
RESOURCE_DELETED = "amqp:resource-deleted"
RESOURCE_LIMIT_EXCEEDED = "amqp:resource-limit-exceeded"
RESOURCE_LOCKED = "amqp:resource-locked"
TRANSACTION_ROLLBACK = "amqp:transaction:rollback"
TRANSACTION_TIMEOUT = "amqp:transaction:timeout"
TRANSACTION_UNKNOWN_ID = "amqp:transaction:unknown-id"
TRANSFER_LIMIT_EXCEEDED = "amqp:link:transfer-limit-exceeded"
UNATTACHED_HANDLE = "amqp:session:unattached-handle"
UNAUTHORIZED_ACCESS = "amqp:unauthorized-access"
WINDOW_VIOLATION = "amqp:session:window-violation"

# The nearest base class decides, so a subclass needs no line of its own.
_CONDITIONS: dict[type[BrokerError], str] = {
    AccessRefused: UNAUTHORIZED_ACCESS,
    ForcedClosure: INTERNAL_ERROR,
    FrameFault: FRAMING_ERROR,
    NotAllowed: NOT_ALLOWED,
    NotFound: NOT_FOUND,
    NotPermitted: NOT_ALLOWED,
    NotServed: NOT_IMPLEMENTED,
    PreconditionFailed: PRECONDITION_FAILED,
    ResourceExhausted: RESOURCE_LIMIT_EXCEEDED,
    ResourceLocked: RESOURCE_LOCKED,
    SyntaxFault: DECODE_ERROR,
    PeerError: DECODE_ERROR,
    Refused: PRECONDITION_FAILED,
    Unavailable: ILLEGAL_STATE,
    BrokerError: INTERNAL_ERROR,
}


TEXT_BYTES_MAX = 400
"""Of an error's description: it fits into the smallest frame that a client may ask for."""


class Scope(Enum):
    """Extent of an error: it ends a link, a session or the connection."""

    CONNECTION = "connection"
    SESSION = "session"
    LINK = "link"


class Fault(BrokerError):
    """An error with its condition."""

    def __init__(
        self,
        scope: Scope,
        condition: str,
        text: str,
        info: Mapping[str, Value] | None = None,
    ) -> None:
        super().__init__(_clipped(text))
        self.scope = scope
        self.condition = condition
        self.info = info

    def error(self) -> Error:
        """Returns the error as clients get it."""
        return error_with(self.condition, self.text, self.info)


def error_with(condition: str, text: str, info: Mapping[str, Value] | None = None) -> Error:
    """Returns an error of a condition."""
    named: dict[Value, Value] | None
    named = None if info is None else {Symbol(name): value for name, value in info.items()}
    return Error(condition=condition, description=_clipped(text), info=named)


def _clipped(text: str) -> str:
    return text.encode()[:TEXT_BYTES_MAX].decode(errors="ignore")


def condition_of(error: BrokerError) -> str:
    """Returns the condition that an error has for clients."""
    if isinstance(error, Fault):
        return error.condition
    return next(_CONDITIONS[each] for each in type(error).__mro__ if each in _CONDITIONS)


def fault_of(error: BrokerError, scope: Scope) -> Fault:
    """Returns an error that ends something; one that says what it ends stays as it is."""
    return error if isinstance(error, Fault) else Fault(scope, condition_of(error), error.text)


def link_fault(condition: str, text: str) -> Fault:
    """Returns an error that ends a link."""
    return Fault(Scope.LINK, condition, text)


def session_fault(condition: str, text: str) -> Fault:
    """Returns an error that ends a session."""
    return Fault(Scope.SESSION, condition, text)


def connection_fault(condition: str, text: str) -> Fault:
    """Returns an error that ends a connection."""
    return Fault(Scope.CONNECTION, condition, text)
