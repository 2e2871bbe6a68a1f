"""Rates and samples of counters, from the read model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from convoymq.broker.read_model import ReadModel, decoded, encoded
from convoymq.broker.tracks import Series, Track
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.fields import number
from convoymq.model.json import JsonObject

SAMPLES_MAX = 2000
"""Of one counter in an answer."""
REQUESTED_MAX = 64
"""Objects with counters that only requests sample."""
REQUESTED_STEP_MS = 10_000
"""Time between two such requests beyond which a rate says nothing about now."""


@dataclass(frozen=True, slots=True)
class Range:
    """Times for which samples are wanted: the latest `age_s`, `step_s` apart."""

    age_s: int
    step_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Ranges of a request, by kind of numbers; None = no samples."""

    lengths: Range | None = None
    messages: Range | None = None
    data: Range | None = None
    node: Range | None = None


NO_RANGES = Ranges()


def ranges_in(query: Mapping[str, str]) -> Ranges:
    """Returns the ranges of a request. Raises 400."""
    return Ranges(
        lengths=_range_in(query, "lengths"),
        messages=_range_in(query, "msg_rates"),
        data=_range_in(query, "data_rates"),
        node=_range_in(query, "node_stats"),
    )


def _range_in(query: Mapping[str, str], name: str) -> Range | None:
    given = [query.get(f"{name}_{part}") for part in ("age", "incr")]
    if None in given:
        return None
    age, step = (number(str(text)) for text in given)
    if not age or not step or age < 0 or step < 0:
        raise bad_request(f"{name}_age and {name}_incr are whole numbers of seconds above 0")
    if age // step >= SAMPLES_MAX:
        raise bad_request(f"{name}_age and {name}_incr ask for more than {SAMPLES_MAX} samples")
    return Range(age, step)


class Rates:
    """Adds rates and samples to counters.

    Args:
        now_ms: the clock of the model.
        wall_s: time for people.
    """

    def __init__(
        self,
        model: ReadModel,
        now_ms: Callable[[], int],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._now_ms = now_ms
        self._wall_s = wall_s
        self._requested: dict[tuple[str, ...], Track] = {}

    def with_details(
        self,
        series: Sequence[Series],
        counters: Mapping[str, float],
        wanted: Range | None = None,
        *,
        falls: bool = False,
    ) -> JsonObject:
        """Returns the counters, each with its `_details`: sums over all series that have it.

        Args:
            wanted: the times of samples; the objects of the series have a history from now on.
            falls: the numbers are no counters.
        """
        now_ms = self._now_ms()
        rates: dict[str, float] = {}
        for each in series:
            for name, rate in each.rates(now_ms, falls=falls).items():
                rates[name] = rates.get(name, 0.0) + rate
        samples: list[list[tuple[int, Mapping[str, float]]]] = []
        if wanted is not None:
            samples = [self._model.with_history(each).samples() for each in series]
        made: JsonObject = {}
        for name, value in counters.items():
            details: JsonObject = {"rate": rates.get(name, 0.0)}
            if wanted is not None:
                known = [
                    [(at_ms, numbers[name]) for at_ms, numbers in each if name in numbers]
                    for each in samples
                ]
                rows = self._sampled(known, wanted, now_ms)
                details |= {"samples": rows, **_averages(rows, falls=falls)}
            made[name] = value
            made[f"{name}_details"] = details
        return made

    def requested(self, key: tuple[str, ...], counters: JsonObject) -> dict[str, float]:
        """Returns the rates of counters that no node samples, from this request for them and
        earlier ones. After a longer time without a request there is none.

        Args:
            key: names the object that the counters are of.
        """
        now_ms, data = self._now_ms(), encoded(counters)
        track = self._requested.pop(key, None)
        if track is None or now_ms - track.stamp_ms > REQUESTED_STEP_MS:
            track = Track(data, now_ms, REQUESTED_STEP_MS)
        else:
            track.put(data, now_ms)
        if len(self._requested) >= REQUESTED_MAX:
            del self._requested[next(iter(self._requested))]
        self._requested[key] = track
        return Series(track, decoded).rates(now_ms, falls=False)

    def _sampled(
        self, known: Sequence[list[tuple[int, float]]], wanted: Range, now_ms: int
    ) -> list[JsonObject]:
        """Returns samples, the newest first. One stands for a time at which it was the latest;
        times before the first have none."""
        wall_s = self._wall_s()
        newest = int(wall_s // wanted.step_s) * wanted.step_s
        places = [len(each) for each in known]
        rows: list[JsonObject] = []
        for stamp in range(newest, newest - wanted.age_s - 1, -wanted.step_s):
            at_ms = now_ms - (wall_s - stamp) * 1000
            total, found = 0.0, False
            for at, each in enumerate(known):
                while places[at] and each[places[at] - 1][0] > at_ms:
                    places[at] -= 1
                if places[at]:
                    total += each[places[at] - 1][1]
                    found = True
            if not found:
                break
            rows.append(
                {"sample": int(total) if total.is_integer() else total, "timestamp": stamp * 1000}
            )
        return rows


def _averages(rows: list[JsonObject], *, falls: bool) -> JsonObject:
    """Returns the mean of samples, and their rate from the first to the last."""
    if len(rows) < 2:
        return {}
    samples = [row["sample"] for row in rows]
    times = [row["timestamp"] for row in rows]
    total: float = sum(samples)  # type: ignore[arg-type]
    steps = (new - old for new, old in pairwise(samples))  # type: ignore[operator]
    risen: float = sum(step for step in steps if falls or step > 0)
    took_ms: int = times[0] - times[-1]  # type: ignore[operator]
    return {"avg_rate": risen * 1000 / took_ms, "avg": total / len(rows)}
