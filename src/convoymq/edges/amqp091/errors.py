"""Errors as AMQP 0-9-1 clients see them: one table from error classes to reply codes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from convoymq.model.errors import (
    AccessRefused,
    BrokerError,
    ChannelFault,
    CommandFault,
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
    UnexpectedFrame,
)

REPLY_TEXT_BYTES_MAX = 255


class Scope(Enum):
    """Scope of an error: soft ones close the channel, hard ones the connection."""

    CHANNEL = "channel"
    CONNECTION = "connection"


# The nearest base class decides, so a subclass needs no line of its own.
_REPLY_CODES: dict[type[BrokerError], int] = {
    ForcedClosure: 320,
    AccessRefused: 403,
    NotFound: 404,
    ResourceLocked: 405,
    PreconditionFailed: 406,
    FrameFault: 501,
    SyntaxFault: 502,
    CommandFault: 503,
    ChannelFault: 504,
    UnexpectedFrame: 505,
    ResourceExhausted: 506,
    NotAllowed: 530,
    NotServed: 540,
    NotPermitted: 541,
    PeerError: 502,
    Refused: 406,
    BrokerError: 541,
}

# code -> (name on the wire, what it closes)
REPLIES: dict[int, tuple[str, Scope]] = {
    311: ("CONTENT_TOO_LARGE", Scope.CHANNEL),
    312: ("NO_ROUTE", Scope.CHANNEL),
    313: ("NO_CONSUMERS", Scope.CHANNEL),
    320: ("CONNECTION_FORCED", Scope.CONNECTION),
    402: ("INVALID_PATH", Scope.CONNECTION),
    403: ("ACCESS_REFUSED", Scope.CHANNEL),
    404: ("NOT_FOUND", Scope.CHANNEL),
    405: ("RESOURCE_LOCKED", Scope.CHANNEL),
    406: ("PRECONDITION_FAILED", Scope.CHANNEL),
    501: ("FRAME_ERROR", Scope.CONNECTION),
    502: ("SYNTAX_ERROR", Scope.CONNECTION),
    503: ("COMMAND_INVALID", Scope.CONNECTION),
    504: ("CHANNEL_ERROR", Scope.CONNECTION),
    505: ("UNEXPECTED_FRAME", Scope.CONNECTION),
    506: ("RESOURCE_ERROR", Scope.CONNECTION),
    530: ("NOT_ALLOWED", Scope.CONNECTION),
    540: ("NOT_IMPLEMENTED", Scope.CONNECTION),
    541: ("INTERNAL_ERROR", Scope.CONNECTION),
}


@dataclass(frozen=True, slots=True)
class Reply:
    """Fields of channel.close or connection.close."""

    code: int
    text: str
    scope: Scope


def reply_for(error: BrokerError) -> Reply:
    """Returns the close that `error` causes; the text is cut at 255 bytes of UTF-8."""
    code = next(_REPLY_CODES[cls] for cls in type(error).__mro__ if cls in _REPLY_CODES)
    name, scope = REPLIES[code]
    return Reply(code, shortened(f"{name} - {error.text}"), scope)


def shortened(text: str) -> str:
    """Returns a reply text of at most 255 bytes of UTF-8."""
    data = text.encode("utf-8", "replace")
    return data[:REPLY_TEXT_BYTES_MAX].decode("utf-8", "ignore")
