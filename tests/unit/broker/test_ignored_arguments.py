"""Warnings about arguments that do nothing."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from convoymq.broker.ignored_arguments import PERIOD_MS, WARNINGS_MAX, IgnoredArguments
from tests.unit.queues.quorum.cluster import Clock


@pytest.mark.provokes("broker.argument_ignored")
def test_a_declaration_is_warned_about_once_in_a_while() -> None:
    clock = Clock()
    ignored = IgnoredArguments(clock)
    with capture_logs() as logs:
        ignored.warn("queue", "/", "q", [])
        ignored.warn("queue", "/", "q", ["x-odd"])
        ignored.warn("queue", "/", "q", ["x-odd"])
        ignored.warn("queue", "/", "q", ["x-odd", "x-other"])
        clock.advance(PERIOD_MS)
        ignored.warn("queue", "/", "q", ["x-odd"])
    assert [(row["event"], row["log_level"]) for row in logs] == [
        ("broker.argument_ignored", "warning")
    ] * 3
    assert [row["arguments"] for row in logs] == [["x-odd"], ["x-odd", "x-other"], ["x-odd"]]
    assert (logs[0]["kind"], logs[0]["vhost"], logs[0]["name"]) == ("queue", "/", "q")


def test_many_declarations_are_not_all_warned_about_and_counted() -> None:
    clock = Clock()
    ignored = IgnoredArguments(clock)
    with capture_logs() as logs:
        for n in range(WARNINGS_MAX + 5):
            ignored.warn("consumer", "/", f"q{n}", ["x-odd"])
        clock.advance(PERIOD_MS)
        ignored.warn("consumer", "/", "q", ["x-odd"])
        ignored.warn("exchange", "/", "q", ["x-odd"])
    assert [row["suppressed"] for row in logs] == [0] * WARNINGS_MAX + [5, 0]
