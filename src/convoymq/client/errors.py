"""Errors that a client's calls raise. Every error has a `code` of the protocol and a `text`.

    ClientError
    ├── NotFound             no such queue; `near`: names like it
    │   └── Recreated        a stream of that name, but another one; `group`: its Raft group
    ├── AccessRefused        wrong password, or a permission is missing
    ├── OffsetOutOfRange     retention has dropped it; `first` and `high` are what there is
    ├── ReplicaBehind        no server that was asked has got that far; `high`: how far it is
    ├── Unavailable          nobody answered in time; the text names the servers and the last cause
    ├── PreconditionFailed   wrong type of queue, a wrong argument or column
    │   └── TopicRefused     a rule of ordered topics; `topic_code` as in docs/topics.md
    │       ├── BadPosition       a start that gives a logical partition two places, or none
    │       ├── UnknownPartition  no such partition
    │       ├── DataExpired       retention has dropped what a group or reader wants next
    │       ├── GroupLive         a group that has members cannot be moved
    │       ├── MemberFenced      the message belongs to another member by now
    │       └── ProducerFenced    a newer session of the producer exists
    ├── ReservationGone            the reservation is not what it was; `reason` as in ADR 0008
    ├── ProtocolError        what came is not this protocol, or breaks it
    └── MaybeProduced        the connection was lost before the answer: rows may be in, or not

Errors can be pickled, so they cross from workers to a driver whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convoymq.model.columnar import ErrorCode
from convoymq.topics.rules.refusals import TopicRefused as BrokerRefusal


class ClientError(Exception):
    """A call that failed. Other codes of the protocol than those above are of this class."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    def __reduce__(
        self,
    ) -> tuple[Callable[..., ClientError], tuple[type[ClientError], dict[str, object]]]:
        return _rebuilt, (type(self), dict(self.__dict__))

    def __str__(self) -> str:
        return self.text


class NotFound(ClientError):
    """No such queue or exchange."""

    def __init__(self, text: str, near: tuple[str, ...] = ()) -> None:
        super().__init__(ErrorCode.NOT_FOUND, text)
        self.near = near

    def __str__(self) -> str:
        return f"{self.text}; near: {', '.join(self.near)}" if self.near else self.text


class Recreated(NotFound):
    """The stream was deleted, and another one has its name."""

    def __init__(self, text: str, group: int) -> None:
        super().__init__(text)
        self.group = group


class AccessRefused(ClientError):
    """Wrong user or password, or the user lacks a permission."""

    def __init__(self, text: str) -> None:
        super().__init__(ErrorCode.ACCESS_REFUSED, text)


class OffsetOutOfRange(ClientError):
    """The stream no longer holds the offset, or never did."""

    def __init__(self, text: str, first: int, high: int) -> None:
        super().__init__(ErrorCode.OFFSET_OUT_OF_RANGE, text)
        self.first = first
        self.high = high


class ReplicaBehind(ClientError):
    """The server has not got that far."""

    def __init__(self, text: str, high: int) -> None:
        super().__init__(ErrorCode.REPLICA_BEHIND, text)
        self.high = high


class Unavailable(ClientError):
    """Nobody answered in time."""

    def __init__(self, text: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, text)


class PreconditionFailed(ClientError):
    """The request does not fit what is there."""

    def __init__(self, text: str) -> None:
        super().__init__(ErrorCode.PRECONDITION_FAILED, text)


class TopicRefused(PreconditionFailed):
    """A rule of ordered topics forbids it."""

    def __init__(self, text: str, topic_code: str) -> None:
        super().__init__(text)
        self.topic_code = topic_code


class BadPosition(TopicRefused):
    """A position does not give every logical partition exactly one place."""


class UnknownPartition(TopicRefused):
    """The topic has, or had, no such partition."""


class DataExpired(TopicRefused):
    """Retention has dropped what is to be read next."""


class GroupLive(TopicRefused):
    """The group has members: they have to leave first."""


class ProducerFenced(TopicRefused):
    """A newer session of the producer exists."""


class MemberFenced(TopicRefused):
    """The lease of the message's partition has ended: another member gets the message again."""


_TOPIC: dict[str, type[TopicRefused]] = {
    "BAD_POSITION": BadPosition,
    "UNKNOWN_PARTITION": UnknownPartition,
    "DATA_EXPIRED": DataExpired,
    "GROUP_LIVE": GroupLive,
    "LEASE_FENCED": MemberFenced,
    "PRODUCER_FENCED": ProducerFenced,
}


class ReservationGone(ClientError):
    """The reservation ended, was taken over, or has another epoch."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(ErrorCode.RESERVATION_GONE, text)
        self.reason = reason


class ProtocolError(ClientError):
    """Somebody broke the protocol."""

    def __init__(self, text: str) -> None:
        super().__init__(ErrorCode.FRAME_ERROR, text)


class MaybeProduced(ClientError):
    """Rows may have been published, or not: nobody can tell. With a producer's name and sequence a
    repeat is harmless, and the client repeats by itself."""

    def __init__(self, text: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, text)


def of_answer(code: int, details: Mapping[str, object]) -> ClientError:
    """Returns the error that an answer with this status tells of."""
    text = str(details.get("text") or f"error {code}")
    match code:
        case ErrorCode.NOT_FOUND if "group" in details:
            return Recreated(text, _number(details, "group"))
        case ErrorCode.NOT_FOUND:
            near = details.get("near")
            return NotFound(text, tuple(map(str, near)) if isinstance(near, list | tuple) else ())
        case ErrorCode.ACCESS_REFUSED:
            return AccessRefused(text)
        case ErrorCode.OFFSET_OUT_OF_RANGE:
            return OffsetOutOfRange(text, _number(details, "first"), _number(details, "high"))
        case ErrorCode.REPLICA_BEHIND:
            return ReplicaBehind(text, _number(details, "high"))
        case ErrorCode.UNAVAILABLE:
            return Unavailable(text)
        case ErrorCode.PRECONDITION_FAILED if "topic_code" in details:
            topic_code = str(details["topic_code"])
            return _TOPIC.get(topic_code, TopicRefused)(text, topic_code)
        case ErrorCode.PRECONDITION_FAILED:
            return PreconditionFailed(text)
        case ErrorCode.RESERVATION_GONE:
            return ReservationGone(text, str(details.get("reason") or ""))
        case ErrorCode.FRAME_ERROR:
            return ProtocolError(text)
        case _:
            return ClientError(code, text)


def of_refusal(refusal: BrokerRefusal) -> ClientError:
    """Returns the error for what this process refuses by a rule of ordered topics."""
    code = refusal.code.value
    return _TOPIC.get(code, TopicRefused)(refusal.text, code)


def _number(details: Mapping[str, object], name: str) -> int:
    value = details.get(name)
    return value if isinstance(value, int) else -1


def _rebuilt(kind: type[ClientError], state: dict[str, object]) -> ClientError:
    made = kind.__new__(kind)
    Exception.__init__(made, state["text"])
    made.__dict__.update(state)
    return made
