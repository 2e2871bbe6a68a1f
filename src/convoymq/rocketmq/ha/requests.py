"""Requests with which two of ours compare their logs. RocketMQ's brokers answer them with 3.

| request | fields | answer |
|---|---|---|
| COMPARE_LOGS | brokerName, brokerId, brokerAddr, start, end | minOffset, maxOffset, brokerId, session, takesWrites, checksum?; body: the lives |
| FETCH_LOG | brokerName, brokerId, brokerAddr, offset, limit | body: the bytes |
"""  # noqa: E501

from __future__ import annotations

from convoymq.model.errors import PeerError, Unavailable
from convoymq.replication.group.lives import decode_lives, encode_lives
from convoymq.replication.group.types import Ask, Fetch, Log, Tail
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request

FETCH_BYTES_MAX = 4 << 20


class NoComparison(PeerError):
    """The other broker is one of RocketMQ's."""


def question_of(question: Ask | Fetch, own: dict[str, str]) -> Command:
    """Returns the request for a question. `own`: fields that name this broker."""
    if isinstance(question, Fetch):
        fields = {"offset": str(question.offset), "limit": str(question.limit)}
        return request(Request.FETCH_LOG, own | fields)
    fields = {"start": str(question.start), "end": str(question.end)}
    return request(Request.COMPARE_LOGS, own | fields)


def reply_of(question: Ask | Fetch, answer: Command) -> Tail | bytes:
    """Returns the answer. Raises NoComparison, Unavailable, PeerError."""
    if answer.code == Answer.REQUEST_CODE_NOT_SUPPORTED:
        raise NoComparison("it does not compare logs")
    if answer.code == Answer.SERVICE_NOT_AVAILABLE:
        raise Unavailable(answer.remark or "not available")
    if answer.code != Answer.SUCCESS:
        raise PeerError(f"answer {answer.code}: {answer.remark}")
    return bytes(answer.body) if isinstance(question, Fetch) else _tail(answer)


def ask_of(command: Command) -> Ask:
    """Returns the question in a request. Raises SyntaxFault."""
    return Ask(start=command.number("start"), end=command.number("end"))


def answer_tail(command: Command, tail: Tail) -> Command:
    """Returns the answer to COMPARE_LOGS."""
    fields = {
        "minOffset": str(tail.min_offset),
        "maxOffset": str(tail.max_offset),
        "brokerId": str(tail.member),
        "session": str(tail.session),
        "takesWrites": str(tail.takes_writes).lower(),
    }
    if tail.checksum is not None:
        fields["checksum"] = str(tail.checksum)
    return command.answer(fields=fields, body=encode_lives(tail.lives))


def answer_fetch(command: Command, log: Log) -> Command:
    """Returns the answer to FETCH_LOG. Raises SyntaxFault."""
    offset = command.number("offset")
    left = min(command.number("limit"), FETCH_BYTES_MAX)
    parts = []
    while left > 0:
        part = log.read_raw(offset, left)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        left -= len(part)
    return command.answer(body=b"".join(parts))


def _tail(answer: Command) -> Tail:
    return Tail(
        min_offset=answer.number("minOffset"),
        max_offset=answer.number("maxOffset"),
        member=answer.number("brokerId"),
        session=answer.number("session"),
        takes_writes=answer.needed("takesWrites") == "true",
        lives=decode_lives(bytes(answer.body)),
        checksum=answer.number("checksum") if "checksum" in answer.fields else None,
    )
