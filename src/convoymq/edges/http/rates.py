"""Rates and samples of counters, which come from looks at them.

Counters become rates between two looks, at least `RATE_INTERVAL_S` apart. An object that is asked
for with a range (`lengths_age`, `lengths_incr` and their kin) gets a history: each look adds a
sample, and for `WATCH_S` after the last such request this node looks by itself.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf, nan

from convoymq.edges.http.bodies import ApiError, bad_request
from convoymq.edges.http.fields import number
from convoymq.model.errors import BrokerError
from convoymq.model.json import JsonObject
from convoymq.model.tasks import Tasks

RATE_INTERVAL_S = 5.0
RATES_MAX = 100_000
"""Queues, mostly, whose counters are remembered."""
HISTORIES_MAX = 512
"""Sets of counters with samples: at most some 10 MiB."""
SAMPLES_MAX = 121
"""Samples of a history, `RATE_INTERVAL_S` apart: ten minutes."""
WATCHES_MAX = 64
WATCH_S = 600.0


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

    @property
    def wanted(self) -> bool:
        """Returns whether samples of anything are wanted."""
        return self != NO_RANGES


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
    return Range(age, step)


class _History:
    """Samples of one set of counters, the newest last."""

    def __init__(self) -> None:
        self.asked_s = 0.0
        self._places: dict[str, int] = {}
        self._samples: deque[tuple[float, array[float]]] = deque(maxlen=SAMPLES_MAX)

    def add(self, now_s: float, counters: Mapping[str, float]) -> None:
        for name in counters:
            self._places.setdefault(name, len(self._places))
        values = array("d", [nan]) * len(self._places)
        for name, value in counters.items():
            values[self._places[name]] = value
        self._samples.append((now_s, values))

    def details(
        self, name: str, wanted: Range, now_s: float, wall_s: float, *, falls: bool
    ) -> JsonObject:
        """Returns the samples of a counter, the newest first. One stands for a time at which it was
        the latest; times before the first have none."""
        place = self._places[name]
        known = [
            (at, v[place]) for at, v in self._samples if len(v) > place and v[place] == v[place]
        ]
        newest = wall_s // wanted.step_s * wanted.step_s
        rows: list[JsonObject] = []
        for stamp in range(int(newest), int(newest) - wanted.age_s - 1, -wanted.step_s):
            while known and known[-1][0] - now_s + wall_s > stamp:
                known.pop()
            if not known:
                break
            value = known[-1][1]
            whole = int(value) if value.is_integer() else value
            rows.append({"sample": whole, "timestamp": stamp * 1000})
        return {"samples": rows, **_averages(rows, falls=falls)}


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


@dataclass(slots=True)
class _Looks:
    """The last look at one set of counters, and their rates then."""

    since: float
    counters: dict[str, float]
    rates: dict[str, float]
    history: _History | None = None


class Rates:
    """Turns counters into rates between two looks at them, and into samples where those are
    wanted."""

    def __init__(self) -> None:
        self._known: dict[str, _Looks] = {}
        self._histories: dict[str, _History] = {}
        """In the order in which they were asked for last."""
        self._watches: dict[Hashable, tuple[float, Callable[[], Awaitable[object]]]] = {}
        """Subject -> when it was asked for, and the look at it; longest ago first."""
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks()

    def rates(
        self, key: str, counters: Mapping[str, float], *, falls: bool = False
    ) -> dict[str, float]:
        """Returns the latest rates of the counters that something has, per second. Those that
        were not there before have none; one that fell is that of another node's life, unless it is
        one that `falls`."""
        least = -inf if falls else 0.0
        now = time.monotonic()
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= RATES_MAX:
                self._forget_looks()
            self._known[key] = _Looks(now, dict(counters), {})
            return {}
        if now - known.since >= RATE_INTERVAL_S:
            known.rates = {
                name: max(least, (value - known.counters[name]) / (now - known.since))
                for name, value in counters.items()
                if name in known.counters
            }
            known.since, known.counters = now, dict(counters)
            if known.history is not None:
                known.history.add(now, counters)
        return known.rates

    def forget(self) -> None:
        """Begins anew, as if nobody had looked."""
        self._forget_looks()
        self._watches.clear()

    def _forget_looks(self) -> None:
        self._known.clear()
        self._histories.clear()

    def with_details(
        self,
        key: str,
        counters: Mapping[str, float],
        wanted: Range | None = None,
        *,
        falls: bool = False,
    ) -> JsonObject:
        """Returns the counters, each with its `_details`."""
        rates = self.rates(key, counters, falls=falls)
        history = self._history(key) if wanted is not None else None
        now_s, wall_s = time.monotonic(), time.time()
        made: JsonObject = {}
        for name, value in counters.items():
            details: JsonObject = {"rate": rates.get(name, 0.0)}
            if wanted is not None and history is not None:
                details |= history.details(name, wanted, now_s, wall_s, falls=falls)
            made[name] = value
            made[f"{name}_details"] = details
        return made

    def _history(self, key: str) -> _History:
        """Returns the history of a set of counters that was looked at just now."""
        now = time.monotonic()
        known = self._known[key]
        history = self._histories.pop(key, None)
        if history is None:
            history = known.history = _History()
            history.add(known.since, known.counters)
            if len(self._histories) >= HISTORIES_MAX:
                longest_ago = next(iter(self._histories))
                del self._histories[longest_ago]
                self._known[longest_ago].history = None
        self._histories[key] = history
        history.asked_s = now
        return history

    # --- looks that nobody asked for --------------------------------------------------------

    def watch(self, subject: Hashable, look: Callable[[], Awaitable[object]]) -> None:
        """Has something looked at for `WATCH_S` from now on, as a request with ranges does it."""
        self._watches.pop(subject, None)
        if len(self._watches) >= WATCHES_MAX:
            del self._watches[next(iter(self._watches))]
        self._watches[subject] = (time.monotonic(), look)
        self._wait()

    def _wait(self) -> None:
        if self._watches and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(RATE_INTERVAL_S, self._on_tick)

    def _on_tick(self) -> None:
        self._tasks.spawn(self.look())

    async def look(self) -> None:
        """Looks at all that is watched, and forgets what was asked for too long ago."""
        oldest = time.monotonic() - WATCH_S
        for key, history in list(self._histories.items()):
            if history.asked_s < oldest:
                del self._histories[key]
                self._known[key].history = None
        for subject, (asked_s, look) in list(self._watches.items()):
            try:
                if asked_s >= oldest:
                    await look()
                    continue
            except (ApiError, BrokerError):
                # It is gone.
                pass
            self._watches.pop(subject, None)
        self._timer = None
        self._wait()

    async def stop(self) -> None:
        """Looks no more."""
        self._watches.clear()
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.stop()
