"""The error tree: what every package raises, without the wire codes of any protocol.

    BrokerError
    ├── Misuse          our own interface was called wrongly
    ├── PeerError       bytes or their order break the protocol
    ├── Refused         an expected no: the request is well formed, the answer is negative
    ├── Unavailable     no answer in time: timeout, no quorum, no leader
    ├── StorageFault    a disk failed or lied
    └── ReplicaStopped  a replica cannot go on with its log: it stops, the node goes on

    InvariantViolated   outside the tree, no Exception: nobody catches it, the process ends

Every class carries typed fields. Each protocol edge has one table that turns classes into its
own codes (`convoymq.edges.amqp091.errors` for AMQP).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BrokerError(Exception):
    """Anything that the broker reports on purpose. `text` is what a person or a peer may read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Misuse(BrokerError):
    """Our own interface was called with values that it documents as wrong."""


class PeerError(BrokerError):
    """The peer sent bytes, or an order of them, that the protocol does not allow."""


class FrameFault(PeerError):
    """A frame, or a field that decides about lengths, is broken."""


class SyntaxFault(PeerError):
    """A frame is whole, but the values inside it are not."""


class CommandFault(PeerError):
    """A method that does not exist or is not allowed in this state."""


class ChannelFault(PeerError):
    """A channel was used before it was open, or opened twice."""


class UnexpectedFrame(PeerError):
    """Content where a method was due, or the reverse."""


class SubjectKind(Enum):
    """Subject of a refusal; the value is the word used in texts."""

    QUEUE = "queue"
    EXCHANGE = "exchange"
    VHOST = "vhost"
    USER = "user"


@dataclass(frozen=True, slots=True)
class Subject:
    """The named thing that a refusal is about; prints as AMQP clients know it from RabbitMQ."""

    kind: SubjectKind
    vhost: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value} '{self.name}' in vhost '{self.vhost}'"


class Refused(BrokerError):
    """An expected no. `subject` names the queue or exchange it is about, when there is one."""

    def __init__(self, text: str, *, subject: Subject | None = None) -> None:
        super().__init__(text)
        self.subject = subject

    def details(self) -> list[str]:
        """Returns what a subclass knows beyond text and subject, to cross a link."""
        return []

    @classmethod
    def rebuild(cls, text: str, subject: Subject | None, details: list[str]) -> Refused:
        """Returns the error that had these details. Raises ValueError, IndexError."""
        return cls(text, subject=subject)


class NotFound(Refused):
    """The named thing does not exist."""


class AccessRefused(Refused):
    """The user lacks a permission, or nobody may do this."""


class ResourceLocked(Refused):
    """Somebody else holds the thing exclusively."""


_LIMIT = ["limit"]


class PreconditionFailed(Refused):
    """The request contradicts what exists, or an argument is not acceptable."""

    @classmethod
    def rebuild(cls, text: str, subject: Subject | None, details: list[str]) -> Refused:
        return (LimitReached if details == _LIMIT else cls)(text, subject=subject)


class ValidationFailed(PreconditionFailed):
    """A policy, a parameter or a limit is malformed, or says what this broker does not do."""


class LimitReached(PreconditionFailed):
    """A limit allows no more of them. Older nodes take it for its base class, under whose name it
    crosses a link."""

    def details(self) -> list[str]:
        return _LIMIT


class Protected(Refused):
    """Something is protected from deletion."""


class NotAllowed(Refused):
    """A limit or a rule of the connection forbids it."""


class NotServed(Refused):
    """The request is legal, but this broker does not implement it."""


class NotPermitted(Refused):
    """The configuration of this node forbids a feature that RabbitMQ calls deprecated."""


class ForcedClosure(Refused):
    """An operator closed the connection."""


class ResourceExhausted(Refused):
    """The broker has no room for what was asked."""


class ReservationRefused(Refused):
    """An op on a reservation or lease of a queue is refused; `reason` is a word of ADR 0008."""

    def __init__(self, reason: str, text: str, *, subject: Subject | None = None) -> None:
        super().__init__(text, subject=subject)
        self.reason = reason

    def details(self) -> list[str]:
        return [self.reason]

    @classmethod
    def rebuild(cls, text: str, subject: Subject | None, details: list[str]) -> Refused:
        return cls(details[0], text, subject=subject)


class OffsetOutOfRange(Refused):
    """An offset of a stream that is not kept. `first` is the first kept offset, `high` the next one
    to be given out, as far as known to who answered."""

    def __init__(self, first: int, high: int, offset: int) -> None:
        super().__init__(f"offset {offset} is out of range: {first} to {high} (exclusive) are kept")
        self.first = first
        self.high = high
        self.offset = offset

    def details(self) -> list[str]:
        return [str(self.first), str(self.high), str(self.offset)]

    @classmethod
    def rebuild(cls, text: str, subject: Subject | None, details: list[str]) -> Refused:
        first, high, offset = map(int, details)
        return cls(first, high, offset)


class Unavailable(BrokerError):
    """No answer in time: a timeout, no leader, no quorum. Trying again may help."""


class ReplicaBehind(Unavailable):
    """Refusal of a stream's replica that does not have what was asked for yet, while others may; it
    has the offsets below `high`."""

    def __init__(self, high: int) -> None:
        super().__init__(f"this replica has the offsets below {high} only")
        self.high = high


class EntryGone(LookupError):
    """The entry is not in the log: below its start and not live, or above its end."""


class StorageFault(BrokerError):
    """A disk refused, or returned bytes that are not what was written.

    `path` and `offset` (bytes) say where, when they are known.
    """

    def __init__(self, text: str, *, path: str = "", offset: int = -1) -> None:
        where = f" ({path} at byte {offset})" if path and offset >= 0 else f" ({path})" * bool(path)
        super().__init__(text + where)
        self.path = path
        self.offset = offset


class ReplicaStopped(BrokerError):
    """A replica cannot go on with its log: it takes part no more (ADR 0016). Raised by a machine's
    `apply`, `set_version` and `restore`."""


class UnknownCommand(ReplicaStopped):
    """The log holds a command that this build does not know. It is never skipped."""


class UnsupportedVersion(ReplicaStopped):
    """The log or a snapshot needs a machine version or a format that this build does not have."""


class InvariantViolated(BaseException):  # outside the tree on purpose: see the module text
    """A safety fact does not hold. Nothing catches this, no `except Exception` either; the process
    ends."""


def check(condition: object, text: str) -> None:
    """Raises `InvariantViolated` with `text` unless `condition` holds, also under `python -O`."""
    if not condition:
        raise InvariantViolated(text)


_REFUSALS: tuple[type[Refused], ...] = (
    Refused, NotFound, AccessRefused, ResourceLocked, PreconditionFailed, ValidationFailed,
    NotAllowed, NotServed, NotPermitted, ForcedClosure, ResourceExhausted, ReservationRefused,
    OffsetOutOfRange, Protected,
)  # fmt: skip
SUBJECT_PARTS = 3
_REFUSAL_BY_NAME = {refusal.__name__: refusal for refusal in _REFUSALS}


def refusal_to_builtins(error: Refused) -> list[str]:
    """Returns `error` as plain strings, for replies that cross a link between nodes."""
    name = next(c.__name__ for c in type(error).__mro__ if _REFUSAL_BY_NAME.get(c.__name__) is c)
    parts = [name, error.text]
    details = error.details()
    if error.subject is not None:
        parts += [error.subject.kind.value, error.subject.vhost, error.subject.name]
    elif details:
        parts += ["", "", ""]
    return parts + details


def refusal_from_builtins(parts: list[str]) -> Refused:
    """Returns the error that `refusal_to_builtins` described.

    Raises:
        PeerError: `parts` is not such a description.
    """
    try:
        name, text, *rest = parts
        named = bool(rest) and (rest[0] != "" or len(rest) <= SUBJECT_PARTS)
        subject = Subject(SubjectKind(rest[0]), rest[1], rest[2]) if named else None
        return _REFUSAL_BY_NAME[name].rebuild(text, subject, rest[SUBJECT_PARTS:])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise SyntaxFault(f"not a refusal: {parts!r}") from error


def as_broker_error(error: Exception) -> BrokerError:
    """Returns the answer of a queue as an error that clients can be told."""
    return error if isinstance(error, BrokerError) else BrokerError(str(error))
