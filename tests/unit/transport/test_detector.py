"""Failure detector: silences that matter, silences that do not, and our own."""

from __future__ import annotations

import random

from convoymq.transport.detector import Detector

BEAT = 100


def run(detector: Detector, gaps: list[int], start: int = 0) -> tuple[int, list[int]]:
    """Ticks every BEAT ms while peer 2 is heard after each of `gaps`; (end, suspicions)."""
    heard, now = [], start
    for gap in gaps:
        now += gap
        heard.append(now)
    suspected = []
    tick = start
    for at in heard:
        while tick + BEAT <= at:
            tick += BEAT
            if detector.tick(tick):
                suspected.append(tick)
        detector.heard(2, at)
    return now, suspected


def test_a_stopped_peer_is_suspected_within_half_a_second() -> None:
    detector = Detector(BEAT, 400, 2000)
    detector.linked(2, 0)
    now, suspected = run(detector, [BEAT] * 50)
    assert suspected == []
    start = now
    while not detector.tick(now):
        now += BEAT
    assert 400 < now - start <= 500
    assert detector.is_suspected(2)
    assert detector.heard(2, now + 50)
    assert not detector.is_suspected(2)


def test_scheduling_delays_raise_no_suspicion() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        detector = Detector(BEAT, 400, 2000)
        detector.linked(2, 0)
        _, suspected = run(
            detector, [BEAT + chance.choice([0, 0, 20, 100, 200]) for _ in range(500)]
        )
        assert suspected == [], seed


def test_a_peer_with_long_pauses_gets_a_longer_time_and_loses_it_again() -> None:
    detector = Detector(BEAT, 400, 2000)
    detector.linked(2, 0)
    run(detector, [BEAT, BEAT, 380] * 40)
    assert detector.peers[2].timeout_ms > 550
    run(detector, [BEAT] * 200, start=10**6)
    assert detector.peers[2].timeout_ms == 400


def test_no_history_stretches_the_time_beyond_the_cap() -> None:
    detector = Detector(BEAT, 400, 2000)
    detector.linked(2, 0)
    for i in range(1, 50):
        detector.heard(2, i * 60_000)
    assert detector.peers[2].timeout_ms == 2000


def test_our_own_stall_is_not_held_against_the_peers() -> None:
    detector = Detector(BEAT, 400, 2000)
    detector.linked(2, 0)
    run(detector, [BEAT] * 10)
    assert detector.tick(6_000) == []
    assert detector.stalls == 1
    assert detector.tick(6_100) == []
    assert detector.tick(6_200) == []
    assert detector.tick(6_300) == []
    assert detector.tick(6_400) == [2]


def test_traffic_is_life_and_an_unlinked_peer_is_not_judged() -> None:
    detector = Detector(BEAT, 400, 2000)
    detector.linked(2, 0)
    detector.linked(3, 0)
    for now in range(0, 3000, 10):
        detector.heard(2, now)
        if now % BEAT == 0:
            detector.tick(now)
    assert not detector.is_suspected(2)
    assert detector.is_suspected(3)
    detector.unlinked(3)
    assert not detector.is_suspected(3)
    assert not detector.heard(3, 5000)
