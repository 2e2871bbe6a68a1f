"""Counters become rates between two looks, however many things have them."""

from __future__ import annotations

import time

import pytest

from convoymq.edges.http.resources import RATE_INTERVAL_S, RATES_MAX, Rates


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def test_a_rate_is_that_between_two_looks(clock: Time) -> None:
    rates = Rates()
    assert rates.with_details("q", {"ack": 7}) == {"ack": 7, "ack_details": {"rate": 0.0}}
    clock.now += RATE_INTERVAL_S
    assert rates.rates("q", {"ack": 17, "get": 1}) == {"ack": 10 / RATE_INTERVAL_S}
    clock.now += RATE_INTERVAL_S / 2
    # Too soon for another one: the latest stands.
    assert rates.rates("q", {"ack": 99, "get": 9}) == {"ack": 10 / RATE_INTERVAL_S}
    clock.now += RATE_INTERVAL_S / 2
    found = rates.with_details("q", {"ack": 12, "get": 11})
    # A counter that fell is that of another node's life.
    assert found["ack_details"] == {"rate": 0.0}
    assert found["get_details"] == {"rate": 10 / RATE_INTERVAL_S}


def test_ten_thousand_queues_have_rates(clock: Time) -> None:
    rates = Rates()
    names = [f"counter{number}" for number in range(18)]
    for value in (0, 10):
        for queue in range(10_000):
            found = rates.rates(f"queue.{queue}", dict.fromkeys(names, value))
            if value:
                assert found["counter0"] == 10 / RATE_INTERVAL_S, queue
        clock.now += RATE_INTERVAL_S


def test_what_is_remembered_is_bounded(clock: Time) -> None:
    rates = Rates()
    for queue in range(RATES_MAX + 5):
        rates.rates(f"queue.{queue}", {"ack": queue})
    assert len(rates._known) == 5
