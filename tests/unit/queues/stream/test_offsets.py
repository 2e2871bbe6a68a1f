"""Start of a consumer of a stream."""

from __future__ import annotations

import pytest

from convoymq.model.tables import Field
from convoymq.queues.stream.offsets import TIME_MS_MAX, Start, StartAt, parse_start


@pytest.mark.parametrize(
    ("field", "time_ms"),
    [
        (Field("T", -(1 << 62)), 0),
        (Field("T", (1 << 64) - 1), TIME_MS_MAX),
        (Field("S", b"999999999999Y"), 0),
        (Field("S", b"10s"), 90_000),
    ],
)
def test_times_fit_into_a_question_to_another_node(field: Field, time_ms: int) -> None:
    assert parse_start(field, 100_000) == StartAt(Start.TIMESTAMP, time_ms)


@pytest.mark.parametrize(
    "field", [Field("l", -1), Field("S", b"later"), Field("S", b"0s"), Field("V", None)]
)
def test_others_are_refused(field: Field) -> None:
    assert isinstance(parse_start(field, 0), str)
