"""What waits while a leader has no lease, and what is dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.kernels.batch import CommandBuilder
from convoymq.replication.raft.types import LEADER
from convoymq.shells.groups.append_fence import ANY_TERM, NO_TERM, WAITING_BYTES_MAX, AppendFence

TERM = 4


class Bench:
    """A replica that leads, as far as a fence looks at it."""

    def __init__(self) -> None:
        self.builder = CommandBuilder()
        self.dirty = 0
        self.greeted = 0
        host = SimpleNamespace(now=100, lease_until_ms=0, mark_dirty=lambda _: self._dirty())
        self.replica: Any = SimpleNamespace(
            builder=self.builder,
            host=host,
            term=TERM,
            dead=False,
            core=SimpleNamespace(role=LEADER),
            serving=SimpleNamespace(greet=self._greet),
        )
        self.fence = AppendFence(self.replica)

    def _dirty(self) -> None:
        self.dirty += 1

    def _greet(self) -> None:
        self.greeted += 1

    def send(self, size: int) -> None:
        self.builder.add(1, 0, 9, 1, 0, 0, bytes(size))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_it_is_open_in_its_term_under_the_lease(bench: Bench) -> None:
    fence, host = bench.fence, bench.replica.host
    assert not fence.is_open
    host.lease_until_ms = 101
    assert not fence.is_open
    fence.term = ANY_TERM
    assert fence.is_open
    fence.term = TERM
    assert fence.is_open
    bench.replica.term = TERM + 1
    assert not fence.is_open
    bench.replica.term = TERM
    host.now = 101
    assert not fence.is_open


def test_what_waits_goes_on_when_it_opens(bench: Bench) -> None:
    bench.send(10)
    assert bench.fence.holds_back()
    assert bench.builder.used
    bench.fence.reconsider()
    assert (bench.dirty, bench.greeted) == (1, 0)


def test_what_is_too_much_is_dropped_and_said_again(bench: Bench) -> None:
    bench.send(WAITING_BYTES_MAX)
    assert bench.fence.holds_back()
    assert not bench.builder.used
    bench.fence.reconsider()
    bench.fence.reconsider()
    assert (bench.dirty, bench.greeted) == (0, 1)


def test_a_follower_has_nothing_to_reconsider(bench: Bench) -> None:
    bench.send(10)
    bench.replica.core.role = LEADER + 1
    bench.fence.reconsider()
    assert bench.dirty == 0


def test_it_begins_closed(bench: Bench) -> None:
    assert bench.fence.term == NO_TERM
