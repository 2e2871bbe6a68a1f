"""Counters get rates and samples from the read model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from convoymq.broker import read_model
from convoymq.broker.read_model import ReadModel, decoded
from convoymq.broker.tracks import Series
from convoymq.edges.http import rates as rates_module
from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.rates import NO_RANGES, SAMPLES_MAX, Range, Rates, ranges_in


class Clocked:
    """A model with a clock; on the wall it is 5,000 s later."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.model = ReadModel()
        self.rates = Rates(self.model, lambda: self.now_ms, lambda: self.now_ms / 1000 + 5000)

    def put(self, key: str = "q", node: int = 1, **numbers: float) -> None:
        self.model.put(node, "channels", key, msgspec.msgpack.encode(numbers), self.now_ms)

    def series(self, *nodes: int, key: str = "q") -> list[Series]:
        tracks = [self.model.find(node, "channels", key) for node in nodes or (1,)]
        return [Series(track, decoded) for track in tracks if track is not None]

    def details(self, name: str, wanted: Range | None = None, *nodes: int, **more: Any) -> Any:
        found = self.rates.with_details(self.series(*nodes), {name: 0}, wanted, **more)
        return found[f"{name}_details"]


def test_counters_have_rates() -> None:
    clocked = Clocked()
    clocked.put(ack=7)
    assert clocked.rates.with_details(clocked.series(), {"ack": 7}) == {
        "ack": 7, "ack_details": {"rate": 0.0}
    }  # fmt: skip
    clocked.now_ms += 1000
    clocked.put(ack=17, get=1)
    assert clocked.details("ack") == {"rate": 10.0}
    assert clocked.details("get") == {"rate": 0.0}
    assert clocked.rates.with_details([], {"ack": 1}) == {"ack": 1, "ack_details": {"rate": 0.0}}


def test_samples_are_those_of_each_second_the_newest_first() -> None:
    clocked, wanted = Clocked(), Range(20, 10)
    clocked.put(ack=0)
    assert clocked.details("ack", wanted)["samples"] == [{"sample": 0, "timestamp": 6_000_000}]
    for value in (10, 20, 30, 40):
        clocked.now_ms += 5000
        clocked.put(ack=value)
    assert clocked.details("ack", wanted) == {
        "rate": 10.0,
        "samples": [
            {"sample": 40, "timestamp": 6_020_000},
            {"sample": 20, "timestamp": 6_010_000},
            {"sample": 0, "timestamp": 6_000_000},
        ],
        "avg_rate": 2.0,
        "avg": 20.0,
    }
    # Times are multiples of the step, and a sample stands until the next.
    clocked.now_ms += 3000
    rows = clocked.details("ack", Range(5, 1))["samples"]
    assert rows == [{"sample": 40, "timestamp": (6_023 - ago) * 1000} for ago in range(4)] + [
        {"sample": 30, "timestamp": 6_019_000},
        {"sample": 30, "timestamp": 6_018_000},
    ]


def test_numbers_of_several_nodes_are_added() -> None:
    clocked, wanted = Clocked(), Range(10, 5)
    for node in (1, 2):
        clocked.put(node=node, ack=100 * node)
        clocked.details("ack", wanted, 1, 2)
    clocked.now_ms += 5000
    for node in (1, 2):
        clocked.put(node=node, ack=100 * node + 5)
    found = clocked.details("ack", wanted, 1, 2)
    assert found["rate"] == 10.0
    assert [row["sample"] for row in found["samples"]] == [310, 300]


def test_what_was_not_there_has_no_samples() -> None:
    clocked, wanted = Clocked(), Range(60, 5)
    clocked.put(ack=1)
    clocked.details("ack", wanted)
    clocked.now_ms += 5000
    clocked.put(ack=2, get=7)
    assert len(clocked.details("ack", wanted)["samples"]) == 2
    found = clocked.details("get", wanted)
    assert found["samples"] == [{"sample": 7, "timestamp": 6_005_000}]
    assert "avg" not in found


def test_a_length_may_fall_and_a_counter_that_fell_began_anew() -> None:
    clocked, wanted = Clocked(), Range(60, 5)
    clocked.put(n=50)
    clocked.details("n", wanted)
    clocked.now_ms += 5000
    clocked.put(n=20)
    length, counter = clocked.details("n", wanted, falls=True), clocked.details("n", wanted)
    assert (length["rate"], counter["rate"]) == (-30.0, 0.0)
    assert (length["avg_rate"], counter["avg_rate"]) == (-6.0, 0.0)


def test_histories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was asked for longest ago goes."""
    monkeypatch.setattr(read_model, "HISTORIES_MAX", 2)
    clocked, wanted = Clocked(), Range(10, 1)
    for key in "abc":
        clocked.put(key, ack=1)
    clocked.now_ms += 1000
    for key in "abac":
        clocked.rates.with_details(clocked.series(key=key), {"ack": 1}, wanted)
    known = {key: clocked.series(key=key)[0].track.history is not None for key in "abc"}
    assert known == {"a": True, "b": False, "c": True}
    clocked.model.forget(1)
    assert clocked.model.load() == {"entries": 0, "histories": 0}


def test_ranges_of_a_request() -> None:
    assert ranges_in({}) == NO_RANGES
    assert ranges_in({"lengths_age": "60", "lengths_incr": "5"}).lengths == Range(60, 5)
    for age, step in (("0", "5"), ("5", "0"), ("x", "5"), ("-5", "5"), (str(SAMPLES_MAX), "1")):
        with pytest.raises(ApiError):
            ranges_in({"msg_rates_age": age, "msg_rates_incr": step})


@pytest.mark.parametrize(("age_s", "step_s"), [(60, 1), (3600, 60)])
def test_the_first_sample_of_a_range_is_of_its_time(age_s: int, step_s: int) -> None:
    """A counter that rises steadily rises steadily in its samples: none is of an earlier minute."""
    clocked, wanted = Clocked(), Range(age_s, step_s)
    clocked.put(ack=0)
    clocked.details("ack", wanted)
    for second in range(1, 2 * age_s + 90):
        clocked.now_ms += 1000
        clocked.put(ack=second * 10)
    found = clocked.details("ack", wanted)
    samples = [each["sample"] for each in found["samples"]]
    assert len(samples) == age_s // step_s + 1
    # A sample of a minute may be as old as one: the first one of seconds makes up for it.
    steps = {new - old for new, old in pairwise(samples)}
    assert steps == {10} if step_s == 1 else max(steps) < 2 * 10 * step_s
    assert found["avg_rate"] == pytest.approx(10.0, rel=0.02)


def test_counters_that_only_requests_sample_have_rates_between_requests() -> None:
    clocked = Clocked()

    def rates(messages: int, after_ms: int) -> dict[str, float]:
        clocked.now_ms += after_ms
        return clocked.rates.requested(("exchange", "/", "x"), {"q": messages})

    assert rates(10, 0) == {}
    assert rates(30, 2000) == {"q": 10.0}
    assert rates(45, 5000) == {"q": 5.0}
    assert rates(900, 60_000) == {}, "messages of a minute count as those of a step"
    assert rates(910, 10_000) == {"q": 1.0}
    assert rates(0, 1000) == {"q": 0.0}, "counters that began anew have no negative rate"


def test_at_most_so_many_objects_are_sampled_by_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was requested longest ago goes."""
    monkeypatch.setattr(rates_module, "REQUESTED_MAX", 2)
    clocked = Clocked()
    for name in "abac":
        clocked.rates.requested((name,), {"q": 1})
    clocked.now_ms += 1000
    known = {name: bool(clocked.rates.requested((name,), {"q": 2})) for name in "acb"}
    assert known == {"a": True, "c": True, "b": False}
