"""The compiled conversion of messages of AMQP 1.0 to AMQP 0-9-1 is that of the pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels.content import data_content
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.message import stored_of
from convoymq.messages.amqp10.sections import DATA, FOOTER, VALUE, section
from convoymq.messages.amqp10.values import Symbol
from convoymq.messages.encodings import AMQP_10
from convoymq.messages.record import as_amqp091, content_of, telling_deaths
from tests.unit.kernels.test_amqp10_frames import PLAIN_MESSAGES
from tests.unit.messages.amqp10.strategies import FEW, MESSAGES


def stored(payload: bytes) -> bytes:
    found = stored_of(payload)
    return content_of(found.properties, found.body, AMQP_10)


@FEW
@given(MESSAGES)
def test_it_is_the_pure_functions_or_nothing(payload: bytes) -> None:
    content = stored(payload)
    assert data_content(content) in (None, as_amqp091(content))


@given(PLAIN_MESSAGES, st.booleans())
def test_plain_messages_are_the_same_in_both(payload: bytes, told: bool) -> None:
    content = telling_deaths(stored(payload), told)
    assert data_content(content) in (None, as_amqp091(content))


@pytest.mark.parametrize("size", [0, 1, 255, 256, 100_000])
def test_data_of_any_size_in_one_frame(size: int) -> None:
    annotated = section(0x72, {Symbol("x-a"): 1}) + section(0x74, {"a": 1})
    for before in (b"", section(0x73, ["id"]), annotated):
        content = stored(before + section(DATA, bytes(size)))
        assert data_content(content) == as_amqp091(content)


def test_others_are_left_to_them() -> None:
    for payload in (
        section(VALUE, "text"),
        section(DATA, b"a") + section(DATA, b"b"),
        section(DATA, b"a") + section(FOOTER, {}),
        section(DATA, bytes(200_000)),
    ):
        assert data_content(stored(payload)) is None
    assert data_content(content_of(Properties(), b"body")) is None
    assert data_content(b"") is None


@given(PLAIN_MESSAGES, st.data())
def test_what_is_cut_off_is_left_to_them(payload: bytes, data: st.DataObject) -> None:
    content = stored(payload)
    assert data_content(content[: data.draw(st.integers(0, len(content) - 1))]) is None
