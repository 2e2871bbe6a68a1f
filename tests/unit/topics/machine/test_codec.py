"""Commands and outcomes as bytes."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.topics.machine import codec
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.rules.commands import Command, HandOver, Produce, ProduceRuns
from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.routes import Span

WORDS = st.integers(0, (1 << 63) - 1)
st.register_type_strategy(int, WORDS)
st.register_type_strategy(Span, st.builds(Span, WORDS, WORDS, WORDS))
st.register_type_strategy(OrderToken, st.builds(OrderToken, WORDS, WORDS))


@given(st.one_of([st.from_type(kind) for kind in codec.COMMANDS.values()]))
def test_a_command_comes_back(command: Command) -> None:
    assert codec.decode_command(codec.encode_command(command)) == command


@given(st.one_of([st.from_type(kind) for kind in codec.OUTCOMES.values()]))
def test_an_outcome_comes_back(outcome: Outcome) -> None:
    assert codec.decode_outcome(codec.encode_outcome(outcome)) == outcome


def test_every_command_and_outcome_has_a_number_but_messages() -> None:
    assert set(codec.COMMANDS.values()) | {Produce, ProduceRuns} == set(get_args(Command))
    assert set(codec.OUTCOMES.values()) == set(get_args(Outcome))


def test_the_bytes_of_a_command_are_those_of_the_format() -> None:
    encoded = codec.encode_command(HandOver("g", 7))
    assert encoded == b"\x92\x0d\x92\xa1g\x07"
    assert [field.name for field in fields(HandOver)] == ["group", "group_epoch"]


@pytest.mark.parametrize("data", [b"", b"\x92\x63\x90", b"\x92\x0d\x91\xa1g", b"\xc1"])
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="malformed"):
        codec.decode_command(data)
