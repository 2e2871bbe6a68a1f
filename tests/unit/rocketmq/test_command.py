"""Commands in both encodings of their headers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels.remoting import frame
from convoymq.model.errors import FrameFault, SyntaxFault
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.command import (
    BINARY,
    JSON,
    Command,
    CommandReader,
    encode,
    request,
)


def header(**members: object) -> bytes:
    return frame(JSON, json.dumps(members).encode(), b"")


@given(
    code=st.integers(0, 0x7FFF),
    fields=st.dictionaries(st.text(max_size=10), st.text(max_size=20), max_size=5),
    body=st.binary(max_size=50),
    encoding=st.sampled_from([JSON, BINARY]),
)
def test_a_command_comes_back(
    code: int, fields: dict[str, str], body: bytes, encoding: int
) -> None:
    sent = request(code, fields, body)
    sent.encoding = encoding
    assert CommandReader().feed(encode(sent)) == [sent]


def test_an_answer_has_the_number_and_the_encoding_of_its_request() -> None:
    asked = request(105, {"topic": "t"})
    asked.encoding = BINARY
    answer = asked.answer(Answer.TOPIC_NOT_EXIST, remark="no")
    assert (answer.opaque, answer.encoding, answer.is_answer) == (asked.opaque, BINARY, True)
    assert not asked.is_answer
    assert request(904, one_way=True).is_one_way


def test_values_are_text_whatever_was_sent() -> None:
    (found,) = CommandReader().feed(
        header(
            code=310, opaque=7, version=401, flag=0, language="NODE_JS",
            serializeTypeCurrentRPC="JSON",
            extFields={"a": 1, "b": True, "c": "x", "d": None, "e": 1.5, "f": {"g": [1, 2]}},
        )
    )  # fmt: skip
    assert found.fields == {"a": "1", "b": "true", "c": "x", "e": "1.5", "f": '{"g": [1, 2]}'}
    assert (found.code, found.opaque, found.version, found.language) == (310, 7, 401, 13)


@pytest.mark.parametrize("language", ["KLINGON", 7])
def test_any_language_is_welcome(language: object) -> None:
    (found,) = CommandReader().feed(header(code=1, opaque=1, language=language))
    assert found.language == 7


def test_fields_that_are_needed() -> None:
    command = Command(1, {"brokerId": "x1", "big": str(1 << 80), "n": "-5"})
    assert command.number("n") == -5
    assert command.number("absent", 3) == 3
    with pytest.raises(SyntaxFault, match="the custom field <topic> is null"):
        command.needed("topic")
    with pytest.raises(SyntaxFault, match="<brokerId> is no number: x1"):
        command.number("brokerId")
    with pytest.raises(SyntaxFault, match="64 bits"):
        command.number("big")


@pytest.mark.parametrize(
    "data",
    [
        frame(JSON, b"nonsense", b""),
        frame(JSON, b"[]", b""),
        frame(JSON, b'{"code":"x","opaque":1}', b""),
        frame(JSON, b'{"opaque":1}', b""),
        frame(JSON, b'{"code":1,"opaque":1,"extFields":{"a":' + b"[" * 100_000, b""),
        frame(BINARY, b"short", b""),
    ],
)
def test_a_header_that_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(SyntaxFault):
        CommandReader().feed(data)


def test_a_frame_beyond_the_bound_is_refused() -> None:
    with pytest.raises(FrameFault):
        CommandReader(100).feed(encode(request(1, {}, bytes(101))))
