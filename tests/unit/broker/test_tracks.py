"""Samples become rates and histories."""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.broker.tracks import BESIDE, TIERS, History, Series, Track


def number_in(data: bytes) -> Mapping[str, float]:
    return {"n": float(data)}


def rate(track: Track, now_ms: int, *, falls: bool = False) -> float:
    return Series(track, number_in).rates(now_ms, falls=falls).get("n", 0.0)


def test_a_rate_is_that_of_the_last_second() -> None:
    track = Track(b"0", 0)
    assert rate(track, 0) == 0.0
    track.put(b"50", 1000)
    assert rate(track, 1000) == 50.0
    track.put(b"70", 2000)
    assert rate(track, 2500) == 20.0
    # Nothing was said since: nothing has changed.
    assert rate(track, 4600) == 0.0


def test_what_changes_after_a_long_time_changed_in_the_last_second() -> None:
    track = Track(b"0", 0)
    track.put(b"30", 3_600_000)
    assert rate(track, 3_600_000) == 30.0


def test_samples_between_two_seconds_do_not_shorten_the_interval() -> None:
    """A request reads what has changed before the next tick."""
    track = Track(b"0", 0)
    track.put(b"10", 1000)
    track.put(b"11", 1100)
    assert rate(track, 1100) == 10.0
    for tenth in range(2, 40):
        track.put(str(10 + tenth).encode(), 1000 + 100 * tenth)
    assert rate(track, 4900) == 10.0


def test_a_counter_that_fell_began_anew_and_a_length_may_fall() -> None:
    track = Track(b"50", 0)
    track.put(b"20", 1000)
    assert rate(track, 1000) == 0.0
    assert rate(track, 1000, falls=True) == -30.0


def test_a_history_has_the_last_sample_of_each_second_minute_and_hour() -> None:
    history = History()
    for second in range(2 * 86_400):
        if second % 7 == 0:
            history.add(second * 1000, str(second).encode())
    found = history.samples()
    assert len(found) <= sum(size + BESIDE for _, size in TIERS)
    times = [at_ms // 1000 for at_ms, _ in found]
    assert times == sorted(set(times))
    assert [at for at in times if at > times[-1] - 60] == list(
        range(times[-1] - 56, times[-1] + 1, 7)
    )
    minutes = {at // 60 for at in times if times[-1] - at < 3500}
    assert len(minutes) == 59
    assert times[0] // 3600 == times[-1] // 3600 - 23 - BESIDE
    assert all(float(data) == at_ms / 1000 for at_ms, data in found)


def test_a_history_begins_with_what_is_known() -> None:
    track = Track(b"5", 100)
    track.remember()
    track.put(b"6", 900)
    track.put(b"7", 1100)
    assert Series(track, number_in).samples() == [(900, {"n": 6.0}), (1100, {"n": 7.0})]
