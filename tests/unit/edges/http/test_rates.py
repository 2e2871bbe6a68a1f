"""Counters become rates between two looks, however many things have them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.rates import (
    HISTORIES_MAX,
    NO_RANGES,
    RATE_INTERVAL_S,
    RATES_MAX,
    SAMPLES_MAX,
    WATCH_S,
    WATCHES_MAX,
    Range,
    Rates,
    ranges_in,
)
from convoymq.model.errors import NotFound


class Time:
    """A clock that stands still until told; on the wall it is 5,000 s later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 5000)


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


def details(rates: Rates, value: float, wanted: Range | None = None, key: str = "q") -> Any:
    return rates.with_details(key, {"ack": value}, wanted)["ack_details"]


def test_samples_are_those_of_looks_the_newest_first(clock: Time) -> None:
    rates, wanted = Rates(), Range(20, 10)
    assert details(rates, 0, wanted)["samples"] == [{"sample": 0, "timestamp": 6_000_000}]
    for value in (10, 20, 30, 40):
        clock.now += RATE_INTERVAL_S
        found = details(rates, value, wanted)
    assert found == {
        "rate": 2.0,
        "samples": [
            {"sample": 40, "timestamp": 6_020_000},
            {"sample": 20, "timestamp": 6_010_000},
            {"sample": 0, "timestamp": 6_000_000},
        ],
        "avg_rate": 2.0,
        "avg": 20.0,
    }
    # Times are multiples of the step, and a sample stands until the next.
    clock.now += 3.0
    rows = details(rates, 99, Range(5, 1))["samples"]
    assert rows == [{"sample": 40, "timestamp": (6_023 - ago) * 1000} for ago in range(4)] + [
        {"sample": 30, "timestamp": 6_019_000},
        {"sample": 30, "timestamp": 6_018_000},
    ]
    assert details(rates, 99) == {"rate": 2.0}


def test_what_was_not_there_has_no_samples(clock: Time) -> None:
    rates, wanted = Rates(), Range(60, 5)
    rates.with_details("q", {"ack": 1}, wanted)
    clock.now += RATE_INTERVAL_S
    found: Any = rates.with_details("q", {"ack": 2, "get": 7}, wanted)
    assert len(found["ack_details"]["samples"]) == 2
    assert found["get_details"]["samples"] == [{"sample": 7, "timestamp": 6_005_000}]
    assert "avg" not in found["get_details"]
    clock.now += RATE_INTERVAL_S
    found = rates.with_details("q", {"ack": 2}, wanted)
    assert set(found) == {"ack", "ack_details"}


def test_a_length_may_fall_and_a_counter_that_fell_began_anew(clock: Time) -> None:
    rates, wanted = Rates(), Range(60, 5)
    for value in (50, 20):
        length: Any = rates.with_details("length", {"messages": value}, wanted, falls=True)
        counter = details(rates, value, wanted)
        clock.now += RATE_INTERVAL_S
    assert (length["messages_details"]["rate"], counter["rate"]) == (-6.0, 0.0)
    assert (length["messages_details"]["avg_rate"], counter["avg_rate"]) == (-6.0, 0.0)


def test_histories_are_bounded(clock: Time) -> None:
    """In length and number; the one that was asked for longest ago goes."""
    rates, wanted = Rates(), Range(100_000, 5)
    for _ in range(SAMPLES_MAX + 9):
        found = details(rates, 1, wanted)
        clock.now += RATE_INTERVAL_S
    assert len(found["samples"]) == SAMPLES_MAX
    for number in range(HISTORIES_MAX):
        details(rates, 1, wanted, f"q{number}")
    assert len(rates._histories) == HISTORIES_MAX
    assert len(details(rates, 1, wanted)["samples"]) == 1
    details(rates, 1, wanted, "q0")
    rates.forget()
    assert len(details(rates, 1, wanted)["samples"]) == 1


async def test_what_was_asked_for_lately_is_looked_at_without_a_request(clock: Time) -> None:
    rates, wanted = Rates(), Range(600, 5)
    seen = 0

    async def look() -> None:
        nonlocal seen
        seen += 1
        details(rates, seen, wanted)

    async def gone() -> None:
        raise NotFound("the queue is deleted")

    await look()
    rates.watch("q", look)
    rates.watch("gone", gone)
    while clock.now < 1000 + WATCH_S:
        clock.now += RATE_INTERVAL_S
        await rates.look()
        assert list(rates._watches) == ["q"]
    assert seen == 1 + WATCH_S / RATE_INTERVAL_S
    clock.now += RATE_INTERVAL_S
    await rates.look()
    assert not rates._watches
    await rates.stop()


async def test_watches_are_bounded(clock: Time) -> None:
    rates = Rates()

    async def look() -> None:
        pass

    for number in range(WATCHES_MAX + 1):
        rates.watch(number, look)
    assert list(rates._watches) == list(range(1, WATCHES_MAX + 1))
    await rates.stop()
    assert not rates._watches


def test_ranges_of_a_request() -> None:
    assert ranges_in({"lengths_age": "60", "msg_rates_incr": "5"}) is not None
    assert not ranges_in({"lengths_age": "60", "msg_rates_incr": "5"}).wanted
    assert ranges_in({}) == NO_RANGES
    query = {
        f"{name}_{part}": text
        for name in ("lengths", "msg_rates", "data_rates", "node_stats")
        for part, text in (("age", "60"), ("incr", "5"))
    }
    found = ranges_in(query)
    assert found.lengths == found.messages == found.data == found.node == Range(60, 5)
    for wrong in ("0", "-1", "x", "", "1.5"):
        with pytest.raises(ApiError):
            ranges_in(query | {"data_rates_incr": wrong})
